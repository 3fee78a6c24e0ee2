//! Counters and gauges.

use std::time::Duration;

/// Counters and gauges of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Payload capacity in bytes.
    pub capacity: u64,
    /// Bytes in use, which cannot be written now.
    pub used: u64,
    /// Dirty bytes of the volume, including superseded entries.
    pub dirty_bytes: u64,
    /// Dirty entries.
    pub dirty_entries: u64,
    /// Age of the oldest dirty entry.
    pub dirty_age: Duration,
    /// Entries found when the log was opened.
    pub replayed: u64,
    /// Entries appended.
    pub appended: u64,
    /// Bytes of the volume covered by these.
    pub appended_bytes: u64,
    /// Groups appended.
    pub groups: u64,
    /// Writes that bypassed the log.
    pub direct: u64,
    /// Bytes of these.
    pub direct_bytes: u64,
    /// Write-back requests to the backend.
    pub written_back: u64,
    /// Bytes of these.
    pub written_back_bytes: u64,
    /// Entries that were never written back, because later ones superseded them.
    pub overwritten: u64,
    /// Write-back failures that were retried.
    pub backend_errors: u64,
    /// Bytes read from the log.
    pub hit_bytes: u64,
    /// Bytes read from the backend.
    pub miss_bytes: u64,
    /// Writes throttled because the log was getting full.
    pub throttled: u64,
    /// Total time of these delays, in nanoseconds.
    pub throttled_ns: u64,
    /// Barriers that began a new generation.
    pub generations: u64,
    /// Memory of entries and index, in bytes.
    pub index_memory: u64,
}

/// Counters of a log; they only grow.
#[derive(Debug)]
pub(crate) struct LogCounters(LogStats);

impl LogCounters {
    pub(crate) fn new(replayed: u64) -> Self {
        Self(LogStats { replayed, ..LogStats::default() })
    }

    /// Returns the counters, without gauges.
    pub(crate) fn get(&self) -> LogStats {
        self.0
    }

    /// Counts an entry appended, of `bytes` bytes of the volume.
    pub(crate) fn appended(&mut self, bytes: u64) {
        self.0.appended += 1;
        self.0.appended_bytes += bytes;
    }

    /// Counts a group appended.
    pub(crate) fn group(&mut self) {
        self.0.groups += 1;
    }

    /// Counts a generation begun by a barrier.
    pub(crate) fn generation(&mut self) {
        self.0.generations += 1;
    }

    /// Counts a write of `bytes` bytes that bypasses the log.
    pub(crate) fn bypassed(&mut self, bytes: u64) {
        self.0.direct += 1;
        self.0.direct_bytes += bytes;
    }

    /// Counts a write-back request of `bytes` bytes.
    pub(crate) fn written_back(&mut self, bytes: u64) {
        self.0.written_back += 1;
        self.0.written_back_bytes += bytes;
    }

    /// Counts entries that were never written back.
    pub(crate) fn overwritten(&mut self, entries: u64) {
        self.0.overwritten += entries;
    }

    /// Counts a write-back failure.
    pub(crate) fn backend_error(&mut self) {
        self.0.backend_errors += 1;
    }

    /// Counts the bytes of a read, from the log and from the backend.
    pub(crate) fn read(&mut self, hit: u64, miss: u64) {
        self.0.hit_bytes += hit;
        self.0.miss_bytes += miss;
    }

    /// Counts a throttled write.
    pub(crate) fn throttled(&mut self, time: Duration) {
        self.0.throttled += 1;
        self.0.throttled_ns += time.as_nanos() as u64;
    }
}
