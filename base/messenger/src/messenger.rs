//! Messenger endpoint: identity, options, message handler, listeners and connections.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_reactor::sync::Notify;
use forebay_reactor::{Network, random, spawn};

use crate::connection::{Conn, Connection, Identity, Outgoing, Reason, Route};
use crate::engine;
use crate::message::Message;
use crate::messenger_core::{MessengerCore, Shared};
use crate::session::auth::{Named, NoAuth};
use crate::session::{AuthClient, AuthServer, Key, Keyring, Policy, Resume, Session, cephx, shared_key};
use crate::throttle::Budget;
use crate::transport::{Acceptor, Address, TransportOptions, no_local_endpoint};
use crate::wire::control::mode;
use crate::wire::{AddrKind, EntityAddr, Limits, entity};

/// Authentication method of this endpoint, for outgoing and incoming connections.
#[derive(Debug, Clone)]
pub enum Auth {
    /// No authentication; only for peers on the local machine.
    None,
    /// Mutual proof of possession of a shared key.
    SharedKey {
        /// Name of this endpoint; the keyring of the peer that it connects to holds its key under this name.
        name: String,
        /// Key of this endpoint.
        key: Key,
        /// Keys of the peers that may connect to this endpoint.
        keyring: Rc<Keyring>,
    },
    /// Cephx client of a Ceph cluster's monitors; accepts no incoming connections.
    Cephx {
        /// Entity ID: the part of the name after `client.`.
        id: String,
        /// Secret key of the client.
        secret: cephx::Secret,
        /// Bit mask of the services to request tickets for, values of [`entity`].
        services: u32,
        /// Store that receives the tickets.
        ticket_store: Rc<cephx::TicketStore>,
    },
    /// Client of a Ceph cluster without authentication (`auth none`); accepts no incoming connections.
    Named {
        /// Entity ID: the part of the name after `client.`.
        id: String,
        /// Store that the global ID is written to and read from.
        ticket_store: Rc<cephx::TicketStore>,
        /// True for monitors, which assign the global ID.
        monitors: bool,
    },
    /// Client of a Ceph cluster's OSDs or managers, authenticated by a ticket; accepts no incoming connections.
    CephxService {
        /// Store that holds the ticket.
        ticket_store: Rc<cephx::TicketStore>,
        /// Service that the ticket is for, of [`entity`].
        service: u32,
    },
}

impl Auth {
    pub(crate) fn client(&self) -> Box<dyn AuthClient> {
        match self {
            Self::None => Box::new(NoAuth),
            Self::SharedKey { name, key, .. } => Box::new(shared_key::Client::new(name.clone(), key.clone())),
            Self::Cephx { id, secret, services, ticket_store } => {
                Box::new(cephx::Client::new(id.clone(), secret.clone(), *services, ticket_store.clone()))
            }
            Self::Named { id, ticket_store, monitors } => {
                Box::new(Named::new(id.clone(), ticket_store.clone(), *monitors))
            }
            Self::CephxService { ticket_store, service } => {
                Box::new(cephx::Authorizer::new(ticket_store.clone(), *service))
            }
        }
    }

    pub(crate) fn server(&self) -> Box<dyn AuthServer> {
        match self {
            Self::None => Box::new(NoAuth),
            Self::SharedKey { name, keyring, .. } => Box::new(shared_key::Server::new(name.clone(), keyring.clone())),
            Self::Cephx { id, .. } => Box::new(shared_key::Server::new(id.clone(), Rc::default())),
            Self::Named { .. } | Self::CephxService { .. } => {
                Box::new(shared_key::Server::new(String::new(), Rc::default()))
            }
        }
    }

    /// Returns true if the peers are daemons of a Ceph cluster.
    pub(crate) fn is_ceph(&self) -> bool {
        matches!(self, Self::Cephx { .. } | Self::Named { .. } | Self::CephxService { .. })
    }
}

