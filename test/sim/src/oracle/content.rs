//! The content of one 4 KiB block, cheap to copy and to compare.

use std::rc::Rc;

use forebay_block::is_zero;

use crate::rng::mix64;

/// The unit that is written wholly or not at all, in bytes.
pub const BLOCK: u64 = 4096;

/// Contents of a block.  Equal contents have equal hashes, which is how they are compared.
#[derive(Clone)]
pub struct Content {
    hash: u64,
    /// `None`: zeroes.
    bytes: Option<Rc<[u8]>>,
}

impl Content {
    /// Block of zeroes.
    pub const ZERO: Content = Content { hash: 0, bytes: None };

    /// These bytes, one block of them.
    pub fn of(bytes: &[u8]) -> Self {
        debug_assert_eq!(bytes.len() as u64, BLOCK);
        if is_zero(bytes) { Self::ZERO } else { Self { hash: hash(bytes), bytes: Some(bytes.into()) } }
    }

    /// Returns the contents with `data` overwriting them from byte `at` on.
    pub fn overlaid(&self, at: usize, data: &[u8]) -> Self {
        if data.len() as u64 == BLOCK {
            return Self::of(data);
        }
        let mut bytes = self.to_vec();
        bytes[at..at + data.len()].copy_from_slice(data);
        Self::of(&bytes)
    }

    /// Returns the contents with `len` bytes from byte `at` on zeroed.
    pub fn zeroed(&self, at: usize, len: usize) -> Self {
        if self.bytes.is_none() || len as u64 == BLOCK {
            return Self::ZERO;
        }
        let mut bytes = self.to_vec();
        bytes[at..at + len].fill(0);
        Self::of(&bytes)
    }

    /// From byte `at` on it holds `data`.
    pub fn has(&self, at: usize, data: &[u8]) -> bool {
        match &self.bytes {
            Some(bytes) => bytes[at..at + data.len()] == *data,
            None => is_zero(data),
        }
    }

    /// Byte `at`.
    pub fn byte(&self, at: usize) -> u8 {
        self.bytes.as_ref().map_or(0, |bytes| bytes[at])
    }

    /// Returns true if all bytes are zero.
    pub fn is_zero(&self) -> bool {
        self.bytes.is_none()
    }

    /// A number that is the same for the same content.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        match &self.bytes {
            Some(bytes) => bytes.to_vec(),
            None => vec![0; BLOCK as usize],
        }
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Eq for Content {}

fn hash(bytes: &[u8]) -> u64 {
    // Four lanes, so that the multiplications overlap.
    let mut lanes = [1_u64, 2, 3, 4];
    for chunk in bytes.chunks_exact(32) {
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(8)) {
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            *lane = (lane.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }
    let mixed = lanes.into_iter().fold(0, |all: u64, lane| mix64(all.rotate_left(17) ^ lane));
    mixed | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_compare_by_what_they_hold() {
        let ones = Content::of(&[1; 4096]);
        assert!(ones == Content::ZERO.overlaid(0, &[1; 4096]));
        assert!(ones != Content::ZERO && Content::of(&[0; 4096]) == Content::ZERO);
        let mixed = ones.overlaid(100, &[2; 50]);
        assert!(mixed.has(99, &[1, 2]) && mixed.has(149, &[2, 1]) && mixed != ones);
        assert!(mixed.overlaid(100, &[1; 50]) == ones);
        assert!(ones.zeroed(0, 4000).zeroed(4000, 96) == Content::ZERO);
        let mut one_bit = [1; 4096];
        one_bit[4095] = 3;
        assert!(Content::of(&one_bit) != ones);
    }
}
