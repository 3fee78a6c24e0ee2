//! Wake-up of a session from any core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

use crate::locks::lock;

/// Wake-up of a session's task, with a mark that the session has something to examine: orders of other cores, memory,
/// changes of units.
#[derive(Debug)]
pub struct NexusSignal {
    notified: AtomicBool,
    task: Mutex<Waker>,
}

impl Default for NexusSignal {
    fn default() -> Self {
        Self { notified: AtomicBool::new(false), task: Mutex::new(Waker::noop().clone()) }
    }
}

impl NexusSignal {
    /// Sets the waker of the session's task.
    pub fn set_task(&self, waker: &Waker) {
        let mut task = lock(&self.task);
        if !task.will_wake(waker) {
            *task = waker.clone();
        }
    }

    /// Marks the session, and wakes it.
    pub fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.wake_task();
    }

    /// Returns true if [`notify`](Self::notify) was called since the last call.
    #[inline]
    pub fn take_notified(&self) -> bool {
        self.notified.load(Ordering::Acquire) && self.notified.swap(false, Ordering::AcqRel)
    }

    /// Wakes the session without a mark.
    pub fn wake_task(&self) {
        let task = lock(&self.task).clone();
        task.wake();
    }
}

/// Futures that a session polls with its signal as waker mark the session when they progress.
impl Wake for NexusSignal {
    fn wake(self: Arc<Self>) {
        self.notify();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.notify();
    }
}
