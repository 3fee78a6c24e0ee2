//! What all cores share: the subsystem's namespaces, ports, hosts and controllers.
//!
//! Nothing here is touched on the path of an I/O command but two numbers: how often the namespaces have changed, and
//! the ANA state of a group.  The locks are taken when something is attached, when a host connects, and by the admin
//! queue.

mod association;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use forebay_block::reservation::Event as ReservationEvent;
use forebay_reactor::cross;

use crate::session::admin::{ANA_GROUPS_MAX, Identity, NAMESPACES_MAX};
use crate::session::auth::Keys;
use crate::session::psk::{TlsKey, TlsKeys};
use crate::session::{Event, Kind};
use crate::stats::Stats;
use crate::wire::fabrics::{CNTLID_ANY, Connect, DISCOVERY_NQN, Wrong, connect_field};
use crate::wire::log::{AnaGroup, AnaState, DiscoveryEntry};
use crate::wire::{Status, identify, reservation};
pub(crate) use association::{Association, Control, Notice, Way, watcher};

/// Bytes of a logical block, as a power of two: what every host can use, ESXi included.  The sizes that a namespace
/// prefers say that 4 KiB are better.
pub const BLOCK_SHIFT: u8 = 9;

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// Its id, from 1 to [`NAMESPACES_MAX`].
    pub nsid: u32,
    /// The volume's name, for people and for who opens the device.
    pub name: String,
    /// What identifies the volume everywhere and always; NGUID and EUI64 follow from it.
    pub uuid: [u8; 16],
    /// Its ANA group, from 1 to [`ANA_GROUPS_MAX`].
    pub ana_group: u32,
    /// Writes are refused.
    pub read_only: bool,
}

/// A namespace that no subsystem can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// Its id is out of range.
    #[error("namespace id {0} is out of range: a subsystem has ids from 1 to {NAMESPACES_MAX}")]
    Nsid(u32),
    /// Its ANA group is out of range.
    #[error("ANA group {0} is out of range: a subsystem has groups from 1 to {ANA_GROUPS_MAX}")]
    AnaGroup(u32),
}

/// What reservations of a namespace were told of already, by whichever core was first.
#[derive(Debug, Default)]
struct Told(Mutex<BTreeMap<u32, u64>>);

impl Namespace {
    /// NGUID: the UUID's bytes.
    pub fn nguid(&self) -> [u8; 16] {
        self.uuid
    }

    /// EUI64: the UUID's two halves folded, marked as administered locally.
    pub fn eui64(&self) -> [u8; 8] {
        let mut out: [u8; 8] = std::array::from_fn(|at| self.uuid[at] ^ self.uuid[at + 8].rotate_left(3));
        out[0] = (out[0] & !1) | 2;
        out
    }
}

/// Where a port is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortAddress {
    /// By TCP; an unspecified address is not told to hosts.
    Tcp(IpAddr, u16),
    /// By a Unix socket, which discovery cannot tell.
    Unix,
}

/// One address that is listened on.
#[derive(Debug)]
pub struct Port {
    /// Its id, from 1.
    pub id: u16,
    /// What discovery tells of it.
    pub addresses: Vec<PortAddress>,
    /// Hosts must speak TLS.
    pub tls: bool,
    /// State of each ANA group, from group 1 on.
    ana: [AtomicU8; ANA_GROUPS_MAX as usize],
}

impl Port {
    /// A port through which everything is reached the best way.
    pub fn new(id: u16, addresses: Vec<PortAddress>) -> Arc<Self> {
        Self::make(id, addresses, false)
    }

    /// The same, where hosts must speak TLS.
    pub fn with_tls(id: u16, addresses: Vec<PortAddress>) -> Arc<Self> {
        Self::make(id, addresses, true)
    }

    fn make(id: u16, addresses: Vec<PortAddress>, tls: bool) -> Arc<Self> {
        let optimized = |_| AtomicU8::new(AnaState::Optimized as u8);
        Arc::new(Self { id, addresses, tls, ana: std::array::from_fn(optimized) })
    }

    /// How a group is reached through it.
    pub fn ana(&self, group: u32) -> AnaState {
        let state = self.ana.get(group.wrapping_sub(1) as usize).map(|state| state.load(Ordering::Acquire));
        state.and_then(AnaState::of).unwrap_or(AnaState::Inaccessible)
    }
}

