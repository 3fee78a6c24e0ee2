//! Geometry of rows: the column, line and device of every block.

use crate::format::BLOCK64;
use crate::format::devices::{DeviceTable, SegmentGroup};
use crate::format::superblock::SEGMENTS_START;

/// Block of a segment: its line and its data column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineBlock {
    pub segment: u32,
    pub line: u64,
    pub column: usize,
}

/// Location of a column of a segment on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnAt {
    /// Number of the device.
    pub device: u16,
    /// Byte address of the column's first block.
    pub offset: u64,
}

impl ColumnAt {
    /// Returns the byte address of a line's block.
    pub fn line(&self, line: u64) -> u64 {
        self.offset + line * BLOCK64
    }
}

/// Geometry of the segments of a store on several devices.
///
/// Block *i* of a segment is on data column *i* mod k, in line *i* / k.
#[derive(Debug, Clone)]
pub struct RowGeometry {
    /// Data columns (k).
    pub data: usize,
    /// Parity columns (m).
    pub parity: usize,
    /// Length of a column in lines.
    pub column_lines: u64,
    /// Groups of segments, with the number of each one's first segment.
    groups: Vec<(u32, SegmentGroup)>,
}

impl RowGeometry {
    /// Returns the geometry that a device table describes.
    pub fn of(table: &DeviceTable) -> Self {
        let mut first = 0;
        let groups = table.groups.iter().map(|group| {
            let at = first;
            first += group.segments;
            (at, group.clone())
        });
        Self {
            data: table.data.into(),
            parity: table.parity.into(),
            column_lines: table.column_blocks.into(),
            groups: groups.collect(),
        }
    }

    /// Returns the number of columns: data and parity.
    pub fn columns(&self) -> usize {
        self.data + self.parity
    }

    /// Returns the line and the column of a block, given by its number on the linear device.
    pub fn locate(&self, block: u64) -> LineBlock {
        let at = block - SEGMENTS_START / BLOCK64;
        let blocks = self.column_lines * self.data as u64;
        let (segment, within) = (at / blocks, at % blocks);
        let data = self.data as u64;
        LineBlock { segment: segment as u32, line: within / data, column: (within % data) as usize }
    }

    /// Returns the number of the first block of a line.
    #[cfg(test)]
    pub fn first_block(&self, segment: u32, line: u64) -> u64 {
        SEGMENTS_START / BLOCK64 + (u64::from(segment) * self.column_lines + line) * self.data as u64
    }

    /// Returns the location of a column: data columns first, then parity.
    pub fn column(&self, segment: u32, column: usize) -> ColumnAt {
        let group = self.groups.partition_point(|(first, _)| *first <= segment) - 1;
        let (first, group) = &self.groups[group];
        let place = group.columns[(column + segment as usize) % group.columns.len()];
        ColumnAt { device: place.device, offset: self.slot_offset(place.slot + (segment - first)) }
    }

    /// Returns the byte address of a slot on its device.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        SEGMENTS_START + u64::from(slot) * self.column_bytes()
    }

    /// Returns the column that a device has of a segment.
    pub fn column_on(&self, segment: u32, device: u16) -> Option<usize> {
        (0..self.columns()).find(|&column| self.column(segment, column).device == device)
    }

    /// Returns the length of a column in bytes.
    pub fn column_bytes(&self) -> u64 {
        self.column_lines * BLOCK64
    }

    /// Returns the lines that `len` bytes at `line` blocks occupy: for each data column, its first line and the number
    /// of lines, for the blocks `first..first + count` of one segment.
    pub fn spans(&self, first: LineBlock, count: u64) -> Vec<(usize, u64, u64)> {
        let data = self.data as u64;
        let begin = first.line * data + first.column as u64;
        let end = begin + count;
        (0..data)
            .filter_map(|column| {
                let lines_before = |block: u64| (block + data - 1 - column) / data;
                let (from, to) = (lines_before(begin), lines_before(end));
                (to > from).then_some((column as usize, from, to - from))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::devices::ColumnPlace;

    fn table(data: u16, parity: u16, lines: u32) -> DeviceTable {
        let columns = data + parity;
        let group = |segments, slot| SegmentGroup {
            segments,
            columns: (0..columns).map(|device| ColumnPlace { device, slot }).collect(),
        };
        DeviceTable {
            store: 1,
            generation: 1,
            data,
            parity,
            column_blocks: lines,
            next_number: columns,
            devices: Vec::new(),
            groups: vec![group(3, 5), group(4, 9)],
        }
    }

    proptest! {
        #[test]
        fn every_block_has_a_place_of_its_own(data in 1u16..6, parity in 0u16..4, lines in 1u32..5) {
            let geometry = RowGeometry::of(&table(data, parity, lines));
            let mut seen = std::collections::BTreeSet::new();
            for segment in 0..7 {
                let devices: std::collections::BTreeSet<u16> =
                    (0..geometry.columns()).map(|column| geometry.column(segment, column).device).collect();
                prop_assert_eq!(devices.len(), geometry.columns(), "columns are on distinct devices");
                for line in 0..u64::from(lines) {
                    for column in 0..geometry.columns() {
                        let at = geometry.column(segment, column);
                        prop_assert!(seen.insert((at.device, at.line(line))));
                        prop_assert_eq!(geometry.column_on(segment, at.device), Some(column));
                    }
                }
            }
            for (i, block) in (geometry.first_block(0, 0)..geometry.first_block(7, 0)).enumerate() {
                let found = geometry.locate(block);
                prop_assert_eq!(geometry.first_block(found.segment, found.line) + found.column as u64, block);
                prop_assert_eq!(u64::from(found.segment), i as u64 / (u64::from(lines) * u64::from(data)));
            }
        }

        #[test]
        fn spans_cover_every_block_once(data in 1u16..6, begin in 0u64..20, count in 0u64..40) {
            let geometry = RowGeometry::of(&table(data, 1, 100));
            let first = geometry.locate(geometry.first_block(2, 0) + begin);
            let mut blocks: Vec<u64> = geometry
                .spans(first, count)
                .into_iter()
                .flat_map(|(column, from, lines)| {
                    (from..from + lines).map(move |line| line * u64::from(data) + column as u64)
                })
                .collect();
            blocks.sort_unstable();
            prop_assert_eq!(blocks, (begin..begin + count).collect::<Vec<_>>());
        }
    }
}