/// Options of a [`Messenger`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Entity type of this endpoint, of [`entity`].
    pub entity: u8,
    /// Entity type required of peers that this endpoint connects to; `None` accepts any.
    pub peer_entity: Option<u8>,
    /// Global ID of this endpoint; with cephx the ID assigned by the monitor replaces it.
    pub gid: u64,
    /// Nonce that distinguishes process instances at the same address; `None` picks a random one.  A Ceph cluster
    /// blocklists a client by its address and nonce: all messengers of one client share it.
    pub nonce: Option<u32>,
    /// Authentication method, for outgoing and incoming connections.
    pub auth: Auth,
    /// Connection modes, of [`mode`], most preferred first.  `None` means secure only; crc, then secure, for peers on
    /// this machine; and crc where there is no authentication.
    pub modes: Option<Vec<u32>>,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
    /// Message features supported by this endpoint.
    pub supported: u64,
    /// Message features required of the peer.
    pub required: u64,
    /// Maximum segment sizes in bytes.
    pub limits: Limits,
    /// Receive budget per peer: messages received and not yet dropped.
    pub receive: Budget,
    /// Send budget per peer: messages waiting to be sent or, in a lossless session, to be acknowledged.
    pub send: Budget,
    /// Policy for incoming connections that do not ask to be lossy.
    pub accept: Policy,
    /// Networks that peers may connect from; empty allows all.
    pub allow: Vec<Network>,
    /// Maximum number of connections, including those in standby.
    pub connections_max: usize,
    /// Maximum number of incoming connections that have not identified themselves yet.
    pub handshakes_max: usize,
    /// Timeout of a handshake.
    pub handshake_timeout: Duration,
    /// Silence after which a keepalive is sent to the peer.
    pub keepalive_interval: Duration,
    /// Silence after which the peer is considered dead.
    pub keepalive_timeout: Duration,
    /// Timeout of a frame, from its first byte to its last.
    pub frame_timeout: Duration,
    /// Initial delay before a lost stream is re-established ...
    pub backoff_min: Duration,
    /// ... and its upper bound; the delay doubles with each attempt.
    pub backoff_max: Duration,
    /// Time after which a client stops reconnecting; `None` retries until the connection is closed.
    pub give_up: Option<Duration>,
    /// Time that a server keeps the session of a disconnected client.
    pub session_timeout: Duration,
    /// Busy-poll time of a shared memory or RDMA side after its last work, before it sleeps.
    pub busy_poll: Duration,
    /// Local address of the RDMA device to use; `None` selects the device on the route to the peer.
    pub rdma_local: Option<IpAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            entity: entity::FOREBAY,
            peer_entity: None,
            gid: 0,
            nonce: None,
            auth: Auth::None,
            modes: None,
            checksum: true,
            supported: u64::MAX,
            required: 0,
            limits: Limits::default(),
            receive: Budget { messages: 4096, bytes: 64 << 20 },
            send: Budget { messages: 4096, bytes: 64 << 20 },
            accept: Policy::LosslessPeer,
            allow: Vec::new(),
            connections_max: 4096,
            handshakes_max: 256,
            handshake_timeout: Duration::from_secs(20),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(30),
            frame_timeout: Duration::from_secs(60),
            backoff_min: Duration::from_millis(50),
            backoff_max: Duration::from_secs(5),
            give_up: None,
            session_timeout: Duration::from_secs(600),
            busy_poll: Duration::from_micros(50),
            rdma_local: None,
        }
    }
}

impl Options {
    pub(crate) fn transport(&self) -> TransportOptions {
        TransportOptions { busy_poll: self.busy_poll, rdma_local: self.rdma_local }
    }

    pub(crate) fn modes(&self, local: bool) -> Vec<u32> {
        match (&self.modes, &self.auth) {
            (Some(modes), _) => modes.clone(),
            (None, Auth::None | Auth::Named { .. }) => vec![mode::CRC],
            (None, _) if local => vec![mode::CRC, mode::SECURE],
            (None, _) => vec![mode::SECURE],
        }
    }
}

/// Handler of incoming messages and connection events.  Called on the reactor of the messenger core, and must not block:
/// long work is spawned.  A message counts against the peer's budget until it is dropped.
pub trait Handler {
    /// Handles a message that is not a reply to a request of this endpoint.
    fn message(&self, connection: &Connection, message: Message);

    /// Called when the connection opens, for the first time or after a reconnect.
    fn opened(&self, _connection: &Connection) {}

    /// Called when the stream is lost and the session waits for a new one.
    fn interrupted(&self, _connection: &Connection, _reason: &Reason) {}

    /// Called when the peer has dropped the session: messages that it had not acknowledged have failed.  A new session
    /// has begun.
    fn reset(&self, _connection: &Connection) {}

    /// Called when a peer is rejected before it has a connection.
    fn refused(&self, _peer: &Address, _reason: &Reason) {}

    /// Called when the connection has ended other than by a local [`close`](Connection::close).
    fn lost(&self, _connection: &Connection, _reason: &Reason) {}
}

impl<F: Fn(&Connection, Message)> Handler for F {
    fn message(&self, connection: &Connection, message: Message) {
        self(connection, message);
    }
}

/// Session key: peer name, and the address (with nonce) of one process instance.
pub(crate) type SessionKey = (String, EntityAddr);

