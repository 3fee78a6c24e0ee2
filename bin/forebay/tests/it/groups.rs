//! Groups through the command line: made, listed, renamed, removed; snapshots of one moment, rolled back to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::json;

use crate::common::{Nbd, Site, content, wait_until};

const MIB: usize = 1 << 20;

#[test]
fn life_of_a_group() {
    for (mode, site) in Site::each() {
        let run = |args: &[&str]| site.run(args);
        for image in ["a", "b"] {
            run(&["create", image, "--size", "1M"]).ok();
        }
        assert_eq!(run(&["group", "ls"]).ok(), "", "{mode}");
        assert_eq!(site.json(&["group", "ls"]), json!([]), "{mode}");
        assert_eq!(run(&["group", "create", "g"]).ok(), "", "{mode}");
        assert!(run(&["group", "create", "-p", "local", "--group", "g"]).fails(5).contains("exists already"), "{mode}");
        run(&["group", "create", "second"]).ok();
        run(&["group", "image", "add", "g", "b"]).ok();
        run(&["group", "image", "add", "--group", "g", "--image", "a"]).ok();
        let said = run(&["group", "image", "add", "second", "a"]).fails(5);
        assert!(said.contains("belongs to the group local/g"), "{mode}: {said}");
        assert!(run(&["group", "image", "add", "g", "a"]).fails(5).contains("already"), "{mode}");
        assert!(run(&["group", "image", "add", "none", "a"]).fails(3).contains("no group local/none"), "{mode}");
        assert!(run(&["group", "image", "add", "g", "none"]).fails(3).contains("no image local/none"), "{mode}");
        let said = run(&["group", "image", "rm", "second", "a"]).fails(3);
        assert!(said.contains("not in the group local/second"), "{mode}: {said}");
        let mut listed = site.json(&["group", "image", "ls", "g"]);
        listed.as_array_mut().expect("a list").sort_by_key(|image| image["image"].to_string());
        let member = |name| json!({"image": name, "pool": "local", "namespace": "", "state": 0});
        assert_eq!(listed, json!([member("a"), member("b")]), "{mode}");
        assert_eq!(site.json(&["info", "a"])["group"], json!("local/g"), "{mode}");
        assert_eq!(site.json(&["info", "a"])["op_features"], json!(["group"]), "{mode}");
        let said = run(&["rm", "a"]).fails(6);
        assert!(said.contains("belongs to the group local/g"), "{mode}: {said}");
        run(&["trash", "mv", "a"]).fails(6);

        run(&["group", "snap", "create", "g@one"]).ok();
        assert!(run(&["group", "snap", "create", "g@one"]).fails(5).contains("exists already"), "{mode}");
        assert!(run(&["group", "snap", "create", "none@one"]).fails(3).contains("no group"), "{mode}");
        run(&["group", "snap", "rename", "g@one", "two"]).ok();
        assert_eq!(site.json(&["group", "snap", "ls", "g"]), json!([{"snapshot": "two", "state": "ok"}]), "{mode}");
        assert_eq!(run(&["group", "snap", "ls", "g"]).ok(), "NAME  STATUS\ntwo       ok\n", "{mode}");
        let part = &site.json(&["snap", "ls", "--all", "a"])[0];
        let owner = json!({"type": "group", "pool": "local", "group": "g", "group snap": "two"});
        assert_eq!(part["namespace"], owner, "{mode}");
        assert!(run(&["snap", "ls", "--all", "a"]).ok().contains("group (local/g@two)"), "{mode}");
        assert_eq!(site.json(&["snap", "ls", "a"]), json!([]), "{mode}: it is no user's");
        run(&["group", "rename", "g", "h"]).ok();
        run(&["group", "rename", "h", "second"]).fails(5);
        run(&["group", "image", "rm", "h", "a"]).ok();
        assert_eq!(run(&["group", "ls"]).ok(), "h\nsecond\n", "{mode}");
        run(&["group", "snap", "rollback", "h@two", "--no-progress"]).ok();
        run(&["group", "snap", "rollback", "h@none"]).fails(3);
        run(&["group", "rm", "h"]).ok();
        assert!(run(&["group", "image", "ls", "h"]).fails(3).contains("no group"), "{mode}");
        assert_eq!(site.json(&["snap", "ls", "--all", "a"]), json!([]), "{mode}: they went with the group");
        for image in ["a", "b"] {
            run(&["rm", image]).ok();
        }
    }
}

