//! How images are made, and what is told of them.

use std::time::Duration;

use crate::OBJECT_SIZE_DEFAULT;
use crate::format::Features;

/// How an image is created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// Bytes, up to [`SIZE_MAX`](crate::SIZE_MAX).
    pub size: u64,
    /// Bytes an object, a power of two from 64 KiB to 32 MiB.
    pub object_size: u64,
    /// `None`: RBD's default where other clients use the pool ([`Features::RBD_DEFAULT`], without an object map for
    /// an image that is too large for one), layering elsewhere.
    pub features: Option<Features>,
    /// The name of another pool in which the data shall be.
    pub data_pool: Option<String>,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self { size: 0, object_size: OBJECT_SIZE_DEFAULT, features: None, data_pool: None }
    }
}

/// How an image is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoveOptions {
    /// Even if it is open; its open handles then answer [`NotFound`](forebay_block::ErrorKind::NotFound).
    pub force: bool,
}

/// How far something has come, in objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Done.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// What an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageInfo {
    /// Its name.
    pub name: String,
    /// Its id within the pool, which never changes.
    pub id: String,
    /// Bytes.
    pub size: u64,
    /// Bytes an object.
    pub object_size: u64,
    /// What the names of its data objects begin with.
    pub block_name_prefix: String,
    /// Its features.
    pub features: Features,
    /// Flag bits: 1, the object map is invalid; 2, fast-diff is invalid.
    pub flags: u64,
    /// Snapshots.
    pub snapshots: usize,
    /// It is a clone of another image.
    pub has_parent: bool,
    /// When it was created, since 1970-01-01T00:00:00Z, if known.
    pub created: Option<Duration>,
    /// When it was last read, as far as its clients note that.
    pub accessed: Option<Duration>,
    /// When it was last written, as far as its clients note that.
    pub modified: Option<Duration>,
}

impl ImageInfo {
    /// Objects, whether they exist or not.
    pub fn objects(&self) -> u64 {
        self.size.div_ceil(self.object_size)
    }

    /// The binary logarithm of the object size.
    pub fn order(&self) -> u8 {
        self.object_size.trailing_zeros() as u8
    }
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Its number within the pool.
    pub id: u64,
    /// Its name; open it as `IMAGE@NAME`.
    pub name: String,
    /// Bytes of the image then.
    pub size: u64,
    /// It cannot be removed.
    pub protected: bool,
    /// Made by a user; others belong to groups, to the trash or to mirroring.
    pub by_user: bool,
    /// Clones that were made of it and that it knows itself.
    pub children: u32,
}

/// Description of an image, with its parent, snapshots and locks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageDetails {
    /// What [`Images::info`](crate::Images::info) tells.
    pub info: ImageInfo,
    /// Bits of what the feature `operations` stands for: 1, clones that its header lists; 2, it is such a clone; 4, a
    /// group; 8, snapshots in the trash.
    pub op_features: u64,
    /// The pool of its data, where that is another.
    pub data_pool: Option<String>,
    /// The group that it is in, `POOL/NAME`.
    pub group: Option<String>,
    /// The most snapshots that it may have.
    pub snapshot_limit: Option<u64>,
    /// Where the bytes are that it does not have itself.
    pub parent: Option<ParentInfo>,
    /// Its snapshots, oldest first.
    pub snapshots: Vec<SnapshotDetails>,
    /// How it is locked, by whomever.
    pub lock: Option<LockKind>,
}

/// A snapshot, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotDetails {
    /// The snapshot.
    pub info: SnapshotInfo,
    /// Where the bytes are that it does not have itself.
    pub parent: Option<ParentInfo>,
}

/// The snapshot of another image that a clone was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentInfo {
    /// Its pool; a number if the pool is gone.
    pub pool: String,
    /// Its namespace, empty for the one without a name.
    pub namespace: String,
    /// Its name; its id if it has none any more.
    pub image: String,
    /// Its id.
    pub id: String,
    /// The snapshot; a number if it is gone.
    pub snapshot: String,
    /// It is in the trash.
    pub trash: bool,
    /// Bytes, from the beginning, that may be there.
    pub overlap: u64,
}

/// Lock of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// By one.
    Exclusive,
    /// By several, by hand (`rbd lock add --shared`).
    Shared,
}
