//! Counters of connected front-ends, readable from any thread.
//!
//! A connection has [`VhostCounters`] for each core that runs its queues, which only that core writes, without locks.  The
//! list of connections is behind a lock, taken when a connection begins, is negotiated or ends, and by readers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_serve::{MovedBytes, ServedCounters, ServedCounts, SingleWriterCounter};

/// Request types with separate counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum VhostRequestKind {
    /// Read of data.
    Read,
    /// Write of data.
    Write,
    /// Flush of the write cache.
    Flush,
    /// Discard of ranges.
    Discard,
    /// Zeroing of ranges.
    WriteZeroes,
    /// Read of the serial number, or of other identification.
    GetId,
    /// Any other request.
    Other,
}

impl VhostRequestKind {
    /// Request types, in the order of [`ServedCounts::requests`].
    pub const ALL: [VhostRequestKind; 7] = [
        VhostRequestKind::Read,
        VhostRequestKind::Write,
        VhostRequestKind::Flush,
        VhostRequestKind::Discard,
        VhostRequestKind::WriteZeroes,
        VhostRequestKind::GetId,
        VhostRequestKind::Other,
    ];

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            VhostRequestKind::Read => "read",
            VhostRequestKind::Write => "write",
            VhostRequestKind::Flush => "flush",
            VhostRequestKind::Discard => "discard",
            VhostRequestKind::WriteZeroes => "write_zeroes",
            VhostRequestKind::GetId => "get_id",
            VhostRequestKind::Other => "other",
        }
    }
}

impl From<VhostRequestKind> for usize {
    fn from(kind: VhostRequestKind) -> Self {
        kind as usize
    }
}

const KINDS: usize = VhostRequestKind::ALL.len();

/// Counters of one connection on one core, which alone writes them.
#[derive(Debug, Default)]
pub struct VhostCounters {
    served: ServedCounters<KINDS>,
    kicks: SingleWriterCounter,
    interrupts: SingleWriterCounter,
}

impl VhostCounters {
    /// Counts a request of `kind` that was completed after `latency`, and that read or wrote `bytes`.
    pub fn answered(&self, kind: VhostRequestKind, bytes: u64, latency: Duration, failed: bool) {
        let moved = match kind {
            VhostRequestKind::Read => MovedBytes::Read(bytes),
            VhostRequestKind::Write => MovedBytes::Written(bytes),
            _ => MovedBytes::None,
        };
        self.served.answered(kind.into(), moved, latency, failed);
    }

    /// Counts a notification received from the driver.
    pub fn kicked(&self) {
        self.kicks.add(1);
    }

    /// Counts an interrupt sent to the driver.
    pub fn interrupted(&self) {
        self.interrupts.add(1);
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> VhostCounts {
        VhostCounts { served: self.served.snapshot(), kicks: self.kicks.get(), interrupts: self.interrupts.get() }
    }
}

/// Counts of a connection or an export at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VhostCounts {
    /// Requests, by [`VhostRequestKind`].
    pub served: ServedCounts<KINDS>,
    /// Notifications received from drivers.
    pub kicks: u64,
    /// Interrupts sent to drivers.
    pub interrupts: u64,
}

impl VhostCounts {
    fn add(&mut self, other: &VhostCounts) {
        self.served.add(&other.served);
        self.kicks += other.kicks;
        self.interrupts += other.interrupts;
    }
}

/// Rings that a front-end and its driver have negotiated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VhostDriverInfo {
    /// Format of the rings, such as `split`; empty before the driver has chosen.
    pub ring_format: &'static str,
    /// Number of running queues.
    pub queues: u16,
}

/// Connected front-end.
#[derive(Debug, Clone)]
pub struct VhostConnectionStats {
    /// Canonical name of the export.
    pub export: String,
    /// Type of the device, such as `blk`.
    pub device: &'static str,
    /// Rings of the driver.
    pub driver: VhostDriverInfo,
    /// Time at which it connected, since 1970-01-01T00:00:00Z.
    pub since: Duration,
    /// Counts of the connection.
    pub numbers: VhostCounts,
}

/// Export, with the counts of all its connections, including ended ones.
#[derive(Debug, Clone)]
pub struct VhostExportStats {
    /// Canonical name.
    pub name: String,
    /// Number of connections now.
    pub connections: usize,
    /// Counts of all its connections, including ended ones.
    pub numbers: VhostCounts,
}

/// Counts of a server other than requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VhostServerCounts {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections rejected, because the device is in use or the server shuts down.
    pub turned_away: u64,
    /// Connections ended for a protocol error.
    pub ended_for_cause: u64,
    /// Queues stopped because the driver broke the rules of rings or requests.
    pub broken_queues: u64,
}

#[derive(Debug)]
struct LiveFrontEnd {
    export: String,
    device: &'static str,
    driver: VhostDriverInfo,
    since: Duration,
    /// Counters of each core.
    counters: Vec<Arc<VhostCounters>>,
}

impl LiveFrontEnd {
    fn numbers(&self) -> VhostCounts {
        let mut numbers = VhostCounts::default();
        self.counters.iter().for_each(|counters| numbers.add(&counters.snapshot()));
        numbers
    }
}

#[derive(Debug, Default)]
struct VhostStatsState {
    next: u64,
    live: BTreeMap<u64, LiveFrontEnd>,
    gone: BTreeMap<String, VhostCounts>,
    server: VhostServerCounts,
}

