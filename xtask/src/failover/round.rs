//! One loss of the primary under load, and what must hold afterwards.

use std::sync::atomic::Ordering;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::hosts::{Host, Hosts};
use super::losses::{self, Loss};
use super::{FIO_MIB, HOSTS, LAST_BLOCK, NUMBERED, PATIENCE, VOLUME_BYTES};
use crate::fio;
use crate::nbd::Client;
use crate::numbered::{BLOCK, Ending, Random, Writer};
use crate::shell::{self, Process};

/// Writes that a former primary gets after another one has taken over; they fit the buffer of a socket.
const RIVALS: u64 = 16;

/// Writers of numbered blocks.
pub struct Writers {
    /// Writers that write until the primary is lost, each over a connection of its own.
    pub all: Vec<Writer>,
    /// Writer of blocks that are overwritten at the new primary, while the former one gets writes to them.
    pub contested: Writer,
    /// Number of answered writes.
    pub written: u64,
}

/// Loss of a round, and the other host that it concerns.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Way in which the primary is lost.
    pub loss: Loss,
    /// Host that takes over, or the replica whose path is lost.
    pub other: usize,
}

/// Loses the primary under load, takes over, verifies everything, and brings the former primary back; returns the time from
/// the loss to the first answered write, without the pause before anybody acts, and fio's URI.
pub fn run(
    hosts: &mut Hosts,
    writers: &mut Writers,
    uri: &str,
    round: Round,
    random: &mut Random,
) -> Result<(Duration, String)> {
    let Round { loss, other } = round;
    let former = hosts.primary;
    let mut writing = fio_command(uri, "randwrite");
    writing.args(["--iodepth=8", "--do_verify=0", "--fsync=32", "--time_based", "--runtime=120"]);
    writing.args(["--randrepeat=0", "--norandommap", &format!("--randseed={}", random.next() >> 8)]);
    let fio = Process::start(&mut writing, &hosts.primary().folder.join("fio.log"))?;
    let run = Duration::from_millis(150 + random.next() % 300);
    let ending = Ending::default();
    let socket = hosts.primary().daemon().socket();
    let Writers { all, contested, written } = writers;
    let (took, next) = std::thread::scope(|scope| -> Result<_> {
        let threads: Vec<_> =
            all.iter_mut().map(|writer| scope.spawn(|| writer.write_until(&socket, NUMBERED, &ending))).collect();
        let load = Load { threads, fio, ending: &ending };
        // The load lasts for a time that the seed draws.
        std::thread::sleep(run);
        let done = match loss {
            Loss::PeerPathLost => lose_replica(hosts, other, load, written, random).map(|took| (took, uri.to_owned())),
            _ => lose_primary(hosts, (uri, loss, other), load, (contested, written), random),
        };
        if done.is_err() {
            // Writers at a daemon that neither fails nor answers would wait for minutes.
            ending.killed.store(true, Ordering::SeqCst);
            ending.stopped.store(true, Ordering::SeqCst);
            if let Some(daemon) = &hosts.all[former].daemon {
                shell::signal("KILL", &[daemon.id()]);
            }
        }
        done
    })?;
    verify(hosts, writers, &next)?;
    if loss == Loss::Suspended {
        // All of its images are fenced with their client.  Others go on with a new client.
        let host = &mut hosts.all[former];
        host.crashed = Some(host.daemon.take().context("its daemon runs")?.crash()?);
    }
    if loss.moves() {
        hosts.bring_back(former)?;
    }
    hosts.filled()?;
    Ok((took, next))
}

/// Clients that write to the primary.
struct Load<'scope, 'env> {
    threads: Vec<ScopedJoinHandle<'scope, Result<u64>>>,
    fio: Process,
    ending: &'env Ending,
}

impl Load<'_, '_> {
    /// Waits until the clients have ended, which must be soon; returns the number of answered writes.
    fn end(mut self, fio_patience: Duration) -> Result<u64> {
        let ended = || self.threads.iter().all(ScopedJoinHandle::is_finished).then_some(());
        shell::wait_for(PATIENCE, ended).context("a client of the former primary gets no answers, and no errors")?;
        let mut written = 0;
        for thread in self.threads {
            written += thread.join().expect("a writer panicked")?;
        }
        if shell::wait_for(fio_patience, || self.fio.ended()).is_none() {
            self.fio.kill()?;
            ensure!(fio_patience < PATIENCE, "fio gets no answers from the former primary, and no errors");
        }
        Ok(written)
    }
}

