//! NVMe/TCP target for volumes.
//!
//! [`Subsystems`] is the state shared by all cores: each [`Subsystem`] with its namespaces, controllers and
//! hosts.  An [`NvmeServer`] on each core accepts connections.  A connection is one queue, and stays on the core that
//! accepted it.  [`session`] is the protocol without any I/O, [`wire`] the encodings, [`stats`] the counters.
//! Supported and omitted features of the protocol are listed in `docs/design/nvmf.md`.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod serve;
pub mod session;
pub mod stats;
pub mod subsystem;

pub mod wire;

pub use serve::{NamespaceDevices, NvmeServer};
pub use stats::NvmeStats;
pub use subsystem::{
    AnaGrouping, HostAccess, HostLimits, MemberPort, Namespace, NamespaceError, Port, PortAddress, Subsystem,
    SubsystemExists, Subsystems,
};
