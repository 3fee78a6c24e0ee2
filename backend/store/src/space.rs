//! Space accounting: capacity, the reserve watermark, and the limit of the file system.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};

use crate::format::BLOCK64;
use crate::host::{HostFileSystem, LogBytes};
use crate::segments::Segments;

/// Space of a store, in segments and in its file system.
///
/// # Invariants
/// 1. Free segments at or below the reserve watermark are for the cleaner and for checkpoints: writes that grow the store
///    wait for the cleaner, so that appending to the log never fails.
/// 2. Reserve watermark < throttle mark <= cleaning mark: the cleaner works before writes are delayed, and writes are
///    delayed before they wait.
/// 3. The segments that are not offered as capacity are more than the watermark, so that a full store can be cleaned.
pub struct SegmentSpace {
    segments: Rc<RefCell<Segments>>,
    /// File system that holds the store file; `None` unless the store is in a file.
    host: Option<Rc<HostFileSystem>>,
    /// Free segments wanted by waiting writers, in addition to the reserve watermark.
    wanted: Cell<u32>,
}

/// Returns how many of `segments` segments are not offered: for the cleaner when the store is full, and the watermark.
fn reserve_of(segments: u32) -> u32 {
    (segments / 10).max(14)
}

impl SegmentSpace {
    /// Returns the space of a store.
    pub fn new(segments: Rc<RefCell<Segments>>, host: Option<Rc<HostFileSystem>>) -> Self {
        let space = Self { segments, host, wanted: Cell::new(0) };
        debug_assert!(space.watermark() < space.throttle_mark() && space.throttle_mark() <= space.cleaning_mark());
        debug_assert!(space.watermark() < space.reserve());
        space
    }

    /// Returns the number of segments, without those that were added and wait for a checkpoint.
    fn segment_count(&self) -> u32 {
        self.segments.borrow().offered_count()
    }

    /// Returns the number of segments that are not offered: for the cleaner when the store is full, and the watermark.
    fn reserve(&self) -> u32 {
        reserve_of(self.segment_count())
    }

    /// Returns the reserve watermark, in free segments.
    fn watermark(&self) -> u32 {
        (self.segment_count() / 40).max(6)
    }

    /// Returns the bytes that can be stored in total.
    pub fn capacity(&self) -> u64 {
        self.capacity_of(self.segment_count())
    }

    /// Returns the bytes that could be stored in total with so many segments.
    pub fn capacity_of(&self, segments: u32) -> u64 {
        let segment_size = self.segments.borrow().geometry.segment_size;
        u64::from(segments.saturating_sub(reserve_of(segments))) * segment_size
    }

    /// Returns the bytes that can still be stored.
    pub fn available(&self) -> u64 {
        let used = self.segments.borrow().live_bytes();
        self.capacity().saturating_sub(used)
    }

    /// Returns the number of free segments.
    pub fn free_segments(&self) -> u32 {
        self.segments.borrow().free_count()
    }

    /// Returns the number of free segments below which the cleaner works.
    fn cleaning_mark(&self) -> u32 {
        self.watermark() + (self.segment_count() / 24).max(2)
    }

    /// Returns the number of free segments below which writers are throttled: half of the cleaner's working range.
    pub fn throttle_mark(&self) -> u32 {
        (self.watermark() + self.cleaning_mark()) / 2
    }

    /// Returns the number of free segments that a transaction must leave.  Writes of user data need more reserve than
    /// transactions that only free space.
    pub fn floor(&self, grows: bool, gc_stalled: bool) -> u32 {
        match (grows, gc_stalled) {
            (true, _) => self.watermark(),
            (false, false) => self.watermark() / 2,
            // The cleaner has used its reserve; only freeing space helps now, which itself needs very little.
            (false, true) => 1,
        }
    }

    /// Returns the number of whole segments that `bytes` bytes occupy, including headers, rounded down; the watermark
    /// has space to spare for less than one.
    pub fn segments_for(&self, bytes: u64) -> u32 {
        let blocks = self.segments.borrow().geometry.segment_blocks();
        (bytes / ((blocks - blocks / 64 - 2) * BLOCK64)) as u32
    }

    /// Returns whether there are so few free segments that the cleaner should work.
    pub fn wants_cleaning(&self) -> bool {
        self.free_segments() < self.cleaning_mark() + self.wanted.get()
    }

    /// Makes the cleaner work until a transaction that needs `segments` segments can proceed.
    pub fn request(&self, segments: u32) {
        self.wanted.set(self.wanted.get().max(segments));
    }

    /// Withdraws all requests, and returns whether `free` segments are too few for them.
    pub fn is_scarce_for_requests(&self, free: u32) -> bool {
        free <= self.watermark() + self.wanted.replace(0)
    }

    /// Returns the file system that holds the store file.
    pub fn host(&self) -> Option<&Rc<HostFileSystem>> {
        self.host.as_ref()
    }

    /// Returns the bytes by which the store may grow in its file system, given a request for `wanted` bytes; `u64::MAX`
    /// if there is no such limit.
    pub fn host_space(&self, log: LogBytes, wanted: u64) -> u64 {
        let Some(host) = &self.host else { return u64::MAX };
        let in_use = || {
            let segments = self.segments.borrow();
            u64::from(segments.offered_count() - segments.free_count()) * segments.geometry.segment_size
        };
        host.allowed_bytes(log, in_use, wanted)
    }

    /// Returns whether the file system has space for growth of the store by `bytes` (at least 1).
    pub fn host_allows(&self, log: LogBytes, bytes: u64) -> bool {
        let bytes = bytes.max(1);
        self.host_space(log, bytes) >= bytes
    }

    /// Returns an error if the file system has no space for growth of the store by `bytes`.
    pub fn check_host(&self, log: LogBytes, bytes: u64) -> Result<()> {
        match &self.host {
            Some(host) if !self.host_allows(log, bytes) => Err(host.full()),
            _ => Ok(()),
        }
    }

    /// Returns the error reported when the store is full.
    pub fn full(&self) -> Error {
        let text =
            format!("the store is full: {} of {} bytes used", self.capacity() - self.available(), self.capacity());
        Error::new(ErrorKind::NoSpace, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::{LiveTable, SegmentGeometry};

    #[test]
    fn the_marks_are_in_order_for_stores_of_every_size() {
        for segment_count in (24..2000).chain([1 << 14, 1 << 20]) {
            let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count };
            let segments = Segments::new(geometry, LiveTable::new(segment_count));
            let space = SegmentSpace::new(Rc::new(RefCell::new(segments)), None);
            assert!(space.floor(true, false) < space.throttle_mark(), "{segment_count} segments");
            assert!(space.throttle_mark() <= space.cleaning_mark(), "{segment_count} segments");
            assert!(space.floor(false, true) < space.floor(false, false), "{segment_count} segments");
        }
    }

    #[test]
    fn a_request_makes_the_cleaner_work_until_it_is_withdrawn() {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: 24 };
        let segments = Segments::new(geometry, LiveTable::new(geometry.segment_count));
        let space = SegmentSpace::new(Rc::new(RefCell::new(segments)), None);
        assert!(!space.wants_cleaning());
        space.request(20);
        space.request(3);
        assert!(space.wants_cleaning());
        assert!(space.is_scarce_for_requests(26) && !space.is_scarce_for_requests(26));
        assert!(!space.wants_cleaning());
    }
}
