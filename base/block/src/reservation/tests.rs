use std::cell::RefCell;
use std::future::ready;
use std::rc::Rc;

use forebay_reactor::{DriverChoice, Reactor};
use proptest::prelude::*;

use super::format::Stored;
use super::*;
use crate::device::{BlockDevice, Geometry, LocalFuture, SizeWatch};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, ExtentMap};
use crate::request::{BlockReply, BlockRequest};
use crate::unnamed::Unnamed;

fn host(number: u8) -> HostId {
    HostId::new(&[b'h', number]).expect("a host")
}

fn register(table: &mut ReservationTable, number: u8, key: u64) {
    table
        .apply(&host(number), &ReservationAction::Register { current: Some(0), new: key, persist: None })
        .expect("registered");
}

fn reserve(
    table: &mut ReservationTable,
    number: u8,
    key: u64,
    kind: ReservationType,
) -> std::result::Result<ReservationChange, Refusal> {
    table.apply(&host(number), &ReservationAction::Reserve { key, kind })
}

/// Registers hosts 1, 2 and 3 with the keys 10, 20 and 30; host 1 is the reservation holder.
fn held_by_first(kind: ReservationType) -> ReservationTable {
    let mut table = ReservationTable::new();
    for number in 1..=3 {
        register(&mut table, number, u64::from(number) * 10);
    }
    reserve(&mut table, 1, 10, kind).expect("reserved");
    table
}

fn told(table: &ReservationTable, after: u64) -> Vec<(EventKind, Vec<u8>)> {
    let names = |event: &ReservationEvent| event.hosts.iter().map(|host| host.as_bytes()[1]).collect();
    table.events_after(after).map(|event| (event.kind, names(event))).collect()
}

/// SPC-4, table 62, and NVM Express Base 2.0, figure "Command Behavior in the Presence of a Reservation".
#[test]
fn each_kind_keeps_out_whom_it_should() {
    use ReservationType::*;
    // Read and write by the holder, by another registrant, and by an unregistered host.
    for (kind, want) in [
        (WriteExclusive, ["rw", "r", "r"]),
        (ExclusiveAccess, ["rw", "", ""]),
        (WriteExclusiveRegistrants, ["rw", "rw", "r"]),
        (ExclusiveAccessRegistrants, ["rw", "rw", ""]),
        (WriteExclusiveAll, ["rw", "rw", "r"]),
        (ExclusiveAccessAll, ["rw", "rw", ""]),
    ] {
        let table = held_by_first(kind);
        let may = |host: Option<HostId>| {
            let read = if table.allows(host.as_ref(), ReservationAccess::Read) { "r" } else { "" };
            let write = if table.allows(host.as_ref(), ReservationAccess::Write) { "w" } else { "" };
            format!("{read}{write}")
        };
        assert_eq!([may(Some(host(1))), may(Some(host(2))), may(Some(host(9)))], want, "{kind:?}");
        assert_eq!(may(None), want[2], "{kind:?}: one without a name");
    }
    assert!(
        ReservationTable::new().allows(None, ReservationAccess::Write),
        "nobody is kept out where nothing is reserved"
    );
}

#[test]
fn registering_asks_for_the_key() {
    let mut table = ReservationTable::new();
    let mut ask = |current, new| table.apply(&host(1), &ReservationAction::Register { current, new, persist: None });
    assert_eq!(ask(Some(5), 7), Err(Refusal::Conflict), "not registered");
    assert_eq!(ask(Some(0), 0), Ok(ReservationChange::default()), "nothing to do");
    ask(Some(0), 7).expect("registered");
    assert_eq!(ask(Some(0), 8), Err(Refusal::Conflict), "registered with another key");
    ask(Some(7), 8).expect("changed");
    ask(None, 9).expect("changed without asking");
    ask(Some(9), 0).expect("unregistered");
    assert_eq!(table.registrants(), []);
    assert_eq!(table.generation(), 4, "one a change of registrations");
}

