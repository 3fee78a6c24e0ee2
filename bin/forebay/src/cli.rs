//! The command line: what can be typed, and the help that says so.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use clap_complete::Shell;

use crate::log_place::LogPlace;
use crate::spec::{ImageSpec, PoolSpec};
use crate::units::Size;

/// Fast block volumes: images on an embedded object store, served to hosts.
///
/// Commands go to the running daemon over its control socket; when none runs, they open the store themselves.
/// Image specs are written POOL/IMAGE; the pool `local`, the embedded store, may be left out.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, propagate_version = true, after_long_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// What every command takes.
    #[command(flatten)]
    pub global: Global,
}

/// What every command takes.
#[derive(Debug, Clone, Args)]
pub struct Global {
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

    /// How results are printed
    #[arg(long, global = true, value_name = "FORMAT", default_value = "plain")]
    pub format: Format,

    /// Indent JSON for reading
    #[arg(long, global = true)]
    pub pretty_format: bool,

    /// Draw no progress bars
    #[arg(long, global = true)]
    pub no_progress: bool,

    /// What is logged to standard error [default: FOREBAY_LOG]: error, warn, info, debug, trace, or a filter such as
    /// `info,forebay_nbd=debug`
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,

    /// How a Ceph cluster is reached.
    #[command(flatten)]
    pub ceph: Ceph,
}

/// How a Ceph cluster is reached: what every Ceph client takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub struct Ceph {
    /// Configuration of a Ceph cluster, whose pools can then be named [default: CEPH_CONF, then /etc/ceph/ceph.conf]
    #[arg(long, short = 'c', global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub conf: Option<PathBuf>,

    /// Who we are to the Ceph cluster: client.ID [default: admin]
    #[arg(long, global = true, value_name = "ID")]
    pub id: Option<String>,

    /// Keyring with our key for the Ceph cluster
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub keyring: Option<PathBuf>,

    /// Name of the Ceph cluster, that its files begin with [default: ceph]
    #[arg(long, global = true, value_name = "NAME")]
    pub cluster: Option<String>,
}

impl Ceph {
    /// As the client takes them, over those of a configuration file.
    pub fn flags(&self, file: Ceph) -> forebay_rados::Flags {
        forebay_rados::Flags {
            conf: self.conf.clone().or(file.conf),
            id: self.id.clone().or(file.id),
            keyring: self.keyring.clone().or(file.keyring),
            cluster: self.cluster.clone().or(file.cluster),
        }
    }
}

impl Global {
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

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables and lines for people.
    Plain,
    /// JSON with stable field names.
    Json,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon
    ///
    /// Serves volumes until it is told to stop (SIGTERM or SIGINT; a second signal ends it at once).  The embedded
    /// store is created at the first start.  Tells systemd when it is ready (Type=notify).
    #[command(after_help = "Example:\n  forebay serve --data /srv/forebay --nbd 127.0.0.1:10809 --cores 2")]
    Serve(Serve),

    /// Say whether the daemon is ready, and what it serves
    ///
    /// Exits with 0 when the daemon is ready and with 4 when none answers.
    #[command(after_help = "Example:\n  forebay status --format json")]
    Status,

    /// Create an image
    #[command(after_help = "Example:\n  forebay create local/disk1 --size 10G")]
    Create(Create),

    /// List the images of a pool
    #[command(visible_alias = "list", after_help = "Example:\n  forebay ls -l local")]
    Ls(Ls),

    /// Show an image's size and layout
    #[command(after_help = "Example:\n  forebay info local/disk1 --format json --pretty-format")]
    Info(OneImage),

    /// Change an image's size, while it is in use too
    #[command(after_help = "Example:\n  forebay resize local/disk1 --size 20G")]
    Resize(Resize),

    /// Remove an image and all its data
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay rm local/disk1")]
    Rm(OneImage),

    /// Give an image another name in its pool
    #[command(visible_alias = "rename", after_help = "Example:\n  forebay mv local/disk1 local/database")]
    Mv(Mv),

