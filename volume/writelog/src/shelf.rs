//! Log device: a file, block device or memory with a directory and logs.

mod create;
mod directory;
mod encryption;
mod opened;
mod space;
mod volatile;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{Buf, BufMut, DataKey, Error, ErrorKind, Result};
use forebay_reactor::pmem::{PersistentMemory, PmemFile, PmemOptions, is_dax_device};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{File, OpenOptions, spawn};

use crate::cipher::{open_cipher, require_key};
use crate::format::{
    DIRECTORY_COPIES, LOG_SIZE_LEAST, LOG_SIZE_MIN, LOGS_AT, LogDirectory, LogFormatError, LogId, LogSuperblock,
    MediumKind, SHELF_UNFINISHED, SUPER_COPIES, SUPER_LEN, ShelfEntry,
};
use crate::media::pmem::PmemMedium;
use crate::media::shared_sync::SharedSync;
use crate::media::ssd::Ssd;
use crate::media::storage::BlockStorage;
use crate::media::{Medium, Recovered};
use crate::superseded::superseded_entries;
pub(crate) use create::draw_id;
use directory::DirectoryCopy;
pub use opened::OpenLog;
pub(crate) use opened::{OpenCopy, OpenGuard};
use space::{grow_memory, open_file, remove};

/// Options of opening a log device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShelfOptions {
    /// Set to create it if it does not exist.
    pub create: bool,
    /// Space in bytes to reserve for one more log, growing the device if possible.
    pub room: u64,
    /// Minimum size in bytes of a log device in persistent memory, with [`create`](Self::create): it does not grow while
    /// it is open.
    pub size: u64,
    /// Set to permit logs smaller than 16 MiB: for tests that fill them.
    pub small: bool,
    /// Set to accept memory that does not guarantee persistence: for benchmarks only.
    pub force: bool,
}

/// Description of a log, from its own superblock and contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogInfo {
    /// Log id.
    pub id: LogId,
    /// Identity of the volume that it belongs to.
    pub volume: String,
    /// Name of that volume when the log was created.
    pub name: String,
    /// Kind of log device.
    pub medium: MediumKind,
    /// Size in bytes.
    pub size: u64,
    /// Set if its payloads are encrypted.
    pub encrypted: bool,
    /// Epoch of its membership.
    pub epoch: u64,
    /// Number of times that it was opened.
    pub run: u32,
    /// Set if it was closed with all data at the backend.
    pub clean: bool,
    /// Creation time in seconds since 1970.
    pub created_s: u64,
    /// Set if this process has it open; the dirty data is then known only to its own counters.
    pub open: bool,
    /// Number of entries that the backend may not hold.
    pub dirty_entries: u64,
    /// Bytes of the volume covered by them, without superseded entries.
    pub dirty_bytes: u64,
    /// Time of the oldest of them in milliseconds since 1970.
    pub dirty_since_ms: Option<u64>,
}

/// Newest valid superblock of a log's two copies.
struct NewestSuperblock {
    superblock: LogSuperblock,
    /// Index of the copy it was read from.
    copy: usize,
    /// Set if the other copy has been written and is damaged: it may have been the newer one.
    one_lost: bool,
}

enum Backing {
    File(File),
    Memory(Rc<dyn PersistentMemory>),
}

/// Log device, locked by one process at a time.
pub struct Shelf {
    backing: Backing,
    syncs: Rc<SharedSync>,
    kind: MediumKind,
    path: String,
    directory: RefCell<LogDirectory>,
    copy: Cell<usize>,
    open: RefCell<BTreeSet<LogId>>,
    turn: Semaphore,
    /// Minimum size of a new log in bytes.
    smallest: u64,
    /// Set if opening created the file; it is removed again if the first log cannot be created.
    made: Cell<bool>,
    /// Set once the file was removed again.
    removed: Cell<bool>,
    /// Set if a copy of the directory was damaged when it was read, and may have listed more logs: no space is freed.
    unsure: Cell<bool>,
    /// Error that blocks creating and discarding logs: a copy of the directory was damaged, and the search for a log
    /// that only it may have listed failed. Writing the directory without that log would lose it.
    frozen: RefCell<Option<Error>>,
}

