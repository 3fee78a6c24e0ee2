//! Tasks of a session in flight: SCSI commands, task management functions, and the logout.

use std::rc::Rc;
use std::sync::Arc;

use forebay_reactor::Instant;

use crate::stats::ScsiCommandKind;
use crate::unit::{DrainGuard, LogicalUnit};

/// Kind of a task in flight.
#[derive(Debug)]
pub(super) enum TaskKind {
    /// SCSI command.
    Command(CommandInfo),
    /// Task management function, and its response code.
    Management(u8),
    /// Logout request.
    Logout,
}

/// Fields of a SCSI command that its response needs.
#[derive(Debug)]
pub(super) struct CommandInfo {
    /// LUN field as encoded in the PDU.
    pub(super) lun_bytes: [u8; 8],
    pub(super) kind: ScsiCommandKind,
    /// Expected data transfer length in bytes.
    pub(super) expected: u32,
    /// Bytes that the command takes from the initiator, if any.
    pub(super) takes: Option<u64>,
    /// Read flag: the initiator accepts data.
    pub(super) reads: bool,
    pub(super) began: Instant,
    /// Number of R2Ts sent.
    pub(super) r2ts: u32,
}

/// Task in flight.
pub(super) struct PendingTask {
    pub(super) itt: u32,
    pub(super) unit: Option<Rc<LogicalUnit>>,
    pub(super) kind: TaskKind,
    /// Occupies a place in the command window.
    pub(super) numbered: bool,
    /// Task was aborted; no response is sent.
    pub(super) aborted: bool,
    /// Later commands wait for it.
    pub(super) ordered: bool,
    /// Control task: waits for the end of other tasks, and is not waited for.
    pub(super) control: bool,
    /// Bytes of memory accounted to it.
    pub(super) held: usize,
    /// Guards of waiters for the end of this task.
    pub(super) guards: Vec<Arc<DrainGuard>>,
}

impl PendingTask {
    /// Creates a task that is no SCSI command: it has no place in the window, and waits for other tasks.
    pub(super) fn control(itt: u32, unit: Option<Rc<LogicalUnit>>, kind: TaskKind) -> Self {
        Self {
            itt,
            unit,
            kind,
            numbered: false,
            aborted: false,
            ordered: false,
            control: true,
            held: 0,
            guards: Vec::new(),
        }
    }

    /// Returns true for a SCSI command.
    pub(super) fn is_command(&self) -> bool {
        matches!(self.kind, TaskKind::Command(_))
    }

    /// Returns true if aborts and resets wait for its end.  They never wait for tasks that wait for the end of others:
    /// two sessions that reset each other's tasks would wait for each other.
    pub(super) fn is_waited_for(&self) -> bool {
        self.is_command() && !self.control
    }

    /// Returns the LUN of its unit.
    pub(super) fn lun(&self) -> Option<u16> {
        self.unit.as_ref().map(|unit| unit.lun())
    }
}
