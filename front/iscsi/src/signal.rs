//! Cross-core signalling to a session.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::Waker;

use crate::locks::lock;

/// Reason for ending a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stop {
    /// Session is not ending.
    No = 0,
    /// Server shutdown.
    Shutdown = 1,
    /// Session reinstatement: the same initiator port has logged in again.
    Reinstated = 2,
    /// Target reset by a host.
    Reset = 3,
    /// Target removed, or the initiator may not log in any more.
    Logout = 4,
}

/// Wake-up of a session's task, with the reason.
#[derive(Debug)]
pub struct Signal {
    stop: AtomicU8,
    notified: AtomicBool,
    task: Mutex<Waker>,
}

impl Default for Signal {
    fn default() -> Self {
        Self { stop: AtomicU8::new(0), notified: AtomicBool::new(false), task: Mutex::new(Waker::noop().clone()) }
    }
}

impl Signal {
    /// Sets the waker of the session's task.
    pub fn set_task(&self, waker: &Waker) {
        let mut task = lock(&self.task);
        if !task.will_wake(waker) {
            *task = waker.clone();
        }
    }

    /// Notifies the session of new orders.
    pub fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.wake();
    }

    /// Returns true if [`notify`](Self::notify) was called since the last call.
    #[inline]
    pub fn take_notified(&self) -> bool {
        self.notified.load(Ordering::Acquire) && self.notified.swap(false, Ordering::AcqRel)
    }

    /// Requests the end of the session; the first reason counts.
    pub fn stop(&self, why: Stop) {
        let _ = self.stop.compare_exchange(Stop::No as u8, why as u8, Ordering::AcqRel, Ordering::Acquire);
        self.wake();
    }

    /// Returns the reason for which the session is to end, if any.
    #[inline]
    pub fn stopping(&self) -> Stop {
        match self.stop.load(Ordering::Acquire) {
            0 => Stop::No,
            1 => Stop::Shutdown,
            2 => Stop::Reinstated,
            3 => Stop::Reset,
            _ => Stop::Logout,
        }
    }

    fn wake(&self) {
        let task = lock(&self.task).clone();
        task.wake();
    }
}
