//! Stages of `make test`, in the order in which they begin where nothing else decides: builds when something needs them,
//! and what tells most in little time first, so that a short budget is spent on it.

use std::process::Command;

use super::stage::{Length, Stage, own, script, script_with};
use crate::{daemon, fuzz, shell};

/// The stages of a whole run.
pub(super) fn stages() -> Vec<Stage> {
    let mut all = first();
    all.extend(data_path());
    all.extend(clusters());
    all.extend(guests());
    all.extend(rest());
    all
}

/// Returns the first stages: the programs, their unit tests, and a real client.
fn first() -> Vec<Stage> {
    vec![
        Stage::build("guest-kernel", "fetch the guest's kernel, once", &[], 12, || {
            let mut guest = shell::command(shell::root().join("test/lab/guest"));
            guest.arg("--prepare");
            Ok(guest)
        })
        .busy(0.0),
        Stage::build("guest-debian", "build an image of Debian for guests to boot from, once", &[], 100, || {
            Ok(shell::command(shell::root().join("test/lab/debian-image")))
        })
        .busy(0.4),
        Stage::build("build", "the daemon, in release", &[], 240, || Ok(daemon::build_command())).busy(2.0),
        Stage::build("build-programs", "the simulator, initiators, clients", &["build"], 90, || {
            let mut build = daemon::build_beside_command(&["-p", "forebay-sim"]);
            build.args(["-p", "forebay-malformed", "-p", "forebay-iscsi-host", "-p", "forebay-nvme-host"]);
            build.args(["-p", "forebay-rbd-lab", "-p", "forebay-messenger-lab", "-p", "forebay-replication-model"]);
            Ok(build)
        })
        .busy(1.5),
        // After the first one, which leaves compiled C for it, and beside the tests of programs, which wait a lot.
        Stage::build("build-tests", "unit and property tests", &["build"], 300, || {
            let mut build = shell::cargo();
            build.args(["test", "--quiet", "--workspace", "--no-run"]);
            Ok(build)
        })
        .busy(1.5),
        Stage::tests("interop", "real NBD clients", &["build"], |_| Ok(script("nbd.sh"))).takes(25).busy(0.4),
        Stage::tests("interop-tls", "real NBD clients, through TLS", &["build"], |_| Ok(script("nbd-tls.sh")))
            .takes(15)
            .busy(0.4),
        Stage::tests("unit", "unit and property tests", &["build-tests"], |_| {
            let mut test = shell::cargo();
            test.args(["test", "--quiet", "--workspace", "--no-fail-fast"]);
            Ok(test)
        })
        .takes(330)
        // As the build before it, whose place it takes.
        .busy(1.5),
    ]
}

