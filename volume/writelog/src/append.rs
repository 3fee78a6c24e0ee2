//! Append path: queued pieces go to the medium in groups, which are published in order once they are durable.

use std::rc::Rc;
use std::task::Poll;

use forebay_block::{BlockReply, BlockRequest, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::spawn;

use crate::log::{LogShared, closed};
use crate::pending_write::PendingWrite;
use crate::queue::{Appending, Started};
use crate::state::LogState;
use crate::{throttle, writeback};

/// Appends until the log is closed.
pub(crate) async fn run(shared: Rc<LogShared>) {
    loop {
        let ready = || {
            let state = shared.state.borrow();
            let waits = !state.queue.is_empty() && state.queue.groups() < shared.options.groups;
            state.life.is_closing() && state.queue.is_empty() || waits && state.life.is_on()
        };
        shared.append.wait_until(ready).await;
        if shared.state.borrow().queue.is_empty() {
            return;
        }
        if !step(&shared) {
            // Log full: no piece fits until entries are retired.
            shared.throttle.set_starved(true);
            let room = shared.room.wait();
            shared.write_back.notify_all();
            shared.settled.notify_all();
            room.await;
            if shared.state.borrow().life.is_closing() {
                return;
            }
        }
        shared.throttle.set_starved(false);
    }
}

/// Starts one group; returns false if the medium has no space for it.
fn step(shared: &Rc<LogShared>) -> bool {
    let mut state = shared.state.borrow_mut();
    let started = state.queue.start_group(&*shared.medium, !shared.is_write_back_ack());
    let Some(Started { number, work }) = started else { return false };
    state.counters.group();
    drop(state);
    // A throttled write may wait for the queue to shrink.
    shared.room.notify_all();
    let Some(work) = work else {
        publish(shared);
        return true;
    };
    let shared = shared.clone();
    drop(spawn(async move {
        let result = work.await;
        shared.state.borrow_mut().queue.group_done(number, result);
        publish(&shared);
        shared.append.notify_all();
    }));
    true
}

/// Publishes completed groups, in order.
fn publish(shared: &Rc<LogShared>) {
    loop {
        let done = shared.state.borrow_mut().queue.take_done();
        match done {
            Ok(Some(group)) => publish_group(shared, group),
            Ok(None) => return,
            Err(error) => return disable_failed(shared, error),
        }
    }
}

fn publish_group(shared: &Rc<LogShared>, group: Appending) {
    let write_back_ack = shared.is_write_back_ack();
    let keep = shared.kind == crate::MediumKind::Ssd;
    let mut dead = Vec::new();
    let mut finished = Vec::new();
    let mut state = shared.state.borrow_mut();
    let was_empty = state.dirty.is_empty();
    shared.medium.finished(group.number);
    for (seq, placed) in (group.first_seq..).zip(group.pieces) {
        state.counters.appended(placed.piece.extent.len);
        if write_back_ack {
            state.dirty.set_place(seq, placed.place, placed.crc);
        } else {
            let pushed = state.push(placed.entry(), placed.piece.generation, Some(&mut dead));
            debug_assert_eq!(pushed, seq);
            if keep && placed.piece.kind.has_payload() {
                state.dirty.cache_payload(seq, placed.piece.payload);
            }
        }
        if placed.piece.pending.piece_done() {
            if !write_back_ack {
                placed.piece.pending.unlock();
            }
            finished.push(placed.piece.pending);
        }
    }
    let before = state.queue.appended_seq();
    state.dirty.evict_payloads(shared.options.recent_bytes, before);
    drop(state);
    dead.iter().for_each(|entry| shared.medium.superseded(entry));
    for pending in finished {
        match shared.owner.permit_acknowledgement() {
            None => drop(pending.answer(Ok(BlockReply::Done))),
            Some(permitted) => drop(spawn(acknowledge(shared.clone(), pending, permitted))),
        }
    }
    shared.settled.notify_all();
    // Not signaled on every write: write-back wakes by itself when the entries reach their age.
    if was_empty || write_back_ack || throttle::is_eager(shared) || shared.state.borrow().points.drain_target() > 0 {
        shared.write_back.notify_all();
    }
}

/// Acknowledges a write that is in the log, once that is permitted.  A log that ends acknowledges nothing more.
async fn acknowledge(shared: Rc<LogShared>, pending: Rc<PendingWrite>, permitted: LocalFuture<Result<()>>) {
    let permitted = permit(&shared, permitted).await;
    pending.answer(permitted.map(|()| BlockReply::Done));
}

/// Waits for a permission, until the log ends.
pub(crate) async fn permit(shared: &LogShared, permitted: LocalFuture<Result<()>>) -> Result<()> {
    let ending = shared.settled.wait_until(|| shared.state.borrow().life.is_ending());
    until(permitted, ending).await.unwrap_or_else(|| Err(closed()))
}

/// Disables the log because its medium has failed.
pub(crate) fn disable_failed(shared: &Rc<LogShared>, error: Error) {
    if error.kind() == ErrorKind::Fenced {
        // Another primary serves the log, and writes it back.
        return writeback::fail(shared, error);
    }
    if shared.state.borrow().life.is_on() {
        tracing::error!(
            %error,
            "cannot use the medium of the write log: disabling the log, writing its contents back; replace the medium"
        );
        disable(shared, error);
    }
}

/// Disables the log once it is unusable, unless it is closed before.
pub(crate) async fn disable_when(shared: Rc<LogShared>, unusable: LocalFuture<Error>) {
    let is_closing = || shared.state.borrow().life.is_closing();
    let Some(reason) = until(unusable, shared.settled.wait_until(is_closing)).await else { return };
    shared.settled.wait_until(|| shared.state.borrow().life.has_decided()).await;
    disable(&shared, reason);
}

/// Returns the outcome of a future; `None` if the other one has ended first.
async fn until<T>(mut future: LocalFuture<T>, ends: impl Future<Output = ()>) -> Option<T> {
    let mut ends = std::pin::pin!(ends);
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Pending => ends.as_mut().poll(cx).map(|()| None),
        Poll::Ready(done) => Poll::Ready(Some(done)),
    })
    .await
}

