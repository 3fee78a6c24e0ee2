//! One value from one task to another.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

struct Shared<T> {
    value: Option<T>,
    waker: Option<Waker>,
    closed: bool,
}

/// The sending half.
pub struct Sender<T>(Rc<RefCell<Shared<T>>>);

/// The receiving half; resolves to `None` when the sender is dropped without sending.
pub struct Receiver<T>(Rc<RefCell<Shared<T>>>);

/// A pair.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Rc::new(RefCell::new(Shared { value: None, waker: None, closed: false }));
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Hands over the value.
    pub fn send(self, value: T) {
        self.0.borrow_mut().value = Some(value);
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut shared = self.0.borrow_mut();
            shared.closed = true;
            shared.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut shared = self.0.borrow_mut();
        if let Some(value) = shared.value.take() {
            return Poll::Ready(Some(value));
        }
        if shared.closed {
            return Poll::Ready(None);
        }
        let before = shared.waker.replace(cx.waker().clone());
        // A waker may do anything when it is dropped, so not under the borrow.
        drop(shared);
        drop(before);
        Poll::Pending
    }
}