#[test]
fn nvme_registers_in_its_own_way() {
    let mut table = ReservationTable::new();
    let mut ask = |action| table.apply(&host(1), &action);
    assert_eq!(ask(ReservationAction::Replace { current: None, new: 3, persist: None }), Err(Refusal::Conflict));
    assert_eq!(ask(ReservationAction::Remove { current: None, persist: None }), Err(Refusal::Conflict));
    ask(ReservationAction::Add { key: 3, persist: None }).expect("registered");
    ask(ReservationAction::Add { key: 3, persist: None }).expect("again the same");
    assert_eq!(ask(ReservationAction::Add { key: 4, persist: None }), Err(Refusal::Conflict), "another key");
    assert_eq!(ask(ReservationAction::Replace { current: Some(9), new: 4, persist: None }), Err(Refusal::Conflict));
    ask(ReservationAction::Replace { current: Some(3), new: 4, persist: None }).expect("replaced");
    ask(ReservationAction::Remove { current: Some(4), persist: None }).expect("removed");
    assert_eq!(table.registrants(), []);
}

#[test]
fn a_reservation_goes_with_its_holder() {
    for kind in ReservationType::ALL {
        let mut table = held_by_first(kind);
        let unregister = |key| ReservationAction::Register { current: Some(key), new: 0, persist: None };
        table.apply(&host(1), &unregister(10)).expect("unregistered");
        match kind {
            ReservationType::WriteExclusive | ReservationType::ExclusiveAccess => {
                assert_eq!((table.held(), told(&table, 0)), (None, vec![]), "{kind:?}");
            }
            ReservationType::WriteExclusiveRegistrants | ReservationType::ExclusiveAccessRegistrants => {
                assert_eq!(
                    (table.held(), told(&table, 0)),
                    (None, vec![(EventKind::Released, vec![2, 3])]),
                    "{kind:?}"
                );
            }
            ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll => {
                assert!(table.is_holder(&host(2)) && table.is_holder(&host(3)) && !table.is_holder(&host(1)));
                table.apply(&host(2), &unregister(20)).expect("unregistered");
                table.apply(&host(3), &unregister(30)).expect("unregistered");
                assert_eq!(table.held(), None, "the last one was gone");
            }
        }
    }
}

#[test]
fn releasing() {
    let mut table = held_by_first(ReservationType::WriteExclusiveRegistrants);
    let release = |key, kind| ReservationAction::Release { key: Some(key), kind };
    table.apply(&host(2), &release(20, ReservationType::WriteExclusive)).expect("of one who does not hold it: nothing");
    assert!(table.is_holder(&host(1)));
    assert_eq!(table.apply(&host(1), &release(11, ReservationType::WriteExclusiveRegistrants)), Err(Refusal::Conflict));
    assert_eq!(table.apply(&host(1), &release(10, ReservationType::WriteExclusive)), Err(Refusal::WrongKind));
    table.apply(&host(1), &release(10, ReservationType::WriteExclusiveRegistrants)).expect("released");
    assert_eq!(told(&table, 0), [(EventKind::Released, vec![2, 3])]);
    assert_eq!(table.held(), None);
    table.apply(&host(1), &release(10, ReservationType::WriteExclusiveRegistrants)).expect("there is none: nothing");
}

#[test]
fn clearing() {
    let mut table = held_by_first(ReservationType::ExclusiveAccess);
    table.apply(&host(2), &ReservationAction::Clear { key: Some(20) }).expect("any registrant may");
    assert_eq!((table.held(), table.registrants().len()), (None, 0));
    assert_eq!(told(&table, 0), [(EventKind::Cleared, vec![1, 3])]);
}

#[test]
fn preempting_the_holder_takes_the_reservation() {
    let mut table = held_by_first(ReservationType::WriteExclusive);
    let action =
        ReservationAction::Preempt { key: 20, victim: 10, kind: ReservationType::ExclusiveAccess, abort: true };
    let change = table.apply(&host(2), &action).expect("preempted");
    assert_eq!(change.abort, [host(1)]);
    assert_eq!(table.held(), Some(&HeldReservation { kind: ReservationType::ExclusiveAccess, holder: host(2) }));
    assert_eq!(table.key_of(&host(1)), None);
    let events = [(EventKind::Released, vec![3]), (EventKind::RegistrationPreempted, vec![1])];
    assert_eq!(told(&table, 0), events);
}

