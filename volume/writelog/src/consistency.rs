//! Draining the log, and holding the backend at a consistency point: for snapshots, resizes, and a newly attached
//! log.

use std::rc::Rc;

use forebay_block::{BlockRequest, Result};

use crate::log::{LogShared, WriteLog, closed};
use crate::{append, writeback};

/// Bounds of write-back: held consistency points, and how far callers wait for it.
///
/// Invariant: while a point is held, no entry from it on is written back.
#[derive(Debug, Default)]
pub(crate) struct ConsistencyPoints {
    /// Held points: entries from these on must not be written back.
    held: Vec<u64>,
    /// A caller waits until the backend holds all entries before this one.
    drain_target: u64,
}

impl ConsistencyPoints {
    /// Holds a point; several guards may hold the same one.
    fn hold(&mut self, seq: u64) {
        self.held.push(seq);
    }

    /// Ends one hold of a point.
    fn unhold(&mut self, seq: u64) {
        remove_one(&mut self.held, seq);
    }

    /// Returns whether a point is held.
    pub(crate) fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns the first entry that must not be written back, if a point is held.
    pub(crate) fn held(&self) -> Option<u64> {
        self.held.iter().min().copied()
    }

    /// Asks for write-back of all entries before `seq`.
    fn drain_to(&mut self, seq: u64) {
        self.drain_target = self.drain_target.max(seq);
    }

    /// Returns the entry before which all are asked to be written back.
    pub(crate) fn drain_target(&self) -> u64 {
        self.drain_target
    }
}

/// Size limits of shrinks in progress: requests past any of these are refused.
#[derive(Debug, Default)]
pub(crate) struct SizeLimits(Vec<u64>);

impl SizeLimits {
    fn add(&mut self, size: u64) {
        self.0.push(size);
    }

    fn remove(&mut self, size: u64) {
        remove_one(&mut self.0, size);
    }

    /// Returns the lowest of these limits and `size`.
    pub(crate) fn limit(&self, size: u64) -> u64 {
        self.0.iter().fold(size, |least, &limit| least.min(limit))
    }
}

/// Removes one of the equal values that several guards may have added.
fn remove_one(values: &mut Vec<u64>, value: u64) {
    let at = values.iter().position(|&other| other == value);
    debug_assert!(at.is_some(), "{value} was removed before");
    if let Some(at) = at {
        values.swap_remove(at);
    }
}

impl WriteLog {
    /// Accounts for changes in flight past a log that is being attached, until the returned guard is dropped. Entries
    /// newer than the present ones are not written back in the meantime, and flushes go to the backend too.
    pub fn changes_past(&self) -> ChangesPast {
        let mut state = self.shared.state.borrow_mut();
        let head = state.dirty.head();
        state.points.hold(head);
        state.bypassed.begin_past();
        ChangesPast { cut: Cut { shared: self.shared.clone(), head } }
    }

    /// Waits until the backend holds, durably, all writes acknowledged before.
    ///
    /// # Errors
    /// If the log has failed or is closed, or the backend fails a flush.
    pub async fn drain(&self) -> Result<()> {
        self.settle().await;
        let head = self.shared.state.borrow().dirty.head();
        self.drain_to(head).await
    }

    async fn drain_to(&self, seq: u64) -> Result<()> {
        let shared = &self.shared;
        {
            let mut state = shared.state.borrow_mut();
            state.points.drain_to(seq);
        }
        shared.write_back.notify_all();
        let over = || {
            let state = shared.state.borrow();
            state.dirty.tail() >= seq || state.life.is_closing() || state.life.failure().is_some()
        };
        shared.settled.wait_until(over).await;
        {
            let state = shared.state.borrow();
            if let Some(error) = state.life.failure() {
                return Err(error.clone());
            }
            if state.dirty.tail() < seq || state.life.is_acquiring() {
                return Err(closed());
            }
        }
        shared.inner.submit(BlockRequest::Flush).await.map(drop)
    }

