//! Packing: turns the changed blocks of a transaction into compressed blobs, before it is committed.

use forebay_block::{Compression, ObjectName, is_zero};
use forebay_reactor::yield_now;

use crate::core::Core;
use crate::format::BLOCK;
use crate::format::blob::BLOB_BLOCKS_MAX;
use crate::plan::{Runs, TransactionPlan};

/// Blocks of a transaction that are stored as one blob.
pub struct PackedBlob {
    /// First block within the object.
    pub start: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Stored bytes.
    pub stored: Vec<u8>,
}

impl PackedBlob {
    /// Returns whether the blob contains a block.
    pub fn contains(&self, block: u32) -> bool {
        (self.start..self.start + self.blocks).contains(&block)
    }
}

impl Core {
    /// Returns the maximum number of blocks of a blob, which must fit in a small segment with others.
    pub fn blob_blocks_max(&self) -> u32 {
        blob_blocks_max(self.superblock.segment_size)
    }

    /// Compresses the changed blocks, if the object's data policy says so. Blocks of zeroes become holes; runs of blocks for
    /// which compression saves no sector stay as they are.
    ///
    /// Lets other tasks run after each blob.
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
        let mut input = Vec::new();
        while let Some((start, count)) = runs.next() {
            for (start, blocks) in blob_ranges(start, count, self.blob_blocks_max()) {
                input.clear();
                for data in plan.blocks.range(start..start + blocks).filter_map(|(_, data)| data.as_ref()) {
                    data.parts().iter().for_each(|part| input.extend_from_slice(part));
                }
                if let Some(stored) = self.media.codecs.compress(compression, &input) {
                    plan.blobs.push(PackedBlob { start, blocks, stored });
                }
                if blocks > 1 {
                    yield_now().await;
                }
            }
        }
    }
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
