//! Codes for one block: lengths from counts, canonical codes (section 3.2.2), the block's header (section 3.2.7), and
//! the loop that writes tokens.

use super::bits::BitWriter;
use super::matches::{
    LENGTHS, LITERAL_DISTANCE, SymbolCounts, TOKEN_DISTANCE_SHIFT, TOKEN_EXTRA_MASK, TOKEN_LITLEN_SHIFT,
};
use super::{DISTANCE_SYMBOLS, END_OF_BLOCK, LITLEN_SYMBOLS};
use crate::tier::Tier;

/// Maximum code lengths in bits: of a literal, length or distance, and of a code length.
const CODE_MAX: usize = 15;
const CODE_LENGTH_CODE_MAX: usize = 7;

/// Transmission order of the lengths of the code length code.
const ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Bits behind a length or distance symbol of the alphabets in section 3.2.5.
pub(super) fn length_extra_bits(symbol: usize) -> u32 {
    // Symbols are counted from the length of 3.
    if symbol < 8 || symbol == 28 { 0 } else { (symbol as u32 - 4) / 4 }
}

/// Bits behind a distance symbol.
pub(super) fn distance_extra_bits(symbol: usize) -> u32 {
    if symbol < 4 { 0 } else { (symbol as u32 - 2) / 2 }
}

/// Codes of one block, and the resulting length.
pub(super) struct HuffmanPlan {
    litlen_lengths: [u8; LITLEN_SYMBOLS],
    distance_lengths: [u8; DISTANCE_SYMBOLS],
    litlen_sent: usize,
    distances_sent: usize,
    /// Code lengths as they are sent: a symbol of the code length alphabet and the value of its extra bits.
    runs: [(u8, u8); LITLEN_SYMBOLS + DISTANCE_SYMBOLS],
    run_count: usize,
    code_length_lengths: [u8; 19],
    code_lengths_sent: usize,
    bits: u64,
}

impl HuffmanPlan {
    /// Chooses the codes.
    pub(super) fn new(counts: &SymbolCounts) -> Self {
        let mut litlen = [0u32; LITLEN_SYMBOLS];
        litlen[..256].copy_from_slice(&counts.literals_and_lengths[..256]);
        litlen[END_OF_BLOCK] = 1;
        for (index, &(symbol, _)) in LENGTHS.iter().enumerate() {
            litlen[257 + usize::from(symbol)] += counts.literals_and_lengths[256 + index];
        }
        let mut distances = [0u32; DISTANCE_SYMBOLS];
        distances.copy_from_slice(&counts.distances[..DISTANCE_SYMBOLS]);
        // A code of one symbol is incomplete, which not every inflater likes.
        let dummies = 2usize.saturating_sub(distances.iter().filter(|&&count| count > 0).count());
        distances.iter_mut().filter(|count| **count == 0).take(dummies).for_each(|count| *count = 1);

        let mut plan = Self {
            litlen_lengths: [0; LITLEN_SYMBOLS],
            distance_lengths: [0; DISTANCE_SYMBOLS],
            litlen_sent: 0,
            distances_sent: 0,
            runs: [(0, 0); LITLEN_SYMBOLS + DISTANCE_SYMBOLS],
            run_count: 0,
            code_length_lengths: [0; 19],
            code_lengths_sent: 0,
            bits: 0,
        };
        code_lengths(&litlen, CODE_MAX, &mut plan.litlen_lengths);
        code_lengths(&distances, CODE_MAX, &mut plan.distance_lengths);
        plan.litlen_sent = used(&plan.litlen_lengths).max(257);
        plan.distances_sent = used(&plan.distance_lengths).max(1);
        let header_bits = plan.plan_header();
        let litlen_bits = litlen.iter().zip(&plan.litlen_lengths).enumerate().map(|(symbol, (&count, &length))| {
            let extra = if symbol > END_OF_BLOCK { length_extra_bits(symbol - 257) } else { 0 };
            u64::from(count) * u64::from(u32::from(length) + extra)
        });
        let distance_bits = counts.distances[..DISTANCE_SYMBOLS].iter().zip(&plan.distance_lengths).enumerate().map(
            |(symbol, (&count, &length))| u64::from(count) * u64::from(u32::from(length) + distance_extra_bits(symbol)),
        );
        plan.bits = header_bits + litlen_bits.sum::<u64>() + distance_bits.sum::<u64>();
        plan
    }

    /// Returns the length of the block in bits, with its header and its end.
    pub(super) fn total_bits(&self) -> u64 {
        self.bits
    }

