//! Leases of sessions, and volumes that are given up.

use forebay_reactor::now;

use super::*;
use crate::VolumeOffer;

/// Lease of sessions, as forwarders of these tests ask for it.
const LEASE: Duration = Duration::from_secs(2);

/// Requests of one forwarder that the owner handles late.
#[derive(Default)]
pub(super) struct LateRequests {
    /// Connections that forwarders have opened sessions over.
    from: RefCell<Vec<(Connection, ForwarderStart)>>,
    pub(super) keeps: Cell<Option<ForwarderStart>>,
    /// Renewals of leases are handled in time.
    renews: Cell<bool>,
    messages: RefCell<Vec<(Connection, Message)>>,
}

impl LateRequests {
    /// Keeps a message if it is to be late; returns it otherwise.
    pub(super) fn keep(&self, connection: &Connection, message: Message) -> Option<Message> {
        let decoded = wire::front(&message).and_then(|front| ForwardRequest::decode(&front, message.data.clone()));
        if let Ok(ForwardRequest::Open { start, .. }) = decoded {
            self.from.borrow_mut().push((connection.clone(), start));
        }
        if self.renews.get() && matches!(decoded, Ok(ForwardRequest::Renew { .. })) {
            return Some(message);
        }
        let is_late = |from: &(Connection, ForwarderStart)| from.0 == *connection && Some(from.1) == self.keeps.get();
        if !self.from.borrow().iter().any(is_late) {
            return Some(message);
        }
        self.messages.borrow_mut().push((connection.clone(), message));
        None
    }

    /// Handles what was kept.
    pub(super) fn handle(&self, host: &Rc<ForwardHost>) {
        self.keeps.set(None);
        for (connection, message) in self.messages.take() {
            assert!(host.handle(&connection, message), "a request");
        }
    }
}

/// Both sides, with a volume open at the owner.
struct Pair {
    owner: Daemon,
    forwarder: Daemon,
    other: Daemon,
    device: Rc<HeldDevice>,
    _offer: VolumeOffer,
    volume: Rc<ForwardedVolume>,
    /// The same, through the other forwarder.
    path: Rc<ForwardedVolume>,
}

async fn open(daemon: &Daemon, owner: u8) -> Rc<ForwardedVolume> {
    let located = Rc::new(Located::default());
    let connection = daemon.messenger.connect(&address(owner), Policy::LosslessPeer);
    located.set(Some(&connection), 1);
    Rc::new(daemon.client.open(VOLUME, Rc::new(Locator(located))).await.expect("it opens"))
}

async fn pair() -> Pair {
    let core = MessengerCore::default();
    let [owner, forwarder, other] = [0, 1, 2].map(|number| daemon(&core, number));
    let device = HeldDevice::new();
    let offer = owner.host.offer(VOLUME, 1, Rc::new(Shared(device.clone()))).expect("an offer");
    let (volume, path) = (open(&forwarder, 0).await, open(&other, 0).await);
    Pair { owner, forwarder, other, device, _offer: offer, volume, path }
}

impl Pair {
    fn end(&self) {
        for daemon in [&self.owner, &self.forwarder, &self.other] {
            daemon.messenger.shutdown();
            daemon.host.shut_down();
        }
    }
}

fn kind(result: Result<BlockReply>) -> ErrorKind {
    result.expect_err("it fails").kind()
}

async fn first_byte(volume: &Rc<ForwardedVolume>) -> u8 {
    let read = volume.submit(BlockRequest::Read(Extent::new(0, 1))).await.expect("a read");
    read.into_data().to_vec()[0]
}

#[test]
fn an_owner_that_is_reached_ends_the_session_at_once() {
    run(async |_| {
        let pair = pair().await;
        pair.device.held.set(true);
        let first = submit(&pair.volume, write(0, 1));
        pair.device.until_executing(1).await;
        let began = now();
        pair.volume.give_up();
        assert_eq!(kind(first.await), ErrorKind::Fenced);
        assert!(began.elapsed() < LEASE / 4);
        assert_eq!(kind(pair.volume.submit(write(0, 1)).await), ErrorKind::Fenced);
        // The original is being executed: what the host sends again waits for it, and what it sends elsewhere does not.
        let again = submit(&pair.path, write(0, 2));
        let elsewhere = submit(&pair.path, write(8192, 3));
        pair.device.until_executing(2).await;
        sleep(Duration::from_millis(100)).await;
        assert_eq!(pair.device.executing.get(), 2);
        pair.device.release();
        again.await.expect("written");
        elsewhere.await.expect("written");
        assert_eq!(first_byte(&pair.path).await, 2);
        assert_eq!(pair.device.executed.get(), 4);
        pair.end();
    });
}

