//! Objects in memory, lost when the daemon stops; the plain model that the other backends are tested against.
//!
//! [`RamBackend`] does every operation at once, within the call, and answers with a future that is ready.  It needs
//! no reactor.  Snapshots follow RADOS: the first write after a snapshot keeps the object's state as a clone.
//!
//! With the feature `conformance`, `forebay_ram::conformance` has what every
//! [`ObjectBackend`](forebay_block::ObjectBackend) must do, as tests to be called from any backend's own tests.  With
//! the feature `cluster`, `forebay_ram::cluster` has pools that several clients use at once, with the object classes
//! `lock` and `rbd`, watch and notify, and a blocklist: the plain model of what RADOS shares.

mod backend;
#[cfg(feature = "cluster")]
pub mod cluster;
#[cfg(feature = "conformance")]
pub mod conformance;
mod content;
mod object;

pub use backend::RamBackend;
