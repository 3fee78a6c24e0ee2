//! The kernels of each tier, and which of them is in use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::fold::{self, Sink};
use super::{polynomial, portable};
use crate::tier::Tier;

/// CRC32C on one tier.  Registers are raw: neither the initial value nor the final inversion is applied.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// The register after some bytes.  Safe to call: the struct is only made where the processor has the tier.
    update: Update,
    copy: unsafe fn(u32, *const u8, usize, Sink) -> u32,
    shift: unsafe fn(u32, u64) -> u32,
}

type Update = unsafe fn(u32, *const u8, usize) -> u32;

/// The tier's `update`, and before the first call what finds it; a call of few bytes is over before a look whether
/// it has been found would be.
static UPDATE: AtomicPtr<()> = AtomicPtr::new(find as Update as *mut ());

/// Finds the kernel, and does its work.
///
/// # Safety
/// The bytes are readable.
unsafe fn find(state: u32, from: *const u8, len: usize) -> u32 {
    let update = Kernels::current().update;
    UPDATE.store(update as *mut (), Ordering::Relaxed);
    // SAFETY: passed on.
    unsafe { update(state, from, len) }
}

/// The register after `data`, on the tier in use.
#[inline]
pub(super) fn update(state: u32, data: &[u8]) -> u32 {
    // SAFETY: nothing but functions of this type is ever stored there, each for a tier that the processor has; code
    // does not change, so no order is needed.  The bytes are a slice.
    unsafe {
        let update = std::mem::transmute::<*mut (), Update>(UPDATE.load(Ordering::Relaxed));
        update(state, data.as_ptr(), data.len())
    }
}

impl Kernels {
    /// Those of the tier in use.
    #[inline]
    pub(crate) fn current() -> &'static Kernels {
        static CURRENT: OnceLock<Kernels> = OnceLock::new();
        CURRENT.get_or_init(|| Kernels::of(Tier::current()))
    }

    /// Those of a tier that the processor has.
    pub(crate) fn of(tier: Tier) -> Kernels {
        assert!(tier.is_available(), "the processor lacks the tier {tier}");
        match tier {
            #[cfg(target_arch = "x86_64")]
            Tier::Sse => sse::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Tier::Gfni => gfni::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Tier::Neon => neon::KERNELS,
            _ => plain::KERNELS,
        }
    }

    /// The register after `data`.
    #[inline]
    pub(crate) fn update(&self, state: u32, data: &[u8]) -> u32 {
        // SAFETY: the processor has the tier, see `of`; the bytes are a slice.
        unsafe { (self.update)(state, data.as_ptr(), data.len()) }
    }

    /// The register after `len` bytes from `from`.
    ///
    /// # Safety
    /// The bytes are readable.
    #[inline]
    pub(crate) unsafe fn update_raw(&self, state: u32, from: *const u8, len: usize) -> u32 {
        // SAFETY: the processor has the tier, see `of`; the caller vouches for the bytes.
        unsafe { (self.update)(state, from, len) }
    }

    /// The register after `bytes` bytes of zero.
    #[inline]
    pub(crate) fn shift(&self, state: u32, bytes: u64) -> u32 {
        // SAFETY: the processor has the tier, see `of`.
        unsafe { (self.shift)(state, bytes) }
    }

    /// The register after `from`, which is copied to `to`; both have the same length.
    #[inline]
    pub(crate) fn copy(&self, state: u32, from: &[u8], to: &mut [u8]) -> u32 {
        assert_eq!(from.len(), to.len(), "a copy needs as much room as there are bytes");
        if from.len() < STREAMED_MIN {
            // SAFETY: the processor has the tier, see `of`; the slices have one length, and one is exclusive.
            return unsafe { (self.copy)(state, from.as_ptr(), from.len(), Sink::Copy(to.as_mut_ptr())) };
        }
        // What is stored past the caches begins at a line, and what is left at the end is whole lines: a kernel takes
        // odd bytes off the front.
        let head = to.as_ptr().align_offset(64).min(from.len());
        let body = (from.len() - head) / 64 * 64;
        let tail = head + body;
        // SAFETY: as above; the three ranges make up the slices, and the middle of `to` is aligned.
        unsafe {
            let start = to.as_mut_ptr();
            let state = (self.copy)(state, from.as_ptr(), head, Sink::Copy(start));
            let state = (self.copy)(state, from.as_ptr().add(head), body, Sink::Stream(start.add(head)));
            fence();
            (self.copy)(state, from.as_ptr().add(tail), from.len() - tail, Sink::Copy(start.add(tail)))
        }
    }
}

