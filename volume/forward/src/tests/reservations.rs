//! Reservations over the messenger.

use forebay_block::DeviceHandle;
use forebay_block::reservation::{
    EventKind, HostId, Keep, Refusal, ReservationAccess, ReservationAction, ReservationChange, ReservationPeers,
    ReservationTable, ReservationType,
};
use forebay_reactor::now;

use super::*;

const KIND: ReservationType = ReservationType::WriteExclusiveRegistrants;

/// Table that all owners store; a new owner finds no other one that goes by its incarnation.
#[derive(Clone, Default)]
struct StoredTable(Rc<RefCell<Option<Vec<u8>>>>);

impl Keep for StoredTable {
    fn save(&self, _table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        unreachable!("peers have it")
    }
}

impl ReservationPeers for StoredTable {
    fn claim(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn load(&self) -> LocalFuture<Result<Option<Vec<u8>>>> {
        Box::pin(std::future::ready(Ok(self.0.borrow().clone())))
    }

    fn replace(&self, before: Option<Vec<u8>>, after: Vec<u8>) -> LocalFuture<Result<()>> {
        let stored = self.0.clone();
        Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            if *stored.borrow() != before {
                return Err(Error::new(ErrorKind::Guard, "another table"));
            }
            *stored.borrow_mut() = Some(after);
            Ok(())
        })
    }

    fn announce(&self) -> LocalFuture<()> {
        Box::pin(std::future::ready(()))
    }

    fn knows(&self, _incarnation: u64) -> LocalFuture<Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }
}

/// Starts owner 3, which offers the volume with the table that is stored.
async fn daemon_with(core: &MessengerCore, stored: &StoredTable) -> (Daemon, crate::VolumeOffer) {
    let (next, device) = (daemon(core, 3), reservable(stored).await);
    let offer = next.host.offer(VOLUME, 2, Rc::new(Shared(device))).expect("offered");
    (next, offer)
}

async fn reservable(stored: &StoredTable) -> Rc<HeldDevice> {
    let device = HeldDevice::new();
    let (reservations, joint) = Reservations::joint(Rc::new(stored.clone()), Rc::new(stored.clone()));
    joint.begin().await.expect("loaded");
    *device.reservations.borrow_mut() = Some(reservations);
    device
}

fn host(number: u8) -> HostId {
    HostId::new(&[b'h', number]).expect("a host")
}

fn register(number: u8) -> ReservationAction {
    ReservationAction::Add { key: u64::from(number), persist: None }
}

fn preempt(number: u8, victim: u8) -> ReservationAction {
    ReservationAction::Preempt { key: u64::from(number), victim: u64::from(victim), kind: KIND, abort: true }
}

fn reservations(volume: &ForwardedVolume) -> Reservations {
    volume.reservations().expect("the volume can be reserved")
}

async fn apply(
    volume: &ForwardedVolume,
    number: u8,
    action: ReservationAction,
) -> std::result::Result<ReservationChange, Refusal> {
    reservations(volume).apply(&host(number), action).await.expect("an owner")
}

fn table(volume: &ForwardedVolume) -> ReservationTable {
    ReservationTable::clone(reservations(volume).view().table())
}

fn may_write(volume: &ForwardedVolume, number: u8) -> bool {
    reservations(volume).view().allows(Some(&host(number)), ReservationAccess::Write)
}

/// Forwarders 1 and 4 of a volume that owner 2 has, which forwards it to itself as well.
struct Trio {
    first: Daemon,
    other: Daemon,
    owner: Daemon,
    device: Rc<HeldDevice>,
    stored: StoredTable,
    /// Volume as the first, the other and the owner forward it.
    volumes: [Rc<ForwardedVolume>; 3],
    located: [Rc<Located>; 2],
    offer: crate::VolumeOffer,
    core: MessengerCore,
}

async fn trio() -> Trio {
    let core = MessengerCore::default();
    let (first, other, owner) = (daemon(&core, 1), daemon(&core, 4), daemon(&core, 2));
    let stored = StoredTable::default();
    let device = reservable(&stored).await;
    let offer = owner.host.offer(VOLUME, 1, Rc::new(Shared(device.clone()))).expect("offered");
    let located = [Rc::new(Located::default()), Rc::new(Located::default())];
    let mut volumes = Vec::new();
    for (daemon, located) in [&first, &other].into_iter().zip(&located) {
        located.set(Some(&daemon.messenger.connect(&address(2), Policy::LosslessPeer)), 1);
        let opened = daemon.client.open(VOLUME, Rc::new(Locator(located.clone()))).await.expect("opened");
        volumes.push(Rc::new(opened));
    }
    let itself = Located::default();
    let route = OwnerRoute::Local(owner.host.clone());
    *itself.owner.borrow_mut() = Some(ReachableOwner { route, term: Some(1) });
    let opened = owner.client.open(VOLUME, Rc::new(Locator(Rc::new(itself)))).await.expect("opened");
    volumes.push(Rc::new(opened));
    let volumes = volumes.try_into().ok().expect("three");
    Trio { first, other, owner, device, stored, volumes, located, offer, core }
}

