//! The read cache of a daemon: clones share their parent's data, a restart keeps it, damage costs reads only.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::rc::Rc;

use forebay_block::ObjectBackend;
use forebay_ram::cluster::rbd::ClosedImage;
use forebay_reactor::{DriverChoice, Reactor};
use forebay_store::{Store, StoreOptions};
use serde_json::{Value, json};

use crate::common::{Nbd, Site, content, shape, wait_until};

const SIZE: u64 = 8 << 20;
const PART: u64 = 64 << 10;
/// Parts of the parent that hold data: neither the third MiB, nor the last two, where [`content`] has none.
const DATA_PARTS: u64 = 80;
const CLONES: usize = 3;

fn cache_file(site: &Site) -> PathBuf {
    site.path("read-cache")
}

/// Starts a daemon whose read cache has a file and little memory.
fn start(site: &mut Site, memory: &str) {
    let config = site.path("forebay.toml");
    let file = cache_file(site);
    let text = format!("[read-cache]\npath = '{}'\nsize = '32M'\nmemory = '{memory}'\n", file.display());
    std::fs::write(&config, text).expect("a configuration");
    site.start_with_flags(&["--config", &config.display().to_string()]);
}

/// Makes empty images clones of `base@gold`, in the store of a daemon that does not run.
fn make_clones(site: &Site, snap: u64) {
    let path = site.data().join("store.img");
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let options = StoreOptions { pool: "local".into(), ..StoreOptions::default() };
        let store = Store::open(&path, options).await.expect("the store");
        let backend: Rc<dyn ObjectBackend> = store.clone();
        let id_of = async |name: &str| forebay_image::info(&backend, name).await.expect("an image").id;
        let base = id_of("base").await;
        for clone in 0..CLONES {
            let closed =
                ClosedImage { id: id_of(&format!("clone{clone}")).await, size: SIZE, mapped: None, overlap: None };
            closed.set_parent(&*backend, 0, &base, snap, SIZE).await.expect("a clone");
        }
        backend.flush().await.expect("durable");
        store.close().await.expect("closed");
    });
}

/// Returns a site with clones of a parent, without a daemon, and what the clones hold.
fn site_with_clones() -> (Site, Vec<u8>) {
    let mut site = Site::serving(&[]);
    let mut data = content(SIZE as usize, 7);
    data[2 << 20..3 << 20].fill(0);
    site.run_with_input(&["import", "-", "base"], &data).ok();
    let snap = site.json(&["snap", "create", "base@gold"])["id"].as_u64().expect("a number");
    for clone in 0..CLONES {
        site.run(&["create", &format!("clone{clone}"), "--size", "8M"]).ok();
    }
    site.stop();
    make_clones(&site, snap);
    (site, data)
}

fn status(site: &Site) -> Value {
    site.json(&["cache", "status"])
}

