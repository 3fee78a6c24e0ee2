//! Limit of the operations in flight on a range of a file: further ones wait, in order, with their buffers.
//!
//! Operations are queued here rather than futures by a semaphore: an operation that is due is submitted when another one
//! completes, and not when its future is polled.  A task that holds several of them and awaits something else delays
//! nobody.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use crate::driver::{Op, OpKey};

/// Limit of the operations in flight, and the operations that wait for a place.
pub(crate) struct QueueLimit {
    max: usize,
    in_flight: Cell<usize>,
    waiting: RefCell<VecDeque<(OpKey, Op)>>,
}

impl QueueLimit {
    /// Creates a limit of `max` operations, at least 1.
    pub fn new(max: usize) -> Self {
        Self { max: max.max(1), in_flight: Cell::new(0), waiting: RefCell::default() }
    }

    /// Returns the operation, counted as in flight, if it may be submitted; otherwise queues it.
    pub fn admit(&self, key: OpKey, op: Op) -> Option<Op> {
        if self.in_flight.get() < self.max {
            self.in_flight.set(self.in_flight.get() + 1);
            return Some(op);
        }
        self.waiting.borrow_mut().push_back((key, op));
        None
    }

    /// Counts an operation as completed. Returns the next one, counted as in flight.
    pub fn complete(&self) -> Option<(OpKey, Op)> {
        let next = self.waiting.borrow_mut().pop_front();
        if next.is_none() {
            self.in_flight.set(self.in_flight.get() - 1);
        }
        next
    }

    /// Removes an operation that waits.
    pub fn remove(&self, key: OpKey) -> Option<Op> {
        let mut waiting = self.waiting.borrow_mut();
        let at = waiting.iter().position(|(other, _)| *other == key)?;
        waiting.remove(at).map(|(_, op)| op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Handle;

    #[test]
    fn operations_beyond_the_limit_wait_in_order() {
        let limit = QueueLimit::new(2);
        let op = || Op::Sync { file: Handle(0) };
        let admitted = |key| limit.admit(OpKey(key), op()).is_some();
        assert_eq!([1, 2, 3, 4, 5].map(admitted), [true, true, false, false, false]);
        assert!(limit.remove(OpKey(4)).is_some(), "it waits");
        assert!(limit.remove(OpKey(4)).is_none() && limit.remove(OpKey(1)).is_none(), "they do not wait");
        let next = || limit.complete().map(|(key, _)| key.0);
        assert_eq!([next(), next(), next()], [Some(3), Some(5), None]);
        assert!(admitted(6) && !admitted(7), "one of two is free");
    }

    #[test]
    fn a_limit_of_none_admits_one() {
        let limit = QueueLimit::new(0);
        assert!(limit.admit(OpKey(0), Op::Sync { file: Handle(0) }).is_some());
    }
}
