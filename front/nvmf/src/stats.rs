//! What hosts have done, readable from any thread.
//!
//! A connection counts into [`Counters`] of its own, which only its core writes; nobody waits for anybody.  The list
//! of connections is behind a lock that is taken when one comes, when one goes, and by who reads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Hosts whose counts are kept after they have gone; those that come later are counted together.
const HOSTS_MAX: usize = 1024;
/// The name under which the hosts past the first thousand are counted.
pub const OTHER_HOSTS: &str = "other";

/// Kinds of commands that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CommandKind {
    /// Read.
    Read,
    /// Write; fused with a compare, too.
    Write,
    /// Flush.
    Flush,
    /// Dataset Management.
    Deallocate,
    /// Write Zeroes.
    WriteZeroes,
    /// Compare.
    Compare,
    /// Reservations.
    Reservation,
    /// The admin queue's, and whatever else.
    Other,
}

impl CommandKind {
    /// All of them, in the order of [`Snapshot::commands`].
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

    /// A label for metrics.
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

/// What one connection has done.  Written by its core only.
#[derive(Debug, Default)]
pub struct Counters {
    commands: [Counter; KINDS],
    errors: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
}

impl Counters {
    /// A command was answered; `bytes` were read or written by it.
    pub(crate) fn answered(&self, kind: CommandKind, bytes: u64, failed: bool) {
        self.commands[kind as usize].add(1);
        match kind {
            _ if failed => self.errors.add(1),
            CommandKind::Read => self.bytes_read.add(bytes),
            CommandKind::Write => self.bytes_written.add(bytes),
            _ => {}
        }
    }

    /// What has been counted so far.
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
    /// Commands answered, by kind.
    pub commands: [u64; KINDS],
    /// Of these, those that failed.
    pub errors: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
}

impl Snapshot {
    /// Adds another's counts.
    pub fn add(&mut self, other: &Snapshot) {
        self.commands.iter_mut().zip(other.commands).for_each(|(sum, more)| *sum += more);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Counts of a target besides commands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections turned away because there were too many.
    pub turned_away: u64,
    /// Connections ended for breaking the protocol.
    pub ended_for_cause: u64,
    /// Connects refused: host, subsystem or parameters.
    pub refused: u64,
    /// Controllers whose host fell silent.
    pub keep_alive_expired: u64,
    /// Data that did not have the digest that it came with.
    pub digest_errors: u64,
    /// Hosts that failed to authenticate.
    pub auth_failures: u64,
    /// Connections that did not come to agree on TLS.
    pub tls_failures: u64,
}

/// A connection that there is now.
#[derive(Debug, Clone)]
pub struct Connection {
    /// The host's address.
    pub peer: String,
    /// The host's name.
    pub host: String,
    /// Its controller.
    pub cntlid: u16,
    /// Its queue; 0 for the admin queue.
    pub queue: u16,
    /// It is with discovery only.
    pub discovery: bool,
    /// The suite of its TLS.
    pub tls: Option<&'static str>,
    /// What it has done.
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
struct Inner {
    counts: Counts,
    connections: BTreeMap<u64, Entry>,
    next: u64,
    /// Of connections that have gone, by host.
    gone: BTreeMap<String, Snapshot>,
}

/// What a target counts; all cores share one.
#[derive(Clone, Default)]
pub struct Stats(Arc<Mutex<Inner>>);

impl Stats {
    /// Nothing was counted yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.lock().counts);
    }

    /// Counts besides commands.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// The connections that have a queue.
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

    /// Connections with TLS, by suite.
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

    /// What each host has done since the start.
    pub fn hosts(&self) -> BTreeMap<String, Snapshot> {
        let inner = self.lock();
        let mut hosts = inner.gone.clone();
        for entry in inner.connections.values() {
            hosts.entry(entry.host.clone()).or_default().add(&entry.counters.snapshot());
        }
        hosts
    }

    /// What all hosts have done since the start.
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

/// A connection's place in the list; given up when dropped, its counts then go to its host.
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
