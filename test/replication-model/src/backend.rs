//! Backend of the model: the record, the fenced clients, and what the image holds.

use std::collections::BTreeSet;

use forebay_writelog::replication::MemberRecord;

/// Client of the backend: a peer, and how often its process was started when it connected.
pub type Client = (u8, u8);

/// Client in the record of a log that was closed: no operation is its.
pub const NOBODY: Client = (u8::MAX, 0);

/// Record of the members.
pub type Record = MemberRecord<u8, Client>;

/// Operation that a client has sent; the backend applies it at some time, or never.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackendOp {
    /// Write-back of an entry.
    Write {
        /// Client that sent it.
        client: Client,
        /// Term of the primary that sent it.
        term: u64,
        /// Number of the entry.
        number: u64,
        /// Number that the host wrote.
        value: u8,
    },
    /// Compare-and-set of the record.
    Change {
        /// Client that sent it.
        client: Client,
        /// Epoch that the record must have.
        expected: u64,
        /// Record that replaces it.
        record: Record,
    },
}

impl BackendOp {
    /// Returns the client that sent it.
    pub fn client(&self) -> Client {
        match self {
            Self::Write { client, .. } | Self::Change { client, .. } => *client,
        }
    }
}

/// Backend: everything that outlives the peers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Record of the members.
    pub record: Record,
    /// Newest number that was written back; 0 is an image that was never written.
    pub value: u8,
    /// Clients whose operations are refused for good.
    pub fenced: BTreeSet<Client>,
    /// Operations that were sent and not applied yet.
    pub ops: BTreeSet<BackendOp>,
}
