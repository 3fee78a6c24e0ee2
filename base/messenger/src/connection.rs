//! Connection API: ordered message queues, requests, and their outcomes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};

use forebay_reactor::random;
use forebay_reactor::rdma::RdmaStream;
use forebay_reactor::sync::{Notify, Semaphore, oneshot};

use crate::message::{Message, Role};
use crate::messenger::{Handler, Inner};
use crate::requests::Requests;
use crate::session::{Policy, Session, Violation};
use crate::throttle::{Budget, Held, Throttle};
use crate::transport::Address;
use crate::window;
use crate::wire::{EntityAddr, Limits};

/// Reason why a connection has ended, or has no stream at the moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Protocol violation by the peer, or one side rejected the other.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// Transport error.
    #[error("{1}")]
    Io(io::ErrorKind, String),
    /// Closed by the peer.
    #[error("the peer has closed the connection")]
    PeerClosed,
    /// Closed by the peer in the middle of a frame.
    #[error("the peer has closed the connection in the middle of a frame")]
    PeerBroke,
    /// Closed by this side.
    #[error("it was closed")]
    Closed,
    /// Handshake timeout.
    #[error("the handshake was not over in time, while {0}")]
    Handshake(&'static str),
    /// Keepalive timeout: the peer is silent, even when asked.
    #[error("the peer is silent")]
    Silent,
    /// Frame timeout: a frame was begun and not completed in time.
    #[error("a frame was begun and not ended in time")]
    Slow,
    /// Superseded by another connection of the same peer.
    #[error("another connection of the same peer has taken its place")]
    Replaced,
    /// Session reset: the peer has dropped the session, or has begun a new one.
    #[error("the peer has forgotten the session")]
    Reset,
    /// Session expired: the peer did not reconnect in time.
    #[error("the peer did not come back in time")]
    Expired,
    /// Peer address that is not in the list of allowed networks.
    #[error("{0} is not on the list of those who may connect")]
    NotAllowed(String),
    /// Connection limit reached.
    #[error("there are {0} connections already")]
    TooMany(usize),
}

impl From<io::Error> for Reason {
    fn from(error: io::Error) -> Self {
        Self::Io(error.kind(), error.to_string())
    }
}

/// Error of sending a message, or of waiting for its reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Connection ended.  The message may or may not have been delivered.
    #[error("the connection has ended: {0}")]
    Ended(Reason),
    /// Send budget exhausted.
    #[error("the connection's queue is full")]
    Full,
    /// Transaction ID that is 0, or that of a pending request on this connection.
    #[error("a request cannot have the number {0}: it is 0, or another one on this connection has it")]
    Tid(u64),
    /// Segment longer than the limit.
    #[error("a segment of {len} bytes is too long: {max} are taken")]
    TooLong {
        /// Length in bytes.
        len: usize,
        /// Limit in bytes.
        max: usize,
    },
}

/// Outgoing message.
pub(crate) struct Outgoing {
    pub(crate) message: Message,
    /// Completed once the peer's messenger has the message (in a lossy session: once the transport has it), or when it
    /// fails.
    done: RefCell<Option<oneshot::Sender<Result<(), SendError>>>>,
    /// Share of the send budget.
    _held: Held,
}

impl Outgoing {
    #[inline]
    pub(crate) fn settle(&self, result: Result<(), SendError>) {
        if let Some(done) = self.done.borrow_mut().take() {
            done.send(result);
        }
    }
}

/// Connection state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Connecting, for the first time or again.
    Connecting,
    /// Established; messages flow.
    Open,
    /// Server side without a stream; the client may reconnect.
    Standby,
    /// Connection has ended.
    Closed,
}

/// Kind of link behind a connection.
pub(crate) enum Link {
    /// Byte stream; possibly disconnected at the moment.
    Remote,
    /// Peer endpoint in the same process.
    Local(RefCell<Weak<Conn>>),
}

