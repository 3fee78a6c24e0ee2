//! `cargo xtask bench NAME`: a peer and Forebay side by side in one run, interleaved, medians.

mod builds;
mod clone;
mod drbd;
mod gateway;
mod idle;
mod iscsi;
mod mdraid;
mod messenger;
mod nap;
mod nbd;
mod nvmf;
mod plot;
mod qos;
mod race;
mod rados;
mod replication;
mod report;
mod scale;
mod services;
mod snapshot;
mod stalls;
mod store;
mod vhost;
mod writelog;

use anyhow::{Context, Result};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct BenchArguments {
    /// Comparison to run
    #[arg(value_enum)]
    name: Name,
    #[command(flatten)]
    effort: EffortArguments,
    /// Prints only, and leaves docs/benchmarks as it is
    #[arg(long)]
    dry_run: bool,
    /// Number of volumes that `scale` makes (default: 10,000)
    #[arg(long)]
    volumes: Option<u64>,
    /// Daemon of another build, for `builds`
    #[arg(long, value_name = "PROGRAM", required_if_eq("name", "builds"))]
    old: Option<std::path::PathBuf>,
    /// Only the peers (a check of the harness itself)
    #[arg(long)]
    peers_only: bool,
}

/// Amount of measuring, as asked for.
#[derive(clap::Args)]
struct EffortArguments {
    /// Rounds; each measures every series once (default: 5; 3 for the write log and beside DRBD)
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds a measurement (default: 3; 1 where there are many, 5 for the write log); kernels take a 250th of it
    #[arg(long)]
    seconds: Option<f64>,
    /// The volume's size in MiB
    #[arg(long, default_value_t = 2048)]
    size_mib: u64,
    /// Folder of the data files (default: the build folder)
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
    /// Folder of the replicas' copies, for `replication` and `replication-drbd`, on another device than --dir (default:
    /// memory, so that two copies do not share one disk)
    #[arg(long)]
    replica_dir: Option<std::path::PathBuf>,
    /// Only the cases whose name contains this
    #[arg(long)]
    case: Option<String>,
}

/// Amount of measuring.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Rounds; each measures every series once.
    rounds: usize,
    /// Seconds a measurement; kernels take a 250th of it.
    seconds: f64,
    /// The volume's size in MiB.
    size_mib: u64,
    /// Folder of the data files, if not the build folder.
    dir: Option<std::path::PathBuf>,
    /// Folder of the replicas' copies, if not in memory.
    replica_dir: Option<std::path::PathBuf>,
    /// Only the cases whose name contains this.
    case: Option<String>,
}

impl Effort {
    /// Returns the folder of the replicas' copies.
    fn replica_dir(&self) -> &std::path::Path {
        self.replica_dir.as_deref().unwrap_or(std::path::Path::new("/dev/shm"))
    }
}

#[derive(clap::ValueEnum, Clone, Copy)]
enum Name {
    /// Build of this checkout against another one (--old): volumes in memory, in the store, behind a write log, in a Ceph
    /// cluster; prints only
    Builds,
    /// Fifty clones of one parent through the read cache, against the same without one
    Clone,
    /// Over iSCSI, against tgtd, with libiscsi's iscsi-perf, fio, QEMU and our own initiator (FOREBAY_FIO: a fio with
    /// the engine libiscsi)
    Iscsi,
    /// The messenger, against a bare io_uring loop and plain epoll sockets
    Messenger,
    /// Over NBD, against qemu-nbd and nbdkit
    Nbd,
    /// Volumes in memory over NVMe/TCP, against the goals, our own NBD and iSCSI, and in a guest the kernel's target
    Nvmf,
    /// A Ceph image over iSCSI and NBD, against tgt (CEPH_CONF: on that cluster)
    Gateway,
    /// Images in a Ceph cluster, against librbd (CEPH_CONF: on that cluster)
    Rados,
    /// Volumes in memory over vhost-user, against qemu-storage-daemon
    Vhost,
    /// The write log, against the same volume without one
    Writelog,
    /// A write log with a replica, over TCP and shared memory, against a log without one (CEPH_CONF: on that cluster)
    Replication,
    /// A write log with a replica, over TCP and RDMA, against DRBD with protocol C, in a guest (as root)
    ReplicationDrbd,
    /// Longest wait of a host's reads while other images are worked on; prints only
    Stalls,
    /// A volume held at 1,000 requests per second, against librbd with the same limit (CEPH_CONF: on that cluster), and a
    /// quiet volume beside a busy one, against itself alone
    Qos,
    /// Snapshots of a volume with writes at full speed, and the writers with and without them
    Snapshot,
    /// 10,000 volumes, exports and connections on one daemon, beside tgt (--volumes N)
    Scale,
    /// The embedded store in process, against fio on the raw file
    Store,
    /// Erasure coding, compression and degraded reads of the store in process, each on beside off; and BlueStore
    StoreServices,
    /// Erasure coding of the store, against the kernel's RAID 6, in a guest
    StoreMdraid,
    /// Erasure coding, against ISA-L, jerasure and reed-solomon-erasure
    Ec,
    /// CRC32C, against ISA-L, crc-fast and crc32c
    Crc32c,
    /// DEFLATE and the engine, against zlib, igzip and libdeflate (FOREBAY_CORPUS: a folder of files)
    Compress,
    /// AES-XTS and AES-GCM, against OpenSSL
    Xts,
}

