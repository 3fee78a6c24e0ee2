//! Control API types for snapshots.  Names and values are those of `rbd snap ls --format json`; only times differ: they
//! are in UTC (RFC 3339).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::timestamp::Timestamp;

/// Snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Snapshot)]
pub struct ImageSnapshot {
    /// Snapshot id, unique within the pool.
    pub id: u64,
    /// Snapshot name.
    pub name: String,
    /// Size of the image at the snapshot, in bytes.
    pub size: u64,
    /// Protection against removal: the text `true` or `false`, as in `rbd`.
    pub protected: String,
    /// Time of creation, if known.
    #[schema(value_type = Option<String>)]
    pub timestamp: Option<Timestamp>,
    /// Owner, in a list of the snapshots of all owners.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<SnapshotNamespace>,
}

/// Owner of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotNamespace {
    /// `user`, `group`, `mirror` or `trash`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name before the snapshot moved to the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original_name: Option<String>,
    /// Pool of the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Name of the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Name of the group's snapshot.
    #[serde(rename = "group snap", default, skip_serializing_if = "Option::is_none")]
    pub group_snapshot: Option<String>,
}

/// Request for a new snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CreateSnapshot)]
pub struct CreateSnapshotRequest {
    /// Snapshot name.
    pub name: String,
}

/// Request to rename a snapshot or to change its protection.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = UpdateSnapshot)]
pub struct UpdateSnapshotRequest {
    /// New name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Set to protect it against removal, unset to end that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protected: Option<bool>,
}

/// Request to limit the number of an image's snapshots.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SnapshotLimit)]
pub struct SnapshotLimitRequest {
    /// Maximum number of snapshots.
    pub limit: u64,
}
