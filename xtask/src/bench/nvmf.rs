//! Volumes in memory over NVMe/TCP with our own initiator, against what was asked for and against our own NBD.
//!
//! One processor for the daemon and one for the host.

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

/// A load, what was asked for at least (requests or MB a second; SPDK's figures on such a machine), and what was asked
/// for per CPU-second of the daemon.
const LOADS: &[(Job, Option<f64>, Option<f64>)] = &[
    (job("write-1m", "write", 1 << 20, 4), None, None),
    (job("read-1m", "read", 1 << 20, 4), None, None),
    (job("randread-4k-qd1", "randread", 4096, 1), Some(1e6 / 22.0), None),
    (job("randread-4k-qd32", "randread", 4096, 32), Some(360e3), Some(500e3)),
    (job("randread-4k-qd128", "randread", 4096, 128), None, None),
    (job("randwrite-4k-qd1", "randwrite", 4096, 1), None, None),
    (job("randwrite-4k-qd32", "randwrite", 4096, 32), None, None),
];

const fn job(name: &'static str, pattern: &'static str, block_size: u32, depth: u32) -> Job {
    Job { name, pattern, block_size, depth, flush_each: 0 }
}

/// Bytes of the volumes.
const SIZE: &str = "512M";

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    shell::run(shell::cargo().args(["build", "--quiet", "--release", "-p", "forebay-nvme-host"]))?;
    let scratch = Scratch::within(&shell::target(), "bench")?;
    let (nvme, nbd) = (shell::free_port()?, shell::free_port()?);
    let words = ["--store-size", "1G", "--nvme", &format!("127.0.0.1:{nvme}"), "--nbd", &format!("127.0.0.1:{nbd}")];
    let last = std::thread::available_parallelism().map_or(0, |count| count.get() - 1).to_string();
    let daemon = Daemon::start_under(&["taskset", "--cpu-list", "0"], &scratch.path().join("store"), &words)?;
    let attach = |name: &str, front: &str| -> Result<String> {
        shell::output(daemon.command().args(["create", name, "--size", SIZE]))?;
        let uris = shell::output(daemon.command().args(["attach", name, front, "--format", "json"]))?;
        let target: Value = serde_json::from_str(&uris)?;
        let found = target["uris"].as_array().into_iter().flatten().filter_map(Value::as_str);
        found.filter(|uri| uri.contains("127.0.0.1")).map(str::to_owned).next().context("no URI over TCP")
    };
    let over_nvme = attach("ram/nvme", "--nvme")?;
    let over_nbd = attach("ram/nbd", "--nbd")?;

    let jobs: Vec<_> = LOADS
        .iter()
        .filter(|load| effort.case.as_ref().is_none_or(|part| load.0.name.contains(part.as_str())))
        .collect();
    let mut speed: Vec<Case> = jobs.iter().map(|(job, goal, _)| case(job, "", *goal)).collect();
    let mut per_cpu: Vec<Case> = jobs.iter().map(|(job, _, goal)| case(job, "-per-cpu", *goal)).collect();
    for round in 0..effort.rounds {
        for (index, (job, ..)) in jobs.iter().enumerate() {
            // Polling, as SPDK's initiator does, and asleep, as others do; each round begins with another one.
            for place in 0..3 {
                let which = (place + round) % 3;
                let before = cpu_seconds(daemon.id())?;
                let (iops, bytes, requests) = match which {
                    2 => {
                        let mut target = fio::nbd(&over_nbd);
                        target.extend([format!("--size={SIZE}"), format!("--cpus_allowed={last}")]);
                        let outcome = fio::measure(job, &target, effort.seconds)?;
                        (outcome.iops, outcome.bytes_per_second, outcome.requests as f64)
                    }
                    _ => load(job, &over_nvme, which == 0, &last, effort.seconds)?,
                };
                let used = (cpu_seconds(daemon.id())? - before).max(0.01);
                let value = if job.is_bandwidth() { bytes / 1e6 } else { iops };
                speed[index].series[which].values.push(value);
                per_cpu[index].series[which].values.push(requests / used);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    daemon.stop()?;
    let all: Vec<Case> = speed.into_iter().chain(per_cpu).collect();
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("nvmf", &all);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("nvmf", "Volumes in memory over NVMe/TCP", &method(effort), &all, &lines)?;
    }
    Ok(())
}

/// One run of our initiator: requests a second, bytes a second, requests.
fn load(job: &Job, uri: &str, poll: bool, processor: &str, seconds: f64) -> Result<(f64, f64, f64)> {
    let mut load = shell::command("taskset");
    load.args(["--cpu-list", processor]).arg(shell::target().join("release/nvme-load")).arg(uri);
    load.args(["--pattern", job.pattern, "--block", &job.block_size.to_string()]);
    load.args(["--depth", &job.depth.to_string(), "--seconds", &seconds.to_string()]);
    if poll {
        load.arg("--poll");
    }
    let found: Value = serde_json::from_str(&shell::output(&mut load)?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("nvme-load says no {name}"));
    Ok((number("iops")?, number("mb_per_s")? * 1e6, number("requests")?))
}

fn case(job: &Job, suffix: &str, goal: Option<f64>) -> Case {
    let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
    let mut series = vec![
        series("nvme, host polls", Side::Ours),
        series("nvme, host sleeps", Side::Ours),
        series("our nbd", Side::Other),
    ];
    if let Some(goal) = goal {
        series.push(Series { name: "goal".into(), side: Side::Peer, values: vec![goal] });
    }
    let unit = match (suffix.is_empty(), job.is_bandwidth()) {
        (true, true) => "MB/s",
        (true, false) => "IOPS",
        (false, _) => "per CPU-second",
    };
    Case { name: format!("{}{suffix}", job.name), unit, goal: 1.0, series }
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. Volumes of {SIZE} in the pool `ram`, over TCP on loopback; the daemon has the first processor and one core, \
         the host the last. `nvme-load` (test/nvme) is the host over NVMe/TCP, once asking its socket again and again as \
         SPDK's initiator does, once sleeping in the kernel; it leaves what it reads where it arrived. fio's nbd engine is \
         the host over NBD, which costs the host more, so that its figures say less of the daemon. {} rounds of {} s a \
         measurement, the order turned each round; medians. *goal* is what was asked for when the front was begun: SPDK's \
         NVMe/TCP target on such a machine gave 350,000 to 360,000 reads a second at depth 32 and 22 us at depth 1. \
         *per-cpu* divides the requests by the user and system time of the daemon.\n\n\
         The kernel's own target (nvmet-tcp) is not in the table: it runs in the guest only, under an emulated \
         processor.\n\nRepeat it: `cargo xtask bench nvmf`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}
