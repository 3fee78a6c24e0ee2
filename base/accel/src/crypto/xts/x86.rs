//! XTS with AES-NI and with VAES.
//!
//! A tweak is multiplied by x for each block (IEEE 1619 section 5.2), in the field of x^128 + x^7 + x^2 + x + 1 with
//! the lowest bit first, which is how the processor holds it.  Both sector sizes are multiples of 512 bytes, that is
//! of 32 blocks, so ciphertext stealing is not needed.

use std::arch::x86_64::*;

use super::keys::{ROUND_KEYS_MAX, RoundKey, Schedules};
use super::{Direction, Run, XtsShape};

/// Smallest sector in bytes, of which all sizes are multiples.
pub(super) const SECTOR_MIN: usize = 512;

/// Sectors whose tweaks are encrypted together.
const TWEAKS: usize = 32;

/// Polynomial without its highest term.
pub(super) const POLYNOMIAL: i64 = 0x87;

/// Fills a schedule from a key of 16 or 32 bytes (FIPS 197 section 5.2).
#[target_feature(enable = "aes,sse2")]
pub(super) fn expand(key: &[u8], schedule: &mut [RoundKey; ROUND_KEYS_MAX]) {
    // Computes SubWord of the last word of a key; the instruction returns it plain and rotated.
    let substituted = |key: __m128i| _mm_aeskeygenassist_si128::<0>(key);
    // Each word is the sum of all before it in its key.
    let spread = |key: __m128i| {
        let key = _mm_xor_si128(key, _mm_slli_si128::<4>(key));
        _mm_xor_si128(key, _mm_slli_si128::<8>(key))
    };
    let load = |at: usize| {
        let bytes: [u8; 16] = key[at..at + 16].try_into().expect("sixteen bytes");
        // SAFETY: sixteen bytes are there.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    };
    let mut store = |round: usize, key: __m128i| {
        for quarter in schedule[round].chunks_exact_mut(16) {
            // SAFETY: sixteen bytes are there.
            unsafe { _mm_storeu_si128(quarter.as_mut_ptr().cast(), key) };
        }
    };
    let mut constant = 1i32;
    let mut low = load(0);
    store(0, low);
    if key.len() == 16 {
        for round in 1..=10 {
            let word = _mm_shuffle_epi32::<0xFF>(substituted(low));
            low = _mm_xor_si128(_mm_xor_si128(spread(low), word), _mm_set1_epi32(constant));
            store(round, low);
            constant = if constant == 0x80 { 0x1B } else { constant << 1 };
        }
        return;
    }
    let mut high = load(16);
    store(1, high);
    for round in (2..=14).step_by(2) {
        let word = _mm_shuffle_epi32::<0xFF>(substituted(high));
        low = _mm_xor_si128(_mm_xor_si128(spread(low), word), _mm_set1_epi32(constant));
        store(round, low);
        constant <<= 1;
        if round < 14 {
            let word = _mm_shuffle_epi32::<0xAA>(substituted(low));
            high = _mm_xor_si128(spread(high), word);
            store(round + 1, high);
        }
    }
}

/// Makes the schedule for decryption from the one for encryption.
#[target_feature(enable = "aes,sse2")]
pub(super) fn invert(encrypt: &[RoundKey], decrypt: &mut [RoundKey]) {
    let last = encrypt.len() - 1;
    for (round, key) in encrypt.iter().enumerate() {
        // SAFETY: a round key has 64 bytes.
        let mut value = unsafe { _mm_loadu_si128(key.as_ptr().cast()) };
        if round != 0 && round != last {
            value = _mm_aesimc_si128(value);
        }
        for quarter in decrypt[last - round].chunks_exact_mut(16) {
            // SAFETY: sixteen bytes are there.
            unsafe { _mm_storeu_si128(quarter.as_mut_ptr().cast(), value) };
        }
    }
}

/// # Safety
/// That of [`Keys::run`](super::Keys::run), and the processor has the AES instructions.
pub(super) unsafe fn run_aes_ni(keys: &Schedules, direction: Direction, run: Run, shape: XtsShape) {
    // SAFETY: the caller's word.
    unsafe {
        match (direction, keys.rounds, shape) {
            (Direction::Encrypt, 10, XtsShape::V8) => narrow::<true, 10, 8>(keys, run),
            (Direction::Encrypt, 10, XtsShape::V4) => narrow::<true, 10, 4>(keys, run),
            (Direction::Encrypt, _, XtsShape::V8) => narrow::<true, 14, 8>(keys, run),
            (Direction::Encrypt, _, XtsShape::V4) => narrow::<true, 14, 4>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V8) => narrow::<false, 10, 8>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V4) => narrow::<false, 10, 4>(keys, run),
            (Direction::Decrypt, _, XtsShape::V8) => narrow::<false, 14, 8>(keys, run),
            (Direction::Decrypt, _, XtsShape::V4) => narrow::<false, 14, 4>(keys, run),
        }
    }
}

