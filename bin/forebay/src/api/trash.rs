//! Control API types for the trash.  Names and values are those of `rbd trash ls --long --format json`, except for times,
//! which are in UTC (RFC 3339).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ListedParent;
use crate::timestamp::Timestamp;

/// Image in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrashListing {
    /// Image id, which names the image while it is in the trash.
    pub id: String,
    /// Name before the move to the trash.
    pub name: String,
    /// Origin: `USER`, `MIRRORING`, `MIGRATION` or `USER_PARENT`; `UNKNOWN` for one of a newer version of Ceph.
    pub source: String,
    /// Time of the move to the trash.
    #[schema(value_type = String)]
    pub deleted_at: Timestamp,
    /// Time up to which it is only removed by force.
    #[schema(value_type = String)]
    pub expires_at: Timestamp,
    /// Parent, of a clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ListedParent>,
}

/// Request to move an image to the trash.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = MoveToTrash)]
pub struct MoveToTrashRequest {
    /// Image name.
    pub image: String,
    /// Time up to which it is only removed by force; now if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub expires_at: Option<Timestamp>,
}

/// Request to restore an image from the trash.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = RestoreFromTrash)]
pub struct RestoreRequest {
    /// New name; the former one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}
