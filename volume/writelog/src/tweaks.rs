//! Record of the keys and tweaks that payloads are encrypted with, for tests: no two contents have the same ones.
//!
//! Compiled with the feature `record-tweaks` only, which no program has.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use forebay_block::BufList;

use crate::format::LogId;

/// Log, run and salt, and sequence number: what key and tweaks follow from.
type UsedTweaks = (LogId, (u32, u32), u64);

/// Payloads encrypted on this thread.
#[derive(Default)]
struct Used {
    /// Length and hash of the content, by what its key and tweaks follow from.
    contents: HashMap<UsedTweaks, (usize, u64)>,
    violation: Option<String>,
}

thread_local! {
    static USED: RefCell<Option<Used>> = const { RefCell::new(None) };
}

/// Begins to record on this thread.
pub fn start() {
    USED.with_borrow_mut(|used| *used = Some(Used::default()));
}

/// Ends recording; returns the number of payloads that were encrypted.
///
/// # Errors
/// If two contents had the same key and tweaks.
pub fn finish() -> Result<usize, String> {
    let used = USED.with_borrow_mut(Option::take).unwrap_or_default();
    used.violation.map_or(Ok(used.contents.len()), Err)
}

/// Records a payload that is encrypted.
pub(crate) fn note(log: &LogId, run: (u32, u32), seq: u64, payload: &BufList) {
    USED.with_borrow_mut(|used| {
        let Some(used) = used else { return };
        let mut hasher = DefaultHasher::new();
        payload.to_vec().hash(&mut hasher);
        let content = (payload.len(), hasher.finish());
        let before = used.contents.insert((*log, run, seq), content);
        if before.is_some_and(|before| before != content) {
            let text = format!("entry {seq} of run {run:?} was encrypted with two contents");
            used.violation.get_or_insert(text);
        }
    });
}
