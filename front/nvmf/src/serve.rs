//! Per-core server: accepts and runs connections.  The only module of this crate that performs I/O or waits.

mod admin;
mod auth;
mod budget;
mod connection;
mod io;
mod outbox;
mod tls;
mod view;
mod work;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_block::BlockDevice;
use forebay_block::reservation::{Reservations, View};
use forebay_reactor::{Addr, JoinHandle, Listener, Stream, sleep, spawn};
use forebay_serve::Connections;

use crate::session::Pools;
use crate::session::io::Rules;
use crate::subsystem::{BLOCK_SHIFT, Control, Namespace, Port, Subsystem, Subsystems};
use budget::Budget;
use connection::{Connection, End};

/// Polling interval while waiting for the commands of a withdrawn namespace to end.
const LEAVING_LOOK: Duration = Duration::from_millis(1);

/// Devices behind the namespaces, on one core: the server's interface to the owner of the volumes.
pub trait Devices {
    /// Opens the device of a namespace.  Returns `None` if the namespace has just been withdrawn.
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>>;
}

/// Namespace opened on this core.
pub(crate) struct OpenNamespace {
    subsystem: Subsystem,
    info: Arc<Namespace>,
    device: Rc<dyn BlockDevice>,
    /// View of the namespace's reservations, if the device supports them.
    reservations: Option<RefCell<View>>,
    /// Task that notifies hosts of lost registrations and reservations.
    telling: Option<JoinHandle<()>>,
}

impl Drop for OpenNamespace {
    fn drop(&mut self) {
        if let Some(telling) = self.telling.take() {
            telling.abort();
        }
    }
}

impl OpenNamespace {
    /// Returns the current geometry and write protection, against which commands are validated.
    fn rules(&self) -> Rules {
        let geometry = self.device.geometry();
        Rules {
            blocks: geometry.size >> BLOCK_SHIFT,
            block_shift: BLOCK_SHIFT,
            write_protected: geometry.read_only || self.info.read_only,
        }
    }
}

#[derive(Default)]
struct OpenNamespaces {
    /// Withdrawal count at the last scan for withdrawn namespaces.
    seen: u64,
    /// Open namespaces, keyed by subsystem number and namespace id.
    open: HashMap<(u32, u32), Rc<OpenNamespace>>,
    /// Withdrawn namespaces that are still in use.
    leaving: Vec<Rc<OpenNamespace>>,
}

/// NVMe/TCP server on one core.  Several cores each have their own, on shared listeners, with the same
/// [`Subsystems`].
pub struct Server {
    subsystems: Subsystems,
    devices: Box<dyn Devices>,
    pools: Rc<Pools>,
    budget: Rc<Budget>,
    /// TLS state of this core, created on first use.
    tls: OnceCell<tls::Shared>,
    hosts: RefCell<BTreeMap<String, Weak<Budget>>>,
    namespaces: RefCell<OpenNamespaces>,
    connections: Rc<Connections<Arc<Control>>>,
    /// Connections that are not a queue yet, or whose host has not authenticated yet.
    fresh: Cell<usize>,
}

impl Server {
    /// Creates a server of `subsystems` on this core, which opens namespaces through `devices`.
    pub fn new(subsystems: Subsystems, devices: Box<dyn Devices>) -> Rc<Self> {
        let budget = Budget::new(subsystems.limits().core_bytes, None);
        Rc::new(Self {
            subsystems,
            devices,
            pools: Rc::new(Pools::new()),
            budget,
            tls: OnceCell::new(),
            hosts: RefCell::default(),
            namespaces: RefCell::default(),
            connections: Connections::new(),
            fresh: Cell::new(0),
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
        let (max, fresh_max) = (limits.connections_max, limits.handshakes_max);
        if self.connections.stopping() || self.connections() >= max || self.fresh.get() >= fresh_max {
            stats.count(|counts| counts.turned_away += 1);
            tracing::warn!(%peer, max, fresh_max, "a connection too many is turned away");
            return;
        }
        let control = Arc::new(Control::default());
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        let connection = Connection::new(self.clone(), port, stream, peer.clone(), control);
        drop(spawn(async move {
            let end = connection.run().await;
            match &end {
                End::Fatal(fatal) => {
                    server.subsystems.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, reason = %fatal, "a connection is ended");
                }
                End::TooSlow => {
                    server.subsystems.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, "a connection is ended that did not become a queue in time");
                }
                End::Refused | End::Overdue => {
                    server.subsystems.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, ?end, "a connection is ended");
                }
                End::Socket(error) => tracing::info!(%peer, %error, "a connection failed"),
                end => tracing::debug!(%peer, ?end, "a connection has ended"),
            }
            drop(place);
        }));
    }

    /// Closes withdrawn namespaces.  Waits until no command of this core is in flight on the withdrawn namespace
    /// `nsid` of `subsystem`.  Does not wait for other withdrawn namespaces, whose devices may hang.
    pub async fn let_go(&self, subsystem: &Subsystem, nsid: u32) {
        self.forget_removed();
        // A connection caches its last namespace, and looks it up again when it is woken.
        self.connections.list().values().for_each(|control| control.wake());
        loop {
            {
                let leaving = &mut self.namespaces.borrow_mut().leaving;
                leaving.retain(|namespace| Rc::strong_count(namespace) > 1);
                if leaving.iter().all(|each| each.info.nsid != nsid || each.subsystem.id() != subsystem.id()) {
                    return;
                }
            }
            sleep(LEAVING_LOOK).await;
        }
    }

    /// Closes withdrawn namespaces.
    fn forget_removed(&self) {
        let mut namespaces = self.namespaces.borrow_mut();
        let withdrawals = self.subsystems.withdrawals();
        if namespaces.seen == withdrawals {
            return;
        }
        namespaces.seen = withdrawals;
        let OpenNamespaces { open, leaving, .. } = &mut *namespaces;
        leaving.retain(|namespace| Rc::strong_count(namespace) > 1);
        open.retain(|(_, nsid), open| {
            let stays = open.subsystem.namespace(*nsid).is_some_and(|now| Arc::ptr_eq(&now, &open.info));
            if !stays {
                leaving.push(open.clone());
            }
            stays
        });
    }

    /// Stops accepting and ends all connections, after their commands in flight.  Waits until the connections are
    /// closed.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop()).await;
        self.namespaces.borrow_mut().open.clear();
    }

    /// Returns a namespace, opening it on first use.  Returns `None` if it does not exist.
    fn namespace(&self, subsystem: &Subsystem, nsid: u32) -> Option<Rc<OpenNamespace>> {
        self.forget_removed();
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
        let open = Rc::new(OpenNamespace { subsystem: subsystem.clone(), info, device, reservations, telling });
        namespaces.open.insert((subsystem.id(), nsid), open.clone());
        Some(open)
    }

    /// Returns the TLS state of this core, creating it on first use.
    fn tls(&self) -> Result<&tls::Shared, forebay_tls::Failure> {
        if let Some(shared) = self.tls.get() {
            return Ok(shared);
        }
        let shared = tls::Shared::new(&self.subsystems)?;
        Ok(self.tls.get_or_init(|| shared))
    }

    /// Returns the byte budget shared by a host's connections on this core.
    fn host_budget(&self, host: &str) -> Rc<Budget> {
        let mut hosts = self.hosts.borrow_mut();
        if let Some(budget) = hosts.get(host).and_then(Weak::upgrade) {
            return budget;
        }
        hosts.retain(|_, budget| budget.strong_count() > 0);
        let budget = Budget::new(self.subsystems.limits().host_bytes, Some(self.budget.clone()));
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

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({} connections)", self.connections())
    }
}
