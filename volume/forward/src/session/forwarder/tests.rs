use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Event {
    Push {
        once_only: bool,
        cost: usize,
    },
    Owner(Option<u64>),
    /// The forwarder asks for a session, if it would.
    Ask,
    /// The owner ends former sessions and opens the one that was asked for.
    Opened {
        term: u64,
    },
    OpenFailed,
    Send,
    /// An owner executes a request that was sent in a session that it has not ended.
    Execute(prop::sample::Index),
    /// The answer to an executed one arrives.
    Answer(prop::sample::Index),
    Refuse(prop::sample::Index),
    Stopped(prop::sample::Index),
    /// The owner ends the session.
    Ended,
    Lost,
    Late(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => (any::<bool>(), 0..50_usize).prop_map(|(once_only, cost)| Event::Push { once_only, cost }),
        2 => prop::option::of(0..3_u64).prop_map(Event::Owner),
        6 => Just(Event::Ask),
        6 => (0..3_u64).prop_map(|term| Event::Opened { term }),
        1 => Just(Event::OpenFailed),
        12 => Just(Event::Send),
        8 => index().prop_map(Event::Execute),
        6 => index().prop_map(Event::Answer),
        2 => index().prop_map(Event::Refuse),
        1 => index().prop_map(Event::Stopped),
        1 => Just(Event::Ended),
        1 => Just(Event::Lost),
        3 => (0..40_u64).prop_map(Event::Late),
    ]
}

/// Request, as the test knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    number: u64,
    once_only: bool,
}

/// Attempt that an owner may still execute.
#[derive(Debug, Clone)]
struct Attempt {
    session: u64,
    id: u64,
    request: u64,
    executed: bool,
}

#[derive(Default)]
struct Model {
    attempts: Vec<Attempt>,
    /// Attempts in former sessions whose answers may still arrive.
    late: Vec<Attempt>,
    executions: BTreeMap<u64, u32>,
    once_only: BTreeSet<u64>,
    over: BTreeSet<u64>,
    pushed: u64,
    sent_last: Option<u64>,
    /// Newest session and the term of the newest one that was opened.
    session: u64,
    term: u64,
    time: u64,
}

impl Model {
    fn finish(&mut self, request: &Known) -> Result<(), TestCaseError> {
        prop_assert!(self.over.insert(request.number), "a request ended twice");
        Ok(())
    }

