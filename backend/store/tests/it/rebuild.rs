//! Tests of rebuilding after loss of superblocks and anchors: the log's content is recovered, losses are reported
//! first, and nothing is written unrequested.

mod losses;
mod reinit;

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{CrashKind, Faults, Rng, World};
use forebay_store::format::anchor::{Anchor, SLOTS};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::entry::StoreEntry;
use forebay_store::format::superblock::COPIES;
use forebay_store::{CheckOptions, CheckReport, Finding, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const SIZE: u64 = 12 << 20;

async fn init(force: bool) -> Result<()> {
    Store::init(DISK, InitOptions { size: SIZE, segment_size: 64 << 10, force, ..InitOptions::default() }).await
}

async fn open() -> Result<Rc<Store>> {
    Store::open(DISK, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await
}

async fn check(rebuild: bool, roll_back: bool) -> Result<CheckReport> {
    let options = CheckOptions { data: true, rebuild, roll_back, ..CheckOptions::default() };
    Store::check(DISK, options, |_, _| {}).await
}

/// Overwrites blocks.
async fn wipe(places: &[u64], byte: u8) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    for &at in places {
        disk.write_at(Buf::copy_of(&[byte; 4096]), at).await.expect("write");
    }
    disk.sync_data().await.expect("sync");
}

fn anchors() -> Vec<u64> {
    SLOTS.into_iter().flatten().collect()
}

fn everything() -> Vec<u64> {
    COPIES.into_iter().chain(anchors()).collect()
}

/// Returns the beginning of the disk, up to the segments.
fn head(world: &World) -> Vec<u8> {
    world.peek(DISK, 0, 1 << 20).expect("peek")
}

async fn write(store: &Store, name: &str, byte: u8) {
    let data = Buf::copy_of(&[byte; 4096]).into();
    let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
    store.submit(&ObjectName::new(name), write).await.expect("write");
}

/// Returns the first byte of an object; `None` if it does not exist.
async fn first_byte(store: &Store, name: &str) -> Option<u8> {
    match store.read(&ObjectName::new(name), ObjectRead::head(0, 1)).await {
        Ok(read) => Some(read.fill(Extent { offset: 0, len: 1 }).to_vec()[0]),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("{error:?}"),
    }
}

/// Returns the batch headers on the disk.
fn headers(world: &World) -> Vec<BatchHeader> {
    let header = |block| {
        let bytes = world.peek(DISK, block * 4096, 4096).expect("peek");
        BatchHeader::decode(&bytes).ok().filter(|header| header.block == block)
    };
    (256..SIZE / 4096).filter_map(header).collect()
}

fn has_record(header: &BatchHeader) -> bool {
    let entries = StoreEntry::decode_all(&header.entries).expect("entries");
    entries.iter().any(|entry| matches!(entry, StoreEntry::Checkpoint { .. }))
}

/// Content of an object: its bytes and the value of its key.
type Content = Option<(Vec<u8>, Option<Vec<u8>>)>;

/// Allowed contents of each object: the one at the last flush, and all later ones.
#[derive(Default)]
struct Model {
    objects: BTreeMap<String, Vec<Content>>,
}

impl Model {
    fn now(&self, name: &str) -> Content {
        self.objects.get(name).and_then(|history| history.last().cloned()).flatten()
    }

    fn flushed(&mut self) {
        self.objects.values_mut().for_each(|history| drop(history.drain(..history.len() - 1)));
    }

    async fn step(&mut self, store: &Store, rng: &mut Rng) {
        let name = format!("o{}", rng.below(12));
        let mut after = self.now(&name);
        let op = match rng.below(8) {
            0 => {
                if after.is_none() {
                    return;
                }
                after = None;
                ObjectOp::Remove
            }
            1 => {
                let value = vec![rng.bits() as u8; rng.range(1..3000) as usize];
                let (data, _) = after.unwrap_or_default();
                after = Some((data, Some(value.clone())));
                ObjectOp::KvSet { pairs: vec![("key".into(), value)] }
            }
            _ => {
                let (at, len) = (rng.below(60_000) as usize, rng.range(1..20_000) as usize);
                let bytes = vec![rng.bits() as u8; len];
                let (mut data, value) = after.unwrap_or_default();
                data.resize(data.len().max(at + len), 0);
                data[at..at + len].copy_from_slice(&bytes);
                after = Some((data, value));
                ObjectOp::Write { offset: at as u64, data: Buf::copy_of(&bytes).into() }
            }
        };
        store.submit(&ObjectName::new(&name), Transaction::of(op)).await.expect("a step");
        self.objects.entry(name).or_insert_with(|| vec![None]).push(after);
    }

    /// Compares all objects, and continues from the contents found.
    async fn compare(&mut self, store: &Store, what: &str) {
        for (name, history) in &mut self.objects {
            let object = ObjectName::new(name.as_str());
            let found = match store.stat(&object, SnapId::HEAD).await {
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => panic!("{what}: {name}: {error:?}"),
                Ok(stat) => {
                    let read = ObjectRead::head(0, stat.size.max(1));
                    let mut data = store.read(&object, read).await.expect("read").fill(read.extent).to_vec();
                    data.truncate(stat.size as usize);
                    let keys = store.kv_get(&object, vec!["key".into()]).await.expect("a key");
                    Some((data, keys.into_iter().next().flatten()))
                }
            };
            assert!(history.contains(&found), "{what}: {name} is neither as it was flushed nor newer");
            *history = vec![found];
        }
    }
}

/// Random sequences of store openings, each ended by a crash or a clean close, followed by loss of parts of the head.
#[test]
fn whatever_was_flushed_is_there_after_a_rebuild() {
    for seed in 0..24 {
        let world = World::new(seed, Faults::none());
        world.add_file(DISK, SIZE, 4096);
        run(&world, async { init(false).await.expect("init") });
        let mut rng = Rng::new(seed);
        let mut model = Model::default();
        for life in 0..4 {
            let what = format!("seed {seed}, life {life}");
            // The power may fail during opening, or at any later point.
            if rng.one_in(3) {
                world.crash_at_point(Some(world.points() + rng.range(1..40)));
                let reactor = world.reactor();
                let _ = world.run(&reactor, async { drop(open().await) });
                world.crash(reactor, CrashKind::Power);
            }
            run(&world, async {
                let store = open().await.expect("open");
                for _ in 0..rng.range(0..300) {
                    model.step(&store, &mut rng).await;
                    if rng.one_in(20) {
                        store.flush().await.expect("flush");
                        model.flushed();
                    }
                }
                if rng.coin() {
                    store.close().await.expect("close");
                    model.flushed();
                }
            });
            let all = everything();
            let lost = match rng.below(3) {
                0 => anchors(),
                1 => SLOTS[rng.below(2) as usize].to_vec(),
                _ => all.clone(),
            };
            let byte = if rng.coin() { 0 } else { 0xAA };
            run(&world, wipe(&lost, byte));
            // The power may fail at any point of the rebuild, any number of times.
            for _ in 0..rng.below(3) {
                world.crash_at_point(Some(world.points() + rng.range(1..60)));
                let reactor = world.reactor();
                let _ = world.run(&reactor, async { drop(check(true, false).await) });
                world.crash(reactor, CrashKind::Power);
            }
            run(&world, async {
                let report = check(true, false).await.unwrap_or_else(|error| panic!("{what}: {error}"));
                let others = |finding: &&Finding| !finding.repaired && !finding.place.starts_with("anchor");
                assert_eq!(report.findings.iter().find(others), None, "{what}: {report:?}");
                if let Some(rebuilt) = &report.rebuild {
                    assert!(rebuilt.written && rebuilt.lost.is_empty(), "{what}: {rebuilt:?}");
                    assert_eq!(rebuilt.objects, report.objects, "{what}");
                }
                let store = open().await.unwrap_or_else(|error| panic!("{what}: {error}"));
                model.compare(&store, &what).await;
                store.close().await.expect("close");
                drop(store);
                let store = open().await.expect("open");
                model.compare(&store, &what).await;
                store.close().await.expect("close");
                drop(store);
                let report = check(false, false).await.expect("check");
                assert!(report.is_clean(), "{what}: {report:?}");
            });
        }
    }
}

#[test]
fn a_store_without_a_head_says_how_it_is_rebuilt() {
    for places in [anchors(), everything()] {
        let world = machine(SIZE, Faults::none());
        run(&world, async {
            init(false).await.expect("init");
            let store = open().await.expect("open");
            write(&store, "a", 1).await;
            store.close().await.expect("close");
            drop(store);
            wipe(&places, 0).await;
            let error = open().await.err().expect("there is no head");
            assert!(error.to_string().contains("forebay store check --rebuild"), "{error}");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        });
        let before = head(&world);
        run(&world, async {
            check(false, true).await.expect_err("nobody asked for a rebuild");
        });
        assert!(head(&world) == before, "nothing was written");
    }
}

#[test]
fn a_whole_store_is_not_rebuilt() {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        let store = open().await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
    });
    let before = head(&world);
    run(&world, async {
        let report = check(true, false).await.expect("check");
        assert!(report.is_clean() && report.rebuild.is_none(), "{report:?}");
    });
    assert!(head(&world) == before, "nothing was written");
}

