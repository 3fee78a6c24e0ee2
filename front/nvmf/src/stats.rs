//! Counters of host activity, readable from any thread.
//!
//! A connection counts into its own [`NvmeCounters`], which only its core writes, without locks.  The list of
//! connections is behind a lock, taken when a connection begins or ends and by readers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of hosts whose counters are kept after they disconnect.  Later hosts are counted together.
const HOSTS_MAX: usize = 1024;
/// Name under which hosts beyond that maximum are counted.
pub const OTHER_HOSTS: &str = "other";

/// Command types with separate counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NvmeCommandKind {
    /// Read command.
    Read,
    /// Write, including a fused Compare and Write.
    Write,
    /// Flush command.
    Flush,
    /// Dataset Management.
    Deallocate,
    /// Write Zeroes.
    WriteZeroes,
    /// Compare command.
    Compare,
    /// Reservation commands.
    Reservation,
    /// Admin commands, and all others.
    Other,
}

impl NvmeCommandKind {
    /// Command types, in the order of [`NvmeCounts::commands`].
    pub const ALL: [NvmeCommandKind; 8] = [
        NvmeCommandKind::Read,
        NvmeCommandKind::Write,
        NvmeCommandKind::Flush,
        NvmeCommandKind::Deallocate,
        NvmeCommandKind::WriteZeroes,
        NvmeCommandKind::Compare,
        NvmeCommandKind::Reservation,
        NvmeCommandKind::Other,
    ];

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            NvmeCommandKind::Read => "read",
            NvmeCommandKind::Write => "write",
            NvmeCommandKind::Flush => "flush",
            NvmeCommandKind::Deallocate => "deallocate",
            NvmeCommandKind::WriteZeroes => "write_zeroes",
            NvmeCommandKind::Compare => "compare",
            NvmeCommandKind::Reservation => "reservation",
            NvmeCommandKind::Other => "other",
        }
    }
}

const KINDS: usize = NvmeCommandKind::ALL.len();

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

/// Counters of one connection.  Written by its core only.
#[derive(Debug, Default)]
pub struct NvmeCounters {
    commands: [Counter; KINDS],
    errors: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
}

impl NvmeCounters {
    /// Counts a completed command, which read or wrote `bytes`.
    pub(crate) fn answered(&self, kind: NvmeCommandKind, bytes: u64, failed: bool) {
        self.commands[kind as usize].add(1);
        match kind {
            _ if failed => self.errors.add(1),
            NvmeCommandKind::Read => self.bytes_read.add(bytes),
            NvmeCommandKind::Write => self.bytes_written.add(bytes),
            _ => {}
        }
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> NvmeCounts {
        NvmeCounts {
            commands: std::array::from_fn(|kind| self.commands[kind].get()),
            errors: self.errors.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
        }
    }
}

/// Counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvmeCounts {
    /// Completed commands, by type.
    pub commands: [u64; KINDS],
    /// Failed commands among them.
    pub errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
}

