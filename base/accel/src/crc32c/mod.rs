//! CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected, initial value and final xor all ones).
//!
//! The values are those of RFC 3720, `crc32c(b"123456789") == 0xE3069283`.  What is stored or sent is always such a
//! value; the functions that continue one take and give values of the same kind.

pub(crate) mod fold;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod loops;
#[cfg(target_arch = "aarch64")]
mod neon;
mod polynomial;
mod portable;
mod tiers;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use crate::perf::{Detail, Kernel, Variant};
use crate::processor::Processor;
use crate::shape::{Contest, Contestant};
use crate::tier::Tier;
pub(crate) use tiers::Kernels;
use tiers::{CLASSES, Table};

/// The name of this kernel among choices.
const KERNEL: &str = "crc32c";

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

    /// The kernels of a tier with a certain loop over long messages; `None` where the processor lacks the tier, or
    /// the tier the loop.
    pub fn with_shape(tier: Tier, shape: &str) -> Option<Self> {
        let at = Self::shapes(tier).position(|name| name == shape)?;
        Some(Self(Kernels::with_shape(tier, at)))
    }

    /// The loops over long messages that a tier has; none where the processor lacks the tier.
    pub fn shapes(tier: Tier) -> impl Iterator<Item = &'static str> {
        let shapes = if tier.is_available() { Table::of(tier).shapes } else { &[] };
        shapes.iter().map(|shape| shape.name)
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

/// Bytes of one turn of calibration, where a message is not longer.
const TURN: usize = 256 << 10;

/// The loops of the tier in use, for calibration.
pub(crate) fn contests() -> Vec<Contest> {
    let tier = Tier::current();
    let table = Table::of(tier);
    let contest = |(class, of): (usize, &'static tiers::Class)| {
        let data: std::rc::Rc<[u8]> = (0..of.measured.max(TURN)).map(|at| at as u8).collect();
        let contestant = |(shape, name): (usize, &'static str)| {
            let (data, kernels) = (data.clone(), Kernels::with_shape(tier, shape));
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                // The first few messages over and over, which stay in the first-level cache if they fit.
                let some = data.chunks_exact(of.measured).take(4).cycle();
                let times = (TURN / of.measured).max(1);
                for message in some.take(times) {
                    std::hint::black_box(kernels.update(!0, std::hint::black_box(message)));
                }
                times * of.measured
            });
            Contestant { name, work }
        };
        Contest {
            kernel: KERNEL,
            class: of.name,
            contestants: OnTier::shapes(tier).enumerate().map(contestant).collect(),
            default: table.default(class, Processor::current()),
            install: Box::new(move |shape| tiers::install(class, shape)),
        }
    };
    CLASSES.iter().enumerate().map(contest).collect()
}

/// For `forebay perf accel`.
pub(crate) fn perf(detail: Detail) -> Vec<Kernel> {
    let choices = crate::shape::choices();
    let chosen = |len: usize| {
        let class = CLASSES[tiers::class(len)].name;
        let choice = choices.iter().find(|choice| choice.kernel == KERNEL && choice.class == class);
        choice.map(|choice| choice.shape)
    };
    let kernel = |name: &str, long: Option<usize>, work: &dyn Fn(OnTier) -> Box<dyn FnMut() -> usize>| {
        let of_shape = |tier: Tier, shape: &str| format!("{tier}/{shape}");
        let mut variants = Vec::new();
        for tier in Tier::available() {
            // Short messages, and copies, go the same way in all shapes.
            let by_shape = long.is_some_and(|len| len >= Table::of(tier).long_min) && detail == Detail::Shapes;
            for (shape, name) in OnTier::shapes(tier).enumerate() {
                if by_shape {
                    variants.push(Variant::new(of_shape(tier, name), work(OnTier(Kernels::with_shape(tier, shape)))));
                } else if shape == 0 {
                    variants.push(Variant::new(tier.name(), work(OnTier(Kernels::of(tier)))));
                }
            }
        }
        let tier = Tier::current();
        let shaped = long.and_then(chosen).map(|shape| of_shape(tier, shape));
        let shaped = shaped.filter(|shaped| variants.iter().any(|variant| variant.name == *shaped));
        let chosen = shaped.unwrap_or_else(|| match variants.iter().find(|variant| variant.name == tier.name()) {
            Some(variant) => variant.name.clone(),
            None => of_shape(tier, OnTier::shapes(tier).next().unwrap_or_default()),
        });
        Kernel { name: format!("crc32c {name}"), chosen, variants }
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
    let sizes: &[(&str, usize)] = match detail {
        Detail::Tiers => &[("64 B", 64), ("4 KiB", 4 << 10), ("64 KiB", 64 << 10)],
        Detail::Shapes => &[
            ("64 B", 64),
            ("1 KiB", 1 << 10),
            ("2 KiB", 2 << 10),
            ("4 KiB", 4 << 10),
            ("8 KiB", 8 << 10),
            ("16 KiB", 16 << 10),
            ("64 KiB", 64 << 10),
            ("256 KiB", 256 << 10),
            ("1 MiB", 1 << 20),
        ],
    };
    let mut kernels: Vec<Kernel> = sizes.iter().map(|&(name, len)| kernel(name, Some(len), &sum(len))).collect();
    kernels.push(kernel("copy 4 KiB", None, &copied(4 << 10)));
    kernels
}

/// Compares every loop of every tier of this processor with the tables, over lengths around the classes' limits and at
/// several alignments; returns how many loops agree.
///
/// # Errors
/// The name of a loop that does not, as `tier/shape`, and the length.
pub fn verify() -> Result<usize, String> {
    let data: Vec<u8> = (0..(1usize << 20) + 64).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
    let mut loops = 0;
    for tier in Tier::available() {
        for (shape, name) in OnTier::shapes(tier).enumerate() {
            let kernels = Kernels::with_shape(tier, shape);
            let short = (0..4200).step_by(7);
            let long = [12_287, 16_384, 65_536, 524_289, 1 << 20];
            for (number, len) in short.chain(long).enumerate() {
                let message = &data[number % 64..][..len];
                if kernels.update(!0, message) != portable::update(!0, message) {
                    return Err(format!("{tier}/{name} at {len} bytes"));
                }
            }
            loops += 1;
        }
    }
    Ok(loops)
}
