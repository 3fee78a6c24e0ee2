//! Daemons of the group: owners, forwarders, and who is the owner.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::reservation::{
    HostId, Refusal, ReservationAccess, ReservationAction, ReservationChange, ReservationTable,
};
use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, LocalFuture, Result};
use forebay_forward::{
    ForwardClient, ForwardHost, ForwardedVolume, ForwarderLimits, ForwarderStart, OwnerLocator, OwnerRoute,
    ReachableOwner, VolumeOffer,
};
use forebay_messenger::{
    Address, Connection, DisconnectReason, Handler, Message, Messenger, MessengerCore, MessengerOptions, Policy,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{sleep, spawn, timeout};

use super::cuts::LateMessages;
use super::device::{OpenedState, OpenedVolume, VolumeContent};
use super::{ForwardScenario, OWNERS, VOLUME};
use crate::rng::Rng;

/// Longest time that anything of the group may take, with a network that works or does not.
const LONGEST: Duration = Duration::from_secs(300);

struct OwnerSide {
    host: Rc<ForwardHost>,
    late: Rc<LateMessages>,
}

impl Handler for OwnerSide {
    fn message(&self, connection: &Connection, message: Message) {
        if let Some(message) = self.late.keep(connection, message) {
            assert!(self.host.handle(connection, message), "an owner gets requests only");
        }
    }

    fn lost(&self, connection: &Connection, _reason: &DisconnectReason) {
        self.late.forget(connection);
        self.host.forget(connection);
    }
}

/// Handler of a forwarder, whose events may be kept back as if the daemon did not run, while its hosts go on.
struct ForwarderSide {
    client: Rc<ForwardClient>,
    kept: Rc<KeptEvents>,
}

/// Events that a forwarder has received and not handled.
#[derive(Default)]
struct KeptEvents {
    keeps: Cell<bool>,
    events: RefCell<Vec<(Connection, Message)>>,
}

impl Handler for ForwarderSide {
    fn message(&self, connection: &Connection, message: Message) {
        if self.kept.keeps.get() {
            return self.kept.events.borrow_mut().push((connection.clone(), message));
        }
        assert!(self.client.handle(connection, &message), "a forwarder gets events only");
    }

    fn reset(&self, connection: &Connection) {
        self.client.reset(connection);
    }

    fn lost(&self, connection: &Connection, _reason: &DisconnectReason) {
        self.client.reset(connection);
    }
}

/// Daemon that owns the volume at times.
struct OwnerNode {
    messenger: Messenger,
    host: Rc<ForwardHost>,
    late: Rc<LateMessages>,
    offer: Option<VolumeOffer>,
    opened: Option<Rc<OpenedState>>,
}

/// One life of a forwarder.
pub(super) struct ForwarderLife {
    messenger: Messenger,
    /// Replaced after it was given up.
    pub(super) volume: RefCell<Rc<ForwardedVolume>>,
    view: Rc<OwnerView>,
    pub(super) client: Rc<ForwardClient>,
    kept: Rc<KeptEvents>,
    /// Set when nothing of it is executed any more.
    pub(super) over: Cell<bool>,
    ended: Notify,
}

/// Daemon that forwards requests.
pub(super) struct ForwarderNode {
    number: usize,
    pub(super) life: RefCell<Rc<ForwarderLife>>,
}

impl ForwarderNode {
    /// Sends a request.  It fails when the daemon has ended, and nothing of it is executed any more.
    pub(super) async fn submit(&self, request: BlockRequest) -> Result<BlockReply> {
        let life = self.life.borrow().clone();
        let answer = life.volume.borrow().submit(request);
        life.until_ended(answer).await
    }

    /// Sends a write of a host that has registered with a key, if its reservation table allows it.
    pub(super) fn fenced_write(
        &self,
        host: &HostId,
        request: BlockRequest,
    ) -> Option<impl Future<Output = Result<BlockReply>> + use<>> {
        let life = self.life.borrow().clone();
        let volume = life.volume.borrow().clone();
        let reservations = volume.reservations().expect("the volume has reservations");
        if !reservations.view().allows(Some(host), ReservationAccess::Write) {
            return None;
        }
        // As fronts do: nothing else runs between the decision and the request.
        let answer = volume.submit(request);
        Some(async move { life.until_ended(answer).await })
    }

    /// Returns the reservation table.
    pub(super) fn table(&self) -> Arc<ReservationTable> {
        let life = self.life.borrow().clone();
        let volume = life.volume.borrow().clone();
        volume.reservations().expect("the volume has reservations").view().table().clone()
    }

    /// Executes a reservation action of a host.
    pub(super) async fn reserve(
        &self,
        host: &HostId,
        action: ReservationAction,
    ) -> Result<std::result::Result<ReservationChange, Refusal>> {
        let life = self.life.borrow().clone();
        let reservations = life.volume.borrow().reservations().expect("the volume has reservations");
        let applied = reservations.apply(host, action);
        life.until_ended(applied).await
    }
}

impl ForwarderLife {
    /// Waits for an answer, or for the end of the daemon.
    async fn until_ended<T>(&self, mut answer: LocalFuture<Result<T>>) -> Result<T> {
        let life = self;
        let mut ended = pin!(life.ended.wait_until(|| life.over.get()));
        poll_fn(move |cx| {
            if ended.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(Error::new(ErrorKind::Io, "the daemon has ended")));
            }
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// Owner as a forwarder sees it.
#[derive(Default)]
struct OwnerView {
    owner: Cell<Option<(usize, u64)>>,
    connections: RefCell<Vec<Connection>>,
    /// Owner that runs in the same daemon.
    local: RefCell<Option<(usize, Rc<ForwardHost>)>>,
    changed: Rc<Notify>,
}

pub(super) struct ViewLocator(Rc<OwnerView>);

impl OwnerLocator for ViewLocator {
    fn owner(&self) -> Option<ReachableOwner> {
        let (owner, term) = self.0.owner.get()?;
        let route = match &*self.0.local.borrow() {
            Some((local, host)) if *local == owner => OwnerRoute::Local(host.clone()),
            _ => OwnerRoute::Remote(self.0.connections.borrow()[owner].clone()),
        };
        Some(ReachableOwner { route, term: Some(term) })
    }

    fn changed(&self) -> LocalFuture<()> {
        let (changed, seen) = (self.0.changed.clone(), Cell::new(false));
        let mut waiting = Box::pin(async move {
            // The first look registers, the second one comes after a change.
            changed.wait_until(|| seen.replace(true)).await;
        });
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = waiting.as_mut().poll(&mut context);
        waiting
    }
}

/// The group, and what it knows.
pub(super) struct Group {
    scenario: ForwardScenario,
    core: MessengerCore,
    pub(super) content: Rc<VolumeContent>,
    owners: RefCell<Vec<OwnerNode>>,
    forwarders: Vec<Rc<ForwarderNode>>,
    owner: Cell<usize>,
    term: Cell<u64>,
    starts: Cell<u8>,
    dead: RefCell<Vec<ForwarderStart>>,
    /// Forwarders that have given the volume up, and do not have it open again yet.
    pub(super) reopening: Rc<Cell<usize>>,
    executed: Cell<u64>,
    wrong: RefCell<Option<String>>,
}

fn address(owner: usize) -> Address {
    format!("127.0.0.1:{}", 3300 + owner).parse().expect("an address")
}

impl Group {
    pub(super) async fn start(scenario: &ForwardScenario, rng: &mut Rng) -> std::result::Result<Self, String> {
        let core = MessengerCore::default();
        let mut owners = Vec::new();
        for number in 0..OWNERS {
            owners.push(start_owner(&core, number).await);
        }
        let content = VolumeContent::new(scenario.blocks);
        let mut group = Self {
            scenario: scenario.clone(),
            core,
            content,
            owners: RefCell::new(owners),
            forwarders: Vec::new(),
            owner: Cell::new(0),
            term: Cell::new(0),
            starts: Cell::new(0),
            dead: RefCell::default(),
            reopening: Rc::default(),
            executed: Cell::new(0),
            wrong: RefCell::default(),
        };
        group.open_at(0, rng).await?;
        for number in 0..scenario.forwarders {
            let life = RefCell::new(group.start_forwarder(number).await?);
            group.forwarders.push(Rc::new(ForwarderNode { number, life }));
        }
        Ok(group)
    }

    pub(super) fn forwarders(&self) -> &[Rc<ForwarderNode>] {
        &self.forwarders
    }

    /// Returns the first violation.
    pub(super) fn wrong(&self) -> Option<String> {
        let executes = |node: &OwnerNode| node.opened.as_ref().is_some_and(|opened| opened.wrong.get());
        if self.owners.borrow().iter().any(executes) {
            return Some("an owner has executed a request after it gave the volume up".into());
        }
        if let Some(key) = self.content.stale.get() {
            return Some(format!("a write of the registration {key:#x} landed after its preemption was acknowledged"));
        }
        self.wrong.borrow().clone()
    }

    /// Returns the number of requests that all owners executed.
    pub(super) fn executed(&self) -> u64 {
        let opened: u64 = self
            .owners
            .borrow()
            .iter()
            .filter_map(|node| node.opened.as_ref())
            .map(|opened| opened.executed.get())
            .sum();
        self.executed.get() + opened
    }

    /// Opens the volume at an owner, in a new term.
    async fn open_at(&self, owner: usize, rng: &mut Rng) -> std::result::Result<(), String> {
        self.term.set(self.term.get() + 1);
        let opening = OpenedVolume::open(&self.content, self.scenario.delay, rng.fork());
        let (device, opened) = opening.await.map_err(|error| format!("the volume is not opened: {error}"))?;
        let mut owners = self.owners.borrow_mut();
        let node = &mut owners[owner];
        // An offer of a former term, which it did not know to be over.
        drop(node.offer.take());
        if let Some(before) = node.opened.replace(opened) {
            self.executed.set(self.executed.get() + before.executed.get());
        }
        node.offer = Some(node.host.offer(VOLUME, self.term.get(), device).expect("it is not offered"));
        drop(owners);
        self.owner.set(owner);
        Ok(())
    }

    /// Tells forwarders of the owner, one later than the other.
    fn announce(&self, rng: &mut Rng) {
        for node in &self.forwarders {
            let (view, now) = (node.life.borrow().view.clone(), (self.owner.get(), self.term.get()));
            let delay = Duration::from_micros(if rng.coin() { 0 } else { rng.below(100_000) });
            drop(spawn(async move {
                sleep(delay).await;
                if view.owner.get().is_none_or(|(_, term)| term < now.1) {
                    view.owner.set(Some(now));
                    view.changed.notify_all();
                }
            }));
        }
    }

    /// Moves the volume to the other owner, as planned; or not, after all.
    pub(super) async fn move_volume(&self, cancels: bool, rng: &mut Rng) -> std::result::Result<(), String> {
        let from = self.owner.get();
        let (offer, opened) = {
            let mut owners = self.owners.borrow_mut();
            let node = &mut owners[from];
            (node.offer.take().expect("the owner offers it"), node.opened.clone().expect("and has it open"))
        };
        let suspended = timeout(LONGEST, offer.suspend()).await;
        suspended.map_err(|_| "a volume does not come to rest".to_owned())?;
        if opened.executing.get() > 0 {
            self.wrong.borrow_mut().get_or_insert("a suspended volume executes requests".into());
        }
        if !cancels {
            opened.closed.set(true);
        }
        sleep(Duration::from_micros(rng.below(20_000))).await;
        if cancels {
            offer.resume();
            self.owners.borrow_mut()[from].offer = Some(offer);
            return Ok(());
        }
        offer.set_next_owner("the other");
        drop(offer);
        self.open_at((from + 1) % OWNERS, rng).await?;
        self.announce(rng);
        Ok(())
    }

    /// Fences the owner, which does not know; the other one opens the volume.
    pub(super) async fn fence_owner(&self, rng: &mut Rng) -> std::result::Result<(), String> {
        let from = self.owner.get();
        let opened = self.owners.borrow()[from].opened.clone().expect("it has it open");
        opened.fenced.set(true);
        sleep(Duration::from_micros(rng.below(50_000))).await;
        self.open_at((from + 1) % OWNERS, rng).await?;
        self.announce(rng);
        Ok(())
    }

    /// Starts the owner's daemon again: it is fenced, and the other one opens the volume.
    pub(super) async fn restart_owner(&self, rng: &mut Rng) -> std::result::Result<(), String> {
        let from = self.owner.get();
        let messenger = {
            let owners = self.owners.borrow();
            owners[from].opened.as_ref().expect("it has it open").fenced.set(true);
            owners[from].messenger.clone()
        };
        messenger.shutdown();
        sleep(Duration::from_micros(rng.below(50_000))).await;
        // A forwarder of the same daemon ends with it.
        let with_it = self.forwarders.iter().find(|node| self.scenario.local && node.number == from);
        if let Some(node) = with_it {
            self.end_forwarder(node, rng).await?;
        }
        let again = start_owner(&self.core, from).await;
        let dead = self.dead.borrow().clone();
        for start in dead {
            again.host.end_start(start).await;
        }
        let before = std::mem::replace(&mut self.owners.borrow_mut()[from], again);
        before.host.shut_down();
        let executed = before.opened.as_ref().map_or(0, |opened| opened.executed.get());
        self.executed.set(self.executed.get() + executed);
        drop(before);
        self.open_at((from + 1) % OWNERS, rng).await?;
        if let Some(node) = with_it {
            let life = self.start_forwarder(from).await?;
            *node.life.borrow_mut() = life;
        }
        self.announce(rng);
        Ok(())
    }

    /// Replaces the connection of a forwarder to an owner.
    pub(super) fn reconnect(&self, rng: &mut Rng) {
        let life = rng.pick(&self.forwarders).life.borrow().clone();
        let owner = if rng.one_in(4) { rng.below(OWNERS as u64) as usize } else { self.owner.get() };
        let connection = life.messenger.connect(&address(owner), Policy::LosslessPeer);
        let before = std::mem::replace(&mut life.view.connections.borrow_mut()[owner], connection);
        if rng.coin() {
            before.close();
        } else {
            // Both are there for a while.
            let delay = Duration::from_micros(rng.below(300_000));
            drop(spawn(async move {
                sleep(delay).await;
                before.close();
            }));
        }
        life.view.changed.notify_all();
    }

    /// Makes the owners handle messages late, those of a start or all: they were late in the network, or the owner did not run.
    pub(super) fn delay_messages(&self, of: Option<ForwarderStart>, delay: Duration) {
        for node in self.owners.borrow().iter() {
            node.late.begin(&node.host, of, delay);
        }
    }

    /// Returns what finds the owner for a forwarder.
    pub(super) fn locator(life: &ForwarderLife) -> Rc<ViewLocator> {
        Rc::new(ViewLocator(life.view.clone()))
    }

    /// Keeps events from a forwarder for a while, which may be longer than it has for adopting a table.
    pub(super) fn keep_events(&self, rng: &mut Rng) {
        let life = rng.pick(&self.forwarders).life.borrow().clone();
        if life.kept.keeps.replace(true) {
            return;
        }
        let longest = if rng.coin() { 100 } else { 6_000 };
        let delay = Duration::from_millis(rng.below(longest));
        drop(spawn(async move {
            sleep(delay).await;
            life.kept.keeps.set(false);
            for (connection, message) in life.kept.events.take() {
                assert!(life.client.handle(&connection, &message), "a forwarder gets events only");
            }
        }));
    }

    async fn start_forwarder(&self, number: usize) -> std::result::Result<Rc<ForwarderLife>, String> {
        let start = self.starts.get() + 1;
        self.starts.set(start);
        let limits = ForwarderLimits {
            patience: self.scenario.patience,
            lease: self.scenario.lease,
            requests_max: 1 + usize::from(start % 3) * 8,
            ..ForwarderLimits::default()
        };
        let client = ForwardClient::new([start; 16], limits);
        let kept = Rc::new(KeptEvents::default());
        let side = ForwarderSide { client: client.clone(), kept: kept.clone() };
        let messenger = Messenger::new(&self.core, options(), side);
        let connect = |owner| messenger.connect(&address(owner), Policy::LosslessPeer);
        let view = Rc::new(OwnerView::default());
        *view.connections.borrow_mut() = (0..OWNERS).map(connect).collect();
        view.owner.set(Some((self.owner.get(), self.term.get())));
        if self.scenario.local && number < OWNERS {
            *view.local.borrow_mut() = Some((number, self.owners.borrow()[number].host.clone()));
        }
        let volume = loop {
            match timeout(LONGEST, client.open(VOLUME, Rc::new(ViewLocator(view.clone())))).await {
                Ok(Ok(volume)) => break RefCell::new(Rc::new(volume)),
                Ok(Err(error)) if error.kind() == ErrorKind::TimedOut => {}
                Ok(Err(error)) => return Err(format!("a volume cannot be opened: {error}")),
                Err(_) => return Err("a volume is not opened".into()),
            }
        };
        let (over, ended) = (Cell::new(false), Notify::new());
        Ok(Rc::new(ForwarderLife { messenger, volume, view, client, kept, over, ended }))
    }

    /// Starts a forwarder again.  The owners are told that its former life is over.
    pub(super) async fn restart_forwarder(&self, rng: &mut Rng) -> std::result::Result<(), String> {
        let node = rng.pick(&self.forwarders).clone();
        self.end_forwarder(&node, rng).await?;
        let life = self.start_forwarder(node.number).await?;
        *node.life.borrow_mut() = life;
        Ok(())
    }

    /// Declares the life of a forwarder dead.
    async fn end_forwarder(&self, node: &ForwarderNode, rng: &mut Rng) -> std::result::Result<(), String> {
        let before = node.life.borrow().clone();
        let start = *before.volume.borrow().start();
        if rng.coin() {
            before.messenger.shutdown();
        }
        let hosts: Vec<_> = self.owners.borrow().iter().map(|node| node.host.clone()).collect();
        self.dead.borrow_mut().push(start);
        for host in hosts {
            timeout(LONGEST, host.end_start(start)).await.map_err(|_| "a start does not end".to_owned())?;
        }
        before.over.set(true);
        before.ended.notify_all();
        // It may go on for a while, and not know that it was declared dead.
        let delay = Duration::from_micros(rng.below(50_000));
        drop(spawn(async move {
            sleep(delay).await;
            before.messenger.shutdown();
        }));
        Ok(())
    }

    /// Closes everything.
    pub(super) async fn close(&self) -> std::result::Result<(), String> {
        while self.reopening.get() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
        for node in &self.forwarders {
            let life = node.life.borrow().clone();
            let number = node.number;
            let volume = life.volume.borrow().clone();
            let closed = timeout(LONGEST, volume.close()).await;
            closed.map_err(|_| format!("the volume of forwarder {number} is not closed"))?;
        }
        sleep(Duration::from_secs(60)).await;
        let current = self.owners.borrow()[self.owner.get()].host.sessions();
        if current > 0 {
            return Err(format!("{current} sessions are left"));
        }
        for node in &self.forwarders {
            node.life.borrow().messenger.shutdown();
        }
        for node in self.owners.borrow().iter() {
            node.messenger.shutdown();
            node.host.shut_down();
        }
        Ok(())
    }
}

fn options() -> MessengerOptions {
    MessengerOptions {
        handshake_timeout: Duration::from_secs(5),
        keepalive_interval: Duration::from_secs(1),
        keepalive_timeout: Duration::from_secs(3),
        frame_timeout: Duration::from_secs(10),
        backoff_min: Duration::from_millis(10),
        backoff_max: Duration::from_millis(500),
        session_timeout: Duration::from_secs(20),
        ..MessengerOptions::default()
    }
}

async fn start_owner(core: &MessengerCore, number: usize) -> OwnerNode {
    let (host, late) = (ForwardHost::new(), Rc::new(LateMessages::default()));
    let side = OwnerSide { host: host.clone(), late: late.clone() };
    let messenger = Messenger::new(core, options(), side);
    while messenger.bind(&address(number)).is_err() {
        sleep(Duration::from_millis(1)).await;
    }
    OwnerNode { messenger, host, late, offer: None, opened: None }
}
