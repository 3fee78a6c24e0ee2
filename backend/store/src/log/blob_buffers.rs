//! Buffers for the blobs of batches, reused so that their memory is neither cleared nor copied when a batch is closed.

use forebay_block::BufMut;
use forebay_reactor::BufPool;

use super::BATCH_BLOCKS;
use crate::format::BLOCK;
use crate::format::blob::BLOB_BLOCKS_MAX;

/// Size of the buffer that a batch begins with, in bytes: most batches have few blobs.
const SHORT: usize = 64 << 10;
/// Size of a buffer for a full batch and the blob that fills it, in bytes.
const LONG: usize = (BATCH_BLOCKS + BLOB_BLOCKS_MAX) as usize * BLOCK;

/// Pools of buffers for blobs, all of whole blocks.
pub struct BlobBuffers {
    short: BufPool,
    long: BufPool,
}

impl BlobBuffers {
    /// Creates the pools.
    pub fn new() -> Self {
        Self { short: BufPool::new(SHORT, 64), long: BufPool::new(LONG, 32) }
    }

    /// Returns a buffer with the content of `current` and space for `more` bytes.
    pub fn with_space(&self, current: Option<BufMut>, more: usize) -> BufMut {
        let filled = match current {
            Some(buf) if buf.spare() >= more => return buf,
            Some(buf) => buf,
            None => BufMut::with_capacity(0),
        };
        let needed = filled.len() + more;
        let mut longer = match needed {
            _ if needed <= SHORT => self.short.get(),
            _ if needed <= LONG => self.long.get(),
            _ => BufMut::with_capacity(needed.next_multiple_of(BLOCK)),
        };
        longer.extend_from_slice(&filled);
        longer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_moves_to_longer_buffers_of_whole_blocks() {
        let buffers = BlobBuffers::new();
        let (mut buf, mut content) = (None, Vec::new());
        for (i, more) in [1, SHORT - 1, 1, LONG / 2, LONG, 5 * BLOCK + 1].into_iter().enumerate() {
            let mut now = buffers.with_space(buf, more);
            assert!(now.spare() >= more && now.capacity().is_multiple_of(BLOCK));
            let bytes = vec![i as u8 + 1; more];
            now.extend_from_slice(&bytes);
            content.extend(bytes);
            assert!(now[..] == content[..]);
            buf = Some(now);
        }
    }
}
