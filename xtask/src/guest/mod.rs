//! The kernel's clients, in a guest with its own kernel, against a daemon on this machine.

pub mod nvme;

use anyhow::Result;

use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// Serves a volume over TCP and runs test/interop/guest-nbd.sh in the guest.
pub fn nbd() -> Result<()> {
    shell::run(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let port = shell::free_port()?;
    let daemon = Daemon::start(&scratch.path().join("store"), &["--nbd", &format!("127.0.0.1:{port}")])?;
    daemon.volume("local/guest", "256M")?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-nbd.sh")).args([&port.to_string(), "local/guest"]);
    shell::run(&mut guest)?;
    daemon.stop()
}
