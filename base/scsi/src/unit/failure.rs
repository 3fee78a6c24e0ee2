//! Failure of a command, and what hosts are told of device errors.

use forebay_block::{Error, ErrorKind};

use crate::sense::{Sense, code, key};
use crate::status;

/// Command failure: SCSI status, with sense data if there is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScsiFailure {
    /// SCSI status.
    pub status: u8,
    /// Sense data, if the status is CHECK CONDITION.
    pub sense: Option<Sense>,
}

impl From<Sense> for ScsiFailure {
    fn from(sense: Sense) -> Self {
        Self { status: status::CHECK_CONDITION, sense: Some(sense) }
    }
}

impl ScsiFailure {
    /// Reservation conflict.
    pub const CONFLICT: ScsiFailure = ScsiFailure { status: status::RESERVATION_CONFLICT, sense: None };
    /// Unit temporarily unable to accept the command.
    pub const BUSY: ScsiFailure = ScsiFailure { status: status::BUSY, sense: None };

    /// Converts a device error to SCSI status and sense data.
    pub fn of(error: &Error, writing: bool) -> Self {
        let sense = match error.kind() {
            ErrorKind::NoSpace => Sense::new(key::DATA_PROTECT, code::NO_SPACE),
            ErrorKind::OutOfRange => Sense::illegal(code::OUT_OF_RANGE),
            ErrorKind::ReadOnly | ErrorKind::Denied => Sense::new(key::DATA_PROTECT, code::WRITE_PROTECTED),
            ErrorKind::Mismatch(at) => Sense::new(key::MISCOMPARE, code::MISCOMPARE).with_info(at),
            ErrorKind::Io | ErrorKind::Corrupt if writing => Sense::new(key::MEDIUM_ERROR, code::WRITE_ERROR),
            ErrorKind::Io | ErrorKind::Corrupt => Sense::new(key::MEDIUM_ERROR, code::READ_ERROR),
            ErrorKind::TimedOut => Sense::new(key::ABORTED_COMMAND, code::NONE),
            ErrorKind::NotFound | ErrorKind::Fenced => Sense::new(key::NOT_READY, code::NOT_READY),
            ErrorKind::Unsupported | ErrorKind::Invalid => Sense::illegal(code::FIELD_IN_CDB),
            // Hosts retry a busy command, and by then the daemon is back.
            ErrorKind::Busy | ErrorKind::ShuttingDown => return Self::BUSY,
            ErrorKind::Exists | ErrorKind::Guard => Sense::new(key::HARDWARE_ERROR, code::INTERNAL),
        };
        sense.into()
    }
}
