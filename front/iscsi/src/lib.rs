//! iSCSI target (RFC 7143) that exports volumes as SCSI disks (SPC-4, SBC-3).
//!
//! [`serve::IscsiServer`] accepts connections and serves the logical units of all [`targets::Targets`]. There is one
//! server per core, all on one shared listener.  [`session`] is the protocol without I/O, [`wire`] its PDU formats,
//! and [`scsi`] the disks behind it. `docs/design/iscsi.md` lists the supported and the omitted features.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod locks;
mod memory;
pub mod port_groups;
pub mod serve;
pub mod session;
pub mod sessions;
pub mod signal;
pub mod stats;
pub mod target;
pub mod targets;
pub mod wire;

pub use forebay_scsi as scsi;
pub use forebay_scsi::unit;
pub use port_groups::{PortGroups, PortGroupsError, RemotePortGroup};
pub use scsi::ports::{AccessState, TargetPort};
pub use scsi::target::{AddError, LunOutOfRange};
pub use serve::{IscsiServer, IscsiServerOptions, UnitDevices};
pub use session::chap::{Chap, Credential};
pub use target::{AccessControl, Target, TargetSpec, TargetTeardown};
pub use targets::{Exists, TargetLimits, Targets};
pub use unit::{PoolSpace, UnitSpec};
