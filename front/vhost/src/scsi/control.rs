//! Requests of the control queue (VIRTIO 1.2, section 5.6.6.2).
//!
//! ```text
//! task management:   type u32 = 0 | subtype u32 | lun [8] | id u64       ->  response u8
//! notifications:     type u32 = 1, 2 | lun [8] | event_requested u32     ->  event_actual u32 | response u8
//! ```

use forebay_scsi::{TaskFunction, TaskResponse};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::{BadTarget, PartWriter, ScsiAddress, ScsiResponse, ScsiRingViolation};
use crate::block::{buffer_len, copy_from};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;

/// Values of `type`.
mod control_type {
    /// Task management function.
    pub(super) const TASK_MANAGEMENT: u32 = 0;
    /// Query of asynchronous notifications.
    pub(super) const NOTIFICATION_QUERY: u32 = 1;
    /// Subscription to asynchronous notifications.
    pub(super) const NOTIFICATION_SUBSCRIBE: u32 = 2;
}

/// Values of `subtype`; 2 is CLEAR ACA, which is rejected as unknown ones are.
mod task_subtype {
    pub(super) const ABORT_TASK: u32 = 0;
    pub(super) const ABORT_TASK_SET: u32 = 1;
    pub(super) const CLEAR_TASK_SET: u32 = 3;
    pub(super) const NEXUS_RESET: u32 = 4;
    pub(super) const LOGICAL_UNIT_RESET: u32 = 5;
    pub(super) const QUERY_TASK: u32 = 6;
    pub(super) const QUERY_TASK_SET: u32 = 7;
}

#[derive(Debug, Clone, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct VirtioScsiTaskManagement {
    kind: U32,
    subtype: U32,
    lun: [u8; 8],
    id: U64,
}

#[derive(Debug, Clone, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct VirtioScsiNotification {
    kind: U32,
    lun: [u8; 8],
    event_requested: U32,
}

/// Bytes of `event_actual`, which are zero: no notification is supported.
const EVENT_ACTUAL_LEN: usize = 4;

impl From<TaskResponse> for ScsiResponse {
    fn from(response: TaskResponse) -> Self {
        match response {
            TaskResponse::Complete | TaskResponse::NoTask => ScsiResponse::Ok,
            TaskResponse::Succeeded => ScsiResponse::FunctionSucceeded,
            TaskResponse::NoUnit => ScsiResponse::IncorrectLun,
            TaskResponse::Rejected => ScsiResponse::FunctionRejected,
        }
    }
}

/// Action that a control request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScsiControlAction {
    /// Execution of a task management function.
    Manage(TaskFunction),
    /// Response at once.
    Respond(ScsiResponse),
}

/// Request of the control queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiControlRequest {
    /// Action, after which [`respond`](Self::respond) is called.
    pub action: ScsiControlAction,
    /// Bytes before the response byte.
    response_at: usize,
}

impl ScsiControlRequest {
    /// Parses the control request in a buffer.
    ///
    /// # Errors
    /// When the buffer has no space for the response.
    pub fn parse(readable: &[GuestPart], writable: &[GuestPart]) -> Result<Self, ScsiRingViolation> {
        let space = buffer_len(writable);
        // Its longest form: the type is read once with the rest, so that both are of the same request.
        let mut bytes = [0; size_of::<VirtioScsiTaskManagement>()];
        let len = copy_from(readable, 0, &mut bytes);
        let kind = (len >= 4).then(|| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        let (response_at, action) = match kind {
            Some(control_type::TASK_MANAGEMENT) => (0, task_management(&bytes[..len])),
            Some(control_type::NOTIFICATION_QUERY | control_type::NOTIFICATION_SUBSCRIBE) => {
                (EVENT_ACTUAL_LEN, notification(&bytes[..len]))
            }
            // In all known requests, the response is the last byte.
            _ => {
                let last = space.saturating_sub(1).min(EVENT_ACTUAL_LEN as u64) as usize;
                (last, Err(ScsiResponse::Failure))
            }
        };
        let needed = response_at as u64 + 1;
        if space < needed {
            return Err(ScsiRingViolation::NoControlResponse { len: space, needed });
        }
        let action = action.map_or_else(ScsiControlAction::Respond, ScsiControlAction::Manage);
        Ok(Self { action, response_at })
    }

    /// Writes the response to the request's buffer, and then logs the written pages; returns the number of bytes for
    /// the used ring.
    pub fn respond(&self, writable: &[GuestPart], response: ScsiResponse, log: Option<&DirtyLog>) -> u32 {
        let mut bytes = [0; EVENT_ACTUAL_LEN + 1];
        bytes[self.response_at] = response as u8;
        let used = PartWriter::new(writable).put(&bytes[..=self.response_at]);
        if let Some(log) = log {
            log.mark_parts(writable, used as u64);
        }
        used as u32
    }
}

impl From<BadTarget> for ScsiResponse {
    fn from(_: BadTarget) -> Self {
        ScsiResponse::BadTarget
    }
}

/// Parses a task management function.
fn task_management(bytes: &[u8]) -> Result<TaskFunction, ScsiResponse> {
    let request = VirtioScsiTaskManagement::read_from_bytes(bytes).map_err(|_| ScsiResponse::Failure)?;
    let (tag, subtype) = (request.id.get(), request.subtype.get());
    if subtype == task_subtype::NEXUS_RESET {
        ScsiAddress::check_target(&request.lun)?;
        return Ok(TaskFunction::NexusReset);
    }
    let lun = ScsiAddress::parse(&request.lun)?;
    Ok(match subtype {
        task_subtype::ABORT_TASK => TaskFunction::AbortTask { lun: Some(lun), tag },
        task_subtype::ABORT_TASK_SET => TaskFunction::AbortTaskSet(lun),
        task_subtype::CLEAR_TASK_SET => TaskFunction::ClearTaskSet(lun),
        task_subtype::LOGICAL_UNIT_RESET => TaskFunction::LogicalUnitReset(lun),
        task_subtype::QUERY_TASK => TaskFunction::QueryTask { lun: Some(lun), tag },
        task_subtype::QUERY_TASK_SET => TaskFunction::QueryTaskSet(lun),
        _ => return Err(ScsiResponse::FunctionRejected),
    })
}

/// Checks a query or subscription: no notification is supported, so both end at once.
fn notification(bytes: &[u8]) -> Result<TaskFunction, ScsiResponse> {
    let (request, _) = VirtioScsiNotification::read_from_prefix(bytes).map_err(|_| ScsiResponse::Failure)?;
    ScsiAddress::parse(&request.lun)?;
    Err(ScsiResponse::Ok)
}
