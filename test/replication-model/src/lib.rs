//! The replication protocol of write logs as a model: peers with the state machines of `forebay_writelog::replication`,
//! a backend that keeps the record, fences clients and applies their writes late, a network that loses, repeats and
//! reorders messages, and a host that writes numbers.
//!
//! The model explores every order of events within its [`Limits`].  `docs/design/replication.md` has the protocol.

mod backend;
mod explore;
mod model;
mod peer;
mod recovery;
mod step;

pub use backend::{Backend, BackendOp, Client, Record};
pub use explore::{Exploration, explore};
pub use model::{Limits, ModelAction, ModelState, Omission, ReplicationModel};
pub use peer::{Disk, Message, Opening, PeerRole, PeerState, Serving};
