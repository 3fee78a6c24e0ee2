//! The command line: what can be typed, and the help that says so.

mod access;
mod cache;
mod clones;
mod complete;
mod config;
mod diffs;
mod exports;
mod gateways;
mod groups;
mod images;
mod manage;
pub mod many;
mod map;
mod names;
mod namespaces;
mod perf;
mod places;
mod rbd_only;
mod serve;
mod snapshots;
mod store;
mod trash;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;
use serde::Deserialize;

use crate::master_key::MasterKeySource;

pub use access::{AdmitInitiatorArgs, IscsiTargetCommand, NvmeSubsystemCommand};
pub use cache::CacheCommand;
pub use clones::{ChildrenArgs, CloneArgs};
pub use complete::{CompleteArgs, Quoting};
pub use config::{ConfigCommand, ConfigImageCommand, ConfigPoolCommand};
pub use diffs::{ChangesArgs, CopyArgs, DeepCommand, DiffArgs, ExportDiffArgs, ImportDiffArgs, MergeDiffArgs};
pub use exports::{AnaCommand, AttachArgs, DetachArgs, LogCommand, ReservationsCommand};
pub use gateways::{
    CreateGroupArgs, DrainGroupArgs, GroupStatusArgs, HostSource, JoinGroupArgs, OnOff, RebalanceGroupArgs,
    RemoveGroupArgs, SetGroupArgs, SetWeightArgs,
};
pub use groups::{GroupCommand, GroupImageCommand, GroupSnapCommand};
pub use images::{
    BenchArgs, CreateArgs, DuArgs, ExportArgs, ImportArgs, IoPattern, IoType, LsArgs, MvArgs, ResizeArgs, SparsifyArgs,
};
pub use manage::{FeatureCommand, FeatureNames, ImageMetaCommand, LockCommand, ObjectMapCommand};
pub use map::{DeviceTypeArgs, MapArgs, MappedDeviceCommand, UnmapArgs};
pub use names::{DuTarget, MaybeImage, OneImage, RenameOperands};
pub use namespaces::NamespaceCommand;
pub use perf::{MessengerEndArgs, MessengerRunArgs, PerfAccelArgs, PerfCommand, PerfMessenger};
pub use rbd_only::refusal;
pub use serve::{DriverKind, ServeArgs};
pub use snapshots::{OneSource, RemovedSnapshot, SnapCommand, SnapLimitCommand, SnapRenameArgs};
pub use store::{
    StoreAddArgs, StoreCheckArgs, StoreCommand, StoreGrowArgs, StoreInitArgs, StoreKeyCommand, StoreRangesCommand,
    StoreRemoveArgs, StoreReplaceArgs, StoreScrubArgs,
};
pub use trash::TrashCommand;

/// Fast block volumes: images on an embedded object store, served to hosts.
///
/// Commands go to the running daemon over its control socket; when none runs, they open the store themselves.
/// Image specs are written POOL/IMAGE; the pool `local`, the embedded store, may be left out.
/// Images in a namespace are written POOL/NAMESPACE/IMAGE.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, propagate_version = true, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// Command to run.
    #[command(subcommand)]
    pub command: CliCommand,

    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalArgs,
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
pub struct GlobalArgs {
    /// Directory of the embedded store and the daemon's state
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        value_hint = ValueHint::DirPath,
        long_help = "Directory of the embedded store and the daemon's state.\n\
            Without it: FOREBAY_DATA; then /var/lib/forebay for root, otherwise forebay under $XDG_DATA_HOME or ~/.local/share."
    )]
    pub data: Option<PathBuf>,

    /// The daemon's control socket [default: FOREBAY_CONTROL, then DIR/control.sock]
    #[arg(long, global = true, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub control: Option<PathBuf>,

    /// Source of the embedded store's master key, which encrypted images need: file:PATH, command:COMMAND or env:NAME
    /// [default: FOREBAY_MASTER_KEY]
    #[arg(long, global = true, value_name = "SOURCE", env = "FOREBAY_MASTER_KEY", hide_env = true)]
    pub master_key: Option<MasterKeySource>,

    /// Output format of results
    #[arg(long, global = true, value_name = "FORMAT", default_value = "plain")]
    pub format: Format,

    /// Indent JSON for reading
    #[arg(long, global = true)]
    pub pretty_format: bool,

    /// Draw no progress bars
    #[arg(long, global = true)]
    pub no_progress: bool,

    /// Filter of log messages on standard error [default: FOREBAY_LOG]: error, warn, info, debug, trace, or a filter
    /// such as `info,forebay_nbd=debug`
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,

    /// Format of the log's lines [default: text]
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,

    /// Access to a Ceph cluster.
    #[command(flatten)]
    pub ceph: CephArgs,
}

