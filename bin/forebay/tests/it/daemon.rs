//! The daemon's life: start, stop, kill, exports that last, the control plane.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use crate::common::{Nbd, PATIENCE, Site, content, http, shape, wait_until};
use serde_json::{Value, json};

fn nbd_socket(site: &Site) -> std::path::PathBuf {
    site.data().join("nbd.sock")
}

#[test]
fn status_has_its_shape() {
    let site = Site::serving(&["--cores", "2", "--http", "127.0.0.1:0", "--nvme", "127.0.0.1:0"]);
    let status = site.json(&["status"]);
    assert_eq!((&status["ready"], &status["cores"]), (&json!(true), &json!(2)));
    assert_eq!(status["pid"], json!(site.pid()));
    let pool = json!({
        "name": "string", "kind": "string", "capacity": "number", "used": "number", "available": "number",
        "objects": "number", "compressed_logical": "number", "compressed_stored": "number",
    });
    let numbers = [
        "disk_capacity",
        "disk_errors",
        "disk_used",
        "dropped",
        "evicted_disk",
        "evicted_memory",
        "fetched_bytes",
        "hits_disk",
        "hits_memory",
        "hits_shared",
        "hits_zero",
        "memory_capacity",
        "memory_used",
        "misses",
        "read_bytes",
        "written",
        "zeroes",
    ];
    let mut cache: serde_json::Map<String, Value> =
        numbers.map(|name| (name.to_owned(), json!("number"))).into_iter().collect();
    cache.insert("disk".into(), json!("string"));
    let own = json!({
        "hits_memory": "number", "hits_disk": "number", "hits_zero": "number", "hits_shared": "number",
        "misses": "number", "invalidated": "number", "bypassed": "number", "fetched_bytes": "number",
        "read_bytes": "number",
    });
    cache.insert("own".into(), own);
    let want = json!({
        "ready": "bool", "version": "string", "pid": "number", "uptime_s": "number", "cores": "number",
        "driver": "string", "data": "string", "control": "string", "http": "string", "nbd": ["string"],
        "nvme": ["string"], "nvme_nqn": "string", "iscsi": [], "iscsi_name": "string", "vhost_sockets": "number", "peer": [], "peers": [],
        "pools": [pool], "targets": "number", "unserved": "number", "connections": "number", "read_cache": cache,
    });
    assert_eq!(shape(&status), want);
    let pools: Vec<&Value> = status["pools"].as_array().expect("a list").iter().map(|pool| &pool["name"]).collect();
    assert_eq!(pools, [&json!("local"), &json!("ram")]);
    assert!(site.run(&["status"]).ok().starts_with("state:       ready\n"));
}

#[test]
fn what_the_daemon_makes_belongs_to_its_owner() {
    let site = Site::serving(&["--http", "127.0.0.1:0"]);
    for (name, mode) in [("", 0o700), ("control.sock", 0o600), ("http.token", 0o600)] {
        let meta = std::fs::metadata(site.data().join(name)).expect("there");
        assert_eq!(meta.permissions().mode() & 0o777, mode, "{name}");
    }
}

#[test]
fn sigterm_stops_in_order_and_cleans_up() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    // An idle connection does not hold it up.
    let idle = UnixStream::connect(site.data().join("control.sock")).expect("connected");
    let host = Nbd::connect(&nbd_socket(&site), "local/x").expect("connected");
    site.stop();
    drop((idle, host));
    for left in ["control.sock", "nbd.sock", "daemon.json"] {
        assert!(!site.data().join(left).exists(), "{left} is left");
    }
    assert!(site.log().contains("stopped"), "{}", site.log());
    site.start();
    site.signal("INT");
    assert!(site.wait().success());
}

