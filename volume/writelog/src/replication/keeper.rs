//! Access of replication to what is outside: the record of a log's members, fences of the backend, connections to peers.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{LocalFuture, Result};
use forebay_messenger::Connection;

use super::{LeaseClock, MemberRecord, RequestGroups};
use crate::format::{KeyCheck, LogId};

/// Id of a peer: of its data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PeerId(pub [u8; 16]);

impl std::fmt::Display for PeerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&crate::id_text(&self.0))
    }
}

/// Record of the members of a log, whose backend clients are named by text.
pub type LogMembers = MemberRecord<PeerId, String>;

/// Outcome of a change of the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordChange {
    /// Record stored.
    Changed,
    /// Record left as it is, which is another one. `None` if it names no members of this log any more.
    Other(Option<LogMembers>),
}

/// Access of a peer to the record of one log, to the backend, and to other peers.
pub trait MemberKeeper {
    /// Returns this peer.
    fn own(&self) -> PeerId;

    /// Returns the client of the backend through which this peer writes the volume, if it opens the log. Another one once it
    /// was fenced.
    fn client(&self) -> String;

    /// Reads the members of the log; `None` if the record does not name the log.
    ///
    /// # Errors
    /// If the record cannot be read.
    fn load(&self) -> LocalFuture<Result<Option<LogMembers>>>;

    /// Fences a client of the backend: once this has ended, nothing of it reaches the volume any more, whenever it was sent.
    ///
    /// # Errors
    /// If that is not known to have happened.
    fn fence(&self, client: &str) -> LocalFuture<Result<()>>;

    /// Replaces the record `from` by `to`, durably, if it is still `from`.
    ///
    /// # Errors
    /// If that is not known to have happened; it is tried again.
    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>>;

    /// Returns the connection to a peer, if there is one.
    fn connection(&self, peer: PeerId) -> Option<Connection>;

    /// Returns what sends requests of several logs to a peer in one message. A log that has none sends its own requests so.
    fn groups(&self) -> Option<Rc<RequestGroups>> {
        None
    }

    /// Returns the peers that are to have a copy.
    fn wanted(&self) -> Vec<PeerId>;

    /// Returns the policy of the log, as its record has it.
    fn policy(&self) -> ReplicaPolicy {
        ReplicaPolicy::default()
    }

    /// Waits until this peer has kept its promise to the log's primary not to take over.
    fn promise_over(&self) -> LocalFuture<()>;
}

/// Policy of a log that has members, which its record keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaPolicy {
    /// Length of the primary's lease, at least a millisecond. The same as long as the log exists.
    pub lease: Duration,
    /// Set if a replica takes over by itself when the primary's lease has run out.
    pub automatic: bool,
    /// Number of complete replicas below which writes are not acknowledged.
    pub replicas_min: u32,
}

impl Default for ReplicaPolicy {
    fn default() -> Self {
        Self { lease: Duration::from_millis(500), automatic: false, replicas_min: 0 }
    }
}

/// Times and sizes of replication.
#[derive(Debug, Clone, Copy)]
pub struct ReplicationOptions {
    /// Time without progress after which a replica is dropped from the record.
    pub patience: Duration,
    /// Time between attempts to reach a replica.
    pub retry: Duration,
    /// Maximum bytes of entries on their way to one replica.
    pub window: usize,
    /// Bytes of appended entries that are kept in memory for replicas.
    pub recent: usize,
    /// Clock of the primary's lease.
    pub clock: LeaseClock,
    /// Write into windows onto replicas' copies by messages, too, which is slower than sending whole blocks: for tests.
    pub windows_by_message: bool,
}

impl Default for ReplicationOptions {
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(1),
            retry: Duration::from_millis(100),
            window: 8 << 20,
            recent: 8 << 20,
            clock: LeaseClock::default(),
            windows_by_message: false,
        }
    }
}

/// Volume and geometry of a log, which a new copy of it needs.
#[derive(Debug, Clone)]
pub struct LogIdentity {
    /// Log id.
    pub log: LogId,
    /// Identity of the volume.
    pub volume: String,
    /// Name of the volume, for messages.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Unit in bytes.
    pub unit: u32,
    /// Check value of the key that payloads are encrypted with.
    pub encryption: Option<KeyCheck>,
}
