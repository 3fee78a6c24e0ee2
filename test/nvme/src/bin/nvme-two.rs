//! Hosts that share one namespace of two daemons, and preempt each other.  Prints a line for each property that holds.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, sqe, with};
use forebay_nvme_host::target::Uri;
use forebay_reactor::{Addr, DriverChoice, Reactor, sleep, spawn, timeout};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Two hosts register, each with its own daemon, and take the namespace from each other while the other writes
    Take {
        first: Uri,
        second: Uri,
        /// Number of rounds
        #[arg(long, default_value_t = 10)]
        rounds: u64,
    },
    /// A host that never registered is kept out
    Held { uri: Uri },
    /// A host that never registered may write
    Free { uri: Uri },
}

const NAMES: [&str; 3] = [
    "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-0000000000a1",
    "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-0000000000b2",
    "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-0000000000c3",
];
const KEYS: [u64; 3] = [0xA1, 0xB2, 0xC3];
const CONFLICT: u16 = 0x083;
/// Status code "Command Interrupted": the command has to be retried.
const INTERRUPTED: u16 = 0x021;
const REGISTER: u8 = 0x0D;
const REPORT: u8 = 0x0E;
const ACQUIRE: u8 = 0x11;
const BLOCK: usize = 512;
/// Writes in flight.
const DEPTH: usize = 16;
/// Timeout for any other operation.
const PATIENCE: Duration = Duration::from_secs(600);

/// Host with a queue at one daemon.
struct Host {
    number: usize,
    nsid: u32,
    admin: Client,
    io: Client,
}

impl Host {
    async fn connect(uri: &Uri, number: usize) -> Result<Self> {
        let addr = Addr::Tcp(uri.address.parse().context("IP:PORT")?);
        let (none, name) = (Digests::default(), NAMES[number]);
        let (admin, cntlid) = Client::admin(&addr, none, &uri.subsystem, name).await?;
        let io = Client::io(&addr, none, &uri.subsystem, name, cntlid, 1).await?;
        Ok(Self { number, nsid: uri.nsid, admin, io })
    }

    /// Returns the status of a command, after retries.
    async fn status(&mut self, command: [u8; 64], data: &[u8]) -> io::Result<u16> {
        loop {
            match self.io.run(command, data, 0).await?.completion.status {
                INTERRUPTED => {}
                status => return Ok(status),
            }
        }
    }

    async fn ask(&mut self, opcode: u8, action: u32, current: u64, new: u64) -> io::Result<u16> {
        let keys = [current.to_le_bytes(), new.to_le_bytes()].concat();
        self.status(with(sqe(opcode, self.nsid), 10, action), &keys).await
    }

    async fn register(&mut self) -> Result<()> {
        let status = self.ask(REGISTER, 0, 0, KEYS[self.number]).await?;
        ensure!(status == 0, "registering: {status:#x}");
        Ok(())
    }

    async fn write(&mut self, value: u64) -> io::Result<u16> {
        self.status(blocks(1, self.nsid, 0, 1), &of(value)).await
    }

    async fn read(&mut self) -> Result<u64> {
        let done = self.io.run(blocks(2, self.nsid, 0, 1), &[], BLOCK).await?;
        ensure!(done.completion.status == 0, "reading: {:#x}", done.completion.status);
        Ok(u64::from_le_bytes(done.data[..8].try_into()?))
    }

    async fn registrants(&mut self) -> Result<u16> {
        let report = with(with(sqe(REPORT, self.nsid), 10, 1023), 11, 1);
        let done = self.io.run(report, &[], 4096).await?;
        ensure!(done.completion.status == 0, "a report: {:#x}", done.completion.status);
        Ok(u16::from_le_bytes([done.data[5], done.data[6]]))
    }
}

fn of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(BLOCK / 8)
}

