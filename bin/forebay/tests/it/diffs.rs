//! Changes and copies of images: listed, exported, imported, merged; with a daemon and without one.

use serde_json::{Value, json};

use crate::common::{Nbd, Site, content};

const MIB: usize = 1 << 20;

/// Range of a diff: bytes at an offset, or a number of zeroes.
enum Range<'a> {
    Data(usize, &'a [u8]),
    Zero(usize, usize),
}

/// Encodes a diff as Ceph documents the format, independently of the program.
fn diff(from: Option<&str>, to: Option<&str>, size: usize, ranges: &[Range<'_>]) -> Vec<u8> {
    let mut out = b"rbd diff v1\n".to_vec();
    for (tag, name) in [(b'f', from), (b't', to)] {
        if let Some(name) = name {
            out.push(tag);
            out.extend_from_slice(&(name.len() as u32).to_le_bytes());
            out.extend_from_slice(name.as_bytes());
        }
    }
    out.push(b's');
    out.extend_from_slice(&(size as u64).to_le_bytes());
    for range in ranges {
        let (tag, offset, len) = match range {
            Range::Data(offset, data) => (b'w', *offset, data.len()),
            Range::Zero(offset, len) => (b'z', *offset, *len),
        };
        out.push(tag);
        out.extend_from_slice(&(offset as u64).to_le_bytes());
        out.extend_from_slice(&(len as u64).to_le_bytes());
        if let Range::Data(_, data) = range {
            out.extend_from_slice(data);
        }
    }
    out.push(b'e');
    out
}

/// Makes `disk`: 9 MiB at the snapshot `one`, and changed, with 10 MiB, at `two`.  Returns both contents.
fn make_disk(site: &Site) -> (Vec<u8>, Vec<u8>) {
    let old = content(9 * MIB, 1);
    let new = content(MIB + 8192, 2);
    site.run_with_input(&["import", "-", "disk"], &old).ok();
    site.run(&["snap", "create", "disk@one"]).ok();
    let ranges = [Range::Data(MIB, &new), Range::Zero(4 * MIB, 4 * MIB)];
    let changes = diff(Some("one"), Some("two"), 10 * MIB, &ranges);
    site.run_with_input(&["import-diff", "-", "disk"], &changes).ok();
    let mut changed = old.clone();
    changed.resize(10 * MIB, 0);
    changed[MIB..MIB + new.len()].copy_from_slice(&new);
    changed[4 * MIB..8 * MIB].fill(0);
    (old, changed)
}

fn names(site: &Site, image: &str) -> Vec<String> {
    let listed = site.json(&["snap", "ls", image]);
    let name = |snapshot: &Value| snapshot["name"].as_str().expect("a name").to_owned();
    listed.as_array().expect("a list").iter().map(name).collect()
}

/// Applies listed changes to a copy of the older content.
fn apply(listed: &Value, old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut copy = old.to_vec();
    copy.resize(new.len(), 0);
    for row in listed.as_array().expect("a list") {
        let number = |key: &str| row[key].as_u64().expect("a number") as usize;
        let range = number("offset")..number("offset") + number("length");
        match row["exists"].as_str() {
            Some("true") => copy[range.clone()].copy_from_slice(&new[range]),
            Some("false") => copy[range].fill(0),
            other => panic!("{other:?}"),
        }
    }
    copy
}

#[test]
fn lists_have_the_shapes_of_rbd() {
    for (mode, site) in Site::each() {
        let (old, new) = make_disk(&site);
        assert!(site.export("disk@one") == old && site.export("disk@two") == new, "{mode}");
        let listed = site.json(&["diff", "disk@two", "--from-snap", "one"]);
        assert!(apply(&listed, &old, &new) == new, "{mode}: changes are left out: {listed}");
        let changed: u64 =
            listed.as_array().expect("a list").iter().map(|row| row["length"].as_u64().expect("bytes")).sum();
        assert!(changed < 6 * MIB as u64, "{mode}: {listed}");
        let whole = site.json(&["diff", "disk@two", "--from-snap", "one", "--whole-object"]);
        let row = |offset: usize, length: usize| json!({"offset": offset, "length": length, "exists": "true"});
        assert!(apply(&whole, &old, &new) == new, "{mode}: changes are left out: {whole}");
        assert_eq!(whole[0], row(0, 4 * MIB), "{mode}: {whole}");
        assert_eq!(site.json(&["diff", "disk", "--from-snap", "two"]), json!([]), "{mode}");
        assert_eq!(site.run(&["diff", "disk", "--from-snap", "two"]).ok(), "", "{mode}");

        site.run(&["create", "small", "--size", "8M"]).ok();
        let first = diff(None, Some("s"), 8 * MIB, &[Range::Data(4 * MIB, &[9; 4096])]);
        site.run_with_input(&["import-diff", "-", "small"], &first).ok();
        let second = diff(Some("s"), None, 8 * MIB, &[Range::Data(0, &[9; 8192]), Range::Zero(4 * MIB, 4096)]);
        site.run_with_input(&["import-diff", "-", "small"], &second).ok();
        let table = site.run(&["diff", "small", "--from-snap", "s"]).ok();
        assert_eq!(table, "Offset   Length  Type\n0        8192    data\n4194304  4096    zero\n", "{mode}");
        assert_eq!(
            site.run(&["diff", "small", "--from-snap", "s", "--format", "json"]).ok(),
            "[{\"offset\":0,\"length\":8192,\"exists\":\"true\"},{\"offset\":4194304,\"length\":4096,\"exists\":\"false\"}]\n",
            "{mode}"
        );
        assert_eq!(site.json(&["diff", "small@s"]), json!([row(4 * MIB, 4096)]), "{mode}");
        let said = site.run(&["diff", "small", "--from-snap", "none"]).fails(3);
        assert!(said.contains("there is no snapshot local/small@none"), "{mode}: {said}");
        let said = site.run(&["diff", "nope"]).fails(3);
        assert!(said.contains("there is no image local/nope"), "{mode}: {said}");
        let said = site.run(&["diff", "disk@one", "--from-snap", "two"]).fails(2);
        assert!(said.contains("local/disk@two is newer than local/disk@one"), "{mode}: {said}");
    }
}

#[test]
fn exported_changes_are_imported_once() {
    for (mode, site) in Site::each() {
        let (old, new) = make_disk(&site);
        let exported = site.json(&["export-diff", "disk@one", "one.diff"]);
        assert_eq!(exported["size"], json!(9 * MIB), "{mode}");
        site.run(&["export-diff", "disk@two", "--from-snap", "one", "two.diff"]).ok();
        let file = |name: &str| std::fs::read(site.path(name)).expect("a file");
        let head = diff(Some("one"), Some("two"), 10 * MIB, &[]);
        assert!(file("two.diff").starts_with(&head[..head.len() - 1]), "{mode}");
        assert!(file("two.diff").len() < 4 * MIB, "{mode}: {}", file("two.diff").len());
        let out = site.run(&["export-diff", "disk@two", "--from-snap", "one", "-"]).0.stdout;
        assert_eq!(out.len(), file("two.diff").len(), "{mode}: standard output has something else");
        let said = site.run(&["export-diff", "disk@two", "two.diff"]).fails(5);
        assert!(said.contains("--force"), "{mode}: {said}");
        site.run(&["export-diff", "disk@none", "none.diff"]).fails(3);
        site.run(&["export-diff", "disk", "--from-snap", "none", "none.diff"]).fails(3);
        site.run(&["export-diff", "disk"]).fails(2);
        assert!(!site.path("none.diff").exists(), "{mode}");

        site.run(&["create", "copy", "--size", "1M"]).ok();
        let said = site.run(&["import-diff", "two.diff", "copy"]).fails(3);
        assert!(said.contains("begin at the snapshot 'one', which local/copy does not have"), "{mode}: {said}");
        let done = site.json(&["import-diff", "one.diff", "copy"]);
        assert_eq!((&done["snapshot"], &done["size"]), (&json!("one"), &json!(9 * MIB)), "{mode}: {done}");
        // One that was cut off is repeated.
        let bytes = file("two.diff");
        std::fs::write(site.path("cut.diff"), &bytes[..bytes.len() - 70]).expect("a file");
        let said = site.run(&["import-diff", "cut.diff", "copy"]).fails(2);
        assert!(said.contains("truncated (at byte"), "{mode}: {said}");
        assert_eq!(names(&site, "copy"), ["one"], "{mode}");
        site.run(&["import-diff", "two.diff", "copy"]).ok();
        assert_eq!(names(&site, "copy"), ["one", "two"], "{mode}");
        assert!(site.export("copy@one") == old, "{mode}: the older snapshot");
        assert!(site.export("copy@two") == new && site.export("copy") == new, "{mode}: the newer snapshot");
        let said = site.run(&["import-diff", "two.diff", "copy"]).fails(5);
        assert!(said.contains("local/copy@two, which exists already"), "{mode}: {said}");

        // What no such stream has.
        for (bytes, says) in [
            (diff(None, None, MIB, &[Range::Data(MIB - 5, &[1; 10])]), "past the image's end at 1048576"),
            (b"rbd diff v1\nx".to_vec(), "unknown tag"),
            (b"nothing".to_vec(), "export-diff"),
            ([diff(None, None, MIB, &[]), b"more".to_vec()].concat(), "after its end"),
        ] {
            let said = site.run_with_input(&["import-diff", "-", "copy"], &bytes).fails(2);
            assert!(said.contains(says), "{mode}: {said}");
        }
        // The snapshot is not created although its changes are whole.
        let more = [diff(None, Some("extra"), MIB, &[]), b"more".to_vec()].concat();
        site.run_with_input(&["import-diff", "-", "copy"], &more).fails(2);
        assert_eq!(names(&site, "copy"), ["one", "two"], "{mode}");
        site.run(&["import-diff", "two.diff"]).fails(2);
        site.run(&["import-diff", "two.diff", "nope"]).fails(3);
        // Changes are not the content of an image.
        let said = site.run(&["import", "two.diff", "other"]).fails(2);
        assert!(said.contains("forebay import-diff two.diff"), "{mode}: {said}");
    }
}

#[test]
fn merged_changes_are_those_of_both() {
    for (mode, site) in Site::each() {
        let (_, new) = make_disk(&site);
        site.run(&["export-diff", "disk@one", "one.diff"]).ok();
        site.run(&["export-diff", "disk@two", "--from-snap", "one", "two.diff"]).ok();
        site.run(&["merge-diff", "one.diff", "two.diff", "both.diff"]).ok();
        site.run(&["create", "copy", "--size", "20M"]).ok();
        site.run(&["import-diff", "both.diff", "copy"]).ok();
        assert!(site.export("copy@two") == new, "{mode}: the merged changes differ");
        assert_eq!(names(&site, "copy"), ["two"], "{mode}");
        let said = site.run(&["merge-diff", "two.diff", "one.diff", "wrong.diff"]).fails(2);
        assert!(said.contains("leads to 'two', and the second begins at no snapshot"), "{mode}: {said}");
        site.run(&["merge-diff", "one.diff", "two.diff", "both.diff"]).fails(5);
        // The result replaces an input once it is complete; after a failure that is as it was.
        let read = |name: &str| std::fs::read(site.path(name)).expect("a file");
        std::fs::copy(site.path("one.diff"), site.path("again.diff")).expect("a copy");
        std::fs::write(site.path("short.diff"), &read("two.diff")[..read("two.diff").len() - 1]).expect("a file");
        site.run(&["merge-diff", "again.diff", "short.diff", "again.diff", "--force"]).fails(2);
        assert!(read("again.diff") == read("one.diff"));
        site.run(&["merge-diff", "again.diff", "two.diff", "again.diff", "--force"]).ok();
        assert!(read("again.diff") == read("both.diff"));
        let left = std::fs::read_dir(site.path("again.diff").parent().expect("a directory")).expect("listed");
        let left: Vec<_> = left.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        assert!(!left.iter().any(|name| name.ends_with(".new")), "{left:?}");
        site.run(&["merge-diff", "one.diff", "none.diff", "wrong.diff"]).fails(3);
        site.run(&["merge-diff", "one.diff", "-", "wrong.diff"]).fails(2);
        assert!(!site.path("wrong.diff").exists(), "{mode}");

        // An image that lost its end, and got it again.
        let (a, b, c) = ([1; 4096], [2; 4096], [3; 4096]);
        let first = diff(None, Some("x"), 8192, &[Range::Data(0, &a), Range::Zero(4096, 4096)]);
        let second = diff(Some("x"), Some("y"), 20480, &[Range::Data(2048, &b), Range::Data(16384, &c)]);
        std::fs::write(site.path("second"), &second).expect("a file");
        let merged = site.run_with_input(&["merge-diff", "-", "second", "-"], &first).0.stdout;
        let want = diff(
            None,
            Some("y"),
            20480,
            &[
                Range::Data(0, &a[..2048]),
                Range::Data(2048, &b),
                Range::Zero(6144, 2048),
                Range::Zero(8192, 8192),
                Range::Data(16384, &c),
            ],
        );
        assert!(merged == want, "{mode}: {merged:?}");
        let shrunk = diff(Some("x"), Some("y"), 2048, &[]);
        std::fs::write(site.path("second"), &shrunk).expect("a file");
        let merged = site.run_with_input(&["merge-diff", "-", "second", "-"], &first).0.stdout;
        assert!(merged == diff(None, Some("y"), 2048, &[Range::Data(0, &a[..2048])]), "{mode}: {merged:?}");
        let unordered = diff(None, Some("x"), 8192, &[Range::Data(4096, &a), Range::Zero(0, 4096)]);
        let said = site.run_with_input(&["merge-diff", "-", "second", "-"], &unordered).0;
        assert_eq!(said.status.code(), Some(2), "{mode}");
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("not in order: 0 after 8192"), "{mode}: {said}");
    }
}