/// Access to a Ceph cluster: options common to all Ceph clients.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct CephArgs {
    /// Configuration of a Ceph cluster, whose pools can then be named [default: CEPH_CONF, then /etc/ceph/ceph.conf]
    #[arg(long, short = 'c', global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub conf: Option<PathBuf>,

    /// Name as a client of the Ceph cluster: client.ID [default: admin]
    #[arg(long, global = true, value_name = "ID")]
    pub id: Option<String>,

    /// Keyring with our key for the Ceph cluster
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub keyring: Option<PathBuf>,

    /// Name of the Ceph cluster, that its files begin with [default: ceph]
    #[arg(long, global = true, value_name = "NAME")]
    pub cluster: Option<String>,
}

impl CephArgs {
    /// Returns the flags for the client; they override those of a configuration file.
    pub fn flags(&self, file: CephArgs) -> forebay_rados::Flags {
        forebay_rados::Flags {
            conf: self.conf.clone().or(file.conf),
            id: self.id.clone().or(file.id),
            keyring: self.keyring.clone().or(file.keyring),
            cluster: self.cluster.clone().or(file.cluster),
        }
    }
}

impl GlobalArgs {
    /// Fills in from the environment what the command line does not say; an empty variable says nothing.
    pub fn with_environment(mut self) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        self.data = self.data.or_else(|| variable("FOREBAY_DATA").map(PathBuf::from));
        self.control = self.control.or_else(|| variable("FOREBAY_CONTROL").map(PathBuf::from));
        let log = || variable("FOREBAY_LOG").map(|value| value.to_string_lossy().into_owned());
        self.log_level = self.log_level.or_else(log);
        self
    }
}

/// Format of the log's lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// An object of JSON: `timestamp`, `level`, `target`, `message`, and what the line is about.
    Json,
}

/// Output format of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables and lines for people.
    Plain,
    /// JSON with stable field names.
    Json,
}

