//! Decoding of I/O commands into device actions.

use forebay_block::Extent;
use forebay_block::reservation::ReservationAccess;

use super::TRANSFER_MAX;
use crate::wire::command::{Sgl, nvm};
use crate::wire::{NvmeStatus, Sqe, reservation, u32_at, u64_at};

/// Maximum bytes of a fused Compare and Write, which is atomic.
pub const FUSED_MAX: u64 = crate::wire::identify::ATOMIC as u64;
/// Bytes of a range descriptor of Dataset Management.
const RANGE_LEN: usize = 16;

/// Properties of a namespace, against which commands are validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceRules {
    /// Size in logical blocks.
    pub blocks: u64,
    /// Size of a logical block in bytes, as a power of two.
    pub block_shift: u8,
    /// Writes are rejected.
    pub write_protected: bool,
}

/// Data transfer of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// No data.
    None,
    /// Bytes from the host.
    In(u32),
    /// Bytes to the host.
    Out(u32),
}

/// Action on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvmeAction {
    /// Read command.
    Read(Extent),
    /// Write of the host's data.
    Write {
        /// Bytes to write.
        extent: Extent,
        /// Force unit access: durable before it is acknowledged.
        fua: bool,
    },
    /// Comparison with the host's data.
    Compare(Extent),
    /// Write Zeroes.
    WriteZeroes {
        /// Bytes to zero.
        extent: Extent,
        /// Space stays allocated.
        no_unmap: bool,
        /// Force unit access: durable before it is acknowledged.
        fua: bool,
    },
    /// Flush: makes all acknowledged writes durable.
    Flush,
    /// Dataset Management of the ranges that the host sends: a discard, or a hint without effect.
    Ranges {
        /// Ranges are to be deallocated.
        deallocate: bool,
    },
    /// Read without a data transfer, to check that it succeeds.
    Verify(Extent),
    /// Reservation Register, Acquire or Release; decoded by `wire::reservation`.
    Reservation,
    /// Reservation Report: registrants and the reservation holder.
    ReservationReport,
}

impl NvmeAction {
    /// Returns the access class for reservation checks (base figure 124); `None` for commands that reservations never
    /// refuse.
    pub fn access(&self) -> Option<ReservationAccess> {
        match self {
            NvmeAction::Read(_) | NvmeAction::Compare(_) | NvmeAction::Verify(_) => Some(ReservationAccess::Read),
            NvmeAction::Reservation | NvmeAction::ReservationReport => None,
            _ => Some(ReservationAccess::Write),
        }
    }

    /// Returns whether the action changes stored data.
    pub fn is_write(&self) -> bool {
        matches!(
            self,
            NvmeAction::Write { .. } | NvmeAction::WriteZeroes { .. } | NvmeAction::Ranges { deallocate: true }
        )
    }
}

/// Decoded and validated command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeCommand {
    /// Action on the device.
    pub action: NvmeAction,
    /// Data transfer between host and controller.
    pub data: Data,
}

/// Returns whether an opcode of an I/O queue transfers data from the host (base figure 137).
pub fn has_data_in(opcode: u8) -> bool {
    opcode & 3 == 1
}

/// Decodes and validates an I/O command.
///
/// # Errors
/// The status with which the command fails.
pub fn decode(sqe: &Sqe, rules: &NamespaceRules) -> Result<NvmeCommand, NvmeStatus> {
    let of_data = |action, data| Ok(NvmeCommand { action, data });
    let opcode = sqe.opcode();
    match opcode {
        nvm::READ => {
            let extent = transfer(sqe, rules)?;
            of_data(NvmeAction::Read(extent), Data::Out(out_len(sqe, extent.len)?))
        }
        nvm::WRITE => {
            let extent = transfer(sqe, rules)?;
            writable(rules)?;
            of_data(NvmeAction::Write { extent, fua: sqe.fua() }, Data::In(data_len(sqe, extent.len)?))
        }
        nvm::COMPARE => {
            let extent = transfer(sqe, rules)?;
            of_data(NvmeAction::Compare(extent), Data::In(data_len(sqe, extent.len)?))
        }
        nvm::WRITE_ZEROES => {
            let extent = range(sqe, rules)?;
            writable(rules)?;
            let no_unmap = sqe.cdw(12) & 1 << 25 == 0;
            of_data(NvmeAction::WriteZeroes { extent, no_unmap, fua: sqe.fua() }, Data::None)
        }
        nvm::FLUSH => of_data(NvmeAction::Flush, Data::None),
        nvm::VERIFY => of_data(NvmeAction::Verify(range(sqe, rules)?), Data::None),
        nvm::RESV_REGISTER | nvm::RESV_ACQUIRE | nvm::RESV_RELEASE => {
            let len = data_len(sqe, reservation::data_len(opcode).into())?;
            of_data(NvmeAction::Reservation, Data::In(len))
        }
        nvm::RESV_REPORT => {
            let len = (u64::from(sqe.cdw(10)) + 1) * 4;
            if len > TRANSFER_MAX as u64 {
                return Err(NvmeStatus::INVALID_FIELD.final_());
            }
            if sqe.cdw(11) & 1 == 0 {
                // Host identifiers have 128 bits, which only the extended data structures hold.
                return Err(NvmeStatus::HOST_ID.final_());
            }
            of_data(NvmeAction::ReservationReport, Data::Out(out_len(sqe, len)?))
        }
        nvm::DSM => {
            let deallocate = sqe.cdw(11) & 4 != 0;
            if deallocate {
                writable(rules)?;
            }
            let len = (u64::from(sqe.cdw(10) & 0xFF) + 1) * RANGE_LEN as u64;
            of_data(NvmeAction::Ranges { deallocate }, Data::In(data_len(sqe, len)?))
        }
        _ => Err(NvmeStatus::INVALID_OPCODE.final_()),
    }
}

