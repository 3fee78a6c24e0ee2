//! Invariants under slow, full or abandoned operations.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::common::{
    Event, LONG, MILLISECOND, Memory, Nobody, PATH, SMALL, fresh, fresh_of, on_a_shelf, on_a_shelf_of, patience,
    patient, read, write,
};
use forebay_block::{BlockDevice, BlockRequest, Buf, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::{now, sleep, spawn, timeout};
use forebay_sim::DiskFaults;
use forebay_writelog::{DirtyLimits, LogOptions, LogOwner, Mode, Persist, WriteLog};

// ---- Closing and abandoning ----

#[test]
fn closing_leaves_nothing_behind_that_it_has_acknowledged() {
    for persist in [Persist::OnWrite, Persist::OnFlush] {
        on_a_shelf(async |_, shelf| {
            let inner = Memory::new(1 << 20);
            let log = fresh(&shelf, &inner, Rc::new(Nobody), LogOptions { persist, ..patience() }).await;
            log.submit(write(0, 1, 4096)).await.expect("written");
            // The last flush is slow.
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

/// Owner that records its release among the backend's events.
struct Releasing(Rc<RefCell<Vec<Event>>>);

impl LogOwner for Releasing {
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
            let options = LogOptions { persist: Persist::OnFlush, direct_min: Some(64 << 10), ..patience() };
            let log = fresh(&shelf, &inner, Rc::new(Releasing(inner.events.clone())), options).await;
            // Bypasses the log, acknowledged before it is durable at the backend.
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

/// Owner that acquires the volume on command.
#[derive(Default)]
struct Contender {
    attempts: Cell<u64>,
    /// Outcomes of the next attempts; the last one repeats.
    outcomes: RefCell<Vec<Option<ErrorKind>>>,
}

impl LogOwner for Contender {
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
        let eager =
            LogOptions { limits: DirtyLimits { age_max: Duration::ZERO, bytes_max: None }, ..LogOptions::default() };
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
        let log = WriteLog::new(inner.clone(), opened, owner.clone(), LogOptions::default());
        let waiting = log.submit(write(4096, 2, 4096));
        assert_eq!(waiting.await.expect_err("acknowledged").kind(), ErrorKind::Fenced);
        sleep(LONG).await;
        assert_eq!((inner.writes.get(), owner.attempts.get()), (0, 1));
        assert!(matches!(log.mode(), Mode::Failed(_)));
        // Nor on request: another host may have written the volume since.
        assert_eq!(log.drain().await.expect_err("drained").kind(), ErrorKind::Fenced);
        assert_eq!(log.cut().await.err().map(|error| error.kind()), Some(ErrorKind::Fenced));
        assert_eq!(log.shrink(4096).await.err().map(|error| error.kind()), Some(ErrorKind::Fenced));
        sleep(LONG).await;
        assert_eq!((inner.writes.get(), inner.bytes.borrow()[0]), (0, 0));
        // A close changes nothing: the contents can still be inspected.
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
        let log = WriteLog::new(inner.clone(), opened, owner, LogOptions::default());
        let waiting = spawn(log.submit(write(4096, 2, 4096)));
        let drained = spawn({
            let log = log.clone();
            async move { log.drain().await }
        });
        let disabled = spawn({
            let log = log.clone();
            async move { log.disable(Error::new(ErrorKind::Io, "on purpose")).await }
        });
        sleep(Duration::from_secs(3)).await;
        log.close(false).await.expect("closed");
        for ended in [drained, disabled] {
            let ended = timeout(LONG, ended).await.expect("it is told");
            assert_eq!(ended.expect_err("closed").kind(), ErrorKind::ShuttingDown);
        }
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

#[test]
fn closing_makes_acknowledged_writes_last_though_one_that_goes_round_hangs() {
    on_a_shelf(async |_, shelf| {
        let inner = Memory::new(1 << 20);
        let options = LogOptions { persist: Persist::OnFlush, ..patience() };
        let log = fresh(&shelf, &inner, Rc::new(Nobody), options).await;
        log.submit(write(0, 1, 4096)).await.expect("acknowledged");
        inner.gate.closed.set(true);
        drop(spawn(log.submit(write(4096, 2, 512 << 10))));
        while inner.gate.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        assert_eq!((log.counters().direct, log.unkept_bytes()), (1, 4096));
        timeout(Duration::from_secs(10), log.close(false)).await.expect_err("no response from the backend");
        assert_eq!(log.unkept_bytes(), 0);
        inner.gate.open();
    });
}

#[test]
fn closing_a_full_log_makes_last_what_has_its_place_and_tells_of_the_rest() {
    on_a_shelf_of(true, async |_, shelf| {
        let inner = Memory::new(8 << 20);
        let options = LogOptions { persist: Persist::OnFlush, direct_min: None, ..patience() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        inner.gate.closed.set(true);
        let writes: Vec<_> = (0..100_u64).map(|at| spawn(log.submit(write(at << 13, at as u8, 8192)))).collect();
        sleep(LONG).await;
        let before = log.unkept_bytes();
        timeout(Duration::from_secs(10), log.close(false)).await.expect_err("there is no room");
        let after = log.unkept_bytes();
        let mut acknowledged = 0;
        for write in writes {
            acknowledged += 8192 * u64::from(timeout(LONG, write).await.expect("answered").is_ok());
        }
        let stats = log.stats();
        assert!(0 < after && after <= before, "{before} {after}");
        assert_eq!(after, acknowledged - stats.appended_bytes, "what has its place lasts");
        inner.gate.open();
    });
}

// ---- Full or unreachable backend ----

#[test]
fn who_waits_for_the_queue_does_not_wait_for_what_an_error_took_out_of_it() {
    for what in ["drain", "cut", "shrink"] {
        on_a_shelf_of(true, async |_, shelf| {
            let inner = Memory::new(4 << 20);
            let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), patience()).await;
            inner.full.set(true);
            // More than the log holds: the last ones wait in the queue for space.
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
        let options = LogOptions { persist: Persist::OnFlush, direct_min: None, ..patience() };
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
        // A full backend fails the writers instead of blocking them.
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
fn writes_that_waited_for_others_are_bounded_by_the_log_as_well() {
    on_a_shelf_of(true, async |_, shelf| {
        let inner = Memory::new(8 << 20);
        let options = LogOptions { persist: Persist::OnFlush, direct_min: None, ..patience() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        inner.gate.closed.set(true);
        // The range is locked until the comparison is done: all of them see an empty log, then wait.
        inner.pause.set(LONG);
        let (expect, data) = ([0, 1].map(|byte| Buf::copy_of(&[byte; 65536]).into())).into();
        let first = log.submit(BlockRequest::CompareAndWrite { offset: 0, expect, data, fua: false });
        sleep(MILLISECOND).await;
        let acknowledged = Rc::new(Cell::new(0_u64));
        let writes: Vec<_> = (0..1000_u64)
            .map(|at| {
                let (write, acknowledged) =
                    (log.submit(write((at % 8) << 13, at as u8 | 1, 8192)), acknowledged.clone());
                spawn(async move {
                    write.await.expect("written");
                    acknowledged.set(acknowledged.get() + 8192);
                })
            })
            .collect();
        first.await.expect("compared");
        sleep(LONG).await;
        let bound = SMALL + 2 * 65536;
        assert!(acknowledged.get() > 0);
        assert!(acknowledged.get() <= bound, "{} bytes are acknowledged behind {SMALL}", acknowledged.get());
        inner.gate.open();
        for write in writes {
            timeout(LONG, write).await.expect("it goes on when the backend does");
        }
    });
}

#[test]
fn a_write_longer_than_what_the_backend_may_lack_waits_and_goes_on() {
    on_a_shelf_of(true, async |_, shelf| {
        let inner = Memory::new(8 << 20);
        let limits = DirtyLimits { bytes_max: Some(4096), ..patience().limits };
        let options = LogOptions { persist: Persist::OnFlush, direct_min: None, limits, ..patience() };
        let log = fresh_of(SMALL, &shelf, &inner, Rc::new(Nobody), options).await;
        let writes: Vec<_> = (0..4_u64).map(|at| log.submit(write(at << 13, at as u8, 8192))).collect();
        for write in writes {
            timeout(LONG, write).await.expect("its own bytes do not hold it back").expect("written");
        }
    });
}
