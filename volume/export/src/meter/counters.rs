//! Counters of requests, and a histogram of their latencies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_block::BlockRequest;

/// Kind of a request; each has counters of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// Read of a range.
    Read,
    /// Write of a range, or compare-and-write.
    Write,
    /// Discard of a range.
    Discard,
    /// Write of zeroes to a range.
    WriteZeroes,
    /// Flush of the volume.
    Flush,
}

impl RequestKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [RequestKind; 5] =
        [RequestKind::Read, RequestKind::Write, RequestKind::Discard, RequestKind::WriteZeroes, RequestKind::Flush];

    /// Returns its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            RequestKind::Read => "read",
            RequestKind::Write => "write",
            RequestKind::Discard => "discard",
            RequestKind::WriteZeroes => "write_zeroes",
            RequestKind::Flush => "flush",
        }
    }

    /// Returns the kind of a request.
    pub fn of(request: &BlockRequest) -> Self {
        match request {
            BlockRequest::Read(_) => RequestKind::Read,
            BlockRequest::Write { .. } | BlockRequest::CompareAndWrite { .. } => RequestKind::Write,
            BlockRequest::Discard(_) => RequestKind::Discard,
            BlockRequest::WriteZeroes { .. } => RequestKind::WriteZeroes,
            BlockRequest::Flush => RequestKind::Flush,
        }
    }
}

/// Number of latency buckets with an upper bound, powers of two from 16 us to 8.4 s; one more is unbounded.
pub const LATENCY_BUCKETS: usize = 20;

/// Returns the upper bound of a latency bucket in microseconds.
pub fn bucket_end_us(bucket: usize) -> u64 {
    16 << bucket
}

/// Returns the bucket that counts a latency.
pub(super) fn bucket_of(took: Duration) -> usize {
    let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
    // Smaller powers of two, for a time rounded up.
    let bucket = u64::BITS - (us.saturating_sub(1) / bucket_end_us(0)).leading_zeros();
    (bucket as usize).min(LATENCY_BUCKETS)
}

/// Counter that one thread updates and any thread reads.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds to the value: cheaper than an atomic addition, since only one thread writes.
    fn add(&self, more: u64) {
        self.0.store(self.get().wrapping_add(more), Ordering::Relaxed);
    }
}

/// Counters of one kind of request.
#[derive(Debug, Default)]
pub struct RequestCounters {
    /// Completed requests.
    pub count: Counter,
    /// Failed requests, included in `count`.
    pub errors: Counter,
    /// Bytes transferred, discarded or zeroed.
    pub bytes: Counter,
    /// Total latency in nanoseconds.
    pub nanos: Counter,
    /// Latency histogram; the last bucket counts latencies above every bound.
    pub latency: [Counter; LATENCY_BUCKETS + 1],
}

impl RequestCounters {
    /// Counts a completed request.
    pub(super) fn add(&self, bytes: u64, nanos: u64, bucket: usize, failed: bool) {
        self.count.add(1);
        self.errors.add(u64::from(failed));
        self.bytes.add(bytes);
        self.nanos.add(nanos);
        self.latency[bucket].add(1);
    }
}

/// Counters of each kind of request, in the order of [`RequestKind::ALL`].
pub type CountersByKind = [RequestCounters; RequestKind::ALL.len()];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_end_at_powers_of_two() {
        let of = |us| bucket_of(Duration::from_micros(us));
        assert_eq!([of(0), of(16), of(17), of(32), of(33), of(64), of(65)], [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!([of(8_388_608), of(8_388_609), of(u64::MAX)], [19, 20, 20]);
    }
}
