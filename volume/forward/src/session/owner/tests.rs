use std::collections::BTreeMap;

use forebay_block::Extent;
use proptest::prelude::*;

use super::*;

const VOLUMES: [&str; 2] = ["rbd/a", "rbd/b"];

#[derive(Debug, Clone)]
enum Event {
    Offer(usize),
    Suspend(usize),
    Resume(usize),
    Withdraw(usize),
    /// By a start, over one of its two connections.
    Open {
        start: u8,
        peer: u64,
        volume: usize,
        late: u64,
        has_lease: bool,
    },
    Step(prop::sample::Index),
    /// After some time, in which leases may run out.
    Admit {
        session: prop::sample::Index,
        footprint: RequestFootprint,
        after: u64,
    },
    /// A forwarder names one of the grants that were given to it, or none.
    Renew {
        peer: u64,
        back: usize,
        after: u64,
    },
    ChangeTable(usize),
    Adopted(prop::sample::Index, u64),
    EndUnadopted(usize, bool),
    Executed(prop::sample::Index),
    Answered(prop::sample::Index),
    ForgetPeer(u64),
    EndStart(u8),
    Close(prop::sample::Index),
}

fn event() -> impl Strategy<Value = Event> {
    let (volume, index) = (0..VOLUMES.len(), any::<prop::sample::Index>);
    prop_oneof![
        2 => volume.clone().prop_map(Event::Offer),
        1 => volume.clone().prop_map(Event::Suspend),
        2 => volume.clone().prop_map(Event::Resume),
        1 => volume.clone().prop_map(Event::Withdraw),
        6 => (0..2_u8, 0..2_u64, volume.clone(), 0..3_u64, any::<bool>())
            .prop_map(|(start, peer, volume, late, has_lease)| Event::Open { start, peer, volume, late, has_lease }),
        6 => index().prop_map(Event::Step),
        12 => (index(), footprint(), after()).prop_map(|(session, footprint, after)| {
            Event::Admit { session, footprint, after }
        }),
        3 => (0..4_u64, 0..3_usize, after()).prop_map(|(peer, back, after)| Event::Renew { peer, back, after }),
        3 => volume.clone().prop_map(Event::ChangeTable),
        4 => (index(), 0..4_u64).prop_map(|(index, back)| Event::Adopted(index, back)),
        2 => (volume.clone(), any::<bool>()).prop_map(|(volume, late)| Event::EndUnadopted(volume, late)),
        8 => index().prop_map(Event::Executed),
        8 => index().prop_map(Event::Answered),
        1 => (0..4_u64).prop_map(Event::ForgetPeer),
        1 => (0..2_u8).prop_map(Event::EndStart),
        1 => index().prop_map(Event::Close),
    ]
}

/// Lease of sessions in milliseconds.
const LEASE: u64 = 100;

fn after() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 2 => 0..LEASE, 1 => 0..2 * LEASE]
}

fn footprint() -> impl Strategy<Value = RequestFootprint> {
    let extent = || (0..3_u64, 1..3_u64).prop_map(|(offset, len)| Extent::new(offset, len));
    prop_oneof![
        1 => Just(RequestFootprint::Nothing),
        2 => extent().prop_map(RequestFootprint::Reads),
        5 => extent().prop_map(RequestFootprint::Changes),
        3 => Just(RequestFootprint::Reservations),
    ]
}

fn class_of(footprint: RequestFootprint) -> RequestClass {
    match footprint {
        RequestFootprint::Reservations => RequestClass::Reservation,
        _ => RequestClass::Repeatable,
    }
}

fn at(time: u64) -> Instant {
    Instant::from_nanos(time * 1_000_000)
}

/// Request that is being executed, with its session, start and volume, and the tables that may have admitted it.
#[derive(Debug, Clone, Copy)]
struct Executing {
    key: ForwardSessionKey,
    start: u8,
    volume: usize,
    table: u64,
    ticket: u64,
    footprint: RequestFootprint,
    term: u64,
}

impl Executing {
    fn is_access(&self) -> bool {
        class_of(self.footprint).is_access()
    }
}

