//! Folding on AArch64: PMULL on 16 bytes, and the CRC32C instructions.

use std::arch::aarch64::*;

use super::fold::Fold;

/// Vector of 16 bytes.
#[derive(Clone, Copy)]
pub(crate) struct FoldNeon(uint64x2_t);

// SAFETY: each method is the instructions it names, on 16 bytes.
unsafe impl Fold for FoldNeon {
    const BYTES: usize = 16;
    const PARTIAL: bool = false;
    type Key = (u64, u64);

    #[inline(always)]
    unsafe fn key(key: (u32, u32)) -> Self::Key {
        (u64::from(key.0), u64::from(key.1))
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller promises the bytes.
        unsafe { Self(vreinterpretq_u64_u8(vld1q_u8(from))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller promises the bytes.
        unsafe { vst1q_u8(to, vreinterpretq_u8_u64(self.0)) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: as for `store`; processors gather whole lines by themselves.
        unsafe { self.store(to) }
    }

    unsafe fn load_end(_: *const u8, _: usize, _: u32) -> Self {
        unreachable!("PARTIAL is false")
    }

    unsafe fn store_end(_: *const u8, _: *mut u8, _: usize) {
        unreachable!("PARTIAL is false")
    }

    #[inline(always)]
    unsafe fn add_state(self, state: u32) -> Self {
        // SAFETY: the caller has the tier.
        unsafe { Self(veorq_u64(self.0, vsetq_lane_u64::<0>(u64::from(state), vdupq_n_u64(0)))) }
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn fold(self, key: Self::Key, next: Self) -> Self {
        let low = vreinterpretq_u64_p128(vmull_p64(vgetq_lane_u64::<0>(self.0), key.0));
        let high = vreinterpretq_u64_p128(vmull_p64(vgetq_lane_u64::<1>(self.0), key.1));
        Self(veorq_u64(veorq_u64(low, high), next.0))
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn reduce(self) -> u32 {
        __crc32cd(__crc32cd(0, vgetq_lane_u64::<0>(self.0)), vgetq_lane_u64::<1>(self.0))
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn word(state: u64, word: u64) -> u64 {
        u64::from(__crc32cd(state as u32, word))
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn half(state: u32, half: u32) -> u32 {
        __crc32cw(state, half)
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn quarter(state: u32, quarter: u16) -> u32 {
        __crc32ch(state, quarter)
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn byte(state: u32, byte: u8) -> u32 {
        __crc32cb(state, byte)
    }

    #[inline]
    #[target_feature(enable = "neon,crc,aes")]
    unsafe fn product(a: u32, b: u32) -> u64 {
        vmull_p64(u64::from(a), u64::from(b)) as u64
    }
}
