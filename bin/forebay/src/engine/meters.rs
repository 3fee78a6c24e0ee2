//! Request meters: counts and latencies by volume, and by front and pool.
//!
//! The reactor of the volumes updates them, any thread reads them: a scrape takes no reactor time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_block::Request;

use crate::api::Front;
use crate::spec::ImageSpec;

/// Kind of a request; each has counters of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
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

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Kind; 5] = [Kind::Read, Kind::Write, Kind::Discard, Kind::WriteZeroes, Kind::Flush];

    /// Returns its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Discard => "discard",
            Kind::WriteZeroes => "write_zeroes",
            Kind::Flush => "flush",
        }
    }

    /// Returns the kind of a request.
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Read(_) => Kind::Read,
            Request::Write { .. } | Request::CompareAndWrite { .. } => Kind::Write,
            Request::Discard(_) => Kind::Discard,
            Request::WriteZeroes { .. } => Kind::WriteZeroes,
            Request::Flush => Kind::Flush,
        }
    }
}

/// Number of latency buckets with an upper bound, powers of two from 16 us to 8.4 s; one more is unbounded.
pub const LATENCY_BUCKETS: usize = 20;

/// Returns the upper bound of a latency bucket in microseconds.
pub fn bucket_end_us(bucket: usize) -> u64 {
    16 << bucket
}

fn bucket_of(took: Duration) -> usize {
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
pub struct Requests {
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

impl Requests {
    fn add(&self, bytes: u64, nanos: u64, bucket: usize, failed: bool) {
        self.count.add(1);
        self.errors.add(u64::from(failed));
        self.bytes.add(bytes);
        self.nanos.add(nanos);
        self.latency[bucket].add(1);
    }
}

/// Requests by kind, in the order of [`Kind::ALL`].
pub type RequestsByKind = [Requests; Kind::ALL.len()];

/// Meter for requests to a volume through a front.
#[derive(Debug, Clone)]
pub struct Meter {
    volume: Arc<RequestsByKind>,
    path: Arc<RequestsByKind>,
}

impl Meter {
    /// Counts a completed request.
    pub fn count(&self, kind: Kind, bytes: u64, took: Duration, failed: bool) {
        let (nanos, bucket) = (u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), bucket_of(took));
        for counts in [&self.volume, &self.path] {
            counts[kind as usize].add(bytes, nanos, bucket, failed);
        }
    }
}

/// Front and pool of a counter; no front means `forebay bench` in the daemon itself.
pub type Path = (Option<Front>, String);

/// Counters of all requests served since startup.
#[derive(Debug, Default)]
pub struct Meters {
    volumes: Mutex<BTreeMap<ImageSpec, Arc<RequestsByKind>>>,
    paths: Mutex<BTreeMap<Path, Arc<RequestsByKind>>>,
}

impl Meters {
    /// Returns the meter of a volume behind a front.  Its counters outlive the export, so that they are monotonic.
    pub fn meter(&self, spec: &ImageSpec, front: Option<Front>) -> Meter {
        let volume = lock(&self.volumes).entry(spec.clone()).or_default().clone();
        let path = lock(&self.paths).entry((front, spec.pool.clone())).or_default().clone();
        Meter { volume, path }
    }

    /// Forgets a volume whose image was removed.
    pub fn forget(&self, spec: &ImageSpec) {
        lock(&self.volumes).remove(spec);
    }

    /// Returns the counters by volume.
    pub fn volumes(&self) -> Vec<(ImageSpec, Arc<RequestsByKind>)> {
        lock(&self.volumes).iter().map(|(spec, counts)| (spec.clone(), counts.clone())).collect()
    }

    /// Returns the counters by front and pool.
    pub fn paths(&self) -> Vec<(Path, Arc<RequestsByKind>)> {
        lock(&self.paths).iter().map(|(path, counts)| (path.clone(), counts.clone())).collect()
    }
}

/// Locks a map, ignoring poison: the maps are consistent between any two operations.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_for_its_volume_and_for_its_front_and_pool() {
        let meters = Meters::default();
        let spec = |image: &str| ImageSpec { pool: "local".into(), image: image.into() };
        for (image, front, times) in [("a", Front::Nbd, 2), ("b", Front::Nbd, 3), ("a", Front::Nvme, 4)] {
            let meter = meters.meter(&spec(image), Some(front));
            (0..times).for_each(|_| meter.count(Kind::Write, 512, Duration::from_micros(17), false));
        }
        let writes = |counts: &RequestsByKind| counts[Kind::Write as usize].count.get();
        let volumes: Vec<_> =
            meters.volumes().iter().map(|(spec, counts)| (spec.image.clone(), writes(counts))).collect();
        assert_eq!(volumes, [("a".into(), 6), ("b".into(), 3)]);
        let paths: Vec<_> = meters.paths().iter().map(|((front, _), counts)| (*front, writes(counts))).collect();
        assert_eq!(paths, [(Some(Front::Nbd), 5), (Some(Front::Nvme), 4)]);
        let (_, counts) = &meters.paths()[0];
        assert_eq!(
            (counts[Kind::Write as usize].latency[1].get(), counts[Kind::Write as usize].bytes.get()),
            (5, 2560)
        );
        meters.forget(&spec("a"));
        assert_eq!(meters.volumes().len(), 1);
    }

    #[test]
    fn buckets_end_at_powers_of_two() {
        let of = |us| bucket_of(Duration::from_micros(us));
        assert_eq!([of(0), of(16), of(17), of(32), of(33), of(64), of(65)], [0, 0, 1, 1, 2, 2, 3]);
        assert_eq!([of(8_388_608), of(8_388_609), of(u64::MAX)], [19, 20, 20]);
    }
}
