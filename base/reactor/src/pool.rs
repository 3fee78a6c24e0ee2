//! Pools of aligned buffers of one size, registered with the ring where the driver supports it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_queue::ArrayQueue;

use crate::buf::{BUF_ALIGN, BufMut};
use crate::memory::{BlockRef, FreeBlock, Region, huge};

/// Bytes of the first region that a pool allocates, and a ring registers (or one buffer, if that is more).
const REGION_BYTES_MIN: usize = 64 << 10;
/// Maximum bytes of a region; regions grow up to it as the pool doubles.
const REGION_BYTES_MAX: usize = 1 << 20;

pub(crate) struct PoolShared {
    free: ArrayQueue<FreeBlock>,
    size: usize,
    keep: usize,
    /// Bytes of the first region, and maximum bytes of a region.
    steps: (usize, usize),
    /// Buffers in regions, in use or free.
    made: AtomicUsize,
    outstanding: AtomicUsize,
    /// Regions, kept alive as long as the pool or a block of it is in use.
    regions: Mutex<Vec<Arc<Region>>>,
}

impl PoolShared {
    /// Returns a block whose last buffer was dropped, on any core, to the pool.
    pub(crate) fn give_back(&self, block: FreeBlock) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
        // No more blocks are made than the queue has space for.
        let full = self.free.push(block).is_err();
        debug_assert!(!full, "more blocks came back than were made");
    }

    fn grow(self: &Arc<Self>) -> Option<FreeBlock> {
        let made = self.made.load(Ordering::Relaxed);
        let wanted = made.clamp(self.steps.0 / self.size, self.steps.1 / self.size).max(1);
        let count = wanted.min(self.keep - made.min(self.keep));
        if count == 0 {
            return None;
        }
        // When two cores grow the pool at once, one of them does; the other allocates from the heap this time.
        self.made.compare_exchange(made, made + count, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        let region = Region::new(self.size, count, Arc::as_ptr(self));
        // SAFETY: the region was created just now.
        let mut blocks = unsafe { region.blocks() };
        // Store the region first: its blocks do not keep it alive.
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).push(region.clone());
        let first = blocks.next();
        for block in blocks {
            let full = self.free.push(block).is_err();
            debug_assert!(!full, "more blocks were made than the pool keeps");
        }
        first
    }
}

/// Pool of buffers of `buf_size` bytes; keeps up to `keep` of them for reuse.
///
/// The pool never refuses: past `keep` it allocates and frees.  A user that needs a bound counts its own buffers.
#[derive(Clone)]
pub struct BufPool {
    shared: Arc<PoolShared>,
}

impl BufPool {
    /// Creates a pool of buffers of `buf_size` bytes (a multiple of [`BUF_ALIGN`]).  Memory is allocated on use.
    pub fn new(buf_size: usize, keep: usize) -> Self {
        Self::with_steps(buf_size, keep, (REGION_BYTES_MIN, REGION_BYTES_MAX))
    }

    /// Creates a pool of 2 MiB in one huge page, where the system has one available: fewer TLB misses.  Buffers past 2
    /// MiB come from the heap.
    ///
    /// Meant for memory that is used completely: all of it is allocated at once.
    pub fn huge(buf_size: usize) -> Self {
        let pool = Self::with_steps(buf_size, huge::PAGE / buf_size, (huge::PAGE, huge::PAGE));
        // The first buffer allocates the region.
        drop(pool.get());
        pool
    }

