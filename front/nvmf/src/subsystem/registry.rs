//! Registry of the subsystems of a process by name, with their shared state: ports, limits, counters,
//! controllers, discovery.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use forebay_reactor::cross;
use forebay_tls::Psk;

use super::{
    AnaGrouping, Association, ConnectRefusal, HostLimits, HostPath, Notice, NvmeConnectionControl, Port, PortAddress,
    Subsystem, read, watcher, write,
};
use crate::session::admin::SubsystemIdentity;
use crate::session::{AsyncEvent, ControllerType, psk};
use crate::stats::NvmeStats;
use crate::wire::NvmeStatus;
use crate::wire::fabrics::{Connect, DISCOVERY_NQN, connect_field};
use crate::wire::log::{AnaState, DiscoveryEntry};

/// Number of the discovery subsystem within the process.
const DISCOVERY_ID: u32 = 0;
/// Controller ids of the discovery subsystem.
const DISCOVERY_CNTLIDS: RangeInclusive<u16> = 1..=0xFFEF;

/// Controllers of all subsystems.  One lock covers all of them, because the limits count them together.
#[derive(Default)]
pub(super) struct Controllers {
    /// Controllers, by subsystem number and controller id.
    pub(super) all: BTreeMap<(u32, u16), Arc<Association>>,
    /// Controllers whose admin queue has ended, while other queues still have commands in flight.
    pub(super) leaving: Vec<Arc<Association>>,
}

impl Controllers {
    /// Returns the controllers of a subsystem.
    pub(super) fn of(&self, subsystem: u32) -> impl Iterator<Item = &Arc<Association>> {
        self.all.range((subsystem, 0)..=(subsystem, u16::MAX)).map(|(_, association)| association)
    }
}

/// State that all subsystems share.
pub(super) struct RegistryState {
    pub(super) limits: HostLimits,
    stats: NvmeStats,
    ports: RwLock<Vec<Arc<Port>>>,
    /// Number of namespaces that were withdrawn or replaced so far.
    pub(super) withdrawals: AtomicU64,
    pub(super) ana_changes: AtomicU64,
    discovery_changes: AtomicU64,
    /// Set while subsystems are expected whose names are not known yet.
    expects_more: AtomicBool,
    controllers: Mutex<Controllers>,
}

impl RegistryState {
    pub(super) fn controllers(&self) -> MutexGuard<'_, Controllers> {
        self.controllers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an event to every controller of every subsystem.
    fn announce(&self, event: AsyncEvent) {
        let all: Vec<_> = self.controllers().all.values().cloned().collect();
        all.iter().for_each(|controller| controller.notice(Notice::Event(event)));
    }

    /// Counts a change of the discovery log page, and reports it to the hosts.
    pub(super) fn discovery_changed(&self) {
        self.discovery_changes.fetch_add(1, Ordering::AcqRel);
        self.announce(AsyncEvent::Discovery);
    }
}

/// Error for a subsystem name that is in use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("subsystem {0} exists already")]
pub struct SubsystemExists(pub String);

/// Subsystems of a process, shared by all cores.
#[derive(Clone)]
pub struct Subsystems {
    shared: Arc<RegistryState>,
    by_name: Arc<RwLock<BTreeMap<String, Subsystem>>>,
    next_id: Arc<AtomicU32>,
    discovery: Subsystem,
}

impl fmt::Debug for Subsystems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all()).finish()
    }
}

impl Subsystems {
    /// Creates a registry without subsystems.
    pub fn new(limits: HostLimits) -> Self {
        let shared = Arc::new(RegistryState {
            limits,
            stats: NvmeStats::new(),
            ports: RwLock::default(),
            withdrawals: AtomicU64::new(1),
            ana_changes: AtomicU64::new(1),
            discovery_changes: AtomicU64::new(1),
            expects_more: AtomicBool::new(false),
            controllers: Mutex::default(),
        });
        let identity = SubsystemIdentity {
            nqn: DISCOVERY_NQN.into(),
            serial: String::new(),
            model: "Forebay".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
        };
        let (kind, grouping) = (ControllerType::Discovery, AnaGrouping::ByPort);
        let discovery = Subsystem::new(DISCOVERY_ID, kind, identity, DISCOVERY_CNTLIDS, grouping, shared.clone());
        Self { shared, by_name: Arc::default(), next_id: Arc::new(AtomicU32::new(DISCOVERY_ID + 1)), discovery }
    }

    /// Adds a subsystem without namespaces, which assigns its controllers ids from `cntlids`.  Every host may connect
    /// until [`Subsystem::set_access`] restricts access.
    ///
    /// # Errors
    /// When there is one of that name; nothing has changed then.
    pub fn create(
        &self,
        identity: SubsystemIdentity,
        cntlids: RangeInclusive<u16>,
    ) -> Result<Subsystem, SubsystemExists> {
        self.create_with(identity, cntlids, AnaGrouping::ByPort, |_| {})
    }

