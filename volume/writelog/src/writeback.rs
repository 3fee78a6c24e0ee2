//! Write-back: log contents go to the backend, one barrier generation after the other.
//!
//! A batch is a range of the oldest entries, all of one generation. Its writes do not overlap and are submitted in
//! parallel; when they are durable at the backend, the tail moves past the batch. Batches overlap in time where no
//! barrier is between their writes: within a generation, and across its end for writes submitted before it
//! ([`LogEntry::slack`](crate::entries::LogEntry::slack)), since a host that had them all in flight could not assume an
//! order either. So the backend sees as many concurrent requests as without a log.
//!
//! The tail must be durable before a batch begins after the next one has been retired. A recovery then replays at
//! most one batch of a generation that the backend already has, over a part of the next one. The result has all of
//! the former and a part of the latter, which a crash of the host could have left, too.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockRequest, Buf, BufList, Error, ErrorKind, Extent, LocalFuture, Result, WriteExtent};
use forebay_reactor::sync::{Notify, Semaphore, join_all};
use forebay_reactor::{Instant, JoinHandle, now, spawn, stand_back, timeout};

use crate::append::disable_failed;
use crate::entries::LogEntry;
use crate::flush;
use crate::log::LogShared;
use crate::mode::Mode;
use crate::plan::{WriteBackAction, WriteBackRun, coalesce, plan};
use crate::read::{content, content_of, must_be_read, payload};
use crate::state::LogState;
use crate::throttle;

/// Approximate maximum payload of one batch in bytes.
const BATCH_BYTES: u64 = 4 << 20;
/// Maximum number of batches in flight.
const BATCHES: usize = 8;
/// Maximum number of requests of a batch that uses FUA instead of a flush.
const FUA_MAX: usize = 4;
/// Minimum and maximum delay between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// Write-back request to the backend.
enum Work {
    Plain(BlockRequest),
    /// Writes whose data is still to be read.
    Writes {
        writes: Vec<(u64, LocalFuture<Result<BufList>>)>,
        fua: bool,
    },
}

/// Write-back batch.
struct Batch {
    /// Sequence number after its last entry.
    end: u64,
    /// Requests with their ranges, in order and not overlapping.
    requests: Vec<(Vec<Extent>, Work)>,
    /// Bytes of the volume covered by its entries, including superseded ones.
    bytes: u64,
    durable: bool,
}

/// In-flight batch.
struct InFlightBatch {
    end: u64,
    bytes: u64,
    started: Instant,
    /// Ranges that it writes, in order and not overlapping.
    extents: Vec<Extent>,
    progress: Rc<Progress>,
}

/// Progress of an in-flight batch.
struct Progress {
    requests: usize,
    /// Requests not completed yet.
    left: Cell<usize>,
    written: Notify,
    /// Outcome of the batch: the number of bypassed writes that its flush made durable.
    outcome: RefCell<Option<std::result::Result<u64, Failure>>>,
}

impl InFlightBatch {
    fn writes(&self, extent: Extent) -> bool {
        let from = self.extents.partition_point(|own| own.end() <= extent.offset);
        self.extents.get(from).is_some_and(|own| own.overlaps(extent))
    }

    /// Returns the approximate number of its writes that are not completed yet.
    fn writes_left(&self) -> u64 {
        let Progress { left, requests, .. } = &*self.progress;
        (self.extents.len() * left.get()).div_ceil(*requests.max(&1)) as u64
    }

    fn failed(&self) -> bool {
        matches!(&*self.progress.outcome.borrow(), Some(Err(_)))
    }
}

