//! Changes of a device that its queues must know of before the front-end gets its reply, on whatever core they are.

use std::sync::atomic::Ordering;

use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::message::feature;
use forebay_vhost_host::{FrontEnd, FrontEndOptions, VirtioBlkRequest};

use crate::peer::{connect, exercise};
use crate::server::servers;

/// Offset of `writeback` in the configuration.
const WRITEBACK: u32 = 32;

#[test]
fn writes_are_durable_at_once_while_the_write_cache_is_off() {
    for server in servers(2) {
        let mut front_end = connect(&server, &FrontEndOptions { queues: 2, ..FrontEndOptions::default() });
        assert_eq!(front_end.config.writeback, 1);
        let durable_writes = || server.fence.durable_writes.load(Ordering::SeqCst);
        for round in 0..20 {
            let (before, is_cached) = (durable_writes(), round % 2 == 1);
            front_end.set_config(WRITEBACK, 0, &[u8::from(is_cached)]).expect("set");
            for queue in 0..2 {
                let write = VirtioBlkRequest::write(queue as u64 * 8, &pattern(0, 8, round));
                front_end.run(queue, &write).expect("completed").ok();
            }
            let expected = if is_cached { 0 } else { 2 };
            assert_eq!(durable_writes() - before, expected, "round {round}");
        }
    }
}

#[test]
fn a_device_works_after_a_reset() {
    for features in [0, feature::RING_PACKED] {
        for server in servers(3) {
            let options = FrontEndOptions { queues: 3, ..FrontEndOptions::default() };
            let mut front_end = connect(&server, &options.with(features));
            front_end.set_config(WRITEBACK, 0, &[0]).expect("set");
            exercise(&mut front_end, 1, 10);
            let durable_writes = server.fence.durable_writes.load(Ordering::SeqCst);
            assert!(durable_writes > 0, "the write cache is off");
            front_end.reset_device().expect("reset");
            // The next driver chooses the other format of rings.
            front_end.set_features(front_end.features ^ feature::RING_PACKED).expect("set");
            front_end.queues.clear();
            front_end.start().expect("started");
            exercise(&mut front_end, 2, 10);
            assert_eq!(server.fence.durable_writes.load(Ordering::SeqCst), durable_writes, "the write cache is on");
        }
    }
}

#[test]
fn a_reset_forgets_positions_and_the_record() {
    for server in servers(2) {
        let options = FrontEndOptions { queues: 2, inflight: true, ..FrontEndOptions::default() };
        let mut front_end = connect(&server, &options);
        exercise(&mut front_end, 1, 10);
        front_end.reset_device().expect("reset");
        front_end.set_features(front_end.features).expect("set");
        let record = |front_end: &FrontEnd| front_end.inflight.as_ref().expect("negotiated").1.bytes();
        let before = record(&front_end);
        for index in 0..2 {
            front_end.queues[index] = front_end.create_queue(index as u16).expect("space");
            // No position is given, and no region.
            let addresses = front_end.ring_addresses(index).expect("mapped");
            front_end.set_vring_num(index as u32, front_end.options.queue_size.into()).expect("set");
            front_end.set_vring_addresses(&addresses).expect("set");
            front_end.set_queue_events(index).expect("set");
            front_end.set_vring_enable(index as u32, true).expect("enabled");
            front_end.run(index, &VirtioBlkRequest::write(0, &pattern(0, 8, 1))).expect("completed").ok();
        }
        assert!(record(&front_end) == before, "the record was written");
    }
}
