//! Clones of one parent through the read cache, against the same clones without one; and an image that is read again and
//! again with its own blocks in the cache, against the same without.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::{self, Case, Series, Side};
use super::{Effort, median};
use crate::daemon;
use crate::shell::{self, Scratch};

/// Clones that read at the same time.
const CLONES: u64 = 50;
/// Size of the parent in MiB.
const PARENT_MIB: u64 = 256;
/// Bytes read from the pool for each byte of the parent.
const FETCHED_MAX: f64 = 1.05;
/// Goal: throughput with the cache for each unit without.
const GAIN: f64 = 5.0;

/// Name of the case of own blocks.
const OWN: &str = "own-blocks";
/// Size of its image in MiB.
const OWN_MIB: u64 = 256;
/// Number of its reads.
const OWN_READS: u64 = 8000;
/// Goal: reads per second with the cache for each without.
const OWN_GAIN: f64 = 3.0;

/// Layers of the cache that are measured.
const MODES: [&str; 2] = ["memory", "disk"];

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&[
        "-p",
        "forebay-rbd-lab",
        "--bin",
        "clone-load",
        "--bin",
        "own-load",
    ]))?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let wanted = |name: &&&str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let modes: Vec<&str> = MODES.iter().filter(wanted).copied().collect();
    let case = |mode: &&str| {
        let series = |name: String, side| Series { name, side, values: Vec::new() };
        let series = vec![series(format!("with a cache ({mode})"), Side::Ours), series("without".into(), Side::Peer)];
        Case { name: format!("throughput-{mode}"), unit: "MiB/s", goal: GAIN, series }
    };
    let mut cases: Vec<Case> = modes.iter().map(case).collect();
    let mut own = wanted(&&OWN).then(|| {
        let series = |name: &str, side| Series { name: name.into(), side, values: Vec::new() };
        let series = vec![series("own blocks cached", Side::Ours), series("without", Side::Peer)];
        Case { name: OWN.into(), unit: "reads/s", goal: OWN_GAIN, series }
    });
    let mut fetched = vec![Vec::new(); modes.len()];
    for round in 0..effort.rounds {
        for (series, mode) in own.iter_mut().flat_map(|case| case.series.iter_mut().zip(["memory", "none"])) {
            let found = measure("own-load", [OWN_MIB, OWN_READS], &[mode.into()])?;
            series.values.push(number(&found, "reads_per_second")?);
            println!("round {}: {OWN}: {mode}: {found}", round + 1);
        }
        if modes.is_empty() {
            continue;
        }
        let measure_peer = || measure("clone-load", [PARENT_MIB, CLONES], &["none".into()]);
        let mut peer = if round % 2 == 0 { Some(measure_peer()?) } else { None };
        for ((case, fetched), mode) in cases.iter_mut().zip(&mut fetched).zip(&modes) {
            let mut arguments = vec![(*mode).to_owned()];
            if *mode == "disk" {
                let file = scratch.path().join(format!("cache-{round}"));
                arguments.push(file.display().to_string());
            }
            let ours = measure("clone-load", [PARENT_MIB, CLONES], &arguments)?;
            case.series[0].values.push(number(&ours, "mib_per_second")?);
            fetched.push(number(&ours, "parent_bytes")? / (PARENT_MIB << 20) as f64);
            println!("round {}: {mode}: {ours}", round + 1);
        }
        let peer = match peer.take() {
            Some(peer) => peer,
            None => measure_peer()?,
        };
        println!("round {}: none: {peer}", round + 1);
        for case in &mut cases {
            case.series[1].values.push(number(&peer, "mib_per_second")?);
        }
    }
    cases.extend(own);
    println!("{}", report::table(&cases));
    let mut lines = report::ratio_lines("clone", &cases);
    for (mode, fetched) in modes.iter().zip(&fetched) {
        let value = median(fetched);
        let verdict = if value <= FETCHED_MAX { "met" } else { "missed" };
        lines.push(format!(
            "VALUE name=clone/fetched-{mode} value={value:.3} at-most={FETCHED_MAX:.2} unit=bytes-per-byte {verdict}"
        ));
    }
    for line in &lines {
        println!("{line}");
    }
    if !dry_run && effort.case.is_none() {
        report::write("clone", "Clones through the read cache", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

fn number(value: &Value, name: &str) -> Result<f64> {
    value[name].as_f64().with_context(|| format!("no {name} in {value}"))
}

/// One run of a measuring program: the JSON of its last line.
fn measure(program: &str, numbers: [u64; 2], arguments: &[String]) -> Result<Value> {
    let path: PathBuf = shell::target().join("release").join(program);
    let mut command = shell::command(path);
    command.args(numbers.map(|number| number.to_string())).args(arguments);
    let text = shell::output(&mut command)?;
    let line =
        text.lines().rev().find(|line| line.starts_with('{')).with_context(|| format!("{program} prints no JSON"))?;
    Ok(serde_json::from_str(line)?)
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. {CLONES} clones of one parent of {PARENT_MIB} MiB, in a pool in memory whose reads take 2 ms, in one process \
         and on one core. Each clone reads all of the parent once, 16 KiB at a time and one read after the other, and each \
         begins at another place. All of them have the exclusive lock, so that their object maps say that they have no objects \
         of their own. `memory`: the cache holds all of the parent in memory. `disk`: a quarter of it in memory, \
         all of it in a file with O_DIRECT, empty at first. {} rounds, interleaved; medians (lowest and highest in \
         parentheses). VALUE lines: bytes read from the pool for each byte of the parent.\n\n`{OWN}`: an image of {OWN_MIB} \
         MiB in the same pool, read {OWN_READS} times, 16 KiB at a time and four at once: nine of ten in a hot set of an eighth of \
         the image. One request in 20 is followed by a write to the hot set. The cache is empty at first, and holds a quarter of \
         the image in memory.\n\nRepeat it: `cargo xtask bench clone`.",
        report::machine(),
        effort.rounds
    )
}
