//! Subsystems, shared by all cores.  A [`Subsystem`] has a name, namespaces, hosts that may connect, and
//! controllers.  The [`Subsystems`] of a process share ports, limits and counters.
//!
//! The path of an I/O command touches only two values here: the count of withdrawn namespaces, and the ANA state
//! of a group.  The locks are taken to attach volumes, when a host connects, and by the admin queue.

mod ana;
mod association;
mod limits;
mod namespace;
mod port;
mod registry;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use forebay_block::reservation::ReservationEvent;
use forebay_reactor::cross;

use crate::session::admin::{NAMESPACES_MAX, SubsystemIdentity};
use crate::session::auth::AuthSecrets;
use crate::session::psk::{TlsKey, TlsKeys};
use crate::session::{AsyncEvent, ControllerType};
use crate::wire::fabrics::{CNTLID_ANY, Connect, Wrong, connect_field};
use crate::wire::{NvmeStatus, reservation};
pub use ana::AnaGrouping;
use ana::NamespaceStates;
use association::StaleNamespaceIds;
pub(crate) use association::{Association, HostPath, Notice, NvmeConnectionControl, watcher};
pub use limits::HostLimits;
pub(crate) use namespace::describe;
pub use namespace::{BLOCK_SHIFT, Namespace, NamespaceError};
use port::SubsystemPorts;
pub use port::{MemberPort, Port, PortAddress};
use registry::{Controllers, RegistryState};
pub use registry::{SubsystemExists, Subsystems};

/// Access control of a subsystem: the hosts that may connect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HostAccess {
    /// Any host.
    #[default]
    Anyone,
    /// Listed hosts, by NQN, with the keys for authentication if required.
    Listed(BTreeMap<String, Option<Arc<AuthSecrets>>>),
}

impl HostAccess {
    /// Returns whether a host is among those that may connect.
    fn admits(&self, host: &str) -> bool {
        match self {
            Self::Anyone => true,
            Self::Listed(hosts) => hosts.contains_key(host),
        }
    }
}

/// Refusal of a Connect: the status and the invalid parameter, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectRefusal {
    pub(crate) status: NvmeStatus,
    pub(crate) wrong: Option<Wrong>,
}

impl ConnectRefusal {
    /// Refuses a Connect for an invalid parameter.
    pub(crate) fn parameter(wrong: Wrong) -> Self {
        Self { status: NvmeStatus::CONNECT_PARAMETER.final_(), wrong: Some(wrong) }
    }

    /// Refuses a Connect with another status.
    pub(crate) fn status(status: NvmeStatus) -> Self {
        Self { status, wrong: None }
    }
}

/// Number of the last reservation event of each namespace that was reported to hosts, by whichever core was
/// first.
#[derive(Debug, Default)]
struct ReportedEvents(Mutex<BTreeMap<u32, u64>>);

/// State of one subsystem; ports, limits and controllers are in [`RegistryState`].
struct SubsystemState {
    /// Number within the process; 0 for discovery.
    id: u32,
    kind: ControllerType,
    identity: SubsystemIdentity,
    cntlids: RangeInclusive<u16>,
    /// States of the namespaces' own ANA groups, where each has one.
    states: Option<NamespaceStates>,
    /// Ports in discovery, apart from the process's own.
    ports: RwLock<SubsystemPorts>,
    /// Id of the most recently created controller.
    last_cntlid: AtomicU16,
    namespaces: RwLock<BTreeMap<u32, Arc<Namespace>>>,
    /// UUID of the volume that last had each namespace id.
    volumes: Mutex<BTreeMap<u32, [u8; 16]>>,
    access: RwLock<Arc<HostAccess>>,
    tls_keys: RwLock<Arc<TlsKeys>>,
    reported: ReportedEvents,
    /// Set on removal: no host can connect any more.
    removed: AtomicBool,
    /// Set while Connects are refused as busy.
    held: AtomicBool,
    /// Set while it is hidden from discovery if it has no namespaces.
    hides_empty: AtomicBool,
    shared: Arc<RegistryState>,
}

/// Subsystem handle, shared by all cores.
#[derive(Clone)]
pub struct Subsystem(Arc<SubsystemState>);

