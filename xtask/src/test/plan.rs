//! Plans stages within a budget: whether one runs and at which length, decided each time it could begin.
//!
//! Pure: no clock and no process, so that whole runs on machines of any speed are tests of this file.  The rules are in
//! docs/design/test-runs.md.

use super::stage::{Length, Takes};

/// Part of the cores' time that stages can be planned into: the rest goes where one waits for another.
const FILLED: f64 = 0.85;
/// Expected seconds of finished stages that the machine's speed is taken from.
const SPEED_OVER: f64 = 240.0;

/// A stage that has not ended, as the plan sees it.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// Seconds on a quiet machine.
    pub(super) takes: Takes,
    /// Cores that it keeps busy.
    pub(super) load: f64,
}

/// Decision about one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Begins now, at this length.
    Run(Length),
    /// Not even its quick form fits into what is left.
    Skip,
}

/// Slowdown of stages: actual over expected seconds.
#[derive(Default)]
pub(super) struct Speed {
    /// Expected and actual seconds of stages that have ended, the newest last.
    ended: Vec<(f64, f64)>,
}

impl Speed {
    /// Takes a stage that has ended well.  A build that was faster than expected had nothing to do, and says nothing.
    pub(super) fn ended(&mut self, expected: f64, actual: f64, is_build: bool) {
        if expected > 0.0 && !(is_build && actual < expected) {
            self.ended.push((expected, actual));
        }
    }

    /// Returns the factor, at least 0.5.  `running` are expected and passed seconds of stages that run: those that take
    /// longer than expected count as if they ended now.
    pub(super) fn factor(&self, running: impl Iterator<Item = (f64, f64)>) -> f64 {
        let (mut expected, mut actual) = (0.0, 0.0);
        for (said, passed) in running.filter(|(said, passed)| *said > 0.0 && passed > said) {
            expected += said;
            actual += passed;
        }
        for (said, took) in self.ended.iter().rev() {
            if expected >= SPEED_OVER {
                break;
            }
            expected += said;
            actual += took;
        }
        if expected > 0.0 { (actual / expected).max(0.5) } else { 1.0 }
    }
}

/// Inputs of a decision.
pub(super) struct Situation<'a> {
    /// Seconds until the budget's end.
    pub(super) left: f64,
    /// Cores of the machine.
    pub(super) cores: usize,
    /// Slowdown of stages ([`Speed::factor`]).
    pub(super) factor: f64,
    /// Stages that have not begun, without the one in question: builds too.
    pub(super) waiting: &'a [Job],
    /// Core-seconds that running stages still need, on a quiet machine.
    pub(super) running: f64,
}

