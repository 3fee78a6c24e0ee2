//! The write log against the same volume without one: the talk's job (2,000 writes a second, 8 at once, a barrier after
//! each 128) with one volume, a share of it with each of sixteen, and as fast as it goes at every depth; and appending
//! by itself.
//!
//! In front of a Ceph cluster, and of images in memory with a pause of 2 ms on each request.  Both stand for what is on
//! other machines: what they store is in memory, so that the log has the disk to itself, and the cluster only gets what
//! hosts and daemon leave of the processors.  Volumes are written all over first, so that no object is made while it is
//! measured, and a log is empty when a job begins; those that go as fast as they can fill it before they are measured.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Effort;
use super::nap;
use super::report::{self, Case, Series, Side};
use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// Microseconds by which the slow backend is slowed down.
const PAUSE_US: &str = "2000";
const DEPTHS: [u32; 4] = [1, 8, 32, 128];
/// Writes a second: with one volume, and with each of sixteen: half of what the cluster takes on two processors, of
/// which the hosts and the daemon have their share.
const RATES: [u32; 2] = [2000, 64];
/// Bytes of the first volume, which is loaded by itself too, and of the others.
const SIZES_MIB: [u64; 2] = [128, 16];
/// Seconds before a job is measured: at a rate, and as fast as it goes, which fills the log.
const RAMPS: [u32; 2] = [1, 2];
/// Goals: ratios by which the log must be better.
const MEAN_GOAL: f64 = 13.0;
const TAIL_GOAL: f64 = 9.0;

/// Volumes of a daemon.
const VOLUMES: usize = 16;
const OSDS: u32 = 3;
/// Goals of appending 4 KiB to persistent memory: appends a second on one core, and a second of CPU time.
const PMEM_GOALS: [(&str, &str, f64); 2] =
    [("append-pmem", "appends/s", 150e3), ("append-pmem-cpu", "appends/CPU s", 200e3)];
/// The share of fio's rate that appending to a file has to reach.
const SSD_GOAL: f64 = 0.8;

/// First destination of writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Log {
    /// On the machine's disk.
    Ssd,
    /// In memory, used as persistent memory.
    Pmem,
    None,
}

/// Logs to measure, each in front of every backend.
const LOGS: [Log; 3] = [Log::Ssd, Log::Pmem, Log::None];

impl Log {
    fn name(self) -> &'static str {
        match self {
            Log::Ssd => "log on ssd",
            Log::Pmem => "log in pmem",
            Log::None => "no log",
        }
    }

    /// Returns the end of a case's name.
    fn suffix(self) -> &'static str {
        if self == Log::Pmem { "-pmem" } else { "" }
    }

    fn image(self) -> &'static str {
        match self {
            Log::Ssd => "ssd",
            Log::Pmem => "pmem",
            Log::None => "plain",
        }
    }
}

/// A daemon with its volumes.
struct Setup {
    log: Log,
    daemon: Daemon,
    uris: Vec<String>,
    /// Volumes with a log.
    logged: Vec<String>,
}

/// Folders: on the disk, and in memory.
#[derive(Clone, Copy)]
struct Folders<'a> {
    disk: &'a Path,
    memory: &'a Path,
}

/// Backend behind the log.
enum Behind {
    Ceph(Cluster),
    Slow,
}

impl Behind {
    fn name(&self) -> &'static str {
        match self {
            Behind::Ceph(_) => "ceph",
            Behind::Slow => "slow",
        }
    }

    fn setup(&self, folders: Folders<'_>, log: Log) -> Result<Setup> {
        let (variable, pool) = match self {
            Behind::Ceph(cluster) => (cluster.variable(), "rbd"),
            Behind::Slow => (format!("FOREBAY_DEBUG_BACKEND_DELAY_US={PAUSE_US}"), "ram"),
        };
        let name = format!("{}-{}", self.name(), log.image());
        let data = folders.memory.join(&name);
        std::fs::create_dir_all(&data)?;
        let daemon = Daemon::start_under(&["/usr/bin/env", &variable], &data, &["--cores", "1"])?;
        let place = match log {
            Log::Ssd => Some(format!("--log=ssd:{}:64M", folders.disk.join(&name).display())),
            Log::Pmem => {
                // Room for all of them: a mapping does not grow.
                let path = folders.memory.join(name + "-log");
                std::fs::File::create(&path)?.set_len((VOLUMES as u64 + 1) << 26)?;
                Some(format!("--log=pmem:{}:64M:force", path.display()))
            }
            Log::None => None,
        };
        let more: Vec<&str> = place.as_deref().into_iter().collect();
        let images: Vec<String> = (0..VOLUMES).map(|at| format!("{pool}/{}{at}", log.image())).collect();
        let volume = |(at, image): (usize, &String)| daemon.volume_with(image, &format!("{}M", size_mib(at)), &more);
        let uris = images.iter().enumerate().map(volume).collect::<Result<_>>()?;
        let logged = if log == Log::None { Vec::new() } else { images };
        let setup = Setup { log, daemon, uris, logged };
        for (at, uri) in setup.uris.iter().enumerate() {
            let mut fill = shell::command("fio");
            fill.args(crate::fio::nbd(uri)).args(["--name=fill", "--rw=write", "--bs=1M", "--iodepth=4", "--thread"]);
            fill.args([format!("--size={}M", size_mib(at)), "--end_fsync=1".into()]);
            shell::output(&mut fill)?;
        }
        setup.empty(VOLUMES)?;
        Ok(setup)
    }
}

