//! The status page: what it lists, how names are written, and how long it grows.

use std::os::unix::net::UnixStream;

use crate::common::{Nbd, Site, content, wait_until};

fn page(site: &Site, query: &str) -> String {
    let (status, html) = site.http(&format!("GET /{query}"));
    assert_eq!(status, 200, "{html}");
    html
}

/// Returns the rows of the table under a heading, each the text of its cells.
fn rows(html: &str, id: &str) -> Vec<Vec<String>> {
    let section = html.split(&format!("<h2 id={id}>")).nth(1).unwrap_or_else(|| panic!("no {id} in {html}"));
    let section = section.split("<h2").next().unwrap_or_default();
    let table = section.split("</table>").next().unwrap_or_default();
    let cell = |text: &str| {
        let text = text.split_once('>').map_or("", |(_, text)| text);
        // Elements within a cell are of no interest, names in it hold no `<` of their own.
        text.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text)).collect::<String>()
    };
    let cells = |row: &str| row.split("<td ").skip(1).map(cell).collect::<Vec<_>>();
    table.split("<tr>").skip(1).map(cells).collect()
}

fn create(site: &Site, pool: &str, image: &str) {
    let body = serde_json::json!({ "pool": pool, "image": image, "size": 8 << 20 }).to_string();
    let stream = UnixStream::connect(site.data().join("control.sock")).expect("the control socket");
    let head = format!("POST /v1/images\ncontent-length: {}\n\n{body}", body.len());
    let (status, answer) = post(stream, &head);
    assert_eq!(status, 200, "{answer}");
}

/// Sends a request with a body: [`common::http`] has none.
fn post(mut stream: UnixStream, request: &str) -> (u16, String) {
    use std::io::{Read, Write};
    let (head, body) = request.split_once("\n\n").expect("a head and a body");
    let (first, more) = head.split_once('\n').expect("a header");
    let head = format!("{first} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{more}\r\n\r\n{body}");
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, answer)
}

#[test]
fn images_exports_logs_and_peers_are_listed() {
    let mut site = Site::new();
    // The log is not written back meanwhile.
    site.delay_us = Some(3_600_000_000);
    site.start_with_flags(&["--peer", "127.0.0.1:0"]);
    let empty = page(&site, "");
    for id in ["exports", "images", "logs", "peers"] {
        assert_eq!(rows(&empty, id), Vec::<Vec<String>>::new(), "{id}");
    }
    assert!(empty.contains("forebay create local/disk1") && empty.contains("None is connected"), "{empty}");

    site.run(&["create", "local/plain", "--size", "8M"]).ok();
    site.run(&["create", "local/logged", "--size", "1G"]).ok();
    site.run(&["attach", "local/logged", "--nbd", "--log", &format!("ssd:{}:16M", site.path("logs").display())]).ok();
    let mut host = Nbd::connect(&site.data().join("nbd.sock"), "local/logged").expect("connects");
    host.write(0, &content(1 << 20, 1));
    let html = page(&site, "");
    assert_eq!(
        rows(&html, "images"),
        [["local/logged", "1 GiB", "nbd", "on"].as_slice(), &["local/plain", "8 MiB", "", ""]]
    );
    let exports = rows(&html, "exports");
    assert_eq!(
        (exports.len(), exports[0][0].as_str(), exports[0][3].as_str()),
        (1, "local/logged", "1"),
        "{exports:?}"
    );
    assert!(exports[0][1].starts_with("nbd+unix:///local/logged?socket="), "{exports:?}");
    let logs = rows(&html, "logs");
    let log = &logs[0];
    assert_eq!((log[0].as_str(), log[2].as_str()), ("local/logged", "on"), "{logs:?}");
    assert!(log[1].starts_with("ssd:") && log[3].ends_with('%') && log[3] != "0.0 %", "{logs:?}");
    assert!(log[4].ends_with("iB") && log[5].ends_with(" s"), "{logs:?}");

    // Another daemon.
    let addr = site.json(&["status"])["peer"][0].as_str().expect("an address").to_owned();
    let config = site.path("other.toml");
    std::fs::write(&config, format!("peers = ['{addr}']\n")).expect("written");
    let _other = Site::serving(&["--config", config.to_str().expect("a path")]);
    wait_until("the peer is on the page", || {
        rows(&page(&site, ""), "peers").iter().any(|peer| (peer[1].as_str(), peer[4].as_str()) == ("from", "open"))
    });
}

