//! Own blocks: parts of an image's head, cached while only this process changes them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::rc::Rc;

use forebay_block::{Extent, HeadGeneration, HeadRead, LocalFuture, Result, SnapshotFetch, SnapshotRead, SparseData};

use crate::cache::{CacheShared, parts_of};
use crate::part::SnapshotSource;

/// Generation of the own blocks of an image.
///
/// Invariants:
/// 1. Its source equals no other one, so that nothing of another generation is ever found.
/// 2. While a change of a part is in flight, the part is neither cached nor being read for the cache: it is removed
///    before the change is submitted, and reads bypass the cache until the change has ended.
pub(crate) struct OwnBlocks {
    cache: Rc<CacheShared>,
    source: SnapshotSource,
    /// Parts that are being changed, by object; those of one object in no order.
    changes: RefCell<BTreeMap<u64, Vec<RangeInclusive<u32>>>>,
}

impl OwnBlocks {
    pub(crate) fn new(cache: Rc<CacheShared>, image: &str) -> Self {
        Self { cache, source: SnapshotSource::generation(image), changes: RefCell::default() }
    }

    /// Returns whether a change of one of these parts is in flight.
    fn is_changing(&self, object: u64, parts: &RangeInclusive<u32>) -> bool {
        let changes = self.changes.borrow();
        let overlaps = |other: &RangeInclusive<u32>| other.start() <= parts.end() && parts.start() <= other.end();
        changes.get(&object).is_some_and(|changing| changing.iter().any(overlaps))
    }
}

impl HeadGeneration for OwnBlocks {
    fn read(&self, read: HeadRead, fetch: SnapshotFetch) -> LocalFuture<Result<SparseData>> {
        let HeadRead { object, object_size, extent } = read;
        if extent.len > 0 && extent.end() <= object_size && self.is_changing(object, &parts_of(extent)) {
            self.cache.counters.own.bypassed.add(1);
            return fetch(extent);
        }
        let snapshot = (*self.source.0).clone();
        // An absent object is created by the next write to it, so its absence is not remembered.
        let read = SnapshotRead { snapshot, object, object_size, extent, inherits: true };
        self.cache.read(&self.source, read, fetch)
    }

    fn begin_change(&self, object: u64, extent: Extent) {
        if extent.len > 0 {
            let parts = parts_of(extent);
            self.changes.borrow_mut().entry(object).or_default().push(parts.clone());
            self.cache.invalidate(&self.source, object, parts);
        }
    }

    fn end_change(&self, object: u64, extent: Extent) {
        let mut changes = self.changes.borrow_mut();
        let Some(changing) = changes.get_mut(&object).filter(|_| extent.len > 0) else { return };
        let parts = parts_of(extent);
        if let Some(at) = changing.iter().position(|other| *other == parts) {
            changing.swap_remove(at);
        }
        if changing.is_empty() {
            changes.remove(&object);
        }
    }
}
