//! The messenger against what the machine gives: a bare loop on io_uring of the same shape, plain epoll sockets, bare
//! rings in shared memory.
//!
//! One processor a side where there are two.  Server and client are processes of their own for every measurement.

use std::cell::Cell;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::daemon;
use crate::shell::{self, Process, Scratch};

/// Requests in flight, as in the published measurements that this table repeats.
const DEPTH: usize = 50;
const SIZES: [(&str, usize); 3] = [("0", 0), ("4k", 4096), ("64k", 65_536)];
/// A measurement takes this part of `--seconds`: there are many, and each has a process of its own at either end.
const SHARE: f64 = 1.0 / 3.0;
/// Goal: cost of a message in loopback, one way.
const LOOPBACK_GOAL: f64 = 10e6;

/// Line of the table: the peers that exchange messages, and the transport.
struct Line {
    name: &'static str,
    transport: Transport,
    who: Who,
}

/// Transport between the two ends.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Transport {
    /// TCP over loopback, with checksums.
    Tcp,
    /// Rings in shared memory.
    Shm,
    /// Within one process.
    Loopback,
}

#[derive(Clone, Copy)]
enum Who {
    /// Flags of `perf messenger`.
    Ours(&'static [&'static str]),
    /// The kind of `messenger-peer`, and for how many microseconds it polls before it sleeps.
    Peer(&'static str, &'static str),
    Iperf,
}

const LINES: [Line; 11] = [
    Line { name: "tcp, crc", transport: Transport::Tcp, who: Who::Ours(&["--crc"]) },
    Line { name: "tcp, no crc", transport: Transport::Tcp, who: Who::Ours(&["--no-crc"]) },
    Line { name: "tcp, secure", transport: Transport::Tcp, who: Who::Ours(&["--secure"]) },
    Line { name: "bare io_uring loop, tcp", transport: Transport::Tcp, who: Who::Peer("bare", "50") },
    Line { name: "bare io_uring loop, sleeping, tcp", transport: Transport::Tcp, who: Who::Peer("bare", "0") },
    Line { name: "plain epoll, tcp", transport: Transport::Tcp, who: Who::Peer("epoll", "0") },
    Line { name: "iperf3, tcp, one way", transport: Transport::Tcp, who: Who::Iperf },
    Line { name: "shm", transport: Transport::Shm, who: Who::Ours(&[]) },
    Line { name: "bare rings, shm", transport: Transport::Shm, who: Who::Peer("rings", "50") },
    Line { name: "loopback", transport: Transport::Loopback, who: Who::Ours(&[]) },
    Line { name: "loopback, one way", transport: Transport::Loopback, who: Who::Ours(&["--one-way"]) },
];

/// Round trips of 4 KiB, one at a time.
struct Trip {
    name: &'static str,
    who: Walker,
    /// Goal of the median, in microseconds.
    goal: Option<f64>,
}

