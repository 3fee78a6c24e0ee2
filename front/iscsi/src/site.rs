//! The target with its units and sessions, as all cores see it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use forebay_reactor::cross::{Answer, Answered, oneshot};
use forebay_reactor::{Addr, timeout};

use crate::session::chap::Chap;
use crate::session::login::{Access, Denied, Directory, LoggedIn};
use crate::signal::{Signal, Stop};
use crate::stats::{Counters, SiteCounters, Snapshot};
use crate::unit::{Unit, UnitSpec, is_listed, lock};
use crate::wire::{Lun, login_status};

/// How long a login waits for the session that it replaces.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(15);

/// Who may log in, and what they prove.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gatekeeping {
    /// Initiators that may log in; all may when there is none.
    pub initiators: Vec<String>,
    /// CHAP for sessions.
    pub chap: Option<Chap>,
    /// CHAP for asking which targets there are.
    pub discovery_chap: Option<Chap>,
}

/// Limits over all cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Sessions at a time.
    pub sessions_max: usize,
    /// Sessions of one initiator at a time.
    pub sessions_per_initiator: usize,
    /// Bytes that all sessions together hold for data under way, past which each makes do with one command.
    pub memory_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sessions_max: 4096, sessions_per_initiator: 256, memory_max: 512 << 20 }
    }
}

/// A unit's number that no target can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("LUN {0} is out of range: a target has LUNs from 0 to {max}", max = Lun::MAX)]
pub struct LunOutOfRange(pub u32);

/// The target, its units and its sessions.  Cloning gives another handle.
#[derive(Debug, Clone)]
pub struct Site(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    target: String,
    limits: Limits,
    gatekeeping: RwLock<Gatekeeping>,
    units: RwLock<BTreeMap<u16, Arc<Unit>>>,
    /// Counts changes of the list of units.
    generation: AtomicU32,
    sessions: Mutex<Sessions>,
    next_session: AtomicU64,
    memory: AtomicUsize,
    /// Sessions that wait for memory.
    waiting: Mutex<Vec<Arc<Signal>>>,
    anybody_waits: AtomicBool,
    portals: RwLock<Vec<Addr>>,
    counters: SiteCounters,
}

#[derive(Debug, Default)]
struct Sessions {
    by_tsih: BTreeMap<u16, Arc<Session>>,
    last_tsih: u16,
    /// Initiators of sessions that are gone but for commands that are not done, one entry a session.
    leaving: Vec<String>,
    /// What initiators have done through sessions that are gone.
    gone: BTreeMap<String, Snapshot>,
}

/// A session.
pub struct Session {
    /// Its number, never used again.
    pub id: u64,
    /// Its number in the protocol.
    pub tsih: u16,
    /// The initiator's name.
    pub initiator: String,
    /// The initiator's part of its name.
    pub isid: [u8; 6],
    /// It only asks which targets there are.
    pub discovery: bool,
    /// Where from.
    pub peer: String,
    /// When, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// How it is reached.
    pub signal: Arc<Signal>,
    /// What it has done.
    pub counters: Counters,
    waiters: Mutex<Vec<Answer<()>>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({} of {} at {})", self.tsih, self.initiator, self.peer)
    }
}

/// A session at one moment.
#[derive(Debug, Clone)]
pub struct SessionSnapshot {
    /// The initiator's name.
    pub initiator: String,
    /// Where from.
    pub peer: String,
    /// Its number in the protocol.
    pub tsih: u16,
    /// It only asks which targets there are.
    pub discovery: bool,
    /// When it began, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// What it has done.
    pub numbers: Snapshot,
}

/// A unit at one moment.
#[derive(Debug, Clone)]
pub struct UnitSnapshot {
    /// Its number.
    pub lun: u16,
    /// Its name for people.
    pub name: String,
    /// Sessions that use it.
    pub sessions: usize,
    /// What was done with it.
    pub numbers: Snapshot,
}

