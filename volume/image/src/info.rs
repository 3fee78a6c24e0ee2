//! Options of creating images, and descriptions of them.

use std::time::Duration;

use crate::OBJECT_SIZE_DEFAULT;
use crate::format::ImageFeatures;

/// Most objects over which an image is striped.
pub const STRIPE_COUNT_MAX: u64 = 1024;
/// Smallest stripe unit in bytes.
pub const STRIPE_UNIT_MIN: u64 = 512;

/// Striping of an image: its bytes go to `count` objects in turn, `unit` bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Striping {
    /// Stripe unit in bytes.
    pub unit: u64,
    /// Number of objects that take turns.
    pub count: u64,
}

impl Striping {
    /// Returns the striping of an image that stores its bytes in one object after the other.
    pub fn none(object_size: u64) -> Self {
        Self { unit: object_size, count: 1 }
    }

    /// Returns whether the image's bytes are in one object after the other: with one object, or one unit an object.
    pub fn is_simple(self, object_size: u64) -> bool {
        self.count == 1 || self.unit == object_size
    }

    /// Returns whether the objects, of a power of two in bytes, are made of units.
    pub(crate) fn is_consistent(self, object_size: u64) -> bool {
        self.unit > 0 && self.count > 0 && object_size.is_multiple_of(self.unit)
    }

    /// Returns whether the striping is supported: units of [`STRIPE_UNIT_MIN`] bytes and more, up to
    /// [`STRIPE_COUNT_MAX`] objects.
    pub fn is_valid(self, object_size: u64) -> bool {
        self.is_consistent(object_size) && self.unit >= STRIPE_UNIT_MIN && self.count <= STRIPE_COUNT_MAX
    }

    /// Returns the number of objects of an image of `size` bytes.
    pub fn objects(self, object_size: u64, size: u64) -> u64 {
        if self.is_simple(object_size) {
            return size.div_ceil(object_size);
        }
        // That of a damaged header may be any number.
        let set = self.count.saturating_mul(object_size);
        (size / set * self.count).saturating_add((size % set).div_ceil(self.unit).min(self.count))
    }
}

/// Options of creating an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size in bytes, up to [`SIZE_MAX`](crate::SIZE_MAX).
    pub size: u64,
    /// Object size in bytes, a power of two from 64 KiB to 32 MiB.
    pub object_size: u64,
    /// Striping; `None`: one object after the other.
    pub striping: Option<Striping>,
    /// Features. `None`: RBD's default in a shared pool ([`ImageFeatures::RBD_DEFAULT`], without an object map for an
    /// image that is too large for one), layering and deep-flatten elsewhere.
    pub features: Option<ImageFeatures>,
    /// Name of another pool for the data.
    pub data_pool: Option<String>,
    /// Set to encrypt the data, where the backend does that.
    pub encrypted: bool,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size: 0,
            object_size: OBJECT_SIZE_DEFAULT,
            striping: None,
            features: None,
            data_pool: None,
            encrypted: false,
        }
    }
}

impl CreateOptions {
    /// Returns the number of objects of the image.
    pub(crate) fn objects(&self) -> u64 {
        let object_size = self.object_size.max(1);
        self.striping
            .filter(|striping| striping.is_valid(object_size))
            .unwrap_or(Striping::none(object_size))
            .objects(object_size, self.size)
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
    /// Striping, if the image has that feature.
    pub striping: Option<Striping>,
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
        self.objects_of(self.size)
    }

    /// Returns the number of objects of a state of the image with this size, in bytes.
    pub fn objects_of(&self, size: u64) -> u64 {
        self.striping.unwrap_or(Striping::none(self.object_size)).objects(self.object_size, size)
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
    /// Striping; `None`: one object after the other.
    pub striping: Option<Striping>,
    /// Features; `None`: those of a new image. Layering is required.
    pub features: Option<ImageFeatures>,
    /// Name of another pool for the data.
    pub data_pool: Option<String>,
    /// Set to encrypt the data, where the backend does that. A clone of an encrypted image is encrypted anyway.
    pub encrypted: bool,
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
    /// Snapshot id.
    pub snapshot_id: u64,
    /// Set if the parent is in the trash.
    pub trash: bool,
    /// Set if the snapshot gets new clones: neither it nor the parent has been removed.
    pub is_clonable: bool,
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
