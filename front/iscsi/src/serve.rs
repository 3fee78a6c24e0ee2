//! Serving: accepts connections, logs hosts in, and runs their sessions.  The only part of this crate that waits for
//! anything.

mod connection;
mod execute;
mod gather;
mod handshake;
mod local;
mod lun;
mod outbox;
mod remains;
mod requests;
mod tasks;
mod units;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use forebay_block::BlockDevice;
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Listener, Stream, sleep, spawn};

use crate::session::params::Offer;
use crate::session::receive::Pools;
use crate::site::Site;
use crate::stats::SiteEvent;
use crate::unit::Unit;
use connection::{Connection, End};
use handshake::Handshake;
use local::Local;

/// How long accepting rests after it failed, as it does when there are no file descriptors left.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How this core reaches the devices of units.
pub trait Devices {
    /// The device behind a unit; `None` when it is not to be had any more.
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>>;
}

/// Limits of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Connections of this core at a time; more are closed as soon as they are accepted.
    pub connections_max: usize,
    /// What is offered in logins.
    pub offer: Offer,
    /// Commands that a session may have under way.
    pub commands_max: u32,
    /// Bytes that commands of a session under way and answers not sent yet hold.  A single command may hold more.
    pub bytes_max: usize,
    /// Time from accepting to the end of the login.
    pub login_timeout: Duration,
    /// A host that has said nothing for so long is asked whether it is still there, and has as long to answer.  So long
    /// it has to send data that it was asked for, too.
    pub ping_after: Duration,
    /// Time that commands under way have to end when their session ends.
    pub drain_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            offer: Offer::default(),
            commands_max: 128,
            bytes_max: 16 << 20,
            login_timeout: Duration::from_secs(20),
            ping_after: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// The units of a core, shared by its sessions.
pub(crate) struct Cores {
    devices: Rc<dyn Devices>,
    locals: RefCell<BTreeMap<u16, Weak<Local>>>,
}

impl Cores {
    /// A unit on this core.
    pub(crate) fn local(&self, unit: &Arc<Unit>) -> Option<Rc<Local>> {
        let found = self.locals.borrow().get(&unit.lun()).and_then(Weak::upgrade);
        // The number may have been given to another unit meanwhile.
        if let Some(local) = found.filter(|local| Arc::ptr_eq(&local.unit, unit)) {
            return Some(local);
        }
        let local = Rc::new(Local::new(unit.clone(), self.devices.device(unit)?));
        self.locals.borrow_mut().insert(unit.lun(), Rc::downgrade(&local));
        Some(local)
    }
}

/// How the server reaches a connection that has not logged in yet.
#[derive(Default)]
pub(crate) struct Control {
    stopping: Cell<bool>,
    task: RefCell<Option<Waker>>,
}

impl Control {
    fn stop(&self) {
        self.stopping.set(true);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    fn set_task(&self, waker: &Waker) {
        let mut task = self.task.borrow_mut();
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }
}

/// A server on one core.  Several cores each have their own, on one shared listener and with the same [`Site`].
pub struct Server {
    site: Site,
    options: Options,
    pools: Rc<Pools>,
    cores: Rc<Cores>,
    connections: RefCell<BTreeMap<u64, Rc<Control>>>,
    next_connection: Cell<u64>,
    stopping: Cell<bool>,
    /// A connection has gone, or the server is to stop.
    changed: Notify,
}

impl Server {
    /// A server of a site's units.
    pub fn new(site: Site, devices: Rc<dyn Devices>, options: Options) -> Rc<Self> {
        Rc::new(Self {
            site,
            options,
            pools: Rc::new(Pools::new()),
            cores: Rc::new(Cores { devices, locals: RefCell::default() }),
            connections: RefCell::default(),
            next_connection: Cell::new(0),
            stopping: Cell::new(false),
            changed: Notify::new(),
        })
    }

    /// What it serves.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Connections now, those that still log in too.
    pub fn connections(&self) -> usize {
        self.connections.borrow().len()
    }

    /// Accepts connections, each of which becomes a task of its own, until [`stop`](Self::stop).
    pub async fn serve(self: Rc<Self>, listener: Listener) {
        tracing::info!(addr = %listener.local_addr(), target = self.site.target(), "serving iSCSI");
        while !self.stopping.get() {
            match self.unless_stopped(listener.accept()).await {
                Some(Ok((stream, peer))) => self.adopt(stream, peer),
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Some(Err(error)) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    self.unless_stopped(sleep(ACCEPT_REST)).await;
                }
                None => break,
            }
        }
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr) {
        self.site.counters().count(SiteEvent::Accepted);
        if self.stopping.get() || self.connections() >= self.options.connections_max {
            self.site.counters().count(SiteEvent::TurnedAway);
            tracing::warn!(%peer, max = self.options.connections_max, "a connection too many is turned away");
            return;
        }
        let id = self.next_connection.get();
        self.next_connection.set(id + 1);
        let control = Rc::new(Control::default());
        self.connections.borrow_mut().insert(id, control.clone());
        let place = Place { server: self.clone(), id };
        drop(spawn(async move {
            place.server.connection(&control, stream, peer).await;
            drop(place);
        }));
    }

    /// Stops accepting, ends all connections, their commands under way first, and waits until they are gone.
    pub async fn stop(&self) {
        self.stopping.set(true);
        self.connections.borrow().values().for_each(|control| control.stop());
        self.changed.notify_all();
        self.changed.wait_until(|| self.connections.borrow().is_empty()).await;
    }

    /// What `future` comes to; `None` when the server is stopped before.
    async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut stopped = pin!(self.changed.wait_until(|| self.stopping.get()));
        std::future::poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// A connection from its first byte to its last.
    async fn connection(&self, control: &Control, stream: Stream, peer: Addr) {
        let ready = match (Handshake { server: self, control, stream: &stream, peer: &peer }).run().await {
            Ok(ready) => ready,
            Err(ended) => {
                if ended.is_cause() {
                    self.site.counters().count(SiteEvent::EndedForCause);
                    tracing::warn!(%peer, reason = %ended, "a login is ended");
                } else {
                    tracing::debug!(%peer, reason = %ended, "a login has ended");
                }
                return stream.shutdown();
            }
        };
        let session = ready.entered.session().clone();
        let initiator = session.initiator.clone();
        tracing::info!(%peer, initiator, tsih = session.tsih, discovery = session.discovery, "logged in");
        let end = match Connection::new(self, control, stream.clone(), ready) {
            Some(connection) => connection.run().await,
            None => End::Stopped,
        };
        stream.shutdown();
        match end {
            End::Violation(reason) => {
                self.site.counters().count(SiteEvent::EndedForCause);
                tracing::warn!(%peer, initiator, %reason, "a connection is ended");
            }
            End::Socket(error) => tracing::info!(%peer, initiator, %error, "a connection failed"),
            End::Broken => tracing::info!(%peer, initiator, "a connection ended in the middle of a message"),
            end => tracing::info!(%peer, initiator, ?end, "logged out"),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({} connections)", self.connections())
    }
}

/// A connection's place in the list, given up when its task ends, however it ends.
struct Place {
    server: Rc<Server>,
    id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.connections.borrow_mut().remove(&self.id);
        self.server.changed.notify_all();
    }
}
