//! Memory of another process, such as a guest's RAM, that the other process may truncate at any time.
//!
//! The other process is not trusted.  It writes while this one reads, so that two reads of the same byte may differ:
//! copy a structure out, then check the copy.  And it may shrink the file beneath the mapping; then zeroes are read
//! instead of the lost pages, and [`GuardedMapping::is_lost`] is true.

mod guard;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence};

use crate::buf::BufMut;
use crate::driver::os::check;
use guard::GuardSlot;

/// Magic number of hugetlbfs in `statfs`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Memory shared with another process, mapped for reading and writing.
///
/// Several threads and the other process may access it at the same time.  Atomic accesses are ordered as their
/// [`Ordering`] says; copies are not atomic, and one that races with a write may see any mixture of old and new bytes.
#[derive(Debug)]
pub struct GuardedMapping {
    /// First byte of the range that was asked for; pages are mapped as a whole.
    start: NonNull<u8>,
    len: usize,
    /// Pages, which live as long as any mapping of them.
    pages: Arc<GuardedPages>,
}

/// Pages of mappings.
#[derive(Debug)]
struct GuardedPages {
    /// First page.
    base: NonNull<u8>,
    /// Length of all pages, in bytes.
    mapped: usize,
    /// Registration for faults; memory of this process alone has none.
    slot: Option<GuardSlot>,
}

// SAFETY: it is only a piece of memory, and no reference to it is ever made.
unsafe impl Send for GuardedMapping {}
// SAFETY: as above.  Every access is atomic, or a copy between it and private memory, whose bytes may be arbitrary.
unsafe impl Sync for GuardedMapping {}
// SAFETY: only their end uses the pages, and it comes once, after the last mapping's.
unsafe impl Send for GuardedPages {}
// SAFETY: as above; whether they are lost is in an atomic.
unsafe impl Sync for GuardedPages {}

impl GuardedMapping {
    /// Maps `len` bytes of `file` from `offset`, which needs no alignment.
    ///
    /// # Errors
    /// `InvalidInput` when `len` is 0 or the file is shorter than `offset + len`; `QuotaExceeded` when the process has
    /// 4096 such mappings; errors of the system, such as `PermissionDenied` for a file that was opened for reading only.
    pub fn map(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Self> {
        let end = offset.checked_add(len).ok_or_else(|| refused(format!("{len} bytes at offset {offset} overflow")))?;
        let size = file_size(file)?;
        if len == 0 || end > size {
            return Err(refused(format!("cannot map {len} bytes at offset {offset} of a file with {size} bytes")));
        }
        let page = page_size(file)?;
        let head = offset % page as u64;
        let first =
            libc::off_t::try_from(offset - head).map_err(|_| refused(format!("offset {offset} is too high")))?;
        let mapped = usize::try_from(head + len).ok().and_then(|len| len.checked_next_multiple_of(page));
        let mapped = mapped.ok_or_else(|| refused(format!("{len} bytes are too many to map")))?;
        let base = map_pages(mapped, libc::MAP_SHARED, file.as_raw_fd(), first)?;
        // SAFETY: the head is shorter than the first page.
        let start = unsafe { base.add(head as usize) };
        let mut pages = GuardedPages { base, mapped, slot: None };
        // Otherwise a core dump of this process would contain the other's memory.  A failure costs only that.
        // SAFETY: the range was just mapped, and the advice changes no content.
        unsafe { libc::madvise(base.as_ptr().cast(), mapped, libc::MADV_DONTDUMP) };
        pages.slot = Some(GuardSlot::register(base.as_ptr(), mapped, page)?);
        Ok(Self { start, len: len as usize, pages: Arc::new(pages) })
    }

    /// Returns `len` bytes of zeroed memory that no other process shares.
    ///
    /// # Errors
    /// `InvalidInput` when `len` is 0; errors of the system.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let mapped = len.checked_next_multiple_of(system_page()).filter(|&mapped| mapped > 0);
        let mapped = mapped.ok_or_else(|| refused(format!("cannot map {len} bytes")))?;
        let base = map_pages(mapped, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)?;
        Ok(Self { start: base, len, pages: Arc::new(GuardedPages { base, mapped, slot: None }) })
    }

