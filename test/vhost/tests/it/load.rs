//! The load generator against QEMU's storage daemon, with verified data.

use forebay_load::Pattern;
use forebay_vhost_host::DeviceUnderTest;
use forebay_vhost_host::load::{self, VhostLoad};

use crate::common::StorageDaemon;

fn asked(mode: Pattern) -> VhostLoad {
    VhostLoad {
        mode,
        block: 4096,
        depth: 16,
        queues: 2,
        queue_size: None,
        seconds: 0.2,
        once: false,
        span: Some(8 << 20),
        packed: false,
        event_idx: false,
        in_order: false,
        direct: false,
        poll: false,
        verify: true,
    }
}

#[test]
fn data_are_verified_under_load() {
    let daemon = StorageDaemon::start(1, 2);
    for (mode, event_idx, direct, poll) in [
        (Pattern::Randread, false, false, false),
        (Pattern::Randwrite, true, false, true),
        (Pattern::Read, true, true, false),
        (Pattern::Write, false, true, true),
    ] {
        let load = VhostLoad { event_idx, direct, poll, ..asked(mode) };
        let said = load::run(&daemon.socket(), &load).expect("the data are right");
        assert!(said.contains("\"iops\": ") && !said.contains("\"requests\": 0,"), "{said}");
    }
}

#[test]
fn once_is_every_block_once() {
    let daemon = StorageDaemon::start(1, 2);
    let said = load::run(&daemon.socket(), &VhostLoad { once: true, verify: false, ..asked(Pattern::Write) });
    assert!(said.expect("runs").contains("\"requests\": 2048,"));
}

#[test]
fn changed_data_are_found() {
    let daemon = StorageDaemon::start(1, 2);
    load::run(&daemon.socket(), &VhostLoad { packed: true, ..asked(Pattern::Read) })
        .expect_err("no packed queues there");
    let too_small = VhostLoad { span: Some(4096), ..asked(Pattern::Read) };
    load::run(&daemon.socket(), &too_small).expect_err("too few blocks");
}

#[test]
fn idle_devices_stand() {
    let daemon = StorageDaemon::start(3, 1);
    let sockets: Vec<_> = (0..3).map(|device| daemon.device(device)).collect();
    let load = VhostLoad { queues: 1, ..asked(Pattern::Read) };
    assert_eq!(load::idle(&sockets, &load).expect("all are there").len(), 3);
}
