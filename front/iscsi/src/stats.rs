//! Statistics counters, readable from any thread: per unit, per session, and for all connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Command kind with separate counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScsiCommandKind {
    /// READ commands.
    Read,
    /// WRITE commands, with or without verification.
    Write,
    /// WRITE SAME and UNMAP.
    Unmap,
    /// COMPARE AND WRITE.
    CompareAndWrite,
    /// SYNCHRONIZE CACHE.
    Sync,
    /// EXTENDED COPY.
    Copy,
    /// Other commands.
    Other,
}

impl ScsiCommandKind {
    /// All kinds, in the order of [`ScsiCounts::commands`].
    pub const ALL: [ScsiCommandKind; 7] = [
        ScsiCommandKind::Read,
        ScsiCommandKind::Write,
        ScsiCommandKind::Unmap,
        ScsiCommandKind::CompareAndWrite,
        ScsiCommandKind::Sync,
        ScsiCommandKind::Copy,
        ScsiCommandKind::Other,
    ];

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            ScsiCommandKind::Read => "read",
            ScsiCommandKind::Write => "write",
            ScsiCommandKind::Unmap => "unmap",
            ScsiCommandKind::CompareAndWrite => "compare_and_write",
            ScsiCommandKind::Sync => "sync",
            ScsiCommandKind::Copy => "copy",
            ScsiCommandKind::Other => "other",
        }
    }
}

const KINDS: usize = ScsiCommandKind::ALL.len();

/// Command counters that any core adds to.
#[derive(Debug, Default)]
pub struct ScsiCounters {
    commands: [AtomicU64; KINDS],
    nanos: [AtomicU64; KINDS],
    errors: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

/// Snapshot of command counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScsiCounts {
    /// Commands completed, in the order of [`ScsiCommandKind::ALL`].
    pub commands: [u64; KINDS],
    /// Total service time in nanoseconds, in the same order.
    pub nanos: [u64; KINDS],
    /// Commands completed without GOOD status.
    pub errors: u64,
    /// Bytes sent to initiators.
    pub bytes_read: u64,
    /// Bytes received from initiators.
    pub bytes_written: u64,
}

impl ScsiCounts {
    /// Adds the counts of another snapshot.
    pub fn add(&mut self, other: &ScsiCounts) {
        self.commands.iter_mut().zip(other.commands).for_each(|(sum, more)| *sum += more);
        self.nanos.iter_mut().zip(other.nanos).for_each(|(sum, more)| *sum += more);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Counts of one poll of a session, added to the shared counters at its end, so that a command costs no atomic
/// operation.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    snapshot: ScsiCounts,
    any: bool,
}

impl Tally {
    /// Counts a completed command.
    #[inline]
    pub fn answered(&mut self, kind: ScsiCommandKind, took: Duration, failed: bool, read: u64, written: u64) {
        self.any = true;
        self.snapshot.commands[kind as usize] += 1;
        self.snapshot.nanos[kind as usize] += took.as_nanos() as u64;
        self.snapshot.errors += u64::from(failed);
        self.snapshot.bytes_read += read;
        self.snapshot.bytes_written += written;
    }

    /// Adds the counts to `counters`, and resets them.
    pub fn flush(&mut self, counters: &[&ScsiCounters]) {
        if !std::mem::take(&mut self.any) {
            return;
        }
        counters.iter().for_each(|counters| counters.add(&self.snapshot));
        self.snapshot = ScsiCounts::default();
    }
}

impl ScsiCounters {
    fn add(&self, more: &ScsiCounts) {
        let add = |counter: &AtomicU64, more: u64| {
            if more > 0 {
                counter.fetch_add(more, Ordering::Relaxed);
            }
        };
        self.commands.iter().zip(more.commands).for_each(|(counter, more)| add(counter, more));
        self.nanos.iter().zip(more.nanos).for_each(|(counter, more)| add(counter, more));
        add(&self.errors, more.errors);
        add(&self.bytes_read, more.bytes_read);
        add(&self.bytes_written, more.bytes_written);
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> ScsiCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ScsiCounts {
            commands: std::array::from_fn(|kind| get(&self.commands[kind])),
            nanos: std::array::from_fn(|kind| get(&self.nanos[kind])),
            errors: get(&self.errors),
            bytes_read: get(&self.bytes_read),
            bytes_written: get(&self.bytes_written),
        }
    }
}

/// Connection counters, for events other than commands.
#[derive(Debug, Default)]
pub struct ConnectionCounters {
    accepted: AtomicU64,
    turned_away: AtomicU64,
    logins_refused: AtomicU64,
    ended_for_cause: AtomicU64,
}

/// Snapshot of the connection counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionSnapshot {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections rejected because there were too many.
    pub turned_away: u64,
    /// Logins refused.
    pub logins_refused: u64,
    /// Connections ended for breaking the protocol, or for taking too long to log in.
    pub ended_for_cause: u64,
}

/// Connection event that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEvent {
    /// Connection accepted.
    Accepted,
    /// Connection rejected because there were too many.
    TurnedAway,
    /// Login refused.
    LoginRefused,
    /// Connection ended for cause.
    EndedForCause,
}

impl ConnectionCounters {
    /// Counts one event.
    pub fn count(&self, event: ConnectionEvent) {
        let counter = match event {
            ConnectionEvent::Accepted => &self.accepted,
            ConnectionEvent::TurnedAway => &self.turned_away,
            ConnectionEvent::LoginRefused => &self.logins_refused,
            ConnectionEvent::EndedForCause => &self.ended_for_cause,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> ConnectionSnapshot {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ConnectionSnapshot {
            accepted: get(&self.accepted),
            turned_away: get(&self.turned_away),
            logins_refused: get(&self.logins_refused),
            ended_for_cause: get(&self.ended_for_cause),
        }
    }
}
