//! Control API types for the management of images: metadata, locks, features, object maps.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Metadata value of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = MetadataValue)]
pub struct MetadataValue {
    /// Value; bytes that are not UTF-8 are replaced when it is read.
    pub value: String,
}

/// Locks on an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Locks)]
pub struct LockListing {
    /// Set if there is at most one, unset if clients with the same tag share it.
    pub exclusive: bool,
    /// Tag of a shared lock; `internal` for the automatic one of the feature exclusive-lock.
    pub tag: String,
    /// The locks, one for each holder.
    pub locks: Vec<ListedLock>,
}

/// Lock on an image, as in `rbd lock ls --format json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Lock)]
pub struct ListedLock {
    /// Id, chosen by the holder; `auto N` for an automatic lock.
    pub id: String,
    /// Holder, as `client.N`.
    pub locker: String,
    /// Address of the holder.
    pub address: String,
}

/// Request to lock an image by hand.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AddLock)]
pub struct AddLockRequest {
    /// Id of the lock.
    pub id: String,
    /// Tag of a lock that is shared with others of the same tag; exclusive if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<String>,
}

/// Request to enable or disable features of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = UpdateFeatures)]
pub struct UpdateFeaturesRequest {
    /// Names of the features.
    pub features: Vec<String>,
    /// Set to enable them, unset to disable them.
    pub enabled: bool,
}

/// Result of comparing an object map with the objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ObjectMapCheck)]
pub struct ObjectMapCheck {
    /// Objects compared.
    pub objects: u64,
    /// Objects that the map marks wrongly.
    pub wrong: u64,
    /// The first of them, 1000 at most.
    pub wrong_objects: Vec<WrongMapEntry>,
    /// Set if the map is marked as valid after the check.
    pub valid: bool,
}

/// Object that a map marks wrongly.  States are those of the format: 0, it does not exist; 1, it exists; 2, it is being
/// removed; 3, it exists, unchanged since the snapshot before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WrongMapEntry {
    /// Object name.
    pub name: String,
    /// State in the map.
    pub marked: u8,
    /// Actual state.
    pub actual: u8,
}

/// Request to deallocate zeroes that an image stores.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Sparsify)]
pub struct SparsifyRequest {
    /// Size in bytes of the blocks that are deallocated if all their bytes are zero: a power of two from 4096 to the size
    /// of the image's objects.
    #[serde(default = "sparse_size")]
    pub sparse_size: u64,
}

fn sparse_size() -> u64 {
    forebay_image::SPARSE_SIZE_MIN
}
