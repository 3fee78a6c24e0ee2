//! Orphaned tasks: commands still in flight when their session has ended.  A device may take any time, and what it does in
//! the end must not surprise later sessions.
//!
//! The session is gone, so its host may return.  Until the last command is done, the commands still use their units: a
//! unit reset or a reservation change waits for them, and commands of the host itself end with BUSY there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Poll, Waker};

use super::task::ScsiTransport;
use super::task_set::ScsiTaskSet;
use crate::signal::NexusSignal;
use crate::unit::{NexusState, Order};

/// Remaining commands of a session, all of them aborted.
pub struct OrphanedScsiTasks<N> {
    tasks: ScsiTaskSet<N>,
    nexuses: BTreeMap<u16, NexusState>,
    signal: Arc<NexusSignal>,
}

impl<N> OrphanedScsiTasks<N> {
    pub(super) fn new(
        mut tasks: ScsiTaskSet<N>,
        mut nexuses: BTreeMap<u16, NexusState>,
        signal: Arc<NexusSignal>,
    ) -> Self {
        // A unit without commands in flight is released at once.
        let in_use = tasks.luns_in_flight();
        nexuses.retain(|lun, _| in_use.contains(lun));
        Self { tasks, nexuses, signal }
    }

    /// Drives the tasks to their end; `task` is woken when they progress.
    pub fn poll(&mut self, task: &Waker, transport: &mut impl ScsiTransport<Note = N>) -> Poll<()> {
        self.signal.set_task(task);
        self.tasks.set_task(task);
        if self.signal.take_notified() {
            self.follow_orders();
        }
        self.tasks.poll(transport);
        // Tasks that wait for others are not waited for: two sessions could wait for each other.
        match self.tasks.has_commands_in_flight() {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    }

    fn follow_orders(&mut self) {
        let orders: Vec<_> = self.nexuses.values().map(|nexus| (nexus.lun(), nexus.take_orders())).collect();
        for (lun, orders) in orders {
            for (order, guard) in orders {
                // All commands have been aborted already; only the new waiters are recorded.
                self.tasks.guard_commands(lun, &guard);
                if order == Order::Leave {
                    self.nexuses.remove(&lun);
                }
            }
        }
    }
}
