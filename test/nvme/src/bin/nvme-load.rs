//! Loads a namespace from one thread on one connection, and says how fast it was, as JSON.
//!
//! Everything that has arrived is taken up at once, and all commands that take its place are sent at once, as a kernel
//! with batching would.  What is read is left where it arrived: the figures are the target's, not a copy's.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use forebay_nvme_host::codec::{self, Digests, Pdu};
use forebay_nvme_host::target::Uri;

#[derive(Parser)]
struct Arguments {
    /// nvme+tcp://HOST:PORT/NQN#NSID
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
    /// Seconds
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Connections that only stand there
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Header and data digests
    #[arg(long)]
    digests: bool,
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

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000f0eb";

/// A connection as plain as can be.
struct Queue {
    stream: TcpStream,
    input: Vec<u8>,
    from: usize,
    to: usize,
    digests: Digests,
}

impl Queue {
    fn open(arguments: &Arguments, queue: u16, entries: u16, cntlid: u16) -> Result<(Self, u16)> {
        let digests = Digests { header: arguments.digests, data: arguments.digests };
        let stream = TcpStream::connect(&arguments.uri.address).context("connecting")?;
        stream.set_nodelay(true)?;
        let mut this = Self { stream, input: vec![0; 2 << 20], from: 0, to: 0, digests: Digests::default() };
        this.stream.write_all(&codec::ic_req(digests, 0))?;
        ensure!(matches!(this.pdu()?, Pdu::IcResp { .. }), "no ICResp");
        this.digests = digests;
        let (mut sqe, data) = codec::connect(queue, entries, &arguments.uri.subsystem, HOST, cntlid, false);
        sqe = codec::with_data(sqe, data.len(), true);
        let result = this.call(&sqe, &data)?;
        Ok((this, result as u16))
    }

    fn call(&mut self, sqe: &codec::Sqe, data: &[u8]) -> Result<u64> {
        self.stream.write_all(&codec::command(sqe, data, self.digests))?;
        match self.pdu()? {
            Pdu::Response(completion) if completion.status == 0 => Ok(completion.result),
            other => bail!("{other:x?}"),
        }
    }

