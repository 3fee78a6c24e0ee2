//! Control API types for changes and copies of images.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::NewImageOptions;
use crate::spec::ImageSpec;

/// Result of an import of changes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AppliedDiff {
    /// Size of the image in bytes.
    pub size: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes that read as zeroes now.
    pub zeroed: u64,
    /// Snapshot that was created at the end.
    pub snapshot: Option<String>,
}

/// Request for a copy of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CopyImage)]
pub struct CopyImageRequest {
    /// Pool of the new image.
    pub pool: String,
    /// Name of the new image.
    pub image: String,
    /// Set to copy the snapshots too.
    #[serde(default)]
    pub deep: bool,
    /// Set to make the copy of a clone independent of its parent, with the parent's data in it.
    #[serde(default)]
    pub flatten: bool,
    /// Object size in bytes; that of the source if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_size: Option<u64>,
    /// Stripe unit in bytes, with `stripe_count`; that of the source if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_unit: Option<u64>,
    /// Number of objects over which stripes go, with `stripe_unit`; that of the source if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u64>,
    /// Names of its features; those of the source if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Vec<String>>,
    /// Another pool for its data, if the pool is a Ceph cluster's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// Set to encrypt the copy in the embedded store. The copy of an encrypted image is encrypted there anyway.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
}

impl CopyImageRequest {
    /// Returns a request for a copy without snapshots, with these options.
    pub fn new(to: ImageSpec, options: NewImageOptions) -> Self {
        let ImageSpec { pool, image } = to;
        let NewImageOptions { object_size, stripe_unit, stripe_count, features, data_pool, encrypt } = options;
        let (deep, flatten) = (false, false);
        Self { pool, image, deep, flatten, object_size, stripe_unit, stripe_count, features, data_pool, encrypt }
    }

    /// Returns the options of the new image.
    pub fn options(&self) -> NewImageOptions {
        NewImageOptions {
            object_size: self.object_size,
            stripe_unit: self.stripe_unit,
            stripe_count: self.stripe_count,
            features: self.features.clone(),
            data_pool: self.data_pool.clone(),
            encrypt: self.encrypt,
        }
    }
}
