//! Tests of compressed blobs: content against a plain model, exact counts, packing, cleaning, damage.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{CrashKind, CrashPolicy, Faults, World};
use forebay_store::{CheckOptions, InitOptions, MasterKey, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

async fn fresh(size: u64, segment_size: u32) -> Rc<Store> {
    Store::init(Path::new(DISK), InitOptions { size, segment_size, ..InitOptions::default() }).await.expect("init");
    open().await
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), options(StoreOptions::default().data_cache)).await.expect("open")
}

fn options(data_cache: usize) -> StoreOptions {
    StoreOptions { data_cache, master_key: Some(MasterKey::from_bytes([5; 32])), ..StoreOptions::default() }
}

async fn open_uncached() -> Rc<Store> {
    Store::open(Path::new(DISK), options(0)).await.expect("open")
}

async fn check() {
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(Path::new(DISK), options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

async fn close_and_check(store: Rc<Store>) {
    store.close().await.expect("close");
    drop(store);
    check().await;
}

async fn compress(store: &Store, prefix: &str, setting: &str) {
    let policy = DataPolicy { compression: setting.parse().expect("a setting") };
    store.set_data_policy(&ObjectName::new(prefix), Some(policy)).await.expect("a policy");
}

fn write(offset: u64, data: &[u8]) -> Transaction {
    Transaction::of(ObjectOp::Write { offset, data: Buf::copy_of(data).into() })
}

async fn read(store: &Store, name: &ObjectName, snap: SnapId, offset: u64, len: u64) -> Result<Vec<u8>> {
    let read = ObjectRead::new(snap, Extent::new(offset, len));
    Ok(store.read(name, read).await?.fill(read.extent).to_vec())
}

struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 24
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns blocks of which `noise` bytes each do not compress.
    fn blocks(&mut self, count: usize, noise: usize) -> Vec<u8> {
        let mut out = vec![0; count * BLOCK];
        for block in out.chunks_exact_mut(BLOCK) {
            block.fill(self.next() as u8 | 1);
            block[..noise].iter_mut().for_each(|byte| *byte = self.next() as u8);
        }
        out
    }
}

/// Plain model of an object: the head's bytes and those of each snapshot.
#[derive(Default)]
struct Model {
    head: Vec<u8>,
    snaps: BTreeMap<u64, Vec<u8>>,
}

async fn compare(store: &Store, name: &ObjectName, model: &Model) {
    let states = std::iter::once((SnapId::HEAD, &model.head));
    for (snap, bytes) in states.chain(model.snaps.iter().map(|(&snap, bytes)| (SnapId(snap), bytes))) {
        match read(store, name, snap, 0, bytes.len() as u64).await {
            Ok(found) => assert!(found == *bytes, "{name} at {snap:?}"),
            Err(error) => assert!(error.kind() == ErrorKind::NotFound && bytes.is_empty(), "{name} {snap:?}: {error}"),
        }
    }
}

#[test]
fn random_changes_with_mixed_settings_as_a_plain_model() {
    const NAMES: [&str; 3] = ["rbd_data.a.0", "rbd_data.b.0", "rbd_data.c.0"];
    const BLOCKS: u64 = 160;
    let mut cleaned = 0;
    for seed in 0..12 {
        let world = World::new(seed, Faults { crash: CrashPolicy::LoseAll, ..Faults::none() });
        world.add_file(DISK, 7 * MIB, 4096);
        let mut chance = Chance(seed * 77 + 1);
        let mut models: Vec<Model> = (0..NAMES.len()).map(|_| Model::default()).collect();
        let mut newest = 0;
        let mut snaps: Vec<SnapId> = Vec::new();

        for life in 0..6 {
            let (models, chance) = (&mut models, &mut chance);
            let (newest, snaps, cleaned) = (&mut newest, &mut snaps, &mut cleaned);
            let reactor = world.reactor();
            let ran = world.run(&reactor, async {
                if life == 0 {
                    let segment_size = [64 << 10, 128 << 10, 256 << 10][seed as usize % 3];
                    let options = InitOptions { size: 7 * MIB, segment_size, ..InitOptions::default() };
                    Store::init(Path::new(DISK), options).await.expect("init");
                }
                let store = if life % 2 == 0 { open().await } else { open_uncached().await };
                // Compressed and encrypted, encrypted only for a while, and neither.
                if seed % 2 == 1 {
                    store.encrypt(&ObjectName::new("rbd_data.a.")).await.expect("a key");
                    store.encrypt(&ObjectName::new("rbd_data.b.")).await.expect("a key");
                }
                compress(&store, "", ["none", "lz4"][life % 2]).await;
                compress(&store, "rbd_data.a.", ["lz4", "zstd:1"][life / 2 % 2]).await;
                compress(&store, "rbd_data.b.", ["deflate:1", "none", "zstd"][life % 3]).await;
                for _ in 0..300 {
                    let which = chance.below(NAMES.len() as u64) as usize;
                    let (name, model) = (ObjectName::new(NAMES[which]), &mut models[which]);
                    let most = [2, 8, 70][chance.below(3) as usize];
                    let (at, count) = (chance.below(BLOCKS), 1 + chance.below(most));
                    let snapc = SnapContext { seq: *newest, snaps: snaps.iter().rev().copied().collect() };
                    let (mut ops, before) = (Vec::new(), model.head.clone());
                    match chance.below(12) {
                        0..7 => {
                            let noise = [0, 700, 4096][chance.below(3) as usize];
                            let mut data = chance.blocks(count as usize, noise);
                            if chance.below(4) == 0 {
                                let zeroes = chance.below(count) as usize * BLOCK;
                                data[zeroes..zeroes + BLOCK].fill(0);
                            }
                            // Not whole blocks, sometimes.
                            let (skip, cut) = if chance.below(3) == 0 { (chance.below(900), 77) } else { (0, 0) };
                            let offset = at * BLOCK as u64 + skip;
                            data.truncate(data.len() - cut);
                            let end = offset as usize + data.len();
                            model.head.resize(model.head.len().max(end), 0);
                            model.head[offset as usize..end].copy_from_slice(&data);
                            ops.push(ObjectOp::Write { offset, data: Buf::copy_of(&data).into() });
                        }
                        7 | 8 => {
                            let (offset, len) = (at * BLOCK as u64 + chance.below(2) * 100, count * BLOCK as u64);
                            let end = model.head.len().min((offset + len) as usize);
                            if (offset as usize) < end {
                                model.head[offset as usize..end].fill(0);
                            }
                            ops.push(ObjectOp::Zero { extent: Extent::new(offset, len) });
                        }
                        9 if snaps.len() < 3 => {
                            let snap = store.snap_allocate().await.expect("a snapshot");
                            models.iter_mut().for_each(|model| {
                                model.snaps.insert(snap.0, model.head.clone());
                            });
                            *newest = snap.0;
                            snaps.push(snap);
                        }
                        9 | 10 if snaps.len() > 1 => {
                            let snap = snaps.remove(chance.below(snaps.len() as u64) as usize);
                            store.snap_remove(snap).await.expect("remove");
                            models.iter_mut().for_each(|model| {
                                model.snaps.remove(&snap.0);
                            });
                        }
                        9 | 10 => {}
                        _ => {
                            let size = chance.below(BLOCKS * BLOCK as u64);
                            if !model.head.is_empty() {
                                model.head.resize(size as usize, 0);
                                ops.push(ObjectOp::Truncate { size });
                            }
                        }
                    }
                    if !ops.is_empty() {
                        let transaction = Transaction::new(ops).with_snapc(Rc::new(snapc));
                        match store.submit(&name, transaction).await {
                            Err(error) if error.kind() == ErrorKind::NoSpace => models[which].head = before,
                            result => drop(result.expect("write")),
                        }
                    }
                }
                for (name, model) in NAMES.iter().zip(&*models) {
                    compare(&store, &ObjectName::new(name), model).await;
                }
                *cleaned += store.stats().cleaned_bytes;
                if life % 2 == 0 {
                    close_and_check(store).await;
                } else {
                    // Everything is replayed.
                    store.flush().await.expect("flush");
                }
            });
            ran.unwrap_or_else(|stop| panic!("seed {seed}, life {life}: {stop}"));
            world.crash(reactor, CrashKind::Power);
            run(&world, async {
                let store = open_uncached().await;
                for (name, model) in NAMES.iter().zip(&*models) {
                    compare(&store, &ObjectName::new(name), model).await;
                }
                close_and_check(store).await;
            });
        }
    }
    assert!(cleaned > 0, "nothing was cleaned");
}

#[test]
fn small_random_writes_take_what_they_compress_to() {
    let world = machine(64 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(64 * MIB, 1 << 20).await;
        compress(&store, "rbd_data.a.", "lz4").await;
        let mut chance = Chance(3);
        let name = ObjectName::new("rbd_data.a.0");
        let writes = (0..512u64).map(|i| {
            let data = chance.blocks(1, 900);
            store.submit(&name, write(i * 37 % 512 * BLOCK as u64, &data))
        });
        let writes: Vec<_> = writes.collect();
        let before = store.stats();
        for write in writes {
            write.await.expect("write");
        }
        let after = store.stats();
        assert_eq!(after.compressed_logical, 512 * BLOCK as u64);
        assert_eq!(after.compressed_stored, 512 * 1024);
        let written = after.device_bytes - before.device_bytes;
        assert!(written < 900 << 10, "{written} bytes written for 512 KiB of compressed data");
        let sizes = store.stored_bytes(&name, SnapId::HEAD).await.expect("sizes").expect("known");
        assert_eq!(sizes, StoredBytes { logical: 512 * BLOCK as u64, stored: 512 * 1024 });
        close_and_check(store).await;
    });
}