/// Returns the stages that find lost data on one machine: simulated crashes, and real kills.
fn data_path() -> Vec<Stage> {
    vec![
        Stage::tests("kill", "kill -9 under fio verify", &["build"], |length| {
            own(&["kill", "--rounds", &length.of(8, 20, 100).to_string()])
        })
        .long(15, 30, 145)
        .busy(0.9),
        Stage::tests("kill-log", "kill -9 with a write log", &["build"], |length| {
            own(&["kill", "--log", "--rounds", &length.of(8, 20, 100).to_string()])
        })
        .long(15, 30, 145)
        .busy(0.9),
        Stage::tests("sim-writelog", "simulated crashes of write logs", &["build-programs"], |length| {
            let (runs, sweeps) = (length.of(1000, 5000, 40_000), length.of(2, 10, 40));
            own(&["sim", "--writelog", "--jobs", "1", "--runs", &runs.to_string(), "--sweeps", &sweeps.to_string()])
        })
        .long(12, 42, 300),
        Stage::tests("sim", "simulated crashes of store and image", &["build-programs"], |length| {
            let (runs, sweeps) = (length.of(400, 2000, 16_000), length.of(2, 15, 120));
            let (runs, sweeps) = (runs.to_string(), sweeps.to_string());
            own(&["sim", "--jobs", "1", "--runs", &runs, "--steps", "1", "--sweeps", &sweeps])
        })
        .long(10, 28, 210),
        Stage::tests("store-devices", "a store on five files, two of them lost", &["build"], |_| {
            Ok(script("store-devices.sh"))
        })
        .takes(60)
        .busy(0.9),
        Stage::tests("store-ranges", "two daemons with stores on one file", &["build"], |_| {
            Ok(script("store-ranges.sh"))
        })
        .takes(30)
        .busy(0.9),
        Stage::tests("store-encryption", "encrypted images, and their master key", &["build"], |_| {
            Ok(script("store-encryption.sh"))
        })
        .takes(60)
        .busy(0.9),
        Stage::tests("sim-devices", "stores on several devices that fail", &["build-programs"], |length| {
            let runs = length.of(500, 5000, 50_000).to_string();
            own(&["sim", "--devices", "--jobs", "1", "--runs", &runs])
        })
        .long(30, 300, 3000),
        Stage::tests("sim-attachment", "volumes that get and lose write logs", &["build-programs"], |length| {
            let runs = length.of(200, 2000, 40_000).to_string();
            own(&["sim", "--attachment", "--jobs", "1", "--runs", &runs])
        })
        .long(2, 15, 300),
        Stage::tests("sim-replication", "gateways with replicated write logs", &["build-programs"], |length| {
            let runs = length.of(200, 5000, 20_000).to_string();
            own(&["sim", "--replication", "--jobs", "1", "--runs", &runs])
        })
        .long(10, 170, 680),
        Stage::tests("sim-shared", "images of a pool that several clients use", &["build-programs"], |length| {
            let runs = length.of(200, 2000, 20_000).to_string();
            own(&["sim", "--shared", "--jobs", "1", "--runs", &runs])
        })
        .long(2, 20, 200),
        Stage::tests("sim-families", "clones and snapshots under crashes", &["build-programs"], |length| {
            let runs = length.of(1000, 5000, 200_000).to_string();
            own(&["sim", "--families", "--jobs", "1", "--runs", &runs])
        })
        .long(6, 40, 1500),
        Stage::tests("sim-forward", "volumes that other daemons have open", &["build-programs"], |length| {
            let runs = length.of(300, 2000, 20_000).to_string();
            own(&["sim", "--forward", "--jobs", "1", "--runs", &runs])
        })
        .long(3, 20, 200),
        Stage::tests(
            "replication-model",
            "replicated write logs, every order of events",
            &["build-programs"],
            |length| {
                let mut model = shell::command(daemon::program().with_file_name("forebay-replication-model"));
                model.arg("--all").args(matches!(length, Length::Soak).then_some("--deep"));
                Ok(model)
            },
        )
        .long(85, 85, 800),
        Stage::tests("conduct", "the daemon idle, alone, under rubbish", &["build-programs"], |_| own(&["conduct"]))
            .takes(70)
            .busy(0.5),
        Stage::tests("malformed", "sessions that go wrong, by the million", &["build-programs"], |_| {
            own(&["malformed"])
        })
        .long(0, 0, 600)
        .only_soak(),
        Stage::tests("iscsi", "real iSCSI initiators, the conformance suite", &["build-programs"], |length| {
            let mut script = script("iscsi.sh");
            script.env("QUICK", (1 - length.of(0, 1, 1)).to_string());
            Ok(script)
        })
        .long(40, 60, 60)
        .busy(0.4),
    ]
}