/// Returns a store with "a" from a cleanly closed opening, and "b" and "c" from one that crashed; its head is lost.
fn headless() -> World {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        let store = open().await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        let store = open().await.expect("open");
        write(&store, "b", 1).await;
        write(&store, "c", 1).await;
    });
    run(&world, wipe(&everything(), 0));
    world
}

/// Returns the block of the newest batch with, or without, a checkpoint record, after skipping `skip` of them.
fn newest_batch(world: &World, record: bool, skip: usize) -> u64 {
    let mut batches = headers(world);
    batches.sort_by_key(|header| std::cmp::Reverse(header.seq));
    batches.iter().filter(|header| has_record(header) == record).nth(skip).expect("a batch").block
}

#[test]
fn what_would_be_lost_is_told_and_only_then_given_up() {
    let world = headless();
    // Batch of "b"; that of "c" records it as durable.
    let batch = newest_batch(&world, false, 1);
    run(&world, flip(batch * 4096 + 100));
    let before = head(&world);
    run(&world, async {
        let report = check(true, false).await.expect("a report");
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        assert!(!rebuilt.written && !rebuilt.lost.is_empty() && !report.is_clean(), "{report:?}");
    });
    assert!(head(&world) == before, "nothing was written");
    run(&world, async {
        let report = check(true, true).await.expect("a report");
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        assert!(rebuilt.written && !rebuilt.lost.is_empty(), "{report:?}");
        let store = open().await.expect("open");
        let there = [first_byte(&store, "a").await, first_byte(&store, "b").await, first_byte(&store, "c").await];
        assert_eq!(there, [Some(1), None, None]);
        store.close().await.expect("close");
    });
}

