//! Real failovers: three daemons hold the write logs of two images of a Ceph cluster; again and again the one that serves
//! them is lost under verified writes, another one takes over, and every answered write must be there.
//!
//! Each daemon is in a network namespace of its own (`network`), so that paths between daemons and to the cluster can be lost
//! one by one (`losses`). Clients and commands reach the daemons over Unix sockets, which no lost network concerns: they go
//! on writing at a primary that is cut off, and whatever it answers must be there as well (`round`).

mod commands;
mod hosts;
mod losses;
mod memory;

mod round;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::hosts::{Host, Hosts};
use self::losses::{Deck, Loss};
use self::round::{Round, Writers, fio_command};
use crate::ceph::Cluster;
use crate::network::{End, Network};
use crate::numbered::{BLOCK, Random, Writer, unix_nanoseconds};
use crate::shell::{self, Scratch};

/// Blocks of the numbered volume that are written until a loss; each connection has a half to itself.
const BLOCKS: u64 = 2048;
const CONNECTIONS: u64 = 2;
/// Blocks after those, which a former and a new primary get writes to.
const CONTESTED: u64 = 64;
/// Last block of the volume, which is nobody's.
const LAST_BLOCK: u64 = BLOCKS + CONTESTED;
const VOLUME_BYTES: u64 = (LAST_BLOCK + 1) * BLOCK as u64;
/// MiB that fio writes to.
const FIO_MIB: u64 = 8;
/// Number of daemons.
const HOSTS: usize = 3;
/// Time within which a command succeeds that has to wait for something.
const PATIENCE: Duration = Duration::from_secs(60);
const NUMBERED: &str = "rbd/numbered";
const FIO: &str = "rbd/fio";

/// Arguments of `failover`.
#[derive(clap::Args)]
pub struct FailoverArguments {
    /// Number of failovers
    #[arg(long, default_value_t = 10)]
    rounds: u64,
    /// Seed of the order of writes, of the moments and the kinds of the failures
    #[arg(long)]
    seed: Option<u64>,
    /// Length of a primary's lease
    #[arg(long, default_value = "500ms")]
    lease: String,
}

/// Loses the daemon that serves the images, `rounds` times.
pub fn run(arguments: &FailoverArguments) -> Result<()> {
    shell::build(&mut crate::daemon::build_beside_command(&["-p", "forebay-iscsi-host"]))?;
    let scratch = Scratch::within(&shell::target(), "failover")?;
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()) ^ unix_nanoseconds());
    println!("seed {seed}");
    let summary = rounds(scratch.path(), arguments, seed)?;
    println!("ok {} failovers: {summary}", arguments.rounds);
    Ok(())
}

fn rounds(folder: &Path, arguments: &FailoverArguments, seed: u64) -> Result<String> {
    let FailoverArguments { rounds, lease, .. } = arguments;
    let network = Network::create(HOSTS)?;
    let cluster = Cluster::start_at(1, &network.address(End::Cluster))?;
    // Longer than all rounds: a daemon that waits for its predecessor's watches never serves.
    shell::output(cluster.command("ceph").args(["config", "set", "osd", "osd_client_watch_timeout", "3600"]))?;
    let begin = Instant::now();
    let mut random = Random(seed | 1);
    let mut hosts = Hosts::start(folder, network, &cluster.variable(), lease)?;
    hosts.volume(NUMBERED, &format!("{}K", VOLUME_BYTES / 1024))?;
    let mut uri = hosts.volume(FIO, &format!("{FIO_MIB}M"))?;
    hosts.filled()?;
    shell::output(fio_command(&uri, "write").args(["--iodepth=32", "--do_verify=0", "--end_fsync=1"]))?;
    let per_connection = BLOCKS / CONNECTIONS;
    let mut writer = |first, blocks| Writer::new(first, blocks, random.next());
    let all = (0..CONNECTIONS).map(|number| writer(number * per_connection, per_connection)).collect();
    let mut writers = Writers { all, contested: writer(BLOCKS, CONTESTED), written: 0 };
    let (mut deck, mut times) = (Deck::default(), BTreeMap::<(Loss, bool), Vec<Duration>>::new());
    for number in 1..=*rounds {
        if number == rounds / 2 + 1 {
            hosts.take_over_automatically()?;
        }
        let loss = match deck.draw(&mut random) {
            // Others take over before it is back.
            Loss::Restarted if hosts.is_automatic => Loss::Killed,
            loss => loss,
        };
        let former = hosts.primary;
        let other = (former + 1 + (random.next() % (HOSTS as u64 - 1)) as usize) % HOSTS;
        let round_begin = Instant::now();
        let one = round::run(&mut hosts, &mut writers, &uri, Round { loss, other }, &mut random);
        let (took, next) = one.with_context(|| {
            let hosts = hosts.all.iter().enumerate();
            let logs: Vec<String> = hosts.map(|(number, host)| keep_log(number, host)).collect();
            let logs = logs.join("\n");
            format!("round {number} of seed {seed}: {loss:?}, host {former}, other host {other}\n{logs}")
        })?;
        let by_itself = hosts.is_automatic && loss.is_noticed();
        times.entry((loss, by_itself)).or_default().push(took);
        uri = next;
        let all = shell::seconds(round_begin.elapsed());
        println!(
            "round {number}: {loss:?} of host {former}{}, {} ms to the first answer, {all} in all",
            if by_itself { ", taken over automatically" } else { "" },
            took.as_millis()
        );
    }
    change_replicas(&hosts)?;
    flush_only(&mut hosts)?;
    let ran = commands::run(&mut hosts, &cluster, folder.to_owned());
    if let Err(error) = ran.and_then(|()| memory::run(&mut hosts, &cluster, folder.to_owned())) {
        let logs: Vec<String> = hosts.all.iter().enumerate().map(|(number, host)| keep_log(number, host)).collect();
        return Err(error.context(format!("seed {seed}\n{}", logs.join("\n"))));
    }
    hosts.all.iter().enumerate().for_each(|(number, host)| drop(keep_log(number, host)));
    // The network, which the hosts hold, outlives the cluster that listens in it.
    for host in &mut hosts.all {
        host.daemon.take().context("its daemon runs")?.stop()?;
    }
    drop(cluster);
    println!("loss to first answer:\n{}", table(times));
    Ok(format!("{} numbered writes, {} in all", writers.written, shell::seconds(begin.elapsed())))
}

