use std::rc::Rc;

use forebay_reactor::sync::Notify;

use crate::Extent;
use crate::in_flight::{InFlightGuard, InFlightTracker};
use crate::locked_ranges::LockedRanges;

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
    /// Ranges locked exclusively, or about to be.
    exclusive: LockedRanges,
    /// Shared locks.
    shared: InFlightTracker,
    /// Signaled when all shared locks of a generation are released, or a range was unlocked.
    changed: Rc<Notify>,
}

/// Guard of a shared lock; releases it when dropped.
pub struct SharedRange {
    _lock: InFlightGuard,
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
        let shared = InFlightTracker::new(changed.clone());
        Self(Rc::new(Table { exclusive: LockedRanges::default(), shared, changed }))
    }

    /// Returns whether a part of the range is locked exclusively, or about to be.
    pub fn is_locked(&self, extent: Extent) -> bool {
        self.0.exclusive.overlaps(extent)
    }

    /// Takes a shared lock, unless a part of the range is locked exclusively.
    pub fn try_shared(&self, extent: Extent) -> Option<SharedRange> {
        (!self.is_locked(extent)).then(|| SharedRange { _lock: self.0.shared.begin() })
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
        (!self.is_locked(extent) && self.0.shared.is_idle()).then(|| self.0.lock(extent))
    }

    /// Locks a range exclusively. Waits for exclusive locks that overlap it; from then on no shared lock is taken of the
    /// range, and those taken before are waited for.
    pub async fn exclusive(&self, extent: Extent) -> ExclusiveRange {
        self.0.changed.wait_until(|| !self.is_locked(extent)).await;
        let guard = self.0.lock(extent);
        self.0.shared.drain().await;
        guard
    }
}

impl Table {
    fn lock(self: &Rc<Self>, extent: Extent) -> ExclusiveRange {
        self.exclusive.insert(extent);
        ExclusiveRange { table: self.clone(), extent }
    }
}

impl Drop for ExclusiveRange {
    fn drop(&mut self) {
        self.table.exclusive.remove(self.extent);
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
