//! Writing back: what the log holds goes to the backend, one barrier generation after the other.
//!
//! A batch is a row of the oldest entries, all of one generation.  Its writes do not overlap and go out in parallel;
//! when the backend has them durably the tail moves past the batch.  The tail must last before the batch after the next
//! one begins: a recovery then replays at most one generation that the backend already has, over a part of the next,
//! which leaves all of the former and a part of the latter - what a crash of the host could have left, too.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, LocalFuture, Request, Result};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{JoinHandle, now, sleep, spawn, timeout};

use crate::append::turn_off;
use crate::flush;
use crate::log::Shared;
use crate::plan::{Action, Run, plan};
use crate::read::content;
use crate::state::{Mode, State};

/// Payload bytes of one batch at most, about.
const BATCH_BYTES: u64 = 4 << 20;
/// Batches of so few writes ask for each one to be durable by itself instead of flushing.
const FUA_MAX: usize = 4;
/// From this fill on writing back does not wait for the entries to grow old.
pub(crate) const EAGER_FILL: f64 = 0.125;
/// Waits between attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(5));

/// One batch.
struct Batch {
    /// One past its last entry.
    end: u64,
    runs: Vec<(Request, Option<LocalFuture<Result<BufList>>>)>,
    /// Bytes of the volume that its entries are about, overwritten ones included.
    bytes: u64,
    durable: bool,
}

/// Writes back until the log is closed.
pub(crate) async fn run(shared: Rc<Shared>) {
    let mut persisting: Option<JoinHandle<Result<()>>> = None;
    let mut backoff = BACKOFF.0;
    loop {
        if !wait_for_work(&shared).await {
            return;
        }
        if finish_turning_off(&shared).await {
            return;
        }
        // What is at the backend must last in the log too: or a recovery that finds less of the log than there was
        // would replay what is older over it.
        if shared.is_early()
            && shared.state.borrow().mode.is_on()
            && let Err(error) = flush::sync(&shared).await
        {
            turn_off(&shared, error);
            continue;
        }
        let Some(batch) = next_batch(&shared) else { continue };
        let (end, bytes, started) = (batch.end, batch.bytes, now());
        match write(&shared, batch).await {
            Ok(direct_done) => {
                backoff = BACKOFF.0;
                let mut state = shared.state.borrow_mut();
                state.backend_error = None;
                state.direct_flushed = state.direct_flushed.max(direct_done);
                state.pressure.measured(bytes, started.elapsed());
            }
            Err(Failure::Log(error)) => {
                fail(&shared, error);
                return;
            }
            Err(Failure::Backend(error)) => {
                if is_final(error.kind()) {
                    fail(&shared, error);
                    return;
                }
                tracing::warn!(%error, "writing back failed and is tried again");
                note_error(&shared, error);
                // A closed log does not wait for its backend.
                let _ = timeout(backoff, closed(&shared)).await;
                backoff = (backoff * 2).min(BACKOFF.1);
                continue;
            }
        }
        if let Some(before) = persisting.take()
            && let Err(error) = before.await
        {
            turn_off(&shared, error);
        }
        retire(&shared, end);
        let persist = shared.medium.persist_tail(false);
        persisting = Some(spawn(persist));
        // Whoever waits for room, or for the log to be empty, waits for the tail too.
        let waited_for = {
            let state = shared.state.borrow();
            state.starved || state.entries.len() == 0 || state.wanted >= end
        };
        if waited_for
            && let Some(persist) = persisting.take()
            && let Err(error) = persist.await
        {
            turn_off(&shared, error);
        }
        shared.settled.notify_all();
    }
}

async fn closed(shared: &Rc<Shared>) {
    shared.write_back.wait_until(|| shared.state.borrow().closing).await;
}

/// No later attempt will succeed.
fn is_final(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::ReadOnly | ErrorKind::Fenced | ErrorKind::ShuttingDown)
}

impl State {
    /// There is something that may be written back, and a reason to do it now; otherwise how long to wait for one.
    fn due(&self, shared: &Shared, fill: f64) -> std::result::Result<(), Option<Duration>> {
        let tail = self.entries.tail();
        // Entries that do not last yet are made to before they are written back.
        let limit = match self.mode.is_on() {
            true => self.hold().map_or(self.appended_seq, |hold| hold.min(self.appended_seq)),
            false => self.limit(shared),
        };
        if tail >= limit {
            // What a cut holds back is waited for, or the log would be given up with it.
            let ends = matches!(self.mode, Mode::TurningOff(_)) && tail >= self.there(shared);
            return if ends { Ok(()) } else { Err(None) };
        }
        let age = self.age();
        let linger = shared.limits.get().age_max / 2;
        let asked = self.wanted > tail || self.starved || self.detour.is_hasty();
        if asked || !self.mode.is_on() || fill >= EAGER_FILL || age >= linger {
            return Ok(());
        }
        Err(Some(linger - age))
    }

