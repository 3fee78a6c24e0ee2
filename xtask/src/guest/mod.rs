//! The kernel's clients, in a guest with its own kernel, against a daemon on this machine.

pub mod documented;
pub mod gateways;
pub mod iscsi;
pub mod nvme;
pub mod vhost;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::daemon::{self, Daemon};
use crate::shell::{self, Process, Scratch};

/// Polling interval for requests of the guest.
const LOOK: Duration = Duration::from_millis(20);

/// Serves a volume over TCP and runs test/interop/guest-nbd.sh in the guest, which runs a daemon of its own with a disk.
pub fn nbd() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let port = shell::free_port()?;
    let daemon = Daemon::start(&scratch.path().join("store"), &["--nbd", &format!("127.0.0.1:{port}")])?;
    daemon.volume("local/guest", "256M")?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nbd.sh")).args([&port.to_string(), "local/guest"]);
    let disk = scratch.path().join("disk");
    fs::File::create(&disk)?.set_len(4 << 30)?;
    guest.arg(daemon::program()).env("DISKS", &disk).env("TIMEOUT", "600");
    shell::run(&mut guest)?;
    daemon.stop()
}

/// Runs a guest whose script asks for what has to happen here, and stops the daemon when it has ended well.
fn converse(
    guest: &mut Command,
    scratch: &Scratch,
    share: &Path,
    daemon: Daemon,
    mut serve: impl FnMut(&[&str], &mut Option<Daemon>) -> Result<String>,
) -> Result<()> {
    let mut daemon = Some(daemon);
    let status = attend(guest, scratch, share, |words| serve(words, &mut daemon))?;
    let daemon = daemon.context("the daemon did not restart")?;
    if !status.success() {
        bail!("the guest ended with {status}; the daemon's log:\n{}", daemon.log_tail());
    }
    daemon.stop()
}

/// Runs a guest and does what its script asks for, until it has ended.
fn attend(
    guest: &mut Command,
    scratch: &Scratch,
    share: &Path,
    mut serve: impl FnMut(&[&str]) -> Result<String>,
) -> Result<ExitStatus> {
    let log = scratch.path().join("console");
    let mut guest = Process::start(guest, &log)?;
    let mut shown = 0;
    loop {
        let ended = guest.ended();
        let text = fs::read_to_string(&log).unwrap_or_default();
        print!("{}", text.get(shown..).unwrap_or_default());
        std::io::stdout().flush()?;
        shown = text.len();
        if let Some(status) = ended {
            return Ok(status);
        }
        if let Ok(asked) = fs::read_to_string(share.join("ask")) {
            fs::remove_file(share.join("ask"))?;
            let words: Vec<&str> = asked.lines().collect();
            let answer = match serve(&words) {
                Ok(text) => format!("0\n{text}"),
                Err(error) => {
                    eprintln!("{error:#}");
                    format!("1\n{error:#}\n")
                }
            };
            put(share, &answer)?;
        }
        std::thread::sleep(LOOK);
    }
}

/// Makes an answer appear as a whole.
fn put(share: &Path, answer: &str) -> Result<()> {
    let new = share.join("answer.new");
    fs::write(&new, answer)?;
    Ok(fs::rename(new, share.join("answer"))?)
}

/// Does what any guest may ask for.
fn serve(words: &[&str], daemon: &mut Option<Daemon>) -> Result<String> {
    match words {
        ["forebay", words @ ..] => {
            let daemon = daemon.as_ref().context("no daemon runs")?;
            shell::output(daemon.command().args(words))
        }
        ["restart"] => {
            *daemon = Some(daemon.take().context("no daemon runs")?.restart()?);
            Ok(String::new())
        }
        ["kill"] => {
            *daemon = Some(daemon.take().context("no daemon runs")?.crash()?.restart()?);
            Ok(String::new())
        }
        words => bail!("the guest asks for {words:?}"),
    }
}
