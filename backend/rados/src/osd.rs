//! OSD sessions: requests are routed to their OSD, and rerouted when the cluster changes.
//!
//! All requests in flight are in one table, ordered by tid.  A request is either *sent* on the session of its OSD, or
//! waits: for a connection, for queue space, for the end of a backoff or pause, or for a map with a primary.  When a
//! condition is met, all requests that wait for it are sent in order, so requests on one object reach its OSD in the
//! order of submission.  The rules for resending are Ceph's: when the interval of the placement group changes, when the
//! session is lost, and when an OSD requests it.

mod dispatch;
pub(crate) mod hobject;
mod in_flight;
mod maps;
mod overdue;
mod placement;
mod refusals;
mod session;
#[cfg(test)]
mod tests;
pub(crate) mod watch;
pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectName, Result, SnapContext};
use forebay_messenger::session::cephx::TicketStore;
use forebay_messenger::wire::entity;
use forebay_messenger::{Auth, MessageBudget, Messenger, MessengerCore, MessengerOptions};
use forebay_reactor::sync::{Notify, oneshot};
use forebay_reactor::{now, spawn};

use crate::config::{Credentials, Settings};
use crate::error::failure;
use crate::map::OsdMap;
use crate::monitor::{FEATURES, Monitors};
use in_flight::{InFlightOp, InFlightOps};
use maps::CurrentMap;
use refusals::Rejections;
use session::{Incoming, OsdSession};
use watch::{ObjectWatches, WatchEpoch};
use wire::{OsdOp, OsdReply};

/// Request to an OSD.
#[derive(Debug, Clone)]
pub(crate) struct OsdRequest {
    pub(crate) pool: i64,
    /// Object name; empty for an operation on a placement group.
    pub(crate) object: ObjectName,
    /// Placement group hash, if there is no name.
    pub(crate) group: u32,
    /// Snapshot id, [`wire::SNAP_HEAD`] or [`wire::SNAP_DIR`].
    pub(crate) snap: u64,
    pub(crate) snapc: Option<Rc<SnapContext>>,
    /// Flags, a combination of [`wire::flag`].
    pub(crate) flags: u32,
    pub(crate) ops: Vec<OsdOp>,
}

/// Table of all requests in flight, and the OSD sessions that carry them.
pub(crate) struct Objecter {
    ticket_store: Rc<TicketStore>,
    timeout: Cell<Option<Duration>>,
    messenger: RefCell<Option<Messenger>>,
    monitors: RefCell<Option<Monitors>>,
    current: CurrentMap,
    ops: InFlightOps,
    last_serial: Cell<u64>,
    sessions: RefCell<HashMap<i32, OsdSession>>,
    watches: ObjectWatches,
    watch_epoch: WatchEpoch,
    /// Set while a task looks for slow requests.
    looks_for_slow: Cell<bool>,
    fenced: Cell<bool>,
    rejections: Rejections,
    closed: Cell<bool>,
    pub(crate) changed: Notify,
}

impl Objecter {
    pub(crate) fn new(ticket_store: Rc<TicketStore>) -> Rc<Self> {
        Rc::new(Self {
            ticket_store,
            timeout: Cell::new(None),
            messenger: RefCell::default(),
            monitors: RefCell::default(),
            current: CurrentMap::default(),
            ops: InFlightOps::default(),
            last_serial: Cell::new(0),
            sessions: RefCell::default(),
            watches: ObjectWatches::default(),
            watch_epoch: WatchEpoch::default(),
            looks_for_slow: Cell::new(false),
            fenced: Cell::new(false),
            rejections: Rejections::default(),
            closed: Cell::new(false),
            changed: Notify::new(),
        })
    }

