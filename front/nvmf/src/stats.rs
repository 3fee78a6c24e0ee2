//! Counters of host activity, readable from any thread.
//!
//! A connection counts into its own [`Counters`], which only its core writes, without locks.  The list of
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
pub enum CommandKind {
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

impl CommandKind {
    /// Command types, in the order of [`Snapshot::commands`].
    pub const ALL: [CommandKind; 8] = [
        CommandKind::Read,
        CommandKind::Write,
        CommandKind::Flush,
        CommandKind::Deallocate,
        CommandKind::WriteZeroes,
        CommandKind::Compare,
        CommandKind::Reservation,
        CommandKind::Other,
    ];

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            CommandKind::Read => "read",
            CommandKind::Write => "write",
            CommandKind::Flush => "flush",
            CommandKind::Deallocate => "deallocate",
            CommandKind::WriteZeroes => "write_zeroes",
            CommandKind::Compare => "compare",
            CommandKind::Reservation => "reservation",
            CommandKind::Other => "other",
        }
    }
}

const KINDS: usize = CommandKind::ALL.len();

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
pub struct Counters {
    commands: [Counter; KINDS],
    errors: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
}

impl Counters {
    /// Counts a completed command, which read or wrote `bytes`.
    pub(crate) fn answered(&self, kind: CommandKind, bytes: u64, failed: bool) {
        self.commands[kind as usize].add(1);
        match kind {
            _ if failed => self.errors.add(1),
            CommandKind::Read => self.bytes_read.add(bytes),
            CommandKind::Write => self.bytes_written.add(bytes),
            _ => {}
        }
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            commands: std::array::from_fn(|kind| self.commands[kind].get()),
            errors: self.errors.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
        }
    }
}

/// Counts at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Completed commands, by type.
    pub commands: [u64; KINDS],
    /// Failed commands among them.
    pub errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
}

impl Snapshot {
    /// Adds the counts of another snapshot.
    pub fn add(&mut self, other: &Snapshot) {
        self.commands.iter_mut().zip(other.commands).for_each(|(sum, more)| *sum += more);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Counts of a target other than commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
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
pub struct Connection {
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
    pub done: Snapshot,
}

struct Entry {
    peer: String,
    host: String,
    cntlid: u16,
    queue: u16,
    discovery: bool,
    tls: Option<&'static str>,
    counters: Arc<Counters>,
}

#[derive(Default)]
struct StatsState {
    counts: Counts,
    connections: BTreeMap<u64, Entry>,
    next: u64,
    /// Counts of ended connections, by host.
    gone: BTreeMap<String, Snapshot>,
}

/// Counters of a target, shared by all cores.
#[derive(Clone, Default)]
pub struct Stats(Arc<Mutex<StatsState>>);

impl Stats {
    /// Creates counters at zero.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, StatsState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.lock().counts);
    }

    /// Returns the counts other than commands.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Returns the connections that have a queue.
    pub fn connections(&self) -> Vec<Connection> {
        let connection = |entry: &Entry| Connection {
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
    pub fn hosts(&self) -> BTreeMap<String, Snapshot> {
        let inner = self.lock();
        let mut hosts = inner.gone.clone();
        for entry in inner.connections.values() {
            hosts.entry(entry.host.clone()).or_default().add(&entry.counters.snapshot());
        }
        hosts
    }

    /// Returns the counts of all hosts together since the start.
    pub fn total(&self) -> Snapshot {
        let inner = self.lock();
        let mut total = Snapshot::default();
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
    ) -> Entered {
        let counters = Arc::new(Counters::default());
        let mut inner = self.lock();
        let id = inner.next;
        inner.next += 1;
        let entry = Entry { peer, host, cntlid, queue, discovery, tls, counters: counters.clone() };
        inner.connections.insert(id, entry);
        Entered { stats: self.clone(), id, counters }
    }
}

/// Entry of a connection in the list.  Dropping it removes the entry and adds its counts to those of the host.
pub(crate) struct Entered {
    stats: Stats,
    id: u64,
    pub(crate) counters: Arc<Counters>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut inner = self.stats.lock();
        let Some(entry) = inner.connections.remove(&self.id) else { return };
        let known = inner.gone.contains_key(&entry.host) || inner.gone.len() < HOSTS_MAX;
        let host = if known { entry.host } else { OTHER_HOSTS.to_owned() };
        inner.gone.entry(host).or_default().add(&self.counters.snapshot());
    }
}
