//! Aligned, reference-counted buffers.
//!
//! A [`BufMut`] has one owner and can be filled.  Frozen, it becomes a [`Buf`] that is cheap to clone and slice and can
//! cross cores.  A [`BufList`] is a scatter-gather list: many `Buf`s read as one byte sequence.  All memory is zeroed
//! when it is first allocated, so no uninitialised byte is ever read.

mod content;

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::memory::{BlockRef, Region};
pub use content::is_zero;

/// Alignment of every buffer, in bytes: the largest logical sector size that O_DIRECT requires on supported devices.
/// Shorter buffers are aligned to their length, rounded up to a power of two.
pub const BUF_ALIGN: usize = 4096;

/// Buffer with one owner: `len` bytes filled, space for up to `capacity`.
pub struct BufMut {
    block: BlockRef,
    /// First byte, within the block.
    at: NonNull<u8>,
    len: usize,
    cap: usize,
}

// SAFETY: it refers to memory that its block keeps alive and that no other thread writes.
unsafe impl Send for BufMut {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for BufMut {}

impl BufMut {
    /// Returns an empty heap buffer with space for `capacity` bytes, aligned to [`BUF_ALIGN`].
    pub fn with_capacity(capacity: usize) -> Self {
        Self { cap: capacity, ..Self::from_block(BlockRef::heap(capacity)) }
    }

    /// Returns a buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::with_capacity(len);
        buf.len = len;
        buf
    }

    /// Returns a copy of `data`.
    pub fn copy_of(data: &[u8]) -> Self {
        let mut buf = Self::with_capacity(data.len());
        buf.extend_from_slice(data);
        buf
    }

    pub(crate) fn from_block(block: BlockRef) -> Self {
        let (at, cap) = (block.ptr(), block.cap());
        Self { block, at, len: 0, cap }
    }

    /// Returns the pool region that contains the buffer, if any.
    pub(crate) fn region(&self) -> Option<&Region> {
        self.block.region()
    }

    /// Returns the capacity in bytes.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.cap
    }

    /// Returns the number of bytes that can still be appended.
    #[inline]
    pub fn spare(&self) -> usize {
        self.cap - self.len
    }

    /// Sets the filled length; growing exposes the memory's previous content (zeroes when fresh).
    ///
    /// # Panics
    /// When `len` exceeds the capacity.
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.cap, "length {len} past the buffer's capacity {}", self.cap);
        self.len = len;
    }

    /// Shrinks the capacity to `capacity` bytes, so that a read or receive fills no more than that.
    ///
    /// # Panics
    /// When `capacity` is below the filled length or above the current capacity.
    pub fn limited(mut self, capacity: usize) -> Self {
        assert!(self.len <= capacity && capacity <= self.cap, "limit {capacity} of a buffer with {}", self.cap);
        self.cap = capacity;
        self
    }

    /// Sets the filled length to zero.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends `data`.
    ///
    /// # Panics
    /// When `data` does not fit.
    #[inline]
    pub fn extend_from_slice(&mut self, data: &[u8]) {
        let end = self.len.checked_add(data.len()).filter(|&end| end <= self.cap).expect("append past the capacity");
        let len = self.len;
        self.len = end;
        self[len..].copy_from_slice(data);
    }

    /// Returns the unfilled rest of the buffer.
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        // SAFETY: this BufMut alone refers to the `cap` bytes from `at`, all of it initialised memory.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().add(self.len), self.cap - self.len) }
    }

    /// Returns the address of the first byte, for the drivers.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Splits off the first `len` filled bytes as a shared buffer; this one keeps the rest.
    ///
    /// # Panics
    /// When fewer than `len` bytes are filled.
    #[inline]
    pub fn split_to(&mut self, len: usize) -> Buf {
        assert!(len <= self.len, "split at {len} of a buffer with {} bytes", self.len);
        let head = Buf { block: self.block.clone(), at: self.at, len };
        self.advance(len);
        head
    }

    /// Drops the first `len` filled bytes and their space.
    ///
    /// # Panics
    /// When fewer than `len` bytes are filled.
    #[inline]
    pub fn advance(&mut self, len: usize) {
        assert!(len <= self.len, "advance by {len} of a buffer with {} bytes", self.len);
        // SAFETY: the filled part is that long, so the address is within the block or at its end.
        self.at = unsafe { self.at.add(len) };
        self.len -= len;
        self.cap -= len;
    }

    /// Restores the allocation's full capacity after parts were split off or dropped.  Works only if this buffer is
    /// empty and no other buffer refers to the allocation; returns whether it did.
    pub fn reclaim(&mut self) -> bool {
        let alone = self.len == 0 && self.block.is_unique();
        if alone {
            self.at = self.block.ptr();
            self.cap = self.block.cap();
        }
        alone
    }

    /// Ends writing: the filled part becomes a shareable [`Buf`].
    #[inline]
    pub fn freeze(self) -> Buf {
        Buf { block: self.block, at: self.at, len: self.len }
    }
}

