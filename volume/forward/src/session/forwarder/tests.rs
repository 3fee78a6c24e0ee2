use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Event {
    Push {
        class: RequestClass,
        cost: usize,
    },
    /// Another table is adopted in the session, or without one.
    Adopt,
    Owner(Option<u64>),
    /// The forwarder asks for a session, if it would.
    Ask,
    /// The owner ends former sessions and opens the one that was asked for.
    Opened {
        term: u64,
        new_table: bool,
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
    /// The forwarder names a grant that it has just received, to an owner that has this session or a former one.
    Renewed(u64),
    GiveUp,
    /// The owner confirms that it has ended the session.
    Closed,
    Late(u64),
}

/// Lease of sessions in nanoseconds.
const LEASE: u64 = 64;

fn class() -> impl Strategy<Value = RequestClass> {
    prop::sample::select(vec![RequestClass::Repeatable, RequestClass::OnceOnly, RequestClass::Reservation])
}

fn event() -> impl Strategy<Value = Event> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        8 => (class(), 0..50_usize).prop_map(|(class, cost)| Event::Push { class, cost }),
        2 => Just(Event::Adopt),
        2 => prop::option::of(0..3_u64).prop_map(Event::Owner),
        6 => Just(Event::Ask),
        6 => (0..3_u64, prop::bool::weighted(0.3)).prop_map(|(term, new_table)| Event::Opened { term, new_table }),
        1 => Just(Event::OpenFailed),
        12 => Just(Event::Send),
        8 => index().prop_map(Event::Execute),
        6 => index().prop_map(Event::Answer),
        2 => index().prop_map(Event::Refuse),
        1 => index().prop_map(Event::Stopped),
        1 => Just(Event::Ended),
        1 => Just(Event::Lost),
        3 => (0..3_u64).prop_map(Event::Renewed),
        1 => prop::bool::weighted(0.3).prop_map(|gives_up| if gives_up { Event::GiveUp } else { Event::Send }),
        1 => Just(Event::Closed),
        3 => (0..40_u64).prop_map(Event::Late),
    ]
}

/// Request, as the test knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    number: u64,
    class: RequestClass,
    /// Table that has admitted it, at the latest.
    table: u64,
}

/// Attempt that an owner may still execute.
#[derive(Debug, Clone)]
struct Attempt {
    session: u64,
    id: u64,
    request: Known,
    executed: bool,
}

#[derive(Default)]
struct Model {
    attempts: Vec<Attempt>,
    /// Attempts in former sessions whose answers may still arrive.
    late: Vec<Attempt>,
    executions: BTreeMap<u64, u32>,
    over: BTreeSet<u64>,
    pushed: u64,
    sent_last: Option<u64>,
    /// Newest session and the term of the newest one that was opened.
    session: u64,
    term: u64,
    /// Newest table, and the one that the session was opened with.
    table: u64,
    opened_with: u64,
    time: u64,
    /// Times from which the leases of sessions count.
    leases: BTreeMap<u64, u64>,
    given_up: bool,
}

impl Model {
    fn finish(&mut self, request: &Known) -> Result<(), TestCaseError> {
        prop_assert!(self.over.insert(request.number), "a request ended twice");
        Ok(())
    }

    /// Takes the attempts that no owner begins to execute any more, in sessions that have ended or whose lease is over.
    fn lapse(&mut self, ended: Option<u64>) {
        let (leases, time) = (&self.leases, self.time);
        let is_over = |attempt: &mut Attempt| {
            let lapsed = leases.get(&attempt.session).is_none_or(|from| time >= from + LEASE);
            !attempt.executed && (lapsed || ended == Some(attempt.session))
        };
        self.late.extend(self.attempts.extract_if(.., is_over));
    }