impl NvmeCounts {
    /// Adds the counts of another snapshot.
    pub fn add(&mut self, other: &NvmeCounts) {
        self.commands.iter_mut().zip(other.commands).for_each(|(sum, more)| *sum += more);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Counts of a target other than commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NvmeTargetCounts {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections rejected by a connection limit or during shutdown.
    pub turned_away: u64,
    /// Connections ended for a protocol error, a timeout or repeatedly refused Connects.
    pub ended_for_cause: u64,
    /// Connects refused for the host, the subsystem or the parameters.
    pub refused: u64,
    /// Controllers ended by an expired keep-alive timeout.
    pub keep_alive_expired: u64,
    /// PDUs with a data digest mismatch.
    pub digest_errors: u64,
    /// Failed authentications.
    pub auth_failures: u64,
    /// Failed TLS handshakes.
    pub tls_failures: u64,
}

/// Connection with a queue.
#[derive(Debug, Clone)]
pub struct QueueConnection {
    /// Address of the host.
    pub peer: String,
    /// NQN of the host.
    pub host: String,
    /// Controller id.
    pub cntlid: u16,
    /// Queue id; 0 for the admin queue.
    pub queue: u16,
    /// Connection to a discovery controller.
    pub discovery: bool,
    /// TLS cipher suite; `None` without TLS.
    pub tls: Option<&'static str>,
    /// Counts of the connection.
    pub done: NvmeCounts,
}

struct Entry {
    peer: String,
    host: String,
    cntlid: u16,
    queue: u16,
    discovery: bool,
    tls: Option<&'static str>,
    counters: Arc<NvmeCounters>,
}

#[derive(Default)]
struct StatsState {
    counts: NvmeTargetCounts,
    connections: BTreeMap<u64, Entry>,
    next: u64,
    /// Counts of ended connections, by host.
    gone: BTreeMap<String, NvmeCounts>,
}

/// Counters of a target, shared by all cores.
#[derive(Clone, Default)]
pub struct NvmeStats(Arc<Mutex<StatsState>>);

impl NvmeStats {
    /// Creates counters at zero.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, StatsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut NvmeTargetCounts)) {
        change(&mut self.lock().counts);
    }

    /// Returns the counts other than commands.
    pub fn counts(&self) -> NvmeTargetCounts {
        self.lock().counts
    }

    /// Returns the connections that have a queue.
    pub fn connections(&self) -> Vec<QueueConnection> {
        let connection = |entry: &Entry| QueueConnection {
            peer: entry.peer.clone(),
            host: entry.host.clone(),
            cntlid: entry.cntlid,
            queue: entry.queue,
            discovery: entry.discovery,
            tls: entry.tls,
            done: entry.counters.snapshot(),
        };
        self.lock().connections.values().map(connection).collect()
    }

    /// Returns the number of TLS connections, by cipher suite.
    pub fn suites(&self) -> BTreeMap<&'static str, usize> {
        let mut suites = BTreeMap::new();
        let inner = self.lock();
        inner
            .connections
            .values()
            .filter_map(|entry| entry.tls)
            .for_each(|suite| *suites.entry(suite).or_default() += 1);
        suites
    }

    /// Returns the counts of each host since the start.
    pub fn hosts(&self) -> BTreeMap<String, NvmeCounts> {
        let inner = self.lock();
        let mut hosts = inner.gone.clone();
        for entry in inner.connections.values() {
            hosts.entry(entry.host.clone()).or_default().add(&entry.counters.snapshot());
        }
        hosts
    }

    /// Returns the counts of all hosts together since the start.
    pub fn total(&self) -> NvmeCounts {
        let inner = self.lock();
        let mut total = NvmeCounts::default();
        inner.gone.values().for_each(|host| total.add(host));
        inner.connections.values().for_each(|entry| total.add(&entry.counters.snapshot()));
        total
    }

    pub(crate) fn enter(
        &self,
        peer: String,
        host: String,
        (cntlid, queue): (u16, u16),
        discovery: bool,
        tls: Option<&'static str>,
    ) -> NvmeStatsEntry {
        let counters = Arc::new(NvmeCounters::default());
        let mut inner = self.lock();
        let id = inner.next;
        inner.next += 1;
        let entry = Entry { peer, host, cntlid, queue, discovery, tls, counters: counters.clone() };
        inner.connections.insert(id, entry);
        NvmeStatsEntry { stats: self.clone(), id, counters }
    }
}

/// Entry of a connection in the list.  Dropping it removes the entry and adds its counts to those of the host.
pub(crate) struct NvmeStatsEntry {
    stats: NvmeStats,
    id: u64,
    pub(crate) counters: Arc<NvmeCounters>,
}

impl Drop for NvmeStatsEntry {
    fn drop(&mut self) {
        let mut inner = self.stats.lock();
        let Some(entry) = inner.connections.remove(&self.id) else { return };
        let known = inner.gone.contains_key(&entry.host) || inner.gone.len() < HOSTS_MAX;
        let host = if known { entry.host } else { OTHER_HOSTS.to_owned() };
        inner.gone.entry(host).or_default().add(&self.counters.snapshot());
    }
}
