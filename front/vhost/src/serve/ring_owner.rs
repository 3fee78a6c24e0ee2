//! Ownership of an export's rings: one connection runs them at a time.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use forebay_reactor::sync::Notify;

use super::scsi_nexus::ScsiNexus;

/// Right to run rings of an export, which one connection has at a time.
///
/// During a live migration two monitors are connected, of which the destination's rings begin when the source's have
/// stopped.  And after a lost connection, requests that it had in flight end before its successor executes them again.
#[derive(Default)]
pub(super) struct RingOwner {
    holder: Cell<Option<u64>>,
    rings: Cell<u32>,
    /// Session of the connection that runs the rings of a virtio-scsi device, or ran them last.
    session: RefCell<Weak<ScsiNexus>>,
    freed: Notify,
}

/// Ring that runs.
pub(super) struct RunningRing {
    owner: Rc<RingOwner>,
}

/// Claim of a connection to run rings of an export.
pub(super) struct RingClaim {
    /// Right that is claimed.
    pub(super) owner: Rc<RingOwner>,
    /// Number of the connection.
    pub(super) connection: u64,
}

impl RingClaim {
    /// Lets the connection run a ring, if no other runs one.
    pub(super) fn try_acquire(&self) -> Option<RunningRing> {
        self.owner.try_acquire(self.connection)
    }

    /// Waits for the next moment at which no connection runs rings.
    pub(super) fn freed(&self) -> impl Future<Output = ()> + '_ {
        self.owner.freed.wait()
    }
}

impl RingOwner {
    /// Returns whether a connection may run a ring now.
    fn is_free_for(&self, connection: u64) -> bool {
        self.holder.get().is_none_or(|holder| holder == connection)
    }

    /// Lets a connection run a ring, if no other runs one.
    fn try_acquire(self: &Rc<Self>, connection: u64) -> Option<RunningRing> {
        if !self.is_free_for(connection) {
            return None;
        }
        self.holder.set(Some(connection));
        self.rings.set(self.rings.get() + 1);
        Some(RunningRing { owner: self.clone() })
    }

    /// Returns the session of the connection that runs the rings or ran them last, unless nothing is left of it.
    pub(super) fn session(&self) -> Option<Rc<ScsiNexus>> {
        self.session.borrow().upgrade()
    }

    /// Sets the session of the connection that runs the rings.
    pub(super) fn set_session(&self, session: &Rc<ScsiNexus>) {
        *self.session.borrow_mut() = Rc::downgrade(session);
    }
}

impl Drop for RunningRing {
    fn drop(&mut self) {
        let rings = self.owner.rings.get() - 1;
        self.owner.rings.set(rings);
        if rings == 0 {
            self.owner.holder.set(None);
            self.owner.freed.notify_all();
        }
    }
}
