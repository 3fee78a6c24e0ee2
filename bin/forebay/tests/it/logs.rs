//! Write logs through the command line: their limits, and looking after them when their images are not open.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Nbd, Site, content, wait_until};
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
    assert!(said.contains("dirty=0 leaves no space"), "{said}");
    // Without the daemon its own settings are not known, those of the log are.
    site.stop();
    assert_eq!(limits(&site, "a"), (json!(null), json!(2000)));
    assert_eq!(limits(&site, "b"), (json!(1 << 20), json!(700)));
}

#[test]
fn a_shared_file_is_small_again_when_its_logs_are_gone() {
    const LOGS: usize = 100;
    let site = Site::serving(&[]);
    let file = site.path("logs");
    let taken = || file.metadata().map_or(0, |meta| meta.len().max(meta.blocks() * 512));
    let images: Vec<String> = (0..LOGS).map(|i| format!("image{i}")).collect();
    for image in &images {
        site.run(&["create", image, "--size", "1M"]).ok();
        site.run(&["attach", image, "--nbd", "--log", &place(&site, "")]).ok();
    }
    assert!(taken() > (LOGS as u64 * 16) << 20, "{} bytes", taken());
    // Those at the end first, then from the beginning: the end is cut, holes are punched.
    let (kept, gone) = images.split_last().expect("images");
    let (first, last) = gone.split_at(LOGS / 2);
    for image in last.iter().rev().chain(first) {
        site.run(&["detach", image]).ok();
    }
    let blocks = file.metadata().expect("the file").blocks() * 512;
    assert!(blocks < 40 << 20, "{blocks} bytes are allocated for one log");
    site.run(&["detach", kept]).ok();
    assert!(taken() <= 2 << 20, "{} bytes are left without a log", taken());
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
    // As after a power failure: no client has the images open, and the daemon does not run.
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
    assert!(said.contains("64 KiB") && said.contains("the oldest written") && said.contains("--force"), "{said}");
    let said = site.run(&["rm", "lost"]).fails(6);
    assert!(said.contains("64 KiB") && said.contains("the oldest written"), "{said}");
    site.run(&["log", "discard", "lost", "--force"]).ok();
    site.run(&["log", "info", "lost"]).fails(3);
    site.run(&["log", "discard", "saved"]).ok();
    let bytes = |image: &str| site.export(image)[1 << 20..(1 << 20) + (64 << 10)].to_vec();
    assert!(bytes("saved") == content(64 << 10, 7), "what was flushed is in the image");
    assert!(bytes("lost").iter().all(|&byte| byte == 0), "what was discarded is not");
}

/// An export whose reader has taken the first bytes, and takes no more for now.
struct SlowExport {
    child: Child,
    taken: Vec<u8>,
}