/// Writes back until the log is closed.
pub(crate) async fn run(shared: Rc<LogShared>) {
    let slots = Slots::new();
    let mut persisting: Option<JoinHandle<Result<()>>> = None;
    let mut backoff = BACKOFF.0;
    let mut in_flight: VecDeque<InFlightBatch> = VecDeque::new();
    let mut retired_at = Instant::default();
    loop {
        if in_flight.is_empty() {
            if !wait_for_work(&shared).await {
                // The tail write must end before the log's space can be reused.
                if let Some(persist) = persisting.take() {
                    let _ = persist.await;
                }
                return;
            }
            if finish_disabling(&shared).await {
                return;
            }
            // Data at the backend must be durable in the log too: otherwise a recovery that finds a shorter log would
            // replay older entries over it.
            if shared.is_write_back_ack()
                && shared.state.borrow().life.is_on()
                && let Err(error) = flush::sync(&shared).await
            {
                disable_failed(&shared, error);
                continue;
            }
        }
        let next = shared.write_back.wait();
        while let Some(batch) = next_batch(&shared, &in_flight) {
            in_flight.push_back(begin(&shared, &slots, batch, &in_flight));
        }
        let Some(oldest) = in_flight.front() else { continue };
        let Some(outcome) = oldest.progress.outcome.borrow_mut().take() else {
            next.await;
            continue;
        };
        match outcome {
            Ok(acknowledged) => {
                backoff = BACKOFF.0;
                let mut state = shared.state.borrow_mut();
                state.life.set_backend_error(None);
                state.bypassed.flushed(acknowledged);
                shared.throttle.measured(oldest.bytes, oldest.started.max(retired_at).elapsed());
                retired_at = now();
            }
            Err(failure) => {
                // In-flight batches end first; then everything from the tail on is retried, in order.
                for other in in_flight.drain(..).skip(1) {
                    let ended = || other.progress.outcome.borrow().is_some();
                    shared.write_back.wait_until(ended).await;
                }
                let error = match failure {
                    Failure::Backend(error) if !is_final(error.kind()) => error,
                    Failure::Backend(error) | Failure::Log(error) => {
                        fail(&shared, error);
                        return;
                    }
                };
                tracing::warn!(%error, "write-back of the write log failed: retrying");
                note_error(&shared, error);
                // A closed log does not wait for its backend.
                let _ = timeout(backoff, closed(&shared)).await;
                backoff = (backoff * 2).min(BACKOFF.1);
                continue;
            }
        }
        let end = oldest.end;
        if let Some(before) = persisting.take()
            && let Err(error) = before.await
        {
            disable_failed(&shared, error);
        }
        in_flight.pop_front();
        retire(&shared, end);
        persisting = Some(persist_tail(&shared, false));
        // Waiters for space, or for an empty log, wait for a durable tail too.
        let waited_for = {
            let state = shared.state.borrow();
            shared.throttle.is_starved() || state.dirty.is_empty() || state.points.drain_target() >= end
        };
        if waited_for
            && let Some(persist) = persisting.take()
            && let Err(error) = persist.await
        {
            disable_failed(&shared, error);
        }
        shared.settled.notify_all();
    }
}

/// Makes the tail durable, even if the returned handle is dropped: a second write of it must not overlap the first,
/// and the log is not [gone](crate::WriteLog::gone) before it has ended.
pub(crate) fn persist_tail(shared: &Rc<LogShared>, clean: bool) -> JoinHandle<Result<()>> {
    let shared = shared.clone();
    spawn(async move { shared.medium.persist_tail(clean).await })
}

/// Makes the tail durable in both copies of the superblock: then no recovery replays anything before it, even if only
/// the older copy is readable. Ends early when the log is closed, which writes it too.
pub(crate) async fn persist_tail_twice(shared: &Rc<LogShared>) -> Result<()> {
    let tail = shared.state.borrow().dirty.tail();
    while shared.medium.persisted_tail() < tail && !shared.state.borrow().life.is_closing() {
        persist_tail(shared, false).await?;
    }
    Ok(())
}

/// Waits until the log is closed.
pub(crate) async fn closed(shared: &LogShared) {
    shared.write_back.wait_until(|| shared.state.borrow().life.is_closing()).await;
}

/// Returns whether the error is permanent: no later attempt can succeed.
pub(crate) fn is_final(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::ReadOnly | ErrorKind::Fenced | ErrorKind::ShuttingDown)
}