    /// Run-length encodes the code lengths; returns the header's length in bits.
    fn plan_header(&mut self) -> u64 {
        let mut lengths = [0u8; LITLEN_SYMBOLS + DISTANCE_SYMBOLS];
        let total = self.litlen_sent + self.distances_sent;
        lengths[..self.litlen_sent].copy_from_slice(&self.litlen_lengths[..self.litlen_sent]);
        lengths[self.litlen_sent..total].copy_from_slice(&self.distance_lengths[..self.distances_sent]);
        let mut counts = [0u32; 19];
        let mut push = |symbol: u8, extra: usize| {
            self.runs[self.run_count] = (symbol, extra as u8);
            self.run_count += 1;
            counts[usize::from(symbol)] += 1;
        };
        let mut rest = &lengths[..total];
        while let Some(&length) = rest.first() {
            let mut run = rest.iter().take_while(|&&other| other == length).count();
            rest = &rest[run..];
            if length == 0 {
                while run >= 11 {
                    let part = run.min(138);
                    push(18, part - 11);
                    run -= part;
                }
                if run >= 3 {
                    push(17, run - 3);
                    run = 0;
                }
            } else {
                push(length, 0);
                run -= 1;
                while run >= 3 {
                    let part = run.min(6);
                    push(16, part - 3);
                    run -= part;
                }
            }
            (0..run).for_each(|_| push(length, 0));
        }
        let sent = counts;
        if counts.iter().filter(|&&count| count > 0).count() < 2 {
            counts[usize::from(counts[0] > 0)] += 1;
        }
        code_lengths(&counts, CODE_LENGTH_CODE_MAX, &mut self.code_length_lengths);
        self.code_lengths_sent =
            ORDER.iter().rposition(|&symbol| self.code_length_lengths[symbol] > 0).map_or(4, |last| last + 1).max(4);
        let runs = sent.iter().zip(&self.code_length_lengths).enumerate().map(|(symbol, (&count, &length))| {
            u64::from(count) * u64::from(u32::from(length) + run_extra_bits(symbol as u8))
        });
        3 + 14 + 3 * self.code_lengths_sent as u64 + runs.sum::<u64>()
    }

    /// Writes the whole block.
    ///
    /// Requires an output that is [`BitWriter::SLACK`] bytes longer than the block.
    pub(super) fn write(&self, tokens: &[u32], last: bool, tier: Tier, writer: &mut BitWriter, output: &mut [u8]) {
        assert!(writer.len() + writer.bytes_after(self.bits) + BitWriter::SLACK <= output.len());
        self.write_header(last, writer, output);
        let tables = Tables::new(self);
        tables.write(tokens, tier, writer, output);
        let end = tables.litlen_end;
        writer.put(u64::from(end.0), u32::from(end.1), output);
    }

    fn write_header(&self, last: bool, writer: &mut BitWriter, output: &mut [u8]) {
        writer.put(u64::from(last) | 2 << 1, 3, output);
        let sizes = (self.litlen_sent - 257) | (self.distances_sent - 1) << 5 | (self.code_lengths_sent - 4) << 10;
        writer.put(sizes as u64, 14, output);
        for &symbol in &ORDER[..self.code_lengths_sent] {
            writer.put(u64::from(self.code_length_lengths[symbol]), 3, output);
        }
        let codes = canonical(&self.code_length_lengths);
        for &(symbol, extra) in &self.runs[..self.run_count] {
            let length = u32::from(self.code_length_lengths[usize::from(symbol)]);
            let bits = u64::from(codes[usize::from(symbol)]) | u64::from(extra) << length;
            writer.put(bits, length + run_extra_bits(symbol), output);
        }
    }
}

fn run_extra_bits(symbol: u8) -> u32 {
    match symbol {
        16 => 2,
        17 => 3,
        18 => 7,
        _ => 0,
    }
}

/// Returns the number of symbols up to the last that has a code.
fn used(lengths: &[u8]) -> usize {
    lengths.iter().rposition(|&length| length > 0).map_or(0, |last| last + 1)
}

/// Lookup tables of tokens.
struct Tables {
    /// Entry of each literal and each match length: the code with a length's extra bits from bit 8 on, the number of
    /// bits in the low byte.
    litlen: [u32; 512],
    /// Entry of each distance symbol: the code from bit 16 on, bits of code and extra bits in the second byte, bits of
    /// the code alone in the low byte.  Indexed by a whole byte of the token, whose top bit belongs to a litlen and is
    /// ignored.
    distance: [u32; 256],
    litlen_end: (u16, u8),
}

