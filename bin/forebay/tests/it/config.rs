//! Options that images and pools override, through the command line: shapes, values, and limits of attached volumes.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Nbd, Site, wait_until};

const BLOCK: usize = 4096;

/// Returns the value and the source of an option in a list.
fn listed(options: &Value, name: &str) -> (String, String) {
    let found = options.as_array().expect("a list").iter().find(|option| option["name"] == name);
    let found = found.unwrap_or_else(|| panic!("{name} is not listed"));
    let text = |key: &str| found[key].as_str().expect("a text").to_owned();
    (text("value"), text("source"))
}

fn connect(site: &Site, image: &str) -> Nbd {
    Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects")
}

/// Returns what `targets` says of the limits of an image.
fn limits(site: &Site, image: &str) -> Value {
    let targets = site.json(&["targets"]);
    let found = targets.as_array().expect("a list").iter().find(|target| target["image"] == image);
    found.expect("it is exported")["qos"].clone()
}

#[test]
fn options_have_the_shapes_and_values_of_rbd() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "8M"]).ok();
        let image = site.json(&["config", "image", "ls", "disk"]);
        let names: Vec<_> = image.as_array().expect("a list").iter().map(|option| &option["name"]).collect();
        assert_eq!(names.len(), 77, "{mode}");
        assert_eq!(image[0], json!({"name": "rbd_atime_update_interval", "value": "60", "source": "config"}), "{mode}");
        let pool = site.json(&["config", "pool", "list", "local"]);
        assert_eq!(pool.as_array().map(Vec::len), Some(109), "{mode}");

        assert_eq!(site.run(&["config", "image", "set", "disk", "rbd_qos_iops_limit", "1K"]).ok(), "", "{mode}");
        site.run(&["config", "image", "set", "-p", "local", "--image", "disk", "rbd_cache", "false"]).ok();
        site.run(&["config", "pool", "set", "local", "rbd_qos_iops_limit", "500"]).ok();
        site.run(&["config", "pool", "set", "local", "rbd_qos_bps_limit", "100M"]).ok();
        assert_eq!(site.run(&["config", "image", "get", "disk", "rbd_qos_iops_limit"]).ok(), "1K\n", "{mode}");
        assert_eq!(site.run(&["config", "pool", "get", "local", "rbd_qos_iops_limit"]).ok(), "500\n", "{mode}");
        let image = site.json(&["config", "image", "ls", "disk"]);
        for (name, value, source) in [
            ("rbd_qos_iops_limit", "1K", "image"),
            ("rbd_cache", "false", "image"),
            ("rbd_qos_bps_limit", "100M", "pool"),
            ("rbd_qos_read_iops_limit", "0", "config"),
        ] {
            assert_eq!(listed(&image, name), (value.into(), source.into()), "{mode}");
        }
        let table = site.run(&["config", "image", "ls", "disk"]).ok();
        assert!(table.starts_with("There are 77 values:\nName  "), "{mode}: {table}");
        let row = table.lines().find(|row| row.starts_with("rbd_qos_iops_limit ")).expect("a row");
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["rbd_qos_iops_limit", "1K", "image"], "{mode}");
        assert!(site.run(&["config", "pool", "ls", "local"]).ok().starts_with("Name "), "{mode}");

        // An option of newer versions is listed once it is set.
        site.run(&["config", "image", "set", "disk", "rbd_qos_exclude_ops", "read,discard"]).ok();
        let image = site.json(&["config", "image", "ls", "disk"]);
        assert_eq!(listed(&image, "rbd_qos_exclude_ops").1, "image", "{mode}");

        site.run(&["config", "image", "rm", "disk", "rbd_qos_iops_limit"]).ok();
        let image = site.json(&["config", "image", "ls", "disk"]);
        assert_eq!(listed(&image, "rbd_qos_iops_limit"), ("500".into(), "pool".into()), "{mode}");
        for (arguments, code, says) in [
            (&["image", "rm", "disk", "rbd_qos_iops_limit"][..], 3, "rbd_qos_iops_limit is not set"),
            (&["image", "get", "disk", "rbd_qos_iops_limit"], 3, "rbd_qos_iops_limit is not set"),
            (&["pool", "rm", "local", "rbd_cache"], 3, "rbd_cache is not set"),
            (&["image", "set", "disk", "rbd_qos_iops_limit", "1k"], 2, "'1k' is no count"),
            (&["image", "set", "disk", "rbd_qos_iops_limit", "10MB"], 2, "'10MB' is no count"),
            (&["image", "set", "disk", "rbd_qos_iops_limit"], 2, "the value is missing"),
            (&["image", "set", "disk", "rbd_qos_iops_burst_seconds", "0"], 2, "1 or more"),
            (&["image", "set", "disk", "rbd_cache", "maybe"], 2, "true or false"),
            (&["image", "set", "disk", "rbd_default_features", "1"], 2, "cannot be set for an image"),
            (&["image", "set", "disk", "rbd_nosuch", "1"], 2, "invalid config key"),
            (&["pool", "set", "local", "osd_max", "1"], 2, "not an rbd option"),
            (&["image", "set", "none", "rbd_cache", "true"], 3, "there is no image local/none"),
            (&["image", "ls", "none"], 3, "there is no image local/none"),
            (&["pool", "ls"], 2, "POOL"),
        ] {
            let said = site.run(&[&["config"], arguments].concat()).fails(code);
            assert!(said.contains(says), "{mode}: {arguments:?}: {said}");
        }
    }
}