    fn timed_out(&mut self, over: Vec<Resolution<Known>>) -> Result<(), TestCaseError> {
        for one in over {
            let request = match one {
                Resolution::TimedOut(request) => {
                    prop_assert!(!self.attempts.iter().any(|attempt| attempt.request == request));
                    request
                }
                Resolution::Outdated(request) => {
                    prop_assert!(request.class.is_access() && request.table < self.table);
                    prop_assert!(!self.attempts.iter().any(|attempt| attempt.request == request));
                    request
                }
                Resolution::GivenUp(request) => {
                    // F12: what has begun may be executed still.
                    let begins = |attempt: &Attempt| attempt.request == request && !attempt.executed;
                    prop_assert!(self.given_up && !self.attempts.iter().any(begins));
                    let executed = self.executions.contains_key(&request.number);
                    prop_assert!(!executed || !request.class.is_once_only());
                    request
                }
                Resolution::OutcomeUnknown(request) => {
                    prop_assert!(request.class.is_once_only());
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
            lease: Duration::from_nanos(64),
        };
        let at = Instant::from_nanos;
        let mut state: ForwarderState<Known> = ForwarderState::new(limits, at(0));
        let mut model = Model::default();
        for event in events {
            let time = at(model.time);
            model.lapse(None);
            match event {
                Event::Push { class, cost } if !model.given_up => {
                    let request = Known { number: model.pushed, class, table: model.table };
                    state.push(request, if class.is_access() { cost } else { 0 }, class, time);
                    model.pushed += 1;
                }
                Event::Adopt => {
                    model.table += 1;
                    state.adopt(model.table);
                }
                Event::Owner(owner) => {
                    state.set_owner(owner, None, time);
                }
                Event::Ask if state.owner_to_ask(time).is_some() => {
                    model.session += 1;
                    state.begin_open(model.session);
                }
                Event::Opened { term, new_table } if state.session() == Some(model.session) && !state.is_open() => {
                        // What an owner guarantees: former attempts are executed by now, or never.
                        model.late.append(&mut model.attempts);
                        model.sent_last = None;
                        let higher = term >= model.term;
                        prop_assert_eq!(state.is_awaited(model.session, term), higher);
                        model.table += u64::from(higher && new_table);
                        model.leases.insert(model.session, model.time);
                        state.leases_until(lease_is_over(time, limits.lease));
                        let opened = state.opened(model.session, term, model.table, time);
                        prop_assert_eq!(opened.is_some(), higher && !model.given_up);
                        if higher {
                            model.opened_with = model.table;
                        }
                        model.timed_out(opened.unwrap_or_default())?;
                        model.term = model.term.max(term);
                }
                Event::OpenFailed => state.open_failed(model.session, SessionFailure::Retry, time),
                Event::Send => {
                    if let Some(next) = state.next_to_send() {
                        let (session, id, request) = (next.session, next.id, next.request.clone());
                        prop_assert_eq!(session, model.session);
                        prop_assert!(!model.attempts.iter().any(|attempt| attempt.request == request), "two attempts");
                        prop_assert!(!model.over.contains(&request.number));
                        prop_assert!(!request.class.is_access() || request.table >= model.opened_with, "outdated");
                        let former = model.executions.get(&request.number).copied().unwrap_or(0);
                        prop_assert!(former == 0 || !request.class.is_once_only(), "executed again");
                        prop_assert!(model.sent_last < Some(id), "out of order");
                        model.sent_last = Some(id);
                        model.attempts.push(Attempt { session, id, request, executed: false });
                        let accesses = |attempt: &&Attempt| attempt.session == session && attempt.request.class.is_access();
                        prop_assert!(model.attempts.iter().filter(accesses).count() <= 3);
                    }
                }
                Event::Execute(index) if !model.attempts.is_empty() => {
                    let at = index.index(model.attempts.len());
                    let attempt = &mut model.attempts[at];
                    if !attempt.executed {
                        attempt.executed = true;
                        *model.executions.entry(attempt.request.number).or_default() += 1;
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
                            prop_assert_eq!(&request, &attempt.request);
                            prop_assert!(end == AttemptEnd::Answered || request.class.is_once_only());
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
                            prop_assert!(request.class.is_once_only() && attempt.session != model.session);
                            model.finish(&request)?;
                        }
                    }
                    state.end(model.session, time);
                    prop_assert!(!state.is_open());
                    model.sent_last = None;
                }
                Event::Renewed(back) => {
                    let session = model.session.saturating_sub(back);
                    if let Some(from) = model.leases.get_mut(&session).filter(|from| model.time < **from + LEASE) {
                        *from = model.time;
                        state.leases_until(lease_is_over(time, limits.lease));
                    }
                }
                Event::GiveUp => {
                    model.given_up = true;
                    state.give_up();
                    prop_assert!(state.next_to_send().is_none());
                }
                Event::Closed if model.given_up && state.is_open() => {
                    model.lapse(Some(model.session));
                    state.closed(model.session);
                    let over = state.expired(time);
                    model.timed_out(over)?;
                    prop_assert_eq!(state.counts().1, 0);
                }
                Event::Late(by) => {
                    model.time += by;
                    model.lapse(None);
                    let expired = state.expired(at(model.time));
                    model.timed_out(expired)?;
                    if model.given_up {
                        prop_assert!(state.deadline().is_none_or(|deadline| deadline > at(model.time)));
                    }
                }
                _ => {}
            }
            if state.has_drained(model.table) && !model.given_up {
                // R1: nothing that an older table has admitted may be executed.
                let older = |attempt: &&Attempt| attempt.request.class.is_access() && attempt.request.table < model.table;
                prop_assert_eq!(model.attempts.iter().filter(older).count(), 0);
            }
            let (waiting, sent) = state.counts();
            prop_assert_eq!((waiting + sent) as u64 + model.over.len() as u64, model.pushed, "a request is lost");
        }
        // With an owner that answers, or without leases, everything comes to its end.
        model.time += 1000;
        model.lapse(None);
        if model.given_up {
            let expired = state.expired(at(model.time));
            model.timed_out(expired)?;
            prop_assert!(state.is_idle() && state.owner_to_ask(at(model.time)).is_none());
            prop_assert_eq!(model.over.len() as u64, model.pushed);
            return Ok(());
        }
        state.set_owner(Some(77), None, at(model.time));
        {
            model.session += 1;
            prop_assert_eq!(state.owner_to_ask(at(model.time)), Some(77));
            state.begin_open(model.session);
            model.late.append(&mut model.attempts);
            model.timed_out(state.opened(model.session, 9, model.table, at(model.time)).expect("opened"))?;
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
    state.opened(session, 1, 0, Instant::from_nanos(0)).expect("it opens")
}

#[test]
fn what_is_in_doubt_does_not_time_out() {
    let (start, later) = (Instant::from_nanos(0), Instant::from_nanos(0) + Duration::from_secs(1000));
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    open(&mut state, 1);
    state.push(10, 0, RequestClass::Repeatable, start);
    state.push(11, 0, RequestClass::OnceOnly, start);
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(10));
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(11));
    state.push(12, 0, RequestClass::Repeatable, start);
    assert_eq!(state.answered(1, 0, AttemptEnd::Lost, start), None);
    assert!(state.is_open() && state.next_to_send().is_none());
    assert_eq!(state.answered(1, 1, AttemptEnd::Lost, start), None);
    assert_eq!(state.expired(later), [Resolution::TimedOut(12)]);
    assert_eq!(state.deadline(), Some(start + ForwarderLimits::default().backoff_min));
    state.begin_open(2);
    assert_eq!(state.opened(2, 1, 0, later), Some(vec![Resolution::OutcomeUnknown(11)]));
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(10));
}

