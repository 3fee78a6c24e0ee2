//! What must hold when something is slow, full, damaged or given up in the middle.

mod common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use common::{Event, Memory, Nobody, PATH, fresh, fresh_of, on_a_shelf, on_a_shelf_of, patience, patient, read, write};
use forebay_block::{BlockDevice, Buf, Error, ErrorKind, LocalFuture, Request, Result};
use forebay_reactor::{File, OpenOptions, now, sleep, spawn, timeout};
use forebay_sim::{DiskFaults, World};
use forebay_writelog::format::{AREA_AT, BlockHeader, LOGS_AT, SUPER_COPIES, SUPER_LEN, Superblock, tag_of};
use forebay_writelog::{Limits, LogId, Mode, Options, Owner, Persist, Shelf, WriteLog};

const SMALL: u64 = 256 << 10;
const UNIT: u64 = 512;
const MILLISECOND: Duration = Duration::from_millis(1);
/// Longer than anything takes that ends at all.
const LONG: Duration = Duration::from_secs(600);

/// The superblocks as they are on the disk now: serial and tail, the newest first.
fn superblocks(world: &World) -> Vec<Superblock> {
    let decode = |copy| Superblock::decode(&world.peek(PATH, LOGS_AT + copy, SUPER_LEN).expect("on the disk"));
    let mut found: Vec<Superblock> = SUPER_COPIES.into_iter().filter_map(|copy| decode(copy).ok()).collect();
    found.sort_by_key(|superblock| std::cmp::Reverse(superblock.serial));
    found
}

fn slow_writes(millis: u64) -> Option<DiskFaults> {
    let nanos = millis * 1_000_000;
    Some(DiskFaults { write_latency: nanos..nanos + 1, ..DiskFaults::none() })
}

/// A log that keeps nothing in memory of what it has written.
fn forgetful() -> Options {
    Options { recent_bytes: 0, ..patience() }
}

// ---- Damage at rest ----

/// Flips a bit of the newest superblock's copy, or of the older one's.
async fn damage_superblock(world: &World, newest: bool) {
    let found = superblocks(world);
    let victim = &found[usize::from(!newest)];
    for copy in SUPER_COPIES {
        let bytes = world.peek(PATH, LOGS_AT + copy, SUPER_LEN).expect("on the disk");
        if Superblock::decode(&bytes).as_ref() != Ok(victim) {
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

/// A log of 256 KiB, closed in the middle of its work: its ring has gone on past the tail of the older superblock.
async fn worn(shelf: &Rc<Shelf>, inner: &Rc<Memory>) -> LogId {
    let log = fresh_of(SMALL, shelf, inner, Rc::new(Nobody), patience()).await;
    let id = shelf.ids()[0];
    for at in 0..6 {
        log.submit(write(at * 4096, at as u8, 4096)).await.expect("written");
    }
    log.drain().await.expect("drained");
    // Many entries, over what was drained; nothing of them gets to the backend.
    inner.full.set(true);
    for at in 0..238 {
        log.submit(write(at * 512, at as u8 ^ 0x55, 512)).await.expect("written");
    }
    // As after a power failure: nobody closes it.
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
        // Opening has written the damaged copy anew.
        assert_eq!(superblocks(&world).len(), 2);
    });
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
        // The eleventh block's header; its units are nine.
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
            let error = log.submit(Request::Read(extent)).await.expect_err("a changed payload was given out");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert_eq!(read(&*log, 8192, 1).await, [2], "others are whole");
        });
    }
}

// ---- Closing and giving up ----

#[test]
fn closing_leaves_nothing_behind_that_it_has_acknowledged() {
    for persist in [Persist::OnWrite, Persist::OnFlush] {
        on_a_shelf(async |_, shelf| {
            let inner = Memory::new(1 << 20);
            let log = fresh(&shelf, &inner, Rc::new(Nobody), Options { persist, ..patience() }).await;
            log.submit(write(0, 1, 4096)).await.expect("written");
            // The last flush takes its time.
            inner.flush_gate.closed.set(true);
            let closing = spawn({
                let log = log.clone();
                async move { log.close(true).await }
            });
            while inner.flush_gate.waiting.get() == 0 {
                sleep(MILLISECOND).await;
            }
            let late = spawn(log.submit(write(8192, 2, 4096)));
            sleep(Duration::from_millis(50)).await;
            inner.flush_gate.open();
            closing.await.expect("closed");
            let acknowledged = late.await.is_ok();
            let there = inner.bytes.borrow()[8192] == 2;
            assert!(there || !acknowledged, "a write was acknowledged, and the log holds it no more");
            assert_eq!(inner.bytes.borrow()[0], 1);
        });
    }
}