pub(crate) struct Inner {
    pub(crate) options: Options,
    pub(crate) core: Rc<Shared>,
    pub(crate) handler: Rc<dyn Handler>,
    pub(crate) nonce: u32,
    global_seq: Cell<u64>,
    last_tid: Cell<u64>,
    pub(crate) place: RefCell<Option<Address>>,
    /// Sessions of lossless clients, kept so that they can reconnect.
    pub(crate) sessions: RefCell<BTreeMap<SessionKey, Rc<Conn>>>,
    /// Connections that have not ended.
    conns: RefCell<Vec<Rc<Conn>>>,
    pub(crate) handshakes: Cell<usize>,
    pub(crate) stopping: Cell<bool>,
    pub(crate) changed: Notify,
}

impl Inner {
    /// Returns the next global sequence number for an outgoing connection, greater than all before it and than `seen`,
    /// up to the highest number, which a peer may have stated.
    pub(crate) fn next_global_seq(&self, seen: u64) -> u64 {
        self.global_seq.set(self.global_seq.get().max(seen).saturating_add(1));
        self.global_seq.get()
    }

    /// Returns the address of this endpoint as seen by a peer that connects to `target`.
    pub(crate) fn own_addr(&self, target: Option<EntityAddr>) -> EntityAddr {
        let place = || self.place.borrow().as_ref().and_then(Address::socket);
        EntityAddr::msgr2(target.and_then(|target| target.socket).or_else(place), self.nonce)
    }

    /// Returns the address of this endpoint for an outgoing connection.
    pub(crate) fn client_addr(&self, nonce: u32) -> EntityAddr {
        // Ceph daemons take all connections from one address for the same client, and blocklist that address.  Forebay
        // servers identify a session by its address, so each session has its own.
        if self.options.auth.is_ceph() {
            return EntityAddr { kind: AddrKind::Any, ..self.own_addr(None) };
        }
        EntityAddr { nonce, ..self.own_addr(None) }
    }

    pub(crate) fn count(&self) -> usize {
        self.conns.borrow().len()
    }

    pub(crate) fn remember(&self, conn: &Rc<Conn>) {
        self.conns.borrow_mut().push(conn.clone());
    }

    pub(crate) fn forget(&self, conn: &Rc<Conn>) {
        let mut gone = Vec::new();
        let mut conns = self.conns.borrow_mut();
        if let Some(at) = conns.iter().position(|other| Rc::ptr_eq(other, conn)) {
            gone.push(conns.swap_remove(at));
        }
        drop(conns);
        let mut sessions = self.sessions.borrow_mut();
        let key = sessions.iter().find(|(_, other)| Rc::ptr_eq(other, conn)).map(|(key, _)| key.clone());
        gone.extend(key.and_then(|key| sessions.remove(&key)));
        drop(sessions);
        drop(gone);
        self.changed.notify_all();
    }

    pub(crate) fn may_connect(&self, peer: &Address) -> bool {
        let allow = &self.options.allow;
        let listed = |addr: IpAddr| allow.iter().any(|network| network.contains(addr));
        allow.is_empty() || peer.socket().is_none_or(|socket| listed(socket.ip()))
    }
}

/// Messenger endpoint.  Listens at any number of addresses and connects to any number of peers; everything runs on its
/// core's reactor.
#[derive(Clone)]
pub struct Messenger {
    pub(crate) inner: Rc<Inner>,
}