/// Returns the result of a host's Connect: its status, and whether the host has to authenticate.
fn nvme_connect(addr: &str, subsystem: &str, host: &str) -> (u16, bool) {
    let mut stream = TcpStream::connect(addr).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut request = vec![0_u8; 128];
    (request[2], request[4]) = (128, 128);
    stream.write_all(&request).expect("ICReq");
    stream.read_exact(&mut [0; 128]).expect("ICResp");
    let mut capsule = vec![0_u8; 72 + 1024];
    (capsule[0], capsule[2], capsule[3]) = (4, 72, 72);
    capsule[4..8].copy_from_slice(&(72_u32 + 1024).to_le_bytes());
    // Fabrics, Connect, with its data in the capsule; a queue of 32 entries.
    (capsule[8], capsule[9], capsule[12], capsule[8 + 44]) = (0x7F, 0x40, 1, 31);
    capsule[8 + 32..8 + 36].copy_from_slice(&1024_u32.to_le_bytes());
    capsule[8 + 39] = 1;
    let data = &mut capsule[72..];
    data[..16].fill(7);
    data[16..18].fill(0xFF);
    data[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
    data[512..512 + host.len()].copy_from_slice(host.as_bytes());
    stream.write_all(&capsule).expect("Connect");
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).expect("an answer");
    let (result, status) = (&answer[8..12], u16::from_le_bytes([answer[22], answer[23]]) >> 1 & 0x7FF);
    (status, status == 0 && result[2] & 3 != 0)
}

#[test]
fn hosts_and_secrets_are_read_again_while_it_runs() {
    let (known, new) = ("nqn.2014-08.org.example:known", "nqn.2014-08.org.example:new");
    let config = tempfile::NamedTempFile::new().expect("a file");
    let write = |text: &str| std::fs::write(config.path(), text).expect("written");
    write(&format!("[nvme-subsystem]\nhosts = ['{known}']\n"));
    let path = config.path().display().to_string();
    let site = Site::serving(&["--config", &path, "--nvme", "127.0.0.1:0"]);
    let status = site.json(&["status"]);
    let addr = status["nvme"][0].as_str().expect("an address").to_owned();
    let subsystem = status["nvme_nqn"].as_str().expect("a name").to_owned();
    let connect = |host: &str| nvme_connect(&addr, &subsystem, host);
    const HOST_REFUSED: u16 = 0x184;
    assert_eq!((connect(known), connect(new)), ((0, false), (HOST_REFUSED, false)));

    // A host with a secret is added.
    let secret = site.path("secret");
    std::fs::write(&secret, "DHHC-1:00:IwtNfQh/g40PNAxa3nbIYCHkRcC/ZQqHegC7NP5ynMfj9HeR:\n").expect("written");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("set");
    let with_secret = format!(
        "[nvme-subsystem]\nhosts = ['{known}']\n[[nvme-subsystem.host]]\nnqn = '{new}'\nsecret = '{}'\n",
        secret.display()
    );
    write(&with_secret);
    assert_eq!(connect(new).0, HOST_REFUSED, "nobody has asked for it");
    assert_eq!(site.json(&["reload"]), json!({ "restart": false }));
    assert_eq!((connect(known), connect(new)), ((0, false), (0, true)));

    // What is wrong changes nothing, whatever else is right.
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).expect("set");
    write(&with_secret.replace(known, "nqn.2014-08.org.example:other"));
    let said = site.run(&["reload"]).fails(2);
    assert!(said.contains("nothing has changed") && said.contains("secret"), "{said}");
    site.signal("HUP");
    wait_until("the daemon says what is wrong", || site.log().contains("SIGHUP: "));
    assert_eq!((connect(known), connect(new)), ((0, false), (0, true)));

    // A signal does the same as the command; what needs a restart is said.
    write("linger-us = 7\n[nvme-subsystem]\nhosts = ['nqn.2014-08.org.example:other']\n");
    site.signal("HUP");
    wait_until("the host is refused", || connect(known).0 == HOST_REFUSED);
    assert_eq!(connect(new).0, HOST_REFUSED);
    assert_eq!(site.json(&["reload"]), json!({ "restart": true }));
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut site = Site::serving(&[]);
    // An import that stalls is waited for, but not by everybody.
    let mut command = site.command(&["import", "-", "stalled"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the command");
    // It begins when it has seen how the disk begins.
    std::io::Write::write_all(child.stdin.as_mut().expect("piped"), &[1; 64]).expect("written");
    let wait_for = |what: &dyn Fn() -> bool| {
        let started = std::time::Instant::now();
        while !what() {
            assert!(started.elapsed() < PATIENCE, "waited in vain:\n{}", site.log());
        }
    };
    wait_for(&|| site.json(&["ls"]) == json!(["stalled"]));
    site.signal("TERM");
    wait_for(&|| site.log().contains("stopping"));
    site.signal("TERM");
    assert_eq!(site.wait().code(), Some(1));
    assert!(site.log().contains("terminating at once"), "{}", site.log());
    drop(child.stdin.take());
    assert_eq!(child.wait().expect("the command").code(), Some(4));
    // It is as after a crash: the next daemon finds everything, half an image too.
    site.start();
    site.run(&["rm", "stalled"]).ok();
}

#[test]
fn attach_prints_a_uri_and_lasts() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.run(&["create", "y", "--size", "2G"]).ok();
    let socket = nbd_socket(&site);
    let uri = format!("nbd+unix:///local/x?socket={}", socket.display());
    assert_eq!(site.run(&["attach", "x", "--nbd"]).ok(), format!("{uri}\n"));
    // Again is the same; otherwise is refused.
    assert_eq!(site.run(&["attach", "x", "--nbd"]).ok(), format!("{uri}\n"));
    site.run(&["attach", "x", "--nbd", "--read-only"]).fails(5);
    site.run(&["attach", "nope", "--nbd"]).fails(3);
    let target = site.json(&["attach", "y", "--nbd", "--read-only"]);
    let want = json!({
        "pool": "string", "image": "string", "front": "string", "read_only": "bool", "uri": "string",
        "uris": ["string"], "connections": "number",
    });
    assert_eq!(shape(&target), want);
    let before = site.json(&["targets"]);
    assert_eq!(before.as_array().map(Vec::len), Some(2));

    site.kill();
    site.start();
    assert_eq!(site.json(&["targets"]), before);
    let mut host = Nbd::connect(&socket, "local/x").expect("connected");
    assert_eq!(host.size, 1 << 30);
    host.write(0, b"hello");
    let mut reader = Nbd::connect(&socket, "local/y").expect("connected");
    assert_eq!(reader.size, 2 << 30);
    assert_eq!(reader.try_write(0, b"hello"), 1, "EPERM on a read-only export");
    assert_eq!(site.json(&["targets"])[0]["connections"], json!(1));
    site.stop();
    site.start();
    assert_eq!(site.json(&["targets"]), before);
}

