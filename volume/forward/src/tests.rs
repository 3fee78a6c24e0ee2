//! Both sides over the messenger, on a simulated network.

mod leases;
mod reservations;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::reservation::Reservations;
use forebay_block::{
    Advice, BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch,
};
use forebay_messenger::{
    Address, Connection, DisconnectReason, Handler, Message, Messenger, MessengerCore, MessengerOptions, Policy,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, JoinHandle, sleep, spawn, timeout};
use forebay_sim::{Faults, World};

use leases::LateRequests;

use crate::wire::{self, ForwardRequest, ForwarderStart, KIND_REQUEST, VolumeRequest};
use crate::{ForwardClient, ForwardHost, ForwardedVolume, ForwarderLimits, OwnerLocator, OwnerRoute, ReachableOwner};

const SIZE: u64 = 16 << 20;
const VOLUME: &str = "rbd/disk";

/// Volume in memory whose requests take effect when they may pass.
struct HeldDevice {
    bytes: RefCell<Vec<u8>>,
    size: Cell<u64>,
    watch: Rc<SizeWatch>,
    /// Requests that begin while this is set wait.
    held: Cell<bool>,
    fenced: Cell<bool>,
    executing: Cell<usize>,
    executed: Cell<usize>,
    advice: Cell<Advice>,
    reservations: RefCell<Option<Reservations>>,
    changed: Notify,
}

impl HeldDevice {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; SIZE as usize]),
            size: Cell::new(SIZE),
            watch: Rc::default(),
            held: Cell::default(),
            fenced: Cell::default(),
            executing: Cell::default(),
            executed: Cell::default(),
            advice: Cell::default(),
            reservations: RefCell::default(),
            changed: Notify::new(),
        })
    }

    fn release(&self) {
        self.held.set(false);
        self.changed.notify_all();
    }

    async fn until_executing(&self, count: usize) {
        self.changed.wait_until(|| self.executing.get() == count).await;
    }

    fn execute(&self, request: BlockRequest) -> Result<BlockReply> {
        if self.fenced.get() {
            return Err(Error::new(ErrorKind::Fenced, "the pool refuses this client"));
        }
        let mut bytes = self.bytes.borrow_mut();
        let range = |offset: u64, len: usize| offset as usize..offset as usize + len;
        match request {
            BlockRequest::Read(extent) => {
                let data = Buf::copy_of(&bytes[range(extent.offset, extent.len as usize)]);
                return Ok(BlockReply::Data(data.into()));
            }
            BlockRequest::Write { offset, data, .. } => data.copy_to(&mut bytes[range(offset, data.len())]),
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => {
                bytes[range(extent.offset, extent.len as usize)].fill(0);
            }
            BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
                let found = &mut bytes[range(offset, data.len())];
                let expect = expect.to_vec();
                if let Some(at) = (0..expect.len()).find(|&at| expect[at] != found[at]) {
                    return Err(Error::new(ErrorKind::Mismatch(at as u64), "comparing"));
                }
                data.copy_to(found);
            }
            BlockRequest::Flush => {}
        }
        Ok(BlockReply::Done)
    }
}

/// Device shared with the test.
struct Shared(Rc<HeldDevice>);

impl BlockDevice for Shared {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.size.get(),
            block_size: 1,
            preferred_io: 4096,
            transfer_max: 64 << 20,
            read_only: false,
        }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let device = self.0.clone();
        device.executing.set(device.executing.get() + 1);
        device.changed.notify_all();
        Box::pin(async move {
            device.changed.wait_until(|| !device.held.get()).await;
            let result = device.execute(request);
            device.executing.set(device.executing.get() - 1);
            device.executed.set(device.executed.get() + 1);
            device.changed.notify_all();
            result
        })
    }

    fn submit_advised(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        self.0.advice.set(advice);
        self.submit(request)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        // More extents than an answer has.
        let mut at = extent.offset;
        while at < extent.end() {
            let next = (at / 512 + 1) * 512;
            let state = if (at / 512).is_multiple_of(2) { ExtentState::Data } else { ExtentState::Hole };
            map.push(at, next.min(extent.end()) - at, state);
            at = next;
        }
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        Some(self.0.watch.clone())
    }

    fn reservations(&self) -> Option<Reservations> {
        self.0.reservations.borrow().clone()
    }
}

/// Daemon with both sides.
struct Daemon {
    messenger: Messenger,
    host: Rc<ForwardHost>,
    client: Rc<ForwardClient>,
    is_deaf: Rc<Cell<bool>>,
    late: Rc<LateRequests>,
}

