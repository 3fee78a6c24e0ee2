//! Device reads, served from the log's memory if not yet written. All data from the device is verified against its
//! CRC32C.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, Result};
use forebay_reactor::BufPool;

use crate::blobs::BlobCodecs;
use crate::cache::Cache;
use crate::core::corrupt;
use crate::crypt::{BlockCipher, UsePlace};
use crate::device::StoreDevice;
use crate::format::batch::BatchHeader;
use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot};
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::helpers::CompressionHelpers;
use crate::log::StoreLog;
use crate::read_blobs::BlobRun;
use crate::segments::Segments;

/// Size of the largest pooled read buffer, in blocks.
pub const POOLED_BLOCKS: usize = 64;
/// Size of a pooled buffer for the longest blob.
const BLOB_BLOCKS: usize = BLOB_BLOCKS_MAX as usize;
/// Size of a pooled buffer for a blob of LZ4, as stored (not at multiples of blocks) or expanded.
const FEW_BLOCKS: usize = 8;

/// Device, with the data still in memory.
pub struct Media {
    pub device: StoreDevice,
    pub segments: Rc<RefCell<Segments>>,
    log: RefCell<Option<Rc<StoreLog>>>,
    /// Data cache.
    pub cache: Cache,
    /// Codecs of compressed blobs.
    pub codecs: BlobCodecs,
    /// Threads that compress long writes.
    pub helpers: CompressionHelpers,
    single: BufPool,
    few: BufPool,
    blob: BufPool,
    multi: BufPool,
    /// Checksum errors found since the store was opened.
    checksum_errors: Cell<u64>,
    /// Store number that batches carry.
    store: u64,
}

/// Guard that prevents reuse of a segment while it is read.
pub struct SegmentPin<'a> {
    segments: &'a RefCell<Segments>,
    segment: u32,
}

impl Drop for SegmentPin<'_> {
    fn drop(&mut self) {
        self.segments.borrow_mut().unpin(self.segment);
    }
}

impl Media {
    /// Creates the media of the store with number `store`, with threads that compress.
    pub fn new(device: StoreDevice, store: u64, segments: Rc<RefCell<Segments>>, cache: Cache, helpers: usize) -> Self {
        Self {
            device,
            segments,
            log: RefCell::default(),
            cache,
            codecs: BlobCodecs::default(),
            helpers: CompressionHelpers::new(helpers),
            single: BufPool::new(BLOCK, 256),
            few: BufPool::new(FEW_BLOCKS * BLOCK, 512),
            blob: BufPool::new(BLOB_BLOCKS * BLOCK, 128),
            multi: BufPool::new(POOLED_BLOCKS * BLOCK, 64),
            checksum_errors: Cell::new(0),
            store,
        }
    }

    /// Attaches the log, whose pending writes are then searched first.
    pub fn attach_log(&self, log: Rc<StoreLog>) {
        *self.log.borrow_mut() = Some(log);
    }

    /// Returns the number of checksum errors found since the store was opened.
    pub fn checksum_errors(&self) -> u64 {
        self.checksum_errors.get()
    }

    /// Counts a checksum error.
    pub fn count_checksum_error(&self) {
        self.checksum_errors.set(self.checksum_errors.get() + 1);
    }

    fn pending(&self, addr: u64, len: usize) -> Option<BufList> {
        self.log.borrow().as_ref()?.pending_bytes_at(addr, len)
    }

    /// Returns whether the bytes of a blob are still in the log's memory.
    pub fn is_pending(&self, ptr: BlobPtr) -> bool {
        self.log.borrow().as_ref().is_some_and(|log| log.is_pending(ptr.addr, ptr.len as usize))
    }

    /// Returns an empty buffer for a number of blocks.
    pub fn buffer(&self, blocks: usize) -> BufMut {
        match blocks {
            1 => self.single.get(),
            _ if blocks <= FEW_BLOCKS => self.few.get(),
            _ if blocks <= BLOB_BLOCKS => self.blob.get(),
            _ if blocks <= POOLED_BLOCKS => self.multi.get(),
            _ => BufMut::with_capacity(blocks * BLOCK),
        }
    }

    /// Reads bytes of the device without verification; `addr` and `len` are multiples of the block size.
    pub async fn read_raw(&self, addr: u64, len: usize) -> Result<BufMut> {
        self.device.read(addr, self.buffer(len / BLOCK), len).await
    }

    /// Returns the batch header at `block` that `is_wanted` accepts: as stored, or reconstructed from other devices; `None`
    /// if something else is there.
    pub async fn find_header(
        &self,
        stored: &[u8],
        block: u64,
        is_wanted: impl Fn(&BatchHeader) -> bool,
    ) -> Option<BatchHeader> {
        let decode =
            |bytes: &[u8]| BatchHeader::decode(bytes).ok().filter(|header| header.block == block && is_wanted(header));
        if let Some(header) = decode(stored) {
            return Some(header);
        }
        let mended = self.device.mend_block(block, |bytes| decode(bytes).is_some()).await?;
        decode(&mended)
    }

