//! Verification of what every device has a copy of: superblocks and device tables.

use forebay_block::{BufMut, Result};

use super::device::{ColumnDevice, ColumnState};
use super::set::ColumnSet;
use crate::features::write_superblock;
use crate::format::BLOCK;
use crate::format::devices::{DeviceTable, PLACES, TABLE_MAX};
use crate::format::superblock::{COPIES, DeviceIdentity, StoreSuperblock};

impl ColumnSet {
    /// Writes the superblock of every device that is used, with its identity, durably. Devices that fail are dropped, as far
    /// as parity allows.
    ///
    /// # Errors
    /// Errors of more devices than parity allows.
    pub async fn write_superblocks(&self, superblock: &StoreSuperblock) -> Result<()> {
        for device in self.written_devices() {
            self.write_superblock_of(&device, superblock).await?;
        }
        Ok(())
    }

    /// Writes the superblock of one device like [`write_superblocks`](Self::write_superblocks).
    async fn write_superblock_of(&self, device: &ColumnDevice, superblock: &StoreSuperblock) -> Result<()> {
        let Some(file) = device.file() else { return Ok(()) };
        let identity = DeviceIdentity { number: device.number, id: device.id };
        let superblock = StoreSuperblock { device: Some(identity), ..superblock.clone() };
        match write_superblock(&file, &superblock).await {
            Ok(()) => Ok(()),
            Err(error) => self.drop_device(device.number, &error.to_string()).await,
        }
    }

    /// Verifies superblocks and device tables on every device that is used, and writes damaged ones again. Returns the
    /// number of copies that were damaged.
    ///
    /// # Errors
    /// Errors of more devices than parity allows.
    pub async fn scrub_headers(&self, superblock: &StoreSuperblock) -> Result<u64> {
        let mut damaged = 0;
        let mut tables = 0;
        for device in self.written_devices() {
            let identity = DeviceIdentity { number: device.number, id: device.id };
            let mut wrong = 0;
            for at in COPIES {
                let read = device.read(BufMut::with_capacity(BLOCK), BLOCK, at).await;
                let is_right =
                    |block: &BufMut| StoreSuperblock::decode(block).is_ok_and(|found| found.device == Some(identity));
                wrong += u64::from(!read.as_ref().is_ok_and(is_right));
            }
            if wrong > 0 {
                self.write_superblock_of(&device, superblock).await?;
                tracing::warn!(
                    "{wrong} copies of the superblock of {} were damaged, and were renewed",
                    device.describe()
                );
            }
            damaged += wrong;
            if device.state() != ColumnState::Active {
                continue;
            }
            for at in PLACES {
                // What cannot be read is damaged: writing it again is what may help.
                let table = device.read(BufMut::with_capacity(TABLE_MAX), TABLE_MAX, at).await.ok();
                let is_right = |table: BufMut| DeviceTable::decode(&table, superblock.store_number()).is_ok();
                tables += u64::from(!table.is_some_and(is_right));
            }
        }
        if tables > 0 {
            tracing::warn!("{tables} copies of the device table of {} were damaged, and were renewed", self.name());
            for _ in PLACES {
                self.change_table(|_| {}).await?;
            }
        }
        Ok(damaged + tables)
    }
}