impl Deref for BufMut {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: this BufMut alone refers to that part of the block, all of it initialised memory.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }
}

impl DerefMut for BufMut {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} of {} bytes)", self.len, self.cap)
    }
}

/// Shared, read-only bytes; cloning and slicing copy nothing.
#[derive(Clone)]
pub struct Buf {
    block: BlockRef,
    /// First byte, within the block.
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it refers to memory that its block keeps alive and that no thread writes.
unsafe impl Send for Buf {}
// SAFETY: as above.
unsafe impl Sync for Buf {}

impl Buf {
    /// Returns a copy of `data`.
    pub fn copy_of(data: &[u8]) -> Self {
        BufMut::copy_of(data).freeze()
    }

    /// Returns a buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        BufMut::zeroed(len).freeze()
    }

    /// Returns a part of the buffer that shares its memory.
    ///
    /// # Panics
    /// When `range` is not within the buffer.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        // SAFETY: the range is within the buffer.
        Self { block: self.block.clone(), at: unsafe { self.at.add(range.start) }, len: range.end - range.start }
    }

    /// Splits off the first `len` bytes; this one keeps the rest.
    ///
    /// # Panics
    /// When the buffer has fewer than `len` bytes.
    #[inline]
    pub fn split_to(&mut self, len: usize) -> Self {
        let head = self.slice(0..len);
        self.advance(len);
        head
    }

    /// Drops the first `len` bytes.
    ///
    /// # Panics
    /// When the buffer has fewer than `len` bytes.
    #[inline]
    pub fn advance(&mut self, len: usize) {
        assert!(len <= self.len, "advance by {len} of a buffer with {} bytes", self.len);
        // SAFETY: the buffer is that long, so the address is within the block or at its end.
        self.at = unsafe { self.at.add(len) };
        self.len -= len;
    }

    /// Returns whether address and length are multiples of `align` bytes, as O_DIRECT requires.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(align) && self.len.is_multiple_of(align)
    }

    /// Prefetches the first `len` bytes into the processor's caches, for data that is sent or compared soon, but not
    /// yet.
    pub fn prefetch(&self, len: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in self[..len.min(self.len)].chunks(64) {
            // SAFETY: a hint that never faults and changes nothing; SSE is part of x86-64.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = len;
    }

    /// Returns the bytes for writing; `None` when another buffer refers to the same memory.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        if !self.block.is_unique() {
            return None;
        }
        // SAFETY: the only reference to the block is this buffer's, which is borrowed uniquely, so no other code reads
        // or writes it or can get to a reference while the slice lives; all of it is initialised memory.
        Some(unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) })
    }

    /// Returns the bytes of memory that this buffer keeps alive, its neighbours in the same allocation included.
    #[inline]
    pub fn retained(&self) -> usize {
        self.block.cap()
    }

    /// Returns the pool region that contains the buffer, if any.
    pub(crate) fn region(&self) -> Option<&Region> {
        self.block.region()
    }

    /// Returns whether `next` begins in memory where this buffer ends.
    #[inline]
    fn goes_on(&self, next: &Self) -> bool {
        // SAFETY: the end of the buffer is within the block or at its end.
        self.block.same(&next.block) && unsafe { self.at.add(self.len) } == next.at
    }
}

impl Deref for Buf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the BufMut gave this part up when it was frozen or split off, so it is not written any more, and the
        // reference count keeps the memory alive.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

