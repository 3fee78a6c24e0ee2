//! Longest wait of a host's reads while other images are worked on, beside a run in which the same command line only asks
//! for the daemon's status.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Effort, median};
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

/// A host that asks for one block after another.
const HOST: Job = Job { name: "host", pattern: "randread", block_size: 4096, depth: 1, flush_each: 0 };
/// Images of 10 GiB beside those that are worked on.
const IMAGES: u64 = 1000;
/// Goal: growth of the longest wait.
const STALL_MAX: Duration = Duration::from_millis(5);

/// Work on other images, repeated during the run.
struct Work {
    name: &'static str,
    /// Commands before each of those that are measured.
    before: &'static [&'static [&'static str]],
    command: &'static [&'static str],
    /// Set for work done once in a run.  What comes before it is durable when the host begins: that costs the host more
    /// than the work.
    once: bool,
}

const WORK: &[Work] = &[
    Work { name: "du-1000-images", before: &[], command: &["du"], once: false },
    Work { name: "ls-1000-images", before: &[], command: &["ls", "-l"], once: false },
    Work { name: "du-empty-4t", before: &[], command: &["du", "local/empty"], once: false },
    Work {
        name: "rm-empty-4t",
        before: &[&["create", "local/gone", "--size", "4T"]],
        command: &["rm", "local/gone", "--no-progress"],
        once: false,
    },
    Work {
        name: "shrink-64t",
        before: &[&["resize", "local/wide", "--size", "64T"]],
        command: &["resize", "local/wide", "--size", "1G", "--allow-shrink", "--no-progress"],
        once: false,
    },
    Work {
        name: "rm-2g",
        before: &[&["import", "FILE", "local/full"]],
        command: &["rm", "local/full", "--no-progress"],
        once: true,
    },
];

/// Asks for nothing that takes time: what the command line itself costs.
const STATUS: Work = Work { name: "status", before: &[], command: &["status"], once: false };

/// One run: the longest wait, how often the work was done, and how long the longest took.
struct Run {
    longest: f64,
    times: u64,
    work: f64,
}

/// Measures and prints.
pub fn run(effort: &Effort) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let file = scratch.path().join("file");
    shell::run(shell::command("dd").args(["if=/dev/urandom", "bs=1M", "count=2048", "status=none"]).arg({
        let mut of = std::ffi::OsString::from("of=");
        of.push(&file);
        of
    }))?;
    let daemon = Daemon::start(&scratch.path().join("store"), &["--store-size", "16G"])?;
    let host = fio::nbd(&daemon.volume("local/host", "1G")?);
    fio::measure(&Job { name: "fill", pattern: "write", block_size: 1 << 20, ..HOST }, &host, 3.0)?;
    for image in 0..IMAGES {
        shell::output(daemon.command().args(["create", &format!("local/image{image}"), "--size", "10G"]))?;
    }
    shell::output(daemon.command().args(["create", "local/empty", "--size", "4T"]))?;
    shell::output(daemon.command().args(["create", "local/wide", "--size", "1G"]))?;
    println!("{:<16} {:>12} {:>12} {:>8} {:>12}", "meanwhile", "longest wait", "with status", "times", "longest work");
    for work in WORK.iter().filter(|work| effort.case.as_ref().is_none_or(|part| work.name.contains(part.as_str()))) {
        let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
        for round in 0..effort.rounds {
            for place in 0..2 {
                let which = (place + round) % 2;
                let work = if which == 0 { work } else { &STATUS };
                runs[which].push(measure(&daemon, &host, work, &file, effort.seconds)?);
            }
        }
        let middle = |which: usize| median(&runs[which].iter().map(|run| run.longest).collect::<Vec<_>>());
        let (ours, peer) = (middle(0), middle(1));
        let (times, longest) =
            runs[0].iter().fold((0, 0.0_f64), |(times, longest), run| (times + run.times, longest.max(run.work)));
        println!("{:<16} {:>9.2} ms {:>9.2} ms {times:>8} {longest:>10.3} s", work.name, ours * 1e3, peer * 1e3);
        println!(
            "RATIO name=stalls/{} ours={:.2} peer={:.2} ratio={:.2} unit=ms against=status goal=+{}ms{}",
            work.name,
            ours * 1e3,
            peer * 1e3,
            ours / peer,
            STALL_MAX.as_millis(),
            if ours > peer + STALL_MAX.as_secs_f64() { " MISSED" } else { "" }
        );
    }
    daemon.stop()
}

fn measure(daemon: &Daemon, host: &[String], work: &Work, file: &std::path::Path, seconds: f64) -> Result<Run> {
    let command = |words: &[&str]| {
        let file = file.display().to_string();
        let words = words.iter().map(|&word| if word == "FILE" { file.clone() } else { word.to_owned() });
        shell::output(daemon.command().args(words)).map(drop)
    };
    let (times, longest) = (AtomicU64::new(0), AtomicU64::new(0));
    let prepare = || work.before.iter().try_for_each(|words| command(words));
    if work.once {
        prepare()?;
        shell::run(&mut shell::command("sync"))?;
    }
    let starts = Instant::now() + Duration::from_secs_f64(seconds / 2.0);
    let ends = Instant::now() + Duration::from_secs_f64(seconds + 1.0);
    let outcome = std::thread::scope(|scope| {
        let working = scope.spawn(|| -> Result<()> {
            while Instant::now() < ends {
                if work.once {
                    std::thread::sleep(starts.saturating_duration_since(Instant::now()));
                } else {
                    prepare()?;
                }
                let began = Instant::now();
                command(work.command)?;
                longest.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                times.fetch_add(1, Ordering::Relaxed);
                if work.once {
                    break;
                }
            }
            Ok(())
        });
        let outcome = fio::measure(&HOST, host, seconds);
        working.join().expect("the work's thread does not panic")?;
        outcome
    })?;
    let (longest_wait, _) = outcome.bins.last().context("fio reports no latencies")?;
    Ok(Run {
        longest: *longest_wait as f64 / 1e9,
        times: times.load(Ordering::Relaxed),
        work: longest.load(Ordering::Relaxed) as f64 / 1e6,
    })
}
