//! Table of the file, in memory: which row holds what, which rows are free, and which blocks are to be written.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::format::{BLOCK_LEN, CacheGeometry, Incarnation, ROWS_PER_BLOCK, Row, RowKind, TableBlock};
use crate::part::PartKey;

/// Row in memory.
#[derive(Debug, Clone)]
pub(crate) struct TableRow {
    pub(crate) key: PartKey,
    pub(crate) kind: RowKind,
    pub(crate) crc: u32,
    /// True if the slot's content has been right since the start.
    pub(crate) verified: bool,
}

/// Reads of a slot in flight.
#[derive(Debug, Default)]
struct Pin {
    reads: u32,
    /// Set if the row becomes free with the last of them.
    released: bool,
}

/// Rows of the table.
///
/// A row is free, or it has a key, or it was taken by a writer; the slot of a row that is being read is not
/// free before the read has ended.
pub(crate) struct Table {
    geometry: CacheGeometry,
    rows: Vec<Option<TableRow>>,
    free_data: Vec<u32>,
    free_flags: Vec<u32>,
    pins: BTreeMap<u32, Pin>,
    dirty: BTreeSet<u32>,
    serial: u64,
}

impl Table {
    /// Creates a table without keys.
    pub(crate) fn new(geometry: CacheGeometry) -> Self {
        let mut table = Self {
            geometry,
            rows: Vec::new(),
            free_data: Vec::new(),
            free_flags: Vec::new(),
            pins: BTreeMap::new(),
            dirty: BTreeSet::new(),
            serial: 0,
        };
        table.reset();
        table
    }

    /// Removes all keys. Rows whose slots are being read become free after that.
    pub(crate) fn reset(&mut self) {
        self.rows = vec![None; self.geometry.rows() as usize];
        self.dirty.clear();
        self.pins.values_mut().for_each(|pin| pin.released = true);
        self.find_free();
    }

    /// Collects the free rows, the lowest ones to be taken first.
    pub(crate) fn find_free(&mut self) {
        let data = self.geometry.data_rows;
        let free = |range: Range<u32>| {
            let is_free = |row: &u32| self.rows[*row as usize].is_none() && !self.pins.contains_key(row);
            range.rev().filter(is_free).collect()
        };
        (self.free_data, self.free_flags) = (free(0..data), free(data..self.geometry.rows()));
    }

    /// Takes a free row with a slot.
    pub(crate) fn take_data(&mut self) -> Option<u32> {
        self.free_data.pop()
    }

    /// Takes a free row without a slot.
    pub(crate) fn take_flag(&mut self) -> Option<u32> {
        self.free_flags.pop()
    }

