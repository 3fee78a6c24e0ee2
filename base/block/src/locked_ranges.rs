use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use crate::Extent;

/// Set of locked ranges.
///
/// Invariants:
/// 1. Its ranges are not empty, and no two of them overlap.
/// 2. `bytes` is the sum of their lengths.
#[derive(Default)]
pub(crate) struct LockedRanges {
    /// Start to end.
    ranges: RefCell<BTreeMap<u64, u64>>,
    bytes: Cell<u64>,
}

impl LockedRanges {
    /// Returns whether a part of a range is locked.
    pub(crate) fn overlaps(&self, extent: Extent) -> bool {
        // The last range that begins before the end is the only one that can overlap: all before it end earlier.
        let before = self.ranges.borrow().range(..extent.end()).next_back().map(|(_, &end)| end);
        before.is_some_and(|end| end > extent.offset)
    }

    /// Adds a range of which nothing is locked; an empty one adds nothing.
    pub(crate) fn insert(&self, extent: Extent) {
        debug_assert!(!self.overlaps(extent), "{extent:?} is locked already");
        if extent.len > 0 {
            self.ranges.borrow_mut().insert(extent.offset, extent.end());
            self.bytes.set(self.bytes.get() + extent.len);
        }
    }

    /// Removes a range that was inserted.
    pub(crate) fn remove(&self, extent: Extent) {
        if extent.len > 0 {
            let end = self.ranges.borrow_mut().remove(&extent.offset);
            debug_assert_eq!(end, Some(extent.end()), "a guard owns its range");
            self.bytes.set(self.bytes.get() - extent.len);
        }
    }

    /// Returns whether no range is locked.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.borrow().is_empty()
    }

    /// Returns the end of the last range; 0 if there is none.
    pub(crate) fn end(&self) -> u64 {
        // The last range ends last.
        self.ranges.borrow().last_key_value().map_or(0, |(_, &end)| end)
    }

    /// Returns the bytes of all ranges.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}
