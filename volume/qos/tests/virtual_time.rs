//! Limits on the clock of a simulated world: exact times, requests that are dropped, and the end of a volume.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch,
};
use forebay_qos::{CoreShare, QosDevice, QosLimits, RateLimit, ShareAdmission, VolumeQos, VolumeShare};
use forebay_reactor::sync::join_all;
use forebay_reactor::{Instant, now, sleep, sleep_until, spawn};
use forebay_sim::{Faults, World};

/// Device that notes when each request arrives, and takes a time for it.
#[derive(Default)]
struct Noting {
    arrived: RefCell<Vec<(u64, Instant)>>,
    takes: Cell<Duration>,
}

impl BlockDevice for Noting {
    fn geometry(&self) -> Geometry {
        Geometry { size: 1 << 40, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let offset = request.extent().map_or(u64::MAX, |extent| extent.offset);
        self.arrived.borrow_mut().push((offset, now()));
        let done = sleep(self.takes.get());
        Box::pin(async move {
            done.await;
            Ok(BlockReply::Done)
        })
    }

    fn map(&self, _extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        unreachable!("not asked for")
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Runs work with a device that has limits, in a world of its own.
fn run<F: Future<Output = ()> + 'static>(
    limits: QosLimits,
    work: impl FnOnce(Rc<Noting>, Rc<VolumeQos>, Rc<QosDevice>) -> F,
) {
    let world = World::new(7, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let inner = Rc::new(Noting::default());
        let qos = VolumeQos::new(limits);
        work(inner.clone(), qos.clone(), Rc::new(QosDevice::new(inner, qos))).await;
    });
    assert_eq!(ran, Ok(()));
}

fn iops(rate: u64) -> QosLimits {
    QosLimits { iops: RateLimit::of(rate), ..QosLimits::default() }
}

fn read(offset: u64) -> BlockRequest {
    BlockRequest::Read(Extent::new(offset, 4096))
}

#[test]
fn a_volume_gets_its_rate_at_any_depth() {
    for depth in [1, 4, 128] {
        run(iops(1000), move |inner, qos, device| async move {
            inner.takes.set(Duration::from_micros(100));
            let began = now();
            let next = Rc::new(Cell::new(0));
            let workers = (0..depth).map(|_| {
                let (device, next) = (device.clone(), next.clone());
                spawn(async move {
                    while began.elapsed() < Duration::from_secs(10) {
                        let offset = next.replace(next.get() + 1);
                        device.submit(read(offset)).await.expect("it is read");
                    }
                })
            });
            join_all(workers.collect::<Vec<_>>()).await;
            let arrived = inner.arrived.borrow();
            assert!(arrived.is_sorted(), "in order");
            let within = arrived.iter().filter(|(_, time)| time.since(began) <= Duration::from_secs(10)).count();
            // All but what a tick brings at the end.
            assert!((9949..=10_000).contains(&within), "{within} at depth {depth}");
            assert!(qos.stats().throttled > 0 && qos.stats().waiting == 0);
        });
    }
}

#[test]
fn bytes_of_each_direction_have_limits_of_their_own() {
    let limits = QosLimits { write_bps: RateLimit::of(1 << 20), ..QosLimits::default() };
    run(limits, |inner, qos, device| async move {
        let began = now();
        let zero =
            |offset| BlockRequest::WriteZeroes { extent: Extent::new(offset, 1 << 20), no_unmap: false, fua: false };
        let changes = [zero(1), BlockRequest::Discard(Extent::new(2, 1 << 20)), zero(3)];
        let changes = changes.map(|change| device.submit(change));
        device.submit(read(0)).await.expect("reads have no limit");
        device.submit(BlockRequest::Flush).await.expect("a flush waits for none of them");
        assert_eq!(began.elapsed(), Duration::ZERO);
        for change in changes {
            change.await.expect("changed");
        }
        let seconds: Vec<_> = inner.arrived.borrow().iter().map(|(_, time)| time.since(began).as_secs()).collect();
        assert_eq!(seconds, [0, 0, 1, 2, 3]);
        let stats = qos.stats();
        assert_eq!((stats.throttled, stats.throttled_time), (3, Duration::from_secs(6)));
    });
}

#[test]
fn dropped_requests_are_withdrawn_and_cost_nothing() {
    run(QosLimits { tick: Duration::from_millis(1), ..iops(10) }, |inner, qos, device| async move {
        let began = now();
        let mut waiting: Vec<_> = (0..30).map(|offset| device.submit(read(offset))).collect();
        assert_eq!(qos.stats().waiting, 30);
        // All but the last are dropped before they were polled.
        let last = waiting.pop().expect("the last");
        drop(waiting);
        assert_eq!(qos.stats().waiting, 1);
        last.await.expect("read");
        assert_eq!(began.elapsed(), Duration::from_millis(100));
        // One that is dropped between its admission and its next poll returns its token.
        let admitted = device.submit(read(100));
        let next = spawn(device.submit(read(101)));
        let told = qos.clone();
        qos.release_all();
        drop(admitted);
        next.await.expect("read");
        device.submit(read(102)).await.expect("read");
        // Two tokens were owed, of which one is back.
        assert_eq!(began.elapsed(), Duration::from_millis(300));
        assert_eq!(told.stats().waiting, 0);
        let offsets: Vec<_> = inner.arrived.borrow().iter().map(|(offset, _)| *offset).collect();
        assert_eq!(offsets, [29, 101, 102]);
    });
}

#[test]
fn changed_limits_apply_to_waiting_requests() {
    run(iops(1), |_, qos, device| async move {
        let began = now();
        let slow: Vec<_> = (0..100).map(|offset| spawn(device.submit(read(offset)))).collect();
        sleep(Duration::from_millis(1500)).await;
        assert_eq!(qos.stats().waiting, 99);
        qos.set_limits(QosLimits { tick: Duration::from_millis(1), ..iops(100) });
        join_all(slow).await;
        // Nothing of what was saved up counts: 99 at 100 a second.
        let took = began.elapsed().as_millis();
        assert_eq!(took, 1500 + 985);
        let slow: Vec<_> = (0..100).map(|offset| spawn(device.submit(read(offset)))).collect();
        qos.set_limits(QosLimits::default());
        let began = now();
        join_all(slow).await;
        assert_eq!(began.elapsed().as_millis(), 0);
        assert!(qos.admit(&read(0)).is_none());
    });
}

#[test]
fn the_end_of_a_volume_waits_for_no_limit() {
    run(iops(1), |inner, qos, device| async move {
        let began = now();
        let waiting: Vec<_> = (0..1000).map(|offset| spawn(device.submit(read(offset)))).collect();
        sleep(Duration::from_millis(10)).await;
        qos.end();
        join_all(waiting).await;
        device.submit(read(1000)).await.expect("read");
        assert_eq!(began.elapsed(), Duration::from_millis(10));
        assert_eq!(inner.arrived.borrow().len(), 1001);
    });
}

/// Device that works on one request at a time, in order, each for as long as its bytes take.
#[derive(Default)]
struct Serial {
    free: Cell<Instant>,
}

impl Serial {
    fn read(&self, bytes: u64) -> LocalFuture<()> {
        let begins = self.free.get().max(now());
        self.free.set(begins + Duration::from_micros(9 + bytes / 1024));
        Box::pin(sleep_until(self.free.get()))
    }
}

/// Returns the 99th percentile of the latency of a volume at depth 1 beside one at a depth, in microseconds, and the
/// requests of that.
fn p99_beside(depth: usize, bytes: u64, shares: bool) -> (u128, usize) {
    let world = World::new(7, Faults::none());
    let reactor = world.reactor();
    let result = Rc::new(Cell::new((0, 0)));
    let told = result.clone();
    let ran = world.run(&reactor, async move {
        let (core, device) = (Rc::new(CoreShare::default()), Rc::new(Serial::default()));
        let request = move |share: Rc<VolumeShare>, bytes| {
            let device = device.clone();
            async move {
                let read = BlockRequest::Read(Extent::new(0, bytes));
                let used = match share.admit(&read) {
                    _ if !shares => None,
                    ShareAdmission::Now(used) => used,
                    ShareAdmission::Wait(wait) => Some(wait.await),
                };
                device.read(bytes).await;
                drop(used);
            }
        };
        let (end, done) = (now() + Duration::from_secs(1), Rc::new(Cell::new(0)));
        let busy = VolumeShare::new(core.clone());
        let workers: Vec<_> = (0..depth)
            .map(|_| {
                let (busy, request, done) = (busy.clone(), request.clone(), done.clone());
                spawn(async move {
                    while now() < end {
                        request(busy.clone(), bytes).await;
                        done.set(done.get() + 1);
                    }
                })
            })
            .collect();
        let (quiet, mut took) = (VolumeShare::new(core), Vec::new());
        while now() < end {
            let began = now();
            request(quiet.clone(), 4096).await;
            took.push(began.elapsed().as_micros());
            sleep(Duration::from_micros(70)).await;
        }
        join_all(workers).await;
        took.sort_unstable();
        told.set((took[took.len() * 99 / 100], done.get()));
    });
    assert_eq!(ran, Ok(()));
    result.get()
}

#[test]
fn a_quiet_volume_finds_a_short_queue_beside_a_busy_one() {
    let (without, _) = p99_beside(128, 4096, false);
    assert!(without > 1500, "{without} us: the device is not busy");
    let (with, done) = p99_beside(128, 4096, true);
    assert!(with <= 4 * 13 + 13 + 1, "{with} us");
    assert!(done > 50_000, "{done}: the device is kept busy");
    // Large requests: one at a time.
    let (with, _) = p99_beside(128, 128 << 10, true);
    assert!(with <= 137 + 13 + 1, "{with} us");
}
