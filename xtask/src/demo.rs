//! `make demo`: from nothing to a served volume with real data in it, checked and measured, on one screen.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch, bold, paint};

/// Arguments of `demo`.
#[derive(clap::Args)]
pub struct DemoArguments {
    /// Leaves the daemon running at the end, and says how to reach it
    #[arg(long)]
    keep: bool,
    /// Pool of the volumes: local, the embedded store; or rados, a Ceph cluster that is started for it
    #[arg(long, default_value = "local")]
    pool: String,
    /// Seconds a measurement
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
}

const MEASURED: &[(Job, &str)] = &[
    (
        Job { name: "randread", pattern: "randread", block_size: 4096, depth: 32, flush_each: 0 },
        "4 KiB random read, depth 32",
    ),
    (
        Job { name: "randwrite", pattern: "randwrite", block_size: 4096, depth: 32, flush_each: 128 },
        "4 KiB random write, depth 32, flush/128",
    ),
    (
        Job { name: "sync", pattern: "randwrite", block_size: 4096, depth: 1, flush_each: 1 },
        "flush after each 4 KiB write, depth 1",
    ),
    (Job { name: "read", pattern: "read", block_size: 1 << 20, depth: 4, flush_each: 0 }, "1 MiB sequential read"),
    (Job { name: "write", pattern: "write", block_size: 1 << 20, depth: 4, flush_each: 0 }, "1 MiB sequential write"),
];

/// The size of the disk image that is copied in.
const IMAGE_MIB: u64 = 768;

/// Runs the demo.
pub fn run(arguments: &DemoArguments) -> Result<()> {
    let on_ceph = match arguments.pool.as_str() {
        "local" => false,
        "rados" => true,
        other => bail!(
            "the demo runs on the embedded store (POOL=local) or on a Ceph cluster (POOL=rados), not on `{other}`"
        ),
    };
    let begin = Instant::now();
    let place = if on_ceph { "in a Ceph cluster" } else { "on the embedded store" };
    println!("{}", bold(&format!("Forebay: a thin volume {place}, served over NBD\n")));
    step("build", || {
        shell::run(&mut daemon::build_command())?;
        let size = std::fs::metadata(daemon::program())?.len();
        Ok(format!("target/release/forebay, {} MiB", size >> 20))
    })?;
    let (pool, cluster) = if on_ceph {
        let cluster = step_with("cluster", || {
            let cluster = Cluster::start(3)?;
            let text = shell::output(cluster.command("ceph").arg("--version"))?;
            let version = text.split_whitespace().nth(2).unwrap_or_default().to_owned();
            Ok((cluster, format!("Ceph {version}: a monitor, a manager, three OSDs")))
        })?;
        ("rbd", Some(cluster))
    } else {
        ("local", None)
    };
    let mut scratch = Scratch::within(&shell::target(), "demo")?;
    let http = format!("127.0.0.1:{}", shell::free_port()?);
    let daemon = step_with("serve", || {
        let conf = cluster.as_ref().map(|cluster| format!("CEPH_CONF={}", cluster.conf().display()));
        let wrapper: Vec<&str> = conf.iter().flat_map(|conf| ["/usr/bin/env", conf]).collect();
        // The embedded store is there in any case, but small where it has nothing to hold.
        let words: &[&str] = if on_ceph { &["--http", &http, "--store-size", "256M"] } else { &["--http", &http] };
        let daemon = Daemon::start_under(&wrapper, &scratch.path().join("store"), words)?;
        let text = format!("process {}, {} MiB resident", daemon.id(), resident_mib(daemon.id())?);
        Ok((daemon, text))
    })?;
    let image = Image::make(scratch.path())?;

    let disk = step_with("create", || {
        let uri = daemon.volume(&format!("{pool}/disk"), &format!("{IMAGE_MIB}M"))?;
        let text = uri.clone();
        Ok((uri, text))
    })?;
    let copy = daemon.volume(&format!("{pool}/copy"), &format!("{IMAGE_MIB}M"))?;
    step("import", || {
        shell::output(
            shell::command("qemu-img").args(["convert", "-n", "-f", "qcow2", "-O", "raw"]).arg(&image.qcow2).arg(&disk),
        )?;
        shell::output(shell::command("nbdcopy").arg(&image.raw).arg(&copy))?;
        Ok("qcow2 through qemu-img convert, raw through nbdcopy".into())
    })?;
    step("compare", || {
        shell::output(
            shell::command("qemu-img").args(["compare", "-f", "qcow2", "-F", "raw"]).arg(&image.qcow2).arg(&disk),
        )?;
        image.same_as(&copy)?;
        Ok(format!("both volumes are {} MiB of the same bits", IMAGE_MIB))
    })?;
    step("fsck", || image.check(&disk))?;
    if let Some(cluster) = &cluster {
        step("rbd", || image.seen_by_rbd(cluster, &format!("{pool}/disk")))?;
    }
    step("thin", || thin(&daemon, pool))?;

    let scribble = daemon.volume(&format!("{pool}/scratch"), "512M")?;
    step("verify", || {
        let mut verify = shell::command("fio");
        verify.args(fio::nbd(&scribble)).args(["--name=verify", "--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16"]);
        verify.args(["--size=256M", "--verify=crc32c", "--verify_fatal=1", "--fsync=64", "--thread"]);
        shell::output(&mut verify)?;
        Ok("fio wrote 256 MiB in random order and found every checksum".into())
    })?;
    measure(&scribble, arguments.seconds)?;

    let daemon = step_with("kill -9", || {
        let crashed = daemon.crash()?;
        let restart = Instant::now();
        let daemon = crashed.restart()?;
        let time = restart.elapsed();
        image.same_as(&copy)?;
        shell::output(
            shell::command("qemu-img").args(["compare", "-f", "qcow2", "-F", "raw"]).arg(&image.qcow2).arg(&disk),
        )?;
        Ok((daemon, format!("ready again after {} ms, every bit in place", time.as_millis())))
    })?;

    if arguments.keep {
        println!("\nIt stays up:");
        println!("  volume   {disk}");
        println!("  page     http://{http}/ (token in {})", scratch.path().join("store/http.token").display());
        println!("  control  export FOREBAY_CONTROL={}", daemon.control().display());
        println!("  data     {}", scratch.path().display());
        println!("  try      {} ls {pool}", daemon::program().display());
        println!("  stop     kill {}", daemon.id());
        if let Some(cluster) = cluster {
            println!("  ceph     export CEPH_CONF={}", cluster.conf().display());
            cluster.leave();
        }
        scratch.keep();
        daemon.leave();
    } else {
        step("stop", || {
            daemon.stop()?;
            Ok("a clean shutdown".into())
        })?;
    }
    println!("\n{} in {}", bold("Done"), shell::seconds(begin.elapsed()));
    Ok(())
}

