//! Log: entries and blocks are appended in memory, written in batches, and made durable by group commit.
//!
//! Appending never blocks and never fails: callers have passed admission control for space and memory before.  A batch
//! is written when it is full, when a task waits for it, or when it has been open for `BATCH_OPEN_MAX`.  Its blocks are
//! readable from memory until they are on the device.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, Result};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, Pool, sleep, spawn};

use crate::format::anchor::LogPosition;
use crate::format::batch::{BatchHeader, ENTRY_ROOM};
use crate::format::entry::Entry;
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::host::Host;
use crate::segments::Segments;

/// Payload of a batch at which it is written, in blocks. Limited to what a device accepts in one request (254 scattered
/// pages on virtio), because the kernel offloads requests that it must split to a worker thread.
const BATCH_BLOCKS: u32 = 128;
/// Delay after which an open batch is written even if no task waits for it.
const BATCH_OPEN_MAX: Duration = Duration::from_millis(10);
/// Maximum number of writes in flight.
pub const WRITES_MAX: usize = 8;
/// Size of a staging buffer in bytes.
const STAGING: usize = 256 * 1024;
/// Bytes appended but not yet written, above which appending tasks are throttled.
const PENDING_BYTES_MAX: usize = 32 << 20;
/// Delay before a failed write is retried.
const RETRY_AFTER: Duration = Duration::from_millis(500);

struct Batch {
    seq: u64,
    /// Block number of the header.
    block: u64,
    /// Header block that precedes the payload; `None` while the batch is open.
    header: RefCell<Option<Buf>>,
    payload: RefCell<BufList>,
    entries: RefCell<Vec<u8>>,
    written: Cell<bool>,
}

impl Batch {
    fn payload_blocks(&self) -> u32 {
        (self.payload.borrow().len() / BLOCK) as u32
    }
}

/// Returns whether the buffer can be written without a copy and retained until it is written: it is long, aligned, and
/// not a small part of a larger allocation.
fn is_direct(part: &Buf) -> bool {
    part.len() >= 16 * BLOCK && part.is_aligned(BLOCK) && part.retained() <= 2 * part.len()
}

/// Log position and in-memory batches.
pub struct Log {
    file: File,
    store: u64,
    epoch: Cell<u64>,
    segments: Rc<RefCell<Segments>>,
    pool: Pool,
    header_pool: Pool,
    staging: RefCell<Option<BufMut>>,
    open: RefCell<Option<Rc<Batch>>>,
    /// Metadata blobs at the end of the open batch, not yet padded to a block.
    blobs: RefCell<Vec<u8>>,
    /// Closed batches, oldest first. Written batches are removed from the front.
    closed: RefCell<VecDeque<Rc<Batch>>>,
    waiting: RefCell<VecDeque<Rc<Batch>>>,
    writing: Cell<usize>,
    pending_bytes: Cell<usize>,
    segment: Cell<u32>,
    next_segment: Cell<u32>,
    next_block: Cell<u64>,
    next_seq: Cell<u64>,
    written_seq: Cell<u64>,
    durable_seq: Cell<u64>,
    syncing: Cell<bool>,
    in_transaction: Cell<bool>,
    transaction_began: Cell<bool>,
    /// Start of the transaction's entries: batch number, and bytes of earlier entries in that batch.
    transaction_from: Cell<(u64, u32)>,
    /// Error for which writes are rejected: the device failed and has not recovered.
    failure: RefCell<Option<Error>>,
    /// Set if the failure persists until the store is reopened.
    dead: Cell<bool>,
    progress: Notify,
    opened: Rc<Notify>,
    bytes_appended: Cell<u64>,
    /// File system that holds the store file; `None` unless the store is in a file.
    host: Option<Rc<Host>>,
    this: RefCell<Weak<Log>>,
}