/// Copies of so many bytes go past the caches, which they would sweep.
const STREAMED_MIN: usize = 2 << 20;

/// Orders stores past the caches before everything that follows.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SFENCE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Defines the kernels of a tier: its vector, its features, vectors a round, pieces a round, and words a piece.
macro_rules! tier {
    ($name:ident, $fold:ty, $feature:literal, $a:literal, $p:literal, $w:literal) => {
        mod $name {
            use super::{Kernels, Sink, fold};

            pub(super) const KERNELS: Kernels = Kernels { update, copy, shift };

            /// # Safety
            /// The processor has the features, and the bytes are readable.
            #[target_feature(enable = $feature)]
            unsafe fn update(state: u32, from: *const u8, len: usize) -> u32 {
                // SAFETY: passed on.
                unsafe {
                    if len >= const { fold::long_min::<$fold, $a, $p, $w>() } {
                        return long(state, from, len);
                    }
                    fold::short::<$fold, $a>(state, from, len)
                }
            }

            /// Apart, so that a short message does not pay for saving the registers that a long one needs.
            ///
            /// # Safety
            /// The processor has the features, and the bytes are readable.
            #[inline(never)]
            #[target_feature(enable = $feature)]
            unsafe fn long(state: u32, from: *const u8, len: usize) -> u32 {
                // SAFETY: passed on.
                unsafe { fold::long::<$fold, $a, $p, $w>(state, from, len) }
            }

            /// # Safety
            /// The processor has the features; the bytes are readable, and writable at the sink.
            #[target_feature(enable = $feature)]
            unsafe fn copy(state: u32, from: *const u8, len: usize, sink: Sink) -> u32 {
                // SAFETY: passed on.  Each kind of sink gets a loop of its own.
                unsafe {
                    match sink {
                        Sink::None => fold::copy::<$fold, $a>(state, from, len, Sink::None),
                        Sink::Copy(to) => fold::copy::<$fold, $a>(state, from, len, Sink::Copy(to)),
                        Sink::Stream(to) => fold::copy::<$fold, $a>(state, from, len, Sink::Stream(to)),
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

#[cfg(target_arch = "x86_64")]
tier!(sse, crate::crc32c::x86::Sse, "sse4.2,pclmulqdq", 4, 2, 4);
#[cfg(target_arch = "x86_64")]
tier!(avx2, crate::crc32c::x86::Sse, "avx2,sse4.2,pclmulqdq,bmi1,bmi2", 4, 2, 4);
#[cfg(target_arch = "x86_64")]
tier!(avx512, crate::crc32c::x86::Avx512, "avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq,bmi1,bmi2", 4, 2, 4);
#[cfg(target_arch = "x86_64")]
tier!(
    gfni,
    crate::crc32c::x86::Vpclmul,
    "vpclmulqdq,avx512vbmi2,avx512f,avx512bw,avx512vl,avx512dq,sse4.2,pclmulqdq,bmi1,bmi2",
    4,
    2,
    8
);
#[cfg(target_arch = "aarch64")]
tier!(neon, crate::crc32c::neon::Neon, "neon,crc,aes", 4, 2, 4);

mod plain {
    use super::{Kernels, Sink, polynomial, portable};

    pub(super) const KERNELS: Kernels = Kernels { update, copy, shift: polynomial::shift };

    /// # Safety
    /// The bytes are readable.
    unsafe fn update(state: u32, from: *const u8, len: usize) -> u32 {
        // SAFETY: passed on.
        portable::update(state, unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// # Safety
    /// The bytes are readable, and writable at the sink.
    unsafe fn copy(mut state: u32, from: *const u8, len: usize, sink: Sink) -> u32 {
        let (Sink::Copy(to) | Sink::Stream(to)) = sink else {
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