#[test]
fn preempting_others() {
    let preempt = |victim, kind| ReservationAction::Preempt { key: 20, victim, kind, abort: false };
    let mut table = held_by_first(ReservationType::WriteExclusive);
    table.apply(&host(2), &preempt(30, ReservationType::ExclusiveAccess)).expect("only a registration");
    assert_eq!(table.held(), Some(&HeldReservation { kind: ReservationType::WriteExclusive, holder: host(1) }));
    assert_eq!(
        table.apply(&host(2), &preempt(30, ReservationType::WriteExclusive)),
        Err(Refusal::Conflict),
        "nobody has the key"
    );
    assert_eq!(table.apply(&host(2), &preempt(0, ReservationType::WriteExclusive)), Err(Refusal::Invalid));
    assert_eq!(
        table.apply(&host(9), &preempt(10, ReservationType::WriteExclusive)),
        Err(Refusal::Conflict),
        "no registrant"
    );

    let mut table = held_by_first(ReservationType::WriteExclusiveAll);
    table.apply(&host(2), &preempt(10, ReservationType::ExclusiveAccess)).expect("one of the holders");
    assert_eq!(table.held().map(|held| held.kind), Some(ReservationType::WriteExclusiveAll));
    table.apply(&host(2), &preempt(0, ReservationType::ExclusiveAccess)).expect("all of them");
    assert_eq!(table.held(), Some(&HeldReservation { kind: ReservationType::ExclusiveAccess, holder: host(2) }));
    assert_eq!(table.registrants().len(), 1);

    let mut table = held_by_first(ReservationType::WriteExclusive);
    let own = ReservationAction::Preempt { key: 10, victim: 10, kind: ReservationType::ExclusiveAccess, abort: true };
    assert_eq!(table.apply(&host(1), &own), Ok(ReservationChange::default()), "one's own: the kind changes");
    assert_eq!(table.held(), Some(&HeldReservation { kind: ReservationType::ExclusiveAccess, holder: host(1) }));
}

#[test]
fn moving() {
    let give = |to, unregister| ReservationAction::Move { key: 10, new: 77, to: host(to), unregister, persist: None };
    let mut table = held_by_first(ReservationType::WriteExclusive);
    assert_eq!(table.apply(&host(1), &give(1, false)), Err(Refusal::Invalid), "to oneself");
    table.apply(&host(1), &give(4, true)).expect("moved");
    assert_eq!(table.held(), Some(&HeldReservation { kind: ReservationType::WriteExclusive, holder: host(4) }));
    assert_eq!((table.key_of(&host(4)), table.key_of(&host(1))), (Some(77), None));
    let mut table = held_by_first(ReservationType::WriteExclusiveAll);
    assert_eq!(table.apply(&host(1), &give(4, true)), Err(Refusal::Conflict), "all hold it");
}

#[test]
fn the_whole_volume() {
    let mut table = ReservationTable::new();
    table.apply(&host(1), &ReservationAction::HoldWhole).expect("free");
    table.apply(&host(1), &ReservationAction::HoldWhole).expect("one's own");
    assert_eq!(table.apply(&host(2), &ReservationAction::HoldWhole), Err(Refusal::Conflict));
    assert!(
        !table.allows(Some(&host(2)), ReservationAccess::Read)
            && table.allows(Some(&host(1)), ReservationAccess::Write)
    );
    let register = ReservationAction::Register { current: Some(0), new: 1, persist: None };
    assert_eq!(table.apply(&host(2), &register), Err(Refusal::Conflict));
    table.apply(&host(2), &ReservationAction::LetGoWhole).expect("of another: nothing");
    assert!(table.restricts());
    table.apply(&host(2), &ReservationAction::Reset).expect("a reset");
    table.apply(&host(2), &register).expect("registered");
    assert_eq!(table.apply(&host(1), &ReservationAction::HoldWhole), Err(Refusal::Conflict), "there are registrants");
}

#[test]
fn what_is_stored_is_pinned() {
    let mut table = held_by_first(ReservationType::ExclusiveAccess);
    assert_eq!(table.encode(), None, "nobody asked for it");
    table
        .apply(&host(1), &ReservationAction::Register { current: None, new: 0xab, persist: Some(true) })
        .expect("persistent");
    let text = "forebay-reservations 1\nregistrant 00000000000000ab 6801\nregistrant 0000000000000014 6802\n\
        registrant 000000000000001e 6803\nreservation 3 6801\nend\n";
    assert_eq!(table.encode().as_deref(), Some(text.as_bytes()));
    let back = ReservationTable::decode(text.as_bytes()).expect("decoded");
    assert_eq!((back.registrants(), back.held(), back.generation()), (table.registrants(), table.held(), 0));
    for cut in 0..text.len() - 1 {
        assert!(ReservationTable::decode(&text.as_bytes()[..cut]).is_err(), "cut at {cut}");
    }
    for (from, to, kind) in [
        ("reservations 1", "reservations 3", ErrorKind::Unsupported),
        ("reservations 1", "reservations 2", ErrorKind::Corrupt),
        ("ab 6801", "00 6801", ErrorKind::Corrupt),
        ("6802\n", "6801\n", ErrorKind::Corrupt),
        ("6802\n", "+802\n", ErrorKind::Corrupt),
        ("reservation 3", "reservation 2", ErrorKind::Corrupt),
        ("3 6801", "3 6809", ErrorKind::Corrupt),
        ("end\n", "end\nmore\n", ErrorKind::Corrupt),
    ] {
        let wrong = text.replacen(from, to, 1);
        assert_ne!(wrong, text);
        assert_eq!(ReservationTable::decode(wrong.as_bytes()).expect_err(to).kind(), kind, "{to}");
    }
}