    /// Waits until all pieces queued now are in the log, or were dropped with an error.
    async fn settle(&self) {
        let shared = &self.shared;
        shared.settled.wait_until(|| shared.state.borrow().life.has_decided()).await;
        let queued = shared.state.borrow().queue.mark();
        let over = || {
            let state = shared.state.borrow();
            state.queue.has_reached(queued) || !state.life.is_on()
        };
        shared.settled.wait_until(over).await;
    }

    /// Brings the backend to a consistency point and holds it there: it has all writes acknowledged before this call,
    /// and none submitted after it returned. Until the guard is dropped, later writes stay in the log.
    ///
    /// # Errors
    /// If the log has failed or is closed, or the backend fails a flush.
    pub async fn cut(&self) -> Result<Cut> {
        let cut = self.begin_cut().await;
        self.complete_cut(&cut).await?;
        Ok(cut)
    }

    /// Chooses the moment of a cut: the backend will have all writes acknowledged before this call, and none submitted after
    /// it returned, which stay in the log until the guard is dropped. Does not wait for the backend.
    pub async fn begin_cut(&self) -> Cut {
        let shared = &self.shared;
        shared.state.borrow_mut().barrier();
        self.settle().await;
        let mut state = shared.state.borrow_mut();
        let head = state.dirty.head();
        state.points.hold(head);
        Cut { shared: shared.clone(), head }
    }

    /// Waits until the backend is at the moment of a cut, and holds it there until the guard is dropped.
    ///
    /// # Errors
    /// As for [`cut`](Self::cut).
    pub async fn complete_cut(&self, cut: &Cut) -> Result<()> {
        let shared = &self.shared;
        debug_assert!(Rc::ptr_eq(shared, &cut.shared), "the cut of another log");
        shared.settled.wait_until(|| shared.state.borrow().bypassed.is_idle()).await;
        self.drain_to(cut.head).await
    }

    /// Prepares the volume for a shrink to `size` bytes: requests past it are refused until the returned guard is
    /// dropped, and the log holds nothing past it when this returns.
    ///
    /// # Errors
    /// If the log has failed, or the backend fails a flush.
    pub async fn shrink(&self, size: u64) -> Result<Shrinking> {
        let shared = &self.shared;
        shared.state.borrow_mut().size_limits.add(size);
        let shrinking = Shrinking { shared: shared.clone(), size };
        let over = || shared.ranges.is_free_from(size);
        shared.settled.wait_until(over).await;
        self.drain().await?;
        self.forget().await?;
        Ok(shrinking)
    }

    /// Waits until no recovery would replay an entry that the backend holds.
    async fn forget(&self) -> Result<()> {
        let shared = &self.shared;
        if self.mode().is_on()
            && let Err(error) = writeback::persist_tail_twice(shared).await
        {
            append::disable_failed(shared, error);
        }
        // After a failure of the medium, any entry may be replayed until the record excludes it.
        let over = || {
            let state = shared.state.borrow();
            state.life.is_on() || state.life.is_over()
        };
        shared.settled.wait_until(over).await;
        shared.state.borrow().life.failure().map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// Guard of a consistency point of the backend.
pub struct Cut {
    shared: Rc<LogShared>,
    head: u64,
}

impl Drop for Cut {
    fn drop(&mut self) {
        self.shared.state.borrow_mut().points.unhold(self.head);
        self.shared.write_back.notify_all();
        // Requests to a log that is being disabled wait for the end of the point.
        self.shared.settled.notify_all();
    }
}

/// Guard that accounts for changes in flight past the log.
pub struct ChangesPast {
    cut: Cut,
}

impl Drop for ChangesPast {
    fn drop(&mut self) {
        self.cut.shared.state.borrow_mut().bypassed.end_past();
    }
}

/// Guard of a shrink: requests past the volume's new end are refused while it is held.
pub struct Shrinking {
    shared: Rc<LogShared>,
    size: u64,
}

impl Drop for Shrinking {
    fn drop(&mut self) {
        self.shared.state.borrow_mut().size_limits.remove(self.size);
    }
}
