//! HTML of the status page.

use std::fmt::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::api::{DaemonStatus, ImageExport, Peer, PoolInfo};
use crate::engine::overview::{ImageRow, LogRow, Overview, OverviewPage, PAGE_ROWS, UnlistedPool};
use crate::spec::visible;
use crate::units::{Size, duration, percent};

const STYLE: &str = include_str!("style.css");

/// Returns the HTML of the page.
pub fn render(overview: &Overview) -> String {
    let mut html = String::new();
    // Writing to a String does not fail.
    let _ = write_page(&mut html, overview);
    html
}

fn write_page(html: &mut String, overview: &Overview) -> fmt::Result {
    let Overview { status, exports, images, unlisted, logs } = overview;
    write!(
        html,
        "<!doctype html><html lang=en><head><meta charset=utf-8>\
         <meta name=viewport content='width=device-width,initial-scale=1'>\
         <meta http-equiv=refresh content=10><title>Forebay</title><style>{STYLE}</style></head><body>\
         <h1>Forebay</h1><p>Version {}, process {}, {} core(s) on {}, up {}, {} connection(s).</p>",
        Text(&status.version),
        status.pid,
        status.cores,
        Text(&status.driver),
        duration(status.uptime_s),
        status.connections,
    )?;
    write_pools(html, &status.pools)?;
    write_exports(html, status, exports, images.number)?;
    write_images(html, images, unlisted, exports.number)?;
    write_logs(html, logs)?;
    write_peers(html, status)?;
    html.push_str("<p><a href=metrics>Metrics</a> · <a href=openapi.json>API</a></p></body></html>");
    Ok(())
}

fn write_pools(html: &mut String, pools: &[PoolInfo]) -> fmt::Result {
    html.push_str("<h2>Pools</h2>");
    table(html, &["Pool", "Kind", "Used", "Capacity", "Fill", "Objects"], &[2, 3, 5])?;
    for pool in pools {
        html.push_str("<tr>");
        cell(html, "Pool", Text(&pool.name))?;
        cell(html, "Kind", Text(&pool.kind))?;
        number(html, "Used", Size(pool.used))?;
        number(html, "Capacity", Size(pool.capacity))?;
        cell(html, "Fill", Fill(pool.used, pool.capacity))?;
        number(html, "Objects", pool.objects)?;
    }
    html.push_str("</table>");
    for (pool, limit) in pools.iter().filter_map(|pool| Some((&pool.name, pool.limited_by.as_ref()?))) {
        write!(html, "<p class=s>{} is limited by {}</p>", Text(pool), Text(limit))?;
    }
    for (pool, why) in pools.iter().filter_map(|pool| Some((&pool.name, pool.refuses_writes.as_ref()?))) {
        write!(html, "<p class=e>{} takes no writes: {}</p>", Text(pool), Text(why))?;
    }
    for (pool, what) in pools.iter().filter_map(|pool| Some((&pool.name, pool.needs_repair.as_ref()?))) {
        write!(html, "<p class=s>{} needs a repair: {}</p>", Text(pool), Text(what))?;
    }
    Ok(())
}

fn write_exports(
    html: &mut String,
    status: &DaemonStatus,
    exports: &OverviewPage<ImageExport>,
    images: usize,
) -> fmt::Result {
    heading(html, "exports", "Exports", exports.total)?;
    if exports.total == 0 {
        html.push_str("<p class=s>None yet: <code>forebay attach local/disk1 --nbd</code></p>");
        return Ok(());
    }
    if status.unserved > 0 {
        write!(html, "<p class=e>{} not served; <code>forebay targets</code> says more.</p>", status.unserved)?;
    }
    table(html, &["Image", "URI", "Access", "Connections"], &[3])?;
    for target in &exports.rows {
        html.push_str("<tr>");
        cell(html, "Image", Spec(&target.pool, &target.image))?;
        let name = if target.error.is_some() { "Reason" } else { "URI" };
        match (&target.error, &target.uri) {
            (Some(failure), _) => cell(html, name, Tagged("span class=e", "span", Text(&failure.message)))?,
            (None, Some(uri)) => cell(html, name, Tagged("code", "code", Text(uri)))?,
            (None, None) => cell(html, name, "not served")?,
        }
        cell(html, "Access", if target.read_only { "read-only" } else { "read-write" })?;
        number(html, "Connections", target.connections)?;
    }
    html.push_str("</table>");
    turn(html, exports, "exports", |number| format!("?page={images}&amp;exports={number}"))
}

