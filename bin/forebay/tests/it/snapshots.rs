//! Snapshots through the command line: made, listed, read, renamed, protected, limited, removed, and rolled back to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::common::{Nbd, Site, content, shape};

const MIB: usize = 1 << 20;

fn names(site: &Site, image: &str) -> Vec<String> {
    let listed = site.json(&["snap", "ls", image]);
    let name = |snapshot: &Value| snapshot["name"].as_str().expect("a name").to_owned();
    listed.as_array().expect("a list").iter().map(name).collect()
}

/// Overwrites an image from its beginning, through the daemon if one runs.
fn overwrite(site: &Site, image: &str, data: &[u8]) {
    site.run(&["attach", image, "--nbd"]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    for (at, part) in data.chunks(MIB).enumerate() {
        client.write((at * MIB) as u64, part);
    }
    client.flush();
    drop(client);
    site.run(&["detach", image, "--force"]).ok();
}

#[test]
fn lists_have_the_shapes_of_rbd() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "5000K"]).ok();
        assert_eq!(site.run(&["snap", "ls", "disk"]).ok(), "", "{mode}");
        assert_eq!(site.json(&["snap", "ls", "disk"]), json!([]), "{mode}");
        assert_eq!(site.run(&["snap", "create", "disk@one"]).ok(), "", "{mode}");
        site.run(&["resize", "disk", "--size", "6M"]).ok();
        let made = site.json(&["snap", "add", "-p", "local", "--image", "disk", "--snap", "second", "--no-progress"]);
        let want = json!({
            "id": "number", "name": "string", "size": "number", "protected": "string", "timestamp": "string",
        });
        assert_eq!(shape(&made), want, "{mode}");
        site.run(&["snap", "protect", "disk@one"]).ok();

        let listed = site.json(&["snap", "list", "local/disk"]);
        let sizes = [5_120_000, 6 << 20];
        for (at, (name, protected)) in [("one", "true"), ("second", "false")].into_iter().enumerate() {
            let found = &listed[at];
            assert_eq!(shape(found), want, "{mode}");
            assert_eq!(
                (&found["name"], &found["protected"], &found["size"]),
                (&json!(name), &json!(protected), &json!(sizes[at])),
                "{mode}"
            );
        }
        assert_eq!(made, listed[1], "{mode}: what was made is listed");
        let all = site.json(&["snap", "ls", "--all", "disk"]);
        assert_eq!(all[0]["namespace"], json!({"type": "user"}), "{mode}");

        let table = site.run(&["snap", "ls", "disk"]).ok();
        let rows: Vec<&str> = table.lines().collect();
        let time = |at: usize| listed[at]["timestamp"].as_str().expect("a time").to_owned();
        assert_eq!(
            rows[0].split_whitespace().collect::<Vec<_>>(),
            ["SNAPID", "NAME", "SIZE", "PROTECTED", "TIMESTAMP"]
        );
        assert!(
            rows[1].contains(" one ") && rows[1].contains(" 4.9 MiB  yes ") && rows[1].ends_with(&time(0)),
            "{table}"
        );
        assert!(rows[2].contains(" second ") && !rows[2].contains("yes") && rows[2].ends_with(&time(1)), "{table}");
        assert_eq!(rows.len(), 3, "{mode}: {table}");

        // The other commands on images.
        let info = site.json(&["info", "disk@one"]);
        assert_eq!(
            (&info["name"], &info["size"], &info["objects"], &info["protected"], &info["snapshot_count"]),
            (&json!("disk"), &json!(5_120_000), &json!(2), &json!("true"), &json!(2)),
            "{mode}"
        );
        assert!(site.json(&["info", "disk"])["protected"].is_null(), "{mode}");
        assert!(site.run(&["info", "disk", "--snap", "second"]).ok().contains("\tprotected: False\n"), "{mode}");
        let long = site.json(&["ls", "-l"]);
        let snapshots = long.as_array().expect("a list").iter().map(|listed| listed["snapshot"].clone());
        assert_eq!(snapshots.collect::<Vec<_>>(), [json!(null), json!("one"), json!("second")], "{mode}");
        let usage = site.json(&["du", "disk"]);
        assert_eq!(usage["images"].as_array().map(Vec::len), Some(3), "{mode}: {usage}");
        let usage = site.json(&["du", "disk@one"]);
        assert_eq!(usage["images"].as_array().map(Vec::len), Some(1), "{mode}: {usage}");
        assert_eq!(
            (&usage["images"][0]["snapshot"], &usage["total_provisioned_size"]),
            (&json!("one"), &json!(5_120_000)),
            "{mode}"
        );
        let usage = site.json(&["du", "disk@second"]);
        assert_eq!(usage["images"].as_array().map(Vec::len), Some(2), "{mode}: those before it, as rbd lists them");
        assert_eq!(usage["total_provisioned_size"], json!(5_120_000 + (6 << 20)), "{mode}");
        site.run(&["du", "disk@one", "--exact"]).fails(2);
    }
}

