//! Memory for data in flight, budgeted over all sessions of all targets.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::locks::lock;
use crate::scsi::NexusSignal;

/// Memory budget in bytes, shared by all cores.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes_max: usize,
    taken: AtomicUsize,
    /// Sessions waiting for memory.
    waiting: Mutex<Vec<Arc<NexusSignal>>>,
    any_waiting: AtomicBool,
}

impl MemoryBudget {
    /// Creates a budget of `bytes_max` bytes, none of it taken.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, taken: AtomicUsize::new(0), waiting: Mutex::default(), any_waiting: AtomicBool::new(false) }
    }

    /// Takes memory for data that was already received, even beyond the budget.
    pub fn take(&self, bytes: usize) {
        self.taken.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Tries to take memory within the budget. If that fails, `signal` is notified when some memory has been given
    /// back.  A session that is alone gets the full amount that it requests.
    pub fn try_take(&self, bytes: usize, signal: &Arc<NexusSignal>) -> bool {
        let fits = |taken: usize| (taken == 0 || taken + bytes <= self.bytes_max).then_some(taken + bytes);
        let take = || self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        if take() {
            return true;
        }
        let mut waiting = lock(&self.waiting);
        if !waiting.iter().any(|other| Arc::ptr_eq(other, signal)) {
            waiting.push(signal.clone());
        }
        self.any_waiting.store(true, Ordering::SeqCst);
        drop(waiting);
        // Memory may have been given back before this session was registered as waiting.
        take()
    }

    /// Gives memory back and wakes the waiting sessions.
    pub fn give(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::SeqCst);
        if self.any_waiting.swap(false, Ordering::SeqCst) {
            std::mem::take(&mut *lock(&self.waiting)).iter().for_each(|signal| signal.notify());
        }
    }

    /// Returns true when more than 1.5 times the budget is taken.
    pub fn is_starved(&self) -> bool {
        self.taken() / 3 * 2 > self.bytes_max
    }

    /// Returns true while the budget is not used up.
    pub fn is_left(&self) -> bool {
        self.taken() < self.bytes_max
    }

    /// Bytes taken now.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }
}
