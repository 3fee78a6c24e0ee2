//! Reservations of an image that several daemons serve: one table for all, which every request must satisfy.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::{bytes, run};
use forebay_block::reservation::{
    EventKind, HostId, Keep, Refusal, ReservationAccess, ReservationAction, ReservationTable, ReservationType,
    Reservations,
};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, DeviceHandle, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture,
    ObjectBackend, Result, SizeWatch,
};
use forebay_image::{CreateOptions, Image, ImageFeatures, ImageOpenOptions};
use forebay_ram::cluster::RamCluster;
use forebay_reactor::sync::Notify;
use forebay_reactor::{spawn, yield_now};

const KEY: &str = "forebay.reservations";
const POOL: i64 = 1;
const SIZE: u64 = 4 << 16;

fn cluster(seed: u64, late: u64) -> RamCluster {
    let cluster = RamCluster::new(seed, late);
    assert_eq!(cluster.add_pool("rbd"), POOL);
    cluster
}

fn host(number: u8) -> HostId {
    HostId::new(&[b'h', number]).expect("a host")
}

/// Counter of in-flight changes, as in the daemon.
#[derive(Default)]
struct Underway {
    count: Cell<usize>,
    ended: Notify,
}

impl Keep for Underway {
    fn save(&self, _: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        panic!("the table is kept with the image")
    }
}

struct Drain(Rc<Underway>);

impl Keep for Drain {
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        self.0.save(table)
    }

    fn drain(&self) -> LocalFuture<()> {
        let underway = self.0.clone();
        Box::pin(async move { underway.ended.wait_until(|| underway.count.get() == 0).await })
    }
}

/// Volume of one daemon.
struct Volume {
    image: Rc<Image>,
    reservations: Reservations,
    underway: Rc<Underway>,
}

impl BlockDevice for Volume {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let work = self.image.submit(request);
        let underway = self.underway.clone();
        underway.count.set(underway.count.get() + 1);
        let task = spawn(async move {
            let result = work.await;
            underway.count.set(underway.count.get() - 1);
            underway.ended.notify_all();
            result
        });
        Box::pin(task)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.image.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.image.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.reservations.clone())
    }
}

/// Volume of a daemon as its front ends see it.
struct Daemon {
    image: Rc<Image>,
    device: Rc<dyn BlockDevice>,
}

impl Daemon {
    async fn open(backend: &Rc<dyn ObjectBackend>) -> Self {
        let image = Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
        let underway = Rc::new(Underway::default());
        let keep = Rc::new(Drain(underway.clone()));
        let reservations = image.joint_reservations(KEY, keep).await.expect("read").expect("there are some");
        let volume = Rc::new(Volume { image: image.clone(), reservations, underway });
        Self { image, device: DeviceHandle::new(volume).attach() }
    }

    fn reservations(&self) -> Reservations {
        self.device.reservations().expect("there are some")
    }

    fn table(&self) -> ReservationTable {
        ReservationTable::clone(self.reservations().view().table())
    }

    async fn ask(&self, number: u8, action: ReservationAction) -> std::result::Result<(), Refusal> {
        self.reservations().apply(&host(number), action).await.expect("the medium").map(drop)
    }

    async fn register(&self, number: u8, key: u64) {
        self.ask(number, ReservationAction::Add { key, persist: None }).await.expect("registered");
    }

    /// Submits a write like a front end: checks whether it is allowed, and submits without yielding.
    async fn try_write(&self, number: u8, value: u64) -> Option<Result<BlockReply>> {
        let data = bytes(&value.to_le_bytes());
        self.passing(number, ReservationAccess::Write, BlockRequest::Write { offset: 8, data, fua: false }).await
    }

    async fn try_read(&self, number: u8) -> Option<Result<BlockReply>> {
        self.passing(number, ReservationAccess::Read, BlockRequest::Read(Extent::new(8, 8))).await
    }

    async fn passing(
        &self,
        number: u8,
        access: ReservationAccess,
        request: BlockRequest,
    ) -> Option<Result<BlockReply>> {
        match self.reservations().view().allows(Some(&host(number)), access) {
            true => Some(self.device.submit(request).await),
            false => None,
        }
    }