#[test]
fn a_snapshot_keeps_what_it_saw_and_the_image_is_rolled_back_to_it() {
    let site = Site::serving(&[]);
    let (old, new) = (content(9 * MIB, 1), content(9 * MIB, 2));
    site.run_with_input(&["import", "-", "disk"], &old).ok();
    site.run(&["snap", "create", "disk@before", "--skip-quiesce", "--ignore-quiesce-error"]).ok();
    overwrite(&site, "disk", &new);
    site.run(&["resize", "disk", "--size", "12M"]).ok();
    let grown = [&new[..], &[0; 3 * MIB]].concat();
    assert!(site.export("disk@before") == old, "the snapshot has changed");
    assert!(site.export("disk") == grown, "the image has not changed");
    site.run(&["export", "disk@before"]).ok();
    assert!(std::fs::read(site.path("disk@before")).expect("a file") == old, "a file is named after the snapshot");
    site.run(&["export", "--image", "disk", "--snap", "before", "named"]).ok();
    assert!(std::fs::read(site.path("named")).expect("a file") == old);

    // Not under hosts.
    site.run(&["attach", "disk", "--nbd"]).ok();
    let said = site.run(&["snap", "rollback", "disk@before"]).fails(6);
    assert!(said.contains("exported") && said.contains("forebay detach local/disk"), "{said}");
    site.run(&["detach", "disk"]).ok();
    assert!(site.export("disk") == grown, "a rollback that was refused has changed the image");
    site.run(&["snap", "create", "disk@after"]).ok();
    site.run(&["snap", "rollback", "disk@before"]).ok();
    assert!(site.export("disk") == old, "rolled back");
    assert_eq!(site.json(&["info", "disk"])["size"], json!(9 * MIB), "to its size as well");
    site.run(&["snap", "revert", "disk@after"]).ok();
    assert!(site.export("disk") == grown, "and forth");
    assert!(site.export("disk@before") == old && site.export("disk@after") == grown);
    // It can be used as before.
    overwrite(&site, "disk", &old);
    assert!(site.export("disk")[..9 * MIB] == old);
}

#[test]
fn a_rollback_without_a_daemon() {
    let mut site = Site::serving(&[]);
    let (old, new) = (content(5 * MIB, 3), content(5 * MIB, 4));
    site.run_with_input(&["import", "-", "disk"], &old).ok();
    site.stop();
    site.run(&["snap", "create", "disk@s"]).ok();
    site.start();
    overwrite(&site, "disk", &new);
    site.stop();
    assert!(site.export("disk@s") == old && site.export("disk") == new);
    site.run(&["snap", "rollback", "disk@s"]).ok();
    assert!(site.export("disk") == old);
    site.start();
    assert!(site.export("disk") == old && site.export("disk@s") == old, "what a command did the daemon finds");
}

