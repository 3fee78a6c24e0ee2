//! Volumes over NVMe/TCP.
//!
//! [`Target`] is the subsystem that all cores share: its namespaces, controllers and hosts.  A [`Server`] on each core
//! accepts connections, and a connection is one queue, which stays on the core that took it.  [`session`] is the
//! protocol without any I/O, [`wire`] its bytes, [`stats`] what is counted.
//! What is offered of the protocol and what is left out is in `docs/design/nvmf.md`.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod serve;
pub mod session;
pub mod stats;
pub mod target;
pub mod wire;

pub use serve::{Devices, Server};
pub use stats::Stats;
pub use target::{Access, Limits, Namespace, NamespaceError, Port, PortAddress, Target};
