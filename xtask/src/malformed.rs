//! `cargo xtask malformed`: sessions that go wrong, by the million, against a real daemon over loopback.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// What `malformed` takes.
#[derive(clap::Args)]
pub struct MalformedArguments {
    /// Only this protocol
    #[arg(value_enum)]
    protocol: Option<Protocol>,
    /// Sessions of each
    #[arg(long, default_value_t = 1_000_000)]
    sessions: u64,
    /// What goes wrong follows from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What is spoken.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// iSCSI
    Iscsi,
    /// NVMe over TCP
    Nvme,
}

/// How long it goes on.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Sessions at most.
    pub sessions: u64,
    /// Seconds at most.
    pub seconds: Option<u32>,
    /// The seed.
    pub seed: u64,
}

/// The initiator that sees a unit of its own.
const CALM: &str = "iqn.2026-11.io.forebay:calm";

/// Runs each protocol's sessions.
pub fn run(arguments: &MalformedArguments) -> Result<()> {
    build()?;
    let scratch = Scratch::within(&shell::target(), "malformed")?;
    for (protocol, name) in [(Protocol::Iscsi, "iscsi"), (Protocol::Nvme, "nvme")] {
        if arguments.protocol.is_some_and(|only| only != protocol) {
            continue;
        }
        let effort = Effort { sessions: arguments.sessions, seconds: None, seed: arguments.seed };
        println!("ok malformed {name}: {}", check(&scratch.path().join(name), protocol, effort)?);
    }
    Ok(())
}

/// The command that builds our own initiators, in release.
pub fn build_command() -> Command {
    daemon::build_beside_command(&["-p", "forebay-malformed", "-p", "forebay-iscsi-host", "-p", "forebay-nvme-host"])
}

/// Builds what is needed.
pub fn build() -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    shell::run(&mut build_command())
}

/// Starts a daemon and runs sessions of one protocol; says what came of it.
pub fn check(folder: &Path, protocol: Protocol, effort: Effort) -> Result<String> {
    let front = if protocol == Protocol::Iscsi { "--iscsi" } else { "--nvme" };
    // What each connection's end is logged with would be the most of the work.
    let wrapper = ["env", "FOREBAY_LOG=error"];
    let data = folder.join("store");
    let daemon = Daemon::start_under(&wrapper, &data, &[front, "127.0.0.1:0", "--cores", "2"])?;
    let attach = |name: &str, more: &[&str]| -> Result<String> {
        shell::output(daemon.command().args(["create", name, "--size", "8M"]))?;
        let said = shell::output(daemon.command().args(["attach", name, front, "--format", "json"]).args(more))?;
        let target: Value = serde_json::from_str(&said)?;
        target["uris"][0].as_str().map(str::to_owned).context("no URI")
    };
    let uri = attach("ram/malformed", &[])?;
    let mut work = shell::command(shell::target().join("release/forebay-malformed"));
    work.arg(&uri).args(["--process", &daemon.id().to_string(), "--sessions", &effort.sessions.to_string()]);
    work.args(["--seed", &effort.seed.to_string()]);
    if let Some(seconds) = effort.seconds {
        work.args(["--seconds", &seconds.to_string()]);
    }
    if protocol == Protocol::Iscsi {
        work.args(["--calm", &attach("ram/calm", &["--initiator", CALM])?, "--calm-initiator", CALM]);
    }
    let said = shell::output(&mut work).with_context(|| format!("the daemon's last words:\n{}", daemon.log_tail()))?;
    let log = daemon.log();
    ensure!(!log.contains("panicked"), "a panic:\n{log}");
    daemon.stop()?;
    Ok(said.lines().last().unwrap_or_default().to_owned())
}
