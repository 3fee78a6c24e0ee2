//! Control API types for the read cache.

use std::path::PathBuf;

use forebay_image::OwnBlockState;
use forebay_readcache::{DiskState, ReadCacheStats, SourceStats};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the read cache of snapshot parents and own blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ReadCache)]
pub struct ReadCacheInfo {
    /// Maximum bytes of parts in memory.
    pub memory_capacity: u64,
    /// Bytes of parts in memory.
    pub memory_used: u64,
    /// Layer on disk: `none`, `on` or `off` (after errors; `reason` says which).
    pub disk: String,
    /// Reason why the layer on disk is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// File or device of the layer on disk.
    #[schema(value_type = Option<String>)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Maximum bytes of parts on disk.
    pub disk_capacity: u64,
    /// Bytes of parts on disk.
    pub disk_used: u64,
    /// Zero parts and absent objects that are remembered.
    pub zeroes: u64,
    /// Parts that were in memory when clones read them.
    pub hits_memory: u64,
    /// Parts that were on disk.
    pub hits_disk: u64,
    /// Parts and objects known to be zero or absent.
    pub hits_zero: u64,
    /// Parts that another request was reading already.
    pub hits_shared: u64,
    /// Parts read from the backend.
    pub misses: u64,
    /// Bytes read from the backend.
    pub fetched_bytes: u64,
    /// Bytes returned to clones.
    pub read_bytes: u64,
    /// Reads of own blocks, of images that ask for their cache.
    #[serde(default)]
    pub own: OwnBlocksInfo,
    /// Parts evicted from memory.
    pub evicted_memory: u64,
    /// Parts evicted from disk.
    pub evicted_disk: u64,
    /// Parts written to disk.
    pub written: u64,
    /// Parts not written, because the disk was behind.
    pub dropped: u64,
    /// Failed reads and writes of the disk, and wrong checksums.
    pub disk_errors: u64,
}

/// Reads of own blocks through the read cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = OwnBlocks)]
pub struct OwnBlocksInfo {
    /// Parts that were in memory.
    pub hits_memory: u64,
    /// Parts that were on disk.
    pub hits_disk: u64,
    /// Parts known to be zero.
    pub hits_zero: u64,
    /// Parts that another request was reading already.
    pub hits_shared: u64,
    /// Parts read from the backend.
    pub misses: u64,
    /// Parts removed because they were about to change.
    pub invalidated: u64,
    /// Reads that bypassed the cache: of parts that were being changed, and of images with objects below 64 KiB.
    pub bypassed: u64,
    /// Bytes read from the backend.
    pub fetched_bytes: u64,
    /// Bytes returned to hosts.
    pub read_bytes: u64,
}

/// Returns the name of a state of the cache of own blocks; `None` if the image does not ask for it.
pub fn own_block_state(state: OwnBlockState) -> Option<String> {
    let name = match state {
        OwnBlockState::Disabled => return None,
        OwnBlockState::Unavailable => "unavailable",
        OwnBlockState::Idle => "idle",
        OwnBlockState::Active => "active",
    };
    Some(name.to_owned())
}

impl OwnBlocksInfo {
    fn new(stats: SourceStats, invalidated: u64) -> Self {
        Self {
            hits_memory: stats.hits_memory,
            hits_disk: stats.hits_disk,
            hits_zero: stats.hits_zero,
            hits_shared: stats.hits_joined,
            misses: stats.misses,
            invalidated,
            bypassed: stats.bypassed,
            fetched_bytes: stats.fetched_bytes,
            read_bytes: stats.read_bytes,
        }
    }

    /// Returns the percentage of parts that did not have to be read from the backend; `None` before the first read.
    pub fn hit_percent(&self) -> Option<f64> {
        hit_percent(self.hits_memory + self.hits_disk + self.hits_zero + self.hits_shared, self.misses)
    }
}

fn hit_percent(hits: u64, misses: u64) -> Option<f64> {
    let all = hits + misses;
    (all > 0).then(|| hits as f64 * 100.0 / all as f64)
}

impl ReadCacheInfo {
    /// Returns the percentage of parts that clones did not have to read from the backend; `None` before the first read.
    pub fn hit_percent(&self) -> Option<f64> {
        hit_percent(self.hits_memory + self.hits_disk + self.hits_zero + self.hits_shared, self.misses)
    }
}

impl From<ReadCacheStats> for ReadCacheInfo {
    fn from(stats: ReadCacheStats) -> Self {
        let (disk, reason) = match stats.disk {
            DiskState::None => ("none", None),
            DiskState::On => ("on", None),
            DiskState::Off(reason) => ("off", Some(reason)),
        };
        Self {
            memory_capacity: stats.memory_capacity,
            memory_used: stats.memory_bytes,
            disk: disk.into(),
            reason,
            path: stats.path,
            disk_capacity: stats.disk_capacity,
            disk_used: stats.disk_bytes,
            zeroes: stats.flags,
            hits_memory: stats.parents.hits_memory,
            hits_disk: stats.parents.hits_disk,
            hits_zero: stats.parents.hits_zero,
            hits_shared: stats.parents.hits_joined,
            misses: stats.parents.misses,
            fetched_bytes: stats.parents.fetched_bytes,
            read_bytes: stats.parents.read_bytes,
            own: OwnBlocksInfo::new(stats.own, stats.invalidated),
            evicted_memory: stats.evicted_memory,
            evicted_disk: stats.evicted_disk,
            written: stats.written,
            dropped: stats.dropped,
            disk_errors: stats.disk_errors + stats.checksum_errors,
        }
    }
}
