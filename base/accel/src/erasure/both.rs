//! The kernel of [`super::pass`] with checksums: every vector is multiplied and folded while it is in a register.
//!
//! Products of GF(2^8) and carry-less products are made by different units, and a stripe's checksums are `k + m`
//! independent sums; so one loop keeps both busy, where two loops would take turns.  What stays of a chunk from one
//! step to the next is a single vector that is congruent to all of the chunk before it (see `crc32c::fold`): `N`
//! vectors of a step are folded onto the last of them, each with the key of its own distance, which takes no more
//! products than folding them onto the next step's, and a load and a store for all `N`.  Parity is folded before it
//! is stored, so it may go past the caches.

use super::pass::Job;
use crate::crc32c::fold::{Fold, after, fold_keys};
use crate::tier::Tier;
use crate::vector::Vector;

/// The kernel for some tier and number of outputs.  The second argument are the sums, of as many bytes as a vector
/// for each source and then each output, aligned to a line.
///
/// # Safety
/// As for [`super::pass::Pass`]; the sums are there, the length is a multiple of [`VECTOR`], and nothing is to be
/// added to what the outputs hold.
type Pass = unsafe fn(&Job, *mut Sum);

/// Bytes of a vector in the tier that has such kernels.
pub(super) const VECTOR: usize = 64;

/// What stays of a chunk's checksum between steps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Sum([u8; VECTOR]);

impl Sum {
    /// Of nothing, from a register of zero.
    pub(super) const EMPTY: Self = Self([0; VECTOR]);
}

/// A kernel, and what turns checksums into sums and back.
#[derive(Clone, Copy)]
pub(super) struct Both {
    pub(super) wide: Pass,
    pub(super) narrow: Pass,
    /// The sum of a chunk of which the register is known.
    begin: unsafe fn(u32) -> Sum,
    /// The register of a chunk of which the sum is known.
    end: unsafe fn(&Sum) -> u32,
}

impl Both {
    /// The sum of a chunk whose register is `state`.
    pub(super) fn begin(&self, state: u32) -> Sum {
        // SAFETY: there is a `Both` only where the processor has the tier, see `select`.
        unsafe { (self.begin)(state) }
    }

    /// The register of a chunk whose sum is `sum`.
    pub(super) fn end(&self, sum: &Sum) -> u32 {
        // SAFETY: as above.
        unsafe { (self.end)(sum) }
    }
}

/// The kernel for `outputs` outputs on a tier that the processor has, if it is one of those that gain by it.
pub(super) fn select(tier: Tier, outputs: usize, ones: bool) -> Option<Both> {
    match tier {
        #[cfg(target_arch = "x86_64")]
        Tier::Gfni => Some(gfni::select(outputs, ones)),
        _ => None,
    }
}

#[cfg(target_arch = "x86_64")]
mod gfni {
    use super::{Both, Job, Sum};
    use crate::crc32c::x86::Vpclmul;
    use crate::vector::x86::Gfni;

    /// # Safety
    /// See [`super::Pass`].
    #[target_feature(enable = "gfni,vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn run<const M: usize, const ONES: bool, const N: usize>(job: &Job, sums: *mut Sum) {
        // SAFETY: passed on.
        unsafe { super::pass::<Gfni, Vpclmul, M, ONES, N>(job, sums.cast()) }
    }

    /// # Safety
    /// The processor has the tier.
    #[target_feature(enable = "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn begin(state: u32) -> Sum {
        // SAFETY: passed on.
        unsafe { super::begin::<Vpclmul>(state) }
    }

    /// # Safety
    /// The processor has the tier.
    #[target_feature(enable = "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn end(sum: &Sum) -> u32 {
        // SAFETY: passed on.
        unsafe { super::end::<Vpclmul>(sum) }
    }

    pub(super) fn select(outputs: usize, ones: bool) -> Both {
        macro_rules! pick {
            ($($m:literal: $n:literal),*) => {
                match (outputs, ones) {
                    $(($m, false) => Both { wide: run::<$m, false, $n>, narrow: run::<$m, false, 1>, begin, end },)*
                    $(($m, true) => Both { wide: run::<$m, true, $n>, narrow: run::<$m, true, 1>, begin, end },)*
                    _ => unreachable!("a pass has 1 to 8 outputs"),
                }
            };
        }
        pick!(1: 4, 2: 4, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2)
    }
}