/// Facts that the events establish, beside the state machine.
#[derive(Default)]
struct Facts {
    offered: BTreeMap<usize, bool>,
    /// All keys that were asked for, with start and volume, in order.
    asked: Vec<(ForwardSessionKey, u8, usize)>,
    opened: BTreeSet<ForwardSessionKey>,
    ended: BTreeSet<ForwardSessionKey>,
    dead: BTreeSet<u8>,
    executing: Vec<Executing>,
    /// Newest table of each volume, and of any.
    tables: [u64; 2],
    newest_table: u64,
    /// Newest table that each session was opened with or has adopted.
    adopted: BTreeMap<ForwardSessionKey, u64>,
    answering: Vec<ForwardSessionKey>,
    number: u64,
    time: u64,
    /// Sessions with a lease, and when it counts from at least.
    leases: BTreeMap<ForwardSessionKey, Option<u64>>,
    /// Grants of each connection, with their times, and the newest that was named.
    grants: Vec<(PeerNumber, u64, u64)>,
    granted: BTreeMap<PeerNumber, u64>,
    /// Term of each volume, and that in which each session was opened.
    terms: [u64; 2],
    opened_in: BTreeMap<ForwardSessionKey, u64>,
    /// Connections that each of the four has had; their numbers are not used again.
    connections: [u64; 4],
}

impl Facts {
    fn end(&mut self, which: impl Fn(&(ForwardSessionKey, u8, usize)) -> bool) {
        let ended: Vec<ForwardSessionKey> = self.asked.iter().filter(|one| which(one)).map(|(key, ..)| *key).collect();
        self.ended.extend(ended);
    }

    /// Ends the sessions whose lease has run out; returns those.
    fn lapse(&mut self) -> Vec<ForwardSessionKey> {
        let open = self.leases.iter().filter(|(key, _)| self.opened.contains(key) && !self.ended.contains(key));
        let lapsed = open.filter(|(key, from)| {
            let granted = self.granted.get(&key.0).copied().unwrap_or(0);
            from.is_some_and(|from| self.time >= from.max(granted) + LEASE)
        });
        let lapsed: Vec<_> = lapsed.map(|(key, _)| *key).collect();
        self.ended.extend(&lapsed);
        lapsed
    }
}

