//! Kernels of each tier, and the selection of the one in use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::fold::{self, ChecksumSink};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::loops;
use super::{polynomial, portable};
use crate::processor::{Processor, Vendor};
use crate::shape::{self, ShapeSlot};
use crate::tier::{ByTier, Tier};

/// Kernels of CRC32C on one tier.  Registers are raw: neither the initial value nor the final inversion is applied.
#[derive(Clone, Copy)]
pub(crate) struct Crc32cKernels {
    /// Returns the register after some bytes.  Safe to call: the struct is only made where the processor has the tier.
    update: Update,
    copy: unsafe fn(u32, *const u8, usize, ChecksumSink) -> u32,
    shift: unsafe fn(u32, u64) -> u32,
}

type Update = unsafe fn(u32, *const u8, usize) -> u32;

/// Loop over long messages.
#[derive(Clone, Copy)]
pub(super) struct Crc32cShape {
    pub(super) name: &'static str,
    /// Returns the register after at least [`TierTable::long_min`] bytes.
    long: Update,
    /// Returns the register after any number of bytes.
    update: Update,
}

/// Kernels of a tier.
pub(super) struct TierTable {
    /// Loop shapes; the first one is the default for unknown processors.
    pub(super) shapes: &'static [Crc32cShape],
    /// Length in bytes below which a message takes the path common to all shapes.
    pub(super) long_min: usize,
    /// Returns the register after any number of bytes, by the loops in use.
    front: Update,
    copy: unsafe fn(u32, *const u8, usize, ChecksumSink) -> u32,
    shift: unsafe fn(u32, u64) -> u32,
}

/// Class of message lengths, which share a loop.
pub(super) struct Class {
    pub(super) name: &'static str,
    /// Length from which on messages belong to the next class.
    end: usize,
    /// Length that calibration measures.
    pub(super) measured: usize,
}

/// Classes, in the order of lengths.  Blocks of 4 KiB, the most frequent length, are within one of them.  There is none
/// for what comes from beyond a core's own caches: what is fastest there changes with what neighbours do.
pub(super) static CLASSES: [Class; 3] = [
    Class { name: "to 3 KiB", end: 3 << 10, measured: 2 << 10 },
    Class { name: "3 KiB to 12 KiB", end: 12 << 10, measured: 4 << 10 },
    Class { name: "from 12 KiB", end: usize::MAX, measured: 64 << 10 },
];

/// Loop in use for each class on the tier in use: an index in [`TierTable::shapes`].  Apart from the classes, whose
/// limits are constants to a compiler that way.
pub(super) static SLOTS: [ShapeSlot; CLASSES.len()] = [const { ShapeSlot::new() }; CLASSES.len()];

/// Returns the class of a length.
#[inline(always)]
fn class(len: usize) -> usize {
    usize::from(len >= CLASSES[0].end) + usize::from(len >= CLASSES[1].end)
}

/// Returns the register after a long message, by the loop in use for its length.
///
/// # Safety
/// The processor has the tier of the loops, and the bytes, at least its `long_min`, are readable.
#[inline(always)]
unsafe fn update_long(shapes: &'static [Crc32cShape], state: u32, from: *const u8, len: usize) -> u32 {
    // Both calls are tail calls, so that the caller needs no registers saved, also for short messages.
    match shapes.get(SLOTS[class(len)].peek()) {
        // SAFETY: passed on.
        Some(shape) => unsafe { (shape.long)(state, from, len) },
        // SAFETY: passed on.
        None => unsafe { update_first(shapes, state, from, len) },
    }
}

/// Does what [`update_long`] does, for a class whose slot is unset, and sets it.
///
/// # Safety
/// That of [`update_long`].
#[cold]
#[inline(never)]
unsafe fn update_first(shapes: &'static [Crc32cShape], state: u32, from: *const u8, len: usize) -> u32 {
    let shape = shape_in_use(shapes, len);
    // SAFETY: passed on.
    unsafe { (shape.long)(state, from, len) }
}