#[test]
fn what_several_daemons_store_is_pinned() {
    let mut table = held_by_first(ReservationType::WriteExclusiveRegistrants);
    let preempt =
        ReservationAction::Preempt { key: 10, victim: 20, kind: ReservationType::WriteExclusive, abort: false };
    table.apply(&host(1), &preempt).expect("preempted");
    table.revision = 9;
    let stored = Stored { table, incarnation: 0xfeed };
    let text = "forebay-reservations 2\nincarnation 000000000000feed\ngeneration 4\npersist 0\ntold 1\nrevision 9\n\
        registrant 000000000000000a 6801\nregistrant 000000000000001e 6803\nreservation 5 6801\n\
        event 1 preempted 6802\nend\n";
    assert_eq!(String::from_utf8_lossy(&stored.encode()), text);
    assert_eq!(Stored::decode(text.as_bytes()).expect("decoded"), stored, "all of it comes back");
    assert_eq!(
        ReservationTable::decode(text.as_bytes()).expect("decoded"),
        ReservationTable::new(),
        "one daemon forgets what is not persistent"
    );
    for cut in 0..text.len() - 1 {
        assert!(Stored::decode(&text.as_bytes()[..cut]).is_err(), "cut at {cut}");
    }
    let earlier = Stored::decode(text.replacen("revision 9\n", "", 1).as_bytes()).expect("of an earlier version");
    assert_eq!((earlier.table.revision(), earlier.table.generation()), (0, 4));
    for (from, to) in [
        ("revision 9", "revision x"),
        ("feed", "0000"),
        ("generation", "persist"),
        ("told 1", "told 0"),
        ("told 1", "told +1"),
        ("event 1", "event 0"),
        ("preempted", "lost"),
        (" 6802\nend", "\nend"),
        ("end\n", "event 1 cleared 6801\nend\n"),
        ("end\n", "registrant 0000000000000001 6804\nend\n"),
    ] {
        let wrong = text.replacen(from, to, 1);
        assert_ne!(wrong, text);
        assert_eq!(Stored::decode(wrong.as_bytes()).expect_err(to).kind(), ErrorKind::Corrupt, "{from} {to}");
    }
}

#[test]
fn events_that_there_is_no_room_for_are_left_out_oldest_first() {
    let mut table = ReservationTable::new();
    let long = |number: u8| HostId::new(&[number; super::HOST_ID_LEN_MAX]).expect("a host");
    for _ in 0..40 {
        for number in 1..4 {
            table.apply(&long(number), &ReservationAction::Add { key: 1, persist: None }).expect("registered");
        }
        table.apply(&long(1), &ReservationAction::Clear { key: Some(1) }).expect("cleared");
    }
    let back = Stored::decode(&Stored { table: table.clone(), incarnation: 1 }.encode()).expect("decoded").table;
    let (all, kept): (Vec<_>, Vec<_>) = (table.events_after(0).collect(), back.events_after(0).collect());
    assert!((20..40).contains(&kept.len()), "{}", kept.len());
    assert_eq!(all[all.len() - kept.len()..], kept[..]);
    assert_eq!(back.last_event(), 40);
}

