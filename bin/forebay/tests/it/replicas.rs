//! Replicas of write logs: what daemons offer each other, and what is refused.  Takeovers need a Ceph cluster:
//! `cargo xtask failover`.

use std::time::{Duration, Instant};

use crate::common::{Site, wait_until};
use serde_json::{Value, json};

/// Starts a daemon that listens for peers, with more lines in its configuration.
fn daemon(lines: &str) -> Site {
    let site = Site::new();
    let config = site.path("config.toml");
    std::fs::write(&config, format!("peer = ['unix:{}']\n{lines}", site.path("peer.sock").display())).expect("written");
    let mut site = site;
    site.start_with_flags(&["--config", config.to_str().expect("text")]);
    site
}

fn peer(site: &Site) -> Value {
    site.json(&["status"])["peers"][0].clone()
}

#[test]
fn daemons_describe_themselves_and_what_they_offer() {
    let holder_dir = tempfile::tempdir().expect("a directory");
    let replicas = holder_dir.path().join("replicas");
    let holder = daemon(&format!("[replicas]\npath = '{}'\nquota = '64M'\n", replicas.display()));
    let asker = daemon(&format!("peers = ['unix:{}']\n", holder.path("peer.sock").display()));
    wait_until("the holder is known", || peer(&asker)["id"].is_string());
    let offer = json!([{ "medium": "ssd", "quota": 64 << 20, "free": 64 << 20 }]);
    assert_eq!(peer(&asker)["replicas"], offer);
    assert!(peer(&asker)["host"].is_string() && peer(&asker)["round_trip_us"].is_u64());
    wait_until("the asker is known", || peer(&holder)["id"].is_string());
    assert_eq!(peer(&holder).get("replicas"), None, "it offers nothing");
    let text = asker.run(&["status"]).ok();
    assert!(text.contains("ssd 64 MiB free"), "{text}");
    assert!(replicas.exists(), "it is there before the first copy is");
}

#[test]
fn a_peer_that_is_being_connected_to_is_waited_for() {
    let holder = Site::new();
    let (socket, config) = (holder.path("peer.sock"), holder.path("config.toml"));
    let address = format!("unix:{}", socket.display());
    let replicas = holder.path("replicas");
    let text = format!("peer = ['{address}']\n[replicas]\npath = '{}'\nquota = '64M'\n", replicas.display());
    std::fs::write(&config, text).expect("written");
    let asker = daemon(&format!("peers = ['{address}']\n"));
    asker.run(&["create", "a", "--size", "8M"]).ok();
    let place = format!("ssd:{}:16M", asker.path("logs").display());
    std::thread::scope(|scope| {
        let attached = scope.spawn(|| {
            loop {
                let began = Instant::now();
                let done = asker.run(&["attach", "a", "--nbd", "--log", &place, "--replica", &address]);
                if done.0.status.code() != Some(3) {
                    return done;
                }
                assert!(began.elapsed() >= Duration::from_secs(10), "given up at once: {:?}", done.0);
            }
        });
        let mut holder = holder;
        holder.start_with_flags(&["--config", config.to_str().expect("text")]);
        // The peer is known; nobody could take over a log of an image in the daemon's own store.
        let said = attached.join().expect("attached").fails(9);
        assert!(said.contains("the pool 'local' is this daemon's own"), "{said}");
    });
}

#[test]
fn a_daemon_whose_replicas_cannot_be_opened_serves_its_images() {
    let dir = tempfile::tempdir().expect("a directory");
    let other = dir.path().join("not-a-log-device");
    std::fs::write(&other, vec![7; 1 << 20]).expect("written");
    let site = daemon(&format!("[replicas]\npath = '{}'\nquota = '64M'\n", other.display()));
    assert!(site.log().contains("cannot open the log device for replicas"), "{}", site.log());
    site.run(&["create", "a", "--size", "8M"]).ok();
    site.run(&["attach", "a", "--nbd"]).ok();
    assert_eq!(std::fs::read(&other).expect("there"), vec![7; 1 << 20], "left as it was");
}

#[test]
fn replicas_that_cannot_be_are_refused_and_nothing_is_made() {
    let site = daemon("");
    site.run(&["create", "a", "--size", "8M"]).ok();
    let logs = site.path("logs");
    let place = format!("ssd:{}:16M", logs.display());
    let attach = |more: &[&str]| site.run(&[&["attach", "a", "--nbd"][..], more].concat());
    let said = attach(&["--log", &place, "--replica", "nowhere"]).fails(3);
    assert!(said.contains("no connected peer is called 'nowhere'") && said.contains("forebay status"), "{said}");
    let id = "00112233445566778899aabbccddeeff";
    let said = attach(&["--log", &place, "--replica", id]).fails(9);
    assert!(said.contains("the pool 'local' is this daemon's own"), "{said}");
    let said = attach(&["--log", &place, "--replicas", "1"]).fails(7);
    assert!(said.contains("0 of the connected peers have room for a copy of 16 MiB"), "{said}");
    let pmem = format!("pmem:{}:16M", logs.display());
    let said = attach(&["--log", &pmem, "--replica", id]).fails(9);
    assert!(said.contains("the pool 'local' is this daemon's own"), "{said}");
    attach(&["--replica", id]).fails(2);
    attach(&["--log", &place, "--replica", id, "--replicas", "1"]).fails(2);
    attach(&["--log", &place, "--replicas", "9"]).fails(2);
    assert!(!logs.exists());
    let said = site.run(&["log", "takeover", "a"]).fails(3);
    assert!(said.contains("local/a has no write log"), "{said}");
    attach(&["--log", &place]).ok();
    let said = site.run(&["log", "takeover", "a"]).fails(9);
    assert!(said.contains("has no replicas"), "{said}");
}