fn size_mib(volume: usize) -> u64 {
    SIZES_MIB[volume.min(1)]
}

impl Setup {
    /// Waits until the logs of the first `volumes` volumes are empty.
    fn empty(&self, volumes: usize) -> Result<()> {
        for image in self.logged.iter().take(volumes) {
            shell::output(self.daemon.command().args(["log", "flush", image]))?;
        }
        Ok(())
    }
}

/// Mean, and percentiles in microseconds: 90, 99, 99.9, 99.99; and writes a second.
struct Outcome {
    mean_us: f64,
    tail_us: [f64; 4],
    iops: f64,
}

/// One job on each of the first `volumes` volumes, in one process: sixteen of them would wait for the processors longer
/// than for their writes.
fn jobs_of(setup: &Setup, volumes: usize, depth: u32, rate: u32, seconds: f64) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.args(["--output-format=json", "--percentile_list=90:99:99.9:99.99"]);
    for (volume, uri) in setup.uris.iter().take(volumes).enumerate() {
        fio.arg(format!("--name=job{volume}")).args(crate::fio::nbd(uri));
        fio.args(["--rw=randwrite", "--bs=4k", "--thread", "--time_based", "--randrepeat=0", "--norandommap"]);
        fio.args([format!("--size={}M", size_mib(volume)), format!("--iodepth={depth}"), "--fsync=128".into()]);
        fio.args([format!("--ramp_time={}", RAMPS[usize::from(rate == 0)]), format!("--runtime={seconds}")]);
        if rate > 0 {
            // Evenly: fio 3.33 dies of Poisson arrivals with barriers.  Not all volumes in the same moment.
            fio.args([format!("--rate_iops={rate}"), format!("--startdelay={volume}ms")]);
        }
    }
    fio
}

/// Parses fio's results, one per job.
fn parse(text: &str) -> Result<Vec<Outcome>> {
    let begin = text.find('{').with_context(|| format!("fio reported nothing but: {text}"))?;
    let report: Value = serde_json::from_str(&text[begin..])?;
    let jobs = report["jobs"].as_array().context("fio reports no jobs")?;
    jobs.iter().map(parse_job).collect()
}

fn parse_job(job: &Value) -> Result<Outcome> {
    if job["error"].as_u64() != Some(0) {
        bail!("fio failed: {}", job["error"]);
    }
    let write = &job["write"];
    let latency = &write["clat_ns"];
    let at = |name: &str| latency["percentile"][name].as_f64().unwrap_or(0.0) / 1e3;
    Ok(Outcome {
        mean_us: latency["mean"].as_f64().context("fio reports no mean")? / 1e3,
        tail_us: [at("90.000000"), at("99.000000"), at("99.900000"), at("99.990000")],
        iops: write["iops"].as_f64().context("fio reports no IOPS")?,
    })
}

