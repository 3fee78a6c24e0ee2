//! A write log with a replica, over TCP and over shared memory, against a log without one: writes a second, latency, and
//! what a write costs the replica.
//!
//! One daemon serves three images of a Ceph cluster, and two more hold one copy each.  The rings have space for all that a
//! measurement writes and are empty when it begins, and images are small, so that most of what is written is superseded
//! before it is written back: the log is measured, not the backend.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::messenger::{self, Transport};
use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

const DEPTHS: [u32; 3] = [1, 8, 32];
const OSDS: u32 = 3;
/// MiB of an image, and of a log: more than a measurement writes.
const SIZES_MIB: [u64; 2] = [16, 512];
/// Microseconds that the daemons and the bare messenger busy-poll before they sleep.
const LINGER_US: &str = "0";
/// Goal at depth 32: writes a second with a replica, to those without.
const RATE_GOAL: f64 = 0.8;
/// Goal at depth 1: microseconds that a replica may add to a write, apart from a round trip of the messenger.
const EXTRA_US: f64 = 20.0;
/// Goal at depth 32 over TCP: microseconds of CPU time that a write costs the replica.
const CPU_GOAL_US: f64 = 3.0;

/// Medium of the log, and of its copy.
#[derive(Clone, Copy, PartialEq)]
enum Medium {
    Ssd,
    Pmem,
}

impl Medium {
    fn name(self) -> &'static str {
        if self == Medium::Ssd { "ssd" } else { "pmem" }
    }

    /// Returns the option by which volatile memory is accepted.
    fn force(self) -> &'static str {
        if self == Medium::Pmem { ":force" } else { "" }
    }
}

/// Copies of a log.
#[derive(Clone, Copy, PartialEq)]
enum Copies {
    None,
    Tcp,
    Shm,
}

const COPIES: [Copies; 3] = [Copies::None, Copies::Tcp, Copies::Shm];

impl Copies {
    fn name(self) -> &'static str {
        match self {
            Copies::None => "none",
            Copies::Tcp => "tcp",
            Copies::Shm => "shm",
        }
    }

    fn transport(self) -> Option<Transport> {
        match self {
            Copies::None => None,
            Copies::Tcp => Some(Transport::Tcp),
            Copies::Shm => Some(Transport::Shm),
        }
    }
}

/// Block device over a file in memory.  Files in memory take direct I/O in whole pages only, unlike a log on most disks, and
/// all copies of a log have the same unit.
struct MemoryDisk(String);

impl MemoryDisk {
    fn create(file: &Path, mib: u64) -> Result<Self> {
        std::fs::File::create(file)?.set_len(mib << 20)?;
        let name = shell::output(shell::command("losetup").args(["--find", "--show"]).arg(file))?;
        Ok(Self(name.trim().to_owned()))
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        // Errors of the cleanup cannot be reported here.
        let _ = shell::output(shell::command("losetup").args(["--detach", &self.0]));
    }
}

/// Image with a log.
struct Volume {
    copies: Copies,
    image: String,
    uri: String,
    /// Daemon that holds the copy.
    replica: Option<Daemon>,
}

/// Daemons of one medium.
struct Gateways {
    primary: Daemon,
    volumes: Vec<Volume>,
    /// Disks of the replicas, which are detached after their daemons have ended.
    disks: Vec<MemoryDisk>,
}

