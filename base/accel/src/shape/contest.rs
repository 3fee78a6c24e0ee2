//! Calibration contest between one kernel's loops for one class of sizes, and its evaluation.
//!
//! Single measurements on a shared machine are unreliable, so:
//! - loops take turns, each round in another order, and a turn is a few microseconds, far shorter than a time slice:
//!   interruptions by other tasks hit single turns, and such turns are discarded;
//! - the default keeps its place unless another loop is faster by [`MARGIN_PERCENT`] both in the fastest turns and in
//!   the median of the rounds' ratios;
//! - a loop that is to replace the default must prove it again, in as many rounds against the default alone;
//! - among several that are, those within [`EQUAL_PERCENT`] of the fastest count as equal, and the first of the list
//!   wins.

use std::time::Duration;

use super::{Choice, Forced, MARGIN_PERCENT, ShapeReason, ShapeSlot, ShapeSpeed};

/// Percent of difference between fastest turns below which loops count as equal.
const EQUAL_PERCENT: f64 = 3.0;

/// Rounds that are measured, behind one that fills the caches.
const ROUNDS: usize = 15;

/// Rounds that a decision needs.
const ROUNDS_MIN: usize = 7;

/// Round after which loops that are far behind take no further part.
const CUT_AFTER: usize = 2;

/// Factor behind the fastest loop from which a loop is far behind.
const CUT_FACTOR: f64 = 1.5;

/// Factor behind the fastest turn from which a turn was interrupted; no loop of a contest is so much slower.
const INTERRUPTED_FACTOR: f64 = 6.0;

/// Loop that takes part in a contest.
pub(crate) struct Contestant {
    /// Name of the shape.
    pub name: &'static str,
    /// Runs one turn, which takes a few microseconds, and returns the bytes of payload it went over.  All contestants
    /// of a contest do the same work.
    pub work: Box<dyn FnMut() -> usize>,
}

/// Contest between the loops of one kernel for one class of sizes.
pub(crate) struct Contest {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Name of the class.
    pub class: &'static str,
    /// Loops, in the order of the class's shapes; earlier ones win ties.
    pub contestants: Vec<Contestant>,
    /// Default for this processor, one of the contestants.
    pub default: usize,
    /// Slot that calls of the kernel read.
    pub slot: &'static ShapeSlot,
}

/// Times of a loop's turns, in nanoseconds; fewer than the others' where it was cut.
type Turns = Vec<f64>;

impl Contest {
    /// Lists the contestants' names.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.contestants.iter().map(|one| one.name).collect()
    }

    /// Puts the named contestant to use.
    pub(crate) fn install(&self, shape: &str) {
        if let Some(at) = self.contestants.iter().position(|one| one.name == shape) {
            self.slot.set(at);
        }
    }

    /// Returns the choice without measuring.
    pub(super) fn without_calibration(&self, forced: &Forced) -> Choice {
        let (shape, reason) = match forced.shape(self.kernel, &self.names()) {
            Some(shape) => (shape, ShapeReason::Forced),
            None => (self.default, ShapeReason::Processor),
        };
        self.choice(shape, reason, Vec::new())
    }

    /// Measures, unless the choice is forced, and judges.  No round begins after `end`.
    pub(super) fn settle(&mut self, forced: &Forced, end: Duration, clock: &mut dyn FnMut() -> Duration) -> Choice {
        if forced.processor || forced.shape(self.kernel, &self.names()).is_some() {
            return self.without_calibration(forced);
        }
        let all: Vec<usize> = (0..self.contestants.len()).collect();
        let (turns, bytes) = self.measure(&all, end, clock);
        let figures = self.contestants.iter().zip(&turns).zip(&bytes).filter(|((_, turns), _)| !turns.is_empty());
        let figure = |((one, turns), &bytes): ((&Contestant, &Turns), &usize)| ShapeSpeed {
            shape: one.name,
            gb_per_s: bytes as f64 / least(turns),
        };
        let measured = figures.map(figure).collect();
        if turns[self.default].len() < ROUNDS_MIN {
            return self.choice(self.default, ShapeReason::OutOfTime, measured);
        }
        let Some((shape, _)) = judge(&turns, self.default) else {
            return self.choice(self.default, ShapeReason::Confirmed, measured);
        };
        let (again, _) = self.measure(&[self.default, shape], end, clock);
        if again[0].len() < ROUNDS_MIN {
            return self.choice(self.default, ShapeReason::OutOfTime, measured);
        }
        match judge(&again, 0) {
            Some((_, percent)) => self.choice(shape, ShapeReason::Calibration { percent }, measured),
            None => self.choice(self.default, ShapeReason::Confirmed, measured),
        }
    }

    /// Lets some contestants take turns; returns what each one's turns took, and its bytes a turn.
    fn measure(
        &mut self,
        some: &[usize],
        end: Duration,
        clock: &mut dyn FnMut() -> Duration,
    ) -> (Vec<Turns>, Vec<usize>) {
        let mut turns: Vec<Turns> = vec![Vec::new(); some.len()];
        let mut bytes = vec![0; some.len()];
        let mut cut = vec![false; some.len()];
        for round in 0..=ROUNDS {
            if clock() >= end {
                break;
            }
            for place in 0..some.len() {
                let at = (place + round) % some.len();
                if cut[at] {
                    continue;
                }
                let begin = clock();
                bytes[at] = (self.contestants[some[at]].work)();
                let took = clock().saturating_sub(begin).as_nanos().max(1) as f64;
                // The first round fills caches and tables.
                if round > 0 {
                    turns[at].push(took);
                }
            }
            if round == CUT_AFTER {
                let best = turns.iter().map(|turns| least(turns)).fold(f64::INFINITY, f64::min);
                for (at, cut) in cut.iter_mut().enumerate() {
                    let behind = least(&turns[at]) / best;
                    *cut = some[at] != self.default && (CUT_FACTOR..INTERRUPTED_FACTOR).contains(&behind);
                }
            }
        }
        (turns, bytes)
    }

    fn choice(&self, shape: usize, reason: ShapeReason, measured: Vec<ShapeSpeed>) -> Choice {
        Choice {
            kernel: self.kernel,
            class: self.class,
            shape: self.contestants[shape].name,
            reason,
            default: self.contestants[self.default].name,
            measured,
        }
    }
}

