//! Forebay's virtio-scsi devices under the driver, and under hostile hosts.
//!
//! [`OurServer::start_scsi`] starts two devices that lead to the same units, 0 and up, for two initiators.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_load::Dice;
use forebay_vhost_host::block::SECTOR;
use forebay_vhost_host::hostile::{self, pattern};
use forebay_vhost_host::memory::MemoryLayout;
use forebay_vhost_host::message::feature;
use forebay_vhost_host::scsi::cdb::{self, reservation_type, reserve_out, vpd};
use forebay_vhost_host::scsi::control::{EVENT_SIZE, event, notification, reset_reason, task_function};
use forebay_vhost_host::scsi::data::vpd_page;
use forebay_vhost_host::scsi::{ScsiFieldSizes, response, status, unit_address, unit_number};
use forebay_vhost_host::{
    FrontEnd, FrontEndOptions, FrontEndStage, ScsiHost, ScsiHostCommand, ScsiHostCompletion, ScsiHostControl,
};

use crate::ours::eventually;
use crate::server::{OurServer, SIZE};

/// Features that change how rings work.
const RINGS: [u64; 4] = [feature::RING_PACKED, feature::INDIRECT_DESC, feature::EVENT_IDX, feature::IN_ORDER];
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of a unit that comes and goes.
const GUEST_LUN: u16 = 300;

fn connect(server: &OurServer, options: &FrontEndOptions) -> ScsiHost {
    ScsiHost::connect(&server.device(0), options).expect("the device accepts it")
}

/// Connects a host to each device, whose unit 0 is ready.
fn two_hosts(server: &OurServer) -> [ScsiHost; 2] {
    [0, 1].map(|device| {
        let mut host = ScsiHost::connect(&server.device(device), &FrontEndOptions::scsi(1)).expect("accepted");
        host.ready(0).expect("ready");
        host
    })
}

/// Writes and reads at random places with random segmentation, against a copy in memory.
fn exercise(host: &mut ScsiHost, lun: u16, seed: u64, rounds: u64) {
    const BLOCKS: u64 = 2048;
    let mut dice = Dice::new(seed);
    let mut copy = vec![0_u8; (BLOCKS * SECTOR) as usize];
    host.write(lun, 0, &copy).expect("written");
    for round in 0..rounds {
        let queue = dice.below(host.request_queues());
        let mut commands = Vec::new();
        let mut places = Vec::new();
        // Commands of a batch do not overlap: each is in a part of its own.
        for part in 0..4_u64 {
            let count = 1 + dice.below(32) as u64;
            let lba = part * BLOCKS / 4 + dice.below((BLOCKS / 4 - count) as usize) as u64;
            let lengths: Vec<u32> = (0..dice.below(5)).map(|_| dice.below(3000) as u32).collect();
            let mut command = match dice.once_in(2) {
                true => ScsiHostCommand::write(lun, lba, &pattern(lba, count, round)).split(&lengths, &[]),
                false => ScsiHostCommand::read(lun, lba, count as u32).split(&[], &lengths),
            };
            command.misaligned_by = dice.below(4) as u64;
            places.push((lba * SECTOR) as usize..((lba + count) * SECTOR) as usize);
            commands.push(command);
        }
        let done = host.run_all(queue, &commands).expect("completed");
        for ((command, place), completion) in commands.iter().zip(places).zip(done) {
            let data = completion.ok();
            match command.data_in {
                0 => copy[place].copy_from_slice(&command.data_out),
                _ => assert_eq!(data, copy[place], "seed {seed}, round {round}"),
            }
        }
    }
    assert_eq!(host.read(lun, 0, BLOCKS as u32).expect("read"), copy);
}

