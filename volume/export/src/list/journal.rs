//! Journal of a list: a line of JSON that names the list's generation, then one line for each append, an array of
//! changes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{ExportChange, ListError};

/// Header line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    generation: u64,
}

/// Last line of a journal that a torn write left; it was never acknowledged.
#[derive(Debug)]
pub struct TornLine {
    /// Number of the line, from 1.
    pub line: usize,
    /// Reason for which it cannot be read.
    pub error: serde_json::Error,
}

/// Valid part of a journal.
pub(super) struct Journal<F> {
    pub(super) changes: Vec<ExportChange<F>>,
    /// Length in bytes; 0 if the journal is not that of the list.
    pub(super) len: u64,
    pub(super) torn: Option<TornLine>,
}

/// Decodes the journal of a list of the given generation.
pub(super) fn decode<F: DeserializeOwned>(bytes: &[u8], generation: u64) -> Result<Journal<F>, ListError> {
    let mut journal = Journal { changes: Vec::new(), len: 0, torn: None };
    // Bytes after the last line break are a write that a crash cut off.
    let lines: Vec<&[u8]> = bytes.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")).collect();
    for (at, line) in lines.iter().enumerate() {
        if at == 0 {
            match serde_json::from_slice::<Head>(line) {
                Ok(head) if head.generation == generation => {}
                // Journal of another list, or a header cut off before anything was acknowledged.
                Ok(_) => return Ok(journal),
                Err(_) if lines.len() == 1 => return Ok(journal),
                Err(error) => return Err(ListError::DamagedJournal { line: 1, error }),
            }
        } else {
            match serde_json::from_slice::<Vec<ExportChange<F>>>(line) {
                Ok(written) => journal.changes.extend(written),
                Err(error) if at + 1 == lines.len() => {
                    // A torn write may end in old bytes.
                    journal.torn = Some(TornLine { line: at + 1, error });
                    break;
                }
                Err(error) => return Err(ListError::DamagedJournal { line: at + 1, error }),
            }
        }
        journal.len += line.len() as u64;
    }
    Ok(journal)
}

/// Encodes one append: the header line if the journal is empty, with the generation of its list, and the changes.
pub(super) fn encode<F: Serialize>(
    generation: Option<u64>,
    changes: &[ExportChange<F>],
) -> Result<Vec<u8>, serde_json::Error> {
    let mut text = Vec::new();
    if let Some(generation) = generation {
        serde_json::to_writer(&mut text, &Head { generation })?;
        text.push(b'\n');
    }
    serde_json::to_writer(&mut text, changes)?;
    text.push(b'\n');
    Ok(text)
}