/// Returns the stages that need a real Ceph cluster, which each starts for itself.
fn clusters() -> Vec<Stage> {
    vec![
        Stage::tests(
            "rbd",
            "images in a real Ceph cluster, shared with RBD's own clients",
            &["build-programs"],
            |_| Ok(script_with("rbd.sh", "rbd-lab")),
        )
        .takes(240)
        .busy(0.45),
        Stage::tests("rbd-diff", "changes and copies of images, both ways with Ceph's rbd", &["build"], |_| {
            Ok(script("rbd-diff.sh"))
        })
        .takes(120)
        .busy(0.4),
        Stage::tests(
            "rbd-manage",
            "the trash, metadata, locks, features and object maps in a real Ceph cluster, beside rbd",
            &["build-programs"],
            |_| Ok(script("rbd-manage.sh")),
        )
        .takes(145)
        .busy(0.45),
        Stage::tests(
            "rbd-qos",
            "limits of images in a real Ceph cluster, set by forebay and by rbd",
            &["build-programs"],
            |_| Ok(script("rbd-qos.sh")),
        )
        .takes(40)
        .busy(0.4),
        Stage::build("ceph-18-packages", "fetch Ceph 18.2, once", &[], 20, || {
            let mut fetch = shell::command(shell::root().join("test/lab/ceph-release"));
            fetch.arg("18.2");
            Ok(fetch)
        })
        .busy(0.0),
        Stage::tests("kill-log-ceph", "kill -9 with a write log before a Ceph cluster", &["build"], |length| {
            own(&["kill", "--log", "--ceph", "--rounds", &length.of(3, 8, 50).to_string()])
        })
        .long(30, 38, 125)
        .busy(0.5),
        Stage::tests(
            "failover",
            "write logs with replicas, taken over from daemons and networks that are lost",
            &["build-programs"],
            |length| own(&["failover", "--lease", "2s", "--rounds", &length.of(4, 10, 100).to_string()]),
        )
        .long(70, 110, 500)
        .busy(0.5),
        Stage::tests("rados", "the RADOS client and a real Ceph cluster", &["build-programs"], |length| {
            let mut script = script_with("rados.sh", "rados-lab");
            let seeds: Vec<String> = (1..=length.of(1, 1, 8)).map(|seed| seed.to_string()).collect();
            script.env("SEEDS", seeds.join(" "));
            Ok(script)
        })
        .long(130, 130, 390)
        .busy(0.3),
        Stage::tests(
            "ceph-18",
            "the RADOS client and images in a Ceph cluster of release 18.2",
            &["build-programs", "ceph-18-packages"],
            |length| {
                let mut script = script_with("ceph-18.sh", "rados-lab");
                script.env("RBD_LAB", shell::target().join("release/rbd-lab"));
                script.env("FULL", length.of(0, 0, 1).to_string());
                Ok(script)
            },
        )
        .long(90, 90, 480)
        .busy(0.8),
        Stage::tests("rados-failures", "the RADOS client while a Ceph cluster misbehaves", &["build-programs"], |_| {
            Ok(script_with("rados-failures.sh", "rados-lab"))
        })
        .takes(340)
        .busy(1.0),
        Stage::tests(
            "nvme-two",
            "reservations of one namespace of two daemons, on an image of a Ceph cluster",
            &["build-programs"],
            |length| {
                let mut script = script_with("nvme-two.sh", "nvme-two");
                script.env("ROUNDS", length.of(6, 15, 40).to_string());
                Ok(script)
            },
        )
        .long(60, 72, 105)
        .busy(0.3),
        Stage::tests(
            "gateways",
            "a gateway group whose members are killed, drained and suspended",
            &["build-programs"],
            |length| {
                let mut script = script_with("gateways.sh", "nvme-two");
                script.env("ROUNDS", length.of(1, 2, 20).to_string());
                script.env("VOLUMES", length.of(20, 100, 100).to_string());
                Ok(script)
            },
        )
        .long(85, 130, 450)
        .busy(0.3),
        Stage::tests("rados-thrash", "an image in a Ceph cluster whose OSDs are killed", &["build"], |length| {
            let mut script = script("rados-thrash.sh");
            script.arg(length.of(20, 30, 360).to_string());
            Ok(script)
        })
        .long(65, 75, 405)
        .busy(0.6),
        Stage::tests(
            "rados-config",
            "the RADOS client's configuration: files, monitors, DNS, no cephx",
            &["build-programs"],
            |_| Ok(script_with("rados-config.sh", "rados-lab")),
        )
        .takes(195)
        .busy(0.3),
        Stage::tests("rados-crush", "CRUSH and Debian's crushtool", &["build-programs"], |_| {
            Ok(script_with("rados-crush.sh", "rados-lab"))
        })
        .takes(10),
        Stage::tests("messenger-ceph", "the messenger and a real Ceph monitor", &["build-programs"], |_| {
            Ok(script_with("messenger-ceph.sh", "messenger-mon"))
        })
        .takes(20)
        .busy(0.4),
    ]
}

