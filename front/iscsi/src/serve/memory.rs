//! Memory that a session holds of the budget of all sessions.

use std::sync::Arc;

use crate::sessions::IscsiSession;
use crate::targets::Targets;

/// Granularity in bytes of allocations from the budget of all sessions.
const STEP: usize = 256 << 10;

/// Memory account of a session, for its commands in flight and unsent responses.
///
/// 1. `held` is never more than `granted`.
/// 2. `granted` is taken from the budget, and given back when the account is dropped.
pub(super) struct MemoryAccount {
    held: usize,
    granted: usize,
    targets: Targets,
    session: Arc<IscsiSession>,
}

impl MemoryAccount {
    /// Creates an empty account of a session.
    pub(super) fn new(targets: Targets, session: Arc<IscsiSession>) -> Self {
        Self { held: 0, granted: 0, targets, session }
    }

    /// Accounts for data that was received already, even beyond the budget.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.held += bytes;
        if self.held > self.granted {
            let more = (self.held - self.granted).next_multiple_of(STEP);
            self.targets.budget().take(more);
            self.granted += more;
        }
        debug_assert!(self.held <= self.granted);
    }

    /// Releases bytes.  One step is kept while there is traffic, which `idle` denies, so that not every command accesses
    /// the shared budget.
    pub(super) fn release(&mut self, bytes: usize, idle: bool) {
        self.held -= bytes;
        let needed = self.held.next_multiple_of(STEP);
        if self.granted > needed + STEP || (self.held == 0 && idle && self.granted > 0) {
            self.targets.budget().give(self.granted - needed);
            self.granted = needed;
        }
        debug_assert!(self.held <= self.granted);
    }

    /// Tries to account `bytes` more to a command that holds `own` bytes already, within `bytes_max` and the budget. If
    /// the budget is exhausted, the session is woken when memory may be available.
    pub(super) fn try_hold(&mut self, bytes: usize, own: usize, bytes_max: usize) -> bool {
        if self.held > own && self.held + bytes > bytes_max {
            return false;
        }
        let needed = self.held + bytes;
        if needed > self.granted {
            let more = (needed - self.granted).next_multiple_of(STEP);
            if !self.targets.budget().try_take(more, self.session.signal.nexus()) {
                return false;
            }
            self.granted += more;
        }
        self.held = needed;
        debug_assert!(self.held <= self.granted);
        true
    }

    /// Returns true when memory is so short that immediate and unsolicited data cannot be kept.
    pub(super) fn is_starved(&self) -> bool {
        self.held >= self.granted && self.targets.budget().is_starved()
    }

    /// Returns true if the session takes part in a shortage of memory.
    pub(super) fn is_short(&self) -> bool {
        self.granted > 0 && !self.targets.budget().is_left()
    }
}

impl Drop for MemoryAccount {
    fn drop(&mut self) {
        self.targets.budget().give(self.granted);
    }
}
