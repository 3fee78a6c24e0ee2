//! What the control API says and is asked: plain data, shared by the daemon, the command line and OpenAPI.
//!
//! Field names are `rbd`'s where `rbd` has the same thing, and stable.  Sizes are bytes.

mod image;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use forebay_iscsi::wire::Lun;
use forebay_nvmf::session::admin::NAMESPACES_MAX;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::Failure;

/// What `status` shows.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// It serves.
    pub ready: bool,
    /// The daemon's version.
    pub version: String,
    /// Its process number.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Reactors.
    pub cores: u16,
    /// How they reach disks and sockets: `io_uring` or `epoll`.
    pub driver: String,
    /// The data directory.
    #[schema(value_type = String)]
    pub data: PathBuf,
    /// The control socket.
    #[schema(value_type = String)]
    pub control: PathBuf,
    /// Where HTTP is served besides.
    pub http: Option<String>,
    /// Where NBD is served.
    pub nbd: Vec<String>,
    /// Where NVMe/TCP is served.
    pub nvme: Vec<String>,
    /// The name of the NVMe subsystem.
    pub nvme_nqn: String,
    /// Where iSCSI is served.
    pub iscsi: Vec<String>,
    /// The name of the iSCSI target.
    pub iscsi_name: String,
    /// The pools.
    pub pools: Vec<Pool>,
    /// How many images are exported.
    pub targets: usize,
    /// Number of them that hosts cannot reach; `targets` says why.
    #[serde(default)]
    pub unserved: usize,
    /// How many connections hosts hold.
    pub connections: usize,
    /// Where other daemons come.
    #[serde(default)]
    pub peer: Vec<String>,
    /// Other daemons, and clients that speak in messages.
    #[serde(default)]
    pub peers: Vec<Peer>,
}

/// Another daemon, or a client that speaks in messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Where it is.
    pub address: String,
    /// Who it has shown to be; empty on this machine without a key, and of those that we connect to.
    pub name: String,
    /// We connect to it, by configuration; otherwise it has connected to us.
    pub outgoing: bool,
    /// `open`, `connecting` (why not is in `reason`), or `standby`: it may come back to its session.
    pub state: String,
    /// What carries the messages now or did last: `tcp`, `rdma`, `unix` or `shm`; empty before the first time.
    pub transport: String,
    /// Messages to it that are not sent or not acknowledged yet.
    pub pending: usize,
    /// Messages of it that are held here.
    pub held: usize,
    /// Why there is no stream.
    pub reason: Option<String>,
}

/// A pool and its space.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// `store` or `ram`.
    pub kind: String,
    /// What can be stored in all.
    pub capacity: u64,
    /// What is stored.
    pub used: u64,
    /// What can still be stored.
    pub available: u64,
    /// Objects.
    pub objects: u64,
    /// Why less can be stored than the pool itself would take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    /// Reason why nothing can be written, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
}

/// How an image is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Front {
    /// Over NBD.
    Nbd,
    /// Over NVMe/TCP.
    Nvme,
    /// Over iSCSI.
    Iscsi,
}

impl Front {
    /// All of them.
    pub const ALL: [Front; 3] = [Front::Nbd, Front::Nvme, Front::Iscsi];

    /// Its name in URIs and listings.
    pub fn name(self) -> &'static str {
        match self {
            Front::Nbd => "nbd",
            Front::Nvme => "nvme",
            Front::Iscsi => "iscsi",
        }
    }

    /// The numbers that exports may have within their front: namespace ids, LUNs.  `None` where exports have names
    /// instead.
    pub fn units(self) -> Option<RangeInclusive<u32>> {
        match self {
            Front::Nbd => None,
            Front::Nvme => Some(1..=NAMESPACES_MAX),
            Front::Iscsi => Some(0..=u32::from(Lun::MAX)),
        }
    }

    /// Checks that an export may have a number.
    ///
    /// # Errors
    /// When there are no such numbers; the limit is named.
    pub fn check_unit(self, unit: u32) -> Result<(), Failure> {
        match self.units() {
            None => Err(Failure::invalid(format!("number {unit}: exports over {} have no numbers", self.name()))),
            Some(units) if !units.contains(&unit) => {
                let (first, last) = units.into_inner();
                let what =
                    format!("number {unit} is out of range: exports over {} have {first} to {last}", self.name());
                Err(Failure::invalid(what).hint("choose one of these, or leave it out"))
            }
            Some(_) => Ok(()),
        }
    }
}

/// An export.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Target {
    /// The image's pool.
    pub pool: String,
    /// The image's name.
    pub image: String,
    /// How it is exported.
    pub front: Front,
    /// Writes are refused.
    pub read_only: bool,
    /// What a client uses; nothing while no daemon serves it.
    pub uri: Option<String>,
    /// The same through each of the daemon's addresses.
    pub uris: Vec<String>,
    /// Connections that hosts hold.
    pub connections: usize,
    /// Its write log, while it is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<Log>,
    /// Why it is not served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

pub use crate::log_place::{LogMedium, LogPlace};
pub use image::{
    DiskUsage, ImageInfo, ImageListing, ImageParent, ImageStatus, ImageSummary, ImageUsage, ImageWatcher, ListedParent,
};

