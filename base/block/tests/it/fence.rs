//! Tests of a host that takes a volume from another: no write of the other lands after the action was acknowledged.

use std::cell::Cell;
use std::future::ready;
use std::rc::Rc;

use forebay_block::reservation::{
    HostId, Keep, ReservationAccess, ReservationAction, ReservationTable, ReservationType, Reservations,
};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, DeviceHandle, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Cores, CoresOptions, DriverChoice, Reactor, spawn, yield_now};

/// Counters of requests in flight and requests begun.
#[derive(Default)]
struct Counts {
    underway: Cell<usize>,
    begun: Cell<usize>,
    ended: Notify,
}

impl Keep for Counts {
    fn save(&self, _: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

struct Drained(Rc<Counts>);

impl Keep for Drained {
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        self.0.save(table)
    }

    fn drain(&self) -> LocalFuture<()> {
        let counts = self.0.clone();
        Box::pin(async move { counts.ended.wait_until(|| counts.underway.get() == 0).await })
    }
}

struct Slow {
    counts: Rc<Counts>,
    reservations: Reservations,
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        Geometry { size: 1 << 20, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, _: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let counts = self.counts.clone();
        counts.underway.set(counts.underway.get() + 1);
        counts.begun.set(counts.begun.get() + 1);
        Box::pin(async move {
            for _ in 0..3 {
                yield_now().await;
            }
            counts.underway.set(counts.underway.get() - 1);
            counts.ended.notify_all();
            Ok(BlockReply::Done)
        })
    }

    fn map(&self, _: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(ready(Ok(ExtentMap::new())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.reservations.clone())
    }
}

#[test]
fn nothing_lands_after_a_preemption_was_answered() {
    let cores = Cores::start(&CoresOptions { count: 1, ..CoresOptions::default() }).expect("cores");
    let (old, new) = (HostId::new(b"old").expect("a host"), HostId::new(b"new").expect("a host"));
    Reactor::system(DriverChoice::Auto).expect("a driver").block_on(async {
        for round in 0..200 {
            let counts = Rc::new(Counts::default());
            let reservations = Reservations::new(ReservationTable::new(), Rc::new(Drained(counts.clone())));
            let ask = |host: &HostId, action| {
                let asked = reservations.apply(host, action);
                async move { asked.await.expect("the medium").expect("allowed") }
            };
            ask(&old, ReservationAction::Add { key: 1, persist: None }).await;
            ask(&new, ReservationAction::Add { key: 2, persist: None }).await;
            ask(&old, ReservationAction::Reserve { key: 1, kind: ReservationType::WriteExclusive }).await;
            let device: Rc<dyn BlockDevice> =
                Rc::new(Slow { counts: counts.clone(), reservations: reservations.clone() });
            let handle = DeviceHandle::new(device.clone());
            let host = old.clone();
            // Front on another core: checks and submits without yielding in between, as long as it is allowed.
            let writer = cores.handle(0).run(move || async move {
                let device = handle.attach();
                let mut view = device.reservations().expect("reservations").view();
                let mut tasks = Vec::new();
                while view.allows(Some(&host), ReservationAccess::Write) {
                    let data = Buf::copy_of(&[0; 64]).into();
                    let writing = device.submit(BlockRequest::Write { offset: 0, data, fua: false });
                    tasks.push(spawn(writing));
                    if tasks.len() % 8 == 0 {
                        yield_now().await;
                    }
                }
                for task in tasks {
                    task.await.expect("answered");
                }
            });
            let wanted = 1 + round % 40;
            while counts.begun.get() < wanted {
                yield_now().await;
            }
            ask(
                &new,
                ReservationAction::Preempt { key: 2, victim: 1, kind: ReservationType::WriteExclusive, abort: true },
            )
            .await;
            assert_eq!(counts.underway.get(), 0, "round {round}: a write is still under way");
            let begun = counts.begun.get();
            writer.await.expect("the core is there");
            assert_eq!(counts.begun.get(), begun, "round {round}: a write came after the answer");
        }
    });
}
