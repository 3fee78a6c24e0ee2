//! What is written back for a row of entries of one generation: the newest bytes of each run, joined where they touch.
//!
//! The writes of a plan do not overlap, so they may go to the backend in any order and at the same time.

use forebay_block::Extent;

use crate::entries::{Entry, Kind};
use crate::hidden::Covered;

/// Longest write that parts are joined to, in bytes.
const JOINED_MAX: u64 = 1 << 20;

/// What a run does at the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// Writes bytes of entries.
    Write,
    /// Writes zeroes; the space may be given back.
    Zeroes,
    /// Writes zeroes, and the space must stay.
    ZeroesKeep,
    /// Discards.
    Discard,
}

impl Action {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Write | Kind::Same => Action::Write,
            Kind::Zeroes => Action::Zeroes,
            Kind::ZeroesKeep => Action::ZeroesKeep,
            Kind::Discard => Action::Discard,
        }
    }
}

/// One request to the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) action: Action,
    pub(crate) extent: Extent,
    /// Where the bytes come from, in order: the entry's number, and the part of the volume.
    pub(crate) parts: Vec<(u64, Extent)>,
}

/// Plans the write-back of entries of one generation, given oldest first; nothing past `size` bytes of the volume.
pub(crate) fn plan<'a>(entries: impl DoubleEndedIterator<Item = (u64, &'a Entry)>, size: u64) -> Vec<Run> {
    let mut covered = Covered::default();
    let mut parts: Vec<(Extent, u64, Action)> = Vec::new();
    for (seq, entry) in entries.rev() {
        let Extent { offset, len } = entry.extent();
        if offset < size {
            let extent = Extent::new(offset, len.min(size - offset));
            covered.add(extent, |part| parts.push((part, seq, Action::of(entry.kind()))));
        }
    }
    parts.sort_unstable_by_key(|(extent, ..)| extent.offset);
    let mut runs: Vec<Run> = Vec::new();
    for (extent, seq, action) in parts {
        if let Some(last) = runs.last_mut()
            && (last.action, last.extent.end()) == (action, extent.offset)
            && (action != Action::Write || last.extent.len + extent.len <= JOINED_MAX)
        {
            last.extent.len += extent.len;
            if action == Action::Write {
                last.parts.push((seq, extent));
            }
            continue;
        }
        let parts = if action == Action::Write { vec![(seq, extent)] } else { Vec::new() };
        runs.push(Run { action, extent, parts });
    }
    runs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_plan_in_any_order_is_the_entries_in_their_order(
            writes in proptest::collection::vec((0..400_u64, 1..60_u64, 0..5_u8), 1..80),
            size in 200..500_u64,
        ) {
            let kinds = [Kind::Write, Kind::Write, Kind::Same, Kind::Zeroes, Kind::Discard];
            let entries: Vec<Entry> = writes
                .iter()
                .map(|&(start, len, kind)| Entry::new(kinds[usize::from(kind)], Extent::new(start, len), 0, 0))
                .collect();
            let mut plain = vec![None; size as usize];
            for (seq, entry) in entries.iter().enumerate() {
                for at in entry.extent().range().filter(|&at| at < size) {
                    plain[at as usize] = Some((Action::of(entry.kind()), seq as u64));
                }
            }
            let mut planned = vec![None; size as usize];
            let mut runs = plan(entries.iter().enumerate().map(|(seq, entry)| (seq as u64, entry)), size);
            // Runs are disjoint, so their order cannot matter; and neighbours of one kind are joined.
            for pair in runs.windows(2) {
                prop_assert!(pair[0].extent.end() <= pair[1].extent.offset);
                let touch = pair[0].extent.end() == pair[1].extent.offset && pair[0].action == pair[1].action;
                prop_assert!(!touch || pair[0].extent.len + pair[1].extent.len > JOINED_MAX);
            }
            runs.reverse();
            for run in runs {
                let parts: Vec<(u64, Extent)> = match run.action {
                    Action::Write => run.parts,
                    _ => vec![(u64::MAX, run.extent)],
                };
                prop_assert_eq!(parts.iter().map(|(_, part)| part.len).sum::<u64>(), run.extent.len);
                for (seq, part) in parts {
                    prop_assert!(part.end() <= size);
                    for at in part.range() {
                        planned[at as usize] = Some((run.action, seq));
                    }
                }
            }
            for (plain, planned) in plain.into_iter().zip(planned) {
                match (plain, planned) {
                    (Some((Action::Write, seq)), planned) => prop_assert_eq!(planned, Some((Action::Write, seq))),
                    (plain, planned) => {
                        prop_assert_eq!(plain.map(|(action, _)| action), planned.map(|(action, _)| action));
                    }
                }
            }
        }
    }
}
