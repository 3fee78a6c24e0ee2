//! Peer messenger of the daemon: sessions with other daemons and with messenger clients.
//!
//! It responds to `forebay perf messenger run`, and keeps a session with each daemon that the configuration names, so
//! that both know whether the other is reachable.  Daemons describe themselves to each other, and hold copies of each
//! other's write logs.  Messages between daemons are handled by the handler of [`Peers`].

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_forward::ForwardHost;
use forebay_forward::wire::{KIND_EVENT as KIND_FORWARD_EVENT, KIND_REQUEST as KIND_FORWARD_REQUEST};
use forebay_gateways::wire::KIND_GATEWAY;
use forebay_messenger::{
    Address, Auth, Connection, ConnectionState, DisconnectReason, Handler, Keyring, Message, MessageBudget, Messenger,
    MessengerCore, MessengerOptions, Network, Policy, perf,
};
use forebay_reactor::timeout;
use forebay_writelog::replication::hello::{KIND_HELLO, PeerHello};
use forebay_writelog::replication::wire::{KIND_GROUP, KIND_REQUEST};
use forebay_writelog::replication::{KnownPeers, PeerId, PeerUnknown, ReplicaHost, ReplicaShelf, is_at};

use super::identity::DataDirIdentity;
use crate::api::{self, Peer};
use crate::config::DaemonConfig;
use crate::failure::{Failure, Result};

/// Receive budget for messages not yet dropped, of all peers together.
const BUDGET: MessageBudget = MessageBudget { messages: 16 << 10, bytes: 128 << 20 };
/// Receive budget of one peer.
const BUDGET_EACH: MessageBudget = MessageBudget { messages: 4096, bytes: 32 << 20 };
/// Maximum number of peers, including those that may resume a session.
const PEERS_MAX: usize = 1024;
/// Time for which a lost peer may resume its session; a restarted peer begins a new session anyway.
const STANDBY: Duration = Duration::from_secs(60);

/// Counters of the peer messenger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerCounts {
    /// Messages that were responded to.
    pub messages: u64,
    /// Peers that were refused before they had a connection.
    pub refused: u64,
    /// Connections that were interrupted.
    pub interrupted: u64,
}

/// Time that a peer has to say again what it offers.
const REFRESH: Duration = Duration::from_millis(500);

/// Time that a peer gets to describe itself when it is named by its address.
const DESCRIBED: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Counts(Cell<PeerCounts>);

impl Counts {
    fn change(&self, change: impl FnOnce(&mut PeerCounts)) {
        let mut counts = self.0.get();
        change(&mut counts);
        self.0.set(counts);
    }
}

/// Handler of the messages of a gateway group, and of connections to its members.
pub trait GroupMessages {
    /// Handles a message; returns false if it is none of the group.
    fn message(&self, connection: &Connection, message: Message) -> bool;

    /// Handles a connection that has opened.
    fn connected(&self, connection: &Connection);

    /// Handles a connection that was interrupted, and may be resumed.
    fn interrupted(&self, connection: &Connection);

    /// Handles a connection that has ended, or whose peer has dropped the session.
    fn lost(&self, connection: &Connection);
}

/// Gateway group of this daemon, if it is in one.
type GroupSlot = Rc<RefCell<Option<Rc<dyn GroupMessages>>>>;

/// Messenger of the daemon and its peers.
pub struct Peers {
    counts: Rc<Counts>,
    group: GroupSlot,
    daemon: Rc<OwnDaemon>,
    messenger: RefCell<Option<Messenger>>,
    addrs: RefCell<Vec<Address>>,
    outgoing: RefCell<Vec<Connection>>,
}

/// Daemon that runs here, as its peers know it.
struct OwnDaemon {
    boot: [u8; 16],
    known: Rc<KnownPeers>,
    replicas: Rc<ReplicaHost>,
    /// Networks of the daemons that may have copies of their logs here; if empty, every peer may.
    allowed: Vec<Network>,
}