#[test]
fn a_damaged_record_is_told_by_what_comes_after_it() {
    let world = headless();
    let record = newest_batch(&world, true, 0);
    run(&world, async {
        flip(record * 4096 + 100).await;
        let report = check(true, false).await.expect("a report");
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        // The previous checkpoint is that of a clean close: later data cannot be reached from there.
        assert!(!rebuilt.written && !rebuilt.lost.is_empty(), "{rebuilt:?}");
    });
}

#[test]
fn a_damaged_end_of_the_log_is_told() {
    for byte in [100, 4096] {
        let world = headless();
        let batch = newest_batch(&world, false, 0);
        run(&world, async {
            flip(batch * 4096 + byte).await;
            let report = check(true, false).await.expect("a report");
            let rebuilt = report.rebuild.as_ref().expect("a rebuild");
            assert!(rebuilt.written && rebuilt.lost.is_empty() && !rebuilt.unproven.is_empty(), "{rebuilt:?}");
            let store = open().await.expect("open");
            let there = [first_byte(&store, "a").await, first_byte(&store, "b").await, first_byte(&store, "c").await];
            assert_eq!(there, [Some(1), Some(1), None]);
            store.close().await.expect("close");
        });
    }
}

#[test]
fn what_was_given_up_does_not_come_back() {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        let store = open().await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        let store = open().await.expect("open");
        for round in 2..60 {
            write(&store, "a", round).await;
        }
        store.close().await.expect("close");
        drop(store);
        // Both checkpoints of the second opening are lost, which requires a roll-back to before it.
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let superblock = disk.read_exact_at(0, 4096).await.expect("read");
        let number = u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"));
        let mut generations = Vec::new();
        for slot in SLOTS {
            let block = disk.read_exact_at(slot[0], 4096).await.expect("read");
            generations.push((Anchor::decode(&block, number).expect("an anchor").generation, slot));
        }
        drop(disk);
        generations.sort_unstable();
        wipe(&generations[1].1, 0xAA).await;
    });
    let mut batches: Vec<BatchHeader> = headers(&world);
    batches.sort_by_key(|header| header.seq);
    // Header in the middle of the log: what follows cannot be reached from the previous checkpoint.
    let amid = batches[batches.len() - 20].block;
    run(&world, async {
        wipe(&[amid * 4096], 0xAA).await;
        // Numbering continues behind the remaining batches, and thus below that of the discarded ones.
        let store = Store::open(DISK, StoreOptions { roll_back: true, ..StoreOptions::default() }).await;
        let store = store.expect("gone back");
        let now = first_byte(&store, "a").await.expect("it is there");
        assert!(now < 59, "the newest writes were given up");
        write(&store, "b", now).await;
        // Interrupted, not closed: the discarded log has far higher numbers.
    });
    run(&world, async {
        wipe(&everything(), 0).await;
        let report = check(true, false).await.expect("a report");
        assert!(report.rebuild.as_ref().is_some_and(|rebuilt| rebuilt.written), "{report:?}");
        let store = open().await.expect("open");
        let now = first_byte(&store, "b").await;
        assert!(now.is_some() && now == first_byte(&store, "a").await, "{now:?}");
        store.close().await.expect("close");
    });
}

