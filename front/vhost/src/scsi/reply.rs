//! Responses to commands (VIRTIO 1.2, section 5.6.6.1).
//!
//! ```text
//! sense_len u32 | residual u32 | status_qualifier u16 | status u8 | response u8 | sense data [sense_size] | Data-In
//! ```

use forebay_block::BufList;
use forebay_scsi::{ScsiCompletion, status};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{Immutable, IntoBytes};

use super::{PartWriter, SENSE_SIZE_MAX, ScsiResponse};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;

/// Bytes of a response before the sense data.
pub(super) const HEADER_LEN: usize = size_of::<VirtioScsiResponseHeader>();

#[derive(Debug, Clone, IntoBytes, Immutable)]
#[repr(C)]
struct VirtioScsiResponseHeader {
    sense_len: U32,
    residual: U32,
    status_qualifier: U16,
    status: u8,
    response: u8,
}

/// Outcome of a command, for the driver.
#[derive(Debug, Clone)]
pub struct ScsiOutcome {
    /// Response of the device.
    pub response: ScsiResponse,
    /// SCSI status, if the response is [`ScsiResponse::Ok`].
    pub status: u8,
    /// Sense data; what does not fit is truncated.
    pub sense: Vec<u8>,
    /// Data-In.  If the driver has less space, the response becomes [`ScsiResponse::Overrun`].
    pub data: BufList,
}

impl ScsiOutcome {
    /// Creates the outcome of a command that ends without a SCSI status.
    pub fn failed(response: ScsiResponse) -> Self {
        Self { response, status: status::GOOD, sense: Vec::new(), data: BufList::new() }
    }

    /// Creates the outcome of a command that the session has completed; returns the front's note, too.
    pub fn of<N>(done: ScsiCompletion<N>) -> (N, Self) {
        let (status, sense) = (done.status(), done.sense());
        let data = done.result.unwrap_or_default();
        (done.note, Self { response: ScsiResponse::Ok, status, sense, data })
    }

    /// Returns whether the command has transferred its data.
    fn is_good(&self) -> bool {
        self.response == ScsiResponse::Ok && self.status == status::GOOD
    }
}

/// Space for the response to a command, and the lengths of its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiReply {
    /// Bytes of the sense data, at most [`SENSE_SIZE_MAX`].
    pub(super) sense_space: usize,
    /// Bytes of Data-Out that the driver sends.
    pub(super) data_out: u64,
    /// Bytes of Data-In that the driver has space for.
    pub(super) data_in: u64,
    /// Bytes of Data-Out that the command takes, if it succeeds.
    pub(super) taken: u64,
}

impl ScsiReply {
    /// Returns the bytes of Data-Out that the driver sends.
    pub fn data_out(&self) -> u64 {
        self.data_out
    }

    /// Returns the bytes of Data-In that the driver has space for.
    pub fn data_in(&self) -> u64 {
        self.data_in
    }

    /// Writes the response and the data of a command to its buffer, and then logs the written pages; returns the number
    /// of bytes for the used ring.
    ///
    /// The residual counts what was not transferred: all data of a command that failed.  Space behind the sense data is
    /// zeroed, since the bytes of the used ring are counted from the beginning of the buffer (section 2.7.8.2).
    pub fn respond(&self, writable: &[GuestPart], outcome: &ScsiOutcome, log: Option<&DirtyLog>) -> u32 {
        let written = if outcome.is_good() { self.data_in.min(outcome.data.len() as u64) } else { 0 };
        let transferred = if outcome.is_good() { self.taken + written } else { 0 };
        let residual = (self.data_out + self.data_in).saturating_sub(transferred);
        let overrun = outcome.is_good() && outcome.data.len() as u64 > self.data_in;
        let response = if overrun { ScsiResponse::Overrun } else { outcome.response };
        let sense = &outcome.sense[..outcome.sense.len().min(self.sense_space)];
        let header = VirtioScsiResponseHeader {
            sense_len: (sense.len() as u32).into(),
            residual: u32::try_from(residual).unwrap_or(u32::MAX).into(),
            status_qualifier: 0.into(),
            status: outcome.status,
            response: response as u8,
        };
        let mut bytes = [0; HEADER_LEN + SENSE_SIZE_MAX as usize];
        bytes[..HEADER_LEN].copy_from_slice(header.as_bytes());
        bytes[HEADER_LEN..][..sense.len()].copy_from_slice(sense);
        let mut to = PartWriter::new(writable);
        let mut used = to.put(&bytes[..HEADER_LEN + self.sense_space]) as u64;
        let mut left = written;
        for piece in outcome.data.parts() {
            let len = left.min(piece.len() as u64);
            used += to.put(&piece[..len as usize]) as u64;
            left -= len;
            if left == 0 {
                break;
            }
        }
        if let Some(log) = log {
            log.mark_parts(writable, used);
        }
        u32::try_from(used).unwrap_or(u32::MAX)
    }
}
