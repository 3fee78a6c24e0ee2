//! iSCSI target: its name, its units, and its login ACL.

use std::collections::BTreeSet;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};
use std::task::{Context, Poll};

use forebay_reactor::cross::OneshotReceiver;

use crate::locks::{read, write};
use crate::port_groups::PortGroups;
use crate::scsi::ScsiNaming;
use crate::scsi::ports::TargetPort;
use crate::scsi::target::{AddError, ScsiTarget, ScsiTargetSpec, UnitCatalog, UnitSnapshot};
use crate::scsi::unit::{Unit, UnitSpec, is_listed};
use crate::session::chap::Chap;
use crate::sessions::{IscsiSession, SessionSnapshot, Sessions};
use crate::signal::Stop;

/// Login ACL and CHAP settings of a target.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessControl {
    /// Initiators that may log in; an empty list admits all.  `*` at the end of an entry matches any suffix.
    pub initiators: Vec<String>,
    /// CHAP settings of sessions; `None` disables authentication.
    pub chap: Option<Chap>,
}

/// Configuration of a new target.
#[derive(Debug, Clone, Default)]
pub struct TargetSpec {
    /// iSCSI name, of the form that [`is_name`](crate::session::login::is_name) checks; case-insensitive.
    pub name: String,
    /// Login ACL and CHAP settings.
    pub access: AccessControl,
    /// Target port groups; `None` for one group, number 1.
    pub port_groups: Option<PortGroups>,
}

/// State shared by the targets of one registry.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) units: Arc<UnitCatalog>,
}

/// iSCSI target.  Cloning gives another handle.
#[derive(Clone)]
pub struct Target(Arc<TargetState>);

struct TargetState {
    /// Its units and ports.
    scsi: ScsiTarget,
    access: RwLock<AccessControl>,
    port_groups: RwLock<Option<Arc<PortGroups>>>,
    /// Set while no host may log in.
    suspended: AtomicBool,
    /// Set while it is hidden from discovery if it has no units.
    hides_empty: AtomicBool,
    catalog: Arc<Catalog>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.name())
    }
}

/// Sessions that are ending, and units that are being released; completes when they are gone.  Dropping it does not
/// cancel this.
#[derive(Default)]
#[must_use = "without waiting, requests may still be in flight"]
pub struct TargetTeardown {
    answers: Vec<OneshotReceiver<()>>,
    sessions: usize,
}

impl TargetTeardown {
    /// Returns the number of sessions that are ended.
    pub fn sessions(&self) -> usize {
        self.sessions
    }
}

impl fmt::Debug for TargetTeardown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TargetTeardown({} sessions)", self.sessions)
    }
}

impl Future for TargetTeardown {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(answered) = self.answers.last_mut() {
            // A dropped answer counts as well: its holder is gone.
            if Pin::new(answered).poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.answers.pop();
        }
        Poll::Ready(())
    }
}

impl Target {
    pub(crate) fn new(spec: TargetSpec, catalog: Arc<Catalog>) -> Self {
        let name: Arc<str> = spec.name.to_ascii_lowercase().into();
        let port_groups = spec.port_groups.map(Arc::new);
        let scsi = ScsiTargetSpec {
            name: name.clone(),
            naming: ScsiNaming::Iscsi(name),
            ports: port_groups.as_ref().map(|groups| groups.target_ports()),
        };
        Self(Arc::new(TargetState {
            scsi: ScsiTarget::new(scsi, catalog.units.clone()),
            access: RwLock::new(spec.access),
            port_groups: RwLock::new(port_groups),
            suspended: AtomicBool::new(false),
            hides_empty: AtomicBool::new(false),
            catalog,
        }))
    }

    /// Returns the target id, from 1 on and never reused: a target recreated under the same name has another id.
    pub fn id(&self) -> u64 {
        self.0.scsi.id()
    }

    /// Returns the target name, in lower case.
    pub fn name(&self) -> &str {
        self.0.scsi.name()
    }

    /// Returns its units and ports.
    pub fn scsi(&self) -> &ScsiTarget {
        &self.0.scsi
    }

    // ---- Access ----

    /// Returns the login ACL and CHAP settings for new logins.
    pub fn access(&self) -> AccessControl {
        read(&self.0.access).clone()
    }

    /// Replaces the settings for new logins.  Existing sessions continue: [`expel_unlisted`](Self::expel_unlisted) ends
    /// those of initiators that may not log in any more.
    pub fn set_access(&self, access: AccessControl) {
        *write(&self.0.access) = access;
    }

    /// Returns true if the login ACL admits an initiator.
    pub fn admits(&self, initiator: &str) -> bool {
        is_listed(&read(&self.0.access).initiators, initiator)
    }

    /// Sets whether SendTargets omits it while it has no units.
    pub fn hide_empty(&self, hides_empty: bool) {
        self.0.hides_empty.store(hides_empty, Ordering::Release);
    }

    /// Returns true if SendTargets omits it.
    pub(crate) fn is_hidden(&self) -> bool {
        self.0.hides_empty.load(Ordering::Acquire) && self.unit_count() == 0
    }

    pub(crate) fn chap(&self) -> Option<Chap> {
        read(&self.0.access).chap.clone()
    }

    /// Ends all sessions of an initiator: commands in flight are completed, and the host is asked to log out.
    pub fn expel(&self, initiator: &str) -> TargetTeardown {
        self.end_sessions(|| {}, |session| session.initiator.eq_ignore_ascii_case(initiator))
    }

