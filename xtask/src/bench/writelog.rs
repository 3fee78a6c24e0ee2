//! The write log against the same volume without one: the talk's job (2,000 writes a second, 8 at once, a barrier after
//! each 128), with one volume and with sixteen, and as fast as it goes at every depth.
//!
//! Without a cluster the backend is the embedded store with a pause of 2 ms on each request, which stands for a
//! cluster's milliseconds and is no cluster; and the store as it is, which is a fast backend.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::daemon::{self, Daemon};
use crate::shell::{self, Process, Scratch};

/// Microseconds by which the slow backend is slowed down.
const PAUSE_US: &str = "2000";
const DEPTHS: [u32; 5] = [1, 8, 32, 64, 128];
/// The talk's ratios: what the log has to be better by.
const MEAN_GOAL: f64 = 13.0;
const TAIL_GOAL: f64 = 9.0;

/// A daemon with sixteen volumes.
struct Setup {
    name: &'static str,
    side: Side,
    daemon: Daemon,
    uris: Vec<String>,
}

fn setup(folder: &Path, name: &'static str, side: Side, pause: bool, log: bool) -> Result<Setup> {
    let pause = format!("FOREBAY_DEBUG_BACKEND_DELAY_US={}", if pause { PAUSE_US } else { "0" });
    let data = folder.join(name.replace([' ', ','], "-"));
    std::fs::create_dir_all(&data)?;
    let daemon = Daemon::start_under(&["/usr/bin/env", &pause], &data.join("data"), &["--cores", "1"])?;
    let place = log.then(|| format!("--log=ssd:{}:32M", data.join("logs").display()));
    let more: Vec<&str> = place.as_deref().into_iter().collect();
    let uris = (0..16).map(|at| daemon.volume_with(&format!("local/v{at}"), "256M", &more)).collect::<Result<_>>()?;
    Ok(Setup { name, side, daemon, uris })
}

/// Mean, and percentiles in microseconds: 90, 99, 99.9, 99.99; and writes a second.
struct Outcome {
    mean_us: f64,
    tail_us: [f64; 4],
    iops: f64,
}

fn job(uri: &str, depth: u32, rate: u32, seconds: f64) -> std::process::Command {
    let mut fio = shell::command("fio");
    fio.args(crate::fio::nbd(uri)).args(["--name=job", "--rw=randwrite", "--bs=4k", "--size=256M", "--thread"]);
    fio.args([format!("--iodepth={depth}"), format!("--runtime={seconds}"), "--time_based".into()]);
    fio.args(["--fsync=128", "--randrepeat=0", "--norandommap", "--output-format=json", "--ramp_time=1"]);
    fio.arg("--percentile_list=90:99:99.9:99.99");
    if rate > 0 {
        // Evenly: fio 3.33 dies of Poisson arrivals with barriers.
        fio.arg(format!("--rate_iops={rate}"));
    }
    fio
}

fn parse(text: &str) -> Result<Outcome> {
    let begin = text.find('{').with_context(|| format!("fio reported nothing but: {text}"))?;
    let report: Value = serde_json::from_str(&text[begin..])?;
    let write = &report["jobs"][0]["write"];
    if report["jobs"][0]["error"].as_u64() != Some(0) {
        bail!("fio failed: {}", report["jobs"][0]["error"]);
    }
    let latency = &write["clat_ns"];
    let at = |name: &str| latency["percentile"][name].as_f64().unwrap_or(0.0) / 1e3;
    Ok(Outcome {
        mean_us: latency["mean"].as_f64().context("fio reports no mean")? / 1e3,
        tail_us: [at("90.000000"), at("99.000000"), at("99.900000"), at("99.990000")],
        iops: write["iops"].as_f64().context("fio reports no IOPS")?,
    })
}