impl From<BufMut> for Buf {
    #[inline]
    fn from(buf: BufMut) -> Self {
        buf.freeze()
    }
}

/// Scatter-gather list: buffers read as one byte sequence.
///
/// Most lists have one part or none.  Those need no allocation, and a list is no larger than its one part, because
/// lists are moved in messages and requests far more often than they are read.
#[derive(Clone)]
pub struct BufList(Parts);

#[derive(Clone)]
enum Parts {
    One(Buf),
    /// Empty (`None`), or several parts.
    Others(Option<Box<Several>>),
}

const _: () = assert!(size_of::<BufList>() == size_of::<Buf>());

#[derive(Clone)]
struct Several {
    parts: Vec<Buf>,
    /// Total bytes.
    len: usize,
}

impl Default for BufList {
    fn default() -> Self {
        Self(Parts::Others(None))
    }
}

impl BufList {
    /// Returns an empty list.
    #[inline]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty list with capacity for `parts` parts.
    pub fn with_room(parts: usize) -> Self {
        if parts <= 1 {
            return Self::default();
        }
        Self(Parts::Others(Some(Box::new(Several { parts: Vec::with_capacity(parts), len: 0 }))))
    }

    /// Returns a list of `len` zero bytes; long lists share one zeroed buffer.
    pub fn zeroes(len: usize) -> Self {
        const UNIT: usize = 128 * 1024;
        let unit = Buf::zeroed(len.min(UNIT));
        let mut list = Self::new();
        while list.len() < len {
            list.push(unit.slice(0..(len - list.len()).min(UNIT)));
        }
        list
    }

    /// Appends a buffer.  Empty ones are skipped, and one that is contiguous in memory with the last part is merged
    /// into it.
    #[inline]
    pub fn push(&mut self, buf: Buf) {
        if buf.is_empty() {
            return;
        }
        match &mut self.0 {
            Parts::Others(None) => self.0 = Parts::One(buf),
            Parts::One(only) if only.goes_on(&buf) => only.len += buf.len,
            Parts::One(only) => {
                let mut parts = Vec::with_capacity(4);
                let len = only.len + buf.len;
                parts.extend([only.clone(), buf]);
                self.0 = Parts::Others(Some(Box::new(Several { parts, len })));
            }
            Parts::Others(Some(several)) => {
                several.len += buf.len;
                match several.parts.last_mut() {
                    Some(last) if last.goes_on(&buf) => last.len += buf.len,
                    _ => several.parts.push(buf),
                }
            }
        }
    }

    /// Appends another list; parts that are contiguous in memory at the boundary are merged.
    pub fn append(&mut self, other: BufList) {
        match other.0 {
            Parts::One(only) => self.push(only),
            Parts::Others(None) => {}
            Parts::Others(Some(several)) if self.is_empty() => self.0 = Parts::Others(Some(several)),
            Parts::Others(Some(several)) => several.parts.into_iter().for_each(|part| self.push(part)),
        }
    }

    /// Returns the total bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Parts::One(only) => only.len,
            Parts::Others(several) => several.as_ref().map_or(0, |several| several.len),
        }
    }

    /// Returns whether the list has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the buffers in order.
    #[inline]
    pub fn parts(&self) -> &[Buf] {
        match &self.0 {
            Parts::One(only) => std::slice::from_ref(only),
            Parts::Others(several) => several.as_ref().map_or(&[], |several| &several.parts),
        }
    }

    /// Returns the bytes in `range`, sharing the memory.
    ///
    /// # Panics
    /// When `range` is not within the list.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "slice {range:?} of {} bytes", self.len());
        let mut list = Self::new();
        let mut at = 0;
        for part in self.parts() {
            let from = range.start.max(at);
            let to = range.end.min(at + part.len());
            if from < to {
                list.push(part.slice(from - at..to - at));
            }
            at += part.len();
            if at >= range.end {
                break;
            }
        }
        list
    }

    /// Copies all bytes into `out`.
    ///
    /// # Panics
    /// When `out` has another length than the list.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len(), "copy of {} bytes into {}", self.len(), out.len());
        let mut at = 0;
        for part in self.parts() {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// Copies all bytes into one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        self.copy_to(&mut out);
        out
    }

    /// Returns one contiguous buffer: the only part without copying, several parts copied together.
    pub fn into_contiguous(self) -> Buf {
        if let Parts::One(only) = self.0 {
            return only;
        }
        let mut out = BufMut::zeroed(self.len());
        self.copy_to(&mut out);
        out.freeze()
    }
}

