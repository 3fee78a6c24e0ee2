//! Messenger endpoint: listeners, connections, and the handler of their messages.

use std::fmt;
use std::io;
use std::rc::Rc;

use forebay_reactor::{random, spawn};

use crate::connection::{Conn, Connection, ConnectionIdentity, DisconnectReason, PeerRoute};
use crate::endpoint::MessengerEndpoint;
use crate::message::Message;
use crate::messenger_core::MessengerCore;
use crate::options::{Auth, MessengerOptions};
use crate::session::{MessengerSession, Policy, Resume};
use crate::transport::{Acceptor, Address};
use crate::{engine, loopback};

/// Handler of incoming messages and connection events.  Called on the reactor of the messenger core, and must not block:
/// long work is spawned.  A message counts against the peer's budget until it is dropped.
pub trait Handler {
    /// Handles a message that is not a reply to a request of this endpoint.
    fn message(&self, connection: &Connection, message: Message);

    /// Called when the connection opens, for the first time or after a reconnect.
    fn opened(&self, _connection: &Connection) {}

    /// Called when the stream is lost and the session waits for a new one.
    fn interrupted(&self, _connection: &Connection, _reason: &DisconnectReason) {}

    /// Called when the peer has dropped the session: messages that it had not acknowledged have failed.  A new session
    /// has begun.
    fn reset(&self, _connection: &Connection) {}

    /// Called when a peer is rejected before it has a connection.
    fn refused(&self, _peer: &Address, _reason: &DisconnectReason) {}

    /// Called when the connection has ended other than by a local [`close`](Connection::close).
    fn lost(&self, _connection: &Connection, _reason: &DisconnectReason) {}
}

impl<F: Fn(&Connection, Message)> Handler for F {
    fn message(&self, connection: &Connection, message: Message) {
        self(connection, message);
    }
}

/// Messenger endpoint.  Listens at any number of addresses and connects to any number of peers; everything runs on its
/// core's reactor.
#[derive(Clone)]
pub struct Messenger {
    endpoint: Rc<MessengerEndpoint>,
}

impl Messenger {
    /// Creates an endpoint that does not listen yet.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(core: &MessengerCore, options: MessengerOptions, handler: impl Handler + 'static) -> Self {
        let nonce = options.nonce.unwrap_or_else(|| (random() as u32).max(1));
        Self { endpoint: MessengerEndpoint::new(options, core.state.clone(), Rc::new(handler), nonce) }
    }

    /// Listens at `address`, and returns the address as bound.
    ///
    /// # Errors
    /// Errors of binding; `PermissionDenied` for an address that other machines can reach, without authentication.
    pub fn bind(&self, address: &Address) -> io::Result<Address> {
        if matches!(self.endpoint.options.auth, Auth::None) && !address.is_local() {
            let text =
                format!("cannot listen at {address}: reachable from other machines, and no authentication key is set");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if let Address::Loopback(name) = address {
            if !self.endpoint.core.local.listen(name, &self.endpoint) {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{address} is in use")));
            }
            return Ok(address.clone());
        }
        let (acceptors, bound) = Acceptor::bind(address, self.endpoint.options.transport())?;
        self.endpoint.bound.get_or_init(|| bound.clone());
        for acceptor in acceptors {
            drop(spawn(engine::accept(self.endpoint.clone(), acceptor)));
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
        let session = MessengerSession::new(lossy, Resume { client_cookie: cookie, ..Resume::default() });
        if let Address::Loopback(name) = address {
            return loopback::connect(&self.endpoint, address, name, policy, session);
        }
        let identity = ConnectionIdentity::of_instance(address.clone(), String::new(), nonce);
        let conn = Conn::new(self.endpoint.clone(), identity, (policy, PeerRoute::Remote), session);
        self.endpoint.connections.add(&conn);
        drop(spawn(engine::client(conn.clone())));
        Connection::new(conn)
    }

    /// Returns a transaction ID for [`Connection::request_as`] that this messenger has not returned before, for use on
    /// any of its connections: 1, 2, 3 and so on.
    pub fn next_tid(&self) -> u64 {
        self.endpoint.numbers.next_tid()
    }

    /// Returns all connections that have not ended.
    pub fn connections(&self) -> Vec<Connection> {
        self.endpoint.connections.all().into_iter().map(Connection::new).collect()
    }

    /// Returns the number of incoming connections that have not identified themselves yet.
    pub fn handshakes(&self) -> usize {
        self.endpoint.handshakes.count()
    }

    /// Stops listening and ends all connections.
    pub fn shutdown(&self) {
        self.endpoint.stop.send();
        for conn in self.endpoint.connections.all() {
            conn.end(DisconnectReason::Closed);
        }
        self.endpoint.core.local.remove(&self.endpoint);
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Messenger({} connections)", self.endpoint.connections.count())
    }
}
