//! The log: entries and blocks are appended in memory at once, written in batches, made durable by group commit.
//!
//! Appending never waits and never fails: whoever appends has passed the gate for space and memory before.  A batch
//! is written when it is full, when somebody waits for it, or when it has been open for a while.  Its blocks can be
//! read from memory until they are on the device.

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

/// Payload of a batch at which it is written, in blocks: no more than a device takes in one request (254 scattered pages
/// on virtio), for the kernel hands to a thread what it has to split.
const BATCH_BLOCKS: u32 = 128;
/// A batch that nobody waits for is written after this long.
const BATCH_OPEN_MAX: Duration = Duration::from_millis(10);
/// Writes in flight at once.
const WRITES_MAX: usize = 8;
/// Bytes a staging buffer.
const STAGING: usize = 256 * 1024;
/// Bytes appended and not yet written, past which those who append wait.
const PENDING_BYTES_MAX: usize = 32 << 20;
/// After a write failed, it is tried again after this long.
const RETRY_AFTER: Duration = Duration::from_millis(500);

struct Batch {
    seq: u64,
    /// Block number of the header.
    block: u64,
    /// In front of the payload, empty while the batch is open.
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

/// It can be written as it is, and kept until it is written: long, aligned, and not a small part of something larger.
fn is_direct(part: &Buf) -> bool {
    part.len() >= 16 * BLOCK && part.is_aligned(BLOCK) && part.retained() <= 2 * part.len()
}

/// The log's position and the batches in memory.
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
    /// Closed, oldest first; the front ones leave when they are written.
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
    /// Where the transaction's entries begin: batch, and bytes of entries there before them.
    transaction_from: Cell<(u64, u32)>,
    /// Why writes are refused: the device failed and has not recovered.
    failure: RefCell<Option<Error>>,
    /// It will not recover before the store is opened again.
    dead: Cell<bool>,
    progress: Notify,
    opened: Rc<Notify>,
    bytes_appended: Cell<u64>,
    /// The file system beneath, for a store in a file.
    host: Option<Rc<Host>>,
    this: RefCell<Weak<Log>>,
}

impl Log {
    /// A log that goes on in a fresh segment with batch `next_seq`.
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

    /// Bytes appended since the log was opened, headers included.
    pub fn bytes_appended(&self) -> u64 {
        self.bytes_appended.get()
    }

    /// Returns the bytes that wait to be written, without headers.
    pub fn bytes_pending(&self) -> u64 {
        self.pending_bytes.get() as u64
    }

    /// Why the device takes no writes now.
    pub fn failure(&self) -> Option<Error> {
        self.failure.borrow().clone()
    }

    /// Too much is waiting to be written.
    pub fn is_congested(&self) -> bool {
        self.pending_bytes.get() > PENDING_BYTES_MAX
    }

    /// Waits until less is waiting to be written, or the device has failed.
    pub async fn wait_uncongested(&self) {
        self.progress.wait_until(|| !self.is_congested() || self.failure.borrow().is_some()).await;
    }

    /// What follows belongs together until [`end_transaction`](Self::end_transaction): after a crash it is there
    /// wholly or not at all.
    pub fn begin_transaction(&self) {
        assert!(!self.in_transaction.replace(true), "transactions do not nest");
        self.transaction_began.set(false);
    }

    /// Ends what [`begin_transaction`](Self::begin_transaction) began; answers the batch that must be durable for it.
    pub fn end_transaction(&self) -> u64 {
        assert!(self.in_transaction.replace(false), "no transaction to end");
        self.last_seq()
    }

    /// The newest batch that holds something.
    pub fn last_seq(&self) -> u64 {
        match &*self.open.borrow() {
            Some(batch) => batch.seq,
            None => self.next_seq.get() - 1,
        }
    }

    /// Room in the open batch: bytes of entries, and payload blocks.
    fn room(&self, batch: &Batch) -> (usize, u32) {
        let entries = ENTRY_ROOM - batch.entries.borrow().len();
        let geometry = self.segments.borrow().geometry;
        let end = geometry.first_block(self.segment.get()) + geometry.segment_blocks();
        let used = batch.payload_blocks() + self.blobs.borrow().len().div_ceil(BLOCK) as u32;
        let left = (end - batch.block - 1) as u32 - used;
        (entries, left)
    }

