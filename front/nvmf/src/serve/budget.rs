//! Byte budget shared by many connections.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

/// Connection that may wait for bytes of a budget.
#[derive(Default)]
pub(super) struct Waiter {
    task: RefCell<Option<Waker>>,
    /// Set while the connection is in a wait queue.
    queued: Cell<bool>,
    /// Set from its wake-up until its next attempt to take bytes.
    called: Cell<bool>,
}

impl Waiter {
    /// Sets the task to wake when bytes may be available.
    pub(super) fn set_task(&self, waker: &Waker) {
        self.task.replace(Some(waker.clone()));
    }
}

/// Byte budget: a limit on bytes in use.
///
/// A connection that finds no space waits in a FIFO queue.  Released bytes wake only the first waiter, which
/// wakes the next if there is space left.  Each waiter therefore costs one wake-up, not one for every release.
pub(super) struct ByteBudget {
    used: Cell<usize>,
    max: usize,
    /// Connections waiting for bytes, in FIFO order; a woken one that still finds too few goes first again.
    waiting: RefCell<VecDeque<Rc<Waiter>>>,
    /// Parent budget, from which the same bytes are taken as well.
    above: Option<Rc<ByteBudget>>,
}

impl ByteBudget {
    pub(super) fn new(max: usize, above: Option<Rc<ByteBudget>>) -> Rc<Self> {
        Rc::new(Self { used: Cell::new(0), max, waiting: RefCell::default(), above })
    }

    fn has_room(&self, bytes: usize) -> bool {
        // A budget with nothing in use admits one command of any length.
        self.used.get() == 0 || self.used.get() + bytes <= self.max
    }

    /// Returns whether `bytes` fit below twice the limit.  The second half is kept for hosts that use nothing yet.
    fn is_spared(&self, bytes: usize) -> bool {
        self.used.get() + bytes <= self.max.saturating_mul(2)
    }

    /// Takes bytes and returns true if there is space.  Otherwise queues `waiter`, which is woken when there may be
    /// space.
    pub(super) fn take(&self, bytes: usize, waiter: &Rc<Waiter>) -> bool {
        let full = match &self.above {
            _ if !self.has_room(bytes) => Some(self),
            // Other hosts may hold the whole parent budget indefinitely.  A host that uses nothing is still admitted.
            Some(above) if !(above.has_room(bytes) || self.used.get() == 0 && above.is_spared(bytes)) => Some(&**above),
            _ => None,
        };
        if let Some(full) = full {
            let called = waiter.called.replace(false);
            if !waiter.queued.replace(true) {
                let mut waiting = full.waiting.borrow_mut();
                // A woken waiter that needs more than is available keeps its place at the front.
                if called { waiting.push_front(waiter.clone()) } else { waiting.push_back(waiter.clone()) }
            }
            return false;
        }
        self.take_anyway(bytes);
        if waiter.called.replace(false) {
            self.call_next();
        }
        true
    }

    /// Takes bytes without a limit check, for data that is in memory already.
    pub(super) fn take_anyway(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
        if let Some(above) = &self.above {
            above.used.set(above.used.get() + bytes);
        }
    }

    /// Returns whether this budget or its parent is exceeded, by bytes that were in memory already.
    pub(super) fn is_over(&self) -> bool {
        self.used.get() > self.max || self.above.as_ref().is_some_and(|above| above.is_over())
    }

    /// Releases bytes, and wakes the first waiter.
    pub(super) fn give(&self, bytes: usize) {
        self.used.set(self.used.get() - bytes);
        self.call_first();
        if let Some(above) = &self.above {
            above.give(bytes);
        }
    }

    /// Removes a waiter that needs no bytes any more, and wakes the next one.
    pub(super) fn pass(&self, waiter: &Rc<Waiter>) {
        let queued = waiter.queued.replace(false);
        if queued {
            let of = |budget: &ByteBudget| budget.waiting.borrow_mut().retain(|each| !Rc::ptr_eq(each, waiter));
            of(self);
            self.above.iter().for_each(|above| of(above));
        }
        // The waiter may have been first, and those behind it may need less.
        if waiter.called.replace(false) || queued {
            self.call_next();
        }
    }