impl Tables {
    fn new(plan: &HuffmanPlan) -> Self {
        let codes = canonical(&plan.litlen_lengths);
        let mut litlen = [0u32; 512];
        for literal in 0..256 {
            litlen[literal] = u32::from(codes[literal]) << 8 | u32::from(plan.litlen_lengths[literal]);
        }
        for (index, &(symbol, extra)) in LENGTHS.iter().enumerate() {
            let at = 257 + usize::from(symbol);
            let length = u32::from(plan.litlen_lengths[at]);
            let bits = u32::from(codes[at]) | u32::from(extra) << length;
            litlen[256 + index] = bits << 8 | (length + length_extra_bits(usize::from(symbol)));
        }
        let codes = canonical(&plan.distance_lengths);
        let mut distance = [0u32; 256];
        for symbol in 0..DISTANCE_SYMBOLS {
            let length = u32::from(plan.distance_lengths[symbol]);
            let entry = u32::from(codes[symbol]) << 16 | (length + distance_extra_bits(symbol)) << 8 | length;
            distance[symbol] = entry;
            distance[symbol | 0x80] = entry;
        }
        debug_assert_eq!(distance[LITERAL_DISTANCE as usize], 0);
        let end = (canonical(&plan.litlen_lengths)[END_OF_BLOCK], plan.litlen_lengths[END_OF_BLOCK]);
        Self { litlen, distance, litlen_end: end }
    }

    fn write(&self, tokens: &[u32], tier: Tier, writer: &mut BitWriter, output: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if tier >= Tier::Avx2 {
            // SAFETY: a tier from AVX2 up has BMI1 and BMI2, and every caller that names a tier has verified that it
            // is available.
            return unsafe { self.write_bmi2(tokens, writer, output) };
        }
        let _ = tier;
        self.write_any(tokens, writer, output);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "bmi1,bmi2")]
    fn write_bmi2(&self, tokens: &[u32], writer: &mut BitWriter, output: &mut [u8]) {
        self.write_any(tokens, writer, output);
    }

    /// Two tokens are put together before they are written: they seldom have more than 56 bits between them.
    #[inline(always)]
    fn write_any(&self, tokens: &[u32], writer: &mut BitWriter, output: &mut [u8]) {
        let (mut at, mut pending, mut count) = writer.state();
        let mut put = |bits: u64, number: u32| {
            pending |= bits << count;
            count += number;
            debug_assert!(at + 8 <= output.len());
            // SAFETY: `HuffmanPlan::write` has made sure that the output holds all bits of the block and SLACK bytes
            // more. The plan counts the very tokens that are written here, so `at` stays below that length.
            unsafe { output.as_mut_ptr().add(at).cast::<[u8; 8]>().write_unaligned(pending.to_le_bytes()) };
            at += (count >> 3) as usize;
            pending >>= count & 0x38;
            count &= 7;
        };
        let mut quads = tokens.chunks_exact(4);
        for quad in &mut quads {
            let (bits0, len0) = self.bits_of(quad[0]);
            let (bits1, len1) = self.bits_of(quad[1]);
            let (bits2, len2) = self.bits_of(quad[2]);
            let (bits3, len3) = self.bits_of(quad[3]);
            let (len01, len23) = ((len0 + len1) & 0xFF, (len2 + len3) & 0xFF);
            if len01 <= 56 && len23 <= 56 {
                put(bits0 | bits1 << (len0 & 63), len01);
                put(bits2 | bits3 << (len2 & 63), len23);
            } else {
                put(bits0, len0 & 0xFF);
                put(bits1, len1 & 0xFF);
                put(bits2, len2 & 0xFF);
                put(bits3, len3 & 0xFF);
            }
        }
        for &token in quads.remainder() {
            let (bits, len) = self.bits_of(token);
            put(bits, len & 0xFF);
        }
        writer.resume((at, pending, count));
    }

    /// Returns a token's bits, at most 48, and in the low byte their number; the bytes above are undefined.
    #[inline(always)]
    fn bits_of(&self, token: u32) -> (u64, u32) {
        let litlen = self.litlen[(token >> TOKEN_LITLEN_SHIFT) as usize];
        let distance = self.distance[(token >> TOKEN_DISTANCE_SHIFT) as usize & 0xFF];
        let extra = u64::from(token & TOKEN_EXTRA_MASK);
        let behind = extra << (distance & 63) | u64::from(distance >> 16);
        (behind << (litlen & 63) | u64::from(litlen >> 8), litlen.wrapping_add(distance >> 8))
    }
}

/// Returns the canonical codes of these lengths, first bit lowest (section 3.2.2).
fn canonical<const N: usize>(lengths: &[u8; N]) -> [u16; N] {
    let mut count = [0u16; 16];
    lengths.iter().for_each(|&length| count[usize::from(length)] += 1);
    count[0] = 0;
    let mut next = [0u16; 16];
    let mut code = 0u16;
    for length in 1..16 {
        code = (code + count[length - 1]) << 1;
        next[length] = code;
    }
    let mut codes = [0u16; N];
    for (code, &length) in codes.iter_mut().zip(lengths) {
        let length = usize::from(length);
        if length > 0 {
            *code = next[length].reverse_bits() >> (16 - length);
            next[length] += 1;
        }
    }
    codes
}