#[derive(Clone, Copy)]
enum Walker {
    /// Flags of `perf messenger`.
    Ours(Transport, &'static [&'static str]),
    /// The provider of `fi_pingpong`.
    Fi(&'static str),
    /// Means by which two threads wake each other.
    Wakes(&'static str),
}

const TRIPS: [Trip; 9] = [
    Trip { name: "shm-4k-polling", who: Walker::Ours(Transport::Shm, &["--linger-us", "1000"]), goal: Some(2.0) },
    Trip { name: "shm-4k-asleep", who: Walker::Ours(Transport::Shm, &["--linger-us", "0"]), goal: Some(15.0) },
    Trip { name: "shm-4k-now-and-then", who: Walker::Ours(Transport::Shm, &["--every-us", "1000"]), goal: Some(15.0) },
    Trip { name: "tcp-4k", who: Walker::Ours(Transport::Tcp, &["--crc"]), goal: None },
    Trip { name: "fi-pingpong-shm-4k", who: Walker::Fi("shm"), goal: None },
    Trip { name: "fi-pingpong-tcp-4k", who: Walker::Fi("tcp;ofi_rxm"), goal: None },
    Trip { name: "wake-futex", who: Walker::Wakes("futex"), goal: None },
    Trip { name: "wake-eventfd", who: Walker::Wakes("eventfd"), goal: None },
    Trip { name: "wake-socket", who: Walker::Wakes("socket"), goal: None },
];
/// Trips that `fi_pingpong` makes in a measurement.
const FI_TRIPS: usize = 5000;

/// Measurements of one line at one size: a value a round.
#[derive(Default)]
struct Found {
    messages: Vec<f64>,
    latency: Vec<f64>,
    client_cpu: Vec<f64>,
    server_cpu: Vec<f64>,
}

struct Setting<'a> {
    scratch: &'a Path,
    seconds: f64,
    sockets: Cell<u32>,
}

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let peer = ["-p", "forebay-messenger", "--example", "messenger-peer"];
    shell::run(&mut daemon::build_beside_command(&peer))?;
    let scratch = Scratch::new("bench-messenger")?;
    let setting = Setting { scratch: scratch.path(), seconds: effort.seconds * SHARE, sockets: Cell::new(0) };
    let wanted = |name: &str| effort.case.as_ref().is_none_or(|part| name.contains(part.as_str()));
    // Its help counts as a failure; fi_info comes in the same package.
    let has_fi = shell::output(shell::command("fi_info").arg("--version")).is_ok();
    let has_iperf = shell::output(shell::command("iperf3").arg("--version")).is_ok();
    let mut found: Vec<[Found; SIZES.len()]> = LINES.iter().map(|_| Default::default()).collect();
    let mut trips: Vec<Vec<f64>> = TRIPS.iter().map(|_| Vec::new()).collect();
    for round in 0..effort.rounds {
        for (at, (name, size)) in SIZES.into_iter().enumerate() {
            for place in 0..LINES.len() {
                let which = (place + round) % LINES.len();
                let line = &LINES[which];
                let skipped = matches!(line.who, Who::Iperf) && (!has_iperf || size == 0);
                if skipped || !wanted(&format!("{}-{name}", line.name)) {
                    continue;
                }
                setting.measure(line, size, &mut found[which][at]).with_context(|| format!("{}, {name}", line.name))?;
            }
        }
        for (trip, values) in TRIPS.iter().zip(&mut trips) {
            let skipped = matches!(trip.who, Walker::Fi(_)) && !has_fi;
            if !skipped && wanted(trip.name) {
                values.push(setting.trip(trip.who).with_context(|| trip.name)?);
            }
        }
        println!("round {} of {}", round + 1, effort.rounds);
    }
    let mut cases = cases(&found);
    cases.extend(trip_cases(&trips));
    println!("{}", report::table(&cases));
    let table = talk(&found);
    println!("{table}");
    let mut lines = report::ratio_lines("messenger", &cases);
    lines.extend(value_lines(&found, &trips));
    for line in &lines {
        println!("{line}");
    }
    if !dry_run && effort.case.is_none() {
        let text = method(effort) + "\n\n" + &table;
        report::write("messenger", "The messenger and the bare machine", &text, &cases, &lines)?;
    }
    Ok(())
}

/// Measures round trips of the messenger between two processes: 4 KiB there, an empty answer.  Returns the median in
/// microseconds.
pub(super) fn round_trip(scratch: &Path, transport: Transport, linger_us: &'static str, seconds: f64) -> Result<f64> {
    let setting = Setting { scratch, seconds, sockets: Cell::new(0) };
    let value = setting.ours(transport, &["--linger-us", linger_us], 4096, 1)?;
    value["latency_us_p50"].as_f64().context("no latency")
}

fn line_called(name: &str) -> usize {
    LINES.iter().position(|line| line.name == name).expect("one of the lines")
}

