//! Uses of places of columns: reads and writes in flight, which a place must outlive.

use std::cell::Cell;

use forebay_reactor::sync::Notify;

/// Reads and writes in flight at places of columns. After columns have been moved, their old places are given to others once
/// those that may know them have ended.
///
/// # Invariants
/// 1. While [`drain`](Self::drain) does not run, only the uses of the `current` generation are in flight.
#[derive(Default)]
pub struct PlaceUses {
    /// Generation of the uses that begin now: 0 or 1.
    current: Cell<usize>,
    /// Uses in flight, by generation.
    counts: [Cell<u64>; 2],
    /// Signals that the last use of a generation has ended.
    ended: Notify,
}

/// Use of a place in flight.
pub struct PlaceUse<'a> {
    uses: &'a PlaceUses,
    generation: usize,
}

impl Drop for PlaceUse<'_> {
    fn drop(&mut self) {
        let count = &self.uses.counts[self.generation];
        count.set(count.get() - 1);
        if count.get() == 0 && self.generation != self.uses.current.get() {
            self.uses.ended.notify_all();
        }
    }
}

impl PlaceUses {
    /// Begins a use of a place that is looked up after this call.
    pub fn begin(&self) -> PlaceUse<'_> {
        let generation = self.current.get();
        self.counts[generation].set(self.counts[generation].get() + 1);
        PlaceUse { uses: self, generation }
    }

    /// Waits until all uses have ended that began before this call. One call at a time.
    pub async fn drain(&self) {
        let before = self.current.get();
        debug_assert_eq!(self.counts[1 - before].get(), 0, "one call at a time");
        self.current.set(1 - before);
        self.ended.wait_until(|| self.counts[before].get() == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn draining_waits_for_earlier_uses_only() {
        let uses = PlaceUses::default();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..3 {
            let (first, second) = (uses.begin(), uses.begin());
            let mut drain = pin!(uses.drain());
            assert_eq!(drain.as_mut().poll(&mut cx), Poll::Pending);
            let later = uses.begin();
            drop(first);
            assert_eq!(drain.as_mut().poll(&mut cx), Poll::Pending);
            drop(second);
            assert_eq!(drain.as_mut().poll(&mut cx), Poll::Ready(()));
            drop(later);
        }
        assert_eq!(pin!(uses.drain()).poll(&mut cx), Poll::Ready(()), "nothing is in flight");
    }
}
