//! Creation of logs on a log device, and of copies of other peers' logs.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{DataKey, Error, ErrorKind, Result};
use forebay_reactor::{random, spawn, wall_clock};

use super::space::{GiveUp, fill, fill_memory, given_up_error};
use super::{Backing, Shelf};
use crate::cipher::key_check;
use crate::format::{
    CopyState, LOG_ALIGN, LOG_SIZE_LEAST, LogId, LogSuperblock, MediumKind, PMEM_UNIT, SUPER_COPIES, SUPER_LEN,
    ShelfEntry, blocks_size_max, is_unit, tag_of,
};
use crate::media::pmem;

/// Draws an id at random.
pub(crate) fn draw_id() -> LogId {
    let mut id = LogId::default();
    id[..8].copy_from_slice(&random().to_le_bytes());
    id[8..].copy_from_slice(&random().to_le_bytes());
    id
}

/// Log to be created.
struct NewLog {
    volume: String,
    name: String,
    size: u64,
    epoch: u64,
    /// Key that payloads are encrypted with.
    key: Option<DataKey>,
    /// Set for a copy of a log that has members.
    copy: Option<NewCopy>,
}

/// Copy of a log that has members, to be created.
struct NewCopy {
    id: LogId,
    /// Log and its unit, if it is another peer's.
    of: Option<(LogId, u32)>,
}

impl Shelf {
    /// Creates an empty log for a volume. `volume` is its identity; `name` is for messages.
    ///
    /// If it fails, or its future is dropped, allocated space is freed.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a size below 16 MiB or a name that is too long; [`ErrorKind::NoSpace`], before any
    /// allocation where that is possible; errors of the device, also if the directory may lack a log since it was
    /// opened.
    pub async fn create(self: &Rc<Self>, volume: &str, name: &str, size: u64, epoch: u64) -> Result<LogId> {
        self.create_with_key((volume, name), size, epoch, None).await
    }

