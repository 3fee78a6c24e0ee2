//! Tests with a damaged index node: its content is lost, but neither later writes nor the rest of the store.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{Faults, World};
use forebay_store::format::anchor::{Anchor, SLOTS};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::entry::StoreEntry;
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};

const SIZE: u64 = 64 << 20;
const KEYS: u32 = 30_000;

fn world() -> World {
    machine(SIZE, Faults::none())
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

fn key(number: u32) -> Vec<u8> {
    format!("key {number:06}").into_bytes()
}

/// Returns every stored node: level, first key, byte address.
fn nodes(world: &World) -> Vec<(u8, Vec<u8>, u64)> {
    let mut found = Vec::new();
    for block in (256..SIZE / 4096).map(|block| block * 4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(DISK, block, 4096).expect("peek")) else { continue };
        for entry in StoreEntry::decode_all(&header.entries).expect("entries") {
            if let StoreEntry::Node { level, key, at, .. } = entry {
                found.push((level, key, block + 4096 + u64::from(at)));
            }
        }
    }
    found
}

/// Damages a byte; a second call restores it.
async fn damage(at: u64) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    let start = at / 4096 * 4096;
    let mut block = disk.read_exact_at(start, 4096).await.expect("read").to_vec();
    block[(at - start) as usize] ^= 0xFF;
    disk.write_at(Buf::copy_of(&block), start).await.expect("write");
    disk.sync_data().await.expect("sync");
}