    /// Make an image of a file, a block device or standard input
    ///
    /// Holes and runs of zeroes take no space.  From standard input the image grows as data comes.
    #[command(
        after_help = "Examples:\n  forebay import debian.raw local/disk1\n  zstdcat disk.zst | forebay import - local/disk1"
    )]
    Import(Import),

    /// Write an image to a file, a block device or standard output
    ///
    /// What reads as zeroes becomes a hole in a file, and is written out to standard output.
    #[command(
        after_help = "Examples:\n  forebay export local/disk1 disk1.raw\n  forebay export local/disk1 - | zstd > disk1.zst"
    )]
    Export(Export),

    /// Show what images take up
    #[command(visible_alias = "disk-usage", after_help = "Example:\n  forebay du local/disk1")]
    Du(Du),

    /// Export an image to hosts, and print the URI that a client uses
    ///
    /// The export is there again after the daemon is restarted.
    #[command(after_help = "Example:\n  qemu-img info $(forebay attach local/disk1 --nbd)")]
    Attach(Attach),

    /// End the export of an image
    #[command(after_help = "Example:\n  forebay detach local/disk1")]
    Detach(Detach),

    /// List what is exported
    #[command(after_help = "Example:\n  forebay targets --format json")]
    Targets,

    /// Show who has reserved an image that several hosts share, or forget it
    #[command(subcommand)]
    Reservations(ReservationsCommand),

    /// Look after write logs: what is in them, whether their images are open or not
    #[command(subcommand)]
    Log(LogCommand),

    /// Look after the embedded store
    #[command(subcommand)]
    Store(StoreCommand),

    /// Measure how fast the parts are on this machine
    #[command(subcommand)]
    Perf(PerfCommand),

    /// Print the completions of a shell
    #[command(after_help = "Example:\n  forebay completions bash > /usr/share/bash-completion/completions/forebay")]
    Completions {
        /// The shell
        shell: Shell,
    },

    /// Print the manual page, or write one page a command
    #[command(after_help = "Examples:\n  forebay man | man -l -\n  forebay man --dir /usr/share/man/man1")]
    Man {
        /// Write forebay.1, forebay-create.1 and so on into this directory
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        dir: Option<PathBuf>,
    },
}

/// Options of `serve`.
#[derive(Debug, Clone, Default, Args)]
pub struct Serve {
    /// Configuration file (TOML); options on the command line win over it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Where NBD is served.
    #[arg(
        long,
        value_name = "ADDR",
        help = "Serve NBD here: host:port, [v6]:port or unix:PATH; may be repeated [default: unix:DIR/nbd.sock]"
    )]
    pub nbd: Vec<String>,

    /// Where NVMe/TCP is served.
    #[arg(
        long,
        value_name = "ADDR",
        help = "Serve NVMe/TCP here: host:port or [v6]:port, 4420 by custom; may be repeated"
    )]
    pub nvme: Vec<String>,

    /// Where iSCSI is served.
    #[arg(
        long,
        value_name = "ADDR",
        help = "Serve iSCSI here: host:port or [v6]:port, 3260 by custom; may be repeated"
    )]
    pub iscsi: Vec<String>,

    /// Serve the HTTP API, /metrics and the status page here, besides on the control socket
    #[arg(
        long,
        value_name = "ADDR",
        long_help = "Serve the HTTP API, /metrics and the status page here (host:port), besides on the control socket.\n\
            Over TCP everything that changes or reads images asks for the token in DIR/http.token."
    )]
    pub http: Option<String>,

    /// Reactors to run, one thread each [default: 1]
    #[arg(long, value_name = "N")]
    pub cores: Option<u16>,

    /// Poll for so many microseconds after the last work before sleeping [default: 50]
    #[arg(
        long,
        value_name = "US",
        long_help = "Poll for so many microseconds after the last work before sleeping [default: 50]\n\
            Takes the time of waking up out of each request at depth 1, for up to a whole core while clients are \
            busy; 0 saves that CPU time.  Where requests come less often than that, and in an idle daemon, reactors \
            sleep either way."
    )]
    pub linger_us: Option<u32>,

    /// Where the embedded store is: a file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Size of the store file when the first start creates it [default: 80 % of the free space]
    #[arg(long, value_name = "SIZE")]
    pub store_size: Option<Size>,

    /// Memory for blocks that were read or written not long ago; 0 for none [default: 256M]
    #[arg(
        long,
        value_name = "SIZE",
        long_help = "Memory for blocks that were read or written not long ago; 0 for none [default: 256M]\n\
            The store reads and writes its file past the kernel's page cache; this is its own.  Memory is taken as \
            blocks come in, never more than that (and some 4 % for the books).  Example: --store-cache 4G"
    )]
    pub store_cache: Option<Size>,

    /// How to reach disks and sockets
    #[arg(long, value_name = "DRIVER")]
    pub driver: Option<Driver>,

    /// Where other daemons, and clients that speak in messages, come.
    #[arg(
        long,
        value_name = "ADDR",
        help = "Listen for other daemons here: host:port, rdma:HOST:PORT, unix:PATH or shm:PATH; may be repeated",
        long_help = "Listen for other daemons here: host:port, rdma:HOST:PORT, unix:PATH or shm:PATH; may be repeated.\n\
            An address that names no transport has the one that the configuration calls 'cluster'.  Off this machine \
            --peer-key is needed, and frames are encrypted unless the configuration says peer-secure = false."
    )]
    pub peer: Vec<String>,

    /// The key that daemons share: a file of 64 hexadecimal digits that nobody else may read
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub peer_key: Option<PathBuf>,

    /// A network from which daemons may come, ADDRESS/BITS; may be repeated [default: everywhere]
    #[arg(long, value_name = "NETWORK")]
    pub peer_allow: Vec<String>,
}