/// Writes a turn's number to the first block of each image in turn, each once the write before was acknowledged.
fn write_in_turn(site: &Site, images: &[&str], turn: &AtomicU64, stop: &AtomicBool) {
    let connect = |image: &&str| Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    let mut clients: Vec<_> = images.iter().map(connect).collect();
    while !stop.load(Ordering::SeqCst) {
        let number = turn.load(Ordering::SeqCst) + 1;
        for client in &mut clients {
            client.write(0, &number.to_le_bytes().repeat(512));
        }
        turn.store(number, Ordering::SeqCst);
    }
}

/// Overwrites the second half of an image again and again, so that there is always a write that takes a while.
fn write_noise(site: &Site, image: &str, stop: &AtomicBool) {
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    while !stop.load(Ordering::SeqCst) {
        client.write(MIB as u64 / 2, &content(MIB / 2, 9));
    }
}

#[test]
fn snapshots_of_groups_have_one_moment_with_write_logs_and_without() {
    for logged in [[false; 3], [false, true, false], [true, false, true]] {
        let site = Site::serving(&[]);
        let images = ["a", "b", "c"];
        site.run(&["group", "create", "g"]).ok();
        for (image, logged) in images.iter().zip(logged) {
            site.run(&["create", image, "--size", "1M"]).ok();
            site.run(&["group", "image", "add", "g", image]).ok();
            let mut attach = vec!["attach", image, "--nbd"];
            let place = format!("ssd:{}:16M", site.path("logs").display());
            if logged {
                attach.extend(["--log", &place]);
            }
            site.run(&attach).ok();
        }
        let (turn, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        const ROUNDS: usize = 5;
        std::thread::scope(|scope| {
            scope.spawn(|| write_in_turn(&site, &images, &turn, &stop));
            for image in images {
                scope.spawn(|| write_noise(&site, image, &stop));
            }
            // Also when a check fails, so that the scope ends.
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::SeqCst);
                }
            }
            let _stop = Stop(&stop);
            for round in 0..ROUNDS {
                let begun = turn.load(Ordering::SeqCst);
                wait_until("writes go on", || turn.load(Ordering::SeqCst) > begun + 20);
                // Snapshots of the images alone, at the same time, wait for it or it for them.
                for image in images {
                    let snapshot = format!("{image}@{round}");
                    let site = &site;
                    scope.spawn(move || site.run(&["snap", "create", &snapshot]).ok());
                }
                site.run(&["group", "snap", "create", &format!("g@{round}")]).ok();
            }
        });
        let said = site.run(&["group", "snap", "rollback", "g@0"]).fails(6);
        assert!(said.contains("exported"), "{said}");
        for image in images {
            site.run(&["detach", image, "--force"]).ok();
        }
        let mut before = 0;
        for round in 0..ROUNDS {
            site.run(&["group", "snap", "rollback", &format!("g@{round}")]).ok();
            let turns: Vec<u64> = images
                .iter()
                .map(|image| u64::from_le_bytes(site.export(image)[..8].try_into().expect("eight bytes")))
                .collect();
            let fits = turns.is_sorted_by(|a, b| a >= b) && turns[0] - turns[2] <= 1;
            assert!(fits, "logs {logged:?}, round {round}: the images have turns {turns:?}");
            assert!(turns[2] > before, "logs {logged:?}, round {round}: {turns:?} after {before}");
            before = turns[0];
        }
    }
}

