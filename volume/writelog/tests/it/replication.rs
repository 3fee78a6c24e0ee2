//! Logs with members: a primary and its replicas, on disks of their own, over the messenger within the process.

mod attached;
mod dram;
mod encrypted;
mod leases;
mod media_failures;
mod pmem;
mod replicas_min;
mod windows;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::ready;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, DataKey, Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::{Address, Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy};
use forebay_reactor::{Buf, BufMut, File, OpenOptions, sleep, spawn, timeout};
use forebay_sim::{CrashPolicy, DiskFaults, Faults, SimPmem, World};
use forebay_writelog::format::{LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN};
use forebay_writelog::replication::wire::{KIND_REQUEST, ReplicaAction, ReplicaAnswer, ReplicaRequest};
use forebay_writelog::replication::{
    LogMembers, LogOpening, MemberKeeper, MemberRecord, OpenedMembers, PeerId, PrimarySet, RecordChange, ReplicaHost,
    ReplicaPolicy, ReplicaShelf, ReplicationOptions, open_members, open_primary,
};
use forebay_writelog::{LogId, LogOwner, LogRecord, MediumKind, Shelf, ShelfOptions, WriteLog};

use crate::common::{LONG, MILLISECOND, Memory, patience, read, write};

/// Record of the image, and its backend.
pub struct SharedImage {
    /// Record of the volume's log, where an attachment keeps it.
    log_record: RefCell<LogRecord<&'static str>>,
    /// Log that the hosts serve.
    log: Cell<LogId>,
    policy: Cell<ReplicaPolicy>,
    /// Peer that holds the exclusive lock.
    owner: Rc<Cell<Option<PeerId>>>,
    record: RefCell<Option<LogMembers>>,
    /// Set while changes of the record fail.
    unreachable: Cell<bool>,
    /// Clients of the backend that were fenced.
    fenced: RefCell<Vec<String>>,
    /// Set once the client of the first host is fenced.
    fences_one: Cell<bool>,
    /// Set while no client can be fenced.
    cannot_fence: Cell<bool>,
    base: Rc<Memory>,
}

/// Requests to a replica that arrive late.
#[derive(Default)]
struct ParkedRequests {
    on: Cell<bool>,
    requests: RefCell<Vec<(Connection, Message)>>,
}

impl ParkedRequests {
    /// Waits until a request has arrived for which `wanted` is true.
    async fn have(&self, wanted: impl Fn(&ReplicaAction) -> bool) {
        let is_wanted = |message: &Message| {
            let request = ReplicaRequest::decode(&message.front.to_vec());
            request.is_ok_and(|request| wanted(&request.action))
        };
        let arrived = async {
            while !self.requests.borrow().iter().any(|(_, message)| is_wanted(message)) {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, arrived).await.expect("a request");
    }

    /// Lets the requests arrive, and all that follow.
    fn deliver(&self, host: &Rc<ReplicaHost>) {
        self.on.set(false);
        for (connection, message) in self.requests.take() {
            assert!(host.handle(&connection, message), "only requests to replicas are sent");
        }
    }
}

/// Peer with a log device.
pub struct Host {
    pub id: PeerId,
    image: Rc<SharedImage>,
    pub shelf: Rc<Shelf>,
    pub replicas: Rc<ReplicaHost>,
    parked: Rc<ParkedRequests>,
    server: Messenger,
    client: Messenger,
    wanted: RefCell<Vec<PeerId>>,
    links: RefCell<BTreeMap<PeerId, Connection>>,
    opened: Cell<u32>,
    /// Set if this host writes into its replicas' copies through memory windows.
    windows: Cell<bool>,
    /// Key of the volume, if this host has it.
    key: RefCell<Option<DataKey>>,
}

fn peer(number: u8) -> PeerId {
    PeerId([number; 16])
}

fn options() -> ReplicationOptions {
    ReplicationOptions { patience: 200 * MILLISECOND, retry: 10 * MILLISECOND, ..ReplicationOptions::default() }
}

pub fn path(number: u8) -> String {
    format!("/logs{number}")
}

fn address(number: u8) -> Address {
    format!("loopback:peer{number}").parse().expect("an address")
}

impl Host {
    async fn start(
        number: u8,
        memory: Option<(MediumKind, SimPmem)>,
        image: &Rc<SharedImage>,
        core: &MessengerCore,
    ) -> Rc<Self> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        let path = path(number);
        let shelf = match memory {
            Some((MediumKind::Dram, memory)) => Shelf::in_memory(Rc::new(memory), &path, options).await,
            Some((_, memory)) => Shelf::on_memory(Rc::new(memory), &path, options).await,
            None => Shelf::open(MediumKind::Ssd, Path::new(&path), options).await,
        };
        let shelf = shelf.expect("a shelf");
        let replicas = ReplicaHost::new(vec![ReplicaShelf { shelf: shelf.clone(), quota: 64 << 20 }]);
        let (host, parked): (_, Rc<ParkedRequests>) = (replicas.clone(), Rc::default());
        let parks = parked.clone();
        let handler = move |connection: &Connection, message: Message| {
            if parks.on.get() {
                parks.requests.borrow_mut().push((connection.clone(), message));
            } else {
                assert!(host.handle(connection, message), "only requests to replicas are sent");
            }
        };
        let server = Messenger::new(core, MessengerOptions::default(), handler);
        server.bind(&address(number)).expect("an address");
        let client = Messenger::new(core, MessengerOptions::default(), |_: &Connection, _: Message| {});
        Rc::new(Self {
            id: peer(number),
            image: image.clone(),
            shelf,
            replicas,
            parked,
            server,
            client,
            wanted: RefCell::default(),
            links: RefCell::default(),
            opened: Cell::new(0),
            windows: Cell::new(false),
            key: RefCell::default(),
        })
    }