/// How a reactor reaches disks and sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Driver {
    /// io_uring, or epoll where io_uring is forbidden.
    #[default]
    Auto,
    /// io_uring or nothing.
    #[value(name = "io_uring")]
    IoUring,
    /// epoll and a few file threads.
    Epoll,
}

/// Options of `create`.
#[derive(Debug, Args)]
pub struct Create {
    /// The new image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its size: 10G, 512M, ...; a bare number counts MiB, as in rbd
    #[arg(short, long, value_name = "SIZE")]
    pub size: Size,

    /// Bytes an object, a power of two from 64K to 32M
    #[arg(long, value_name = "SIZE", default_value = "4M")]
    pub object_size: Size,
}

/// Options of `ls`.
#[derive(Debug, Args)]
pub struct Ls {
    /// The pool
    #[arg(default_value = "local")]
    pub pool: PoolSpec,

    /// With sizes
    #[arg(short, long)]
    pub long: bool,
}

/// A command's only image.
#[derive(Debug, Args)]
pub struct OneImage {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,
}

/// Options of `resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its new size
    #[arg(short, long, value_name = "SIZE")]
    pub size: Size,

    /// Allow the image to become smaller, which loses the data past its new end
    #[arg(long)]
    pub allow_shrink: bool,
}

/// Options of `mv`.
#[derive(Debug, Args)]
pub struct Mv {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its new name, POOL/IMAGE in the same pool
    pub to: ImageSpec,
}

/// Options of `import`.
#[derive(Debug, Args)]
pub struct Import {
    /// A file or block device, or - for standard input
    #[arg(value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    /// The new image, POOL/IMAGE [default: the file's name in the pool local]
    pub image: Option<ImageSpec>,

    /// Bytes an object, a power of two from 64K to 32M
    #[arg(long, value_name = "SIZE", default_value = "4M")]
    pub object_size: Size,
}

/// Options of `export`.
#[derive(Debug, Args)]
pub struct Export {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// A new file, a block device, or - for standard output [default: the image's name]
    #[arg(value_hint = ValueHint::FilePath)]
    pub path: Option<PathBuf>,

    /// Replace a file that is there
    #[arg(short, long)]
    pub force: bool,
}

/// Options of `du`.
#[derive(Debug, Args)]
pub struct Du {
    /// An image, POOL/IMAGE, or all those of a pool, POOL/
    #[arg(default_value = "local/", value_name = "POOL/[IMAGE]")]
    pub what: String,
}

/// Options of `attach`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("front").required(true))]
pub struct Attach {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Export it over NBD
    #[arg(long, group = "front")]
    pub nbd: bool,

    /// Export it over NVMe/TCP, as a namespace of the daemon's subsystem
    #[arg(long, group = "front")]
    pub nvme: bool,

    /// Its namespace id, from 1; the lowest free one if left out
    #[arg(long, value_name = "N", requires = "nvme", conflicts_with_all = ["nbd", "iscsi"])]
    pub nsid: Option<u32>,

    /// Export it over iSCSI, as a unit of the daemon's target
    #[arg(long, group = "front")]
    pub iscsi: bool,

