//! Log device in the memory of this process: it ends with the process, and its logs need members elsewhere.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::fs::available_memory;
use forebay_reactor::pmem::PersistentMemory;

use super::{Backing, Shelf, ShelfOptions};
use crate::format::MediumKind;

/// Bytes that are allocated at a time.
const CHUNK: usize = 1 << 20;
/// Size of a log device in bytes: more than any machine has. Logs are limited by the memory that is available.
const SIZE: u64 = 1 << 44;
/// Maximum of available memory in bytes that logs leave to others; the reserve is an eighth of it, capped by this.
const RESERVE_MAX: u64 = 1 << 30;

/// Memory of this process, allocated where something is stored.
///
/// It is durable as far as replication is concerned: a copy of a log in it is as good as its process.
pub(super) struct VolatileMemory {
    chunks: RefCell<Vec<Option<Box<[u8]>>>>,
}

impl VolatileMemory {
    pub(super) fn new() -> Self {
        Self { chunks: RefCell::default() }
    }

    /// Calls `each` for the pieces of a range: number of the chunk, range in it, and range of the whole.
    fn pieces(at: u64, len: usize, mut each: impl FnMut(usize, std::ops::Range<usize>, std::ops::Range<usize>)) {
        assert!(at + len as u64 <= SIZE, "{len} bytes at {at} of a memory of {SIZE} bytes");
        let mut done = 0;
        while done < len {
            let (number, from) = (((at + done as u64) / CHUNK as u64) as usize, ((at as usize) + done) % CHUNK);
            let count = (CHUNK - from).min(len - done);
            each(number, from..from + count, done..done + count);
            done += count;
        }
    }
}

impl PersistentMemory for VolatileMemory {
    fn len(&self) -> u64 {
        SIZE
    }

    fn load(&self, at: u64, out: &mut [u8]) {
        let chunks = self.chunks.borrow();
        Self::pieces(at, out.len(), |number, from, to| match chunks.get(number) {
            Some(Some(chunk)) => out[to].copy_from_slice(&chunk[from]),
            Some(None) | None => out[to].fill(0),
        });
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        let mut chunks = self.chunks.borrow_mut();
        Self::pieces(at, bytes.len(), |number, to, from| {
            if chunks.len() <= number {
                chunks.resize_with(number + 1, || None);
            }
            let chunk = chunks[number].get_or_insert_with(|| vec![0; CHUNK].into_boxed_slice());
            chunk[to].copy_from_slice(&bytes[from]);
        });
    }

    fn store_word(&self, at: u64, word: u64) {
        self.store(at, &word.to_le_bytes());
    }

    fn store_cached(&self, at: u64, bytes: &[u8]) {
        self.store(at, bytes);
    }

    fn flush(&self, _at: u64, _len: u64) {}

    fn fence(&self) {}

    fn discard(&self, at: u64, len: u64) -> bool {
        let mut chunks = self.chunks.borrow_mut();
        let end = (at + len).min(chunks.len() as u64 * CHUNK as u64);
        let mut from = at;
        while from < end {
            let (number, begin) = ((from / CHUNK as u64) as usize, (from % CHUNK as u64) as usize);
            let until = ((end - (from - begin as u64)) as usize).min(CHUNK);
            match (&mut chunks[number], until - begin) {
                (chunk, CHUNK) => *chunk = None,
                (Some(chunk), _) => chunk[begin..until].fill(0),
                (None, _) => {}
            }
            from += (until - begin) as u64;
        }
        while matches!(chunks.last(), Some(None)) {
            chunks.pop();
        }
        true
    }

    fn resident(&self) -> u64 {
        (self.chunks.borrow().iter().flatten().count() * CHUNK) as u64
    }
}

impl Shelf {
    /// Opens an empty log device in the memory of this process, which lasts as long as it does.
    ///
    /// # Errors
    /// None that are known.
    pub async fn in_process() -> Result<Rc<Self>> {
        Self::in_memory(Rc::new(VolatileMemory::new()), "memory", ShelfOptions::default()).await
    }

    /// Opens a log device in memory that ends with the process, or with its machine.
    ///
    /// # Errors
    /// If the memory is too small.
    pub async fn in_memory(memory: Rc<dyn PersistentMemory>, name: &str, options: ShelfOptions) -> Result<Rc<Self>> {
        let options = ShelfOptions { create: true, ..options };
        Self::load(Backing::Memory(memory), MediumKind::Dram, name.to_owned(), options).await
    }

    /// Refuses to open a log device in memory at a path: there is none.
    pub(super) fn no_path(path: &Path) -> Error {
        let text = format!("{}: logs in memory have no path", path.display());
        Error::new(ErrorKind::Invalid, text)
    }

    /// Fails with [`ErrorKind::NoSpace`] if a log of `size` bytes would take more memory than the machine has available: all
    /// other logs here fill up in time.
    pub(super) fn check_memory(&self, memory: &dyn PersistentMemory, size: u64) -> Result<()> {
        let Some(available) = available_memory().filter(|_| self.kind == MediumKind::Dram) else { return Ok(()) };
        let logs: u64 = self.directory.borrow().logs.iter().map(|log| log.size).sum();
        let promised = logs.saturating_sub(memory.resident());
        require_memory(size, available, promised)
    }
}

/// Fails if `size` bytes of memory are not `available`, of which `promised` bytes are taken already.
fn require_memory(size: u64, available: u64, promised: u64) -> Result<()> {
    let reserve = (available / 8).min(RESERVE_MAX);
    if available.saturating_sub(promised).saturating_sub(reserve) >= size {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let text = format!(
        "a log of {} MiB in memory: {} MiB are available, of which other logs may take {} MiB, and {} MiB are left to \
         others; take a smaller log",
        mib(size),
        available >> 20,
        mib(promised),
        mib(reserve)
    );
    Err(Error::new(ErrorKind::NoSpace, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_where_something_is_stored_and_given_back() {
        let memory = VolatileMemory::new();
        let at = 5 * CHUNK as u64 - 3;
        memory.store(at, b"abcdef");
        assert_eq!(memory.resident(), 2 * CHUNK as u64);
        let mut found = [9; 8];
        memory.load(at - 1, &mut found);
        assert_eq!(&found, b"\0abcdef\0");
        memory.load(SIZE - 8, &mut found);
        assert_eq!(found, [0; 8], "nothing was ever stored there");
        assert!(memory.discard(at, 2));
        memory.load(at - 1, &mut found);
        assert_eq!(&found, b"\0\0\0cdef\0", "a part of a chunk is zeroed");
        assert!(memory.discard(0, SIZE));
        assert_eq!(memory.resident(), 0);
        memory.load(at - 1, &mut found);
        assert_eq!(found, [0; 8]);
    }

    #[test]
    fn a_log_that_does_not_fit_into_memory_is_refused() {
        require_memory(512 << 20, 1 << 30, 256 << 20).expect("there is enough");
        let refused = require_memory(64 << 30, 8 << 30, 1 << 30).expect_err("too large");
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        let says =
            "a log of 65536 MiB in memory: 8192 MiB are available, of which other logs may take 1024 MiB, and 1024 MiB";
        assert!(refused.to_string().contains(says), "{refused}");
    }
}
