//! The embedded store in process, against fio's io_uring engine with O_DIRECT on the raw file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::daemon;
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

/// A job for fio, what our own program calls it, and the goal for the ratio.
const JOBS: &[(Job, &str, f64)] = &[
    (Job { name: "randread-4k-qd1", pattern: "randread", block_size: 4096, depth: 1, flush_each: 0 }, "randread", 0.9),
    (
        Job { name: "randread-4k-qd32", pattern: "randread", block_size: 4096, depth: 32, flush_each: 0 },
        "randread",
        0.9,
    ),
    (
        Job { name: "randwrite-4k-qd32-flush128", pattern: "randwrite", block_size: 4096, depth: 32, flush_each: 128 },
        "randwrite",
        1.0,
    ),
];

/// Bytes written to the device for each byte of uniformly random 4 KiB overwrites, 80 % full.
const AMPLIFICATION_MAX: f64 = 3.0;

/// Seconds to open a store with 10 GiB in it that was not closed cleanly.
const RECOVERY_SECONDS_MAX: f64 = 2.0;

/// The store's size for that: it is filled to 80 %.
const RECOVERY_MIB: u64 = 12_900;

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-store", "--example", "bench"]))?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let raw = scratch.path().join("raw");
    let store = scratch.path().join("store");
    fill(&raw, effort.size_mib)?;
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let jobs: Vec<_> = JOBS.iter().filter(|(job, ..)| wanted(job.name)).collect();
    let mut cases: Vec<Case> = jobs
        .iter()
        .map(|(job, _, goal)| {
            let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
            let series = vec![series("forebay store", Side::Ours), series("fio on the raw file", Side::Peer)];
            Case { name: job.name.into(), unit: "IOPS", goal: *goal, series }
        })
        .collect();
    for round in 0..effort.rounds {
        for (case, (job, mode, _)) in cases.iter_mut().zip(&jobs) {
            for place in 0..2 {
                let which = (place + round) % 2;
                let iops = if which == 0 {
                    ours(&store, effort.size_mib, mode, job.depth, effort.seconds)?["iops"].as_f64()
                } else {
                    let target = [
                        "--ioengine=io_uring".into(),
                        "--direct=1".into(),
                        format!("--filename={}", raw.display()),
                        format!("--size={}M", effort.size_mib),
                    ];
                    Some(fio::measure(job, &target, effort.seconds)?.iops)
                };
                case.series[which].values.push(iops.context("no IOPS")?);
            }
        }
        if !jobs.is_empty() {
            println!("round {} of {}", round + 1, effort.rounds);
        }
    }
    println!("{}", report::table(&cases));
    let mut lines = report::ratio_lines("store", &cases);
    std::fs::remove_file(&raw)?;
    if wanted("write-amplification") {
        let found = ours(&store, effort.size_mib.min(1024), "wa", 32, 0.0)?;
        lines.push(value_line(
            "write-amplification-80-full",
            found["write_amplification"].as_f64(),
            AMPLIFICATION_MAX,
            "bytes-per-byte",
        )?);
        lines.push(value_line(
            "metadata-mib",
            found["metadata_bytes"].as_f64().map(|bytes| bytes / f64::from(1 << 20)),
            64.0,
            "MiB",
        )?);
    }
    if wanted("recovery") {
        let found = ours(&store, RECOVERY_MIB, "recover", 32, effort.seconds)?;
        lines.push(value_line("recovery-10-gib", found["seconds"].as_f64(), RECOVERY_SECONDS_MAX, "seconds")?);
    }
    for line in &lines {
        println!("{line}");
    }
    if !dry_run && effort.case.is_none() {
        report::write("store", "The embedded store and the raw file", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

/// A line for what is held against a limit and not against a peer.
fn value_line(name: &str, value: Option<f64>, limit: f64, unit: &str) -> Result<String> {
    let value = value.with_context(|| format!("no {name}"))?;
    let verdict = if value <= limit { "met" } else { "missed" };
    Ok(format!("VALUE name=store/{name} value={value:.2} at-most={limit:.2} unit={unit} {verdict}"))
}

/// One run of the store's own measuring program: the JSON of its last line.
fn ours(path: &Path, size_mib: u64, mode: &str, depth: u32, seconds: f64) -> Result<Value> {
    let program: PathBuf = shell::target().join("release/examples/bench");
    let mut command = shell::command(program);
    command.arg(path).args([&size_mib.to_string(), mode, &depth.to_string(), &seconds.to_string()]);
    let text = shell::output(&mut command)?;
    let line = text.lines().rev().find(|line| line.starts_with('{')).context("the store's program prints no JSON")?;
    Ok(serde_json::from_str(line)?)
}

fn fill(raw: &Path, size_mib: u64) -> Result<()> {
    let mut fill = shell::command("fio");
    fill.args(["--name=fill", "--rw=write", "--bs=1M", "--iodepth=8", "--ioengine=io_uring", "--direct=1"]);
    fill.args(["--refill_buffers", "--end_fsync=1", "--thread"]);
    fill.args([format!("--filename={}", raw.display()), format!("--size={size_mib}M")]);
    shell::output(&mut fill)?;
    Ok(())
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. A store of {} MiB filled to 80 % and driven in process, and a raw file of the same size in the same \
         folder, written once from end to end and driven by fio's io_uring engine with O_DIRECT. {} rounds of {} s a \
         measurement, interleaved, the order turned each round; medians (lowest and highest in parentheses). The store \
         verifies a checksum over each block it reads. Write amplification is measured over uniformly random 4 KiB \
         overwrites of four times the capacity, 80 % full; recovery opens a store with 10 GiB in it that was not \
         closed in order.\n\nRepeat it: `cargo xtask bench store`.",
        report::machine(),
        effort.size_mib,
        effort.rounds,
        effort.seconds
    )
}