fn start_id(start: u8) -> ForwarderStart {
    [start; 16]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn invariants_hold_after_any_events(events in prop::collection::vec(event(), 1..120)) {
        let mut sessions = OwnerSessions::default();
        let mut facts = Facts::default();
        for event in events {
            match event {
                Event::Offer(volume) => {
                    let term = facts.terms[0].max(facts.terms[1]) + 1;
                    prop_assert_eq!(sessions.offer(VOLUMES[volume], term), !facts.offered.contains_key(&volume));
                    facts.offered.entry(volume).or_insert_with(|| {
                        facts.terms[volume] = term;
                        facts.newest_table += 1;
                        facts.tables[volume] = facts.newest_table;
                        false
                    });
                }
                Event::Suspend(volume) => {
                    sessions.suspend(VOLUMES[volume]);
                    facts.offered.entry(volume).and_modify(|suspended| *suspended = true);
                }
                Event::Resume(volume) => {
                    sessions.end_volume(VOLUMES[volume]);
                    sessions.resume(VOLUMES[volume]);
                    facts.end(|one| one.2 == volume);
                    facts.offered.entry(volume).and_modify(|suspended| *suspended = false);
                }
                Event::Withdraw(volume) => {
                    sessions.withdraw(VOLUMES[volume], Some("b".into()));
                    facts.offered.remove(&volume);
                    facts.end(|one| one.2 == volume);
                }
                Event::Open { start, peer, volume, late, has_lease } => {
                    facts.number += 1;
                    let peer = 2 * u64::from(start) + peer;
                    let key = (peer + 4 * facts.connections[peer as usize], facts.number.saturating_sub(late).max(1));
                    let lease = has_lease.then_some(Duration::from_millis(LEASE));
                    let begun = sessions.begin_open(key, VOLUMES[volume], start_id(start), lease);
                    let newest = facts.asked.iter().filter(|one| one.1 == start && one.2 == volume).map(|one| one.0.1).max();
                    if begun.is_ok() {
                        prop_assert!(newest < Some(key.1), "a number that is not the highest");
                        prop_assert!(!facts.dead.contains(&start) && facts.offered.get(&volume) == Some(&false));
                        facts.end(|one| one.1 == start && one.2 == volume);
                        facts.asked.push((key, start, volume));
                        facts.leases.extend(has_lease.then_some((key, None)));
                        prop_assert!(!facts.opened.contains(&key));
                        facts.ended.remove(&key);
                    }
                }
                Event::Step(index) if !facts.asked.is_empty() => {
                    let (key, start, volume) = facts.asked[index.index(facts.asked.len())];
                    if facts.opened.contains(&key) {
                        continue;
                    }
                    let others = facts.executing.iter().any(|one| (one.start, one.volume) == (start, volume));
                    match sessions.open_step(key, at(facts.time)) {
                        OpenStep::Open { .. } => {
                            prop_assert!(!others, "opened while a former session executes");
                            prop_assert!(!facts.ended.contains(&key) && !facts.dead.contains(&start));
                            prop_assert_eq!(facts.offered.get(&volume), Some(&false));
                            prop_assert!(facts.opened.insert(key), "opened twice");
                            facts.adopted.insert(key, facts.tables[volume]);
                            facts.leases.entry(key).and_modify(|from| *from = Some(facts.time));
                            facts.opened_in.insert(key, facts.terms[volume]);
                        }
                        OpenStep::Wait => prop_assert!(others),
                        OpenStep::Refuse(_) => {
                            facts.ended.insert(key);
                        }
                    }
                }
                Event::Renew { peer, back, after } => {
                    let peer = peer + 4 * facts.connections[peer as usize];
                    let named = facts.grants.iter().filter(|one| one.0 == peer).rev().nth(back).copied();
                    facts.time += after;
                    let next = facts.grants.len() as u64 + 1;
                    let lapsed = facts.lapse();
                    sessions.renew(peer, named.map_or(0, |one| one.1), next, at(facts.time));
                    prop_assert_eq!(sessions.take_lapsed(at(facts.time)), lapsed);
                    if sessions.peers.contains_key(&peer) {
                        facts.grants.push((peer, next, facts.time));
                        let granted = facts.granted.entry(peer).or_default();
                        *granted = named.map_or(0, |one| one.2).max(*granted);
                    }
                }
                Event::Admit { session, footprint, after } if !facts.asked.is_empty() => {
                    let (key, start, volume) = facts.asked[session.index(facts.asked.len())];
                    facts.time += after;
                    facts.lapse();
                    let open = facts.opened.contains(&key) && !facts.ended.contains(&key);
                    let admits = open && !facts.dead.contains(&start) && facts.offered.get(&volume) == Some(&false);
                    let admitted = sessions.admit(key, (class_of(footprint), footprint), 1, at(facts.time));
                    prop_assert_eq!(admitted.is_ok(), admits, "{:?}", admitted);
                    if admits {
                        // Admitted by the table that the forwarder has adopted, or by a later one.
                        let (table, term, ticket) = (facts.adopted[&key], facts.opened_in[&key], admitted.expect("admitted"));
                        prop_assert!(facts.executing.iter().all(|one| one.ticket < ticket));
                        facts.executing.push(Executing { key, start, volume, table, ticket, footprint, term });
                    }
                }
                Event::Executed(index) if !facts.executing.is_empty() => {
                    let one = facts.executing.swap_remove(index.index(facts.executing.len()));
                    sessions.executed(one.ticket);
                    facts.answering.push(one.key);
                }
                Event::Answered(index) if !facts.answering.is_empty() => {
                    let at = index.index(facts.answering.len());
                    sessions.answered(facts.answering.swap_remove(at), 1);
                }
                Event::ChangeTable(volume) => {
                    let number = sessions.change_table(VOLUMES[volume]);
                    prop_assert!(number > facts.newest_table);
                    facts.newest_table = number;
                    if facts.offered.contains_key(&volume) {
                        facts.tables[volume] = number;
                    }
                }
                Event::Adopted(index, back) if !facts.asked.is_empty() => {
                    // A forwarder tells this when what older tables have admitted has completed.
                    let (key, _, volume) = facts.asked[index.index(facts.asked.len())];
                    let number = facts.tables[volume].saturating_sub(back);
                    let older = |one: &Executing| one.key == key && one.is_access() && one.table < number;
                    if facts.opened.contains(&key) && !facts.ended.contains(&key) && !facts.executing.iter().any(older) {
                        sessions.adopted(key, number);
                        facts.adopted.entry(key).and_modify(|adopted| *adopted = number.max(*adopted));
                    }
                }
                Event::EndUnadopted(volume, late) => {
                    let number = facts.tables[volume];
                    let ended = sessions.end_unadopted(VOLUMES[volume], number, late);
                    let suspended = facts.offered.get(&volume) == Some(&true);
                    for key in ended {
                        prop_assert!((late || suspended) && facts.adopted[&key] < number && !facts.ended.contains(&key));
                        facts.ended.insert(key);
                    }
                    if late || suspended {
                        let accesses = |one: &Executing| one.volume == volume && one.is_access() && one.table < number;
                        let drained = !facts.executing.iter().any(accesses);
                        prop_assert_eq!(sessions.is_adopted(VOLUMES[volume], number), drained);
                    }
                }
                Event::ForgetPeer(peer) => {
                    let number = peer + 4 * facts.connections[peer as usize];
                    facts.connections[peer as usize] += 1;
                    sessions.forget_peer(number);
                    facts.end(|one| one.0.0 == number);
                }
                Event::EndStart(start) => {
                    sessions.end_start(start_id(start));
                    facts.dead.insert(start);
                    facts.end(|one| one.1 == start);
                }
                Event::Close(index) if !facts.asked.is_empty() => {
                    let (key, ..) = facts.asked[index.index(facts.asked.len())];
                    sessions.end_session(key);
                    facts.ended.insert(key);
                }
                _ => {}
            }
            sessions.take_lapsed(at(facts.time));
            facts.lapse();
            for one in &facts.executing {
                // F11
                let earlier = |other: &&Executing| {
                    let depends = one.footprint.depends_on(&other.footprint);
                    let left_over = other.ticket < one.ticket && facts.ended.contains(&other.key);
                    left_over && depends && (other.volume, other.term) == (one.volume, one.term)
                };
                let waits = facts.executing.iter().any(|other| earlier(&other));
                prop_assert_eq!(sessions.must_wait(one.ticket), waits, "{:?}", one);
            }
            for (volume, name) in VOLUMES.iter().enumerate() {
                let number = facts.tables[volume];
                if sessions.is_adopted(name, number) {
                    // R1: nothing that an older table has admitted is being executed, or will be in a session that is open.
                    let older = |one: &&Executing| one.volume == volume && one.is_access() && one.table < number;
                    prop_assert_eq!(facts.executing.iter().filter(older).count(), 0);
                    for key in sessions.open_sessions(name) {
                        prop_assert!(facts.adopted[&key] >= number);
                    }
                }
                prop_assert_eq!(sessions.is_executing(name), facts.executing.iter().any(|one| one.volume == volume));
            }
            for start in 0..2 {
                let executes = facts.executing.iter().any(|one| one.start == start);
                prop_assert_eq!(sessions.is_executing_for(&start_id(start)), executes);
            }
        }
        // Nothing is left once all have ended and are answered.
        for one in std::mem::take(&mut facts.executing) {
            sessions.executed(one.ticket);
            facts.answering.push(one.key);
        }
        facts.answering.into_iter().for_each(|key| sessions.answered(key, 1));
        (0..4 * 121).for_each(|peer| sessions.forget_peer(peer));
        prop_assert!(sessions.is_empty());
        prop_assert!(sessions.peers.is_empty() && sessions.admitted.is_empty() && sessions.left_over.is_empty());
    }
}