impl OwnDaemon {
    /// Returns whether the daemon behind a connection may have copies of its logs here.
    fn may_have_copies(&self, connection: &Connection) -> bool {
        let address = match connection.address() {
            Address::Tcp(address) | Address::Rdma(address) => Some(address.ip()),
            _ => None,
        };
        let within = |ip| self.allowed.iter().any(|network| network.contains(ip));
        // Who connects over a socket of this machine has access to it by the permissions of the socket.
        self.allowed.is_empty() || address.is_none_or(within)
    }

    /// Returns why the daemon behind a connection may not have copies of its logs here, if so.
    fn refusal(&self, connection: &Connection) -> Option<&'static str> {
        if self.known.has_copied_identity(connection) {
            return Some("two daemons with the identity of the sender are connected");
        }
        (!self.may_have_copies(connection)).then_some("this daemon's [replicas] allow list does not name the sender")
    }

    /// Returns the description of this daemon for the peer behind a connection.
    fn hello(&self, connection: &Connection) -> PeerHello {
        let offers = if self.may_have_copies(connection) { self.replicas.offers() } else { Vec::new() };
        PeerHello { peer: self.known.own(), boot: self.boot, host: host_name(), offers }
    }
}

struct Answers {
    counts: Rc<Counts>,
    daemon: Rc<OwnDaemon>,
    group: GroupSlot,
    /// Answers to requests of forwarders while this daemon is in no group.
    no_volumes: Rc<ForwardHost>,
}

impl Answers {
    fn group(&self) -> Option<Rc<dyn GroupMessages>> {
        self.group.borrow().clone()
    }
}

impl Handler for Answers {
    fn message(&self, connection: &Connection, message: Message) {
        let answered = match message.kind {
            KIND_HELLO => {
                self.daemon.known.answer(connection, &message, &self.daemon.hello(connection));
                // Only now is it known whose connection it is.
                if let Some(group) = self.group() {
                    group.connected(connection);
                }
                true
            }
            KIND_REQUEST | KIND_GROUP => match self.daemon.refusal(connection) {
                Some(why) => {
                    ReplicaHost::refuse(connection, &message, why);
                    true
                }
                None => self.daemon.replicas.handle(connection, message),
            },
            KIND_GATEWAY | KIND_FORWARD_REQUEST | KIND_FORWARD_EVENT => match self.group() {
                Some(group) => group.message(connection, message),
                // The sender is a member that does not know yet that this daemon has left, or has been started again.
                None if message.kind == KIND_FORWARD_REQUEST => self.no_volumes.handle(connection, message),
                None => false,
            },
            kind => {
                let answered = perf::answer(connection, &message, cpu_nanos);
                if !answered {
                    tracing::warn!(peer = %connection.address(), kind, "unknown message from a peer");
                }
                answered
            }
        };
        if answered {
            self.counts.change(|counts| counts.messages += 1);
        }
    }

    fn opened(&self, connection: &Connection) {
        let (peer, transport) = (connection.address(), connection.transport());
        tracing::info!(%peer, name = connection.name(), transport, "peer connected");
        self.daemon.known.opened(connection, &self.daemon.hello(connection));
        if let Some(group) = self.group() {
            group.connected(connection);
        }
    }

    fn reset(&self, connection: &Connection) {
        if let Some(group) = self.group() {
            group.lost(connection);
        }
    }

    fn interrupted(&self, connection: &Connection, reason: &DisconnectReason) {
        self.counts.change(|counts| counts.interrupted += 1);
        tracing::warn!(
            peer = %connection.address(), name = connection.name(), %reason,
            "connection to a peer lost; its session waits for a new one"
        );
        if let Some(group) = self.group() {
            group.interrupted(connection);
        }
    }

    fn refused(&self, _peer: &Address, _reason: &DisconnectReason) {
        // The messenger has logged it.
        self.counts.change(|counts| counts.refused += 1);
    }

