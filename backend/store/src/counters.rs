//! Counters of a store that its anchors record, and statistics.

use std::cell::Cell;

use crate::format::anchor::Anchor;

/// Counters of a store.
///
/// # Invariants
/// 1. Object numbers, snapshot numbers and versions never decrease, so that none is assigned twice.
/// 2. `objects` is the number of objects with a head.
pub struct StoreCounters {
    next_oid: Cell<u64>,
    snap_seq: Cell<u64>,
    /// Newest object version assigned. Versions of one name never repeat.
    version: Cell<u64>,
    objects: Cell<u64>,
    user_bytes: Cell<u64>,
    /// Bytes written to the device before the store was opened.
    device_bytes_before: u64,
    page_loads: Cell<u64>,
}

impl StoreCounters {
    /// Returns the counters as of a checkpoint.
    pub fn of(anchor: &Anchor) -> Self {
        Self {
            next_oid: Cell::new(anchor.next_oid.max(1)),
            snap_seq: Cell::new(anchor.snap_seq),
            version: Cell::new(anchor.version),
            objects: Cell::new(anchor.objects),
            user_bytes: Cell::new(anchor.user_bytes),
            device_bytes_before: anchor.device_bytes,
            page_loads: Cell::new(0),
        }
    }

    /// Returns the number of the next object.
    pub fn next_oid(&self) -> u64 {
        self.next_oid.get()
    }

    /// Records that an object number is in use.
    pub fn note_oid(&self, oid: u64) {
        self.next_oid.set(self.next_oid.get().max(oid + 1));
    }

    /// Returns the newest snapshot number.
    pub fn snap_seq(&self) -> u64 {
        self.snap_seq.get()
    }

    /// Records that a snapshot number is in use.
    pub fn note_snap(&self, snap: u64) {
        self.snap_seq.set(self.snap_seq.get().max(snap));
    }

    /// Returns the newest object version.
    pub fn version(&self) -> u64 {
        self.version.get()
    }

    /// Records that an object version is in use.
    pub fn note_version(&self, version: u64) {
        self.version.set(self.version.get().max(version));
    }

    /// Returns the number of objects with a head.
    pub fn objects(&self) -> u64 {
        self.objects.get()
    }

    /// Sets the number of objects with a head, after a recount.
    pub fn set_objects(&self, objects: u64) {
        self.objects.set(objects);
    }

    /// Counts an object that got a head.
    pub fn add_object(&self) {
        self.objects.set(self.objects.get() + 1);
    }

    /// Counts an object that lost its head.
    pub fn sub_object(&self) {
        debug_assert!(self.objects.get() > 0, "more objects were removed than there were");
        self.objects.set(self.objects.get() - 1);
    }

    /// Returns the bytes written by users since the store was created.
    pub fn user_bytes(&self) -> u64 {
        self.user_bytes.get()
    }

    /// Counts bytes written by users.
    pub fn add_user_bytes(&self, bytes: u64) {
        self.user_bytes.set(self.user_bytes.get() + bytes);
    }

    /// Returns the bytes written to the device since the store was created, of which `appended` since it was opened.
    pub fn device_bytes(&self, appended: u64) -> u64 {
        self.device_bytes_before + appended
    }

    /// Returns the number of map pages read since the store was opened.
    pub fn page_loads(&self) -> u64 {
        self.page_loads.get()
    }

    /// Counts a map page that is read.
    pub fn add_page_load(&self) {
        self.page_loads.set(self.page_loads.get() + 1);
    }
}
