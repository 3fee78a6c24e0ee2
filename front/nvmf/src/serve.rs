//! Per-core server: accepts and runs connections.  The only module of this crate that performs I/O or waits.

mod admin;
mod auth;
mod budget;
mod commands;
mod connect;
mod connection;
mod data;
mod ending;
mod fused;
mod io;
mod namespaces;
mod outbox;
mod submission;
mod submit;
mod tls;
mod view;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::BlockDevice;
use forebay_block::reservation::{ReservationView, Reservations};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, JoinHandle, Listener, Stream, spawn};
use forebay_serve::ServerConnections;

use crate::session::NvmePools;
use crate::session::io::NamespaceRules;
use crate::subsystem::{BLOCK_SHIFT, Namespace, NvmeConnectionControl, Port, Subsystem, Subsystems};
use budget::ByteBudget;
use connection::NvmeConnection;
use ending::NvmeEndReason;

/// Devices behind the namespaces, on one core: the server's interface to the owner of the volumes.
pub trait NamespaceDevices {
    /// Opens the device of a namespace.  Returns `None` if the namespace has just been withdrawn.
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>>;
}

/// Namespace opened on this core.
pub(crate) struct OpenNamespace {
    subsystem: Subsystem,
    info: Arc<Namespace>,
    device: Rc<dyn BlockDevice>,
    /// View of the namespace's reservations, if the device supports them.
    reservations: Option<RefCell<ReservationView>>,
    /// Task that notifies hosts of lost registrations and reservations.
    telling: Option<JoinHandle<()>>,
    /// Notified when the last user of the namespace has dropped it.
    closed: Rc<Notify>,
}

impl Drop for OpenNamespace {
    fn drop(&mut self) {
        if let Some(telling) = self.telling.take() {
            telling.abort();
        }
        // The waiting tasks run after this drop, when the device is dropped as well.
        self.closed.notify_all();
    }
}

impl OpenNamespace {
    /// Returns the current geometry and write protection, against which commands are validated.
    fn rules(&self) -> NamespaceRules {
        let geometry = self.device.geometry();
        NamespaceRules {
            blocks: geometry.size >> BLOCK_SHIFT,
            block_shift: BLOCK_SHIFT,
            write_protected: geometry.read_only || self.info.read_only,
        }
    }
}

/// Subsystem number and namespace id.
type NamespaceKey = (u32, u32);

/// Namespaces that are open on this core.
///
/// The server keeps a namespace open until it is withdrawn.  A withdrawn namespace belongs to its users only, so that
/// the last of them closes it.
#[derive(Default)]
struct OpenNamespaces {
    /// Withdrawal count at the last scan for withdrawn namespaces.
    seen: u64,
    /// Open namespaces that are not known to be withdrawn.
    open: HashMap<NamespaceKey, Rc<OpenNamespace>>,
    /// Withdrawn namespaces, some of them still in use.
    withdrawn: Vec<(NamespaceKey, Weak<OpenNamespace>)>,
}

impl OpenNamespaces {
    /// Moves the namespaces that were withdrawn to `withdrawn`, if the withdrawal count has changed since the last
    /// call.  Returns them, to be dropped by the caller after its borrow.
    #[must_use = "the namespaces are dropped after the borrow"]
    fn take_withdrawn(&mut self, withdrawals: u64) -> Vec<Rc<OpenNamespace>> {
        if self.seen == withdrawals {
            return Vec::new();
        }
        self.seen = withdrawals;
        self.withdrawn.retain(|(_, namespace)| namespace.strong_count() > 0);
        let is_withdrawn = |(_, nsid): &NamespaceKey, open: &mut Rc<OpenNamespace>| {
            open.subsystem.namespace(*nsid).is_none_or(|now| !Arc::ptr_eq(&now, &open.info))
        };
        let taken: Vec<_> = self.open.extract_if(is_withdrawn).collect();
        self.withdrawn.extend(taken.iter().map(|(key, namespace)| (*key, Rc::downgrade(namespace))));
        taken.into_iter().map(|(_, namespace)| namespace).collect()
    }

    /// Returns whether a withdrawn namespace with this key is still in use.
    fn is_in_use(&self, key: NamespaceKey) -> bool {
        self.withdrawn.iter().any(|(each, namespace)| *each == key && namespace.strong_count() > 0)
    }
}

/// NVMe/TCP server on one core.  Several cores each have their own, on shared listeners, with the same
/// [`Subsystems`].
pub struct NvmeServer {
    subsystems: Subsystems,
    devices: Box<dyn NamespaceDevices>,
    pools: Rc<NvmePools>,
    budget: Rc<ByteBudget>,
    /// TLS state of this core, created on first use.
    tls: OnceCell<tls::TlsContext>,
    hosts: RefCell<BTreeMap<String, Weak<ByteBudget>>>,
    namespaces: RefCell<OpenNamespaces>,
    /// Notified when an open namespace is closed.
    namespace_closed: Rc<Notify>,
    connections: Rc<ServerConnections<Arc<NvmeConnectionControl>>>,
    /// Connections that are not a queue yet, or whose host has not authenticated yet.
    handshakes: Cell<usize>,
}

impl NvmeServer {
    /// Creates a server of `subsystems` on this core, which opens namespaces through `devices`.
    pub fn new(subsystems: Subsystems, devices: Box<dyn NamespaceDevices>) -> Rc<Self> {
        let budget = ByteBudget::new(subsystems.limits().core_bytes, None);
        Rc::new(Self {
            subsystems,
            devices,
            pools: Rc::new(NvmePools::new()),
            budget,
            tls: OnceCell::new(),
            hosts: RefCell::default(),
            namespaces: RefCell::default(),
            namespace_closed: Rc::default(),
            connections: ServerConnections::new(),
            handshakes: Cell::new(0),
        })
    }