fn count(site: &Site, name: &str) -> u64 {
    status(site)[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", status(site)))
}

fn check_clones(site: &Site, data: &[u8]) {
    for clone in 0..CLONES {
        assert!(site.export(&format!("clone{clone}")) == data, "clone{clone}");
    }
}

/// Waits until everything that was fetched is on disk.
fn until_written(site: &Site) {
    wait_until("the parts are written", || count(site, "disk_used") == DATA_PARTS * PART);
}

#[test]
fn clones_read_their_parent_once_and_a_restart_keeps_it() {
    let (mut site, data) = site_with_clones();
    start(&mut site, "1M");
    check_clones(&site, &data);
    until_written(&site);
    let found = status(&site);
    assert!(count(&site, "misses") * PART <= SIZE * 105 / 100, "{found}");
    assert_eq!(found["fetched_bytes"].as_u64().map(|bytes| bytes / PART), found["misses"].as_u64(), "{found}");
    assert!(count(&site, "hits_disk") + count(&site, "hits_memory") >= 2 * DATA_PARTS, "{found}");
    assert_eq!((&found["disk"], &found["disk_errors"], &found["dropped"]), (&json!("on"), &json!(0), &json!(0)));
    assert_eq!(found["path"], json!(cache_file(&site)));
    let mode = std::fs::metadata(cache_file(&site)).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it holds data of images");
    assert_eq!(shape(&found)["hits_zero"], json!("number"));

    let text = site.run(&["status"]).ok();
    let line = text.lines().find(|line| line.starts_with("read cache:")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("MiB on disk") && line.ends_with("% hits"), "{line}");
    assert_eq!(site.json(&["status"])["read_cache"]["disk"], "on");
    let (_, metrics) = site.http("GET /metrics");
    let misses = format!("forebay_read_cache_misses_total {}\n", found["misses"]);
    for wanted in [
        "forebay_read_cache_disk_on 1",
        "forebay_read_cache_hits_total{layer=\"disk\"} ",
        "forebay_read_cache_used{layer=\"disk\"} 5242880",
        "forebay_read_cache_evictions_total{layer=\"memory\"} ",
        "forebay_read_cache_errors_total{kind=\"checksum\"} 0",
        &misses,
    ] {
        let wanted = wanted.replace("_used{", "_used_bytes{");
        assert!(metrics.contains(&wanted), "{wanted} in {metrics}");
    }

    // In order, and killed.
    for kill in [false, true] {
        if kill {
            site.kill()
        } else {
            site.stop()
        }
        start(&mut site, "1M");
        check_clones(&site, &data);
        let found = status(&site);
        assert_eq!((&found["misses"], &found["fetched_bytes"]), (&json!(0), &json!(0)), "{found}");
        assert!(count(&site, "hits_disk") >= DATA_PARTS, "{found}");
    }
    let text = site.run(&["cache", "status"]).ok();
    let hits = text.lines().find(|line| line.starts_with("hits:")).unwrap_or_else(|| panic!("{text}"));
    assert!(hits.ends_with(" 100.0 %") && text.contains("from disk:"), "{text}");
    site.stop();
}

#[test]
fn a_damaged_lost_or_foreign_file_gives_right_bytes() {
    let (mut site, data) = site_with_clones();
    start(&mut site, "0");
    check_clones(&site, &data);
    until_written(&site);
    site.stop();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(cache_file(&site)).expect("the file");
    let len = file.metadata().expect("its size").len();
    assert_eq!(len, 32 << 20);
    // A byte of each second slot, which follow the table, and one of a block of the table.
    for at in std::iter::once((64 << 10) + 500).chain(((128 << 10) + 777..len).step_by(128 << 10)) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 0x10], at).expect("a byte");
    }
    start(&mut site, "0");
    check_clones(&site, &data);
    let found = status(&site);
    assert!(count(&site, "misses") > 0 && count(&site, "hits_disk") > 0, "{found}");
    site.stop();

    std::fs::remove_file(cache_file(&site)).expect("removed");
    start(&mut site, "0");
    check_clones(&site, &data);
    assert!(count(&site, "misses") * PART <= SIZE * 105 / 100, "{}", status(&site));
    until_written(&site);
    assert_eq!(site.run(&["cache", "clear"]).ok(), "");
    assert_eq!((count(&site, "disk_used"), count(&site, "zeroes")), (0, 0));
    check_clones(&site, &data);
    until_written(&site);
    site.stop();

    std::fs::write(cache_file(&site), b"what somebody else has written").expect("written");
    start(&mut site, "1M");
    check_clones(&site, &data);
    let found = status(&site);
    assert_eq!(found["disk"], "off");
    let reason = found["reason"].as_str().expect("a reason");
    assert!(reason.contains("something else than a read cache"), "{reason}");
    assert!(site.log().contains("something else than a read cache"), "{}", site.log());
    let text = site.run(&["status"]).ok();
    assert!(text.contains("the disk is off (it holds something else"), "{text}");
    assert!(site.run(&["cache", "clear"]).fails(1).contains("something else"));
    assert_eq!(std::fs::read(cache_file(&site)).expect("the file"), b"what somebody else has written");
    site.stop();
}

#[test]
fn without_a_cache_the_commands_say_so() {
    let mut site = Site::new();
    for command in ["status", "clear"] {
        assert!(site.run(&["cache", command]).fails(4).contains("no daemon"));
    }
    let config = site.path("forebay.toml");
    std::fs::write(&config, "[read-cache]\nmemory = '0'\n").expect("a configuration");
    site.start_with_flags(&["--config", &config.display().to_string()]);
    for command in ["status", "clear"] {
        let said = site.run(&["cache", command]).fails(3);
        assert!(said.contains("no read cache") && said.contains("[read-cache]"), "{said}");
    }
    assert!(!site.run(&["status"]).ok().contains("read cache"));
    site.stop();
    // By default it has a layer in memory.
    site.start_with_flags(&[]);
    assert_eq!(site.json(&["cache", "status"])["memory_capacity"], 64 << 20);
    site.stop();
}

/// Returns what `targets` says of an image.
fn target(site: &Site, image: &str) -> Value {
    let targets = site.json(&["targets"]);
    let found = targets.as_array().expect("a list").iter().find(|target| target["image"] == image).cloned();
    found.unwrap_or_else(|| panic!("{image} is not exported: {targets}"))
}