    fn lost(&self, connection: &Connection, reason: &DisconnectReason) {
        tracing::info!(peer = %connection.address(), name = connection.name(), %reason, "session of a peer ended");
        self.daemon.known.forget(connection);
        if let Some(group) = self.group() {
            group.lost(connection);
        }
    }
}

impl Peers {
    /// Creates the messenger of a daemon that holds copies of its peers' logs on these log devices, for peers in the
    /// `allowed` networks.
    pub fn new(identity: &DataDirIdentity, shelves: Vec<ReplicaShelf>, allowed: Vec<Network>) -> Self {
        let boot = identity.boot();
        let known = Rc::new(KnownPeers::new(PeerId(identity.uuid), boot));
        let daemon = Rc::new(OwnDaemon { boot, known, replicas: ReplicaHost::new(shelves), allowed });
        Self {
            counts: Rc::default(),
            group: Rc::default(),
            daemon,
            messenger: RefCell::default(),
            addrs: RefCell::default(),
            outgoing: RefCell::default(),
        }
    }

    /// Returns the peers that have described themselves.
    pub fn known(&self) -> &Rc<KnownPeers> {
        &self.daemon.known
    }

    /// Asks all peers again what they offer; waits a bounded time for each.
    pub async fn refresh(&self) {
        for connection in self.known().connections() {
            let asked = self.daemon.known.ask(&connection, &self.daemon.hello(&connection));
            let _ = timeout(REFRESH, asked).await;
        }
    }

    /// Returns the copies of other daemons' logs.
    pub fn replicas(&self) -> &Rc<ReplicaHost> {
        &self.daemon.replicas
    }

    /// Listens and connects as configured; does nothing if no addresses or peers are configured.
    pub fn start(&self, config: &DaemonConfig) -> Result<()> {
        let peers = &config.peers;
        if peers.listen.is_empty() && peers.connect.is_empty() {
            return Ok(());
        }
        let auth = match &peers.key {
            None => Auth::None,
            Some(key) => {
                let keyring = Rc::new(Keyring::new().with_shared(key.clone()));
                Auth::SharedKey { name: host_name(), key: key.clone(), keyring }
            }
        };
        let options = MessengerOptions {
            auth,
            modes: peers.modes(),
            receive: BUDGET_EACH,
            send: BUDGET_EACH,
            allow: peers.allow.clone(),
            connections_max: PEERS_MAX,
            session_timeout: STANDBY,
            busy_poll: config.linger,
            rdma_local: peers.rdma_local,
            ..MessengerOptions::default()
        };
        let answers = Answers {
            counts: self.counts.clone(),
            daemon: self.daemon.clone(),
            group: self.group.clone(),
            no_volumes: ForwardHost::new(),
        };
        let messenger = Messenger::new(&MessengerCore::new(BUDGET), options, answers);
        // From here on, `stop` has work to do.
        *self.messenger.borrow_mut() = Some(messenger.clone());
        for address in &peers.listen {
            let bound = messenger
                .bind(address)
                .map_err(|error| Failure::io(error, format_args!("listening for peers on {address}")))?;
            if let (Address::Rdma(_), Address::Tcp(_)) = (address, &bound) {
                tracing::warn!(%address, "RDMA unavailable; listening for peers over TCP only");
            }
            tracing::info!(address = %bound, "listening for peers");
            self.addrs.borrow_mut().push(bound);
        }
        let connect = |address: &Address| messenger.connect(address, Policy::LosslessPeer);
        self.outgoing.borrow_mut().extend(peers.connect.iter().map(connect));
        Ok(())
    }

    /// Sets the gateway group, whose messages are handled from now on.
    pub fn set_group(&self, group: Option<Rc<dyn GroupMessages>>) {
        let former = self.group.replace(group);
        drop(former);
    }

