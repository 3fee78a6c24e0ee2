//! Units that a session uses.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{HostId, ReservationAction};

use super::third_party_copy::CopyOutcomes;
use super::{LogicalUnit, LogicalUnits, NexusError, NexusState, Unit};
use crate::lun::Lun;
use crate::ports::TargetPorts;
use crate::sense::code;
use crate::signal::NexusSignal;
use crate::target::ScsiTarget;

/// Initiator's side of an I_T nexus.
#[derive(Debug, Clone)]
pub(crate) struct NexusIdentity {
    /// Session id.
    pub(crate) session: u64,
    /// Initiator name.
    pub(crate) initiator: String,
    /// Host id for reservations.
    pub(crate) host: HostId,
    /// Wakes the session.
    pub(crate) signal: Arc<NexusSignal>,
    /// Session is woken by changes of units.
    pub(crate) watches: bool,
}

/// Units of a session: those that its initiator sees, and its nexuses with those that it uses.
///
/// A nexus exists from the first command to a unit until the session ends or the unit is removed.
pub(crate) struct SessionUnits {
    target: ScsiTarget,
    units: Rc<LogicalUnits>,
    identity: NexusIdentity,
    nexuses: BTreeMap<u16, NexusState>,
    /// Generation of the target's list of units for which hosts were told of changes.
    generation: u32,
    copies: CopyOutcomes,
}

impl SessionUnits {
    /// Creates the units of a session; it uses none yet.
    pub(crate) fn new(target: ScsiTarget, units: Rc<LogicalUnits>, identity: NexusIdentity) -> Self {
        let generation = target.generation();
        Self { target, units, identity, nexuses: BTreeMap::new(), generation, copies: CopyOutcomes::default() }
    }

    // ---- Session ----

    /// Returns the session's target.
    pub(crate) fn target(&self) -> &ScsiTarget {
        &self.target
    }

    /// Returns the target's ports, if it has a list of them.
    pub(super) fn ports(&self) -> Option<Arc<TargetPorts>> {
        self.target.ports()
    }

    /// Returns the id of the session.
    pub(crate) fn session_id(&self) -> u64 {
        self.identity.session
    }

    /// Returns the initiator name.
    pub(crate) fn initiator(&self) -> &str {
        &self.identity.initiator
    }

    /// Returns the host id for reservations.
    pub(crate) fn host(&self) -> &HostId {
        &self.identity.host
    }

    /// Returns the LUNs of the units that the host sees.
    pub(crate) fn visible(&self) -> Vec<u16> {
        self.target.luns(self.initiator())
    }

    /// Returns the outcomes of copies.
    pub(super) fn copies(&self) -> &CopyOutcomes {
        &self.copies
    }

    // ---- Units ----

    /// Returns a unit for task management, even one that the session may not use yet.
    pub(crate) fn find(&mut self, lun: Lun) -> Option<Rc<LogicalUnit>> {
        let Lun::Unit(lun) = lun else { return None };
        match self.nexus(lun) {
            Ok(nexus) => Some(nexus.unit().clone()),
            Err(NexusError::Gone) => None,
            Err(NexusError::Occupied) => self.units.get(&self.target.unit(lun, self.initiator())?),
        }
    }

    /// Returns the logical unit of `unit` on this core.
    pub(super) fn on_this_core(&self, unit: &Arc<Unit>) -> Option<Rc<LogicalUnit>> {
        self.units.get(unit)
    }

    // ---- Nexuses ----

    /// Returns the nexuses with the units in use.
    pub(crate) fn nexuses(&self) -> impl Iterator<Item = &NexusState> {
        self.nexuses.values()
    }

    /// Returns the nexuses with the units in use.
    pub(crate) fn nexuses_mut(&mut self) -> impl Iterator<Item = &mut NexusState> {
        self.nexuses.values_mut()
    }

    /// Ends the nexus with a unit that is removed.
    pub(crate) fn forget(&mut self, lun: u16) {
        self.nexuses.remove(&lun);
    }

    /// Returns the nexuses, for the owner of the session's orphaned tasks.
    pub(crate) fn into_nexuses(self) -> BTreeMap<u16, NexusState> {
        self.nexuses
    }

    /// Establishes unit attentions for a changed LUN inventory; hosts are told with their next command to any unit.
    #[inline]
    pub(crate) fn note_changed_luns(&mut self) {
        let generation = self.target.generation();
        if generation != self.generation {
            self.generation = generation;
            self.nexuses_mut().for_each(NexusState::luns_changed);
        }
    }

    /// Returns the nexus with a unit in use.
    pub(super) fn nexus_in_use(&mut self, lun: u16) -> Option<&mut NexusState> {
        self.nexuses.get_mut(&lun)
    }

    /// Returns the nexus with a unit, creating it on first use.
    #[inline]
    pub(super) fn nexus(&mut self, lun: u16) -> Result<&mut NexusState, NexusError> {
        if !self.nexuses.contains_key(&lun) {
            self.open(lun)?;
        }
        self.nexuses.get_mut(&lun).ok_or(NexusError::Gone)
    }

    #[cold]
    fn open(&mut self, lun: u16) -> Result<(), NexusError> {
        let shared = self.target.unit(lun, self.initiator()).ok_or(NexusError::Gone)?;
        let unit = self.units.get(&shared).ok_or(NexusError::Gone)?;
        let NexusIdentity { session, host, signal, watches, .. } = &self.identity;
        let nexus = shared.register((*session, *watches), host.clone(), signal.clone())?;
        debug_assert_eq!(nexus.lun(), lun);
        self.nexuses.insert(lun, NexusState::new(unit, nexus, code::POWER_ON));
        if *watches {
            // The next turn begins to watch the size.
            signal.notify();
        }
        Ok(())
    }

    // ---- Resets ----

    /// Resets a unit.  The future completes when no task of any session is left, and the reset is in force.
    pub(crate) fn reset(&self, unit: &LogicalUnit) -> impl Future<Output = ()> + use<> {
        let reset = unit.shared().reset();
        let (reservations, host) = (unit.device().reservations(), self.host().clone());
        async move {
            // Errors mean that all holders are gone, and count as completion.  The second call waits for requests in
            // the device from sessions that the unit no longer knows.
            let _ = reset.await;
            if let Some(reservations) = reservations {
                drop(reservations.apply(&host, ReservationAction::Reset).await);
            }
        }
    }

    /// Releases the SPC-2 reservations of the session.  The releases are submitted by this call; the future completes when
    /// other hosts can reserve the units.
    pub(crate) fn release_reservations(&self) -> impl Future<Output = ()> + use<> {
        let releases: Vec<_> = self.nexuses().filter_map(|nexus| nexus.release_reservation()).collect();
        async move {
            for release in releases {
                release.await;
            }
        }
    }

    /// Aborts the tasks of the session on all units, releases its SPC-2 reservations, and establishes the unit attentions
    /// for the loss of its nexuses.  The future completes when all of this is done.
    pub(crate) fn lose_nexus(&mut self) -> impl Future<Output = ()> + use<> {
        let (session, released) = (self.session_id(), self.release_reservations());
        let mut aborted = Vec::new();
        for nexus in self.nexuses_mut() {
            nexus.nexus_lost();
            aborted.push(nexus.unit().shared().abort(|nexus| nexus.session() == session));
        }
        async move {
            for ended in aborted {
                // An error means that the waiters are gone; either way the tasks have ended.
                let _ = ended.await;
            }
            released.await;
        }
    }
}
