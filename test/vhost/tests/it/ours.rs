//! Forebay's server under the driver, and under hostile front-ends.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_vhost_host::block::{SECTOR, SectorRange};
use forebay_vhost_host::hostile::{self, pattern};
use forebay_vhost_host::memory::RegionLayout;
use forebay_vhost_host::message::feature;
use forebay_vhost_host::{
    DeviceUnderTest, FrontEnd, FrontEndError, FrontEndOptions, FrontEndStage, ResumableFrontEnd, VirtioBlkRequest,
};

use crate::peer::{connect, exercise, exercise_layouts, exercise_regions, exercise_stops};
use crate::server::{OurServer, SIZE, servers};

/// Features that change how rings work.
const RINGS: [u64; 4] = [feature::RING_PACKED, feature::INDIRECT_DESC, feature::EVENT_IDX, feature::IN_ORDER];

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Waits until a condition holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = soon();
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::yield_now();
    }
}

#[test]
fn data_are_read_as_they_were_written_with_all_kinds_of_rings() {
    for server in servers(4) {
        for choice in 0..16_u64 {
            let features = (0..4).filter(|bit| choice >> bit & 1 == 1).map(|bit| RINGS[bit]).sum::<u64>();
            let (by_slots, is_polled) = (choice % 3 == 0, choice % 5 == 0);
            let options = FrontEndOptions { by_slots, is_polled, queues: 4, ..FrontEndOptions::default() };
            let mut front_end = connect(&server, &options.with(features));
            assert_eq!(front_end.features & RINGS.iter().sum::<u64>(), features);
            exercise(&mut front_end, choice, 40);
        }
    }
}

#[test]
fn memory_may_have_any_layout() {
    servers(1).for_each(|server| exercise_layouts(&server));
}

#[test]
fn all_types_of_requests_are_served() {
    for server in servers(1) {
        let mut front_end = connect(&server, &FrontEndOptions::default());
        let id = front_end.run(0, &VirtioBlkRequest::get_id()).expect("completed").ok();
        assert_eq!(id, b"serial-0\0\0\0\0\0\0\0\0\0\0\0\0");
        front_end.write_sectors(0, &pattern(0, 32, 1)).expect("written");
        front_end.flush().expect("flushed");
        let range = |sector, count| SectorRange { sector, count, flags: 0 };
        front_end.run(0, &VirtioBlkRequest::write_zeroes(&[range(8, 8)])).expect("completed").ok();
        front_end.run(0, &VirtioBlkRequest::discard(&[range(16, 8), range(28, 4)])).expect("completed").ok();
        let found = front_end.read_sectors(0, 32 * 512).expect("read");
        assert_eq!(found[..4096], pattern(0, 8, 1));
        assert_eq!(found[4096..12288], [0; 8192]);
        assert_eq!(found[12288..14336], pattern(24, 4, 1));
        assert_eq!(found[14336..], [0; 2048]);
        let unknown = front_end.run(0, &VirtioBlkRequest::new(0x99, 0, &[], 0)).expect("completed");
        assert_eq!(unknown.status, forebay_vhost_host::block::UNSUPP);
        let past = front_end.run(0, &VirtioBlkRequest::read(SIZE as u64 / SECTOR, 512)).expect("completed");
        assert_eq!(past.status, forebay_vhost_host::block::IOERR);
    }
}

#[test]
fn regions_come_and_go_while_the_device_runs() {
    servers(1).for_each(|server| exercise_regions(&server));
}

#[test]
fn a_queue_is_stopped_and_goes_on() {
    for server in servers(2) {
        for features in [0, feature::RING_PACKED] {
            let options = FrontEndOptions { queues: 2, inflight: true, ..FrontEndOptions::default() };
            exercise_stops(&server, &options.with(features));
        }
    }
}

#[test]
fn memory_is_added_when_all_cores_know_it() {
    let server = servers(1).last().expect("queues on several cores");
    let options = FrontEndOptions { by_slots: true, ..FrontEndOptions::default() };
    let mut front_end = connect(&server, &options);
    // The queue's core: the other device's queue is on that of the volumes.
    let blocked = server.block_core(1);
    std::thread::scope(|scope| {
        let front_end = &mut front_end;
        let adding = scope.spawn(move || front_end.add_region(&RegionLayout { guest: 1 << 32, size: 1 << 20 }));
        let mut other = FrontEnd::connect(&server.device(1), &FrontEndOptions::default()).expect("accepted");
        exercise(&mut other, 1, 20);
        assert!(!adding.is_finished(), "acknowledged before the queue knows of it");
        drop(blocked);
        adding.join().expect("no panic").expect("added");
    });
    front_end.write_sectors(0, &pattern(0, 8, 1)).expect("written");
    assert_eq!(front_end.read_sectors(0, 4096).expect("read"), pattern(0, 8, 1));
}

