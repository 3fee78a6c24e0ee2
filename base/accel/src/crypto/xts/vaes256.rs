//! XTS with VAES on 256-bit vectors, for processors without AVX-512.
//!
//! The tweaks of a batch of sectors are encrypted together, and each is multiplied by x^0, x^1 and so on at once, as in
//! [`super::x86`] on wider vectors.

use std::arch::x86_64::*;

use super::keys::{ROUND_KEYS_MAX, RoundKey, Schedules};
use super::x86::{POLYNOMIAL, SECTOR_MIN};
use super::{Direction, Run, XtsShape};

/// Sectors whose tweaks are encrypted together.
const TWEAKS: usize = 16;

/// Runs a cipher over sectors.
///
/// # Safety
/// That of [`Keys::run`](super::Keys::run), and the processor has AVX2, AES, VAES and VPCLMULQDQ.
pub(super) unsafe fn run(keys: &Schedules, direction: Direction, run: Run, shape: XtsShape) {
    // SAFETY: the caller's word.
    unsafe {
        match (direction, keys.rounds, shape) {
            (Direction::Encrypt, 10, XtsShape::V8) => sectors::<true, 10, 8>(keys, run),
            (Direction::Encrypt, 10, XtsShape::V4) => sectors::<true, 10, 4>(keys, run),
            (Direction::Encrypt, _, XtsShape::V8) => sectors::<true, 14, 8>(keys, run),
            (Direction::Encrypt, _, XtsShape::V4) => sectors::<true, 14, 4>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V8) => sectors::<false, 10, 8>(keys, run),
            (Direction::Decrypt, 10, XtsShape::V4) => sectors::<false, 10, 4>(keys, run),
            (Direction::Decrypt, _, XtsShape::V8) => sectors::<false, 14, 8>(keys, run),
            (Direction::Decrypt, _, XtsShape::V4) => sectors::<false, 14, 4>(keys, run),
        }
    }
}

/// Returns a round key in both lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn load(key: &RoundKey) -> __m256i {
    // SAFETY: a round key has 64 bytes, aligned to as many.
    unsafe { _mm256_load_si256(key.as_ptr().cast()) }
}

/// Processes a run, `V` vectors at a time, two blocks in each.
///
/// # Safety
/// That of [`run`]; `ROUNDS` is the schedule's.
#[target_feature(enable = "avx2,vaes,vpclmulqdq,aes")]
unsafe fn sectors<const ENCRYPT: bool, const ROUNDS: usize, const V: usize>(keys: &Schedules, run: Run) {
    const { assert!(SECTOR_MIN.is_multiple_of(32 * V)) }
    #[cfg(test)]
    crate::shape::trace::note(format_args!("v{V}"));
    let group_bytes = 32 * V;
    let data = if ENCRYPT { &keys.encrypt } else { &keys.decrypt };
    let mut tweaks = [_mm_setzero_si128(); TWEAKS];
    let sectors = run.length / run.size;
    for batch in (0..sectors).step_by(TWEAKS) {
        let number = TWEAKS.min(sectors - batch);
        encrypt_tweaks::<ROUNDS>(keys, (run.first + batch as u64, run.high), number, &mut tweaks);
        for (index, &tweak) in tweaks[..number].iter().enumerate() {
            let sector_at = (batch + index) * run.size;
            let mut powers = powers::<V>(tweak);
            for at in (sector_at..sector_at + run.size).step_by(group_bytes) {
                // SAFETY: the group lies in the memory that the caller speaks for.
                unsafe { group::<ENCRYPT, ROUNDS, V>(data, run.from.add(at), run.to.add(at), &mut powers) };
            }
        }
    }
}

/// Returns the vectors in which the tweak is multiplied by x^0, x^1 and so on, two in each.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn powers<const V: usize>(tweak: __m128i) -> [__m256i; V] {
    let polynomial = _mm256_set1_epi64x(POLYNOMIAL);
    let tweak = _mm256_broadcastsi128_si256(tweak);
    let mut powers = [tweak; V];
    for (vector, power) in powers.iter_mut().enumerate() {
        let first = 2 * vector as i64;
        let left = _mm256_setr_epi64x(first, first, first + 1, first + 1);
        let right = _mm256_sub_epi64(_mm256_set1_epi64x(64), left);
        // Bits shifted out of the lower half enter the upper; those of the upper half are reduced into the lower.
        let out = _mm256_srlv_epi64(tweak, right);
        let reduced = _mm256_clmulepi64_epi128::<0x01>(out, polynomial);
        let carried = _mm256_bslli_epi128::<8>(out);
        *power = _mm256_xor_si256(_mm256_xor_si256(_mm256_sllv_epi64(tweak, left), carried), reduced);
    }
    powers
}

