//! Orphaned tasks: commands still in flight when their session's drain timeout has expired. A device may take any time,
//! and what it does in the end must not surprise later sessions.
//!
//! The session is gone, so its host may log in again.  Until the last command is done, the commands still use their
//! units: a unit reset or a reservation change waits for them, and commands of the host itself end with BUSY there.

use std::collections::BTreeMap;
use std::task::{Context, Poll};

use forebay_reactor::{now, spawn};

use super::outbox::IscsiOutbox;
use super::task_set::TaskSet;
use crate::sessions::OrphanRegistration;
use crate::unit::{NexusState, Order};

/// Remaining commands of a session.
pub(super) struct OrphanedTasks {
    tasks: TaskSet,
    /// Accounts the memory that commands hold; nothing is sent any more.
    outbox: IscsiOutbox,
    nexuses: BTreeMap<u16, NexusState>,
    /// Registration that counts against the session limits.
    leaving: OrphanRegistration,
}

impl OrphanedTasks {
    /// Takes over what a session leaves behind.
    pub(super) fn new(
        tasks: TaskSet,
        outbox: IscsiOutbox,
        nexuses: BTreeMap<u16, NexusState>,
        leaving: OrphanRegistration,
    ) -> Self {
        Self { tasks, outbox, nexuses, leaving }
    }

    /// Spawns a task that completes the remaining commands.
    pub(super) fn complete(mut self) {
        self.outbox.discard_output();
        self.tasks.abort_all(&mut self.outbox);
        // A unit without commands in flight is released at once.
        let in_use = self.tasks.luns_in_flight();
        self.nexuses.retain(|lun, _| in_use.contains(lun));
        let mut orphans = self;
        drop(spawn(std::future::poll_fn(move |cx| orphans.turn(cx))));
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let signal = self.leaving.session().signal.clone();
        signal.set_task(cx.waker());
        self.tasks.set_task(cx.waker());
        if signal.take_notified() {
            self.follow_orders();
        }
        let (outbox, now) = (&mut self.outbox, now());
        self.tasks.poll(|outcome, task| outbox.answer(now, outcome, task));
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
