//! LZ4's block format: memory of the encoder, and a decoder that can stop as soon as the caller has enough.
//!
//! A block is a row of sequences: a token with two lengths, literals, and a match, which repeats bytes that lie up to
//! 65535 bytes back. The last sequence has literals alone. Most matches and literals are short: those are copied in pieces
//! of a fixed length, whatever their own length is. Where a long match overlaps itself, what it repeats is doubled with
//! every copy, so that data of a short period is expanded as fast as any other.

use lz4_flex::block::CompressTable;

use super::{CompressError, DecompressError};

/// Length of a piece that is copied for short literals and matches.
const PIECE: usize = 16;
/// Lengths from which on further bytes of a length follow a token.
const LITERALS_LONG: usize = 15;
const MATCH_MIN: usize = 4;
const MATCH_LONG: usize = 15 + MATCH_MIN;

/// Tables of the encoder, allocated on first use. Shorter inputs take a table of half the size, which must be cleared each
/// time.
#[derive(Default)]
pub(super) struct Lz4Tables {
    short: Option<CompressTable>,
    long: Option<CompressTable>,
}

impl Lz4Tables {
    /// Compresses to the front of `output`; returns the length of the result in bytes.
    ///
    /// # Errors
    /// [`CompressError::NoRoom`], never with [`Codec::bound`](super::Codec::bound) bytes of output.
    pub(super) fn compress(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, CompressError> {
        let table = if input.len() < usize::from(u16::MAX) {
            self.short.get_or_insert_with(CompressTable::small)
        } else {
            self.long.get_or_insert_with(CompressTable::large)
        };
        lz4_flex::block::compress_into_with_table(input, output, table).map_err(|_| CompressError::NoRoom)
    }
}

/// Expands a whole block to the front of `output`; returns the length of the result in bytes.
///
/// # Errors
/// [`DecompressError::TooLong`] if the result is longer than `output`; [`DecompressError::Corrupt`].
pub(super) fn expand(input: &[u8], output: &mut [u8]) -> Result<usize, DecompressError> {
    run::<false>(input, output)
}

/// Expands LZ4's block format until `output` is full. The rest of the block is not looked at.
///
/// # Errors
/// [`DecompressError::Corrupt`], also if the block expands to less.
pub fn expand_lz4_front(input: &[u8], output: &mut [u8]) -> Result<(), DecompressError> {
    match run::<true>(input, output)? {
        length if length == output.len() => Ok(()),
        _ => Err(DecompressError::Corrupt),
    }
}

/// Expands a block; with `FRONT`, a result longer than the output is no error but ends there.
fn run<const FRONT: bool>(input: &[u8], output: &mut [u8]) -> Result<usize, DecompressError> {
    let (mut from, mut to) = (0, 0);
    loop {
        let token = *input.get(from).ok_or(DecompressError::Corrupt)?;
        from += 1;
        let mut literals = usize::from(token >> 4);
        if literals < LITERALS_LONG && from + PIECE <= input.len() && to + PIECE <= output.len() {
            output[to..to + PIECE].copy_from_slice(&input[from..from + PIECE]);
        } else {
            if literals == LITERALS_LONG {
                literals += more_length(input, &mut from)?;
            }
            let source = input[from..].get(..literals).ok_or(DecompressError::Corrupt)?;
            let space = &mut output[to..];
            if literals > space.len() {
                if !FRONT {
                    return Err(DecompressError::TooLong);
                }
                space.copy_from_slice(&source[..space.len()]);
                return Ok(output.len());
            }
            space[..literals].copy_from_slice(source);
        }
        (from, to) = (from + literals, to + literals);
        if from >= input.len() || FRONT && to == output.len() {
            return Ok(to);
        }
        let offset = input[from..].first_chunk().ok_or(DecompressError::Corrupt)?;
        let offset = usize::from(u16::from_le_bytes(*offset));
        from += 2;
        if offset == 0 || offset > to {
            return Err(DecompressError::Corrupt);
        }
        let mut length = usize::from(token & 15) + MATCH_MIN;
        if length < MATCH_LONG && offset >= PIECE && to + 2 * PIECE <= output.len() {
            copy_piece(output, to - offset, to);
            copy_piece(output, to - offset + PIECE, to + PIECE);
            to += length;
            continue;
        }
        if length == MATCH_LONG {
            length += more_length(input, &mut from)?;
        }
        let space = output.len() - to;
        if length > space {
            if !FRONT {
                return Err(DecompressError::TooLong);
            }
            length = space;
        }
        repeat(output, offset, to, length);
        to += length;
        if FRONT && to == output.len() {
            return Ok(to);
        }
    }
}

/// Reads the bytes of a length that does not fit its token.
fn more_length(input: &[u8], from: &mut usize) -> Result<usize, DecompressError> {
    let mut length = 0;
    loop {
        let byte = *input.get(*from).ok_or(DecompressError::Corrupt)?;
        *from += 1;
        // No overflow: the input would have to be longer than memory.
        length += usize::from(byte);
        if byte < u8::MAX {
            return Ok(length);
        }
    }
}

#[inline(always)]
fn copy_piece(output: &mut [u8], from: usize, to: usize) {
    let mut piece = [0; PIECE];
    piece.copy_from_slice(&output[from..from + PIECE]);
    output[to..to + PIECE].copy_from_slice(&piece);
}

/// Repeats the bytes that lie `offset` before `to`, for `length` bytes that are within the output.
fn repeat(output: &mut [u8], offset: usize, to: usize, length: usize) {
    let start = to - offset;
    if offset >= length {
        output.copy_within(start..start + length, to);
    } else if offset == 1 {
        let byte = output[start];
        output[to..to + length].fill(byte);
    } else if length <= 2 * PIECE {
        for at in to..to + length {
            output[at] = output[at - offset];
        }
    } else {
        // A whole number of periods is there before each copy, so that the next one goes on in phase.
        let mut done = 0;
        while done < length {
            let count = (offset + done).min(length - done);
            output.copy_within(start..start + count, to + done);
            done += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Part of the plain data: literals, or a match.
    #[derive(Debug, Clone)]
    enum Piece {
        Literals(Vec<u8>),
        Match { back: proptest::sample::Index, length: usize },
    }

    fn pieces() -> impl Strategy<Value = Vec<Piece>> {
        let literals = proptest::collection::vec(any::<u8>(), 1..40).prop_map(Piece::Literals);
        let long = proptest::collection::vec(any::<u8>(), 200..600).prop_map(Piece::Literals);
        let lengths = prop_oneof![4usize..40, 4usize..1000];
        let matches = (any::<proptest::sample::Index>(), lengths);
        let matches = matches.prop_map(|(back, length)| Piece::Match { back, length });
        proptest::collection::vec(prop_oneof![3 => literals, 1 => long, 4 => matches], 0..40)
    }

    fn push_length(block: &mut Vec<u8>, mut length: usize) {
        while length >= 255 {
            block.push(255);
            length -= 255;
        }
        block.push(length as u8);
    }

    /// Writes pieces as a block, as its specification says, and what it expands to.
    fn write(pieces: &[Piece]) -> (Vec<u8>, Vec<u8>) {
        let (mut block, mut plain, mut literals) = (Vec::new(), Vec::new(), Vec::new());
        let sequence = |block: &mut Vec<u8>, literals: &mut Vec<u8>, found: Option<(usize, usize)>| {
            let (low, count) = (found.map_or(0, |(_, length)| length - 4), literals.len());
            block.push((count.min(15) << 4 | low.min(15)) as u8);
            if count >= 15 {
                push_length(block, count - 15);
            }
            block.append(literals);
            let Some((offset, _)) = found else { return };
            block.extend_from_slice(&(offset as u16).to_le_bytes());
            if low >= 15 {
                push_length(block, low - 15);
            }
        };
        for piece in pieces {
            match piece {
                Piece::Literals(bytes) => {
                    plain.extend_from_slice(bytes);
                    literals.extend_from_slice(bytes);
                }
                Piece::Match { .. } if plain.is_empty() => {}
                Piece::Match { back, length } => {
                    let offset = back.index(plain.len().min(usize::from(u16::MAX))) + 1;
                    sequence(&mut block, &mut literals, Some((offset, *length)));
                    for _ in 0..*length {
                        plain.push(plain[plain.len() - offset]);
                    }
                }
            }
        }
        sequence(&mut block, &mut literals, None);
        (block, plain)
    }

    proptest! {
        #[test]
        fn blocks_expand_as_the_format_says(pieces in pieces(), cut: proptest::sample::Index) {
            let (block, plain) = write(&pieces);
            let mut out = vec![0xA5; plain.len() + 40];
            prop_assert_eq!(expand(&block, &mut out), Ok(plain.len()));
            prop_assert_eq!(&out[..plain.len()], &plain[..]);
            let mut exact = vec![0; plain.len()];
            prop_assert_eq!(expand(&block, &mut exact), Ok(plain.len()));
            prop_assert_eq!(&exact, &plain);
            // Any front of it, and no byte more.
            let length = cut.index(plain.len() + 1);
            let mut front = vec![0xA5; length + 40];
            prop_assert_eq!(expand_lz4_front(&block, &mut front[..length]), Ok(()));
            prop_assert_eq!(&front[..length], &plain[..length]);
            prop_assert!(front[length..].iter().all(|&byte| byte == 0xA5));
            if length < plain.len() {
                prop_assert_eq!(expand(&block, &mut front[..length]), Err(DecompressError::TooLong));
            }
            let mut longer = vec![0; plain.len() + 1];
            prop_assert_eq!(expand_lz4_front(&block, &mut longer), Err(DecompressError::Corrupt));
        }

        #[test]
        fn it_agrees_with_the_library(pieces in pieces(), at: proptest::sample::Index, flip: u8, cut: proptest::sample::Index) {
            let (mut block, plain) = write(&pieces);
            let at = at.index(block.len());
            block[at] ^= flip;
            block.truncate(block.len() - cut.index(block.len()) / 4);
            let room = plain.len() + 100;
            let (mut ours, mut theirs) = (vec![0xA5; room + 32], vec![0; room]);
            let (found, expected) = (expand(&block, &mut ours[..room]), lz4_flex::block::decompress_into(&block, &mut theirs));
            prop_assert!(ours[room..].iter().all(|&byte| byte == 0xA5));
            // The library takes a block that ends with a match, which the format does not allow.
            if let (Ok(found), Ok(expected)) = (&found, &expected) {
                prop_assert_eq!(&ours[..*found], &theirs[..*expected]);
            }
            prop_assert!(found.is_err() || expected.is_ok());
        }
    }

    #[test]
    fn malformed_blocks_are_errors() {
        let mut out = [0; 64];
        for block in [
            &[][..],
            // Literals, a length, an offset and a match length that are cut off.
            &[0x40, 1, 2],
            &[0xF0, 255],
            &[0x10, 7, 1],
            &[0x1F, 7, 1, 0],
            // Offsets of zero, and to before the beginning.
            &[0x10, 7, 0, 0, 0],
            &[0x10, 7, 2, 0, 0],
            // A match at the end.
            &[0x10, 7, 1, 0],
        ] {
            assert_eq!(expand(block, &mut out), Err(DecompressError::Corrupt), "{block:x?}");
        }
        assert_eq!(expand(&[0x1F, 7, 1, 0, 255, 255, 0, 0], &mut out), Err(DecompressError::TooLong));
        assert_eq!(expand_lz4_front(&[0x1F, 7, 1, 0, 255, 255, 0, 0], &mut out), Ok(()));
        assert_eq!(out, [7; 64]);
    }
}
