//! vhost-user server: a socket for each export, on one core, and its queues on several.  The only module of this crate that
//! performs I/O or waits.

mod backend_channel;
mod connection;
mod device;
mod device_copy;
mod device_events;
mod incoming;
mod queue;
mod queue_slot;
mod ring_owner;
mod scsi_nexus;
mod spread;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{BlockDevice, InFlightTracker};
use forebay_reactor::{Addr, CoreHandle, Listener, Stream, fs, sleep, spawn, wall_clock};
use forebay_scsi::{LogicalUnits, ScsiTarget};
use forebay_serve::{ConnectionStopSignal, ServerConnections};

use crate::block::PayloadPools;
use crate::stats::VhostStats;
use connection::{ConnectionNumbers, VhostConnection};
use device::{FrontEndChannel, VhostDevice};
use ring_owner::{RingClaim, RingOwner};
use spread::QueueSpread;

/// Maximum queues of a device.
pub const QUEUES_MAX: u16 = 64;
/// Maximum bytes of a serial number that a guest sees.
pub const SERIAL_MAX: usize = crate::block::SERIAL_LEN;
/// Maximum front-ends of an export at a time; a migration has two.
const FRONT_ENDS_MAX: usize = 8;
/// First pause after a failed connection to a front-end's socket.
const CONNECT_REST: Duration = Duration::from_millis(50);
/// Longest pause between two attempts.
const CONNECT_REST_MAX: Duration = Duration::from_secs(1);

/// Socket of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VhostSocket {
    /// Socket that the daemon creates, and monitors connect to.
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Permissions of the socket's file.
        mode: u32,
        /// User id to which the file is given.
        user: Option<u32>,
        /// Group id to which the file is given.
        group: Option<u32>,
    },
    /// Socket on which a monitor listens; the daemon connects, again and again while there is no connection.
    Connect {
        /// Path of the socket.
        path: PathBuf,
    },
}

impl VhostSocket {
    /// Returns the path.
    pub fn path(&self) -> &PathBuf {
        match self {
            VhostSocket::Listen { path, .. } | VhostSocket::Connect { path } => path,
        }
    }
}

/// Disks of a device that is served.
#[derive(Clone)]
pub enum VhostVolume {
    /// Volume as a virtio-blk device.
    Block {
        /// Volume that is served.
        device: Rc<dyn BlockDevice>,
        /// Serial number that the guest sees; at most [`SERIAL_MAX`] bytes.
        serial: String,
    },
    /// Units of a target as the disks of a virtio-scsi device.
    Scsi(VhostScsiTarget),
}

/// Target that is served as a virtio-scsi device.
#[derive(Clone)]
pub struct VhostScsiTarget {
    /// Target, to which units are added and from which they are removed at any time.
    pub target: ScsiTarget,
    /// Units in use on this core.
    pub units: Rc<LogicalUnits>,
    /// NAA identifier of the guest as an initiator: its reservations are kept under it over restarts.
    pub initiator: [u8; 8],
}

/// Device that is served.
#[derive(Clone)]
pub struct VhostExport {
    /// Name of the export, for logs and counters.
    pub name: String,
    /// Disks of the device.
    pub volume: VhostVolume,
    /// Number of request queues that a monitor may use, from 1 to [`QUEUES_MAX`].
    pub queues: u16,
}

impl fmt::Debug for VhostExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VhostExport({}, {} queues)", self.name, self.queues)
    }
}

/// Export of a server.
struct ServedExport {
    export: VhostExport,
    socket: VhostSocket,
    owner: Rc<RingOwner>,
    /// Cores of its queues, if some are on others than this one.
    spread: Option<QueueSpread>,
    /// Ended connections whose other cores may not have released the volume yet.
    releases: InFlightTracker,
    connections: Rc<ServerConnections<Rc<ConnectionStopSignal>>>,
    /// Set once no front-end is taken any more.
    withdrawn: Cell<bool>,
}

/// Server of exports.
pub struct VhostServer {
    /// Cores for queues.
    cores: Vec<CoreHandle>,
    /// Number of exports that were added so far.
    added: Cell<usize>,
    exports: RefCell<BTreeMap<String, Rc<ServedExport>>>,
    /// Rights to run the rings of exports, by their names; ended ones may have requests at their volumes still.
    owners: RefCell<BTreeMap<String, Weak<RingOwner>>>,
    pools: Rc<PayloadPools>,
    numbers: ConnectionNumbers,
    stats: VhostStats,
}