/// One job on each of the first `volumes` volumes at once; the mean of their figures, and the worst of their tails.
fn measure(setup: &Setup, volumes: usize, depth: u32, rate: u32, seconds: f64) -> Result<Outcome> {
    let scratch = Scratch::new("fio")?;
    let mut running = Vec::new();
    for (at, uri) in setup.uris.iter().take(volumes).enumerate() {
        let log = scratch.path().join(format!("{at}"));
        running.push((Process::start(&mut job(uri, depth, rate, seconds), &log)?, log));
    }
    let mut all = Outcome { mean_us: 0.0, tail_us: [0.0; 4], iops: 0.0 };
    for (mut process, log) in running {
        let patience = Duration::from_secs_f64(seconds * 3.0 + 60.0);
        shell::wait_for(patience, || process.ended()).context("fio does not end")?;
        let one = parse(&std::fs::read_to_string(&log)?)?;
        all.mean_us += one.mean_us / volumes as f64;
        all.iops += one.iops;
        for (worst, tail) in all.tail_us.iter_mut().zip(one.tail_us) {
            *worst = worst.max(tail);
        }
    }
    Ok(all)
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let mut cases: Vec<Case> = Vec::new();
    for (backend, pause) in [("slow", true), ("store", false)] {
        let setups = [
            setup(
                scratch.path(),
                if pause { "slow, log on ssd" } else { "store, log on ssd" },
                Side::Ours,
                pause,
                true,
            )?,
            setup(scratch.path(), if pause { "slow, no log" } else { "store, no log" }, Side::Peer, pause, false)?,
        ];
        for round in 0..effort.rounds {
            for (volumes, depth, rate) in jobs(pause) {
                let name = match rate {
                    0 => format!("{backend}-qd{depth}"),
                    _ => format!("{backend}-2000-{volumes}v"),
                };
                if effort.case.as_ref().is_some_and(|part| !name.contains(part.as_str())) {
                    continue;
                }
                for place in 0..setups.len() {
                    let which = (place + round) % setups.len();
                    let outcome = measure(&setups[which], volumes, depth, rate, effort.seconds)
                        .with_context(|| format!("{name}, {}", setups[which].name))?;
                    let tails = outcome.tail_us.map(|us| format!("{us:.0}")).join(" ");
                    println!(
                        "{name:<16} {:<18} {:>8.0} IOPS  mean {:>7.0} us  90/99/99.9/99.99 %: {tails} us",
                        setups[which].name, outcome.iops, outcome.mean_us
                    );
                    // What is better is larger.
                    if rate == 0 {
                        note(&mut cases, &name, "IOPS", 1.0, &setups, which, outcome.iops);
                    } else {
                        let goal = |goal| if pause { goal } else { 1.0 };
                        let (mean, tail) = (1e6 / outcome.mean_us, 1e6 / outcome.tail_us[3]);
                        note(&mut cases, &format!("{name}-mean"), "1/s", goal(MEAN_GOAL), &setups, which, mean);
                        note(&mut cases, &format!("{name}-99.99"), "1/s", goal(TAIL_GOAL), &setups, which, tail);
                    }
                }
            }
        }
        for setup in setups {
            setup.daemon.stop()?;
        }
    }
    println!("{}", report::table(&cases));
    let lines = report::ratio_lines("writelog", &cases);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run && effort.case.is_none() {
        report::write("writelog", "The write log, and no write log", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

/// Volumes, depth, and writes a second (0: as fast as it goes).
fn jobs(paced: bool) -> Vec<(usize, u32, u32)> {
    let talk = [(1, 8, 2000), (16, 8, 2000)];
    let free = DEPTHS.map(|depth| (1, depth, 0));
    // Sixteen at once are 32,000 writes a second: more than two processors serve besides fio.
    talk.into_iter().filter(|_| paced).chain(free).collect()
}

fn note(
    cases: &mut Vec<Case>,
    name: &str,
    unit: &'static str,
    goal: f64,
    setups: &[Setup; 2],
    which: usize,
    value: f64,
) {
    if !cases.iter().any(|case| case.name == name) {
        let series = setups
            .iter()
            .map(|setup| Series { name: setup.name.into(), side: setup.side, values: Vec::new() })
            .collect();
        cases.push(Case { name: name.into(), unit, goal, series });
    }
    if let Some(case) = cases.iter_mut().find(|case| case.name == name) {
        case.series[which].values.push(value);
    }
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. fio's nbd engine over a Unix socket, 4 KiB random writes, a flush after each 128, {} rounds of {} s after a \
         second of warming up, with and without the log in turn. *slow* is the embedded store with a pause of 2 ms on \
         every request: it stands for a cluster's milliseconds, and is no cluster, whose tail would be worse. *store* is \
         the store as it is, on the same disk as the log. *-2000-Nv*: N volumes at 2,000 writes a second each, 8 at once \
         (the talk's job); figures are 1 / latency, so that more is better: the mean, and the 99.99th percentile of the \
         worst volume. *-qdN*: one volume, as fast as it goes.\n\nRepeat it: `cargo xtask bench writelog`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}