/// Loses the primary, and lets another host take over while clients of the former one still write.
fn lose_primary(
    hosts: &mut Hosts,
    (uri, loss, to): (&str, Loss, usize),
    load: Load<'_, '_>,
    (contested, written): (&mut Writer, &mut u64),
    random: &mut Random,
) -> Result<(Duration, String)> {
    let former = hosts.primary;
    let rival = loss.leaves_rival();
    let mut straggler = rival.then(|| Client::connect(&hosts.primary().daemon().socket(), NUMBERED)).transpose()?;
    load.ending.killed.store(true, Ordering::SeqCst);
    let mut pause = losses::lose(hosts, loss, to, random)?;
    let lost = Instant::now();
    let next = match loss {
        Loss::Restarted => hosts.restart(former, uri)?,
        _ if hosts.is_automatic && loss.is_noticed() => {
            pause = Duration::ZERO;
            hosts.await_takeover(former)?
        }
        _ => {
            std::thread::sleep(pause);
            hosts.take_over(to, rival)?
        }
    };
    let took = first_write(hosts.primary(), lost)?.saturating_sub(pause);
    if let Some(straggler) = &mut straggler {
        contested.overwrite(&mut Client::connect(&hosts.primary().daemon().socket(), NUMBERED)?)?;
        contested.send_rivals(straggler, RIVALS)?;
    }
    losses::restore(hosts, loss, former)?;
    // fio ends by itself when its server is gone; one that hangs is ended, unless its server must answer it.
    *written += load.end(if rival { PATIENCE } else { Duration::from_secs(1) })?;
    if let Some(mut straggler) = straggler {
        expect_errors(&mut straggler)?;
    }
    Ok((took, next))
}

/// Loses the path between the primary and a replica, which is dropped while the clients go on, and filled under load when the
/// path is back.
fn lose_replica(
    hosts: &mut Hosts,
    replica: usize,
    mut load: Load<'_, '_>,
    written: &mut u64,
    random: &mut Random,
) -> Result<Duration> {
    losses::lose(hosts, Loss::PeerPathLost, replica, random)?;
    let took = first_write(hosts.primary(), Instant::now())?;
    hosts.complete(NUMBERED, HOSTS - 1)?;
    losses::restore(hosts, Loss::PeerPathLost, hosts.primary)?;
    hosts.filled()?;
    let fio = load.fio.ended();
    ensure!(fio.is_none(), "fio ended with {fio:?}, though only a replica was lost");
    load.ending.stopped.store(true, Ordering::SeqCst);
    // fio has no end of its own.
    *written += load.end(Duration::ZERO)?;
    Ok(took)
}

/// Waits for the answers of a former primary to writes that it got after the takeover: all of them must be errors.
fn expect_errors(straggler: &mut Client) -> Result<()> {
    straggler.set_patience(PATIENCE)?;
    for _ in 0..RIVALS {
        match straggler.answer() {
            Ok(answer) => ensure!(
                answer.error != 0,
                "two primaries: the former one acknowledged a write that it got after another one had taken over"
            ),
            Err(error) => {
                let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
                let is_late = matches!(kind, Some(std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut));
                ensure!(
                    !is_late,
                    "the former primary neither answers nor fails a write that it got after the takeover"
                );
                // The connection has ended.
                break;
            }
        }
    }
    Ok(())
}

/// Reads everything back at the primary.
fn verify(hosts: &Hosts, writers: &mut Writers, uri: &str) -> Result<()> {
    std::thread::scope(|scope| {
        let verify = scope.spawn(|| {
            shell::output(fio_command(uri, "read").args(["--iodepth=32", "--do_verify=1", "--verify_fatal=1"]))
        });
        let mut client = Client::connect(&hosts.primary().daemon().socket(), NUMBERED)?;
        for writer in writers.all.iter_mut().chain([&mut writers.contested]) {
            writer.check(&mut client)?;
        }
        verify.join().expect("fio's thread panicked").context("fio finds a block that it did not write")
    })
    .map(drop)
}

/// Writes the last block, which no writer has, as soon as the host answers; returns the time since `lost`.
fn first_write(host: &Host, lost: Instant) -> Result<Duration> {
    let mut client = Client::connect(&host.daemon().socket(), NUMBERED)?;
    ensure!(client.size() == VOLUME_BYTES, "the volume's size changed to {}", client.size());
    client.write(LAST_BLOCK * BLOCK as u64, &[1; BLOCK], false)?;
    let answer = client.answer()?;
    if answer.error != 0 {
        bail!("the first write after a takeover fails with error {}", answer.error);
    }
    Ok(lost.elapsed())
}

/// Returns the command that runs fio on the whole of its volume.
pub fn fio_command(uri: &str, pattern: &str) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.args(fio::nbd(uri)).args(["--name=verify", "--bs=4k", "--verify=crc32c", "--thread"]);
    fio.args([format!("--rw={pattern}"), format!("--size={FIO_MIB}M")]);
    fio
}
