//! Tests with damaged anchors of the newest checkpoint: everything recoverable from the previous one is recovered, and
//! durable data is discarded only on request.

use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{Faults, World};
use forebay_store::format::anchor::{Anchor, SLOTS};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::entry::StoreEntry;
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use crate::common::{DISK, machine, run};
use crate::flip::flip;

const SIZE: u64 = 64 << 20;

fn world() -> World {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        let options = InitOptions { size: SIZE, segment_size: 128 << 10, ..InitOptions::default() };
        Store::init(DISK, options).await.expect("init");
    });
    world
}

async fn open(roll_back: bool) -> Result<Rc<Store>> {
    Store::open(DISK, StoreOptions { roll_back, ..StoreOptions::default() }).await
}

async fn check(roll_back: bool) -> Vec<String> {
    let options = CheckOptions { data: true, roll_back, ..CheckOptions::default() };
    let report = Store::check(DISK, options, |_, _| {}).await.expect("check");
    report.findings.into_iter().filter(|finding| !finding.repaired).map(|finding| finding.place).collect()
}

async fn write(store: &Store, name: &str) {
    let data = Buf::copy_of(&[1; 4096]).into();
    let write = Transaction::of(ObjectOp::Write { offset: 0, data }).durable();
    store.submit(&ObjectName::new(name), write).await.expect("write");
}

async fn is_there(store: &Store, name: &str) -> bool {
    match store.stat(&ObjectName::new(name), SnapId::HEAD).await {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => panic!("{error:?}"),
    }
}

/// Damages both copies of the newest anchor, or of the older one.
async fn spoil(newest: bool) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    let mut generations = Vec::new();
    let superblock = disk.read_exact_at(0, 4096).await.expect("read");
    let store = u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"));
    for slot in SLOTS {
        let block = disk.read_exact_at(slot[0], 4096).await.expect("read");
        generations.push((Anchor::decode(&block, store).expect("an anchor").generation, slot));
    }
    generations.sort_unstable();
    for at in generations[usize::from(newest)].1 {
        disk.write_at(Buf::copy_of(&[0xAA; 4096]), at).await.expect("write");
    }
    disk.sync_data().await.expect("sync");
}

#[test]
fn what_the_log_still_has_is_recovered_from_the_checkpoint_before() {
    for newest in [true, false] {
        let world = world();
        run(&world, async {
            let store = open(false).await.expect("open");
            write(&store, "a").await;
            store.close().await.expect("close");
            drop(store);
            // The newest checkpoint is that of closing; the previous one is that of opening.
            spoil(newest).await;
            let found = check(false).await;
            assert_eq!(found.len(), 2, "both copies are told of, and nothing else: {found:?}");
            assert!(found.iter().all(|place| place.starts_with("anchor")), "{found:?}");
            let store = open(false).await.expect("nothing is lost");
            assert!(is_there(&store, "a").await);
            store.close().await.expect("close");
            drop(store);
            assert!(check(false).await.is_empty(), "the next checkpoints took the place of the damaged one");
        });
    }
}

#[test]
fn what_was_acknowledged_is_not_given_up_unasked() {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        write(&store, "a").await;
        store.close().await.expect("close");
        drop(store);
        let store = open(false).await.expect("open");
        write(&store, "b").await;
    });
    run(&world, async {
        // The newest checkpoint is that of the second opening; the previous one is clean, so that nothing would be
        // replayed.
        spoil(true).await;
        let error = open(false).await.err().expect("acknowledged data would be lost");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("--roll-back"), "{error}");
        assert_eq!(check(false).await.len(), 3, "both copies, and what is lost by it");
        assert!(check(true).await.is_empty());
        let store = open(false).await.expect("it was gone back for good");
        assert_eq!((is_there(&store, "a").await, is_there(&store, "b").await), (true, false));
        store.close().await.expect("close");
        drop(store);
        assert!(check(false).await.is_empty());
    });
}

/// Returns the batch headers on the disk, sorted by number.
fn headers(world: &World) -> Vec<BatchHeader> {
    let header = |block| {
        let bytes = world.peek(DISK, block * 4096, 4096).expect("peek");
        BatchHeader::decode(&bytes).ok().filter(|header| header.block == block)
    };
    let mut headers: Vec<BatchHeader> = (0..SIZE / 4096).filter_map(header).collect();
    headers.sort_unstable_by_key(|header| header.seq);
    headers
}

