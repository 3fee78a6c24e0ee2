//! The messenger against what the machine gives: a bare loop on io_uring of the same shape, and plain epoll sockets.
//!
//! One processor a side where there are two.  Server and client are processes of their own for every measurement.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::daemon;
use crate::shell::{self, Process, Scratch};

/// Requests under way, as in the talk whose table this is.
const DEPTH: usize = 50;
const SIZES: [(&str, usize); 3] = [("0", 0), ("4k", 4096), ("64k", 65_536)];

/// Who answers and who asks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Who {
    /// Ours, with these flags.
    Ours(&'static str),
    /// `messenger-peer`, of this kind.
    Peer(&'static str),
}

const SIDES: [Who; 5] =
    [Who::Ours("--crc"), Who::Ours("--no-crc"), Who::Ours("--secure"), Who::Peer("bare"), Who::Peer("epoll")];

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    shell::run(shell::cargo().args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "forebay-messenger",
        "--example",
        "messenger-peer",
    ]))?;
    let scratch = Scratch::new("bench-messenger")?;
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let mut values: Vec<(String, usize, Vec<Vec<f64>>)> = Vec::new();
    for transport in ["tcp", "unix"] {
        for (name, size) in SIZES {
            let name = format!("{transport}-{name}");
            if wanted(&name) {
                values.push((name, size, vec![Vec::new(); SIDES.len()]));
            }
        }
    }
    let mut alone: Vec<(&str, Vec<&str>, Vec<f64>)> = [
        ("loopback-one-way-4k", vec!["--addr", "loopback:", "--one-way", "--size", "4096", "--depth", "64"]),
        ("loopback-request-4k", vec!["--addr", "loopback:", "--size", "4096", "--depth", "50"]),
    ]
    .into_iter()
    .filter(|(name, _)| wanted(name))
    .map(|(name, words)| (name, words, Vec::new()))
    .collect();
    let mut cpu: Vec<(String, Vec<f64>)> = Vec::new();
    for round in 0..effort.rounds {
        for (name, size, series) in &mut values {
            for place in 0..SIDES.len() {
                let which = (place + round) % SIDES.len();
                let who = SIDES[which];
                if name.starts_with("unix") && who == Who::Peer("epoll") {
                    continue;
                }
                let found = pair(who, scratch.path(), name.starts_with("unix"), *size, effort.seconds)?;
                series[which].push(found["messages_per_s"].as_f64().context("no figure")?);
                if who == Who::Ours("--crc") {
                    let used = found["client_cpu_us"].as_f64().zip(found["server_cpu_us"].as_f64());
                    let (client, server) = used.context("no processor time")?;
                    match cpu.iter_mut().find(|(other, _)| other == name) {
                        Some((_, values)) => values.push((client + server) / 2.0),
                        None => cpu.push((name.clone(), vec![(client + server) / 2.0])),
                    }
                }
            }
        }
        for (_, words, values) in &mut alone {
            let mut command = ours("run", words);
            command.args(["--seconds", &effort.seconds.to_string(), "--format", "json"]);
            let found: Value = serde_json::from_str(shell::output(&mut command)?.trim())?;
            values.push(found["messages_per_s"].as_f64().context("no figure")?);
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let mut cases = Vec::new();
    for (name, size, series) in &values {
        let of = |which: usize, side: Side| {
            let name = if side == Side::Ours { "forebay" } else { "peer" };
            Series { name: name.into(), side, values: series[which].clone() }
        };
        let mut case = |suffix: &str, ours: usize, peer: usize, goal: f64| {
            if !series[ours].is_empty() && !series[peer].is_empty() {
                let series = vec![of(ours, Side::Ours), of(peer, Side::Peer)];
                cases.push(Case { name: format!("{name}-{suffix}"), unit: "messages/s", goal, series });
            }
        };
        case("crc-vs-bare-uring", 0, 3, 0.9);
        case("no-crc-vs-bare-uring", 1, 3, 0.9);
        case("crc-vs-epoll", 0, 4, 1.5);
        case("secure-vs-crc", 2, 0, if *size >= 65_536 { 0.6 } else { 0.0 });
    }
    println!("{}", report::table(&cases));
    let mut lines = report::ratio_lines("messenger", &cases);
    for (name, _, values) in &alone {
        let value = super::median(values);
        let goal = if *name == "loopback-one-way-4k" { 10e6 } else { 0.0 };
        let verdict = if value >= goal { "met" } else { "missed" };
        lines
            .push(format!("VALUE name=messenger/{name} value={value:.0} at-least={goal:.0} unit=messages/s {verdict}"));
    }
    for (name, values) in &cpu {
        let value = super::median(values);
        lines.push(format!("VALUE name=messenger/{name}-crc-cpu value={value:.2} unit=us-a-message-and-side"));
    }
    for line in &lines {
        println!("{line}");
    }
    if !dry_run && effort.case.is_none() {
        report::write("messenger", "The messenger and the bare machine", &method(effort), &cases, &lines)?;
    }
    Ok(())
}

/// A process on a processor of its own, where there are two.
fn pinned(cpu: usize, program: &Path) -> Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        return shell::command(program);
    }
    let mut command = shell::command("taskset");
    command.args(["-c", &cpu.to_string()]).arg(program);
    command
}

