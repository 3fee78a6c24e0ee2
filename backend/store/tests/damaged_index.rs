//! A node of the index that is damaged takes with it what it held, and nothing else: neither what is written since, nor
//! the store.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{CrashKind, Faults, World};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::entry::Entry;
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

const DISK: &str = "/disk";
const SIZE: u64 = 64 << 20;
const KEYS: u32 = 30_000;

fn world() -> World {
    let world = World::new(1, Faults::none());
    world.add_file(DISK, SIZE, 4096);
    world
}

fn run<F: Future>(world: &World, future: F) -> F::Output {
    let reactor = world.reactor();
    let out = world.run(&reactor, future).unwrap_or_else(|stop| panic!("{stop}"));
    world.crash(reactor, CrashKind::Power);
    out
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

fn key(number: u32) -> Vec<u8> {
    format!("key {number:06}").into_bytes()
}

/// Every stored node: level, first key, byte address.
fn nodes(world: &World) -> Vec<(u8, Vec<u8>, u64)> {
    let mut found = Vec::new();
    for block in (256..SIZE / 4096).map(|block| block * 4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(DISK, block, 4096).expect("peek")) else { continue };
        for entry in Entry::decode_all(&header.entries).expect("entries") {
            if let Entry::Node { level, key, at, .. } = entry {
                found.push((level, key, block + 4096 + u64::from(at)));
            }
        }
    }
    found
}

async fn damage(at: u64) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    let start = at / 4096 * 4096;
    let mut block = disk.read_exact_at(start, 4096).await.expect("read").to_vec();
    block[(at - start) as usize] ^= 0xFF;
    disk.write_at(Buf::copy_of(&block), start).await.expect("write");
    disk.sync_data().await.expect("sync");
}

/// An object with many keys, of which nodes of that level near the middle of them are damaged.
fn with_damage(world: &World, level: u8) {
    run(world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, force: false };
        Store::init(Path::new(DISK), options).await.expect("init");
        let store = open().await;
        let pairs = (0..KEYS).map(|i| (key(i), b"old".to_vec())).collect();
        store.submit(&ObjectName::new("o"), Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
        store.close().await.expect("close");
    });
    let mut keys: Vec<Vec<u8>> = nodes(world)
        .into_iter()
        .filter(|node| node.0 == level && node.1.starts_with(b"k"))
        .map(|node| node.1)
        .collect();
    keys.sort();
    assert!(!keys.is_empty());
    let victim = keys[keys.len() / 2].clone();
    for (_, _, at) in nodes(world).into_iter().filter(|node| node.0 == level && node.1 == victim) {
        run(world, damage(at));
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Old,
    New,
    Nothing,
    Damaged,
}

async fn look(store: &Store, wanted: Vec<u8>) -> Found {
    match store.kv_get(&ObjectName::new("o"), vec![wanted]).await.map(|mut values| values.remove(0)) {
        Ok(Some(value)) if value == b"old" => Found::Old,
        Ok(Some(_)) => Found::New,
        Ok(None) => Found::Nothing,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
            Found::Damaged
        }
    }
}

fn checkpoints_go_on(level: u8) {
    let world = world();
    with_damage(&world, level);
    let mut expected: BTreeMap<Vec<u8>, Found> = BTreeMap::new();
    for round in 0..3 {
        expected = run(&world, async {
            let mut expected = expected;
            let store = open().await;
            if round == 0 {
                for i in 0..KEYS {
                    expected.insert(key(i), look(&store, key(i)).await);
                }
                assert!(expected.values().any(|found| *found == Found::Damaged));
                assert!(expected.values().any(|found| *found == Found::Old));
            }
            let set: Vec<_> = (0..KEYS).filter(|i| i % 10 == round * 2).map(key).collect();
            // Some of what was set in the first round is removed in the others.
            let goes = |i: &u32| i % 10 == round * 2 + 1 || (round > 0 && i.is_multiple_of(100));
            let removed: Vec<_> = (0..KEYS).filter(goes).map(key).collect();
            let pairs: Vec<_> = set.iter().map(|key| (key.clone(), b"new".to_vec())).collect();
            let ops = vec![ObjectOp::KvSet { pairs }, ObjectOp::KvRemove { keys: removed.clone() }];
            store.submit(&ObjectName::new("o"), Transaction::new(ops)).await.expect("set");
            expected.extend(set.into_iter().map(|key| (key, Found::New)));
            expected.extend(removed.into_iter().map(|key| (key, Found::Nothing)));
            store.close().await.expect("the checkpoint succeeds");
            drop(store);
            let store = open().await;
            for (key, expected) in &expected {
                let found = look(&store, key.clone()).await;
                assert_eq!(found, *expected, "round {round}, {:?}", String::from_utf8_lossy(key));
            }
            store.close().await.expect("close");
            expected
        });
    }
    let report = run(&world, Store::check(DISK, CheckOptions::default(), |_, _| {})).expect("check");
    let damaged = report.findings.iter().filter(|finding| finding.place == "the tree").count();
    assert_eq!(damaged, 1, "{:#?}", report.findings);
}

#[test]
fn a_damaged_leaf_stops_no_checkpoint() {
    checkpoints_go_on(0);
}

#[test]
fn a_damaged_inner_node_stops_no_checkpoint() {
    checkpoints_go_on(1);
}