/// Creates an object with many keys, and damages nodes of the given level near the middle of them; returns their byte
/// addresses.
fn with_damage(world: &World, level: u8) -> Vec<u64> {
    run(world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
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
    let places = nodes(world).into_iter().filter(|node| node.0 == level && node.1 == victim).map(|node| node.2);
    let places: Vec<u64> = places.collect();
    places.iter().for_each(|&at| run(world, damage(at)));
    places
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

/// With `heals`, the damage disappears after the first checkpoint that bypasses it.
fn checkpoints_go_on(level: u8, heals: bool) {
    let world = world();
    let places = with_damage(&world, level);
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
            // Some keys set in the first round are removed in the others.
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
        if heals && round == 0 {
            places.iter().for_each(|&at| run(&world, damage(at)));
        }
    }
    let report = run(&world, Store::check(DISK, CheckOptions::default(), |_, _| {})).expect("check");
    let damaged = report.findings.iter().filter(|finding| finding.place == "the tree").count();
    assert_eq!(damaged, 1, "{:#?}", report.findings);
}

#[test]
fn a_damaged_leaf_stops_no_checkpoint() {
    checkpoints_go_on(0, false);
}

#[test]
fn a_damaged_inner_node_stops_no_checkpoint() {
    checkpoints_go_on(1, false);
}

/// Lost nodes stay lost: such a node is referenced from several places: if a change rewrote and released it through one
/// of them, the others would dangle.
#[test]
fn a_leaf_that_was_given_up_stays_so_when_it_reads_well_again() {
    checkpoints_go_on(0, true);
}

#[test]
fn an_inner_node_that_was_given_up_stays_so_when_it_reads_well_again() {
    checkpoints_go_on(1, true);
}

/// Returns the pointer to the root in the newest anchor.
fn root(world: &World) -> u64 {
    let superblock = world.peek(DISK, 0, 4096).expect("peek");
    let number = u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"));
    let read =
        |slot: [u64; 2]| Anchor::decode(&world.peek(DISK, slot[0], 4096).expect("peek"), number).expect("anchor");
    SLOTS.map(read).into_iter().max_by_key(|anchor| anchor.generation).expect("an anchor").root.addr
}

#[test]
fn a_damaged_root_stops_no_checkpoint() {
    for bad_sector in [false, true] {
        let world = world();
        let removed = run(&world, async {
            let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
            Store::init(Path::new(DISK), options).await.expect("init");
            let store = open().await;
            let pairs = (0..KEYS).map(|i| (key(i), b"old".to_vec())).collect();
            store.submit(&ObjectName::new("o"), Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
            let snap = store.snap_allocate().await.expect("snapshot");
            store.close().await.expect("close");
            snap
        });
        match bad_sector {
            true => assert!(world.set_bad_sector(DISK, root(&world) / 4096 * 4096)),
            false => run(&world, damage(root(&world))),
        }
        let generation = run(&world, async {
            let store = open().await;
            // A record of the index that is neither read nor replaced.
            store.snap_remove(removed).await.expect("remove");
            let before = store.stats().checkpoints;
            store.close().await.expect("the checkpoint succeeds");
            assert!(store.stats().checkpoints > before);
            before
        });
        assert!(generation > 0);
        run(&world, async {
            let store = open().await;
            let error = store.stat(&ObjectName::new("o"), SnapId::HEAD).await.expect_err("it is lost");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "lost, and not absent: {error}");
            assert!(store.snap_allocate().await.expect("snapshot") > removed);
            store.close().await.expect("close");
        });
        let report = run(&world, Store::check(DISK, CheckOptions::default(), |_, _| {})).expect("check");
        let damaged = report.findings.iter().filter(|finding| finding.place == "the tree").count();
        assert_eq!(damaged, 1, "{:#?}", report.findings);
    }
}

/// Long values are stored in the log until a checkpoint: one of them is damaged there.
#[test]
fn a_damaged_value_in_the_log_is_lost_by_itself() {
    let world = world();
    let name = ObjectName::new("o");
    let value = |fill: u8| vec![fill; 5000];
    let set = |key: &str, fill| {
        Transaction::of(ObjectOp::KvSet { pairs: vec![(key.as_bytes().to_vec(), value(fill))] }).durable()
    };
    run(&world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
        Store::init(Path::new(DISK), options).await.expect("init");
        let store = open().await;
        store.submit(&name, set("b", 1)).await.expect("set");
        store.close().await.expect("close");
        drop(store);
        let store = open().await;
        for (key, fill) in [("a", 2), ("b", 3), ("c", 4), ("d", 5)] {
            store.submit(&name, set(key, fill)).await.expect("set");
        }
    });
    let mut places = Vec::new();
    for block in (256..SIZE / 4096).map(|block| block * 4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(DISK, block, 4096).expect("peek")) else { continue };
        for entry in StoreEntry::decode_all(&header.entries).expect("entries") {
            if let StoreEntry::KvSetLong { key, at, .. } = entry {
                places.push((key, block + 4096 + u64::from(at)));
            }
        }
    }
    let of_b: Vec<u64> = places.iter().filter(|(key, _)| key == b"b").map(|(_, at)| *at).collect();
    assert_eq!(of_b.len(), 2);
    run(&world, damage(of_b[1] + 700));
    let get = async |store: &Store, key: &str| {
        let found = store.kv_get(&name, vec![key.as_bytes().to_vec()]).await;
        found.map(|mut values| values.remove(0).map(|value| value[0])).map_err(|error| error.kind())
    };
    run(&world, async {
        for _ in 0..2 {
            let store = open().await;
            assert_eq!(get(&store, "a").await, Ok(Some(2)));
            assert_eq!(get(&store, "b").await, Err(ErrorKind::Corrupt), "neither the old value nor none");
            assert_eq!(get(&store, "c").await, Ok(Some(4)));
            let compare = ObjectOp::KvCompare { key: b"b".to_vec(), value: None };
            let compared = store.submit(&name, Transaction::of(compare)).await;
            assert_eq!(compared.map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
            let listed = store.kv_list(&name, b"", b"", 1).await.expect("up to the first");
            assert_eq!((listed.pairs.len(), listed.more), (1, true));
            let listed = store.kv_list(&name, b"", b"a", 10).await;
            assert_eq!(listed.map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
            assert_eq!(store.kv_list(&name, b"", b"b", 10).await.expect("behind it").pairs.len(), 2);
            store.close().await.expect("close");
            drop(store);
            let report = Store::check(DISK, CheckOptions::default(), |_, _| {}).await.expect("check");
            assert_eq!(report.findings.len(), 1, "{report:#?}");
        }
        let store = open().await;
        store.submit(&name, set("b", 6)).await.expect("set");
        assert_eq!(get(&store, "b").await, Ok(Some(6)));
        assert_eq!(store.kv_list(&name, b"", b"", 10).await.expect("list").pairs.len(), 4);
        store.close().await.expect("close");
        drop(store);
        let report = Store::check(DISK, CheckOptions::default(), |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
    });
}

#[test]
fn an_object_with_a_lost_value_can_be_removed() {
    let world = world();
    let name = ObjectName::new("o");
    run(&world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
        Store::init(Path::new(DISK), options).await.expect("init");
        let store = open().await;
        for key in [b"a", b"b"] {
            let pairs = vec![(key.to_vec(), vec![7; 5000])];
            store.submit(&name, Transaction::of(ObjectOp::KvSet { pairs }).durable()).await.expect("set");
        }
    });
    for block in (256..SIZE / 4096).map(|block| block * 4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(DISK, block, 4096).expect("peek")) else { continue };
        for entry in StoreEntry::decode_all(&header.entries).expect("entries") {
            if matches!(&entry, StoreEntry::KvSetLong { key, .. } if key == b"a") {
                run(&world, damage(block + 4096 + 10));
            }
        }
    }
    run(&world, async {
        let store = open().await;
        let error = store.kv_get(&name, vec![b"a".to_vec()]).await.expect_err("it is lost");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        store.submit(&name, Transaction::of(ObjectOp::Remove)).await.expect("remove");
        store.submit(&name, Transaction::of(ObjectOp::Create { exclusive: true })).await.expect("create");
        assert_eq!(store.kv_get(&name, vec![b"a".to_vec()]).await.expect("get"), [None]);
        store.close().await.expect("close");
        drop(store);
        let report = Store::check(DISK, CheckOptions::default(), |_, _| {}).await.expect("check");
        assert!(report.is_clean(), "{report:#?}");
    });
}