/// One end of a connection, across all its successive streams.
pub(crate) struct Conn {
    pub(crate) messenger: Rc<Inner>,
    pub(crate) address: Address,
    pub(crate) name: String,
    pub(crate) entity: Cell<u8>,
    pub(crate) policy: Policy,
    /// Nonce that distinguishes sessions of one messenger with the same peer: the peer knows each by its address.
    pub(crate) nonce: u32,
    /// Nonce of the peer instance to reach; zero for any.
    pub(crate) target_nonce: Cell<u32>,
    /// Address of this endpoint, as seen by the peer.
    pub(crate) own_addr: Cell<Option<EntityAddr>>,
    pub(crate) link: Link,
    pub(crate) session: RefCell<Session<Rc<Outgoing>>>,
    /// Highest global sequence number of a connection from this peer.
    pub(crate) peer_global_seq: Cell<u64>,
    pub(crate) state: Cell<State>,
    /// Stream counter; events of earlier streams are ignored.
    pub(crate) epoch: Cell<u64>,
    /// Receive budget of this peer.
    pub(crate) throttle: Rc<Throttle>,
    /// Send budget: messages waiting to be sent or acknowledged.
    outbound: Rc<Throttle>,
    /// FIFO of senders waiting for send budget: a short message does not overtake a long one.
    line: Semaphore,
    pub(crate) task: RefCell<Option<Waker>>,
    /// Set while the task will check the queue without being woken.
    pub(crate) attentive: Cell<bool>,
    pub(crate) changed: Notify,
    pub(crate) reason: RefCell<Option<Reason>>,
    requests: RefCell<Requests>,
    /// Current transport, or the last one.
    pub(crate) transport: Cell<&'static str>,
    /// Memory windows that the peer may write to.
    pub(crate) windows: RefCell<BTreeMap<u64, Rc<window::Inner>>>,
    /// RDMA stream whose device writes directly into windows, while there is one.
    pub(crate) rdma: RefCell<Option<RdmaStream>>,
}

impl Conn {
    pub(crate) fn new(
        messenger: Rc<Inner>,
        (address, name): (Address, String),
        (policy, state, link): (Policy, State, Link),
        session: Session<Rc<Outgoing>>,
    ) -> Rc<Self> {
        let options = &messenger.options;
        let throttle = Throttle::new(options.receive, Some(messenger.portal.throttle.clone()));
        let outbound = Throttle::new(options.send, None);
        Rc::new(Self {
            messenger,
            address,
            name,
            entity: Cell::new(0),
            policy,
            nonce: (random() as u32).max(1),
            target_nonce: Cell::new(0),
            own_addr: Cell::new(None),
            link,
            session: RefCell::new(session),
            peer_global_seq: Cell::new(0),
            state: Cell::new(state),
            epoch: Cell::new(0),
            throttle,
            outbound,
            line: Semaphore::new(1),
            task: RefCell::default(),
            attentive: Cell::new(false),
            changed: Notify::new(),
            reason: RefCell::default(),
            requests: RefCell::default(),
            transport: Cell::new(""),
            windows: RefCell::default(),
            rdma: RefCell::default(),
        })
    }