fn writable(rules: &NamespaceRules) -> Result<(), NvmeStatus> {
    if rules.write_protected { Err(NvmeStatus::WRITE_PROTECTED.final_()) } else { Ok(()) }
}

/// Returns the byte extent of a command's blocks.  Fails with LBA Out of Range past the end.
fn range(sqe: &Sqe, rules: &NamespaceRules) -> Result<Extent, NvmeStatus> {
    let (first, count) = (sqe.slba(), sqe.blocks());
    if first.checked_add(count).is_none_or(|end| end > rules.blocks) {
        return Err(NvmeStatus::LBA_RANGE.final_());
    }
    Ok(Extent::new(first << rules.block_shift, count << rules.block_shift))
}

/// Returns the byte extent of a command that transfers data, at most `TRANSFER_MAX` bytes.
fn transfer(sqe: &Sqe, rules: &NamespaceRules) -> Result<Extent, NvmeStatus> {
    // There is no protection information, so that it must not be checked.
    if sqe.cdw(12) >> 26 & 0xF != 0 {
        return Err(NvmeStatus::INVALID_FIELD.final_());
    }
    if sqe.blocks() << rules.block_shift > TRANSFER_MAX as u64 {
        return Err(NvmeStatus::INVALID_FIELD.final_());
    }
    range(sqe, rules)
}

/// Returns the length of data for the host, if the SGL is large enough.  An SGL in the host's capsule is
/// rejected.
fn out_len(sqe: &Sqe, len: u64) -> Result<u32, NvmeStatus> {
    match sqe.sgl() {
        Sgl::InCapsule { .. } => Err(NvmeStatus::SGL_TYPE.final_()),
        _ => data_len(sqe, len),
    }
}

/// Returns the length of a command's data, if the SGL is large enough.
fn data_len(sqe: &Sqe, len: u64) -> Result<u32, NvmeStatus> {
    match sqe.sgl() {
        Sgl::Other(_) => Err(NvmeStatus::SGL_TYPE.final_()),
        sgl if u64::from(sgl.len()) < len => Err(NvmeStatus::SGL_LENGTH.final_()),
        _ => Ok(len as u32),
    }
}

/// Decodes the ranges of Dataset Management, without empty ones.
///
/// # Errors
/// LBA Out of Range if one is past the end.
pub fn ranges(data: &[u8], rules: &NamespaceRules) -> Result<Vec<Extent>, NvmeStatus> {
    let range = |bytes: &[u8]| {
        let (count, first) = (u64::from(u32_at(bytes, 4)), u64_at(bytes, 8));
        if first.checked_add(count).is_none_or(|end| end > rules.blocks) {
            return Err(NvmeStatus::LBA_RANGE.final_());
        }
        Ok(Extent::new(first << rules.block_shift, count << rules.block_shift))
    };
    data.chunks_exact(RANGE_LEN)
        .map(range)
        .filter(|range| range.as_ref().is_ok_and(|range| range.len > 0) || range.is_err())
        .collect()
}

/// Returns `len` bytes of the in-capsule data, at the offset in the SGL.
///
/// # Errors
/// SGL Offset Invalid if the capsule has fewer bytes, SGL Descriptor Type Invalid if the SGL is not in-capsule.
pub fn in_capsule(sgl: Sgl, len: u32, data: &forebay_block::BufList) -> Result<forebay_block::BufList, NvmeStatus> {
    let Sgl::InCapsule { offset, .. } = sgl else { return Err(NvmeStatus::SGL_TYPE.final_()) };
    let from = usize::try_from(offset).map_err(|_| NvmeStatus::SGL_OFFSET.final_())?;
    let to = from.checked_add(len as usize).filter(|&to| to <= data.len()).ok_or(NvmeStatus::SGL_OFFSET.final_())?;
    Ok(if to - from == data.len() { data.clone() } else { data.slice(from..to) })
}
