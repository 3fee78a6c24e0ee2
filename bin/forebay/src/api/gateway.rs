//! Control API types for gateway groups.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::NvmeHost;

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
    /// Set if volumes are moved by themselves where members' loads differ.
    #[serde(default)]
    pub rebalance: bool,
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

/// Weight that a member is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GatewayWeight {
    /// Host name or id of the member; this daemon if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// Share of the load, compared with others: 100 is usual, 10000 the most; 0 takes no volumes.
    pub weight: u32,
}

/// Policy that a group is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GatewayGroupPolicy {
    /// Set if volumes are moved by themselves where members' loads differ; as before if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebalance: Option<bool>,
    /// Whose hosts the members admit; as before if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<GatewayHostSource>,
}

/// Origin of the hosts that may use the NVMe subsystem and the iSCSI target of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GatewayHostSource {
    /// Each member admits the hosts of its own configuration.
    #[default]
    Members,
    /// All members admit the hosts that the group lists.
    Group,
}

/// Request to move volumes so that members are loaded alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RebalanceGatewaysRequest {
    /// Set to plan moves only.
    #[serde(default)]
    pub dry_run: bool,
}

/// Load of a volume, or of all volumes of a member, smoothed over a minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayLoad {
    /// Requests a second.
    pub requests_per_s: u32,
    /// KiB a second that are read and written.
    pub kib_per_s: u32,
}

/// State of a move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum GatewayMoveState {
    /// Planned only.
    #[default]
    Planned,
    /// On its way for longer than the command waits.
    Moving,
    /// Made: the volume has its next owner.
    Moved,
    /// Refused or cancelled: the volume has the owner that it had, or another one.
    Stayed,
}

/// Move of a volume to another member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayMove {
    /// Name of the volume.
    pub volume: String,
    /// Owner, by host name.
    pub from: String,
    /// Next owner, by host name.
    pub to: String,
    /// Load of the volume, if its owner has told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<GatewayLoad>,
    /// State of the move.
    #[serde(default)]
    pub state: GatewayMoveState,
    /// Reason why the move was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
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
    /// Set if volumes are moved by themselves where members' loads differ.
    #[serde(default)]
    pub rebalance: bool,
    /// NQN of the group's NVMe subsystem.
    pub nqn: String,
    /// Name of the group's iSCSI target.
    #[serde(default)]
    pub target: String,
    /// Whose hosts the members admit.
    #[serde(default)]
    pub hosts: GatewayHostSource,
    /// NVMe hosts that the group lists.
    #[serde(default)]
    pub nvme_hosts: Vec<NvmeHost>,
    /// Initiators that the group lists.
    #[serde(default)]
    pub initiators: Vec<String>,
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
    /// Share of the load that it is to have, compared with others.
    #[serde(default)]
    pub weight: u32,
    /// Load of its volumes, as it has said last; omitted if this daemon is no member, or has not heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<GatewayLoad>,
    /// Addresses for other members.
    pub peer: Vec<String>,
}

/// Volume of a gateway group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayVolumeStatus {
    /// Image, `POOL/IMAGE`.
    pub image: String,
    /// Fronts over which all members export it.
    pub fronts: Vec<String>,
    /// Sockets of its exports over vhost, each of one member.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sockets: Vec<GatewaySocket>,
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
    /// Load of the volume, at its owner only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<GatewayLoad>,
    /// Write log, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<GatewayLogStatus>,
    /// Reason why this daemon, its owner, cannot open it or keep its write log, or why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Socket of an export over vhost, for a guest of one member's machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewaySocket {
    /// Member, by host name.
    pub member: String,
    /// Path of the socket.
    pub path: String,
}

/// Write log of a volume of a gateway group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GatewayLogStatus {
    /// Medium and size; empty while it is being ended.
    pub place: String,
    /// Members with a complete copy, by host name, as the owner last said.
    pub copies: Vec<String>,
    /// Number of copies that there should be.
    pub copies_wanted: u32,
}