    fn options(&self) -> ReplicationOptions {
        ReplicationOptions { windows_by_message: self.windows.get(), ..options() }
    }

    /// Cuts the host off from its peers.
    pub fn kill(&self) {
        self.server.shutdown();
        self.client.shutdown();
    }

    /// Creates a log here.
    async fn create(self: &Rc<Self>) -> (LogId, Primary) {
        let copy = [self.id.0[0]; 16];
        let (names, key) = (("one", "pool/a"), self.key.borrow().clone());
        let id = match self.shelf.medium() {
            // Gets members when it is opened.
            MediumKind::Ssd => self.shelf.create_with_key(names, 1 << 20, 0, key.as_ref()).await,
            MediumKind::Pmem | MediumKind::Dram => {
                self.shelf.create_with_members_and_key(names, 1 << 20, 0, copy, key.as_ref()).await
            }
        };
        let id = id.expect("room");
        self.image.log.set(id);
        let record = MemberRecord::created(self.id, copy, "client.1".to_owned());
        let record = record.opened(self.id, copy, "client.2".to_owned()).expect("its own");
        self.image.record.replace(Some(record.clone()));
        let keeper = Rc::new(Keeper(self.clone()));
        let opened =
            open_members(&self.shelf, &id, ("one", "pool/a"), record, keeper, (key.as_ref(), self.options())).await;
        let opened = opened.expect("a log");
        opened.set.start();
        (id, self.front(opened))
    }

    /// Takes the log over.
    async fn take_over(self: &Rc<Self>, id: &LogId) -> Result<Primary> {
        self.replicas.give_up(id).await;
        self.opened.set(self.opened.get() + 1);
        let (keeper, opening) = (Rc::new(Keeper(self.clone())), LogOpening::TakeOver);
        let key = self.key.borrow().clone();
        let opened =
            open_primary(&self.shelf, id, ("one", "pool/a"), opening, keeper, (key.as_ref(), self.options())).await;
        let opened = opened.inspect_err(|_| self.replicas.resume(id))?;
        let (set, replicas, id) = (opened.set.clone(), self.replicas.clone(), *id);
        drop(spawn(async move {
            set.ended().await;
            replicas.resume(&id);
        }));
        Ok(self.front(opened))
    }

    /// Puts an opened log in front of the volume.
    fn front(&self, opened: OpenedMembers) -> Primary {
        let OpenedMembers { log, set } = opened;
        let log = WriteLog::new(self.image.base.clone(), log, Rc::new(Owner(set.clone())), patience());
        Primary { log, set }
    }
}

pub struct Keeper(pub Rc<Host>);

impl MemberKeeper for Keeper {
    fn own(&self) -> PeerId {
        self.0.id
    }

