//! Counters of requests with latency histograms, which one core writes and any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Sub-buckets per power of two.
const STEPS: u64 = 4;
/// Upper end of the first latency bucket, in nanoseconds.
const FIRST_NANOS: u64 = 256;
/// Powers of two from [`FIRST_NANOS`] on: the last bucket begins at about a minute.
const OCTAVES: usize = 28;
/// Number of buckets of a latency histogram.
const BUCKETS: usize = 1 + OCTAVES * STEPS as usize;

/// Counter with one writing core and any number of readers.
#[derive(Debug, Default)]
pub struct SingleWriterCounter(AtomicU64);

impl SingleWriterCounter {
    /// Adds without an atomic read-modify-write: there is only one writer.
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// Returns the current count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the index of the bucket of a latency.
fn bucket(nanos: u64) -> usize {
    if nanos < FIRST_NANOS {
        return 0;
    }
    let octave = nanos.ilog2() - FIRST_NANOS.ilog2();
    let step = (nanos >> (nanos.ilog2() - STEPS.ilog2())) & (STEPS - 1);
    (1 + octave as usize * STEPS as usize + step as usize).min(BUCKETS - 1)
}

/// Returns the latency in nanoseconds at which bucket `index` ends, exclusive.
fn bucket_end(index: usize) -> u64 {
    if index == 0 {
        return FIRST_NANOS;
    }
    let (octave, step) = ((index as u64 - 1) / STEPS, (index as u64 - 1) % STEPS);
    (FIRST_NANOS << octave) / STEPS * (STEPS + step + 1)
}

/// Latency histogram at one moment.  Each power of two is split into four buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS] }
    }
}

impl Histogram {
    fn of(counters: &[SingleWriterCounter]) -> Self {
        Self { counts: counters.iter().map(SingleWriterCounter::get).collect() }
    }

    /// Returns each non-empty bucket: the latency below which it ends, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let ends = (0..BUCKETS).map(|index| Duration::from_nanos(bucket_end(index)));
        ends.zip(self.counts.iter().copied()).filter(|&(_, count)| count > 0)
    }

    /// Returns the number of samples.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the number of samples not above `latency`, to the precision of the buckets.
    pub fn count_within(&self, latency: Duration) -> u64 {
        self.buckets().take_while(|&(end, _)| end <= latency).map(|(_, count)| count).sum()
    }

    /// Returns the quantile `q` (0 to 1), to the precision of the buckets; `None` when empty.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let rank = (q.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        self.buckets().find_map(|(end, count)| {
            seen += count;
            (seen >= rank).then_some(end)
        })
    }

    /// Adds the samples of another histogram.
    pub fn add(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }
}

/// Data that a completed request has moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MovedBytes {
    /// Bytes read.
    Read(u64),
    /// Bytes written.
    Written(u64),
    /// Request without data.
    None,
}

/// Counters of requests of `KINDS` kinds.  Written by one core only.
#[derive(Debug)]
pub struct ServedCounters<const KINDS: usize> {
    requests: [SingleWriterCounter; KINDS],
    errors: SingleWriterCounter,
    bytes_read: SingleWriterCounter,
    bytes_written: SingleWriterCounter,
    nanos: [SingleWriterCounter; KINDS],
    read_latency: Box<[SingleWriterCounter]>,
    write_latency: Box<[SingleWriterCounter]>,
}

impl<const KINDS: usize> Default for ServedCounters<KINDS> {
    fn default() -> Self {
        let histogram = || (0..BUCKETS).map(|_| SingleWriterCounter::default()).collect();
        let each = || std::array::from_fn(|_| SingleWriterCounter::default());
        Self {
            requests: each(),
            errors: SingleWriterCounter::default(),
            bytes_read: SingleWriterCounter::default(),
            bytes_written: SingleWriterCounter::default(),
            nanos: each(),
            read_latency: histogram(),
            write_latency: histogram(),
        }
    }
}

