//! SCSI target: its names, its ports, and its units by LUN.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use forebay_reactor::cross::OneshotReceiver;

use crate::locks::{lock, read, write};
use crate::lun::Lun;
use crate::naming::ScsiNaming;
use crate::ports::{TargetPort, TargetPorts};
use crate::signal::NexusSignal;
use crate::stats::ScsiCounts;
use crate::unit::{Unit, UnitSpec};

/// Configuration of a new target.
#[derive(Debug, Clone)]
pub struct ScsiTargetSpec {
    /// Name in logs and errors.
    pub name: Arc<str>,
    /// Names that hosts see.
    pub naming: ScsiNaming,
    /// Target ports of all daemons that serve the target; `None` for one port, [`TargetPort::SINGLE`].
    pub ports: Option<Arc<TargetPorts>>,
}

/// LUN that exceeds the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("LUN {0} is out of range: a target has LUNs from 0 to {max}", max = Lun::MAX)]
pub struct LunOutOfRange(pub u32);

/// Reason for which a unit cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// LUN above [`Lun::MAX`].
    #[error(transparent)]
    Lun(#[from] LunOutOfRange),
    /// Volume already exported by this target or another. Reservations identify initiator ports, not targets, so an
    /// initiator that uses two targets would be taken for one host.
    #[error("volume {name} is LUN {lun} of {target} already")]
    Exported {
        /// Volume name.
        name: String,
        /// Target that exports it.
        target: String,
        /// LUN at that target.
        lun: u16,
    },
    /// Target already removed.
    #[error("target {0} has been removed")]
    Removed(String),
}

/// Units of all targets of a front, by volume name: a volume is a unit of one of them.
#[derive(Debug, Default)]
pub struct UnitCatalog {
    units: RwLock<BTreeMap<String, Arc<Unit>>>,
    last_unit: AtomicU64,
    last_target: AtomicU64,
    last_session: AtomicU64,
}

impl UnitCatalog {
    /// Returns a unit of any target by its volume name.
    pub fn unit_by_name(&self, name: &str) -> Option<Arc<Unit>> {
        read(&self.units).get(name).cloned()
    }

    /// Returns a new session id.  A front whose sessions have ids of their own does not need it.
    pub fn next_session(&self) -> u64 {
        self.last_session.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// SCSI target, shared by all cores.  Cloning gives another handle.
///
/// 1. A unit is in `units` exactly as long as it is in the catalog, except under both of their locks.
/// 2. `generation` is incremented after each change of `units`, and watchers are notified after that.
/// 3. Once `removed` is set, no unit is added.
#[derive(Clone)]
pub struct ScsiTarget(Arc<ScsiTargetState>);

struct ScsiTargetState {
    id: u64,
    name: Arc<str>,
    naming: ScsiNaming,
    ports: RwLock<Option<Arc<TargetPorts>>>,
    units: RwLock<BTreeMap<u16, Arc<Unit>>>,
    /// Generation of the list of units, incremented by each change.
    generation: AtomicU32,
    removed: AtomicBool,
    catalog: Arc<UnitCatalog>,
    /// Sessions that are told of changes of the list of units, by session id.
    watchers: Mutex<BTreeMap<u64, Arc<NexusSignal>>>,
}

impl fmt::Debug for ScsiTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScsiTarget({})", self.0.name)
    }
}

/// Unit snapshot.
#[derive(Debug, Clone)]
pub struct UnitSnapshot {
    /// LUN of the unit.
    pub lun: u16,
    /// Volume name.
    pub name: String,
    /// Sessions that use the unit.
    pub sessions: usize,
    /// Command counters of the unit.
    pub numbers: ScsiCounts,
}

/// Watch of a target's list of units; dropping it ends the watch.
pub(crate) struct TargetWatch {
    target: ScsiTarget,
    session: u64,
}

impl Drop for TargetWatch {
    fn drop(&mut self) {
        lock(&self.target.0.watchers).remove(&self.session);
    }
}

impl ScsiTarget {
    /// Creates a target without units.
    pub fn new(spec: ScsiTargetSpec, catalog: Arc<UnitCatalog>) -> Self {
        Self(Arc::new(ScsiTargetState {
            id: catalog.last_target.fetch_add(1, Ordering::Relaxed) + 1,
            name: spec.name,
            naming: spec.naming,
            ports: RwLock::new(spec.ports),
            units: RwLock::default(),
            generation: AtomicU32::new(0),
            removed: AtomicBool::new(false),
            catalog,
            watchers: Mutex::default(),
        }))
    }

    /// Returns the target id, from 1 on and never reused within a catalog.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns a new session id, for a front whose sessions have no ids of their own.
    pub fn next_session(&self) -> u64 {
        self.0.catalog.next_session()
    }

    /// Returns the name in logs and errors.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the names that hosts see.
    pub fn naming(&self) -> &ScsiNaming {
        &self.0.naming
    }

    // ---- Ports ----

    /// Returns the target ports; `None` for one port, [`TargetPort::SINGLE`].
    pub fn ports(&self) -> Option<Arc<TargetPorts>> {
        read(&self.0.ports).clone()
    }

    /// Returns the target port of this daemon.
    pub fn own_port(&self) -> TargetPort {
        read(&self.0.ports).as_ref().map_or(TargetPort::SINGLE, |ports| ports.own())
    }

    /// Replaces the target ports.  If they have changed, all sessions get a unit attention for each unit that they use.
    pub fn set_ports(&self, ports: Option<Arc<TargetPorts>>) {
        let before = std::mem::replace(&mut *write(&self.0.ports), ports.clone());
        let own = |ports: &Option<Arc<TargetPorts>>| ports.as_ref().map(|ports| ports.own());
        let inquiry = own(&before) != own(&ports);
        if inquiry || before != ports {
            read(&self.0.units).values().for_each(|unit| unit.port_groups_changed(inquiry));
        }
    }