impl fmt::Debug for Subsystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subsystem({})", self.0.identity.nqn)
    }
}

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Subsystem {
    /// Creates a subsystem without namespaces, to which every host may connect.
    fn new(
        id: u32,
        kind: ControllerType,
        identity: SubsystemIdentity,
        cntlids: RangeInclusive<u16>,
        grouping: AnaGrouping,
        shared: Arc<RegistryState>,
    ) -> Self {
        Self(Arc::new(SubsystemState {
            id,
            kind,
            identity,
            cntlids,
            states: match grouping {
                AnaGrouping::ByPort => None,
                AnaGrouping::ByNamespace => Some(NamespaceStates::new()),
            },
            ports: RwLock::default(),
            last_cntlid: AtomicU16::new(0),
            namespaces: RwLock::default(),
            volumes: Mutex::default(),
            access: RwLock::default(),
            tls_keys: RwLock::default(),
            reported: ReportedEvents::default(),
            removed: AtomicBool::new(false),
            held: AtomicBool::new(false),
            hides_empty: AtomicBool::new(false),
            shared,
        }))
    }

    /// Returns the immutable identity.
    pub fn identity(&self) -> &SubsystemIdentity {
        &self.0.identity
    }

    /// Returns the NQN.
    pub fn nqn(&self) -> &str {
        &self.0.identity.nqn
    }

    /// Returns the number within the process.
    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// Reports an event to every controller of the subsystem.
    pub fn announce(&self, event: AsyncEvent) {
        let all: Vec<_> = self.0.shared.controllers().of(self.0.id).cloned().collect();
        all.iter().for_each(|controller| controller.notice(Notice::Event(event)));
    }

    // ---- Namespaces ----

    /// Adds a namespace, or replaces the one with its id.  If the id belonged to another volume, existing controllers
    /// reject commands for it until their host has identified the namespace again: commands on their way were meant
    /// for the former volume.
    ///
    /// # Errors
    /// When an id is out of its range; nothing has changed then.
    pub fn add_namespace(&self, namespace: Namespace) -> Result<(), NamespaceError> {
        let nsid = namespace.nsid;
        if !(1..=NAMESPACES_MAX).contains(&nsid) {
            return Err(NamespaceError::Nsid(nsid));
        }
        let (group, max) = (namespace.ana_group, self.ana_groups_max());
        if !(1..=max).contains(&group) || self.0.states.is_some() && group != nsid {
            return Err(NamespaceError::AnaGroup { group, max });
        }
        let mut volumes = self.0.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        if volumes.insert(nsid, namespace.uuid).is_some_and(|before| before != namespace.uuid) {
            self.0.shared.controllers().of(self.0.id).for_each(|controller| controller.mark_stale(nsid));
        }
        drop(volumes);
        // Reservation events of the new volume are counted from the beginning.
        self.0.reported.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&nsid);
        let before = write(&self.0.namespaces).insert(nsid, Arc::new(namespace));
        self.namespaces_changed(nsid, before.is_some());
        Ok(())
    }

    /// Opens the device of a namespace again on every core, before the next command.  Hosts notice nothing.
    pub fn reopen_namespace(&self, nsid: u32) {
        if let Some(namespace) = write(&self.0.namespaces).get_mut(&nsid) {
            *namespace = Arc::new(Namespace::clone(namespace));
            self.0.shared.withdrawals.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Withdraws a namespace.  Commands that have begun continue; see
    /// [`NvmeServer::let_go`](crate::NvmeServer::let_go).
    pub fn remove_namespace(&self, nsid: u32) {
        if write(&self.0.namespaces).remove(&nsid).is_some() {
            if let Some(states) = &self.0.states {
                states.unset(nsid);
            }
            self.namespaces_changed(nsid, true);
        }
    }

    /// Reports to the hosts that the size of a namespace has changed.
    pub fn namespace_resized(&self, nsid: u32) {
        self.announce(AsyncEvent::Namespace(nsid));
    }

    /// Invalidates cached namespaces of connections if one was withdrawn, and reports the change to the hosts.
    fn namespaces_changed(&self, nsid: u32, withdrawn: bool) {
        if withdrawn {
            self.0.shared.withdrawals.fetch_add(1, Ordering::AcqRel);
        }
        self.0.shared.ana_changes.fetch_add(1, Ordering::AcqRel);
        if self.0.hides_empty.load(Ordering::Acquire) && self.namespace_count() < 2 {
            // Perhaps the first one, or the last one.
            self.0.shared.discovery_changed();
        }
        self.announce(AsyncEvent::Namespace(nsid));
    }

    /// Returns a namespace by id.
    pub fn namespace(&self, nsid: u32) -> Option<Arc<Namespace>> {
        read(&self.0.namespaces).get(&nsid).cloned()
    }

    /// Returns the ids of all namespaces, in order.
    pub fn namespace_ids(&self) -> Vec<u32> {
        read(&self.0.namespaces).keys().copied().collect()
    }

    /// Returns the number of namespaces.
    pub fn namespace_count(&self) -> usize {
        read(&self.0.namespaces).len()
    }

    // ---- Hosts and controllers ----

    /// Sets which hosts may connect from now on.  Connected hosts stay until [`expel`](Self::expel).
    pub fn set_access(&self, access: HostAccess) {
        *write(&self.0.access) = Arc::new(access);
        // The access list also decides which subsystems discovery shows to a host.
        self.0.shared.discovery_changed();
    }

    /// Sets the TLS keys of hosts from now on.  A host with a key can connect through TLS only.
    pub fn set_tls_keys(&self, hosts: &BTreeMap<String, TlsKey>) {
        *write(&self.0.tls_keys) = Arc::new(TlsKeys::new(hosts, &self.0.identity.nqn));
    }

    /// Returns whether any host has a TLS key.
    pub fn has_tls_keys(&self) -> bool {
        !self.tls_keys().is_empty()
    }

    /// Returns the TLS keys.
    pub(crate) fn tls_keys(&self) -> Arc<TlsKeys> {
        read(&self.0.tls_keys).clone()
    }

    /// Sets whether Connects are refused as busy, which hosts repeat: its namespaces are not complete yet.  A host that finds
    /// none drops the volumes that it has had.
    pub fn set_held(&self, held: bool) {
        self.0.held.store(held, Ordering::Release);
    }

    /// Returns whether Connects are refused as busy.
    pub fn is_held(&self) -> bool {
        self.0.held.load(Ordering::Acquire)
    }

    /// Sets whether discovery omits it while it has no namespaces.
    pub fn hide_empty(&self, hides_empty: bool) {
        if self.0.hides_empty.swap(hides_empty, Ordering::AcqRel) != hides_empty {
            self.0.shared.discovery_changed();
        }
    }

    /// Returns whether discovery omits it.
    fn is_hidden(&self) -> bool {
        self.0.hides_empty.load(Ordering::Acquire) && self.namespace_count() == 0
    }

    /// Returns whether a host may connect.
    pub(crate) fn admits(&self, host: &str) -> bool {
        read(&self.0.access).admits(host)
    }

    /// Ends the controllers of hosts that may no longer connect, after their commands in flight.  Returns these
    /// hosts.
    pub fn expel(&self) -> Vec<String> {
        let access = read(&self.0.access).clone();
        let refused: Vec<Arc<Association>> =
            self.0.shared.controllers().of(self.0.id).filter(|each| !access.admits(&each.host)).cloned().collect();
        refused.iter().for_each(|each| each.end_queues(true));
        let mut hosts: Vec<String> = refused.iter().map(|each| each.host.clone()).collect();
        hosts.sort();
        hosts.dedup();
        hosts
    }

    /// Returns the ids of the I/O controllers, in ascending order.
    pub fn controller_ids(&self) -> Vec<u16> {
        self.0
            .shared
            .controllers()
            .of(self.0.id)
            .filter(|each| each.kind == ControllerType::Io)
            .map(|each| each.cntlid)
            .collect()
    }

    /// Returns the number of controllers.
    pub fn controller_count(&self) -> usize {
        self.0.shared.controllers().of(self.0.id).count()
    }

    /// Creates a controller for a host that connects its admin queue.
    ///
    /// # Errors
    /// A refusal, if the host is not allowed, a parameter is invalid, a limit is reached or the subsystem was
    /// removed.
    fn connect_admin(
        &self,
        connect: &Connect,
        path: HostPath,
        control: &Arc<NvmeConnectionControl>,
    ) -> Result<(Arc<Association>, cross::Receiver<Notice>), ConnectRefusal> {
        if connect.cntlid != CNTLID_ANY {
            return Err(ConnectRefusal::parameter(connect_field::CNTLID));
        }
        let mut controllers = self.0.shared.controllers();
        // Checked under the lock: a host removed from the list earlier is refused, one removed later is expelled.
        let keys = match (&**read(&self.0.access), self.0.kind) {
            // Discovery reveals nothing worth a secret, and hosts need it to learn that they need one.
            (HostAccess::Anyone, _) | (_, ControllerType::Discovery) => None,
            (HostAccess::Listed(hosts), ControllerType::Io) => match hosts.get(&connect.host) {
                None => return Err(ConnectRefusal::status(NvmeStatus::CONNECT_HOST.final_())),
                Some(keys) => keys.clone(),
            },
        };
        if self.0.removed.load(Ordering::Acquire) {
            return Err(ConnectRefusal::parameter(connect_field::SUBSYSTEM));
        }
        if self.is_held() {
            return Err(ConnectRefusal::status(NvmeStatus::CONNECT_BUSY));
        }
        // Unauthenticated controllers do not count, so that an impostor cannot use up the limit of a host.
        let counts = |each: &&Arc<Association>| each.host == connect.host && each.counts();
        let of_host = controllers.all.values().filter(counts).count();
        let limits = &self.0.shared.limits;
        if controllers.all.len() >= limits.controllers_max || of_host >= limits.controllers_per_host {
            return Err(ConnectRefusal::status(NvmeStatus::CONNECT_BUSY));
        }
        let Some(cntlid) = self.free_cntlid(&controllers) else {
            return Err(ConnectRefusal::status(NvmeStatus::CONNECT_BUSY));
        };
        self.0.last_cntlid.store(cntlid, Ordering::Relaxed);
        let (notices, received) = cross::channel();
        let association = Arc::new(Association {
            subsystem: self.clone(),
            cntlid,
            kind: self.0.kind,
            host: connect.host.clone(),
            host_id: connect.host_id,
            reserver: reservation::host(&connect.host_id),
            keys,
            ready: AtomicBool::new(false),
            write_through: AtomicBool::new(false),
            traffic: AtomicU8::new(watcher::ALL),
            errors_pending: AtomicUsize::new(0),
            errors_unreported: AtomicU64::new(0),
            used: Mutex::default(),
            path,
            queues_granted: 0.into(),
            dead: AtomicBool::new(false),
            stale: StaleNamespaceIds::default(),
            queues: Mutex::new(BTreeMap::from([(0, control.clone())])),
            notices,
        });
        controllers.all.insert((self.0.id, cntlid), association.clone());
        Ok((association, received))
    }

    /// Returns an unused controller id, searching from the id after the last one.
    fn free_cntlid(&self, controllers: &Controllers) -> Option<u16> {
        let (first, last) = (*self.0.cntlids.start(), *self.0.cntlids.end());
        let given = self.0.last_cntlid.load(Ordering::Relaxed);
        let after = if (first..last).contains(&given) { given + 1 } else { first };
        let taken = |id: &u16| {
            controllers.all.contains_key(&(self.0.id, *id))
                || controllers.leaving.iter().any(|leaving| leaving.is_of(self) && leaving.cntlid == *id)
        };
        (after..=last).chain(first..after).find(|id| !taken(id))
    }

    /// Adds an I/O queue to an existing controller of a host.
    ///
    /// # Errors
    /// A refusal, if the parameters do not match the controller or it is not ready.
    fn connect_io(
        &self,
        connect: &Connect,
        control: &Arc<NvmeConnectionControl>,
    ) -> Result<Arc<Association>, ConnectRefusal> {
        let found = self.0.shared.controllers().all.get(&(self.0.id, connect.cntlid)).cloned();
        let association = found
            .filter(|each| each.kind == ControllerType::Io)
            .ok_or(ConnectRefusal::parameter(connect_field::CNTLID))?;
        if association.host != connect.host {
            return Err(ConnectRefusal::parameter(connect_field::HOST));
        }
        if association.host_id != connect.host_id {
            return Err(ConnectRefusal::parameter(connect_field::HOST_ID));
        }
        // While this lock is held, the controller cannot end or be reset.
        let mut queues = association.queues();
        if association.dead.load(Ordering::Acquire) {
            return Err(ConnectRefusal::parameter(connect_field::CNTLID));
        }
        if !association.ready.load(Ordering::Acquire) {
            return Err(ConnectRefusal::status(NvmeStatus::SEQUENCE.final_()));
        }
        let granted = match association.queues_granted.load(Ordering::Acquire) {
            // A host that has not set Number of Queues may have the maximum.
            0 => self.0.shared.limits.queues_max,
            granted => granted,
        };
        if connect.queue > granted || queues.contains_key(&connect.queue) {
            return Err(ConnectRefusal::parameter(connect_field::QUEUE));
        }
        queues.insert(connect.queue, control.clone());
        drop(queues);
        Ok(association)
    }

    /// Returns the id of an I/O controller of a host, if it has one.
    pub(crate) fn controller_of(&self, host_id: &[u8; 16]) -> Option<u16> {
        let controllers = self.0.shared.controllers();
        let mut of_host =
            controllers.of(self.0.id).filter(|each| each.host_id == *host_id && each.kind == ControllerType::Io);
        of_host.next().map(|each| each.cntlid)
    }

    /// Reports an event of a namespace's reservations to the hosts concerned, once for all cores.
    pub(crate) fn tell_reservation(&self, namespace: &Namespace, event: &ReservationEvent) {
        let first = {
            let mut reported = self.0.reported.0.lock().unwrap_or_else(PoisonError::into_inner);
            let newest = reported.entry(namespace.nsid).or_default();
            let first = *newest < event.number;
            *newest = (*newest).max(event.number);
            first
        };
        if !first {
            return;
        }
        let kind = reservation::notification(event.kind);
        let all: Vec<_> = self.0.shared.controllers().of(self.0.id).cloned().collect();
        for id in reservation::identifiers(&event.hosts) {
            for controller in all.iter().filter(|each| each.host_id == id) {
                controller.notice(Notice::Event(AsyncEvent::Reservation { nsid: namespace.nsid, kind }));
            }
        }
    }
}
