//! Logs with members: a primary and its replicas, on disks of their own, over the messenger within the process.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::ready;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{BlockDevice, Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::{Address, Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy};
use forebay_reactor::{sleep, timeout};
use forebay_sim::{Faults, World};
use forebay_writelog::replication::{
    LogMembers, MemberKeeper, MemberRecord, OpenedMembers, PeerId, PrimarySet, RecordChange, ReplicaHost, ReplicaShelf,
    ReplicationOptions, open_members,
};
use forebay_writelog::{LogId, LogOwner, MediumKind, Shelf, ShelfOptions, WriteLog};

use crate::common::{LONG, MILLISECOND, Memory, patience, read, write};

/// Record of the image, and its backend.
struct SharedImage {
    record: RefCell<Option<LogMembers>>,
    /// Set while changes of the record fail.
    unreachable: Cell<bool>,
    base: Rc<Memory>,
}

/// Peer with a log device.
struct Host {
    id: PeerId,
    image: Rc<SharedImage>,
    shelf: Rc<Shelf>,
    replicas: Rc<ReplicaHost>,
    server: Messenger,
    client: Messenger,
    wanted: RefCell<Vec<PeerId>>,
    links: RefCell<BTreeMap<PeerId, Connection>>,
    opened: Cell<u32>,
}

fn peer(number: u8) -> PeerId {
    PeerId([number; 16])
}

fn path(number: u8) -> String {
    format!("/logs{number}")
}

fn address(number: u8) -> Address {
    format!("loopback:peer{number}").parse().expect("an address")
}

impl Host {
    async fn start(number: u8, image: &Rc<SharedImage>, core: &MessengerCore) -> Rc<Self> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(&path(number)), options).await.expect("a shelf");
        let replicas = ReplicaHost::new(vec![ReplicaShelf { shelf: shelf.clone(), quota: 64 << 20 }]);
        let host = replicas.clone();
        let handler = move |connection: &Connection, message: Message| {
            assert!(host.handle(connection, message), "only requests to replicas are sent");
        };
        let server = Messenger::new(core, MessengerOptions::default(), handler);
        server.bind(&address(number)).expect("an address");
        let client = Messenger::new(core, MessengerOptions::default(), |_: &Connection, _: Message| {});
        Rc::new(Self {
            id: peer(number),
            image: image.clone(),
            shelf,
            replicas,
            server,
            client,
            wanted: RefCell::default(),
            links: RefCell::default(),
            opened: Cell::new(0),
        })
    }

    /// Cuts the host off from its peers.
    fn kill(&self) {
        self.server.shutdown();
        self.client.shutdown();
    }

    /// Opens the log here, after the record has been changed.
    async fn serve(self: &Rc<Self>, id: &LogId, record: LogMembers) -> Result<Primary> {
        let keeper = Rc::new(Keeper(self.clone()));
        let options = ReplicationOptions { patience: 200 * MILLISECOND, retry: 10 * MILLISECOND, ..Default::default() };
        let OpenedMembers { log, set } =
            open_members(&self.shelf, id, ("one", "pool/a"), record, keeper, options).await?;
        let log = WriteLog::new(self.image.base.clone(), log, Rc::new(Owner(set.clone())), patience());
        Ok(Primary { log, set })
    }

    /// Creates a log here.
    async fn create(self: &Rc<Self>) -> (LogId, Primary) {
        let id = self.shelf.create("one", "pool/a", 1 << 20, 0).await.expect("room");
        let record = MemberRecord::created(self.id, [self.id.0[0]; 16], "client.1".to_owned());
        let record = record.opened(self.id, [self.id.0[0]; 16], "client.2".to_owned()).expect("its own");
        self.image.record.replace(Some(record.clone()));
        let primary = self.serve(&id, record).await.expect("a log");
        (id, primary)
    }

    /// Takes the log over.
    async fn take_over(self: &Rc<Self>, id: &LogId) -> Result<Primary> {
        self.replicas.release(id).await;
        let record = self.image.record.borrow().clone().expect("a record");
        let copy = record.copy(self.id).unwrap_or_default();
        let client = format!("client of {} {}", self.id, self.opened.replace(self.opened.get() + 1));
        let next = record.taken_over(self.id, copy, client);
        let next = next.map_err(|error| Error::new(ErrorKind::Denied, error.to_string()))?;
        self.image.record.replace(Some(next.clone()));
        self.serve(id, next).await
    }
}

struct Keeper(Rc<Host>);

impl MemberKeeper for Keeper {
    fn change(&self, from: LogMembers, to: LogMembers) -> LocalFuture<Result<RecordChange>> {
        let image = self.0.image.clone();
        Box::pin(async move {
            sleep(MILLISECOND).await;
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
}

struct Owner(Rc<PrimarySet>);

impl LogOwner for Owner {
    fn acquire(&self) -> Option<LocalFuture<Result<()>>> {
        let set = self.0.clone();
        Some(Box::pin(async move { set.ready().await }))
    }

    fn release(&self) -> LocalFuture<Result<()>> {
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

/// Runs a test with hosts 1 and up.
fn with_hosts(count: u8, test: impl AsyncFnOnce(World, Vec<Rc<Host>>)) {
    let world = World::new(1, Faults::none());
    (1..=count).for_each(|number| world.add_disk(&path(number), 16 << 20, 512));
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let image = Rc::new(SharedImage {
            record: RefCell::default(),
            unreachable: Cell::new(false),
            base: Memory::new(1 << 20),
        });
        let core = MessengerCore::default();
        let mut hosts = Vec::new();
        for number in 1..=count {
            hosts.push(Host::start(number, &image, &core).await);
        }
        test(world.clone(), hosts).await;
    });
    ran.expect("it ends");
}

#[test]
fn a_replica_is_filled_and_takes_over_with_everything() {
    with_hosts(2, async |_, hosts| {
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
