//! Benchmark of the append rate: `append MEDIUM PATH SECONDS DEPTH SYNC [GROUPS]`, one core, 4 KiB random writes, a
//! flush after each SYNC writes (0: none), GROUPS appended at once. Prints appends per second, microseconds of CPU
//! time for each, and the average group size.
//!
//! Times only appends: the log is filled to less than where write-back begins, then emptied, and so on. Accepts
//! memory that is not persistent: it is equally fast.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Buf, ExtentMap, Geometry, LocalFuture, Result, SizeWatch};
use forebay_reactor::driver::{DriverChoice, system_driver};
use forebay_reactor::{Reactor, now, random, spawn};
use forebay_writelog::{DirtyLimits, LogOptions, LogOwner, MediumKind, Shelf, ShelfOptions, WriteLog};

const SIZE: u64 = 1 << 30;
const LOG_SIZE: u64 = 512 << 20;
/// Appends between two drains of the log: less than an eighth of it.
const ROUND: u64 = 12_000;

/// Backend that discards all writes.
struct Nowhere;

impl BlockDevice for Nowhere {
    fn geometry(&self) -> Geometry {
        Geometry { size: SIZE, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let reply = match request {
            BlockRequest::Read(extent) => BlockReply::Data(Buf::zeroed(extent.len as usize).into()),
            _ => BlockReply::Done,
        };
        Box::pin(std::future::ready(Ok(reply)))
    }

    fn map(&self, _extent: forebay_block::Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(std::future::ready(Ok(ExtentMap::new())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

struct Nobody;

impl LogOwner for Nobody {
    fn release(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Returns the CPU time of this process in seconds, with nanosecond resolution.
fn cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

async fn run(medium: MediumKind, path: &str, seconds: f64, depth: u64, sync: u64, groups: usize) -> Result<()> {
    let options = ShelfOptions { create: true, room: LOG_SIZE, force: true, ..ShelfOptions::default() };
    let shelf = Shelf::open(medium, Path::new(path), options).await?;
    let id = shelf.create("bench", "bench", LOG_SIZE, 0).await?;
    let log = shelf.open_log(&id, "bench", 0).await?;
    let limits = DirtyLimits { age_max: Duration::from_secs(10_000), ..DirtyLimits::default() };
    let log =
        WriteLog::new(Rc::new(Nowhere), log, Rc::new(Nobody), LogOptions { limits, groups, ..LogOptions::default() });
    // Content without a pattern that the log would shorten.
    let bytes: Vec<u8> = (0..4096_u32).map(|at| ((at * 31) >> 3) as u8).collect();
    let data = Buf::copy_of(&bytes);
    let (mut appends, mut time, mut cpu_time) = (0, 0.0, 0.0);
    while time < seconds {
        let (begin, cpu_begin) = (now(), cpu());
        let left = Rc::new(Cell::new(ROUND));
        let tasks: Vec<_> = (0..depth)
            .map(|_| {
                let (log, left, data) = (log.clone(), left.clone(), data.clone());
                spawn(async move {
                    while left.get() > 0 {
                        left.set(left.get() - 1);
                        let offset = random() % (SIZE / 4096) * 4096;
                        log.submit(BlockRequest::Write { offset, data: data.clone().into(), fua: false }).await?;
                        if sync > 0 && left.get() % sync == 0 {
                            log.submit(BlockRequest::Flush).await?;
                        }
                    }
                    Ok::<(), forebay_block::Error>(())
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        time += begin.elapsed().as_secs_f64();
        cpu_time += cpu() - cpu_begin;
        appends += ROUND;
        log.drain().await?;
    }
    let together = log.counters().appended as f64 / log.counters().groups as f64;
    let (rate, cpu_us) = (appends as f64 / time, cpu_time * 1e6 / appends as f64);
    println!("appends_per_second {rate:.0} cpu_us {cpu_us:.2} together {together:.2}");
    log.close(true).await
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [medium, path, seconds, depth, sync, more @ ..] = &words[..] else {
        eprintln!("append ssd|pmem PATH SECONDS DEPTH SYNC [GROUPS]");
        std::process::exit(2);
    };
    let medium = if medium == "pmem" { MediumKind::Pmem } else { MediumKind::Ssd };
    let number = |text: &str| text.parse::<f64>().expect("a number");
    let reactor = Reactor::new(system_driver(DriverChoice::Auto).expect("a driver"));
    let groups = more.first().map_or(LogOptions::default().groups, |text| number(text) as usize);
    let ran = reactor.block_on(run(medium, path, number(seconds), number(depth) as u64, number(sync) as u64, groups));
    if let Err(error) = ran {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