    /// Creates an empty log for a volume, whose payloads are encrypted if there is a key.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub async fn create_with_key(
        self: &Rc<Self>,
        (volume, name): (&str, &str),
        size: u64,
        epoch: u64,
        key: Option<&DataKey>,
    ) -> Result<LogId> {
        let (volume, name, key) = (volume.to_owned(), name.to_owned(), key.cloned());
        self.create_log(NewLog { volume, name, size, epoch, key, copy: None }).await
    }

    /// Creates an empty log that is to have members: this device has the first copy of it, with the id `copy`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub async fn create_with_members(
        self: &Rc<Self>,
        (volume, name): (&str, &str),
        size: u64,
        epoch: u64,
        copy: LogId,
    ) -> Result<LogId> {
        self.create_with_members_and_key((volume, name), size, epoch, copy, None).await
    }

    /// Creates an empty log that is to have members, whose payloads are encrypted if there is a key.
    ///
    /// # Errors
    /// As [`create_with_members`](Self::create_with_members).
    pub async fn create_with_members_and_key(
        self: &Rc<Self>,
        (volume, name): (&str, &str),
        size: u64,
        epoch: u64,
        copy: LogId,
        key: Option<&DataKey>,
    ) -> Result<LogId> {
        let copy = Some(NewCopy { id: copy, of: None });
        let (volume, name, key) = (volume.to_owned(), name.to_owned(), key.cloned());
        self.create_log(NewLog { volume, name, size, epoch, key, copy }).await
    }

    async fn create_log(self: &Rc<Self>, new: NewLog) -> Result<LogId> {
        let given_up = Rc::new(Cell::new(false));
        let guard = GiveUp(given_up.clone());
        let shelf = self.clone();
        let making = spawn(async move {
            let _turn = shelf.turn.acquire(1).await;
            if shelf.removed.get() {
                return Err(Error::new(ErrorKind::Busy, format!("{}: removed meanwhile; try again", shelf.path)));
            }
            shelf.refuse_if_frozen()?;
            let before = shelf.size()?;
            let mut made = shelf.make(&new, &given_up).await;
            if let (Ok(id), true) = (&made, given_up.get()) {
                // No record names the log, so nothing else would ever discard it.
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

    /// Creates an empty copy of a log of another peer, with its id, size and unit; returns the id of the copy. A copy of it
    /// that this device has is discarded first.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`ErrorKind::Busy`] if the device's copy is open; [`ErrorKind::Unsupported`] if the
    /// unit is smaller than the device's sectors.
    pub async fn create_replica(
        self: &Rc<Self>,
        log: &LogId,
        (volume, name): (&str, &str),
        (size, unit): (u64, u32),
        epoch: u64,
    ) -> Result<LogId> {
        if unit < self.unit() || !is_unit(unit) {
            let text = match unit {
                PMEM_UNIT => {
                    format!("{}: not persistent memory, and the log is in memory: its unit is too small", self.path)
                }
                _ => format!("{}: sectors of {} bytes; the log has units of {unit}", self.path, self.unit()),
            };
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        match self.discard(log).await {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let copy = draw_id();
        let new = Some(NewCopy { id: copy, of: Some((*log, unit)) });
        let (volume, name) = (volume.to_owned(), name.to_owned());
        // It becomes an encrypted one when it follows a primary whose log is.
        self.create_log(NewLog { volume, name, size, epoch, key: None, copy: new }).await?;
        Ok(copy)
    }

    /// Returns the smallest unit of logs on this device, in bytes.
    fn unit(&self) -> u32 {
        match &self.backing {
            Backing::File(file) => file.info().sector.max(512),
            Backing::Memory(_) => PMEM_UNIT,
        }
    }

    async fn make(&self, new: &NewLog, given_up: &Cell<bool>) -> Result<LogId> {
        const NAMES_MAX: usize = 3500;
        let NewLog { volume, name, size, epoch, key, copy } = new;
        let (size, epoch) = (*size, *epoch);
        let smallest = self.smallest;
        if size < smallest || volume.len() + name.len() > NAMES_MAX {
            let text = format!("a log of {size} bytes; {smallest} at least");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.kind == MediumKind::Dram && copy.is_none() {
            let text = "a log in memory ends with its process: it needs a replica";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let size = size.next_multiple_of(LOG_ALIGN);
        let of = copy.as_ref().and_then(|copy| copy.of);
        let (id, unit) = of.unwrap_or_else(|| (draw_id(), self.unit()));
        let has_slots = self.kind == MediumKind::Pmem && copy.is_none();
        if !has_slots && size > blocks_size_max(unit) {
            let text = format!("a log of {size} bytes; {} at most, with units of {unit}", blocks_size_max(unit));
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut directory = self.directory.borrow().clone();
        let Some(start) = directory.room_for(size, self.limit()) else {
            return Err(Error::new(ErrorKind::NoSpace, format!("{}: no space for a log of {size} bytes", self.path)));
        };
        self.check_space(start, size)?;
        self.grow(start + size).await?;
        let mut superblock = LogSuperblock {
            features: 0,
            serial: 1,
            log: id,
            epoch,
            run: 0,
            medium: self.kind,
            clean: true,
            unit,
            size,
            slots: if has_slots { pmem::slots(size) } else { 0 },
            created_s: wall_clock().as_secs(),
            tail_pos: 0,
            tail_block: 0,
            tail_seq: 0,
            head_block: 0,
            copy: None,
            volume: volume.to_owned(),
            name: name.to_owned(),
            encryption: None,
        };
        if let Some(key) = key {
            superblock.set_encryption(key_check(key, &id));
        }
        if let Some(NewCopy { id, of }) = copy {
            superblock.set_copy(CopyState { copy: *id, kept: 0, cut: 0, filling: of.is_some() });
        }
        match &self.backing {
            Backing::File(file) => fill(file, &self.path, start..start + size, given_up).await?,
            Backing::Memory(memory) if has_slots => pmem::format_words(&**memory, start, tag_of(&id), 0),
            // A former copy of the same log may have left blocks there.
            Backing::Memory(memory) => fill_memory(&**memory, &self.path, start..start + size, given_up).await?,
        }
        self.write(start + SUPER_COPIES[0], &superblock.encode()).await?;
        self.write(start + SUPER_COPIES[1], &[0; SUPER_LEN]).await?;
        // The superblock of a discarded log may be where the next one will be searched.
        let next = start + size;
        if self.free_spaces(&directory)?.iter().any(|space| space.start < next && next + LOG_SIZE_LEAST <= space.end) {
            self.clear_superblocks(&[next]).await;
        }
        directory.logs.push(ShelfEntry { log: id, start, size });
        self.write_directory_copy(directory).await?;
        // One written copy suffices for the log to exist.
        let directory = self.directory.borrow().clone();
        if let Err(error) = self.write_directory_copy(directory).await {
            tracing::warn!(path = self.path, %error, "cannot write the second copy of the directory");
        }
        Ok(id)
    }
}
