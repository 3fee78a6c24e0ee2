//! Volumes over the NBD protocol.
//!
//! [`serve::Server`] accepts connections and serves what [`serve::Exports`] offers; one server a core, all on one
//! shared listener.  [`session`] is the protocol without any I/O, [`wire`] its bytes, [`stats`] what is counted.
//! What is offered of the protocol and what is left out is in `docs/design/nbd.md`.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod serve;
pub mod session;
pub mod stats;
pub mod wire;

pub use serve::{Export, ExportSummary, Exports, Options, Server};
pub use stats::Stats;
