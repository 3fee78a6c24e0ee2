//! Logs from their owners' view: on one log device, refused, drained, truncated by a shrinking volume.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use crate::common::{Memory, Nobody, PATH, fresh, on_a_shelf, open, patience, patient, read, write};
use forebay_block::{BlockDevice, BlockRequest, Buf, BufList, ErrorKind, Extent, ExtentState, LocalFuture, Result};
use forebay_reactor::{File, OpenOptions, sleep, spawn, timeout};
use forebay_sim::DiskFaults;
use forebay_writelog::format::{LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN};
use forebay_writelog::{DirtyLimits, LogOptions, LogOwner, Mode, Shelf};

#[test]
fn logs_share_a_shelf_and_belong_to_their_volumes() {
    on_a_shelf(async |_, shelf| {
        assert_eq!(shelf.create("one", "a", 1 << 20, 0).await.expect_err("small").kind(), ErrorKind::Invalid);
        let one = shelf.create("one", "local/a", 16 << 20, 3).await.expect("room");
        let two = shelf.create("two", "local/b", 24 << 20, 0).await.expect("room");
        assert_eq!(shelf.create("three", "c", 32 << 20, 0).await.expect_err("full").kind(), ErrorKind::NoSpace);
        let refused = async |id, volume, epoch| shelf.open_log(id, volume, epoch).await.err().map(|error| error.kind());
        assert_eq!(refused(&one, "two", 0).await, Some(ErrorKind::Denied));
        assert_eq!(refused(&one, "one", 4).await, Some(ErrorKind::Fenced));
        let (left, right) = (Memory::new(1 << 20), Memory::new(1 << 20));
        let log = open(&shelf, &one, "one", left.clone()).await;
        let other = open(&shelf, &two, "two", right.clone()).await;
        assert_eq!(refused(&one, "one", 0).await, Some(ErrorKind::Busy));
        log.submit(write(4096, 7, 8192)).await.expect("written");
        other.submit(write(4096, 9, 8192)).await.expect("written");
        assert_eq!((left.writes.get(), right.writes.get()), (0, 0), "both are in their logs only");
        assert_eq!((read(&*log, 4096, 1).await[0], read(&*other, 4096, 1).await[0]), (7, 9));
        log.close(false).await.expect("closed");
        log.gone().await;
        let info = shelf.inspect(&one).await.expect("there");
        assert_eq!((info.name.as_str(), info.epoch, info.dirty_entries, info.dirty_bytes), ("local/a", 3, 1, 8192));
        assert!(info.dirty_since_ms.is_some() && !info.clean);
        // Reopened, and drained.
        let log = open(&shelf, &one, "one", left.clone()).await;
        assert_eq!(read(&*log, 4096, 1).await[0], 7);
        log.close(true).await.expect("closed");
        log.gone().await;
        assert_eq!((left.writes.get(), left.bytes.borrow()[4096]), (1, 7));
        let info = shelf.inspect(&one).await.expect("there");
        assert!(info.clean && info.dirty_entries == 0 && info.dirty_since_ms.is_none());
        shelf.discard(&one).await.expect("discarded");
        assert_eq!(shelf.discard(&two).await.expect_err("open").kind(), ErrorKind::Busy);
        shelf.create("three", "c", 16 << 20, 0).await.expect("the first one's room");
    });
}

#[test]
fn what_is_cut_off_is_not_brought_back() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(64 << 10);
        let log = patient(&shelf, &inner).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        log.submit(write(32 << 10, 2, 4096)).await.expect("written");
        let shrinking = log.shrink(16 << 10).await.expect("empty");
        let past = log.submit(write(16 << 10, 3, 4096)).await;
        assert_eq!(past.expect_err("past the new end").kind(), ErrorKind::OutOfRange);
        log.submit(write(4096, 4, 4096)).await.expect("below it");
        inner.bytes.borrow_mut().truncate(16 << 10);
        drop(shrinking);
        inner.bytes.borrow_mut().resize(64 << 10, 0);
        log.drain().await.expect("drained");
        assert_eq!((inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (1, 4));
        assert!(read(&*log, 16 << 10, 48 << 10).await.iter().all(|&byte| byte == 0));
    });
}