impl SlowExport {
    fn begin(site: &Site, image: &str) -> Self {
        let mut command = site.command(&["export", image, "-"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command");
        let mut taken = vec![0; 4096];
        child.stdout.as_mut().expect("its output").read_exact(&mut taken).expect("the first bytes");
        Self { child, taken }
    }

    fn finish(mut self) -> Vec<u8> {
        self.child.stdout.take().expect("its output").read_to_end(&mut self.taken).expect("the rest");
        let done = self.child.wait_with_output().expect("the command");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        self.taken
    }
}

const MIB: usize = 1 << 20;
/// Offset of the log's content, far behind what an export reads ahead.
const AT: usize = 44 * MIB;

/// A site with an image of 48 MiB in the store, and 64 KiB over it that are only in its log.
fn logged(image: &str) -> (Site, Vec<u8>, Vec<u8>) {
    let site = Site::serving(&["--log-dirty-age", "60m"]);
    let (base, newer) = (content(48 * MIB, 1), content(64 << 10, 2));
    site.run_with_input(&["import", "-", image], &base).ok();
    site.run(&["attach", image, "--nbd", "--log", &place(&site, "")]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    client.write(AT as u64, &newer);
    client.flush();
    (site, base, newer)
}

fn read(site: &Site, image: &str) -> Vec<u8> {
    Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects").read(AT as u64, 64 << 10)
}

#[test]
fn no_handle_of_an_image_serves_without_the_log_that_its_record_names() {
    for again in [&["attach", "a", "--nbd"][..], &["attach", "a", "--nbd", "--log"]] {
        let (site, mut base, newer) = logged("a");
        let export = SlowExport::begin(&site, "a");
        site.run(&["detach", "a", "--nbd", "--force", "--keep-log"]).ok();
        // The export holds the image open; the log is still the image's.
        let place = place(&site, "");
        let again: Vec<&str> =
            again.iter().copied().chain(again.contains(&"--log").then_some(place.as_str())).collect();
        site.run(&again).ok();
        assert!(read(&site, "a") == newer, "the image is served without its log");
        let logs = site.json(&["log", "ls"]);
        assert_eq!(logs.as_array().map(Vec::len), Some(1), "{logs}");
        assert_eq!((&logs[0]["state"], &logs[0]["image"]), (&json!("on"), &json!("local/a")), "{logs}");
        base[AT..AT + newer.len()].copy_from_slice(&newer);
        assert!(export.finish() == base, "the export has lost what was only in the log");
        // What is written now is the newest, whatever is replayed.
        let newest = content(64 << 10, 3);
        let mut client = Nbd::connect(&site.data().join("nbd.sock"), "a").expect("connects");
        client.write(AT as u64, &newest);
        client.flush();
        drop(client);
        for end in [&["detach", "a", "--nbd", "--force", "--keep-log"][..], &["detach", "a", "--nbd", "--force"]] {
            site.run(end).ok();
            site.run(&["attach", "a", "--nbd"]).ok();
            assert!(read(&site, "a") == newest, "an older log was replayed over what was written later");
        }
        assert_eq!(site.json(&["log", "ls"]), json!([]));
    }
}

#[test]
fn an_export_that_runs_while_a_log_is_kept_or_ended_has_what_the_log_held() {
    for keep in [true, false] {
        let (site, mut base, newer) = logged("a");
        let export = SlowExport::begin(&site, "a");
        let detach = ["detach", "a", "--nbd", "--force", "--keep-log"];
        site.run(&detach[..if keep { 5 } else { 4 }]).ok();
        base[AT..AT + newer.len()].copy_from_slice(&newer);
        assert!(export.finish() == base, "with keep {keep} the export has lost what was in the log");
        assert!(site.export("a") == base);
        let logs = site.json(&["log", "ls"]);
        assert_eq!(logs.as_array().map(Vec::len), Some(usize::from(keep)), "{logs}");
    }
}

#[test]
fn a_kept_log_is_closed_when_the_last_user_of_the_image_has_ended() {
    let (site, ..) = logged("a");
    let export = SlowExport::begin(&site, "a");
    site.run(&["detach", "a", "--nbd", "--force", "--keep-log"]).ok();
    assert_eq!(site.json(&["log", "info", "a"])["state"], json!("on"));
    let said = site.run(&["log", "discard", "a", "--force"]).fails(6);
    assert!(said.contains("in use"), "{said}");
    drop(export.finish());
    wait_until("the log is closed", || site.json(&["log", "info", "a"])["state"] == json!("closed"));
    site.run(&["log", "discard", "a", "--force"]).ok();
    site.run(&["log", "info", "a"]).fails(3);
}

#[test]
fn a_daemon_stops_though_the_backend_of_a_log_does_not_answer() {
    let mut site = Site::new();
    site.delay_us = Some(3_600_000_000);
    site.start_with_flags(&["--log-dirty-age", "20ms"]);
    let written = content(64 << 10, 5);
    for image in ["a", "b"] {
        site.run(&["create", image, "--size", "8M"]).ok();
        site.run(&["attach", image, "--nbd", "--log", &place(&site, "")]).ok();
        let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
        client.write(1 << 20, &written);
    }
    // It is being written back when the daemon is told to stop.
    let begun = |image: &str| {
        let (_, page) = site.http(&format!("GET /metrics?volume=local/{image}"));
        let of_image = format!("image=\"{image}\"");
        let mut lines = page.lines().filter(|line| line.contains("log_written_back_bytes") && line.contains(&of_image));
        lines.any(|line| !line.ends_with(" 0") && !line.ends_with(" 0.0"))
    };
    wait_until("what the logs hold is being written back", || ["a", "b"].into_iter().all(&begun));
    let began = Instant::now();
    site.stop();
    assert!(began.elapsed() < Duration::from_secs(60), "it took {:?}", began.elapsed());
    assert!(site.log().contains("it keeps its data"), "{}", site.log());
    site.delay_us = None;
    site.start();
    for image in ["a", "b"] {
        let mut client = Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
        assert!(client.read(1 << 20, written.len()) == written, "{image} has lost an acknowledged write");
    }
}