    fn client(&self) -> String {
        format!("client of {}, {}", self.0.id, self.0.opened.get())
    }

    fn load(&self) -> LocalFuture<Result<Option<LogMembers>>> {
        Box::pin(ready(Ok(self.0.image.record.borrow().clone())))
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        self.0.image.fenced.borrow_mut().push(client.to_owned());
        Box::pin(ready(Ok(())))
    }

    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>> {
        let image = self.0.image.clone();
        // A change by the client of a former primary.
        let is_fenced = from.client() == to.client() && image.fenced.borrow().contains(to.client());
        Box::pin(async move {
            sleep(MILLISECOND).await;
            if is_fenced || image.fences_one.get() {
                return Err(Error::new(ErrorKind::Fenced, "this client is on the blocklist"));
            }
            if image.unreachable.get() {
                return Err(Error::new(ErrorKind::TimedOut, "the record cannot be reached"));
            }
            let mut record = image.record.borrow_mut();
            Ok(match &*record {
                Some(found) if *found == from => {
                    *record = Some(to);
                    RecordChange::Changed
                }
                other => RecordChange::Other(other.clone()),
            })
        })
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        let mut links = self.0.links.borrow_mut();
        let lost = |link: &Connection| link.reason().is_some();
        if links.get(&peer).is_none_or(lost) {
            let link = self.0.client.connect(&address(peer.0[0]), Policy::LosslessPeer);
            links.insert(peer, link);
        }
        links.get(&peer).filter(|link| !lost(link)).cloned()
    }

    fn wanted(&self) -> Vec<PeerId> {
        self.0.wanted.borrow().clone()
    }

    fn policy(&self) -> ReplicaPolicy {
        self.0.image.policy.get()
    }

    fn promise_over(&self) -> LocalFuture<()> {
        let (host, id) = (self.0.clone(), self.0.image.log.get());
        Box::pin(async move { host.replicas.promise_over(&id, host.image.policy.get().lease).await })
    }
}

struct Owner(Rc<PrimarySet>);

impl LogOwner for Owner {
    fn permit_read(&self) -> Option<LocalFuture<Result<()>>> {
        self.0.permit_read()
    }

    fn permit_acknowledgement(&self) -> Option<LocalFuture<Result<()>>> {
        self.0.permit_acknowledgement()
    }

    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        let set = self.0.clone();
        Some(Box::pin(async move { set.ready().await }))
    }

    fn unusable(&self) -> Option<LocalFuture<Error>> {
        self.0.mirror_lost()
    }

    fn release(&self) -> LocalFuture<Result<()>> {
        self.0.release();
        Box::pin(ready(Ok(())))
    }
}

/// Log that is served.
struct Primary {
    log: Rc<WriteLog>,
    set: Rc<PrimarySet>,
}

impl Primary {
    async fn write(&self, offset: u64, byte: u8) -> Result<()> {
        self.log.submit(write(offset, byte, 4096)).await.map(drop)
    }

    /// Waits until the record has these complete members.
    async fn has(&self, numbers: &[u8]) {
        let wanted: Vec<PeerId> = numbers.iter().map(|number| peer(*number)).collect();
        let reached = async {
            while self.set.record().complete().collect::<Vec<_>>() != wanted {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, reached).await.unwrap_or_else(|_| panic!("{:?}", self.set.record()));
    }
}

/// Opens a log again that was closed, once nothing is in flight any more.
async fn reopened(host: &Rc<Host>, id: &LogId) -> Primary {
    let reopen = async {
        loop {
            match host.take_over(id).await {
                Ok(primary) => break primary,
                Err(_) => sleep(MILLISECOND).await,
            }
        }
    };
    timeout(LONG, reopen).await.expect("in time")
}

/// Runs a test with hosts 1 and up.
pub fn with_hosts(count: u8, test: impl AsyncFnOnce(World, Vec<Rc<Host>>)) {
    let media = vec![MediumKind::Ssd; usize::from(count)];
    with_media(&media, async |world, _, hosts| test(world, hosts).await);
}

/// Runs a test with hosts 1 and up, whose log devices are of these media; those in persistent memory get it, too.
pub fn with_media(media: &[MediumKind], test: impl AsyncFnOnce(World, Vec<SimPmem>, Vec<Rc<Host>>)) {
    let world = World::new(1, Faults { crash: CrashPolicy::LoseAll, ..Faults::none() });
    let numbers = || (1..).zip(media);
    numbers().for_each(|(number, _)| world.add_disk(path(number), 16 << 20, 512));
    let memories: Vec<SimPmem> = media.iter().map(|_| SimPmem::new(&world, 16 << 20)).collect();
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let image = Rc::new(SharedImage {
            log_record: RefCell::default(),
            log: Cell::default(),
            policy: Cell::default(),
            owner: Rc::default(),
            record: RefCell::default(),
            unreachable: Cell::new(false),
            fenced: RefCell::default(),
            fences_one: Cell::new(false),
            cannot_fence: Cell::new(false),
            base: Memory::new(1 << 20),
        });
        let core = MessengerCore::default();
        let mut hosts = Vec::new();
        for ((number, medium), memory) in numbers().zip(&memories) {
            let memory = (*medium != MediumKind::Ssd).then(|| (*medium, memory.clone()));
            hosts.push(Host::start(number, memory, &image, &core).await);
        }
        test(world.clone(), memories.clone(), hosts).await;
    });
    ran.expect("it ends");
}

