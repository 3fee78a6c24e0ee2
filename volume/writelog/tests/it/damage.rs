//! Bit rot on a log's medium is detected, never returned as data, and never taken for the end of the log.

use std::rc::Rc;

use crate::common::{
    Memory, Nobody, PATH, SMALL, UNIT, forgetful, fresh, fresh_of, on_a_shelf, on_a_shelf_of, open, patience, patient,
    read, superblocks, write,
};
use forebay_block::{BlockDevice, BlockRequest, Buf, ErrorKind};
use forebay_reactor::{File, OpenOptions};
use forebay_sim::World;
use forebay_writelog::format::{AREA_AT, LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN};
use forebay_writelog::{LogId, LogOptions, Mode, Shelf, WriteLog};

/// Flips a bit of the newest superblock copy, or of the older one.
async fn damage_superblock(world: &World, newest: bool) {
    let found = superblocks(world);
    let victim = &found[usize::from(!newest)];
    for copy in SUPER_COPIES {
        let bytes = world.peek(PATH, LOGS_AT + copy, SUPER_LEN).expect("on the disk");
        if LogSuperblock::decode(&bytes).as_ref() != Ok(victim) {
            continue;
        }
        let mut bytes = bytes;
        bytes[200] ^= 4;
        let file = File::open(PATH, OpenOptions::read_write()).expect("the file of logs");
        file.write_durable_at(Buf::copy_of(&bytes), LOGS_AT + copy).await.expect("written");
        return;
    }
    panic!("no such copy");
}

/// Returns a log of 256 KiB, closed with dirty entries: its ring has advanced past the tail of the older superblock.
async fn worn(shelf: &Rc<Shelf>, inner: &Rc<Memory>) -> LogId {
    let log = fresh_of(SMALL, shelf, inner, Rc::new(Nobody), patience()).await;
    let id = shelf.ids()[0];
    for at in 0..6 {
        log.submit(write(at * 4096, at as u8, 4096)).await.expect("written");
    }
    log.drain().await.expect("drained");
    // Many entries, over drained ones; none of them reaches the backend.
    inner.full.set(true);
    for at in 0..238 {
        log.submit(write(at * 512, at as u8 ^ 0x55, 512)).await.expect("written");
    }
    // Dropped without a close, like after a power failure.
    log.gone().await;
    id
}

#[test]
fn a_damaged_newest_superblock_is_not_taken_for_an_empty_log() {
    for newest in [false, true] {
        on_a_shelf_of(true, async |world, shelf| {
            let inner = Memory::new(1 << 20);
            let id = worn(&shelf, &inner).await;
            assert_eq!(shelf.inspect(&id).await.expect("a log").dirty_entries, 238);
            let tails: Vec<u64> = superblocks(&world).iter().map(|superblock| superblock.tail_pos).collect();
            assert!(tails[0] > tails[1] && tails[1] + 238 * 2 < tails[0] + 480, "{tails:?}");
            damage_superblock(&world, newest).await;
            let looked = shelf.inspect(&id).await;
            match newest {
                false => assert_eq!(looked.expect("the newest copy holds").dirty_entries, 238),
                true => {
                    let error = looked.expect_err("acknowledged entries are gone without a word");
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                    let opened = shelf.open_log(&id, "one", 0).await.err().expect("it was opened");
                    assert_eq!(opened.kind(), ErrorKind::Corrupt, "{opened}");
                }
            }
        });
    }
}

#[test]
fn a_damaged_superblock_costs_nothing_while_the_older_one_leads_to_all_blocks() {
    on_a_shelf_of(true, async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), patience()).await;
        let id = shelf.ids()[0];
        for at in 0..8 {
            log.submit(write(at * 4096, at as u8, 4096)).await.expect("written");
        }
        log.drain().await.expect("drained");
        log.submit(write(0, 9, 4096)).await.expect("written");
        log.gone().await;
        damage_superblock(&world, true).await;
        let found = shelf.inspect(&id).await.expect("it can be read from the older tail on");
        assert!(found.dirty_entries >= 1, "{found:?}");
        let log = WriteLog::new(
            inner.clone(),
            shelf.open_log(&id, "one", 0).await.expect("a log"),
            Rc::new(Nobody),
            patience(),
        );
        assert_eq!(read(&*log, 0, 1).await, [9]);
        // The open has rewritten the damaged copy.
        assert_eq!(superblocks(&world).len(), 2);
    });
}