fn write_images(
    html: &mut String,
    images: &OverviewPage<ImageRow>,
    unlisted: &[UnlistedPool],
    exports: usize,
) -> fmt::Result {
    heading(html, "images", "Images", images.total)?;
    for other in unlisted {
        write!(html, "<p class=e>Images of {} are not listed: {}</p>", Text(&other.pool), Text(&other.reason))?;
    }
    if images.total == 0 {
        html.push_str("<p class=s>None yet: <code>forebay create local/disk1 --size 10G</code></p>");
        return Ok(());
    }
    table(html, &["Image", "Size", "Exports", "Write log"], &[1])?;
    for image in &images.rows {
        html.push_str("<tr>");
        cell(html, "Image", Spec(&image.pool, &image.name))?;
        match image.size {
            Some(size) => number(html, "Size", Size(size))?,
            None => number(html, "Size", "?")?,
        }
        let fronts: Vec<&str> = image.fronts.iter().map(|front| front.name()).collect();
        cell(html, "Exports", fronts.join(", "))?;
        cell(html, "Write log", Text(image.log.as_deref().unwrap_or_default()))?;
    }
    html.push_str("</table>");
    turn(html, images, "images", |number| format!("?page={number}&amp;exports={exports}"))
}

fn write_logs(html: &mut String, logs: &OverviewPage<LogRow>) -> fmt::Result {
    heading(html, "logs", "Write logs", logs.total)?;
    if logs.total == 0 {
        html.push_str("<p class=s>None is open; <code>forebay log ls</code> lists unused ones, too.</p>");
        return Ok(());
    }
    table(html, &["Image", "Log", "State", "Fill", "Dirty", "Since"], &[4, 5])?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    for LogRow { log, used, capacity } in &logs.rows {
        html.push_str("<tr>");
        cell(html, "Image", Text(&log.image))?;
        cell(html, "Log", Tagged("code", "code", Text(&log.place.to_string())))?;
        match &log.reason {
            Some(reason) => {
                cell(html, "State", Tagged("span class=e", "span", Text(&format!("{}: {reason}", log.state))))?
            }
            None => cell(html, "State", Text(&log.state))?,
        }
        cell(html, "Fill", Fill(*used, *capacity))?;
        number(html, "Dirty", Size(log.dirty_bytes))?;
        match log.dirty_since_ms {
            Some(since) => {
                let age = now.saturating_sub(Duration::from_millis(since));
                number(html, "Since", format_args!("{:.1} s", age.as_secs_f64()))?;
            }
            None => number(html, "Since", "")?,
        }
    }
    html.push_str("</table>");
    if logs.total > PAGE_ROWS {
        write!(html, "<p class=s>The first {PAGE_ROWS}; <code>forebay log ls</code> lists all.</p>")?;
    }
    Ok(())
}

fn write_peers(html: &mut String, status: &DaemonStatus) -> fmt::Result {
    heading(html, "peers", "Peers", status.peers.len())?;
    if status.peers.is_empty() {
        html.push_str(match status.peer.is_empty() {
            true => "<p class=s>This daemon is not set up for others: <code>serve --peer</code>.</p>",
            false => "<p class=s>None is connected.</p>",
        });
        return Ok(());
    }
    table(html, &["Peer", "Direction", "Name", "Transport", "State"], &[])?;
    for peer in status.peers.iter().take(PAGE_ROWS) {
        let Peer { address, name, outgoing, state, transport, reason, .. } = peer;
        html.push_str("<tr>");
        cell(html, "Peer", Text(address))?;
        cell(html, "Direction", if *outgoing { "to" } else { "from" })?;
        cell(html, "Name", Text(name))?;
        cell(html, "Transport", Text(transport))?;
        match reason {
            Some(reason) => cell(html, "State", Tagged("span class=e", "span", Text(&format!("{state}: {reason}"))))?,
            None => cell(html, "State", Text(state))?,
        }
    }
    html.push_str("</table>");
    if status.peers.len() > PAGE_ROWS {
        write!(html, "<p class=s>The first {PAGE_ROWS}; <code>forebay status</code> lists all.</p>")?;
    }
    Ok(())
}

fn heading(html: &mut String, id: &str, title: &str, total: usize) -> fmt::Result {
    match total {
        0 => write!(html, "<h2 id={id}>{title}</h2>"),
        _ => write!(html, "<h2 id={id}>{title} <small>{total}</small></h2>"),
    }
}

/// Begins a table; the columns in `numbers` are right-aligned.
fn table(html: &mut String, columns: &[&str], numbers: &[usize]) -> fmt::Result {
    html.push_str("<table><tr class=h>");
    for (at, column) in columns.iter().enumerate() {
        let class = if numbers.contains(&at) { " class=n" } else { "" };
        write!(html, "<th{class}>{column}")?;
    }
    Ok(())
}

/// Writes a cell; on a phone `column` is shown beside it.  The value writes HTML.
fn cell(html: &mut String, column: &str, value: impl fmt::Display) -> fmt::Result {
    write!(html, "<td data-l='{column}'>{value}")
}

fn number(html: &mut String, column: &str, value: impl fmt::Display) -> fmt::Result {
    write!(html, "<td class=n data-l='{column}'>{value}")
}

