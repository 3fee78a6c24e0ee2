//! Options of the commands on the embedded store.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use crate::units::Size;

/// Commands on the embedded store.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Create a store, which `serve` otherwise does at its first start
    #[command(after_help = "Example:\n  forebay store init --data /srv/forebay --size 100G")]
    Init(StoreInitArgs),

    /// Verify everything the store holds; the daemon must not run
    #[command(
        after_help = "Examples:\n  forebay store check --data /srv/forebay\n  forebay store check --rebuild --format json"
    )]
    Check(StoreCheckArgs),

    /// Show the store's space
    #[command(after_help = "Example:\n  forebay store df")]
    Df,
}

/// Options of `store init`.
#[derive(Debug, Args)]
pub struct StoreInitArgs {
    /// Size of the store file [default: 80 % of the free space; a block device's own size]
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<Size>,

    /// A file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Overwrite what is there: a store, file systems and signatures of others, data
    #[arg(long)]
    pub force: bool,

    /// Allocate all of the file now, so that others cannot take its space (but on btrfs, or where the file is shared
    /// with snapshots, a write may still need more); not for a block device
    #[arg(long)]
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

    /// If the newest checkpoint or the log is damaged, go back to before that for good: what was written since is lost
    #[arg(long)]
    pub roll_back: bool,

    /// If superblocks or checkpoint anchors are lost, find the newest checkpoint in the log and rewrite them; what
    /// would be lost is reported and the store left as it is, unless --roll-back is given, too
    #[arg(long)]
    pub rebuild: bool,
}
