//! Log: entries and blocks are appended in memory, written in batches, and made durable by group commit.
//!
//! Appending never blocks and never fails: callers have passed admission control for space and memory before.  A batch
//! is written when it is full, when a task waits for it and no write is in flight, or when it has been open for
//! `BATCH_OPEN_MAX`.  Its blocks are readable from memory until they are on the device.

mod acks;
mod batch;
mod blob_buffers;
mod data_blobs;
mod head;
mod health;
mod staging;
mod transaction;
mod writer;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, Error, Result};
use forebay_reactor::sync::Notify;
use forebay_reactor::{BufPool, sleep};

use crate::commit::block_crcs;
use crate::crypt::BlockCipher;
use crate::device::StoreDevice;
use crate::format::anchor::LogPosition;
use crate::format::batch::BatchHeader;
use crate::format::entry::StoreEntry;
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::host::HostFileSystem;
use crate::segments::Segments;
use batch::Batch;
use blob_buffers::BlobBuffers;
use head::LogHead;
use staging::{StagingBuffers, is_all_direct};
use transaction::OpenTransaction;
use writer::BatchWriter;

pub use writer::WRITES_MAX;

/// Payload of a batch at which it is written, in blocks, on one device. Limited to what a device accepts in one request
/// (254 scattered pages on virtio), because the kernel offloads requests that it must split to a worker thread.
const BATCH_BLOCKS: u32 = 128;
/// Lines of a full batch on several devices: the length in blocks of the request that each device receives.
const BATCH_LINES: u32 = 128;
/// Payload of a batch on several devices at which it is written at the latest, in blocks, however long its lines are.
const BATCH_BLOCKS_MAX: u32 = 512;
/// Delay after which an open batch is written even if no task waits for it.
const BATCH_OPEN_MAX: Duration = Duration::from_millis(10);

/// Log of an open store: appends to the open batch, and passes closed batches to the writer.
///
/// # Invariants
/// 1. At most one batch is open, and it is the newest.
/// 2. A batch is closed as soon as it has `full_blocks` payload blocks and something is appended, and `BATCH_OPEN_MAX`
///    after it was opened, but for transactions in progress.
/// 3. The position of an appended block or blob is final: its batch is written exactly there.
/// 4. On several devices, a batch occupies whole lines.
pub struct StoreLog {
    /// Store number that batches carry.
    store: u64,
    epoch: u64,
    head: LogHead,
    open: RefCell<Option<Rc<Batch>>>,
    /// Signals that a batch was opened.
    opened: Rc<Notify>,
    transaction: OpenTransaction,
    staging: StagingBuffers,
    blob_buffers: BlobBuffers,
    /// Blocks of a line: batches, with their headers, have a multiple of it.
    line_blocks: u32,
    /// Payload of a full batch, in blocks.
    full_blocks: u32,
    header_pool: BufPool,
    bytes_appended: Cell<u64>,
    writer: Rc<BatchWriter>,
}

impl StoreLog {
    /// Creates a log that starts in a newly allocated segment with batch `next_seq`.
    pub fn new(
        device: StoreDevice,
        store: u64,
        epoch: u64,
        segments: Rc<RefCell<Segments>>,
        next_seq: u64,
        host: Option<Rc<HostFileSystem>>,
    ) -> Result<Rc<Self>> {
        Ok(Rc::new(Self {
            store,
            epoch,
            head: LogHead::new(segments, next_seq)?,
            open: RefCell::default(),
            opened: Rc::default(),
            transaction: OpenTransaction::default(),
            staging: StagingBuffers::new(),
            blob_buffers: BlobBuffers::new(),
            line_blocks: device.line_blocks(),
            full_blocks: full_blocks(device.line_blocks()),
            header_pool: BufPool::new(BLOCK, 64),
            bytes_appended: Cell::new(0),
            writer: BatchWriter::new(device, host, next_seq),
        }))
    }

    /// Returns the bytes appended since the log was opened, including headers.
    pub fn bytes_appended(&self) -> u64 {
        self.bytes_appended.get()
    }

    /// Returns the bytes that wait to be written, without headers.
    pub fn bytes_pending(&self) -> u64 {
        self.writer.pending_bytes() as u64
    }

    /// Returns the error for which the device currently rejects writes.
    pub fn failure(&self) -> Option<Error> {
        self.writer.failure()
    }

    /// Returns whether appending tasks are throttled, because of the bytes that wait to be written.
    pub fn is_congested(&self) -> bool {
        self.writer.is_congested()
    }

