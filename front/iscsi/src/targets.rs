//! Target registry of the daemon, shared by all cores: lookup by name, and creation and removal of targets while hosts
//! are served.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use forebay_reactor::{Addr, timeout};

use crate::locks::{read, write};
use crate::memory::MemoryBudget;
use crate::scsi::unit::Unit;
use crate::scsi::{ScsiNaming, ScsiTarget, ScsiTargetSpec};
use crate::session::chap::Chap;
use crate::session::login::{Denied, LoggedIn, LoginAccess, LoginDirectory};
use crate::sessions::{RegisterError, SessionRegistration, SessionSnapshot};
use crate::stats::{ConnectionCounters, ScsiCounts};
use crate::target::{Catalog, Target, TargetSpec, TargetTeardown};
use crate::wire::login_status;

/// Maximum time that a login waits for the session that it reinstates.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(15);

/// Limits over all targets and cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetLimits {
    /// Maximum number of concurrent sessions.
    pub sessions_max: usize,
    /// Maximum number of concurrent sessions of one initiator, over all targets.
    pub sessions_per_initiator: usize,
    /// Memory in bytes for data in flight of all sessions; above it, the window of each session shrinks.
    pub memory_max: usize,
}

impl Default for TargetLimits {
    fn default() -> Self {
        Self { sessions_max: 4096, sessions_per_initiator: 256, memory_max: 512 << 20 }
    }
}

/// Name of an existing target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("target {0} exists already")]
pub struct Exists(pub String);

/// Target registry with its shared state.  Cloning gives another handle.
#[derive(Clone)]
pub struct Targets(Arc<Registry>);

struct Registry {
    limits: TargetLimits,
    targets: RwLock<BTreeMap<String, Target>>,
    /// Set while targets are expected whose names are not known yet.
    expects_more: AtomicBool,
    catalog: Arc<Catalog>,
    /// Target of discovery sessions, without units.
    discovery: ScsiTarget,
    discovery_chap: RwLock<Option<Chap>>,
    portals: RwLock<Vec<Addr>>,
    memory: MemoryBudget,
    counters: ConnectionCounters,
}

impl fmt::Debug for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.read().keys()).finish()
    }
}

impl Targets {
    /// Creates a registry without targets.
    pub fn new(limits: TargetLimits) -> Self {
        Self(Arc::new(Registry {
            memory: MemoryBudget::new(limits.memory_max),
            limits,
            targets: RwLock::default(),
            expects_more: AtomicBool::new(false),
            catalog: Arc::default(),
            discovery: ScsiTarget::new(
                ScsiTargetSpec { name: "discovery".into(), naming: ScsiNaming::Iscsi("".into()), ports: None },
                Arc::default(),
            ),
            discovery_chap: RwLock::default(),
            portals: RwLock::default(),
            counters: ConnectionCounters::default(),
        }))
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, Target>> {
        read(&self.0.targets)
    }

    // ---- Targets ----

    /// Creates a target.
    ///
    /// # Errors
    /// [`Exists`] when there is one of the same name.
    pub fn create(&self, spec: TargetSpec) -> Result<Target, Exists> {
        self.create_with(spec, |_| {})
    }

    /// Creates a target that is suspended: logins are refused as unavailable until [`Target::resume`].
    ///
    /// # Errors
    /// [`Exists`] when there is one of the same name.
    pub fn create_suspended(&self, spec: TargetSpec) -> Result<Target, Exists> {
        // Without sessions nothing has to end.
        self.create_with(spec, |target| drop(target.suspend()))
    }

    fn create_with(&self, spec: TargetSpec, set_up: impl FnOnce(&Target)) -> Result<Target, Exists> {
        let name = spec.name.to_ascii_lowercase();
        let mut targets = write(&self.0.targets);
        if targets.contains_key(&name) {
            return Err(Exists(name));
        }
        let target = Target::new(spec, self.0.catalog.clone());
        set_up(&target);
        targets.insert(name, target.clone());
        Ok(target)
    }

    /// Sets whether targets are expected whose names are not known yet.  Meanwhile a login to an unknown target is refused as
    /// unavailable, which initiators repeat; otherwise as not found.
    pub fn set_expecting(&self, expects_more: bool) {
        self.0.expects_more.store(expects_more, Ordering::Release);
    }

    /// Returns a target by its name.
    pub fn get(&self, name: &str) -> Option<Target> {
        self.read().get(&name.to_ascii_lowercase()).cloned()
    }

    /// Removes a target: new logins are refused, its sessions complete the commands in flight and are asked to log out.
    /// The future completes when sessions and units are gone; before that its volumes must not be exported again.
    pub fn remove(&self, name: &str) -> Option<TargetTeardown> {
        let removed = write(&self.0.targets).remove(&name.to_ascii_lowercase());
        removed.map(|target| target.end())
    }

    /// Returns all targets, ordered by name.
    pub fn all(&self) -> Vec<Target> {
        self.read().values().cloned().collect()
    }

    /// Returns the first target after `after`, by name, that an initiator may log in to, and that is not hidden.
    pub(crate) fn next_visible(&self, after: Option<&str>, initiator: &str) -> Option<Target> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let targets = self.read();
        let mut following = targets.range::<str, _>((after, Bound::Unbounded)).map(|(_, target)| target);
        following.find(|target| target.admits(initiator) && !target.is_hidden()).cloned()
    }