struct Dispatch {
    host: Rc<ForwardHost>,
    client: Rc<ForwardClient>,
    /// Drops events, as if the daemon did not run.
    is_deaf: Rc<Cell<bool>>,
    late: Rc<LateRequests>,
}

impl Handler for Dispatch {
    fn message(&self, connection: &Connection, message: Message) {
        if self.is_deaf.get() && message.kind == wire::KIND_EVENT {
            return;
        }
        if self.client.handle(connection, &message) {
            return;
        }
        let known = self.late.keep(connection, message).is_none_or(|message| self.host.handle(connection, message));
        assert!(known, "an unknown message");
    }

    fn reset(&self, connection: &Connection) {
        self.host.forget(connection);
        self.client.reset(connection);
    }

    fn lost(&self, connection: &Connection, _reason: &DisconnectReason) {
        self.reset(connection);
    }
}

fn start_id(number: u8) -> ForwarderStart {
    [number; 16]
}

fn daemon(core: &MessengerCore, number: u8) -> Daemon {
    let limits = ForwarderLimits { patience: Duration::from_secs(5), ..ForwarderLimits::default() };
    let (host, client) = (ForwardHost::new(), ForwardClient::new(start_id(number), limits));
    let options = MessengerOptions { session_timeout: Duration::from_secs(30), ..MessengerOptions::default() };
    let is_deaf = Rc::new(Cell::new(false));
    let late = Rc::new(LateRequests::default());
    let dispatch =
        Dispatch { host: host.clone(), client: client.clone(), is_deaf: is_deaf.clone(), late: late.clone() };
    let messenger = Messenger::new(core, options, dispatch);
    messenger.bind(&address(number)).expect("an address");
    Daemon { messenger, host, client, is_deaf, late }
}

fn address(number: u8) -> Address {
    format!("127.0.0.1:{}", 3300 + u16::from(number)).parse().expect("an address")
}

/// Owner as the group knows it.
#[derive(Default)]
struct Located {
    owner: RefCell<Option<ReachableOwner>>,
    hint: RefCell<String>,
    changed: Rc<Notify>,
}

impl Located {
    fn set(&self, connection: Option<&Connection>, term: u64) {
        let owner = |connection: &Connection| ReachableOwner {
            route: OwnerRoute::Remote(connection.clone()),
            term: Some(term),
        };
        *self.owner.borrow_mut() = connection.map(owner);
        self.changed.notify_all();
    }
}

struct Locator(Rc<Located>);

impl OwnerLocator for Locator {
    fn owner(&self) -> Option<ReachableOwner> {
        self.0.owner.borrow().clone()
    }

    fn changed(&self) -> LocalFuture<()> {
        let changed = self.0.changed.clone();
        let mut first = Some(Box::pin(async move { changed.wait().await }));
        // Counts from here on.
        let mut waiting = first.take().expect("just made");
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = waiting.as_mut().poll(&mut context);
        waiting
    }

    fn hint(&self, owner: &str) {
        *self.0.hint.borrow_mut() = owner.to_owned();
    }
}

fn run(scene: impl AsyncFnOnce(World)) {
    let world = World::new(7, Faults::none());
    let reactor = world.reactor();
    let other = world.clone();
    world
        .run(&reactor, async move { timeout(Duration::from_secs(3000), scene(other)).await.expect("it ends") })
        .expect("it ends");
}

fn write(offset: u64, byte: u8) -> BlockRequest {
    BlockRequest::Write { offset, data: Buf::copy_of(&[byte; 4096]).into(), fua: false }
}

fn submit(volume: &Rc<ForwardedVolume>, request: BlockRequest) -> JoinHandle<Result<BlockReply>> {
    spawn(volume.submit(request))
}

async fn first_byte(volume: &ForwardedVolume, offset: u64) -> u8 {
    volume.submit(BlockRequest::Read(Extent::new(offset, 1))).await.expect("a read").into_data().to_vec()[0]
}

/// Forwarder 1 of a volume that owner 2 has.
struct Pair {
    forwarder: Daemon,
    owner: Daemon,
    device: Rc<HeldDevice>,
    located: Rc<Located>,
    connection: Connection,
    volume: Rc<ForwardedVolume>,
    offer: Rc<crate::VolumeOffer>,
    core: MessengerCore,
}

