//! Watches and notifications.
//!
//! A watch is a registration with an object's OSD, bound to this client's session.  It is kept alive by a periodic
//! ping, and re-established when the session is lost or the placement group moves; if that happens in time, no
//! notification is missed.  Each watch has a task for this, which ends with it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::Poll;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Notification, ObjectName, Result, WatchHandler};
use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};
use forebay_reactor::sync::{Notify, oneshot};
use forebay_reactor::{Buf, BufList, Instant, now as time_now, random, spawn, timeout};

use super::placement::PgTarget;
use super::wire::{OsdOp, OsdReply, SNAP_HEAD, flag, watch};
use super::{Objecter, OsdRequest, check, closed};
use crate::error::errno;

/// Interval of watch pings; OSDs drop a watch after 30 s.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Time in seconds after which an OSD drops a silent watch.
const WATCH_TIMEOUT_S: u32 = 30;

/// Watch of this client.
pub(crate) struct ObjectWatch {
    pub(crate) cookie: u64,
    pool: i64,
    object: ObjectName,
    handler: Rc<dyn WatchHandler>,
    generation: Cell<u32>,
    /// Session serial and target with which the watch is registered.
    registered: RefCell<Option<(u64, Rc<PgTarget>)>>,
    /// Time at which the last request was sent that its OSD has answered with the watch in place.
    confirmed: Cell<Instant>,
    ended: Cell<bool>,
}

impl ObjectWatch {
    /// Returns the time at which the last request was sent that its OSD has answered with the watch in place.
    pub(crate) fn confirmed(&self) -> Instant {
        self.confirmed.get()
    }
}

/// Result of a notification: a status, and the encoded acknowledgements.
pub(crate) type NotifyResult = (i32, Vec<u8>);

#[derive(Default)]
pub(super) struct ObjectWatches {
    watches: RefCell<HashMap<u64, Rc<ObjectWatch>>>,
    notifies: RefCell<HashMap<u64, oneshot::Sender<NotifyResult>>>,
}

/// Watch epoch: counts the events that may end or move watches: lost sessions, new OSD maps, ended watches, the end of
/// the client.
///
/// Invariant: the epoch only grows, and each advance wakes all waiters, so a task that compares epochs misses no event.
#[derive(Default)]
pub(super) struct WatchEpoch {
    epoch: Cell<u64>,
    advanced: Notify,
}

impl WatchEpoch {
    /// Returns the number of events so far.
    pub(super) fn get(&self) -> u64 {
        self.epoch.get()
    }

    /// Counts an event, and wakes all waiters.
    pub(super) fn advance(&self) {
        self.epoch.set(self.epoch.get() + 1);
        self.advanced.notify_all();
    }

    /// Waits until a condition holds, checking it again at each event.
    pub(super) async fn wait_until(&self, condition: impl FnMut() -> bool) {
        self.advanced.wait_until(condition).await;
    }
}

/// Event message of an OSD for a watch or notification.
struct Event {
    op: u8,
    cookie: u64,
    id: u64,
    payload: Vec<u8>,
    status: i32,
    sender: u64,
}

/// Event types.
mod event {
    pub(super) const NOTIFY: u8 = 1;
    pub(super) const COMPLETE: u8 = 2;
    pub(super) const DISCONNECT: u8 = 3;
}

impl Event {
    fn decode(version: u16, front: &[u8]) -> std::result::Result<Self, MalformedPayload> {
        let mut from = PayloadReader::new(front, "an event of a watch");
        let (part, op, cookie) = (from.u8()?, from.u8()?, from.u64()?);
        // Obsolete version.
        from.u64()?;
        let id = from.u64()?;
        let payload = if part >= 1 { from.blob()?.to_vec() } else { Vec::new() };
        let status = if version >= 2 { from.i32()? } else { 0 };
        let sender = if version >= 3 { from.u64()? } else { 0 };
        Ok(Self { op, cookie, id, payload, status, sender })
    }
}

/// Decodes any bytes as an event, for fuzzing.
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub(crate) fn decode_any(version: u16, front: &[u8]) {
    let _ = Event::decode(version, front).map(|event| event.payload.len());
}

fn lost(object: &ObjectName, reply: &OsdReply) -> Error {
    let kind = match -reply.result {
        errno::ENOENT => ErrorKind::NotFound,
        errno::ESHUTDOWN => ErrorKind::Fenced,
        // ENOTCONN: the OSD has dropped the watch.
        _ => ErrorKind::TimedOut,
    };
    Error::new(kind, format!("watch on object {object} lost"))
}