/// One job on each of the first `volumes` volumes at once: the mean of their figures, and the worst of their tails; and
/// how late a nap meanwhile was, in microseconds.
fn measure(setup: &Setup, volumes: usize, depth: u32, rate: u32, seconds: f64) -> Result<(Outcome, f64)> {
    let (text, late_us) = nap::beside(|| shell::output(&mut jobs_of(setup, volumes, depth, rate, seconds)))?;
    let outcomes = parse(&text?)?;
    let mut all = Outcome { mean_us: 0.0, tail_us: [0.0; 4], iops: 0.0 };
    for one in outcomes {
        all.mean_us += one.mean_us / volumes as f64;
        all.iops += one.iops;
        for (worst, tail) in all.tail_us.iter_mut().zip(one.tail_us) {
            *worst = worst.max(tail);
        }
    }
    setup.empty(volumes)?;
    Ok((all, late_us))
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    let append = ["-p", "forebay-writelog", "--bin", "forebay", "--example", "append"];
    shell::run(&mut daemon::build_beside_command(&append))?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let mut cases: Vec<Case> = Vec::new();
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    if wanted("append") {
        appends(scratch.path(), effort, &mut cases)?;
    }
    for backend in ["slow", "ceph"] {
        let names = jobs().map(|(volumes, depth, rate)| case_name(backend, volumes, depth, rate));
        if !names.iter().any(|name| wanted(name)) {
            continue;
        }
        let behind = match backend {
            "ceph" => Behind::Ceph(Cluster::named_or_apart(OSDS)?),
            _ => Behind::Slow,
        };
        let memory = Scratch::within(Path::new("/dev/shm"), "bench")?;
        let folders = Folders { disk: scratch.path(), memory: memory.path() };
        let setups: Vec<Setup> = LOGS.iter().map(|&log| behind.setup(folders, log)).collect::<Result<_>>()?;
        for round in 0..effort.rounds {
            for (volumes, depth, rate) in jobs() {
                let name = case_name(backend, volumes, depth, rate);
                if !wanted(&name) {
                    continue;
                }
                for place in 0..setups.len() {
                    let setup = &setups[(place + round) % setups.len()];
                    let (outcome, late_us) = measure(setup, volumes, depth, rate, effort.seconds)
                        .with_context(|| format!("{name}, {}", setup.log.name()))?;
                    let tails = outcome.tail_us.map(|us| format!("{us:.0}")).join(" ");
                    println!(
                        "{name:<16} {:<11} {:>8.0} IOPS  mean {:>7.0} us  90/99/99.9/99.99 %: {tails} us, a nap: {late_us:.0} us",
                        setup.log.name(),
                        outcome.iops,
                        outcome.mean_us
                    );
                    // What is better is larger.
                    if rate == 0 {
                        note(&mut cases, &name, "IOPS", 1.0, setup.log, outcome.iops, None);
                    } else {
                        let (mean, tail) = (1e6 / outcome.mean_us, 1e6 / outcome.tail_us[3]);
                        note(&mut cases, &format!("{name}-mean"), "1/s", MEAN_GOAL, setup.log, mean, None);
                        let goal = if backend == "ceph" { TAIL_GOAL } else { 1.0 };
                        note(&mut cases, &format!("{name}-99.99"), "1/s", goal, setup.log, tail, Some(1e6 / late_us));
                    }
                }
            }
        }
        for setup in setups {
            setup.daemon.stop()?;
        }
    }
    // Those in memory last, as they are of another kind.
    cases.sort_by_key(|case| case.series[0].name == Log::Pmem.name());
    println!("{}", report::table(&cases));
    let lines = report::ratio_lines("writelog", &cases);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("writelog", "The write log, and no write log", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

/// Volumes, depth, and writes a second (0: as fast as it goes).
fn jobs() -> [(usize, u32, u32); 2 + DEPTHS.len()] {
    let mut jobs = [(1, 8, RATES[0]); 2 + DEPTHS.len()];
    jobs[1] = (VOLUMES, 8, RATES[1]);
    for (job, depth) in jobs[2..].iter_mut().zip(DEPTHS) {
        *job = (1, depth, 0);
    }
    jobs
}

fn case_name(backend: &str, volumes: usize, depth: u32, rate: u32) -> String {
    if rate == 0 { format!("{backend}-qd{depth}") } else { format!("{backend}-{rate}-{volumes}v") }
}

/// Appending without a front and with a backend that costs nothing: in memory, and to a file beside fio.
fn appends(folder: &Path, effort: &Effort, cases: &mut Vec<Case>) -> Result<()> {
    let append = |medium: &str, path: &Path, depth: u32| -> Result<[f64; 2]> {
        let mut append = shell::command(shell::target().join("release/examples/append"));
        append.arg(medium).arg(path).args([effort.seconds.to_string(), depth.to_string(), "128".into()]);
        let text = shell::output(&mut append)?;
        let words: Vec<&str> = text.split_whitespace().collect();
        let [_, rate, _, cpu, ..] = words[..] else { bail!("append said: {text}") };
        Ok([rate.parse()?, 1e6 / cpu.parse::<f64>()?])
    };
    let mut case = |name: &str, unit: &'static str, goal: f64, peer: &str, ours: f64, theirs: f64| {
        if !cases.iter().any(|case| case.name == name) {
            let series = [("forebay", Side::Ours), (peer, Side::Peer)];
            let series = series.map(|(name, side)| Series { name: name.into(), side, values: Vec::new() });
            cases.push(Case { name: name.into(), unit, goal, series: series.into() });
        }
        for case in cases.iter_mut().filter(|case| case.name == name) {
            case.series[0].values.push(ours);
            case.series[1].values.push(theirs);
        }
        println!("{name:<16} {ours:>10.0} {unit}, {peer} {theirs:.0}");
    };
    for round in 0..effort.rounds {
        let memory = Scratch::within(Path::new("/dev/shm"), "append")?;
        let got = append("pmem", &memory.path().join("logs"), 32)?;
        for (&(name, unit, goal), got) in PMEM_GOALS.iter().zip(got) {
            case(name, unit, 1.0, "the goal", got, goal);
        }
        for depth in [1, 8, 32] {
            let file = folder.join(format!("append-{round}-{depth}"));
            let [ours, _] = append("ssd", &file, depth)?;
            let theirs = fio_appends(&file, depth, effort.seconds)?;
            case(&format!("append-ssd-qd{depth}"), "appends/s", SSD_GOAL, "fio", ours, theirs);
            std::fs::remove_file(&file)?;
        }
    }
    Ok(())
}

/// Sequential direct writes of 4 KiB, each of which lasts when it is answered, over a file that has its blocks.
fn fio_appends(file: &Path, depth: u32, seconds: f64) -> Result<f64> {
    let mut fio = shell::command("fio");
    fio.args([
        "--name=append",
        "--ioengine=io_uring",
        "--rw=write",
        "--bs=4k",
        "--direct=1",
        "--sync=dsync",
        "--thread",
    ]);
    fio.args([format!("--filename={}", file.display()), format!("--iodepth={depth}"), "--size=512M".into()]);
    fio.args([format!("--runtime={seconds}"), "--time_based".into(), "--output-format=json".into()]);
    fio.arg("--percentile_list=90:99:99.9:99.99");
    Ok(parse(&shell::output(&mut fio)?)?.iter().map(|job| job.iops).sum())
}

/// Notes a figure of the case `name`, of which there is one for each kind of log, and the machine's own meanwhile.
fn note(cases: &mut Vec<Case>, name: &str, unit: &'static str, goal: f64, log: Log, value: f64, machine: Option<f64>) {
    for kind in LOGS.into_iter().filter(|&kind| kind != Log::None) {
        if log != kind && log != Log::None {
            continue;
        }
        let name = format!("{name}{}", kind.suffix());
        if !cases.iter().any(|case| case.name == name) {
            let names = [(kind.name(), Side::Ours), (Log::None.name(), Side::Peer), ("a nap", Side::Other)];
            let series = names.map(|(name, side)| Series { name: name.into(), side, values: Vec::new() });
            cases.push(Case { name: name.clone(), unit, goal, series: series.into() });
        }
        if let Some(case) = cases.iter_mut().find(|case| case.name == name) {
            case.series[usize::from(log == Log::None)].values.push(value);
            if log == kind {
                case.series[2].values.extend(machine);
            }
        }
    }
}

fn method(effort: &Effort) -> String {
    let Effort { rounds, seconds, .. } = effort;
    let (machine, [ramp, fill], nap) = (report::machine(), RAMPS, nap::NAP.as_micros());
    let ([rate, share], [size, small]) = (RATES, SIZES_MIB);
    format!(
        "{machine}. fio's nbd engine over a Unix socket, 4 KiB random writes, a flush after each 128, {rounds} rounds \
         of {seconds} s after {ramp} s of warming up ({fill} s for *-qdN*, which fills the log), with and without the \
         log in turn; medians (lowest and highest in parentheses). Volumes ({size} MiB; sixteen of {small} MiB but for \
         the first) are written all over before, and a log is empty when a job begins. Logs have 64 MiB. *ceph* is a \
         real cluster of {OSDS} OSDs on the same machine, two copies of everything, standing for one on others: it \
         runs at idle priority (SCHED_IDLE), behind fio and the daemon, and the OSDs' disks are in memory, not on the \
         log's. *slow* is images in memory with a pause of 2 ms on every request; such a backend has no tail latency, \
         so the goal for the log is to have none either. The log is a file on the machine's disk or, in *-pmem*, a \
         mapped one in memory with all the flushes of persistent memory (as in the published measurements that the \
         first job repeats). *-{rate}-1v*: one volume at {rate} writes a second, 8 at once (the published job). \
         *-{share}-{VOLUMES}v*: {VOLUMES} volumes at {share} a second each, together half of what this cluster takes. \
         Figures are 1 / latency, so that more is better: the mean, and the 99.99th percentile of the worst volume, \
         beside it that of a thread which sleeps {nap} us at a time meanwhile and does nothing else (*a nap*: its \
         wake-up latency), as a measure of how long any thread waits for a processor; a write needs several wake-ups. \
         *-qdN*: one volume at full speed, N at once. *append-pmem*: appends of 4 KiB by one core to a log in memory \
         (a mapped file in /dev/shm, with all the flushes of persistent memory), 32 at once, no front, a backend \
         without cost, against the goals. *append-ssd-qdN*: the same on a file, beside fio's sequential direct writes \
         of 4 KiB to the same file, each of which is durable when it completes (RWF_DSYNC).\n\n\
         Repeat it: `cargo xtask bench writelog`; shorter: `--rounds 1 --seconds 2`.",
    )
}
