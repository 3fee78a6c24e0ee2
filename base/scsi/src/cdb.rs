//! CDB parser: decodes the sixteen bytes of a command.

use super::sense::{Sense, code};
use super::{be16, be32, be64};

/// LBA range of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbaRange {
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks.
    pub blocks: u32,
    /// Force unit access: durable before the command is acknowledged.
    pub fua: bool,
}

/// Data that VERIFY compares with the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// No comparison; the blocks only have to be readable.
    Nothing,
    /// Data-out buffer with as many blocks as are verified.
    All,
    /// Data-out buffer of one block, compared with each verified block.
    One,
}

/// PERSISTENT RESERVE IN service action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrIn {
    /// READ KEYS.
    Keys,
    /// READ RESERVATION.
    Reservation,
    /// REPORT CAPABILITIES.
    Capabilities,
    /// READ FULL STATUS.
    FullStatus,
}

/// PERSISTENT RESERVE OUT service action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrOut {
    /// REGISTER service action.
    Register,
    /// RESERVE service action.
    Reserve,
    /// RELEASE service action.
    Release,
    /// CLEAR service action.
    Clear,
    /// PREEMPT service action.
    Preempt,
    /// PREEMPT AND ABORT.
    PreemptAndAbort,
    /// REGISTER AND IGNORE EXISTING KEY.
    RegisterAndIgnore,
    /// REGISTER AND MOVE.
    RegisterAndMove,
}

/// RECEIVE COPY RESULTS service action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyResults {
    /// COPY STATUS.
    Status,
    /// OPERATING PARAMETERS.
    Parameters,
    /// FAILED SEGMENT DETAILS.
    Failed,
}