    /// Creates a sealed memory file of `len` bytes, which can neither shrink nor grow; returns its mapping and its
    /// descriptor.
    ///
    /// # Errors
    /// `InvalidInput` when `len` is 0; errors of the system.
    pub fn create(len: u64) -> io::Result<(Self, OwnedFd)> {
        let size = libc::off_t::try_from(len).map_err(|_| refused(format!("{len} bytes are too many to map")))?;
        // SAFETY: the name is a C string; the descriptor is new and owned here.
        let fd = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            OwnedFd::from_raw_fd(check(libc::memfd_create(c"forebay-shared".as_ptr(), flags))?)
        };
        // SAFETY: no pointers.
        check(unsafe { libc::ftruncate(fd.as_raw_fd(), size) })?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: no pointers.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Ok((Self::map(fd.as_fd(), 0, len)?, fd))
    }

    /// Returns another mapping of the same range, for another core: one core need not count uses by atomics.
    pub fn share(&self) -> Self {
        Self { start: self.start, len: self.len, pages: self.pages.clone() }
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: no mapping is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether a page could not be accessed any more, because the other process has shrunk the file.  Zeroes
    /// are in place of that page and of all after it.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.pages.slot.as_ref().is_some_and(GuardSlot::is_lost)
    }

    /// Returns whether the byte at `at` is aligned in memory: the mapping begins in the middle of a page if its offset
    /// does.  `align` is a power of two, at most a page.
    pub fn is_aligned(&self, at: usize, align: usize) -> bool {
        self.start.addr().get().wrapping_add(at) & (align - 1) == 0
    }

    /// Copies the bytes from `at` on to `to`.
    ///
    /// # Panics
    /// When the range is not within the mapping.
    #[inline]
    pub fn read(&self, at: usize, to: &mut [u8]) {
        let from = self.range(at, to.len());
        // SAFETY: `range` has checked that there are that many bytes; `to` is private memory of that length.
        unsafe { copy(from, to.as_mut_ptr(), to.len()) };
    }

    /// Copies `from` to the mapping, from `at` on.
    ///
    /// # Panics
    /// When the range is not within the mapping.
    #[inline]
    pub fn write(&self, at: usize, from: &[u8]) {
        let to = self.range(at, from.len());
        // SAFETY: as in `read`; the mapping is writable, and no reference to its bytes exists.
        unsafe { copy(from.as_ptr(), to, from.len()) };
    }

    /// Appends `len` bytes from `at` on to `to`.
    ///
    /// # Panics
    /// When the range is not within the mapping, or `to` has less spare space.
    #[inline]
    pub fn read_into(&self, at: usize, len: usize, to: &mut BufMut) {
        self.read(at, &mut to.spare_mut()[..len]);
        to.set_len(to.len() + len);
    }

    /// Writes `len` zeroes from `at` on.
    ///
    /// # Panics
    /// When the range is not within the mapping.
    pub fn fill_zero(&self, at: usize, len: usize) {
        let to = self.range(at, len);
        compiler_fence(Ordering::SeqCst);
        // SAFETY: as in `write`.
        unsafe { ptr::write_bytes(to, 0, len) };
        compiler_fence(Ordering::SeqCst);
    }

    /// Loads the integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// When it is not within the mapping, or misaligned in memory; for an order that a load cannot have.
    #[inline]
    pub fn load_u16(&self, at: usize, order: Ordering) -> u16 {
        // SAFETY: within the mapping, and aligned; it is valid for any bytes, and lives as long as the mapping.
        unsafe { AtomicU16::from_ptr(self.aligned(at)) }.load(order)
    }

    /// Loads the integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// As [`load_u16`](Self::load_u16).
    #[inline]
    pub fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(self.aligned(at)) }.load(order)
    }

    /// Loads the integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// As [`load_u16`](Self::load_u16).
    #[inline]
    pub fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(self.aligned(at)) }.load(order)
    }

    /// Stores an integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// When it is not within the mapping, or misaligned in memory; for an order that a store cannot have.
    #[inline]
    pub fn store_u16(&self, at: usize, value: u16, order: Ordering) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(self.aligned(at)) }.store(value, order);
    }

    /// Stores an integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// As [`store_u16`](Self::store_u16).
    #[inline]
    pub fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(self.aligned(at)) }.store(value, order);
    }

    /// Stores an integer at `at`, in the machine's byte order.
    ///
    /// # Panics
    /// As [`store_u16`](Self::store_u16).
    #[inline]
    pub fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(self.aligned(at)) }.store(value, order);
    }

    /// Sets bits of the byte at `at` atomically; returns its previous value.
    ///
    /// # Panics
    /// When it is not within the mapping.
    #[inline]
    pub fn or_u8(&self, at: usize, bits: u8, order: Ordering) -> u8 {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU8::from_ptr(self.aligned(at)) }.fetch_or(bits, order)
    }

    /// Returns the address of a range, which it checks.
    #[inline]
    fn range(&self, at: usize, len: usize) -> *mut u8 {
        if at > self.len || len > self.len - at {
            self.outside(at, len);
        }
        // SAFETY: within the mapping, or at its end.
        unsafe { self.start.as_ptr().add(at) }
    }

    /// Returns the address of an integer, which it checks.
    #[inline]
    fn aligned<T>(&self, at: usize) -> *mut T {
        let to = self.range(at, size_of::<T>()).cast::<T>();
        assert!(to.is_aligned(), "misaligned integer at {at} of a mapping");
        to
    }

    #[cold]
    fn outside(&self, at: usize, len: usize) -> ! {
        panic!("{len} bytes at {at} of a mapping with {}", self.len)
    }
}