#[test]
fn all_forwarders_see_what_hosts_do_to_reservations() {
    run(async |_| {
        let scene = trio().await;
        let Trio { volumes, device, owner, .. } = &scene;
        let [first, other, itself] = volumes;
        let mut told = reservations(itself).changes();
        apply(first, 1, register(1)).await.expect("registered");
        apply(other, 2, register(2)).await.expect("registered");
        apply(itself, 3, register(3)).await.expect("registered");
        assert!(told.next().await);
        assert_eq!(apply(other, 2, ReservationAction::Reserve { key: 9, kind: KIND }).await, Err(Refusal::Conflict));
        apply(other, 2, ReservationAction::Reserve { key: 2, kind: KIND }).await.expect("reserved");
        for volume in volumes {
            assert!(may_write(volume, 1) && may_write(volume, 3) && !may_write(volume, 4));
            assert_eq!((table(volume).generation(), table(volume).persists()), (3, true));
        }
        let change = apply(itself, 3, preempt(3, 2)).await.expect("preempted");
        assert_eq!(change.abort, [host(2)]);
        for volume in volumes {
            assert!(table(volume).is_holder(&host(3)) && !may_write(volume, 2));
            let events: Vec<_> =
                table(volume).events_after(0).map(|event| (event.kind, event.hosts.to_vec())).collect();
            assert_eq!(events, [(EventKind::RegistrationPreempted, vec![host(2)])]);
        }
        assert_eq!(apply(first, 1, preempt(1, 2)).await, Err(Refusal::Conflict), "it is gone");
        assert_eq!(apply(first, 1, ReservationAction::HoldWhole).await, Err(Refusal::Unsupported));
        // An administrator at the owner.
        let at_owner = device.reservations.borrow().clone().expect("it has some");
        at_owner.clear_all().await.expect("cleared");
        sleep(Duration::from_millis(100)).await;
        assert!(volumes.iter().all(|volume| may_write(volume, 4) && table(volume).registrants().is_empty()));
        assert_eq!(owner.host.sessions(), 3);
    });
}

#[test]
fn a_preemption_waits_for_writes_that_were_admitted_before() {
    run(async |_| {
        let scene = trio().await;
        let Trio { volumes, device, .. } = &scene;
        let [first, other, _] = &volumes;
        apply(first, 1, register(1)).await.expect("registered");
        apply(other, 2, register(2)).await.expect("registered");
        apply(first, 1, ReservationAction::Reserve { key: 1, kind: KIND }).await.expect("reserved");
        device.held.set(true);
        // Over the queue of another core, as far as the volume can tell.
        let attached = DeviceHandle::new(other.clone()).attach();
        let held = spawn(attached.submit(write(0, 7)));
        let begun = now();
        let preempting = spawn({
            let first = first.clone();
            async move { apply(&first, 1, preempt(1, 2)).await }
        });
        sleep(Duration::from_secs(1)).await;
        assert!(!preempting.is_finished() && !may_write(other, 2));
        device.release();
        held.await.expect("it was allowed");
        preempting.await.expect("preempted");
        assert!(begun.elapsed() < Duration::from_millis(1500), "no session has ended");
        assert!(other.is_connected());
    });
}

#[test]
fn a_forwarder_that_does_not_adopt_a_table_loses_its_session() {
    run(async |_| {
        let scene = trio().await;
        let Trio { volumes, device, other: daemon, owner, .. } = &scene;
        let [first, other, _] = &volumes;
        apply(first, 1, register(1)).await.expect("registered");
        apply(other, 2, register(2)).await.expect("registered");
        apply(first, 1, ReservationAction::Reserve { key: 1, kind: KIND }).await.expect("reserved");
        daemon.is_deaf.set(true);
        device.held.set(true);
        let held = submit(other, write(0, 1));
        device.until_executing(1).await;
        let begun = now();
        let preempting = spawn({
            let first = first.clone();
            async move { apply(&first, 1, preempt(1, 2)).await }
        });
        sleep(Duration::from_secs(4)).await;
        assert!(!preempting.is_finished(), "a write is being executed");
        assert_eq!(owner.host.sessions(), 3, "of which one has ended");
        device.release();
        preempting.await.expect("preempted");
        held.await.expect("it was executed before");
        assert!(begun.elapsed() >= Duration::from_secs(4));
        // It does not know, and its host may write.
        assert!(may_write(other, 2) && other.is_connected());
        let error = other.submit(write(4096, 2)).await.expect_err("outdated");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(!may_write(other, 2) && device.bytes.borrow()[4096] == 0);
        // Its other hosts go on, and it adopts again.
        daemon.is_deaf.set(false);
        other.submit(write(8192, 3)).await.expect("of a host that is registered");
        let begun = now();
        apply(other, 3, register(3)).await.expect("registered");
        assert!(begun.elapsed() < Duration::from_secs(1) && may_write(first, 3));
    });
}

