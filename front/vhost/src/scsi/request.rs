//! Commands (VIRTIO 1.2, section 5.6.6.1).
//!
//! ```text
//! readable by the device:   lun [8] | id u64 | task_attr u8 | prio u8 | crn u8 | cdb [cdb_size] | Data-Out
//! writable by the device:   response (reply.rs) | Data-In
//! ```
//!
//! The borders of descriptors mean nothing (section 2.7.4).  Commands are matched with their data here, because SCSI
//! itself knows only how much data a CDB names:
//!
//! | driver's buffer | outcome |
//! |---|---|
//! | Data-Out shorter than the CDB requires | OVERRUN, not executed |
//! | space for Data-In shorter than a READ returns | OVERRUN, not executed |
//! | space for Data-In shorter than the data of another command | OVERRUN, with as much data as fits |
//! | longer | residual |
//! | both Data-Out and space for Data-In | FAILURE |

use forebay_scsi::{Lun, ReadyScsiCommand};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::reply::HEADER_LEN;
use super::{BadTarget, ScsiAddress, ScsiConfig, ScsiOutcome, ScsiReply, ScsiResponse, ScsiRingViolation};
use crate::block::{PayloadPools, buffer_len, copy_from, gather};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;

/// Bytes of the CDB that are kept: no supported command is longer.
const CDB_KEPT: usize = 16;
/// Bytes before the CDB.
const CDB_AT: u64 = (size_of::<VirtioScsiCommandHeader>() - CDB_KEPT) as u64;

#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct VirtioScsiCommandHeader {
    lun: [u8; 8],
    id: U64,
    task_attr: u8,
    prio: u8,
    crn: u8,
    cdb: [u8; CDB_KEPT],
}

/// Task attribute of a command (SAM-5, section 8.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScsiTaskAttribute {
    /// SIMPLE, which other values than the known ones stand for, too.
    Simple,
    /// ORDERED: begins after all earlier commands have ended, and before all later ones.
    Ordered,
    /// HEAD OF QUEUE.
    HeadOfQueue,
    /// ACA, for which no unit has a condition.
    Aca,
}

impl From<u8> for ScsiTaskAttribute {
    fn from(task_attr: u8) -> Self {
        match task_attr {
            1 => ScsiTaskAttribute::Ordered,
            2 => ScsiTaskAttribute::HeadOfQueue,
            3 => ScsiTaskAttribute::Aca,
            _ => ScsiTaskAttribute::Simple,
        }
    }
}

/// Reason for which a command is answered without a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScsiRequestRefusal {
    /// Buffer shorter than a command.
    #[error("SCSI command of {len} bytes is shorter than its header and CDB of {needed}")]
    HeaderShort {
        /// Bytes of the readable parts.
        len: u64,
        /// Bytes of header and CDB.
        needed: u64,
    },
    /// Space for a response whose sense data would be truncated by the end of the buffer.
    #[error("SCSI command has {len} bytes for its response, which has {needed} with the sense data")]
    ResponseShort {
        /// Bytes of the writable parts.
        len: u64,
        /// Bytes of the response.
        needed: u64,
    },
    /// Address without a target.
    #[error(transparent)]
    Target(#[from] BadTarget),
    /// Data in both directions, which needs a feature that is not offered.
    #[error("SCSI command has {data_out} bytes of Data-Out and space for {data_in} bytes of Data-In")]
    Bidirectional {
        /// Bytes of Data-Out.
        data_out: u64,
        /// Bytes of space for Data-In.
        data_in: u64,
    },
}

impl ScsiRequestRefusal {
    /// Returns the response to the command.
    pub fn response(&self) -> ScsiResponse {
        match self {
            ScsiRequestRefusal::Target(_) => ScsiResponse::BadTarget,
            _ => ScsiResponse::Failure,
        }
    }
}

/// Command of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiRequest {
    /// Unit that it is for; [`Lun::Foreign`] if there is no such target.
    pub lun: Lun,
    /// Tag by which task management functions name it.
    pub id: u64,
    /// Task attribute.
    pub attribute: ScsiTaskAttribute,
    /// First bytes of the CDB; a shorter one is padded with zeroes.
    pub cdb: [u8; CDB_KEPT],
    /// Reason for which it is not executed; the other fields may then be incomplete.
    pub refusal: Option<ScsiRequestRefusal>,
    /// Space for the response: all that is needed of the request once the command has been submitted.
    pub reply: ScsiReply,
    /// Bytes before Data-Out.
    data_at: u64,
}

