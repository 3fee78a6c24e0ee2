//! The daemon's own small files: replaced in one step, with space kept for that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Space kept for the daemon's own files, so that an export can be ended when the file system is full.
const RESERVE_NAME: &str = "reserve";
const RESERVE_LEN: usize = 64 << 10;

/// Takes the space that is kept for the daemon's own files, if there is any.
pub fn keep_reserve(data: &Path) {
    let path = data.join(RESERVE_NAME);
    if fs::metadata(&path).is_ok_and(|meta| meta.len() == RESERVE_LEN as u64) {
        return;
    }
    // Not of zeroes: a file system may store those as nothing.
    if let Err(error) = fs::write(&path, [0xa5; RESERVE_LEN]) {
        tracing::debug!(%error, "no space is kept for the daemon's own files");
        let _ = fs::remove_file(&path);
    }
}

/// Replaces a file in one step.  On a full file system the space kept beside it is used.
///
/// # Errors
/// Those of the file system.  The old file is there then, or, where the directory could not be made durable, the new one.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    with_reserve(path, || write_and_rename(path, content))
}

/// Does what writes to a file, and once more with the space that is kept beside it where the file system is full.
///
/// # Errors
/// Those of `write`.
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

/// Writes a file beside, makes it durable, and puts it in the place of the old one.
fn write_and_rename(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a path without a directory"))?;
    let beside = path.with_extension("new");
    // What can fail is done before the new file is in place.
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
        // The place beside it is taken by what cannot be written to.
        fs::create_dir(path.with_extension("new")).expect("a directory");
        assert!(replace_file(&path, b"new").is_err());
        assert_eq!(fs::read(&path).expect("there"), b"old");
    }
}
