//! Ledger of a check: which sectors of the device are referenced, and how much is live.

use std::collections::HashMap;

use crate::format::blob::{SECTOR, SECTORS_A_BLOCK};
use crate::format::{BLOCK64, BlobPtr};
use crate::segments::SegmentGeometry;

/// Referenced blocks and blobs, and the live bytes that each segment should have.
pub struct Ledger {
    /// Bit for each block of the device of which any part is referenced.
    blocks: Vec<u64>,
    /// Bit for each sector, of the segments in which parts of blocks are referenced.
    sectors: HashMap<u32, Vec<u64>>,
    /// Live bytes by segment.
    pub live: Vec<u64>,
    /// Bytes of referenced blocks that are in blobs.
    pub blob_logical: u64,
    /// Bytes of the blobs that are referenced.
    pub blob_stored: u64,
}

/// Sets a bit; returns whether it was set before.
fn set(bits: &mut [u64], at: u64) -> bool {
    let (word, bit) = ((at / 64) as usize, 1u64 << (at % 64));
    let before = bits[word] & bit != 0;
    bits[word] |= bit;
    before
}

impl Ledger {
    /// Creates the ledger of a store's segments.
    pub fn of(geometry: &SegmentGeometry) -> Self {
        let end = geometry.first_block(geometry.segment_count - 1) + geometry.segment_blocks();
        Self::new(end, geometry.segment_count)
    }

    /// Creates the ledger of a device of `blocks` blocks.
    pub fn new(blocks: u64, segments: u32) -> Self {
        Self {
            blocks: vec![0; blocks as usize / 64 + 1],
            sectors: HashMap::new(),
            live: vec![0; segments as usize],
            blob_logical: 0,
            blob_stored: 0,
        }
    }

    /// Marks a block or blob of a segment as referenced. Returns false if any part of it was before.
    pub fn mark(&mut self, segment: u32, segment_size: u64, data: BlobPtr) -> bool {
        let (first, end) = (data.addr / SECTOR as u64, (data.addr + u64::from(data.len)) / SECTOR as u64);
        let whole = data.addr.is_multiple_of(BLOCK64) && u64::from(data.len) == BLOCK64;
        if whole && !self.sectors.contains_key(&segment) {
            return !set(&mut self.blocks, data.addr / BLOCK64);
        }
        let words = segment_size as usize / SECTOR / 64 + 1;
        let sectors = self.sectors.entry(segment).or_insert_with(|| vec![0; words]);
        let sectors_a_segment = segment_size / SECTOR as u64;
        let mut new = true;
        for sector in first..end {
            let block = sector / SECTORS_A_BLOCK;
            let at = |sector: u64| sector % sectors_a_segment;
            let begun = (0..SECTORS_A_BLOCK).any(|i| {
                let at = at(block * SECTORS_A_BLOCK + i);
                sectors[(at / 64) as usize] & 1 << (at % 64) != 0
            });
            // A block without a marked sector was marked as a whole.
            new &= !set(&mut self.blocks, block) || begun;
            new &= !set(sectors, at(sector));
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 64 << 10;
    const BASE: u64 = 1 << 20;

    fn data(addr: u64, len: u32) -> BlobPtr {
        BlobPtr { addr: BASE + addr, len, crc: 0 }
    }

    #[test]
    fn overlaps_of_blocks_and_blobs_are_found_in_any_order() {
        let new = || Ledger::new((BASE + 2 * SEGMENT) / BLOCK64, 2);
        let mark = |ledger: &mut Ledger, ptr: BlobPtr| ledger.mark(((ptr.addr - BASE) / SEGMENT) as u32, SEGMENT, ptr);
        let mut ledger = new();
        assert!(mark(&mut ledger, data(4096, 4096)) && !mark(&mut ledger, data(4096, 4096)));
        // Blobs beside a plain block, and beside each other in one block.
        assert!(mark(&mut ledger, data(8192, 512)) && mark(&mut ledger, data(8704, 8192)));
        assert!(!mark(&mut ledger, data(8192, 512)) && !mark(&mut ledger, data(8192, 1024)));
        // Over a plain block that was marked before any blob, and one after.
        assert!(!mark(&mut ledger, data(4608, 512)));
        assert!(mark(&mut ledger, data(32768, 4096)) && !mark(&mut ledger, data(33280, 512)));
        // A plain block over a blob.
        assert!(!mark(&mut ledger, data(8192, 4096)));
        // The other segment has only blocks.
        assert!(mark(&mut ledger, data(SEGMENT, 4096)) && !mark(&mut ledger, data(SEGMENT, 4096)));
        assert!(mark(&mut ledger, data(SEGMENT + 8192, 512)));
    }
}
