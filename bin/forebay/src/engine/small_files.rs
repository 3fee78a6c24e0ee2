//! Small files of the daemon, replaced atomically, with reserved space for that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// File that reserves space for the daemon's own files, so that an export can be ended while the file system is full.
const RESERVE_NAME: &str = "reserve";
const RESERVE_LEN: usize = 64 << 10;

/// Reserves space for the daemon's own files, if any is free.
pub fn keep_reserve(data: &Path) {
    let path = data.join(RESERVE_NAME);
    if fs::metadata(&path).is_ok_and(|meta| meta.len() == RESERVE_LEN as u64) {
        return;
    }
    // The content is not zeroes: a file system may store those without allocating.
    if let Err(error) = fs::write(&path, [0xa5; RESERVE_LEN]) {
        tracing::debug!(%error, "cannot reserve space for the daemon's own files");
        let _ = fs::remove_file(&path);
    }
}

/// Replaces a file atomically.  If the file system is full, the reserved space is used.
///
/// # Errors
/// Errors of the file system.  The old file remains then, or, if the directory could not be made durable, the new
/// one.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    with_reserve(path, || write_and_rename(path, content))
}

/// Runs an operation that writes to a file; if the file system is full, runs it once more with the reserved space.
///
/// # Errors
/// Errors of `write`.
pub fn with_reserve<T>(path: &Path, mut write: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    match write() {
        Err(error)
            if error.kind() == io::ErrorKind::StorageFull
                && fs::remove_file(path.with_file_name(RESERVE_NAME)).is_ok() =>
        {
            let done = write();
            if let Some(data) = path.parent() {
                keep_reserve(data);
            }
            done
        }
        done => done,
    }
}

/// Writes a temporary file, makes it durable, and renames it over the old one.
fn write_and_rename(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a path without a directory"))?;
    let beside = path.with_extension("new");
    // Steps that can fail come before the new file is in place.
    let opened = File::open(dir)?;
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&beside, path)) {
        let _ = fs::remove_file(&beside);
        return Err(error);
    }
    opened.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_leaves_the_old_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        replace_file(&path, b"old").expect("written");
        keep_reserve(dir.path());
        assert_eq!(fs::metadata(dir.path().join(RESERVE_NAME)).expect("kept").len(), RESERVE_LEN as u64);
        // The path of the temporary file is occupied by a directory or the like.
        fs::create_dir(path.with_extension("new")).expect("a directory");
        assert!(replace_file(&path, b"new").is_err());
        assert_eq!(fs::read(&path).expect("there"), b"old");
    }
}
