//! Tests of maintenance: closing, releasing the device, superblock repair, snapshot trimming.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_accel::crc32c::crc32c;
use forebay_block::*;
use forebay_reactor::{File, OpenOptions, sleep, spawn};
use forebay_sim::{CrashKind, DiskFaults, Faults, World};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};

const MIB: u64 = 1 << 20;

fn world(size: u64) -> World {
    machine(size, Faults::none())
}

async fn fresh(size: u64) -> Rc<Store> {
    Store::init(Path::new(DISK), InitOptions { size, segment_size: 128 << 10, ..InitOptions::default() })
        .await
        .expect("init");
    open().await
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

fn write(offset: u64, byte: u8, len: usize) -> Transaction {
    Transaction::of(ObjectOp::Write { offset, data: Buf::copy_of(&vec![byte; len]).into() })
}

#[test]
fn a_device_that_fails_is_let_go_of() {
    for closes in [true, false] {
        let world = world(64 * MIB);
        run(&world, async {
            let store = fresh(64 * MIB).await;
            let name = ObjectName::new("o");
            store.submit(&name, write(0, 1, 4096)).await.expect("write");
            store.flush().await.expect("flush");
            assert!(store.refuses_writes().is_none());
            world.set_faults(Faults {
                disk: DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() },
                ..Faults::none()
            });
            store.submit(&name, write(0, 2, 4096)).await.expect_err("the device fails");
            store.flush().await.expect_err("the device fails");
            assert!(store.refuses_writes().is_some(), "operators are told");
            if closes {
                let error = store.close().await.expect_err("the device fails");
                let again = store.close().await.expect_err("it was not closed cleanly, whoever asks");
                assert_eq!(error.kind(), again.kind());
            }
            drop(store);
            world.set_faults(Faults::none());
            let store = open().await;
            let data = store.read(&name, ObjectRead::head(0, 1)).await.expect("read");
            assert!(matches!(data.runs[0].1.to_vec()[0], 1 | 2));
            store.close().await.expect("close");
        });
    }
}

#[test]
fn a_renewed_superblock_keeps_what_this_version_does_not_know() {
    let world = world(64 * MIB);
    run(&world, async { fresh(64 * MIB).await.close().await.expect("close") });
    let mut newer = world.peek(DISK, 0, 4096).expect("the superblock");
    // Compatible feature, with its own field behind the known ones.
    newer[24] = 0x40;
    newer[1000] = 7;
    newer[12..16].fill(0);
    let crc = crc32c(&newer);
    newer[12..16].copy_from_slice(&crc.to_le_bytes());
    let put = async |block: &[u8], at| {
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        disk.write_at(Buf::copy_of(block), at).await.expect("write");
        disk.sync_data().await.expect("sync");
    };
    run(&world, async {
        put(&newer, 0).await;
        put(&[0xAA; 4096], 64 << 10).await;
        let report = Store::check(DISK, CheckOptions { repair: true, ..CheckOptions::default() }, |_, _| {}).await;
        let report = report.expect("check");
        assert!(report.is_clean() && report.findings.len() == 1, "{report:#?}");
    });
    for at in [0, 64 << 10] {
        assert!(world.peek(DISK, at, 4096).expect("a copy") == newer, "the copy at byte {at} is another");
    }
}

#[test]
fn superblocks_of_which_both_are_damaged_are_made_anew_in_a_file_and_not_on_a_device() {
    for device in [false, true] {
        let world = World::new(1, Faults::none());
        match device {
            true => world.add_disk(DISK, 64 * MIB, 4096),
            false => world.add_file(DISK, 64 * MIB, 4096),
        }
        run(&world, async {
            let store = fresh(if device { 48 * MIB } else { 64 * MIB }).await;
            store.submit(&ObjectName::new("o"), write(0, 1, 4096)).await.expect("write");
            store.close().await.expect("close");
            drop(store);
            let spoil = async |at| {
                let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
                disk.write_at(Buf::zeroed(4096), at).await.expect("write");
                disk.sync_data().await.expect("sync");
            };
            let repair = || Store::check(DISK, CheckOptions { repair: true, ..CheckOptions::default() }, |_, _| {});
            for one in [0, 64 << 10] {
                spoil(one).await;
                assert!(repair().await.expect("one copy is enough").is_clean(), "device: {device}");
            }
            spoil(0).await;
            spoil(64 << 10).await;
            match (device, repair().await) {
                (false, repaired) => assert!(repaired.expect("made anew").is_clean()),
                (true, refused) => {
                    let error = refused.expect_err("nobody knows how large the store was");
                    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("a device"), "{error}");
                }
            }
        });
        let first = world.peek(DISK, 0, 4096).expect("the superblock");
        assert_eq!(first.iter().all(|&byte| byte == 0), device, "it is made anew in a file, and only there");
    }
}