    /// Adds a subsystem as [`create`](Self::create) does, with ANA groups by port or by namespace.  `set_up` configures it
    /// before the first host can connect.
    ///
    /// # Errors
    /// When there is one of that name; nothing has changed then.
    pub fn create_with(
        &self,
        identity: SubsystemIdentity,
        cntlids: RangeInclusive<u16>,
        grouping: AnaGrouping,
        set_up: impl FnOnce(&Subsystem),
    ) -> Result<Subsystem, SubsystemExists> {
        let nqn = identity.nqn.clone();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let subsystem = Subsystem::new(id, ControllerType::Io, identity, cntlids, grouping, self.shared.clone());
        set_up(&subsystem);
        let mut by_name = write(&self.by_name);
        if nqn == DISCOVERY_NQN || by_name.contains_key(&nqn) {
            return Err(SubsystemExists(nqn));
        }
        by_name.insert(nqn, subsystem.clone());
        drop(by_name);
        self.shared.discovery_changed();
        Ok(subsystem)
    }

    /// Removes a subsystem: no host can connect any more, and its controllers end after their commands in flight.
    pub fn remove(&self, nqn: &str) -> Option<Subsystem> {
        let removed = write(&self.by_name).remove(nqn)?;
        let controllers: Vec<_> = {
            let controllers = self.shared.controllers();
            removed.0.removed.store(true, Ordering::Release);
            controllers.of(removed.id()).cloned().collect()
        };
        controllers.iter().for_each(|controller| controller.end_queues(true));
        self.shared.discovery_changed();
        Some(removed)
    }

    /// Sets whether subsystems are expected whose names are not known yet.  Meanwhile a Connect to an unknown subsystem is
    /// refused as busy, which hosts repeat; otherwise for good.
    pub fn set_expecting(&self, expects_more: bool) {
        self.shared.expects_more.store(expects_more, Ordering::Release);
    }

    /// Returns whether subsystems are expected.
    pub fn is_expecting(&self) -> bool {
        self.shared.expects_more.load(Ordering::Acquire)
    }

    /// Returns a subsystem by name.
    pub fn get(&self, nqn: &str) -> Option<Subsystem> {
        read(&self.by_name).get(nqn).cloned()
    }

    /// Returns all subsystems, in the order of their names.
    pub fn all(&self) -> Vec<Subsystem> {
        read(&self.by_name).values().cloned().collect()
    }

    /// Returns the number of I/O controllers.
    pub fn controller_count(&self) -> usize {
        self.shared.controllers().all.values().filter(|each| each.kind == ControllerType::Io).count()
    }

    /// Returns the limits.
    pub fn limits(&self) -> &HostLimits {
        &self.shared.limits
    }

    /// Returns the counters.
    pub fn stats(&self) -> &NvmeStats {
        &self.shared.stats
    }

    /// Returns the number of namespaces that were withdrawn or replaced so far.
    pub(crate) fn withdrawals(&self) -> u64 {
        self.shared.withdrawals.load(Ordering::Acquire)
    }

    // ---- Ports and ANA ----

    /// Adds a port.
    pub fn add_port(&self, port: Arc<Port>) {
        write(&self.shared.ports).push(port);
        self.shared.discovery_changed();
    }

    /// Returns the ports.
    pub fn ports(&self) -> Vec<Arc<Port>> {
        read(&self.shared.ports).clone()
    }

    /// Sets the ANA state of a group through a port, for all subsystems with [`AnaGrouping::ByPort`], and reports it to the
    /// hosts.
    pub fn set_ana(&self, port: &Port, group: u32, state: AnaState) {
        if port.set_ana(group, state) {
            self.shared.ana_changes.fetch_add(1, Ordering::AcqRel);
            self.shared.announce(AsyncEvent::Ana);
        }
    }

    /// Returns the discovery generation counter, which grows with each change, and the entries for a host that has
    /// connected through `port`: the subsystems that admit it and are not hidden, on each TCP address of each port, their
    /// own ports and those of other processes, and discovery itself on those of `port`.
    pub fn discovery(&self, port: &Port, host: &str) -> (u64, Vec<DiscoveryEntry>) {
        let change = self.shared.discovery_changes.load(Ordering::Acquire);
        let admitting: Vec<Subsystem> =
            self.all().into_iter().filter(|each| each.admits(host) && !each.is_hidden()).collect();
        let offsets: Vec<u16> = admitting.iter().map(|each| read(&each.0.ports).offset).collect();
        let mut entries = Vec::new();
        for each in self.ports() {
            for address in &each.addresses {
                let PortAddress::Tcp(address, service) = address else { continue };
                let of = |nqn: &str, offset, discovery| DiscoveryEntry {
                    address: address.to_string(),
                    v6: address.is_ipv6(),
                    service: *service,
                    port: each.id.saturating_add(offset),
                    nqn: nqn.to_owned(),
                    discovery,
                    tls: each.tls,
                };
                if each.id == port.id {
                    entries.push(of(DISCOVERY_NQN, 0, true));
                }
                let offered = admitting.iter().zip(&offsets);
                entries.extend(offered.map(|(subsystem, offset)| of(subsystem.nqn(), *offset, false)));
            }
        }
        for subsystem in &admitting {
            let others = read(&subsystem.0.ports);
            entries.extend(others.others.iter().map(|other| DiscoveryEntry {
                address: other.address.ip().to_string(),
                v6: other.address.is_ipv6(),
                service: other.address.port(),
                port: other.id,
                nqn: subsystem.nqn().to_owned(),
                discovery: false,
                tls: other.tls,
            }));
        }
        (change, entries)
    }

