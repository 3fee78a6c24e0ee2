//! Session with one OSD.

use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::Error;
use forebay_messenger::session::SessionViolation;
use forebay_messenger::wire::AddrKind;
use forebay_messenger::{Address, Connection, DisconnectReason, Handler, Message, Policy, SendError};
use forebay_reactor::{Buf, sleep, spawn};

use super::Objecter;
use super::hobject::HObject;
use super::placement::{PgTarget, hobject};
use super::wire::{Backoff, OsdReply, backoff, kind};
use crate::map::OsdMap;
use crate::monitor;

/// Initial and maximum delay before reconnecting to an OSD.
const REST_MIN: Duration = Duration::from_millis(50);
const REST_MAX: Duration = Duration::from_secs(2);
/// Maximum number of active backoffs per OSD.
const BACKOFFS_MAX: usize = 1 << 16;

/// Connection state of a session.
enum ConnectionState {
    /// Open: requests are sent on the connection.
    Open(Connection),
    /// Send queue of the connection is full.
    Full(Connection),
    /// Connection lost; reconnects after a delay.
    Resting,
}

/// Session with one OSD: its connection, and the backoffs that the OSD has requested on it.
pub(super) struct OsdSession {
    state: ConnectionState,
    /// Address and nonce (instance) of the OSD, from the map at the time of opening.
    peer: Option<(Address, u32)>,
    rest: Duration,
    backoffs: Vec<Backoff>,
    /// Serial number that distinguishes it from earlier sessions.
    serial: u64,
}

fn address(map: &OsdMap, osd: i32) -> Option<(Address, u32)> {
    let addrs = map.addrs(osd).iter().filter(|addr| addr.kind == AddrKind::Msgr2);
    addrs.filter_map(|addr| Some((Address::Tcp(addr.socket?), addr.nonce))).next()
}

impl OsdSession {
    pub(super) fn open(objecter: &Rc<Objecter>, map: &OsdMap, osd: i32) -> Self {
        let peer = address(map, osd);
        let messenger = objecter.messenger.borrow().clone();
        let state = match (&peer, messenger) {
            (Some((peer, nonce)), Some(messenger)) => {
                ConnectionState::Open(messenger.connect_instance(peer, *nonce, Policy::LossyClient))
            }
            _ => {
                tracing::warn!(osd, "the OSD has no msgr2 address; requests to it wait until the OSD map has one");
                ConnectionState::Resting
            }
        };
        let serial = objecter.last_serial.get() + 1;
        objecter.last_serial.set(serial);
        Self { state, peer, rest: REST_MIN, backoffs: Vec::new(), serial }
    }

    /// Returns whether the session's address is that of the OSD in this map.
    pub(super) fn is_at(&self, map: &OsdMap, osd: i32) -> bool {
        self.peer.is_some() && self.peer == address(map, osd)
    }

    /// Returns the serial number of the session; zero while it has no connection.
    pub(super) fn serial(&self) -> u64 {
        if self.connection().is_some() { self.serial } else { 0 }
    }

    /// Returns whether a request can be sent now.
    pub(super) fn takes(&self) -> bool {
        matches!(self.state, ConnectionState::Open(_))
    }

    fn connection(&self) -> Option<&Connection> {
        match &self.state {
            ConnectionState::Open(connection) | ConnectionState::Full(connection) => Some(connection),
            ConnectionState::Resting => None,
        }
    }

    /// Closes the session; the caller must close the returned connection.
    pub(super) fn close(&mut self) -> Option<Connection> {
        match std::mem::replace(&mut self.state, ConnectionState::Resting) {
            ConnectionState::Open(connection) | ConnectionState::Full(connection) => Some(connection),
            ConnectionState::Resting => None,
        }
    }

    /// Returns whether a backoff of the OSD covers this object.
    pub(super) fn holds_back(&self, target: &PgTarget, object: impl FnOnce() -> HObject) -> bool {
        if self.backoffs.is_empty() {
            return false;
        }
        let object = object();
        self.backoffs.iter().any(|backoff| covers(backoff, target, &object))
    }

