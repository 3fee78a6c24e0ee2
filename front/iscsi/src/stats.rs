//! Statistics counters, readable from any thread: per unit and per session, and for all connections.

use std::sync::atomic::{AtomicU64, Ordering};

pub use forebay_scsi::stats::{ScsiCommandKind, ScsiCounters, ScsiCounts};

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
