//! Files that persist the exports across restarts.
//!
//! `targets.json` lists all exports.  A change of some of them is appended to `targets.journal`, so the cost of a
//! change does not depend on the number of exports.  When the journal has grown as long as the list, the list is
//! rewritten and the journal starts over.  Each list has a generation, and a journal is valid only for the generation
//! that it names: after any crash, one list and its journal are consistent.

mod journal;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_export::RetiredNumber;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::small_files::replace_file;
use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::image_spec;
use journal::Journal;

/// Version of the list that this build writes; it also reads the previous version.
const FILE_VERSION: u32 = 2;

/// Minimum length of the journal, in bytes, before the list is rewritten.
const JOURNAL_MIN: u64 = 64 << 10;

/// Content of the list.
#[derive(Debug, Serialize, Deserialize)]
struct TargetsList {
    version: u32,
    /// Generation of the list, which its journal names; absent up to version 1.
    #[serde(default)]
    generation: u64,
    /// Exports, each an [`AttachRequest`](crate::api::AttachRequest).  They are parsed one by one: a malformed one must
    /// not affect the others.
    targets: Vec<Value>,
    /// Numbers that hosts may remember; a build that does not know this field may reassign them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    retired: Vec<RetiredNumber<Front>>,
}

/// Key of an export in the files.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExportName {
    /// Front of the export.
    pub front: Front,
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub image: String,
}

impl ExportName {
    /// Returns the key of an entry's export, normalizing the pool (`rados:rbd` is `rbd`); `None` if it names no
    /// image.
    fn of_entry(entry: &Value) -> Option<Self> {
        let name = Self::deserialize(entry).ok()?;
        let spec = image_spec(&name.pool, &name.image).ok()?;
        Some(Self { front: name.front, pool: spec.pool, image: spec.image })
    }
}

/// Change of one export: its complete persisted state from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportChange {
    /// Key of the export.
    #[serde(flatten)]
    pub name: ExportName,
    /// Entries of the export; empty once it has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Value>,
    /// Number to reserve for the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retired: Option<RetiredNumber<Front>>,
}

/// Content of the list and its journal.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TargetsContent {
    /// Exports, each an [`AttachRequest`](crate::api::AttachRequest).
    pub targets: Vec<Value>,
    /// Numbers of exports that have ended, the oldest first.
    pub retired: Vec<RetiredNumber<Front>>,
}

/// Files of a data directory.
#[derive(Debug)]
pub struct TargetsFiles {
    data: PathBuf,
    generation: u64,
    /// Length of the list in bytes.
    list_len: u64,
    /// Journal of the list; `None` if the list must be written before anything is appended.
    journal: Option<Journal>,
    /// Set if a write to the journal failed and could not be undone: the file may hold the refused change.
    unclear: bool,
}

impl TargetsFiles {
    /// Reads the files.  No file means no exports.
    ///
    /// # Errors
    /// Files that cannot be read, are damaged, or come from a newer build.
    pub fn open(data: &Path) -> Result<(Self, TargetsContent)> {
        let path = list_path(data);
        let none = Self { data: data.into(), generation: 0, list_len: 0, journal: None, unclear: false };
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((none, TargetsContent::default())),
            Err(error) => return Err(Failure::io(error, format_args!("reading the exports from {}", path.display()))),
        };
        let list = decode_list(&path, &bytes)?;
        let mut content = TargetsContent { targets: list.targets, retired: list.retired };
        let journal = match list.version {
            0 | 1 => None,
            _ => {
                let (journal, changes) = Journal::open(data, list.generation)?;
                apply(&mut content, changes);
                Some(journal)
            }
        };
        Ok((Self { generation: list.generation, list_len: bytes.len() as u64, journal, ..none }, content))
    }

    /// Returns whether the list must be rewritten before anything is appended.
    pub fn wants_replacing(&self) -> bool {
        self.journal.as_ref().is_none_or(|journal| journal.len() > self.list_len.max(JOURNAL_MIN))
    }

    /// Returns whether the list alone is complete.
    pub fn is_settled(&self) -> bool {
        !self.unclear && self.journal.as_ref().is_none_or(|journal| journal.len() == 0)
    }

    /// Returns whether there is a journal to append to.
    pub fn takes_changes(&self) -> bool {
        self.journal.is_some()
    }

    /// Appends changes, all or none, and makes them durable.
    ///
    /// # Errors
    /// Errors of the file system; nothing has changed then.
    pub fn append(&mut self, changes: &[ExportChange]) -> Result<()> {
        let generation = self.generation;
        let journal = self.journal.as_mut().ok_or_else(|| Failure::failed("the list of exports is not written yet"))?;
        let done = journal.append(generation, changes);
        if journal.is_broken() {
            // The end of the journal is unknown: the next change rewrites the list.
            self.journal = None;
            self.unclear = true;
        }
        done
    }

    /// Rewrites the list atomically: after a crash it is either the old one with its journal, or the new one.
    ///
    /// # Errors
    /// Errors of the file system.  Until the next write succeeds, a crash leaves the old list or the new one.
    pub fn replace(&mut self, content: TargetsContent) -> Result<()> {
        let path = list_path(&self.data);
        // The clock makes the generation differ from that of a removed list whose journal may remain.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        let generation = now.max(self.generation + 1);
        let TargetsContent { targets, retired } = content;
        let list = TargetsList { version: FILE_VERSION, generation, targets, retired };
        let text = serde_json::to_vec_pretty(&list)
            .map_err(|error| Failure::failed(format!("writing the exports: {error}")))?;
        replace_file(&path, &text).map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))?;
        self.generation = generation;
        self.list_len = text.len() as u64;
        self.journal = Some(Journal::begin(&self.data));
        self.unclear = false;
        Ok(())
    }
}

