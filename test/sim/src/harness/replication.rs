//! Replicated write logs: gateways with disks of their own, one volume at a shared backend, and hosts that check every
//! block, while gateways and disks fail, and connections are cut.
//!
//! A gateway that dies loses its disk's handles and its connections; its tasks go on without either.  What it has sent to
//! the backend may still arrive there until it is fenced.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_messenger::{
    Address, Connection, ConnectionState, Message, Messenger, MessengerCore, MessengerOptions, Policy,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{sleep, spawn, timeout};
use forebay_writelog::replication::{
    LogMembers, LogOpening, MemberKeeper, MemberRecord, OpenedMembers, PeerId, PrimarySet, RecordChange, ReplicaHost,
    ReplicaShelf, ReplicationOptions, open_members, open_primary,
};
use forebay_writelog::{DirtyLimits, LogId, LogOptions, LogOwner, MediumKind, Shelf, ShelfOptions, WriteLog};

use super::writelog::{BACKEND, Oracles, open_backend};
use super::{Failure, guarded};
use crate::faults::{Faults, MICRO, MILLI, NetFaults};
use crate::oracle::Expected;
use crate::rng::Rng;
use crate::workload::BlockLoad;
use crate::world::{CrashKind, World};

const VOLUME: &str = "volume-1";
const NAME: &str = "rbd/volume";
/// Longer than anything takes that ends at all.
const LONG: Duration = Duration::from_secs(200);

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplicationTally {
    /// Number of runs.
    pub runs: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Gateways that took the log over.
    pub takeovers: u64,
    /// Primaries that opened the log again.
    pub reopened: u64,
    /// Gateways that died, ...
    pub died: u64,
    /// ... and those that died with their machine.
    pub power_failures: u64,
    /// Changes of the record.
    pub changes: u64,
    /// Members that were filled.
    pub filled: u64,
    /// Members that were dropped.
    pub dropped: u64,
    /// Connections that were cut.
    pub cuts: u64,
    /// Attempts to serve that failed.
    pub refused: u64,
    /// Requests that the backend refused because their client was fenced.
    pub fenced: u64,
}

impl ReplicationTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.takeovers += other.takeovers;
        self.reopened += other.reopened;
        self.died += other.died;
        self.power_failures += other.power_failures;
        self.changes += other.changes;
        self.filled += other.filled;
        self.dropped += other.dropped;
        self.cuts += other.cuts;
        self.refused += other.refused;
        self.fenced += other.fenced;
    }
}

/// Runs the gateways that follow from a seed.
///
/// # Errors
/// When an oracle objects, nobody can serve the volume, or anything panics.
pub fn run_replication(seed: u64) -> std::result::Result<ReplicationTally, Failure> {
    let go = |verbose| {
        let scenario = ReplicationScenario::draw(seed);
        let world = World::new(seed, Faults { events_max: 5_000_000, net: scenario.net.clone(), ..Faults::none() });
        if verbose {
            world.set_verbose();
        }
        let about = format!("{scenario:#?}");
        guarded(&world, &about, || run_one(&world, &scenario))
    };
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Run that follows from a seed.
#[derive(Debug, Clone)]
struct ReplicationScenario {
    seed: u64,
    gateways: u8,
    sector: u32,
    log_size: u64,
    age_max: Duration,
    patience: Duration,
    rounds: u32,
    net: NetFaults,
}

impl ReplicationScenario {
    fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x2e91_1ca7);
        let net = match rng.below(3) {
            0 => NetFaults { reset_ppm: 2000, ..NetFaults::none() },
            1 => NetFaults { stall_ppm: 5000, stall: MILLI..50 * MILLI, ..NetFaults::none() },
            _ => NetFaults::none(),
        };
        Self {
            seed,
            gateways: rng.range(2..5) as u8,
            sector: *rng.pick(&[512, 4096]),
            log_size: *rng.pick(&[256 << 10, 512 << 10, 2 << 20]),
            age_max: Duration::from_millis(*rng.pick(&[1, 20, 1000])),
            patience: Duration::from_millis(*rng.pick(&[20, 100, 400])),
            rounds: rng.range(2..7) as u32,
            net,
        }
    }
}