#[test]
fn data_are_read_as_they_were_written_with_all_kinds_of_rings() {
    let server = OurServer::start_scsi(4, 2);
    for choice in 0..16_u64 {
        let features = (0..4).filter(|bit| choice >> bit & 1 == 1).map(|bit| RINGS[bit]).sum::<u64>();
        let options =
            FrontEndOptions { by_slots: choice % 3 == 0, is_polled: choice % 5 == 0, ..FrontEndOptions::scsi(4) };
        let mut host = connect(&server, &options.with(features));
        assert_eq!(host.front_end.features & RINGS.iter().sum::<u64>(), features);
        for lun in 0..2 {
            host.ready(lun).expect("ready");
            exercise(&mut host, lun, choice, 20);
        }
    }
}

#[test]
fn memory_may_have_any_layout() {
    let server = OurServer::start_scsi(1, 1);
    for layout in [MemoryLayout::single(16 << 20), MemoryLayout::adjacent(4, 16 << 20)] {
        let mut host = connect(&server, &FrontEndOptions { memory: layout, ..FrontEndOptions::scsi(1) });
        exercise(&mut host, 0, 9, 20);
    }
}

#[test]
fn units_say_what_they_are() {
    let server = OurServer::start_scsi(3, 2);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    assert_eq!((host.config.num_queues, host.config.event_info_size), (3, EVENT_SIZE));
    assert_eq!((host.sizes, host.config.max_channel), (ScsiFieldSizes::DEFAULT, 0));
    assert_eq!(host.report_luns().expect("listed"), [0, 1]);
    for lun in 0..2 {
        host.ready(lun).expect("ready");
        let standard = host.inquiry(lun, None).expect("told");
        assert!(standard[0] == 0 && standard.len() >= 36, "{standard:x?}");
        let supported = host.inquiry(lun, Some(vpd::SUPPORTED)).expect("told");
        let (_, pages) = vpd_page(&supported).expect("whole");
        for page in [vpd::SERIAL, vpd::IDENTIFICATION, vpd::BLOCK_LIMITS, vpd::CHARACTERISTICS, vpd::PROVISIONING] {
            assert!(pages.contains(&page), "{page:x} is not among {pages:x?}");
        }
        for &page in pages {
            let bytes = host.inquiry(lun, Some(page)).expect("told");
            assert_eq!(vpd_page(&bytes).expect("whole").0, page);
        }
        let capacity = host.capacity(lun).expect("told");
        assert_eq!((capacity.last_lba + 1, capacity.block_size), (SIZE as u64 / SECTOR, SECTOR as u32));
        assert_eq!(host.request_sense(lun).expect("told").code, 0);
    }
    let serials = [0, 1].map(|lun| host.inquiry(lun, Some(vpd::SERIAL)).expect("told"));
    assert_ne!(serials[0], serials[1]);
    let absent = host.inquiry(5, None).expect("told");
    assert_ne!(absent[0] >> 5, 0, "the qualifier says that there is no unit");
    let refused = host.run(0, &ScsiHostCommand::read(5, 0, 1)).expect("completed");
    assert!(!refused.is_good(), "{refused:?}");
    let elsewhere = ScsiHostCommand::read(0, 0, 1).at(unit_address(1, 0));
    assert_eq!(host.run(0, &elsewhere).expect("completed").response, response::BAD_TARGET);
}

#[test]
fn blocks_are_zeroed_unmapped_and_compared() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    host.write(0, 0, &pattern(0, 64, 1)).expect("written");
    host.synchronize(0).expect("durable");
    host.write_same(0, 8, 8, 0, &[0x5A; 512]).expect("written");
    host.write_same(0, 16, 8, cdb::UNMAP, &[0; 512]).expect("written");
    host.unmap(0, &[(24, 8), (40, 4)]).expect("unmapped");
    let found = host.read(0, 0, 64).expect("read");
    let at = |lba: usize, blocks: usize| &found[lba * 512..(lba + blocks) * 512];
    assert_eq!(at(0, 8), pattern(0, 8, 1));
    assert_eq!(at(8, 8), [0x5A; 4096]);
    assert_eq!(at(16, 16), [0; 8192]);
    assert_eq!(at(32, 8), pattern(32, 8, 1));
    assert_eq!(at(40, 4), [0; 2048]);
    assert_eq!(at(44, 20), pattern(44, 20, 1));
    let (old, new) = (pattern(50, 1, 1), pattern(50, 1, 2));
    assert!(host.compare_and_write(0, 50, &old, &new).expect("completed").is_good());
    let miscompared = host.compare_and_write(0, 50, &old, &new).expect("completed");
    assert_eq!(miscompared.additional_sense(), Some(0x1D00));
    assert_eq!(host.read(0, 50, 1).expect("read"), new);
}