async fn pair() -> Pair {
    let core = MessengerCore::default();
    let (forwarder, owner) = (daemon(&core, 1), daemon(&core, 2));
    let (device, located) = (HeldDevice::new(), Rc::new(Located::default()));
    let offer = owner.host.offer(VOLUME, 1, Rc::new(Shared(device.clone()))).expect("offered");
    let connection = forwarder.messenger.connect(&address(2), Policy::LosslessPeer);
    located.set(Some(&connection), 1);
    let volume = forwarder.client.open(VOLUME, Rc::new(Locator(located.clone()))).await.expect("opened");
    Pair { forwarder, owner, device, located, connection, volume: Rc::new(volume), offer: Rc::new(offer), core }
}

#[test]
fn requests_and_errors_cross() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, .. } = &scene;
        assert_eq!(volume.geometry().transfer_max, wire::TRANSFER_MAX);
        volume.submit_advised(write(4096, 7), Advice::ONE_PASS).await.expect("a write");
        assert_eq!(device.advice.get(), Advice::ONE_PASS);
        assert_eq!(first_byte(volume, 4096).await, 7);
        let compare = |expect: u8, data: u8| BlockRequest::CompareAndWrite {
            offset: 4096,
            expect: Buf::copy_of(&[7, 7, expect]).into(),
            data: Buf::copy_of(&[data; 3]).into(),
            fua: true,
        };
        let error = volume.submit(compare(8, 9)).await.expect_err("it differs");
        assert_eq!((error.kind(), error.context()), (ErrorKind::Mismatch(2), "comparing"));
        volume.submit(compare(7, 9)).await.expect("it is equal");
        assert_eq!(first_byte(volume, 4098).await, 9);
        volume.submit(BlockRequest::Discard(Extent::new(4096, 1))).await.expect("a discard");
        let zeroes = BlockRequest::WriteZeroes { extent: Extent::new(4097, 1), no_unmap: true, fua: false };
        volume.submit(zeroes).await.expect("zeroes");
        volume.submit(BlockRequest::Flush).await.expect("a flush");
        assert_eq!((first_byte(volume, 4096).await, first_byte(volume, 4097).await), (0, 0));
        let error = volume.submit(write(SIZE - 1, 1)).await.expect_err("past the end");
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
        let map = volume.map(Extent::new(100, SIZE - 200)).await.expect("a map");
        let alike = Shared(device.clone()).map(Extent::new(100, SIZE - 200)).await.expect("a map");
        assert!(map == alike && map.runs().len() > wire::MAP_RUNS_MAX);
        volume.close().await;
        assert_eq!(volume.submit(BlockRequest::Flush).await.expect_err("closed").kind(), ErrorKind::ShuttingDown);
    });
}

#[test]
fn long_requests_are_split_between_blocks() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, .. } = &scene;
        let bytes: Vec<u8> = (0..9 << 20).map(|at: u32| (at / 4096) as u8).collect();
        let data = Buf::copy_of(&bytes).into();
        volume.submit(BlockRequest::Write { offset: 1000, data, fua: false }).await.expect("a long write");
        assert_eq!(device.executed.get(), 3);
        let read = volume.submit(BlockRequest::Read(Extent::new(1000, 9 << 20))).await.expect("a long read");
        assert!(read.into_data().to_vec() == bytes);
        let half = wire::TRANSFER_MAX as usize / 2 + 1;
        let (expect, data) = (Buf::zeroed(half).into(), Buf::zeroed(half).into());
        let long = BlockRequest::CompareAndWrite { offset: 0, expect, data, fua: false };
        assert_eq!(volume.submit(long).await.expect_err("too long").kind(), ErrorKind::Invalid);
        // More than may be in flight: the rest waits.
        let writes: Vec<_> = (0..400).map(|at| submit(volume, write(at * 4096, 5))).collect();
        for write in writes {
            write.await.expect("a write");
        }
        assert_eq!(device.executed.get(), 6 + 400);
    });
}

#[test]
fn requests_are_executed_whether_their_futures_are_polled_or_not() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, .. } = &scene;
        device.held.set(true);
        drop(volume.submit(write(0, 1)));
        device.until_executing(1).await;
        let (other, drained) = (volume.clone(), Rc::new(Cell::new(false)));
        let draining = spawn({
            let drained = drained.clone();
            async move {
                other.drain().await;
                drained.set(true);
            }
        });
        sleep(Duration::from_millis(10)).await;
        assert!(!drained.get());
        device.release();
        draining.await;
        assert_eq!(first_byte(volume, 0).await, 1);
    });
}

