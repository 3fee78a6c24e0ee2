//! Staging buffers: copies of data that cannot be written directly.

use std::cell::RefCell;

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::BufPool;

use crate::format::BLOCK;

/// Size of a staging buffer in bytes.
const STAGING: usize = 256 * 1024;
/// Bytes that are encrypted at once: with what they become, as much as a first-level cache has.
const SEALED_AT_ONCE: usize = 4 * BLOCK;

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

    /// Copies data into staging buffers, packed with its neighbours.
    pub fn copy(&self, data: &BufList) -> Vec<Buf> {
        let mut parts = DataParts::new(data);
        self.fill(data.len(), |_, buf| {
            let part = parts.next(buf.len());
            buf[..part.len()].copy_from_slice(part);
            part.len()
        })
    }

    /// Encrypts whole blocks into staging buffers, packed with their neighbours. `seal` gets the position of some blocks in
    /// the data, these blocks, and memory for them encrypted.
    pub fn seal(&self, data: &BufList, mut seal: impl FnMut(usize, &[u8], &mut [u8])) -> Vec<Buf> {
        debug_assert!(data.len().is_multiple_of(BLOCK));
        let mut parts = DataParts::new(data);
        let mut gathered = Vec::new();
        self.fill(data.len(), |at, buf| {
            let plain = match parts.blocks(SEALED_AT_ONCE.min(buf.len())) {
                Some(blocks) => blocks,
                None => {
                    parts.gather_block(&mut gathered);
                    &gathered
                }
            };
            seal(at, plain, &mut buf[..plain.len()]);
            plain.len()
        })
    }

    /// Fills `len` bytes of staging buffers. `write` gets the number of bytes before it and memory, which ends no later than
    /// the data; it fills the front of it, and returns the length of that.
    fn fill(&self, len: usize, mut write: impl FnMut(usize, &mut [u8]) -> usize) -> Vec<Buf> {
        let mut out = Vec::with_capacity(1 + len / STAGING);
        let mut current = self.current.borrow_mut();
        let mut done = 0;
        while done < len {
            let buf = match &mut *current {
                Some(buf) if buf.spare() > 0 => buf,
                slot => slot.insert(self.pool.get()),
            };
            let end = done + (len - done).min(buf.spare());
            buf.set_len(end - done);
            let mut filled = 0;
            while filled < buf.len() {
                filled += write(done + filled, &mut buf[filled..]);
            }
            out.push(buf.split_to(filled));
            done = end;
        }
        out
    }
}

/// Parts of data, taken one after the other.
struct DataParts<'a> {
    parts: std::slice::Iter<'a, Buf>,
    /// Rest of the current part.
    part: &'a [u8],
}

impl<'a> DataParts<'a> {
    fn new(data: &'a BufList) -> Self {
        Self { parts: data.parts().iter(), part: &[] }
    }

    /// Skips empty parts.
    fn advance(&mut self) {
        while self.part.is_empty() {
            self.part = self.parts.next().expect("as many bytes as the list says");
        }
    }

    /// Takes the next bytes of one part, at least one.
    fn next(&mut self, max: usize) -> &'a [u8] {
        self.advance();
        let (now, rest) = self.part.split_at(max.min(self.part.len()));
        self.part = rest;
        now
    }

    /// Takes the next whole blocks of one part, `max` bytes at most; `None` if the next block is in several.
    fn blocks(&mut self, max: usize) -> Option<&'a [u8]> {
        self.advance();
        let len = self.part.len().min(max) / BLOCK * BLOCK;
        (len > 0).then(|| self.next(len))
    }

    /// Copies the next block into `block`.
    fn gather_block(&mut self, block: &mut Vec<u8>) {
        block.clear();
        while block.len() < BLOCK {
            let part = self.next(BLOCK - block.len());
            block.extend_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns data in parts of these lengths, and its bytes.
    fn data_in_parts(lens: &[usize]) -> (BufList, Vec<u8>) {
        let total = lens.iter().sum();
        let bytes: Vec<u8> = (0..total).map(|at: usize| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut at = 0;
        let parts = lens.iter().map(|len| {
            at += len;
            Buf::copy_of(&bytes[at - len..at])
        });
        (parts.collect(), bytes)
    }

    fn joined(bufs: &[Buf]) -> Vec<u8> {
        bufs.iter().flat_map(|buf| buf.to_vec()).collect()
    }

    proptest! {
        /// However data is cut, each block is passed once, in order, and what `seal` writes is returned in its place.
        #[test]
        fn blocks_are_sealed_once_and_in_order(
            cuts in proptest::collection::vec(0usize..3 * BLOCK, 0..9),
            whole in proptest::collection::vec(1usize..80, 0..3),
            before in 0usize..70,
        ) {
            let mut lens = cuts;
            lens.extend(whole.iter().map(|blocks| blocks * BLOCK));
            let odd = lens.iter().sum::<usize>();
            lens.push(odd.next_multiple_of(BLOCK) - odd);
            let (data, bytes) = data_in_parts(&lens);
            let staging = StagingBuffers::new();
            // A buffer that is partly used already.
            let (earlier, earlier_bytes) = data_in_parts(&[before * BLOCK]);
            let kept = staging.copy(&earlier);
            let mut seen = 0;
            let sealed = staging.seal(&data, |at, plain, out| {
                assert_eq!((at, plain.len()), (seen, out.len()));
                assert!(plain.len().is_multiple_of(BLOCK) && plain.len() <= SEALED_AT_ONCE && !plain.is_empty());
                out.iter_mut().zip(plain).for_each(|(out, plain)| *out = plain ^ 0xA5);
                seen += plain.len();
            });
            prop_assert_eq!(seen, bytes.len());
            prop_assert!(joined(&sealed).iter().zip(&bytes).all(|(sealed, plain)| *sealed == plain ^ 0xA5));
            prop_assert_eq!(joined(&sealed).len(), bytes.len());
            // As few buffers as there can be, for the device.
            prop_assert!(sealed.len() <= 1 + bytes.len().div_ceil(STAGING));
            prop_assert!(joined(&staging.copy(&data)) == bytes);
            prop_assert!(joined(&kept) == earlier_bytes);
        }
    }
}
