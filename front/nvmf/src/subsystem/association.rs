//! Controllers and connections, as seen by the rest of the process.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use forebay_block::reservation::HostId;
use forebay_reactor::cross;

use super::Subsystem;
use crate::session::auth::AuthSecrets;
use crate::session::{AsyncEvent, ControllerType};
use crate::wire::log::ErrorEntry;

/// Remote control of a connection, usable from any core.
#[derive(Debug, Default)]
pub(crate) struct NvmeConnectionControl {
    stopping: AtomicBool,
    /// Commands in flight at a device.
    in_flight: AtomicUsize,
    task: Mutex<Option<Waker>>,
}

impl NvmeConnectionControl {
    pub(crate) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
    }

    /// Publishes the number of commands in flight at a device.
    pub(crate) fn set_in_flight(&self, count: usize) {
        if self.in_flight.load(Ordering::Relaxed) != count {
            self.in_flight.store(count, Ordering::Release);
        }
    }

    /// Wakes the connection's task.
    pub(crate) fn wake(&self) {
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(task) = task {
            task.wake();
        }
    }

    pub(crate) fn set_task(&self, waker: &Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
    }
}

/// Maximum number of failed commands queued for an admin queue; more are only counted.
const ERRORS_PENDING_MAX: usize = 64;

/// Watchers of a controller's traffic, as bits.
pub(crate) mod watcher {
    /// Keep-alive timer.
    pub(crate) const KEEP_ALIVE: u8 = 1;
    /// Connect that may come from the same host, reconnecting.
    pub(crate) const SUCCESSOR: u8 = 2;
    pub(crate) const ALL: u8 = 3;
}

/// Path of a host: the port it connected to, and the machine it connected from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPath {
    pub(crate) port: u16,
    pub(crate) machine: Option<IpAddr>,
}

/// Notice to an admin queue.
#[derive(Debug)]
pub(crate) enum Notice {
    /// Event that the host may have requested.
    Event(AsyncEvent),
    /// Failed command of an I/O queue.
    Error(ErrorEntry),
}

/// Stale namespace ids: they belong to another volume now, while the host may still mean the former one.
///
/// `any` is set exactly while `ids` is not empty, which changes under its lock, so that commands usually need not take
/// the lock.
#[derive(Debug, Default)]
pub(super) struct StaleNamespaceIds {
    any: AtomicBool,
    ids: Mutex<BTreeSet<u32>>,
}

impl StaleNamespaceIds {
    fn ids(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contains(&self, nsid: u32) -> bool {
        self.any.load(Ordering::Acquire) && self.ids().contains(&nsid)
    }

    fn insert(&self, nsid: u32) {
        let mut ids = self.ids();
        ids.insert(nsid);
        self.any.store(true, Ordering::Release);
    }

    fn remove(&self, nsid: u32) {
        let mut ids = self.ids();
        ids.remove(&nsid);
        self.any.store(!ids.is_empty(), Ordering::Release);
    }
}

/// Controller state shared by all its queues.
pub(crate) struct Association {
    pub(crate) subsystem: Subsystem,
    pub(crate) cntlid: u16,
    pub(crate) kind: ControllerType,
    pub(crate) host: String,
    pub(crate) host_id: [u8; 16],
    /// Identity of the host for reservations.
    pub(crate) reserver: Option<HostId>,
    /// Keys with which each of its queues must authenticate.
    pub(crate) keys: Option<Arc<AuthSecrets>>,
    /// Set while the controller is ready, so that I/O queues may connect.
    pub(crate) ready: AtomicBool,
    /// Set while the volatile write cache is disabled: every write is durable when it is acknowledged.
    pub(crate) write_through: AtomicBool,
    /// Bits of the watchers for which there was traffic since they last checked: data received or a command completed
    /// on any queue.
    pub(super) traffic: AtomicU8,
    /// Failed commands that the admin queue has not processed yet.
    pub(super) errors_pending: AtomicUsize,
    /// Failed commands that were not queued because there were too many.
    pub(super) errors_unreported: AtomicU64,
    /// Namespaces that its queues have used.
    pub(super) used: Mutex<BTreeSet<u32>>,
    /// Path of the host: the port it connected to, and the machine it connected from.
    pub(super) path: HostPath,
    /// Number of I/O queues granted to the host.
    pub(crate) queues_granted: std::sync::atomic::AtomicU16,
    pub(super) dead: AtomicBool,
    pub(super) stale: StaleNamespaceIds,
    pub(super) queues: Mutex<BTreeMap<u16, Arc<NvmeConnectionControl>>>,
    pub(super) notices: cross::Sender<Notice>,
}

impl Association {
    /// Returns whether it is a controller of a subsystem.
    pub(super) fn is_of(&self, subsystem: &Subsystem) -> bool {
        self.subsystem.id() == subsystem.id()
    }