impl Gateways {
    /// Starts them with the primary's logs in one folder, and the replicas' copies in another, on disks of their own there if
    /// it is `in_memory`.
    fn start(cluster: &Cluster, medium: Medium, disk: &Path, (copies_disk, in_memory): (&Path, bool)) -> Result<Self> {
        let [folder, copies_folder] = [disk, copies_disk].map(|disk| disk.join(medium.name()));
        std::fs::create_dir_all(&copies_folder)?;
        let (mut replicas, mut disks) = (Vec::new(), Vec::new());
        let quota_mib = SIZES_MIB[1] + 64;
        for copies in COPIES {
            let (name, tcp) = (copies.name(), shell::free_port()?);
            let address = match copies {
                Copies::None => continue,
                Copies::Tcp => format!("127.0.0.1:{tcp}"),
                Copies::Shm => format!("shm:{}", folder.join("peer").display()),
            };
            let mut path = copies_folder.join(name).display().to_string();
            if in_memory && medium == Medium::Ssd {
                let disk = MemoryDisk::create(Path::new(&path), quota_mib).context("a disk in memory (as root)")?;
                path = disk.0.clone();
                disks.push(disk);
            }
            let config = format!(
                "peer = ['{address}']\n[replicas]\nmedium = '{}'\npath = '{path}'\nquota = '{quota_mib}M'\nforce = true\n",
                medium.name(),
            );
            replicas.push((copies, address, start(&folder.join(name), &[], &config)?));
        }
        let addresses: Vec<&String> = replicas.iter().map(|(_, address, _)| address).collect();
        let config = format!("peers = {addresses:?}\n");
        let variable = cluster.variable();
        let primary = start(&folder.join("primary"), &["/usr/bin/env", &variable], &config)?;
        let known = || {
            let status = shell::output(primary.command().args(["--format", "json", "status"])).ok()?;
            let status: Value = serde_json::from_str(&status).ok()?;
            let peers = status["peers"].as_array()?.iter().filter(|peer| peer["id"].is_string()).count();
            (peers == replicas.len()).then_some(())
        };
        shell::wait_for(daemon::PATIENCE, known).with_context(|| format!("no peers:\n{}", primary.log_tail()))?;
        let mut gateways = Self { primary, volumes: Vec::new(), disks };
        let [size, log] = SIZES_MIB.map(|mib| format!("{mib}M"));
        let mut all = vec![(Copies::None, String::new(), None)];
        all.extend(replicas.into_iter().map(|(copies, address, daemon)| (copies, address, Some(daemon))));
        for (copies, address, replica) in all {
            let path: PathBuf = folder.join(format!("log-{}", copies.name()));
            let place = format!("--log={}:{}:{log}{}", medium.name(), path.display(), medium.force());
            let asked = format!("--replica={address}");
            let flags: Vec<&str> =
                [place.as_str()].into_iter().chain(replica.as_ref().map(|_| asked.as_str())).collect();
            let image = format!("rbd/{}-{}", medium.name(), copies.name());
            let uri = gateways.primary.volume_with(&image, &size, &flags)?;
            let volume = Volume { copies, image, uri, replica };
            gateways.complete(&volume)?;
            let mut fill = shell::command("fio");
            fill.args(fio::nbd(&volume.uri)).args(["--name=fill", "--rw=write", "--bs=1M", "--iodepth=4", "--thread"]);
            // Once around the ring: a file system maps a block of a new file with the first write to it.
            shell::output(fill.args([format!("--size={size}"), format!("--io_size={}M", SIZES_MIB[1] + 64)]))?;
            gateways.empty(&volume)?;
            gateways.volumes.push(volume);
        }
        Ok(gateways)
    }

    /// Waits until the log of a volume has all its copies.
    fn complete(&self, volume: &Volume) -> Result<()> {
        let mut last = String::new();
        let complete = || {
            last = self.info(volume).ok()?;
            self.is_complete(volume, &last).then_some(())
        };
        let complete = shell::wait_for(daemon::PATIENCE, complete);
        complete.with_context(|| format!("{} lacks a copy: {last}\n{}", volume.image, self.primary.log_tail()))
    }

    fn info(&self, volume: &Volume) -> Result<String> {
        shell::output(self.primary.command().args(["--format", "json", "log", "info", &volume.image]))
    }

    fn is_complete(&self, volume: &Volume, info: &str) -> bool {
        let info: Value = serde_json::from_str(info).unwrap_or_default();
        let members = info["members"].as_array().map_or(&[][..], Vec::as_slice);
        let complete = members.iter().filter(|member| member["state"] == "complete").count();
        volume.replica.is_none() || complete == 2
    }

    /// Waits until the log of a volume is empty.
    fn empty(&self, volume: &Volume) -> Result<()> {
        shell::output(self.primary.command().args(["log", "flush", &volume.image])).map(drop)
    }

    /// Writes at random; returns what fio says, and the microseconds of CPU time that each write has cost the replica.
    fn measure(&self, volume: &Volume, depth: u32, seconds: f64) -> Result<(fio::Outcome, f64)> {
        let job = Job { name: "write", pattern: "randwrite", block_size: 4096, depth, flush_each: 0 };
        let used = || volume.replica.as_ref().map_or(Ok(0.0), |replica| cpu_seconds(replica.id()));
        let before = used()?;
        let outcome = fio::measure(&job, &fio::nbd(&volume.uri), seconds)?;
        let cpu_us = (used()? - before) * 1e6 / outcome.requests.max(1) as f64;
        let info = self.info(volume)?;
        if !self.is_complete(volume, &info) {
            bail!("{} has lost its copy: {info}\n{}", volume.image, self.primary.log_tail());
        }
        self.empty(volume)?;
        Ok((outcome, cpu_us))
    }