#[test]
fn a_planned_move_loses_nothing_and_fails_nothing() {
    run(async |_| {
        let Pair { volume, device, owner, offer, located, core, forwarder, connection: _connection } = pair().await;
        device.held.set(true);
        let before = submit(&volume, write(0, 1));
        device.until_executing(1).await;
        let suspending = spawn({
            let offer = offer.clone();
            async move { offer.suspend().await }
        });
        sleep(Duration::from_millis(50)).await;
        let during = submit(&volume, write(4096, 2));
        sleep(Duration::from_millis(50)).await;
        assert!(!suspending.is_finished(), "a request is being executed");
        assert_eq!(device.executing.get(), 1, "nothing is admitted");
        device.release();
        suspending.await;
        assert_eq!(device.executing.get(), 0);
        before.await.expect("it was admitted");
        offer.set_next_owner("three");
        drop(offer);
        sleep(Duration::from_millis(100)).await;
        assert!(!during.is_finished() && !volume.is_connected());
        assert_eq!(*located.hint.borrow(), "three");
        assert_eq!(owner.host.sessions(), 0);
        // The next owner has the same content.
        let next = daemon(&core, 3);
        let _offer = next.host.offer(VOLUME, 2, Rc::new(Shared(device.clone()))).expect("offered");
        located.set(Some(&forwarder.messenger.connect(&address(3), Policy::LosslessPeer)), 2);
        during.await.expect("it waited");
        assert_eq!((first_byte(&volume, 0).await, first_byte(&volume, 4096).await), (1, 2));
    });
}

#[test]
fn a_move_may_be_cancelled() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, offer, .. } = &scene;
        offer.suspend().await;
        let waiting = submit(volume, write(0, 1));
        sleep(Duration::from_millis(100)).await;
        assert!(!waiting.is_finished());
        offer.resume();
        waiting.await.expect("it waited");
    });
}

#[test]
fn a_session_waits_for_what_the_former_one_has_in_flight() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, connection, located, forwarder, .. } = &scene;
        device.held.set(true);
        let compare = BlockRequest::CompareAndWrite {
            offset: 8192,
            expect: Buf::zeroed(1).into(),
            data: Buf::copy_of(&[3]).into(),
            fua: false,
        };
        let (first, once) = (submit(volume, write(0, 1)), submit(volume, compare));
        device.until_executing(2).await;
        // Its own session is lost, and the owner does not know.
        let other = forwarder.messenger.connect(&address(2), Policy::LosslessPeer);
        connection.close();
        located.set(Some(&other), 1);
        sleep(Duration::from_millis(10)).await;
        let second = submit(volume, write(4096, 2));
        // In doubt for longer than patience.
        sleep(Duration::from_secs(20)).await;
        assert!(!first.is_finished() && !once.is_finished());
        assert_eq!(device.executing.get(), 2, "nothing is executed beside it");
        assert_eq!(second.await.expect_err("nothing of it was sent").kind(), ErrorKind::TimedOut);
        device.release();
        first.await.expect("sent again");
        let error = once.await.expect_err("it may have been executed");
        assert!(error.kind() == ErrorKind::Io && error.context().contains("may have been executed"), "{error}");
        assert_eq!(first_byte(volume, 8192).await, 3);
        assert_eq!(device.executed.get(), 4, "the write twice, the comparison once, the read");
    });
}

#[test]
fn a_start_that_was_declared_dead_is_refused_for_good() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, owner, located, forwarder, .. } = &scene;
        device.held.set(true);
        let first = submit(volume, write(0, 1));
        device.until_executing(1).await;
        let host = owner.host.clone();
        let ending = spawn(async move { host.end_start(start_id(1)).await });
        // It comes back over another connection, and is refused when nothing of it is executed any more.
        located.set(Some(&forwarder.messenger.connect(&address(2), Policy::LosslessPeer)), 1);
        sleep(Duration::from_secs(1)).await;
        assert!(!ending.is_finished() && !first.is_finished());
        device.release();
        ending.await;
        assert_eq!(device.executing.get(), 0);
        // The answer and the refusal come over different connections.
        if let Err(error) = first.await {
            assert_eq!((error.kind(), device.executed.get()), (ErrorKind::Fenced, 1));
        }
        assert_eq!(volume.submit(write(0, 2)).await.expect_err("refused").kind(), ErrorKind::Fenced);
        let again = forwarder.client.open(VOLUME, Rc::new(Locator(located.clone()))).await;
        assert_eq!(again.err().map(|error| error.kind()), Some(ErrorKind::Fenced));
        assert_eq!(device.executed.get(), 1);
    });
}