    fn timed_out(&mut self, over: Vec<Resolution<Known>>) -> Result<(), TestCaseError> {
        for one in over {
            let request = match one {
                Resolution::TimedOut(request) => {
                    prop_assert!(!self.attempts.iter().any(|attempt| attempt.request == request.number));
                    request
                }
                Resolution::OutcomeUnknown(request) => {
                    prop_assert!(request.once_only);
                    request
                }
            };
            self.finish(&request)?;
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn invariants_hold_with_any_owners(events in prop::collection::vec(event(), 1..150)) {
        let limits = ForwarderLimits {
            requests_max: 3,
            bytes_max: 100,
            patience: Duration::from_nanos(100),
            answer_grace: Duration::from_nanos(30),
            backoff_min: Duration::from_nanos(5),
            backoff_max: Duration::from_nanos(20),
        };
        let at = Instant::from_nanos;
        let mut state: ForwarderState<Known> = ForwarderState::new(limits, at(0));
        let mut model = Model::default();
        for event in events {
            let time = at(model.time);
            match event {
                Event::Push { once_only, cost } => {
                    if once_only {
                        model.once_only.insert(model.pushed);
                    }
                    state.push(Known { number: model.pushed, once_only }, cost, once_only, time);
                    model.pushed += 1;
                }
                Event::Owner(owner) => {
                    state.set_owner(owner, None, time);
                }
                Event::Ask if state.owner_to_ask(time).is_some() => {
                    model.session += 1;
                    state.begin_open(model.session);
                }
                Event::Opened { term } if state.session() == Some(model.session) && !state.is_open() => {
                        // What an owner guarantees: former attempts are executed by now, or never.
                        model.late.append(&mut model.attempts);
                        model.sent_last = None;
                        let higher = term >= model.term;
                        let opened = state.opened(model.session, term, time);
                        prop_assert_eq!(opened.is_some(), higher);
                        model.timed_out(opened.unwrap_or_default())?;
                        model.term = model.term.max(term);
                }
                Event::OpenFailed => state.open_failed(model.session, SessionFailure::Retry, time),
                Event::Send => {
                    if let Some(next) = state.next_to_send() {
                        let (session, id, request) = (next.session, next.id, next.request.number);
                        prop_assert_eq!(session, model.session);
                        prop_assert!(!model.attempts.iter().any(|attempt| attempt.request == request), "two attempts");
                        prop_assert!(!model.over.contains(&request));
                        let former = model.executions.get(&request).copied().unwrap_or(0);
                        prop_assert!(former == 0 || !model.once_only.contains(&request), "executed again");
                        prop_assert!(model.sent_last < Some(id), "out of order");
                        model.sent_last = Some(id);
                        model.attempts.push(Attempt { session, id, request, executed: false });
                        let (_, sent) = state.counts();
                        prop_assert!(sent <= 3);
                    }
                }
                Event::Execute(index) if !model.attempts.is_empty() => {
                    let at = index.index(model.attempts.len());
                    let attempt = &mut model.attempts[at];
                    if !attempt.executed {
                        attempt.executed = true;
                        *model.executions.entry(attempt.request).or_default() += 1;
                    }
                }
                Event::Answer(index) | Event::Stopped(index) | Event::Refuse(index)
                    if model.attempts.len() + model.late.len() > 0 =>
                {
                    let (at, now) = (index.index(model.attempts.len() + model.late.len()), model.attempts.len());
                    let attempt = model.attempts.get(at).or_else(|| model.late.get(at - now)).expect("one of both").clone();
                    let end = match event {
                        Event::Answer(_) => AttemptEnd::Answered,
                        Event::Stopped(_) => AttemptEnd::OwnerStopped,
                        _ => AttemptEnd::NotExecuted,
                    };
                    if attempt.executed == (end != AttemptEnd::NotExecuted) {
                        if at < now { model.attempts.swap_remove(at) } else { model.late.swap_remove(at - now) };
                        if let Some(request) = state.answered(attempt.session, attempt.id, end, time) {
                            prop_assert_eq!(request.number, attempt.request);
                            prop_assert!(end == AttemptEnd::Answered || request.once_only);
                            model.finish(&request)?;
                        } else if end == AttemptEnd::Answered {
                            prop_assert!(state.session() != Some(attempt.session), "a lost answer");
                        }
                        model.sent_last = None;
                    }
                }
                Event::Ended => {
                    // Seen before answers that came earlier.
                    state.end(model.session, time);
                    prop_assert!(state.next_to_send().is_none());
                }
                Event::Lost => {
                    // The connection fails all requests that have no answer; the owner may still execute them.
                    let attempts = model.attempts.iter().cloned().chain(std::mem::take(&mut model.late));
                    for attempt in attempts.collect::<Vec<_>>() {
                        let over = state.answered(attempt.session, attempt.id, AttemptEnd::Lost, time);
                        if let Some(request) = over {
                            prop_assert!(request.once_only && attempt.session != model.session);
                            model.finish(&request)?;
                        }
                    }
                    state.end(model.session, time);
                    prop_assert!(!state.is_open());
                    model.sent_last = None;
                }
                Event::Late(by) => {
                    model.time += by;
                    let expired = state.expired(at(model.time));
                    model.timed_out(expired)?;
                }
                _ => {}
            }
            let (waiting, sent) = state.counts();
            prop_assert_eq!((waiting + sent) as u64 + model.over.len() as u64, model.pushed, "a request is lost");
        }
        // With an owner that answers, everything comes to its end.
        model.time += 1000;
        state.set_owner(Some(77), None, at(model.time));
        {
            model.session += 1;
            prop_assert_eq!(state.owner_to_ask(at(model.time)), Some(77));
            state.begin_open(model.session);
            model.timed_out(state.opened(model.session, 9, at(model.time)).expect("opened"))?;
        }
        while let Some(next) = state.next_to_send() {
            let (session, id) = (next.session, next.id);
            let request = state.answered(session, id, AttemptEnd::Answered, at(model.time)).expect("over");
            model.finish(&request)?;
        }
        let expired = state.expired(at(model.time + 1000));
        model.timed_out(expired)?;
        prop_assert!(state.is_idle());
        prop_assert_eq!(model.over.len() as u64, model.pushed);
    }
}

fn open(state: &mut ForwarderState<u32>, session: u64) -> Vec<Resolution<u32>> {
    state.set_owner(Some(1), None, Instant::from_nanos(0));
    state.begin_open(session);
    state.opened(session, 1, Instant::from_nanos(0)).expect("it opens")
}

#[test]
fn what_is_in_doubt_does_not_time_out() {
    let (start, later) = (Instant::from_nanos(0), Instant::from_nanos(0) + Duration::from_secs(1000));
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    open(&mut state, 1);
    state.push(10, 0, false, start);
    state.push(11, 0, true, start);
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(10));
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(11));
    state.push(12, 0, false, start);
    assert_eq!(state.answered(1, 0, AttemptEnd::Lost, start), None);
    assert!(state.is_open() && state.next_to_send().is_none());
    assert_eq!(state.answered(1, 1, AttemptEnd::Lost, start), None);
    assert_eq!(state.expired(later), [Resolution::TimedOut(12)]);
    assert_eq!(state.deadline(), Some(start + ForwarderLimits::default().backoff_min));
    state.begin_open(2);
    assert_eq!(state.opened(2, 1, later), Some(vec![Resolution::OutcomeUnknown(11)]));
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(10));
}