impl LogState {
    /// Returns `Ok` if there are entries to write back and a reason to do it now; otherwise how long to wait, if
    /// there is a deadline.
    fn due(&self, shared: &LogShared) -> std::result::Result<(), Option<Duration>> {
        // A log that is not known to be ours, or turned out not to be, must not change the volume.
        if self.life.is_acquiring() || self.life.failure().is_some() {
            return Err(None);
        }
        let tail = self.dirty.tail();
        // Entries that are not durable yet are synced before they are written back.
        let limit = match self.life.is_on() {
            true => self.points.held().map_or(self.queue.appended_seq(), |hold| hold.min(self.queue.appended_seq())),
            false => self.limit(shared),
        };
        if tail >= limit {
            // The end of a held consistency point is waited for: otherwise the log would be released with entries not
            // written back, and later requests would go to the backend.
            // A point past the tail waits for entries that cannot be synced: they are written back once the log is released.
            let at_point = self.points.held().is_some_and(|hold| hold <= tail);
            let ends = self.life.is_disabling() && tail >= self.there(shared) && !at_point;
            return if ends { Ok(()) } else { Err(None) };
        }
        match throttle::write_back_delay(shared, self) {
            Duration::ZERO => Ok(()),
            delay => Err(Some(delay)),
        }
    }

    /// Returns the first entry that must not be written back now.
    fn limit(&self, shared: &LogShared) -> u64 {
        let there = self.there(shared);
        self.points.held().map_or(there, |hold| hold.min(there))
    }

    /// Returns the first entry that is not ready for write-back, without regard to held consistency points.
    fn there(&self, shared: &LogShared) -> u64 {
        match self.life.is_on() {
            true if shared.is_write_back_ack() => self.queue.synced_seq(),
            true => self.queue.appended_seq(),
            // Entries that the medium may have lost go to the backend only when nothing of the log can be replayed
            // over them.
            false if shared.is_write_back_ack() && !self.life.is_released() => {
                self.queue.synced_seq().max(self.dirty.tail())
            }
            false => self.dirty.head(),
        }
    }
}

/// Waits until there is work; returns false when the log is closed.
async fn wait_for_work(shared: &Rc<LogShared>) -> bool {
    loop {
        let next = shared.write_back.wait();
        let (closing, due) = {
            let state = shared.state.borrow();
            (state.life.is_closing(), state.due(shared))
        };
        if closing {
            return false;
        }
        match due {
            Ok(()) => return true,
            Err(None) => next.await,
            // Not woken on every write: checked again when the log has filled up, or when entries reach their age.
            Err(Some(wait)) => drop(timeout(wait, next).await),
        }
    }
}

/// Returns the next batch: the oldest entries of one generation that are in no in-flight batch. `None` if they must
/// wait, or waiting is cheaper.
fn next_batch(shared: &Rc<LogShared>, in_flight: &VecDeque<InFlightBatch>) -> Option<Batch> {
    let size = shared.inner.geometry().size;
    let state = shared.state.borrow();
    if state.life.failure().is_some() {
        return None;
    }
    let (first, limit) = (in_flight.back().map_or(state.dirty.tail(), |last| last.end), state.limit(shared));
    // Small batches would cost a flush each: require as many entries as the backend still has writes to complete.
    let least = in_flight.iter().map(InFlightBatch::writes_left).sum::<u64>().max(1);
    if first + least > limit {
        return None;
    }
    if !in_flight.is_empty() {
        let beside =
            in_flight.len() < BATCHES && !shared.is_write_back_ack() && state.life.is_on() && !state.life.is_closing();
        if !beside || in_flight.iter().any(InFlightBatch::failed) || state.due(shared).is_err() {
            return None;
        }
    }
    let generation = state.dirty.generation_of(first);
    // Oldest generation that is not durable at the backend.
    let oldest = state.dirty.oldest_generation().unwrap_or(generation);
    let last = limit.min(state.dirty.generation_end(generation)).min(first + shared.options.batch_entries as u64);
    let (mut end, mut payload, mut bytes) = (first, 0, 0);
    while end < last && payload < BATCH_BYTES {
        let entry = state.dirty.get(end)?;
        if generation > oldest + entry.slack() {
            break;
        }
        bytes += entry.extent().len;
        payload += if entry.is_dead() { 0 } else { u64::from(entry.payload_len()) };
        end += 1;
    }
    if end < first + least {
        return None;
    }
    let numbered = (first..end).filter_map(|seq| state.dirty.get(seq).map(|entry| (seq, entry)));
    let live: Vec<_> = numbered.filter(|(_, entry)| !entry.is_dead()).collect();
    let runs = plan(live.into_iter(), size);
    let discards = runs.iter().any(|run| run.action == WriteBackAction::Discard);
    // Payloads not in memory are read together: entries are stored in order of arrival.
    let parts = runs.iter().flat_map(|run| &run.parts).filter_map(|&(seq, _)| Some((seq, *state.dirty.get(seq)?)));
    let on_medium: Vec<LogEntry> =
        parts.filter(|(seq, entry)| must_be_read(&state, *seq, entry)).map(|(_, entry)| entry).collect();
    let mut reads = shared.medium.read_many(&on_medium).into_iter();
    let groups = coalesce(runs, shared.inner.unit());
    let durable = groups.len() <= FUA_MAX && !discards;
    let requests = groups.into_iter().map(|runs| {
        let extents = runs.iter().map(|run| run.extent).collect();
        (extents, request(shared, &state, runs, durable, &mut reads))
    });
    let requests = requests.collect();
    Some(Batch { end, requests, bytes, durable })
}