fn opened(sessions: &mut OwnerSessions, key: ForwardSessionKey, start: u8) {
    sessions.begin_open(key, VOLUMES[0], start_id(start), None).expect("it may open");
    assert_eq!(sessions.open_step(key, at(0)), OpenStep::Open { term: 7, lease: None });
}

fn admit(
    sessions: &mut OwnerSessions,
    key: ForwardSessionKey,
    class: RequestClass,
    cost: usize,
) -> Result<u64, AdmitRefused> {
    let footprint = match class {
        RequestClass::Reservation => RequestFootprint::Reservations,
        _ => RequestFootprint::Changes(Extent::new(0, 1)),
    };
    sessions.admit(key, (class, footprint), cost, at(0))
}

#[test]
fn a_session_opens_when_the_former_one_has_drained() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    opened(&mut sessions, (1, 1), 9);
    let ticket = admit(&mut sessions, (1, 1), RequestClass::Repeatable, 5).expect("open");
    // Over another connection.
    sessions.begin_open((2, 2), VOLUMES[0], start_id(9), None).expect("it may open");
    assert_eq!(
        admit(&mut sessions, (1, 1), RequestClass::Repeatable, 5),
        Err(AdmitRefused::Refusal(ForwardRefusal::NoSession))
    );
    assert_eq!(sessions.open_step((2, 2), at(0)), OpenStep::Wait);
    assert_eq!(
        admit(&mut sessions, (2, 2), RequestClass::Repeatable, 5),
        Err(AdmitRefused::Refusal(ForwardRefusal::NoSession))
    );
    sessions.executed(ticket);
    assert_eq!(sessions.open_step((2, 2), at(0)), OpenStep::Open { term: 7, lease: None });
    sessions.answered((1, 1), 5);
    assert_eq!(sessions.len(), 1);
    // Other starts are not concerned.
    opened(&mut sessions, (3, 1), 8);
    assert!(admit(&mut sessions, (2, 2), RequestClass::Repeatable, 5).is_ok());
}

