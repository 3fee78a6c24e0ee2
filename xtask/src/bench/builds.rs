//! Build of this checkout against another build of the daemon, on the same loads, interleaved: finds what a change costs.
//!
//! One processor for the daemon and one for the host.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds};
use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

/// Jobs on each volume.
const JOBS: &[Job] = &[
    job("write-1m", "write", 1 << 20, 4),
    job("read-1m", "read", 1 << 20, 4),
    job("randread-4k-qd1", "randread", 4096, 1),
    job("randread-4k-qd32", "randread", 4096, 32),
    job("randwrite-4k-qd1", "randwrite", 4096, 1),
    job("randwrite-4k-qd32", "randwrite", 4096, 32),
];

const fn job(name: &'static str, pattern: &'static str, block_size: u32, depth: u32) -> Job {
    Job { name, pattern, block_size, depth, flush_each: 0 }
}

/// MiB of a volume.
const SIZE_MIB: u64 = 256;

/// Volume that a case is about.
struct Volume {
    name: &'static str,
    pool: &'static str,
    front: &'static str,
    /// Write log in front of it.
    log: bool,
}

const VOLUMES: &[Volume] = &[
    Volume { name: "nvmf", pool: "ram", front: "--nvme", log: false },
    Volume { name: "nbd", pool: "ram", front: "--nbd", log: false },
    Volume { name: "store", pool: "local", front: "--nbd", log: false },
    Volume { name: "writelog", pool: "local", front: "--nbd", log: true },
    Volume { name: "rados", pool: "rbd", front: "--nbd", log: false },
];

/// One of the builds, with the URI of each volume.
struct Build {
    daemon: Daemon,
    uris: Vec<String>,
}

/// Measures and prints.
pub fn run(effort: &Effort, old: &Path) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-nvme-host"]))?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let cluster = Cluster::named_or_apart(3)?;
    let builds = [("new", daemon::program()), ("old", old.to_path_buf())]
        .map(|(name, program)| start(name, &program, scratch.path(), &cluster));
    let [new, old] = builds;
    let builds = [new?, old?];
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let mut cases = Vec::new();
    for volume in VOLUMES {
        for job in JOBS {
            let name = format!("{}-{}", volume.name, job.name);
            cases.extend(["", "-per-cpu"].map(|suffix| case(&name, job, suffix)));
        }
    }
    for round in 0..effort.rounds {
        for (at, volume) in VOLUMES.iter().enumerate() {
            for (number, job) in JOBS.iter().enumerate() {
                let index = 2 * (at * JOBS.len() + number);
                if !wanted(&cases[index].name) {
                    continue;
                }
                for place in 0..2 {
                    // Each round begins with the other one.
                    let which = (place + round) % 2;
                    let build = &builds[which];
                    let before = cpu_seconds(build.daemon.id())?;
                    let (value, requests) = measure(job, &build.uris[at], effort.seconds)
                        .with_context(|| format!("{} on {}", job.name, volume.name))?;
                    let used = (cpu_seconds(build.daemon.id())? - before).max(0.01);
                    cases[index].series[which].values.push(value);
                    cases[index + 1].series[which].values.push(requests / used);
                }
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    for build in builds {
        build.daemon.stop()?;
    }
    cases.retain(|case| !case.series[0].values.is_empty());
    println!("{}", report::table(&cases));
    report::ratio_lines("builds", &cases).iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Starts a build's daemon and writes its volumes all over.
fn start(name: &str, program: &Path, folder: &Path, cluster: &Cluster) -> Result<Build> {
    let wrapper = ["/usr/bin/env", &cluster.variable(), "taskset", "--cpu-list", "0"];
    let data = folder.join(name);
    let words = ["--store-size", "2G", "--nvme", "127.0.0.1:0"];
    let daemon = Daemon::start_program(program, &wrapper, &data, &words)?;
    let mut uris = Vec::new();
    for volume in VOLUMES {
        let image = format!("{}/{name}-{}", volume.pool, volume.name);
        let log = format!("--log=ssd:{}:64M", data.join("log").display());
        shell::output(daemon.command().args(["create", &image, "--size", &format!("{SIZE_MIB}M")]))?;
        let mut attach = daemon.command();
        attach.args(["attach", &image, volume.front]).args(volume.log.then_some(log));
        let said = shell::output(&mut attach)?;
        let uri = said.lines().map(str::trim).find(|line| line.contains("://")).context("attach printed no URI")?;
        let fill = Job { name: "fill", pattern: "write", block_size: 1 << 20, depth: 4, flush_each: 0 };
        measure(&fill, uri, 2.0)?;
        uris.push(uri.to_owned());
    }
    Ok(Build { daemon, uris })
}

/// Runs a job; returns requests a second, or MB for large ones, and the number of requests.
fn measure(job: &Job, uri: &str, seconds: f64) -> Result<(f64, f64)> {
    let last = std::thread::available_parallelism().map_or(0, |count| count.get() - 1).to_string();
    if !uri.starts_with("nvme") {
        let mut target = fio::nbd(uri);
        target.extend([format!("--size={SIZE_MIB}M"), format!("--cpus_allowed={last}")]);
        let outcome = fio::measure(job, &target, seconds)?;
        let value = if job.is_bandwidth() { outcome.bytes_per_second / 1e6 } else { outcome.iops };
        return Ok((value, outcome.requests as f64));
    }
    let mut load = shell::command("taskset");
    load.args(["--cpu-list", &last]).arg(shell::target().join("release/nvme-load")).arg(uri);
    load.args(["--pattern", job.pattern, "--block", &job.block_size.to_string(), "--poll"]);
    load.args(["--depth", &job.depth.to_string(), "--seconds", &seconds.to_string()]);
    let found: Value = serde_json::from_str(&shell::output(&mut load)?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("our initiator says no {name}"));
    let value = if job.is_bandwidth() { number("mb_per_s")? } else { number("iops")? };
    Ok((value, number("requests")?))
}

fn case(name: &str, job: &Job, suffix: &str) -> Case {
    let series = [("this build", Side::Ours), ("old build", Side::Peer)];
    let unit = match (suffix, job.is_bandwidth()) {
        ("", true) => "MB/s",
        ("", false) => "IOPS",
        _ => "requests/CPU s",
    };
    Case {
        name: format!("{name}{suffix}"),
        unit,
        goal: 1.0,
        series: series.map(|(name, side)| Series { name: name.into(), side, values: Vec::new() }).into(),
    }
}