/// Returns the loop that replaces the default, and by how many percent it is faster; `None` where the default stays.
fn judge(turns: &[Turns], default: usize) -> Option<(usize, f64)> {
    let margin = 1.0 + MARGIN_PERCENT / 100.0;
    let limit = turns.iter().map(|turns| least(turns)).fold(f64::INFINITY, f64::min) * INTERRUPTED_FACTOR;
    let faster = |at: usize| {
        let rounds = turns[default].iter().zip(&turns[at]).filter(|(mine, its)| **mine < limit && **its < limit);
        let mut ratios: Vec<f64> = rounds.map(|(mine, its)| mine / its).collect();
        ratios.sort_by(f64::total_cmp);
        let median = *ratios.get(ratios.len() / 2)?;
        let complete = turns[at].len() == turns[default].len();
        (complete && median > margin && least(&turns[default]) > least(&turns[at]) * margin)
            .then_some((at, (median - 1.0) * 100.0))
    };
    let challengers: Vec<(usize, f64)> = (0..turns.len()).filter(|&at| at != default).filter_map(faster).collect();
    let best = challengers.iter().map(|&(at, _)| least(&turns[at])).fold(f64::INFINITY, f64::min);
    challengers.into_iter().find(|&(at, _)| least(&turns[at]) <= best * (1.0 + EQUAL_PERCENT / 100.0))
}