/// Commands of the program.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run the daemon
    ///
    /// Serves volumes until it is told to stop (SIGTERM or SIGINT; a second signal ends it at once).  The embedded
    /// store is created at the first start.  Tells systemd when it is ready (Type=notify).
    #[command(after_help = "Example:\n  forebay serve --data /srv/forebay --nbd 127.0.0.1:10809 --cores 2")]
    Serve(ServeArgs),

    /// Show whether the daemon is ready and what it serves, or list the watchers of an image
    ///
    /// Exits with 0 when the daemon is ready and with 4 when none answers.  With an image it lists, as 'rbd status'
    /// does, the clients that have the image open; no daemon is needed for that.
    #[command(after_help = "Examples:\n  forebay status --format json\n  forebay status rbd/disk1")]
    Status(MaybeImage),

    /// Create images
    #[command(
        after_help = "Examples:\n  forebay create local/disk1 --size 10G\n  forebay create -p rbd --image disk1 --size 10G\n  forebay create local/disk1 --size 10G --compression zstd:5\n  forebay create local/disk1 --size 10G --encrypt\n  seq -f disk%g 100 | forebay create --images-from - --size 10G"
    )]
    Create(CreateArgs),

    /// List the images of a pool, in the output format of 'rbd ls'
    #[command(
        visible_alias = "list",
        after_help = "Examples:\n  forebay ls -l local\n  forebay ls -p rbd --format json"
    )]
    Ls(LsArgs),

    /// Show the size and layout of an image or snapshot, in the output format of 'rbd info'
    #[command(
        after_help = "Examples:\n  forebay info local/disk1 --format json --pretty-format\n  forebay info local/disk1@monday"
    )]
    Info(OneSource),

    /// Change an image's size, while it is in use too
    #[command(after_help = "Example:\n  forebay resize local/disk1 --size 20G")]
    Resize(ResizeArgs),

    /// Remove an image and all its data
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay rm local/disk1")]
    Rm(OneImage),

    /// Rename an image within its pool
    #[command(visible_alias = "rename", after_help = "Example:\n  forebay mv local/disk1 local/database")]
    Mv(MvArgs),

    /// Create, list and remove snapshots, and roll images back to them
    #[command(subcommand)]
    Snap(SnapCommand),

    /// Clone a snapshot: create an image that shares the snapshot's data until it changes it
    ///
    /// A clone of version 1 needs a protected snapshot, which stays protected as long as it has clones.  With version 2 the
    /// snapshot can be removed: it is kept in the trash until it has no clones any more.
    #[command(
        after_help = "Examples:\n  forebay clone local/golden@v1 local/vm1\n  forebay clone -p rbd --image golden --snap v1 --dest-pool fast --dest vm1"
    )]
    Clone(CloneArgs),

    /// List the clones of an image's snapshots, or of one snapshot, in the output format of 'rbd children'
    #[command(
        after_help = "Examples:\n  forebay children local/golden@v1\n  forebay children local/golden --descendants --format json"
    )]
    Children(ChildrenArgs),

    /// Copy the data that a clone shares with its parent into it, which makes it independent
    ///
    /// The image can be in use meanwhile.
    #[command(after_help = "Example:\n  forebay flatten local/vm1")]
    Flatten(OneImage),

    /// Free the space of zeroes that an image stores
    ///
    /// The image can be in use meanwhile, and reads as before. Snapshots keep what they share with it.
    #[command(after_help = "Examples:\n  forebay sparsify local/vm1\n  forebay sparsify rbd/vm1 --sparse-size 64K")]
    Sparsify(SparsifyArgs),

    /// Group images, and snapshot all of a group at one moment; group daemons that serve the same volumes
    #[command(subcommand)]
    Group(GroupCommand),

    /// Divide a pool into namespaces, with images, groups and a trash of their own
    #[command(subcommand)]
    Namespace(NamespaceCommand),

    /// Move images to the trash, restore them, and remove them for good
    #[command(subcommand)]
    Trash(TrashCommand),

    /// List and change the metadata of images
    #[command(subcommand)]
    ImageMeta(ImageMetaCommand),

    /// List, take and remove locks on images
    #[command(subcommand)]
    Lock(LockCommand),

    /// Enable and disable features of images
    #[command(subcommand)]
    Feature(FeatureCommand),

    /// Check and rebuild object maps
    #[command(subcommand)]
    ObjectMap(ObjectMapCommand),

    /// Print the notifications that the clients of an image send each other
    ///
    /// Until a line is read from standard input, or it ends.  This process is a client of the Ceph cluster of its own.
    #[command(after_help = "Example:
  forebay watch rbd/disk1")]
    Watch(OneImage),
    /// Override librbd's options, such as limits of requests per second, for images and pools
    #[command(subcommand)]
    Config(ConfigCommand),

    /// Import an image from a file, a block device or standard input
    ///
    /// Holes and runs of zeroes take no space.  From standard input the image grows as data comes.
    #[command(
        after_help = "Examples:\n  forebay import debian.raw local/disk1\n  zstdcat disk.zst | forebay import - local/disk1\n  forebay import --export-format 2 disk1.rbd rbd/disk1"
    )]
    Import(ImportArgs),

    /// Write an image or snapshot to a file, a block device or standard output
    ///
    /// What reads as zeroes becomes a hole in a file, and is written out to standard output.
    #[command(
        after_help = "Examples:\n  forebay export local/disk1 disk1.raw\n  forebay export local/disk1@monday disk1.raw\n  forebay export local/disk1 - | zstd > disk1.zst\n  forebay export --export-format 2 rbd/disk1 disk1.rbd"
    )]
    Export(ExportArgs),

    /// List what has changed in an image since a snapshot, in the output format of 'rbd diff'
    ///
    /// Without --from-snap it lists the data of the image, or of the snapshot.
    #[command(
        after_help = "Examples:\n  forebay diff local/disk1 --from-snap monday\n  forebay diff local/disk1@tuesday --from-snap monday --format json"
    )]
    Diff(DiffArgs),

    /// Write what has changed in an image since a snapshot to a file or standard output, as 'rbd export-diff' does
    #[command(
        after_help = "Examples:\n  forebay export-diff local/disk1@tuesday --from-snap monday tuesday.diff\n  forebay export-diff local/disk1@monday - | ssh backup rbd import-diff - rbd/disk1"
    )]
    ExportDiff(ExportDiffArgs),

    /// Apply changes of 'export-diff' to an image, and create the snapshot that they lead to
    ///
    /// The image must have the snapshot that the changes begin at, and must not be exported.  An import that was
    /// interrupted is repeated: the snapshot is created last.
    #[command(
        after_help = "Examples:\n  forebay import-diff tuesday.diff local/disk1\n  rbd export-diff rbd/disk1@monday - | forebay import-diff - local/disk1"
    )]
    ImportDiff(ImportDiffArgs),

    /// Merge two successive diffs into one
    #[command(after_help = "Example:\n  forebay merge-diff monday.diff tuesday.diff both.diff")]
    MergeDiff(MergeDiffArgs),

    /// Copy an image or snapshot to a new image
    #[command(
        visible_alias = "copy",
        after_help = "Examples:\n  forebay cp local/disk1 local/disk2\n  forebay cp rbd/disk1@monday local/disk1"
    )]
    Cp(CopyArgs),

    /// Copy images with their snapshots
    #[command(subcommand)]
    Deep(DeepCommand),

    /// Show disk usage of images, in the output format of 'rbd du'
    ///
    /// A name without a slash is a pool, as in 'ls'; if there is no such pool, it is an image of the pool local.
    #[command(
        visible_alias = "disk-usage",
        after_help = "Examples:\n  forebay du rbd\n  forebay du local/disk1 --format json"
    )]
    Du(DuArgs),

    /// Benchmark an image from this process
    ///
    /// Beside a running daemon it is a client of the Ceph cluster of its own; images of the pool 'local' can be
    /// measured when no daemon has the store.  Writes overwrite what is in the image.
    #[command(
        after_help = "Example:\n  forebay bench rbd/disk1 --io-type read --io-pattern rand --io-size 4K --depth 32"
    )]
    Bench(BenchArgs),

    /// Export images to hosts, and print the URIs that clients use
    ///
    /// Exports are kept over restarts of the daemon.
    #[command(
        after_help = "Examples:\n  qemu-img info $(forebay attach local/disk1 --nbd)\n  forebay attach local/disk1 local/disk2 --nvme\n  forebay attach local/disk1 --vhost /run/forebay/vm1.sock --socket-mode 0660 --socket-owner :kvm"
    )]
    Attach(AttachArgs),

    /// End the exports of images
    #[command(after_help = "Example:\n  forebay detach local/disk1")]
    Detach(DetachArgs),

    /// List what is exported
    #[command(after_help = "Example:\n  forebay targets --format json")]
    Targets,

    /// Map an image to a block device of this machine, and print the device
    ///
    /// The device is one of the kernel's NBD client, and the daemon serves it: the image is exported over NBD, to this
    /// machine only, unless it is exported already.  Requests wait while the daemon restarts.  Needs a daemon that runs as
    /// root (CAP_SYS_ADMIN).  A device does not outlive a reboot of the machine.
    #[command(after_help = "Examples:\n  mkfs.ext4 $(forebay map local/disk1)\n  forebay map --read-only rbd/disk1")]
    Map(MapArgs),

    /// End the block device of a mapped image, and the export that was created for it
    ///
    /// Dirty pages are written first.  A device that is in use is refused.
    #[command(after_help = "Examples:\n  forebay unmap local/disk1\n  forebay unmap /dev/nbd0")]
    Unmap(UnmapArgs),

    /// List the mapped images, in the output format of 'rbd showmapped'
    #[command(after_help = "Example:\n  forebay showmapped --format json")]
    Showmapped(DeviceTypeArgs),

    /// Map and unmap images, with rbd's longer names
    #[command(subcommand)]
    Device(MappedDeviceCommand),

    /// Show or set ANA states of NVMe namespaces, so that hosts use another path
    #[command(subcommand)]
    Ana(AnaCommand),

    /// Manage NVMe subsystems, and the hosts that may connect to each, while the daemon runs
    #[command(subcommand)]
    NvmeSubsystem(NvmeSubsystemCommand),

    /// Manage iSCSI targets, and the initiators that may log in to each, while the daemon runs
    #[command(subcommand)]
    IscsiTarget(IscsiTargetCommand),

    /// Reload access-control settings: hosts, secrets and keys, from the configuration and the files that it names
    ///
    /// Hosts that are not allowed any more are disconnected, once their requests in flight are done.  Other settings
    /// need a restart.
    #[command(after_help = "Example:\n  forebay reload")]
    Reload,

    /// Show or clear the reservations of an image that several hosts share
    #[command(subcommand)]
    Reservations(ReservationsCommand),

    /// Manage write logs, whether their images are open or not
    #[command(subcommand)]
    Log(LogCommand),

    /// Show or empty the read cache of snapshot parents, which all clones share, and of own blocks
    #[command(subcommand)]
    Cache(CacheCommand),

    /// Manage the embedded store
    #[command(subcommand)]
    Store(StoreCommand),

    /// Measure the speed of components on this machine
    #[command(subcommand)]
    Perf(PerfCommand),

    /// Print the completions of a shell
    ///
    /// Those of bash, zsh and fish know the names of images, pools and exports while a daemon runs.
    #[command(after_help = "Example:\n  forebay completions bash > /usr/share/bash-completion/completions/forebay")]
    Completions {
        /// The shell
        shell: Shell,
    },

    /// Say what could come next on a command line, for the completions of a shell
    #[command(
        name = "__complete",
        hide = true,
        after_help = "Example:\n  forebay __complete bash -- forebay info local/"
    )]
    Complete(CompleteArgs),

    /// Print the manual page, or write one page a command
    #[command(after_help = "Examples:\n  forebay man | man -l -\n  forebay man --dir /usr/share/man/man1")]
    Man {
        /// Write forebay.1, forebay-create.1 and so on into this directory
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        dir: Option<PathBuf>,
    },
}

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   failed
  2   wrong usage or invalid request
  3   no such pool, image, target or file
  4   no daemon answers, or no monitor of a cluster
  5   it exists already
  6   in use, or locked by another process
  7   no space left
  8   stored data is damaged
  9   not supported by this build or pool
  10  not permitted

