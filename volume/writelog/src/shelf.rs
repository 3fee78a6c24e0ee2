//! The file, device or persistent memory that logs are kept on: a directory, and the logs.

mod space;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::pmem::{PersistentMemory, Pmem as Mapping, PmemOptions};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{File, OpenOptions, random, spawn, wall_clock};

use crate::format::{
    DIRECTORY_COPIES, Directory, LOG_ALIGN, LOG_SIZE_LEAST, LOG_SIZE_MIN, LOGS_AT, LogId, MediumKind, Refused,
    SHELF_UNFINISHED, SUPER_COPIES, SUPER_LEN, ShelfEntry, Superblock, tag_of,
};
use crate::hidden::hidden_entries;
use crate::media::pmem::{self, Pmem};
use crate::media::ssd::Ssd;
use crate::media::{Medium, Recovered};
use space::{GiveUp, check_space, cut, fill, given_up_error, grow_memory, open_file, remove};

/// How a shelf is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShelfOptions {
    /// Make it, if there is none.
    pub create: bool,
    /// Have room for one more log of so many bytes, if it can be grown.
    pub room: u64,
    /// Logs may be smaller than 16 MiB: for tests that fill them.
    pub small: bool,
    /// Take memory that does not promise to keep what is stored: for measuring only.
    pub force: bool,
}

/// What a log is, from its own superblock and content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogInfo {
    /// Which.
    pub id: LogId,
    /// Which volume it belongs to.
    pub volume: String,
    /// What people called that volume when the log was made.
    pub name: String,
    /// What it is on.
    pub medium: MediumKind,
    /// Its bytes.
    pub size: u64,
    /// The epoch of its membership.
    pub epoch: u64,
    /// Times it was opened.
    pub run: u32,
    /// It was closed with everything at the backend.
    pub clean: bool,
    /// When it was made: seconds since 1970.
    pub created_s: u64,
    /// Somebody of this process has it open; then only its own counters know what is dirty.
    pub open: bool,
    /// Entries that the backend may not hold.
    pub dirty_entries: u64,
    /// Bytes of the volume they are about, overwritten ones not counted.
    pub dirty_bytes: u64,
    /// When the oldest of them was written: milliseconds since 1970.
    pub dirty_since_ms: Option<u64>,
}

/// A log that was opened, for [`WriteLog::new`](crate::WriteLog::new).
pub struct OpenLog {
    pub(crate) medium: Rc<dyn Medium>,
    pub(crate) found: Recovered,
    pub(crate) kind: MediumKind,
    pub(crate) room: Rc<Notify>,
    /// Keeps it from being opened twice.
    pub(crate) held: Held,
}

pub(crate) struct Held {
    shelf: Rc<Shelf>,
    id: LogId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shelf.open.borrow_mut().remove(&self.id);
    }
}

/// The superblock that holds, of a log's two copies.
struct NewestSuperblock {
    superblock: Superblock,
    /// Index of the copy it was read from.
    copy: usize,
    /// The other copy, which has been written, is damaged: it may have been the newer one.
    one_lost: bool,
}

enum Backing {
    File(File),
    Memory(Rc<dyn PersistentMemory>),
}

/// A place where logs are kept.  One process at a time has it.
pub struct Shelf {
    backing: Backing,
    kind: MediumKind,
    path: String,
    directory: RefCell<Directory>,
    copy: Cell<usize>,
    open: RefCell<BTreeSet<LogId>>,
    turn: Semaphore,
    /// Bytes of the smallest log that is made.
    smallest: u64,
    /// Its file was made when it was opened, and goes again if the first log cannot be made.
    made: Cell<bool>,
    /// Its file was removed again.
    removed: Cell<bool>,
}

fn io(error: std::io::Error, path: &str, what: &str) -> Error {
    let busy = error.kind() == std::io::ErrorKind::WouldBlock;
    let error = Error::from_io(error, format!("{path}: {what}"));
    if busy { Error::new(ErrorKind::Busy, format!("{path}: another process has it")) } else { error }
}

