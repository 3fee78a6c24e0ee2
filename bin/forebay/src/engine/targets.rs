//! Files that persist the exports across restarts: `targets.json` and `targets.journal`, as [`forebay_export::list`]
//! encodes them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_export::list::{self, ExportChange, ExportName, ListError, ListState, Replayed, StoredList};

use super::small_files::{replace_file, with_reserve};
use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::image_spec;

/// Content of the list and its journal; each export is an [`AttachRequest`](crate::api::AttachRequest).
pub type TargetsContent = list::ListContent<Front>;

/// Files of a data directory.
#[derive(Debug)]
pub struct TargetsFiles {
    data: PathBuf,
    state: ListState,
    /// Open journal, once something was appended to it.
    journal: Option<File>,
}

impl TargetsFiles {
    /// Reads the files.  No file means no exports.
    ///
    /// # Errors
    /// Files that cannot be read, are damaged, or come from a newer build.
    pub fn open(data: &Path) -> Result<(Self, TargetsContent)> {
        let files = |state| Self { data: data.into(), state, journal: None };
        let Some(bytes) = read(&list_path(data), "the exports from ")? else {
            return Ok((files(ListState::default()), TargetsContent::default()));
        };
        let failed = |error| failure(error, data);
        let stored = StoredList::decode(&bytes).map_err(failed)?;
        let path = journal_path(data);
        let journal = if stored.has_journal() { read(&path, "")?.unwrap_or_default() } else { Vec::new() };
        let Replayed { state, content, torn } = stored.replay(&journal, canonical).map_err(failed)?;
        if let Some(list::TornLine { line, error }) = torn {
            tracing::warn!(path = %path.display(), line, %error,
                "the last journal entry is truncated; it was never acknowledged");
        }
        Ok((files(state), content))
    }

    /// Returns whether the list must be rewritten before anything is appended.
    pub fn wants_replacing(&self) -> bool {
        self.state.wants_replacing()
    }

    /// Returns whether the list alone is complete.
    pub fn is_settled(&self) -> bool {
        self.state.is_settled()
    }

    /// Returns whether there is a journal to append to.
    pub fn takes_changes(&self) -> bool {
        self.state.journal_len().is_some()
    }

    /// Appends changes in one write, all or none, and makes them durable.
    ///
    /// # Errors
    /// Errors of the file system; nothing has changed then.
    pub fn append(&mut self, changes: &[ExportChange<Front>]) -> Result<()> {
        let text = self.state.encode_changes(changes).map_err(|error| failure(error, &self.data))?;
        let path = journal_path(&self.data);
        let (valid, mut unclear) = (self.state.journal_len().unwrap_or_default(), false);
        let done = with_reserve(&path, || self.write(&path, &text, valid, &mut unclear));
        if done.is_ok() {
            self.state.appended(text.len());
        }
        if unclear {
            // The end of the journal is unknown: the next change rewrites the list.
            self.state.append_unclear();
            self.journal = None;
        }
        done.map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
    }

    /// Appends to the journal, of which `valid` bytes are valid; sets `unclear` if that fails and cannot be undone.
    fn write(&mut self, path: &Path, text: &[u8], valid: u64, unclear: &mut bool) -> io::Result<()> {
        let (file, is_new) = match self.journal.take() {
            Some(file) => (file, false),
            None => (OpenOptions::new().append(true).create(true).open(path)?, true),
        };
        let write = || {
            if is_new {
                // Truncates invalid lines: those of another list, or of a torn write.
                file.set_len(valid)?;
                File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
            }
            (&file).write_all(text)?;
            file.sync_data()
        };
        match write() {
            Ok(()) => {
                self.journal = Some(file);
                Ok(())
            }
            Err(error) => {
                // A partial write may remain, and must never be read as valid.
                *unclear |= file.set_len(valid).and_then(|()| file.sync_data()).is_err();
                Err(error)
            }
        }
    }

    /// Rewrites the list atomically: after a crash it is either the old one with its journal, or the new one.
    ///
    /// # Errors
    /// Errors of the file system.  Until the next write succeeds, a crash leaves the old list or the new one.
    pub fn replace(&mut self, content: TargetsContent) -> Result<()> {
        let path = list_path(&self.data);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let list = self.state.encode_list(content, now).map_err(|error| failure(error, &self.data))?;
        replace_file(&path, &list.text)
            .map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))?;
        self.state.replaced(&list);
        self.journal = None;
        // A file that cannot be removed is ignored: its generation does not match.
        let _ = fs::remove_file(journal_path(&self.data));
        Ok(())
    }
}

