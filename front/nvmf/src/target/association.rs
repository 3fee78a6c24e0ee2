//! Controllers and connections, as the rest of the process sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use forebay_block::reservation::HostId;
use forebay_reactor::cross;

use crate::session::auth::Keys;
use crate::session::{Event, Kind};
use crate::wire::log::ErrorEntry;

/// How the rest of the process reaches a connection, from any core.
#[derive(Debug, Default)]
pub(crate) struct Control {
    pub(super) stopping: AtomicBool,
    /// Commands with a device.
    pub(super) under_way: AtomicUsize,
    pub(super) task: Mutex<Option<Waker>>,
}

impl Control {
    pub(crate) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
    }

    /// So many commands are with a device.
    pub(crate) fn set_under_way(&self, count: usize) {
        if self.under_way.load(Ordering::Relaxed) != count {
            self.under_way.store(count, Ordering::Release);
        }
    }

    /// Makes it look around.
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

/// Failed commands that wait for an admin queue to take them up, at most; more are only counted.
const ERRORS_PENDING_MAX: usize = 64;

/// Who looks whether a controller is alive, as bits.
pub(crate) mod watcher {
    /// The keep-alive timer.
    pub(crate) const KEEP_ALIVE: u8 = 1;
    /// A Connect that may be of the same host, come back.
    pub(crate) const SUCCESSOR: u8 = 2;
    pub(crate) const ALL: u8 = 3;
}

/// By which port a host has come, and from which machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) port: u16,
    pub(crate) machine: Option<IpAddr>,
}

/// What an admin queue is told by others.
#[derive(Debug)]
pub(crate) enum Notice {
    /// Something that the host may want to know.
    Event(Event),
    /// A command of an I/O queue failed.
    Error(ErrorEntry),
}

/// A controller as all its queues see it.
pub(crate) struct Association {
    pub(crate) cntlid: u16,
    pub(crate) kind: Kind,
    pub(crate) host: String,
    pub(crate) host_id: [u8; 16],
    /// Who it is to reservations.
    pub(crate) reserver: Option<HostId>,
    /// What each of its queues has to show.
    pub(crate) keys: Option<Arc<Keys>>,
    /// I/O queues may connect.
    pub(crate) ready: AtomicBool,
    /// Every write is durable when answered.
    pub(crate) write_through: AtomicBool,
    /// Something has come on some queue, or was answered, since each of its watchers last looked.
    pub(super) traffic: AtomicU8,
    /// Failed commands that the admin queue has not taken up.
    pub(super) errors_pending: AtomicUsize,
    /// Failed commands of which it was not told because there were too many.
    pub(super) errors_untold: AtomicU64,
    /// Namespaces that its queues have used.
    pub(super) used: Mutex<BTreeSet<u32>>,
    /// The port by which it has come, and from which machine.
    pub(super) way: Way,
    /// I/O queues that the host was granted.
    pub(crate) queues_granted: std::sync::atomic::AtomicU16,
    pub(super) dead: AtomicBool,
    /// There is something in `mistaken`.
    pub(super) may_mistake: AtomicBool,
    /// Ids that have become another volume's, while the host may still take them for the former's.
    pub(super) mistaken: Mutex<BTreeSet<u32>>,
    pub(super) queues: Mutex<BTreeMap<u16, Arc<Control>>>,
    pub(super) notices: cross::Sender<Notice>,
}

impl Association {
    /// It is one of its host's: who has to authenticate has done so, or it could not be ready.
    pub(super) fn counts(&self) -> bool {
        self.keys.is_none() || self.ready.load(Ordering::Acquire)
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, BTreeMap<u16, Arc<Control>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends its I/O queues, or all of them.
    pub(crate) fn end_queues(&self, admin_too: bool) {
        // Under the lock under which queues are added, so that none is added behind this.
        let queues = self.queues();
        if admin_too {
            self.dead.store(true, Ordering::Release);
        }
        queues.iter().filter(|(queue, _)| admin_too || **queue != 0).for_each(|(_, control)| control.stop());
    }

    /// It has I/O queues that are not about to end.
    pub(crate) fn has_io_queues(&self) -> bool {
        self.queues().iter().any(|(queue, control)| *queue != 0 && !control.stopping())
    }

    fn mistaken(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.mistaken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host may think that an id is another volume's: its commands are meant for that one.
    pub(crate) fn mistakes(&self, nsid: u32) -> bool {
        self.may_mistake.load(Ordering::Acquire) && self.mistaken().contains(&nsid)
    }

    /// An id is given to another volume.
    pub(super) fn may_mistake(&self, nsid: u32) {
        self.mistaken().insert(nsid);
        self.may_mistake.store(true, Ordering::Release);
    }

    /// The host was told which volume an id is.
    pub(crate) fn knows(&self, nsid: u32) {
        let mut mistaken = self.mistaken();
        mistaken.remove(&nsid);
        self.may_mistake.store(!mistaken.is_empty(), Ordering::Release);
    }

    pub(crate) fn notice(&self, notice: Notice) {
        if matches!(notice, Notice::Error(_))
            && self.errors_pending.fetch_add(1, Ordering::AcqRel) >= ERRORS_PENDING_MAX
        {
            self.errors_pending.fetch_sub(1, Ordering::AcqRel);
            self.errors_untold.fetch_add(1, Ordering::AcqRel);
            return;
        }
        // Refused when the admin queue has gone.
        let _ = self.notices.send(notice);
    }

    /// An error was taken up; says how many were left out.
    pub(crate) fn error_taken(&self) -> u64 {
        self.errors_pending.fetch_sub(1, Ordering::AcqRel);
        self.errors_untold.swap(0, Ordering::AcqRel)
    }

    /// The host has said something, or a command of it was answered.
    pub(crate) fn note_traffic(&self) {
        if self.traffic.load(Ordering::Relaxed) != watcher::ALL {
            self.traffic.store(watcher::ALL, Ordering::Relaxed);
        }
    }

    /// Whether there was traffic since the same watcher asked last.
    pub(crate) fn had_traffic(&self, watcher: u8) -> bool {
        self.traffic.fetch_and(!watcher, Ordering::Relaxed) & watcher != 0
    }

    /// A queue uses a namespace.
    pub(crate) fn uses(&self, nsid: u32) {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).insert(nsid);
    }

    /// The namespaces that its queues have used.
    pub(crate) fn used(&self) -> Vec<u32> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// Nothing was heard of it since a successor has looked first.
    pub(super) fn is_silent(&self) -> bool {
        self.traffic.load(Ordering::Relaxed) & watcher::SUCCESSOR == 0
    }

    /// Some queue has commands with a device.
    pub(super) fn is_under_way(&self) -> bool {
        self.queues().values().any(|control| control.under_way.load(Ordering::Acquire) > 0)
    }
}
