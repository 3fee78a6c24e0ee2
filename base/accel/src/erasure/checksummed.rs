//! Kernel of [`super::pass`] with checksums: every vector is multiplied and folded while it is in a register.
//!
//! Products of GF(2^8) and carry-less products are made by different units, and a stripe's checksums are `k + m`
//! independent sums; so one loop keeps both busy, where two loops would take turns.  What stays of a chunk from one
//! step to the next is a single vector that is congruent to all of the chunk before it (see `crc32c::fold`): `N`
//! vectors of a step are folded onto the last of them, each with the key of its own distance, which takes no more
//! products than folding them onto the next step's, and a load and a store for all `N`.  Parity is folded before it
//! is stored, so it may go past the caches.
//!
//! With sixteen registers this loses: on the SSE tier it was a quarter slower than tile by tile.

use super::pass::ErasureJob;

/// Kernel for some tier and number of outputs.  The second argument are the sums, of as many bytes as a vector
/// for each source and then each output, aligned to a line.
///
/// # Safety
/// As for [`super::pass::Pass`]; the sums are there, the length is a multiple of [`VECTOR`], and nothing is to be
/// added to what the outputs hold.
type Pass = unsafe fn(&ErasureJob, *mut Sum);

/// Length in bytes of a vector in the tier that has such kernels.
pub(super) const VECTOR: usize = 64;

/// State of a chunk's checksum between steps.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Sum([u8; VECTOR]);

impl Sum {
    /// Sum of nothing, from a register of zero.
    pub(super) const EMPTY: Self = Self([0; VECTOR]);
}

/// Kernel, and the functions that turn checksums into sums and back.
#[derive(Clone, Copy)]
pub(super) struct ChecksumKernel {
    pub(super) wide: Pass,
    pub(super) narrow: Pass,
    /// Turns a register into a sum.
    begin: unsafe fn(u32) -> Sum,
    /// Turns a sum into a register.
    end: unsafe fn(&Sum) -> u32,
}

impl ChecksumKernel {
    /// Returns the sum of a chunk whose register is `state`.
    pub(super) fn begin(&self, state: u32) -> Sum {
        // SAFETY: there is a `ChecksumKernel` only where the processor has the tier, see `ErasurePlan::new`.
        unsafe { (self.begin)(state) }
    }

    /// Returns the register of a chunk whose sum is `sum`.
    pub(super) fn end(&self, sum: &Sum) -> u32 {
        // SAFETY: as above.
        unsafe { (self.end)(sum) }
    }
}

/// Kernels of the `gfni` tier: vectors of 64 bytes, and 32 registers.
#[cfg(target_arch = "x86_64")]
pub(super) mod gfni {
    use super::{ChecksumKernel, Sum, VECTOR};
    use crate::crc32c::fold::{Fold, after, fold_keys};
    use crate::crc32c::x86::FoldVpclmul;
    use crate::erasure::pass::{ErasureJob, SideWork, pass};
    use crate::vector::x86::Gfni;

    /// Checksum sums of a job's chunks, computed along with the products.
    #[derive(Clone, Copy)]
    struct Sums(*mut Sum);

    impl SideWork<Gfni> for Sums {
        #[inline(always)]
        unsafe fn pass<const N: usize>(self, chunk: usize, vectors: &[Gfni; N]) {
            // SAFETY: the caller vouches for the tier, and that there is a sum, of a vector's bytes, for the chunk.
            unsafe {
                let keys = fold_keys::<FoldVpclmul>();
                let mut sum = FoldVpclmul::from(vectors[N - 1]);
                for (n, &vector) in vectors.iter().enumerate().take(N - 1) {
                    sum = FoldVpclmul::from(vector).fold(keys[N - 2 - n], sum);
                }
                let place = self.0.add(chunk).cast::<u8>();
                FoldVpclmul::load(place).fold(keys[N - 1], sum).store(place);
            }
        }
    }

    /// # Safety
    /// See [`super::Pass`].
    #[target_feature(enable = "gfni,vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn run<const M: usize, const ONES: bool, const N: usize>(job: &ErasureJob, sums: *mut Sum) {
        // SAFETY: passed on.
        unsafe { pass::<Gfni, _, M, ONES, N>(job, Sums(sums)) }
    }

    /// # Safety
    /// The processor has the tier.
    #[target_feature(enable = "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn begin(state: u32) -> Sum {
        const { assert!(FoldVpclmul::BYTES == VECTOR) };
        let mut sum = Sum::EMPTY;
        // SAFETY: a sum has as many bytes as a vector; the caller has the tier.
        unsafe { after::<FoldVpclmul>(state).store(sum.0.as_mut_ptr()) };
        sum
    }

    /// # Safety
    /// The processor has the tier.
    #[target_feature(enable = "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq")]
    unsafe fn end(sum: &Sum) -> u32 {
        // SAFETY: a sum has as many bytes as a vector; the caller has the tier.
        unsafe { FoldVpclmul::load(sum.0.as_ptr()).reduce() }
    }

    /// Returns the kernel for `outputs` outputs; a wide one takes `vectors` vectors at a time, one of the widths of the
    /// tier's plain kernel.
    pub(in crate::erasure) fn select(outputs: usize, ones: bool, vectors: usize) -> ChecksumKernel {
        macro_rules! pick {
            ($($m:literal: [$($n:literal),*]),*) => {
                match (outputs, ones, vectors) {
                    $($(($m, false, $n) => ChecksumKernel { wide: run::<$m, false, $n>, narrow: run::<$m, false, 1>, begin, end },)*)*
                    $($(($m, true, $n) => ChecksumKernel { wide: run::<$m, true, $n>, narrow: run::<$m, true, 1>, begin, end },)*)*
                    _ => unreachable!("no pass has {outputs} outputs and {vectors} vectors a step"),
                }
            };
        }
        pick!(
            1: [4, 2, 1], 2: [4, 2, 1], 3: [4, 2, 1], 4: [4, 2, 1],
            5: [2, 1], 6: [2, 1], 7: [2, 1], 8: [2, 1]
        )
    }
}
