//! Task management: aborts tasks, and delays the response until they have ended.

use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BufList;
use forebay_block::reservation::Action;

use super::connection::{Connection, EXTRA_MAX};
use super::execute::many;
use super::logical_unit::LogicalUnit;
use super::outbox::{Pending, Role};
use crate::unit::Drain;
use crate::wire::{Lun, TAG_NONE, TaskRequest, response, task_function, task_response};

impl Connection<'_> {
    /// Aborts the tasks of one unit; `drain` is held until the device has completed them.
    pub(super) fn give_up(&mut self, lun: u16, drain: Option<&Arc<Drain>>) {
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
        let of_unit =
            |local: &Option<Rc<LogicalUnit>>| local.as_ref().is_some_and(|local| Lun::Unit(local.unit.lun()) == lun);
        for note in self.work.notes_mut().filter(|note| of_unit(&note.local)) {
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
        let (drain, ended) = Drain::new();
        let mut found = None;
        for note in self.work.notes_mut().filter(|note| note.itt == task && matches!(note.role, Role::Command(_))) {
            note.aborted = true;
            if note.is_task() {
                note.drains.push(drain.clone());
            }
            found = Some(note.local.clone());
        }
        drop(drain);
        match found {
            None => respond(self, task_response::NO_TASK),
            Some(local) => self.wait_for(itt, local, async move {
                // An error means that the waiters are gone; either way the task has ended.
                let _ = ended.await;
            }),
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
        let Some(local) = self.units.has(Lun::parse(&request.lun)) else {
            return respond(self, task_response::NO_LUN);
        };
        if function == task_function::LOGICAL_UNIT_RESET {
            let reset = self.reset(&local);
            return self.wait_for(itt, Some(local), reset);
        }
        // Each nexus has its own task set, so CLEAR TASK SET equals ABORT TASK SET.
        let session = self.units.session_id();
        let aborted = local.unit.abort(|nexus| nexus.session == session);
        self.wait_for(itt, Some(local), async move {
            // An error means that the waiters are gone; either way the tasks have ended.
            let _ = aborted.await;
        });
    }

    fn reset(&self, local: &Rc<LogicalUnit>) -> impl Future<Output = ()> + use<> {
        let reset = local.unit.reset();
        let (reservations, host) = (local.device.reservations(), self.units.host().clone());
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
        let locals: Vec<Rc<LogicalUnit>> = luns.into_iter().filter_map(|lun| self.units.has(Lun::Unit(lun))).collect();
        let resets: Vec<_> = locals.iter().map(|local| self.reset(local)).collect();
        async move {
            for reset in resets {
                reset.await;
            }
        }
    }

    /// Responds to a task management function once `end` completes.
    fn wait_for(&mut self, itt: u32, local: Option<Rc<LogicalUnit>>, end: impl Future<Output = ()> + 'static) {
        // Orders to this session itself are followed at once.
        self.signal.tell();
        let work = many(async move {
            end.await;
            Ok(BufList::new())
        });
        let pending = Pending {
            itt,
            local,
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
