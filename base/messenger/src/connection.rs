//! Connection API: ordered message queues, requests, and their outcomes.

mod error;
mod identity;
mod lifecycle;
mod request;
mod send_queue;

use std::cell::RefCell;
use std::fmt;
use std::rc::{Rc, Weak};
use std::task::Poll;

use forebay_reactor::sync::oneshot;

use crate::endpoint::MessengerEndpoint;
use crate::message::{Message, MessageRole};
use crate::messenger::Handler;
use crate::requests::RequestTable;
use crate::session::{MessengerSession, Policy};
use crate::throttle::{MessageBudget, MessageThrottle};
use crate::transport::Address;
use crate::window::WindowTable;
use crate::wire::{EntityAddr, SegmentLimits};

pub use error::{DisconnectReason, SendError};
pub(crate) use identity::ConnectionIdentity;
pub(crate) use lifecycle::ConnectionLifecycle;
pub use lifecycle::ConnectionState;
use request::ReplyFuture;
pub(crate) use send_queue::{Done, Outgoing, SendQueue};

/// Way to the peer.
pub(crate) enum PeerRoute {
    /// Byte stream; possibly disconnected at the moment.
    Remote,
    /// Peer endpoint in the same process.
    Local(RefCell<Weak<Conn>>),
}

impl PeerRoute {
    /// Returns the other end of a connection within the process, if it still exists.
    fn local_peer(&self) -> Option<Rc<Conn>> {
        match self {
            Self::Remote => None,
            Self::Local(other) => other.borrow().upgrade(),
        }
    }
}

/// One end of a connection, across all its successive streams.
///
/// Each part keeps an invariant of its own; the methods here are what concerns several parts, in an order that matters.
pub(crate) struct Conn {
    pub(crate) endpoint: Rc<MessengerEndpoint>,
    pub(crate) policy: Policy,
    pub(crate) route: PeerRoute,
    pub(crate) identity: ConnectionIdentity,
    pub(crate) lifecycle: ConnectionLifecycle,
    pub(crate) send_queue: SendQueue,
    /// Budget of the messages of this peer that were received and not dropped.
    pub(crate) receive_budget: Rc<MessageThrottle>,
    pub(crate) requests: RequestTable,
    pub(crate) windows: WindowTable,
}

impl Conn {
    /// Creates a connection that has no stream yet.
    pub(crate) fn new(
        endpoint: Rc<MessengerEndpoint>,
        identity: ConnectionIdentity,
        (policy, route): (Policy, PeerRoute),
        session: MessengerSession<Rc<Outgoing>>,
    ) -> Rc<Self> {
        let options = &endpoint.options;
        let receive_budget = MessageThrottle::new(options.receive, Some(endpoint.core.receive_budget.clone()));
        let send_queue = SendQueue::new(session, options.send);
        Rc::new(Self {
            endpoint,
            policy,
            route,
            identity,
            lifecycle: ConnectionLifecycle::new(),
            send_queue,
            receive_budget,
            requests: RequestTable::default(),
            windows: WindowTable::default(),
        })
    }

    pub(crate) fn handler(&self) -> Rc<dyn Handler> {
        self.endpoint.handler.clone()
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.lifecycle.is_closed()
    }

    /// Starts a new stream: messages that the previous one has not settled are sent again.  Returns the new epoch.
    pub(crate) fn take_over(&self) -> u64 {
        let epoch = self.lifecycle.next_epoch();
        self.send_queue.stream_lost();
        self.windows.set_device(None);
        self.send_queue.wake_replaced();
        epoch
    }

    /// Fails all queued messages and pending requests.
    pub(crate) fn fail(&self, reason: &DisconnectReason) {
        self.send_queue.fail(reason);
        self.requests.fail(&SendError::Ended(reason.clone()));
    }

    /// Ends the connection permanently.  Returns true if it had not ended before.
    pub(crate) fn end(self: &Rc<Self>, reason: DisconnectReason) -> bool {
        if !self.lifecycle.begin_close(reason.clone()) {
            return false;
        }
        self.fail(&reason);
        self.windows.close_all();
        self.lifecycle.finish_close();
        self.send_queue.wake_replaced();
        self.endpoint.connections.remove(self);
        if let PeerRoute::Local(other) = &self.route
            && let Some(other) = other.take().upgrade()
        {
            other.lose(&DisconnectReason::PeerClosed);
        }
        true
    }

    /// Ends the connection, and tells the handler that it is lost unless it had ended before.
    pub(crate) fn lose(self: &Rc<Self>, reason: &DisconnectReason) {
        if self.end(reason.clone()) {
            self.handler().lost(&Connection::new(self.clone()), reason);
        }
    }

