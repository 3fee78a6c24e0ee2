//! A log in memory: daemons that hold copies in memory, of which each is killed in turn, until all are at once.

use std::path::PathBuf;
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::hosts::Hosts;
use super::{HOSTS, PATIENCE};
use crate::ceph::Cluster;
use crate::nbd::Client;
use crate::shell;

/// Image of these tests.
const IMAGE: &str = "rbd/memory";
/// Bytes of a block, and number of blocks of the image.
const BLOCK: usize = 4096;
const BLOCKS: usize = 2048;
/// Writes that must be acknowledged before something happens to a host.
const WRITES: u32 = 200;
/// Writes that are in flight.
const DEPTH: usize = 8;

/// Runs all of them, beginning at the present primary.
pub fn run(hosts: &mut Hosts, cluster: &Cluster, folder: PathBuf) -> Result<()> {
    let mut image = MemoryImage { hosts, cluster, folder, content: vec![0; BLOCKS], next: 1 };
    type Step = (&'static str, fn(&mut MemoryImage<'_>) -> Result<()>);
    let steps: [Step; 6] = [
        ("refusals of logs in memory", refusals),
        ("a primary of a log in memory that is killed", primary_killed),
        ("the last replica of a log in memory that is killed", last_replica_killed),
        ("a primary of a log in memory that is started again", primary_restarted),
        ("a primary of a log in memory that is stopped", primary_stopped),
        ("all members of a log in memory that are killed", all_killed),
    ];
    for (name, step) in steps {
        step(&mut image).with_context(|| format!("{name}, primary host {}", image.hosts.primary))?;
        println!("ok {name}");
    }
    Ok(())
}

/// Image with a log in memory, and what it must hold.
struct MemoryImage<'a> {
    hosts: &'a mut Hosts,
    cluster: &'a Cluster,
    folder: PathBuf,
    /// Number in each block.
    content: Vec<u32>,
    next: u32,
}

/// Writer that numbers blocks, one after the other, until a request fails or it is told to stop.
struct BlockWriter {
    /// Number of acknowledged writes.
    acknowledged: std::sync::Arc<std::sync::atomic::AtomicU32>,
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    writing: JoinHandle<Result<Written>>,
}

/// Outcome of a writer: the number of acknowledged writes, and the error that has ended it.
struct Written {
    acknowledged: u32,
    error: Option<String>,
}

impl BlockWriter {
    /// Waits until some more writes have been acknowledged.
    fn proceed(&self) -> Result<()> {
        let count = || self.acknowledged.load(std::sync::atomic::Ordering::Relaxed);
        let before = count();
        let proceeds = || (count() >= before + WRITES || self.writing.is_finished()).then_some(());
        shell::wait_for(PATIENCE, proceeds).context("no more writes are acknowledged")
    }
}

/// Returns the content of a block.
fn block(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK / 4)
}