impl fmt::Debug for VhostServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VhostServer({} exports)", self.exports.borrow().len())
    }
}

impl VhostServer {
    /// Creates a server without exports.
    pub fn new(stats: VhostStats) -> Rc<Self> {
        Self::on_cores(stats, Vec::new())
    }

    /// Creates a server without exports, whose virtio-blk queues will be distributed over `cores`.  Requests of those on
    /// other cores reach their volumes by messages to this one.
    pub fn on_cores(stats: VhostStats, cores: Vec<CoreHandle>) -> Rc<Self> {
        let (exports, owners) = (RefCell::default(), RefCell::default());
        let (pools, added) = (Rc::new(PayloadPools::new()), Cell::new(0));
        Rc::new(Self { cores, added, exports, owners, pools, numbers: ConnectionNumbers::default(), stats })
    }

    /// Returns the right to run the rings of an export, which outlives it as long as a ring runs.
    fn owner(&self, name: &str) -> Rc<RingOwner> {
        let mut owners = self.owners.borrow_mut();
        owners.retain(|_, owner| owner.strong_count() > 0);
        owners.get(name).and_then(Weak::upgrade).unwrap_or_else(|| {
            let owner = Rc::<RingOwner>::default();
            owners.insert(name.to_owned(), Rc::downgrade(&owner));
            owner
        })
    }

