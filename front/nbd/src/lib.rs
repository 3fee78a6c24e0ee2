//! NBD server for volumes.
//!
//! [`serve::NbdServer`] accepts connections and serves the exports of [`serve::ExportSource`].  There is one server per
//! core, and all share one listener.  [`session`] is the protocol without any I/O, [`wire`] the encodings,
//! [`stats`] the counters, [`access`] the access control, [`kernel`] what sets up the kernel's client.
//! Supported and omitted features of the protocol are listed in `docs/design/nbd.md`.

pub mod access;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod kernel;
pub mod serve;
pub mod session;
pub mod stats;
pub mod wire;

pub use serve::{ExportSource, ExportSummary, NbdExport, NbdListenerOptions, NbdServer, NbdServerOptions};
pub use session::Tls;
pub use stats::NbdStats;