/// The image: it outlives gateways.
struct SharedImage {
    world: World,
    record: RefCell<Option<LogMembers>>,
    rng: RefCell<Rng>,
    fenced: RefCell<BTreeSet<String>>,
    /// Changes on their way to the backend, by client.
    under_way: RefCell<BTreeMap<String, usize>>,
    ended: Notify,
    clients: Cell<u64>,
    tally: RefCell<ReplicationTally>,
    backend: Rc<dyn BlockDevice>,
}

impl SharedImage {
    fn count(&self, change: impl FnOnce(&mut ReplicationTally)) {
        change(&mut self.tally.borrow_mut());
    }

    fn takes(&self) -> Duration {
        Duration::from_nanos(self.rng.borrow_mut().range(50 * MICRO..3 * MILLI))
    }

    fn new_client(&self) -> String {
        self.clients.set(self.clients.get() + 1);
        format!("client.{}", self.clients.get())
    }

    async fn load(&self) -> Option<LogMembers> {
        sleep(self.takes()).await;
        self.record.borrow().clone()
    }

    /// Fences a client: once this has ended, nothing of it reaches the backend any more.
    async fn fence(&self, client: &str) {
        sleep(self.takes()).await;
        self.fenced.borrow_mut().insert(client.to_owned());
        self.ended.wait_until(|| !self.under_way.borrow().contains_key(client)).await;
        sleep(self.takes()).await;
    }

    /// Changes the record, if it is still `from`.
    async fn change(&self, from: Option<LogMembers>, to: LogMembers) -> Result<RecordChange> {
        let (takes, lost, applied) = {
            let mut rng = self.rng.borrow_mut();
            (Duration::from_nanos(rng.range(50 * MICRO..3 * MILLI)), rng.one_in(10), rng.coin())
        };
        sleep(takes).await;
        if lost && !applied {
            return Err(Error::new(ErrorKind::TimedOut, "the record cannot be reached"));
        }
        let outcome = {
            let mut record = self.record.borrow_mut();
            match *record == from {
                true => {
                    self.world.note(|| format!("the record is {to:?}"));
                    self.count_members(&to, record.as_ref());
                    *record = Some(to);
                    RecordChange::Changed
                }
                false => RecordChange::Other(record.clone()),
            }
        };
        sleep(takes).await;
        if lost {
            Err(Error::new(ErrorKind::TimedOut, "the record was changed, and nobody was told"))
        } else {
            Ok(outcome)
        }
    }

    fn count_members(&self, to: &LogMembers, from: Option<&LogMembers>) {
        let complete = |record: &LogMembers| record.complete().count();
        let before = from.map_or(0, complete);
        self.count(|tally| {
            let opens = from.is_some_and(|from| from.term() != to.term());
            let takes_over = from.is_some_and(|from| from.primary() != to.primary());
            tally.takeovers += u64::from(takes_over);
            tally.reopened += u64::from(opens && !takes_over);
            tally.changes += 1;
            tally.filled += u64::from(complete(to) > before && from.is_some());
            tally.dropped += u64::from(complete(to) < before);
        });
    }
}

/// Client of the backend.
struct BackendClient {
    image: Rc<SharedImage>,
    name: String,
    /// Set while its process lives.
    alive: Rc<Cell<bool>>,
}

