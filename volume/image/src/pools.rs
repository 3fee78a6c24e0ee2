//! Pools of an open image: of its metadata, and of its data.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    BackendInfo, DataKey, ExtentMap, LocalFuture, ObjectBackend, ObjectName, ObjectRead, ObjectStat, PoolIdentity,
    Result, SnapId, SnapSet, SparseData, StoredBytes, Transaction,
};

use crate::format::ImageHeader;
use crate::images::Images;

/// Pools of an open image, and whether hosts use them.
///
/// Invariant: once in use, always in use, and every pool that is opened for the image after that is marked.
pub(crate) struct ImagePools {
    /// Registry of open images that lists this one, kept alive.
    images: Rc<Images>,
    data: DataPool,
    in_use: Cell<bool>,
}

/// Pool of an image's data objects.
///
/// It has no `submit`: every change of a data object goes through
/// [`OpenImage::change_data`](crate::open_image::OpenImage::change_data), which keeps the cache of own blocks true.
#[derive(Clone)]
pub(crate) struct DataPool(Rc<dyn ObjectBackend>);

impl DataPool {
    /// Submits a change of an object, past the cache of own blocks.
    pub(crate) fn submit_uncached(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        self.0.submit(object, transaction)
    }

    pub(crate) fn info(&self) -> BackendInfo {
        self.0.info()
    }

    pub(crate) fn identity(&self) -> Option<PoolIdentity> {
        self.0.identity()
    }

    pub(crate) fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        self.0.read(object, read)
    }

    pub(crate) fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        self.0.map(object, read)
    }

    pub(crate) fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        self.0.stat(object, snap)
    }

    /// Returns whether objects whose names begin with `prefix` are encrypted.
    pub(crate) fn is_encrypted(&self, prefix: &ObjectName) -> bool {
        self.0.is_encrypted(prefix)
    }

    /// Returns the key for the write log of a volume.
    pub(crate) fn log_key(&self, prefix: &ObjectName) -> Result<Option<DataKey>> {
        self.0.log_key(prefix)
    }

    /// Returns whether the pool knows what an object's data takes on the device.
    pub(crate) fn has_policies(&self) -> bool {
        self.0.data_policy(&ObjectName::new("")).is_ok()
    }

    pub(crate) fn stored_bytes(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<Option<StoredBytes>>> {
        self.0.stored_bytes(object, snap)
    }

    pub(crate) fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        self.0.snap_set(object)
    }

    pub(crate) fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        self.0.snap_allocate()
    }

    pub(crate) fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        self.0.snap_remove(snap)
    }

    pub(crate) fn list_between(
        &self,
        names: Range<ObjectName>,
        max: usize,
    ) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        self.0.list_between(names, max)
    }

    pub(crate) fn flush(&self) -> LocalFuture<Result<()>> {
        self.0.flush()
    }
}

impl ImagePools {
    /// Opens the pools of an image by its header.
    pub(crate) async fn open(images: &Rc<Images>, header: &ImageHeader, in_use: bool) -> Result<Self> {
        let backend = images.backend();
        let data = match (header.data_pool, backend.shared()) {
            (Some(pool), Some(shared)) => shared.pool(pool).await?,
            _ => backend.clone(),
        };
        if in_use {
            mark_in_use(&data);
        }
        Ok(Self { images: images.clone(), data: DataPool(data), in_use: Cell::new(in_use) })
    }

    pub(crate) fn images(&self) -> &Rc<Images> {
        &self.images
    }

    /// Returns the pool of the metadata.
    pub(crate) fn metadata(&self) -> &Rc<dyn ObjectBackend> {
        self.images.backend()
    }

    /// Returns the pool of the data.
    pub(crate) fn data(&self) -> &DataPool {
        &self.data
    }

    /// Marks the pools as in use by hosts.
    pub(crate) fn mark_in_use(&self) {
        self.in_use.set(true);
        mark_in_use(self.metadata());
        mark_in_use(&self.data.0);
    }

    pub(crate) fn is_in_use(&self) -> bool {
        self.in_use.get()
    }

    /// Makes completed changes durable: those of the data, and those of the metadata if they are in another pool.
    pub(crate) async fn flush(&self) -> Result<()> {
        let data = self.data.flush().await;
        if std::ptr::addr_eq(Rc::as_ptr(&self.data.0), Rc::as_ptr(self.metadata())) {
            return data;
        }
        // Both are tried: a data pool that is full does not keep changes of the metadata from becoming durable.
        let metadata = self.metadata().flush().await;
        data.and(metadata)
    }
}

/// Marks a shared pool as in use: requests that would fail for a revocable setting wait instead.
pub(crate) fn mark_in_use(pool: &Rc<dyn ObjectBackend>) {
    if let Some(shared) = pool.shared() {
        shared.mark_in_use();
    }
}
