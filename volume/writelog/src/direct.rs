//! Log bypass of long sequential writes.

use std::rc::Rc;

use forebay_block::{Extent, Request};
use forebay_reactor::spawn;

use crate::append::turn_off;
use crate::log::{Answer, Shared, log};
use crate::range_lock::RangeGuard;
use crate::state::State;
use crate::writeback;

/// Returns whether a long sequential write may bypass the log without visible effect: the log holds no older
/// generation and no overlapping entry, and no recovery would replay anything over it. If only the last condition is
/// unmet, starts persisting the tail, so that the next such write may bypass.
pub(crate) fn goes_round(shared: &Rc<Shared>, request: &Request, extent: Extent) -> bool {
    let mut state = shared.state.borrow_mut();
    let long = shared.options.direct_min.is_some_and(|least| extent.len >= u64::from(least));
    let sequential = matches!(request, Request::Write { .. }) && long && state.last_end == extent.offset;
    if !sequential || !state.may_go_round(extent) {
        return false;
    }
    let replayed = shared.medium.persisted_tail() < state.entries.tail();
    if replayed && !std::mem::replace(&mut state.persisting_tail, true) {
        let shared = shared.clone();
        drop(spawn(async move {
            if let Err(error) = writeback::persist_tail_twice(&shared).await {
                turn_off(&shared, error);
            }
            shared.state.borrow_mut().persisting_tail = false;
        }));
    }
    !replayed
}

impl State {
    /// Returns whether the contents of the log permit a write to bypass it.
    fn may_go_round(&self, extent: Extent) -> bool {
        let current = self.generations.front().is_none_or(|&(oldest, _)| oldest == self.generation);
        let queued = self.queue.front().is_none_or(|piece| piece.generation == self.generation)
            && self.appending.iter().flat_map(|group| &group.pieces).all(|p| p.piece.generation == self.generation);
        self.mode.is_on() && self.holds.is_empty() && current && queued && !self.index.touches(extent)
    }
}

/// Writes to the backend, bypassing the log.
pub(crate) async fn write(shared: Rc<Shared>, request: Request, range: RangeGuard, answer: Answer) {
    let extent = range.extent();
    {
        let mut state = shared.state.borrow_mut();
        state.generation_used = true;
        state.last_end = extent.end();
        state.stats.direct += 1;
        state.stats.direct_bytes += extent.len;
        state.stale(extent);
    }
    let mut sent = request.clone();
    // An acknowledged write is durable either way.
    let lasts = !shared.is_early();
    if let Request::Write { fua, .. } = &mut sent {
        *fua |= lasts;
    }
    let result = shared.inner.submit(sent).await;
    let mut state = shared.state.borrow_mut();
    state.direct_active -= 1;
    state.direct_done += u64::from(!lasts);
    state.stale(extent);
    if result.is_err() && state.mode.is_on() {
        // Fall back to the log, which can wait for the backend to recover.
        drop(state);
        log(&shared, request, range, answer);
        return;
    }
    drop(state);
    drop(range);
    answer.send(result);
}