#[test]
fn a_rollback_in_front_of_a_kept_log_is_not_undone_by_it() {
    let mut site = Site::serving(&["--log-dirty-age", "60m"]);
    let old = content(5 * MIB, 5);
    site.run_with_input(&["import", "-", "disk"], &old).ok();
    site.run(&["snap", "create", "disk@s"]).ok();
    let place = format!("ssd:{}:16M", site.path("logs").display());
    site.run(&["attach", "disk", "--nbd", "--log", &place]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), "disk").expect("connects");
    client.write(MIB as u64, &content(64 << 10, 6));
    client.flush();
    drop(client);
    site.run(&["detach", "disk", "--force", "--keep-log"]).ok();
    assert!(site.export("disk") != old, "the log has something else");
    site.run(&["snap", "rollback", "disk@s"]).ok();
    assert!(site.export("disk") == old);
    site.kill();
    site.start();
    assert!(site.export("disk") == old, "the log was replayed over the older data");
}

#[test]
fn renamed_protected_and_removed() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "8M"]).ok();
        for name in ["a", "b", "c", "d"] {
            site.run(&["snap", "create", &format!("disk@{name}")]).ok();
        }
        let renamed = site.json(&["snap", "rename", "disk@a", "disk@first"]);
        assert_eq!(renamed["name"], json!("first"), "{mode}");
        site.run(&["snap", "mv", "--image", "disk", "--snap", "b", "--dest-snap", "second"]).ok();
        assert_eq!(names(&site, "disk"), ["first", "second", "c", "d"], "{mode}");
        let said = site.run(&["snap", "rename", "disk@c", "disk@d"]).fails(5);
        assert!(said.contains("the snapshot local/disk@d exists already"), "{mode}: {said}");
        site.run(&["snap", "rename", "disk@c", "disk@c"]).fails(5);
        site.run(&["snap", "rename", "disk@c", "other@c"]).fails(2);

        assert_eq!(site.json(&["snap", "protect", "disk@c"])["protected"], json!("true"), "{mode}");
        site.run(&["snap", "protect", "disk@c"]).ok();
        let said = site.run(&["snap", "rm", "disk@c"]).fails(6);
        assert!(said.contains("protected") && said.contains("forebay snap unprotect local/disk@c"), "{mode}: {said}");
        site.run(&["snap", "protect", "disk@d"]).ok();
        let removed = site.json(&["snap", "rm", "--force", "disk@d"]);
        assert_eq!(removed, json!({"pool": "local", "image": "disk", "snapshot": "d"}), "{mode}");
        assert_eq!(names(&site, "disk"), ["first", "second", "c"], "{mode}");

        let said = site.run(&["rm", "disk"]).fails(6);
        assert!(said.contains("local/disk has 3 snapshots"), "{mode}: {said}");
        assert!(said.contains("forebay snap purge local/disk"), "{mode}: {said}");
        let said = site.run(&["snap", "purge", "disk"]).fails(6);
        assert!(said.contains("1 protected snapshot: c") && said.contains("unprotect"), "{mode}: {said}");
        assert_eq!(names(&site, "disk"), ["c"], "{mode}: the others are gone");
        assert_eq!(site.json(&["snap", "unprotect", "disk@c"])["protected"], json!("false"), "{mode}");
        site.run(&["snap", "unprotect", "disk@c"]).ok();
        assert_eq!(site.json(&["snap", "purge", "disk"]), json!(["c"]), "{mode}");
        assert_eq!(site.json(&["snap", "purge", "disk"]), json!([]), "{mode}");
        site.run(&["rm", "disk"]).ok();
    }
}

