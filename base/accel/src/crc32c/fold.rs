//! CRC32C by carry-less multiplication and the CRC32 instruction combined, generic over every tier that has both.
//!
//! A message is a polynomial, and its CRC the remainder modulo P.  A vector of message is *folded* onto one further on:
//! its halves are multiplied by constants congruent to the distance, so that the sum is congruent to both.  Several
//! vectors are folded side by side, because a product takes several cycles.  The loops over long messages are in
//! [`super::loops`]; here are what they are made of, short messages, and copies.
//!
//! Folding is from Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009).

#[cfg(target_arch = "x86_64")]
use super::polynomial::UNSCALE;
use super::polynomial::{SHIFT_KEYS, fold_key};

/// Vector of message, and the processor's instructions to fold it.
///
/// # Safety
/// An implementation reads and writes exactly the bytes its methods name.  Every method may be called only on a
/// processor with the tier's features; pointers need no alignment except where a method says so.
pub(crate) unsafe trait Fold: Copy {
    /// Length of a vector in bytes.
    const BYTES: usize;
    /// True if [`Fold::load_end`] and [`Fold::store_end`] exist.
    const PARTIAL: bool;
    /// Two factors of a distance, ready for use.
    type Key: Copy;

    /// Makes the factors for the first and the second half of each lane.
    unsafe fn key(key: (u32, u32)) -> Self::Key;
    /// Loads `BYTES` bytes from `from`.
    unsafe fn load(from: *const u8) -> Self;
    /// Stores `BYTES` bytes to `to`.
    unsafe fn store(self, to: *mut u8);
    /// Stores `BYTES` bytes to `to`, past the caches where the processor can; `to` is aligned to `BYTES`.
    unsafe fn stream(self, to: *mut u8);
    /// Loads `count` bytes (4 to `BYTES` - 1) from `from` to the end of a vector that begins with zeroes, the register
    /// `state` added to the first four of them.
    unsafe fn load_end(from: *const u8, count: usize, state: u32) -> Self;
    /// Copies the same bytes to `to`.
    unsafe fn store_end(from: *const u8, to: *mut u8, count: usize);
    /// Adds the register to the first four bytes.
    unsafe fn add_state(self, state: u32) -> Self;
    /// Returns `self` moved by the key's distance, plus `next`.
    unsafe fn fold(self, key: Self::Key, next: Self) -> Self;
    /// Returns the register after the vector as a message of its own, from an initial register of zero.
    unsafe fn reduce(self) -> u32;

    /// Runs the CRC32 instruction on eight bytes; the register is in the low half of its word.
    unsafe fn word(state: u64, word: u64) -> u64;
    /// Runs the CRC32 instruction on four bytes.
    unsafe fn half(state: u32, half: u32) -> u32;
    /// Runs the CRC32 instruction on two bytes.
    unsafe fn quarter(state: u32, quarter: u16) -> u32;
    /// Runs the CRC32 instruction on one byte.
    unsafe fn byte(state: u32, byte: u8) -> u32;
    /// Returns the carry-less product of two registers.
    unsafe fn product(a: u32, b: u32) -> u64;
}

/// Destination of bytes that are checksummed.
#[derive(Clone, Copy)]
pub(crate) enum ChecksumSink {
    /// No copy is made.
    None,
    /// Place that they are copied to.
    Copy(*mut u8),
    /// Place that they are copied to past the caches, aligned to 64 bytes.
    Stream(*mut u8),
}

/// Returns the register after a few bytes from `from`, or any number of them.
///
/// # Safety
/// The processor has the tier, and the bytes are readable.
#[inline(always)]
pub(crate) unsafe fn short<F: Fold, const A: usize>(state: u32, from: *const u8, len: usize) -> u32 {
    // SAFETY: passed on.
    unsafe {
        if len <= F::BYTES {
            words::<F>(state, from, len)
        } else {
            vectors::<F, A>(state, from, len, ChecksumSink::None).reduce()
        }
    }
}

/// Copies `len` bytes from `from`, and returns the register after them.
///
/// # Safety
/// The processor has the tier; the bytes are readable, and writable at the sink, which does not overlap them.
#[inline(always)]
pub(crate) unsafe fn copy<F: Fold, const A: usize>(state: u32, from: *const u8, len: usize, sink: ChecksumSink) -> u32 {
    // SAFETY: passed on.
    unsafe {
        if len >= F::BYTES {
            return vectors::<F, A>(state, from, len, sink).reduce();
        }
        if let ChecksumSink::Copy(to) | ChecksumSink::Stream(to) = sink {
            std::ptr::copy_nonoverlapping(from, to, len);
        }
        words::<F>(state, from, len)
    }
}

