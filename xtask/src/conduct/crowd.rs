//! A thousand volumes, and two thousand sessions that only stand there.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::daemon::Daemon;
use crate::quiet::Stopwatch;
use crate::shell;

const VOLUMES: usize = 1000;
const SESSIONS: u64 = 2000;
/// Resident bytes.
const MEMORY_MAX: u64 = 1 << 30;
/// Longest stop and start, in quiet time.
const START_MAX: Duration = Duration::from_secs(10);

/// 1,000 exported volumes with 2,000 idle sessions are held in under 1 GiB, and a daemon with them starts in under 10 s.
pub fn iscsi(folder: &Path) -> Result<String> {
    let port = shell::free_port()?;
    // As services are started: the daemon takes what it may have.
    let wrapper = ["bash", "-c", "ulimit -Sn 1024; exec \"$@\"", "serve"];
    let words = ["--cores", "2", "--iscsi", &format!("127.0.0.1:{port}")];
    let daemon = Daemon::start_under(&wrapper, &folder.join("store"), &words)?;
    for number in 0..VOLUMES {
        let name = format!("local/volume-{number}");
        shell::output(daemon.command().args(["create", &name, "--size", "64M"]))?;
        shell::output(daemon.command().args(["attach", &name, "--iscsi"]))?;
    }
    let watch = Stopwatch::start();
    let daemon = daemon.restart()?;
    let (started, quiet) = (watch.wall(), watch.quiet());
    let said = shell::output(daemon.command().args(["status", "--format", "json"]))?;
    let status: Value = serde_json::from_str(&said)?;
    ensure!(status["targets"].as_u64() == Some(VOLUMES as u64), "{} exports are there again", status["targets"]);
    ensure!(quiet < START_MAX, "stopping and starting takes {started:?}, {quiet:?} of them quiet time");
    let name = status["iscsi_name"].as_str().context("no name")?;

    let load = shell::target().join("release/iscsi-load");
    let mut sessions = shell::command("bash");
    sessions.args(["-c", "ulimit -n 8192; exec \"$@\"", "load"]).arg(load);
    sessions.arg(format!("iscsi://127.0.0.1:{port}/{name}/0")).args(["--units", &VOLUMES.to_string()]);
    sessions.args(["--idle", &SESSIONS.to_string(), "--seconds", "0"]);
    let mut sessions = sessions.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let came = shell::wait_for(Duration::from_secs(60), || {
        let said = shell::output(daemon.command().args(["status", "--format", "json"])).ok()?;
        let status: Value = serde_json::from_str(&said).ok()?;
        (status["connections"].as_u64()? >= SESSIONS).then_some(())
    });
    let resident = resident(daemon.id());
    drop(sessions.stdin.take());
    sessions.wait()?;
    came.with_context(|| format!("{SESSIONS} sessions do not come"))?;
    let resident = resident?;
    ensure!(resident < MEMORY_MAX, "it holds {} MiB", resident >> 20);
    daemon.stop()?;
    let text = format!(
        "{VOLUMES} volumes, {SESSIONS} sessions: {} MiB, restarted in {}",
        resident >> 20,
        shell::seconds(started)
    );
    Ok(text)
}

fn resident(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? << 10)
}