/// A write log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Log {
    /// Its name.
    pub id: String,
    /// The image it belongs to, by the name it had when the log was made.
    pub image: String,
    /// Where it is.
    pub place: LogPlace,
    /// The epoch of its membership.
    pub epoch: u64,
    /// `acquiring`, `on`, `turning-off`, `off` or `failed` while it is open; otherwise `closed`, `open` (elsewhere), `abandoned` (no
    /// image's record names it) or `unreachable`.
    pub state: String,
    /// Why it is not on, or does not get on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes of the image that the backend may lack at most; as many as the log holds if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<u64>,
    /// Milliseconds for which it may lack a write.
    pub dirty_age_max_ms: u64,
    /// Entries that the backend may not hold.
    pub dirty_entries: u64,
    /// Bytes they are about.
    pub dirty_bytes: u64,
    /// When the oldest of them was written: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_since_ms: Option<u64>,
}

impl Log {
    /// One of which nothing is known but where it is.
    pub fn at(place: LogPlace) -> Self {
        Self {
            id: String::new(),
            image: String::new(),
            dirty_max: place.dirty_max,
            dirty_age_max_ms: place.dirty_age_ms.unwrap_or_default(),
            place,
            epoch: 0,
            state: String::new(),
            reason: None,
            dirty_entries: 0,
            dirty_bytes: 0,
            dirty_since_ms: None,
        }
    }

    /// What is dirty, for people.
    pub fn dirty(&self) -> String {
        format!("{} in {} entries", crate::units::Size(self.dirty_bytes), self.dirty_entries)
    }
}

/// What came of reading hosts and secrets again.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// Other settings differ from those that the daemon was started with, and count after a restart.
    pub restart: bool,
}

/// Who may read and write an image that several hosts share.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Reservations {
    /// The hosts that are registered.
    pub registrants: Vec<Registrant>,
    /// The kind of the reservation that is held.
    pub kind: Option<String>,
    /// The host that holds the whole image (SPC-2's RESERVE).
    pub whole: Option<String>,
    /// They survive a restart.
    pub persistent: bool,
}

/// A host that is registered.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Registrant {
    /// Its identity in its protocol; what is not printable is escaped.
    pub host: String,
    /// Its key.
    pub key: u64,
    /// It holds the reservation, maybe with others.
    pub holder: bool,
}

/// Asks for a new image.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateImage {
    /// The pool.
    pub pool: String,
    /// The new image's name.
    pub image: String,
    /// Its size.
    pub size: u64,
    /// Bytes an object, a power of two from 64 KiB to 32 MiB; 4 MiB if left out.
    #[serde(default = "default_object_size")]
    pub object_size: u64,
}

/// Bytes an object when nothing is said, as in `rbd`.
pub fn default_object_size() -> u64 {
    4 << 20
}

/// Asks for a change of an image: another size or another name.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateImage {
    /// The new size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The size may shrink, which loses the data past the new end.
    #[serde(default)]
    pub allow_shrink: bool,
    /// The new name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Asks for an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// The pool.
    pub pool: String,
    /// The image.
    pub image: String,
    /// How.
    pub front: Front,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Its number within the front (a LUN from 0 to 16383, a namespace id from 1 to 8192), kept over restarts; if left
    /// out the one it had before, or the lowest that none had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// Hosts that see it, by their names in the front's protocol (over iSCSI; `*` at the end of one stands for
    /// anything); all do if left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Over NVMe: its ANA group, from 1 to 16; 1 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// Over NVMe: its UUID, from which NGUID and EUI64 follow, for daemons that serve it together; its own if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Put a write log in front of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<LogPlace>,
}

/// How a group of NVMe namespaces is reached through a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ana {
    /// The port's number, from 1 in the order of the addresses.
    pub port: u16,
    /// Where it listens.
    pub address: String,
    /// The group.
    pub group: u32,
    /// `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
    pub state: String,
    /// Ids of its namespaces.
    pub namespaces: Vec<u32>,
}

/// Sets how groups are reached through ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetAna {
    /// One of the states of [`Ana`].
    pub state: String,
    /// The port; all of them if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The group; all of them if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

/// What an import has made.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Imported {
    /// The new image.
    pub image: ImageInfo,
    /// Bytes that were written; the rest is holes.
    pub written: u64,
}

/// What an export has written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Exported {
    /// The image's size.
    pub size: u64,
    /// Bytes that were data; the rest reads as zeroes.
    pub data: u64,
}

/// The embedded store's space.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct StoreSpace {
    /// Its file or device.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// What can be stored in all.
    pub capacity: u64,
    /// What is stored.
    pub used: u64,
    /// What can still be stored.
    pub available: u64,
    /// Objects.
    pub objects: u64,
    /// Why less can be stored than the store itself would take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
    /// Reason why nothing can be written, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
}

/// Done of what there is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// So much is done.
    pub done: u64,
    /// Of so much.
    pub total: u64,
}

/// A line of a streamed answer: any number of progress lines, then a result or an error.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line<T> {
    /// It goes on.
    Progress(Progress),
    /// It is done.
    Result(T),
    /// It has failed.
    Error(Failure),
}

/// The body of an answer that is an error.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Why.
    pub error: Failure,
}