#[test]
fn images_with_snapshots_come_back() {
    for (mode, site) in Site::each() {
        let (old, new) = make_disk(&site);
        site.run(&["snap", "protect", "disk@one"]).ok();
        let exported = site.json(&["export", "--export-format", "2", "disk", "disk.rbd"]);
        assert_eq!(exported["size"], json!(10 * MIB), "{mode}");
        let bytes = std::fs::read(site.path("disk.rbd")).expect("a file");
        assert!(bytes.starts_with(b"rbd image v2\nO\x08\0\0\0\0\0\0\0\x16"), "{mode}");
        if mode == "daemon" {
            let imported = site.json(&["import", "--export-format", "2", "disk.rbd", "ram/disk"]);
            assert_eq!(imported["image"]["size"], json!(10 * MIB), "{mode}");
            assert_eq!(names(&site, "ram/disk"), ["one", "two"], "{mode}");
            assert_eq!(site.json(&["snap", "ls", "ram/disk"])[0]["protected"], json!("true"), "{mode}");
            assert_eq!(site.json(&["snap", "ls", "ram/disk"])[1]["protected"], json!("false"), "{mode}");
            site.run(&["deep", "cp", "ram/disk", "local/back"]).ok();
            assert!(site.export("back@one") == old && site.export("back") == new, "{mode}");
            site.run(&["snap", "unprotect", "back@one"]).ok();
            site.run(&["snap", "purge", "back"]).ok();
            site.run(&["rm", "back"]).ok();
        }
        site.run(&["import", "--export-format", "2", "disk.rbd", "again", "--object-size", "64K"]).ok();
        assert_eq!(site.json(&["info", "again"])["object_size"], json!(65536), "{mode}");
        for (image, want) in [("again@one", &old), ("again@two", &new), ("again", &new)] {
            assert!(site.export(image) == *want, "{mode}: {image} differs");
        }
        let said = site.run(&["import", "--export-format", "2", "disk.rbd", "again"]).fails(5);
        assert!(said.contains("exists already"), "{mode}: {said}");
        // Part of an image is not left behind, nor are its snapshots.
        std::fs::write(site.path("cut.rbd"), &bytes[..bytes.len() - 1]).expect("a file");
        let said = site.run(&["import", "--export-format", "2", "cut.rbd", "part"]).fails(2);
        assert!(said.contains("truncated"), "{mode}: {said}");
        let listed = site.json(&["ls"]);
        assert_eq!(listed, json!(["again", "disk"]), "{mode}");
        for args in [
            &["export", "--export-format", "2", "disk@one", "x"][..],
            &["export", "--export-format", "3", "disk", "x"],
            &["import", "disk.rbd", "x"],
        ] {
            site.run(args).fails(2);
        }
        let said = site.run(&["import", "disk.rbd", "x"]).fails(2);
        assert!(said.contains("--export-format 2 disk.rbd"), "{mode}: {said}");
        let out = site.run(&["export", "--export-format", "2", "disk", "-"]).0.stdout;
        assert!(out == bytes, "{mode}: standard output has something else");
        let copied = site.run_with_input(&["import", "--export-format", "2", "-", "piped"], &out);
        copied.ok();
        assert!(site.export("piped@one") == old, "{mode}");
    }
}