#[test]
fn failures_and_residuals_are_told() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    host.ready(0).expect("ready");
    let past = host.run(0, &ScsiHostCommand::read(0, SIZE as u64 / SECTOR, 1)).expect("completed");
    assert_eq!((past.response, past.status), (response::OK, status::CHECK_CONDITION));
    assert_eq!(past.additional_sense(), Some(0x2100));
    let unknown = host.run(0, &ScsiHostCommand::new(0, [0xC1; 10])).expect("completed");
    assert_eq!(unknown.additional_sense(), Some(0x2000));
    let short = host.run(0, &ScsiHostCommand::read(0, 0, 8).reading(512)).expect("completed");
    assert_eq!(short.response, response::OVERRUN);
    let long = host.run(0, &ScsiHostCommand::read(0, 0, 1).reading(4096)).expect("completed");
    assert_eq!((long.is_good(), long.residual), (true, 4096 - 512));
    let long = host.run(0, &ScsiHostCommand::new(0, cdb::write16(0, 1)).writing(&[7; 4096])).expect("completed");
    assert_eq!((long.is_good(), long.residual), (true, 4096 - 512));
    assert_eq!(host.read(0, 0, 1).expect("read"), [7; 512]);
}

#[test]
fn fields_have_the_sizes_that_the_driver_writes() {
    let server = OurServer::start_scsi(1, 1);
    for sizes in [ScsiFieldSizes { cdb: 16, sense: 18 }, ScsiFieldSizes { cdb: 64, sense: 252 }] {
        let mut host = connect(&server, &FrontEndOptions::scsi(1));
        host.set_sizes(sizes).expect("taken");
        host.ready(0).expect("ready");
        exercise(&mut host, 0, 3, 10);
        let past = host.run(0, &ScsiHostCommand::read(0, SIZE as u64 / SECTOR, 1)).expect("completed");
        assert_eq!(past.additional_sense(), Some(0x2100));
    }
    let host = connect(&server, &FrontEndOptions::scsi(1));
    assert_eq!(host.sizes, ScsiFieldSizes::DEFAULT, "sizes are those of a connection");
}

