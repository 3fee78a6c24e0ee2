//! State of a messenger endpoint: its connections, numbers, and whether it has stopped.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;

use forebay_reactor::sync::Notify;

use crate::connection::Conn;
use crate::messenger::Handler;
use crate::messenger_core::CoreState;
use crate::options::MessengerOptions;
use crate::transport::Address;
use crate::wire::{AddrKind, EntityAddr};

/// State of a messenger endpoint, shared with its connections and tasks.
pub(crate) struct MessengerEndpoint {
    pub(crate) options: MessengerOptions,
    pub(crate) core: Rc<CoreState>,
    pub(crate) handler: Rc<dyn Handler>,
    pub(crate) nonce: u32,
    /// Address that was bound first.
    pub(crate) bound: OnceCell<Address>,
    pub(crate) numbers: SequenceNumbers,
    pub(crate) connections: EndpointConnections,
    pub(crate) handshakes: Handshakes,
    pub(crate) stop: EndpointStopSignal,
}

impl MessengerEndpoint {
    pub(crate) fn new(
        options: MessengerOptions,
        core: Rc<CoreState>,
        handler: Rc<dyn Handler>,
        nonce: u32,
    ) -> Rc<Self> {
        Rc::new(Self {
            options,
            core,
            handler,
            nonce,
            bound: OnceCell::new(),
            numbers: SequenceNumbers::default(),
            connections: EndpointConnections::default(),
            handshakes: Handshakes::default(),
            stop: EndpointStopSignal::default(),
        })
    }

    /// Returns the address of this endpoint as seen by a peer that connects to `target`.
    pub(crate) fn own_addr(&self, target: Option<EntityAddr>) -> EntityAddr {
        let bound = || self.bound.get().and_then(Address::socket);
        EntityAddr::msgr2(target.and_then(|target| target.socket).or_else(bound), self.nonce)
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

    pub(crate) fn may_connect(&self, peer: &Address) -> bool {
        let allow = &self.options.allow;
        let listed = |addr: IpAddr| allow.iter().any(|network| network.contains(addr));
        allow.is_empty() || peer.socket().is_none_or(|socket| listed(socket.ip()))
    }
}

/// Sequence numbers and transaction IDs of an endpoint, each larger than those before it.
#[derive(Default)]
pub(crate) struct SequenceNumbers {
    global_seq: Cell<u64>,
    last_tid: Cell<u64>,
}

impl SequenceNumbers {
    /// Returns the next global sequence number for an outgoing connection, greater than all before it and than `seen`,
    /// up to the highest number, which a peer may have stated.
    pub(crate) fn next_global_seq(&self, seen: u64) -> u64 {
        self.global_seq.set(self.global_seq.get().max(seen).saturating_add(1));
        self.global_seq.get()
    }

    /// Returns the next transaction ID.
    pub(crate) fn next_tid(&self) -> u64 {
        self.last_tid.set(self.last_tid.get() + 1);
        self.last_tid.get()
    }
}

/// Key of a session: peer name, and the address (with nonce) of one process instance.
pub(crate) type SessionKey = (String, EntityAddr);

/// Connections of an endpoint that have not ended.
///
/// Invariants:
/// 1. A connection is listed once, from its beginning to its end.
/// 2. A session belongs to a listed connection, and no two connections have the same session.
/// 3. Connections are dropped while the lists are not borrowed, since that may run a handler's code.
#[derive(Default)]
pub(crate) struct EndpointConnections {
    listed: RefCell<Vec<Rc<Conn>>>,
    /// Sessions of lossless clients, kept so that they can reconnect.
    sessions: RefCell<BTreeMap<SessionKey, Rc<Conn>>>,
}

impl EndpointConnections {
    pub(crate) fn count(&self) -> usize {
        self.listed.borrow().len()
    }

    /// Returns all connections.
    pub(crate) fn all(&self) -> Vec<Rc<Conn>> {
        self.listed.borrow().clone()
    }

    /// Lists a new connection.
    pub(crate) fn add(&self, conn: &Rc<Conn>) {
        debug_assert!(!conn.is_closed() && !self.contains(conn), "an ended or listed connection is listed");
        self.listed.borrow_mut().push(conn.clone());
    }

    fn contains(&self, conn: &Rc<Conn>) -> bool {
        self.listed.borrow().iter().any(|other| Rc::ptr_eq(other, conn))
    }

    /// Returns the connection of a session.
    pub(crate) fn session(&self, key: &SessionKey) -> Option<Rc<Conn>> {
        self.sessions.borrow().get(key).cloned()
    }

    /// Sets the connection of a new session.
    pub(crate) fn add_session(&self, key: SessionKey, conn: &Rc<Conn>) {
        debug_assert!(self.contains(conn), "the session of a connection that is not listed");
        let before = self.sessions.borrow_mut().insert(key, conn.clone());
        debug_assert!(before.is_none(), "two connections with the same session");
    }

    /// Removes a connection that has ended, and its session.
    pub(crate) fn remove(&self, conn: &Rc<Conn>) {
        debug_assert!(conn.is_closed(), "a connection that has not ended is removed");
        let mut gone = Vec::new();
        let mut listed = self.listed.borrow_mut();
        if let Some(at) = listed.iter().position(|other| Rc::ptr_eq(other, conn)) {
            gone.push(listed.swap_remove(at));
        }
        drop(listed);
        let mut sessions = self.sessions.borrow_mut();
        let key = sessions.iter().find(|(_, other)| Rc::ptr_eq(other, conn)).map(|(key, _)| key.clone());
        gone.extend(key.and_then(|key| sessions.remove(&key)));
        drop(sessions);
        drop(gone);
    }
}

/// Number of incoming connections that have not identified themselves yet.
#[derive(Default)]
pub(crate) struct Handshakes(Rc<Cell<usize>>);

impl Handshakes {
    pub(crate) fn count(&self) -> usize {
        self.0.get()
    }

    /// Counts one more, until the guard is dropped.
    pub(crate) fn begin(&self) -> HandshakeGuard {
        self.0.set(self.0.get() + 1);
        HandshakeGuard(self.0.clone())
    }
}

/// Guard of one handshake; counts until it is dropped.
pub(crate) struct HandshakeGuard(Rc<Cell<usize>>);

impl Drop for HandshakeGuard {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Signal that ends the tasks of an endpoint; once sent, it stays.
#[derive(Default)]
pub(crate) struct EndpointStopSignal {
    stopped: Cell<bool>,
    changed: Notify,
}

impl EndpointStopSignal {
    pub(crate) fn is_sent(&self) -> bool {
        self.stopped.get()
    }

    pub(crate) fn send(&self) {
        self.stopped.set(true);
        self.changed.notify_all();
    }

    /// Returns the output of `future`, or `None` if the signal is sent first.
    pub(crate) async fn unless_sent<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = std::pin::pin!(future);
        let mut stopped = std::pin::pin!(self.changed.wait_until(|| self.is_sent()));
        std::future::poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return std::task::Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_cannot_exhaust_global_sequence_numbers() {
        let numbers = SequenceNumbers::default();
        assert_eq!((numbers.next_global_seq(0), numbers.next_global_seq(7)), (1, 8));
        assert_eq!((numbers.next_global_seq(u64::MAX), numbers.next_global_seq(0)), (u64::MAX, u64::MAX));
    }
}