#[test]
fn copies_of_images() {
    for (mode, site) in Site::each() {
        let (old, new) = make_disk(&site);
        let made = site.json(&["cp", "disk", "copy"]);
        assert_eq!((&made["name"], &made["size"]), (&json!("copy"), &json!(10 * MIB)), "{mode}");
        site.run(&["copy", "disk@one", "--dest", "older", "--object-size", "1M"]).ok();
        assert!(site.export("copy") == new && site.export("older") == old, "{mode}");
        assert_eq!(names(&site, "copy"), [""; 0], "{mode}");
        assert_eq!(site.json(&["info", "older"])["object_size"], json!(MIB), "{mode}");
        site.run(&["deep", "cp", "disk", "deep"]).ok();
        assert_eq!(names(&site, "deep"), ["one", "two"], "{mode}");
        assert!(site.export("deep") == new && site.export("deep@one") == old, "{mode}");
        site.run(&["deep", "copy", "disk@one", "first"]).ok();
        assert_eq!(names(&site, "first"), ["one"], "{mode}");
        assert!(site.export("first") == old && site.export("first@one") == old, "{mode}");
        for args in [&["cp", "disk", "deep"][..], &["deep", "cp", "disk", "deep"], &["cp", "disk", "disk"]] {
            let said = site.run(args).fails(5);
            assert!(said.contains("exists already"), "{mode} {args:?}: {said}");
        }
        for args in [&["cp", "disk@none", "x"][..], &["deep", "cp", "none", "x"], &["cp", "disk", "nopool/x"]] {
            site.run(args).fails(3);
        }
        site.run(&["cp", "disk", "x", "--object-size", "3M"]).fails(2);
        site.run(&["cp", "disk"]).fails(2);
        assert_eq!(site.json(&["ls"]), json!(["copy", "deep", "disk", "first", "older"]), "{mode}");
    }
}

