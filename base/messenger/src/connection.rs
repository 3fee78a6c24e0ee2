//! A connection as its users see it: messages go in, in order, and what becomes of them is told.

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

/// Why a connection has ended, or has no connection at the moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The peer broke a rule, or one of us refuses the other.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The transport failed.
    #[error("{1}")]
    Io(io::ErrorKind, String),
    /// The peer has closed it.
    #[error("the peer has closed the connection")]
    PeerClosed,
    /// The peer has closed it in the middle of a frame.
    #[error("the peer has closed the connection in the middle of a frame")]
    PeerBroke,
    /// It was closed here.
    #[error("it was closed")]
    Closed,
    /// The peer takes too long to identify itself.
    #[error("the handshake was not over in time, while {0}")]
    Handshake(&'static str),
    /// Nothing comes from the peer, not even when it is asked.
    #[error("the peer is silent")]
    Silent,
    /// A frame was begun and does not end.
    #[error("a frame was begun and not ended in time")]
    Slow,
    /// Another connection has taken its place.
    #[error("another connection of the same peer has taken its place")]
    Replaced,
    /// The peer has forgotten the session, or has begun a new one.
    #[error("the peer has forgotten the session")]
    Reset,
    /// The peer did not come back in time.
    #[error("the peer did not come back in time")]
    Expired,
    /// The peer may not connect from where it is.
    #[error("{0} is not on the list of those who may connect")]
    NotAllowed(String),
    /// There are too many connections.
    #[error("there are {0} connections already")]
    TooMany(usize),
}

impl From<io::Error> for Reason {
    fn from(error: io::Error) -> Self {
        Self::Io(error.kind(), error.to_string())
    }
}

/// Why a message was not taken, or not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The connection has ended.  The message may or may not have been delivered.
    #[error("the connection has ended: {0}")]
    Ended(Reason),
    /// So much waits to be sent that no more is taken now.
    #[error("the connection's queue is full")]
    Full,
    /// A request with this number has not ended on this connection, or the number is 0.
    #[error("a request cannot have the number {0}: it is 0, or another one on this connection has it")]
    Tid(u64),
    /// A segment is longer than what is taken.
    #[error("a segment of {len} bytes is too long: {max} are taken")]
    TooLong {
        /// Bytes.
        len: usize,
        /// Bytes at most.
        max: usize,
    },
}

/// A message on its way out.
pub(crate) struct Outgoing {
    pub(crate) message: Message,
    /// Told when the peer has it.
    done: RefCell<Option<oneshot::Sender<Result<(), SendError>>>>,
    /// Its share of what may wait to be sent.
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

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is being made, for the first time or again.
    Connecting,
    /// Messages flow.
    Open,
    /// Of a server: the client may come back.
    Standby,
    /// It has ended.
    Closed,
}

/// What is behind a connection.
pub(crate) enum Link {
    /// A stream of bytes; or none at the moment.
    Remote,
    /// The other end, in the same process.
    Local(RefCell<Weak<Conn>>),
}

/// One end of a connection, over all the streams that it has in its life.
pub(crate) struct Conn {
    pub(crate) messenger: Rc<Inner>,
    pub(crate) address: Address,
    pub(crate) name: String,
    pub(crate) entity: Cell<u8>,
    pub(crate) policy: Policy,
    /// Tells the sessions of one messenger with the same peer apart: the peer knows each by its address.
    pub(crate) nonce: u32,
    /// Which instance of the peer is meant; zero for whichever is there.
    pub(crate) target_nonce: Cell<u32>,
    /// Our own address, as the peer has seen it.
    pub(crate) own_addr: Cell<Option<EntityAddr>>,
    pub(crate) link: Link,
    pub(crate) session: RefCell<Session<Rc<Outgoing>>>,
    /// The highest number of a connection that this peer has made.
    pub(crate) peer_global_seq: Cell<u64>,
    pub(crate) state: Cell<State>,
    /// Counts the streams; what belongs to an earlier one has no say any more.
    pub(crate) epoch: Cell<u64>,
    /// What is received of this peer.
    pub(crate) throttle: Rc<Throttle>,
    /// What waits to be sent to it, or to be acknowledged.
    outbound: Rc<Throttle>,
    /// Those who wait for room there, in order: a short message does not overtake a long one.
    line: Semaphore,
    pub(crate) task: RefCell<Option<Waker>>,
    /// The task will look at the queue by itself.
    pub(crate) attentive: Cell<bool>,
    pub(crate) changed: Notify,
    pub(crate) reason: RefCell<Option<Reason>>,
    requests: RefCell<Requests>,
    /// What carries the stream, or did last.
    pub(crate) transport: Cell<&'static str>,
    /// Memory that the peer may write to.
    pub(crate) windows: RefCell<BTreeMap<u64, Rc<window::Inner>>>,
    /// The stream, while it is one whose device writes for us.
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

