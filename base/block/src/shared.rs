//! Operations of a pool that several clients use at once.  RADOS offers them; a pool in memory or on a disk of one
//! machine has one client and needs none.
//!
//! The operations are librados': class calls, watch and notify, client identity, the blocklist.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::Instant;

use crate::device::LocalFuture;
use crate::error::{Error, Result};
use crate::object::{ObjectBackend, ObjectName, SnapId};

/// Identity of a client towards the other clients of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClientIdentity {
    /// Number that the cluster gave this client (RADOS: the global id).  Locks and watchers name it `client.NUMBER`.
    pub number: u64,
    /// Network address with nonce: `IP:PORT/NONCE`, an IPv6 address in brackets; no `v1:` or `v2:` prefix.
    /// [`Watcher::address`] shows it for this client, a lock records it, and the blocklist takes it.
    pub address: String,
}

/// Watcher of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Watcher {
    /// Number of the client.
    pub client: u64,
    /// Watch of that client; as [`Watch::cookie`].
    pub cookie: u64,
    /// Address of the client: see [`ClientIdentity::address`].
    pub address: String,
}

/// Notification of all watchers of an object, as one of them receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Notification number; returned with the answer.
    pub id: u64,
    /// Cookie of the watch that received it; returned with the answer.
    pub cookie: u64,
    /// Number of the client that sent it.
    pub sender: u64,
    /// Message body.
    pub payload: Vec<u8>,
}

/// Handler of a watch's events.  Called on the core of the backend, from its own tasks: it must not block, but may
/// spawn a task, and may call the backend.
pub trait WatchHandler {
    /// Handles a notification.  Each one must be answered by [`SharedObjects::answer_notification`], or its sender
    /// waits until the timeout.
    fn notified(&self, notification: Notification);

    /// Handles the loss of the watch: the session broke and could not be re-established in time (`NotFound`: the object
    /// is gone; `Fenced`: this client is on the blocklist; `TimedOut` or others: messages may be lost).  The watch
    /// receives nothing more: watch again, and re-read the state that the notifications would have announced.
    fn broken(&self, error: Error);
}

/// Time for which a pool keeps a watch whose client is silent, at least.
pub const WATCH_LIFE_MIN: Duration = Duration::from_secs(30);

/// Active watch.  Dropping it without [`end`](Self::end) ends it in the background.
pub trait Watch {
    /// Returns the number of this watch among those of its client, never 0.  Other clients see it in
    /// [`SharedObjects::watchers`].  It stays the same when a session breaks and is re-established without a loss.
    fn cookie(&self) -> u64;

    /// Returns the time at which the last request was sent whose answer has confirmed the watch.  Unless this client is put
    /// on the blocklist, others see the watch for at least [`WATCH_LIFE_MIN`] from then on.
    fn confirmed(&self) -> Instant;

    /// Ends the watch.  When this completes, its handler receives nothing more, and other clients do not see it any
    /// more.
    fn end(&self) -> LocalFuture<Result<()>>;
}

/// Result of a notification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notified {
    /// Answers of the watchers.
    pub answers: Vec<NotifyAnswer>,
    /// Watchers that did not answer in time, by client and cookie.
    pub missed: Vec<(u64, u64)>,
}

/// Answer of one watcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotifyAnswer {
    /// Number of the client.
    pub client: u64,
    /// Cookie of the watch.
    pub cookie: u64,
    /// Answer body.
    pub payload: Vec<u8>,
}

/// Method of an object class: code that runs on the server of the object, atomically with the other steps of its
/// transaction.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Method {
    /// Class name, such as `lock`.
    pub class: &'static str,
    /// Method name, such as `assert_locked`.
    pub name: &'static str,
}

impl Method {
    /// Creates the method `class.name`.
    pub const fn new(class: &'static str, name: &'static str) -> Self {
        Self { class, name }
    }
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.class, self.name)
    }
}

/// Operations of a pool whose objects other clients use at the same time.
///
/// A method that changes the object is a step of a transaction, [`ObjectOp::Call`](crate::ObjectOp::Call); one that
/// only reads is [`exec`](Self::exec).  A method's error is mapped by its errno (`-EBUSY` is `Busy`, `-EEXIST`
/// `Exists`, `-ENOENT` `NotFound`, `-EOPNOTSUPP` `Unsupported`, `-EINVAL` `Invalid`).  Once this client is on the
/// blocklist, every operation fails with `Fenced`.
pub trait SharedObjects {
    /// Returns the current identity of this client.  The address changes when the client had to reconnect after it was
    /// fenced.
    fn identity(&self) -> ClientIdentity;

    /// Calls a method that only reads; returns its output.
    fn exec(&self, object: &ObjectName, snap: SnapId, method: Method, input: Vec<u8>) -> LocalFuture<Result<Vec<u8>>>;

    /// Watches an object, which must exist (`NotFound`).  Notifications sent after this completes reach `handler`,
    /// which is kept until the watch ends or breaks.
    fn watch(&self, object: &ObjectName, handler: Rc<dyn WatchHandler>) -> LocalFuture<Result<Box<dyn Watch>>>;

    /// Returns the current watchers of an object.
    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>>;

    /// Sends `payload` to all watchers of an object, this client's own included, and waits until all have answered or
    /// `timeout` (in whole seconds) has passed.  Missing answers are no error: see [`Notified::missed`].
    fn notify(&self, object: &ObjectName, payload: Vec<u8>, timeout: Duration) -> LocalFuture<Result<Notified>>;

    /// Answers a notification received by a watch on `object`.
    fn answer_notification(
        &self,
        object: &ObjectName,
        id: u64,
        cookie: u64,
        payload: Vec<u8>,
    ) -> LocalFuture<Result<()>>;

    /// Puts the client at `address` ([`ClientIdentity::address`]) on the blocklist for `expire` (`None`: the cluster's
    /// default).  When this completes, every later operation of this client, on any object, is ordered after the last
    /// change by the blocklisted client: this client knows the map that fences the other, and orders it before each
    /// operation.
    fn blocklist(&self, address: &str, expire: Option<Duration>) -> LocalFuture<Result<()>>;

    /// Makes this client's requests to the pool wait, for the rest of its life, for servers that refuse the client
    /// until a setting is changed (`Unsupported` before): hosts use the pool, and must not get errors for a condition
    /// that can be reverted.
    fn mark_in_use(&self);

    /// Returns this pool's number.
    fn pool_id(&self) -> i64;

    /// Returns the numbers of all pools of the cluster, as far as this client knows.
    fn pool_ids(&self) -> Vec<i64>;

    /// Returns the number of the pool named `name`; `NotFound` when there is none.
    fn pool_id_of(&self, name: &str) -> LocalFuture<Result<i64>>;

    /// Opens another pool of the same cluster, through the same client.  Returns the same `Rc` each time while a
    /// reference exists, so that an image is open once.  This pool's own number returns this pool.  `NotFound` when
    /// there is none.
    fn pool(&self, id: i64) -> LocalFuture<Result<Rc<dyn ObjectBackend>>>;
}
