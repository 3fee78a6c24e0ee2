//! Control API types: requests and responses shared by the daemon, the command line and OpenAPI.
//!
//! Field names are stable, and those of `rbd` for fields that `rbd` has.  Sizes are in bytes.

mod cache;
mod clone;
mod config;
mod diff;
mod front;
mod gateway;
mod group;
mod image;
mod log;
mod manage;
mod map;
mod namespace;
mod snapshot;
mod store;
mod trash;
mod vhost;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::Failure;

/// Response of `status`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Status)]
pub struct DaemonStatus {
    /// Set if the daemon serves hosts.
    pub ready: bool,
    /// The daemon's version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Number of reactors.
    pub cores: u16,
    /// I/O driver of the reactors: `io_uring` or `epoll`.
    pub driver: String,
    /// The data directory.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// The control socket.
    #[schema(value_type = String)]
    pub control: PathBuf,
    /// Address of HTTP over TCP, besides the control socket.
    pub http: Option<String>,
    /// NBD addresses.
    pub nbd: Vec<String>,
    /// NVMe/TCP addresses.
    pub nvme: Vec<String>,
    /// NQN of the default NVMe subsystem.
    pub nvme_nqn: String,
    /// iSCSI addresses.
    pub iscsi: Vec<String>,
    /// Name of the default iSCSI target.
    pub iscsi_name: String,
    /// Number of sockets of exports over vhost.
    #[serde(default)]
    pub vhost_sockets: usize,
    /// Pools and their space.
    pub pools: Vec<PoolInfo>,
    /// Number of exports.
    pub targets: usize,
    /// Number of exports that hosts cannot reach; `targets` gives the reasons.
    #[serde(default)]
    pub unserved: usize,
    /// Number of connections from hosts.
    pub connections: usize,
    /// Addresses of the peer messenger.
    #[serde(default)]
    pub peer: Vec<String>,
    /// Other daemons, and messenger clients.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// Read cache of snapshot parents, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_cache: Option<ReadCacheInfo>,
}

/// Another daemon, or a messenger client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Peer address.
    pub address: String,
    /// Authenticated name; empty for a peer on this machine without a key, and for outgoing connections.
    pub name: String,
    /// Set if this daemon connects to the peer, by configuration; unset if the peer connected to this daemon.
    pub outgoing: bool,
    /// `open`, `connecting` (with the failure in `reason`), or `standby`: the peer may resume its session.
    pub state: String,
    /// Current or last transport: `tcp`, `rdma`, `unix` or `shm`; empty before the first connection.
    pub transport: String,
    /// Messages to the peer that are unsent or not acknowledged.
    pub pending: usize,
    /// Messages from the peer that are buffered here.
    pub held: usize,
    /// Reason why there is no connection.
    pub reason: Option<String>,
    /// Id of its data directory, once it has described itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Host name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Time that a question and its answer take, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u64>,
    /// Space for copies of this daemon's write logs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<OfferedReplicas>,
}

/// Space that a peer offers for copies of this daemon's write logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OfferedReplicas {
    /// Medium of the log device.
    pub medium: LogMedium,
    /// Maximum size of all copies on it, in bytes.
    pub quota: u64,
    /// Bytes of that which no copy has yet.
    pub free: u64,
}

impl From<&forebay_writelog::replication::hello::ReplicaOffer> for OfferedReplicas {
    fn from(offer: &forebay_writelog::replication::hello::ReplicaOffer) -> Self {
        Self { medium: offer.medium.into(), quota: offer.quota, free: offer.free }
    }
}

/// Pool and its space.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Pool)]
pub struct PoolInfo {
    /// Pool name.
    pub name: String,
    /// `store` or `ram`.
    pub kind: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes available.
    pub available: u64,
    /// Number of objects.
    pub objects: u64,
    /// Bytes of live blocks that are stored compressed.
    #[serde(default)]
    pub compressed_logical: u64,
    /// Bytes that these take on the device, which `used` includes.
    #[serde(default)]
    pub compressed_stored: u64,
    /// Limit outside the pool that leaves less space than its capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    /// Reason why writes are refused, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
    /// Damage and how to repair it, if any is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs_repair: Option<String>,
}

