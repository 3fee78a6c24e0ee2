//! Forebay as a vhost-user-blk device against QEMU's storage daemon: volumes in memory, over virtqueues.
//!
//! One processor for the devices and one for the driver, `vhost-load` (test/vhost), which polls its rings: the figures are
//! the devices'.  A hundred more devices, with drivers that do nothing, say what an idle guest costs.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::daemon::{self, Daemon};
use crate::shell::{self, Process, Scratch};

/// Name, access pattern, and requests in flight.
const JOBS: [(&str, &str, u16); 6] = [
    ("randread-qd1", "randread", 1),
    ("randread-qd32", "randread", 32),
    ("randread-qd128", "randread", 128),
    ("randwrite-qd1", "randwrite", 1),
    ("randwrite-qd32", "randwrite", 32),
    ("randwrite-qd128", "randwrite", 128),
];

/// Goal: our IOPS, divided by the peer's.
const GOAL: f64 = 1.2;
/// Goal: our IOPS per second of CPU, divided by the peer's.
const GOAL_PER_CPU: f64 = 1.5;
/// Bytes of the volumes.
const SIZE_MIB: u64 = 512;
/// Devices whose drivers do nothing.
const IDLE: usize = 100;
/// Time for which they are watched.
const WATCHED: Duration = Duration::from_secs(10);

const PEER: &str = "qemu-storage-daemon";

enum Server {
    Ours(Box<Daemon>),
    Peer(Process),
}

/// Process with one device, and later with idle ones.
struct Competitor {
    name: &'static str,
    side: Side,
    server: Server,
    socket: PathBuf,
}

impl Competitor {
    fn process(&self) -> u32 {
        match &self.server {
            Server::Ours(daemon) => daemon.id(),
            Server::Peer(process) => process.id(),
        }
    }

