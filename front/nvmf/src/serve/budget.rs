//! Bytes that many connections share.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

/// A connection that may have to wait for bytes.
#[derive(Default)]
pub(super) struct Waiter {
    task: RefCell<Option<Waker>>,
    /// It is in a queue.
    queued: Cell<bool>,
    /// It was called, and has not taken anything since.
    called: Cell<bool>,
}

impl Waiter {
    /// Who is called.
    pub(super) fn set_task(&self, waker: &Waker) {
        self.task.replace(Some(waker.clone()));
    }
}

/// A number of bytes that may be in use.
///
/// Who finds no room waits in a queue.  Bytes that are given back call the first of it, who calls the next if there is
/// room left, so that what many wait for costs a call each and not a call for each and everybody.
pub(super) struct Budget {
    used: Cell<usize>,
    max: usize,
    /// Connections that would go on if there were more.
    waiting: RefCell<VecDeque<Rc<Waiter>>>,
    /// What has to have room as well.
    above: Option<Rc<Budget>>,
}

impl Budget {
    pub(super) fn new(max: usize, above: Option<Rc<Budget>>) -> Rc<Self> {
        Rc::new(Self { used: Cell::new(0), max, waiting: RefCell::default(), above })
    }

    fn has_room(&self, bytes: usize) -> bool {
        // One command always goes, however long.
        self.used.get() == 0 || self.used.get() + bytes <= self.max
    }

    /// There is room for one who has nothing yet, of which as much again is spared.
    fn is_spared(&self, bytes: usize) -> bool {
        self.used.get() + bytes <= self.max.saturating_mul(2)
    }

    /// Takes bytes if there is room; otherwise `waiter` is called when there may be.
    pub(super) fn take(&self, bytes: usize, waiter: &Rc<Waiter>) -> bool {
        let full = match &self.above {
            _ if !self.has_room(bytes) => Some(self),
            // Others may have taken everything and never give it back: nobody is kept out altogether.
            Some(above) if !(above.has_room(bytes) || self.used.get() == 0 && above.is_spared(bytes)) => Some(&**above),
            _ => None,
        };
        if let Some(full) = full {
            let called = waiter.called.replace(false);
            if !waiter.queued.replace(true) {
                let mut waiting = full.waiting.borrow_mut();
                // Who was called and needs more than there is keeps its place.
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

    /// Takes bytes that are in memory already.
    pub(super) fn take_anyway(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
        if let Some(above) = &self.above {
            above.used.set(above.used.get() + bytes);
        }
    }

    /// More was taken than there is: bytes that were in memory already.
    pub(super) fn is_over(&self) -> bool {
        self.used.get() > self.max || self.above.as_ref().is_some_and(|above| above.is_over())
    }

    /// Gives bytes back.
    pub(super) fn give(&self, bytes: usize) {
        self.used.set(self.used.get() - bytes);
        self.call_first();
        if let Some(above) = &self.above {
            above.give(bytes);
        }
    }

    /// One that was called, or would be, needs nothing any more: the next has its turn.
    pub(super) fn pass(&self, waiter: &Rc<Waiter>) {
        let queued = waiter.queued.replace(false);
        if queued {
            let of = |budget: &Budget| budget.waiting.borrow_mut().retain(|each| !Rc::ptr_eq(each, waiter));
            of(self);
            self.above.iter().for_each(|above| of(above));
        }
        // It may have been first, and those behind it need less.
        if waiter.called.replace(false) || queued {
            self.call_next();
        }
    }

    /// Calls whoever waits next, here and above, if there is room.
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

    /// Bytes in use.
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

        /// What its connection does when it is woken.
        fn look(&mut self, budget: &Budget) -> bool {
            let calls = self.calls.0.load(Ordering::Relaxed);
            let called = calls != std::mem::replace(&mut self.seen, calls);
            if called {
                self.try_take(budget);
            }
            called
        }

        fn try_take(&mut self, budget: &Budget) {
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
        let budget = Budget::new(100, None);
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
        /// Whatever is taken, given and given up in whatever order: once all is given back, nobody waits any more.
        #[test]
        fn nobody_is_forgotten(steps in prop::collection::vec((0_usize..6, 0_u8..4, 1_usize..90), 1..80)) {
            let core = Budget::new(120, None);
            let hosts = [Budget::new(100, Some(core.clone())), Budget::new(100, Some(core.clone()))];
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
