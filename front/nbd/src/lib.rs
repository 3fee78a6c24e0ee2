//! NBD server for volumes.
//!
//! [`serve::Server`] accepts connections and serves the exports of [`serve::Exports`].  There is one server per
//! core, and all share one listener.  [`session`] is the protocol without any I/O, [`wire`] the encodings,
//! [`stats`] the counters, [`access`] the access control.
//! Supported and omitted features of the protocol are listed in `docs/design/nbd.md`.

pub mod access;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod serve;
pub mod session;
pub mod stats;
pub mod wire;

pub use serve::{Export, ExportSummary, Exports, Options, Server};
pub use session::Tls;
pub use stats::Stats;