fn actions() -> impl Strategy<Value = ReservationAction> {
    let key = || 0_u64..4;
    let kind = || (0_usize..6).prop_map(|index| ReservationType::ALL[index]);
    let asked = || prop::option::of(0_u64..4);
    let persist = || prop::option::of(any::<bool>());
    prop_oneof![
        (asked(), key(), persist()).prop_map(|(current, new, persist)| ReservationAction::Register {
            current,
            new,
            persist
        }),
        (key(), persist()).prop_map(|(key, persist)| ReservationAction::Add { key, persist }),
        (asked(), key(), persist()).prop_map(|(current, new, persist)| ReservationAction::Replace {
            current,
            new,
            persist
        }),
        (asked(), persist()).prop_map(|(current, persist)| ReservationAction::Remove { current, persist }),
        (key(), key(), 0_u8..4, any::<bool>(), persist()).prop_map(|(key, new, to, unregister, persist)| {
            ReservationAction::Move { key, new, to: host(to), unregister, persist }
        }),
        (key(), kind()).prop_map(|(key, kind)| ReservationAction::Reserve { key, kind }),
        (asked(), kind()).prop_map(|(key, kind)| ReservationAction::Release { key, kind }),
        asked().prop_map(|key| ReservationAction::Clear { key }),
        (key(), key(), kind(), any::<bool>()).prop_map(|(key, victim, kind, abort)| ReservationAction::Preempt {
            key,
            victim,
            kind,
            abort
        }),
        Just(ReservationAction::HoldWhole),
        Just(ReservationAction::LetGoWhole),
        Just(ReservationAction::Reset),
    ]
}

proptest! {
    /// Any sequence of actions: a refusal changes nothing, keys are never 0, a host is registered once, the holder is
    /// registered, a host that acts on others is registered, and the stored form decodes to the same table.
    #[test]
    fn the_table_stays_sound(steps in prop::collection::vec((0_u8..4, actions()), 1..60)) {
        let mut table = ReservationTable::new();
        for (number, action) in steps {
            let before = table.clone();
            let result = table.apply(&host(number), &action);
            if result.is_err() {
                prop_assert_eq!(&table, &before);
            }
            let hosts: std::collections::BTreeSet<_> = table.registrants().iter().map(|one| &one.host).collect();
            prop_assert_eq!(hosts.len(), table.registrants().len());
            prop_assert!(table.registrants().iter().all(|one| one.key != 0));
            if let Some(held) = table.held() {
                prop_assert!(table.key_of(&held.holder).is_some());
                prop_assert!(table.allows(Some(&held.holder), ReservationAccess::Write) || table.whole().is_some());
            }
            let takes_away = matches!(action, ReservationAction::Preempt { .. } | ReservationAction::Clear { .. });
            if takes_away && result.is_ok() {
                prop_assert!(before.key_of(&host(number)).is_some());
            }
            if table.whole().is_none() {
                let stored = Stored { table: table.clone(), incarnation: 7 };
                prop_assert_eq!(Stored::decode(&stored.encode()).expect("what was encoded"), stored);
            }
            if let Some(stored) = table.encode() {
                let back = ReservationTable::decode(&stored).expect("what was encoded");
                prop_assert_eq!((back.registrants(), back.held()), (table.registrants(), table.held()));
            }
        }
    }

    #[test]
    fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = ReservationTable::decode(&bytes);
        let _ = ReservationTable::decode(&[&b"forebay-reservations 2\nincarnation 0000000000000001\n"[..], &bytes].concat());
    }
}

/// Storage in memory that fails on demand.
#[derive(Default)]
struct Memory {
    stored: RefCell<Vec<Option<Vec<u8>>>>,
    fails: RefCell<bool>,
}

impl Keep for Memory {
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        if *self.fails.borrow() {
            return Box::pin(ready(Err(Error::new(ErrorKind::Io, "the medium"))));
        }
        self.stored.borrow_mut().push(table);
        Box::pin(ready(Ok(())))
    }

    fn drain(&self) -> LocalFuture<()> {
        Box::pin(ready(()))
    }
}