#[test]
fn a_migration_restores_the_sizes_and_no_other_field() {
    const MIGRATION: u32 = 1;
    let server = OurServer::start_scsi(2, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    let len = host.front_end.config_bytes.len();
    let mut content = vec![0xFF; len];
    content[20..28].copy_from_slice(&[128_u32.to_le_bytes(), 64_u32.to_le_bytes()].concat());
    host.front_end.set_config(0, MIGRATION, &content).expect("restored");
    host.sizes = ScsiFieldSizes { sense: 128, cdb: 64 };
    let found = host.front_end.get_config(0, len as u32).expect("told");
    assert_eq!(found[20..28], content[20..28]);
    assert_eq!((&found[..20], &found[28..]), (&host.front_end.config_bytes[..20], &host.front_end.config_bytes[28..]));
    host.ready(0).expect("commands have these sizes");
    // Parts of it that a driver cannot write are of no account.
    host.front_end.set_config(0, MIGRATION, &[0xFF; 4]).expect("nothing to restore");
    host.front_end.set_config(28, MIGRATION, &[0xFF; 4]).expect("nothing to restore");
    host.ready(0).expect("ready");
}

#[test]
fn a_reservation_keeps_the_other_host_out() {
    let server = OurServer::start_scsi(1, 1);
    let [mut first, mut second] = two_hosts(&server);
    let write = ScsiHostCommand::write(0, 0, &[1; 512]);
    let read = ScsiHostCommand::read(0, 0, 1);
    let reserve = |host: &mut ScsiHost, action: u8, kind: u8, key: u64, service_key: u64| {
        let done = host.reserve_out(0, action, kind, key, service_key).expect("completed");
        assert!(done.is_good(), "service action {action}: {done:?}");
    };
    reserve(&mut first, reserve_out::REGISTER, 0, 0, 0xA);
    reserve(&mut first, reserve_out::RESERVE, reservation_type::WRITE_EXCLUSIVE, 0xA, 0);
    assert_eq!(second.settle(&write).expect("completed").status, status::RESERVATION_CONFLICT);
    assert!(second.settle(&read).expect("completed").is_good());
    assert!(first.settle(&write).expect("completed").is_good());
    assert_eq!(second.reservation_keys(0).expect("told"), [0xA]);
    assert_eq!(second.reservation(0).expect("told"), Some((0xA, reservation_type::WRITE_EXCLUSIVE)));
    // The second host takes the reservation over; the first one is told, and is out.
    reserve(&mut second, reserve_out::REGISTER, 0, 0, 0xB);
    reserve(&mut second, reserve_out::PREEMPT, reservation_type::EXCLUSIVE_ACCESS, 0xB, 0xA);
    let told = first.run(0, &read).expect("completed");
    assert!(matches!(told.additional_sense(), Some(0x2A03 | 0x2A05)), "{told:?}");
    assert_eq!(first.settle(&read).expect("completed").status, status::RESERVATION_CONFLICT);
    assert_eq!(first.settle(&write).expect("completed").status, status::RESERVATION_CONFLICT);
    assert!(second.settle(&write).expect("completed").is_good());
    // A reservation is of a host, and so outlives its connection.
    drop(second);
    let mut second = ScsiHost::connect(&server.device(1), &FrontEndOptions::scsi(1)).expect("accepted");
    assert!(second.settle(&write).expect("completed").is_good());
    assert_eq!(first.settle(&write).expect("completed").status, status::RESERVATION_CONFLICT);
    reserve(&mut second, reserve_out::CLEAR, 0, 0xB, 0);
    assert!(first.settle(&write).expect("completed").is_good());
    assert!(first.reservation_keys(0).expect("told").is_empty());
    assert_eq!(first.reservation(0).expect("told"), None);
}

#[test]
fn units_that_come_and_go_are_announced() {
    let server = OurServer::start_scsi(1, 1);
    for features in [0, feature::RING_PACKED | feature::EVENT_IDX] {
        let mut host = connect(&server, &FrontEndOptions::scsi(1).with(features));
        host.ready(0).expect("ready");
        for round in 0..20 {
            server.add_unit(GUEST_LUN);
            let added = host.await_event(PATIENCE).expect("announced");
            assert_eq!((added.event, added.reason), (event::TRANSPORT_RESET, reset_reason::RESCAN));
            assert_eq!(unit_number(added.lun), Some((0, GUEST_LUN)));
            assert_eq!(host.report_luns().expect("listed"), [0, GUEST_LUN]);
            host.write(GUEST_LUN, round, &pattern(round, 1, round)).expect("written");
            assert_eq!(host.read(GUEST_LUN, round, 1).expect("read"), pattern(round, 1, round));
            server.remove_unit(GUEST_LUN);
            let removed = host.await_event(PATIENCE).expect("announced");
            assert_eq!((removed.event, removed.reason), (event::TRANSPORT_RESET, reset_reason::REMOVED));
            assert_eq!(unit_number(removed.lun), Some((0, GUEST_LUN)));
            let gone = host.settle(&ScsiHostCommand::read(GUEST_LUN, 0, 1)).expect("completed");
            assert!(!gone.is_good(), "{gone:?}");
            assert_eq!(host.report_luns().expect("listed"), [0]);
        }
    }
}

#[test]
fn events_wait_for_buffers_or_are_missed() {
    let server = OurServer::start_scsi(1, 1);
    let front_end = FrontEnd::attach(&server.device(0), &FrontEndOptions::scsi(1), FrontEndStage::Running);
    let mut host = ScsiHost::over(front_end.expect("accepted")).expect("it has queues");
    host.ready(0).expect("ready");
    server.add_unit(GUEST_LUN);
    // A unit that comes and goes before the session looks is no event.
    host.read(GUEST_LUN, 0, 8).expect("read");
    server.remove_unit(GUEST_LUN);
    host.ready(0).expect("ready");
    host.post_events(4, EVENT_SIZE).expect("space");
    let told = host.await_event(PATIENCE).expect("announced");
    assert!(told.kind() == event::TRANSPORT_RESET || told.has_missed(), "{told:?}");
}

#[test]
fn short_event_buffers_harm_nobody() {
    let server = OurServer::start_scsi(1, 1);
    for length in [1, 4, 15] {
        let front_end = FrontEnd::attach(&server.device(0), &FrontEndOptions::scsi(1), FrontEndStage::Running);
        let mut host = ScsiHost::over(front_end.expect("accepted")).expect("it has queues");
        host.ready(0).expect("ready");
        host.post_events(4, length).expect("space");
        server.add_unit(GUEST_LUN);
        server.remove_unit(GUEST_LUN);
        // The host may be served or not: another one is.
        let _ = host.run(0, &ScsiHostCommand::read(0, 0, 1));
        drop(host);
        let mut host = connect(&server, &FrontEndOptions::scsi(1));
        host.ready(0).expect("ready");
        server.add_unit(GUEST_LUN);
        let added = host.await_event(PATIENCE).expect("announced");
        assert_eq!(unit_number(added.lun), Some((0, GUEST_LUN)));
        server.remove_unit(GUEST_LUN);
    }
}

#[test]
fn event_buffers_survive_a_stop_of_their_queue() {
    let server = OurServer::start_scsi(1, 1);
    for features in [0, feature::RING_PACKED] {
        let mut host = connect(&server, &FrontEndOptions::scsi(1).with(features));
        host.ready(0).expect("ready");
        for _ in 0..3 {
            let base = host.front_end.get_vring_base(1).expect("stopped");
            // No buffer was used, so all of them are still to be taken.
            assert_eq!(base & 0xFFFF, host.front_end.queues[1].ring.resume_base() & 0xFFFF);
            host.front_end.start_queue(1, base).expect("started");
            server.add_unit(GUEST_LUN);
            assert_eq!(host.await_event(PATIENCE).expect("announced").reason, reset_reason::RESCAN);
            server.remove_unit(GUEST_LUN);
            assert_eq!(host.await_event(PATIENCE).expect("announced").reason, reset_reason::REMOVED);
        }
    }
}

/// Stops all rings of a host; returns their positions.
fn stop(host: &ScsiHost) -> Vec<u32> {
    let queues = 0..host.front_end.queues.len() as u32;
    queues.map(|queue| host.front_end.get_vring_base(queue).expect("stopped")).collect()
}

/// Starts all rings of a host at their positions.
fn resume(host: &mut ScsiHost, bases: &[u32]) {
    for (queue, &base) in bases.iter().enumerate() {
        host.front_end.start_queue(queue, base).expect("started");
    }
}

#[test]
fn units_follow_the_rings_from_one_connection_to_another() {
    const RESERVE_6: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
    let server = OurServer::start_scsi(2, 1);
    let [mut source, mut other] = two_hosts(&server);
    source.write(0, 0, &pattern(0, 8, 1)).expect("written");
    assert!(source.run(0, &ScsiHostCommand::new(0, RESERVE_6)).expect("completed").is_good());
    // A guest that is paused and goes on keeps its session, and with it what it has reserved.
    let bases = stop(&source);
    resume(&mut source, &bases);
    let read = ScsiHostCommand::read(0, 0, 8);
    assert_eq!(source.run(0, &read).expect("completed").ok(), pattern(0, 8, 1));
    assert_eq!(other.run(0, &read).expect("completed").status, status::RESERVATION_CONFLICT);
    // Connected during a migration, and back from it when it fails: the other monitor is never disconnected.
    let mut destination = connect(&server, &FrontEndOptions::scsi(2));
    let bases = stop(&source);
    let told = destination.run(1, &read).expect("completed");
    assert_eq!(told.additional_sense().map(|code| code >> 8), Some(0x29), "{told:?}");
    assert_eq!(destination.run(0, &read).expect("completed").ok(), pattern(0, 8, 1));
    assert!(other.run(0, &read).expect("completed").is_good(), "the reservation ended with the source's session");
    stop(&destination);
    resume(&mut source, &bases);
    let told = source.run(0, &read).expect("completed");
    assert_eq!(told.additional_sense().map(|code| code >> 8), Some(0x29), "{told:?}");
    exercise(&mut source, 0, 5, 10);
    server.add_unit(GUEST_LUN);
    assert_eq!(source.await_event(PATIENCE).expect("announced").reason, reset_reason::RESCAN);
    assert_eq!(destination.take_event().expect("no violation"), None);
}

#[test]
fn a_resize_is_announced() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    host.ready(0).expect("ready");
    server.resize(2 * SIZE);
    let changed = host.await_event(PATIENCE).expect("announced");
    assert_eq!((changed.changed_parameter(), unit_number(changed.lun)), (Some(0x2A09), Some((0, 0))));
    assert_eq!(host.capacity(0).expect("told").last_lba + 1, 2 * SIZE as u64 / SECTOR);
}

