//! Places for huge pages: 2 MiB of address space each, at a multiple of that.
//!
//! Many lie in one mapping, since a process has 65,530 mappings at most (`vm.max_map_count`).  A place takes memory as it
//! is touched, 4 KiB at a time; [`gather`] puts what is there into a huge page, for which a processor searches less.

use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

/// Bytes of a huge page, as x86-64 and AArch64 with pages of 4 KiB have them.
pub(crate) const PAGE: usize = 2 << 20;

/// Places that are mapped at a time.
const PLACES: usize = 32;

/// From linux/mman.h (6.1).  It needs no `MADV_HUGEPAGE`, which would make a mapping of its own of each place.
const MADV_COLLAPSE: libc::c_int = 25;

/// The address of a place that nobody uses; it reads as zeroes.
struct Place(NonNull<u8>);

// SAFETY: a place is memory with one owner.
unsafe impl Send for Place {}

static FREE: Mutex<Vec<Place>> = Mutex::new(Vec::new());

/// A place of zero bytes; `None` when the system gives no more address space.
pub(super) fn take() -> Option<NonNull<u8>> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    if free.is_empty() {
        let first = map(PLACES * PAGE)?;
        // SAFETY: each place is within the mapping.
        free.extend((0..PLACES).rev().map(|at| Place(unsafe { first.add(at * PAGE) })));
    }
    free.pop().map(|place| place.0)
}

/// Takes a place back, and gives its memory to the system.
///
/// # Safety
/// It came from [`take`], and nobody uses it any more.
pub(super) unsafe fn give_back(place: NonNull<u8>) {
    // SAFETY: the place is the caller's, and as long.
    if unsafe { libc::madvise(place.as_ptr().cast(), PAGE, libc::MADV_DONTNEED) } == 0 {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(Place(place));
    } else {
        // Locked memory, say: it would not read as zeroes.  The mapping goes.
        // SAFETY: as above.
        unsafe { libc::munmap(place.as_ptr().cast(), PAGE) };
    }
}

/// Puts what is in a place into a huge page.  It moves what is there, some 0.1 ms.  On kernels before 6.1, and where the
/// system has no huge page to give, nothing happens.
pub(super) fn gather(place: NonNull<u8>) {
    // SAFETY: the advice changes nothing of what the place holds.
    unsafe { libc::madvise(place.as_ptr().cast(), PAGE, MADV_COLLAPSE) };
}

/// Maps `size` zero bytes at a multiple of [`PAGE`]; `None` when the system refuses.
fn map(size: usize) -> Option<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, wherever the kernel has room.
    let base = unsafe { libc::mmap(ptr::null_mut(), size + PAGE, access, kind, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base: *mut u8 = base.cast();
    let before = base.align_offset(PAGE);
    // SAFETY: both ends are parts of the mapping just made, outside of what is kept.
    unsafe {
        if before > 0 {
            libc::munmap(base.cast(), before);
        }
        libc::munmap(base.add(before + size).cast(), PAGE - before);
        NonNull::new(base.add(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_aligned_reads_as_zeroes_and_keeps_its_bytes_when_it_is_gathered() {
        for round in 1..=3_u8 {
            let places: Vec<_> = (0..PLACES + 3).map(|_| take().expect("there is address space")).collect();
            for place in &places {
                assert!((place.as_ptr() as usize).is_multiple_of(PAGE));
                // SAFETY: the place is ours.
                let bytes = unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), PAGE) };
                assert!(bytes.iter().step_by(4096).all(|&byte| byte == 0), "round {round}");
                bytes.iter_mut().step_by(4096).for_each(|byte| *byte = round);
                gather(*place);
                assert!(bytes.iter().step_by(4096).all(|&byte| byte == round), "round {round}");
            }
            let mut addresses: Vec<_> = places.iter().map(|place| place.as_ptr() as usize).collect();
            addresses.sort_unstable();
            assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= PAGE), "places overlap");
            // SAFETY: taken above, each once.
            places.into_iter().for_each(|place| unsafe { give_back(place) });
        }
    }
}
