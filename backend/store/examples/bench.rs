//! Drives the store in process and prints one line of JSON.
//!
//! ```text
//! bench PATH SIZE_MIB MODE DEPTH SECONDS
//!   MODE  randread   4 KiB reads of a store filled to 80 %, DEPTH at a time
//!         randwrite  4 KiB overwrites, a flush each 128
//!         wa         uniformly random 4 KiB overwrites at 80 % full, four times the capacity; write amplification
//!         raw        4 KiB O_DIRECT reads of the file PATH as it is, by the reactor alone: what the store adds to that
//!         recover    the same for SECONDS, then without closing in order: how long opening takes
//! ```

mod common;

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{BLOCK, OBJECT, Rng, cpu_seconds, object};
use forebay_block::{BufMut, ObjectBackend, ObjectOp, ObjectRead, Transaction};
use forebay_reactor::{DriverChoice, File, OpenOptions, Reactor, spawn};
use forebay_store::{InitOptions, Store, StoreOptions};

fn write(offset: u64, len: u64, fill: u64) -> Transaction {
    let mut data = BufMut::zeroed(len as usize);
    data.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&fill.to_le_bytes()));
    Transaction::of(ObjectOp::Write { offset, data: data.into() })
}

async fn fill(store: &Rc<Store>, objects: u64) {
    for index in 0..objects {
        for at in (0..OBJECT).step_by(1 << 20) {
            store.submit(&object(index), write(at, 1 << 20, index)).await.expect("fill");
        }
    }
    store.flush().await.expect("flush");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, path, size, mode, depth, seconds] = &args[..] else {
        eprintln!("usage: bench PATH SIZE_MIB randread|randwrite|wa|recover|raw DEPTH SECONDS");
        std::process::exit(2);
    };
    let size: u64 = size.parse().expect("SIZE_MIB");
    let depth: usize = depth.parse().expect("DEPTH");
    let seconds = Duration::from_secs_f64(seconds.parse().expect("SECONDS"));
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    if mode == "raw" {
        return reactor.block_on(raw(Path::new(path), size << 20, depth, seconds));
    }
    reactor.block_on(run(Path::new(path), size << 20, mode, depth, seconds));
    drop(reactor);
    if mode == "recover" {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let begun = Instant::now();
            let store = Store::open(path, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await.expect("open");
            let taken = begun.elapsed().as_secs_f64();
            let stats = store.stats();
            println!(
                "{{\"mode\":\"recover\",\"seconds\":{taken:.3},\"replayed_bytes\":{},\"replayed_batches\":{},\"used\":{}}}",
                stats.replay.bytes, stats.replay.batches, stats.used
            );
        });
    }
}

async fn run(path: &Path, size: u64, mode: &str, depth: usize, seconds: Duration) {
    Store::init(path, InitOptions { size, force: true, ..InitOptions::default() }).await.expect("init");
    let store = Store::open(path, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await.expect("open");
    let capacity = store.stats().capacity;
    let objects = (capacity * 8 / 10 / OBJECT).max(1);
    fill(&store, objects).await;
    let before = store.stats();
    let rng = Rc::new(RefCell::new(Rng::new()));
    let latencies = Rc::new(RefCell::new(Vec::with_capacity(1 << 20)));
    let writes_left = Rc::new(Cell::new(if mode == "wa" { 4 * capacity / BLOCK } else { u64::MAX }));
    let written = Rc::new(Cell::new(0u64));
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    let reads = mode == "randread";
    let timed = mode != "wa";
    let tasks: Vec<_> = (0..depth)
        .map(|_| {
            let (store, rng, latencies) = (store.clone(), rng.clone(), latencies.clone());
            let (writes_left, written) = (writes_left.clone(), written.clone());
            spawn(async move {
                while (!timed || begun.elapsed() < seconds) && writes_left.get() > 0 {
                    writes_left.set(writes_left.get() - 1);
                    let pick = rng.borrow_mut().next() % (objects * OBJECT / BLOCK);
                    let (name, offset) = (object(pick * BLOCK / OBJECT), pick * BLOCK % OBJECT);
                    let start = Instant::now();
                    if reads {
                        let data = store.read(&name, ObjectRead::head(offset, BLOCK)).await.expect("read");
                        assert_eq!(data.runs[0].1.len() as u64, BLOCK);
                    } else {
                        store.submit(&name, write(offset, BLOCK, pick)).await.expect("write");
                        written.set(written.get() + 1);
                        if written.get().is_multiple_of(128) {
                            store.flush().await.expect("flush");
                        }
                    }
                    latencies.borrow_mut().push(start.elapsed().as_nanos() as u64);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    let (wall, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let mut latencies = latencies.take();
    latencies.sort_unstable();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    let after = store.stats();
    let amplification =
        (after.device_bytes - before.device_bytes) as f64 / ((after.user_bytes - before.user_bytes) as f64).max(1.0);
    println!(
        "{{\"mode\":\"{mode}\",\"depth\":{depth},\"iops\":{:.0},\"cpu_seconds\":{cpu:.2},\"iops_per_cpu_second\":{:.0},\
         \"p50_us\":{:.1},\"p99_us\":{:.1},\"p999_us\":{:.1},\"max_us\":{:.1},\"write_amplification\":{amplification:.3},\
         \"checkpoints\":{},\"cleaned_bytes\":{},\"metadata_bytes\":{},\"capacity\":{capacity},\"used\":{}}}",
        latencies.len() as f64 / wall,
        latencies.len() as f64 / cpu,
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        after.checkpoints - before.checkpoints,
        after.cleaned_bytes - before.cleaned_bytes,
        after.metadata_bytes,
        after.used,
    );
    if mode != "recover" {
        store.close().await.expect("close");
    }
}

async fn raw(path: &Path, size: u64, depth: usize, seconds: Duration) {
    let file = File::open(path, OpenOptions::read().direct()).expect("open");
    let rng = Rc::new(RefCell::new(Rng::new()));
    let reads = Rc::new(Cell::new(0u64));
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    let tasks: Vec<_> = (0..depth)
        .map(|_| {
            let (file, rng, reads) = (file.clone(), rng.clone(), reads.clone());
            spawn(async move {
                while begun.elapsed() < seconds {
                    let at = rng.borrow_mut().next() % (size / BLOCK) * BLOCK;
                    let data = file.read_exact_at(at, BLOCK as usize).await.expect("read");
                    assert_eq!(data.len() as u64, BLOCK);
                    reads.set(reads.get() + 1);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    let (wall, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    println!(
        "{{\"mode\":\"raw\",\"depth\":{depth},\"iops\":{:.0},\"cpu_seconds\":{cpu:.2}}}",
        reads.get() as f64 / wall
    );
}