#[test]
fn a_write_that_waits_while_a_volume_shrinks_is_refused() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(64 << 10);
        let log = patient(&shelf, &inner).await;
        // Throttled until the first one is at the backend, which is when the volume shrinks.
        log.set_limits(DirtyLimits { bytes_max: Some(4096), age_max: Duration::from_secs(1000) });
        log.submit(write(0, 1, 4096)).await.expect("written");
        let cut = log.cut().await.expect("a cut");
        log.submit(write(4096, 2, 4096)).await.expect("written");
        let waiting = spawn(log.submit(write(32 << 10, 3, 4096)));
        let shrinking = spawn({
            let log = log.clone();
            async move { log.shrink(16 << 10).await }
        });
        sleep(Duration::from_secs(1)).await;
        drop(cut);
        let shrinking = shrinking.await.expect("nothing of the end is left");
        let refused = waiting.await.expect_err("it came in past the new end");
        assert_eq!(refused.kind(), ErrorKind::OutOfRange);
        inner.bytes.borrow_mut()[16 << 10..].fill(0);
        drop(shrinking);
        log.close(true).await.expect("closed");
        assert!(inner.bytes.borrow()[16 << 10..].iter().all(|&byte| byte == 0));
        assert_eq!((inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (1, 2));
    });
}

#[test]
fn no_recovery_replays_what_was_cut_off() {
    on_a_shelf(async |world, shelf| {
        let inner = Memory::new(64 << 10);
        let log = patient(&shelf, &inner).await;
        log.submit(write(32 << 10, 2, 4096)).await.expect("written");
        // Writing the tail is slow, while other tasks end and check.
        let slow = DiskFaults { write_latency: 50_000_000..50_000_001, ..DiskFaults::none() };
        world.set_disk_faults(PATH, Some(slow));
        let over = Rc::new(Cell::new(false));
        let others = spawn({
            let (log, over) = (log.clone(), over.clone());
            async move {
                while !over.get() {
                    let bytes = |byte| Buf::copy_of(&[byte; 512]).into();
                    let differs =
                        BlockRequest::CompareAndWrite { offset: 0, expect: bytes(1), data: bytes(2), fua: false };
                    let refused = log.submit(differs).await.expect_err("it holds zeroes");
                    assert!(matches!(refused.kind(), ErrorKind::Mismatch(_)));
                    sleep(Duration::from_millis(1)).await;
                }
            }
        });
        let shrinking = log.shrink(16 << 10).await.expect("empty");
        let tails = SUPER_COPIES.map(|copy| {
            let bytes = world.peek(PATH, LOGS_AT + copy, SUPER_LEN).expect("a superblock");
            LogSuperblock::decode(&bytes).expect("a good one").tail_seq
        });
        assert_eq!(tails.into_iter().max(), Some(1), "a crash now would write the cut off block once more");
        over.set(true);
        others.await;
        drop(shrinking);
    });
}

#[test]
fn patterns_zeroes_and_maps_pass_through_the_log() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(4 << 20);
        let log = patient(&shelf, &inner).await;
        let pattern: Vec<u8> = (0..512_u32).map(|at| at as u8).collect();
        let same: Vec<u8> = pattern.iter().copied().cycle().take(1 << 20).collect();
        let data = BufList::from(Buf::copy_of(&same));
        log.submit(BlockRequest::Write { offset: 1024, data, fua: false }).await.expect("written");
        log.submit(BlockRequest::Discard(Extent::new(8192, 4096))).await.expect("discarded");
        let keep = BlockRequest::WriteZeroes { extent: Extent::new(16384, 4096), no_unmap: true, fua: true };
        log.submit(keep).await.expect("zeroed");
        assert_eq!(log.stats().appended, 3, "a pattern is one entry");
        assert!(log.stats().used < 64 << 10, "and a short one: {}", log.stats().used);
        let mut wanted = vec![0; 4 << 20];
        wanted[1024..1024 + same.len()].copy_from_slice(&same);
        wanted[8192..12288].fill(0);
        wanted[16384..20480].fill(0);
        assert!(read(&*log, 0, 4 << 20).await == wanted);
        assert!(read(&*log, 5001, 9999).await == wanted[5001..15_000]);
        let map = log.map(Extent::new(0, 2 << 20)).await.expect("a map");
        let states: Vec<_> = map.runs().iter().map(|run| (run.extent.offset, run.state)).collect();
        use ExtentState::{Data, Hole, Zero};
        let end = 1024 + (1 << 20);
        let expected =
            [(0, Hole), (1024, Data), (8192, Hole), (12288, Data), (16384, Zero), (20480, Data), (end, Hole)];
        assert_eq!(states, expected);
        // Compared with the contents of the log, not of the backend.
        let expect = Buf::copy_of(&same[..4096]);
        let new = Buf::copy_of(&[5; 4096]);
        let compare = |expect: &Buf| BlockRequest::CompareAndWrite {
            offset: 1024,
            expect: expect.clone().into(),
            data: new.clone().into(),
            fua: false,
        };
        log.submit(compare(&expect)).await.expect("equal");
        let differs = log.submit(compare(&expect)).await.expect_err("not any more");
        assert_eq!(differs.kind(), ErrorKind::Mismatch(0));
        wanted[1024..5120].fill(5);
        log.close(true).await.expect("closed");
        assert!(*inner.bytes.borrow() == wanted && matches!(log.mode(), Mode::On));
    });
}

