//! An endpoint: who it is, what it takes, where it listens, and whom it talks to.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::rc::{Rc, Weak};
use std::str::FromStr;
use std::time::Duration;

use forebay_reactor::sync::Notify;
use forebay_reactor::{random, spawn};

use crate::connection::{Conn, Connection, Link, Reason, State};
use crate::engine;
use crate::message::Message;
use crate::portal::{Portal, Shared};
use crate::session::auth::{Named, NoAuth};
use crate::session::{AuthClient, AuthServer, Key, Keyring, Policy, Resume, Session, cephx, shared_key};
use crate::throttle::Budget;
use crate::transport::{Acceptor, Address, Manner};
use crate::wire::control::mode;
use crate::wire::{AddrKind, EntityAddr, Limits, entity};

/// How we show who we are, and how others do.
#[derive(Debug, Clone)]
pub enum Auth {
    /// Not at all: only for this machine.
    None,
    /// Mutual proof by a shared key.
    SharedKey {
        /// Our name: the keyring of whom we connect to has our key under it.
        name: String,
        /// Our key.
        key: Key,
        /// Of those who may connect to us.
        keyring: Rc<Keyring>,
    },
    /// As a client of a Ceph cluster's monitors; nobody can connect to us.
    Cephx {
        /// The part of the name behind `client.`.
        id: String,
        /// Its key.
        secret: cephx::Secret,
        /// Services whose tickets are wanted, of [`entity`], added up.
        services: u32,
        /// Where the tickets go.
        wallet: Rc<cephx::Wallet>,
    },
    /// As a client of a Ceph cluster that asks nobody for proof; nobody can connect to us.
    Named {
        /// The part of the name behind `client.`.
        id: String,
        /// Where our number goes, and comes from.
        wallet: Rc<cephx::Wallet>,
        /// The peers are its monitors, which give us a number.
        monitors: bool,
    },
    /// As a client of a Ceph cluster's OSDs or managers, by a ticket; nobody can connect to us.
    CephxService {
        /// Where the ticket is.
        wallet: Rc<cephx::Wallet>,
        /// Of [`entity`].
        service: u32,
    },
}

impl Auth {
    pub(crate) fn client(&self) -> Box<dyn AuthClient> {
        match self {
            Self::None => Box::new(NoAuth),
            Self::SharedKey { name, key, .. } => Box::new(shared_key::Client::new(name.clone(), key.clone())),
            Self::Cephx { id, secret, services, wallet } => {
                Box::new(cephx::Client::new(id.clone(), secret.clone(), *services, wallet.clone()))
            }
            Self::Named { id, wallet, monitors } => Box::new(Named::new(id.clone(), wallet.clone(), *monitors)),
            Self::CephxService { wallet, service } => Box::new(cephx::Authorizer::new(wallet.clone(), *service)),
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

    /// The peers are a Ceph cluster's daemons.
    pub(crate) fn is_ceph(&self) -> bool {
        matches!(self, Self::Cephx { .. } | Self::Named { .. } | Self::CephxService { .. })
    }
}

/// A network: an address and how many of its bits count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    addr: IpAddr,
    bits: u32,
}

impl Network {
    fn contains(&self, addr: IpAddr) -> bool {
        let same = |one: u128, other: u128, width: u32| self.bits == 0 || (one ^ other) >> (width - self.bits) == 0;
        match (self.addr, addr.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(addr)) => same(net.to_bits().into(), addr.to_bits().into(), 32),
            (IpAddr::V6(net), IpAddr::V6(addr)) => same(net.to_bits(), addr.to_bits(), 128),
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (addr, bits) = text.split_once('/').map_or((text, None), |(addr, bits)| (addr, Some(bits)));
        let wrong = || format!("'{text}' is no network; use ADDRESS or ADDRESS/BITS");
        let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
        let width = if addr.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(width), |bits| bits.parse().map_err(|_| wrong()))?;
        if bits > width { Err(wrong()) } else { Ok(Self { addr, bits }) }
    }
}

