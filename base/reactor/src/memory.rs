//! The memory under buffers: reference-counted blocks, from the heap or from a pool's regions.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use crate::buf::BUF_ALIGN;
use crate::pool;

/// A piece of memory, all of it initialised, and the count of buffers that refer to it.
pub(crate) struct Block {
    refs: AtomicUsize,
    ptr: NonNull<u8>,
    cap: usize,
    source: Source,
}

/// Where a block's memory comes from, and so where it goes.
enum Source {
    /// What the heap gave, which may begin before the block.
    Heap(NonNull<u8>, Layout),
    /// A part of a pool's region.  The pool is named only while the block is out, or the two would keep each other
    /// alive.
    Pool(Option<Arc<pool::Shared>>, Arc<Region>),
}

// SAFETY: a Block is only a piece of memory; who may read or write which part of it is decided by Buf and BufMut,
// which hold disjoint writable parts (BufMut) or only readable ones (Buf).
unsafe impl Send for Block {}
// SAFETY: as above; shared access through Buf only reads.
unsafe impl Sync for Block {}

/// Bytes from which on a heap block is long.
const LONG: usize = 64 << 10;

/// Alignment of a heap block: that of direct I/O for whatever could be a whole number of sectors, so no more than
/// the block is long.
fn alignment(cap: usize) -> usize {
    if cap < 512 { 16 } else { cap.next_power_of_two().min(BUF_ALIGN) }
}

fn allocate(layout: Layout) -> NonNull<u8> {
    // SAFETY: callers never ask for size zero.
    let ptr = unsafe { alloc_zeroed(layout) };
    NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout))
}

impl Block {
    /// Address of the first byte.
    #[inline]
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes.
    #[inline]
    pub(crate) fn cap(&self) -> usize {
        self.cap
    }

    /// The region it lies in, if it is a pool's.
    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match &self.source {
            Source::Heap(..) => None,
            Source::Pool(_, region) => Some(region),
        }
    }
}

/// A counted reference to a block.
pub(crate) struct BlockRef(NonNull<Block>);

// SAFETY: like an Arc<Block>, and Block is Send and Sync.
unsafe impl Send for BlockRef {}
// SAFETY: as above.
unsafe impl Sync for BlockRef {}

impl BlockRef {
    fn new(ptr: NonNull<u8>, cap: usize, source: Source) -> Self {
        let block = Block { refs: AtomicUsize::new(1), ptr, cap, source };
        Self(NonNull::from(Box::leak(Box::new(block))))
    }

    /// A block of `cap` zero bytes from the heap.
    pub(crate) fn heap(cap: usize) -> Self {
        let (size, align) = (cap.max(1), alignment(cap));
        // Long zeroed memory comes fresh from the system, without being cleared again, only at the heap's own
        // alignment; so take some more of it and begin at the first aligned place.
        let layout = if cap < LONG { Some((size, align)) } else { size.checked_add(align).map(|size| (size, 16)) };
        let layout = layout.and_then(|(size, align)| Layout::from_size_align(size, align).ok());
        let layout = layout.expect("buffer capacity overflows the address space");
        let base = allocate(layout);
        // SAFETY: the offset is less than `align`, by which the allocation is longer when it is not aligned itself.
        let ptr = unsafe { base.add(base.as_ptr().align_offset(align)) };
        Self::new(ptr, size, Source::Heap(base, layout))
    }

    /// No other reference exists.
    #[inline]
    pub(crate) fn is_unique(&self) -> bool {
        self.refs.load(Ordering::Acquire) == 1
    }

    /// Both refer to the same block.
    #[inline]
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Deref for BlockRef {
    type Target = Block;
    #[inline]
    fn deref(&self) -> &Block {
        // SAFETY: the block lives as long as it is counted.
        unsafe { self.0.as_ref() }
    }
}

impl Clone for BlockRef {
    #[inline]
    fn clone(&self) -> Self {
        let before = self.refs.fetch_add(1, Ordering::Relaxed);
        // As in Arc: so many can only be leaked, and wrapping around would free the block under its users.
        assert!(before <= isize::MAX as usize, "too many references to a buffer");
        Self(self.0)
    }
}

impl Drop for BlockRef {
    #[inline]
    fn drop(&mut self) {
        if self.refs.fetch_sub(1, Ordering::Release) == 1 {
            self.last();
        }
    }
}

impl BlockRef {
    /// The last reference is gone.
    #[cold]
    #[inline(never)]
    fn last(&mut self) {
        // What others did with the block is over before it is used again or freed.
        fence(Ordering::Acquire);
        // SAFETY: that was the last reference, so the block is ours alone.
        let free = unsafe { FreeBlock::from_last(self.0) };
        free.go_home();
    }
}

/// A block that nobody refers to.
pub(crate) struct FreeBlock(NonNull<Block>);

// SAFETY: it has one owner, and Block is Send.
unsafe impl Send for FreeBlock {}

impl FreeBlock {
    /// # Safety
    /// No reference to the block is left.
    unsafe fn from_last(block: NonNull<Block>) -> Self {
        Self(block)
    }

    fn block(&mut self) -> &mut Block {
        // SAFETY: nobody else refers to it.
        unsafe { self.0.as_mut() }
    }

    fn go_home(mut self) {
        if let Source::Pool(home, _) = &mut self.block().source
            && let Some(home) = home.take()
        {
            home.give_back(self);
        }
    }

    /// Gives it out.
    pub(crate) fn lend(mut self, home: Arc<pool::Shared>) -> BlockRef {
        let block = self.block();
        *block.refs.get_mut() = 1;
        if let Source::Pool(at, _) = &mut block.source {
            *at = Some(home);
        }
        let out = BlockRef(self.0);
        std::mem::forget(self);
        out
    }
}

impl Drop for FreeBlock {
    fn drop(&mut self) {
        // SAFETY: made by `BlockRef::new` out of a box, and nobody else refers to it.
        let block = unsafe { Box::from_raw(self.0.as_ptr()) };
        if let Source::Heap(base, layout) = &block.source {
            // SAFETY: allocated by `BlockRef::heap` with this layout.
            unsafe { dealloc(base.as_ptr(), *layout) };
        }
    }
}

/// Memory of a pool, for several buffers; what is registered with a ring is a region.
pub(crate) struct Region {
    ptr: NonNull<u8>,
    layout: Layout,
    /// Where a ring knows it, as that ring has noted it: see `driver::fixed`.
    pub(crate) note: AtomicU64,
}

// SAFETY: a Region only owns memory; who may use which part is decided by the blocks that lie in it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Memory for `count` blocks of `cap` bytes (a multiple of [`BUF_ALIGN`]), and the blocks.
    pub(crate) fn blocks(cap: usize, count: usize) -> impl Iterator<Item = FreeBlock> {
        let size = cap.checked_mul(count).expect("a pool's region overflows the address space");
        let layout = Layout::from_size_align(size, BUF_ALIGN).expect("a pool's region overflows the address space");
        let region = Arc::new(Self { ptr: allocate(layout), layout, note: AtomicU64::new(0) });
        (0..count).map(move |at| {
            // SAFETY: `at * cap` is within the region.
            let ptr = unsafe { region.ptr.add(at * cap) };
            let block = BlockRef::new(ptr, cap, Source::Pool(None, region.clone()));
            let free = FreeBlock(block.0);
            std::mem::forget(block);
            free
        })
    }

    /// As the kernel takes it.
    pub(crate) fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.ptr.as_ptr().cast(), iov_len: self.layout.size() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `blocks` with this layout, and no block is left that lies in it.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
