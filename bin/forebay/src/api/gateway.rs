//! Control API types for gateway groups.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Gateway group that is to be created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewGatewayGroup {
    /// Pool of the Ceph cluster that keeps the record.
    pub pool: String,
    /// Name of the group.
    pub name: String,
    /// Time for which a member may be silent, in milliseconds; 1000 if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u32>,
}

/// Gateway group that this daemon is to join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GatewayGroupName {
    /// Pool of the Ceph cluster that keeps the record.
    pub pool: String,
    /// Name of the group.
    pub name: String,
}

/// Member that is to be drained, or to take volumes again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainGateway {
    /// Host name or id of the member; this daemon if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// Set to end draining.
    #[serde(default)]
    pub undo: bool,
}

/// Moves of volumes to other members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayMove {
    /// Name of the volume.
    pub volume: String,
    /// Owner, by host name.
    pub from: String,
    /// Next owner, by host name.
    pub to: String,
}

/// State of a gateway group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayGroupStatus {
    /// Group, `POOL/NAME`.
    pub group: String,
    /// Id of the group.
    pub id: String,
    /// Epoch of the record.
    pub epoch: u64,
    /// Version in which the record is stored.
    #[serde(default)]
    pub record_version: u32,
    /// Time for which a member may be silent, in milliseconds.
    pub lease_ms: u32,
    /// NQN of the group's NVMe subsystem.
    pub nqn: String,
    /// Name of the group's iSCSI target.
    #[serde(default)]
    pub target: String,
    /// Reason why this daemon does not take part, if it is a member and does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Members of the group.
    pub members: Vec<GatewayMemberStatus>,
    /// Volumes of the group.
    pub volumes: Vec<GatewayVolumeStatus>,
}

/// Member of a gateway group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayMemberStatus {
    /// Id of the member: of its data directory.
    pub id: String,
    /// Host name.
    pub host: String,
    /// Version of its software.
    pub version: String,
    /// Oldest and newest version of the record that it works with.
    #[serde(default)]
    pub record_versions: [u32; 2],
    /// `active`, `draining`, `fencing` or `out`.
    pub state: String,
    /// Set for this daemon.
    pub own: bool,
    /// Set if this daemon has a connection to it.
    pub connected: bool,
    /// Number of volumes that it owns.
    pub volumes: usize,
    /// Addresses for other members.
    pub peer: Vec<String>,
}

/// Volume of a gateway group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayVolumeStatus {
    /// Image, `POOL/IMAGE`.
    pub image: String,
    /// Fronts over which it is exported.
    pub fronts: Vec<String>,
    /// Owner, by host name.
    pub owner: String,
    /// Next owner, while it is being moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Set while it is being removed from the group.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// Set if this daemon has it open.
    pub open_here: bool,
    /// Reason why this daemon, its owner, cannot open it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
