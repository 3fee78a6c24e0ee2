//! A Ceph image served to hosts: Forebay over iSCSI and NBD against tgt with its rbd backing store.
//!
//! Cluster, targets and the host have the same processors, so what a target spends its requests with decides.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds, rados};
use crate::ceph::Cluster;
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Process, Scratch};

const DEPTHS: [u32; 2] = [8, 32];
/// Goal: 4 KiB reads a CPU-second of the target, ours to theirs.
const CPU_GOAL: f64 = 6.0;
const TARGET: &str = "iqn.2026-01.peer.tgt:rbd";

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_shipped_command())?;
    let cluster = Cluster::named_or_start(3)?;
    let scratch = Scratch::new("bench-gateway")?;
    let uncached = rados::uncached(&cluster, scratch.path())?;
    rados::image(&cluster, &uncached)?;

    let (port, control) = (shell::free_port()?, shell::free_port()?);
    let tgt = Tgt::start(&cluster, &uncached, scratch.path(), port, control)?;
    let portal = format!("127.0.0.1:{}", shell::free_port()?);
    let conf = format!("CEPH_CONF={}", cluster.conf().display());
    let words = ["--store-size", "256M", "--cores", "1", "--linger-us", "0", "--iscsi", &portal];
    let daemon = Daemon::start_shipped(&["/usr/bin/env", &conf], &scratch.path().join("data"), &words)?;
    let attach = |front: &str| -> Result<String> {
        let attached = shell::output(daemon.command().args(["attach", &rados::spec(), front, "--format", "json"]))?;
        let target: Value = serde_json::from_str(&attached)?;
        target["uris"][0].as_str().map(str::to_owned).context("attach prints no URI")
    };
    let (iscsi, nbd) = (attach("--iscsi")?, attach("--nbd")?);
    let theirs = format!("iscsi://127.0.0.1:{port}/{TARGET}/1");

    let mut speed: Vec<Case> = DEPTHS.iter().map(|depth| case(*depth, "", "IOPS", 1.0)).collect();
    let mut per_cpu: Vec<Case> =
        DEPTHS.iter().map(|depth| case(*depth, "-per-cpu", "per CPU-second", CPU_GOAL)).collect();
    for round in 0..effort.rounds {
        for (index, depth) in DEPTHS.into_iter().enumerate() {
            for place in 0..3 {
                let which = (place + round) % 3;
                let process = if which == 2 { tgt.process.id() } else { daemon.id() };
                let before = cpu_seconds(process)?;
                let (iops, requests) = match which {
                    0 => initiator(&iscsi, depth, effort.seconds)?,
                    1 => {
                        let job = Job { name: "read", pattern: "randread", block_size: 4096, depth, flush_each: 0 };
                        let outcome = fio::measure(&job, &fio::nbd(&nbd), effort.seconds)?;
                        (outcome.iops, outcome.requests as f64)
                    }
                    _ => initiator(&theirs, depth, effort.seconds)?,
                };
                let used = (cpu_seconds(process)? - before).max(0.01);
                speed[index].series[which].values.push(iops);
                per_cpu[index].series[which].values.push(requests / used);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    daemon.stop()?;
    tgt.process.stop(Duration::from_secs(10))?;
    let all: Vec<Case> = speed.into_iter().chain(per_cpu).collect();
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("gateway", &all);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("gateway", "A Ceph image over iSCSI and NBD, beside tgt", &method(effort), &all, &lines)?;
    }
    rados::remove(&cluster)
}

/// tgtd with the image as a unit.
struct Tgt {
    process: Process,
}

impl Tgt {
    fn start(
        cluster: &Cluster,
        conf: &std::path::Path,
        folder: &std::path::Path,
        port: u16,
        control: u16,
    ) -> Result<Self> {
        let mut tgtd = cluster.command("tgtd");
        tgtd.env("CEPH_CONF", conf);
        // Its control socket has a number for a name.
        let control = (control % 32_768).to_string();
        tgtd.args(["-f", "-C", &control, "--iscsi", &format!("portal=127.0.0.1:{port}")]);
        let tgt = Self { process: Process::start(&mut tgtd, &folder.join("tgtd.log"))? };
        let tell = |words: &[&str]| {
            let mut admin = shell::command("tgtadm");
            admin.args(["-C", &control, "--lld", "iscsi"]).args(words);
            shell::output(&mut admin)
        };
        let up = || tell(&["--op", "show", "--mode", "sys"]).ok();
        shell::wait_for(Duration::from_secs(10), up).context("tgtd does not start")?;
        tell(&["--op", "new", "--mode", "target", "--tid", "1", "-T", TARGET])?;
        let spec = rados::spec();
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1"];
        tell(&[&unit[..], &["--backing-store", &spec, "--bstype", "rbd"]].concat())?;
        tell(&["--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"])?;
        Ok(tgt)
    }
}

/// One run of libiscsi's initiator: reads of 4 KiB a second, and how many.
fn initiator(uri: &str, depth: u32, seconds: f64) -> Result<(f64, f64)> {
    let seconds = seconds.ceil().max(1.0);
    let mut perf = shell::command("iscsi-perf");
    perf.args(["-b", "8", "-r", "-m", &depth.to_string(), "-t", &seconds.to_string(), uri]);
    let said = shell::output(&mut perf)?;
    // It says the average again and again, on one line.
    let average = said.rsplit("iops average ").next().and_then(|rest| rest.split_whitespace().next());
    let iops: f64 = average.context("iscsi-perf prints no average")?.parse()?;
    Ok((iops, iops * seconds))
}

fn case(depth: u32, suffix: &str, unit: &'static str, goal: f64) -> Case {
    let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
    let series = vec![
        series("forebay, iscsi", Side::Ours),
        series("forebay, nbd", Side::Ours),
        series("tgt with rbd, iscsi", Side::Peer),
    ];
    Case { name: format!("randread-4k-qd{depth}{suffix}"), unit, goal, series }
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. A cluster of the lab: Ceph 16.2, one monitor, three OSDs with BlueStore on files, two copies; cluster, targets \
         and hosts on loopback and on the same processors. One image with `rbd`'s default features, written all over, read \
         at random, 4 KiB at a time. *tgt*: Debian's tgtd with its rbd backing store, librbd's cache off. *forebay*: the \
         daemon as it is shipped (`--profile dist`), one core, `--linger-us 0`, so that it sleeps when there is nothing to \
         do. The host over iSCSI is libiscsi's `iscsi-perf`, over NBD fio. {} rounds of {} s a measurement (whole seconds \
         over iSCSI), the order turned each round; medians (lowest and highest in parentheses). *per-cpu* divides the \
         requests by the user and system time of the target's process; the ratio is that of the better one of our \
         two.\n\n\
         Repeat it: `cargo xtask bench gateway`; with `CEPH_CONF` set, on that cluster's pool `rbd`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}
