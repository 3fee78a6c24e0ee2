//! Options of creating images, and descriptions of them.

use std::time::Duration;

use crate::OBJECT_SIZE_DEFAULT;
use crate::format::ImageFeatures;

/// Options of creating an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size in bytes, up to [`SIZE_MAX`](crate::SIZE_MAX).
    pub size: u64,
    /// Object size in bytes, a power of two from 64 KiB to 32 MiB.
    pub object_size: u64,
    /// Features. `None`: RBD's default in a shared pool ([`ImageFeatures::RBD_DEFAULT`], without an object map for an
    /// image that is too large for one), layering and deep-flatten elsewhere.
    pub features: Option<ImageFeatures>,
    /// Name of another pool for the data.
    pub data_pool: Option<String>,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self { size: 0, object_size: OBJECT_SIZE_DEFAULT, features: None, data_pool: None }
    }
}

/// Options of removing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoveOptions {
    /// Forced removal, even of an open image; requests to its open handles then fail with
    /// [`NotFound`](forebay_block::ErrorKind::NotFound).
    pub force: bool,
}

/// Progress of an operation, in objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObjectProgress {
    /// Objects done.
    pub done: u64,
    /// Objects in total.
    pub total: u64,
}

/// Description of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageDescription {
    /// Name of the image.
    pub name: String,
    /// Id within the pool, which never changes.
    pub id: String,
    /// Size in bytes.
    pub size: u64,
    /// Object size in bytes.
    pub object_size: u64,
    /// Name prefix of the data objects.
    pub block_name_prefix: String,
    /// Feature bits.
    pub features: ImageFeatures,
    /// Flag bits: 1, the object map is invalid; 2, fast-diff is invalid.
    pub flags: u64,
    /// Number of snapshots.
    pub snapshots: usize,
    /// Set if the image or a snapshot of it has a parent.
    pub has_parent: bool,
    /// Creation time since 1970-01-01T00:00:00Z, if known.
    pub created: Option<Duration>,
    /// Time of the last read, as far as clients record it.
    pub accessed: Option<Duration>,
    /// Time of the last write, as far as clients record it.
    pub modified: Option<Duration>,
}

impl ImageDescription {
    /// Returns the number of objects, whether they exist or not.
    pub fn objects(&self) -> u64 {
        self.size.div_ceil(self.object_size)
    }

    /// Returns the binary logarithm of the object size.
    pub fn order(&self) -> u8 {
        self.object_size.trailing_zeros() as u8
    }
}

/// Snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// Id within the pool.
    pub id: u64,
    /// Name; open the snapshot as `IMAGE@NAME`.
    pub name: String,
    /// Size of the image at the snapshot, in bytes.
    pub size: u64,
    /// Set if the snapshot is protected from removal.
    pub protected: bool,
    /// Time of creation since 1970-01-01T00:00:00Z, if known.
    pub created: Option<Duration>,
    /// Reason for which it exists.
    pub kind: SnapshotKind,
    /// Number of clones recorded in the snapshot itself (v2 clones).
    pub children: u32,
}

impl SnapshotInfo {
    /// Returns whether a user created it, and has not removed it.
    pub fn is_user(&self) -> bool {
        self.kind == SnapshotKind::User
    }
}

/// Reason for which a snapshot exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotKind {
    /// A user has created it.
    User,
    /// Part of the snapshot of a group.
    Group {
        /// Pool of the group.
        pool: i64,
        /// Id of the group.
        group: String,
        /// Id of the group's snapshot.
        snapshot: String,
    },
    /// A user has removed it, but clones still need it. Its name is unique, and it is removed with the last of them.
    Trash {
        /// Name that it had.
        name: String,
    },
    /// Another client created it for a purpose with this number; 3 is mirroring.
    Other(u32),
}

/// Image that is a clone of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildInfo {
    /// Pool name; its number if the pool is gone.
    pub pool: String,
    /// Namespace, empty for the default one.
    pub namespace: String,
    /// Image name; the id if the image has no name any more.
    pub image: String,
    /// Image id.
    pub id: String,
    /// Set if it is in the trash.
    pub trash: bool,
}

/// Place in which a clone is recorded as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CloneFormat {
    /// [`V1`](Self::V1) if the snapshot is protected and other clients share the pool, since they may be too old for the
    /// other; [`V2`](Self::V2) otherwise.
    #[default]
    Auto,
    /// In a list of the clone's pool. The snapshot must be protected, and stays so as long as it has clones.
    V1,
    /// In the header of the parent (Ceph 13.2 and newer). The snapshot can be removed: it is kept in the trash until it has
    /// no clones any more.
    V2,
}

/// Options of making a clone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CloneOptions {
    /// Place in which the clone is recorded.
    pub format: CloneFormat,
    /// Object size in bytes, a power of two from 64 KiB to 32 MiB; `None`: that of the parent.
    pub object_size: Option<u64>,
    /// Features; `None`: those of a new image. Layering is required.
    pub features: Option<ImageFeatures>,
    /// Name of another pool for the data.
    pub data_pool: Option<String>,
}

/// Description of an image, with its parent, snapshots and locks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageDetails {
    /// Basic description, as returned by [`Images::info`](crate::Images::info).
    pub info: ImageDescription,
    /// Bits behind the feature `operations`: 1, clones listed in its header; 2, it is such a clone; 4, a group; 8,
    /// snapshots in the trash.
    pub op_features: u64,
    /// Pool of the data, if it is another than that of the metadata.
    pub data_pool: Option<String>,
    /// Group that the image belongs to, as `POOL/NAME`.
    pub group: Option<String>,
    /// Maximum number of snapshots.
    pub snapshot_limit: Option<u64>,
    /// Parent, for data absent from the image itself.
    pub parent: Option<ParentInfo>,
    /// Snapshots, oldest first.
    pub snapshots: Vec<SnapshotDetails>,
    /// Kind of lock on the image, of any holder.
    pub lock: Option<LockKind>,
}

/// Snapshot and its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotDetails {
    /// Snapshot itself.
    pub info: SnapshotInfo,
    /// Parent, for data absent from the snapshot itself.
    pub parent: Option<ParentInfo>,
}

/// Parent of a clone: a snapshot of another image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentInfo {
    /// Pool name; its number if the pool is gone.
    pub pool: String,
    /// Namespace, empty for the default one.
    pub namespace: String,
    /// Image name; the id if the image has no name any more.
    pub image: String,
    /// Image id.
    pub id: String,
    /// Snapshot name; its id if the snapshot is gone.
    pub snapshot: String,
    /// Set if the parent is in the trash.
    pub trash: bool,
    /// Overlap in bytes, from the start of the image.
    pub overlap: u64,
}

/// Lock of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Held by one client.
    Exclusive,
    /// Held by several clients, manually (`rbd lock add --shared`).
    Shared,
}
