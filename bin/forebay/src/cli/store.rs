//! Options of the commands on the embedded store.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use forebay_block::Compression;

use crate::master_key::MasterKeySource;
use crate::units::Size;

/// Commands on the embedded store.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Create a store, which `serve` otherwise does at its first start
    #[command(
        after_help = "Examples:\n  forebay store init --data /srv/forebay --size 100G\n  forebay store init --compression lz4 --size 100G\n  forebay store init --data /srv/forebay --ec 3+2 /dev/sd{b,c,d,e,f}\n  forebay store init --data /srv/forebay --ec 1+1 /srv/a/store /srv/b/store --size 100G"
    )]
    Init(StoreInitArgs),

    /// Verify everything the store holds; the daemon must not run
    #[command(
        after_help = "Examples:\n  forebay store check --data /srv/forebay\n  forebay store check --rebuild --format json\n  forebay store check --drop-lost"
    )]
    Check(StoreCheckArgs),

    /// List the devices of a store on several, with their states
    #[command(after_help = "Example:\n  forebay store devices --format json")]
    Devices,

    /// Replace a device of the store, or take back one that was away; it is filled in the background
    #[command(
        after_help = "Examples:\n  forebay store replace /dev/sdc /dev/sdf --wait\n  forebay store replace 2 /dev/sdc  # the same device again"
    )]
    Replace(StoreReplaceArgs),

    /// Make the store larger, while it is used: all of a file, block device or devices that have grown, or files of a
    /// given size
    #[command(
        after_help = "Examples:\n  forebay store grow --size 200G\n  forebay store grow  # after its block device has grown\n  forebay store grow /dev/sdb /dev/sdc"
    )]
    Grow(StoreGrowArgs),

    /// Add devices to a store on several; data and parity are moved to them in the background, until all space is used
    #[command(
        after_help = "Examples:\n  forebay store add /dev/sdg --wait\n  forebay store add /srv/f/store --size 100G"
    )]
    Add(StoreAddArgs),

    /// Remove devices from a store on several, while it is used: data and parity are moved to the others in the background
    #[command(after_help = "Examples:\n  forebay store remove /dev/sdc --wait\n  forebay store remove --cancel")]
    Remove(StoreRemoveArgs),

    /// Verify everything that is stored, while the daemon runs, and mend what is wrong
    #[command(after_help = "Examples:\n  forebay store scrub --wait\n  forebay store scrub --status")]
    Scrub(StoreScrubArgs),

    /// Manage the master key, which the keys of encrypted images are wrapped by
    #[command(subcommand)]
    Key(StoreKeyCommand),

    /// Divide a file or block device into named ranges, for several stores; a range is named DEV#NAME wherever a store's
    /// file or device is
    #[command(subcommand)]
    Ranges(StoreRangesCommand),

    /// Show the store's space
    #[command(after_help = "Example:\n  forebay store df")]
    Df,
}

/// Commands on the master key.
#[derive(Debug, Subcommand)]
pub enum StoreKeyCommand {
    /// Create a file with a new random master key, readable by its owner only
    #[command(
        after_help = "Example:\n  forebay store key generate /etc/forebay/master.key\n  forebay serve --master-key file:/etc/forebay/master.key"
    )]
    Generate {
        /// File to create
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },

    /// Show how many images are encrypted, and which master key their keys are wrapped by
    #[command(after_help = "Example:\n  forebay store key status")]
    Status,

    /// Wrap the keys of all encrypted images by another master key; data is not written again
    #[command(
        after_help = "Example:\n  forebay store key generate /etc/forebay/new.key\n  forebay store key rotate file:/etc/forebay/new.key\n  # name it in `serve --master-key` or the configuration from the next start on"
    )]
    Rotate {
        /// Source of the new master key: file:PATH or command:COMMAND
        #[arg(value_name = "SOURCE")]
        to: MasterKeySource,
    },
}

/// Commands on named ranges.
#[derive(Debug, Subcommand)]
pub enum StoreRangesCommand {
    /// Create a range; daemons may use the other ranges meanwhile
    #[command(
        after_help = "Examples:\n  forebay store ranges create /dev/nvme0n1 osd.0 500G\n  forebay store ranges create /dev/nvme0n1 osd.1 --share 300  # all that is left\n  forebay store init --data /srv/osd.0 --store '/dev/nvme0n1#osd.0'"
    )]
    Create {
        /// Block device, or file, which is created or extended if that is needed
        #[arg(value_name = "DEV", value_hint = ValueHint::FilePath)]
        device: PathBuf,

        /// Name: ASCII letters, digits, '-', '_' and '.'
        #[arg(value_name = "NAME")]
        name: String,

        /// Size, rounded up to MiB [default: the largest unused part of the device]
        #[arg(value_name = "SIZE")]
        size: Option<Size>,

        /// Share of the device's queue, relative to the shares of the other ranges
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000))]
        share: u16,

        /// Overwrite what a device without ranges holds
        #[arg(long)]
        force: bool,
    },

    /// List the ranges of a device, with what they hold
    #[command(visible_alias = "ls", after_help = "Example:\n  forebay store ranges list /dev/nvme0n1 --format json")]
    List {
        /// File or block device
        #[arg(value_name = "DEV", value_hint = ValueHint::FilePath)]
        device: PathBuf,
    },

    /// Remove a range that no daemon has open; with the last one, the device is free again
    #[command(visible_alias = "rm", after_help = "Example:\n  forebay store ranges remove /dev/nvme0n1 osd.0 --force")]
    Remove {
        /// File or block device
        #[arg(value_name = "DEV", value_hint = ValueHint::FilePath)]
        device: PathBuf,

        /// Name of the range
        #[arg(value_name = "NAME")]
        name: String,

        /// Remove it although it holds a store or other data, which is lost
        #[arg(long)]
        force: bool,
    },
}