#[test]
fn a_base_is_told_when_nothing_is_in_flight() {
    const REQUESTS: u64 = 8;
    for server in servers(1) {
        let mut front_end = connect(&server, &FrontEndOptions::default());
        front_end.write_sectors(0, &pattern(0, 8, 1)).expect("written");
        server.hold(true);
        let reads: Vec<_> = (0..REQUESTS).map(|_| VirtioBlkRequest::read(0, 4096)).collect();
        front_end.submit_all(0, &reads).expect("space");
        // Those that it has not taken when it is stopped would stay in the ring.
        let submitted = || server.fence.submitted.load(Ordering::SeqCst);
        eventually("the requests are at the volume", || submitted() == 1 + REQUESTS as usize);
        std::thread::scope(|scope| {
            let stopped = scope.spawn(|| front_end.get_vring_base(0).expect("stopped"));
            // The server has much time to stop the ring, and must not.
            let mut other = FrontEnd::connect(&server.device(1), &FrontEndOptions::default()).expect("accepted");
            exercise(&mut other, 1, 20);
            server.hold(false);
            stopped.join().expect("no panic");
        });
        for _ in 0..REQUESTS {
            let done =
                front_end.queues[0].completion().expect("no violation").expect("completed before the base was told");
            assert_eq!(done.ok(), pattern(0, 8, 1));
        }
    }
}

#[test]
fn requests_in_flight_are_executed_again_after_a_crash() {
    for features in [0, feature::RING_PACKED, feature::IN_ORDER, feature::RING_PACKED | feature::IN_ORDER] {
        for mut server in servers(2) {
            let options =
                FrontEndOptions { queues: 2, ..FrontEndOptions::default() }.with(features | feature::EVENT_IDX);
            let mut resumable = ResumableFrontEnd::connect(&server.socket(), &options).expect("connected");
            for round in 0..4_u64 {
                server.hold(true);
                for queue in 0..2_u64 {
                    let writes: Vec<_> = (0..8)
                        .map(|at| round * 128 + queue * 64 + at * 8)
                        .map(|sector| VirtioBlkRequest::write(sector, &pattern(sector, 8, round)))
                        .collect();
                    resumable.front_end.submit_all(queue as usize, &writes).expect("space");
                }
                if round % 2 == 0 {
                    // The device has taken all of them, and completed none.
                    let taken = || server.stats.connections().iter().map(|live| live.numbers.kicks).sum::<u64>() > 0;
                    eventually("the device takes requests", taken);
                }
                server.crash();
                resumable.resume(&server.socket()).expect("resumed");
                resumable.completed.drain(..).for_each(|(_, done)| drop(done.ok()));
                for queue in 0..2 {
                    while resumable.front_end.queues[queue].in_flight() > 0 {
                        resumable.front_end.await_completion(queue, soon()).expect("completed").ok();
                    }
                }
                let data = resumable.front_end.read_sectors(round * 128, 128 * 512).expect("read");
                for sector in (0..128).step_by(8) {
                    let found = &data[sector * 512..(sector + 8) * 512];
                    assert_eq!(found, pattern(round * 128 + sector as u64, 8, round), "features {features:#x}");
                }
            }
        }
    }
}

#[test]
fn a_resize_is_announced() {
    for server in servers(1) {
        let mut front_end = connect(&server, &FrontEndOptions::default());
        server.resize(2 * SIZE);
        let channel = front_end.channel.as_ref().expect("negotiated");
        channel.await_config_change(Duration::from_secs(10)).expect("announced");
        let capacity = front_end.get_config(0, 8).expect("read");
        assert_eq!(u64::from_le_bytes(capacity.try_into().expect("8 bytes")), 2 * SIZE as u64 / SECTOR);
        front_end.write_sectors(SIZE as u64 / SECTOR, &pattern(0, 8, 1)).expect("written past the former end");
    }
}

