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
    interval: Cell<u64>,
    /// Set if a checkpoint is requested that has not begun yet.
    requested: Cell<bool>,
    /// Set if the checkpoint in progress was requested.
    serves_request: Cell<bool>,
    /// Bytes of changed metadata in memory at which a checkpoint is due.
    dirty_max: usize,
}

impl CheckpointState {
    /// Returns the state after the checkpoint of an anchor; `dirty_max` is the amount of changed metadata in bytes at
    /// which the next one is due.
    pub fn of(anchor: &Anchor, geometry: &SegmentGeometry, dirty_max: usize) -> Self {
        let state = Self {
            generation: Cell::new(anchor.generation),
            epoch: Cell::new(anchor.epoch),
            in_progress: Cell::new(false),
            appended_at_redo: Cell::new(0),
            completed: Cell::new(0),
            interval: Cell::default(),
            requested: Cell::default(),
            serves_request: Cell::default(),
            dirty_max,
        };
        state.resize(geometry);
        state
    }

    /// Adapts the amount of log between checkpoints to the size of the store.
    pub fn resize(&self, geometry: &SegmentGeometry) {
        let size = geometry.segment_size * u64::from(geometry.segment_count);
        self.interval.set((size / 16).clamp(geometry.segment_size, 512 << 20));
    }

    /// Makes a checkpoint due that begins after this call.
    pub fn request(&self) {
        self.requested.set(true);
    }

    /// Returns whether a checkpoint was requested that is not durable yet.
    pub fn is_requested(&self) -> bool {
        self.requested.get() || self.serves_request.get()
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
        !self.in_progress.get() && (since >= self.interval.get() || changed >= self.dirty_max || self.requested.get())
    }

    /// Returns whether there is so much changed metadata that writers must wait for the checkpoint.
    pub fn is_beyond_bounds(&self, changed: usize) -> bool {
        changed >= self.dirty_max * 3 / 2
    }

    /// Begins a checkpoint.
    pub fn begin(&self) {
        assert!(!self.in_progress.replace(true), "two checkpoints at once");
        self.serves_request.set(self.requested.replace(false));
    }

    /// Records that the checkpoint in progress is durable; `appended` bytes had been appended at its redo point.
    pub fn complete(&self, generation: u64, appended: u64) {
        debug_assert!(self.in_progress.get() && generation > self.generation.get());
        self.generation.set(generation);
        self.appended_at_redo.set(appended);
        self.completed.set(self.completed.get() + 1);
        self.serves_request.set(false);
    }

    /// Ends the checkpoint in progress, whether or not it was completed.
    pub fn end(&self) {
        self.in_progress.set(false);
        if self.serves_request.replace(false) {
            // It failed.
            self.requested.set(true);
        }
    }
}
