//! Forwarder's side of leases: a volume that is given up, as hosts are to use other paths.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind};
use forebay_reactor::{now, spawn};

use crate::device::VolumeForwarder;
use crate::route::OwnerRoute;
use crate::session::lease_is_over;

impl VolumeForwarder {
    /// Notes the lease of a session that an owner has opened, before anything is sent in it.
    pub(crate) fn lease_begins(&self, route: &OwnerRoute, lease: Duration) {
        // A session at this daemon has none: it is closed without a message.
        if let OwnerRoute::Remote(_) = route {
            self.lease.set(self.lease.get().max(lease));
            self.state.borrow_mut().leases_until(lease_is_over(now(), lease));
        }
    }

    /// Notes until when leases count that were renewed.
    pub(crate) fn note_renewals(&self) {
        if let Some(granted) = self.client.newest_grant_named() {
            self.state.borrow_mut().leases_until(lease_is_over(granted, self.lease.get()));
        }
    }

    /// Gives the volume up.
    pub(crate) fn give_up(self: &Rc<Self>) {
        if self.state.borrow().is_given_up() {
            return;
        }
        let session = self.state.borrow().session();
        let route = self.route.borrow().clone();
        self.state.borrow_mut().give_up();
        self.closing.set(true);
        match (session, route) {
            (Some(session), Some(OwnerRoute::Local(host))) => {
                host.close_local(&self.client, session);
                self.session_closed(session);
            }
            (Some(session), Some(route)) => {
                // An owner that is reached ends the session before its lease does.
                let forwarder = self.clone();
                drop(spawn(async move {
                    if route.close(&forwarder.client, session).await {
                        forwarder.session_closed(session);
                    }
                }));
            }
            _ => {}
        }
        self.changed.notify_all();
    }

    fn session_closed(&self, session: u64) {
        let over = {
            let mut state = self.state.borrow_mut();
            state.closed(session);
            state.expired(now())
        };
        self.resolve(over);
        self.changed.notify_all();
    }

    /// Returns the error of a request that hosts may send again over another path.
    pub(crate) fn given_up(&self) -> Error {
        let text = format!("volume {}: this daemon is cut off from its group; use another path", self.volume());
        Error::new(ErrorKind::Fenced, text)
    }
}