/// Export of an image over one front.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Target)]
pub struct ImageExport {
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub image: String,
    /// Front of the export.
    pub front: Front,
    /// Set if writes are refused.
    pub read_only: bool,
    /// URI for clients; `None` while no daemon serves it.
    pub uri: Option<String>,
    /// URIs through each of the daemon's addresses.
    pub uris: Vec<String>,
    /// vhost only: socket of the export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost: Option<VhostSocketOptions>,
    /// Number of connections from hosts.
    pub connections: usize,
    /// Write log of the image, while it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<WriteLogInfo>,
    /// Limits of the image and what waits for them, while it is served and has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<QosInfo>,
    /// Cache of the image's own blocks, if it asks for that: `active`; `idle`, while the exclusive lock is not held, or may
    /// be lost; `unavailable`, without a read cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_blocks: Option<String>,
    /// Reason why it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// Warnings for the operator, as sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

pub use crate::log_place::{LogMedium, LogPlace, TakeoverMode};
pub use cache::{ReadCacheInfo, own_block_state};
pub use log::{LogMember, LogPolicy, LogTakeover, WriteLogInfo};

pub use clone::{CloneRequest, CloneVersion, ImageChild};
pub use diff::{AppliedDiff, CopyImageRequest};
pub use front::Front;
pub use gateway::{
    DrainGateway, GatewayGroupName, GatewayGroupPolicy, GatewayGroupStatus, GatewayHostSource, GatewayLoad,
    GatewayLogStatus, GatewayMemberStatus, GatewayMove, GatewayMoveState, GatewaySocket, GatewayVolumeStatus,
    GatewayWeight, NewGatewayGroup, RebalanceGatewaysRequest,
};
pub use group::{AddToGroupRequest, GroupImage, GroupName, GroupSnapshotListing};
pub use image::{
    DiskUsage, ImageInfo, ImageListing, ImageParent, ImageStatus, ImageSummary, ImageUsage, ImageWatcher, ListedParent,
    NewImageOptions,
};

pub use config::{ConfigOption, ConfigValue, QosInfo};

pub use snapshot::{
    CreateSnapshotRequest, ImageSnapshot, SnapshotLimitRequest, SnapshotNamespace, UpdateSnapshotRequest,
};

pub use manage::{
    AddLockRequest, ListedLock, LockListing, MetadataValue, ObjectMapCheck, SparsifyRequest, UpdateFeaturesRequest,
    WrongMapEntry,
};

pub use map::{MapRequest, MappedImage};
pub use namespace::NamespaceName;
pub use store::{
    AddDevicesRequest, GrowStoreRequest, RemoveDevicesRequest, ReplaceDeviceRequest, RotateKeyRequest, ScrubInfo,
    StoreDeviceInfo, StoreDevices, StoreKeys,
};

pub use trash::{MoveToTrashRequest, RestoreRequest, TrashListing};

pub use vhost::VhostSocketOptions;

/// Result of a reload of hosts and secrets.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// Set if other settings differ from the running ones; they take effect after a restart.
    pub restart: bool,
}

/// Persistent reservations of an image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Reservations)]
pub struct ReservationsInfo {
    /// Registered hosts.
    pub registrants: Vec<RegistrantInfo>,
    /// Type of the current reservation.
    pub kind: Option<String>,
    /// Host that has reserved the whole image (SPC-2's RESERVE).
    pub whole: Option<String>,
    /// Set if they survive a restart (APTPL).
    pub persistent: bool,
}

/// Registered host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Registrant)]
pub struct RegistrantInfo {
    /// Identity in its protocol; non-printable characters are escaped.
    pub host: String,
    /// Reservation key.
    pub key: u64,
    /// Set if it holds the reservation, possibly with other hosts.
    pub holder: bool,
}

