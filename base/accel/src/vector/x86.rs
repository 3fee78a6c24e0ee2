//! Vectors of x86-64: byte shuffles on 16, 32 and 64 bytes, and the affine transformation of GFNI on 64.

use std::arch::x86_64::*;

use super::{Vector, nibble_table};
use crate::erasure::gf::multiply;

/// Register of 16 bytes, products by PSHUFB.
#[derive(Clone, Copy)]
pub(crate) struct Sse(__m128i);

/// Register of 32 bytes, products by VPSHUFB.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256i);

/// Register of 64 bytes, products by VPSHUFB, sums of three by VPTERNLOG.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512i);

/// Register of 64 bytes, products by VGF2P8AFFINEQB.
#[derive(Clone, Copy)]
pub(crate) struct Gfni(pub(crate) __m512i);

/// Defines loading and storing of registers, for products and for checksums alike.
macro_rules! memory {
    ($load:ident, $store:ident, $stream:ident) => {
        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: the caller promises the bytes.
            unsafe { Self($load(from.cast())) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: the caller promises the bytes.
            unsafe { $store(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            // SAFETY: the caller promises the bytes and the alignment, and fences.
            unsafe { $stream(to.cast(), self.0) }
        }
    };
}
pub(crate) use memory;

// SAFETY: each method is the instruction it names, on 16 bytes.
unsafe impl Vector for Sse {
    const BYTES: usize = 16;
    const TABLE_WORDS: usize = 4;
    type Loaded = (__m128i, __m128i);
    /// Low and high four bits of each byte.
    type Split = (__m128i, __m128i);

    fn table(coefficient: u8, words: &mut [u64]) {
        nibble_table(coefficient, words);
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as for this method, and so for the others here: the caller has the tier.
        unsafe { Self(_mm_setzero_si128()) }
    }

    memory!(_mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128);

    #[inline(always)]
    unsafe fn xor3(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { self.xor(b).xor(c) }
    }

    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { Self(_mm_xor_si128(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of four words.
        unsafe { (_mm_loadu_si128(table.cast()), _mm_loadu_si128(table.add(2).cast())) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the caller has the tier.
        unsafe {
            let mask = _mm_set1_epi8(15);
            (_mm_and_si128(self.0, mask), _mm_and_si128(_mm_srli_epi64(self.0, 4), mask))
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let low = _mm_shuffle_epi8(coefficient.0, source.0);
            let high = _mm_shuffle_epi8(coefficient.1, source.1);
            Self(_mm_xor_si128(_mm_xor_si128(self.0, low), high))
        }
    }
}

// SAFETY: each method is the instruction it names, on 32 bytes.
unsafe impl Vector for Avx2 {
    const BYTES: usize = 32;
    const TABLE_WORDS: usize = 4;
    type Loaded = (__m256i, __m256i);
    /// Low and high four bits of each byte.
    type Split = (__m256i, __m256i);

    fn table(coefficient: u8, words: &mut [u64]) {
        nibble_table(coefficient, words);
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as for this method, and so for the others here: the caller has the tier.
        unsafe { Self(_mm256_setzero_si256()) }
    }

    memory!(_mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256);

    #[inline(always)]
    unsafe fn xor3(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { self.xor(b).xor(c) }
    }

    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { Self(_mm256_xor_si256(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of four words.
        unsafe {
            (
                _mm256_broadcastsi128_si256(_mm_loadu_si128(table.cast())),
                _mm256_broadcastsi128_si256(_mm_loadu_si128(table.add(2).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the caller has the tier.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            (_mm256_and_si256(self.0, mask), _mm256_and_si256(_mm256_srli_epi64(self.0, 4), mask))
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let low = _mm256_shuffle_epi8(coefficient.0, source.0);
            let high = _mm256_shuffle_epi8(coefficient.1, source.1);
            Self(_mm256_xor_si256(_mm256_xor_si256(self.0, low), high))
        }
    }
}

/// Returns a mask of the first `count` of 64 bytes.
#[inline(always)]
fn first(count: usize) -> u64 {
    debug_assert!(count < 64);
    (1 << count) - 1
}

/// Defines the methods that both registers of 64 bytes share.
macro_rules! wide {
    () => {
        const BYTES: usize = 64;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: as for this method, and so for the others here: the caller has the tier.
            unsafe { Self(_mm512_setzero_si512()) }
        }

        memory!(_mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512);

        #[inline(always)]
        unsafe fn xor3(self, b: Self, c: Self) -> Self {
            // SAFETY: the caller has the tier.
            unsafe { Self(_mm512_ternarylogic_epi64::<0x96>(self.0, b.0, c.0)) }
        }

        #[inline(always)]
        unsafe fn xor(self, b: Self) -> Self {
            // SAFETY: the caller has the tier.
            unsafe { Self(_mm512_xor_si512(self.0, b.0)) }
        }

        #[inline(always)]
        unsafe fn load_partial(from: *const u8, count: usize) -> Self {
            // SAFETY: only the bytes in the mask are read, and the caller promises those.
            unsafe { Self(_mm512_maskz_loadu_epi8(first(count), from.cast())) }
        }

        #[inline(always)]
        unsafe fn store_partial(self, to: *mut u8, count: usize) {
            // SAFETY: only the bytes in the mask are written, and the caller promises those.
            unsafe { _mm512_mask_storeu_epi8(to.cast(), first(count), self.0) }
        }
    };
}

// SAFETY: each method is the instruction it names, on 64 bytes.
unsafe impl Vector for Avx512 {
    wide!();
    const TABLE_WORDS: usize = 4;
    type Loaded = (__m512i, __m512i);
    /// Low and high four bits of each byte.
    type Split = (__m512i, __m512i);

    fn table(coefficient: u8, words: &mut [u64]) {
        nibble_table(coefficient, words);
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of four words.
        unsafe {
            (
                _mm512_broadcast_i32x4(_mm_loadu_si128(table.cast())),
                _mm512_broadcast_i32x4(_mm_loadu_si128(table.add(2).cast())),
            )
        }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the caller has the tier.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            (_mm512_and_si512(self.0, mask), _mm512_and_si512(_mm512_srli_epi64::<4>(self.0), mask))
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let low = _mm512_shuffle_epi8(coefficient.0, source.0);
            let high = _mm512_shuffle_epi8(coefficient.1, source.1);
            Self(_mm512_ternarylogic_epi64::<0x96>(self.0, low, high))
        }
    }
}

// SAFETY: each method is the instruction it names, on 64 bytes.
unsafe impl Vector for Gfni {
    wide!();
    const TABLE_WORDS: usize = 1;
    type Loaded = __m512i;
    type Split = __m512i;

    /// Computes the matrix over GF(2) that multiplies by `coefficient`: byte `7 - i` of the word holds the row for bit
    /// `i`.
    ///
    /// GFNI's own multiplication reduces by 0x11b, another field; the affine transformation takes any matrix.
    fn table(coefficient: u8, words: &mut [u64]) {
        let mut matrix = 0u64;
        for column in 0..8 {
            let product = multiply(coefficient, 1 << column);
            for row in 0..8 {
                matrix |= u64::from(product >> row & 1) << (8 * (7 - row) + column);
            }
        }
        words[0] = matrix;
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of one word.
        unsafe { _mm512_set1_epi64(table.read() as i64) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        self.0
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { Self(_mm512_xor_si512(self.0, _mm512_gf2p8affine_epi64_epi8::<0>(source, *coefficient))) }
    }

    #[inline(always)]
    unsafe fn multiply_add2(self, a: Self::Split, c: &Self::Loaded, b: Self::Split, d: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let first = _mm512_gf2p8affine_epi64_epi8::<0>(a, *c);
            let second = _mm512_gf2p8affine_epi64_epi8::<0>(b, *d);
            Self(_mm512_ternarylogic_epi64::<0x96>(self.0, first, second))
        }
    }
}