    /// The open batch, with room for `entry_bytes` and at least `blocks` payload blocks.
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
        // A header with hardly any room after it is not worth a batch.
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
                // The gate keeps enough segments back, so this is a fault of ours; it must not become one of the
                // data: nothing more is written, and every flush fails.
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

    /// Called before each entry.
    fn note_entry(&self, batch: &Batch) {
        if self.in_transaction.get() && !self.transaction_began.replace(true) {
            self.transaction_from.set((batch.seq, batch.entries.borrow().len() as u32));
        }
    }

    /// Appends blocks: calls `entry` for each piece with (blocks before it, its place in the payload, its first block
    /// number on the device, its data) for the entry that describes it.  Pieces are as long as batches allow; `size_of`
    /// gives an entry's bytes for so many blocks.
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
            // Whatever the caller does with the place must not append: the place would not be this one.
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

    /// Copies of it that can be written directly, packed with their neighbours.
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

    /// Appends a metadata blob, packed with its neighbours; `entry` makes its entry from its place in the payload.
    pub fn append_blob(&self, bytes: &[u8], entry: impl Fn(u32) -> Entry) -> BlobPtr {
        let mut encoded = Vec::with_capacity(64);
        entry(0).encode(&mut encoded);
        let blocks = bytes.len().div_ceil(BLOCK) as u32 + 1;
        let batch = self.batch_with(encoded.len(), blocks);
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

    /// Makes whole blocks of the blobs at the end of the open batch.
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

    /// Ends the open batch and sends it to the device.
    pub fn close(&self) {
        let Some(batch) = self.open.borrow_mut().take() else { return };
        self.pad_blobs(&batch);
        let payload_blocks = batch.payload_blocks();
        let continues = self.in_transaction.get() && self.transaction_began.get();
        // Transactions that are complete here may be answered as durable before the one that goes on is.
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
                    // The same bytes to the same place, until the device takes them: nothing appended is given up.
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

    /// A flush has failed, this one's or an anchor's: what the device has kept of its cache is anybody's guess, and
    /// a later flush that succeeds says nothing about it.
    pub fn flush_failed(&self, error: Error) {
        self.dead.set(true);
        self.fail(error);
    }

    /// The store is given up with writes that the device does not take: they are tried no more, so that the device is
    /// let go of.
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

    /// Waits until every batch that is closed is on the device (not yet durable).
    pub async fn wait_written(&self) -> Result<()> {
        let seq = self.closed.borrow().back().map_or(0, |batch| batch.seq);
        self.progress.wait_until(|| self.written_seq.get() >= seq || self.failure.borrow().is_some()).await;
        if self.written_seq.get() >= seq { Ok(()) } else { Err(self.failure().expect("it has failed")) }
    }

    /// Waits until everything up to batch `seq` is durable.
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

    /// One group commit: everything that is written when it begins.
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

    /// Closes batches that have been open for a while; runs as long as the log is in use.
    pub async fn tick(log: Weak<Log>) {
        loop {
            let Some(this) = log.upgrade() else { return };
            let seq = this.open.borrow().as_ref().map(|batch| batch.seq);
            match seq {
                None => {
                    // Awaited without holding the log, which would keep it alive for ever.
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

    /// Where the next batch will go; the open one is closed.
    pub fn position(&self) -> LogPosition {
        self.close();
        LogPosition { block: self.next_block.get(), seq: self.next_seq.get() }
    }

    /// The segment where the log is, and the one where it goes on.
    pub fn segment_and_next(&self) -> (u32, u32) {
        (self.segment.get(), self.next_segment.get())
    }

    /// Bytes that are still in memory; all of them or none.
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
                // The log may have gone on at a lower place than where closed batches still wait to be written.
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
        // The ticker waits for the next batch; it sees that the log is gone and ends.
        self.opened.notify_all();
    }
}
