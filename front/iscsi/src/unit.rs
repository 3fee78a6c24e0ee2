//! Logical unit as shared by all cores and sessions: identity, settings, users, and pending notifications.
//!
//! Command processing reads it without locks: monotonic counters indicate changes, and only then is the state examined.
//! Locks are taken when a session first uses a unit, when it ends, and by unit resets.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_block::reservation::HostId;
use forebay_reactor::cross::{Answer, Answered, oneshot};

use crate::scsi::inquiry::Identity;
use crate::scsi::log::Provisioning;
use crate::scsi::mode::Modes;
use crate::signal::Signal;
use crate::stats::Counters;

/// Pool space, updated by the owner of the pool.
#[derive(Debug, Default)]
pub struct Space {
    used: AtomicU64,
    available: AtomicU64,
    /// Used bytes from which hosts are notified; 0 disables the threshold.
    threshold: AtomicU64,
    /// Number of times the threshold was exceeded.
    passed: AtomicU32,
}

impl Space {
    /// Creates a record whose threshold is `threshold` used bytes; 0 disables it.
    pub fn new(threshold: u64) -> Self {
        Self { threshold: threshold.into(), ..Self::default() }
    }

    /// Returns the last known space.
    pub fn provisioning(&self) -> Provisioning {
        Provisioning { available: self.available.load(Ordering::Relaxed), used: self.used.load(Ordering::Relaxed) }
    }

    /// Returns the threshold in used bytes, if enabled.
    pub fn threshold(&self) -> Option<u64> {
        Some(self.threshold.load(Ordering::Relaxed)).filter(|&threshold| threshold > 0)
    }

    /// Updates used and available bytes, and the threshold.
    pub fn update(&self, used: u64, available: u64, threshold: u64) {
        let before = self.used.swap(used, Ordering::Relaxed);
        self.available.store(available, Ordering::Relaxed);
        let threshold_before = self.threshold.swap(threshold, Ordering::Relaxed);
        let was_past = threshold_before > 0 && before >= threshold_before;
        if threshold > 0 && used >= threshold && !was_past {
            self.passed.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns the number of times the threshold was exceeded.
    pub fn passed(&self) -> u32 {
        self.passed.load(Ordering::Acquire)
    }
}

/// Configuration of a unit.
#[derive(Debug, Clone)]
pub struct UnitSpec {
    /// Volume name.
    pub name: String,
    /// Unit identity.
    pub identity: Identity,
    /// Read-only unit.
    pub read_only: bool,
    /// Rotational medium.
    pub rotational: bool,
    /// Space of the pool.
    pub space: Arc<Space>,
    /// Initiators that see the unit; an empty list admits all.
    pub initiators: Vec<String>,
}

/// Order to a session to end its tasks on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Abort the tasks without a response.
    Abort,
    /// Complete the tasks and stop using the unit, which is removed.
    Leave,
}

/// Drain guard, held by each session with tasks to end. The waiter is notified when all guards are dropped.
pub struct Drain {
    answer: Mutex<Option<Answer<()>>>,
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drain")
    }
}

impl Drain {
    /// Creates a guard, and the future that completes when all its clones are dropped.
    pub(crate) fn new() -> (Arc<Self>, Answered<()>) {
        let (answer, answered) = oneshot();
        (Arc::new(Self { answer: Mutex::new(Some(answer)) }), answered)
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            answer.send(());
        }
    }
}

/// I_T_L nexus: use of a unit by a session.
#[derive(Debug)]
pub struct Nexus {
    /// LUN of the unit.
    pub lun: u16,
    /// Id of the session.
    pub session: u64,
    /// Host id for reservations.
    pub host: HostId,
    signal: Arc<Signal>,
    orders: Mutex<Vec<(Order, Arc<Drain>)>>,
}

impl Nexus {
    /// Takes the orders since the last call.
    pub fn orders(&self) -> Vec<(Order, Arc<Drain>)> {
        std::mem::take(&mut lock(&self.orders))
    }
}

/// Reason for which a session cannot use a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoEntry {
    /// Unit removed.
    Gone,
    /// Commands of an earlier session of the same host are still in flight.
    Occupied,
}

