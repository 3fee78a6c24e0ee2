//! Interval set: which bytes a row of writes covers.

use std::collections::BTreeMap;

use forebay_block::Extent;

/// Interval set: start to end, with adjacent intervals merged.
#[derive(Debug, Default)]
pub(crate) struct IntervalSet {
    runs: BTreeMap<u64, u64>,
}

impl IntervalSet {
    /// Adds an interval; calls `fresh` with the parts of it that were not in the set, in order.
    pub(crate) fn add(&mut self, extent: Extent, mut fresh: impl FnMut(Extent)) {
        let (last, mut at) = (extent.end(), extent.offset);
        let (mut start, mut end) = (extent.offset, last);
        let before = self.runs.range(..=start).next_back().map(|(&from, &to)| (from, to));
        if let Some((from, to)) = before.filter(|(_, to)| *to >= start) {
            self.runs.remove(&from);
            at = to.min(last);
            (start, end) = (from, end.max(to));
        }
        while let Some((from, to)) = self.runs.range(extent.offset..=last).next().map(|(&from, &to)| (from, to)) {
            self.runs.remove(&from);
            if from > at {
                fresh(Extent::new(at, from - at));
            }
            at = at.max(to.min(last));
            end = end.max(to);
        }
        if at < last {
            fresh(Extent::new(at, last - at));
        }
        self.runs.insert(start, end);
    }

    /// Removes all intervals.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_fresh_is_what_was_not_there(runs in proptest::collection::vec((0..200_u64, 1..40_u64), 1..60)) {
            let mut covered = IntervalSet::default();
            let mut plain = [false; 256];
            for (start, len) in runs {
                let mut fresh = Vec::new();
                covered.add(Extent::new(start, len), |part| fresh.extend(part.range()));
                let wanted: Vec<u64> = (start..start + len).filter(|&at| !plain[at as usize]).collect();
                prop_assert_eq!(fresh, wanted);
                plain[start as usize..(start + len) as usize].fill(true);
                let all: Vec<u64> = covered.runs.iter().flat_map(|(&from, &to)| from..to).collect();
                let wanted: Vec<u64> = (0..256).filter(|&at| plain[at as usize]).collect();
                prop_assert_eq!(all, wanted);
            }
        }
    }
}