#[test]
fn refusals_say_why() {
    let mut sessions = OwnerSessions::default();
    let open = |sessions: &mut OwnerSessions, key, start| sessions.begin_open(key, VOLUMES[0], start_id(start), None);
    assert_eq!(open(&mut sessions, (1, 1), 1), Err(ForwardRefusal::Unknown));
    sessions.offer(VOLUMES[0], 7);
    opened(&mut sessions, (1, 2), 1);
    assert_eq!(open(&mut sessions, (1, 2), 1), Err(ForwardRefusal::NoSession), "the same number again");
    assert_eq!(open(&mut sessions, (5, 1), 1), Err(ForwardRefusal::NoSession), "a late request");
    assert!(matches!(open(&mut sessions, (1, 3), 2), Err(ForwardRefusal::Other(_))), "another start");
    sessions.suspend(VOLUMES[0]);
    assert_eq!(open(&mut sessions, (1, 3), 1), Err(ForwardRefusal::Moving));
    assert_eq!(
        admit(&mut sessions, (1, 2), RequestClass::Repeatable, 0),
        Err(AdmitRefused::Refusal(ForwardRefusal::Moving))
    );
    assert_eq!(sessions.end_start(start_id(1)), [(1, 2)]);
    assert_eq!(open(&mut sessions, (1, 4), 1), Err(ForwardRefusal::StartEnded));
    sessions.withdraw(VOLUMES[0], Some("next".into()));
    assert_eq!(open(&mut sessions, (1, 4), 1), Err(ForwardRefusal::NotOwner { hint: "next".into() }));
    let next = ForwardRefusal::NotOwner { hint: "next".into() };
    assert_eq!(open(&mut sessions, (2, 4), 3), Err(next));
}

#[test]
fn a_session_is_bounded() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    opened(&mut sessions, (1, 1), 1);
    assert_eq!(
        admit(&mut sessions, (1, 1), RequestClass::Repeatable, SESSION_BYTES_MAX + 1),
        Ok(0),
        "one request is always allowed"
    );
    assert_eq!(admit(&mut sessions, (1, 1), RequestClass::Repeatable, 1), Err(AdmitRefused::TooMany));
    sessions.executed(0);
    assert_eq!(
        admit(&mut sessions, (1, 1), RequestClass::Repeatable, 1),
        Err(AdmitRefused::TooMany),
        "its answer is not sent"
    );
    sessions.answered((1, 1), SESSION_BYTES_MAX + 1);
    for _ in 0..SESSION_REQUESTS_MAX {
        assert!(admit(&mut sessions, (1, 1), RequestClass::Repeatable, 1).is_ok());
    }
    assert_eq!(admit(&mut sessions, (1, 1), RequestClass::Repeatable, 0), Err(AdmitRefused::TooMany));
    assert_eq!(sessions.end_peer(1), [(1, 1)]);
    assert_eq!(sessions.len(), 1, "it stays until its requests are answered");
}