    /// Nothing from this entry on may be written back now.
    fn limit(&self, shared: &Shared) -> u64 {
        let there = self.there(shared);
        self.hold().map_or(there, |hold| hold.min(there))
    }

    /// The same, but for cuts.
    fn there(&self, shared: &Shared) -> u64 {
        match self.mode.is_on() {
            true if shared.is_early() => self.synced_seq,
            true => self.appended_seq,
            // What the medium may have lost goes to the backend only when nothing of the log can be replayed over it.
            false if shared.is_early() && !self.released => self.synced_seq.max(self.entries.tail()),
            false => self.entries.head(),
        }
    }
}

/// Waits until there is something to do; false when the log is closed.
async fn wait_for_work(shared: &Rc<Shared>) -> bool {
    loop {
        let next = shared.write_back.wait();
        let (closing, due) = {
            let fill = shared.fill();
            let state = shared.state.borrow();
            (state.closing, state.due(shared, fill))
        };
        if closing {
            return false;
        }
        match due {
            Ok(()) => return true,
            Err(None) => next.await,
            // Not at every write: a log that fills up is looked at when it has, or when its entries are old.
            Err(Some(wait)) => drop(timeout(wait, next).await),
        }
    }
}

/// The oldest entries of one generation, and what is to be done for them.
fn next_batch(shared: &Rc<Shared>) -> Option<Batch> {
    let size = shared.inner.geometry().size;
    let state = shared.state.borrow();
    let (tail, limit) = (state.entries.tail(), state.limit(shared));
    // A generation ends where the next begins.
    let generation_end = state.generations.get(1).map_or(u64::MAX, |&(_, first)| first);
    let last = limit.min(generation_end).min(tail + shared.options.batch_entries as u64);
    let (mut end, mut payload, mut bytes) = (tail, 0, 0);
    while end < last && payload < BATCH_BYTES {
        let entry = state.entries.get(end)?;
        bytes += entry.extent().len;
        payload += if entry.is_dead() { 0 } else { u64::from(entry.payload_len()) };
        end += 1;
    }
    if end == tail {
        return None;
    }
    let numbered = (tail..end).filter_map(|seq| state.entries.get(seq).map(|entry| (seq, entry)));
    let live: Vec<_> = numbered.filter(|(_, entry)| !entry.is_dead()).collect();
    let runs = plan(live.into_iter(), size);
    let durable = runs.len() <= FUA_MAX && runs.iter().all(|run| run.action != Action::Discard);
    let runs = runs.into_iter().map(|run| request(shared, &state, run, durable)).collect();
    Some(Batch { end, runs, bytes, durable })
}

/// The request for a run; a write's data comes later.
fn request(shared: &Rc<Shared>, state: &State, run: Run, fua: bool) -> (Request, Option<LocalFuture<Result<BufList>>>) {
    let Run { action, extent, parts } = run;
    match action {
        Action::Discard => (Request::Discard(extent), None),
        Action::Zeroes => (Request::WriteZeroes { extent, no_unmap: false, fua }, None),
        Action::ZeroesKeep => (Request::WriteZeroes { extent, no_unmap: true, fua }, None),
        Action::Write => {
            // Begun here, so that what it reads stays where it is.
            let reads: Vec<_> = parts
                .iter()
                .filter_map(|&(seq, part)| Some(content(shared, state, seq, state.entries.get(seq)?, part)))
                .collect();
            let data = async move {
                let mut data = BufList::new();
                for read in reads {
                    data.append(read.await?);
                }
                Ok(data)
            };
            (Request::Write { offset: extent.offset, data: BufList::new(), fua }, Some(Box::pin(data)))
        }
    }
}

enum Failure {
    /// The log cannot be read.
    Log(Error),
    /// The backend refuses.
    Backend(Error),
}

