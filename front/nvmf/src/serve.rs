//! Serving: accepts connections, and runs them.  The only part of this crate that waits for anything.

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
use crate::target::{BLOCK_SHIFT, Control, Namespace, Port, Target};
use budget::Budget;
use connection::{Connection, End};

/// How often is looked whether the commands of a namespace that is to go have ended.
const LEAVING_LOOK: Duration = Duration::from_millis(1);

/// The devices behind the namespaces, on one core: the server's view of whoever owns the volumes.
pub trait Devices {
    /// Opens the device of a namespace; `None` when it has just gone.
    fn open(&self, namespace: &Namespace) -> Option<Rc<dyn BlockDevice>>;
}

/// A namespace that was opened on this core.
pub(crate) struct OpenNamespace {
    info: Arc<Namespace>,
    device: Rc<dyn BlockDevice>,
    /// Who may read and write, where that can be reserved.
    reservations: Option<RefCell<View>>,
    /// Tells the hosts that lose what they had.
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
    /// What decides about a command, as things are now.
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
    /// The target's generation when they were looked through last.
    seen: u64,
    open: HashMap<u32, Rc<OpenNamespace>>,
    /// Those that the target has no more, as long as something uses them.
    leaving: Vec<Rc<OpenNamespace>>,
}

/// A server on one core.  Several cores each have their own, on shared listeners, with the same [`Target`].
pub struct Server {
    target: Target,
    devices: Box<dyn Devices>,
    pools: Rc<Pools>,
    budget: Rc<Budget>,
    /// Made when a connection first needs it.
    tls: OnceCell<tls::Shared>,
    hosts: RefCell<BTreeMap<String, Weak<Budget>>>,
    namespaces: RefCell<OpenNamespaces>,
    connections: Rc<Connections<Arc<Control>>>,
    /// Connections that are no queue yet, or whose host has still to show who it is.
    fresh: Cell<usize>,
}

impl Server {
    /// A server of `target` on this core, which opens namespaces through `devices`.
    pub fn new(target: Target, devices: Box<dyn Devices>) -> Rc<Self> {
        let budget = Budget::new(target.limits().core_bytes, None);
        Rc::new(Self {
            target,
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

    /// What it serves.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Connections now, those without a queue too.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Bytes of data of commands that are under way or not sent yet.
    pub fn bytes_held(&self) -> usize {
        self.budget.used()
    }

    /// Accepts connections, each of which becomes a task of its own, until [`stop`](Self::stop).
    pub async fn serve(self: Rc<Self>, listener: Listener, port: Arc<Port>) {
        tracing::info!(addr = %listener.local_addr(), port = port.id, "serving NVMe/TCP");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer, port.clone())).await;
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr, port: Arc<Port>) {
        let stats = self.target.stats();
        stats.count(|counts| counts.accepted += 1);
        let limits = self.target.limits();
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
                    server.target.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, reason = %fatal, "a connection is ended");
                }
                End::TooSlow => {
                    server.target.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, "a connection is ended that did not become a queue in time");
                }
                End::Refused | End::Overdue => {
                    server.target.stats().count(|counts| counts.ended_for_cause += 1);
                    tracing::warn!(%peer, ?end, "a connection is ended");
                }
                End::Socket(error) => tracing::info!(%peer, %error, "a connection failed"),
                end => tracing::debug!(%peer, ?end, "a connection has ended"),
            }
            drop(place);
        }));
    }

    /// Lets go of the namespaces that the target has no more (or has anew), and waits until no command of this core is
    /// under way on the one that had this id.  Others that were taken away may go on: their devices may hang.
    pub async fn let_go(&self, nsid: u32) {
        self.forget_removed();
        // A connection keeps its last namespace at hand; it looks anew when it is woken.
        self.connections.list().values().for_each(|control| control.wake());
        loop {
            {
                let leaving = &mut self.namespaces.borrow_mut().leaving;
                leaving.retain(|namespace| Rc::strong_count(namespace) > 1);
                if leaving.iter().all(|namespace| namespace.info.nsid != nsid) {
                    return;
                }
            }
            sleep(LEAVING_LOOK).await;
        }
    }

    /// Lets go of what is open of namespaces that the target has no more.
    fn forget_removed(&self) {
        let mut namespaces = self.namespaces.borrow_mut();
        let generation = self.target.generation();
        if namespaces.seen == generation {
            return;
        }
        namespaces.seen = generation;
        let OpenNamespaces { open, leaving, .. } = &mut *namespaces;
        leaving.retain(|namespace| Rc::strong_count(namespace) > 1);
        open.retain(|nsid, open| {
            let stays = self.target.namespace(*nsid).is_some_and(|now| Arc::ptr_eq(&now, &open.info));
            if !stays {
                leaving.push(open.clone());
            }
            stays
        });
    }

    /// Stops accepting, ends all connections, their commands under way first, and waits until they are gone.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop()).await;
        self.namespaces.borrow_mut().open.clear();
    }

    /// A namespace, opened if it is not yet.
    fn namespace(&self, nsid: u32) -> Option<Rc<OpenNamespace>> {
        self.forget_removed();
        let mut namespaces = self.namespaces.borrow_mut();
        if let Some(open) = namespaces.open.get(&nsid) {
            return Some(open.clone());
        }
        let info = self.target.namespace(nsid)?;
        let device = self.devices.open(&info)?;
        let reservations = device.reservations();
        let telling = reservations
            .as_ref()
            .map(|reservations| spawn(tell_reservations(self.target.clone(), info.clone(), reservations.clone())));
        let reservations = reservations.map(|reservations| RefCell::new(reservations.view()));
        let open = Rc::new(OpenNamespace { info, device, reservations, telling });
        namespaces.open.insert(nsid, open.clone());
        Some(open)
    }

    /// What TLS needs on this core.
    fn tls(&self) -> Result<&tls::Shared, forebay_tls::Failure> {
        if let Some(shared) = self.tls.get() {
            return Ok(shared);
        }
        let shared = tls::Shared::new(&self.target)?;
        Ok(self.tls.get_or_init(|| shared))
    }

    /// The budget of a host's connections on this core.
    fn host_budget(&self, host: &str) -> Rc<Budget> {
        let mut hosts = self.hosts.borrow_mut();
        if let Some(budget) = hosts.get(host).and_then(Weak::upgrade) {
            return budget;
        }
        hosts.retain(|_, budget| budget.strong_count() > 0);
        let budget = Budget::new(self.target.limits().host_bytes, Some(self.budget.clone()));
        hosts.insert(host.to_owned(), Rc::downgrade(&budget));
        budget
    }
}

/// Tells hosts of what happens to their registrations and reservations.
async fn tell_reservations(target: Target, namespace: Arc<Namespace>, reservations: Reservations) {
    let (mut changes, mut view) = (reservations.changes(), reservations.view());
    let mut seen = view.table().last_event();
    while changes.next().await {
        let table = view.table().clone();
        for event in table.events_after(seen) {
            target.tell_reservation(&namespace, event);
        }
        seen = table.last_event();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({} connections)", self.connections())
    }
}
