//! Order of writes to a log's medium, and of bypassed writes, as visible after a power failure at any moment.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::common::{
    LONG, MILLISECOND, Memory, Nobody, PATH, SMALL, UNIT, forgetful, fresh, fresh_of, on_a_shelf, on_a_shelf_of,
    patience, patient, slow_writes, superblocks, write,
};
use forebay_block::{BlockDevice, BlockRequest, Buf, Result};
use forebay_reactor::{JoinHandle, sleep, spawn, timeout};
use forebay_sim::{DiskFaults, World};
use forebay_writelog::format::{AREA_AT, BlockHeader, LOGS_AT, tag_of};
use forebay_writelog::{DirtyLimits, LogOptions, Shelf, WriteLog};

/// Returns a log that is being shrunk, at the moment when write-back writes the tail, slowly.
async fn shrinking_while_the_tail_is_written(
    world: &World,
    shelf: &Rc<Shelf>,
) -> (Rc<WriteLog>, JoinHandle<Result<()>>) {
    let log = patient(shelf, &Memory::new(1 << 20)).await;
    log.submit(write(0, 1, 4096)).await.expect("written");
    world.set_disk_faults(PATH, slow_writes(50));
    let shrinking = spawn({
        let log = log.clone();
        async move { log.shrink(512 << 10).await.map(drop) }
    });
    while log.stats().dirty_entries > 0 {
        sleep(MILLISECOND).await;
    }
    (log, shrinking)
}

#[test]
fn those_who_write_the_tail_take_turns() {
    on_a_shelf(async |world, shelf| {
        let (log, shrinking) = shrinking_while_the_tail_is_written(&world, &shelf).await;
        // Write-back is writing the tail; a failing comparison wakes the shrink, which then writes it, too.
        let bytes = |value| Buf::copy_of(&[value; 4096]).into();
        let other = BlockRequest::CompareAndWrite { offset: 0, expect: bytes(9), data: bytes(8), fua: false };
        log.submit(other).await.expect_err("it holds something else");
        shrinking.await.expect("shrunk");
        let serials: Vec<u64> = superblocks(&world).iter().map(|superblock| superblock.serial).collect();
        assert_eq!(serials[0], serials[1] + 1, "two writes went to one copy");
        world.set_disk_faults(PATH, None);
        log.close(true).await.expect("closed");
        log.gone().await;
    });
}

#[test]
fn a_write_of_the_tail_that_nobody_waits_for_any_more_is_not_overtaken() {
    on_a_shelf(async |world, shelf| {
        // The caller is dropped while the superblock is being written.
        let (log, shrinking) = shrinking_while_the_tail_is_written(&world, &shelf).await;
        // Write-back has written the tail by then, and the shrink is writing it once more.
        sleep(Duration::from_millis(75)).await;
        shrinking.abort();
        log.close(true).await.expect("closed");
        log.gone().await;
        let serials: Vec<u64> = superblocks(&world).iter().map(|superblock| superblock.serial).collect();
        assert_eq!(serials.len(), 2);
        assert_eq!(serials[0], serials[1] + 1, "two writes went to one copy");
    });
}

/// Submits bursts of writes, each of a new generation, until the ring has wrapped several times; in between, examines
/// the disk as a power failure at each moment would leave it.
async fn look_while_it_wraps(log: &Rc<WriteLog>, mut look: impl FnMut(u64)) {
    let over = Rc::new(Cell::new(false));
    let writer = spawn({
        let (log, over) = (log.clone(), over.clone());
        async move {
            for round in 0..8_u64 {
                let one = |at: u64| spawn(log.submit(write(at * 8192, (at + round) as u8, 8192)));
                let writes: Vec<_> = (0..40).map(one).collect();
                for write in writes {
                    write.await.expect("written");
                }
                log.submit(BlockRequest::Flush).await.expect("flushed");
            }
            over.set(true);
        }
    });
    while !over.get() {
        let stats = log.stats();
        look(stats.appended - stats.dirty_entries);
        sleep(Duration::from_micros(200)).await;
    }
    writer.await;
}

