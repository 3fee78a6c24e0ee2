//! An image in a Ceph cluster: Forebay's client against librbd, which fio's rbd engine drives, without its cache.
//!
//! Cluster and clients have the same processors, so what a client spends its requests with decides.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::ceph::Cluster;
use crate::daemon;
use crate::fio::Job;
use crate::shell::{self, Scratch};

/// The image: POOL, IMAGE, MiB.
const POOL: &str = "rbd";
const IMAGE: &str = "forebay-bench";
const SIZE_MIB: u64 = 512;

const JOBS: &[Job] = &[
    job("randread-4k-qd1", "randread", 4096, 1),
    job("randread-4k-qd8", "randread", 4096, 8),
    job("randread-4k-qd32", "randread", 4096, 32),
    job("randwrite-4k-qd1", "randwrite", 4096, 1),
    job("randwrite-4k-qd8", "randwrite", 4096, 8),
    job("randwrite-4k-qd32", "randwrite", 4096, 32),
    job("read-64k-qd8", "read", 64 << 10, 8),
    job("write-64k-qd8", "write", 64 << 10, 8),
    job("read-4m-qd4", "read", 4 << 20, 4),
    job("write-4m-qd4", "write", 4 << 20, 4),
];

/// Goal: requests a client's CPU-second, divided by librbd's.
const CPU_GOAL: f64 = 4.0;
/// The reciprocal of the latency at depth 1 beside librbd's.
const LATENCY_GOAL: f64 = 1.0 / 0.9;
/// CPU of a message beside that of a read by librados.
const MESSENGER_GOAL: f64 = 2.0;

const fn job(name: &'static str, pattern: &'static str, block_size: u32, depth: u32) -> Job {
    Job { name, pattern, block_size, depth, flush_each: 0 }
}

/// One run.
pub(super) struct Outcome {
    pub(super) iops: f64,
    pub(super) latency_us: f64,
    /// Requests a CPU-second.
    pub(super) per_cpu: f64,
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_shipped_command())?;
    let cluster = Cluster::named_or_start(3)?;
    let scratch = Scratch::new("bench-rados")?;
    let uncached = uncached(&cluster, scratch.path())?;
    image(&cluster, &uncached)?;
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let jobs: Vec<&Job> = JOBS.iter().filter(|job| wanted(job.name)).collect();
    let mut speed: Vec<Case> = jobs.iter().map(|job| case(job.name, unit(job), 1.0)).collect();
    let goal = |job: &Job| if job.block_size == 4096 { CPU_GOAL } else { 1.0 };
    let mut per_cpu: Vec<Case> =
        jobs.iter().map(|job| case(&format!("{}-per-cpu", job.name), "per CPU-second", goal(job))).collect();
    let mut latency: Vec<Case> = jobs
        .iter()
        .map(|job| case(&format!("{}-latency", job.name), "a second of median latency", LATENCY_GOAL))
        .collect();
    let mut messages = Case {
        name: "messenger-4k-per-cpu".into(),
        unit: "per CPU-second",
        goal: MESSENGER_GOAL,
        series: vec![series("our messenger, a side", Side::Ours), series("librados reads", Side::Peer)],
    };
    for round in 0..effort.rounds {
        let starting = idle(fio(&uncached, &JOBS[0]))?;
        for (index, job) in jobs.iter().enumerate() {
            for place in 0..2 {
                let which = (place + round) % 2;
                let outcome = match which {
                    0 => ours(&cluster, job, effort.seconds)?,
                    _ => theirs(fio(&uncached, job), job.reads(), starting, effort.seconds)?,
                };
                let bytes = outcome.iops * f64::from(job.block_size) / 1e6;
                speed[index].series[which].values.push(if is_bytes(job) { bytes } else { outcome.iops });
                per_cpu[index].series[which].values.push(outcome.per_cpu);
                latency[index].series[which].values.push(1e6 / outcome.latency_us);
            }
        }
        if wanted(&messages.name) {
            messages.series[0].values.push(message(effort.seconds)?);
            messages.series[1].values.push(librados(&uncached, effort.seconds)?);
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let latency = latency.into_iter().filter(|case| case.name.contains("qd1-"));
    let mut all: Vec<Case> = speed.into_iter().chain(per_cpu).chain(latency).collect();
    println!("{}", report::table(&all));
    all.push(messages);
    let lines = report::ratio_lines("rados", &all);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("rados", "Images in a Ceph cluster, beside librbd", &method(effort), &all, &lines)?;
    }
    remove(&cluster)
}

/// Removes the image; a client that did not end in order is waited for until the cluster takes it for dead.
pub(super) fn remove(cluster: &Cluster) -> Result<()> {
    let gone = || shell::output(cluster.command("rbd").args(["rm", "--no-progress", &spec()])).ok();
    shell::wait_for(std::time::Duration::from_secs(60), gone).context("the image cannot be removed")?;
    Ok(())
}