    /// Starts the messenger, after the monitors have sent their settings: no OSD is contacted before.
    pub(crate) fn start(
        self: &Rc<Self>,
        (id, credentials): (String, Credentials),
        nonce: u32,
        core: &MessengerCore,
        settings: &Settings,
    ) {
        self.timeout.set(settings.osd_timeout);
        let ticket_store = self.ticket_store.clone();
        let (auth, modes) = match credentials {
            Credentials::None => (Auth::Named { id, ticket_store, monitors: false }, None),
            Credentials::Cephx(_) => {
                (Auth::CephxService { ticket_store, service: entity::OSD.into() }, Some(settings.osd_modes.clone()))
            }
        };
        let options = MessengerOptions {
            entity: entity::CLIENT,
            peer_entity: Some(entity::OSD),
            nonce: Some(nonce),
            auth,
            modes,
            supported: FEATURES,
            receive: MessageBudget { messages: 1 << 16, bytes: 256 << 20 },
            send: MessageBudget { messages: 1 << 14, bytes: 256 << 20 },
            ..MessengerOptions::default()
        };
        *self.messenger.borrow_mut() = Some(Messenger::new(core, options, Incoming(Rc::downgrade(self))));
    }

    /// Sets the time limit of OSD requests, including those in flight.
    pub(crate) fn set_timeout(&self, timeout: Option<Duration>) {
        self.timeout.set(timeout);
    }

    pub(crate) fn set_monitors(&self, monitors: Monitors) {
        *self.monitors.borrow_mut() = Some(monitors);
    }

    pub(crate) fn map(&self) -> Option<Rc<OsdMap>> {
        self.current.get()
    }

    /// Returns the error of a map with a newer encoding, if no map could be decoded.
    pub(crate) fn newer_map(&self) -> Option<Error> {
        self.current.unreadable()
    }

    /// Returns whether this client is on the cluster's blocklist.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.get()
    }

    /// Returns the numbers of requests in flight and of sessions.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.ops.len(), self.sessions.borrow().len())
    }

    /// Closes all sessions; requests in flight fail.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        for op in self.ops.take_all() {
            op.answer.send(Err(closed()));
        }
        self.sessions.borrow_mut().clear();
        self.monitors.borrow_mut().take();
        let messenger = self.messenger.borrow_mut().take();
        if let Some(messenger) = messenger {
            messenger.shutdown();
        }
        self.changed.notify_all();
        self.watch_epoch.advance();
    }

    /// Submits a request; it is sent before this returns, if possible.
    pub(crate) fn submit(self: &Rc<Self>, request: OsdRequest) -> oneshot::Receiver<Result<OsdReply>> {
        self.submit_for(request, false)
    }

    /// Submits a request like [`submit`](Self::submit); a lingering one does not time out.
    fn submit_for(self: &Rc<Self>, request: OsdRequest, lingers: bool) -> oneshot::Receiver<Result<OsdReply>> {
        let (answer, answered) = oneshot::channel();
        if self.closed.get() {
            answer.send(Err(closed()));
            return answered;
        }
        if self.fenced.get() {
            answer.send(Err(blocklisted(&request.object)));
            return answered;
        }
        let op = InFlightOp {
            request,
            hash: 0,
            target: None,
            sent: false,
            attempts: 0,
            sent_epoch: 0,
            redirect: None,
            redirects: 0,
            since: now(),
            lingers,
            answer,
        };
        let tid = self.ops.insert(op);
        self.dispatch(tid);
        self.fail_refused(Some(tid));
        self.fail_conflicting(Some(tid));
        if !self.looks_for_slow.replace(true) {
            drop(spawn(overdue::watch(Rc::downgrade(self))));
        }
        answered
    }
}

/// Returns the error for requests of a closed client.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::ShuttingDown, "the RADOS client is closed")
}

/// Returns the error for requests of a blocklisted client.
fn blocklisted(object: &ObjectName) -> Error {
    Error::new(ErrorKind::Fenced, format!("object {object}: this client is on the blocklist of the cluster"))
}

/// Converts a reply with an error status to an error.
pub(crate) fn check(reply: OsdReply, object: &ObjectName) -> Result<OsdReply> {
    if reply.result < 0 { Err(failure(reply.result, format!("object {object}"))) } else { Ok(reply) }
}
