//! Devices behind an IOMMU.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::message::{IotlbMessage, feature};
use forebay_vhost_host::{FrontEnd, FrontEndOptions, VirtioBlkRequest};

use crate::ours::{eventually, soon};
use crate::peer::{connect, exercise};
use crate::server::{OurServer, servers};

/// Kind of a message that takes translations away.
const INVALIDATE: u8 = 3;

/// Returns servers of both kinds with front-ends behind an IOMMU, for both formats of rings.
fn front_ends() -> impl Iterator<Item = (OurServer, FrontEnd)> {
    [0, feature::RING_PACKED].into_iter().flat_map(|features| {
        servers(1).map(move |server| {
            let options = FrontEndOptions::default().with(feature::ACCESS_PLATFORM | features);
            let front_end = connect(&server, &options);
            (server, front_end)
        })
    })
}

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
    for (_server, mut front_end) in front_ends() {
        assert_ne!(front_end.features & feature::ACCESS_PLATFORM, 0);
        let write = VirtioBlkRequest::write(0, &pattern(0, 8, 7));
        let misses = Iommu::default().run(&mut front_end, &write);
        assert!(misses >= 2, "{misses} misses");
    }
}

#[test]
fn a_translation_that_was_taken_away_is_asked_for_again() {
    for (_server, mut front_end) in front_ends() {
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

#[test]
fn nothing_is_returned_to_a_ring_whose_translation_was_taken_away() {
    for (server, mut front_end) in front_ends() {
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
        let (mut rest, deadline) = (front_end.queues[0].in_flight(), soon());
        while rest > 0 {
            assert!(Instant::now() < deadline, "not translated in time");
            iommu.answer(&front_end);
            rest -= usize::from(front_end.queues[0].completion().expect("no violation").is_some());
        }
    }
}

#[test]
fn a_front_end_may_close_while_its_ring_waits_for_a_translation() {
    for (server, mut front_end) in front_ends() {
        front_end.submit_all(0, &[VirtioBlkRequest::write(0, &pattern(0, 8, 1))]).expect("space");
        let channel = front_end.channel.as_ref().expect("negotiated");
        channel.await_iotlb(Duration::from_secs(10)).expect("asked for");
        front_end.ask_for_vring_base(0).expect("sent");
        drop(front_end);
        let mut successor = connect(&server, &FrontEndOptions::default());
        exercise(&mut successor, 1, 10);
        eventually("the former connection ends", || server.stats.connection_count(None) == 1);
    }
}
