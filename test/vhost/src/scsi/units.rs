//! Common commands on units of target 0, with their data decoded.

use super::data::{self, DiskCapacity};
use super::{ScsiHost, ScsiHostCommand, ScsiHostCompletion, cdb};
use crate::block::SECTOR;
use crate::error::{FrontEndError, Result};

/// Allocation length of commands whose data have no fixed length.
const ALLOCATION: u16 = 4096;

impl ScsiHost {
    /// Runs a command that must succeed; returns the data that were transferred.
    ///
    /// # Errors
    /// As of [`settle`](Self::settle); [`FrontEndError::Violation`] when the command fails.
    pub fn execute(&mut self, command: &ScsiHostCommand) -> Result<Vec<u8>> {
        let done = self.settle(command)?;
        if !done.is_good() {
            return Err(FrontEndError::Violation(format!("{:x?} failed: {done:x?}", command.cdb)));
        }
        let length = done.data.len().saturating_sub(done.residual as usize);
        Ok(done.data[..length].to_vec())
    }

    /// Waits until a unit is ready; unit attentions are taken on the way.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn ready(&mut self, lun: u16) -> Result<()> {
        self.execute(&ScsiHostCommand::new(lun, cdb::test_unit_ready())).map(drop)
    }

    /// Reads blocks of 512 bytes.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn read(&mut self, lun: u16, lba: u64, blocks: u32) -> Result<Vec<u8>> {
        let found = self.execute(&ScsiHostCommand::read(lun, lba, blocks))?;
        match found.len() as u64 == u64::from(blocks) * SECTOR {
            true => Ok(found),
            false => Err(FrontEndError::Violation(format!("{} bytes of {blocks} blocks", found.len()))),
        }
    }

    /// Writes blocks of 512 bytes.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn write(&mut self, lun: u16, lba: u64, data: &[u8]) -> Result<()> {
        self.execute(&ScsiHostCommand::write(lun, lba, data)).map(drop)
    }

    /// Makes all completed writes of a unit durable.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn synchronize(&mut self, lun: u16) -> Result<()> {
        self.execute(&ScsiHostCommand::new(lun, cdb::synchronize_cache16(0, 0))).map(drop)
    }

    /// Deallocates ranges of blocks: first block and number.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn unmap(&mut self, lun: u16, ranges: &[(u64, u32)]) -> Result<()> {
        let list = cdb::unmap_list(ranges);
        self.execute(&ScsiHostCommand::new(lun, cdb::unmap(list.len() as u16)).writing(&list)).map(drop)
    }

    /// Writes one block many times, with [`cdb::UNMAP`] or no flags.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn write_same(&mut self, lun: u16, lba: u64, blocks: u32, flags: u8, block: &[u8]) -> Result<()> {
        let command = ScsiHostCommand::new(lun, cdb::write_same16(lba, blocks, flags));
        self.execute(&command.writing(block)).map(drop)
    }

    /// Writes blocks if they hold what is expected; the completion tells whether they did.
    ///
    /// # Errors
    /// As of [`settle`](Self::settle).
    pub fn compare_and_write(
        &mut self,
        lun: u16,
        lba: u64,
        expected: &[u8],
        data: &[u8],
    ) -> Result<ScsiHostCompletion> {
        let blocks = (data.len() as u64 / SECTOR) as u8;
        let command = ScsiHostCommand::new(lun, cdb::compare_and_write(lba, blocks));
        self.settle(&command.writing(&[expected, data].concat()))
    }

    /// Returns the standard INQUIRY data, or a vital product data page.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn inquiry(&mut self, lun: u16, page: Option<u8>) -> Result<Vec<u8>> {
        let command = ScsiHostCommand::new(lun, cdb::inquiry(page, ALLOCATION));
        self.execute(&command.reading(ALLOCATION.into()))
    }

    /// Returns the capacity of a unit.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn capacity(&mut self, lun: u16) -> Result<DiskCapacity> {
        let found = self.execute(&ScsiHostCommand::new(lun, cdb::read_capacity16(32)).reading(32))?;
        DiskCapacity::decode(&found).ok_or_else(|| undecodable("READ CAPACITY (16)", &found))
    }

    /// Returns the numbers of all units.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn report_luns(&mut self) -> Result<Vec<u16>> {
        let command = ScsiHostCommand::new(0, cdb::report_luns(0, ALLOCATION.into()));
        let found = self.execute(&command.reading(ALLOCATION.into()))?;
        data::reported_luns(&found).ok_or_else(|| undecodable("REPORT LUNS", &found))
    }

    /// Returns sense data in fixed format; those of a pending unit attention, if there is one.
    ///
    /// # Errors
    /// As of [`run`](Self::run); [`FrontEndError::Violation`] when the command fails.
    pub fn request_sense(&mut self, lun: u16) -> Result<data::DecodedSense> {
        let done = self.run(0, &ScsiHostCommand::new(lun, cdb::request_sense(false, 96)).reading(96))?;
        let sense = data::DecodedSense::decode(&done.data).filter(|_| done.is_good());
        sense.ok_or_else(|| undecodable("REQUEST SENSE", &done.data))
    }

    /// Runs a service action of PERSISTENT RESERVE IN; returns its data.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn reserve_in(&mut self, lun: u16, action: u8) -> Result<Vec<u8>> {
        let command = ScsiHostCommand::new(lun, cdb::persistent_reserve_in(action, ALLOCATION));
        self.execute(&command.reading(ALLOCATION.into()))
    }

    /// Runs a service action of PERSISTENT RESERVE OUT; the completion tells whether it succeeded.
    ///
    /// # Errors
    /// As of [`settle`](Self::settle).
    pub fn reserve_out(
        &mut self,
        lun: u16,
        action: u8,
        kind: u8,
        key: u64,
        service_key: u64,
    ) -> Result<ScsiHostCompletion> {
        let list = cdb::reserve_list(key, service_key, 0);
        self.settle(&ScsiHostCommand::new(lun, cdb::persistent_reserve_out(action, kind, 24)).writing(&list))
    }

    /// Returns the registered keys of a unit.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn reservation_keys(&mut self, lun: u16) -> Result<Vec<u64>> {
        let found = self.reserve_in(lun, cdb::reserve_in::READ_KEYS)?;
        let keys = data::reservation_keys(&found).ok_or_else(|| undecodable("READ KEYS", &found));
        keys.map(|(_, keys)| keys)
    }

    /// Returns key and type of the reservation of a unit, if it has one.
    ///
    /// # Errors
    /// As of [`execute`](Self::execute).
    pub fn reservation(&mut self, lun: u16) -> Result<Option<(u64, u8)>> {
        let found = self.reserve_in(lun, cdb::reserve_in::READ_RESERVATION)?;
        data::reservation(&found).ok_or_else(|| undecodable("READ RESERVATION", &found))
    }
}

fn undecodable(what: &str, bytes: &[u8]) -> FrontEndError {
    FrontEndError::Violation(format!("{what} returned {bytes:x?}"))
}