#[test]
fn what_belongs_to_others_is_left_alone() {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        let store = open().await.expect("open");
        write(&store, "a", 1).await;
        store.close().await.expect("close");
        drop(store);
        wipe(&everything(), 0).await;
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let mut block = vec![0; 4096];
        block[1024 + 56..1024 + 58].copy_from_slice(b"\x53\xef");
        disk.write_at(Buf::copy_of(&block), 0).await.expect("write");
        disk.sync_data().await.expect("sync");
    });
    let before = head(&world);
    run(&world, async {
        let error = check(true, true).await.expect_err("it is a file system's");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("ext2, ext3 or ext4"), "{error}");
    });
    assert!(head(&world) == before, "nothing was written");
}

#[test]
fn a_store_is_not_taken_for_the_one_before_it() {
    let world = World::new(7, Faults::none());
    world.add_disk(DISK, SIZE, 4096);
    run(&world, async {
        init(false).await.expect("init");
        let store = open().await.expect("open");
        for i in 0..100 {
            write(&store, &format!("a{i}"), 1).await;
        }
        store.close().await.expect("close");
        drop(store);
        init(true).await.expect("init");
        let store = open().await.expect("open");
        write(&store, "b", 2).await;
        store.close().await.expect("close");
        drop(store);
        wipe(&COPIES, 0).await;
    });
    let before = head(&world);
    run(&world, wipe(&anchors(), 0));
    run(&world, async {
        let error = check(true, true).await.expect_err("which one is meant?");
        assert!(error.to_string().contains("several stores"), "{error}");
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        disk.write_at(Buf::copy_of(&before[..1 << 20]), 0).await.expect("the anchors as they were");
        disk.sync_data().await.expect("sync");
        drop(disk);
        // The anchors identify the store.
        let report = check(true, false).await.expect("a report");
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        assert!(rebuilt.written && rebuilt.batches_of_others > 0, "{rebuilt:?}");
        let store = open().await.expect("open");
        assert_eq!((first_byte(&store, "a0").await, first_byte(&store, "b").await), (None, Some(2)));
        store.close().await.expect("close");
    });
}

#[test]
fn an_empty_log_cannot_be_rebuilt() {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        wipe(&everything(), 0).await;
        let error = check(true, true).await.expect_err("nothing is there");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    });
}

#[test]
fn places_that_the_device_cannot_read_are_told_of() {
    let world = headless();
    // These areas of the head are lost anyway, and are rewritten.
    for at in [0, SLOTS[0][0]] {
        assert!(world.set_bad_sector(DISK, at));
    }
    run(&world, async {
        let report = check(true, false).await.expect("a report");
        assert!(report.rebuild.as_ref().is_some_and(|rebuilt| rebuilt.written), "{report:?}");
        let store = open().await.expect("open");
        assert_eq!(first_byte(&store, "c").await, Some(1));
        store.close().await.expect("close");
    });
    let world = headless();
    let far = (SIZE / 4096 - 3) * 4096;
    assert!(world.set_bad_sector(DISK, far));
    run(&world, async {
        let report = check(true, false).await.expect("a report");
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        assert!(!rebuilt.written && rebuilt.lost.iter().any(|lost| lost.contains(&far.to_string())), "{rebuilt:?}");
        let report = check(true, true).await.expect("a report");
        assert!(report.rebuild.is_some_and(|rebuilt| rebuilt.written));
        let store = open().await.expect("open");
        assert_eq!(first_byte(&store, "c").await, Some(1));
        store.close().await.expect("close");
    });
}
