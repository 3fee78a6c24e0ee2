//! State of garbage collection between rounds of the cleaner.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Number of rounds without progress, with space still needed, after which garbage collection is stalled.
const ROUNDS_WITHOUT_PROGRESS_MAX: u32 = 8;

/// Progress of cleaning since users last wrote.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Bytes written by users when it was last reset.
    user_bytes: u64,
    /// Most free segments after a round since then.
    most_free: u32,
    /// Rounds since then that did not exceed it.
    rounds_without: u32,
}

/// State of garbage collection.
///
/// # Invariants
/// 1. While garbage collection is stalled, the cleaner does not run, and transactions that need more space fail instead
///    of waiting for it.
/// 2. A stall ends when space is freed, or when enough was appended to the log that cleaning may be worthwhile again.
#[derive(Default)]
pub struct GcState {
    /// Set when the cleaner found nothing to gain, and nothing has been freed since.
    stalled: Cell<bool>,
    /// Bytes appended to the log when garbage collection stalled.
    stalled_at: Cell<u64>,
    progress: Cell<Progress>,
    /// Segments that the cleaner emptied in its last round, with the uses that they were in.
    last_victims: RefCell<BTreeMap<u32, Option<u64>>>,
    cleaned_bytes: Cell<u64>,
    /// Set if the next round is to empty retired segments.
    retired_wanted: Cell<bool>,
}

impl GcState {
    /// Returns whether garbage collection is stalled.
    pub fn is_stalled(&self) -> bool {
        self.stalled.get()
    }

    /// Stalls garbage collection; `appended` bytes have been appended to the log.
    pub fn stall(&self, appended: u64) {
        debug_assert!(!self.stalled.get(), "the cleaner ran while garbage collection was stalled");
        self.stalled.set(true);
        self.stalled_at.set(appended);
    }

    /// Ends a stall; users have written `user_bytes` bytes. Returns false if garbage collection was not stalled.
    pub fn resume(&self, user_bytes: u64) -> bool {
        let was_stalled = self.stalled.replace(false);
        if was_stalled {
            self.progress.set(Progress { user_bytes, ..Progress::default() });
        }
        was_stalled
    }

    /// Ends a stall like [`resume`](Self::resume) if `patience` bytes have been appended to the log since it began:
    /// blocks overwritten since then may make cleaning worthwhile again.
    pub fn resume_after(&self, patience: u64, appended: u64, user_bytes: u64) {
        if self.stalled.get() && appended - self.stalled_at.get() >= patience {
            self.resume(user_bytes);
        }
    }

    /// Makes the next round empty retired segments.
    pub fn want_retired(&self) {
        self.retired_wanted.set(true);
    }

    /// Returns whether the next round is to empty retired segments.
    pub fn wants_retired(&self) -> bool {
        self.retired_wanted.get()
    }

    /// Returns whether the round that begins is to empty retired segments.
    pub fn take_retired(&self) -> bool {
        self.retired_wanted.replace(false)
    }

    /// Records the end of a cleaning round with `free` free segments, while more are needed. Returns true after
    /// `ROUNDS_WITHOUT_PROGRESS_MAX` rounds without progress.
    pub fn lacks_progress(&self, free: u32, user_bytes: u64) -> bool {
        let before = self.progress.get();
        if before.user_bytes != user_bytes || free > before.most_free {
            self.progress.set(Progress { user_bytes, most_free: free, rounds_without: 0 });
            return false;
        }
        let rounds_without = before.rounds_without + 1;
        self.progress.set(Progress { rounds_without, ..before });
        rounds_without >= ROUNDS_WITHOUT_PROGRESS_MAX
    }

    /// Begins a round; returns the segments emptied in the last one.
    pub fn begin_round(&self) -> BTreeMap<u32, Option<u64>> {
        self.last_victims.take()
    }

    /// Records that the cleaner empties a segment in this round, which is in that use.
    pub fn add_victim(&self, segment: u32, segment_use: Option<u64>) {
        self.last_victims.borrow_mut().insert(segment, segment_use);
    }

    /// Forgets the segments emptied in the last round, as no checkpoint may have freed them.
    pub fn forget_victims(&self) {
        self.last_victims.borrow_mut().clear();
    }

    /// Returns the bytes moved since the store was opened.
    pub fn cleaned_bytes(&self) -> u64 {
        self.cleaned_bytes.get()
    }

    /// Counts moved bytes.
    pub fn add_cleaned_bytes(&self, bytes: u64) {
        self.cleaned_bytes.set(self.cleaned_bytes.get() + bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_without_progress_are_counted_until_users_write_or_space_is_gained() {
        let gc = GcState::default();
        let lacking = |free, user_bytes| (0..20).take_while(|_| !gc.lacks_progress(free, user_bytes)).count();
        assert_eq!(lacking(5, 0), 8, "the first round gains 5 segments");
        assert_eq!(lacking(6, 0), 8, "one more is progress");
        assert!(!gc.lacks_progress(6, 4096), "users wrote");
    }

    #[test]
    fn a_stall_ends_when_enough_was_appended() {
        let gc = GcState::default();
        assert!(!gc.resume(0));
        gc.stall(1000);
        gc.resume_after(500, 1499, 0);
        assert!(gc.is_stalled());
        gc.resume_after(500, 1500, 0);
        assert!(!gc.is_stalled());
    }
}