#[test]
fn a_table_is_adopted_when_all_sessions_have_or_have_ended_and_drained() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    let first = sessions.table(VOLUMES[0]).expect("offered");
    (1..=3).for_each(|peer| opened(&mut sessions, (peer, 1), peer as u8));
    assert!(sessions.is_adopted(VOLUMES[0], first));
    let second = sessions.change_table(VOLUMES[0]);
    admit(&mut sessions, (1, 1), RequestClass::Reservation, 0).expect("open");
    let access = admit(&mut sessions, (2, 1), RequestClass::Repeatable, 0).expect("open");
    sessions.adopted((3, 1), second);
    sessions.adopted((1, 1), second + 9);
    assert!(!sessions.is_adopted(VOLUMES[0], second));
    assert_eq!(sessions.end_unadopted(VOLUMES[0], second, false), []);
    assert_eq!(sessions.end_unadopted(VOLUMES[0], second, true), [(2, 1)]);
    assert!(!sessions.is_adopted(VOLUMES[0], second), "it has not drained");
    sessions.executed(access);
    assert!(sessions.is_adopted(VOLUMES[0], second), "an action does not wait for itself");
    // No forwarder adopts what is not there yet.
    let third = sessions.change_table(VOLUMES[0]);
    assert!(!sessions.is_adopted(VOLUMES[0], third));
    sessions.suspend(VOLUMES[0]);
    assert_eq!(sessions.end_unadopted(VOLUMES[0], third, false), [(1, 1), (3, 1)]);
    assert!(sessions.is_adopted(VOLUMES[0], third) && sessions.is_executing(VOLUMES[0]));
}

#[test]
fn a_lease_counts_from_the_grant_that_was_named() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    let lease = Some(Duration::from_millis(100));
    sessions.begin_open((1, 1), VOLUMES[0], start_id(1), lease).expect("it may open");
    assert_eq!(sessions.open_step((1, 1), at(0)), OpenStep::Open { term: 7, lease });
    let kind = (RequestClass::Repeatable, RequestFootprint::Nothing);
    sessions.renew(1, 0, 11, at(50));
    sessions.renew(1, 99, 12, at(60));
    // No message renews a lease but by the grant that it names, however late it comes.
    assert_eq!(sessions.take_lapsed(at(99)), []);
    sessions.renew(1, 11, 13, at(99));
    assert!(sessions.admit((1, 1), kind, 0, at(149)).is_ok());
    let refused = Err(AdmitRefused::Refusal(ForwardRefusal::NoSession));
    assert_eq!(sessions.admit((1, 1), kind, 0, at(150)), refused);
    // One that has run out is not renewed.
    sessions.renew(1, 13, 14, at(151));
    assert_eq!(sessions.admit((1, 1), kind, 0, at(152)), refused);
    assert_eq!(sessions.take_lapsed(at(152)), [(1, 1)]);
    assert_eq!(sessions.next_lease_end(), None);
}

#[test]
fn what_a_session_has_left_over_is_executed_before_what_depends_on_it() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    (1..=2).for_each(|peer| opened(&mut sessions, (peer, 1), peer as u8));
    let change = |at, len| (RequestClass::Repeatable, RequestFootprint::Changes(Extent::new(at, len)));
    let read = |at, len| (RequestClass::Repeatable, RequestFootprint::Reads(Extent::new(at, len)));
    let first = sessions.admit((1, 1), change(8, 8), 0, at(0)).expect("open");
    let beside = sessions.admit((2, 1), change(8, 8), 0, at(0)).expect("open");
    let read_before = sessions.admit((1, 1), read(0, 4), 0, at(0)).expect("open");
    assert!(!sessions.must_wait(beside), "hosts have both in flight");
    sessions.end_session((1, 1));
    let [again, elsewhere, read_after, over_read] = [change(15, 1), change(16, 4), read(0, 9), change(0, 4)]
        .map(|kind| sessions.admit((2, 1), kind, 0, at(0)).expect("open"));
    assert!(sessions.must_wait(again) && sessions.must_wait(read_after));
    assert!(!sessions.must_wait(elsewhere) && !sessions.must_wait(over_read));
    sessions.executed(read_before);
    assert!(sessions.must_wait(again));
    sessions.executed(first);
    assert!(!sessions.must_wait(again) && !sessions.must_wait(read_after));
}