Environment:
  FOREBAY_DATA     as --data
  FOREBAY_CONTROL  as --control
  FOREBAY_LOG      as --log-level
  FOREBAY_RUN_DIR  where running daemons list themselves [default: /run/forebay for root, $XDG_RUNTIME_DIR/forebay]";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::api::Front;
    use crate::failure::FailureKind;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_names_every_exit_code() {
        for kind in FailureKind::ALL {
            let line = format!("  {:<4}{}", kind.exit_code(), kind.describe());
            assert!(EXIT_CODES.contains(&line), "the help lacks '{line}'");
            let name = serde_json::to_value(kind).expect("a name");
            let line = format!("| {} | `{}` | {} |", kind.exit_code(), name.as_str().expect("a text"), kind.describe());
            assert!(include_str!("../../../docs/operations.md").contains(&line), "docs/operations.md lacks '{line}'");
        }
    }

    #[test]
    fn limits_in_help_texts_are_those_that_hold() {
        let root = Cli::command();
        let help = |command: &str, option: &str| {
            let command = root.find_subcommand(command).expect("a command");
            let found = command.get_arguments().find(|argument| argument.get_long() == Some(option));
            found.and_then(clap::Arg::get_help).unwrap_or_else(|| panic!("no help for --{option}")).to_string()
        };
        let units = |front: Front| {
            let (first, last) = front.units().expect("numbers").into_inner();
            format!("from {first} to {last};")
        };
        let (least, most) = forebay_image::OBJECT_SIZES.into_inner();
        let object_size = format!("a power of two from {}K to {}M", least >> 10, most >> 20);
        let default = |value: String| format!("[default: {value}]");
        let age = forebay_writelog::DirtyLimits::default().age_max;
        let free = format!("{} % of the free space", crate::config::STORE_PERCENT);
        let quoted = [
            ("attach", "nsid", units(Front::Nvme)),
            ("attach", "lun", units(Front::Iscsi)),
            ("attach", "ana-group", format!("from 1 to {},", forebay_nvmf::session::admin::ANA_GROUPS_MAX)),
            ("attach", "queues", format!("from 1 to {} ", forebay_vhost::serve::QUEUES_MAX)),
            ("attach", "queues", default(crate::api::VhostSocketOptions::new("/run/x").queue_count().to_string())),
            ("create", "object-size", object_size.clone()),
            ("import", "object-size", object_size),
            ("serve", "linger-us", default(crate::config::LINGER_US.to_string())),
            ("serve", "store-cache", default(format!("{}M", crate::config::STORE_CACHE.0 >> 20))),
            ("serve", "store-size", default(free)),
            ("serve", "log-dirty-age", default(format!("{}s", age.as_secs()))),
        ];
        for (command, option, text) in quoted {
            let help = help(command, option);
            assert!(help.contains(&text), "the help of {command} --{option} lacks '{text}': {help}");
        }
    }

    #[test]
    fn every_command_has_an_example() {
        fn visit(command: &clap::Command) {
            let mut leaves = 0;
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                leaves += 1;
                visit(sub);
            }
            if leaves == 0 {
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("forebay"), "{} has no example", command.get_name());
            }
        }
        visit(&Cli::command());
    }

    #[test]
    fn what_is_not_built_is_refused() {
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nbd"]).is_ok());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nvme", "--nsid", "3"]).is_ok());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nbd", "--nsid", "3"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--iscsi", "--lun", "3"]).is_ok());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nbd", "--lun", "3"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--vhost", "x.sock", "--queues", "4"]).is_ok());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--vhost"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nbd", "--queues", "4"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--vhost", "x.sock", "--lun", "4"]).is_err());
        assert!(Cli::try_parse_from(["forebay", "attach", "x", "--vhost", "x.sock", "--scsi", "--lun", "4"]).is_ok());
        assert!(Cli::try_parse_from(["forebay", "attach", "local/x", "--nbd", "--scsi"]).is_err());
    }
}
