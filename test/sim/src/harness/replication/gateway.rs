//! Gateway: a process with a disk, connections to the others, and perhaps the volume.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::task::Poll;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, DataKey, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_messenger::{
    Address, Connection, ConnectionState, Message, Messenger, MessengerCore, MessengerOptions, Policy,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, spawn};
use forebay_writelog::replication::{
    LeaseClock, LogMembers, LogOpening, MemberKeeper, OpenedMembers, PeerId, PrimarySet, RecordChange, ReplicaHost,
    ReplicaPolicy, ReplicaShelf, ReplicationOptions, open_primary,
};
use forebay_writelog::{DirtyLimits, LogId, LogOptions, LogOwner, MediumKind, Shelf, ShelfOptions, WriteLog};

use super::image::{BackendClient, SharedImage};
use super::memory::MappedMemory;
use super::{NAME, ReplicationScenario, VOLUME};
use crate::pmem::SimPmem;
use crate::rng::Rng;
use crate::world::CrashKind;

/// Gateway while its process lives.
pub(super) struct Gateway {
    pub(super) number: u8,
    pub(super) image: Rc<SharedImage>,
    pub(super) alive: Rc<Cell<bool>>,
    /// Signaled when it dies.
    pub(super) died: Rc<Notify>,
    pub(super) shelf: Rc<Shelf>,
    /// Memory of its machine, if its log device is in some, and as its process has it.
    pub(super) memory: Option<(SimPmem, Rc<MappedMemory>)>,
    killed: Cell<bool>,
    /// Number of blocks placed through windows that were counted.
    placed: Cell<u64>,
    windows: bool,
    pub(super) replicas: Rc<ReplicaHost>,
    pub(super) server: Messenger,
    pub(super) client: Messenger,
    pub(super) links: RefCell<BTreeMap<PeerId, Connection>>,
    pub(super) gateways: u8,
    pub(super) patience: Duration,
    pub(super) age_max: Duration,
    pub(super) policy: ReplicaPolicy,
    pub(super) clock: LeaseClock,
    /// Key of the volume, if it is encrypted.
    pub(super) key: Option<DataKey>,
}

pub(super) fn peer(number: u8) -> PeerId {
    PeerId([number; 16])
}

pub(super) fn path(number: u8) -> String {
    format!("/gateway{number}")
}

pub(super) fn address(number: u8) -> Address {
    format!("tcp:127.0.0.{number}:7000").parse().expect("an address")
}

/// Returns the address of a gateway, as the network has it.
fn listening(number: u8) -> Addr {
    Addr::Tcp(([127, 0, 0, number], 7000).into())
}

