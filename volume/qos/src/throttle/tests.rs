use proptest::prelude::*;

use super::*;

fn at(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

fn cost(direction: RequestDirection, bytes: u64) -> RequestCost {
    RequestCost { direction, bytes }
}

fn read(bytes: u64) -> RequestCost {
    cost(RequestDirection::Read, bytes)
}

fn write(bytes: u64) -> RequestCost {
    cost(RequestDirection::Write, bytes)
}

fn released(throttle: &mut Throttle, now: Instant) -> Vec<u64> {
    let mut tickets = Vec::new();
    throttle.release(now, |ticket| tickets.push(ticket.0));
    tickets
}

fn no_tick(limits: QosLimits) -> QosLimits {
    QosLimits { tick: Duration::ZERO, ..limits }
}

#[test]
fn without_limits_nothing_waits() {
    let mut throttle = Throttle::new(QosLimits::default(), at(0));
    for _ in 0..1000 {
        assert_eq!(throttle.admit(write(1 << 40), at(0)), QosAdmission::Now);
    }
    assert_eq!(throttle.next_release(), None);
}

#[test]
fn waiting_requests_continue_together_once_a_tick() {
    let limits = QosLimits { iops: RateLimit::of(1000), ..QosLimits::default() };
    let mut throttle = Throttle::new(limits, at(0));
    for ticket in 0..100 {
        assert_eq!(throttle.admit(read(512), at(0)), QosAdmission::Wait(Ticket(ticket)));
    }
    assert_eq!(throttle.next_release(), Some(at(1)));
    assert_eq!(released(&mut throttle, at(1)), [0]);
    assert_eq!(throttle.next_release(), Some(at(51)));
    assert_eq!(released(&mut throttle, at(50)), [0; 0]);
    assert_eq!(released(&mut throttle, at(51)), (1..51).collect::<Vec<_>>());
    // A limit that is lifted lets all of them continue at once.
    throttle.set_limits(QosLimits::default(), at(52));
    assert_eq!(released(&mut throttle, at(52)).len(), 49);
    assert_eq!((throttle.waiting(), throttle.next_release()), (0, None));
}

#[test]
fn a_read_overtakes_writes_that_wait_for_the_limit_of_writes_only() {
    let limits = no_tick(QosLimits { write_iops: RateLimit::of(1), iops: RateLimit::of(1000), ..QosLimits::default() });
    let mut throttle = Throttle::new(limits, at(0));
    assert_eq!(throttle.admit(write(1), at(500)), QosAdmission::Wait(Ticket(0)));
    assert_eq!(throttle.admit(read(1), at(500)), QosAdmission::Now);
    // 500 tokens were ready for both, of which the read has taken one.
    for _ in 0..499 {
        assert_eq!(throttle.admit(read(1), at(500)), QosAdmission::Now);
    }
    // From here on the write is the first to get what both wait for.
    assert_eq!(throttle.admit(read(1), at(500)), QosAdmission::Wait(Ticket(1)));
    assert_eq!(released(&mut throttle, at(501)), [1]);
    assert_eq!(released(&mut throttle, at(1000)), [0]);
}

#[test]
fn a_withdrawn_request_takes_no_tokens() {
    let mut throttle = Throttle::new(no_tick(QosLimits { bps: RateLimit::of(1000), ..QosLimits::default() }), at(0));
    let QosAdmission::Wait(first) = throttle.admit(write(1000), at(0)) else { panic!("nothing is ready") };
    let QosAdmission::Wait(second) = throttle.admit(write(100), at(0)) else { panic!("it is behind the first") };
    assert_eq!(throttle.next_release(), Some(at(1000)));
    assert!(throttle.cancel(first) && !throttle.cancel(first));
    assert_eq!(throttle.next_release(), Some(at(100)));
    assert_eq!(released(&mut throttle, at(100)), [second.0]);
    assert!(!throttle.cancel(second));
    throttle.give_back(write(100));
    assert_eq!(throttle.admit(write(100), at(100)), QosAdmission::Now);
}

#[test]
fn released_requests_are_owed() {
    let mut throttle = Throttle::new(no_tick(QosLimits { iops: RateLimit::of(10), ..QosLimits::default() }), at(0));
    for _ in 0..20 {
        assert!(matches!(throttle.admit(read(1), at(0)), QosAdmission::Wait(_)));
    }
    let mut count = 0;
    throttle.release_all(at(0), |_| count += 1);
    assert_eq!(count, 20);
    assert!(matches!(throttle.admit(read(1), at(1000)), QosAdmission::Wait(_)));
    // The 20 are to be saved up first, and then the new one.
    assert_eq!(throttle.next_release(), Some(at(2100)));
}

/// The rules of a throttle as plainly as possible, in steps of a millisecond: six counters of whole tokens, one list.
struct Model {
    /// Rate and burst a millisecond, and the maximum of the reserve; ready tokens and reserve.
    buckets: [Option<([i64; 3], i64, i64)>; 6],
    waiting: Vec<(u64, RequestCost)>,
    next: u64,
}

impl Model {
    fn new(limits: &QosLimits) -> Self {
        let bucket = |(_, limit): (_, RateLimit)| {
            let burst = if limit.burst < limit.rate { limit.rate } else { limit.burst } as i64;
            let seconds = if limit.has_invalid_burst() { 1 } else { limit.burst_seconds as i64 };
            (limit.rate > 0).then(|| ([limit.rate as i64 / 1000, burst / 1000, burst * seconds], 0, burst * seconds))
        };
        Self { buckets: limits.named().map(bucket), waiting: Vec::new(), next: 0 }
    }

    fn tokens(bucket: usize, cost: RequestCost) -> Option<(bool, i64)> {
        let counts = match bucket {
            0 | 1 => true,
            2 | 4 => cost.direction == RequestDirection::Read,
            _ => cost.direction == RequestDirection::Write,
        };
        let is_bytes = [1, 4, 5].contains(&bucket);
        counts.then_some((bucket < 2, if is_bytes { cost.bytes as i64 } else { 1 }))
    }

    fn step(&mut self) {
        for ([rate, burst, most], ready, reserve) in self.buckets.iter_mut().flatten() {
            *reserve = (*reserve + *rate).min(*most);
            *ready = (*ready + *burst).min(*burst * 1000).min(*reserve);
        }
    }

    fn admits(&self, cost: RequestCost, totals_only: bool) -> bool {
        self.buckets.iter().enumerate().all(|(at, bucket)| match (bucket, Self::tokens(at, cost)) {
            (Some(([_, burst, _], ready, _)), Some((is_total, tokens))) => {
                (totals_only && !is_total) || *ready >= tokens.min(burst * 1000)
            }
            _ => true,
        })
    }

    /// Admits the first of the list that may go, if any may.
    fn admit_one(&mut self) -> Option<u64> {
        let mut seen: Vec<RequestCost> = Vec::new();
        for at in 0..self.waiting.len() {
            let (ticket, cost) = self.waiting[at];
            let in_order = seen.iter().all(|older| older.direction != cost.direction);
            let takes_from_none = seen.first().is_none_or(|oldest| self.admits(*oldest, true));
            if in_order && takes_from_none && self.admits(cost, false) {
                self.waiting.remove(at);
                for (at, bucket) in self.buckets.iter_mut().enumerate() {
                    if let (Some((_, ready, reserve)), Some((_, tokens))) = (bucket, Self::tokens(at, cost)) {
                        *ready -= tokens;
                        *reserve -= tokens;
                    }
                }
                return Some(ticket);
            }
            seen.push(cost);
        }
        None
    }
}

#[derive(Debug, Clone)]
enum Step {
    Submit(RequestCost),
    Wait(u64),
    Cancel(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![4 => 0_u64..5000, 1 => 5000_u64..60_000];
    let direction = prop_oneof![Just(RequestDirection::Read), Just(RequestDirection::Write)];
    prop_oneof![
        6 => (direction, bytes).prop_map(|(direction, bytes)| Step::Submit(cost(direction, bytes))),
        3 => (1_u64..40).prop_map(Step::Wait),
        1 => (0_u64..20).prop_map(Step::Cancel),
    ]
}

/// Limits whose rates are whole tokens a millisecond.
fn limits() -> impl Strategy<Value = QosLimits> {
    let one = |most: u64| {
        prop_oneof![
            2 => Just(RateLimit::default()),
            3 => (1..most, 0..3 * most, 1_u64..4).prop_map(|(rate, burst, burst_seconds)| RateLimit {
                rate: rate * 1000,
                burst: burst * 1000,
                burst_seconds,
            }),
        ]
    };
    (one(3), one(2000), one(3), one(3), one(2000), one(2000)).prop_map(
        |(iops, bps, read_iops, write_iops, read_bps, write_bps)| {
            no_tick(QosLimits { iops, bps, read_iops, write_iops, read_bps, write_bps, ..QosLimits::default() })
        },
    )
}

/// Releases what both admit at that time, which must be the same.
fn compare_release(
    throttle: &mut Throttle,
    model: &mut Model,
    time: u64,
    waiting: &mut Vec<(Ticket, u64)>,
) -> Result<(), TestCaseError> {
    let due = throttle.next_release();
    let mut admitted: Vec<u64> = std::iter::from_fn(|| model.admit_one()).collect();
    let mut done = Vec::new();
    throttle.release(at(time), |ticket| done.push(ticket));
    prop_assert!(done.is_empty() || due.is_some_and(|due| due <= at(time)), "due at {:?}", due);
    let number = |ticket: Ticket| {
        let place = waiting.iter().position(|(waits, _)| *waits == ticket).expect("it waits");
        waiting.remove(place).1
    };
    let mut done: Vec<u64> = done.into_iter().map(number).collect();
    admitted.sort_unstable();
    done.sort_unstable();
    prop_assert_eq!(admitted, done);
    let next = throttle.next_release();
    prop_assert_eq!(next.is_some(), !waiting.is_empty());
    prop_assert!(next.is_none_or(|next| next > at(time)), "it would spin");
    Ok(())
}

proptest! {
    /// Every request is admitted in the same millisecond as by the model: in order, never too early, never later than
    /// its tokens are there, and what is withdrawn takes none.
    #[test]
    fn requests_are_admitted_as_by_the_model(limits in limits(), steps in proptest::collection::vec(step(), 1..300)) {
        let (mut throttle, mut model) = (Throttle::new(limits.clone(), at(0)), Model::new(&limits));
        let mut time = 0;
        // Ticket of the throttle, and of the model, of each that waits.
        let mut waiting: Vec<(Ticket, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Submit(cost) => {
                    let number = model.next;
                    model.next += 1;
                    model.waiting.push((number, cost));
                    let admitted = std::iter::from_fn(|| model.admit_one()).collect::<Vec<_>>();
                    match throttle.admit(cost, at(time)) {
                        QosAdmission::Now => prop_assert_eq!(admitted, vec![number]),
                        QosAdmission::Wait(ticket) => {
                            prop_assert_eq!(admitted, Vec::<u64>::new());
                            waiting.push((ticket, number));
                        }
                    }
                }
                Step::Cancel(at) if !waiting.is_empty() => {
                    let (ticket, number) = waiting.remove(at as usize % waiting.len());
                    prop_assert!(throttle.cancel(ticket));
                    model.waiting.retain(|(other, _)| *other != number);
                    compare_release(&mut throttle, &mut model, time, &mut waiting)?;
                }
                Step::Cancel(_) => {}
                Step::Wait(millis) => {
                    for _ in 0..millis {
                        time += 1;
                        model.step();
                        compare_release(&mut throttle, &mut model, time, &mut waiting)?;
                    }
                }
            }
            prop_assert_eq!(throttle.waiting(), waiting.len());
        }
    }
}
