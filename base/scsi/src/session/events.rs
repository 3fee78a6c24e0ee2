//! Events of a session that watches: changes of units that its transport reports without a command of the host.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::signal::NexusSignal;
use crate::target::{ScsiTarget, TargetWatch};
use crate::unit::SessionUnits;

/// Maximum number of pending events; beyond it, all of them become one [`ScsiUnitEvent::Missed`].
const EVENTS_MAX: usize = 256;

/// Change of the units of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScsiUnitEvent {
    /// Unit that the host sees was added.
    Added {
        /// LUN of the unit.
        lun: u16,
    },
    /// Unit that the host saw was removed.
    Removed {
        /// LUN of the unit.
        lun: u16,
    },
    /// Parameters of a unit in use have changed, such as its capacity.
    Changed {
        /// LUN of the unit.
        lun: u16,
        /// Additional sense code of the unit attention that is established as well, the qualifier in the lower byte.
        code: u16,
    },
    /// More events than are kept: the host has to examine all units.
    Missed,
}

/// Watch of a session.
///
/// 1. `known` are the units that the host sees, as of `generation`, by LUN: each difference to the list was an event.
/// 2. `events` has at most [`EVENTS_MAX`] entries, no two the same in a row.
pub(super) struct SessionWatch {
    _registration: TargetWatch,
    generation: u32,
    known: BTreeMap<u16, u64>,
    events: VecDeque<ScsiUnitEvent>,
}

impl SessionWatch {
    /// Begins to watch; the units that exist already are no events.
    pub(super) fn new(target: &ScsiTarget, session: u64, signal: &Arc<NexusSignal>, initiator: &str) -> Self {
        let registration = target.watch(session, signal.clone());
        // Read before the list: a change that is read already is found once more, without a difference.
        let generation = target.generation();
        Self { _registration: registration, generation, known: visible(target, initiator), events: VecDeque::new() }
    }

    /// Collects the events since the last call.
    pub(super) fn examine(&mut self, units: &mut SessionUnits, signal: &Arc<NexusSignal>) {
        let generation = units.target().generation();
        if generation != self.generation {
            self.generation = generation;
            let now = visible(units.target(), units.initiator());
            let before = std::mem::replace(&mut self.known, now);
            let now = self.known.clone();
            // A unit that replaces another one is a removal and an addition.
            before.iter().filter(|(lun, id)| now.get(lun) != Some(id)).for_each(|(&lun, _)| {
                self.push(ScsiUnitEvent::Removed { lun });
            });
            now.iter().filter(|(lun, id)| before.get(lun) != Some(id)).for_each(|(&lun, _)| {
                self.push(ScsiUnitEvent::Added { lun });
            });
        }
        let waker = Waker::from(signal.clone());
        for nexus in units.nexuses_mut() {
            // Polled before the size is compared: a later change wakes the session again.
            nexus.poll_size(&mut Context::from_waker(&waker));
            let lun = nexus.lun();
            nexus.take_parameters().into_iter().for_each(|code| self.push(ScsiUnitEvent::Changed { lun, code }));
        }
    }

    fn push(&mut self, event: ScsiUnitEvent) {
        if self.events.back() == Some(&event) || self.events.front() == Some(&ScsiUnitEvent::Missed) {
            return;
        }
        if self.events.len() == EVENTS_MAX {
            self.events.clear();
            self.events.push_back(ScsiUnitEvent::Missed);
            return;
        }
        self.events.push_back(event);
    }

    /// Takes the next event.
    pub(super) fn take_event(&mut self) -> Option<ScsiUnitEvent> {
        self.events.pop_front()
    }
}

/// Returns the ids of the units that an initiator sees, by LUN.
fn visible(target: &ScsiTarget, initiator: &str) -> BTreeMap<u16, u64> {
    target.units_of(initiator).iter().map(|unit| (unit.lun(), unit.id())).collect()
}
