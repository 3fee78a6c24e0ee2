//! Limits and shares of volumes: how exactly a volume is held at a rate, and how much a quiet volume suffers beside a busy
//! one on the same core.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Effort, median};
use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job, Outcome};
use crate::shell::{self, Scratch};

/// Requests per second at which a volume is held.
const RATE: u32 = 1000;
/// Goal: greatest deviation from the rate.
const RATE_GOAL: f64 = 0.02;
/// Goal: latency beside a busy volume, divided by that alone.
const BESIDE_GOAL: f64 = 2.0;
/// Time after the limit was set that is not measured: what was saved up is spent then.
const SETTLES: Duration = Duration::from_secs(2);

/// A host with many requests in flight, that is held at a rate.
const HELD: Job = Job { name: "held", pattern: "randread", block_size: 4096, depth: 32, flush_each: 0 };
/// A host that asks for one block after another.
const QUIET: Job = Job { name: "quiet", pattern: "randread", block_size: 4096, depth: 1, flush_each: 0 };

/// Hosts with as many requests in flight as they may have, and how the quiet one beside them does.
const BUSY: &[(&str, Job, &str)] = &[
    ("read-4k", Job { name: "busy", pattern: "randread", block_size: 4096, depth: 128, flush_each: 0 }, "randread"),
    (
        "read-128k",
        Job { name: "busy", pattern: "randread", block_size: 128 << 10, depth: 128, flush_each: 0 },
        "randread",
    ),
    ("write-4k", Job { name: "busy", pattern: "randwrite", block_size: 4096, depth: 128, flush_each: 0 }, "randwrite"),
];

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let mut lines = Vec::new();
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let mut text = String::new();
    {
        // A processor of its own, as on a machine without hosts.
        let first = ["taskset", "--cpu-list", "0"];
        let daemon = Daemon::start_under(&first, &scratch.path().join("store"), &["--store-size", "4G"])?;
        if wanted("rate") {
            rate(&daemon, effort, &mut lines, &mut text)?;
        }
        beside(&daemon, effort, wanted, &mut lines, &mut text)?;
        daemon.stop()?;
    }
    print!("{text}");
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        write(&text, &lines)?;
    }
    Ok(())
}

fn fill(target: &[String]) -> Result<()> {
    fio::measure(&Job { name: "fill", pattern: "write", block_size: 1 << 20, depth: 8, flush_each: 0 }, target, 3.0)?;
    Ok(())
}

/// Measures a volume that is held at a rate, and librbd with the same option.
fn rate(daemon: &Daemon, effort: &Effort, lines: &mut Vec<String>, text: &mut String) -> Result<()> {
    let target = with_size(fio::nbd(&daemon.volume("local/held", "512M")?));
    fill(&target)?;
    let limit = RATE.to_string();
    shell::output(daemon.command().args(["config", "image", "set", "local/held", "rbd_qos_iops_limit", &limit]))?;
    let cluster = fio::has_engine("rbd").then(|| Cluster::named_or_start(1)).transpose()?;
    let peer = match &cluster {
        Some(cluster) => {
            shell::output(cluster.command("rbd").args(["create", "rbd/held", "--size", "512M"]))?;
            shell::output(cluster.command("rbd").args([
                "config",
                "image",
                "set",
                "rbd/held",
                "rbd_qos_iops_limit",
                &limit,
            ]))?;
            Some(with_size(vec![
                "--ioengine=rbd".into(),
                "--pool=rbd".into(),
                "--rbdname=held".into(),
                "--clientname=admin".into(),
            ]))
        }
        None => None,
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        ours.push(held(&target, effort.seconds)?.iops);
        if let (Some(target), Some(cluster)) = (&peer, &cluster) {
            // The engine reads the configuration that the environment names.
            let environment = [("CEPH_CONF", cluster.conf())];
            let measured = fio::measure_with(&HELD, &settled(target), effort.seconds, &environment);
            theirs.push(measured.context("fio's rbd engine")?.iops);
        }
        println!("rate: round {} of {}", round + 1, effort.rounds);
    }
    let ours = median(&ours);
    let off = (ours / f64::from(RATE) - 1.0).abs();
    let missed = if off > RATE_GOAL { " MISSED" } else { "" };
    let _ = writeln!(text, "A volume held at {RATE} requests per second, {} in flight: {ours:.1}.\n", HELD.depth);
    lines.push(format!(
        "RATIO name=qos/rate ours={ours:.1} peer={RATE} ratio={:.4} unit=IOPS against=limit goal=+-{RATE_GOAL}{missed}",
        ours / f64::from(RATE)
    ));
    if !theirs.is_empty() {
        let theirs = median(&theirs);
        let _ = writeln!(text, "librbd with the same option: {theirs:.1}.\n");
        lines.push(format!(
            "RATIO name=qos/rate-vs-librbd ours={ours:.1} peer={theirs:.1} ratio={:.4} unit=IOPS against=librbd",
            ours / theirs
        ));
    }
    Ok(())
}

