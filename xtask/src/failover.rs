//! Real failovers: three daemons hold the write logs of two images of a Ceph cluster; again and again the one that serves
//! them is lost under verified writes, another one takes over, and every answered write must be there.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::ceph::Cluster;
use crate::daemon::{Crashed, Daemon};
use crate::fio;
use crate::nbd::Client;
use crate::numbered::{BLOCK, Promise, Random, Writer, unix_nanoseconds};
use crate::shell::{self, Process, Scratch};

/// Blocks of the numbered volume; each connection has a half to itself.
const BLOCKS: u64 = 2048;
const CONNECTIONS: u64 = 2;
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
}

/// Way in which a primary is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loss {
    /// `kill -9`.
    Killed,
    /// Stopped, and continued after another one has taken over: it must be fenced.
    Suspended,
    /// Handed over: its log is closed, and nobody is fenced.
    HandedOver,
    /// Stopped in order.
    Stopped,
    /// `kill -9`, and started again before anybody takes over: it goes on as another client.
    Restarted,
}

/// Loses the daemon that serves the images, `rounds` times.
pub fn run(arguments: &FailoverArguments) -> Result<()> {
    shell::build(&mut crate::daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "failover")?;
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()) ^ unix_nanoseconds());
    println!("seed {seed}");
    let summary = rounds(scratch.path(), arguments.rounds, seed)?;
    println!("ok {} failovers: {summary}", arguments.rounds);
    Ok(())
}

/// Machine with a daemon.
struct Host {
    folder: PathBuf,
    address: String,
    daemon: Option<Daemon>,
    crashed: Option<Crashed>,
}

impl Host {
    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("its daemon runs")
    }

    fn command(&self, arguments: &[&str]) -> Result<String> {
        shell::output(self.daemon().command().args(arguments))
    }

    /// Repeats a command until it succeeds.
    fn until(&self, arguments: &[&str]) -> Result<String> {
        let mut last = None;
        let done = shell::wait_for(PATIENCE, || match self.command(arguments) {
            Ok(output) => Some(output),
            Err(error) => {
                last = Some(error);
                None
            }
        });
        done.with_context(|| match last {
            Some(error) => format!("{error:#}\n{}", self.daemon().log_tail()),
            None => "no answer".into(),
        })
    }
}

/// Hosts, and which one serves the images.
struct Hosts {
    all: Vec<Host>,
    primary: usize,
}

impl Hosts {
    fn start(folder: &Path, wrapper: &[&str]) -> Result<Self> {
        let addresses: Vec<String> =
            (0..HOSTS).map(|_| Ok(format!("127.0.0.1:{}", shell::free_port()?))).collect::<Result<_>>()?;
        let mut all = Vec::new();
        for (number, address) in addresses.iter().enumerate() {
            let folder = folder.join(format!("host{number}"));
            std::fs::create_dir_all(&folder)?;
            let key = folder.join("peer.key");
            std::fs::write(&key, "5a".repeat(32))?;
            std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
            let others: Vec<&String> = addresses.iter().filter(|other| *other != address).collect();
            let text = format!(
                "peer = ['{address}']\npeers = {others:?}\npeer-key = '{}'\n[replicas]\npath = '{}'\nquota = '128M'\n",
                key.display(),
                folder.join("replicas").display(),
            );
            let config = folder.join("forebay.toml");
            std::fs::write(&config, text)?;
            let config = config.display().to_string();
            let flags = ["--store-size", "64M", "--config", &config, "--log-level", "info,forebay_writelog=debug"];
            let daemon = Daemon::start_under(wrapper, &folder.join("data"), &flags)?;
            all.push(Host { folder, address: address.clone(), daemon: Some(daemon), crashed: None });
        }
        let hosts = Self { all, primary: 0 };
        for host in &hosts.all {
            let knows = || {
                let status: Value = serde_json::from_str(&host.command(&["--format", "json", "status"]).ok()?).ok()?;
                let peers = status["peers"].as_array()?;
                let known = peers.iter().filter(|peer| peer["outgoing"] == true && peer["id"].is_string());
                (known.count() == HOSTS - 1).then_some(())
            };
            shell::wait_for(PATIENCE, knows).with_context(|| format!("no peers:\n{}", host.daemon().log_tail()))?;
        }
        Ok(hosts)
    }