/// Returns the comparisons, with their goals.
fn cases(found: &[[Found; SIZES.len()]]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (at, (size, _)) in SIZES.into_iter().enumerate() {
        let goal = |zero: f64, four: f64, sixty_four: f64| [zero, four, sixty_four][at];
        for (name, ours, peer_name, goal) in [
            ("tcp-crc-vs-bare-uring", "tcp, crc", "bare io_uring loop, tcp", goal(0.0, 0.9, 0.9)),
            ("tcp-no-crc-vs-bare-uring", "tcp, no crc", "bare io_uring loop, tcp", goal(0.0, 0.0, 0.0)),
            ("tcp-crc-vs-epoll", "tcp, crc", "plain epoll, tcp", goal(0.0, 1.5, 0.0)),
            ("tcp-secure-vs-crc", "tcp, secure", "tcp, crc", goal(0.0, 0.0, 0.6)),
            ("shm-vs-bare-rings", "shm", "bare rings, shm", 0.0),
        ] {
            let of = |line: &str| found[line_called(line)][at].messages.clone();
            let (ours, mut peer) = (of(ours), of(peer_name));
            if peer_name.starts_with("bare io_uring") {
                // Polling makes it faster or slower, from one moment to the next; it is held to its better self.
                let sleeping = of("bare io_uring loop, sleeping, tcp");
                if super::median(&sleeping) > super::median(&peer) {
                    peer = sleeping;
                }
            }
            if !ours.is_empty() && !peer.is_empty() {
                let ours = Series { name: "forebay".into(), side: Side::Ours, values: ours };
                let series = vec![ours, Series { name: "peer".into(), side: Side::Peer, values: peer }];
                cases.push(Case { name: format!("{name}-{size}"), unit: "messages/s", goal, series });
            }
        }
    }
    cases
}

/// Ratio of round trips per second, ours to libfabric's.
fn trip_cases(trips: &[Vec<f64>]) -> Vec<Case> {
    let of = |name: &str| {
        let at = TRIPS.iter().position(|trip| trip.name == name).expect("one of the trips");
        trips[at].iter().map(|micros| 1e6 / micros).collect::<Vec<_>>()
    };
    let pairs = [("shm-4k-polling", "fi-pingpong-shm-4k"), ("tcp-4k", "fi-pingpong-tcp-4k")];
    let measured = pairs.into_iter().map(|(ours, peer)| (ours, of(ours), of(peer)));
    measured
        .filter(|(_, ours, peer)| !ours.is_empty() && !peer.is_empty())
        .map(|(name, ours, peer)| {
            let ours = Series { name: "forebay".into(), side: Side::Ours, values: ours };
            let series = vec![ours, Series { name: "peer".into(), side: Side::Peer, values: peer }];
            Case { name: format!("{name}-vs-fi-pingpong"), unit: "trips/s", goal: 0.0, series }
        })
        .collect()
}

/// Table of message rate, bandwidth and latency.
fn talk(found: &[[Found; SIZES.len()]]) -> String {
    let mut text = String::from("| |");
    for (_, size) in SIZES {
        let _ = write!(text, " {size} bytes |");
    }
    text.push_str("\n|---|---|---|---|\n");
    for (line, sizes) in LINES.iter().zip(found) {
        if sizes.iter().all(|found| found.messages.is_empty()) {
            continue;
        }
        let _ = write!(text, "| {} |", line.name);
        for (found, (_, size)) in sizes.iter().zip(SIZES) {
            if found.messages.is_empty() {
                text.push_str(" |");
                continue;
            }
            let messages = super::median(&found.messages);
            let _ = write!(text, " {:.0} k/s", messages / 1e3);
            if size > 0 {
                let _ = write!(text, ", {:.2} GB/s", messages * size as f64 / 1e9);
            }
            let latency = super::median(&found.latency);
            if latency > 0.0 {
                let _ = write!(text, ", {latency:.0} us");
            }
            text.push_str(" |");
        }
        text.push('\n');
    }
    text
}

