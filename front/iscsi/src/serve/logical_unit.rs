//! Logical unit of one core: its device, and the checks before a command reaches it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{Access, HostId, Table, View};
use forebay_block::{BlockDevice, Error, ErrorKind, Geometry};

use crate::scsi::cdb::{Command, Run};
use crate::scsi::mode::Modes;
use crate::scsi::sense::{Sense, code, key};
use crate::scsi::{BLOCK, status};
use crate::unit::Unit;

/// Logical unit on this core.
pub(crate) struct LogicalUnit {
    pub(crate) unit: Arc<Unit>,
    pub(crate) device: Rc<dyn BlockDevice>,
    view: RefCell<Option<View>>,
    /// Maximum length of a device read or write, in bytes.
    pub(crate) transfer_max: u64,
}

impl LogicalUnit {
    pub(crate) fn new(unit: Arc<Unit>, device: Rc<dyn BlockDevice>) -> Self {
        let view = device.reservations().map(|reservations| reservations.view());
        let Geometry { transfer_max, .. } = device.geometry();
        Self { unit, device, view: RefCell::new(view), transfer_max: u64::from(transfer_max.max(BLOCK)) }
    }

    /// Returns the current capacity in blocks.
    #[inline]
    pub(crate) fn blocks(&self) -> u64 {
        self.device.geometry().size / u64::from(BLOCK)
    }

    /// Returns true if reservations permit `host` to execute `command`.
    #[inline]
    pub(crate) fn admits(&self, host: &HostId, command: &Command) -> bool {
        let mut view = self.view.borrow_mut();
        let Some(view) = &mut *view else { return true };
        let table = view.table();
        if !table.restricts() {
            return true;
        }
        if table.whole().is_some_and(|holder| holder != host) && !passes_whole(command) {
            return false;
        }
        access(command).is_none_or(|access| table.allows(Some(host), access))
    }

    /// Returns true if reservations permit `host` this access; used for the units of a copy.
    pub(crate) fn admits_access(&self, host: &HostId, access: Access) -> bool {
        self.view.borrow_mut().as_mut().is_none_or(|view| view.allows(Some(host), access))
    }

    /// Returns the current reservation table.
    pub(crate) fn table(&self) -> Option<Arc<Table>> {
        self.view.borrow_mut().as_mut().map(|view| view.table().clone())
    }

    /// Returns the number of the newest reservation event that hosts are told of.
    #[inline]
    pub(crate) fn last_event(&self) -> u64 {
        self.view.borrow_mut().as_mut().map_or(0, |view| view.table().last_event())
    }

    /// Returns true if writes are refused.
    #[inline]
    pub(crate) fn is_protected(&self) -> bool {
        self.unit.spec().read_only || self.unit.modes().has(Modes::PROTECT) || self.device.geometry().read_only
    }

    /// Checks that an LBA range lies within the unit and has at most `max` blocks.
    #[inline]
    pub(crate) fn check_run(&self, run: Run, max: u32) -> Result<(), Sense> {
        // A range of zero blocks has to begin within the unit, too.
        let blocks = self.blocks();
        let end = run.lba.checked_add(u64::from(run.blocks));
        if end.is_none_or(|end| end > blocks) || run.lba >= blocks.max(1) {
            return Err(Sense::illegal(code::OUT_OF_RANGE).with_info(run.lba));
        }
        if run.blocks > max {
            return Err(Sense::cdb(0));
        }
        Ok(())
    }
}

/// Returns the access type of a command for persistent reservations (SPC-4 table 63, SBC-3 table 13).
fn access(command: &Command) -> Option<Access> {
    match command {
        Command::Read(_)
        | Command::Verify { .. }
        | Command::PreFetch(_)
        | Command::ModeSense { .. }
        | Command::GetLbaStatus { .. }
        | Command::ReadDefects { .. } => Some(Access::Read),
        Command::ModeSelect { .. }
        | Command::SyncCache(_)
        | Command::SelfTest
        | Command::SetGroups { .. }
        | Command::Reserve
        | Command::StartStop { .. } => Some(Access::Write),
        _ if command.is_write() => Some(Access::Write),
        _ => None,
    }
}

/// Returns true for commands that are permitted despite an SPC-2 reservation of another initiator (SPC-2, table 9).
fn passes_whole(command: &Command) -> bool {
    matches!(
        command,
        Command::Inquiry { .. }
            | Command::ReportLuns { .. }
            | Command::RequestSense { .. }
            | Command::Release
            | Command::ReportGroups { .. }
    )
}

/// Command failure: SCSI status, with sense data if there is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: u8,
    pub(crate) sense: Option<Sense>,
}

impl From<Sense> for Failure {
    fn from(sense: Sense) -> Self {
        Self { status: status::CHECK_CONDITION, sense: Some(sense) }
    }
}

impl Failure {
    /// Reservation conflict.
    pub(crate) const CONFLICT: Failure = Failure { status: status::RESERVATION_CONFLICT, sense: None };
    /// Unit temporarily unable to accept the command.
    pub(crate) const BUSY: Failure = Failure { status: status::BUSY, sense: None };

    /// Converts a device error to SCSI status and sense data.
    pub(crate) fn of(error: &Error, writing: bool) -> Self {
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