    // ---- Hosts and controllers ----

    /// Returns the TLS keys with an identity.  There is more than one where the identity does not tell their
    /// derivation, and for discovery, where a host may have a key for each subsystem.
    pub(crate) fn tls_keys(&self, identity: &[u8]) -> Vec<Psk> {
        match psk::parties(identity) {
            None => Vec::new(),
            Some(parties) if parties.subsystem == DISCOVERY_NQN => {
                self.all().iter().flat_map(|subsystem| subsystem.tls_keys().find(identity)).collect()
            }
            Some(parties) => {
                self.get(parties.subsystem).map(|subsystem| subsystem.tls_keys().find(identity)).unwrap_or_default()
            }
        }
    }

    /// Returns whether a host must use TLS to connect to a subsystem.
    pub(crate) fn needs_tls(&self, nqn: &str, host: &str) -> bool {
        self.get(nqn).is_some_and(|subsystem| subsystem.tls_keys().has(host))
    }

    /// Returns the subsystem that a Connect names.
    ///
    /// # Errors
    /// Connect Invalid Parameters if there is none; Controller Busy if it may be one of those that are expected.
    fn named(&self, nqn: &str) -> Result<Subsystem, ConnectRefusal> {
        self.get(nqn).ok_or_else(|| match self.is_expecting() {
            true => ConnectRefusal::status(NvmeStatus::CONNECT_BUSY),
            false => ConnectRefusal::parameter(connect_field::SUBSYSTEM),
        })
    }

    /// Creates a controller for a host that connects its admin queue, in the subsystem that the Connect names.
    pub(crate) fn connect_admin(
        &self,
        connect: &Connect,
        path: HostPath,
        control: &Arc<NvmeConnectionControl>,
    ) -> Result<(Arc<Association>, cross::Receiver<Notice>), ConnectRefusal> {
        if connect.subsystem != DISCOVERY_NQN {
            return self.named(&connect.subsystem)?.connect_admin(connect, path, control);
        }
        // Discovery is for hosts that may connect to a subsystem.  Without subsystems there is nothing to protect.
        let all = self.all();
        if !all.is_empty() && !all.iter().any(|subsystem| subsystem.admits(&connect.host)) {
            return Err(ConnectRefusal::status(NvmeStatus::CONNECT_HOST.final_()));
        }
        self.discovery.connect_admin(connect, path, control)
    }

    /// Adds an I/O queue to an existing controller of a host.
    pub(crate) fn connect_io(
        &self,
        connect: &Connect,
        control: &Arc<NvmeConnectionControl>,
    ) -> Result<Arc<Association>, ConnectRefusal> {
        match self.named(&connect.subsystem) {
            Ok(subsystem) => subsystem.connect_io(connect, control),
            // Discovery controllers have no I/O queues.
            Err(_) if connect.subsystem == DISCOVERY_NQN => Err(ConnectRefusal::parameter(connect_field::CNTLID)),
            Err(refused) => Err(refused),
        }
    }

    /// Removes an ended queue.  An admin queue takes its controller with it.
    pub(crate) fn disconnect(&self, association: &Arc<Association>, queue: u16) {
        association.queues().remove(&queue);
        let mut controllers = self.shared.controllers();
        if queue == 0 {
            controllers.all.remove(&(association.subsystem.id(), association.cntlid));
            controllers.leaving.push(association.clone());
            association.end_queues(true);
        }
        controllers.leaving.retain(|each| !each.queues().is_empty());
    }

    /// Returns whether an earlier controller of the host still has commands in flight.  A new controller of that host
    /// must then wait, or an old write could land after a new one.
    ///
    /// A connected controller on the same path also counts if it has commands in flight and no traffic: its host may
    /// have lost the connection without the target noticing.  `first` marks the first check of a Connect, from which
    /// on the lack of traffic is measured.
    pub(crate) fn is_leaving(&self, connect: &Connect, path: &HostPath, first: bool) -> bool {
        let Some(subsystem) = self.get(&connect.subsystem) else { return false };
        let controllers = self.shared.controllers();
        let of_host = |each: &&Arc<Association>| each.is_of(&subsystem) && each.host_id == connect.host_id;
        let leaves = controllers.leaving.iter().any(|each| of_host(&each));
        let of_before = |each: &&Arc<Association>| each.host_id == connect.host_id && each.is_on(path);
        if first {
            controllers.of(subsystem.id()).filter(of_before).for_each(|each| {
                each.had_traffic(watcher::SUCCESSOR);
            });
        }
        leaves || controllers.of(subsystem.id()).filter(of_before).any(|each| each.is_silent() && each.has_in_flight())
    }
}
