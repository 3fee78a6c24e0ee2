//! Write logs through the command line: their limits, and looking after them when their images are not open.

mod common;

use common::{Nbd, Site, content};
use serde_json::json;

/// `--log` for a log on a file of the site.
fn place(site: &Site, more: &str) -> String {
    format!("ssd:{}:16M{more}", site.path("logs").display())
}

#[test]
fn limits_come_from_the_log_or_from_the_daemon_and_are_shown() {
    let mut site = Site::serving(&["--log-dirty-max", "4M", "--log-dirty-age", "5m"]);
    site.run(&["create", "a", "--size", "8M"]).ok();
    site.run(&["create", "b", "--size", "8M"]).ok();
    site.run(&["attach", "a", "--nbd", "--log", &place(&site, "")]).ok();
    site.run(&["attach", "b", "--nbd", "--log", &place(&site, ":dirty=1M:age=700ms")]).ok();
    let limits = |site: &Site, image: &str| {
        let info = site.json(&["log", "info", image]);
        (info["dirty_max"].clone(), info["dirty_age_max_ms"].clone())
    };
    for _ in 0..2 {
        assert_eq!(limits(&site, "a"), (json!(4 << 20), json!(300_000)));
        assert_eq!(limits(&site, "b"), (json!(1 << 20), json!(700)));
        let text = site.run(&["log", "info", "b"]).ok();
        assert!(text.contains("limits: 1 MiB, 700ms"), "{text}");
        // After a restart too.
        site.stop();
        site.start();
    }
    let said = site.run(&["attach", "a", "--nbd", "--log", &place(&site, ":dirty=0B")]).fails(2);
    assert!(said.contains("dirty=0 leaves no room"), "{said}");
    // Without the daemon its own settings are not known, those of the log are.
    site.stop();
    assert_eq!(limits(&site, "a"), (json!(null), json!(2000)));
    assert_eq!(limits(&site, "b"), (json!(1 << 20), json!(700)));
}

#[test]
fn a_log_is_looked_after_when_its_image_is_not_open() {
    let mut site = Site::serving(&["--log-dirty-age", "60m"]);
    for image in ["saved", "lost"] {
        site.run(&["create", image, "--size", "8M"]).ok();
        site.run(&["attach", image, "--nbd", "--log", &place(&site, "")]).ok();
        let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
        client.write(1 << 20, &content(64 << 10, 7));
        client.flush();
    }
    // As after a power failure: nobody has the images open, and the daemon does not run.
    site.kill();
    let logs = site.json(&["log", "ls"]);
    assert_eq!(logs.as_array().map(Vec::len), Some(2), "{logs}");
    for image in ["saved", "lost"] {
        let info = site.json(&["log", "info", image]);
        assert_eq!((&info["state"], &info["dirty_bytes"]), (&json!("closed"), &json!(64 << 10)), "{info}");
        assert!(info["dirty_since_ms"].as_u64() > Some(0), "{info}");
    }
    site.run(&["log", "flush", "saved"]).ok();
    assert_eq!(site.json(&["log", "info", "saved"])["dirty_bytes"], json!(0));
    let said = site.run(&["log", "discard", "lost"]).fails(6);
    assert!(said.contains("64 KiB") && said.contains("--force"), "{said}");
    site.run(&["log", "discard", "lost", "--force"]).ok();
    site.run(&["log", "info", "lost"]).fails(3);
    site.run(&["log", "discard", "saved"]).ok();
    let bytes = |image: &str| site.export(image)[1 << 20..(1 << 20) + (64 << 10)].to_vec();
    assert!(bytes("saved") == content(64 << 10, 7), "what was flushed is in the image");
    assert!(bytes("lost").iter().all(|&byte| byte == 0), "what was discarded is not");
}