#[test]
fn every_view_sees_a_change_that_was_answered() {
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        let memory = Rc::new(Memory::default());
        let reservations = Reservations::new(ReservationTable::new(), memory.clone());
        let mut view = reservations.view();
        let mut changes = reservations.changes();
        let register = |persist| ReservationAction::Register { current: None, new: 5, persist: Some(persist) };
        reservations.apply(&host(1), register(false)).await.expect("the medium").expect("registered");
        assert_eq!(view.table().key_of(&host(1)), Some(5));
        assert!(memory.stored.borrow().is_empty(), "nothing to keep yet");
        reservations.apply(&host(1), register(true)).await.expect("the medium").expect("registered");
        assert_eq!(memory.stored.borrow().len(), 1);
        assert!(changes.next().await);

        *memory.fails.borrow_mut() = true;
        let reserve = ReservationAction::Reserve { key: 5, kind: ReservationType::WriteExclusive };
        let failed = reservations.apply(&host(1), reserve.clone()).await;
        assert_eq!(failed.expect_err("the medium fails").kind(), ErrorKind::Io);
        assert!(view.allows(Some(&host(2)), ReservationAccess::Write), "nothing has changed");
        *memory.fails.borrow_mut() = false;
        reservations.apply(&host(1), reserve).await.expect("the medium").expect("reserved");
        assert!(!view.allows(Some(&host(2)), ReservationAccess::Write));

        let refused =
            reservations.apply(&host(2), ReservationAction::Clear { key: Some(1) }).await.expect("the medium");
        assert_eq!(refused, Err(Refusal::Conflict));
        reservations
            .apply(&host(1), ReservationAction::Clear { key: Some(5) })
            .await
            .expect("the medium")
            .expect("cleared");
        assert_eq!(memory.stored.borrow().last(), Some(&None), "nothing is left to keep");

        reservations.apply(&host(3), ReservationAction::HoldWhole).await.expect("the medium").expect("held");
        reservations.clear_all().await.expect("cleared");
        assert!(view.allows(None, ReservationAccess::Write));
    });
}

/// Table that a mirror is a copy of.
struct Elsewhere(Reservations);

impl ReservationAuthority for Elsewhere {
    fn apply(
        &self,
        host: HostId,
        action: ReservationAction,
    ) -> LocalFuture<Result<std::result::Result<ReservationChange, Refusal>>> {
        self.0.apply(&host, action)
    }
}

#[test]
fn a_mirror_forwards_actions_and_shows_what_is_published() {
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        let authority = Reservations::new(ReservationTable::new(), Rc::new(Memory::default()));
        let (copy, mirror) = Reservations::mirror(ReservationTable::new(), Rc::new(Elsewhere(authority.clone())));
        let (mut view, mut changes) = (copy.view(), copy.changes());
        let add = ReservationAction::Add { key: 1, persist: None };
        copy.apply(&host(1), add).await.expect("the medium").expect("registered");
        let table = ReservationTable::clone(authority.view().table());
        assert_eq!((table.revision(), table.key_of(&host(1))), (1, Some(1)));
        assert_eq!(view.table().registrants(), [], "it is not told yet");
        let sent = ReservationTable::decode_whole(&table.encode_whole()).expect("readable");
        assert_eq!(sent, table);
        mirror.publish(sent);
        mirror.fence().await;
        assert!(changes.next().await && **view.table() == table);
        let (held, reset) = (ReservationAction::HoldWhole, ReservationAction::Reset);
        assert_eq!(copy.apply(&host(1), held).await.expect("the medium"), Err(Refusal::Unsupported));
        copy.apply(&host(1), reset).await.expect("the medium").expect("nothing to do");
        assert_eq!(copy.clear_all().await.expect_err("not here").kind(), ErrorKind::Unsupported);
    });
}

/// Device that completes every request.
struct Yes(Reservations);

impl BlockDevice for Yes {
    fn geometry(&self) -> Geometry {
        Geometry { size: 1 << 20, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, _: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        Box::pin(ready(Ok(BlockReply::Done)))
    }

    fn map(&self, _: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(ready(Ok(ExtentMap::default())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.0.clone())
    }
}

#[test]
fn hosts_without_a_name_are_kept_out_by_any_reservation() {
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        let reservations = Reservations::new(ReservationTable::new(), Rc::new(Memory::default()));
        let device = Unnamed::new(Rc::new(Yes(reservations.clone())));
        let read = || device.submit(BlockRequest::Read(Extent::new(0, 1)));
        let write = || device.submit(BlockRequest::Discard(Extent::new(0, 1)));
        let denied = |result: Result<BlockReply>| result.err().map(|error| error.kind()) == Some(ErrorKind::Denied);
        assert!(!denied(read().await) && !denied(write().await));
        let ask = |action| reservations.apply(&host(1), action);
        ask(ReservationAction::Add { key: 1, persist: None }).await.expect("the medium").expect("registered");
        ask(ReservationAction::Reserve { key: 1, kind: ReservationType::WriteExclusive })
            .await
            .expect("the medium")
            .expect("reserved");
        assert!(!denied(read().await) && denied(write().await));
        ask(ReservationAction::Preempt { key: 1, victim: 1, kind: ReservationType::ExclusiveAccess, abort: false })
            .await
            .expect("the medium")
            .expect("changed");
        assert!(denied(read().await) && denied(write().await));
        assert!(!denied(device.submit(BlockRequest::Flush).await));
    });
}