/// A line for one step: what it is, how long it took, what came of it.
fn step(title: &str, work: impl FnOnce() -> Result<String>) -> Result<()> {
    step_with(title, || work().map(|text| ((), text)))
}

fn step_with<T>(title: &str, work: impl FnOnce() -> Result<(T, String)>) -> Result<T> {
    print!("  {title:<8} ");
    std::io::stdout().flush()?;
    let begin = Instant::now();
    let (value, text) = work().inspect_err(|_| println!("{}", paint("failed", "1;31"))).context(title.to_owned())?;
    println!("{} {:>7}  {text}", paint("ok", "32"), shell::seconds(begin.elapsed()));
    Ok(value)
}

/// A disk image with a real file system on it, in two formats.
struct Image {
    raw: PathBuf,
    qcow2: PathBuf,
    folder: PathBuf,
}

impl Image {
    fn make(folder: &Path) -> Result<Self> {
        step_with("image", || {
            let (raw, qcow2) = (folder.join("disk.raw"), folder.join("disk.qcow2"));
            let tree = real_tree()?;
            std::fs::File::create(&raw)?.set_len(IMAGE_MIB << 20)?;
            shell::output(shell::command("mkfs.ext4").args(["-q", "-F", "-b", "4096", "-d"]).arg(&tree).arg(&raw))?;
            shell::output(
                shell::command("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&qcow2),
            )?;
            let used = std::fs::metadata(&qcow2)?.len() >> 20;
            let text =
                format!("ext4 of {IMAGE_MIB} MiB with {} in it ({used} MiB used), and a qcow2 of it", tree.display());
            Ok((Self { raw, qcow2, folder: folder.to_path_buf() }, text))
        })
    }

    /// The volume's content is the image's, bit for bit.
    fn same_as(&self, uri: &str) -> Result<()> {
        let back = self.folder.join("back.raw");
        shell::output(shell::command("nbdcopy").arg(uri).arg(&back))?;
        shell::output(shell::command("cmp").arg(&self.raw).arg(&back))?;
        std::fs::remove_file(&back)?;
        Ok(())
    }

    /// RBD's own client reads the same.
    fn seen_by_rbd(&self, cluster: &Cluster, spec: &str) -> Result<String> {
        let back = self.folder.join("back.raw");
        shell::output(cluster.command("rbd").args(["export", "--no-progress", spec]).arg(&back))?;
        shell::output(shell::command("cmp").arg(&self.raw).arg(&back))?;
        std::fs::remove_file(&back)?;
        Ok("rbd export reads the same bits".into())
    }

    /// The file system in the volume is whole.
    fn check(&self, uri: &str) -> Result<String> {
        let back = self.folder.join("back.raw");
        shell::output(shell::command("nbdcopy").arg(uri).arg(&back))?;
        let said = shell::output(shell::command("e2fsck").args(["-f", "-n"]).arg(&back))?;
        std::fs::remove_file(&back)?;
        let line = said.lines().last().unwrap_or_default();
        Ok(line.rsplit(": ").next().unwrap_or(line).to_owned())
    }
}

/// A folder of this machine with real files, some tens of MiB at least.
fn real_tree() -> Result<PathBuf> {
    let candidates = ["/usr/share/doc", "/usr/include", "/usr/share/perl", "/usr/lib/python3", "/usr/share"];
    for candidate in candidates.into_iter().filter(|folder| Path::new(folder).is_dir()) {
        let Ok(text) = shell::output(shell::command("du").args(["-sm", candidate])) else { continue };
        let mib: u64 = text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
        if (16..IMAGE_MIB / 2).contains(&mib) {
            return Ok(candidate.into());
        }
    }
    Ok(shell::root().join("base"))
}

/// Returns the allocated size of the volumes.
fn thin(daemon: &Daemon, pool: &str) -> Result<String> {
    let text = shell::output(daemon.command().args(["du", &format!("{pool}/"), "--format", "json"]))?;
    let (provisioned, used) = usage(&text).with_context(|| format!("du prints: {text}"))?;
    ensure!(used < provisioned, "nothing is thin: {text}");
    Ok(format!("{} MiB provisioned, {} MiB used", provisioned >> 20, used >> 20))
}

/// The provisioned and used bytes of all volumes, from `du --format json`.
fn usage(text: &str) -> Option<(u64, u64)> {
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    let images = value.as_array().or_else(|| value["images"].as_array())?;
    let sum = |key: &str| images.iter().map(|image| image[key].as_u64()).sum::<Option<u64>>();
    Some((sum("provisioned_size")?, sum("used_size")?))
}

fn measure(uri: &str, seconds: f64) -> Result<()> {
    println!("\n  {:<40} {:>9} {:>9} {:>9} {:>9} {:>9}", "", "IOPS", "MB/s", "50 %", "99 %", "99.9 %");
    let mut target = fio::nbd(uri);
    target.push("--size=512M".into());
    let mut shown = Vec::new();
    for (job, title) in MEASURED {
        let outcome = fio::measure(job, &target, seconds)?;
        let [p50, p99, p999, _] = outcome.latency_ns.map(fio::time);
        println!(
            "  {title:<40} {:>9.0} {:>9.1} {p50:>9} {p99:>9} {p999:>9}",
            outcome.iops,
            outcome.bytes_per_second / 1e6
        );
        if job.name == "randwrite" {
            shown = fio::histogram(&outcome.bins, 48);
        }
    }
    println!("\n  latency of 4 KiB random writes, depth 32, a flush each 128");
    for line in shown {
        println!("  {line}");
    }
    println!();
    Ok(())
}

fn resident_mib(process: u32) -> Result<u64> {
    // A process that has just started may still be growing; what matters is the order of magnitude.
    let status =
        shell::wait_for(Duration::from_secs(1), || std::fs::read_to_string(format!("/proc/{process}/status")).ok())
            .context("the daemon is gone")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.split_whitespace().next().unwrap_or("0").parse::<u64>()? >> 10)
}

#[cfg(test)]
mod tests {
    #[test]
    fn usage_is_summed() {
        let text = r#"{"images":[{"provisioned_size":4,"used_size":1},{"provisioned_size":6,"used_size":2}]}"#;
        assert_eq!(super::usage(text), Some((10, 3)));
        assert_eq!(super::usage("{}"), None);
    }
}