#[test]
fn without_events_there_are_unit_attentions() {
    let server = OurServer::start_scsi(1, 1);
    let mut options = FrontEndOptions::scsi(1);
    options.features &= !(feature::SCSI_HOTPLUG | feature::SCSI_CHANGE);
    let mut host = connect(&server, &options);
    host.ready(0).expect("ready");
    server.resize(2 * SIZE);
    let ready = ScsiHostCommand::new(0, cdb::test_unit_ready());
    eventually("a unit attention about the capacity", || {
        host.run(0, &ready).expect("completed").additional_sense() == Some(0x2A09)
    });
    server.add_unit(GUEST_LUN);
    eventually("a unit attention about the list of units", || {
        host.run(0, &ready).expect("completed").additional_sense() == Some(0x3F0E)
    });
    assert_eq!(host.take_event().expect("no violation"), None);
}

/// Submits reads that wait for their volume, and waits until the device has them.
fn held_reads(server: &OurServer, host: &mut ScsiHost, tags: std::ops::Range<u64>) {
    server.hold(true);
    let reads: Vec<_> = tags.clone().map(|tag| ScsiHostCommand::read(0, tag, 1).tagged(tag)).collect();
    host.submit_all(0, &reads).expect("space");
    tags.for_each(|tag| await_taken(host, tag));
}