#[test]
fn a_limit_is_kept_and_named() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "8M"]).ok();
        site.run(&["snap", "limit", "set", "disk", "--limit", "2"]).ok();
        assert_eq!(site.json(&["info", "disk"])["snapshot_limit"], json!(2), "{mode}");
        site.run(&["snap", "create", "disk@a"]).ok();
        site.run(&["snap", "create", "disk@b"]).ok();
        let said = site.run(&["snap", "create", "disk@c"]).fails(7);
        assert!(said.contains("2 snapshots") && said.contains("limit is 2"), "{mode}: {said}");
        assert!(said.contains("forebay snap limit set local/disk"), "{mode}: {said}");
        site.run(&["snap", "rm", "disk@a"]).ok();
        site.run(&["snap", "create", "disk@c"]).ok();
        assert_eq!(site.json(&["snap", "limit", "clear", "disk"]), json!({"pool": "local", "image": "disk"}), "{mode}");
        assert!(site.json(&["info", "disk"])["snapshot_limit"].is_null(), "{mode}");
        site.run(&["snap", "create", "disk@d"]).ok();
        assert_eq!(names(&site, "disk"), ["b", "c", "d"], "{mode}");
        site.run(&["snap", "limit", "set", "disk"]).fails(2);
        site.run(&["snap", "limit", "set", "disk", "--limit", "-1"]).fails(2);
    }
}

#[test]
fn what_is_not_there_and_what_is_no_name() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "8M"]).ok();
        site.run(&["snap", "create", "disk@s"]).ok();
        for args in [
            &["snap", "rm", "disk@nope"][..],
            &["snap", "rm", "--force", "disk@nope"],
            &["snap", "rename", "disk@nope", "disk@t"],
            &["snap", "protect", "disk@nope"],
            &["snap", "unprotect", "disk@nope"],
            &["snap", "rollback", "disk@nope"],
            &["export", "disk@nope", "file"],
            &["info", "disk@nope"],
            &["du", "disk@nope"],
        ] {
            let said = site.run(args).fails(3);
            assert!(said.contains("there is no snapshot local/disk@nope"), "{mode} {args:?}: {said}");
            assert!(said.contains("forebay snap ls local/disk"), "{mode} {args:?}: {said}");
        }
        for args in [
            &["snap", "create", "nope@s"][..],
            &["snap", "ls", "nope"],
            &["snap", "rm", "nope@s"],
            &["snap", "purge", "nope"],
            &["snap", "rollback", "nope@s"],
            &["snap", "limit", "set", "nope", "--limit", "3"],
            &["export", "nope@s", "file"],
            &["info", "nope@s"],
            &["du", "nope@s"],
        ] {
            let said = site.run(args).fails(3);
            assert!(said.contains("there is no image local/nope"), "{mode} {args:?}: {said}");
        }
        assert!(!site.path("file").exists(), "{mode}");
        let said = site.run(&["snap", "create", "disk@s"]).fails(5);
        assert!(said.contains("the snapshot local/disk@s exists already"), "{mode}: {said}");
        for (args, says) in [
            (&["snap", "create", "disk"][..], "no snapshot of local/disk is named"),
            (&["snap", "create", "disk@"], "empty"),
            (&["snap", "create", "disk@a@b"], "no name may"),
            (&["snap", "create", "disk@a/b"], "no name may"),
            (&["snap", "create", "disk@a\u{200b}"], "invisible"),
            (&["snap", "rename", "disk@s", "disk@a\u{200b}"], "invisible"),
            (&["snap", "create", "disk@.."], "cannot be"),
            (&["snap", "ls", "disk@s"], "snapshot"),
            (&["snap", "purge", "disk@s"], "snapshot"),
            (&["create", "x@s", "--size", "1M"], "snapshot"),
            (&["rm", "disk@s"], "snapshot"),
            (&["attach", "disk@s", "--nbd"], "snapshot"),
        ] {
            let said = site.run(args).fails(2);
            assert!(said.contains(says), "{mode} {args:?}: {said}");
        }
        assert_eq!(names(&site, "disk"), ["s"], "{mode}");
    }
}

