//! Packing: turns the changed blocks of a transaction into compressed blobs, before it is committed.

use forebay_block::{BufList, Compression, ObjectName, is_zero};
use forebay_reactor::yield_now;

use crate::core::Core;
use crate::format::BLOCK;
use crate::format::blob::BLOB_BLOCKS_MAX;
use crate::plan::{Runs, TransactionPlan};

/// Blocks of a blob of LZ4, which is chosen for speed: a read of one block reads its blob, and expands half of it on average.
/// With twice as many, it would take a quarter longer, and save a twentieth of the space.
const LZ4_BLOB_BLOCKS: u32 = 4;

/// Blocks of a transaction that are stored as one blob.
pub struct PackedBlob {
    /// First block within the object.
    pub start: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Stored bytes.
    pub stored: Vec<u8>,
}

/// Consecutive blocks of a transaction.
pub struct PackedRange {
    /// First block within the object.
    pub start: u32,
    /// Content of the blocks.
    pub data: BufList,
}

impl PackedBlob {
    /// Returns whether the blob contains a block.
    pub fn contains(&self, block: u32) -> bool {
        (self.start..self.start + self.blocks).contains(&block)
    }
}

impl Core {
    /// Returns the number of blocks that are compressed together, if as many are written together. Blobs must fit in a small
    /// segment with others.
    fn blob_blocks(&self, compression: Compression) -> u32 {
        let wanted = match compression {
            Compression::Lz4 => LZ4_BLOB_BLOCKS,
            _ => BLOB_BLOCKS_MAX,
        };
        blob_blocks_max(self.superblock.segment_size).min(wanted)
    }

    /// Compresses the whole blocks of a short transaction, before it is applied without waiting: each range of blocks with the
    /// stored bytes of its blob, or `None` where that saves no sector. Returns `None` if there are blocks of zeroes, which
    /// become holes.
    pub fn pack_short<'a>(
        &self,
        compression: Compression,
        writes: impl Iterator<Item = (u32, &'a BufList)>,
    ) -> Option<Vec<(PackedRange, Option<Vec<u8>>)>> {
        let (mut packed, mut memory) = (Vec::new(), Vec::new());
        for (first, data) in writes {
            let blocks = (data.len() / BLOCK) as u32;
            for (start, count) in blob_ranges(first, blocks, self.blob_blocks(compression)) {
                let from = (start - first) as usize * BLOCK;
                let data = data.slice(from..from + count as usize * BLOCK);
                let input = contiguous(&data, &mut memory);
                if input.chunks_exact(BLOCK).any(is_zero) {
                    return None;
                }
                let stored = self.media.codecs.compress(compression, input);
                packed.push((PackedRange { start, data }, stored));
            }
        }
        Some(packed)
    }

    /// Compresses the changed blocks, if the object's data policy says so. Blocks of zeroes become holes; runs of blocks for
    /// which compression saves no sector stay as they are.
    ///
    /// Lets other tasks run meanwhile, or after each blob.
    pub async fn pack(&self, name: &ObjectName, plan: &mut TransactionPlan) {
        let compression = self.policies.compression(name);
        if compression == Compression::None {
            return;
        }
        for data in plan.blocks.values_mut() {
            if data.as_ref().is_some_and(|data| data.parts().iter().all(|part| is_zero(part))) {
                *data = None;
            }
        }
        let stored = plan.blocks.iter().filter(|(_, data)| data.is_some()).map(|(&block, _)| block);
        let mut runs = Runs::new(stored.collect::<Vec<_>>().into_iter());
        let mut ranges = Vec::new();
        while let Some((start, count)) = runs.next() {
            for (start, blocks) in blob_ranges(start, count, self.blob_blocks(compression)) {
                let mut data = BufList::new();
                let range = plan.blocks.range(start..start + blocks);
                range.filter_map(|(_, data)| data.clone()).for_each(|block| data.append(block));
                ranges.push(PackedRange { start, data });
            }
        }
        let stored = self.pack_ranges(compression, &ranges).await;
        let packed = ranges.iter().zip(stored).filter_map(|(PackedRange { start, data }, stored)| {
            let blocks = (data.len() / BLOCK) as u32;
            stored.map(|stored| PackedBlob { start: *start, blocks, stored })
        });
        plan.blobs.extend(packed);
    }

