use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Counting semaphore; waiters are served in order.
#[derive(Clone)]
pub struct Semaphore {
    shared: Rc<Shared>,
}

struct Shared {
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiter>>>,
}

struct Waiter {
    want: usize,
    granted: Cell<bool>,
    gone: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// Permits taken from a semaphore; released when dropped.
pub struct Permit {
    shared: Rc<Shared>,
    held: usize,
}

impl Semaphore {
    /// Creates a semaphore with `permits` free permits.
    pub fn new(permits: usize) -> Self {
        Self { shared: Rc::new(Shared { free: Cell::new(permits), waiting: RefCell::default() }) }
    }

    /// Returns the number of free permits.
    pub fn available(&self) -> usize {
        self.shared.free.get()
    }

    /// Returns whether a task waits for permits.
    pub(super) fn is_waited_for(&self) -> bool {
        !self.shared.waiting.borrow().is_empty()
    }

    /// Takes `want` permits if they are free and no task waits.
    pub fn try_acquire(&self, want: usize) -> Option<Permit> {
        let free = self.shared.free.get();
        if free < want || !self.shared.waiting.borrow().is_empty() {
            return None;
        }
        self.shared.free.set(free - want);
        Some(Permit { shared: self.shared.clone(), held: want })
    }

    /// Waits for `want` permits, in order.  Never completes when the semaphore has fewer in total.
    pub async fn acquire(&self, want: usize) -> Permit {
        if let Some(permit) = self.try_acquire(want) {
            return permit;
        }
        let waiter =
            Rc::new(Waiter { want, granted: Cell::new(false), gone: Cell::new(false), waker: RefCell::default() });
        self.shared.waiting.borrow_mut().push_back(waiter.clone());
        let mut place = Place { shared: self.shared.clone(), waiter: waiter.clone(), taken: false };
        std::future::poll_fn(|cx| {
            if waiter.granted.get() {
                return Poll::Ready(());
            }
            let before = waiter.waker.borrow_mut().replace(cx.waker().clone());
            drop(before);
            Poll::Pending
        })
        .await;
        place.taken = true;
        Permit { shared: self.shared.clone(), held: want }
    }
}

/// Queue entry; removed when the waiting future is dropped.
struct Place {
    shared: Rc<Shared>,
    waiter: Rc<Waiter>,
    taken: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        self.waiter.gone.set(true);
        if self.waiter.granted.get() {
            self.shared.free.set(self.shared.free.get() + self.waiter.want);
        }
        self.shared.grant();
    }
}

impl Shared {
    fn grant(&self) {
        loop {
            let next = {
                let mut waiting = self.waiting.borrow_mut();
                match waiting.front() {
                    Some(waiter) if waiter.gone.get() => {
                        waiting.pop_front();
                        continue;
                    }
                    Some(waiter) if waiter.want <= self.free.get() => waiting.pop_front().expect("front"),
                    _ => return,
                }
            };
            self.free.set(self.free.get() - next.want);
            next.granted.set(true);
            let waker = next.waker.borrow_mut().take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

impl Permit {
    /// Releases some of the permits early.
    pub fn release(&mut self, count: usize) {
        assert!(count <= self.held, "releasing {count} of {} permits", self.held);
        self.held -= count;
        self.shared.free.set(self.shared.free.get() + count);
        self.shared.grant();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.free.set(self.shared.free.get() + self.held);
        self.shared.grant();
    }
}