impl Situation<'_> {
    /// Decides about a stage of tests: the quick forms of all others come first, and what is left then is shared among
    /// all that could use more.
    pub(super) fn decide(&self, job: Job) -> Verdict {
        let own_left = self.left / self.factor;
        if job.takes.quick > own_left {
            return Verdict::Skip;
        }
        let all = || self.waiting.iter().chain(std::iter::once(&job));
        let quick: f64 = all().map(|job| job.takes.quick * job.load).sum();
        let more: f64 = all().map(|job| (job.takes.usual - job.takes.quick) * job.load).sum();
        let spare = own_left * self.cores as f64 * FILLED - self.running - quick;
        let share = if more > 0.0 { (spare / more).clamp(0.0, 1.0) } else { 1.0 };
        let longest = match job.takes.usual - job.takes.quick {
            // By itself it must not reach beyond the end either.
            more if more > 0.0 => ((own_left * FILLED - job.takes.quick) / more).clamp(0.0, 1.0),
            _ => 1.0,
        };
        Verdict::Run(Length::Part(share.min(longest)))
    }

    /// Decides about a build, whose shortest user that still waits takes `user` seconds.
    pub(super) fn build_fits(&self, build: f64, user: f64) -> bool {
        (build + user) * self.factor <= self.left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(quick: f64, usual: f64) -> Job {
        Job { takes: Takes { quick, usual, soak: usual }, load: 1.0 }
    }

    fn situation(left: f64, factor: f64, waiting: &[Job]) -> Situation<'_> {
        Situation { left, cores: 2, factor, waiting, running: 0.0 }
    }

    #[test]
    fn with_time_for_everything_all_runs_at_its_usual_length() {
        let others = [job(10.0, 100.0), job(20.0, 20.0)];
        assert_eq!(situation(4200.0, 1.0, &others).decide(job(10.0, 60.0)), Verdict::Run(Length::USUAL));
    }

    #[test]
    fn what_is_left_is_shared_after_the_quick_forms() {
        // 100 s on two cores are 170 core-seconds; quick forms take 40, more would be 260.
        let others = [job(10.0, 110.0), job(20.0, 120.0)];
        let Verdict::Run(Length::Part(part)) = situation(100.0, 1.0, &others).decide(job(10.0, 70.0)) else {
            panic!("it fits");
        };
        assert!((part - 0.5).abs() < 1e-9, "{part}");
        // The same on a machine half as fast with twice the time.
        assert_eq!(
            situation(200.0, 2.0, &others).decide(job(10.0, 70.0)),
            Verdict::Run(Length::Part(part)),
            "speed and time belong together"
        );
    }

    #[test]
    fn without_time_only_quick_forms_run_and_then_none() {
        let others = [job(100.0, 200.0), job(100.0, 200.0)];
        assert_eq!(situation(100.0, 1.0, &others).decide(job(50.0, 90.0)), Verdict::Run(Length::QUICK));
        assert_eq!(situation(100.0, 3.0, &others).decide(job(50.0, 90.0)), Verdict::Skip);
        assert_eq!(situation(-5.0, 1.0, &[]).decide(job(1.0, 1.0)), Verdict::Skip, "the budget is over");
    }

    #[test]
    fn a_build_needs_time_for_its_user_too() {
        assert!(situation(100.0, 1.0, &[]).build_fits(60.0, 30.0));
        assert!(!situation(100.0, 1.0, &[]).build_fits(60.0, 50.0));
        assert!(!situation(100.0, 2.0, &[]).build_fits(60.0, 30.0));
    }

    #[test]
    fn speed_follows_what_stages_took() {
        let mut speed = Speed::default();
        assert_eq!(speed.factor(std::iter::empty()), 1.0);
        speed.ended(200.0, 1.0, true);
        assert_eq!(speed.factor(std::iter::empty()), 1.0, "a build with nothing to do says nothing");
        speed.ended(200.0, 800.0, true);
        assert_eq!(speed.factor(std::iter::empty()), 4.0);
        assert_eq!(speed.factor([(40.0, 10.0)].into_iter()), 4.0, "what runs in its time says nothing yet");
        assert_eq!(speed.factor([(40.0, 640.0)].into_iter()), 6.0, "what takes long does");
        speed.ended(300.0, 300.0, false);
        assert_eq!(speed.factor(std::iter::empty()), 1.0, "long ago is forgotten");
    }

    /// Runs a whole list on a machine of a given slowness, one stage after the other on each core; returns the second of
    /// the end, and the lengths by stage.
    fn simulate(jobs: &[Job], budget: f64, slowness: impl Fn(f64) -> f64) -> (f64, Vec<Option<f64>>) {
        let mut speed = Speed::default();
        let mut cores = [0.0f64; 2];
        let mut running: [Option<(f64, f64)>; 2] = [None, None];
        let mut lengths = Vec::new();
        for (index, &job) in jobs.iter().enumerate() {
            let core = usize::from(cores[1] < cores[0]);
            let now = cores[core];
            if let Some((expected, begun)) = running[core].take() {
                speed.ended(expected, now - begun, false);
            }
            let other = running[1 - core];
            let beside = other.map_or(0.0, |(expected, begun)| (expected - (now - begun)).max(0.0));
            let situation = Situation {
                left: budget - now,
                cores: 2,
                factor: speed.factor(other.map(|(expected, begun)| (expected, now - begun)).into_iter()),
                waiting: &jobs[index + 1..],
                running: beside,
            };
            match situation.decide(job) {
                Verdict::Run(length) => {
                    let expected = job.takes.at(length);
                    running[core] = Some((expected, now));
                    cores[core] = now + expected * slowness(now);
                    let Length::Part(part) = length else { panic!("no soak") };
                    lengths.push(Some(part));
                }
                Verdict::Skip => lengths.push(None),
            }
        }
        (cores[0].max(cores[1]), lengths)
    }

    #[test]
    fn whole_runs_end_near_their_budget_on_machines_of_any_speed() {
        // Ninety stages like ours: short ones, and long ones with quick forms of a tenth.
        let jobs: Vec<Job> = (0..30)
            .flat_map(|number| [job(20.0, 20.0), job(45.0, 45.0), job(15.0, f64::from(60 + number * 4))])
            .collect();
        let usual: f64 = jobs.iter().map(|job| job.takes.usual).sum::<f64>() / 2.0;
        for budget in [600.0, 1800.0, 4200.0] {
            for slow in [1.0, 2.0, 4.0, 8.0] {
                let (end, lengths) = simulate(&jobs, budget, |_| slow);
                // At most one stage that began in good faith reaches beyond it, before the speed was known.
                assert!(end <= budget + 45.0 * slow, "{end} s of {budget} at {slow}");
                if usual * slow < budget * 0.8 {
                    assert!(lengths.iter().all(|length| *length == Some(1.0)), "time for all at {slow} of {budget}");
                } else {
                    assert!(end > budget * 0.6, "{end} s of {budget} at {slow}: the time is used");
                }
                let begun = lengths.iter().take_while(|length| length.is_some()).count();
                assert!(begun > 3, "the first ones always run");
            }
        }
    }

    #[test]
    fn a_machine_that_becomes_slow_gets_shorter_stages_from_then_on() {
        let jobs = vec![job(10.0, 100.0); 40];
        let (end, lengths) = simulate(&jobs, 2400.0, |now| if now < 800.0 { 1.0 } else { 5.0 });
        assert_eq!(lengths[0], Some(1.0));
        assert!(lengths.last().expect("some").is_some_and(|part| part < 0.5), "{lengths:?}");
        assert!(end < 2600.0, "{end}");
    }
}