/// # Safety
/// That of [`Keys::run`](super::Keys::run), and the processor has AVX-512, VAES and VPCLMULQDQ.
pub(super) unsafe fn run_vaes(keys: &Schedules, direction: Direction, run: Run, shape: XtsShape) {
    // SAFETY: the caller's word.
    unsafe {
        match (direction, keys.rounds, shape) {
            (Direction::Encrypt, 10, XtsShape::V8) => wide::<true, 10, 8>(keys, run),
            (Direction::Encrypt, 10, XtsShape::V4) => wide::<true, 10, 4>(keys, run),
            (Direction::Encrypt, _, XtsShape::V8) => wide::<true, 14, 8>(keys, run),
            (Direction::Encrypt, _, XtsShape::V4) => wide::<true, 14, 4>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V8) => wide::<false, 10, 8>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V4) => wide::<false, 10, 4>(keys, run),
            (Direction::Decrypt, _, XtsShape::V8) => wide::<false, 14, 8>(keys, run),
            (Direction::Decrypt, _, XtsShape::V4) => wide::<false, 14, 4>(keys, run),
        }
    }
}

/// Processes a run, `BLOCKS` blocks at a time, each in a vector of its own.
///
/// # Safety
/// That of [`run_aes_ni`]; `ROUNDS` is the schedule's.
#[target_feature(enable = "aes,sse4.1")]
unsafe fn narrow<const ENCRYPT: bool, const ROUNDS: usize, const BLOCKS: usize>(keys: &Schedules, run: Run) {
    const { assert!(SECTOR_MIN.is_multiple_of(16 * BLOCKS)) }
    #[cfg(test)]
    crate::shape::trace::note(format_args!("v{BLOCKS}"));
    let data = if ENCRYPT { &keys.encrypt } else { &keys.decrypt };
    // SAFETY: a round key has 64 bytes.
    let load = |key: &RoundKey| unsafe { _mm_loadu_si128(key.as_ptr().cast()) };
    // Both signs, moved to the other half: 0x87 below for the upper one, a carry above for the lower one.
    let reduction = _mm_set_epi64x(1, POLYNOMIAL);
    let double = |tweak: __m128i| {
        let signs = _mm_srai_epi32::<31>(_mm_shuffle_epi32::<0b01_01_11_11>(tweak));
        _mm_xor_si128(_mm_add_epi64(tweak, tweak), _mm_and_si128(signs, reduction))
    };
    for (index, sector_at) in (0..run.length).step_by(run.size).enumerate() {
        let mut tweak = _mm_set_epi64x(run.high as i64, (run.first + index as u64) as i64);
        tweak = _mm_xor_si128(tweak, load(&keys.tweak[0]));
        for key in &keys.tweak[1..ROUNDS] {
            tweak = _mm_aesenc_si128(tweak, load(key));
        }
        tweak = _mm_aesenclast_si128(tweak, load(&keys.tweak[ROUNDS]));
        for at in (sector_at..sector_at + run.size).step_by(16 * BLOCKS) {
            let mut tweaks = [tweak; BLOCKS];
            for block in 1..BLOCKS {
                tweaks[block] = double(tweaks[block - 1]);
            }
            tweak = double(tweaks[BLOCKS - 1]);
            let first = load(&data[0]);
            let mut blocks = [first; BLOCKS];
            for block in 0..BLOCKS {
                // SAFETY: the blocks lie in the memory that the caller speaks for.
                let plain = unsafe { _mm_loadu_si128(run.from.add(at + 16 * block).cast()) };
                blocks[block] = _mm_xor_si128(plain, _mm_xor_si128(tweaks[block], first));
            }
            for key in &data[1..ROUNDS] {
                let key = load(key);
                for block in &mut blocks {
                    *block = if ENCRYPT { _mm_aesenc_si128(*block, key) } else { _mm_aesdec_si128(*block, key) };
                }
            }
            let last = load(&data[ROUNDS]);
            for block in 0..BLOCKS {
                // XORs the tweak into the last key, so that the two additions at the end are one.
                let key = _mm_xor_si128(last, tweaks[block]);
                let sealed = if ENCRYPT {
                    _mm_aesenclast_si128(blocks[block], key)
                } else {
                    _mm_aesdeclast_si128(blocks[block], key)
                };
                // SAFETY: as above.
                unsafe { _mm_storeu_si128(run.to.add(at + 16 * block).cast(), sealed) };
            }
        }
    }
}