/// The cluster's configuration, with librbd's cache off.
pub(super) fn uncached(cluster: &Cluster, folder: &Path) -> Result<PathBuf> {
    let conf = folder.join("ceph.conf");
    let text = std::fs::read_to_string(cluster.conf())?;
    std::fs::write(&conf, format!("{text}\n[client]\nrbd cache = false\n"))?;
    Ok(conf)
}

/// An image with `rbd`'s default features, written all over.
pub(super) fn image(cluster: &Cluster, uncached: &Path) -> Result<()> {
    let spec = format!("{POOL}/{IMAGE}");
    // One that a run before has left.
    if shell::output(cluster.command("rbd").args(["info", &spec])).is_ok() {
        shell::output(cluster.command("rbd").args(["rm", "--no-progress", &spec]))?;
    }
    shell::output(cluster.command("rbd").args(["create", &spec, "--size", &format!("{SIZE_MIB}M")]))?;
    let mut fill = fio(uncached, &job("fill", "write", 4 << 20, 4));
    shell::output(fill.arg(format!("--size={SIZE_MIB}M")))?;
    Ok(())
}

/// The spec of that image.
pub(super) fn spec() -> String {
    format!("{POOL}/{IMAGE}")
}

fn fio(conf: &Path, job: &Job) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.env("CEPH_CONF", conf);
    fio.args(["--ioengine=rbd", "--clientname=admin", &format!("--pool={POOL}"), &format!("--rbdname={IMAGE}")]);
    fio.args([
        format!("--name={}", job.name),
        format!("--rw={}", job.pattern),
        format!("--bs={}", job.block_size),
        format!("--iodepth={}", job.depth),
    ]);
    fio.args(["--randrepeat=0", "--norandommap", "--output-format=json", "--percentile_list=50"]);
    fio
}

/// One run of fio.  Its own report counts the thread of its job only, and none of librbd's; what its processes have
/// used is told when they have ended, and what they use for starting and a single request is taken off.
fn theirs(mut fio: std::process::Command, reads: bool, idle: f64, seconds: f64) -> Result<Outcome> {
    fio.args([format!("--runtime={seconds}"), "--time_based".into()]);
    let before = children_cpu_seconds()?;
    let text = shell::output(&mut fio)?;
    parse(&text, reads, children_cpu_seconds()? - before - idle)
}

/// Processor time that a fio uses for one request.
fn idle(mut fio: std::process::Command) -> Result<f64> {
    let before = children_cpu_seconds()?;
    shell::output(fio.arg("--number_ios=1"))?;
    Ok(children_cpu_seconds()? - before)
}

/// Processor time of the children that have ended, and theirs.
fn children_cpu_seconds() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 = fields[13].parse::<u64>()? + fields[14].parse::<u64>()?;
    // Linux counts in hundredths on every platform it shows this on.
    Ok(ticks as f64 / 100.0)
}

fn parse(text: &str, reads: bool, cpu_seconds: f64) -> Result<Outcome> {
    let begin = text.find('{').with_context(|| format!("fio reported nothing but: {text}"))?;
    let report: Value = serde_json::from_str(&text[begin..])?;
    let job = &report["jobs"][0];
    if job["error"].as_u64() != Some(0) {
        bail!("fio failed: {}", job["error"]);
    }
    let side = &job[if reads { "read" } else { "write" }];
    let number = |value: &Value, name: &str| value[name].as_f64().with_context(|| format!("fio reports no {name}"));
    let requests = number(side, "total_ios")?;
    Ok(Outcome {
        iops: number(side, "iops")?,
        latency_us: side["clat_ns"]["percentile"]["50.000000"].as_f64().context("fio reports no median")? / 1e3,
        per_cpu: requests / cpu_seconds.max(0.01),
    })
}

/// One run of our client.
fn ours(cluster: &Cluster, job: &Job, seconds: f64) -> Result<Outcome> {
    let mut load = cluster.command(daemon::shipped_program());
    load.args(["bench", &spec(), "--format", "json", "--seconds", &seconds.to_string()]);
    load.args(["--io-type", if job.reads() { "read" } else { "write" }]);
    load.args(["--io-pattern", if job.pattern.starts_with("rand") { "rand" } else { "seq" }]);
    load.args(["--io-size", &job.block_size.to_string(), "--depth", &job.depth.to_string()]);
    let found: Value = serde_json::from_str(&shell::output(&mut load)?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("bench says no {name}"));
    Ok(Outcome {
        iops: number("iops")?,
        latency_us: number("latency_us_p50")?,
        per_cpu: 1e6 / number("cpu_us")?.max(1e-3),
    })
}