impl ScsiRequest {
    /// Parses the command in a buffer.
    ///
    /// # Errors
    /// When the buffer has no space for the fixed part of a response.  Everything else that is wrong is a
    /// [`refusal`](Self::refusal).
    pub fn parse(
        readable: &[GuestPart],
        writable: &[GuestPart],
        config: &ScsiConfig,
    ) -> Result<Self, ScsiRingViolation> {
        let cdb_size = u64::from(config.cdb_size());
        let (len, space) = (buffer_len(readable), buffer_len(writable));
        let after_header = space.checked_sub(HEADER_LEN as u64).ok_or(ScsiRingViolation::NoCommandResponse(space))?;
        let sense_space = after_header.min(config.sense_size().into());
        let mut header = VirtioScsiCommandHeader::new_zeroed();
        let kept = CDB_AT as usize + CDB_KEPT.min(cdb_size as usize);
        copy_from(readable, 0, &mut header.as_mut_bytes()[..kept]);
        let data_at = CDB_AT + cdb_size;
        let (data_out, data_in) = (len.saturating_sub(data_at), after_header - sense_space);
        let address = ScsiAddress::parse(&header.lun);
        let refusal = if sense_space < config.sense_size().into() {
            let needed = HEADER_LEN as u64 + u64::from(config.sense_size());
            Some(ScsiRequestRefusal::ResponseShort { len: space, needed })
        } else if len < data_at {
            Some(ScsiRequestRefusal::HeaderShort { len, needed: data_at })
        } else if data_out > 0 && data_in > 0 {
            Some(ScsiRequestRefusal::Bidirectional { data_out, data_in })
        } else {
            address.err().map(ScsiRequestRefusal::Target)
        };
        Ok(Self {
            lun: address.unwrap_or(Lun::Foreign),
            id: header.id.get(),
            attribute: header.task_attr.into(),
            cdb: header.cdb,
            refusal,
            reply: ScsiReply { sense_space: sense_space as usize, data_out, data_in, taken: 0 },
            data_at,
        })
    }

    /// Returns whether the command waits for all earlier ones, and later ones for it.
    pub fn is_ordered(&self) -> bool {
        self.attribute == ScsiTaskAttribute::Ordered
    }

    /// Returns the command without its Data-Out, which [`gather`](Self::gather) adds once there is memory for it.
    ///
    /// # Errors
    /// Outcome of a command that is not executed.
    pub fn command(&self) -> Result<ReadyScsiCommand, ScsiOutcome> {
        if let Some(refusal) = &self.refusal {
            return Err(ScsiOutcome::failed(refusal.response()));
        }
        let ScsiReply { data_out, data_in, .. } = self.reply;
        let command = ReadyScsiCommand::new(self.lun, &self.cdb, data_out);
        if command.takes().unwrap_or(0) > data_out || command.read_bytes() as u64 > data_in {
            return Err(ScsiOutcome::failed(ScsiResponse::Overrun));
        }
        Ok(command)
    }

    /// Returns the bytes of Data-Out that [`gather`](Self::gather) copies.
    pub fn data_len(&self, command: &ReadyScsiCommand) -> u64 {
        command.wants(self.reply.data_out) as u64
    }

    /// Copies the Data-Out of a command out of the guest's memory.
    pub fn gather(&mut self, command: &mut ReadyScsiCommand, readable: &[GuestPart], pools: &PayloadPools) {
        let len = self.data_len(command);
        if len > 0 {
            command.data = gather(readable, self.data_at, len, pools);
        }
        self.reply.taken = command.data.len() as u64;
    }

    /// Returns the command with its Data-Out.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub fn ready_command(
        &mut self,
        readable: &[GuestPart],
        pools: &PayloadPools,
    ) -> Result<ReadyScsiCommand, ScsiOutcome> {
        let mut command = self.command()?;
        self.gather(&mut command, readable, pools);
        Ok(command)
    }

    /// Writes the response, as [`ScsiReply::respond`].
    pub fn respond(&self, writable: &[GuestPart], outcome: &ScsiOutcome, log: Option<&DirtyLog>) -> u32 {
        self.reply.respond(writable, outcome, log)
    }
}
