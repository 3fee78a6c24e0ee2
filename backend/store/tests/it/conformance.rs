//! Conformance tests of the store as an object backend, and comparison with the in-memory backend, on a simulated disk.

use std::path::Path;
use std::rc::Rc;

use forebay_block::{DataPolicy, ObjectBackend, ObjectName};
use forebay_ram::RamBackend;
use forebay_ram::conformance::{CASES, compare, steps_from_seed};
use forebay_sim::{Faults, World};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

const DISK: &str = "/disk";

fn world(seed: u64, size: u64) -> World {
    let world = World::new(seed, Faults::none());
    world.add_file(DISK, size, 4096);
    world
}

async fn fresh(size: u64) -> Rc<Store> {
    let options = InitOptions { size, segment_size: 128 << 10, ..InitOptions::default() };
    Store::init(Path::new(DISK), options).await.expect("init");
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

/// Creates a store whose default compression is `setting`.
async fn fresh_compressing(size: u64, setting: &str) -> Rc<Store> {
    let store = fresh(size).await;
    let policy = DataPolicy { compression: setting.parse().expect("a setting") };
    store.set_data_policy(&ObjectName::new(""), Some(policy)).await.expect("a policy");
    store
}

async fn check() {
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(Path::new(DISK), options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

#[test]
fn every_case() {
    for (name, case) in CASES {
        eprintln!("{name}");
        let world = world(1, 64 << 20);
        let reactor = world.reactor();
        let run = world.run(&reactor, async {
            let store = fresh(64 << 20).await;
            case(store.clone()).await;
            store.close().await.expect("close");
            drop(store);
            check().await;
        });
        run.unwrap_or_else(|stop| panic!("{name}: {stop:?}"));
    }
}

#[test]
fn random_steps_as_in_memory() {
    for seed in 0..30 {
        let world = world(seed, 64 << 20);
        let reactor = world.reactor();
        let run = world.run(&reactor, async {
            let store = fresh(64 << 20).await;
            let model: Rc<dyn ObjectBackend> = RamBackend::new("model");
            for round in 0..4 {
                compare(store.clone(), model.clone(), &steps_from_seed(seed * 4 + round, 40)).await;
            }
            store.close().await.expect("close");
            drop(store);
            check().await;
        });
        run.unwrap_or_else(|stop| panic!("seed {seed}: {stop:?}"));
    }
}

#[test]
fn every_case_compressed() {
    for (name, case) in CASES {
        let world = world(1, 64 << 20);
        let reactor = world.reactor();
        let run = world.run(&reactor, async {
            let store = fresh_compressing(64 << 20, "lz4").await;
            case(store.clone()).await;
            store.close().await.expect("close");
            drop(store);
            check().await;
        });
        run.unwrap_or_else(|stop| panic!("{name}: {stop:?}"));
    }
}

#[test]
fn random_steps_compressed_as_in_memory() {
    for seed in 0..30 {
        let world = world(seed, 64 << 20);
        let reactor = world.reactor();
        let run = world.run(&reactor, async {
            let store = fresh_compressing(64 << 20, ["lz4", "zstd", "deflate:1"][seed as usize % 3]).await;
            let model: Rc<dyn ObjectBackend> = RamBackend::new("model");
            for round in 0..4 {
                compare(store.clone(), model.clone(), &steps_from_seed(seed * 4 + round, 40)).await;
            }
            store.close().await.expect("close");
            drop(store);
            check().await;
        });
        run.unwrap_or_else(|stop| panic!("seed {seed}: {stop:?}"));
    }
}
