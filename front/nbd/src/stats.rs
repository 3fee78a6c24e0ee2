//! Counters of connections, readable from any thread.
//!
//! A connection counts into its own [`NbdCounters`], which only its core writes, without locks.  The list of
//! connections is behind a lock, taken when a connection begins or ends and by readers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_serve::{MovedBytes, ServedCounters, ServedCounts};

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

impl From<NbdRequestKind> for usize {
    fn from(kind: NbdRequestKind) -> Self {
        kind as usize
    }
}

const KINDS: usize = NbdRequestKind::ALL.len();

/// Counters of one connection.  Written by its core only.
#[derive(Debug, Default)]
pub struct NbdCounters(ServedCounters<KINDS>);

impl NbdCounters {
    /// Counts a request of `kind` that was answered after `latency`, and that read or wrote `bytes`.
    pub(crate) fn answered(&self, kind: NbdRequestKind, bytes: u64, latency: Duration, failed: bool) {
        let moved = match kind {
            NbdRequestKind::Read => MovedBytes::Read(bytes),
            NbdRequestKind::Write => MovedBytes::Written(bytes),
            _ => MovedBytes::None,
        };
        self.0.answered(kind.into(), moved, latency, failed);
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> NbdCounts {
        self.0.snapshot()
    }
}

/// Counts of a connection or an export at one moment, by [`NbdRequestKind`].
pub type NbdCounts = ServedCounts<KINDS>;

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
