//! Peers of the model: what each keeps on its medium, and what its process knows.

use forebay_writelog::LogId;
use forebay_writelog::replication::{LeasePromise, LogShape, PrimaryLease, PrimaryProgress, ReplicaLog};

use crate::backend::{Client, Record};

/// Medium of a peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Disk {
    /// Set once the medium of a primary has failed; that of a replica is replaced by a blank one.
    pub failed: bool,
    /// Copy of the log.
    pub copy: ReplicaLog,
    /// Content of each entry by number; 0 for those that the copy never had.
    pub values: Vec<u8>,
}

impl Disk {
    /// Returns a blank medium; no two have the same number.
    pub fn blank(number: u8) -> Self {
        Self { copy: ReplicaLog::new([number; 16], 0, LogShape::default()), ..Self::default() }
    }

    /// Returns the newest number in the copy; 0 without entries.
    pub fn newest(&self) -> u8 {
        self.values.last().copied().unwrap_or(0)
    }

    /// Makes the values as many as the copy has entries, after an adoption.
    pub fn cut(&mut self) {
        self.values.resize(self.copy.log().head() as usize, 0);
    }
}

/// Role of a peer's process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PeerRole {
    /// Follows a primary, or does nothing.
    Idle,
    /// Opens the log as its primary, or takes it over; takes no entries from others.
    Opening(Opening),
    /// Serves the volume, or waits until it may.
    Primary(Box<Serving>),
}

/// Opening of the log.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Opening {
    /// Record that the opening began with.
    pub seen: Record,
    /// Set once the last primary's client is fenced.
    pub fenced: bool,
    /// Set once the change of the record was sent.
    pub sent: bool,
}

/// State of a primary.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Serving {
    /// Progress of the members.
    pub progress: PrimaryProgress<u8, Client>,
    /// Entries, those on the way to the medium among them.
    pub log: LogShape,
    /// Content of each entry by number.
    pub values: Vec<u8>,
    /// Entry that is being written back.
    pub writing: Option<u64>,
    /// Number of the first entry that was not written back.
    pub written: u64,
    /// Lease for reads.
    pub lease: PrimaryLease<u8>,
}

/// State of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerState {
    /// Number of times that the process was started.
    pub starts: u8,
    /// Medium with its copy of the log.
    pub disk: Disk,
    /// Promise to the primary that it follows.
    pub promise: LeasePromise,
    /// Role of the process.
    pub role: PeerRole,
}

/// Message between peers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// Asks a replica to follow a primary.
    Adopt {
        /// Peer that receives it.
        to: u8,
        /// Term of the primary.
        term: u64,
        /// Id of the receiver's copy, by the record.
        copy: LogId,
        /// Shape of the log when it was opened.
        base: LogShape,
    },
    /// Sends an entry.
    Append {
        /// Peer that receives it.
        to: u8,
        /// Term of the primary.
        term: u64,
        /// Number of the entry.
        number: u64,
        /// Term in which the entry was appended.
        entry_term: u64,
        /// Number that the host wrote.
        value: u8,
    },
    /// Tells a replica that entries before `tail` are retired.
    Retire {
        /// Peer that receives it.
        to: u8,
        /// Term of the primary.
        term: u64,
        /// Number of the oldest entry that is not retired.
        tail: u64,
    },
    /// Asks a member for its promise.
    AskLease {
        /// Peer that receives it.
        to: u8,
        /// Term of the primary.
        term: u64,
        /// Time of sending.
        sent: u64,
    },
    /// Answers with the promise.
    GrantLease {
        /// Peer that sends it.
        from: u8,
        /// Term of the primary.
        term: u64,
        /// Time at which the question was sent.
        sent: u64,
    },
    /// Tells the primary what a replica holds durably.
    Holds {
        /// Peer that sends it.
        from: u8,
        /// Term that it follows.
        term: u64,
        /// Id of its copy.
        copy: LogId,
        /// Number of the first entry that it lacks.
        head: u64,
        /// Number of the oldest entry that it has not retired.
        tail: u64,
    },
}
