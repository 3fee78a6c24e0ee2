//! Windows of one connection, and the device that the peer writes with.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_reactor::rdma::RdmaStream;

use super::WindowState;

/// Windows that the peer of one connection may write into, and the RDMA stream of that connection.
///
/// Invariants:
/// 1. There is a device only while there is a stream whose device writes in the clear.
/// 2. Whichever window was listed when the connection ended is revoked: the owner may keep it, but no peer can write.
/// 3. Windows and devices are dropped while the table is not borrowed, since that runs the owner's code.
#[derive(Default)]
pub(crate) struct WindowTable {
    open: RefCell<BTreeMap<u64, Rc<WindowState>>>,
    device: RefCell<Option<RdmaStream>>,
}

impl WindowTable {
    /// Returns the RDMA stream whose device writes directly into windows, if there is one.
    pub(super) fn device(&self) -> Option<RdmaStream> {
        self.device.borrow().clone()
    }

    /// Sets the RDMA stream whose device writes directly into windows; `None` once the stream is lost.
    pub(crate) fn set_device(&self, device: Option<RdmaStream>) {
        let before = self.device.replace(device);
        drop(before);
    }

    pub(super) fn insert(&self, window: Rc<WindowState>) {
        let before = self.open.borrow_mut().insert(window.id, window);
        debug_assert!(before.is_none(), "two windows with the same ID");
    }

    pub(super) fn remove(&self, id: u64) {
        let closed = self.open.borrow_mut().remove(&id);
        drop(closed);
    }

    pub(super) fn get(&self, id: u64) -> Option<Rc<WindowState>> {
        self.open.borrow().get(&id).cloned()
    }

    /// Revokes all windows, since the connection has ended.
    pub(crate) fn close_all(&self) {
        let gone = (self.device.take(), self.open.take());
        gone.1.values().for_each(|window| window.revoke());
        drop(gone);
    }
}