#[test]
fn what_is_exported_stays_and_what_is_detached_goes() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    for args in [&["rm", "x"][..], &["mv", "x", "y"]] {
        let said = site.run(args).fails(6);
        assert!(said.contains("forebay detach local/x"), "{args:?}: {said}");
    }
    let host = Nbd::connect(&nbd_socket(&site), "local/x").expect("connected");
    let said = site.run(&["detach", "x"]).fails(6);
    assert!(said.contains("1 connection"), "{said}");
    // With --force, connected hosts are disconnected; the export is gone at once.
    site.run(&["create", "z", "--size", "1G"]).ok();
    site.run(&["attach", "z", "--nbd"]).ok();
    let forced = Nbd::connect(&nbd_socket(&site), "local/z").expect("connected");
    site.run(&["detach", "z", "--force"]).ok();
    assert!(forced.ends());
    site.run(&["rm", "z"]).ok();
    drop(host);
    let started = std::time::Instant::now();
    while site.json(&["targets"])[0]["connections"] != json!(0) {
        assert!(started.elapsed() < PATIENCE, "the connection does not end");
    }
    // Without a daemon it is still exported: the next daemon would serve it.
    site.stop();
    let target = site.json(&["targets"]);
    assert_eq!((&target[0]["image"], &target[0]["uri"]), (&json!("x"), &Value::Null));
    site.run(&["rm", "x"]).fails(6);
    site.run(&["attach", "x", "--nbd"]).fails(4);
    site.start();
    site.run(&["detach", "x"]).ok();
    site.run(&["detach", "x"]).fails(3);
    assert!(Nbd::connect(&nbd_socket(&site), "local/x").is_err());
    assert_eq!(site.json(&["targets"]), json!([]));
    site.run(&["rm", "x"]).ok();
}