    fn stop(self) -> Result<()> {
        self.primary.stop()?;
        self.volumes.into_iter().filter_map(|volume| volume.replica).try_for_each(Daemon::stop)?;
        drop(self.disks);
        Ok(())
    }
}

/// Starts a daemon with a configuration file.
fn start(folder: &Path, wrapper: &[&str], config: &str) -> Result<Daemon> {
    std::fs::create_dir_all(folder)?;
    let file = folder.join("forebay.toml");
    std::fs::write(&file, config)?;
    let file = file.display().to_string();
    let flags = ["--config", &file, "--store-size", "64M", "--cores", "1", "--linger-us", LINGER_US];
    Daemon::start_under(wrapper, &folder.join("data"), &flags)
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let load = report::load()?;
    let cluster = Cluster::named_or_apart(OSDS)?;
    let mut cases = Vec::new();
    let mut trips = Vec::new();
    for medium in [Medium::Ssd, Medium::Pmem] {
        if effort.case.as_ref().is_some_and(|part| part != medium.name()) {
            continue;
        }
        let scratch = match medium {
            Medium::Ssd => Scratch::within(&folder, "bench")?,
            Medium::Pmem => Scratch::within(Path::new("/dev/shm"), "bench")?,
        };
        let copies = Scratch::within(effort.replica_dir(), "bench")?;
        let gateways =
            Gateways::start(&cluster, medium, scratch.path(), (copies.path(), effort.replica_dir.is_none()))?;
        for round in 0..effort.rounds {
            measure_round(&gateways, medium, round, (scratch.path(), effort.seconds), (&mut cases, &mut trips))?;
            println!("{}: round {} of {}", medium.name(), round + 1, effort.rounds);
        }
        gateways.stop()?;
    }
    // One table for each peer.
    cases.sort_by_key(|case: &Case| ["IOPS", "1/s"].iter().position(|unit| *unit == case.unit).unwrap_or(2));
    println!("{}", report::table(&cases));
    let mut lines = report::ratio_lines("replication", &cases);
    lines.extend(trips.iter().map(|(name, values)| {
        format!("VALUE name=replication/round-trip-{name} value={:.1} unit=us", super::median(values))
    }));
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        let method = method(effort, &[report::device(&folder)?, copies_device(effort)?], &load)?;
        report::write("replication", "Replicas of write logs", &method, &cases, &lines)?;
    }
    Ok(())
}

/// Measures every volume at every depth once, and the messenger's round trips.
fn measure_round(
    gateways: &Gateways,
    medium: Medium,
    round: usize,
    (folder, seconds): (&Path, f64),
    (cases, trips): (&mut Vec<Case>, &mut Vec<(String, Vec<f64>)>),
) -> Result<()> {
    let name = medium.name();
    for depth in DEPTHS {
        let mut measured = Vec::new();
        for place in 0..gateways.volumes.len() {
            let volume = &gateways.volumes[(place + round) % gateways.volumes.len()];
            let what = format!("{name}-{}-qd{depth}", volume.copies.name());
            let (outcome, cpu_us) = gateways.measure(volume, depth, seconds).with_context(|| what.clone())?;
            let mean_us = outcome.mean_ns / 1e3;
            let [half_us, tail_us] = [0, 1].map(|at| outcome.latency_ns[at] as f64 / 1e3);
            println!(
                "{what:<16} {:>7.0} IOPS  mean {mean_us:.0} us  50/99 %: {half_us:.0} {tail_us:.0} us  replica {cpu_us:.1} us CPU/write",
                outcome.iops
            );
            measured.push((volume.copies, outcome.iops, mean_us, cpu_us));
        }
        let (_, plain_iops, plain_us, _) =
            *measured.iter().find(|(copies, ..)| *copies == Copies::None).context("the log without a replica")?;
        for (copies, iops, mean_us, cpu_us) in measured {
            let Some(transport) = copies.transport() else { continue };
            let what = format!("{name}-{}", copies.name());
            let last = depth == DEPTHS[DEPTHS.len() - 1];
            let goal = if last { RATE_GOAL } else { 0.0 };
            note(cases, format!("{what}-qd{depth}"), ("IOPS", goal), "no replica", (iops, plain_iops));
            if depth == 1 {
                let trip_us = messenger::round_trip(folder, transport, LINGER_US, seconds / 3.0)?;
                println!("{what:<16} the messenger's round trip {trip_us:.1} us");
                match trips.iter_mut().find(|(name, _)| *name == what) {
                    Some((_, values)) => values.push(trip_us),
                    None => trips.push((what.clone(), vec![trip_us])),
                }
                let allowed_us = plain_us + trip_us + EXTRA_US;
                let figures = (1e6 / mean_us, 1e6 / allowed_us);
                note(cases, format!("{what}-latency"), ("1/s", 1.0), "without it, and a round trip", figures);
            }
            if last {
                let figures = (1e6 / cpu_us.max(0.01), 1e6 / CPU_GOAL_US);
                let goal = if copies == Copies::Tcp { 1.0 } else { 0.0 };
                note(cases, format!("{what}-replica-cpu"), ("writes/CPU s", goal), "the goal", figures);
            }
        }
    }
    Ok(())
}

