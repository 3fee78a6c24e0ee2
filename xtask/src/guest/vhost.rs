//! Guests whose disks are served over vhost-user by a daemon on this machine.

use anyhow::Result;

use crate::daemon;
use crate::shell;

/// Scenario of a guest.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
enum GuestScenario {
    /// Commands, a resize and kills of the daemon
    Disk,
    /// Disks of a virtio-scsi controller, which come and go
    Scsi,
    /// Debian booted from an image
    Boot,
    /// Live migration under load
    Migrate,
    /// The same, between two daemons of a gateway group, which are killed
    MigrateGroup,
}

/// Kind of pool with the image that Debian is booted from.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
enum ImagePool {
    /// The daemon's embedded store
    Local,
    /// A Ceph cluster of the lab, with a write log in front of the image
    Rados,
}

/// Arguments of `guest-vhost`.
#[derive(clap::Args)]
pub struct VhostArguments {
    /// Scenario of the guest
    #[arg(long, value_enum, default_value = "disk")]
    scenario: GuestScenario,
    /// Pool with the image that Debian is booted from
    #[arg(long, value_enum, default_value = "local")]
    pool: ImagePool,
    /// Number of migrations
    #[arg(long, default_value_t = 1)]
    rounds: u32,
}

/// Runs the script of a scenario, which starts the daemon and the guests.
pub fn run(arguments: &VhostArguments) -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let script = match arguments.scenario {
        GuestScenario::Disk => "guest-vhost.sh",
        GuestScenario::Scsi => "guest-vhost-scsi.sh",
        GuestScenario::Boot => "guest-vhost-boot.sh",
        GuestScenario::Migrate => "guest-vhost-migrate.sh",
        GuestScenario::MigrateGroup => "guest-vhost-migrate-group.sh",
    };
    let pool = match arguments.pool {
        ImagePool::Local => "local",
        ImagePool::Rados => "rados",
    };
    let mut script = shell::command(shell::root().join("test/interop").join(script));
    script.env("FOREBAY", daemon::program()).env("POOL", pool).env("ROUNDS", arguments.rounds.to_string());
    shell::run(&mut script)
}
