//! Range lock: exclusive locks of byte ranges, for changes in flight.
//!
//! Depends on nothing of the write log. Invariants:
//! - L1 Locked ranges are not empty, and no two of them overlap.
//! - L2 A range is locked exactly as long as its guard exists.
//! - L3 Every unlock is signaled, after the range is free.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::Extent;
use forebay_reactor::sync::Notify;

/// Locked ranges.
#[derive(Clone)]
pub(crate) struct LogRangeLock(Rc<Ranges>);

struct Ranges {
    /// Start to end.
    locked: RefCell<BTreeMap<u64, u64>>,
    /// Sum of their lengths.
    bytes: Cell<u64>,
    unlocked: Rc<Notify>,
}

/// Guard of a locked range; unlocks it when dropped.
#[must_use]
pub(crate) struct RangeGuard {
    ranges: Rc<Ranges>,
    extent: Extent,
}

impl LogRangeLock {
    /// Returns a lock without locked ranges, which signals `unlocked` whenever a range is unlocked.
    pub(crate) fn new(unlocked: Rc<Notify>) -> Self {
        Self(Rc::new(Ranges { locked: RefCell::default(), bytes: Cell::new(0), unlocked }))
    }

    /// Tries to lock a range, which must not be empty; returns `None` if a part of it is locked.
    pub(crate) fn try_lock(&self, extent: Extent) -> Option<RangeGuard> {
        debug_assert!(extent.len > 0, "a lock of an empty range at {}", extent.offset);
        let mut locked = self.0.locked.borrow_mut();
        // The last range that begins before the end is the only one that can overlap: all before it end earlier.
        let before = locked.range(..extent.end()).next_back();
        if before.is_some_and(|(_, &end)| end > extent.offset) {
            return None;
        }
        locked.insert(extent.offset, extent.end());
        self.0.bytes.set(self.0.bytes.get() + extent.len);
        Some(RangeGuard { ranges: self.0.clone(), extent })
    }

    /// Waits until the range can be locked, and locks it. Waiters are not served in order.
    pub(crate) async fn lock(&self, extent: Extent) -> RangeGuard {
        loop {
            let unlocked = self.0.unlocked.wait();
            if let Some(guard) = self.try_lock(extent) {
                return guard;
            }
            unlocked.await;
        }
    }

    /// Returns whether no range is locked.
    pub(crate) fn is_free(&self) -> bool {
        self.0.locked.borrow().is_empty()
    }

    /// Returns whether no locked range reaches past `end`.
    pub(crate) fn is_free_from(&self, end: u64) -> bool {
        // The last range ends last.
        self.0.locked.borrow().last_key_value().is_none_or(|(_, &last)| last <= end)
    }

    /// Returns the bytes of the locked ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.bytes.get()
    }
}

impl RangeGuard {
    /// Returns the locked range.
    pub(crate) fn extent(&self) -> Extent {
        self.extent
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        let removed = self.ranges.locked.borrow_mut().remove(&self.extent.offset);
        debug_assert_eq!(removed, Some(self.extent.end()), "the range of a guard was not locked");
        self.ranges.bytes.set(self.ranges.bytes.get() - self.extent.len);
        self.ranges.unlocked.notify_all();
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
        let lock = LogRangeLock::new(Rc::new(Notify::new()));
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
            let lock = LogRangeLock::new(Rc::new(Notify::new()));
            let mut guards: Vec<RangeGuard> = Vec::new();
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
