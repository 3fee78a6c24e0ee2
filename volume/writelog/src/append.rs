//! Append path: queued pieces go to the medium in groups, which are published in order once they are durable.

use std::rc::Rc;

use forebay_block::{Error, Reply, Request, Result};
use forebay_reactor::spawn;

use crate::log::{Shared, closed};
use crate::media::Group;
use crate::state::{Appending, Mode, State};
use crate::throttle;

/// Appends until the log is closed.
pub(crate) async fn run(shared: Rc<Shared>) {
    loop {
        let ready = || {
            let state = shared.state.borrow();
            let waits = !state.queue.is_empty() && state.appending.len() < shared.options.groups;
            state.closing && state.queue.is_empty() || waits && state.mode.is_on()
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
            if shared.state.borrow().closing {
                return;
            }
        }
        shared.throttle.set_starved(false);
    }
}

/// Starts one group; returns false if the medium has no space for it.
fn step(shared: &Rc<Shared>) -> bool {
    let mut state = shared.state.borrow_mut();
    let first = state.next_seq;
    let Some(group) = shared.medium.take(&mut state.queue, first, !shared.is_early()) else { return false };
    let Group { first_seq, number, pieces, work } = group;
    state.next_seq = first_seq + pieces.len() as u64;
    state.queue_bytes -= pieces.iter().map(|placed| placed.piece.payload.len() as u64).sum::<u64>();
    state.stats.groups += 1;
    let done = work.is_none().then_some(Ok(()));
    state.appending.push_back(Appending { number, first_seq, pieces, done });
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
        if let Some(group) = shared.state.borrow_mut().appending.iter_mut().find(|group| group.number == number) {
            group.done = Some(result);
        }
        publish(&shared);
        shared.append.notify_all();
    }));
    true
}

/// Publishes completed groups, in order.
fn publish(shared: &Rc<Shared>) {
    loop {
        let group = {
            let mut state = shared.state.borrow_mut();
            match state.appending.front().map(|group| &group.done) {
                Some(Some(Ok(()))) => state.appending.pop_front(),
                Some(Some(Err(error))) => {
                    let error = error.clone();
                    drop(state);
                    turn_off(shared, error);
                    return;
                }
                _ => None,
            }
        };
        let Some(group) = group else { return };
        publish_group(shared, group);
    }
}

fn publish_group(shared: &Rc<Shared>, group: Appending) {
    let early = shared.is_early();
    let keep = shared.kind == crate::MediumKind::Ssd;
    let mut dead = Vec::new();
    let mut finished = Vec::new();
    let mut state = shared.state.borrow_mut();
    let was_empty = state.entries.len() == 0;
    shared.medium.finished(group.number);
    for (seq, placed) in (group.first_seq..).zip(group.pieces) {
        state.stats.appended += 1;
        state.stats.appended_bytes += placed.piece.extent.len;
        if early {
            if let Some(entry) = state.entries.get_mut(seq) {
                (entry.place, entry.crc) = (placed.place, placed.crc);
            }
        } else {
            let pushed = state.push(placed.entry(), placed.piece.generation, Some(&mut dead));
            debug_assert_eq!(pushed, seq);
            if keep && placed.piece.kind.has_payload() {
                state.recent.insert(seq, placed.piece.payload);
            }
        }
        if placed.piece.ticket.piece_done() {
            if !early {
                placed.piece.ticket.unlock();
            }
            finished.push(placed.piece.ticket);
        }
        state.appended_seq = seq + 1;
    }
    let before = state.appended_seq;
    state.recent.shrink(shared.options.recent_bytes, before);
    drop(state);
    dead.iter().for_each(|entry| shared.medium.hidden(entry));
    for ticket in finished {
        ticket.answer(Ok(Reply::Done));
    }
    shared.settled.notify_all();
    // Not signaled on every write: write-back wakes by itself when the entries reach their age.
    if was_empty || early || throttle::is_eager(shared) || shared.state.borrow().wanted > 0 {
        shared.write_back.notify_all();
    }
}

/// Disables the log because its medium has failed.
pub(crate) fn turn_off(shared: &Rc<Shared>, error: Error) {
    if shared.state.borrow().mode.is_on() {
        tracing::error!(%error, "the write log turns itself off");
        disable(shared, error);
    }
}

/// Disables the log: no more appends; its contents are written back, and requests then bypass it. Requests whose
/// append was in flight are resubmitted from their callers' buffers.
pub(crate) fn disable(shared: &Rc<Shared>, reason: Error) {
    let mut tickets = Vec::new();
    {
        let mut state = shared.state.borrow_mut();
        if !state.mode.is_on() {
            return;
        }
        state.mode = Mode::TurningOff(reason);
        let appending = std::mem::take(&mut state.appending);
        let queue = state.drop_queue();
        let pieces = appending.into_iter().flat_map(|group| group.pieces).map(|placed| placed.piece);
        for piece in pieces.chain(queue) {
            if tickets.last().is_none_or(|last| !Rc::ptr_eq(last, &piece.ticket)) {
                tickets.push(piece.ticket);
            }
        }
    }
    shared.write_back.notify_all();
    shared.append.notify_all();
    shared.room.notify_all();
    shared.settled.notify_all();
    if shared.is_early() {
        // Early-acknowledged writes are in memory, and are written back from there.
        return;
    }
    for ticket in tickets {
        drop(spawn(again(shared.clone(), ticket.request.clone(), ticket)));
    }
}

/// Resubmits a request to the backend, once the log is bypassed.
async fn again(shared: Rc<Shared>, request: Request, ticket: Rc<crate::ticket::Ticket>) {
    // Submitted before any other request: its range is still locked, and a comparison may have preceded it.
    let released = |state: &State| state.released && state.entries.len() == 0;
    let over = || {
        let state = shared.state.borrow();
        released(&state) || state.closing || matches!(state.mode, Mode::Failed(_))
    };
    shared.settled.wait_until(over).await;
    let failed = {
        let state = shared.state.borrow();
        match &state.mode {
            Mode::Failed(error) => Some(error.clone()),
            _ if !released(&state) => Some(closed()),
            _ => None,
        }
    };
    let result: Result<Reply> = match failed {
        Some(error) => Err(error),
        None => shared.inner.submit(request).await,
    };
    ticket.unlock();
    ticket.answer(result);
}
