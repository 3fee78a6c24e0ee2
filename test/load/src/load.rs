//! A load from one thread on one connection, and how fast it was.
//!
//! Everything that has arrived is taken up at once, and all commands that take its place are sent at once, as a kernel
//! with batching would.  What is read is left where it arrived: the figures are the target's, not a copy's.

use std::io::{Error, ErrorKind, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::dice::Dice;

/// Latencies that are kept; those of later commands are not counted.
const LATENCIES_MAX: usize = 4 << 20;
/// Both protocols count in blocks of so many bytes.
const BLOCK: usize = 512;

/// What is done.
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
    /// It writes.
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
    /// What is done
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pub pattern: Pattern,
    /// Bytes a command, a multiple of 512
    #[arg(long, default_value_t = 4096)]
    pub block: usize,
    /// Commands under way
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

/// A command to be sent.
#[derive(Debug)]
pub struct Command<'a> {
    /// Its number among those under way.
    pub tag: u16,
    /// The first block of 512 bytes.
    pub block: u64,
    /// So many of them.
    pub count: u32,
    /// What is written; empty to read.
    pub data: &'a [u8],
}

/// The connection of an initiator, as a load uses it.
pub trait Session {
    /// The socket.
    fn stream(&mut self) -> &mut TcpStream;

    /// Receives what there is.
    ///
    /// # Errors
    /// Of the socket, as they are.
    fn fill(&mut self) -> Result<()>;

    /// Makes of what is to be sent what the socket gets.
    ///
    /// # Errors
    /// When that cannot be done.
    fn seal(&mut self, _: &mut Vec<u8>) -> Result<()> {
        Ok(())
    }

    /// Appends a command to what will be sent.
    fn command(&mut self, out: &mut Vec<u8>, command: &Command<'_>);

    /// Takes up what was received, until a command is done: its number.  What the target asks for of `data` is appended to
    /// what will be sent.
    ///
    /// # Errors
    /// When a command failed.
    fn done(&mut self, out: &mut Vec<u8>, data: &[u8]) -> Result<Option<u16>>;
}

/// Loads a volume of `size` bytes; what is said of it is JSON.
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
    Ok(figures(begun.elapsed(), done, load, latencies))
}

fn figures(took: Duration, done: u64, load: &Load, mut latencies: Vec<u32>) -> String {
    latencies.sort_unstable();
    let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |&ns| f64::from(ns) / 1e3);
    let seconds = took.as_secs_f64();
    format!(
        "{{\"iops\": {:.0}, \"mb_per_s\": {:.1}, \"requests\": {done}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \
         \"mean_us\": {:.1}}}",
        done as f64 / seconds,
        done as f64 * load.block as f64 / seconds / 1e6,
        at(0.5),
        at(0.99),
        seconds * 1e6 * f64::from(load.depth) / done.max(1) as f64
    )
}

/// A socket that does not wait has nothing now.
pub fn is_would_block(error: &Error) -> bool {
    error.kind() == ErrorKind::WouldBlock
}

/// Sends everything, whether the socket waits or not.
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

    /// A protocol of bytes: a command is its number, and so is its answer.
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