/// Runs one comparison.
pub fn run(arguments: &BenchArguments) -> Result<()> {
    let asked = &arguments.effort;
    let (rounds, seconds) = match arguments.name {
        // So that all of their cases are measured in less than five minutes.
        Name::Iscsi | Name::Nvmf | Name::Vhost | Name::Builds => (5, 1.0),
        // Tails want many requests: less than a quarter of an hour.
        Name::Writelog => (3, 5.0),
        // Half a minute for each measurement without the cache.
        Name::Clone => (3, 1.0),
        // What a second of burst adds shows in a shorter run.
        Name::Qos => (3, 10.0),
        // Emulated, all takes longer: a quarter of an hour, and half of one.
        Name::StoreMdraid => (3, 2.0),
        Name::ReplicationDrbd => (3, 3.0),
        _ => (5, 3.0),
    };
    let effort = Effort {
        rounds: asked.rounds.unwrap_or(rounds),
        seconds: asked.seconds.unwrap_or(seconds),
        size_mib: asked.size_mib,
        dir: asked.dir.clone(),
        replica_dir: asked.replica_dir.clone(),
        case: asked.case.clone(),
    };
    match arguments.name {
        Name::Builds => builds::run(&effort, arguments.old.as_deref().context("--old is missing")?),
        Name::Clone => clone::run(&effort, arguments.dry_run),
        Name::Iscsi => iscsi::run(&effort, arguments.dry_run),
        Name::Messenger => messenger::run(&effort, arguments.dry_run),
        Name::Nbd => nbd::run(&effort, arguments.peers_only, arguments.dry_run),
        Name::Nvmf => nvmf::run(&effort, arguments.dry_run),
        Name::Gateway => gateway::run(&effort, arguments.dry_run),
        Name::Rados => rados::run(&effort, arguments.dry_run),
        Name::Replication => replication::run(&effort, arguments.dry_run),
        Name::ReplicationDrbd => drbd::run(&effort, arguments.dry_run),
        Name::Stalls => stalls::run(&effort),
        Name::Qos => qos::run(&effort, arguments.dry_run),
        Name::Snapshot => snapshot::run(&effort, arguments.dry_run),
        Name::Scale => scale::run(&effort, arguments.volumes, arguments.dry_run),
        Name::Store => store::run(&effort, arguments.dry_run),
        Name::StoreServices => services::run(&effort, arguments.dry_run),
        Name::StoreMdraid => mdraid::run(&effort, arguments.dry_run),
        Name::Vhost => vhost::run(&effort, arguments.peers_only, arguments.dry_run),
        Name::Writelog => writelog::run(&effort, arguments.dry_run),
        Name::Ec => race::ec(&effort, arguments.dry_run),
        Name::Crc32c => race::crc32c(&effort, arguments.dry_run),
        Name::Compress => race::compress(&effort, arguments.dry_run),
        Name::Xts => race::xts(&effort, arguments.dry_run),
    }
}

/// CPU time a process has used, all its threads, user and system, in seconds.
pub fn cpu_seconds(process: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name in parentheses may hold anything; what follows it are numbers from field 3 on.
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    // Linux counts in hundredths on every platform it shows this on.
    Ok(ticks as f64 / 100.0)
}

/// The middle value.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn medians() {
        assert_eq!(super::median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(super::median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn our_own_cpu_time_is_readable() {
        assert!(super::cpu_seconds(std::process::id()).unwrap() >= 0.0);
    }
}
