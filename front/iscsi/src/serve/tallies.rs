//! Command counts of one turn of a session, added to the shared counters at its end.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::sessions::IscsiSession;
use crate::stats::{ScsiCommandKind, Tally};
use crate::unit::LogicalUnit;

/// Counts of a session, and of the unit that its last commands went to.  What was not flushed is added on drop.
pub(super) struct Tallies {
    session: Arc<IscsiSession>,
    of_session: Tally,
    of_unit: Option<(Rc<LogicalUnit>, Tally)>,
}

impl Tallies {
    /// Creates empty counts of a session.
    pub(super) fn new(session: Arc<IscsiSession>) -> Self {
        Self { session, of_session: Tally::default(), of_unit: None }
    }

    /// Counts a completed command.
    pub(super) fn answered(
        &mut self,
        unit: Option<&Rc<LogicalUnit>>,
        (kind, took): (ScsiCommandKind, Duration),
        failed: bool,
        (read, written): (u64, u64),
    ) {
        self.of_session.answered(kind, took, failed, read, written);
        let Some(unit) = unit else { return };
        if self.of_unit.as_ref().is_none_or(|(last, _)| !Rc::ptr_eq(last, unit)) {
            self.flush_unit();
            self.of_unit = Some((unit.clone(), Tally::default()));
        }
        if let Some((_, tally)) = &mut self.of_unit {
            tally.answered(kind, took, failed, read, written);
        }
    }

    fn flush_unit(&mut self) {
        if let Some((unit, mut tally)) = self.of_unit.take() {
            tally.flush(&[unit.shared().counters()]);
        }
    }

    /// Adds the counts to the shared counters, and drops the reference to the unit.
    pub(super) fn flush(&mut self) {
        self.of_session.flush(&[&self.session.counters]);
        self.flush_unit();
    }
}

impl Drop for Tallies {
    fn drop(&mut self) {
        self.flush();
    }
}
