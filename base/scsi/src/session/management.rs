//! Task management: aborts tasks, and delays the response until they have ended (SAM-5, chapter 7).

use std::rc::Rc;

use super::task_set::AbortedTask;
use super::{ScsiSession, ScsiTransport, TaskResponse};
use crate::lun::Lun;
use crate::unit::LogicalUnit;
use crate::unit::execute::ignore;

/// Task management function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskFunction {
    /// ABORT TASK: aborts a command, of any unit if `lun` is `None`.
    AbortTask {
        /// Unit of the command.
        lun: Option<Lun>,
        /// Tag of the command.
        tag: u64,
    },
    /// ABORT TASK SET: aborts the commands of this session for a unit.
    AbortTaskSet(Lun),
    /// CLEAR TASK SET: the same, since each nexus has its own task set.
    ClearTaskSet(Lun),
    /// QUERY TASK: finds a command.
    QueryTask {
        /// Unit of the command.
        lun: Option<Lun>,
        /// Tag of the command.
        tag: u64,
    },
    /// QUERY TASK SET: finds any command of this session for a unit.
    QueryTaskSet(Lun),
    /// LOGICAL UNIT RESET: aborts the commands of all sessions for a unit, and resets it.
    LogicalUnitReset(Lun),
    /// TARGET RESET: resets every unit that the host sees.
    TargetReset,
    /// I_T NEXUS RESET: aborts all commands of this session, and releases its SPC-2 reservations.
    NexusReset,
}

impl<N> ScsiSession<N> {
    /// Executes a task management function.  `note` comes back with the response, when the affected commands have ended: a
    /// request in flight at the device cannot be cancelled, and until it completes, a write may still reach the medium.
    pub fn manage(&mut self, function: TaskFunction, note: N, transport: &mut impl ScsiTransport<Note = N>) {
        match function {
            TaskFunction::AbortTask { lun, tag } => self.abort_task(lun, tag, note, transport),
            TaskFunction::QueryTask { lun, tag } => {
                let response = match self.tasks.has_command(lun, tag) {
                    true => TaskResponse::Succeeded,
                    false => self.absent_task(lun, TaskResponse::Complete),
                };
                transport.managed(note, response);
            }
            TaskFunction::QueryTaskSet(lun) => {
                let response = match self.units.find(lun) {
                    Some(_) => query(self.tasks.has_command_for(lun)),
                    None => TaskResponse::NoUnit,
                };
                transport.managed(note, response);
            }
            TaskFunction::AbortTaskSet(lun) | TaskFunction::ClearTaskSet(lun) => {
                let Some(unit) = self.units.find(lun) else { return transport.managed(note, TaskResponse::NoUnit) };
                let session = self.units.session_id();
                let aborted = unit.shared().abort(|nexus| nexus.session() == session);
                // An error means that the waiters are gone; either way the tasks have ended.
                self.respond_after(note, Some(unit), ignore(aborted), transport);
            }
            TaskFunction::LogicalUnitReset(lun) => {
                let Some(unit) = self.units.find(lun) else { return transport.managed(note, TaskResponse::NoUnit) };
                let reset = self.units.reset(&unit);
                self.respond_after(note, Some(unit), reset, transport);
            }
            TaskFunction::TargetReset => self.reset_target(note, std::future::ready(()), transport),
            TaskFunction::NexusReset => {
                let lost = self.units.lose_nexus();
                self.respond_after(note, None, lost, transport);
            }
        }
    }

    /// Executes TARGET RESET; the response is delayed until `then` has completed after it.
    pub fn reset_target(
        &mut self,
        note: N,
        then: impl Future<Output = ()> + 'static,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        let luns = self.units.visible();
        let units: Vec<Rc<LogicalUnit>> = luns.into_iter().filter_map(|lun| self.units.find(Lun::Unit(lun))).collect();
        let resets: Vec<_> = units.iter().map(|unit| self.units.reset(unit)).collect();
        let end = async move {
            for reset in resets {
                reset.await;
            }
            then.await;
        };
        self.respond_after(note, None, end, transport);
    }

    fn abort_task(&mut self, lun: Option<Lun>, tag: u64, note: N, transport: &mut impl ScsiTransport<Note = N>) {
        match self.tasks.abort(lun, tag, transport) {
            AbortedTask::Unknown => {
                let response = self.absent_task(lun, TaskResponse::NoTask);
                transport.managed(note, response);
            }
            AbortedTask::Dropped => transport.managed(note, TaskResponse::Complete),
            // An error means that the waiters are gone; either way the task has ended.
            AbortedTask::InFlight(unit, ended) => self.respond_after(note, unit, ignore(ended), transport),
        }
    }

    /// Returns the response to a function for a task that does not exist: `absent`, if its unit does.
    fn absent_task(&mut self, lun: Option<Lun>, absent: TaskResponse) -> TaskResponse {
        match lun {
            Some(lun) if self.units.find(lun).is_none() => TaskResponse::NoUnit,
            _ => absent,
        }
    }

    /// Responds to a task management function once `end` completes.
    fn respond_after(
        &mut self,
        note: N,
        unit: Option<Rc<LogicalUnit>>,
        end: impl Future<Output = ()> + 'static,
        transport: &mut impl ScsiTransport<Note = N>,
    ) {
        // The session follows orders that it has given to itself in its next turn.
        self.signal.notify();
        self.control(note, unit, end, transport);
    }
}

fn query(found: bool) -> TaskResponse {
    if found { TaskResponse::Succeeded } else { TaskResponse::Complete }
}
