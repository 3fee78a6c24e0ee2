//! A write log with a replica beside DRBD with protocol C, in a guest: durable writes to kernel block devices.
//!
//! The guest has both sides' nodes: to DRBD two resources of one kernel that are connected over loopback, to Forebay a
//! daemon each.  Images are in a Ceph cluster of this machine, as everywhere where logs have replicas.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::ceph::Cluster;
use crate::shell::{self, Scratch};
use crate::{daemon, fio};

const DEPTHS: [u32; 3] = [1, 8, 32];
const OSDS: u32 = 3;
/// Media of both copies.
const MEDIA: [&str; 2] = ["ssd", "pmem"];
/// Ways to a replica that are compared with DRBD.
const REPLICAS: [&str; 2] = ["tcp", "rdma"];
/// Competitors by their names in the guest's script, and in tables.
const COMPETITORS: [(&str, &str); 4] =
    [("none", "no replica"), ("tcp", "a replica"), ("rdma", "a replica"), ("drbd", "DRBD")];
/// Disks of the guest in order, with their MiB, and whether they hold a replica's copy.
const DISKS: [(&str, usize, bool); 5] = [
    ("logs", 448, false),
    ("copies-tcp", 256, true),
    ("copies-rdma", 256, true),
    ("drbd", 24, false),
    ("drbd-copy", 24, true),
];
/// MiB of the guest's persistent memory: three logs, two copies, and two disks of DRBD's.
const PMEM_MIB: usize = 1280;
/// Goal: writes a second, to those of DRBD.
const GOAL: f64 = 1.0;

/// Address of this machine, beside loopback's own, that the guest reaches; it is removed when dropped.
struct HostAddress(String);

impl HostAddress {
    fn add() -> Result<Self> {
        let address = format!("10.78.{}.1", std::process::id() % 250);
        shell::output(shell::command("ip").args(["addr", "add", &format!("{address}/32"), "dev", "lo"]))?;
        Ok(Self(address))
    }
}

impl Drop for HostAddress {
    fn drop(&mut self) {
        // Errors of the cleanup cannot be reported here.
        let _ = shell::output(shell::command("ip").args(["addr", "del", &format!("{}/32", self.0), "dev", "lo"]));
    }
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let load = report::load()?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "drbd")?;
    let copies = Scratch::within(effort.replica_dir(), "drbd")?;
    let memory = Scratch::within(Path::new("/dev/shm"), "drbd")?;
    let address = HostAddress::add().context("an address for the cluster (as root)")?;
    let cluster = Cluster::apart_at(OSDS, &address.0)?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    share_cluster(&cluster, &share)?;

    let mut disks = Vec::new();
    for (name, mib, is_copy) in DISKS {
        let folder = if is_copy { copies.path() } else { scratch.path() };
        let path = folder.join(name);
        make_disk(&path, mib).with_context(|| format!("a disk at {}", path.display()))?;
        disks.push(path.display().to_string());
    }
    let media: Vec<&str> =
        MEDIA.into_iter().filter(|medium| effort.case.as_ref().is_none_or(|part| medium.contains(part))).collect();
    ensure!(!media.is_empty(), "the cases are {}", MEDIA.join(" and "));
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-drbd.sh")).arg(daemon::program());
    guest.args([
        effort.rounds.to_string(),
        effort.seconds.to_string(),
        DEPTHS.map(|depth| depth.to_string()).join(" "),
    ]);
    guest.args([media.join(" "), COMPETITORS.map(|(name, _)| name).join(" ")]);
    guest.env("DISKS", disks.join(" ")).env("SHARE", &share).env("MEM", "3G");
    guest.env("PMEM", memory.path().join("pmem")).env("PMEM_SIZE", PMEM_MIB.to_string());
    guest.envs([("FSDAX", "1"), ("RDMA", "1")]);
    // Each measurement takes a few seconds more than asked for: fio starts, and the log is emptied.
    let measurements = media.len() * DEPTHS.len() * COMPETITORS.len() * effort.rounds;
    guest.env("TIMEOUT", (600.0 + measurements as f64 * (effort.seconds + 10.0)).ceil().to_string());
    shell::run(&mut guest)?;

    let (cases, mut lines) = cases(&share, &media, effort.rounds)?;
    println!("{}", report::table(&cases));
    lines.splice(0..0, report::ratio_lines("replication-drbd", &cases));
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        let places = [report::device(&folder)?, report::device(effort.replica_dir())?];
        let method = method(effort, &places, &load)?;
        report::write("replication-drbd", "Replicas of write logs beside DRBD", &method, &cases, &lines)?;
    }
    Ok(())
}

/// Puts what clients need to reach the cluster into the folder that the guest sees.
fn share_cluster(cluster: &Cluster, share: &Path) -> Result<()> {
    let text = fs::read_to_string(cluster.conf())?;
    let mut lines = Vec::new();
    for line in text.lines() {
        match line.split_once('=') {
            Some((name, path)) if name.trim() == "keyring" => {
                fs::copy(path.trim(), share.join("keyring"))?;
                lines.push("keyring = /share/keyring");
            }
            _ => lines.push(line),
        }
    }
    Ok(fs::write(share.join("ceph.conf"), lines.join("\n") + "\n")?)
}

/// Creates a disk, written in full so that the file system has no blocks to allocate later.
fn make_disk(path: &Path, mib: usize) -> Result<()> {
    let mut file = File::create(path)?;
    for _ in 0..mib {
        file.write_all(&[0; 1 << 20])?;
    }
    Ok(file.sync_all()?)
}

