//! Orphaned tasks: commands still in flight when their session's drain timeout has expired. A device may take any time,
//! and what it does in the end must not surprise later sessions.
//!
//! The session is gone, so its host may log in again.  Until the last command is done, the commands still use their
//! units: a unit reset or a reservation change waits for them, and commands of the host itself end with BUSY there.

use std::collections::BTreeMap;
use std::task::{Context, Poll};

use forebay_reactor::sync::InFlight;
use forebay_reactor::{now, spawn};

use super::outbox::{Outbox, Pending};
use crate::sessions::Leaving;
use crate::unit::NexusState;
use crate::unit::Order;
use crate::unit::execute::CommandFuture;

/// Remaining commands of a session.
pub(super) struct OrphanedTasks {
    pub(super) work: InFlight<CommandFuture, Pending>,
    /// Accounts the memory that commands hold; nothing is sent any more.
    pub(super) outbox: Outbox,
    pub(super) nexuses: BTreeMap<u16, NexusState>,
    /// Registration that counts against the session limits.
    pub(super) leaving: Leaving,
}

impl OrphanedTasks {
    /// Spawns a task that completes the remaining commands.
    pub(super) fn carry(mut self) {
        self.outbox.discard_output();
        self.work.notes_mut().for_each(|note| note.aborted = true);
        // A unit without commands in flight is released at once.
        let in_use: Vec<u16> = self.work.notes_mut().filter_map(|note| unit_of(note)).collect();
        self.nexuses.retain(|lun, _| in_use.contains(lun));
        let mut orphans = self;
        drop(spawn(std::future::poll_fn(move |cx| orphans.turn(cx))));
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let signal = self.leaving.session().signal.clone();
        signal.set_task(cx.waker());
        self.work.set_task(cx.waker());
        if signal.take_told() {
            self.follow_orders();
        }
        let (outbox, now) = (&mut self.outbox, now());
        self.work.poll(|outcome, pending| outbox.answer(now, outcome, pending));
        // CommandFuture that waits for other tasks is not waited for: two sessions could wait for each other.
        match self.work.notes_mut().any(|note| note.is_task()) {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    }

    fn follow_orders(&mut self) {
        let orders: Vec<_> = self.nexuses.values().map(|nexus| (nexus.lun(), nexus.take_orders())).collect();
        for (lun, orders) in orders {
            for (order, drain) in orders {
                let of_unit = self.work.notes_mut().filter(|note| unit_of(note) == Some(lun));
                // All tasks have been aborted already; only the new waiters are recorded.
                of_unit.filter(|note| note.is_task()).for_each(|note| note.drains.push(drain.clone()));
                if order == Order::Leave {
                    self.nexuses.remove(&lun);
                }
            }
        }
    }
}

fn unit_of(note: &Pending) -> Option<u16> {
    note.unit.as_ref().map(|unit| unit.lun())
}
