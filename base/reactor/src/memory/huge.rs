//! Huge pages: 2 MiB of memory each, with fewer TLB misses than 512 pages of 4 KiB.
//!
//! Many share one mapping, since a process has 65,530 mappings at most (`vm.max_map_count`).

use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};

/// Bytes of a huge page, on x86-64 and AArch64 with pages of 4 KiB.
pub(crate) const PAGE: usize = 2 << 20;

/// Huge pages mapped at a time.
const MAPPED: usize = 32;

/// Unused huge page, which reads as zeroes.
struct HugeSlot(NonNull<u8>);

// SAFETY: it is memory with one owner.
unsafe impl Send for HugeSlot {}

static FREE: Mutex<Vec<HugeSlot>> = Mutex::new(Vec::new());

/// Takes 2 MiB of zero bytes; `None` if the system has no more address space.  Where it has no huge page available,
/// these are small pages.
pub(super) fn take() -> Option<NonNull<u8>> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    if free.is_empty() {
        let first = map(MAPPED * PAGE)?;
        // SAFETY: each is within the mapping.
        free.extend((0..MAPPED).rev().map(|at| HugeSlot(unsafe { first.add(at * PAGE) })));
    }
    free.pop().map(|free| free.0)
}

/// Takes a huge page back, and returns its memory to the system.
///
/// # Safety
/// It came from [`take`], and is not used any more.
pub(super) unsafe fn give_back(page: NonNull<u8>) {
    // SAFETY: the caller gives up the memory, which is `PAGE` bytes long.
    if unsafe { libc::madvise(page.as_ptr().cast(), PAGE, libc::MADV_DONTNEED) } == 0 {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(HugeSlot(page));
    } else {
        // For example locked memory: it would not read as zeroes.
        // SAFETY: as above.
        unsafe { libc::munmap(page.as_ptr().cast(), PAGE) };
    }
}

/// Maps `size` zero bytes at a multiple of [`PAGE`]; `None` when the system refuses.
fn map(size: usize) -> Option<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
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
        // Advised for the whole mapping, so that the kernel keeps it in one piece.  A huge page is populated by its
        // first access.  MADV_COLLAPSE on small pages is no alternative: it interrupts every processor, and the caller
        // waits milliseconds for them on a busy machine.
        libc::madvise(base.add(before).cast(), size, libc::MADV_HUGEPAGE);
        NonNull::new(base.add(before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_aligned_apart_and_zero_each_time_they_are_taken() {
        for round in 1..=3_u8 {
            let pages: Vec<_> = (0..MAPPED + 3).map(|_| take().expect("there is address space")).collect();
            for page in &pages {
                assert!((page.as_ptr() as usize).is_multiple_of(PAGE));
                // SAFETY: it is ours.
                let bytes = unsafe { std::slice::from_raw_parts_mut(page.as_ptr(), PAGE) };
                assert!(bytes.iter().step_by(4096).all(|&byte| byte == 0), "round {round}");
                bytes.iter_mut().step_by(4096).for_each(|byte| *byte = round);
            }
            let mut addresses: Vec<_> = pages.iter().map(|page| page.as_ptr() as usize).collect();
            addresses.sort_unstable();
            assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= PAGE), "they overlap");
            // SAFETY: taken above, each once.
            pages.into_iter().for_each(|page| unsafe { give_back(page) });
        }
    }
}