/// Returns the loop in use for a length, of the loops of the tier in use.
fn shape_in_use(shapes: &'static [Crc32cShape], len: usize) -> &'static Crc32cShape {
    let initial = || {
        let names: Vec<&str> = shapes.iter().map(|shape| shape.name).collect();
        shape::initial(super::KERNEL, &names, default(shapes, Processor::current()))
    };
    &shapes[SLOTS[class(len)].get(initial)]
}

/// Returns the name of the loop in use for a length.
pub(super) fn in_use(len: usize) -> &'static str {
    shape_in_use(TierTable::of(Tier::current()).shapes, len).name
}

/// Returns the default among loops on a processor.
fn default(shapes: &[Crc32cShape], processor: &Processor) -> usize {
    let name = known(processor);
    name.and_then(|name| shapes.iter().position(|shape| shape.name == name)).unwrap_or(0)
}

/// Returns the best loop known for a vendor's processors; a name that a tier lacks is ignored.
fn known(processor: &Processor) -> Option<&'static str> {
    match processor.vendor {
        // Not measured.  A 512-bit product and a CRC32 instruction begin in each cycle, so eight vectors take sixteen
        // cycles, in which sixteen words can pass beside them, in one piece: a piece's register takes the port of the
        // products on its way to a vector.
        Vendor::Intel => Some("v8p1w16"),
        _ => None,
    }
}

/// Function of the tier in use for any number of bytes, and before the first call [`find`]; a call of few bytes is over
/// before a look whether it has been found would be.
static UPDATE: AtomicPtr<()> = AtomicPtr::new(find as Update as *mut ());

/// Finds the function of the tier in use, stores it, and calls it.
///
/// # Safety
/// The bytes are readable.
unsafe fn find(state: u32, from: *const u8, len: usize) -> u32 {
    let update = Crc32cKernels::current().update;
    UPDATE.store(update as *mut (), Ordering::Relaxed);
    // SAFETY: passed on.
    unsafe { update(state, from, len) }
}

/// Returns the register after `data`, on the tier in use.
#[inline]
pub(super) fn update(state: u32, data: &[u8]) -> u32 {
    // SAFETY: nothing but functions of this type is ever stored there, each for a tier that the processor has; code
    // does not change, so no order is needed.  The bytes are a slice.
    unsafe {
        let update = std::mem::transmute::<*mut (), Update>(UPDATE.load(Ordering::Relaxed));
        update(state, data.as_ptr(), data.len())
    }
}

/// Tables of all tiers.
static TABLES: ByTier<&TierTable> = ByTier::new(&[
    (Tier::Portable, &plain::TABLE),
    #[cfg(target_arch = "x86_64")]
    (Tier::Sse, &sse::TABLE),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx2, &avx2::TABLE),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx512, &avx512::TABLE),
    #[cfg(target_arch = "x86_64")]
    (Tier::Gfni, &gfni::TABLE),
    #[cfg(target_arch = "aarch64")]
    (Tier::Neon, &neon::TABLE),
]);

impl TierTable {
    /// Returns the table of a tier that the processor has.
    pub(super) fn of(tier: Tier) -> &'static TierTable {
        assert!(tier.is_available(), "the processor lacks the tier {tier}");
        TABLES.of(tier)
    }

    /// Returns the loop that is the default on a processor.
    pub(super) fn default(&self, processor: &Processor) -> usize {
        default(self.shapes, processor)
    }
}