impl Site {
    /// A target without units.
    pub fn new(target: impl Into<String>, limits: Limits) -> Self {
        Self(Arc::new(Shared {
            target: target.into().to_ascii_lowercase(),
            limits,
            gatekeeping: RwLock::default(),
            units: RwLock::default(),
            generation: AtomicU32::new(0),
            sessions: Mutex::default(),
            next_session: AtomicU64::new(1),
            memory: AtomicUsize::new(0),
            waiting: Mutex::default(),
            anybody_waits: AtomicBool::new(false),
            portals: RwLock::default(),
            counters: SiteCounters::default(),
        }))
    }

    /// The target's name.
    pub fn target(&self) -> &str {
        &self.0.target
    }

    /// What is counted besides commands.
    pub fn counters(&self) -> &SiteCounters {
        &self.0.counters
    }

    /// Says who may log in from now on.
    pub fn set_gatekeeping(&self, gatekeeping: Gatekeeping) {
        *self.0.gatekeeping.write().unwrap_or_else(PoisonError::into_inner) = gatekeeping;
    }

    /// Says where hosts connect to, for those who ask which targets there are.
    pub fn set_portals(&self, portals: Vec<Addr>) {
        *self.0.portals.write().unwrap_or_else(PoisonError::into_inner) = portals;
    }