/// Maximum number of symbols of an alphabet.
const SYMBOLS_MAX: usize = LITLEN_SYMBOLS;

/// Lengths of a complete code for the symbols that occur, none longer than `max` bits.
///
/// Computes Huffman's code lengths where they fit.  Longer ones are cut to `max`, which is compensated by lengthening
/// the longest of the other codes, at negligible cost for these sizes.
pub(super) fn code_lengths(counts: &[u32], max: usize, lengths: &mut [u8]) {
    const SYMBOL_BITS: u32 = 9;
    let mut first = [0u32; SYMBOLS_MAX];
    let mut second = [0u32; SYMBOLS_MAX];
    let (mut number, mut seen) = (0, 0);
    for (symbol, &count) in counts.iter().enumerate() {
        if count > 0 {
            // A block's length bounds what a count can be.
            debug_assert!(count < 1 << (32 - SYMBOL_BITS));
            first[number] = count << SYMBOL_BITS | symbol as u32;
            seen |= count;
            number += 1;
        }
    }
    let symbol_of = |leaf: u32| (leaf & ((1 << SYMBOL_BITS) - 1)) as usize;
    if number < 2 {
        first[..number].iter().for_each(|&leaf| lengths[symbol_of(leaf)] = 1);
        return;
    }
    let leaves = sort_by_count(&mut first[..number], &mut second[..number], SYMBOL_BITS, seen);

    // The two lightest nodes are joined until one is left.  Inner nodes come into being in the order of their weight,
    // so two queues do where a heap would otherwise be needed.
    let mut weights = [0u32; SYMBOLS_MAX];
    let mut leaf_parent = [0u16; SYMBOLS_MAX];
    let mut inner_parent = [0u16; SYMBOLS_MAX];
    let (mut leaf, mut inner) = (0, 0);
    for node in 0..number - 1 {
        for _ in 0..2 {
            if leaf < number && (inner >= node || leaves[leaf] >> SYMBOL_BITS <= weights[inner]) {
                weights[node] += leaves[leaf] >> SYMBOL_BITS;
                leaf_parent[leaf] = node as u16;
                leaf += 1;
            } else {
                weights[node] += weights[inner];
                inner_parent[inner] = node as u16;
                inner += 1;
            }
        }
    }
    let mut depth = [0u8; SYMBOLS_MAX];
    for node in (0..number - 2).rev() {
        depth[node] = depth[usize::from(inner_parent[node])] + 1;
    }
    let mut of_length = [0u32; CODE_MAX + 1];
    for &parent in &leaf_parent[..number] {
        of_length[(usize::from(depth[usize::from(parent)]) + 1).min(max)] += 1;
    }
    fit(&mut of_length, max);
    // The rarest symbols come first, and get the longest codes.
    let mut next = leaves.iter();
    for length in (1..=max).rev() {
        for &leaf in next.by_ref().take(of_length[length] as usize) {
            lengths[symbol_of(leaf)] = length as u8;
        }
    }
}

/// Makes numbers of codes of each length complete (Kraft's sum exactly one) that were cut at `max`.
fn fit(of_length: &mut [u32], max: usize) {
    let whole = 1u32 << max;
    let mut sum: u32 = (1..=max).map(|length| of_length[length] << (max - length)).sum();
    while sum > whole {
        let length = (1..max).rev().find(|&length| of_length[length] > 0).expect("not all codes can be the longest");
        of_length[length] -= 1;
        of_length[length + 1] += 1;
        sum -= 1 << (max - length - 1);
    }
    while sum < whole {
        let fits = |&length: &usize| of_length[length] > 0 && 1 << (max - length) <= whole - sum;
        let length = (1..=max).rev().find(fits).expect("what is missing is a sum of the longest codes");
        of_length[length] -= 1;
        of_length[length - 1] += 1;
        sum += 1 << (max - length);
    }
}

/// Radix sort by the bits above the low `shift` bits; `seen` has every bit that occurs there.
fn sort_by_count<'a>(first: &'a mut [u32], second: &'a mut [u32], shift: u32, seen: u32) -> &'a [u32] {
    let (mut from, mut to) = (first, second);
    let mut shift_now = shift;
    while shift_now < 32 && seen >> (shift_now - shift) > 0 {
        let mut place = [0u16; 256];
        from.iter().for_each(|&item| place[(item >> shift_now & 0xFF) as usize] += 1);
        let mut sum = 0;
        for count in &mut place {
            sum += std::mem::replace(count, sum);
        }
        for &item in from.iter() {
            let place = &mut place[(item >> shift_now & 0xFF) as usize];
            to[usize::from(*place)] = item;
            *place += 1;
        }
        std::mem::swap(&mut from, &mut to);
        shift_now += 8;
    }
    from
}
