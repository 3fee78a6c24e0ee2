//! Every command on images, through a daemon and without one.

use crate::common::{Site, shape};
use serde_json::json;

#[test]
fn create_list_and_look() {
    for (mode, site) in Site::each() {
        assert_eq!(site.run(&["create", "local/one", "--size", "10G"]).ok(), "", "{mode}");
        site.run(&["create", "two", "-s", "1536K", "--object-size", "64K"]).ok();
        assert_eq!(site.run(&["ls"]).ok(), "one\ntwo\n", "{mode}");
        assert_eq!(site.json(&["ls", "local"]), json!(["one", "two"]), "{mode}");
        let long = site.json(&["ls", "-l"]);
        let id = |image| site.json(&["info", image])["id"].clone();
        let want = json!([
            {"image": "one", "id": id("one"), "size": 10u64 << 30, "format": 2},
            {"image": "two", "id": id("two"), "size": 1536 << 10, "format": 2},
        ]);
        assert_eq!(long, want, "{mode}");

        let info = site.json(&["info", "two"]);
        assert_eq!((&info["size"], &info["objects"], &info["order"]), (&json!(1572864), &json!(24), &json!(16)));
        let want = json!({
            "pool": "string", "name": "string", "id": "string", "size": "number", "objects": "number",
            "order": "number", "object_size": "number", "block_name_prefix": "string", "format": "number",
            "features": ["string"], "op_features": [], "flags": [], "snapshot_count": "number",
            "create_timestamp": "string", "access_timestamp": "string", "modify_timestamp": "string",
        });
        assert_eq!(shape(&info), want, "{mode}");
        let text = site.run(&["info", "local/one"]).ok();
        assert!(text.contains("10 GiB in 2560 objects"), "{mode}: {text}");
        let pretty = site.run(&["info", "one", "--format", "json", "--pretty-format"]).ok();
        assert!(pretty.starts_with("{\n  \"name\""), "{mode}: {pretty}");
    }
}

#[test]
fn create_says_what_is_wrong() {
    for (mode, site) in Site::each() {
        site.run(&["create", "x", "--size", "1G"]).ok();
        let said = site.run(&["create", "x", "--size", "1G"]).fails(5);
        assert!(said.contains("local/x exists already"), "{mode}: {said}");
        for object_size in ["5M", "4K", "64M", "0B"] {
            site.run(&["create", "y", "--size", "1G", "--object-size", object_size]).fails(2);
        }
        let said = site.run(&["create", "rbd/y", "--size", "1G"]).fails(3);
        assert!(said.contains("no pool 'rbd'") && said.contains("'local'"), "{mode}: {said}");
        assert_eq!(site.run(&["ls"]).ok(), "x\n", "{mode}");
        for args in [&["info", "nope"][..], &["rm", "nope"], &["resize", "nope", "--size", "1G"], &["du", "nope"]] {
            let said = site.run(args).fails(3);
            assert!(said.contains("no image local/nope"), "{mode} {args:?}: {said}");
        }
        site.run(&["ls", "rbd"]).fails(3);
        site.run(&["du", "rbd/"]).fails(3);
    }
}

#[test]
fn resize_rename_and_remove() {
    for (mode, site) in Site::each() {
        site.run(&["create", "x", "--size", "1G"]).ok();
        site.run(&["create", "other", "--size", "1G"]).ok();
        site.run(&["resize", "x", "--size", "2G"]).ok();
        assert_eq!(site.json(&["info", "x"])["size"], json!(2u64 << 30), "{mode}");
        let said = site.run(&["resize", "x", "--size", "1G"]).fails(2);
        assert!(said.contains("--allow-shrink"), "{mode}: {said}");
        let info = site.json(&["resize", "x", "--size", "1G", "--allow-shrink"]);
        assert_eq!(info["size"], json!(1u64 << 30), "{mode}");

        site.run(&["mv", "x", "y"]).ok();
        assert_eq!(site.json(&["ls"]), json!(["other", "y"]), "{mode}");
        site.run(&["mv", "y", "other"]).fails(5);
        site.run(&["mv", "y", "y"]).fails(5);
        site.run(&["mv", "x", "z"]).fails(3);
        let said = site.run(&["mv", "local/y", "ram/y"]).fails(2);
        assert!(said.contains("stays in its pool"), "{mode}: {said}");

        assert_eq!(site.json(&["rm", "y"]), json!({"pool": "local", "image": "y"}), "{mode}");
        assert_eq!(site.run(&["rm", "other"]).ok(), "", "{mode}");
        assert_eq!(site.run(&["ls"]).ok(), "", "{mode}");
        assert_eq!(site.json(&["ls"]), json!([]), "{mode}");
    }
}

#[test]
fn what_images_take_up() {
    for (mode, site) in Site::each() {
        let file = site.path("file");
        std::fs::write(&file, vec![7; 3 << 20]).expect("a file");
        site.run(&["import", file.to_str().expect("a path"), "full"]).ok();
        site.run(&["create", "empty", "--size", "1G"]).ok();
        let usage = site.json(&["du"]);
        let id = site.json(&["info", "empty"])["id"].clone();
        let want = json!({"name": "empty", "id": id, "provisioned_size": 1 << 30, "used_size": 0});
        assert_eq!(usage["images"][0], want, "{mode}");
        assert_eq!(usage["images"][1]["provisioned_size"], json!(3 << 20), "{mode}");
        let used = usage["images"][1]["used_size"].as_u64().expect("a number");
        assert!((3 << 20..4 << 20).contains(&used), "{mode}: {used}");
        assert_eq!(usage["total_provisioned_size"], json!((1 << 30) + (3 << 20)), "{mode}");
        assert_eq!(usage["total_used_size"], json!(used), "{mode}");
        let table = site.run(&["du", "local/"]).ok();
        assert!(table.contains("<TOTAL>") && table.contains("PROVISIONED"), "{mode}: {table}");
        let one = site.json(&["du", "local/full"]);
        assert_eq!(one["images"].as_array().map(Vec::len), Some(1), "{mode}");
    }
}

