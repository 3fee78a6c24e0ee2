//! What an I/O command asks of a device.

use forebay_block::Extent;
use forebay_block::reservation::Access;

use super::TRANSFER_MAX;
use crate::wire::command::{Sgl, nvm};
use crate::wire::{Sqe, Status, reservation, u32_at, u64_at};

/// Bytes of a Compare and Write that is fused, at most: what is written wholly or not at all.
pub const FUSED_MAX: u64 = crate::wire::identify::ATOMIC as u64;
/// Bytes of a range in Dataset Management.
const RANGE_LEN: usize = 16;

/// What of a namespace decides about a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Logical blocks.
    pub blocks: u64,
    /// Bytes of one, as a power of two.
    pub block_shift: u8,
    /// Writes are refused.
    pub write_protected: bool,
}

/// Where a command's data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// There is none.
    None,
    /// From the host: so many bytes.
    In(u32),
    /// To the host: so many bytes.
    Out(u32),
}

/// What is asked of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read.
    Read(Extent),
    /// Write what the host sends.
    Write {
        /// Where.
        extent: Extent,
        /// Durable when answered.
        fua: bool,
    },
    /// Compare with what the host sends.
    Compare(Extent),
    /// Make it read as zeroes.
    WriteZeroes {
        /// Where.
        extent: Extent,
        /// The space is kept.
        no_unmap: bool,
        /// Durable when answered.
        fua: bool,
    },
    /// Make everything answered durable.
    Flush,
    /// Forget the ranges that the host sends; or do nothing, when it only hints.
    Ranges {
        /// They are not needed any more.
        deallocate: bool,
    },
    /// Read, and say whether that went well.
    Verify(Extent),
    /// Register, Acquire or Release; what exactly is in the terms of `wire::reservation`.
    Reservation,
    /// Who is registered, and who holds the reservation.
    ReservationReport,
}

impl Action {
    /// What it does, as far as reservations care (base figure 124); `None` when they never refuse it.
    pub fn access(&self) -> Option<Access> {
        match self {
            Action::Read(_) | Action::Compare(_) | Action::Verify(_) => Some(Access::Read),
            Action::Reservation | Action::ReservationReport => None,
            _ => Some(Access::Write),
        }
    }

    /// It changes what is stored.
    pub fn is_write(&self) -> bool {
        matches!(self, Action::Write { .. } | Action::WriteZeroes { .. } | Action::Ranges { deallocate: true })
    }
}

/// A command that makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// What to do.
    pub action: Action,
    /// Where its data goes.
    pub data: Data,
}

/// Whether an opcode of an I/O queue moves data from the host (base figure 137).
pub fn has_data_in(opcode: u8) -> bool {
    opcode & 3 == 1
}

/// Makes sense of an I/O command.
///
/// # Errors
/// What the command is answered with.
pub fn decode(sqe: &Sqe, rules: &Rules) -> Result<Command, Status> {
    let of_data = |action, data| Ok(Command { action, data });
    let opcode = sqe.opcode();
    match opcode {
        nvm::READ => {
            let extent = transfer(sqe, rules)?;
            of_data(Action::Read(extent), Data::Out(out_len(sqe, extent.len)?))
        }
        nvm::WRITE => {
            let extent = transfer(sqe, rules)?;
            writable(rules)?;
            of_data(Action::Write { extent, fua: sqe.fua() }, Data::In(data_len(sqe, extent.len)?))
        }
        nvm::COMPARE => {
            let extent = transfer(sqe, rules)?;
            of_data(Action::Compare(extent), Data::In(data_len(sqe, extent.len)?))
        }
        nvm::WRITE_ZEROES => {
            let extent = range(sqe, rules)?;
            writable(rules)?;
            let no_unmap = sqe.cdw(12) & 1 << 25 == 0;
            of_data(Action::WriteZeroes { extent, no_unmap, fua: sqe.fua() }, Data::None)
        }
        nvm::FLUSH => of_data(Action::Flush, Data::None),
        nvm::VERIFY => of_data(Action::Verify(range(sqe, rules)?), Data::None),
        nvm::RESV_REGISTER | nvm::RESV_ACQUIRE | nvm::RESV_RELEASE => {
            let len = data_len(sqe, reservation::data_len(opcode).into())?;
            of_data(Action::Reservation, Data::In(len))
        }
        nvm::RESV_REPORT => {
            let len = (u64::from(sqe.cdw(10)) + 1) * 4;
            if len > TRANSFER_MAX as u64 {
                return Err(Status::INVALID_FIELD.final_());
            }
            if sqe.cdw(11) & 1 == 0 {
                // Host identifiers have 128 bits, which only the extended structures hold.
                return Err(Status::HOST_ID.final_());
            }
            of_data(Action::ReservationReport, Data::Out(out_len(sqe, len)?))
        }
        nvm::DSM => {
            let deallocate = sqe.cdw(11) & 4 != 0;
            if deallocate {
                writable(rules)?;
            }
            let len = (u64::from(sqe.cdw(10) & 0xFF) + 1) * RANGE_LEN as u64;
            of_data(Action::Ranges { deallocate }, Data::In(data_len(sqe, len)?))
        }
        _ => Err(Status::INVALID_OPCODE.final_()),
    }
}