    pub(crate) fn handler(&self) -> Rc<dyn Handler> {
        self.messenger.handler.clone()
    }

    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.get() == State::Closed
    }

    /// Starts a new stream: messages that the previous one has not settled are sent again.  Returns the new epoch.
    pub(crate) fn take_over(&self) -> u64 {
        self.epoch.set(self.epoch.get() + 1);
        self.session.borrow_mut().lost();
        let before = self.rdma.take();
        drop(before);
        self.attentive.set(false);
        self.wake();
        self.epoch.get()
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.set(state);
        self.changed.notify_all();
    }

    pub(crate) fn set_task(&self, waker: &Waker) {
        let mut task = self.task.borrow_mut();
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }

    #[inline]
    pub(crate) fn wake(&self) {
        if !self.attentive.replace(true)
            && let Some(task) = &*self.task.borrow()
        {
            task.wake_by_ref();
        }
    }

    /// Delivers a reply to its waiting request.  Returns the message if it may be something else; a reply that nobody
    /// waits for any more is dropped.
    #[inline]
    pub(crate) fn answer(&self, message: Message) -> Option<Message> {
        let answered = self.requests.borrow_mut().answer(message.tid, message);
        match answered {
            Ok(waker) => waker.into_iter().for_each(Waker::wake),
            Err(message) if message.role == Role::Reply => drop(message),
            Err(message) => return Some(message),
        }
        None
    }

    /// Fails all queued messages and pending requests.
    pub(crate) fn fail(&self, reason: &Reason) {
        let queued = self.session.borrow_mut().reset(true);
        for outgoing in queued {
            outgoing.settle(Err(SendError::Ended(reason.clone())));
        }
        let waiting = self.requests.borrow_mut().fail(&SendError::Ended(reason.clone()));
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Ends the connection permanently.  Returns true if it had not ended before.
    pub(crate) fn end(self: &Rc<Self>, reason: Reason) -> bool {
        if self.is_closed() {
            return false;
        }
        *self.reason.borrow_mut() = Some(reason.clone());
        self.epoch.set(self.epoch.get() + 1);
        self.fail(&reason);
        // The owner may keep its windows; the peer can no longer write to them.
        let gone = (self.rdma.take(), self.windows.take());
        gone.1.values().for_each(|window| window.revoke());
        drop(gone);
        self.set_state(State::Closed);
        self.attentive.set(false);
        self.wake();
        self.messenger.forget(self);
        if let Link::Local(other) = &self.link
            && let Some(other) = other.take().upgrade()
            && other.end(Reason::PeerClosed)
        {
            other.handler().lost(&Connection::new(other.clone()), &Reason::PeerClosed);
        }
        true
    }

    fn ended(&self) -> SendError {
        SendError::Ended(self.reason.borrow().clone().unwrap_or(Reason::Closed))
    }

    #[inline]
    fn check(&self, message: &Message) -> Result<(), SendError> {
        let Limits { front_max, middle_max, data_max, .. } = self.messenger.options.limits;
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
        if let Link::Local(other) = &self.link {
            let other = other.borrow().upgrade();
            return other.map_or_else(|| Err(self.ended()), |other| Ok(other.hand_over(message, done)));
        }
        self.check(message)?;
        let Some(held) = self.outbound.take(message.len()) else { return Ok(false) };
        let priority = message.priority;
        let (message, done) = (std::mem::take(message), RefCell::new(done.take()));
        self.session.borrow_mut().push(priority, Rc::new(Outgoing { message, done, _held: held }));
        self.wake();
        Ok(true)
    }

    /// Accepts a message from the endpoint in the same process, if the receive budget allows it.
    fn hand_over(self: &Rc<Self>, message: &mut Message, done: &mut Option<Done>) -> bool {
        let Some(held) = self.throttle.take(message.len()) else { return false };
        message.held = Some(held);
        if let Some(done) = done.take() {
            done.send(Ok(()));
        }
        let message = std::mem::take(message);
        let message = if message.role == Role::Reply { self.answer(message) } else { Some(message) };
        if let Some(message) = message {
            self.messenger.portal.enqueue(self.clone(), message);
            self.messenger.portal.schedule();
        }
        true
    }

    /// Queues a message as soon as the budget allows it.
    pub(crate) async fn queue(self: &Rc<Self>, mut message: Message, mut done: Option<Done>) -> Result<(), SendError> {
        let _turn = self.line.acquire(1).await;
        while !self.offer(&mut message, &mut done)? {
            self.room(message.len()).await;
        }
        Ok(())
    }

    /// Waits until the budget may suffice, or the connection has changed.
    async fn room(&self, bytes: usize) {
        let other = match &self.link {
            Link::Remote => None,
            Link::Local(other) => other.borrow().upgrade(),
        };
        let throttle = other.as_ref().map_or(&self.outbound, |other| &other.throttle);
        let changed = self.changed.wait();
        let mut changed = std::pin::pin!(changed);
        std::future::poll_fn(|cx| {
            if changed.as_mut().poll(cx).is_ready() || throttle.would_take(bytes) {
                return Poll::Ready(());
            }
            throttle.wait(cx.waker());
            Poll::Pending
        })
        .await;
    }
}

