//! Tickets: one-shot completion from an engine to the waiting task.

use std::cell::UnsafeCell;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;

use super::Finished;

const EMPTY: u8 = 0;
const FULL: u8 = 1;
const GONE: u8 = 2;

struct Slot {
    state: AtomicU8,
    value: UnsafeCell<Option<Finished>>,
    waker: AtomicWaker,
}

// SAFETY: the value is written by the only completion while the state is EMPTY, and read by the only ticket after it
// has seen FULL, which is set after writing (release, acquire); so it moves between threads and is never shared.
unsafe impl Sync for Slot {}

// SAFETY: what it holds may be sent: the pages of a job are `Send`.
unsafe impl Send for Slot {}

/// Engine that ended, or failed, with the job still queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the compression engine has stopped")]
pub struct EngineGone;

/// Future of a job's completion.
pub struct JobTicket(Arc<Slot>);

/// Engine's half of a ticket.
pub struct JobCompletion(Arc<Slot>);

/// Creates a ticket and its completion half; for implementations of engines.
pub fn ticket() -> (JobCompletion, JobTicket) {
    let slot = Arc::new(Slot { state: AtomicU8::new(EMPTY), value: UnsafeCell::new(None), waker: AtomicWaker::new() });
    (JobCompletion(slot.clone()), JobTicket(slot))
}

impl JobCompletion {
    /// Completes the job, and wakes the waiting task, on whatever thread it runs.
    pub fn complete(self, finished: Finished) {
        // SAFETY: there is one completion, it is used once, and the ticket does not look while the state is EMPTY.
        unsafe { *self.0.value.get() = Some(finished) };
        self.0.state.store(FULL, Ordering::Release);
        // Dropping `self` wakes.
    }
}

impl Drop for JobCompletion {
    fn drop(&mut self) {
        let _ = self.0.state.compare_exchange(EMPTY, GONE, Ordering::Release, Ordering::Relaxed);
        self.0.waker.wake();
    }
}

impl JobTicket {
    fn take(&mut self) -> Poll<Result<Finished, EngineGone>> {
        match self.0.state.load(Ordering::Acquire) {
            EMPTY => Poll::Pending,
            // SAFETY: FULL is set after the value was written, which is touched no more; `&mut self` makes this the
            // only reader.
            FULL => Poll::Ready(unsafe { (*self.0.value.get()).take() }.ok_or(EngineGone)),
            _ => Poll::Ready(Err(EngineGone)),
        }
    }

    /// Returns the result of the job, if it has ended.  After that the ticket is spent.
    pub fn try_take(&mut self) -> Option<Result<Finished, EngineGone>> {
        match self.take() {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }
}

impl Future for JobTicket {
    type Output = Result<Finished, EngineGone>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(result) = self.take() {
            return Poll::Ready(result);
        }
        self.0.waker.register(context.waker());
        // It may have ended before the waker was in place.
        self.take()
    }
}

impl fmt::Debug for JobTicket {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.0.state.load(Ordering::Relaxed) == EMPTY {
            "JobTicket(open)"
        } else {
            "JobTicket(ready)"
        })
    }
}