fn ours(what: &str, words: &[&str]) -> Command {
    let mut command = pinned(usize::from(what == "run"), &daemon::program());
    command.args(["perf", "messenger", what]).args(words);
    command
}

/// One measurement: a server and a client.
fn pair(who: Who, scratch: &Path, unix: bool, size: usize, seconds: f64) -> Result<Value> {
    let address = if unix {
        format!("unix:{}", scratch.join("socket").display())
    } else {
        format!("127.0.0.1:{}", shell::free_port()?)
    };
    let (size, seconds) = (size.to_string(), seconds.to_string());
    let depth = DEPTH.to_string();
    let peer: PathBuf = shell::target().join("release/examples/messenger-peer");
    let (mut server, mut client) = match who {
        Who::Ours(flag) => {
            let server = ours("serve", &["--addr", &address, flag]);
            let words: [&str; 9] =
                ["--addr", &address, flag, "--size", &size, "--depth", &depth, "--seconds", &seconds];
            let mut client = ours("run", &words);
            client.args(["--format", "json"]);
            (server, client)
        }
        Who::Peer(kind) => {
            let mut server = pinned(0, &peer);
            server.args([&format!("{kind}-serve"), &address, &size]);
            let mut client = pinned(1, &peer);
            client.args([&format!("{kind}-run"), &address, &size, &depth, &seconds]);
            (server, client)
        }
    };
    let log = scratch.join("server.log");
    // The log of the one before would be taken for this one's.
    let _ = std::fs::remove_file(&log);
    let process = Process::start(&mut server, &log)?;
    // It prints its address when it listens.
    let up = || std::fs::read_to_string(&log).ok().filter(|text| text.contains('\n'));
    shell::wait_for(Duration::from_secs(10), up).with_context(|| format!("no server: {}", shell::tail(&log, 5)))?;
    let text = shell::output(&mut client)?;
    process.kill()?;
    let line = text.lines().rev().find(|line| line.starts_with('{')).context("the client prints no JSON")?;
    Ok(serde_json::from_str(line)?)
}

fn method(effort: &Effort) -> String {
    format!(
        "{}. One server and one client process for every measurement, each on a processor of its own, over one connection \
         with {DEPTH} requests under way; {} rounds of {} s, the order turned each round; medians (lowest and highest in \
         parentheses). A request carries 0, 4 KiB or 64 KiB and is answered with an empty message; Forebay's messages are \
         ordered, acknowledged, framed as msgr2.1, and can be replayed. The *bare io_uring loop* sends as many requests as \
         it may with one send, receives into 256 KiB and answers all whole requests with one send: 16 bytes a request more, \
         16 an answer, no framing, no checksums, no sessions. *plain epoll* makes a system call for each request and each \
         answer. All with the same kernel, over 127.0.0.1 or a Unix socket. Loopback hands messages over within one \
         process; there is no peer. Processor time is the mean of both sides, user and system.\n\nRepeat it: \
         `cargo xtask bench messenger`.",
        report::machine(),
        effort.rounds,
        effort.seconds
    )
}
