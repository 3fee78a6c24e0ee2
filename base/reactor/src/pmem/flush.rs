//! Cache flush instructions for persistent memory, by processor capability.

/// Method by which stores leave the processor's caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// Non-temporal stores for whole lines, `clwb` for the rest, `sfence`.
    Clwb,
    /// Non-temporal stores for whole lines, `clflushopt` for the rest, `sfence`.
    Clflushopt,
    /// Non-temporal stores for whole lines, `clflush` for the rest, `sfence`.
    Clflush,
    /// Plain stores, `dc cvap`, `dsb`.
    DcCvap,
    /// Plain stores, `dc cvac`, `dsb`: the best of a processor without `dc cvap`.
    DcCvac,
    /// Plain stores and a fence: nothing is guaranteed to leave the caches.
    None,
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl Flush {
    /// Returns the best method that the processor supports.
    #[cfg(target_arch = "x86_64")]
    pub fn detect() -> Self {
        // Leaf 7: bit 23 of EBX is clflushopt, bit 24 is clwb.
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        match leaf.ebx {
            ebx if ebx >> 24 & 1 == 1 => Flush::Clwb,
            ebx if ebx >> 23 & 1 == 1 => Flush::Clflushopt,
            _ => Flush::Clflush,
        }
    }

    /// Returns the best method that the processor supports.
    #[cfg(target_arch = "aarch64")]
    pub fn detect() -> Self {
        /// Bit of the processor's capabilities in the auxiliary vector: `dc cvap`.
        const HWCAP_DCPOP: u64 = 1 << 16;
        // SAFETY: reads a number that the kernel gave the process.
        let capabilities = unsafe { libc::getauxval(libc::AT_HWCAP) };
        if capabilities & HWCAP_DCPOP != 0 { Flush::DcCvap } else { Flush::DcCvac }
    }

    /// Returns the best method that the processor supports.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn detect() -> Self {
        Flush::None
    }

    /// Returns the name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Flush::Clwb => "clwb",
            Flush::Clflushopt => "clflushopt",
            Flush::Clflush => "clflush",
            Flush::DcCvap => "dc cvap",
            Flush::DcCvac => "dc cvac",
            Flush::None => "none",
        }
    }

    /// Copies `bytes` to `to` and starts writing them back to memory; [`fence`](Self::fence) completes it.
    ///
    /// # Safety
    /// The memory may be written, and no reference to it exists.
    pub(crate) unsafe fn store(self, to: *mut u8, bytes: &[u8]) {
        let head = to.align_offset(LINE).min(bytes.len());
        let lines = (bytes.len() - head) / LINE * LINE;
        // SAFETY: all within the memory that the caller vouches for.
        unsafe {
            self.store_part(to, &bytes[..head]);
            self.store_lines(to.add(head), &bytes[head..head + lines]);
            self.store_part(to.add(head + lines), &bytes[head + lines..]);
        }
    }

    /// Stores into one cache line.
    ///
    /// # Safety
    /// As [`store`](Self::store); it stays within one line.
    unsafe fn store_part(self, to: *mut u8, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        // SAFETY: the caller vouches for it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            self.write_back(to);
        }
    }

    /// Stores whole cache lines.
    ///
    /// # Safety
    /// As [`store`](Self::store); `to` begins a line.
    #[cfg(target_arch = "x86_64")]
    unsafe fn store_lines(self, to: *mut u8, bytes: &[u8]) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        for (line, at) in bytes.chunks_exact(LINE).zip((0..).step_by(LINE)) {
            for part in (0..LINE).step_by(16) {
                // SAFETY: SSE2 is part of x86-64; the load is within the chunk, the store is aligned to 16 bytes and
                // within the memory that the caller vouches for.
                unsafe {
                    let value = _mm_loadu_si128(line.as_ptr().add(part).cast::<__m128i>());
                    _mm_stream_si128(to.add(at + part).cast::<__m128i>(), value);
                }
            }
        }
    }

    /// Stores whole cache lines.
    ///
    /// # Safety
    /// As [`store`](Self::store); `to` begins a line.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn store_lines(self, to: *mut u8, bytes: &[u8]) {
        for (line, at) in bytes.chunks_exact(LINE).zip((0..).step_by(LINE)) {
            // SAFETY: the caller vouches for it.
            unsafe { self.store_part(to.add(at), line) };
        }
    }

    /// Stores a word atomically.
    ///
    /// # Safety
    /// As [`store`](Self::store); `to` is aligned.
    pub(crate) unsafe fn store_word(self, to: *mut u64, word: u64) {
        // SAFETY: aligned, and the caller vouches for the memory.
        unsafe {
            std::ptr::write_volatile(to, word);
            self.write_back(to.cast());
        }
    }

    /// Starts writing back the cache lines of `len` bytes at `at`, stored by a device or otherwise;
    /// [`fence`](Self::fence) completes it.
    ///
    /// # Safety
    /// The range is mapped.
    pub(crate) unsafe fn write_back_range(self, at: *mut u8, len: usize) {
        let skip = at as usize % LINE;
        for line in (0..len.saturating_add(if len > 0 { skip } else { 0 })).step_by(LINE) {
            // SAFETY: each line holds a byte of the range, or is the first one's own; pages are whole lines.
            unsafe { self.write_back(at.sub(skip).add(line)) };
        }
    }

    /// Starts writing back the cache line at `at`.
    ///
    /// # Safety
    /// The address is mapped.
    #[cfg(target_arch = "x86_64")]
    unsafe fn write_back(self, at: *mut u8) {
        // SAFETY: the instructions change no content; each is used only where the processor was found to have it
        // (clflush is part of x86-64).
        unsafe {
            match self {
                Flush::Clwb => std::arch::asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags)),
                Flush::Clflushopt => std::arch::asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)),
                _ => std::arch::asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)),
            }
        }
    }

    /// Starts writing back the cache line at `at`.
    ///
    /// # Safety
    /// The address is mapped.
    #[cfg(target_arch = "aarch64")]
    unsafe fn write_back(self, at: *mut u8) {
        // SAFETY: the instructions change no content; `dc cvap` (by its encoding, which old assemblers take too) is
        // used only where the processor was found to have it.
        unsafe {
            match self {
                Flush::DcCvap => std::arch::asm!("sys #3, c7, c12, #1, {}", in(reg) at, options(nostack)),
                _ => std::arch::asm!("dc cvac, {}", in(reg) at, options(nostack)),
            }
        }
    }

    /// Starts writing back the cache line at `at`.
    ///
    /// # Safety
    /// The address is mapped.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    unsafe fn write_back(self, _at: *mut u8) {}

    /// Waits until everything stored has left the caches.
    pub(crate) fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64; a fence changes nothing.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a barrier changes nothing.
        unsafe {
            std::arch::asm!("dsb sy", options(nostack));
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}
