//! Cost of idle connections.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::cpu_seconds;
use crate::daemon::Daemon;
use crate::shell;

/// Number of connections.
const CONNECTIONS: u64 = 100;
/// Time of the measurement.
const WATCHED: Duration = Duration::from_secs(5);

/// Opens them with one of our load programs, and returns the part of a core that the daemon used meanwhile.
pub(super) fn idle(daemon: &Daemon, program: &str, uri: &str) -> Result<String> {
    let mut standing = shell::command(shell::target().join("release").join(program));
    standing.arg(uri).args(["--idle", &CONNECTIONS.to_string(), "--seconds", "0"]);
    let mut host = standing.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let there = || {
        let said = shell::output(daemon.command().args(["status", "--format", "json"])).ok()?;
        let status: Value = serde_json::from_str(&said).ok()?;
        (status["connections"].as_u64()? >= CONNECTIONS).then_some(())
    };
    let came = shell::wait_for(Duration::from_secs(20), there);
    let before = cpu_seconds(daemon.id())?;
    std::thread::sleep(WATCHED);
    let used = cpu_seconds(daemon.id())? - before;
    drop(host.stdin.take());
    host.wait()?;
    came.with_context(|| format!("{CONNECTIONS} connections do not come"))?;
    let share = used / WATCHED.as_secs_f64() * 100.0;
    Ok(format!("{CONNECTIONS} idle connections: {share:.2} % of a core ({used:.2} s of {} s)", WATCHED.as_secs()))
}
