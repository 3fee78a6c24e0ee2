//! Behaviour of the daemon on a real machine: idle, without io_uring, with a second opener, under malformed input.

mod crowd;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::daemon::{self, Daemon};
use crate::fio;
use crate::malformed::{self, Protocol};
use crate::nbd::Client;
use crate::quiet::{self, Stopwatch};
use crate::shell::{self, Scratch};

/// Flags for a daemon that finds io_uring forbidden, as many containers do; strace answers the system call.
const NO_IO_URING: &[&str] = &[
    "strace",
    "-D",
    "-f",
    "--seccomp-bpf",
    "-o",
    "/dev/null",
    "-e",
    "trace=io_uring_setup",
    "-e",
    "inject=io_uring_setup:error=EPERM",
];

/// An answer that takes so long does not come: far longer than any machine needs.
const HANGS_AFTER: Duration = Duration::from_secs(300);

/// Checks one thing after the other; a line each.
pub fn run() -> Result<()> {
    malformed::build()?;
    let scratch = Scratch::within(&shell::target(), "conduct")?;
    let mut failed = 0;
    let mut check = |title: &str, work: &dyn Fn(&Path) -> Result<String>| {
        let folder = scratch.path().join(title.replace(' ', "-"));
        match std::fs::create_dir_all(&folder).map_err(Into::into).and_then(|()| work(&folder)) {
            Ok(text) => println!("ok conduct: {title}: {text}"),
            Err(error) => {
                failed += 1;
                println!("not ok conduct: {title}: {error:#}");
            }
        }
    };
    check("idle", &idle);
    check("io_uring forbidden", &without_io_uring);
    check("second opener", &second_opener);
    check("rubbish", &rubbish);
    check("malformed iscsi", &|folder| malformed(folder, Protocol::Iscsi));
    check("malformed nvme", &|folder| malformed(folder, Protocol::Nvme));
    check("malformed nvme-tls", &|folder| malformed(folder, Protocol::NvmeTls));
    check("a crowd over iscsi", &crowd::iscsi);
    check("no daemon", &without_daemon);
    ensure!(failed == 0, "{failed} failed");
    Ok(())
}

/// An idle daemon uses under 1 % of a quiet machine's core, with a volume attached and a client connected.
fn idle(folder: &Path) -> Result<String> {
    const WATCHED: Duration = Duration::from_secs(4);
    let daemon = Daemon::start(&folder.join("store"), &["--cores", "2"])?;
    daemon.volume("local/idle", "64M")?;
    let mut client = Client::connect(&daemon.socket(), "local/idle")?;
    client.write(0, &[7; 4096], true)?;
    ensure!(client.answer()?.error == 0, "a write fails");
    // What was just written may still be tidied up; only then it is idle.
    quiet::sleep(Duration::from_secs(1));
    let (before, watch) = (crate::bench::cpu_seconds(daemon.id())?, Stopwatch::start());
    std::thread::sleep(WATCHED);
    let used = crate::bench::cpu_seconds(daemon.id())? - before;
    // What takes a processor away from a thread counts as that thread's time on some machines.
    let (share, slowdown) = (used / watch.wall().as_secs_f64() * 100.0, watch.slowdown());
    ensure!(share < slowdown, "it uses {share:.2} % of a core, where a bare thread takes {slowdown:.2} times its time");
    daemon.stop()?;
    Ok(format!("{share:.2} % of a core"))
}

/// Checks that the daemon starts without io_uring where that is forbidden, and logs it once.
fn without_io_uring(folder: &Path) -> Result<String> {
    let daemon = Daemon::start_under(NO_IO_URING, &folder.join("store"), &["--cores", "2"])?;
    let uri = daemon.volume("local/plain", "64M")?;
    let mut verify = shell::command("fio");
    verify.args(fio::nbd(&uri)).args(["--name=verify", "--rw=randwrite", "--bs=4k", "--iodepth=16", "--size=32M"]);
    verify.args(["--verify=crc32c", "--verify_fatal=1", "--fsync=64", "--thread"]);
    shell::output(&mut verify)?;
    let log = daemon.log();
    let said = log.lines().filter(|line| line.contains("WARN") && line.contains("io_uring")).count();
    ensure!(said == 1, "it speaks of io_uring {said} times:\n{log}");
    daemon.stop()?;
    Ok("fio verifies 32 MiB on the other driver".into())
}

/// A store has one opener at a time.
fn second_opener(folder: &Path) -> Result<String> {
    let data = folder.join("store");
    let first = Daemon::start(&data, &[])?;
    let watch = Stopwatch::start();
    let Err(refusal) = Daemon::start(&data, &[]) else { anyhow::bail!("two daemons serve the same store") };
    ensure!(watch.quiet() < Duration::from_secs(10), "the second one hangs");
    shell::output(first.command().arg("status")).context("the first one is disturbed")?;
    first.stop()?;
    let text = format!("{refusal:#}");
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned();
    Ok(format!("refused: {line}"))
}

/// Malformed input ends that connection only.
fn rubbish(folder: &Path) -> Result<String> {
    let daemon = Daemon::start(&folder.join("store"), &[])?;
    daemon.volume("local/calm", "16M")?;
    let mut calm = Client::connect(&daemon.socket(), "local/calm")?;
    let mut noise: u64 = 0x5eed;
    for round in 0..64u32 {
        let mut stream = UnixStream::connect(daemon.socket())?;
        stream.set_read_timeout(Some(HANGS_AFTER))?;
        let mut bytes = Vec::new();
        // Half of them begin as a client would, so that the rubbish reaches deeper.
        if round % 2 == 0 {
            bytes.extend(3u32.to_be_bytes());
            bytes.extend(0x4948_4156_454f_5054u64.to_be_bytes());
        }
        for _ in 0..512 {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend(noise.to_be_bytes());
        }
        // The server may hang up in the middle of it, which is its right.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => return Err(error).context("the server does not close the connection on garbage"),
        }
    }
    calm.write(4096, &[9; 4096], false)?;
    ensure!(calm.answer()?.error == 0, "the well-behaved connection fails");
    calm.read(4096, 4096)?;
    ensure!(calm.answer()?.data == [9; 4096], "the well-behaved connection reads other data");
    daemon.stop()?;
    Ok("64 connections of it; another one goes on undisturbed".into())
}

/// Sessions that go wrong, for a while; `cargo xtask malformed` has a million of them.
fn malformed(folder: &Path, protocol: Protocol) -> Result<String> {
    let effort = malformed::Effort { sessions: u64::MAX, seconds: Some(12), seed: 0x5eed };
    malformed::check(folder, protocol, effort)
}

/// Commands open the store themselves when no daemon runs.
fn without_daemon(folder: &Path) -> Result<String> {
    let data = folder.join("store");
    let forebay = |words: &[&str]| {
        let mut command = shell::command(daemon::program());
        command.arg("--data").arg(&data).args(words);
        shell::output(&mut command)
    };
    forebay(&["store", "init"])?;
    let file = folder.join("in");
    let content: Vec<u8> = (0..3_000_000u32).flat_map(|number| number.to_le_bytes()).collect();
    std::fs::write(&file, &content)?;
    forebay(&["import", &file.display().to_string(), "local/file"])?;
    ensure!(forebay(&["ls"])?.contains("file"), "ls does not show the image");
    let back = folder.join("out");
    forebay(&["export", "local/file", &back.display().to_string()])?;
    ensure!(std::fs::read(&back)?.starts_with(&content), "the exported data differs from the imported data");
    forebay(&["store", "check"])?;
    forebay(&["rm", "local/file"])?;
    Ok("init, import, ls, export, check and rm".into())
}
