//! Hold of the hosts' writes to a volume, for a moment that several volumes share.

use std::cell::Cell;
use std::rc::Rc;

use forebay_reactor::sync::Notify;

/// Gate that the hosts' writes to a volume pass. While there is a [`HeldWrites`], none does.
#[derive(Default)]
pub(super) struct WriteGate {
    pub(super) holds: Cell<usize>,
    released: Notify,
}

/// Guard that holds the writes of a volume.
pub(super) struct HeldWrites(Rc<WriteGate>);

impl WriteGate {
    /// Returns whether writes wait.
    pub(super) fn is_held(&self) -> bool {
        self.holds.get() > 0
    }

    /// Waits until writes are not held.
    pub(super) async fn pass(&self) {
        self.released.wait_until(|| !self.is_held()).await;
    }

    /// Holds the writes that come from now on. Those that have passed are not waited for.
    pub(super) fn hold(self: &Rc<Self>) -> HeldWrites {
        self.holds.set(self.holds.get() + 1);
        HeldWrites(self.clone())
    }
}

impl Drop for HeldWrites {
    fn drop(&mut self) {
        self.0.holds.set(self.0.holds.get() - 1);
        if !self.0.is_held() {
            self.0.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn writes_wait_for_the_end_of_every_hold() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let gate = Rc::new(WriteGate::default());
            gate.pass().await;
            let (one, two) = (gate.hold(), gate.hold());
            let (has_passed, waiting) = (Rc::new(Cell::new(false)), gate.clone());
            let own = has_passed.clone();
            let later = spawn(async move {
                waiting.pass().await;
                own.set(true);
            });
            drop(one);
            for _ in 0..5 {
                yield_now().await;
            }
            assert!(gate.is_held() && !has_passed.get(), "one hold is left");
            drop(two);
            later.await;
            assert!(!gate.is_held());
        });
    }
}