    fn ended(&self) -> SendError {
        SendError::Ended(self.lifecycle.reason().unwrap_or(DisconnectReason::Closed))
    }

    #[inline]
    fn check(&self, message: &Message) -> Result<(), SendError> {
        let SegmentLimits { front_max, middle_max, data_max, .. } = self.endpoint.options.limits;
        for (segment, max) in [(&message.front, front_max), (&message.middle, middle_max), (&message.data, data_max)] {
            let (len, max) = (segment.len(), max as usize);
            if len > max {
                return Err(SendError::TooLong { len, max });
            }
        }
        Ok(())
    }

    /// Queues a message.  Returns `false` and leaves the message in place if the budget is exhausted.
    pub(crate) fn offer(self: &Rc<Self>, message: &mut Message, done: &mut Option<Done>) -> Result<bool, SendError> {
        if self.is_closed() {
            return Err(self.ended());
        }
        if let PeerRoute::Local(other) = &self.route {
            let other = other.borrow().upgrade();
            return other.map_or_else(|| Err(self.ended()), |other| Ok(other.hand_over(message, done)));
        }
        self.check(message)?;
        Ok(self.send_queue.push(message, done))
    }

    /// Accepts a message from the endpoint in the same process, if the receive budget allows it.
    fn hand_over(self: &Rc<Self>, message: &mut Message, done: &mut Option<Done>) -> bool {
        let Some(held) = self.receive_budget.take(message.len()) else { return false };
        message.held = Some(held);
        if let Some(done) = done.take() {
            done.send(Ok(()));
        }
        let message = std::mem::take(message);
        let message = if message.role == MessageRole::Reply { self.requests.answer(message) } else { Some(message) };
        if let Some(message) = message {
            self.endpoint.core.enqueue(self.clone(), message);
            self.endpoint.core.schedule();
        }
        true
    }

    /// Queues a message as soon as the budget allows it.
    pub(crate) async fn queue(self: &Rc<Self>, mut message: Message, mut done: Option<Done>) -> Result<(), SendError> {
        let _turn = self.send_queue.turn().await;
        while !self.offer(&mut message, &mut done)? {
            self.send_budget(message.len()).await;
        }
        Ok(())
    }

    /// Waits until the budget may suffice for a message of `bytes` bytes, or the connection has changed.
    async fn send_budget(&self, bytes: usize) {
        let other = self.route.local_peer();
        let throttle = other.as_ref().map_or(self.send_queue.budget(), |other| &other.receive_budget);
        let mut changed = std::pin::pin!(self.lifecycle.changed());
        std::future::poll_fn(|cx| {
            if changed.as_mut().poll(cx).is_ready() || throttle.would_take(bytes) {
                return Poll::Ready(());
            }
            throttle.wait(cx.waker());
            Poll::Pending
        })
        .await;
    }

    /// Waits until the send queue is empty, or the connection has ended.
    async fn drained(&self) {
        let budget = self.send_queue.budget();
        loop {
            let mut changed = std::pin::pin!(self.lifecycle.changed());
            if self.is_closed() || budget.used().bytes == 0 {
                return;
            }
            std::future::poll_fn(|cx| {
                if changed.as_mut().poll(cx).is_ready() || budget.used().bytes == 0 {
                    return Poll::Ready(());
                }
                budget.wait(cx.waker());
                Poll::Pending
            })
            .await;
        }
    }
}

/// Connection to a peer, across all its successive streams.  Clones share it.
#[derive(Clone)]
pub struct Connection {
    pub(crate) conn: Rc<Conn>,
}

impl Connection {
    pub(crate) fn new(conn: Rc<Conn>) -> Self {
        Self { conn }
    }

    /// Queues a message, in order.  Queued messages are sent as soon as possible, and sent again after a reconnect if
    /// the policy is lossless.
    ///
    /// # Errors
    /// `Full` when the send budget is exhausted; [`send`](Self::send) waits instead.
    pub fn post(&self, mut message: Message) -> Result<(), SendError> {
        // Senders that wait for budget come first.
        if self.conn.send_queue.has_waiting_senders() {
            return Err(SendError::Full);
        }
        if self.conn.offer(&mut message, &mut None)? { Ok(()) } else { Err(SendError::Full) }
    }

    /// Queues a message as soon as the send budget allows it.
    ///
    /// # Errors
    /// `Ended` when the connection ends before that.
    pub async fn send(&self, message: Message) -> Result<(), SendError> {
        self.conn.queue(message, None).await
    }

