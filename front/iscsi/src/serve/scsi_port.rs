//! Outcomes of SCSI tasks, on their way to the host.

use forebay_reactor::{Instant, now};

use super::data_out_set::DataOutSet;
use super::outbox::IscsiOutbox;
use super::task::IscsiTask;
use crate::scsi::{ReadyScsiCommand, ScsiCompletion, ScsiTransport, TaskResponse};
use crate::wire::{TAG_NONE, logout_response, response, task_response};

/// Send queue and data-out transfers of a session, as its SCSI tasks see them.
pub(super) struct IscsiPort<'a> {
    outbox: &'a mut IscsiOutbox,
    /// Commands that are receiving data; `None` when there are none any more.
    transfers: Option<&'a mut DataOutSet>,
    /// Time at which tasks end, if it is known already.
    now: Option<Instant>,
}

impl<'a> IscsiPort<'a> {
    /// Creates the port of a session that receives data.
    pub(super) fn new(outbox: &'a mut IscsiOutbox, transfers: &'a mut DataOutSet, now: Option<Instant>) -> Self {
        Self { outbox, transfers: Some(transfers), now }
    }

    /// Creates the port of orphaned tasks.
    pub(super) fn of_orphans(outbox: &'a mut IscsiOutbox, now: Instant) -> Self {
        Self { outbox, transfers: None, now: Some(now) }
    }
}

impl ScsiTransport for IscsiPort<'_> {
    type Note = IscsiTask;

    #[inline]
    fn admit(&mut self, command: &ReadyScsiCommand, note: &mut IscsiTask) -> bool {
        let IscsiTask::Command(pending) = note else { return true };
        let more = command.read_bytes().saturating_sub(pending.held);
        if more > 0 && !self.outbox.try_hold(more, pending.held) {
            return false;
        }
        pending.held += more;
        true
    }

    #[inline]
    fn complete(&mut self, done: ScsiCompletion<IscsiTask>) {
        let sense = if done.result.is_err() { done.sense() } else { Vec::new() };
        let ScsiCompletion { note, unit, result } = done;
        let IscsiTask::Command(command) = note else {
            debug_assert!(false, "{note:?} is no SCSI command");
            return;
        };
        self.outbox.answer(self.now.unwrap_or_else(now), (result, sense), command, unit.as_ref());
    }

    fn aborted(&mut self, note: IscsiTask) {
        if let IscsiTask::Command(command) = note {
            self.outbox.drop_command(command.numbered, command.held);
        }
    }

    fn managed(&mut self, note: IscsiTask, response: TaskResponse) {
        match note {
            IscsiTask::Management(itt) => {
                let code = match response {
                    TaskResponse::Complete | TaskResponse::Succeeded => task_response::COMPLETE,
                    TaskResponse::NoTask => task_response::NO_TASK,
                    TaskResponse::NoUnit => task_response::NO_LUN,
                    TaskResponse::Rejected => task_response::REJECTED,
                };
                self.outbox.response(response::TASK_MANAGEMENT, code, itt, TAG_NONE, &[]);
            }
            IscsiTask::Logout(itt) => self.outbox.response(response::LOGOUT, logout_response::CLOSED, itt, 0, &[]),
            IscsiTask::Command(_) => debug_assert!(false, "{note:?} is no task management function"),
        }
    }

    fn abort_unit(&mut self, lun: u16) {
        if let Some(transfers) = &mut self.transfers {
            transfers.abort_unit(lun, self.outbox);
        }
    }
}
