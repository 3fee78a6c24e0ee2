//! Very many volumes on one daemon: memory by volume, export and connection, what the last of them takes beside the
//! first, the start, the idle processor; beside tgt with as many targets as it takes in the time.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Effort, cpu_seconds, median, report};
use crate::daemon::{self, Daemon};
use crate::nbd::Client;
use crate::shell::{self, Process, Scratch};

/// Volumes, exports and connections, if nothing else is asked for.
const VOLUMES: u64 = 10_000;
/// Fronts over which volumes are exported after the restart, beside NBD, and how many at most: an NVMe subsystem has
/// ids for 8,192 namespaces.
const FURTHER_FRONTS: [(&str, u64); 2] = [("nvme", 8192), ("iscsi", 16_384)];
/// Targets that tgt gets: tgtadm is a process for each step.
const PEER_TARGETS: u64 = 1_000;
/// Operations at the beginning and at the end that are compared.
const COMPARED: usize = 100;
/// Time for which the idle daemon is watched.
const WATCHED: Duration = Duration::from_secs(5);

/// Time for the memory of closed connections to come back.
const GIVEN_BACK_AFTER: Duration = Duration::from_secs(20);

/// Most memory, in bytes, with all volumes, exports and connections.
const MEMORY_MAX: u64 = 512 << 20;
/// Longest start.
const START_MAX: Duration = Duration::from_secs(5);
/// Maximum CPU use of an idle daemon, in percent of a core.
const IDLE_MAX: f64 = 1.0;
/// Largest ratio of the last attach's time to the first one's.
const LAST_MAX: f64 = 1.5;
/// Largest scrape in bytes, and the longest, for each 1,000 volumes.
const SCRAPE_MAX: (u64, Duration) = (1_000_000, Duration::from_millis(50));

/// Measures, prints, and writes the page.
pub fn run(effort: &Effort, volumes: Option<u64>, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    allow_descriptors()?;
    let volumes = volumes.unwrap_or(VOLUMES);
    let folder = effort.dir.clone().unwrap_or_else(shell::target);
    let scratch = Scratch::within(&folder, "scale")?;
    let ours = measure(scratch.path(), volumes)?;
    let peer = measure_peer(scratch.path(), volumes.min(PEER_TARGETS))?;
    let lines = ours.lines(&peer);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run {
        let page = shell::root().join("docs/benchmarks/scale.md");
        std::fs::write(&page, ours.page(&peer, &lines)?)?;
        println!("written: {}", page.display());
    }
    Ok(())
}

/// Lets this process, and those it starts, have as many files open as it may give itself.
fn allow_descriptors() -> Result<()> {
    let id = std::process::id().to_string();
    let shown =
        shell::output(Command::new("prlimit").args(["--pid", &id, "--nofile", "--output=HARD", "--noheadings"]))?;
    shell::run(Command::new("prlimit").args(["--pid", &id, &format!("--nofile={0}:{0}", shown.trim())]))
}

/// Results of one run of the daemon.  Memory in bytes, times in seconds.
#[derive(Debug, Default)]
struct Ours {
    volumes: u64,
    memory_empty: u64,
    memory_volumes: u64,
    memory_exports: u64,
    memory_connections: u64,
    memory_closed: u64,
    memory_restarted: u64,
    create: [f64; 2],
    attach: [f64; 2],
    attach_longest: f64,
    /// Attach times over each further front: the first and the last.
    further: Vec<[f64; 2]>,
    start: f64,
    idle: f64,
    list: f64,
    scrape: f64,
    scrape_len: u64,
}

/// Results of one run of tgt.
struct Peer {
    targets: u64,
    memory_empty: u64,
    memory_targets: u64,
    attach: [f64; 2],
}

/// Medians of the first and of the last operations.
fn ends(times: &[f64]) -> [f64; 2] {
    let compared = COMPARED.min(times.len());
    [median(&times[..compared]), median(&times[times.len() - compared..])]
}

fn each(count: u64, mut work: impl FnMut(u64) -> Result<()>) -> Result<Vec<f64>> {
    (0..count)
        .map(|number| {
            let began = Instant::now();
            work(number)?;
            Ok(began.elapsed().as_secs_f64())
        })
        .collect()
}