/// Writes which rows are shown, with links to the other pages.
fn turn<T>(html: &mut String, page: &OverviewPage<T>, id: &str, link: impl Fn(usize) -> String) -> fmt::Result {
    if page.pages == 1 {
        return Ok(());
    }
    let first = (page.number - 1) * PAGE_ROWS + 1;
    write!(html, "<nav><span class=s>{first} to {} of {} </span> ", first + page.rows.len() - 1, page.total)?;
    let ways = [
        ("first", 1, page.number > 1),
        ("previous", page.number.saturating_sub(1), page.number > 1),
        ("next", page.number + 1, page.number < page.pages),
        ("last", page.pages, page.number < page.pages),
    ];
    for (name, number, _) in ways.iter().filter(|(.., there)| *there) {
        write!(html, "<a href='{}#{id}'>{name}</a>", link(*number))?;
    }
    html.push_str("</nav>");
    Ok(())
}

/// Text with HTML markup and invisible characters escaped.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in visible(self.0).chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Image as `POOL/IMAGE`.
struct Spec<'a>(&'a str, &'a str);

impl fmt::Display for Spec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Text(self.0), Text(self.1))
    }
}

/// HTML element: opening tag, element name, value.
struct Tagged<'a, T>(&'a str, &'a str, T);

impl<T: fmt::Display> fmt::Display for Tagged<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{}>{}</{}>", self.0, self.2, self.1)
    }
}

/// Used share of a total, rendered as a bar and in percent.
struct Fill(u64, u64);

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = percent(self.0, self.1);
        write!(f, "<span><meter max={} value={}></meter> {shown}</span>", self.1.max(1), self.0.min(self.1.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::api::Front;

    fn overview(images: Vec<ImageRow>, targets: Vec<ImageExport>) -> Overview {
        let status = DaemonStatus {
            ready: true,
            version: "1".into(),
            pid: 1,
            uptime_s: 61,
            cores: 1,
            driver: "epoll".into(),
            data: PathBuf::new(),
            control: PathBuf::new(),
            http: None,
            nbd: Vec::new(),
            nvme: Vec::new(),
            nvme_nqn: String::new(),
            iscsi: Vec::new(),
            iscsi_name: String::new(),
            vhost_sockets: 0,
            pools: Vec::new(),
            targets: targets.len(),
            unserved: 0,
            connections: 0,
            peer: Vec::new(),
            peers: Vec::new(),
            read_cache: None,
        };
        let unlisted = vec![UnlistedPool { pool: "<p>".into(), reason: "a & b".into() }];
        let (exports, images) = (OverviewPage::of(targets, 1), OverviewPage::of(images, 1));
        Overview { status, exports, images, unlisted, logs: OverviewPage::of(Vec::new(), 1) }
    }

    fn image(name: &str) -> ImageRow {
        ImageRow {
            pool: "local".into(),
            name: name.into(),
            size: Some(10 << 30),
            fronts: vec![Front::Nbd, Front::Nvme],
            log: Some("on".into()),
        }
    }

    #[test]
    fn nothing_of_a_name_becomes_markup() {
        assert_eq!(Text("<b a='1'>&\"").to_string(), "&lt;b a=&#39;1&#39;&gt;&amp;&quot;");
        let html = render(&overview(vec![image("<script>x</script>"), image("a\u{202e}b\u{7}")], Vec::new()));
        assert!(html.contains("local/&lt;script&gt;x&lt;/script&gt;") && !html.contains("<script"), "{html}");
        assert!(html.contains(r"local/a\u{202e}b\u{7}"), "what nobody sees is written out");
        assert!(html.contains("Images of &lt;p&gt; are not listed: a &amp; b"));
        assert!(html.contains("up 1 min 1 s"));
    }

    #[test]
    fn a_page_of_a_long_list_is_bounded() {
        let longest = "\"".repeat(forebay_image::NAME_LEN_MAX);
        let target = |name: &str| ImageExport {
            pool: "local".into(),
            image: name.into(),
            front: Front::Nbd,
            read_only: false,
            uri: Some(format!("nbd://[::1]:10809/local/{}", "%22".repeat(name.len()))),
            uris: Vec::new(),
            vhost: None,
            connections: 1,
            log: None,
            error: None,
            qos: None,
            own_blocks: None,
            warnings: Vec::new(),
        };
        let typical: Vec<ImageRow> = (0..10_000).map(|at| image(&format!("volume-{at:08}"))).collect();
        let html = render(&overview(typical, Vec::new()));
        assert!(html.len() < 64 << 10, "{} bytes", html.len());
        assert!(html.contains("1 to 200 of 10000") && html.contains("href='?page=2&amp;exports=1#images'"));
        assert!(!html.contains(">previous<") && html.contains("href='?page=50&amp;exports=1#images'>last<"));
        // Names of maximum length, with characters that each take six bytes when escaped.
        let worst = render(&overview(vec![image(&longest); 10_000], vec![target(&longest); 10_000]));
        assert!(worst.len() < 2 << 20, "{} bytes", worst.len());
    }

    #[test]
    fn nothing_comes_from_elsewhere() {
        let html = render(&overview(vec![image("a")], Vec::new()));
        for bad in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!html.contains(bad), "{bad}");
        }
    }
}
