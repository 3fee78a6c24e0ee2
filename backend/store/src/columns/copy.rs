//! Copies of columns to a device: to one that is filled, or that columns are moved to.

use std::rc::Rc;

use forebay_block::{Error, Result};

use super::device::ColumnDevice;
use super::set::ColumnSet;
use crate::format::{BLOCK, BLOCK64};
use crate::pacer::RepairPacer;

/// Lines copied at a time.
const LINES_AT_ONCE: u64 = 64;

impl ColumnSet {
    /// Copies lines of a column, as they are stored or reconstructed, to `device`, where the column's first line is at byte
    /// `offset`.
    ///
    /// # Errors
    /// When they cannot be read, or not written: the device is dropped then.
    pub(super) async fn copy_lines(
        &self,
        segment: u32,
        column: usize,
        lines: std::ops::Range<u64>,
        (device, offset): (&Rc<ColumnDevice>, u64),
        pacer: &mut RepairPacer,
    ) -> Result<()> {
        let mut line = lines.start;
        while line < lines.end {
            let count = LINES_AT_ONCE.min(lines.end - line);
            let len = count as usize * BLOCK;
            pacer.pace(len as u64).await;
            let read = self.read_column_to_copy(segment, column, line, len).await?;
            if let Err(error) = device.write(read.freeze().into(), offset + line * BLOCK64).await {
                self.drop_device(device.number, &format!("writing to it fails: {error}")).await?;
                return Err(Error::from_io(error, format!("copying columns to {}", device.describe())));
            }
            line += count;
        }
        Ok(())
    }
}
