//! Snapshots of an open image: created, removed, renamed, protected, and rolled back to.

use crate::image::Image;
use crate::info::{ObjectProgress, SnapshotInfo};
use forebay_block::Result;

impl Image {
    /// Returns the snapshots, oldest first.
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        todo!()
    }

    /// Creates a snapshot.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for an invalid name; `NoSpace` at the snapshot limit; `ReadOnly`; `Busy` if another client
    /// keeps the image's lock.
    pub async fn create_snapshot(&self, _name: &str) -> Result<SnapshotInfo> {
        todo!()
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it is protected or has clones.
    pub async fn remove_snapshot(&self, _name: &str) -> Result<()> {
        todo!()
    }

    /// Renames a snapshot.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; `Invalid` for an invalid name.
    pub async fn rename_snapshot(&self, _from: &str, _to: &str) -> Result<()> {
        todo!()
    }

    /// Protects a snapshot against removal, or ends that.  Returns whether that changed anything.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it has clones that need the protection; `Unsupported` without layering.
    pub async fn set_snapshot_protection(&self, _name: &str, _protected: bool) -> Result<bool> {
        todo!()
    }

    /// Limits the number of snapshots.
    pub async fn set_snapshot_limit(&self, _limit: Option<u64>) -> Result<()> {
        todo!()
    }

    /// Rolls the image back to a snapshot: its content and its size.
    pub async fn rollback(&self, _name: &str, _progress: impl FnMut(ObjectProgress)) -> Result<()> {
        todo!()
    }
}