/// Processes a run, `V` vectors at a time, four blocks in each.
///
/// # Safety
/// That of [`run_vaes`]; `ROUNDS` is the schedule's.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq,aes")]
unsafe fn wide<const ENCRYPT: bool, const ROUNDS: usize, const V: usize>(keys: &Schedules, run: Run) {
    const { assert!(SECTOR_MIN.is_multiple_of(64 * V)) }
    #[cfg(test)]
    crate::shape::trace::note(format_args!("v{V}"));
    let group_bytes = 64 * V;
    let data = if ENCRYPT { &keys.encrypt } else { &keys.decrypt };
    let mut tweaks = [_mm_setzero_si128(); TWEAKS];
    let sectors = run.length / run.size;
    for batch in (0..sectors).step_by(TWEAKS) {
        let number = TWEAKS.min(sectors - batch);
        encrypt_tweaks::<ROUNDS>(keys, (run.first + batch as u64, run.high), number, &mut tweaks);
        for (index, &tweak) in tweaks[..number].iter().enumerate() {
            let sector_at = (batch + index) * run.size;
            let mut powers = powers::<V>(tweak);
            let last = sector_at + run.size - group_bytes;
            for at in (sector_at..last).step_by(group_bytes) {
                // SAFETY: the group lies in the memory that the caller speaks for.
                unsafe { group::<ENCRYPT, ROUNDS, V, true>(data, run.from.add(at), run.to.add(at), &mut powers) };
            }
            // SAFETY: as above.
            unsafe { group::<ENCRYPT, ROUNDS, V, false>(data, run.from.add(last), run.to.add(last), &mut powers) };
        }
    }
}

/// Returns the vectors in which the tweak is multiplied by x^0, x^1 and so on, four in each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq")]
fn powers<const V: usize>(tweak: __m128i) -> [__m512i; V] {
    let polynomial = _mm512_set1_epi64(POLYNOMIAL);
    let tweak = _mm512_broadcast_i32x4(tweak);
    let mut powers = [tweak; V];
    for (vector, power) in powers.iter_mut().enumerate() {
        let first = 4 * vector as i64;
        let left = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3));
        let right = _mm512_sub_epi64(_mm512_set1_epi64(64), left);
        // Bits shifted out of the lower half enter the upper; those of the upper half are reduced into the lower.
        let out = _mm512_srlv_epi64(tweak, right);
        let reduced = _mm512_clmulepi64_epi128::<0x01>(out, polynomial);
        let carried = _mm512_bslli_epi128::<8>(out);
        *power = _mm512_ternarylogic_epi64::<0x96>(_mm512_sllv_epi64(tweak, left), carried, reduced);
    }
    powers
}

/// Multiplies by x^(4 V), what `V` vectors of blocks move the tweak by: half as many bytes further, and what falls out
/// reduced.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
fn advance<const V: usize>(tweak: __m512i) -> __m512i {
    const { assert!(V == 4 || V == 8) }
    let (out, moved) = if V == 8 {
        (_mm512_bsrli_epi128::<12>(tweak), _mm512_bslli_epi128::<4>(tweak))
    } else {
        (_mm512_bsrli_epi128::<14>(tweak), _mm512_bslli_epi128::<2>(tweak))
    };
    let reduced = _mm512_clmulepi64_epi128::<0x00>(out, _mm512_set1_epi64(POLYNOMIAL));
    _mm512_xor_si512(moved, reduced)
}

