//! Loops over long messages.  The fastest depends on how many carry-less products and CRC32 instructions a processor
//! begins in a cycle, the latency of each, and whether they share a unit; so there are several, and a choice
//! ([`crate::shape`]).
//!
//! | shape | loop |
//! |---|---|
//! | `v8` | 8 vectors folded side by side |
//! | `v4p2w8` | rounds of 4 vectors with 2 pieces of 8 words among them, see below |
//! | `v4s3w2` | 4 vectors, and 3 streams of CRC32 instructions of 2 words each, in regions of their own |
//! | `crc3` | 3 streams of CRC32 instructions, no vectors |
//!
//! **Rounds** deal a message out to the multiplier and to the CRC32 instruction, which works on units that would
//! otherwise idle:
//!
//! ```text
//! | front | piece vector vector piece vector vector | piece vector vector piece vector vector | ...
//! ```
//!
//! Vectors are folded over a whole round, pieces and all.  A piece is run through the CRC32 instruction from a register
//! of zero, and its register added to the vector behind it, which is what a register means: a message in front comes
//! to the same as its register added to the next four bytes.  So there is nothing to combine at the end, and memory is
//! read strictly forwards, which prefetchers reward.
//!
//! **Streams** run three registers over neighbouring regions, since the instruction takes three cycles and one can
//! begin in each; the first two registers are then moved over what follows them by a product.  This is from Gopal et
//! al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction" (Intel, 2011).  Regions end after at most
//! 16 KiB, so that no more than four lines of reading are open at once and all of them close together.

use super::fold::{ChecksumSink, Fold, chain, gather, vectors, words};
use super::polynomial::{fold_key, shift_key};

/// Returns the register after `len` bytes, `A` vectors at a time.
///
/// # Safety
/// The processor has the tier, and the bytes, at least a vector, are readable.
#[inline(always)]
pub(super) unsafe fn wide<F: Fold, const A: usize>(state: u32, from: *const u8, len: usize) -> u32 {
    // SAFETY: passed on.
    unsafe {
        if A > 4 && len < 2 * A * F::BYTES {
            return vectors::<F, 4>(state, from, len, ChecksumSink::None).reduce();
        }
        vectors::<F, A>(state, from, len, ChecksumSink::None).reduce()
    }
}

/// Returns the register after `len` bytes, at least a round: `A` vectors and `P` pieces of `W` words.
///
/// # Safety
/// The processor has the tier, and the bytes are readable.
#[inline(always)]
pub(super) unsafe fn rounds<F: Fold, const A: usize, const P: usize, const W: usize>(
    mut state: u32,
    from: *const u8,
    len: usize,
) -> u32 {
    const { assert!(P == 1 || P == 2) }
    let group = A / P;
    let piece = W * 8;
    let round = A * F::BYTES + P * piece;
    debug_assert!(len >= round);
    let front = len % round;
    // SAFETY: the front and whole rounds make up `len`.
    unsafe {
        let mut at = from.add(front);
        let end = from.add(len);
        let mut folded = None;
        if front >= F::BYTES {
            folded = Some(vectors::<F, 4>(state, from, front, ChecksumSink::None));
            state = 0;
        } else {
            state = words::<F>(state, from, front);
        }
        let mut sums = [F::load(at); A];
        for (a, sum) in sums.iter_mut().enumerate() {
            let mut register = 0;
            if a % group == 0 {
                register = chain::<F, W>(if a == 0 { state } else { 0 }, at);
                at = at.add(piece);
            }
            *sum = F::load(at).add_state(register);
            at = at.add(F::BYTES);
        }
        let over_piece = F::key(const { fold_key((F::BYTES + W * 8) as u64) });
        if let Some(folded) = folded {
            sums[0] = folded.fold(over_piece, sums[0]);
        }
        let key = F::key(const { fold_key((A * F::BYTES + P * W * 8) as u64) });
        while at < end {
            for (a, sum) in sums.iter_mut().enumerate() {
                if a % group == 0 {
                    let register = chain::<F, W>(0, at);
                    at = at.add(piece);
                    *sum = sum.fold(key, F::load(at).add_state(register));
                } else {
                    *sum = sum.fold(key, F::load(at));
                }
                at = at.add(F::BYTES);
            }
        }
        if P == 1 {
            return gather(sums).reduce();
        }
        // Folds neighbours of a group first; its last vector then moves over the other group, which begins with a
        // piece.
        let over_group = F::key(const { fold_key((A / P * F::BYTES + W * 8) as u64) });
        halves::<F, A>(sums, over_group).reduce()
    }
}

/// Folds the first half of the vectors into its last one, the second likewise, and the first over the second.
///
/// # Safety
/// The processor has the tier.
#[inline(always)]
unsafe fn halves<F: Fold, const A: usize>(sums: [F; A], over_half: F::Key) -> F {
    const { assert!(A == 4 || A == 8) }
    // SAFETY: passed on.
    unsafe {
        if A == 4 {
            gather([sums[0], sums[1]]).fold(over_half, gather([sums[2], sums[3]]))
        } else {
            let first = gather([sums[0], sums[1], sums[2], sums[3]]);
            first.fold(over_half, gather([sums[A - 4], sums[A - 3], sums[A - 2], sums[A - 1]]))
        }
    }
}