/// Returns the register after fewer bytes than a vector has, or any number, by the CRC32 instruction alone.
///
/// # Safety
/// See [`short`].
#[inline(always)]
pub(crate) unsafe fn words<F: Fold>(mut state: u32, mut from: *const u8, mut len: usize) -> u32 {
    // SAFETY: reads stay within `len`.
    unsafe {
        // A compiler's own unrolling costs a message of two words as much as the words.
        while len >= 32 {
            state = chain::<F, 4>(state, from);
            from = from.add(32);
            len -= 32;
        }
        if len & 16 != 0 {
            state = chain::<F, 2>(state, from);
            from = from.add(16);
        }
        if len & 8 != 0 {
            state = chain::<F, 1>(state, from);
            from = from.add(8);
        }
        if len & 4 != 0 {
            state = F::half(state, from.cast::<u32>().read_unaligned());
            from = from.add(4);
        }
        if len & 2 != 0 {
            state = F::quarter(state, from.cast::<u16>().read_unaligned());
            from = from.add(2);
        }
        if len & 1 != 0 {
            state = F::byte(state, from.read());
        }
    }
    state
}

/// Returns the register after `W` words.
///
/// # Safety
/// See [`short`]; the words are readable.
#[inline(always)]
pub(super) unsafe fn chain<F: Fold, const W: usize>(state: u32, at: *const u8) -> u32 {
    let mut register = u64::from(state);
    for word in 0..W {
        // SAFETY: the word lies within the piece.
        register = unsafe { F::word(register, at.add(word * 8).cast::<u64>().read_unaligned()) };
    }
    register as u32
}

/// Folds all of `len` (at least a vector) into one vector that is congruent to the whole message.
///
/// # Safety
/// See [`copy`].
#[inline(always)]
pub(super) unsafe fn vectors<F: Fold, const A: usize>(
    state: u32,
    from: *const u8,
    len: usize,
    sink: ChecksumSink,
) -> F {
    let short = 2 * A * F::BYTES;
    // SAFETY: reads and writes stay within `len`.
    unsafe {
        if len < short {
            let (mut sum, mut at, mut left) = first::<F>(state, from, len, sink);
            let key = F::key(const { fold_key(F::BYTES as u64) });
            while left > 0 {
                let next = F::load(at);
                put(next, at.offset_from_unsigned(from), sink);
                sum = sum.fold(key, next);
                at = at.add(F::BYTES);
                left -= F::BYTES;
            }
            return sum;
        }
        let (mut sums, mut at, end) = begin::<F, A>(state, from, len, sink);
        let key = F::key(const { fold_key((A * F::BYTES) as u64) });
        while at < end {
            for (a, sum) in sums.iter_mut().enumerate() {
                let next = F::load(at.add(a * F::BYTES));
                put(next, at.offset_from_unsigned(from) + a * F::BYTES, sink);
                *sum = sum.fold(key, next);
            }
            at = at.add(A * F::BYTES);
        }
        gather(sums)
    }
}

/// Folds the first vector of a message, and enough more to leave a multiple of vectors; returns the rest and its length
/// as well.
///
/// # Safety
/// See [`copy`]; `len` is at least a vector.
#[inline(always)]
unsafe fn first<F: Fold>(
    mut state: u32,
    mut from: *const u8,
    mut len: usize,
    sink: ChecksumSink,
) -> (F, *const u8, usize) {
    let start = from;
    let odd = len % F::BYTES;
    // SAFETY: reads and writes stay within `len`.
    unsafe {
        if F::PARTIAL && odd >= 4 {
            let vector = F::load_end(from, odd, state);
            if let ChecksumSink::Copy(to) | ChecksumSink::Stream(to) = sink {
                F::store_end(from, to, odd);
            }
            return (vector, from.add(odd), len - odd);
        }
        if odd > 0 {
            state = words::<F>(state, from, odd);
            if let ChecksumSink::Copy(to) | ChecksumSink::Stream(to) = sink {
                std::ptr::copy_nonoverlapping(from, to, odd);
            }
            from = from.add(odd);
            len -= odd;
        }
        let vector = F::load(from);
        put(vector, from.offset_from_unsigned(start), sink);
        (vector.add_state(state), from.add(F::BYTES), len - F::BYTES)
    }
}