/// # Safety
/// The processor has the tier.
#[inline(always)]
unsafe fn begin<F: Fold>(state: u32) -> Sum {
    const { assert!(F::BYTES == VECTOR) };
    let mut sum = Sum::EMPTY;
    // SAFETY: a sum has as many bytes as a vector.
    unsafe { after::<F>(state).store(sum.0.as_mut_ptr()) };
    sum
}

/// # Safety
/// The processor has the tier.
#[inline(always)]
unsafe fn end<F: Fold>(sum: &Sum) -> u32 {
    // SAFETY: a sum has as many bytes as a vector.
    unsafe { F::load(sum.0.as_ptr()).reduce() }
}

/// All of a job: `N` vectors at a time, then one.
///
/// # Safety
/// See [`Pass`].
#[inline(always)]
unsafe fn pass<V: Vector, F: Fold + From<V>, const M: usize, const ONES: bool, const N: usize>(
    job: &Job,
    states: *mut F,
) {
    let mut at = 0;
    // SAFETY: every step stays within `len`, which the caller vouches for.
    unsafe {
        while at + N * V::BYTES <= job.len {
            step::<V, F, M, ONES, N>(job, states, at);
            at += N * V::BYTES;
        }
        while at + V::BYTES <= job.len {
            step::<V, F, M, ONES, 1>(job, states, at);
            at += V::BYTES;
        }
    }
}

/// `N` vectors from offset `at` of every source to the same of every output.
///
/// # Safety
/// See [`Pass`]; the bytes lie within the job.
#[inline(always)]
unsafe fn step<V: Vector, F: Fold + From<V>, const M: usize, const ONES: bool, const N: usize>(
    job: &Job,
    states: *mut F,
    at: usize,
) {
    // SAFETY: the pointers are within the job's arrays, the bytes within its chunks.
    unsafe {
        let mut sums = [[V::zero(); N]; M];
        let mut table = job.tables;
        let mut source = 0;
        while source + 2 <= job.sources {
            let first = (*job.inputs.add(source)).add(at);
            let second = (*job.inputs.add(source + 1)).add(at);
            let mut a = [V::zero(); N];
            let mut b = [V::zero(); N];
            for n in 0..N {
                a[n] = V::load(first.add(n * V::BYTES));
                b[n] = V::load(second.add(n * V::BYTES));
            }
            checksum::<V, F, N>(states.add(source), a);
            checksum::<V, F, N>(states.add(source + 1), b);
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
                *vector = V::load(first.add(n * V::BYTES));
            }
            checksum::<V, F, N>(states.add(source), a);
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
                if job.stream {
                    vector.stream(output.add(n * V::BYTES));
                } else {
                    vector.store(output.add(n * V::BYTES));
                }
            }
            checksum::<V, F, N>(states.add(job.sources + i), *sum);
        }
    }
}

/// Brings a chunk's sum past the next `N` vectors.
///
/// # Safety
/// The processor has the tier; the sum is there.
#[inline(always)]
unsafe fn checksum<V: Vector, F: Fold + From<V>, const N: usize>(state: *mut F, vectors: [V; N]) {
    // SAFETY: the caller vouches for both.
    unsafe {
        let keys = fold_keys::<F, 4>();
        let mut sum = F::from(vectors[N - 1]);
        for (n, &vector) in vectors.iter().enumerate().take(N - 1) {
            sum = F::from(vector).fold(keys[N - 2 - n], sum);
        }
        state.write(state.read().fold(keys[N - 1], sum));
    }
}
