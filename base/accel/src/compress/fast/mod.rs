//! DEFLATE level 1: one pass that finds matches, one code per block, no lazy matching.
//!
//! A call cuts its input into blocks of at most [`BLOCK`] bytes.  For each, [`mod@matches`] turns the bytes
//! into tokens and counts them, [`huffman`] makes the codes, and [`bits`] writes the tokens.  The size of a block is
//! known to the bit before anything of it is written, so that a block which would grow is stored instead, and an output
//! that is too short is found out at once.
//!
//! Format: RFC 1951; section numbers in this folder are those of that document.

mod bits;
mod huffman;
mod matches;
#[cfg(test)]
mod tests;

use self::bits::BitWriter;
use self::huffman::HuffmanPlan;
use self::matches::{MatchFinder, TOKEN_SLACK};
use super::error::CompressError;
use crate::tier::Tier;

/// Maximum length of input per Huffman code, in bytes.
const BLOCK: usize = 128 << 10;

/// Maximum length of a stored block in bytes (section 3.2.4).
const STORED_MAX: usize = 65_535;

/// Symbols of the literal and length alphabet that may occur, and those of the distance alphabet (section 3.2.5).
const LITLEN_SYMBOLS: usize = 286;
const DISTANCE_SYMBOLS: usize = 30;

/// End-of-block symbol among the literals and lengths.
const END_OF_BLOCK: usize = 256;

/// Level-1 encoder and its memory: about half a MiB, touched only as far as blocks are long.
pub(super) struct FastEncoder {
    finder: MatchFinder,
    tier: Tier,
    /// Scratch output, for an output without space for the last, partly filled word.
    spare: Vec<u8>,
}

impl FastEncoder {
    /// Creates an encoder that uses the instructions of `tier` (which must be available) or plainer ones.
    pub(super) fn new(tier: Tier) -> Self {
        Self { finder: MatchFinder::new(BLOCK + TOKEN_SLACK), tier, spare: Vec::new() }
    }

    /// Compresses `input` into a raw DEFLATE stream at the front of `output`; returns its length.
    ///
    /// # Errors
    /// [`CompressError::NoRoom`] where `output` is too short; what is in it then means nothing.
    pub(super) fn compress(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        self.finder.reset();
        let mut writer = BitWriter::new();
        let mut at = 0;
        loop {
            let end = input.len().min(at + BLOCK);
            let last = end == input.len();
            self.block(input, at..end, last, &mut writer, output)?;
            at = end;
            if last {
                return writer.finish(output);
            }
        }
    }

    /// Appends one block, or several stored ones.
    fn block(
        &mut self,
        input: &[u8],
        part: std::ops::Range<usize>,
        last: bool,
        writer: &mut BitWriter,
        output: &mut [u8],
    ) -> Result<(), CompressError> {
        let length = part.len();
        self.finder.run(self.tier, input, part.clone());
        let plan = HuffmanPlan::new(self.finder.counts());
        let stored_bits = 8 * (length + 5 * length.div_ceil(STORED_MAX).max(1));
        if plan.total_bits() >= stored_bits as u64 {
            return writer.stored(&input[part], last, output);
        }
        // Whole words are written, so the bytes past the last one must be inside the output.
        let need = writer.bytes_after(plan.total_bits());
        if writer.len() + need > output.len() {
            return Err(CompressError::NoRoom);
        }
        if writer.len() + need + BitWriter::SLACK <= output.len() {
            plan.write(self.finder.tokens(), last, self.tier, writer, output);
            return Ok(());
        }
        self.spare.clear();
        self.spare.resize(need + BitWriter::SLACK, 0);
        let whole = writer.len();
        writer.rebase(0);
        plan.write(self.finder.tokens(), last, self.tier, writer, &mut self.spare);
        let written = writer.len();
        output[whole..whole + written].copy_from_slice(&self.spare[..written]);
        writer.rebase(whole + written);
        Ok(())
    }
}