/// Multiplies by x^(2 V), what `V` vectors of blocks move the tweak by: a quarter as many bytes further, and what falls out
/// reduced.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn advance<const V: usize>(tweak: __m256i) -> __m256i {
    const { assert!(V == 4 || V == 8) }
    let (out, moved) = if V == 8 {
        (_mm256_bsrli_epi128::<14>(tweak), _mm256_bslli_epi128::<2>(tweak))
    } else {
        (_mm256_bsrli_epi128::<15>(tweak), _mm256_bslli_epi128::<1>(tweak))
    };
    let reduced = _mm256_clmulepi64_epi128::<0x00>(out, _mm256_set1_epi64x(POLYNOMIAL));
    _mm256_xor_si256(moved, reduced)
}

/// Encrypts the numbers of up to [`TWEAKS`] sectors, of which the first is given as its lower and upper half.
#[inline]
#[target_feature(enable = "avx2,vaes")]
fn encrypt_tweaks<const ROUNDS: usize>(
    keys: &Schedules,
    (first, high): (u64, u64),
    number: usize,
    tweaks: &mut [__m128i; TWEAKS],
) {
    let high = high as i64;
    let mut blocks = [_mm256_setzero_si256(); TWEAKS / 2];
    // Two for a few sectors; the whole batch together for many.
    let vectors = if number <= 2 { 1 } else { TWEAKS / 2 };
    for (vector, block) in blocks[..vectors].iter_mut().enumerate() {
        // Numbers past the last sector may wrap; they are never used.
        let at = first.wrapping_add(2 * vector as u64) as i64;
        *block = _mm256_xor_si256(_mm256_setr_epi64x(at, high, at.wrapping_add(1), high), load(&keys.tweak[0]));
    }
    if vectors == 1 {
        for key in &keys.tweak[1..ROUNDS] {
            blocks[0] = _mm256_aesenc_epi128(blocks[0], load(key));
        }
        blocks[0] = _mm256_aesenclast_epi128(blocks[0], load(&keys.tweak[ROUNDS]));
    } else {
        for key in &keys.tweak[1..ROUNDS] {
            let key = load(key);
            for block in &mut blocks {
                *block = _mm256_aesenc_epi128(*block, key);
            }
        }
        let key = load(&keys.tweak[ROUNDS]);
        for block in &mut blocks {
            *block = _mm256_aesenclast_epi128(*block, key);
        }
    }
    for (vector, block) in blocks[..vectors].iter().enumerate() {
        // SAFETY: two tweaks are 32 bytes, and there are two for each vector.
        unsafe { _mm256_storeu_si256(tweaks.as_mut_ptr().add(2 * vector).cast(), *block) };
    }
}

/// Processes one group, under the tweaks `powers`, which become the next group's.
///
/// # Safety
/// 32 bytes for each vector can be read at `from` and written at `to`.
#[inline]
#[target_feature(enable = "avx2,vaes,vpclmulqdq")]
unsafe fn group<const ENCRYPT: bool, const ROUNDS: usize, const V: usize>(
    data: &[RoundKey; ROUND_KEYS_MAX],
    from: *const u8,
    to: *mut u8,
    powers: &mut [__m256i; V],
) {
    let first = load(&data[0]);
    let mut blocks = [first; V];
    for vector in 0..V {
        // SAFETY: the caller's word.
        let plain = unsafe { _mm256_loadu_si256(from.add(32 * vector).cast()) };
        blocks[vector] = _mm256_xor_si256(plain, _mm256_xor_si256(powers[vector], first));
    }
    for key in &data[1..ROUNDS] {
        let key = load(key);
        for block in &mut blocks {
            *block = if ENCRYPT { _mm256_aesenc_epi128(*block, key) } else { _mm256_aesdec_epi128(*block, key) };
        }
    }
    let last = load(&data[ROUNDS]);
    for vector in 0..V {
        // XORs the tweak into the last key, so that the two additions at the end are one.
        let key = _mm256_xor_si256(last, powers[vector]);
        let sealed = if ENCRYPT {
            _mm256_aesenclast_epi128(blocks[vector], key)
        } else {
            _mm256_aesdeclast_epi128(blocks[vector], key)
        };
        // SAFETY: the caller's word.
        unsafe { _mm256_storeu_si256(to.add(32 * vector).cast(), sealed) };
        powers[vector] = advance::<V>(powers[vector]);
    }
}