/// Waits until the device has a command.
fn await_taken(host: &mut ScsiHost, tag: u64) {
    eventually("the device has the command", || {
        let response = host.manage(task_function::QUERY_TASK, unit_address(0, 0), tag).expect("a reply");
        response == response::FUNCTION_SUCCEEDED
    });
}

/// Returns whether a completion is one of a command that was aborted, or had been executed before that.
fn is_aborted_or_good(done: &ScsiHostCompletion) -> bool {
    let is_aborted = [response::ABORTED, response::RESET].contains(&done.response);
    is_aborted || done.is_good() || done.response == response::OK && done.status == status::TASK_ABORTED
}

#[test]
fn tasks_are_queried_and_aborted() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    host.ready(0).expect("ready");
    let unit = unit_address(0, 0);
    assert_eq!(host.manage(task_function::QUERY_TASK, unit, 99).expect("a reply"), response::OK);
    assert_eq!(host.manage(task_function::QUERY_TASK_SET, unit, 0).expect("a reply"), response::OK);
    assert_eq!(host.manage(task_function::ABORT_TASK, unit, 99).expect("a reply"), response::OK);
    held_reads(&server, &mut host, 100..104);
    let query = host.manage(task_function::QUERY_TASK_SET, unit, 0).expect("a reply");
    assert_eq!(query, response::FUNCTION_SUCCEEDED);
    let abort = ScsiHostControl::task_management(task_function::ABORT_TASK, unit, 102);
    let id = host.submit_control(&abort).expect("space");
    server.hold(false);
    let reply = host.await_control_reply(host.deadline()).expect("a reply");
    assert_eq!((reply.id, reply.response), (id, response::OK));
    for _ in 0..4 {
        let done = host.await_completion(0, host.deadline()).expect("completed");
        assert!(is_aborted_or_good(&done), "{done:?}");
    }
    assert_eq!(host.manage(task_function::QUERY_TASK_SET, unit, 0).expect("a reply"), response::OK);
    for function in [8, u32::MAX] {
        assert_eq!(host.manage(function, unit, 0).expect("a reply"), response::FUNCTION_REJECTED);
    }
    let absent = host.manage(task_function::LOGICAL_UNIT_RESET, unit_address(0, 77), 0).expect("a reply");
    assert!([response::INCORRECT_LUN, response::BAD_TARGET].contains(&absent), "{absent}");
    let elsewhere = host.manage(task_function::LOGICAL_UNIT_RESET, unit_address(3, 0), 0).expect("a reply");
    assert_eq!(elsewhere, response::BAD_TARGET);
}

