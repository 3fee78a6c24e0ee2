//! Persistent memory: a mapped file on a DAX file system, or a mapped DAX device.
//!
//! A store is durable once it has left the processor's caches, which a [`fence`](PersistentMemory::fence) after it
//! waits for.  [`PmemFile`] is the implementation for a real device; the simulator's loses the stores that no fence has
//! covered.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::rc::Rc;

mod device;
mod flush;

pub use device::is_dax_device;
pub use flush::Flush;

/// Persistent memory.  Offsets and lengths are in bytes.
pub trait PersistentMemory {
    /// Returns the size in bytes.
    fn len(&self) -> u64;

    /// Returns whether the size is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies stored bytes to `out`.
    ///
    /// # Panics
    /// Past the end; so do the stores.
    fn load(&self, at: u64, out: &mut [u8]);

    /// Stores `bytes`.  Until the next fence has completed, any part of them may be durable or not, in any order.
    fn store(&self, at: u64, bytes: &[u8]);

    /// Stores eight bytes (little-endian) at a multiple of eight, atomically: all or none are durable.
    fn store_word(&self, at: u64, word: u64);

    /// Makes all earlier stores durable before it returns.
    fn fence(&self);

    /// Zeroes a range by giving its memory back to the system; returns false, and does nothing, where memory is never
    /// given back.
    fn discard(&self, _at: u64, _len: u64) -> bool {
        false
    }

    /// Returns the bytes of the system's memory that it occupies at present.
    fn resident(&self) -> u64 {
        self.len()
    }

    /// Stores `bytes` as a device does: they stay in the processor's caches, which no fence covers, until they are
    /// [flushed](Self::flush).
    fn store_cached(&self, at: u64, bytes: &[u8]);

    /// Starts writing back what a device, or [`store_cached`](Self::store_cached), has stored in a range; the next fence
    /// makes it durable.
    fn flush(&self, at: u64, len: u64);

    /// Returns the mapped file, if it is one: devices can be given access to it.
    fn file(self: Rc<Self>) -> Option<Rc<PmemFile>> {
        None
    }
}

/// Options for opening a file of persistent memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PmemOptions {
    /// Create the file if it does not exist.
    pub create: bool,
    /// Minimum size in bytes; a shorter file is extended.
    pub size: u64,
    /// Accept memory for which the file system does not guarantee durability (without `MAP_SYNC`): for measurements
    /// only.
    pub force: bool,
}

/// Mapped file.  Locked against other processes while it is open.
pub struct PmemFile {
    base: NonNull<u8>,
    len: usize,
    flush: Flush,
    synchronous: bool,
    path: PathBuf,
    file: File,
}

impl PmemFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// Errors of opening and mapping; `WouldBlock` when another process has locked the file; `Unsupported` when the
    /// file system does not make stores durable by itself (no DAX), or the processor cannot write back its caches.
    pub fn open(path: &Path, options: PmemOptions) -> io::Result<Self> {
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(options.create).custom_flags(libc::O_CLOEXEC);
        let file = how.open(path)?;
        // SAFETY: no pointers; the descriptor is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let before = device::size(&file)?;
        if before < options.size {
            fill(&file, before, options.size)?;
        }
        let len = device::size(&file)?;
        let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an empty file cannot be mapped"));
        }
        let flush = Flush::detect();
        if flush == Flush::None && !options.force {
            let text = "nothing is known of how this processor's stores leave its caches";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let (base, synchronous) = map(&file, len, options.force)?;
        Ok(Self { base, len, flush, synchronous, path: path.to_owned(), file })
    }

    /// Returns whether the file system guarantees durability (`MAP_SYNC`); otherwise it was forced.
    pub fn is_synchronous(&self) -> bool {
        self.synchronous
    }

    /// Returns the method by which stores leave the caches.
    pub fn flush_kind(&self) -> Flush {
        self.flush
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the address of a range, for a device.  It is mapped as long as `self` lives.
    ///
    /// # Panics
    /// Past the end.
    pub(crate) fn range(&self, at: u64, len: usize) -> *mut u8 {
        let at = self.check(at, len);
        // SAFETY: within the mapping, or its end.
        unsafe { self.base.as_ptr().add(at) }
    }

    fn check(&self, at: u64, len: usize) -> usize {
        let end = at.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.len as u64), "{len} bytes at {at} of a mapping of {}", self.len);
        at as usize
    }
}

/// Extends the file with allocated blocks: storing to the mapping of a hole would change file system metadata.
fn fill(file: &File, from: u64, to: u64) -> io::Result<()> {
    // SAFETY: no pointers; the descriptor is open.
    let result = unsafe { libc::posix_fallocate(file.as_raw_fd(), from as i64, (to - from) as i64) };
    if result != 0 {
        return Err(io::Error::from_raw_os_error(result));
    }
    // Unwritten blocks would be unwritten again after a crash, unless they are written once.
    let zeroes = vec![0; 1 << 20];
    let mut at = from;
    while at < to {
        let len = (to - at).min(zeroes.len() as u64) as usize;
        file.write_all_at(&zeroes[..len], at)?;
        at += len as u64;
    }
    file.sync_all()
}

