//! open-iscsi and the kernel's iSCSI initiator, in a guest with its own kernel, against a daemon on this machine.
//!
//! The guest's script asks for what has to happen here through files in a shared folder, as the one of NVMe/TCP does.

use std::fs;

use anyhow::Result;

use crate::daemon::{self, Daemon};
use crate::shell::{self, Scratch};

/// Serves volumes and runs test/interop/guest-iscsi.sh in the guest.
pub fn run() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let port = shell::free_port()?;
    let config = scratch.path().join("config.toml");
    let text = format!(
        "[iscsi-target]\nname = 'iqn.2026-11.io.forebay:guest'\nadvertise = ['10.0.2.2:{port}']\n\
         [iscsi-target.chap]\nuser = 'host'\nsecret = 'a-secret-of-hosts'\n\
         [iscsi-target.mutual-chap]\nuser = 'disk'\nsecret = 'a-secret-of-disks'\n"
    );
    fs::write(&config, text)?;
    let (config, addr) = (config.display().to_string(), format!("127.0.0.1:{port}"));
    let daemon =
        Daemon::start(&scratch.path().join("store"), &["--config", &config, "--iscsi", &addr, "--cores", "2"])?;
    shell::output(daemon.command().args(["create", "local/guest", "--size", "256M"]))?;
    shell::output(daemon.command().args(["attach", "local/guest", "--iscsi"]))?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-iscsi.sh")).arg(port.to_string());
    guest.env("SHARE", &share).env("TIMEOUT", "420");
    super::converse(&mut guest, &scratch, &share, daemon, super::serve)
}