fn io(error: std::io::Error, path: &str, what: &str) -> Error {
    let busy = error.kind() == std::io::ErrorKind::WouldBlock;
    let error = Error::from_io(error, format!("{path}: {what}"));
    if busy { Error::new(ErrorKind::Busy, format!("{path}: in use by another process")) } else { error }
}

/// Returns a log's id in 32 hexadecimal digits.
pub fn id_text(id: &LogId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a log id of 32 hexadecimal digits; `None` for any other text.
pub fn parse_id(text: &str) -> Option<LogId> {
    if text.len() != 2 * size_of::<LogId>() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut id = LogId::default();
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(id)
}

impl Shelf {
    /// Opens, or creates, the log device at `path`.
    ///
    /// # Errors
    /// If it cannot be opened, is in use by another process ([`ErrorKind::Busy`]), is not a log device or newer than
    /// this program ([`ErrorKind::Invalid`]), or is damaged; for persistent memory also if the memory is not
    /// persistent ([`ErrorKind::Unsupported`]).
    pub async fn open(kind: MediumKind, path: &Path, options: ShelfOptions) -> Result<Rc<Self>> {
        let name = path.display().to_string();
        match kind {
            MediumKind::Ssd => {
                let how = OpenOptions::read_write().direct().lock();
                let (file, made) = open_file(path, &name, how, options.create).await?;
                if file.info().sector > 4096 {
                    let text = format!("{name}: sectors of {} bytes; 4096 at most", file.info().sector);
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                let loaded = Self::load(Backing::File(file), kind, name.clone(), options).await;
                match &loaded {
                    Ok(shelf) => shelf.made.set(made),
                    Err(_) if made => remove(path, &name),
                    Err(_) => {}
                }
                loaded
            }
            MediumKind::Dram => Err(Self::no_path(path)),
            MediumKind::Pmem => {
                let how = PmemOptions { create: options.create, size: 0, force: options.force };
                let is_device = is_dax_device(path);
                let before = match options.create && !is_device {
                    true => Some(grow_memory(path, &name, LOGS_AT + options.room.max(LOG_SIZE_MIN)).await?),
                    false => None,
                };
                let shelf = match Self::map(path, &name, how, options).await {
                    Ok(shelf) => shelf,
                    Err(error) => {
                        // Not persistent memory, or a foreign file.
                        if let Some(before) = before
                            && let Ok(file) = File::open(path, OpenOptions::read_write().lock())
                        {
                            before.restore(&file, path, &name).await;
                        }
                        return Err(error);
                    }
                };
                let limit = shelf.limit();
                let needed = match options.room {
                    0 => 0,
                    room if shelf.directory.borrow().room_for(room, limit).is_some() => 0,
                    room => shelf.directory.borrow().room_for(room, None).unwrap_or(0) + room,
                };
                // Grown only now that it is known to be persistent memory.
                let size = if options.create { needed.max(options.size) } else { needed };
                if limit.is_none_or(|limit| limit >= size) {
                    return Ok(shelf);
                }
                if is_device {
                    let text = format!("{name}: {size} bytes are needed, and this device has {}", shelf.size()?);
                    return Err(Error::new(ErrorKind::NoSpace, text));
                }
                drop(shelf);
                grow_memory(path, &name, size).await?;
                Self::map(path, &name, how, options).await
            }
        }
    }

    async fn map(path: &Path, name: &str, how: PmemOptions, options: ShelfOptions) -> Result<Rc<Self>> {
        let mapping = PmemFile::open(path, how).map_err(|e| io(e, name, "mapping"))?;
        Self::load(Backing::Memory(Rc::new(mapping)), MediumKind::Pmem, name.to_owned(), options).await
    }

    /// Opens a log device in memory mapped by the caller.
    ///
    /// # Errors
    /// Errors of [`open`](Self::open).
    pub async fn on_memory(memory: Rc<dyn PersistentMemory>, name: &str, options: ShelfOptions) -> Result<Rc<Self>> {
        Self::load(Backing::Memory(memory), MediumKind::Pmem, name.to_owned(), options).await
    }

    async fn load(backing: Backing, kind: MediumKind, path: String, options: ShelfOptions) -> Result<Rc<Self>> {
        let create = options.create;
        let smallest = if options.small { LOG_SIZE_LEAST } else { LOG_SIZE_MIN };
        let shelf = Self {
            backing,
            syncs: Rc::default(),
            kind,
            path,
            directory: RefCell::new(LogDirectory { serial: 0, medium: kind, logs: Vec::new() }),
            copy: Cell::new(0),
            open: RefCell::default(),
            turn: Semaphore::new(1),
            smallest,
            made: Cell::new(false),
            removed: Cell::new(false),
            unsure: Cell::new(false),
            frozen: RefCell::default(),
        };
        let copies = shelf.read_directories().await?;
        let newer =
            copies.iter().filter_map(DirectoryCopy::refused).find(|why| matches!(why, LogFormatError::Newer(_)));
        if let Some(LogFormatError::Newer(what)) = newer {
            return Err(Error::new(ErrorKind::Invalid, format!("{}: {what}; use a newer program", shelf.path)));
        }
        let whole = copies.iter().enumerate().filter_map(|(copy, found)| Some((copy, found.whole()?)));
        let blank = copies.iter().all(|copy| matches!(copy, DirectoryCopy::Blank));
        let empty = shelf.directory.borrow().clone();
        let has_log = create && blank && !shelf.find_unlisted(&empty).await?.is_empty();
        match whole.max_by_key(|(_, found)| found.serial) {
            Some((_, found)) if found.medium != kind => {
                let text = format!("{}: its logs are of the medium {}", shelf.path, found.medium.name());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            Some((copy, found)) => {
                let other = &copies[1 - copy];
                shelf.copy.set(1 - copy);
                shelf.directory.replace(found.clone());
                shelf.unsure.set(other.is_lost(found));
                let differs = other.whole().is_none_or(|other| other.logs != found.logs);
                if differs && let Err(error) = shelf.restore_directory(shelf.unsure.get()).await {
                    tracing::warn!(path = shelf.path, %error, "cannot write a copy of the directory");
                    shelf.unsure.set(true);
                }
                // Remains of a log whose creation or removal was interrupted by a crash.
                shelf.give_back_unused().await;
                if !shelf.unsure.get() {
                    shelf.clear_discarded().await;
                }
            }
            None if create && blank && !has_log => {
                shelf.grow(LOGS_AT).await?;
                if let Backing::Memory(memory) = &shelf.backing {
                    // A power failure may leave any part of the following stores.
                    memory.store_word(DIRECTORY_COPIES[0], u64::from_le_bytes(*SHELF_UNFINISHED));
                    memory.fence();
                }
                let directory = shelf.directory.borrow().clone();
                shelf.write_directory(directory).await?;
            }
            None => {
                if let Some(error) = copies.iter().find_map(DirectoryCopy::error) {
                    return Err(error.clone().within(format!("{}: its directory cannot be read", shelf.path)));
                }
                let mut reasons = copies.iter().filter_map(DirectoryCopy::refused);
                let (kind, why) = match reasons.find(|reason| **reason != LogFormatError::Stranger) {
                    Some(why) => (ErrorKind::Corrupt, why.to_string()),
                    None if has_log => (ErrorKind::Corrupt, "its directory is blank, but not its first log".to_owned()),
                    None => (ErrorKind::Invalid, "no write logs are kept here".to_owned()),
                };
                let hint = if create { "; take another file, or clear its first 2 MiB" } else { "" };
                return Err(Error::new(kind, format!("{}: {why}{hint}", shelf.path)));
            }
        }
        Ok(Rc::new(shelf))
    }

    /// Returns the path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns whether the file was removed again because its first log could not be created: the log device must be
    /// reopened.
    pub fn is_removed(&self) -> bool {
        self.removed.get()
    }

    /// Returns the kind of log device.
    pub fn medium(&self) -> MediumKind {
        self.kind
    }

    fn size(&self) -> Result<u64> {
        match &self.backing {
            Backing::File(file) if file.info().block_device => Ok(file.info().size),
            Backing::File(file) => file.size().map_err(|error| io(error, &self.path, "looking at it")),
            Backing::Memory(memory) => Ok(memory.len()),
        }
    }

    /// Returns the end of the log device in bytes, if it cannot grow.
    fn limit(&self) -> Option<u64> {
        match &self.backing {
            Backing::File(file) if !file.info().block_device => None,
            _ => self.size().ok(),
        }
    }

    async fn grow(&self, size: u64) -> Result<()> {
        if self.size()? >= size {
            return Ok(());
        }
        match &self.backing {
            Backing::File(file) if !file.info().block_device => {
                file.set_size(size).map_err(|error| io(error, &self.path, "making it longer"))
            }
            _ => Err(Error::new(ErrorKind::NoSpace, format!("{}: {size} bytes are needed", self.path))),
        }
    }

    async fn read(&self, at: u64, len: usize) -> Result<Buf> {
        match &self.backing {
            Backing::File(file) => {
                let read = file.read_exact_at(at, len).await;
                Ok(read.map_err(|error| io(error, &self.path, "reading"))?.freeze())
            }
            Backing::Memory(memory) => {
                let mut buf = BufMut::zeroed(len);
                memory.load(at, &mut buf);
                Ok(buf.freeze())
            }
        }
    }

    async fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        match &self.backing {
            Backing::File(file) => {
                let written = file.write_durable_at(Buf::copy_of(bytes), at).await;
                written.map_err(|error| io(error, &self.path, "writing"))
            }
            Backing::Memory(memory) => {
                // The first word identifies the structure: it is stored once the rest is durable.
                let Some((word, rest)) = bytes.split_first_chunk() else {
                    return Err(Error::new(ErrorKind::Invalid, format!("{}: {} bytes", self.path, bytes.len())));
                };
                memory.store(at + word.len() as u64, rest);
                memory.fence();
                memory.store_word(at, u64::from_le_bytes(*word));
                memory.fence();
                Ok(())
            }
        }
    }

    /// Refuses to create or discard logs while the directory may lack one.
    fn refuse_if_frozen(&self) -> Result<()> {
        let what = "its directory is damaged and may lack a log, so none is made or discarded until it is opened again";
        let error = |error: &Error| error.clone().within(format!("{}: {what}", self.path));
        self.frozen.borrow().as_ref().map_or(Ok(()), |frozen| Err(error(frozen)))
    }

    fn entry(&self, id: &LogId) -> Result<ShelfEntry> {
        let directory = self.directory.borrow();
        let found = directory.logs.iter().find(|log| log.log == *id).copied();
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{}: no log {}", self.path, id_text(id))))
    }

    /// Reads the newest superblock of a log.
    async fn superblock(&self, entry: &ShelfEntry) -> Result<NewestSuperblock> {
        let mut best: Option<(LogSuperblock, usize)> = None;
        let mut valid = 0;
        let mut reason = LogFormatError::Stranger;
        for (copy, &at) in SUPER_COPIES.iter().enumerate() {
            let decoded = LogSuperblock::decode(&self.read(entry.start + at, SUPER_LEN).await?);
            valid += usize::from(decoded.as_ref().is_ok_and(|found| found.log == entry.log));
            match decoded {
                Ok(found) if best.as_ref().is_none_or(|(best, _)| found.serial > best.serial) => {
                    best = Some((found, copy));
                }
                Ok(_) => {}
                Err(LogFormatError::Stranger) => {}
                Err(refused) => reason = refused,
            }
        }
        let id = id_text(&entry.log);
        if let LogFormatError::Newer(what) = &reason {
            return Err(Error::new(ErrorKind::Invalid, format!("{}: log {id}: {what}", self.path)));
        }
        match best {
            Some((found, copy)) if (found.log, found.size, found.medium) == (entry.log, entry.size, self.kind) => {
                // Both copies are written from the second write on.
                let one_lost = valid < SUPER_COPIES.len() && found.serial > 1;
                Ok(NewestSuperblock { superblock: found, copy, one_lost })
            }
            Some(_) => Err(Error::new(
                ErrorKind::Corrupt,
                format!("{}: the superblock of log {id} differs from the directory", self.path),
            )),
            None => Err(Error::new(ErrorKind::Corrupt, format!("{}: log {id}: {reason}", self.path))),
        }
    }

    /// Keeps the file even if the first log cannot be created in it.
    pub fn keep_file(&self) {
        self.made.set(false);
    }

    /// Returns the ids of all logs.
    pub fn ids(&self) -> Vec<LogId> {
        self.directory.borrow().logs.iter().map(|log| log.log).collect()
    }

    /// Returns the ids of all logs, and their sizes in bytes.
    pub fn sizes(&self) -> Vec<(LogId, u64)> {
        self.directory.borrow().logs.iter().map(|log| (log.log, log.size)).collect()
    }

    /// Describes a log without opening it.
    ///
    /// # Errors
    /// If it does not exist or is damaged.
    pub async fn inspect(&self, id: &LogId) -> Result<LogInfo> {
        let is_open = self.open.borrow().contains(id);
        self.describe(id, !is_open).await
    }

    /// Describes a copy of another peer's log, whether it is open or not: with the entries that a recovery would find now.
    /// An upper bound: entries that its primary has written back since may be included.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub async fn inspect_copy(&self, id: &LogId) -> Result<LogInfo> {
        self.describe(id, true).await
    }

    /// Describes a log by its superblock alone: without what it holds.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub async fn inspect_superblock(&self, id: &LogId) -> Result<LogInfo> {
        self.describe(id, false).await
    }

    async fn describe(&self, id: &LogId, scans: bool) -> Result<LogInfo> {
        let entry = self.entry(id)?;
        let NewestSuperblock { superblock, one_lost, .. } = self.superblock(&entry).await?;
        let found = if scans { self.scan(&entry, &superblock, one_lost).await? } else { Vec::new() };
        let open = self.open.borrow().contains(id);
        let superseded = superseded_entries(&found);
        let live = found.iter().zip(&superseded).filter(|(_, superseded)| !**superseded);
        let LogSuperblock { volume, name, size, epoch, run, clean, created_s, medium, encryption, .. } = superblock;
        Ok(LogInfo {
            id: *id,
            volume,
            name,
            medium,
            size,
            encrypted: encryption.is_some(),
            epoch,
            run,
            clean: clean && !open,
            created_s,
            open,
            dirty_entries: found.len() as u64,
            dirty_bytes: live.map(|(entry, _)| entry.extent.len).sum(),
            dirty_since_ms: found.first().map(|entry| entry.time_ms),
        })
    }

    async fn scan(
        &self,
        entry: &ShelfEntry,
        superblock: &LogSuperblock,
        one_lost: bool,
    ) -> Result<Vec<crate::format::EntryRecord>> {
        Ok(match &self.backing {
            Backing::Memory(memory) if superblock.copy.is_none() => {
                PmemMedium::scan(&**memory, entry.start, superblock)?.entries
            }
            _ => Ssd::scan(&self.storage(), entry.start, superblock, one_lost).await?.entries,
        })
    }

    /// Returns the storage of logs of append blocks.
    fn storage(&self) -> BlockStorage {
        match &self.backing {
            Backing::File(file) => BlockStorage::File(file.clone(), self.syncs.clone()),
            Backing::Memory(memory) => BlockStorage::Memory(memory.clone()),
        }
    }

    /// Returns the id of this device's copy of a log that has members, and the term that it follows; zeroes if the log has
    /// never had any.
    ///
    /// # Errors
    /// If there is no such log, or its superblocks are damaged.
    pub async fn copy_of(&self, id: &LogId) -> Result<(LogId, u32)> {
        let entry = self.entry(id)?;
        let NewestSuperblock { superblock, .. } = self.superblock(&entry).await?;
        Ok(superblock.copy.map_or_else(Default::default, |state| (state.copy, superblock.run)))
    }

    /// Opens a copy of a log that has members, or is to have some, without changing it.
    ///
    /// # Errors
    /// As [`open_log`](Self::open_log), but for epochs.
    pub(crate) async fn open_copy(self: &Rc<Self>, id: &LogId, volume: Option<&str>) -> Result<OpenCopy> {
        let entry = self.entry(id)?;
        let NewestSuperblock { superblock, copy, one_lost } = self.superblock(&entry).await?;
        let what = format!("{}: log {}", self.path, id_text(id));
        if volume.is_some_and(|volume| superblock.volume != volume) {
            let text = format!("{what} belongs to another volume ({}, {})", superblock.name, superblock.volume);
            return Err(Error::new(ErrorKind::Denied, text));
        }
        if self.kind == MediumKind::Pmem && superblock.copy.is_none() {
            let text = format!(
                "{what} is in persistent memory and was created without members: it has a layout of its own, which members \
                 cannot have; detach it and attach a new one"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if !self.open.borrow_mut().insert(*id) {
            return Err(Error::new(ErrorKind::Busy, format!("{what} is open")));
        }
        let held = OpenGuard { shelf: self.clone(), id: *id };
        let (storage, room) = (self.storage(), Rc::new(Notify::new()));
        // Writes of a killed process may be readable, but not durable.
        storage.sync_data().await.map_err(|error| io(error, &self.path, "syncing"))?;
        let found = Ssd::scan(&storage, entry.start, &superblock, one_lost).await?;
        let superblocks = SUPER_COPIES.map(|at| (entry.start + at, SUPER_LEN));
        storage.store_again(superblocks.into_iter().chain(found.unproven.iter().copied()));
        let (medium, found) = Ssd::resume(storage, entry.start, superblock, copy, found, room.clone());
        Ok(OpenCopy { medium: Rc::new(medium), found, room, held })
    }

    /// Opens a log for its volume. An empty log that is opened with a key for the first time becomes an encrypted one.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] if it belongs to another volume, is encrypted with another key, or holds entries that are not
    /// encrypted although there is a key; [`ErrorKind::Fenced`] if its epoch is older than `epoch`; [`ErrorKind::Busy`] if
    /// it is open; [`ErrorKind::Corrupt`] if durable contents are missing or damaged.
    pub async fn open_log_with_key(
        self: &Rc<Self>,
        id: &LogId,
        volume: &str,
        epoch: u64,
        key: Option<&DataKey>,
    ) -> Result<OpenLog> {
        let entry = self.entry(id)?;
        let NewestSuperblock { mut superblock, copy, one_lost } = self.superblock(&entry).await?;
        let what = format!("{}: log {}", self.path, id_text(id));
        if superblock.volume != volume {
            let text = format!("{what} belongs to another volume ({}, {})", superblock.name, superblock.volume);
            return Err(Error::new(ErrorKind::Denied, text));
        }
        if superblock.copy.is_some() {
            let text = format!("{what} has members, and the record of its volume names none");
            return Err(Error::new(ErrorKind::Denied, text));
        }
        if superblock.epoch < epoch {
            let text = format!("{what} is of epoch {}, but the volume's epoch is {epoch}", superblock.epoch);
            return Err(Error::new(ErrorKind::Fenced, text));
        }
        require_key(superblock.encryption.as_ref(), key, id, &what)?;
        if !self.open.borrow_mut().insert(*id) {
            return Err(Error::new(ErrorKind::Busy, format!("{what} is open")));
        }
        let held = OpenGuard { shelf: self.clone(), id: *id };
        let room = Rc::new(Notify::new());
        let (medium, found, run): (Rc<dyn Medium>, Recovered, u32) = match &self.backing {
            Backing::File(file) => {
                // Writes of a killed process may be readable, but not durable.
                file.sync_data().await.map_err(|error| io(error, &self.path, "syncing"))?;
                let storage = self.storage();
                let found = Ssd::scan(&storage, entry.start, &superblock, one_lost).await?;
                if let Some(key) = key {
                    self.begin_encryption(&entry, (&mut superblock, copy), key, found.entries.len()).await?;
                }
                let run = found.run + 1;
                superblock.run = run;
                let (medium, found) = Ssd::resume(storage, entry.start, superblock, copy, found, room.clone());
                (Rc::new(medium), found, run)
            }
            Backing::Memory(memory) => {
                let found = PmemMedium::scan(&**memory, entry.start, &superblock)?;
                if let Some(key) = key {
                    self.begin_encryption(&entry, (&mut superblock, copy), key, found.entries.len()).await?;
                }
                superblock.run += 1;
                let run = superblock.run;
                let medium = PmemMedium::resume(memory.clone(), entry.start, superblock, copy, &found, room.clone())?;
                (Rc::new(medium), found, run)
            }
        };
        let cipher = open_cipher(&*medium, key, id, run, &found)?;
        // The log counts as open until the write has ended, even if the caller no longer waits.
        let opened = medium.clone();
        let (persisted, held) = spawn(async move { (opened.persist_tail(false).await, held) }).await;
        persisted?;
        Ok(OpenLog { medium, found, kind: self.kind, cipher, room, held })
    }

    /// Discards a log and its contents.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is open; errors of the device, also if the directory may lack a log since it was
    /// opened.
    pub async fn discard(&self, id: &LogId) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.entry(id)?;
        self.refuse_if_frozen()?;
        if self.open.borrow().contains(id) {
            return Err(Error::new(ErrorKind::Busy, format!("{}: log {} is open", self.path, id_text(id))));
        }
        self.forget(id).await
    }

    /// Discards the logs of a volume with an epoch before `epoch` that are not open: [`open_log`](Self::open_log)
    /// refuses them permanently. Skips logs whose superblock cannot be read.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn discard_older(&self, volume: &str, epoch: u64) -> Result<()> {
        for id in self.ids() {
            let Ok(entry) = self.entry(&id) else { continue };
            let Ok(NewestSuperblock { superblock, .. }) = self.superblock(&entry).await else { continue };
            if superblock.volume != volume || superblock.epoch >= epoch {
                continue;
            }
            match self.discard(&id).await {
                Err(error) if !matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes a log from the directory, and frees its space in the file system.
    async fn forget(&self, id: &LogId) -> Result<()> {
        let entry = self.entry(id)?;
        let mut directory = self.directory.borrow().clone();
        directory.logs.retain(|log| log.log != *id);
        // From both copies: if one is damaged later, the other must not list a log whose space was freed.
        self.write_directory(directory).await?;
        for at in SUPER_COPIES {
            // Cleared so that a search does not find the log again where its old contents remain.
            if let Err(error) = self.write(entry.start + at, &[0; SUPER_LEN]).await {
                tracing::warn!(path = self.path, %error, "cannot clear the superblock of a discarded log");
            }
        }
        self.give_back_unused().await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_is_shown_and_nothing_else_is() {
        let id: LogId = std::array::from_fn(|at| at as u8 * 17);
        assert_eq!(id_text(&id), "00112233445566778899aabbccddeeff");
        assert_eq!(parse_id(&id_text(&id)), Some(id));
        let text = id_text(&id);
        for wrong in
            ["", &text[1..], &format!("{text}00"), &format!("+1{}", &text[2..]), &format!("\u{e9}{}", &text[2..])]
        {
            assert_eq!(parse_id(wrong), None, "{wrong}");
        }
    }
}
