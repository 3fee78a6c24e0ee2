//! Receive and send budgets: bounds on the number of messages and their bytes, per peer and in total.
//!
//! A message takes its share before memory is allocated for its body, and releases it when it is dropped.  A peer
//! without a share is not read from, so that the peer's own queue fills and its senders wait.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;

/// Number of messages and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageBudget {
    /// Number of messages.
    pub messages: usize,
    /// Number of bytes in their segments.
    pub bytes: usize,
}

impl MessageBudget {
    #[inline]
    fn has_room(self, used: Self, bytes: usize) -> bool {
        // A single message always fits, whatever its length; otherwise it could never be received.
        used.messages == 0 || (used.messages < self.messages && used.bytes.saturating_add(bytes) <= self.bytes)
    }
}

/// Budget, its current usage, and the tasks waiting for it.
#[derive(Debug)]
pub(crate) struct MessageThrottle {
    limit: MessageBudget,
    used: Cell<MessageBudget>,
    waiting: RefCell<Vec<Waker>>,
    /// Parent throttle of all peers; `None` if there is none.
    whole: Option<Rc<MessageThrottle>>,
}

impl MessageThrottle {
    pub(crate) fn new(limit: MessageBudget, whole: Option<Rc<MessageThrottle>>) -> Rc<Self> {
        let used = Cell::new(MessageBudget { messages: 0, bytes: 0 });
        Rc::new(Self { limit, used, waiting: RefCell::default(), whole })
    }

    pub(crate) fn used(&self) -> MessageBudget {
        self.used.get()
    }

    #[inline]
    fn has_room(&self, bytes: usize) -> bool {
        self.limit.has_room(self.used.get(), bytes)
    }

    /// Takes a message's share, here and of the parent, if both have it available.
    #[inline]
    pub(crate) fn take(self: &Rc<Self>, bytes: usize) -> Option<BudgetShare> {
        if !self.would_take(bytes) {
            return None;
        }
        self.add(bytes);
        if let Some(whole) = &self.whole {
            whole.add(bytes);
        }
        Some(BudgetShare { throttle: self.clone(), bytes })
    }

    /// Returns true if a message of `bytes` bytes would be admitted now.
    #[inline]
    pub(crate) fn would_take(&self, bytes: usize) -> bool {
        self.has_room(bytes) && self.whole.as_ref().is_none_or(|whole| whole.has_room(bytes))
    }

    /// Registers `waker` to be woken when budget is released.
    pub(crate) fn wait(&self, waker: &Waker) {
        // Registers with both throttles, whichever is short; a spurious wake-up is cheap.
        for throttle in [Some(self), self.whole.as_deref()].into_iter().flatten() {
            let mut waiting = throttle.waiting.borrow_mut();
            if !waiting.iter().any(|other| other.will_wake(waker)) {
                waiting.push(waker.clone());
            }
        }
    }

    #[inline]
    fn add(&self, bytes: usize) {
        let used = self.used.get();
        self.used.set(MessageBudget { messages: used.messages + 1, bytes: used.bytes + bytes });
    }

    #[inline]
    fn give_back(&self, bytes: usize) {
        let used = self.used.get();
        self.used.set(MessageBudget { messages: used.messages - 1, bytes: used.bytes - bytes });
        if !self.waiting.borrow().is_empty() {
            let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

/// Share of a budget that one message has; released when it is dropped.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    throttle: Rc<MessageThrottle>,
    bytes: usize,
}

impl Drop for BudgetShare {
    #[inline]
    fn drop(&mut self) {
        self.throttle.give_back(self.bytes);
        if let Some(whole) = &self.throttle.whole {
            whole.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn budget(messages: usize, bytes: usize) -> MessageBudget {
        MessageBudget { messages, bytes }
    }

    #[test]
    fn shares_are_bounded_for_each_and_in_all() {
        let whole = MessageThrottle::new(budget(3, 100), None);
        let [one, other] = [(); 2].map(|()| MessageThrottle::new(budget(2, 80), Some(whole.clone())));
        let first = one.take(50).expect("room");
        assert!(one.take(40).is_none(), "its own bytes");
        let second = other.take(50).expect("room");
        assert!(other.take(1).is_none(), "the bytes of all");
        assert_eq!(whole.used(), budget(2, 100));
        drop(first);
        let third = one.take(0).expect("room");
        assert!(one.take(50).is_some());
        drop((second, third));
        assert_eq!((whole.used(), one.used(), other.used()), (budget(0, 0), budget(0, 0), budget(0, 0)));
    }

    #[test]
    fn one_message_always_fits() {
        let throttle = MessageThrottle::new(budget(1, 10), None);
        let held = throttle.take(1000).expect("nothing else is there");
        assert!(throttle.take(0).is_none());
        drop(held);
        assert!(throttle.take(10).is_some());
    }

    #[test]
    fn who_waits_is_woken_once() {
        let whole = MessageThrottle::new(budget(1, 10), None);
        let one = MessageThrottle::new(budget(5, 50), Some(whole));
        let held = one.take(10).expect("room");
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        one.wait(&waker);
        one.wait(&waker);
        drop(held);
        // Woken once for each of the two throttles that it waited for.
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
        drop(one.take(5));
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