    /// Sends a message; returns false if the queue is full or the connection is lost, so that the request must wait.
    pub(super) fn post(&mut self, objecter: &Rc<Objecter>, osd: i32, message: Message) -> bool {
        let ConnectionState::Open(connection) = &self.state else { return false };
        match connection.post(message) {
            Ok(()) => true,
            Err(SendError::Full) => {
                let connection = connection.clone();
                self.state = ConnectionState::Full(connection.clone());
                drop(spawn(drain(Rc::downgrade(objecter), osd, connection)));
                false
            }
            // The end of the connection is reported separately.
            Err(error) => {
                tracing::debug!(osd, %error, "request waits for the next connection to the OSD");
                false
            }
        }
    }
}

pub(super) fn covers(backoff: &Backoff, target: &PgTarget, object: &HObject) -> bool {
    backoff.pg == target.pg && backoff.shard == target.shard && backoff.begin <= *object && *object < backoff.end
}

/// Waits until a connection's send queue has drained, and sends what waits for space in it.
async fn drain(objecter: Weak<Objecter>, osd: i32, connection: Connection) {
    connection.drained().await;
    let Some(objecter) = objecter.upgrade() else { return };
    {
        let mut sessions = objecter.sessions.borrow_mut();
        let Some(session) = sessions.get_mut(&osd).filter(|session| session.connection() == Some(&connection)) else {
            return;
        };
        session.state = ConnectionState::Open(connection);
    }
    objecter.send_waiting(Some(osd));
}

/// Handler of messages from OSDs, and of connection events.
pub(super) struct Incoming(pub(super) Weak<Objecter>);

impl Incoming {
    /// Returns the OSD of a connection, if it is that of a current session.
    fn find(&self, connection: &Connection) -> Option<(Rc<Objecter>, i32)> {
        let objecter = self.0.upgrade()?;
        let osd = {
            let sessions = objecter.sessions.borrow();
            sessions.iter().find(|(_, session)| session.connection() == Some(connection)).map(|(&osd, _)| osd)?
        };
        Some((objecter, osd))
    }

    /// Returns the OSD of a reply's connection via its request, without a search of all sessions.
    fn find_by_request(&self, connection: &Connection, tid: u64) -> Option<(Rc<Objecter>, i32)> {
        let objecter = self.0.upgrade()?;
        let osd = objecter.ops.with(tid, |op| op.target.as_ref().map(|target| target.mapping.primary))??;
        let ours = objecter.sessions.borrow().get(&osd)?.connection() == Some(connection);
        ours.then_some((objecter, osd))
    }
}

impl Handler for Incoming {
    fn message(&self, connection: &Connection, message: Message) {
        let found = match message.kind {
            kind::OSD_OP_REPLY => self.find_by_request(connection, message.tid),
            _ => self.find(connection),
        };
        let Some((objecter, osd)) = found else { return };
        match message.kind {
            kind::OSD_OP_REPLY => {
                let front = message.front.clone().into_contiguous();
                match OsdReply::decode(message.version, &front, message.data.clone()) {
                    Ok(reply) => objecter.take_reply(osd, message.tid, reply),
                    Err(error) => {
                        tracing::warn!(osd, %error, "malformed reply of an OSD; reopening the session");
                        connection.close();
                        lost(&objecter, osd, false);
                    }
                }
            }
            kind::OSD_MAP => {
                let front = message.front.to_vec();
                match monitor::wire::osd_maps(&front) {
                    Ok(maps) => objecter.take_maps(&maps),
                    Err(error) => tracing::warn!(osd, %error, "ignoring malformed OSD maps of an OSD"),
                }
            }
            kind::WATCH_NOTIFY => objecter.take_event(message.version, &message.front.to_vec(), message.data.clone()),
            kind::BACKOFF => match Backoff::decode(&message.front.to_vec()) {
                Ok(backoff) => take_backoff(&objecter, osd, connection, backoff),
                Err(error) => tracing::warn!(osd, %error, "ignoring a malformed backoff of an OSD"),
            },
            other => tracing::trace!(osd, kind = other, "ignoring an OSD's message of unknown type"),
        }
    }

    fn opened(&self, connection: &Connection) {
        let Some((objecter, osd)) = self.find(connection) else { return };
        tracing::debug!(osd, "session with an OSD is open");
        if let Some(session) = objecter.sessions.borrow_mut().get_mut(&osd) {
            session.rest = REST_MIN;
        }
        objecter.rejections.clear_osd(osd);
    }