#[test]
fn a_damaged_batch_before_a_lost_checkpoint_is_not_taken_for_one_that_was_never_durable() {
    // One flush makes the write and the batches of the closing checkpoint durable, so that no batch records another as
    // durable.
    let alone = [0, 20, 100, 4096].map(|byte| (byte, None));
    for (damaged_byte, later) in alone.into_iter().chain([(100, Some(100)), (4096, Some(100))]) {
        let world = world();
        run(&world, async {
            let store = open(false).await.expect("open");
            write(&store, "a").await;
            store.close().await.expect("close");
            drop(store);
            let store = open(false).await.expect("open");
            let data = Buf::copy_of(&[2; 4096]).into();
            let write = Transaction::of(ObjectOp::Write { offset: 0, data });
            store.submit(&ObjectName::new("b"), write).await.expect("write");
            store.close().await.expect("close");
        });
        let writes = |header: &BatchHeader| {
            let entries = StoreEntry::decode_all(&header.entries).expect("entries");
            entries.iter().any(|entry| matches!(entry, StoreEntry::Write { .. }))
        };
        let batch = headers(&world).into_iter().rfind(writes).expect("the batch of the write");
        run(&world, async {
            spoil(true).await;
            for header in headers(&world).iter().filter(|header| header.seq > batch.seq) {
                if let Some(byte) = later {
                    flip(header.block * 4096 + byte).await;
                }
            }
            flip(batch.block * 4096 + damaged_byte).await;
            if (damaged_byte, later) == (4096, None) {
                // The batch of the closing checkpoint's record records this one as durable: only its data is damaged.
                let store = open(false).await.expect("no batch is missing");
                let read = store.read(&ObjectName::new("b"), ObjectRead::head(0, 1)).await;
                assert_eq!(read.expect_err("its data is damaged").kind(), ErrorKind::Corrupt);
                store.close().await.expect("close");
                return;
            }
            let error = open(false).await.err().expect("acknowledged data would be lost");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {damaged_byte}: {error}");
            assert!(error.to_string().contains("--roll-back"), "{error}");
            assert!(check(true).await.is_empty());
            let store = open(false).await.expect("it was gone back for good");
            assert_eq!((is_there(&store, "a").await, is_there(&store, "b").await), (true, false));
            store.close().await.expect("close");
        });
    }
}

#[test]
fn a_damaged_header_within_the_log_is_not_taken_for_its_end() {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        for name in ["a", "b", "c"] {
            write(&store, name).await;
        }
    });
    let batches = headers(&world);
    let second = batches[batches.len() - 2].block;
    run(&world, async {
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        disk.write_at(Buf::copy_of(&[0xAA; 4096]), second * 4096).await.expect("write");
        disk.sync_data().await.expect("sync");
        drop(disk);
        let error = open(false).await.err().expect("acknowledged data would be lost");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("--roll-back"), "{error}");
        assert_eq!(check(false).await, ["the log"]);
        assert!(check(true).await.is_empty());
        let store = open(false).await.expect("the rest was given up for good");
        assert_eq!((is_there(&store, "a").await, is_there(&store, "c").await), (true, false));
        write(&store, "d").await;
        store.close().await.expect("close");
        drop(store);
        assert!(check(false).await.is_empty());
    });
}

#[test]
fn closing_twice_waits_for_the_end_of_the_first() {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        write(&store, "a").await;
        let first = forebay_reactor::spawn({
            let store = store.clone();
            async move { store.close().await }
        });
        forebay_reactor::yield_now().await;
        let before = store.stats().checkpoints;
        store.close().await.expect("the first one's answer");
        assert!(store.stats().checkpoints > before, "answered before the store was closed");
        first.await.expect("close");
        store.close().await.expect("again");
    });
}

#[test]
fn a_close_that_is_given_up_keeps_nobody_waiting() {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        write(&store, "a").await;
        let first = forebay_reactor::spawn({
            let store = store.clone();
            async move { store.close().await }
        });
        forebay_reactor::yield_now().await;
        first.abort();
        let error = store.close().await.expect_err("nothing is known of it");
        assert_eq!(error.kind(), ErrorKind::ShuttingDown);
    });
    run(&world, async {
        let store = open(false).await.expect("as after a crash");
        assert!(is_there(&store, "a").await);
    });
}

