//! Kernel of erasure coding: sums of products of k sources into m outputs, in one pass over the sources.
//!
//! Encoding, decoding and updating are all the same sum with other coefficients, so this is the only loop there is.
//! It is generic over the vector ([`Vector`]), the number of outputs `M` (their sums stay in registers) and the
//! vectors `N` that go through at once (a coefficient's table is loaded once for them, and neighbouring lines of a
//! chunk are fetched together, which matters when chunks share page alignment and so fight for the same cache sets),
//! and over what goes along with the products ([`SideWork`]): nothing, or a checksum of every chunk.

use super::checksummed::ChecksumKernel;
use crate::tier::{ByTier, Tier};
use crate::vector::{Vector, portable};

/// Maximum number of outputs of one pass; more take a second pass over the sources.
pub(crate) const OUTPUTS_MAX: usize = 8;

/// Parameters of one run of the kernel over contiguous bytes.
pub(crate) struct ErasureJob {
    /// `sources` pointers to `len` readable bytes each.
    pub inputs: *const *const u8,
    /// Number of sources.
    pub sources: usize,
    /// Pointers, as many as the pass has outputs, to `len` writable bytes each that overlap nothing else.
    pub outputs: *const *mut u8,
    /// Coefficient tables, all outputs of the first source first.
    pub tables: *const u64,
    /// Length of each source and output in bytes.
    pub len: usize,
    /// Addends of the sums: as many pointers as outputs, which may be the same, or null.
    pub addends: *const *mut u8,
    /// True to store whole vectors past the caches (non-temporal); then the outputs are aligned to 64 bytes, and the
    /// caller fences.
    pub stream: bool,
}

/// Work done along with the products.
pub(super) trait SideWork<V>: Copy {
    /// Takes the next `N` vectors of a chunk; sources come first, then outputs.
    ///
    /// # Safety
    /// The processor has the tier, and the chunk is one of the job's.
    unsafe fn pass<const N: usize>(self, chunk: usize, vectors: &[V; N]);
}

/// Products alone, without other work.
#[derive(Clone, Copy)]
pub(super) struct NoSideWork;

impl<V> SideWork<V> for NoSideWork {
    #[inline(always)]
    unsafe fn pass<const N: usize>(self, _: usize, _: &[V; N]) {}
}

/// Kernel for a tier and a number of outputs.
///
/// # Safety
/// The processor has the tier, and the job keeps the promises of [`ErasureJob`].
pub(crate) type Pass = unsafe fn(&ErasureJob);

/// Kernels of erasure coding on one tier.
pub(crate) struct ErasureKernels {
    select: fn(usize, bool, usize) -> Pass,
    widths: fn(usize) -> &'static [usize],
    tables: fn(&mut dyn Iterator<Item = u8>) -> Vec<u64>,
    /// Kernels with checksums; `None` in tiers that do not gain by them.
    fused: Option<fn(usize, bool, usize) -> ChecksumKernel>,
}

/// Kernels of all tiers.  A further tier is a row here, with the vector that its `tier!` names.
static KERNELS: ByTier<ErasureKernels> = ByTier::new(&[
    (
        Tier::Portable,
        ErasureKernels {
            select: |outputs, ones, _| plain::select(outputs, ones),
            widths: |_| &[1],
            tables: tables::<portable::Words>,
            fused: None,
        },
    ),
    #[cfg(target_arch = "x86_64")]
    (Tier::Sse, sse::KERNELS),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx2, avx2::KERNELS),
    #[cfg(target_arch = "x86_64")]
    (Tier::Avx512, avx512::KERNELS),
    #[cfg(target_arch = "x86_64")]
    (Tier::Gfni, ErasureKernels { fused: Some(super::checksummed::gfni::select), ..gfni::KERNELS }),
    #[cfg(target_arch = "aarch64")]
    (Tier::Neon, neon::KERNELS),
]);

impl ErasureKernels {
    /// Returns the kernels for a tier.
    pub(crate) fn of(tier: Tier) -> &'static ErasureKernels {
        KERNELS.of(tier)
    }

    /// Returns the kernel for `outputs` outputs on a tier that the processor has; `ones` says that every coefficient
    /// of the first output is 1, which makes its products plain sums.  It takes `vectors` vectors at a time, one of
    /// [`widths`](Self::widths).
    pub(crate) fn select(&self, outputs: usize, ones: bool, vectors: usize) -> Pass {
        (self.select)(outputs, ones, vectors)
    }

    /// Lists how many vectors a step may take with `outputs` outputs: the loop shapes, the default first, and one
    /// always.
    pub(crate) fn widths(&self, outputs: usize) -> &'static [usize] {
        (self.widths)(outputs)
    }

    /// Returns the tables of `coefficients` in the tier's own form.
    pub(crate) fn tables(&self, mut coefficients: impl Iterator<Item = u8>) -> Vec<u64> {
        (self.tables)(&mut coefficients)
    }

    /// Returns the kernel with checksums, if the tier gains by it; a wide one takes `vectors` vectors at a time, one of
    /// [`widths`](Self::widths).
    pub(super) fn fused(&self, outputs: usize, ones: bool, vectors: usize) -> Option<ChecksumKernel> {
        self.fused.map(|select| select(outputs, ones, vectors))
    }
}

