//! Feature bits of an open store, which are set in both copies of the superblock before anything needs them.

use std::cell::Cell;

use forebay_block::{Buf, Error, Result};
use forebay_reactor::File;

use crate::core::Core;
use crate::device::StoreDevice;
use crate::format::superblock::{COPIES, FEATURE_BLOBS, FEATURE_ENCRYPTION, StoreSuperblock};

/// Feature bits of an open store.
///
/// # Invariants
/// 1. Nothing that needs a bit is written before both copies of the superblock have it durably.
pub struct StoreFeatures {
    /// Bits in use.
    used: Cell<u64>,
    /// Bits that the superblock has.
    stored: Cell<u64>,
}

impl StoreFeatures {
    /// Returns the feature bits of a superblock.
    pub fn of(superblock: &StoreSuperblock) -> Self {
        Self { used: Cell::new(superblock.features), stored: Cell::new(superblock.features) }
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
}

impl Core {
    /// Returns the superblock with the feature bits that are in use.
    pub fn current_superblock(&self) -> StoreSuperblock {
        StoreSuperblock { features: self.features.used.get(), ..self.superblock.clone() }
    }

    /// Sets the feature bits that are in use in both copies of the superblock, durably, if they are not there yet.
    pub async fn store_features(&self) -> Result<()> {
        let superblock = self.current_superblock();
        if superblock.features != self.features.stored.get() {
            match &self.media.device {
                StoreDevice::Single(file) => write_superblock(file, &superblock).await?,
                StoreDevice::Columns(set) => set.write_superblocks(&superblock).await?,
            }
            self.features.stored.set(superblock.features);
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
