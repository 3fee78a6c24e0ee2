//! Pools of aligned buffers of one size, registered with the ring where the driver can.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::buf::{BUF_ALIGN, Block, BufMut};

/// Where a pooled block goes when its last buffer is dropped, on whichever core that happens.
pub(crate) trait PoolHome: Send + Sync {
    /// Takes the memory back.
    fn give_back(&self, ptr: NonNull<u8>, cap: usize);
}

struct FreeBlock(NonNull<u8>);
// SAFETY: a free block belongs to nobody but the pool.
unsafe impl Send for FreeBlock {}

struct Shared {
    free: ArrayQueue<FreeBlock>,
    size: usize,
    outstanding: AtomicUsize,
}

impl PoolHome for Shared {
    fn give_back(&self, ptr: NonNull<u8>, cap: usize) {
        debug_assert_eq!(cap, self.size);
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
        if self.free.push(FreeBlock(ptr)).is_err() {
            // SAFETY: allocated in `Pool::get` with this layout; the pool keeps no reference to it.
            unsafe { std::alloc::dealloc(ptr.as_ptr(), Block::layout(self.size)) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        while let Some(block) = self.free.pop() {
            // SAFETY: as in `give_back`.
            unsafe { std::alloc::dealloc(block.0.as_ptr(), Block::layout(self.size)) };
        }
    }
}

/// A pool of buffers of `buf_size` bytes; keeps up to `keep` free ones for reuse.
///
/// The pool never refuses: past `keep` it allocates and frees.  Who must be bounded counts its own buffers.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// A pool of buffers of `buf_size` bytes (a multiple of [`BUF_ALIGN`]).
    pub fn new(buf_size: usize, keep: usize) -> Self {
        assert!(buf_size > 0 && buf_size.is_multiple_of(BUF_ALIGN), "pool buffers come in multiples of {BUF_ALIGN}");
        let shared = Shared { free: ArrayQueue::new(keep.max(1)), size: buf_size, outstanding: AtomicUsize::new(0) };
        Self { shared: Arc::new(shared) }
    }

    /// An empty buffer.  Its memory may hold old content past its length.
    pub fn get(&self) -> BufMut {
        self.shared.outstanding.fetch_add(1, Ordering::Relaxed);
        let ptr = match self.shared.free.pop() {
            Some(block) => block.0,
            None => {
                let layout = Block::layout(self.shared.size);
                // SAFETY: the size is not zero.
                let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
                NonNull::new(ptr).unwrap_or_else(|| std::alloc::handle_alloc_error(layout))
            }
        };
        BufMut::from_block(Block::from_pool(ptr, self.shared.size, self.shared.clone()))
    }

    /// Bytes a buffer.
    pub fn buf_size(&self) -> usize {
        self.shared.size
    }

    /// Buffers in use now.
    pub fn outstanding(&self) -> usize {
        self.shared.outstanding.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} x {} bytes out, {} free)", self.outstanding(), self.buf_size(), self.shared.free.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_from_other_threads() {
        let pool = Pool::new(8192, 2);
        let mut buf = pool.get();
        buf.extend_from_slice(b"x");
        let first = buf.as_ptr();
        let shared = buf.freeze();
        std::thread::spawn(move || drop(shared)).join().expect("the thread drops the buffer");
        assert_eq!(pool.outstanding(), 0);
        assert_eq!(pool.get().as_ptr(), first);
    }
}
