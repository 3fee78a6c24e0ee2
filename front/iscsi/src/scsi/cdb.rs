//! Commands: sixteen bytes in, what they ask for out.

use super::sense::{Sense, code};
use super::{be16, be32, be64};

/// A run of blocks that a command is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block.
    pub lba: u64,
    /// Blocks.
    pub blocks: u32,
    /// Durable before it is answered.
    pub fua: bool,
}

/// What VERIFY compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// Nothing: that it can be read is enough.
    Nothing,
    /// With as many blocks as are verified.
    All,
    /// With one block, again and again.
    One,
}

/// What is asked of the registrations and the reservation.
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

/// What is to be done with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrOut {
    /// REGISTER.
    Register,
    /// RESERVE.
    Reserve,
    /// RELEASE.
    Release,
    /// CLEAR.
    Clear,
    /// PREEMPT.
    Preempt,
    /// PREEMPT AND ABORT.
    PreemptAndAbort,
    /// REGISTER AND IGNORE EXISTING KEY.
    RegisterAndIgnore,
    /// REGISTER AND MOVE.
    RegisterAndMove,
}

/// What RECEIVE COPY RESULTS asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyResults {
    /// COPY STATUS.
    Status,
    /// OPERATING PARAMETERS.
    Parameters,
    /// FAILED SEGMENT DETAILS.
    Failed,
}

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// TEST UNIT READY.
    TestUnitReady,
    /// REQUEST SENSE.
    RequestSense {
        /// In descriptor format.
        descriptor: bool,
        /// Bytes at most.
        room: u32,
    },
    /// INQUIRY.
    Inquiry {
        /// A vital product data page; `None` for the standard data.
        page: Option<u8>,
        /// Bytes at most.
        room: u32,
    },
    /// MODE SENSE (6) and (10).
    ModeSense {
        /// The longer one.
        ten: bool,
        /// No block descriptor.
        no_descriptor: bool,
        /// Its block descriptor may be long.
        long: bool,
        /// Current, changeable, default or saved.
        control: u8,
        /// Page.
        page: u8,
        /// Its subpage.
        subpage: u8,
        /// Bytes at most.
        room: u32,
    },
    /// MODE SELECT (6) and (10).
    ModeSelect {
        /// The longer one.
        ten: bool,
        /// Bytes that come.
        len: u32,
    },
    /// LOG SENSE.
    LogSense {
        /// Page.
        page: u8,
        /// Its subpage.
        subpage: u8,
        /// The first parameter of interest.
        from: u16,
        /// Bytes at most.
        room: u32,
    },
    /// READ CAPACITY (10).
    ReadCapacity10,
    /// READ CAPACITY (16).
    ReadCapacity16 {
        /// Bytes at most.
        room: u32,
    },
    /// READ.
    Read(Run),
    /// WRITE.
    Write(Run),
    /// WRITE AND VERIFY.
    WriteVerify {
        /// Where.
        run: Run,
        /// Compare what was written; otherwise reading it is enough.
        compare: bool,
    },
    /// VERIFY.
    Verify {
        /// Where.
        run: Run,
        /// With what.
        compare: Compare,
    },
    /// ORWRITE.
    OrWrite(Run),
    /// COMPARE AND WRITE.
    CompareAndWrite(Run),
    /// WRITE SAME.
    WriteSame {
        /// Where.
        run: Run,
        /// The blocks may be given back.
        unmap: bool,
        /// No data comes: zeroes are meant.
        no_data: bool,
    },
    /// UNMAP.
    Unmap {
        /// Bytes that come.
        len: u32,
    },
    /// SYNCHRONIZE CACHE.
    SyncCache(Run),
    /// PRE-FETCH.
    PreFetch(Run),
    /// GET LBA STATUS.
    GetLbaStatus {
        /// From here on.
        lba: u64,
        /// Bytes at most.
        room: u32,
    },
    /// READ DEFECT DATA: there are none.
    ReadDefects {
        /// The longer one.
        twelve: bool,
        /// What is asked for and in which format.
        format: u8,
        /// Bytes at most.
        room: u32,
    },
    /// START STOP UNIT.
    StartStop {
        /// Start; otherwise stop.
        start: bool,
        /// A change of the power condition, which is none here.
        power: u8,
        /// Load or eject, which there is nothing to.
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
        /// Which.
        select: u8,
        /// Bytes at most.
        room: u32,
    },
    /// REPORT SUPPORTED OPERATION CODES.
    ReportOpcodes {
        /// With timeouts.
        timeouts: bool,
        /// All, or which.
        options: u8,
        /// The opcode.
        opcode: u8,
        /// Its service action.
        action: u16,
        /// Bytes at most.
        room: u32,
    },
    /// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
    ReportFunctions {
        /// The longer form.
        long: bool,
        /// Bytes at most.
        room: u32,
    },
    /// REPORT TARGET PORT GROUPS.
    ReportGroups {
        /// With the longer header.
        extended: bool,
        /// Bytes at most.
        room: u32,
    },
    /// SET TARGET PORT GROUPS.
    SetGroups {
        /// Bytes that come.
        len: u32,
    },
    /// PERSISTENT RESERVE IN.
    PrIn {
        /// What.
        action: PrIn,
        /// Bytes at most.
        room: u32,
    },
    /// PERSISTENT RESERVE OUT.
    PrOut {
        /// What.
        action: PrOut,
        /// The reservation's scope and type.
        scope_type: u8,
        /// Bytes that come.
        len: u32,
    },
    /// EXTENDED COPY (LID1).
    ExtendedCopy {
        /// Bytes that come.
        len: u32,
    },
    /// RECEIVE COPY RESULTS.
    CopyResults {
        /// What.
        results: CopyResults,
        /// Of which copy.
        list: u8,
        /// Bytes at most.
        room: u32,
    },
}

