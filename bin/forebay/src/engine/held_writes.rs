//! Hold of the hosts' writes to a volume, for a moment that several volumes share.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use forebay_block::{InFlightGuard, InFlightTracker};
use forebay_reactor::sync::Notify;

/// Gate that the hosts' writes to a volume pass.
///
/// Invariants:
/// 1. While there is a [`HeldWrites`], no write passes.
/// 2. A write that has passed is counted until it completes.
#[derive(Default)]
pub(super) struct WriteGate {
    holds: Cell<usize>,
    released: Notify,
    passed: InFlightTracker,
}

/// Guard that holds the writes of a volume.
pub(super) struct HeldWrites(Rc<WriteGate>);

impl WriteGate {
    /// Lets a write pass, unless writes are held.
    pub(super) fn try_pass(&self) -> Option<InFlightGuard> {
        (self.holds.get() == 0).then(|| self.passed.begin())
    }

    /// Lets a write pass once writes are not held.
    pub(super) async fn pass(&self) -> InFlightGuard {
        self.released.wait_until(|| self.holds.get() == 0).await;
        self.passed.begin()
    }

    /// Holds the writes from now on; the future waits for the end of those that have passed.
    pub(super) fn hold(self: &Rc<Self>) -> (HeldWrites, impl Future<Output = ()> + 'static) {
        self.holds.set(self.holds.get() + 1);
        let gate = self.clone();
        (HeldWrites(self.clone()), async move { gate.passed.drain().await })
    }
}

impl Drop for HeldWrites {
    fn drop(&mut self) {
        self.0.holds.set(self.0.holds.get() - 1);
        if self.0.holds.get() == 0 {
            self.0.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn writes_wait_for_the_last_hold_and_a_hold_for_the_writes_before() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let gate = Rc::new(WriteGate::default());
            let before = gate.try_pass().expect("nothing is held");
            let (one, drained) = gate.hold();
            let (two, _) = gate.hold();
            assert!(gate.try_pass().is_none());
            let is_drained = Rc::new(Cell::new(false));
            let (own, waiting) = (is_drained.clone(), gate.clone());
            drop(spawn(async move {
                drained.await;
                own.set(true);
            }));
            let later = spawn(async move { drop(waiting.pass().await) });
            for _ in 0..5 {
                yield_now().await;
            }
            assert!(!is_drained.get(), "a write is in flight");
            drop(before);
            while !is_drained.get() {
                yield_now().await;
            }
            drop(one);
            for _ in 0..5 {
                yield_now().await;
            }
            assert!(gate.try_pass().is_none(), "one hold is left");
            drop(two);
            later.await;
            assert!(gate.try_pass().is_some());
        });
    }
}