/// Returns the path of the list.
pub fn list_path(data: &Path) -> PathBuf {
    data.join("targets.json")
}

fn decode_list(path: &Path, bytes: &[u8]) -> Result<TargetsList> {
    let damaged = |why: String| {
        Failure::new(FailureKind::Corrupt, format!("the list of exports {} is damaged: {why}", path.display()))
            .hint("repair it, or remove it and attach the images again")
    };
    let version = serde_json::from_slice::<Value>(bytes)
        .map_err(|error| damaged(error.to_string()))?
        .get("version")
        .and_then(Value::as_u64);
    if let Some(version) = version.filter(|&version| version > u64::from(FILE_VERSION)) {
        return Err(Failure::new(
            FailureKind::Unsupported,
            format!("the list of exports {} has version {version}, this build knows {FILE_VERSION}", path.display()),
        )
        .hint("run the newer forebay that wrote it"));
    }
    serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))
}

/// Applies the changes of a journal to the content of its list.
fn apply(content: &mut TargetsContent, changes: Vec<ExportChange>) {
    if changes.is_empty() {
        return;
    }
    let mut targets: Vec<Option<Value>> = std::mem::take(&mut content.targets).into_iter().map(Some).collect();
    let mut places: BTreeMap<ExportName, Vec<usize>> = BTreeMap::new();
    for (at, entry) in targets.iter().enumerate() {
        if let Some(name) = entry.as_ref().and_then(ExportName::of_entry) {
            places.entry(name).or_default().push(at);
        }
    }
    for change in changes {
        let of_export = places.entry(change.name).or_default();
        of_export.drain(..).for_each(|at| targets[at] = None);
        for entry in change.entries {
            if let (Some(front), Some(unit)) = (entry.get("front"), entry.get("unit").and_then(Value::as_u64)) {
                let front = Front::deserialize(front).ok();
                let within =
                    ["subsystem", "target"].into_iter().find_map(|key| entry.get(key)?.as_str()).unwrap_or_default();
                content
                    .retired
                    .retain(|kept| Some(kept.front) != front || kept.within != within || u64::from(kept.unit) != unit);
            }
            of_export.push(targets.len());
            targets.push(Some(entry));
        }
        content.retired.extend(change.retired);
    }
    content.targets = targets.into_iter().flatten().collect();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn entry(image: &str, unit: u32) -> Value {
        json!({ "pool": "local", "image": image, "front": "iscsi", "unit": unit })
    }

    fn name(image: &str) -> ExportName {
        ExportName { front: Front::Iscsi, pool: "local".into(), image: image.into() }
    }

    fn attached(image: &str, unit: u32) -> ExportChange {
        ExportChange { name: name(image), entries: vec![entry(image, unit)], retired: None }
    }

    fn detached(image: &str, unit: u32) -> ExportChange {
        ExportChange { name: name(image), entries: Vec::new(), retired: Some(retired(image, unit)) }
    }

    fn retired(image: &str, unit: u32) -> RetiredNumber<Front> {
        RetiredNumber { front: Front::Iscsi, within: String::new(), unit, image: image.into() }
    }

    #[test]
    fn the_list_and_its_journal_survive() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("no files");
        assert_eq!((content, files.wants_replacing()), (TargetsContent::default(), true));
        let odd = json!({ "no": "export" });
        let list = TargetsContent { targets: vec![entry("a", 1), odd.clone()], retired: vec![retired("x", 7)] };
        files.replace(list).expect("written");
        assert!(!files.wants_replacing());
        files.append(&[attached("b", 7), detached("a", 1)]).expect("appended");
        files.append(&[attached("c", 2)]).expect("appended");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("read");
        let expected =
            TargetsContent { targets: vec![odd, entry("b", 7), entry("c", 2)], retired: vec![retired("a", 1)] };
        assert_eq!(content, expected);
        // More is appended, and then written as one list.
        files.append(&[detached("c", 2)]).expect("appended");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("read");
        assert!(!files.is_settled());
        assert_eq!(content.retired, [retired("a", 1), retired("c", 2)]);
        files.replace(TargetsContent::default()).expect("written");
        assert!(files.is_settled());
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1, TargetsContent::default());
    }

    #[test]
    fn a_change_counts_however_the_list_writes_the_pool() {
        let dir = tempfile::tempdir().expect("a directory");
        let listed = json!({ "version": 2, "generation": 1, "targets": [
            { "pool": "rados:rbd", "image": "a", "front": "nbd" },
            { "pool": "rbd", "image": "b", "front": "nbd" },
        ] });
        fs::write(list_path(dir.path()), listed.to_string()).expect("written");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("read");
        let name = ExportName { front: Front::Nbd, pool: "rbd".into(), image: "a".into() };
        files.append(&[ExportChange { name, entries: Vec::new(), retired: None }]).expect("appended");
        let targets = TargetsFiles::open(dir.path()).expect("read").1.targets;
        assert_eq!(targets, [json!({ "pool": "rbd", "image": "b", "front": "nbd" })]);
    }

    /// The list is removed, as the message about a damaged one advises; its journal stays.
    #[test]
    fn a_journal_of_a_list_that_was_removed_does_not_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
        files.replace(TargetsContent::default()).expect("written");
        files.append(&[attached("a", 1)]).expect("appended");
        let journal = fs::read(journal::path(dir.path())).expect("the journal");
        fs::remove_file(list_path(dir.path())).expect("removed");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("no list");
        assert_eq!(content, TargetsContent::default());
        files.replace(TargetsContent::default()).expect("written");
        fs::write(journal::path(dir.path()), journal).expect("written");
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1, TargetsContent::default());
    }

    #[test]
    fn a_journal_of_another_list_does_not_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
        files.replace(TargetsContent::default()).expect("written");
        files.append(&[attached("a", 1)]).expect("appended");
        let journal = fs::read(journal::path(dir.path())).expect("the journal");
        files.replace(TargetsContent { targets: vec![entry("b", 2)], retired: Vec::new() }).expect("written");
        // A crash after the list was replaced leaves the old journal.
        fs::write(journal::path(dir.path()), journal).expect("written");
        let (mut files, content) = TargetsFiles::open(dir.path()).expect("read");
        assert_eq!(content.targets, [entry("b", 2)]);
        files.append(&[attached("c", 3)]).expect("appended");
        assert_eq!(TargetsFiles::open(dir.path()).expect("read").1.targets, [entry("b", 2), entry("c", 3)]);
    }

    #[test]
    fn a_list_of_the_version_before_is_read_and_written_anew() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = json!({ "version": 1, "targets": [entry("a", 1)] }).to_string();
        fs::write(list_path(dir.path()), text).expect("written");
        // An older build would ignore it.
        fs::write(journal::path(dir.path()), "{\"generation\":0}\n").expect("written");
        let (files, content) = TargetsFiles::open(dir.path()).expect("read");
        assert_eq!((content.targets, files.wants_replacing()), (vec![entry("a", 1)], true));
    }

    #[test]
    fn damage_and_newer_versions_are_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || TargetsFiles::open(dir.path()).map(|_| ()).expect_err("refused");
        fs::write(list_path(dir.path()), b"{\"version\":1,").expect("written");
        assert_eq!(open().kind, FailureKind::Corrupt);
        fs::write(list_path(dir.path()), b"{\"version\":3,\"targets\":{}}").expect("written");
        assert_eq!(open().kind, FailureKind::Unsupported);
        fs::write(list_path(dir.path()), b"{\"version\":2,\"generation\":1,\"targets\":[]}").expect("written");
        fs::write(journal::path(dir.path()), "{\"generation\":1}\nrubbish\n[]\n").expect("written");
        let failure = open();
        assert_eq!(failure.kind, FailureKind::Corrupt);
        assert!(failure.message.contains("targets.journal") && failure.message.contains("line 2"), "{failure:?}");
    }

    #[test]
    fn a_journal_as_long_as_its_list_asks_for_a_new_list() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut files, _) = TargetsFiles::open(dir.path()).expect("no files");
        files.replace(TargetsContent::default()).expect("written");
        let mut changes = 0;
        while !files.wants_replacing() {
            files.append(&[attached("image", changes)]).expect("appended");
            changes += 1;
        }
        let len = fs::metadata(journal::path(dir.path())).expect("the journal").len();
        assert!(len > JOURNAL_MIN && len < JOURNAL_MIN + 1000, "{len} bytes");
    }

    /// Operation on the files.
    #[derive(Debug, Clone)]
    enum Step {
        Append(Vec<(u8, bool)>),
        Replace,
        /// Crash of the process; the number is the part of the last change, in 256ths, that reached the file, or all
        /// of it if it was acknowledged.
        Crash(Vec<(u8, bool)>, u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let changes = || prop::collection::vec((0..6_u8, any::<bool>()), 1..4);
        let step = prop_oneof![
            4 => changes().prop_map(Step::Append),
            1 => Just(Step::Replace),
            2 => (changes(), any::<u8>()).prop_map(|(changes, part)| Step::Crash(changes, part)),
        ];
        prop::collection::vec(step, 1..30)
    }

    /// Plain model: the exports and the reserved numbers.
    fn apply_to_model(
        model: &mut (BTreeMap<u8, Value>, Vec<RetiredNumber<Front>>),
        changes: &[(u8, bool)],
    ) -> Vec<ExportChange> {
        let change = |&(image, attach): &(u8, bool)| {
            let (image_name, unit) = (format!("image{image}"), u32::from(image));
            match attach {
                true => {
                    model.0.insert(image, entry(&image_name, unit));
                    model.1.retain(|kept| kept.unit != unit);
                    attached(&image_name, unit)
                }
                false => {
                    model.0.remove(&image);
                    model.1.push(retired(&image_name, unit));
                    detached(&image_name, unit)
                }
            }
        };
        changes.iter().map(change).collect()
    }

    fn sorted(mut targets: Vec<Value>) -> Vec<String> {
        targets.sort_by_key(Value::to_string);
        targets.iter().map(Value::to_string).collect()
    }

    proptest! {
        #[test]
        fn what_was_answered_is_there_after_any_crash(steps in steps()) {
            let dir = tempfile::tempdir().expect("a directory");
            let mut files = TargetsFiles::open(dir.path()).expect("no files").0;
            files.replace(TargetsContent::default()).expect("written");
            let mut model = (BTreeMap::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Append(changes) => {
                        let changes = apply_to_model(&mut model, &changes);
                        files.append(&changes).expect("appended");
                    }
                    Step::Replace => {
                        let content = TargetsContent { targets: model.0.values().cloned().collect(), retired: model.1.clone() };
                        files.replace(content).expect("written");
                    }
                    Step::Crash(changes, part) => {
                        let path = journal::path(dir.path());
                        let before = fs::read(&path).unwrap_or_default();
                        // A fragment cut off before is truncated.
                        let before = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
                        let mut with_change = (model.0.clone(), model.1.clone());
                        files.append(&apply_to_model(&mut with_change, &changes)).expect("appended");
                        let after = fs::read(&path).expect("the journal");
                        let kept = before + (after.len() - before) * usize::from(part) / 256;
                        fs::write(&path, &after[..kept]).expect("cut");
                        files = TargetsFiles::open(dir.path()).expect("read").0;
                    }
                }
                let (_, content) = TargetsFiles::open(dir.path()).expect("read");
                prop_assert_eq!(sorted(content.targets), sorted(model.0.values().cloned().collect()));
                prop_assert_eq!(content.retired, model.1.clone());
            }
        }
    }
}
