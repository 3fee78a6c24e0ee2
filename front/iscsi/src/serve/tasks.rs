//! Task management: aborts tasks, and delays the response until they have ended.

use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BufList;
use forebay_block::reservation::Action;

use super::connection::{Connection, EXTRA_MAX};
use super::outbox::{Pending, Role};
use crate::unit::execute::{composite, ignore};
use crate::unit::{DrainGuard, LogicalUnit};
use crate::wire::{Lun, TAG_NONE, TaskRequest, response, task_function, task_response};

impl Connection<'_> {
    /// Aborts the tasks of one unit; `drain` is held until the device has completed them.
    pub(super) fn give_up(&mut self, lun: u16, drain: Option<&Arc<DrainGuard>>) {
        let lun = Lun::Unit(lun);
        let of_unit: Vec<u32> =
            self.transfers.iter().filter(|(_, transfer)| transfer.ready.lun == lun).map(|(&itt, _)| itt).collect();
        for itt in of_unit {
            if let Some(transfer) = self.take_transfer(itt) {
                self.drop_command(transfer.numbered, transfer.held);
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting.ready.lun == lun {
                true => self.drop_command(waiting.numbered, waiting.held),
                false => self.waiting.push_back(waiting),
            }
        }
        let of_unit = |unit: &Option<Rc<LogicalUnit>>| unit.as_ref().is_some_and(|unit| Lun::Unit(unit.lun()) == lun);
        for note in self.work.notes_mut().filter(|note| of_unit(&note.unit)) {
            // Tasks that wait for the end of others are never waited for.
            if note.is_task() {
                note.drains.extend(drain.cloned());
            }
            if matches!(note.role, Role::Command(_)) {
                note.aborted = true;
            }
        }
    }

    /// ABORT TASK.  A task in the device ends when the device completes it. Until then a write may still reach the
    /// medium, so the response is delayed.
    fn abort_task(&mut self, itt: u32, task: u32) {
        let respond = |this: &mut Self, code: u8| {
            this.outbox.response(response::TASK_MANAGEMENT, code, itt, TAG_NONE, &[]);
        };
        if let Some(transfer) = self.take_transfer(task) {
            self.drop_command(transfer.numbered, transfer.held);
            return respond(self, task_response::COMPLETE);
        }
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.itt == task) {
            if let Some(waiting) = self.waiting.remove(at) {
                self.drop_command(waiting.numbered, waiting.held);
            }
            return respond(self, task_response::COMPLETE);
        }
        let (drain, ended) = DrainGuard::new();
        let mut found = None;
        for note in self.work.notes_mut().filter(|note| note.itt == task && matches!(note.role, Role::Command(_))) {
            note.aborted = true;
            if note.is_task() {
                note.drains.push(drain.clone());
            }
            found = Some(note.unit.clone());
        }
        drop(drain);
        match found {
            None => respond(self, task_response::NO_TASK),
            // An error means that the waiters are gone; either way the task has ended.
            Some(unit) => self.wait_for(itt, unit, ignore(ended)),
        }
    }

    pub(super) fn task_management(&mut self, request: &TaskRequest) {
        let itt = request.itt.get();
        let respond = |this: &mut Self, code: u8| {
            this.outbox.response(response::TASK_MANAGEMENT, code, itt, TAG_NONE, &[]);
        };
        if self.discovery {
            return respond(self, task_response::REJECTED);
        }
        let function = request.flags & 0x7f;
        match function {
            task_function::ABORT_TASK => return self.abort_task(itt, request.referenced.get()),
            task_function::TASK_REASSIGN => return respond(self, task_response::NO_REASSIGNMENT),
            task_function::CLEAR_ACA => return respond(self, task_response::NOT_SUPPORTED),
            task_function::TARGET_WARM_RESET | task_function::TARGET_COLD_RESET => {
                let resets = self.reset_all();
                let cold = function == task_function::TARGET_COLD_RESET;
                let (target, initiator) = (self.units.target().cloned(), self.units.initiator().to_owned());
                return self.wait_for(itt, None, async move {
                    resets.await;
                    if let Some(target) = target.filter(|_| cold) {
                        target.reset_by(&initiator);
                    }
                });
            }
            task_function::ABORT_TASK_SET | task_function::CLEAR_TASK_SET | task_function::LOGICAL_UNIT_RESET => {}
            _ => return respond(self, task_response::NOT_SUPPORTED),
        }
        let Some(unit) = self.units.find(Lun::parse(&request.lun)) else {
            return respond(self, task_response::NO_LUN);
        };
        if function == task_function::LOGICAL_UNIT_RESET {
            let reset = self.reset(&unit);
            return self.wait_for(itt, Some(unit), reset);
        }
        // Each nexus has its own task set, so CLEAR TASK SET equals ABORT TASK SET.
        let session = self.units.session_id();
        let aborted = unit.shared().abort(|nexus| nexus.session() == session);
        // An error means that the waiters are gone; either way the tasks have ended.
        self.wait_for(itt, Some(unit), ignore(aborted));
    }

    fn reset(&self, unit: &Rc<LogicalUnit>) -> impl Future<Output = ()> + use<> {
        let reset = unit.shared().reset();
        let (reservations, host) = (unit.device().reservations(), self.units.host().clone());
        async move {
            // Errors mean that all holders are gone, and count as completion.  The second call waits for requests in
            // the device from sessions that the unit no longer knows.
            let _ = reset.await;
            if let Some(reservations) = reservations {
                drop(reservations.apply(&host, Action::Reset).await);
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
    fn wait_for(&mut self, itt: u32, unit: Option<Rc<LogicalUnit>>, end: impl Future<Output = ()> + 'static) {
        // Orders to this session itself are followed at once.
        self.signal.tell();
        let work = composite(async move {
            end.await;
            Ok(BufList::new())
        });
        let pending = Pending {
            itt,
            unit,
            role: Role::Task(task_response::COMPLETE),
            numbered: false,
            aborted: false,
            ordered: false,
            control: true,
            held: 0,
            drains: Vec::new(),
        };
        if self.work.len() >= self.options.commands_max as usize + EXTRA_MAX {
            return self.outbox.response(response::TASK_MANAGEMENT, task_response::REJECTED, itt, TAG_NONE, &[]);
        }
        if let Some((outcome, pending)) = self.work.start(work, pending) {
            self.outbox.answer(self.now, outcome, pending);
        }
    }
}
