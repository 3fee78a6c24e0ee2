//! Measures write stalls during cleaning: random writes of 4 KiB by some writers on a store that is filled to a part of
//! its capacity.
//!
//! ```text
//! stalls [WRITERS] [FILL_PERCENT]                                 in simulated time, on 256 MiB
//! stalls WRITERS FILL_PERCENT FILE SIZE_MIB [WRITES_A_SECOND]     on a real file
//! ```
//!
//! Computing takes no time in the simulator, and a device is as fast for many bytes as for few, so that only waiting
//! between tasks remains. With a rate, writers wait between writes, and a wait counts from the time at which the write was due.

#[path = "common/cpu.rs"]
mod cpu;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use cpu::cpu_seconds;
use forebay_block::{Buf, BufList, ObjectBackend, ObjectName, ObjectOp, Transaction};
use forebay_reactor::sync::join_all;
use forebay_reactor::{DriverChoice, Reactor, now, sleep_until, spawn};
use forebay_sim::{Faults, Rng, World};
use forebay_store::{InitOptions, Store, StoreOptions};

const DISK: &str = "/disk";
const SIZE: u64 = 256 << 20;
const OBJECT_BLOCKS: u64 = 256;
const WRITES: u64 = 150_000;
/// Length of the windows whose numbers of writes are compared.
const WINDOW: Duration = Duration::from_millis(100);

/// Load on a store.
#[derive(Clone, Copy)]
struct Load {
    writers: u64,
    fill: u64,
    writes: u64,
    /// Time between two writes of a writer; `None`: as fast as possible.
    interval: Option<Duration>,
}

fn usage() -> ! {
    eprintln!("usage: stalls [WRITERS [FILL [FILE SIZE_MIB [WRITES_A_SECOND]]]]    FILL: 1 to 95 %");
    std::process::exit(2);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| args.get(at).map(|arg| arg.parse::<u64>().unwrap_or_else(|_| usage()));
    let (writers, fill) = (number(0).unwrap_or(32), number(1).unwrap_or(80));
    // A file has a size.
    if writers == 0 || !(1..=95).contains(&fill) || args.len() == 3 || args.len() > 5 {
        usage();
    }
    let mut load = Load { writers, fill, writes: WRITES, interval: None };
    let Some(file) = args.get(2) else {
        let world = World::new(1, Faults { events_max: u64::MAX, ..Faults::none() });
        world.add_file(DISK, SIZE, 4096);
        let reactor = world.reactor();
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
        return world.run(&reactor, run(DISK.to_owned(), options, load)).expect("it ends");
    };
    let size = number(3).unwrap_or_else(|| usage()) << 20;
    load.writes = 2 * size / 4096;
    load.interval = number(4).map(|rate| Duration::from_secs(writers) / rate.clamp(1, u32::MAX.into()) as u32);
    let options = InitOptions { size, force: true, preallocate: true, ..InitOptions::default() };
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(run(file.clone(), options, load));
}

async fn write(store: &Store, block: u64, data: &BufList) {
    let name = ObjectName::new(format!("o{}", block / OBJECT_BLOCKS));
    let write = ObjectOp::Write { offset: block % OBJECT_BLOCKS * 4096, data: data.clone() };
    store.submit(&name, Transaction::of(write)).await.expect("write");
}

/// Writes blocks, many at once.
async fn write_all(store: &Store, data: &BufList, blocks: impl Iterator<Item = u64>) {
    let mut blocks = blocks.peekable();
    while blocks.peek().is_some() {
        join_all(blocks.by_ref().take(64).map(|block| Box::pin(write(store, block, data)))).await;
    }
}

async fn run(file: String, options: InitOptions, load: Load) {
    let Load { writers, fill, writes, interval } = load;
    Store::init(&file, options).await.expect("init");
    let options = StoreOptions { punch_free: false, ..StoreOptions::default() };
    let store = Store::open(&file, options).await.expect("open");
    let blocks = store.stats().capacity * fill / 100 / 4096;
    let data: BufList = Buf::copy_of(&[7; 4096]).into();
    write_all(&store, &data, 0..blocks).await;
    // Until cleaning has come to its steady state.
    let mut rng = Rng::new(77);
    write_all(&store, &data, (0..writes / 2).map(|_| rng.below(blocks))).await;
    store.flush().await.expect("flush");
    let before = store.stats();
    let latencies = Rc::new(RefCell::new(Vec::with_capacity(writes as usize)));
    let windows = Rc::new(RefCell::new(Vec::<u64>::new()));
    let left = Rc::new(Cell::new(writes));
    let (began, cpu) = (now(), cpu_seconds());
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let (store, data, latencies, left) = (store.clone(), data.clone(), latencies.clone(), left.clone());
            let windows = windows.clone();
            spawn(async move {
                let mut rng = Rng::new(writer);
                let mut due = now();
                while left.get() > 0 {
                    left.set(left.get() - 1);
                    match interval {
                        Some(interval) => {
                            due = due + interval;
                            sleep_until(due).await;
                        }
                        None => due = now(),
                    }
                    write(&store, rng.below(blocks), &data).await;
                    latencies.borrow_mut().push((now() - due).as_micros());
                    let window = ((now() - began).as_nanos() / WINDOW.as_nanos()) as usize;
                    {
                        let mut windows = windows.borrow_mut();
                        let len = windows.len().max(window + 1);
                        windows.resize(len, 0);
                        windows[window] += 1;
                    }
                    if left.get().is_multiple_of(128) {
                        store.flush().await.expect("flush");
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    let (taken, cpu, after) = (now() - began, cpu_seconds() - cpu, store.stats());
    let mut latencies = latencies.take();
    latencies.sort_unstable();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    let amplification =
        (after.device_bytes - before.device_bytes) as f64 / (after.user_bytes - before.user_bytes) as f64;
    let mut windows = windows.take();
    windows.pop();
    let mean = windows.iter().sum::<u64>() as f64 / windows.len().max(1) as f64;
    let spread = windows.iter().map(|&count| (count as f64 - mean).powi(2)).sum::<f64>() / windows.len().max(1) as f64;
    println!(
        "{writers} writers, {fill} % full: {:.0} writes/s, {:.0} % spread over windows of {WINDOW:?}, least {}; \
         ms p50 {:.3} p99 {:.3} p99.9 {:.3} max {:.3}; write amplification {amplification:.2}, {} checkpoints, \
         {:.1} us of a processor a write",
        writes as f64 / taken.as_secs_f64(),
        100.0 * spread.sqrt() / mean,
        windows.iter().min().copied().unwrap_or(0),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        after.checkpoints - before.checkpoints,
        cpu * 1e6 / writes as f64
    );
    store.close().await.expect("close");
}
