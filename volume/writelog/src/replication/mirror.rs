//! Mirror of a log in memory: the complete replicas, without which nothing in it counts as durable.
//!
//! ```text
//!  Awaited --> Complete --> Lost
//!     |                      ^
//!     +----------------------+  no replica in time
//! ```

use std::cell::Cell;

use forebay_reactor::Instant;

/// State of a mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MirrorState {
    /// The medium is durable by itself.
    Unneeded,
    /// New log that has acknowledged nothing yet: the first replica has until then to be filled.
    Awaited(Instant),
    /// At least one replica is complete.
    Complete,
    /// The last replica is lost, for good: the log is written back, and given up.
    Lost,
}

/// Mirror of a log, at its primary.
///
/// | invariant | |
/// |---|---|
/// | D1 | a log in memory acknowledges a write only while another member is complete |
/// | D2 | once the last complete replica is lost, the log takes no more writes, and its content goes to the backend |
#[derive(Debug)]
pub(super) struct Mirror(Cell<MirrorState>);

impl Mirror {
    /// Begins with a log whose medium is durable by itself.
    pub(super) fn unneeded() -> Self {
        Self(Cell::new(MirrorState::Unneeded))
    }

    /// Begins with a log in memory that has this many complete replicas.  Without any, a log that has never held an entry has
    /// until `due` to get one; any other log may hold acknowledged writes in this copy alone.
    pub(super) fn of(replicas: usize, is_new: bool, due: Instant) -> Self {
        Self(Cell::new(match (replicas, is_new) {
            (1.., _) => MirrorState::Complete,
            (0, true) => MirrorState::Awaited(due),
            (0, false) => MirrorState::Lost,
        }))
    }

    /// Returns whether acknowledgements need a complete replica.
    pub(super) fn is_needed(&self) -> bool {
        self.0.get() != MirrorState::Unneeded
    }

    /// Returns whether the log waits for its first replica.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.0.get(), MirrorState::Awaited(_))
    }

    /// Returns whether the log is to be written back, and given up.
    pub(super) fn is_lost(&self) -> bool {
        self.0.get() == MirrorState::Lost
    }

    /// Takes the present number of complete replicas at a time.
    pub(super) fn look(&self, replicas: usize, at: Instant) {
        let next = match self.0.get() {
            MirrorState::Awaited(_) if replicas > 0 => MirrorState::Complete,
            MirrorState::Awaited(due) if due <= at => MirrorState::Lost,
            MirrorState::Complete if replicas == 0 => MirrorState::Lost,
            state => state,
        };
        self.0.set(next);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn a_mirror_that_was_lost_does_not_come_back() {
        let mirror = Mirror::of(0, true, at(10));
        assert!(mirror.is_needed() && mirror.is_awaited() && !mirror.is_lost());
        mirror.look(0, at(9));
        assert!(mirror.is_awaited());
        mirror.look(1, at(9));
        mirror.look(2, at(60));
        assert!(!mirror.is_awaited() && !mirror.is_lost());
        mirror.look(0, at(61));
        assert!(mirror.is_lost());
        mirror.look(1, at(62));
        assert!(mirror.is_lost(), "its log is being written back");
    }

    #[test]
    fn a_new_log_waits_for_its_first_replica_and_another_one_does_not() {
        let mirror = Mirror::of(0, true, at(10));
        mirror.look(0, at(10));
        assert!(mirror.is_lost());
        assert!(Mirror::of(0, false, at(10)).is_lost(), "it was taken over, and may hold acknowledged writes");
        let mirror = Mirror::of(2, false, at(0));
        mirror.look(1, at(100));
        assert!(!mirror.is_lost());
        let durable = Mirror::unneeded();
        durable.look(0, at(100));
        assert!(!durable.is_needed() && !durable.is_lost());
    }
}