#[test]
fn a_write_log_is_exported_and_imported_through() {
    let mut site = Site::serving(&["--log-dirty-age", "60m"]);
    let (_, new) = make_disk(&site);
    let place = format!("ssd:{}:16M", site.path("logs").display());
    site.run(&["attach", "disk", "--nbd", "--log", &place]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), "disk").expect("connects");
    let logged = content(8192, 8);
    client.write(3 << 20, &logged);
    client.flush();
    let mut want = new.clone();
    want[3 * MIB..3 * MIB + 8192].copy_from_slice(&logged);
    // What was acknowledged is in it, although the image does not have it.
    let listed = site.json(&["diff", "disk", "--from-snap", "two"]);
    assert!(apply(&listed, &new, &want) == want, "what the log has is left out: {listed}");
    let said = site.run_with_input(&["import-diff", "-", "disk"], &diff(None, None, 10 * MIB, &[])).fails(6);
    assert!(said.contains("exported"), "{said}");
    client.write(5 << 20, &logged);
    client.flush();
    drop(client);
    site.run(&["detach", "disk", "--force", "--keep-log"]).ok();
    want[5 * MIB..5 * MIB + 8192].copy_from_slice(&logged);
    // Beneath the log, its older bytes would come back.
    let bytes = [5; 4096];
    let changes = diff(Some("two"), Some("three"), 6 * MIB, &[Range::Data(5 * MIB, &bytes), Range::Zero(0, 4096)]);
    site.run_with_input(&["import-diff", "-", "disk"], &changes).ok();
    want.truncate(6 * MIB);
    want[5 * MIB..5 * MIB + 4096].copy_from_slice(&bytes);
    want[..4096].fill(0);
    assert!(site.export("disk@three") == want, "the snapshot lacks what was imported, or what the log had");
    site.kill();
    site.start();
    assert!(site.export("disk") == want, "what was imported is lost, or undone");
    let log = site.json(&["log", "info", "disk"]);
    assert_eq!(log["state"], json!("on"), "{log}");
}

#[test]
fn the_control_api() {
    let site = Site::serving(&[]);
    make_disk(&site);
    let image = "/v1/images/local/disk";
    assert_eq!(site.http(&format!("GET {image}/diff?from=one&snapshot=two")).0, 200);
    assert_eq!(site.http(&format!("GET {image}/diff?from=none")).0, 404);
    assert_eq!(site.http(&format!("GET {image}/diff?from=two&snapshot=one")).0, 400);
    assert_eq!(site.http(&format!("GET {image}/diff?since=one")).0, 400);
    assert_eq!(site.http(&format!("GET {image}/data?format=3")).0, 400);
    assert_eq!(site.http(&format!("GET {image}/data?format=2&snapshot=one")).0, 400);
    let (status, body) = site.http("GET /openapi.json");
    assert_eq!(status, 200);
    let described: Value = serde_json::from_str(&body).expect("JSON");
    for (path, method) in [("diff", "get"), ("diff", "put"), ("copy", "post"), ("data", "put")] {
        let path = format!("/v1/images/{{pool}}/{{image}}/{path}");
        assert!(described["paths"][&path][method].is_object(), "{method} {path} is not described");
    }
}
