//! SCSI disks (SAM-5, SPC-4, SBC-3) on block devices, for every transport that carries SCSI commands.
//!
//! A [`ScsiTarget`] has [`Unit`]s, and a [`ScsiSession`] is the I_T
//! nexus of one host with it: the front passes commands and task management functions to the session, and implements
//! [`ScsiTransport`] for their outcomes.  Formats ([`cdb`], [`sense`], [`inquiry`], ...) are
//! decided without I/O. `docs/design/scsi.md` describes states and invariants.

pub mod cdb;
pub mod copy;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod inquiry;
mod locks;
pub mod log;
pub mod lun;
pub mod mode;
pub mod naming;
pub mod opcodes;
pub mod ports;
pub mod reserve;
pub mod sense;
pub mod session;
pub mod signal;
pub mod stats;
pub mod target;
pub mod unit;

pub use lun::Lun;
pub use naming::ScsiNaming;
pub use ports::{AccessState, TargetPort, TargetPorts, TargetPortsError};
pub use session::{
    OrphanedScsiTasks, ReadyScsiCommand, ScsiCompletion, ScsiSession, ScsiSessionSpec, ScsiTask, ScsiTransport,
    ScsiUnitEvent, TaskFunction, TaskResponse,
};
pub use signal::NexusSignal;
pub use target::{AddError, LunOutOfRange, ScsiTarget, ScsiTargetSpec, UnitCatalog, UnitSnapshot};
pub use unit::{LogicalUnit, LogicalUnits, PoolSpace, ScsiFailure, ScsiResult, Unit, UnitDevices, UnitSpec};

/// SCSI status (SAM-5, section 5.3).
pub mod status {
    /// Command completed successfully.
    pub const GOOD: u8 = 0x00;
    /// Command failed; sense data is available.
    pub const CHECK_CONDITION: u8 = 0x02;
    /// Unit temporarily unable to accept the command.
    pub const BUSY: u8 = 0x08;
    /// Conflict with a reservation of another initiator.
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    /// Task set full: no resources for another command.
    pub const TASK_SET_FULL: u8 = 0x28;
    /// Command aborted by another I_T nexus.
    pub const TASK_ABORTED: u8 = 0x40;
}

/// Logical block size in bytes.
pub const BLOCK: u32 = 512;
/// Logical blocks per physical block exponent: 2^3 blocks, 4 KiB, are written without read-modify-write.
pub const PHYSICAL_EXPONENT: u8 = 3;

/// Appends to `out` until it is `len` bytes long.
pub(crate) fn pad(out: &mut Vec<u8>, len: usize) {
    if out.len() < len {
        out.resize(len, 0);
    }
}

/// Reads a big-endian `u16` at `at`; 0 past the end.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |part| u16::from_be_bytes(part.try_into().expect("two bytes")))
}

/// Reads a big-endian `u32` at `at`; 0 past the end.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |part| u32::from_be_bytes(part.try_into().expect("four bytes")))
}

/// Reads a big-endian `u64` at `at`; 0 past the end.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |part| u64::from_be_bytes(part.try_into().expect("eight bytes")))
}