impl BlockDevice for BackendClient {
    fn geometry(&self) -> Geometry {
        self.image.backend.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        if !self.alive.get() {
            return Box::pin(std::future::pending());
        }
        let (image, name) = (self.image.clone(), self.name.clone());
        let delay = image.takes();
        Box::pin(async move {
            let changes = request.is_write();
            sleep(delay).await;
            if image.fenced.borrow().contains(&name) {
                image.count(|tally| tally.fenced += 1);
                return Err(Error::new(ErrorKind::Fenced, format!("{name} is fenced")));
            }
            if changes {
                *image.under_way.borrow_mut().entry(name.clone()).or_default() += 1;
            }
            let result = image.backend.submit(request).await;
            if changes {
                let mut under_way = image.under_way.borrow_mut();
                if let Some(count) = under_way.get_mut(&name) {
                    *count -= 1;
                    if *count == 0 {
                        under_way.remove(&name);
                    }
                }
                drop(under_way);
                image.ended.notify_all();
            }
            result
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.image.backend.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Gateway while its process lives.
struct Gateway {
    number: u8,
    image: Rc<SharedImage>,
    alive: Rc<Cell<bool>>,
    /// Signaled when it dies.
    died: Rc<Notify>,
    shelf: Rc<Shelf>,
    replicas: Rc<ReplicaHost>,
    server: Messenger,
    client: Messenger,
    links: RefCell<BTreeMap<PeerId, Connection>>,
    gateways: u8,
    patience: Duration,
    age_max: Duration,
}

fn peer(number: u8) -> PeerId {
    PeerId([number; 16])
}

fn path(number: u8) -> String {
    format!("/gateway{number}")
}

fn address(number: u8) -> Address {
    format!("tcp:127.0.0.{number}:7000").parse().expect("an address")
}

impl Gateway {
    async fn start(
        number: u8,
        image: &Rc<SharedImage>,
        core: &MessengerCore,
        scenario: &ReplicationScenario,
    ) -> Result<Rc<Self>> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(&path(number)), options).await?;
        let replicas = ReplicaHost::new(vec![ReplicaShelf { shelf: shelf.clone(), quota: 64 << 20 }]);
        let host = replicas.clone();
        let handler = move |connection: &Connection, message: Message| {
            assert!(host.handle(connection, message), "only requests to replicas are sent");
        };
        let options = MessengerOptions { session_timeout: 4 * scenario.patience, ..MessengerOptions::default() };
        let server = Messenger::new(core, options.clone(), handler);
        server.bind(&address(number)).map_err(|error| Error::from_io(error, "binding"))?;
        let client = Messenger::new(core, options, |_: &Connection, _: Message| {});
        Ok(Rc::new(Self {
            number,
            image: image.clone(),
            alive: Rc::new(Cell::new(true)),
            died: Rc::default(),
            shelf,
            replicas,
            server,
            client,
            links: RefCell::default(),
            gateways: scenario.gateways,
            patience: scenario.patience,
            age_max: scenario.age_max,
        }))
    }

    /// Ends the process, or the machine with it.
    fn kill(&self, kind: CrashKind) {
        let world = &self.image.world;
        world.note(|| format!("gateway {} dies: {kind:?}", self.number));
        self.alive.set(false);
        if kind == CrashKind::Power {
            // Nobody is told.
            world.cut_connections(None, 0);
        }
        world.lose_disk(path(self.number), kind);
        self.server.shutdown();
        self.client.shutdown();
        self.died.notify_all();
    }

    fn keeper(self: &Rc<Self>) -> Rc<Keeper> {
        Rc::new(Keeper { gateway: self.clone(), client: self.image.new_client() })
    }

    fn options(&self) -> ReplicationOptions {
        ReplicationOptions { patience: self.patience, retry: self.patience / 10, ..Default::default() }
    }

    /// Serves the volume here: opens the log again, or takes it over.
    async fn serve(self: &Rc<Self>, id: &LogId) -> Result<Serving> {
        let mut attempts = 0;
        loop {
            self.replicas.release(id).await;
            let (keeper, names) = (self.keeper(), (VOLUME, NAME));
            let client = keeper.client.clone();
            let opened = open_primary(&self.shelf, id, names, LogOpening::TakeOver, keeper, self.options()).await;
            match opened {
                // The record cannot be reached.
                Err(error) if error.kind() == ErrorKind::TimedOut && attempts < 20 => attempts += 1,
                opened => return self.open(opened?, client).await,
            }
        }
    }

    async fn open(self: &Rc<Self>, opened: OpenedMembers, client: String) -> Result<Serving> {
        let OpenedMembers { log, set } = opened;
        let base = BackendClient { image: self.image.clone(), name: client, alive: self.alive.clone() };
        let limits = DirtyLimits { age_max: self.age_max, ..DirtyLimits::default() };
        let options = LogOptions { limits, direct_min: Some(32 << 10), ..LogOptions::default() };
        let log = WriteLog::new(Rc::new(base), log, Rc::new(Owner(set.clone())), options);
        log.acquired().await?;
        Ok(Serving { gateway: self.clone(), log, set })
    }
}

/// Access of one opening of the log to the record, the backend and other gateways.
struct Keeper {
    gateway: Rc<Gateway>,
    client: String,
}

impl MemberKeeper for Keeper {
    fn own(&self) -> PeerId {
        peer(self.gateway.number)
    }

    fn client(&self) -> String {
        self.client.clone()
    }

    fn load(&self) -> LocalFuture<Result<Option<LogMembers>>> {
        let gateway = self.gateway.clone();
        Box::pin(async move {
            let record = gateway.image.load().await;
            if gateway.alive.get() { Ok(record) } else { std::future::pending().await }
        })
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        let (gateway, client) = (self.gateway.clone(), client.to_owned());
        if !gateway.alive.get() {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move {
            gateway.image.fence(&client).await;
            Ok(())
        })
    }

    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>> {
        let gateway = self.gateway.clone();
        if !gateway.alive.get() {
            return Box::pin(std::future::pending());
        }
        Box::pin(async move { gateway.image.change(Some(from), to).await })
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        if !self.gateway.alive.get() {
            return None;
        }
        let mut links = self.gateway.links.borrow_mut();
        let lost = |link: &Connection| link.state() == ConnectionState::Closed;
        if links.get(&peer).is_none_or(lost) {
            links.insert(peer, self.gateway.client.connect(&address(peer.0[0]), Policy::LosslessPeer));
        }
        links.get(&peer).cloned()
    }

    fn wanted(&self) -> Vec<PeerId> {
        (1..=self.gateway.gateways).map(peer).filter(|other| *other != self.own()).collect()
    }
}

struct Owner(Rc<PrimarySet>);

impl LogOwner for Owner {
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        let set = self.0.clone();
        Some(Box::pin(async move { set.ready().await }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::Io, "a log with members is not released here"))))
    }
}

