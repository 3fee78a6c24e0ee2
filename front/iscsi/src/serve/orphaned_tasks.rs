//! Orphaned tasks: commands still in flight when their session's drain timeout has expired.
//!
//! The session is gone, so its host may log in again.  Until the last command is done, the commands still use their units,
//! their memory stays reserved, and the session counts against the limits.

use std::task::{Context, Poll};

use forebay_reactor::{now, spawn};

use super::outbox::IscsiOutbox;
use super::scsi_port::IscsiPort;
use super::task::IscsiTask;
use crate::scsi::OrphanedScsiTasks;
use crate::sessions::OrphanRegistration;

/// Remaining commands of a session.
pub(super) struct OrphanedTasks {
    tasks: OrphanedScsiTasks<IscsiTask>,
    /// Accounts the memory that commands hold; nothing is sent any more.
    outbox: IscsiOutbox,
    /// Registration that counts against the session limits.
    _leaving: OrphanRegistration,
}

impl OrphanedTasks {
    /// Takes over what a session leaves behind.
    pub(super) fn new(tasks: OrphanedScsiTasks<IscsiTask>, outbox: IscsiOutbox, leaving: OrphanRegistration) -> Self {
        Self { tasks, outbox, _leaving: leaving }
    }

    /// Spawns a task that completes the remaining commands.
    pub(super) fn complete(self) {
        let mut orphans = self;
        drop(spawn(std::future::poll_fn(move |cx| orphans.turn(cx))));
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.tasks.poll(cx.waker(), &mut IscsiPort::of_orphans(&mut self.outbox, now()))
    }
}