/// Writes at full speed until a reservation conflict; returns the number of completed writes.
async fn write_until_kept_out(mut host: Host, begun: Rc<Cell<u64>>, from: u64) -> Result<(Host, u64)> {
    let (mut underway, mut done, mut out) = (0, 0, false);
    while !out || underway > 0 {
        while !out && underway < DEPTH {
            begun.set(begun.get() + 1);
            host.io.start(blocks(1, host.nsid, 0, 1), &of(from + begun.get()), 0).await?;
            underway += 1;
        }
        let status = host.io.any().await?.completion.status;
        underway -= 1;
        match status {
            0 => done += 1,
            CONFLICT => out = true,
            INTERRUPTED => {}
            other => anyhow::bail!("writing: {other:#x}"),
        }
    }
    Ok((host, done))
}

async fn take(first: &Uri, second: &Uri, rounds: u64) -> Result<()> {
    let mut holder = Host::connect(first, 0).await?;
    let mut other = Host::connect(second, 1).await?;
    holder.register().await?;
    other.register().await?;
    ensure!((holder.registrants().await?, other.registrants().await?) == (2, 2), "not two registrants");
    // Write exclusive.
    let status = holder.ask(ACQUIRE, 1 << 8, KEYS[0], 0).await?;
    ensure!(status == 0, "reserving: {status:#x}");
    ensure!(other.write(1).await? == CONFLICT, "the other daemon admits a write");
    ensure!(holder.write(2).await? == 0 && other.read().await? == 2, "a write of the reservation's holder");
    println!("ok a reservation that one daemon was asked for keeps hosts out at the other");
    let mut total = 0;
    for round in 0..rounds {
        let event = holder.admin.start(sqe(0x0C, 0), &[], 0).await?;
        let begun = Rc::new(Cell::new(0));
        let number = holder.number;
        let writing = spawn(write_until_kept_out(holder, begun.clone(), round << 32));
        while begun.get() < 200 + 77 * round {
            sleep(Duration::from_millis(1)).await;
        }
        // Exclusive access or write exclusive; preempted, alternately with abort.
        let kind = 1 + (round as u32 & 1);
        let action = 1 + (round as u32 >> 1 & 1);
        let status = other.ask(ACQUIRE, action | kind << 8, KEYS[other.number], KEYS[number]).await?;
        ensure!(status == 0, "round {round}: preempting: {status:#x}");
        let value = other.read().await?;
        let kept_out = timeout(PATIENCE, writing).await;
        let (victim, done) = kept_out.map_err(|_| anyhow::anyhow!("round {round}: writes are still admitted"))??;
        total += done;
        ensure!(
            other.read().await? == value,
            "round {round}: a write was executed after the preemption was acknowledged"
        );
        holder = victim;
        let told = timeout(PATIENCE, holder.admin.finish(event)).await;
        let told = told.map_err(|_| anyhow::anyhow!("round {round}: the preempted host was not notified"))??;
        ensure!(told.completion.result == 6 | 0x80 << 16, "round {round}: told {:#x}", told.completion.result);
        // The log page is read so that the next event is reported, too.
        let log = with(sqe(0x02, 0xFFFF_FFFF), 10, 0x80 | 15 << 16);
        holder.admin.run(log, &[], 64).await?;
        holder.register().await?;
        ensure!(other.write(round).await? == 0, "round {round}: the new holder cannot write");
        std::mem::swap(&mut holder, &mut other);
    }
    println!(
        "ok {rounds} times the namespace was taken by the other daemon, over {total} writes; nothing landed later"
    );
    Ok(())
}

async fn stranger(uri: &Uri) -> Result<u16> {
    Ok(Host::connect(uri, 2).await?.write(99).await?)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    Reactor::system(DriverChoice::Auto)?.block_on(async {
        match &arguments.what {
            What::Take { first, second, rounds } => take(first, second, *rounds).await,
            What::Held { uri } => {
                let status = stranger(uri).await?;
                ensure!(status == CONFLICT, "a write of an unregistered host: {status:#x}");
                Ok(())
            }
            What::Free { uri } => {
                let status = stranger(uri).await?;
                ensure!(status == 0, "a write of an unregistered host: {status:#x}");
                Ok(())
            }
        }
    })
}