/// Returns the request for coalesced runs; payloads not in memory are taken from `reads`.
fn request(
    shared: &Rc<LogShared>,
    state: &LogState,
    runs: Vec<WriteBackRun>,
    fua: bool,
    reads: &mut impl Iterator<Item = LocalFuture<Result<Buf>>>,
) -> Work {
    let mut writes = Vec::with_capacity(runs.len());
    for WriteBackRun { action, extent, parts } in runs {
        match action {
            WriteBackAction::Discard => return Work::Plain(BlockRequest::Discard(extent)),
            WriteBackAction::Zeroes => return Work::Plain(BlockRequest::WriteZeroes { extent, no_unmap: false, fua }),
            WriteBackAction::ZeroesKeep => {
                return Work::Plain(BlockRequest::WriteZeroes { extent, no_unmap: true, fua });
            }
            WriteBackAction::Write => {}
        }
        // Started here, so that the payloads are pinned on the medium.
        let mut one = |&(seq, part): &(u64, Extent)| {
            let entry = state.dirty.get(seq)?;
            match must_be_read(state, seq, entry) {
                true => Some(content_of(entry, part, payload(shared, seq, entry, reads.next()?))),
                false => Some(content(shared, state, seq, entry, part)),
            }
        };
        let mut reads: Vec<_> = parts.iter().filter_map(&mut one).collect();
        let data: LocalFuture<Result<BufList>> = match reads.len() {
            1 => reads.remove(0),
            _ => Box::pin(async move {
                let mut data = BufList::new();
                for read in reads {
                    data.append(read.await?);
                }
                Ok(data)
            }),
        };
        writes.push((extent.offset, data));
    }
    Work::Writes { writes, fua }
}

enum Failure {
    /// Log cannot be read.
    Log(Error),
    /// Backend returned an error.
    Backend(Error),
}