/// Returns the stages that need a guest with its own kernel, or another host.
fn guests() -> Vec<Stage> {
    const GUEST: &[&str] = &["build", "guest-kernel"];
    const GUEST_AND_DEBIAN: &[&str] = &["build", "guest-kernel", "guest-debian"];
    // Members are upgraded from one build to another: that of the tests.
    const GUEST_AND_TESTS: &[&str] = &["build", "build-tests", "guest-kernel"];
    vec![
        Stage::tests("messenger-netns", "messengers with the link cut", &["build"], |length| {
            let cuts = ["1", "10", "60"].into_iter().take(length.of(1, 3, 3) as usize);
            let mut script = script("messenger-netns.sh");
            script.args(cuts);
            Ok(script)
        })
        .long(60, 245, 245)
        .busy(0.25),
        Stage::tests("pmem-kill", "a guest's persistent memory under power failures", GUEST, |length| {
            let mut script = script("power-kill.sh");
            script.args(["pmem", &length.of(2, 3, 20).to_string()]);
            Ok(script)
        })
        .long(60, 78, 400),
        Stage::tests("disk-kill", "a guest's disks with volatile caches under power failures", GUEST, |length| {
            let mut script = script("power-kill.sh");
            script.args(["disk", &length.of(1, 2, 20).to_string()]);
            Ok(script)
        })
        .long(40, 60, 400),
        Stage::tests("guest-nvme", "the kernel's NVMe/TCP initiator, two paths, restarts", GUEST, |_| {
            own(&["guest-nvme"])
        })
        .takes(235),
        Stage::tests("guest-iscsi", "the kernel's iSCSI initiator, ext4, restarts", GUEST, |_| own(&["guest-iscsi"]))
            .takes(120),
        Stage::tests("guest", "the kernel's NBD client, ext4 on top; images mapped to it", GUEST, |_| {
            own(&["guest-nbd"])
        })
        .takes(240),
        Stage::tests("guest-vhost", "a guest's vhost-user-blk disks, kill -9 of the daemon", GUEST, |_| {
            own(&["guest-vhost"])
        })
        .takes(110),
        Stage::tests(
            "guest-vhost-scsi",
            "a guest's disks at a vhost-user-scsi controller, added and removed",
            GUEST,
            |_| own(&["guest-vhost", "--scenario", "scsi"]),
        )
        .takes(60),
        Stage::tests(
            "guest-vhost-boot",
            "Debian booted from a vhost-user-blk disk, grown, trimmed",
            GUEST_AND_DEBIAN,
            |_| own(&["guest-vhost", "--scenario", "boot"]),
        )
        .takes(60),
        Stage::tests(
            "guest-vhost-boot-rados",
            "the same, of an image in a Ceph cluster with a write log",
            GUEST_AND_DEBIAN,
            |_| own(&["guest-vhost", "--scenario", "boot", "--pool", "rados"]),
        )
        .takes(110)
        .busy(0.9),
        Stage::tests(
            "guest-vhost-migrate",
            "live migration of a guest with a vhost-user-blk disk, under a verified load",
            GUEST_AND_DEBIAN,
            |length| {
                let rounds = length.of(1, 2, 20).to_string();
                own(&["guest-vhost", "--scenario", "migrate", "--rounds", &rounds])
            },
        )
        .long(70, 85, 300)
        .busy(1.5),
        Stage::tests(
            "rbd-kernel",
            "images shared with the kernel's rbd client, in a guest",
            &["build-programs", "guest-kernel"],
            |_| Ok(script_with("rbd-kernel.sh", "rbd-lab")),
        )
        .takes(55),
        Stage::tests("guest-nvme-two", "one namespace of two daemons, on an image of a Ceph cluster", GUEST, |_| {
            own(&["guest-nvme-two"])
        })
        .takes(100),
        Stage::tests(
            "guest-gateways",
            "a gateway group whose members fail, with native NVMe multipath",
            GUEST_AND_TESTS,
            |length| own(&["guest-gateways", "--drill", "--rounds", &length.of(3, 10, 40).to_string()]),
        )
        .long(150, 260, 900)
        .busy(0.6),
        Stage::tests(
            "guest-gateways-iscsi",
            "a gateway group whose members fail, with dm-multipath",
            GUEST_AND_TESTS,
            |length| own(&["guest-gateways", "--front", "iscsi", "--rounds", &length.of(2, 10, 40).to_string()]),
        )
        .long(70, 210, 700)
        .busy(0.6),
        Stage::tests("guest-nvme-tls", "the kernel's NVMe/TCP initiator, through TLS", GUEST, |_| {
            own(&["guest-nvme-tls"])
        })
        .takes(70),
        Stage::tests("guest-nvme-auth", "the kernel's NVMe/TCP initiator, authenticating", GUEST, |_| {
            own(&["guest-nvme-auth"])
        })
        .takes(35),
        Stage::tests("guest-documented", "README and operations, every command as printed", GUEST, |_| {
            own(&["guest-documented"])
        })
        .takes(300),
        Stage::tests("messenger-rdma", "messengers over RDMA, in a guest", &["build-programs", "guest-kernel"], |_| {
            let mut guest = shell::command(shell::root().join("test/lab/guest"));
            guest.arg(shell::root().join("test/interop/messenger-rdma.sh")).arg(daemon::program());
            guest.arg(shell::target().join("release/messenger-rdma")).env("RDMA", "1");
            Ok(guest)
        })
        .takes(140),
        Stage::tests(
            "guest-vhost-migrate-group",
            "the same between two daemons of a gateway group, which are killed",
            GUEST_AND_DEBIAN,
            |length| {
                let rounds = length.of(1, 1, 6).to_string();
                own(&["guest-vhost", "--scenario", "migrate-group", "--rounds", &rounds])
            },
        )
        .long(150, 150, 600)
        .busy(1.0),
        Stage::tests("guest-replication-rdma", "write logs replicated over RDMA, in a guest", GUEST, |_| {
            Ok(script("replication-rdma.sh"))
        })
        .takes(75),
    ]
}