    fn stop(self) -> Result<()> {
        match self.server {
            Server::Ours(daemon) => daemon.stop(),
            Server::Peer(process) => process.kill(),
        }
    }
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, peers_only: bool, dry_run: bool) -> Result<()> {
    let load = ["-p", "forebay-vhost-host"];
    if peers_only {
        let mut build = shell::cargo();
        shell::run(build.args(["build", "--quiet", "--release"]).args(load))?;
    } else {
        shell::run(&mut daemon::build_command())?;
        shell::run(&mut daemon::build_beside_command(&load))?;
    }
    let memory = Scratch::within(Path::new("/dev/shm"), "bench")?;
    let sockets = Scratch::new("bench")?;
    let mut competitors = vec![start_peer(&memory, &sockets, 1)?];
    if !peers_only {
        competitors.insert(0, start_ours(&memory, &sockets, 1)?);
    }
    for competitor in &competitors {
        let fill = ["--mode", "write", "--block", "1m", "--depth", "4", "--once"];
        shell::output(driver(&competitor.socket).args(fill)).with_context(|| format!("filling {}", competitor.name))?;
    }
    let wanted = |job: &&(&str, &str, u16)| effort.case.as_ref().is_none_or(|part| job.0.contains(part.as_str()));
    let jobs: Vec<_> = JOBS.iter().filter(wanted).collect();
    let mut speed: Vec<Case> = jobs.iter().map(|job| case(job.0, "", &competitors)).collect();
    let mut per_cpu: Vec<Case> = jobs.iter().map(|job| case(job.0, "-per-cpu", &competitors)).collect();
    for round in 0..effort.rounds {
        for (index, (name, mode, depth)) in jobs.iter().enumerate() {
            for place in 0..competitors.len() {
                // Each round begins with another one.
                let which = (place + round) % competitors.len();
                let competitor = &competitors[which];
                let before = cpu_seconds(competitor.process())?;
                let (iops, requests) = measure(&competitor.socket, mode, *depth, effort.seconds)
                    .with_context(|| format!("{name} on {}", competitor.name))?;
                let used = (cpu_seconds(competitor.process())? - before).max(0.01);
                speed[index].series[which].values.push(iops);
                per_cpu[index].series[which].values.push(requests / used);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    competitors.into_iter().try_for_each(Competitor::stop)?;

    let mut idle = Vec::new();
    if effort.case.is_none() {
        if !peers_only {
            idle.push(measure_idle(|devices| start_ours(&memory, &sockets, devices), &sockets)?);
        }
        idle.push(measure_idle(|devices| start_peer(&memory, &sockets, devices), &sockets)?);
    }

    let all: Vec<Case> = speed.into_iter().chain(per_cpu).collect();
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("vhost", &all);
    lines.iter().chain(&idle).for_each(|line| println!("{line}"));
    if !dry_run && !peers_only && effort.case.is_none() {
        let title = "Forebay and qemu-storage-daemon over vhost-user";
        report::write("vhost", title, &method(effort, &idle), &all, &lines)?;
    }
    Ok(())
}

fn case(name: &str, suffix: &str, competitors: &[Competitor]) -> Case {
    let of =
        |competitor: &Competitor| Series { name: competitor.name.into(), side: competitor.side, values: Vec::new() };
    Case {
        name: format!("{name}{suffix}"),
        unit: if suffix.is_empty() { "IOPS" } else { "per CPU-second" },
        goal: if suffix.is_empty() { GOAL } else { GOAL_PER_CPU },
        series: competitors.iter().map(of).collect(),
    }
}

/// Returns the socket of a device.
fn socket(sockets: &Scratch, side: &str, device: usize) -> PathBuf {
    sockets.path().join(format!("{side}-{device}"))
}

/// Starts a daemon with volumes in memory.
fn start_ours(memory: &Scratch, sockets: &Scratch, devices: usize) -> Result<Competitor> {
    let data = memory.path().join(format!("data-{devices}"));
    let daemon = Daemon::start_under(&["taskset", "--cpu-list", "0"], &data, &[])?;
    let size = format!("{SIZE_MIB}M");
    for device in 0..devices {
        let name = format!("ram/bench{device}");
        shell::output(daemon.command().args(["create", &name, "--size", &size]))?;
        let path = socket(sockets, "ours", device);
        shell::output(daemon.command().args(["attach", &name, "--queues", "1", "--vhost"]).arg(path))?;
    }
    let socket = socket(sockets, "ours", 0);
    Ok(Competitor { name: "forebay", side: Side::Ours, server: Server::Ours(Box::new(daemon)), socket })
}

/// Starts a storage daemon with files in memory, in one I/O thread.
fn start_peer(memory: &Scratch, sockets: &Scratch, devices: usize) -> Result<Competitor> {
    let mut command = shell::command("taskset");
    command.args(["--cpu-list", "0", PEER, "--object", "iothread,id=io"]);
    for device in 0..devices {
        let file = memory.path().join(format!("peer-{device}.raw"));
        std::fs::File::create(&file)?.set_len(SIZE_MIB << 20)?;
        let path = socket(sockets, "peer", device);
        // A killed daemon leaves its sockets.
        let _ = std::fs::remove_file(&path);
        let aio = if uring() { "io_uring" } else { "threads" };
        command.args(["--blockdev", &format!("driver=file,node-name=n{device},aio={aio},filename={}", file.display())]);
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=e{device},node-name=n{device},addr.type=unix,addr.path={},writable=on,\
             num-queues=1,iothread=io",
            path.display()
        ));
    }
    let log = sockets.path().join("peer.log");
    let mut process = Process::start(&mut command, &log)?;
    let last = socket(sockets, "peer", devices - 1);
    let up = shell::wait_for(Duration::from_secs(30), || match process.ended() {
        Some(_) => Some(false),
        None => last.exists().then_some(true),
    });
    if up != Some(true) {
        bail!("{PEER} does not come up: {}", shell::tail(&log, 5));
    }
    let socket = socket(sockets, "peer", 0);
    Ok(Competitor { name: PEER, side: Side::Peer, server: Server::Peer(process), socket })
}

/// The kernel lets us use io_uring.
fn uring() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").map_or(true, |text| text.trim() == "0")
}