impl Log {
    /// Creates a log that starts in a newly allocated segment with batch `next_seq`.
    pub fn new(
        file: File,
        store: u64,
        epoch: u64,
        segments: Rc<RefCell<Segments>>,
        next_seq: u64,
        host: Option<Rc<Host>>,
    ) -> Result<Rc<Self>> {
        let (segment, next_segment, next_block) = {
            let mut table = segments.borrow_mut();
            let full = || Error::new(ErrorKind::NoSpace, "no free segment to go on with the log");
            let segment = table.allocate().ok_or_else(full)?;
            let next = table.allocate().ok_or_else(full)?;
            table.entered(segment);
            (segment, next, table.geometry.first_block(segment))
        };
        let log = Rc::new(Self {
            file,
            store,
            epoch: Cell::new(epoch),
            segments,
            pool: Pool::new(STAGING, 64),
            header_pool: Pool::new(BLOCK, 64),
            staging: RefCell::default(),
            open: RefCell::default(),
            blobs: RefCell::default(),
            closed: RefCell::default(),
            waiting: RefCell::default(),
            writing: Cell::new(0),
            pending_bytes: Cell::new(0),
            segment: Cell::new(segment),
            next_segment: Cell::new(next_segment),
            next_block: Cell::new(next_block),
            next_seq: Cell::new(next_seq),
            written_seq: Cell::new(next_seq - 1),
            durable_seq: Cell::new(next_seq - 1),
            syncing: Cell::new(false),
            in_transaction: Cell::new(false),
            transaction_began: Cell::new(false),
            transaction_from: Cell::new((0, 0)),
            failure: RefCell::default(),
            dead: Cell::new(false),
            progress: Notify::new(),
            opened: Rc::default(),
            bytes_appended: Cell::new(0),
            host,
            this: RefCell::default(),
        });
        *log.this.borrow_mut() = Rc::downgrade(&log);
        Ok(log)
    }

    /// Returns the bytes appended since the log was opened, including headers.
    pub fn bytes_appended(&self) -> u64 {
        self.bytes_appended.get()
    }

    /// Returns the bytes that wait to be written, without headers.
    pub fn bytes_pending(&self) -> u64 {
        self.pending_bytes.get() as u64
    }

    /// Returns the error for which the device currently rejects writes.
    pub fn failure(&self) -> Option<Error> {
        self.failure.borrow().clone()
    }

    /// Returns whether more than `PENDING_BYTES_MAX` bytes wait to be written.
    pub fn is_congested(&self) -> bool {
        self.pending_bytes.get() > PENDING_BYTES_MAX
    }

    /// Waits until the log is no longer congested, or the device has failed.
    pub async fn wait_uncongested(&self) {
        self.progress.wait_until(|| !self.is_congested() || self.failure.borrow().is_some()).await;
    }

    /// Begins a transaction. Entries up to [`end_transaction`](Self::end_transaction) are atomic: after a crash, either
    /// all or none of them are recovered.
    pub fn begin_transaction(&self) {
        assert!(!self.in_transaction.replace(true), "transactions do not nest");
        self.transaction_began.set(false);
    }

    /// Ends the transaction started by [`begin_transaction`](Self::begin_transaction). Returns the number of the batch
    /// that must be durable for it.
    pub fn end_transaction(&self) -> u64 {
        assert!(self.in_transaction.replace(false), "no transaction to end");
        self.last_seq()
    }

    /// Returns the number of the newest batch that has content.
    pub fn last_seq(&self) -> u64 {
        match &*self.open.borrow() {
            Some(batch) => batch.seq,
            None => self.next_seq.get() - 1,
        }
    }

    /// Returns the space in the open batch: bytes of entries, and payload blocks.
    fn room(&self, batch: &Batch) -> (usize, u32) {
        let entries = ENTRY_ROOM - batch.entries.borrow().len();
        let geometry = self.segments.borrow().geometry;
        let end = geometry.first_block(self.segment.get()) + geometry.segment_blocks();
        let used = batch.payload_blocks() + self.blobs.borrow().len().div_ceil(BLOCK) as u32;
        let left = (end - batch.block - 1) as u32 - used;
        (entries, left)
    }

    /// Returns the open batch, with space for `entry_bytes` and at least `blocks` payload blocks. Closes and opens
    /// batches as needed.
    fn batch_with(&self, entry_bytes: usize, blocks: u32) -> Rc<Batch> {
        loop {
            let open = self.open.borrow().clone();
            if let Some(batch) = open {
                let (entries, left) = self.room(&batch);
                let started = !batch.entries.borrow().is_empty();
                if entries >= entry_bytes && left >= blocks && !(started && batch.payload_blocks() >= BATCH_BLOCKS) {
                    return batch;
                }
                assert!(started, "an entry or blob larger than a batch can be");
                self.close();
            }
            self.open_batch(blocks);
        }
    }