/// Disables the log: no more appends; its contents are written back, and requests then bypass it. Requests whose
/// append was in flight are resubmitted from their callers' buffers.
pub(crate) fn disable(shared: &Rc<LogShared>, reason: Error) {
    let mut pending_writes = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        if !state.life.begin_disable(reason) {
            return;
        }
        for piece in state.queue.abort() {
            if pending_writes.last().is_none_or(|last| !Rc::ptr_eq(last, &piece.pending)) {
                pending_writes.push(piece.pending);
            }
        }
    }
    shared.write_back.notify_all();
    shared.append.notify_all();
    shared.room.notify_all();
    shared.settled.notify_all();
    if shared.is_write_back_ack() {
        // Early-acknowledged writes are in memory, and are written back from there.
        return;
    }
    for pending in pending_writes {
        drop(spawn(again(shared.clone(), pending.request.clone(), pending)));
    }
}

/// Resubmits a request to the backend, once the log is bypassed.
async fn again(shared: Rc<LogShared>, request: BlockRequest, pending: Rc<PendingWrite>) {
    // Submitted before any other request: its range is still locked, and a comparison may have preceded it.
    // Not while a consistency point is held, which it would pass.
    let released = |state: &LogState| state.life.is_released() && state.dirty.is_empty() && !state.points.is_held();
    let over = || {
        let state = shared.state.borrow();
        released(&state) || state.life.is_closing() || state.life.failure().is_some()
    };
    shared.settled.wait_until(over).await;
    let failed = {
        let state = shared.state.borrow();
        match state.life.failure() {
            Some(error) => Some(error.clone()),
            None if !released(&state) => Some(closed()),
            None => None,
        }
    };
    let result: Result<BlockReply> = match failed {
        Some(error) => Err(error),
        None => shared.inner.submit(request).await,
    };
    pending.unlock();
    pending.answer(result);
}
