//! The newest checkpoint's anchors are damaged: what can be recovered from the one before is, and what cannot is not given
//! up without being asked.

mod common;

use std::rc::Rc;

use forebay_block::*;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{Faults, World};
use forebay_store::format::anchor::{Anchor, SLOTS};
use forebay_store::format::batch::BatchHeader;
use forebay_store::format::entry::Entry;
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

use common::{DISK, machine, run};

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

/// Spoils both copies of the newest anchor, or of the older one.
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
            // Closing took the newest checkpoint; the one before is that of the opening.
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
        // The newest is that of the second opening, the one before says that nothing is to be replayed.
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

/// Flips a bit of one byte.
async fn flip(at: u64) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    let start = at / 4096 * 4096;
    let mut block = disk.read_exact_at(start, 4096).await.expect("read").to_vec();
    block[(at - start) as usize] ^= 4;
    disk.write_at(Buf::copy_of(&block), start).await.expect("write");
    disk.sync_data().await.expect("sync");
}

/// The headers of batches on the disk.
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
    // One flush makes the write and the closing checkpoint's batches durable, so that no batch tells of another.
    for (damaged_byte, later_too) in [(0, false), (20, false), (100, false), (4096, false), (100, true)] {
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
            let entries = Entry::decode_all(&header.entries).expect("entries");
            entries.iter().any(|entry| matches!(entry, Entry::Write { .. }))
        };
        let batch = headers(&world).into_iter().rfind(writes).expect("the batch of the write");
        run(&world, async {
            spoil(true).await;
            for header in headers(&world).iter().filter(|header| later_too && header.seq > batch.seq) {
                flip(header.block * 4096 + damaged_byte).await;
            }
            flip(batch.block * 4096 + damaged_byte).await;
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
        // Overwritten many times over: every segment has been used again since the opening.
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
            // From the one before, all that was durable is there.
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