fn value_lines(found: &[[Found; SIZES.len()]], trips: &[Vec<f64>]) -> Vec<String> {
    let mut lines = Vec::new();
    let verdict = |met: bool| if met { "met" } else { "missed" };
    let one_way = &found[line_called("loopback, one way")];
    for ((size, _), found) in SIZES.iter().zip(one_way).filter(|(_, found)| !found.messages.is_empty()) {
        let value = super::median(&found.messages);
        let met = verdict(value >= LOOPBACK_GOAL);
        lines.push(format!(
            "VALUE name=messenger/loopback-one-way-{size} value={value:.0} at-least={LOOPBACK_GOAL:.0} unit=messages/s {met}"
        ));
    }
    for (trip, values) in TRIPS.iter().zip(trips).filter(|(_, values)| !values.is_empty()) {
        let (name, value) = (trip.name, super::median(values));
        lines.push(match trip.goal {
            Some(goal) => {
                let met = verdict(value <= goal);
                format!("VALUE name=messenger/{name} value={value:.1} at-most={goal:.0} unit=us {met}")
            }
            None => format!("VALUE name=messenger/{name} value={value:.1} unit=us"),
        });
    }
    for line in ["tcp, crc", "tcp, no crc", "tcp, secure", "shm"] {
        let sizes = SIZES.iter().zip(&found[line_called(line)]).filter(|(_, found)| !found.client_cpu.is_empty());
        for ((size, _), found) in sizes {
            let name = line.replace(", ", "-").replace(' ', "-");
            let (client, server) = (super::median(&found.client_cpu), super::median(&found.server_cpu));
            lines.push(format!(
                "VALUE name=messenger/cpu-{name}-{size} client={client:.2} server={server:.2} unit=us-a-message"
            ));
        }
    }
    lines
}

