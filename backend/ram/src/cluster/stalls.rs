//! Stalls: requests that have arrived and are not carried out yet.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_reactor::sync::Notify;

use super::PoolObject;

/// Stalls of a cluster, and the requests that wait for their ends.
///
/// Invariant: an entry exists exactly as long as its [`Stall`].
#[derive(Default)]
pub(super) struct Stalls {
    /// Stalled object names: pool, name prefix, number of the [`Stall`].
    active: RefCell<Vec<(i64, String, u64)>>,
    last: Cell<u64>,
    /// Number of requests that wait for a stall to end.
    waiting: Cell<usize>,
    ended: Notify,
}

impl Stalls {
    /// Returns true if requests to an object are stalled.
    pub(super) fn is_stalled(&self, object: &PoolObject) -> bool {
        let active = self.active.borrow();
        active.iter().any(|(pool, prefix, _)| *pool == object.0 && object.1.name().starts_with(prefix))
    }

    /// Waits until requests to an object are not stalled.
    pub(super) async fn wait_out(&self, object: &PoolObject) {
        if self.is_stalled(object) {
            self.waiting.set(self.waiting.get() + 1);
            self.ended.wait_until(|| !self.is_stalled(object)).await;
            self.waiting.set(self.waiting.get() - 1);
        }
    }
}

/// Guard that stalls transactions and lists of keys of some objects of a pool: they are carried out once it is dropped.
pub struct Stall {
    stalls: Rc<Stalls>,
    number: u64,
}

impl Stall {
    /// Stalls requests to the objects of a pool whose names begin with `prefix`.
    pub(super) fn new(stalls: &Rc<Stalls>, pool: i64, prefix: &str) -> Self {
        let number = stalls.last.get() + 1;
        stalls.last.set(number);
        stalls.active.borrow_mut().push((pool, prefix.to_owned(), number));
        Self { stalls: stalls.clone(), number }
    }

    /// Returns the number of requests that wait for the end of a stall, of this one or another.
    pub fn waiting(&self) -> usize {
        self.stalls.waiting.get()
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.stalls.active.borrow_mut().retain(|(_, _, number)| *number != self.number);
        self.stalls.ended.notify_all();
    }
}
