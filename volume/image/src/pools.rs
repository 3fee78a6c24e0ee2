//! Pools of an open image: of its metadata, and of its data.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{ObjectBackend, Result};

use crate::format::ImageHeader;
use crate::images::Images;

/// Pools of an open image, and whether hosts use them.
///
/// Invariant: once in use, always in use, and every pool that is opened for the image after that is marked.
pub(crate) struct ImagePools {
    /// Registry of open images that lists this one, kept alive.
    images: Rc<Images>,
    data: Rc<dyn ObjectBackend>,
    in_use: Cell<bool>,
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
        Ok(Self { images: images.clone(), data, in_use: Cell::new(in_use) })
    }

    pub(crate) fn images(&self) -> &Rc<Images> {
        &self.images
    }

    /// Returns the pool of the metadata.
    pub(crate) fn metadata(&self) -> &Rc<dyn ObjectBackend> {
        self.images.backend()
    }

    /// Returns the pool of the data.
    pub(crate) fn data(&self) -> &Rc<dyn ObjectBackend> {
        &self.data
    }

    /// Marks the pools as in use by hosts.
    pub(crate) fn mark_in_use(&self) {
        self.in_use.set(true);
        mark_in_use(self.metadata());
        mark_in_use(&self.data);
    }

    pub(crate) fn is_in_use(&self) -> bool {
        self.in_use.get()
    }

    /// Makes completed changes durable: those of the data, and those of the metadata if they are in another pool.
    pub(crate) async fn flush(&self) -> Result<()> {
        let data = self.data.flush().await;
        if std::ptr::addr_eq(Rc::as_ptr(&self.data), Rc::as_ptr(self.metadata())) {
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
