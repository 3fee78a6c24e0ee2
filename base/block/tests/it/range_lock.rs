//! The range lock against a plain model: what is granted, what waits, and that no wake-up is lost, whatever is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use forebay_block::{ExclusiveRange, Extent, RangeLock, SharedRange};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    TryShared(Extent),
    TryExclusive(Extent),
    Shared(Extent),
    Exclusive(Extent),
    /// Drops a guard.
    Release(usize),
    /// Drops a waiting future.
    Cancel(usize),
    /// Polls the tasks that were woken, in this rotation.
    Run(usize),
}

enum Guard {
    Shared { _guard: SharedRange },
    Exclusive { _guard: ExclusiveRange },
}

/// State of a request in the model.
#[derive(Debug, Clone)]
enum Expected {
    SharedWaits(Extent),
    SharedLocked(Extent),
    /// Waits for exclusive locks that overlap.
    ExclusiveWaits(Extent),
    /// Blocks shared locks, and waits for those taken before.
    ExclusiveDrains(Extent, BTreeSet<u64>),
    ExclusiveLocked(Extent),
}

#[derive(Default)]
struct Model(BTreeMap<u64, Expected>);

impl Model {
    fn is_locked(&self, extent: Extent) -> bool {
        self.0.values().any(|expected| match expected {
            Expected::ExclusiveDrains(other, _) | Expected::ExclusiveLocked(other) => other.overlaps(extent),
            _ => false,
        })
    }

    fn shared(&self) -> BTreeSet<u64> {
        let shared = self.0.iter().filter(|(_, expected)| matches!(expected, Expected::SharedLocked(_)));
        shared.map(|(&id, _)| id).collect()
    }

    /// Advances a request as far as it goes; returns whether anything changed.
    fn advance(&mut self, id: u64) -> bool {
        let next = match &self.0[&id] {
            Expected::SharedWaits(extent) if !self.is_locked(*extent) => Expected::SharedLocked(*extent),
            Expected::ExclusiveWaits(extent) if !self.is_locked(*extent) => {
                Expected::ExclusiveDrains(*extent, self.shared())
            }
            Expected::ExclusiveDrains(extent, before) if before.is_disjoint(&self.shared()) => {
                Expected::ExclusiveLocked(*extent)
            }
            _ => return false,
        };
        self.0.insert(id, next);
        self.advance(id);
        true
    }

    fn is_granted(&self, id: u64) -> bool {
        matches!(self.0[&id], Expected::SharedLocked(_) | Expected::ExclusiveLocked(_))
    }

    fn check(&self) {
        for (id, expected) in &self.0 {
            let Expected::ExclusiveLocked(extent) = expected else { continue };
            for (other, state) in self.0.iter().filter(|(other, _)| *other != id) {
                let locked = match state {
                    Expected::SharedLocked(other) | Expected::ExclusiveLocked(other) => *other,
                    _ => continue,
                };
                assert!(!locked.overlaps(*extent), "{id} and {other}: {self:?}", self = self.0);
            }
        }
    }
}

#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Waiting {
    future: Pin<Box<dyn Future<Output = Guard>>>,
    woken: Arc<Flag>,
}

#[derive(Default)]
struct Run {
    ranges: RangeLock,
    model: Model,
    next: u64,
    guards: BTreeMap<u64, Guard>,
    waiting: BTreeMap<u64, Waiting>,
}

impl Run {
    fn begin(&mut self, expected: Expected, future: impl Future<Output = Guard> + 'static) {
        let id = self.next;
        self.next += 1;
        self.model.0.insert(id, expected);
        self.waiting.insert(id, Waiting { future: Box::pin(future), woken: Arc::default() });
        self.poll(id);
    }

    fn granted(&mut self, expected: Expected, guard: Guard) {
        self.model.0.insert(self.next, expected);
        self.guards.insert(self.next, guard);
        self.next += 1;
    }

    fn poll(&mut self, id: u64) {
        self.model.advance(id);
        let waiting = self.waiting.get_mut(&id).expect("it waits");
        waiting.woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(waiting.woken.clone());
        let answer = waiting.future.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(answer.is_ready(), self.model.is_granted(id), "{id}: {:?}", self.model.0);
        if let Poll::Ready(guard) = answer {
            self.waiting.remove(&id);
            self.guards.insert(id, guard);
        }
    }

