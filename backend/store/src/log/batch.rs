//! Batch: unit of writing, a header block with entries and the payload that they describe.

use std::cell::{Cell, RefCell};

use forebay_block::{Buf, BufList, BufMut};

use super::blob_buffers::BlobBuffers;
use crate::format::batch::{BatchHeader, ENTRY_ROOM};
use crate::format::entry::StoreEntry;
use crate::format::{BLOCK, BLOCK64};

/// Batch in memory.
///
/// # Invariants
/// 1. The payload consists of whole blocks.
/// 2. A batch without header is open. A batch with header is closed: nothing is added, and no blob is unpadded.
/// 3. The entries fit in the header block.
pub struct Batch {
    seq: u64,
    /// Block number of the header.
    block: u64,
    /// Header block that precedes the payload; `None` while the batch is open.
    header: RefCell<Option<Buf>>,
    payload: RefCell<BufList>,
    /// Blobs after the payload, not yet padded to a block.
    blobs: RefCell<Option<BufMut>>,
    entries: RefCell<Vec<u8>>,
    written: Cell<bool>,
}

impl Batch {
    /// Creates an open batch with number `seq`, whose header is at `block`.
    pub fn new(seq: u64, block: u64) -> Self {
        Self {
            seq,
            block,
            header: RefCell::default(),
            payload: RefCell::default(),
            blobs: RefCell::default(),
            entries: RefCell::default(),
            written: Cell::new(false),
        }
    }

    /// Returns the batch number.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Returns the block number of the header.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Returns the block number of the first payload block.
    pub fn first_block(&self) -> u64 {
        self.block + 1
    }

    /// Returns the length of the payload in blocks, without unpadded blobs.
    pub fn payload_blocks(&self) -> u32 {
        (self.payload.borrow().len() / BLOCK) as u32
    }

    /// Returns the length of the payload in blocks, once blobs are padded.
    pub fn padded_blocks(&self) -> u32 {
        self.payload_blocks() + self.blob_bytes().div_ceil(BLOCK) as u32
    }

    /// Returns the length of the unpadded blobs in bytes.
    pub fn blob_bytes(&self) -> usize {
        self.blobs.borrow().as_ref().map_or(0, |blobs| blobs.len())
    }

