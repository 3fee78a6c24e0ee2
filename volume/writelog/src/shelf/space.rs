//! Space for logs in files: looked for first, allocated a part at a time, and given back when making a log fails.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, spawn, yield_now};

use super::io;

/// Bytes written, or given back, at a time: whoever else uses the reactor or the device waits for no more.
const STEP: u64 = 1 << 20;
/// Bytes of a file that is cut at a time.
const CUT_STEP: u64 = 1 << 30;
/// Space that logs leave to others on their file system: a twentieth of it, but no more than this many bytes.
const RESERVE_MAX: u64 = 1 << 30;

/// Tells a task that nobody waits for it any more, when it is dropped.
pub(super) struct GiveUp(pub(super) Rc<Cell<bool>>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

pub(super) fn given_up_error(name: &str) -> Error {
    Error::new(ErrorKind::ShuttingDown, format!("{name}: making a log was given up"))
}

/// Refuses to allocate `needed` bytes beside `path` where that would leave others too little.
pub(super) fn check_space(path: &Path, name: &str, needed: u64) -> Result<()> {
    // The file itself: its name may be a link to another file system.
    let found = fs::file_system_space(path).map_err(|e| io(e, name, "looking for space on its file system"))?;
    let Some(space) = found else { return Ok(()) };
    let reserve = (space.total / 20).min(RESERVE_MAX);
    if needed == 0 || space.available.saturating_sub(reserve) >= needed {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let text = format!(
        "{name}: {} MiB are asked for, and the file system has {} MiB free, {} MiB of which are left to others; \
         take a smaller log, or another file system",
        mib(needed),
        space.available >> 20,
        mib(reserve)
    );
    Err(Error::new(ErrorKind::NoSpace, text))
}

/// Writes zeroes over a range of a file, until it is told to give up: appending to the range then changes nothing in the
/// file system's own books.
pub(super) async fn fill(file: &File, name: &str, range: std::ops::Range<u64>, given_up: &Cell<bool>) -> Result<()> {
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

/// Cuts a file to `size` bytes, a part at a time.
pub(super) async fn cut(file: &File, size: u64) -> std::io::Result<()> {
    let mut now = file.size()?;
    while now > size {
        now = now.saturating_sub(CUT_STEP).max(size);
        file.set_size(now)?;
        yield_now().await;
    }
    Ok(())
}

/// Removes a file that was made for nothing.
pub(super) fn remove(path: &Path, name: &str) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Err(error) = fs::remove_file(path).and_then(|()| fs::sync_dir(parent)) {
        tracing::warn!(path = name, %error, "a file that was made for a log is left");
    }
}

/// Opens a file; if there is none and `create`, makes it.  True when it was made, and by nobody else: what this process has
/// made it may remove again.
pub(super) async fn open_file(path: &Path, name: &str, how: OpenOptions, create: bool) -> Result<(File, bool)> {
    let opened = match File::open_when_free(path, how).await {
        Err(error) if create && error.kind() == std::io::ErrorKind::NotFound => {
            match File::open(path, how.create_new()) {
                Ok(file) => return Ok((file, true)),
                // Another process makes it at the same time, or had its lock before this one.
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

/// What a file was before it was made longer.
pub(super) struct Before {
    made: bool,
    size: u64,
}

impl Before {
    pub(super) async fn restore(&self, file: &File, path: &Path, name: &str) {
        if let Err(error) = cut(file, self.size).await {
            tracing::warn!(path = name, %error, "space that was allocated for a log is left");
        }
        if self.made {
            remove(path, name);
        }
    }
}

/// Makes a file that is to be mapped at least `size` bytes long, with blocks of its own; as it was if that fails or
/// nobody waits for it any more.
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
