//! What `make test` consists of.

use std::process::Command;

use anyhow::Result;

use crate::{daemon, fuzz, malformed, shell, sim};

/// One stage: a command, and what must have succeeded before it.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) after: &'static [&'static str],
    pub(super) command: Box<dyn Fn() -> Result<Command> + Send + Sync>,
    /// Its output holds tests to count; a build's does not.
    pub(super) counted: bool,
    /// Cores it keeps busy; 0 for what waits for the network.
    pub(super) weight: usize,
}

/// The stages of a whole run, in the order in which they are begun where nothing else decides.
pub(super) fn stages(quick: bool) -> Vec<Stage> {
    let (seeds, sweeps, sessions, fuzz_seconds, kills) =
        if quick { ("400", "2", "500", "10", "8") } else { ("8000", "60", "10000", "60", "50") };
    let (logs, log_sweeps, failures) = if quick { ("1000", "2", "2") } else { ("20000", "20", "10") };
    let ceph_kills = if quick { "3" } else { "12" };
    let cuts: &'static [&'static str] = if quick { &["1"] } else { &["1", "10", "60"] };
    vec![
        Stage {
            name: "guest-kernel",
            title: "fetch the guest's kernel, once",
            after: &[],
            command: Box::new(|| {
                let mut guest = shell::command(shell::root().join("test/lab/guest"));
                guest.arg("--prepare");
                Ok(guest)
            }),
            counted: false,
            weight: 0,
        },
        Stage {
            name: "build",
            title: "the daemon, in release",
            after: &[],
            command: Box::new(|| Ok(daemon::build_command())),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "build-tests",
            title: "unit and property tests",
            after: &[],
            command: Box::new(|| {
                let mut build = shell::cargo();
                build.args(["test", "--quiet", "--workspace", "--no-run"]);
                Ok(build)
            }),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "interop",
            title: "real NBD clients",
            after: &["build"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/nbd.sh"));
                script.env("FOREBAY", daemon::program());
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "build-hosts",
            title: "initiators that do what others do not",
            after: &["build"],
            command: Box::new(|| Ok(malformed::build_command())),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "conduct",
            title: "the daemon idle, alone, under rubbish",
            after: &["build", "build-hosts"],
            command: Box::new(|| own(&["conduct"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "build-sim",
            title: "the simulator, in release",
            after: &["build"],
            command: Box::new(|| Ok(sim::build_command())),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "unit",
            title: "unit and property tests",
            after: &["build-tests"],
            command: Box::new(|| {
                let mut test = shell::cargo();
                test.args(["test", "--quiet", "--workspace", "--no-fail-fast"]);
                Ok(test)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "messenger-netns",
            title: "messengers with the link cut",
            after: &["build"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/messenger-netns.sh"));
                script.env("FOREBAY", daemon::program()).args(cuts);
                Ok(script)
            }),
            counted: true,
            weight: 0,
        },
        Stage {
            name: "build-mon",
            title: "the messenger's examples",
            after: &["build"],
            command: Box::new(|| Ok(daemon::build_beside_command(&["-p", "forebay-messenger", "--examples"]))),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "build-rados",
            title: "the RADOS client's examples",
            after: &["build"],
            command: Box::new(|| Ok(daemon::build_beside_command(&["-p", "forebay-rados", "--examples"]))),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "rados-crush",
            title: "CRUSH and Debian's crushtool",
            after: &["build-rados"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/rados-crush.sh"));
                script.env("PROGRAM", shell::target().join("release/examples/rados-lab"));
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "build-rbd-lab",
            title: "the program that shares images with RBD's clients",
            after: &["build"],
            command: Box::new(|| Ok(daemon::build_beside_command(&["-p", "forebay-rbd-lab"]))),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "rbd",
            title: "images in a real Ceph cluster, shared with RBD's own clients",
            after: &["build-rbd-lab"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/rbd.sh"));
                script.env("PROGRAM", shell::target().join("release/rbd-lab")).env("FOREBAY", daemon::program());
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "rbd-kernel",
            title: "images shared with the kernel's rbd client, in a guest",
            after: &["build-rbd-lab", "guest-kernel"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/rbd-kernel.sh"));
                script.env("PROGRAM", shell::target().join("release/rbd-lab")).env("FOREBAY", daemon::program());
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "rados-thrash",
            title: "an image in a Ceph cluster whose OSDs are killed",
            after: &["build"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/rados-thrash.sh"));
                script.env("FOREBAY", daemon::program()).arg(if quick { "20" } else { "180" });
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "rados",
            title: "the RADOS client and a real Ceph cluster",
            after: &["build-rados"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/rados.sh"));
                script.env("PROGRAM", shell::target().join("release/examples/rados-lab"));
                script.env("SEEDS", if quick { "1" } else { "1 2 3 4" });
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "rados-failures",
            title: "the RADOS client while a Ceph cluster misbehaves",
            after: &["build-rados"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/rados-failures.sh"));
                script.env("PROGRAM", shell::target().join("release/examples/rados-lab"));
                script.env("FOREBAY", daemon::program());
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "rados-config",
            title: "the RADOS client's configuration: files, monitors, DNS, no cephx",
            after: &["build-rados"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/rados-config.sh"));
                script.env("PROGRAM", shell::target().join("release/examples/rados-lab"));
                script.env("FOREBAY", daemon::program());
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "messenger-ceph",
            title: "the messenger and a real Ceph monitor",
            after: &["build-mon"],
            command: Box::new(|| {
                let mut script = shell::command(shell::root().join("test/interop/messenger-ceph.sh"));
                script.env("PROGRAM", shell::target().join("release/examples/messenger-mon"));
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "messenger-rdma",
            title: "messengers over RDMA, in a guest",
            after: &["build-mon", "guest-kernel"],
            command: Box::new(|| {
                let mut guest = shell::command(shell::root().join("test/lab/guest"));
                guest.arg(shell::root().join("test/interop/messenger-rdma.sh")).arg(daemon::program());
                guest.arg(shell::target().join("release/examples/messenger-rdma")).env("RDMA", "1");
                Ok(guest)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "build-fuzz",
            title: "fuzz targets",
            after: &["build"],
            command: Box::new(|| Ok(fuzz::build_command())),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "sim",
            title: "simulated crashes of store and image",
            after: &["build-sim"],
            command: Box::new(move || own(&["sim", "--runs", seeds, "--steps", "1", "--sweeps", sweeps])),
            counted: true,
            weight: 2,
        },
        Stage {
            name: "sim-writelog",
            title: "simulated crashes of write logs",
            after: &["build-sim"],
            command: Box::new(move || own(&["sim", "--writelog", "--runs", logs, "--sweeps", log_sweeps])),
            counted: true,
            weight: 2,
        },
        Stage {
            name: "sim-messenger",
            title: "messengers under cuts and restarts",
            after: &["build-sim"],
            command: Box::new(move || own(&["sim", "--messenger", "--runs", sessions])),
            counted: true,
            weight: 2,
        },
        Stage {
            name: "fuzz",
            title: "every fuzz target at once",
            after: &["build-fuzz"],
            command: Box::new(move || own(&["fuzz", "all", "--seconds", fuzz_seconds])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest",
            title: "the kernel's NBD client, ext4 on top",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-nbd"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest-nvme",
            title: "the kernel's NVMe/TCP initiator, two paths, restarts",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-nvme"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest-nvme-auth",
            title: "the kernel's NVMe/TCP initiator, authenticating",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-nvme-auth"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest-nvme-tls",
            title: "the kernel's NVMe/TCP initiator, through TLS",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-nvme-tls"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest-nvme-two",
            title: "one namespace of two daemons, on an image of a Ceph cluster",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-nvme-two"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "nvme-two",
            title: "reservations of one namespace of two daemons, on an image of a Ceph cluster",
            after: &["build", "build-hosts"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/nvme-two.sh"));
                script.env("PROGRAM", shell::target().join("release/nvme-two")).env("FOREBAY", daemon::program());
                script.env("ROUNDS", if quick { "6" } else { "40" });
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "iscsi",
            title: "real iSCSI initiators, the conformance suite",
            after: &["build", "build-hosts"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/iscsi.sh"));
                script.env("FOREBAY", daemon::program()).env("QUICK", if quick { "1" } else { "0" });
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "guest-iscsi",
            title: "the kernel's iSCSI initiator, ext4, restarts",
            after: &["build", "guest-kernel"],
            command: Box::new(|| own(&["guest-iscsi"])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "build-arm",
            title: "the kernels, for AArch64",
            after: &["build"],
            command: Box::new(|| Ok(arm(&["--no-run"]))),
            counted: false,
            weight: 1,
        },
        Stage {
            name: "arm",
            title: "the kernels on an emulated AArch64",
            after: &["build-arm"],
            command: Box::new(|| Ok(arm(&[]))),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "arm-pmem",
            title: "persistent memory on an emulated AArch64",
            after: &["build-arm"],
            command: Box::new(|| {
                let mut test = arm_of("forebay-reactor", &["--lib"], &["pmem"]);
                // QEMU before 8.2 says that its largest processor has `dc cvap`, and knows it not in user mode; this
                // one has `dc cvac` only.
                test.env("QEMU_CPU", "cortex-a72");
                Ok(test)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "peers",
            title: "byte-identity with ISA-L and jerasure",
            after: &["build"],
            command: Box::new(|| {
                let mut test = shell::cargo();
                test.args(["test", "--quiet", "--manifest-path", "test/peers/Cargo.toml"]);
                test.env_remove("CARGO_TARGET_DIR");
                Ok(test)
            }),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "kill",
            title: "kill -9 under fio verify",
            after: &["build"],
            command: Box::new(move || own(&["kill", "--rounds", kills])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "kill-log",
            title: "kill -9 with a write log",
            after: &["build"],
            command: Box::new(move || own(&["kill", "--log", "--rounds", kills])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "kill-log-ceph",
            title: "kill -9 with a write log before a Ceph cluster",
            after: &["build"],
            command: Box::new(move || own(&["kill", "--log", "--ceph", "--rounds", ceph_kills])),
            counted: true,
            weight: 1,
        },
        Stage {
            name: "pmem-kill",
            title: "a guest's persistent memory under power failures",
            after: &["build", "guest-kernel"],
            command: Box::new(move || {
                let mut script = shell::command(shell::root().join("test/interop/pmem-kill.sh"));
                script.env("FOREBAY", daemon::program()).arg(failures);
                Ok(script)
            }),
            counted: true,
            weight: 1,
        },
    ]
}

/// The tests of the kernels, cross-compiled and run in user-mode emulation, one program a core.
fn arm(more: &[&str]) -> Command {
    arm_of("forebay-accel", &["--lib", "--tests"], more)
}

/// Tests of a crate, cross-compiled and run in user-mode emulation: which of its targets, and which tests of these.
fn arm_of(package: &str, targets: &[&str], more: &[&str]) -> Command {
    let mut test = shell::cargo();
    test.args(["test", "--quiet", "-p", package]).args(targets).args(["--target", "aarch64-unknown-linux-gnu"]);
    test.args(more);
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
    let runner = "qemu-aarch64-static -L /usr/aarch64-linux-gnu";
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    test
}

/// One of our own chores, as a command.
fn own(words: &[&str]) -> Result<Command> {
    let mut command = shell::command(std::env::current_exe()?);
    command.args(words);
    Ok(command)
}