    /// Returns whether its host has connected on that path.
    pub(super) fn is_on(&self, path: &HostPath) -> bool {
        self.path == *path
    }

    /// Returns whether it counts against the limit of its host.  A controller that requires authentication counts
    /// once it is ready, since only an authenticated host can make it so.
    pub(super) fn counts(&self) -> bool {
        self.keys.is_none() || self.ready.load(Ordering::Acquire)
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, BTreeMap<u16, Arc<NvmeConnectionControl>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends its I/O queues, and with `admin_too` the admin queue as well.
    pub(crate) fn end_queues(&self, admin_too: bool) {
        // Taken under the lock that guards additions, so that no queue is added afterwards.
        let queues = self.queues();
        if admin_too {
            self.dead.store(true, Ordering::Release);
        }
        queues.iter().filter(|(queue, _)| admin_too || **queue != 0).for_each(|(_, control)| control.stop());
    }

    /// Returns whether it has I/O queues that are not stopping.
    pub(crate) fn has_io_queues(&self) -> bool {
        self.queues().iter().any(|(queue, control)| *queue != 0 && !control.stopping())
    }

    /// Returns whether a namespace id is stale for this host, so that its commands are meant for the former volume.
    pub(crate) fn is_stale(&self, nsid: u32) -> bool {
        self.stale.contains(nsid)
    }

    /// Marks a namespace id as stale, because it is given to another volume.
    pub(super) fn mark_stale(&self, nsid: u32) {
        self.stale.insert(nsid);
    }

    /// Marks a namespace id as current, after the host has identified the namespace.
    pub(crate) fn clear_stale(&self, nsid: u32) {
        self.stale.remove(nsid);
    }

    pub(crate) fn notice(&self, notice: Notice) {
        if matches!(notice, Notice::Error(_))
            && self.errors_pending.fetch_add(1, Ordering::AcqRel) >= ERRORS_PENDING_MAX
        {
            self.errors_pending.fetch_sub(1, Ordering::AcqRel);
            self.errors_unreported.fetch_add(1, Ordering::AcqRel);
            return;
        }
        // Fails if the admin queue has ended.
        let _ = self.notices.send(notice);
    }

    /// Records that an error was processed.  Returns the number of errors that were not queued since the last call.
    pub(crate) fn error_taken(&self) -> u64 {
        self.errors_pending.fetch_sub(1, Ordering::AcqRel);
        self.errors_unreported.swap(0, Ordering::AcqRel)
    }

    /// Records traffic: data from the host, or a completed command.
    pub(crate) fn note_traffic(&self) {
        if self.traffic.load(Ordering::Relaxed) != watcher::ALL {
            self.traffic.store(watcher::ALL, Ordering::Relaxed);
        }
    }

    /// Returns whether there was traffic since the same watcher's last call.
    pub(crate) fn had_traffic(&self, watcher: u8) -> bool {
        self.traffic.fetch_and(!watcher, Ordering::Relaxed) & watcher != 0
    }

    /// Records that a queue uses a namespace.
    pub(crate) fn uses(&self, nsid: u32) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(nsid);
    }

    /// Returns the namespaces that its queues have used.
    pub(crate) fn used(&self) -> Vec<u32> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Returns whether there was no traffic since a successor first checked.
    pub(super) fn is_silent(&self) -> bool {
        self.traffic.load(Ordering::Relaxed) & watcher::SUCCESSOR == 0
    }

    /// Returns whether any queue has commands in flight at a device.
    pub(super) fn has_in_flight(&self) -> bool {
        self.queues().values().any(|control| control.in_flight.load(Ordering::Acquire) > 0)
    }
}