    fn primary(&self) -> &Host {
        &self.all[self.primary]
    }

    /// Creates an image, and attaches it at the primary with a log that both others have copies of.
    fn volume(&self, name: &str, size: &str) -> Result<String> {
        let host = self.primary();
        let place = format!("--log=ssd:{}:16M", host.folder.join("logs").display());
        let others = self.all.iter().filter(|other| other.address != host.address);
        let replicas: Vec<String> = others.map(|other| format!("--replica={}", other.address)).collect();
        let mut flags = vec![place.as_str()];
        flags.extend(replicas.iter().map(String::as_str));
        host.daemon().volume_with(name, size, &flags)
    }

    /// Waits until every host has a complete copy of a log.
    fn filled(&self, name: &str) -> Result<()> {
        let mut last = String::new();
        let full = shell::wait_for(PATIENCE, || {
            last = self.primary().command(&["--format", "json", "log", "info", name]).ok()?;
            let log: Value = serde_json::from_str(&last).ok()?;
            let members = log["members"].as_array()?;
            let complete = members.iter().filter(|member| member["state"] == "complete").count();
            (complete == HOSTS && log["copies_wanted"] == HOSTS).then_some(())
        });
        full.with_context(|| format!("{name} lacks copies: {last}\n{}", self.primary().daemon().log_tail()))
    }

    /// Takes both images over at another host, and exports them there; returns fio's URI.
    fn take_over(&mut self, to: usize, force: bool) -> Result<String> {
        let host = &self.all[to];
        let mut uri = String::new();
        for name in [NUMBERED, FIO] {
            let mut command = vec!["log", "takeover", name];
            command.extend(force.then_some("--force"));
            host.until(&command)?;
            uri = host.until(&["attach", name, "--nbd"])?;
        }
        self.primary = to;
        Ok(uri.lines().map(str::trim).find(|line| line.starts_with("nbd")).context("no URI")?.to_owned())
    }

    /// Starts a primary again that was killed, until its exports are served again; returns fio's URI, which stays.
    fn restart(&mut self, number: usize, uri: &str) -> Result<String> {
        let host = &mut self.all[number];
        host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
        let mut last = String::new();
        let served = || {
            last = host.command(&["--format", "json", "targets"]).ok()?;
            let targets: Value = serde_json::from_str(&last).ok()?;
            targets.as_array()?.iter().all(|target| target["uri"].is_string()).then_some(())
        };
        shell::wait_for(PATIENCE, served).with_context(|| format!("not served again: {last}"))?;
        Ok(uri.to_owned())
    }

    /// Brings a host back as a replica: what it served before is served by another one.
    fn bring_back(&mut self, number: usize) -> Result<()> {
        let host = &mut self.all[number];
        if let Some(crashed) = host.crashed.take() {
            host.daemon = Some(crashed.restart()?);
        }
        for name in [NUMBERED, FIO] {
            let targets = host.command(&["--format", "json", "targets"])?;
            if targets.contains(name.split_once('/').map_or(name, |(_, image)| image)) {
                host.until(&["detach", name, "--nbd", "--keep-log", "--force"])?;
            }
        }
        Ok(())
    }
}

