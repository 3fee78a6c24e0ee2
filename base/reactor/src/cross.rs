//! Lock-free queue and one-shot channel between cores.
//!
//! A value is pushed onto a lock-free queue and the receiving task is woken.  Waking a task on another core costs a
//! system call only when that core sleeps.

use std::cell::UnsafeCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use crossbeam_queue::SegQueue;

struct Queue<T> {
    items: SegQueue<T>,
    waker: AtomicWaker,
    senders: AtomicUsize,
    receiver_gone: AtomicBool,
}

/// Sending half of [`channel`], for any core; the queue ends when the last one is dropped.
pub struct Sender<T>(Arc<Queue<T>>);

/// Receiving half of [`channel`]; used by one task at a time, on any core.
pub struct Receiver<T>(Arc<Queue<T>>);

/// Creates an unbounded queue between cores.  Items of one sender arrive in the order in which they were sent.
pub fn channel<T: Send>() -> (Sender<T>, Receiver<T>) {
    let queue = Queue {
        items: SegQueue::new(),
        waker: AtomicWaker::new(),
        senders: AtomicUsize::new(1),
        receiver_gone: AtomicBool::new(false),
    };
    let queue = Arc::new(queue);
    (Sender(queue.clone()), Receiver(queue))
}

impl<T: Send> Sender<T> {
    /// Returns whether the receiver is gone, so that items are refused.
    pub fn is_closed(&self) -> bool {
        self.0.receiver_gone.load(Ordering::Acquire)
    }

    /// Appends an item.  Returns the item when the receiver is gone; an item sent while the receiver is being dropped
    /// may be dropped with the queue instead.
    pub fn send(&self, item: T) -> Result<(), T> {
        if self.0.receiver_gone.load(Ordering::Acquire) {
            return Err(item);
        }
        self.0.items.push(item);
        // The receiver may have been dropped between the two steps, and have emptied the queue before the push.
        if self.0.receiver_gone.load(Ordering::SeqCst) {
            while self.0.items.pop().is_some() {}
            return Ok(());
        }
        self.0.waker.wake();
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.waker.wake();
        }
    }
}

impl<T: Send> Receiver<T> {
    /// Waits for the next item; `None` when all senders are gone and the queue is empty.
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| {
            if let Some(item) = self.0.items.pop() {
                return Poll::Ready(Some(item));
            }
            self.0.waker.register(cx.waker());
            // Check again: a push before the waker was registered has woken no task.  Check the senders first, because
            // the last one may leave an item behind.
            let last = self.0.senders.load(Ordering::Acquire) == 0;
            match self.0.items.pop() {
                Some(item) => Poll::Ready(Some(item)),
                None if last => Poll::Ready(None),
                None => Poll::Pending,
            }
        })
        .await
    }

    /// Returns the next item if there is one now.
    pub fn try_recv(&mut self) -> Option<T> {
        self.0.items.pop()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.receiver_gone.store(true, Ordering::SeqCst);
        self.0.waker.take();
        while self.0.items.pop().is_some() {}
    }
}

const EMPTY: u8 = 0;
const FULL: u8 = 1;
const CLOSED: u8 = 2;

struct Slot<T> {
    state: AtomicU8,
    value: UnsafeCell<Option<T>>,
    waker: AtomicWaker,
}

// SAFETY: the value is written by the only sender while the state is EMPTY and read by the only receiver after it has
// seen FULL, which the sender sets after writing (release, acquire); so it is moved between threads, never shared.
unsafe impl<T: Send> Sync for Slot<T> {}

/// Sending half of [`oneshot`].
pub struct OneshotSender<T>(Arc<Slot<T>>);

/// Receiving half of [`oneshot`]: a future of the value, or of `None` when the sender is dropped without sending.
pub struct OneshotReceiver<T>(Arc<Slot<T>>);

/// Creates a channel for one value from one core to another.
pub fn oneshot<T: Send>() -> (OneshotSender<T>, OneshotReceiver<T>) {
    let slot = Arc::new(Slot { state: AtomicU8::new(EMPTY), value: UnsafeCell::new(None), waker: AtomicWaker::new() });
    (OneshotSender(slot.clone()), OneshotReceiver(slot))
}

impl<T: Send> OneshotSender<T> {
    /// Sends the value.
    pub fn send(self, value: T) {
        // SAFETY: this is the only sender, it sends once, and the receiver does not read while the state is EMPTY.
        unsafe { *self.0.value.get() = Some(value) };
        self.0.state.store(FULL, Ordering::Release);
        // Dropping `self` wakes the receiver.
    }

    /// Returns whether the receiver is gone.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl<T> Drop for OneshotSender<T> {
    fn drop(&mut self) {
        let _ = self.0.state.compare_exchange(EMPTY, CLOSED, Ordering::Release, Ordering::Relaxed);
        self.0.waker.wake();
    }
}

impl<T: Send> OneshotReceiver<T> {
    fn take(&mut self) -> Poll<Option<T>> {
        match self.0.state.load(Ordering::Acquire) {
            EMPTY => Poll::Pending,
            // SAFETY: the sender has set FULL after writing and does not touch the value any more; this is the only
            // receiver, and `&mut self` keeps it to one caller.
            FULL => Poll::Ready(unsafe { (*self.0.value.get()).take() }),
            _ => Poll::Ready(None),
        }
    }
}

impl<T: Send> Future for OneshotReceiver<T> {
    type Output = Option<T>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        if let Poll::Ready(value) = self.take() {
            return Poll::Ready(value);
        }
        self.0.waker.register(cx.waker());
        self.take()
    }
}