    /// Where hosts connect to.
    pub fn portals(&self) -> Vec<Addr> {
        self.0.portals.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Offers a unit, in the place of one that has its number.
    ///
    /// # Errors
    /// When the number is past [`Lun::MAX`]; nothing has changed then.
    pub fn add(&self, lun: u32, spec: UnitSpec) -> Result<Arc<Unit>, LunOutOfRange> {
        let lun = u16::try_from(lun).ok().filter(|lun| *lun <= Lun::MAX).ok_or(LunOutOfRange(lun))?;
        let unit = Arc::new(Unit::new(lun, spec));
        let before = self.write_units(|units| units.insert(lun, unit.clone()));
        if let Some(before) = before {
            drop(before.remove());
        }
        Ok(unit)
    }

    /// Offers a unit no more.  The future ends when what was under way is done and nobody holds it any more.
    pub fn remove(&self, lun: u16) -> Option<Answered<()>> {
        let unit = self.write_units(|units| units.remove(&lun));
        unit.map(|unit| unit.remove())
    }

    fn write_units<T>(&self, change: impl FnOnce(&mut BTreeMap<u16, Arc<Unit>>) -> T) -> T {
        let result = change(&mut self.0.units.write().unwrap_or_else(PoisonError::into_inner));
        self.0.generation.fetch_add(1, Ordering::Release);
        result
    }

    /// Counts changes of the list of units.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// A unit, as far as an initiator sees it.
    pub fn unit(&self, lun: u16, initiator: &str) -> Option<Arc<Unit>> {
        let units = self.0.units.read().unwrap_or_else(PoisonError::into_inner);
        units.get(&lun).filter(|unit| unit.is_seen_by(initiator)).cloned()
    }

    /// The units that an initiator sees, in order.
    pub fn luns(&self, initiator: &str) -> Vec<u16> {
        let units = self.0.units.read().unwrap_or_else(PoisonError::into_inner);
        units.values().filter(|unit| unit.is_seen_by(initiator)).map(|unit| unit.lun()).collect()
    }

    /// Every unit that an initiator sees.
    pub fn units_of(&self, initiator: &str) -> Vec<Arc<Unit>> {
        let units = self.0.units.read().unwrap_or_else(PoisonError::into_inner);
        units.values().filter(|unit| unit.is_seen_by(initiator)).cloned().collect()
    }

    /// All units.
    pub fn units(&self) -> Vec<UnitSnapshot> {
        let units: Vec<Arc<Unit>> =
            self.0.units.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        let describe = |unit: Arc<Unit>| UnitSnapshot {
            lun: unit.lun(),
            name: unit.spec().name.clone(),
            sessions: unit.sessions(),
            numbers: unit.counters().snapshot(),
        };
        units.into_iter().map(describe).collect()
    }

    /// All sessions.
    pub fn sessions(&self) -> Vec<SessionSnapshot> {
        let sessions: Vec<Arc<Session>> = lock(&self.0.sessions).by_tsih.values().cloned().collect();
        let describe = |session: Arc<Session>| SessionSnapshot {
            initiator: session.initiator.clone(),
            peer: session.peer.clone(),
            tsih: session.tsih,
            discovery: session.discovery,
            since: session.since,
            numbers: session.counters.snapshot(),
        };
        sessions.into_iter().map(describe).collect()
    }

    /// What each initiator has done, through the sessions it has now and those before them.
    pub fn hosts(&self) -> BTreeMap<String, Snapshot> {
        let sessions = lock(&self.0.sessions);
        let mut hosts = sessions.gone.clone();
        for session in sessions.by_tsih.values() {
            hosts.entry(session.initiator.clone()).or_default().add(&session.counters.snapshot());
        }
        hosts
    }

    /// How many sessions there are.
    pub fn session_count(&self) -> usize {
        lock(&self.0.sessions).by_tsih.len()
    }

    /// Ends the sessions that a target reset of an initiator is about: its own, and those that use a unit that it sees.
    /// Hosts that share nothing with it but the target go on.
    pub fn reset_by(&self, initiator: &str) {
        let users: BTreeSet<u64> = self.units_of(initiator).iter().flat_map(|unit| unit.users()).collect();
        let sessions: Vec<Arc<Session>> = lock(&self.0.sessions).by_tsih.values().cloned().collect();
        let meant = |session: &&Arc<Session>| session.initiator == initiator || users.contains(&session.id);
        let meant = sessions.iter().filter(|session| !session.discovery).filter(meant);
        meant.for_each(|session| session.signal.stop(Stop::Reset));
    }

    /// Begins a session; one of the same initiator port is ended first, and what it had under way is done before this
    /// one begins.
    ///
    /// # Errors
    /// The login's status.
    pub async fn enter(&self, login: &LoggedIn, peer: String, since: Duration) -> Result<Entered, u16> {
        let entered = timeout(REPLACE_TIMEOUT, async {
            loop {
                match self.try_enter(login, &peer, since) {
                    Ok(entered) => return Ok(entered),
                    // The session is gone when the answer is, one way or the other.
                    Err(Some(gone)) => drop(gone.await),
                    Err(None) => return Err(login_status::OUT_OF_RESOURCES),
                }
            }
        });
        entered.await.unwrap_or(Err(login_status::UNAVAILABLE))
    }

    fn try_enter(&self, login: &LoggedIn, peer: &str, since: Duration) -> Result<Entered, Option<Answered<()>>> {
        let mut sessions = lock(&self.0.sessions);
        let discovery = login.target.is_none();
        let same = |session: &&Arc<Session>| session.initiator == login.initiator && session.discovery == discovery;
        let port = sessions.by_tsih.values().filter(same).find(|session| session.isid == login.isid);
        if let Some(before) = port {
            let (answer, answered) = oneshot();
            lock(&before.waiters).push(answer);
            before.signal.stop(Stop::Reinstated);
            return Err(Some(answered));
        }
        let leaving = sessions.leaving.iter().filter(|initiator| **initiator == login.initiator).count();
        let of_initiator = sessions.by_tsih.values().filter(same).count() + leaving;
        let limits = &self.0.limits;
        if sessions.by_tsih.len() + sessions.leaving.len() >= limits.sessions_max.min(usize::from(u16::MAX) - 1)
            || of_initiator >= limits.sessions_per_initiator
        {
            return Err(None);
        }
        let tsih = loop {
            sessions.last_tsih = sessions.last_tsih.checked_add(1).unwrap_or(1);
            if !sessions.by_tsih.contains_key(&sessions.last_tsih) {
                break sessions.last_tsih;
            }
        };
        let session = Arc::new(Session {
            id: self.0.next_session.fetch_add(1, Ordering::Relaxed),
            tsih,
            initiator: login.initiator.clone(),
            isid: login.isid,
            discovery,
            peer: peer.to_owned(),
            since,
            signal: Arc::default(),
            counters: Counters::default(),
            waiters: Mutex::default(),
        });
        sessions.by_tsih.insert(tsih, session.clone());
        drop(sessions);
        Ok(Entered { site: self.clone(), session })
    }

    /// Sets aside memory for data that is here already, even where that is more than there should be.
    pub fn take_memory(&self, bytes: usize) {
        self.0.memory.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Sets aside memory if there is so much; otherwise `signal` is told when some has been given back.  Who is alone
    /// gets what it asks for.
    pub fn try_take_memory(&self, bytes: usize, signal: &Arc<Signal>) -> bool {
        let fits = |taken: usize| (taken == 0 || taken + bytes <= self.0.limits.memory_max).then_some(taken + bytes);
        let take = || self.0.memory.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        if take() {
            return true;
        }
        let mut waiting = lock(&self.0.waiting);
        if !waiting.iter().any(|other| Arc::ptr_eq(other, signal)) {
            waiting.push(signal.clone());
        }
        self.0.anybody_waits.store(true, Ordering::SeqCst);
        drop(waiting);
        // Some may have been given back before anybody knew that somebody waits.
        take()
    }

    /// Gives it back.
    pub fn give_memory(&self, bytes: usize) {
        self.0.memory.fetch_sub(bytes, Ordering::SeqCst);
        if self.0.anybody_waits.swap(false, Ordering::SeqCst) {
            std::mem::take(&mut *lock(&self.0.waiting)).iter().for_each(|signal| signal.tell());
        }
    }

    /// Half more than there should be is set aside.
    pub fn is_starved(&self) -> bool {
        self.memory() / 3 * 2 > self.0.limits.memory_max
    }

    /// There is memory for more than what must be.
    pub fn has_memory(&self) -> bool {
        self.0.memory.load(Ordering::Relaxed) < self.0.limits.memory_max
    }

    /// Bytes set aside now.
    pub fn memory(&self) -> usize {
        self.0.memory.load(Ordering::Relaxed)
    }
}

impl Directory for Site {
    fn target(&self, target: &str, initiator: &str) -> Result<Access, Denied> {
        if target != self.0.target {
            return Err(Denied::NotFound);
        }
        let gatekeeping = self.0.gatekeeping.read().unwrap_or_else(PoisonError::into_inner);
        if !is_listed(&gatekeeping.initiators, initiator) {
            return Err(Denied::Forbidden);
        }
        Ok(Access { chap: gatekeeping.chap.clone() })
    }

    fn discovery(&self, initiator: &str) -> Result<Access, Denied> {
        let gatekeeping = self.0.gatekeeping.read().unwrap_or_else(PoisonError::into_inner);
        if !is_listed(&gatekeeping.initiators, initiator) {
            return Err(Denied::Forbidden);
        }
        Ok(Access { chap: gatekeeping.discovery_chap.clone() })
    }

    fn has_session(&self, tsih: u16) -> bool {
        lock(&self.0.sessions).by_tsih.contains_key(&tsih)
    }
}

/// A session's place among the others, given up when it is dropped.
#[derive(Debug)]
pub struct Entered {
    site: Site,
    session: Arc<Session>,
}

impl Entered {
    /// The session.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The session ends, and some of its commands are not done: it still counts where sessions are counted.
    pub fn leave(self) -> Leaving {
        lock(&self.site.0.sessions).leaving.push(self.session.initiator.clone());
        Leaving { site: self.site.clone(), session: self.session.clone() }
    }
}

/// The place of a session that is gone but for commands that are not done.
#[derive(Debug)]
pub struct Leaving {
    site: Site,
    session: Arc<Session>,
}

impl Leaving {
    /// The session that was.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let mut sessions = lock(&self.site.0.sessions);
        if let Some(at) = sessions.leaving.iter().position(|initiator| *initiator == self.session.initiator) {
            sessions.leaving.swap_remove(at);
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut sessions = lock(&self.site.0.sessions);
        sessions.by_tsih.remove(&self.session.tsih);
        // So many names are remembered as there may be sessions; who makes names up is not.
        let known = sessions.gone.contains_key(&self.session.initiator);
        if known || sessions.gone.len() < self.site.0.limits.sessions_max {
            let numbers = self.session.counters.snapshot();
            sessions.gone.entry(self.session.initiator.clone()).or_default().add(&numbers);
        }
        drop(sessions);
        for waiter in std::mem::take(&mut *lock(&self.session.waiters)) {
            waiter.send(());
        }
    }
}