    /// Its unit number, from 0; the lowest free one if left out
    #[arg(long, value_name = "N", requires = "iscsi", conflicts_with_all = ["nbd", "nvme"])]
    pub lun: Option<u32>,

    /// An initiator that sees it, by name; may be repeated, and end in * [default: all do]
    #[arg(long, value_name = "IQN", requires = "iscsi", conflicts_with_all = ["nbd", "nvme"])]
    pub initiator: Vec<String>,

    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,

    /// Put a write log in front of it: on a file or device (ssd:PATH:SIZE), or in a file on a DAX file system
    /// (pmem:PATH:SIZE).  Several logs may share a path.  Options follow the size, each after a colon: 'on-flush' answers
    /// writes before they last, 'force' takes memory that is not persistent
    #[arg(long, value_name = "MEDIUM:PATH:SIZE", conflicts_with = "read_only")]
    pub log: Option<LogPlace>,
}

/// Options of `detach`.
#[derive(Debug, Args)]
pub struct Detach {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Only its export over NBD
    #[arg(long, group = "one")]
    pub nbd: bool,

    /// Only its export over NVMe/TCP
    #[arg(long, group = "one")]
    pub nvme: bool,

    /// Only its export over iSCSI
    #[arg(long, group = "one")]
    pub iscsi: bool,

    /// Disconnect the hosts that have it open, once their requests in flight are answered
    #[arg(short, long)]
    pub force: bool,

    /// Leave the write log as it is, instead of writing it back and giving it up
    #[arg(long)]
    pub keep_log: bool,
}

/// What can be done with write logs.
#[derive(Debug, Subcommand)]
pub enum LogCommand {
    /// List the logs, and how much each holds that the backend does not
    #[command(after_help = "Example:\n  forebay log ls")]
    Ls,

    /// Show an image's log
    #[command(after_help = "Example:\n  forebay log info local/disk1")]
    Info(OneImage),

    /// Write back everything that an image's log holds
    #[command(after_help = "Example:\n  forebay log flush local/disk1")]
    Flush(OneImage),

    /// Give up an image's log
    #[command(after_help = "Example:\n  forebay log discard local/disk1 --force")]
    Discard(DiscardLog),
}

/// Options of `log discard`.
#[derive(Debug, Args)]
pub struct DiscardLog {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Lose what it holds that the backend does not
    #[arg(short, long)]
    pub force: bool,
}

/// What can be done with reservations.
#[derive(Debug, Subcommand)]
pub enum ReservationsCommand {
    /// List the hosts that are registered, their keys, and who holds the reservation
    #[command(after_help = "Example:\n  forebay reservations ls local/disk1")]
    Ls(OneImage),

    /// Forget all registrations and the reservation, where a host that holds one is gone for good
    ///
    /// Hosts that were registered are told, and must register again.
    #[command(after_help = "Example:\n  forebay reservations clear local/disk1")]
    Clear(OneImage),
}

/// What can be done with the embedded store.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Create a store, which `serve` otherwise does at its first start
    #[command(after_help = "Example:\n  forebay store init --data /srv/forebay --size 100G")]
    Init(StoreInit),

    /// Verify everything the store holds; the daemon must not run
    #[command(after_help = "Example:\n  forebay store check --data /srv/forebay")]
    Check(StoreCheck),

    /// Show the store's space
    #[command(after_help = "Example:\n  forebay store df")]
    Df,
}

/// Options of `store init`.
#[derive(Debug, Args)]
pub struct StoreInit {
    /// Size of the store file [default: 80 % of the free space; a block device's own size]
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<Size>,

    /// A file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Overwrite a store that is there, and all that it holds
    #[arg(long)]
    pub force: bool,
}

/// Options of `store check`.
#[derive(Debug, Args)]
pub struct StoreCheck {
    /// A file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Check the metadata only, not the checksum of every stored block
    #[arg(long)]
    pub quick: bool,

    /// Renew a damaged copy of the superblock from the good one
    #[arg(long)]
    pub repair: bool,