#[test]
fn options_of_the_daemon_come_last() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("forebay.toml");
    fs::write(&file, "[qos]\niops-limit = 7\nbps-limit = '5M'\nread-iops-limit = 70\n").expect("written");
    let mut site = Site::serving(&["--config", file.to_str().expect("a path")]);
    site.run(&["create", "disk", "--size", "8M"]).ok();
    site.run(&["config", "pool", "set", "local", "rbd_qos_bps_limit", "6M"]).ok();
    site.run(&["config", "image", "set", "disk", "rbd_qos_read_iops_limit", "80"]).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    let want = json!({"rbd_qos_iops_limit": 7, "rbd_qos_bps_limit": 6_000_000, "rbd_qos_read_iops_limit": 80});
    assert_eq!(limits(&site, "disk")["limits"], want);
    assert_eq!(
        listed(&site.json(&["config", "image", "ls", "disk"]), "rbd_qos_iops_limit"),
        ("7".into(), "config".into())
    );
    // They are found again at the next start, and change while the image is attached.
    site.stop();
    site.start();
    assert_eq!(limits(&site, "disk")["limits"], want);
    site.run(&["config", "pool", "rm", "local", "rbd_qos_bps_limit"]).ok();
    assert_eq!(limits(&site, "disk")["limits"]["rbd_qos_bps_limit"], 5_000_000);
    for option in ["rbd_qos_iops_limit", "rbd_qos_bps_limit", "rbd_qos_read_iops_limit"] {
        site.run(&["config", "image", "set", "disk", option, "0"]).ok();
    }
    assert_eq!(limits(&site, "disk"), Value::Null);

    fs::write(&file, "[qos]\niops = 7\n").expect("written");
    site.stop();
    let said = site.run(&["serve", "--config", file.to_str().expect("a path")]).fails(2);
    assert!(said.contains("[qos]: there is no setting 'iops'"), "{said}");
}

