//! List of exports and its journal: their content, and which of the two is written next.  Files are read and written
//! by the caller.
//!
//! The list has all exports.  A change of some of them is appended to the journal, so the cost of a change does not
//! depend on the number of exports.  When the journal has grown as long as the list, the list is rewritten and the
//! journal starts over.
//!
//! | invariant | |
//! |---|---|
//! | P1 | a journal is valid only for the list whose generation it names, and no two lists have the same generation |
//! | P2 | the changes of one append are valid together, once their line is complete |
//! | P3 | after any crash, the files have all acknowledged changes, and of those in flight the first appends, or none |
//! | P4 | after an append of unknown outcome, nothing is appended before the list is rewritten |

mod journal;

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::numbers::RetiredNumber;
pub use journal::TornLine;

/// Version of the list that this build writes; it also reads the previous version.
pub const LIST_VERSION: u32 = 2;

/// Minimum length of the journal, in bytes, before the list is rewritten.
pub const JOURNAL_MIN: u64 = 64 << 10;

/// Reason for which a list or its journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The list is not the JSON of a list.
    #[error("the list of exports is damaged: {0}")]
    Damaged(serde_json::Error),
    /// The list has a later version.
    #[error("the list of exports has version {0}, this build knows {LIST_VERSION}")]
    Newer(u64),
    /// A line of the journal, counted from 1, is damaged, and was acknowledged.
    #[error("the journal of exports is damaged in line {line}: {error}")]
    DamagedJournal {
        /// Number of the line.
        line: usize,
        /// Reason for which it cannot be read.
        error: serde_json::Error,
    },
    /// Without a journal nothing can be appended: the list has to be written first.
    #[error("the list of exports is not written yet")]
    NoJournal,
    /// The content cannot be encoded.
    #[error("writing the exports: {0}")]
    Encoding(serde_json::Error),
}

/// Content of the list's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "F: Deserialize<'de>"))]
struct ListFile<F> {
    version: u32,
    /// Generation of the list, which its journal names; absent up to version 1.
    #[serde(default)]
    generation: u64,
    /// Entries of exports.  They are parsed one by one: a malformed one must not affect the others.
    targets: Vec<Value>,
    /// Numbers that hosts may remember; a build that does not know this field may reassign them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    retired: Vec<RetiredNumber<F>>,
}

/// Key of an export over a front `F` in the list and the journal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExportName<F> {
    /// Front of the export.
    pub front: F,
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub image: String,
}

/// Change of one export: its complete persisted state from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound(deserialize = "F: Deserialize<'de>"))]
pub struct ExportChange<F> {
    /// Key of the export.
    #[serde(flatten)]
    pub name: ExportName<F>,
    /// Entries of the export; empty once it has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Value>,
    /// Number to reserve for the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retired: Option<RetiredNumber<F>>,
}

/// Content of the list and its journal together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListContent<F> {
    /// Entries of exports.
    pub targets: Vec<Value>,
    /// Numbers of exports that have ended, the oldest first.
    pub retired: Vec<RetiredNumber<F>>,
}

impl<F> Default for ListContent<F> {
    fn default() -> Self {
        Self { targets: Vec::new(), retired: Vec::new() }
    }
}

/// List as its file has it, without its journal.
#[derive(Debug)]
pub struct StoredList<F> {
    file: ListFile<F>,
    len: u64,
}

/// List with the changes of its journal.
#[derive(Debug)]
pub struct Replayed<F> {
    /// State of the files.
    pub state: ListState,
    /// Exports and reserved numbers.
    pub content: ListContent<F>,
    /// Last line of the journal, if a torn write left it.
    pub torn: Option<TornLine>,
}

/// List to be written.
#[derive(Debug)]
pub struct EncodedList {
    generation: u64,
    /// Content of the file.
    pub text: Vec<u8>,
}

/// State of the list's file and its journal's: what of them is valid.  [`Default`] is that of a directory without them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListState {
    generation: u64,
    /// Length of the list in bytes.
    list_len: u64,
    /// Valid length of the journal in bytes; anything beyond it was never acknowledged.  `None` if the list must be
    /// written before anything is appended.
    journal_len: Option<u64>,
    /// Set if a write to the journal failed and could not be undone: the file may have the refused change.
    unclear: bool,
}

impl<F: DeserializeOwned> StoredList<F> {
    /// Decodes the content of the list's file.
    ///
    /// # Errors
    /// [`Damaged`](ListError::Damaged) and [`Newer`](ListError::Newer).
    pub fn decode(bytes: &[u8]) -> Result<Self, ListError> {
        let any: Value = serde_json::from_slice(bytes).map_err(ListError::Damaged)?;
        // A later version may have other fields.
        let version = any.get("version").and_then(Value::as_u64);
        if let Some(version) = version.filter(|&version| version > u64::from(LIST_VERSION)) {
            return Err(ListError::Newer(version));
        }
        let file = serde_json::from_slice(bytes).map_err(ListError::Damaged)?;
        Ok(Self { file, len: bytes.len() as u64 })
    }

    /// Returns whether the list may have a journal.
    pub fn has_journal(&self) -> bool {
        self.file.version >= 2
    }
}