fn rounds(folder: &Path, rounds: u64, seed: u64) -> Result<String> {
    let cluster = Cluster::start(1)?;
    // Longer than all rounds: a daemon that waits for its predecessor's watches never serves.
    shell::output(cluster.command("ceph").args(["config", "set", "osd", "osd_client_watch_timeout", "3600"]))?;
    let variable = cluster.variable();
    let begin = Instant::now();
    let mut random = Random(seed | 1);
    let mut hosts = Hosts::start(folder, &["/usr/bin/env", &variable])?;
    // The last block is nobody's.
    hosts.volume(NUMBERED, &format!("{}K", (BLOCKS + 1) * BLOCK as u64 / 1024))?;
    let mut uri = hosts.volume(FIO, &format!("{FIO_MIB}M"))?;
    for name in [NUMBERED, FIO] {
        hosts.filled(name)?;
    }
    shell::output(fio_command(&uri, "write").args(["--iodepth=32", "--do_verify=0", "--end_fsync=1"]))?;
    let per_connection = BLOCKS / CONNECTIONS;
    let mut writers: Vec<Writer> = (0..CONNECTIONS)
        .map(|number| Writer::new(number * per_connection, per_connection, random.next(), Promise::Answered))
        .collect();
    let (mut written, mut failovers) = (0, Vec::new());
    for round in 1..=rounds {
        let loss = match random.next() % 7 {
            0..=2 => Loss::Killed,
            3 => Loss::Suspended,
            4 => Loss::HandedOver,
            5 => Loss::Stopped,
            _ => Loss::Restarted,
        };
        let former = hosts.primary;
        let to = match loss {
            Loss::Restarted => former,
            _ => (former + 1 + (random.next() % (HOSTS as u64 - 1)) as usize) % HOSTS,
        };
        let context = || format!("round {round} of seed {seed}: {loss:?}, host {former}, then host {to}");
        let one = one_round(&mut hosts, &mut writers, (&uri, loss, to), &mut random, &mut written);
        let (took, next) = one.with_context(|| {
            let hosts = hosts.all.iter().enumerate();
            let logs: Vec<String> = hosts.map(|(number, host)| keep_log(number, host)).collect();
            format!("{}\n{}", context(), logs.join("\n"))
        })?;
        if loss == Loss::Killed {
            failovers.push(took);
        }
        uri = next;
        println!("round {round}: {loss:?}, {} ms", took.as_millis());
    }
    change_replicas(&hosts)?;
    flush_only(&mut hosts)?;
    for host in hosts.all {
        host.daemon.context("its daemon runs")?.stop()?;
    }
    failovers.sort_unstable();
    let median = failovers.get(failovers.len() / 2).copied().unwrap_or_default();
    let slowest = failovers.last().copied().unwrap_or_default();
    Ok(format!(
        "{written} numbered writes, kill to first answer: median {} ms, slowest {} ms; {} in all",
        median.as_millis(),
        slowest.as_millis(),
        shell::seconds(begin.elapsed())
    ))
}

/// Takes a copy away from an image that is served, and then the log.
fn change_replicas(hosts: &Hosts) -> Result<()> {
    let host = hosts.primary();
    let other = hosts.all.iter().find(|other| other.address != host.address).context("another host")?;
    let place = format!("--log=ssd:{}:16M", host.folder.join("logs").display());
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
    let Some(daemon) = &host.daemon else { return format!("host {number}: no daemon") };
    let path = shell::target().join(format!("failover-host{number}.log"));
    let kept = std::fs::write(&path, daemon.log());
    let note = kept.map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!("host {number} ({note}):\n{}", daemon.log_tail())
}