/// The three upper bits of byte 1: protection information, which there is none of.
fn unprotected(cdb: &[u8; 16]) -> Result<(), Sense> {
    if cdb[1] >> 5 == 0 { Ok(()) } else { Err(Sense::cdb_bit(1, 7)) }
}

fn run6(cdb: &[u8; 16]) -> Run {
    let blocks = if cdb[4] == 0 { 256 } else { u32::from(cdb[4]) };
    Run { lba: u64::from(be32(cdb, 0) & 0x1f_ffff), blocks, fua: false }
}

fn run10(cdb: &[u8; 16]) -> Run {
    Run { lba: be32(cdb, 2).into(), blocks: be16(cdb, 7).into(), fua: cdb[1] & 8 != 0 }
}

fn run12(cdb: &[u8; 16]) -> Run {
    Run { lba: be32(cdb, 2).into(), blocks: be32(cdb, 6), fua: cdb[1] & 8 != 0 }
}

fn run16(cdb: &[u8; 16]) -> Run {
    Run { lba: be64(cdb, 2), blocks: be32(cdb, 10), fua: cdb[1] & 8 != 0 }
}

fn protected_run(cdb: &[u8; 16]) -> Result<Run, Sense> {
    unprotected(cdb)?;
    Ok(match cdb[0] >> 5 {
        4 => run16(cdb),
        5 => run12(cdb),
        _ => run10(cdb),
    })
}

/// Without the bit that means FUA elsewhere.
fn plain(run: Run) -> Run {
    Run { fua: false, ..run }
}

/// What a command asks for.
///
/// # Errors
/// When it is none that is offered, or one of its fields makes no sense.
#[inline]
pub fn parse(cdb: &[u8; 16]) -> Result<Command, Sense> {
    // The three that matter come first.
    match cdb[0] {
        0x28 | 0xa8 | 0x88 => return Ok(Command::Read(protected_run(cdb)?)),
        0x2a | 0xaa | 0x8a => return Ok(Command::Write(protected_run(cdb)?)),
        _ => {}
    }
    others(cdb)
}

