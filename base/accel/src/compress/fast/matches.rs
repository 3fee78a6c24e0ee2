//! Match finder: a hash table maps four bytes to their last position, and the first match is taken.
//!
//! Four positions are looked at from one load of eight bytes.  Their branches are left to the predictor: it is right
//! more often than a selection without branches is quick, since the next lookup hangs on the end of this match.

use std::ops::Range;

use crate::tier::Tier;

/// Bits of the hash.  8192 places of two bytes: half of a small first-level cache, and better than zlib's ratio.
const HASH_BITS: u32 = 13;

/// Maximum distance of a match (RFC 1951 section 2), and its maximum length, in bytes.
const WINDOW: u32 = 32 << 10;
const MATCH_MAX: usize = 258;

/// Minimum length of a match that is searched for, in bytes.
const MATCH_MIN: usize = 4;

/// Number of bytes past a position that the fast loop may read.
const LOOKAHEAD: usize = 48;

/// Number of tokens past the last one that may be overwritten.
pub(super) const TOKEN_SLACK: usize = 16;

/// Token layout: a literal or a match in one word, with the literal or 256 + length - 3 from bit 23 on, the distance
/// symbol from bit 16 on, and the distance's extra bits below.
pub(super) const TOKEN_LITLEN_SHIFT: u32 = 23;
pub(super) const TOKEN_DISTANCE_SHIFT: u32 = 16;
pub(super) const TOKEN_EXTRA_MASK: u32 = 0x1FFF;

/// Distance symbol of a literal: encodes no bits.
pub(super) const LITERAL_DISTANCE: u32 = 31;

/// Symbol (relative to that of length 3) and extra bits of each match length from 3 on.
pub(super) const LENGTHS: [(u8, u8); 256] = lengths();

const fn lengths() -> [(u8, u8); 256] {
    let mut table = [(0u8, 0u8); 256];
    let mut index = 0;
    while index < 255 {
        table[index] = if index < 8 {
            (index as u8, 0)
        } else {
            // Four symbols to each power of two (RFC 1951 section 3.2.5).
            let extra = (index as u32).ilog2() - 2;
            ((4 * extra) as u8 + (index >> extra) as u8, (index & ((1 << extra) - 1)) as u8)
        };
        index += 1;
    }
    table[255] = (28, 0);
    table
}

/// Symbol frequencies of a block.
pub(super) struct SymbolCounts {
    /// Literals, then lengths from 3 on, each counted separately.
    pub(super) literals_and_lengths: [u32; 512],
    /// Distance symbols.
    pub(super) distances: [u32; 32],
}

/// Hash table, and the tokens of the current block.
pub(super) struct MatchFinder {
    /// Low 16 bits of the position.  A wrapped position cannot be distinguished from a near one, and need not be: every
    /// match is verified by comparison.
    heads: Box<[u16; 1 << HASH_BITS]>,
    tokens: Box<[u32]>,
    token_count: usize,
    counts: SymbolCounts,
    /// Counts of every second literal, so that a run of one byte does not depend on its own previous increment.
    odd_literals: [u32; 256],
}

impl MatchFinder {
    /// Creates a match finder for `tokens` tokens, [`TOKEN_SLACK`] of which are never used.
    pub(super) fn new(tokens: usize) -> Self {
        Self {
            heads: Box::new([0; 1 << HASH_BITS]),
            tokens: vec![0; tokens].into_boxed_slice(),
            token_count: 0,
            counts: SymbolCounts { literals_and_lengths: [0; 512], distances: [0; 32] },
            odd_literals: [0; 256],
        }
    }

    /// Forgets what it has seen.
    pub(super) fn reset(&mut self) {
        self.heads.fill(0);
    }