    /// Waits until the log is no longer congested, or the device has failed.
    pub async fn wait_uncongested(&self) {
        self.writer.wait_uncongested().await;
    }

    /// Begins a transaction. Entries up to [`end_transaction`](Self::end_transaction) are atomic: after a crash, either
    /// all or none of them are recovered.
    pub fn begin_transaction(&self) {
        self.transaction.begin();
    }

    /// Ends the transaction started by [`begin_transaction`](Self::begin_transaction). Returns the number of the batch
    /// that must be durable for it.
    pub fn end_transaction(&self) -> u64 {
        self.transaction.end();
        self.last_seq()
    }

    /// Returns the number of the newest batch that has content.
    pub fn last_seq(&self) -> u64 {
        match &*self.open.borrow() {
            Some(batch) => batch.seq(),
            None => self.head.next_seq() - 1,
        }
    }

    /// Returns the open batch, with space for `entry_bytes` and at least `blocks` payload blocks. Closes and opens
    /// batches as needed.
    fn batch_with(&self, entry_bytes: usize, blocks: u32) -> Rc<Batch> {
        loop {
            let open = self.open.borrow().clone();
            if let Some(batch) = open {
                let fits = batch.entry_space() >= entry_bytes && self.head.block_space(&batch) >= blocks;
                let started = batch.entry_bytes() > 0;
                if fits && !(started && batch.payload_blocks() >= self.full_blocks) {
                    return batch;
                }
                assert!(started, "an entry or blob larger than a batch can be");
                self.close();
            }
            self.open_batch(blocks);
        }
    }

    fn open_batch(&self, blocks: u32) {
        let (batch, placed) = self.head.begin_batch(blocks);
        if let Err(error) = placed {
            // To keep the lack of a segment from corrupting data, the log writes nothing more and every flush fails.
            self.writer.fail_permanently(error);
        }
        let before = self.open.replace(Some(Rc::new(batch)));
        debug_assert!(before.is_none(), "two batches are open");
        self.opened.notify_all();
    }

    /// Adds an entry to the open batch.
    fn add_entry(&self, batch: &Batch, entry: &StoreEntry) {
        self.transaction.note_entry(batch.seq(), batch.entry_bytes());
        batch.add_entry(entry);
    }

    /// Adds an encoded entry to the open batch.
    fn add_encoded(&self, batch: &Batch, entry: &[u8]) {
        self.transaction.note_entry(batch.seq(), batch.entry_bytes());
        batch.add_encoded(entry);
    }

    /// Appends an entry without payload.
    pub fn append(&self, entry: &StoreEntry) {
        let encoded = encoded(entry);
        let batch = self.batch_with(encoded.len(), 0);
        self.add_encoded(&batch, &encoded);
    }