#[test]
fn an_event_may_be_seen_before_the_answer() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    state.set_owner(Some(1), None, start);
    state.begin_open(1);
    state.end(1, start);
    state.push(10, 0, RequestClass::Repeatable, start);
    assert_eq!(state.opened(1, 1, 0, start), Some(Vec::new()));
    assert!(!state.is_open() && state.next_to_send().is_none());
}

#[test]
fn former_owners_are_not_used() {
    let start = Instant::from_nanos(0);
    let mut state: ForwarderState<u32> = ForwarderState::new(ForwarderLimits::default(), start);
    state.set_owner(Some(1), Some(5), start);
    state.begin_open(1);
    assert_eq!(state.opened(1, 4, 0, start), None);
    assert_eq!(state.session(), None);
    // Nor are those that the group names late.
    state.begin_open(2);
    assert_eq!(state.opened(2, 7, 0, start), Some(Vec::new()));
    assert!(!state.set_owner(Some(2), Some(6), start) && state.is_open());
    assert!(state.set_owner(Some(2), Some(8), start) && !state.is_open());
}

#[test]
fn an_owner_that_executes_nothing_does_not_renew_patience() {
    let limits = ForwarderLimits { patience: Duration::from_nanos(10), ..ForwarderLimits::default() };
    let at = Instant::from_nanos;
    let mut state = ForwarderState::new(limits, at(0));
    open(&mut state, 1);
    state.push(10, 0, RequestClass::Repeatable, at(0));
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
        let class = if request >= 13 { RequestClass::OnceOnly } else { RequestClass::Repeatable };
        state.push(request, 0, class, start);
        assert!(state.next_to_send().is_some());
    }
    state.set_owner(Some(2), None, start);
    assert_eq!(state.answered(1, 0, AttemptEnd::Answered, start), Some(10));
    state.begin_open(2);
    assert_eq!(state.opened(2, 1, 0, start), Some(Vec::new()), "answers may still arrive");
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

#[test]
fn what_an_older_table_has_admitted_is_not_sent_in_the_next_session() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    open(&mut state, 1);
    state.adopt(4);
    let classes = [RequestClass::Repeatable, RequestClass::Reservation, RequestClass::OnceOnly, RequestClass::OnceOnly];
    for (request, class) in (10..).zip(classes) {
        state.push(request, 0, class, start);
    }
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(10));
    assert_eq!(state.answered(1, 0, AttemptEnd::Lost, start), None);
    // Newer than the table that the owner announces while the session ends.
    state.adopt(5);
    state.push(20, 0, RequestClass::Repeatable, start);
    assert!(!state.has_drained(5) && state.has_drained(4));
    state.begin_open(2);
    let outdated = [10, 12, 13].map(Resolution::Outdated);
    assert_eq!(state.opened(2, 1, 5, start), Some(outdated.into()));
    assert!(state.has_drained(5));
    let next: Vec<u32> = std::iter::from_fn(|| state.next_to_send().map(|next| *next.request)).collect();
    assert_eq!(next, [11, 20], "actions are not subject to a table");
}