    async fn close(self) {
        drop(self.device);
        while Rc::strong_count(&self.image) > 1 {
            yield_now().await;
        }
        self.image.close().await;
    }
}

async fn create(backend: &Rc<dyn ObjectBackend>, features: Option<ImageFeatures>) {
    let options = CreateOptions { size: SIZE, object_size: 1 << 16, features, ..CreateOptions::default() };
    forebay_image::create(backend, "vm", options).await.expect("created");
}

#[test]
fn what_one_daemon_is_asked_for_counts_at_the_other() {
    run(async {
        let cluster = cluster(3, 2);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        create(&a, None).await;
        let (one, two) = (Daemon::open(&a).await, Daemon::open(&b).await);
        one.register(1, 10).await;
        two.register(2, 20).await;
        assert_eq!(one.table(), two.table());
        assert_eq!(two.table().registrants().len(), 2);
        one.ask(1, ReservationAction::Reserve { key: 10, kind: ReservationType::WriteExclusive })
            .await
            .expect("reserved");
        assert!(two.try_write(2, 1).await.is_none(), "the other daemon keeps it out");
        two.try_read(2).await.expect("allowed").expect("read");
        two.try_write(1, 1).await.expect("allowed").expect("who holds it writes by any daemon");
        assert_eq!(
            two.ask(2, ReservationAction::Reserve { key: 20, kind: ReservationType::WriteExclusive }).await,
            Err(Refusal::Conflict)
        );

        let mut told = one.reservations().changes();
        two.ask(
            2,
            ReservationAction::Preempt { key: 20, victim: 10, kind: ReservationType::ExclusiveAccess, abort: true },
        )
        .await
        .expect("taken");
        assert!(one.try_write(1, 2).await.is_none() && one.try_read(1).await.is_none());
        assert!(told.next().await, "who listens at the first daemon is told");
        let event = one.table().events_after(0).last().cloned().expect("an event");
        assert_eq!((event.kind, &event.hosts[..]), (EventKind::RegistrationPreempted, &[host(1)][..]));
        assert_eq!(one.table(), two.table());
        two.ask(2, ReservationAction::Release { key: Some(20), kind: ReservationType::ExclusiveAccess })
            .await
            .expect("released");
        one.try_write(1, 3).await.expect("allowed").expect("written");
        assert_eq!(two.ask(2, ReservationAction::HoldWhole).await, Err(Refusal::Unsupported));
        two.reservations().clear_all().await.expect("cleared");
        assert_eq!(one.table().registrants(), []);
        one.close().await;
        two.close().await;
        assert_eq!(cluster.watches(), 0);
        assert_eq!(cluster.blocklisted(), [""; 0]);
    });
}

#[test]
fn daemons_that_change_it_at_once_lose_nothing() {
    for seed in 0..8 {
        run(async {
            let cluster = cluster(seed * 31 + 1, seed);
            let clients: Vec<_> = (0..3).map(|_| cluster.client().pool(POOL)).collect();
            create(&clients[0], None).await;
            let mut daemons = Vec::new();
            for client in &clients {
                daemons.push(Rc::new(Daemon::open(client).await));
            }
            let mut tasks = Vec::new();
            for number in 0..18_u8 {
                let daemon = daemons[usize::from(number) % 3].clone();
                tasks.push(spawn(async move {
                    daemon.register(number, 100 + u64::from(number)).await;
                    // The daemon's own registration is visible on completion.
                    assert_eq!(daemon.table().key_of(&host(number)), Some(100 + u64::from(number)));
                    if number % 2 == 0 {
                        daemon
                            .ask(number, ReservationAction::Remove { current: None, persist: None })
                            .await
                            .expect("removed");
                    }
                }));
            }
            for task in tasks {
                task.await;
            }
            for daemon in &daemons {
                let table = daemon.table();
                assert_eq!(table.registrants().len(), 9, "seed {seed}");
                assert_eq!((table.generation(), &table), (27, &daemons[0].table()), "seed {seed}");
            }
        });
    }
}

