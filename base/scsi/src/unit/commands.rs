//! SCSI command execution: checks a command and answers it, or starts its device requests.

use std::rc::Rc;

use forebay_block::reservation::ReservationAction;
use forebay_block::{BufList, BufMut};

use super::execute::{self, CommandFuture, ScsiResult};
use super::{LogicalUnit, NexusError, NexusState, ScsiFailure, SessionUnits, Unit};
use crate::cdb::{self, CopyResults, LbaRange, ScsiCommand, Transfer};
use crate::inquiry::{self, COMPARE_BLOCKS_MAX, SAME_BLOCKS_MAX, TRANSFER_BLOCKS_MAX, TargetPortGroupSupport};
use crate::lun::Lun;
use crate::mode::{self, Ask, ModePages};
use crate::ports::{PortGroupStates, TargetPort};
use crate::sense::{Sense, code, key};
use crate::{BLOCK, copy, log, opcodes, reserve};

/// Maximum length of VERIFY and PRE-FETCH, in blocks: 1 GiB.
const VERIFY_BLOCKS_MAX: u32 = 1 << 21;

/// Command with its complete data.
#[derive(Debug)]
pub struct ReadyScsiCommand {
    /// Unit that it is for.
    pub lun: Lun,
    /// Parsed CDB.
    pub command: Result<ScsiCommand, Sense>,
    /// Complete Data-Out payload.
    pub data: BufList,
    /// Failure that was determined before execution.
    pub verdict: Option<ScsiFailure>,
}

impl ReadyScsiCommand {
    /// Creates a command from a CDB, for an initiator that sends `sends` bytes of data at once.  The caller sets `data` to
    /// the first [`wants`](Self::wants) of them.
    ///
    /// A shorter CDB is padded with zeroes; bytes after the 16th are ignored, since no supported command has them.
    pub fn new(lun: Lun, cdb: &[u8], sends: u64) -> Self {
        let len = cdb.len().min(16);
        let mut bytes = [0; 16];
        bytes[..len].copy_from_slice(&cdb[..len]);
        let mut command = Self { lun, command: cdb::parse(&bytes), data: BufList::new(), verdict: None };
        command.refuse_oversized();
        command.refuse_mismatch(sends);
        command
    }

    /// Returns how many bytes of data the command needs of an initiator that sends `sends`; 0 if it fails already.
    pub fn wants(&self, sends: u64) -> usize {
        match self.verdict {
            Some(_) => 0,
            // Bounded by the maximum transfer length, unless that is refused.
            None => self.takes().unwrap_or(0).min(sends) as usize,
        }
    }