#[test]
fn taking_a_snapshot_away_looks_at_each_object_once_or_twice() {
    const OBJECTS: u64 = 2000;
    let world = world(128 * MIB);
    run(&world, async {
        let store = fresh(128 * MIB).await;
        let name = |i: u64| ObjectName::new(format!("o{i}"));
        for i in 0..OBJECTS {
            store.submit(&name(i), write(0, 1, 4096)).await.expect("write");
        }
        let snap = store.snap_allocate().await.expect("snapshot");
        let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
        for i in 0..OBJECTS {
            store.submit(&name(i), write(0, 2, 4096).with_snapc(snapc.clone())).await.expect("write");
        }
        store.close().await.expect("close");
        drop(store);
        let store = open().await;
        let before = store.stats().pairs_looked_at;
        store.snap_remove(snap).await.expect("remove");
        for i in 0..OBJECTS {
            while !store.snap_set(&name(i)).await.expect("clones").clones.is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        }
        let looked_at = store.stats().pairs_looked_at - before;
        assert!(looked_at <= 4 * OBJECTS, "{looked_at} pairs for {OBJECTS} objects");
        store.close().await.expect("close");
    });
}

#[test]
fn the_cleaner_works_in_short_rounds() {
    const SEGMENT: u64 = 64 << 10;
    let world = world(64 * MIB);
    run(&world, async {
        let options = InitOptions { size: 64 * MIB, segment_size: SEGMENT as u32, ..InitOptions::default() };
        Store::init(Path::new(DISK), options).await.expect("init");
        let store = open().await;
        let blocks = store.stats().capacity * 8 / 10 / 4096;
        let name = |block: u64| ObjectName::new(format!("o{}", block / 256));
        for block in 0..blocks {
            store.submit(&name(block), write(block % 256 * 4096, 1, 4096)).await.expect("write");
        }
        let (mut before, mut longest, mut seed) = (store.stats(), 0, 1_u64);
        for _ in 0..2 * blocks {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = (seed >> 33) % blocks;
            store.submit(&name(block), write(block % 256 * 4096, 2, 4096)).await.expect("write");
            let now = store.stats();
            if now.checkpoints > before.checkpoints {
                longest =
                    longest.max((now.cleaned_bytes - before.cleaned_bytes) / (now.checkpoints - before.checkpoints));
                before = now;
            }
        }
        assert!(longest > 0, "it was cleaned");
        let segments = u64::from(before.segments);
        // One round, and the part of the next one done before the check.
        let round = (segments / 64 + 2) * SEGMENT * 7 / 8;
        assert!(longest <= 2 * round, "{longest} bytes between two checkpoints, and a round has {round}");
        store.close().await.expect("close");
    });
}

#[test]
fn what_is_acknowledged_survives_a_kill_of_the_process() {
    const WRITES: u8 = 20;
    let world = world(64 * MIB);
    run(&world, async { fresh(64 * MIB).await.close().await.expect("close") });
    let name = ObjectName::new("o");
    for byte in 1..WRITES {
        let reactor = world.reactor();
        let written = world.run(&reactor, async {
            let store = open().await;
            if byte > 1 {
                let data = store.read(&name, ObjectRead::head(0, 4096)).await.expect("read");
                assert_eq!(data.runs[0].1.to_vec(), [byte - 1; 4096], "acknowledged before the process was killed");
            }
            store.submit(&name, write(0, byte, 4096)).await
        });
        written.expect("the world goes on").expect("write");
        world.crash(reactor, CrashKind::Kill);
    }
}

#[test]
fn concurrent_writes_share_batches() {
    const WRITES: u64 = 64;
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB).await;
        let before = store.stats().device_bytes;
        let writes = (0..WRITES).map(|i| store.submit(&ObjectName::new("o"), write(i * 4096, 1, 4096)));
        let tasks: Vec<_> = writes.map(spawn).collect();
        for task in tasks {
            task.await.expect("write");
        }
        let headers = (store.stats().device_bytes - before) / 4096 - WRITES;
        assert!(headers <= 3, "{WRITES} writes have {headers} batches");
        store.close().await.expect("close");
    });
}
