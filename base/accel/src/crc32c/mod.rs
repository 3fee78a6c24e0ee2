//! CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected, initial value and final xor all ones).
//!
//! The values are those of RFC 3720, `crc32c(b"123456789") == 0xE3069283`.  What is stored or sent is always such a
//! value; the functions that continue one take and give values of the same kind.

pub(crate) mod fold;
#[cfg(target_arch = "aarch64")]
mod neon;
mod polynomial;
mod portable;
mod tiers;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use crate::perf::{Kernel, Variant};
use crate::tier::Tier;
pub(crate) use tiers::Kernels;

/// The CRC32C of `data`.
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
    !Kernels::current().shift(!crc, count)
}

/// The CRC32C of `count` bytes of zero, in time that grows with the logarithm of `count`.
#[inline]
pub fn zeroes(count: u64) -> u32 {
    extend_zeroes(0, count)
}

/// The CRC32C of `a ++ b` from the parts' own CRCs and the length of `b` in bytes.
#[inline]
pub fn combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    // The inversions before and after cancel: what is left of a's register is moved past b, and added.
    Kernels::current().shift(crc_a, len_b) ^ crc_b
}

/// The CRC32C of many parts read as one.
pub fn crc32c_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    parts.into_iter().fold(0, extend)
}

/// The CRC32C of each block of `block_len` bytes of `data`, in order; the last block may be shorter.
///
/// # Panics
/// `block_len` is zero, or `crcs` has not exactly one place for each block.
pub fn crc32c_blocks(data: &[u8], block_len: usize, crcs: &mut [u32]) {
    assert_eq!(crcs.len(), data.len().div_ceil(block_len), "there is a CRC for each block");
    let kernels = Kernels::current();
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

/// [`copy`], continuing a CRC32C.
///
/// # Panics
/// The lengths differ.
#[inline]
pub fn copy_extend(crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
    !Kernels::current().copy(!crc, from, to)
}

/// CRC32C on a certain tier, for tests and measurements.
#[derive(Clone, Copy)]
pub struct OnTier(Kernels);

impl OnTier {
    /// The kernels of a tier; `None` where the processor lacks it.
    pub fn new(tier: Tier) -> Option<Self> {
        tier.is_available().then(|| Self(Kernels::of(tier)))
    }

    /// As [`extend`].
    #[inline]
    pub fn extend(&self, crc: u32, data: &[u8]) -> u32 {
        !self.0.update(!crc, data)
    }

    /// As [`extend_zeroes`].
    #[inline]
    pub fn extend_zeroes(&self, crc: u32, count: u64) -> u32 {
        !self.0.shift(!crc, count)
    }

    /// As [`combine`].
    #[inline]
    pub fn combine(&self, crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
        self.0.shift(crc_a, len_b) ^ crc_b
    }

    /// As [`copy_extend`].
    ///
    /// # Panics
    /// The lengths differ.
    #[inline]
    pub fn copy_extend(&self, crc: u32, from: &[u8], to: &mut [u8]) -> u32 {
        !self.0.copy(!crc, from, to)
    }
}

/// For `forebay perf accel`.
pub(crate) fn perf() -> Vec<Kernel> {
    let kernel = |name: &str, variant: &dyn Fn(OnTier) -> Box<dyn FnMut() -> usize>| Kernel {
        name: format!("crc32c {name}"),
        chosen: Tier::current().name().into(),
        variants: Tier::available()
            .filter_map(|tier| Some(Variant::new(tier.name(), variant(OnTier::new(tier)?))))
            .collect(),
    };
    let sum = |len: usize| {
        move |on: OnTier| -> Box<dyn FnMut() -> usize> {
            let data = vec![0x5Au8; len];
            Box::new(move || {
                std::hint::black_box(on.extend(0, std::hint::black_box(&data)));
                len
            })
        }
    };
    let copied = |len: usize| {
        move |on: OnTier| -> Box<dyn FnMut() -> usize> {
            let (data, mut to) = (vec![0x5Au8; len], vec![0u8; len]);
            Box::new(move || {
                std::hint::black_box(on.copy_extend(0, std::hint::black_box(&data), &mut to));
                len
            })
        }
    };
    vec![
        kernel("64 B", &sum(64)),
        kernel("4 KiB", &sum(4 << 10)),
        kernel("64 KiB", &sum(64 << 10)),
        kernel("copy 4 KiB", &copied(4 << 10)),
    ]
}