#[test]
fn an_event_may_be_seen_before_the_answer() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    state.set_owner(Some(1), None, start);
    state.begin_open(1);
    state.end(1, start);
    state.push(10, 0, false, start);
    assert_eq!(state.opened(1, 1, start), Some(Vec::new()));
    assert!(!state.is_open() && state.next_to_send().is_none());
}

#[test]
fn former_owners_are_not_used() {
    let start = Instant::from_nanos(0);
    let mut state: ForwarderState<u32> = ForwarderState::new(ForwarderLimits::default(), start);
    state.set_owner(Some(1), Some(5), start);
    state.begin_open(1);
    assert_eq!(state.opened(1, 4, start), None);
    assert_eq!(state.session(), None);
    // Nor are those that the group names late.
    state.begin_open(2);
    assert_eq!(state.opened(2, 7, start), Some(Vec::new()));
    assert!(!state.set_owner(Some(2), Some(6), start) && state.is_open());
    assert!(state.set_owner(Some(2), Some(8), start) && !state.is_open());
}

#[test]
fn an_owner_that_executes_nothing_does_not_renew_patience() {
    let limits = ForwarderLimits { patience: Duration::from_nanos(10), ..ForwarderLimits::default() };
    let at = Instant::from_nanos;
    let mut state = ForwarderState::new(limits, at(0));
    open(&mut state, 1);
    state.push(10, 0, false, at(0));
    let id = state.next_to_send().map(|next| next.id).expect("sent");
    assert_eq!(state.answered(1, id, AttemptEnd::OwnerStopped, at(20)), None);
    assert_eq!(state.expired(at(20)), [Resolution::TimedOut(10)]);
}

#[test]
fn an_answer_of_a_former_owner_counts_until_the_request_is_sent_again() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    open(&mut state, 1);
    for request in 10..16 {
        state.push(request, 0, request >= 13, start);
        assert!(state.next_to_send().is_some());
    }
    state.set_owner(Some(2), None, start);
    assert_eq!(state.answered(1, 0, AttemptEnd::Answered, start), Some(10));
    state.begin_open(2);
    assert_eq!(state.opened(2, 1, start), Some(Vec::new()), "answers may still arrive");
    assert_eq!(state.answered(1, 3, AttemptEnd::Answered, start), Some(13));
    assert_eq!(state.answered(1, 4, AttemptEnd::NotExecuted, start), None);
    let next: Vec<u32> = std::iter::from_fn(|| state.next_to_send().map(|next| *next.request)).collect();
    assert_eq!(next, [11, 12, 14]);
    assert_eq!(state.answered(1, 1, AttemptEnd::Answered, start), None, "it was sent again");
    let later = start + ForwarderLimits::default().answer_grace;
    assert_eq!(state.deadline(), Some(later));
    assert_eq!(state.expired(later), [Resolution::OutcomeUnknown(15)]);
    assert_eq!(state.answered(1, 5, AttemptEnd::Answered, later), None);
}
