//! What the control API says of images.  Names and values are those of `rbd --format json` where `rbd` has the same thing;
//! only times are written otherwise, in UTC (RFC 3339).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Target;
use crate::timestamp::Timestamp;

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub name: String,
    /// Its id within the pool.
    pub id: String,
    /// Its size.
    pub size: u64,
    /// Number of objects that its size has room for.
    pub objects: u64,
    /// The power of two of `object_size`.
    pub order: u8,
    /// Bytes an object.
    pub object_size: u64,
    /// The pool of its data, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// Snapshots, those of groups among them.
    pub snapshot_count: usize,
    /// Prefix of the names of its data objects.
    pub block_name_prefix: String,
    /// The image format; always 2.
    pub format: u8,
    /// Its features, as `rbd` names them.
    pub features: Vec<String>,
    /// Features that the feature `operations` stands for.
    pub op_features: Vec<String>,
    /// Flags of its object map: what is wrong with it.
    pub flags: Vec<String>,
    /// The group that it is in, `POOL/NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// When it was created, if that is known.
    #[schema(value_type = Option<String>)]
    pub create_timestamp: Option<Timestamp>,
    /// When it was last read, as far as its clients note that.
    #[schema(value_type = Option<String>)]
    pub access_timestamp: Option<Timestamp>,
    /// When it was last written, as far as its clients note that.
    #[schema(value_type = Option<String>)]
    pub modify_timestamp: Option<Timestamp>,
    /// The most snapshots that it may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_limit: Option<u64>,
    /// The snapshot that it was cloned from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ImageParent>,
}

/// The snapshot that an image was cloned from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageParent {
    /// Its pool.
    pub pool: String,
    /// Its namespace.
    pub pool_namespace: String,
    /// Its image.
    pub image: String,
    /// That image's id.
    pub id: String,
    /// The snapshot.
    pub snapshot: String,
    /// The image is in the trash.
    pub trash: bool,
    /// Bytes, from the beginning, that may be there.
    pub overlap: u64,
}

/// An image's name and size.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageSummary {
    /// Its name.
    pub image: String,
    /// Its size.
    pub size: u64,
    /// The image format; always 2.
    pub format: u8,
}

/// An image, or a snapshot, in a long list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageListing {
    /// The image's name.
    pub image: String,
    /// Its id within the pool.
    pub id: String,
    /// The snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<u64>,
    /// The size.
    pub size: u64,
    /// The snapshot that it was cloned from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ListedParent>,
    /// The image format; always 2.
    pub format: u8,
    /// Of a snapshot: it cannot be removed.  A text, `true` or `false`, as in `rbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protected: Option<String>,
    /// Type of its lock in the cluster: `exclusive` or `shared`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock_type: Option<String>,
}

/// The snapshot that an image was cloned from, in a long list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListedParent {
    /// Its pool.
    pub pool: String,
    /// Its namespace.
    pub pool_namespace: String,
    /// Its image.
    pub image: String,
    /// The snapshot.
    pub snapshot: String,
}

impl ListedParent {
    /// Writes it as a spec: `POOL/IMAGE@SNAPSHOT`.
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
    /// The cluster's clients that watch it, this daemon's among them.  None of an image that the daemon alone can use.
    pub watchers: Vec<ImageWatcher>,
    /// Exports of it by the daemon.
    pub exports: Vec<Target>,
}

/// A client of the cluster that watches an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageWatcher {
    /// Address: `IP:PORT/NONCE`.
    pub address: String,
    /// Its number.
    pub client: u64,
    /// Number of the watch among those of the client.
    pub cookie: u64,
}

/// Disk usage of the images of a pool, or of one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DiskUsage {
    /// Each image, after its snapshots.
    pub images: Vec<ImageUsage>,
    /// The sizes of the images together.
    pub total_provisioned_size: u64,
    /// Bytes stored of them and of their snapshots together.
    pub total_used_size: u64,
}

/// Disk usage of one image, or of one of its snapshots.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ImageUsage {
    /// The image's name.
    pub name: String,
    /// Its id within the pool.
    pub id: String,
    /// The snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<u64>,
    /// Its size.
    pub provisioned_size: u64,
    /// What is stored of it.
    pub used_size: u64,
}
