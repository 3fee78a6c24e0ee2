//! Forebay over NBD against qemu-nbd and nbdkit, on files of one size in one folder, over Unix sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Process, Scratch};

/// In this order: each round begins by writing the volume from end to end, so that `read-1m` finds what a copied image
/// is like, and `read-1m-shuffled` what two rounds of random writes leave of it.
const JOBS: &[(Job, f64)] = &[
    (job("write-1m", "write", 1 << 20, 4, 0), 1.0),
    (job("read-1m", "read", 1 << 20, 4, 0), 1.0),
    (job("randread-4k-qd1", "randread", 4096, 1, 0), 1.0),
    (job("randread-4k-qd32", "randread", 4096, 32, 0), 1.0),
    (job("randwrite-4k-qd1", "randwrite", 4096, 1, 0), 1.0),
    (job("randwrite-4k-qd32", "randwrite", 4096, 32, 0), 1.0),
    (job("randwrite-4k-qd32-flush128", "randwrite", 4096, 32, 128), 1.5),
    (job("read-1m-shuffled", "read", 1 << 20, 4, 0), 1.0),
];

const fn job(name: &'static str, pattern: &'static str, block_size: u32, depth: u32, flush_each: u32) -> Job {
    Job { name, pattern, block_size, depth, flush_each }
}

/// Goal: our IOPS per second of CPU, divided by the better peer's.
const GOAL_PER_CPU: f64 = 1.5;

enum Server {
    Ours(Box<Daemon>),
    Peer(Process),
}

/// Targets to compare.
#[derive(Clone, Copy, PartialEq)]
enum Group {
    /// Past the page cache, to the disk.
    Direct,
    /// With memory for the whole volume: a cache of our own, and the kernel's page cache.
    Cached,
}

struct Competitor {
    name: &'static str,
    group: Group,
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
    let places = Places::new();
    let mut competitors = Vec::new();
    for (name, group, cache_mib) in
        [("forebay", Group::Direct, 0), ("forebay with a cache", Group::Cached, 2 * effort.size_mib)]
    {
        if peers_only {
            break;
        }
        let wrapper = ["taskset", "--cpu-list", &places.servers];
        let data = scratch.path().join(format!("store-{cache_mib}"));
        let daemon = Daemon::start_under(&wrapper, &data, &["--store-cache", &format!("{cache_mib}M")])?;
        let uri = daemon.volume("local/bench", &format!("{}M", effort.size_mib))?;
        competitors.push(Competitor { name, group, side: Side::Ours, server: Server::Ours(Box::new(daemon)), uri });
    }
    for (name, group, command) in peers() {
        let short = name.replace([' ', '='], "-");
        let file = scratch.path().join(format!("{short}.raw"));
        std::fs::File::create(&file)?.set_len(effort.size_mib << 20)?;
        let socket = sockets.path().join(&short);
        competitors.push(start_peer(name, group, &places, command, &file, &socket)?);
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
                target.push(format!("--cpus_allowed={}", places.client));
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
    let groups: Vec<Group> = competitors.iter().map(|competitor| competitor.group).collect();
    for competitor in competitors {
        if let Server::Ours(daemon) = competitor.server {
            daemon.stop()?;
        }
    }

    let measured: Vec<Case> = speed.into_iter().chain(per_cpu).collect();
    let mut all = only(&measured, &groups, Group::Direct, "");
    all.extend(only(&measured, &groups, Group::Cached, "-cached"));
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

/// The cases with the competitors of one group alone.
fn only(cases: &[Case], groups: &[Group], group: Group, suffix: &str) -> Vec<Case> {
    let of_group = |case: &Case| {
        let named = case.series.iter().zip(groups).filter(|(_, of)| **of == group);
        named.map(|(series, _)| series.clone()).collect()
    };
    let case = |case: &Case| Case { name: format!("{}{suffix}", case.name), series: of_group(case), ..case.clone() };
    cases.iter().map(case).collect()
}

/// Processors for the servers, and one for the client.
///
/// Left to itself, the scheduler puts the two ends of a socket on one processor or on two, as it comes, and keeps them
/// there for seconds: one and the same server gives 48,000 or 65,000 reads a second.
struct Places {
    servers: String,
    client: usize,
}

impl Places {
    fn new() -> Self {
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        match count {
            1 => Self { servers: "0".into(), client: 0 },
            _ => Self { servers: format!("0-{}", count - 2), client: count - 1 },
        }
    }
}

type PeerCommand = fn(file: &Path, socket: &Path) -> Vec<String>;

fn peers() -> [(&'static str, Group, PeerCommand); 4] {
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
        ("qemu-nbd cache=none", Group::Direct, |file, socket| {
            qemu(file, socket, &["--cache=none", if uring() { "--aio=io_uring" } else { "--aio=native" }])
        }),
        ("nbdkit cache=none", Group::Direct, |file, socket| nbdkit(file, socket, "cache=none")),
        ("qemu-nbd default", Group::Cached, |file, socket| qemu(file, socket, &[])),
        ("nbdkit default", Group::Cached, |file, socket| nbdkit(file, socket, "cache=default")),
    ]
}

/// The kernel lets us use io_uring.
fn uring() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").map_or(true, |text| text.trim() == "0")
}

fn start_peer(
    name: &'static str,
    group: Group,
    places: &Places,
    command: PeerCommand,
    file: &Path,
    socket: &Path,
) -> Result<Competitor> {
    let mut words = vec!["taskset".to_owned(), "--cpu-list".into(), places.servers.clone()];
    words.extend(command(file, socket));
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
    Ok(Competitor { name, group, side: Side::Peer, server: Server::Peer(process), uri })
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
         fio's nbd engine is the client of all servers, over Unix sockets, on the last processor; the servers have the \
         others (if the scheduler decides, client and server sometimes share a processor, which changes any server's \
         figures by a third). `read-1m` reads what `write-1m` has just written from end to end, `read-1m-shuffled` the \
         same after the random writes: the store appends, so data written in random order is stored in random order, \
         and the disk's requests a second are the limit. `write-1m` counts the flush at its end. {} rounds of {} s a \
         measurement, every server measured once a round, the order turned each round; medians (lowest and highest in \
         parentheses).\n\n\
         The first table compares servers that read from the disk: Forebay with `--store-cache 0`, `qemu-nbd \
         --cache=none --aio=io_uring`, and `nbdkit file cache=none`, which in fact writes through the page cache \
         without waiting and drops pages afterwards. The second (`-cached`): servers with a cache for the whole \
         volume: Forebay with `--store-cache` twice the volume, the others by default on the page cache of the whole \
         machine. *ratio* is Forebay's median divided by that of the better peer. *per-cpu* divides the requests by \
         the user and system time of the server process, all its threads.\n\nRepeat it: `cargo xtask bench nbd`.",
        report::machine(),
        effort.size_mib,
        effort.rounds,
        effort.seconds
    )
}