/// Does a batch; how many of the writes that went round the log are durable with it.
async fn write(shared: &Rc<Shared>, batch: Batch) -> std::result::Result<u64, Failure> {
    let slots = Semaphore::new(shared.options.parallel);
    let mut tasks = Vec::with_capacity(batch.runs.len());
    let durable = batch.durable;
    let mut failed = None;
    for (request, data) in batch.runs {
        let permit = slots.acquire(1).await;
        let shared = shared.clone();
        tasks.push(spawn(async move {
            let _permit = permit;
            let request = match (request, data) {
                (Request::Write { offset, fua, .. }, Some(data)) => {
                    Request::Write { offset, data: data.await.map_err(Failure::Log)?, fua }
                }
                (request, _) => request,
            };
            let len = request.extent().map_or(0, |extent| extent.len);
            {
                let mut state = shared.state.borrow_mut();
                state.stats.written_back += 1;
                state.stats.written_back_bytes += len;
            }
            let started = now();
            let done = shared.inner.submit(request).await;
            shared.state.borrow_mut().detour.backend_took(started.elapsed());
            match done {
                // The volume has become shorter; what is past its end is gone.
                Err(error) if error.kind() == ErrorKind::OutOfRange => Ok(()),
                result => result.map(drop).map_err(Failure::Backend),
            }
        }));
    }
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
    let direct_done = shared.state.borrow().direct_done;
    shared.inner.submit(Request::Flush).await.map_err(Failure::Backend)?;
    Ok(direct_done)
}

fn retire(shared: &Rc<Shared>, end: u64) {
    let mut gone = Vec::new();
    shared.state.borrow_mut().retire(end, &mut gone);
    shared.medium.retire(end, &gone);
}

/// Writing back did not work; who waits for room that will not come is told.
fn note_error(shared: &Rc<Shared>, error: Error) {
    let mut tickets = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        state.stats.backend_errors += 1;
        if state.starved && !shared.is_early() && error.kind() == ErrorKind::NoSpace {
            for piece in std::mem::take(&mut state.queue) {
                state.leave(piece.ticket.extent);
                tickets.push(piece.ticket);
            }
            state.queue_bytes = 0;
        }
        state.backend_error = Some(error.clone());
    }
    tickets.iter().for_each(|ticket| ticket.fail(&error));
    shared.settled.notify_all();
}

/// What is in the log cannot be written back.
fn fail(shared: &Rc<Shared>, error: Error) {
    tracing::error!(%error, "the write log has failed; what it holds is not at the backend");
    let mut tickets = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        state.mode = Mode::Failed(error.clone());
        let appending = std::mem::take(&mut state.appending);
        let queue = std::mem::take(&mut state.queue);
        let pieces = appending.into_iter().flat_map(|group| group.pieces).map(|placed| placed.piece);
        tickets.extend(pieces.chain(queue).map(|piece| piece.ticket));
        tickets.iter().for_each(|ticket| state.leave(ticket.extent));
    }
    tickets.iter().for_each(|ticket| ticket.fail(&error));
    shared.settled.notify_all();
    shared.append.notify_all();
    shared.room.notify_all();
}

/// When the log is turning off and empty: lets requests go round it.  True when that is done.
async fn finish_turning_off(shared: &Rc<Shared>) -> bool {
    let reason = match &shared.state.borrow().mode {
        Mode::TurningOff(reason) => reason.clone(),
        _ => return false,
    };
    {
        let state = shared.state.borrow();
        if state.entries.tail() < state.there(shared) {
            return false;
        }
    }
    let mut backoff = BACKOFF.0;
    loop {
        // Whatever happens to the medium now, nothing on it may be replayed over what comes next.
        let released = match shared.inner.submit(Request::Flush).await {
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
                tracing::warn!(%error, "the write log cannot be turned off yet");
                shared.state.borrow_mut().backend_error = Some(error);
                sleep(backoff).await;
                backoff = (backoff * 2).min(BACKOFF.1);
            }
        }
    }
    {
        let mut state = shared.state.borrow_mut();
        state.released = true;
        if state.entries.len() > 0 {
            return false;
        }
    }
    shared.settled.notify_all();
    // What had its run to itself, a comparison too, ends before others come in.
    shared.settled.wait_until(|| shared.state.borrow().in_flight.is_empty()).await;
    {
        let mut state = shared.state.borrow_mut();
        tracing::warn!(%reason, "the write log is off; nothing was lost");
        state.mode = Mode::Off(reason);
        state.backend_error = None;
    }
    shared.settled.notify_all();
    true
}