/// Notes a figure with a replica, and what it is compared with.
fn note(
    cases: &mut Vec<Case>,
    name: String,
    (unit, goal): (&'static str, f64),
    peer: &str,
    (ours, theirs): (f64, f64),
) {
    let at = cases.iter().position(|case| case.name == name).unwrap_or_else(|| {
        let series = [("a replica", Side::Ours), (peer, Side::Peer)];
        let series = series.map(|(name, side)| Series { name: name.into(), side, values: Vec::new() });
        cases.push(Case { name, unit, goal, series: series.into() });
        cases.len() - 1
    });
    cases[at].series[0].values.push(ours);
    cases[at].series[1].values.push(theirs);
}

/// Returns what the replicas' copies are on.
fn copies_device(effort: &Effort) -> Result<String> {
    match &effort.replica_dir {
        Some(folder) => report::device(folder),
        None => Ok("loop devices in memory".into()),
    }
}

fn method(effort: &Effort, [primary, replica]: &[String; 2], load: &str) -> Result<String> {
    let Effort { rounds, seconds, .. } = effort;
    let (machine, commit, [image, log]) = (report::machine(), report::commit()?, SIZES_MIB);
    Ok(format!(
        "{machine}, with a load average of {load} before the cluster was started; commit {commit}. fio's nbd engine over a Unix socket, 4 KiB random writes without flushes, {rounds} rounds of \
         {seconds} s, the order turned each round; medians (lowest and highest in parentheses). One daemon serves three \
         images of {image} MiB in a Ceph cluster: one with a log without replicas, one with a replica at a second daemon \
         over TCP on loopback (crc mode), and one with a replica at a third daemon over shared memory. All on one \
         machine, each daemon with one core and `--linger-us {LINGER_US}`: two processors are shared by fio, primary, \
         replica and cluster, so that what the replica needs is taken from the other two. Without a replica on pmem, fio and \
         the primary use both processors to the full, and the ratio cannot come near 1. On separate machines it can. The \
         cluster has {OSDS} OSDs in memory and runs at idle priority. A log has {log} MiB, more than a measurement \
         writes; it has been written once around before, and is empty when a measurement begins. *ssd*: logs are files on {primary}, copies are on \
         {replica} (`--replica-dir`), so that two copies never share a disk; with direct I/O, each write durable when it \
         is acknowledged. *pmem*: mapped files in /dev/shm, with all the flushes of persistent \
         memory.\n\n\
         *-qdN*: writes a second, N at once; the goal is {RATE_GOAL} at depth 32. *-latency*: 1 / mean latency at depth 1; \
         the peer is the mean without a replica, with one round trip of the bare messenger over the same transport \
         (`forebay perf messenger`, 4 KiB there, an empty answer, the median) and {EXTRA_US} us. *-replica-cpu*: writes at \
         depth 32 by CPU time of the replica's daemon, user and system; the goal over TCP is {CPU_GOAL_US} us a write.\n\n\
         Repeat it: `cargo xtask bench replication`; shorter: `--rounds 1 --seconds 2`. Beside DRBD, in a \
         guest: [replicas of write logs beside DRBD](replication-drbd.md).",
    ))
}
