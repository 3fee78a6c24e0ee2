//! Events of a log's complete copies: fewer than wanted, all back, too few to acknowledge writes.

use std::time::Duration;

use forebay_reactor::{Instant, now};

use super::set::PrimarySet;

/// Transition that is logged for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopiesEvent {
    /// Fewer copies are complete than are wanted.
    Degraded,
    /// All wanted copies are complete again.
    Restored,
    /// Too few replicas are complete: writes are not acknowledged.
    Stalled,
    /// Writes are acknowledged again.
    Resumed,
}

/// Number of complete copies, and what was logged of it.
///
/// A lost copy is logged at once; copies that are being filled, after an opening or after more were wanted, only when that
/// takes longer than a grace time.
#[derive(Debug)]
pub(super) struct CopiesWatch {
    grace: Duration,
    /// Time at which too few copies are logged, if they are not yet.
    due: Option<Instant>,
    degraded: bool,
    stalled: bool,
    complete: usize,
    wanted: usize,
}

impl CopiesWatch {
    /// Begins at `at` with a log that was just opened; copies have `grace` to be filled.
    pub(super) fn new(at: Instant, grace: Duration) -> Self {
        Self { grace, due: Some(at + grace), degraded: false, stalled: false, complete: 0, wanted: 0 }
    }

    /// Looks at the members of a log, and logs what has changed.
    pub(super) fn look(&mut self, set: &PrimarySet) {
        let (complete, wanted) = set.copies();
        for event in self.next(now(), (complete, wanted), set.is_stalled() && !set.mirror.is_awaited()) {
            let volume = &set.identity.name;
            match event {
                CopiesEvent::Degraded => tracing::warn!(
                    image = %volume, complete, wanted,
                    "a write log has fewer complete copies than wanted: {complete} of {wanted}"
                ),
                CopiesEvent::Restored => {
                    tracing::info!(image = %volume, complete, wanted, "a write log has all wanted copies again");
                }
                CopiesEvent::Stalled => {
                    let why = set.stall();
                    tracing::error!(image = %volume, why, "writes are not acknowledged: too few copies of the write log");
                }
                CopiesEvent::Resumed => {
                    tracing::info!(image = %volume, complete, "writes are acknowledged again: enough copies are complete");
                }
            }
        }
    }

    /// Takes the present numbers of copies; returns what is to be logged.
    fn next(&mut self, at: Instant, (complete, wanted): (usize, usize), stalled: bool) -> Vec<CopiesEvent> {
        let mut events = Vec::new();
        let is_full = complete >= wanted;
        if complete < self.complete {
            self.due = Some(at);
        } else if wanted > self.wanted && !self.degraded {
            self.due = self.due.or(Some(at + self.grace));
        }
        (self.complete, self.wanted) = (complete, wanted);
        if is_full {
            self.due = None;
            if std::mem::take(&mut self.degraded) {
                events.push(CopiesEvent::Restored);
            }
        } else if !self.degraded && self.due.is_some_and(|due| due <= at) {
            self.degraded = true;
            events.push(CopiesEvent::Degraded);
        }
        if stalled != self.stalled {
            self.stalled = stalled;
            events.push(if stalled { CopiesEvent::Stalled } else { CopiesEvent::Resumed });
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::Instant;

    use super::CopiesEvent::{Degraded, Restored, Resumed, Stalled};
    use super::*;

    const GRACE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Instant {
        Instant::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn lost_copies_are_told_of_once_and_at_once() {
        let mut watch = CopiesWatch::new(at(0), GRACE);
        assert_eq!(watch.next(at(1), (1, 3), false), [], "copies of a new log are being filled");
        assert_eq!(watch.next(at(2), (3, 3), false), []);
        assert_eq!(watch.next(at(60), (2, 3), false), [Degraded]);
        assert_eq!(watch.next(at(61), (1, 3), false), []);
        assert_eq!(watch.next(at(62), (2, 3), false), []);
        assert_eq!(watch.next(at(63), (3, 3), false), [Restored]);
        assert_eq!(watch.next(at(64), (3, 3), false), []);
    }

    #[test]
    fn copies_that_are_never_filled_are_told_of_after_a_time() {
        let mut watch = CopiesWatch::new(at(0), GRACE);
        assert_eq!(watch.next(at(9), (2, 3), false), []);
        assert_eq!(watch.next(at(10), (2, 3), false), [Degraded], "as after a takeover from a lost primary");
        let mut watch = CopiesWatch::new(at(0), GRACE);
        assert_eq!(watch.next(at(1), (2, 2), false), []);
        assert_eq!(watch.next(at(100), (2, 3), false), [], "one more is wanted");
        assert_eq!(watch.next(at(109), (2, 3), false), []);
        assert_eq!(watch.next(at(110), (2, 3), false), [Degraded]);
        assert_eq!(watch.next(at(111), (2, 2), false), [Restored], "it is not wanted any more");
    }

    #[test]
    fn a_lost_copy_of_a_log_that_is_being_filled_is_told_of_at_once() {
        let mut watch = CopiesWatch::new(at(0), GRACE);
        assert_eq!(watch.next(at(1), (2, 3), false), []);
        assert_eq!(watch.next(at(2), (1, 3), true), [Degraded, Stalled]);
        assert_eq!(watch.next(at(3), (2, 3), false), [Resumed]);
        assert_eq!(watch.next(at(4), (2, 2), false), [Restored]);
    }
}
