//! One door to every chore: `cargo xtask help`.

mod bench;
mod ceph;
mod check;
mod commits;
mod conduct;
mod cpu;
mod daemon;
mod demo;
mod failover;
mod fio;
mod fuzz;
mod guest;
mod kill;
mod layers;
mod malformed;
mod mutants;
mod names;
mod nbd;
mod network;
mod numbered;
mod policy;
mod quiet;
mod shell;
mod sim;
mod test;
mod words;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "One door to every chore", disable_help_subcommand = false)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// A peer and Forebay side by side
    Bench(bench::BenchArguments),
    /// Formatting, lints, documentation, layering and the other rules of the house
    Check(check::CheckArguments),
    /// Check the daemon's behaviour: idle, without io_uring, under malformed input
    Conduct,
    /// From nothing to a served volume with real data in it, checked and measured
    Demo(demo::DemoArguments),
    /// One fuzz target, for a while
    Fuzz(fuzz::FuzzArguments),
    /// The commands and configurations of README.md and docs/operations.md, as printed, in a guest
    GuestDocumented,
    /// The kernel's NBD client in the guest, against a daemon here
    GuestNbd,
    /// The kernel's NVMe/TCP initiator in the guest, against a daemon here
    GuestNvme,
    /// Let the kernel's NVMe/TCP initiator authenticate, in a guest with Debian's newer kernel
    GuestNvmeAuth,
    /// Let the kernel's NVMe/TCP initiator speak TLS, in a guest with Debian's newer kernel and tlshd
    GuestNvmeTls,
    /// One namespace of two daemons: the kernel's NVMe/TCP initiator in the guest, an image of a lab cluster
    GuestNvmeTwo,
    /// A gateway group of three daemons, whose members fail: the kernel's initiators with several paths in the guest
    GuestGateways(guest::gateways::GatewaysArguments),
    /// open-iscsi and the kernel's iSCSI initiator in the guest, against a daemon here
    GuestIscsi,
    /// Guests with disks of the daemon's vhost-user-blk back-end: kills, Debian booted from one, live migration
    GuestVhost(guest::vhost::VhostArguments),
    /// Real failovers of write logs with replicas: daemons that serve images of a lab cluster are lost under writers
    Failover(failover::FailoverArguments),
    /// Real kills of the daemon under writers that remember what they were promised
    Kill(kill::KillArguments),
    /// Sessions that go wrong, by the million, against a real daemon: iSCSI and NVMe/TCP
    Malformed(malformed::MalformedArguments),
    /// Plant known faults one at a time into a copy of the source; which stage notices each
    Mutants(mutants::MutantsArguments),
    /// A real cluster, or a guest with its own kernel, on this machine
    Lab(LabArguments),
    /// An image in a Ceph cluster of the lab under verified writes, while OSDs are killed and started again
    Thrash {
        /// Time to write
        #[arg(long, default_value_t = 360)]
        seconds: u32,
    },
    /// The simulator: one seed, or many
    Sim(sim::SimArguments),
    /// The long stages of `test` at full length: seeds, kills and seconds; a table of what each did and found
    Soak(test::SoakArguments),
    /// Every test, in stages
    Test(test::TestArguments),
}

#[derive(clap::Args)]
struct LabArguments {
    #[command(subcommand)]
    part: LabPart,
}

#[derive(Subcommand)]
enum LabPart {
    /// A Ceph cluster: `up [OSDS]`, `down`, `kill-osd N`, `start-osd N`, `env`
    #[command(disable_help_flag = true)]
    Ceph {
        /// Passed on
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// A script in a guest with its own kernel
    #[command(disable_help_flag = true)]
    Guest {
        /// Passed on
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

fn main() -> ExitCode {
    match chore(Arguments::parse().chore) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{} {error:#}", shell::paint("error:", "1;31"));
            ExitCode::FAILURE
        }
    }
}

fn chore(chore: Chore) -> Result<()> {
    match chore {
        Chore::Bench(arguments) => bench::run(&arguments),
        Chore::Check(arguments) => check::run(&arguments),
        Chore::Conduct => conduct::run(),
        Chore::Demo(arguments) => demo::run(&arguments),
        Chore::Fuzz(arguments) => fuzz::run(&arguments),
        Chore::GuestDocumented => guest::documented::run(),
        Chore::GuestNbd => guest::nbd(),
        Chore::GuestNvme => guest::nvme::run(),
        Chore::GuestNvmeAuth => guest::nvme::auth(),
        Chore::GuestNvmeTls => guest::nvme::tls(),
        Chore::GuestNvmeTwo => guest::nvme::two(),
        Chore::GuestGateways(arguments) => guest::gateways::run(&arguments),
        Chore::GuestIscsi => guest::iscsi::run(),
        Chore::GuestVhost(arguments) => guest::vhost::run(&arguments),
        Chore::Failover(arguments) => failover::run(&arguments),
        Chore::Kill(arguments) => kill::run(&arguments),
        Chore::Malformed(arguments) => malformed::run(&arguments),
        Chore::Mutants(arguments) => mutants::run(&arguments),
        Chore::Soak(arguments) => test::soak(&arguments),
        Chore::Test(arguments) => test::run(&arguments),
        Chore::Lab(LabArguments { part: LabPart::Ceph { words } }) => {
            shell::run(shell::command(shell::root().join("test/lab/ceph-cluster")).args(words))
        }
        Chore::Lab(LabArguments { part: LabPart::Guest { words } }) => {
            shell::run(shell::command(shell::root().join("test/lab/guest")).args(words))
        }
        Chore::Thrash { seconds } => {
            shell::run(&mut daemon::build_command())?;
            let mut script = shell::command(shell::root().join("test/interop/rados-thrash.sh"));
            shell::run(script.env("FOREBAY", daemon::program()).arg(seconds.to_string()))
        }
        Chore::Sim(arguments) => sim::run(&arguments),
    }
}