/// Keeps the order of its release among the backend's events.
struct Releasing(Rc<RefCell<Vec<Event>>>);

impl Owner for Releasing {
    fn release(&self) -> LocalFuture<Result<()>> {
        self.0.borrow_mut().push(Event::Release);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[test]
fn a_log_is_released_only_when_the_backend_has_flushed_everything() {
    for disabled in [false, true] {
        on_a_shelf(async |world, shelf| {
            let inner = Memory::new(4 << 20);
            let options = Options { persist: Persist::OnFlush, direct_min: Some(64 << 10), ..patience() };
            let log = fresh(&shelf, &inner, Rc::new(Releasing(inner.events.clone())), options).await;
            // Goes straight to the backend, acknowledged before it is durable there.
            log.submit(write(0, 1, 64 << 10)).await.expect("written");
            log.submit(write(64 << 10, 2, 64 << 10)).await.expect("written");
            assert!(log.counters().direct > 0, "nothing bypassed the log");
            if disabled {
                log.disable(Error::new(ErrorKind::ShuttingDown, "detached")).await.expect("disabled");
            } else {
                world.set_disk_faults(PATH, Some(DiskFaults { write_error_ppm: 1_000_000, ..DiskFaults::none() }));
                log.submit(write(1 << 20, 3, 4096)).await.expect("written, wherever");
                let off = async {
                    while !matches!(log.mode(), Mode::Off(_)) {
                        sleep(MILLISECOND).await;
                    }
                };
                timeout(LONG, off).await.expect("it turns off");
            }
            let events = inner.events.borrow();
            let release = events.iter().position(|event| *event == Event::Release).expect("released");
            let change = events[..release].iter().rposition(|event| matches!(event, Event::Change { fua: false }));
            let flush = events[..release].iter().rposition(|event| *event == Event::Flush);
            assert!(change.is_some() && flush > change, "{events:?}");
        });
    }
}

#[test]
fn a_log_that_is_disabled_loses_nothing_and_refuses_nobody() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Releasing(inner.events.clone())), patience()).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        inner.gate.closed.set(true);
        let disabling = spawn({
            let log = log.clone();
            async move { log.disable(Error::new(ErrorKind::ShuttingDown, "detached")).await }
        });
        while inner.gate.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        // Reads still come through the log; writes wait, and then bypass it.
        assert_eq!(read(&*log, 0, 1).await, [1]);
        let during = spawn(log.submit(write(4096, 2, 4096)));
        inner.gate.open();
        disabling.await.expect("disabled");
        during.await.expect("written");
        assert!(matches!(log.mode(), Mode::Off(_)));
        assert_eq!((inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (1, 2));
        log.submit(write(8192, 3, 4096)).await.expect("past the log");
        assert_eq!(inner.bytes.borrow()[8192], 3);
    });
}

/// An owner that becomes one when it is told to.
#[derive(Default)]
struct Contender {
    attempts: Cell<u64>,
    /// What the next attempts come to, the last for good.
    outcomes: RefCell<Vec<Option<ErrorKind>>>,
}