/// Limits of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections of a core; more are closed as soon as they are accepted.
    pub connections_max: usize,
    /// Connections of a core that are no queue yet, or whose host has still to authenticate.
    pub handshakes_max: usize,
    /// Controllers at a time.
    pub controllers_max: usize,
    /// Controllers of one host, by its name.
    pub controllers_per_host: usize,
    /// I/O queues of a controller, at most [`QUEUES_MAX`](crate::session::admin::QUEUES_MAX).
    pub queues_max: u16,
    /// Bytes of data of a connection's commands under way or not sent yet.
    pub connection_bytes: usize,
    /// The same for all connections of a host on a core.
    pub host_bytes: usize,
    /// The same for all connections of a core.
    pub core_bytes: usize,
    /// Time from accepting to a successful Connect (and authentication).
    pub handshake_timeout: Duration,
    /// Time that a host has for the data that it was asked for.
    pub data_timeout: Duration,
    /// Time that commands under way have to end when their connection ends.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            handshakes_max: 1024,
            controllers_max: 2048,
            controllers_per_host: 64,
            queues_max: 64,
            connection_bytes: 16 << 20,
            host_bytes: 64 << 20,
            core_bytes: 256 << 20,
            handshake_timeout: Duration::from_secs(20),
            data_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// Who may connect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Access {
    /// Every host.
    #[default]
    Anyone,
    /// These hosts, by name, and what each has to show.
    Listed(BTreeMap<String, Option<Arc<Keys>>>),
}

/// Why a Connect is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) status: Status,
    pub(crate) wrong: Option<Wrong>,
}

impl Refused {
    fn parameter(wrong: Wrong) -> Self {
        Self { status: Status::CONNECT_PARAMETER.final_(), wrong: Some(wrong) }
    }

    fn status(status: Status) -> Self {
        Self { status, wrong: None }
    }
}

#[derive(Default)]
struct Controllers {
    all: BTreeMap<u16, Arc<Association>>,
    /// Those whose admin queue has gone, while others of their queues still have commands under way.
    leaving: Vec<Arc<Association>>,
    last: u16,
}

struct Inner {
    identity: Identity,
    cntlids: std::ops::RangeInclusive<u16>,
    limits: Limits,
    stats: Stats,
    namespaces: RwLock<BTreeMap<u32, Arc<Namespace>>>,
    /// The volume that had each id last.
    volumes: Mutex<BTreeMap<u32, [u8; 16]>>,
    /// Changes of the namespaces so far.
    generation: AtomicU64,
    ports: RwLock<Vec<Arc<Port>>>,
    ana_changes: AtomicU64,
    discovery_changes: AtomicU64,
    access: RwLock<Arc<Access>>,
    tls_keys: RwLock<Arc<TlsKeys>>,
    controllers: Mutex<Controllers>,
    told: Told,
}

/// A subsystem; all cores share it.
#[derive(Clone)]
pub struct Target(Arc<Inner>);

fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Target {
    /// A subsystem without namespaces that gives its controllers ids out of `cntlids`.
    pub fn new(identity: Identity, cntlids: std::ops::RangeInclusive<u16>, limits: Limits) -> Self {
        Self(Arc::new(Inner {
            identity,
            cntlids,
            limits,
            stats: Stats::new(),
            namespaces: RwLock::default(),
            volumes: Mutex::default(),
            generation: AtomicU64::new(1),
            ports: RwLock::default(),
            ana_changes: AtomicU64::new(1),
            discovery_changes: AtomicU64::new(1),
            access: RwLock::default(),
            tls_keys: RwLock::default(),
            controllers: Mutex::default(),
            told: Told::default(),
        }))
    }

    /// What never changes of it.
    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// Its limits.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// Where it counts.
    pub fn stats(&self) -> &Stats {
        &self.0.stats
    }

    /// Changes of the namespaces so far.
    pub(crate) fn generation(&self) -> u64 {
        self.0.generation.load(Ordering::Acquire)
    }

    fn controllers(&self) -> MutexGuard<'_, Controllers> {
        self.0.controllers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells every controller of something.
    pub fn announce(&self, event: Event) {
        let all: Vec<_> = self.controllers().all.values().cloned().collect();
        all.iter().for_each(|controller| controller.notice(Notice::Event(event)));
    }

    // ---- Namespaces ----

    /// Adds a namespace, or replaces the one with its id.  Where the id was another volume's, a controller of before
    /// takes no commands for it until its host has asked what it is now: what is on its way was meant for the other.
    ///
    /// # Errors
    /// When an id is out of its range; nothing has changed then.
    pub fn add_namespace(&self, namespace: Namespace) -> Result<(), NamespaceError> {
        let nsid = namespace.nsid;
        if !(1..=NAMESPACES_MAX).contains(&nsid) {
            return Err(NamespaceError::Nsid(nsid));
        }
        if !(1..=ANA_GROUPS_MAX).contains(&namespace.ana_group) {
            return Err(NamespaceError::AnaGroup(namespace.ana_group));
        }
        let mut volumes = self.0.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        if volumes.insert(nsid, namespace.uuid).is_some_and(|before| before != namespace.uuid) {
            self.controllers().all.values().for_each(|controller| controller.may_mistake(nsid));
        }
        drop(volumes);
        // Another volume's events are counted anew.
        self.0.told.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&nsid);
        write(&self.0.namespaces).insert(nsid, Arc::new(namespace));
        self.namespaces_changed(nsid);
        Ok(())
    }

    /// Takes a namespace away.  Commands that have begun go on; see [`Server::let_go`](crate::Server::let_go).
    pub fn remove_namespace(&self, nsid: u32) {
        if write(&self.0.namespaces).remove(&nsid).is_some() {
            self.namespaces_changed(nsid);
        }
    }

    /// A namespace has another size now.
    pub fn namespace_resized(&self, nsid: u32) {
        self.announce(Event::Namespace(nsid));
    }

    fn namespaces_changed(&self, nsid: u32) {
        self.0.generation.fetch_add(1, Ordering::AcqRel);
        self.0.ana_changes.fetch_add(1, Ordering::AcqRel);
        self.announce(Event::Namespace(nsid));
    }

    /// A namespace by id.
    pub fn namespace(&self, nsid: u32) -> Option<Arc<Namespace>> {
        read(&self.0.namespaces).get(&nsid).cloned()
    }

    /// The ids of all namespaces, in order.
    pub fn namespace_ids(&self) -> Vec<u32> {
        read(&self.0.namespaces).keys().copied().collect()
    }

    // ---- Ports and ANA ----

    /// Adds a port.
    pub fn add_port(&self, port: Arc<Port>) {
        write(&self.0.ports).push(port);
        self.discovery_changed();
    }

    /// The ports.
    pub fn ports(&self) -> Vec<Arc<Port>> {
        read(&self.0.ports).clone()
    }

    fn discovery_changed(&self) {
        self.0.discovery_changes.fetch_add(1, Ordering::AcqRel);
        self.announce(Event::Discovery);
    }

    /// Sets how a group is reached through a port, and tells the hosts.
    pub fn set_ana(&self, port: &Port, group: u32, state: AnaState) {
        let Some(slot) = port.ana.get(group.wrapping_sub(1) as usize) else { return };
        if slot.swap(state as u8, Ordering::AcqRel) != state as u8 {
            self.0.ana_changes.fetch_add(1, Ordering::AcqRel);
            self.announce(Event::Ana);
        }
    }

    /// All groups as they are reached through a port, and a number that grows with each change.
    pub fn ana_groups(&self, port: &Port) -> (u64, Vec<AnaGroup>) {
        let change = self.0.ana_changes.load(Ordering::Acquire);
        let group = |id| AnaGroup { id, state: port.ana(id), namespaces: Vec::new() };
        let mut groups: Vec<AnaGroup> = (1..=ANA_GROUPS_MAX).map(group).collect();
        for namespace in read(&self.0.namespaces).values() {
            groups[namespace.ana_group as usize - 1].namespaces.push(namespace.nsid);
        }
        groups.retain(|group| !group.namespaces.is_empty());
        (change, groups)
    }

    /// What discovery tells a host that has reached `port`, and a number that grows with each change.
    pub fn discovery(&self, port: &Port) -> (u64, Vec<DiscoveryEntry>) {
        let mut entries = Vec::new();
        for each in self.ports() {
            for address in &each.addresses {
                let PortAddress::Tcp(address, service) = address else { continue };
                let of = |nqn: &str, discovery| DiscoveryEntry {
                    address: address.to_string(),
                    v6: address.is_ipv6(),
                    service: *service,
                    port: each.id,
                    nqn: nqn.to_owned(),
                    discovery,
                    tls: each.tls,
                };
                if each.id == port.id {
                    entries.push(of(DISCOVERY_NQN, true));
                }
                entries.push(of(&self.0.identity.nqn, false));
            }
        }
        (self.0.discovery_changes.load(Ordering::Acquire), entries)
    }

    // ---- Hosts and controllers ----

    /// Says who may connect from now on; those who are connected stay.
    pub fn set_access(&self, access: Access) {
        *write(&self.0.access) = Arc::new(access);
    }

    /// Says which hosts have which keys for TLS from now on.  A host with a key is let in through TLS only.
    pub fn set_tls_keys(&self, hosts: &BTreeMap<String, TlsKey>) {
        *write(&self.0.tls_keys) = Arc::new(TlsKeys::new(hosts, &self.0.identity.nqn));
    }

    /// The keys for TLS.
    pub(crate) fn tls_keys(&self) -> Arc<TlsKeys> {
        read(&self.0.tls_keys).clone()
    }

    /// Ids of the I/O controllers, in order.
    pub fn controller_ids(&self) -> Vec<u16> {
        let controllers = self.controllers();
        controllers.all.values().filter(|each| each.kind == Kind::Io).map(|each| each.cntlid).collect()
    }

    /// A host connects its admin queue: a controller is made for it.
    pub(crate) fn connect_admin(
        &self,
        connect: &Connect,
        way: Way,
        control: &Arc<Control>,
    ) -> Result<(Arc<Association>, cross::Receiver<Notice>), Refused> {
        let kind = match connect.subsystem.as_str() {
            DISCOVERY_NQN => Kind::Discovery,
            name if name == self.0.identity.nqn => Kind::Io,
            _ => return Err(Refused::parameter(connect_field::SUBSYSTEM)),
        };
        if connect.cntlid != CNTLID_ANY {
            return Err(Refused::parameter(connect_field::CNTLID));
        }
        let keys = match &**read(&self.0.access) {
            Access::Anyone => None,
            Access::Listed(hosts) => match hosts.get(&connect.host) {
                None => return Err(Refused::status(Status::CONNECT_HOST.final_())),
                // Discovery tells nothing that is worth a secret, and hosts ask it before they know that they need one.
                Some(_) if kind == Kind::Discovery => None,
                Some(keys) => keys.clone(),
            },
        };
        let mut controllers = self.controllers();
        // Who only says to be this host takes nothing away from it.
        let counts = |each: &&Arc<Association>| each.host == connect.host && each.counts();
        let of_host = controllers.all.values().filter(counts).count();
        if controllers.all.len() >= self.0.limits.controllers_max || of_host >= self.0.limits.controllers_per_host {
            return Err(Refused::status(Status::CONNECT_BUSY));
        }
        let Some(cntlid) = self.free_cntlid(&controllers) else { return Err(Refused::status(Status::CONNECT_BUSY)) };
        controllers.last = cntlid;
        let (notices, received) = cross::channel();
        let association = Arc::new(Association {
            cntlid,
            kind,
            host: connect.host.clone(),
            host_id: connect.host_id,
            reserver: reservation::host(&connect.host_id),
            keys,
            ready: AtomicBool::new(false),
            write_through: AtomicBool::new(false),
            traffic: AtomicU8::new(watcher::ALL),
            errors_pending: AtomicUsize::new(0),
            errors_untold: AtomicU64::new(0),
            used: Mutex::default(),
            way,
            queues_granted: 0.into(),
            dead: AtomicBool::new(false),
            may_mistake: AtomicBool::new(false),
            mistaken: Mutex::default(),
            queues: Mutex::new(BTreeMap::from([(0, control.clone())])),
            notices,
        });
        controllers.all.insert(cntlid, association.clone());
        Ok((association, received))
    }

    fn free_cntlid(&self, controllers: &Controllers) -> Option<u16> {
        let (first, last) = (*self.0.cntlids.start(), *self.0.cntlids.end());
        let after = if (first..last).contains(&controllers.last) { controllers.last + 1 } else { first };
        let taken = |id: &u16| {
            controllers.all.contains_key(id) || controllers.leaving.iter().any(|leaving| leaving.cntlid == *id)
        };
        (after..=last).chain(first..after).find(|id| !taken(id))
    }

    /// A host connects an I/O queue of a controller that it has.
    pub(crate) fn connect_io(&self, connect: &Connect, control: &Arc<Control>) -> Result<Arc<Association>, Refused> {
        let found = self.controllers().all.get(&connect.cntlid).cloned();
        let association =
            found.filter(|each| each.kind == Kind::Io).ok_or(Refused::parameter(connect_field::CNTLID))?;
        if connect.subsystem != self.0.identity.nqn {
            return Err(Refused::parameter(connect_field::SUBSYSTEM));
        }
        if association.host != connect.host {
            return Err(Refused::parameter(connect_field::HOST));
        }
        if association.host_id != connect.host_id {
            return Err(Refused::parameter(connect_field::HOST_ID));
        }
        // From here on the controller cannot end, or be reset, unnoticed.
        let mut queues = association.queues();
        if association.dead.load(Ordering::Acquire) {
            return Err(Refused::parameter(connect_field::CNTLID));
        }
        if !association.ready.load(Ordering::Acquire) {
            return Err(Refused::status(Status::SEQUENCE.final_()));
        }
        let granted = match association.queues_granted.load(Ordering::Acquire) {
            // A host that never asked may have as many as there can be.
            0 => self.0.limits.queues_max,
            granted => granted,
        };
        if connect.queue > granted || queues.contains_key(&connect.queue) {
            return Err(Refused::parameter(connect_field::QUEUE));
        }
        queues.insert(connect.queue, control.clone());
        drop(queues);
        Ok(association)
    }

    /// A queue has gone: with an admin queue its controller goes.
    pub(crate) fn disconnect(&self, association: &Arc<Association>, queue: u16) {
        association.queues().remove(&queue);
        let mut controllers = self.controllers();
        if queue == 0 {
            controllers.all.remove(&association.cntlid);
            controllers.leaving.push(association.clone());
            association.end_queues(true);
        }
        controllers.leaving.retain(|each| !each.queues().is_empty());
    }

    /// A controller of a host.
    pub(crate) fn controller_of(&self, host_id: &[u8; 16]) -> Option<u16> {
        let controllers = self.controllers();
        let mut of_host = controllers.all.values().filter(|each| each.host_id == *host_id && each.kind == Kind::Io);
        of_host.next().map(|each| each.cntlid)
    }

    /// Tells the hosts that it concerns of an event of a namespace's reservations, once.
    pub(crate) fn tell_reservation(&self, namespace: &Namespace, event: &ReservationEvent) {
        let first = {
            let mut told = self.0.told.0.lock().unwrap_or_else(PoisonError::into_inner);
            let newest = told.entry(namespace.nsid).or_default();
            let first = *newest < event.number;
            *newest = (*newest).max(event.number);
            first
        };
        if !first {
            return;
        }
        let kind = reservation::notification(event.kind);
        let all: Vec<_> = self.controllers().all.values().cloned().collect();
        for id in reservation::identifiers(&event.hosts) {
            for controller in all.iter().filter(|each| each.host_id == id) {
                controller.notice(Notice::Event(Event::Reservation { nsid: namespace.nsid, kind }));
            }
        }
    }

    /// A controller that a host had before still has commands under way: a new one of that host must wait, or a write of
    /// the old one could land after one of the new.
    ///
    /// The same goes for one that has come the same way, has commands under way and says nothing: its host may have lost
    /// the connection without this end being told.  `first` is for the first look of a Connect; what is silent from then
    /// on is waited for.
    pub(crate) fn is_leaving(&self, connect: &Connect, way: &Way, first: bool) -> bool {
        let controllers = self.controllers();
        let leaves = controllers.leaving.iter().any(|each| each.host_id == connect.host_id);
        let of_before = |each: &&Arc<Association>| each.host_id == connect.host_id && each.way == *way;
        if first {
            controllers.all.values().filter(of_before).for_each(|each| {
                each.had_traffic(watcher::SUCCESSOR);
            });
        }
        leaves || controllers.all.values().filter(of_before).any(|each| each.is_silent() && each.is_under_way())
    }
}

/// A namespace as Identify tells it, of a device of `size` bytes.
pub(crate) fn describe(namespace: &Namespace, size: u64, preferred: u32, read_only: bool) -> identify::Namespace {
    identify::Namespace {
        blocks: size >> BLOCK_SHIFT,
        block_shift: BLOCK_SHIFT,
        preferred_blocks: (preferred >> BLOCK_SHIFT).clamp(1, 256) as u16,
        write_protected: namespace.read_only || read_only,
        ana_group: namespace.ana_group,
        nguid: namespace.nguid(),
        eui64: namespace.eui64(),
        uuid: namespace.uuid,
        reservations: 0,
    }
}
