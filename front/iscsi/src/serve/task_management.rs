//! Task management: aborts tasks, and delays the response until they have ended.

use std::rc::Rc;

use forebay_block::BufList;
use forebay_block::reservation::ReservationAction;

use super::connection::IscsiConnection;
use super::task::{PendingTask, TaskKind};
use super::task_set::Aborted;
use crate::unit::LogicalUnit;
use crate::unit::execute::{composite, ignore};
use crate::wire::{Lun, TAG_NONE, TaskRequest, response, task_function, task_response};

impl IscsiConnection<'_> {
    /// ABORT TASK.  A task in the device ends when the device completes it. Until then a write may still reach the
    /// medium, so the response is delayed.
    fn abort_task(&mut self, itt: u32, referenced: u32) {
        match self.tasks.abort(referenced, &mut self.outbox) {
            Aborted::Unknown => self.respond(itt, task_response::NO_TASK),
            Aborted::Dropped => self.respond(itt, task_response::COMPLETE),
            // An error means that the waiters are gone; either way the task has ended.
            Aborted::InFlight(unit, ended) => self.respond_after(itt, unit, ignore(ended)),
        }
    }

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
        let function = request.flags & 0x7f;
        match function {
            task_function::ABORT_TASK => return self.abort_task(itt, request.referenced.get()),
            task_function::TASK_REASSIGN => return self.respond(itt, task_response::NO_REASSIGNMENT),
            task_function::CLEAR_ACA => return self.respond(itt, task_response::NOT_SUPPORTED),
            task_function::TARGET_WARM_RESET | task_function::TARGET_COLD_RESET => {
                let resets = self.reset_all();
                let cold = function == task_function::TARGET_COLD_RESET;
                let (target, initiator) = (self.units.target().cloned(), self.units.initiator().to_owned());
                return self.respond_after(itt, None, async move {
                    resets.await;
                    if let Some(target) = target.filter(|_| cold) {
                        target.reset_by(&initiator);
                    }
                });
            }
            task_function::ABORT_TASK_SET | task_function::CLEAR_TASK_SET | task_function::LOGICAL_UNIT_RESET => {}
            _ => return self.respond(itt, task_response::NOT_SUPPORTED),
        }
        let Some(unit) = self.units.find(Lun::parse(&request.lun)) else {
            return self.respond(itt, task_response::NO_LUN);
        };
        if function == task_function::LOGICAL_UNIT_RESET {
            let reset = self.reset(&unit);
            return self.respond_after(itt, Some(unit), reset);
        }
        // Each nexus has its own task set, so CLEAR TASK SET equals ABORT TASK SET.
        let session = self.units.session_id();
        let aborted = unit.shared().abort(|nexus| nexus.session() == session);
        // An error means that the waiters are gone; either way the tasks have ended.
        self.respond_after(itt, Some(unit), ignore(aborted));
    }

    fn reset(&self, unit: &Rc<LogicalUnit>) -> impl Future<Output = ()> + use<> {
        let reset = unit.shared().reset();
        let (reservations, host) = (unit.device().reservations(), self.units.host().clone());
        async move {
            // Errors mean that all holders are gone, and count as completion.  The second call waits for requests in
            // the device from sessions that the unit no longer knows.
            let _ = reset.await;
            if let Some(reservations) = reservations {
                drop(reservations.apply(&host, ReservationAction::Reset).await);
            }
        }
    }

    fn reset_all(&mut self) -> impl Future<Output = ()> + use<> {
        let luns = self.units.visible();
        let units: Vec<Rc<LogicalUnit>> = luns.into_iter().filter_map(|lun| self.units.find(Lun::Unit(lun))).collect();
        let resets: Vec<_> = units.iter().map(|unit| self.reset(unit)).collect();
        async move {
            for reset in resets {
                reset.await;
            }
        }
    }

    /// Responds to a task management function once `end` completes.
    fn respond_after(&mut self, itt: u32, unit: Option<Rc<LogicalUnit>>, end: impl Future<Output = ()> + 'static) {
        self.wake_for_orders();
        let work = composite(async move {
            end.await;
            Ok(BufList::new())
        });
        if self.tasks.is_full() {
            return self.respond(itt, task_response::REJECTED);
        }
        self.start(work, PendingTask::control(itt, unit, TaskKind::Management(task_response::COMPLETE)));
    }
}
