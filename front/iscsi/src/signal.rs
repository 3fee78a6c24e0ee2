//! How a session is reached from any core.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::Waker;

use crate::unit::lock;

/// Why a session is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stop {
    /// It is not.
    No = 0,
    /// The server stops.
    Shutdown = 1,
    /// The same initiator has logged in again.
    Reinstated = 2,
    /// Somebody reset the target.
    Reset = 3,
}

/// Wakes a session's task, and tells it what for.
#[derive(Debug)]
pub struct Signal {
    stop: AtomicU8,
    told: AtomicBool,
    task: Mutex<Waker>,
}

impl Default for Signal {
    fn default() -> Self {
        Self { stop: AtomicU8::new(0), told: AtomicBool::new(false), task: Mutex::new(Waker::noop().clone()) }
    }
}

impl Signal {
    /// Says whom to wake.
    pub fn set_task(&self, waker: &Waker) {
        let mut task = lock(&self.task);
        if !task.will_wake(waker) {
            *task = waker.clone();
        }
    }

    /// There is something to look at.
    pub fn tell(&self) {
        self.told.store(true, Ordering::Release);
        self.wake();
    }

    /// There was something to look at since the last call.
    #[inline]
    pub fn take_told(&self) -> bool {
        self.told.load(Ordering::Acquire) && self.told.swap(false, Ordering::AcqRel)
    }

    /// The session is to end; the first reason counts.
    pub fn stop(&self, why: Stop) {
        let _ = self.stop.compare_exchange(Stop::No as u8, why as u8, Ordering::AcqRel, Ordering::Acquire);
        self.wake();
    }

    /// Whether the session is to end, and why.
    #[inline]
    pub fn stopping(&self) -> Stop {
        match self.stop.load(Ordering::Acquire) {
            0 => Stop::No,
            1 => Stop::Shutdown,
            2 => Stop::Reinstated,
            _ => Stop::Reset,
        }
    }

    fn wake(&self) {
        let task = lock(&self.task).clone();
        task.wake();
    }
}
