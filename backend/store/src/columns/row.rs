//! Writes: rows of a batch, blocks that every device has, and flushes.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, Result};
use forebay_reactor::sleep;
use forebay_reactor::sync::join_all;

use super::device::ColumnDevice;
use super::geometry::LineBlock;
use super::set::ColumnSet;
use crate::format::BLOCK;

/// Attempts of a write before its device counts as failed, so that a transient error does not cost its redundancy.
const ATTEMPTS: u32 = 3;
/// Delay between attempts.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Batch as a row: its columns, encoded once.
pub struct BatchRow {
    first: LineBlock,
    /// Content of each column, data first.
    columns: Vec<BufList>,
    /// Devices that have their column.
    done: Vec<u16>,
}

/// Write to one device, and its target.
struct ColumnWrite {
    device: Rc<ColumnDevice>,
    column: usize,
    offset: u64,
}

/// Encodes whole lines of blocks as columns: data, then parity.
pub(super) fn encode_columns(set: &ColumnSet, blocks: &BufList) -> Vec<BufList> {
    let (data, parity) = (set.data_columns(), set.parity_columns());
    let count = blocks.len() / BLOCK;
    debug_assert!(blocks.len().is_multiple_of(BLOCK * data), "a row has whole lines");
    let mut columns: Vec<BufList> = (0..data).map(|_| BufList::new()).collect();
    if data == 1 {
        columns[0] = blocks.clone();
        // Copies share the memory.
        columns.resize(1 + parity, blocks.clone());
        return columns;
    }
    let mut at = 0;
    for part in blocks.parts() {
        let mut from = 0;
        while from < part.len() {
            let count = (BLOCK - at % BLOCK).min(part.len() - from);
            columns[at / BLOCK % data].push(part.slice(from..from + count));
            (from, at) = (from + count, at + count);
        }
    }
    if parity > 0 {
        let mut made: Vec<BufMut> = (0..parity).map(|_| set.column_buffers.get(count / data)).collect();
        let parts: Vec<Vec<&[u8]>> =
            columns.iter().map(|column| column.parts().iter().map(|part| &part[..]).collect()).collect();
        let parts: Vec<&[&[u8]]> = parts.iter().map(|parts| &parts[..]).collect();
        let mut outputs: Vec<&mut [u8]> = made.iter_mut().map(|column| &mut column[..]).collect();
        set.code.borrow().encode(&parts, &mut outputs);
        columns.extend(made.into_iter().map(|column| column.freeze().into()));
    }
    columns
}

impl ColumnSet {
    /// Returns the row of a batch whose header is at `block`, with its payload behind it, padded to whole lines.
    pub fn row(&self, block: u64, blocks: &BufList) -> BatchRow {
        let first = self.geometry.borrow().locate(block);
        debug_assert_eq!(first.column, 0, "a batch begins at a line");
        BatchRow { first, columns: encode_columns(self, blocks), done: Vec::new() }
    }

    /// Returns the devices to which the columns of a row are written: those that hold them, and those that replace them.
    fn row_targets(&self, first: LineBlock) -> Vec<ColumnWrite> {
        let mut writes = Vec::new();
        for column in 0..self.columns() {
            let (at, device) = self.column(first.segment, column);
            let offset = at.line(first.line);
            let replacing = self.devices.borrow().iter().find(|other| other.replaces() == Some(device.number)).cloned();
            let targets = [Some(device), replacing].into_iter().flatten().filter(|device| device.is_written());
            writes.extend(targets.map(|device| ColumnWrite { device, column, offset }));
        }
        writes
    }

    /// Writes a row to every device that is used. Devices that fail are dropped, as far as parity allows.
    ///
    /// # Errors
    /// When it cannot be written so that it is redundant as parity promises; it may be written again.
    pub async fn write_row(&self, row: &mut BatchRow) -> Result<()> {
        let mut attempt = 1;
        loop {
            let writes: Vec<ColumnWrite> = self
                .row_targets(row.first)
                .into_iter()
                .filter(|write| !row.done.contains(&write.device.number))
                .collect();
            if writes.is_empty() {
                return Ok(());
            }
            let results = join_all(writes.iter().map(|write| {
                let bufs = row.columns[write.column].clone();
                Box::pin(async move { write.device.write(bufs, write.offset).await })
            }))
            .await;
            let mut failed = Vec::new();
            for (write, result) in writes.into_iter().zip(results) {
                match result {
                    Ok(()) => row.done.push(write.device.number),
                    Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                        let text = format!("the file system of {} is full", write.device.describe());
                        return Err(Error::new(ErrorKind::NoSpace, text));
                    }
                    Err(error) => failed.push((write, error)),
                }
            }
            // Batches wait for one that hangs: it is not tried again.
            let is_hung = |(_, error): &(ColumnWrite, std::io::Error)| error.kind() == std::io::ErrorKind::TimedOut;
            for (write, error) in failed.extract_if(.., |failure| is_hung(failure)) {
                self.drop_device(write.device.number, &error.to_string()).await?;
            }
            if failed.is_empty() {
                // A device may have joined meanwhile.
                continue;
            }
            if attempt < ATTEMPTS {
                attempt += 1;
                sleep(RETRY_AFTER).await;
                continue;
            }
            for (write, error) in failed {
                self.drop_device(write.device.number, &format!("writing to it fails: {error}")).await?;
            }
        }
    }

    /// Makes everything written durable on every device that is used. Devices that fail are dropped, as far as parity
    /// allows.
    ///
    /// # Errors
    /// When too many fail: what they keep is unknown then.
    pub async fn sync(&self) -> Result<()> {
        let devices = self.written_devices();
        let results = join_all(devices.iter().map(|device| Box::pin(async move { device.sync().await }))).await;
        for (device, result) in devices.iter().zip(results) {
            if let Err(error) = result {
                self.drop_device(device.number, &format!("flushing it fails: {error}")).await?;
            }
        }
        Ok(())
    }

    /// Writes a block durably to one place of every device that is used.
    ///
    /// # Errors
    /// When too many devices fail.
    pub async fn write_everywhere(&self, block: &Buf, at: u64) -> Result<()> {
        let devices = self.written_devices();
        let writes = devices.iter().map(|device| {
            let block = block.clone();
            Box::pin(async move { device.write(block.into(), at).await })
        });
        for (device, result) in devices.iter().zip(join_all(writes).await) {
            if let Err(error) = result {
                self.drop_device(device.number, &format!("writing byte {at} of it fails: {error}")).await?;
            }
        }
        self.sync().await
    }

    /// Returns free segments of block devices to them (discard). Files keep their space, which was allocated on purpose.
    pub async fn punch(&self, segment: u32) -> std::io::Result<()> {
        let len = self.geometry.borrow().column_bytes();
        for column in 0..self.columns() {
            let (at, device) = self.column(segment, column);
            if let Some(file) = device.file().filter(|file| device.is_written() && file.info().block_device) {
                file.punch_hole(at.offset, len).await?;
            }
        }
        Ok(())
    }
}