/// A host writes through one daemon at full rate, while another takes the volume over through the other daemon, and
/// watches break: once that completes, no write of the first one lands, and its reads fail.
#[test]
fn nothing_lands_after_another_daemon_has_answered() {
    let (mut refused, mut outdated) = (0, 0);
    for seed in 0..60_u64 {
        run(async {
            let cluster = cluster(seed * 7919 + 5, seed % 7);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            create(&a, None).await;
            let (one, two) = (Rc::new(Daemon::open(&a).await), Rc::new(Daemon::open(&b).await));
            one.register(1, 10).await;
            two.register(2, 20).await;
            one.ask(1, ReservationAction::Reserve { key: 10, kind: ReservationType::WriteExclusive })
                .await
                .expect("reserved");
            let (written, over) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(false)));
            let mut writers = Vec::new();
            for _ in 0..4 {
                let (one, written, over) = (one.clone(), written.clone(), over.clone());
                writers.push(spawn(async move {
                    let (mut refused, mut outdated) = (0, 0);
                    while !over.get() || refused == 0 {
                        written.set(written.get() + 1);
                        match one.try_write(1, written.get()).await {
                            None => refused += 1,
                            Some(Err(error)) if error.kind() == ErrorKind::Busy => outdated += 1,
                            Some(result) => drop(result.expect("written")),
                        }
                        yield_now().await;
                    }
                    (refused, outdated)
                }));
            }
            for _ in 0..seed % 40 {
                yield_now().await;
            }
            if seed % 3 == 0 {
                cluster.break_watches();
            }
            if seed % 2 == 0 {
                // The second one writes too, so that the lock alternates.
                two.register(1, 10).await;
                let _ = two.try_write(1, 1 << 40).await.expect("allowed");
            }
            if seed % 5 == 0 {
                cluster.break_watches();
            }
            let taken =
                ReservationAction::Preempt { key: 20, victim: 10, kind: ReservationType::ExclusiveAccess, abort: true };
            two.ask(2, taken).await.expect("taken");
            let value = async || two.try_read(2).await.expect("allowed").expect("read").into_data().to_vec();
            let before = value().await;
            if let Some(Ok(_)) = one.try_read(1).await {
                panic!("seed {seed}: who was kept out has read");
            }
            for _ in 0..50 {
                yield_now().await;
            }
            over.set(true);
            for writer in writers {
                let (more, late) = writer.await;
                refused += more;
                outdated += late;
            }
            assert_eq!(value().await, before, "seed {seed}: a write has landed after it was answered");
            assert_eq!(cluster.blocklisted(), [""; 0]);
        });
    }
    assert!(refused > 0 && outdated > 0, "both happen: {refused} refused, {outdated} outdated");
}

/// Dead daemons are fenced before a reservation changes hands.
#[test]
fn a_daemon_that_hears_nothing_writes_nothing() {
    run(async {
        let cluster = cluster(11, 2);
        let (deaf, other) = (cluster.client(), cluster.client());
        let (a, b) = (deaf.pool(POOL), other.pool(POOL));
        create(&a, None).await;
        let (one, two) = (Daemon::open(&a).await, Daemon::open(&b).await);
        one.register(1, 10).await;
        one.ask(1, ReservationAction::Reserve { key: 10, kind: ReservationType::WriteExclusive })
            .await
            .expect("reserved");
        one.try_write(1, 5).await.expect("allowed").expect("written");
        deaf.die();
        cluster.expire_watches();
        two.register(2, 20).await;
        two.ask(
            2,
            ReservationAction::Preempt { key: 20, victim: 10, kind: ReservationType::WriteExclusive, abort: true },
        )
        .await
        .expect("taken");
        assert_eq!(cluster.blocklisted(), [deaf.address()], "it had the lock");
        two.try_write(2, 6).await.expect("allowed").expect("written");
    });
}

