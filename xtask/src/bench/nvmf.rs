//! Volumes in memory over NVMe/TCP with our own initiator, against what was asked for, against our own NBD and iSCSI,
//! and in a guest against the kernel's target.
//!
//! One processor for the daemon and one for the host.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, cpu_seconds, idle};
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
/// A volume that the processor's caches hold.
const SIZE_SMALL: &str = "16M";
/// Jobs on the small volume.
const SMALL: &[Job] = &[job("randread-4k-qd32-16m", "randread", 4096, 32)];
/// Jobs through TLS.
const TLS: &[Job] = &[
    job("tls-randread-4k-qd1", "randread", 4096, 1),
    job("tls-randread-4k-qd32", "randread", 4096, 32),
    job("tls-randwrite-4k-qd32", "randwrite", 4096, 32),
    job("tls-read-1m", "read", 1 << 20, 4),
];
/// A host without a key, and one with.
const HOSTS_NQN: [&str; 2] = [
    "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000f0eb",
    "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000f0ec",
];
/// Its key: that of libnvme's own tests.
const TLS_KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

/// Whose figures a series has.
#[derive(Debug, Clone, Copy)]
enum Host {
    /// Our initiator, asking its socket again and again, as SPDK's does.
    Polling,
    /// The same, asleep in the kernel, as others are.
    Sleeping,
    /// Our iSCSI initiator, polling, on our iSCSI.
    Iscsi,
    /// fio on our NBD.
    Nbd,
}

