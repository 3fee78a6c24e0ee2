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
    Admit(prop::sample::Index),
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
        6 => (0..2_u8, 0..2_u64, volume, 0..3_u64)
            .prop_map(|(start, peer, volume, late)| Event::Open { start, peer, volume, late }),
        6 => index().prop_map(Event::Step),
        12 => index().prop_map(Event::Admit),
        8 => index().prop_map(Event::Executed),
        8 => index().prop_map(Event::Answered),
        1 => (0..4_u64).prop_map(Event::ForgetPeer),
        1 => (0..2_u8).prop_map(Event::EndStart),
        1 => index().prop_map(Event::Close),
    ]
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
    executing: Vec<(ForwardSessionKey, u8, usize)>,
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
                    facts.offered.entry(volume).or_insert(false);
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
                        }
                        OpenStep::Wait => prop_assert!(others),
                        OpenStep::Refuse(_) => {
                            facts.ended.insert(key);
                        }
                    }
                }
                Event::Admit(index) if !facts.asked.is_empty() => {
                    let (key, start, volume) = facts.asked[index.index(facts.asked.len())];
                    let open = facts.opened.contains(&key) && !facts.ended.contains(&key);
                    let admits = open && !facts.dead.contains(&start) && facts.offered.get(&volume) == Some(&false);
                    let admitted = sessions.admit(key, 1);
                    prop_assert_eq!(admitted.is_ok(), admits, "{:?}", admitted);
                    if admits {
                        facts.executing.push((key, start, volume));
                    }
                }
                Event::Executed(index) if !facts.executing.is_empty() => {
                    let at = index.index(facts.executing.len());
                    let (key, ..) = facts.executing.swap_remove(at);
                    sessions.executed(key);
                    facts.answering.push(key);
                }
                Event::Answered(index) if !facts.answering.is_empty() => {
                    let at = index.index(facts.answering.len());
                    sessions.answered(facts.answering.swap_remove(at), 1);
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
                prop_assert_eq!(sessions.is_executing(name), facts.executing.iter().any(|one| one.2 == volume));
            }
            for start in 0..2 {
                let executes = facts.executing.iter().any(|one| one.1 == start);
                prop_assert_eq!(sessions.is_executing_for(&start_id(start)), executes);
            }
        }
        // Nothing is left once all have ended and are answered.
        for (key, ..) in std::mem::take(&mut facts.executing) {
            sessions.executed(key);
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
    sessions.admit((1, 1), 5).expect("open");
    // Over another connection.
    sessions.begin_open((2, 2), VOLUMES[0], start_id(9)).expect("it may open");
    assert_eq!(sessions.admit((1, 1), 5), Err(AdmitRefused::Refusal(ForwardRefusal::NoSession)));
    assert_eq!(sessions.open_step((2, 2)), OpenStep::Wait);
    assert_eq!(sessions.admit((2, 2), 5), Err(AdmitRefused::Refusal(ForwardRefusal::NoSession)));
    sessions.executed((1, 1));
    assert_eq!(sessions.open_step((2, 2)), OpenStep::Open { term: 7 });
    sessions.answered((1, 1), 5);
    assert_eq!(sessions.len(), 1);
    // Other starts are not concerned.
    opened(&mut sessions, (3, 1), 8);
    assert_eq!(sessions.admit((2, 2), 5), Ok(()));
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
    assert_eq!(sessions.admit((1, 2), 0), Err(AdmitRefused::Refusal(ForwardRefusal::Moving)));
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
    assert_eq!(sessions.admit((1, 1), SESSION_BYTES_MAX + 1), Ok(()), "one request is always allowed");
    assert_eq!(sessions.admit((1, 1), 1), Err(AdmitRefused::TooMany));
    sessions.executed((1, 1));
    assert_eq!(sessions.admit((1, 1), 1), Err(AdmitRefused::TooMany), "its answer is not sent");
    sessions.answered((1, 1), SESSION_BYTES_MAX + 1);
    for _ in 0..SESSION_REQUESTS_MAX {
        assert_eq!(sessions.admit((1, 1), 1), Ok(()));
    }
    assert_eq!(sessions.admit((1, 1), 0), Err(AdmitRefused::TooMany));
    assert_eq!(sessions.end_peer(1), [(1, 1)]);
    assert_eq!(sessions.len(), 1, "it stays until its requests are answered");
}
