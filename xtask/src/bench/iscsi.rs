//! Forebay over iSCSI against tgtd: volumes in memory, and volumes in files.
//!
//! One processor for the targets and one for the host.  Four hosts: libiscsi's `iscsi-perf`, fio and QEMU with the same
//! library, which cost more than the target does and so say what a guest sees, and our own, which asks its socket
//! again and again and so says what the target gives.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds, idle};
use crate::daemon::{self, Daemon};
use crate::fio;
use crate::shell::{self, Process, Scratch};

/// Initiator program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Host {
    /// libiscsi's own measure; it only reads.
    Perf,
    /// fio with its libiscsi engine.
    Fio,
    /// `qemu-img bench`, with this many requests.
    Qemu(u32),
    /// `iscsi-load` (test/iscsi), polling.
    Load,
}

/// Medium of the targets' data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Memory,
    File,
}

struct Job {
    name: &'static str,
    backing: Backing,
    host: Host,
    pattern: &'static str,
    block: u32,
    depth: u32,
    /// Requests a second that were asked for.
    goal: Option<f64>,
}

impl Job {
    fn is_bandwidth(&self) -> bool {
        self.block >= 1 << 20
    }
}

const fn job(name: &'static str, host: Host, pattern: &'static str, block: u32, depth: u32) -> Job {
    Job { name, backing: Backing::Memory, host, pattern, block, depth, goal: None }
}

const JOBS: &[Job] = &[
    job("randread-4k-qd1-perf", Host::Perf, "randread", 4096, 1),
    job("randread-4k-qd32-perf", Host::Perf, "randread", 4096, 32),
    job("read-1m-perf", Host::Perf, "read", 1 << 20, 4),
    job("randread-4k-qd1-fio", Host::Fio, "randread", 4096, 1),
    job("randread-4k-qd32-fio", Host::Fio, "randread", 4096, 32),
    job("randwrite-4k-qd32-fio", Host::Fio, "randwrite", 4096, 32),
    job("read-1m-fio", Host::Fio, "read", 1 << 20, 4),
    job("write-4k-qd1-qemu", Host::Qemu(20_000), "write", 4096, 1),
    job("write-4k-qd32-qemu", Host::Qemu(40_000), "write", 4096, 32),
    job("randread-4k-qd1", Host::Load, "randread", 4096, 1),
    Job { goal: Some(150e3), ..job("randread-4k-qd32", Host::Load, "randread", 4096, 32) },
    job("randwrite-4k-qd1", Host::Load, "randwrite", 4096, 1),
    Job { goal: Some(150e3), ..job("randwrite-4k-qd32", Host::Load, "randwrite", 4096, 32) },
    job("read-1m", Host::Load, "read", 1 << 20, 4),
    job("write-1m", Host::Load, "write", 1 << 20, 4),
    Job { backing: Backing::File, ..job("file-randread-4k-qd32", Host::Load, "randread", 4096, 32) },
    Job { backing: Backing::File, ..job("file-randwrite-4k-qd32", Host::Load, "randwrite", 4096, 32) },
];

/// Goal: our requests per CPU-second, divided by tgtd's.
const GOAL_PER_CPU: f64 = 3.0;
/// Bytes of the volumes.
const SIZE_MIB: u64 = 512;

const TARGET: &str = "iqn.2001-04.org.example:peer";