/// Starts a batch beside those in flight; signals `write_back` when it ends.
fn begin(
    shared: &Rc<LogShared>,
    slots: &Rc<Slots>,
    batch: Batch,
    in_flight: &VecDeque<InFlightBatch>,
) -> InFlightBatch {
    let Batch { end, requests, bytes, durable } = batch;
    let all = requests.len();
    let progress =
        Rc::new(Progress { requests: all, left: Cell::new(all), written: Notify::new(), outcome: RefCell::new(None) });
    let mut tasks = Vec::with_capacity(all);
    let mut extents = Vec::new();
    for (own, work) in requests {
        // Overlapping requests keep their order.
        let overlaps = |batch: &&InFlightBatch| own.iter().any(|&extent| batch.writes(extent));
        let before: Vec<_> = in_flight.iter().filter(overlaps).map(|batch| batch.progress.clone()).collect();
        extents.extend(own);
        let (shared, slots, progress) = (shared.clone(), slots.clone(), progress.clone());
        tasks.push(spawn(async move {
            for other in before {
                other.written.wait_until(|| other.left.get() == 0).await;
            }
            let done = write(&shared, &slots, work).await;
            progress.left.set(progress.left.get() - 1);
            if progress.left.get() == 0 {
                progress.written.notify_all();
            }
            // Further batches may start beside the rest of this one.
            shared.write_back.notify_all();
            done
        }));
    }
    let (log, ending) = (shared.clone(), progress.clone());
    drop(spawn(async move {
        let outcome = finish(&log, tasks, durable).await;
        *ending.outcome.borrow_mut() = Some(outcome);
        log.write_back.notify_all();
    }));
    InFlightBatch { end, bytes, started: now(), extents, progress }
}

/// Slots for in-flight requests to the backend, bounded by urgency.
struct Slots {
    /// Serializes the start of requests, in order of arrival.
    turn: Semaphore,
    taken: Cell<usize>,
}

/// Guard of an in-flight request's slot.
struct Slot(Rc<Slots>);

impl Slots {
    fn new() -> Rc<Self> {
        Rc::new(Self { turn: Semaphore::new(1), taken: Cell::new(0) })
    }

    /// Waits for a free slot. Releasing a slot, or a rise in urgency, must be signaled on `write_back`.
    async fn take(self: &Rc<Self>, shared: &LogShared) -> Slot {
        let _turn = self.turn.acquire(1).await;
        shared.write_back.wait_until(|| self.taken.get() < throttle::requests_max(shared)).await;
        self.taken.set(self.taken.get() + 1);
        Slot(self.clone())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.taken.set(self.0.taken.get() - 1);
    }
}

/// Submits one request of a batch.
async fn write(shared: &Rc<LogShared>, slots: &Rc<Slots>, work: Work) -> std::result::Result<(), Failure> {
    let _slot = slots.take(shared).await;
    if throttle::requests_max(shared) < shared.options.parallel {
        stand_back().await;
    }
    let (writes, fua) = match work {
        Work::Plain(request) => {
            count(shared, request.extent().map_or(0, |extent| extent.len));
            return within(shared.inner.submit(request).await.map(drop));
        }
        Work::Writes { writes, fua } => (writes, fua),
    };
    let (offsets, reads): (Vec<u64>, Vec<_>) = writes.into_iter().unzip();
    let mut patches = Vec::with_capacity(offsets.len());
    for (offset, data) in offsets.into_iter().zip(join_all(reads).await) {
        patches.push(WriteExtent { offset, data: data.map_err(Failure::Log)? });
    }
    count(shared, patches.iter().map(|patch| patch.data.len() as u64).sum());
    let one = |WriteExtent { offset, data }| shared.inner.submit(BlockRequest::Write { offset, data, fua });
    if patches.len() < 2 {
        let Some(patch) = patches.pop() else { return Ok(()) };
        return within(one(patch).await.map(drop));
    }
    match shared.inner.write_many(patches.clone(), fua).await {
        // Individual writes may still be within the volume.
        Err(error) if error.kind() == ErrorKind::OutOfRange => {
            for patch in patches {
                within(one(patch).await.map(drop))?;
            }
            Ok(())
        }
        result => result.map_err(Failure::Backend),
    }
}

/// Counts a request to the backend.
fn count(shared: &Rc<LogShared>, bytes: u64) {
    shared.state.borrow_mut().counters.written_back(bytes);
}

/// Ignores `OutOfRange`: the volume may have shrunk, and data past its end is dropped.
fn within(result: Result<()>) -> std::result::Result<(), Failure> {
    match result {
        Err(error) if error.kind() == ErrorKind::OutOfRange => Ok(()),
        result => result.map_err(Failure::Backend),
    }
}

