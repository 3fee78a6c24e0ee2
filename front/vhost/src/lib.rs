//! vhost-user back-end for volumes: virtual machines attach them through shared memory.
//!
//! [`serve::VhostServer`] serves each export on a socket of its own.  [`session`] is the protocol without any I/O, [`wire`]
//! the encodings of its messages, [`rings`] the device side of virtqueues, [`block`] the virtio-blk device, [`memory`] the
//! guest's memory, [`stats`] the counters.  Supported and omitted features are listed in `docs/design/vhost.md`.

pub mod block;
mod config_space;
pub mod dirty_log;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod inflight;
pub mod iotlb;
pub mod memory;
pub mod rings;
pub mod scsi;
pub mod serve;
pub mod session;
pub mod stats;
pub mod wire;

pub use serve::{VhostExport, VhostScsiTarget, VhostServer, VhostSocket, VhostVolume};
pub use stats::VhostStats;
