//! Directory of a log device: its two copies, and the search for logs that only one of them listed.

use std::ops::Range;
use std::path::Path;

use forebay_block::{Error, ErrorKind, Result, is_zero};

use super::{Backing, Shelf, id_text, io};
use crate::format::{
    DIRECTORY_COPIES, LOG_ALIGN, LOG_SIZE_LEAST, LOGS_MAX, LogDirectory, LogFormatError, LogSuperblock, MalformedLog,
    SHELF_UNFINISHED, SUPER_COPIES, SUPER_LEN, ShelfEntry,
};

/// Copy of the directory, as read.
pub(super) enum DirectoryCopy {
    Whole(LogDirectory),
    /// Zeroes, or past the end of the device: never written, or damaged.
    Blank,
    Damaged(LogFormatError),
    /// Read error, transient or permanent: the copy may be intact.
    Unreadable(Error),
}

impl DirectoryCopy {
    pub(super) fn whole(&self) -> Option<&LogDirectory> {
        match self {
            Self::Whole(directory) => Some(directory),
            Self::Blank | Self::Damaged(_) | Self::Unreadable(_) => None,
        }
    }

    pub(super) fn refused(&self) -> Option<&LogFormatError> {
        match self {
            Self::Damaged(refused) => Some(refused),
            Self::Whole(_) | Self::Blank | Self::Unreadable(_) => None,
        }
    }

    pub(super) fn error(&self) -> Option<&Error> {
        match self {
            Self::Unreadable(error) => Some(error),
            Self::Whole(_) | Self::Blank | Self::Damaged(_) => None,
        }
    }

    /// Returns whether this copy may have listed logs that `newest`, the other one, does not.
    pub(super) fn is_lost(&self, newest: &LogDirectory) -> bool {
        match self {
            Self::Whole(_) => false,
            // Both copies are written from serial number 2 on.
            Self::Blank => newest.serial > 1,
            Self::Damaged(_) | Self::Unreadable(_) => true,
        }
    }
}

impl Shelf {
    /// Reads both copies.
    ///
    /// # Errors
    /// Errors of the device, except [`ErrorKind::Io`], which is stored with the copy.
    pub(super) async fn read_directories(&self) -> Result<[DirectoryCopy; 2]> {
        let [first, second] = DIRECTORY_COPIES;
        Ok([self.read_directory(first).await?, self.read_directory(second).await?])
    }

    async fn read_directory(&self, at: u64) -> Result<DirectoryCopy> {
        match self.decode_directory(at).await {
            Err(error) if error.kind() == ErrorKind::Io => Ok(DirectoryCopy::Unreadable(error)),
            read => read,
        }
    }

    async fn decode_directory(&self, at: u64) -> Result<DirectoryCopy> {
        if self.size()? < at + 4096 {
            return Ok(DirectoryCopy::Blank);
        }
        let head = self.read(at, 4096).await?;
        if is_zero(&head) || at == DIRECTORY_COPIES[0] && head.starts_with(SHELF_UNFINISHED) {
            return Ok(DirectoryCopy::Blank);
        }
        let decoded = match LogDirectory::encoded_len(&head) {
            Err(refused) => Err(refused),
            Ok(len) if self.size()? < at + len.next_multiple_of(4096) as u64 => {
                Err(LogFormatError::Damaged(MalformedLog("directory: longer than its file".into())))
            }
            Ok(len) => LogDirectory::decode(&self.read(at, len.next_multiple_of(4096)).await?),
        };
        Ok(decoded.map_or_else(DirectoryCopy::Damaged, DirectoryCopy::Whole))
    }

