//! Control API types for images.  Names and values are those of `rbd --format json` for fields that `rbd` has; only
//! times differ: they are in UTC (RFC 3339).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ImageExport;
use crate::spec::uri_encode;
use crate::timestamp::Timestamp;

/// Layout and features of a new image; what is left out is as in the image or stream that it is made of, or the default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewImageOptions {
    /// Object size in bytes.
    pub object_size: Option<u64>,
    /// Stripe unit in bytes.
    pub stripe_unit: Option<u64>,
    /// Number of objects over which stripes go.
    pub stripe_count: Option<u64>,
    /// Names of its features.
    pub features: Option<Vec<String>>,
    /// Another pool for its data, if the pool is a Ceph cluster's.
    pub data_pool: Option<String>,
    /// Set to encrypt its data.
    pub encrypt: bool,
}

impl NewImageOptions {
    /// Returns them as parts of a query, each after an `&`.
    pub fn query(&self) -> String {
        let size = self.object_size.map(|size| format!("&object_size={size}"));
        let unit = self.stripe_unit.map(|unit| format!("&stripe_unit={unit}"));
        let count = self.stripe_count.map(|count| format!("&stripe_count={count}"));
        let features = self.features.as_ref().map(|names| format!("&features={}", uri_encode(&names.join(","), false)));
        let pool = self.data_pool.as_ref().map(|pool| format!("&data_pool={}", uri_encode(pool, false)));
        let encrypt = self.encrypt.then(|| "&encrypt=true".to_owned());
        [size, unit, count, features, pool, encrypt].into_iter().flatten().collect()
    }
}

/// Image and its properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Pool name.
    pub pool: String,
    /// Image name.
    pub name: String,
    /// Image id, unique within the pool.
    pub id: String,
    /// Size in bytes.
    pub size: u64,
    /// Number of objects that the size spans.
    pub objects: u64,
    /// Base-2 logarithm of `object_size`.
    pub order: u8,
    /// Object size in bytes.
    pub object_size: u64,
    /// Data pool, if it is a separate one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// Number of snapshots, including those of groups.
    pub snapshot_count: usize,
    /// Prefix of the names of the data objects.
    pub block_name_prefix: String,
    /// Image format; always 2.
    pub format: u8,
    /// Enabled features, by their names in `rbd`.
    pub features: Vec<String>,
    /// Features that the feature `operations` stands for.
    pub op_features: Vec<String>,
    /// Flags of the object map, which mark it as invalid.
    pub flags: Vec<String>,
    /// Group of the image, `POOL/NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Time of creation, if known.
    #[schema(value_type = Option<String>)]
    pub create_timestamp: Option<Timestamp>,
    /// Time of the last read, if clients record it.
    #[schema(value_type = Option<String>)]
    pub access_timestamp: Option<Timestamp>,
    /// Time of the last write, if clients record it.
    #[schema(value_type = Option<String>)]
    pub modify_timestamp: Option<Timestamp>,
    /// Protection of a snapshot against removal: the text `true` or `false`, as in `rbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protected: Option<String>,
    /// Maximum number of snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_limit: Option<u64>,
    /// Snapshot from which the image was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ImageParent>,
    /// Stripe unit in bytes, if the image has the feature striping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_unit: Option<u64>,
    /// Number of objects over which stripes go, if the image has the feature striping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u64>,
    /// Compression of data written from now on, if it is compressed by the embedded store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// Set if its data is encrypted by the embedded store.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
}

/// Snapshot from which an image was cloned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageParent {
    /// Pool of the parent.
    pub pool: String,
    /// Namespace of the parent.
    pub pool_namespace: String,
    /// Parent image.
    pub image: String,
    /// Image id of the parent.
    pub id: String,
    /// Snapshot name.
    pub snapshot: String,
    /// Set if the parent is in the trash.
    pub trash: bool,
    /// Overlap with the parent, in bytes from the start of the image.
    pub overlap: u64,
}

/// Image name and size.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageSummary {
    /// Image name.
    pub image: String,
    /// Size in bytes.
    pub size: u64,
    /// Image format; always 2.
    pub format: u8,
}

/// Image or snapshot in a long list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageListing {
    /// Image name.
    pub image: String,
    /// Image id, unique within the pool.
    pub id: String,
    /// Snapshot name; `None` for the image itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Snapshot id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<u64>,
    /// Size in bytes.
    pub size: u64,
    /// Snapshot from which it was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ListedParent>,
    /// Image format; always 2.
    pub format: u8,
    /// Protection of a snapshot against removal: the text `true` or `false`, as in `rbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protected: Option<String>,
    /// Lock type in the cluster: `exclusive` or `shared`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock_type: Option<String>,
}

/// Snapshot from which an image was cloned, in a long list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListedParent {
    /// Pool of the parent.
    pub pool: String,
    /// Namespace of the parent.
    pub pool_namespace: String,
    /// Parent image.
    pub image: String,
    /// Snapshot name.
    pub snapshot: String,
}

impl ListedParent {
    /// Formats it as a spec: `POOL/IMAGE@SNAPSHOT`.
    pub fn spec(&self) -> String {
        let Self { pool, pool_namespace, image, snapshot } = self;
        let slash = if pool_namespace.is_empty() { "" } else { "/" };
        format!("{pool}/{pool_namespace}{slash}{image}@{snapshot}")
    }
}

impl From<&ImageParent> for ListedParent {
    fn from(parent: &ImageParent) -> Self {
        Self {
            pool: parent.pool.clone(),
            pool_namespace: parent.pool_namespace.clone(),
            image: parent.image.clone(),
            snapshot: parent.snapshot.clone(),
        }
    }
}

/// Watchers and exports of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageStatus {
    /// Cluster clients that watch the image, including this daemon.  Empty for an image that only the daemon can use.
    pub watchers: Vec<ImageWatcher>,
    /// Exports of the image by the daemon.
    pub exports: Vec<ImageExport>,
}

/// Cluster client that watches an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageWatcher {
    /// Client address: `IP:PORT/NONCE`.
    pub address: String,
    /// Client id.
    pub client: u64,
    /// Watch cookie, unique among the watches of the client.
    pub cookie: u64,
}

/// Disk usage of the images of a pool, or of one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DiskUsage {
    /// Images, each after its snapshots.
    pub images: Vec<ImageUsage>,
    /// Total size of the images in bytes.
    pub total_provisioned_size: u64,
    /// Total bytes stored for the images and their snapshots.
    pub total_used_size: u64,
}

/// Disk usage of one image, or of one of its snapshots.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageUsage {
    /// Image name.
    pub name: String,
    /// Image id, unique within the pool.
    pub id: String,
    /// Snapshot name; `None` for the image itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Snapshot id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<u64>,
    /// Size in bytes.
    pub provisioned_size: u64,
    /// Bytes in use.
    pub used_size: u64,
    /// Bytes of the mapped blocks, if some of them are stored compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_size: Option<u64>,
    /// Bytes that they take on the device, if some of them are stored compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_size: Option<u64>,
}