/// Statistics of one server, or of the servers of several cores together.  Clones are handles to the same statistics.
#[derive(Debug, Clone, Default)]
pub struct VhostStats {
    state: Arc<Mutex<VhostStatsState>>,
}

impl VhostStats {
    /// Creates counters at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the connected front-ends.
    pub fn connections(&self) -> Vec<VhostConnectionStats> {
        let describe = |live: &LiveFrontEnd| VhostConnectionStats {
            export: live.export.clone(),
            device: live.device,
            driver: live.driver.clone(),
            since: live.since,
            numbers: live.numbers(),
        };
        self.lock().live.values().map(describe).collect()
    }

    /// Counts the connected front-ends, of one export or of all.
    pub fn connection_count(&self, export: Option<&str>) -> usize {
        let state = self.lock();
        state.live.values().filter(|live| export.is_none_or(|name| live.export == name)).count()
    }

    /// Returns the exports that have had a connection, by name.
    pub fn exports(&self) -> Vec<VhostExportStats> {
        let state = self.lock();
        let mut exports: BTreeMap<&str, (usize, VhostCounts)> = BTreeMap::new();
        for (name, numbers) in &state.gone {
            exports.entry(name).or_default().1.add(numbers);
        }
        for live in state.live.values() {
            let (connections, numbers) = exports.entry(&live.export).or_default();
            *connections += 1;
            numbers.add(&live.numbers());
        }
        let export =
            |(name, (connections, numbers)): (&str, _)| VhostExportStats { name: name.into(), connections, numbers };
        exports.into_iter().map(export).collect()
    }

    /// Returns the counts other than requests.
    pub fn server(&self) -> VhostServerCounts {
        self.lock().server
    }

    /// Removes the counts of an export that is no longer offered and has no connections.
    pub fn forget(&self, name: &str) {
        self.lock().gone.remove(name);
    }

    /// Changes the counts other than requests.
    pub fn count(&self, change: impl FnOnce(&mut VhostServerCounts)) {
        change(&mut self.lock().server);
    }

    /// Adds a connection, until the returned entry is dropped.
    pub fn enter(&self, export: String, device: &'static str, since: Duration) -> VhostStatsEntry {
        let mut state = self.lock();
        let id = state.next;
        state.next += 1;
        let (driver, counters) = (VhostDriverInfo::default(), Vec::new());
        state.live.insert(id, LiveFrontEnd { export, device, driver, since, counters });
        VhostStatsEntry { stats: self.clone(), id }
    }

    fn lock(&self) -> MutexGuard<'_, VhostStatsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Entry of a connection in the statistics.  Dropping it removes the entry and adds its counts to those of the export.
#[derive(Debug)]
pub struct VhostStatsEntry {
    stats: VhostStats,
    id: u64,
}

impl VhostStatsEntry {
    /// Adds counters for a core that runs queues of the connection.
    pub fn add_core(&self) -> Arc<VhostCounters> {
        let counters = Arc::new(VhostCounters::default());
        if let Some(live) = self.stats.lock().live.get_mut(&self.id) {
            live.counters.push(counters.clone());
        }
        counters
    }

    /// Counts a queue that was stopped because its driver broke the rules.
    pub fn count_broken_queue(&self) {
        self.stats.count(|counts| counts.broken_queues += 1);
    }

    /// Changes the description of the driver.
    pub fn set_driver(&self, driver: VhostDriverInfo) {
        if let Some(live) = self.stats.lock().live.get_mut(&self.id) {
            live.driver = driver;
        }
    }
}

impl Drop for VhostStatsEntry {
    fn drop(&mut self) {
        let mut state = self.stats.lock();
        if let Some(live) = state.live.remove(&self.id) {
            let numbers = live.numbers();
            state.gone.entry(live.export).or_default().add(&numbers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_keeps_the_counts_of_ended_connections() {
        let stats = VhostStats::new();
        let first = stats.enter("disk".into(), "blk", Duration::ZERO);
        let second = stats.enter("disk".into(), "blk", Duration::from_secs(1));
        let (on_first, on_second, on_third) = (first.add_core(), second.add_core(), second.add_core());
        on_first.answered(VhostRequestKind::Read, 4096, Duration::from_micros(3), false);
        on_second.answered(VhostRequestKind::Write, 512, Duration::from_micros(3), false);
        on_third.answered(VhostRequestKind::Discard, 0, Duration::from_micros(3), true);
        on_first.kicked();
        on_third.interrupted();
        let driver = VhostDriverInfo { ring_format: "packed", queues: 4 };
        second.set_driver(driver.clone());
        drop(first);
        let [live] = &stats.connections()[..] else { panic!("one connection") };
        assert_eq!((&live.driver, live.device), (&driver, "blk"));
        let [export] = &stats.exports()[..] else { panic!("one export") };
        assert_eq!((export.name.as_str(), export.connections), ("disk", 1));
        let numbers = &export.numbers;
        assert_eq!((numbers.served.requests_total(), numbers.served.errors), (3, 1));
        assert_eq!((numbers.served.bytes_read, numbers.served.bytes_written), (4096, 512));
        assert_eq!(numbers.served.requests_of(VhostRequestKind::Discard), 1);
        assert_eq!((numbers.kicks, numbers.interrupts), (1, 1));
        assert_eq!((stats.connection_count(Some("disk")), stats.connection_count(Some("other"))), (1, 0));
        drop(second);
        stats.count(|server| server.accepted += 2);
        assert_eq!(stats.server().accepted, 2);
        stats.forget("disk");
        assert!(stats.connections().is_empty() && stats.exports().is_empty());
    }
}