    /// Returns the tokens of the last block.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens[..self.token_count]
    }

    /// Returns the symbol frequencies of the last block, without the end-of-block symbol.
    pub(super) fn counts(&self) -> &SymbolCounts {
        &self.counts
    }

    /// Turns `input[part]` into tokens.  All bytes before `part` since the last reset must have been processed, in
    /// order.
    pub(super) fn run(&mut self, tier: Tier, input: &[u8], part: Range<usize>) {
        assert!(part.end <= input.len() && part.len() + TOKEN_SLACK <= self.tokens.len());
        self.counts = SymbolCounts { literals_and_lengths: [0; 512], distances: [0; 32] };
        self.odd_literals = [0; 256];
        #[cfg(target_arch = "x86_64")]
        if tier >= Tier::Avx2 {
            // SAFETY: the tier says that the processor has what AVX2 stands for; the rest is asserted above.
            unsafe { self.run_avx2(input, part) }
        } else {
            // SAFETY: the part lies within the input, and the tokens have room for a literal each.
            unsafe { self.run_any::<Words>(input, part) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = tier;
            // SAFETY: as above.
            unsafe { self.run_any::<Words>(input, part) }
        }
        for (count, odd) in self.counts.literals_and_lengths.iter_mut().zip(&self.odd_literals) {
            *count += odd;
        }
    }

    /// # Safety
    /// That of [`run_any`](Self::run_any), and the processor has AVX2, BMI1, BMI2 and LZCNT's stand-ins.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    unsafe fn run_avx2(&mut self, input: &[u8], part: Range<usize>) {
        // SAFETY: the caller's word.
        unsafe { self.run_any::<x86::Avx2>(input, part) }
    }

    /// # Safety
    /// `part` lies within `input`; the tokens have room for `part.len()` and [`TOKEN_SLACK`] more; the processor has
    /// what `V` needs.
    #[inline(always)]
    unsafe fn run_any<V: Vector>(&mut self, input: &[u8], part: Range<usize>) {
        let base = input.as_ptr();
        let tokens = self.tokens.as_mut_ptr();
        let mut token = tokens;
        let mut at = part.start;
        let end = part.end;
        // SAFETY: a position in it is at least LOOKAHEAD bytes before the end of the input, so
        // loads of up to 8 bytes from it or from up to 8 bytes behind it stay inside, and so does the comparison of
        // 32 bytes, which is made only while that many are left.  A distance is the difference of a position and an
        // earlier one (or of a position and zero) modulo 2^16, so it never reaches before the beginning.  Places in
        // `heads` are hashes of HASH_BITS bits.  Each position gives at most one token, and a literal store writes
        // four, three of which may lie in the slack.
        unsafe {
            let heads = self.heads.as_mut_ptr();
            let counts = self.counts.literals_and_lengths.as_mut_ptr();
            let odd = self.odd_literals.as_mut_ptr();
            let distances = self.counts.distances.as_mut_ptr();
            // Looks up the last position of the four bytes at `at`, and records the new one.
            let look = |word: u64, at: usize| {
                let head = heads.add(hash(word as u32));
                (at as u16).wrapping_sub(head.replace(at as u16)) as usize
            };
            'positions: while at + LOOKAHEAD <= end {
                let here = base.add(at);
                let word = load8(here);
                V::store_literals(here, token);
                let (skipped, distance) = 'found: {
                    let distance = look(word, at);
                    if load4(here.sub(distance)) == word as u32 {
                        break 'found (0, distance);
                    }
                    *counts.add((word & 0xFF) as usize) += 1;
                    let word = word >> 8;
                    let distance = look(word, at + 1);
                    if load4(here.add(1).sub(distance)) == word as u32 {
                        break 'found (1, distance);
                    }
                    *odd.add((word & 0xFF) as usize) += 1;
                    let word = word >> 8;
                    let distance = look(word, at + 2);
                    if load4(here.add(2).sub(distance)) == word as u32 {
                        break 'found (2, distance);
                    }
                    *counts.add((word & 0xFF) as usize) += 1;
                    let word = word >> 8;
                    let distance = look(word, at + 3);
                    if load4(here.add(3).sub(distance)) == word as u32 {
                        break 'found (3, distance);
                    }
                    *odd.add((word & 0xFF) as usize) += 1;
                    token = token.add(4);
                    at += 4;
                    continue 'positions;
                };
                token = token.add(skipped);
                at += skipped;
                let here = base.add(at);
                if distance.wrapping_sub(1) >= WINDOW as usize {
                    // Too far back, or the place was empty and this is where zero comes round.
                    *counts.add(usize::from(*here)) += 1;
                    token = token.add(1);
                    at += 1;
                    continue;
                }
                let mut length = MATCH_MIN;
                let differ = load8(here.add(4)) ^ load8(here.add(4).sub(distance));
                if differ != 0 {
                    length += (differ.trailing_zeros() / 8) as usize;
                } else {
                    length = longer::<V>(here, distance, 12, (end - at).min(MATCH_MAX));
                }
                // A few of the positions inside the match are remembered: most of what all of them would bring.
                let inside = load8(here.add(1));
                look(inside, at + 1);
                look(inside >> 8, at + 2);
                look(inside >> 16, at + 3);
                at += length;
                *token = match_token(length, distance as u32, counts, distances);
                token = token.add(1);
            }
            // Last few bytes, without lookahead.
            while at < end {
                let here = base.add(at);
                if at + MATCH_MIN <= end && at + MATCH_MIN <= input.len() {
                    let distance = look(u64::from(load4(here)), at);
                    if distance.wrapping_sub(1) < WINDOW as usize && load4(here.sub(distance)) == load4(here) {
                        let length = longer::<Words>(here, distance, MATCH_MIN, (end - at).min(MATCH_MAX));
                        *token = match_token(length, distance as u32, counts, distances);
                        token = token.add(1);
                        at += length;
                        continue;
                    }
                }
                let literal = u32::from(*here);
                *token = literal << TOKEN_LITLEN_SHIFT | LITERAL_DISTANCE << TOKEN_DISTANCE_SHIFT;
                *counts.add(literal as usize) += 1;
                token = token.add(1);
                at += 1;
            }
            self.token_count = token.offset_from(tokens) as usize;
        }
    }
}

#[inline(always)]
fn hash(bytes: u32) -> usize {
    (bytes.wrapping_mul(0x9E37_79B1) >> (32 - HASH_BITS)) as usize
}