    /// Ends the sessions of the initiators that may not log in any more, as [`expel`](Self::expel) does.
    pub fn expel_unlisted(&self) -> TargetTeardown {
        self.end_sessions(|| {}, |session| !self.admits(&session.initiator))
    }

    fn end_sessions(&self, first: impl FnOnce(), whose: impl Fn(&IscsiSession) -> bool) -> TargetTeardown {
        let answers = self.0.catalog.sessions.end(self.id(), Stop::Logout, first, whose);
        TargetTeardown { sessions: answers.len(), answers }
    }

    // ---- Ports ----

    /// Returns the target port groups; `None` for one group, number 1.
    pub fn port_groups(&self) -> Option<Arc<PortGroups>> {
        read(&self.0.port_groups).clone()
    }

    /// Returns the target port of this daemon.
    pub fn own_port(&self) -> TargetPort {
        self.0.scsi.own_port()
    }

    /// Replaces the target port groups.  Sessions continue, also if the own group has another number: only new logins
    /// are told of it as portal group tag.
    ///
    /// If a group or a port has changed, all sessions get a unit attention for each unit that they use; portals concern
    /// discovery only.
    pub fn set_port_groups(&self, groups: Option<PortGroups>) {
        let groups = groups.map(Arc::new);
        let ports = groups.as_ref().map(|groups| groups.target_ports());
        // Both under the lock, so that they are of one list.
        let mut current = write(&self.0.port_groups);
        *current = groups;
        self.0.scsi.set_ports(ports);
    }

    // ---- Units ----

    /// Adds a unit, replacing the one with the same LUN.
    ///
    /// # Errors
    /// [`AddError`]; then nothing has changed.
    pub fn add(&self, lun: u32, spec: UnitSpec) -> Result<Arc<Unit>, AddError> {
        self.0.scsi.add(lun, spec)
    }

    /// Removes a unit.  The future completes when no request to it is in flight and no session holds it.
    pub fn remove(&self, lun: u16) -> Option<OneshotReceiver<()>> {
        self.0.scsi.remove(lun)
    }

    /// Returns the generation of the list of units.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.0.scsi.generation()
    }

    /// Returns a unit by its LUN, if the initiator sees it.
    pub fn unit(&self, lun: u16, initiator: &str) -> Option<Arc<Unit>> {
        self.0.scsi.unit(lun, initiator)
    }

    /// Returns a unit by its LUN.
    pub fn unit_at(&self, lun: u16) -> Option<Arc<Unit>> {
        self.0.scsi.unit_at(lun)
    }

    /// Returns a unit by its volume name.
    pub fn unit_by_name(&self, name: &str) -> Option<Arc<Unit>> {
        self.0.scsi.unit_by_name(name)
    }

    /// Returns the LUNs of the units that an initiator sees, in order.
    pub fn luns(&self, initiator: &str) -> Vec<u16> {
        self.0.scsi.luns(initiator)
    }

    /// Returns the units that an initiator sees, in order.
    pub fn units_of(&self, initiator: &str) -> Vec<Arc<Unit>> {
        self.0.scsi.units_of(initiator)
    }

    /// Returns snapshots of all units, in order of their LUNs.
    pub fn units(&self) -> Vec<UnitSnapshot> {
        self.0.scsi.units()
    }

    /// Returns the number of units.
    pub fn unit_count(&self) -> usize {
        self.0.scsi.unit_count()
    }

    // ---- Sessions ----

    /// Returns the sessions with this target, in the order in which they began.
    pub fn sessions(&self) -> Vec<SessionSnapshot> {
        self.0.catalog.sessions.of(self.id()).iter().map(|session| SessionSnapshot::from(&**session)).collect()
    }

    /// Returns the number of sessions with this target.
    pub fn session_count(&self) -> usize {
        self.0.catalog.sessions.count_of(self.id())
    }

    /// Ends the sessions affected by a target reset of an initiator: its own, and those that use a unit that it sees.
    /// Hosts that share nothing with it but the target continue.
    pub fn reset_by(&self, initiator: &str) {
        let users: BTreeSet<u64> = self.units_of(initiator).iter().flat_map(|unit| unit.users()).collect();
        let meant = |session: &IscsiSession| session.initiator == initiator || users.contains(&session.id);
        drop(self.0.catalog.sessions.end(self.id(), Stop::Reset, || {}, meant));
    }

    // ---- Suspension ----

    /// Returns true if no host may log in at the moment.
    pub fn is_suspended(&self) -> bool {
        self.0.suspended.load(Ordering::Acquire)
    }

    /// Ends all sessions, after their commands in flight, and refuses logins as unavailable until
    /// [`resume`](Self::resume): hosts use other paths meanwhile, and try again.  Units stay.
    pub fn suspend(&self) -> TargetTeardown {
        self.end_sessions(|| self.0.suspended.store(true, Ordering::Release), |_| true)
    }

    /// Admits logins again.
    pub fn resume(&self) {
        self.0.suspended.store(false, Ordering::Release);
    }

    // ---- Removal ----

    /// Returns true once the target has been removed from its registry.
    pub fn is_removed(&self) -> bool {
        self.0.scsi.is_removed()
    }

    /// Ends all sessions, releases all units, and refuses new ones of both.
    pub(crate) fn end(&self) -> TargetTeardown {
        let mut ending = self.end_sessions(|| self.0.scsi.set_removed(), |_| true);
        ending.answers.extend(self.0.scsi.remove_all());
        ending
    }
}