    fn open_batch(&self, blocks: u32) {
        let geometry = self.segments.borrow().geometry;
        let end = geometry.first_block(self.segment.get()) + geometry.segment_blocks();
        // A header must be followed by space for at least one payload block.
        let least = u64::from(blocks.max(1)) + 1;
        if self.next_block.get() + least > end {
            self.advance_segment();
        }
        let seq = self.next_seq.get();
        self.next_seq.set(seq + 1);
        let batch = Rc::new(Batch {
            seq,
            block: self.next_block.get(),
            header: RefCell::default(),
            payload: RefCell::default(),
            entries: RefCell::default(),
            written: Cell::new(false),
        });
        *self.open.borrow_mut() = Some(batch);
        self.opened.notify_all();
    }

    fn advance_segment(&self) {
        let mut segments = self.segments.borrow_mut();
        segments.leave(self.segment.get());
        let segment = self.next_segment.get();
        segments.entered(segment);
        self.segment.set(segment);
        self.next_block.set(segments.geometry.first_block(segment));
        match segments.allocate() {
            Some(next) => self.next_segment.set(next),
            None => {
                // The reserve watermark keeps enough segments free, so this is a bug in the store. To keep it from
                // corrupting data, the log writes nothing more and every flush fails.
                drop(segments);
                self.dead.set(true);
                self.fail(Error::new(ErrorKind::NoSpace, "the log has no free segment left"));
            }
        }
    }

    /// Appends an entry without payload.
    pub fn append(&self, entry: &Entry) {
        let mut bytes = Vec::with_capacity(64);
        entry.encode(&mut bytes);
        let batch = self.batch_with(bytes.len(), 0);
        self.note_entry(&batch);
        batch.entries.borrow_mut().extend_from_slice(&bytes);
    }

    /// Records the start of a transaction. Called before each entry.
    fn note_entry(&self, batch: &Batch) {
        if self.in_transaction.get() && !self.transaction_began.replace(true) {
            self.transaction_from.set((batch.seq, batch.entries.borrow().len() as u32));
        }
    }

    /// Appends blocks, split into pieces as long as batches allow. For each piece, calls `entry` with the number of
    /// blocks before it, its position in the payload, its first block number on the device, and its data; `entry`
    /// returns the entry that describes the piece.  `size_of` returns the size of an entry in bytes for a number of
    /// blocks.
    pub fn append_blocks(
        &self,
        data: &BufList,
        size_of: fn(usize) -> usize,
        mut entry: impl FnMut(usize, u32, u64, &[Buf]) -> Entry,
    ) {
        debug_assert!(data.len().is_multiple_of(BLOCK));
        let total = data.len() / BLOCK;
        let direct = data.parts().iter().all(is_direct);
        let mut done = 0;
        while done < total {
            let batch = self.batch_with(size_of(1), 1);
            self.pad_blobs(&batch);
            let (entry_room, block_room) = self.room(&batch);
            let fits_entry = (entry_room - size_of(0)) / (size_of(1) - size_of(0));
            let wanted = (BATCH_BLOCKS.saturating_sub(batch.payload_blocks()) as usize).max(1);
            let count = (total - done).min(fits_entry).min(block_room as usize).min(wanted);
            let piece = data.slice(done * BLOCK..(done + count) * BLOCK);
            let at = batch.payload_blocks();
            let block = batch.block + 1 + u64::from(at);
            self.pending_bytes.set(self.pending_bytes.get() + piece.len());
            let stored = if direct { piece.parts().to_vec() } else { self.stage(piece) };
            // The callback must not append, as that would change the position given to it.
            let made = entry(done, at, block, &stored);
            assert!(
                batch.payload_blocks() == at && self.blobs.borrow().is_empty(),
                "something was appended while a place was given out"
            );
            self.note_entry(&batch);
            made.encode(&mut batch.entries.borrow_mut());
            debug_assert!(batch.entries.borrow().len() <= ENTRY_ROOM);
            let mut payload = batch.payload.borrow_mut();
            stored.into_iter().for_each(|buf| payload.push(buf));
            done += count;
        }
    }

