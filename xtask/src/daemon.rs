//! A running forebay daemon, as the demo, the tests and the benchmarks use it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shell::{self, Process, Scratch};

/// How long a daemon may take to become ready, and to stop.
const PATIENCE: Duration = Duration::from_secs(30);

/// The command that builds the daemon in release.
pub fn build_command() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--release", "-p", "forebay"]);
    build
}

/// The daemon's program.
pub fn program() -> PathBuf {
    shell::target().join("release/forebay")
}

/// A daemon on a data folder; it is killed when dropped.
pub struct Daemon {
    process: Process,
    data: PathBuf,
    sockets: Scratch,
    more: Vec<String>,
}

impl Daemon {
    /// Starts one on `data` (created by the daemon), listening for NBD on a Unix socket, with `more` flags, and waits
    /// until it is ready.
    pub fn start(data: &Path, more: &[&str]) -> Result<Self> {
        let sockets = Scratch::new("run")?;
        let more: Vec<String> = more.iter().map(|&word| word.to_owned()).collect();
        let process = Self::launch(data, &sockets, &more)?;
        let mut daemon = Self { process, data: data.to_path_buf(), sockets, more };
        daemon.await_ready()?;
        Ok(daemon)
    }

    fn launch(data: &Path, sockets: &Scratch, more: &[String]) -> Result<Process> {
        let mut command = shell::command(program());
        command.arg("serve").arg("--data").arg(data).arg("--control").arg(sockets.path().join("control"));
        command.arg("--nbd").arg(format!("unix:{}", sockets.path().join("nbd").display())).args(more);
        Process::start(&mut command, &sockets.path().join("log"))
    }

    fn await_ready(&mut self) -> Result<()> {
        let ready = shell::wait_for(PATIENCE, || {
            if let Some(status) = self.process.ended() {
                return Some(Err(anyhow::anyhow!("the daemon ended with {status}:\n{}", self.log_tail())));
            }
            self.command().arg("status").output().is_ok_and(|output| output.status.success()).then_some(Ok(()))
        });
        ready.with_context(|| format!("the daemon is not ready after {PATIENCE:?}:\n{}", self.log_tail()))?
    }

    /// A forebay command that talks to this daemon.
    pub fn command(&self) -> Command {
        let mut command = shell::command(program());
        command.env("FOREBAY_CONTROL", self.control());
        command
    }

    /// Creates a volume, attaches it to NBD, and returns its URI.
    pub fn volume(&self, name: &str, size: &str) -> Result<String> {
        shell::output(self.command().args(["create", name, "--size", size]))?;
        self.attach(name)
    }

    /// Attaches a volume to NBD and returns its URI.
    pub fn attach(&self, name: &str) -> Result<String> {
        let text = shell::output(self.command().args(["attach", name, "--nbd"]))?;
        match text.lines().map(str::trim).find(|line| line.starts_with("nbd")) {
            Some(uri) => Ok(uri.to_owned()),
            None => bail!("attach printed no URI but: {text}"),
        }
    }

    /// The NBD socket.
    pub fn socket(&self) -> PathBuf {
        self.sockets.path().join("nbd")
    }

    /// The control socket.
    pub fn control(&self) -> PathBuf {
        self.sockets.path().join("control")
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The end of what it logged.
    pub fn log_tail(&self) -> String {
        shell::tail(&self.sockets.path().join("log"), 20)
    }

    /// `kill -9`, and a new one on the same data and sockets.
    pub fn crash(self) -> Result<Crashed> {
        self.process.kill()?;
        Ok(Crashed { data: self.data, sockets: self.sockets, more: self.more })
    }

    /// SIGTERM, and waits; an error if it does not end cleanly.
    pub fn stop(self) -> Result<()> {
        let status = self.process.stop(PATIENCE)?;
        if !status.success() {
            bail!("the daemon ended with {status}:\n{}", shell::tail(&self.sockets.path().join("log"), 20));
        }
        Ok(())
    }

    /// Leaves it running when we end, sockets and all.
    pub fn leave(mut self) {
        self.sockets.keep();
        std::mem::forget(self.process);
    }
}

/// What is left of a daemon after `kill -9`.
pub struct Crashed {
    data: PathBuf,
    sockets: Scratch,
    more: Vec<String>,
}

impl Crashed {
    /// Starts it again where it was.
    pub fn restart(self) -> Result<Daemon> {
        let process = Daemon::launch(&self.data, &self.sockets, &self.more)?;
        let mut daemon = Daemon { process, data: self.data, sockets: self.sockets, more: self.more };
        daemon.await_ready()?;
        Ok(daemon)
    }
}
