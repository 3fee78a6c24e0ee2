//! Control API types for overridden options.  Names and values are those of `rbd config image ls --format json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Option with the value that is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigOption {
    /// Name, such as `rbd_qos_iops_limit`.
    pub name: String,
    /// Value in force.
    pub value: String,
    /// Origin of the value: `config` for the daemon's configuration or the default, `pool`, or `image`.
    pub source: String,
}

/// Value to override an option with.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConfigValue {
    /// Value of the option.
    pub value: String,
}

/// Limits of an image, and the requests that they hold up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Qos)]
pub struct QosInfo {
    /// Limits by the names of librbd's options, such as `rbd_qos_iops_limit`; bursts where there are some.
    pub limits: BTreeMap<String, u64>,
    /// Requests that had to wait since the image was opened.
    pub throttled: u64,
    /// Time that they waited together, in milliseconds.
    pub throttled_ms: u64,
    /// Requests that wait now.
    pub waiting: usize,
}