    /// Appends blocks, encrypted with `cipher` if there is one, and split into runs as long as batches allow. For each run,
    /// calls `entry`, which returns the entry that describes the run.  `size_of` returns the size of an entry in bytes for a
    /// number of blocks.
    pub fn append_blocks(
        &self,
        data: &BufList,
        cipher: Option<&BlockCipher>,
        size_of: fn(usize) -> usize,
        mut entry: impl FnMut(AppendedRun<'_>) -> StoreEntry,
    ) {
        debug_assert!(data.len().is_multiple_of(BLOCK));
        let total = data.len() / BLOCK;
        let direct = cipher.is_none() && is_all_direct(data);
        let mut done = 0;
        while done < total {
            let batch = self.batch_with(size_of(1), 1);
            self.pad_blobs(&batch);
            let fits_entry = (batch.entry_space() - size_of(0)) / (size_of(1) - size_of(0));
            let fits_segment = self.head.block_space(&batch) as usize;
            let wanted = (self.full_blocks.saturating_sub(batch.payload_blocks()) as usize).max(1);
            let count = (total - done).min(fits_entry).min(fits_segment).min(wanted);
            let run = data.slice(done * BLOCK..(done + count) * BLOCK);
            let at = batch.payload_blocks();
            self.writer.add_pending(run.len());
            let block = batch.first_block() + u64::from(at);
            let mut sealed_crcs = None;
            let stored = match cipher {
                None if direct => run.parts().to_vec(),
                None => self.staging.copy(&run),
                // The place is final here, and so the content that is stored. Its checksums are made while it is in a
                // first-level cache.
                Some(cipher) => {
                    let crcs = sealed_crcs.insert(Vec::with_capacity(count));
                    self.staging.seal(&run, |from, plain, sealed| {
                        cipher.seal_blocks(self.head.use_place(block + (from / BLOCK) as u64), plain, sealed);
                        crcs.extend(sealed.chunks_exact(BLOCK).map(crc32c));
                    })
                }
            };
            // The callback must not append, as that would change the position given to it.
            let made =
                entry(AppendedRun { done, payload: at, block, stored: &stored, plain: run.parts(), sealed_crcs });
            assert!(
                batch.payload_blocks() == at && batch.blob_bytes() == 0,
                "the callback that describes appended blocks appended to the log"
            );
            self.add_entry(&batch, &made);
            batch.add_blocks(stored);
            done += count;
        }
    }

    /// Appends a metadata blob, packed with its neighbours; `entry` builds its entry from its position in the payload.
    pub fn append_blob(&self, bytes: &[u8], entry: impl Fn(u32) -> StoreEntry) -> BlobPtr {
        self.append_blob_before(bytes, 0, entry)
    }

    /// Appends a metadata blob and an entry without payload that describes it, both in one batch.
    pub fn append_described_blob(
        &self,
        bytes: &[u8],
        entry: impl Fn(u32) -> StoreEntry,
        about: impl Fn(BlobPtr) -> StoreEntry,
    ) -> BlobPtr {
        let ptr = self.append_blob_before(bytes, encoded(&about(BlobPtr::default())).len(), entry);
        let batch = self.open.borrow().clone().expect("the batch of the blob is open");
        self.add_entry(&batch, &about(ptr));
        ptr
    }

    /// Appends a blob to a batch that also has space for `entry_bytes` bytes of entries after the blob's own.
    fn append_blob_before(&self, bytes: &[u8], entry_bytes: usize, entry: impl Fn(u32) -> StoreEntry) -> BlobPtr {
        let blocks = bytes.len().div_ceil(BLOCK) as u32 + 1;
        let batch = self.batch_with(encoded(&entry(0)).len() + entry_bytes, blocks);
        let at = batch.add_blob(bytes, &self.blob_buffers);
        self.add_entry(&batch, &entry(at as u32));
        if batch.blob_bytes() >= BATCH_BLOCKS as usize * BLOCK {
            self.pad_blobs(&batch);
        }
        let addr = batch.first_block() * BLOCK64 + at as u64;
        BlobPtr { addr, len: bytes.len() as u32, crc: crc32c(bytes) }
    }

    /// Pads the blobs at the end of the open batch to whole blocks.
    fn pad_blobs(&self, batch: &Batch) {
        self.writer.add_pending(batch.pad_blobs());
    }

    /// Closes the open batch and submits it to the device.
    pub fn close(&self) {
        let Some(batch) = self.open.borrow_mut().take() else { return };
        self.pad_blobs(&batch);
        self.writer.add_pending(batch.pad_to_lines(self.line_blocks));
        let payload_blocks = batch.payload_blocks();
        let (_, next_segment) = self.head.segment_and_next();
        let header = BatchHeader {
            store: self.store,
            epoch: self.epoch,
            seq: batch.seq(),
            block: batch.block(),
            durable_seq: self.writer.durable_seq(),
            next_segment,
            payload_blocks,
            continues: self.transaction.continues(),
            settled: self.transaction.settled_bytes(batch.seq()),
            entries: batch.take_entries(),
        };
        batch.close(&header, self.header_pool.get());
        self.head.end_batch(&batch);
        let bytes = (u64::from(payload_blocks) + 1) * BLOCK64;
        self.bytes_appended.set(self.bytes_appended.get() + bytes);
        self.writer.submit(batch);
    }

    /// Marks the log as failed after a failed flush of an anchor. The state of the device's cache is unknown then, and a
    /// later successful flush proves nothing about it.
    pub fn flush_failed(&self, error: Error) {
        self.writer.fail_permanently(error);
    }

    /// Abandons writes that the device rejects when the store is dropped. They are no longer retried, so that the
    /// device is released.
    pub fn abandon(&self) {
        self.writer.abandon();
    }

    /// Waits until all closed batches are written to the device (not yet durable).
    pub async fn wait_written(&self) -> Result<()> {
        self.writer.wait_written().await
    }

    /// Waits until all batches up to `seq` are written to the device (not yet durable): the kernel has them, and a kill of
    /// this process does not lose them. Closes the open batch as soon as no write is in flight, so that concurrent
    /// transactions share a batch.
    ///
    /// Errors: the device has failed.
    pub fn wait_written_to(&self, seq: u64) -> impl Future<Output = Result<()>> + use<> {
        self.writer.clone().wait_written_to(seq)
    }

    /// Waits until all batches up to `seq` are durable.
    pub async fn sync(&self, seq: u64) -> Result<()> {
        loop {
            if self.writer.durable_seq() >= seq {
                return Ok(());
            }
            if let Some(error) = self.failure() {
                return Err(error);
            }
            if self.open.borrow().as_ref().is_some_and(|batch| batch.seq() <= seq) {
                self.close();
            }
            self.writer.sync_progress(seq).await;
        }
    }

    /// Closes batches that have been open for `BATCH_OPEN_MAX`; runs until the log is dropped.
    pub async fn tick(log: Weak<StoreLog>) {
        loop {
            let Some(this) = log.upgrade() else { return };
            let seq = this.open.borrow().as_ref().map(|batch| batch.seq());
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
                    let same = this.open.borrow().as_ref().is_some_and(|batch| batch.seq() == seq);
                    if same && !this.transaction.is_in_progress() {
                        this.close();
                    }
                }
            }
        }
    }

    /// Closes batches early for which tasks wait; runs until the log is dropped.
    pub async fn close_early(log: Weak<StoreLog>) {
        loop {
            let Some(this) = log.upgrade() else { return };
            let early = this.writer.early();
            let next = early.wait();
            let open = this.open.borrow().as_ref().map(|batch| batch.seq());
            if open.is_some_and(|seq| this.writer.wants_early(seq)) && !this.transaction.is_in_progress() {
                this.close();
            }
            // Awaited without a reference to the log, which would keep it alive indefinitely.
            drop(this);
            next.await;
        }
    }

    /// Closes the open batch and returns the position of the next one.
    pub fn position(&self) -> LogPosition {
        self.close();
        self.head.position()
    }

    /// Ends the current segment of the log: the next batch begins the next one.
    pub fn leave_segment(&self) {
        self.close();
        self.head.end_segment();
    }

    /// Returns the current segment of the log and the next one.
    pub fn segment_and_next(&self) -> (u32, u32) {
        self.head.segment_and_next()
    }

    /// Returns whether bytes are still in memory, all of them.
    pub fn is_pending(&self, addr: u64, len: usize) -> bool {
        self.open.borrow().as_ref().is_some_and(|batch| batch.has(addr, len)) || self.writer.has(addr, len)
    }

    /// Returns bytes that are still in memory; `None` unless all of them are.
    pub fn pending_bytes_at(&self, addr: u64, len: usize) -> Option<BufList> {
        let found = self.open.borrow().as_ref().and_then(|batch| batch.read(addr, len));
        // The log may have moved to a lower address than closed batches that still wait to be written.
        found.or_else(|| self.writer.read(addr, len))
    }
}

