//! A unit as all cores and sessions see it: who it is, what is set, who uses it, and what there is to tell them.
//!
//! What a command needs is read without a lock: counters that only grow say that something is new, and only then is
//! looked closer.  Locks are taken when a session first uses a unit, when it ends, and by who resets a unit.

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

/// Space of a pool, kept up to date by who owns the pool.
#[derive(Debug, Default)]
pub struct Space {
    used: AtomicU64,
    available: AtomicU64,
    /// Bytes in use from which hosts are told; 0 for never.
    threshold: AtomicU64,
    /// How often the threshold was passed.
    passed: AtomicU32,
}

impl Space {
    /// Hosts are told when `threshold` bytes are in use; 0 for never.
    pub fn new(threshold: u64) -> Self {
        Self { threshold: threshold.into(), ..Self::default() }
    }

    /// What is known now.
    pub fn provisioning(&self) -> Provisioning {
        Provisioning { available: self.available.load(Ordering::Relaxed), used: self.used.load(Ordering::Relaxed) }
    }

    /// From so many bytes in use hosts are told.
    pub fn threshold(&self) -> Option<u64> {
        Some(self.threshold.load(Ordering::Relaxed)).filter(|&threshold| threshold > 0)
    }

    /// The pool has so much in use and so much left.
    pub fn update(&self, used: u64, available: u64, threshold: u64) {
        let before = self.used.swap(used, Ordering::Relaxed);
        self.available.store(available, Ordering::Relaxed);
        let threshold_before = self.threshold.swap(threshold, Ordering::Relaxed);
        let was_past = threshold_before > 0 && before >= threshold_before;
        if threshold > 0 && used >= threshold && !was_past {
            self.passed.fetch_add(1, Ordering::Release);
        }
    }

    /// How often the threshold was passed.
    pub fn passed(&self) -> u32 {
        self.passed.load(Ordering::Acquire)
    }
}

/// What a unit is made of.
#[derive(Debug, Clone)]
pub struct UnitSpec {
    /// Its name for people: the volume's.
    pub name: String,
    /// Who it is.
    pub identity: Identity,
    /// Writes are refused.
    pub read_only: bool,
    /// The medium turns.
    pub rotational: bool,
    /// The pool's space.
    pub space: Arc<Space>,
    /// Initiators that see it; all do when there is none.
    pub initiators: Vec<String>,
}

/// Why tasks of a unit end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// They are given up, and nobody is answered.
    Abort,
    /// They are done first; then the unit is gone.
    Leave,
}

/// Held by each session that has something to do before somebody else goes on, who learns of it when all are dropped.
pub struct Drain {
    answer: Mutex<Option<Answer<()>>>,
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drain")
    }
}

impl Drain {
    /// One to hold, and what tells when it and its copies are dropped.
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

/// A session's use of a unit.
#[derive(Debug)]
pub struct Nexus {
    /// The unit's number.
    pub lun: u16,
    /// The session's number.
    pub session: u64,
    /// Who it is to reservations.
    pub host: HostId,
    signal: Arc<Signal>,
    orders: Mutex<Vec<(Order, Arc<Drain>)>>,
}

impl Nexus {
    /// What was ordered since the last look.
    pub fn orders(&self) -> Vec<(Order, Arc<Drain>)> {
        std::mem::take(&mut lock(&self.orders))
    }
}

/// Why a session cannot use a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoEntry {
    /// There is none.
    Gone,
    /// Commands of the same host's session before are not done yet.
    Occupied,
}

/// A unit.
#[derive(Debug)]
pub struct Unit {
    lun: u16,
    spec: UnitSpec,
    modes: AtomicU8,
    /// Counts whatever sessions have to look at.
    news: AtomicU32,
    modes_changed: AtomicU32,
    resets: AtomicU32,
    gone: AtomicBool,
    nexuses: Mutex<BTreeMap<u64, Arc<Nexus>>>,
    counters: Counters,
}

impl Unit {
    /// Nobody uses it yet.
    pub fn new(lun: u16, spec: UnitSpec) -> Self {
        Self {
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

    /// Its number.
    pub fn lun(&self) -> u16 {
        self.lun
    }

    /// What it is made of.
    pub fn spec(&self) -> &UnitSpec {
        &self.spec
    }

    /// What was done with it, by all sessions on all cores.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// An initiator sees it.
    pub fn is_seen_by(&self, initiator: &str) -> bool {
        is_listed(&self.spec.initiators, initiator)
    }

    /// What is set.
    #[inline]
    pub fn modes(&self) -> Modes {
        Modes(self.modes.load(Ordering::Relaxed))
    }

    /// Sets it; sessions other than the one that does are told.
    pub fn set_modes(&self, modes: Modes) {
        if self.modes.swap(modes.0, Ordering::Relaxed) != modes.0 {
            self.modes_changed.fetch_add(1, Ordering::Release);
            self.news.fetch_add(1, Ordering::Release);
        }
    }

    /// It is not to be had any more.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Counts what sessions have to look at.
    #[inline]
    pub fn news(&self) -> u32 {
        self.news.load(Ordering::Acquire)
    }

    /// Changes of what is set, and resets.
    pub fn changes(&self) -> (u32, u32) {
        (self.modes_changed.load(Ordering::Acquire), self.resets.load(Ordering::Acquire))
    }

    /// Sessions that use it.
    pub fn sessions(&self) -> usize {
        lock(&self.nexuses).len()
    }

    /// The sessions that use it, by their numbers.
    pub fn users(&self) -> Vec<u64> {
        lock(&self.nexuses).keys().copied().collect()
    }

    /// A session begins to use it.
    ///
    /// # Errors
    /// When it is gone, or the host still has commands under way from a session before.
    pub fn enter(&self, session: u64, host: HostId, signal: Arc<Signal>) -> Result<Arc<Nexus>, NoEntry> {
        let nexus = Arc::new(Nexus { lun: self.lun, session, host, signal, orders: Mutex::default() });
        let mut nexuses = lock(&self.nexuses);
        // Under the lock: whoever removes the unit looks at the list after it has said so.
        if self.is_gone() {
            return Err(NoEntry::Gone);
        }
        if nexuses.values().any(|other| other.host == nexus.host) {
            return Err(NoEntry::Occupied);
        }
        nexuses.insert(session, nexus.clone());
        Ok(nexus)
    }

    /// A session uses it no more.
    pub fn leave(&self, session: u64) {
        let nexus = lock(&self.nexuses).remove(&session);
        // What was ordered meanwhile is done with the session.
        drop(nexus);
    }

    /// Resets it: what was set is forgotten, tasks are given up, and all sessions are told.  Ends when no task is left.
    pub fn reset(&self) -> Answered<()> {
        self.modes.store(Modes::DEFAULT.0, Ordering::Relaxed);
        self.resets.fetch_add(1, Ordering::Release);
        self.news.fetch_add(1, Ordering::Release);
        self.order(Order::Abort, |_| true)
    }

    /// Gives up the tasks of some sessions.  Ends when none is left.
    pub fn abort(&self, whose: impl Fn(&Nexus) -> bool) -> Answered<()> {
        self.order(Order::Abort, whose)
    }

    /// It is gone: new requests are refused, those under way are done.  Ends when nobody uses it.
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

/// A name is in a list, in which `*` at the end of an entry stands for anything; an empty list holds all.
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