/// Returns the token of a match, and counts it.
///
/// # Safety
/// `length` is from 3 to 258 and `distance` from 1 to 32768; the counters are those of [`SymbolCounts`].
#[inline(always)]
unsafe fn match_token(length: usize, distance: u32, counts: *mut u32, distances: *mut u32) -> u32 {
    let litlen = 256 + length - 3;
    // Two symbols to each power of two (RFC 1951 section 3.2.5); the first four distances have one each.
    let from_zero = distance - 1;
    let (symbol, extra) = if from_zero < 2 {
        (from_zero, 0)
    } else {
        let top = from_zero.ilog2();
        (2 * top + (from_zero >> (top - 1) & 1), from_zero & ((1 << (top - 1)) - 1))
    };
    // SAFETY: a length gives at most 511 and a distance a symbol of at most 29.
    unsafe {
        *counts.add(litlen) += 1;
        *distances.add(symbol as usize) += 1;
    }
    (litlen as u32) << TOKEN_LITLEN_SHIFT | symbol << TOKEN_DISTANCE_SHIFT | extra
}

/// Returns the length of a match whose first `known` bytes are equal, up to `max`.
///
/// # Safety
/// `max` bytes from `here` on are in the input, and `distance` bytes before it.
#[inline(always)]
unsafe fn longer<V: Vector>(here: *const u8, distance: usize, known: usize, max: usize) -> usize {
    let mut length = known;
    // SAFETY: no byte at or behind `max` is read.
    unsafe {
        while length + 32 <= max {
            let equal = V::equal_bytes(here.add(length), here.add(length).sub(distance));
            length += equal;
            if equal < 32 {
                return length;
            }
        }
        while length < max && *here.add(length) == *here.add(length).sub(distance) {
            length += 1;
        }
    }
    length
}

#[inline(always)]
unsafe fn load4(from: *const u8) -> u32 {
    // SAFETY: the caller's word that four bytes are there.
    u32::from_le_bytes(unsafe { from.cast::<[u8; 4]>().read_unaligned() })
}

#[inline(always)]
unsafe fn load8(from: *const u8) -> u64 {
    // SAFETY: the caller's word that eight bytes are there.
    u64::from_le_bytes(unsafe { from.cast::<[u8; 8]>().read_unaligned() })
}

/// Vector operations.
trait Vector {
    /// Writes four literals as tokens.
    ///
    /// # Safety
    /// Four bytes and four tokens are there.
    unsafe fn store_literals(from: *const u8, to: *mut u32);

    /// Returns the number of equal bytes among the next 32, up to the first difference.
    ///
    /// # Safety
    /// 32 bytes are there in both places.
    unsafe fn equal_bytes(left: *const u8, right: *const u8) -> usize;
}

/// Scalar implementation.
struct Words;

impl Vector for Words {
    #[inline(always)]
    unsafe fn store_literals(from: *const u8, to: *mut u32) {
        // SAFETY: the caller's word.
        let bytes = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
        let tokens = bytes.map(|byte| u32::from(byte) << TOKEN_LITLEN_SHIFT | LITERAL_DISTANCE << TOKEN_DISTANCE_SHIFT);
        // SAFETY: as above.
        unsafe { to.cast::<[u32; 4]>().write_unaligned(tokens) };
    }

    #[inline(always)]
    unsafe fn equal_bytes(left: *const u8, right: *const u8) -> usize {
        let mut at = 0;
        while at < 32 {
            // SAFETY: the caller's word.
            let differ = unsafe { load8(left.add(at)) ^ load8(right.add(at)) };
            if differ != 0 {
                return at + (differ.trailing_zeros() / 8) as usize;
            }
            at += 8;
        }
        32
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LITERAL_DISTANCE, TOKEN_DISTANCE_SHIFT, TOKEN_LITLEN_SHIFT, Vector};

    /// AVX2 implementation; used only inside functions that enable it.
    pub(super) struct Avx2;

    impl Vector for Avx2 {
        #[inline(always)]
        unsafe fn store_literals(from: *const u8, to: *mut u32) {
            // SAFETY: the caller's word for the memory, and the function around this one has AVX2.
            unsafe {
                let bytes = _mm_cvtsi32_si128(from.cast::<i32>().read_unaligned());
                let high = _mm_slli_epi32::<{ TOKEN_LITLEN_SHIFT as i32 }>(_mm_cvtepu8_epi32(bytes));
                let tokens = _mm_or_si128(high, _mm_set1_epi32((LITERAL_DISTANCE << TOKEN_DISTANCE_SHIFT) as i32));
                _mm_storeu_si128(to.cast(), tokens);
            }
        }

        #[inline(always)]
        unsafe fn equal_bytes(left: *const u8, right: *const u8) -> usize {
            // SAFETY: as above.
            let equal = unsafe {
                let same = _mm256_cmpeq_epi8(_mm256_loadu_si256(left.cast()), _mm256_loadu_si256(right.cast()));
                _mm256_movemask_epi8(same) as u32
            };
            (!equal).trailing_zeros() as usize
        }
    }
}