impl<const KINDS: usize> ServedCounters<KINDS> {
    /// Counts a request of the kind with number `kind` that was answered after `latency`.
    ///
    /// # Panics
    /// When `kind` is not below `KINDS`.
    pub fn answered(&self, kind: usize, moved: MovedBytes, latency: Duration, failed: bool) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.requests[kind].add(1);
        self.nanos[kind].add(nanos);
        match moved {
            _ if failed => self.errors.add(1),
            MovedBytes::Read(bytes) => {
                self.bytes_read.add(bytes);
                self.read_latency[bucket(nanos)].add(1);
            }
            MovedBytes::Written(bytes) => {
                self.bytes_written.add(bytes);
                self.write_latency[bucket(nanos)].add(1);
            }
            MovedBytes::None => {}
        }
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> ServedCounts<KINDS> {
        ServedCounts {
            requests: std::array::from_fn(|kind| self.requests[kind].get()),
            time: std::array::from_fn(|kind| Duration::from_nanos(self.nanos[kind].get())),
            errors: self.errors.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
            read_latency: Histogram::of(&self.read_latency),
            write_latency: Histogram::of(&self.write_latency),
        }
    }
}

/// Counts of requests at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedCounts<const KINDS: usize> {
    /// Answered requests, by the numbers of their kinds.
    pub requests: [u64; KINDS],
    /// Total time of requests, in the same order.
    pub time: [Duration; KINDS],
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Latency of reads, from the request's arrival to its answer.
    pub read_latency: Histogram,
    /// Latency of writes.
    pub write_latency: Histogram,
}

impl<const KINDS: usize> Default for ServedCounts<KINDS> {
    fn default() -> Self {
        Self {
            requests: [0; KINDS],
            time: [Duration::ZERO; KINDS],
            errors: 0,
            bytes_read: 0,
            bytes_written: 0,
            read_latency: Histogram::default(),
            write_latency: Histogram::default(),
        }
    }
}

impl<const KINDS: usize> ServedCounts<KINDS> {
    /// Returns the number of requests of one kind.
    pub fn requests_of(&self, kind: impl Into<usize>) -> u64 {
        self.requests[kind.into()]
    }

    /// Returns the number of requests of all kinds.
    pub fn requests_total(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Adds the counts of others.
    pub fn add(&mut self, other: &Self) {
        self.requests.iter_mut().zip(other.requests).for_each(|(sum, count)| *sum += count);
        self.time.iter_mut().zip(other.time).for_each(|(sum, time)| *sum += time);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.read_latency.add(&other.read_latency);
        self.write_latency.add(&other.write_latency);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_is_below_the_end_of_its_bucket_and_not_below_the_one_before() {
        let mut nanos = 1;
        while nanos < 30_000_000_000 {
            let index = bucket(nanos);
            assert!(nanos < bucket_end(index), "{nanos} in {index}");
            assert!(index == 0 || nanos >= bucket_end(index - 1), "{nanos} in {index}");
            nanos += nanos / 7 + 1;
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn failed_requests_move_no_bytes() {
        let counters = ServedCounters::<2>::default();
        counters.answered(0, MovedBytes::Read(7), Duration::from_micros(1), false);
        counters.answered(0, MovedBytes::Read(7), Duration::from_micros(1), true);
        counters.answered(1, MovedBytes::Written(9), Duration::from_micros(2), false);
        counters.answered(1, MovedBytes::None, Duration::from_micros(3), false);
        let mut counts = counters.snapshot();
        counts.add(&counters.snapshot());
        assert_eq!((counts.requests, counts.requests_total(), counts.errors), ([4, 4], 8, 2));
        assert_eq!((counts.bytes_read, counts.bytes_written), (14, 18));
        assert_eq!(counts.time, [Duration::from_micros(4), Duration::from_micros(10)]);
        assert_eq!((counts.read_latency.count(), counts.write_latency.count()), (2, 2));
    }
}