impl Messenger {
    /// Creates an endpoint that does not listen yet.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(core: &MessengerCore, options: Options, handler: impl Handler + 'static) -> Self {
        let nonce = options.nonce.unwrap_or_else(|| (random() as u32).max(1));
        let inner = Inner {
            options,
            core: core.shared.clone(),
            handler: Rc::new(handler),
            nonce,
            global_seq: Cell::new(0),
            last_tid: Cell::new(0),
            place: RefCell::default(),
            sessions: RefCell::default(),
            conns: RefCell::default(),
            handshakes: Cell::new(0),
            stopping: Cell::new(false),
            changed: Notify::new(),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Listens at `address`, and returns the address as bound.
    ///
    /// # Errors
    /// Errors of binding; `PermissionDenied` for an address that other machines can reach, without authentication.
    pub fn bind(&self, address: &Address) -> io::Result<Address> {
        if matches!(self.inner.options.auth, Auth::None) && !address.is_local() {
            let text =
                format!("cannot listen at {address}: reachable from other machines, and no authentication key is set");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if let Address::Loopback(name) = address {
            let mut names = self.inner.core.names.borrow_mut();
            if names.get(name).is_some_and(|other| other.strong_count() > 0) {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{address} is in use")));
            }
            names.insert(name.clone(), Rc::downgrade(&self.inner));
            return Ok(address.clone());
        }
        let (acceptors, bound) = Acceptor::bind(address, self.inner.options.transport())?;
        self.inner.place.borrow_mut().get_or_insert_with(|| bound.clone());
        for acceptor in acceptors {
            drop(spawn(engine::accept(self.inner.clone(), acceptor)));
        }
        Ok(bound)
    }

    /// Returns a connection to a peer while it is still being established: [`Connection::ready`] waits until it is
    /// open, and messages can be queued meanwhile.
    pub fn connect(&self, address: &Address, policy: Policy) -> Connection {
        self.connect_instance(address, 0, policy)
    }

    /// Connects to one instance of a peer, distinguished by its nonce from earlier and later instances at the same
    /// address; a nonce of zero means any.
    pub fn connect_instance(&self, address: &Address, nonce: u32, policy: Policy) -> Connection {
        let lossy = policy.is_lossy();
        let cookie = if lossy { 0 } else { random().max(1) };
        let session = Session::new(lossy, Resume { client_cookie: cookie, ..Resume::default() });
        if let Address::Loopback(name) = address {
            return self.connect_local(address, name, policy, session);
        }
        let identity = Identity::of_instance(address.clone(), String::new(), nonce);
        let conn = Conn::new(self.inner.clone(), identity, (policy, Route::Remote), session);
        self.inner.remember(&conn);
        drop(spawn(engine::client(conn.clone())));
        Connection::new(conn)
    }

    /// Connects two endpoints of this process.
    fn connect_local(
        &self,
        address: &Address,
        name: &str,
        policy: Policy,
        session: Session<Rc<Outgoing>>,
    ) -> Connection {
        let found = self.inner.core.names.borrow().get(name).and_then(Weak::upgrade);
        let identity = || Identity::new(address.clone(), String::new());
        let route = Route::Local(RefCell::default());
        let conn = Conn::new(self.inner.clone(), identity(), (policy, route), session);
        let Some(server) = found.filter(|server| !server.stopping.get()) else {
            conn.end(no_local_endpoint(name).into());
            return Connection::new(conn);
        };
        let theirs = (server.options.accept, Route::Local(RefCell::new(Rc::downgrade(&conn))));
        let other = Conn::new(server.clone(), identity(), theirs, Session::new(true, Resume::default()));
        if let Route::Local(end) = &conn.route {
            *end.borrow_mut() = Rc::downgrade(&other);
        }
        conn.identity.identify(server.options.entity, None);
        other.identity.identify(self.inner.options.entity, None);
        self.inner.remember(&conn);
        server.remember(&other);
        for end in [&other, &conn] {
            end.lifecycle.open("loopback");
        }
        server.handler.opened(&Connection::new(other));
        self.inner.handler.opened(&Connection::new(conn.clone()));
        Connection::new(conn)
    }

    /// Returns a transaction ID for [`Connection::request_as`] that this messenger has not returned before, for use on
    /// any of its connections: 1, 2, 3 and so on.
    pub fn next_tid(&self) -> u64 {
        self.inner.last_tid.set(self.inner.last_tid.get() + 1);
        self.inner.last_tid.get()
    }

    /// Returns all connections that have not ended.
    pub fn connections(&self) -> Vec<Connection> {
        self.inner.conns.borrow().iter().cloned().map(Connection::new).collect()
    }

    /// Returns the number of incoming connections that have not identified themselves yet.
    pub fn handshakes(&self) -> usize {
        self.inner.handshakes.get()
    }

    /// Stops listening and ends all connections.
    pub fn shutdown(&self) {
        self.inner.stopping.set(true);
        self.inner.changed.notify_all();
        let conns = self.inner.conns.borrow().clone();
        for conn in conns {
            conn.end(Reason::Closed);
        }
        let mut names = self.inner.core.names.borrow_mut();
        names.retain(|_, other| other.upgrade().is_some_and(|other| !Rc::ptr_eq(&other, &self.inner)));
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Messenger({} connections)", self.inner.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secure_mode_is_the_default_off_this_machine() {
        let key = Key::new([0; 32]);
        let auth = Auth::SharedKey { name: "a".into(), key, keyring: Rc::default() };
        let options = Options { auth, ..Options::default() };
        assert_eq!(options.modes(false), [mode::SECURE]);
        assert_eq!(options.modes(true), [mode::CRC, mode::SECURE]);
        assert_eq!(Options::default().modes(true), [mode::CRC]);
    }
}
