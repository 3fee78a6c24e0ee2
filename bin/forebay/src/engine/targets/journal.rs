//! The journal of the list of exports: a line of JSON that names the list's generation, then a line for each write, an
//! array of changes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Change;
use crate::engine::small_files::with_reserve;
use crate::failure::{Failure, FailureKind, Result};

/// First line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    generation: u64,
}

/// The journal of one list.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    /// The file, once something was appended.
    file: Option<File>,
    /// Bytes of it that count; what comes after them was never answered.
    len: u64,
    broken: bool,
}

/// Returns the path of the journal.
pub(super) fn path(data: &Path) -> PathBuf {
    data.join("targets.journal")
}

impl Journal {
    /// Begins the journal of a list that was just written.  A file that is there belongs to another list.
    pub(super) fn begin(data: &Path) -> Self {
        let path = path(data);
        // If it stays, it does not count.
        let _ = fs::remove_file(&path);
        Self { path, file: None, len: 0, broken: false }
    }

    /// Reads the journal of a list of some generation.
    pub(super) fn open(data: &Path, generation: u64) -> Result<(Self, Vec<Change>)> {
        let path = path(data);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
        };
        let mut journal = Self { path, file: None, len: 0, broken: false };
        let mut changes = Vec::new();
        // What follows the last line break is a write that a crash cut off.
        let lines: Vec<&[u8]> =
            bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")).collect();
        for (at, line) in lines.iter().enumerate() {
            if at == 0 {
                match serde_json::from_slice::<Head>(line) {
                    Ok(head) if head.generation == generation => {}
                    // Of another list; or cut off, with nothing in it that was answered.
                    Ok(_) => return Ok((journal, changes)),
                    Err(_) if lines.len() == 1 => return Ok((journal, changes)),
                    Err(error) => return Err(journal.damaged(1, &error)),
                }
            } else {
                match serde_json::from_slice::<Vec<Change>>(line) {
                    Ok(written) => changes.extend(written),
                    Err(error) if at + 1 == lines.len() => {
                        // A write that was cut off may end in what was there before.
                        tracing::warn!(path = %journal.path.display(), line = at + 1, %error,
                            "the last journal entry is truncated; it was never acknowledged");
                        break;
                    }
                    Err(error) => return Err(journal.damaged(at + 1, &error)),
                }
            }
            journal.len += line.len() as u64;
        }
        Ok((journal, changes))
    }

    fn damaged(&self, line: usize, error: &serde_json::Error) -> Failure {
        let what = format!("{} is damaged in line {line}: {error}", self.path.display());
        Failure::new(FailureKind::Corrupt, what)
            .hint("repair the line, or remove the file to discard all changes since targets.json was written")
    }

    /// Returns its length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether a write failed so that nobody knows what the file holds.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Appends changes in one write, and makes them durable.
    pub(super) fn append(&mut self, generation: u64, changes: &[Change]) -> Result<()> {
        let failed = |error: serde_json::Error| Failure::failed(format!("writing the exports: {error}"));
        let mut text = Vec::new();
        if self.len == 0 {
            serde_json::to_writer(&mut text, &Head { generation }).map_err(failed)?;
            text.push(b'\n');
        }
        serde_json::to_writer(&mut text, changes).map_err(failed)?;
        text.push(b'\n');
        let path = self.path.clone();
        with_reserve(&path, || self.write(&text))
            .map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
    }

    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        let (file, is_new) = match self.file.take() {
            Some(file) => (file, false),
            None => (OpenOptions::new().append(true).create(true).open(&self.path)?, true),
        };
        let write = || {
            if is_new {
                // What does not count goes: lines of another list, or of a write that was cut off.
                file.set_len(self.len)?;
                File::open(self.path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
            }
            (&file).write_all(text)?;
            file.sync_data()
        };
        match write() {
            Ok(()) => {
                self.len += text.len() as u64;
                self.file = Some(file);
                Ok(())
            }
            Err(error) => {
                // Part of it may be there, and must not count later.
                self.broken = file.set_len(self.len).and_then(|()| file.sync_data()).is_err();
                Err(error)
            }
        }
    }
}