impl Setting<'_> {
    fn measure(&self, line: &Line, size: usize, found: &mut Found) -> Result<()> {
        let value = match line.who {
            Who::Ours(flags) => self.ours(line.transport, flags, size, DEPTH)?,
            Who::Peer(kind, linger) => self.peer(line.transport, (kind, linger), size)?,
            Who::Iperf => self.iperf(size)?,
        };
        found.messages.push(value["messages_per_s"].as_f64().context("no figure")?);
        found.latency.push(value["latency_us_p50"].as_f64().unwrap_or(0.0));
        if let Some((client, server)) = value["client_cpu_us"].as_f64().zip(value["server_cpu_us"].as_f64()) {
            found.client_cpu.push(client);
            found.server_cpu.push(server);
        }
        Ok(())
    }

    fn address(&self, transport: Transport) -> Result<String> {
        // A new one each time: a ring of a process that was killed holds its listener a moment longer than the process.
        let number = self.sockets.replace(self.sockets.get() + 1);
        let path = self.scratch.join(format!("socket-{number}")).display().to_string();
        Ok(match transport {
            Transport::Tcp => format!("127.0.0.1:{}", shell::free_port()?),
            Transport::Shm => format!("shm:{path}"),
            Transport::Loopback => "loopback:bench".into(),
        })
    }

    fn ours(&self, transport: Transport, flags: &[&str], size: usize, depth: usize) -> Result<Value> {
        let address = self.address(transport)?;
        let command = |what: &str, cpu: usize| {
            let mut command = pinned(cpu, &daemon::program());
            command.args(["perf", "messenger", what, "--addr", &address]);
            // Options of the client only come last.
            let asking = flags.iter().position(|flag| *flag == "--every-us").filter(|_| what == "serve");
            command.args(&flags[..asking.unwrap_or(flags.len())]);
            command
        };
        let mut client = command("run", 1);
        client.args(["--size", &size.to_string(), "--depth", &depth.to_string()]);
        client.args(["--seconds", &self.seconds.to_string(), "--format", "json"]);
        if transport == Transport::Loopback {
            return Ok(serde_json::from_str(shell::output(&mut client)?.trim())?);
        }
        self.pair(&mut command("serve", 0), &mut client)
    }

    fn peer(&self, transport: Transport, (kind, linger): (&str, &str), size: usize) -> Result<Value> {
        let address = self.address(transport)?;
        let address = address.strip_prefix("shm:").unwrap_or(&address);
        let program: PathBuf = shell::target().join("release/examples/messenger-peer");
        let (size, depth, seconds) = (size.to_string(), DEPTH.to_string(), self.seconds.to_string());
        let mut server = pinned(0, &program);
        server.args([&format!("{kind}-serve"), address, &size]).env("LINGER_US", linger);
        let mut client = pinned(1, &program);
        client.env("LINGER_US", linger);
        client.args([&format!("{kind}-run"), address, &size, &depth, &seconds]);
        self.pair(&mut server, &mut client)
    }

    /// Microseconds of a round trip.
    fn trip(&self, who: Walker) -> Result<f64> {
        let latency = |value: &Value| value["latency_us_p50"].as_f64().context("no latency");
        match who {
            Walker::Ours(transport, flags) => latency(&self.ours(transport, flags, 4096, 1)?),
            Walker::Wakes(kind) => {
                let program = shell::target().join("release/examples/messenger-peer");
                let seconds = self.seconds.to_string();
                let text = shell::output(shell::command(program).args(["wakes", kind, &seconds]))?;
                latency(&serde_json::from_str(text.trim())?)
            }
            Walker::Fi(provider) => self.fi_pingpong(provider),
        }
    }

    fn fi_pingpong(&self, provider: &str) -> Result<f64> {
        let port = shell::free_port()?.to_string();
        let trips = FI_TRIPS.to_string();
        let flags = ["-p", provider, "-e", "rdm", "-S", "4096", "-I", &trips];
        let mut server = pinned(0, Path::new("fi_pingpong"));
        server.args(flags).args(["-B", &port]);
        let mut client = pinned(1, Path::new("fi_pingpong"));
        client.args(flags).args(["-P", &port, "127.0.0.1"]);
        let log = self.scratch.join("fi.log");
        let process = Process::start(&mut server, &log)?;
        // It does not say when it listens, and takes the first that connects for its client.
        let up = shell::wait_for(Duration::from_secs(10), || listens(&port).then_some(()));
        up.with_context(|| format!("fi_pingpong does not listen: {}", shell::tail(&log, 5)))?;
        let text = shell::output(&mut client);
        process.kill()?;
        // bytes, sent, acknowledged, total, time, MB/s, microseconds a transfer, of which a trip is two, transfers/s.
        let text = text.with_context(|| format!("the server said: {}", shell::tail(&log, 5)))?;
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).context("fi_pingpong prints nothing")?;
        let one = line.split_whitespace().nth(6).and_then(|word| word.parse::<f64>().ok());
        Ok(2.0 * one.with_context(|| format!("no figure of fi_pingpong: {line}"))?)
    }

    /// One direction, as fast as it goes, in blocks of the size: what carries the data, with nothing to answer.
    fn iperf(&self, size: usize) -> Result<Value> {
        let port = shell::free_port()?.to_string();
        let mut server = pinned(0, Path::new("iperf3"));
        server.args(["-s", "-1", "-p", &port, "--forceflush"]);
        let mut client = pinned(1, Path::new("iperf3"));
        let seconds = (self.seconds.ceil() as u64).max(1).to_string();
        client.args(["-c", "127.0.0.1", "-p", &port, "-l", &size.to_string(), "-t", &seconds, "-J"]);
        let text = self.run(&mut server, &mut client)?;
        let value: Value = serde_json::from_str(&text)?;
        let bits = value["end"]["sum_received"]["bits_per_second"].as_f64().context("no figure of iperf3")?;
        Ok(serde_json::json!({ "messages_per_s": bits / 8.0 / size as f64 }))
    }

    fn pair(&self, server: &mut Command, client: &mut Command) -> Result<Value> {
        let text = self.run(server, client)?;
        let line = text.lines().rev().find(|line| line.starts_with('{')).context("the client prints no JSON")?;
        Ok(serde_json::from_str(line)?)
    }

    /// One measurement: a server, and what its client prints.
    fn run(&self, server: &mut Command, client: &mut Command) -> Result<String> {
        let log = self.scratch.join("server.log");
        // The log of the one before would be taken for this one's.
        let _ = std::fs::remove_file(&log);
        let process = Process::start(server, &log)?;
        // It says something when it listens.
        let up = || std::fs::read_to_string(&log).ok().filter(|text| text.contains('\n'));
        shell::wait_for(Duration::from_secs(10), up).with_context(|| format!("no server: {}", shell::tail(&log, 5)))?;
        let text = shell::output(client);
        process.kill()?;
        text.with_context(|| format!("the server said: {}", shell::tail(&log, 5)))
    }
}

