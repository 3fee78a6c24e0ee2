//! Sessions that go wrong, by the million, against a real daemon: none of them may crash it, make it hold on to
//! anything, or disturb another one.
//!
//! Each session is what an initiator would send, with a few things gone wrong by a seed.  It ends in one of three
//! ways: in order, with the target given the last word; cut; or with what is still to come left unread.  Beside them a
//! calm session goes on.  Memory and file descriptors are looked at when a tenth is over, at half, and at the end.

mod iscsi;
mod mutate;
mod nvme;
mod process;
mod tls;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use forebay_load::Dice;
use forebay_nvmf::session::psk::TlsKey;

use process::{Holdings, holdings};

/// Time in which the target must close connections and release their memory.
const PATIENCE: Duration = Duration::from_secs(300);
/// Time to wait for an optional answer: half a PDU has none.
const LOOK: Duration = Duration::from_millis(2);
/// Growth of the memory allowed after the first tenth, in which pools fill, beside a share per session.
const GROWTH_MAX: u64 = 24 << 20;
const GROWTH_PER_SESSION: u64 = 8;
/// And what in the second half, in which nothing new should be needed.
const LATE_GROWTH_MAX: u64 = 8 << 20;
const LATE_GROWTH_PER_SESSION: u64 = 2;

#[derive(Parser)]
struct Arguments {
    /// iscsi://HOST:PORT/TARGET/LUN or nvme+tcp://HOST:PORT/NQN#NSID: what may be written to
    uri: String,
    /// The daemon's process
    #[arg(long)]
    process: u32,
    /// A unit that only the calm initiator sees (iSCSI)
    #[arg(long)]
    calm: Option<String>,
    /// The calm initiator
    #[arg(long, default_value = "iqn.2026-11.io.forebay:calm")]
    calm_initiator: String,
    /// The key for TLS that all hosts have, as 'nvme gen-tls-key' prints it (NVMe/TCP)
    #[arg(long, value_parser = TlsKey::parse)]
    tls_key: Option<TlsKey>,
    /// Sessions
    #[arg(long, default_value_t = 1_000_000)]
    sessions: u64,
    /// End after this many seconds in any case
    #[arg(long)]
    seconds: Option<f64>,
    /// Seed of the mutations
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Sessions at a time
    #[arg(long, default_value_t = 8)]
    threads: u64,
}

enum Target {
    Iscsi(forebay_iscsi_host::target::Uri),
    Nvme(forebay_nvme_host::target::Uri),
}

impl Target {
    fn address(&self) -> Result<SocketAddr> {
        let (Target::Iscsi(forebay_iscsi_host::target::Uri { address, .. })
        | Target::Nvme(forebay_nvme_host::target::Uri { address, .. })) = self;
        address.parse().with_context(|| format!("{address} is no address"))
    }
}