#[test]
fn a_replica_that_adopts_late_does_not_wait_for_retired_entries() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (_, primary) = one.create().await;
        for at in 0..3 {
            primary.write(at * 4096, 1).await.expect("written");
        }
        one.wanted.replace(vec![two.id]);
        // The copy is created, and the request to adopt the term is on its way.
        let filling = async {
            while primary.set.record().state(two.id).is_none() {
                two.parked.on.set(!two.shelf.ids().is_empty());
                sleep(Duration::from_micros(10)).await;
            }
        };
        timeout(LONG, filling).await.expect("a member");
        two.parked.have(|action| matches!(action, ReplicaAction::Adopt(_))).await;
        timeout(LONG, primary.log.drain()).await.expect("in time").expect("written back");
        two.parked.deliver(&two.replicas);
        // Nothing is written that would tell the replica of a gap.
        primary.has(&[1, 2]).await;
    });
}

#[test]
fn a_replica_that_is_not_wanted_any_more_is_removed_with_its_copy() {
    with_hosts(3, async |_, hosts| {
        let [one, two, three] = &hosts[..] else { unreachable!("three hosts") };
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.set.wanted_changed();
        primary.has(&[1, 2]).await;
        primary.write(0, 1).await.expect("written");
        assert_eq!(two.shelf.ids(), [id]);
        // The new one is filled first.
        one.wanted.replace(vec![three.id]);
        primary.set.wanted_changed();
        let replaced = async {
            while primary.set.record().state(two.id).is_some() {
                sleep(Duration::from_micros(10)).await;
            }
        };
        timeout(LONG, replaced).await.expect("replaced");
        assert_eq!(primary.set.record().complete().collect::<Vec<_>>(), [one.id, three.id]);
        let discarded = async {
            while !two.shelf.ids().is_empty() {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, discarded).await.expect("discarded");
        primary.write(4096, 2).await.expect("written");
        assert_eq!(three.shelf.ids(), [id]);
    });
}

#[test]
fn former_logs_of_a_volume_are_discarded_with_its_next_copy() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let left = two.shelf.create_replica(&[9; 16], ("one", "pool/a"), (1 << 20, 512), 0).await.expect("room");
        let other = two.shelf.create_replica(&[8; 16], ("two", "pool/b"), (1 << 20, 512), 0).await.expect("room");
        assert_ne!(left, other);
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        let mut ids = two.shelf.ids();
        ids.sort_unstable();
        let mut expected = [[8; 16], id];
        expected.sort_unstable();
        assert_eq!(ids, expected);
    });
}

#[test]
fn a_replica_is_filled_and_takes_over_with_everything() {
    filled_and_taken_over(&[MediumKind::Ssd; 2]);
}