#[test]
fn zeroes_become_holes_only_where_data_is_compressed() {
    let world = machine(64 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        compress(&store, "rbd_data.a.", "zstd").await;
        for (name, holes) in [("rbd_data.a.0", true), ("rbd_data.b.0", false)] {
            let name = ObjectName::new(name);
            let mut data = vec![0; 8 * BLOCK];
            data[2 * BLOCK..3 * BLOCK].fill(7);
            store.submit(&name, write(0, &data)).await.expect("write");
            let map = store.map(&name, ObjectRead::head(0, 8 * BLOCK as u64)).await.expect("map");
            let stored: u64 =
                map.runs().iter().filter(|run| run.state == ExtentState::Data).map(|run| run.extent.len).sum();
            assert_eq!(stored, if holes { BLOCK as u64 } else { 8 * BLOCK as u64 });
            assert_eq!(store.stat(&name, SnapId::HEAD).await.expect("stat").size, 8 * BLOCK as u64);
            assert!(read(&store, &name, SnapId::HEAD, 0, 8 * BLOCK as u64).await.expect("read") == data);
        }
        close_and_check(store).await;
    });
}

#[test]
fn data_that_does_not_shrink_is_stored_as_it_is() {
    let world = machine(64 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(64 * MIB, 1 << 20).await;
        compress(&store, "", "zstd").await;
        let data = Chance(9).blocks(64, BLOCK);
        let name = ObjectName::new("rbd_data.a.0");
        store.submit(&name, write(0, &data)).await.expect("write");
        assert_eq!((store.stats().compressed_logical, store.stats().compressed_stored), (0, 0));
        assert!(read(&store, &name, SnapId::HEAD, 0, data.len() as u64).await.expect("read") == data);
        close_and_check(store).await;
    });
}