    /// Sends a message, and waits until the peer's messenger has it (in a lossy session: until it was handed to the
    /// transport).
    ///
    /// # Errors
    /// `Ended` when the connection ends before that; then the peer may or may not have it.
    pub async fn deliver(&self, message: Message) -> Result<(), SendError> {
        let (done, settled) = oneshot::channel();
        self.conn.queue(message, Some(done)).await?;
        settled.await.unwrap_or_else(|| Err(self.conn.ended()))
    }

    /// Sends a request, and waits for its reply.  Dropping the future discards the reply; the request is not cancelled.
    ///
    /// The transaction ID (`tid`) is assigned by the connection and is not unique across connections;
    /// [`request_as`](Self::request_as) takes the caller's.
    ///
    /// # Errors
    /// `Ended` when the connection ends before the reply arrives; then the peer may or may not have executed the
    /// request.
    pub fn request(&self, mut message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        message.role = MessageRole::Request;
        self.ask(message)
    }

    /// Sends a message that expects a reply, whatever its role.
    pub(crate) fn ask(&self, message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        ReplyFuture::new(&self.conn, None, message)
    }

    /// Sends a request under the caller's transaction ID, and waits for its reply, as [`request`](Self::request) does.
    ///
    /// Meant for peers that identify an operation by its ID on any connection, as the daemons of a Ceph cluster do: an
    /// operation keeps its ID when it is sent again, to the same peer or to another one.
    /// [`Messenger::next_tid`](crate::Messenger::next_tid) generates such IDs.  Messages from a peer that is not
    /// Forebay carry no role, so any message with this ID is taken for the reply.
    ///
    /// # Errors
    /// As `request`; and `Tid` when the ID is 0 or that of a pending request on this connection.
    pub fn request_as(&self, tid: u64, message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        ReplyFuture::new(&self.conn, Some(tid), message)
    }

    /// Waits until the connection is open.
    ///
    /// # Errors
    /// Reason why the connection ended first.
    pub async fn ready(&self) -> Result<(), DisconnectReason> {
        self.conn.lifecycle.settled().await;
        match self.state() {
            ConnectionState::Open => Ok(()),
            _ => Err(self.reason().unwrap_or(DisconnectReason::Closed)),
        }
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn ended(&self) -> DisconnectReason {
        self.conn.lifecycle.closed().await;
        self.reason().unwrap_or(DisconnectReason::Closed)
    }

    /// Closes the connection; queued messages and pending requests fail.
    pub fn close(&self) {
        self.conn.end(DisconnectReason::Closed);
    }

    /// Returns the connection state.
    pub fn state(&self) -> ConnectionState {
        self.conn.lifecycle.state()
    }

    /// Returns the reason why the connection has ended, or why the last stream was lost while reconnecting.
    pub fn reason(&self) -> Option<DisconnectReason> {
        self.conn.lifecycle.reason()
    }

    /// Returns the address of the peer.
    pub fn address(&self) -> &Address {
        self.conn.identity.address()
    }

    /// Returns the address of this endpoint as seen by the peer; known to the connecting side, once the connection is
    /// open.
    pub fn own_addr(&self) -> Option<EntityAddr> {
        self.conn.identity.own_addr()
    }

    /// Returns the current or last transport: `tcp`, `rdma`, `unix`, `shm` or `loopback`; empty before the first
    /// stream.  An address that asks for RDMA may be reached over TCP.
    pub fn transport(&self) -> &'static str {
        self.conn.lifecycle.transport()
    }

    /// Returns the authenticated name of the peer; empty without authentication, and on the connecting side.
    pub fn name(&self) -> &str {
        self.conn.identity.name()
    }

    /// Returns the entity type of the peer, of [`entity`](crate::wire::entity); zero until it is known.
    pub fn entity(&self) -> u8 {
        self.conn.identity.entity()
    }

    /// Returns the policy that applies when a stream is lost.
    pub fn policy(&self) -> Policy {
        self.conn.policy
    }

    /// Returns the number of messages waiting to be sent or acknowledged, and their bytes.
    pub fn pending(&self) -> MessageBudget {
        self.conn.send_queue.budget().used()
    }

    /// Waits until no bytes wait to be sent or acknowledged, or the connection has ended.
    pub async fn drained(&self) {
        self.conn.drained().await;
    }

    /// Returns the number of messages of this peer that were received and not dropped, and their bytes.
    pub fn held(&self) -> MessageBudget {
        self.conn.receive_budget.used()
    }
}

impl PartialEq for Connection {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.conn, &other.conn)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {:?})", self.conn.identity.address(), self.conn.lifecycle.state())
    }
}
