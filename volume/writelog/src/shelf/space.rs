//! File space for logs: checked first, allocated in steps, and freed if creating a log fails.

use std::cell::Cell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::{File, OpenOptions, fs, spawn, yield_now};

use super::{Backing, Shelf, io};
use crate::format::LOGS_AT;

/// Bytes written at a time, which bounds the delay of other users of the reactor and of the device.
const STEP: u64 = 1 << 20;
/// Bytes of a file truncated or punched at a time.
const CUT_STEP: u64 = 1 << 30;
/// Maximum free space in bytes that logs leave on their file system; the reserve is a twentieth of it, capped by
/// this.
const RESERVE_MAX: u64 = 1 << 30;

/// Guard that tells a task, when dropped, that the caller no longer waits for it.
pub(super) struct GiveUp(pub(super) Rc<Cell<bool>>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

pub(super) fn given_up_error(name: &str) -> Error {
    Error::new(ErrorKind::ShuttingDown, format!("{name}: the creation of a log was abandoned"))
}

/// Fails with [`ErrorKind::NoSpace`] if allocating `needed` bytes on the file system of `path` would cut into the
/// reserve.
pub(super) fn check_space(path: &Path, name: &str, needed: u64) -> Result<()> {
    // Queried on the path itself, which may be a link to another file system.
    let found = fs::file_system_space(path).map_err(|e| io(e, name, "looking for space on its file system"))?;
    let Some(space) = found else { return Ok(()) };
    let reserve = (space.total / 20).min(RESERVE_MAX);
    if needed == 0 || space.available.saturating_sub(reserve) >= needed {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let text = format!(
        "{name}: {} MiB are required, and the file system has {} MiB free, {} MiB of which are left to others; \
         take a smaller log, or another file system",
        mib(needed),
        space.available >> 20,
        mib(reserve)
    );
    Err(Error::new(ErrorKind::NoSpace, text))
}

/// Writes zeroes over a range of a file, unless told to give up: appends to the range then change no file system
/// metadata.
pub(super) async fn fill(file: &File, name: &str, range: Range<u64>, given_up: &Cell<bool>) -> Result<()> {
    let zeroes = Buf::zeroed(STEP as usize);
    let mut at = range.start;
    while at < range.end {
        if given_up.get() {
            return Err(given_up_error(name));
        }
        let len = (range.end - at).min(STEP);
        let written = file.write_at(zeroes.slice(0..len as usize), at).await;
        written.map_err(|error| io(error, name, "allocating space for a log"))?;
        at += len;
        yield_now().await;
    }
    file.sync_data().await.map_err(|error| io(error, name, "allocating space for a log"))
}

/// Stores zeroes over a range of persistent memory, durably, unless told to give up.
pub(super) async fn fill_memory(
    memory: &dyn PersistentMemory,
    name: &str,
    range: Range<u64>,
    given_up: &Cell<bool>,
) -> Result<()> {
    if memory.discard(range.start, range.end - range.start) {
        return Ok(());
    }
    let zeroes = Buf::zeroed(STEP as usize);
    let mut at = range.start;
    while at < range.end {
        if given_up.get() {
            return Err(given_up_error(name));
        }
        let len = (range.end - at).min(STEP);
        memory.store(at, &zeroes[..len as usize]);
        at += len;
        yield_now().await;
    }
    memory.fence();
    Ok(())
}

/// Truncates a file to `size` bytes, in steps.
pub(super) async fn cut(file: &File, size: u64) -> std::io::Result<()> {
    let mut now = file.size()?;
    while now > size {
        now = now.saturating_sub(CUT_STEP).max(size);
        file.set_size(now)?;
        yield_now().await;
    }
    Ok(())
}

/// Punches `holes`, and truncates the file to `end` bytes if it is longer.
pub(super) async fn give_back(file: &File, holes: &[Range<u64>], end: u64) -> std::io::Result<()> {
    let cut = cut(file, end).await;
    let mut punched = Ok(());
    for hole in holes {
        let mut at = hole.start;
        while at < hole.end {
            let len = (hole.end - at).min(CUT_STEP);
            match file.punch_hole(at, len).await {
                // File systems without hole punching keep the space for the next log.
                Err(error) if error.kind() == std::io::ErrorKind::Unsupported => return cut,
                done => punched = punched.and(done),
            }
            at += len;
        }
    }
    cut.and(punched)
}

/// Removes a file that was created for a log that failed.
pub(super) fn remove(path: &Path, name: &str) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Err(error) = fs::remove_file(path).and_then(|()| fs::sync_dir(parent)) {
        tracing::warn!(path = name, %error, "cannot remove the file that was created for a log");
    }
}

/// Opens a file, or creates it with `create` if it does not exist. Returns true if this call created it: only then
/// may this process remove it again.
pub(super) async fn open_file(path: &Path, name: &str, how: OpenOptions, create: bool) -> Result<(File, bool)> {
    let opened = match File::open_when_free(path, how).await {
        Err(error) if create && error.kind() == std::io::ErrorKind::NotFound => {
            match File::open(path, how.create_new()) {
                Ok(file) => return Ok((file, true)),
                // Another process creates it at the same time, or has locked it first.
                Err(error) if is_anothers(&error) => File::open_when_free(path, how).await,
                Err(error) => Err(error),
            }
        }
        opened => opened,
    };
    opened.map(|file| (file, false)).map_err(|error| io(error, name, "opening"))
}

fn is_anothers(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::AlreadyExists | std::io::ErrorKind::WouldBlock)
}