/// Fills a replica, and lets it take over.
fn filled_and_taken_over(media: &[MediumKind]) {
    with_media(media, async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        for at in 0..20 {
            primary.write(at * 4096, at as u8 + 1).await.expect("written");
        }
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        for at in 10..40 {
            primary.write(at * 4096, at as u8 + 100).await.expect("written");
        }
        one.kill();
        let taken = two.take_over(&id).await.expect("taken over");
        assert_eq!(*one.image.fenced.borrow(), ["client.2"]);
        for at in 0..40 {
            let byte = if at < 10 { at as u8 + 1 } else { at as u8 + 100 };
            let data = read(&*taken.log, at * 4096, 4096).await;
            assert_eq!((at, data[0], data[512]), (at, byte, byte ^ 1));
        }
        // The former primary is not told, but it acknowledges nothing any more.
        let refused = timeout(LONG, primary.write(0, 7)).await;
        assert!(refused.is_ok_and(|written| written.is_err()));
        assert_eq!(primary.set.record().term(), 2);
        taken.write(0, 9).await.expect("the new primary writes");
        taken.log.close(true).await.expect("flushed");
    });
}

#[test]
fn nobody_is_fenced_for_a_takeover_that_is_refused() {
    with_hosts(3, async |_, hosts| {
        let [one, two, three] = &hosts[..] else { unreachable!("three hosts") };
        let (id, primary) = one.create().await;
        let refused = |opened: Result<Primary>| opened.err().map(|error| error.kind());
        assert_eq!(refused(two.take_over(&id).await), Some(ErrorKind::NotFound), "it has no copy");
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        // A copy that the record has dropped.
        two.kill();
        primary.write(0, 1).await.expect("written without the replica");
        primary.has(&[1]).await;
        assert_eq!(refused(two.take_over(&id).await), Some(ErrorKind::Denied));
        // A copy that lacks entries.
        let copy = three.shelf.create_replica(&id, ("one", "pool/a"), (1 << 20, 512), 9).await.expect("room");
        let record = primary.set.record().with_filling(three.id, copy);
        one.image.record.replace(Some(record));
        assert_eq!(refused(three.take_over(&id).await), Some(ErrorKind::Denied));
        assert!(one.image.fenced.borrow().is_empty());
    });
}

#[test]
fn a_volume_stalls_until_the_record_has_dropped_a_replica() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (_, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        one.image.unreachable.set(true);
        two.kill();
        let mut writing = Box::pin(primary.write(0, 1));
        assert!(timeout(10 * options().patience, &mut writing).await.is_err(), "not without the record");
        assert_eq!(primary.set.record().complete().count(), 2);
        one.image.unreachable.set(false);
        timeout(LONG, writing).await.expect("in time").expect("written");
        assert_eq!(primary.set.record().complete().count(), 1);
    });
}

#[test]
fn a_replica_that_was_away_gets_what_it_lacks_from_the_medium() {
    filled_from_the_medium(&[MediumKind::Ssd; 2]);
}

/// Fills a replica from a log whose ring has gone round, and lets it take over.
fn filled_from_the_medium(media: &[MediumKind]) {
    with_media(media, async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        // More than is kept in memory, and more than the ring holds: write-back retires it meanwhile.
        for at in 0..100 {
            primary.write(at % 64 * 4096, at as u8).await.expect("written");
            if at % 40 == 39 {
                primary.log.submit(BlockRequest::Flush).await.expect("flushed");
                primary.log.drain().await.expect("written back");
            }
        }
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        let taken = two.take_over(&id).await.expect("taken over");
        for at in 36..100 {
            assert_eq!(read(&*taken.log, at % 64 * 4096, 4096).await[0], at as u8, "{at}");
        }
    });
}

#[test]
fn a_restarted_primary_fences_its_former_process() {
    with_hosts(1, async |_, hosts| {
        let (id, primary) = hosts[0].create().await;
        primary.write(0, 5).await.expect("written");
        primary.log.gone().await;
        let again = hosts[0].take_over(&id).await.expect("opened again");
        assert_eq!(*hosts[0].image.fenced.borrow(), ["client.2"]);
        assert_eq!(read(&*again.log, 0, 4096).await[0], 5);
    });
}

#[test]
fn the_ring_is_kept_for_a_replica_that_is_slow_to_retire() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (_, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        let slow = DiskFaults { write_latency: 3_000_000..6_000_000, ..DiskFaults::none() };
        assert!(world.set_disk_faults(path(2), Some(slow)));
        let before = primary.set.record();
        // The ring goes round more than twice.
        for at in 0..600 {
            primary.write(at % 64 * 4096, at as u8).await.expect("written");
        }
        assert_eq!(primary.set.record(), before, "the replica has answered everything");
    });
}

