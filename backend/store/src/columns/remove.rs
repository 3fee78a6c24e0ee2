//! Removal of devices: their columns are moved to others, and segments for which these have no space are given up.

use forebay_block::{Error, ErrorKind, Result};

use super::balance::{columns_to_move, segments_possible};
use super::device::ColumnState;
use super::set::ColumnSet;
use crate::format::devices::{DeviceTable, SegmentGroup};
use crate::init::{SEGMENTS_MIN, erase_signatures};

/// Removes the last groups of a table, so that `segments` segments are left.
pub fn truncate_groups(table: &mut DeviceTable, segments: u32) {
    let mut left = segments;
    table.groups.retain_mut(|group: &mut SegmentGroup| {
        group.segments = group.segments.min(left);
        left -= group.segments;
        group.segments > 0
    });
}

/// Marks devices as leaving; returns the number of segments that the store has without them, if that is less than it has.
///
/// # Errors
/// `Invalid` if too few devices, or too few segments, are left.
pub fn mark_leaving(table: &mut DeviceTable, numbers: &[u16], segments_max: u32) -> Result<u32> {
    for device in table.devices.iter_mut().filter(|device| numbers.contains(&device.number)) {
        device.leaving = true;
    }
    let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
    let columns = usize::from(table.data) + usize::from(table.parity);
    let left = table.members().filter(|device| !device.leaving).count();
    if left < columns {
        return invalid(format!("{left} devices would be left, and {}+{} needs {columns}", table.data, table.parity));
    }
    let segments = segments_possible(table, segments_max).min(table.segments());
    if segments < SEGMENTS_MIN {
        return invalid(format!(
            "the devices that are left have space for {segments} segments, and a store has {SEGMENTS_MIN} at least"
        ));
    }
    Ok(segments)
}

impl ColumnSet {
    /// Returns the numbers of the devices that are being removed.
    pub fn leaving(&self) -> Vec<u16> {
        self.table.borrow().leaving().map(|device| device.number).collect()
    }

    /// Returns the number of segments according to the table.
    pub fn segments(&self) -> u32 {
        self.table.borrow().segments()
    }

    /// Returns the length of a column in bytes.
    pub fn column_bytes(&self) -> u64 {
        self.geometry.borrow().column_bytes()
    }

    /// Returns the number of columns that are to be moved.
    pub fn columns_to_move(&self, segments_max: u32) -> u64 {
        columns_to_move(&self.table.borrow(), segments_max)
    }

    /// Returns whether columns are to be moved, segments to be made of free slots, or devices to be removed.
    pub fn has_moves(&self, segments_max: u32) -> bool {
        !self.leaving().is_empty()
            || self.columns_to_move(segments_max) > 0
            || self.segments_with(&[], segments_max) > self.segments()
    }

    /// Returns the number of segments that the devices that stay have space for, if that is less than there are now.
    pub fn segments_without_leaving(&self, segments_max: u32) -> u32 {
        let table = self.table.borrow();
        segments_possible(&table, segments_max).min(table.segments())
    }

    /// Returns the number of segments that the store has when devices have been removed: those given, and those that are
    /// being removed.
    ///
    /// # Errors
    /// `NotFound` for a number without device; `Busy` while a device is being replaced or filled; `Io` if one that stays is
    /// away; `Invalid` if too little is left.
    pub fn segments_without(&self, numbers: &[u16], segments_max: u32) -> Result<u32> {
        self.refuse_while_replacing()?;
        for number in numbers {
            let missing = || Error::new(ErrorKind::NotFound, format!("{} has no device {number}", self.name()));
            self.device(*number).ok_or_else(missing)?;
        }
        let mut table = self.table.borrow().clone();
        let segments = mark_leaving(&mut table, numbers, segments_max)?;
        for device in self.all_devices() {
            if table.device(device.number).is_some_and(|record| record.leaving) {
                continue;
            }
            let text = match device.state() {
                ColumnState::Active if device.file().is_some() => continue,
                ColumnState::Filling => format!("{} is being filled; wait until it is complete", device.describe()),
                _ => format!("{} is away, and would get columns; replace it first", device.describe()),
            };
            let kind = if device.state() == ColumnState::Filling { ErrorKind::Busy } else { ErrorKind::Io };
            return Err(Error::new(kind, text));
        }
        Ok(segments)
    }

    /// Records that devices are being removed, durably.
    pub async fn begin_removal(&self, numbers: &[u16], segments_max: u32) -> Result<()> {
        self.segments_without(numbers, segments_max)?;
        self.change_table(|table| drop(mark_leaving(table, numbers, segments_max))).await
    }

    /// Records that devices stay, durably.
    pub async fn cancel_removal(&self, numbers: &[u16]) -> Result<()> {
        self.change_table(|table| {
            for device in table.devices.iter_mut().filter(|device| numbers.contains(&device.number)) {
                device.leaving = false;
            }
        })
        .await
    }

    /// Gives up the last segments, durably, which hold nothing. Returns false if a device is being filled.
    pub async fn truncate(&self, segments: u32) -> Result<bool> {
        let mut done = false;
        self.change_table_if(|table| {
            done = !table.devices.iter().any(|device| device.state.is_filling());
            if done {
                truncate_groups(table, segments);
            }
            done
        })
        .await?;
        if done {
            self.place_uses.drain().await;
        }
        Ok(done)
    }

    /// Removes a device without columns from the store, durably, and erases what makes it one.
    pub async fn finish_removal(&self, number: u16) -> Result<()> {
        let Some(device) = self.device(number) else { return Ok(()) };
        let mut removed = false;
        self.change_table_if(|table| {
            removed = table.device(number).is_some_and(|device| device.leaving) && table.columns_on(number) == 0;
            if removed {
                table.devices.retain(|device| device.number != number);
            }
            removed
        })
        .await?;
        if !removed {
            return Ok(());
        }
        tracing::info!("{} is no device of {} any more", device.describe(), self.name());
        let Some(file) = device.file().filter(|_| device.state() == ColumnState::Active) else { return Ok(()) };
        let erased = match file.size() {
            Ok(size) => erase_signatures(&file, size).await,
            Err(error) => Err(Error::from_io(error, "its size")),
        };
        let erased = match erased {
            Ok(()) => file.sync_data().await.map_err(|error| Error::from_io(error, "flushing it")),
            failed => failed,
        };
        if let Err(error) = erased {
            tracing::warn!(%error, "cannot erase the superblocks of {}, which was removed", device.describe());
        }
        Ok(())
    }
}
