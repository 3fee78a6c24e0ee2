//! `cargo xtask malformed`: sessions that go wrong, by the million, against a real daemon over loopback.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// Arguments of `malformed`.
#[derive(clap::Args)]
pub struct MalformedArguments {
    /// Only this protocol
    #[arg(value_enum)]
    protocol: Option<Protocol>,
    /// Sessions of each
    #[arg(long, default_value_t = 1_000_000)]
    sessions: u64,
    /// Seed of the mutations
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Protocol of the sessions.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// iSCSI
    Iscsi,
    /// NVMe over TCP
    Nvme,
    /// NVMe over TCP, within TLS and at its door
    NvmeTls,
}

/// All of them, with their names.
const PROTOCOLS: [(Protocol, &str); 3] =
    [(Protocol::Iscsi, "iscsi"), (Protocol::Nvme, "nvme"), (Protocol::NvmeTls, "nvme-tls")];

/// Length of a run.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Sessions at most.
    pub sessions: u64,
    /// Seconds at most.
    pub seconds: Option<u32>,
    /// The seed.
    pub seed: u64,
}

/// The key of all hosts: that of libnvme's own tests.
const TLS_KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

/// Hosts that there are: those that go wrong, and a calm one for each of the program's threads.
const HOSTS: usize = 96;

/// The initiator that sees a unit of its own.
const CALM: &str = "iqn.2026-11.io.forebay:calm";

/// Runs each protocol's sessions.
pub fn run(arguments: &MalformedArguments) -> Result<()> {
    build()?;
    let scratch = Scratch::within(&shell::target(), "malformed")?;
    for (protocol, name) in PROTOCOLS {
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
    shell::build(&mut daemon::build_command())?;
    shell::build(&mut build_command())
}

/// Starts a daemon and runs sessions of one protocol; says what came of it.
pub fn check(folder: &Path, protocol: Protocol, effort: Effort) -> Result<String> {
    let front = if protocol == Protocol::Iscsi { "--iscsi" } else { "--nvme" };
    // What each connection's end is logged with would be the most of the work.
    let wrapper = ["env", "FOREBAY_LOG=error"];
    let data = folder.join("store");
    let mut flags = vec![front.to_owned(), "127.0.0.1:0".to_owned(), "--cores".to_owned(), "2".to_owned()];
    if protocol == Protocol::NvmeTls {
        flags[1] += ",tls=required";
        std::fs::create_dir_all(folder)?;
        let key = folder.join("tls.key");
        std::fs::write(&key, TLS_KEY)?;
        std::fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        for host in 0..HOSTS {
            let name = format!("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-{host:012x}");
            flags.extend(["--nvme-host".to_owned(), format!("{name},tls-key={}", key.display())]);
        }
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let daemon = Daemon::start_under(&wrapper, &data, &flags)?;
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
    if protocol == Protocol::NvmeTls {
        work.args(["--tls-key", TLS_KEY]);
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
