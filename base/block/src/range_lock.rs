use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_reactor::sync::Notify;

use crate::Extent;

/// Range lock of a device, for the tasks of one reactor: shared by changes in flight, exclusive for what needs a range
/// alone.
///
/// Shared locks are compatible with one another, also where they overlap, and cost two counters: only an exclusive lock
/// is stored with its range. In return an exclusive lock waits for all shared ones taken before it, not only for those
/// that overlap it.
///
/// Invariants:
/// 1. No two exclusive locks overlap.
/// 2. No shared lock is taken of a range while any byte of it is locked exclusively, or about to be: an exclusive lock
///    blocks shared ones from the moment that no other exclusive lock overlaps it.
/// 3. An exclusive lock is granted only when all shared locks taken before that moment are released.
/// 4. A task that waits for its range has locked nothing. So a holder of a shared lock must not wait for another lock,
///    and must be able to release it without being polled by a task that does; then there is no deadlock.
///
/// A waiting future may be dropped at any time, as may a guard. A released range is offered to all waiters, in the order
/// in which they are woken.
#[derive(Clone)]
pub struct RangeLock(Rc<Table>);

struct Table {
    /// Ranges locked exclusively, or about to be: offset to end.
    exclusive: RefCell<BTreeMap<u64, u64>>,
    current: RefCell<Rc<Generation>>,
    /// Earlier generations that may still have shared locks.
    earlier: RefCell<Vec<Rc<Generation>>>,
    /// Signaled when a generation has drained, or a range was unlocked.
    changed: Rc<Notify>,
}

/// Shared locks taken between two exclusive ones.
struct Generation {
    locks: Cell<usize>,
    changed: Rc<Notify>,
}

/// Guard of a shared lock; releases it when dropped.
pub struct SharedRange {
    generation: Rc<Generation>,
}

/// Guard of an exclusive lock; releases it when dropped.
pub struct ExclusiveRange {
    table: Rc<Table>,
    extent: Extent,
}

impl Default for RangeLock {
    fn default() -> Self {
        Self::new()
    }
}

impl RangeLock {
    /// Creates a range lock with nothing locked.
    pub fn new() -> Self {
        let changed = Rc::new(Notify::new());
        Self(Rc::new(Table {
            exclusive: RefCell::default(),
            current: RefCell::new(Generation::new(&changed)),
            earlier: RefCell::default(),
            changed,
        }))
    }

    /// Returns whether a part of the range is locked exclusively, or about to be.
    pub fn is_locked(&self, extent: Extent) -> bool {
        self.0.is_locked(extent)
    }

    /// Takes a shared lock, unless a part of the range is locked exclusively.
    pub fn try_shared(&self, extent: Extent) -> Option<SharedRange> {
        if self.0.is_locked(extent) {
            return None;
        }
        let generation = self.0.current.borrow().clone();
        generation.locks.set(generation.locks.get() + 1);
        Some(SharedRange { generation })
    }

    /// Waits for a shared lock.
    pub async fn shared(&self, extent: Extent) -> SharedRange {
        loop {
            let changed = self.0.changed.wait();
            if let Some(guard) = self.try_shared(extent) {
                return guard;
            }
            changed.await;
        }
    }

    /// Locks a range exclusively, unless a part of it is locked exclusively or any shared lock is taken.
    pub fn try_exclusive(&self, extent: Extent) -> Option<ExclusiveRange> {
        let busy = self.0.is_locked(extent) || !self.0.current.borrow().is_drained() || !self.0.earlier_drained();
        (!busy).then(|| self.0.lock(extent))
    }

    /// Locks a range exclusively. Waits for exclusive locks that overlap it; from then on no shared lock is taken of the
    /// range, and those taken before are waited for.
    pub async fn exclusive(&self, extent: Extent) -> ExclusiveRange {
        self.0.changed.wait_until(|| !self.0.is_locked(extent)).await;
        let guard = self.0.lock(extent);
        let before = self.0.begin_generation();
        let drained = || before.iter().all(|generation| generation.is_drained());
        self.0.changed.wait_until(drained).await;
        guard
    }
}

impl Table {
    fn is_locked(&self, extent: Extent) -> bool {
        // The ranges do not overlap one another, so the last one that begins before the end also ends last.
        let before = self.exclusive.borrow().range(..extent.end()).next_back().map(|(_, &end)| end);
        before.is_some_and(|end| end > extent.offset)
    }

    fn lock(self: &Rc<Self>, extent: Extent) -> ExclusiveRange {
        debug_assert!(!self.is_locked(extent), "{extent:?} is locked exclusively already");
        if extent.len > 0 {
            self.exclusive.borrow_mut().insert(extent.offset, extent.end());
        }
        ExclusiveRange { table: self.clone(), extent }
    }

