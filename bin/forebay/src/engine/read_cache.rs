//! Read cache of snapshot parents, shared by all clones that are open.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use forebay_image::{InstalledSnapshotCache, install_snapshot_cache};
use forebay_readcache::{CacheOptions, ReadCache, ReadCacheStats};

use super::Engine;
use crate::api::ReadCacheInfo;
use crate::failure::{Failure, FailureKind, Result};

/// Read cache of the images on this core.
pub(super) struct EngineReadCache {
    /// Dropped first: then no image uses the cache any more.
    _installed: InstalledSnapshotCache,
    cache: Rc<ReadCache>,
}

impl EngineReadCache {
    /// Opens the cache, and makes all images of this core use it.
    pub(super) async fn open(options: CacheOptions) -> Self {
        if let Some(disk) = &options.disk {
            create_private(&disk.path);
        }
        let cache = ReadCache::open(options).await;
        Self { _installed: install_snapshot_cache(cache.clone()), cache }
    }

    pub(super) async fn close(&self) {
        self.cache.close().await;
    }
}

/// Creates a file with access for its owner only, since it will hold data of images.  Errors are those of opening it
/// afterwards.
fn create_private(path: &Path) {
    let _ = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
}

impl Engine {
    fn opened_read_cache(&self) -> Result<&ReadCache> {
        self.read_cache.as_ref().map(|opened| &*opened.cache).ok_or_else(|| {
            let off = Failure::new(FailureKind::NotFound, "this daemon has no read cache");
            off.hint("set memory, or path and size, of [read-cache] in its configuration, and restart it")
        })
    }

    /// Returns the counters of the read cache, if there is one.
    pub fn read_cache_stats(&self) -> Option<ReadCacheStats> {
        self.read_cache.as_ref().map(|opened| opened.cache.stats())
    }

    /// Returns the state of the read cache.
    pub fn read_cache_info(&self) -> Result<ReadCacheInfo> {
        Ok(self.opened_read_cache()?.stats().into())
    }

    /// Empties the read cache, also on disk; a disk that was turned off after errors is used again.
    pub async fn clear_read_cache(&self) -> Result<ReadCacheInfo> {
        let cache = self.opened_read_cache()?;
        cache.clear().await?;
        Ok(cache.stats().into())
    }
}
