//! Host file system of a store in a file: tracks the space left for a sparse file, and keeps a reserve for writing
//! removals when the file system is full.
//!
//! The reserve is space allocated beyond the end of the store.  It is released when the log runs out of space, and
//! allocated again when space is plentiful. In between, operations that would grow the store are rejected.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, Instant, now, spawn};

use crate::init::free_behind;

/// Bytes appended to the log after which free space is measured again while it is plentiful.
const MEASURE_BYTES: u64 = 4 << 20;
/// Delay after which free space is measured again while it is scarce.
const MEASURE_AFTER: Duration = Duration::from_millis(50);
/// Largest reserve, in bytes.
pub(crate) const RESERVE_MAX: u64 = 64 << 20;
/// Smallest reserve, in bytes.
const RESERVE_MIN: u64 = 8 << 20;

/// Free space measured in the file system, in bytes.
struct HostSpace {
    /// Available to this process.
    available: u64,
    /// Allocated to the store's file, without the reserve.
    allocated: u64,
}

/// Log byte counts since the store was opened.
pub struct LogBytes {
    /// Bytes appended.
    pub appended: u64,
    /// Bytes of these that are not yet written.
    pub pending: u64,
}

/// Host file system of a store in a file.
pub struct HostFileSystem {
    file: File,
    /// End of the store in its file; the reserve is allocated behind it.
    end: Cell<u64>,
    reserve: u64,
    /// Set if the file is fully allocated and keeps its blocks, so that the file system sets no limit.
    whole: Cell<bool>,
    /// Set once a write to a fully allocated file ran out of space: on a copy-on-write file system, preallocated blocks
    /// do not help.
    copied_on_write: Cell<bool>,
    /// Set while the reserve is allocated.
    holds_reserve: Cell<bool>,
    /// Set while the reserve is being allocated or released.
    busy: Cell<bool>,
    /// Signals the end of that operation.
    idle: Notify,
    /// Number of times the reserve was released.
    released: Cell<u64>,
    /// Bytes that the log could accept at the last measurement; unlimited if the file is not sparse.
    allowed: Cell<u64>,
    /// Bytes appended to the log, and the time, at that measurement.
    measured: Cell<(u64, Option<Instant>)>,
}

impl HostFileSystem {
    /// Returns the host of a store's file; `None` on a block device, or if the file system has no known space limit.
    pub fn new(file: &File, end: u64) -> Option<Rc<Self>> {
        if file.info().block_device || !matches!(file.file_system_space(), Ok(Some(_))) {
            return None;
        }
        Some(Rc::new(Self {
            file: file.clone(),
            end: Cell::new(end),
            reserve: (end / 16).clamp(RESERVE_MIN, RESERVE_MAX),
            whole: Cell::new(false),
            copied_on_write: Cell::new(false),
            holds_reserve: Cell::new(false),
            busy: Cell::new(false),
            idle: Notify::new(),
            released: Cell::new(0),
            allowed: Cell::new(u64::MAX),
            measured: Cell::default(),
        }))
    }

    /// Allocates the reserve, which may still exist from an earlier run, and determines whether the file is sparse.
    pub async fn start(&self) {
        self.allocate_reserve().await;
        self.whole.set(self.measure().is_some_and(|found| found.allocated >= self.end.get()));
    }

    /// Returns whether the file was fully allocated when the store was opened, and no write has run out of space since.
    /// In that case blocks are not returned to the file system.
    pub fn is_whole(&self) -> bool {
        self.whole.get()
    }

    /// Records that the store ends at `end` now, which the file has grown to; `allocated` if the added space is allocated.
    /// Space that was the reserve may be a part of it.
    pub async fn grow(&self, end: u64, allocated: bool) {
        self.idle.wait_until(|| !self.busy.get()).await;
        self.busy.set(true);
        self.end.set(end);
        self.whole.set(self.whole.get() && allocated);
        self.holds_reserve.set(false);
        self.allocate_reserve().await;
        self.measured.set(Default::default());
        self.busy.set(false);
        self.idle.notify_all();
    }