    fn pdu(&mut self) -> Result<Pdu> {
        loop {
            if let Some((pdu, len)) = codec::decode(&self.input[self.from..self.to], self.digests) {
                self.from += len;
                return Ok(pdu);
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<()> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > self.input.len() / 2 {
            self.input.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let got = self.stream.read(&mut self.input[self.to..])?;
        ensure!(got > 0, "the target has closed the connection");
        self.to += got;
        Ok(())
    }
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
    let nsid = arguments.uri.nsid;
    let (mut admin, cntlid) = Queue::open(&arguments, 0, 32, 0xFFFF)?;
    admin.call(&codec::property(0x14, false, Some(1 | 6 << 16 | 4 << 20)), &[])?;
    let size = identify(&mut admin, nsid)?;
    let entries = (arguments.depth + 1).max(2) as u16;
    let (mut queue, _) = Queue::open(&arguments, 1, entries, cntlid)?;
    let mut standing = Vec::new();
    for id in 0..arguments.idle {
        standing.push(Queue::open(&arguments, 2 + id as u16, 128, cntlid)?);
    }
    if arguments.poll {
        queue.stream.set_nonblocking(true)?;
    }
    let write = matches!(arguments.pattern, Pattern::Randwrite | Pattern::Write);
    let random = matches!(arguments.pattern, Pattern::Randread | Pattern::Randwrite);
    let count = (arguments.block / 512) as u32;
    let places = size / u64::from(count);
    ensure!(places > 0 && arguments.block.is_multiple_of(512), "the namespace has {size} blocks");
    let payload: Vec<u8> = (0..arguments.block).map(|at| (at * 31 % 251) as u8).collect();
    let in_capsule = write && arguments.block <= 16 << 10;

    let mut dice = Dice(0x9E37_79B9_7F4A_7C15);
    let mut next = 0_u64;
    let mut out = Vec::new();
    let mut issue = |out: &mut Vec<u8>, cid: u16, digests: Digests| {
        let place = if random { dice.roll() } else { next };
        next += 1;
        let opcode = if write { 1 } else { 2 };
        let mut sqe = codec::blocks(opcode, nsid, place % places * u64::from(count), count);
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        let sqe = codec::with_data(sqe, arguments.block, in_capsule);
        if digests == Digests::default() {
            // What `codec::command` does, without a vector each time.
            let data: &[u8] = if in_capsule { &payload } else { &[] };
            let len = (72 + data.len()) as u32;
            out.extend_from_slice(&[4, 0, 72, if data.is_empty() { 0 } else { 72 }]);
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(&sqe);
            out.extend_from_slice(data);
        } else {
            out.extend_from_slice(&codec::command(&sqe, if in_capsule { &payload } else { &[] }, digests));
        }
    };
    let digests = queue.digests;
    let begun = Instant::now();
    let until = begun + Duration::from_secs_f64(arguments.seconds);
    let mut started = vec![begun; arguments.depth];
    for cid in 0..arguments.depth {
        issue(&mut out, cid as u16, digests);
    }
    send(&mut queue.stream, &mut out)?;
    let (mut done, mut open) = (0_u64, arguments.depth);
    let mut latencies: Vec<u32> = Vec::with_capacity(1 << 20);
    let mut ending = false;
    while open > 0 {
        match queue.fill() {
            Ok(()) => {}
            Err(error) if error.downcast_ref::<std::io::Error>().is_some_and(is_would_block) => {
                std::hint::spin_loop();
                continue;
            }
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        ending |= now >= until;
        // What is whole is looked at in place.
        while queue.to - queue.from >= 24 {
            let head = &queue.input[queue.from..queue.to];
            let len = u32::from_le_bytes(head[4..8].try_into()?) as usize;
            if head.len() < len {
                break;
            }
            let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
            let cid = match head[0] {
                7 if head[1] & 8 != 0 => Some(word(8)),
                7 => None,
                5 => {
                    ensure!(word(22) >> 1 & 0x7FF == 0, "a command failed with {:#x}", word(22) >> 1 & 0x7FF);
                    Some(word(20))
                }
                9 => {
                    let (cid, tag) = (word(8), word(10));
                    let pdu = codec::data(cid, tag, 0, &payload, true, digests);
                    out.extend_from_slice(&pdu);
                    None
                }
                kind => bail!("a PDU of type {kind}"),
            };
            queue.from += len;
            let Some(cid) = cid else { continue };
            done += 1;
            let place = usize::from(cid);
            if latencies.len() < 4 << 20 {
                latencies.push(now.duration_since(started[place]).as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            if ending {
                open -= 1;
            } else {
                started[place] = now;
                issue(&mut out, cid, digests);
            }
        }
        send(&mut queue.stream, &mut out)?;
    }
    let took = begun.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let at = |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |&ns| f64::from(ns) / 1e3);
    println!(
        "{{\"iops\": {:.0}, \"mb_per_s\": {:.1}, \"requests\": {done}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \"mean_us\": {:.1}}}",
        done as f64 / took,
        done as f64 * arguments.block as f64 / took / 1e6,
        at(0.5),
        at(0.99),
        took * 1e6 * arguments.depth as f64 / done.max(1) as f64
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

/// Logical blocks of a namespace.
fn identify(admin: &mut Queue, nsid: u32) -> Result<u64> {
    let sqe = codec::with_data(codec::sqe(0x06, nsid), 4096, false);
    let digests = admin.digests;
    admin.stream.write_all(&codec::command(&sqe, &[], digests))?;
    let Pdu::Data { data, success, .. } = admin.pdu()? else { bail!("no data") };
    if !success {
        ensure!(matches!(admin.pdu()?, Pdu::Response(completion) if completion.status == 0), "identify");
    }
    Ok(u64::from_le_bytes(data[..8].try_into()?))
}
