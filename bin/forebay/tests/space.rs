//! Full file systems beneath logs and the store.

mod common;

use common::{Mount, Nbd, Site, content};

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
        assert!(said.contains("MiB are asked for") && said.contains("MiB free"), "{said}");
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
    assert!(said.contains("MiB are asked for") && said.contains("MiB free"), "{said}");
    assert!(!path.exists() && free(&mount) == before, "something is left");
    site.run(&["attach", "a", "--nbd", "--log", &place("16M")]).ok();
}