    /// Finds a peer as [`KnownPeers::find`] does.  A connection to the address that `name` is may be opening, or have been
    /// lost for a moment: waits a bounded time for its peer to describe itself.
    ///
    /// # Errors
    /// [`PeerUnknown`].
    pub async fn find(&self, name: &str) -> std::result::Result<PeerId, PeerUnknown> {
        let outgoing = self.outgoing.borrow().iter().find(|connection| is_at(connection, name)).cloned();
        if let Some(connection) = outgoing {
            let _ = timeout(DESCRIBED, self.known().until_described(&connection)).await;
        }
        self.known().find(name)
    }

    /// Keeps a connection to another daemon, unless there is one to this address.
    pub fn connect(&self, address: &Address) {
        let Some(messenger) = self.messenger.borrow().clone() else { return };
        let mut outgoing = self.outgoing.borrow_mut();
        outgoing.retain(|connection| connection.state() != ConnectionState::Closed);
        if !outgoing.iter().any(|connection| connection.address() == address) {
            outgoing.push(messenger.connect(address, Policy::LosslessPeer));
        }
    }

    /// Ends all connections, and makes those again that this daemon has begun: to its peers it is another start.
    pub fn reconnect(&self) {
        let Some(messenger) = self.messenger.borrow().clone() else { return };
        for connection in messenger.connections() {
            connection.close();
            self.daemon.known.forget(&connection);
            if let Some(group) = self.group.borrow().clone() {
                group.lost(&connection);
            }
        }
        let former = self.outgoing.take();
        let again = former.iter().map(|connection| messenger.connect(connection.address(), Policy::LosslessPeer));
        *self.outgoing.borrow_mut() = again.collect();
    }

    /// Stops accepting peers, and ends all connections.
    pub fn stop(&self) {
        self.set_group(None);
        let messenger = self.messenger.take();
        if let Some(messenger) = messenger {
            messenger.shutdown();
        }
        self.outgoing.take();
        for address in self.addrs.take() {
            if let Address::Unix(path) | Address::Shm(path) = address {
                // A socket path left behind would be replaced at the next start.
                let _ = forebay_reactor::fs::remove_file(path);
            }
        }
    }

    /// Returns the listening addresses.
    pub fn addrs(&self) -> Vec<String> {
        self.addrs.borrow().iter().map(ToString::to_string).collect()
    }

    /// Returns the counters.
    pub fn counts(&self) -> PeerCounts {
        self.counts.0.get()
    }

    /// Lists the peers that are connected, may resume their session, or are being connected to.
    pub fn list(&self) -> Vec<Peer> {
        let messenger = self.messenger.borrow();
        let outgoing = self.outgoing.borrow();
        let connections = messenger.as_ref().map(Messenger::connections).unwrap_or_default();
        let described = |connection: &Connection| {
            let peer = describe(connection, outgoing.contains(connection));
            match self.daemon.known.described(connection) {
                None => peer,
                Some(known) => Peer {
                    id: Some(known.hello.peer.to_string()),
                    host: Some(known.hello.host),
                    round_trip_us: known.round_trip.map(|time| time.as_micros() as u64),
                    replicas: known.hello.offers.iter().map(api::OfferedReplicas::from).collect(),
                    ..peer
                },
            }
        };
        connections.iter().map(described).collect()
    }
}

fn describe(connection: &Connection, outgoing: bool) -> Peer {
    let state = match connection.state() {
        ConnectionState::Open => "open",
        ConnectionState::Connecting => "connecting",
        ConnectionState::Standby => "standby",
        ConnectionState::Closed => "closed",
    };
    Peer {
        address: connection.address().to_string(),
        name: connection.name().into(),
        outgoing,
        state: state.into(),
        transport: connection.transport().into(),
        pending: connection.pending().messages,
        held: connection.held().messages,
        reason: connection.reason().map(|reason| reason.to_string()),
        id: None,
        host: None,
        round_trip_us: None,
        replicas: Vec::new(),
    }
}

/// Returns the host name of this machine, which peers see.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().take(200).collect();
    if name.is_empty() { "forebay".into() } else { name }
}

/// Returns the CPU time of this process in nanoseconds: all threads, user and system.
pub fn cpu_nanos() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