/// Gateway that serves the volume.
struct Serving {
    gateway: Rc<Gateway>,
    log: Rc<WriteLog>,
    set: Rc<PrimarySet>,
}

/// Device that hosts use, as long as its gateway lives.
struct Front {
    log: Rc<WriteLog>,
    alive: Rc<Cell<bool>>,
    died: Rc<Notify>,
}

impl BlockDevice for Front {
    fn geometry(&self) -> Geometry {
        self.log.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let gone = || Error::new(ErrorKind::ShuttingDown, "the gateway is gone");
        if !self.alive.get() {
            return Box::pin(std::future::ready(Err(gone())));
        }
        let (mut answer, alive, died) = (self.log.submit(request), self.alive.clone(), self.died.clone());
        Box::pin(async move {
            let mut death = std::pin::pin!(died.wait_until(|| !alive.get()));
            std::future::poll_fn(|cx| match death.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Err(gone())),
                Poll::Pending => answer.as_mut().poll(cx),
            })
            .await
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.log.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Cluster of gateways under load.
struct Cluster {
    scenario: ReplicationScenario,
    image: Rc<SharedImage>,
    core: MessengerCore,
    gateways: Vec<Option<Rc<Gateway>>>,
    id: LogId,
    oracles: Oracles,
    load: BlockLoad,
    version: Rc<Cell<u64>>,
    rng: Rng,
}

fn run_one(world: &World, scenario: &ReplicationScenario) -> std::result::Result<ReplicationTally, String> {
    let mut rng = Rng::new(scenario.seed);
    let size = rng.range(16..128) * 4096;
    world.add_disk(BACKEND, size, 512);
    (1..=scenario.gateways).for_each(|number| world.add_disk(path(number), 32 << 20, scenario.sector));
    let load = BlockLoad::draw(&mut rng, size);
    let oracles = Oracles::new(world, size, Expected { shut_down: true, ..Expected::nothing() });
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let backend = open_backend(size).map_err(|error| error.to_string())?;
        let image = Rc::new(SharedImage {
            world: world.clone(),
            record: RefCell::default(),
            rng: RefCell::new(rng.fork()),
            fenced: RefCell::default(),
            under_way: RefCell::default(),
            ended: Notify::new(),
            clients: Cell::new(0),
            tally: RefCell::default(),
            backend,
        });
        let mut cluster = Cluster {
            scenario: scenario.clone(),
            image,
            core: MessengerCore::default(),
            gateways: vec![None; usize::from(scenario.gateways)],
            id: LogId::default(),
            oracles,
            load,
            version: Rc::new(Cell::new(0)),
            rng,
        };
        cluster.live().await?;
        let requests = cluster.load.seen.answered.get();
        cluster.image.count(|tally| (tally.runs, tally.requests) = (1, requests));
        Ok(*cluster.image.tally.borrow())
    });
    ran.map_err(|stop| format!("the run does not end: {stop:?}"))?
}

