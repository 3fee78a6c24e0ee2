//! Change counters of a unit: a session compares them with those that it examined last.

use std::sync::atomic::{AtomicU32, Ordering};

/// Change of a unit that sessions examine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitChange {
    /// Mode settings.
    Modes,
    /// Unit reset.
    Reset,
    /// Asymmetric access states, or the target port groups themselves.
    AccessStates,
    /// Target port in the INQUIRY data.
    Inquiry,
    /// Removal of the unit.
    Removal,
}

/// Numbers of changes of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChangeCounts {
    pub(super) modes: u32,
    pub(super) resets: u32,
    pub(super) access_states: u32,
    pub(super) inquiry: u32,
}

/// Change counters of a unit, all of them monotonic.
///
/// `total` is incremented after the counter of the change itself, so that a session that sees the new total sees the
/// change.
#[derive(Debug, Default)]
pub(super) struct ChangeCounters {
    total: AtomicU32,
    modes: AtomicU32,
    resets: AtomicU32,
    access_states: AtomicU32,
    inquiry: AtomicU32,
}

impl ChangeCounters {
    /// Counts a change that has been made.
    pub(super) fn count(&self, change: UnitChange) {
        let counter = match change {
            UnitChange::Modes => Some(&self.modes),
            UnitChange::Reset => Some(&self.resets),
            UnitChange::AccessStates => Some(&self.access_states),
            UnitChange::Inquiry => Some(&self.inquiry),
            UnitChange::Removal => None,
        };
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Release);
        }
        self.total.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of all changes.
    #[inline]
    pub(super) fn total(&self) -> u32 {
        self.total.load(Ordering::Acquire)
    }

    /// Returns the number of changes of each kind.
    pub(super) fn counts(&self) -> ChangeCounts {
        ChangeCounts {
            modes: self.modes.load(Ordering::Acquire),
            resets: self.resets.load(Ordering::Acquire),
            access_states: self.access_states.load(Ordering::Acquire),
            inquiry: self.inquiry.load(Ordering::Acquire),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_counts_once() {
        let counters = ChangeCounters::default();
        let changes = [
            UnitChange::Modes,
            UnitChange::AccessStates,
            UnitChange::AccessStates,
            UnitChange::Inquiry,
            UnitChange::Removal,
        ];
        changes.into_iter().for_each(|change| counters.count(change));
        assert_eq!(counters.total(), 5);
        assert_eq!(counters.counts(), ChangeCounts { modes: 1, resets: 0, access_states: 2, inquiry: 1 });
    }
}
