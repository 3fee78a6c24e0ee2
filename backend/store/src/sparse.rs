//! Blobs that overwrites have left mostly dead: they count as live in full, so the cleaner is told of them.

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::core::Core;
use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot, SECTORS_A_BLOCK};
use crate::format::page::MapSlot;
use crate::object::ObjectState;

/// Maximum number of blobs remembered; the cleaner finds others when it empties their segments.
const REMEMBERED_MAX: usize = 16 << 10;

/// Blob of which little is left.
#[derive(Debug, Clone, Copy)]
pub struct SparseBlob {
    /// Object number.
    pub oid: u64,
    /// First block of the blob within the object.
    pub start: u32,
    /// Location of the first block.
    pub slot: BlobSlot,
    /// CRC32C of the stored bytes.
    pub crc: u32,
}

/// Blobs that became mostly dead since the store was opened, oldest first.
#[derive(Default)]
pub struct SparseBlobs {
    queue: RefCell<VecDeque<SparseBlob>>,
}

impl SparseBlobs {
    fn len(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Takes the oldest one.
    pub fn take(&self) -> Option<SparseBlob> {
        self.queue.borrow_mut().pop_front()
    }
}

/// Returns the number of live blocks up to which a blob is sparse: stored as they are, they take at most half of it.
pub fn sparse_max(slot: BlobSlot) -> usize {
    usize::from(slot.sectors) / (2 * SECTORS_A_BLOCK as usize)
}

impl Core {
    /// Returns whether sparse blobs should be compressed again although the cleaner need not run: little space is left, or
    /// many are remembered. Otherwise they may die by themselves.
    pub fn wants_sparse_rewrite(&self) -> bool {
        let len = self.sparse.len();
        let wanted = len >= REMEMBERED_MAX / 2 || self.space.available() < self.space.capacity() / 4;
        len > 0 && wanted && self.has_space_to_clean()
    }

    /// Remembers a blob that just lost a block, if it is sparse from now on.
    pub fn note_sparse(&self, oid: u64, state: &ObjectState, block: u32, lost: MapSlot) {
        let (Some(slot), crc) = (BlobSlot::of(lost.block), lost.crc) else { return };
        let max = sparse_max(slot);
        let Some(start) = block.checked_sub(slot.index.into()).filter(|_| max > 0) else { return };
        let window = start..start / BLOB_BLOCKS_MAX * BLOB_BLOCKS_MAX + BLOB_BLOCKS_MAX;
        let is_live = |&block: &u32| {
            let at = slot.at(block - start).location();
            let mut maps = std::iter::once(&state.head).chain(state.clones.iter().map(|clone| &clone.map));
            maps.any(|map| map.get(block).block == at)
        };
        // Blocks are lost one by one, so it is noticed once.
        if window.filter(is_live).count() == max {
            let mut queue = self.sparse.queue.borrow_mut();
            if queue.len() < REMEMBERED_MAX {
                queue.push_back(SparseBlob { oid, start, slot: slot.at(0), crc });
            }
            drop(queue);
            self.freed();
        }
    }
}