/// Overwrites blocks until the cleaner has moved many; returns the store.
async fn churn(store: &Store, name: &ObjectName, rounds: u64) {
    let mut chance = Chance(1);
    let mut round = 0;
    while round < rounds || store.stats().cleaned_bytes == 0 {
        let data = chance.blocks(16, 2000);
        store.submit(name, write(chance.below(64) * 16 * BLOCK as u64, &data)).await.expect("write");
        round += 1;
        assert!(round < 100 * rounds, "nothing is cleaned");
    }
}

#[test]
fn segments_that_are_used_again_at_once_are_cleaned_again() {
    let world = machine(10 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(10 * MIB, 256 << 10).await;
        compress(&store, "", "lz4").await;
        let name = ObjectName::new("rbd_data.a.0");
        let mut chance = Chance(4);
        // One write at a time: most of a segment is headers and padding, so that it is the emptiest as soon as it is full.
        for _ in 0..6000 {
            let data = chance.blocks(1, 900);
            store.submit(&name, write(chance.below(3000) * BLOCK as u64, &data)).await.expect("write");
        }
        assert!(store.stats().cleaned_bytes > 0);
        close_and_check(store).await;
    });
}

#[test]
fn mostly_dead_blobs_are_compressed_again_by_the_cleaner() {
    let world = machine(8 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(8 * MIB, 256 << 10).await;
        compress(&store, "", "zstd:1").await;
        let kept = ObjectName::new("rbd_data.a.0");
        // Blobs of 16 blocks, of which only one block will be left: half compressible, and not compressible alone.
        let mut chance = Chance(5);
        let mut expected = Vec::new();
        for i in 0..32u64 {
            let mut data = chance.blocks(16, 100);
            if i % 2 == 1 {
                data[5 * BLOCK..6 * BLOCK].copy_from_slice(&chance.blocks(1, BLOCK));
            }
            store.submit(&kept, write(i * 16 * BLOCK as u64, &data)).await.expect("write");
            expected.push(data[5 * BLOCK..6 * BLOCK].to_vec());
        }
        let whole = store.stored_bytes(&kept, SnapId::HEAD).await.expect("sizes").expect("known");
        for i in 0..32u64 {
            for (at, len) in [(0, 5), (6, 10)] {
                let extent = Extent::new((i * 16 + at) * BLOCK as u64, len * BLOCK as u64);
                store.submit(&kept, Transaction::of(ObjectOp::Zero { extent })).await.expect("zero");
            }
        }
        let sparse = store.stored_bytes(&kept, SnapId::HEAD).await.expect("sizes").expect("known");
        assert_eq!(sparse, StoredBytes { logical: 32 * BLOCK as u64, stored: whole.stored });
        let filler = ObjectName::new("rbd_data.b.0");
        churn(&store, &filler, 3000).await;
        for (i, block) in expected.iter().enumerate() {
            let at = (i as u64 * 16 + 5) * BLOCK as u64;
            assert!(read(&store, &kept, SnapId::HEAD, at, BLOCK as u64).await.expect("read") == *block, "blob {i}");
        }
        let left = store.stored_bytes(&kept, SnapId::HEAD).await.expect("sizes").expect("known");
        assert_eq!(left.logical, sparse.logical);
        assert!(left.stored < sparse.stored, "{left:?} of {sparse:?}: nothing was compressed again");
        close_and_check(store).await;
    });
    run(&world, check());
}