#[test]
fn a_cut_holds_the_backend_where_it_is() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        let cut = log.cut().await.expect("a cut");
        log.submit(write(0, 2, 4096)).await.expect("written");
        log.submit(BlockRequest::Flush).await.expect("flushed");
        assert_eq!(read(&*log, 0, 1).await[0], 2);
        assert_eq!(inner.bytes.borrow()[0], 1);
        drop(cut);
        log.drain().await.expect("drained");
        assert_eq!(inner.bytes.borrow()[0], 2);
    });
}

#[test]
fn a_log_that_fails_under_a_cut_is_not_given_up_with_what_the_cut_holds_back() {
    on_a_shelf(async |faults, shelf| {
        let (inner, owner) = (Memory::new(1 << 20), Rc::new(Counted::default()));
        let log = fresh(&shelf, &inner, owner.clone(), LogOptions::default()).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        let cut = log.cut().await.expect("a cut");
        log.submit(write(0, 2, 4096)).await.expect("written");
        faults.set_disk_faults(PATH, Some(DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }));
        let waiting = spawn(log.submit(write(4096, 3, 4096)));
        // Longer than any background operation.
        sleep(Duration::from_secs(60)).await;
        assert_eq!((owner.0.get(), inner.bytes.borrow()[0]), (0, 1), "a crash now would lose the second write");
        assert!(matches!(log.mode(), Mode::TurningOff(_)));
        drop(cut);
        waiting.await.expect("written without the log");
        assert_eq!((owner.0.get(), inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (1, 2, 3));
        assert!(matches!(log.mode(), Mode::Off(_)));
    });
}

#[test]
fn a_log_that_is_disabled_under_a_cut_lets_no_write_past_it() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), LogOptions::default()).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        // The log has nothing past it.
        let cut = log.cut().await.expect("a cut");
        let own = log.clone();
        let disabled = spawn(async move { own.disable(forebay_block::Error::new(ErrorKind::Io, "on purpose")).await });
        let waiting = spawn(log.submit(write(0, 2, 4096)));
        // Longer than any background operation.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(inner.bytes.borrow()[0], 1, "the backend is where the cut holds it");
        assert!(matches!(log.mode(), Mode::TurningOff(_)));
        drop(cut);
        disabled.await.expect("disabled");
        waiting.await.expect("written without the log");
        assert_eq!(inner.bytes.borrow()[0], 2);
    });
}

/// Owner whose record takes until the gate opens to state that the log is released.
#[derive(Default)]
struct SlowRelease {
    begun: Cell<bool>,
    opened: Rc<Cell<bool>>,
}

impl LogOwner for SlowRelease {
    fn release(&self) -> LocalFuture<Result<()>> {
        self.begun.set(true);
        let opened = self.opened.clone();
        Box::pin(async move {
            while !opened.get() {
                sleep(Duration::from_millis(1)).await;
            }
            Ok(())
        })
    }
}