#[test]
fn the_control_api() {
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "8M"]).ok();
    let image = "/v1/images/local/disk";
    let json = |(status, body): (u16, String)| -> Value {
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    };
    site.run(&["snap", "create", "disk@two words"]).ok();
    let listed = json(site.http(&format!("GET {image}/snapshots")));
    let time = listed[0]["timestamp"].as_str().expect("a time");
    assert!(time.ends_with('Z') && time.as_bytes()[10] == b'T', "{time}");
    assert!(listed[0]["namespace"].is_null());
    assert_eq!(listed[0]["name"], json!("two words"));
    assert_eq!(json(site.http(&format!("GET {image}?snapshot=two%20words")))["protected"], json!("false"));
    assert_eq!(site.http(&format!("GET {image}?snapshot=none")).0, 404);
    assert_eq!(site.http(&format!("GET {image}?snap=none")).0, 400);
    assert_eq!(site.http("GET /v1/usage/local?snapshot=x").0, 400);
    assert_eq!(site.http(&format!("POST {image}/snapshots/two%20words/rollback")).0, 200);
    assert_eq!(site.http(&format!("DELETE {image}/snapshots/none")).0, 404);
    assert_eq!(site.http(&format!("DELETE {image}/snapshots/two%20words")).0, 200);
    assert_eq!(json(site.http(&format!("GET {image}/snapshots?all=true"))), json!([]));
    let described: Value = json(site.http("GET /openapi.json"));
    for path in ["snapshots", "snapshots/{snapshot}", "snapshots/{snapshot}/rollback", "snapshot-limit"] {
        let path = format!("/v1/images/{{pool}}/{{image}}/{path}");
        assert!(described["paths"][&path].is_object(), "{path} is not described");
    }
}

/// Each block carries the number of its write, which goes through the image block by block, again and again.  So a
/// consistent snapshot has descending numbers in one place only: between the newest write and the oldest.
#[test]
fn a_snapshot_under_load_through_a_log_is_consistent() {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 512;
    let site = Site::serving(&["--log-dirty-age", "60m"]);
    let place = format!("ssd:{}:64M", site.path("logs").display());
    site.run(&["create", "disk", "--size", "2M", "--object-size", "64K"]).ok();
    site.run(&["attach", "disk", "--nbd", "--log", &place]).ok();
    let (submitted, acknowledged, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Nbd::connect(&site.data().join("nbd.sock"), "disk").expect("connects");
            for number in 1.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                submitted.store(number, Ordering::SeqCst);
                let at = (number as usize - 1) % BLOCKS * BLOCK;
                client.write(at as u64, &number.to_le_bytes().repeat(BLOCK / 8));
                acknowledged.store(number, Ordering::SeqCst);
            }
        });
        // Also when a check fails, so that the scope ends.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let _stop = Stop(&stop);
        for round in 0..5 {
            let (name, begun) = (format!("disk@s{round}"), acknowledged.load(Ordering::SeqCst));
            crate::common::wait_until("writes go on", || acknowledged.load(Ordering::SeqCst) > begun);
            let before = acknowledged.load(Ordering::SeqCst);
            site.run(&["snap", "create", &name]).ok();
            let after = submitted.load(Ordering::SeqCst);
            let seen = site.export(&name);
            assert_eq!(seen.len(), BLOCKS * BLOCK);
            let numbers: Vec<u64> = seen
                .chunks(BLOCK)
                .map(|block| {
                    let number = u64::from_le_bytes(block[..8].try_into().expect("eight bytes"));
                    assert!(block == number.to_le_bytes().repeat(BLOCK / 8), "round {round}: a torn write");
                    number
                })
                .collect();
            let newest = numbers.iter().copied().max().expect("blocks");
            assert!((before..=after).contains(&newest), "round {round}: {newest}, not from {before} to {after}");
            for (at, &number) in numbers.iter().enumerate() {
                // The last write to this block that is not newer than the newest.
                let last = (newest - 1) as usize / BLOCKS * BLOCKS + at + 1;
                let want = if last as u64 <= newest { last } else { last.saturating_sub(BLOCKS) };
                assert_eq!(number, want as u64, "round {round}: block {at}, the newest is {newest}");
            }
        }
    });
    let log = site.json(&["log", "info", "disk"]);
    assert_eq!(log["state"], json!("on"), "{log}");
    site.run(&["detach", "disk", "--force"]).ok();
    assert_eq!(names(&site, "disk").len(), 5);
}
