//! Changes of a device that its queues must know of before the front-end gets its reply, on whatever core they are.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::message::{self, IotlbMessage, VERSION, feature, request};
use forebay_vhost_host::{DeviceUnderTest, FrontEnd, FrontEndOptions, ResumableFrontEnd, VirtioBlkRequest};

use crate::ours::{eventually, soon};
use crate::peer::{connect, exercise};
use crate::server::servers;

/// Offset of `writeback` in the configuration.
const WRITEBACK: u32 = 32;
/// Kind of a message that takes translations away.
const INVALIDATE: u8 = 3;

/// IOMMU of a front-end's guest.
#[derive(Default)]
struct Iommu {
    /// Pages whose translations the device has.
    given: BTreeSet<u64>,
}

impl Iommu {
    /// Carries out a request to the first queue; returns the number of pages whose translations the device asked for.
    fn run(&mut self, front_end: &mut FrontEnd, request: &VirtioBlkRequest) -> usize {
        front_end.submit_all(0, std::slice::from_ref(request)).expect("space");
        let (before, deadline) = (self.given.len(), soon());
        loop {
            let misses = self.given.len() - before;
            assert!(Instant::now() < deadline, "not translated in time, after {misses} misses");
            self.answer(front_end);
            if let Some(done) = front_end.queues[0].completion().expect("no violation") {
                done.ok();
                return self.given.len() - before;
            }
        }
    }

    /// Gives the device the translation that it asks for, if it does.
    fn answer(&mut self, front_end: &FrontEnd) {
        let channel = front_end.channel.as_ref().expect("negotiated");
        if let Ok(miss) = channel.await_iotlb(Duration::from_millis(20)) {
            assert_eq!(miss.kind, 1, "a miss");
            // Rings have user addresses here, and buffers guest addresses.
            let page = miss.iova & !4095;
            let user = front_end.memory.user(page).unwrap_or(page);
            let update = IotlbMessage { iova: page, size: 4096, user, permissions: 3, kind: 2 };
            front_end.iotlb(&update).expect("updated");
            // One that was asked for twice does not count.
            self.given.insert(page);
        }
    }

    /// Takes the translations of all buffers away.
    fn invalidate_buffers(&mut self, front_end: &FrontEnd) {
        let end = front_end.memory.end();
        let all = IotlbMessage { size: end, kind: INVALIDATE, ..IotlbMessage::default() };
        front_end.iotlb(&all).expect("taken away");
        self.given.retain(|page| *page >= end);
    }
}

#[test]
fn addresses_are_translated_behind_an_iommu() {
    for features in [0, feature::RING_PACKED] {
        for server in servers(1) {
            let mut front_end = connect(&server, &FrontEndOptions::default().with(feature::ACCESS_PLATFORM | features));
            assert_ne!(front_end.features & feature::ACCESS_PLATFORM, 0);
            let write = VirtioBlkRequest::write(0, &pattern(0, 8, 7));
            let misses = Iommu::default().run(&mut front_end, &write);
            assert!(misses >= 2, "{misses} misses");
        }
    }
}

#[test]
fn a_translation_that_was_taken_away_is_asked_for_again() {
    for features in [0, feature::RING_PACKED] {
        for server in servers(1) {
            let mut front_end = connect(&server, &FrontEndOptions::default().with(feature::ACCESS_PLATFORM | features));
            // Each request finds its buffers where the one before had them.
            let write = VirtioBlkRequest::write(0, &pattern(0, 8, 7));
            let mut iommu = Iommu::default();
            iommu.run(&mut front_end, &write);
            assert_eq!(iommu.run(&mut front_end, &write), 0, "translations are kept");
            for round in 0..20 {
                iommu.invalidate_buffers(&front_end);
                let misses = iommu.run(&mut front_end, &write);
                assert!(misses >= 1, "round {round}: the device still used a translation");
            }
        }
    }
}

#[test]
fn nothing_is_returned_to_a_ring_whose_translation_was_taken_away() {
    for features in [0, feature::RING_PACKED] {
        for server in servers(1) {
            let mut front_end = connect(&server, &FrontEndOptions::default().with(feature::ACCESS_PLATFORM | features));
            let mut iommu = Iommu::default();
            let write = VirtioBlkRequest::write(0, &pattern(0, 8, 7));
            iommu.run(&mut front_end, &write);
            server.hold(true);
            let submitted = server.fence.submitted.load(Ordering::SeqCst);
            front_end.submit_all(0, std::slice::from_ref(&write)).expect("space");
            eventually("the request is at the volume", || server.fence.submitted.load(Ordering::SeqCst) > submitted);
            for page in std::mem::take(&mut iommu.given) {
                let one = IotlbMessage { iova: page, size: 4096, kind: INVALIDATE, ..IotlbMessage::default() };
                front_end.iotlb(&one).expect("taken away");
            }
            server.hold(false);
            let channel = front_end.channel.as_ref().expect("negotiated");
            channel.await_iotlb(Duration::from_secs(10)).expect("asked for");
            assert!(front_end.queues[0].completion().expect("no violation").is_none(), "the ring was written");
            // With a request behind it, for which the device asks again.
            let read = VirtioBlkRequest::read(0, 4096);
            iommu.run(&mut front_end, &read);
            let mut rest = front_end.queues[0].in_flight();
            while rest > 0 {
                iommu.answer(&front_end);
                rest -= usize::from(front_end.queues[0].completion().expect("no violation").is_some());
            }
        }
    }
}

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

/// Asks for a ring to be stopped, and does not wait for its position.
fn ask_for_base(front_end: &FrontEnd) {
    front_end.send_raw(&message::encode(request::GET_VRING_BASE, VERSION, &message::state(0, 0)), &[]).expect("sent");
}

#[test]
fn a_front_end_may_close_while_its_ring_waits_for_a_translation() {
    for server in servers(1) {
        let front_end = FrontEndOptions::default().with(feature::ACCESS_PLATFORM);
        let mut front_end = connect(&server, &front_end);
        front_end.submit_all(0, &[VirtioBlkRequest::write(0, &pattern(0, 8, 1))]).expect("space");
        let channel = front_end.channel.as_ref().expect("negotiated");
        channel.await_iotlb(Duration::from_secs(10)).expect("asked for");
        ask_for_base(&front_end);
        drop(front_end);
        let mut successor = connect(&server, &FrontEndOptions::default());
        exercise(&mut successor, 1, 10);
        eventually("the former connection ends", || server.stats.connection_count(None) == 1);
    }
}

#[test]
fn a_front_end_may_close_while_its_ring_has_requests_left() {
    for server in servers(1) {
        let mut resumable =
            ResumableFrontEnd::connect(&server.socket(), &FrontEndOptions::default()).expect("connected");
        server.fence.is_closing.store(true, Ordering::SeqCst);
        server.fence.is_up.store(true, Ordering::SeqCst);
        resumable.front_end.submit_all(0, &[VirtioBlkRequest::write(0, &pattern(0, 8, 1))]).expect("space");
        eventually("the request is refused", || server.fence.submitted.load(Ordering::SeqCst) > 0);
        ask_for_base(&resumable.front_end);
        server.fence.is_up.store(false, Ordering::SeqCst);
        resumable.resume(&server.socket()).expect("resumed");
        resumable.front_end.await_completion(0, soon()).expect("completed").ok();
        assert_eq!(resumable.front_end.read_sectors(0, 4096).expect("read"), pattern(0, 8, 1));
    }
}
