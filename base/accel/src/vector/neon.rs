//! Vectors of AArch64: 16 bytes, products by TBL.

use std::arch::aarch64::*;

use super::{Vector, nibble_table};

/// Register of 16 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Neon(uint8x16_t);

// SAFETY: each method is the instruction it names, on 16 bytes.
unsafe impl Vector for Neon {
    const BYTES: usize = 16;
    const TABLE_WORDS: usize = 4;
    type Loaded = (uint8x16_t, uint8x16_t);
    /// Low and high four bits of each byte.
    type Split = (uint8x16_t, uint8x16_t);

    fn table(coefficient: u8, words: &mut [u64]) {
        nibble_table(coefficient, words);
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as for this method, and so for the others here: the caller has the tier.
        unsafe { Self(vdupq_n_u8(0)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller promises the bytes.
        unsafe { Self(vld1q_u8(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller promises the bytes.
        unsafe { vst1q_u8(to, self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: as for `store`.  STNP would be only a hint, and processors gather whole lines by themselves.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn xor3(self, b: Self, c: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { self.xor(b).xor(c) }
    }

    #[inline(always)]
    unsafe fn xor(self, b: Self) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { Self(veorq_u8(self.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn loaded(table: *const u64) -> Self::Loaded {
        // SAFETY: the caller promises a table of four words.
        unsafe { (vld1q_u8(table.cast()), vld1q_u8(table.add(2).cast())) }
    }

    #[inline(always)]
    unsafe fn split(self) -> Self::Split {
        // SAFETY: the caller has the tier.
        unsafe { (vandq_u8(self.0, vdupq_n_u8(15)), vshrq_n_u8::<4>(self.0)) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, source: Self::Split, coefficient: &Self::Loaded) -> Self {
        // SAFETY: the caller has the tier.
        unsafe {
            let low = vqtbl1q_u8(coefficient.0, source.0);
            let high = vqtbl1q_u8(coefficient.1, source.1);
            Self(veorq_u8(veorq_u8(self.0, low), high))
        }
    }
}
