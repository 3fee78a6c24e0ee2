//! CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected, initial value and final xor all ones).
//!
//! Values are those of RFC 3720, `crc32c(b"123456789") == 0xE3069283`.  Stored and transmitted checksums are always
//! such values; the functions that continue one take and return values of the same kind.

pub(crate) mod fold;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod loops;
#[cfg(target_arch = "aarch64")]
mod neon;
mod perf;
mod polynomial;
mod portable;
mod tiers;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use crate::tier::Tier;
pub use perf::verify;
pub(crate) use perf::{contests, perf};
pub(crate) use tiers::Crc32cKernels;
use tiers::TierTable;

/// Name of this kernel among choices.
const KERNEL: &str = "crc32c";

/// Returns the CRC32C of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    extend(0, data)
}

/// Continues a CRC32C: `extend(crc32c(a), b) == crc32c(a ++ b)`.  The CRC32C of nothing is 0.
#[inline]
pub fn extend(crc: u32, data: &[u8]) -> u32 {
    !tiers::update(!crc, data)
}

/// Continues a CRC32C over `count` bytes of zero, in time that grows with the logarithm of `count`.
#[inline]
pub fn extend_zeroes(crc: u32, count: u64) -> u32 {
    !Crc32cKernels::current().shift(!crc, count)
}

/// Returns the CRC32C of `count` bytes of zero, in time that grows with the logarithm of `count`.
#[inline]
pub fn zeroes(count: u64) -> u32 {
    extend_zeroes(0, count)
}

/// Returns the CRC32C of `a ++ b` from the parts' own CRCs and the length of `b` in bytes.
#[inline]
pub fn combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    // The inversions before and after cancel: what is left of a's register is moved past b, and added.
    Crc32cKernels::current().shift(crc_a, len_b) ^ crc_b
}

/// Returns the CRC32C of many parts read as one.
pub fn crc32c_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    parts.into_iter().fold(0, extend)
}

/// Computes the CRC32C of each block of `block_len` bytes of `data`, in order; the last block may be shorter.
///
/// # Panics
/// `block_len` is zero, or `crcs` has not exactly one place for each block.
pub fn crc32c_blocks(data: &[u8], block_len: usize, crcs: &mut [u32]) {
    assert_eq!(crcs.len(), data.len().div_ceil(block_len), "there is a CRC for each block");
    let kernels = Crc32cKernels::current();
    for (crc, block) in crcs.iter_mut().zip(data.chunks(block_len)) {
        *crc = !kernels.update(!0, block);
    }
}

/// Copies `from` to `to` and returns the CRC32C of what was copied, in one pass over memory.
///
/// # Panics
/// The lengths differ.
#[inline]
pub fn copy(from: &[u8], to: &mut [u8]) -> u32 {
    copy_extend(0, from, to)
}

/// Continues a CRC32C as [`extend`] does, and copies as [`copy`] does.
///
/// # Panics
/// The lengths differ.
#[inline]
pub fn copy_extend(crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
    !Crc32cKernels::current().copy(!crc, from, to)
}

/// CRC32C on a certain tier, for tests and measurements.
#[derive(Clone, Copy)]
pub struct OnTier(Crc32cKernels);

impl OnTier {
    /// Selects the kernels of a tier; `None` where the processor lacks it.
    pub fn new(tier: Tier) -> Option<Self> {
        tier.is_available().then(|| Self(Crc32cKernels::of(tier)))
    }

    /// Selects the kernels of a tier with a certain loop over long messages; `None` where the processor lacks the tier,
    /// or the tier the loop.
    pub fn with_shape(tier: Tier, shape: &str) -> Option<Self> {
        let at = Self::shapes(tier).position(|name| name == shape)?;
        Some(Self(Crc32cKernels::with_shape(tier, at)))
    }

    /// Lists the loops over long messages that a tier has; none where the processor lacks the tier.
    pub fn shapes(tier: Tier) -> impl Iterator<Item = &'static str> {
        let shapes = if tier.is_available() { TierTable::of(tier).shapes } else { &[] };
        shapes.iter().map(|shape| shape.name)
    }

    /// Does the same as [`extend`], on this tier.
    #[inline]
    pub fn extend(&self, crc: u32, data: &[u8]) -> u32 {
        !self.0.update(!crc, data)
    }

    /// Does the same as [`extend_zeroes`], on this tier.
    #[inline]
    pub fn extend_zeroes(&self, crc: u32, count: u64) -> u32 {
        !self.0.shift(!crc, count)
    }

    /// Does the same as [`combine`], on this tier.
    #[inline]
    pub fn combine(&self, crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
        self.0.shift(crc_a, len_b) ^ crc_b
    }

    /// Does the same as [`copy_extend`], on this tier.
    ///
    /// # Panics
    /// The lengths differ.
    #[inline]
    pub fn copy_extend(&self, crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
        !self.0.copy(!crc, from, to)
    }
}