impl Owner for Contender {
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        self.attempts.set(self.attempts.get() + 1);
        let mut outcomes = self.outcomes.borrow_mut();
        let outcome = if outcomes.len() > 1 { outcomes.remove(0) } else { outcomes[0] };
        Some(Box::pin(async move {
            sleep(Duration::from_secs(1)).await;
            outcome.map_or(Ok(()), |kind| Err(Error::new(kind, "held by another client")))
        }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[test]
fn nothing_is_acknowledged_or_written_back_before_the_volume_is_acquired() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let eager = Options { limits: Limits { age_max: Duration::ZERO, bytes_max: None }, ..Options::default() };
        let log = patient(&shelf, &inner).await;
        let id = shelf.ids()[0];
        log.submit(write(0, 1, 4096)).await.expect("written");
        log.close(false).await.expect("closed");
        log.gone().await;
        let owner = Rc::new(Contender::default());
        owner.outcomes.replace(vec![Some(ErrorKind::Busy), Some(ErrorKind::TimedOut), None]);
        let opened = shelf.open_log(&id, "one", 0).await.expect("a log");
        let log = WriteLog::new(inner.clone(), opened, owner.clone(), eager);
        let (writing, reading) = (
            spawn(log.submit(write(4096, 2, 4096))),
            spawn({
                let log = log.clone();
                async move { read(&*log, 0, 1).await }
            }),
        );
        assert_eq!(log.acquired().await.expect_err("somebody else has it").kind(), ErrorKind::Busy);
        assert_eq!(log.mode().name(), "acquiring");
        let began = now();
        writing.await.expect("written");
        assert_eq!(reading.await, [1]);
        assert!(began.elapsed() > Duration::from_secs(1) && owner.attempts.get() == 3);
        log.acquired().await.expect("it is ours");
        log.drain().await.expect("drained");
        assert_eq!((inner.bytes.borrow()[0], inner.bytes.borrow()[4096]), (1, 2));
    });
}

#[test]
fn a_log_that_the_record_does_not_name_any_more_is_never_written_back() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        let id = shelf.ids()[0];
        log.submit(write(0, 1, 4096)).await.expect("written");
        log.close(false).await.expect("closed");
        log.gone().await;
        let owner = Rc::new(Contender::default());
        owner.outcomes.replace(vec![Some(ErrorKind::Fenced)]);
        let opened = shelf.open_log(&id, "one", 0).await.expect("a log");
        let log = WriteLog::new(inner.clone(), opened, owner.clone(), Options::default());
        let waiting = log.submit(write(4096, 2, 4096));
        assert_eq!(waiting.await.expect_err("acknowledged").kind(), ErrorKind::Fenced);
        sleep(LONG).await;
        assert_eq!((inner.writes.get(), owner.attempts.get()), (0, 1));
        assert!(matches!(log.mode(), Mode::Failed(_)));
        // Closing it changes nothing: what it holds can still be looked at.
        log.close(false).await.expect("closed");
        log.gone().await;
        assert_eq!(shelf.inspect(&id).await.expect("there").dirty_entries, 1);
    });
}

#[test]
fn a_log_can_be_closed_while_it_waits_to_be_acquired() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        let id = shelf.ids()[0];
        log.submit(write(0, 1, 4096)).await.expect("written");
        log.close(false).await.expect("closed");
        log.gone().await;
        let owner = Rc::new(Contender::default());
        owner.outcomes.replace(vec![Some(ErrorKind::Busy)]);
        let opened = shelf.open_log(&id, "one", 0).await.expect("a log");
        let log = WriteLog::new(inner.clone(), opened, owner, Options::default());
        let waiting = spawn(log.submit(write(4096, 2, 4096)));
        sleep(Duration::from_secs(3)).await;
        log.close(false).await.expect("closed");
        assert_eq!(waiting.await.expect_err("closed").kind(), ErrorKind::ShuttingDown);
        timeout(LONG, log.gone()).await.expect("nothing holds it");
        assert_eq!(shelf.inspect(&id).await.expect("there").dirty_entries, 1);
    });
}

#[test]
fn who_waits_for_a_log_to_be_written_back_hears_that_it_is_closed() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        inner.gate.closed.set(true);
        let waiting = {
            let log = log.clone();
            spawn(async move { log.drain().await })
        };
        sleep(MILLISECOND).await;
        timeout(LONG, log.close(false)).await.expect("it does not wait for the backend").expect("closed");
        let told = timeout(LONG, waiting).await.expect("told").expect_err("it is not written back");
        assert_eq!(told.kind(), ErrorKind::ShuttingDown);
        inner.gate.open();
        timeout(LONG, log.gone()).await.expect("nothing holds it");
    });
}

// ---- A backend that is full, or gone ----