    /// A stream takes over: what the one before has not settled is to be sent again.  Returns its number.
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

    /// Gives the reply to who waits for it.  The message comes back when it may be something else; a reply that nobody
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

    /// Everything that was to be sent, or waits for an answer, has failed.
    pub(crate) fn fail(&self, reason: &Reason) {
        let queued = self.session.borrow_mut().reset(true);
        for outgoing in queued {
            outgoing.settle(Err(SendError::Ended(reason.clone())));
        }
        let waiting = self.requests.borrow_mut().fail(&SendError::Ended(reason.clone()));
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Ends the connection for good.  True when it had not ended before.
    pub(crate) fn end(self: &Rc<Self>, reason: Reason) -> bool {
        if self.is_closed() {
            return false;
        }
        *self.reason.borrow_mut() = Some(reason.clone());
        self.epoch.set(self.epoch.get() + 1);
        self.fail(&reason);
        // The owner may keep its windows; nobody writes to them any more.
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

    /// Queues a message; or leaves it where it is, and says `false`, when there is no room.
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

    /// Takes a message from the other end in the same process, if there is room.
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

    /// Queues a message as soon as there is room.
    pub(crate) async fn queue(self: &Rc<Self>, mut message: Message, mut done: Option<Done>) -> Result<(), SendError> {
        let _turn = self.line.acquire(1).await;
        while !self.offer(&mut message, &mut done)? {
            self.room(message.len()).await;
        }
        Ok(())
    }

    /// Waits until there may be room, or the connection has ended.
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

/// A connection to a peer, over all the streams that it has in its life.  Clones share it.
#[derive(Clone)]
pub struct Connection {
    pub(crate) conn: Rc<Conn>,
}

impl Connection {
    pub(crate) fn new(conn: Rc<Conn>) -> Self {
        Self { conn }
    }

    /// Queues a message, in order.  What was queued is sent as soon as it can be, and over again where the policy says
    /// so.
    ///
    /// # Errors
    /// `Full` when there is no room for it at the moment; [`send`](Self::send) waits for some.
    pub fn post(&self, mut message: Message) -> Result<(), SendError> {
        // Whoever waits for room was there before.
        if self.conn.line.available() == 0 {
            return Err(SendError::Full);
        }
        if self.conn.offer(&mut message, &mut None)? { Ok(()) } else { Err(SendError::Full) }
    }

    /// Queues a message as soon as there is room for it.
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

    /// Sends a request, and waits for its reply.  Dropping the future gives up the reply, not the request.
    ///
    /// Its number (the `tid`) is the connection's own, and other connections use the same ones;
    /// [`request_as`](Self::request_as) takes the caller's.
    ///
    /// # Errors
    /// `Ended` when the connection ends before the reply comes; then the peer may or may not have done what was asked.
    pub fn request(&self, mut message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        message.role = Role::Request;
        self.ask(message)
    }

    /// Sends what is answered, whatever its role.
    pub(crate) fn ask(&self, message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        Request { conn: &self.conn, chosen: None, tid: 0, step: Step::New(message) }
    }

    /// Sends a request under the caller's own number, and waits for its reply, as [`request`](Self::request) does.
    ///
    /// This is for those whose peers know an operation by its number, whichever connection it comes over, as the daemons
    /// of a Ceph cluster do: it keeps its number when it is sent again, to the same peer or to another one.
    /// [`Messenger::next_tid`](crate::Messenger::next_tid) counts such numbers.  Messages from a peer that is not
    /// Forebay carry no role, so whatever comes under the number is taken for the reply.
    ///
    /// # Errors
    /// As `request`; and `Tid` when the number is 0 or that of a request which has not ended on this connection.
    pub fn request_as(&self, tid: u64, message: Message) -> impl Future<Output = Result<Message, SendError>> + use<'_> {
        Request { conn: &self.conn, chosen: Some(tid), tid: 0, step: Step::New(message) }
    }

    /// Waits until messages flow.
    ///
    /// # Errors
    /// When it ends before.
    pub async fn ready(&self) -> Result<(), Reason> {
        let settled = || matches!(self.conn.state.get(), State::Open | State::Closed);
        self.conn.changed.wait_until(settled).await;
        match self.conn.state.get() {
            State::Open => Ok(()),
            _ => Err(self.reason().unwrap_or(Reason::Closed)),
        }
    }

    /// Waits until it has ended, and says why.
    pub async fn ended(&self) -> Reason {
        self.conn.changed.wait_until(|| self.conn.is_closed()).await;
        self.reason().unwrap_or(Reason::Closed)
    }

    /// Ends it; what waits to be sent fails.
    pub fn close(&self) {
        self.conn.end(Reason::Closed);
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.conn.state.get()
    }

    /// Why it has ended; or why the last stream has, while another one is being made.
    pub fn reason(&self) -> Option<Reason> {
        self.conn.reason.borrow().clone()
    }

    /// Where the peer is.
    pub fn address(&self) -> &Address {
        &self.conn.address
    }

    /// Our own address, with the place that the peer sees; known to the side that connects, once messages flow.
    pub fn own_addr(&self) -> Option<EntityAddr> {
        self.conn.own_addr.get()
    }

    /// What carries the messages now, or did last: `tcp`, `rdma`, `unix`, `shm` or `loopback`; empty before the first time.
    /// An address that asks for RDMA may be reached over TCP.
    pub fn transport(&self) -> &'static str {
        self.conn.transport.get()
    }

    /// Who the peer has shown to be; empty without authentication, and on the side that connects.
    pub fn name(&self) -> &str {
        &self.conn.name
    }

    /// What the peer is, of [`entity`](crate::wire::entity); zero until it has said so.
    pub fn entity(&self) -> u8 {
        self.conn.entity.get()
    }

    /// What becomes of it when a stream is lost.
    pub fn policy(&self) -> Policy {
        self.conn.policy
    }

    /// Messages that wait to be sent or to be acknowledged, and their bytes.
    pub fn pending(&self) -> Budget {
        self.conn.outbound.used()
    }

    /// Messages of this peer that were received and not dropped, and their bytes.
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

/// A request from its beginning to its reply; a future by hand, because each layer of `async` moves the message.
struct Request<'a> {
    conn: &'a Rc<Conn>,
    /// The caller's number.
    chosen: Option<u64>,
    /// The number it is listed under; 0 while it is not.
    tid: u64,
    step: Step<'a>,
}

enum Step<'a> {
    New(Message),
    /// It waits for room.
    Queueing(Pin<Box<dyn Future<Output = Result<(), SendError>> + 'a>>),
    Sent,
}

impl Request<'_> {
    /// Lists the request.
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
            // Whoever waits for room was there before.
            if this.conn.line.available() > 0 && this.conn.offer(message, &mut None)? {
                this.conn.requests.borrow_mut().queued(this.tid);
                this.step = Step::Sent;
            } else {
                this.step = Step::Queueing(Box::pin(this.conn.queue(std::mem::take(message), None)));
            }
        }
        if let Step::Queueing(queueing) = &mut this.step {
            std::task::ready!(queueing.as_mut().poll(cx))?;
            // Nothing can have come in between: whoever receives has not had a turn yet.
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
    /// Takes it off the list: nobody waits for its reply any more.
    fn drop(&mut self) {
        if self.tid != 0 {
            let waiting = self.conn.requests.borrow_mut().end(self.tid);
            drop(waiting);
        }
    }
}
