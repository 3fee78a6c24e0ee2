//! Write-back plan of consecutive entries of one generation: the newest bytes of each range, with adjacent ones
//! merged.
//!
//! Invariant: the writes of a plan do not overlap, so they may go to the backend in any order and concurrently.

use forebay_block::Extent;

use crate::entries::{EntryKind, LogEntry};
use crate::interval_set::IntervalSet;

/// Maximum length of a merged write, and of the writes in one request, in bytes.
const JOINED_MAX: u64 = 1 << 20;
/// Maximum number of writes in one request.
const COALESCED_MAX: usize = 64;

/// Operation of a run at the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WriteBackAction {
    /// Write of entries' bytes.
    Write,
    /// Write-zeroes that may deallocate.
    Zeroes,
    /// Write-zeroes that keeps the space allocated.
    ZeroesKeep,
    /// Discard request.
    Discard,
}

impl WriteBackAction {
    fn of(kind: EntryKind) -> Self {
        match kind {
            EntryKind::Write | EntryKind::Same => WriteBackAction::Write,
            EntryKind::Zeroes => WriteBackAction::Zeroes,
            EntryKind::ZeroesKeep => WriteBackAction::ZeroesKeep,
            EntryKind::Discard => WriteBackAction::Discard,
        }
    }
}

/// Single operation at the backend on a contiguous range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WriteBackRun {
    pub(crate) action: WriteBackAction,
    pub(crate) extent: Extent,
    /// Sources of the bytes, in order: sequence number of the entry, and part of the volume.
    pub(crate) parts: Vec<(u64, Extent)>,
}

/// Plans the write-back of entries of one generation, given oldest first; excludes anything past `size` bytes of the
/// volume.
pub(crate) fn plan<'a>(entries: impl DoubleEndedIterator<Item = (u64, &'a LogEntry)>, size: u64) -> Vec<WriteBackRun> {
    let mut covered = IntervalSet::default();
    let mut parts: Vec<(Extent, u64, WriteBackAction)> = Vec::new();
    for (seq, entry) in entries.rev() {
        let Extent { offset, len } = entry.extent();
        if offset < size {
            let extent = Extent::new(offset, len.min(size - offset));
            covered.add(extent, |part| parts.push((part, seq, WriteBackAction::of(entry.kind()))));
        }
    }
    parts.sort_unstable_by_key(|(extent, ..)| extent.offset);
    let mut runs: Vec<WriteBackRun> = Vec::new();
    for (extent, seq, action) in parts {
        if let Some(last) = runs.last_mut()
            && (last.action, last.extent.end()) == (action, extent.offset)
            && (action != WriteBackAction::Write || last.extent.len + extent.len <= JOINED_MAX)
        {
            last.extent.len += extent.len;
            if action == WriteBackAction::Write {
                last.parts.push((seq, extent));
            }
            continue;
        }
        let parts = if action == WriteBackAction::Write { vec![(seq, extent)] } else { Vec::new() };
        runs.push(WriteBackRun { action, extent, parts });
    }
    runs
}

/// Coalesces runs into requests: adjacent writes within the same backend unit of `unit` bytes form one request.
pub(crate) fn coalesce(runs: Vec<WriteBackRun>, unit: Option<u64>) -> Vec<Vec<WriteBackRun>> {
    let unit_of = |run: &WriteBackRun| {
        let unit = unit.filter(|_| run.action == WriteBackAction::Write)?;
        let first = run.extent.offset / unit;
        (first == (run.extent.end() - 1) / unit).then_some(first)
    };
    let mut groups: Vec<Vec<WriteBackRun>> = Vec::new();
    let (mut last, mut bytes) = (None, 0);
    for run in runs {
        let own = unit_of(&run);
        bytes += run.extent.len;
        match groups.last_mut() {
            Some(group) if own.is_some() && own == last && group.len() < COALESCED_MAX && bytes <= JOINED_MAX => {
                group.push(run);
            }
            _ => {
                bytes = run.extent.len;
                groups.push(vec![run]);
            }
        }
        last = own;
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn only_writes_of_one_unit_are_coalesced(
            runs in proptest::collection::vec((0..300_u64, 1..200_u64, 0..5_u8), 0..80),
            unit in proptest::option::of(512..2048_u64),
        ) {
            let mut at = 0;
            let runs: Vec<WriteBackRun> = runs
                .into_iter()
                .map(|(gap, len, kind)| {
                    let extent = Extent::new(at + gap, len);
                    at = extent.end();
                    let action = if kind == 0 { WriteBackAction::Zeroes } else { WriteBackAction::Write };
                    WriteBackRun { action, extent, parts: Vec::new() }
                })
                .collect();
            let groups = coalesce(runs.clone(), unit);
            let units = |run: &WriteBackRun| unit.map(|unit| (run.extent.offset / unit, (run.extent.end() - 1) / unit));
            for group in &groups {
                prop_assert!(!group.is_empty() && group.len() <= COALESCED_MAX);
                if group.len() > 1 {
                    let first = units(&group[0]);
                    prop_assert!(first.is_some_and(|(from, to)| from == to));
                    prop_assert!(group.iter().all(|run| units(run) == first && run.action == WriteBackAction::Write));
                }
            }
            for pair in groups.windows(2) {
                let (last, next) = (&pair[0][pair[0].len() - 1], &pair[1][0]);
                let alike = units(last).is_some_and(|(from, to)| from == to) && units(last) == units(next);
                let writes = last.action == WriteBackAction::Write && next.action == WriteBackAction::Write;
                prop_assert!(!(alike && writes) || pair[0].len() == COALESCED_MAX, "apart for no reason");
            }
            prop_assert_eq!(groups.concat(), runs);
        }

        #[test]
        fn a_plan_in_any_order_is_the_entries_in_their_order(
            writes in proptest::collection::vec((0..400_u64, 1..60_u64, 0..5_u8), 1..80),
            size in 200..500_u64,
        ) {
            let kinds = [EntryKind::Write, EntryKind::Write, EntryKind::Same, EntryKind::Zeroes, EntryKind::Discard];
            let entries: Vec<LogEntry> = writes
                .iter()
                .map(|&(start, len, kind)| LogEntry::new(kinds[usize::from(kind)], Extent::new(start, len), 0, 0))
                .collect();
            let mut plain = vec![None; size as usize];
            for (seq, entry) in entries.iter().enumerate() {
                for at in entry.extent().range().filter(|&at| at < size) {
                    plain[at as usize] = Some((WriteBackAction::of(entry.kind()), seq as u64));
                }
            }
            let mut planned = vec![None; size as usize];
            let mut runs = plan(entries.iter().enumerate().map(|(seq, entry)| (seq as u64, entry)), size);
            // Runs are disjoint, so their order cannot matter; adjacent ones of one kind are merged.
            for pair in runs.windows(2) {
                prop_assert!(pair[0].extent.end() <= pair[1].extent.offset);
                let touch = pair[0].extent.end() == pair[1].extent.offset && pair[0].action == pair[1].action;
                prop_assert!(!touch || pair[0].extent.len + pair[1].extent.len > JOINED_MAX);
            }
            runs.reverse();
            for run in runs {
                let parts: Vec<(u64, Extent)> = match run.action {
                    WriteBackAction::Write => run.parts,
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
                    (Some((WriteBackAction::Write, seq)), planned) => {
                        prop_assert_eq!(planned, Some((WriteBackAction::Write, seq)));
                    }
                    (plain, planned) => {
                        prop_assert_eq!(plain.map(|(action, _)| action), planned.map(|(action, _)| action));
                    }
                }
            }
        }
    }
}