#[test]
fn the_ring_never_goes_over_what_the_durable_tail_still_names() {
    on_a_shelf_of(true, async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let limits = DirtyLimits { age_max: Duration::ZERO, bytes_max: None };
        // Several blocks at a time: those that finish wake appends, which would use space that is freed early.
        let options = LogOptions { limits, batch_entries: 8, ..LogOptions::default() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        let tag = tag_of(&shelf.ids()[0]);
        // Permits a block to reach the disk before a superblock that was written earlier.
        let uneven = DiskFaults { write_latency: 1_000_000..20_000_000, ..DiskFaults::none() };
        world.set_disk_faults(PATH, Some(uneven));
        let ring = (SMALL - AREA_AT) / UNIT;
        let fullest = Rc::new(Cell::new(0));
        look_while_it_wraps(&log, |_| {
            fullest.set(fullest.get().max(log.stats().used));
            let newest = superblocks(&world).swap_remove(0);
            let at = LOGS_AT + AREA_AT + newest.tail_pos % ring * UNIT;
            let bytes = world.peek(PATH, at, UNIT as usize).expect("on the disk");
            // Empty logs record the place of the next block.
            match BlockHeader::peek(&bytes, tag, UNIT as u32) {
                Some(header) => assert!(header.number <= newest.tail_block, "block {} is there", header.number),
                None => assert!(newest.tail_block == newest.head_block, "block {} is gone", newest.tail_block),
            }
        })
        .await;
        assert!(fullest.get() + (16 << 10) > SMALL - AREA_AT, "the ring was never full: {}", fullest.get());
    });
}

#[test]
fn a_batch_is_retired_only_when_the_tail_before_it_is_durable() {
    on_a_shelf_of(true, async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let limits = DirtyLimits { age_max: Duration::ZERO, bytes_max: None };
        let options = LogOptions { limits, batch_entries: 1, ..LogOptions::default() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        world.set_disk_faults(PATH, slow_writes(5));
        let tag = tag_of(&shelf.ids()[0]);
        let mut seen = 0_u64;
        look_while_it_wraps(&log, |tail| {
            // Start of a recovery: the superblock's tail, or that of the newest block.
            let newest = superblocks(&world).swap_remove(0);
            let blocks = world.peek(PATH, LOGS_AT + AREA_AT, (SMALL - AREA_AT) as usize).expect("on the disk");
            let headers =
                blocks.chunks_exact(UNIT as usize).filter_map(|head| BlockHeader::peek(head, tag, UNIT as u32));
            let durable = headers.map(|header| header.tail_seq).max().unwrap_or(0).max(newest.tail_seq);
            assert!(tail <= durable + 1, "{tail} entries are retired, and a recovery would begin with {durable}");
            seen = seen.max(tail);
        })
        .await;
        assert!(seen > 100, "only {seen} entries were retired while somebody looked");
    });
}

#[test]
fn a_direct_write_waits_for_the_tail_to_be_durable() {
    on_a_shelf(async |world, shelf| {
        let inner = Memory::new(4 << 20);
        let options = LogOptions { direct_min: Some(64 << 10), ..patience() };
        let log = fresh(&shelf, &inner, Rc::new(Nobody), options).await;
        log.submit(write(0, 1, 64 << 10)).await.expect("written");
        let direct = log.counters().direct;
        log.submit(write(32 << 10, 2, 32 << 10)).await.expect("in the log");
        world.set_disk_faults(PATH, slow_writes(50));
        let draining = spawn({
            let log = log.clone();
            async move { log.drain().await }
        });
        while log.stats().dirty_entries > 0 {
            sleep(MILLISECOND).await;
        }
        // The backend has it, and the tail is still being written: a crash would replay it over this.
        let early = spawn(log.submit(write(64 << 10, 3, 64 << 10)));
        sleep(MILLISECOND).await;
        assert_eq!(log.counters().direct, direct, "a write bypassed a log that may be replayed");
        early.await.expect("written");
        draining.await.expect("drained");
        log.drain().await.expect("drained");
        // One copy of the superblock has the tail: the first write requests the other.
        log.submit(write(128 << 10, 4, 64 << 10)).await.expect("written");
        assert_eq!(
            log.counters().direct,
            direct,
            "a write bypassed a log that may be replayed from the older superblock"
        );
        sleep(Duration::from_millis(200)).await;
        log.submit(write(192 << 10, 5, 64 << 10)).await.expect("written");
        assert_eq!(log.counters().direct, direct + 1, "with a durable tail it goes straight to the backend");
    });
}

