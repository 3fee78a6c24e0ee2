//! Forebay over NBD against qemu-nbd and nbdkit, on files of one size in one folder, over Unix sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Process, Scratch};

const JOBS: &[(Job, f64)] = &[
    (Job { name: "randread-4k-qd1", pattern: "randread", block_size: 4096, depth: 1, flush_each: 0 }, 1.0),
    (Job { name: "randread-4k-qd32", pattern: "randread", block_size: 4096, depth: 32, flush_each: 0 }, 1.0),
    (Job { name: "randwrite-4k-qd1", pattern: "randwrite", block_size: 4096, depth: 1, flush_each: 0 }, 1.0),
    (Job { name: "randwrite-4k-qd32", pattern: "randwrite", block_size: 4096, depth: 32, flush_each: 0 }, 1.0),
    (
        Job { name: "randwrite-4k-qd32-flush128", pattern: "randwrite", block_size: 4096, depth: 32, flush_each: 128 },
        1.5,
    ),
    (Job { name: "read-1m", pattern: "read", block_size: 1 << 20, depth: 4, flush_each: 0 }, 1.0),
    (Job { name: "write-1m", pattern: "write", block_size: 1 << 20, depth: 4, flush_each: 0 }, 1.0),
];

/// What our IOPS per second of CPU should be, against the better peer's.
const GOAL_PER_CPU: f64 = 1.5;

enum Server {
    Ours(Box<Daemon>),
    Peer(Process),
}

struct Competitor {
    name: &'static str,
    side: Side,
    server: Server,
    uri: String,
}