/// State of a file before it was extended.
pub(super) struct Before {
    made: bool,
    size: u64,
}

impl Before {
    pub(super) async fn restore(&self, file: &File, path: &Path, name: &str) {
        if let Err(error) = cut(file, self.size).await {
            tracing::warn!(path = name, %error, "cannot free the space that was allocated for a log");
        }
        if self.made {
            remove(path, name);
        }
    }
}

/// Extends a file that is to be mapped to at least `size` bytes, with allocated blocks; restores it on failure or if
/// the caller no longer waits.
pub(super) async fn grow_memory(path: &Path, name: &str, size: u64) -> Result<Before> {
    let given_up = Rc::new(Cell::new(false));
    let _guard = GiveUp(given_up.clone());
    let (path, name): (PathBuf, String) = (path.to_owned(), name.to_owned());
    spawn(async move {
        let (file, made) = open_file(&path, &name, OpenOptions::read_write().lock(), true).await?;
        let before = Before { made, size: file.size().map_err(|error| io(error, &name, "looking at it"))? };
        let grown = match check_space(&path, &name, size.saturating_sub(before.size)) {
            Ok(()) => fill(&file, &name, before.size..size, &given_up).await,
            Err(error) => Err(error),
        };
        if grown.is_err() {
            before.restore(&file, &path, &name).await;
        }
        grown.map(|()| before)
    })
    .await
}

impl Shelf {
    /// Frees the space of a log whose creation failed; `before`: size of the file before, in bytes.
    pub(super) async fn undo(&self, before: u64) {
        let Backing::File(file) = &self.backing else { return };
        if file.info().block_device {
            return;
        }
        if self.made.get() && self.directory.borrow().logs.is_empty() {
            self.removed.set(true);
            // Another process may still have the file open, which would keep its space allocated.
            if let Err(error) = cut(file, 0).await {
                tracing::warn!(path = self.path, %error, "cannot free the space that was allocated for a log");
            }
            remove(file.path(), &self.path);
            return;
        }
        let (mut holes, end) = (self.directory.borrow().holes(), self.directory.borrow().end());
        if self.unsure.get() {
            holes.clear();
        }
        if let Err(error) = give_back(file, &holes, before.max(end)).await {
            tracing::warn!(path = self.path, %error, "cannot free the space that was allocated for a log");
        }
    }

    /// Checks that the file system, or memory, has space for a log of `size` bytes at `start`.
    pub(super) fn check_space(&self, start: u64, size: u64) -> Result<()> {
        let file = match &self.backing {
            Backing::Memory(memory) => return self.check_memory(&**memory, size),
            Backing::File(file) => file,
        };
        if file.info().block_device {
            return Ok(());
        }
        let failed = |error| io(error, &self.path, "looking at it");
        // Space allocated beyond the logs, as after a discard, is reused.
        let logs: u64 = self.directory.borrow().logs.iter().map(|log| log.size).sum();
        let allocated = file.allocated_size().map_err(failed)?.unwrap_or(0);
        let within = file.size().map_err(failed)?.saturating_sub(start).min(size);
        let spare = allocated.saturating_sub(logs + LOGS_AT).min(within);
        check_space(file.path(), &self.path, size - spare)
    }

    /// Frees the file space that no log of the directory uses: the holes between logs, and the range after the last
    /// one. The directory must be durable. A failure only wastes space, and the next call retries.
    pub(super) async fn give_back_unused(&self) {
        let file = match &self.backing {
            Backing::Memory(memory) => {
                let directory = self.directory.borrow();
                let behind = directory.end()..memory.len().max(directory.end());
                for unused in directory.holes().into_iter().chain([behind]) {
                    memory.discard(unused.start, unused.end - unused.start);
                }
                return;
            }
            Backing::File(file) => file,
        };
        if file.info().block_device || self.unsure.get() {
            return;
        }
        let directory = self.directory.borrow().clone();
        if let Err(error) = give_back(file, &directory.holes(), directory.end()).await {
            tracing::warn!(path = self.path, %error, "cannot free unused space in the file");
        }
    }
}