    /// Returns the subsystems that this server exports.
    pub fn subsystems(&self) -> &Subsystems {
        &self.subsystems
    }

    /// Returns the number of open connections, including those without a queue.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Returns the bytes of command data in flight or not sent yet, on this core.
    pub fn bytes_held(&self) -> usize {
        self.budget.used()
    }

    /// Accepts connections until [`stop`](Self::stop).  Each connection runs as a task of its own.
    pub async fn serve(self: Rc<Self>, listener: Listener, port: Arc<Port>) {
        tracing::info!(addr = %listener.local_addr(), port = port.id, "serving NVMe/TCP");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer, port.clone())).await;
    }

    /// Serves a connection that was accepted elsewhere.  Drops it if the server is stopping or a connection limit is
    /// reached.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr, port: Arc<Port>) {
        let stats = self.subsystems.stats();
        stats.count(|counts| counts.accepted += 1);
        let limits = self.subsystems.limits();
        let (max, handshakes_max) = (limits.connections_max, limits.handshakes_max);
        if self.connections.stopping() || self.connections() >= max || self.handshakes.get() >= handshakes_max {
            stats.count(|counts| counts.turned_away += 1);
            tracing::warn!(%peer, max, handshakes_max, "connection rejected: too many connections or handshakes");
            return;
        }
        let control = Arc::new(NvmeConnectionControl::default());
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        let connection = NvmeConnection::new(self.clone(), port, stream, peer, control);
        drop(spawn(async move {
            let end = connection.run().await;
            if matches!(
                end,
                NvmeEndReason::Fatal(_) | NvmeEndReason::TooSlow | NvmeEndReason::Refused | NvmeEndReason::Overdue
            ) {
                server.subsystems.stats().count(|counts| counts.ended_for_cause += 1);
            }
            drop(place);
        }));
    }

    /// Closes withdrawn namespaces.  Waits until no command of this core is in flight on the withdrawn namespace
    /// `nsid` of `subsystem`.  Does not wait for other withdrawn namespaces, whose devices may hang.
    pub async fn let_go(&self, subsystem: &Subsystem, nsid: u32) {
        self.close_withdrawn();
        // A connection caches its last namespace, and looks it up again when it is woken.
        self.connections.list().values().for_each(|control| control.wake());
        let key = (subsystem.id(), nsid);
        self.namespace_closed.wait_until(|| !self.namespaces.borrow().is_in_use(key)).await;
    }

    /// Closes withdrawn namespaces that are not in use.  The last user of any other closes it.
    fn close_withdrawn(&self) {
        let withdrawn = self.namespaces.borrow_mut().take_withdrawn(self.subsystems.withdrawals());
        drop(withdrawn);
    }

    /// Stops accepting and ends all connections, after their commands in flight.  Waits until the connections are
    /// closed.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop()).await;
        self.namespaces.borrow_mut().open.clear();
    }

    /// Returns a namespace, opening it on first use.  Returns `None` if it does not exist.
    fn namespace(&self, subsystem: &Subsystem, nsid: u32) -> Option<Rc<OpenNamespace>> {
        self.close_withdrawn();
        let mut namespaces = self.namespaces.borrow_mut();
        if let Some(open) = namespaces.open.get(&(subsystem.id(), nsid)) {
            return Some(open.clone());
        }
        let info = subsystem.namespace(nsid)?;
        let device = self.devices.open(&info)?;
        let reservations = device.reservations();
        let telling = reservations
            .as_ref()
            .map(|reservations| spawn(tell_reservations(subsystem.clone(), info.clone(), reservations.clone())));
        let reservations = reservations.map(|reservations| RefCell::new(reservations.view()));
        let (subsystem_of, closed) = (subsystem.clone(), self.namespace_closed.clone());
        let open = Rc::new(OpenNamespace { subsystem: subsystem_of, info, device, reservations, telling, closed });
        namespaces.open.insert((subsystem.id(), nsid), open.clone());
        Some(open)
    }

    /// Returns the TLS state of this core, creating it on first use.
    fn tls(&self) -> Result<&tls::TlsContext, forebay_tls::TlsFailure> {
        if let Some(shared) = self.tls.get() {
            return Ok(shared);
        }
        let shared = tls::TlsContext::new(&self.subsystems)?;
        Ok(self.tls.get_or_init(|| shared))
    }

    /// Returns the byte budget shared by a host's connections on this core.
    fn host_budget(&self, host: &str) -> Rc<ByteBudget> {
        let mut hosts = self.hosts.borrow_mut();
        if let Some(budget) = hosts.get(host).and_then(Weak::upgrade) {
            return budget;
        }
        hosts.retain(|_, budget| budget.strong_count() > 0);
        let budget = ByteBudget::new(self.subsystems.limits().host_bytes, Some(self.budget.clone()));
        hosts.insert(host.to_owned(), Rc::downgrade(&budget));
        budget
    }
}

/// Notifies hosts of changes to their registrations and reservations.
async fn tell_reservations(subsystem: Subsystem, namespace: Arc<Namespace>, reservations: Reservations) {
    let (mut changes, mut view) = (reservations.changes(), reservations.view());
    let mut seen = view.table().last_event();
    while changes.next().await {
        let table = view.table().clone();
        for event in table.events_after(seen) {
            subsystem.tell_reservation(&namespace, event);
        }
        seen = table.last_event();
    }
}

impl fmt::Debug for NvmeServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NvmeServer({} connections)", self.connections())
    }
}
