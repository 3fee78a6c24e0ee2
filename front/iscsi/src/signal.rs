//! Cross-core signalling to a session.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::scsi::NexusSignal;

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

/// Wake-up of a session's task, with the reason for which it is to end.
#[derive(Debug, Default)]
pub struct Signal {
    stop: AtomicU8,
    nexus: Arc<NexusSignal>,
}

impl Signal {
    /// Returns the wake-up of the session's task for its units and memory.
    pub fn nexus(&self) -> &Arc<NexusSignal> {
        &self.nexus
    }

    /// Requests the end of the session; the first reason counts.
    pub fn stop(&self, why: Stop) {
        let _ = self.stop.compare_exchange(Stop::No as u8, why as u8, Ordering::AcqRel, Ordering::Acquire);
        self.nexus.wake_task();
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
}
