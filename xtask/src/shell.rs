//! Processes, paths and what is printed: the small tools every chore is made of.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use crate::quiet::Stopwatch;

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}

/// Returns the folder of build products.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => root().join("target"),
    }
}

/// The cargo that runs us.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// A command that starts in the workspace's root, finds what lies in the system folders, and reads no terminal.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.current_dir(root()).env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin")).stdin(Stdio::null());
    // The variables cargo sets for us would make a nested cargo rebuild everything.
    for (name, _) in std::env::vars() {
        if name.starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" || name == "CARGO_MANIFEST_PATH" {
            command.env_remove(name);
        }
    }
    command
}

/// Returns a command as text, for messages.
pub fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Runs to the end with our own output; fails when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", show(command)))?;
    succeeded(command, status)
}

/// Variable in the environment of a stage's processes: the stage, and the run that it belongs to.
pub const STAGE: &str = "FOREBAY_TEST_STAGE";

/// Builds the programs that a chore runs.  A test run has built them before its stages begin: asked again, cargo would wait
/// for a build that runs beside the stage.
pub fn build(command: &mut Command) -> Result<()> {
    if std::env::var_os(STAGE).is_some() { Ok(()) } else { run(command) }
}

/// Runs to the end and returns what it printed; fails, with what it said, when it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("cannot start {}", show(command)))?;
    if !status.success() {
        // What went wrong is said at the end, and on the error output by those that know the difference.
        let said = if stderr.is_empty() { stdout } else { stderr };
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().collect();
        bail!("{} ended with {status}\n{}", show(command), lines[lines.len().saturating_sub(20)..].join("\n"));
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

fn succeeded(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{} ended with {status}", show(command));
    }
    Ok(())
}

/// A child process that does not outlive us: dropped, it is killed and waited for.
pub struct Process {
    child: Option<Child>,
}

impl Process {
    /// Starts it, its output going to the file `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {}", show(command)))?;
        Ok(Self { child: Some(child) })
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Returns the exit status, once the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut().and_then(|child| child.try_wait().ok().flatten())
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGTERM, and waits until the process is gone; SIGKILL and an error after `patience`.
    pub fn stop(mut self, patience: Duration) -> Result<ExitStatus> {
        let mut child = self.child.take().context("already gone")?;
        output(command("kill").args(["-TERM", &child.id().to_string()]))?;
        let ended = wait_for(patience, || child.try_wait().ok().flatten());
        match ended {
            Some(status) => Ok(status),
            None => {
                child.kill()?;
                child.wait()?;
                bail!("it did not end within {} s of SIGTERM", patience.as_secs())
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Nothing is left to do where this fails: it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Asks until there is an answer, for as long as `patience`, in quiet time.
pub fn wait_for<T>(patience: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Stopwatch::start();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if begin.quiet() > patience {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal to processes; those that are gone are left out.
pub fn signal(name: &str, processes: &[u32]) {
    let ids = processes.iter().map(u32::to_string);
    // One that has ended meanwhile is as good as one that ends by it.
    let _ = command("kill").arg(format!("-{name}")).args(ids).stderr(Stdio::null()).status();
}

/// Returns the processes that have `variable` with this value in the environment they were started with: what a command
/// has started, daemons that have left it included.
pub fn with_environment(variable: &str, value: &str) -> Vec<u32> {
    let wanted = format!("{variable}={value}").into_bytes();
    let folders = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    folders
        .filter_map(|folder| {
            let id = folder.file_name().to_str()?.parse().ok()?;
            let environment = std::fs::read(folder.path().join("environ")).ok()?;
            environment.split(|&byte| byte == 0).any(|entry| entry == wanted).then_some(id)
        })
        .collect()
}

/// A folder that goes away with its owner.
pub struct Scratch {
    path: PathBuf,
    keep: bool,
}

impl Scratch {
    /// A new one, below `TMPDIR` or /tmp: short, because a Unix socket's path must be.
    pub fn new(purpose: &str) -> Result<Self> {
        Self::within(&std::env::temp_dir(), purpose)
    }

    /// A new one below `folder`.
    pub fn within(folder: &Path, purpose: &str) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("forebay-{purpose}-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path, keep: false })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves it in place.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            // A folder that cannot be removed is no reason to fail what was done in it.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// The end of a text file, for showing why something failed.
pub fn tail(path: &Path, lines: usize) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        // What cannot be read is shown as nothing.
        let _ = file.read_to_end(&mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// `text` in a colour, where there is a terminal to show it.
pub fn paint(text: &str, code: &str) -> String {
    if std::io::stdout().is_terminal() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// A title, in bold.
pub fn bold(text: &str) -> String {
    paint(text, "1")
}

/// Seconds, for people.
pub fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// Returns a port of 127.0.0.1 that no process listens on, below the range of outgoing connections, so that none of
/// these takes it before the caller listens on it.
pub fn free_port() -> Result<u16> {
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| u64::from(now.subsec_nanos()));
    let start = nanos ^ u64::from(std::process::id()) << 8;
    for _ in 0..1000 {
        let number = start.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed).wrapping_mul(7919));
        let port = 10_000 + (number % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of 127.0.0.1 from 10000 to 29999 is free")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_has_started_is_found_wherever_it_went() {
        let mark = format!("test-{}", std::process::id());
        let script = "sleep 1000 & (setsid sh -c 'sleep 1000; :' &) ; wait";
        let mut child = command("sh").args(["-c", script]).env("FOREBAY_MARK", &mark).spawn().expect("a shell");
        let all = wait_for(Duration::from_secs(60), || {
            Some(with_environment("FOREBAY_MARK", &mark)).filter(|all| all.len() == 4)
        });
        let all = all.expect("a shell with three more");
        assert!(all.contains(&child.id()));
        signal("TERM", &all);
        assert!(!child.wait().expect("it ends").success());
        let none = || with_environment("FOREBAY_MARK", &mark).is_empty().then_some(());
        wait_for(Duration::from_secs(60), none).expect("all of them are gone");
    }
}
