//! Control API types for groups of images.  Names and values are those of `rbd group ... --format json`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Group of images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Group)]
pub struct GroupName {
    /// Group name.
    pub name: String,
}

/// Image in a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupImage {
    /// Image name; the id of one that has no name any more.
    pub image: String,
    /// Pool name.
    pub pool: String,
    /// RBD namespace; empty for the default one.
    pub namespace: String,
    /// 0, or 1 while the image is being added or removed, and after that was interrupted.
    pub state: u8,
}

/// Request to add an image to a group.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AddToGroup)]
pub struct AddToGroupRequest {
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub image: String,
}

/// Snapshot of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupSnapshotListing {
    /// Snapshot name.
    pub snapshot: String,
    /// `ok`, or `incomplete` while it is created or removed, and after either was interrupted.
    pub state: String,
}