/// Returns how long each kind of loss took, a line for each.
fn table(times: BTreeMap<(Loss, bool), Vec<Duration>>) -> String {
    let mut lines = vec![format!("{:26} {:>5} {:>9} {:>9}", "", "count", "median", "max")];
    for ((loss, by_itself), mut times) in times {
        times.sort_unstable();
        let ms = |time: Option<&Duration>| format!("{} ms", time.map_or(0, Duration::as_millis));
        // With an even number, the lower one of both in the middle.
        let (median, max) = (ms(times.get((times.len() - 1) / 2)), ms(times.last()));
        lines.push(format!(
            "{:26} {:>5} {median:>9} {max:>9}",
            format!("{loss:?}{}", if by_itself { ", automatic" } else { "" }),
            times.len()
        ));
    }
    lines.join("\n")
}

/// Takes a copy away from an image that is served, and then the log.
fn change_replicas(hosts: &Hosts) -> Result<()> {
    let host = hosts.primary();
    let other = hosts.all.iter().find(|other| other.address != host.address).context("another host")?;
    let place = hosts.place(host);
    host.command(&["attach", NUMBERED, "--nbd", &place, &format!("--replica={}", other.address)])?;
    let mut last = String::new();
    let members = || {
        last = host.command(&["--format", "json", "log", "info", NUMBERED]).ok()?;
        let log: Value = serde_json::from_str(&last).ok()?;
        (log["members"].as_array()?.len() == 2 && log["copies_wanted"] == 2).then_some(())
    };
    shell::wait_for(PATIENCE, members).with_context(|| format!("it has other members: {last}"))?;
    let logs = |host: &Host| -> Result<usize> {
        let logs: Value = serde_json::from_str(&host.command(&["--format", "json", "log", "ls"])?)?;
        let logs = logs.as_array().context("a list")?;
        Ok(logs.iter().filter(|log| log["image"] == NUMBERED).count())
    };
    host.command(&["detach", NUMBERED, "--nbd"])?;
    for host in &hosts.all {
        let none = shell::wait_for(PATIENCE, || logs(host).is_ok_and(|count| count == 0).then_some(()));
        none.with_context(|| format!("a copy is left at {}", host.address))?;
    }
    Ok(())
}

/// Refuses at a replica what would lose writes or fence a primary that is alive; then stops the primary, and writes the log
/// back at the replica without serving the image.
fn flush_only(hosts: &mut Hosts) -> Result<()> {
    let (primary, replica) = (hosts.primary, (hosts.primary + 1) % HOSTS);
    let refused = |arguments: &[&str], says: &str| {
        let answer = hosts.all[replica].command(arguments);
        let text = answer.err().map_or_else(String::new, |error| format!("{error:#}"));
        ensure!(text.contains(says), "{arguments:?} at a replica: {text:?} lacks {says:?}");
        Ok(())
    };
    refused(&["log", "discard", FIO], "belongs to another daemon")?;
    refused(&["log", "takeover", FIO], "is alive and connected")?;
    let host = &mut hosts.all[primary];
    host.crashed = Some(host.daemon.take().context("its daemon runs")?.halt()?);
    let host = &hosts.all[replica];
    let text = host.until(&["--format", "json", "log", "takeover", FIO, "--flush-only"])?;
    let log: Value = serde_json::from_str(&text)?;
    ensure!(log["dirty_entries"] == 0 && log["state"] == "closed", "not written back and closed: {text}");
    hosts.primary = replica;
    hosts.bring_back(primary)
}

/// Copies the log of a host's daemon to where it outlives the test; returns its end.
fn keep_log(number: usize, host: &Host) -> String {
    let (log, tail) = match (&host.daemon, &host.crashed) {
        (Some(daemon), _) => (daemon.log(), daemon.log_tail()),
        (None, Some(ended)) => (ended.log(), "it has ended".to_owned()),
        (None, None) => return format!("host {number}: no daemon"),
    };
    let path = shell::target().join(format!("failover-host{number}.log"));
    let note = std::fs::write(&path, log).map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!("host {number} ({note}):\n{tail}")
}
