//! Property test: two sessions over a connection that is cut repeatedly, against the expected delivery.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    /// Queues a message of this priority on one side (0 or 1).
    Push(usize, u16),
    /// Sends one message of one side, if it has any.
    Send(usize),
    /// Receives one message on one side, if any is in flight to it.
    Receive(usize),
    /// Acknowledges what one side has received.
    Ack(usize),
    /// Cuts the connection: messages in flight are lost; then both sides resume.
    Cut,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..2, prop_oneof![4 => Just(127u16), 1 => Just(63), 1 => Just(196)]).prop_map(|(side, p)| Step::Push(side, p)),
        5 => (0usize..2).prop_map(Step::Send),
        5 => (0usize..2).prop_map(Step::Receive),
        2 => (0usize..2).prop_map(Step::Ack),
        1 => Just(Step::Cut),
    ]
}

/// Message: its priority, and its sequence number within the priority.
type Token = (u16, u64);

#[derive(Debug)]
struct Side {
    session: MessengerSession<Token>,
    pushed: BTreeMap<u16, u64>,
    settled: Vec<Token>,
    delivered: Vec<Token>,
    /// In flight to this side: messages with their numbers and acks, or acks alone.
    arriving: VecDeque<(Option<(u64, Token)>, u64)>,
}

fn side() -> Side {
    let session = MessengerSession::new(false, Resume { client_cookie: 7, server_cookie: 8, ..Resume::default() });
    Side { session, pushed: BTreeMap::new(), settled: vec![], delivered: vec![], arriving: VecDeque::new() }
}

fn apply(sides: &mut [Side; 2], step: &Step) {
    match *step {
        Step::Push(at, priority) => {
            let count = sides[at].pushed.entry(priority).or_default();
            *count += 1;
            let token = (priority, *count);
            sides[at].session.push(priority, token);
        }
        Step::Send(at) => {
            if let Some(sent) = sides[at].session.pop() {
                let ack = sides[at].session.tell();
                sides[1 - at].arriving.push_back((Some(sent), ack));
            }
        }
        Step::Ack(at) => {
            if sides[at].session.owes_ack() {
                let ack = sides[at].session.tell();
                sides[1 - at].arriving.push_back((None, ack));
            }
        }
        Step::Receive(at) => {
            let side = &mut sides[at];
            let Some((message, ack)) = side.arriving.pop_front() else { return };
            side.session.acknowledged(ack, |token| side.settled.push(token)).expect("it was sent");
            if let Some((seq, token)) = message
                && side.session.received(seq).expect("none is left out") == ReceiveVerdict::Deliver
            {
                side.delivered.push(token);
            }
        }
        Step::Cut => {
            let received = [0, 1].map(|at: usize| sides[at].session.resume().in_seq);
            for at in 0..2 {
                let side = &mut sides[at];
                side.arriving.clear();
                side.session.lost();
                side.session.resumed(received[1 - at], |token| side.settled.push(token)).expect("it was sent");
            }
        }
    }
}

