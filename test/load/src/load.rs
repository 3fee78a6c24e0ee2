//! Load generator for one thread on one connection, with its measurements.
//!
//! Everything that has arrived is processed at once, and all commands that replace completed ones are sent at once, as
//! a kernel with batching would do.  Data read is left where it arrived: the figures are the target's, not a copy's.

use std::io::{Error, ErrorKind, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::dice::Dice;

/// Maximum number of recorded latencies; those of later commands are not counted.
const LATENCIES_MAX: usize = 4 << 20;
/// Block size in bytes that both protocols use.
const BLOCK: usize = 512;

/// Access pattern of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Reads at random places.
    Randread,
    /// Writes at random places.
    Randwrite,
    /// Reads one place after the other.
    Read,
    /// Writes one place after the other.
    Write,
}

impl Pattern {
    /// Returns true if the pattern writes.
    pub fn writes(self) -> bool {
        matches!(self, Pattern::Randwrite | Pattern::Write)
    }

    fn is_random(self) -> bool {
        matches!(self, Pattern::Randread | Pattern::Randwrite)
    }
}

/// A load, as it is asked for.
#[derive(Args, Clone, Debug)]
pub struct Load {
    /// Access pattern
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pub pattern: Pattern,
    /// Bytes a command, a multiple of 512
    #[arg(long, default_value_t = 4096)]
    pub block: usize,
    /// Commands in flight
    #[arg(long, default_value_t = 32)]
    pub depth: u16,
    /// Seconds; none with --idle only waits for a line on the standard input
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Goes over the volume once, however long it takes
    #[arg(long)]
    pub once: bool,
    /// Ask again and again instead of sleeping in the kernel
    #[arg(long)]
    pub poll: bool,
}

/// Command to send.
#[derive(Debug)]
pub struct Command<'a> {
    /// Tag, unique among the commands in flight.
    pub tag: u16,
    /// First block, in units of 512 bytes.
    pub block: u64,
    /// Number of blocks.
    pub count: u32,
    /// Data to write; empty for a read.
    pub data: &'a [u8],
}

/// Initiator connection, as a load uses it.
pub trait Session {
    /// Returns the socket.
    fn stream(&mut self) -> &mut TcpStream;

    /// Receives available bytes.
    ///
    /// # Errors
    /// Of the socket, as they are.
    fn fill(&mut self) -> Result<()>;