#[test]
fn a_rollback_restores_content_and_sizes() {
    for (mode, site) in Site::each() {
        site.run(&["group", "create", "g"]).ok();
        for (seed, image) in (1..).zip(["a", "b"]) {
            site.run_with_input(&["import", "-", image], &content(2 * MIB, seed)).ok();
            site.run(&["group", "image", "add", "g", image]).ok();
        }
        site.run(&["group", "snap", "create", "g@before"]).ok();
        site.run(&["resize", "a", "--size", "5M"]).ok();
        site.run(&["resize", "b", "--size", "1M", "--allow-shrink"]).ok();
        site.run(&["group", "snap", "rollback", "g@before"]).ok();
        for (seed, image) in (1..).zip(["a", "b"]) {
            assert!(site.export(image) == content(2 * MIB, seed), "{mode}: {image}");
        }
        site.run(&["group", "snap", "rm", "g@before"]).ok();
        assert_eq!(site.json(&["info", "a"])["snapshot_count"], json!(0), "{mode}");
    }
}

#[test]
fn groups_of_gateways_are_refused_with_a_reason_where_there_can_be_none() {
    for (mode, site) in Site::each() {
        let said = site.run(&["group", "create", "local/gw", "--gateways"]).fails(9);
        assert!(said.contains("not in a Ceph cluster"), "{mode}: {said}");
        site.run(&["group", "status", "local/gw"]).fails(9);
        site.run(&["group", "rm", "local/gw", "--gateways"]).fails(9);
        site.run(&["group", "create", "local/gw", "--lease", "1s"]).fails(2);
        site.run(&["group", "create", "local/gw", "--rebalance"]).fails(2);
        site.run(&["group", "create", "local/gw", "--gateways", "--rebalance"]).fails(9);
    }
    let site = Site::serving(&[]);
    for command in [
        &["status"][..],
        &["leave"],
        &["drain"],
        &["rebalance"],
        &["rebalance", "--dry-run"],
        &["set", "--rebalance", "on"],
        &["set-weight", "50"],
        &["set-weight", "0", "gateway2"],
    ] {
        let said = site.run(&[&["group"][..], command].concat()).fails(3);
        assert!(said.contains("in no gateway group") && said.contains("group join"), "{command:?}: {said}");
    }
    for wrong in [&["set"][..], &["set", "--rebalance", "maybe"], &["set-weight"], &["set-weight", "-1"]] {
        site.run(&[&["group"][..], wrong].concat()).fails(2);
    }
    let said = site.run(&["group", "join", "local/gw"]).fails(2);
    assert!(said.contains("--peer"), "{said}");
    let listening = Site::serving(&["--peer", "127.0.0.1:0"]);
    let said = listening.run(&["group", "join", "local/gw"]).fails(9);
    assert!(said.contains("not in a Ceph cluster"), "{said}");
    listening.run(&["group", "status"]).fails(3);
}

#[test]
fn a_member_that_others_cannot_reach_does_not_start() {
    let mut site = Site::with_store();
    let refused = |flags: &[&str]| {
        let mut command = crate::common::forebay();
        command.arg("--data").arg(site.data()).arg("serve").args(flags);
        let done = command.output().expect("it runs");
        assert_eq!(done.status.code(), Some(2), "{flags:?}");
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    assert!(refused(&["--group", "rbd/gw"]).contains("--peer"));
    assert!(refused(&["--group", "gw/a/b/c"]).contains("gw/a/b/c"));
    let said = refused(&["--group", "rbd/gw", "--peer", "0.0.0.0:0", "--peer-key", &key(&site)]);
    assert!(said.contains("0.0.0.0"), "{said}");
    // Without its pool, a member starts, serves what else it has, and says why it is none yet.
    site.start_with_flags(&["--group", "rbd/gw", "--peer", "127.0.0.1:0"]);
    wait_until("the reason", || {
        let status = site.run(&["group", "status"]);
        status.stdout().contains("cannot") || status.stderr().contains("no Ceph cluster")
    });
    site.run(&["create", "a", "--size", "1M"]).ok();
    site.stop();
}

/// Writes a key of peers; returns its path.
fn key(site: &Site) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = site.path("peer.key");
    std::fs::write(&path, "ab".repeat(32)).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    path.to_string_lossy().into_owned()
}
