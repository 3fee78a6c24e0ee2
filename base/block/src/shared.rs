//! What a pool that several clients share at once offers beside its objects: RADOS does, a pool in memory or on a disk
//! of one machine has one client and needs none of it.
//!
//! The shapes are librados': class calls, watch and notify, who a client is to others, the blocklist.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::device::LocalFuture;
use crate::error::{Error, Result};
use crate::object::{ObjectBackend, ObjectName, SnapId};

/// Who a client is to the other clients of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClientIdentity {
    /// The number that the cluster gave this client (RADOS: the global id).  `client.NUMBER` is how locks and watchers
    /// name it.
    pub number: u64,
    /// Where it is, with its nonce: `IP:PORT/NONCE`, an IPv6 address in brackets; no `v1:` or `v2:` before it.  This is
    /// what [`Watcher::address`] says of this client, what a lock records of it, and what the blocklist takes.
    pub address: String,
}

/// One who watches an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Watcher {
    /// The client's number.
    pub client: u64,
    /// Which of its watches; as [`Watch::cookie`].
    pub cookie: u64,
    /// Where it is: see [`ClientIdentity::address`].
    pub address: String,
}

/// A message to all watchers of an object, as one of them gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Its number; goes back with the answer.
    pub id: u64,
    /// Which watch it came to; goes back with the answer.
    pub cookie: u64,
    /// The number of the client that sent it.
    pub sender: u64,
    /// What it says.
    pub payload: Vec<u8>,
}

/// Gets what comes to a watch.  Called on the core of the backend, from its own tasks: it must not wait, but may spawn
/// a task, and may call the backend.
pub trait WatchHandler {
    /// Somebody notified.  Each notification must be answered by [`SharedObjects::answer_notification`], or the one who
    /// sent it waits until its time is up.
    fn notified(&self, notification: Notification);

    /// The watch is no more, or may have missed something: the session broke and could not be taken up again in time
    /// (`NotFound`: the object is gone; `Fenced`: this client is on the blocklist; `TimedOut` or others: messages may
    /// be lost).  Nothing more comes to it: watch again, and look anew at what the notifications would have told.
    fn broken(&self, error: Error);
}

/// A watch that is set.  Dropped without [`end`](Self::end), it is ended in the background.
pub trait Watch {
    /// Its number among the watches of this client, never 0.  Others see it in [`SharedObjects::watchers`].  It stays
    /// the same when a session breaks and is taken up again without a loss.
    fn cookie(&self) -> u64;

    /// Ends it; when this is answered nothing more comes to its handler, and others do not see it any more.
    fn end(&self) -> LocalFuture<Result<()>>;
}

/// What came of a notification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notified {
    /// Who answered, and what.
    pub answers: Vec<NotifyAnswer>,
    /// Who did not in time, by client and cookie.
    pub missed: Vec<(u64, u64)>,
}

/// One watcher's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotifyAnswer {
    /// The client's number.
    pub client: u64,
    /// Which of its watches.
    pub cookie: u64,
    /// What it says.
    pub payload: Vec<u8>,
}

/// A method of an object class: code that runs where the object is, atomically with the other steps of its
/// transaction.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Method {
    /// The class, such as `lock`.
    pub class: &'static str,
    /// The method, such as `assert_locked`.
    pub name: &'static str,
}

impl Method {
    /// `class.name`.
    pub const fn new(class: &'static str, name: &'static str) -> Self {
        Self { class, name }
    }
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.class, self.name)
    }
}

/// What a pool offers whose objects other clients use at the same time.
///
/// A method that changes the object is a step of a transaction, [`ObjectOp::Call`](crate::ObjectOp::Call); one that
/// only reads is [`exec`](Self::exec).  What a method refuses with comes as the error kind whose errno it is
/// (`-EBUSY` is `Busy`, `-EEXIST` `Exists`, `-ENOENT` `NotFound`, `-EOPNOTSUPP` `Unsupported`, `-EINVAL` `Invalid`).
/// Once this client is on the blocklist, everything answers `Fenced`.
pub trait SharedObjects {
    /// Who this client is now.  The address changes when the client had to begin anew after it was fenced.
    fn identity(&self) -> ClientIdentity;

    /// Calls a method that only reads; its output.
    fn exec(&self, object: &ObjectName, snap: SnapId, method: Method, input: Vec<u8>) -> LocalFuture<Result<Vec<u8>>>;

    /// Watches an object, which must be there (`NotFound`).  What is notified after this is answered comes to
    /// `handler`; it is held until the watch ends or breaks.
    fn watch(&self, object: &ObjectName, handler: Rc<dyn WatchHandler>) -> LocalFuture<Result<Box<dyn Watch>>>;

    /// Who watches an object now.
    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>>;

    /// Sends `payload` to all who watch an object, this client's own watches among them, and waits until all have
    /// answered or `timeout` (whole seconds count) is over.  That some did not answer is no error: see
    /// [`Notified::missed`].
    fn notify(&self, object: &ObjectName, payload: Vec<u8>, timeout: Duration) -> LocalFuture<Result<Notified>>;

    /// Answers a notification that came to a watch on `object`.
    fn answer_notification(
        &self,
        object: &ObjectName,
        id: u64,
        cookie: u64,
        payload: Vec<u8>,
    ) -> LocalFuture<Result<()>>;

    /// Puts the client at `address` ([`ClientIdentity::address`]) on the blocklist for `expire` (`None`: as long as
    /// the cluster does by itself).  When this is answered, whatever this client does after it, on any object, is
    /// ordered after the last change that the other could do: the map that fences it is known here and goes before
    /// each operation.
    fn blocklist(&self, address: &str, expire: Option<Duration>) -> LocalFuture<Result<()>>;

    /// This pool's number.
    fn pool_id(&self) -> i64;

    /// The number of the pool that is named `name`; `NotFound`.
    fn pool_id_of(&self, name: &str) -> LocalFuture<Result<i64>>;

    /// Another pool of the same cluster, through the same client: the same `Rc` each time while anybody holds it, so
    /// that an image is open once.  Its own number gives this pool itself.  `NotFound` when there is none.
    fn pool(&self, id: i64) -> LocalFuture<Result<Rc<dyn ObjectBackend>>>;
}
