//! Session registry of all targets: existing sessions, session reinstatement, and orphaned tasks of ended sessions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use forebay_reactor::cross::{OneshotReceiver, OneshotSender, oneshot};

use crate::locks::lock;
use crate::session::login::LoggedIn;
use crate::signal::{Signal, Stop};
use crate::stats::{ScsiCounters, ScsiCounts};
use crate::target::Target;
use crate::targets::TargetLimits;
use crate::wire::login_status;

/// Number of available TSIHs: zero is reserved.
const NUMBERS: usize = u16::MAX as usize - 1;

/// iSCSI session.
pub struct IscsiSession {
    /// Session id, never reused.
    pub id: u64,
    /// Target session identifying handle (TSIH).
    pub tsih: u16,
    /// Initiator name.
    pub initiator: String,
    /// Initiator session id (ISID).
    pub isid: [u8; 6],
    /// Target of the session; `None` in a discovery session.
    pub target: Option<Target>,
    /// Address of the initiator.
    pub peer: String,
    /// Login time, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// Wakes the session's task.
    pub signal: Arc<Signal>,
    /// Command counters of the session.
    pub counters: Arc<ScsiCounters>,
    waiters: Mutex<Vec<OneshotSender<()>>>,
}

impl IscsiSession {
    /// Returns true for a discovery session.
    pub fn is_discovery(&self) -> bool {
        self.target.is_none()
    }

    fn port(&self) -> Port {
        Port {
            initiator: self.initiator.clone(),
            target: self.target.as_ref().map_or(DISCOVERY, Target::id),
            isid: self.isid,
        }
    }

    /// Ends the session for `why`.  The answer arrives once none of its commands is in flight, or those in flight are
    /// orphaned.
    fn end(&self, why: Stop) -> OneshotReceiver<()> {
        let (answer, answered) = oneshot();
        lock(&self.waiters).push(answer);
        self.signal.stop(why);
        answered
    }
}

impl fmt::Debug for IscsiSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IscsiSession({} of {} at {})", self.tsih, self.initiator, self.peer)
    }
}

/// Session snapshot.
#[derive(Debug, Clone)]
pub struct SessionSnapshot {
    /// Initiator name.
    pub initiator: String,
    /// Target name; `None` in a discovery session.
    pub target: Option<String>,
    /// Address of the initiator.
    pub peer: String,
    /// Target session identifying handle (TSIH).
    pub tsih: u16,
    /// Login time, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// Command counters of the session.
    pub numbers: ScsiCounts,
}

impl From<&IscsiSession> for SessionSnapshot {
    fn from(session: &IscsiSession) -> Self {
        Self {
            initiator: session.initiator.clone(),
            target: session.target.as_ref().map(|target| target.name().to_owned()),
            peer: session.peer.clone(),
            tsih: session.tsih,
            since: session.since,
            numbers: session.counters.snapshot(),
        }
    }
}

/// Placeholder for the target id of discovery sessions.
const DISCOVERY: u64 = 0;

/// Session identity: a login with the same identity reinstates the session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Port {
    initiator: String,
    target: u64,
    isid: [u8; 6],
}

/// Session registry of the daemon.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_tsih: BTreeMap<u16, Arc<IscsiSession>>,
    by_port: BTreeMap<Port, Arc<IscsiSession>>,
    by_target: BTreeMap<u64, BTreeMap<u64, Arc<IscsiSession>>>,
    last_tsih: u16,
    last_id: u64,
    /// Number of ended sessions with orphaned tasks, by initiator.
    leaving: BTreeMap<String, usize>,
    leaving_count: usize,
    /// Command counters of ended sessions, by initiator.
    gone: BTreeMap<String, ScsiCounts>,
    gone_max: usize,
}

