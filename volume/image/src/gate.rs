//! Who may change which bytes of an image at this moment.
//!
//! Writes pass at once: what overlaps has no order.  Rarely something needs a range for itself, a compare-and-write
//! over several objects or the cutting off of the image's end.  It takes the range, which holds back writes that come
//! later, and waits until all writes that had passed before have ended.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forebay_block::{Extent, LocalFuture, Result};
use forebay_reactor::sync::Notify;

/// Left writes that are kept before those that have ended are looked for.
const LEFT_MAX: usize = 64;

/// Writes that passed between two takings of a range.
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
    /// Earlier ones that may not have ended.
    earlier: RefCell<Vec<Rc<Generation>>>,
    taken: RefCell<Vec<Extent>>,
    /// A generation has ended, or a range was given back.
    changed: Rc<Notify>,
    /// Writes for whose answer nobody waits any more; they go on all the same.
    left: RefCell<Vec<(LocalFuture<Result<u64>>, Pass)>>,
}

/// The gate of one image.
#[derive(Clone)]
pub(crate) struct Gate(Rc<Inner>);

/// A write that has passed; it has ended when this is dropped.
pub(crate) struct Pass {
    generation: Rc<Generation>,
}

/// A range held alone; given back when dropped.
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

    /// Lets a write pass, unless somebody holds a part of its range.
    pub(crate) fn try_pass(&self, extent: Extent) -> Option<Pass> {
        if self.is_taken(extent) {
            return None;
        }
        let generation = self.0.current.borrow().clone();
        generation.in_flight.set(generation.in_flight.get() + 1);
        Some(Pass { generation })
    }

    /// Waits until a write may pass.
    pub(crate) async fn pass(&self, extent: Extent) -> Pass {
        loop {
            let changed = self.0.changed.wait();
            if let Some(pass) = self.try_pass(extent) {
                return pass;
            }
            changed.await;
        }
    }

    /// Takes a range alone, and waits until every write that passed before has ended.
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

    /// Lets writes from now on count apart; those before that have not ended.
    fn begin_generation(&self) -> Vec<Rc<Generation>> {
        let mut earlier = self.0.earlier.borrow_mut();
        earlier.push(self.0.current.replace(Generation::new(&self.0.changed)));
        earlier.retain(|generation| generation.in_flight.get() > 0);
        earlier.clone()
    }

    /// Takes over a write for whose answer nobody waits any more, so that it counts until it has ended.
    pub(crate) fn leave(&self, write: LocalFuture<Result<u64>>, pass: Pass) {
        self.0.left.borrow_mut().push((write, pass));
        if self.0.left.borrow().len() > LEFT_MAX {
            self.drive_left(&mut Context::from_waker(Waker::noop()));
        }
        // Who waits for the writes before its own must now be the one that this write wakes.
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
