//! Replication of a write log: who has which entries, and who may acknowledge, take over and write back.
//!
//! Everything here is a state machine without I/O.  `docs/design/replication.md` has the protocol and its invariants, and
//! `test/replication-model` explores these very types exhaustively.

mod lease;
mod primary;
mod record;
mod replica;
mod shape;

pub use lease::{LeasePromise, PrimaryLease};
pub use primary::PrimaryProgress;
pub use record::{ChangeRefused, MemberEntry, MemberRecord, MemberState};
pub use replica::{AppendRefused, ReplicaLog};
pub use shape::{LogShape, TermSpan};
