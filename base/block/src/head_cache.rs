//! Read-through cache of an image's own data, while no other client changes it.

use crate::device::LocalFuture;
use crate::error::Result;
use crate::extent::Extent;
use crate::object::SparseData;
use crate::snapshot_cache::SnapshotFetch;

/// Read of an object of an image's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadRead {
    /// Number of the object within the image.
    pub object: u64,
    /// Size of the image's objects in bytes.
    pub object_size: u64,
    /// Range within the object.
    pub extent: Extent,
}

/// Generation of the cached blocks of one image: what is cached in one is never returned in another.
///
/// The image calls [`begin_change`](Self::begin_change) before it submits a change of an object, and
/// [`end_change`](Self::end_change) when the change has completed.  It reads through a generation only while no
/// other client can change the image.  Then a read returns what [`ObjectBackend::read`](crate::ObjectBackend::read) could have
/// returned at the same time.
pub trait HeadGeneration {
    /// Reads a range, from the cache or by `fetch`, which may be called for a larger range of the object.  Returns the
    /// stored extents, or `NotFound`.
    fn read(&self, read: HeadRead, fetch: SnapshotFetch) -> LocalFuture<Result<SparseData>>;

    /// Begins a change of a range of an object: nothing of it is cached any more, nor until the change has ended.
    fn begin_change(&self, object: u64, extent: Extent);

    /// Ends a change with the same arguments.  One whose outcome is unknown never ends.
    fn end_change(&self, object: u64, extent: Extent);
}
