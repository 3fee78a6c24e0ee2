//! In-memory objects, lost when the daemon stops; the reference model that the other backends are tested against.
//!
//! [`RamBackend`] executes every operation synchronously, within the call, and returns a future that is ready.  It
//! needs no reactor.  Snapshots follow RADOS: the first write after a snapshot preserves the object's state as a clone.
//!
//! For tests there are [`conformance`], the requirements on every [`ObjectBackend`](forebay_block::ObjectBackend), to be
//! called from any backend's own tests, and [`cluster`], pools shared by several clients, with the object classes `lock`
//! and `rbd`, watch and notify, and a blocklist: a reference model of RADOS's shared state.  Neither is a feature:
//! programs built with different ones would each be compiled against a crate of their own.

mod backend;
pub mod cluster;
pub mod conformance;
mod content;
mod object;

pub use backend::RamBackend;