#[test]
fn what_hosts_do_not_reach_comes_first_with_the_reason() {
    let mut site = Site::serving(&[]);
    for image in ["a", "z"] {
        site.run(&["create", image, "--size", "8M"]).ok();
        site.run(&["attach", image, "--nbd"]).ok();
    }
    site.stop();
    let path = site.data().join("targets.json");
    let text = std::fs::read_to_string(&path).expect("the exports");
    std::fs::write(&path, text.replace("\"z\"", "\"gone\"")).expect("written");
    site.start();
    let exports = rows(&page(&site, ""), "exports");
    assert_eq!((exports[0][0].as_str(), exports[1][0].as_str()), ("local/gone", "local/a"), "{exports:?}");
    assert_eq!(exports[0][1], "there is no image local/gone");
}

#[test]
fn names_are_text_and_the_page_needs_nothing_else() {
    let site = Site::serving(&["--http", "127.0.0.1:0"]);
    let name = "<script>alert('1')</script>&\"".replace('/', "|");
    create(&site, "local", &name);
    site.run(&["attach", &name, "--nbd"]).ok();
    let html = page(&site, "");
    assert!(!html.contains("<script"), "{html}");
    let shown = "local/&lt;script&gt;alert(&#39;1&#39;)&lt;|script&gt;&amp;&quot;";
    assert_eq!((rows(&html, "images")[0][0].as_str(), rows(&html, "exports")[0][0].as_str()), (shown, shown));
    assert!(html.contains("name=viewport content='width=device-width,initial-scale=1'"));
    for elsewhere in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!html.contains(elsewhere), "{elsewhere} in {html}");
    }
    let stream = UnixStream::connect(site.data().join("control.sock")).expect("the control socket");
    let (_, answer) = post(stream, "GET /\naccept: text/html\n\n");
    let policy = "content-security-policy: default-src 'none'; style-src 'unsafe-inline'";
    assert!(answer.contains(policy) && answer.contains("content-type: text/html; charset=utf-8"), "{answer}");
}

#[test]
fn long_lists_come_in_pages() {
    let site = Site::serving(&[]);
    for at in 0..401 {
        create(&site, "ram", &format!("image-{at:04}"));
    }
    site.run(&["attach", "ram/image-0400", "--nbd"]).ok();
    let of = |query: &str| {
        let html = page(&site, query);
        let images = rows(&html, "images");
        assert!(html.contains("Images <small>401</small>"), "{query}: {html}");
        (images.len(), images[0][0].clone(), html)
    };
    let (count, first, html) = of("");
    assert_eq!((count, first.as_str()), (200, "ram/image-0000"));
    assert!(html.contains("1 to 200 of 401") && html.contains("href='?page=2&amp;exports=1#images'>next<"), "{html}");
    let (count, first, html) = of("?page=3");
    assert_eq!((count, first.as_str()), (1, "ram/image-0400"));
    assert!(html.contains("401 to 401 of 401") && html.contains(">previous<") && !html.contains(">next<"), "{html}");
    // Who types something else sees a page all the same.
    assert_eq!(of("?page=99").1, "ram/image-0400");
    for query in ["?page=0", "?page=-1", "?page=x", "?exports=7", "?other=1", "?page="] {
        assert_eq!(of(query).1, "ram/image-0000", "{query}");
    }
}
