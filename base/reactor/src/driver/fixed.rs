//! Registered buffers of a ring: the kernel pins the memory once, instead of for each operation.
//!
//! A pool's region is registered when the first operation uses it.  Where the kernel refuses (it is older than 5.19, or
//! RLIMIT_MEMLOCK is reached), operations use unregistered memory.  All processes of a user share that limit, and new
//! kernels count rings themselves against it; so a process uses at most a quarter of it for buffers.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use io_uring::IoUring;

use crate::driver::os;
use crate::memory::Region;

/// Maximum regions registered with a ring.
const REGIONS_MAX: u16 = 256;

/// Bytes that this process has registered, with any ring.
static REGISTERED: AtomicU64 = AtomicU64::new(0);

/// Returns the maximum bytes that this process registers.
fn budget() -> u64 {
    static BUDGET: OnceLock<u64> = OnceLock::new();
    *BUDGET.get_or_init(|| match os::lockable_bytes() {
        u64::MAX => u64::MAX,
        limit => limit / 4,
    })
}

/// Regions registered with one ring.
pub(crate) struct FixedBuffers {
    /// Ring number, which identifies this ring in the regions' notes.
    ring: u64,
    /// True once the kernel refused a registration.
    refused: bool,
    regions: Vec<Option<Arc<Region>>>,
}

impl FixedBuffers {
    pub(crate) fn new(ring: &IoUring) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let offered = ring.submitter().register_buffers_sparse(REGIONS_MAX.into()).is_ok();
        Self { ring: NEXT.fetch_add(1, Ordering::Relaxed), refused: !offered, regions: Vec::new() }
    }

    /// Returns the index under which a region is registered with the ring, registering it if possible; `None` when it
    /// is not registered.
    pub(crate) fn index(&mut self, ring: &IoUring, region: &Region) -> Option<u16> {
        // The ring that used the region last has stored its number and the index in the note.  A pool is mostly used by
        // one core, so that is mostly this ring.
        let note = region.note.load(Ordering::Relaxed);
        if note >> 16 == self.ring {
            return Some(note as u16);
        }
        let known = self.regions.iter().position(|known| known.as_ref().is_some_and(|known| ptr::eq(&**known, region)));
        let index = match known {
            Some(index) => index as u16,
            None => self.register(ring, region)?,
        };
        region.note.store(self.ring << 16 | u64::from(index), Ordering::Relaxed);
        Some(index)
    }

    fn register(&mut self, ring: &IoUring, region: &Region) -> Option<u16> {
        if self.refused || !region.may_be_registered() {
            return None;
        }
        self.sweep(ring);
        let index = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        if index >= usize::from(REGIONS_MAX) {
            return None;
        }
        let bytes = region.iovec().iov_len as u64;
        if REGISTERED.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > budget() {
            REGISTERED.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        // SAFETY: the region is kept until it is unregistered, or the ring is gone.
        let result = unsafe { ring.submitter().register_buffers_update(index as u32, &[region.iovec()], None) };
        if let Err(error) = result {
            tracing::debug!(%error, "cannot register more memory with io_uring; using unregistered buffers");
            REGISTERED.fetch_sub(bytes, Ordering::Relaxed);
            self.refused = true;
            return None;
        }
        if index == self.regions.len() {
            self.regions.push(None);
        }
        self.regions[index] = Some(region.keep());
        Some(index as u16)
    }

    /// Unregisters regions whose pools are gone.
    fn sweep(&mut self, ring: &IoUring) {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for (index, entry) in self.regions.iter_mut().enumerate() {
            let Some(region) = entry.take_if(|region| Arc::strong_count(region) == 1) else { continue };
            // SAFETY: an empty entry replaces the old one; the kernel keeps the old one for operations that still use
            // it.
            match unsafe { ring.submitter().register_buffers_update(index as u32, &[empty], None) } {
                Ok(()) => drop(REGISTERED.fetch_sub(region.iovec().iov_len as u64, Ordering::Relaxed)),
                Err(_) => *entry = Some(region),
            }
        }
    }
}

impl Drop for FixedBuffers {
    fn drop(&mut self) {
        // The ring is dropped at the same time, and its registrations with it.
        let bytes: usize = self.regions.iter().flatten().map(|region| region.iovec().iov_len).sum();
        REGISTERED.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}
