//! Memory of buffers: reference-counted blocks, from the heap or from a pool's regions.
//!
//! Reference counts are stored apart from the bytes.  Those of a region are contiguous, 16 bytes each: random use of a
//! pool of a million blocks costs one cache miss for the count and one for the bytes, and the counts of 64 MiB of pages
//! fit into a second-level cache.

pub(crate) mod huge;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};

use crate::buf::BUF_ALIGN;
use crate::pool;

/// Reference count of a piece of memory, and its location.
pub(crate) struct Block {
    refs: AtomicU32,
    /// Index within the region.
    index: u32,
    /// Region that contains it; null for a heap block, and then it is the first field of a [`HeapBlock`].
    region: *const Region,
}

const _: () = assert!(size_of::<Block>() == 16, "the counts of a region lie close together");

// SAFETY: a Block is only a count and a location; Buf and BufMut decide who may read or write which part of the memory:
// they refer to disjoint writable parts (BufMut) or only readable ones (Buf).
unsafe impl Send for Block {}
// SAFETY: as above; shared access through Buf only reads.
unsafe impl Sync for Block {}

/// Block whose memory comes from the heap.
#[repr(C)]
struct HeapBlock {
    /// First, so that a pointer to it is a pointer to the whole.
    block: Block,
    ptr: NonNull<u8>,
    cap: usize,
    memory: HeapMemory,
}

/// Length in bytes from which a heap block is allocated at the heap's own alignment.
const LONG: usize = 64 << 10;

/// Returns the alignment of a heap block: that of direct I/O for any length that could be a whole number of sectors, so
/// no more than the block's length rounded up to a power of two.
fn alignment(cap: usize) -> usize {
    if cap < 512 { 16 } else { cap.next_power_of_two().min(BUF_ALIGN) }
}

/// Heap allocation; it may begin before the aligned address that is used.
struct HeapMemory {
    base: NonNull<u8>,
    layout: Layout,
}

impl HeapMemory {
    /// Allocates `size` zero bytes (one at least) at a multiple of `align`; returns their address too.
    fn new(size: usize, align: usize) -> (NonNull<u8>, Self) {
        // Long zeroed memory comes fresh from the system, without being cleared again, only at the heap's own
        // alignment; so allocate `align` bytes more and begin at the first aligned address.
        let layout = if size < LONG { Some((size, align)) } else { size.checked_add(align).map(|size| (size, 16)) };
        let layout = layout.and_then(|(size, align)| Layout::from_size_align(size, align).ok());
        let layout = layout.expect("the size of a buffer overflows the address space");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the offset is less than `align`, by which the allocation is longer when it is not aligned itself.
        let ptr = unsafe { base.add(base.as_ptr().align_offset(align)) };
        (ptr, Self { base, layout })
    }