    /// Returns the bytes that the command takes from the initiator; `None` if it takes none, whatever it expects.
    #[inline]
    pub fn takes(&self) -> Option<u64> {
        match self.command.as_ref().ok()?.transfer(BLOCK) {
            Transfer::Out(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns the bytes that a READ holds until its data is sent; 0 for other commands.
    #[inline]
    pub fn read_bytes(&self) -> usize {
        match &self.command {
            // A read above the maximum transfer length is refused.
            Ok(ScsiCommand::Read(run)) if run.blocks <= TRANSFER_BLOCKS_MAX => (run.blocks * BLOCK) as usize,
            _ => 0,
        }
    }

    /// Refuses the command if it takes more data than any command may transfer, before memory is allocated for it.
    pub fn refuse_oversized(&mut self) {
        if self.verdict.is_none() && self.takes().unwrap_or(0) > u64::from(TRANSFER_BLOCKS_MAX * BLOCK) {
            self.verdict = Some(Sense::cdb(0).into());
        }
    }

    /// Refuses the command if the initiator sends another length than the command takes, `sends` bytes, and the
    /// difference may be its error.
    pub fn refuse_mismatch(&mut self, sends: u64) {
        let takes = self.takes().unwrap_or(0);
        if self.verdict.is_some() || takes == sends {
            return;
        }
        let sense = match &self.command {
            Ok(ScsiCommand::CompareAndWrite(_)) => Sense::cdb(13),
            Ok(ScsiCommand::WriteSame { .. }) => Sense::cdb(10),
            // The command requires more data than the initiator is going to send.
            _ if takes > sends && !self.may_be_cut(sends) => Sense::illegal(code::INFORMATION_UNIT),
            _ => return,
        };
        self.verdict = Some(sense.into());
    }

    /// Returns true if a write may be truncated: the initiator sends whole blocks, but fewer than the CDB says. These are
    /// written, and the residual count reports the others (FCP-4 specifies this; other transports do not).  A partial
    /// block cannot be written; then nothing is transferred.
    pub fn may_be_cut(&self, sends: u64) -> bool {
        sends.is_multiple_of(BLOCK.into())
            && matches!(self.command, Ok(ScsiCommand::Write(_) | ScsiCommand::WriteVerify { .. }))
    }
}

/// Execution of a command that was begun.
pub(crate) enum Execution {
    /// Completed, with its outcome.
    Done(ScsiResult),
    /// In flight in the device.
    InFlight(CommandFuture),
    /// In flight, and may have to wait for the end of other tasks.
    Control(CommandFuture),
}

impl From<Sense> for Execution {
    fn from(sense: Sense) -> Self {
        Execution::Done(Err(sense.into()))
    }
}

/// Completes a command with data-in of at most `alloc_len` bytes.
fn reply(mut bytes: Vec<u8>, alloc_len: u32) -> Execution {
    bytes.truncate(alloc_len as usize);
    Execution::Done(Ok(BufMut::copy_of(&bytes).into()))
}

/// Returns the part of a write for which there is data; fails unless that is a whole number of blocks.
#[inline]
fn cut(run: LbaRange, data: &BufList) -> Result<LbaRange, ScsiFailure> {
    let block = BLOCK as usize;
    let blocks = data.len() / block;
    if !data.len().is_multiple_of(block) || blocks > run.blocks as usize {
        return Err(Sense::illegal(code::INFORMATION_UNIT).into());
    }
    Ok(LbaRange { blocks: blocks as u32, ..run })
}

/// Fails unless the data of a command is complete, and not longer: partial data is not processed.
fn complete(command: &ScsiCommand, data: &BufList) -> Result<(), ScsiFailure> {
    match command.transfer(BLOCK) {
        Transfer::Out(bytes) if bytes != data.len() as u64 => Err(Sense::illegal(code::INFORMATION_UNIT).into()),
        _ => Ok(()),
    }
}

/// Completes a command with GOOD status and no data.
fn good() -> Execution {
    Execution::Done(Ok(BufList::new()))
}

impl SessionUnits {
    /// Begins a command.
    #[inline]
    pub(crate) fn begin(&mut self, ready: ReadyScsiCommand) -> (Option<Rc<LogicalUnit>>, Execution) {
        let Lun::Unit(lun) = ready.lun else { return (None, self.without_unit(&ready)) };
        let nexus = match self.nexus(lun) {
            Ok(nexus) => nexus,
            Err(NexusError::Gone) => return (None, self.without_unit(&ready)),
            Err(NexusError::Occupied) => {
                return match ready.command {
                    // The LUN inventory does not depend on commands in flight on this unit.
                    Ok(ScsiCommand::ReportLuns { select, alloc_len }) => {
                        (None, self.luns_or_failure(select, alloc_len))
                    }
                    _ => (None, Execution::Done(Err(ScsiFailure::BUSY))),
                };
            }
        };
        let unit = nexus.unit().clone();
        nexus.note_changes();
        if nexus.has_attention() && !ready.command.as_ref().is_ok_and(ScsiCommand::passes_attention) {
            let attention = nexus.take_attention().unwrap_or(code::NONE);
            return (Some(unit), Sense::attention(attention).into());
        }
        let begun = match self.checked(&unit, ready) {
            Ok(begun) => begun,
            Err(failure) => Execution::Done(Err(failure)),
        };
        (Some(unit), begun)
    }

    #[inline]
    fn checked(&mut self, unit: &Rc<LogicalUnit>, ready: ReadyScsiCommand) -> Result<Execution, ScsiFailure> {
        let command = ready.command?;
        if !unit.admits(self.host(), &command) {
            return Err(ScsiFailure::CONFLICT);
        }
        if command.is_write() && unit.is_protected() {
            return Err(Sense::new(key::DATA_PROTECT, code::WRITE_PROTECTED).into());
        }
        if let Some(verdict) = ready.verdict {
            return Err(verdict);
        }
        let fua = |run: LbaRange| LbaRange { fua: run.fua || !unit.is_cached(), ..run };
        match command {
            ScsiCommand::Read(run) => {
                unit.check_run(run, TRANSFER_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Ok(Execution::InFlight(execute::read(unit, run)))
            }
            ScsiCommand::Write(run) => {
                unit.check_run(run, TRANSFER_BLOCKS_MAX)?;
                let run = cut(run, &ready.data)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Ok(Execution::InFlight(execute::write(unit, fua(run), ready.data)))
            }
            _ => self.others(unit, command, ready.data),
        }
    }

    fn others(
        &mut self,
        unit: &Rc<LogicalUnit>,
        command: ScsiCommand,
        data: BufList,
    ) -> Result<Execution, ScsiFailure> {
        let fua = |run: LbaRange| LbaRange { fua: run.fua || !unit.is_cached(), ..run };
        let no_cache = !unit.is_cached();
        let shared = unit.shared();
        let spec = shared.spec();
        // A parameter list must be as long as announced.
        let whole = |len: u32| match data.len() as u64 == u64::from(len) {
            true => Ok(data.to_vec()),
            false => Err(ScsiFailure::from(Sense::illegal(code::PARAMETER_LIST_LENGTH))),
        };
        if command.is_write() && !matches!(command, ScsiCommand::WriteVerify { .. }) {
            complete(&command, &data)?;
        }
        Ok(match command {
            ScsiCommand::Read(_) | ScsiCommand::Write(_) => good(),
            ScsiCommand::TestUnitReady | ScsiCommand::SelfTest => good(),
            ScsiCommand::RequestSense { descriptor, alloc_len } => {
                let attention = self.nexus_in_use(shared.lun()).and_then(NexusState::take_attention);
                let sense = attention.map_or(Sense::new(key::NO_SENSE, code::NONE), Sense::attention);
                reply(sense.to_bytes(descriptor), alloc_len)
            }
            ScsiCommand::Inquiry { page: None, alloc_len } => {
                let support = match self.ports() {
                    Some(_) => TargetPortGroupSupport::Implicit,
                    None => TargetPortGroupSupport::Both,
                };
                reply(inquiry::standard(&spec.identity, support, self.target().naming()), alloc_len)
            }
            ScsiCommand::Inquiry { page: Some(page), alloc_len } => {
                let about = inquiry::VpdParameters {
                    identity: &spec.identity,
                    name: &spec.name,
                    naming: self.target().naming(),
                    port: self.target().own_port(),
                    rotational: spec.rotational,
                    threshold_exponent: log::THRESHOLD_EXPONENT,
                };
                reply(inquiry::page(page, &about).ok_or(Sense::cdb(2))?, alloc_len)
            }
            ScsiCommand::ModeSense { ten, no_descriptor, long, control, page, subpage, alloc_len } => {
                let ask = Ask { ten, no_descriptor, long, control, page, subpage };
                reply(mode::sense(&ask, &self.pages(unit))?, alloc_len)
            }
            ScsiCommand::ModeSelect { ten, len } => {
                let modes = mode::select(ten, &whole(len)?, &self.pages(unit))?;
                if modes != shared.modes() {
                    shared.set_modes(modes);
                    if let Some(nexus) = self.nexus_in_use(shared.lun()) {
                        nexus.set_modes_itself();
                    }
                }
                good()
            }
            ScsiCommand::LogSense { page, subpage, from, alloc_len } => {
                reply(log::sense(page, subpage, from, spec.space.provisioning())?, alloc_len)
            }
            ScsiCommand::ReadCapacity10 => reply(inquiry::capacity10(unit.blocks()), 8),
            ScsiCommand::ReadCapacity16 { alloc_len } => reply(inquiry::capacity16(unit.blocks()), alloc_len),
            ScsiCommand::WriteVerify { run, compare } => {
                unit.check_run(run, TRANSFER_BLOCKS_MAX)?;
                let run = cut(run, &data)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Execution::InFlight(execute::write_verify(unit, run, data, compare))
            }
            ScsiCommand::Verify { run, compare } => {
                unit.check_run(run, VERIFY_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Execution::InFlight(execute::verify(unit, run, data, compare))
            }
            ScsiCommand::OrWrite(run) => {
                unit.check_run(run, TRANSFER_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Execution::InFlight(execute::or_write(unit, fua(run), data))
            }
            ScsiCommand::CompareAndWrite(run) => {
                if run.blocks > COMPARE_BLOCKS_MAX {
                    return Err(Sense::cdb(13).into());
                }
                unit.check_run(run, COMPARE_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Execution::InFlight(execute::compare_and_write(unit, fua(run), &data))
            }
            ScsiCommand::WriteSame { run, no_data, .. } => {
                unit.check_run(run, u32::MAX)?;
                // WSNZ: zero blocks do not mean all blocks up to the end.
                if run.blocks == 0 || run.blocks > SAME_BLOCKS_MAX {
                    return Err(Sense::cdb(10).into());
                }
                let data = if no_data { BufList::new() } else { data };
                Execution::InFlight(execute::write_same(unit, run, data, no_cache))
            }
            ScsiCommand::Unmap { len } => {
                whole(len)?;
                Execution::InFlight(execute::unmap(unit, &data, no_cache)?)
            }
            ScsiCommand::SyncCache(run) => {
                unit.check_run(run, u32::MAX)?;
                Execution::InFlight(execute::sync(unit))
            }
            ScsiCommand::PreFetch(run) => {
                unit.check_run(run, u32::MAX)?;
                good()
            }
            ScsiCommand::GetLbaStatus { lba, alloc_len } => {
                unit.check_run(LbaRange { lba, blocks: 1, fua: false }, 1)?;
                Execution::InFlight(execute::lba_status(unit, lba, alloc_len))
            }
            ScsiCommand::ReadDefects { twelve, format, alloc_len } => {
                let mut out = vec![0, format, 0, 0];
                out.resize(if twelve { 8 } else { 4 }, 0);
                reply(out, alloc_len)
            }
            ScsiCommand::StartStop { eject, .. } => match eject {
                true => return Err(Sense::cdb_bit(4, 1).into()),
                false => good(),
            },
            ScsiCommand::Reserve => self.reserve(unit, ReservationAction::HoldWhole)?,
            ScsiCommand::Release => self.reserve(unit, ReservationAction::LetGoWhole)?,
            ScsiCommand::PrIn { action, alloc_len } => {
                let table = unit.table().ok_or(Sense::illegal(code::INVALID_OPCODE))?;
                reply(reserve::report(action, &table), alloc_len)
            }
            ScsiCommand::PrOut { action, scope_type, len } => {
                if unit.device().reservations().is_none() {
                    return Err(Sense::illegal(code::INVALID_OPCODE).into());
                }
                let ports = self.ports();
                let ports = ports.as_ref().map_or(&[TargetPort::SINGLE][..], |ports| ports.all());
                let action = reserve::action(action, scope_type, &whole(len)?, (self.target().naming(), ports))?;
                self.reserve(unit, action)?
            }
            ScsiCommand::ReportLuns { select, alloc_len } => self.report_luns(select, alloc_len)?,
            ScsiCommand::ReportOpcodes { timeouts, options, opcode, action, alloc_len } => {
                reply(opcodes::report(timeouts, options, opcode, action)?, alloc_len)
            }
            ScsiCommand::ReportFunctions { long, alloc_len } => {
                reply(opcodes::functions(long, self.target().naming()), alloc_len)
            }
            ScsiCommand::ReportGroups { extended, alloc_len } => {
                reply(self.access_states(shared).to_bytes(extended), alloc_len)
            }
            ScsiCommand::SetGroups { len } => {
                self.access_states(shared).check_request(&whole(len)?).map_err(Sense::list)?;
                good()
            }
            ScsiCommand::ExtendedCopy { len } => {
                if len == 0 {
                    return Ok(good());
                }
                if len as usize > copy::LIST_MAX {
                    return Err(Sense::illegal(code::PARAMETER_LIST_LENGTH).into());
                }
                self.third_party_copy(copy::parse(&whole(len)?)?)?
            }
            ScsiCommand::CopyResults { results: CopyResults::Parameters, alloc_len, .. } => {
                reply(copy::parameters(), alloc_len)
            }
            ScsiCommand::CopyResults { results, list, alloc_len } => {
                let outcome = self.copies().of(list).ok_or(Sense::cdb(2))?;
                reply(
                    if results == CopyResults::Status { copy::status(&outcome) } else { copy::failed(&outcome) },
                    alloc_len,
                )
            }
        })
    }

    fn pages(&self, unit: &LogicalUnit) -> ModePages {
        let spec = unit.shared().spec();
        ModePages {
            modes: unit.shared().modes(),
            read_only: spec.read_only || unit.device().geometry().read_only,
            blocks: unit.blocks(),
            threshold: spec.space.threshold().map(log::in_units),
        }
    }

    /// Returns the access states of a unit through all target port groups.
    fn access_states(&self, unit: &Unit) -> PortGroupStates {
        match self.ports() {
            Some(ports) => PortGroupStates::of(ports.all(), unit.preferred_group()),
            None => PortGroupStates::single(),
        }
    }

    fn reserve(&mut self, unit: &Rc<LogicalUnit>, action: ReservationAction) -> Result<Execution, ScsiFailure> {
        let Some(reservations) = unit.device().reservations() else {
            return Err(Sense::illegal(code::INVALID_OPCODE).into());
        };
        let applied = reservations.apply(self.host(), action);
        Ok(Execution::Control(execute::reservation_change(unit, applied)))
    }

    fn report_luns(&mut self, select: u8, alloc_len: u32) -> Result<Execution, ScsiFailure> {
        if alloc_len < 16 {
            return Err(Sense::cdb(6).into());
        }
        let units = || self.visible().into_iter().map(Lun::Unit);
        let luns: Vec<Lun> = match select {
            0x00 => units().collect(),
            0x01 => vec![Lun::ReportLuns],
            0x02 => units().chain([Lun::ReportLuns]).collect(),
            // Administrative and subsidiary logical units: there are none.
            0x10..=0x12 => Vec::new(),
            _ => return Err(Sense::cdb(2).into()),
        };
        self.nexuses_mut().for_each(NexusState::luns_reported);
        Ok(reply(inquiry::report_luns(luns.into_iter().map(Lun::to_bytes)), alloc_len))
    }

    fn luns_or_failure(&mut self, select: u8, alloc_len: u32) -> Execution {
        self.report_luns(select, alloc_len).unwrap_or_else(|failure| Execution::Done(Err(failure)))
    }

    /// Responds to a command to a LUN without a unit.
    fn without_unit(&mut self, ready: &ReadyScsiCommand) -> Execution {
        let well_known = ready.lun == Lun::ReportLuns;
        match ready.command {
            Ok(ScsiCommand::ReportLuns { select, alloc_len }) if well_known || ready.lun == Lun::Unit(0) => {
                self.luns_or_failure(select, alloc_len)
            }
            Ok(ScsiCommand::Inquiry { page: None, alloc_len }) => {
                reply(if well_known { inquiry::well_known() } else { inquiry::nothing() }, alloc_len)
            }
            Ok(ScsiCommand::TestUnitReady) if well_known => good(),
            Ok(ScsiCommand::RequestSense { descriptor, alloc_len }) => {
                let sense = match well_known {
                    true => Sense::new(key::NO_SENSE, code::NONE),
                    false => Sense::illegal(code::NO_UNIT),
                };
                reply(sense.to_bytes(descriptor), alloc_len)
            }
            _ if well_known => Sense::illegal(code::INVALID_OPCODE).into(),
            _ => Sense::illegal(code::NO_UNIT).into(),
        }
    }
}
