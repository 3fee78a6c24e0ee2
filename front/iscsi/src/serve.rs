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

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_block::BlockDevice;
use forebay_reactor::{Addr, Listener, Stream, spawn};
use forebay_serve::{Bell, Connections};

use crate::session::params::Offer;
use crate::session::receive::Pools;
use crate::site::Site;
use crate::stats::SiteEvent;
use crate::unit::Unit;
use connection::{Connection, End};
use handshake::Handshake;
use local::Local;

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

/// A server on one core.  Several cores each have their own, on one shared listener and with the same [`Site`].
pub struct Server {
    site: Site,
    options: Options,
    pools: Rc<Pools>,
    cores: Rc<Cores>,
    connections: Rc<Connections<Rc<Bell>>>,
}

impl Server {
    /// A server of a site's units.
    pub fn new(site: Site, devices: Rc<dyn Devices>, options: Options) -> Rc<Self> {
        Rc::new(Self {
            site,
            options,
            pools: Rc::new(Pools::new()),
            cores: Rc::new(Cores { devices, locals: RefCell::default() }),
            connections: Connections::new(),
        })
    }

    /// What it serves.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Connections now, those that still log in too.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Accepts connections, each of which becomes a task of its own, until [`stop`](Self::stop).
    pub async fn serve(self: Rc<Self>, listener: Listener) {
        tracing::info!(addr = %listener.local_addr(), target = self.site.target(), "serving iSCSI");
        self.connections.accept(&listener, |stream, peer| self.adopt(stream, peer)).await;
    }

    /// Serves a connection that was accepted elsewhere.
    pub fn adopt(self: &Rc<Self>, stream: Stream, peer: Addr) {
        self.site.counters().count(SiteEvent::Accepted);
        if self.connections.stopping() || self.connections() >= self.options.connections_max {
            self.site.counters().count(SiteEvent::TurnedAway);
            tracing::warn!(%peer, max = self.options.connections_max, "a connection too many is turned away");
            return;
        }
        let control = Rc::new(Bell::default());
        let place = self.connections.enter(control.clone());
        let server = self.clone();
        drop(spawn(async move {
            server.connection(&control, stream, peer).await;
            drop(place);
        }));
    }

    /// Stops accepting, ends all connections, their commands under way first, and waits until they are gone.
    pub async fn stop(&self) {
        self.connections.stop(|control| control.stop()).await;
    }

    /// A connection from its first byte to its last.
    async fn connection(&self, control: &Bell, stream: Stream, peer: Addr) {
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
