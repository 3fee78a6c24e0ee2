//! Aligned, reference-counted buffers.
//!
//! A [`BufMut`] is owned by one holder and can be filled; frozen, it becomes a [`Buf`] that is cheap to clone and
//! slice and can cross cores.  A [`BufList`] is scatter-gather: many `Buf`s read as one run of bytes.
//! All memory is zeroed when it is first allocated, so no byte that is read was never written.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::memory::{BlockRef, Region};

/// Alignment of every buffer, in bytes: the largest logical sector size a device here asks for O_DIRECT.
/// Buffers that are shorter than that are aligned to their length, rounded up to a power of two.
pub const BUF_ALIGN: usize = 4096;

/// A buffer with one owner: `len` bytes filled, room up to `capacity`.
pub struct BufMut {
    block: BlockRef,
    /// Its first byte, within the block.
    at: NonNull<u8>,
    len: usize,
    cap: usize,
}

// SAFETY: it refers to memory that its block keeps and nobody else writes, wherever it is.
unsafe impl Send for BufMut {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for BufMut {}

impl BufMut {
    /// An empty buffer from the heap with room for `capacity` bytes, aligned to [`BUF_ALIGN`].
    pub fn with_capacity(capacity: usize) -> Self {
        Self { cap: capacity, ..Self::from_block(BlockRef::heap(capacity)) }
    }

    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::with_capacity(len);
        buf.len = len;
        buf
    }

    /// A copy of `data`.
    pub fn copy_of(data: &[u8]) -> Self {
        let mut buf = Self::with_capacity(data.len());
        buf.extend_from_slice(data);
        buf
    }

    pub(crate) fn from_block(block: BlockRef) -> Self {
        let (at, cap) = (block.ptr(), block.cap());
        Self { block, at, len: 0, cap }
    }

    /// The pool's region that the buffer lies in.
    pub(crate) fn region(&self) -> Option<&Region> {
        self.block.region()
    }

    /// Bytes this buffer can hold.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.cap
    }

    /// Bytes that can still be appended.
    #[inline]
    pub fn spare(&self) -> usize {
        self.cap - self.len
    }

    /// Sets the filled length; growing exposes whatever the memory held (zeroes when fresh).
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.cap, "length {len} past the buffer's capacity {}", self.cap);
        self.len = len;
    }

    /// Gives up the room past `capacity` bytes, so that a read or receive fills no more than that.
    pub fn limited(mut self, capacity: usize) -> Self {
        assert!(self.len <= capacity && capacity <= self.cap, "limit {capacity} of a buffer with {}", self.cap);
        self.cap = capacity;
        self
    }

    /// Forgets the content.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends `data`, which must fit.
    #[inline]
    pub fn extend_from_slice(&mut self, data: &[u8]) {
        let end = self.len.checked_add(data.len()).filter(|&end| end <= self.cap).expect("append past the capacity");
        let len = self.len;
        self.len = end;
        self[len..].copy_from_slice(data);
    }

    /// The unfilled rest of the buffer.
    #[inline]
    pub fn spare_mut(&mut self) -> &mut [u8] {
        // SAFETY: this BufMut alone refers to the `cap` bytes from `at`, all of it initialised memory.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().add(self.len), self.cap - self.len) }
    }

    /// Address of the first byte, for the drivers.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Cuts off the first `len` filled bytes as a shared buffer; this one keeps the rest.
    #[inline]
    pub fn split_to(&mut self, len: usize) -> Buf {
        assert!(len <= self.len, "split at {len} of a buffer with {} bytes", self.len);
        let head = Buf { block: self.block.clone(), at: self.at, len };
        self.advance(len);
        head
    }

    /// Forgets the first `len` filled bytes; their room is given up too.
    #[inline]
    pub fn advance(&mut self, len: usize) {
        assert!(len <= self.len, "advance by {len} of a buffer with {} bytes", self.len);
        // SAFETY: the filled part is that long, so the place is within the block or at its end.
        self.at = unsafe { self.at.add(len) };
        self.len -= len;
        self.cap -= len;
    }

    /// Takes back all room of the allocation that was given up or cut off, if no other buffer refers to it any more
    /// and this one is empty; true if so.
    pub fn reclaim(&mut self) -> bool {
        let alone = self.len == 0 && self.block.is_unique();
        if alone {
            self.at = self.block.ptr();
            self.cap = self.block.cap();
        }
        alone
    }

    /// Ends writing: the filled part becomes shareable.
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
    /// Its first byte, within the block.
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it refers to memory that its block keeps and nobody writes, wherever it is.
unsafe impl Send for Buf {}
// SAFETY: as above.
unsafe impl Sync for Buf {}