/// Returns the path of the list.
pub fn list_path(data: &Path) -> PathBuf {
    data.join("targets.json")
}

/// Returns the path of the journal.
fn journal_path(data: &Path) -> PathBuf {
    data.join("targets.journal")
}

/// Reads a file; `None` if there is none.
fn read(path: &Path, what: &str) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::io(error, format_args!("reading {what}{}", path.display()))),
    }
}

/// Returns the key of an entry's export, normalizing the pool (`rados:rbd` is `rbd`); `None` if it names no image.
fn canonical(name: ExportName<Front>) -> Option<ExportName<Front>> {
    let spec = image_spec(&name.pool, &name.image).ok()?;
    Some(ExportName { front: name.front, pool: spec.pool, image: spec.image })
}

/// Describes an error of the files of a data directory.
fn failure(error: ListError, data: &Path) -> Failure {
    let (list, journal) = (list_path(data), journal_path(data));
    match error {
        ListError::Damaged(why) => {
            Failure::new(FailureKind::Corrupt, format!("the list of exports {} is damaged: {why}", list.display()))
                .hint("repair it, or remove it and attach the images again")
        }
        ListError::Newer(version) => {
            let (path, known) = (list.display(), list::LIST_VERSION);
            let what = format!("the list of exports {path} has version {version}, this build knows {known}");
            Failure::new(FailureKind::Unsupported, what).hint("run the newer forebay that wrote it")
        }
        ListError::DamagedJournal { line, error } => {
            let what = format!("{} is damaged in line {line}: {error}", journal.display());
            Failure::new(FailureKind::Corrupt, what)
                .hint("repair the line, or remove the file to discard all changes since targets.json was written")
        }
        ListError::NoJournal | ListError::Encoding(_) => Failure::failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use forebay_export::RetiredNumber;

    fn attached(image: &str) -> ExportChange<Front> {
        let name = ExportName { front: Front::Nbd, pool: "local".into(), image: image.into() };
        let entries = vec![json!({ "pool": "local", "image": image, "front": "nbd" })];
        ExportChange { name, entries, retired: None }
    }

    fn images(data: &Path) -> Vec<String> {
        let content = TargetsFiles::open(data).expect("read").1;
        content.targets.iter().filter_map(|entry| Some(entry.get("image")?.as_str()?.to_owned())).collect()
    }

    #[test]
    fn the_list_and_its_journal_survive() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("no files");
        assert_eq!((content, files.wants_replacing()), (TargetsContent::default(), true));
        let retired = RetiredNumber { front: Front::Iscsi, within: String::new(), unit: 7, image: "x".into() };
        let list = TargetsContent { targets: attached("a").entries, retired: vec![retired] };
        files.replace(list.clone()).expect("written");
        assert!(!files.wants_replacing() && files.is_settled());
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1, list);
        files.append(&[attached("b")]).expect("appended");
        files.append(&[attached("c")]).expect("appended");
        assert_eq!(images(dir.path()), ["a", "b", "c"]);
        // More is appended after a restart, and then written as one list.
        let mut files = TargetsFiles::open(dir.path()).expect("read").0;
        files.append(&[attached("d")]).expect("appended");
        assert_eq!(images(dir.path()), ["a", "b", "c", "d"]);
        files.replace(TargetsContent::default()).expect("written");
        assert!(files.is_settled() && !journal_path(dir.path()).exists());
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1, TargetsContent::default());
    }

    #[test]
    fn a_change_counts_however_the_list_writes_the_pool() {
        let dir = tempfile::tempdir().expect("a directory");
        let entry = |pool: &str, image: &str| -> Value { json!({ "pool": pool, "image": image, "front": "nbd" }) };
        let targets = [entry("rados:rbd", "a"), entry("rbd", "b")];
        let listed = json!({ "version": 2, "generation": 1, "targets": targets });
        fs::write(list_path(dir.path()), listed.to_string()).expect("written");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("read");
        let name = ExportName { front: Front::Nbd, pool: "rbd".into(), image: "a".into() };
        files.append(&[ExportChange { name, entries: Vec::new(), retired: None }]).expect("appended");
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1.targets, targets[1..]);
    }

    /// The list is removed, as the message about a damaged one advises; its journal stays.
    #[test]
    fn a_journal_of_a_list_that_was_removed_does_not_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
        files.replace(TargetsContent::default()).expect("written");
        files.append(&[attached("a")]).expect("appended");
        let journal = fs::read(journal_path(dir.path())).expect("the journal");
        fs::remove_file(list_path(dir.path())).expect("removed");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("no list");
        assert_eq!(content, TargetsContent::default());
        files.replace(TargetsContent::default()).expect("written");
        fs::write(journal_path(dir.path()), journal).expect("written");
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1, TargetsContent::default());
    }

    #[test]
    fn a_journal_of_another_list_does_not_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
        files.replace(TargetsContent::default()).expect("written");
        files.append(&[attached("a")]).expect("appended");
        let journal = fs::read(journal_path(dir.path())).expect("the journal");
        files.replace(TargetsContent { targets: attached("b").entries, retired: Vec::new() }).expect("written");
        // A crash after the list was replaced leaves the old journal.
        fs::write(journal_path(dir.path()), journal).expect("written");
        assert_eq!(images(dir.path()), ["b"]);
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("read");
        files.append(&[attached("c")]).expect("appended");
        assert_eq!(images(dir.path()), ["b", "c"]);
    }

    #[test]
    fn what_a_torn_write_left_is_truncated() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut files = TargetsFiles::open(dir.path()).expect("no files").0;
        files.replace(TargetsContent::default()).expect("written");
        files.append(&[attached("a")]).expect("appended");
        let path = journal_path(dir.path());
        let mut bytes = fs::read(&path).expect("the journal");
        bytes.extend_from_slice(b"[{\"front\":\"nbd\",\"po");
        fs::write(&path, bytes).expect("written");
        let mut files = TargetsFiles::open(dir.path()).expect("read").0;
        files.append(&[attached("b")]).expect("appended");
        assert_eq!(images(dir.path()), ["a", "b"]);
    }

    #[test]
    fn a_list_of_the_version_before_is_read_and_written_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = json!({ "version": 1, "targets": attached("a").entries }).to_string();
        fs::write(list_path(dir.path()), text).expect("written");
        // An older build would ignore it.
        fs::write(journal_path(dir.path()), "{\"generation\":0}\n").expect("written");
        let (files, content) = TargetsFiles::open(dir.path()).expect("read");
        assert_eq!((content.targets, files.wants_replacing()), (attached("a").entries, true));
    }

    #[test]
    fn damage_and_newer_versions_are_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || TargetsFiles::open(dir.path()).map(|_| ()).expect_err("refused");
        fs::write(list_path(dir.path()), b"{\"version\":1,").expect("written");
        let failure = open();
        assert_eq!(failure.kind, FailureKind::Corrupt);
        assert!(failure.message.contains("targets.json is damaged: "), "{failure:?}");
        fs::write(list_path(dir.path()), b"{\"version\":3,\"targets\":{}}").expect("written");
        let failure = open();
        assert_eq!(failure.kind, FailureKind::Unsupported);
        assert!(failure.message.ends_with("targets.json has version 3, this build knows 2"), "{failure:?}");
        fs::write(list_path(dir.path()), b"{\"version\":2,\"generation\":1,\"targets\":[]}").expect("written");
        fs::write(journal_path(dir.path()), "{\"generation\":1}\nrubbish\n[]\n").expect("written");
        let failure = open();
        assert_eq!(failure.kind, FailureKind::Corrupt);
        assert!(failure.message.contains("targets.journal") && failure.message.contains("line 2"), "{failure:?}");
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
            let path = journal_path(dir.path());
            files.journal = Some(File::open(&path).expect("for reading"));
            files.append(&[attached("b")]).expect_err("it cannot be written");
            let mut file = OpenOptions::new().append(true).open(&path).expect("the journal");
            file.write_all(&line.as_bytes()[..there]).expect("what the failed write left");
            // Nothing is appended after unknown bytes, and the list alone is not complete.
            assert!(!files.is_settled() && !files.takes_changes() && files.wants_replacing());
            files.append(&[attached("c")]).expect_err("there is no journal");
            let after_crash = images(dir.path());
            let expected: &[&str] = if there == line.len() { &["a", "b"] } else { &["a"] };
            assert_eq!(after_crash, expected, "{there} bytes");
            // A failure to write the list leaves the state as unclear as before.
            let list = fs::read(list_path(dir.path())).expect("the list");
            fs::create_dir(list_path(dir.path()).with_extension("new")).expect("in the way");
            let content = || TargetsContent { targets: attached("a").entries, ..TargetsContent::default() };
            files.replace(content()).expect_err("something is in the way");
            assert!(!files.is_settled() && !files.takes_changes());
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