    /// Copies data that cannot be written directly into staging buffers, packed with its neighbours.
    fn stage(&self, data: BufList) -> Vec<Buf> {
        let mut out = Vec::with_capacity(data.parts().len());
        let mut staging = self.staging.borrow_mut();
        let mut parts = data.parts().iter();
        let mut part: &[u8] = &[];
        let mut left = data.len();
        while left > 0 {
            let buf = match &mut *staging {
                Some(buf) if buf.spare() > 0 => buf,
                slot => slot.insert(self.pool.get()),
            };
            let take = left.min(buf.spare());
            let mut filled = 0;
            while filled < take {
                if part.is_empty() {
                    part = parts.next().expect("as many bytes as the list says");
                }
                let n = part.len().min(take - filled);
                buf.extend_from_slice(&part[..n]);
                part = &part[n..];
                filled += n;
            }
            out.push(buf.split_to(take));
            left -= take;
        }
        out
    }

    /// Appends a metadata blob, packed with its neighbours; `entry` builds its entry from its position in the payload.
    pub fn append_blob(&self, bytes: &[u8], entry: impl Fn(u32) -> Entry) -> BlobPtr {
        self.append_blob_before(bytes, 0, entry)
    }

    /// Appends a metadata blob and an entry without payload that describes it, both in one batch.
    pub fn append_described_blob(
        &self,
        bytes: &[u8],
        entry: impl Fn(u32) -> Entry,
        about: impl Fn(BlobPtr) -> Entry,
    ) -> BlobPtr {
        let encoded = |ptr| {
            let mut encoded = Vec::with_capacity(256);
            about(ptr).encode(&mut encoded);
            encoded
        };
        let ptr = self.append_blob_before(bytes, encoded(BlobPtr::default()).len(), entry);
        let batch = self.open.borrow().clone().expect("the batch of the blob is open");
        self.note_entry(&batch);
        batch.entries.borrow_mut().extend_from_slice(&encoded(ptr));
        ptr
    }

    /// Appends a blob to a batch that also has space for `entry_bytes` bytes of entries after the blob's own.
    fn append_blob_before(&self, bytes: &[u8], entry_bytes: usize, entry: impl Fn(u32) -> Entry) -> BlobPtr {
        let mut encoded = Vec::with_capacity(64);
        entry(0).encode(&mut encoded);
        let blocks = bytes.len().div_ceil(BLOCK) as u32 + 1;
        let batch = self.batch_with(encoded.len() + entry_bytes, blocks);
        let mut blobs = self.blobs.borrow_mut();
        let at = batch.payload_blocks() as usize * BLOCK + blobs.len();
        blobs.extend_from_slice(bytes);
        let full = blobs.len() >= BATCH_BLOCKS as usize * BLOCK;
        drop(blobs);
        self.note_entry(&batch);
        entry(at as u32).encode(&mut batch.entries.borrow_mut());
        if full {
            self.pad_blobs(&batch);
        }
        let addr = (batch.block + 1) * BLOCK64 + at as u64;
        BlobPtr { addr, len: bytes.len() as u32, crc: forebay_accel::crc32c::crc32c(bytes) }
    }

    /// Pads the blobs at the end of the open batch to whole blocks.
    fn pad_blobs(&self, batch: &Batch) {
        let bytes = std::mem::take(&mut *self.blobs.borrow_mut());
        if bytes.is_empty() {
            return;
        }
        let mut buf = BufMut::zeroed(bytes.len().next_multiple_of(BLOCK));
        buf[..bytes.len()].copy_from_slice(&bytes);
        self.pending_bytes.set(self.pending_bytes.get() + buf.len());
        batch.payload.borrow_mut().push(buf.freeze());
    }