fn map(file: &File, len: usize, force: bool) -> io::Result<(NonNull<u8>, bool)> {
    let attempt = |flags| {
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else refers to it.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base) }
    };
    let (base, synchronous) = match attempt(libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC) {
        Ok(base) => (base, true),
        Err(_) if force => (attempt(libc::MAP_SHARED)?, false),
        Err(error) => {
            let text = format!("not persistent memory: the file system refuses MAP_SYNC ({error})");
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
    };
    let base = NonNull::new(base.cast()).expect("a mapping is not at address zero");
    Ok((base, synchronous))
}

impl PersistentMemory for PmemFile {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn load(&self, at: u64, out: &mut [u8]) {
        let at = self.check(at, out.len());
        // SAFETY: within the mapping, which only this thread changes, since the file is locked, and a Pmem is not Sync; and
        // devices, so that the bytes are copied, and no reference to them exists.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr().add(at), out.as_mut_ptr(), out.len()) };
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        let at = self.check(at, bytes.len());
        // SAFETY: within the mapping; no reference into it exists.
        unsafe { self.flush.store(self.base.as_ptr().add(at), bytes) };
    }

    fn store_word(&self, at: u64, word: u64) {
        assert!(at.is_multiple_of(8), "a word at {at}");
        let at = self.check(at, 8);
        // SAFETY: within the mapping and aligned, as the mapping begins at a page.
        unsafe { self.flush.store_word(self.base.as_ptr().add(at).cast(), word.to_le()) };
    }

    fn fence(&self) {
        self.flush.fence();
    }

    fn store_cached(&self, at: u64, bytes: &[u8]) {
        let to = self.range(at, bytes.len());
        // SAFETY: within the mapping; no reference into it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn flush(&self, at: u64, len: u64) {
        let len = usize::try_from(len).expect("a range of a mapping");
        // SAFETY: within the mapping.
        unsafe { self.flush.write_back_range(self.range(at, len), len) };
    }

    fn file(self: Rc<Self>) -> Option<Rc<PmemFile>> {
        Some(self)
    }
}

impl Drop for PmemFile {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and no reference to it exists any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
        // The lock is released with the file.
        let _ = &self.file;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_loaded_from_another_mapping() {
        let path = std::env::temp_dir().join(format!("forebay-pmem-{}", std::process::id()));
        let options = PmemOptions { create: true, size: 3 << 20, force: true };
        let memory = PmemFile::open(&path, options).expect("a mapping");
        assert_eq!(memory.len(), 3 << 20);
        assert_eq!(PmemFile::open(&path, options).err().map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| at as u8 ^ (at >> 8) as u8).collect();
        // Every alignment of both ends.
        for skip in 0..70 {
            memory.store(4096 + skip * 1001, &bytes[skip as usize..1000 + (skip * 13) as usize]);
        }
        memory.store(1 << 20, &bytes);
        memory.store_word(64, 0x0102_0304_0506_0708);
        memory.store_cached((2 << 20) + 3, &bytes);
        memory.flush((2 << 20) + 3, bytes.len() as u64);
        memory.flush(3 << 20, 0);
        memory.fence();
        drop(memory);
        let memory = PmemFile::open(&path, PmemOptions { force: true, ..PmemOptions::default() }).expect("again");
        let mut out = vec![0; bytes.len()];
        for at in [1 << 20, (2 << 20) + 3] {
            memory.load(at, &mut out);
            assert!(out == bytes, "{at}");
        }
        for skip in (0..70).rev().step_by(2) {
            let wanted = &bytes[skip as usize..1000 + (skip * 13) as usize];
            let wanted = &wanted[..wanted.len().min(1001)];
            memory.load(4096 + skip * 1001, &mut out[..wanted.len()]);
            if skip < 69 {
                assert!(out[..wanted.len()] == *wanted, "{skip}");
            }
        }
        memory.load(64, &mut out[..8]);
        assert_eq!(out[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        std::fs::remove_file(&path).expect("there");
    }

    #[test]
    fn memory_that_is_not_kept_is_refused() {
        let path = std::env::temp_dir().join(format!("forebay-pmem-refused-{}", std::process::id()));
        let opened = PmemFile::open(&path, PmemOptions { create: true, size: 1 << 20, force: false });
        std::fs::remove_file(&path).expect("there");
        match opened {
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}"),
            // On a machine whose temporary files are persistent memory this is right.
            Ok(memory) => assert!(memory.is_synchronous()),
        }
    }
}
