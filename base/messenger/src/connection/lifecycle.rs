//! Lifecycle of a connection: its state, its current stream, and why it has none.

use std::cell::{Cell, RefCell};

use forebay_reactor::sync::Notify;

use super::DisconnectReason;

/// Connection state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionState {
    /// Connecting, for the first time or again.
    Connecting,
    /// Established; messages flow.
    Open,
    /// Server side without a stream; the client may reconnect.
    Standby,
    /// Connection has ended.
    Closed,
}

/// State of a connection, and the number of its current stream.
///
/// Invariants:
/// 1. `Closed` is final, and a closed connection has a reason.
/// 2. A connection that opens has a transport and no reason.
/// 3. The epoch grows with each stream, with its loss and with the end of the connection: a stream of an earlier epoch
///    has no effect any more.
/// 4. The global sequence number of the peer's connection attempts never decreases.
/// 5. Each change of state wakes every task that waits for one.
pub(crate) struct ConnectionLifecycle {
    state: Cell<ConnectionState>,
    epoch: Cell<u64>,
    /// Highest global sequence number of a connection from this peer.
    peer_global_seq: Cell<u64>,
    /// Cause of the end, or of the loss of the last stream.
    reason: RefCell<Option<DisconnectReason>>,
    /// Current transport, or the last one; empty before the first stream.
    transport: Cell<&'static str>,
    changed: Notify,
}

impl ConnectionLifecycle {
    /// Creates the lifecycle of a connection that has no stream yet.
    pub(super) fn new() -> Self {
        Self {
            state: Cell::new(ConnectionState::Connecting),
            epoch: Cell::new(0),
            peer_global_seq: Cell::new(0),
            reason: RefCell::default(),
            transport: Cell::new(""),
            changed: Notify::new(),
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> ConnectionState {
        self.state.get()
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.get() == ConnectionState::Closed
    }

    /// Returns why the connection has ended, or why the last stream was lost.
    pub(crate) fn reason(&self) -> Option<DisconnectReason> {
        self.reason.borrow().clone()
    }

    /// Returns the name of the current transport, or of the last one; empty before the first stream.
    pub(crate) fn transport(&self) -> &'static str {
        self.transport.get()
    }

    /// Returns true if no other stream has begun since this epoch, and the connection has not ended.
    #[inline]
    pub(crate) fn is_current(&self, epoch: u64) -> bool {
        self.epoch.get() == epoch
    }

    /// Returns the highest global sequence number of a connection attempt of the peer.
    pub(crate) fn peer_global_seq(&self) -> u64 {
        self.peer_global_seq.get()
    }

    /// Records the global sequence number of a connection attempt of the peer that is accepted.
    pub(crate) fn set_peer_global_seq(&self, seq: u64) {
        debug_assert!(seq >= self.peer_global_seq.get(), "a superseded connection attempt was accepted");
        self.peer_global_seq.set(seq);
    }

    /// Ends the current epoch, and returns the new one.
    pub(super) fn next_epoch(&self) -> u64 {
        debug_assert!(!self.is_closed(), "a closed connection begins no stream");
        self.epoch.set(self.epoch.get() + 1);
        self.epoch.get()
    }

    /// Opens the connection over a stream of this transport.
    pub(crate) fn open(&self, transport: &'static str) {
        debug_assert!(!transport.is_empty(), "an open connection has a transport");
        self.reason.take();
        self.transport.set(transport);
        self.set_state(ConnectionState::Open);
    }

    /// Records the loss of the stream; the connection waits in `state` for a new one.
    pub(crate) fn disconnect(&self, state: ConnectionState, reason: DisconnectReason) {
        debug_assert!(
            matches!(state, ConnectionState::Connecting | ConnectionState::Standby),
            "{state:?} is no state of waiting"
        );
        self.reason.replace(Some(reason));
        self.set_state(state);
    }

    /// Begins the end of the connection: sets the reason and ends the epoch.  Returns false if it has ended before.
    pub(super) fn begin_close(&self, reason: DisconnectReason) -> bool {
        if self.is_closed() {
            return false;
        }
        self.reason.replace(Some(reason));
        self.next_epoch();
        true
    }

    /// Completes the end of the connection.
    pub(super) fn finish_close(&self) {
        debug_assert!(self.reason.borrow().is_some(), "a closed connection has a reason");
        self.set_state(ConnectionState::Closed);
    }

    fn set_state(&self, state: ConnectionState) {
        debug_assert!(!self.is_closed() || state == ConnectionState::Closed, "a closed connection became {state:?}");
        self.state.set(state);
        self.changed.notify_all();
    }

    /// Waits until the state changes.
    pub(super) fn changed(&self) -> impl Future<Output = ()> + use<'_> {
        self.changed.wait()
    }

    /// Waits until the connection is open or has ended.
    pub(crate) async fn settled(&self) {
        self.changed.wait_until(|| matches!(self.state(), ConnectionState::Open | ConnectionState::Closed)).await;
    }

    /// Waits until the connection has ended.
    pub(crate) async fn closed(&self) {
        self.changed.wait_until(|| self.is_closed()).await;
    }
}