    /// If the newest checkpoint or the log is damaged, go back to before that for good: what was written since is lost
    #[arg(long)]
    pub roll_back: bool,
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum PerfCommand {
    /// Time the kernels (checksums, erasure coding, ...): every variant, and which one is in use
    ///
    /// FOREBAY_ACCEL=TIER (portable, sse, avx2, avx512, gfni, neon) holds every command and the daemon on one tier.
    #[command(
        after_help = "Examples:\n  forebay perf accel\n  FOREBAY_ACCEL=avx2 forebay perf accel --only crc32c --format json"
    )]
    Accel(PerfAccel),

    /// Measure the messenger between two processes: `serve` answers, `run` asks
    #[command(subcommand)]
    Messenger(PerfMessenger),
}

/// The two sides of a measurement of the messenger.
#[derive(Debug, Subcommand)]
pub enum PerfMessenger {
    /// Answer requests until interrupted; prints the address alone on a line
    #[command(after_help = "Examples:\n  forebay perf messenger serve --addr 127.0.0.1:7000\n  \
        forebay perf messenger serve --addr 10.0.0.1:7000 --secure --key $(cat key)")]
    Serve(MessengerEnd),

    /// Ask a server as fast as it answers, or, with loopback:, messengers of this process
    #[command(after_help = "Examples:\n  forebay perf messenger run --addr 127.0.0.1:7000 --size 4096 --depth 50\n  \
        forebay perf messenger run --addr loopback: --one-way --format json")]
    Run(MessengerRun),
}

/// What both ends of a measurement must agree on.
#[derive(Debug, Args)]
pub struct MessengerEnd {
    /// HOST:PORT, rdma:HOST:PORT, unix:PATH, shm:PATH or loopback:
    #[arg(long, value_name = "ADDR")]
    pub addr: String,

    /// The transport, where the address does not name it: tcp, rdma, unix, shm or loopback
    #[arg(long, value_name = "NAME")]
    pub transport: Option<String>,

    /// Checksums on every frame (the default)
    #[arg(long, conflicts_with_all = ["no_crc", "secure"])]
    pub crc: bool,

    /// Neither checksums nor encryption; both ends must say so
    #[arg(long, conflicts_with = "secure")]
    pub no_crc: bool,

    /// AES-128-GCM on every frame
    #[arg(long)]
    pub secure: bool,

    /// The key that both ends share, 64 hexadecimal digits; needed off this machine
    #[arg(long, value_name = "HEX", env = "FOREBAY_PERF_KEY", hide_env_values = true)]
    pub key: Option<String>,

    /// The same in a file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "key")]
    pub key_file: Option<PathBuf>,

    /// A daemon's configuration: its key, its RDMA device, and the transport that it has for clients
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Poll for so long after the last work before sleeping, in microseconds
    #[arg(long, value_name = "US", default_value = "50")]
    pub linger_us: u32,

    /// The RDMA device that has this address is used to connect
    #[arg(long, value_name = "IP")]
    pub rdma_local: Option<std::net::IpAddr>,
}

/// Options of `perf messenger run`.
#[derive(Debug, Args)]
pub struct MessengerRun {
    #[command(flatten)]
    pub end: MessengerEnd,

    /// Bytes of payload a request
    #[arg(long, value_name = "BYTES", default_value = "4096")]
    pub size: usize,

    /// Requests under way on each connection
    #[arg(long, value_name = "N", default_value = "50")]
    pub depth: usize,

    /// Connections
    #[arg(long, value_name = "N", default_value = "1")]
    pub connections: usize,

    /// How long it is measured
    #[arg(long, value_name = "S", default_value = "3")]
    pub seconds: f64,

    /// Nobody waits for answers: messages a second, without latencies
    #[arg(long)]
    pub one_way: bool,

    /// Fail when a connection is lost, rather than make it again and go on
    #[arg(long)]
    pub lossy: bool,
}

/// Options of `perf accel`.
#[derive(Debug, Args)]
pub struct PerfAccel {
    /// Only the kernels whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,

    /// How long each variant is measured
    #[arg(long, value_name = "MS", default_value = "50")]
    pub milliseconds: u64,
}

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   failed
  2   wrong usage, or a request that makes no sense
  3   no such pool, image, target or file
  4   no daemon answers
  5   it exists already
  6   in use, or locked by another process
  7   no space left
  8   stored data is damaged
  9   not supported by this build or pool
  10  not permitted

Environment:
  FOREBAY_DATA     as --data
  FOREBAY_CONTROL  as --control
  FOREBAY_LOG      as --log-level";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
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
    }
}
