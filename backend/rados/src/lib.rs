//! Native RADOS client: speaks to the monitors and OSDs of a Ceph cluster without Ceph's libraries.
//!
//! [`CephConfig`] is the configuration common to all Ceph clients.  [`RadosCluster`] is a client on one core: a session
//! with the monitors, the maps, and a session with each OSD.  [`RadosPool`] is one of the cluster's pools, an
//! [`ObjectBackend`](forebay_block::ObjectBackend).  `docs/design/rados.md` describes how the parts work together.

mod cluster;
pub mod config;
pub mod crush;
mod denc;
mod error;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod map;
mod monitor;
mod osd;
mod pool;

pub use cluster::{ClusterStatus, RadosCluster};
pub use config::{CephConfig, Credentials, Environment, Flags, Settings};
pub use pool::{AttrOp, RadosPool};