/// The two targets, and their volumes in memory and in files.
struct Places {
    daemon: Daemon,
    tgtd: Process,
    ours: [String; 2],
    theirs: [String; 2],
    /// Processor of the hosts.
    processor: String,
    _memory: Scratch,
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-iscsi-host"]))?;
    let scratch = Scratch::within(effort.dir.as_deref().unwrap_or(&shell::target()), "bench")?;
    let places = start(&scratch)?;
    for uri in places.ours.iter().chain(&places.theirs) {
        let fill = ["--pattern", "write", "--block", "1048576", "--depth", "4", "--once"];
        shell::output(load(&places.processor).arg(uri).args(fill)).with_context(|| format!("filling {uri}"))?;
    }
    let has_fio = fio::has_engine("libiscsi");
    if !has_fio {
        println!("fio has no engine libiscsi (FOREBAY_FIO names another fio): its cases are left out");
    }
    let can = |job: &&Job| job.host != Host::Fio || has_fio;
    let wanted = |job: &&Job| can(job) && effort.case.as_ref().is_none_or(|part| job.name.contains(part.as_str()));
    let jobs: Vec<&Job> = JOBS.iter().filter(wanted).collect();
    let mut speed: Vec<Case> = jobs.iter().map(|job| case(job, "")).collect();
    let mut per_cpu: Vec<Case> = jobs.iter().map(|job| case(job, "-per-cpu")).collect();
    for round in 0..effort.rounds {
        for (index, job) in jobs.iter().enumerate() {
            // Each round begins with another one.
            for which in [round % 2, (round + 1) % 2] {
                let (uris, process) = match which {
                    0 => (&places.ours, places.daemon.id()),
                    _ => (&places.theirs, places.tgtd.id()),
                };
                let before = cpu_seconds(process)?;
                let outcome = measure(job, &uris[job.backing as usize], &places.processor, effort.seconds)
                    .with_context(|| format!("{} on {}", job.name, if which == 0 { "forebay" } else { "tgtd" }))?;
                let used = (cpu_seconds(process)? - before).max(0.01);
                let value = if job.is_bandwidth() { outcome.bytes_per_second / 1e6 } else { outcome.iops };
                speed[index].series[which].values.push(value);
                per_cpu[index].series[which].values.push(outcome.requests / used);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let idle = idle::idle(&places.daemon, "iscsi-load", &places.ours[0])?;
    let Places { daemon, tgtd, .. } = places;
    daemon.stop()?;
    // It does not end on SIGTERM while there are targets.
    tgtd.kill()?;

    let all: Vec<Case> = speed.into_iter().chain(per_cpu).collect();
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("iscsi", &all);
    lines.iter().for_each(|line| println!("{line}"));
    println!("{idle}");
    if !dry_run && effort.case.is_none() {
        report::write("iscsi", "Forebay and tgtd over iSCSI", &method(effort, &idle), &all, &lines)?;
    }
    Ok(())
}

/// Starts both targets with a volume in memory (0) and one in a file (1) each.
fn start(scratch: &Scratch) -> Result<Places> {
    let port = shell::free_port()?;
    let words = ["--store-size", "4G", "--store-cache", "1G", "--iscsi", &format!("127.0.0.1:{port}")];
    let daemon = Daemon::start_under(&["taskset", "--cpu-list", "0"], &scratch.path().join("store"), &words)?;
    let size = format!("{SIZE_MIB}M");
    let attach = |name: &str| -> Result<String> {
        shell::output(daemon.command().args(["create", name, "--size", &size]))?;
        let said = shell::output(daemon.command().args(["attach", name, "--iscsi", "--format", "json"]))?;
        let target: Value = serde_json::from_str(&said)?;
        target["uris"][0].as_str().map(str::to_owned).context("no URI")
    };
    let ours = [attach("ram/bench")?, attach("local/bench")?];

    let memory = Scratch::within(Path::new("/dev/shm"), "bench")?;
    let files = [memory.path().join("raw"), scratch.path().join("raw")];
    // It names a socket; numbers past 32,767 are refused.
    let control = (shell::free_port()? % 30_000 + 1).to_string();
    let portal = shell::free_port()?;
    let log = scratch.path().join("tgtd.log");
    let listen = format!("portal=127.0.0.1:{portal}");
    let mut command = shell::command("taskset");
    command.args(["--cpu-list", "0", "tgtd", "--foreground", "--control-port", &control, "--iscsi", &listen]);
    let mut tgtd = Process::start(&mut command, &log)?;
    let admin = |words: &[&str]| {
        let mut admin = shell::command("tgtadm");
        admin.args(["--control-port", &control, "--lld", "iscsi"]).args(words);
        shell::output(&mut admin)
    };
    let up = shell::wait_for(Duration::from_secs(10), || match tgtd.ended() {
        Some(_) => Some(false),
        None => admin(&["--mode", "target", "--op", "show"]).is_ok().then_some(true),
    });
    if up != Some(true) {
        bail!("tgtd does not start: {}", shell::tail(&log, 5));
    }
    admin(&["--mode", "target", "--op", "new", "--tid", "1", "--targetname", TARGET])?;
    for (index, file) in files.iter().enumerate() {
        std::fs::File::create(file)?.set_len(SIZE_MIB << 20)?;
        let (lun, path) = ((index + 1).to_string(), file.display().to_string());
        admin(&["--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", &lun, "--backing-store", &path])?;
    }
    admin(&["--mode", "target", "--op", "bind", "--tid", "1", "--initiator-address", "ALL"])?;
    let theirs = [1, 2].map(|lun| format!("iscsi://127.0.0.1:{portal}/{TARGET}/{lun}"));
    let processor = std::thread::available_parallelism().map_or(0, |count| count.get() - 1).to_string();
    Ok(Places { daemon, tgtd, ours, theirs, processor, _memory: memory })
}

/// Our own initiator, polling.
fn load(processor: &str) -> Command {
    let mut load = shell::command("taskset");
    load.args(["--cpu-list", processor]).arg(shell::target().join("release/iscsi-load")).arg("--poll");
    load
}

struct Outcome {
    iops: f64,
    bytes_per_second: f64,
    requests: f64,
}

fn measure(job: &Job, uri: &str, processor: &str, seconds: f64) -> Result<Outcome> {
    let of = |iops: f64, requests: f64| Outcome { iops, bytes_per_second: iops * f64::from(job.block), requests };
    match job.host {
        Host::Load => {
            let (block, depth, time) = (job.block.to_string(), job.depth.to_string(), seconds.to_string());
            let words = ["--pattern", job.pattern, "--block", &block, "--depth", &depth, "--seconds", &time];
            let found: Value = serde_json::from_str(&shell::output(load(processor).arg(uri).args(words))?)?;
            let number = |name: &str| found[name].as_f64().with_context(|| format!("iscsi-load says no {name}"));
            Ok(of(number("iops")?, number("requests")?))
        }
        Host::Perf => {
            // It counts whole seconds.
            let seconds = seconds.ceil().max(1.0);
            let (blocks, depth, time) = ((job.block / 512).to_string(), job.depth.to_string(), seconds.to_string());
            let mut perf = shell::command("taskset");
            perf.args(["--cpu-list", processor, "iscsi-perf", "-b", &blocks, "-m", &depth, "-t", &time]);
            if job.pattern == "randread" {
                perf.arg("-r");
            }
            let said = shell::output(perf.arg(uri))?;
            let iops = average(&said).with_context(|| format!("iscsi-perf prints no average: {said}"))?;
            Ok(of(iops, iops * seconds))
        }
        Host::Fio => {
            let asked = fio::Job {
                name: "bench",
                pattern: job.pattern,
                block_size: job.block,
                depth: job.depth,
                flush_each: 0,
            };
            let mut target = fio::iscsi(uri);
            target.extend([format!("--size={SIZE_MIB}M"), format!("--cpus_allowed={processor}")]);
            let outcome = fio::measure(&asked, &target, seconds)?;
            Ok(of(outcome.iops, outcome.requests as f64))
        }
        Host::Qemu(count) => {
            let (block, depth, number) = (job.block.to_string(), job.depth.to_string(), count.to_string());
            let mut qemu = shell::command("taskset");
            qemu.args(["--cpu-list", processor, "qemu-img", "bench", "-q", "-w", "-f", "raw", "-t", "none"]);
            let begun = Instant::now();
            shell::output(qemu.args(["-s", &block, "-d", &depth, "-c", &number]).arg(uri))?;
            let requests = f64::from(count);
            Ok(of(requests / begun.elapsed().as_secs_f64(), requests))
        }
    }
}

/// The last average that iscsi-perf has shown.
fn average(said: &str) -> Option<f64> {
    said.rsplit("iops average ").next().filter(|rest| rest.len() < said.len())?.split(' ').next()?.parse().ok()
}

fn case(job: &Job, suffix: &str) -> Case {
    let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
    let mut all = vec![series("forebay", Side::Ours), series("tgtd", Side::Peer)];
    if let Some(goal) = job.goal.filter(|_| suffix.is_empty()) {
        // What was asked for counts here; tgtd is beside it.
        all[1].side = Side::Other;
        all.push(Series { values: vec![goal], ..series("goal", Side::Peer) });
    }
    let unit = match (suffix.is_empty(), job.is_bandwidth()) {
        (true, true) => "MB/s",
        (true, false) => "IOPS",
        (false, _) => "per CPU-second",
    };
    let goal = if suffix.is_empty() { 1.0 } else { GOAL_PER_CPU };
    Case { name: format!("{}{suffix}", job.name), unit, goal, series: all }
}

fn method(effort: &Effort, idle: &str) -> String {
    format!(
        "{}. Volumes of {SIZE_MIB} MiB, written once from end to end. In memory: our pool `ram`, and for tgtd a file \
         on a tmpfs; `file-`: our store in a file with a cache for the whole volume, and for tgtd a file in the page \
         cache. Both targets have the first processor, tgtd as Debian starts it (16 threads a unit), ours with one \
         core; the host has the last. {} rounds of {} s a measurement, the order turned each round; medians (lowest \
         and highest in parentheses).\n\nThe hosts: `-perf` is libiscsi's `iscsi-perf`, `-fio` is fio with its \
         libiscsi engine (Debian's has none: FOREBAY_FIO names another), `-qemu` is `qemu-img bench`, libiscsi again. \
         They cost more than the target does and are the limit, so that the requests per CPU-second of the target \
         (`-per-cpu`: user and system time of its process, all its threads) say more than those per second. While such \
         a host, or one with a single request, prepares its next request, our core busy-polls for up to 50 us, and \
         that counts; with `--linger-us 0` it sleeps instead. The same `qemu-img bench` then had, in three runs in \
         turn with 50 us: at depth 32 103 k writes a CPU-second where it was 83 k, and 71 k a second where it was 78 \
         k; at depth 1 31 k where it was 41 k, and 13 k where it was 38 k. The others are `iscsi-load` (test/iscsi), \
         which polls its socket and does not copy the data that it reads. *goal*: the goal set when the front was \
         begun, the figures of SPDK's target on such a machine.\n\n{idle}.\n\nRepeat it: `cargo xtask bench iscsi`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_average_counts() {
        assert_eq!(average("iops average 10 (1 MB/s)  \riops average 39080 (152 MB/s)\n\nfinished."), Some(39080.0));
        assert_eq!(average("nothing"), None);
    }
}