impl Drop for GuardedPages {
    fn drop(&mut self) {
        // Before its addresses can belong to another mapping.
        self.slot = None;
        // SAFETY: mapped by this type with this length (in part replaced by the fault handler since), and nothing
        // refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// Copies bytes into or out of shared memory.
///
/// The fences keep the compiler from reading shared memory again in place of the copy: the bytes that are checked would
/// not be the bytes that are used then.
///
/// # Safety
/// Both ranges have `len` bytes, which may be accessed, and do not overlap.
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: required of the caller.
    unsafe {
        match len {
            // Constant lengths become single instructions.
            2 => ptr::copy_nonoverlapping(from, to, 2),
            4 => ptr::copy_nonoverlapping(from, to, 4),
            8 => ptr::copy_nonoverlapping(from, to, 8),
            16 => ptr::copy_nonoverlapping(from, to, 16),
            _ => ptr::copy_nonoverlapping(from, to, len),
        }
    }
    compiler_fence(Ordering::SeqCst);
}

fn refused(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn map_pages(len: usize, flags: libc::c_int, fd: libc::c_int, offset: libc::off_t) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd, offset) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(base.cast()).expect("a mapping is not at address zero"))
}

/// Returns a file's size in bytes.
fn file_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: fstat fills the structure, for which any bytes are valid.
    let stat = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        check(libc::fstat(file.as_raw_fd(), &mut stat))?;
        stat
    };
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Returns the size of the pages in which a file is mapped, in bytes.
fn page_size(file: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: fstatfs fills the structure, for which any bytes are valid.
    let stat = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        check(libc::fstatfs(file.as_raw_fd(), &mut stat))?;
        stat
    };
    if stat.f_type as u64 & 0xffff_ffff != HUGETLBFS_MAGIC {
        return Ok(system_page());
    }
    // Here, and only here, the block size is the size of the huge pages.
    let page = stat.f_bsize as usize;
    if page.is_power_of_two() { Ok(page) } else { Err(refused(format!("huge pages of {page} bytes"))) }
}

/// Returns the system's page size in bytes.
fn system_page() -> usize {
    // SAFETY: no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).expect("every system has a page size")
}
