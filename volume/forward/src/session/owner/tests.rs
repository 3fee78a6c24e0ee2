use std::collections::BTreeMap;

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
    },
    Step(prop::sample::Index),
    Admit(prop::sample::Index, RequestClass),
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
        6 => (0..2_u8, 0..2_u64, volume.clone(), 0..3_u64)
            .prop_map(|(start, peer, volume, late)| Event::Open { start, peer, volume, late }),
        6 => index().prop_map(Event::Step),
        12 => (index(), prop::sample::select(vec![RequestClass::Repeatable, RequestClass::Reservation]))
            .prop_map(|(index, class)| Event::Admit(index, class)),
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

/// Request that is being executed: its session, start and volume, and the tables that may have admitted it.
type Executing = (ForwardSessionKey, u8, usize, RequestClass, u64);

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
    /// Connections that each of the four has had; their numbers are not used again.
    connections: [u64; 4],
}

impl Facts {
    fn end(&mut self, which: impl Fn(&(ForwardSessionKey, u8, usize)) -> bool) {
        let ended: Vec<ForwardSessionKey> = self.asked.iter().filter(|one| which(one)).map(|(key, ..)| *key).collect();
        self.ended.extend(ended);
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
                    prop_assert_eq!(sessions.offer(VOLUMES[volume], 1), !facts.offered.contains_key(&volume));
                    facts.offered.entry(volume).or_insert_with(|| {
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
                Event::Open { start, peer, volume, late } => {
                    facts.number += 1;
                    let peer = 2 * u64::from(start) + peer;
                    let key = (peer + 4 * facts.connections[peer as usize], facts.number.saturating_sub(late).max(1));
                    let begun = sessions.begin_open(key, VOLUMES[volume], start_id(start));
                    let newest = facts.asked.iter().filter(|one| one.1 == start && one.2 == volume).map(|one| one.0.1).max();
                    if begun.is_ok() {
                        prop_assert!(newest < Some(key.1), "a number that is not the highest");
                        prop_assert!(!facts.dead.contains(&start) && facts.offered.get(&volume) == Some(&false));
                        facts.end(|one| one.1 == start && one.2 == volume);
                        facts.asked.push((key, start, volume));
                        prop_assert!(!facts.opened.contains(&key));
                        facts.ended.remove(&key);
                    }
                }
                Event::Step(index) if !facts.asked.is_empty() => {
                    let (key, start, volume) = facts.asked[index.index(facts.asked.len())];
                    if facts.opened.contains(&key) {
                        continue;
                    }
                    let others = facts.executing.iter().any(|one| (one.1, one.2) == (start, volume));
                    match sessions.open_step(key) {
                        OpenStep::Open { .. } => {
                            prop_assert!(!others, "opened while a former session executes");
                            prop_assert!(!facts.ended.contains(&key) && !facts.dead.contains(&start));
                            prop_assert_eq!(facts.offered.get(&volume), Some(&false));
                            prop_assert!(facts.opened.insert(key), "opened twice");
                            facts.adopted.insert(key, facts.tables[volume]);
                        }
                        OpenStep::Wait => prop_assert!(others),
                        OpenStep::Refuse(_) => {
                            facts.ended.insert(key);
                        }
                    }
                }
                Event::Admit(index, class) if !facts.asked.is_empty() => {
                    let (key, start, volume) = facts.asked[index.index(facts.asked.len())];
                    let open = facts.opened.contains(&key) && !facts.ended.contains(&key);
                    let admits = open && !facts.dead.contains(&start) && facts.offered.get(&volume) == Some(&false);
                    let admitted = sessions.admit(key, class, 1);
                    prop_assert_eq!(admitted.is_ok(), admits, "{:?}", admitted);
                    if admits {
                        // Admitted by the table that the forwarder has adopted, or by a later one.
                        facts.executing.push((key, start, volume, class, facts.adopted[&key]));
                    }
                }
                Event::Executed(index) if !facts.executing.is_empty() => {
                    let at = index.index(facts.executing.len());
                    let (key, _, _, class, _) = facts.executing.swap_remove(at);
                    sessions.executed(key, class);
                    facts.answering.push(key);
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
                    let older = |one: &Executing| one.0 == key && one.3.is_access() && one.4 < number;
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
                        let accesses = |one: &Executing| one.2 == volume && one.3.is_access() && one.4 < number;
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
            for (volume, name) in VOLUMES.iter().enumerate() {
                let number = facts.tables[volume];
                if sessions.is_adopted(name, number) {
                    // R1: nothing that an older table has admitted is being executed, or will be in a session that is open.
                    let older = |one: &&Executing| one.2 == volume && one.3.is_access() && one.4 < number;
                    prop_assert_eq!(facts.executing.iter().filter(older).count(), 0);
                    for key in sessions.open_sessions(name) {
                        prop_assert!(facts.adopted[&key] >= number);
                    }
                }
                prop_assert_eq!(sessions.is_executing(name), facts.executing.iter().any(|one| one.2 == volume));
            }
            for start in 0..2 {
                let executes = facts.executing.iter().any(|one| one.1 == start);
                prop_assert_eq!(sessions.is_executing_for(&start_id(start)), executes);
            }
        }
        // Nothing is left once all have ended and are answered.
        for (key, _, _, class, _) in std::mem::take(&mut facts.executing) {
            sessions.executed(key, class);
            facts.answering.push(key);
        }
        facts.answering.into_iter().for_each(|key| sessions.answered(key, 1));
        (0..4 * 121).for_each(|peer| sessions.forget_peer(peer));
        prop_assert!(sessions.is_empty());
        prop_assert!(sessions.peers.is_empty());
    }
}

fn opened(sessions: &mut OwnerSessions, key: ForwardSessionKey, start: u8) {
    sessions.begin_open(key, VOLUMES[0], start_id(start)).expect("it may open");
    assert_eq!(sessions.open_step(key), OpenStep::Open { term: 7 });
}

#[test]
fn a_session_opens_when_the_former_one_has_drained() {
    let mut sessions = OwnerSessions::default();
    sessions.offer(VOLUMES[0], 7);
    opened(&mut sessions, (1, 1), 9);
    sessions.admit((1, 1), RequestClass::Repeatable, 5).expect("open");
    // Over another connection.
    sessions.begin_open((2, 2), VOLUMES[0], start_id(9)).expect("it may open");
    assert_eq!(
        sessions.admit((1, 1), RequestClass::Repeatable, 5),
        Err(AdmitRefused::Refusal(ForwardRefusal::NoSession))
    );
    assert_eq!(sessions.open_step((2, 2)), OpenStep::Wait);
    assert_eq!(
        sessions.admit((2, 2), RequestClass::Repeatable, 5),
        Err(AdmitRefused::Refusal(ForwardRefusal::NoSession))
    );
    sessions.executed((1, 1), RequestClass::Repeatable);
    assert_eq!(sessions.open_step((2, 2)), OpenStep::Open { term: 7 });
    sessions.answered((1, 1), 5);
    assert_eq!(sessions.len(), 1);
    // Other starts are not concerned.
    opened(&mut sessions, (3, 1), 8);
    assert_eq!(sessions.admit((2, 2), RequestClass::Repeatable, 5), Ok(()));
}

#[test]
fn refusals_say_why() {
    let mut sessions = OwnerSessions::default();
    let open = |sessions: &mut OwnerSessions, key, start| sessions.begin_open(key, VOLUMES[0], start_id(start));
    assert_eq!(open(&mut sessions, (1, 1), 1), Err(ForwardRefusal::Unknown));
    sessions.offer(VOLUMES[0], 7);
    opened(&mut sessions, (1, 2), 1);
    assert_eq!(open(&mut sessions, (1, 2), 1), Err(ForwardRefusal::NoSession), "the same number again");
    assert_eq!(open(&mut sessions, (5, 1), 1), Err(ForwardRefusal::NoSession), "a late request");
    assert!(matches!(open(&mut sessions, (1, 3), 2), Err(ForwardRefusal::Other(_))), "another start");
    sessions.suspend(VOLUMES[0]);
    assert_eq!(open(&mut sessions, (1, 3), 1), Err(ForwardRefusal::Moving));
    assert_eq!(sessions.admit((1, 2), RequestClass::Repeatable, 0), Err(AdmitRefused::Refusal(ForwardRefusal::Moving)));
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
        sessions.admit((1, 1), RequestClass::Repeatable, SESSION_BYTES_MAX + 1),
        Ok(()),
        "one request is always allowed"
    );
    assert_eq!(sessions.admit((1, 1), RequestClass::Repeatable, 1), Err(AdmitRefused::TooMany));
    sessions.executed((1, 1), RequestClass::Repeatable);
    assert_eq!(
        sessions.admit((1, 1), RequestClass::Repeatable, 1),
        Err(AdmitRefused::TooMany),
        "its answer is not sent"
    );
    sessions.answered((1, 1), SESSION_BYTES_MAX + 1);
    for _ in 0..SESSION_REQUESTS_MAX {
        assert_eq!(sessions.admit((1, 1), RequestClass::Repeatable, 1), Ok(()));
    }
    assert_eq!(sessions.admit((1, 1), RequestClass::Repeatable, 0), Err(AdmitRefused::TooMany));
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
    sessions.admit((1, 1), RequestClass::Reservation, 0).expect("open");
    sessions.admit((2, 1), RequestClass::Repeatable, 0).expect("open");
    sessions.adopted((3, 1), second);
    sessions.adopted((1, 1), second + 9);
    assert!(!sessions.is_adopted(VOLUMES[0], second));
    assert_eq!(sessions.end_unadopted(VOLUMES[0], second, false), []);
    assert_eq!(sessions.end_unadopted(VOLUMES[0], second, true), [(2, 1)]);
    assert!(!sessions.is_adopted(VOLUMES[0], second), "it has not drained");
    sessions.executed((2, 1), RequestClass::Repeatable);
    assert!(sessions.is_adopted(VOLUMES[0], second), "an action does not wait for itself");
    // No forwarder adopts what is not there yet.
    let third = sessions.change_table(VOLUMES[0]);
    assert!(!sessions.is_adopted(VOLUMES[0], third));
    sessions.suspend(VOLUMES[0]);
    assert_eq!(sessions.end_unadopted(VOLUMES[0], third, false), [(1, 1), (3, 1)]);
    assert!(sessions.is_adopted(VOLUMES[0], third) && sessions.is_executing(VOLUMES[0]));
}