    fn with_steps(buf_size: usize, keep: usize, steps: (usize, usize)) -> Self {
        assert!(buf_size > 0 && buf_size.is_multiple_of(BUF_ALIGN), "pool buffers come in multiples of {BUF_ALIGN}");
        let keep = keep.max(1);
        let shared = PoolShared {
            free: ArrayQueue::new(keep),
            size: buf_size,
            keep,
            made: AtomicUsize::new(0),
            outstanding: AtomicUsize::new(0),
            steps,
            regions: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns an empty buffer.  Its memory may hold old content past its length.
    pub fn get(&self) -> BufMut {
        let block = match self.shared.free.pop().or_else(|| self.shared.grow()) {
            Some(block) => {
                self.shared.outstanding.fetch_add(1, Ordering::Relaxed);
                // SAFETY: a block from the queue, or from `grow`, lies in this pool's regions.
                unsafe { block.lend(&self.shared) }
            }
            None => BlockRef::heap(self.shared.size),
        };
        BufMut::from_block(block)
    }

    /// Returns the size of a buffer in bytes.
    pub fn buf_size(&self) -> usize {
        self.shared.size
    }

    /// Returns the number of kept buffers in use now; those past `keep` are not counted.
    pub fn outstanding(&self) -> usize {
        self.shared.outstanding.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for BufPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufPool({} x {} bytes out, {} free)", self.outstanding(), self.buf_size(), self.shared.free.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_from_other_threads() {
        let pool = BufPool::new(8192, 1);
        let mut buf = pool.get();
        buf.extend_from_slice(b"x");
        let first = buf.as_ptr();
        let shared = buf.freeze();
        assert_eq!(pool.outstanding(), 1);
        std::thread::spawn(move || drop(shared)).join().expect("the thread drops the buffer");
        assert_eq!(pool.outstanding(), 0);
        assert_eq!(pool.get().as_ptr(), first);
    }

    #[test]
    fn past_what_it_keeps_it_allocates() {
        let pool = BufPool::new(4096, 3);
        let bufs: Vec<BufMut> = (0..10).map(|_| pool.get()).collect();
        let mut places: Vec<usize> = bufs.iter().map(|buf| buf.as_ptr() as usize).collect();
        places.sort_unstable();
        assert!(places.iter().all(|place| place.is_multiple_of(BUF_ALIGN)));
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 4096), "buffers overlap");
        assert_eq!(pool.outstanding(), 3);
        drop(bufs);
        assert_eq!(pool.outstanding(), 0);
    }

    #[test]
    fn buffers_outlive_their_pool() {
        let pool = BufPool::new(4096, 300);
        let mut bufs: Vec<BufMut> = (0..300).map(|_| pool.get()).collect();
        drop(pool);
        for (at, buf) in bufs.iter_mut().enumerate() {
            buf.extend_from_slice(&[at as u8; 4096]);
        }
        assert!(bufs.iter().enumerate().all(|(at, buf)| buf.iter().all(|&byte| byte == at as u8)));
    }

    #[test]
    fn a_huge_pool_is_one_piece_and_outlives_its_handle() {
        const COUNT: usize = huge::PAGE / 4096;
        let pool = BufPool::huge(4096);
        let mut bufs: Vec<BufMut> = (0..COUNT).map(|_| pool.get()).collect();
        let places: Vec<usize> = bufs.iter().map(|buf| buf.as_ptr() as usize).collect();
        let first = *places.iter().min().expect("there are buffers");
        assert!(first.is_multiple_of(huge::PAGE));
        assert_eq!(places.iter().max(), Some(&(first + huge::PAGE - 4096)), "one piece");
        for (at, buf) in bufs.iter_mut().enumerate() {
            buf.extend_from_slice(&[at as u8; 4096]);
        }
        drop(bufs.split_off(COUNT / 2));
        assert_eq!(pool.outstanding(), COUNT / 2);
        drop(pool);
        assert!(bufs.iter().enumerate().all(|(at, buf)| buf.iter().all(|&byte| byte == at as u8)));
    }

    #[test]
    fn past_a_huge_page_the_heap_gives() {
        let pool = BufPool::huge(1 << 20);
        let mut bufs: Vec<BufMut> = (0..4).map(|_| pool.get()).collect();
        bufs.iter_mut().for_each(|buf| buf.extend_from_slice(b"x"));
        assert_eq!(pool.outstanding(), 2);
    }

    #[test]
    fn threads_share_a_pool() {
        let pool = BufPool::new(4096, 64);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let mut bufs: Vec<BufMut> = (0..round % 40).map(|_| pool.get()).collect();
                        bufs.iter_mut().for_each(|buf| buf.extend_from_slice(&[thread; 100]));
                        assert!(bufs.iter().all(|buf| buf.iter().all(|&byte| byte == thread)));
                    }
                });
            }
        });
        assert_eq!(pool.outstanding(), 0);
    }
}