#[test]
fn a_cut_of_a_log_that_is_being_released_lets_no_write_past_it() {
    on_a_shelf(async |_, shelf| {
        let (inner, owner) = (Memory::new(1 << 20), Rc::new(SlowRelease::default()));
        let log = fresh(&shelf, &inner, owner.clone(), LogOptions::default()).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        let own = log.clone();
        let disabled = spawn(async move { own.disable(forebay_block::Error::new(ErrorKind::Io, "on purpose")).await });
        while !owner.begun.get() {
            sleep(Duration::from_millis(1)).await;
        }
        // All is written back, and the record is being changed.
        let early = spawn(log.submit(write(4096, 2, 4096)));
        let cut = log.begin_cut().await;
        let later = spawn(log.submit(write(0, 2, 4096)));
        owner.opened.set(true);
        log.complete_cut(&cut).await.expect("a cut");
        // Longer than any background operation.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(inner.bytes.borrow()[0], 1, "the backend is where the cut holds it");
        assert!(!early.is_finished() && !later.is_finished());
        drop(cut);
        disabled.await.expect("disabled");
        for waiting in [early, later] {
            waiting.await.expect("written without the log");
        }
        assert_eq!((inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (2, 2));
    });
}

#[test]
fn a_cut_that_ends_leaves_others_held() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), LogOptions::default()).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        let (first, second) = (log.cut().await.expect("a cut"), log.cut().await.expect("another"));
        log.submit(write(0, 2, 4096)).await.expect("written");
        drop(first);
        // Longer than background write-back of all entries.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(inner.bytes.borrow()[0], 1);
        drop(second);
        log.drain().await.expect("drained");
        assert_eq!(inner.bytes.borrow()[0], 2);
    });
}

#[test]
fn what_was_written_together_is_read_together_to_be_written_back() {
    on_a_shelf(async |world, shelf| {
        world.set_verbose();
        let inner = Memory::new(1 << 20);
        let options = LogOptions { recent_bytes: 0, ..patience() };
        let log = fresh(&shelf, &inner, Rc::new(Nobody), options).await;
        // Every second block, in descending order: adjacent in the log only.
        for at in (0..32_u64).rev() {
            log.submit(write(at * 8192, at as u8, 4096)).await.expect("written");
        }
        let reads = || world.trace(100_000).lines().filter(|line| line.contains("Submit read")).count();
        let before = reads();
        log.drain().await.expect("drained");
        assert_eq!(reads() - before, 1, "32 payloads of 4 KiB");
        let found: Vec<u8> = (0..32).map(|at| inner.bytes.borrow()[at * 8192]).collect();
        assert_eq!(found, (0..32).collect::<Vec<u8>>());
    });
}

#[test]
fn writes_within_one_object_go_to_it_together() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        inner.unit.set(Some(256 << 10));
        let log = fresh(&shelf, &inner, Rc::new(Nobody), patience()).await;
        // Every second block of two objects, one that crosses two, and one by itself.
        for at in (0..120_u64).step_by(2) {
            log.submit(write(at * 4096, at as u8 + 1, 4096)).await.expect("written");
        }
        log.submit(write((512 << 10) - 2048, 201, 4096)).await.expect("written");
        log.submit(write(900 << 10, 202, 4096)).await.expect("written");
        log.drain().await.expect("drained");
        assert_eq!(inner.together.get(), 60);
        // Two coalesced requests, and two single ones. So few use FUA instead of a flush.
        assert_eq!(log.stats().written_back, 4);
        assert_eq!(inner.writes.get(), 62);
        assert_eq!(inner.durable.get(), 62);
        let found: Vec<u8> = (0..120).map(|at| inner.bytes.borrow()[at * 4096]).collect();
        let expected: Vec<u8> = (0..120).map(|at| if at % 2 == 0 { at + 1 } else { 0 }).collect();
        assert_eq!(found, expected);
        assert_eq!((inner.bytes.borrow()[(512 << 10) - 2048], inner.bytes.borrow()[900 << 10]), (201, 202));
    });
}

#[test]
fn the_limits_of_a_volume_hold_and_can_be_changed() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        log.set_limits(DirtyLimits { bytes_max: Some(64 << 10), age_max: Duration::from_secs(1000) });
        // A held consistency point keeps all entries in the log.
        let cut = log.cut().await.expect("a cut");
        let writes: Vec<_> = (0..32_u64).map(|at| spawn(log.submit(write(at * 4096, 1, 4096)))).collect();
        sleep(Duration::from_secs(60)).await;
        let stats = log.stats();
        assert_eq!((stats.dirty_bytes, stats.dirty_entries), (64 << 10, 16), "and the rest waits");
        drop(cut);
        for write in writes {
            write.await.expect("written");
        }
        log.drain().await.expect("drained");
        // By age alone.
        log.set_limits(DirtyLimits { bytes_max: None, age_max: Duration::from_secs(4) });
        let before = inner.writes.get();
        log.submit(write(0, 2, 4096)).await.expect("written");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(inner.writes.get(), before, "it is young");
        sleep(Duration::from_secs(3)).await;
        assert_eq!((inner.writes.get(), log.stats().dirty_entries), (before + 1, 0));
    });
}

