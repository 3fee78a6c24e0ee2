//! EXTENDED COPY: resolution and checks of its units, and the outcomes that RECEIVE COPY RESULTS reports.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::reservation::ReservationAccess;

use super::commands::Execution;
use super::{LogicalUnit, ScsiFailure, SessionUnits, UnitSpec, execute};
use crate::BLOCK;
use crate::cdb::LbaRange;
use crate::copy::{self, Copy};
use crate::sense::{Sense, code, key};

/// Maximum number of copy outcomes kept for RECEIVE COPY RESULTS.
const OUTCOMES_MAX: usize = 8;

/// Outcomes of a session's copies, by list identifier: the newest of each identifier, of the last [`OUTCOMES_MAX`].
#[derive(Debug, Clone, Default)]
pub(super) struct CopyOutcomes(Rc<RefCell<VecDeque<(u8, copy::CopyOutcome)>>>);

impl CopyOutcomes {
    /// Returns the outcome of the last copy with a list identifier.
    pub(super) fn of(&self, list: u8) -> Option<copy::CopyOutcome> {
        self.0.borrow().iter().find(|(name, _)| *name == list).map(|(_, outcome)| *outcome)
    }

    /// Records the outcome of a copy.
    pub(super) fn record(&self, list: u8, outcome: copy::CopyOutcome) {
        let mut outcomes = self.0.borrow_mut();
        outcomes.retain(|(name, _)| *name != list);
        if outcomes.len() == OUTCOMES_MAX {
            outcomes.pop_front();
        }
        outcomes.push_back((list, outcome));
        debug_assert!(outcomes.len() <= OUTCOMES_MAX);
    }
}

impl SessionUnits {
    /// Executes EXTENDED COPY; all units are resolved and checked before anything is written.
    pub(super) fn third_party_copy(&mut self, copy: Copy) -> Result<Execution, ScsiFailure> {
        // Only units of this target: a session sees no others.
        let units = self.target().units_of(self.initiator());
        let mut resolved: Vec<Rc<LogicalUnit>> = Vec::new();
        for target in &copy.targets {
            let unit = units.iter().find(|unit| names(&target.designator, unit.spec()));
            let unit = unit.and_then(|unit| self.on_this_core(unit));
            let unit = unit.ok_or(copy::aborted(code::COPY_UNREACHABLE))?;
            if target.block != BLOCK {
                return Err(Sense::list(28).into());
            }
            resolved.push(unit);
        }
        for segment in &copy.segments {
            let (from, to) = (&resolved[usize::from(segment.from)], &resolved[usize::from(segment.to)]);
            if !from.admits_access(self.host(), ReservationAccess::Read)
                || !to.admits_access(self.host(), ReservationAccess::Write)
            {
                return Err(ScsiFailure::CONFLICT);
            }
            if to.is_protected() {
                return Err(Sense::new(key::DATA_PROTECT, code::WRITE_PROTECTED).into());
            }
            for (unit, lba) in [(from, segment.from_lba), (to, segment.to_lba)] {
                let run = LbaRange { lba, blocks: segment.blocks, fua: false };
                unit.check_run(run, u32::MAX)
                    .map_err(|sense| Sense { info: sense.info, ..copy::aborted(code::NONE) })?;
            }
        }
        Ok(Execution::InFlight(execute::third_party_copy(copy, resolved, self.copies().clone())))
    }
}

/// Returns true if a designator is one of the unit's own.
fn names(designator: &[u8], spec: &UnitSpec) -> bool {
    let identity = &spec.identity;
    match (designator.get(1), designator.get(4..)) {
        (Some(3), Some(name)) => name == identity.naa(),
        (Some(0x0a), Some(name)) => name.get(2..) == Some(&identity.uuid[..]),
        _ => false,
    }
}
