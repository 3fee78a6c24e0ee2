//! Read-through cache of data that never changes: objects of an image at a snapshot.

use std::rc::Rc;

use crate::device::LocalFuture;
use crate::error::Result;
use crate::extent::Extent;
use crate::head_cache::HeadGeneration;
use crate::object::{SnapId, SparseData};

/// Identity of a pool across clusters and stores; it is never given to another pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolIdentity {
    /// UUID of the cluster (its fsid), or of the embedded store.
    pub store: [u8; 16],
    /// Pool id within it.
    pub pool: i64,
}

/// Identity of an image at a snapshot: of bytes that never change.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotIdentity {
    /// Pool of the data objects, which is also the one that numbers the snapshots.
    pub pool: PoolIdentity,
    /// Image id.
    pub image: Rc<str>,
    /// Snapshot; never [`SnapId::HEAD`].
    pub snap: SnapId,
}

/// Read of an object of an image at a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotRead {
    /// Image at its snapshot.
    pub snapshot: SnapshotIdentity,
    /// Number of the object within the image.
    pub object: u64,
    /// Size of the image's objects in bytes.
    pub object_size: u64,
    /// Range within the object.
    pub extent: Extent,
    /// True if an absent object reads as data of the image's own parent.  The object may be copied up, and the parent
    /// detached, so its absence is not remembered beyond that.
    pub inherits: bool,
}

/// Reads a range of the object from its backend; errors as [`ObjectBackend::read`](crate::ObjectBackend::read).
pub type SnapshotFetch = Rc<dyn Fn(Extent) -> LocalFuture<Result<SparseData>>>;

/// Cache that all clones of one core share.
///
/// Dropping a future of [`read`](Self::read) does not cancel the fetch, for which others may wait.
pub trait SnapshotCache {
    /// Reads a range, from the cache or by `fetch`, which may be called for a larger range of the object.  Returns what
    /// [`ObjectBackend::read`](crate::ObjectBackend::read) would: stored extents, or `NotFound`.
    fn read(&self, read: SnapshotRead, fetch: SnapshotFetch) -> LocalFuture<Result<SparseData>>;

    /// Begins a generation of blocks of an image's head; `None` if the cache keeps snapshots only.
    fn begin_generation(&self, _image: &str) -> Option<Rc<dyn HeadGeneration>> {
        None
    }
}