#[test]
fn a_log_that_was_reused_since_is_not_taken_for_its_beginning() {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        // Overwritten many times: every segment has been reused since the opening.
        let before = store.stats().checkpoints;
        for round in 0..40_u32 {
            for i in 0..64 {
                let data = Buf::copy_of(&vec![round as u8; 64 << 10]).into();
                let write = Transaction::of(ObjectOp::Write { offset: 0, data });
                store.submit(&ObjectName::new(format!("o{i}")), write).await.expect("write");
            }
            store.flush().await.expect("flush");
        }
        assert!(store.stats().checkpoints - before > 3);
    });
    run(&world, async {
        spoil(true).await;
        match open(false).await {
            // The previous checkpoint recovers all durable data.
            Ok(store) => {
                for i in 0..64 {
                    let name = ObjectName::new(format!("o{i}"));
                    let read = ObjectRead::head(0, 64 << 10);
                    let data = store.read(&name, read).await.expect("read").fill(read.extent).to_vec();
                    assert!(data.iter().all(|&byte| byte == 39), "object {i} is an old one");
                }
                store.close().await.expect("close");
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    });
}

#[test]
fn data_that_a_rollback_would_find_overwritten_is_told_before_anything_is_written() {
    let world = world();
    let put = async |store: &Store, name: String, byte: u8| {
        let data = Buf::copy_of(&vec![byte; 64 << 10]).into();
        let write = Transaction::of(ObjectOp::Write { offset: 0, data });
        store.submit(&ObjectName::new(name), write).await.expect("write");
    };
    run(&world, async {
        let store = open(false).await.expect("open");
        for i in 0..32 {
            put(&store, format!("o{i}"), 0).await;
        }
        for i in 0..16 {
            put(&store, format!("cold{i}"), 0).await;
        }
        // In the same segments as the metadata of the checkpoints.
        write(&store, "beside the first").await;
        store.close().await.expect("close");
        drop(store);
        let store = open(false).await.expect("open");
        write(&store, "beside the second").await;
        let before = store.stats().checkpoints;
        for byte in [1, 2] {
            for i in 0..32 {
                put(&store, format!("o{i}"), byte).await;
            }
        }
        let mut more = 0;
        while store.stats().checkpoints == before {
            put(&store, format!("more{more}"), 3).await;
            more += 1;
            assert!(more < 60, "no checkpoint");
        }
        // The segments that this checkpoint freed are used again, first those of the objects as they were, and then some
        // of the log since.
        for i in 0..40 {
            put(&store, format!("new{i}"), 3).await;
        }
        store.flush().await.expect("flush");
        assert_eq!(store.stats().checkpoints, before + 1);
    });
    let disk = |world: &World| world.peek(DISK, 0, SIZE as usize).expect("peek");
    let rolled_back = async |force| {
        let options = CheckOptions { data: false, roll_back: true, force, ..CheckOptions::default() };
        Store::check(DISK, options, |_, _| {}).await.expect("a report")
    };
    run(&world, spoil(true));
    let before = disk(&world);
    let report = run(&world, rolled_back(false));
    assert!(report.waits_for_force, "{report:#?}");
    let overwritten: Vec<&str> = report.findings.iter().map(|finding| &finding.place[..]).collect();
    assert!(overwritten.iter().any(|place| place.starts_with('o')), "objects are named: {report:#?}");
    assert!(disk(&world) == before, "nothing was written");
    let report = run(&world, rolled_back(true));
    assert!(!report.waits_for_force, "{report:#?}");
    run(&world, async {
        let store = open(false).await.expect("it was gone back for good");
        let mut damaged = 0;
        for name in (0..32).map(|i| format!("o{i}")).chain((0..16).map(|i| format!("cold{i}"))) {
            let read = store.read(&ObjectName::new(&name), ObjectRead::head(0, 64 << 10)).await;
            if let Err(error) = read {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert!(overwritten.contains(&&name[..]), "{name} was not named");
                damaged += 1;
            }
        }
        assert!(damaged > 0 && damaged <= 32, "{damaged} objects");
        store.close().await.expect("close");
    });
}

/// Batch numbers that an opening skips after a clean checkpoint.
const LEFT_OUT: u64 = 1 << 20;

/// Renumbers the batches of the newest opening as if written by a version that skips no numbers after a clean close.
async fn number_without_a_gap(world: &World) {
    let batches = headers(world);
    let epoch = batches.last().expect("a batch").epoch;
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    for mut header in batches.into_iter().filter(|header| header.epoch == epoch) {
        header.seq -= LEFT_OUT;
        header.durable_seq -= LEFT_OUT;
        let mut block = vec![0; 4096];
        header.encode(&mut block);
        disk.write_at(Buf::copy_of(&block), header.block * 4096).await.expect("write");
    }
    disk.sync_data().await.expect("sync");
}

/// Returns a store that was closed cleanly with "a", and then opened again for "b" and interrupted. The second opening
/// is by a version that skips numbers, or by one that does not.
fn two_lives(leaves_out: bool) -> World {
    let world = world();
    run(&world, async {
        let store = open(false).await.expect("open");
        write(&store, "a").await;
        store.close().await.expect("close");
    });
    let numbers = |world: &World| headers(world).last().expect("a batch").seq;
    let before = numbers(&world);
    run(&world, async {
        let store = open(false).await.expect("open");
        write(&store, "b").await;
    });
    assert!(numbers(&world) >= before + LEFT_OUT - 2, "the second life leaves numbers out");
    if !leaves_out {
        run(&world, number_without_a_gap(&world));
        assert!(numbers(&world) < before + 20);
    }
    world
}

#[test]
fn a_life_after_an_orderly_close_is_noticed_whether_or_not_it_left_numbers_out() {
    for leaves_out in [true, false] {
        let world = two_lives(leaves_out);
        run(&world, async {
            // The anchor of the second opening; the previous one is clean, so that nothing would be replayed.
            spoil(true).await;
            let error = open(false).await.err().expect("acknowledged data would be lost");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains("--roll-back"), "{error}");
            assert_eq!(check(false).await.len(), 3, "both copies, and what is lost by it");
            assert!(check(true).await.is_empty());
            let store = open(false).await.expect("it was gone back for good");
            assert_eq!((is_there(&store, "a").await, is_there(&store, "b").await), (true, false));
            store.close().await.expect("close");
            drop(store);
            assert!(check(false).await.is_empty());
        });
    }
}