    /// Reads the first batch header of a segment, at `block`, that `is_wanted` accepts. If devices have different ones, it
    /// is the newest: one that lost a write has that of an earlier use of the segment.
    pub async fn read_first_header(
        &self,
        block: u64,
        is_wanted: impl Fn(&BatchHeader) -> bool,
    ) -> Result<Option<BatchHeader>> {
        let Some(set) = self.device.columns() else { return self.read_header(block, is_wanted).await };
        let decode =
            |bytes: &[u8]| BatchHeader::decode(bytes).ok().filter(|header| header.block == block && is_wanted(header));
        let newest = set.best_block(block, |bytes| decode(bytes).map(|header| header.seq)).await;
        match newest {
            Some(bytes) => Ok(decode(&bytes)),
            // Nothing is there, or the line cannot be read.
            None => self.read_header(block, is_wanted).await,
        }
    }

    /// Reads the batch header at `block` like [`find_header`](Self::find_header).
    pub async fn read_header(
        &self,
        block: u64,
        is_wanted: impl Fn(&BatchHeader) -> bool,
    ) -> Result<Option<BatchHeader>> {
        let stored = self.read_raw(block * BLOCK64, BLOCK).await?;
        Ok(self.find_header(&stored, block, is_wanted).await)
    }

    /// Reads and verifies data blocks from location `block` on, one for each of `crcs`, and decrypts them with `cipher` if
    /// there is one; `what` describes them in error texts.
    pub async fn read_blocks(
        &self,
        block: u64,
        crcs: &[u32],
        cipher: Option<&BlockCipher>,
        what: impl Fn() -> String,
    ) -> Result<BufList> {
        if let Some(slot) = BlobSlot::of(block) {
            return self.read_from_blob(BlobRun { slot, crcs }, cipher, what).await;
        }
        // What is encrypted in the log's memory is likely to be in the cache as well.
        if cipher.is_none()
            && let Some(found) = self.pending(block * BLOCK64, crcs.len() * BLOCK)
        {
            return Ok(found);
        }
        let mut data = BufList::new();
        let front = self.cache.take_front(block, crcs, &mut data);
        if front < crcs.len() {
            // Cached blocks between missing ones are read along with them.
            let end = front + self.cache.missing(block + front as u64, &crcs[front..]);
            let read = self.read_plain(block + front as u64, &crcs[front..end], cipher, &what).await?;
            self.cache.put(block + front as u64, &crcs[front..end], std::iter::once(&read[..]));
            data.push(read.into());
            if self.cache.take_front(block + end as u64, &crcs[end..], &mut data) < crcs.len() - end {
                // Evicted meanwhile.
                let at = data.len() / BLOCK;
                data.push(self.read_plain(block + at as u64, &crcs[at..], cipher, &what).await?.into());
            }
        }
        Ok(data)
    }

    /// Reads data blocks, verifies and decrypts them.
    async fn read_plain(
        &self,
        block: u64,
        crcs: &[u32],
        cipher: Option<&BlockCipher>,
        what: &impl Fn() -> String,
    ) -> Result<BufMut> {
        let Some(cipher) = cipher else { return self.read_verified(block, crcs, what).await };
        let _pin = self.pin(block * BLOCK64);
        let place = self.use_place(block).await?;
        let mut read = match self.pending(block * BLOCK64, crcs.len() * BLOCK) {
            Some(found) => {
                let mut copy = self.buffer(crcs.len());
                copy.set_len(found.len());
                found.copy_to(&mut copy);
                copy
            }
            None => self.read_verified(block, crcs, what).await?,
        };
        cipher.open_blocks(place, &mut read);
        Ok(read)
    }

    /// Reads and verifies a data block as it is stored, past the cache.
    pub async fn read_stored(&self, block: u64, crc: u32, what: impl Fn() -> String) -> Result<BufList> {
        Ok(self.read_verified(block, &[crc], &what).await?.into())
    }

    /// Reads and verifies data at a location of a map, without decrypting or expanding it, and past the cache.
    ///
    /// # Errors
    /// `Corrupt` if it is damaged.
    pub async fn verify(&self, location: u64, crc: u32, what: impl Fn() -> String) -> Result<()> {
        match BlobSlot::of(location) {
            Some(slot) => self.read_blob(slot.ptr(crc), "a compressed blob").await.map(drop),
            None => self.read_verified(location, &[crc], &what).await.map(drop),
        }
    }

