//! Layer on disk: parts in slots of a file, and a table that says which part is in which slot.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{Buf, SnapId};
use forebay_reactor::sync::{Notify, Semaphore, join_all};
use forebay_reactor::{File, OpenOptions, random, wall_clock};

use crate::flags::ZeroFlags;
use crate::format::{
    BLOCK_LEN, CacheFormatError, CacheGeometry, IMAGE_LEN_MAX, Incarnation, PART_LEN, ROWS_PER_BLOCK, Row, RowKind,
    Superblock, TABLE_AT, TableBlock, part_crc,
};
use crate::part::{ABSENT, PartKey, SnapshotSources};
use crate::s3fifo::S3Fifo;
use crate::stats::CacheDiskCounters;
use crate::table::{Table, TableRow};

/// Parts that wait to be written, at most: 32 MiB. More are dropped.
const QUEUE_MAX: usize = 512;
/// Errors after which the disk is turned off.
const ERRORS_MAX: u32 = 8;
/// Operations in order after which one error is forgotten.
const FORGIVEN_AFTER: u32 = 1024;
/// Bytes of the table that are read at a time.
const LOAD_LEN: u64 = 1 << 20;
/// Reads of the table in flight.
const LOAD_WINDOW: usize = 4;

/// Part in the layer on disk.
pub(crate) enum DiskPart {
    /// Bytes that wait to be written.
    Queued(Buf),
    /// Row in whose slot it is stored.
    Stored(u32),
}

/// Open file of the cache.
///
/// Invariants: a part that [`find`](Self::find) returns is verified against its key and checksum before it is used. A
/// row's slot is written only while the row has no key and nobody reads the slot. Nothing in the file is needed: after
/// an error, everything in it may be forgotten.
pub(crate) struct Disk {
    pub(crate) file: File,
    pub(crate) geometry: CacheGeometry,
    pub(crate) incarnation: Cell<Incarnation>,
    pub(crate) table: RefCell<Table>,
    pub(crate) index: RefCell<S3Fifo<PartKey, u32>>,
    /// Parts to be written, oldest first.
    pub(crate) queue: RefCell<VecDeque<PartKey>>,
    /// Parts that are queued or being written.
    pub(crate) pending: RefCell<HashMap<PartKey, Buf>>,
    /// Signaled when there is something to write, or no more.
    pub(crate) changed: Notify,
    /// Permit to write: batches and clearing exclude each other.
    pub(crate) turn: Semaphore,
    pub(crate) counters: Rc<CacheDiskCounters>,
    pub(crate) closing: Cell<bool>,
    errors: Cell<u32>,
    successes: Cell<u32>,
    failed: RefCell<Option<String>>,
}