/// Run of blocks that was appended.
pub struct AppendedRun<'a> {
    /// Number of blocks before it.
    pub done: usize,
    /// Position in the payload, in blocks.
    pub payload: u32,
    /// First block number on the device.
    pub block: u64,
    /// Stored bytes: encrypted, if there was a cipher.
    pub stored: &'a [Buf],
    /// Bytes as they were written.
    pub plain: &'a [Buf],
    /// Checksums of the stored blocks, if they were encrypted.
    sealed_crcs: Option<Vec<u32>>,
}

impl AppendedRun<'_> {
    /// Returns the checksums of the stored blocks.
    pub fn take_crcs(&mut self) -> Vec<u32> {
        self.sealed_crcs.take().unwrap_or_else(|| block_crcs(self.stored))
    }
}

/// Returns the payload of a full batch on devices with lines of `line_blocks` blocks.
fn full_blocks(line_blocks: u32) -> u32 {
    match line_blocks {
        1 => BATCH_BLOCKS,
        // With its header, a full batch has whole lines.
        _ => BATCH_LINES.min(BATCH_BLOCKS_MAX / line_blocks) * line_blocks - 1,
    }
}

/// Returns the encoded entry.
fn encoded(entry: &StoreEntry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64);
    entry.encode(&mut bytes);
    bytes
}

impl Drop for StoreLog {
    fn drop(&mut self) {
        // Wakes the tasks that close batches, so that they end.
        self.opened.notify_all();
        self.writer.early().notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::devices::DEVICES_MAX;

    #[test]
    fn full_batches_have_whole_lines() {
        assert_eq!(full_blocks(1), BATCH_BLOCKS);
        for line_blocks in 2..=DEVICES_MAX as u32 {
            let full = full_blocks(line_blocks);
            assert!((full + 1).is_multiple_of(line_blocks), "{full} blocks in lines of {line_blocks}");
            assert!((BATCH_BLOCKS..BATCH_BLOCKS_MAX).contains(&full), "{full} blocks in lines of {line_blocks}");
        }
    }
}