#[test]
fn the_ram_pool_lives_in_the_daemon() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "ram/x", "--size", "1G"]).ok();
    assert_eq!(site.run(&["ls", "ram"]).ok(), "x\n");
    site.stop();
    let said = site.run(&["ls", "ram"]).fails(3);
    assert!(said.contains("forebay serve"), "{said}");
    site.start();
    assert_eq!(site.run(&["ls", "ram"]).ok(), "");
}

#[test]
fn what_a_command_does_the_daemon_finds_and_the_other_way_round() {
    let mut site = Site::with_store();
    site.run(&["create", "direct", "--size", "1G"]).ok();
    site.start();
    site.run(&["create", "served", "--size", "2G"]).ok();
    assert_eq!(site.json(&["ls"]), json!(["direct", "served"]));
    site.stop();
    assert_eq!(site.json(&["info", "served"])["size"], json!(2u64 << 30));
    assert_eq!(site.run(&["ls"]).ok(), "direct\nserved\n");
}

#[test]
fn a_reader_that_goes_is_no_failure() {
    let site = Site::with_store();
    for index in 0..20 {
        site.run(&["create", &format!("image{index}"), "--size", "1G"]).ok();
    }
    let mut command = site.command(&["ls"]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().expect("the command");
    drop(child.stdout.take());
    assert!(child.wait().expect("the command").success());
}

#[test]
fn reservations_of_an_image_nobody_reserved() {
    for (mode, site) in Site::each() {
        site.run(&["create", "shared", "--size", "1G"]).ok();
        let want = json!({"registrants": [], "kind": null, "whole": null, "persistent": false});
        assert_eq!(site.json(&["reservations", "ls", "shared"]), want, "{mode}");
        assert!(site.run(&["reservations", "ls", "shared"]).ok().starts_with("HOST"), "{mode}");
        site.run(&["reservations", "clear", "shared"]).ok();
        site.run(&["reservations", "clear", "nope"]).fails(3);
    }
}

/// Reads of what was never written are answered without waiting for anything: nothing else had its turn, not even the
/// clock.
#[test]
fn a_load_of_reads_on_an_empty_image_ends() {
    let site = Site::with_store();
    site.run(&["create", "x", "--size", "64M"]).ok();
    let report = site.json(&["bench", "x", "--io-type", "read", "--seconds", "1"]);
    assert!(report["seconds"].as_f64().is_some_and(|seconds| seconds >= 1.0), "{report}");
}

#[test]
fn several_images_in_one_call() {
    let site = Site::serving(&["--nvme", "127.0.0.1:0"]);
    let made = site.json(&["create", "a", "local/b", "--size", "64M"]);
    let names: Vec<_> = made.as_array().expect("a list").iter().map(|image| image["name"].clone()).collect();
    assert_eq!(names, ["a", "b"]);
    std::fs::write(site.path("names"), "c\n\n# not this\n local/d \n").expect("a file");
    site.run(&["create", "--images-from", "names", "--size", "64M"]).ok();
    assert_eq!(site.json(&["ls"]), serde_json::json!(["a", "b", "c", "d"]));
    let uris = site.run(&["attach", "a", "b", "--nvme"]).ok();
    assert_eq!(uris.lines().filter(|uri| uri.starts_with("nvme+tcp://")).count(), 2, "{uris}");
    assert!(site.json(&["attach", "a", "--nbd"])["uri"].is_string(), "one is no list");
    site.run(&["attach", "--images-from", "names", "--nbd"]).ok();
    // The first failure ends it, and says where.
    let said = site.run(&["create", "e", "a", "f", "--size", "64M"]).fails(6);
    assert!(said.contains("local/a, after 1 of 3 images"), "{said}");
    assert_eq!(site.json(&["ls"]), serde_json::json!(["a", "b", "c", "d", "e"]));
    site.run(&["detach", "a", "b", "--images-from", "names"]).ok();
    assert_eq!(site.json(&["targets"]), serde_json::json!([]));
    // Options that are invalid for several images, and files that name none.
    std::fs::write(site.path("bad"), "a\na/b/c/d\n").expect("a file");
    std::fs::write(site.path("empty"), "# nothing\n").expect("a file");
    for (args, words) in [
        (&["attach", "a", "b", "--nvme", "--nsid", "3"][..], "for one image"),
        (&["create", "--images-from", "bad", "--size", "1G"], "bad, line 2"),
        (&["create", "--images-from", "empty", "--size", "1G"], "names no image"),
        (&["create", "a", "b", "--image", "c", "--size", "1G"], "both name the image"),
        (&["attach", "--nbd"], "no image is named"),
    ] {
        let said = site.run(args).fails(2);
        assert!(said.contains(words), "{args:?}: {said}");
    }
    assert!(site.run(&["create", "--images-from", "absent", "--size", "1G"]).fails(3).contains("absent"));
}