/// A rate is checked from the side that a slow machine does not reach: so many requests take so long at least.
#[test]
fn a_limit_holds_under_load() {
    const RATE: u64 = 100;
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "8M"]).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    site.run(&["config", "image", "set", "disk", "rbd_qos_write_iops_limit", &RATE.to_string()]).ok();
    let mut host = connect(&site, "disk");
    let began = Instant::now();
    let mut writes = 0;
    // A second's worth may have been saved up at most.
    while writes < 3 * RATE {
        host.write(writes * BLOCK as u64, &[1; BLOCK]);
        writes += 1;
    }
    let least = Duration::from_secs(2);
    assert!(began.elapsed() >= least, "{writes} writes in {:?}", began.elapsed());
    let told = limits(&site, "disk");
    assert_eq!(told["limits"], json!({"rbd_qos_write_iops_limit": RATE}));
    assert!(told["throttled"].as_u64() > Some(0) && told["throttled_ms"].as_u64() > Some(0), "{told}");
    let (status, metrics) = site.http("GET /metrics");
    assert_eq!(status, 200);
    for name in ["volume_throttled_requests_total", "volume_throttled_seconds_total"] {
        let line = format!("forebay_{name}{{pool=\"local\",image=\"disk\"}} ");
        let value = metrics.lines().find_map(|found| found.strip_prefix(&line)).expect(name);
        assert!(value.parse::<f64>().expect("a number") > 0.0, "{name} {value}");
    }
    // Reads have no limit: as many more of them than the writes had tokens for.
    (0..10 * RATE).for_each(|read| drop(host.read(read % RATE, BLOCK)));
    assert_eq!(limits(&site, "disk")["throttled"], told["throttled"], "reads have no limit");
}

/// With a byte a second, the first write leaves a debt, for which the second waits for more than an hour.
fn stuck(site: &Site) -> std::thread::JoinHandle<u32> {
    site.run(&["config", "image", "set", "disk", "rbd_qos_write_bps_limit", "1"]).ok();
    let before = limits(site, "disk")["throttled"].as_u64().expect("a number");
    let mut host = connect(site, "disk");
    let writer = std::thread::spawn(move || {
        host.write(0, &[1; BLOCK]);
        host.try_write(BLOCK as u64, &[2; BLOCK])
    });
    wait_until("the second write waits", || {
        let now = limits(site, "disk");
        now["throttled"].as_u64() == Some(before + 2) && now["waiting"] == 1
    });
    writer
}

#[test]
fn nothing_hangs_behind_a_limit() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "8M"]).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    // A limit that is lifted.
    let writer = stuck(&site);
    site.run(&["config", "image", "rm", "disk", "rbd_qos_write_bps_limit"]).ok();
    assert_eq!(writer.join().expect("it ends"), 0);
    // An export that ends: its requests in flight complete.
    let writer = stuck(&site);
    site.run(&["detach", "disk", "--force"]).ok();
    assert_eq!(writer.join().expect("it ends"), 0);
    // A limit that outlives it, and a daemon that stops.
    site.run(&["attach", "disk", "--nbd"]).ok();
    let writer = stuck(&site);
    site.stop();
    assert_eq!(writer.join().expect("it ends"), 0);
    site.start();
    site.run(&["config", "image", "rm", "disk", "rbd_qos_write_bps_limit"]).ok();
    assert_eq!(connect(&site, "disk").read(BLOCK as u64, BLOCK), [2; BLOCK]);
}

#[test]
fn the_times_of_use_by_hosts_are_recorded_at_intervals() {
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "8M"]).ok();
    site.run(&["config", "image", "set", "disk", "rbd_mtime_update_interval", "1"]).ok();
    site.run(&["config", "image", "set", "disk", "rbd_atime_update_interval", "0"]).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    let times = || {
        let info = site.json(&["info", "disk"]);
        ["create_timestamp", "access_timestamp", "modify_timestamp"].map(|name| info[name].to_string())
    };
    let [created, accessed, modified] = times();
    let mut host = connect(&site, "disk");
    let mut write = || {
        host.write(0, &[1; BLOCK]);
        host.read(0, BLOCK);
    };
    wait_until("the time of the write is recorded", || {
        write();
        times()[2] != modified
    });
    assert_eq!(times()[1], accessed, "disabled");
    // It goes on, and reads are recorded when that is asked for.
    let [_, _, modified] = times();
    site.run(&["config", "image", "set", "disk", "rbd_atime_update_interval", "1"]).ok();
    wait_until("both times are recorded", || {
        write();
        let [_, a, m] = times();
        a != accessed && m != modified
    });
    let info = times();
    assert_eq!(info[0], created);
    drop(host);
    site.run(&["detach", "disk", "--nbd"]).ok();
    site.run(&["rm", "disk"]).ok();
}
