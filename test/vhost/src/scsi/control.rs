//! Requests of the control queue (VIRTIO 1.2, 5.6.6.2) and events of the event queue (5.6.6.3).

use super::VirtioScsiLun;
use crate::buffers::{UNWRITTEN, VirtqBuffers};

/// Types of control requests.
#[allow(missing_docs)]
pub mod control_type {
    pub const TASK_MANAGEMENT: u32 = 0;
    pub const ASYNC_QUERY: u32 = 1;
    pub const ASYNC_SUBSCRIBE: u32 = 2;
}

/// Task management functions.
#[allow(missing_docs)]
pub mod task_function {
    pub const ABORT_TASK: u32 = 0;
    pub const ABORT_TASK_SET: u32 = 1;
    pub const CLEAR_ACA: u32 = 2;
    pub const CLEAR_TASK_SET: u32 = 3;
    pub const I_T_NEXUS_RESET: u32 = 4;
    pub const LOGICAL_UNIT_RESET: u32 = 5;
    pub const QUERY_TASK: u32 = 6;
    pub const QUERY_TASK_SET: u32 = 7;
}

/// Asynchronous notifications of units, as masks.
#[allow(missing_docs)]
pub mod notification {
    pub const OPERATIONAL_CHANGE: u32 = 2;
    pub const POWER_MANAGEMENT: u32 = 4;
    pub const EXTERNAL_REQUEST: u32 = 8;
    pub const MEDIA_CHANGE: u32 = 16;
    pub const MULTI_HOST: u32 = 32;
    pub const DEVICE_BUSY: u32 = 64;
}

/// Types of events.
#[allow(missing_docs)]
pub mod event {
    pub const NO_EVENT: u32 = 0;
    pub const TRANSPORT_RESET: u32 = 1;
    pub const ASYNC_NOTIFY: u32 = 2;
    pub const PARAM_CHANGE: u32 = 3;
    /// Events were lost for lack of buffers: a flag beside the type.
    pub const EVENTS_MISSED: u32 = 0x8000_0000;
}

/// Reasons of a transport reset.
#[allow(missing_docs)]
pub mod reset_reason {
    pub const HARD: u32 = 0;
    pub const RESCAN: u32 = 1;
    pub const REMOVED: u32 = 2;
}

/// Bytes of an event.
pub const EVENT_SIZE: u32 = 16;

/// Control request, as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiHostControl {
    /// Bytes that the device reads.
    pub out: Vec<u8>,
    /// Number of bytes of the reply, the last of which is the response.
    pub read: u32,
}

impl ScsiHostControl {
    /// Creates a task management function; `tag` matters to those on one task.
    pub fn task_management(function: u32, lun: VirtioScsiLun, tag: u64) -> Self {
        let mut out: Vec<u8> =
            [control_type::TASK_MANAGEMENT, function].into_iter().flat_map(u32::to_le_bytes).collect();
        out.extend(lun);
        out.extend(tag.to_le_bytes());
        Self { out, read: 1 }
    }

    /// Creates a query of asynchronous notifications.
    pub fn query(lun: VirtioScsiLun, notifications: u32) -> Self {
        Self::asynchronous(control_type::ASYNC_QUERY, lun, notifications)
    }

    /// Creates a subscription to asynchronous notifications.
    pub fn subscribe(lun: VirtioScsiLun, notifications: u32) -> Self {
        Self::asynchronous(control_type::ASYNC_SUBSCRIBE, lun, notifications)
    }

    fn asynchronous(kind: u32, lun: VirtioScsiLun, notifications: u32) -> Self {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend(lun);
        out.extend(notifications.to_le_bytes());
        Self { out, read: 5 }
    }

    /// Returns the request as bytes.
    pub fn buffers(&self) -> VirtqBuffers {
        VirtqBuffers::new(&self.out, self.read)
    }
}

/// Reply to a control request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiHostControlReply {
    /// Number of the chain.
    pub id: u16,
    /// Response; [`UNWRITTEN`] if the device did not write it.
    pub response: u8,
    /// Asynchronous notifications that the unit supports, in the reply to a query or subscription.
    pub notifications: Option<u32>,
}

impl ScsiHostControlReply {
    /// Decodes a reply.
    pub fn decode(id: u16, bytes: &[u8]) -> Self {
        let response = bytes.last().copied().unwrap_or(UNWRITTEN);
        let notifications = bytes.first_chunk().filter(|_| bytes.len() == 5).map(|word| u32::from_le_bytes(*word));
        Self { id, response, notifications }
    }
}

/// Event that the device has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiHostEvent {
    /// Type, and the flag of missed events.
    pub event: u32,
    /// Address of the unit.
    pub lun: VirtioScsiLun,
    /// Reason of a reset, notifications, or additional sense code and qualifier.
    pub reason: u32,
}

impl ScsiHostEvent {
    /// Decodes an event; `None` if it is too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self { event: word(0)?, lun: bytes.get(4..12)?.try_into().ok()?, reason: word(12)? })
    }

    /// Returns the type.
    pub fn kind(&self) -> u32 {
        self.event & !event::EVENTS_MISSED
    }

    /// Returns whether events before this one were lost.
    pub fn has_missed(&self) -> bool {
        self.event & event::EVENTS_MISSED != 0
    }

    /// Returns additional sense code and qualifier of a parameter change, such as 0x2A09; `None` for another event.
    pub fn changed_parameter(&self) -> Option<u16> {
        let [code, qualifier, ..] = self.reason.to_le_bytes();
        (self.kind() == event::PARAM_CHANGE).then(|| u16::from_be_bytes([code, qualifier]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::unit_address;

    #[test]
    fn control_requests_have_their_fields() {
        let abort = ScsiHostControl::task_management(task_function::QUERY_TASK, unit_address(0, 3), 0x0102);
        assert_eq!(abort.out[..12], [0, 0, 0, 0, 6, 0, 0, 0, 1, 0, 0x40, 3]);
        assert_eq!(abort.out[12..], [0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        let query = ScsiHostControl::query(unit_address(0, 3), notification::MEDIA_CHANGE | notification::DEVICE_BUSY);
        assert_eq!(query.out, [1, 0, 0, 0, 1, 0, 0x40, 3, 0, 0, 0, 0, 0x50, 0, 0, 0]);
        assert_eq!((abort.read, query.read), (1, 5));
        assert_eq!(ScsiHostControl::subscribe(unit_address(0, 0), 0).out[0], 2);
    }

    #[test]
    fn replies_are_decoded() {
        let reply = ScsiHostControlReply::decode(7, &[10]);
        assert_eq!(reply, ScsiHostControlReply { id: 7, response: 10, notifications: None });
        assert_eq!(ScsiHostControlReply::decode(7, &[2, 1, 0, 0, 3]).notifications, Some(0x0102));
        assert_eq!(ScsiHostControlReply::decode(7, &[]).response, UNWRITTEN);
    }

    #[test]
    fn events_are_decoded() {
        let bytes = [3, 0, 0, 0x80, 1, 0, 0x40, 9, 0, 0, 0, 0, 0x2A, 0x09, 0, 0];
        let event = ScsiHostEvent::decode(&bytes).expect("long enough");
        assert!(event.has_missed());
        assert_eq!((event.kind(), event.lun, event.changed_parameter()), (3, unit_address(0, 9), Some(0x2A09)));
        assert_eq!(ScsiHostEvent { event: event::TRANSPORT_RESET, ..event }.changed_parameter(), None);
        assert_eq!(ScsiHostEvent::decode(&bytes[..15]), None);
    }
}