    fn earlier_drained(&self) -> bool {
        self.earlier.borrow().iter().all(|generation| generation.is_drained())
    }

    /// Begins a new generation of shared locks; returns the earlier ones that are not drained.
    fn begin_generation(&self) -> Vec<Rc<Generation>> {
        let mut earlier = self.earlier.borrow_mut();
        earlier.push(self.current.replace(Generation::new(&self.changed)));
        earlier.retain(|generation| !generation.is_drained());
        earlier.clone()
    }
}

impl Generation {
    fn new(changed: &Rc<Notify>) -> Rc<Self> {
        Rc::new(Self { locks: Cell::new(0), changed: changed.clone() })
    }

    fn is_drained(&self) -> bool {
        self.locks.get() == 0
    }
}

impl Drop for SharedRange {
    fn drop(&mut self) {
        let left = self.generation.locks.get() - 1;
        self.generation.locks.set(left);
        if left == 0 {
            self.generation.changed.notify_all();
        }
    }
}

impl Drop for ExclusiveRange {
    fn drop(&mut self) {
        if self.extent.len > 0 {
            let end = self.table.exclusive.borrow_mut().remove(&self.extent.offset);
            debug_assert_eq!(end, Some(self.extent.end()), "a guard owns its range");
        }
        self.table.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn an_exclusive_lock_waits_for_shared_ones_before_it_and_blocks_later_ones() {
        let ranges = RangeLock::new();
        let before = ranges.try_shared(Extent::new(0, 10)).expect("nothing is locked");
        let far = ranges.try_shared(Extent::new(1000, 10)).expect("nothing is locked");
        let mut exclusive = Box::pin(ranges.exclusive(Extent::new(5, 10)));
        assert!(poll(&mut exclusive).is_none());
        assert!(ranges.try_shared(Extent::new(14, 1)).is_none(), "locked already");
        let beside = ranges.try_shared(Extent::new(15, 1)).expect("beside what is locked");
        let mut later = Box::pin(ranges.shared(Extent::new(0, 6)));
        assert!(poll(&mut later).is_none());
        drop(before);
        assert!(poll(&mut exclusive).is_none(), "one more was taken before");
        drop(far);
        let locked = poll(&mut exclusive).expect("all are released");
        assert!(poll(&mut later).is_none());
        drop(locked);
        assert!(poll(&mut later).is_some());
        drop(beside);
    }

    #[test]
    fn exclusive_locks_wait_for_one_another_and_for_all_earlier_shared_ones() {
        let ranges = RangeLock::new();
        let write = ranges.try_shared(Extent::new(100, 1)).expect("nothing is locked");
        let mut first = Box::pin(ranges.exclusive(Extent::new(0, 10)));
        let mut apart = Box::pin(ranges.exclusive(Extent::new(50, 10)));
        let mut second = Box::pin(ranges.exclusive(Extent::new(9, 10)));
        assert!(poll(&mut first).is_none() && poll(&mut apart).is_none() && poll(&mut second).is_none());
        drop(write);
        let first = poll(&mut first).expect("its turn");
        assert!(poll(&mut apart).is_some() && poll(&mut second).is_none());
        drop(first);
        assert!(poll(&mut second).is_some());
    }

    #[test]
    fn a_dropped_waiter_unlocks_its_range() {
        let ranges = RangeLock::new();
        let write = ranges.try_shared(Extent::new(0, 1)).expect("nothing is locked");
        let mut exclusive = Box::pin(ranges.exclusive(Extent::new(0, 10)));
        assert!(poll(&mut exclusive).is_none());
        assert!(ranges.is_locked(Extent::new(9, 1)) && !ranges.is_locked(Extent::new(10, 1)));
        drop(exclusive);
        assert!(ranges.try_shared(Extent::new(0, 10)).is_some());
        drop(write);
    }

    #[test]
    fn an_exclusive_lock_is_tried_without_waiting() {
        let ranges = RangeLock::new();
        let first = ranges.try_exclusive(Extent::new(0, 10)).expect("nothing is locked");
        assert!(ranges.try_exclusive(Extent::new(9, 1)).is_none());
        let beside = ranges.try_exclusive(Extent::new(10, 10)).expect("it does not overlap");
        drop(first);
        let write = ranges.try_shared(Extent::new(0, 10)).expect("unlocked");
        assert!(ranges.try_exclusive(Extent::new(30, 1)).is_none(), "a shared lock is taken");
        drop((write, beside));
        assert!(ranges.try_exclusive(Extent::new(0, 20)).is_some());
    }
}