    /// Closes the open batch and submits it to the device.
    pub fn close(&self) {
        let Some(batch) = self.open.borrow_mut().take() else { return };
        self.pad_blobs(&batch);
        let payload_blocks = batch.payload_blocks();
        let continues = self.in_transaction.get() && self.transaction_began.get();
        // Transactions that are complete here may be acknowledged as durable before the unfinished one.
        let settled = match self.transaction_from.get() {
            (seq, bytes) if continues && seq == batch.seq => bytes,
            _ => 0,
        };
        let header = BatchHeader {
            store: self.store,
            epoch: self.epoch.get(),
            seq: batch.seq,
            block: batch.block,
            durable_seq: self.durable_seq.get(),
            next_segment: self.next_segment.get(),
            payload_blocks,
            continues,
            settled,
            entries: batch.entries.take(),
        };
        let mut block = self.header_pool.get();
        block.set_len(BLOCK);
        header.encode(&mut block);
        *batch.header.borrow_mut() = Some(block.freeze());
        self.next_block.set(batch.block + 1 + u64::from(payload_blocks));
        let bytes = (u64::from(payload_blocks) + 1) * BLOCK64;
        self.bytes_appended.set(self.bytes_appended.get() + bytes);
        self.closed.borrow_mut().push_back(batch.clone());
        self.waiting.borrow_mut().push_back(batch);
        self.start_writes();
    }

    fn start_writes(&self) {
        while self.writing.get() < WRITES_MAX && !self.dead.get() {
            let Some(batch) = self.waiting.borrow_mut().pop_front() else { return };
            self.writing.set(self.writing.get() + 1);
            let log = self.this.borrow().upgrade().expect("a log is used through its Rc");
            spawn(async move { log.write(batch).await });
        }
    }

    async fn write(self: Rc<Self>, batch: Rc<Batch>) {
        let mut bufs: BufList = batch.header.borrow().clone().expect("a closed batch has its header").into();
        bufs.append(batch.payload.borrow().clone());
        loop {
            let given = self.host.as_ref().map_or(0, |host| host.times_given());
            match self.file.write_at(bufs.clone(), batch.block * BLOCK64).await {
                Ok(()) => break,
                Err(error) => {
                    // Retries the same write until the device accepts it: appended data is never discarded.
                    let no_space = error.kind() == std::io::ErrorKind::StorageFull;
                    if let Some(host) = self.host.as_ref().filter(|_| no_space) {
                        if host.give_reserve(given).await {
                            continue;
                        }
                        self.fail(host.full());
                        sleep(RETRY_AFTER).await;
                        if self.dead.get() {
                            return;
                        }
                        continue;
                    }
                    let text = format!("writing {} bytes of the log at byte {}", bufs.len(), batch.block * BLOCK64);
                    self.fail(Error::from_io(error, text));
                    if self.dead.get() {
                        return;
                    }
                    sleep(RETRY_AFTER).await;
                    if self.dead.get() {
                        return;
                    }
                }
            }
        }
        batch.written.set(true);
        self.writing.set(self.writing.get() - 1);
        if !self.dead.get() && self.failure.borrow().is_some() && self.writing.get() == 0 {
            *self.failure.borrow_mut() = None;
        }
        let mut closed = self.closed.borrow_mut();
        while closed.front().is_some_and(|front| front.written.get()) {
            let front = closed.pop_front().expect("front");
            self.written_seq.set(front.seq);
        }
        drop(closed);
        self.pending_bytes.set(self.pending_bytes.get().saturating_sub(bufs.len() - BLOCK));
        self.progress.notify_all();
        self.start_writes();
    }

    /// Marks the log as failed after a failed flush of the log or of an anchor. The state of the device's cache is
    /// unknown then, and a later successful flush proves nothing about it.
    pub fn flush_failed(&self, error: Error) {
        self.dead.set(true);
        self.fail(error);
    }

    /// Abandons writes that the device rejects when the store is dropped. They are no longer retried, so that the
    /// device is released.
    pub fn abandon(&self) {
        self.dead.set(true);
        let closed = || Error::new(ErrorKind::ShuttingDown, "the store was closed");
        self.failure.borrow_mut().get_or_insert_with(closed);
        self.progress.notify_all();
    }

    fn fail(&self, error: Error) {
        let mut failure = self.failure.borrow_mut();
        if failure.is_none() {
            tracing::error!(?error, "the store's device takes no writes");
            *failure = Some(error);
        }
        drop(failure);
        self.progress.notify_all();
    }

