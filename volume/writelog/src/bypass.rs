//! Log bypass of long sequential writes.

use std::rc::Rc;

use forebay_block::{BlockRequest, Extent, WriteRange};
use forebay_reactor::spawn;

use crate::append::disable_failed;
use crate::log::{ChangeCompletion, LogShared, log};
use crate::state::LogState;
use crate::writeback;

/// Writes that bypass the log, and whether they are durable at the backend.
///
/// Invariants:
/// - B1 `flushed <= acknowledged`; all of them are durable if both are equal and no change is in flight past the log.
/// - B2 `active` counts a bypassing write from its decision to its end, so that a consistency point misses none.
#[derive(Debug)]
pub(crate) struct BypassedWrites {
    /// Number of bypassed writes acknowledged before they were durable.
    acknowledged: u64,
    /// Number of these covered by a flush of the backend.
    flushed: u64,
    /// Number of bypassing writes in flight.
    active: usize,
    /// Set while the tail is being persisted so that writes may bypass the log.
    persisting_tail: bool,
    /// Number of [`ChangesPast`](crate::ChangesPast) guards.
    past_active: usize,
    /// End of the last write: a long write that begins there is sequential.
    last_end: u64,
}

impl BypassedWrites {
    pub(crate) fn new() -> Self {
        // Writes of a killed process may be readable at the backend, but not durable: the first flush goes there.
        Self { acknowledged: 1, flushed: 0, active: 0, persisting_tail: false, past_active: 0, last_end: u64::MAX }
    }

    /// Returns whether a write begins at the end of the last one.
    fn is_sequential(&self, extent: Extent) -> bool {
        self.last_end == extent.offset
    }

    /// Records the range of a write, whether it bypasses the log or not.
    pub(crate) fn wrote(&mut self, extent: Extent) {
        self.last_end = extent.end();
    }

    /// Counts a write that is about to bypass the log.
    pub(crate) fn begin(&mut self) {
        self.active += 1;
    }

    /// Counts a bypassing write as ended, durable or not.
    fn end(&mut self, durable: bool) {
        debug_assert!(self.active > 0, "B2");
        self.active -= 1;
        self.acknowledged += u64::from(!durable);
    }

    /// Returns whether no bypassing write is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.active == 0
    }

    /// Counts a guard of changes in flight past the log.
    pub(crate) fn begin_past(&mut self) {
        self.past_active += 1;
    }

    /// Counts a guard of changes in flight past the log as dropped.
    pub(crate) fn end_past(&mut self) {
        self.past_active -= 1;
        // Changes acknowledged most recently may not be durable.
        self.acknowledged += 1;
    }

    /// Returns the number of bypassed writes that the next flush of the backend makes durable.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Records a flush of the backend that began after `acknowledged` writes.
    pub(crate) fn flushed(&mut self, acknowledged: u64) {
        self.flushed = self.flushed.max(acknowledged);
        debug_assert!(self.flushed <= self.acknowledged, "B1");
    }

    /// Returns whether all acknowledged writes that bypassed the log are durable.
    pub(crate) fn is_durable(&self) -> bool {
        self.past_active == 0 && self.acknowledged == self.flushed
    }

    /// Begins to persist the tail; returns false if that is in progress.
    fn begin_persist(&mut self) -> bool {
        !std::mem::replace(&mut self.persisting_tail, true)
    }

    /// Ends persisting the tail.
    fn end_persist(&mut self) {
        self.persisting_tail = false;
    }
}

/// Returns whether a long sequential write may bypass the log without visible effect: the log holds no older
/// generation and no overlapping entry, and no recovery would replay anything over it. If only the last condition is
/// unmet, starts persisting the tail, so that the next such write may bypass.
pub(crate) fn may_bypass(shared: &Rc<LogShared>, request: &BlockRequest, extent: Extent) -> bool {
    let mut state = shared.state.borrow_mut();
    let long = shared.options.direct_min.is_some_and(|least| extent.len >= u64::from(least));
    let sequential = matches!(request, BlockRequest::Write { .. }) && long && state.bypassed.is_sequential(extent);
    if !sequential || !state.permits_bypass(extent) {
        return false;
    }
    let replayed = shared.medium.persisted_tail() < state.dirty.tail();
    if replayed && state.bypassed.begin_persist() {
        let shared = shared.clone();
        drop(spawn(async move {
            if let Err(error) = writeback::persist_tail_twice(&shared).await {
                disable_failed(&shared, error);
            }
            shared.state.borrow_mut().bypassed.end_persist();
        }));
    }
    !replayed
}

impl LogState {
    /// Returns whether the contents of the log permit a write to bypass it.
    fn permits_bypass(&self, extent: Extent) -> bool {
        let current = self.dirty.oldest_generation().is_none_or(|oldest| oldest == self.queue.generation());
        let free = self.life.is_on() && !self.points.is_held();
        free && current && self.queue.has_only_current() && !self.dirty.touches(extent)
    }
}

/// Writes to the backend, bypassing the log.
pub(crate) async fn write(shared: Rc<LogShared>, request: BlockRequest, range: WriteRange, answer: ChangeCompletion) {
    let extent = range.extent();
    {
        let mut state = shared.state.borrow_mut();
        state.queue.use_generation();
        state.bypassed.wrote(extent);
        state.counters.bypassed(extent.len);
        state.reads.mark_stale(extent);
    }
    let mut sent = request.clone();
    // An acknowledged write is durable either way.
    let durable = !shared.is_write_back_ack();
    if let BlockRequest::Write { fua, .. } = &mut sent {
        *fua |= durable;
    }
    let result = shared.inner.submit(sent).await;
    let mut state = shared.state.borrow_mut();
    state.bypassed.end(durable);
    state.reads.mark_stale(extent);
    if result.is_err() && state.life.is_on() {
        // Fall back to the log, which can wait for the backend to recover.
        drop(state);
        log(&shared, request, range, answer);
        return;
    }
    drop(state);
    drop(range);
    answer.send(result);
}