/// Loses the primary under load, takes over, verifies everything, and brings the former primary back; returns the time from
/// the loss to the first answered write, and fio's URI.
fn one_round(
    hosts: &mut Hosts,
    writers: &mut [Writer],
    (uri, loss, to): (&str, Loss, usize),
    random: &mut Random,
    written: &mut u64,
) -> Result<(Duration, String)> {
    let former = hosts.primary;
    let mut writing = fio_command(uri, "randwrite");
    writing.args(["--iodepth=8", "--do_verify=0", "--fsync=32", "--time_based", "--runtime=60"]);
    writing.args(["--randrepeat=0", "--norandommap", &format!("--randseed={}", random.next() >> 8)]);
    let mut fio = Process::start(&mut writing, &hosts.primary().folder.join("fio.log"))?;
    let run = Duration::from_millis(150 + random.next() % 300);
    let killed = AtomicBool::new(false);
    let socket = hosts.primary().daemon().socket();
    let (lost, next) = std::thread::scope(|scope| -> Result<_> {
        let threads: Vec<_> = writers
            .iter_mut()
            .map(|writer| scope.spawn(|| writer.write_until_killed(&socket, NUMBERED, &killed)))
            .collect();
        // The load lasts for a time that the seed draws.
        std::thread::sleep(run);
        killed.store(true, Ordering::SeqCst);
        let host = &mut hosts.all[former];
        match loss {
            Loss::Restarted | Loss::Killed => {
                host.crashed = Some(host.daemon.take().expect("its daemon runs").crash()?)
            }
            Loss::Stopped => host.crashed = Some(host.daemon.take().expect("its daemon runs").halt()?),
            Loss::Suspended => shell::signal("STOP", &[host.daemon().id()]),
            Loss::HandedOver => {
                for name in [NUMBERED, FIO] {
                    host.until(&["detach", name, "--nbd", "--keep-log", "--force"])?;
                }
            }
        }
        let lost = Instant::now();
        let next = match loss {
            Loss::Restarted => hosts.restart(former, uri)?,
            _ => hosts.take_over(to, loss == Loss::Suspended)?,
        };
        let took = first_write(&hosts.all[to], lost)?;
        if loss == Loss::Suspended {
            shell::signal("CONT", &[hosts.all[former].daemon().id()]);
        }
        for thread in threads {
            *written += thread.join().expect("a writer panicked")?;
        }
        Ok((took, next))
    })?;
    // fio ends by itself when its server is gone; one that hangs is ended.
    if shell::wait_for(Duration::from_secs(3), || fio.ended()).is_none() {
        fio.kill()?;
    }
    let verified = std::thread::scope(|scope| {
        let verify = scope.spawn(|| {
            shell::output(fio_command(&next, "read").args(["--iodepth=32", "--do_verify=1", "--verify_fatal=1"]))
        });
        let mut client = Client::connect(&hosts.primary().daemon().socket(), NUMBERED)?;
        for writer in writers.iter_mut() {
            writer.check(&mut client)?;
        }
        verify.join().expect("fio's thread panicked").context("fio finds a block that it did not write")
    });
    verified?;
    if loss == Loss::Suspended {
        // All of its images are fenced with their client.
        let host = &mut hosts.all[former];
        host.crashed = Some(host.daemon.take().expect("its daemon runs").crash()?);
    }
    if loss != Loss::Restarted {
        hosts.bring_back(former)?;
    }
    for name in [NUMBERED, FIO] {
        hosts.filled(name)?;
    }
    Ok((lost, next))
}

/// Writes the last block, which no writer has, as soon as the host answers; returns the time since `lost`.
fn first_write(host: &Host, lost: Instant) -> Result<Duration> {
    let mut client = Client::connect(&host.daemon().socket(), NUMBERED)?;
    ensure!(client.size() == (BLOCKS + 1) * BLOCK as u64, "the volume's size changed to {}", client.size());
    client.write(BLOCKS * BLOCK as u64, &[1; BLOCK], false)?;
    let answer = client.answer()?;
    if answer.error != 0 {
        bail!("the first write after a takeover fails with error {}", answer.error);
    }
    Ok(lost.elapsed())
}

fn fio_command(uri: &str, pattern: &str) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.args(fio::nbd(uri)).args(["--name=verify", "--bs=4k", "--verify=crc32c", "--thread"]);
    fio.args([format!("--rw={pattern}"), format!("--size={FIO_MIB}M")]);
    fio
}
