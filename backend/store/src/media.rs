//! Device reads, served from the log's memory if not yet written. All data from the device is verified against its
//! CRC32C.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{BufList, BufMut, Error, ErrorKind, Result};
use forebay_reactor::{BufPool, File};

use crate::cache::Cache;
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::log::StoreLog;
use crate::segments::Segments;

/// Size of the largest pooled read buffer, in blocks.
pub const POOLED_BLOCKS: usize = 64;

/// Device, with the data still in memory.
pub struct Media {
    pub file: File,
    pub segments: Rc<RefCell<Segments>>,
    log: RefCell<Option<Rc<StoreLog>>>,
    /// Data cache.
    pub cache: Cache,
    single: BufPool,
    multi: BufPool,
    /// Checksum errors found since the store was opened.
    checksum_errors: Cell<u64>,
}

/// Guard that prevents reuse of a segment while it is read.
struct Pin<'a> {
    segments: &'a RefCell<Segments>,
    segment: u32,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.segments.borrow_mut().unpin(self.segment);
    }
}

impl Media {
    pub fn new(file: File, segments: Rc<RefCell<Segments>>, cache: Cache) -> Self {
        Self {
            file,
            segments,
            log: RefCell::default(),
            cache,
            single: BufPool::new(BLOCK, 256),
            multi: BufPool::new(POOLED_BLOCKS * BLOCK, 32),
            checksum_errors: Cell::new(0),
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

    fn buffer(&self, blocks: usize) -> BufMut {
        match blocks {
            1 => self.single.get(),
            _ if blocks <= POOLED_BLOCKS => self.multi.get(),
            _ => BufMut::with_capacity(blocks * BLOCK),
        }
    }

    /// Reads bytes of the device without verification; `addr` and `len` are multiples of the block size.
    pub async fn read_raw(&self, addr: u64, len: usize) -> Result<BufMut> {
        // A pooled buffer may be larger than the read.
        let (result, part) = self.file.read_at(self.buffer(len / BLOCK).limited(len), addr).await;
        let what = || format!("reading {len} bytes at byte {addr} of {}", self.file.path().display());
        let got = result.map_err(|error| Error::from_io(error, what()))?;
        if got < len {
            return Err(Error::new(ErrorKind::Corrupt, format!("{}: the device ends after {got}", what())));
        }
        Ok(part)
    }

    /// Reads and verifies data blocks from `block` on, one for each of `crcs`; `what` describes them in error texts.
    pub async fn read_blocks(&self, block: u64, crcs: &[u32], what: impl Fn() -> String) -> Result<BufList> {
        if let Some(found) = self.pending(block * BLOCK64, crcs.len() * BLOCK) {
            return Ok(found);
        }
        let mut data = BufList::new();
        let front = self.cache.take_front(block, crcs, &mut data);
        if front < crcs.len() {
            // Cached blocks between missing ones are read along with them.
            let end = front + self.cache.missing(block + front as u64, &crcs[front..]);
            let read = self.read_verified(block + front as u64, &crcs[front..end], &what).await?;
            self.cache.put(block + front as u64, &crcs[front..end], std::iter::once(&read[..]));
            data.push(read.into());
            if self.cache.take_front(block + end as u64, &crcs[end..], &mut data) < crcs.len() - end {
                // Evicted meanwhile.
                let at = data.len() / BLOCK;
                data.push(self.read_verified(block + at as u64, &crcs[at..], &what).await?.into());
            }
        }
        Ok(data)
    }

    /// Reads data blocks from the device and verifies them.
    async fn read_verified(&self, block: u64, crcs: &[u32], what: &impl Fn() -> String) -> Result<BufMut> {
        let _pin = self.pin(block * BLOCK64);
        let buf = self.read_raw(block * BLOCK64, crcs.len() * BLOCK).await?;
        for (i, crc) in crcs.iter().enumerate() {
            if crc32c(&buf[i * BLOCK..(i + 1) * BLOCK]) != *crc {
                self.count_checksum_error();
                let at = (block + i as u64) * BLOCK64;
                let text = format!(
                    "{}, block {i} of {}, stored at byte {at} of {}",
                    what(),
                    crcs.len(),
                    self.file.path().display()
                );
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
        if let Some(found) = self.pending(ptr.addr, ptr.len as usize) {
            return Ok(found.to_vec());
        }
        let corrupt = |text: String| Error::new(ErrorKind::Corrupt, text);
        let place = || format!("{what} of {} bytes at byte {} of {}", ptr.len, ptr.addr, self.file.path().display());
        if !self.segments.borrow().geometry.contains_blob(ptr) {
            return Err(corrupt(format!("{}: outside the segments", place())));
        }
        let _pin = self.pin(ptr.addr);
        let start = ptr.addr / BLOCK64 * BLOCK64;
        let end = (ptr.addr + u64::from(ptr.len)).next_multiple_of(BLOCK64);
        let buf = self.read_raw(start, (end - start) as usize).await?;
        let at = (ptr.addr - start) as usize;
        let bytes = buf[at..at + ptr.len as usize].to_vec();
        if crc32c(&bytes) != ptr.crc {
            self.count_checksum_error();
            return Err(corrupt(place()));
        }
        Ok(bytes)
    }

    fn pin(&self, addr: u64) -> Option<Pin<'_>> {
        let mut segments = self.segments.borrow_mut();
        let segment = segments.geometry.segment_of_byte(addr)?;
        segments.pin(segment);
        drop(segments);
        Some(Pin { segments: &self.segments, segment })
    }
}
