//! Aligned buffers for blocks that arrive from another member at addresses that direct I/O does not take.

use forebay_block::{BufList, BufMut};
use forebay_reactor::BufPool;

/// Sizes in bytes of the buffers, and the number of each that is kept.
const KEPT: [(usize, usize); 3] = [(16 << 10, 16), (72 << 10, 8), (264 << 10, 4)];

/// Pools of aligned buffers.  A fresh buffer would be cleared before the block is copied into it.
pub(super) struct AlignedBuffers([BufPool; KEPT.len()]);

impl AlignedBuffers {
    /// Creates the pools.  Memory is allocated on use.
    pub(super) fn new() -> Self {
        Self(KEPT.map(|(size, keep)| BufPool::new(size, keep)))
    }

    /// Returns a copy in one aligned buffer.
    pub(super) fn copy(&self, bytes: &BufList) -> BufList {
        let mut copy = match self.0.iter().find(|pool| pool.buf_size() >= bytes.len()) {
            Some(pool) => pool.get(),
            None => BufMut::with_capacity(bytes.len()),
        };
        bytes.parts().iter().for_each(|part| copy.extend_from_slice(part));
        BufList::from(copy)
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;

    use super::*;

    #[test]
    fn copies_of_any_length_are_aligned_and_equal() {
        let buffers = AlignedBuffers::new();
        for len in [4096, 16 << 10, 20 << 10, 264 << 10, 1 << 20] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let list: BufList = bytes.chunks(5000).map(Buf::copy_of).collect();
            let copy = buffers.copy(&list);
            assert!(copy == bytes[..] && copy.parts().len() == 1 && copy.parts()[0].is_aligned(4096), "{len} bytes");
        }
    }
}