    pub(crate) fn get(&self, row: u32) -> Option<&TableRow> {
        self.rows[row as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, row: u32) -> Option<&mut TableRow> {
        self.rows[row as usize].as_mut()
    }

    /// Gives a row that was taken its key; its block is to be written.
    pub(crate) fn set(&mut self, row: u32, content: TableRow) {
        self.restore(row, content);
        self.dirty.insert(row / ROWS_PER_BLOCK);
    }

    /// Gives a row the key that is stored.
    pub(crate) fn restore(&mut self, row: u32, content: TableRow) {
        debug_assert!(self.rows[row as usize].is_none(), "row {row} has a key");
        self.rows[row as usize] = Some(content);
    }

    /// Frees a row, as soon as its slot is not read any more. What is stored stays true, so nothing is written.
    pub(crate) fn release(&mut self, row: u32) {
        self.rows[row as usize] = None;
        match self.pins.get_mut(&row) {
            Some(pin) => pin.released = true,
            None if row < self.geometry.data_rows => self.free_data.push(row),
            None => self.free_flags.push(row),
        }
    }

    /// Frees a row whose content is not what the table says; its block is to be written.
    pub(crate) fn discard(&mut self, row: u32) {
        self.release(row);
        self.dirty.insert(row / ROWS_PER_BLOCK);
    }

    /// Keeps a slot from being reused while it is read.
    pub(crate) fn pin(&mut self, row: u32) {
        self.pins.entry(row).or_default().reads += 1;
    }

    /// Ends a read of a slot.
    pub(crate) fn unpin(&mut self, row: u32) {
        let Some(pin) = self.pins.get_mut(&row) else { return };
        pin.reads -= 1;
        if pin.reads == 0 {
            let released = pin.released;
            self.pins.remove(&row);
            if released {
                self.free_data.push(row);
            }
        }
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes up to `max` blocks that are to be written; returns their numbers and contents.
    pub(crate) fn take_dirty(&mut self, max: usize, incarnation: &Incarnation) -> Vec<(u32, Vec<u8>)> {
        let mut blocks = Vec::new();
        while blocks.len() < max
            && let Some(block) = self.dirty.pop_first()
        {
            blocks.push((block, self.encode(block, incarnation)));
        }
        blocks
    }

    fn encode(&mut self, block: u32, incarnation: &Incarnation) -> Vec<u8> {
        self.serial += 1;
        let stored = |row: u32| {
            let TableRow { key, kind, crc, .. } = self.rows.get(row as usize)?.clone()?;
            if key.source.is_own() {
                // Of no use after a restart: the row is free then.
                return None;
            }
            let part = if matches!(kind, RowKind::Data | RowKind::Zero) { key.part } else { 0 };
            Some(Row { kind, identity: (*key.source.0).clone(), object: key.object, part, crc })
        };
        let first = block * ROWS_PER_BLOCK;
        let rows = (first..first + ROWS_PER_BLOCK).map(stored).collect();
        let bytes = TableBlock { serial: self.serial, rows }.encode(block, incarnation);
        debug_assert_eq!(bytes.len(), BLOCK_LEN);
        bytes
    }

    /// Continues behind a serial that was read.
    pub(crate) fn saw_serial(&mut self, serial: u64) {
        // A serial that leaves no successor was never written by this program.
        self.serial = self.serial.max(serial.min(u64::MAX / 2));
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use forebay_block::{PoolIdentity, SnapId, SnapshotIdentity};

    use super::*;
    use crate::part::SnapshotSource;

    fn content(object: u64) -> TableRow {
        let pool = PoolIdentity { store: [1; 16], pool: 1 };
        let source = SnapshotSource(Rc::new(SnapshotIdentity { pool, image: "a".into(), snap: SnapId(1) }));
        TableRow { key: PartKey { source, object, part: 0 }, kind: RowKind::Data, crc: 0, verified: true }
    }

    #[test]
    fn a_slot_that_is_read_is_not_free() {
        let mut table = Table::new(CacheGeometry::of(16 << 20).expect("a size"));
        let all: Vec<u32> = std::iter::from_fn(|| table.take_data()).collect();
        assert!(all.iter().copied().eq(0..table.geometry.data_rows), "the lowest first");
        table.set(3, content(1));
        table.pin(3);
        table.pin(3);
        table.release(3);
        assert_eq!((table.get(3).is_none(), table.take_data()), (true, None));
        table.unpin(3);
        assert_eq!(table.take_data(), None);
        table.unpin(3);
        assert_eq!((table.take_data(), table.take_data()), (Some(3), None));
        table.set(5, content(2));
        table.pin(5);
        table.reset();
        assert!(std::iter::from_fn(|| table.take_data()).all(|row| row != 5), "nor after everything was cleared");
        table.unpin(5);
        assert_eq!(table.take_data(), Some(5));
    }

    #[test]
    fn changed_blocks_are_written_with_growing_serials() {
        let mut table = Table::new(CacheGeometry::of(16 << 20).expect("a size"));
        table.set(0, content(1));
        table.set(41, content(2));
        table.set(42, content(3));
        table.release(41);
        let blocks = table.take_dirty(10, &[0; 16]);
        assert_eq!(blocks.iter().map(|(block, _)| *block).collect::<Vec<_>>(), [0, 1]);
        let decoded: Vec<_> =
            blocks.iter().map(|(block, bytes)| TableBlock::decode(bytes, *block, &[0; 16]).expect("valid")).collect();
        assert!(decoded[0].serial < decoded[1].serial && !table.is_dirty());
        let objects = |block: &TableBlock| block.rows.iter().flatten().map(|row| row.object).collect::<Vec<_>>();
        assert_eq!((objects(&decoded[0]), objects(&decoded[1])), (vec![1], vec![3]));
    }
}