impl From<Buf> for BufList {
    #[inline]
    fn from(buf: Buf) -> Self {
        let mut list = Self::new();
        list.push(buf);
        list
    }
}

impl From<BufMut> for BufList {
    #[inline]
    fn from(buf: BufMut) -> Self {
        buf.freeze().into()
    }
}

impl FromIterator<Buf> for BufList {
    fn from_iter<I: IntoIterator<Item = Buf>>(bufs: I) -> Self {
        let mut list = Self::new();
        bufs.into_iter().for_each(|buf| list.push(buf));
        list
    }
}

impl PartialEq<[u8]> for BufList {
    fn eq(&self, other: &[u8]) -> bool {
        if self.len() != other.len() {
            return false;
        }
        let mut at = 0;
        self.parts().iter().all(|part| {
            let same = part[..] == other[at..at + part.len()];
            at += part.len();
            same
        })
    }
}

impl fmt::Debug for BufList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufList({} bytes in {} parts)", self.len(), self.parts().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_parts_are_disjoint_and_outlive_each_other() {
        let mut buf = BufMut::with_capacity(64);
        buf.extend_from_slice(b"headtail");
        let head = buf.split_to(4);
        buf[0] = b'T';
        buf.extend_from_slice(b"!");
        assert_eq!(&head[..], b"head");
        let tail = buf.freeze();
        drop(head);
        assert_eq!(&tail[..], b"Tail!");
    }

    #[test]
    fn room_can_be_given_up_at_the_front() {
        let mut buf = BufMut::copy_of(b"headtail");
        buf.advance(4);
        assert_eq!((&buf[..], buf.spare()), (&b"tail"[..], 0));
    }

    #[test]
    fn room_comes_back_when_nobody_else_refers_to_it() {
        let mut buf = BufMut::copy_of(b"headtail");
        let head = buf.split_to(4);
        assert!(!buf.reclaim(), "it is not empty");
        buf.advance(4);
        assert!(!buf.reclaim(), "the head is still there");
        assert_eq!(&head[..], b"head");
        drop(head);
        assert!(buf.reclaim());
        assert_eq!((buf.len(), buf.spare()), (0, 8));
    }

    #[test]
    fn only_who_is_alone_changes_bytes() {
        let mut buf = Buf::copy_of(b"headtail").slice(4..8);
        buf.get_mut().expect("alone")[0] = b'T';
        let other = buf.clone();
        assert!(buf.get_mut().is_none());
        assert_eq!(&other[..], b"Tail");
        drop(other);
        assert!(buf.get_mut().is_some());
        let mut growing = BufMut::copy_of(b"headtail");
        let mut head = growing.split_to(4);
        assert!(head.get_mut().is_none(), "the rest may still be written");
    }

    #[test]
    fn lists_slice_across_parts() {
        let list: BufList = [&b"abc"[..], b"", b"defg", b"h"].into_iter().map(Buf::copy_of).collect();
        assert_eq!(list.parts().len(), 3);
        assert_eq!(list.slice(2..5).to_vec(), b"cde");
        assert!(list.slice(0..8) == b"abcdefgh"[..]);
        assert!(list.slice(3..3).is_empty());
    }

    #[test]
    fn lists_that_were_cut_grow_together_again() {
        let whole = BufList::from(Buf::copy_of(b"abcdefgh"));
        let mut list = whole.slice(0..3);
        list.append(whole.slice(3..5));
        list.append(BufList::new());
        list.append(whole.slice(5..8));
        assert_eq!((list.parts().len(), list.len()), (1, 8));
        list.append(whole.slice(0..2));
        assert!(list == b"abcdefghab"[..]);
        assert_eq!(list.parts().len(), 2);
    }

    #[test]
    fn zeroes_of_any_length() {
        for len in [0, 1, 128 * 1024, 300_001] {
            let list = BufList::zeroes(len);
            assert_eq!(list.len(), len);
            assert!(list.to_vec().iter().all(|&byte| byte == 0));
        }
    }
}