#[test]
fn what_ends_long_after_the_connection_leaves_the_guest_alone() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    host.ready(0).expect("ready");
    held_reads(&server, &mut host, 100..104);
    // The export does not wait long for a volume that does not complete them.
    server.detach();
    server.attach();
    let memory = |host: &ScsiHost| {
        let regions = host.front_end.memory.regions();
        let mut bytes = vec![0; regions[0].description().size as usize];
        host.front_end.memory.read(regions[0].description().guest, &mut bytes).expect("within");
        bytes
    };
    let before = memory(&host);
    server.hold(false);
    // Its rings begin when the requests of the former connection have ended.
    connect(&server, &FrontEndOptions::scsi(1)).ready(0).expect("ready");
    assert!(memory(&host) == before, "the memory was written");
}

#[test]
fn a_reset_ends_the_commands_of_both_hosts() {
    let server = OurServer::start_scsi(1, 1);
    let [mut first, mut second] = two_hosts(&server);
    held_reads(&server, &mut first, 10..14);
    let reset = ScsiHostControl::task_management(task_function::LOGICAL_UNIT_RESET, unit_address(0, 0), 0);
    second.submit_control(&reset).expect("space");
    server.hold(false);
    assert_eq!(second.await_control_reply(second.deadline()).expect("a reply").response, response::OK);
    for _ in 0..4 {
        let done = first.await_completion(0, first.deadline()).expect("completed");
        assert!(is_aborted_or_good(&done), "{done:?}");
    }
    for host in [&mut first, &mut second] {
        let told = host.run(0, &ScsiHostCommand::new(0, cdb::test_unit_ready())).expect("completed");
        assert_eq!(told.additional_sense().map(|code| code >> 8), Some(0x29), "{told:?}");
        host.ready(0).expect("ready");
        host.read(0, 0, 8).expect("read");
    }
}

#[test]
fn notifications_are_queried() {
    let server = OurServer::start_scsi(1, 1);
    let mut host = connect(&server, &FrontEndOptions::scsi(1));
    let asked = notification::OPERATIONAL_CHANGE | notification::MEDIA_CHANGE;
    for request in [ScsiHostControl::query, ScsiHostControl::subscribe] {
        let reply = host.control(&request(unit_address(0, 0), asked)).expect("a reply");
        assert_eq!((reply.response, reply.notifications), (response::OK, Some(0)), "a disk has none of them");
    }
}

