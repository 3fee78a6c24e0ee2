//! Range locks for in-flight writes of an image.
//!
//! Writes are admitted at once: overlapping ones are not ordered. A compare-and-write over several objects, or a
//! shrink, locks a range exclusively. The lock blocks later writes to the range, and waits for all writes admitted
//! before it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forebay_block::{Extent, LocalFuture, Result};
use forebay_reactor::sync::Notify;

/// Detached writes kept before completed ones are reaped.
const LEFT_MAX: usize = 64;

/// Writes admitted between two range locks.
struct Generation {
    in_flight: Cell<usize>,
    changed: Rc<Notify>,
}

impl Generation {
    fn new(changed: &Rc<Notify>) -> Rc<Self> {
        Rc::new(Self { in_flight: Cell::new(0), changed: changed.clone() })
    }
}

struct Inner {
    current: RefCell<Rc<Generation>>,
    /// Earlier generations that may still have writes in flight.
    earlier: RefCell<Vec<Rc<Generation>>>,
    taken: RefCell<Vec<Extent>>,
    /// Signaled when a generation has drained or a range is unlocked.
    changed: Rc<Notify>,
    /// Detached writes: their futures were dropped by the caller, and they are driven to completion here.
    left: RefCell<Vec<(LocalFuture<Result<u64>>, Pass)>>,
}

/// Range lock table of one image.
#[derive(Clone)]
pub(crate) struct Gate(Rc<Inner>);

/// Guard of an admitted write; the write has ended when it is dropped.
pub(crate) struct Pass {
    generation: Rc<Generation>,
}

/// Guard of an exclusively locked range; unlocks it when dropped.
pub(crate) struct Hold {
    gate: Gate,
    extent: Extent,
}

impl Gate {
    pub(crate) fn new() -> Self {
        let changed = Rc::new(Notify::new());
        Self(Rc::new(Inner {
            current: RefCell::new(Generation::new(&changed)),
            earlier: RefCell::default(),
            taken: RefCell::default(),
            changed,
            left: RefCell::default(),
        }))
    }

    fn is_taken(&self, extent: Extent) -> bool {
        self.0.taken.borrow().iter().any(|taken| taken.overlaps(extent))
    }

    /// Admits a write, unless a part of its range is locked.
    pub(crate) fn try_pass(&self, extent: Extent) -> Option<Pass> {
        if self.is_taken(extent) {
            return None;
        }
        let generation = self.0.current.borrow().clone();
        generation.in_flight.set(generation.in_flight.get() + 1);
        Some(Pass { generation })
    }

    /// Waits until a write can be admitted.
    pub(crate) async fn pass(&self, extent: Extent) -> Pass {
        loop {
            let changed = self.0.changed.wait();
            if let Some(pass) = self.try_pass(extent) {
                return pass;
            }
            changed.await;
        }
    }

    /// Locks a range exclusively, and waits until every write admitted before has ended.
    pub(crate) async fn hold(&self, extent: Extent) -> Hold {
        self.0.changed.wait_until(|| !self.is_taken(extent)).await;
        self.0.taken.borrow_mut().push(extent);
        let hold = Hold { gate: self.clone(), extent };
        let before = self.begin_generation();
        loop {
            let mut changed = pin!(self.0.changed.wait());
            let ended = poll_fn(|cx| {
                self.drive_left(cx);
                if before.iter().all(|generation| generation.in_flight.get() == 0) {
                    return Poll::Ready(true);
                }
                changed.as_mut().poll(cx).map(|()| false)
            });
            if ended.await {
                return hold;
            }
        }
    }

    /// Begins a new generation of writes; returns the earlier ones that still have writes in flight.
    fn begin_generation(&self) -> Vec<Rc<Generation>> {
        let mut earlier = self.0.earlier.borrow_mut();
        earlier.push(self.0.current.replace(Generation::new(&self.0.changed)));
        earlier.retain(|generation| generation.in_flight.get() > 0);
        earlier.clone()
    }

    /// Takes over a write whose caller no longer waits for it, so that it counts as in flight until it has ended.
    pub(crate) fn leave(&self, write: LocalFuture<Result<u64>>, pass: Pass) {
        self.0.left.borrow_mut().push((write, pass));
        if self.0.left.borrow().len() > LEFT_MAX {
            self.drive_left(&mut Context::from_waker(Waker::noop()));
        }
        // A task that waits for earlier writes must now be the one that this write wakes.
        self.0.changed.notify_all();
    }

