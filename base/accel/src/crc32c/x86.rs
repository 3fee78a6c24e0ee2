//! Folding on x86-64: PCLMULQDQ on 16 bytes, VPCLMULQDQ on 64.

use std::arch::x86_64::*;

use super::fold::Fold;
use super::polynomial::fold_key;
use crate::vector::x86::{Gfni, memory};

/// Vector of 16 bytes, sums of three by two instructions.
#[derive(Clone, Copy)]
pub(crate) struct FoldSse(__m128i);

/// Vector of 16 bytes, sums of three by VPTERNLOG.
#[derive(Clone, Copy)]
pub(crate) struct FoldAvx512(__m128i);

/// Vector of 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct FoldVpclmul(__m512i);

impl From<Gfni> for FoldVpclmul {
    #[inline(always)]
    fn from(vector: Gfni) -> Self {
        Self(vector.0)
    }
}

/// Defines the methods of integer registers, which all tiers share.
macro_rules! integer {
    () => {
        #[inline(always)]
        unsafe fn word(state: u64, word: u64) -> u64 {
            // SAFETY: the caller has the tier.
            unsafe { _mm_crc32_u64(state, word) }
        }

        #[inline(always)]
        unsafe fn half(state: u32, half: u32) -> u32 {
            // SAFETY: the caller has the tier.
            unsafe { _mm_crc32_u32(state, half) }
        }

        #[inline(always)]
        unsafe fn quarter(state: u32, quarter: u16) -> u32 {
            // SAFETY: the caller has the tier.
            unsafe { _mm_crc32_u16(state, quarter) }
        }

        #[inline(always)]
        unsafe fn byte(state: u32, byte: u8) -> u32 {
            // SAFETY: the caller has the tier.
            unsafe { _mm_crc32_u8(state, byte) }
        }

        #[inline(always)]
        unsafe fn product(a: u32, b: u32) -> u64 {
            // SAFETY: the caller has the tier.
            unsafe {
                let (a, b) = (_mm_cvtsi32_si128(a as i32), _mm_cvtsi32_si128(b as i32));
                _mm_cvtsi128_si64(_mm_clmulepi64_si128::<0>(a, b)) as u64
            }
        }
    };
}

/// Defines the methods that both vectors of 16 bytes share.
macro_rules! narrow {
    ($a:ident, $b:ident, $c:ident, $xor3:expr) => {
        const BYTES: usize = 16;
        const PARTIAL: bool = false;
        type Key = __m128i;

        integer!();

        #[inline(always)]
        unsafe fn key(key: (u32, u32)) -> Self::Key {
            // SAFETY: as for this method, and so for the others here: the caller has the tier.
            unsafe { _mm_set_epi64x(i64::from(key.1), i64::from(key.0)) }
        }

        memory!(_mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128);

        unsafe fn load_end(_: *const u8, _: usize, _: u32) -> Self {
            unreachable!("PARTIAL is false")
        }

        unsafe fn store_end(_: *const u8, _: *mut u8, _: usize) {
            unreachable!("PARTIAL is false")
        }

        #[inline(always)]
        unsafe fn add_state(self, state: u32) -> Self {
            // SAFETY: the caller has the tier.
            unsafe { Self(_mm_xor_si128(self.0, _mm_cvtsi32_si128(state as i32))) }
        }

        #[inline(always)]
        unsafe fn fold(self, key: Self::Key, next: Self) -> Self {
            // SAFETY: the caller has the tier.
            unsafe {
                let $a = _mm_clmulepi64_si128::<0x00>(self.0, key);
                let $b = _mm_clmulepi64_si128::<0x11>(self.0, key);
                let $c = next.0;
                Self($xor3)
            }
        }

        #[inline(always)]
        unsafe fn reduce(self) -> u32 {
            // SAFETY: the caller has the tier.
            unsafe {
                let first = _mm_crc32_u64(0, _mm_cvtsi128_si64(self.0) as u64);
                _mm_crc32_u64(first, _mm_extract_epi64::<1>(self.0) as u64) as u32
            }
        }
    };
}