    /// Returns the length of the entries in bytes.
    pub fn entry_bytes(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Returns the space for further entries in bytes.
    pub fn entry_space(&self) -> usize {
        ENTRY_ROOM - self.entry_bytes()
    }

    /// Adds an entry.
    pub fn add_entry(&self, entry: &StoreEntry) {
        debug_assert!(self.is_open());
        let mut entries = self.entries.borrow_mut();
        entry.encode(&mut entries);
        debug_assert!(entries.len() <= ENTRY_ROOM);
    }

    /// Adds an encoded entry.
    pub fn add_encoded(&self, entry: &[u8]) {
        debug_assert!(self.is_open() && entry.len() <= self.entry_space());
        self.entries.borrow_mut().extend_from_slice(entry);
    }

    /// Adds blocks to the payload.
    pub fn add_blocks(&self, bufs: Vec<Buf>) {
        debug_assert!(self.is_open() && self.blob_bytes() == 0);
        let mut payload = self.payload.borrow_mut();
        bufs.into_iter().for_each(|buf| payload.push(buf));
        debug_assert!(payload.len().is_multiple_of(BLOCK));
    }

    /// Adds a metadata blob after the others, and returns its byte position in the payload.
    pub fn add_blob(&self, bytes: &[u8], buffers: &BlobBuffers) -> usize {
        self.fill_blob(bytes.len(), 1, buffers, |memory| memory.copy_from_slice(bytes))
    }

    /// Returns the byte position in the payload where [`fill_blob`](Self::fill_blob) adds the next blob.
    pub fn next_blob_at(&self, align: usize) -> usize {
        self.payload_blocks() as usize * BLOCK + self.blob_bytes().next_multiple_of(align)
    }

    /// Adds a blob like [`add_blob`](Self::add_blob), at a multiple of `align` bytes; `fill` writes its `len` bytes.
    pub fn fill_blob(&self, len: usize, align: usize, buffers: &BlobBuffers, fill: impl FnOnce(&mut [u8])) -> usize {
        debug_assert!(self.is_open());
        let mut slot = self.blobs.borrow_mut();
        let mut blobs = buffers.with_space(slot.take(), align - 1 + len);
        let aligned = blobs.len().next_multiple_of(align);
        extend_zeroed(&mut blobs, aligned);
        blobs.set_len(aligned + len);
        fill(&mut blobs[aligned..]);
        *slot = Some(blobs);
        self.payload_blocks() as usize * BLOCK + aligned
    }

    /// Pads the blobs to whole blocks of the payload, and returns the number of bytes that the payload grows by.
    pub fn pad_blobs(&self) -> usize {
        let mut slot = self.blobs.borrow_mut();
        let Some(mut blobs) = slot.take().filter(|blobs| !blobs.is_empty()) else { return 0 };
        // Buffers have whole blocks.
        let padded = blobs.len().next_multiple_of(BLOCK);
        extend_zeroed(&mut blobs, padded);
        self.payload.borrow_mut().push(blobs.split_to(padded));
        // The rest is for blobs that follow.
        *slot = Some(blobs);
        padded
    }

    /// Pads the batch, header included, to a multiple of `line_blocks` blocks, and returns the number of bytes that the
    /// payload grows by.
    pub fn pad_to_lines(&self, line_blocks: u32) -> usize {
        debug_assert!(self.is_open() && self.blob_bytes() == 0);
        let blocks = 1 + self.payload_blocks();
        let missing = (blocks.next_multiple_of(line_blocks) - blocks) as usize * BLOCK;
        if missing > 0 {
            self.payload.borrow_mut().push(Buf::zeroed(missing));
        }
        missing
    }

    /// Takes the encoded entries, for the header.
    pub fn take_entries(&self) -> Vec<u8> {
        debug_assert!(self.is_open());
        self.entries.take()
    }

    /// Closes the batch: encodes its header into `block`.
    pub fn close(&self, header: &BatchHeader, mut block: BufMut) {
        debug_assert!(self.is_open() && self.blob_bytes() == 0);
        debug_assert!((header.seq, header.block) == (self.seq, self.block));
        block.set_len(BLOCK);
        header.encode(&mut block);
        *self.header.borrow_mut() = Some(block.freeze());
    }

    fn is_open(&self) -> bool {
        self.header.borrow().is_none()
    }

    /// Returns the header and the payload of a closed batch.
    pub fn to_bufs(&self) -> BufList {
        let mut bufs: BufList = self.header.borrow().clone().expect("a closed batch has its header").into();
        bufs.append(self.payload.borrow().clone());
        bufs
    }

    /// Returns whether the batch is on the device.
    pub fn is_written(&self) -> bool {
        self.written.get()
    }

    /// Records that the batch is on the device.
    pub fn set_written(&self) {
        self.written.set(true);
    }

    /// Returns whether the payload contains all of `len` bytes at byte `addr` of the device.
    pub fn has(&self, addr: u64, len: usize) -> bool {
        let end = self.payload.borrow().len() + self.blob_bytes();
        addr.checked_sub(self.first_block() * BLOCK64).is_some_and(|at| at as usize + len <= end)
    }

    /// Returns `len` bytes at byte `addr` of the device, if the payload contains all of them.
    pub fn read(&self, addr: u64, len: usize) -> Option<BufList> {
        let at = addr.checked_sub(self.first_block() * BLOCK64)? as usize;
        let payload = self.payload.borrow();
        if at + len <= payload.len() {
            return Some(payload.slice(at..at + len));
        }
        let at = at.checked_sub(payload.len())?;
        self.blobs.borrow().as_ref()?.get(at..at + len).map(|bytes| Buf::copy_of(bytes).into())
    }
}

/// Extends a buffer to `len` bytes with zeroes: pooled memory has old content.
fn extend_zeroed(buf: &mut BufMut, len: usize) {
    let from = buf.len();
    buf.set_len(len);
    buf[from..].fill(0);
}
