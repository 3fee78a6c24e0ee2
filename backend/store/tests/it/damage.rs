//! Tests of failures of device, power or space at critical moments.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::sync::join_all;
use forebay_reactor::{sleep, spawn};
use forebay_sim::{CrashPolicy, DiskFaults, Faults, World};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};

const MIB: u64 = 1 << 20;

fn world(size: u64) -> World {
    machine(size, Faults { crash: CrashPolicy::LoseAll, ..Faults::none() })
}

async fn fresh(size: u64, segment_size: u32) -> Rc<Store> {
    Store::init(Path::new(DISK), InitOptions { size, segment_size, ..InitOptions::default() }).await.expect("init");
    open().await
}

async fn open() -> Rc<Store> {
    Store::open(Path::new(DISK), StoreOptions::default()).await.expect("open")
}

async fn check() {
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = Store::check(Path::new(DISK), options, |_, _| {}).await.expect("check");
    assert!(report.is_clean(), "{report:#?}");
}

fn write(offset: u64, byte: u8, len: usize) -> Transaction {
    Transaction::of(ObjectOp::Write { offset, data: Buf::copy_of(&vec![byte; len]).into() })
}

async fn read(store: &Store, name: &str, offset: u64, len: u64) -> Result<Vec<u8>> {
    let read = ObjectRead::head(offset, len);
    Ok(store.read(&ObjectName::new(name), read).await?.fill(read.extent).to_vec())
}