/// Returns the tables of `coefficients` in the form of a vector.
fn tables<V: Vector>(coefficients: &mut dyn Iterator<Item = u8>) -> Vec<u64> {
    let mut words = Vec::new();
    for coefficient in coefficients {
        let at = words.len();
        words.resize(at + V::TABLE_WORDS, 0);
        V::table(coefficient, &mut words[at..]);
    }
    words
}

/// Defines the kernels of a tier: its vector, its features, and for each number of outputs how many vectors a step may
/// take, the default first.
macro_rules! tier {
    ($name:ident, $vector:ty, $feature:literal, [$($m:literal: [$($n:literal),*]),*]) => {
        mod $name {
            use super::{ErasureJob, ErasureKernels, Pass};

            pub(super) const KERNELS: ErasureKernels =
                ErasureKernels { select, widths, tables: super::tables::<$vector>, fused: None };

            /// # Safety
            /// See [`Pass`].
            #[target_feature(enable = $feature)]
            unsafe fn run<const M: usize, const ONES: bool, const N: usize>(job: &ErasureJob) {
                // SAFETY: passed on.
                unsafe { super::pass::<$vector, _, M, ONES, N>(job, super::NoSideWork) }
            }

            fn select(outputs: usize, ones: bool, vectors: usize) -> Pass {
                match (outputs, ones, vectors) {
                    $($(($m, false, $n) => run::<$m, false, $n>,)*)*
                    $($(($m, true, $n) => run::<$m, true, $n>,)*)*
                    _ => unreachable!("no pass has {outputs} outputs and {vectors} vectors a step"),
                }
            }

            fn widths(outputs: usize) -> &'static [usize] {
                match outputs {
                    $($m => &[$($n),*],)*
                    _ => unreachable!("a pass has 1 to {} outputs", super::OUTPUTS_MAX),
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
tier!(
    sse,
    crate::vector::x86::Sse,
    "ssse3,sse4.1",
    [1: [2, 1, 4], 2: [2, 1], 3: [2, 1], 4: [1, 2], 5: [1, 2], 6: [1, 2], 7: [1, 2], 8: [1, 2]]
);
#[cfg(target_arch = "x86_64")]
tier!(
    avx2,
    crate::vector::x86::Avx2,
    "avx2",
    [1: [2, 1, 4], 2: [2, 1], 3: [2, 1], 4: [2, 1], 5: [1, 2], 6: [1, 2], 7: [1, 2], 8: [1, 2]]
);
#[cfg(target_arch = "x86_64")]
tier!(
    avx512,
    crate::vector::x86::Avx512,
    "avx512f,avx512bw,avx512vl,avx512dq",
    [1: [2, 1, 4], 2: [2, 1, 4], 3: [2, 1, 4], 4: [2, 1, 4], 5: [2, 1], 6: [2, 1], 7: [2, 1], 8: [2, 1]]
);
#[cfg(target_arch = "x86_64")]
tier!(
    gfni,
    crate::vector::x86::Gfni,
    "gfni,avx512f,avx512bw,avx512vl,avx512dq",
    [1: [4, 2, 1], 2: [4, 2, 1], 3: [4, 2, 1], 4: [4, 2, 1], 5: [2, 1], 6: [2, 1], 7: [2, 1], 8: [2, 1]]
);
#[cfg(target_arch = "aarch64")]
tier!(
    neon,
    crate::vector::neon::Neon,
    "neon",
    [1: [4, 2, 1], 2: [4, 2, 1], 3: [4, 2, 1], 4: [2, 1, 4], 5: [2, 1], 6: [2, 1], 7: [2, 1], 8: [2, 1]]
);

mod plain {
    use super::{ErasureJob, Pass, portable};

    /// # Safety
    /// The job keeps its promises.
    unsafe fn run<const M: usize, const ONES: bool>(job: &ErasureJob) {
        // SAFETY: passed on; portable vectors need nothing of the processor.
        unsafe { super::pass::<portable::Words, _, M, ONES, 1>(job, super::NoSideWork) }
    }

    pub(super) fn select(outputs: usize, ones: bool) -> Pass {
        match (outputs, ones) {
            (1, false) => run::<1, false>,
            (2, false) => run::<2, false>,
            (3, false) => run::<3, false>,
            (4, false) => run::<4, false>,
            (5, false) => run::<5, false>,
            (6, false) => run::<6, false>,
            (7, false) => run::<7, false>,
            (8, false) => run::<8, false>,
            (1, true) => run::<1, true>,
            (2, true) => run::<2, true>,
            (3, true) => run::<3, true>,
            (4, true) => run::<4, true>,
            (5, true) => run::<5, true>,
            (6, true) => run::<6, true>,
            (7, true) => run::<7, true>,
            (8, true) => run::<8, true>,
            _ => unreachable!("a pass has 1 to {} outputs", super::OUTPUTS_MAX),
        }
    }
}

/// Processes a whole job: `N` vectors at a time, then one, then the remaining bytes.
///
/// # Safety
/// See [`Pass`]; what goes along is good for all chunks.
#[inline(always)]
pub(super) unsafe fn pass<V: Vector, A: SideWork<V>, const M: usize, const ONES: bool, const N: usize>(
    job: &ErasureJob,
    side_work: A,
) {
    #[cfg(test)]
    crate::shape::trace::note(format_args!("v{N}"));
    let mut at = 0;
    // SAFETY: every step stays within `len`, which the caller vouches for.
    unsafe {
        while at + N * V::BYTES <= job.len {
            step::<V, A, M, ONES, N>(job, at, V::BYTES, side_work);
            at += N * V::BYTES;
        }
        while at + V::BYTES <= job.len {
            step::<V, A, M, ONES, 1>(job, at, V::BYTES, side_work);
            at += V::BYTES;
        }
        if at < job.len {
            step::<V, A, M, ONES, 1>(job, at, job.len - at, side_work);
        }
    }
}

/// Takes `N` vectors from offset `at` of every source to the same of every output; with `N` = 1 perhaps only the first
/// `count` bytes of a vector.
///
/// # Safety
/// See [`Pass`]; the bytes lie within the job.
#[inline(always)]
unsafe fn step<V: Vector, A: SideWork<V>, const M: usize, const ONES: bool, const N: usize>(
    job: &ErasureJob,
    at: usize,
    count: usize,
    side_work: A,
) {
    let whole = N > 1 || count == V::BYTES;
    // SAFETY: the pointers are within the job's arrays, the bytes within its chunks.
    unsafe {
        let load = |from: *const u8, n: usize| {
            if whole { V::load(from.add(n * V::BYTES)) } else { V::load_partial(from, count) }
        };
        let mut sums = [[V::zero(); N]; M];
        if !job.addends.is_null() {
            for (i, sum) in sums.iter_mut().enumerate() {
                let addend = (*job.addends.add(i)).add(at);
                for (n, vector) in sum.iter_mut().enumerate() {
                    *vector = load(addend, n);
                }
            }
        }
        let mut table = job.tables;
        let mut source = 0;
        while source + 2 <= job.sources {
            let first = (*job.inputs.add(source)).add(at);
            let second = (*job.inputs.add(source + 1)).add(at);
            let mut a = [V::zero(); N];
            let mut b = [V::zero(); N];
            for n in 0..N {
                a[n] = load(first, n);
                b[n] = load(second, n);
            }
            side_work.pass(source, &a);
            side_work.pass(source + 1, &b);
            let (sa, sb) = (a.map(|vector| vector.split()), b.map(|vector| vector.split()));
            for i in 0..M {
                if ONES && i == 0 {
                    for n in 0..N {
                        sums[0][n] = sums[0][n].xor3(a[n], b[n]);
                    }
                    continue;
                }
                let c = V::loaded(table.add(i * V::TABLE_WORDS));
                let d = V::loaded(table.add((M + i) * V::TABLE_WORDS));
                for n in 0..N {
                    sums[i][n] = sums[i][n].multiply_add2(sa[n], &c, sb[n], &d);
                }
            }
            table = table.add(2 * M * V::TABLE_WORDS);
            source += 2;
        }
        if source < job.sources {
            let first = (*job.inputs.add(source)).add(at);
            let mut a = [V::zero(); N];
            for (n, vector) in a.iter_mut().enumerate() {
                *vector = load(first, n);
            }
            side_work.pass(source, &a);
            let sa = a.map(|vector| vector.split());
            for i in 0..M {
                if ONES && i == 0 {
                    for n in 0..N {
                        sums[0][n] = sums[0][n].xor(a[n]);
                    }
                    continue;
                }
                let c = V::loaded(table.add(i * V::TABLE_WORDS));
                for n in 0..N {
                    sums[i][n] = sums[i][n].multiply_add(sa[n], &c);
                }
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            let output = (*job.outputs.add(i)).add(at);
            for (n, vector) in sum.iter().enumerate() {
                if !whole {
                    vector.store_partial(output, count);
                } else if job.stream {
                    vector.stream(output.add(n * V::BYTES));
                } else {
                    vector.store(output.add(n * V::BYTES));
                }
            }
            side_work.pass(job.sources + i, sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stronger_tier_selects_no_weaker_kernel() {
        KERNELS.check();
        for tier in Tier::ALL {
            for lower in Tier::ALL.into_iter().filter(|lower| *lower <= tier) {
                let lost = ErasureKernels::of(lower).fused.is_some() && ErasureKernels::of(tier).fused.is_none();
                assert!(!lost, "{tier} has no kernels with checksums, and {lower} has them");
            }
        }
    }

    #[test]
    fn kernels_with_checksums_exist_for_every_shape() {
        for tier in Tier::available() {
            let kernels = ErasureKernels::of(tier);
            for outputs in 1..=OUTPUTS_MAX {
                for &vectors in kernels.widths(outputs) {
                    let fused = kernels.fused(outputs, false, vectors);
                    assert_eq!(fused.is_some(), kernels.fused.is_some(), "{tier} {outputs} {vectors}");
                }
            }
        }
    }
}