/// Folds the first `A` vectors of a message, and enough more to leave a multiple of `A`; returns the rest and its end
/// as well.
///
/// # Safety
/// See [`copy`]; `len` is at least `A` vectors.
#[inline(always)]
unsafe fn begin<F: Fold, const A: usize>(
    state: u32,
    from: *const u8,
    len: usize,
    sink: ChecksumSink,
) -> ([F; A], *const u8, *const u8) {
    // SAFETY: reads and writes stay within `len`.
    unsafe {
        let (mut sum, mut at, left) = first::<F>(state, from, len, sink);
        let end = at.add(left);
        let mut odd = (left / F::BYTES + 1) % A;
        let key = F::key(const { fold_key(F::BYTES as u64) });
        while odd > 0 {
            let next = F::load(at);
            put(next, at.offset_from_unsigned(from), sink);
            sum = sum.fold(key, next);
            at = at.add(F::BYTES);
            odd -= 1;
        }
        let mut sums = [sum; A];
        for sum in sums.iter_mut().skip(1) {
            *sum = F::load(at);
            put(*sum, at.offset_from_unsigned(from), sink);
            at = at.add(F::BYTES);
        }
        (sums, at, end)
    }
}

/// Folds vectors that follow each other into the last of them, in pairs, so that products overlap.
///
/// # Safety
/// The processor has the tier.
#[inline(always)]
pub(super) unsafe fn gather<F: Fold, const N: usize>(sums: [F; N]) -> F {
    const { assert!(N == 1 || N == 2 || N.is_multiple_of(4)) }
    // SAFETY: passed on.
    unsafe {
        let four = F::key(const { fold_key(4 * F::BYTES as u64) });
        if N == 1 {
            return sums[0];
        }
        if N == 2 {
            return sums[0].fold(F::key(const { fold_key(F::BYTES as u64) }), sums[1]);
        }
        let mut sum = quad(&sums, 0);
        let mut at = 4;
        while at < N {
            sum = sum.fold(four, quad(&sums, at));
            at += 4;
        }
        sum
    }
}

/// Folds four vectors from `at` on into the last of them.  Not a closure, which would not have the tier's features.
///
/// # Safety
/// The processor has the tier.
#[inline(always)]
unsafe fn quad<F: Fold, const N: usize>(sums: &[F; N], at: usize) -> F {
    // SAFETY: passed on.
    unsafe {
        let one = F::key(const { fold_key(F::BYTES as u64) });
        let two = F::key(const { fold_key(2 * F::BYTES as u64) });
        sums[at].fold(one, sums[at + 1]).fold(two, sums[at + 2].fold(one, sums[at + 3]))
    }
}

/// Stores a vector at an offset of the sink.
///
/// # Safety
/// There is room.
#[inline(always)]
unsafe fn put<F: Fold>(vector: F, at: usize, sink: ChecksumSink) {
    // SAFETY: passed on.
    unsafe {
        match sink {
            ChecksumSink::None => {}
            ChecksumSink::Copy(to) => vector.store(to.add(at)),
            ChecksumSink::Stream(to) => vector.stream(to.add(at)),
        }
    }
}

/// Returns the register `state` after `bytes` more bytes of zero.
///
/// # Safety
/// The processor has the tier.
#[inline(always)]
pub(crate) unsafe fn shift<F: Fold>(state: u32, mut bytes: u64) -> u32 {
    let mut result = state;
    while bytes != 0 {
        // SAFETY: passed on.
        result = unsafe { F::word(0, F::product(result, SHIFT_KEYS[bytes.trailing_zeros() as usize])) as u32 };
        bytes &= bytes - 1;
    }
    result
}

/// Returns the keys that move a vector by one vector, by two, by three and by four.
///
/// # Safety
/// The processor has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn fold_keys<F: Fold>() -> [F::Key; 4] {
    // SAFETY: passed on.
    unsafe {
        [
            F::key(const { fold_key(F::BYTES as u64) }),
            F::key(const { fold_key(2 * F::BYTES as u64) }),
            F::key(const { fold_key(3 * F::BYTES as u64) }),
            F::key(const { fold_key(4 * F::BYTES as u64) }),
        ]
    }
}

/// Returns a vector that is congruent to a message after which the register is `state`.
///
/// # Safety
/// The processor has the tier.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn after<F: Fold>(state: u32) -> F {
    const { assert!(F::BYTES <= 64) };
    let mut bytes = [0u8; 64];
    // SAFETY: the array has room for a vector.
    unsafe {
        bytes[F::BYTES - 8..F::BYTES].copy_from_slice(&F::product(state, UNSCALE).to_le_bytes());
        F::load(bytes.as_ptr())
    }
}