/// The programs under which the quiet host runs, and the busy one: neither on the daemon's processor. The quiet one goes
/// first where it shares one with the busy host, which would be on another machine; otherwise the scheduler of this one
/// would be measured.
fn hosts() -> Result<[Vec<String>; 2]> {
    let last = std::thread::available_parallelism()?.get() - 1;
    let busy: Vec<String> = ["taskset", "--cpu-list", &last.to_string()].map(str::to_owned).into();
    let first = ["chrt", "--fifo", "10"];
    let may_go_first = shell::output(shell::command(first[0]).args(&first[1..]).arg("true")).is_ok();
    if !may_go_first {
        println!("remark: no real-time priority here, so the quiet host waits for the processor of the busy one");
    }
    let first = first.iter().filter(|_| may_go_first).map(|&word| word.to_owned());
    Ok([first.chain(busy.iter().cloned()).collect(), busy])
}

fn held(target: &[String], seconds: f64) -> Result<Outcome> {
    fio::measure(&HELD, &settled(target), seconds)
}

/// Leaves the beginning of a run out.
fn settled(target: &[String]) -> Vec<String> {
    [target, &[format!("--ramp_time={}", SETTLES.as_secs())]].concat()
}

fn with_size(target: Vec<String>) -> Vec<String> {
    [target, vec!["--size=512M".into()]].concat()
}

/// Measures a quiet volume alone and beside busy ones.
fn beside(
    daemon: &Daemon,
    effort: &Effort,
    wanted: impl Fn(&str) -> bool,
    lines: &mut Vec<String>,
    text: &mut String,
) -> Result<()> {
    let cases: Vec<_> = BUSY.iter().filter(|(name, ..)| wanted(name)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let target = |name: &str| Ok::<_, anyhow::Error>(with_size(fio::nbd(&daemon.volume(name, "512M")?)));
    let (quiet, busy) = (target("local/quiet")?, target("local/busy")?);
    fill(&quiet)?;
    fill(&busy)?;
    let _ = writeln!(text, "| busy volume, 128 in flight | quiet alone, p99 | beside, p99 | busy alone | beside |");
    let _ = writeln!(text, "|---|---|---|---|---|");
    let seconds = (effort.seconds / 3.0).max(1.0);
    let hosts = hosts()?;
    let [quiet_host, busy_host] = hosts.each_ref().map(|words| words.iter().map(String::as_str).collect::<Vec<_>>());
    for (name, job, pattern) in cases {
        let host = Job { pattern, ..QUIET };
        let [mut alone, mut beside, mut busy_alone, mut busy_beside] = [const { Vec::new() }; 4];
        for _ in 0..effort.rounds {
            let as_quiet = || fio::measure_under(&quiet_host, &host, &quiet, seconds, &[]);
            let as_busy = |seconds| fio::measure_under(&busy_host, job, &busy, seconds, &[]);
            alone.push(as_quiet()?.latency_ns[1] as f64 / 1e3);
            busy_alone.push(as_busy(seconds)?.iops);
            let (loaded, host) = std::thread::scope(|scope| {
                // Longer, so that the quiet host is never alone.
                let load = scope.spawn(|| as_busy(seconds + 2.0));
                std::thread::sleep(Duration::from_secs(1));
                let host = as_quiet();
                (load.join().expect("the load"), host)
            });
            beside.push(host?.latency_ns[1] as f64 / 1e3);
            busy_beside.push(loaded?.iops);
        }
        let (alone, beside) = (median(&alone), median(&beside));
        let (before, after) = (median(&busy_alone), median(&busy_beside));
        let ratio = beside / alone;
        let _ = writeln!(text, "| {name} | {alone:.0} us | {beside:.0} us | {before:.0} IOPS | {after:.0} IOPS |");
        lines.push(format!(
            "RATIO name=qos/beside-{name} ours={beside:.0} peer={alone:.0} ratio={ratio:.2} unit=us against=alone goal={BESIDE_GOAL}{}",
            if ratio > BESIDE_GOAL { " MISSED" } else { "" }
        ));
    }
    Ok(())
}

fn write(text: &str, lines: &[String]) -> Result<()> {
    let path = shell::root().join("docs/benchmarks/qos.md");
    let method = "Medians of rounds, with fio over NBD to one daemon with one core, on a shared machine. The daemon has a \
                  processor of its own; the quiet host has priority over the busy one on theirs. The 99th \
                  percentile of a host with one request in flight is compared with that of the same host alone. \
                  `cargo xtask bench qos` measures it again.";
    let lines = lines.join("\n");
    let page = format!("# Limits and shares of volumes\n\n{method}\n\n{text}\n```text\n{lines}\n```\n");
    std::fs::write(&path, page).with_context(|| format!("writing {}", path.display()))
}