#[test]
fn space_of_mostly_dead_blobs_is_found_when_it_is_needed() {
    let world = machine(12 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(12 * MIB, 256 << 10).await;
        compress(&store, "rbd_data.a.", "zstd:1").await;
        let kept = ObjectName::new("rbd_data.a.0");
        // Of each blob of 32 blocks 4 are left, so that segments look full and hold little.
        const BLOBS: u64 = 90;
        let mut chance = Chance(8);
        let mut expected = Vec::new();
        for i in 0..BLOBS {
            let data = chance.blocks(32, 1500);
            store.submit(&kept, write(i * 32 * BLOCK as u64, &data)).await.expect("write");
            expected.push(data[7 * BLOCK..11 * BLOCK].to_vec());
        }
        let whole = store.stats().compressed_stored;
        assert!(whole > 4 * MIB, "{whole}");
        for i in 0..BLOBS {
            for (at, len) in [(0, 7), (11, 21)] {
                let extent = Extent::new((i * 32 + at) * BLOCK as u64, len * BLOCK as u64);
                store.submit(&kept, Transaction::of(ObjectOp::Zero { extent })).await.expect("zero");
            }
        }
        let plain = ObjectName::new("rbd_data.b.0");
        let data = chance.blocks(16, BLOCK);
        for i in 0..64 {
            store.submit(&plain, write(i * 16 * BLOCK as u64, &data)).await.expect("there is space");
        }
        let (left, capacity) = (store.stats().compressed_stored, store.stats().capacity);
        assert!(capacity < whole + 64 * 16 * BLOCK as u64, "{capacity}: everything fits without it");
        assert!(left < whole * 3 / 4, "{left} of {whole}");
        for (i, blocks) in expected.iter().enumerate() {
            let at = (i as u64 * 32 + 7) * BLOCK as u64;
            let found = read(&store, &kept, SnapId::HEAD, at, blocks.len() as u64).await.expect("read");
            assert!(found == *blocks, "blob {i}");
        }
        close_and_check(store).await;
    });
}

