//! Measures write stalls during cleaning, in simulated time. Computing takes no time there, and a device is as fast for
//! many bytes as for few, so that only waiting between tasks remains.
//!
//! ```text
//! stalls [WRITERS] [FILL_PERCENT]
//! ```

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{Buf, BufList, ObjectBackend, ObjectName, ObjectOp, Transaction};
use forebay_reactor::{now, spawn};
use forebay_sim::{Faults, Rng, World};
use forebay_store::{InitOptions, Store, StoreOptions};

const DISK: &str = "/disk";
const SIZE: u64 = 256 << 20;
const OBJECT_BLOCKS: u64 = 256;
const WRITES: u64 = 150_000;

fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>().expect("a number"));
    let (writers, fill) = (args.next().unwrap_or(32), args.next().unwrap_or(80));
    let world = World::new(1, Faults { events_max: u64::MAX, ..Faults::none() });
    world.add_file(DISK, SIZE, 4096);
    let reactor = world.reactor();
    world
        .run(&reactor, async {
            let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
            Store::init(DISK, options).await.expect("init");
            let store = Store::open(DISK, StoreOptions::default()).await.expect("open");
            run(&store, writers, fill).await;
        })
        .expect("it ends");
}

async fn write(store: &Store, block: u64, data: &BufList) {
    let name = ObjectName::new(format!("o{}", block / OBJECT_BLOCKS));
    let write = ObjectOp::Write { offset: block % OBJECT_BLOCKS * 4096, data: data.clone() };
    store.submit(&name, Transaction::of(write)).await.expect("write");
}

async fn run(store: &Rc<Store>, writers: u64, fill: u64) {
    let blocks = store.stats().capacity * fill / 100 / 4096;
    let data: BufList = Buf::copy_of(&[7; 4096]).into();
    for block in 0..blocks {
        write(store, block, &data).await;
    }
    store.flush().await.expect("flush");
    let before = store.stats();
    let latencies = Rc::new(RefCell::new(Vec::with_capacity(WRITES as usize)));
    let left = Rc::new(Cell::new(WRITES));
    let began = now();
    let tasks: Vec<_> = (0..writers)
        .map(|writer| {
            let (store, data, latencies, left) = (store.clone(), data.clone(), latencies.clone(), left.clone());
            spawn(async move {
                let mut rng = Rng::new(writer);
                while left.get() > 0 {
                    left.set(left.get() - 1);
                    let began = now();
                    write(&store, rng.below(blocks), &data).await;
                    latencies.borrow_mut().push((now() - began).as_micros());
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
    let (taken, after) = (now() - began, store.stats());
    let mut latencies = latencies.take();
    latencies.sort_unstable();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    let amplification =
        (after.device_bytes - before.device_bytes) as f64 / (after.user_bytes - before.user_bytes) as f64;
    println!(
        "{writers} writers, {fill} % full: {:.0} writes/s; ms p50 {:.3} p99 {:.3} p99.9 {:.3} max {:.3}; \
         write amplification {amplification:.2}, {} checkpoints",
        WRITES as f64 / taken.as_secs_f64(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        after.checkpoints - before.checkpoints
    );
}
