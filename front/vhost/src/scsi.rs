//! Formats of a virtio-scsi device (VIRTIO 1.2, section 5.6): configuration, commands, control requests and events.
//!
//! ```text
//! features, ScsiConfig    what the guest sees                            scsi/config.rs
//! ScsiAddress             LUN of a request                               scsi/address.rs
//! ScsiRequest             command that a buffer contains                 scsi/request.rs
//! ScsiReply, ScsiOutcome  response to a command, with its data           scsi/reply.rs
//! ScsiControlRequest      task management function, and its response     scsi/control.rs
//! ScsiEvents              changes of units, for the event queue          scsi/events.rs
//! ```
//!
//! The device has one target, number 0.  Commands are executed by a [`ScsiSession`](forebay_scsi::ScsiSession).
//!
//! A guest may change its memory at any time.  So each byte of a buffer is read once, and data is copied out before it
//! is used: what is checked is what is executed.

mod address;
mod config;
mod control;
mod events;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use address::{BadTarget, ScsiAddress};
pub use config::{SCSI_CONFIG_LEN, ScsiConfig, ScsiConfigRefusal, features};
pub use control::{ScsiControlAction, ScsiControlRequest};
pub use events::{EVENTS_PENDING_MAX, ScsiEvents};
pub use reply::{ScsiOutcome, ScsiReply};
pub use request::{ScsiRequest, ScsiRequestRefusal, ScsiTaskAttribute};

use crate::memory::GuestPart;

/// Index of the control queue (section 5.6.2).
pub const CONTROL_QUEUE: usize = 0;
/// Index of the event queue.
pub const EVENT_QUEUE: usize = 1;
/// Index of the first request queue.
pub const FIRST_REQUEST_QUEUE: usize = 2;

/// Maximum data descriptors of a command, as announced: fits a ring of 128 with the header and the response.
pub const SEGMENTS_MAX: u32 = 126;
/// Maximum sectors of a command, as announced: the largest multiple of 4 KiB that fits the 16 bits that some drivers
/// keep of it.
pub const SECTORS_MAX: u32 = 65_528;
/// Maximum commands in flight for a unit, as announced.
pub const COMMANDS_PER_UNIT: u32 = 128;
/// Default size of the sense data, which a reset restores (section 5.6.4).
pub const SENSE_SIZE: u32 = 96;
/// Maximum size of the sense data: SCSI has none that is longer (SPC-4, section 4.5.1).
pub const SENSE_SIZE_MAX: u32 = 252;
/// Default size of the CDB, which a reset restores.
pub const CDB_SIZE: u32 = 32;
/// Minimum size of the CDB: that of the shortest commands.
pub const CDB_SIZE_MIN: u32 = 6;
/// Maximum size of the CDB: SCSI has none that is longer (SPC-4, section 4.2).
pub const CDB_SIZE_MAX: u32 = 260;
/// Bytes of an event.
pub const EVENT_LEN: usize = 16;

const _: () = assert!(SECTORS_MAX <= forebay_scsi::inquiry::TRANSFER_BLOCKS_MAX && forebay_scsi::BLOCK == 512);

/// Feature bits of the device (section 5.6.3).
pub mod feature {
    /// Command has data in both directions.  Not offered.
    pub const INOUT: u64 = 1 << 0;
    /// Device reports added and removed units.
    pub const HOTPLUG: u64 = 1 << 1;
    /// Device reports changed parameters of units.
    pub const CHANGE: u64 = 1 << 2;
    /// Commands have fields for protection information.  Not offered.
    pub const T10_PI: u64 = 1 << 3;
}

/// Value of the response byte (sections 5.6.6.1 and 5.6.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ScsiResponse {
    /// Command was completed, with a SCSI status; FUNCTION COMPLETE of task management.
    Ok = 0,
    /// CDB requires more data than the buffers have.
    Overrun = 1,
    /// Command was aborted by ABORT TASK or ABORT TASK SET.
    Aborted = 2,
    /// Target does not exist.
    BadTarget = 3,
    /// Command was aborted by a reset.
    Reset = 4,
    /// Failure for which a retry on the same path is likely to succeed.
    Busy = 5,
    /// Failure of the connection with the target.
    TransportFailure = 6,
    /// Failure of the target, on all paths.
    TargetFailure = 7,
    /// Failure of the I_T nexus; another path may succeed.
    NexusFailure = 8,
    /// Other failure of the device or the driver.
    Failure = 9,
    /// FUNCTION SUCCEEDED of task management.
    FunctionSucceeded = 10,
    /// FUNCTION REJECTED of task management.
    FunctionRejected = 11,
    /// INCORRECT LOGICAL UNIT NUMBER of task management.
    IncorrectLun = 12,
}

/// Buffer that cannot be answered: the device stops and needs a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScsiRingViolation {
    /// Command without space for the fixed part of the response.
    #[error("SCSI command has {0} bytes for its response, whose fixed part has 12")]
    NoCommandResponse(u64),
    /// Control request without space for its response.
    #[error("SCSI control request has {len} bytes for its response, which has {needed}")]
    NoControlResponse {
        /// Bytes of space.
        len: u64,
        /// Bytes of the response.
        needed: u64,
    },
    /// Buffer of the event queue that is too short for an event.
    #[error("SCSI event buffer has {0} bytes; an event has {EVENT_LEN}")]
    EventBuffer(u64),
}

/// Position in the writable parts of a buffer, up to which bytes have been written.
struct PartWriter<'a> {
    parts: &'a [GuestPart],
    /// Bytes of the first of them that are behind the position.
    at: usize,
}

impl<'a> PartWriter<'a> {
    fn new(parts: &'a [GuestPart]) -> Self {
        Self { parts, at: 0 }
    }

    /// Writes bytes; returns their number, fewer at the end of the buffer.
    fn put(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len()
            && let Some(part) = self.parts.first()
        {
            let len = (part.area.len() - self.at).min(bytes.len() - done);
            part.area.write(self.at, &bytes[done..done + len]);
            self.at += len;
            done += len;
            if self.at == part.area.len() {
                self.parts = &self.parts[1..];
                self.at = 0;
            }
        }
        done
    }
}
