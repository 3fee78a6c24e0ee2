//! Logical units: what a unit is, its I_T nexuses, and the execution of SCSI commands on it.
//!
//! | scope | files |
//! |---|---|
//! | all cores | [`Unit`] with its [`spec`](UnitSpec), pool [`space`](PoolSpace) and registered nexuses (`nexus`) |
//! | one core | `logical_unit`: device and reservations of a unit, and the checks before a command reaches them |
//! | one session | `session_units`, `nexus_state`: the units that it uses, with pending unit attentions |
//! | one command | `commands`, `third_party_copy`: decide; `execute`: submits device requests, the only part that awaits |
//!
//! Command processing reads a [`Unit`] without locks: monotonic counters indicate changes, and only then is the state
//! examined.  Locks are taken when a session first uses a unit, when it ends, by unit resets, and by changes of a unit
//! that a session watches.

mod attentions;
mod changes;
pub(crate) mod commands;
pub(crate) mod execute;
mod failure;
mod logical_unit;
mod nexus;
mod nexus_state;
mod reservations;
mod session_units;
mod space;
mod spec;
mod third_party_copy;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};

use forebay_block::reservation::HostId;
use forebay_reactor::cross::OneshotReceiver;

use crate::locks::lock;
use crate::mode::Modes;
use crate::signal::NexusSignal;
use crate::stats::ScsiCounters;
use changes::{ChangeCounters, ChangeCounts, UnitChange};
pub use execute::{CommandFuture, ScsiResult};
pub use failure::ScsiFailure;
pub use logical_unit::{LogicalUnit, LogicalUnits, UnitDevices};
pub(crate) use nexus::{DrainGuard, Nexus, NexusError, Order};
pub(crate) use nexus_state::NexusState;
pub(crate) use session_units::{NexusIdentity, SessionUnits};
pub use space::PoolSpace;
pub use spec::{UnitSpec, is_listed};

/// Logical unit, shared by all cores.
///
/// 1. A change is counted in `changes` after it is made, so that a session that sees the count sees the change.
/// 2. Once `gone` is set, no session registers any more: `remove` reaches every session that uses it.
/// 3. No two registered sessions have the same host id.
/// 4. `watchers` is the number of registered nexuses that watch the unit.  It is incremented before such a nexus reads
///    the counters of changes, so that it is notified of every change that it does not see.
#[derive(Debug)]
pub struct Unit {
    id: u64,
    target_id: u64,
    target: Arc<str>,
    lun: u16,
    spec: UnitSpec,
    modes: AtomicU8,
    /// Preferred target port group; 0 for none.
    preferred_group: AtomicU16,
    changes: ChangeCounters,
    gone: AtomicBool,
    nexuses: Mutex<BTreeMap<u64, Arc<Nexus>>>,
    watchers: AtomicUsize,
    counters: ScsiCounters,
}

impl Unit {
    /// Creates a unit of a target; `id` must never have been used for another unit.
    pub(crate) fn new(id: u64, (target_id, target): (u64, Arc<str>), lun: u16, spec: UnitSpec) -> Self {
        Self {
            id,
            target_id,
            target,
            lun,
            spec,
            modes: AtomicU8::new(Modes::DEFAULT.0),
            preferred_group: AtomicU16::new(0),
            changes: ChangeCounters::default(),
            gone: AtomicBool::new(false),
            nexuses: Mutex::default(),
            watchers: AtomicUsize::new(0),
            counters: ScsiCounters::default(),
        }
    }

    /// Counts a change that has been made, and notifies the sessions that watch the unit.
    fn changed(&self, change: UnitChange) {
        self.changes.count(change);
        // Either this sees a watcher that is registering, or that one sees the change.
        fence(Ordering::SeqCst);
        if self.watchers.load(Ordering::Relaxed) > 0 {
            lock(&self.nexuses).values().filter(|nexus| nexus.watches()).for_each(|nexus| nexus.wake());
        }
    }

    /// Returns the unit id, unique among all units past and future.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the id of its target.
    pub fn target_id(&self) -> u64 {
        self.target_id
    }

    /// Returns the name of its target.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns its LUN.
    pub fn lun(&self) -> u16 {
        self.lun
    }

    /// Returns its configuration.
    pub fn spec(&self) -> &UnitSpec {
        &self.spec
    }

    /// Returns its command counters, over all sessions and cores.
    pub fn counters(&self) -> &ScsiCounters {
        &self.counters
    }

    /// Returns true if an initiator sees the unit.
    pub fn is_seen_by(&self, initiator: &str) -> bool {
        is_listed(&self.spec.initiators, initiator)
    }

