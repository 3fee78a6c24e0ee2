//! Forwarder's side of a daemon: all volumes that it forwards.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{LocalFuture, Result};
use forebay_messenger::{Connection, Message};
use forebay_reactor::Instant;

use crate::device::{ForwardedVolume, VolumeForwarder};
use crate::renewal::LeaseRenewal;
use crate::route::OwnerRoute;
use crate::session::ForwarderLimits;
use crate::wire::{self, ForwardEvent, ForwarderStart, KIND_EVENT};

/// Owner of a volume, as far as a forwarder knows.
#[derive(Debug, Clone)]
pub struct ReachableOwner {
    /// Way to it.
    pub route: OwnerRoute,
    /// Term in which it owns the volume, if known: sessions of lower terms are not used any more.
    pub term: Option<u64>,
}

/// Source of the owner of a volume.
pub trait OwnerLocator {
    /// Returns the current owner; `None` while there is none that is known.
    ///
    /// A daemon is returned only after the former owner has drained the volume or was fenced.
    fn owner(&self) -> Option<ReachableOwner>;

    /// Completes when [`owner`](Self::owner) may have changed since this was called.
    fn changed(&self) -> LocalFuture<()>;

    /// Handles the name of the next owner, as the former one knows it.
    fn hint(&self, _owner: &str) {}
}

/// All volumes that a daemon forwards, in one life of it.
pub struct ForwardClient {
    start: ForwarderStart,
    limits: ForwarderLimits,
    next_session: Cell<u64>,
    volumes: RefCell<Vec<Weak<VolumeForwarder>>>,
    lease: Cell<Duration>,
    pub(crate) renewal: LeaseRenewal,
}

impl ForwardClient {
    /// Creates the forwarder of a life of a daemon, with bounds for each volume.
    pub fn new(start: ForwarderStart, limits: ForwarderLimits) -> Rc<Self> {
        let (lease, renewal) = (Cell::new(limits.lease), LeaseRenewal::default());
        Rc::new(Self { start, limits, next_session: Cell::new(1), volumes: RefCell::default(), lease, renewal })
    }

    /// Sets the lease of sessions that are opened from now on.
    pub fn set_lease(&self, lease: Duration) {
        self.lease.set(lease);
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease.get()
    }

    /// Returns when the newest grant was received that any owner was told.
    pub(crate) fn newest_grant_named(&self) -> Option<Instant> {
        self.renewal.newest_named()
    }

    /// Returns whether a volume that was given up waits for the end of leases.
    pub(crate) fn waits_for_leases(&self) -> bool {
        self.volumes.borrow().iter().filter_map(Weak::upgrade).any(|volume| volume.state.borrow().waits_for_leases())
    }

    /// Returns the connections that volumes have a session over that they have not given up.
    pub(crate) fn connections_in_use(&self) -> Vec<Connection> {
        let mut connections = Vec::new();
        for volume in self.volumes.borrow().iter().filter_map(Weak::upgrade) {
            let is_in_use = volume.state.borrow().is_open() && !volume.state.borrow().is_given_up();
            if let Some(OwnerRoute::Remote(connection)) = volume.route.borrow().as_ref().filter(|_| is_in_use)
                && !connections.contains(connection)
            {
                connections.push(connection.clone());
            }
        }
        connections
    }

    /// Opens a volume at its owner.
    ///
    /// # Errors
    /// `TimedOut` when no owner has opened it in time, `Fenced` when the group has declared this start dead.
    pub async fn open(self: &Rc<Self>, volume: &str, locator: Rc<dyn OwnerLocator>) -> Result<ForwardedVolume> {
        let forwarder = VolumeForwarder::begin(self.clone(), volume, locator, self.limits);
        {
            let mut volumes = self.volumes.borrow_mut();
            volumes.retain(|volume| volume.strong_count() > 0);
            volumes.push(Rc::downgrade(&forwarder));
        }
        // Dropped on an error, it ends.
        let volume = ForwardedVolume::new(forwarder);
        volume.opened().await?;
        Ok(volume)
    }

    /// Handles a message that is an event of an owner; returns false if it is something else.
    pub fn handle(&self, connection: &Connection, message: &Message) -> bool {
        if message.kind != KIND_EVENT {
            return false;
        }
        match wire::front(message).and_then(|front| ForwardEvent::decode(&front, message.data.clone())) {
            Ok(event) => self.event(&OwnerRoute::Remote(connection.clone()), &event),
            Err(error) => {
                let peer = connection.address();
                tracing::warn!(%peer, %error, "forwarded volumes: protocol violation; sessions with the owner end");
                self.reset(connection);
            }
        }
        true
    }

    /// Opens the sessions over a connection again: the connection has ended, or the peer has dropped the messenger's session.
    pub fn reset(&self, connection: &Connection) {
        self.renewal.forget(connection);
        let route = OwnerRoute::Remote(connection.clone());
        self.over_route(&route).into_iter().for_each(|volume| volume.connection_lost());
    }

    /// Handles an event of an owner.
    pub(crate) fn event(&self, route: &OwnerRoute, event: &ForwardEvent) {
        self.over_route(route).into_iter().for_each(|volume| volume.event(event));
    }

    /// Returns the id of this life of the daemon.
    pub fn start(&self) -> &ForwarderStart {
        &self.start
    }

    pub(crate) fn next_session(&self) -> u64 {
        let session = self.next_session.get();
        self.next_session.set(session + 1);
        session
    }

    fn over_route(&self, route: &OwnerRoute) -> Vec<Rc<VolumeForwarder>> {
        let volumes: Vec<_> = self.volumes.borrow().iter().filter_map(Weak::upgrade).collect();
        volumes.into_iter().filter(|volume| volume.is_over(route)).collect()
    }
}