impl Cluster {
    async fn live(&mut self) -> std::result::Result<(), String> {
        for number in 1..=self.scenario.gateways {
            self.start(number).await?;
        }
        let mut serving = self.create().await?;
        for _ in 0..self.scenario.rounds {
            self.load_and_disturb(&serving).await?;
            serving = self.settle(serving).await?;
            self.check(&serving).await?;
        }
        match timeout(LONG, serving.log.close(true)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(format!("the log cannot be flushed: {error}")),
            Err(_) => return Err("the log does not close".into()),
        }
        let span = self.load.span;
        let verified = self.oracles.verify_backend(&*self.image.backend, span).await;
        verified.map_err(|error| error.to_string())?;
        self.oracles.violation()?;
        self.oracles.check_backend()
    }

    async fn start(&mut self, number: u8) -> std::result::Result<(), String> {
        let started = Gateway::start(number, &self.image, &self.core, &self.scenario).await;
        let gateway = started.map_err(|error| format!("gateway {number} does not start: {error}"))?;
        self.gateways[usize::from(number) - 1] = Some(gateway);
        Ok(())
    }

    /// Creates the log at the first gateway.
    async fn create(&mut self) -> std::result::Result<Serving, String> {
        let failed = |error: Error| format!("the log cannot be created: {error}");
        let gateway = self.gateways[0].clone().expect("it has started");
        self.id = gateway.shelf.create(VOLUME, NAME, self.scenario.log_size, 0).await.map_err(failed)?;
        let keeper = gateway.keeper();
        let (copy, own, client) = ([1; 16], peer(1), keeper.client.clone());
        let record = MemberRecord::created(own, copy, "nobody".to_owned());
        let record = record.opened(own, copy, client.clone()).expect("its own log");
        self.image.record.replace(Some(record.clone()));
        let opened = open_members(&gateway.shelf, &self.id, (VOLUME, NAME), record, keeper, gateway.options()).await;
        let opened = opened.map_err(failed)?;
        opened.set.start();
        gateway.open(opened, client).await.map_err(failed)
    }

    fn front(&self, serving: &Serving) -> Rc<dyn BlockDevice> {
        let Gateway { alive, died, .. } = &*serving.gateway;
        let front = Front { log: serving.log.clone(), alive: alive.clone(), died: died.clone() };
        self.oracles.watch(Rc::new(front), true)
    }

    /// Runs the load, and does something to the gateways meanwhile.
    async fn load_and_disturb(&mut self, serving: &Serving) -> std::result::Result<(), String> {
        let (device, load, oracle) = (self.front(serving), self.load.clone(), self.oracles.blocks.clone());
        let (version, mut rng) = (self.version.clone(), self.rng.fork());
        let loading = spawn(async move { load.run_on(device, oracle, version, &mut rng).await });
        let events = self.rng.range(1..4);
        for _ in 0..events {
            sleep(Duration::from_nanos(self.rng.range(MILLI..200 * MILLI))).await;
            self.disturb(serving);
        }
        match timeout(LONG, loading).await {
            Ok(()) => self.oracles.violation(),
            Err(_) => Err("the load does not end".into()),
        }
    }