impl Crc32cKernels {
    /// Returns the kernels of the tier in use, with the loops in use.
    #[inline]
    pub(crate) fn current() -> &'static Crc32cKernels {
        static CURRENT: OnceLock<Crc32cKernels> = OnceLock::new();
        CURRENT.get_or_init(|| {
            let table = TierTable::of(Tier::current());
            Crc32cKernels { update: table.front, copy: table.copy, shift: table.shift }
        })
    }

    /// Returns the kernels of a tier that the processor has: with the loops in use on the tier in use, with the first
    /// loop on another one.
    pub(crate) fn of(tier: Tier) -> Crc32cKernels {
        if tier == Tier::current() { *Self::current() } else { Self::with_shape(tier, 0) }
    }

    /// Returns the kernels of a tier that the processor has, with one loop for all lengths.
    pub(crate) fn with_shape(tier: Tier, shape: usize) -> Crc32cKernels {
        let table = TierTable::of(tier);
        Crc32cKernels { update: table.shapes[shape].update, copy: table.copy, shift: table.shift }
    }

    /// Returns the register after `data`.
    #[inline]
    pub(crate) fn update(&self, state: u32, data: &[u8]) -> u32 {
        // SAFETY: the processor has the tier, see `of`; the bytes are a slice.
        unsafe { (self.update)(state, data.as_ptr(), data.len()) }
    }

    /// Returns the register after `len` bytes from `from`.
    ///
    /// # Safety
    /// The bytes are readable.
    #[inline]
    pub(crate) unsafe fn update_raw(&self, state: u32, from: *const u8, len: usize) -> u32 {
        // SAFETY: the processor has the tier, see `of`; the caller vouches for the bytes.
        unsafe { (self.update)(state, from, len) }
    }

    /// Returns the register after `bytes` bytes of zero.
    #[inline]
    pub(crate) fn shift(&self, state: u32, bytes: u64) -> u32 {
        // SAFETY: the processor has the tier, see `of`.
        unsafe { (self.shift)(state, bytes) }
    }

    /// Copies `from` to `to`, of the same length, and returns the register after them.
    #[inline]
    pub(crate) fn copy(&self, state: u32, from: &[u8], to: &mut [u8]) -> u32 {
        assert_eq!(from.len(), to.len(), "a copy needs as much room as there are bytes");
        if from.len() < STREAMED_MIN {
            // SAFETY: the processor has the tier, see `of`; the slices have one length, and one is exclusive.
            return unsafe { (self.copy)(state, from.as_ptr(), from.len(), ChecksumSink::Copy(to.as_mut_ptr())) };
        }
        // Stores past the caches begin at a line and end with whole lines: the kernel takes odd bytes off the front.
        let head = to.as_ptr().align_offset(64).min(from.len());
        let body = (from.len() - head) / 64 * 64;
        let tail = head + body;
        // SAFETY: as above; the three ranges make up the slices, and the middle of `to` is aligned.
        unsafe {
            let start = to.as_mut_ptr();
            let state = (self.copy)(state, from.as_ptr(), head, ChecksumSink::Copy(start));
            let state = (self.copy)(state, from.as_ptr().add(head), body, ChecksumSink::Stream(start.add(head)));
            crate::vector::fence();
            (self.copy)(state, from.as_ptr().add(tail), from.len() - tail, ChecksumSink::Copy(start.add(tail)))
        }
    }
}

/// Length in bytes from which on copies bypass the caches, which they would evict.
const STREAMED_MIN: usize = 2 << 20;

