//! The embedded store from the command line: made, checked, damaged.

mod common;

use std::os::unix::fs::FileExt;

use common::{Site, content, shape};
use serde_json::json;

#[test]
fn init_check_and_df() {
    let site = Site::new();
    let made = site.json(&["store", "init", "--size", "128M"]);
    let want = json!({
        "path": "string", "capacity": "number", "used": "number", "available": "number", "objects": "number",
    });
    assert_eq!(shape(&made), want);
    let said = site.run(&["store", "init", "--size", "128M"]).fails(5);
    assert!(said.contains("--force"), "{said}");
    std::fs::write(site.path("file"), content(8 << 20, 1)).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    let space = site.json(&["store", "df"]);
    assert_eq!(shape(&space), want);
    assert!(space["used"].as_u64().expect("a number") > 4 << 20, "{space}");
    assert!(site.run(&["store", "df"]).ok().contains("capacity:"));
    let report = site.json(&["store", "check"]);
    assert_eq!(report["damage"], json!([]));
    assert!(report["blocks_read"].as_u64().expect("a number") > 1000, "{report}");
    let quick = site.json(&["store", "check", "--quick"]);
    assert_eq!(quick["blocks_read"], json!(0));
    site.run(&["store", "init", "--size", "128M", "--force"]).ok();
    assert_eq!(site.json(&["ls"]), json!([]));
}

#[test]
fn a_store_too_small_is_refused() {
    let site = Site::new();
    site.run(&["store", "init", "--size", "64K"]).fails(2);
}

#[test]
fn a_running_daemon_keeps_its_store_to_itself() {
    let site = Site::serving(&[]);
    for args in [&["store", "check"][..], &["store", "init", "--force", "--size", "64M"]] {
        let said = site.run(args).fails(6);
        assert!(said.contains("stop the daemon"), "{args:?}: {said}");
    }
    assert!(site.json(&["store", "df"])["capacity"].as_u64().expect("a number") > 0);
}

#[test]
fn a_store_elsewhere_is_found() {
    let site = Site::new();
    let elsewhere = site.path("elsewhere.img");
    site.run(&["store", "init", "--size", "128M", "--store", elsewhere.to_str().expect("a path")]).ok();
    site.run(&["create", "x", "--size", "1G"]).ok();
    assert_eq!(site.run(&["ls"]).ok(), "x\n");
    site.run(&["store", "check"]).ok();
    let said = site.run(&["store", "init", "--size", "128M", "--store", "/dev/other"]).fails(2);
    assert!(said.contains("elsewhere.img"), "{said}");
}

#[test]
fn damage_is_found_and_never_returned_as_data() {
    let site = Site::with_store();
    let bytes = vec![0x5a; 8 << 20];
    std::fs::write(site.path("file"), &bytes).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    // One byte of the image's content, wherever the store has put it.
    let path = site.data().join("store.img");
    let store = std::fs::read(&path).expect("the store");
    let run = store.windows(65536).position(|window| window.iter().all(|&byte| byte == 0x5a)).expect("the content");
    let file = std::fs::File::options().write(true).open(&path).expect("the store");
    file.write_all_at(&[0x5b], run as u64 + 30_000).expect("damaged");
    let said = site.run(&["export", "x", "out"]).fails(8);
    assert!(said.contains("checksum mismatch") && said.contains("store check"), "{said}");
    assert!(!site.path("out").exists(), "half an export is left");
    let done = site.run(&["store", "check", "--format", "json"]);
    assert_eq!(done.0.status.code(), Some(8), "{}", done.stderr());
    let report: serde_json::Value = serde_json::from_str(&done.stdout()).expect("JSON");
    assert_eq!(report["damage"].as_array().map(Vec::len), Some(1), "{report}");
    // The daemon says the same, and lives.
    let mut site = site;
    site.start();
    let said = site.run(&["export", "x", "-"]);
    assert_eq!(said.0.status.code(), Some(8), "{}", said.stderr());
    assert!(said.stderr().contains("checksum mismatch"), "{}", said.stderr());
    site.run(&["status"]).ok();
}

#[test]
fn what_is_no_store_is_refused() {
    let site = Site::with_store();
    let path = site.data().join("store.img");
    std::fs::write(&path, vec![0xee; 1 << 20]).expect("rubbish");
    let said = site.run(&["ls"]);
    assert!(matches!(said.0.status.code(), Some(2 | 8)), "{}", said.stderr());
    assert!(said.stderr().contains("store.img"), "{}", said.stderr());
    let said = site.run(&["serve"]);
    assert!(matches!(said.0.status.code(), Some(2 | 8)), "{}", said.stderr());
    assert_eq!(std::fs::read(&path).expect("the file"), vec![0xee; 1 << 20], "it was overwritten");
}
