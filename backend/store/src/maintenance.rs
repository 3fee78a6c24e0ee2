//! Maintenance task: writes checkpoints and cleans segments when due.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, Result};
use forebay_reactor::sleep;
use forebay_reactor::sync::Notify;

use crate::core::Core;
use crate::device::StoreDevice;
use crate::format::BLOCK64;

/// Retry delay after a failed checkpoint or cleaning round.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Number of free segments that are used next and keep their space in the file system.
const SEGMENTS_KEPT: usize = 64;

/// Signals between the maintenance tasks and the writers that wait for them.
///
/// # Invariants
/// 1. Once the store is closing, it remains so, and all waiters have been woken: tasks end, and writers fail.
/// 2. `failure` is the error of the last round, if it failed. Writers that wait for its success receive it.
#[derive(Default)]
pub struct Maintenance {
    closing: Cell<bool>,
    /// Error of the last checkpoint or cleaning round; `None` if it succeeded.
    failure: RefCell<Option<Error>>,
    /// Signals that a checkpoint or cleaning may be due.
    due: Notify,
    /// Signals changes in space, checkpoints or throttling that a writer may wait for.
    changed: Notify,
    /// Signals that a snapshot was removed, or that the store is closing.
    snaps_changed: Notify,
    /// Signals that a device is to be filled, that a scrub is wanted, or that the store is closing.
    repair_wanted: Notify,
}

impl Maintenance {
    /// Returns whether the store is closing.
    pub fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Makes the tasks end, and writers fail. Returns false if that was done before.
    pub fn begin_closing(&self) -> bool {
        let first = !self.closing.replace(true);
        self.due.notify_all();
        self.changed.notify_all();
        self.snaps_changed.notify_all();
        self.repair_wanted.notify_all();
        first
    }

    /// Wakes the tasks that fill devices and scrub.
    pub fn want_repair(&self) {
        self.repair_wanted.notify_all();
    }

    /// Waits for the next device to fill, scrub, or closing of the store, after this call.
    pub fn next_repair(&self) -> impl Future<Output = ()> + '_ {
        self.repair_wanted.wait()
    }

    /// Wakes the maintenance task.
    pub fn wake(&self) {
        self.due.notify_all();
    }

    /// Wakes the writers that wait for space or for a checkpoint.
    pub fn notify_writers(&self) {
        self.changed.notify_all();
    }

    /// Waits for the next change in space, checkpoints or throttling after this call.
    pub fn next_change(&self) -> impl Future<Output = ()> + '_ {
        self.changed.wait()
    }

    /// Wakes the task that trims removed snapshots.
    pub fn snap_removed(&self) {
        self.snaps_changed.notify_all();
    }

    /// Waits for the next removal of a snapshot, or the closing of the store, after this call.
    pub fn next_snap_removal(&self) -> impl Future<Output = ()> + '_ {
        self.snaps_changed.wait()
    }

    /// Returns the error of the last checkpoint or cleaning round, if it failed.
    pub fn failure(&self) -> Option<Error> {
        self.failure.borrow().clone()
    }

    fn failed(&self, error: Error) {
        *self.failure.borrow_mut() = Some(error);
        self.changed.notify_all();
    }
}

/// Writes checkpoints and cleans segments when due, until the store closes.
pub async fn maintain(core: Rc<Core>, punch: bool) {
    let maintenance = &core.maintenance;
    loop {
        let due = || {
            maintenance.is_closing() || core.wants_checkpoint() || core.wants_cleaning() || core.wants_sparse_rewrite()
        };
        maintenance.due.wait_until(due).await;
        if maintenance.is_closing() {
            return;
        }
        if core.log().failure().is_some() {
            // Each retry would append to the log, which cannot be written. Writers that wait for space receive the
            // error.
            maintenance.notify_writers();
            sleep(RETRY_AFTER).await;
            continue;
        }
        if let Err(error) = maintain_once(&core).await {
            let path = core.media.device.name();
            tracing::error!(?error, "a checkpoint or cleaning round of {path} failed; retrying in {RETRY_AFTER:?}");
            core.gc.forget_victims();
            maintenance.failed(error);
            sleep(RETRY_AFTER).await;
            continue;
        }
        maintenance.failure.take();
        if punch && !maintenance.is_closing() {
            punch_free(&core).await;
        }
    }
}

async fn maintain_once(core: &Rc<Core>) -> Result<()> {
    if !core.wants_cleaning() {
        if core.wants_sparse_rewrite() {
            core.rewrite_sparse_blobs().await?;
        }
        return if core.wants_checkpoint() { core.checkpoint(false).await } else { Ok(()) };
    }
    let free_before = core.space.free_segments();
    let live_before = core.segments.borrow().live_bytes();
    let appended_before = core.log().bytes_appended();
    // With much dirty metadata for the checkpoint, the cleaner had little space to work with, so the result is
    // inconclusive.
    let cramped = core.dirty_bytes() as u64 > 2 * core.segments.borrow().geometry.segment_size;
    let gain = core.clean_round().await?;
    core.checkpoint(false).await?;
    let free = core.space.free_segments();
    let quiet = core.segments.borrow().live_bytes() >= live_before;
    // Garbage collection is stalled in three cases: nothing is worth moving; moving gained nothing although almost
    // nothing else was written meanwhile; or each round gains only what the next one loses.
    let moved_only = core.log().bytes_appended() - appended_before <= gain * 8;
    let scarce = core.space.is_scarce_for_requests(free);
    let nothing_won = free <= free_before && !cramped && (gain == 0 || (quiet && moved_only));
    if scarce && !core.gc.is_stalled() && (nothing_won || core.gc.lacks_progress(free, core.counters.user_bytes())) {
        core.gc.stall(core.log().bytes_appended());
    }
    core.maintenance.notify_writers();
    Ok(())
}

async fn punch_free(core: &Rc<Core>) {
    let geometry = core.segments.borrow().geometry;
    let segments = core.segments.borrow_mut().take_punchable(SEGMENTS_KEPT);
    for segment in segments {
        // Another task may have allocated it while other segments were punched.
        if !core.segments.borrow_mut().hold(segment) {
            continue;
        }
        let at = geometry.first_block(segment) * BLOCK64;
        let done = match &core.media.device {
            StoreDevice::Single(file) => file.punch_hole(at, geometry.segment_size).await,
            StoreDevice::Columns(set) => set.punch(segment).await,
        };
        // It is used last, since writing to it needs an allocation again.
        core.segments.borrow_mut().release(segment);
        if let Err(error) = done {
            tracing::debug!(%error, "cannot return free segments to the file system");
            return;
        }
    }
}