#[test]
fn exports_of_the_ram_pool_end_with_it() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "ram/x", "--size", "1G"]).ok();
    site.run(&["attach", "ram/x", "--nbd"]).ok();
    let mut host = Nbd::connect(&nbd_socket(&site), "ram/x").expect("connected");
    host.write(12345, b"volatile");
    assert_eq!(host.read(12345, 8), b"volatile");
    drop(host);
    site.stop();
    site.start();
    assert_eq!(site.json(&["targets"]), json!([]));
}

#[test]
fn a_host_is_served_by_every_core() {
    let site = Site::serving(&["--cores", "3"]);
    site.run(&["create", "x", "--size", "64M"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    // More connections than cores, all open at once: some live on other cores than the volume.
    let mut hosts: Vec<Nbd> =
        (0..12).map(|_| Nbd::connect(&nbd_socket(&site), "local/x").expect("connected")).collect();
    for (at, host) in hosts.iter_mut().enumerate() {
        host.write(at as u64 * 8192, &content(8192, at as u64 + 1));
    }
    for host in &mut hosts {
        for at in 0..12 {
            assert!(host.read(at * 8192, 8192) == content(8192, at + 1));
        }
        host.flush();
    }
    assert_eq!(site.json(&["status"])["connections"], json!(12));
    site.run(&["resize", "x", "--size", "128M"]).ok();
    hosts.iter_mut().for_each(|host| host.write(100 << 20, b"past the old end"));
}

#[test]
fn kill_9_loses_nothing_that_was_flushed() {
    let mut site = Site::serving(&["--cores", "2"]);
    site.run(&["create", "x", "--size", "64M"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    let mut want = vec![0; 64 << 20];
    for round in 1..=5u64 {
        let mut host = Nbd::connect(&nbd_socket(&site), "local/x").expect("connected");
        for step in 0..40u64 {
            let offset = ((round * 7919 + step * 104_729) % (63 << 20)) as usize;
            let data = content(10_000, round * 1000 + step);
            host.write(offset as u64, &data);
            want[offset..offset + data.len()].copy_from_slice(&data);
        }
        host.flush();
        // These were not flushed, and may be there or not.
        host.write(63 << 20, &[round as u8; 4096]);
        site.kill();
        if round % 2 == 0 {
            let got = site.export("x");
            assert!(got[..63 << 20] == want[..63 << 20], "round {round}: a command finds other data");
        }
        site.start();
        assert!(site.export("x")[..63 << 20] == want[..63 << 20], "round {round}: data is lost");
    }
    site.stop();
    site.run(&["store", "check"]).ok();
}

#[test]
fn two_daemons_do_not_share() {
    let site = Site::serving(&[]);
    // The same directory: the store is locked.
    let other = site.path("other.sock");
    let other = other.to_str().expect("a path");
    let said = site.run(&["serve", "--control", other]).fails(6);
    assert!(said.contains("in use by another process"), "{said}");
    // Another directory, the same control socket.
    let second = Site::new();
    let control = site.data().join("control.sock");
    let args = ["serve", "--store-size", "64M", "--control", control.to_str().expect("a path")];
    let said = second.run(&args).fails(6);
    assert!(said.contains("another daemon answers"), "{said}");
    assert!(site.run(&["status"]).0.status.success(), "the first one goes on");
}

#[test]
fn a_daemon_elsewhere_is_found_by_its_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let control = dir.path().join("elsewhere.sock");
    let site = Site::serving(&["--control", control.to_str().expect("a path")]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    assert_eq!(site.json(&["status"])["control"], json!(control));
    assert!(control.exists() && !site.data().join("control.sock").exists());
}

#[test]
fn sockets_left_by_a_dead_daemon_are_replaced() {
    let mut site = Site::serving(&[]);
    site.kill();
    assert!(site.data().join("control.sock").exists());
    // A command is not misled either.
    assert_eq!(site.run(&["ls"]).ok(), "");
    site.start();
    site.run(&["status"]).ok();
}

#[test]
fn an_export_that_is_broken_does_not_stop_the_others() {
    let mut site = Site::serving(&[]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    site.stop();
    let file = site.data().join("targets.json");
    let text = std::fs::read_to_string(&file).expect("the file");
    let mut list: Value = serde_json::from_str(&text).expect("JSON");
    let gone = json!({"pool": "local", "image": "gone", "front": "nbd", "read_only": false});
    list["targets"].as_array_mut().expect("a list").push(gone);
    std::fs::write(&file, list.to_string()).expect("written");
    site.start();
    let targets = site.json(&["targets"]);
    assert_eq!(targets[0]["error"]["kind"], json!("not_found"), "{targets}");
    Nbd::connect(&nbd_socket(&site), "local/x").expect("connected");
    site.stop();
    std::fs::write(&file, "{").expect("written");
    let said = site.run(&["serve"]).fails(8);
    assert!(said.contains("targets.json"), "{said}");
}

#[test]
fn the_api_over_the_control_socket() {
    let site = Site::serving(&[]);
    let (status, body) = site.http("GET /v1/status");
    assert_eq!(status, 200);
    assert_eq!(serde_json::from_str::<Value>(&body).expect("JSON")["ready"], json!(true));
    let (status, body) = site.http("GET /v1/images/local/nope");
    assert_eq!(status, 404);
    assert_eq!(serde_json::from_str::<Value>(&body).expect("JSON")["error"]["kind"], json!("not_found"));
    assert_eq!(site.http("GET /v1/nope").0, 404);
    assert_eq!(site.http("GET /v1/images/local/a%2Fb%2Fc").0, 400);
    assert_eq!(site.http("POST /v1/images\ncontent-length: 2\n\n{}").0, 400);
    let (status, body) = site.http("GET /openapi.json");
    assert_eq!(status, 200);
    let document: Value = serde_json::from_str(&body).expect("JSON");
    for path in ["/v1/images", "/v1/images/{pool}/{image}/data", "/v1/targets", "/v1/status"] {
        assert!(document["paths"].get(path).is_some(), "{path}");
    }
    let (status, body) = site.http("GET /");
    assert!(status == 200 && body.contains("<h1>Forebay</h1>"), "{body}");
}

#[test]
fn metrics_count_what_hosts_ask() {
    let site = Site::serving(&[]);
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    let mut host = Nbd::connect(&nbd_socket(&site), "local/x").expect("connected");
    for at in 0..10 {
        host.write(at * 4096, &[1; 4096]);
    }
    host.read(0, 40960);
    host.flush();
    let (status, body) = site.http("GET /metrics");
    assert_eq!(status, 200);
    let labels = |kind| format!("{{pool=\"local\",image=\"x\",request=\"{kind}\"}}");
    let has = |body: &str, line: &str| body.lines().any(|have| have == line || have == format!("{line}.0"));
    for line in [
        format!("forebay_volume_requests_total{} 10", labels("write")),
        format!("forebay_volume_transferred_bytes_total{} 40960", labels("write")),
        format!("forebay_volume_requests_total{} 1", labels("read")),
        "forebay_volume_errors_total{pool=\"local\",image=\"x\"} 0".into(),
        "forebay_request_latency_seconds_count{front=\"nbd\",pool=\"local\",request=\"write\"} 10".into(),
        "forebay_request_transferred_bytes_total{front=\"nbd\",pool=\"local\",request=\"read\"} 40960".into(),
        format!("forebay_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")),
        "forebay_connections 1".into(),
        "forebay_targets 1".into(),
    ] {
        assert!(has(&body, &line), "{line} in\n{body}");
    }
    for name in ["forebay_pool_used_bytes", "\nprocess_resident_memory_bytes ", "forebay_store_device_bytes_total"] {
        assert!(body.contains(name), "{name}");
    }
    assert!(!body.contains("# EOF") && !body.contains("volume_latency") && !body.contains("request=\"discard\",image"));
    // All of one volume; what has not been served is told.
    let (status, of_one) = site.http("GET /metrics?volume=local/x");
    assert_eq!(status, 200);
    for line in [
        format!("forebay_volume_requests_total{} 1", labels("flush")),
        format!("forebay_volume_latency_seconds_count{} 10", labels("write")),
        "forebay_volume_latency_seconds_bucket{le=\"+Inf\",pool=\"local\",image=\"x\",request=\"write\"} 10".into(),
    ] {
        assert!(has(&of_one, &line), "{line} in\n{of_one}");
    }
    assert!(!of_one.contains("forebay_connections"));
    assert_eq!(site.http("GET /metrics?volume=local/y").0, 404);
    assert_eq!(site.http("GET /metrics?volume=").0, 400);
    assert_eq!(site.http("GET /metrics?image=local/x").0, 400);
    let (_, open) = site.http("GET /metrics\naccept: application/openmetrics-text; version=1.0.0,text/plain;q=0.5");
    assert!(open.ends_with("# EOF\n") && open.contains("# TYPE forebay_volume_requests counter"), "{open}");
    check_with_promtool(&body);
    check_with_promtool(&of_one);
    let body = body + &of_one;
    // What is there is documented.
    let manual = include_str!("../../../../docs/operations.md");
    for name in body.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next()) {
        let name = name.strip_suffix("_total").unwrap_or(name);
        let listed = manual.contains(name) || manual.contains(&format!("`{}`", name.replace("forebay_pool", "")));
        assert!(listed, "docs/operations.md lacks {name}");
    }
}

/// Prometheus's own tool finds nothing to object to.
fn check_with_promtool(text: &str) {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    let mut command = Command::new("promtool");
    let started = command.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut promtool = match started {
        Ok(promtool) => promtool,
        Err(error) => return println!("SKIPPED promtool: {error}"),
    };
    promtool.stdin.take().expect("piped").write_all(text.as_bytes()).expect("written");
    let said = promtool.wait_with_output().expect("ended");
    let objections = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success() && objections.is_empty(), "{objections}");
}

#[test]
fn http_over_tcp_asks_for_the_token() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().expect("an address");
    drop(listener);
    let site = Site::serving(&["--http", &addr.to_string()]);
    let ask = |request: &str| http(TcpStream::connect(addr).expect("connected"), request);
    assert_eq!(ask("GET /v1/status").0, 200);
    assert_eq!(ask("GET /metrics").0, 200);
    assert_eq!(ask("GET /v1/images/local").0, 401);
    assert_eq!(ask("GET /v1/images/local\nauthorization: Bearer wrong").0, 401);
    assert_eq!(ask("DELETE /v1/images/local/x").0, 401);
    let token = std::fs::read_to_string(site.data().join("http.token")).expect("the token");
    assert_eq!(ask(&format!("GET /v1/images/local\nauthorization: Bearer {token}")), (200, "[]".into()));
}

#[test]
fn a_configuration_file_is_obeyed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (config, nbd) = (dir.path().join("config.toml"), dir.path().join("host.sock"));
    let text = format!("cores = 2\nnbd = ['unix:{}']\n[ram]\nsize = '8M'\n", nbd.display());
    std::fs::write(&config, text).expect("a configuration");
    let site = Site::serving(&["--config", config.to_str().expect("a path")]);
    let status = site.json(&["status"]);
    assert_eq!((&status["cores"], &status["nbd"]), (&json!(2), &json!([format!("unix:{}", nbd.display())])));
    assert_eq!(status["pools"][1]["capacity"], json!(8 << 20));
    let said = site.run_with_input(&["import", "-", "ram/x"], &vec![1; 9 << 20]).fails(7);
    assert!(said.contains("the pool ram is full"), "{said}");
}
