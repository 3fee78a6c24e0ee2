//! Writing bits, the first into the lowest place of a byte (section 3.1.1).

use super::super::error::CompressError;
use super::STORED_MAX;

/// Write position of a bit stream: whole bytes, and up to seven bits of the next.
pub(super) struct BitWriter {
    at: usize,
    pending: u64,
    count: u32,
}

impl BitWriter {
    /// Number of bytes past the last one that a writer may overwrite.
    pub(super) const SLACK: usize = 16;

    pub(super) fn new() -> Self {
        Self { at: 0, pending: 0, count: 0 }
    }

    /// Whole bytes written.
    pub(super) fn len(&self) -> usize {
        self.at
    }

    /// Returns the number of bytes touched, from the current one on, once `bits` more are written.
    pub(super) fn bytes_after(&self, bits: u64) -> usize {
        (u64::from(self.count) + bits).div_ceil(8) as usize
    }

    /// Continues at byte `at` of another output.
    pub(super) fn rebase(&mut self, at: usize) {
        self.at = at;
    }

    /// Appends up to 56 bits.
    ///
    /// # Panics
    /// Where the output ends within eight bytes.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, count: u32, output: &mut [u8]) {
        debug_assert!(count <= 56 && bits >> count == 0);
        self.pending |= bits << self.count;
        self.count += count;
        output[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.at += (self.count / 8) as usize;
        self.pending >>= self.count & !7;
        self.count &= 7;
    }

    /// Returns the state that the fast loop takes over, and returns with [`resume`](Self::resume).
    pub(super) fn state(&self) -> (usize, u64, u32) {
        (self.at, self.pending, self.count)
    }

    pub(super) fn resume(&mut self, (at, pending, count): (usize, u64, u32)) {
        debug_assert!(count < 8 && pending >> count == 0);
        (self.at, self.pending, self.count) = (at, pending, count);
    }

    /// Appends `data` as stored blocks (section 3.2.4).
    pub(super) fn stored(&mut self, data: &[u8], last: bool, output: &mut [u8]) -> Result<(), CompressError> {
        let mut rest = data;
        loop {
            let (piece, after) = rest.split_at(rest.len().min(STORED_MAX));
            // Three bits of header, zeroes up to the next whole byte, the length twice.
            let header = self.pending as u16 | u16::from(last && after.is_empty()) << self.count;
            let header_len = (self.count as usize + 3).div_ceil(8);
            let room = output.get_mut(self.at..).unwrap_or_default();
            let (head, body) = room.split_at_mut_checked(header_len + 4).ok_or(CompressError::NoRoom)?;
            head[..header_len].copy_from_slice(&header.to_le_bytes()[..header_len]);
            head[header_len..header_len + 2].copy_from_slice(&(piece.len() as u16).to_le_bytes());
            head[header_len + 2..].copy_from_slice(&(!(piece.len() as u16)).to_le_bytes());
            body.get_mut(..piece.len()).ok_or(CompressError::NoRoom)?.copy_from_slice(piece);
            self.resume((self.at + header_len + 4 + piece.len(), 0, 0));
            rest = after;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Writes the bits that are left over, filled up with zeroes; returns the length of the stream in bytes.
    pub(super) fn finish(self, output: &mut [u8]) -> Result<usize, CompressError> {
        if self.count == 0 {
            return Ok(self.at);
        }
        *output.get_mut(self.at).ok_or(CompressError::NoRoom)? = self.pending as u8;
        Ok(self.at + 1)
    }
}