/// Returns the remaining stages: messengers in the simulator, fuzz targets, kernels beside peers' and on AArch64.
fn rest() -> Vec<Stage> {
    vec![
        Stage::tests("sim-messenger", "messengers under cuts and restarts", &["build-programs"], |length| {
            let runs = length.of(500, 5000, 20_000).to_string();
            own(&["sim", "--messenger", "--jobs", "1", "--runs", &runs])
        })
        .long(2, 10, 40),
        Stage::build("build-fuzz", "fuzz targets", &["build"], 270, || Ok(fuzz::build_command())),
        Stage::tests("fuzz", "every fuzz target at once", &["build-fuzz"], |length| {
            own(&["fuzz", "all", "--seconds", &length.of(10, 30, 600).to_string()])
        })
        .long(15, 35, 605)
        .busy(2.0),
        Stage::build("build-arm", "the kernels, for AArch64", &["build"], 205, || Ok(arm(&["--no-run"]))),
        Stage::tests("arm", "the kernels on an emulated AArch64", &["build-arm"], |_| Ok(arm(&[]))).takes(35),
        Stage::tests("arm-pmem", "persistent memory on an emulated AArch64", &["build-arm"], |_| {
            let mut test = arm_of("forebay-reactor", &["--lib"], &["pmem"]);
            // QEMU before 8.2 says that its largest processor has `dc cvap`, and knows it not in user mode; this one has
            // `dc cvac` only.
            test.env("QEMU_CPU", "cortex-a72");
            Ok(test)
        })
        .takes(25),
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
    // Libraries in C, compiled for these tests alone: optimising them takes longer than it saves.
    for library in ["aws-lc-sys", "libdeflate-sys", "zstd-sys"] {
        test.args(["--config", &format!("profile.dev.package.{library}.opt-level=1")]);
    }
    test.args(more);
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");
    let runner = "qemu-aarch64-static -L /usr/aarch64-linux-gnu";
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    test
}