impl Objecter {
    /// Handles an event.
    pub(super) fn take_event(self: &Rc<Self>, version: u16, front: &[u8], data: BufList) {
        let event = match Event::decode(version, front) {
            Ok(event) => event,
            Err(error) => return tracing::warn!(%error, "ignoring a malformed watch event of an OSD"),
        };
        if event.op == event::COMPLETE {
            let waiting = self.watches.notifies.borrow_mut().remove(&event.cookie);
            if let Some(waiting) = waiting {
                waiting.send((event.status, data.to_vec()));
            }
            return;
        }
        let watched = self.watches.watches.borrow().get(&event.cookie).cloned();
        let Some(watched) = watched else { return };
        match event.op {
            event::NOTIFY => watched.handler.notified(Notification {
                id: event.id,
                cookie: event.cookie,
                sender: event.sender,
                payload: event.payload,
            }),
            event::DISCONNECT => {
                let objecter = self.clone();
                drop(spawn(async move {
                    // The object may be removed; a ping determines that.
                    let error = match objecter.watch_op(&watched, watch::PING).await.unwrap_or_else(|| Err(closed())) {
                        Ok(reply) if reply.result < 0 => lost(&watched.object, &reply),
                        Ok(_) => return,
                        Err(error) => error,
                    };
                    objecter.end_watch(&watched, Some(error));
                }));
            }
            _ => {}
        }
    }

    fn watch_op(self: &Rc<Self>, watched: &ObjectWatch, op: u8) -> oneshot::Receiver<Result<OsdReply>> {
        let ops = vec![OsdOp::watch(watched.cookie, op, watched.generation.get(), WATCH_TIMEOUT_S)];
        let (pool, object) = (watched.pool, watched.object.clone());
        let flags = flag::READ | flag::WRITE;
        // Operations that maintain a watch wait indefinitely: an OSD that recovers still knows the watch, and its
        // notifications would wait for a watch abandoned by this client.
        let lingers = matches!(op, watch::PING | watch::RECONNECT);
        let request = OsdRequest { pool, object, group: 0, snap: SNAP_HEAD, snapc: None, flags, ops };
        self.submit_for(request, lingers)
    }

    /// Establishes a watch.
    pub(crate) async fn watch(
        self: &Rc<Self>,
        pool: i64,
        object: &ObjectName,
        handler: Rc<dyn WatchHandler>,
    ) -> Result<Rc<ObjectWatch>> {
        let watched = Rc::new(ObjectWatch {
            cookie: random().max(1),
            pool,
            object: object.clone(),
            handler,
            generation: Cell::new(1),
            registered: RefCell::default(),
            confirmed: Cell::new(time_now()),
            ended: Cell::new(false),
        });
        // Registered first: events may arrive before the reply.
        self.watches.watches.borrow_mut().insert(watched.cookie, watched.clone());
        let answered = self.watch_op(&watched, watch::WATCH).await.unwrap_or_else(|| Err(closed()));
        match answered.and_then(|reply| check(reply, object)) {
            Ok(_) => {
                *watched.registered.borrow_mut() = self.registration(pool, object);
                drop(spawn(keep(Rc::downgrade(self), watched.clone())));
                Ok(watched)
            }
            Err(error) => {
                self.watches.watches.borrow_mut().remove(&watched.cookie);
                Err(error)
            }
        }
    }

    /// Removes a watch from its OSD.
    pub(crate) async fn unwatch(self: &Rc<Self>, watched: &Rc<ObjectWatch>) -> Result<()> {
        if watched.ended.get() {
            return Ok(());
        }
        self.end_watch(watched, None);
        let reply = self.watch_op(watched, watch::UNWATCH).await.unwrap_or_else(|| Err(closed()))?;
        // A removed object has no watchers.
        if reply.result == -errno::ENOENT {
            return Ok(());
        }
        check(reply, &watched.object).map(drop)
    }

    fn end_watch(&self, watched: &Rc<ObjectWatch>, error: Option<Error>) {
        if watched.ended.replace(true) {
            return;
        }
        self.watches.watches.borrow_mut().remove(&watched.cookie);
        self.watch_epoch.advance();
        if let Some(error) = error {
            watched.handler.broken(error);
        }
    }