/// Options of `store init`.
#[derive(Debug, Args)]
pub struct StoreInitArgs {
    /// Size of the store file, or of each file of a store on several [default: 80 % of the free space, on several that of
    /// the existing files; a block device's own size]
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<Size>,

    /// Keep data on several devices, K data and M parity columns wide: M devices may be lost; 1+M for mirrors, K+0 for
    /// stripes without redundancy
    #[arg(long, value_name = "K+M", value_parser = parse_columns, requires = "devices")]
    pub ec: Option<(usize, usize)>,

    /// Files or block devices of a store on several, K+M at least
    #[arg(value_name = "DEV", value_hint = ValueHint::FilePath, requires = "ec")]
    pub devices: Vec<PathBuf>,

    /// A file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath, conflicts_with = "ec")]
    pub store: Option<PathBuf>,

    /// Overwrite what is there: a store, file systems and signatures of others, data
    #[arg(long)]
    pub force: bool,

    /// Compression of images that have no setting of their own: none, lz4, zstd, deflate, or with a level: zstd:5
    #[arg(long, value_name = "METHOD")]
    pub compression: Option<Compression>,

    /// Allocate all of the file now, so that others cannot take its space (but on btrfs, or where the file is shared
    /// with snapshots, a write may still need more); not for a block device; files of a store on several always are
    #[arg(long, conflicts_with = "ec")]
    pub preallocate: bool,
}

/// Options of `store check`.
#[derive(Debug, Args)]
pub struct StoreCheckArgs {
    /// A file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Check the metadata only, not the checksum of every stored block
    #[arg(long)]
    pub quick: bool,

    /// Renew a damaged copy of the superblock from the good one, or both from the newest checkpoint if the store is in
    /// a file
    #[arg(long)]
    pub repair: bool,

    /// If the newest checkpoint or the log is damaged, go back to before that for good: what was written since is lost;
    /// if data from before that is overwritten, too, it is named and nothing is written without --force
    #[arg(long)]
    pub roll_back: bool,

    /// If superblocks or checkpoint anchors are lost, find the newest checkpoint in the log and rewrite them; what
    /// would be lost is reported and the store left as it is, unless --roll-back is given, too
    #[arg(long)]
    pub rebuild: bool,

    /// Name the objects and keys that a damaged index has lost; with --force, remove them for good and free their space
    #[arg(long)]
    pub drop_lost: bool,

    /// Write even if that loses what was named without it
    #[arg(long)]
    pub force: bool,

    /// Check a store on several devices although those that are missing may have been used without the others
    #[arg(long)]
    pub accept_missing_devices: bool,
}

/// Options of `store replace`.
#[derive(Debug, Args)]
pub struct StoreReplaceArgs {
    /// Device to replace: its path or number, as `store devices` shows them
    #[arg(value_name = "OLD")]
    pub old: String,

    /// File or block device that takes its place; the same path takes back a device that was away
    #[arg(value_name = "NEW", value_hint = ValueHint::FilePath)]
    pub new: PathBuf,

    /// Overwrite what the new one holds
    #[arg(long)]
    pub force: bool,

    /// Wait until it is filled
    #[arg(long)]
    pub wait: bool,
}

/// Options of `store grow`.
#[derive(Debug, Args)]
pub struct StoreGrowArgs {
    /// Devices of a store on several, by path or number [default: all]
    #[arg(value_name = "DEV")]
    pub devices: Vec<String>,

    /// Size that the file, or each file of a store on several, is extended to [default: the present size]
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<Size>,
}

/// Options of `store add`.
#[derive(Debug, Args)]
pub struct StoreAddArgs {
    /// Files or block devices
    #[arg(value_name = "DEV", value_hint = ValueHint::FilePath, required = true)]
    pub devices: Vec<PathBuf>,

    /// Size of each file, which is created if it is not there [default: the size of the existing file; a block device's own]
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<Size>,

    /// Overwrite what they hold
    #[arg(long)]
    pub force: bool,

    /// Wait until data and parity have been moved to them
    #[arg(long)]
    pub wait: bool,
}

/// Options of `store remove`.
#[derive(Debug, Args)]
pub struct StoreRemoveArgs {
    /// Devices, by path or number
    #[arg(value_name = "DEV", required_unless_present = "cancel")]
    pub devices: Vec<String>,

    /// Wait until they are no devices of the store any more
    #[arg(long)]
    pub wait: bool,

    /// Keep devices that are being removed [default: all of them]
    #[arg(long, conflicts_with = "wait")]
    pub cancel: bool,
}

/// Options of `store scrub`.
#[derive(Debug, Args)]
pub struct StoreScrubArgs {
    /// Wait until it is complete; fails if data is lost
    #[arg(long, conflicts_with = "status")]
    pub wait: bool,

    /// Show the progress and the results of the current or last scrub, without starting one
    #[arg(long)]
    pub status: bool,
}

/// Parses `K+M`.
fn parse_columns(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('+').and_then(|(data, parity)| Some((data.parse().ok()?, parity.parse().ok()?)));
    let columns: (usize, usize) = parts.ok_or_else(|| format!("'{text}' is not K+M, like 3+2"))?;
    match columns {
        (0, _) => Err("a store needs a data column at least, like 1+1".into()),
        (1, 0) => Err("1+0 is one device; leave out --ec".into()),
        (data, parity) if data > 32 || parity > 16 => {
            Err(format!("{data}+{parity}: at most 32 data and 16 parity columns"))
        }
        columns => Ok(columns),
    }
}
