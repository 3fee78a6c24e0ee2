//! Staging buffers: copies of data that cannot be written directly.

use std::cell::RefCell;

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::BufPool;

use crate::format::BLOCK;

/// Size of a staging buffer in bytes.
const STAGING: usize = 256 * 1024;

/// Returns whether the buffer can be written without a copy and retained until it is written: it is long, aligned, and
/// not a small part of a larger allocation.
fn is_direct(part: &Buf) -> bool {
    part.len() >= 16 * BLOCK && part.is_aligned(BLOCK) && part.retained() <= 2 * part.len()
}

/// Returns whether all buffers can be written without a copy.
pub fn is_all_direct(data: &BufList) -> bool {
    data.parts().iter().all(is_direct)
}

/// Staging buffers, filled one after the other.
pub struct StagingBuffers {
    pool: BufPool,
    /// Buffer with space left.
    current: RefCell<Option<BufMut>>,
}

impl StagingBuffers {
    /// Creates the buffers.
    pub fn new() -> Self {
        Self { pool: BufPool::new(STAGING, 64), current: RefCell::default() }
    }

    /// Copies data into staging buffers, packed with its neighbours. Calls `finish` with the position and the copied bytes
    /// of each part, whole blocks if the data is.
    pub fn copy(&self, data: &BufList, mut finish: impl FnMut(usize, &mut [u8])) -> Vec<Buf> {
        let mut out = Vec::with_capacity(data.parts().len());
        let mut current = self.current.borrow_mut();
        let mut parts = data.parts().iter();
        let mut part: &[u8] = &[];
        let total = data.len();
        let mut left = total;
        while left > 0 {
            let buf = match &mut *current {
                Some(buf) if buf.spare() > 0 => buf,
                slot => slot.insert(self.pool.get()),
            };
            let take = left.min(buf.spare());
            let mut filled = 0;
            while filled < take {
                if part.is_empty() {
                    part = parts.next().expect("as many bytes as the list says");
                }
                let n = part.len().min(take - filled);
                buf.extend_from_slice(&part[..n]);
                part = &part[n..];
                filled += n;
            }
            finish(total - left, &mut buf[..take]);
            out.push(buf.split_to(take));
            left -= take;
        }
        out
    }
}
