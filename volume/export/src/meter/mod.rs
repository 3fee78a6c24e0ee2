//! Request meters: counts and latencies by volume, and by the path through which requests arrive.
//!
//! | invariant | |
//! |---|---|
//! | M1 | one thread updates a counter, the one whose reactor has the volumes; any thread reads it, so that a scrape takes no reactor time |
//! | M2 | the counters of a volume outlive its exports, so that they are monotonic until the image is removed |
//! | M3 | a request is counted once, for its volume and for its path, when it completes; a dropped one is not counted |

mod counters;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::{BlockReply, BlockRequest, LocalFuture, Result};
use forebay_reactor::{Instant, now};

use counters::bucket_of;
pub use counters::{Counter, CountersByKind, LATENCY_BUCKETS, RequestCounters, RequestKind, bucket_end_us};

/// Meter for requests to a volume through one path.
#[derive(Debug, Clone)]
pub struct Meter {
    volume: Arc<CountersByKind>,
    path: Arc<CountersByKind>,
}

impl Meter {
    /// Returns the counters of the volume, through all paths.
    pub fn volume(&self) -> &Arc<CountersByKind> {
        &self.volume
    }

    /// Counts a completed request.
    pub fn count(&self, kind: RequestKind, bytes: u64, took: Duration, failed: bool) {
        let (nanos, bucket) = (u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), bucket_of(took));
        for counts in [&self.volume, &self.path] {
            counts[kind as usize].add(bytes, nanos, bucket, failed);
        }
    }

    /// Submits a request, and counts it when it completes.  Its latency includes that of `submit`.
    pub fn measure(
        self: &Rc<Self>,
        request: BlockRequest,
        submit: impl FnOnce(BlockRequest) -> LocalFuture<Result<BlockReply>>,
    ) -> MeasuredRequest {
        let kind = RequestKind::of(&request);
        let bytes = request.extent().map_or(0, |extent| extent.len);
        let started = now();
        MeasuredRequest { work: submit(request), meter: self.clone(), kind, bytes, started }
    }
}

/// Request that is counted when it completes; see [`Meter::measure`].
pub struct MeasuredRequest {
    work: LocalFuture<Result<BlockReply>>,
    meter: Rc<Meter>,
    kind: RequestKind,
    bytes: u64,
    started: Instant,
}

impl Future for MeasuredRequest {
    type Output = Result<BlockReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = self.work.as_mut().poll(cx) else { return Poll::Pending };
        self.meter.count(self.kind, self.bytes, self.started.elapsed(), result.is_err());
        Poll::Ready(result)
    }
}

/// Counters of all requests served since startup, by volume `V` and by path `P`.
#[derive(Debug)]
pub struct Meters<V, P> {
    volumes: Mutex<BTreeMap<V, Arc<CountersByKind>>>,
    paths: Mutex<BTreeMap<P, Arc<CountersByKind>>>,
}

impl<V, P> Default for Meters<V, P> {
    fn default() -> Self {
        Self { volumes: Mutex::default(), paths: Mutex::default() }
    }
}

impl<V: Ord + Clone, P: Ord + Clone> Meters<V, P> {
    /// Returns the meter of a volume behind a path.
    pub fn meter(&self, volume: &V, path: &P) -> Meter {
        let volume = lock(&self.volumes).entry(volume.clone()).or_default().clone();
        let path = lock(&self.paths).entry(path.clone()).or_default().clone();
        Meter { volume, path }
    }

    /// Forgets a volume whose image was removed.
    pub fn forget(&self, volume: &V) {
        lock(&self.volumes).remove(volume);
    }

    /// Returns the counters by volume.
    pub fn volumes(&self) -> Vec<(V, Arc<CountersByKind>)> {
        lock(&self.volumes).iter().map(|(volume, counts)| (volume.clone(), counts.clone())).collect()
    }

    /// Returns the counters by path.
    pub fn paths(&self) -> Vec<(P, Arc<CountersByKind>)> {
        lock(&self.paths).iter().map(|(path, counts)| (path.clone(), counts.clone())).collect()
    }
}

/// Locks a map, ignoring poison: the maps are consistent between any two operations.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use forebay_block::{Error, ErrorKind, Extent};
    use forebay_reactor::{DriverChoice, Reactor};

    use super::*;

    #[test]
    fn a_request_counts_for_its_volume_and_for_its_path() {
        let meters = Meters::default();
        for (image, front, times) in [("a", "nbd", 2), ("b", "nbd", 3), ("a", "nvme", 4)] {
            let meter = meters.meter(&image, &front);
            (0..times).for_each(|_| meter.count(RequestKind::Write, 512, Duration::from_micros(17), false));
        }
        let writes = |counts: &CountersByKind| counts[RequestKind::Write as usize].count.get();
        let volumes: Vec<_> = meters.volumes().iter().map(|(image, counts)| (*image, writes(counts))).collect();
        assert_eq!(volumes, [("a", 6), ("b", 3)]);
        let paths: Vec<_> = meters.paths().iter().map(|(front, counts)| (*front, writes(counts))).collect();
        assert_eq!(paths, [("nbd", 5), ("nvme", 4)]);
        let (_, counts) = &meters.paths()[0];
        let writes = &counts[RequestKind::Write as usize];
        assert_eq!((writes.latency[1].get(), writes.bytes.get()), (5, 2560));
        meters.forget(&"a");
        assert_eq!(meters.volumes().len(), 1);
    }

    #[test]
    fn a_request_is_counted_when_it_completes() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let meters = Meters::default();
            let meter = Rc::new(meters.meter(&"a", &"nbd"));
            let read = || BlockRequest::Read(Extent::new(0, 4096));
            let failure = || Error::new(ErrorKind::Io, "a bad sector");
            let done = meter.measure(read(), |_| Box::pin(ready(Ok(BlockReply::Done))));
            let failed = meter.measure(read(), |_| Box::pin(ready(Err(failure()))));
            drop(meter.measure(read(), |_| Box::pin(pending())));
            let (_, counts) = &meters.volumes()[0];
            let reads = &counts[RequestKind::Read as usize];
            assert_eq!(reads.count.get(), 0);
            assert!(done.await.is_ok() && failed.await.is_err());
            assert_eq!((reads.count.get(), reads.errors.get(), reads.bytes.get()), (2, 1, 8192));
        });
    }
}