impl MemoryImage<'_> {
    /// Returns a host that has a copy only, `step` after the primary.
    fn replica(&self, step: usize) -> usize {
        (self.hosts.primary + step) % HOSTS
    }

    /// Attaches it at the primary with a log in memory, and copies at both others.
    fn attach(&self) -> Result<()> {
        let host = self.hosts.primary();
        let others = self.hosts.all.iter().filter(|other| other.address != host.address);
        let replicas: Vec<String> = others.map(|other| format!("--replica={}", other.address)).collect();
        let mut command = vec!["attach", IMAGE, "--nbd", "--log=dram:16M:age=60m"];
        command.extend(replicas.iter().map(String::as_str));
        host.until(&command)?;
        self.hosts.complete(IMAGE, HOSTS)
    }

    /// Describes the log as a host sees it; `None` if it has none.
    fn info(&self, host: usize) -> Result<Option<Value>> {
        match self.hosts.all[host].command(&["--format", "json", "log", "info", IMAGE]) {
            Ok(text) => Ok(Some(serde_json::from_str(&text)?)),
            Err(error) if format!("{error:#}").contains("has no write log") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Starts to write at the primary.
    fn write(&self) -> Result<BlockWriter> {
        let mut client = Client::connect(&self.hosts.primary().daemon().socket(), IMAGE)?;
        let stop = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
        let count = std::sync::Arc::<std::sync::atomic::AtomicU32>::default();
        let (stopped, counted, first) = (stop.clone(), count.clone(), self.next);
        let writing = std::thread::spawn(move || {
            let (mut submitted, mut acknowledged) = (0, 0);
            // Of requests that overlap, none are in flight together: the image has more blocks than that.
            let mut step = |client: &mut Client| -> Result<bool> {
                let stops = stopped.load(std::sync::atomic::Ordering::Relaxed);
                while !stops && (submitted - acknowledged) < DEPTH as u32 {
                    let number = first + submitted;
                    client.write((number as usize % BLOCKS * BLOCK) as u64, &block(number), false)?;
                    submitted += 1;
                }
                if submitted == acknowledged {
                    return Ok(false);
                }
                // Answers may come in any order: nothing is known of a part of them.
                let pending = submitted - acknowledged;
                for _ in 0..pending {
                    let answer = client.answer()?;
                    ensure!(answer.error == 0, "a request fails with error {}", answer.error);
                }
                acknowledged += pending;
                counted.store(acknowledged, std::sync::atomic::Ordering::Relaxed);
                Ok(true)
            };
            let error = loop {
                match step(&mut client) {
                    Ok(true) => {}
                    Ok(false) => break None,
                    Err(error) => break Some(format!("{error:#}")),
                }
            };
            Ok(Written { acknowledged, error })
        });
        Ok(BlockWriter { acknowledged: count, stop, writing })
    }

    /// Ends a writer; notes what it was promised.  Returns the error that it has got.
    fn end(&mut self, writer: BlockWriter) -> Result<Option<String>> {
        writer.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let Written { acknowledged, error } = writer.writing.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
        ensure!(acknowledged > 0, "nothing was written: {error:?}");
        for number in self.next..self.next + acknowledged {
            self.content[number as usize % BLOCKS] = number;
        }
        // Those that were not acknowledged may have been written as well.
        self.next += acknowledged + DEPTH as u32;
        Ok(error)
    }

    /// Compares what was found with what was promised.
    fn compare(&self, found: &[u8]) -> Result<()> {
        ensure!(found.len() == BLOCKS * BLOCK, "it has {} bytes", found.len());
        for (at, (found, expected)) in found.chunks(BLOCK).zip(&self.content).enumerate() {
            let number = u32::from_le_bytes(found[..4].try_into()?);
            ensure!(found == block(number), "block {at} is torn");
            // A write that was in flight may have overwritten it.
            let newer = number > *expected && number < self.next && number as usize % BLOCKS == at;
            ensure!(number == *expected || newer, "block {at} has number {number} instead of {expected}");
        }
        Ok(())
    }

    /// Reads everything back at the primary.
    fn verify(&self) -> Result<()> {
        let mut client = Client::connect(&self.hosts.primary().daemon().socket(), IMAGE)?;
        let mut found = Vec::new();
        while found.len() < BLOCKS * BLOCK {
            client.read(found.len() as u64, 1 << 20)?;
            let answer = client.answer()?;
            ensure!(answer.error == 0, "a read fails with error {}", answer.error);
            found.extend(answer.data);
        }
        self.compare(&found)
    }

    /// Compares what the cluster has.
    fn verify_in_cluster(&self) -> Result<()> {
        let path = self.folder.join("exported-memory");
        let _ = std::fs::remove_file(&path);
        let path_text = path.display().to_string();
        let export = ["60", "rbd", "export", "--no-progress", IMAGE, &path_text];
        shell::output(self.cluster.command("timeout").args(export))?;
        self.compare(&std::fs::read(&path)?).context("in the cluster")
    }

    fn kill(&mut self, number: usize) -> Result<()> {
        let host = &mut self.hosts.all[number];
        host.crashed = Some(host.daemon.take().context("its daemon runs")?.crash()?);
        Ok(())
    }

    fn start(&mut self, number: usize) -> Result<()> {
        let host = &mut self.hosts.all[number];
        host.daemon = Some(host.crashed.take().context("it does not run")?.restart()?);
        Ok(())
    }

    /// Waits until the primary serves the image without a log, and has logged why.
    fn await_release(&self) -> Result<()> {
        let primary = self.hosts.primary;
        let mut last = None;
        let released = || {
            last = self.info(primary).ok()?;
            last.as_ref().is_none_or(|log| log["state"] == "off").then_some(())
        };
        shell::wait_for(PATIENCE, released).with_context(|| format!("it keeps its log: {last:?}"))?;
        let log = self.hosts.primary().daemon().log();
        ensure!(log.contains("a write log in memory has no complete replica"), "no event:\n{log}");
        Ok(())
    }

    /// Expects that a command fails at a host, and that it says all of this.
    fn refused(&self, host: usize, arguments: &[&str], says: &[&str]) -> Result<()> {
        let answer = self.hosts.all[host].command(arguments);
        let text = answer.err().map(|error| format!("{error:#}"));
        let text = text.with_context(|| format!("{arguments:?} at host {host} was not refused"))?;
        for word in says {
            ensure!(text.contains(word), "{arguments:?} at host {host}: {text:?} lacks {word:?}");
        }
        Ok(())
    }
}

/// Refuses logs in memory without replicas that fit; then all hosts offer memory, which no other log gets.
fn refusals(image: &mut MemoryImage<'_>) -> Result<()> {
    let primary = image.hosts.primary;
    image.hosts.primary().command(&["create", IMAGE, "--size", "8M"])?;
    let replica = format!("--replica={}", image.hosts.all[image.replica(1)].address);
    image.refused(primary, &["attach", IMAGE, "--nbd", "--log=dram:16M"], &["needs a replica", "--replica"])?;
    image.refused(primary, &["attach", IMAGE, "--nbd", "--log=dram:/x:16M"], &["no path"])?;
    let offers = ["offers ssd, which can have no copy of a log on dram"];
    image.refused(primary, &["attach", IMAGE, "--nbd", "--log=dram:16M", &replica], &offers)?;
    for host in &mut image.hosts.all {
        let config = host.folder.join("forebay.toml");
        let text = std::fs::read_to_string(&config)?;
        let (before, _) = text.split_once("[replicas]").context("replicas are configured")?;
        std::fs::write(&config, format!("{before}[replicas]\nmedium = 'dram'\nquota = '128M'\n"))?;
        host.daemon = Some(host.daemon.take().context("its daemon runs")?.restart()?);
    }
    let offered = || {
        let text = image.hosts.primary().command(&["--format", "json", "status"]).ok()?;
        let status: Value = serde_json::from_str(&text).ok()?;
        let offers = |peer: &&Value| peer["outgoing"] == true && peer["replicas"][0]["medium"] == "dram";
        (status["peers"].as_array()?.iter().filter(offers).count() == HOSTS - 1).then_some(())
    };
    shell::wait_for(PATIENCE, offered).context("its peers offer memory")?;
    let log = format!("--log=ssd:{}:16M", image.folder.join("logs-of-memory").display());
    image.refused(primary, &["attach", IMAGE, "--nbd", &log, &replica], &["offers dram"])?;
    let huge = ["attach", IMAGE, "--nbd", "--log=dram:200G", &replica];
    image.refused(primary, &huge, &["in memory", "are available", "take a smaller log"])
}

/// Kills the primary under load: another one takes over, and goes on with the log, which has a replica left.
fn primary_killed(image: &mut MemoryImage<'_>) -> Result<()> {
    image.attach()?;
    let text = image.hosts.primary().command(&["status"])?;
    ensure!(text.contains("dram"), "what peers offer: {text}");
    let (former, next) = (image.hosts.primary, image.replica(1));
    let writer = image.write()?;
    writer.proceed()?;
    image.kill(former)?;
    ensure!(image.end(writer)?.is_some(), "its host is gone");
    let host = &image.hosts.all[next];
    host.until(&["log", "takeover", IMAGE])?;
    host.until(&["attach", IMAGE, "--nbd"])?;
    image.hosts.primary = next;
    image.verify().context("after the takeover")?;
    let info = image.info(next)?.context("it has its log")?;
    ensure!(info["state"] == "on" && info["place"]["medium"] == "dram", "it goes on with its log: {info}");
    let writer = image.write()?;
    writer.proceed()?;
    ensure!(image.end(writer)?.is_none(), "a write fails with one replica");
    image.verify()
}

/// Kills the last replica under load: nothing fails, and the image goes on without a log.
fn last_replica_killed(image: &mut MemoryImage<'_>) -> Result<()> {
    let last = (0..HOSTS).find(|host| *host != image.hosts.primary && image.hosts.all[*host].daemon.is_some());
    let writer = image.write()?;
    writer.proceed()?;
    image.kill(last.context("a replica")?)?;
    image.await_release()?;
    writer.proceed()?;
    let error = image.end(writer)?;
    ensure!(error.is_none(), "a write fails: {error:?}");
    image.verify()?;
    for host in 0..HOSTS {
        if image.hosts.all[host].daemon.is_none() {
            image.start(host)?;
        }
    }
    for host in (0..HOSTS).filter(|host| *host != image.hosts.primary) {
        // The first primary's export.
        let _ = image.hosts.all[host].command(&["detach", IMAGE, "--nbd", "--keep-log", "--force"]);
    }
    // A log takes the place of the one that was given up.
    image.attach()?;
    image.verify()
}

/// Kills the primary and starts it again: it has no copy any more, and says who has one.
fn primary_restarted(image: &mut MemoryImage<'_>) -> Result<()> {
    let (former, next) = (image.hosts.primary, image.replica(1));
    let writer = image.write()?;
    writer.proceed()?;
    image.kill(former)?;
    ensure!(image.end(writer)?.is_some(), "its host is gone");
    image.start(former)?;
    let lost = ["was in memory, and ended with its process", "forebay log takeover"];
    image.refused(former, &["attach", IMAGE, "--iscsi"], &lost)?;
    let info = image.info(former)?.context("it has its log")?;
    ensure!(info["state"] == "unreachable", "its copy is gone: {info}");
    image.refused(former, &["log", "discard", IMAGE], &["how much is unknown", "forebay log takeover", "--force"])?;
    image.refused(former, &["rm", IMAGE], &["has a write log"])?;
    // It is connected, and serves nothing.
    let host = &image.hosts.all[next];
    host.until(&["log", "takeover", IMAGE])?;
    host.until(&["attach", IMAGE, "--nbd"])?;
    image.hosts.primary = next;
    image.verify().context("after the takeover")?;
    image.hosts.all[former].until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.hosts.complete(IMAGE, HOSTS).context("the former primary gets a copy")?;
    image.verify()
}

/// Stops the primary: it writes the log back first.
fn primary_stopped(image: &mut MemoryImage<'_>) -> Result<()> {
    let writer = image.write()?;
    writer.proceed()?;
    ensure!(image.end(writer)?.is_none(), "a write fails");
    let host = &mut image.hosts.all[image.hosts.primary];
    host.crashed = Some(host.daemon.take().context("its daemon runs")?.halt()?);
    image.verify_in_cluster()?;
    image.start(image.hosts.primary)?;
    ensure!(image.info(image.hosts.primary)?.is_none(), "it has a log still");
    let serves = || image.verify().ok();
    shell::wait_for(PATIENCE, serves).context("it serves the image without a log")?;
    image.hosts.primary().until(&["detach", IMAGE, "--nbd", "--force"])?;
    image.attach()
}

/// Kills all members at once: what was not written back is lost, which is told; the image has what was written back.
fn all_killed(image: &mut MemoryImage<'_>) -> Result<()> {
    image.hosts.primary().command(&["log", "flush", IMAGE])?;
    image.verify_in_cluster()?;
    let flushed = (image.content.clone(), image.next);
    let writer = image.write()?;
    writer.proceed()?;
    ensure!(image.end(writer)?.is_none(), "a write fails");
    for host in 0..HOSTS {
        image.kill(host)?;
    }
    for host in 0..HOSTS {
        image.start(host)?;
    }
    let primary = image.hosts.primary;
    let lost = ["how much is unknown", "--force"];
    image.refused(primary, &["log", "discard", IMAGE], &lost)?;
    image.hosts.primary().until(&["detach", IMAGE, "--nbd", "--keep-log", "--force"])?;
    image.hosts.primary().until(&["log", "discard", IMAGE, "--force"])?;
    ensure!(image.info(primary)?.is_none(), "it has a log still");
    // Full batches of the rest may have been written back when the log was full.
    (image.content, _) = flushed;
    image.verify_in_cluster()?;
    image.hosts.primary().until(&["rm", IMAGE]).map(drop)
}