impl Competitor {
    fn process(&self) -> u32 {
        match &self.server {
            Server::Ours(daemon) => daemon.id(),
            Server::Peer(process) => process.id(),
        }
    }
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, peers_only: bool, dry_run: bool) -> Result<()> {
    if !peers_only {
        shell::run(&mut daemon::build_command())?;
    }
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let sockets = Scratch::new("bench")?;
    let mut competitors = Vec::new();
    if !peers_only {
        let daemon = Daemon::start(&scratch.path().join("store"), &[])?;
        let uri = daemon.volume("local/bench", &format!("{}M", effort.size_mib))?;
        competitors.push(Competitor { name: "forebay", side: Side::Ours, server: Server::Ours(Box::new(daemon)), uri });
    }
    for (name, side, command) in peers() {
        let short = name.replace([' ', '='], "-");
        let file = scratch.path().join(format!("{short}.raw"));
        std::fs::File::create(&file)?.set_len(effort.size_mib << 20)?;
        let socket = sockets.path().join(&short);
        competitors.push(start_peer(name, side, command, &file, &socket)?);
    }

    println!("filling {} volumes of {} MiB", competitors.len(), effort.size_mib);
    for competitor in &competitors {
        fill(competitor, effort.size_mib)?;
    }
    let jobs: Vec<&(Job, f64)> = JOBS
        .iter()
        .filter(|(job, _)| effort.case.as_ref().is_none_or(|part| job.name.contains(part.as_str())))
        .collect();
    let mut speed = cases(&jobs, &competitors, "");
    let mut per_cpu = cases(&jobs, &competitors, "-per-cpu");
    for round in 0..effort.rounds {
        for (index, (job, _)) in jobs.iter().enumerate() {
            for place in 0..competitors.len() {
                // Each round begins with another one, so that none always follows the same neighbour.
                let which = (place + round) % competitors.len();
                let competitor = &competitors[which];
                let mut target = fio::nbd(&competitor.uri);
                target.push(format!("--size={}M", effort.size_mib));
                let before = cpu_seconds(competitor.process())?;
                let outcome = fio::measure(job, &target, effort.seconds)
                    .with_context(|| format!("{} on {}", job.name, competitor.name))?;
                let used = (cpu_seconds(competitor.process())? - before).max(0.01);
                let value = if job.is_bandwidth() { outcome.bytes_per_second / 1e6 } else { outcome.iops };
                speed[index].series[which].values.push(value);
                per_cpu[index].series[which].values.push(outcome.requests as f64 / used);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    for competitor in competitors {
        if let Server::Ours(daemon) = competitor.server {
            daemon.stop()?;
        }
    }

    let mut all = speed;
    all.extend(per_cpu);
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("nbd", &all);
    for line in &lines {
        println!("{line}");
    }
    if !dry_run && !peers_only && effort.case.is_none() {
        report::write("nbd", "Forebay, qemu-nbd and nbdkit over NBD", &method(effort), &all, &lines)?;
    }
    Ok(())
}

fn cases(jobs: &[&(Job, f64)], competitors: &[Competitor], suffix: &str) -> Vec<Case> {
    let case = |(job, goal): &&(Job, f64)| Case {
        name: format!("{}{suffix}", job.name),
        unit: match (suffix.is_empty(), job.is_bandwidth()) {
            (true, true) => "MB/s",
            (true, false) => "IOPS",
            (false, _) => "per CPU-second",
        },
        goal: if suffix.is_empty() { *goal } else { GOAL_PER_CPU },
        series: competitors
            .iter()
            .map(|competitor| Series { name: competitor.name.into(), side: competitor.side, values: Vec::new() })
            .collect(),
    };
    jobs.iter().map(case).collect()
}

type PeerCommand = fn(file: &Path, socket: &Path) -> Vec<String>;

fn peers() -> [(&'static str, Side, PeerCommand); 4] {
    fn qemu(file: &Path, socket: &Path, cache: &[&str]) -> Vec<String> {
        let mut words: Vec<String> = ["qemu-nbd", "--persistent", "--shared=16", "--format=raw"].map(Into::into).into();
        words.extend(cache.iter().map(|&word| word.to_owned()));
        words.extend(["--discard=unmap".into(), format!("--socket={}", socket.display()), file.display().to_string()]);
        words
    }
    fn nbdkit(file: &Path, socket: &Path, cache: &str) -> Vec<String> {
        let words = ["nbdkit", "--foreground", "--unix"].map(str::to_owned);
        let mut words: Vec<String> = words.into();
        words.extend([socket.display().to_string(), "file".into(), format!("file={}", file.display()), cache.into()]);
        words
    }
    [
        ("qemu-nbd cache=none", Side::Peer, |file, socket| {
            qemu(file, socket, &["--cache=none", if uring() { "--aio=io_uring" } else { "--aio=native" }])
        }),
        ("nbdkit cache=none", Side::Peer, |file, socket| nbdkit(file, socket, "cache=none")),
        ("qemu-nbd default", Side::Cached, |file, socket| qemu(file, socket, &[])),
        ("nbdkit default", Side::Cached, |file, socket| nbdkit(file, socket, "cache=default")),
    ]
}

/// The kernel lets us use io_uring.
fn uring() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").map_or(true, |text| text.trim() == "0")
}

fn start_peer(name: &'static str, side: Side, command: PeerCommand, file: &Path, socket: &Path) -> Result<Competitor> {
    let words = command(file, socket);
    let log: PathBuf = socket.with_extension("log");
    let mut process = Process::start(shell::command(&words[0]).args(&words[1..]), &log)?;
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    shell::wait_for(Duration::from_secs(10), || {
        if process.ended().is_some() {
            return Some(false);
        }
        std::os::unix::net::UnixStream::connect(socket).is_ok().then_some(true)
    })
    .filter(|&up| up)
    .with_context(|| format!("{name} does not come up: {}", shell::tail(&log, 5)))?;
    Ok(Competitor { name, side, server: Server::Peer(process), uri })
}

/// Writes the whole volume once, through its server, with data that no layer can leave out.
fn fill(competitor: &Competitor, size_mib: u64) -> Result<()> {
    let mut fill = shell::command("fio");
    fill.args(fio::nbd(&competitor.uri)).args(["--name=fill", "--rw=write", "--bs=1M", "--iodepth=8", "--end_fsync=1"]);
    fill.args(["--refill_buffers", "--thread", &format!("--size={size_mib}M")]);
    shell::output(&mut fill).with_context(|| format!("filling {}", competitor.name))?;
    Ok(())
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. Volumes of {} MiB, written once from end to end through their own server; all files lie in one folder. \
         fio's nbd engine is everybody's client, over Unix sockets. {} rounds of {} s a measurement, every server \
         measured once a round, the order turned each round; medians (lowest and highest in parentheses). \
         *ratio* is Forebay's median divided by that of the better of `qemu-nbd --cache=none --aio=io_uring` and \
         `nbdkit file cache=none`, which reach the disk as Forebay does. The two default servers answer from the \
         page cache of the whole machine, so their figures are the memory's and not the disk's; RATIO lines against \
         them end in `-vs-page-cache`. *per-cpu* divides the requests by the user and system time of the server \
         process, all its threads.\n\nRepeat it: `cargo xtask bench nbd`.",
        report::machine(),
        effort.size_mib,
        effort.rounds,
        effort.seconds
    )
}