    fn drive_left(&self, cx: &mut Context<'_>) {
        if self.0.left.borrow().is_empty() {
            return;
        }
        let mut left = self.0.left.take();
        left.retain_mut(|(write, _)| write.as_mut().poll(cx).is_pending());
        self.0.left.borrow_mut().append(&mut left);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let left = self.generation.in_flight.get() - 1;
        self.generation.in_flight.set(left);
        if left == 0 {
            self.generation.changed.notify_all();
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut taken = self.gate.0.taken.borrow_mut();
        if let Some(at) = taken.iter().position(|taken| *taken == self.extent) {
            taken.swap_remove(at);
        }
        drop(taken);
        self.gate.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;

    use forebay_reactor::sync::oneshot;

    use super::*;

    fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_hold_waits_for_writes_before_it_and_keeps_later_ones_out() {
        let gate = Gate::new();
        let before = gate.try_pass(Extent::new(0, 10)).expect("nothing is held");
        let far = gate.try_pass(Extent::new(1000, 10)).expect("nothing is held");
        let mut hold = Box::pin(gate.hold(Extent::new(5, 10)));
        assert!(poll(&mut hold).is_none());
        assert!(gate.try_pass(Extent::new(14, 1)).is_none(), "held already");
        let beside = gate.try_pass(Extent::new(15, 1)).expect("beside what is held");
        let mut later = Box::pin(gate.pass(Extent::new(0, 6)));
        assert!(poll(&mut later).is_none());
        drop(before);
        assert!(poll(&mut hold).is_none(), "one more passed before");
        drop(far);
        let held = poll(&mut hold).expect("all have ended");
        assert!(poll(&mut later).is_none());
        drop(held);
        assert!(poll(&mut later).is_some());
        drop(beside);
    }

    #[test]
    fn holds_wait_for_one_another_and_for_all_earlier_writes() {
        let gate = Gate::new();
        let write = gate.try_pass(Extent::new(100, 1)).expect("nothing is held");
        let mut first = Box::pin(gate.hold(Extent::new(0, 10)));
        let mut apart = Box::pin(gate.hold(Extent::new(50, 10)));
        let mut second = Box::pin(gate.hold(Extent::new(9, 10)));
        assert!(poll(&mut first).is_none() && poll(&mut apart).is_none() && poll(&mut second).is_none());
        drop(write);
        let first = poll(&mut first).expect("its turn");
        assert!(poll(&mut apart).is_some() && poll(&mut second).is_none());
        drop(first);
        assert!(poll(&mut second).is_some());
    }

    #[test]
    fn a_hold_given_up_lets_others_go_on() {
        let gate = Gate::new();
        let write = gate.try_pass(Extent::new(0, 1)).expect("nothing is held");
        let mut hold = Box::pin(gate.hold(Extent::new(0, 10)));
        assert!(poll(&mut hold).is_none());
        drop(hold);
        assert!(gate.try_pass(Extent::new(0, 10)).is_some());
        drop(write);
    }

    #[test]
    fn a_write_nobody_waits_for_still_counts() {
        let gate = Gate::new();
        let pass = gate.try_pass(Extent::new(0, 1)).expect("nothing is held");
        let (done, waiting) = oneshot::channel::<()>();
        let write: LocalFuture<Result<u64>> = Box::pin(async move {
            waiting.await;
            Ok(1)
        });
        gate.leave(write, pass);
        let mut hold = Box::pin(gate.hold(Extent::new(0, 10)));
        assert!(poll(&mut hold).is_none());
        done.send(());
        assert!(poll(&mut hold).is_some());
    }

    #[test]
    fn ended_writes_that_were_left_do_not_pile_up() {
        let gate = Gate::new();
        for _ in 0..10 * LEFT_MAX {
            let pass = gate.try_pass(Extent::new(0, 1)).expect("nothing is held");
            gate.leave(Box::pin(std::future::ready(Ok(1))), pass);
        }
        assert!(gate.0.left.borrow().len() <= LEFT_MAX);
    }
}