    /// Compresses ranges of blocks: by helper threads if that takes long, and if there are any.
    async fn pack_ranges(&self, compression: Compression, ranges: &[PackedRange]) -> Vec<Option<Vec<u8>>> {
        let bytes: usize = ranges.iter().map(|range| range.data.len()).sum();
        if bytes > packed_at_once_max(compression) && self.media.helpers.are_available() {
            let lists: Vec<BufList> = ranges.iter().map(|range| range.data.clone()).collect();
            let buffer = |bytes: usize| self.media.buffer(bytes.div_ceil(BLOCK));
            if let Some(stored) = self.media.helpers.compress(compression, &lists, buffer).await {
                return stored;
            }
        }
        let (mut stored, mut memory) = (Vec::with_capacity(ranges.len()), Vec::new());
        for PackedRange { data, .. } in ranges {
            stored.push(self.media.codecs.compress(compression, contiguous(data, &mut memory)));
            if data.len() > BLOCK {
                yield_now().await;
            }
        }
        stored
    }
}

/// Returns the maximum length of a write that the reactor compresses at once, in bytes: that takes no longer than queueing it
/// and doing the rest of its transaction.
pub fn packed_at_once_max(compression: Compression) -> usize {
    match compression {
        Compression::Lz4 | Compression::Zstd { level: ..=3 } | Compression::Deflate { level: ..=1 } => 4 * BLOCK,
        _ => 0,
    }
}

/// Returns the bytes of a list: its only part, or all parts copied to `memory`.
pub fn contiguous<'a>(data: &'a BufList, memory: &'a mut Vec<u8>) -> &'a [u8] {
    if let [only] = data.parts() {
        return only;
    }
    memory.clear();
    data.parts().iter().for_each(|part| memory.extend_from_slice(part));
    memory
}

/// Returns the maximum number of blocks of a blob for a segment size: a power of two, so that ranges aligned to it do not
/// cross multiples of [`BLOB_BLOCKS_MAX`]. Segments on several devices may have any multiple of one.
fn blob_blocks_max(segment_size: u32) -> u32 {
    let quarter = (segment_size as usize / BLOCK / 4).max(1) as u32;
    BLOB_BLOCKS_MAX.min(1 << quarter.ilog2())
}

/// Splits a run of blocks into ranges that can be one blob each: none crosses a multiple of `most` blocks.
pub fn blob_ranges(start: u32, count: u32, most: u32) -> impl Iterator<Item = (u32, u32)> {
    let (mut at, end) = (start, start + count);
    std::iter::from_fn(move || {
        let next = (at / most * most + most).min(end);
        let range = (at < end).then_some((at, next - at));
        at = next;
        range
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::blob::is_blob_range;

    #[test]
    fn ranges_are_aligned_and_cover_the_run() {
        for (start, count, most) in [(0, 32, 32), (5, 100, 32), (31, 1, 32), (31, 2, 32), (3, 9, 4), (127, 130, 16)] {
            let ranges: Vec<_> = blob_ranges(start, count, most).collect();
            let mut at = start;
            for &(from, blocks) in &ranges {
                assert!(from == at && is_blob_range(from, blocks) && blocks <= most, "{ranges:?}");
                at += blocks;
            }
            assert_eq!(at, start + count, "{ranges:?}");
        }
        assert_eq!(blob_ranges(7, 0, 32).count(), 0);
    }

    #[test]
    fn blobs_of_segments_of_any_size_are_aligned() {
        for columns in 1..33 {
            let most = blob_blocks_max(columns * (64 << 10));
            assert!((4..=BLOB_BLOCKS_MAX).contains(&most) && BLOB_BLOCKS_MAX.is_multiple_of(most), "{columns}: {most}");
        }
    }
}
