//! Replication of a write log: who has which entries, and who may acknowledge, take over and write back.
//!
//! `record`, `shape`, `replica`, `primary` and `lease` are state machines without I/O.
//! `docs/design/replication.md` has the protocol and its invariants, and `test/replication-model` explores these very types
//! exhaustively.  [`wire`] is what a primary and its replicas say to each other.

mod control;
mod copies_watch;
mod groups;
pub mod hello;
mod host;
mod keeper;
mod lease;
mod member;
mod mirror;
mod one_sided;
mod open;
mod open_copy;
mod peers;
mod primary;
mod promises;
mod raw;
mod record;
mod replica;
mod report;
mod set;
mod shape;
pub mod wire;

pub use groups::RequestGroups;
pub use host::{ReplicaHost, ReplicaShelf};
pub use keeper::{LogIdentity, LogMembers, MemberKeeper, PeerId, RecordChange, ReplicaPolicy, ReplicationOptions};
pub use lease::{LeasePromise, PrimaryLease};
pub use open::{LogOpening, OpenedMembers, open_members, open_primary};
pub use peers::{KnownPeer, KnownPeers, PeerUnknown, is_at};
pub use primary::PrimaryProgress;
pub use promises::LeaseClock;
pub use raw::{AppendCursor, CopyStart, RawAppend};
pub use record::{ChangeRefused, MemberEntry, MemberRecord, MemberState};
pub use replica::{Adoption, AppendRefused, ReplicaLog};
pub use report::MemberReport;
pub use set::PrimarySet;
pub use shape::{LogShape, TermSpan};