/// Returns true if each priority's messages were delivered exactly once and in order.
fn in_order(tokens: &[Token]) -> bool {
    let mut last = BTreeMap::new();
    tokens.iter().all(|&(priority, number)| {
        let before = last.insert(priority, number).unwrap_or(0);
        number == before + 1
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn messages_come_once_and_in_order_over_cuts(steps in prop::collection::vec(step(), 0..300)) {
        let mut sides = [side(), side()];
        for step in &steps {
            apply(&mut sides, step);
            for at in 0..2 {
                prop_assert!(in_order(&sides[at].delivered), "{:?}", sides[at].delivered);
                prop_assert!(sides[at].settled.len() <= sides[1 - at].delivered.len());
            }
        }
        // With the network sound again everything arrives and is acknowledged.
        for step in [Step::Cut, Step::Send(0), Step::Send(1), Step::Receive(0), Step::Receive(1)].iter().chain(
            std::iter::repeat_n(&[Step::Send(0), Step::Send(1), Step::Receive(0), Step::Receive(1)], 320).flatten(),
        ) {
            apply(&mut sides, step);
        }
        for step in [Step::Ack(0), Step::Ack(1), Step::Receive(0), Step::Receive(1)] {
            apply(&mut sides, &step);
        }
        for at in 0..2 {
            let pushed: u64 = sides[at].pushed.values().sum();
            prop_assert_eq!(sides[1 - at].delivered.len() as u64, pushed);
            prop_assert_eq!(sides[at].settled.len() as u64, pushed);
            prop_assert_eq!((sides[at].session.queued(), sides[at].session.unacknowledged()), (0, 0));
        }
    }
}

#[test]
fn the_highest_priority_goes_first() {
    let mut session = MessengerSession::new(false, Resume::default());
    for (at, priority) in [5, 1, 9, 5, 9, 1].into_iter().enumerate() {
        session.push(priority, at);
    }
    let order: Vec<usize> = std::iter::from_fn(|| session.pop()).map(|(_, message)| message).collect();
    assert_eq!(order, [2, 4, 0, 3, 1, 5]);
}

#[test]
fn acknowledging_what_was_never_sent_is_a_violation() {
    let mut session = MessengerSession::new(false, Resume::default());
    session.push(1, 'a');
    assert_eq!(session.acknowledged(1, |_| ()), Err(SessionViolation::Sequence { got: 1, expected: 0 }));
    session.pop();
    assert_eq!(session.acknowledged(1, |_| ()), Ok(()));
    assert_eq!(session.acknowledged(0, |_| ()), Ok(()), "an old one is none");
    assert!(session.resumed(2, |_| ()).is_err());
    assert!(session.resumed(0, |_| ()).is_err(), "it was acknowledged before");
}

#[test]
fn a_gap_is_a_violation_and_a_repetition_is_not() {
    let mut session: MessengerSession<()> = MessengerSession::new(false, Resume::default());
    assert_eq!(session.received(2), Err(SessionViolation::Sequence { got: 2, expected: 1 }));
    assert_eq!(session.received(1), Ok(ReceiveVerdict::Deliver));
    assert_eq!(session.received(1), Ok(ReceiveVerdict::Duplicate));
    let mut lossy: MessengerSession<()> = MessengerSession::new(true, Resume::default());
    assert_eq!(lossy.received(5), Ok(ReceiveVerdict::Deliver));
}

#[test]
fn a_lossy_session_keeps_nothing() {
    let mut session = MessengerSession::new(true, Resume::default());
    session.push(1, 'a');
    assert_eq!(session.pop(), Some((1, 'a')));
    assert_eq!((session.unacknowledged(), session.owes_ack()), (0, false));
}

#[test]
fn the_highest_number_is_received() {
    let mut session = MessengerSession::<Token>::new(true, Resume::default());
    for _ in 0..2 {
        assert_eq!(session.received(u64::MAX), Ok(ReceiveVerdict::Deliver));
    }
    assert_eq!(session.received(1), Ok(ReceiveVerdict::Duplicate));
}

#[test]
fn a_full_reset_gives_everything_back_in_order() {
    let mut session =
        MessengerSession::new(false, Resume { client_cookie: 1, server_cookie: 2, global_seq: 3, ..Resume::default() });
    (0..6).for_each(|at| session.push(1, at));
    assert_eq!((0..3).filter_map(|_| session.pop()).count(), 3);
    session.acknowledged(1, |_| ()).expect("it was sent");
    assert_eq!(session.reset(true), [1, 2, 3, 4, 5]);
    assert_eq!((session.queued(), session.pop()), (0, None));
    assert_eq!(session.resume(), Resume { client_cookie: 1, global_seq: 3, ..Resume::default() });
}

#[test]
fn half_a_reset_sends_everything_under_new_numbers() {
    let mut session = MessengerSession::new(false, Resume::default());
    (0..4).for_each(|at| session.push(1, at));
    assert_eq!((0..3).filter_map(|_| session.pop()).count(), 3);
    session.acknowledged(1, |_| ()).expect("it was sent");
    assert_eq!(session.reset(false), []);
    let again: Vec<_> = std::iter::from_fn(|| session.pop()).collect();
    assert_eq!(again, [(1, 1), (2, 2), (3, 3)]);
}