fn measure(scratch: &Path, volumes: u64) -> Result<Ours> {
    let mut ours = Ours { volumes, ..Ours::default() };
    let http = format!("127.0.0.1:{}", shell::free_port()?);
    let more = ["--store-size", "16G", "--http", &http, "--nvme", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"];
    let daemon = Daemon::start(&scratch.join("data"), &more)?;
    ours.memory_empty = resident(daemon.id())?;
    let mut control = Control::connect(&daemon.control())?;
    let created = each(volumes, |number| {
        let image = json!({ "pool": "local", "image": format!("volume{number}"), "size": 10_u64 << 30 });
        control.ask("POST", "/v1/images", Some(&image)).map(drop)
    })?;
    (ours.create, ours.memory_volumes) = (ends(&created), resident(daemon.id())?);
    let attached = attach_each(&mut control, volumes, "nbd")?;
    (ours.attach, ours.memory_exports) = (ends(&attached), resident(daemon.id())?);
    ours.attach_longest = attached.iter().copied().fold(0.0, f64::max);
    let mut connections = Vec::new();
    for number in 0..volumes {
        connections.push(Client::connect(&daemon.socket(), &format!("volume{number}"))?.into_stream());
    }
    ours.memory_connections = resident(daemon.id())?;
    ours.idle = idle_share(daemon.id())?;
    ours.list = timed(|| control.ask("GET", "/v1/targets", None).map(drop))?;
    let mut scrape_len = 0;
    let mut scrapes = Vec::new();
    for _ in 0..5 {
        scrapes.push(timed(|| {
            scrape_len = control.ask("GET", "/metrics", None)?.len() as u64;
            Ok(())
        })?);
    }
    (ours.scrape, ours.scrape_len) = (median(&scrapes), scrape_len);
    drop(connections);
    let open = |control: &mut Control| -> Option<u64> {
        let status = control.ask("GET", "/v1/status", None).ok()?;
        serde_json::from_slice::<Value>(&status).ok()?["connections"].as_u64()
    };
    let closed = || (open(&mut control) == Some(0)).then_some(());
    shell::wait_for(Duration::from_secs(60), closed).context("connections do not close")?;
    // A thread returns their memory to the system once no more of them close.
    let process = daemon.id();
    let most = ours.memory_exports + ours.memory_connections.saturating_sub(ours.memory_exports) / 4;
    let _ = shell::wait_for(GIVEN_BACK_AFTER, || resident(process).ok().filter(|&memory| memory <= most));
    ours.memory_closed = resident(process)?;
    drop(control);
    let stopped = daemon.crash()?;
    let began = Instant::now();
    let daemon = stopped.restart()?;
    ours.start = began.elapsed().as_secs_f64();
    let status: Value =
        serde_json::from_slice(&Control::connect(&daemon.control())?.ask("GET", "/v1/status", None)?)?;
    ensure!(
        status["targets"] == json!(volumes) && status["unserved"] == json!(0),
        "after the restart not everything is served: {status}"
    );
    ours.memory_restarted = resident(daemon.id())?;
    let mut control = Control::connect(&daemon.control())?;
    for (front, most) in FURTHER_FRONTS {
        let attached = attach_each(&mut control, volumes.min(most), front)?;
        ours.further.push(ends(&attached));
    }
    daemon.stop()?;
    Ok(ours)
}

/// Exports all volumes over a front, one after another; returns the times.
fn attach_each(control: &mut Control, volumes: u64, front: &str) -> Result<Vec<f64>> {
    each(volumes, |number| {
        let export = json!({ "pool": "local", "image": format!("volume{number}"), "front": front });
        control.ask("POST", "/v1/targets", Some(&export)).map(drop)
    })
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}

/// Returns the CPU use of an idle process, in percent of a core.
fn idle_share(process: u32) -> Result<f64> {
    // Deferred background work is complete.
    std::thread::sleep(Duration::from_secs(2));
    let before = cpu_seconds(process)?;
    std::thread::sleep(WATCHED);
    Ok((cpu_seconds(process)? - before) / WATCHED.as_secs_f64() * 100.0)
}

/// Bytes of memory that a process has.
fn resident(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}

/// Measures tgtd, which serves a file of 10 GiB by each of many targets.
fn measure_peer(scratch: &Path, targets: u64) -> Result<Peer> {
    let port = shell::free_port()?;
    let control = (std::process::id() % 30_000 + 1).to_string();
    let log = scratch.join("tgtd.log");
    let mut command = shell::command("tgtd");
    // One thread a unit: the fewest that it takes.
    command.args(["--foreground", "--nr_iothreads", "1", "--control-port", &control]);
    command.args(["--iscsi", &format!("portal=127.0.0.1:{port}")]);
    let tgtd = Process::start(&mut command, &log)?;
    let admin = |words: &[&str]| {
        shell::output(shell::command("tgtadm").args(["--control-port", &control, "--lld", "iscsi"]).args(words))
    };
    let up = || admin(&["--mode", "target", "--op", "show"]).ok();
    shell::wait_for(Duration::from_secs(10), up).with_context(|| format!("tgtd: {}", shell::tail(&log, 5)))?;
    let memory_empty = resident(tgtd.id())?;
    let files = scratch.join("peer");
    std::fs::create_dir(&files)?;
    let times = each(targets, |number| {
        let path: PathBuf = files.join(number.to_string());
        std::fs::File::create(&path)?.set_len(10 << 30)?;
        let (id, name) = ((number + 1).to_string(), format!("iqn.2026-01.peer.tgt:{number}"));
        admin(&["--mode", "target", "--op", "new", "--tid", &id, "--targetname", &name])?;
        let path = path.display().to_string();
        admin(&["--mode", "logicalunit", "--op", "new", "--tid", &id, "--lun", "1", "--backing-store", &path])?;
        admin(&["--mode", "target", "--op", "bind", "--tid", &id, "--initiator-address", "ALL"]).map(drop)
    })?;
    let memory_targets = resident(tgtd.id())?;
    tgtd.kill()?;
    Ok(Peer { targets, memory_empty, memory_targets, attach: ends(&times) })
}

impl Ours {
    fn lines(&self, peer: &Peer) -> Vec<String> {
        let miss = |missed: bool| if missed { " MISSED" } else { "" };
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let per = |after: u64, before: u64, count: u64| after.saturating_sub(before) as f64 / count as f64 / 1024.0;
        let export = per(self.memory_exports, self.memory_empty, self.volumes);
        let of_peer = per(peer.memory_targets, peer.memory_empty, peer.targets);
        let thousands = self.volumes.div_ceil(1000);
        let (scrape_len, scrape_ms) = (SCRAPE_MAX.0 * thousands, SCRAPE_MAX.1.as_millis() as u64 * thousands);
        let mut lines = vec![
            format!("SCALE name=volumes value={}", self.volumes),
            format!(
                "SCALE name=memory-per-volume value={:.1} unit=KiB",
                per(self.memory_volumes, self.memory_empty, self.volumes)
            ),
            format!(
                "SCALE name=memory-per-export value={:.1} unit=KiB",
                per(self.memory_exports, self.memory_volumes, self.volumes)
            ),
            format!(
                "SCALE name=memory-per-connection value={:.1} unit=KiB",
                per(self.memory_connections, self.memory_exports, self.volumes)
            ),
            format!(
                "SCALE name=memory-in-all value={:.0} unit=MiB goal={}{}",
                mib(self.memory_connections),
                MEMORY_MAX >> 20,
                miss(self.memory_connections > MEMORY_MAX)
            ),
            format!("SCALE name=memory-after-connections-closed value={:.0} unit=MiB", mib(self.memory_closed)),
            format!("SCALE name=memory-after-restart value={:.0} unit=MiB", mib(self.memory_restarted)),
            format!(
                "SCALE name=start value={:.2} unit=s goal={}{}",
                self.start,
                START_MAX.as_secs(),
                miss(self.start > START_MAX.as_secs_f64())
            ),
            format!("SCALE name=idle value={:.2} unit=% goal={IDLE_MAX}{}", self.idle, miss(self.idle > IDLE_MAX)),
            format!(
                "SCALE name=create-first value={:.2} last={:.2} unit=ms",
                self.create[0] * 1e3,
                self.create[1] * 1e3
            ),
            format!(
                "SCALE name=attach-first value={:.2} last={:.2} longest={:.1} unit=ms ratio={:.2} goal={LAST_MAX}{}",
                self.attach[0] * 1e3,
                self.attach[1] * 1e3,
                self.attach_longest * 1e3,
                self.attach[1] / self.attach[0],
                miss(self.attach[1] > LAST_MAX * self.attach[0])
            ),
            format!("SCALE name=list-targets value={:.1} unit=ms", self.list * 1e3),
            format!(
                "SCALE name=scrape value={:.1} unit=ms goal={}{}",
                self.scrape * 1e3,
                scrape_ms,
                miss(self.scrape * 1e3 > scrape_ms as f64)
            ),
            format!(
                "SCALE name=scrape-size value={:.2} unit=MB goal={:.2}{}",
                self.scrape_len as f64 / 1e6,
                scrape_len as f64 / 1e6,
                miss(self.scrape_len > scrape_len)
            ),
            format!(
                "RATIO name=scale/memory-per-volume-and-export ours={export:.1} peer={of_peer:.1} ratio={:.2} unit=KiB against=tgtd({} targets)",
                export / of_peer,
                peer.targets
            ),
            format!(
                "RATIO name=scale/attach-last ours={:.2} peer={:.2} ratio={:.2} unit=ms against=tgtadm(first {:.2})",
                self.attach[1] * 1e3,
                peer.attach[1] * 1e3,
                self.attach[1] / peer.attach[1],
                peer.attach[0] * 1e3
            ),
        ];
        lines.extend(FURTHER_FRONTS.iter().zip(&self.further).map(|((front, most), [first, last])| {
            let count = self.volumes.min(*most);
            let missed = miss(*last > LAST_MAX * first);
            let ratio = last / first;
            let (first, last) = (first * 1e3, last * 1e3);
            format!("SCALE name=attach-{front}-first value={first:.2} last={last:.2} exports={count} unit=ms ratio={ratio:.2} goal={LAST_MAX}{missed}")
        }));
        lines
    }

    fn page(&self, peer: &Peer, lines: &[String]) -> Result<String> {
        let mut page = String::new();
        writeln!(page, "# Very many volumes on one daemon\n")?;
        writeln!(page, "`cargo xtask bench scale` writes this page.  {}\n", report::machine())?;
        writeln!(
            page,
            "{} images of 10 GiB on the embedded store, each exported over NBD, each with one connection, all made one \
             after another through the control socket; then the daemon is killed and started again, and all are \
             exported over NVMe/TCP and iSCSI, too.  *tgt*: Debian's tgtd, {} targets with a file of 10 GiB each and \
             one thread a unit (`--nr_iothreads 1`); its times are those of three runs of tgtadm.  *First* and *last* \
             are medians of {COMPARED} operations.  Ceph's NVMe-oF gateway is not here: by its own issue tracker it \
             ran out of memory at 207 namespaces in 16 GiB.  A thread of the daemon returns the memory of closed \
             connections to the system (decision 28), except for pages that also hold live allocations.\n",
            self.volumes, peer.targets
        )?;
        writeln!(page, "```\n{}\n```", lines.join("\n"))?;
        Ok(page)
    }
}

/// A connection to a daemon's control socket.
struct Control {
    input: BufReader<UnixStream>,
    output: UnixStream,
}

impl Control {
    fn connect(path: &Path) -> Result<Self> {
        let output = UnixStream::connect(path).with_context(|| format!("connecting to {}", path.display()))?;
        Ok(Self { input: BufReader::new(output.try_clone()?), output })
    }

    /// Asks for something, and returns the body of the answer.
    fn ask(&mut self, method: &str, target: &str, body: Option<&Value>) -> Result<Vec<u8>> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.output.write_all((head + &body).as_bytes())?;
        let (mut line, mut length, mut status) = (String::new(), None, String::new());
        loop {
            line.clear();
            ensure!(self.input.read_line(&mut line)? > 0, "the daemon closed the connection");
            let text = line.trim_end();
            if status.is_empty() {
                text.clone_into(&mut status);
            } else if text.is_empty() {
                break;
            } else if let Some((name, value)) = text.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = Some(value.trim().parse::<usize>()?);
            }
        }
        let mut answer = vec![0; length.context("an answer without a length")?];
        self.input.read_exact(&mut answer)?;
        ensure!(status.contains(" 2"), "{method} {target}: {status}: {}", String::from_utf8_lossy(&answer));
        Ok(answer)
    }
}