#[test]
fn a_damaged_superblock_leads_no_recovery_back_over_direct_writes() {
    on_a_shelf(async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let options = LogOptions { direct_min: Some(64 << 10), ..patience() };
        let log = fresh(&shelf, &inner, Rc::new(Nobody), options).await;
        let id = shelf.ids()[0];
        // Not sequential, so that all writes go to the log, and from there to the backend at once.
        for at in (7..16).rev() {
            log.submit(write(at << 16, 1, 64 << 10)).await.expect("written");
        }
        log.drain().await.expect("drained");
        // Sequential from here on; some writes bypass the log.
        for at in 8..16 {
            log.submit(write(at << 16, 2, 64 << 10)).await.expect("written");
        }
        assert!(log.counters().direct > 4, "only {} writes bypassed the log", log.counters().direct);
        // Dropped without a close, like after a power failure.
        log.gone().await;
        damage_superblock(&world, true).await;
        let log = open(&shelf, &id, "one", inner).await;
        for at in 8..16 {
            assert_eq!(read(&*log, at << 16, 1).await, [2], "an older write was replayed over the one at {at}");
        }
    });
}

#[test]
fn a_log_that_was_closed_empty_replays_nothing_with_either_superblock() {
    for newest in [false, true] {
        on_a_shelf(async |world, shelf| {
            let inner = Memory::new(1 << 20);
            let log = patient(&shelf, &inner).await;
            let id = shelf.ids()[0];
            for at in 0..8 {
                log.submit(write(at * 4096, 1, 4096)).await.expect("written");
            }
            log.close(true).await.expect("closed");
            log.gone().await;
            // The image is now written without the log.
            inner.submit(write(0, 2, 4096)).await.expect("written");
            damage_superblock(&world, newest).await;
            let log = open(&shelf, &id, "one", inner).await;
            assert_eq!((log.counters().replayed, read(&*log, 0, 1).await), (0, vec![2]));
        });
    }
}

#[test]
fn a_damaged_block_in_the_middle_is_not_taken_for_the_end() {
    on_a_shelf(async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        let id = shelf.ids()[0];
        for at in 0..20 {
            log.submit(write(at * 4096, at as u8, 4096)).await.expect("written");
        }
        log.gone().await;
        // Header of the eleventh block; a block has nine units.
        let at = LOGS_AT + AREA_AT + 10 * 9 * UNIT;
        let mut bytes = world.peek(PATH, at, 512).expect("on the disk");
        bytes[20] ^= 1;
        let file = File::open(PATH, OpenOptions::read_write()).expect("the file of logs");
        file.write_durable_at(Buf::copy_of(&bytes), at).await.expect("written");
        let error = shelf.inspect(&id).await.expect_err("half of the log is gone without a word");
        assert!(
            error.kind() == ErrorKind::Corrupt && error.to_string().contains("block 10 should be there"),
            "{error}"
        );
    });
}

#[test]
fn a_payload_that_has_changed_on_the_medium_is_never_given_out() {
    for write_back in [false, true] {
        on_a_shelf(async |_, shelf| {
            let inner = Memory::new(1 << 20);
            let log = fresh(&shelf, &inner, Rc::new(Nobody), forgetful()).await;
            log.submit(write(0, 1, 4096)).await.expect("written");
            log.submit(write(8192, 2, 4096)).await.expect("written");
            let file = File::open(PATH, OpenOptions::read_write()).expect("the file of logs");
            let at = LOGS_AT + AREA_AT + UNIT;
            let mut bytes = file.read_exact_at(at, 512).await.expect("the first payload").to_vec();
            bytes[100] ^= 1;
            file.write_durable_at(Buf::copy_of(&bytes), at).await.expect("written");
            if write_back {
                log.drain().await.expect_err("what cannot be verified does not go to the backend");
                assert!(matches!(log.mode(), Mode::Failed(_)), "{:?}", log.mode());
                assert_eq!(inner.bytes.borrow()[100], 0);
                return;
            }
            let extent = forebay_block::Extent::new(0, 4096);
            let error = log.submit(BlockRequest::Read(extent)).await.expect_err("a changed payload was given out");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert_eq!(read(&*log, 8192, 1).await, [2], "others are whole");
        });
    }
}
