//! A running forebay daemon, as the demo, the tests and the benchmarks use it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shell::{self, Process, Scratch};

/// Time in which a daemon must become ready, and stop.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The command that builds the daemon in release.
pub fn build_command() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--release", "-p", "forebay"]);
    build
}

/// The command that builds other programs in release.  The daemon is named with them: a crate is compiled with the features
/// that all named packages want together, and those of the daemon are everybody's; without it, cargo would compile most
/// of the workspace once more, with fewer.
pub fn build_beside_command(programs: &[&str]) -> Command {
    let mut build = build_command();
    build.args(programs);
    build
}

/// The command that builds the daemon as tests have it: another build than the one in release.
pub fn build_debug_command() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "-p", "forebay"]);
    build
}

/// The daemon's program as tests have it.
pub fn debug_program() -> PathBuf {
    shell::target().join("debug/forebay")
}

/// The command that builds the daemon as it is shipped, for comparisons with what distributions ship.
pub fn build_shipped_command() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--profile", "dist", "-p", "forebay"]);
    build
}

/// The daemon's program as it is shipped.
pub fn shipped_program() -> PathBuf {
    shell::target().join("dist/forebay")
}

/// The daemon's program.
pub fn program() -> PathBuf {
    shell::target().join("release/forebay")
}

/// A daemon on a data folder; it is killed when dropped.
pub struct Daemon {
    program: PathBuf,
    process: Process,
    sockets: Scratch,
    words: Vec<String>,
}

impl Daemon {
    /// Starts one on `data` (created by the daemon), listening for NBD on a Unix socket, with `more` flags, and waits
    /// until it is ready.
    pub fn start(data: &Path, more: &[&str]) -> Result<Self> {
        Self::start_under(&[], data, more)
    }

    /// Starts one under another program, which must leave it our direct child.
    pub fn start_under(wrapper: &[&str], data: &Path, more: &[&str]) -> Result<Self> {
        Self::start_program(&program(), wrapper, data, more)
    }

    /// The same, as it is shipped.
    pub fn start_shipped(wrapper: &[&str], data: &Path, more: &[&str]) -> Result<Self> {
        Self::start_program(&shipped_program(), wrapper, data, more)
    }

    /// The same, of another build; its own program talks to it.
    pub fn start_program(program: &Path, wrapper: &[&str], data: &Path, more: &[&str]) -> Result<Self> {
        let sockets = Scratch::new("run")?;
        let path = |name: &str| sockets.path().join(name).display().to_string();
        let mut words: Vec<String> = wrapper.iter().map(|&word| word.to_owned()).collect();
        words.push(program.display().to_string());
        words.extend(["serve".into(), "--data".into(), data.display().to_string()]);
        words.extend(["--control".into(), path("control"), "--nbd".into(), format!("unix:{}", path("nbd"))]);
        words.extend(more.iter().map(|&word| word.to_owned()));
        Self::launch(program.to_path_buf(), words, sockets)
    }

    fn launch(program: PathBuf, words: Vec<String>, sockets: Scratch) -> Result<Self> {
        let process = Process::start(shell::command(&words[0]).args(&words[1..]), &sockets.path().join("log"))?;
        let mut daemon = Self { program, process, sockets, words };
        daemon.await_ready()?;
        Ok(daemon)
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
        let mut command = shell::command(&self.program);
        command.env("FOREBAY_CONTROL", self.control());
        command
    }

    /// Creates a volume, attaches it to NBD, and returns its URI.
    pub fn volume(&self, name: &str, size: &str) -> Result<String> {
        shell::output(self.command().args(["create", name, "--size", size]))?;
        self.attach(name)
    }

    /// Creates a volume, attaches it to NBD with more flags, and returns its URI.
    pub fn volume_with(&self, name: &str, size: &str, more: &[&str]) -> Result<String> {
        shell::output(self.command().args(["create", name, "--size", size]))?;
        self.attach_with(name, more)
    }

    /// Attaches a volume to NBD and returns its URI.
    pub fn attach(&self, name: &str) -> Result<String> {
        self.attach_with(name, &[])
    }

    /// Attaches a volume to NBD with more flags, and returns its URI.
    pub fn attach_with(&self, name: &str, more: &[&str]) -> Result<String> {
        let text = shell::output(self.command().args(["attach", name, "--nbd"]).args(more))?;
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

    /// Returns its log.
    pub fn log(&self) -> String {
        shell::tail(&self.sockets.path().join("log"), usize::MAX)
    }

    /// `kill -9`, and a new one on the same data and sockets.
    pub fn crash(self) -> Result<Crashed> {
        self.process.kill()?;
        Ok(Crashed { program: self.program, sockets: self.sockets, words: self.words })
    }

    /// SIGTERM, and waits until it has ended; a new one may follow on the same data and sockets.
    pub fn halt(self) -> Result<Crashed> {
        let Self { program, process, sockets, words } = self;
        let status = process.stop(PATIENCE)?;
        if !status.success() {
            bail!("the daemon ended with {status}:\n{}", shell::tail(&sockets.path().join("log"), 20));
        }
        Ok(Crashed { program, sockets, words })
    }

    /// SIGTERM, and a new one on the same data and sockets.
    pub fn restart(self) -> Result<Self> {
        let Self { program, process, sockets, words } = self;
        let status = process.stop(PATIENCE)?;
        if !status.success() {
            bail!("the daemon ended with {status}:\n{}", shell::tail(&sockets.path().join("log"), 20));
        }
        Self::launch(program, words, sockets)
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

/// Remains of a daemon after `kill -9`.
pub struct Crashed {
    program: PathBuf,
    sockets: Scratch,
    words: Vec<String>,
}

impl Crashed {
    /// Returns its log.
    pub fn log(&self) -> String {
        shell::tail(&self.sockets.path().join("log"), usize::MAX)
    }

    /// Starts it again where it was.
    pub fn restart(self) -> Result<Daemon> {
        Daemon::launch(self.program, self.words, self.sockets)
    }

    /// Starts another build of it where it was.
    pub fn restart_as(self, program: &Path) -> Result<Daemon> {
        let Self { program: former, sockets, mut words } = self;
        let former = former.display().to_string();
        for word in words.iter_mut().filter(|word| **word == former) {
            *word = program.display().to_string();
        }
        Daemon::launch(program.to_path_buf(), words, sockets)
    }
}
