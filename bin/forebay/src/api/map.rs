//! Control API types for images mapped to block devices.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::Failure;

/// Request to map an image to a block device of the daemon's machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Map)]
pub struct MapRequest {
    /// Pool name.
    pub pool: String,
    /// Image name.
    pub image: String,
    /// Set for a device that refuses writes.
    #[serde(default)]
    pub read_only: bool,
    /// Number of connections of the device, from 1 to 16; 1 if omitted.
    #[serde(default = "connections")]
    pub connections: u32,
    /// Seconds after which the kernel sends a request again over another or a new connection.  With 0, the default, and
    /// one connection it does so only once the connection has ended, and looks every 30 s.  At most 86,400.
    #[serde(default)]
    pub timeout_s: u64,
    /// Seconds for which requests wait for the daemon while it does not run; then they fail.  600 if omitted, at most
    /// 2,592,000.
    #[serde(default = "reconnect_timeout")]
    pub reconnect_timeout_s: u64,
}

fn connections() -> u32 {
    1
}

fn reconnect_timeout() -> u64 {
    600
}

/// Image that is mapped to a block device, as in `rbd showmapped --format json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Mapped)]
pub struct MappedImage {
    /// Number of the device.
    pub id: String,
    /// Pool name.
    pub pool: String,
    /// Namespace of the pool; empty.
    pub namespace: String,
    /// Image name.
    pub name: String,
    /// Snapshot name; `-`, as images are mapped.
    pub snap: String,
    /// Path of the device.
    #[schema(value_type = String)]
    pub device: PathBuf,
    /// Reason why requests of the device are not served, if they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}
