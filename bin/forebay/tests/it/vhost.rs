//! Exports over vhost-user: their sockets, what is refused, and guests that outlive the daemon.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

use forebay_vhost_host::block::{IOERR, VirtioBlkRequest, kind};
use forebay_vhost_host::crash::ResumableFrontEnd;
use forebay_vhost_host::{FrontEnd, FrontEndOptions, FrontEndStage};
use serde_json::{Value, json};

use crate::common::{PATIENCE, Site, shape, wait_until};

fn options() -> FrontEndOptions {
    FrontEndOptions { patience: PATIENCE, ..FrontEndOptions::default() }
}

fn guest(socket: &Path) -> FrontEnd {
    FrontEnd::connect(socket, &options()).expect("a guest")
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn with_images(images: &[&str]) -> Site {
    let site = Site::serving(&[]);
    for image in images {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    site
}

/// The only export, as the daemon shows it.
fn target(site: &Site) -> Value {
    let targets = site.json(&["targets"]);
    assert_eq!(targets.as_array().map(Vec::len), Some(1), "{targets}");
    targets[0].clone()
}

/// Asks for an export over the API; returns the status and the reply.
fn post(site: &Site, request: &Value) -> (u16, String) {
    let body = request.to_string();
    site.http(&format!("POST /v1/targets\ncontent-type: application/json\ncontent-length: {}\n\n{body}", body.len()))
}

#[test]
fn attach_makes_a_socket_that_lasts() {
    let mut site = with_images(&["x"]);
    let socket = site.path("a b.sock");
    let uri = format!("vhost-user-blk+unix://{}/a%20b.sock", site.dir.path().display());
    // A relative path is taken from the current directory.
    let attach = ["attach", "x", "--vhost", "a b.sock", "--queues", "3"];
    assert_eq!(site.run(&attach).ok(), format!("{uri}\n"));
    assert_eq!(site.run(&attach).ok(), format!("{uri}\n"), "again is the same");
    site.run(&["attach", "x", "--vhost", "a b.sock", "--queues", "4"]).fails(5);
    site.run(&["attach", "x", "--vhost", "other.sock", "--queues", "3"]).fails(5);
    assert!(is_socket(&socket) && !is_socket(&site.path("other.sock")));
    assert_eq!(std::fs::metadata(&socket).expect("there").permissions().mode() & 0o777, 0o600);

    let before = target(&site);
    let want = json!({
        "pool": "string", "image": "string", "front": "string", "read_only": "bool", "uri": "string",
        "uris": ["string"], "vhost": { "path": "string", "queues": "number" }, "connections": "number",
    });
    assert_eq!(shape(&before), want);
    assert_eq!((&before["front"], &before["uri"]), (&json!("vhost"), &json!(uri)));
    assert_eq!(before["vhost"]["path"], json!(socket));
    assert!(site.run(&["targets"]).ok().contains(&uri));
    assert!(site.run(&["status"]).ok().contains("vhost:       1 socket"), "{}", site.run(&["status"]).ok());

    site.kill();
    assert!(is_socket(&socket), "a killed daemon leaves it");
    site.start();
    assert_eq!(target(&site), before);
    drop(guest(&socket));
    site.stop();
    assert!(!socket.exists(), "a daemon that ends removes it");
    site.start();
    assert_eq!(target(&site)["uri"], before["uri"]);
    assert!(is_socket(&socket));
    wait_until("the guest is gone", || target(&site)["connections"] == json!(0));
    site.run(&["detach", "x", "--vhost"]).ok();
    assert!(!socket.exists(), "the end of the export removes it");
    site.run(&["detach", "x", "--vhost"]).fails(3);
    assert_eq!(site.json(&["targets"]), json!([]));
    // Its path is free for others.
    site.run(&["create", "y", "--size", "64M"]).ok();
    site.run(&["attach", "y", "--vhost", "a b.sock"]).ok();
}

#[test]
fn a_guest_reads_and_writes_its_image() {
    let mut site = with_images(&["x"]);
    let socket = site.path("x.sock");
    site.run(&["attach", "x", "--vhost", "x.sock", "--queues", "3"]).ok();
    site.run(&["attach", "x", "--vhost", "x.sock", "--queues", "3"]).ok();
    let mut first = guest(&socket);
    assert_eq!((first.config.capacity, first.config.num_queues), (64 << 11, 3));
    let serial = first.run(0, &VirtioBlkRequest::get_id()).expect("its name").ok();
    assert!(serial.len() == 20 && serial.iter().all(u8::is_ascii_hexdigit), "{serial:?}");
    first.write_sectors(8, &[0xA5; 4096]).expect("written");
    first.flush().expect("flushed");
    assert_eq!(target(&site)["connections"], json!(1));
    let said = site.run(&["detach", "x"]).fails(6);
    assert!(said.contains("1 connection"), "{said}");
    // What it wrote is what others read.
    site.run(&["attach", "x", "--nbd", "--read-only"]).ok();
    let mut other = crate::common::Nbd::connect(&site.data().join("nbd.sock"), "local/x").expect("connected");
    assert_eq!(other.read(4096, 4096), [0xA5; 4096]);
    drop(other);
    let (_, metrics) = site.http("GET /metrics");
    let latency = "forebay_request_latency_seconds_count{front=\"vhost\",pool=\"local\",request=\"write\"} 1";
    for line in ["forebay_vhost_accepted_total 1", "forebay_vhost_drivers{format=\"split\"} 1", latency] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    let (_, metrics) = site.http("GET /metrics?volume=local/x");
    assert!(metrics.contains("forebay_vhost_kicks_total{pool=\"local\",image=\"x\"}"), "{metrics}");
    wait_until("the host is gone", || {
        site.json(&["targets"])
            .as_array()
            .expect("a list")
            .iter()
            .all(|it| it["front"] != "nbd" || it["connections"] == 0)
    });
    site.run(&["detach", "x", "--nbd"]).ok();

    // A resize reaches the guest.
    site.run(&["resize", "x", "--size", "96M"]).ok();
    wait_until("the new size", || {
        let config = first.get_config(0, forebay_vhost_host::block::CONFIG_SIZE).expect("the configuration");
        forebay_vhost_host::VirtioBlkConfig::decode(&config).capacity == 96 << 11
    });
    drop(first);
    wait_until("the guest is gone", || target(&site)["connections"] == json!(0));

    // Its serial number is the image's, whatever the image is called.
    site.run(&["detach", "x"]).ok();
    site.run(&["mv", "x", "y"]).ok();
    site.run(&["attach", "y", "--vhost", "y.sock", "--read-only"]).ok();
    let mut reader = guest(&site.path("y.sock"));
    assert_eq!(reader.run(0, &VirtioBlkRequest::get_id()).expect("its name").ok(), serial);
    assert_eq!(reader.read_sectors(8, 4096).expect("read"), [0xA5; 4096]);
    let refused = reader.run(0, &VirtioBlkRequest::write(8, &[1; 512])).expect("a status");
    assert_eq!(refused.status, IOERR);
    // By force it is disconnected, and the export is gone.
    site.run(&["detach", "y", "--force"]).ok();
    assert!(reader.receive().is_err());
    assert_eq!(site.json(&["targets"]), json!([]));
    site.stop();
}

#[test]
fn a_guest_resumes_after_the_daemon_was_killed() {
    // With one core, and with a queue on each of two.
    for cores in ["1", "2"] {
        let mut site = Site::serving(&["--cores", cores]);
        site.run(&["create", "x", "--size", "64M"]).ok();
        let socket = site.path("x.sock");
        site.run(&["attach", "x", "--vhost", "x.sock", "--queues", "2"]).ok();
        let options = FrontEndOptions { queues: 2, ..options() };
        let mut guest = ResumableFrontEnd::connect(&socket, &options).expect("a guest");
        guest.front_end.write_sectors(0, &[1; 8192]).expect("written");
        for round in 2..4 {
            site.kill();
            // Submitted while there is no daemon.
            let write = |queue| [VirtioBlkRequest::write(queue * 8, &[round + 10 * queue as u8; 4096])];
            let ids = [0, 1].map(|queue| guest.front_end.submit_all(queue, &write(queue as u64)).expect("submitted"));
            site.start();
            guest.resume(&socket).expect("resumed");
            for (queue, ids) in ids.into_iter().enumerate() {
                let deadline = std::time::Instant::now() + PATIENCE;
                let done = guest.front_end.await_completion(queue, deadline).expect("completed");
                assert_eq!(vec![done.id], ids);
                done.ok();
            }
            for queue in [0, 1] {
                let read = guest.front_end.run(1 - queue, &VirtioBlkRequest::read(queue as u64 * 8, 4096));
                assert_eq!(read.expect("completed").ok(), [round + 10 * queue as u8; 4096]);
            }
        }
    }
}

#[test]
fn the_daemon_connects_where_it_is_told_to() {
    let mut site = with_images(&["x"]);
    let socket = site.path("x.sock");
    site.run(&["attach", "x", "--vhost", "x.sock", "--socket-connect", "--socket-mode", "0660"]).fails(2);
    // Nobody listens yet.
    site.run(&["attach", "x", "--vhost", "x.sock", "--socket-connect"]).ok();
    assert!(!socket.exists());
    let monitor = UnixListener::bind(&socket).expect("a socket");
    let accept = || FrontEnd::accept(&monitor, &options(), FrontEndStage::Running).expect("the daemon");
    let mut guest = accept();
    guest.write_sectors(0, &[7; 4096]).expect("written");
    drop(guest);
    let mut guest = accept();
    assert_eq!(guest.read_sectors(0, 4096).expect("read"), [7; 4096]);
    drop(guest);
    site.kill();
    site.start();
    assert_eq!(accept().read_sectors(0, 4096).expect("read"), [7; 4096]);
    site.run(&["detach", "x", "--force"]).ok();
    assert!(is_socket(&socket), "it is not the daemon's");
}

#[test]
fn owner_and_permissions_are_those_asked_for() {
    let site = with_images(&["x", "y"]);
    // A user may give a file to the own group, also without privileges.
    let group = std::fs::metadata(site.dir.path()).expect("there").gid();
    let owner = format!(":{group}");
    site.run(&["attach", "x", "--vhost", "x.sock", "--socket-mode", "0660", "--socket-owner", &owner]).ok();
    let meta = std::fs::metadata(site.path("x.sock")).expect("there");
    assert_eq!((meta.permissions().mode() & 0o777, meta.gid()), (0o660, group));
    for (flag, value, why) in [
        ("--socket-mode", "0888", "mode"),
        ("--socket-mode", "7777", "mode"),
        ("--socket-owner", "no-such-user", "no user 'no-such-user'"),
        ("--socket-owner", ":no-such-group", "no group 'no-such-group'"),
        ("--socket-owner", ":", "owner"),
        ("--queues", "0", "1..=64"),
        ("--queues", "65", "1..=64"),
    ] {
        let said = site.run(&["attach", "y", "--vhost", "y.sock", flag, value]).fails(2);
        assert!(said.contains(why), "{flag} {value}: {said}");
    }
    assert!(!site.path("y.sock").exists());
    assert_eq!(site.json(&["targets"]).as_array().map(Vec::len), Some(1));
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let site = with_images(&["x", "y"]);
    let long = format!("/{}", "x".repeat(107));
    let path = site.path("x.sock");
    for (more, why) in [
        (json!({}), "path of a socket"),
        (json!({ "vhost": {} }), "path"),
        (json!({ "vhost": { "path": "x.sock" } }), "absolute"),
        (json!({ "vhost": { "path": long } }), "107"),
        (json!({ "vhost": { "path": "/" } }), "not the path of a socket"),
        (json!({ "vhost": { "path": path, "queues": 0 } }), "1 to 64"),
        (json!({ "vhost": { "path": path, "queues": 65 } }), "1 to 64"),
        (json!({ "vhost": { "path": path, "mode": "rw" } }), "octal"),
        (json!({ "vhost": { "path": path, "owner": "a:b:c" } }), "owner"),
        (json!({ "vhost": { "path": path, "connect": true, "owner": "root" } }), "daemon creates"),
        (json!({ "vhost": { "path": path, "colour": "red" } }), "colour"),
        (json!({ "vhost": { "path": path }, "unit": 1 }), "no number"),
        (json!({ "vhost": { "path": path }, "hosts": ["10.0.0.0/8"] }), "no list of hosts"),
        (json!({ "vhost": { "path": path }, "subsystem": "nqn.x" }), "subsystem"),
        (json!({ "vhost": { "path": path }, "uuid": "x" }), "nvme"),
        (json!({ "vhost": { "path": path }, "front": "nbd" }), "over vhost"),
    ] {
        let mut request = json!({ "pool": "local", "image": "x", "front": "vhost" });
        let fields = more.as_object().expect("an object").clone();
        request.as_object_mut().expect("an object").extend(fields);
        let (status, body) = post(&site, &request);
        assert!(status == 400 && body.contains(why), "{request}: {status} {body}");
    }
    for (args, why) in [
        (&["attach", "x", "y", "--vhost", "x.sock"][..], "2 are named"),
        (&["attach", "x", "--vhost", "x.sock", "--nbd"], "--nbd"),
        (&["attach", "x", "--nbd", "--queues", "2"], "--queues"),
        (&["attach", "x", "--vhost", "x.sock", "--host", "unix"], "--host"),
    ] {
        let said = site.run(args).fails(2);
        assert!(said.contains(why), "{args:?}: {said}");
    }
    // Paths that cannot be had.
    site.run(&["attach", "x", "--vhost", "missing/x.sock"]).fails(3);
    let taken = site.path("taken.sock");
    let listener = UnixListener::bind(&taken).expect("a socket");
    let said = site.run(&["attach", "x", "--vhost", "taken.sock"]).fails(5);
    assert!(said.contains("taken.sock"), "{said}");
    std::fs::write(site.path("file"), "precious").expect("written");
    site.run(&["attach", "x", "--vhost", "file"]).fails(5);
    assert_eq!(std::fs::read(site.path("file")).expect("there"), b"precious");
    assert_eq!(site.json(&["targets"]), json!([]), "nothing of it is remembered");

    // What is left of a process that has ended is replaced.
    drop(listener);
    site.run(&["attach", "x", "--vhost", "taken.sock"]).ok();
    // One socket, one export.
    let said = site.run(&["attach", "y", "--vhost", "./taken.sock"]).fails(5);
    assert!(said.contains("local/x's already"), "{said}");
    drop(guest(&taken));
}

#[test]
fn a_socket_that_cannot_be_had_at_the_start_is_tried_again() {
    let mut site = with_images(&["x"]);
    let socket = site.path("x.sock");
    site.run(&["attach", "x", "--vhost", "x.sock"]).ok();
    site.stop();
    let listener = UnixListener::bind(&socket).expect("a socket");
    site.start();
    let failed = target(&site);
    let said = failed["error"]["message"].as_str().expect("an error");
    assert!(failed["uri"].is_null() && said.contains("x.sock"), "{failed}");
    assert!(site.log().contains("an export is not served"));
    drop(listener);
    wait_until("it is served", || target(&site)["uri"].is_string());
    guest(&socket).write_sectors(0, &[1; 512]).expect("written");
}

#[test]
fn a_file_that_gives_a_socket_to_two_images_serves_neither() {
    let mut site = with_images(&["left", "right", "good", "none", "bad"]);
    site.stop();
    let entry =
        |image: &str, vhost: Value| json!({ "pool": "local", "image": image, "front": "vhost", "vhost": vhost });
    let at = |name: &str| json!({ "path": site.path(name) });
    let targets = json!([
        entry("left", at("shared")),
        entry("right", at("./shared")),
        entry("good", at("good")),
        json!({ "pool": "local", "image": "none", "front": "vhost" }),
        entry("bad", json!({ "path": "relative" })),
    ]);
    let text = json!({ "version": 1, "targets": targets }).to_string();
    std::fs::write(site.data().join("targets.json"), text).expect("written");
    site.start();
    let targets = site.json(&["targets"]);
    for target in targets.as_array().expect("a list") {
        let why = match target["image"].as_str().expect("a name") {
            "left" => "local/right",
            "right" => "local/left",
            "none" => "needs the path",
            "bad" => "absolute",
            _ => continue,
        };
        assert!(target["error"]["message"].as_str().is_some_and(|said| said.contains(why)), "{target}");
    }
    assert!(is_socket(&site.path("good")) && !site.path("shared").exists());
    site.run(&["detach", "left"]).ok();
    site.run(&["detach", "right"]).ok();
    site.run(&["attach", "right", "--vhost", "shared"]).ok();
    drop(guest(&site.path("shared")));
}

#[test]
fn requests_of_an_unknown_type_are_refused() {
    let site = with_images(&["x"]);
    site.run(&["attach", "x", "--vhost", "x.sock"]).ok();
    let mut guest = guest(&site.path("x.sock"));
    let done = guest.run(0, &VirtioBlkRequest::new(kind::SECURE_ERASE, 0, &[0; 16], 0)).expect("a status");
    assert_eq!(done.status, forebay_vhost_host::block::UNSUPP);
}
