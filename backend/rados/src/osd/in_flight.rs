//! Table of the requests in flight.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::Result;
use forebay_reactor::Instant;
use forebay_reactor::sync::oneshot;

use super::OsdRequest;
use super::placement::PgTarget;
use super::wire::{OsdReply, Redirect};
use crate::map::Epoch;

/// Request that was submitted and is not yet answered.
pub(super) struct InFlightOp {
    pub(super) request: OsdRequest,
    pub(super) hash: u32,
    /// Target of its placement group at the last lookup.
    pub(super) target: Option<Rc<PgTarget>>,
    /// Set while the request is in flight on the session of its primary.
    pub(super) sent: bool,
    pub(super) attempts: i32,
    pub(super) sent_epoch: Epoch,
    pub(super) redirect: Option<Redirect>,
    pub(super) redirects: u32,
    pub(super) since: Instant,
    /// Set for operations that maintain a watch, to which no time limit applies (lingering operation).
    pub(super) lingers: bool,
    pub(super) answer: oneshot::Sender<Result<OsdReply>>,
}

/// Requests in flight, by transaction id (tid).
///
/// Invariants:
/// 1. Tids ascend in the order of submission and are never reused.  Everything here goes through requests in that
///    order, so requests on one object reach its OSD as they were submitted.
/// 2. A request leaves the table with the only sender of its answer, so it is answered at most once.
#[derive(Default)]
pub(super) struct InFlightOps {
    ops: RefCell<BTreeMap<u64, InFlightOp>>,
    last_tid: Cell<u64>,
}

impl InFlightOps {
    /// Adds a request; returns its tid.
    pub(super) fn insert(&self, op: InFlightOp) -> u64 {
        let tid = self.last_tid.get() + 1;
        self.last_tid.set(tid);
        let before = self.ops.borrow_mut().insert(tid, op);
        debug_assert!(before.is_none(), "tids are not reused");
        tid
    }

    /// Adds a request with a tid of the caller's choice.
    #[cfg(test)]
    pub(super) fn insert_at(&self, tid: u64, op: InFlightOp) {
        self.last_tid.set(self.last_tid.get().max(tid));
        self.ops.borrow_mut().insert(tid, op);
    }

    /// Removes a request.
    pub(super) fn remove(&self, tid: u64) -> Option<InFlightOp> {
        self.ops.borrow_mut().remove(&tid)
    }

    /// Removes all requests; returns them in the order of submission.
    pub(super) fn take_all(&self) -> impl Iterator<Item = InFlightOp> + use<> {
        std::mem::take(&mut *self.ops.borrow_mut()).into_values()
    }

    /// Calls `look` with a request; `None` if it is not in flight any more.  `look` must not use the table.
    pub(super) fn with<T>(&self, tid: u64, look: impl FnOnce(&InFlightOp) -> T) -> Option<T> {
        self.ops.borrow().get(&tid).map(look)
    }

    /// Calls `change` with a request; `None` if it is not in flight any more.  `change` must not use the table.
    pub(super) fn with_mut<T>(&self, tid: u64, change: impl FnOnce(&mut InFlightOp) -> T) -> Option<T> {
        self.ops.borrow_mut().get_mut(&tid).map(change)
    }

    /// Collects what `look` returns for the requests, in the order of submission.
    pub(super) fn filter_map<T>(&self, mut look: impl FnMut(u64, &InFlightOp) -> Option<T>) -> Vec<T> {
        self.ops.borrow().iter().filter_map(|(&tid, op)| look(tid, op)).collect()
    }

    /// Calls `change` with every request.
    pub(super) fn for_each_mut(&self, change: impl FnMut(&mut InFlightOp)) {
        self.ops.borrow_mut().values_mut().for_each(change);
    }

    /// Returns the number of requests.
    pub(super) fn len(&self) -> usize {
        self.ops.borrow().len()
    }
}