    /// Converts plaintext output to what the socket gets.
    ///
    /// # Errors
    /// When that is not possible.
    fn seal(&mut self, _: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    /// Appends a command to the output.
    fn command(&mut self, out: &mut Vec<u8>, command: &Command<'_>);

    /// Processes received bytes until a command completes, and returns its tag.  Solicited parts of `data` are appended
    /// to the output.
    ///
    /// # Errors
    /// When a command failed.
    fn done(&mut self, out: &mut Vec<u8>, data: &[u8]) -> Result<Option<u16>>;
}

/// Runs a load on a volume of `size` bytes; returns the results as JSON.
///
/// # Errors
/// When a command fails, or the connection.
pub fn run<S: Session>(session: &mut S, size: u64, load: &Load) -> Result<String> {
    let places = size / load.block.max(1) as u64;
    ensure!(load.block.is_multiple_of(BLOCK) && places > 0 && load.depth > 0, "the volume has {size} bytes");
    let count = (load.block / BLOCK) as u32;
    let payload: Vec<u8> = (0..load.block).map(|at| (at * 31 % 251) as u8).collect();
    let data: &[u8] = if load.pattern.writes() { &payload } else { &[] };
    session.stream().set_nonblocking(load.poll)?;

    let mut dice = Dice::new(1);
    let mut next = 0;
    let mut issue = |session: &mut S, out: &mut Vec<u8>, tag: u16| {
        let place = if load.pattern.is_random() { dice.roll() } else { next } % places;
        next += 1;
        session.command(out, &Command { tag, block: place * u64::from(count), count, data });
    };
    let begun = Instant::now();
    let until = begun + Duration::from_secs_f64(load.seconds);
    let mut started = vec![begun; usize::from(load.depth)];
    let mut out = Vec::new();
    for tag in 0..load.depth {
        issue(session, &mut out, tag);
    }
    session.seal(&mut out)?;
    send(session.stream(), &mut out)?;
    let (mut done, mut open, mut ending) = (0_u64, u64::from(load.depth), false);
    let mut latencies: Vec<u32> = Vec::with_capacity(1 << 20);
    while open > 0 {
        match session.fill() {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<Error>().is_some_and(is_would_block) => {
                std::hint::spin_loop();
                continue;
            }
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        ending |= !load.once && now >= until;
        while let Some(tag) = session.done(&mut out, &payload)? {
            done += 1;
            let begun = &mut started[usize::from(tag)];
            if latencies.len() < LATENCIES_MAX {
                latencies.push(now.duration_since(*begun).as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            ending |= load.once && done + open > places;
            if ending {
                open -= 1;
            } else {
                *begun = now;
                issue(session, &mut out, tag);
            }
        }
        session.seal(&mut out)?;
        send(session.stream(), &mut out)?;
    }
    Ok(figures(begun.elapsed(), done, load.block, u64::from(load.depth), latencies))
}

/// Returns the results of a load as JSON: `done` requests of `block` bytes, `depth` at a time, with their latencies in
/// nanoseconds.
pub fn figures(took: Duration, done: u64, block: usize, depth: u64, mut latencies: Vec<u32>) -> String {
    latencies.sort_unstable();
    let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |&ns| f64::from(ns) / 1e3);
    let seconds = took.as_secs_f64();
    format!(
        "{{\"iops\": {:.0}, \"mb_per_s\": {:.1}, \"requests\": {done}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \
         \"mean_us\": {:.1}}}",
        done as f64 / seconds,
        done as f64 * block as f64 / seconds / 1e6,
        at(0.5),
        at(0.99),
        seconds * 1e6 * depth as f64 / done.max(1) as f64
    )
}

/// Returns true if a nonblocking socket is not ready.
pub fn is_would_block(error: &Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

/// Sends all bytes, whether the socket blocks or not.
///
/// # Errors
/// Of the socket.
pub fn send(stream: &mut TcpStream, out: &mut Vec<u8>) -> Result<()> {
    let mut rest = &out[..];
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(sent) => rest = &rest[sent..],
            Err(error) if is_would_block(&error) => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    out.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    /// Trivial test protocol: a command is its tag, and so is its response.
    struct Echo {
        stream: TcpStream,
        got: Vec<u8>,
        blocks: Vec<u64>,
    }

    impl Session for Echo {
        fn stream(&mut self) -> &mut TcpStream {
            &mut self.stream
        }

        fn fill(&mut self) -> Result<()> {
            let mut bytes = [0; 16];
            let got = self.stream.read(&mut bytes)?;
            ensure!(got > 0, "closed");
            self.got.extend_from_slice(&bytes[..got]);
            Ok(())
        }

        fn command(&mut self, out: &mut Vec<u8>, command: &Command<'_>) {
            self.blocks.push(command.block);
            out.push(command.tag as u8);
        }

        fn done(&mut self, _: &mut Vec<u8>, _: &[u8]) -> Result<Option<u16>> {
            Ok(self.got.pop().map(u16::from))
        }
    }

    fn echo() -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("connects");
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("accepts");
            let mut bytes = [0; 16];
            while let Ok(got @ 1..) = peer.read(&mut bytes) {
                if peer.write_all(&bytes[..got]).is_err() {
                    break;
                }
            }
        });
        Echo { stream, got: Vec::new(), blocks: Vec::new() }
    }

    fn load(pattern: Pattern, once: bool, poll: bool) -> Load {
        Load { pattern, block: 1024, depth: 3, seconds: 0.02, once, poll }
    }

    #[test]
    fn once_is_every_place_once() {
        for poll in [false, true] {
            let mut echo = echo();
            run(&mut echo, 20 * 1024, &load(Pattern::Write, true, poll)).expect("runs");
            assert_eq!(echo.blocks, (0..20).map(|place| place * 2).collect::<Vec<_>>());
        }
    }

    #[test]
    fn chance_stays_within_the_volume() {
        let mut echo = echo();
        let said = run(&mut echo, 20 * 1024 + 700, &load(Pattern::Randread, false, false)).expect("runs");
        assert!(echo.blocks.iter().all(|block| *block < 40 && block.is_multiple_of(2)));
        assert!(said.contains(&format!("\"requests\": {},", echo.blocks.len())), "{said}");
    }

    #[test]
    fn a_volume_that_is_too_small_is_said_to_be() {
        assert!(run(&mut echo(), 1000, &load(Pattern::Read, false, false)).is_err());
    }
}
