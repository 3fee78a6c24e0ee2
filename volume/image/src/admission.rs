//! Admission of changes to an image: range locks for those in flight, and the epoch that refuses superseded ones.
//!
//! Writes are admitted at once: overlapping ones are not ordered. A compare-and-write over several objects, or a
//! shrink, locks a range exclusively.

use std::cell::Cell;

use forebay_block::{CompleteOnDrop, ExclusiveRange, Extent, LocalFuture, RangeLock, Result, SharedRange};

use crate::reserved::outdated;

/// Changes of one image that are in flight, or wait to be.
///
/// Invariants:
/// 1. The range lock of a write is held until the backend has completed it, also if the caller no longer waits for it.
/// 2. The epoch never decreases. A change is admitted only in the epoch in which it arrived.
pub(crate) struct Admission {
    ranges: RangeLock,
    /// Incremented when changes that still wait for admission must be refused.
    epoch: Cell<u64>,
}

impl Admission {
    pub(crate) fn new() -> Self {
        Self { ranges: RangeLock::new(), epoch: Cell::new(0) }
    }

    /// Admits a write, unless a part of its range is locked.
    pub(crate) fn try_shared(&self, extent: Extent) -> Option<SharedRange> {
        self.ranges.try_shared(extent)
    }

    /// Waits until a write can be admitted.
    pub(crate) async fn shared(&self, extent: Extent) -> SharedRange {
        self.ranges.shared(extent).await
    }

    /// Locks a range exclusively, and waits until every write admitted before has ended.
    pub(crate) async fn exclusive(&self, extent: Extent) -> ExclusiveRange {
        self.ranges.exclusive(extent).await
    }

    /// Returns the epoch for a change that arrives now; see [`check`](Self::check).
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Refuses, from now on, changes that arrived before and still wait.
    pub(crate) fn supersede(&self) {
        self.epoch.set(self.epoch.get() + 1);
    }

    /// Fails with `Busy` if changes that arrived in `epoch` have been superseded.
    pub(crate) fn check(&self, epoch: u64) -> Result<()> {
        debug_assert!(epoch <= self.epoch.get(), "an epoch that has not begun");
        if epoch == self.epoch.get() { Ok(()) } else { Err(outdated()) }
    }
}

/// Completes a write whose caller no longer waits for it, so that its range stays locked until the backend is done.
pub(crate) fn detach(image: impl Sized + 'static, write: LocalFuture<Result<u64>>, range: SharedRange) {
    drop(CompleteOnDrop::new(write, (range, image)));
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use forebay_reactor::sync::oneshot;
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn a_detached_write_keeps_its_range_locked() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let admission = Rc::new(Admission::new());
            let range = admission.try_shared(Extent::new(0, 1)).expect("nothing is locked");
            let (done, waiting) = oneshot::channel::<()>();
            detach(
                (),
                Box::pin(async move {
                    waiting.await;
                    Ok(1)
                }),
                range,
            );
            let locked = Rc::new(Cell::new(false));
            let (locker, told) = (admission.clone(), locked.clone());
            let locking = spawn(async move {
                let _range = locker.exclusive(Extent::new(0, 10)).await;
                told.set(true);
            });
            for _ in 0..10 {
                yield_now().await;
                assert!(!locked.get(), "the write is in flight");
            }
            done.send(());
            locking.await;
        });
    }

    #[test]
    fn superseded_changes_are_refused() {
        let admission = Admission::new();
        let before = admission.epoch();
        assert!(admission.check(before).is_ok());
        admission.supersede();
        assert!(admission.check(before).is_err() && admission.check(admission.epoch()).is_ok());
    }
}
