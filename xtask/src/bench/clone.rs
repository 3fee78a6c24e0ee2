//! Clones of one parent through the read cache, against the same clones without one.

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

/// Layers of the cache that are measured.
const MODES: [&str; 2] = ["memory", "disk"];

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-rbd-lab", "--bin", "clone-load"]))?;
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
    let mut fetched = vec![Vec::new(); modes.len()];
    for round in 0..effort.rounds {
        let measure_peer = || measure(&["none".into()]);
        let mut peer = if round % 2 == 0 { Some(measure_peer()?) } else { None };
        for ((case, fetched), mode) in cases.iter_mut().zip(&mut fetched).zip(&modes) {
            let mut arguments = vec![(*mode).to_owned()];
            if *mode == "disk" {
                let file = scratch.path().join(format!("cache-{round}"));
                arguments.push(file.display().to_string());
            }
            let ours = measure(&arguments)?;
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

/// One run of the measuring program: the JSON of its last line.
fn measure(arguments: &[String]) -> Result<Value> {
    let program: PathBuf = shell::target().join("release/clone-load");
    let mut command = shell::command(program);
    command.args([PARENT_MIB.to_string(), CLONES.to_string()]).args(arguments);
    let text = shell::output(&mut command)?;
    let line = text.lines().rev().find(|line| line.starts_with('{')).context("clone-load prints no JSON")?;
    Ok(serde_json::from_str(line)?)
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. {CLONES} clones of one parent of {PARENT_MIB} MiB, in a pool in memory whose reads take 2 ms, in one process \
         and on one core. Each clone reads all of the parent once, 16 KiB at a time and one read after the other, and each \
         begins at another place. All of them have the exclusive lock, so that their object maps say that they have no objects \
         of their own. `memory`: the cache holds all of the parent in memory. `disk`: a quarter of it in memory, \
         all of it in a file with O_DIRECT, empty at first. {} rounds, interleaved; medians (lowest and highest in \
         parentheses). VALUE lines: bytes read from the pool for each byte of the parent.\n\nRepeat it: \
         `cargo xtask bench clone`.",
        report::machine(),
        effort.rounds
    )
}
