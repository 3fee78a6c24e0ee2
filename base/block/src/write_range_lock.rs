use std::rc::Rc;

use forebay_reactor::sync::Notify;

use crate::Extent;
use crate::locked_ranges::LockedRanges;

/// Lock of ranges by writes that must not overlap one another, for the tasks of one reactor.  Unlike
/// [`RangeLock`](crate::RangeLock) it orders overlapping writes.
///
/// Invariants:
/// 1. Locked ranges are not empty, and no two of them overlap.
/// 2. A range is locked exactly as long as its guard exists.
/// 3. Every unlock is signaled, after the range is free.
#[derive(Clone)]
pub struct WriteRangeLock(Rc<Table>);

struct Table {
    locked: LockedRanges,
    unlocked: Rc<Notify>,
}

/// Guard of a locked range; unlocks it when dropped.
#[must_use]
pub struct WriteRange {
    table: Rc<Table>,
    extent: Extent,
}

impl WriteRangeLock {
    /// Returns a lock without locked ranges, which signals `unlocked` whenever a range is unlocked.
    pub fn new(unlocked: Rc<Notify>) -> Self {
        Self(Rc::new(Table { locked: LockedRanges::default(), unlocked }))
    }

    /// Tries to lock a range, which must not be empty; returns `None` if a part of it is locked.
    pub fn try_lock(&self, extent: Extent) -> Option<WriteRange> {
        debug_assert!(extent.len > 0, "a lock of an empty range at {}", extent.offset);
        if self.0.locked.overlaps(extent) {
            return None;
        }
        self.0.locked.insert(extent);
        Some(WriteRange { table: self.0.clone(), extent })
    }

    /// Waits until the range can be locked, and locks it. Waiters are not served in order.
    pub async fn lock(&self, extent: Extent) -> WriteRange {
        loop {
            let unlocked = self.0.unlocked.wait();
            if let Some(guard) = self.try_lock(extent) {
                return guard;
            }
            unlocked.await;
        }
    }

    /// Returns whether no range is locked.
    pub fn is_free(&self) -> bool {
        self.0.locked.is_empty()
    }

    /// Returns whether no locked range reaches past `end`.
    pub fn is_free_from(&self, end: u64) -> bool {
        self.0.locked.end() <= end
    }

    /// Returns the bytes of the locked ranges.
    pub fn bytes(&self) -> u64 {
        self.0.locked.bytes()
    }
}

impl WriteRange {
    /// Returns the locked range.
    pub fn extent(&self) -> Extent {
        self.extent
    }
}

impl Drop for WriteRange {
    fn drop(&mut self) {
        self.table.locked.remove(self.extent);
        self.table.unlocked.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_waiter_gets_the_range_when_it_is_unlocked() {
        let lock = WriteRangeLock::new(Rc::new(Notify::new()));
        let mut cx = Context::from_waker(Waker::noop());
        let guard = lock.try_lock(Extent::new(10, 10)).expect("free");
        let mut waiter = pin!(lock.lock(Extent::new(19, 5)));
        assert!(waiter.as_mut().poll(&mut cx).is_pending());
        assert!(lock.is_free_from(20) && !lock.is_free_from(19));
        drop(guard);
        let Poll::Ready(guard) = waiter.as_mut().poll(&mut cx) else { panic!("still locked") };
        assert!(guard.extent() == Extent::new(19, 5) && lock.bytes() == 5);
        drop(guard);
        assert!(lock.is_free() && lock.bytes() == 0);
    }

    proptest! {
        #[test]
        fn ranges_are_locked_as_in_an_array(
            steps in proptest::collection::vec((0..200_u64, 1..40_u64, any::<bool>()), 1..100),
        ) {
            let lock = WriteRangeLock::new(Rc::new(Notify::new()));
            let mut guards: Vec<WriteRange> = Vec::new();
            let mut plain = [false; 256];
            for (start, len, release) in steps {
                if release && !guards.is_empty() {
                    let guard = guards.swap_remove(start as usize % guards.len());
                    let extent = guard.extent();
                    plain[extent.offset as usize..extent.end() as usize].fill(false);
                    drop(guard);
                } else {
                    let range = start as usize..(start + len) as usize;
                    let free = plain[range.clone()].iter().all(|&locked| !locked);
                    let guard = lock.try_lock(Extent::new(start, len));
                    prop_assert_eq!(guard.is_some(), free);
                    if let Some(guard) = guard {
                        plain[range].fill(true);
                        guards.push(guard);
                    }
                }
                prop_assert_eq!(lock.bytes(), plain.iter().filter(|&&locked| locked).count() as u64);
                let end = plain.iter().rposition(|&locked| locked).map_or(0, |last| last as u64 + 1);
                prop_assert!(lock.is_free_from(end) && (end == 0 || !lock.is_free_from(end - 1)));
                prop_assert_eq!(lock.is_free(), end == 0);
            }
        }
    }
}