/// What an endpoint is set up with.
#[derive(Debug, Clone)]
pub struct Options {
    /// What we are, of [`entity`].
    pub entity: u8,
    /// What those must be to whom we connect; `None` for whatever they are.
    pub peer_entity: Option<u8>,
    /// Our number; with cephx the monitor's takes its place.
    pub gid: u64,
    /// Tells apart the lives of a process at the same place; `None` for a random one.  A Ceph cluster fences a client
    /// by its address and this: all messengers of one client have the same.
    pub nonce: Option<u32>,
    /// How we show who we are, and how others do.
    pub auth: Auth,
    /// Of [`mode`], the most wanted first.  `None`: secure only, but to and from this machine crc, then secure; and crc
    /// where there is no authentication.
    pub modes: Option<Vec<u32>>,
    /// Segments carry checksums in crc mode; both sides must agree on it beforehand.
    pub checksum: bool,
    /// Features of messages that we know.
    pub supported: u64,
    /// Features of messages that we ask for.
    pub required: u64,
    /// Bytes of segments, at most.
    pub limits: Limits,
    /// Messages of one peer that were received and not dropped.
    pub receive: Budget,
    /// Messages to one peer that wait to be sent or, in a lossless session, to be acknowledged.
    pub send: Budget,
    /// What becomes of those who connect to us and do not ask to be lossy.
    pub accept: Policy,
    /// From where one may connect; empty for everywhere.
    pub allow: Vec<Network>,
    /// Connections at a time, those in standby included.
    pub connections_max: usize,
    /// Peers at a time that have connected and not identified themselves yet.
    pub handshakes_max: usize,
    /// Time for a handshake.
    pub handshake_timeout: Duration,
    /// After so much silence the peer is asked whether it is there.
    pub keepalive_interval: Duration,
    /// After so much silence it is not.
    pub keepalive_timeout: Duration,
    /// Time for a frame from its first byte to its last.
    pub frame_timeout: Duration,
    /// Rest before a stream is made again, at first ...
    pub backoff_min: Duration,
    /// ... and, doubled each time, at most.
    pub backoff_max: Duration,
    /// How long a client goes on trying to reach its peer again; `None`: until it is closed.
    pub give_up: Option<Duration>,
    /// How long a server keeps the session of a client that is gone.
    pub linger: Duration,
    /// How long a side of shared memory or RDMA that had something to do looks for more before it sleeps.
    pub look: Duration,
    /// The address of the RDMA device that is used; `None` for the one that leads to the peer.
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
            linger: Duration::from_secs(600),
            look: Duration::from_micros(50),
            rdma_local: None,
        }
    }
}

