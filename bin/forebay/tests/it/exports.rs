//! Requests for exports, contents of the file of exports, and images that hang.

use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::common::{Nbd, Site, wait_until};
use serde_json::{Value, json};

const FRONTS: [&str; 4] = ["--nvme", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"];

fn targets_file(site: &Site) -> std::path::PathBuf {
    site.data().join("targets.json")
}

/// Returns the contents of the list of exports and its journal.
fn listed(site: &Site) -> Vec<Value> {
    let Ok(text) = std::fs::read(targets_file(site)) else { return Vec::new() };
    let file: Value = serde_json::from_slice(&text).expect("JSON");
    let mut targets = file["targets"].as_array().expect("a list").clone();
    let journal = std::fs::read_to_string(site.data().join("targets.journal")).unwrap_or_default();
    let mut lines = journal.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    if lines.next().is_none_or(|head| head["generation"] != file["generation"]) {
        return targets;
    }
    for change in lines.flat_map(|line| line.as_array().expect("changes").clone()) {
        targets.retain(|target| ["front", "pool", "image"].iter().any(|part| target[part] != change[part]));
        targets.extend(change["entries"].as_array().into_iter().flatten().cloned());
    }
    targets
}

fn list(path: &Path, targets: Value) {
    let text = json!({ "version": 1, "targets": targets }).to_string();
    std::fs::write(path, text).expect("written");
}

/// An export as the daemon shows it.
fn target(site: &Site, image: &str, front: &str) -> Value {
    let targets = site.json(&["targets"]);
    let all = targets.as_array().expect("a list");
    let found = all.iter().find(|target| target["image"] == json!(image) && target["front"] == json!(front));
    found.unwrap_or_else(|| panic!("{image} over {front} is not in {targets}")).clone()
}

fn is_served(target: &Value) -> bool {
    target["uri"].is_string() && target.get("error").is_none()
}

/// Returns the reason for which an export is not served.
fn error(target: &Value) -> String {
    assert!(target["uri"].is_null(), "{target}");
    target["error"]["message"].as_str().unwrap_or_else(|| panic!("no error in {target}")).to_owned()
}

/// Asks for an export over the API.
fn post(site: &Site, request: &Value) -> (u16, Value) {
    let body = request.to_string();
    // What ends the head is added by the sender, so the body follows an empty line of its own.
    let ask = format!("POST /v1/targets\ncontent-type: application/json\ncontent-length: {}\n\n{body}", body.len());
    let (status, body) = site.http(&ask);
    (status, serde_json::from_str(&body).unwrap_or(Value::String(body)))
}

#[test]
fn numbers_that_no_front_can_serve_are_refused_and_cost_nothing() {
    let mut site = Site::serving(&FRONTS);
    for image in ["one", "two"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    site.run(&["attach", "one", "--nvme", "--nsid", "8192"]).ok();
    site.run(&["attach", "one", "--iscsi", "--lun", "16383"]).ok();
    for (front, flag, number, last) in [
        ("--nvme", "--nsid", "0", "8192"),
        ("--nvme", "--nsid", "8193", "8192"),
        ("--nvme", "--nsid", "9000", "8192"),
        ("--nvme", "--nsid", "4294967295", "8192"),
        ("--iscsi", "--lun", "16384", "16383"),
        ("--iscsi", "--lun", "4294967295", "16383"),
    ] {
        let said = site.run(&["attach", "two", front, flag, number]).fails(2);
        assert!(said.contains(last), "{flag} {number}: {said}");
    }
    for (front, unit, last) in [
        ("nvme", 0_u32, "8192"),
        ("nvme", 9000, "8192"),
        ("nvme", u32::MAX, "8192"),
        ("iscsi", 16_384, "16383"),
        ("iscsi", u32::MAX, "16383"),
        ("nbd", 1, "no numbers"),
    ] {
        let request = json!({ "pool": "local", "image": "two", "front": front, "unit": unit });
        let (status, body) = post(&site, &request);
        assert_eq!(status, 400, "{front} {unit}: {body}");
        assert!(body.to_string().contains(last), "{front} {unit}: {body}");
    }
    assert_eq!(listed(&site).len(), 2, "nothing of it is remembered");
    // It goes on, and so does the next one.
    site.run(&["attach", "two", "--nvme"]).ok();
    let before = site.json(&["targets"]);
    site.kill();
    site.start();
    assert_eq!(shown(&site.json(&["targets"])), shown(&before));

    /// Which exports there are, whatever their addresses are now.
    fn shown(targets: &Value) -> Vec<(Value, Value, bool)> {
        let all = targets.as_array().expect("a list");
        all.iter().map(|target| (target["image"].clone(), target["front"].clone(), is_served(target))).collect()
    }
}

#[test]
fn a_file_with_entries_that_make_no_sense_serves_the_others() {
    let mut site = Site::serving(&FRONTS);
    for image in ["good", "far", "low", "twice", "same", "left", "right"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    site.stop();
    let entry = |image: &str, front: &str, unit: Value| json!({ "pool": "local", "image": image, "front": front, "unit": unit });
    let nbd = |image: &str| json!({ "pool": "local", "image": image, "front": "nbd" });
    let strange = json!({ "no": "export" });
    let bad_name = json!({ "pool": "local", "image": "a/b/c", "front": "nbd" });
    let mut read_only = nbd("twice");
    read_only["read_only"] = json!(true);
    let mut bad_group = entry("low", "nvme", json!(7));
    bad_group["ana_group"] = json!(99);
    let targets = json!([
        entry("far", "nvme", json!(9000)),
        entry("far", "iscsi", json!(16_384)),
        entry("low", "iscsi", json!(5_000_000_000_u64)),
        bad_group,
        nbd("twice"),
        read_only,
        nbd("same"),
        nbd("same"),
        entry("left", "iscsi", json!(3)),
        entry("right", "iscsi", json!(3)),
        nbd("missing"),
        strange,
        bad_name,
        entry("good", "nvme", json!(1)),
        entry("good", "iscsi", json!(0)),
        nbd("good"),
    ]);
    list(&targets_file(&site), targets);
    site.start();

    for (image, front) in [("good", "nvme"), ("good", "iscsi"), ("good", "nbd"), ("same", "nbd")] {
        assert!(is_served(&target(&site, image, front)), "{image} over {front}: {}", target(&site, image, front));
    }
    let log = site.log();
    for (image, front, why) in [
        ("far", "nvme", "8192"),
        ("far", "iscsi", "16383"),
        ("low", "iscsi", "5000000000"),
        ("low", "nvme", "ANA group 99"),
        ("twice", "nbd", "twice"),
        ("left", "iscsi", "local/right"),
        ("right", "iscsi", "local/left"),
        ("missing", "nbd", "no image"),
    ] {
        let said = error(&target(&site, image, front));
        assert!(said.contains(why), "{image} over {front}: {said}");
        let line = log.lines().find(|line| {
            line.contains("is not served") && line.contains(&format!("local/{image}")) && line.contains(front)
        });
        assert!(line.is_some_and(|line| line.contains(why)), "{image} over {front} in\n{log}");
    }
    assert!(log.contains("a/b/c") && log.contains("\"no\""), "{log}");

    // Nothing is guessed: each is ended, and attached as it should be.
    let said = site.run(&["attach", "twice", "--nbd"]).fails(5);
    assert!(said.contains("detach"), "{said}");
    site.run(&["detach", "twice"]).ok();
    site.run(&["attach", "twice", "--nbd"]).ok();
    site.run(&["detach", "far"]).ok();
    site.run(&["attach", "far", "--nvme"]).ok();
    site.run(&["detach", "low"]).ok();
    // With one of two gone the other has its number for itself.
    site.run(&["attach", "right", "--iscsi"]).fails(5);
    site.run(&["detach", "left"]).ok();
    site.run(&["attach", "right", "--iscsi"]).ok();
    site.run(&["attach", "left", "--iscsi"]).ok();
    site.run(&["detach", "missing"]).ok();
    // What cannot be understood at all is left as it was found.
    let left = listed(&site);
    assert!(left.contains(&strange) && left.contains(&bad_name), "{left:?}");
    assert_eq!(left.len(), 2 + 8, "{left:?}");
    site.kill();
    site.start();
    let targets = site.json(&["targets"]);
    let all = targets.as_array().expect("a list");
    assert!(all.len() == 8 && all.iter().all(is_served), "{targets}");
}

#[test]
fn an_export_that_could_not_be_served_comes_back_by_itself() {
    let mut site = Site::serving(&[]);
    let (log, away) = (site.path("logs"), site.path("away"));
    site.run(&["create", "x", "--size", "8M"]).ok();
    site.run(&["attach", "x", "--nbd", "--log", &format!("ssd:{}:16M", log.display())]).ok();
    Nbd::connect(&site.data().join("nbd.sock"), "x").expect("connected").write(0, &[7; 4096]);
    site.kill();
    std::fs::rename(&log, &away).expect("renamed");
    site.start();
    let said = error(&target(&site, "x", "nbd"));
    assert!(said.contains(&log.display().to_string()), "{said}");
    assert_eq!(site.json(&["status"])["unserved"], 1);
    let shown = site.run(&["status"]).ok();
    assert!(shown.contains("1 not served"), "{shown}");
    let (_, metrics) = site.http("GET /metrics");
    let of_it = "forebay_target_unserved{front=\"nbd\",pool=\"local\",image=\"x\",kind=\"";
    assert!(metrics.contains("forebay_targets_unserved 1") && metrics.contains(of_it), "{metrics}");
    // Its cause is gone.
    std::fs::rename(&away, &log).expect("renamed");
    wait_until("it is served again", || is_served(&target(&site, "x", "nbd")));
    assert_eq!(site.json(&["status"])["unserved"], 0);
    let mut host = Nbd::connect(&site.data().join("nbd.sock"), "x").expect("connected");
    assert_eq!(host.read(0, 4096), [7; 4096]);
    wait_until("the log says so", || site.log().contains("an export is served again"));
    assert_eq!(site.log().matches("an export is not served").count(), 1, "{}", site.log());
}

#[test]
fn an_export_is_remembered_when_it_is_served_and_forgotten_when_it_is_not() {
    let site = Site::serving(&FRONTS);
    for image in ["x", "y"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    // The list cannot be written: what it is written to first is a directory.
    let beside = site.data().join("targets.new");
    std::fs::create_dir(&beside).expect("made");
    assert!(!site.run(&["attach", "y", "--nbd"]).0.status.success());
    assert_eq!((listed(&site).len(), site.json(&["targets"])), (0, json!([])));
    std::fs::remove_dir(&beside).expect("removed");
    site.run(&["attach", "y", "--nbd"]).ok();
    let before = listed(&site);
    // Neither can its journal.
    let beside = site.data().join("targets.journal");
    std::fs::create_dir(&beside).expect("made");
    for front in ["--nbd", "--nvme", "--iscsi"] {
        assert!(!site.run(&["attach", "x", front]).0.status.success(), "{front}");
    }
    assert_eq!(site.json(&["targets"]).as_array().map(Vec::len), Some(1), "nothing is served that is not remembered");
    assert!(Nbd::connect(&site.data().join("nbd.sock"), "local/x").is_err());
    // What cannot be forgotten stays served.
    assert!(!site.run(&["detach", "y"]).0.status.success());
    assert!(is_served(&target(&site, "y", "nbd")));
    Nbd::connect(&site.data().join("nbd.sock"), "local/y").expect("connected").write(0, b"still there");
    assert_eq!(listed(&site), before);
    std::fs::remove_dir(&beside).expect("removed");
    for front in ["--nbd", "--nvme", "--iscsi"] {
        site.run(&["attach", "x", front]).ok();
    }
    // Its host may not be gone yet.
    site.run(&["detach", "y", "--force"]).ok();
    assert_eq!(listed(&site).len(), 3);
}

/// A cluster whose monitor takes connections and says nothing: the flags that name it, and what keeps it there.
fn silent_cluster(dir: &Path) -> (Vec<String>, TcpListener) {
    let monitor = TcpListener::bind("127.0.0.1:0").expect("a port");
    let conf = dir.join("silent.conf");
    let addr = monitor.local_addr().expect("an address");
    let text = format!("[global]\nmon_host = [v2:{addr}/0]\nauth_client_required = none\nclient_mount_timeout = 0\n");
    std::fs::write(&conf, text).expect("written");
    (vec!["-c".into(), conf.display().to_string()], monitor)
}

/// A command that must not end yet.
struct Hanging(Child);

impl Drop for Hanging {
    fn drop(&mut self) {
        // What has ended cannot be killed; it is waited for all the same.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Hanging {
    fn start(site: &Site, args: &[&str]) -> Self {
        let mut command = site.command(args);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command"))
    }

    fn must_hang(&mut self) {
        if let Some(status) = self.0.try_wait().expect("its state") {
            let mut said = String::new();
            self.0.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
            panic!("it has ended with {status}: {said}");
        }
    }
}

#[test]
fn an_image_that_hangs_holds_up_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let (flags, monitor) = silent_cluster(dir.path());
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(FRONTS).collect();
    let mut site = Site::serving(&flags);
    for image in ["x", "y", "z"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    site.run(&["attach", "z", "--nbd"]).ok();
    let mut hanging = Hanging::start(&site, &["attach", "rbd/far", "--nbd"]);
    let mut again = Hanging::start(&site, &["attach", "rbd/far", "--nvme"]);
    // It has begun: the monitor was asked.
    drop(monitor.accept().expect("a connection"));
    for front in ["--nbd", "--nvme", "--iscsi"] {
        site.run(&["attach", "x", front]).ok();
        site.run(&["detach", "x", front]).ok();
        site.run(&["attach", "y", front]).ok();
    }
    Nbd::connect(&site.data().join("nbd.sock"), "local/y").expect("connected").write(0, b"goes on");
    site.run(&["detach", "z"]).ok();
    hanging.must_hang();
    again.must_hang();
    drop((hanging, again));

    // A start with such an image serves the others, and says what it does not serve.
    site.kill();
    let mut entries = listed(&site);
    assert_eq!(entries.len(), 3, "{entries:?}");
    for (image, front) in [("a-first", "nbd"), ("far", "iscsi"), ("far", "nbd")] {
        entries.push(json!({ "pool": "rbd", "image": image, "front": front }));
    }
    list(&targets_file(&site), Value::Array(entries));
    site.start();
    for front in ["nbd", "nvme", "iscsi"] {
        assert!(is_served(&target(&site, "y", front)), "{front}");
    }
    for (image, front) in [("a-first", "nbd"), ("far", "iscsi"), ("far", "nbd")] {
        let said = error(&target(&site, image, front));
        assert!(said.contains("still being opened"), "{said}");
    }
    site.run(&["attach", "x", "--nbd"]).ok();
    site.run(&["detach", "y", "--nvme"]).ok();
    // What hangs can be given up, and is not there after that.
    site.run(&["detach", "rbd/far", "--iscsi"]).ok();
    assert_eq!(listed(&site).len(), 5);
    site.run(&["detach", "rbd/far"]).ok();
    site.run(&["detach", "rbd/far"]).fails(3);
    site.run(&["detach", "rbd/a-first"]).ok();
    assert_eq!(listed(&site).len(), 3);
    site.kill();
    site.start();
    wait_until("all are served", || {
        let targets = site.json(&["targets"]);
        targets.as_array().is_some_and(|all| all.len() == 3 && all.iter().all(is_served))
    });
}