/// Reads fio's reports: a case for each way to a replica, and lines with the slowest hundredth.
fn cases(share: &Path, media: &[&str], rounds: usize) -> Result<(Vec<Case>, Vec<String>)> {
    let (mut cases, mut lines) = (Vec::new(), Vec::new());
    for medium in media {
        for depth in DEPTHS {
            let (mut rates, mut tails) = (vec![Vec::new(); COMPETITORS.len()], vec![Vec::new(); COMPETITORS.len()]);
            for (place, (name, _)) in COMPETITORS.iter().enumerate() {
                for round in 0..rounds {
                    let report = format!("{medium}-{name}-{depth}-{round}.json");
                    let text = fs::read_to_string(share.join(&report)).with_context(|| report.clone())?;
                    let outcome = fio::parse_writes(&text).context(report)?;
                    rates[place].push(outcome.iops);
                    tails[place].push(outcome.latency_ns[1] as f64 / 1e3);
                }
                let tail_us = super::median(&tails[place]);
                lines.push(format!(
                    "VALUE name=replication-drbd/{medium}-{name}-qd{depth}-p99 value={tail_us:.0} unit=us"
                ));
            }
            for replica in REPLICAS {
                let mut series = Vec::new();
                for (asked, side) in [(replica, Side::Ours), ("drbd", Side::Peer), ("none", Side::Other)] {
                    let found = COMPETITORS.iter().zip(&rates).find(|((name, _), _)| *name == asked);
                    let ((_, name), values) = found.context("a competitor")?;
                    series.push(Series { name: (*name).into(), side, values: values.clone() });
                }
                cases.push(Case { name: format!("{medium}-{replica}-qd{depth}"), unit: "IOPS", goal: GOAL, series });
            }
        }
    }
    Ok((cases, lines))
}

fn method(effort: &Effort, [primary, replica]: &[String; 2], load: &str) -> Result<String> {
    let Effort { rounds, seconds, .. } = effort;
    let (machine, commit) = (report::machine(), report::commit()?);
    Ok(format!(
        "{machine}, with a load average of {load} before the cluster was started; commit {commit}. Everything runs in the \
         lab's guest, whose two processors are emulated: no figure says what a real machine does, and only those of one \
         row can be compared.\n\n\
         fio (libaio, O_DIRECT and O_DSYNC) writes 4 KiB at random to 16 MiB of a block device of the guest's kernel, \
         {rounds} rounds of {seconds} s, the order turned each round; medians (lowest and highest in parentheses). \
         *-qdN*: writes a second, N at once. `p99`: what the slowest hundredth waits at least.\n\n\
         - **A replica**: an image in a Ceph cluster on the host, attached to the kernel's NBD client over a Unix socket, \
         with a write log that has a replica at a second daemon. *tcp*: over loopback, in crc mode: both ends verify \
         checksums of all data. *rdma*: over soft-RoCE (rdma_rxe), likewise. Each daemon has one core and \
         `--linger-us 0`. **No replica** is the same without one.\n\
         - **DRBD** 8.4, of the guest's kernel (Linux 6.1), protocol C over loopback, with its defaults: disk flushes are \
         on, no checksums on the wire. Primary and secondary are two resources of one kernel that are connected with \
         each other; none of their data goes to Ceph.\n\
         - *ssd*: virtio disks with a volatile write cache. Those of the primaries are files on {primary}; those of the \
         replicas are files on {replica}, so that two copies never share a disk. *pmem*: an emulated NVDIMM, which is \
         memory of the host; Forebay's logs and copies are files on ext4 with DAX (MAP_SYNC), DRBD's disks are \
         partitions.\n\n\
         Both sides promise that a write is durable at both copies when it is acknowledged. The kernel sends each with FUA: \
         DRBD writes it so on both nodes, with a flush of the virtio disk for each write; Forebay's log makes every write \
         durable, and appends those that wait at the same time together. They do not do the \
         same work: DRBD writes to the final place, Forebay to a log, from which it writes back to the cluster meanwhile \
         what is older than 2 s; Forebay checksums what it logs and sends, DRBD nothing. Forebay's requests go to a \
         process and back, and to a second one for the replica; DRBD's stay in the kernel. What system calls, switches \
         between processes and vector instructions (checksums) cost is distorted most by emulation.\n\n\
         Repeat it: `cargo xtask bench replication-drbd` (as root); shorter: `--rounds 1 --seconds 2 --case pmem`. Against \
         the goals, on the machine itself: [replicas of write logs](replication.md)."
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_the_guest_become_cases() {
        let share = Scratch::new("drbd-test").unwrap();
        for depth in DEPTHS {
            for (place, (name, _)) in COMPETITORS.iter().enumerate() {
                let text = format!(
                    "{{\"jobs\":[{{\"error\":0,\"write\":{{\"iops\":{},\"bw_bytes\":1,\"total_ios\":1,\
                     \"clat_ns\":{{\"percentile\":{{\"99.000000\":7000}}}}}}}}]}}",
                    place + 1
                );
                fs::write(share.path().join(format!("ssd-{name}-{depth}-0.json")), text).unwrap();
            }
        }
        let (cases, lines) = cases(share.path(), &["ssd"], 1).unwrap();
        assert_eq!(cases.len(), DEPTHS.len() * REPLICAS.len());
        assert_eq!(cases[0].name, "ssd-tcp-qd1");
        assert_eq!((cases[0].ratio(Side::Peer), cases[0].ratio(Side::Other)), (Some(0.5), Some(2.0)));
        assert_eq!(lines[0], "VALUE name=replication-drbd/ssd-none-qd1-p99 value=7 unit=us");
        assert!(super::cases(share.path(), &["pmem"], 1).is_err());
    }
}
