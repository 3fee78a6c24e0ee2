//! Options of the commands on exports, their write logs and their reservations.

use std::path::PathBuf;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Subcommand, ValueHint};
use forebay_vhost::serve::QUEUES_MAX;

use super::OneImage;
use super::many::ManyImages;
use crate::api::Front;
use crate::log_place::{LogPlace, REPLICAS_MAX};

/// Takes the numbers that exports over a front may have.
fn units(front: Front) -> RangedI64ValueParser<u32> {
    match front.units() {
        Some(units) => RangedI64ValueParser::new().range(i64::from(*units.start())..=i64::from(*units.end())),
        None => RangedI64ValueParser::new(),
    }
}

/// Options of `attach`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("front").required(true))]
pub struct AttachArgs {
    /// The images.
    #[command(flatten)]
    pub name: ManyImages,

    /// Export it over NBD
    #[arg(long, group = "front")]
    pub nbd: bool,

    /// A host that sees it over NBD: a network (ADDRESS/BITS), the name in its certificate or of its key ('*' at the
    /// end matches anything), or 'unix'; may be repeated [default: all do]
    #[arg(long, value_name = "HOST", requires = "nbd", conflicts_with_all = ["nvme", "iscsi", "vhost"])]
    pub host: Vec<String>,

    /// Export it over NVMe/TCP, as a namespace of a subsystem
    #[arg(long, group = "front")]
    pub nvme: bool,

    /// The NVMe subsystem that it is a namespace of [default: the subsystem of the configuration]
    #[arg(long, value_name = "NQN", requires = "nvme", conflicts_with_all = ["nbd", "iscsi", "vhost"])]
    pub subsystem: Option<String>,

    /// Its namespace id, from 1 to 8192; if left out the one it had before, or the lowest that none had
    #[arg(long, value_name = "N", value_parser = units(Front::Nvme), requires = "nvme", conflicts_with_all = ["nbd", "iscsi", "vhost"])]
    pub nsid: Option<u32>,

    /// Its ANA group, from 1 to 16, whose state 'forebay ana set' changes [default: 1]
    #[arg(long, value_name = "N", requires = "nvme", conflicts_with_all = ["nbd", "iscsi", "vhost"])]
    pub ana_group: Option<u32>,

    /// Its UUID, where daemons serve one namespace together [default: its own]
    #[arg(long, value_name = "UUID", requires = "nvme", conflicts_with_all = ["nbd", "iscsi", "vhost"])]
    pub uuid: Option<String>,

    /// Export it over iSCSI, as a unit of a target
    #[arg(long, groups = ["front", "units"])]
    pub iscsi: bool,

    /// The iSCSI target that it is a unit of [default: the target of the configuration]
    #[arg(long, value_name = "IQN", requires = "iscsi", conflicts_with_all = ["nbd", "nvme", "vhost"])]
    pub target: Option<String>,

    /// Its unit number at an iSCSI target or a controller, from 0 to 16383; if left out the one it had before, or the lowest that none had
    #[arg(long, value_name = "N", value_parser = units(Front::Iscsi), requires = "units", conflicts_with_all = ["nbd", "nvme"])]
    pub lun: Option<u32>,

    /// An initiator that sees it, by name; may be repeated, and end in * [default: all do]
    #[arg(long, value_name = "IQN", requires = "iscsi", conflicts_with_all = ["nbd", "nvme", "vhost"])]
    pub initiator: Vec<String>,

    /// Export it to a virtual machine of this machine over vhost-user, on a socket that the daemon creates at PATH
    #[arg(long, group = "front", value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub vhost: Option<PathBuf>,

    /// Export it as a unit of a virtio-scsi controller, which all images with that PATH are units of, instead of as a
    /// virtio-blk disk
    #[arg(long, group = "units", requires = "vhost", conflicts_with_all = ["nbd", "nvme", "iscsi"])]
    pub scsi: bool,

    /// The number of queues that the virtual machine may use, from 1 to 64 [default: 8]
    #[arg(long, value_name = "N", requires = "vhost", conflicts_with_all = ["nbd", "nvme", "iscsi"],
        value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// The permissions of the socket, in octal; every user who may write to it may connect [default: 0600]
    #[arg(long, value_name = "MODE", requires = "vhost", conflicts_with_all = ["nbd", "nvme", "iscsi"])]
    pub socket_mode: Option<String>,

    /// The user and group that own the socket, by names or numbers [default: those of the daemon]
    #[arg(long, value_name = "USER[:GROUP]", requires = "vhost", conflicts_with_all = ["nbd", "nvme", "iscsi"])]
    pub socket_owner: Option<String>,

    /// Connect to the socket, on which the virtual machine's monitor listens, instead of creating it
    #[arg(long, requires = "vhost", conflicts_with_all = ["nbd", "nvme", "iscsi", "socket_mode", "socket_owner"])]
    pub socket_connect: bool,

    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,