/// Returns a drained log that writes of 64 KiB bypass, and its backend, which blocks further requests.
async fn drained_with_gate_closed(shelf: &Rc<Shelf>) -> (Rc<Memory>, Rc<WriteLog>) {
    let inner = Memory::new(4 << 20);
    let log = fresh(shelf, &inner, Rc::new(Nobody), LogOptions { direct_min: Some(64 << 10), ..patience() }).await;
    log.submit(write(0, 1, 64 << 10)).await.expect("written");
    log.drain().await.expect("drained");
    // Makes the tail durable in both copies of the superblock, so that the next write bypasses the log.
    drop(log.shrink(4 << 20).await.expect("nothing is past the end"));
    inner.gate.closed.set(true);
    (inner, log)
}

#[test]
fn a_cut_waits_for_direct_writes_that_have_begun() {
    on_a_shelf(async |_, shelf| {
        let (inner, log) = drained_with_gate_closed(&shelf).await;
        let direct = log.submit(write(64 << 10, 2, 64 << 10));
        assert_eq!(log.counters().direct_bytes, 0, "its task has not had its turn");
        // At once, before any task was polled.
        let mut cutting = Box::pin(log.cut());
        assert!(timeout(Duration::from_secs(1), &mut cutting).await.is_err(), "the cut has missed a direct write");
        inner.gate.open();
        let cut = cutting.await.expect("a cut");
        let held = inner.bytes.borrow().clone();
        assert_eq!(held[64 << 10], 2);
        direct.await.expect("written");
        assert_eq!(log.counters().direct_bytes, 64 << 10, "the write went into the log");
        assert!(*inner.bytes.borrow() == held, "the backend has changed under the cut");
        drop(cut);
    });
}

#[test]
fn a_flush_covers_what_was_in_flight_past_the_log_when_it_was_attached() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), patience()).await;
        log.submit(BlockRequest::Flush).await.expect("flushed");
        let past = log.changes_past();
        let flushes = async || {
            log.submit(BlockRequest::Flush).await.expect("flushed");
            inner.flushes.get()
        };
        let first = flushes().await;
        inner.submit(write(0, 1, 4096)).await.expect("a write that began before the log was there");
        let second = flushes().await;
        assert!(second > first, "a flush must reach the backend while changes may be in flight past the log");
        inner.submit(write(0, 2, 4096)).await.expect("another one");
        drop(past);
        let third = flushes().await;
        assert!(third > second, "the last change past the log may not be durable");
        assert_eq!(flushes().await, third, "everything else lasts in the log");
    });
}

#[test]
fn shrinking_waits_for_direct_writes_past_the_new_end() {
    on_a_shelf(async |_, shelf| {
        let (inner, log) = drained_with_gate_closed(&shelf).await;
        let direct = spawn(log.submit(write(64 << 10, 2, 64 << 10)));
        let mut shrinking = Box::pin(log.shrink(64 << 10));
        assert!(timeout(Duration::from_secs(1), &mut shrinking).await.is_err(), "a write past the end is in flight");
        inner.gate.open();
        let shrunk = shrinking.await.expect("nothing of the end is in flight");
        direct.await.expect("written");
        assert_eq!(log.counters().direct_bytes, 64 << 10, "the write went into the log");
        drop(shrunk);
    });
}

#[test]
fn what_is_being_read_is_not_overwritten() {
    on_a_shelf_of(true, async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), forgetful()).await;
        log.submit(write(0, 7, 8192)).await.expect("written");
        let second = 1_000_000_000;
        world.set_disk_faults(PATH, Some(DiskFaults { read_latency: second..second + 1, ..DiskFaults::none() }));
        let reading = spawn(log.submit(BlockRequest::Read(forebay_block::Extent::new(0, 8192))));
        sleep(MILLISECOND).await;
        world.set_disk_faults(PATH, None);
        // Wraps the ring, over the place of the payload being read, if it is freed.
        let around = spawn({
            let log = log.clone();
            async move {
                for at in 0..100_u64 {
                    log.submit(write(at % 50 * 8192, at as u8 ^ 0x80, 8192)).await.expect("written");
                    if at % 8 == 7 {
                        log.drain().await.expect("drained");
                    }
                }
            }
        });
        let data = reading.await.expect("what is read is there until it has been").into_data().to_vec();
        assert_eq!(data[0], 7, "as it was when it was asked for");
        timeout(LONG, around).await.expect("writes go on");
    });
}