    /// Returns the current mode settings.
    #[inline]
    pub fn modes(&self) -> Modes {
        Modes(self.modes.load(Ordering::Relaxed))
    }

    /// Changes the mode settings; other sessions get a unit attention.
    pub fn set_modes(&self, modes: Modes) {
        if self.modes.swap(modes.0, Ordering::Relaxed) != modes.0 {
            self.changed(UnitChange::Modes);
        }
    }

    /// Returns the preferred target port group, if one is set.
    pub fn preferred_group(&self) -> Option<u16> {
        Some(self.preferred_group.load(Ordering::Acquire)).filter(|&group| group != 0)
    }

    /// Sets the preferred target port group, which is active/optimized for the unit; all others are
    /// active/non-optimized.  Without one, or with one that is not among the target's
    /// [ports](crate::TargetPorts), all are non-optimized.
    ///
    /// If this is a change, all sessions get a unit attention.  A new unit has no preferred group.  A target without port
    /// groups does not report the setting.
    pub fn set_preferred_group(&self, group: Option<u16>) {
        let group = group.unwrap_or(0);
        if self.preferred_group.swap(group, Ordering::AcqRel) != group {
            self.changed(UnitChange::AccessStates);
        }
    }

    /// Tells all sessions by a unit attention that the target's port groups have changed; `inquiry` is set if the own
    /// port has.
    pub(crate) fn port_groups_changed(&self, inquiry: bool) {
        if inquiry {
            self.changed(UnitChange::Inquiry);
        }
        self.changed(UnitChange::AccessStates);
    }

    /// Returns true once the unit has been removed.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Returns the change counter of everything that sessions have to examine.
    #[inline]
    pub fn change_count(&self) -> u32 {
        self.changes.total()
    }

    /// Returns the number of changes of each kind.
    fn change_counts(&self) -> ChangeCounts {
        self.changes.counts()
    }

    /// Returns the number of sessions that use it.
    pub fn sessions(&self) -> usize {
        lock(&self.nexuses).len()
    }

    /// Returns the ids of the sessions that use it.
    pub fn users(&self) -> Vec<u64> {
        lock(&self.nexuses).keys().copied().collect()
    }

    /// Registers a session as user of the unit.
    ///
    /// # Errors
    /// When the unit is removed, or commands of an earlier session of the host are still in flight.
    pub(crate) fn register(
        &self,
        (session, watches): (u64, bool),
        host: HostId,
        signal: Arc<NexusSignal>,
    ) -> Result<Arc<Nexus>, NexusError> {
        let nexus = Arc::new(Nexus::new(self.lun, (session, watches), host, signal));
        let mut nexuses = lock(&self.nexuses);
        // Checked under the lock: `remove` sets the flag before it reads the list.
        if self.is_gone() {
            return Err(NexusError::Gone);
        }
        if nexuses.values().any(|other| other.host() == nexus.host()) {
            return Err(NexusError::Occupied);
        }
        nexuses.insert(session, nexus.clone());
        self.watchers.fetch_add(usize::from(watches), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(nexus)
    }

    /// Unregisters a session.
    pub(crate) fn unregister(&self, session: u64) {
        let nexus = lock(&self.nexuses).remove(&session);
        self.watchers.fetch_sub(nexus.as_ref().map_or(0, |nexus| nexus.watches().into()), Ordering::Relaxed);
        // Dropping the nexus completes its pending orders.
        drop(nexus);
    }

    /// Resets the unit: modes return to default, tasks are aborted, and all sessions get a unit attention.  Completes
    /// when no task is left.
    pub(crate) fn reset(&self) -> OneshotReceiver<()> {
        self.modes.store(Modes::DEFAULT.0, Ordering::Relaxed);
        self.changed(UnitChange::Reset);
        self.order(Order::Abort, |_| true)
    }

    /// Aborts the tasks of some sessions.  Completes when none is left.
    pub(crate) fn abort(&self, whose: impl Fn(&Nexus) -> bool) -> OneshotReceiver<()> {
        self.order(Order::Abort, whose)
    }

    /// Removes the unit: new requests are refused, those in flight are completed.  The future completes when no session
    /// uses it.
    pub(crate) fn remove(&self) -> OneshotReceiver<()> {
        self.gone.store(true, Ordering::Release);
        self.changed(UnitChange::Removal);
        self.order(Order::Leave, |_| true)
    }

    fn order(&self, order: Order, whose: impl Fn(&Nexus) -> bool) -> OneshotReceiver<()> {
        let (guard, drained) = DrainGuard::new();
        for nexus in lock(&self.nexuses).values().filter(|nexus| whose(nexus)) {
            nexus.give(order, guard.clone());
        }
        drained
    }
}