/// Waits for the writes of a batch and makes them durable; returns the number of bypassed writes covered by the
/// flush.
async fn finish(
    shared: &Rc<LogShared>,
    tasks: Vec<JoinHandle<std::result::Result<(), Failure>>>,
    durable: bool,
) -> std::result::Result<u64, Failure> {
    let mut failed = None;
    for task in tasks {
        if let Err(error) = task.await {
            failed = Some(error);
        }
    }
    match failed {
        Some(error) => return Err(error),
        None if durable => return Ok(0),
        None => {}
    }
    let acknowledged = shared.state.borrow().bypassed.acknowledged();
    shared.inner.submit(BlockRequest::Flush).await.map_err(Failure::Backend)?;
    Ok(acknowledged)
}

fn retire(shared: &Rc<LogShared>, end: u64) {
    let mut gone = Vec::new();
    shared.state.borrow_mut().retire(end, &mut gone);
    shared.medium.retire(end, &gone);
}

/// Records a write-back error; fails queued writes that wait for space which a full backend cannot free.
fn note_error(shared: &Rc<LogShared>, error: Error) {
    let mut pending_writes = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        state.counters.backend_error();
        if throttle::fails_queued(shared, &error) {
            for piece in state.queue.drop_queued() {
                piece.pending.unlock();
                pending_writes.push(piece.pending);
            }
        }
        state.life.set_backend_error(Some(error.clone()));
    }
    pending_writes.iter().for_each(|pending| pending.fail(&error));
    shared.settled.notify_all();
}

/// Fails the log: its contents cannot be written back.
pub(crate) fn fail(shared: &Rc<LogShared>, error: Error) {
    if shared.state.borrow().life.is_over() {
        // An append and a batch in flight may both learn that this client was fenced.
        return;
    }
    tracing::error!(%error, "write log failed: its contents are not at the backend; requests of the volume fail");
    let mut pending_writes = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        state.life.fail(error.clone());
        pending_writes.extend(state.queue.abort().map(|piece| piece.pending));
    }
    pending_writes.iter().for_each(|pending| pending.unlock());
    pending_writes.iter().for_each(|pending| pending.fail(&error));
    shared.settled.notify_all();
    shared.append.notify_all();
    shared.room.notify_all();
}

/// Completes disabling the log once it is drained: requests bypass it from then on. Returns true if write-back is to
/// end.
async fn finish_disabling(shared: &Rc<LogShared>) -> bool {
    let reason = match shared.state.borrow().life.mode() {
        Mode::TurningOff(reason) => reason.clone(),
        _ => return false,
    };
    {
        let state = shared.state.borrow();
        if state.dirty.tail() < state.there(shared) {
            return false;
        }
    }
    let mut backoff = BACKOFF.0;
    loop {
        // Recorded first: whatever happens to the medium now, nothing on it may be replayed over later writes.
        let released = match shared.inner.submit(BlockRequest::Flush).await {
            Ok(_) => shared.owner.release().await,
            Err(error) => Err(error),
        };
        match released {
            Ok(()) => break,
            Err(error) if is_final(error.kind()) => {
                fail(shared, error);
                return true;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot disable the write log yet: retrying");
                shared.state.borrow_mut().life.set_backend_error(Some(error));
                // A closed log stays named by the record, and is written back when it is opened again.
                let _ = timeout(backoff, closed(shared)).await;
                if shared.state.borrow().life.is_closing() {
                    return true;
                }
                backoff = (backoff * 2).min(BACKOFF.1);
            }
        }
    }
    {
        let mut state = shared.state.borrow_mut();
        state.life.set_released();
        if !state.dirty.is_empty() {
            return false;
        }
    }
    shared.settled.notify_all();
    // Changes with a locked range, comparisons included, end before others are admitted. A consistency point that was
    // chosen meanwhile ends before, too: later requests would pass it.
    let over = || {
        let state = shared.state.borrow();
        shared.ranges.is_free() && (!state.points.is_held() || state.life.is_closing())
    };
    shared.settled.wait_until(over).await;
    {
        let mut state = shared.state.borrow_mut();
        tracing::warn!(%reason, "write log disabled: all its contents are at the backend");
        state.life.set_off(reason);
    }
    shared.settled.notify_all();
    true
}