/// Returns whether a process listens on a TCP port, from the kernel's tables.
fn listens(port: &str) -> bool {
    const LISTEN: &str = "0A";
    let Ok(port) = port.parse::<u16>() else { return false };
    let suffix = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&suffix)) && words.nth(1) == Some(LISTEN)
        })
    })
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

fn method(effort: &Effort) -> String {
    format!(
        "{}. One server and one client process for every measurement, each on a processor of its own, over one \
         connection with {DEPTH} requests in flight; {} rounds of {:.1} s, the order turned each round; medians \
         (lowest and highest in parentheses). A request carries 0, 4 KiB or 64 KiB and is answered with an empty \
         message; Forebay's messages are ordered, acknowledged, framed as msgr2.1, and can be replayed. Round trips \
         are one at a time, 4 KiB there and an empty answer: *polling* busy-polls the ring, *asleep* sleeps at once \
         when idle, *now and then* is one request a millisecond with the daemon's own setting (50 us of busy-polling \
         before it sleeps). Loopback hands messages over within one process on one core; there is no peer.\n\n\
         The *bare io_uring loop* is built on the same reactor, polls for as long before it sleeps (or not at all; the \
         better of the two is the peer), sends as many requests as it may with one send, receives into 256 KiB and \
         answers all whole requests with one send. It moves as many bytes as the messenger does in crc mode (90 more \
         than the payload there, 77 back), but has no frames, checksums or sessions, and does not access the bytes. \
         *plain epoll* makes a system call for each request and each answer. *bare rings* are the rings of the shm \
         transport, polled without a pause, the bytes copied in and out. *iperf3* sends one way. *fi_pingpong* is \
         libfabric's, with 4 KiB both ways. *wakes* are two threads, each on a processor of its own, that wake each \
         other in turn with nothing but a futex, an eventfd or a socket: the minimum cost of a round trip between two \
         sleeping threads here. All with the same kernel, over 127.0.0.1. Processor time is user and system, time \
         spent polling included.\n\n\
         Repeat it: `cargo xtask bench messenger` (`--rounds`, `--seconds` for more or less).",
        report::machine(),
        effort.rounds,
        effort.seconds * SHARE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_in_the_table() {
        let mut found: Vec<[Found; SIZES.len()]> = LINES.iter().map(|_| Default::default()).collect();
        for (line, rate) in [("tcp, crc", 9e5), ("bare io_uring loop, tcp", 1e6), ("plain epoll, tcp", 2e5)] {
            found[line_called(line)][1] = Found { messages: vec![rate], latency: vec![50.0], ..Found::default() };
        }
        let lines = report::ratio_lines("messenger", &cases(&found));
        assert_eq!(lines.len(), 2);
        assert!(
            lines[0].starts_with("RATIO name=messenger/tcp-crc-vs-bare-uring-4k ours=900000 peer=1000000 ratio=0.90")
        );
        assert!(talk(&found).contains("| tcp, crc | | 900 k/s, 3.69 GB/s, 50 us | |"));
        let mut trips: Vec<Vec<f64>> = TRIPS.iter().map(|_| Vec::new()).collect();
        (trips[0], trips[1], trips[4]) = (vec![1.9], vec![16.0], vec![3.8]);
        let values = value_lines(&found, &trips);
        assert!(values[0].ends_with("value=1.9 at-most=2 unit=us met") && values[1].ends_with("missed"));
        let lines = report::ratio_lines("messenger", &trip_cases(&trips));
        assert!(lines[0].starts_with("RATIO name=messenger/shm-4k-polling-vs-fi-pingpong") && lines.len() == 1);
        assert!(lines[0].contains("ratio=2.00"));
    }
}
