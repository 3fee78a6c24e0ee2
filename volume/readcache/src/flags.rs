//! Zero parts and absent objects: what is known without any data.

use std::cell::RefCell;

use crate::disk::Disk;
use crate::part::PartKey;
use crate::s3fifo::S3Fifo;

/// Flags that are kept without a disk: about 6 MiB of memory.
const FLAGS_MIN: usize = 1 << 16;

/// Bounded set of flags, each with its row of the table on disk, if it has one.
pub(crate) struct ZeroFlags(RefCell<S3Fifo<PartKey, Option<u32>>>);

impl ZeroFlags {
    /// Creates a set for a table with `rows` rows for flags.
    pub(crate) fn new(rows: u32) -> Self {
        Self(RefCell::new(S3Fifo::new(FLAGS_MIN.max(rows as usize))))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Returns whether a flag is set, and counts the reference.
    pub(crate) fn is_set(&self, key: &PartKey, now_ms: u32) -> bool {
        self.0.borrow_mut().get(key, now_ms).is_some()
    }

    /// Sets a flag, also in the table of `disk` if there is a free row.
    pub(crate) fn set(&self, key: PartKey, disk: Option<&Disk>, now_ms: u32) {
        let mut flags = self.0.borrow_mut();
        if flags.peek(&key).is_some() {
            return;
        }
        // Evicted first, so that its row is free for this one.
        if flags.len() >= flags.capacity()
            && let (Some((_, Some(row))), Some(disk)) = (flags.evict(), disk)
        {
            disk.release_flag(row);
        }
        // Own blocks are of no use after a restart, so their flags take no rows.
        let row = disk.filter(|_| !key.source.is_own()).and_then(|disk| disk.set_flag(&key));
        flags.insert(key, row, now_ms);
    }

    /// Adds a flag of a table that was read; returns whether there was space.
    pub(crate) fn restore(&self, key: PartKey, row: u32, now_ms: u32) -> bool {
        self.0.borrow_mut().restore(key, Some(row), now_ms)
    }

    /// Returns the row of a flag.
    pub(crate) fn row(&self, key: &PartKey) -> Option<u32> {
        self.0.borrow().peek(key).copied().flatten()
    }

    /// Removes a flag, but not its row; returns whether it was set.
    pub(crate) fn remove(&self, key: &PartKey) -> bool {
        self.0.borrow_mut().remove(key).is_some()
    }

    pub(crate) fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}
