//! A front-end that outlives its device.

use std::time::{Duration, Instant};

use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::message::{feature, protocol};
use forebay_vhost_host::{DeviceUnderTest, FrontEndOptions, ResumableFrontEnd, VirtioBlkRequest};

use crate::common::StorageDaemon;

#[test]
fn a_front_end_goes_on_where_the_device_has_ended() {
    let daemon = StorageDaemon::start(1, 2);
    let options = FrontEndOptions { queues: 2, ..FrontEndOptions::default() }.with(feature::EVENT_IDX);
    let mut resumable = ResumableFrontEnd::connect(&daemon.socket(), &options).expect("connected");
    for round in 0..5_u64 {
        for queue in 0..2 {
            let sector = round * 16 + queue * 8;
            let write = VirtioBlkRequest::write(sector, &pattern(sector, 8, round));
            resumable.front_end.run(queue as usize, &write).expect("completed").ok();
        }
        daemon.crash();
        // Put on the queues while there is no device: the next one finds it there.
        let waiting = VirtioBlkRequest::read(round * 16, 4096);
        resumable.front_end.submit_all(0, std::slice::from_ref(&waiting)).expect("space");
        assert_eq!(resumable.in_flight(), 1);
        resumable.resume(&daemon.socket()).expect("resumed");
        let deadline = Instant::now() + Duration::from_secs(10);
        let done = resumable.front_end.await_completion(0, deadline).expect("completed");
        assert_eq!(done.ok(), pattern(round * 16, 8, round));
        assert_eq!(resumable.in_flight(), 0);
    }
}

#[test]
fn the_peer_tracks_no_requests_in_flight() {
    // Where this fails, the daemon has learnt it, and a test with requests in flight belongs here.
    let daemon = StorageDaemon::start(1, 1);
    let resumable = ResumableFrontEnd::connect(&daemon.socket(), &FrontEndOptions::default()).expect("connected");
    assert!(!resumable.front_end.has_protocol(protocol::INFLIGHT_SHMFD) && resumable.front_end.inflight.is_none());
}
