//! Usage errors, and commands that need neither daemon nor store.

use crate::common::{Done, Site, forebay};

fn run(args: &[&str]) -> Done {
    Done(forebay().args(args).output().expect("the command"))
}

#[test]
fn wrong_usage_exits_with_2_and_says_why() {
    for (args, says) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["create", "local/x"], "--size"),
        (&["create", "local/x", "--size", "10GB"], "GiB"),
        (&["create", "local/x", "--size", "-5"], "negative"),
        (&["create", "a/b/c/d", "--size", "1G"], "POOL/IMAGE"),
        (&["create", "local/x@snap", "--size", "1G"], "snapshot"),
        (&["info", "local/x y"], "no name may"),
        (&["attach", "local/x"], "--nbd"),
        (&["attach", "local/x", "--nbd", "--replica", "x"], "--replica"),
        (&["attach", "local/x", "--vhost", "x.sock", "--queues", "65"], "64"),
        (&["attach", "local/x", "--vhost", &"x".repeat(108)], "107"),
        (&["ls", "--format", "xml"], "xml"),
        (&["ls", "--log-level", "a=b=c"], "log level"),
        (&["import", "-"], "no name for the new image"),
    ] {
        let said = run(args).fails(2);
        assert!(said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn serve_refuses_what_makes_no_sense() {
    let site = Site::new();
    let config = site.path("config.toml");
    std::fs::write(&config, "coers = 2\n").expect("a configuration");
    let config = config.to_str().expect("a path");
    for (flags, says) in [
        (&["--cores", "0"][..], "from 1"),
        (&["--nbd", "nowhere"], "host:port"),
        (&["--nbd", "unix:"], "socket's path"),
        (&["--http", "unix:/x"], "--control"),
        (&["--config", config], "coers"),
        (&["--peer", "nowhere"], "nowhere"),
        (&["--peer", "10.0.0.1:1"], "--peer-key"),
        (&["--peer-allow", "10.0.0.0/33"], "10.0.0.0/33"),
    ] {
        let args: Vec<&str> = ["serve"].iter().chain(flags).copied().collect();
        let said = site.run(&args).fails(2);
        assert!(said.contains(says), "{flags:?}: {said}");
    }
    let said = site.run(&["serve", "--config", "missing.toml"]).fails(3);
    assert!(said.contains("missing.toml"), "{said}");
    assert!(!site.data().exists(), "nothing was made");
}

#[test]
fn with_no_daemon_commands_say_so_with_4() {
    let site = Site::new();
    for args in [&["status"][..], &["ls"], &["info", "x"], &["attach", "x", "--nbd"], &["store", "df"]] {
        let said = site.run(args).fails(4);
        assert!(said.contains("forebay serve"), "{args:?}: {said}");
    }
    // A control socket that is named means that daemon, not the store.
    let site = Site::with_store();
    let control = site.path("nobody.sock");
    let done = Done(forebay().arg("ls").env("FOREBAY_CONTROL", &control).output().expect("the command"));
    assert!(done.fails(4).contains("nobody.sock"));
}

#[test]
fn a_command_that_finds_no_daemon_names_those_that_run() {
    let mut site = Site::serving(&[]);
    let elsewhere = site.path("elsewhere");
    let at_elsewhere = |site: &Site, args: &[&str]| {
        let mut command = forebay();
        command.args(args).arg("--data").arg(&elsewhere).env("FOREBAY_RUN_DIR", site.path("run"));
        Done(command.output().expect("the command")).fails(4)
    };
    let option = format!("--data {}", site.data().display());
    for args in [&["status"][..], &["ls"], &["create", "local/disk", "--size", "1G"]] {
        let said = at_elsewhere(&site, args);
        let looked_at = elsewhere.join("control.sock");
        assert!(said.contains(looked_at.to_str().expect("a path")), "{args:?} does not say where it looked: {said}");
        assert!(said.contains(&option) && said.contains(&site.pid().to_string()), "{args:?}: {said}");
    }
    // One that was killed does not run any more.
    site.kill();
    let said = at_elsewhere(&site, &["status"]);
    assert!(!said.contains(&option) && said.contains("forebay serve"), "{said}");
}

#[test]
fn pools_of_a_cluster_need_no_store() {
    let site = Site::new();
    let conf = site.path("ceph.conf");
    let conf = conf.to_str().expect("a path");
    for args in [&["ls", "rbd", "-c", conf][..], &["bench", "rbd/x", "--io-type", "read", "-c", conf]] {
        // It is the cluster that is missing, not a store.
        let said = site.run(args).fails(3);
        assert!(said.contains("ceph.conf") && !said.contains("store"), "{args:?}: {said}");
    }
    assert!(!site.data().exists(), "nothing was made");
}

#[test]
fn a_load_is_measured() {
    let site = Site::with_store();
    site.run(&["create", "local/x", "--size", "8M"]).ok();
    for (kind, pattern) in [("write", "seq"), ("read", "rand"), ("readwrite", "rand")] {
        let args = ["bench", "local/x", "--io-type", kind, "--io-pattern", pattern, "--io-size", "4K", "--depth", "4"];
        let load = |seconds| site.run(&[&args[..], &["--seconds", seconds, "--format", "json"]].concat()).json();
        let some = |report: &serde_json::Value| report["requests"].as_u64() > Some(0);
        // The machine may give all of a short time to others.
        let report = ["0.05", "0.5"].into_iter().map(load).find(some).unwrap_or_else(|| load("5"));
        assert!(report["requests"].as_u64() > Some(0) && report["latency_us_p50"].as_f64() > Some(0.0), "{report}");
    }
    // So many bytes, whatever the time.
    let args = ["bench", "local/x", "--io-type", "write", "--io-size", "64K", "--io-threads", "3", "--io-total", "1M"];
    let report = site.run(&[&args[..], &["--format", "json"]].concat()).json();
    assert_eq!((&report["requests"], &report["depth"]), (&serde_json::json!(16), &serde_json::json!(3)), "{report}");
    let said = site.run(&["bench", "local/x", "--io-type", "read", "--io-total", "0"]).fails(2);
    assert!(said.contains("--io-total"), "{said}");
    let said = site.run(&["bench", "local/x", "--io-type", "read", "--io-size", "16M"]).fails(2);
    assert!(said.contains("--io-size"), "{said}");
}

#[test]
fn an_error_is_json_if_that_is_wanted() {
    let site = Site::with_store();
    let said = site.run(&["info", "nope", "--format", "json"]).fails(3);
    let error: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(error["error"]["kind"], "not_found");
    assert!(error["error"]["message"].as_str().expect("a text").contains("local/nope"));
}

#[test]
fn help_completions_and_manual() {
    let help = run(&["--help"]).ok();
    for command in ["serve", "status", "create", "import", "export", "attach", "store", "completions"] {
        assert!(help.contains(command), "{command} in {help}");
    }
    assert!(help.contains("Exit codes") && help.contains("FOREBAY_CONTROL"));
    assert!(run(&["create", "--help"]).ok().contains("forebay create local/disk1 --size 10G"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(run(&["completions", shell]).ok().contains("forebay"), "{shell}");
    }
    let manual = run(&["man"]).ok();
    assert!(manual.starts_with(".ie") && manual.contains("no daemon answers"), "{manual}");
    let site = Site::new();
    let dir = site.path("man");
    run(&["man", "--dir", dir.to_str().expect("a path")]).ok();
    for page in ["forebay.1", "forebay-create.1", "forebay-store-check.1"] {
        assert!(dir.join(page).exists(), "{page}");
    }
    assert_eq!(run(&["--version"]).ok().trim(), concat!("forebay ", env!("CARGO_PKG_VERSION")));
}