// SAFETY: each method is the instructions it names, on 16 bytes.
unsafe impl Fold for FoldSse {
    narrow!(a, b, c, _mm_xor_si128(_mm_xor_si128(a, b), c));
}

// SAFETY: each method is the instructions it names, on 16 bytes.
unsafe impl Fold for FoldAvx512 {
    narrow!(a, b, c, _mm_ternarylogic_epi64::<0x96>(a, b, c));
}

/// Returns a mask of the last `count` of 64 bytes.
#[inline(always)]
fn last(count: usize) -> u64 {
    debug_assert!((1..64).contains(&count));
    u64::MAX << (64 - count)
}

// SAFETY: each method is the instructions it names, on 64 bytes.
unsafe impl Fold for FoldVpclmul {
    const BYTES: usize = 64;
    const PARTIAL: bool = true;
    type Key = __m512i;

    integer!();

    #[inline(always)]
    unsafe fn key(key: (u32, u32)) -> Self::Key {
        // SAFETY: as for this method, and so for the others here: the caller has the tier.
        unsafe { _mm512_broadcast_i32x4(_mm_set_epi64x(i64::from(key.1), i64::from(key.0))) }
    }

    memory!(_mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512);

    #[inline(always)]
    unsafe fn load_end(from: *const u8, count: usize, state: u32) -> Self {
        let mask = last(count);
        // SAFETY: only the bytes in the mask are read, and the caller promises those.
        unsafe {
            let bytes = _mm512_maskz_loadu_epi8(mask, from.wrapping_sub(64 - count).cast());
            let state = _mm512_castsi128_si512(_mm_cvtsi32_si128(state as i32));
            // The four bytes of the register go where the message begins.
            Self(_mm512_xor_si512(
                bytes,
                _mm512_maskz_expand_epi8(mask & 0xF_u64.wrapping_shl(64 - count as u32), state),
            ))
        }
    }

    #[inline(always)]
    unsafe fn store_end(from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: only the first `count` bytes are touched, and the caller promises those.
        unsafe {
            let mask = u64::MAX >> (64 - count);
            _mm512_mask_storeu_epi8(to.cast(), mask, _mm512_maskz_loadu_epi8(mask, from.cast()));
        }
    }

    #[inline(always)]
    unsafe fn add_state(self, state: u32) -> Self {
        // SAFETY: the caller has the tier; the upper lanes are zero by the instruction's definition.
        unsafe { Self(_mm512_xor_si512(self.0, _mm512_zextsi128_si512(_mm_cvtsi32_si128(state as i32)))) }
    }

    #[inline(always)]
    unsafe fn fold(self, key: Self::Key, next: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let low = _mm512_clmulepi64_epi128::<0x00>(self.0, key);
            let high = _mm512_clmulepi64_epi128::<0x11>(self.0, key);
            Self(_mm512_ternarylogic_epi64::<0x96>(low, high, next.0))
        }
    }

    #[inline(always)]
    unsafe fn reduce(self) -> u32 {
        /// Factors that move three lanes onto the fourth.
        const KEYS: [[u64; 2]; 4] = {
            let (a, b, c) = (fold_key(48), fold_key(32), fold_key(16));
            [[a.0 as u64, a.1 as u64], [b.0 as u64, b.1 as u64], [c.0 as u64, c.1 as u64], [0, 0]]
        };
        // SAFETY: the caller has the tier; the keys are 64 bytes.
        unsafe {
            let keys = _mm512_loadu_si512(KEYS.as_ptr().cast());
            let low = _mm512_clmulepi64_epi128::<0x00>(self.0, keys);
            let high = _mm512_clmulepi64_epi128::<0x11>(self.0, keys);
            let sum = _mm512_ternarylogic_epi64::<0x96>(low, high, _mm512_maskz_mov_epi64(0xC0, self.0));
            let half = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64::<1>(sum));
            let lane = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            FoldSse(lane).reduce()
        }
    }
}