/// Returns a log's id in 32 hexadecimal digits.
pub fn id_text(id: &LogId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the log that 32 hexadecimal digits name; `None` for any other text.
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
    /// Opens, or makes, the shelf at `path`.
    ///
    /// # Errors
    /// When it cannot be opened, is somebody else's ([`ErrorKind::Busy`]), is not a shelf or newer than this program
    /// ([`ErrorKind::Invalid`]), or damaged; for persistent memory also when the memory is none
    /// ([`ErrorKind::Unsupported`]).
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
            MediumKind::Pmem => {
                let how = PmemOptions { create: options.create, size: 0, force: options.force };
                let before = match options.create {
                    true => Some(grow_memory(path, &name, LOGS_AT + options.room.max(LOG_SIZE_MIN)).await?),
                    false => None,
                };
                let shelf = match Self::map(path, &name, how, options).await {
                    Ok(shelf) => shelf,
                    Err(error) => {
                        // No persistent memory, or somebody else's file.
                        if let Some(before) = before
                            && let Ok(file) = File::open(path, OpenOptions::read_write().lock())
                        {
                            before.restore(&file, path, &name).await;
                        }
                        return Err(error);
                    }
                };
                let limit = shelf.limit();
                if options.room == 0 || shelf.directory.borrow().room_for(options.room, limit).is_some() {
                    return Ok(shelf);
                }
                let size = shelf.directory.borrow().room_for(options.room, None).unwrap_or(0) + options.room;
                drop(shelf);
                grow_memory(path, &name, size).await?;
                Self::map(path, &name, how, options).await
            }
        }
    }

    async fn map(path: &Path, name: &str, how: PmemOptions, options: ShelfOptions) -> Result<Rc<Self>> {
        let mapping = Mapping::open(path, how).map_err(|e| io(e, name, "mapping"))?;
        Self::load(Backing::Memory(Rc::new(mapping)), MediumKind::Pmem, name.to_owned(), options).await
    }

    /// A shelf in memory that somebody else has opened.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn on_memory(memory: Rc<dyn PersistentMemory>, name: &str, options: ShelfOptions) -> Result<Rc<Self>> {
        Self::load(Backing::Memory(memory), MediumKind::Pmem, name.to_owned(), options).await
    }

    async fn load(backing: Backing, kind: MediumKind, path: String, options: ShelfOptions) -> Result<Rc<Self>> {
        let create = options.create;
        let smallest = if options.small { LOG_SIZE_LEAST } else { LOG_SIZE_MIN };
        let shelf = Self {
            backing,
            kind,
            path,
            directory: RefCell::new(Directory { serial: 0, medium: kind, logs: Vec::new() }),
            copy: Cell::new(0),
            open: RefCell::default(),
            turn: Semaphore::new(1),
            smallest,
            made: Cell::new(false),
            removed: Cell::new(false),
        };
        let mut best: Option<(usize, Directory)> = None;
        let (mut reasons, mut blank) = (Vec::new(), true);
        for (copy, &at) in DIRECTORY_COPIES.iter().enumerate() {
            if shelf.size()? < at + 4096 {
                continue;
            }
            let head = shelf.read(at, 4096).await?;
            blank &= head.iter().all(|&byte| byte == 0) || copy == 0 && head.starts_with(SHELF_UNFINISHED);
            let decoded = match Directory::encoded_len(&head) {
                Err(refused) => Err(refused),
                Ok(len) => Directory::decode(&shelf.read(at, len.next_multiple_of(4096)).await?),
            };
            match decoded {
                Ok(found) if best.as_ref().is_none_or(|(_, best)| found.serial > best.serial) => {
                    best = Some((copy, found));
                }
                Ok(_) => {}
                Err(refused) => reasons.push(refused),
            }
        }
        if let Some(Refused::Newer(what)) = reasons.iter().find(|reason| matches!(reason, Refused::Newer(_))) {
            return Err(Error::new(ErrorKind::Invalid, format!("{}: {what}; use a newer program", shelf.path)));
        }
        match best {
            Some((_, found)) if found.medium != kind => {
                let text = format!("{}: its logs are of the medium {}", shelf.path, found.medium.name());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            Some((copy, found)) => {
                shelf.copy.set(1 - copy);
                shelf.directory.replace(found);
            }
            None if create && blank => {
                shelf.grow(LOGS_AT).await?;
                if let Backing::Memory(memory) = &shelf.backing {
                    // A power failure may leave any part of what follows.
                    memory.store_word(DIRECTORY_COPIES[0], u64::from_le_bytes(*SHELF_UNFINISHED));
                    memory.fence();
                }
                let directory = shelf.directory.borrow().clone();
                shelf.write_directory(directory).await?;
            }
            None => {
                let why = reasons.iter().find(|reason| **reason != Refused::Stranger);
                let (kind, why) = match why {
                    Some(why) => (ErrorKind::Corrupt, why.to_string()),
                    None => (ErrorKind::Invalid, "no write logs are kept here".to_owned()),
                };
                let hint = if create { "; take another file, or clear its first MiB" } else { "" };
                return Err(Error::new(kind, format!("{}: {why}{hint}", shelf.path)));
            }
        }
        Ok(Rc::new(shelf))
    }

    /// Where it is.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its file was removed again, since nothing came of its first log: it must be opened anew.
    pub fn is_removed(&self) -> bool {
        self.removed.get()
    }

    /// What it is on.
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

    /// The end of the shelf, where it cannot grow.
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
                // The first word says what it is: it comes when the rest lasts.
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

    async fn write_directory(&self, mut directory: Directory) -> Result<()> {
        directory.serial += 1;
        directory.logs.sort_by_key(|log| log.start);
        self.write(DIRECTORY_COPIES[self.copy.get()], &directory.encode()).await?;
        if let Backing::File(file) = &self.backing
            && !file.info().block_device
        {
            // The file itself may be new.
            file.sync_data().await.map_err(|error| io(error, &self.path, "syncing"))?;
            let parent = file.path().parent().filter(|parent| !parent.as_os_str().is_empty());
            forebay_reactor::fs::sync_dir(parent.unwrap_or(Path::new(".")))
                .map_err(|error| io(error, &self.path, "syncing its directory"))?;
        }
        self.copy.set(1 - self.copy.get());
        self.directory.replace(directory);
        Ok(())
    }

    /// Makes an empty log for a volume.  `volume` says which it is, for machines; `name`, for people.
    ///
    /// When it fails, or its future is dropped, what it has allocated is given back.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a size below 16 MiB or a name that is too long; [`ErrorKind::NoSpace`], before anything
    /// is allocated where that can be known.
    pub async fn create(self: &Rc<Self>, volume: &str, name: &str, size: u64, epoch: u64) -> Result<LogId> {
        let given_up = Rc::new(Cell::new(false));
        let guard = GiveUp(given_up.clone());
        let (shelf, volume, name) = (self.clone(), volume.to_owned(), name.to_owned());
        let making = spawn(async move {
            let _turn = shelf.turn.acquire(1).await;
            if shelf.removed.get() {
                return Err(Error::new(ErrorKind::Busy, format!("{}: removed meanwhile; try again", shelf.path)));
            }
            let before = shelf.size()?;
            let mut made = shelf.make(&volume, &name, size, epoch, &given_up).await;
            if let (Ok(id), true) = (&made, given_up.get()) {
                // It is nobody's, and nobody would ever discard it.
                made = shelf.forget(id).await.and(Err(given_up_error(&shelf.path)));
            }
            match made {
                Ok(_) => shelf.made.set(false),
                Err(_) => shelf.undo(before).await,
            }
            made
        });
        let made = making.await;
        drop(guard);
        made
    }

    /// Gives back what a log has taken that could not be made; `before`: bytes that the file had.
    async fn undo(&self, before: u64) {
        let Backing::File(file) = &self.backing else { return };
        if file.info().block_device {
            return;
        }
        if self.made.get() && self.directory.borrow().logs.is_empty() {
            self.removed.set(true);
            // Somebody may have it open for longer, and the space with it.
            if let Err(error) = cut(file, 0).await {
                tracing::warn!(path = self.path, %error, "space that was allocated for a log is left");
            }
            remove(file.path(), &self.path);
            return;
        }
        let end = self.directory.borrow().logs.iter().map(|log| log.start + log.size).max();
        if let Err(error) = cut(file, before.max(end.unwrap_or(LOGS_AT))).await {
            tracing::warn!(path = self.path, %error, "space that was allocated for a log is left");
        }
    }

    /// Looks whether the file system has the space for a log of `size` bytes at `start`.
    fn check_space(&self, start: u64, size: u64) -> Result<()> {
        let Backing::File(file) = &self.backing else { return Ok(()) };
        if file.info().block_device {
            return Ok(());
        }
        let failed = |error| io(error, &self.path, "looking at it");
        // What the file has beyond its logs, as it is after one was discarded, is used again.
        let logs: u64 = self.directory.borrow().logs.iter().map(|log| log.size).sum();
        let allocated = file.allocated_size().map_err(failed)?.unwrap_or(0);
        let within = file.size().map_err(failed)?.saturating_sub(start).min(size);
        let spare = allocated.saturating_sub(logs + LOGS_AT).min(within);
        check_space(file.path(), &self.path, size - spare)
    }

    async fn make(&self, volume: &str, name: &str, size: u64, epoch: u64, given_up: &Cell<bool>) -> Result<LogId> {
        const NAMES_MAX: usize = 3500;
        let smallest = self.smallest;
        if size < smallest || volume.len() + name.len() > NAMES_MAX {
            let text = format!("a log of {size} bytes; {smallest} at least");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let size = size.next_multiple_of(LOG_ALIGN);
        let mut directory = self.directory.borrow().clone();
        let Some(start) = directory.room_for(size, self.limit()) else {
            return Err(Error::new(ErrorKind::NoSpace, format!("{}: no room for a log of {size} bytes", self.path)));
        };
        self.check_space(start, size)?;
        self.grow(start + size).await?;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&random().to_le_bytes());
        id[8..].copy_from_slice(&random().to_le_bytes());
        let unit = match &self.backing {
            Backing::File(file) => file.info().sector.max(512),
            Backing::Memory(_) => pmem::LINE as u32,
        };
        let superblock = Superblock {
            features: 0,
            serial: 1,
            log: id,
            epoch,
            run: 0,
            medium: self.kind,
            clean: true,
            unit,
            size,
            slots: if self.kind == MediumKind::Pmem { pmem::slots(size) } else { 0 },
            created_s: wall_clock().as_secs(),
            tail_pos: 0,
            tail_block: 0,
            tail_seq: 0,
            head_block: 0,
            volume: volume.to_owned(),
            name: name.to_owned(),
        };
        match &self.backing {
            Backing::File(file) => fill(file, &self.path, start..start + size, given_up).await?,
            Backing::Memory(memory) => pmem::format_words(&**memory, start, tag_of(&id), 0),
        }
        self.write(start + SUPER_COPIES[0], &superblock.encode()).await?;
        self.write(start + SUPER_COPIES[1], &[0; SUPER_LEN]).await?;
        directory.logs.push(ShelfEntry { log: id, start, size });
        self.write_directory(directory).await?;
        Ok(id)
    }

    fn entry(&self, id: &LogId) -> Result<ShelfEntry> {
        let directory = self.directory.borrow();
        let found = directory.logs.iter().find(|log| log.log == *id).copied();
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{}: no log {}", self.path, id_text(id))))
    }

    /// Reads the newest superblock of a log.
    async fn superblock(&self, entry: &ShelfEntry) -> Result<NewestSuperblock> {
        let mut best: Option<(Superblock, usize)> = None;
        let mut valid = 0;
        let mut reason = Refused::Stranger;
        for (copy, &at) in SUPER_COPIES.iter().enumerate() {
            let decoded = Superblock::decode(&self.read(entry.start + at, SUPER_LEN).await?);
            valid += usize::from(decoded.as_ref().is_ok_and(|found| found.log == entry.log));
            match decoded {
                Ok(found) if best.as_ref().is_none_or(|(best, _)| found.serial > best.serial) => {
                    best = Some((found, copy));
                }
                Ok(_) => {}
                Err(Refused::Stranger) => {}
                Err(refused) => reason = refused,
            }
        }
        let id = id_text(&entry.log);
        if let Refused::Newer(what) = &reason {
            return Err(Error::new(ErrorKind::Invalid, format!("{}: log {id}: {what}", self.path)));
        }
        match best {
            Some((found, copy)) if (found.log, found.size, found.medium) == (entry.log, entry.size, self.kind) => {
                // Both copies are written from the second write on.
                let one_lost = valid < SUPER_COPIES.len() && found.serial > 1;
                Ok(NewestSuperblock { superblock: found, copy, one_lost })
            }
            Some(_) => Err(Error::new(ErrorKind::Corrupt, format!("{}: log {id} is another one", self.path))),
            None => Err(Error::new(ErrorKind::Corrupt, format!("{}: log {id}: {reason}", self.path))),
        }
    }

    /// What logs there are.
    pub fn ids(&self) -> Vec<LogId> {
        self.directory.borrow().logs.iter().map(|log| log.log).collect()
    }

    /// Looks at a log without opening it.
    ///
    /// # Errors
    /// When it is not there or damaged.
    pub async fn inspect(&self, id: &LogId) -> Result<LogInfo> {
        let entry = self.entry(id)?;
        let NewestSuperblock { superblock, one_lost, .. } = self.superblock(&entry).await?;
        let open = self.open.borrow().contains(id);
        let found = if open { Vec::new() } else { self.scan(&entry, &superblock, one_lost).await? };
        let hidden = hidden_entries(&found);
        let live = found.iter().zip(&hidden).filter(|(_, hidden)| !**hidden);
        let Superblock { volume, name, size, epoch, run, clean, created_s, medium, .. } = superblock;
        Ok(LogInfo {
            id: *id,
            volume,
            name,
            medium,
            size,
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
        superblock: &Superblock,
        one_lost: bool,
    ) -> Result<Vec<crate::format::EntryRecord>> {
        Ok(match &self.backing {
            Backing::File(file) => Ssd::scan(file, entry.start, superblock, one_lost).await?.entries,
            Backing::Memory(memory) => Pmem::scan(&**memory, entry.start, superblock)?.entries,
        })
    }

    /// Opens a log for its volume.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] when it belongs to another volume; [`ErrorKind::Fenced`] when its epoch is older than
    /// `epoch`; [`ErrorKind::Busy`] when it is open; [`ErrorKind::Corrupt`] when what should be there is not.
    pub async fn open_log(self: &Rc<Self>, id: &LogId, volume: &str, epoch: u64) -> Result<OpenLog> {
        let entry = self.entry(id)?;
        let NewestSuperblock { mut superblock, copy, one_lost } = self.superblock(&entry).await?;
        let what = format!("{}: log {}", self.path, id_text(id));
        if superblock.volume != volume {
            let text = format!("{what} belongs to another volume ({}, {})", superblock.name, superblock.volume);
            return Err(Error::new(ErrorKind::Denied, text));
        }
        if superblock.epoch < epoch {
            let text = format!("{what} is of epoch {}, but the volume has gone on to {epoch}", superblock.epoch);
            return Err(Error::new(ErrorKind::Fenced, text));
        }
        if !self.open.borrow_mut().insert(*id) {
            return Err(Error::new(ErrorKind::Busy, format!("{what} is open")));
        }
        let held = Held { shelf: self.clone(), id: *id };
        let room = Rc::new(Notify::new());
        let (medium, found): (Rc<dyn Medium>, Recovered) = match &self.backing {
            Backing::File(file) => {
                // A process that was killed may have left what it wrote readable, but not lasting.
                file.sync_data().await.map_err(|error| io(error, &self.path, "syncing"))?;
                let found = Ssd::scan(file, entry.start, &superblock, one_lost).await?;
                superblock.run = found.run + 1;
                let (medium, found) = Ssd::resume(file.clone(), entry.start, superblock, copy, found, room.clone());
                (Rc::new(medium), found)
            }
            Backing::Memory(memory) => {
                let found = Pmem::scan(&**memory, entry.start, &superblock)?;
                superblock.run += 1;
                let medium = Pmem::resume(memory.clone(), entry.start, superblock, copy, &found, room.clone())?;
                (Rc::new(medium), found)
            }
        };
        // The log is open until the write has ended, even if nobody waits for that any more.
        let opened = medium.clone();
        let (persisted, held) = spawn(async move { (opened.persist_tail(false).await, held) }).await;
        persisted?;
        Ok(OpenLog { medium, found, kind: self.kind, room, held })
    }

    /// Forgets a log and what is in it.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when it is open.
    pub async fn discard(&self, id: &LogId) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.entry(id)?;
        if self.open.borrow().contains(id) {
            return Err(Error::new(ErrorKind::Busy, format!("{}: log {} is open", self.path, id_text(id))));
        }
        self.forget(id).await
    }

    /// Forgets the logs of a volume that are of an epoch before `epoch` and not open: [`open_log`](Self::open_log) refuses
    /// them for good.  One whose superblock cannot be read is left.
    ///
    /// # Errors
    /// Those of the device.
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

    /// Takes a log out of the directory.
    async fn forget(&self, id: &LogId) -> Result<()> {
        let mut directory = self.directory.borrow().clone();
        directory.logs.retain(|log| log.log != *id);
        self.write_directory(directory).await
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
