//! Full file systems beneath logs and the store.

use std::io::Write;

use crate::common::{Mount, Nbd, Site, content};

/// Bytes that are free on a file system.
fn free(mount: &Mount) -> u64 {
    let done = std::process::Command::new("df").args(["--output=avail", "-B1"]).arg(mount.path()).output().expect("df");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    text.lines().nth(1).and_then(|line| line.trim().parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

#[test]
fn a_log_larger_than_the_free_space_is_refused_and_leaves_nothing() {
    let site = Site::serving(&[]);
    let Some(mount) = Mount::tmpfs(&site.path("ssd"), "64m") else { return };
    let path = mount.path().join("logs");
    let place = |size: &str| format!("ssd:{}:{size}", path.display());
    for image in ["a", "b"] {
        site.run(&["create", image, "--size", "16M"]).ok();
    }
    let before = free(&mount);
    for size in ["300G", "63M"] {
        let said = site.run(&["attach", "a", "--nbd", "--log", &place(size)]).fails(7);
        assert!(said.contains("MiB are required") && said.contains("MiB free"), "{said}");
        assert!(said.contains("left to others"), "{said}");
        assert!(!path.exists(), "the file is left");
        assert_eq!(free(&mount), before);
    }
    site.run(&["attach", "a", "--nbd", "--log", &place("24M")]).ok();
    let length = path.metadata().expect("the logs").len();
    site.run(&["attach", "b", "--nbd", "--log", &place("40M")]).fails(7);
    assert_eq!(path.metadata().expect("the logs").len(), length);
    // What is there goes on working, and a log that fits is made.
    site.run(&["attach", "b", "--nbd", "--log", &place("16M")]).ok();
    let bytes = content(1 << 20, 3);
    for image in ["a", "b"] {
        let mut host = Nbd::connect(&site.data().join("nbd.sock"), &format!("local/{image}")).expect("connected");
        host.write(0, &bytes);
        host.flush();
        assert_eq!(host.read(0, bytes.len()), bytes);
    }
}

#[test]
fn a_log_in_memory_larger_than_the_free_space_is_refused_and_leaves_nothing() {
    let site = Site::serving(&[]);
    let Some(mount) = Mount::tmpfs(&site.path("pmem"), "64m") else { return };
    let path = mount.path().join("logs");
    site.run(&["create", "a", "--size", "16M"]).ok();
    let before = free(&mount);
    let place = |size: &str| format!("pmem:{}:{size}:force", path.display());
    let said = site.run(&["attach", "a", "--nbd", "--log", &place("300G")]).fails(7);
    assert!(said.contains("MiB are required") && said.contains("MiB free"), "{said}");
    assert!(!path.exists() && free(&mount) == before, "something is left");
    site.run(&["attach", "a", "--nbd", "--log", &place("16M")]).ok();
}

const NBD_NO_SPACE: u32 = 28;

/// Takes what is left of a file system, as others would.
fn take_the_rest(mount: &Mount) -> std::path::PathBuf {
    let path = mount.path().join("filler");
    let mut filler = std::fs::File::create(&path).expect("a file");
    let chunk = vec![0x77; 64 << 10];
    while filler.write_all(&chunk).is_ok() {}
    while filler.write_all(&chunk[..512]).is_ok() {}
    drop(filler.sync_all());
    path
}

fn local(site: &Site) -> serde_json::Value {
    site.json(&["status"])["pools"][0].clone()
}

/// A sparse store on a file system that others fill: it says so, removals work, and writes go on when there is space.
fn others_fill_the_file_system(mut site: Site, mount: &Mount) {
    site.start();
    for image in ["x", "y"] {
        site.run(&["create", image, "--size", "64M"]).ok();
        site.run(&["attach", image, "--nbd"]).ok();
    }
    let socket = site.data().join("nbd.sock");
    let mut host = Nbd::connect(&socket, "local/y").expect("connected");
    let bytes = vec![0x5a; 1 << 20];
    for at in 0..8 {
        host.write(at << 20, &bytes);
    }
    host.flush();
    assert!(local(&site)["limited_by"].is_string() || local(&site)["available"].as_u64().expect("a number") > 30 << 20);
    let filler = take_the_rest(mount);
    // Refused in good time, before anything that was acknowledged could be lost.
    let refused = (8..64).map(|at| host.try_write(at << 20, &bytes)).find(|error| *error != 0);
    assert_eq!(refused, Some(NBD_NO_SPACE));
    host.flush();
    let pool = local(&site);
    assert!(pool["available"].as_u64().expect("a number") < 8 << 20, "{pool}");
    assert!(pool["limited_by"].as_str().is_some_and(|limit| limit.contains("the host's file system")), "{pool}");
    assert!(site.run(&["status"]).ok().contains("local is limited by the host's file system"));
    std::fs::write(site.path("file"), vec![0x33; 24 << 20]).expect("a file");
    let said = site.run(&["import", "file", "z"]).fails(7);
    assert!(said.contains("host's file system is full") && !said.contains("the pool local is full"), "{said}");
    // What gives up space can be done, more than once.
    for _ in 0..2 {
        site.run(&["detach", "x"]).ok();
        site.run(&["attach", "x", "--nbd"]).ok();
    }
    site.run(&["detach", "x"]).ok();
    site.run(&["rm", "x"]).ok();
    assert_eq!(host.read(7 << 20, bytes.len()), bytes);
    // By itself, on the connection that was refused.
    std::fs::remove_file(filler).expect("removed");
    for at in 8..24 {
        host.write(at << 20, &bytes);
    }
    host.flush();
    assert_eq!(host.read(23 << 20, bytes.len()), bytes);
    site.stop();
    site.run(&["store", "check"]).ok();
    site.start();
    let mut host = Nbd::connect(&socket, "local/y").expect("connected");
    assert_eq!(host.read(23 << 20, bytes.len()), bytes);
    site.stop();
}

#[test]
fn a_store_on_ext4_that_others_fill_recovers_by_itself() {
    let site = Site::new();
    let Some(mount) = Mount::ext4(&site.data(), &site.path("image"), 112 << 20) else { return };
    others_fill_the_file_system(site, &mount);
}

#[test]
fn a_store_on_tmpfs_that_others_fill_recovers_by_itself() {
    let site = Site::new();
    let Some(mount) = Mount::tmpfs(&site.data(), "112m") else { return };
    others_fill_the_file_system(site, &mount);
}

#[test]
fn a_preallocated_store_has_its_space_whatever_others_do() {
    let mut site = Site::new();
    let Some(mount) = Mount::ext4(&site.data(), &site.path("image"), 160 << 20) else { return };
    let said = site.run(&["store", "init", "--size", "1G", "--preallocate"]).fails(7);
    assert!(said.contains("bytes"), "{said}");
    assert!(!site.data().join("store.img").exists(), "half a store is left");
    site.run(&["store", "init", "--size", "128M", "--preallocate"]).ok();
    site.start();
    let _filler = take_the_rest(&mount);
    // Also for a daemon that starts when it is full.
    site.stop();
    site.start();
    let pool = local(&site);
    assert!(pool["limited_by"].is_null() && pool["available"].as_u64().expect("a number") > 64 << 20, "{pool}");
    site.run(&["create", "x", "--size", "64M"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    let mut host = Nbd::connect(&site.data().join("nbd.sock"), "local/x").expect("connected");
    for at in 0..48 {
        host.write(at << 20, &vec![0x5a; 1 << 20]);
    }
    host.flush();
    site.stop();
}
