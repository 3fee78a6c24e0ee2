//! Journal of the list of exports: a line of JSON that names the list's generation, then one line for each write, an
//! array of changes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ExportChange;
use crate::engine::small_files::with_reserve;
use crate::failure::{Failure, FailureKind, Result};

/// Header line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    generation: u64,
}

/// Journal of one list.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    /// Open file, once something was appended.
    file: Option<File>,
    /// Valid length in bytes; anything beyond it was never acknowledged.
    len: u64,
    broken: bool,
}

/// Returns the path of the journal.
pub(super) fn path(data: &Path) -> PathBuf {
    data.join("targets.journal")
}

impl Journal {
    /// Starts the journal of a list that was just written.  An existing file belongs to an older list and is removed.
    pub(super) fn begin(data: &Path) -> Self {
        let path = path(data);
        // A file that cannot be removed is ignored: its generation does not match.
        let _ = fs::remove_file(&path);
        Self { path, file: None, len: 0, broken: false }
    }

    /// Reads the journal of a list of the given generation.
    pub(super) fn open(data: &Path, generation: u64) -> Result<(Self, Vec<ExportChange>)> {
        let path = path(data);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
        };
        let mut journal = Self { path, file: None, len: 0, broken: false };
        let mut changes = Vec::new();
        // Bytes after the last line break are a write that a crash cut off.
        let lines: Vec<&[u8]> =
            bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")).collect();
        for (at, line) in lines.iter().enumerate() {
            if at == 0 {
                match serde_json::from_slice::<Head>(line) {
                    Ok(head) if head.generation == generation => {}
                    // Journal of another list, or a header cut off before anything was acknowledged.
                    Ok(_) => return Ok((journal, changes)),
                    Err(_) if lines.len() == 1 => return Ok((journal, changes)),
                    Err(error) => return Err(journal.damaged(1, &error)),
                }
            } else {
                match serde_json::from_slice::<Vec<ExportChange>>(line) {
                    Ok(written) => changes.extend(written),
                    Err(error) if at + 1 == lines.len() => {
                        // A torn write may end in old bytes.
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

    /// Returns whether a failed write left the content of the file unknown.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Appends changes in one write, and makes them durable.
    pub(super) fn append(&mut self, generation: u64, changes: &[ExportChange]) -> Result<()> {
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
                // Truncates invalid lines: those of another list, or of a torn write.
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
                // A partial write may remain, and must never be read as valid.
                self.broken = file.set_len(self.len).and_then(|()| file.sync_data()).is_err();
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{ExportName, TargetsContent, TargetsFiles, list_path};
    use super::*;
    use crate::api::Front;

    fn attached(image: &str) -> ExportChange {
        let name = ExportName { front: Front::Nbd, pool: "local".into(), image: image.into() };
        let entries = vec![json!({ "pool": "local", "image": image, "front": "nbd" })];
        ExportChange { name, entries, retired: None }
    }

    fn images(data: &Path) -> Vec<String> {
        let content = TargetsFiles::open(data).expect("read").1;
        content.targets.iter().filter_map(|entry| Some(entry.get("image")?.as_str()?.to_owned())).collect()
    }

    /// A failed write that could not be undone: until the list is rewritten, a crash may or may not expose it.
    #[test]
    fn an_append_of_unknown_outcome_counts_no_more_once_the_list_is_written() {
        // The bytes of the refused change that are in the file: none, a part, all.
        let line = serde_json::to_string(&[attached("b")]).expect("a line") + "\n";
        for there in [0, line.len() / 2, line.len()] {
            let dir = tempfile::tempdir().expect("a directory");
            let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
            files.replace(TargetsContent::default()).expect("written");
            files.append(&[attached("a")]).expect("appended");
            assert!(!files.is_settled() && files.takes_changes());
            // From here on the file can be neither written nor truncated.
            let path = path(dir.path());
            files.journal.as_mut().expect("a journal").file = Some(File::open(&path).expect("for reading"));
            files.append(&[attached("b")]).expect_err("it cannot be written");
            let mut file = OpenOptions::new().append(true).open(&path).expect("the journal");
            file.write_all(&line.as_bytes()[..there]).expect("what the failed write left");
            // Nothing is appended after unknown bytes, and the list alone is not complete.
            assert!(files.unclear && !files.is_settled());
            assert!(!files.takes_changes() && files.wants_replacing());
            files.append(&[attached("c")]).expect_err("there is no journal");
            let after_crash = images(dir.path());
            let expected: &[&str] = if there == line.len() { &["a", "b"] } else { &["a"] };
            assert_eq!(after_crash, expected, "{there} bytes");
            // A failure to write the list leaves the state as unclear as before.
            let list = fs::read(list_path(dir.path())).expect("the list");
            fs::create_dir(list_path(dir.path()).with_extension("new")).expect("in the way");
            let content = || TargetsContent { targets: attached("a").entries, ..TargetsContent::default() };
            files.replace(content()).expect_err("something is in the way");
            assert!(files.unclear && !files.takes_changes());
            assert_eq!(fs::read(list_path(dir.path())).expect("the list"), list);
            fs::remove_dir(list_path(dir.path()).with_extension("new")).expect("removed");
            files.replace(content()).expect("written");
            assert!(files.is_settled() && files.takes_changes());
            assert_eq!(images(dir.path()), ["a"], "{there} bytes");
            files.append(&[attached("c")]).expect("appended");
            assert_eq!(images(dir.path()), ["a", "c"], "{there} bytes");
        }
    }
}
