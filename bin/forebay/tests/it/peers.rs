//! Daemons and clients that speak in messages.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use crate::common::{Done, PATIENCE, Site, forebay};
use serde_json::{Value, json};

/// A key in a file that only its owner reads.
fn key_in(dir: &Path, byte: u8) -> String {
    let path = dir.join(format!("key-{byte:02x}"));
    std::fs::write(&path, format!("{byte:02x}").repeat(32) + "\n").expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    path.to_str().expect("text").to_owned()
}

/// Returns the address on which a daemon listens for peers.
fn addr(site: &Site, at: usize) -> String {
    site.json(&["status"])["peer"][at].as_str().expect("an address").to_owned()
}

fn perf(args: &[&str]) -> Done {
    let mut command = forebay();
    command.args(["perf", "messenger", "run", "--seconds", "0.2", "--depth", "4", "--format", "json", "--addr"]);
    Done(command.args(args).output().expect("the command"))
}

/// The one peer of a daemon, once it is so.
fn peer(site: &Site, is: impl Fn(&Value) -> bool) -> Value {
    let started = Instant::now();
    loop {
        let status = site.json(&["status"]);
        if let [one] = status["peers"].as_array().expect("a list").as_slice()
            && is(one)
        {
            return one.clone();
        }
        assert!(started.elapsed() < PATIENCE, "the peers stay {}\n{}", status["peers"], site.log());
    }
}

fn metric(site: &Site, name: &str) -> f64 {
    let (_, text) = site.http("GET /metrics");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

/// Waits until so many connections were refused: a peer may know before the daemon has counted it.
fn refusals(site: &Site, wanted: f64) {
    let started = Instant::now();
    loop {
        let refused = metric(site, "forebay_peer_refused_total");
        if refused == wanted {
            return;
        }
        assert!(refused < wanted && started.elapsed() < PATIENCE, "{refused} of {wanted} are refused\n{}", site.log());
    }
}

#[test]
fn a_running_daemon_can_be_measured_over_every_transport() {
    let site = Site::new();
    let (unix, shm) = (site.path("peer.sock"), site.path("peer.shm"));
    let config = site.path("config.toml");
    // There is no RDMA on the loopback device: it falls back, and says so.
    std::fs::write(&config, "cluster = 'rdma'\nclient = 'tcp'\nrdma_local = '127.0.0.1'\n").expect("written");
    let (unix_flag, shm_flag) = (format!("unix:{}", unix.display()), format!("shm:{}", shm.display()));
    let flags = [
        "--config",
        config.to_str().expect("text"),
        "--peer",
        "127.0.0.1:0",
        "--peer",
        &unix_flag,
        "--peer",
        &shm_flag,
    ];
    let mut serving = Site::serving(&flags);
    assert!(addr(&serving, 0).starts_with("tcp:127.0.0.1:"), "{}", addr(&serving, 0));
    assert!(serving.log().contains("cannot listen over RDMA"), "{}", serving.log());
    let before = metric(&serving, "forebay_peer_messages_total");
    for at in 0..3 {
        let report = perf(&[&addr(&serving, at)]).json();
        assert!(report["messages"].as_u64() > Some(0), "{}: {report}", addr(&serving, at));
    }
    // Both ends must leave checksums out; the daemon does not.
    perf(&[&addr(&serving, 0), "--no-crc", "--lossy"]).fails(4);
    // By way of the same configuration: its transport for clients, where the address names none.
    let place = addr(&serving, 0).strip_prefix("tcp:").expect("tcp").to_owned();
    let report = perf(&[&place, "--config", config.to_str().expect("text")]).json();
    assert_eq!(report["address"], json!(format!("tcp:{place}")));
    assert!(metric(&serving, "forebay_peer_messages_total") > before + 4.0);
    assert_eq!(metric(&serving, "forebay_peer_refused_total"), 1.0);
    serving.stop();
    assert!(!unix.exists() && !shm.exists(), "sockets are left");
}

#[test]
fn two_daemons_know_of_each_other_over_a_restart() {
    let shared = tempfile::tempdir().expect("a directory");
    let file = key_in(shared.path(), 0x5a);
    let socket = format!("unix:{}", shared.path().join("peer.sock").display());
    let mut one = Site::serving(&["--peer", &socket, "--peer-key", &file]);
    let config = shared.path().join("config.toml");
    std::fs::write(&config, format!("peers = ['{socket}']\npeer-key = '{file}'\n")).expect("written");
    let other = Site::serving(&["--config", config.to_str().expect("text")]);
    let seen = peer(&other, |peer| peer["state"] == "open");
    assert_eq!(
        (&seen["address"], &seen["outgoing"], &seen["transport"]),
        (&json!(socket), &json!(true), &json!("unix"))
    );
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    let seen = peer(&one, |peer| peer["state"] == "open");
    assert_eq!((&seen["name"], &seen["outgoing"]), (&json!(host.trim()), &json!(false)));
    assert_eq!((metric(&one, "forebay_peers"), metric(&other, "forebay_peers")), (1.0, 1.0));
    assert!(other.run(&["status"]).ok().contains(&socket));
    one.stop();
    let lost = peer(&other, |peer| peer["state"] == "connecting" && peer["reason"].is_string());
    assert_eq!(lost["outgoing"], json!(true));
    assert!(metric(&other, "forebay_peer_interrupted_total") >= 1.0);
    one.start();
    peer(&other, |peer| peer["state"] == "open");
    peer(&one, |peer| peer["state"] == "open");
}

#[test]
fn who_has_another_key_or_comes_from_elsewhere_is_refused() {
    let shared = tempfile::tempdir().expect("a directory");
    let (right, wrong) = (key_in(shared.path(), 0x5a), key_in(shared.path(), 0xa5));
    let site = Site::serving(&["--peer", "127.0.0.1:0", "--peer-key", &right]);
    let place = addr(&site, 0);
    assert!(perf(&[&place, "--key-file", &right]).json()["messages"].as_u64() > Some(0));
    assert!(perf(&[&place, "--key-file", &right, "--secure"]).json()["messages"].as_u64() > Some(0));
    for (flags, says) in [(&["--key-file", &*wrong][..], "error -13"), (&[], "refuses authentication method 0x1")] {
        let said = perf(&[&[&*place], flags].concat()).fails(4);
        assert!(said.contains(says), "{flags:?}: {said}");
    }
    refusals(&site, 2.0);
    let elsewhere = Site::serving(&["--peer", "127.0.0.1:0", "--peer-key", &right, "--peer-allow", "10.0.0.0/8"]);
    let done = perf(&[&addr(&elsewhere, 0), "--key-file", &right, "--lossy"]);
    assert!(!done.0.status.success(), "{}", done.stdout());
    assert!(metric(&elsewhere, "forebay_peer_refused_total") >= 1.0);
    assert!(elsewhere.log().contains("none of the networks"), "{}", elsewhere.log());
}

#[test]
fn a_place_that_others_reach_needs_a_key() {
    let site = Site::new();
    let said = site.run(&["serve", "--store-size", "160M", "--peer", "0.0.0.0:0"]).fails(2);
    assert!(said.contains("--peer-key"), "{said}");
}
