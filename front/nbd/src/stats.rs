//! What connections have done, readable from any thread.
//!
//! A connection counts into [`Counters`] of its own, which only its core writes; nobody waits for anybody.  The list
//! of connections is behind a lock that is taken when one comes, when one goes, and by who reads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::wire::command;

/// Kinds of requests that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RequestKind {
    /// `NBD_CMD_READ`.
    Read,
    /// `NBD_CMD_WRITE`.
    Write,
    /// `NBD_CMD_FLUSH`.
    Flush,
    /// `NBD_CMD_TRIM`.
    Trim,
    /// `NBD_CMD_WRITE_ZEROES`.
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`.
    BlockStatus,
    /// Whatever else.
    Other,
}

impl RequestKind {
    /// All of them, in the order of [`Snapshot::requests`].
    pub const ALL: [RequestKind; 7] = [
        RequestKind::Read,
        RequestKind::Write,
        RequestKind::Flush,
        RequestKind::Trim,
        RequestKind::WriteZeroes,
        RequestKind::BlockStatus,
        RequestKind::Other,
    ];

    /// Of a command's code.
    pub fn of(code: u16) -> Self {
        match code {
            command::READ => RequestKind::Read,
            command::WRITE => RequestKind::Write,
            command::FLUSH => RequestKind::Flush,
            command::TRIM => RequestKind::Trim,
            command::WRITE_ZEROES => RequestKind::WriteZeroes,
            command::BLOCK_STATUS => RequestKind::BlockStatus,
            _ => RequestKind::Other,
        }
    }

    /// A label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            RequestKind::Read => "read",
            RequestKind::Write => "write",
            RequestKind::Flush => "flush",
            RequestKind::Trim => "trim",
            RequestKind::WriteZeroes => "write_zeroes",
            RequestKind::BlockStatus => "block_status",
            RequestKind::Other => "other",
        }
    }
}

const KINDS: usize = RequestKind::ALL.len();
/// Sub-buckets a power of two.
const STEPS: u64 = 4;
/// Latencies below this many nanoseconds share the first bucket.
const FIRST_NANOS: u64 = 256;
/// Powers of two from [`FIRST_NANOS`] on: the last bucket begins at about a minute.
const OCTAVES: usize = 28;
/// Buckets of a latency histogram.
pub const BUCKETS: usize = 1 + OCTAVES * STEPS as usize;

/// A number that one core adds to and anybody reads.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    /// Adds, without the cost of an atomic addition: there is only one writer.
    fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Which bucket a latency belongs to.
fn bucket(nanos: u64) -> usize {
    if nanos < FIRST_NANOS {
        return 0;
    }
    let octave = nanos.ilog2() - FIRST_NANOS.ilog2();
    let step = (nanos >> (nanos.ilog2() - STEPS.ilog2())) & (STEPS - 1);
    (1 + octave as usize * STEPS as usize + step as usize).min(BUCKETS - 1)
}

/// The latency in nanoseconds below which bucket `index` ends.
fn bucket_end(index: usize) -> u64 {
    if index == 0 {
        return FIRST_NANOS;
    }
    let (octave, step) = ((index as u64 - 1) / STEPS, (index as u64 - 1) % STEPS);
    (FIRST_NANOS << octave) / STEPS * (STEPS + step + 1)
}

/// What one connection has done.  Written by its core only.
#[derive(Debug)]
pub struct Counters {
    requests: [Counter; KINDS],
    errors: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
    nanos: [Counter; KINDS],
    read_latency: Box<[Counter]>,
    write_latency: Box<[Counter]>,
}

impl Default for Counters {
    fn default() -> Self {
        let histogram = || (0..BUCKETS).map(|_| Counter::default()).collect();
        Self {
            requests: Default::default(),
            errors: Counter::default(),
            bytes_read: Counter::default(),
            bytes_written: Counter::default(),
            nanos: Default::default(),
            read_latency: histogram(),
            write_latency: histogram(),
        }
    }
}

impl Counters {
    /// A request of `kind` was answered after `latency`; `bytes` were read or written by it.
    pub(crate) fn answered(&self, kind: RequestKind, bytes: u64, latency: Duration, failed: bool) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.requests[kind as usize].add(1);
        self.nanos[kind as usize].add(nanos);
        match kind {
            _ if failed => self.errors.add(1),
            RequestKind::Read => {
                self.bytes_read.add(bytes);
                self.read_latency[bucket(nanos)].add(1);
            }
            RequestKind::Write => {
                self.bytes_written.add(bytes);
                self.write_latency[bucket(nanos)].add(1);
            }
            _ => {}
        }
    }

    /// What has been counted so far.
    pub fn snapshot(&self) -> Snapshot {
        let histogram = |counters: &[Counter]| Histogram { counts: counters.iter().map(Counter::get).collect() };
        Snapshot {
            requests: std::array::from_fn(|kind| self.requests[kind].get()),
            time: std::array::from_fn(|kind| Duration::from_nanos(self.nanos[kind].get())),
            errors: self.errors.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
            read_latency: histogram(&self.read_latency),
            write_latency: histogram(&self.write_latency),
        }
    }
}

/// How often which latency was seen.  Buckets grow by a quarter of a power of two.
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
    /// Each bucket that holds something: the latency below which it ends, and how many it holds.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let ends = (0..BUCKETS).map(|index| Duration::from_nanos(bucket_end(index)));
        ends.zip(self.counts.iter().copied()).filter(|&(_, count)| count > 0)
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// How many were no longer than `latency`, to the precision of the buckets.
    pub fn count_within(&self, latency: Duration) -> u64 {
        self.buckets().take_while(|&(end, _)| end <= latency).map(|(_, count)| count).sum()
    }

    /// The latency that the share `q` (0 to 1) does not pass, to the precision of the buckets; `None` when empty.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let rank = (q.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        self.buckets().find_map(|(end, count)| {
            seen += count;
            (seen >= rank).then_some(end)
        })
    }

    fn add(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }
}

/// Numbers of a connection or an export at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Requests answered, in the order of [`RequestKind::ALL`].
    pub requests: [u64; KINDS],
    /// Time that requests took in all, in the same order.
    pub time: [Duration; KINDS],
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// How long reads took, from the request's arrival to its answer.
    pub read_latency: Histogram,
    /// How long writes took.
    pub write_latency: Histogram,
}

impl Snapshot {
    /// Requests of one kind.
    pub fn requests_of(&self, kind: RequestKind) -> u64 {
        self.requests[kind as usize]
    }

    /// Requests of all kinds.
    pub fn requests_total(&self) -> u64 {
        self.requests.iter().sum()
    }

    fn add(&mut self, other: &Snapshot) {
        self.requests.iter_mut().zip(other.requests).for_each(|(sum, count)| *sum += count);
        self.time.iter_mut().zip(other.time).for_each(|(sum, time)| *sum += time);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.read_latency.add(&other.read_latency);
        self.write_latency.add(&other.write_latency);
    }
}

/// A connection that is in transmission.
#[derive(Debug, Clone)]
pub struct ConnectionStats {
    /// Who.
    pub peer: String,
    /// The export's canonical name.
    pub export: String,
    /// When it chose the export, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// What it has done.
    pub numbers: Snapshot,
}

/// An export, over all of its connections, those that are gone too.
#[derive(Debug, Clone)]
pub struct ExportStats {
    /// Its canonical name.
    pub name: String,
    /// Connections now.
    pub connections: usize,
    /// What they have done, and those before them.
    pub numbers: Snapshot,
}

/// What a server counts besides requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections turned away because there were too many.
    pub turned_away: u64,
    /// Connections ended for breaking the protocol, or for taking too long over the handshake.
    pub ended_for_cause: u64,
}

#[derive(Debug)]
struct Live {
    peer: String,
    export: String,
    since: Duration,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    live: BTreeMap<u64, Live>,
    gone: BTreeMap<String, Snapshot>,
    server: ServerCounts,
}

/// The statistics of one server, or of the servers of several cores together.  Cloning gives another handle.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    state: Arc<Mutex<State>>,
}

impl Stats {
    /// Nothing counted yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The connections that are in transmission now.
    pub fn connections(&self) -> Vec<ConnectionStats> {
        let describe = |live: &Live| ConnectionStats {
            peer: live.peer.clone(),
            export: live.export.clone(),
            since: live.since,
            numbers: live.counters.snapshot(),
        };
        self.lock().live.values().map(describe).collect()
    }

    /// Counts the connections that are in transmission now, to one export or to all.
    pub fn connection_count(&self, export: Option<&str>) -> usize {
        let state = self.lock();
        state.live.values().filter(|live| export.is_none_or(|name| live.export == name)).count()
    }

    /// The exports that have had a connection, by name.
    pub fn exports(&self) -> Vec<ExportStats> {
        let state = self.lock();
        let mut exports: BTreeMap<&str, ExportStats> = BTreeMap::new();
        let empty = |name: &str| ExportStats { name: name.to_owned(), connections: 0, numbers: Snapshot::default() };
        for (name, numbers) in &state.gone {
            exports.entry(name).or_insert_with(|| empty(name)).numbers.add(numbers);
        }
        for live in state.live.values() {
            let export = exports.entry(&live.export).or_insert_with(|| empty(&live.export));
            export.connections += 1;
            export.numbers.add(&live.counters.snapshot());
        }
        exports.into_values().collect()
    }

    /// What is counted besides requests.
    pub fn server(&self) -> ServerCounts {
        self.lock().server
    }

    /// Forgets an export that is not offered any more and has no connections.
    pub fn forget(&self, name: &str) {
        self.lock().gone.remove(name);
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut ServerCounts)) {
        change(&mut self.lock().server);
    }

    pub(crate) fn enter(&self, peer: String, export: String, since: Duration) -> Entered {
        let counters = Arc::new(Counters::default());
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.live.insert(id, Live { peer, export, since, counters: counters.clone() });
        Entered { stats: self.clone(), id, counters }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place in the statistics; its numbers go to its export's when it is dropped.
#[derive(Debug)]
pub(crate) struct Entered {
    stats: Stats,
    id: u64,
    counters: Arc<Counters>,
}

impl Entered {
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut state = self.stats.lock();
        if let Some(live) = state.live.remove(&self.id) {
            let numbers = live.counters.snapshot();
            state.gone.entry(live.export).or_default().add(&numbers);
        }
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
    fn an_export_keeps_what_its_gone_connections_did() {
        let stats = Stats::new();
        let first = stats.enter("a".into(), "disk".into(), Duration::ZERO);
        let second = stats.enter("b".into(), "disk".into(), Duration::ZERO);
        for micros in 1..=100 {
            first.counters().answered(RequestKind::Read, 4096, Duration::from_micros(micros), false);
        }
        second.counters().answered(RequestKind::Write, 512, Duration::from_micros(3), false);
        second.counters().answered(RequestKind::Trim, 0, Duration::from_micros(3), true);
        drop(first);
        let [export] = &stats.exports()[..] else { panic!("one export") };
        assert_eq!((export.connections, export.numbers.requests_total(), export.numbers.errors), (1, 102, 1));
        assert_eq!((export.numbers.bytes_read, export.numbers.bytes_written), (409_600, 512));
        let median = export.numbers.read_latency.quantile(0.5).expect("not empty");
        assert!((Duration::from_micros(50)..=Duration::from_micros(63)).contains(&median), "{median:?}");
        assert_eq!(export.numbers.read_latency.count_within(Duration::from_secs(1)), 100);
        drop(second);
        assert!(stats.connections().is_empty());
        stats.forget("disk");
        assert!(stats.exports().is_empty());
    }
}
