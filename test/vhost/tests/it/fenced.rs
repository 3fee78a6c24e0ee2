//! Volume that another daemon takes over while requests are in flight.

use std::future::ready;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_vhost_host::block::IOERR;
use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::message::feature;
use forebay_vhost_host::rings::DriverRing;
use forebay_vhost_host::{DeviceUnderTest, FrontEnd, FrontEndOptions, ResumableFrontEnd, VirtioBlkRequest};

use crate::ours::{eventually, soon};
use crate::peer::{connect, exercise};
use crate::server::servers;

/// Switch by which requests to a volume fail as those of a daemon that has lost it.
#[derive(Default)]
pub struct Fence {
    /// Set while requests fail.
    is_up: AtomicBool,
    /// Set if requests fail as those of a volume that ends with its daemon, and at once.
    is_closing: AtomicBool,
    /// Requests that were submitted to the volumes of all devices.
    pub submitted: AtomicUsize,
    /// Writes that were to be durable when they complete.
    pub durable_writes: AtomicUsize,
}

/// Volume behind a fence.
pub struct FencedVolume {
    /// Volume of which the requests that are submitted while the fence is up have no effect.
    pub volume: Rc<dyn BlockDevice>,
    pub fence: Arc<Fence>,
}

impl BlockDevice for FencedVolume {
    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.fence.submitted.fetch_add(1, Ordering::SeqCst);
        if matches!(request, BlockRequest::Write { fua: true, .. }) {
            self.fence.durable_writes.fetch_add(1, Ordering::SeqCst);
        }
        if !self.fence.is_up.load(Ordering::SeqCst) {
            return self.volume.submit(request);
        }
        if self.fence.is_closing.load(Ordering::SeqCst) {
            return Box::pin(ready(Err(Error::new(ErrorKind::ShuttingDown, "the volume ends"))));
        }
        // It ends when the volume lets requests pass.
        let passed = self.volume.submit(BlockRequest::Flush);
        Box::pin(async move {
            passed.await?;
            Err(Error::new(ErrorKind::Fenced, "another daemon has the volume"))
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.volume.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.volume.size_watch()
    }
}

#[test]
fn requests_to_a_volume_that_ends_are_left_to_the_next() {
    for (features, mut server) in
        [0, feature::RING_PACKED].into_iter().flat_map(|it| servers(1).map(move |on| (it, on)))
    {
        let options = FrontEndOptions::default().with(features);
        let mut resumable = ResumableFrontEnd::connect(&server.socket(), &options).expect("connected");
        server.fence.is_closing.store(true, Ordering::SeqCst);
        server.fence.is_up.store(true, Ordering::SeqCst);
        let write = |at: u64| VirtioBlkRequest::write(at * 8, &pattern(at * 8, 8, 1));
        resumable.front_end.submit_all(0, &[write(0)]).expect("space");
        eventually("the request is refused", || server.fence.submitted.load(Ordering::SeqCst) > 0);
        resumable.front_end.submit_all(0, &[write(1)]).expect("space");
        std::thread::scope(|scope| {
            // Its position would say that both were executed.
            let front_end = &mut resumable.front_end;
            let stopping = scope.spawn(move || front_end.get_vring_base(0));
            let mut other = FrontEnd::connect(&server.device(1), &FrontEndOptions::default()).expect("accepted");
            server.fence.is_up.store(false, Ordering::SeqCst);
            exercise(&mut other, 1, 20);
            assert!(!stopping.is_finished(), "a position was told while a request is left");
            server.crash();
            stopping.join().expect("no panic").expect_err("the connection has ended");
        });
        resumable.resume(&server.socket()).expect("resumed");
        assert!(resumable.completed.is_empty(), "{:?}", resumable.completed);
        while resumable.in_flight() > 0 {
            resumable.front_end.await_completion(0, soon()).expect("completed").ok();
        }
        let data = resumable.front_end.read_sectors(0, 8192).expect("read");
        assert_eq!(data, pattern(0, 16, 1));
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
        resumable.front_end.ask_for_vring_base(0).expect("sent");
        server.fence.is_up.store(false, Ordering::SeqCst);
        resumable.resume(&server.socket()).expect("resumed");
        resumable.front_end.await_completion(0, soon()).expect("completed").ok();
        assert_eq!(resumable.front_end.read_sectors(0, 4096).expect("read"), pattern(0, 8, 1));
    }
}

#[test]
fn a_broken_ring_is_drained_before_a_successor_begins() {
    for server in servers(1) {
        let mut front_end = connect(&server, &FrontEndOptions::default());
        server.hold(true);
        server.fence.is_up.store(true, Ordering::SeqCst);
        let submitted = || server.fence.submitted.load(Ordering::SeqCst);
        let write = [VirtioBlkRequest::write(0, &pattern(0, 8, 1))];
        front_end.submit_all(0, &write).expect("space");
        eventually("the request is at the volume", || submitted() == 1);
        let DriverRing::Split(ring) = &front_end.queues[0].ring else { panic!("it is split") };
        ring.write_available_index(5000).expect("written");
        front_end.queues[0].notify().expect("kicked");
        eventually("the device ends", || front_end.get_features().is_err());
        let mut successor = connect(&server, &FrontEndOptions::default());
        successor.submit_all(0, &write).expect("space");
        for _ in 0..50 {
            // A turn of the server's core, and some time.
            server.hold(true);
        }
        assert_eq!(submitted(), 1, "a request of the former ring is still at the volume");
        server.hold(false);
        eventually("the successor's request is at the volume", || submitted() == 2);
    }
}

#[test]
fn requests_of_an_ended_export_hold_up_its_successor() {
    let server = servers(1).next().expect("a server");
    let mut resumable = ResumableFrontEnd::connect(&server.socket(), &FrontEndOptions::default()).expect("connected");
    server.hold(true);
    let submitted = || server.fence.submitted.load(Ordering::SeqCst);
    resumable.front_end.submit_all(0, &[VirtioBlkRequest::write(0, &pattern(0, 8, 1))]).expect("space");
    eventually("the request is at the volume", || submitted() == 1);
    // The export does not wait long for a volume that does not complete it.
    server.detach();
    server.attach();
    resumable.resume(&server.socket()).expect("resumed");
    for _ in 0..50 {
        // A turn of the server's core, and some time.
        server.hold(true);
    }
    assert_eq!(submitted(), 1, "it was executed again while it is still at the volume");
    server.hold(false);
    resumable.front_end.await_completion(0, soon()).expect("completed").ok();
    assert_eq!(submitted(), 2);
}

#[test]
fn without_a_record_requests_are_left_where_the_next_device_finds_them() {
    for features in [0, feature::RING_PACKED, feature::IN_ORDER, feature::RING_PACKED | feature::IN_ORDER] {
        for mut server in servers(1) {
            let mut front_end = connect(&server, &FrontEndOptions::default().with(features));
            server.fence.is_closing.store(true, Ordering::SeqCst);
            server.fence.is_up.store(true, Ordering::SeqCst);
            front_end.submit_all(0, &[VirtioBlkRequest::write(0, &pattern(0, 8, 1))]).expect("space");
            if features != feature::IN_ORDER {
                // A later request that has been used already would be taken for this one.
                let done = front_end.await_completion(0, soon()).expect("answered");
                assert_eq!(done.status, IOERR, "features {features:#x}");
                continue;
            }
            eventually("the request is refused", || server.fence.submitted.load(Ordering::SeqCst) > 0);
            server.fence.is_up.store(false, Ordering::SeqCst);
            server.crash();
            assert!(front_end.queues[0].completion().expect("no violation").is_none(), "it is left");
            front_end.resume(&server.socket()).expect("resumed");
            front_end.await_completion(0, soon()).expect("completed").ok();
            assert_eq!(front_end.read_sectors(0, 4096).expect("read"), pattern(0, 8, 1));
        }
    }
}

#[test]
fn requests_of_a_daemon_that_lost_the_volume_are_left_to_the_next() {
    const REQUESTS: u64 = 8;
    for features in [0, feature::RING_PACKED] {
        for server in servers(1) {
            let options = FrontEndOptions::default().with(features);
            let mut resumable = ResumableFrontEnd::connect(&server.socket(), &options).expect("connected");
            server.hold(true);
            server.fence.is_up.store(true, Ordering::SeqCst);
            let writes: Vec<_> =
                (0..REQUESTS).map(|at| VirtioBlkRequest::write(at * 8, &pattern(at * 8, 8, 1))).collect();
            resumable.front_end.submit_all(0, &writes).expect("space");
            let deadline = Instant::now() + Duration::from_secs(10);
            while server.fence.submitted.load(Ordering::SeqCst) < REQUESTS as usize {
                assert!(Instant::now() < deadline, "the device takes requests");
                std::thread::yield_now();
            }
            server.fence.is_up.store(false, Ordering::SeqCst);
            // The device waits until those of the former connection have ended, and then executes them again.
            resumable.resume(&server.socket()).expect("resumed");
            server.hold(false);
            for _ in 0..REQUESTS {
                resumable.front_end.await_completion(0, deadline).expect("completed").ok();
            }
            assert_eq!(resumable.in_flight(), 0);
            let data = resumable.front_end.read_sectors(0, REQUESTS as u32 * 4096).expect("read");
            assert_eq!(data, pattern(0, REQUESTS * 8, 1));
        }
    }
}
