//! SCSI as far as it needs no device: commands, sense data, and what a unit says of itself (SPC-4, SBC-3).

pub mod cdb;
pub mod copy;
pub mod inquiry;
pub mod log;
pub mod mode;
pub mod opcodes;
pub mod reserve;
pub mod sense;

/// SCSI status (SAM-5, section 5.3).
pub mod status {
    /// Done.
    pub const GOOD: u8 = 0x00;
    /// There is sense data.
    pub const CHECK_CONDITION: u8 = 0x02;
    /// Not now.
    pub const BUSY: u8 = 0x08;
    /// Somebody else has a reservation.
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    /// More commands than the unit takes.
    pub const TASK_SET_FULL: u8 = 0x28;
    /// Another initiator ended it.
    pub const TASK_ABORTED: u8 = 0x40;
}

/// Bytes a logical block.
pub const BLOCK: u32 = 512;
/// The power of two of logical blocks in a block that is written without reading first: 4 KiB.
pub const PHYSICAL_EXPONENT: u8 = 3;

/// Appends to `out` until it is `len` bytes long.
pub(crate) fn pad(out: &mut Vec<u8>, len: usize) {
    if out.len() < len {
        out.resize(len, 0);
    }
}

/// The big-endian number of two bytes at `at`; 0 past the end.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |part| u16::from_be_bytes(part.try_into().expect("two bytes")))
}

/// The same of four.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |part| u32::from_be_bytes(part.try_into().expect("four bytes")))
}

/// The same of eight.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |part| u64::from_be_bytes(part.try_into().expect("eight bytes")))
}