#[test]
fn one_front_end_runs_rings_at_a_time() {
    for server in servers(1) {
        let mut source = connect(&server, &FrontEndOptions::default());
        let mut destination = connect(&server, &FrontEndOptions::default());
        source.write_sectors(0, &pattern(0, 8, 1)).expect("written");
        let read = VirtioBlkRequest::read(0, 4096);
        destination.submit_all(0, std::slice::from_ref(&read)).expect("space");
        source.write_sectors(0, &pattern(0, 8, 2)).expect("written");
        assert_eq!(destination.queues[0].in_flight(), 1);
        assert!(destination.queues[0].completion().expect("no violation").is_none(), "the source's rings run");
        source.get_vring_base(0).expect("stopped");
        assert_eq!(destination.await_completion(0, soon()).expect("completed").ok(), pattern(0, 8, 2));
    }
}

#[test]
fn rings_begin_when_all_of_the_other_front_end_have_stopped() {
    for server in servers(2) {
        let mut source = connect(&server, &FrontEndOptions { queues: 2, ..FrontEndOptions::default() });
        let mut destination = connect(&server, &FrontEndOptions::default());
        source.write_sectors(0, &pattern(0, 8, 1)).expect("written");
        destination.submit_all(0, &[VirtioBlkRequest::read(0, 4096)]).expect("space");
        source.get_vring_base(0).expect("stopped");
        for round in 2..6 {
            source.run(1, &VirtioBlkRequest::write(0, &pattern(0, 8, round))).expect("completed").ok();
            assert!(destination.queues[0].completion().expect("no violation").is_none(), "a ring of the source runs");
        }
        source.get_vring_base(1).expect("stopped");
        assert_eq!(destination.await_completion(0, soon()).expect("completed").ok(), pattern(0, 8, 5));
    }
}

#[test]
fn written_pages_are_logged() {
    for features in [0, feature::RING_PACKED] {
        for server in servers(1) {
            let mut front_end = connect(&server, &FrontEndOptions::default().with(feature::LOG_ALL | features));
            front_end.set_log_base().expect("set");
            front_end.write_sectors(0, &pattern(0, 8, 1)).expect("written");
            let before = front_end.dirty_pages().len();
            assert_eq!(front_end.read_sectors(0, 64 << 10).expect("read")[..4096], pattern(0, 8, 1));
            let dirty = front_end.dirty_pages();
            assert!(dirty.len() >= before + 16, "{before} and then {dirty:?}");
        }
    }
}

#[test]
fn the_device_may_connect_to_its_front_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = UnixListener::bind(folder.path().join("0.sock")).expect("bound");
    let _server = OurServer::connecting(folder);
    for round in 0..2 {
        let options = FrontEndOptions::default();
        let mut front_end = FrontEnd::accept(&listener, &options, FrontEndStage::Running).expect("it connects");
        exercise(&mut front_end, round, 10);
    }
}

#[test]
fn an_export_that_ends_completes_what_is_in_flight() {
    for server in servers(1) {
        let mut front_end = connect(&server, &FrontEndOptions::default());
        let writes: Vec<_> = (0..16).map(|at| VirtioBlkRequest::write(at * 8, &pattern(at * 8, 8, 1))).collect();
        front_end.submit_all(0, &writes).expect("space");
        server.detach();
        assert!(matches!(front_end.get_features(), Err(FrontEndError::Ended | FrontEndError::Io(_))));
        assert!(FrontEnd::connect(&server.socket(), &FrontEndOptions::default()).is_err(), "the socket has gone");
        eventually("connections end", || server.stats.connection_count(None) == 0);
    }
}

#[test]
fn the_socket_of_another_process_stays() {
    let server = servers(1).next().expect("a server");
    let mut front_end = connect(&server, &FrontEndOptions::default());
    server.hold(true);
    front_end.submit_all(0, &[VirtioBlkRequest::read(0, 4096)]).expect("space");
    eventually("the request is at the volume", || server.fence.submitted.load(Ordering::SeqCst) == 1);
    let socket = server.socket();
    let binding = std::thread::spawn({
        let socket = socket.clone();
        // While the export waits for the request.  A socket without a listener may be replaced.
        move || {
            eventually("the path is free", || UnixStream::connect(&socket).is_err());
            let _ = std::fs::remove_file(&socket);
            UnixListener::bind(socket).expect("bound")
        }
    });
    server.detach();
    let _listener = binding.join().expect("no panic");
    assert!(socket.exists(), "it was removed");
}

#[test]
fn hostile_front_ends_harm_nobody_else() {
    for server in servers(2) {
        hostile::run_all(&server).assert();
    }
}
