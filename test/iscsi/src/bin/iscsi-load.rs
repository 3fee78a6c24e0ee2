//! Loads a unit from one thread in one session, and says how fast it was, as JSON.
//!
//! Everything that has arrived is taken up at once, and all commands that take its place are sent at once, as a kernel
//! with batching would.  What is read is left where it arrived: the figures are the target's, not a copy's.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use forebay_iscsi::wire::{Response, response, response_flag};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::plain::Session;
use forebay_iscsi_host::target::Uri;

#[derive(Parser)]
struct Arguments {
    /// iscsi://HOST:PORT/TARGET/LUN
    uri: Uri,
    /// What is done
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pattern: Pattern,
    /// Bytes a command, a multiple of 512
    #[arg(long, default_value_t = 4096)]
    block: usize,
    /// Commands under way
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Seconds; none with --idle only logs in and waits for a line on the standard input
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Sessions that only stand there
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// The sessions that only stand there use so many units, from the one of the URI on
    #[arg(long, default_value_t = 1)]
    units: u16,
    /// Goes over the unit once, however long it takes
    #[arg(long)]
    once: bool,
    /// Ask again and again instead of sleeping in the kernel
    #[arg(long)]
    poll: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pattern {
    Randread,
    Randwrite,
    Read,
    Write,
}

const HOST: &str = "iqn.2026-11.io.forebay:load";
/// Sessions that go by one initiator's name.
const SESSIONS_A_HOST: usize = 128;

fn open(uri: &Uri, number: usize) -> Result<Session> {
    let initiator = format!("{HOST}-{}", number / SESSIONS_A_HOST);
    Session::open(uri, &initiator, number as u16, if number == 0 { 4 << 20 } else { 8192 })
}

/// Numbers that look like chance.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut standing = Vec::new();
    for number in 1..=arguments.idle {
        let lun = arguments.uri.lun + (number % usize::from(arguments.units)) as u16;
        let mut session = open(&Uri { lun, ..arguments.uri.clone() }, number)?;
        session.size()?;
        standing.push(session);
    }
    if arguments.seconds <= 0.0 {
        println!("{} sessions", standing.len());
        std::io::stdin().read_line(&mut String::new())?;
        return Ok(());
    }
    let mut session = open(&arguments.uri, 0)?;
    let size = session.size()?;
    let places = size / arguments.block as u64;
    ensure!(places > 0 && arguments.block.is_multiple_of(512), "the unit has {size} bytes");
    let writes = matches!(arguments.pattern, Pattern::Randwrite | Pattern::Write);
    let random = matches!(arguments.pattern, Pattern::Randread | Pattern::Randwrite);
    let payload: Vec<u8> = (0..arguments.block).map(|at| (at * 31 % 251) as u8).collect();
    let blocks = (arguments.block / 512) as u32;
    if arguments.poll {
        session.stream.set_nonblocking(true)?;
    }

    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let mut next = 0_u64;
    let mut issue = |session: &mut Session, out: &mut Vec<u8>, itt: u32| {
        let place = if random { dice.roll() } else { next } % places * u64::from(blocks);
        next += 1;
        match writes {
            true => session.command(out, itt, cdb::write(place, blocks), payload.len(), &payload),
            false => session.command(out, itt, cdb::read(place, blocks), payload.len(), &[]),
        }
    };
    let begun = Instant::now();
    let until = begun + Duration::from_secs_f64(arguments.seconds);
    let mut started = vec![begun; arguments.depth];
    let mut out = Vec::new();
    for itt in 0..arguments.depth {
        issue(&mut session, &mut out, itt as u32);
    }
    send(&mut session.stream, &mut out)?;
    let (mut done, mut open, mut ending) = (0_u64, arguments.depth, false);
    let mut latencies: Vec<u32> = Vec::with_capacity(1 << 20);
    while open > 0 {
        match session.fill() {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(is_would_block) => {
                std::hint::spin_loop();
                continue;
            }
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        ending |= match arguments.once {
            true => done + open as u64 >= places,
            false => now >= until,
        };
        while let Some((header, ..)) = session.peek() {
            let itt = header.itt.get();
            let status = match header.opcode {
                response::DATA_IN if header.flags & response_flag::STATUS == 0 => continue,
                response::DATA_IN | response::SCSI => header.specific[1],
                response::R2T => {
                    session.answer(&mut out, header.view(), &payload);
                    continue;
                }
                response::NOP_IN => continue,
                opcode => bail!("a PDU with opcode {opcode:#04x}"),
            };
            ensure!(status == 0, "a command failed with status {status}");
            session.exp_stat_sn = header.view::<Response>().stat_sn.get().wrapping_add(1);
            done += 1;
            let place = itt as usize;
            if latencies.len() < 4 << 20 {
                latencies.push(now.duration_since(started[place]).as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            if ending {
                open -= 1;
            } else {
                started[place] = now;
                issue(&mut session, &mut out, itt);
            }
        }
        send(&mut session.stream, &mut out)?;
    }
    let took = begun.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |&ns| f64::from(ns) / 1e3);
    println!(
        "{{\"iops\": {:.0}, \"mb_per_s\": {:.1}, \"requests\": {done}, \"p50_us\": {:.1}, \"p99_us\": {:.1}}}",
        done as f64 / took,
        done as f64 * arguments.block as f64 / took / 1e6,
        at(0.5),
        at(0.99),
    );
    drop(standing);
    Ok(())
}

fn is_would_block(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::WouldBlock
}

fn send(stream: &mut TcpStream, out: &mut Vec<u8>) -> Result<()> {
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