    fn disturb(&mut self, serving: &Serving) {
        let world = self.image.world.clone();
        let kind = if self.rng.coin() { CrashKind::Power } else { CrashKind::Kill };
        let primary = serving.gateway.number;
        let other = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
        match self.rng.below(6) {
            0 | 1 if serving.gateway.alive.get() => self.kill(primary, kind),
            2 if other != primary => self.kill(other, kind),
            3 => {
                let cut = world.cut_connections(None, 300_000);
                self.image.count(|tally| tally.cuts += cut as u64);
            }
            4 => {
                let reset = world.reset_connections(None, 500_000);
                self.image.count(|tally| tally.cuts += reset as u64);
            }
            _ => {}
        }
    }

    fn kill(&mut self, number: u8, kind: CrashKind) {
        if let Some(gateway) = self.gateways[usize::from(number) - 1].take() {
            gateway.kill(kind);
            self.image.count(|tally| {
                tally.died += 1;
                tally.power_failures += u64::from(kind == CrashKind::Power);
            });
        }
    }

    /// Returns the gateway that serves the volume next: the one that does, if it lives, or another one, which takes over.
    async fn settle(&mut self, serving: Serving) -> std::result::Result<Serving, String> {
        let alive = serving.gateway.alive.get();
        let healthy = alive && serving.log.mode().is_on();
        if healthy && !self.rng.one_in(3) {
            self.restart_some(1).await?;
            return Ok(serving);
        }
        // The former primary may live on, and suspect nothing.
        let mut former = Some(serving);
        if !alive || self.rng.coin() {
            former = None;
        }
        for attempt in 0..100_u64 {
            self.restart_some(attempt).await?;
            let number = self.rng.range(1..u64::from(self.scenario.gateways) + 1) as u8;
            let Some(gateway) = self.gateways[usize::from(number) - 1].clone() else { continue };
            if former.as_ref().is_some_and(|former| former.gateway.number == number) {
                former = None;
            }
            match timeout(LONG, gateway.serve(&self.id)).await {
                Ok(Ok(serving)) => return Ok(serving),
                Ok(Err(error)) => {
                    self.image.world.note(|| format!("gateway {number} cannot serve: {error}"));
                    self.image.count(|tally| tally.refused += 1);
                    if error.kind() == ErrorKind::Corrupt {
                        return Err(format!("gateway {number}: {error}"));
                    }
                }
                Err(_) => return Err(format!("gateway {number} neither serves nor fails")),
            }
        }
        Err(format!("nobody can serve the volume: {:?}", self.image.record.borrow()))
    }

    /// Starts gateways that are down: each with a chance that grows with the attempts.
    async fn restart_some(&mut self, attempt: u64) -> std::result::Result<(), String> {
        for number in 1..=self.scenario.gateways {
            let down = self.gateways[usize::from(number) - 1].is_none();
            if down && (attempt > 3 || self.rng.one_in(3)) {
                self.start(number).await?;
            }
        }
        Ok(())
    }

    /// Reads everything; every answer passes the oracle.
    async fn check(&mut self, serving: &Serving) -> std::result::Result<(), String> {
        let device = self.front(serving);
        let mut at = 0;
        while at < self.load.span {
            let len = (self.load.span - at).min(64 << 10);
            let read = timeout(LONG, device.submit(BlockRequest::Read(Extent::new(at, len)))).await;
            match read {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(format!("a read after all was settled: {error}")),
                Err(_) => return Err("a read after all was settled does not end".into()),
            }
            at += len;
        }
        let _ = serving.set.record();
        self.oracles.violation()?;
        self.oracles.check_backend()
    }
}