impl Disk {
    /// Opens a file or block device of `size` bytes, and reads its table; one that is not usable is emptied.
    ///
    /// # Errors
    /// The reason for not using the file, for the operator.
    pub(crate) async fn open(
        path: &Path,
        size: u64,
        counters: Rc<CacheDiskCounters>,
        sources: &SnapshotSources,
        flags: &ZeroFlags,
        now_ms: u32,
    ) -> Result<Rc<Self>, String> {
        let options = OpenOptions::read_write().create().direct().lock();
        let opened = File::open_when_free(path, options).await;
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => "another process has it open".to_owned(),
            _ => format!("cannot open it: {error}"),
        })?;
        let info = file.info();
        if info.sector as usize > BLOCK_LEN {
            return Err(format!("its sectors have {} bytes; at most {BLOCK_LEN} are supported", info.sector));
        }
        let size = if info.block_device { size.min(info.size) } else { size };
        let geometry = CacheGeometry::of(size).ok_or_else(|| format!("{size} bytes are too small or too large"))?;
        let found = if info.size < BLOCK_LEN as u64 {
            let start = file.read_at(forebay_block::BufMut::with_capacity(BLOCK_LEN), 0).await;
            let (result, start) = start;
            result.map_err(|error| format!("cannot read its superblock: {error}"))?;
            match forebay_block::is_zero(&start) {
                true => Err(CacheFormatError::Empty),
                false => Err(CacheFormatError::Stranger),
            }
        } else {
            let start = file.read_exact_at(0, BLOCK_LEN).await;
            Superblock::decode(&start.map_err(|error| format!("cannot read its superblock: {error}"))?)
        };
        let disk = Rc::new(Self {
            geometry,
            incarnation: Cell::new([0; 16]),
            table: RefCell::new(Table::new(geometry)),
            index: RefCell::new(S3Fifo::new(geometry.data_rows as usize)),
            queue: RefCell::default(),
            pending: RefCell::default(),
            changed: Notify::new(),
            turn: Semaphore::new(1),
            counters,
            closing: Cell::new(false),
            errors: Cell::new(0),
            successes: Cell::new(0),
            failed: RefCell::default(),
            file,
        });
        let path = path.display();
        match found {
            Ok(superblock) if superblock.size == size => {
                disk.incarnation.set(superblock.incarnation);
                let unread = disk.load(sources, flags, now_ms).await;
                let (parts, known) = (disk.index.borrow().len(), flags.len());
                tracing::info!(%path, parts, flags = known, unread, "read cache: opened");
                return Ok(disk);
            }
            Ok(superblock) => {
                let (was, size) = (superblock.size, size);
                tracing::info!(%path, was, size, "read cache: the size has changed; the file is emptied");
            }
            Err(CacheFormatError::Empty) => tracing::info!(%path, size, "read cache: created"),
            Err(CacheFormatError::Stranger) => {
                return Err("it holds something else than a read cache; remove it, or choose another path".into());
            }
            Err(error) => tracing::warn!(%path, %error, "read cache: the file is emptied"),
        }
        disk.format().await.map_err(|error| format!("cannot write its superblock: {error}"))?;
        Ok(disk)
    }

    /// Gives the file a new incarnation: nothing that is stored is valid any more.
    async fn format(&self) -> io::Result<()> {
        let incarnation = [random().to_le_bytes(), random().to_le_bytes()].concat();
        self.incarnation.set(incarnation.try_into().expect("16 bytes"));
        let info = self.file.info();
        if !info.block_device && self.file.size()? != self.geometry.size {
            self.file.set_size(self.geometry.size)?;
        }
        let created_s = wall_clock().as_secs();
        let superblock = Superblock { incarnation: self.incarnation.get(), size: self.geometry.size, created_s };
        self.file.write_durable_at(Buf::copy_of(&superblock.encode()), 0).await
    }

    /// Reads the table; returns the number of its blocks that could not be read. Nothing of it is verified yet.
    async fn load(&self, sources: &SnapshotSources, flags: &ZeroFlags, now_ms: u32) -> u64 {
        let mut unread = 0;
        // Of two rows with one key, that in the block with the higher serial counts.
        let mut serials: HashMap<u32, u64> = HashMap::new();
        let end = TABLE_AT + u64::from(self.geometry.blocks()) * BLOCK_LEN as u64;
        let mut at = TABLE_AT;
        while at < end {
            let chunks: Vec<(u64, u64)> = (0..LOAD_WINDOW as u64)
                .map(|chunk| at + chunk * LOAD_LEN)
                .take_while(|&from| from < end)
                .map(|from| (from, LOAD_LEN.min(end - from)))
                .collect();
            let reads = chunks.iter().map(|&(from, len)| Box::pin(self.file.read_exact_at(from, len as usize)));
            for ((from, len), read) in chunks.iter().zip(join_all(reads).await) {
                let first = ((from - TABLE_AT) / BLOCK_LEN as u64) as u32;
                let Ok(bytes) = read else {
                    unread += len / BLOCK_LEN as u64;
                    continue;
                };
                for (number, block) in bytes.chunks_exact(BLOCK_LEN).enumerate() {
                    let block_number = first + number as u32;
                    if let Some(block) = TableBlock::decode(block, block_number, &self.incarnation.get()) {
                        serials.insert(block_number, block.serial);
                        self.load_block(block_number, block, &serials, (sources, flags), now_ms);
                    }
                }
            }
            at += LOAD_WINDOW as u64 * LOAD_LEN;
        }
        self.table.borrow_mut().find_free();
        unread
    }

    fn load_block(
        &self,
        number: u32,
        block: TableBlock,
        serials: &HashMap<u32, u64>,
        (sources, flags): (&SnapshotSources, &ZeroFlags),
        now_ms: u32,
    ) {
        let (mut table, mut index) = (self.table.borrow_mut(), self.index.borrow_mut());
        table.saw_serial(block.serial);
        for (at, row) in (0..).zip(block.rows) {
            let at = number * ROWS_PER_BLOCK + at;
            let Some(Row { kind, identity, object, part, crc }) = row else { continue };
            let is_data = kind == RowKind::Data;
            if at >= self.geometry.rows() || is_data != (at < self.geometry.data_rows) || identity.snap == SnapId::HEAD
            {
                continue;
            }
            let part = match kind {
                RowKind::Absent => ABSENT,
                RowKind::Data | RowKind::Zero => part,
            };
            let key = PartKey { source: sources.intern(&identity), object, part };
            let known = if is_data { index.peek(&key).copied() } else { flags.row(&key) };
            if let Some(known) = known {
                if serials.get(&(known / ROWS_PER_BLOCK)).is_some_and(|serial| *serial >= block.serial) {
                    continue;
                }
                table.release(known);
                index.remove(&key);
                flags.remove(&key);
            }
            let fits = match is_data {
                true => index.restore(key.clone(), at, now_ms),
                false => flags.restore(key.clone(), at, now_ms),
            };
            if fits {
                table.restore(at, TableRow { key, kind, crc, verified: false });
            }
        }
    }

    /// Returns whether the disk is in use.
    pub(crate) fn is_on(&self) -> bool {
        self.failed.borrow().is_none()
    }

    /// Returns the reason for which the disk was turned off.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failed.borrow().clone()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// Looks for a part, and counts the reference.
    pub(crate) fn find(&self, key: &PartKey, now_ms: u32) -> Option<DiskPart> {
        let stored = self.index.borrow_mut().get(key, now_ms).copied();
        if let Some(row) = stored {
            return Some(DiskPart::Stored(row));
        }
        self.pending.borrow().get(key).cloned().map(DiskPart::Queued)
    }

    /// Counts a reference to a part that was found in memory.
    pub(crate) fn touch(&self, key: &PartKey, now_ms: u32) {
        self.index.borrow_mut().get(key, now_ms);
    }

    /// Reads the part of a row that [`find`](Self::find) has just returned; `None` if it cannot be read, or is not what
    /// the table says. It is forgotten then.
    pub(crate) async fn read(&self, key: &PartKey, row: u32) -> Option<Buf> {
        let (crc, verified) = {
            let mut table = self.table.borrow_mut();
            let content = table.get(row).filter(|content| content.key == *key)?;
            let about = (content.crc, content.verified);
            table.pin(row);
            about
        };
        let read = self.file.read_exact_at(self.geometry.slot_at(row), PART_LEN as usize).await;
        self.table.borrow_mut().unpin(row);
        let identity = &key.source.0;
        match read {
            Ok(data) if part_crc(identity, key.object, key.part, &data) == Some(crc) => {
                self.succeeded();
                let mut table = self.table.borrow_mut();
                if let Some(content) = table.get_mut(row).filter(|content| content.key == *key) {
                    content.verified = true;
                }
                Some(data.freeze())
            }
            Ok(_) if verified => {
                self.forget(key, row);
                self.counters.checksum_errors.add(1);
                self.note_error(&format!("wrong checksum in the slot of row {row}"));
                None
            }
            // The process ended between a write of the slot and that of its row.
            Ok(_) => {
                self.forget(key, row);
                self.counters.stale.add(1);
                None
            }
            Err(error) => {
                self.forget(key, row);
                self.counters.errors.add(1);
                self.note_error(&format!("cannot read the slot of row {row}: {error}"));
                None
            }
        }
    }

    fn forget(&self, key: &PartKey, row: u32) {
        let mut index = self.index.borrow_mut();
        if index.peek(key) == Some(&row) {
            index.remove(key);
            self.table.borrow_mut().discard(row);
            self.changed.notify_all();
        }
    }

    /// Queues a part to be written, unless it is stored already; dropped when too many wait.
    pub(crate) fn store(&self, key: &PartKey, data: &Buf) {
        let known = || self.index.borrow().peek(key).is_some() || self.pending.borrow().contains_key(key);
        if !self.is_on() || self.closing.get() || key.source.0.image.len() > IMAGE_LEN_MAX || known() {
            return;
        }
        if self.queue.borrow().len() >= QUEUE_MAX {
            self.counters.dropped.add(1);
            return;
        }
        self.pending.borrow_mut().insert(key.clone(), data.clone());
        self.queue.borrow_mut().push_back(key.clone());
        self.changed.notify_all();
    }

    /// Removes a part, stored or queued; returns whether there was one. A read of its slot that is in flight returns what it
    /// held.
    pub(crate) fn invalidate(&self, key: &PartKey) -> bool {
        let queued = self.pending.borrow_mut().remove(key).is_some();
        let row = self.index.borrow_mut().remove(key);
        if let Some(row) = row {
            self.table.borrow_mut().release(row);
        }
        queued || row.is_some()
    }

    /// Takes a part that has been written out of those that wait; `false` if it was invalidated meanwhile.
    pub(crate) fn take_pending(&self, key: &PartKey, data: &Buf) -> bool {
        let mut pending = self.pending.borrow_mut();
        // Another buffer is a later content of the part, which is still to be written.
        let is_same = pending.get(key).is_some_and(|queued| std::ptr::eq(&**queued, &**data));
        is_same && pending.remove(key).is_some()
    }

    /// Gives a flag a row; `None` if there is none.
    pub(crate) fn set_flag(&self, key: &PartKey) -> Option<u32> {
        if !self.is_on() || self.closing.get() || key.source.0.image.len() > IMAGE_LEN_MAX {
            return None;
        }
        let kind = match key.part {
            ABSENT => RowKind::Absent,
            _ => RowKind::Zero,
        };
        let mut table = self.table.borrow_mut();
        let row = table.take_flag()?;
        table.set(row, TableRow { key: key.clone(), kind, crc: 0, verified: true });
        self.changed.notify_all();
        Some(row)
    }

    /// Frees the row of a flag.
    pub(crate) fn release_flag(&self, row: u32) {
        if self.is_on() {
            self.table.borrow_mut().release(row);
        }
    }

    /// Forgets everything, also what is stored, and the flags, which have rows of the table.
    pub(crate) async fn clear(&self, flags: &ZeroFlags) -> io::Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.queue.borrow_mut().clear();
        self.pending.borrow_mut().clear();
        self.index.borrow_mut().clear();
        self.table.borrow_mut().reset();
        flags.clear();
        self.format().await
    }

    pub(crate) fn succeeded(&self) {
        self.successes.set(self.successes.get() + 1);
        if self.successes.get() >= FORGIVEN_AFTER {
            self.successes.set(0);
            self.errors.set(self.errors.get().saturating_sub(1));
        }
    }

    /// Counts an error; turns the disk off if there are too many.
    pub(crate) fn note_error(&self, what: &str) {
        if !self.is_on() {
            return;
        }
        let path = self.file.path().display();
        tracing::warn!(%path, "read cache: {what}");
        self.errors.set(self.errors.get() + 1);
        if self.errors.get() >= ERRORS_MAX {
            tracing::warn!(%path, "read cache: turned off after {ERRORS_MAX} errors; reads go on from the backend");
            self.turn_off(format!("{ERRORS_MAX} errors, the last one: {what}"));
        }
    }

    /// Ends the use of the disk.
    pub(crate) fn turn_off(&self, reason: String) {
        self.failed.borrow_mut().get_or_insert(reason);
        self.queue.borrow_mut().clear();
        self.pending.borrow_mut().clear();
        self.index.borrow_mut().clear();
        self.changed.notify_all();
    }
}