/// Parsed SCSI command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScsiCommand {
    /// TEST UNIT READY.
    TestUnitReady,
    /// REQUEST SENSE.
    RequestSense {
        /// Sense data in descriptor format.
        descriptor: bool,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// INQUIRY command.
    Inquiry {
        /// Vital product data page; `None` for the standard data.
        page: Option<u8>,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// MODE SENSE (6) and (10).
    ModeSense {
        /// MODE SENSE (10).
        ten: bool,
        /// DBD: no block descriptor.
        no_descriptor: bool,
        /// LLBAA: long block descriptors allowed.
        long: bool,
        /// Page control: current, changeable, default or saved values.
        control: u8,
        /// Page code.
        page: u8,
        /// Subpage code.
        subpage: u8,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// MODE SELECT (6) and (10).
    ModeSelect {
        /// MODE SELECT (10).
        ten: bool,
        /// Parameter list length in bytes.
        len: u32,
    },
    /// LOG SENSE.
    LogSense {
        /// Page code.
        page: u8,
        /// Subpage code.
        subpage: u8,
        /// Parameter pointer: first parameter to return.
        from: u16,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// READ CAPACITY (10).
    ReadCapacity10,
    /// READ CAPACITY (16).
    ReadCapacity16 {
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// READ command.
    Read(LbaRange),
    /// WRITE command.
    Write(LbaRange),
    /// WRITE AND VERIFY.
    WriteVerify {
        /// LBA range.
        run: LbaRange,
        /// Compare the data after writing; otherwise the blocks only have to be readable.
        compare: bool,
    },
    /// VERIFY command.
    Verify {
        /// LBA range.
        run: LbaRange,
        /// Comparison mode.
        compare: Compare,
    },
    /// ORWRITE command.
    OrWrite(LbaRange),
    /// COMPARE AND WRITE.
    CompareAndWrite(LbaRange),
    /// WRITE SAME.
    WriteSame {
        /// LBA range.
        run: LbaRange,
        /// UNMAP: the blocks may be deallocated.
        unmap: bool,
        /// NDOB: no data-out buffer; zeroes are written.
        no_data: bool,
    },
    /// UNMAP command.
    Unmap {
        /// Parameter list length in bytes.
        len: u32,
    },
    /// SYNCHRONIZE CACHE.
    SyncCache(LbaRange),
    /// PRE-FETCH command.
    PreFetch(LbaRange),
    /// GET LBA STATUS.
    GetLbaStatus {
        /// Starting LBA.
        lba: u64,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// READ DEFECT DATA: the defect list is empty.
    ReadDefects {
        /// READ DEFECT DATA (12).
        twelve: bool,
        /// Requested defect lists and their format.
        format: u8,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// START STOP UNIT.
    StartStop {
        /// Start the unit; otherwise stop it.
        start: bool,
        /// Power condition; not supported.
        power: u8,
        /// Load or eject; there is no removable medium.
        eject: bool,
    },
    /// SEND DIAGNOSTIC: the self-test.
    SelfTest,
    /// RESERVE (6) and (10).
    Reserve,
    /// RELEASE (6) and (10).
    Release,
    /// REPORT LUNS.
    ReportLuns {
        /// SELECT REPORT field.
        select: u8,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// REPORT SUPPORTED OPERATION CODES.
    ReportOpcodes {
        /// RCTD: include command timeouts.
        timeouts: bool,
        /// Reporting options: all commands, or a single one.
        options: u8,
        /// Requested operation code.
        opcode: u8,
        /// Requested service action.
        action: u16,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
    ReportFunctions {
        /// REPD: extended parameter data.
        long: bool,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// REPORT TARGET PORT GROUPS.
    ReportGroups {
        /// Extended parameter data header.
        extended: bool,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// SET TARGET PORT GROUPS.
    SetGroups {
        /// Parameter list length in bytes.
        len: u32,
    },
    /// PERSISTENT RESERVE IN.
    PrIn {
        /// Service action.
        action: PrIn,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
    /// PERSISTENT RESERVE OUT.
    PrOut {
        /// Service action.
        action: PrOut,
        /// Scope and type of the reservation.
        scope_type: u8,
        /// Parameter list length in bytes.
        len: u32,
    },
    /// EXTENDED COPY (LID1).
    ExtendedCopy {
        /// Parameter list length in bytes.
        len: u32,
    },
    /// RECEIVE COPY RESULTS.
    CopyResults {
        /// Service action.
        results: CopyResults,
        /// List identifier of the copy.
        list: u8,
        /// Allocation length in bytes.
        alloc_len: u32,
    },
}

/// Rejects protection information: the three upper bits of byte 1 have to be zero.
fn unprotected(cdb: &[u8; 16]) -> Result<(), Sense> {
    if cdb[1] >> 5 == 0 { Ok(()) } else { Err(Sense::cdb_bit(1, 7)) }
}

fn run6(cdb: &[u8; 16]) -> LbaRange {
    let blocks = if cdb[4] == 0 { 256 } else { u32::from(cdb[4]) };
    LbaRange { lba: u64::from(be32(cdb, 0) & 0x1f_ffff), blocks, fua: false }
}

fn run10(cdb: &[u8; 16]) -> LbaRange {
    LbaRange { lba: be32(cdb, 2).into(), blocks: be16(cdb, 7).into(), fua: cdb[1] & 8 != 0 }
}

fn run12(cdb: &[u8; 16]) -> LbaRange {
    LbaRange { lba: be32(cdb, 2).into(), blocks: be32(cdb, 6), fua: cdb[1] & 8 != 0 }
}

fn run16(cdb: &[u8; 16]) -> LbaRange {
    LbaRange { lba: be64(cdb, 2), blocks: be32(cdb, 10), fua: cdb[1] & 8 != 0 }
}

fn protected_run(cdb: &[u8; 16]) -> Result<LbaRange, Sense> {
    unprotected(cdb)?;
    Ok(match cdb[0] >> 5 {
        4 => run16(cdb),
        5 => run12(cdb),
        _ => run10(cdb),
    })
}

/// Clears the bit that means FUA in other commands.
fn plain(run: LbaRange) -> LbaRange {
    LbaRange { fua: false, ..run }
}

/// Parses a CDB.
///
/// # Errors
/// When the command is not supported, or one of its fields is invalid.
#[inline]
pub fn parse(cdb: &[u8; 16]) -> Result<ScsiCommand, Sense> {
    // The three most frequent commands come first.
    match cdb[0] {
        0x28 | 0xa8 | 0x88 => return Ok(ScsiCommand::Read(protected_run(cdb)?)),
        0x2a | 0xaa | 0x8a => return Ok(ScsiCommand::Write(protected_run(cdb)?)),
        _ => {}
    }
    others(cdb)
}

fn others(cdb: &[u8; 16]) -> Result<ScsiCommand, Sense> {
    let room8 = u32::from(cdb[4]);
    let action = cdb[1] & 0x1f;
    Ok(match cdb[0] {
        0x00 => ScsiCommand::TestUnitReady,
        0x03 => ScsiCommand::RequestSense { descriptor: cdb[1] & 1 != 0, alloc_len: room8 },
        0x08 => ScsiCommand::Read(run6(cdb)),
        0x0a => ScsiCommand::Write(run6(cdb)),
        0x12 => {
            let evpd = cdb[1] & 1 != 0;
            // CMDDT is obsolete since SPC-3.
            if cdb[1] & 2 != 0 {
                return Err(Sense::cdb_bit(1, 1));
            }
            if !evpd && cdb[2] != 0 {
                return Err(Sense::cdb(2));
            }
            ScsiCommand::Inquiry { page: evpd.then_some(cdb[2]), alloc_len: be16(cdb, 3).into() }
        }
        0x15 | 0x55 => {
            if cdb[1] & 0x10 == 0 {
                return Err(Sense::cdb_bit(1, 4));
            }
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            let ten = cdb[0] == 0x55;
            ScsiCommand::ModeSelect { ten, len: if ten { be16(cdb, 7).into() } else { room8 } }
        }
        0x16 | 0x56 => reserve(cdb, ScsiCommand::Reserve)?,
        0x17 | 0x57 => reserve(cdb, ScsiCommand::Release)?,
        0x1a | 0x5a => {
            let ten = cdb[0] == 0x5a;
            ScsiCommand::ModeSense {
                ten,
                no_descriptor: cdb[1] & 8 != 0,
                long: ten && cdb[1] & 0x10 != 0,
                control: cdb[2] >> 6,
                page: cdb[2] & 0x3f,
                subpage: cdb[3],
                alloc_len: if ten { be16(cdb, 7).into() } else { room8 },
            }
        }
        0x1b => ScsiCommand::StartStop { start: cdb[4] & 1 != 0, power: cdb[4] >> 4, eject: cdb[4] & 2 != 0 },
        0x1d => match (cdb[1] & 4 != 0, be16(cdb, 3)) {
            (true, 0) => ScsiCommand::SelfTest,
            (true, _) => return Err(Sense::cdb(3)),
            (false, _) => return Err(Sense::cdb_bit(1, 2)),
        },
        0x25 => {
            if cdb[8] & 1 == 0 && be32(cdb, 2) != 0 {
                return Err(Sense::cdb(2));
            }
            ScsiCommand::ReadCapacity10
        }
        0x2e | 0xae | 0x8e => {
            let compare = match cdb[1] >> 1 & 3 {
                0 => false,
                1 => true,
                _ => return Err(Sense::cdb_bit(1, 2)),
            };
            ScsiCommand::WriteVerify { run: plain(protected_run(cdb)?), compare }
        }
        0x2f | 0xaf | 0x8f => {
            let compare = match cdb[1] >> 1 & 3 {
                0 => Compare::Nothing,
                1 => Compare::All,
                3 => Compare::One,
                _ => return Err(Sense::cdb_bit(1, 2)),
            };
            ScsiCommand::Verify { run: plain(protected_run(cdb)?), compare }
        }
        0x34 => ScsiCommand::PreFetch(plain(run10(cdb))),
        0x90 => ScsiCommand::PreFetch(plain(run16(cdb))),
        0x35 => ScsiCommand::SyncCache(plain(run10(cdb))),
        0x91 => ScsiCommand::SyncCache(plain(run16(cdb))),
        0x37 => ScsiCommand::ReadDefects { twelve: false, format: cdb[2] & 0x1f, alloc_len: be16(cdb, 7).into() },
        0xb7 => ScsiCommand::ReadDefects { twelve: true, format: cdb[1] & 0x1f, alloc_len: be32(cdb, 6) },
        0x41 | 0x93 => {
            let run = plain(protected_run(cdb)?);
            let (anchor, unmap, no_data) = (cdb[1] & 0x10 != 0, cdb[1] & 8 != 0, cdb[0] == 0x93 && cdb[1] & 1 != 0);
            // Anchored blocks are not supported: space cannot be reserved without mapping it.
            if anchor {
                return Err(Sense::cdb_bit(1, 4));
            }
            if cdb[1] & 6 != 0 {
                return Err(Sense::cdb_bit(1, 2));
            }
            ScsiCommand::WriteSame { run, unmap, no_data }
        }
        0x42 => {
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            ScsiCommand::Unmap { len: be16(cdb, 7).into() }
        }
        0x4d => {
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            ScsiCommand::LogSense {
                page: cdb[2] & 0x3f,
                subpage: cdb[3],
                from: be16(cdb, 5),
                alloc_len: be16(cdb, 7).into(),
            }
        }
        0x5e => {
            let action = match action {
                0 => PrIn::Keys,
                1 => PrIn::Reservation,
                2 => PrIn::Capabilities,
                3 => PrIn::FullStatus,
                _ => return Err(Sense::cdb_bit(1, 4)),
            };
            ScsiCommand::PrIn { action, alloc_len: be16(cdb, 7).into() }
        }
        0x5f => {
            let action = match action {
                0 => PrOut::Register,
                1 => PrOut::Reserve,
                2 => PrOut::Release,
                3 => PrOut::Clear,
                4 => PrOut::Preempt,
                5 => PrOut::PreemptAndAbort,
                6 => PrOut::RegisterAndIgnore,
                7 => PrOut::RegisterAndMove,
                _ => return Err(Sense::cdb_bit(1, 4)),
            };
            ScsiCommand::PrOut { action, scope_type: cdb[2], len: be32(cdb, 5) }
        }
        0x83 => match action {
            0 => ScsiCommand::ExtendedCopy { len: be32(cdb, 10) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0x84 => {
            let results = match action {
                0 => CopyResults::Status,
                3 => CopyResults::Parameters,
                4 => CopyResults::Failed,
                _ => return Err(Sense::cdb_bit(1, 4)),
            };
            ScsiCommand::CopyResults { results, list: cdb[2], alloc_len: be32(cdb, 10) }
        }
        0x89 => {
            unprotected(cdb)?;
            ScsiCommand::CompareAndWrite(LbaRange { lba: be64(cdb, 2), blocks: cdb[13].into(), fua: cdb[1] & 8 != 0 })
        }
        0x8b => ScsiCommand::OrWrite(protected_run(cdb)?),
        0x9e => match action {
            0x10 => ScsiCommand::ReadCapacity16 { alloc_len: be32(cdb, 10) },
            0x12 => ScsiCommand::GetLbaStatus { lba: be64(cdb, 2), alloc_len: be32(cdb, 10) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0xa0 => ScsiCommand::ReportLuns { select: cdb[2], alloc_len: be32(cdb, 6) },
        0xa3 => match action {
            0x0a => ScsiCommand::ReportGroups { extended: cdb[1] >> 5 == 1, alloc_len: be32(cdb, 6) },
            0x0c => ScsiCommand::ReportOpcodes {
                timeouts: cdb[2] & 0x80 != 0,
                options: cdb[2] & 7,
                opcode: cdb[3],
                action: be16(cdb, 4),
                alloc_len: be32(cdb, 6),
            },
            0x0d => ScsiCommand::ReportFunctions { long: cdb[2] & 0x80 != 0, alloc_len: be32(cdb, 6) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0xa4 => match action {
            0x0a => ScsiCommand::SetGroups { len: be32(cdb, 6) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        _ => return Err(Sense::illegal(code::INVALID_OPCODE)),
    })
}

/// Parses an SPC-2 reservation, of a whole unit and for the initiator itself.
fn reserve(cdb: &[u8; 16], command: ScsiCommand) -> Result<ScsiCommand, Sense> {
    // Third-party and extent reservations are not supported.
    if cdb[1] & 0x1f != 0 {
        return Err(Sense::cdb_bit(1, 4));
    }
    Ok(command)
}

/// Direction and length of a command's data transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// No data transfer.
    None,
    /// Data-in: at most this many bytes to the initiator.
    In(u64),
    /// Data-out: exactly this many bytes from the initiator.
    Out(u64),
}

impl ScsiCommand {
    /// Returns whether the outcome of the command stays the same when it is executed once more: a transport may do that if
    /// it does not know whether it was executed.
    pub fn is_repeatable(&self) -> bool {
        match self {
            // Found changed by itself, it would be a miscompare.  Ranges that overlap would be copied from copies.
            ScsiCommand::CompareAndWrite(_) | ScsiCommand::ExtendedCopy { .. } => false,
            // The key of the host or of its victim is another one then, or has gone: a conflict.
            ScsiCommand::PrOut { action, .. } => {
                matches!(action, PrOut::Reserve | PrOut::Release | PrOut::RegisterAndIgnore)
            }
            _ => true,
        }
    }

    /// Returns the data transfer of the command, for blocks of `block` bytes.
    pub fn transfer(&self, block: u32) -> Transfer {
        let bytes = |run: &LbaRange| u64::from(run.blocks) * u64::from(block);
        match self {
            ScsiCommand::Read(run) => Transfer::In(bytes(run)),
            ScsiCommand::Write(run) | ScsiCommand::WriteVerify { run, .. } | ScsiCommand::OrWrite(run) => {
                Transfer::Out(bytes(run))
            }
            ScsiCommand::Verify { run, compare } => match compare {
                Compare::Nothing => Transfer::None,
                Compare::All => Transfer::Out(bytes(run)),
                Compare::One => Transfer::Out(if run.blocks == 0 { 0 } else { block.into() }),
            },
            ScsiCommand::CompareAndWrite(run) => Transfer::Out(2 * bytes(run)),
            ScsiCommand::WriteSame { no_data, .. } => Transfer::Out(if *no_data { 0 } else { block.into() }),
            ScsiCommand::ModeSelect { len, .. }
            | ScsiCommand::Unmap { len }
            | ScsiCommand::SetGroups { len }
            | ScsiCommand::PrOut { len, .. }
            | ScsiCommand::ExtendedCopy { len } => Transfer::Out((*len).into()),
            ScsiCommand::RequestSense { alloc_len, .. }
            | ScsiCommand::Inquiry { alloc_len, .. }
            | ScsiCommand::ModeSense { alloc_len, .. }
            | ScsiCommand::LogSense { alloc_len, .. }
            | ScsiCommand::ReadCapacity16 { alloc_len }
            | ScsiCommand::GetLbaStatus { alloc_len, .. }
            | ScsiCommand::ReadDefects { alloc_len, .. }
            | ScsiCommand::ReportLuns { alloc_len, .. }
            | ScsiCommand::ReportOpcodes { alloc_len, .. }
            | ScsiCommand::ReportFunctions { alloc_len, .. }
            | ScsiCommand::ReportGroups { alloc_len, .. }
            | ScsiCommand::PrIn { alloc_len, .. }
            | ScsiCommand::CopyResults { alloc_len, .. } => Transfer::In((*alloc_len).into()),
            ScsiCommand::ReadCapacity10 => Transfer::In(8),
            ScsiCommand::TestUnitReady
            | ScsiCommand::SyncCache(_)
            | ScsiCommand::PreFetch(_)
            | ScsiCommand::StartStop { .. }
            | ScsiCommand::SelfTest
            | ScsiCommand::Reserve
            | ScsiCommand::Release => Transfer::None,
        }
    }

    /// Returns the LBA range of the command, if it has one.
    pub fn run(&self) -> Option<LbaRange> {
        match self {
            ScsiCommand::Read(run)
            | ScsiCommand::OrWrite(run)
            | ScsiCommand::CompareAndWrite(run)
            | ScsiCommand::SyncCache(run)
            | ScsiCommand::PreFetch(run)
            | ScsiCommand::Write(run)
            | ScsiCommand::WriteVerify { run, .. }
            | ScsiCommand::Verify { run, .. }
            | ScsiCommand::WriteSame { run, .. } => Some(*run),
            _ => None,
        }
    }

    /// Returns true if the command changes stored data.
    pub fn is_write(&self) -> bool {
        matches!(
            self,
            ScsiCommand::Write(_)
                | ScsiCommand::WriteVerify { .. }
                | ScsiCommand::OrWrite(_)
                | ScsiCommand::CompareAndWrite(_)
                | ScsiCommand::WriteSame { .. }
                | ScsiCommand::Unmap { .. }
        )
    }

    /// Returns true if the command completes even while a unit attention is pending, which stays pending (SAM-5,
    /// section 5.14).
    pub fn passes_attention(&self) -> bool {
        matches!(self, ScsiCommand::Inquiry { .. } | ScsiCommand::ReportLuns { .. } | ScsiCommand::RequestSense { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cdb(bytes: &[u8]) -> [u8; 16] {
        let mut cdb = [0; 16];
        cdb[..bytes.len()].copy_from_slice(bytes);
        cdb
    }

    #[test]
    fn the_four_lengths_of_a_read_are_one() {
        let run = |lba, blocks| Ok(ScsiCommand::Read(LbaRange { lba, blocks, fua: false }));
        assert_eq!(parse(&cdb(&[0x08, 0x12, 0x34, 0x56, 0, 0])), run(0x12_3456, 256));
        assert_eq!(parse(&cdb(&[0x28, 0x10, 1, 2, 3, 4, 0, 5, 6, 0])), run(0x0102_0304, 0x0506));
        assert_eq!(parse(&cdb(&[0xa8, 0, 1, 2, 3, 4, 0, 0, 5, 6])), run(0x0102_0304, 0x0506));
        assert_eq!(parse(&cdb(&[0x88, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 8])), run(0x9_0000_0001, 8));
        assert_eq!(parse(&cdb(&[0x28, 0x20])), Err(Sense::cdb_bit(1, 7)), "protection");
        let Ok(ScsiCommand::Read(run)) = parse(&cdb(&[0x28, 8, 0, 0, 0, 0, 0, 0, 1])) else { panic!("a read") };
        assert!(run.fua);
    }

    #[test]
    fn some_commands_are_not_executed_twice() {
        let is_repeatable = |bytes: &[u8]| parse(&cdb(bytes)).expect("a command").is_repeatable();
        for bytes in [&[0x2A][..], &[0x41], &[0x42], &[0x35], &[0x5F, 1], &[0x5F, 2], &[0x5F, 6], &[0x16], &[0x00]] {
            assert!(is_repeatable(bytes), "{bytes:x?}");
        }
        for bytes in [&[0x89][..], &[0x83], &[0x5F, 0], &[0x5F, 3], &[0x5F, 4], &[0x5F, 5], &[0x5F, 7]] {
            assert!(!is_repeatable(bytes), "{bytes:x?}");
        }
    }

    #[test]
    fn what_is_not_offered_is_refused() {
        for bytes in [&[0xff][..], &[0x04], &[0x48], &[0x7f]] {
            assert_eq!(parse(&cdb(bytes)), Err(Sense::illegal(code::INVALID_OPCODE)));
        }
        for bytes in [&[0x5e, 9][..], &[0x9e, 0], &[0xa3, 1], &[0x42, 1], &[0x41, 0x10], &[0x12, 0, 1]] {
            let sense = parse(&cdb(bytes)).expect_err("refused");
            assert_eq!(sense.code, code::FIELD_IN_CDB);
        }
    }
}