/// Request for a new image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CreateImage)]
pub struct CreateImageRequest {
    /// Pool name.
    pub pool: String,
    /// Name of the new image.
    pub image: String,
    /// Image size in bytes.
    pub size: u64,
    /// Object size in bytes, a power of two from 64 KiB to 32 MiB; 4 MiB if omitted.
    #[serde(default = "default_object_size")]
    pub object_size: u64,
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
    /// Compression in the embedded store: `none`, `lz4`, `zstd[:LEVEL]` or `deflate[:LEVEL]`; the store's default if
    /// omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// Set to encrypt its data in the embedded store, with a key of its own that the store's master key wraps.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
}

/// Returns the default object size in bytes, as in `rbd`.
pub fn default_object_size() -> u64 {
    4 << 20
}

/// Request to resize or rename an image.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = UpdateImage)]
pub struct UpdateImageRequest {
    /// New size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Set to allow shrinking, which loses the data past the new end.
    #[serde(default)]
    pub allow_shrink: bool,
    /// New name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Request for an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Attach)]
pub struct AttachRequest {
    /// Pool name.
    pub pool: String,
    /// Image name.
    pub image: String,
    /// Front of the export.
    pub front: Front,
    /// Set to refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Number within the front (a LUN from 0 to 16383, a namespace id from 1 to 8192), kept across restarts; if
    /// omitted, the previous number of the image, or the lowest that is neither taken nor retired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// Hosts that see it, by their names in the front's protocol (over iSCSI, and over NBD with TLS; a trailing `*`
    /// is a wildcard) or, over NBD, by their networks; if omitted, all do.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// NVMe only: NQN of its subsystem; the default subsystem if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subsystem: Option<String>,
    /// iSCSI only: name of its target; the default target if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// NVMe only: ANA group, from 1 to 16; 1 if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// NVMe only: UUID, from which NGUID and EUI64 are derived, for daemons that serve the image together; the
    /// image's own if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// vhost only: socket of the export.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost: Option<VhostSocketOptions>,
    /// Write log to put in front of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<LogPlace>,
    /// Number of peers to choose that are to have copies of the log, where it names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

impl AttachRequest {
    /// Returns a request without options: for all hosts, in the default subsystem or target, without a write log.
    pub fn new(pool: &str, image: &str, front: Front) -> Self {
        Self {
            pool: pool.into(),
            image: image.into(),
            front,
            read_only: false,
            unit: None,
            hosts: Vec::new(),
            subsystem: None,
            target: None,
            ana_group: None,
            uuid: None,
            vhost: None,
            log: None,
            replicas: None,
        }
    }

    /// Returns the name of the subsystem or target that the export is in, if not the default one.
    pub fn within(&self) -> Option<&str> {
        match self.front {
            Front::Nbd => None,
            Front::Vhost => self.controller_path().and_then(|path| path.to_str()),
            Front::Nvme => self.subsystem.as_deref(),
            Front::Iscsi => self.target.as_deref(),
        }
    }

    /// Returns the field with the name of the subsystem or target.
    pub fn within_mut(&mut self) -> Option<&mut Option<String>> {
        match self.front {
            Front::Nbd | Front::Vhost => None,
            Front::Nvme => Some(&mut self.subsystem),
            Front::Iscsi => Some(&mut self.target),
        }
    }
}

/// Host that may connect to an NVMe subsystem, with the files of its secrets and keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NvmeHost {
    /// NVMe qualified name of the host.
    pub nqn: String,
    /// File with the secret by which the host authenticates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub secret: Option<PathBuf>,
    /// File with the secret by which the controller authenticates to the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub controller_secret: Option<PathBuf>,
    /// File with the host's TLS key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tls_key: Option<PathBuf>,
}

/// NVMe subsystem of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NvmeSubsystem {
    /// NVMe qualified name of the subsystem.
    pub nqn: String,
    /// Set for the default subsystem, which the configuration defines.
    pub is_default: bool,
    /// Set if every host may connect.
    pub any_host: bool,
    /// Hosts that may connect.
    pub hosts: Vec<NvmeHost>,
    /// Number of exports.
    pub exports: usize,
    /// Number of controllers that hosts have created.
    pub controllers: usize,
}

