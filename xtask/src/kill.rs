//! Real kills: the daemon under `kill -9` again and again while clients write, and what must be there after each.
//!
//! Two writers run at once.  fio writes 4 KiB blocks with its checksummed header to one volume, so that after each
//! restart every block must verify: it is a whole block that fio wrote at this place.  Our own client writes numbered
//! blocks to another volume and remembers what it was promised, so that after each restart every block must be no
//! older than the last flush (or FUA write) that was answered, and one that was really written.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::ceph::Cluster;
use crate::daemon::Daemon;
use crate::fio;
use crate::nbd::Client;
use crate::shell::{self, Process, Scratch};

const BLOCK: usize = 4096;
/// Blocks of the numbered volume; each connection has a half to itself.
const BLOCKS: u64 = 4096;
const CONNECTIONS: u64 = 2;
/// MiB that fio writes to.
const FIO_MIB: u64 = 24;
const DEPTH: usize = 16;

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

fn unix_nanoseconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
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
        let killed = AtomicBool::new(false);
        let socket = daemon.socket();
        let crashed = std::thread::scope(|scope| {
            let threads: Vec<_> = writers
                .iter_mut()
                .map(|writer| scope.spawn(|| writer.write_until_killed(&socket, &numbered, &killed)))
                .collect();
            std::thread::sleep(Duration::from_millis(run_ms));
            killed.store(true, Ordering::SeqCst);
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

/// Content of a block: the zeroes of a write of zeroes (or of a new volume), or a numbered write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Zeroes,
    Number(u64),
}

/// One connection's share of the volume, and what each of its blocks may hold.
struct Writer {
    first: u64,
    /// Allowed contents: the acknowledged one, then everything sent since, in order.
    allowed: Vec<Vec<Content>>,
    random: Random,
    number: u64,
}

enum Sent {
    Write {
        block: u64,
        content: Content,
        fua: bool,
    },
    /// A flush, with the writes that had been answered when it was sent.
    Flush {
        answered: BTreeMap<u64, Content>,
    },
}

impl Writer {
    fn new(first: u64, blocks: u64, seed: u64) -> Self {
        Self { first, allowed: vec![vec![Content::Zeroes]; blocks as usize], random: Random(seed | 1), number: 0 }
    }

    /// Writes with several requests in flight until the server is gone; returns how many writes were answered.
    fn write_until_killed(&mut self, socket: &Path, export: &str, killed: &AtomicBool) -> Result<u64> {
        let mut client = Client::connect(socket, export)?;
        let mut flying: BTreeMap<u64, Sent> = BTreeMap::new();
        let mut answered: BTreeMap<u64, Content> = BTreeMap::new();
        let mut count = 0;
        loop {
            let step = if flying.len() < DEPTH {
                self.send(&mut client, &mut flying, &answered)
            } else {
                self.receive(&mut client, &mut flying, &mut answered).map(|writes| count += writes)
            };
            match step {
                Ok(()) => {}
                Err(_) if killed.load(Ordering::SeqCst) => return Ok(count),
                Err(error) => return Err(error.context("the daemon failed a request before it was killed")),
            }
        }
    }

    fn send(
        &mut self,
        client: &mut Client,
        flying: &mut BTreeMap<u64, Sent>,
        answered: &BTreeMap<u64, Content>,
    ) -> Result<()> {
        if self.random.next().is_multiple_of(24) {
            flying.insert(client.flush()?, Sent::Flush { answered: answered.clone() });
            return Ok(());
        }
        // Writes to one block that are in flight together have no order: a block in flight is left alone.
        let block = loop {
            let block = self.random.next() % self.allowed.len() as u64;
            if !flying.values().any(|sent| matches!(sent, Sent::Write { block: other, .. } if *other == block)) {
                break block;
            }
        };
        let offset = (self.first + block) * BLOCK as u64;
        let fua = self.random.next().is_multiple_of(16);
        let zeroes = !fua && self.random.next().is_multiple_of(16);
        self.number += 1;
        let content = if zeroes { Content::Zeroes } else { Content::Number(self.number) };
        // It may be on the medium from here on, whether or not it is ever answered.
        self.allowed[block as usize].push(content);
        let handle = match content {
            Content::Zeroes => client.write_zeroes(offset, BLOCK)?,
            Content::Number(number) => client.write(offset, &pattern(self.first + block, number), fua)?,
        };
        flying.insert(handle, Sent::Write { block, content, fua });
        Ok(())
    }

    fn receive(
        &mut self,
        client: &mut Client,
        flying: &mut BTreeMap<u64, Sent>,
        answered: &mut BTreeMap<u64, Content>,
    ) -> Result<u64> {
        let answer = client.answer()?;
        let sent = flying.remove(&answer.handle).context("an answer to nothing")?;
        if answer.error != 0 {
            bail!("a request failed with error {}", answer.error);
        }
        match sent {
            Sent::Write { block, content, fua } => {
                if fua {
                    self.promise(block, content);
                    answered.remove(&block);
                } else {
                    answered.insert(block, content);
                }
                Ok(1)
            }
            Sent::Flush { answered: promised } => {
                for (block, content) in promised {
                    if answered.get(&block) == Some(&content) {
                        answered.remove(&block);
                    }
                    self.promise(block, content);
                }
                Ok(0)
            }
        }
    }

    /// From now on nothing older than `content` may be found at `block`.
    fn promise(&mut self, block: u64, content: Content) {
        let allowed = &mut self.allowed[block as usize];
        // A promise that a later one has overtaken is not in the list any more.  Zeroes have no number: the oldest
        // ones are taken, which allows too much rather than too little.
        if let Some(at) = allowed.iter().position(|&other| other == content) {
            allowed.drain(..at);
        }
    }

    /// Reads everything back.  What is there after a restart is durable, and the only thing allowed from then on.
    fn check(&mut self, client: &mut Client) -> Result<()> {
        const RUN: usize = 64;
        for begin in (0..self.allowed.len()).step_by(RUN) {
            client.read((self.first + begin as u64) * BLOCK as u64, RUN * BLOCK)?;
            let answer = client.answer()?;
            ensure!(answer.error == 0, "reading fails with error {}", answer.error);
            for (index, data) in answer.data.chunks_exact(BLOCK).enumerate() {
                let block = begin + index;
                let found = content(self.first + block as u64, data).with_context(|| {
                    format!("block {} holds data that was never written", self.first + block as u64)
                })?;
                ensure!(
                    self.allowed[block].contains(&found),
                    "block {} holds {found:?}; promised or possible were {:?}",
                    self.first + block as u64,
                    self.allowed[block]
                );
                self.allowed[block] = vec![found];
            }
        }
        Ok(())
    }
}

/// The content of a numbered write: the block, the number, and what follows from them.
fn pattern(block: u64, number: u64) -> Vec<u8> {
    let mut random = Random(block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.rotate_left(32) | 1);
    let mut data = Vec::with_capacity(BLOCK);
    data.extend(block.to_le_bytes());
    data.extend(number.to_le_bytes());
    while data.len() < BLOCK {
        data.extend(random.next().to_le_bytes());
    }
    data
}

fn content(block: u64, data: &[u8]) -> Option<Content> {
    let number = u64::from_le_bytes(data[8..16].try_into().ok()?);
    if data.iter().all(|&byte| byte == 0) {
        return Some(Content::Zeroes);
    }
    (pattern(block, number) == data).then_some(Content::Number(number))
}

/// Marsaglia's xorshift: enough to choose blocks by.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_known_again_and_torn_ones_are_not() {
        let mut data = pattern(7, 42);
        assert_eq!(content(7, &data), Some(Content::Number(42)));
        assert_eq!(content(8, &data), None, "a block at another place is not ours");
        data[2048] ^= 1;
        assert_eq!(content(7, &data), None, "a damaged block is not ours");
        data[2048..].fill(0);
        assert_eq!(content(7, &data), None, "a torn block is not ours");
        assert_eq!(content(7, &[0; BLOCK]), Some(Content::Zeroes));
    }

    #[test]
    fn a_promise_forbids_what_is_older() {
        let mut writer = Writer::new(0, 1, 1);
        writer.allowed[0].extend([Content::Number(1), Content::Number(2), Content::Number(3)]);
        writer.promise(0, Content::Number(2));
        assert_eq!(writer.allowed[0], [Content::Number(2), Content::Number(3)]);
        writer.promise(0, Content::Number(1));
        assert_eq!(writer.allowed[0], [Content::Number(2), Content::Number(3)], "an overtaken promise changes nothing");
    }
}