#[test]
fn a_fenced_owner_fails_nothing() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, located, core, forwarder, .. } = &scene;
        device.fenced.set(true);
        let waiting = submit(volume, write(0, 1));
        sleep(Duration::from_secs(2)).await;
        assert!(!waiting.is_finished());
        let (next, healthy) = (daemon(core, 3), HeldDevice::new());
        let _offer = next.host.offer(VOLUME, 2, Rc::new(Shared(healthy.clone()))).expect("offered");
        located.set(Some(&forwarder.messenger.connect(&address(3), Policy::LosslessPeer)), 2);
        waiting.await.expect("it waited");
        assert_eq!(first_byte(volume, 0).await, 1);
        // And without a next one, patience ends.
        healthy.fenced.set(true);
        let error = volume.submit(write(0, 2)).await.expect_err("nobody executes it");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.context().contains(VOLUME) && error.context().contains("the owner has stopped"), "{error}");
    });
}

#[test]
fn without_an_owner_requests_time_out() {
    run(async |_| {
        let core = &MessengerCore::default();
        let forwarder = daemon(core, 1);
        let located = Rc::new(Located::default());
        let opened = forwarder.client.open(VOLUME, Rc::new(Locator(located.clone()))).await;
        let error = opened.err().expect("no owner");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.context().contains(VOLUME) && error.context().contains("no owner is known"), "{error}");
        // One that does not have it.
        let _other = daemon(core, 2);
        located.set(Some(&forwarder.messenger.connect(&address(2), Policy::LosslessPeer)), 1);
        let opened = forwarder.client.open(VOLUME, Rc::new(Locator(located.clone()))).await;
        let error = opened.err().expect("no owner");
        assert!(error.context().contains("does not know the volume"), "{error}");
    });
}

#[test]
fn sizes_are_followed() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, .. } = &scene;
        let watch = volume.size_watch().expect("it may change");
        let changed = spawn(async move { watch.changed().await });
        sleep(Duration::from_millis(10)).await;
        device.size.set(SIZE / 2);
        device.watch.announce();
        changed.await;
        assert_eq!(volume.geometry().size, SIZE / 2);
        assert_eq!(volume.submit(write(SIZE / 2, 1)).await.expect_err("past the end").kind(), ErrorKind::OutOfRange);
    });
}

#[test]
fn volumes_and_forwarders_are_separate() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, owner, core, located, forwarder, .. } = &scene;
        let other = HeldDevice::new();
        let offer = owner.host.offer("rbd/other", 1, Rc::new(Shared(other.clone()))).expect("offered");
        assert!(owner.host.offer("rbd/other", 2, Rc::new(Shared(other.clone()))).is_err(), "twice");
        let second = forwarder.client.open("rbd/other", Rc::new(Locator(located.clone()))).await.expect("opened");
        let third = daemon(core, 3);
        let elsewhere = Rc::new(Located::default());
        elsewhere.set(Some(&third.messenger.connect(&address(2), Policy::LosslessPeer)), 1);
        let shared = third.client.open(VOLUME, Rc::new(Locator(elsewhere))).await.expect("opened");
        volume.submit(write(0, 1)).await.expect("a write");
        second.submit(write(0, 2)).await.expect("a write");
        assert_eq!((first_byte(&shared, 0).await, first_byte(&second, 0).await), (1, 2));
        assert_eq!(owner.host.sessions(), 3);
        offer.suspend().await;
        shared.submit(write(0, 3)).await.expect("the other volume is suspended");
        owner.host.end_start(start_id(3)).await;
        volume.submit(write(0, 4)).await.expect("the other start has ended");
        assert_eq!(device.bytes.borrow()[0], 4);
    });
}