#[test]
fn a_read_of_what_is_written_all_the_time_ends() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        inner.pause.set(Duration::from_millis(20));
        let log = patient(&shelf, &inner).await;
        let (done, writer) = (Rc::new(Cell::new(false)), log.clone());
        let stop = done.clone();
        let writing = spawn(async move {
            let mut count = 0_u64;
            while !stop.get() {
                writer.submit(write(count % 8 * 4096, count as u8, 4096)).await.expect("written");
                sleep(Duration::from_millis(1)).await;
                count += 1;
            }
            count
        });
        // Part of the range is not in the log, and each backend read takes longer than the interval of the writes.
        let data = timeout(Duration::from_secs(2), log.submit(BlockRequest::Read(Extent::new(0, 64 << 10)))).await;
        assert_eq!(data.expect("in time").expect("read").into_data().len(), 64 << 10);
        done.set(true);
        assert!(writing.await > 20);
    });
}

/// Owner that counts releases.
#[derive(Default)]
struct Counted(Cell<u64>);

impl LogOwner for Counted {
    fn release(&self) -> LocalFuture<Result<()>> {
        self.0.set(self.0.get() + 1);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[test]
fn the_first_flush_covers_what_a_process_that_was_killed_left_at_the_backend() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(64 << 10);
        let log = patient(&shelf, &inner).await;
        log.submit(BlockRequest::Flush).await.expect("flushed");
        assert_eq!(inner.flushes.get(), 1);
        log.submit(write(0, 1, 4096)).await.expect("written");
        log.submit(BlockRequest::Flush).await.expect("flushed");
        assert_eq!(inner.flushes.get(), 1, "what is in the log lasts there");
    });
}

#[test]
fn a_write_that_goes_round_the_log_lasts_when_it_is_answered() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(4 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), LogOptions::default()).await;
        log.submit(BlockRequest::Flush).await.expect("flushed");
        for at in 0..3_u64 {
            log.submit(write(at << 20, 9, 1 << 20)).await.expect("written");
        }
        // The first one is not known to be sequential.
        assert_eq!((log.stats().direct, inner.durable.get()), (2, 2));
        log.submit(BlockRequest::Flush).await.expect("flushed");
        assert_eq!(inner.flushes.get(), 1, "there is nothing left to flush");
    });
}

/// Returns how many of the writes throttled by a full log, while the backend is stalled, reach the backend at once.
async fn reach_the_backend(shelf: &Rc<Shelf>, flush_before_the_rest: bool) -> usize {
    const LIMIT: u64 = 64 << 10;
    let inner = Memory::new(1 << 20);
    inner.gate.closed.set(true);
    let limits = DirtyLimits { age_max: Duration::ZERO, bytes_max: Some(LIMIT) };
    let log = fresh(shelf, &inner, Rc::new(Nobody), LogOptions { limits, ..patience() }).await;
    // Every second block: no writes are merged.
    let submit = |at: u64| spawn(log.submit(write(at * 8192, 1, 4096)));
    let first: Vec<_> = (0..4).map(submit).collect();
    for write in first {
        write.await.expect("written");
    }
    // Blocked at a held consistency point, which does not prevent throttling.
    let rest: Vec<_> = match flush_before_the_rest {
        true => {
            log.submit(BlockRequest::Flush).await.expect("flushed");
            (4..8).map(submit).collect()
        }
        false => {
            // In flight during the barrier: pieces not in the log yet may be in either generation.
            log.set_limits(DirtyLimits { age_max: Duration::ZERO, bytes_max: Some(1) });
            let rest = (4..8).map(submit).collect();
            log.submit(BlockRequest::Flush).await.expect("flushed");
            log.set_limits(limits);
            rest
        }
    };
    for write in rest {
        write.await.expect("written");
    }
    // Longer than any background operation.
    sleep(Duration::from_secs(1)).await;
    let waiting = inner.gate.waiting.get();
    inner.gate.open();
    log.close(true).await.expect("closed");
    assert!((0..8).all(|at| inner.bytes.borrow()[at * 8192] == 1));
    waiting
}