/// Request for a new NVMe subsystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CreateNvmeSubsystem)]
pub struct CreateNvmeSubsystemRequest {
    /// NVMe qualified name of the subsystem.
    pub nqn: String,
    /// Set if every host may connect.
    #[serde(default)]
    pub any_host: bool,
    /// Hosts that may connect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<NvmeHost>,
}

/// CHAP user name and the file of its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChapUser {
    /// CHAP user name.
    pub user: String,
    /// File with the secret.
    #[schema(value_type = String)]
    pub secret: PathBuf,
}

/// iSCSI target of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IscsiTarget {
    /// iSCSI name of the target.
    pub name: String,
    /// Set for the default target, which the configuration defines.
    pub is_default: bool,
    /// Set if every initiator may log in.
    pub any_initiator: bool,
    /// Initiators that may log in; a trailing `*` is a wildcard.
    pub initiators: Vec<String>,
    /// CHAP name of initiators, if they have to authenticate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chap: Option<String>,
    /// CHAP name of the target, if it authenticates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutual_chap: Option<String>,
    /// Number of exports.
    pub exports: usize,
    /// Number of sessions.
    pub sessions: usize,
}

/// Request for a new iSCSI target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = CreateIscsiTarget)]
pub struct CreateIscsiTargetRequest {
    /// iSCSI name of the target.
    pub name: String,
    /// Set if every initiator may log in.
    #[serde(default)]
    pub any_initiator: bool,
    /// Initiators that may log in; a trailing `*` is a wildcard.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initiators: Vec<String>,
    /// CHAP credentials of initiators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chap: Option<ChapUser>,
    /// CHAP credentials of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mutual_chap: Option<ChapUser>,
}

/// ANA state of a group on a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ana {
    /// Port number, from 1 in the order of the addresses.
    pub port: u16,
    /// Listening address of the port.
    pub address: String,
    /// ANA group.
    pub group: u32,
    /// `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
    pub state: String,
    /// Name of the subsystem.
    #[serde(default)]
    pub subsystem: String,
    /// Namespace ids of the subsystem in the group.
    pub namespaces: Vec<u32>,
}

/// Request to set the ANA state of groups on ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SetAna)]
pub struct SetAnaRequest {
    /// ANA state, one of those of [`Ana`].
    pub state: String,
    /// Port number; all ports if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// ANA group; all groups if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

/// Result of an import.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Imported)]
pub struct ImportResult {
    /// The new image.
    pub image: ImageInfo,
    /// Bytes written; the rest of the image is holes.
    pub written: u64,
}

/// Result of an export of an image's content.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExportResult {
    /// Size of the image in bytes.
    pub size: u64,
    /// Bytes that were data; the rest reads as zeroes.
    pub data: u64,
}

/// Space of the embedded store.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StoreSpace {
    /// File or device of the store.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes available.
    pub available: u64,
    /// Number of objects.
    pub objects: u64,
    /// Bytes of live blocks that are stored compressed.
    #[serde(default)]
    pub compressed_logical: u64,
    /// Bytes that these take on the device, which `used` includes.
    #[serde(default)]
    pub compressed_stored: u64,
    /// Limit outside the store that leaves less space than its capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    /// Reason why writes are refused, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
}

/// Progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// Completed units.
    pub done: u64,
    /// Total units.
    pub total: u64,
}

/// Line of a streamed response: any number of progress lines, then a result or an error.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamLine<T> {
    /// Progress; more lines follow.
    Progress(Progress),
    /// Result; the last line.
    Result(T),
    /// Failure; the last line.
    Error(Failure),
}

/// Body of an error response.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Failure of the request.
    pub error: Failure,
}
