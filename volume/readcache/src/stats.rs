//! ReadCacheCounters and gauges of the cache.

use std::cell::Cell;
use std::path::PathBuf;

use crate::part::SnapshotSource;

/// State of the layer on disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DiskState {
    /// None is configured.
    #[default]
    None,
    /// In use.
    On,
    /// Turned off, for this reason; reads go on from memory and the backend.
    Off(String),
}

/// Counters of the reads of one kind of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SourceStats {
    /// Parts read from memory.
    pub hits_memory: u64,
    /// Parts read from disk.
    pub hits_disk: u64,
    /// Zero parts and absent objects that needed no data.
    pub hits_zero: u64,
    /// Parts that another request was reading from the backend already.
    pub hits_joined: u64,
    /// Parts read from the backend.
    pub misses: u64,
    /// Reads from the backend.
    pub fetches: u64,
    /// Bytes requested from the backend.
    pub fetched_bytes: u64,
    /// Bytes returned.
    pub read_bytes: u64,
    /// Reads that bypass the cache: of images whose objects are too small, and of own blocks that are being changed.
    pub bypassed: u64,
}

impl SourceStats {
    /// Returns the number of parts that were not read from the backend.
    pub fn hits(&self) -> u64 {
        self.hits_memory + self.hits_disk + self.hits_zero + self.hits_joined
    }
}

/// ReadCacheCounters since the start, and gauges.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReadCacheStats {
    /// Maximum bytes of parts in memory.
    pub memory_capacity: u64,
    /// Bytes of parts in memory.
    pub memory_bytes: u64,
    /// Zero parts and absent objects that are remembered.
    pub flags: u64,
    /// State of the layer on disk.
    pub disk: DiskState,
    /// File or device of the layer on disk.
    pub path: Option<PathBuf>,
    /// Maximum bytes of parts on disk.
    pub disk_capacity: u64,
    /// Bytes of parts on disk.
    pub disk_bytes: u64,
    /// Bytes of parts that wait to be written to disk.
    pub queued_bytes: u64,
    /// Reads of snapshot parents by clones.
    pub parents: SourceStats,
    /// Reads of own blocks.
    pub own: SourceStats,
    /// Parts of own blocks that were removed because they were about to change.
    pub invalidated: u64,
    /// Reads from the backend that failed.
    pub fetch_errors: u64,
    /// Parts evicted from memory.
    pub evicted_memory: u64,
    /// Parts evicted from disk.
    pub evicted_disk: u64,
    /// Parts written to disk.
    pub written: u64,
    /// Parts not written to disk, because writing was behind.
    pub dropped: u64,
    /// Reads and writes of the disk that failed.
    pub disk_errors: u64,
    /// Parts read from disk with a wrong checksum, though they had been right.
    pub checksum_errors: u64,
    /// Parts read from disk that were not what the table said since before the last start.
    pub stale: u64,
}

/// CoreCounter of one core.
#[derive(Debug, Default)]
pub(crate) struct CoreCounter(Cell<u64>);

impl CoreCounter {
    pub(crate) fn add(&self, count: u64) {
        self.0.set(self.0.get() + count);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Counters of the reads of one kind of data.
#[derive(Debug, Default)]
pub(crate) struct SourceCounters {
    pub(crate) hits_memory: CoreCounter,
    pub(crate) hits_disk: CoreCounter,
    pub(crate) hits_zero: CoreCounter,
    pub(crate) hits_joined: CoreCounter,
    pub(crate) misses: CoreCounter,
    pub(crate) fetches: CoreCounter,
    pub(crate) fetched_bytes: CoreCounter,
    pub(crate) read_bytes: CoreCounter,
    pub(crate) bypassed: CoreCounter,
}

impl SourceCounters {
    pub(crate) fn stats(&self) -> SourceStats {
        SourceStats {
            hits_memory: self.hits_memory.get(),
            hits_disk: self.hits_disk.get(),
            hits_zero: self.hits_zero.get(),
            hits_joined: self.hits_joined.get(),
            misses: self.misses.get(),
            fetches: self.fetches.get(),
            fetched_bytes: self.fetched_bytes.get(),
            read_bytes: self.read_bytes.get(),
            bypassed: self.bypassed.get(),
        }
    }
}

/// ReadCacheCounters of the cache, other than those of the disk.
#[derive(Debug, Default)]
pub(crate) struct ReadCacheCounters {
    pub(crate) parents: SourceCounters,
    pub(crate) own: SourceCounters,
    pub(crate) invalidated: CoreCounter,
    pub(crate) fetch_errors: CoreCounter,
    pub(crate) evicted_memory: CoreCounter,
}

impl ReadCacheCounters {
    /// Returns the counters for reads of a source.
    pub(crate) fn of(&self, source: &SnapshotSource) -> &SourceCounters {
        if source.is_own() { &self.own } else { &self.parents }
    }
}

/// ReadCacheCounters of the disk; they survive a file that is opened again.
#[derive(Debug, Default)]
pub(crate) struct CacheDiskCounters {
    pub(crate) evicted: CoreCounter,
    pub(crate) written: CoreCounter,
    pub(crate) dropped: CoreCounter,
    pub(crate) errors: CoreCounter,
    pub(crate) checksum_errors: CoreCounter,
    pub(crate) stale: CoreCounter,
}
