//! Images in and out, through a daemon and without one.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use crate::common::{Site, content, wait_until};
use serde_json::json;

#[test]
fn a_file_comes_back_as_it_was() {
    for (mode, site) in Site::each() {
        let bytes = content((9 << 20) + 4096 + 77, 1);
        let file = site.path("disk.raw");
        std::fs::write(&file, &bytes).expect("a file");
        let imported = site.json(&["import", "disk.raw", "local/disk"]);
        assert_eq!(imported["image"]["size"], json!(bytes.len()), "{mode}");
        let written = imported["written"].as_u64().expect("a number") as usize;
        assert!(written < bytes.len() / 10 * 7, "{mode}: zeroes were written: {written}");
        // The name of the file is the image's if nothing is said.
        site.run(&["import", "disk.raw"]).ok();
        assert_eq!(site.json(&["ls"]), json!(["disk", "disk.raw"]), "{mode}");

        let exported = site.json(&["export", "local/disk", "out.raw"]);
        assert_eq!(exported["size"], json!(bytes.len()), "{mode}");
        assert!(std::fs::read(site.path("out.raw")).expect("the file") == bytes, "{mode}: the content differs");
        let on_disk = std::fs::metadata(site.path("out.raw")).expect("the file").blocks() * 512;
        assert!(on_disk < bytes.len() as u64 / 10 * 8, "{mode}: the holes are gone: {on_disk}");
        assert!(site.export("disk") == bytes, "{mode}: the content at standard output differs");
    }
}

#[test]
fn standard_input_grows_the_image() {
    for (mode, site) in Site::each() {
        for (name, bytes) in [
            ("empty", Vec::new()),
            ("odd", content(70_001, 2)),
            ("long", content(70 << 20, 3)),
            ("zero-tail", [vec![1; 4096], vec![0; 5 << 20]].concat()),
        ] {
            let done = site.run_with_input(&["import", "-", name, "--format", "json"], &bytes);
            assert_eq!(done.json()["image"]["size"], json!(bytes.len()), "{mode} {name}");
            assert!(site.export(name) == bytes, "{mode} {name}: the content differs");
        }
    }
}

#[test]
fn sparse_files_are_not_read_through() {
    for (mode, site) in Site::each() {
        let file = std::fs::File::create(site.path("sparse")).expect("a file");
        file.set_len(1 << 37).expect("a hole");
        std::os::unix::fs::FileExt::write_all_at(&file, b"end", (1 << 37) - 3).expect("written");
        let imported = site.json(&["import", "sparse"]);
        assert_eq!(imported["image"]["size"], json!(1u64 << 37), "{mode}");
        assert!(imported["written"].as_u64().expect("a number") <= 8192, "{mode}");
        site.json(&["export", "sparse", "sparse.out"]);
        let mut end = [0; 4];
        let out = std::fs::File::open(site.path("sparse.out")).expect("the file");
        std::os::unix::fs::FileExt::read_exact_at(&out, &mut end, (1 << 37) - 4).expect("read");
        assert_eq!(&end, b"\0end", "{mode}");
    }
}

#[test]
fn what_is_there_is_not_overwritten() {
    for (mode, site) in Site::each() {
        std::fs::write(site.path("file"), content(1 << 20, 4)).expect("a file");
        site.run(&["import", "file", "x"]).ok();
        site.run(&["import", "file", "x"]).fails(5);
        site.run_with_input(&["import", "-", "x"], &content(8 << 20, 5)).fails(5);
        std::fs::write(site.path("out"), b"precious").expect("a file");
        let said = site.run(&["export", "x", "out"]).fails(5);
        assert!(said.contains("--force"), "{mode}: {said}");
        assert_eq!(std::fs::read(site.path("out")).expect("the file"), b"precious", "{mode}");
        // What cannot be exported touches no file either.
        site.run(&["export", "nope", "out", "--force"]).fails(3);
        assert_eq!(std::fs::read(site.path("out")).expect("the file"), b"precious", "{mode}");
        site.run(&["export", "x", "out", "--force"]).ok();
        assert!(std::fs::read(site.path("out")).expect("the file") == content(1 << 20, 4), "{mode}");
        site.run(&["export", "x", "-", "--format", "json"]).fails(2);
    }
}

#[test]
fn sources_and_places_that_do_not_work() {
    for (mode, site) in Site::each() {
        site.run(&["import", "missing", "x"]).fails(3);
        let said = site.run(&["import", ".", "x"]).fails(2);
        assert!(said.contains("directory"), "{mode}: {said}");
        std::fs::write(site.path("file"), b"some bytes").expect("a file");
        site.run(&["import", "file", "nopool/x"]).fails(3);
        site.run(&["import", "file", "x", "--object-size", "3M"]).fails(2);
        site.run(&["import", "file", "x"]).ok();
        site.run(&["export", "x", "no/such/directory"]).fails(3);
        assert_eq!(site.json(&["ls"]), json!(["x"]), "{mode}");
    }
}

#[test]
fn a_full_store_leaves_no_half_image() {
    for (mode, site) in Site::each() {
        std::fs::write(site.path("big"), vec![1; 170 << 20]).expect("a file");
        let said = site.run(&["import", "big", "x"]).fails(7);
        assert!(said.contains("full"), "{mode}: {said}");
        assert_eq!(site.json(&["ls"]), json!([]), "{mode}");
        // What it took is free again.
        std::fs::write(site.path("small"), vec![2; 60 << 20]).expect("a file");
        site.run(&["import", "small", "x"]).ok();
        assert!(site.export("x") == vec![2; 60 << 20], "{mode}");
    }
}

#[test]
fn an_import_that_is_cut_off_leaves_nothing() {
    let site = Site::serving(&[]);
    let mut command = site.command(&["import", "-", "half"]);
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the command");
    let mut stdin = child.stdin.take().expect("its input");
    stdin.write_all(&content(4 << 20, 6)).expect("sent");
    wait_until("the import has begun", || site.json(&["ls"]) == json!(["half"]));
    // It exists, and no other command may use it.
    let said = site.run(&["export", "half", "-"]).fails(6);
    assert!(said.contains("being made"), "{said}");
    site.run(&["rm", "half"]).fails(6);
    child.kill().expect("killed");
    child.wait().expect("ended");
    wait_until("half an image is removed", || site.json(&["ls"]) == json!([]));
}

#[test]
fn streams_that_are_wrong_are_refused() {
    let site = Site::serving(&[]);
    let put = |name: &str, query: &str, body: &[u8]| {
        let mut stream = UnixStream::connect(site.data().join("control.sock")).expect("the control socket");
        let head = format!(
            "PUT /v1/images/local/{name}/data{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("sent");
        stream.write_all(body).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    let good = [&b"rbd diff v1\ns\x05\0\0\0\0\0\0\0w\0\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0hello"[..], b"e"].concat();
    assert!(put("good", "", &good).starts_with("HTTP/1.1 200"), "{}", put("good2", "", &good));
    assert_eq!(site.export("good"), b"hello");
    for (query, body, says) in [
        ("", &b"rubbish"[..], "rbd diff v1"),
        ("", &good[..good.len() - 1], "truncated"),
        ("", &good[..20], "truncated"),
        ("", b"rbd diff v1\nx", "unknown tag"),
        ("?size=4", &good, "of 5 bytes"),
        ("?size=x", &good, "size"),
        ("?object_size=5", &good, "object size"),
    ] {
        let answer = put("bad", query, body);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(says), "{query} {says}: {answer}");
    }
    assert!(!site.json(&["ls"]).as_array().expect("a list").contains(&json!("bad")));
}