#[test]
fn a_primary_that_was_superseded_destroys_no_copy() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        primary.write(0, 5).await.expect("written");
        let former = primary.set.record().term() as u32;
        let taken = two.take_over(&id).await.expect("taken over");
        taken.log.close(false).await.expect("closed");
        taken.log.gone().await;
        let action = ReplicaAction::Create {
            volume: "one".into(),
            name: "pool/a".into(),
            size: 1 << 20,
            unit: 512,
            epoch: 1,
            in_memory: false,
        };
        for action in [action, ReplicaAction::Discard { epoch: 99 }] {
            let link = Keeper(one.clone()).connection(two.id).expect("a connection");
            let request = ReplicaRequest { log: id, term: former, action }.encode();
            let answer =
                link.request(Message::new(KIND_REQUEST).front(Buf::copy_of(&request))).await.expect("answered");
            let answer = ReplicaAnswer::decode(&answer.front.to_vec()).expect("an answer");
            assert!(matches!(&answer, ReplicaAnswer::Failed(why) if why.contains("follows the primary")), "{answer:?}");
        }
        let again = two.take_over(&id).await.expect("opened again");
        assert_eq!(read(&*again.log, 0, 4096).await[0], 5);
    });
}

#[test]
fn a_damaged_superblock_leads_no_copy_back_to_a_former_term() {
    with_hosts(2, async |world, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        primary.write(0, 5).await.expect("written");
        one.kill();
        let taken = two.take_over(&id).await.expect("taken over");
        taken.write(4096, 6).await.expect("written");
        taken.log.gone().await;
        let serial = |copy| {
            let bytes = world.peek(path(2), LOGS_AT + copy, SUPER_LEN).expect("on the disk");
            LogSuperblock::decode(&bytes).map_or(0, |superblock| superblock.serial)
        };
        let newest = SUPER_COPIES.into_iter().max_by_key(|copy| serial(*copy)).expect("two copies");
        let file = File::open(path(2), OpenOptions::read_write().direct()).expect("the disk");
        file.write_durable_at(BufMut::zeroed(SUPER_LEN), LOGS_AT + newest).await.expect("damaged");
        let again = two.take_over(&id).await.expect("opened again");
        assert_eq!((read(&*again.log, 0, 4096).await[0], read(&*again.log, 4096, 4096).await[0]), (5, 6));
    });
}

#[test]
fn a_primary_whose_client_is_fenced_stops() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (_, primary) = one.create().await;
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        // Nobody tells it but the backend.
        two.kill();
        one.image.fences_one.set(true);
        let late = timeout(LONG, primary.write(0, 1)).await.expect("answered");
        assert_eq!(late.expect_err("fenced").kind(), ErrorKind::Fenced);
        assert!(primary.set.is_fenced());
        let _ = timeout(LONG, primary.log.close(false)).await.expect("closed");
        timeout(LONG, primary.log.gone()).await.expect("nothing is left");
    });
}

#[test]
fn a_request_to_create_a_copy_that_arrives_late_destroys_none() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (id, primary) = one.create().await;
        let epoch = primary.set.record().epoch();
        one.wanted.replace(vec![two.id]);
        primary.has(&[1, 2]).await;
        primary.write(0, 1).await.expect("written");
        let before = two.shelf.copy_of(&id).await.expect("a copy");
        let term = u32::try_from(primary.set.record().term()).expect("a term");
        let (volume, name) = ("one".to_owned(), "pool/a".to_owned());
        let create = ReplicaAction::Create { volume, name, size: 1 << 20, unit: 512, epoch, in_memory: false };
        for action in [create, ReplicaAction::Discard { epoch }] {
            let request = ReplicaRequest { log: id, term, action };
            let message = Message::new(KIND_REQUEST).front(Buf::copy_of(&request.encode()));
            let link = Keeper(one.clone()).connection(two.id).expect("a connection");
            let answer = link.request(message).await.expect("answered");
            let answer = ReplicaAnswer::decode(&answer.front.to_vec()).expect("an answer");
            assert!(matches!(answer, ReplicaAnswer::Failed(_)), "{answer:?}");
        }
        assert_eq!(two.shelf.copy_of(&id).await.expect("a copy"), before);
    });
}