const HOSTS: [Host; 4] = [Host::Polling, Host::Sleeping, Host::Iscsi, Host::Nbd];

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-nvme-host", "-p", "forebay-iscsi-host"]))?;
    let scratch = Scratch::within(&shell::target(), "bench")?;
    let any = "127.0.0.1:0";
    let key = scratch.path().join("tls.key");
    std::fs::write(&key, TLS_KEY)?;
    std::fs::set_permissions(&key, Permissions::from_mode(0o600))?;
    let with_key = format!("{},tls-key={}", HOSTS_NQN[1], key.display());
    let hosts = ["--nvme-host", HOSTS_NQN[0], "--nvme-host", &with_key];
    let ports = ["--nvme", any, "--nvme", "127.0.0.1:0,tls=required", "--iscsi", any, "--nbd", any];
    let words = [&["--store-size", "1G"], &ports[..], &hosts].concat();
    let last = std::thread::available_parallelism().map_or(0, |count| count.get() - 1).to_string();
    let daemon = Daemon::start_under(&["taskset", "--cpu-list", "0"], &scratch.path().join("store"), &words)?;
    let attach = |name: &str, size: &str, front: &str| -> Result<Vec<String>> {
        shell::output(daemon.command().args(["create", name, "--size", size]))?;
        let uris = shell::output(daemon.command().args(["attach", name, front, "--format", "json"]))?;
        let target: Value = serde_json::from_str(&uris)?;
        let found = target["uris"].as_array().into_iter().flatten().filter_map(Value::as_str);
        Ok(found.filter(|uri| uri.contains("127.0.0.1")).map(str::to_owned).collect())
    };
    let only = |uris: Vec<String>| uris.into_iter().next().context("no URI over TCP");
    // In the order of the ports.
    let over_nvme = attach("ram/nvme", SIZE, "--nvme")?;
    let [over_nvme, over_tls] = <[String; 2]>::try_from(over_nvme).ok().context("not two ports for NVMe")?;
    let small = only(attach("ram/small", SIZE_SMALL, "--nvme")?)?;
    let over_iscsi = only(attach("ram/iscsi", SIZE, "--iscsi")?)?;
    let over_nbd = only(attach("ram/nbd", SIZE, "--nbd")?)?;
    // Volumes are filled first: reading data that was never written would not access memory.
    for uri in [&over_nvme, &small, &over_iscsi] {
        let fill = ["--pattern", "write", "--block", "1048576", "--depth", "4", "--once"];
        shell::output(initiator(uri, &last).args(fill)).with_context(|| format!("filling {uri}"))?;
    }
    let mut fill = shell::command("fio");
    fill.args(fio::nbd(&over_nbd)).args(["--name=fill", "--rw=write", "--bs=1M", "--iodepth=4", "--thread"]);
    shell::output(fill.arg(format!("--size={SIZE}"))).context("filling the volume over NBD")?;

    let jobs: Vec<_> = LOADS
        .iter()
        .filter(|load| effort.case.as_ref().is_none_or(|part| load.0.name.contains(part.as_str())))
        .collect();
    let mut speed: Vec<Case> = jobs.iter().map(|(job, goal, _)| case(job, "", *goal)).collect();
    let beside = |job: &Job, names: [(&str, Side); 2]| {
        ["", "-per-cpu"].map(|suffix| {
            let series = names.map(|(name, side)| Series { name: name.into(), side, values: Vec::new() });
            Case { series: series.into(), ..case(job, suffix, None) }
        })
    };
    let all_jobs = effort.case.is_none();
    let [small_jobs, tls_jobs] = [SMALL, TLS].map(|jobs| if all_jobs { jobs } else { &[] });
    let polls_or_sleeps = [("nvme, host polls", Side::Ours), ("nvme, host sleeps", Side::Ours)];
    let mut in_cache: Vec<_> = small_jobs.iter().map(|job| beside(job, polls_or_sleeps)).collect();
    let tls_or_not = [("through TLS", Side::Ours), ("without TLS", Side::Other)];
    let mut through_tls: Vec<_> = tls_jobs.iter().map(|job| beside(job, tls_or_not)).collect();
    let mut per_cpu: Vec<Case> = jobs.iter().map(|(job, _, goal)| case(job, "-per-cpu", *goal)).collect();
    for round in 0..effort.rounds {
        for (index, (job, ..)) in jobs.iter().enumerate() {
            // Each round begins with another one.
            for place in 0..HOSTS.len() {
                let which = (place + round) % HOSTS.len();
                let before = cpu_seconds(daemon.id())?;
                let (iops, bytes, requests) = match HOSTS[which] {
                    Host::Polling => load(job, (&over_nvme, false), true, &last, effort.seconds)?,
                    Host::Sleeping => load(job, (&over_nvme, false), false, &last, effort.seconds)?,
                    Host::Iscsi => load(job, (&over_iscsi, false), true, &last, effort.seconds)?,
                    Host::Nbd => {
                        let mut target = fio::nbd(&over_nbd);
                        target.extend([format!("--size={SIZE}"), format!("--cpus_allowed={last}")]);
                        let outcome = fio::measure(job, &target, effort.seconds)?;
                        (outcome.iops, outcome.bytes_per_second, outcome.requests as f64)
                    }
                };
                let used = (cpu_seconds(daemon.id())? - before).max(0.01);
                let value = if job.is_bandwidth() { bytes / 1e6 } else { iops };
                speed[index].series[which].values.push(value);
                per_cpu[index].series[which].values.push(requests / used);
            }
        }
        let measure = |job: &Job, way: (&str, bool), poll: bool, into: &mut [Case; 2], which: usize| -> Result<()> {
            let before = cpu_seconds(daemon.id())?;
            let (iops, bytes, requests) = load(job, way, poll, &last, effort.seconds)?;
            let used = (cpu_seconds(daemon.id())? - before).max(0.01);
            into[0].series[which].values.push(if job.is_bandwidth() { bytes / 1e6 } else { iops });
            into[1].series[which].values.push(requests / used);
            Ok(())
        };
        for (job, cases) in small_jobs.iter().zip(&mut in_cache) {
            measure(job, (&small, false), true, cases, 0)?;
            measure(job, (&small, false), false, cases, 1)?;
        }
        for (job, cases) in tls_jobs.iter().zip(&mut through_tls) {
            for place in 0..2 {
                let which = (place + round) % 2;
                measure(job, [(&over_tls[..], true), (&over_nvme[..], false)][which], true, cases, which)?;
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let idle = idle::idle(&daemon, "nvme-load", &over_nvme)?;
    daemon.stop()?;
    let guest = if effort.case.is_none() { in_guest(effort)? } else { Vec::new() };
    let more = in_cache.into_iter().chain(through_tls).flatten();
    let all: Vec<Case> = speed.into_iter().chain(per_cpu).chain(more).chain(guest).collect();
    println!("{}", report::table(&all));
    let lines = report::ratio_lines("nvmf", &all);
    lines.iter().for_each(|line| println!("{line}"));
    println!("{idle}");
    if !dry_run && effort.case.is_none() {
        report::write("nvmf", "Volumes in memory over NVMe/TCP", &method(effort, &idle), &all, &lines)?;
    }
    Ok(())
}

/// Our initiator of the URI's protocol.
fn initiator(uri: &str, processor: &str) -> Command {
    let program = if uri.starts_with("iscsi:") { "iscsi-load" } else { "nvme-load" };
    let mut load = shell::command("taskset");
    load.args(["--cpu-list", processor]).arg(shell::target().join("release").join(program)).arg(uri);
    load
}

/// One run of our initiator, through TLS or not: requests a second, bytes a second, requests.
fn load(
    job: &Job,
    (uri, through_tls): (&str, bool),
    poll: bool,
    processor: &str,
    seconds: f64,
) -> Result<(f64, f64, f64)> {
    let mut load = initiator(uri, processor);
    load.args(["--pattern", job.pattern, "--block", &job.block_size.to_string()]);
    load.args(["--depth", &job.depth.to_string(), "--seconds", &seconds.to_string()]);
    if through_tls {
        load.args(["--host", HOSTS_NQN[1], "--tls-key", TLS_KEY]);
    }
    if poll {
        load.arg("--poll");
    }
    let found: Value = serde_json::from_str(&shell::output(&mut load)?)?;
    let number = |name: &str| found[name].as_f64().with_context(|| format!("our initiator says no {name}"));
    Ok((number("iops")?, number("mb_per_s")? * 1e6, number("requests")?))
}

/// The kernel's target and a daemon side by side in a guest, whose processors are emulated.
fn in_guest(effort: &Effort) -> Result<Vec<Case>> {
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nvmet.sh")).arg(daemon::program());
    guest.arg(shell::target().join("release/nvme-load"));
    guest.args([effort.rounds.to_string(), effort.seconds.to_string()]);
    let said = shell::output(guest.env("TIMEOUT", "240")).context("in the guest")?;
    let cases = guest_cases(&said)?;
    ensure!(!cases.is_empty(), "the guest has measured nothing:\n{said}");
    Ok(cases)
}

/// Parses the output of the guest's script: a line `RUN case who figures` for each run.
fn guest_cases(said: &str) -> Result<Vec<Case>> {
    let mut cases: Vec<Case> = Vec::new();
    for line in said.lines() {
        let mut words = line.trim().splitn(4, ' ');
        let (Some("RUN"), Some(name), Some(who), Some(figures)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let figures: Value = serde_json::from_str(figures).with_context(|| format!("a line of the guest: {line}"))?;
        let name = format!("guest-{name}");
        let is_bandwidth = name.ends_with("-1m");
        let index = cases.iter().position(|case| case.name == name).unwrap_or_else(|| {
            let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
            let series = vec![series("forebay", Side::Ours), series("nvmet-tcp", Side::Peer)];
            cases.push(Case { name, unit: if is_bandwidth { "MB/s" } else { "IOPS" }, goal: 1.0, series });
            cases.len() - 1
        });
        let value = figures[if is_bandwidth { "mb_per_s" } else { "iops" }].as_f64().context("no figure")?;
        cases[index].series[usize::from(who != "forebay")].values.push(value);
    }
    Ok(cases)
}

fn case(job: &Job, suffix: &str, goal: Option<f64>) -> Case {
    let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
    let mut series = vec![
        series("nvme, host polls", Side::Ours),
        series("nvme, host sleeps", Side::Ours),
        series("our iscsi", Side::Other),
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

fn method(effort: &Effort, idle: &str) -> String {
    format!(
        "{}. Volumes of {SIZE} in the pool `ram`, written once from end to end, over TCP on loopback; the daemon has \
         the first processor and one core, the host the last. `nvme-load` (test/nvme) is the host over NVMe/TCP, once \
         polling its socket as SPDK's initiator does, once sleeping in the kernel; it does not copy the data that it \
         reads, and neither does `iscsi-load` (test/iscsi). fio's nbd engine is the host over NBD, which costs the \
         host more, so that its figures say less about the daemon. {} rounds of {} s a measurement, the order turned \
         each round; medians. *goal* was set when the front was begun: SPDK's NVMe/TCP target on such a machine gave \
         350,000 to 360,000 reads a second at depth 32 and 22 us at depth 1; both targets in one run are on [a page of \
         their own](spdk.md). *per-cpu* divides the requests by the user and system time of the daemon.\n\n\
         Reads at random offsets of {SIZE} come from memory and not from a cache of the processor's, and a third of \
         the daemon's time is the kernel's copy of them into the socket, waiting for that memory. `-16m` is the same \
         on a volume of {SIZE_SMALL}. `tls-` is through TLS 1.3 with a pre-shared key and AES-128 in GCM, which costs \
         the host as much as the daemon.\n\n\
         `guest-` is beside the kernel's own target (nvmet-tcp on brd, a ramdisk), both in the lab's guest and over \
         its loopback. The guest's processors are emulated: only the two figures of one row can be compared.\n\n\
         {idle}.\n\nRepeat it: `cargo xtask bench nvmf`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_understood() {
        let said = "== guest up\nRUN randread-4k-qd1 nvmet {\"iops\": 20}\nRUN randread-4k-qd1 forebay {\"iops\": 30}\n\
            RUN read-1m forebay {\"iops\": 3, \"mb_per_s\": 3.5}\nother text\n";
        let cases = guest_cases(said).unwrap();
        assert_eq!(cases.len(), 2);
        assert_eq!(cases[0].name, "guest-randread-4k-qd1");
        assert_eq!(cases[0].ratio(Side::Peer), Some(1.5));
        assert_eq!((cases[1].unit, &cases[1].series[0].values[..]), ("MB/s", &[3.5][..]));
        assert!(guest_cases("RUN a forebay nothing").is_err());
    }
}
