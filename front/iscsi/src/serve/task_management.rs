//! Task management requests.

use super::connection::IscsiConnection;
use super::task::IscsiTask;
use crate::scsi::{Lun, TaskFunction};
use crate::wire::{TAG_NONE, TaskRequest, response, task_function, task_response};

impl IscsiConnection<'_> {
    /// Responds to a task management function.
    fn respond(&mut self, itt: u32, code: u8) {
        self.outbox.response(response::TASK_MANAGEMENT, code, itt, TAG_NONE, &[]);
    }

    /// Executes a task management function.
    pub(super) fn task_management(&mut self, request: &TaskRequest) {
        let itt = request.itt.get();
        if self.discovery {
            return self.respond(itt, task_response::REJECTED);
        }
        let (lun, referenced) = (Lun::parse(&request.lun), request.referenced.get());
        let function = match request.flags & 0x7f {
            task_function::ABORT_TASK if self.transfers.abort(referenced, &mut self.outbox) => {
                return self.respond(itt, task_response::COMPLETE);
            }
            // An initiator task tag is unique in the session, whatever the unit.
            task_function::ABORT_TASK => TaskFunction::AbortTask { lun: None, tag: referenced.into() },
            task_function::ABORT_TASK_SET => TaskFunction::AbortTaskSet(lun),
            task_function::CLEAR_TASK_SET => TaskFunction::ClearTaskSet(lun),
            task_function::LOGICAL_UNIT_RESET => TaskFunction::LogicalUnitReset(lun),
            task_function::TARGET_WARM_RESET => TaskFunction::TargetReset,
            task_function::TARGET_COLD_RESET => return self.cold_reset(itt),
            task_function::TASK_REASSIGN => return self.respond(itt, task_response::NO_REASSIGNMENT),
            _ => return self.respond(itt, task_response::NOT_SUPPORTED),
        };
        let (scsi, mut port) = self.scsi_port();
        scsi.manage(function, IscsiTask::Management(itt), &mut port);
    }

    /// Resets the target, and then ends the sessions that this affects.
    fn cold_reset(&mut self, itt: u32) {
        let (target, initiator) = (self.session.target.clone(), self.session.initiator.clone());
        let end = async move {
            if let Some(target) = target {
                target.reset_by(&initiator);
            }
        };
        let (scsi, mut port) = self.scsi_port();
        scsi.reset_target(IscsiTask::Management(itt), end, &mut port);
    }
}
