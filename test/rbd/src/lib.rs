//! Clones of an image in a cluster in memory, for tests and measurements of the read cache.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, Buf, Extent, ObjectBackend, Result};
use forebay_image::{CreateOptions, Image, ImageFeatures, ImageOpenOptions};
use forebay_load::counted::CountedBackend;
use forebay_ram::cluster::rbd::ClosedImage;
use forebay_ram::cluster::{RamClient, RamCluster};

/// Number of the pool.
pub const POOL: i64 = 1;

/// A pool with images, as one client has it.
pub struct ClonePool {
    /// Pool, counted.
    pub pool: Rc<CountedBackend>,
    backend: Rc<dyn ObjectBackend>,
    object_size: u64,
}

impl ClonePool {
    /// Opens the pool of a cluster as a new client, whose reads take `delay`.
    pub fn of(cluster: &RamCluster, object_size: u64, delay: Duration) -> Self {
        Self::of_client(&cluster.client(), object_size, delay)
    }

    /// Opens the pool as a client, whose reads take `delay`.
    pub fn of_client(client: &RamClient, object_size: u64, delay: Duration) -> Self {
        let pool = CountedBackend::new(client.pool(POOL), delay);
        Self { backend: pool.clone(), pool, object_size }
    }

    /// Creates an empty image.
    pub async fn create(&self, name: &str, size: u64) -> Result<()> {
        let options = CreateOptions { size, object_size: self.object_size, ..CreateOptions::default() };
        forebay_image::create(&self.backend, name, options).await
    }

    /// Opens an image.
    pub async fn open(&self, name: &str) -> Result<Rc<Image>> {
        Image::open(self.backend.clone(), name, ImageOpenOptions::default()).await
    }

    /// Writes to an image.
    pub async fn write(&self, image: &Image, offset: u64, data: &[u8]) -> Result<()> {
        let request = BlockRequest::Write { offset, data: Buf::copy_of(data).into(), fua: false };
        image.submit(request).await.map(drop)
    }

    /// Reads from an image.
    pub async fn read(&self, image: &Image, extent: Extent) -> Result<Vec<u8>> {
        Ok(image.submit(BlockRequest::Read(extent)).await?.into_data().to_vec())
    }

    /// Returns the pool as a backend.
    pub fn backend(&self) -> &Rc<dyn ObjectBackend> {
        &self.backend
    }

    async fn closed(&self, name: &str, overlap: Option<u64>) -> Result<ClosedImage> {
        let info = forebay_image::info(&self.backend, name).await?;
        let mapped = info.features.has(ImageFeatures::OBJECT_MAP).then(|| info.size.div_ceil(info.object_size));
        Ok(ClosedImage { id: info.id, size: info.size, mapped, overlap })
    }

    /// Takes a snapshot of an image that is not open; returns its number. `overlap` is that with its own parent.
    pub async fn take_snapshot(&self, name: &str, snapshot: &str, overlap: Option<u64>) -> Result<u64> {
        self.closed(name, overlap).await?.take_snapshot(&*self.backend, snapshot).await
    }

    /// Creates a clone of all of an image at a snapshot.
    pub async fn clone(&self, child: &str, of: &str, snap: u64) -> Result<()> {
        let parent = self.closed(of, None).await?;
        self.create(child, parent.size).await?;
        let child = self.closed(child, None).await?;
        child.set_parent(&*self.backend, POOL, &parent.id, snap, parent.size).await
    }
}
