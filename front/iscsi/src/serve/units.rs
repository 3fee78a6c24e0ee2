//! Logical units of a session, and the execution of its commands on them.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{Access, Action, HostId};
use forebay_block::{BufList, BufMut};

use super::Cores;
use super::execute::{self, Outcome, Work, many};
use super::logical_unit::{Failure, LogicalUnit};
use super::nexus::NexusState;
use crate::scsi::cdb::{Command, CopyResults, Run, Transfer};
use crate::scsi::copy::{self, Copy};
use crate::scsi::inquiry::{self, COMPARE_BLOCKS_MAX, SAME_BLOCKS_MAX, TRANSFER_BLOCKS_MAX};
use crate::scsi::mode::{self, Ask, Modes, Pages};
use crate::scsi::sense::{Sense, code, key};
use crate::scsi::{BLOCK, log, opcodes, reserve, status};
use crate::sessions::Session;
use crate::target::Target;
use crate::targets::Targets;
use crate::unit::NoEntry;
use crate::wire::Lun;

/// Maximum number of copy results kept for RECEIVE COPY RESULTS.
const COPIES_KEPT: usize = 8;
/// Maximum length of VERIFY and PRE-FETCH, in blocks: 1 GiB.
const VERIFY_BLOCKS_MAX: u32 = 1 << 21;

/// Command with its complete data.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) lun: Lun,
    pub(super) command: Result<Command, Sense>,
    /// Complete Data-Out payload.
    pub(super) data: BufList,
    /// Failure that was determined before execution.
    pub(super) verdict: Option<Failure>,
}

/// State of a command after its start.
pub(super) enum Begun {
    /// Completed, with its outcome.
    Now(Outcome),
    /// In flight in the device.
    Later(Work),
    /// In flight, and may have to wait for the end of other tasks.
    Control(Work),
}

impl From<Sense> for Begun {
    fn from(sense: Sense) -> Self {
        Begun::Now(Err(sense.into()))
    }
}

/// Completes a command with data-in of at most `room` bytes.
fn reply(mut bytes: Vec<u8>, room: u32) -> Begun {
    bytes.truncate(room as usize);
    Begun::Now(Ok(BufMut::copy_of(&bytes).into()))
}

/// Returns the part of a write for which there is data; fails unless that is a whole number of blocks.
#[inline]
fn cut(run: Run, data: &BufList) -> Result<Run, Failure> {
    let block = BLOCK as usize;
    let blocks = data.len() / block;
    if !data.len().is_multiple_of(block) || blocks > run.blocks as usize {
        return Err(Sense::illegal(code::INFORMATION_UNIT).into());
    }
    Ok(Run { blocks: blocks as u32, ..run })
}

/// Fails unless the data of a command is complete, and not longer: partial data is not processed.
fn complete(command: &Command, data: &BufList) -> Result<(), Failure> {
    match command.transfer(BLOCK) {
        Transfer::Out(bytes) if bytes != data.len() as u64 => Err(Sense::illegal(code::INFORMATION_UNIT).into()),
        _ => Ok(()),
    }
}

/// Completes a command with GOOD status and no data.
fn good() -> Begun {
    Begun::Now(Ok(BufList::new()))
}

pub(super) struct Units {
    targets: Targets,
    cores: Rc<Cores>,
    session: Arc<Session>,
    host: HostId,
    luns: BTreeMap<u16, NexusState>,
    generation: u32,
    copies: Rc<RefCell<VecDeque<(u8, copy::Outcome)>>>,
    /// Additional sense code of the first unit attention on each unit.
    first: u16,
}

impl Units {
    pub(super) fn new(targets: Targets, cores: Rc<Cores>, session: Arc<Session>, host: HostId) -> Self {
        let generation = session.target.as_ref().map_or(0, Target::generation);
        let first = code::POWER_ON;
        Self { targets, cores, session, host, luns: BTreeMap::new(), generation, copies: Rc::default(), first }
    }

    /// Returns the units in use.
    pub(super) fn in_use(&mut self) -> impl Iterator<Item = &mut NexusState> {
        self.luns.values_mut()
    }

    /// Drops the state of a unit that is gone.
    pub(super) fn forget(&mut self, lun: u16) {
        self.luns.remove(&lun);
    }

    /// Returns all targets.
    pub(super) fn targets(&self) -> &Targets {
        &self.targets
    }

