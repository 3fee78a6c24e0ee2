//! Options of the measuring commands.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

/// Commands that measure.
#[derive(Debug, Subcommand)]
pub enum PerfCommand {
    /// Time the kernels (checksums, erasure coding, ...): every variant, and which one is in use
    ///
    /// FOREBAY_ACCEL=TIER (portable, sse, avx2, avx512, gfni, neon) holds every command and the daemon on one tier.
    /// Kernels that have several loops ("shapes") use the one that a calibration of a few milliseconds finds fastest;
    /// FOREBAY_ACCEL_SHAPES=KERNEL=SHAPE,... forces shapes, and FOREBAY_ACCEL_SHAPES=processor keeps the defaults.
    #[command(after_help = "Examples:\n  forebay perf accel\n  forebay perf accel --kernel crc32c --all\n  \
        FOREBAY_ACCEL=avx2 forebay perf accel --kernel crc32c --format json\n  \
        FOREBAY_ACCEL_SHAPES=crc32c=v8 forebay perf accel --kernel crc32c")]
    Accel(PerfAccelArgs),

    /// Measure the messenger between two processes: `serve` replies, `run` sends requests
    #[command(subcommand)]
    Messenger(PerfMessenger),
}

/// The two sides of a measurement of the messenger.
#[derive(Debug, Subcommand)]
pub enum PerfMessenger {
    /// Answer requests until interrupted; prints the address alone on a line
    #[command(after_help = "Examples:\n  forebay perf messenger serve --addr 127.0.0.1:7000\n  \
        forebay perf messenger serve --addr 10.0.0.1:7000 --secure --key $(cat key)")]
    Serve(MessengerEndArgs),

    /// Send requests to a server, or, with loopback:, to a messenger of this process
    #[command(after_help = "Examples:\n  forebay perf messenger run --addr 127.0.0.1:7000 --size 4096 --depth 50\n  \
        forebay perf messenger run --addr loopback: --one-way --format json")]
    Run(MessengerRunArgs),
}

/// Options on which both ends of a measurement must agree.
#[derive(Debug, Args)]
pub struct MessengerEndArgs {
    /// HOST:PORT, rdma:HOST:PORT, unix:PATH, shm:PATH or loopback:
    #[arg(long, value_name = "ADDR")]
    pub addr: String,

    /// The transport, where the address does not name it: tcp, rdma, unix, shm or loopback
    #[arg(long, value_name = "NAME")]
    pub transport: Option<String>,

    /// Checksums on every frame (the default)
    #[arg(long, conflicts_with_all = ["no_crc", "secure"])]
    pub crc: bool,

    /// Neither checksums nor encryption; both ends must set it
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

    /// Busy-poll for this many microseconds after the last work before sleeping
    #[arg(long, value_name = "US", default_value = "50")]
    pub linger_us: u32,

    /// Connect through the RDMA device that has this address
    #[arg(long, value_name = "IP")]
    pub rdma_local: Option<std::net::IpAddr>,
}

/// Options of `perf messenger run`.
#[derive(Debug, Args)]
pub struct MessengerRunArgs {
    #[command(flatten)]
    pub end: MessengerEndArgs,

    /// Bytes of payload a request
    #[arg(long, value_name = "BYTES", default_value = "4096")]
    pub size: usize,

    /// Requests in flight on each connection
    #[arg(long, value_name = "N", default_value = "50")]
    pub depth: usize,

    /// Connections
    #[arg(long, value_name = "N", default_value = "1")]
    pub connections: usize,

    /// Duration of the measurement
    #[arg(long, value_name = "S", default_value = "3")]
    pub seconds: f64,

    /// Send without replies: measures messages per second, without latencies
    #[arg(long)]
    pub one_way: bool,

    /// Pause between a reply and the next request, in microseconds, to measure the latency of sporadic requests
    #[arg(long, value_name = "US", default_value = "0", conflicts_with = "one_way")]
    pub every_us: u32,

    /// Fail when a connection is lost instead of reconnecting
    #[arg(long)]
    pub lossy: bool,

    /// Fail when the server is unreachable, or does not reply, for this long
    #[arg(long, value_name = "S", default_value = "30")]
    pub timeout: f64,
}

/// Options of `perf accel`.
#[derive(Debug, Args)]
pub struct PerfAccelArgs {
    /// Only the kernels whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", visible_alias = "kernel")]
    pub only: String,

    /// Time every loop shape of every tier, at more sizes, after a self-test of the checksums
    #[arg(long)]
    pub all: bool,

    /// Duration of the measurement of each variant
    #[arg(long, value_name = "MS", default_value = "50")]
    pub milliseconds: u64,
}