impl Options {
    pub(crate) fn manner(&self) -> Manner {
        Manner { look: self.look, rdma_local: self.rdma_local }
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

/// What an endpoint does with what comes.  It is called on the portal's reactor and must not wait: what takes time is
/// spawned, and as long as it keeps its message, the message counts against the peer's budget.
pub trait Handler {
    /// A message came that is no reply to a request of ours.
    fn message(&self, connection: &Connection, message: Message);

    /// Messages flow, for the first time or again.
    fn opened(&self, _connection: &Connection) {}

    /// The stream is lost, and the session waits for another one.
    fn interrupted(&self, _connection: &Connection, _reason: &Reason) {}

    /// The peer has forgotten the session: what it had not acknowledged has failed.  A new session has begun.
    fn reset(&self, _connection: &Connection) {}

    /// A peer was turned away before it had a connection.
    fn refused(&self, _peer: &Address, _reason: &Reason) {}

    /// The connection has ended, and not by our [`close`](Connection::close).
    fn lost(&self, _connection: &Connection, _reason: &Reason) {}
}

impl<F: Fn(&Connection, Message)> Handler for F {
    fn message(&self, connection: &Connection, message: Message) {
        self(connection, message);
    }
}

/// Whose session it is: a name, and the address of one of its lives.
pub(crate) type SessionKey = (String, EntityAddr);

pub(crate) struct Inner {
    pub(crate) options: Options,
    pub(crate) portal: Rc<Shared>,
    pub(crate) handler: Rc<dyn Handler>,
    pub(crate) nonce: u32,
    global_seq: Cell<u64>,
    last_tid: Cell<u64>,
    pub(crate) place: RefCell<Option<Address>>,
    /// Of those who have connected to us and can come back.
    pub(crate) sessions: RefCell<BTreeMap<SessionKey, Rc<Conn>>>,
    /// All that have not ended.
    conns: RefCell<Vec<Rc<Conn>>>,
    pub(crate) handshakes: Cell<usize>,
    pub(crate) stopping: Cell<bool>,
    pub(crate) changed: Notify,
}

impl Inner {
    /// A number for a connection of ours, higher than all before and than `seen`.
    pub(crate) fn next_global_seq(&self, seen: u64) -> u64 {
        self.global_seq.set(self.global_seq.get().max(seen) + 1);
        self.global_seq.get()
    }

    /// Our own address, as the peer that means `target` knows us.
    pub(crate) fn own_addr(&self, target: Option<EntityAddr>) -> EntityAddr {
        let place = || self.place.borrow().as_ref().and_then(Address::socket);
        EntityAddr::msgr2(target.and_then(|target| target.socket).or_else(place), self.nonce)
    }

    /// Our own address on a connection that we make.
    pub(crate) fn client_addr(&self, nonce: u32) -> EntityAddr {
        // Ceph's daemons take all connections from one address for the same client, and that is what is blocklisted.
        // Ours know a session by its address, so that each has its own.
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

/// An endpoint.  It can listen at several places and connect to many; everything happens on its portal's reactor.
#[derive(Clone)]
pub struct Messenger {
    pub(crate) inner: Rc<Inner>,
}

impl Messenger {
    /// An endpoint that does not listen yet.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(portal: &Portal, options: Options, handler: impl Handler + 'static) -> Self {
        let nonce = options.nonce.unwrap_or_else(|| (random() as u32).max(1));
        let inner = Inner {
            options,
            portal: portal.shared.clone(),
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

    /// Listens, and returns the address as bound.
    ///
    /// # Errors
    /// What binding brings; `PermissionDenied` for a place that others than this machine can reach, without
    /// authentication.
    pub fn bind(&self, address: &Address) -> io::Result<Address> {
        if matches!(self.inner.options.auth, Auth::None) && !address.is_local() {
            let text = format!("{address} can be reached from other machines, and no key is set");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if let Address::Loopback(name) = address {
            let mut names = self.inner.portal.names.borrow_mut();
            if names.get(name).is_some_and(|other| other.strong_count() > 0) {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{address} is in use")));
            }
            names.insert(name.clone(), Rc::downgrade(&self.inner));
            return Ok(address.clone());
        }
        let (acceptors, bound) = Acceptor::bind(address, self.inner.options.manner())?;
        self.inner.place.borrow_mut().get_or_insert_with(|| bound.clone());
        for acceptor in acceptors {
            drop(spawn(engine::accept(self.inner.clone(), acceptor)));
        }
        Ok(bound)
    }

    /// A connection to a peer.  It is being made when this returns: [`Connection::ready`] waits until it is there, and
    /// messages can be queued meanwhile.
    pub fn connect(&self, address: &Address, policy: Policy) -> Connection {
        let lossy = policy.is_lossy();
        let cookie = if lossy { 0 } else { random().max(1) };
        let session = Session::new(lossy, Resume { client_cookie: cookie, ..Resume::default() });
        let place = (address.clone(), String::new());
        if let Address::Loopback(name) = address {
            return self.connect_local(place, name, policy, session);
        }
        let conn = Conn::new(self.inner.clone(), place, (policy, State::Connecting, Link::Remote), session);
        self.inner.remember(&conn);
        drop(spawn(engine::client(conn.clone())));
        Connection::new(conn)
    }

    /// A connection to one instance of a peer, told apart by its nonce from those before and after it at the same place.
    pub fn connect_instance(&self, address: &Address, nonce: u32, policy: Policy) -> Connection {
        let connection = self.connect(address, policy);
        // The task that makes the stream has not had a turn yet.
        connection.conn.target_nonce.set(nonce);
        connection
    }

    /// Joins two ends in this process.
    fn connect_local(
        &self,
        place: (Address, String),
        name: &str,
        policy: Policy,
        session: Session<Rc<crate::connection::Outgoing>>,
    ) -> Connection {
        let found = self.inner.portal.names.borrow().get(name).and_then(Weak::upgrade);
        let link = Link::Local(RefCell::default());
        let conn = Conn::new(self.inner.clone(), place.clone(), (policy, State::Connecting, link), session);
        let Some(server) = found.filter(|server| !server.stopping.get()) else {
            let text = format!("nobody is called {name} here");
            conn.end(Reason::Io(io::ErrorKind::ConnectionRefused, text));
            return Connection::new(conn);
        };
        let link = Link::Local(RefCell::new(Rc::downgrade(&conn)));
        let theirs = (server.options.accept, State::Open, link);
        let other = Conn::new(server.clone(), place, theirs, Session::new(true, Resume::default()));
        if let Link::Local(end) = &conn.link {
            *end.borrow_mut() = Rc::downgrade(&other);
        }
        conn.transport.set("loopback");
        other.transport.set("loopback");
        conn.entity.set(server.options.entity);
        other.entity.set(self.inner.options.entity);
        self.inner.remember(&conn);
        server.remember(&other);
        conn.set_state(State::Open);
        server.handler.opened(&Connection::new(other));
        self.inner.handler.opened(&Connection::new(conn.clone()));
        Connection::new(conn)
    }

    /// A number for [`Connection::request_as`] that this messenger has not given before, on whichever connection it will
    /// be used: 1, 2, 3 and so on.
    pub fn next_tid(&self) -> u64 {
        self.inner.last_tid.set(self.inner.last_tid.get() + 1);
        self.inner.last_tid.get()
    }

    /// All connections that have not ended.
    pub fn connections(&self) -> Vec<Connection> {
        self.inner.conns.borrow().iter().cloned().map(Connection::new).collect()
    }

    /// Peers that have connected and not identified themselves yet.
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
        let mut names = self.inner.portal.names.borrow_mut();
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
    fn networks_contain_their_addresses() {
        let contains = |network: &str, addr: &str| {
            network.parse::<Network>().expect("a network").contains(addr.parse().expect("an address"))
        };
        assert!(contains("10.17.0.0/16", "10.17.23.10") && !contains("10.17.0.0/16", "10.18.0.1"));
        assert!(contains("10.0.0.1", "10.0.0.1") && !contains("10.0.0.1", "10.0.0.2"));
        assert!(contains("0.0.0.0/0", "1.2.3.4") && !contains("0.0.0.0/0", "::1"));
        assert!(contains("fd00::/8", "fd12::1") && !contains("fd00::/8", "fe80::1"));
        assert!(contains("10.0.0.0/8", "::ffff:10.1.1.1"));
        for wrong in ["", "10.0.0.0/33", "x/3", "10.0.0.0/", "::/129"] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }

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