/// Reason for which a session cannot begin.
pub(crate) enum RegisterError {
    /// Login status, and the reason for the log.
    Refused(u16, &'static str),
    /// Session of the same initiator port, which is being ended.
    Replaces(OneshotReceiver<()>),
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Registers a session, unless one of the same initiator port has to end first.
    pub(crate) fn enter(
        self: &Arc<Self>,
        login: &LoggedIn,
        target: Option<&Target>,
        limits: &TargetLimits,
        peer: &str,
        since: Duration,
    ) -> Result<SessionRegistration, RegisterError> {
        let mut table = self.lock();
        if let Some(target) = target {
            // Checked under the lock: removing a target or an initiator ends its sessions under the same lock.
            if target.is_removed() {
                return Err(RegisterError::Refused(login_status::NOT_FOUND, "the target has been removed"));
            }
            if target.is_suspended() {
                return Err(RegisterError::Refused(login_status::UNAVAILABLE, "the target is suspended"));
            }
            if !target.admits(&login.initiator) {
                return Err(RegisterError::Refused(
                    login_status::FORBIDDEN,
                    "the initiator is not in the target's list",
                ));
            }
        }
        let port =
            Port { initiator: login.initiator.clone(), target: target.map_or(DISCOVERY, Target::id), isid: login.isid };
        if let Some(before) = table.by_port.get(&port) {
            return Err(RegisterError::Replaces(before.end(Stop::Reinstated)));
        }
        if table.by_tsih.len() + table.leaving_count >= limits.sessions_max.min(NUMBERS)
            || table.of_initiator(&login.initiator, target.is_none()) >= limits.sessions_per_initiator
        {
            return Err(RegisterError::Refused(login_status::OUT_OF_RESOURCES, "too many sessions"));
        }
        table.last_id += 1;
        table.gone_max = limits.sessions_max;
        let session = Arc::new(IscsiSession {
            id: table.last_id,
            tsih: table.free_tsih(),
            initiator: login.initiator.clone(),
            isid: login.isid,
            target: target.cloned(),
            peer: peer.to_owned(),
            since,
            signal: Arc::default(),
            counters: Arc::default(),
            waiters: Mutex::default(),
        });
        table.by_tsih.insert(session.tsih, session.clone());
        table.by_target.entry(port.target).or_default().insert(session.id, session.clone());
        table.by_port.insert(port, session.clone());
        drop(table);
        Ok(SessionRegistration { sessions: self.clone(), session })
    }

    /// Ends the sessions of a target for which `whose` returns true; each answer arrives when its session is gone.
    /// `first` runs before, under the lock that also guards the start of sessions.
    pub(crate) fn end(
        &self,
        target: u64,
        why: Stop,
        first: impl FnOnce(),
        whose: impl Fn(&IscsiSession) -> bool,
    ) -> Vec<OneshotReceiver<()>> {
        let table = self.lock();
        first();
        let sessions = table.by_target.get(&target).into_iter().flat_map(BTreeMap::values);
        sessions.filter(|session| whose(session)).map(|session| session.end(why)).collect()
    }

    /// Returns true if there is a session with this TSIH.
    pub(crate) fn has(&self, tsih: u16) -> bool {
        self.lock().by_tsih.contains_key(&tsih)
    }

    /// Returns all sessions, ordered by TSIH.
    pub(crate) fn all(&self) -> Vec<Arc<IscsiSession>> {
        self.lock().by_tsih.values().cloned().collect()
    }

    /// Returns the sessions of a target, in the order in which they began.
    pub(crate) fn of(&self, target: u64) -> Vec<Arc<IscsiSession>> {
        self.lock().by_target.get(&target).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Returns the number of sessions.
    pub(crate) fn count(&self) -> usize {
        self.lock().by_tsih.len()
    }

    /// Returns the number of sessions of a target.
    pub(crate) fn count_of(&self, target: u64) -> usize {
        self.lock().by_target.get(&target).map_or(0, BTreeMap::len)
    }

    /// Returns command counters by initiator, over its current and ended sessions.
    pub(crate) fn hosts(&self) -> BTreeMap<String, ScsiCounts> {
        let table = self.lock();
        let mut hosts = table.gone.clone();
        for session in table.by_tsih.values() {
            hosts.entry(session.initiator.clone()).or_default().add(&session.counters.snapshot());
        }
        hosts
    }
}

impl Table {
    /// Counts the sessions of an initiator, either discovery or normal ones; sessions with orphaned tasks count as
    /// both.
    fn of_initiator(&self, initiator: &str, discovery: bool) -> usize {
        let port = |target: u64, isid: u8| Port { initiator: initiator.to_owned(), target, isid: [isid; 6] };
        let range = match discovery {
            true => port(DISCOVERY, 0)..=port(DISCOVERY, u8::MAX),
            false => port(DISCOVERY + 1, 0)..=port(u64::MAX, u8::MAX),
        };
        self.by_port.range(range).count() + self.leaving.get(initiator).copied().unwrap_or(0)
    }

    /// Returns an unused TSIH.  RFC 7143 requires it to be unique between an initiator and a target portal group
    /// (section 4.4.1). This one is unique in the daemon, since a login names it before its target is known.
    fn free_tsih(&mut self) -> u16 {
        loop {
            self.last_tsih = self.last_tsih.checked_add(1).unwrap_or(1);
            if !self.by_tsih.contains_key(&self.last_tsih) {
                return self.last_tsih;
            }
        }
    }
}

/// Registration of a session, removed when it is dropped.
#[derive(Debug)]
pub struct SessionRegistration {
    sessions: Arc<Sessions>,
    session: Arc<IscsiSession>,
}

impl SessionRegistration {
    /// Returns the session.
    pub fn session(&self) -> &Arc<IscsiSession> {
        &self.session
    }

    /// Ends the session while some of its commands are in flight: it still counts against the limits.
    pub fn leave(self) -> OrphanRegistration {
        let mut table = self.sessions.lock();
        *table.leaving.entry(self.session.initiator.clone()).or_default() += 1;
        table.leaving_count += 1;
        drop(table);
        OrphanRegistration { sessions: self.sessions.clone(), session: self.session.clone() }
    }
}

impl Drop for SessionRegistration {
    fn drop(&mut self) {
        let session = &self.session;
        let mut table = self.sessions.lock();
        let port = session.port();
        table.by_tsih.remove(&session.tsih);
        table.by_port.remove(&port);
        if let Some(of_target) = table.by_target.get_mut(&port.target) {
            of_target.remove(&session.id);
            if of_target.is_empty() {
                table.by_target.remove(&port.target);
            }
        }
        // The number of remembered initiators is limited to the maximum number of sessions, so that made-up names take
        // no memory.
        if table.gone.contains_key(&session.initiator) || table.gone.len() < table.gone_max {
            let numbers = session.counters.snapshot();
            table.gone.entry(session.initiator.clone()).or_default().add(&numbers);
        }
        drop(table);
        for waiter in std::mem::take(&mut *lock(&session.waiters)) {
            waiter.send(());
        }
    }
}

/// Registration of an ended session with orphaned tasks.
#[derive(Debug)]
pub struct OrphanRegistration {
    sessions: Arc<Sessions>,
    session: Arc<IscsiSession>,
}

impl OrphanRegistration {
    /// Returns the ended session.
    pub fn session(&self) -> &Arc<IscsiSession> {
        &self.session
    }
}

impl Drop for OrphanRegistration {
    fn drop(&mut self) {
        let mut table = self.sessions.lock();
        if let Some(count) = table.leaving.get_mut(&self.session.initiator) {
            *count -= 1;
            if *count == 0 {
                table.leaving.remove(&self.session.initiator);
            }
            table.leaving_count -= 1;
        }
    }
}