    /// Writes the directory to the older copy, durably.
    pub(super) async fn write_directory_copy(&self, mut directory: LogDirectory) -> Result<()> {
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

    /// Writes the directory to both copies: if one is damaged later, the other lists the same logs.
    pub(super) async fn write_directory(&self, directory: LogDirectory) -> Result<()> {
        self.write_directory_copy(directory.clone()).await?;
        let serial = self.directory.borrow().serial;
        self.write_directory_copy(LogDirectory { serial, ..directory }).await
    }

    /// Rewrites the older copy of the directory from the newer one, which was read; `is_lost` if the older copy was
    /// damaged.
    ///
    /// A program version that wrote one copy per created log could leave the damaged one ahead by a log, so that log
    /// is searched. If the search fails, nothing is written, and no log is created or discarded until the next
    /// opening.
    pub(super) async fn restore_directory(&self, is_lost: bool) -> Result<()> {
        let mut directory = self.directory.borrow().clone();
        if is_lost {
            let found = match self.find_unlisted(&directory).await {
                Ok(found) => found,
                Err(error) => {
                    self.frozen.replace(Some(error.clone()));
                    return Err(error);
                }
            };
            for log in &found {
                let id = id_text(&log.log);
                tracing::warn!(
                    path = self.path,
                    "log {id} was named by a damaged copy of the directory only; it is kept"
                );
            }
            if !found.is_empty() {
                directory.logs.extend(found);
                directory.logs.sort_by_key(|log| log.start);
                self.directory.replace(directory.clone());
                return self.write_directory(directory).await;
            }
        }
        self.write_directory_copy(directory).await
    }

    /// Returns the free ranges of a directory that can hold a log: a new log begins where another one ends, or at the
    /// start.
    pub(super) fn free_spaces(&self, directory: &LogDirectory) -> Result<Vec<Range<u64>>> {
        let end = directory.end();
        let behind = end..self.size()?.max(end);
        let spaces = directory.holes().into_iter().chain([behind]);
        Ok(spaces.filter(|space| space.end - space.start >= LOG_SIZE_LEAST).collect())
    }

    /// Finds unlisted logs in the free ranges of a directory, up to [`LOGS_MAX`] logs in all.
    ///
    /// # Errors
    /// Errors of the device if the superblock of such a log could not be read; [`ErrorKind::Invalid`] if it is newer
    /// than this program.
    pub(super) async fn find_unlisted(&self, directory: &LogDirectory) -> Result<Vec<ShelfEntry>> {
        let mut found = Vec::new();
        for space in self.free_spaces(directory)? {
            if directory.logs.len() + found.len() >= LOGS_MAX {
                break;
            }
            let mut unsure = None;
            let before = found.len();
            for at in SUPER_COPIES {
                let decoded = match self.read(space.start + at, SUPER_LEN).await {
                    Ok(bytes) => LogSuperblock::decode(&bytes),
                    Err(error) => {
                        unsure = Some(error);
                        continue;
                    }
                };
                let LogSuperblock { log, size, medium, .. } = match decoded {
                    Ok(superblock) => superblock,
                    Err(LogFormatError::Newer(what)) => {
                        let text = format!("{}: a log at byte {}: {what}; use a newer program", self.path, space.start);
                        return Err(Error::new(ErrorKind::Invalid, text));
                    }
                    Err(_) => continue,
                };
                let fits = (LOG_SIZE_LEAST..=space.end - space.start).contains(&size) && size.is_multiple_of(LOG_ALIGN);
                if fits && medium == self.kind && !directory.logs.iter().any(|known| known.log == log) {
                    found.push(ShelfEntry { log, start: space.start, size });
                    break;
                }
            }
            if let (Some(error), true) = (unsure, found.len() == before) {
                return Err(error);
            }
        }
        Ok(found)
    }

    /// Clears the superblocks of discarded logs that a crash has left: a later opening with a damaged copy of the
    /// directory must not find them. Both copies must be intact and identical.
    pub(super) async fn clear_discarded(&self) {
        let spaces = self.free_spaces(&self.directory.borrow());
        match spaces {
            Ok(spaces) => {
                let starts: Vec<u64> = spaces.iter().map(|space| space.start).collect();
                self.clear_superblocks(&starts).await;
            }
            Err(error) => tracing::warn!(path = self.path, %error, "cannot look for logs that were discarded"),
        }
    }

    /// Clears superblocks at `starts`, where the directory lists no log. The next opening retries after a failure.
    pub(super) async fn clear_superblocks(&self, starts: &[u64]) {
        for at in starts.iter().flat_map(|start| SUPER_COPIES.map(|at| start + at)) {
            let cleared = match self.read(at, SUPER_LEN).await {
                Ok(bytes) if LogSuperblock::decode(&bytes).is_ok() => self.write(at, &[0; SUPER_LEN]).await,
                Ok(_) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = cleared {
                tracing::warn!(path = self.path, %error, "the superblock of a discarded log at byte {at} may be left");
            }
        }
    }
}
