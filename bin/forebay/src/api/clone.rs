//! Control API types for clones.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request to make a clone of a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Clone)]
pub struct CloneRequest {
    /// Pool of the new image.
    pub pool: String,
    /// Name of the new image.
    pub image: String,
    /// Object size in bytes, a power of two from 64 KiB to 32 MiB; that of the parent if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_size: Option<u64>,
    /// Stripe unit in bytes, a power of two from 512 to the object size; with `stripe_count`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_unit: Option<u64>,
    /// Number of objects over which stripes go, up to 1024; with `stripe_unit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u64>,
    /// Names of its features; the pool's default if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Vec<String>>,
    /// Another pool for its data, if the pool is a Ceph cluster's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// Place in which the clone is recorded.
    #[serde(default)]
    pub format: CloneVersion,
}

/// Place in which a clone is recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CloneVersion {
    /// `v1` in a Ceph pool if the snapshot is protected, for old clients; `v2` otherwise.
    #[default]
    Auto,
    /// In the pool of the clone; the snapshot must be protected.
    #[value(name = "1")]
    V1,
    /// In the parent, whose snapshot can then be removed.
    #[value(name = "2")]
    V2,
}

/// Clone of a snapshot.  Names and values are those of `rbd children --all --format json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageChild {
    /// Pool name.
    pub pool: String,
    /// Namespace, empty for the default one.
    pub pool_namespace: String,
    /// Image name.
    pub image: String,
    /// Image id.
    pub id: String,
    /// Set if it is in the trash.
    pub trash: bool,
}

impl ImageChild {
    /// Returns the line of `rbd children`.
    pub fn line(&self) -> String {
        let slash = if self.pool_namespace.is_empty() { "" } else { "/" };
        let trash = if self.trash { format!(" (trash {})", self.id) } else { String::new() };
        format!("{}/{}{slash}{}{trash}", self.pool, self.pool_namespace, self.image)
    }
}