#[test]
fn own_blocks_are_cached_for_images_that_ask_for_it() {
    const OPTION: &str = "forebay_cache_own_blocks";
    let mut site = Site::serving(&[]);
    site.stop();
    start(&mut site, "16M");
    let data = content(SIZE as usize, 3);
    for image in ["disk", "other"] {
        site.run_with_input(&["import", "-", image], &data).ok();
        site.run(&["attach", image, "--nbd"]).ok();
    }
    let connect = |site: &Site, image| Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    let own = |site: &Site, name: &str| status(site)["own"][name].as_u64().expect("a number");
    let (mut disk, mut other) = (connect(&site, "disk"), connect(&site, "other"));
    let read = |nbd: &mut Nbd| (0..SIZE).step_by(1 << 20).flat_map(|at| nbd.read(at, 1 << 20)).collect::<Vec<u8>>();
    assert!(read(&mut disk) == data && own(&site, "misses") == 0, "it is off by default");
    assert_eq!(target(&site, "disk")["own_blocks"], Value::Null);

    // At once, while hosts use the image.
    site.run(&["config", "image", "set", "disk", OPTION, "true"]).ok();
    wait_until("own blocks are cached", || target(&site, "disk")["own_blocks"] == "active");
    assert!(read(&mut disk) == data && read(&mut other) == data);
    let misses = own(&site, "misses");
    assert!((DATA_PARTS..=SIZE / PART).contains(&misses), "{}", status(&site));
    assert!(read(&mut disk) == data);
    assert_eq!((own(&site, "misses"), own(&site, "read_bytes")), (misses, 2 * SIZE));
    disk.write(PART + 17, b"changed");
    let mut changed = data.clone();
    changed[PART as usize + 17..][..7].copy_from_slice(b"changed");
    assert!(read(&mut disk) == changed && site.export("disk") == changed);
    assert_eq!((own(&site, "misses"), own(&site, "invalidated") > 0), (misses + 1, true), "{}", status(&site));
    let (_, metrics) = site.http("GET /metrics");
    let wanted = format!("forebay_read_cache_own_misses_total {}\n", misses + 1);
    assert!(metrics.contains(&wanted) && metrics.contains("forebay_read_cache_own_hits_total{layer=\"memory\"} "));
    let text = site.run(&["cache", "status"]).ok();
    assert!(text.contains("own blocks:") && text.contains(" 0 bypassed"), "{text}");
    let listed = site.json(&["config", "image", "ls", "disk"]);
    let option = listed.as_array().expect("a list").iter().find(|option| option["name"] == OPTION);
    assert_eq!(option, Some(&json!({"name": OPTION, "value": "true", "source": "image"})));

    // Nothing of it is left after a restart, in order or not.
    for kill in [false, true] {
        wait_until("the parts are written", || count(&site, "disk_used") >= DATA_PARTS * PART / 2);
        if kill {
            site.kill()
        } else {
            site.stop()
        }
        start(&mut site, "16M");
        assert_eq!(count(&site, "disk_used"), 0, "{}", status(&site));
        wait_until("own blocks are cached", || target(&site, "disk")["own_blocks"] == "active");
        assert!(read(&mut connect(&site, "disk")) == changed && own(&site, "misses") > 0);
    }
    site.run(&["config", "image", "rm", "disk", OPTION]).ok();
    assert_eq!(target(&site, "disk")["own_blocks"], Value::Null);
    let before = status(&site);
    assert!(read(&mut connect(&site, "disk")) == changed);
    assert_eq!(status(&site)["own"], before["own"]);
    let said = site.run(&["config", "pool", "set", "local", OPTION, "true"]).fails(2);
    assert!(said.contains("cannot be set for a pool"), "{said}");
    site.stop();

    // Without a cache it says so, and serves.
    std::fs::write(site.path("forebay.toml"), "[read-cache]\nmemory = '0'\n").expect("a configuration");
    let config = site.path("forebay.toml").display().to_string();
    site.start_with_flags(&["--config", &config]);
    site.run(&["config", "image", "set", "disk", OPTION, "1"]).ok();
    let found = target(&site, "disk");
    assert_eq!(found["own_blocks"], "unavailable");
    assert!(found["warnings"][0].as_str().is_some_and(|text| text.contains("no read cache")), "{found}");
    assert!(
        site.log().contains("own blocks of the image are not cached: this daemon has no read cache"),
        "{}",
        site.log()
    );
    assert!(read(&mut connect(&site, "disk")) == changed);
    site.stop();
}