impl Buf {
    /// A copy of `data`.
    pub fn copy_of(data: &[u8]) -> Self {
        BufMut::copy_of(data).freeze()
    }

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        BufMut::zeroed(len).freeze()
    }

    /// A part of it.
    #[inline]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        // SAFETY: the range is within the buffer.
        Self { block: self.block.clone(), at: unsafe { self.at.add(range.start) }, len: range.end - range.start }
    }

    /// Cuts off the first `len` bytes; this one keeps the rest.
    #[inline]
    pub fn split_to(&mut self, len: usize) -> Self {
        let head = self.slice(0..len);
        self.advance(len);
        head
    }

    /// Forgets the first `len` bytes.
    #[inline]
    pub fn advance(&mut self, len: usize) {
        assert!(len <= self.len, "advance by {len} of a buffer with {} bytes", self.len);
        // SAFETY: the buffer is that long, so the place is within the block or at its end.
        self.at = unsafe { self.at.add(len) };
        self.len -= len;
    }

    /// True when address and length are multiples of `align` bytes, as O_DIRECT wants.
    pub fn is_aligned(&self, align: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(align) && self.len.is_multiple_of(align)
    }

    /// Asks the processor to have the first `len` bytes at hand soon: for what will be sent or compared, but not yet.
    pub fn prefetch(&self, len: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in self[..len.min(self.len)].chunks(64) {
            // SAFETY: a hint that never faults and changes nothing; SSE is part of x86-64.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = len;
    }

    /// The bytes, to be changed, if no other buffer refers to the same memory.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        if !self.block.is_unique() {
            return None;
        }
        // SAFETY: the only reference to the block is this buffer's, which is borrowed uniquely, so nobody else reads or
        // writes it or can get to a reference while the slice lives; all of it is initialised memory.
        Some(unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) })
    }

    /// Bytes of memory that this buffer keeps alive, its neighbours in the same allocation included.
    #[inline]
    pub fn retained(&self) -> usize {
        self.block.cap()
    }

    /// The pool's region that the buffer lies in.
    pub(crate) fn region(&self) -> Option<&Region> {
        self.block.region()
    }

    /// `next` begins in memory where this one ends.
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
        // SAFETY: the part was given up by its BufMut when it was frozen or split off, so nobody writes to it, and
        // the count keeps the memory.
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

/// Scatter-gather: buffers read as one run of bytes.
///
/// Most lists have one part or none.  Those cost no allocation, and a list is no longer than its one part: lists are moved
/// about in messages and requests far more often than they are read.
#[derive(Clone)]
pub struct BufList(Parts);

#[derive(Clone)]
enum Parts {
    One(Buf),
    /// None, or several.
    Others(Option<Box<Several>>),
}

const _: () = assert!(size_of::<BufList>() == size_of::<Buf>());

#[derive(Clone)]
struct Several {
    parts: Vec<Buf>,
    /// Bytes in all.
    len: usize,
}

impl Default for BufList {
    fn default() -> Self {
        Self(Parts::Others(None))
    }
}

impl BufList {
    /// Nothing.
    #[inline]
    pub fn new() -> Self {
        Self::default()
    }

    /// Nothing yet, with room for so many parts.
    pub fn with_room(parts: usize) -> Self {
        if parts <= 1 {
            return Self::default();
        }
        Self(Parts::Others(Some(Box::new(Several { parts: Vec::with_capacity(parts), len: 0 }))))
    }

    /// `len` zero bytes; long runs share one zeroed buffer.
    pub fn zeroes(len: usize) -> Self {
        const UNIT: usize = 128 * 1024;
        let unit = Buf::zeroed(len.min(UNIT));
        let mut list = Self::new();
        while list.len() < len {
            list.push(unit.slice(0..(len - list.len()).min(UNIT)));
        }
        list
    }

    /// Appends a buffer; empty ones are left out, and one that goes on in memory where the last one ends joins it.
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

    /// Appends another list; where it goes on in memory where this one ends, the two parts become one.
    pub fn append(&mut self, other: BufList) {
        match other.0 {
            Parts::One(only) => self.push(only),
            Parts::Others(None) => {}
            Parts::Others(Some(several)) if self.is_empty() => self.0 = Parts::Others(Some(several)),
            Parts::Others(Some(several)) => several.parts.into_iter().for_each(|part| self.push(part)),
        }
    }

    /// Bytes in all.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Parts::One(only) => only.len,
            Parts::Others(several) => several.as_ref().map_or(0, |several| several.len),
        }
    }

    /// True when there is not one byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffers in order.
    #[inline]
    pub fn parts(&self) -> &[Buf] {
        match &self.0 {
            Parts::One(only) => std::slice::from_ref(only),
            Parts::Others(several) => several.as_ref().map_or(&[], |several| &several.parts),
        }
    }

    /// The bytes from `range`, sharing the memory.
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

    /// Copies everything into `out`, which must be as long.
    pub fn copy_to(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len(), "copy of {} bytes into {}", self.len(), out.len());
        let mut at = 0;
        for part in self.parts() {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// All bytes in one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        self.copy_to(&mut out);
        out
    }

    /// One contiguous buffer: the only part as it is, several copied together.
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
