//! A native RADOS client: it speaks to a Ceph cluster's monitors and OSDs without Ceph's libraries.
//!
//! [`Config`] is what every Ceph client is told.  [`Cluster`] is a client on one core: a session with the monitors, the
//! maps, and a session with each OSD.  [`RadosPool`] is one of its pools, an
//! [`ObjectBackend`](forebay_block::ObjectBackend).  How the parts work together is in `docs/design/rados.md`.

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

pub use cluster::{Cluster, ClusterStatus};
pub use config::{Config, Credentials, Flags, Settings, Surroundings};
pub use pool::{AttrOp, RadosPool};