    async fn allocate_reserve(&self) {
        match self.file.allocate(self.end.get(), self.reserve).await {
            Ok(()) => self.holds_reserve.set(true),
            // The file system does not support it, or another process took the space. Removals may then run out of
            // space.
            Err(error) => {
                tracing::debug!(%error, "cannot allocate a reserve behind the store");
                // A partial reserve is useless.
                if let Err(error) = free_behind(&self.file, self.end.get(), self.reserve).await {
                    tracing::debug!(%error, "cannot free a partial reserve behind the store");
                }
            }
        }
    }

    /// Measures the space of the file system; `None` if it cannot be determined.
    fn measure(&self) -> Option<HostSpace> {
        let (Ok(Some(space)), Ok(Some(allocated))) = (self.file.file_system_space(), self.file.allocated_size()) else {
            return None;
        };
        let held = if self.holds_reserve.get() { self.reserve } else { 0 };
        Some(HostSpace { available: space.available, allocated: allocated.saturating_sub(held) })
    }

    /// Returns the bytes of log that may still be written for growth of the store. `in_use` returns the bytes of
    /// segments in use; `wanted` is the number of bytes requested, for which a smaller result must come from a new
    /// measurement.
    pub fn allowed_bytes(self: &Rc<Self>, log: LogBytes, in_use: impl FnOnce() -> u64, wanted: u64) -> u64 {
        if self.whole.get() {
            return u64::MAX;
        }
        let (at, when) = self.measured.get();
        let since = log.appended.saturating_sub(at);
        let left = self.allowed.get().saturating_sub(since);
        let due = match when {
            Some(when) => when.elapsed() >= MEASURE_AFTER && left < wanted || left > 0 && since >= MEASURE_BYTES,
            None => true,
        };
        if !due {
            return left;
        }
        self.update(in_use(), log.pending);
        self.measured.set((log.appended, Some(now())));
        self.allowed.get()
    }

    fn update(self: &Rc<Self>, in_use: u64, pending: u64) {
        let copied = self.copied_on_write.get();
        // If space cannot be determined, writes will find out.
        let Some(HostSpace { available, allocated }) =
            self.measure().filter(|found| copied || found.allocated < self.end.get())
        else {
            self.allowed.set(u64::MAX);
            return;
        };
        // Space still allocated to free segments is reused without new allocation.
        let spare = if copied { 0 } else { allocated.saturating_sub(in_use) };
        // Pending writes still need space, unless they go to such segments.
        let owed = if copied { pending } else { pending.min(in_use.saturating_sub(allocated)) };
        let found = (available + spare).saturating_sub(owed);
        // More than the reserve itself: batches have headers, and checkpoints continue.
        let kept = if self.holds_reserve.get() { self.reserve / 2 } else { self.reserve + self.reserve / 2 };
        self.allowed.set(found.saturating_sub(kept));
        if !self.holds_reserve.get() && !self.busy.get() && available >= 2 * self.reserve {
            self.start_allocation();
        }
    }

    fn start_allocation(self: &Rc<Self>) {
        self.busy.set(true);
        let host = self.clone();
        drop(spawn(async move {
            host.allocate_reserve().await;
            host.busy.set(false);
            host.idle.notify_all();
        }));
    }

    /// Returns how many times the reserve was released.
    pub fn times_released(&self) -> u64 {
        self.released.get()
    }

    /// Releases the reserve for a write that ran out of space. Also succeeds if the reserve was released after the
    /// write began, when [`times_released`](Self::times_released) was `before`. Returns false if there is no reserve.
    pub async fn release_reserve(&self, before: u64) -> bool {
        if self.whole.replace(false) {
            tracing::warn!(
                "no space for a write to {}, although the file is fully allocated: its file system is copy-on-write",
                self.file.path().display()
            );
            self.copied_on_write.set(true);
            // The last measurement is obsolete.
            self.measured.set(Default::default());
        }
        self.idle.wait_until(|| !self.busy.get()).await;
        if self.released.get() != before {
            return true;
        }
        if !self.holds_reserve.replace(false) {
            return false;
        }
        self.busy.set(true);
        tracing::warn!(
            "the file system of {} is full; the store uses its reserve and accepts only removals",
            self.file.path().display()
        );
        if let Err(error) = free_behind(&self.file, self.end.get(), self.reserve).await {
            tracing::warn!(%error, "cannot release the reserve of {}", self.file.path().display());
        }
        self.allowed.set(0);
        self.released.set(before + 1);
        self.busy.set(false);
        self.idle.notify_all();
        true
    }