fn writable(rules: &Rules) -> Result<(), Status> {
    if rules.write_protected { Err(Status::WRITE_PROTECTED.final_()) } else { Ok(()) }
}

/// The blocks of a command.
fn range(sqe: &Sqe, rules: &Rules) -> Result<Extent, Status> {
    let (first, count) = (sqe.slba(), sqe.blocks());
    if first.checked_add(count).is_none_or(|end| end > rules.blocks) {
        return Err(Status::LBA_RANGE.final_());
    }
    Ok(Extent::new(first << rules.block_shift, count << rules.block_shift))
}

/// The blocks of a command that moves their content.
fn transfer(sqe: &Sqe, rules: &Rules) -> Result<Extent, Status> {
    // Protection information is not there to be checked, so it may not be asked for.
    if sqe.cdw(12) >> 26 & 0xF != 0 {
        return Err(Status::INVALID_FIELD.final_());
    }
    if sqe.blocks() << rules.block_shift > TRANSFER_MAX as u64 {
        return Err(Status::INVALID_FIELD.final_());
    }
    range(sqe, rules)
}

/// The length of data for the host, if the SGL has room for it; there is none in the host's own capsule.
fn out_len(sqe: &Sqe, len: u64) -> Result<u32, Status> {
    match sqe.sgl() {
        Sgl::InCapsule { .. } => Err(Status::SGL_TYPE.final_()),
        _ => data_len(sqe, len),
    }
}

/// The length of a command's data, if the SGL has room for it.
fn data_len(sqe: &Sqe, len: u64) -> Result<u32, Status> {
    match sqe.sgl() {
        Sgl::Other(_) => Err(Status::SGL_TYPE.final_()),
        sgl if u64::from(sgl.len()) < len => Err(Status::SGL_LENGTH.final_()),
        _ => Ok(len as u32),
    }
}

/// The ranges of Dataset Management.
///
/// # Errors
/// When one is past the end.
pub fn ranges(data: &[u8], rules: &Rules) -> Result<Vec<Extent>, Status> {
    let range = |bytes: &[u8]| {
        let (count, first) = (u64::from(u32_at(bytes, 4)), u64_at(bytes, 8));
        if first.checked_add(count).is_none_or(|end| end > rules.blocks) {
            return Err(Status::LBA_RANGE.final_());
        }
        Ok(Extent::new(first << rules.block_shift, count << rules.block_shift))
    };
    data.chunks_exact(RANGE_LEN)
        .map(range)
        .filter(|range| range.as_ref().is_ok_and(|range| range.len > 0) || range.is_err())
        .collect()
}

/// Takes `len` bytes of what is in the capsule, as the SGL says.
///
/// # Errors
/// When the capsule has fewer.
pub fn in_capsule(sgl: Sgl, len: u32, data: &forebay_block::BufList) -> Result<forebay_block::BufList, Status> {
    let Sgl::InCapsule { offset, .. } = sgl else { return Err(Status::SGL_TYPE.final_()) };
    let from = usize::try_from(offset).map_err(|_| Status::SGL_OFFSET.final_())?;
    let to = from.checked_add(len as usize).filter(|&to| to <= data.len()).ok_or(Status::SGL_OFFSET.final_())?;
    Ok(if to - from == data.len() { data.clone() } else { data.slice(from..to) })
}