/// State that all threads share.
struct Shared {
    target: Target,
    tls_key: Option<TlsKey>,
    address: SocketAddr,
    next: AtomicU64,
    bytes: AtomicU64,
    hangups: AtomicU64,
    sessions: u64,
    seed: u64,
    until: Option<Instant>,
    stop: AtomicBool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let target = match arguments.uri.starts_with("iscsi://") {
        true => Target::Iscsi(arguments.uri.parse()?),
        false => Target::Nvme(arguments.uri.parse()?),
    };
    let begun = Instant::now();
    let shared = Shared {
        address: target.address()?,
        target,
        tls_key: arguments.tls_key.clone(),
        next: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        hangups: AtomicU64::new(0),
        sessions: arguments.sessions,
        seed: arguments.seed,
        until: arguments.seconds.map(|seconds| begun + Duration::from_secs_f64(seconds)),
        stop: AtomicBool::new(false),
    };
    let [first, half, last] = std::thread::scope(|scope| -> Result<[Holdings; 3]> {
        let calm = scope.spawn(|| calm(&shared, &arguments));
        let work: Vec<_> = (0..arguments.threads)
            .map(|thread| {
                scope.spawn({
                    let shared = &shared;
                    move || work(shared, thread)
                })
            })
            .collect();
        let watched = watch(&shared, arguments.process, || work.iter().all(|thread| thread.is_finished()));
        // A thread that fails stops the others.
        shared.stop.store(true, Ordering::SeqCst);
        for thread in work {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        calm.join().map_err(|_| anyhow::anyhow!("the calm session panicked"))?.context("the calm session")?;
        watched
    })?;
    let done = shared.next.load(Ordering::SeqCst).min(shared.sessions);
    let last = settle(arguments.process, first, last)?;
    println!(
        "{done} sessions in {:.0} s, {} MiB, {} hung up on: memory {}, {} at half, {} MiB, files {} to {}",
        begun.elapsed().as_secs_f64(),
        shared.bytes.load(Ordering::Relaxed) >> 20,
        shared.hangups.load(Ordering::Relaxed),
        first.resident >> 20,
        half.resident >> 20,
        last.resident >> 20,
        first.files,
        last.files
    );
    grown(first, last, GROWTH_MAX + done * GROWTH_PER_SESSION)?;
    grown(half, last, LATE_GROWTH_MAX + done / 2 * LATE_GROWTH_PER_SESSION)
}

/// Fails when more memory is held than before, and more than may be.
fn grown(before: Holdings, now: Holdings, may: u64) -> Result<()> {
    let grown = now.resident.saturating_sub(before.resident);
    ensure!(grown <= may, "the daemon holds {} KiB more than before, of {} KiB that it may", grown >> 10, may >> 10);
    Ok(())
}

/// Looks at the daemon until all is done; what it held when a tenth was, and half, and at the end.
fn watch(shared: &Shared, process: u32, all_done: impl Fn() -> bool) -> Result<[Holdings; 3]> {
    let begun = Instant::now();
    let (mut first, mut half) = (None, None);
    let mut told = Instant::now();
    loop {
        let now = holdings(process)?;
        let done = shared.next.load(Ordering::Relaxed);
        let part = |of: u32, sessions: u64| {
            let over = |until: Instant| Instant::now() >= begun + until.duration_since(begun) / of;
            done >= sessions || shared.until.is_some_and(over)
        };
        if first.is_none() && part(5, shared.sessions / 10) {
            first = Some(now);
        }
        if half.is_none() && part(2, shared.sessions / 2) {
            half = Some(now);
        }
        if all_done() {
            return Ok([first.unwrap_or(now), half.unwrap_or(now), now]);
        }
        if told.elapsed() > Duration::from_secs(20) {
            told = Instant::now();
            println!("{done} sessions, {} MiB resident, {} files", now.resident >> 20, now.files);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until the daemon holds no more files than a quiet one.
fn settle(process: u32, first: Holdings, last: Holdings) -> Result<Holdings> {
    let begun = Instant::now();
    let most = first.files.min(last.files);
    loop {
        let now = holdings(process)?;
        // Those of the calm session and of the threads are gone, too.
        if now.files <= most {
            return Ok(now);
        }
        ensure!(begun.elapsed() < PATIENCE, "{} files are still open, {most} were", now.files);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Goes on calmly until the others are done.
fn calm(shared: &Shared, arguments: &Arguments) -> Result<()> {
    let mut iscsi = match (&shared.target, &arguments.calm) {
        (Target::Iscsi(_), Some(uri)) => Some(iscsi::Calm::open(&uri.parse()?, &arguments.calm_initiator)?),
        _ => None,
    };
    let mut nvme = match &shared.target {
        Target::Nvme(uri) => Some(nvme::Calm::open(uri, 0, shared.tls_key.as_ref())?),
        Target::Iscsi(_) => None,
    };
    for round in 0.. {
        if shared.stop.load(Ordering::SeqCst) {
            break;
        }
        if let Some(iscsi) = &mut iscsi {
            iscsi.turn(round)?;
        }
        if let Some(nvme) = &mut nvme {
            nvme.turn()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// One session after the other.
fn work(shared: &Shared, thread: u64) -> Result<()> {
    let mut controller: Option<nvme::Calm> = None;
    loop {
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let over = shared.until.is_some_and(|until| Instant::now() >= until);
        if number >= shared.sessions || over || shared.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut dice = Dice::new(shared.seed.wrapping_mul(0x1_0000_0001).wrapping_add(number));
        let mut host = String::new();
        let mut pdus = match &shared.target {
            Target::Iscsi(uri) => iscsi::session(&mut dice, uri),
            Target::Nvme(uri) => {
                let of_io = dice.once_in(2);
                if of_io && (number.is_multiple_of(16) || controller.is_none()) {
                    // A queue that breaks the rules may have taken its controller with it.
                    let alive = controller.as_mut().is_some_and(|calm| calm.turn().is_ok());
                    if !alive {
                        controller = Some(nvme::Calm::open(uri, 1 + thread as usize, shared.tls_key.as_ref())?);
                    }
                }
                let of = controller.as_ref().filter(|_| of_io).map(nvme::Calm::controller);
                host = of.map_or_else(|| nvme::any_host(&mut dice), |(_, host)| host.to_owned());
                nvme::session(&mut dice, uri, &host, of.map(|(cntlid, _)| cntlid))
            }
        };
        // One in sixteen is as it should be.
        if !dice.once_in(16) {
            mutate::mutate(&mut dice, &mut pdus);
        }
        run(shared, &mut dice, &host, pdus.concat())
            .with_context(|| format!("session {number} of seed {}", shared.seed))?;
    }
}

fn run(shared: &Shared, dice: &mut Dice, host: &str, mut bytes: Vec<u8>) -> Result<()> {
    let mut stream = TcpStream::connect(shared.address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // One in eight does not know of TLS.
    if let (Some(key), Target::Nvme(uri)) = (&shared.tls_key, &shared.target)
        && !dice.once_in(8)
    {
        bytes = tls::hide(&mut stream, (key, host, &uri.subsystem), dice, &bytes)?.unwrap_or_default();
    }
    shared.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    let cut = dice.below(bytes.len() + 1);
    let pieces = if dice.once_in(4) { vec![&bytes[..cut], &bytes[cut..]] } else { vec![&bytes[..]] };
    for piece in pieces {
        if let Err(error) = stream.write_all(piece) {
            match error.kind() {
                // The target may hang up in the middle of it, which is its right.
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => break,
                // It may not read on where its answers are not read; a short stream is taken as a whole.
                _ => bail!("sending: {error}"),
            }
        }
    }
    match dice.below(4) {
        // What the target sends meets a closed socket, and is answered with a reset.
        0 => return Ok(()),
        // Looked at a little first, so that it has come to something.
        1 => {
            stream.set_read_timeout(Some(LOOK))?;
            let _ = stream.read(&mut [0; 64]);
            return Ok(());
        }
        _ => {}
    }
    // The target may have hung up already.
    let _ = stream.shutdown(Shutdown::Write);
    let mut sink = [0; 64 << 10];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => bail!("the target does not close the connection: {error}"),
        }
    }
    shared.hangups.fetch_add(1, Ordering::Relaxed);
    Ok(())
}