    /// Wakes the next waiter, here and in the parent, if there is space.
    fn call_next(&self) {
        if self.used.get() < self.max {
            self.call_first();
        }
        if let Some(above) = &self.above {
            above.call_next();
        }
    }

    fn call_first(&self) {
        let first = self.waiting.borrow_mut().pop_front();
        first.iter().for_each(|first| first.call());
    }

    /// Returns the bytes in use.
    pub(super) fn used(&self) -> usize {
        self.used.get()
    }
}

impl Waiter {
    fn call(&self) {
        self.queued.set(false);
        self.called.set(true);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Calls(AtomicUsize);

    impl Wake for Calls {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Taker {
        waiter: Rc<Waiter>,
        calls: Arc<Calls>,
        seen: usize,
        wants: usize,
        has: usize,
    }

    impl Taker {
        fn new() -> Self {
            let calls = Arc::new(Calls::default());
            let waiter = Rc::new(Waiter::default());
            waiter.set_task(&calls.clone().into());
            Self { waiter, calls, seen: 0, wants: 0, has: 0 }
        }

        /// Simulates the connection's reaction to a wake-up; returns whether there was one.
        fn look(&mut self, budget: &ByteBudget) -> bool {
            let calls = self.calls.0.load(Ordering::Relaxed);
            let called = calls != std::mem::replace(&mut self.seen, calls);
            if called {
                self.try_take(budget);
            }
            called
        }

        fn try_take(&mut self, budget: &ByteBudget) {
            if self.wants > 0 && budget.take(self.wants, &self.waiter) {
                self.has += std::mem::take(&mut self.wants);
            }
            if self.wants == 0 {
                budget.pass(&self.waiter);
            }
        }
    }

    #[test]
    fn a_thousand_that_wait_cost_a_call_each() {
        let budget = ByteBudget::new(100, None);
        let mut takers: Vec<Taker> = (0..1000).map(|_| Taker::new()).collect();
        for taker in &mut takers {
            taker.wants = 100;
            taker.try_take(&budget);
        }
        for index in 0..takers.len() {
            assert_eq!(takers[index].has, 100, "in their order");
            takers[index].has = 0;
            budget.give(100);
            if let Some(next) = takers.get_mut(index + 1) {
                assert!(next.look(&budget));
            }
        }
        let calls: usize = takers.iter().map(|taker| taker.calls.0.load(Ordering::Relaxed)).sum();
        assert_eq!((calls, budget.used()), (999, 0));
    }

    proptest! {
        /// Checks for any sequence of take, give and pass: once everything is released, no waiter is left.
        #[test]
        fn nobody_is_forgotten(steps in prop::collection::vec((0_usize..6, 0_u8..4, 1_usize..90), 1..80)) {
            let core = ByteBudget::new(120, None);
            let hosts = [ByteBudget::new(100, Some(core.clone())), ByteBudget::new(100, Some(core.clone()))];
            let mut takers: Vec<Taker> = (0..6).map(|_| Taker::new()).collect();
            for (who, what, bytes) in steps {
                let budget = &hosts[who % 2];
                let taker = &mut takers[who];
                match what {
                    0 | 1 if taker.wants == 0 => {
                        taker.wants = bytes;
                        taker.try_take(budget);
                    }
                    2 => budget.give(std::mem::take(&mut taker.has)),
                    3 => {
                        taker.wants = 0;
                        budget.pass(&taker.waiter);
                    }
                    _ => {}
                }
                while (0..6).any(|at| takers[at].look(&hosts[at % 2])) {}
            }
            for _ in 0..20 {
                for at in 0..6 {
                    let has = std::mem::take(&mut takers[at].has);
                    if has > 0 {
                        hosts[at % 2].give(has);
                    }
                    while (0..6).any(|at| takers[at].look(&hosts[at % 2])) {}
                }
            }
            prop_assert!(takers.iter().all(|taker| taker.wants == 0), "somebody waits for ever");
            prop_assert_eq!(core.used(), 0);
        }
    }
}