/// Our own driver on the last processor, polling, with notifications by index as guests have them.
fn driver(socket: &Path) -> Command {
    let processor = std::thread::available_parallelism().map_or(0, |count| count.get() - 1).to_string();
    let mut load = shell::command("taskset");
    load.args(["--cpu-list", &processor]).arg(shell::target().join("release/vhost-load"));
    load.args(["--format", "json", "--poll", "--event-idx", "--socket"]).arg(socket);
    load
}

/// Returns requests a second, and all requests.
fn measure(socket: &Path, mode: &str, depth: u16, seconds: f64) -> Result<(f64, f64)> {
    let words = ["--mode", mode, "--depth", &depth.to_string(), "--seconds", &seconds.to_string()];
    let found: Value = serde_json::from_str(&shell::output(driver(socket).args(words))?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("vhost-load says no {name}"));
    Ok((number("iops")?, number("requests")?))
}

/// Returns what idle devices cost: processor time, and memory for each.
fn measure_idle(start: impl Fn(usize) -> Result<Competitor>, sockets: &Scratch) -> Result<String> {
    let resident_with = |devices: usize| -> Result<(u64, f64, &'static str)> {
        let competitor = start(devices)?;
        let side = if competitor.side == Side::Ours { "ours" } else { "peer" };
        let mut command = shell::command(shell::target().join("release/vhost-load"));
        command.args(["--idle", "--event-idx"]);
        for device in 0..devices {
            command.arg("--socket").arg(socket(sockets, side, device));
        }
        let mut host = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = String::new();
        BufReader::new(host.stdout.take().context("no output")?).read_line(&mut said)?;
        if !said.ends_with("devices\n") {
            bail!("vhost-load does not come up: {said}");
        }
        let before = cpu_seconds(competitor.process())?;
        if devices > 1 {
            std::thread::sleep(WATCHED);
        }
        let used = cpu_seconds(competitor.process())? - before;
        let resident = resident(competitor.process())?;
        drop(host.stdin.take());
        host.wait()?;
        let name = competitor.name;
        competitor.stop()?;
        Ok((resident, used, name))
    };
    let (one, _, _) = resident_with(1)?;
    let (all, used, name) = resident_with(IDLE)?;
    let each = all.saturating_sub(one) as f64 / (IDLE - 1) as f64 / 1024.0;
    Ok(format!("{IDLE} idle devices of {name}: {used:.2} s of CPU in {} s, {each:.0} KiB each", WATCHED.as_secs()))
}

/// Bytes of a process that are in memory.
fn resident(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? << 10)
}

fn method(effort: &Effort, idle: &[String]) -> String {
    format!(
        "{}. Volumes of {SIZE_MIB} MiB in memory, written once from end to end: our pool `ram`, and for {PEER} a file on \
         a tmpfs with `aio=io_uring` and an I/O thread. Our pool lies in huge pages where the system has them; the tmpfs \
         only where it is mounted so, which is not the default. Both devices have the first processor, the driver has the last: \
         `vhost-load` (test/vhost), a vhost-user front-end with a virtio-blk driver of our own on one split virtqueue, \
         with indirect descriptors and EVENT_IDX. It polls its ring and does not copy data, so that the figures are the \
         devices'. Requests of 4 KiB. {} rounds of {} s a measurement, the order turned each round; medians (lowest and \
         highest in parentheses). *per-cpu* divides the requests by the user and system time of the device's process, \
         all its threads; polling counts.\n\n{}.\n\nThe memory of an idle device is that of the process with {IDLE} of \
         them, without that with one, divided; each was started and has read one block.\n\nRepeat it: `cargo xtask bench \
         vhost`.",
        report::machine(),
        effort.rounds,
        effort.seconds,
        idle.join(".\n\n")
    )
}