impl Gateway {
    pub(super) async fn start(
        number: u8,
        memory: Option<SimPmem>,
        image: &Rc<SharedImage>,
        core: &MessengerCore,
        scenario: &ReplicationScenario,
    ) -> Result<Rc<Self>> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        let alive = Rc::new(Cell::new(true));
        let itself: Rc<OnceCell<Weak<Self>>> = Rc::default();
        let memory = memory.map(|memory| {
            let (world, itself) = (image.world.clone(), itself.clone());
            let dies = move |kind| {
                // Nothing of it arrives anywhere from here on.
                world.cut_connections(Some(&listening(number)), 1_000_000);
                let itself = itself.get().and_then(Weak::upgrade);
                drop(spawn(async move {
                    if let Some(gateway) = itself {
                        gateway.image.count(|tally| tally.torn += 1);
                        gateway.kill(kind);
                    }
                }));
            };
            (memory.clone(), MappedMemory::new(memory, alive.clone(), Box::new(dies)))
        });
        let path = path(number);
        let shelf = match &memory {
            Some((_, mapped)) if scenario.medium(number) == MediumKind::Dram => {
                Shelf::in_memory(mapped.clone(), &path, options).await?
            }
            Some((_, mapped)) => Shelf::on_memory(mapped.clone(), &path, options).await?,
            None => Shelf::open(MediumKind::Ssd, Path::new(&path), options).await?,
        };
        let replicas = ReplicaHost::with_clock(
            vec![ReplicaShelf { shelf: shelf.clone(), quota: 64 << 20 }],
            scenario.clock(number),
        );
        let host = replicas.clone();
        let handler = move |connection: &Connection, message: Message| {
            assert!(host.handle(connection, message), "only requests to replicas are sent");
        };
        let options = MessengerOptions { session_timeout: 4 * scenario.patience, ..MessengerOptions::default() };
        let server = Messenger::new(core, options.clone(), handler);
        server.bind(&address(number)).map_err(|error| Error::from_io(error, "binding"))?;
        let client = Messenger::new(core, options, |_: &Connection, _: Message| {});
        let gateway = Rc::new(Self {
            number,
            image: image.clone(),
            alive,
            died: Rc::default(),
            shelf,
            memory,
            killed: Cell::new(false),
            placed: Cell::new(0),
            windows: scenario.windows,
            replicas,
            server,
            client,
            links: RefCell::default(),
            gateways: scenario.gateways,
            patience: scenario.patience,
            age_max: scenario.age_max,
            policy: scenario.policy,
            clock: scenario.clock(number),
            key: scenario.key(),
        });
        itself.set(Rc::downgrade(&gateway)).expect("set once");
        Ok(gateway)
    }

    /// Ends the process, or the machine with it.
    pub(super) fn kill(&self, kind: CrashKind) {
        if self.killed.replace(true) {
            return;
        }
        let world = &self.image.world;
        self.image.count(|tally| {
            tally.died += 1;
            tally.power_failures += u64::from(kind == CrashKind::Power);
        });
        world.note(|| format!("gateway {} dies: {kind:?}", self.number));
        self.alive.set(false);
        if kind == CrashKind::Power {
            // Its primary is not told.
            world.cut_connections(Some(&listening(self.number)), 1_000_000);
        }
        match &self.memory {
            Some((memory, _)) => {
                let seed = self.image.rng.borrow_mut().bits();
                memory.crash(kind, &mut Rng::new(seed));
            }
            None => drop(world.lose_disk(path(self.number), kind)),
        }
        self.disconnect();
        self.died.notify_all();
    }

    /// Ends all connections.  Messengers hold their connections, and those hold their messenger, until then.
    pub(super) fn disconnect(&self) {
        let placed = self.replicas.placed_blocks();
        self.image.count(|tally| tally.placed += placed - self.placed.get());
        self.placed.set(placed);
        self.server.shutdown();
        self.client.shutdown();
        self.links.borrow_mut().clear();
    }

    pub(super) fn keeper(self: &Rc<Self>) -> Rc<Keeper> {
        Rc::new(Keeper { gateway: self.clone(), client: self.image.new_client() })
    }

    pub(super) fn options(&self) -> ReplicationOptions {
        ReplicationOptions {
            patience: self.patience,
            retry: self.patience / 10,
            clock: self.clock,
            windows_by_message: self.windows,
            ..Default::default()
        }
    }

    /// Serves the volume here: opens the log again, or takes it over.
    pub(super) async fn serve(self: &Rc<Self>, id: &LogId) -> Result<Serving> {
        let mut attempts = 0;
        self.replicas.give_up(id).await;
        loop {
            let (keeper, names) = (self.keeper(), (VOLUME, NAME));
            let client = keeper.client.clone();
            let opened =
                open_primary(&self.shelf, id, names, LogOpening::TakeOver, keeper, (self.key.as_ref(), self.options()))
                    .await;
            match opened {
                // The record cannot be reached.
                Err(error) if error.kind() == ErrorKind::TimedOut && attempts < 20 => attempts += 1,
                opened => {
                    let opened = opened.inspect_err(|_| self.replicas.resume(id))?;
                    let (set, replicas, id) = (opened.set.clone(), self.replicas.clone(), *id);
                    drop(spawn(async move {
                        set.ended().await;
                        replicas.resume(&id);
                    }));
                    return self.open(opened, client).await;
                }
            }
        }
    }

    pub(super) async fn open(self: &Rc<Self>, opened: OpenedMembers, client: String) -> Result<Serving> {
        let OpenedMembers { log, set } = opened;
        let backend = client.clone();
        let base = BackendClient { image: self.image.clone(), name: client.clone(), alive: self.alive.clone() };
        let limits = DirtyLimits { age_max: self.age_max, ..DirtyLimits::default() };
        let options = LogOptions { limits, direct_min: Some(32 << 10), ..LogOptions::default() };
        let owner = Owner { set: set.clone(), gateway: self.clone(), client };
        let log = WriteLog::new(Rc::new(base), log, Rc::new(owner), options);
        log.acquired().await?;
        Ok(Serving { gateway: self.clone(), log, set, client: backend })
    }
}

/// Access of one opening of the log to the record, the backend and other gateways.
pub(super) struct Keeper {
    pub(super) gateway: Rc<Gateway>,
    pub(super) client: String,
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
        let client = self.client.clone();
        Box::pin(async move { gateway.image.change(&client, Some(from), to).await })
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

    fn policy(&self) -> ReplicaPolicy {
        self.gateway.policy
    }

    fn promise_over(&self) -> LocalFuture<()> {
        let gateway = self.gateway.clone();
        Box::pin(async move {
            let id = gateway.image.log.get();
            gateway.replicas.promise_over(&id, gateway.policy.lease).await;
        })
    }
}

pub(super) struct Owner {
    set: Rc<PrimarySet>,
    gateway: Rc<Gateway>,
    client: String,
}

impl LogOwner for Owner {
    fn permit_read(&self) -> Option<LocalFuture<Result<()>>> {
        self.set.permit_read()
    }

    fn permit_acknowledgement(&self) -> Option<LocalFuture<Result<()>>> {
        self.set.permit_acknowledgement()
    }

    fn unusable(&self) -> Option<LocalFuture<Error>> {
        self.set.mirror_lost()
    }

    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        let set = self.set.clone();
        Some(Box::pin(async move { set.ready().await }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        let (gateway, client, term) = (self.gateway.clone(), self.client.clone(), self.set.record().term());
        if !gateway.alive.get() {
            return Box::pin(std::future::pending());
        }
        let set = self.set.clone();
        Box::pin(async move { gateway.image.release(&client, term).await.map(|()| set.release()) })
    }
}

/// Gateway that serves the volume.
pub(super) struct Serving {
    pub(super) gateway: Rc<Gateway>,
    pub(super) log: Rc<WriteLog>,
    pub(super) set: Rc<PrimarySet>,
    /// Client of the backend.
    pub(super) client: String,
}

impl Serving {
    /// Returns whether the record has it as the primary still, and no attempt to take over has fenced it.
    pub(super) fn is_current(&self) -> bool {
        let (term, image) = (self.set.record().term(), &self.gateway.image);
        let is_named = image.record.borrow().as_ref().is_none_or(|record| record.term() == term);
        is_named && !image.fenced.borrow().contains(&self.client)
    }
}

/// Device that hosts use, as long as its gateway lives.
pub(super) struct Front {
    pub(super) log: Rc<WriteLog>,
    pub(super) alive: Rc<Cell<bool>>,
    pub(super) died: Rc<Notify>,
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