#[test]
fn who_waits_for_the_queue_does_not_wait_for_what_an_error_took_out_of_it() {
    for what in ["drain", "cut", "shrink"] {
        on_a_shelf_of(true, async |_, shelf| {
            let inner = Memory::new(4 << 20);
            let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), patience()).await;
            inner.full.set(true);
            // More than the log holds: the last ones wait in the queue for room.
            let writes: Vec<_> =
                (0..20_u64).map(|at| spawn(log.submit(write(at << 15, at as u8 + 1, 32 << 10)))).collect();
            sleep(MILLISECOND).await;
            let waiting = spawn({
                let log = log.clone();
                async move {
                    match what {
                        "drain" => log.drain().await,
                        "cut" => log.cut().await.map(drop),
                        _ => log.shrink(2 << 20).await.map(drop),
                    }
                }
            });
            let mut refused = 0;
            for write in writes {
                refused += usize::from(timeout(LONG, write).await.expect("answered").is_err());
            }
            assert!(refused > 0, "the queue was never given up");
            inner.full.set(false);
            timeout(LONG, waiting).await.expect("it waits for ever").expect("done");
        });
    }
}

#[test]
fn writes_that_are_acknowledged_early_are_bounded_by_the_log() {
    on_a_shelf_of(true, async |_, shelf| {
        let inner = Memory::new(8 << 20);
        let options = Options { persist: Persist::OnFlush, direct_min: None, ..patience() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        inner.gate.closed.set(true);
        let acknowledged = Rc::new(Cell::new(0_u64));
        let writes: Vec<_> = (0..500_u64)
            .map(|at| {
                let (write, acknowledged) = (log.submit(write(at << 13, at as u8, 8192)), acknowledged.clone());
                spawn(async move {
                    write.await.expect("written");
                    acknowledged.set(acknowledged.get() + 8192);
                })
            })
            .collect();
        sleep(LONG).await;
        let bound = SMALL + 8192;
        assert!(acknowledged.get() <= bound, "{} bytes are acknowledged behind {SMALL}", acknowledged.get());
        // A full backend is told to who writes, not waited for.
        inner.gate.open();
        for write in writes {
            timeout(LONG, write).await.expect("it goes on when the backend does");
        }
        inner.full.set(true);
        let mut error = None;
        for at in 0..500_u64 {
            match timeout(LONG, log.submit(write(at << 13, at as u8 ^ 1, 8192))).await.expect("answered") {
                Ok(_) => {}
                Err(refused) => {
                    error = Some(refused);
                    break;
                }
            }
        }
        assert_eq!(error.expect("nothing was refused").kind(), ErrorKind::NoSpace);
        inner.full.set(false);
        timeout(LONG, log.drain()).await.expect("drained").expect("drained");
    });
}

#[test]
fn a_write_longer_than_what_the_backend_may_lack_waits_and_goes_on() {
    on_a_shelf_of(true, async |_, shelf| {
        let inner = Memory::new(8 << 20);
        let limits = Limits { bytes_max: Some(4096), ..patience().limits };
        let options = Options { persist: Persist::OnFlush, direct_min: None, limits, ..patience() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        let writes: Vec<_> = (0..4_u64).map(|at| log.submit(write(at << 13, at as u8, 8192))).collect();
        for write in writes {
            timeout(LONG, write).await.expect("its own bytes do not hold it back").expect("written");
        }
    });
}

// ---- Order on the medium ----

#[test]
fn those_who_write_the_tail_take_turns() {
    on_a_shelf(async |world, shelf| {
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        world.set_disk_faults(PATH, slow_writes(50));
        let shrinking = spawn({
            let log = log.clone();
            async move { log.shrink(512 << 10).await.map(drop) }
        });
        while log.stats().dirty_entries > 0 {
            sleep(MILLISECOND).await;
        }
        // Write-back is writing the tail; a comparison that fails wakes who shrinks, and who then writes it, too.
        let bytes = |value| Buf::copy_of(&[value; 4096]).into();
        let other = Request::CompareAndWrite { offset: 0, expect: bytes(9), data: bytes(8), fua: false };
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
        let inner = Memory::new(1 << 20);
        let log = patient(&shelf, &inner).await;
        log.submit(write(0, 1, 4096)).await.expect("written");
        world.set_disk_faults(PATH, slow_writes(50));
        // Its caller goes away while the superblock is being written.
        let shrinking = spawn({
            let log = log.clone();
            async move { log.shrink(512 << 10).await.map(drop) }
        });
        while log.stats().dirty_entries > 0 {
            sleep(MILLISECOND).await;
        }
        // Write-back has written the tail by now, and it is being written once more for who shrinks.
        sleep(Duration::from_millis(75)).await;
        shrinking.abort();
        log.close(true).await.expect("closed");
        log.gone().await;
        let serials: Vec<u64> = superblocks(&world).iter().map(|superblock| superblock.serial).collect();
        assert_eq!(serials.len(), 2);
        assert_eq!(serials[0], serials[1] + 1, "two writes went to one copy");
    });
}

/// Submits bursts of writes, each of a new generation, until the ring has gone round several times; looks at the disk, as a
/// power failure at each moment would leave it, in between.
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
                log.submit(Request::Flush).await.expect("flushed");
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
        let limits = Limits { age_max: Duration::ZERO, bytes_max: None };
        let options = Options { limits, batch_entries: 8, groups: 1, ..Options::default() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        let tag = tag_of(&shelf.ids()[0]);
        // So that a block may get there before a superblock that was written earlier.
        let uneven = DiskFaults { write_latency: 1_000_000..20_000_000, ..DiskFaults::none() };
        world.set_disk_faults(PATH, Some(uneven));
        let ring = (SMALL - AREA_AT) / UNIT;
        let fullest = Rc::new(Cell::new(0));
        look_while_it_wraps(&log, |_| {
            fullest.set(fullest.get().max(log.stats().used));
            let newest = superblocks(&world).swap_remove(0);
            let at = LOGS_AT + AREA_AT + newest.tail_pos % ring * UNIT;
            let bytes = world.peek(PATH, at, UNIT as usize).expect("on the disk");
            // An empty log names the place of the next block.
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
        let limits = Limits { age_max: Duration::ZERO, bytes_max: None };
        let options = Options { limits, batch_entries: 1, ..Options::default() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        world.set_disk_faults(PATH, slow_writes(5));
        let tag = tag_of(&shelf.ids()[0]);
        let mut seen = 0_u64;
        look_while_it_wraps(&log, |tail| {
            // What a recovery would begin with: the superblock's tail, or that of the newest block.
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
        let options = Options { direct_min: Some(64 << 10), ..patience() };
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
        log.submit(write(128 << 10, 4, 64 << 10)).await.expect("written");
        assert_eq!(log.counters().direct, direct + 1, "with a durable tail it goes straight to the backend");
    });
}

#[test]
fn a_cut_waits_for_direct_writes_that_have_begun() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(4 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), Options { direct_min: Some(64 << 10), ..patience() }).await;
        log.submit(write(0, 1, 64 << 10)).await.expect("written");
        // Nothing else is to be written back.
        log.drain().await.expect("drained");
        inner.gate.closed.set(true);
        let direct = log.submit(write(64 << 10, 2, 64 << 10));
        assert_eq!(log.counters().direct_bytes, 0, "its task has not had its turn");
        // At once, before any task has had its turn.
        let mut cutting = Box::pin(log.cut());
        assert!(timeout(Duration::from_secs(1), &mut cutting).await.is_err(), "the cut has missed a direct write");
        inner.gate.open();
        let cut = cutting.await.expect("a cut");
        let held = inner.bytes.borrow().clone();
        assert_eq!(held[64 << 10], 2);
        direct.await.expect("written");
        assert!(*inner.bytes.borrow() == held, "the backend has changed under the cut");
        drop(cut);
    });
}

#[test]
fn a_flush_covers_what_was_in_flight_past_the_log_when_it_was_attached() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), patience()).await;
        log.submit(Request::Flush).await.expect("flushed");
        let past = log.changes_past();
        let flushes = async || {
            log.submit(Request::Flush).await.expect("flushed");
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
        let inner = Memory::new(4 << 20);
        let log = fresh(&shelf, &inner, Rc::new(Nobody), Options { direct_min: Some(64 << 10), ..patience() }).await;
        log.submit(write(0, 1, 64 << 10)).await.expect("written");
        // Nothing else is to be written back.
        log.drain().await.expect("drained");
        inner.gate.closed.set(true);
        let direct = spawn(log.submit(write(64 << 10, 2, 64 << 10)));
        let mut shrinking = Box::pin(log.shrink(64 << 10));
        assert!(timeout(Duration::from_secs(1), &mut shrinking).await.is_err(), "a write past the end is in flight");
        inner.gate.open();
        let shrunk = shrinking.await.expect("nothing of the end is in flight");
        direct.await.expect("written");
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
        let reading = spawn(log.submit(Request::Read(forebay_block::Extent::new(0, 8192))));
        sleep(MILLISECOND).await;
        world.set_disk_faults(PATH, None);
        // Round the ring, and over the place of what is read, if it is given away.
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
