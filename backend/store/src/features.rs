//! Feature bits and number of segments of an open store, which are set in both copies of the superblock before anything
//! needs them.

use std::cell::Cell;

use forebay_block::{Buf, Error, Result};
use forebay_reactor::File;
use forebay_reactor::sync::Semaphore;

use crate::core::Core;
use crate::device::StoreDevice;
use crate::format::superblock::{COPIES, FEATURE_BLOBS, FEATURE_ENCRYPTION, FEATURE_GROWN, StoreSuperblock};

/// Feature bits and number of segments of an open store.
///
/// # Invariants
/// 1. Nothing that needs a bit or a segment is written before both copies of the superblock have it durably.
pub struct StoreFeatures {
    /// Bits in use.
    used: Cell<u64>,
    /// Number of segments in use.
    segments: Cell<u32>,
    /// Bits and number of segments that the superblock has.
    stored: Cell<(u64, u32)>,
    /// Permit of writing the superblock.
    writing: Semaphore,
}

impl StoreFeatures {
    /// Returns the feature bits of a superblock.
    pub fn of(superblock: &StoreSuperblock) -> Self {
        let (features, segments) = (superblock.features, superblock.segment_count);
        Self {
            used: Cell::new(features),
            segments: Cell::new(segments),
            stored: Cell::new((features, segments)),
            writing: Semaphore::new(1),
        }
    }

    /// Records that the store has blobs. Only replay finds some that the superblock does not say, after a rebuild.
    pub fn note_blobs(&self) {
        self.used.set(self.used.get() | FEATURE_BLOBS);
    }

    /// Records that the store has encrypted objects, like [`note_blobs`](Self::note_blobs).
    pub fn note_encryption(&self) {
        self.used.set(self.used.get() | FEATURE_ENCRYPTION);
    }

    /// Returns whether the store may have encrypted objects.
    pub fn has_encryption(&self) -> bool {
        self.used.get() & FEATURE_ENCRYPTION != 0
    }

    /// Records that the store is to have `segments` segments, or that it has only so many left.
    pub fn note_segments(&self, segments: u32) {
        self.used.set(self.used.get() | FEATURE_GROWN);
        self.segments.set(segments);
    }
}

impl Core {
    /// Returns the superblock with the feature bits and the segments that are in use.
    pub fn current_superblock(&self) -> StoreSuperblock {
        let (features, segment_count) = (self.features.used.get(), self.features.segments.get());
        StoreSuperblock { features, segment_count, ..self.superblock.clone() }
    }

    /// Sets the feature bits and the number of segments that are in use in both copies of the superblock, durably, if they
    /// are not there yet.
    pub async fn store_features(&self) -> Result<()> {
        let _permit = self.features.writing.acquire(1).await;
        let superblock = self.current_superblock();
        let wanted = (superblock.features, superblock.segment_count);
        if wanted != self.features.stored.get() {
            match &self.media.device {
                StoreDevice::Single(file) => write_superblock(file, &superblock).await?,
                StoreDevice::Columns(set) => set.write_superblocks(&superblock).await?,
            }
            self.features.stored.set(wanted);
        }
        Ok(())
    }

    /// Allows blobs and data policies in the store, durably.
    pub async fn enable_blobs(&self) -> Result<()> {
        self.features.note_blobs();
        self.store_features().await
    }

    /// Allows encrypted objects in the store, durably.
    pub async fn enable_encryption(&self) -> Result<()> {
        self.features.note_encryption();
        self.store_features().await
    }
}

/// Writes both copies of the superblock, one after the other, so that a crash damages at most one.
pub async fn write_superblock(file: &File, superblock: &StoreSuperblock) -> Result<()> {
    let block = Buf::copy_of(&superblock.encode());
    for at in COPIES {
        let failed = |error| Error::from_io(error, format!("writing the superblock of {}", file.path().display()));
        file.write_at(block.clone(), at).await.map_err(failed)?;
        file.sync_data().await.map_err(failed)?;
    }
    Ok(())
}