#[test]
fn a_durable_write_does_not_hang_on_the_one_after_it() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        let durable = store.submit(&ObjectName::new("a"), write(0, 7, 4096).durable());
        // Begins in the same batch, and ends in one that is never written.
        let other = store.submit(&ObjectName::new("b"), write(0, 8, 300 << 10));
        durable.await.expect("durable");
        other.await.expect("write");
    });
    run(&world, async {
        let store = open().await;
        assert_eq!(read(&store, "a", 0, 4096).await.expect("what was durable is there"), [7; 4096]);
        assert_eq!(read(&store, "b", 0, 4096).await.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn a_checkpoint_that_fails_leaves_the_counts_right() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        for i in 0..200 {
            store.submit(&ObjectName::new(format!("o{i}")), write(0, 1, 4096)).await.expect("write");
        }
        store.close().await.expect("close");
        drop(store);
        let store = open().await;
        for round in 0..3 {
            for i in 0..200 {
                store.submit(&ObjectName::new(format!("o{i}")), write(0, round, 32 << 10)).await.expect("write");
            }
            let failing =
                Faults { disk: DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }, ..Faults::none() };
            world.set_faults(failing);
            store.submit(&ObjectName::new("o0"), write(0, round, 4096)).await.expect_err("the device fails");
            sleep(Duration::from_secs(3)).await;
            store.flush().await.expect_err("the device fails");
            world.set_faults(Faults::none());
            sleep(Duration::from_secs(3)).await;
            store.flush().await.expect("the device works again");
        }
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn a_device_that_fails_for_long_costs_neither_memory_nor_log() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        for i in 0..3000 {
            store.submit(&ObjectName::new(format!("o{i}")), write(0, 1, 4096)).await.expect("write");
        }
        let failing =
            Faults { disk: DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }, ..Faults::none() };
        world.set_faults(failing);
        sleep(Duration::from_secs(5)).await;
        let before = store.stats().device_bytes;
        sleep(Duration::from_secs(600)).await;
        assert!(store.stats().device_bytes - before < MIB, "{} bytes", store.stats().device_bytes - before);
        world.set_faults(Faults::none());
        sleep(Duration::from_secs(3)).await;
        store.flush().await.expect("the device works again");
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn long_writes_at_once_do_not_use_up_the_log() {
    let world = world(16 * MIB);
    run(&world, async {
        let store = fresh(16 * MIB, 64 << 10).await;
        for round in 0..12u8 {
            let writers = (0..4).map(|i| {
                let name = ObjectName::new(format!("o{i}"));
                let store = store.clone();
                spawn(async move { store.submit(&name, write(0, round, 2 << 20)).await })
            });
            for writer in writers.collect::<Vec<_>>() {
                writer.await.expect("write");
            }
        }
        store.flush().await.expect("flush");
        for i in 0..4 {
            assert_eq!(read(&store, &format!("o{i}"), MIB, 4096).await.expect("read"), [11; 4096]);
        }
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn what_snapshots_keep_is_counted_as_growth() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 256 << 10).await;
        let blocks = store.stats().capacity * 6 / 10 / 65536;
        let name = |i: u64| ObjectName::new(format!("o{}", i / 16));
        for i in 0..blocks {
            store.submit(&name(i), write(i % 16 * 65536, 1, 65536)).await.expect("write");
        }
        let snap = store.snap_allocate().await.expect("snapshot");
        let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
        let mut refused = 0;
        for i in 0..blocks {
            let write = write(i % 16 * 65536, 2, 65536).with_snapc(snapc.clone());
            match store.submit(&name(i), write).await {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace);
                    refused += 1;
                }
            }
        }
        let stats = store.stats();
        assert!(refused > 0);
        assert!(stats.used <= stats.capacity * 102 / 100, "{stats:?}");
        store.flush().await.expect("flush");
        store.snap_remove(snap).await.expect("remove the snapshot");
        while store.stats().used > stats.capacity * 7 / 10 {
            sleep(Duration::from_millis(100)).await;
        }
        for i in 0..blocks {
            store.submit(&name(i), write(i % 16 * 65536, 3, 65536)).await.expect("write");
        }
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn a_damaged_map_page_does_not_stop_the_cleaner() {
    use forebay_store::format::batch::BatchHeader;
    use forebay_store::format::entry::StoreEntry;
    let world = world(16 * MIB);
    run(&world, async {
        let store = fresh(16 * MIB, 64 << 10).await;
        // In reverse order, so that its pages are long, and the first one shares no block with a tree node.
        for block in (0..1024).rev() {
            store.submit(&ObjectName::new("victim"), write(block * 4096, 1, 4096)).await.expect("write");
        }
        store.close().await.expect("close");
    });
    let mut pages = Vec::new();
    for block in (256..4096).map(|block| block * 4096) {
        let Ok(header) = BatchHeader::decode(&world.peek(DISK, block, 4096).expect("peek")) else { continue };
        for entry in StoreEntry::decode_all(&header.entries).expect("entries") {
            if let StoreEntry::Page { oid: 1, index: 0, at, .. } = entry {
                pages.push((block + 4096 + u64::from(at)) / 4096 * 4096);
            }
        }
    }
    assert!(!pages.is_empty());
    run(&world, async {
        let store = open().await;
        pages.iter().for_each(|&page| assert!(world.set_bad_sector(DISK, page)));
        read(&store, "victim", 0, 4096).await.expect_err("the page cannot be read");
        for i in 0..20_000u64 {
            let write = write(i % 512 * 4096, i as u8, 4096);
            store.submit(&ObjectName::new("new"), write).await.expect("write");
        }
        store.flush().await.expect("flush");
        read(&store, "victim", 0, 4096).await.expect_err("the page cannot be read");
        store.close().await.expect("close");
    });
}

#[test]
fn the_cleaner_leaves_a_damaged_block_where_it_is() {
    let world = world(16 * MIB);
    run(&world, async {
        let store = fresh(16 * MIB, 64 << 10).await;
        for block in (0..1024).step_by(16) {
            let names =
                (0..32).map(|i| (block + i / 2, ObjectName::new(["victim", "other"][i as usize % 2]), 1 + i % 2));
            let writes = names.map(|(block, name, byte)| store.submit(&name, write(block * 4096, byte as u8, 4096)));
            for done in join_all(writes).await {
                done.expect("write");
            }
        }
        assert_eq!(store.stats().cleaned_bytes, 0, "each block of the victim is there once");
        store.close().await.expect("close");
    });
    let holds = |block: &u64| world.peek(DISK, *block, 4096).expect("peek").iter().all(|byte| *byte == 1);
    let damaged = (256..4096).map(|block| block * 4096).find(holds).expect("a block of the victim");
    assert_eq!(world.flip_bits_where(DISK, 1, |offset| offset / 4096 == damaged / 4096).len(), 1);
    run(&world, async {
        let store = open().await;
        // Half of each segment is dead, and space is needed.
        store.submit(&ObjectName::new("other"), Transaction::of(ObjectOp::Remove)).await.expect("removed");
        for i in 0..20_000u64 {
            let write = write(i * 7919 % 1700 * 4096, i as u8, 4096);
            store.submit(&ObjectName::new("new"), write).await.expect("write");
        }
        store.flush().await.expect("flush");
        assert!(store.stats().cleaned_bytes > 0);
        assert_eq!(store.stats().checksum_errors, 1, "the cleaner has looked at what it moves");
        let mut lost = 0;
        for block in 0..1024 {
            lost += u32::from(read(&store, "victim", block * 4096, 4096).await.is_err());
        }
        assert_eq!(lost, 1, "who reads it is told, and nothing else is lost");
    });
}

#[test]
fn an_object_has_no_more_snapshots_than_its_record_can_hold() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 64 << 10).await;
        let name = ObjectName::new("o");
        let mut kept = 0;
        for i in 0..2000u64 {
            let snap = store.snap_allocate().await.expect("snapshot");
            let snapc = Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] });
            match store.submit(&name, write(0, i as u8, 4096).with_snapc(snapc)).await {
                Ok(_) => kept += 1,
                Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace),
            }
        }
        assert!((300..1900).contains(&kept), "{kept}");
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}

#[test]
fn segments_are_not_more_than_their_table_can_hold() {
    let world = world(2048 * MIB);
    run(&world, async {
        let options = InitOptions { size: 2048 * MIB, segment_size: 64 << 10, ..InitOptions::default() };
        let error = Store::init(Path::new(DISK), options).await.expect_err("too many segments");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    });
}

#[test]
fn many_removed_keys_are_passed_over() {
    let world = world(64 * MIB);
    run(&world, async {
        let store = fresh(64 * MIB, 128 << 10).await;
        let name = ObjectName::new("o");
        let keys: Vec<Vec<u8>> = (0..30_000).map(|i| format!("key {i:06}").into_bytes()).collect();
        let pairs = keys.iter().map(|key| (key.clone(), vec![1])).collect();
        store.submit(&name, Transaction::of(ObjectOp::KvSet { pairs })).await.expect("set");
        store.close().await.expect("close");
        drop(store);
        let store = open().await;
        let keys = keys[..29_999].to_vec();
        store.submit(&name, Transaction::of(ObjectOp::KvRemove { keys })).await.expect("remove");
        let page = store.kv_list(&name, b"", b"", 1).await.expect("list");
        assert_eq!(page.pairs, [(b"key 029999".to_vec(), vec![1])]);
        store.close().await.expect("close");
        drop(store);
        check().await;
    });
}
