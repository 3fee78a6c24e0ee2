//! State of checkpoints: the newest durable one, the one in progress, and when the next one is due.

use std::cell::Cell;

use crate::format::anchor::Anchor;
use crate::segments::SegmentGeometry;

/// State of checkpoints.
///
/// # Invariants
/// 1. At most one checkpoint is in progress.
/// 2. `generation` is that of the newest durable anchor, and each durable anchor has a higher one than those before.
pub struct CheckpointState {
    generation: Cell<u64>,
    /// Epoch of the log since the store was opened.
    epoch: Cell<u64>,
    in_progress: Cell<bool>,
    /// Replay start (redo point) of the last checkpoint, in bytes appended to the log.
    appended_at_redo: Cell<u64>,
    /// Number of checkpoints since the store was opened.
    completed: Cell<u64>,
    /// Bytes appended to the log after which a checkpoint is due.
    interval: u64,
    /// Bytes of changed metadata in memory at which a checkpoint is due.
    dirty_max: usize,
}

impl CheckpointState {
    /// Returns the state after the checkpoint of an anchor; `dirty_max` is the amount of changed metadata in bytes at
    /// which the next one is due.
    pub fn of(anchor: &Anchor, geometry: &SegmentGeometry, dirty_max: usize) -> Self {
        let size = geometry.segment_size * u64::from(geometry.segment_count);
        Self {
            generation: Cell::new(anchor.generation),
            epoch: Cell::new(anchor.epoch),
            in_progress: Cell::new(false),
            appended_at_redo: Cell::new(0),
            completed: Cell::new(0),
            interval: (size / 16).clamp(geometry.segment_size, 512 << 20),
            dirty_max,
        }
    }

    /// Returns the number of the newest durable checkpoint.
    pub fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Skips checkpoint numbers, which discarded checkpoints may have.
    pub fn skip_generations(&self, count: u64) {
        debug_assert!(!self.in_progress.get(), "a checkpoint in progress has its number already");
        self.generation.set(self.generation.get() + count);
    }

    /// Returns the epoch of the log.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Begins a new epoch of the log.
    pub fn begin_epoch(&self, epoch: u64) {
        self.epoch.set(epoch);
    }

    /// Returns the number of checkpoints since the store was opened.
    pub fn completed(&self) -> u64 {
        self.completed.get()
    }

    /// Returns whether a checkpoint is due, with `appended` bytes appended to the log and `changed` bytes of changed
    /// metadata in memory.
    pub fn is_due(&self, appended: u64, changed: usize) -> bool {
        let since = appended - self.appended_at_redo.get();
        !self.in_progress.get() && (since >= self.interval || changed >= self.dirty_max)
    }

    /// Returns whether there is so much changed metadata that writers must wait for the checkpoint.
    pub fn is_beyond_bounds(&self, changed: usize) -> bool {
        changed >= self.dirty_max * 3 / 2
    }

    /// Begins a checkpoint.
    pub fn begin(&self) {
        assert!(!self.in_progress.replace(true), "two checkpoints at once");
    }

    /// Records that the checkpoint in progress is durable; `appended` bytes had been appended at its redo point.
    pub fn complete(&self, generation: u64, appended: u64) {
        debug_assert!(self.in_progress.get() && generation > self.generation.get());
        self.generation.set(generation);
        self.appended_at_redo.set(appended);
        self.completed.set(self.completed.get() + 1);
    }

    /// Ends the checkpoint in progress, whether or not it was completed.
    pub fn end(&self) {
        self.in_progress.set(false);
    }
}