#[test]
fn a_move_keeps_the_table_and_what_it_admits() {
    run(async |_| {
        let Trio { volumes, first: one, located, stored, offer, core, device, owner, other: two } = trio().await;
        let [first, other, _] = &volumes;
        let transient = ReservationAction::Register { current: None, new: 1, persist: Some(false) };
        apply(first, 1, transient).await.expect("registered");
        apply(other, 2, register(2)).await.expect("registered");
        apply(first, 1, ReservationAction::Reserve { key: 1, kind: KIND }).await.expect("reserved");
        let before = table(first);
        offer.suspend().await;
        let (kept, outdated) = (submit(first, write(0, 1)), submit(other, write(4096, 2)));
        let waiting = spawn({
            let first = first.clone();
            async move { apply(&first, 1, preempt(1, 2)).await }
        });
        sleep(Duration::from_millis(100)).await;
        assert!(!kept.is_finished() && !outdated.is_finished() && !waiting.is_finished());
        drop(offer);
        let next = daemon(&core, 3);
        let again = reservable(&stored).await;
        *again.bytes.borrow_mut() = device.bytes.borrow().clone();
        let _offer = next.host.offer(VOLUME, 2, Rc::new(Shared(again.clone()))).expect("offered");
        located[0].set(Some(&one.messenger.connect(&address(3), Policy::LosslessPeer)), 2);
        kept.await.expect("the table is the same");
        waiting.await.expect("preempted at the next owner");
        assert_eq!((table(first).generation(), table(first).is_holder(&host(1))), (before.generation() + 1, true));
        // The other one comes late, with a write that the former table has admitted.
        assert!(!outdated.is_finished());
        located[1].set(Some(&two.messenger.connect(&address(3), Policy::LosslessPeer)), 2);
        assert_eq!(outdated.await.expect_err("outdated").kind(), ErrorKind::Busy);
        assert!(table(other) == table(first) && !may_write(other, 2));
        assert_eq!((again.bytes.borrow()[0], again.bytes.borrow()[4096]), (1, 0));
        drop(owner);
    });
}

#[test]
fn a_change_that_left_no_other_trace_makes_requests_outdated() {
    run(async |_| {
        let scene = trio().await;
        let Trio { volumes, device, other: daemon, .. } = &scene;
        let [first, other, _] = &volumes;
        apply(first, 1, register(1)).await.expect("registered");
        daemon.is_deaf.set(true);
        let reserve = ReservationAction::Reserve { key: 1, kind: KIND };
        apply(first, 1, reserve).await.expect("reserved");
        apply(first, 1, ReservationAction::Release { key: Some(1), kind: KIND }).await.expect("released");
        let (was, is) = (table(other), table(first));
        assert_eq!((was.registrants(), was.held(), was.generation()), (is.registrants(), is.held(), is.generation()));
        assert_eq!(other.submit(write(0, 1)).await.expect_err("outdated").kind(), ErrorKind::Busy);
        assert_eq!(device.bytes.borrow()[0], 0);
        other.submit(write(0, 2)).await.expect("admitted by the new table");
    });
}

#[test]
fn a_volume_without_reservations_has_none() {
    run(async |_| {
        let scene = pair().await;
        let Pair { volume, offer: _, owner, connection, .. } = &scene;
        assert!(volume.reservations().is_none());
        let reserve = VolumeRequest::Reserve(host(1), register(1));
        let message = wire::message(KIND_REQUEST, reserve.encode(1));
        let reply = connection.request(message).await.expect("answered");
        let answer = wire::ForwardAnswer::decode(&reply.front.to_vec(), reply.data).expect("readable");
        assert!(matches!(answer, wire::ForwardAnswer::Failed(error) if error.kind() == ErrorKind::Unsupported));
        assert_eq!(owner.host.sessions(), 1);
    });
}

#[test]
fn an_action_whose_owner_is_fenced_has_an_unknown_outcome() {
    run(async |_| {
        let scene = trio().await;
        let Trio { volumes, first: one, other: daemon, located, stored, core, device, .. } = &scene;
        let [first, other, _] = volumes;
        // The table is stored, and the action waits for the other forwarder.
        daemon.is_deaf.set(true);
        device.held.set(true);
        let held = submit(other, write(0, 1));
        device.until_executing(1).await;
        let acting = spawn(reservations(first).apply(&host(2), register(2)));
        sleep(Duration::from_millis(100)).await;
        assert!(!acting.is_finished());
        device.fenced.set(true);
        let next = daemon_with(core, stored).await;
        located[0].set(Some(&one.messenger.connect(&address(3), Policy::LosslessPeer)), 2);
        assert_eq!(acting.await.expect_err("not repeated").kind(), ErrorKind::Io);
        assert_eq!(table(first).key_of(&host(2)), Some(2), "it was executed");
        apply(first, 2, register(2)).await.expect("registered already");
        device.release();
        assert!(!held.is_finished());
        drop(next);
    });
}
