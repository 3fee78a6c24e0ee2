//! Read cache for images of a run, with own blocks in it: in half of the runs, by their seed.

use std::rc::Rc;

use forebay_block::{HeadGeneration, LocalFuture, Result, SnapshotCache, SnapshotFetch, SnapshotRead, SparseData};
use forebay_image::{InstalledSnapshotCache, install_snapshot_cache};
use forebay_readcache::{CacheOptions, DiskOptions, ReadCache};

use crate::world::World;

/// File of the cache.
pub(super) const CACHE_PATH: &str = "/data/read-cache";

/// Cache of own blocks only: a read of a parent by a client that dies would never end for others that wait for it, as no
/// process has them.
struct OwnBlocksOnly(Rc<ReadCache>);

impl SnapshotCache for OwnBlocksOnly {
    fn read(&self, read: SnapshotRead, fetch: SnapshotFetch) -> LocalFuture<Result<SparseData>> {
        fetch(read.extent)
    }

    fn begin_generation(&self, image: &str) -> Option<Rc<dyn HeadGeneration>> {
        self.0.begin_generation(image)
    }
}

/// Returns whether a run caches own blocks.
pub(super) fn is_cached(seed: u64) -> bool {
    seed & 1 == 1
}

/// Read cache of one life of a process.
pub(super) struct LifeCache {
    cache: Rc<ReadCache>,
    _installed: InstalledSnapshotCache,
}

impl LifeCache {
    /// Opens the cache of a run, and makes images use it; `None` if the run has none. With `may_have_disk`, one in four is on
    /// disk too.
    pub(super) async fn open(world: &World, may_have_disk: bool) -> Option<Self> {
        let seed = world.seed();
        if !is_cached(seed) {
            return None;
        }
        let disk = (may_have_disk && seed % 8 == 3).then(|| DiskOptions { path: CACHE_PATH.into(), size: 16 << 20 });
        let memory = [0, 2 << 16, 8 << 20][(seed / 8 % 3) as usize].max(if disk.is_none() { 2 << 16 } else { 0 });
        let cache = ReadCache::open(CacheOptions { memory, disk }).await;
        Some(Self { _installed: install_snapshot_cache(Rc::new(OwnBlocksOnly(cache.clone()))), cache })
    }

    /// Returns the numbers of parts that were found in the cache, and that were removed because they were about to change.
    pub(super) fn counts(&self) -> (u64, u64) {
        let stats = self.cache.stats();
        (stats.own.hits(), stats.invalidated)
    }
}