/// Defines the kernels of a tier: its vector, its features, from which length on messages are long, and its loops, of
/// which none needs more than that length.
macro_rules! tier {
    ($name:ident, $fold:ty, $feature:literal, $min:literal, $($shape:ident: $loop:ident<$($n:literal),*>;)*) => {
        mod $name {
            use super::{ChecksumSink, Crc32cShape, TierTable, fold, loops, update_long};

            pub(super) static TABLE: TierTable = TierTable {
                shapes: &[$(Crc32cShape { name: stringify!($shape), long: $shape::long, update: $shape::update }),*],
                long_min: $min,
                front,
                copy,
                shift,
            };

            $(mod $shape {
                use super::{fold, loops};

                /// Returns the register after a long message.  Not inlined, so that a short one does not pay for saving
                /// the registers that a long one needs.
                ///
                /// # Safety
                /// The processor has the features, and the bytes, at least `long_min`, are readable.
                #[inline(never)]
                #[target_feature(enable = $feature)]
                pub(super) unsafe fn long(state: u32, from: *const u8, len: usize) -> u32 {
                    #[cfg(test)]
                    crate::shape::trace::note(stringify!($shape));
                    // SAFETY: passed on.
                    unsafe { loops::$loop::<$fold, $($n),*>(state, from, len) }
                }

                /// # Safety
                /// The processor has the features, and the bytes are readable.
                #[target_feature(enable = $feature)]
                pub(super) unsafe fn update(state: u32, from: *const u8, len: usize) -> u32 {
                    // SAFETY: passed on.
                    unsafe { if len >= $min { long(state, from, len) } else { fold::short::<$fold, 4>(state, from, len) } }
                }
            })*

            /// # Safety
            /// The processor has the features, and the bytes are readable.
            #[target_feature(enable = $feature)]
            unsafe fn front(state: u32, from: *const u8, len: usize) -> u32 {
                if len >= $min {
                    // SAFETY: passed on.
                    unsafe { update_long(TABLE.shapes, state, from, len) }
                } else {
                    // SAFETY: passed on.
                    unsafe { fold::short::<$fold, 4>(state, from, len) }
                }
            }

            /// # Safety
            /// The processor has the features; the bytes are readable, and writable at the sink.
            #[target_feature(enable = $feature)]
            unsafe fn copy(state: u32, from: *const u8, len: usize, sink: ChecksumSink) -> u32 {
                // SAFETY: passed on.  Each kind of sink gets a loop of its own.
                unsafe {
                    match sink {
                        ChecksumSink::None => fold::copy::<$fold, 4>(state, from, len, ChecksumSink::None),
                        ChecksumSink::Copy(to) => fold::copy::<$fold, 4>(state, from, len, ChecksumSink::Copy(to)),
                        ChecksumSink::Stream(to) => fold::copy::<$fold, 4>(state, from, len, ChecksumSink::Stream(to)),
                    }
                }
            }

            /// # Safety
            /// The processor has the features.
            #[target_feature(enable = $feature)]
            unsafe fn shift(state: u32, bytes: u64) -> u32 {
                // SAFETY: passed on.
                unsafe { fold::shift::<$fold>(state, bytes) }
            }
        }
    };
}

/// Defines the kernels of a tier of vectors of 16 bytes.
macro_rules! narrow {
    ($name:ident, $fold:ty, $feature:literal) => {
        tier!(
            $name, $fold, $feature, 384,
            v4p2w4: rounds<4, 2, 4>;
            v4p1w4: rounds<4, 1, 4>;
            v4p2w8: rounds<4, 2, 8>;
            v8p2w8: rounds<8, 2, 8>;
            v4: wide<4>;
            v8: wide<8>;
            crc3: streams<>;
            v4s3w2: split<4, 2, 146, 36, 16>;
        );
    };
}