impl<F: DeserializeOwned + Ord> StoredList<F> {
    /// Applies the changes of the journal, whose file has these bytes; none if there is no file, or no journal.
    /// `canonical` returns the key under which changes name an export that an entry of the list names so, if any.
    ///
    /// # Errors
    /// [`DamagedJournal`](ListError::DamagedJournal).
    pub fn replay(
        self,
        journal: &[u8],
        canonical: impl Fn(ExportName<F>) -> Option<ExportName<F>>,
    ) -> Result<Replayed<F>, ListError> {
        let has_journal = self.has_journal();
        let ListFile { generation, targets, retired, .. } = self.file;
        let mut content = ListContent { targets, retired };
        let state = ListState { generation, list_len: self.len, ..ListState::default() };
        if !has_journal {
            return Ok(Replayed { state, content, torn: None });
        }
        let journal = journal::decode(journal, generation)?;
        content.apply(journal.changes, canonical);
        Ok(Replayed { state: ListState { journal_len: Some(journal.len), ..state }, content, torn: journal.torn })
    }
}

impl ListState {
    /// Returns whether the list must be rewritten before anything is appended, or has a journal as long as itself.
    pub fn wants_replacing(&self) -> bool {
        self.journal_len.is_none_or(|len| len > self.list_len.max(JOURNAL_MIN))
    }

    /// Returns whether the list alone is complete.
    pub fn is_settled(&self) -> bool {
        !self.unclear && self.journal_len.is_none_or(|len| len == 0)
    }

    /// Returns the length in bytes to which the journal's file is cut before anything is appended; `None` if the list
    /// must be written first.
    pub fn journal_len(&self) -> Option<u64> {
        self.journal_len
    }

    /// Encodes changes to be appended to the journal in one write; [`appended`](Self::appended) says that it is done.
    ///
    /// # Errors
    /// [`NoJournal`](ListError::NoJournal), [`Encoding`](ListError::Encoding).
    pub fn encode_changes<F: Serialize>(&self, changes: &[ExportChange<F>]) -> Result<Vec<u8>, ListError> {
        let len = self.journal_len.ok_or(ListError::NoJournal)?;
        journal::encode((len == 0).then_some(self.generation), changes).map_err(ListError::Encoding)
    }

    /// Records that so many encoded bytes were appended to the journal, and are durable.
    ///
    /// # Panics
    /// If there is no journal.
    pub fn appended(&mut self, bytes: usize) {
        let len = self.journal_len.as_mut().expect("appended to a journal");
        *len += bytes as u64;
    }

    /// Records that an append failed, and that the journal's file could not be cut to its valid length.
    pub fn append_unclear(&mut self) {
        self.journal_len = None;
        self.unclear = true;
    }

    /// Encodes a list that replaces the present one, and its journal; [`replaced`](Self::replaced) says that it has.
    /// `now` is the time, in nanoseconds: it makes the generation differ from that of a removed list whose journal may
    /// remain.
    ///
    /// # Errors
    /// [`Encoding`](ListError::Encoding).
    pub fn encode_list<F: Serialize>(&self, content: ListContent<F>, now: u64) -> Result<EncodedList, ListError> {
        let generation = now.max(self.generation.saturating_add(1));
        let ListContent { targets, retired } = content;
        let file = ListFile { version: LIST_VERSION, generation, targets, retired };
        let text = serde_json::to_vec_pretty(&file).map_err(ListError::Encoding)?;
        Ok(EncodedList { generation, text })
    }

    /// Records that the list's file was replaced: any journal is invalid, and a new one is empty.
    pub fn replaced(&mut self, list: &EncodedList) {
        debug_assert!(list.generation > self.generation, "P1");
        let (generation, list_len) = (list.generation, list.text.len() as u64);
        *self = Self { generation, list_len, journal_len: Some(0), unclear: false };
    }
}

impl<F: DeserializeOwned + Ord> ListContent<F> {
    /// Applies changes, in order.
    fn apply(&mut self, changes: Vec<ExportChange<F>>, canonical: impl Fn(ExportName<F>) -> Option<ExportName<F>>) {
        if changes.is_empty() {
            return;
        }
        let mut targets: Vec<Option<Value>> = std::mem::take(&mut self.targets).into_iter().map(Some).collect();
        let mut positions: BTreeMap<ExportName<F>, Vec<usize>> = BTreeMap::new();
        for (at, entry) in targets.iter().enumerate() {
            let name = entry.as_ref().and_then(|entry| ExportName::deserialize(entry).ok());
            if let Some(name) = name.and_then(&canonical) {
                positions.entry(name).or_default().push(at);
            }
        }
        for change in changes {
            let of_export = positions.entry(change.name).or_default();
            of_export.drain(..).for_each(|at| targets[at] = None);
            for entry in change.entries {
                self.take_number(&entry);
                of_export.push(targets.len());
                targets.push(Some(entry));
            }
            self.retired.extend(change.retired);
        }
        self.targets = targets.into_iter().flatten().collect();
    }

    /// Removes the number of an entry from those reserved.
    fn take_number(&mut self, entry: &Value) {
        let (Some(front), Some(unit)) = (entry.get("front"), entry.get("unit").and_then(Value::as_u64)) else { return };
        let front = F::deserialize(front).ok();
        let within = ["subsystem", "target"].into_iter().find_map(|key| entry.get(key)?.as_str()).unwrap_or_default();
        self.retired.retain(|kept| {
            Some(&kept.front) != front.as_ref() || kept.within != within || u64::from(kept.unit) != unit
        });
    }
}

#[cfg(test)]
mod tests;