    /// # Safety
    /// The memory is not used any more.
    unsafe fn free(&self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// Counted reference to a block.
pub(crate) struct BlockRef(NonNull<Block>);

// SAFETY: like an Arc<Block>, and Block is Send and Sync.
unsafe impl Send for BlockRef {}
// SAFETY: as above.
unsafe impl Sync for BlockRef {}

impl BlockRef {
    /// Allocates a block of `cap` zero bytes from the heap.
    pub(crate) fn heap(cap: usize) -> Self {
        let cap = cap.max(1);
        let (ptr, memory) = HeapMemory::new(cap, alignment(cap));
        let block = Block { refs: AtomicU32::new(1), index: 0, region: ptr::null() };
        let block = Box::new(HeapBlock { block, ptr, cap, memory });
        Self(NonNull::from(Box::leak(block)).cast())
    }

    #[inline]
    fn block(&self) -> &Block {
        // SAFETY: the block lives as long as it is counted.
        unsafe { self.0.as_ref() }
    }

    /// Returns the region that contains it, if it is a pool's.
    #[inline]
    pub(crate) fn region(&self) -> Option<&Region> {
        // SAFETY: a lent block keeps its pool alive, and the pool its regions.
        unsafe { self.block().region.as_ref() }
    }

    fn heap_block(&self) -> &HeapBlock {
        debug_assert!(self.block().region.is_null(), "a block of a region");
        // SAFETY: a block without a region begins a HeapBlock, which lives as long as the block is counted.
        unsafe { self.0.cast().as_ref() }
    }

    /// Returns the address of the first byte.
    #[inline]
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        match self.region() {
            // SAFETY: the block is one of the region's.
            Some(region) => unsafe { region.ptr.add(self.block().index as usize * region.cap) },
            None => self.heap_block().ptr,
        }
    }

    /// Returns the block's length in bytes.
    #[inline]
    pub(crate) fn cap(&self) -> usize {
        self.region().map_or_else(|| self.heap_block().cap, |region| region.cap)
    }

    /// Returns whether no other reference exists.
    #[inline]
    pub(crate) fn is_unique(&self) -> bool {
        self.block().refs.load(Ordering::Acquire) == 1
    }

    /// Returns whether both refer to the same block.
    #[inline]
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// Releases the block after the last reference is gone.
    #[cold]
    #[inline(never)]
    fn last(&mut self) {
        // Accesses through other references complete before the block is reused or freed.
        fence(Ordering::Acquire);
        let region = self.block().region;
        if region.is_null() {
            // SAFETY: made by `BlockRef::heap` out of a box, and no other reference exists.
            let block = unsafe { Box::from_raw(self.0.cast::<HeapBlock>().as_ptr()) };
            // SAFETY: that was the last reference.
            unsafe { block.memory.free() };
            return;
        }
        // SAFETY: `lend` counted the pool once for this block, so the pool and its region exist.
        let home = unsafe { Arc::from_raw((*region).home) };
        home.give_back(FreeBlock(self.0));
    }
}

impl Clone for BlockRef {
    #[inline]
    fn clone(&self) -> Self {
        let before = self.block().refs.fetch_add(1, Ordering::Relaxed);
        // As in Arc: so high a count means leaked references, and wrapping around would free the block under its users.
        if before > u32::MAX / 2 {
            std::process::abort();
        }
        Self(self.0)
    }
}

impl Drop for BlockRef {
    #[inline]
    fn drop(&mut self) {
        if self.block().refs.fetch_sub(1, Ordering::Release) == 1 {
            self.last();
        }
    }
}

/// Block of a region that no buffer refers to.  It does not keep its region alive: its pool owns both.
pub(crate) struct FreeBlock(NonNull<Block>);

// SAFETY: it has one owner, and Block is Send.
unsafe impl Send for FreeBlock {}

impl FreeBlock {
    /// Lends the block; it keeps its pool alive until it is returned.
    ///
    /// # Safety
    /// The block is one of `home`'s regions.
    pub(crate) unsafe fn lend(self, home: &Arc<pool::PoolShared>) -> BlockRef {
        // `last` releases that count.
        let _ = Arc::into_raw(home.clone());
        let block = BlockRef(self.0);
        block.block().refs.store(1, Ordering::Relaxed);
        block
    }
}

/// Memory of a pool, for several buffers; the unit that is registered with a ring.
pub(crate) struct Region {
    memory: Memory,
    ptr: NonNull<u8>,
    /// Bytes of a block.
    cap: usize,
    blocks: Box<[Block]>,
    myself: Weak<Self>,
    /// Pool that owns the region; every lent block keeps it alive.
    home: *const pool::PoolShared,
    /// Registration noted by the ring that used the region last: see `driver::fixed`.
    pub(crate) note: AtomicU64,
}

// SAFETY: a Region only owns memory; the blocks in it decide who may use which part.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Source of a region's memory, to which it is returned.
enum Memory {
    Heap(HeapMemory),
    /// Memory of one huge page.
    Huge,
}

impl Region {
    /// Allocates memory for `count` blocks of `cap` bytes (a multiple of [`BUF_ALIGN`]) of the pool `home`, which keeps
    /// the region alive.  Pages are populated on first use.
    pub(crate) fn new(cap: usize, count: usize, home: *const pool::PoolShared) -> Arc<Self> {
        let size = cap.checked_mul(count).expect("a pool's region overflows the address space");
        let huge = if size == huge::PAGE { huge::take() } else { None };
        let (ptr, memory) = huge.map_or_else(
            || {
                let (ptr, memory) = HeapMemory::new(size, BUF_ALIGN);
                (ptr, Memory::Heap(memory))
            },
            |ptr| (ptr, Memory::Huge),
        );
        Arc::new_cyclic(|myself| {
            let index = |index| u32::try_from(index).expect("a pool's region has fewer blocks");
            let block = |at| Block { refs: AtomicU32::new(0), index: index(at), region: myself.as_ptr() };
            let blocks = (0..count).map(block).collect();
            Self { memory, ptr, cap, blocks, myself: myself.clone(), home, note: AtomicU64::new(0) }
        })
    }

    /// Returns all blocks as free blocks.
    ///
    /// # Safety
    /// Called once.
    pub(crate) unsafe fn blocks(&self) -> impl Iterator<Item = FreeBlock> {
        self.blocks.iter().map(|block| FreeBlock(NonNull::from(block)))
    }

    /// Returns the region's length in bytes.
    fn size(&self) -> usize {
        self.cap * self.blocks.len()
    }

    /// Returns a reference that keeps the region alive after its pool is gone.
    pub(crate) fn keep(&self) -> Arc<Self> {
        self.myself.upgrade().expect("a region that is looked at is there")
    }

    /// Returns the region as a system call argument.
    pub(crate) fn iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.ptr.as_ptr().cast(), iov_len: self.size() }
    }

    /// Returns whether the region should be registered with a device or a ring.  A huge page should not: it holds
    /// stored data and takes no part in I/O, and pinning it would populate all of it.
    pub(crate) fn may_be_registered(&self) -> bool {
        matches!(self.memory, Memory::Heap(_))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.memory {
            // SAFETY: no block is lent.
            Memory::Heap(memory) => unsafe { memory.free() },
            // SAFETY: taken in `new`, and no block is lent.
            Memory::Huge => unsafe { huge::give_back(self.ptr) },
        }
    }
}
