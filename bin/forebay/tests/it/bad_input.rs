//! Wrong input: for each case the exit code, and words that the message must contain.

use std::process::Stdio;

use crate::common::{Site, wait_until};

const FRONTS: [&str; 4] = ["--nvme", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"];

/// A command, its exit code, and what its message says: what is wrong, where, and what to do.
type Line<'a> = (&'a [&'a str], i32, &'a [&'a str]);

#[test]
fn each_says_what_is_wrong_and_what_to_do() {
    let site = Site::serving(&FRONTS);
    site.run(&["create", "x", "--size", "16M"]).ok();
    site.run(&["create", "zero", "--size", "0"]).ok();
    let file = |name: &str, bytes: &[u8]| {
        let path = site.path(name);
        std::fs::write(&path, bytes).expect("written");
        path.display().to_string()
    };
    let (qcow2, gz) = (file("disk.qcow2", b"QFI\xfb\0\0\0\x03 and more"), file("disk.gz", b"\x1f\x8b\x08 and more"));
    let export = file("export", b"rbd image v2\nand more");
    let nowhere = format!("ssd:{}:16M", site.path("no/such/logs").display());
    let lines: &[Line] = &[
        // Numbers.
        (&["create", "y", "--size", "-5"], 2, &["'-5' is not a size", "negative", "10G"]),
        (&["resize", "x", "--size", "-5G"], 2, &["'-5G' is not a size"]),
        (&["create", "y", "--size", "9999999T"], 2, &["local/y", "the largest size"]),
        (&["bench", "x", "--io-type", "read", "--seconds", "0"], 2, &["'0'", "0.001"]),
        (&["bench", "x", "--io-type", "read", "--seconds", "-1"], 2, &["'-1'", "seconds"]),
        (&["bench", "x", "--io-type", "read", "--seconds", "NaN"], 2, &["'NaN'", "seconds"]),
        (&["attach", "x", "--iscsi", "--lun", "16384"], 2, &["16384", "16383"]),
        (&["attach", "x", "--nvme", "--nsid", "0"], 2, &["8192"]),
        // Names.
        (&["create", "a\u{202e}b", "--size", "1G"], 2, &["a\\u{202e}b", "invisible"]),
        (&["create", "a\u{200b}", "--size", "1G"], 2, &["\\u{200b}"]),
        (&["mv", "x", "x\u{feff}"], 2, &["\\u{feff}"]),
        (&["import", &qcow2, "a\u{2066}", "--raw"], 2, &["\\u{2066}"]),
        (&["create", "a b", "--size", "1G"], 2, &["' '"]),
        (&["attach", "x", "--iscsi", "--initiator", "not a name"], 2, &["'not a name'", "initiatorname.iscsi"]),
        (&["attach", "x", "--iscsi", "--initiator", "iqn."], 2, &["'iqn.'", "initiator"]),
        // Unavailable resources.
        (&["attach", "zero", "--nbd"], 2, &["0 bytes", "forebay resize local/zero"]),
        (&["attach", "none", "--nbd"], 3, &["no image local/none", "forebay ls local"]),
        (&["attach", "x", "--nbd", "--log", &nowhere], 3, &["no/such/logs", "a write log for local/x", "directory"]),
        (&["detach", "x"], 3, &["not exported", "forebay targets"]),
        // What is no disk.
        (&["import", &qcow2, "q"], 2, &["disk.qcow2 is a qcow2 image", "qemu-img convert -O raw", "--raw"]),
        (&["import", &gz, "q"], 2, &["compressed by gzip", "gzip -dc", "forebay import -"]),
        (&["import", &export, "q"], 2, &["an export of rbd in format 2", "--export-format 2"]),
        (&["import", "-", "q"], 2, &["standard input", "forebay create"]),
        // Clusters.
        (&["ls", "rbd"], 3, &["no pool 'rbd' here", "ceph.conf", "start the daemon with -c"]),
    ];
    for (args, code, words) in lines {
        let said = site.run(args).fails(*code);
        assert!(words.iter().all(|word| said.contains(word)), "{args:?} says {said}, not {words:?}");
        assert!(!said.contains("busy (busy"), "{args:?}: {said}");
    }
    // None of them has left anything.
    let images = site.json(&["ls", "-l"]);
    assert_eq!(images.as_array().map(Vec::len), Some(2), "{images}");
    assert_eq!(site.json(&["targets"]), serde_json::json!([]));
    // As it is, if that is meant; and from a stream whose beginning was looked at.
    site.run(&["import", &qcow2, "q", "--raw"]).ok();
    assert!(site.export("q").starts_with(b"QFI\xfb"));
    site.run_with_input(&["import", "-", "s"], &[7; 5000]).ok();
    assert_eq!(site.export("s"), [7; 5000]);
}

#[test]
fn a_store_of_no_size_is_refused_in_bytes() {
    let site = Site::new();
    for size in ["0", "5M", "1"] {
        let said = site.run(&["store", "init", "--size", size]).fails(2);
        assert!(said.contains("store.img") && said.contains("7340032") && said.contains("--size"), "{size}: {said}");
        assert!(!said.contains("2^20") && !site.data().join("store.img").exists(), "{size}: {said}");
    }
}

#[test]
fn a_level_that_is_none_is_refused() {
    let site = Site::new();
    for level in ["nonsense", "loud", "forebay=loud", "info,forebay"] {
        let mut command = site.command(&["serve", "--log-level", level]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut serving = command.spawn().expect("started");
        wait_until("it ends, for it must not serve", || serving.try_wait().expect("ours").is_some());
        let done = serving.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{level}: {said}");
        assert!(said.contains("info"), "{level}: {said}");
    }
    assert!(!site.data().join("store.img").exists(), "nothing was made");
}

#[test]
fn a_cluster_that_cannot_be_reached_says_what_was_tried() {
    let site = Site::new();
    // A monitor that takes connections and says nothing.
    let monitor = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = monitor.local_addr().expect("an address");
    let conf = site.path("silent.conf");
    let text = format!("[global]\nmon_host = [v2:{addr}/0]\nauth_client_required = none\nclient_mount_timeout = 1\n");
    std::fs::write(&conf, text).expect("written");
    let (conf, absent) = (conf.display().to_string(), site.path("absent.conf").display().to_string());
    let silent: &[&str] =
        &["pool 'rbd'", "connecting to the Ceph cluster", "monitor", "mon_host", "client_mount_timeout"];
    let lines: &[Line] = &[
        (&["ls", "rbd", "-c", &conf], 4, silent),
        (&["du", "rbd", "-c", &conf], 4, &["monitor", "mon_host", "local/rbd"]),
        (&["ls", "rbd", "-c", &absent], 3, &["no pool 'rbd' here", "absent.conf", "No such file"]),
    ];
    for (args, code, words) in lines {
        let said = site.run(args).fails(*code);
        assert!(words.iter().all(|word| said.contains(word)), "{args:?} says {said}, not {words:?}");
    }
}

#[test]
fn a_rebuild_of_what_is_no_store_says_so_and_writes_nothing() {
    let site = Site::new();
    let file = |name: &str, parts: &[(usize, &[u8])]| {
        let mut bytes = vec![0; 8 << 20];
        parts.iter().for_each(|(at, part)| bytes[*at..at + part.len()].copy_from_slice(part));
        let path = site.path(name);
        std::fs::write(&path, bytes).expect("written");
        path.display().to_string()
    };
    let (empty, luks) = (file("empty", &[]), file("luks", &[(0, b"LUKS\xba\xbe\0\x02")]));
    let (text, nowhere) =
        (file("text", &[(2 << 20, b"remember the milk")]), site.path("nowhere").display().to_string());
    // A log without its first segments, or of which no checkpoint is left.
    let lines: &[(&str, i32, &[&str])] = &[
        (&empty, 8, &["cannot be rebuilt", "no checkpoint record"]),
        (&text, 8, &["cannot be rebuilt", "no checkpoint record"]),
        (&luks, 2, &["is not rebuilt", "a LUKS volume", "something else"]),
        (&nowhere, 3, &["nowhere is not there", "forebay store init"]),
    ];
    for (store, code, words) in lines {
        let before = std::fs::read(store).ok();
        for more in [&[][..], &["--roll-back"], &["--repair"]] {
            let args = [&["store", "check", "--rebuild", "--store", store][..], more].concat();
            let said = site.run(&args).fails(*code);
            assert!(words.iter().all(|word| said.contains(word)), "{args:?} says {said}, not {words:?}");
        }
        assert!(std::fs::read(store).ok() == before, "{store} was written to");
    }
    let site = Site::serving(&[]);
    let said = site.run(&["store", "check", "--rebuild"]).fails(6);
    assert!(said.contains("stop the daemon"), "{said}");
}