#[test]
fn what_cannot_be_executed_twice_is_not_after_a_crash() {
    for features in [0, feature::RING_PACKED] {
        let mut server = OurServer::start_scsi(1, 1);
        let options = FrontEndOptions { inflight: true, ..FrontEndOptions::scsi(1) };
        let mut host = connect(&server, &options.with(features));
        host.ready(0).expect("ready");
        let (old, new) = (vec![0; SECTOR as usize], pattern(0, 1, 1));
        held_reads(&server, &mut host, 100..101);
        let compared = [old.clone(), new].concat();
        let command = ScsiHostCommand::new(0, cdb::compare_and_write(0, 1)).writing(&compared).tagged(1);
        host.submit_all(0, &[command]).expect("space");
        await_taken(&mut host, 1);
        server.crash();
        host.resume(&server.device(0)).expect("resumed");
        let mut done: Vec<_> = host.completed.drain(..).map(|(_, completion)| completion).collect();
        while done.len() < 2 {
            done.push(host.await_completion(0, host.deadline()).expect("completed"));
        }
        let in_doubt = done.iter().filter(|done| done.response == response::RESET).count();
        assert_eq!(in_doubt, 1, "{done:?}");
        host.ready(0).expect("ready");
        assert_eq!(host.read(0, 0, 1).expect("read"), old);
    }
}

#[test]
fn commands_in_flight_are_executed_again_after_a_crash() {
    for features in [0, feature::RING_PACKED, feature::IN_ORDER, feature::RING_PACKED | feature::IN_ORDER] {
        let mut server = OurServer::start_scsi(2, 1);
        let options =
            FrontEndOptions { inflight: true, ..FrontEndOptions::scsi(2) }.with(features | feature::EVENT_IDX);
        let mut host = connect(&server, &options);
        for round in 0..4_u64 {
            host.ready(0).expect("ready");
            server.hold(true);
            let mut commands = BTreeMap::new();
            for queue in 0..2_u64 {
                let writes: Vec<_> = (0..8)
                    .map(|at| round * 128 + queue * 64 + at * 8)
                    .map(|lba| ScsiHostCommand::write(0, lba, &pattern(lba, 8, round)))
                    .collect();
                let submitted = host.submit_all(queue as usize, &writes).expect("space");
                let ids = submitted.iter().map(|command| (queue as usize, command.id));
                commands.extend(ids.zip(writes));
            }
            if round % 2 == 0 {
                // The device has taken all of them, and completed none.
                let taken = || server.stats.connections().iter().map(|live| live.numbers.kicks).sum::<u64>() > 0;
                eventually("the device takes commands", taken);
            }
            server.crash();
            host.resume(&server.device(0)).expect("resumed");
            let mut done: Vec<_> = host.completed.drain(..).collect();
            for queue in 0..2 {
                while host.front_end.queues[queue + 2].in_flight() > 0 {
                    done.push((queue, host.await_completion(queue, host.deadline()).expect("completed")));
                }
            }
            assert_eq!(done.len(), 16, "features {features:#x}, round {round}");
            for (queue, completion) in done {
                let command = &commands[&(queue, completion.id)];
                // A new device has unit attentions for the first ones, and a host repeats those.
                if !completion.is_good() {
                    assert!(completion.is_transient(), "{completion:?}");
                    assert!(host.settle(command).expect("completed").is_good());
                }
            }
            let data = host.read(0, round * 128, 128).expect("read");
            for lba in (0..128).step_by(8) {
                let found = &data[lba * 512..(lba + 8) * 512];
                assert_eq!(found, pattern(round * 128 + lba as u64, 8, round), "features {features:#x}");
            }
            // Buffers of the event queue are those from before the crash.
            server.add_unit(GUEST_LUN);
            assert_eq!(host.await_event(PATIENCE).expect("announced").reason, reset_reason::RESCAN);
        }
    }
}

#[test]
fn hostile_hosts_harm_nobody_else() {
    let server = OurServer::start_scsi(2, 2);
    hostile::run_all_scsi(&server).assert();
}