#[test]
fn write_back_is_gentle_until_there_is_haste() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        // Every second block: no writes are merged.
        for at in 0..64 {
            log.submit(write(at * 8192, 1, 4096)).await.expect("written");
        }
        inner.gate.closed.set(true);
        // At half the maximum age, entries are written back without urgency.
        sleep(Duration::from_secs(600)).await;
        assert_eq!(inner.gate.waiting.get(), 8);
        let drained = spawn(async move { log.drain().await });
        sleep(Duration::from_secs(1)).await;
        assert_eq!(inner.gate.waiting.get(), 64, "those that had time before are not held back");
        inner.gate.open();
        drained.await.expect("drained");
        assert!((0..64).all(|at| inner.bytes.borrow()[at * 8192] == 1));
    });
}

#[test]
fn a_barrier_separates_only_what_the_host_has_ordered() {
    on_a_shelf(async |_, shelf| {
        assert_eq!(reach_the_backend(&shelf, true).await, 4, "those after the barrier wait for those before it");
    });
    on_a_shelf(async |_, shelf| {
        assert_eq!(reach_the_backend(&shelf, false).await, 8, "those that were under way need not");
    });
}

/// Malicious superblocks: each change, and the resulting error of the open.
#[test]
fn a_superblock_that_is_not_what_it_should_be_is_refused_with_the_reason() {
    type Change = fn(&mut LogSuperblock);
    let sealed: [(Change, ErrorKind, &str); 7] = [
        (|it| it.log[0] ^= 1, ErrorKind::Corrupt, "differs from the directory"),
        (|it| it.size += 1 << 20, ErrorKind::Corrupt, "differs from the directory"),
        (|it| it.features = 4, ErrorKind::Invalid, "feature bits 0x4"),
        (|it| it.unit = 100, ErrorKind::Corrupt, "units of 100 bytes"),
        (|it| it.head_block = it.tail_block.wrapping_sub(1), ErrorKind::Corrupt, "the tail is past the head"),
        (|it| it.volume = "two".into(), ErrorKind::Denied, "belongs to another volume"),
        (|it| it.epoch = 1, ErrorKind::Fenced, "is of epoch 1, but the volume's epoch is 2"),
    ];
    let damaged = |at: usize, byte: u8| move |bytes: &mut [u8]| bytes[at] = byte;
    on_a_shelf(async |_, shelf| {
        let id = shelf.create("one", "local/a", 16 << 20, 2).await.expect("room");
        let file = File::open(PATH, OpenOptions::read_write()).expect("the shelf's file");
        let good = file.read_exact_at(LOGS_AT, SUPER_LEN).await.expect("a superblock").to_vec();
        let mut cases: Vec<(Vec<u8>, ErrorKind, &str)> = Vec::new();
        for (change, kind, text) in sealed {
            let mut superblock = LogSuperblock::decode(&good).expect("a good one");
            superblock.tail_block = 1;
            superblock.head_block = 1;
            change(&mut superblock);
            cases.push((superblock.encode(), kind, text));
        }
        let mut bytes = good.clone();
        damaged(200, 0xff)(&mut bytes);
        cases.push((bytes, ErrorKind::Corrupt, "the checksum is wrong"));
        let mut bytes = good.clone();
        damaged(0, 0)(&mut bytes);
        cases.push((bytes, ErrorKind::Corrupt, "not a write log"));
        for (bytes, kind, text) in cases {
            for copy in SUPER_COPIES {
                file.write_durable_at(Buf::copy_of(&bytes), LOGS_AT + copy).await.expect("written");
            }
            let error = shelf.open_log(&id, "one", 2).await.err().unwrap_or_else(|| panic!("it was taken: {text}"));
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(text), "{error} does not say '{text}'");
        }
        // A single damaged copy is a possible result of a crash: the other one counts.
        file.write_durable_at(Buf::copy_of(&good), LOGS_AT).await.expect("written");
        shelf.open_log(&id, "one", 2).await.expect("it is as it was");
    });
}