    /// Waits until all closed batches are written to the device (not yet durable).
    pub async fn wait_written(&self) -> Result<()> {
        let seq = self.closed.borrow().back().map_or(0, |batch| batch.seq);
        self.progress.wait_until(|| self.written_seq.get() >= seq || self.failure.borrow().is_some()).await;
        if self.written_seq.get() >= seq { Ok(()) } else { Err(self.failure().expect("it has failed")) }
    }

    /// Waits until all batches up to `seq` are durable.
    pub async fn sync(&self, seq: u64) -> Result<()> {
        loop {
            if self.durable_seq.get() >= seq {
                return Ok(());
            }
            if let Some(error) = self.failure() {
                return Err(error);
            }
            if self.open.borrow().as_ref().is_some_and(|batch| batch.seq <= seq) {
                self.close();
            }
            let progress = self.progress.wait();
            if !self.syncing.replace(true) {
                let log = self.this.borrow().upgrade().expect("a log is used through its Rc");
                spawn(async move { log.sync_round(seq).await });
            }
            progress.await;
        }
    }

    /// Performs one group commit, of everything that is written when it begins.
    async fn sync_round(self: Rc<Self>, seq: u64) {
        self.progress.wait_until(|| self.written_seq.get() >= seq || self.failure.borrow().is_some()).await;
        let target = self.written_seq.get();
        if target >= seq {
            match self.file.sync_data().await {
                Ok(()) => self.durable_seq.set(target.max(self.durable_seq.get())),
                Err(error) => self.flush_failed(Error::from_io(error, "flushing the store's device")),
            }
        }
        self.syncing.set(false);
        self.progress.notify_all();
    }

    /// Closes batches that have been open for `BATCH_OPEN_MAX`; runs until the log is dropped.
    pub async fn tick(log: Weak<Log>) {
        loop {
            let Some(this) = log.upgrade() else { return };
            let seq = this.open.borrow().as_ref().map(|batch| batch.seq);
            match seq {
                None => {
                    // Awaited without a reference to the log, which would keep it alive indefinitely.
                    let opened = this.opened.clone();
                    let next = opened.wait();
                    drop(this);
                    next.await;
                }
                Some(seq) => {
                    drop(this);
                    sleep(BATCH_OPEN_MAX).await;
                    let Some(this) = log.upgrade() else { return };
                    let same = this.open.borrow().as_ref().is_some_and(|batch| batch.seq == seq);
                    if same && !this.in_transaction.get() {
                        this.close();
                    }
                }
            }
        }
    }

    /// Closes the open batch and returns the position of the next one.
    pub fn position(&self) -> LogPosition {
        self.close();
        LogPosition { block: self.next_block.get(), seq: self.next_seq.get() }
    }

    /// Returns the current segment of the log and the next one.
    pub fn segment_and_next(&self) -> (u32, u32) {
        (self.segment.get(), self.next_segment.get())
    }

    /// Returns bytes that are still in memory; `None` unless all of them are.
    pub fn pending_bytes_at(&self, addr: u64, len: usize) -> Option<BufList> {
        if let Some(batch) = &*self.open.borrow() {
            let start = (batch.block + 1) * BLOCK64;
            if addr >= start {
                let at = (addr - start) as usize;
                let payload = batch.payload.borrow();
                if at + len <= payload.len() {
                    return Some(payload.slice(at..at + len));
                }
                let blobs = self.blobs.borrow();
                let bytes = at.checked_sub(payload.len()).and_then(|at| blobs.get(at..at + len));
                if let Some(bytes) = bytes {
                    return Some(Buf::copy_of(bytes).into());
                }
                // The log may have moved to a lower address than closed batches that still wait to be written.
            }
        }
        let closed = self.closed.borrow();
        for batch in closed.iter().rev() {
            let payload = batch.payload.borrow();
            let start = (batch.block + 1) * BLOCK64;
            if addr >= start && addr + len as u64 <= start + payload.len() as u64 {
                let at = (addr - start) as usize;
                return Some(payload.slice(at..at + len));
            }
        }
        None
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // Wakes the ticker, which waits for the next batch, so that it ends.
        self.opened.notify_all();
    }
}
