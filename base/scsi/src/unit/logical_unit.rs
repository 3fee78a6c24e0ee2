//! Logical units of one core: their devices, and the checks before a command reaches them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::reservation::{HostId, ReservationAccess, ReservationTable, ReservationView};
use forebay_block::{BlockDevice, Geometry};

use super::Unit;
use super::reservations::{access, passes_whole};
use crate::BLOCK;
use crate::cdb::{LbaRange, ScsiCommand};
use crate::mode::Modes;
use crate::sense::{Sense, code};

/// Access to the block devices of units from this core.
pub trait UnitDevices {
    /// Returns the device behind a unit; `None` once it is no longer available.
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>>;
}

/// Logical units of a core, shared by its sessions.
///
/// Each unit in use has one [`LogicalUnit`] on this core.  It is dropped with its last user; its entry is dropped by a
/// sweep, whose cost is amortized over the insertions since the last one.
pub struct LogicalUnits {
    devices: Rc<dyn UnitDevices>,
    table: RefCell<UnitTable>,
}

/// Units in use on a core, by unit id.
#[derive(Default)]
struct UnitTable {
    by_unit: BTreeMap<u64, Weak<LogicalUnit>>,
    /// Number of entries at which those of unused units are dropped.
    sweep_at: usize,
}

impl LogicalUnits {
    /// Creates an empty set, which opens units by `devices`.
    pub fn new(devices: Rc<dyn UnitDevices>) -> Self {
        Self { devices, table: RefCell::default() }
    }

    /// Returns the logical unit of `unit` on this core; `None` once its device is no longer available.
    pub(crate) fn get(&self, unit: &Arc<Unit>) -> Option<Rc<LogicalUnit>> {
        let found = self.table.borrow().by_unit.get(&unit.id()).and_then(Weak::upgrade);
        if found.is_some() {
            return found;
        }
        let opened = Rc::new(LogicalUnit::new(unit.clone(), self.devices.device(unit)?));
        let mut table = self.table.borrow_mut();
        if table.by_unit.len() >= table.sweep_at {
            table.by_unit.retain(|_, unit| unit.strong_count() > 0);
            table.sweep_at = table.by_unit.len() * 2 + 16;
        }
        table.by_unit.insert(unit.id(), Rc::downgrade(&opened));
        Some(opened)
    }
}

/// Logical unit of one core: the shared unit, its device as this core reaches it, and the reservations in force.
pub struct LogicalUnit {
    shared: Arc<Unit>,
    device: Rc<dyn BlockDevice>,
    /// `None` where the device has no reservations.
    view: RefCell<Option<ReservationView>>,
    transfer_max: u64,
}

impl LogicalUnit {
    pub(crate) fn new(unit: Arc<Unit>, device: Rc<dyn BlockDevice>) -> Self {
        let view = device.reservations().map(|reservations| reservations.view());
        let Geometry { transfer_max, .. } = device.geometry();
        Self { shared: unit, device, view: RefCell::new(view), transfer_max: u64::from(transfer_max.max(BLOCK)) }
    }

    /// Returns the unit as shared by all cores.
    #[inline]
    pub fn shared(&self) -> &Arc<Unit> {
        &self.shared
    }

    /// Returns the LUN.
    pub fn lun(&self) -> u16 {
        self.shared.lun()
    }

    /// Returns the device.
    #[inline]
    pub(crate) fn device(&self) -> &Rc<dyn BlockDevice> {
        &self.device
    }

    /// Returns the maximum length of a device read or write, in bytes.
    #[inline]
    pub(crate) fn transfer_max(&self) -> u64 {
        self.transfer_max
    }

    /// Returns true if the write cache is enabled; without it, every write is durable before it is acknowledged.
    #[inline]
    pub(super) fn is_cached(&self) -> bool {
        self.shared.modes().has(Modes::CACHE)
    }

    /// Returns the current capacity in blocks.
    #[inline]
    pub(crate) fn blocks(&self) -> u64 {
        self.device.geometry().size / u64::from(BLOCK)
    }

    /// Returns true if reservations permit `host` to execute `command`.
    #[inline]
    pub(crate) fn admits(&self, host: &HostId, command: &ScsiCommand) -> bool {
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
    pub(crate) fn admits_access(&self, host: &HostId, access: ReservationAccess) -> bool {
        self.view.borrow_mut().as_mut().is_none_or(|view| view.allows(Some(host), access))
    }

    /// Returns the current reservation table.
    pub(crate) fn table(&self) -> Option<Arc<ReservationTable>> {
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
        self.shared.spec().read_only || self.shared.modes().has(Modes::PROTECT) || self.device.geometry().read_only
    }

    /// Checks that an LBA range lies within the unit and has at most `max` blocks.
    #[inline]
    pub(crate) fn check_run(&self, run: LbaRange, max: u32) -> Result<(), Sense> {
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
