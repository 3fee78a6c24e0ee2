//! Measurements of the checksum: contests for calibration, the list for `forebay perf accel`, and its self-test.

use super::tiers::{self, CLASSES, Class, Crc32cKernels, SLOTS, TierTable};
use super::{KERNEL, OnTier, portable};
use crate::perf::{Detail, Kernel, Variant};
use crate::processor::Processor;
use crate::shape::{Contest, Contestant, ShapeSlot};
use crate::tier::Tier;

/// Length of one turn of calibration in bytes, unless a message is longer.
const TURN: usize = 256 << 10;

/// Lists the loops of the tier in use, for calibration.
pub(crate) fn contests() -> Vec<Contest> {
    let tier = Tier::current();
    let contest = |(class, slot): (&'static Class, &'static ShapeSlot)| {
        let data: std::rc::Rc<[u8]> = (0..class.measured.max(TURN)).map(|at| at as u8).collect();
        let contestant = |(shape, name): (usize, &'static str)| {
            let (data, kernels) = (data.clone(), Crc32cKernels::with_shape(tier, shape));
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                // The first few messages over and over, which stay in the first-level cache if they fit.
                let some = data.chunks_exact(class.measured).take(4).cycle();
                let times = (TURN / class.measured).max(1);
                for message in some.take(times) {
                    std::hint::black_box(kernels.update(!0, std::hint::black_box(message)));
                }
                times * class.measured
            });
            Contestant { name, work }
        };
        Contest {
            kernel: KERNEL,
            class: class.name,
            contestants: OnTier::shapes(tier).enumerate().map(contestant).collect(),
            default: TierTable::of(tier).default(Processor::current()),
            slot,
        }
    };
    CLASSES.iter().zip(&SLOTS).map(contest).collect()
}

/// Lists checksums of several sizes, and copies, for `forebay perf accel`.
pub(crate) fn perf(detail: Detail) -> Vec<Kernel> {
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
    let mut kernels: Vec<Kernel> = sizes.iter().map(|&(name, len)| sum(name, len, detail)).collect();
    kernels.push(copied("copy 4 KiB", 4 << 10));
    kernels
}

/// Lists the checksums of messages of a length: one a tier, or one a loop where they are long enough for the loops to
/// differ.
fn sum(name: &str, len: usize, detail: Detail) -> Kernel {
    let variant = |name: String, kernels: Crc32cKernels| {
        let data = vec![0x5Au8; len];
        Variant::new(name, move || {
            std::hint::black_box(kernels.update(!0, std::hint::black_box(&data)));
            len
        })
    };
    let by_shape = |tier: Tier| detail == Detail::Shapes && len >= TierTable::of(tier).long_min;
    let mut variants = Vec::new();
    for tier in Tier::available() {
        if by_shape(tier) {
            let shapes = OnTier::shapes(tier).enumerate();
            variants
                .extend(shapes.map(|(at, shape)| variant(shaped(tier, shape), Crc32cKernels::with_shape(tier, at))));
        } else {
            variants.push(variant(tier.name().into(), Crc32cKernels::of(tier)));
        }
    }
    let tier = Tier::current();
    let chosen = if by_shape(tier) { shaped(tier, tiers::in_use(len)) } else { tier.name().into() };
    Kernel { name: format!("crc32c {name}"), chosen, variants }
}

/// Lists the copies of a length, which go the same way in all shapes.
fn copied(name: &str, len: usize) -> Kernel {
    let variant = |tier: Tier| {
        let (kernels, data, mut to) = (Crc32cKernels::of(tier), vec![0x5Au8; len], vec![0u8; len]);
        Variant::new(tier.name(), move || {
            std::hint::black_box(kernels.copy(!0, std::hint::black_box(&data), &mut to));
            len
        })
    };
    let variants = Tier::available().map(variant).collect();
    Kernel { name: format!("crc32c {name}"), chosen: Tier::current().name().into(), variants }
}

/// Returns the name of a variant that is one loop.
fn shaped(tier: Tier, shape: &str) -> String {
    format!("{tier}/{shape}")
}

/// Compares every loop of every tier of this processor with the tables, over lengths around the classes' limits and at
/// several alignments; returns how many loops agree.
///
/// # Errors
/// The name of a loop that does not agree, as `tier/shape`, and the length in bytes.
pub fn verify() -> Result<usize, String> {
    let tiers = Tier::available();
    let loops = tiers.flat_map(|tier| OnTier::shapes(tier).enumerate().map(move |(at, name)| (tier, at, name)));
    let loops = loops.map(|(tier, at, name)| {
        let kernels = Crc32cKernels::with_shape(tier, at);
        (shaped(tier, name), move |message: &[u8]| kernels.update(!0, message))
    });
    compare(loops)
}

/// Compares loops with the tables, see [`verify`].
fn compare(loops: impl Iterator<Item = (String, impl Fn(&[u8]) -> u32)>) -> Result<usize, String> {
    let data: Vec<u8> = (0..(1usize << 20) + 64).map(|at| (at.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
    let lengths = (0..4200).step_by(7).chain([12_287, 16_384, 65_536, 524_289, 1 << 20]);
    let messages = lengths.enumerate().map(|(number, len)| &data[number % 64..][..len]);
    let expected: Vec<(&[u8], u32)> = messages.map(|message| (message, portable::update(!0, message))).collect();
    let mut count = 0;
    for (name, update) in loops {
        if let Some((message, _)) = expected.iter().find(|(message, register)| update(message) != *register) {
            return Err(format!("{name} at {} bytes", message.len()));
        }
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loop_agrees_with_the_tables() {
        let loops: usize = Tier::available().map(|tier| OnTier::shapes(tier).count()).sum();
        assert_eq!(verify(), Ok(loops));
    }

    #[test]
    fn a_loop_that_is_wrong_is_named_with_the_length() {
        let right = |message: &[u8]| portable::update(!0, message);
        let wrong_from = |len: usize| {
            let update = move |message: &[u8]| right(message) ^ u32::from(message.len() >= len);
            compare([("right".to_owned(), usize::MAX), ("tier/wrong".to_owned(), len)].into_iter().map(
                move |(name, from)| {
                    (name, move |message: &[u8]| if message.len() >= from { update(message) } else { right(message) })
                },
            ))
        };
        assert_eq!(wrong_from(0), Err("tier/wrong at 0 bytes".into()));
        assert_eq!(wrong_from(4000), Err("tier/wrong at 4004 bytes".into()));
        assert_eq!(wrong_from(1 << 20), Err("tier/wrong at 1048576 bytes".into()));
        assert_eq!(wrong_from((1 << 20) + 1), Ok(2));
    }
}
