//! Counters of connections, readable from any thread.
//!
//! A connection counts into its own [`NbdCounters`], which only its core writes, without locks.  The list of
//! connections is behind a lock, taken when a connection begins or ends and by readers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::wire::command;

/// Request types with separate counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NbdRequestKind {
    /// `NBD_CMD_READ` command.
    Read,
    /// `NBD_CMD_WRITE` command.
    Write,
    /// `NBD_CMD_FLUSH` command.
    Flush,
    /// `NBD_CMD_TRIM` command.
    Trim,
    /// `NBD_CMD_WRITE_ZEROES` command.
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS` command.
    BlockStatus,
    /// Any other request.
    Other,
}

impl NbdRequestKind {
    /// Request types, in the order of [`NbdCounts::requests`].
    pub const ALL: [NbdRequestKind; 7] = [
        NbdRequestKind::Read,
        NbdRequestKind::Write,
        NbdRequestKind::Flush,
        NbdRequestKind::Trim,
        NbdRequestKind::WriteZeroes,
        NbdRequestKind::BlockStatus,
        NbdRequestKind::Other,
    ];

    /// Returns the type of a command code.
    pub fn of(code: u16) -> Self {
        match code {
            command::READ => NbdRequestKind::Read,
            command::WRITE => NbdRequestKind::Write,
            command::FLUSH => NbdRequestKind::Flush,
            command::TRIM => NbdRequestKind::Trim,
            command::WRITE_ZEROES => NbdRequestKind::WriteZeroes,
            command::BLOCK_STATUS => NbdRequestKind::BlockStatus,
            _ => NbdRequestKind::Other,
        }
    }

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            NbdRequestKind::Read => "read",
            NbdRequestKind::Write => "write",
            NbdRequestKind::Flush => "flush",
            NbdRequestKind::Trim => "trim",
            NbdRequestKind::WriteZeroes => "write_zeroes",
            NbdRequestKind::BlockStatus => "block_status",
            NbdRequestKind::Other => "other",
        }
    }
}

const KINDS: usize = NbdRequestKind::ALL.len();
/// Sub-buckets per power of two.
const STEPS: u64 = 4;
/// Upper end of the first latency bucket, in nanoseconds.
const FIRST_NANOS: u64 = 256;
/// Powers of two from [`FIRST_NANOS`] on: the last bucket begins at about a minute.
const OCTAVES: usize = 28;
/// Number of buckets of a latency histogram.
pub const BUCKETS: usize = 1 + OCTAVES * STEPS as usize;

/// Counter with one writing core and any number of readers.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    /// Adds without an atomic read-modify-write: there is only one writer.
    fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
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

/// Counters of one connection.  Written by its core only.
#[derive(Debug)]
pub struct NbdCounters {
    requests: [Counter; KINDS],
    errors: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
    nanos: [Counter; KINDS],
    read_latency: Box<[Counter]>,
    write_latency: Box<[Counter]>,
}

impl Default for NbdCounters {
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

impl NbdCounters {
    /// Counts a request of `kind` that was answered after `latency`, and that read or wrote `bytes`.
    pub(crate) fn answered(&self, kind: NbdRequestKind, bytes: u64, latency: Duration, failed: bool) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.requests[kind as usize].add(1);
        self.nanos[kind as usize].add(nanos);
        match kind {
            _ if failed => self.errors.add(1),
            NbdRequestKind::Read => {
                self.bytes_read.add(bytes);
                self.read_latency[bucket(nanos)].add(1);
            }
            NbdRequestKind::Write => {
                self.bytes_written.add(bytes);
                self.write_latency[bucket(nanos)].add(1);
            }
            _ => {}
        }
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> NbdCounts {
        let histogram = |counters: &[Counter]| Histogram { counts: counters.iter().map(Counter::get).collect() };
        NbdCounts {
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

/// Latency histogram.  Each power of two is split into four buckets.
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

    fn add(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
    }
}

/// Counts of a connection or an export at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NbdCounts {
    /// Answered requests, in the order of [`NbdRequestKind::ALL`].
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

impl NbdCounts {
    /// Returns the number of requests of one type.
    pub fn requests_of(&self, kind: NbdRequestKind) -> u64 {
        self.requests[kind as usize]
    }

    /// Returns the number of requests of all types.
    pub fn requests_total(&self) -> u64 {
        self.requests.iter().sum()
    }

    fn add(&mut self, other: &NbdCounts) {
        self.requests.iter_mut().zip(other.requests).for_each(|(sum, count)| *sum += count);
        self.time.iter_mut().zip(other.time).for_each(|(sum, time)| *sum += time);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.read_latency.add(&other.read_latency);
        self.write_latency.add(&other.write_latency);
    }
}

/// Connection in transmission.
#[derive(Debug, Clone)]
pub struct ConnectionStats {
    /// Address of the host.
    pub peer: String,
    /// Canonical name of the export.
    pub export: String,
    /// Host name proved by TLS; empty for an anonymous host, `None` without TLS.
    pub tls: Option<String>,
    /// Time at which the export was chosen, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// Counts of the connection.
    pub numbers: NbdCounts,
}

/// Export, with the counts of all its connections, including ended ones.
#[derive(Debug, Clone)]
pub struct ExportStats {
    /// Canonical name.
    pub name: String,
    /// Number of connections now.
    pub connections: usize,
    /// Counts of all its connections, including ended ones.
    pub numbers: NbdCounts,
}

/// Counts of a server other than requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections rejected by the connection limit or during shutdown.
    pub turned_away: u64,
    /// Connections ended for a protocol error or a handshake timeout.
    pub ended_for_cause: u64,
    /// Failed TLS handshakes.
    pub tls_failures: u64,
    /// Hosts refused: by their address, by their name, or by the list of an export.
    pub hosts_refused: u64,
}

#[derive(Debug)]
struct Live {
    peer: String,
    export: String,
    tls: Option<String>,
    since: Duration,
    counters: Arc<NbdCounters>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    live: BTreeMap<u64, Live>,
    gone: BTreeMap<String, NbdCounts>,
    server: ServerCounts,
}

/// Statistics of one server, or of the servers of several cores together.  Clones are handles to the same
/// statistics.
#[derive(Debug, Clone, Default)]
pub struct NbdStats {
    state: Arc<Mutex<State>>,
}

impl NbdStats {
    /// Creates counters at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the connections in transmission.
    pub fn connections(&self) -> Vec<ConnectionStats> {
        let describe = |live: &Live| ConnectionStats {
            peer: live.peer.clone(),
            export: live.export.clone(),
            tls: live.tls.clone(),
            since: live.since,
            numbers: live.counters.snapshot(),
        };
        self.lock().live.values().map(describe).collect()
    }

    /// Counts the connections in transmission, to one export or to all.
    pub fn connection_count(&self, export: Option<&str>) -> usize {
        let state = self.lock();
        state.live.values().filter(|live| export.is_none_or(|name| live.export == name)).count()
    }

    /// Counts the TLS connections in transmission.
    pub fn tls_connections(&self) -> usize {
        self.lock().live.values().filter(|live| live.tls.is_some()).count()
    }

    /// Returns the exports that have had a connection, by name.
    pub fn exports(&self) -> Vec<ExportStats> {
        let state = self.lock();
        let mut exports: BTreeMap<&str, ExportStats> = BTreeMap::new();
        let empty = |name: &str| ExportStats { name: name.to_owned(), connections: 0, numbers: NbdCounts::default() };
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

    /// Returns the counts other than requests.
    pub fn server(&self) -> ServerCounts {
        self.lock().server
    }

    /// Removes the counts of an export that is no longer offered and has no connections.
    pub fn forget(&self, name: &str) {
        self.lock().gone.remove(name);
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut ServerCounts)) {
        change(&mut self.lock().server);
    }

    pub(crate) fn enter(&self, peer: String, export: String, tls: Option<String>, since: Duration) -> NbdStatsEntry {
        let counters = Arc::new(NbdCounters::default());
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        state.live.insert(id, Live { peer, export, tls, since, counters: counters.clone() });
        NbdStatsEntry { stats: self.clone(), id, counters }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Entry of a connection in the statistics.  Dropping it removes the entry and adds its counts to those of the
/// export.
#[derive(Debug)]
pub(crate) struct NbdStatsEntry {
    stats: NbdStats,
    id: u64,
    counters: Arc<NbdCounters>,
}

impl NbdStatsEntry {
    pub(crate) fn counters(&self) -> &NbdCounters {
        &self.counters
    }
}

impl Drop for NbdStatsEntry {
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
        let stats = NbdStats::new();
        let first = stats.enter("a".into(), "disk".into(), None, Duration::ZERO);
        let second = stats.enter("b".into(), "disk".into(), Some("CN=b".into()), Duration::ZERO);
        for micros in 1..=100 {
            first.counters().answered(NbdRequestKind::Read, 4096, Duration::from_micros(micros), false);
        }
        second.counters().answered(NbdRequestKind::Write, 512, Duration::from_micros(3), false);
        second.counters().answered(NbdRequestKind::Trim, 0, Duration::from_micros(3), true);
        assert_eq!((stats.connection_count(None), stats.tls_connections()), (2, 1));
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