/// Returns the register after `len` bytes: three streams of CRC32 instructions.
///
/// # Safety
/// The processor has the tier, and the bytes are readable.
#[inline(always)]
pub(super) unsafe fn streams<F: Fold>(state: u32, from: *const u8, len: usize) -> u32 {
    let (mut state, mut from, mut len) = (state, from, len);
    // SAFETY: whole blocks and the rest make up `len`.
    unsafe {
        // A block of the first kind is 12 KiB; the second is as much of 4 KiB as three regions can share.
        (state, from, len) = three::<F, 512>(state, from, len);
        (state, from, len) = three::<F, 168>(state, from, len);
        (state, from, len) = three::<F, 40>(state, from, len);
        (state, from, len) = three::<F, 8>(state, from, len);
        words::<F>(state, from, len)
    }
}

/// Processes all complete blocks of three regions of `W` words; returns the register, and the rest.
///
/// # Safety
/// See [`streams`].
#[inline(always)]
unsafe fn three<F: Fold, const W: usize>(
    mut state: u32,
    mut from: *const u8,
    mut len: usize,
) -> (u32, *const u8, usize) {
    const STEP: usize = 4;
    const { assert!(W.is_multiple_of(STEP)) }
    let region = W * 8;
    // SAFETY: a block lies within `len`.
    unsafe {
        while len >= 3 * region {
            let mut registers = [u64::from(state), 0, 0];
            for word in (0..W).step_by(STEP) {
                step::<F, STEP>(&mut registers, from.add(word * 8), region);
            }
            let moved = F::product(registers[0] as u32, const { shift_key(2 * W as u64 * 8) })
                ^ F::product(registers[1] as u32, const { shift_key(W as u64 * 8) });
            state = (F::word(0, moved) ^ registers[2]) as u32;
            from = from.add(3 * region);
            len -= 3 * region;
        }
    }
    (state, from, len)
}

/// Runs the registers of three regions over `K` words each.
///
/// # Safety
/// The processor has the tier, and the words are readable.
#[inline(always)]
unsafe fn step<F: Fold, const K: usize>(registers: &mut [u64; 3], at: *const u8, region: usize) {
    for word in 0..K {
        for (stream, register) in registers.iter_mut().enumerate() {
            // SAFETY: passed on.
            *register =
                unsafe { F::word(*register, at.add(stream * region + word * 8).cast::<u64>().read_unaligned()) };
        }
    }
}

/// Returns the register after `len` bytes, at least a vector: `A` vectors beside three streams of `K` words, in blocks
/// of at most 16 KiB.  `L`, `M` and `S` are the steps of a long, a middle and a short block.
///
/// # Safety
/// The processor has the tier, and the bytes are readable.
#[inline(always)]
pub(super) unsafe fn split<F: Fold, const A: usize, const K: usize, const L: usize, const M: usize, const S: usize>(
    state: u32,
    from: *const u8,
    len: usize,
) -> u32 {
    let (mut state, mut from, mut len) = (state, from, len);
    // SAFETY: whole blocks and the rest make up `len`.
    unsafe {
        (state, from, len) = regions::<F, A, K, L>(state, from, len);
        (state, from, len) = regions::<F, A, K, M>(state, from, len);
        (state, from, len) = regions::<F, A, K, S>(state, from, len);
        if len < F::BYTES {
            words::<F>(state, from, len)
        } else {
            vectors::<F, 4>(state, from, len, ChecksumSink::None).reduce()
        }
    }
}

/// Processes all complete blocks of a region for vectors and three for streams, `N` steps each; returns the register,
/// and the rest.
///
/// # Safety
/// See [`split`].
#[inline(always)]
unsafe fn regions<F: Fold, const A: usize, const K: usize, const N: usize>(
    mut state: u32,
    mut from: *const u8,
    mut len: usize,
) -> (u32, *const u8, usize) {
    let (step_bytes, region) = (A * F::BYTES, N * K * 8);
    let block = N * step_bytes + 3 * region;
    // SAFETY: a block lies within `len`.
    unsafe {
        let key = F::key(const { fold_key((A * F::BYTES) as u64) });
        while len >= block {
            let (mut at, mut words_at) = (from, from.add(N * step_bytes));
            let end = words_at;
            let mut registers = [0; 3];
            let mut sums = [F::load(at); A];
            for (a, sum) in sums.iter_mut().enumerate().skip(1) {
                *sum = F::load(at.add(a * F::BYTES));
            }
            sums[0] = sums[0].add_state(state);
            step::<F, K>(&mut registers, words_at, region);
            at = at.add(step_bytes);
            while at < end {
                words_at = words_at.add(K * 8);
                for (a, sum) in sums.iter_mut().enumerate() {
                    *sum = sum.fold(key, F::load(at.add(a * F::BYTES)));
                }
                step::<F, K>(&mut registers, words_at, region);
                at = at.add(step_bytes);
            }
            let moved = F::product(gather(sums).reduce(), const { shift_key(3 * (N * K * 8) as u64) })
                ^ F::product(registers[0] as u32, const { shift_key(2 * (N * K * 8) as u64) })
                ^ F::product(registers[1] as u32, const { shift_key((N * K * 8) as u64) });
            state = (F::word(0, moved) ^ registers[2]) as u32;
            from = from.add(block);
            len -= block;
        }
    }
    (state, from, len)
}
