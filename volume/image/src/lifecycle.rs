//! Life of an open image: its handles, its removal, and its close.

use std::cell::Cell;

use forebay_reactor::sync::Notify;

/// Handles of an open image, and whether it is removed, closing or closed.
///
/// Invariants:
/// 1. An image is closing only without handles, and gets none from then on: to open it again, wait until it is closed.
/// 2. Closed follows closing, once.
#[derive(Default)]
pub(crate) struct ImageLifecycle {
    handles: Cell<usize>,
    /// Set while the image is being removed, and after.
    removed: Cell<bool>,
    /// Set once the last handle is dropped and the lock and watch are being released.
    closing: Cell<bool>,
    closed: Cell<bool>,
    changed: Notify,
}

impl ImageLifecycle {
    pub(crate) fn handles(&self) -> usize {
        self.handles.get()
    }

    pub(crate) fn add_handle(&self) {
        debug_assert!(!self.closing.get(), "a handle of an image that is closing");
        self.handles.set(self.handles.get() + 1);
    }

    /// Drops a handle; returns whether it was the last one.
    pub(crate) fn remove_handle(&self) -> bool {
        self.handles.set(self.handles.get() - 1);
        self.handles.get() == 0
    }

    pub(crate) fn begin_close(&self) {
        debug_assert_eq!(self.handles.get(), 0, "an image is closed that has handles");
        self.closing.set(true);
    }

    pub(crate) fn end_close(&self) {
        debug_assert!(self.closing.get() && !self.closed.get(), "an image is closed once");
        self.closed.set(true);
        self.changed.notify_all();
    }

    /// Returns whether the image is closing or closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Waits until the image is closed.
    pub(crate) async fn closed(&self) {
        self.changed.wait_until(|| self.closed.get()).await;
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.removed.get()
    }

    /// Enables or disables the refusal of every request, for a removal.
    pub(crate) fn set_removed(&self, removed: bool) {
        self.removed.set(removed);
    }
}