#[test]
fn an_orderly_close_that_no_life_came_after_is_opened_without_a_word() {
    // The closing checkpoint's batches may be anywhere in a segment, including its beginning.
    for writes in 1..=20 {
        let world = world();
        run(&world, async {
            for name in ["a", "b"] {
                let store = open(false).await.expect("open");
                for _ in 0..writes {
                    write(&store, name).await;
                }
                store.close().await.expect("close");
                drop(store);
            }
            spoil(false).await;
            assert_eq!(check(false).await.len(), 2, "{writes} writes: both copies, and nothing else");
            let store = open(false).await.unwrap_or_else(|error| panic!("{writes} writes: {error}"));
            assert_eq!((is_there(&store, "a").await, is_there(&store, "b").await), (true, true));
            store.close().await.expect("close");
            drop(store);
            assert!(check(false).await.is_empty());
        });
    }
}

#[test]
fn a_rebuild_notices_a_life_after_an_orderly_close_whose_checkpoints_are_lost() {
    for leaves_out in [true, false] {
        let world = two_lives(leaves_out);
        let epoch = headers(&world).into_iter().rfind(|header| header.durable_seq > 0).expect("a batch").epoch;
        let has_record = |header: &&BatchHeader| {
            let entries = StoreEntry::decode_all(&header.entries).expect("entries");
            header.epoch == epoch && entries.iter().any(|entry| matches!(entry, StoreEntry::Checkpoint { .. }))
        };
        let records: Vec<BatchHeader> = headers(&world).iter().filter(has_record).cloned().collect();
        run(&world, async {
            assert!(!records.is_empty());
            for record in &records {
                flip(record.block * 4096 + 100).await;
            }
            spoil(true).await;
            let options = CheckOptions { data: true, rebuild: true, ..CheckOptions::default() };
            let report = Store::check(DISK, options, |_, _| {}).await.expect("a report");
            let rebuilt = report.rebuild.as_ref().expect("a rebuild");
            let told = rebuilt.lost.iter().any(|lost| lost.contains("were durable"));
            assert!(!rebuilt.written && told, "{rebuilt:?}");
            let options = CheckOptions { data: true, rebuild: true, roll_back: true, ..CheckOptions::default() };
            let report = Store::check(DISK, options, |_, _| {}).await.expect("a report");
            assert!(report.is_clean() && report.rebuild.is_some_and(|rebuilt| rebuilt.written));
            let store = open(false).await.expect("it was gone back for good");
            assert_eq!((is_there(&store, "a").await, is_there(&store, "b").await), (true, false));
            store.close().await.expect("close");
        });
    }
}
