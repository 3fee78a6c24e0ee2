//! Tasks of a session: SCSI commands, task management functions, and the logout.

use forebay_reactor::Instant;

use crate::stats::ScsiCommandKind;

/// Task that the session has not responded to.
#[derive(Debug)]
pub(super) enum IscsiTask {
    /// SCSI command.
    Command(PendingScsiCommand),
    /// Task management function, by its initiator task tag.
    Management(u32),
    /// Logout request, by its initiator task tag.
    Logout(u32),
}

/// SCSI command that the session has not responded to.
#[derive(Debug)]
pub(super) struct PendingScsiCommand {
    /// Initiator task tag.
    pub(super) itt: u32,
    pub(super) info: CommandInfo,
    /// Occupies a place in the command window.
    pub(super) numbered: bool,
    /// Bytes of memory accounted to it.
    pub(super) held: usize,
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