    /// Polls woken tasks until none is; whatever still waits then must wait in the model too.
    fn run(&mut self, rotation: usize) {
        loop {
            let woken = self.waiting.iter().filter(|(_, waiting)| waiting.woken.0.load(Ordering::SeqCst));
            let mut woken: Vec<u64> = woken.map(|(&id, _)| id).collect();
            if woken.is_empty() {
                break;
            }
            let by = rotation % woken.len();
            woken.rotate_left(by);
            woken.into_iter().for_each(|id| self.poll(id));
        }
        for &id in self.waiting.keys() {
            let mut model = Model(self.model.0.clone());
            assert!(!model.advance(id), "{id} was not woken: {:?}", self.model.0);
        }
    }

    fn step(&mut self, step: &Step) {
        let ranges = self.ranges.clone();
        match *step {
            Step::TryShared(extent) => {
                let guard = ranges.try_shared(extent);
                assert_eq!(guard.is_none(), self.model.is_locked(extent));
                assert_eq!(ranges.is_locked(extent), self.model.is_locked(extent));
                if let Some(guard) = guard {
                    self.granted(Expected::SharedLocked(extent), Guard::Shared { _guard: guard });
                }
            }
            Step::TryExclusive(extent) => {
                let guard = ranges.try_exclusive(extent);
                let free = !self.model.is_locked(extent) && self.model.shared().is_empty();
                assert_eq!(guard.is_some(), free);
                if let Some(guard) = guard {
                    self.granted(Expected::ExclusiveLocked(extent), Guard::Exclusive { _guard: guard });
                }
            }
            Step::Shared(extent) => self.begin(Expected::SharedWaits(extent), async move {
                Guard::Shared { _guard: ranges.shared(extent).await }
            }),
            Step::Exclusive(extent) => self.begin(Expected::ExclusiveWaits(extent), async move {
                Guard::Exclusive { _guard: ranges.exclusive(extent).await }
            }),
            Step::Release(at) => {
                if let Some(&id) = nth(&self.guards, at) {
                    self.model.0.remove(&id);
                    self.guards.remove(&id);
                }
            }
            Step::Cancel(at) => {
                if let Some(&id) = nth(&self.waiting, at) {
                    self.model.0.remove(&id);
                    self.waiting.remove(&id);
                }
            }
            Step::Run(rotation) => self.run(rotation),
        }
        self.model.check();
    }
}

fn nth<T>(map: &BTreeMap<u64, T>, at: usize) -> Option<&u64> {
    map.keys().nth(at % map.len().max(1))
}

fn step() -> impl Strategy<Value = Step> {
    let extent = || (0..24u64, 1..9u64).prop_map(|(offset, len)| Extent::new(offset, len));
    prop_oneof![
        2 => extent().prop_map(Step::TryShared),
        1 => extent().prop_map(Step::TryExclusive),
        3 => extent().prop_map(Step::Shared),
        3 => extent().prop_map(Step::Exclusive),
        5 => any::<usize>().prop_map(Step::Release),
        1 => any::<usize>().prop_map(Step::Cancel),
        3 => any::<usize>().prop_map(Step::Run),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn a_range_lock_does_what_the_model_does(steps in prop::collection::vec(step(), 1..60)) {
        let mut run = Run::default();
        for step in &steps {
            run.step(step);
        }
        run.run(0);
        // Whatever waits gets its lock when the others release theirs.
        while let Some(&id) = nth(&run.guards, 0) {
            run.model.0.remove(&id);
            run.guards.remove(&id);
            run.run(0);
        }
        prop_assert!(run.waiting.is_empty());
        prop_assert!(run.ranges.try_exclusive(Extent::new(0, 100)).is_some());
    }
}

#[test]
fn waiters_of_one_range_get_it_in_order() {
    let mut run = Run::default();
    let all = Extent::new(0, 10);
    run.step(&Step::Exclusive(all));
    for _ in 0..5 {
        run.step(&Step::Exclusive(all));
    }
    for id in 0..6 {
        assert_eq!(run.guards.keys().copied().collect::<Vec<_>>(), [id]);
        run.step(&Step::Release(0));
        run.step(&Step::Run(0));
    }
}