#[test]
fn a_compare_and_write_that_a_former_owner_refuses_late_is_not_sent_by_a_newer_table() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    open(&mut state, 1);
    state.push(10, 0, RequestClass::OnceOnly, start);
    assert!(state.next_to_send().is_some());
    state.set_owner(Some(2), None, start);
    state.begin_open(2);
    assert_eq!(state.opened(2, 1, 1, start), Some(Vec::new()), "its answer may still arrive");
    assert_eq!(state.answered(1, 0, AttemptEnd::NotExecuted, start), Some(10));
    assert!(state.is_idle());
}

#[test]
fn actions_do_not_use_up_what_may_be_in_flight() {
    let start = Instant::from_nanos(0);
    let limits = ForwarderLimits { requests_max: 1, ..ForwarderLimits::default() };
    let mut state = ForwarderState::new(limits, start);
    open(&mut state, 1);
    for (request, class) in [
        (10, RequestClass::Reservation),
        (11, RequestClass::Repeatable),
        (12, RequestClass::Reservation),
        (13, RequestClass::OnceOnly),
    ] {
        state.push(request, 0, class, start);
    }
    let next: Vec<u32> = std::iter::from_fn(|| state.next_to_send().map(|next| *next.request)).collect();
    assert_eq!(next, [10, 11, 12]);
    assert_eq!(state.answered(1, 0, AttemptEnd::Answered, start), Some(10));
    assert!(state.next_to_send().is_none());
    assert_eq!(state.answered(1, 1, AttemptEnd::Answered, start), Some(11));
    assert_eq!(state.next_to_send().map(|next| *next.request), Some(13));
}

#[test]
fn what_was_sent_ends_as_given_up_when_the_lease_is_over() {
    let (start, lease) = (Instant::from_nanos(0), Duration::from_secs(2));
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    state.leases_until(lease_is_over(start, lease));
    open(&mut state, 1);
    for (request, class) in [(10, RequestClass::Repeatable), (11, RequestClass::OnceOnly)] {
        state.push(request, 0, class, start);
        state.next_to_send().expect("open");
    }
    state.push(12, 0, RequestClass::OnceOnly, start);
    state.give_up();
    assert_eq!(state.expired(start), [Resolution::GivenUp(12)], "it was not sent");
    // Renewed meanwhile, for another volume.
    let renewed = start + Duration::from_secs(1);
    state.leases_until(lease_is_over(renewed, lease));
    let over = renewed + Duration::from_millis(2125);
    assert_eq!(state.deadline(), Some(over));
    assert_eq!(state.expired(lease_is_over(start, lease)), []);
    assert_eq!(state.expired(over), [Resolution::GivenUp(10), Resolution::OutcomeUnknown(11)]);
    assert!(state.is_idle() && state.deadline().is_none());
    // An answer that comes late counts no more, and no other session is opened.
    assert_eq!(state.answered(1, 0, AttemptEnd::Answered, over), None);
    assert_eq!(state.owner_to_ask(over + lease), None);
}

#[test]
fn what_was_sent_ends_as_given_up_when_the_owner_has_ended_the_session() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    state.leases_until(lease_is_over(start, Duration::from_secs(2)));
    open(&mut state, 1);
    state.push(10, 0, RequestClass::Repeatable, start);
    state.push(11, 0, RequestClass::Repeatable, start);
    assert!(state.next_to_send().is_some() && state.next_to_send().is_some());
    state.closed(1);
    assert_eq!(state.expired(start), [], "not given up");
    state.give_up();
    assert_eq!(state.answered(1, 0, AttemptEnd::Answered, start), Some(10));
    state.closed(1);
    assert_eq!(state.expired(start), [Resolution::GivenUp(11)]);
}

#[test]
fn a_volume_that_is_given_up_waits_for_no_answer_of_a_former_owner() {
    let start = Instant::from_nanos(0);
    let mut state = ForwarderState::new(ForwarderLimits::default(), start);
    state.leases_until(lease_is_over(start, Duration::from_secs(2)));
    open(&mut state, 1);
    state.push(10, 0, RequestClass::OnceOnly, start);
    state.next_to_send().expect("open");
    state.set_owner(Some(2), Some(2), start);
    state.begin_open(2);
    assert_eq!(state.opened(2, 2, 0, start), Some(Vec::new()), "its answer may still arrive");
    state.give_up();
    assert_eq!(state.expired(start), [Resolution::OutcomeUnknown(10)]);
    assert_eq!(state.deadline(), None);
}