    /// Ends all sessions of an initiator with a target: commands in flight are completed, and the host is asked to log
    /// out.  Returns `None` if there is no such target.
    pub fn expel(&self, target: &str, initiator: &str) -> Option<TargetTeardown> {
        self.get(target).map(|target| target.expel(initiator))
    }

    /// Returns the units and ports that a session sees with a target, or with none.
    pub(crate) fn scsi_target(&self, target: Option<&Target>) -> ScsiTarget {
        target.map_or(&self.0.discovery, Target::scsi).clone()
    }

    /// Returns a unit of any target by its volume name.
    pub fn unit_by_name(&self, name: &str) -> Option<Arc<Unit>> {
        self.0.catalog.units.unit_by_name(name)
    }

    // ---- Portals ----

    /// Returns the counters of connections.
    pub fn counters(&self) -> &ConnectionCounters {
        &self.0.counters
    }

    /// Sets the CHAP settings of discovery sessions, for new logins.
    pub fn set_discovery_chap(&self, chap: Option<Chap>) {
        *write(&self.0.discovery_chap) = chap;
    }

    /// Sets the addresses that discovery returns, for the own target port group of each target.  Unspecified addresses
    /// are omitted, so that a target with [port groups](crate::PortGroups) requires others.
    pub fn set_portals(&self, portals: Vec<Addr>) {
        *write(&self.0.portals) = portals;
    }

    /// Returns the addresses that discovery returns.
    pub fn portals(&self) -> Vec<Addr> {
        read(&self.0.portals).clone()
    }

    // ---- Sessions ----

    /// Returns snapshots of all sessions, ordered by TSIH.
    pub fn sessions(&self) -> Vec<SessionSnapshot> {
        self.0.catalog.sessions.all().iter().map(|session| SessionSnapshot::from(&**session)).collect()
    }

    /// Returns the number of sessions.
    pub fn session_count(&self) -> usize {
        self.0.catalog.sessions.count()
    }

    /// Returns command counters by initiator, over its current and ended sessions.
    pub fn hosts(&self) -> BTreeMap<String, ScsiCounts> {
        self.0.catalog.sessions.hosts()
    }

    /// Begins a session. A session of the same initiator port with the same target is ended first, including its
    /// commands in flight.
    ///
    /// # Errors
    /// The login status, and the reason for the log.
    pub async fn enter(
        &self,
        login: &LoggedIn,
        peer: String,
        since: Duration,
    ) -> Result<SessionRegistration, (u16, &'static str)> {
        let target = match &login.target {
            None => None,
            // A target recreated under the same name meanwhile is a different one: the login did not authenticate to
            // it.
            Some(name) => match self.get(name).filter(|target| target.id() == login.target_id) {
                Some(target) => Some(target),
                None => return Err((login_status::NOT_FOUND, "the target has been removed")),
            },
        };
        let Registry { catalog, limits, .. } = &*self.0;
        let entered = timeout(REPLACE_TIMEOUT, async {
            loop {
                match catalog.sessions.enter(login, target.as_ref(), limits, &peer, since) {
                    Ok(entered) => return Ok(entered),
                    // An error means the session was dropped; either way it is gone.
                    Err(RegisterError::Replaces(gone)) => drop(gone.await),
                    Err(RegisterError::Refused(status, why)) => return Err((status, why)),
                }
            }
        });
        entered.await.unwrap_or(Err((login_status::UNAVAILABLE, "the session that the login reinstates does not end")))
    }

    // ---- Memory ----

    /// Returns the memory budget for data in flight of all sessions.
    pub(crate) fn budget(&self) -> &MemoryBudget {
        &self.0.memory
    }

    /// Returns the bytes that all sessions hold for data in flight.
    pub fn memory(&self) -> usize {
        self.0.memory.taken()
    }
}

impl LoginDirectory for Targets {
    fn target(&self, target: &str, initiator: &str) -> Result<LoginAccess, Denied> {
        let target = self.get(target).ok_or_else(|| match self.0.expects_more.load(Ordering::Acquire) {
            true => Denied::Expected,
            false => Denied::NotFound,
        })?;
        if !target.admits(initiator) {
            return Err(Denied::Forbidden);
        }
        if target.is_suspended() {
            return Err(Denied::Suspended);
        }
        Ok(LoginAccess { target_id: target.id(), portal_group: target.own_port().group, chap: target.chap() })
    }

    fn discovery(&self, initiator: &str) -> Result<LoginAccess, Denied> {
        if !self.read().values().any(|target| target.admits(initiator)) {
            return Err(Denied::Unlisted);
        }
        let chap = read(&self.0.discovery_chap).clone();
        Ok(LoginAccess { chap, ..LoginAccess::default() })
    }

    fn has_session(&self, tsih: u16) -> bool {
        self.0.catalog.sessions.has(tsih)
    }
}

#[cfg(test)]
mod tests;
