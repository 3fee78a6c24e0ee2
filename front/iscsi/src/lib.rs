//! Volumes over iSCSI (RFC 7143) as SCSI disks (SPC-4, SBC-3).
//!
//! [`serve::Server`] accepts connections and serves the units of a [`site::Site`]; one server a core, all on one
//! shared listener.  [`session`] is the protocol without any I/O, [`wire`] its bytes, [`scsi`] what units say and
//! understand, [`mod@unit`] what cores share.  What is offered and what is left out is in `docs/design/iscsi.md`.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod scsi;
pub mod serve;
pub mod session;
pub mod signal;
pub mod site;
pub mod stats;
pub mod unit;
pub mod wire;

pub use serve::{Devices, Options, Server};
pub use session::chap::{Chap, Credential};
pub use site::{Gatekeeping, Limits, LunOutOfRange, Site};
pub use unit::{Space, UnitSpec};