/// The cluster has dropped a daemon's watch, unknown to the daemon: it gets no notification of a change.
#[test]
fn who_was_not_told_looks_before_it_writes() {
    run(async {
        let cluster = cluster(12, 2);
        let (deaf, other) = (cluster.client(), cluster.client());
        let (a, b) = (deaf.pool(POOL), other.pool(POOL));
        create(&a, None).await;
        let (one, two) = (Daemon::open(&a).await, Daemon::open(&b).await);
        one.register(1, 10).await;
        one.ask(1, ReservationAction::Reserve { key: 10, kind: ReservationType::WriteExclusive })
            .await
            .expect("reserved");
        two.register(2, 20).await;
        deaf.lose_watches();
        two.ask(
            2,
            ReservationAction::Preempt { key: 20, victim: 10, kind: ReservationType::WriteExclusive, abort: true },
        )
        .await
        .expect("taken");
        let late = one.try_write(1, 7).await.expect("allowed by what it knows");
        assert_eq!(late.expect_err("it is not").kind(), ErrorKind::Busy);
        assert!(one.try_write(1, 7).await.is_none(), "now it knows");
        assert_eq!(two.try_read(2).await.expect("allowed").expect("read").into_data().to_vec(), [0; 8]);
    });
}

fn is_empty(table: &ReservationTable) -> bool {
    table.registrants().is_empty() && !table.restricts() && table.last_event() == 0
}

#[test]
fn what_is_not_persistent_lives_as_long_as_a_daemon_that_knows_it() {
    run(async {
        let cluster = cluster(7, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        create(&a, None).await;
        let one = Daemon::open(&a).await;
        one.register(1, 10).await;
        one.ask(1, ReservationAction::Reserve { key: 10, kind: ReservationType::ExclusiveAccess })
            .await
            .expect("reserved");
        // Another one joins, the first one closes and reopens: at least one daemon knew the reservations all the
        // time.
        let two = Daemon::open(&b).await;
        assert_eq!(two.table(), one.table());
        one.close().await;
        assert!(two.try_write(2, 1).await.is_none());
        let one = Daemon::open(&a).await;
        assert_eq!(one.table(), two.table());
        // Every daemon closes: none knows the reservations, though they are still stored.
        one.close().await;
        two.close().await;
        let one = Daemon::open(&a).await;
        assert!(one.image.metadata(KEY).await.expect("metadata").is_some());
        assert!(is_empty(&one.table()));
        one.try_write(2, 1).await.expect("allowed").expect("written");
        // A daemon that opens now does not adopt the stored ones either.
        let two = Daemon::open(&b).await;
        assert!(is_empty(&two.table()) && one.table() == two.table());
        two.register(2, 20).await;
        assert_eq!((one.table().registrants().len(), one.table().key_of(&host(2))), (1, Some(20)));
        // Persistent reservations stay when a host closes.
        two.ask(2, ReservationAction::Register { current: Some(20), new: 21, persist: Some(true) })
            .await
            .expect("persistent");
        two.ask(2, ReservationAction::Reserve { key: 21, kind: ReservationType::ExclusiveAccess })
            .await
            .expect("reserved");
        one.close().await;
        two.close().await;
        let one = Daemon::open(&a).await;
        assert!(one.table().persists() && one.try_read(1).await.is_none());
        one.try_read(2).await.expect("allowed").expect("read");
    });
}

#[test]
fn without_an_exclusive_lock_nothing_is_reserved() {
    run(async {
        let cluster = cluster(2, 0);
        let backend = cluster.client().pool(POOL);
        create(&backend, Some(ImageFeatures::LAYERING)).await;
        let image = Image::open(backend, "vm", ImageOpenOptions::default()).await.expect("opened");
        let keep = Rc::new(Underway::default());
        assert!(image.joint_reservations(KEY, keep.clone()).await.expect("read").is_none());
        let stored = b"forebay-reservations 1\nregistrant 00000000000000ab 6801\nend\n";
        image.set_metadata(KEY, Some(stored.to_vec())).await.expect("set");
        let refused = image.joint_reservations(KEY, keep.clone()).await.map(drop);
        assert_eq!(refused.expect_err("somebody counts on it").kind(), ErrorKind::Unsupported);
        image.set_metadata(KEY, Some(b"forebay".to_vec())).await.expect("set");
        let refused = image.joint_reservations(KEY, keep).await.map(drop);
        assert_eq!(refused.expect_err("damaged").kind(), ErrorKind::Corrupt);
    });
}