    /// Returns the place of a block within the current use of its segment, which must be pinned or have live data.
    ///
    /// # Errors
    /// `Corrupt` if it cannot be found out which use that is; those of the device.
    pub async fn use_place(&self, block: u64) -> Result<UsePlace> {
        let (segment, first, known) = {
            let segments = self.segments.borrow();
            let segment = segments.geometry.segment_of(block).ok_or_else(|| corrupt(format!("block {block}")))?;
            (segment, segments.geometry.first_block(segment), segments.uses.of(segment))
        };
        let segment_use = match known {
            Some(known) => known,
            // The record of it was in a damaged node of the tree.
            None => {
                let found = self.find_use(segment, first).await?;
                self.segments.borrow_mut().uses.load(segment, found);
                found
            }
        };
        Ok(UsePlace { segment_use, at: block - first })
    }

    /// Returns the use of a segment according to its batches: the number of the first one, which the second one confirms.
    async fn find_use(&self, segment: u32, first: u64) -> Result<u64> {
        let unknown = || {
            let at = first * BLOCK64;
            let text = format!(
                "{}: the first batch of segment {segment}, at byte {at}, is damaged, and so is the record of its number: data that is \
                 encrypted there is lost",
                self.device.name()
            );
            Error::new(ErrorKind::Corrupt, text)
        };
        let store = self.store;
        let header = self.read_first_header(first, |header| header.store == store).await?.ok_or_else(unknown)?;
        let end = self.segments.borrow().geometry.segment_blocks() + first;
        let next = first + 1 + u64::from(header.payload_blocks);
        if next < end {
            let is_later = |later: &BatchHeader| later.store == store && later.epoch == header.epoch;
            let later = self.read_header(next, is_later).await?;
            if later.is_some_and(|later| later.seq != header.seq + 1) {
                return Err(unknown());
            }
        }
        Ok(header.seq)
    }

    /// Reads data blocks from the device and verifies them.
    async fn read_verified(&self, block: u64, crcs: &[u32], what: &impl Fn() -> String) -> Result<BufMut> {
        let _pin = self.pin(block * BLOCK64);
        let mut buf = self.read_raw(block * BLOCK64, crcs.len() * BLOCK).await?;
        for (i, crc) in crcs.iter().enumerate() {
            if crc32c(&buf[i * BLOCK..(i + 1) * BLOCK]) != *crc {
                self.count_checksum_error();
                let is_right = |bytes: &[u8]| crc32c(bytes) == *crc;
                if let Some(mended) = self.device.mend_block(block + i as u64, is_right).await {
                    buf[i * BLOCK..(i + 1) * BLOCK].copy_from_slice(&mended);
                    continue;
                }
                let at = (block + i as u64) * BLOCK64;
                let text =
                    format!("{}, block {i} of {}, stored at byte {at} of {}", what(), crcs.len(), self.device.name());
                tracing::error!("{text}: checksum mismatch");
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
        }
        Ok(buf)
    }

    /// Reads data blocks of one segment without verifying their checksums.
    pub async fn read_unchecked(&self, block: u64, count: u64) -> Result<BufList> {
        let _pin = self.pin(block * BLOCK64);
        Ok(self.read_raw(block * BLOCK64, count as usize * BLOCK).await?.into())
    }

    /// Reads and verifies a metadata blob.
    pub async fn read_blob(&self, ptr: BlobPtr, what: &str) -> Result<Vec<u8>> {
        Ok(self.read_stored_blob(ptr, what).await?.to_vec())
    }

    /// Reads and verifies the bytes of a blob.
    pub async fn read_stored_blob(&self, ptr: BlobPtr, what: &str) -> Result<Buf> {
        if let Some(found) = self.pending(ptr.addr, ptr.len as usize) {
            return Ok(found.into_contiguous());
        }
        let corrupt = |text: String| Error::new(ErrorKind::Corrupt, text);
        let place = || format!("{what} of {} bytes at byte {} of {}", ptr.len, ptr.addr, self.device.name());
        if !self.segments.borrow().geometry.contains_blob(ptr) {
            return Err(corrupt(format!("{}: outside the segments", place())));
        }
        let _pin = self.pin(ptr.addr);
        let start = ptr.addr / BLOCK64 * BLOCK64;
        let end = (ptr.addr + u64::from(ptr.len)).next_multiple_of(BLOCK64);
        let buf = self.read_raw(start, (end - start) as usize).await?;
        let at = (ptr.addr - start) as usize;
        let range = at..at + ptr.len as usize;
        if crc32c(&buf[range.clone()]) == ptr.crc {
            return Ok(buf.freeze().slice(range));
        }
        self.count_checksum_error();
        let mended = self.device.mend_range(start / BLOCK64, range, |bytes| crc32c(bytes) == ptr.crc).await;
        mended.map(|bytes| Buf::copy_of(&bytes)).ok_or_else(|| corrupt(place()))
    }

    /// Prevents the reuse of the segment that contains byte `addr` while the result exists.
    pub fn pin(&self, addr: u64) -> Option<SegmentPin<'_>> {
        let mut segments = self.segments.borrow_mut();
        let segment = segments.geometry.segment_of_byte(addr)?;
        segments.pin(segment);
        drop(segments);
        Some(SegmentPin { segments: &self.segments, segment })
    }
}
