//! Buffers for columns of rows, reused so that their memory is not cleared each time.

use forebay_block::BufMut;
use forebay_reactor::BufPool;

use crate::format::BLOCK;

/// Sizes of buffers, in blocks: for rows of small writes, and for those of full batches and long reads.
const SHORT: usize = 4;
const LONG: usize = 64;

/// Pools of buffers for columns.
pub(super) struct ColumnBuffers {
    short: BufPool,
    long: BufPool,
}

impl ColumnBuffers {
    /// Creates the pools.
    pub(super) fn new() -> Self {
        Self { short: BufPool::new(SHORT * BLOCK, 256), long: BufPool::new(LONG * BLOCK, 64) }
    }

    /// Returns an empty buffer for a number of blocks, at least.
    pub(super) fn empty(&self, blocks: usize) -> BufMut {
        match blocks {
            _ if blocks <= SHORT => self.short.get(),
            _ if blocks <= LONG => self.long.get(),
            _ => BufMut::with_capacity(blocks * BLOCK),
        }
    }

    /// Returns a buffer of a number of blocks, whose content is undefined.
    pub(super) fn get(&self, blocks: usize) -> BufMut {
        let mut buf = self.empty(blocks);
        buf.set_len(blocks * BLOCK);
        buf
    }
}