    /// Returns the current session serial and target of an object.
    fn registration(&self, pool: i64, object: &ObjectName) -> Option<(u64, Rc<PgTarget>)> {
        let target = self.target_of(pool, object)?;
        let serial = self.sessions.borrow().get(&target.mapping.primary)?.serial();
        Some((serial, target))
    }

    /// Returns true if a watch is registered with the current session and target of its object.
    fn is_registered(&self, watched: &ObjectWatch) -> bool {
        let now = self.registration(watched.pool, &watched.object);
        let registered = watched.registered.borrow();
        match (&now, &*registered) {
            (Some((serial, target)), Some((before, registered))) => serial == before && target == registered,
            _ => false,
        }
    }

    /// Notifies all watchers of an object, and waits for the result.  An OSD forgets a notification when the placement
    /// of the object changes or its session breaks; it is then sent again, and watchers may receive it twice.
    pub(crate) async fn notify(
        self: &Rc<Self>,
        pool: i64,
        object: &ObjectName,
        payload: &[u8],
        limit: Duration,
    ) -> Result<NotifyResult> {
        let cookie = random().max(1);
        let (done, mut completed) = oneshot::channel();
        self.watches.notifies.borrow_mut().insert(cookie, done);
        let seconds = limit.as_secs().clamp(1, u64::from(u32::MAX)) as u32;
        let mut input = PayloadWriter::new();
        input.u32(1).u32(seconds).blob(payload);
        let input = Buf::copy_of(&input.finish());
        let asked = async {
            loop {
                let before = self.registration(pool, object);
                let ops = vec![OsdOp::notify(cookie).with(input.clone())];
                let (copy, flags) = (object.clone(), flag::READ);
                let request = OsdRequest { pool, object: copy, group: 0, snap: SNAP_HEAD, snapc: None, flags, ops };
                let reply = self.submit(request).await.unwrap_or_else(|| Err(closed()))?;
                check(reply, object)?;
                let before = before.or_else(|| self.registration(pool, object));
                let forgotten = self.watch_epoch.wait_until(|| self.registration(pool, object) != before);
                let mut forgotten = pin!(forgotten);
                let event = poll_fn(|cx| match Pin::new(&mut completed).poll(cx) {
                    Poll::Ready(completed) => Poll::Ready(Some(completed)),
                    Poll::Pending => forgotten.as_mut().poll(cx).map(|()| None),
                });
                match event.await {
                    Some(completed) => return completed.ok_or_else(closed),
                    None => tracing::debug!(%object, "resending a notification"),
                }
            }
        };
        // The OSD enforces the time limit; the local limit applies if the OSD is lost meanwhile.
        let patience = Duration::from_secs(u64::from(seconds)) + 2 * PING_INTERVAL;
        let result = timeout(patience, asked).await;
        self.watches.notifies.borrow_mut().remove(&cookie);
        let late = || {
            Err(Error::new(
                ErrorKind::TimedOut,
                format!("notification on object {object}: not all watchers have acknowledged"),
            ))
        };
        result.unwrap_or_else(|_| late())
    }
}

/// Maintains a watch until it ends.
async fn keep(objecter: Weak<Objecter>, watched: Rc<ObjectWatch>) {
    loop {
        let Some(now) = objecter.upgrade() else { return };
        let seen = now.watch_epoch.get();
        if watched.ended.get() {
            return;
        }
        let op = if now.is_registered(&watched) {
            watch::PING
        } else {
            watched.generation.set(watched.generation.get() + 1);
            watch::RECONNECT
        };
        let sent = time_now();
        let answered = now.watch_op(&watched, op).await.unwrap_or_else(|| Err(closed()));
        let error = match answered {
            Ok(reply) if reply.result >= 0 => {
                watched.confirmed.set(sent);
                None
            }
            // A ping in flight when its session was lost was resent on another one, where the watch is not
            // re-established yet.
            Ok(_) if op == watch::PING && !now.is_registered(&watched) => continue,
            Ok(reply) => Some(lost(&watched.object, &reply)),
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            now.end_watch(&watched, Some(error));
            return;
        }
        if op == watch::RECONNECT {
            *watched.registered.borrow_mut() = now.registration(watched.pool, &watched.object);
        }
        let changed = now.watch_epoch.wait_until(|| now.watch_epoch.get() != seen || watched.ended.get());
        let _ = timeout(PING_INTERVAL, changed).await;
    }
}