/// Messages of 4 KiB a CPU-second, of one side: the mean of both.
fn message(seconds: f64) -> Result<f64> {
    let address = format!("127.0.0.1:{}", shell::free_port()?);
    let scratch = Scratch::new("bench-message")?;
    let log = scratch.path().join("log");
    let mut serve = shell::command(daemon::shipped_program());
    serve.args(["perf", "messenger", "serve", "--crc", "--linger-us", "0", "--addr", &address]);
    let _server = shell::Process::start(&mut serve, &log)?;
    let up = || std::fs::read_to_string(&log).ok().filter(|text| !text.is_empty());
    shell::wait_for(std::time::Duration::from_secs(10), up).context("the server does not start")?;
    let mut ask = shell::command(daemon::shipped_program());
    ask.args(["perf", "messenger", "run", "--crc", "--linger-us", "0", "--addr", &address, "--size", "4096"]);
    ask.args(["--depth", "32", "--format", "json", "--seconds", &seconds.to_string()]);
    let found: Value = serde_json::from_str(&shell::output(&mut ask)?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("perf messenger says no {name}"));
    Ok(2e6 / (number("client_cpu_us")? + number("server_cpu_us")?))
}

/// Reads of 4 KiB that librados does a CPU-second, at depth 32.
fn librados(conf: &Path, seconds: f64) -> Result<f64> {
    let starting = idle(librados_fio(conf))?;
    Ok(theirs(librados_fio(conf), true, starting, seconds)?.per_cpu)
}

fn librados_fio(conf: &Path) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.env("CEPH_CONF", conf);
    fio.args([
        "--ioengine=rados",
        "--clientname=admin",
        &format!("--pool={POOL}"),
        &format!("--conf={}", conf.display()),
    ]);
    fio.args(["--name=librados", "--rw=randread", "--bs=4096", "--iodepth=32", "--size=64M", "--nrfiles=16"]);
    fio.args(["--randrepeat=0", "--norandommap", "--output-format=json", "--percentile_list=50"]);
    fio
}

fn is_bytes(job: &Job) -> bool {
    job.block_size > 4096
}

fn unit(job: &Job) -> &'static str {
    if is_bytes(job) { "MB/s" } else { "IOPS" }
}

fn series(name: &str, side: Side) -> Series {
    Series { name: name.into(), side, values: Vec::new() }
}

fn case(name: &str, unit: &'static str, goal: f64) -> Case {
    Case { name: name.into(), unit, goal, series: vec![series("forebay", Side::Ours), series("librbd", Side::Peer)] }
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. A cluster of the lab: Ceph 16.2, one monitor, three OSDs with BlueStore on files, two copies, everything \
         on loopback and on the same processors as the clients. One image of {SIZE_MIB} MiB with `rbd`'s default \
         features, written all over. *forebay*: `forebay bench` as it is shipped (`--profile dist`), our client in a \
         process of its own, which sleeps when there is nothing to do. *librbd*: fio's rbd engine, `rbd cache = \
         false`. In turns, {} rounds of {} s a measurement, the order turned each round; medians (lowest and highest \
         in parentheses). *per-cpu* divides the requests by the user and system time of the client's process: of fio \
         and its job, with librbd's threads in it, less what the same fio uses for a single request; of ours, without \
         its start. fio and `forebay bench` both generate the load in the measured process. *latency* is the \
         reciprocal of the median latency, so that more is better; its goal of 0.9 of librbd's latency is 1.11 \
         here.\n\n\
         *messenger-4k-per-cpu*: messages of 4 KiB with their answers, that `perf messenger` exchanges a CPU-second of \
         one side, beside 4 KiB reads that fio's rados engine does with librados a CPU-second, both at depth 32.\n\n\
         Tried and rejected: waiting for several answers with one system call (3 to 9 % less CPU at depth 8, later \
         replies); busy-polling for 50 us before sleeping (a quarter more CPU at depth 1, no earlier replies, since an \
         OSD takes longer than that). In use: parts of a request's encoding written in place, the program linked as a \
         whole (together 9 % at depth 8); sockets that were drained not looked at before there is something (with the \
         ends of short sends waited for in the call that waits for the answer, which was removed again as it cost tail \
         latency: 16 % of CPU a 4 KiB read at depth 8 and 4 % at depth 1 on a quiet machine; no difference beyond \
         noise for writes and for 4 MiB). At depth 1 two thirds of our time is the kernel's, for a send, a wait and a \
         wake-up a request.\n\n\
         Repeat it: `cargo xtask bench rados`; with `CEPH_CONF` set, on that cluster's pool `{POOL}`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}
