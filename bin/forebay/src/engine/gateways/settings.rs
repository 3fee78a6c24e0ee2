//! Settings that the daemon keeps in the record of a gateway group.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{AttachRequest, Front};

/// Settings of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSettings {
    /// NQN of the NVMe subsystem of the group.
    #[serde(default)]
    pub nqn: String,
}

/// Settings of a member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberSettings {
    /// Addresses of NBD, as a URI has them: `HOST:PORT`.
    #[serde(default)]
    pub nbd: Vec<String>,
    /// Addresses of NVMe/TCP.
    #[serde(default)]
    pub nvme: Vec<String>,
}

/// Settings of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSettings {
    /// UUID of the image, the same for all daemons: by it hosts recognize the volume, and members name it to each other.
    #[serde(default)]
    pub identity: String,
    /// Exports, one a front.
    #[serde(default)]
    pub exports: Vec<AttachRequest>,
}

impl VolumeSettings {
    /// Returns the export over a front.
    pub fn export(&self, front: Front) -> Option<&AttachRequest> {
        self.exports.iter().find(|export| export.front == front)
    }
}

/// Reads settings of the record; those that a later version has written count as empty.
pub fn read<T: Default + for<'de> Deserialize<'de>>(settings: &Value) -> T {
    T::deserialize(settings).unwrap_or_default()
}

/// Writes settings for the record.
pub fn write<T: Serialize>(settings: &T) -> Value {
    serde_json::to_value(settings).expect("plain data becomes JSON")
}