#[test]
fn with_an_owner_that_is_not_reached_the_lease_decides() {
    run(async |_| {
        let pair = pair().await;
        // Longer than a lease, which is renewed.
        sleep(3 * LEASE).await;
        pair.volume.submit(write(0, 1)).await.expect("written");
        let late = &pair.owner.late;
        late.keeps.set(Some(start_id(1)));
        let first = submit(&pair.volume, write(0, 9));
        sleep(Duration::from_millis(100)).await;
        let began = now();
        pair.volume.give_up();
        assert_eq!(kind(first.await), ErrorKind::Fenced);
        let waited = began.elapsed();
        assert!(waited > LEASE / 2 && waited < LEASE + LEASE / 8, "{waited:?}");
        pair.path.submit(write(0, 2)).await.expect("written");
        // The original arrives after all.
        assert!(!late.messages.borrow().is_empty());
        late.handle(&pair.owner.host);
        sleep(LEASE).await;
        assert_eq!(first_byte(&pair.path).await, 2);
        pair.end();
    });
}

#[test]
fn renewals_for_another_volume_do_not_keep_the_lease_of_one_that_is_given_up() {
    run(async |_| {
        let pair = pair().await;
        let (device, located) = (HeldDevice::new(), Rc::new(Located::default()));
        let _offer = pair.owner.host.offer("rbd/other", 1, Rc::new(Shared(device.clone()))).expect("an offer");
        // Over the same connection.
        let used = pair.forwarder.client.connections_in_use();
        located.set(used.first(), 1);
        let opened = pair.forwarder.client.open("rbd/other", Rc::new(Locator(located))).await.expect("it opens");
        let other = Rc::new(opened);
        assert_eq!(pair.forwarder.client.connections_in_use().len(), 1);
        sleep(LEASE).await;
        let late = &pair.owner.late;
        late.renews.set(true);
        late.keeps.set(Some(start_id(1)));
        let first = submit(&pair.volume, write(0, 9));
        let unanswered = submit(&other, write(0, 1));
        sleep(Duration::from_millis(100)).await;
        let began = now();
        pair.volume.give_up();
        assert_eq!(kind(timeout(3 * LEASE, first).await.expect("its lease runs out")), ErrorKind::Fenced);
        let waited = began.elapsed();
        assert!(waited > LEASE / 2 && waited < LEASE + LEASE / 8, "{waited:?}");
        // The other one has lost its lease with it, and goes on in another session.
        late.handle(&pair.owner.host);
        unanswered.await.expect("written");
        other.submit(write(512, 2)).await.expect("written");
        assert_eq!(device.executed.get(), 2);
        sleep(2 * LEASE).await;
        assert_eq!(pair.owner.host.sessions(), 2, "leases are renewed again");
        pair.end();
    });
}

#[test]
fn a_daemon_that_is_the_owner_ends_requests_at_once() {
    run(async |_| {
        let pair = pair().await;
        let located = Rc::new(Located::default());
        let route = OwnerRoute::Local(pair.owner.host.clone());
        *located.owner.borrow_mut() = Some(ReachableOwner { route, term: Some(1) });
        let local = Rc::new(pair.owner.client.open(VOLUME, Rc::new(Locator(located.clone()))).await.expect("it opens"));
        pair.device.held.set(true);
        let first = submit(&local, write(0, 1));
        pair.device.until_executing(1).await;
        let began = now();
        local.give_up();
        assert_eq!(kind(first.await), ErrorKind::Fenced);
        assert_eq!(began.elapsed(), Duration::ZERO);
        let again = submit(&pair.path, write(0, 2));
        sleep(Duration::from_millis(100)).await;
        assert_eq!(pair.device.executing.get(), 1);
        // The daemon admits hosts again: their requests wait as well.
        let client = pair.owner.client.clone();
        let local = spawn(async move { client.open(VOLUME, Rc::new(Locator(located))).await.expect("it opens") });
        pair.device.release();
        again.await.expect("written");
        assert_eq!(first_byte(&Rc::new(local.await)).await, 2);
        pair.end();
    });
}

#[test]
fn a_compare_and_write_that_was_sent_has_an_unknown_outcome() {
    run(async |_| {
        let pair = pair().await;
        let compare = |from: u8, to: u8| {
            let bytes = |byte: u8| Buf::copy_of(&[byte; 512]).into();
            BlockRequest::CompareAndWrite { offset: 0, expect: bytes(from), data: bytes(to), fua: false }
        };
        pair.device.held.set(true);
        let first = submit(&pair.volume, compare(0, 1));
        pair.device.until_executing(1).await;
        pair.volume.give_up();
        assert_eq!(kind(first.await), ErrorKind::Io);
        // Hosts read what has become of it.
        let read = spawn({
            let path = pair.path.clone();
            async move { first_byte(&path).await }
        });
        sleep(Duration::from_millis(100)).await;
        pair.device.release();
        assert_eq!(read.await, 1);
        pair.end();
    });
}

#[test]
fn an_owner_forgets_a_forwarder_that_says_nothing() {
    run(async |_| {
        let pair = pair().await;
        let late = &pair.owner.late;
        late.keeps.set(Some(start_id(1)));
        sleep(LEASE / 2).await;
        assert_eq!(pair.owner.host.sessions(), 2);
        sleep(LEASE).await;
        assert_eq!(pair.owner.host.sessions(), 1, "the other one is heard of");
        // It opens another session, and repeats what was refused.
        let first = submit(&pair.volume, write(0, 2));
        sleep(Duration::from_millis(10)).await;
        late.handle(&pair.owner.host);
        first.await.expect("written");
        assert_eq!(first_byte(&pair.path).await, 2);
        pair.end();
    });
}
