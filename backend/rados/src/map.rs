//! Cluster maps, as distributed by the monitors: monitor addresses, OSDs, pools, and placement of placement groups.

mod blocklist;
mod incremental;
mod monmap;
mod osdmap;
mod place;
mod pool;
#[cfg(test)]
pub(crate) mod tests;

pub use incremental::Incremental;
pub use monmap::{MonMap, Monitor};
pub use osdmap::{OsdMap, flags};
pub use place::{Mapping, PgId};
pub use pool::{PgPool, PoolKind, pool_flags};

/// Cluster fsid.
pub type Fsid = [u8; 16];
/// Version number of a map.
pub type Epoch = u32;

/// Reason why a map is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// Encoding that this client cannot read.
    #[error(transparent)]
    Malformed(#[from] forebay_messenger::wire::MalformedPayload),
    /// Checksum mismatch: damaged in transit or in storage.
    #[error("checksum mismatch in the OSD map of epoch {epoch}: calculated {found:#010x}, stated {said:#010x}")]
    Checksum {
        /// Epoch of the map.
        epoch: Epoch,
        /// Computed checksum.
        found: u32,
        /// Stored checksum.
        said: u32,
    },
    /// Map of another cluster.
    #[error("the map belongs to another cluster (fsid mismatch)")]
    Cluster,
    /// Incremental map that does not follow the current map.
    #[error("incremental map to epoch {got} does not apply to the map of epoch {have}")]
    Order {
        /// Epoch of the current map.
        have: Epoch,
        /// Epoch of the incremental map.
        got: Epoch,
    },
}
