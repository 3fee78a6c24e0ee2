use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use slab::Slab;

/// Condition variable for tasks: wakes all waiters.  A notification without waiters is lost, so waiters check their
/// condition first.
#[derive(Default)]
pub struct Notify {
    /// Wakers of the tasks that wait for the end of this generation.
    wakers: RefCell<Slab<Waker>>,
    generation: Cell<u64>,
}

/// Future of [`Notify::wait`].
struct Wait<'a> {
    notify: &'a Notify,
    seen: u64,
    place: Option<usize>,
}

impl Notify {
    /// Creates a notification without waiters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes all current waiters.
    pub fn notify_all(&self) {
        self.generation.set(self.generation.get() + 1);
        if self.wakers.borrow().is_empty() {
            return;
        }
        let wakers = std::mem::take(&mut *self.wakers.borrow_mut());
        wakers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Waits for the next [`notify_all`](Self::notify_all) after this call (not after its first poll).
    pub fn wait(&self) -> impl Future<Output = ()> + '_ {
        Wait { notify: self, seen: self.generation.get(), place: None }
    }

    /// Waits until `condition` holds, checking it again at each notification.
    pub async fn wait_until(&self, mut condition: impl FnMut() -> bool) {
        loop {
            let next = self.wait();
            if condition() {
                return;
            }
            next.await;
        }
    }
}

impl Future for Wait<'_> {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.notify.generation.get() != self.seen {
            return Poll::Ready(());
        }
        let mut wakers = self.notify.wakers.borrow_mut();
        let before = match self.place {
            Some(place) if wakers[place].will_wake(cx.waker()) => None,
            Some(place) => Some(std::mem::replace(&mut wakers[place], cx.waker().clone())),
            None => {
                let place = wakers.insert(cx.waker().clone());
                drop(wakers);
                self.place = Some(place);
                return Poll::Pending;
            }
        };
        // Dropping a waker may run any code, so not under the borrow.
        drop(wakers);
        drop(before);
        Poll::Pending
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        // Entries of an earlier generation are removed already.
        if let Some(place) = self.place
            && self.notify.generation.get() == self.seen
        {
            let waker = self.notify.wakers.borrow_mut().remove(place);
            drop(waker);
        }
    }
}