pub(crate) type Done = oneshot::Sender<Result<(), SendError>>;

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
        if self.conn.line.available() == 0 {
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
        message.role = Role::Request;
        self.ask(message)
    }

    /// Sends a message that expects a reply, whatever its role.
    pub(crate) fn ask(&self, message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        Request { conn: &self.conn, chosen: None, tid: 0, step: Step::New(message) }
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
        Request { conn: &self.conn, chosen: Some(tid), tid: 0, step: Step::New(message) }
    }

    /// Waits until the connection is open.
    ///
    /// # Errors
    /// Reason why the connection ended first.
    pub async fn ready(&self) -> Result<(), Reason> {
        let settled = || matches!(self.conn.state.get(), State::Open | State::Closed);
        self.conn.changed.wait_until(settled).await;
        match self.conn.state.get() {
            State::Open => Ok(()),
            _ => Err(self.reason().unwrap_or(Reason::Closed)),
        }
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn ended(&self) -> Reason {
        self.conn.changed.wait_until(|| self.conn.is_closed()).await;
        self.reason().unwrap_or(Reason::Closed)
    }

    /// Closes the connection; queued messages and pending requests fail.
    pub fn close(&self) {
        self.conn.end(Reason::Closed);
    }

    /// Returns the connection state.
    pub fn state(&self) -> State {
        self.conn.state.get()
    }

    /// Returns the reason why the connection has ended, or why the last stream was lost while reconnecting.
    pub fn reason(&self) -> Option<Reason> {
        self.conn.reason.borrow().clone()
    }

    /// Returns the address of the peer.
    pub fn address(&self) -> &Address {
        &self.conn.address
    }

    /// Returns the address of this endpoint as seen by the peer; known to the connecting side, once the connection is
    /// open.
    pub fn own_addr(&self) -> Option<EntityAddr> {
        self.conn.own_addr.get()
    }

    /// Returns the current or last transport: `tcp`, `rdma`, `unix`, `shm` or `loopback`; empty before the first
    /// stream.  An address that asks for RDMA may be reached over TCP.
    pub fn transport(&self) -> &'static str {
        self.conn.transport.get()
    }

    /// Returns the authenticated name of the peer; empty without authentication, and on the connecting side.
    pub fn name(&self) -> &str {
        &self.conn.name
    }

    /// Returns the entity type of the peer, of [`entity`](crate::wire::entity); zero until it is known.
    pub fn entity(&self) -> u8 {
        self.conn.entity.get()
    }

    /// Returns the policy that applies when a stream is lost.
    pub fn policy(&self) -> Policy {
        self.conn.policy
    }

    /// Returns the number of messages waiting to be sent or acknowledged, and their bytes.
    pub fn pending(&self) -> Budget {
        self.conn.outbound.used()
    }

    /// Returns the number of messages of this peer that were received and not dropped, and their bytes.
    pub fn held(&self) -> Budget {
        self.conn.throttle.used()
    }
}

impl PartialEq for Connection {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.conn, &other.conn)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {:?})", self.conn.address, self.conn.state.get())
    }
}

/// Request future, written by hand because each layer of `async` moves the message.
struct Request<'a> {
    conn: &'a Rc<Conn>,
    /// Transaction ID chosen by the caller.
    chosen: Option<u64>,
    /// Transaction ID of the listed request; 0 while it is not listed.
    tid: u64,
    step: Step<'a>,
}

enum Step<'a> {
    New(Message),
    /// Waiting for send budget.
    Queueing(Pin<Box<dyn Future<Output = Result<(), SendError>> + 'a>>),
    Sent,
}

impl Request<'_> {
    /// Adds the request to the list of pending ones.
    fn begin(&mut self) -> Result<(), SendError> {
        let mut requests = self.conn.requests.borrow_mut();
        match self.chosen {
            Some(tid) if !requests.begin_as(tid) => return Err(SendError::Tid(tid)),
            Some(tid) => self.tid = tid,
            None => self.tid = requests.begin(),
        }
        Ok(())
    }
}

impl Future for Request<'_> {
    type Output = Result<Message, SendError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Step::New(_) = this.step {
            this.begin()?;
            let Step::New(message) = &mut this.step else { unreachable!("just seen") };
            message.tid = this.tid;
            // Senders that wait for budget come first.
            if this.conn.line.available() > 0 && this.conn.offer(message, &mut None)? {
                this.conn.requests.borrow_mut().queued(this.tid);
                this.step = Step::Sent;
            } else {
                this.step = Step::Queueing(Box::pin(this.conn.queue(std::mem::take(message), None)));
            }
        }
        if let Step::Queueing(queueing) = &mut this.step {
            std::task::ready!(queueing.as_mut().poll(cx))?;
            // No reply can have arrived in between: the receiving task has not run yet.
            this.conn.requests.borrow_mut().queued(this.tid);
            this.step = Step::Sent;
        }
        let mut requests = this.conn.requests.borrow_mut();
        if let Some(reply) = requests.take(this.tid) {
            this.tid = 0;
            return Poll::Ready(reply);
        }
        let before = requests.wait(this.tid, cx);
        drop(requests);
        drop(before);
        Poll::Pending
    }
}

impl Drop for Request<'_> {
    /// Removes the request from the list: its reply is no longer awaited.
    fn drop(&mut self) {
        if self.tid != 0 {
            let waiting = self.conn.requests.borrow_mut().end(self.tid);
            drop(waiting);
        }
    }
}
