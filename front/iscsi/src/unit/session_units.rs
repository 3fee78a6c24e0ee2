//! Units that a session uses.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::HostId;

use super::third_party_copy::CopyOutcomes;
use super::{LogicalUnit, LogicalUnits, NexusError, NexusState, Unit};
use crate::port_groups::PortGroups;
use crate::scsi::sense::code;
use crate::sessions::IscsiSession;
use crate::target::Target;
use crate::targets::Targets;
use crate::wire::Lun;

/// Units of a session: those that its initiator sees, and its nexuses with those that it uses.
///
/// A nexus exists from the first command to a unit until the session ends or the unit is removed.
pub(crate) struct SessionUnits {
    targets: Targets,
    units: Rc<LogicalUnits>,
    session: Arc<IscsiSession>,
    host: HostId,
    nexuses: BTreeMap<u16, NexusState>,
    /// Generation of the target's list of units for which hosts were told of changes.
    generation: u32,
    copies: CopyOutcomes,
}

impl SessionUnits {
    /// Creates the units of a session whose host id is `host`; it uses none yet.
    pub(crate) fn new(targets: Targets, units: Rc<LogicalUnits>, session: Arc<IscsiSession>, host: HostId) -> Self {
        let generation = session.target.as_ref().map_or(0, Target::generation);
        let copies = CopyOutcomes::default();
        Self { targets, units, session, host, nexuses: BTreeMap::new(), generation, copies }
    }

    // ---- Session ----

    /// Returns all targets.
    pub(crate) fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Returns the session's target; `None` in a discovery session.
    pub(crate) fn target(&self) -> Option<&Target> {
        self.session.target.as_ref()
    }

    /// Returns the target's port groups, if it has a list of them.
    pub(super) fn port_groups(&self) -> Option<Arc<PortGroups>> {
        self.target().and_then(Target::port_groups)
    }

    /// Returns the id of the session.
    pub(crate) fn session_id(&self) -> u64 {
        self.session.id
    }

    /// Returns the initiator name.
    pub(crate) fn initiator(&self) -> &str {
        &self.session.initiator
    }

    /// Returns the host id for reservations.
    pub(crate) fn host(&self) -> &HostId {
        &self.host
    }

    /// Returns the LUNs of the units that the host sees.
    pub(crate) fn visible(&self) -> Vec<u16> {
        self.target().map(|target| target.luns(self.initiator())).unwrap_or_default()
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
            Err(NexusError::Occupied) => self.units.get(&self.target()?.unit(lun, self.initiator())?),
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
    pub(super) fn nexuses_mut(&mut self) -> impl Iterator<Item = &mut NexusState> {
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
        let generation = self.target().map_or(0, Target::generation);
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
        let target = self.target().ok_or(NexusError::Gone)?;
        let shared = target.unit(lun, self.initiator()).ok_or(NexusError::Gone)?;
        let unit = self.units.get(&shared).ok_or(NexusError::Gone)?;
        let nexus = shared.register(self.session.id, self.host.clone(), self.session.signal.clone())?;
        debug_assert_eq!(nexus.lun(), lun);
        self.nexuses.insert(lun, NexusState::new(unit, nexus, code::POWER_ON));
        Ok(())
    }
}
