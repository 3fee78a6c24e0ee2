//! Size bounds of a device while its size changes, and the requests that may be refused for it.

use std::collections::BTreeMap;

use forebay_block::{ErrorKind, Extent, Result};

/// The size lies between these, in bytes; and the device may be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounds {
    least: u64,
    most: u64,
    ended: bool,
}

/// Size of a device, now and while each open request was in flight.  Requests are named by their number.
#[derive(Debug)]
pub(super) struct Sizes {
    now: Bounds,
    open: BTreeMap<u64, Bounds>,
}

impl Sizes {
    /// Returns an oracle without an end to check against.
    pub(super) fn unbounded() -> Self {
        Self { now: Bounds { least: u64::MAX, most: u64::MAX, ended: false }, open: BTreeMap::new() }
    }

    /// From now on the size is between `least` and `most`.
    pub(super) fn set(&mut self, least: u64, most: u64) {
        self.now = Bounds { least, most, ended: self.now.ended };
        self.seen();
    }

    /// From now on requests may be answered with `NotFound`.
    pub(super) fn end(&mut self) {
        self.now.ended = true;
        self.seen();
    }

    fn seen(&mut self) {
        let now = self.now;
        for bounds in self.open.values_mut() {
            bounds.least = bounds.least.min(now.least);
            bounds.most = bounds.most.max(now.most);
            bounds.ended |= now.ended;
        }
    }

    /// A request is submitted.
    pub(super) fn open(&mut self, number: u64) {
        self.open.insert(number, self.now);
    }

    /// Forgets changes in flight.
    pub(super) fn forget(&mut self) {
        self.open.clear();
        self.now.ended = false;
    }

    /// A request is answered: `Ok(true)` when it was rightly refused for the size, so that it did nothing; an error
    /// when it was served although all of that time it reached past the end.
    pub(super) fn close<T>(
        &mut self,
        number: u64,
        extent: Option<Extent>,
        result: &Result<T>,
    ) -> std::result::Result<bool, String> {
        let Some(bounds) = self.open.remove(&number) else { return Ok(false) };
        let end = extent.map_or(0, Extent::end);
        match result.as_ref().err().map(forebay_block::Error::kind) {
            Some(ErrorKind::OutOfRange) => Ok(end > bounds.least),
            Some(ErrorKind::NotFound) => Ok(bounds.ended),
            None if end > bounds.most => {
                Err(format!("a request that ends at byte {end} was served, but the size was {} at most", bounds.most))
            }
            _ => Ok(false),
        }
    }
}