/// Returns the time of the fastest turn.
fn least(turns: &[f64]) -> f64 {
    turns.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    /// Simulated processor on which turns cost a given number of nanoseconds, shared with other tasks, which take a
    /// time slice in one of `period` turns, and a little in every turn.
    struct Machine {
        now: Cell<u64>,
        chance: Cell<u64>,
        period: u64,
    }

    impl Machine {
        fn new(seed: u64, period: u64) -> Rc<Self> {
            Rc::new(Self { now: Cell::new(0), chance: Cell::new(seed * 2 + 1), period })
        }

        fn random(&self) -> u64 {
            let mut value = self.chance.get();
            value ^= value << 13;
            value ^= value >> 7;
            value ^= value << 17;
            self.chance.set(value);
            value.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
        }

        fn spend(&self, cost: u64) {
            let stolen = if self.period > 0 && self.random().is_multiple_of(self.period) { 1_000_000 } else { 0 };
            self.now.set(self.now.get() + cost + self.random() % (cost / 50) + stolen);
        }
    }

    fn settle(machine: &Rc<Machine>, costs: &[u64], default: usize, forced: &Forced, end: Duration) -> Choice {
        let contestants = costs.iter().zip(NAMES).map(|(&cost, name)| {
            let machine = Rc::clone(machine);
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                machine.spend(cost);
                1 << 18
            });
            Contestant { name, work }
        });
        let mut contest = contest(contestants.collect(), default);
        let choice = contest.settle(forced, end, &mut || Duration::from_nanos(machine.now.get()));
        assert_eq!(contest.slot.get(|| 99), 99, "a judgement alone puts nothing to use");
        choice
    }

    fn contest(contestants: Vec<Contestant>, default: usize) -> Contest {
        let slot = Box::leak(Box::new(ShapeSlot::new()));
        Contest { kernel: "k", class: "all", contestants, default, slot }
    }

    #[test]
    fn an_installed_shape_is_in_its_slot() {
        let contestants = NAMES.map(|name| Contestant { name, work: Box::new(|| panic!("not to be measured")) });
        let contest = contest(contestants.into(), 1);
        for (at, name) in NAMES.into_iter().enumerate() {
            contest.install(name);
            assert_eq!(contest.slot.get(|| 99), at);
        }
    }

    fn outcome(seed: u64, period: u64, costs: &[u64], default: usize) -> (&'static str, ShapeReason) {
        let choice = settle(&Machine::new(seed, period), costs, default, &Forced::default(), Duration::MAX);
        (choice.shape, choice.reason)
    }

    #[test]
    fn a_clearly_faster_loop_replaces_the_default_at_every_start_on_a_noisy_machine() {
        for seed in 0..2000 {
            let (shape, reason) = outcome(seed, 8, &[10_000, 9_000, 8_000, 30_000], 0);
            assert_eq!(shape, "c", "seed {seed}");
            assert!(
                matches!(reason, ShapeReason::Calibration { percent } if (15.0..40.0).contains(&percent)),
                "{reason:?}"
            );
        }
    }

    #[test]
    fn a_loop_that_is_hardly_faster_never_replaces_the_default() {
        for seed in 0..2000 {
            assert_eq!(
                outcome(seed, 8, &[9_800, 10_000, 9_750, 9_900], 1),
                ("b", ShapeReason::Confirmed),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn of_equals_the_first_is_taken() {
        for seed in 0..500 {
            assert_eq!(outcome(seed, 8, &[20_000, 10_000, 9_980, 10_020], 0).0, "b", "seed {seed}");
        }
    }

    /// Measures a loop that gets slower once it is measured a second time, as after a change of clock frequency.
    #[test]
    fn what_is_not_proven_again_does_not_replace_the_default() {
        let machine = Machine::new(1, 0);
        let turns = Rc::new(Cell::new(0));
        let contestant = |name, first: u64, later: u64| {
            let (machine, turns) = (Rc::clone(&machine), Rc::clone(&turns));
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                turns.set(turns.get() + 1);
                machine.spend(if turns.get() <= 2 * (ROUNDS + 1) { first } else { later });
                1 << 18
            });
            Contestant { name, work }
        };
        let contestants = vec![contestant("a", 10_000, 10_000), contestant("b", 8_000, 10_000)];
        let mut contest = contest(contestants, 0);
        let clock = &mut || Duration::from_nanos(machine.now.get());
        let choice = contest.settle(&Forced::default(), Duration::MAX, clock);
        assert_eq!((choice.shape, choice.reason), ("a", ShapeReason::Confirmed));
        assert_eq!(turns.get(), 4 * (ROUNDS + 1));
    }

    #[test]
    fn a_single_fast_turn_is_not_enough() {
        // The clock of a virtual machine can lose time; the median does not believe it.
        let mut turns = vec![vec![10_000.0; ROUNDS]; 2];
        turns[1][4] = 2_000.0;
        assert_eq!(judge(&turns, 0), None);
        turns[1] = vec![8_000.0; ROUNDS];
        assert_eq!(judge(&turns, 0).map(|(at, percent)| (at, percent.round())), Some((1, 25.0)));
    }

    #[test]
    fn without_time_the_default_stays() {
        let machine = Machine::new(1, 0);
        let choice = settle(&machine, &[10_000, 5_000], 0, &Forced::default(), Duration::from_micros(40));
        assert_eq!((choice.shape, choice.reason), ("a", ShapeReason::OutOfTime));
        assert!(machine.now.get() < 100_000, "went on after the end: {} ns", machine.now.get());
    }

    #[test]
    fn what_is_forced_is_not_measured() {
        let machine = Machine::new(1, 0);
        let forced = Forced { processor: false, shapes: vec![("k".into(), "b".into())] };
        let choice = settle(&machine, &[10_000, 50_000], 0, &forced, Duration::MAX);
        assert_eq!((choice.shape, choice.reason), ("b", ShapeReason::Forced));
        let forced = Forced { processor: true, shapes: Vec::new() };
        let choice = settle(&machine, &[10_000, 5_000], 0, &forced, Duration::MAX);
        assert_eq!((choice.shape, choice.reason), ("a", ShapeReason::Processor));
        assert_eq!(machine.now.get(), 0);
    }

    #[test]
    fn slow_loops_are_cut_and_figures_are_those_of_the_fastest_turn() {
        let machine = Machine::new(3, 0);
        let choice = settle(&machine, &[10_000, 40_000], 0, &Forced::default(), Duration::MAX);
        assert_eq!(choice.reason, ShapeReason::Confirmed);
        assert_eq!(choice.measured.iter().map(|one| one.shape).collect::<Vec<_>>(), ["a", "b"]);
        assert!((25.0..=26.3).contains(&choice.measured[0].gb_per_s), "{choice:?}");
        // One round to warm up and two to see how slow it is.
        assert!(machine.now.get() < (ROUNDS as u64 + 1) * 10_200 + 3 * 40_800 + 1000, "{}", machine.now.get());
    }
}
