//! Snapshots of a volume under writes: how long one takes, and what the writers notice.

use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Effort, median};
use crate::daemon::{self, Daemon};
use crate::fio::{self, Job};
use crate::shell::{self, Scratch};

/// Goal: time of a snapshot.
const TIME_GOAL: Duration = Duration::from_millis(5);
/// Goal: latency of the writers with snapshots, divided by that without.
const WRITERS_GOAL: f64 = 2.0;
/// Time from one snapshot to the next.
const EVERY: Duration = Duration::from_millis(500);
/// Writers at full speed.
const WRITERS: Job = Job { name: "writers", pattern: "randwrite", block_size: 4096, depth: 32, flush_each: 0 };

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "bench")?;
    let daemon = Daemon::start(&scratch.path().join("store"), &["--store-size", "8G"])?;
    let uri = daemon.volume("local/vm", "1G")?;
    let target = [fio::nbd(&uri), vec!["--size=1G".into()]].concat();
    fio::measure(&Job { name: "fill", pattern: "write", block_size: 1 << 20, depth: 8, flush_each: 0 }, &target, 5.0)?;
    let [mut without, mut with] = [const { Vec::new() }; 2];
    let mut times: Vec<Duration> = Vec::new();
    for round in 0..effort.rounds {
        // Interleaved, and each on an image without snapshots; what the last ones shared is freed meanwhile.
        without.push(fio::measure(&WRITERS, &target, effort.seconds)?);
        let over = AtomicBool::new(false);
        let (measured, taken) = std::thread::scope(|scope| {
            let taking = scope.spawn(|| take(&daemon.control(), round, &over));
            let measured = fio::measure(&WRITERS, &target, effort.seconds);
            over.store(true, Ordering::Relaxed);
            (measured, taking.join().expect("the snapshots"))
        });
        with.push(measured?);
        times.extend(taken?);
        shell::output(daemon.command().args(["snap", "purge", "local/vm", "--no-progress"]))?;
        println!("round {} of {}", round + 1, effort.rounds);
    }
    daemon.stop()?;
    let milliseconds: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    let (middle, slowest) = (median(&milliseconds), milliseconds.iter().copied().fold(0.0, f64::max));
    let p99 =
        |runs: &[fio::Outcome]| median(&runs.iter().map(|run| run.latency_ns[1] as f64 / 1e3).collect::<Vec<_>>());
    let iops = |runs: &[fio::Outcome]| median(&runs.iter().map(|run| run.iops).collect::<Vec<_>>());
    let (before, beside) = (p99(&without), p99(&with));
    let goal = TIME_GOAL.as_secs_f64() * 1e3;
    let missed = |is_missed: bool| if is_missed { " MISSED" } else { "" };
    let lines = [
        format!(
            "RATIO name=snapshot/create ours={middle:.2} peer={goal} ratio={:.3} unit=ms against=goal{}",
            middle / goal,
            missed(middle > goal)
        ),
        format!(
            "RATIO name=snapshot/writers-p99 ours={beside:.0} peer={before:.0} ratio={:.2} unit=us against=without-snapshots goal={WRITERS_GOAL}{}",
            beside / before,
            missed(beside / before > WRITERS_GOAL)
        ),
        format!(
            "RATIO name=snapshot/writers-iops ours={:.0} peer={:.0} ratio={:.3} unit=IOPS against=without-snapshots",
            iops(&with),
            iops(&without),
            iops(&with) / iops(&without)
        ),
    ];
    let text = format!(
        "{} snapshots of a volume of 1 GiB, one each {} ms, while {} random writes of 4 KiB are in flight: {middle:.2} ms in \
         the median, {slowest:.2} ms the slowest, request and response on the control socket included. The 99th percentile \
         of the writers is {beside:.0} us, and {before:.0} us without snapshots.\n",
        times.len(),
        EVERY.as_millis(),
        WRITERS.depth,
    );
    print!("{text}");
    lines.iter().for_each(|line| println!("{line}"));
    if dry_run {
        return Ok(());
    }
    let path = shell::root().join("docs/benchmarks/snapshot.md");
    let method = format!(
        "Medians of {} rounds of {} s, with fio over NBD to one daemon with one core and the embedded store, on a shared \
         machine. `cargo xtask bench snapshot` measures it again.",
        effort.rounds, effort.seconds
    );
    let page = format!("# Snapshots under writes\n\n{method}\n\n{text}\n```text\n{}\n```\n", lines.join("\n"));
    std::fs::write(&path, page).with_context(|| format!("writing {}", path.display()))
}

/// Takes snapshots until it is over; returns the time of each.
fn take(control: &Path, round: usize, over: &AtomicBool) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(EVERY);
        let began = Instant::now();
        create(control, &format!("r{round}-{}", times.len()))?;
        times.push(began.elapsed());
    }
    Ok(times)
}

fn create(control: &Path, name: &str) -> Result<()> {
    let body = format!("{{\"name\":\"{name}\"}}");
    let mut socket = UnixStream::connect(control).context("the control socket")?;
    write!(
        socket,
        "POST /v1/images/local/vm/snapshots HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut response = String::new();
    socket.read_to_string(&mut response)?;
    if !response.starts_with("HTTP/1.1 200") {
        bail!("a snapshot: {response}");
    }
    Ok(())
}
