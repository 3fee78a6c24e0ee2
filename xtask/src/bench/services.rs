//! Services of the embedded store in process: erasure coding beside plain stripes, compression beside none, reads without
//! as many devices as parity allows beside healthy ones, and BlueStore of the lab's cluster.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::ceph::Cluster;
use crate::daemon;
use crate::shell::{self, Scratch};

/// Setting of the store: columns and compression.
#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    columns: &'static str,
    compression: &'static str,
}

const PLAIN: Setting = Setting { name: "one file", columns: "1", compression: "none" };
const STRIPED: Setting = Setting { name: "stripes of 3", columns: "3+0", compression: "none" };
const STRIPED_5: Setting = Setting { name: "stripes of 5", columns: "5+0", compression: "none" };
const EC: Setting = Setting { name: "3+2", columns: "3+2", compression: "none" };
const LZ4: Setting = Setting { name: "one file, lz4", columns: "1", compression: "lz4" };
const AES: Setting = Setting { name: "one file, AES-256-XTS", columns: "1", compression: "none,aes" };
const ZSTD: Setting = Setting { name: "one file, zstd:1", columns: "1", compression: "zstd:1" };

/// Comparison of two settings or modes.
struct Comparison {
    name: &'static str,
    depth: u32,
    ours: (Setting, &'static str),
    peer: (Setting, &'static str),
    /// Our speed at least, divided by the peer's.
    goal: f64,
}

const fn compare(
    name: &'static str,
    depth: u32,
    ours: (Setting, &'static str),
    peer: (Setting, &'static str),
    goal: f64,
) -> Comparison {
    Comparison { name, depth, ours, peer, goal }
}

const COMPARISONS: &[Comparison] = &[
    compare("ec-write-1m", 8, (EC, "write"), (STRIPED, "write"), 0.85),
    compare("ec-write-1m-same-devices", 8, (EC, "write"), (STRIPED_5, "write"), 0.85),
    compare("ec-read-1m", 8, (EC, "read"), (STRIPED, "read"), 0.85),
    compare("ec-randwrite-4k", 32, (EC, "randwrite"), (STRIPED, "randwrite"), 0.85),
    compare("ec-randread-4k", 32, (EC, "randread"), (STRIPED, "randread"), 0.85),
    compare("degraded-read-1m", 8, (EC, "read-degraded"), (EC, "read"), 0.5),
    compare("degraded-randread-4k", 32, (EC, "randread-degraded"), (EC, "randread"), 0.5),
    compare("lz4-write-1m", 8, (LZ4, "write"), (PLAIN, "write"), 0.8),
    compare("lz4-read-1m", 8, (LZ4, "read"), (PLAIN, "read"), 0.8),
    compare("lz4-randwrite-4k", 32, (LZ4, "randwrite"), (PLAIN, "randwrite"), 0.8),
    compare("lz4-randread-4k", 32, (LZ4, "randread"), (PLAIN, "randread"), 0.8),
    compare("aes-write-1m", 8, (AES, "write"), (PLAIN, "write"), 0.85),
    compare("aes-read-1m", 8, (AES, "read"), (PLAIN, "read"), 0.85),
    compare("aes-randwrite-4k", 32, (AES, "randwrite"), (PLAIN, "randwrite"), 0.85),
    compare("aes-randread-4k", 32, (AES, "randread"), (PLAIN, "randread"), 0.85),
    compare("zstd-write-1m", 8, (ZSTD, "write"), (PLAIN, "write"), 0.8),
    compare("zstd-read-1m", 8, (ZSTD, "read"), (PLAIN, "read"), 0.8),
];

/// Pools of the lab's cluster: name in the case, our setting, and how the pool compresses.
const POOLS: &[(&str, Setting, Option<&str>)] = &[
    ("bluestore-ec", Setting { name: "2+1", columns: "2+1", compression: "none" }, None),
    ("bluestore-ec-lz4", Setting { name: "2+1, lz4", columns: "2+1", compression: "lz4" }, Some("lz4")),
];
/// Bytes a CPU-second at least, divided by BlueStore's.
const CPU_GOAL: f64 = 3.0;

/// Speed in MB/s, or requests a second for short requests, and MB a CPU-second.
struct Measured {
    speed: f64,
    per_cpu: f64,
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-store", "--example", "services"]))?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let comparisons: Vec<&Comparison> = COMPARISONS.iter().filter(|compared| wanted(compared.name)).collect();
    let mut cases: Vec<Case> = Vec::new();
    for compared in &comparisons {
        let unit = if compared.name.ends_with("4k") { "requests/s" } else { "MB/s" };
        for (suffix, unit) in [("", unit), ("-per-cpu", "MB per CPU-second")] {
            let label = |(setting, mode): &(Setting, &str)| format!("{} {mode}", setting.name);
            cases.push(Case {
                name: format!("{}{suffix}", compared.name),
                unit,
                goal: compared.goal,
                series: vec![series(&label(&compared.ours), Side::Ours), series(&label(&compared.peer), Side::Peer)],
            });
        }
    }
    let mut lines = Vec::new();
    for round in 0..effort.rounds {
        for (index, compared) in comparisons.iter().enumerate() {
            for place in 0..2 {
                let which = (place + round) % 2;
                let (setting, mode) = if which == 0 { compared.ours } else { compared.peer };
                let measured = ours(scratch.path(), effort, setting, mode, compared.depth)?;
                cases[2 * index].series[which].values.push(measured.speed);
                cases[2 * index + 1].series[which].values.push(measured.per_cpu);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let pools: Vec<_> = POOLS.iter().filter(|(name, ..)| wanted(name)).collect();
    if !pools.is_empty() {
        let cluster = Cluster::start(3)?;
        for (name, setting, compression) in pools {
            cases.push(beside_bluestore(&cluster, scratch.path(), effort, name, *setting, *compression)?);
        }
    }
    if wanted("space") {
        let found = program(scratch.path(), effort, EC, "randwrite", 32)?;
        let written = found["log_bytes_per_user_byte"].as_f64().context("no bytes of the log")?;
        lines.push(format!("VALUE name=store-services/log-bytes-per-user-byte-depth-32 value={written:.3} unit=bytes"));
    }
    if wanted("corpus") {
        lines.extend(corpus_ratios(scratch.path())?);
    }
    println!("{}", report::table(&cases));
    lines.extend(report::ratio_lines("store-services", &cases));
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("store-services", "Services of the embedded store", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

fn series(name: &str, side: Side) -> Series {
    Series { name: name.into(), side, values: Vec::new() }
}

/// One run of the store's own measuring program: the JSON of its last line.
fn program(folder: &Path, effort: &Effort, setting: Setting, mode: &str, depth: u32) -> Result<Value> {
    let program: PathBuf = shell::target().join("release/examples/services");
    let mut command = shell::command(program);
    command.arg(folder).arg(effort.size_mib.to_string()).args([setting.columns, setting.compression, mode]);
    command.args([depth.to_string(), effort.seconds.to_string()]);
    let text = shell::output(&mut command)?;
    let line = text.lines().rev().find(|line| line.starts_with('{')).context("the store's program prints no JSON")?;
    Ok(serde_json::from_str(line)?)
}

fn ours(folder: &Path, effort: &Effort, setting: Setting, mode: &str, depth: u32) -> Result<Measured> {
    let found = program(folder, effort, setting, mode, depth)?;
    let number = |key: &str| found[key].as_f64().with_context(|| format!("no {key}"));
    let speed =
        if mode.starts_with("rand") { number("requests_per_second")? } else { number("bytes_per_second")? / 1e6 };
    Ok(Measured { speed, per_cpu: number("bytes_per_cpu_second")? / 1e6 })
}

/// Stores the corpus of `bench compress` with each setting. Returns the bytes written for each byte stored.
fn corpus_ratios(folder: &Path) -> Result<Vec<String>> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-peers", "--example", "write_corpus"]))?;
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-store", "--example", "compression"]))?;
    let examples = shell::target().join("release/examples");
    let (corpus, store) = (folder.join("corpus"), folder.join("corpus-store"));
    shell::run(shell::command(examples.join("write_corpus")).arg(&corpus))?;
    let text = shell::output(shell::command(examples.join("compression")).args([&store, &corpus]))?;
    std::fs::remove_file(&store)?;
    let mut lines = Vec::new();
    for line in text.lines().skip(2) {
        // | compression | bytes | logical | stored | ratio | MB/s written | MB/s read |
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, setting, _, _, _, ratio, ..] = fields[..] else { anyhow::bail!("the program prints '{line}'") };
        let name = setting.replace(':', "-");
        lines.push(format!("VALUE name=store-services/corpus-{name} value={ratio} unit=plain-bytes-for-each-stored"));
    }
    anyhow::ensure!(!lines.is_empty(), "no ratio of the corpus: {text}");
    Ok(lines)
}

/// Measures writes of 1 MiB to an erasure-coded pool of 2+1: what the OSDs alone spend, beside all that we do.
fn beside_bluestore(
    cluster: &Cluster,
    folder: &Path,
    effort: &Effort,
    name: &str,
    setting: Setting,
    compression: Option<&str>,
) -> Result<Case> {
    let ceph = |arguments: &[&str]| shell::output(cluster.command("ceph").args(arguments)).map(drop);
    let _ = ceph(&["osd", "erasure-code-profile", "set", "k2m1", "k=2", "m=1", "crush-failure-domain=osd"]);
    ceph(&["osd", "pool", "create", name, "16", "16", "erasure", "k2m1"])?;
    if let Some(algorithm) = compression {
        ceph(&["osd", "pool", "set", name, "compression_algorithm", algorithm])?;
        ceph(&["osd", "pool", "set", name, "compression_mode", "force"])?;
    }
    let mut case = Case {
        name: format!("{name}-write-1m-per-cpu"),
        unit: "MB per CPU-second",
        goal: CPU_GOAL,
        series: vec![series(setting.name, Side::Ours), series("BlueStore, OSDs alone", Side::Peer)],
    };
    for _ in 0..effort.rounds {
        case.series[0].values.push(ours(folder, effort, setting, "write", 8)?.per_cpu);
        let osds = osds(cluster)?;
        let spent = || osds.iter().map(|&process| cpu_seconds(process)).sum::<Result<f64>>();
        let before = spent()?;
        let seconds = (effort.seconds.ceil() as u64).max(1).to_string();
        let mut bench = cluster.command("rados");
        bench.args(["bench", "-p", name, &seconds, "write", "-t", "8", "-b", "1048576"]);
        let text = shell::output(&mut bench)?;
        let made = text.lines().find_map(|line| line.strip_prefix("Total writes made:"));
        let made: f64 = made.context("rados bench says nothing of its writes")?.trim().parse()?;
        let written = made * f64::from(1 << 20);
        case.series[1].values.push(written / 1e6 / (spent()? - before));
    }
    Ok(case)
}

/// Processes of the cluster's OSDs.
fn osds(cluster: &Cluster) -> Result<Vec<u32>> {
    let folder = cluster.conf().parent().context("a cluster in a folder")?.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains("ceph-osd ") && line.contains(&folder) {
            found.push(process);
        }
    }
    anyhow::ensure!(!found.is_empty(), "no OSD of the cluster in {folder}");
    Ok(found)
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. Stores of {} MiB for data, half full, driven in process, each on files in one folder that share its disk. Half \
         of each block is random, the rest repeats. {} rounds of {} s a measurement, interleaved, the order turned each \
         round; medians (lowest and highest in parentheses). Degraded: two of five devices are missing. \
         `ec-write-1m` is beside stripes on as many data devices, `-same-devices` beside stripes on all five. The corpus is \
         that of `bench compress`, written 128 KiB at a time. BlueStore: \
         `rados bench` with objects of 1 MiB on three OSDs of the lab's cluster, in a pool of 2+1; the CPU is that of the \
         OSDs alone, and ours that of everything.\n\nRepeat it: `cargo xtask bench store-services`.",
        report::machine(),
        effort.size_mib,
        effort.rounds,
        effort.seconds
    )
}
