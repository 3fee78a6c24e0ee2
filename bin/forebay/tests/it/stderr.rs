//! The daemon when its log is not read: it keeps serving, counts dropped lines, and logs their number afterwards.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use crate::common::{Mount, Nbd, Site, content, wait_until};

/// Every handshake that ends is logged, by both reactors.
const CHATTY: &[&str] = &["--log-level", "trace", "--cores", "2"];

/// Makes an image, serves it to a host, and removes it: all of which is logged, by every thread.
fn use_daemon(site: &Site, image: &str) {
    site.run(&["create", image, "--size", "16M"]).ok();
    site.run(&["attach", image, "--nbd"]).ok();
    let bytes = content(1 << 20, 7);
    let socket = site.data().join("nbd.sock");
    // A connection more than cores, so that each has one.
    for _ in 0..3 {
        let mut host = Nbd::connect(&socket, &format!("local/{image}")).expect("connected");
        host.write(0, &bytes);
        host.flush();
        assert_eq!(host.read(0, bytes.len()), bytes);
    }
    assert_eq!(site.json(&["status"])["ready"], true);
    site.run(&["detach", image]).ok();
    site.run(&["rm", image]).ok();
}

fn dropped(site: &Site) -> u64 {
    let (status, text) = site.http("GET /metrics");
    assert_eq!(status, 200, "{text}");
    let value = |line: &str| line.strip_prefix("forebay_log_lines_dropped_total ").and_then(|count| count.parse().ok());
    text.lines().find_map(value).unwrap_or_else(|| panic!("no count of dropped lines in\n{text}"))
}

/// Makes the daemon log a few hundred lines.
fn fill_log(site: &Site) {
    for _ in 0..500 {
        drop(UnixStream::connect(site.data().join("nbd.sock")).expect("connected"));
    }
}

/// Runs a daemon whose standard error takes nothing from when `close` was called.
fn serves_with_a_log_that_fails(stderr: impl Into<Stdio>, close: impl FnOnce()) {
    let mut site = Site::new();
    site.start_with(CHATTY, stderr);
    close();
    use_daemon(&site, "x");
    fill_log(&site);
    wait_until("lines are dropped", || dropped(&site) > 100);
    use_daemon(&site, "y");
    site.stop();
}

#[test]
fn a_full_device_at_standard_error_stops_nothing() {
    serves_with_a_log_that_fails(OpenOptions::new().write(true).open("/dev/full").expect("/dev/full"), || {});
}

#[test]
fn a_closed_pipe_at_standard_error_stops_nothing() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    serves_with_a_log_that_fails(writer, || drop(reader));
}

#[test]
fn a_reader_that_has_stopped_stops_nothing_and_is_told_what_it_missed() {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let mut site = Site::new();
    site.start_with(CHATTY, writer);
    // The log is not read, as with a stopped journal: the pipe fills, then the queue in front of it.
    wait_until("lines are dropped", || {
        fill_log(&site);
        dropped(&site) > 0
    });
    use_daemon(&site, "x");
    let reading = std::thread::spawn(move || {
        let mut text = Vec::new();
        reader.read_to_end(&mut text).expect("the log");
        String::from_utf8_lossy(&text).into_owned()
    });
    use_daemon(&site, "last");
    site.stop();
    let text = reading.join().expect("the reader");
    assert!(text.contains("lines of the log were dropped"), "no word of what was dropped");
    assert!(text.contains("stopped"), "what came after is missing");
}

#[test]
fn a_full_file_system_at_standard_error_stops_nothing_and_the_log_goes_on_when_there_is_space() {
    let mut site = Site::new();
    let Some(mount) = Mount::tmpfs(&site.path("logs"), "16k") else { return };
    let path = mount.path().join("log");
    let log = OpenOptions::new().create(true).append(true).open(&path).expect("the log");
    site.start_with(CHATTY, log);
    wait_until("lines are dropped", || {
        fill_log(&site);
        dropped(&site) > 0
    });
    use_daemon(&site, "x");
    // As logrotate's copytruncate does.
    File::options().write(true).open(&path).and_then(|file| file.set_len(0)).expect("truncated");
    wait_until("the log says what was dropped", || {
        let text = String::from_utf8_lossy(&std::fs::read(&path).expect("the log")).into_owned();
        text.contains("lines of the log were dropped") && text.contains("No space left on device")
    });
    site.stop();
}

#[test]
fn what_operators_do_is_logged_a_line_each_as_json_if_wanted() {
    let mut site = Site::new();
    site.start_with_flags(&["--log-format", "json"]);
    for args in [
        &["create", "a", "--size", "8M"][..],
        &["resize", "a", "--size", "16M"],
        &["attach", "a", "--nbd", "--read-only"],
        &["detach", "a"],
        &["mv", "a", "b"],
        &["rm", "b"],
    ] {
        site.run(args).ok();
    }
    site.stop();
    let log = site.log();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}")))
        .collect();
    for (message, field, value) in [
        ("an image was created", "image", "local/a"),
        ("an image was resized", "size", "16 MiB"),
        ("an image is exported", "front", "nbd"),
        ("an export was ended", "image", "local/a"),
        ("an image was renamed", "to", "local/b"),
        ("an image was removed", "image", "local/b"),
    ] {
        let told: Vec<_> = lines.iter().filter(|line| line["message"] == message).collect();
        assert_eq!(told.len(), 1, "{message} in\n{log}");
        assert!(
            told[0][field] == value && told[0]["level"] == "INFO" && told[0]["timestamp"].is_string(),
            "{}",
            told[0]
        );
    }
}

#[test]
fn lines_in_the_journal_begin_with_their_priorities() {
    use std::os::unix::fs::MetadataExt;
    let site = Site::new();
    let path = site.path("journal");
    let journal = std::fs::File::create(&path).expect("a file");
    let meta = journal.metadata().expect("its inode");
    let mut command = site.command(&["serve", "--store-size", "64M", "--nbd", "127.0.0.1:0"]);
    command.env("JOURNAL_STREAM", format!("{}:{}", meta.dev(), meta.ino())).stderr(journal);
    let mut serving = command.spawn().expect("started");
    let text = || std::fs::read_to_string(&path).expect("the log");
    wait_until("it is ready", || text().contains("ready"));
    serving.kill().expect("killed");
    serving.wait().expect("ended");
    let log = text();
    assert!(log.lines().all(|line| line.starts_with("<6>") || line.starts_with("<4>")), "{log}");
    assert!(log.contains("<6> INFO forebay::daemon: ready"), "the journal has the time: {log}");
}
