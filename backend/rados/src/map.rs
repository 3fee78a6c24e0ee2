//! What the cluster is, as its monitors say: their own addresses, OSDs, pools, and where placement groups are.

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
pub use pool::{Pool, PoolKind, pool_flags};

/// A cluster's identity.
pub type Fsid = [u8; 16];
/// Counts a map's versions.
pub type Epoch = u32;

/// Why a map is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MapError {
    /// It is not in an encoding that this client reads.
    #[error(transparent)]
    Malformed(#[from] forebay_messenger::wire::Malformed),
    /// It was damaged on its way, or where it was kept.
    #[error("a map of epoch {epoch} has checksum {found:#010x}, and says {said:#010x}")]
    Checksum {
        /// The map's.
        epoch: Epoch,
        /// Calculated.
        found: u32,
        /// Stated.
        said: u32,
    },
    /// It is of another cluster.
    #[error("a map is of another cluster")]
    Cluster,
    /// It does not follow on the map that we have.
    #[error("a change to epoch {got} came on a map of epoch {have}")]
    Order {
        /// Ours.
        have: Epoch,
        /// The change's.
        got: Epoch,
    },
}