#[test]
fn a_damaged_blob_is_corrupt_for_its_blocks_only() {
    let world = machine(64 * MIB, Faults::none());
    run(&world, async {
        let store = fresh(64 * MIB, 1 << 20).await;
        compress(&store, "", "zstd").await;
        let name = ObjectName::new("rbd_data.a.0");
        let data = Chance(4).blocks(64, 1000);
        store.submit(&name, write(0, &data)).await.expect("write");
        store.close().await.expect("close");
        drop(store);
        // The first blob begins behind the first header of the log that has data: find it by the header of a blob.
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let bytes = disk.read_exact_at(MIB, 4 << 20).await.expect("read").to_vec();
        let begins = |sector: &&[u8]| sector[..4] == [3, 32, 0, 0];
        let at = bytes.chunks(512).position(|sector| begins(&sector)).expect("a blob of 32 blocks") as u64 * 512;
        drop(disk);
        flip(MIB + at + 700).await;
        let store = open().await;
        let mut damaged = Vec::new();
        for block in 0..64u64 {
            match read(&store, &name, SnapId::HEAD, block * BLOCK as u64, BLOCK as u64).await {
                Ok(found) => assert!(found == data[block as usize * BLOCK..][..BLOCK], "block {block}"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                    let offset = format!("rbd_data.a.0 at byte {}", block * BLOCK as u64);
                    assert!(error.to_string().contains(&offset), "{error}");
                    damaged.push(block);
                }
            }
        }
        assert!(damaged == (0..32).collect::<Vec<_>>() || damaged == (32..64).collect::<Vec<_>>(), "{damaged:?}");
        store.close().await.expect("close");
        drop(store);
        let options = CheckOptions { data: true, ..CheckOptions::default() };
        let report = Store::check(Path::new(DISK), options, |_, _| {}).await.expect("check");
        assert_eq!(report.findings.len(), 1, "{report:#?}");
        // Overwriting heals.
        let store = open().await;
        store.submit(&name, write(0, &data)).await.expect("write");
        close_and_check(store).await;
    });
}

#[test]
fn the_setting_lasts_and_reverts_to_the_default() {
    let world = machine(64 * MIB, Faults::none());
    let prefix = ObjectName::new("rbd_data.a.");
    let policy = |store: &Store| {
        let own = store.data_policy(&prefix).expect("a store has policies");
        let default = store.data_policy(&ObjectName::new("")).expect("a store has policies");
        own.or(default).unwrap_or_default().compression.to_string()
    };
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        assert_eq!(policy(&store), "none");
        compress(&store, "rbd_data.a.", "zstd:5").await;
        // The power fails right after that.
    });
    run(&world, async {
        let store = open().await;
        assert_eq!(policy(&store), "zstd:5");
        compress(&store, "", "lz4").await;
        assert_eq!(policy(&store), "zstd:5");
        close_and_check(store).await;
    });
    run(&world, async {
        let store = open().await;
        assert_eq!(policy(&store), "zstd:5");
        store.set_data_policy(&prefix, None).await.expect("removed");
        assert_eq!(policy(&store), "lz4");
        close_and_check(store).await;
        assert_eq!(policy(&*open().await), "lz4");
    });
}

#[test]
fn the_superblock_says_that_there_may_be_blobs_before_there_are_wherever_the_power_fails() {
    let features = |world: &World, copy: u64| world.peek(DISK, copy, 24).map(|bytes| bytes[16]);
    let mut both = 0;
    for point in 1..200 {
        let world = machine(16 * MIB, Faults { crash: CrashPolicy::LoseAll, ..Faults::none() });
        run(&world, async {
            let store = fresh(16 * MIB, 128 << 10).await;
            store.close().await.expect("close");
        });
        assert_eq!(features(&world, 0), Some(0), "a store without compression is one that an older program opens");
        let reactor = world.reactor();
        world.crash_at_point(Some(world.points() + point));
        let ran = world.run(&reactor, async {
            let store = open().await;
            compress(&store, "", "lz4").await;
            store.submit(&ObjectName::new("a"), write(0, &[7; 8 * BLOCK]).durable()).await.expect("write");
        });
        world.crash(reactor, CrashKind::Power);
        let copies = [features(&world, 0), features(&world, 64 << 10)];
        run(&world, async {
            let store = open().await;
            if store.stats().compressed_stored > 0
                || store.data_policy(&ObjectName::new("")).expect("policies").is_some()
            {
                assert_eq!(copies, [Some(2), Some(2)], "crash at point {point}");
                both += 1;
            }
            close_and_check(store).await;
        });
        if ran.is_ok() {
            assert!(both > 1 && point > 10, "{both} of {point}");
            return;
        }
    }
    panic!("it does not end");
}