fn others(cdb: &[u8; 16]) -> Result<Command, Sense> {
    let room8 = u32::from(cdb[4]);
    let action = cdb[1] & 0x1f;
    Ok(match cdb[0] {
        0x00 => Command::TestUnitReady,
        0x03 => Command::RequestSense { descriptor: cdb[1] & 1 != 0, room: room8 },
        0x08 => Command::Read(run6(cdb)),
        0x0a => Command::Write(run6(cdb)),
        0x12 => {
            let evpd = cdb[1] & 1 != 0;
            // CMDDT went with SPC-3.
            if cdb[1] & 2 != 0 {
                return Err(Sense::cdb_bit(1, 1));
            }
            if !evpd && cdb[2] != 0 {
                return Err(Sense::cdb(2));
            }
            Command::Inquiry { page: evpd.then_some(cdb[2]), room: be16(cdb, 3).into() }
        }
        0x15 | 0x55 => {
            if cdb[1] & 0x10 == 0 {
                return Err(Sense::cdb_bit(1, 4));
            }
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            let ten = cdb[0] == 0x55;
            Command::ModeSelect { ten, len: if ten { be16(cdb, 7).into() } else { room8 } }
        }
        0x16 | 0x56 => reserve(cdb, Command::Reserve)?,
        0x17 | 0x57 => reserve(cdb, Command::Release)?,
        0x1a | 0x5a => {
            let ten = cdb[0] == 0x5a;
            Command::ModeSense {
                ten,
                no_descriptor: cdb[1] & 8 != 0,
                long: ten && cdb[1] & 0x10 != 0,
                control: cdb[2] >> 6,
                page: cdb[2] & 0x3f,
                subpage: cdb[3],
                room: if ten { be16(cdb, 7).into() } else { room8 },
            }
        }
        0x1b => Command::StartStop { start: cdb[4] & 1 != 0, power: cdb[4] >> 4, eject: cdb[4] & 2 != 0 },
        0x1d => match (cdb[1] & 4 != 0, be16(cdb, 3)) {
            (true, 0) => Command::SelfTest,
            (true, _) => return Err(Sense::cdb(3)),
            (false, _) => return Err(Sense::cdb_bit(1, 2)),
        },
        0x25 => {
            if cdb[8] & 1 == 0 && be32(cdb, 2) != 0 {
                return Err(Sense::cdb(2));
            }
            Command::ReadCapacity10
        }
        0x2e | 0xae | 0x8e => {
            let compare = match cdb[1] >> 1 & 3 {
                0 => false,
                1 => true,
                _ => return Err(Sense::cdb_bit(1, 2)),
            };
            Command::WriteVerify { run: plain(protected_run(cdb)?), compare }
        }
        0x2f | 0xaf | 0x8f => {
            let compare = match cdb[1] >> 1 & 3 {
                0 => Compare::Nothing,
                1 => Compare::All,
                3 => Compare::One,
                _ => return Err(Sense::cdb_bit(1, 2)),
            };
            Command::Verify { run: plain(protected_run(cdb)?), compare }
        }
        0x34 => Command::PreFetch(plain(run10(cdb))),
        0x90 => Command::PreFetch(plain(run16(cdb))),
        0x35 => Command::SyncCache(plain(run10(cdb))),
        0x91 => Command::SyncCache(plain(run16(cdb))),
        0x37 => Command::ReadDefects { twelve: false, format: cdb[2] & 0x1f, room: be16(cdb, 7).into() },
        0xb7 => Command::ReadDefects { twelve: true, format: cdb[1] & 0x1f, room: be32(cdb, 6) },
        0x41 | 0x93 => {
            let run = plain(protected_run(cdb)?);
            let (anchor, unmap, no_data) = (cdb[1] & 0x10 != 0, cdb[1] & 8 != 0, cdb[0] == 0x93 && cdb[1] & 1 != 0);
            // Space cannot be kept without being mapped.
            if anchor {
                return Err(Sense::cdb_bit(1, 4));
            }
            if cdb[1] & 6 != 0 {
                return Err(Sense::cdb_bit(1, 2));
            }
            Command::WriteSame { run, unmap, no_data }
        }
        0x42 => {
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            Command::Unmap { len: be16(cdb, 7).into() }
        }
        0x4d => {
            if cdb[1] & 1 != 0 {
                return Err(Sense::cdb_bit(1, 0));
            }
            Command::LogSense { page: cdb[2] & 0x3f, subpage: cdb[3], from: be16(cdb, 5), room: be16(cdb, 7).into() }
        }
        0x5e => {
            let action = match action {
                0 => PrIn::Keys,
                1 => PrIn::Reservation,
                2 => PrIn::Capabilities,
                3 => PrIn::FullStatus,
                _ => return Err(Sense::cdb_bit(1, 4)),
            };
            Command::PrIn { action, room: be16(cdb, 7).into() }
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
            Command::PrOut { action, scope_type: cdb[2], len: be32(cdb, 5) }
        }
        0x83 => match action {
            0 => Command::ExtendedCopy { len: be32(cdb, 10) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0x84 => {
            let results = match action {
                0 => CopyResults::Status,
                3 => CopyResults::Parameters,
                4 => CopyResults::Failed,
                _ => return Err(Sense::cdb_bit(1, 4)),
            };
            Command::CopyResults { results, list: cdb[2], room: be32(cdb, 10) }
        }
        0x89 => {
            unprotected(cdb)?;
            Command::CompareAndWrite(Run { lba: be64(cdb, 2), blocks: cdb[13].into(), fua: cdb[1] & 8 != 0 })
        }
        0x8b => Command::OrWrite(protected_run(cdb)?),
        0x9e => match action {
            0x10 => Command::ReadCapacity16 { room: be32(cdb, 10) },
            0x12 => Command::GetLbaStatus { lba: be64(cdb, 2), room: be32(cdb, 10) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0xa0 => Command::ReportLuns { select: cdb[2], room: be32(cdb, 6) },
        0xa3 => match action {
            0x0a => Command::ReportGroups { extended: cdb[1] >> 5 == 1, room: be32(cdb, 6) },
            0x0c => Command::ReportOpcodes {
                timeouts: cdb[2] & 0x80 != 0,
                options: cdb[2] & 7,
                opcode: cdb[3],
                action: be16(cdb, 4),
                room: be32(cdb, 6),
            },
            0x0d => Command::ReportFunctions { long: cdb[2] & 0x80 != 0, room: be32(cdb, 6) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        0xa4 => match action {
            0x0a => Command::SetGroups { len: be32(cdb, 6) },
            _ => return Err(Sense::cdb_bit(1, 4)),
        },
        _ => return Err(Sense::illegal(code::INVALID_OPCODE)),
    })
}

/// SPC-2's reservations, of a whole unit and for oneself.
fn reserve(cdb: &[u8; 16], command: Command) -> Result<Command, Sense> {
    // Third parties, and extents.
    if cdb[1] & 0x1f != 0 {
        return Err(Sense::cdb_bit(1, 4));
    }
    Ok(command)
}

/// Bytes that a command moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// To the initiator, at most so many.
    In(u64),
    /// From the initiator, exactly so many.
    Out(u64),
}

impl Command {
    /// Bytes that it moves, with blocks of `block` bytes.
    pub fn transfer(&self, block: u32) -> Transfer {
        let bytes = |run: &Run| u64::from(run.blocks) * u64::from(block);
        match self {
            Command::Read(run) => Transfer::In(bytes(run)),
            Command::Write(run) | Command::WriteVerify { run, .. } | Command::OrWrite(run) => Transfer::Out(bytes(run)),
            Command::Verify { run, compare } => match compare {
                Compare::Nothing => Transfer::None,
                Compare::All => Transfer::Out(bytes(run)),
                Compare::One => Transfer::Out(if run.blocks == 0 { 0 } else { block.into() }),
            },
            Command::CompareAndWrite(run) => Transfer::Out(2 * bytes(run)),
            Command::WriteSame { no_data, .. } => Transfer::Out(if *no_data { 0 } else { block.into() }),
            Command::ModeSelect { len, .. }
            | Command::Unmap { len }
            | Command::SetGroups { len }
            | Command::PrOut { len, .. }
            | Command::ExtendedCopy { len } => Transfer::Out((*len).into()),
            Command::RequestSense { room, .. }
            | Command::Inquiry { room, .. }
            | Command::ModeSense { room, .. }
            | Command::LogSense { room, .. }
            | Command::ReadCapacity16 { room }
            | Command::GetLbaStatus { room, .. }
            | Command::ReadDefects { room, .. }
            | Command::ReportLuns { room, .. }
            | Command::ReportOpcodes { room, .. }
            | Command::ReportFunctions { room, .. }
            | Command::ReportGroups { room, .. }
            | Command::PrIn { room, .. }
            | Command::CopyResults { room, .. } => Transfer::In((*room).into()),
            Command::ReadCapacity10 => Transfer::In(8),
            Command::TestUnitReady
            | Command::SyncCache(_)
            | Command::PreFetch(_)
            | Command::StartStop { .. }
            | Command::SelfTest
            | Command::Reserve
            | Command::Release => Transfer::None,
        }
    }

    /// The blocks it is about, if it is about any.
    pub fn run(&self) -> Option<Run> {
        match self {
            Command::Read(run)
            | Command::OrWrite(run)
            | Command::CompareAndWrite(run)
            | Command::SyncCache(run)
            | Command::PreFetch(run)
            | Command::Write(run)
            | Command::WriteVerify { run, .. }
            | Command::Verify { run, .. }
            | Command::WriteSame { run, .. } => Some(*run),
            _ => None,
        }
    }

    /// It changes what is stored.
    pub fn is_write(&self) -> bool {
        matches!(
            self,
            Command::Write(_)
                | Command::WriteVerify { .. }
                | Command::OrWrite(_)
                | Command::CompareAndWrite(_)
                | Command::WriteSame { .. }
                | Command::Unmap { .. }
        )
    }

    /// It is answered even while there is a unit attention, which stays (SAM-5, section 5.14).
    pub fn passes_attention(&self) -> bool {
        matches!(self, Command::Inquiry { .. } | Command::ReportLuns { .. } | Command::RequestSense { .. })
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
        let run = |lba, blocks| Ok(Command::Read(Run { lba, blocks, fua: false }));
        assert_eq!(parse(&cdb(&[0x08, 0x12, 0x34, 0x56, 0, 0])), run(0x12_3456, 256));
        assert_eq!(parse(&cdb(&[0x28, 0x10, 1, 2, 3, 4, 0, 5, 6, 0])), run(0x0102_0304, 0x0506));
        assert_eq!(parse(&cdb(&[0xa8, 0, 1, 2, 3, 4, 0, 0, 5, 6])), run(0x0102_0304, 0x0506));
        assert_eq!(parse(&cdb(&[0x88, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 8])), run(0x9_0000_0001, 8));
        assert_eq!(parse(&cdb(&[0x28, 0x20])), Err(Sense::cdb_bit(1, 7)), "protection");
        let Ok(Command::Read(run)) = parse(&cdb(&[0x28, 8, 0, 0, 0, 0, 0, 0, 1])) else { panic!("a read") };
        assert!(run.fua);
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