#[cfg(target_arch = "x86_64")]
narrow!(sse, crate::crc32c::x86::FoldSse, "sse4.2,pclmulqdq");
#[cfg(target_arch = "x86_64")]
narrow!(avx2, crate::crc32c::x86::FoldSse, "avx2,sse4.2,pclmulqdq,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
narrow!(avx512, crate::crc32c::x86::FoldAvx512, "avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq,bmi1,bmi2");
#[cfg(target_arch = "x86_64")]
tier!(
    gfni,
    crate::crc32c::x86::FoldVpclmul,
    "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq,bmi1,bmi2",
    1152,
    v4p2w8: rounds<4, 2, 8>;
    v4p1w8: rounds<4, 1, 8>;
    v8p1w16: rounds<8, 1, 16>;
    v8p2w16: rounds<8, 2, 16>;
    v4: wide<4>;
    v8: wide<8>;
    v12: wide<12>;
    crc3: streams<>;
    v4s3w2: split<4, 2, 53, 13, 6>;
    v8s3w4: split<8, 4, 26, 6, 3>;
);
#[cfg(target_arch = "aarch64")]
narrow!(neon, crate::crc32c::neon::FoldNeon, "neon,crc,aes");

mod plain {
    use super::{ChecksumSink, Crc32cShape, TierTable, polynomial, portable};

    pub(super) static TABLE: TierTable = TierTable {
        shapes: &[Crc32cShape { name: "tables", long: update, update }],
        long_min: 0,
        front: update,
        copy,
        shift: polynomial::shift,
    };

    /// # Safety
    /// The bytes are readable.
    unsafe fn update(state: u32, from: *const u8, len: usize) -> u32 {
        // SAFETY: passed on.
        portable::update(state, unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// # Safety
    /// The bytes are readable, and writable at the sink.
    unsafe fn copy(mut state: u32, from: *const u8, len: usize, sink: ChecksumSink) -> u32 {
        let (ChecksumSink::Copy(to) | ChecksumSink::Stream(to)) = sink else {
            // SAFETY: passed on.
            return unsafe { update(state, from, len) };
        };
        // In pieces that stay in the first-level cache between the two.
        for at in (0..len).step_by(4096) {
            let count = (len - at).min(4096);
            // SAFETY: the piece lies within the range.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(at), to.add(at), count);
                state = update(state, from.add(at), count);
            }
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::trace;

    /// Lengths of each class that are long on every tier.
    const LENGTHS: [&[usize]; 3] = [&[1152, 2048, 3071], &[3072, 4096, 12_287], &[12_288, 65_536]];

    #[test]
    fn an_installed_loop_is_the_one_that_runs_for_its_class_alone() {
        let _slots = trace::lock_slots();
        let data = vec![0x5A; 65_536];
        let ran = |len: usize| trace::ran(|| assert_eq!(update(!0, &data[..len]), portable::update(!0, &data[..len])));
        // `tables` is the only loop of the portable tier, and has no contest.
        for (at, contest) in crate::crc32c::contests().iter().enumerate().filter(|(_, one)| one.contestants.len() > 1) {
            let others: Vec<Vec<String>> = LENGTHS.iter().map(|lengths| ran(lengths[0])).collect();
            for shape in contest.names() {
                contest.install(shape);
                for &len in LENGTHS[at] {
                    assert_eq!(ran(len), [shape], "{} {len}", contest.class);
                    assert_eq!(in_use(len), shape);
                    let mut crcs = [0];
                    let blocks = trace::ran(|| crate::crc32c::crc32c_blocks(&data[..len], len, &mut crcs));
                    assert_eq!(blocks, [shape], "{} {len}, by blocks", contest.class);
                }
                for other in (0..LENGTHS.len()).filter(|&other| other != at) {
                    assert_eq!(ran(LENGTHS[other][0]), others[other], "{}", contest.class);
                }
            }
            contest.install(contest.names()[contest.default]);
        }
    }

    #[test]
    fn a_stronger_tier_selects_no_weaker_kernel() {
        TABLES.check();
    }

    #[test]
    fn an_unset_class_runs_the_default_of_the_processor() {
        let processor = |vendor| Processor { vendor, family: 6, model: 143, name: String::new() };
        for tier in Tier::available() {
            let table = TierTable::of(tier);
            assert_eq!(table.default(&processor(Vendor::Amd)), 0, "{tier}");
            assert_eq!(table.default(&processor(Vendor::Other)), 0, "{tier}");
            let intel = table.shapes[table.default(&processor(Vendor::Intel))].name;
            assert_eq!(intel, if tier >= Tier::Gfni { "v8p1w16" } else { table.shapes[0].name }, "{tier}");
        }
    }

    #[test]
    fn a_loop_on_a_certain_tier_is_the_one_that_runs() {
        let data = vec![0x5A; 4096];
        for tier in Tier::available().filter(|&tier| tier != Tier::Portable) {
            for (at, shape) in TierTable::of(tier).shapes.iter().enumerate() {
                let kernels = Crc32cKernels::with_shape(tier, at);
                assert_eq!(trace::ran(|| _ = kernels.update(!0, &data)), [shape.name], "{tier}");
            }
        }
    }
}