    // ---- Units ----

    /// Adds a unit, replacing the one with the same LUN.
    ///
    /// # Errors
    /// [`AddError`]; then nothing has changed.
    pub fn add(&self, lun: u32, spec: UnitSpec) -> Result<Arc<Unit>, AddError> {
        let lun = u16::try_from(lun).ok().filter(|lun| *lun <= Lun::MAX).ok_or(LunOutOfRange(lun))?;
        let UnitCatalog { units: catalog, last_unit, .. } = &*self.0.catalog;
        let mut names = write(catalog);
        let mut units = write(&self.0.units);
        if self.is_removed() {
            return Err(AddError::Removed(self.name().to_owned()));
        }
        if let Some(other) = names.get(&spec.name).filter(|other| !(other.lun() == lun && self.owns(other))) {
            let (name, target) = (spec.name, other.target().to_owned());
            return Err(AddError::Exported { name, target, lun: other.lun() });
        }
        let id = last_unit.fetch_add(1, Ordering::Relaxed);
        let unit = Arc::new(Unit::new(id, (self.0.id, self.0.name.clone()), lun, spec));
        let before = units.insert(lun, unit.clone());
        if let Some(before) = &before {
            names.remove(&before.spec().name);
        }
        names.insert(unit.spec().name.clone(), unit.clone());
        self.0.generation.fetch_add(1, Ordering::Release);
        drop((names, units));
        if let Some(before) = before {
            drop(before.remove());
        }
        self.notify_watchers();
        Ok(unit)
    }

    fn owns(&self, unit: &Unit) -> bool {
        unit.target_id() == self.0.id
    }

    /// Removes a unit.  The future completes when no request to it is in flight and no session holds it.
    pub fn remove(&self, lun: u16) -> Option<OneshotReceiver<()>> {
        let mut names = write(&self.0.catalog.units);
        let unit = write(&self.0.units).remove(&lun)?;
        names.remove(&unit.spec().name);
        self.0.generation.fetch_add(1, Ordering::Release);
        drop(names);
        let removed = unit.remove();
        self.notify_watchers();
        Some(removed)
    }

    /// Returns the generation of the list of units.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Returns a unit by its LUN, if the initiator sees it.
    pub fn unit(&self, lun: u16, initiator: &str) -> Option<Arc<Unit>> {
        let units = read(&self.0.units);
        units.get(&lun).filter(|unit| unit.is_seen_by(initiator)).cloned()
    }

    /// Returns a unit by its LUN.
    pub fn unit_at(&self, lun: u16) -> Option<Arc<Unit>> {
        read(&self.0.units).get(&lun).cloned()
    }

    /// Returns a unit by its volume name.
    pub fn unit_by_name(&self, name: &str) -> Option<Arc<Unit>> {
        let names = read(&self.0.catalog.units);
        names.get(name).filter(|unit| self.owns(unit)).cloned()
    }

    /// Returns the LUNs of the units that an initiator sees, in order.
    pub fn luns(&self, initiator: &str) -> Vec<u16> {
        let units = read(&self.0.units);
        units.values().filter(|unit| unit.is_seen_by(initiator)).map(|unit| unit.lun()).collect()
    }

    /// Returns the units that an initiator sees, in order.
    pub fn units_of(&self, initiator: &str) -> Vec<Arc<Unit>> {
        let units = read(&self.0.units);
        units.values().filter(|unit| unit.is_seen_by(initiator)).cloned().collect()
    }

    /// Returns snapshots of all units, in order of their LUNs.
    pub fn units(&self) -> Vec<UnitSnapshot> {
        let units: Vec<Arc<Unit>> = read(&self.0.units).values().cloned().collect();
        let describe = |unit: Arc<Unit>| UnitSnapshot {
            lun: unit.lun(),
            name: unit.spec().name.clone(),
            sessions: unit.sessions(),
            numbers: unit.counters().snapshot(),
        };
        units.into_iter().map(describe).collect()
    }

    /// Returns the number of units.
    pub fn unit_count(&self) -> usize {
        read(&self.0.units).len()
    }

    // ---- Watching ----

    /// Notifies a session of each change of the list of units from now on.
    pub(crate) fn watch(&self, session: u64, signal: Arc<NexusSignal>) -> TargetWatch {
        lock(&self.0.watchers).insert(session, signal);
        TargetWatch { target: self.clone(), session }
    }

    fn notify_watchers(&self) {
        lock(&self.0.watchers).values().for_each(|signal| signal.notify());
    }

    // ---- Removal ----

    /// Returns true once the target has been removed.
    pub fn is_removed(&self) -> bool {
        self.0.removed.load(Ordering::Acquire)
    }

    /// Refuses further units.
    pub fn set_removed(&self) {
        self.0.removed.store(true, Ordering::Release);
    }

    /// Removes the target with all units, each with a future that completes when no request to it is in flight and no
    /// session holds it.  Sessions are ended by the front.
    pub fn remove_all(&self) -> Vec<OneshotReceiver<()>> {
        self.set_removed();
        let mut names = write(&self.0.catalog.units);
        let units = std::mem::take(&mut *write(&self.0.units));
        units.values().for_each(|unit| drop(names.remove(&unit.spec().name)));
        self.0.generation.fetch_add(1, Ordering::Release);
        drop(names);
        let removed = units.values().map(|unit| unit.remove()).collect();
        self.notify_watchers();
        removed
    }
}