    /// Returns the session's target; `None` in a discovery session.
    pub(super) fn target(&self) -> Option<&Target> {
        self.session.target.as_ref()
    }

    pub(super) fn session_id(&self) -> u64 {
        self.session.id
    }

    /// Returns a unit for task management, even one that the session may not use yet.
    pub(super) fn has(&mut self, lun: Lun) -> Option<Rc<LogicalUnit>> {
        let Lun::Unit(lun) = lun else { return None };
        match self.state(lun) {
            Ok(state) => Some(state.local.clone()),
            Err(NoEntry::Gone) => None,
            Err(NoEntry::Occupied) => self.cores.local(&self.target()?.unit(lun, &self.session.initiator)?),
        }
    }

    /// Takes the units in use, for whoever completes the commands in flight there.
    pub(super) fn take_luns(&mut self) -> BTreeMap<u16, NexusState> {
        std::mem::take(&mut self.luns)
    }

    /// Returns the initiator name.
    pub(super) fn initiator(&self) -> &str {
        &self.session.initiator
    }

    /// Returns the LUNs of the units that the host sees.
    pub(super) fn visible(&self) -> Vec<u16> {
        self.target().map(|target| target.luns(&self.session.initiator)).unwrap_or_default()
    }

    pub(super) fn host(&self) -> &HostId {
        &self.host
    }

    /// Detects a changed LUN inventory; hosts are told with their next command to any unit.
    #[inline]
    pub(super) fn look(&mut self) {
        let generation = self.target().map_or(0, Target::generation);
        if generation != self.generation {
            self.generation = generation;
            self.luns.values_mut().for_each(NexusState::luns_changed);
        }
    }

    /// Returns the nexus state of a unit, creating it on first use.
    #[inline]
    pub(super) fn state(&mut self, lun: u16) -> Result<&mut NexusState, NoEntry> {
        if !self.luns.contains_key(&lun) {
            self.open(lun)?;
        }
        self.luns.get_mut(&lun).ok_or(NoEntry::Gone)
    }

    #[cold]
    fn open(&mut self, lun: u16) -> Result<(), NoEntry> {
        let target = self.target().ok_or(NoEntry::Gone)?;
        let unit = target.unit(lun, &self.session.initiator).ok_or(NoEntry::Gone)?;
        let local = self.cores.local(&unit).ok_or(NoEntry::Gone)?;
        let nexus = unit.enter(self.session.id, self.host.clone(), self.session.signal.clone())?;
        self.luns.insert(lun, NexusState::new(local, nexus, self.session.clone(), self.first));
        Ok(())
    }

    /// Begins a command.
    #[inline]
    pub(super) fn begin(&mut self, ready: Ready) -> (Option<Rc<LogicalUnit>>, Begun) {
        let Lun::Unit(lun) = ready.lun else { return (None, self.without_unit(&ready)) };
        let state = match self.state(lun) {
            Ok(state) => state,
            Err(NoEntry::Gone) => return (None, self.without_unit(&ready)),
            Err(NoEntry::Occupied) => {
                return match ready.command {
                    // The LUN inventory does not depend on commands in flight on this unit.
                    Ok(Command::ReportLuns { select, room }) => (None, self.luns_or_why_not(select, room)),
                    _ => (None, Begun::Now(Err(Failure::BUSY))),
                };
            }
        };
        let local = state.local.clone();
        state.look();
        if state.has_attention() && !ready.command.as_ref().is_ok_and(Command::passes_attention) {
            let attention = state.take_attention().unwrap_or(code::NONE);
            return (Some(local), Sense::attention(attention).into());
        }
        let begun = match self.checked(&local, ready) {
            Ok(begun) => begun,
            Err(failure) => Begun::Now(Err(failure)),
        };
        (Some(local), begun)
    }