/// Encrypts the numbers of up to [`TWEAKS`] sectors, of which the first is given as its lower and upper half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vaes")]
fn encrypt_tweaks<const ROUNDS: usize>(
    keys: &Schedules,
    (first, high): (u64, u64),
    number: usize,
    tweaks: &mut [__m128i; TWEAKS],
) {
    let high = high as i64;
    // SAFETY: a round key has 64 bytes.
    let load = |key: &RoundKey| unsafe { _mm512_loadu_si512(key.as_ptr().cast()) };
    // Four at a time for a few sectors; the whole batch together for many.
    let vectors = number.div_ceil(4);
    let mut blocks = [_mm512_setzero_si512(); TWEAKS / 4];
    for (vector, block) in blocks.iter_mut().enumerate() {
        // Numbers past the last sector may wrap; they are never used.
        let at = first.wrapping_add(4 * vector as u64) as i64;
        *block = _mm512_xor_si512(
            _mm512_setr_epi64(at, high, at.wrapping_add(1), high, at.wrapping_add(2), high, at.wrapping_add(3), high),
            load(&keys.tweak[0]),
        );
    }
    if vectors == 1 {
        for key in &keys.tweak[1..ROUNDS] {
            blocks[0] = _mm512_aesenc_epi128(blocks[0], load(key));
        }
        blocks[0] = _mm512_aesenclast_epi128(blocks[0], load(&keys.tweak[ROUNDS]));
    } else {
        for key in &keys.tweak[1..ROUNDS] {
            let key = load(key);
            for block in &mut blocks {
                *block = _mm512_aesenc_epi128(*block, key);
            }
        }
        let key = load(&keys.tweak[ROUNDS]);
        for block in &mut blocks {
            *block = _mm512_aesenclast_epi128(*block, key);
        }
    }
    for (vector, block) in blocks.into_iter().enumerate().take(vectors) {
        // SAFETY: four tweaks are 64 bytes, and there are four for each vector.
        unsafe { _mm512_storeu_si512(tweaks.as_mut_ptr().add(4 * vector).cast(), block) };
    }
}

/// Processes one group, under the tweaks `powers`, which become the next group's if there is `MORE` of the sector: one
/// vector per round, because behind the rounds they would delay the next group.
///
/// # Safety
/// 64 bytes for each vector can be read at `from` and written at `to`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vaes,vpclmulqdq")]
unsafe fn group<const ENCRYPT: bool, const ROUNDS: usize, const V: usize, const MORE: bool>(
    data: &[RoundKey; ROUND_KEYS_MAX],
    from: *const u8,
    to: *mut u8,
    powers: &mut [__m512i; V],
) {
    // SAFETY: a round key has 64 bytes.
    let load = |key: &RoundKey| unsafe { _mm512_loadu_si512(key.as_ptr().cast()) };
    let first = load(&data[0]);
    let mut blocks = [first; V];
    for vector in 0..V {
        // SAFETY: the caller's word.
        let plain = unsafe { _mm512_loadu_si512(from.add(64 * vector).cast()) };
        blocks[vector] = _mm512_ternarylogic_epi64::<0x96>(plain, powers[vector], first);
    }
    let mut next = *powers;
    for round in 1..ROUNDS {
        let key = load(&data[round]);
        for block in &mut blocks {
            *block = if ENCRYPT { _mm512_aesenc_epi128(*block, key) } else { _mm512_aesdec_epi128(*block, key) };
        }
        if MORE && round <= V {
            next[round - 1] = advance::<V>(powers[round - 1]);
        }
    }
    let last = load(&data[ROUNDS]);
    for vector in 0..V {
        // XORs the tweak into the last key, so that the two additions at the end are one.
        let key = _mm512_xor_si512(last, powers[vector]);
        let sealed = if ENCRYPT {
            _mm512_aesenclast_epi128(blocks[vector], key)
        } else {
            _mm512_aesdeclast_epi128(blocks[vector], key)
        };
        // SAFETY: the caller's word.
        unsafe { _mm512_storeu_si512(to.add(64 * vector).cast(), sealed) };
    }
    *powers = next;
}
