use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Wakes everybody who waits; a wake-up that nobody waits for is lost, so waiters look at their condition first.
#[derive(Default)]
pub struct Notify {
    wakers: RefCell<Vec<Waker>>,
    generation: Cell<u64>,
}

impl Notify {
    /// Nobody waits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes everybody who waits now.
    pub fn notify_all(&self) {
        self.generation.set(self.generation.get() + 1);
        let wakers = std::mem::take(&mut *self.wakers.borrow_mut());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next [`notify_all`](Self::notify_all) after this call (not after its first poll).
    pub fn wait(&self) -> impl Future<Output = ()> + '_ {
        let seen = self.generation.get();
        poll_fn(move |cx| {
            if self.generation.get() != seen {
                return Poll::Ready(());
            }
            let mut wakers = self.wakers.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
                wakers.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }

    /// Waits until `condition` holds, looking again at each notification.
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
