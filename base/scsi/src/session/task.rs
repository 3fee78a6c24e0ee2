//! Tasks of a session: commands, and what waits for their end.

use std::rc::Rc;
use std::sync::Arc;

use crate::mode::Modes;
use crate::unit::commands::ReadyScsiCommand;
use crate::unit::{DrainGuard, LogicalUnit, ScsiResult};

/// Command as a transport passes it to a session; `N` is what the transport needs for the response.
#[derive(Debug)]
pub struct ScsiTask<N> {
    /// Tag by which task management functions name it, unique among the session's commands.
    pub tag: u64,
    /// Command with its data.
    pub command: ReadyScsiCommand,
    /// ORDERED task attribute: begins after all earlier tasks have ended, and before all later ones.  All others run as
    /// they arrive.
    pub ordered: bool,
    /// Note of the transport.
    pub note: N,
}

/// Command that has ended.
pub struct ScsiCompletion<N> {
    /// Note of the transport.
    pub note: N,
    /// Unit that executed it, if any.
    pub unit: Option<Rc<LogicalUnit>>,
    /// Data for the initiator, which may be longer than it expects, or the failure.
    pub result: ScsiResult,
}

impl<N> ScsiCompletion<N> {
    /// Returns the SCSI status.
    pub fn status(&self) -> u8 {
        self.result.as_ref().map_or_else(|failure| failure.status, |_| crate::status::GOOD)
    }

    /// Returns the sense data, in the format that the unit is set to; empty without any.
    pub fn sense(&self) -> Vec<u8> {
        let descriptor = self.unit.as_ref().is_some_and(|unit| unit.shared().modes().has(Modes::DESCRIPTOR_SENSE));
        let sense = self.result.as_ref().err().and_then(|failure| failure.sense);
        sense.map(|sense| sense.to_bytes(descriptor)).unwrap_or_default()
    }
}

/// Outcomes of a session's tasks, as its transport reports them to the host.
///
/// Every task that was passed to the session ends with one call, of [`complete`](Self::complete),
/// [`aborted`](Self::aborted) or [`managed`](Self::managed).
pub trait ScsiTransport {
    /// Data that the transport needs to respond to a task.
    type Note;

    /// Reserves what a command needs that is about to begin, such as memory; returns false if it has to wait.  Then it is
    /// asked again by [`ScsiSession::begin_waiting`](super::ScsiSession::begin_waiting), and later commands wait behind
    /// it.
    fn admit(&mut self, command: &ReadyScsiCommand, note: &mut Self::Note) -> bool {
        let _ = (command, note);
        true
    }

    /// Responds to a command.
    fn complete(&mut self, done: ScsiCompletion<Self::Note>);

    /// Ends a command without a SCSI status: a task management function has aborted it, and the device is done with it.
    fn aborted(&mut self, note: Self::Note);

    /// Responds to a task management function, or to other [`control`](super::ScsiSession::start_control) work.
    fn managed(&mut self, note: Self::Note, response: TaskResponse);

    /// Aborts commands to a unit that the transport has not passed to the session yet.
    fn abort_unit(&mut self, lun: u16) {
        let _ = lun;
    }
}

/// Response to a task management function (SAM-5, section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskResponse {
    /// FUNCTION COMPLETE.
    Complete,
    /// FUNCTION SUCCEEDED: a queried task exists.
    Succeeded,
    /// FUNCTION COMPLETE, where the referenced task does not exist (any more).
    NoTask,
    /// INCORRECT LOGICAL UNIT NUMBER.
    NoUnit,
    /// FUNCTION REJECTED: too many tasks.
    Rejected,
}

/// Role of a task in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskRole {
    /// Command of a host.
    Command,
    /// Command that may wait for the end of other tasks.
    ControlCommand,
    /// Task management function or other work of the transport, which may wait for the end of other tasks.
    Management,
}

/// Task in flight.
pub(super) struct RunningTask<N> {
    pub(super) tag: u64,
    pub(super) unit: Option<Rc<LogicalUnit>>,
    /// Note of the transport, until its end is reported.
    pub(super) note: Option<N>,
    pub(super) role: TaskRole,
    /// Task was aborted; no status is reported.
    pub(super) aborted: bool,
    /// Later commands wait for it.
    pub(super) ordered: bool,
    /// Guards of waiters for the end of this task.
    pub(super) guards: Vec<Arc<DrainGuard>>,
}

impl<N> RunningTask<N> {
    /// Returns true for a SCSI command.
    pub(super) fn is_command(&self) -> bool {
        self.role != TaskRole::Management
    }

    /// Returns true if aborts and resets wait for its end.  They never wait for tasks that wait for the end of others:
    /// two sessions that reset each other's tasks would wait for each other.
    pub(super) fn is_waited_for(&self) -> bool {
        self.role == TaskRole::Command
    }

    /// Returns the LUN of its unit.
    pub(super) fn lun(&self) -> Option<u16> {
        self.unit.as_ref().map(|unit| unit.lun())
    }

    /// Marks the task as aborted.  A command that is not waited for has no data in the device: its end is reported at
    /// once, so that no response of it follows that of the task management function.
    pub(super) fn abort(&mut self, transport: &mut impl ScsiTransport<Note = N>) {
        self.aborted = true;
        if self.role == TaskRole::ControlCommand
            && let Some(note) = self.note.take()
        {
            transport.aborted(note);
        }
    }

    /// Reports its end.
    #[inline]
    pub(super) fn end(self, result: ScsiResult, transport: &mut impl ScsiTransport<Note = N>) {
        let Self { note, unit, role, aborted, guards, .. } = self;
        match (note, role) {
            (None, _) => debug_assert!(aborted),
            (Some(note), _) if aborted => transport.aborted(note),
            (Some(note), TaskRole::Management) => transport.managed(note, TaskResponse::Complete),
            (Some(note), _) => transport.complete(ScsiCompletion { note, unit, result }),
        }
        // Waiters are told after the transport: their response follows that of the task.
        drop(guards);
    }
}