    /// Serves an export on a socket, which is bound when this returns; a socket to connect to need not exist yet.
    ///
    /// # Errors
    /// When the path is in use, by another export or by a live process, or cannot be created; when the name is in use, or
    /// the number of queues is not from 1 to [`QUEUES_MAX`].
    pub fn add(self: &Rc<Self>, export: VhostExport, socket: VhostSocket) -> io::Result<()> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if !(1..=QUEUES_MAX).contains(&export.queues) {
            return invalid(format!("{} queues: 1 to {QUEUES_MAX} are supported", export.queues));
        }
        let exports = self.exports.borrow();
        if exports.contains_key(&export.name) {
            return invalid(format!("{} is exported already", export.name));
        }
        if let Some(other) = exports.values().find(|other| other.socket.path() == socket.path()) {
            return invalid(format!("{} is the socket of {}", socket.path().display(), other.export.name));
        }
        drop(exports);
        let listener = match &socket {
            VhostSocket::Listen { path, mode, user, group } => {
                let listener = Listener::bind_private(&Addr::Unix(path.clone()))?;
                // Ownership first: changing it may clear bits of the mode.
                if let Err(error) = fs::set_owner(path, *user, *group).and_then(|()| fs::set_mode(path, *mode)) {
                    let _ = fs::remove_file(path);
                    let what = format!("permissions of the socket {}: {error}", path.display());
                    return Err(io::Error::new(error.kind(), what));
                }
                Some(listener)
            }
            VhostSocket::Connect { .. } => None,
        };
        let first = self.added.replace(self.added.get() + 1);
        let served = Rc::new(ServedExport {
            spread: QueueSpread::new(&export, &self.cores, first),
            owner: self.owner(&export.name),
            export,
            socket,
            releases: InFlightTracker::default(),
            connections: ServerConnections::new(),
            withdrawn: Cell::new(false),
        });
        self.exports.borrow_mut().insert(served.export.name.clone(), served.clone());
        let server = self.clone();
        drop(spawn(async move {
            match listener {
                Some(listener) => server.accept(served, listener).await,
                None => server.connect(served).await,
            }
        }));
        Ok(())
    }

    async fn accept(self: Rc<Self>, served: Rc<ServedExport>, listener: Listener) {
        let connections = served.connections.clone();
        let adopt = |stream: Stream, _| {
            if served.withdrawn.get() || served.connections.len() >= FRONT_ENDS_MAX {
                self.stats.count(|counts| counts.turned_away += 1);
                let (export, pid) = (&served.export.name, stream.peer_process());
                tracing::warn!(
                    export,
                    pid,
                    "a vhost-user front-end was turned away: the export ends, or has {FRONT_ENDS_MAX}"
                );
                return;
            }
            let (server, served) = (self.clone(), served.clone());
            let stop_signal = Rc::new(ConnectionStopSignal::default());
            let entry = served.connections.enter(stop_signal.clone());
            drop(spawn(async move {
                server.serve(&served, stream, &stop_signal).await;
                drop(entry);
            }));
        };
        connections.accept(&listener, adopt).await;
    }

    /// Connects to the front-end's socket, whenever there is no connection.
    async fn connect(self: Rc<Self>, served: Rc<ServedExport>) {
        let addr = Addr::Unix(served.socket.path().clone());
        let connections = &served.connections;
        let mut rest = CONNECT_REST;
        while !connections.stopping() && !served.withdrawn.get() {
            match connections.unless_stopped(Stream::connect(&addr)).await {
                None => return,
                Some(Ok(stream)) => {
                    rest = CONNECT_REST;
                    let stop_signal = Rc::new(ConnectionStopSignal::default());
                    let entry = connections.enter(stop_signal.clone());
                    self.serve(&served, stream, &stop_signal).await;
                    drop(entry);
                }
                Some(Err(error)) => {
                    if rest == CONNECT_REST {
                        let export = &served.export.name;
                        tracing::info!(export, %addr, %error, "no vhost-user front-end listens yet; trying again");
                    }
                }
            }
            connections.unless_stopped(sleep(rest)).await;
            rest = (rest * 2).min(CONNECT_REST_MAX);
        }
    }

    async fn serve(&self, served: &Rc<ServedExport>, stream: Stream, stop_signal: &ConnectionStopSignal) {
        self.stats.count(|counts| counts.accepted += 1);
        let (name, export) = (&served.export.name, served.export.clone());
        let kind = match &export.volume {
            VhostVolume::Block { .. } => "blk",
            VhostVolume::Scsi(_) => "scsi",
        };
        let stats = Rc::new(self.stats.enter(name.clone(), kind, wall_clock()));
        let connection = self.numbers.next();
        // Names the virtual machine's monitor, when several compete for a socket.
        let pid = stream.peer_process();
        tracing::info!(export = name, connection, pid, "a vhost-user front-end has connected");
        let channel = FrontEndChannel::Direct(None);
        let device = Rc::new(VhostDevice::new(export, self.pools.clone(), stats.add_core(), Arc::default(), channel));
        let copies = served.spread.as_ref().map_or_else(Vec::new, |spread| spread.copy(&device, &stats));
        let claim = RingClaim { owner: served.owner.clone(), connection };
        let served_connection = VhostConnection::new(stream, device, copies, claim, stats).serve(stop_signal);
        let (reason, copies) = served_connection.await;
        let release = served.releases.begin();
        drop(spawn(async move {
            for copy in copies {
                copy.end().await;
            }
            drop(release);
        }));
        match reason.is_fault() {
            true => {
                self.stats.count(|counts| counts.ended_for_cause += 1);
                tracing::warn!(export = name, connection, %reason, "a vhost-user device was ended");
            }
            false => tracing::info!(export = name, connection, %reason, "a vhost-user front-end has gone"),
        }
    }

    fn find(&self, name: &str) -> Option<Rc<ServedExport>> {
        self.exports.borrow().get(name).cloned()
    }

    /// Stops new connections to an export; those that exist go on.
    pub fn unpublish(&self, name: &str) {
        if let Some(served) = self.find(name) {
            served.withdrawn.set(true);
        }
    }

    /// Ends an export: its connections after their requests in flight, and its socket.
    pub async fn detach(&self, name: &str) {
        let Some(served) = self.find(name) else { return };
        served.withdrawn.set(true);
        if let VhostSocket::Listen { path, .. } = &served.socket {
            // While the listener lives: later, the path may have the socket of another process.
            let _ = fs::remove_file(path);
        }
        served.connections.stop(|stop_signal| stop_signal.stop()).await;
        served.releases.drain().await;
        self.exports.borrow_mut().remove(name);
    }

    /// Ends all exports.
    pub async fn stop(&self) {
        let names: Vec<String> = self.exports.borrow().keys().cloned().collect();
        for name in names {
            self.detach(&name).await;
        }
    }
}
