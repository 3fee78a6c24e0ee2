//! Queue between tasks of one reactor.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

struct Shared<T> {
    items: VecDeque<T>,
    waker: Option<Waker>,
    senders: usize,
    receiver_gone: bool,
}

/// Sending half of [`unbounded`]; the queue ends when the last one is dropped.
pub struct Sender<T>(Rc<RefCell<Shared<T>>>);

/// Receiving half of [`unbounded`].
pub struct Receiver<T>(Rc<RefCell<Shared<T>>>);

/// Creates an unbounded queue; for a bound, take a [`Semaphore`](super::Semaphore) permit per item.
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Shared { items: VecDeque::new(), waker: None, senders: 1, receiver_gone: false };
    let shared = Rc::new(RefCell::new(shared));
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Appends an item; returns false (and drops the item) when the receiver is gone.
    pub fn send(&self, item: T) -> bool {
        let waker = {
            let mut shared = self.0.borrow_mut();
            if shared.receiver_gone {
                return false;
            }
            shared.items.push_back(item);
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.borrow_mut().senders += 1;
        Self(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut shared = self.0.borrow_mut();
            shared.senders -= 1;
            if shared.senders == 0 { shared.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// Waits for the next item; `None` when all senders are gone and the queue is empty.
    pub async fn recv(&mut self) -> Option<T> {
        std::future::poll_fn(|cx| {
            let mut shared = self.0.borrow_mut();
            if let Some(item) = shared.items.pop_front() {
                return Poll::Ready(Some(item));
            }
            if shared.senders == 0 {
                return Poll::Ready(None);
            }
            let before = shared.waker.replace(cx.waker().clone());
            // Dropping a waker may run any code, so not under the borrow.
            drop(shared);
            drop(before);
            Poll::Pending
        })
        .await
    }

    /// Returns the next item if there is one now.
    pub fn try_recv(&mut self) -> Option<T> {
        self.0.borrow_mut().items.pop_front()
    }

    /// Returns the number of queued items.
    pub fn len(&self) -> usize {
        self.0.borrow().items.len()
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let items = {
            let mut shared = self.0.borrow_mut();
            shared.receiver_gone = true;
            std::mem::take(&mut shared.items)
        };
        drop(items);
    }
}