/// Logical unit.
#[derive(Debug)]
pub struct Unit {
    id: u64,
    target_id: u64,
    target: Arc<str>,
    lun: u16,
    spec: UnitSpec,
    modes: AtomicU8,
    /// Change counter of everything that sessions have to examine.
    news: AtomicU32,
    modes_changed: AtomicU32,
    resets: AtomicU32,
    gone: AtomicBool,
    nexuses: Mutex<BTreeMap<u64, Arc<Nexus>>>,
    counters: Counters,
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
            news: AtomicU32::new(0),
            modes_changed: AtomicU32::new(0),
            resets: AtomicU32::new(0),
            gone: AtomicBool::new(false),
            nexuses: Mutex::default(),
            counters: Counters::default(),
        }
    }

    /// Returns the unit id, unique among all units past and future.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn target_id(&self) -> u64 {
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
    pub fn counters(&self) -> &Counters {
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
            self.modes_changed.fetch_add(1, Ordering::Release);
            self.news.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns true once the unit has been removed.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Returns the change counter of everything that sessions have to examine.
    #[inline]
    pub fn news(&self) -> u32 {
        self.news.load(Ordering::Acquire)
    }

    /// Returns the counts of mode changes and of resets.
    pub fn changes(&self) -> (u32, u32) {
        (self.modes_changed.load(Ordering::Acquire), self.resets.load(Ordering::Acquire))
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
    pub fn enter(&self, session: u64, host: HostId, signal: Arc<Signal>) -> Result<Arc<Nexus>, NoEntry> {
        let nexus = Arc::new(Nexus { lun: self.lun, session, host, signal, orders: Mutex::default() });
        let mut nexuses = lock(&self.nexuses);
        // Checked under the lock: `remove` sets the flag before it reads the list.
        if self.is_gone() {
            return Err(NoEntry::Gone);
        }
        if nexuses.values().any(|other| other.host == nexus.host) {
            return Err(NoEntry::Occupied);
        }
        nexuses.insert(session, nexus.clone());
        Ok(nexus)
    }

    /// Unregisters a session.
    pub fn leave(&self, session: u64) {
        let nexus = lock(&self.nexuses).remove(&session);
        // Dropping the nexus completes its pending orders.
        drop(nexus);
    }

    /// Resets the unit: modes return to default, tasks are aborted, and all sessions get a unit attention.  Completes
    /// when no task is left.
    pub fn reset(&self) -> Answered<()> {
        self.modes.store(Modes::DEFAULT.0, Ordering::Relaxed);
        self.resets.fetch_add(1, Ordering::Release);
        self.news.fetch_add(1, Ordering::Release);
        self.order(Order::Abort, |_| true)
    }

    /// Aborts the tasks of some sessions.  Completes when none is left.
    pub fn abort(&self, whose: impl Fn(&Nexus) -> bool) -> Answered<()> {
        self.order(Order::Abort, whose)
    }

    /// Removes the unit: new requests are refused, those in flight are completed.  The future completes when no session
    /// uses it.
    pub fn remove(&self) -> Answered<()> {
        self.gone.store(true, Ordering::Release);
        self.news.fetch_add(1, Ordering::Release);
        self.order(Order::Leave, |_| true)
    }

    fn order(&self, order: Order, whose: impl Fn(&Nexus) -> bool) -> Answered<()> {
        let (drain, answered) = Drain::new();
        for nexus in lock(&self.nexuses).values().filter(|nexus| whose(nexus)) {
            lock(&nexus.orders).push((order, drain.clone()));
            nexus.signal.tell();
        }
        answered
    }
}

/// Returns true if a name is in a list, in which `*` at the end of an entry matches any suffix; an empty list matches
/// all.
pub fn is_listed(list: &[String], name: &str) -> bool {
    list.is_empty()
        || list.iter().any(|entry| match entry.strip_suffix('*') {
            Some(start) => name.get(..start.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(start)),
            None => entry.eq_ignore_ascii_case(name),
        })
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_passed_once_until_it_is_left() {
        let space = Space::new(100);
        space.update(50, 50, 100);
        assert_eq!(space.passed(), 0);
        space.update(100, 0, 100);
        space.update(120, 0, 100);
        assert_eq!(space.passed(), 1);
        space.update(80, 20, 100);
        space.update(101, 0, 100);
        assert_eq!((space.passed(), space.threshold()), (2, Some(100)));
        space.update(200, 0, 0);
        assert_eq!((space.passed(), space.threshold()), (2, None));
    }

    #[test]
    fn lists_of_initiators() {
        let list = |entries: &[&str]| entries.iter().map(|&entry| entry.to_owned()).collect::<Vec<_>>();
        assert!(is_listed(&[], "iqn.x"));
        assert!(is_listed(&list(&["iqn.a", "IQN.X"]), "iqn.x"));
        assert!(!is_listed(&list(&["iqn.a"]), "iqn.ab"));
        assert!(is_listed(&list(&["iqn.a*"]), "iqn.ab") && !is_listed(&list(&["iqn.a*"]), "iqn"));
    }
}