    /// Returns the error reported when the store cannot grow.
    pub fn full(&self) -> Error {
        let path = self.file.path().display();
        let left = self.file.file_system_space().ok().flatten().map_or(0, |space| space.available);
        let text = format!(
            "the host's file system is full: {left} bytes are left where {path} lies, a sparse file that cannot grow"
        );
        Error::new(ErrorKind::NoSpace, text)
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::OpenOptions;
    use forebay_sim::{Faults, World};

    use super::*;

    /// Size of the store's file in bytes.
    const END: u64 = 16 << 20;

    /// Runs a test on a store's file of [`END`] bytes, sparse, in a file system of `capacity` bytes.
    fn on_a_file_system(capacity: u64, test: impl AsyncFnOnce(File)) {
        let world = World::new(1, Faults { files_capacity: Some(capacity), files_space_known: true, ..Faults::none() });
        let reactor = world.reactor();
        let run = async {
            let file = File::open("/store", OpenOptions::read_write().create()).expect("a file");
            file.set_size(END).expect("its length");
            test(file).await;
        };
        world.run(&reactor, run).expect("it ends");
    }

    #[test]
    fn an_allocated_file_whose_write_finds_no_space_is_limited_by_its_file_system() {
        const CAPACITY: u64 = 64 << 20;
        on_a_file_system(CAPACITY, async |file| {
            file.allocate(0, END).await.expect("space");
            let host = HostFileSystem::new(&file, END).expect("a file on a file system");
            host.start().await;
            let room = || host.allowed_bytes(LogBytes { appended: 0, pending: 0 }, || 0, u64::MAX);
            assert_eq!((host.is_whole(), room()), (true, u64::MAX));
            let filler = File::open("/filler", OpenOptions::read_write().create()).expect("a file");
            filler.allocate(0, CAPACITY - END - RESERVE_MIN).await.expect("space");
            // Behaves like a copy-on-write file system.
            assert!(host.release_reserve(0).await, "it has a reserve");
            assert_eq!((host.is_whole(), room()), (false, 0));
            filler.set_size(0).expect("freed");
            forebay_reactor::sleep(MEASURE_AFTER).await;
            let found = room();
            assert!((16 << 20..CAPACITY - END).contains(&found), "{found}");
        });
    }

    #[test]
    fn a_reserve_that_finds_space_for_a_part_gives_that_back() {
        const CAPACITY: u64 = 24 << 20;
        on_a_file_system(CAPACITY, async |file| {
            let host = HostFileSystem::new(&file, END).expect("a file on a file system");
            let filler = File::open("/filler", OpenOptions::read_write().create()).expect("a file");
            let taken = || file.allocated_size().expect("known");
            filler.allocate(0, CAPACITY - RESERVE_MIN / 2).await.expect("space");
            host.start().await;
            assert_eq!((host.holds_reserve.get(), taken()), (false, Some(0)));
            // There is enough space for a moment, until another user takes it.
            filler.set_size(0).expect("freed");
            host.allowed_bytes(LogBytes { appended: 0, pending: 0 }, || 0, 1);
            assert!(host.busy.get(), "it is taking its reserve");
            filler.allocate(0, CAPACITY - RESERVE_MIN / 2).await.expect("space");
            host.idle.wait_until(|| !host.busy.get()).await;
            assert_eq!((host.holds_reserve.get(), taken()), (false, Some(0)));
            filler.set_size(0).expect("freed");
            forebay_reactor::sleep(MEASURE_AFTER).await;
            host.allowed_bytes(LogBytes { appended: 0, pending: 0 }, || 0, u64::MAX);
            host.idle.wait_until(|| !host.busy.get()).await;
            assert_eq!((host.holds_reserve.get(), taken()), (true, Some(RESERVE_MIN)));
        });
    }
}