    /// Put a write log in front of it: on a file or device (ssd:PATH:SIZE), in a file on a DAX file system
    /// (pmem:PATH:SIZE), or in memory (dram:SIZE).  One in memory needs a replica: writes are answered only while another
    /// peer has them, and if all of these lose power at once, those not written back are lost.  Several logs may share a path.
    /// In a gateway group it has no path (ssd:SIZE or pmem:SIZE): members offer space by their configuration.  Options follow the size, each after a colon: 'dirty=SIZE' and
    /// 'age=TIME' limit how much, and for how long, the image may lack what the log holds (as in
    /// ssd:/srv/logs:1G:dirty=64M:age=500ms), 'on-flush' answers writes before they are durable, 'force' takes memory
    /// that is not persistent.  Of a log with replicas, 'takeover=auto' lets one take over by itself when the primary is
    /// lost, 'min-replicas=N' answers no write while fewer copies are complete, and 'lease=TIME' is the time without a
    /// sign of life after which a primary counts as lost
    #[arg(long, value_name = "MEDIUM[:PATH]:SIZE", conflicts_with = "read_only")]
    pub log: Option<LogPlace>,

    /// A peer that holds a copy of the write log, by host name, address or id; may be repeated.  A write is answered
    /// once every copy has it, and a peer with a copy can take the image over: 'forebay log takeover'
    #[arg(long, value_name = "PEER", requires = "log")]
    pub replica: Vec<String>,

    /// Choose this many peers to hold copies of the write log: those with room for it, the nearest first
    #[arg(long, value_name = "N", requires = "log", conflicts_with = "replica",
        value_parser = clap::value_parser!(u32).range(1..=REPLICAS_MAX.into()))]
    pub replicas: Option<u32>,
}

/// Options of `detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The images.
    #[command(flatten)]
    pub name: ManyImages,

    /// Only its export over NBD
    #[arg(long, group = "one")]
    pub nbd: bool,

    /// Only its export over NVMe/TCP
    #[arg(long, group = "one")]
    pub nvme: bool,

    /// Only its export over iSCSI
    #[arg(long, group = "one")]
    pub iscsi: bool,

    /// Only its export over vhost-user
    #[arg(long, group = "one")]
    pub vhost: bool,

    /// Disconnect the hosts that have it open, once their requests in flight are completed
    #[arg(short, long)]
    pub force: bool,

    /// Keep the write log, instead of writing it back and ending it
    #[arg(long)]
    pub keep_log: bool,
}

/// Commands on the states of asymmetric namespace access (ANA).
#[derive(Debug, Subcommand)]
pub enum AnaCommand {
    /// List the ANA state of each group of namespaces at each port
    #[command(after_help = "Example:\n  forebay ana ls")]
    Ls,

    /// Set the ANA state of groups and notify the hosts; kept over restarts
    #[command(after_help = "Example:\n  forebay ana set inaccessible --port 1 --group 2")]
    Set(SetAnaArgs),
}

/// Options of `ana set`.
#[derive(Debug, Args)]
pub struct SetAnaArgs {
    /// optimized, non-optimized, inaccessible, persistent-loss or change
    pub state: String,

    /// The port, from 1 in the order of the addresses [default: all]
    #[arg(long, value_name = "N")]
    pub port: Option<u16>,

    /// The group [default: all]
    #[arg(long, value_name = "N")]
    pub group: Option<u32>,
}

/// Commands on write logs.
#[derive(Debug, Subcommand)]
pub enum LogCommand {
    /// List the logs, and the dirty data of each
    #[command(after_help = "Example:\n  forebay log ls")]
    Ls,

    /// Show an image's log
    #[command(after_help = "Example:\n  forebay log info local/disk1")]
    Info(OneImage),

    /// Write back everything that an image's log holds
    #[command(after_help = "Example:\n  forebay log flush local/disk1")]
    Flush(OneImage),

    /// Take an image's log over, of which this daemon has a copy, and serve the image here
    ///
    /// The client of the former primary is fenced first, so that nothing of it reaches the image any more.  Then
    /// 'forebay attach' exports the image here, with every write that was answered.  A primary that is alive and
    /// connected is not taken over without --force: hand the image over with 'forebay detach --keep-log' there.
    #[command(
        after_help = "Examples:\n  forebay log takeover rbd/disk1\n  forebay log takeover rbd/disk1 --flush-only"
    )]
    Takeover(TakeoverArgs),

    /// Discard an image's log
    #[command(after_help = "Example:\n  forebay log discard local/disk1 --force")]
    Discard(DiscardLogArgs),
}

/// Options of `log takeover`.
#[derive(Debug, Args)]
pub struct TakeoverArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Only write back what the log holds, and close it again
    #[arg(long)]
    pub flush_only: bool,

    /// Fence a primary that is alive, and with it all images that it serves from the cluster
    #[arg(short, long)]
    pub force: bool,
}

/// Options of `log discard`.
#[derive(Debug, Args)]
pub struct DiscardLogArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Discard dirty data too
    #[arg(short, long)]
    pub force: bool,
}

/// Commands on reservations.
#[derive(Debug, Subcommand)]
pub enum ReservationsCommand {
    /// List the registered hosts, their keys, and the reservation's holder
    #[command(after_help = "Example:\n  forebay reservations ls local/disk1")]
    Ls(OneImage),

    /// Clear all registrations and the reservation, if a host that holds one will not return
    ///
    /// Registered hosts are notified, and must register again.
    #[command(after_help = "Example:\n  forebay reservations clear local/disk1")]
    Clear(OneImage),
}
