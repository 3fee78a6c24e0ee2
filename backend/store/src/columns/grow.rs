//! Growth of devices, and devices that are added: their slots become segments.

use std::path::Path;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs};

use super::device::{ColumnDevice, ColumnState};
use super::places::add_groups;
use super::set::ColumnSet;
use crate::format::devices::{DEVICES_MAX, DeviceRecord, DeviceTable, RecordedState};
use crate::format::superblock::{SEGMENTS_START, StoreSuperblock};
use crate::init::{open_or_create, reject_occupied};

/// Device that is to have more slots.
pub(crate) struct DeviceGrowth {
    number: u16,
    /// Number of slots that it is to have.
    slots: u32,
    /// Open file.
    pub file: File,
    /// Current size in bytes, and the size that it is to have.
    pub from: u64,
    pub to: u64,
}

/// Gives devices their slots, and makes segments of all free slots, up to `segments_max` in total.
fn grow_table(table: &mut DeviceTable, growths: &[DeviceGrowth], segments_max: u32) {
    for growth in growths {
        if let Some(record) = table.device_mut(growth.number) {
            record.slots = record.slots.max(growth.slots);
        }
    }
    add_groups(table, segments_max);
}

impl ColumnSet {
    /// Refuses changes of the places of columns while a device is being replaced: the new one has as many slots as the old
    /// one had.
    pub(super) fn refuse_while_replacing(&self) -> Result<()> {
        match self.all_devices().iter().find(|device| device.replaces().is_some()) {
            None => Ok(()),
            Some(new) => {
                let text = format!("{} is replacing another one; wait until it is filled", new.describe());
                Err(Error::new(ErrorKind::Busy, text))
            }
        }
    }

    /// Returns the devices that can have more slots: all, or those with the given numbers. Files are to have `size` bytes
    /// each, or, with 0, keep their sizes.
    ///
    /// # Errors
    /// `NotFound` for a number without device; `Busy` while a device is replaced; `Io` if a named device is not there;
    /// `Invalid` for a size that is less than the present one, or more than a block device has.
    pub fn growths(&self, numbers: &[u16], size: u64) -> Result<Vec<DeviceGrowth>> {
        self.refuse_while_replacing()?;
        let mut devices = Vec::new();
        for number in numbers {
            let missing = || Error::new(ErrorKind::NotFound, format!("{} has no device {number}", self.name()));
            devices.push(self.device(*number).ok_or_else(missing)?);
        }
        if numbers.is_empty() {
            devices = self.all_devices().into_iter().filter(|device| device.is_written()).collect();
        }
        let column = self.geometry.borrow().column_bytes();
        let mut growths = Vec::new();
        for device in devices {
            let Some(file) = device.file().filter(|_| device.is_written()) else {
                return Err(Error::new(ErrorKind::Io, format!("{} is away, and cannot grow", device.describe())));
            };
            let from = file.size().map_err(|error| Error::from_io(error, format!("growing {}", device.describe())))?;
            let to = if size == 0 { from } else { size };
            let used = SEGMENTS_START + u64::from(device.slots()) * column;
            if to < used || (file.info().block_device && to > from) {
                let text = format!("{} has {from} bytes, of which the store uses {used}, not {to}", device.describe());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            let slots = u32::try_from((to - SEGMENTS_START) / column).unwrap_or(u32::MAX);
            if slots > device.slots() {
                growths.push(DeviceGrowth { number: device.number, slots, file, from, to });
            }
        }
        Ok(growths)
    }

    /// Returns the number of segments that the store has when devices have grown.
    pub fn segments_with(&self, growths: &[DeviceGrowth], segments_max: u32) -> u32 {
        let mut table = self.table.borrow().clone();
        grow_table(&mut table, growths, segments_max);
        table.segments()
    }

    /// Gives devices their slots, durably; returns the number of segments.
    ///
    /// # Errors
    /// Errors of more devices than parity allows.
    pub async fn grow(&self, growths: &[DeviceGrowth], segments_max: u32) -> Result<u32> {
        self.change_table(|table| grow_table(table, growths, segments_max)).await?;
        Ok(self.table.borrow().segments())
    }

    /// Makes the file or device at `path` a device of the store, without columns yet. A file has `size` bytes, or, with 0,
    /// its present size.  Returns its number.
    ///
    /// # Errors
    /// Those of replacing a device; `Invalid` if it is too small for a single column, or the store has 64 devices.
    pub async fn add(&self, superblock: &StoreSuperblock, path: &Path, size: u64, force: bool) -> Result<u16> {
        let _permit = self.changing.acquire(1).await;
        self.refuse_while_replacing()?;
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        if self.all_devices().len() >= DEVICES_MAX {
            return invalid(format!("{} has {DEVICES_MAX} devices, which is the most", self.name()));
        }
        if let Some(user) = fs::file_user(path) {
            return Err(Error::new(ErrorKind::Busy, format!("{} is in use: {user}", path.display())));
        }
        let (file, created) = open_or_create(path, OpenOptions::read_write().direct().lock()).await?;
        let added = self.add_file(superblock, path, &file, size, force).await;
        if added.is_err() && created {
            // Remove the file that was created for it.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, "cannot remove {}", path.display());
            }
        }
        added
    }

    async fn add_file(
        &self,
        superblock: &StoreSuperblock,
        path: &Path,
        file: &File,
        size: u64,
        force: bool,
    ) -> Result<u16> {
        let occupied = reject_occupied(file, force).await?;
        let (info, column) = (file.info(), self.geometry.borrow().column_bytes());
        let size = if size == 0 { info.size } else { size };
        if info.block_device && size > info.size {
            let text = format!("{} has {} bytes, not {size}", path.display(), info.size);
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
        let slots = u32::try_from(size.saturating_sub(SEGMENTS_START) / column).unwrap_or(u32::MAX);
        if slots == 0 {
            let least = SEGMENTS_START + column;
            let text = format!("{} has {size} bytes; a device of the store has {least} at least", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let size = SEGMENTS_START + u64::from(slots) * column;
        let identity = self.prepare_device(superblock, path, file, size, occupied.as_deref()).await?;
        let mut table = self.table.borrow().clone();
        let state = RecordedState::Active;
        table.next_number += 1;
        table.devices.push(DeviceRecord {
            number: identity.number,
            id: identity.id,
            slots,
            state,
            replaces: None,
            leaving: false,
            path: path.display().to_string(),
        });
        let device =
            ColumnDevice::new(identity.number, identity.id, slots, None, path.into(), Some(file.clone()), state);
        self.write_table(table, &[Rc::new(device)]).await?;
        if self.device(identity.number).is_some_and(|device| device.state() == ColumnState::Active) {
            return Ok(identity.number);
        }
        // It failed at once, and has nothing that would be missed.
        let mut table = self.table.borrow().clone();
        table.devices.retain(|device| device.number != identity.number);
        self.write_table(table, &[]).await?;
        Err(Error::new(ErrorKind::Io, format!("{} fails: its device table cannot be written", path.display())))
    }
}