#[test]
fn malformed_messages_end_sessions_and_nothing_else() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, owner, connection, .. } = &scene;
        for front in [&b""[..], b"\x04garbage", &[1; 9]] {
            let reply = connection.request(Message::new(KIND_REQUEST).front(Buf::copy_of(front))).await;
            assert_eq!(reply.expect("an answer").front.to_vec()[..2], [2, 7]);
            assert_eq!(owner.host.sessions(), 0);
            volume.submit(write(0, 1)).await.expect("in a session that is new");
        }
        // An event for nobody, and a malformed one.
        let owners = owner.messenger.connections();
        let event = |front: &[u8]| Message::new(wire::KIND_EVENT).front(Buf::copy_of(front));
        owners[0].post(event(b"\x02nothing")).expect("sent");
        let nobody = wire::ForwardEvent::Ended { session: 999, why: wire::SessionEndReason::Moved };
        owners[0].post(event(&nobody.encode().0)).expect("sent");
        sleep(Duration::from_millis(100)).await;
        volume.submit(write(0, 2)).await.expect("in a session that is new");
        // A request without a reply.
        let close = ForwardRequest::Close { session: 1 };
        connection.post(wire::message(KIND_REQUEST, close.encode())).expect("sent");
        sleep(Duration::from_millis(100)).await;
        volume.submit(write(0, 3)).await.expect("in a session that is new");
    });
}

#[test]
fn a_forwarder_that_sends_too_much_loses_its_sessions() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, owner, connection, .. } = &scene;
        device.held.set(true);
        let mine = submit(volume, write(0, 1));
        device.until_executing(1).await;
        let read =
            VolumeRequest::Submit(BlockRequest::Read(Extent::new(0, u64::from(wire::TRANSFER_MAX))), Advice::NONE);
        let asked: Vec<_> = (0..20)
            .map(|_| {
                let (connection, message) = (connection.clone(), wire::message(KIND_REQUEST, read.encode(1)));
                spawn(async move { connection.request(message).await.expect("an answer").front.to_vec()[0] })
            })
            .collect();
        sleep(Duration::from_secs(1)).await;
        assert!(device.executing.get() <= 6, "{} are executed", device.executing.get());
        device.release();
        mine.await.expect("answered");
        for one in asked {
            one.await;
        }
        sleep(Duration::from_secs(1)).await;
        volume.submit(write(0, 2)).await.expect("in a session that is new");
        assert_eq!(owner.host.sessions(), 1);
    });
}

#[test]
fn a_forwarder_may_be_in_the_daemon_of_the_owner() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, device, owner, offer, located, core, forwarder, .. } = &scene;
        // The volume is moved to the daemon of its forwarder ...
        device.held.set(true);
        let (expect, data) = (Buf::zeroed(512).into(), Buf::copy_of(&[1; 512]).into());
        let compare = BlockRequest::CompareAndWrite { offset: 0, expect, data, fua: false };
        let before = submit(volume, compare);
        device.until_executing(1).await;
        let suspending = spawn({
            let offer = offer.clone();
            async move { offer.suspend().await }
        });
        let during = submit(volume, write(4096, 2));
        sleep(Duration::from_millis(10)).await;
        device.release();
        suspending.await;
        let (here, other) = (HeldDevice::new(), HeldDevice::new());
        *here.bytes.borrow_mut() = device.bytes.borrow().clone();
        let local = forwarder.host.offer(VOLUME, 2, Rc::new(Shared(here.clone()))).expect("offered");
        let route = OwnerRoute::Local(forwarder.host.clone());
        *located.owner.borrow_mut() = Some(ReachableOwner { route, term: Some(2) });
        located.changed.notify_all();
        // The answer of the former owner comes later than the session with the next one.
        before.await.expect("it was admitted");
        during.await.expect("it waited");
        assert_eq!((first_byte(volume, 0).await, first_byte(volume, 4096).await), (1, 2));
        assert_eq!((forwarder.host.sessions(), here.executed.get()), (1, 3));
        here.size.set(SIZE / 2);
        here.watch.announce();
        sleep(Duration::from_millis(1)).await;
        assert_eq!(volume.geometry().size, SIZE / 2);
        // ... and away from it: what its own hosts have in flight is waited for as well.
        here.held.set(true);
        let last = submit(volume, write(0, 3));
        here.until_executing(1).await;
        let suspending = spawn(async move { local.suspend().await });
        sleep(Duration::from_millis(10)).await;
        assert!(!suspending.is_finished());
        here.release();
        suspending.await;
        last.await.expect("it was admitted");
        let third = daemon(core, 3);
        let _offer = third.host.offer(VOLUME, 3, Rc::new(Shared(other.clone()))).expect("offered");
        located.set(Some(&forwarder.messenger.connect(&address(3), Policy::LosslessPeer)), 3);
        volume.submit(write(0, 4)).await.expect("a write");
        assert_eq!((other.executed.get(), owner.host.sessions()), (1, 0));
        volume.close().await;
        sleep(Duration::from_millis(100)).await;
        assert_eq!(third.host.sessions(), 0);
    });
}
