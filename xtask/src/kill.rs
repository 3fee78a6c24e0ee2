//! Real kills: the daemon under `kill -9` again and again while clients write, and what must be there after each.
//!
//! Two writers run at once.  fio writes 4 KiB blocks with its checksummed header to one volume, so that after each
//! restart every block must verify: it is a whole block that fio wrote at this place.  Our own client writes numbered
//! blocks to another volume and remembers what it was promised, so that after each restart every block must be no
//! older than the last write that was answered, flushed or not, and one that was really written.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::ceph::Cluster;
use crate::daemon::Daemon;
use crate::fio;
use crate::nbd::Client;
use crate::numbered::{BLOCK, Ending, Random, Writer, unix_nanoseconds};
use crate::shell::{self, Process, Scratch};

/// Blocks of the numbered volume; each connection has a half to itself.
const BLOCKS: u64 = 4096;
const CONNECTIONS: u64 = 2;
/// MiB that fio writes to.
const FIO_MIB: u64 = 24;

/// Arguments of `kill`.
#[derive(clap::Args)]
pub struct KillArguments {
    /// Number of kills
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Seed of the order of writes and the moments of the kills
    #[arg(long)]
    seed: Option<u64>,
    /// The pool that the volumes are in
    #[arg(long, default_value = "local")]
    pool: String,
    /// Start a Ceph cluster for the time, and take its pool
    #[arg(long, conflicts_with = "pool")]
    ceph: bool,
    /// Put a write log on a file in front of each volume
    #[arg(long)]
    log: bool,
}

/// Kills the daemon `rounds` times.
pub fn run(arguments: &KillArguments) -> Result<()> {
    shell::build(&mut crate::daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "kill")?;
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()) ^ unix_nanoseconds());
    println!("seed {seed}");
    let summary = rounds(scratch.path(), arguments, seed)?;
    println!("ok {} kills: {summary}", arguments.rounds);
    Ok(())
}

fn rounds(folder: &Path, arguments: &KillArguments, seed: u64) -> Result<String> {
    let rounds = arguments.rounds;
    let cluster = arguments.ceph.then(|| Cluster::start(1)).transpose()?;
    if let Some(cluster) = &cluster {
        // Longer than all rounds: a daemon that waits for its predecessor's watches never serves.
        shell::output(cluster.command("ceph").args(["config", "set", "osd", "osd_client_watch_timeout", "3600"]))?;
    }
    let variable = cluster.as_ref().map(Cluster::variable);
    let wrapper: Vec<&str> = variable.iter().flat_map(|variable| ["/usr/bin/env", variable]).collect();
    let pool = if arguments.ceph { "rbd" } else { &arguments.pool };
    let (numbered, volume) = (format!("{pool}/numbered"), format!("{pool}/fio"));
    // Both logs share a file.
    let place = format!("--log=ssd:{}:16M", folder.join("logs").display());
    let log: &[&str] = if arguments.log { &[&place] } else { &[] };
    let begin = Instant::now();
    let mut random = Random(seed | 1);
    let mut daemon = Daemon::start_under(&wrapper, &folder.join("store"), &[])?;
    daemon.volume_with(&numbered, &format!("{}K", BLOCKS * BLOCK as u64 / 1024), log)?;
    let fio_uri = daemon.volume_with(&volume, &format!("{FIO_MIB}M"), log)?;
    shell::output(fio_command(&fio_uri, "write").args(["--iodepth=32", "--do_verify=0", "--end_fsync=1"]))?;
    let per_connection = BLOCKS / CONNECTIONS;
    let mut writers: Vec<Writer> =
        (0..CONNECTIONS).map(|number| Writer::new(number * per_connection, per_connection, random.next())).collect();
    let (mut written, mut slowest) = (0, Duration::ZERO);
    for round in 1..=rounds {
        let context = || format!("round {round} of seed {seed}");
        let log = folder.join("fio.log");
        let mut writing = fio_command(&fio_uri, "randwrite");
        writing.args(["--iodepth=8", "--do_verify=0", "--fsync=32", "--time_based", "--runtime=60"]);
        writing.args(["--randrepeat=0", "--norandommap", &format!("--randseed={}", random.next() >> 8)]);
        let mut fio = Process::start(&mut writing, &log)?;
        let run_ms = 150 + random.next() % 300;
        let ending = Ending::default();
        let socket = daemon.socket();
        let crashed = std::thread::scope(|scope| {
            let threads: Vec<_> = writers
                .iter_mut()
                .map(|writer| scope.spawn(|| writer.write_until(&socket, &numbered, &ending)))
                .collect();
            std::thread::sleep(Duration::from_millis(run_ms));
            ending.killed.store(true, Ordering::SeqCst);
            let crashed = daemon.crash();
            for thread in threads {
                written += thread.join().expect("a writer panicked").with_context(context)?;
            }
            crashed
        })?;
        // fio ends by itself when its server is gone; one that hangs is ended.
        if shell::wait_for(Duration::from_secs(3), || fio.ended()).is_none() {
            fio.kill()?;
        }
        let restart = Instant::now();
        daemon = crashed.restart().with_context(context)?;
        slowest = slowest.max(restart.elapsed());
        if round == 1 {
            // Attachments are part of what must survive.
            let targets = shell::output(daemon.command().arg("targets"))?;
            ensure!(targets.contains(&volume), "after a crash nothing is attached:\n{targets}");
        }
        std::thread::scope(|scope| {
            let verify = scope.spawn(|| {
                shell::output(fio_command(&fio_uri, "read").args(["--iodepth=32", "--do_verify=1", "--verify_fatal=1"]))
            });
            let mut client = Client::connect(&daemon.socket(), &numbered)?;
            ensure!(client.size() == BLOCKS * BLOCK as u64, "the volume's size changed to {}", client.size());
            for writer in &mut writers {
                writer.check(&mut client)?;
            }
            verify.join().expect("fio's thread panicked").context("fio finds a block that it did not write")
        })
        .with_context(|| format!("{}; the daemon's last words:\n{}", context(), daemon.log_tail()))?;
    }
    daemon.stop()?;
    Ok(format!(
        "{written} numbered writes, slowest restart {} ms, {} in all",
        slowest.as_millis(),
        shell::seconds(begin.elapsed())
    ))
}

fn fio_command(uri: &str, pattern: &str) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.args(fio::nbd(uri)).args(["--name=verify", "--bs=4k", "--verify=crc32c", "--thread"]);
    fio.args([format!("--rw={pattern}"), format!("--size={FIO_MIB}M")]);
    fio
}