    #[inline]
    fn checked(&mut self, local: &Rc<LogicalUnit>, ready: Ready) -> Result<Begun, Failure> {
        let command = ready.command?;
        if !local.admits(&self.host, &command) {
            return Err(Failure::CONFLICT);
        }
        if command.is_write() && local.is_protected() {
            return Err(Sense::new(key::DATA_PROTECT, code::WRITE_PROTECTED).into());
        }
        if let Some(verdict) = ready.verdict {
            return Err(verdict);
        }
        let fua = |run: Run| Run { fua: run.fua || !local.unit.modes().has(Modes::CACHE), ..run };
        match command {
            Command::Read(run) => {
                local.check_run(run, TRANSFER_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Ok(Begun::Later(execute::read(local, run)))
            }
            Command::Write(run) => {
                local.check_run(run, TRANSFER_BLOCKS_MAX)?;
                let run = cut(run, &ready.data)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Ok(Begun::Later(execute::write(local, fua(run), ready.data)))
            }
            _ => self.others(local, command, ready.data),
        }
    }

    fn others(&mut self, local: &Rc<LogicalUnit>, command: Command, data: BufList) -> Result<Begun, Failure> {
        let fua = |run: Run| Run { fua: run.fua || !local.unit.modes().has(Modes::CACHE), ..run };
        let no_cache = !local.unit.modes().has(Modes::CACHE);
        let unit = &local.unit;
        let spec = unit.spec();
        // A parameter list must be as long as announced.
        let whole = |len: u32| match data.len() as u64 == u64::from(len) {
            true => Ok(data.to_vec()),
            false => Err(Failure::from(Sense::illegal(code::PARAMETER_LIST_LENGTH))),
        };
        if command.is_write() && !matches!(command, Command::WriteVerify { .. }) {
            complete(&command, &data)?;
        }
        Ok(match command {
            Command::Read(_) | Command::Write(_) => good(),
            Command::TestUnitReady | Command::SelfTest => good(),
            Command::RequestSense { descriptor, room } => {
                let attention = self.luns.get_mut(&unit.lun()).and_then(NexusState::take_attention);
                let sense = attention.map_or(Sense::new(key::NO_SENSE, code::NONE), Sense::attention);
                reply(sense.to_bytes(descriptor), room)
            }
            Command::Inquiry { page: None, room } => reply(inquiry::standard(&spec.identity), room),
            Command::Inquiry { page: Some(page), room } => {
                let about = inquiry::Unit {
                    identity: &spec.identity,
                    name: &spec.name,
                    target: unit.target(),
                    rotational: spec.rotational,
                    threshold_exponent: log::THRESHOLD_EXPONENT,
                };
                reply(inquiry::page(page, &about).ok_or(Sense::cdb(2))?, room)
            }
            Command::ModeSense { ten, no_descriptor, long, control, page, subpage, room } => {
                let ask = Ask { ten, no_descriptor, long, control, page, subpage };
                reply(mode::sense(&ask, &self.pages(local))?, room)
            }
            Command::ModeSelect { ten, len } => {
                let modes = mode::select(ten, &whole(len)?, &self.pages(local))?;
                if modes != unit.modes() {
                    unit.set_modes(modes);
                    if let Some(state) = self.luns.get_mut(&unit.lun()) {
                        state.set_modes_itself();
                    }
                }
                good()
            }
            Command::LogSense { page, subpage, from, room } => {
                reply(log::sense(page, subpage, from, spec.space.provisioning())?, room)
            }
            Command::ReadCapacity10 => reply(inquiry::capacity10(local.blocks()), 8),
            Command::ReadCapacity16 { room } => reply(inquiry::capacity16(local.blocks()), room),
            Command::WriteVerify { run, compare } => {
                local.check_run(run, TRANSFER_BLOCKS_MAX)?;
                let run = cut(run, &data)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Begun::Later(execute::write_verify(local, run, data, compare))
            }
            Command::Verify { run, compare } => {
                local.check_run(run, VERIFY_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Begun::Later(execute::verify(local, run, data, compare))
            }
            Command::OrWrite(run) => {
                local.check_run(run, TRANSFER_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Begun::Later(execute::or_write(local, fua(run), data))
            }
            Command::CompareAndWrite(run) => {
                if run.blocks > COMPARE_BLOCKS_MAX {
                    return Err(Sense::cdb(13).into());
                }
                local.check_run(run, COMPARE_BLOCKS_MAX)?;
                if run.blocks == 0 {
                    return Ok(good());
                }
                Begun::Later(execute::compare_and_write(local, fua(run), &data))
            }
            Command::WriteSame { run, no_data, .. } => {
                local.check_run(run, u32::MAX)?;
                // WSNZ: zero blocks do not mean all blocks up to the end.
                if run.blocks == 0 || run.blocks > SAME_BLOCKS_MAX {
                    return Err(Sense::cdb(10).into());
                }
                let data = if no_data { BufList::new() } else { data };
                Begun::Later(execute::write_same(local, run, data, no_cache))
            }
            Command::Unmap { len } => {
                whole(len)?;
                Begun::Later(execute::unmap(local, &data, no_cache)?)
            }
            Command::SyncCache(run) => {
                local.check_run(run, u32::MAX)?;
                Begun::Later(execute::sync(local))
            }
            Command::PreFetch(run) => {
                local.check_run(run, u32::MAX)?;
                good()
            }
            Command::GetLbaStatus { lba, room } => {
                local.check_run(Run { lba, blocks: 1, fua: false }, 1)?;
                let work = execute::lba_status(local, lba, room);
                Begun::Later(many(async move {
                    let data = work.await?;
                    Ok(data.slice(0..data.len().min(room as usize)))
                }))
            }
            Command::ReadDefects { twelve, format, room } => {
                let mut out = vec![0, format, 0, 0];
                out.resize(if twelve { 8 } else { 4 }, 0);
                reply(out, room)
            }
            Command::StartStop { eject, .. } => match eject {
                true => return Err(Sense::cdb_bit(4, 1).into()),
                false => good(),
            },
            Command::Reserve => self.reserve(local, Action::HoldWhole)?,
            Command::Release => self.reserve(local, Action::LetGoWhole)?,
            Command::PrIn { action, room } => {
                let table = local.table().ok_or(Sense::illegal(code::INVALID_OPCODE))?;
                reply(reserve::report(action, &table), room)
            }
            Command::PrOut { action, scope_type, len } => {
                if local.device.reservations().is_none() {
                    return Err(Sense::illegal(code::INVALID_OPCODE).into());
                }
                let action = reserve::action(action, scope_type, &whole(len)?)?;
                self.reserve(local, action)?
            }
            Command::ReportLuns { select, room } => self.report_luns(select, room)?,
            Command::ReportOpcodes { timeouts, options, opcode, action, room } => {
                reply(opcodes::report(timeouts, options, opcode, action)?, room)
            }
            Command::ReportFunctions { long, room } => reply(opcodes::functions(long), room),
            Command::ReportGroups { extended, room } => reply(inquiry::port_groups(extended), room),
            Command::SetGroups { len } => {
                inquiry::set_port_groups(&whole(len)?).map_err(Sense::list)?;
                good()
            }
            Command::ExtendedCopy { len } => {
                if len == 0 {
                    return Ok(good());
                }
                if len as usize > copy::LIST_MAX {
                    return Err(Sense::illegal(code::PARAMETER_LIST_LENGTH).into());
                }
                self.extended_copy(copy::parse(&whole(len)?)?)?
            }
            Command::CopyResults { results: CopyResults::Parameters, room, .. } => reply(copy::parameters(), room),
            Command::CopyResults { results, list, room } => {
                let found = self.copies.borrow().iter().find(|(name, _)| *name == list).map(|(_, outcome)| *outcome);
                let outcome = found.ok_or(Sense::cdb(2))?;
                reply(
                    if results == CopyResults::Status { copy::status(&outcome) } else { copy::failed(&outcome) },
                    room,
                )
            }
        })
    }

    fn pages(&self, local: &LogicalUnit) -> Pages {
        let spec = local.unit.spec();
        Pages {
            modes: local.unit.modes(),
            read_only: spec.read_only || local.device.geometry().read_only,
            blocks: local.blocks(),
            threshold: spec.space.threshold().map(log::in_units),
        }
    }

    fn reserve(&mut self, local: &Rc<LogicalUnit>, action: Action) -> Result<Begun, Failure> {
        let Some(reservations) = local.device.reservations() else {
            return Err(Sense::illegal(code::INVALID_OPCODE).into());
        };
        let applied = reservations.apply(&self.host, action);
        let local = local.clone();
        Ok(Begun::Control(many(async move {
            let change = match applied.await {
                Ok(Ok(change)) => change,
                Ok(Err(refusal)) => return Err(reserve::refusal(refusal).map_or(Failure::CONFLICT, Into::into)),
                Err(error) => return Err(Failure::of(&error, true)),
            };
            if !change.abort.is_empty() {
                // An error means that all holders are gone: their sessions have ended.
                local.unit.abort(|nexus| change.abort.contains(&nexus.host)).await;
            }
            Ok(BufList::new())
        })))
    }

    fn report_luns(&mut self, select: u8, room: u32) -> Result<Begun, Failure> {
        if room < 16 {
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
        for state in self.luns.values_mut() {
            state.luns_reported();
        }
        Ok(reply(inquiry::report_luns(luns.into_iter().map(Lun::to_bytes)), room))
    }

    fn luns_or_why_not(&mut self, select: u8, room: u32) -> Begun {
        self.report_luns(select, room).unwrap_or_else(|failure| Begun::Now(Err(failure)))
    }

    /// Responds to a command to a LUN without a unit.
    fn without_unit(&mut self, ready: &Ready) -> Begun {
        let well_known = ready.lun == Lun::ReportLuns;
        match ready.command {
            Ok(Command::ReportLuns { select, room }) if well_known || ready.lun == Lun::Unit(0) => {
                self.luns_or_why_not(select, room)
            }
            Ok(Command::Inquiry { page: None, room }) => {
                reply(if well_known { inquiry::well_known() } else { inquiry::nothing() }, room)
            }
            Ok(Command::TestUnitReady) if well_known => good(),
            Ok(Command::RequestSense { descriptor, room }) => {
                let sense = match well_known {
                    true => Sense::new(key::NO_SENSE, code::NONE),
                    false => Sense::illegal(code::NO_UNIT),
                };
                reply(sense.to_bytes(descriptor), room)
            }
            _ if well_known => Sense::illegal(code::INVALID_OPCODE).into(),
            _ => Sense::illegal(code::NO_UNIT).into(),
        }
    }

    fn extended_copy(&mut self, copy: Copy) -> Result<Begun, Failure> {
        // All units are resolved before anything is written.
        // Only units of this target: a session sees no others.
        let units = self.target().map(|target| target.units_of(&self.session.initiator)).unwrap_or_default();
        let mut locals: Vec<Rc<LogicalUnit>> = Vec::new();
        for target in &copy.targets {
            let unit = units.iter().find(|unit| names(&target.designator, unit.spec()));
            let local = unit.and_then(|unit| self.cores.local(unit));
            let local = local.ok_or(copy::aborted(code::COPY_UNREACHABLE))?;
            if target.block != BLOCK {
                return Err(Sense::list(28).into());
            }
            locals.push(local);
        }
        for segment in &copy.segments {
            let (from, to) = (&locals[usize::from(segment.from)], &locals[usize::from(segment.to)]);
            if !from.admits_access(&self.host, Access::Read) || !to.admits_access(&self.host, Access::Write) {
                return Err(Failure::CONFLICT);
            }
            if to.is_protected() {
                return Err(Sense::new(key::DATA_PROTECT, code::WRITE_PROTECTED).into());
            }
            for (local, lba) in [(from, segment.from_lba), (to, segment.to_lba)] {
                let run = Run { lba, blocks: segment.blocks, fua: false };
                local
                    .check_run(run, u32::MAX)
                    .map_err(|sense| Sense { info: sense.info, ..copy::aborted(code::NONE) })?;
            }
        }
        let copies = self.copies.clone();
        Ok(Begun::Later(many(async move {
            let mut outcome = copy::Outcome { segments: 0, bytes: 0, failed: None };
            for segment in &copy.segments {
                let (from, to) = (&locals[usize::from(segment.from)], &locals[usize::from(segment.to)]);
                let block = u64::from(BLOCK);
                let len = u64::from(segment.blocks) * block;
                let copied = execute::copy(from, to, segment.from_lba * block, segment.to_lba * block, len);
                if let Err(failure) = copied.await {
                    outcome.failed = Some(failure.sense.unwrap_or(copy::aborted(code::THIRD_PARTY)));
                    break;
                }
                outcome.segments += 1;
                outcome.bytes += len;
            }
            if !copy.forget {
                let mut copies = copies.borrow_mut();
                copies.retain(|(list, _)| *list != copy.list);
                if copies.len() == COPIES_KEPT {
                    copies.pop_front();
                }
                copies.push_back((copy.list, outcome));
            }
            match outcome.failed {
                None => Ok(BufList::new()),
                Some(_) => Err(Failure {
                    status: status::CHECK_CONDITION,
                    sense: Some(copy::aborted(code::THIRD_PARTY).with_info(outcome.segments.into())),
                }),
            }
        })))
    }
}

/// Returns true if a designator is one of the unit's own.
fn names(designator: &[u8], spec: &crate::unit::UnitSpec) -> bool {
    let identity = &spec.identity;
    match (designator.get(1), designator.get(4..)) {
        (Some(3), Some(name)) => name == identity.naa(),
        (Some(0x0a), Some(name)) => name.get(2..) == Some(&identity.uuid[..]),
        _ => false,
    }
}