    fn lost(&self, connection: &Connection, reason: &DisconnectReason) {
        let Some((objecter, osd)) = self.find(connection) else { return };
        let peer = format!("osd.{osd} at {}", connection.address());
        if let Some(error) = monitor::conflict_of(&peer, reason, ("ms_client_mode", "ms_service_mode")) {
            conflicting(&objecter, osd, error);
            return;
        }
        tracing::info!(osd, %reason, "the session with an OSD is lost");
        objecter.rejections.clear_osd(osd);
        let refused = matches!(
            reason,
            DisconnectReason::Violation(SessionViolation::MethodRefused { .. } | SessionViolation::Auth(_))
        );
        lost(&objecter, osd, refused);
    }
}

/// Handles an OSD that accepts none of this client's connection modes, or requires features that it lacks.  Reconnects
/// repeatedly, because the setting can be changed at run time; logged once per session.
fn conflicting(objecter: &Rc<Objecter>, osd: i32, error: Error) {
    if objecter.rejections.set_by_osd(osd, &error) {
        tracing::warn!(osd, "{}", error.context());
    }
    lost(objecter, osd, false);
    objecter.fail_conflicting(None);
}

/// Handles a lost connection: reconnects after a delay, unless the map has changed by then.
fn lost(objecter: &Rc<Objecter>, osd: i32, refused: bool) {
    let rest = {
        let mut sessions = objecter.sessions.borrow_mut();
        let Some(session) = sessions.get_mut(&osd) else { return };
        session.state = ConnectionState::Resting;
        session.backoffs.clear();
        let rest = session.rest;
        session.rest = (rest * 2).min(REST_MAX);
        rest
    };
    objecter.unsend(osd, |_, _| true);
    objecter.fail_refused(None);
    objecter.watch_epoch.advance();
    let objecter = Rc::downgrade(objecter);
    drop(spawn(async move {
        sleep(rest).await;
        let Some(objecter) = objecter.upgrade() else { return };
        let monitors = objecter.monitors.borrow().clone();
        if let Some(monitors) = monitors.filter(|_| refused) {
            // The ticket may have expired.
            if let Err(error) = monitor::renew_now(&monitors).await {
                tracing::warn!(%error, "cannot renew tickets; OSDs may refuse new sessions");
            }
        }
        let Some(map) = objecter.map() else { return };
        {
            let mut sessions = objecter.sessions.borrow_mut();
            let Some(session) = sessions.get_mut(&osd).filter(|session| session.connection().is_none()) else { return };
            *session = OsdSession { rest: session.rest, ..OsdSession::open(&objecter, &map, osd) };
        }
        objecter.send_waiting(Some(osd));
    }));
}

fn take_backoff(objecter: &Rc<Objecter>, osd: i32, connection: &Connection, backoff: Backoff) {
    match backoff.op {
        backoff::BLOCK => {
            tracing::debug!(osd, group = %backoff.pg, "requests are blocked by a backoff");
            let answer = Backoff { op: backoff::ACK_BLOCK, ..backoff.clone() };
            if let Some(session) = objecter.sessions.borrow_mut().get_mut(&osd)
                && session.backoffs.len() < BACKOFFS_MAX
            {
                session.backoffs.push(backoff);
            }
            let mut message = Message::new(kind::BACKOFF).front(Buf::copy_of(&answer.encode()));
            (message.version, message.compat_version) = (1, 1);
            if let Err(error) = connection.post(message) {
                tracing::debug!(osd, %error, "cannot acknowledge a backoff");
            }
        }
        backoff::UNBLOCK => {
            tracing::debug!(osd, group = %backoff.pg, "requests are sent again: the backoff has ended");
            if let Some(session) = objecter.sessions.borrow_mut().get_mut(&osd) {
                session.backoffs.retain(|other| other.id != backoff.id);
            }
            // The OSD has dropped requests that were in flight when the backoff began.
            objecter.unsend(osd, |op, target| covers(&backoff, target, &hobject(op, target)));
            objecter.send_waiting(Some(osd));
        }
        _ => {}
    }
}
