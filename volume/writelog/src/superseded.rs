//! Superseded entries: overwritten entirely by later ones of their own generation, so that neither reads nor
//! write-back need them.
//!
//! An entry overwritten only by a later *generation* is still needed: the backend must get it before anything of that
//! generation, or it would temporarily hold a state that no host ever wrote.

use crate::format::EntryRecord;
use crate::interval_set::IntervalSet;

/// Returns for each entry of a log, oldest first, whether it is superseded.
pub(crate) fn superseded_entries(entries: &[EntryRecord]) -> Vec<bool> {
    let mut superseded = vec![false; entries.len()];
    let (mut covered, mut generation) = (IntervalSet::default(), None);
    for (entry, superseded) in entries.iter().zip(&mut superseded).rev() {
        if generation.replace(entry.generation) != Some(entry.generation) {
            covered.clear();
        }
        let mut seen = false;
        covered.add(entry.extent, |_| seen = true);
        *superseded = !seen;
    }
    superseded
}
