//! Runs stages: side by side where cores are free, each within its limit and all within the budget.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::plan::{Job, Situation, Speed, Verdict};
use super::report::{self, Ending, Report};
use super::stage::{Length, Stage};
use crate::cpu::CpuMeter;
use crate::quiet::{self, Stopwatch};
use crate::shell;

/// Factor for `timeout` in scripts (test/lab/limits.sh): it ends what hangs, and judges no time.
const HANG_FACTOR: &str = "10";
/// A stage hangs when it takes so many times longer than expected, in quiet time...  Little enough that a budget of 70
/// minutes on a quiet machine, where a run takes 45, finds a hang of any stage rather than cutting it off.
const HANGS_AFTER: f64 = 4.0;
/// ... and longer than this.
const HANGS_AFTER_MIN: Duration = Duration::from_secs(300);
/// Marks the processes of a stage, so that all of them are found when it has to be ended.
const MARK: &str = shell::STAGE;
/// Interval between two samples of a stage's CPU time.
const CPU_INTERVAL: Duration = Duration::from_millis(500);
/// Memory that a stage may take, in GiB: a guest, or a cluster with its clients.
const STAGE_GIB: usize = 3;
/// Cores by which loads may exceed those that there are.
const ROUNDING: f64 = 0.05;
/// Time between SIGTERM and SIGKILL of a stage.
const LAST_WORDS: Duration = Duration::from_secs(15);

/// Length of the stages.
#[derive(Clone, Copy)]
pub(super) enum Lengths {
    /// All at this one.
    All(Length),
    /// Longest that fits until then.
    Until(Instant),
}

/// Progress of a stage.
#[derive(Clone, Copy)]
enum Progress {
    Waiting,
    Running { since: Instant, expected: f64 },
    Ended,
}

struct Run<'a> {
    stages: &'a [Stage],
    lengths: Lengths,
    progress: Vec<Progress>,
    reports: Vec<Report>,
    speed: Speed,
    cores: usize,
    /// Stages that run side by side, at most.
    most: usize,
}

/// Runs everything whose needs are met, as long as cores are free.
pub(super) fn execute(stages: &[Stage], lengths: Lengths, logs: &Path) -> Result<Vec<Report>> {
    let clock = logs.join("quiet-clock");
    quiet::publish(&clock)?;
    let cores = std::thread::available_parallelism().map_or(2, usize::from).max(2);
    let run = Mutex::new(Run::new(stages, lengths, cores, (memory_gib() / STAGE_GIB).clamp(2, 3 * cores)));
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        let mut state = run.lock().expect("no stage panics");
        loop {
            if let Some((index, length)) = state.next() {
                state.begin(index, length);
                let (run, changed, clock) = (&run, &changed, &clock);
                scope.spawn(move || {
                    let report = one(&stages[index], length, lengths, logs, clock);
                    run.lock().expect("no stage panics").end(index, report);
                    changed.notify_all();
                });
            } else if state.progress.iter().any(|progress| matches!(progress, Progress::Running { .. })) {
                state = changed.wait(state).expect("no stage panics");
            } else {
                break;
            }
        }
    });
    Ok(run.into_inner().expect("no stage panics").reports)
}

impl<'a> Run<'a> {
    fn new(stages: &'a [Stage], lengths: Lengths, cores: usize, most: usize) -> Self {
        Self {
            stages,
            lengths,
            progress: vec![Progress::Waiting; stages.len()],
            reports: stages.iter().map(|_| Report::new(Ending::Skipped)).collect(),
            speed: Speed::default(),
            cores,
            most,
        }
    }

    /// Returns the next stage to begin, with its length; settles on the way what can no longer run.
    fn next(&mut self) -> Option<(usize, Length)> {
        self.leave_out();
        // Cores that a build waits for.
        let mut reserved: f64 = 0.0;
        // Cores that an earlier test waits for which needs more than one: small stages would never leave them free at once.
        let mut held: f64 = 0.0;
        for index in 0..self.stages.len() {
            let stage = &self.stages[index];
            if !matches!(self.progress[index], Progress::Waiting) || !self.ready(index) {
                continue;
            }
            let beside_held = stage.load == 0.0 || !stage.counted || held + stage.load <= self.cores as f64 + ROUNDING;
            if !self.fits(stage, reserved) || !beside_held {
                if !stage.counted {
                    reserved = reserved.max(stage.load);
                } else if stage.load > 1.0 {
                    held = held.max(stage.load);
                }
                continue;
            }
            match self.verdict(index) {
                Verdict::Run(length) => return Some((index, length)),
                Verdict::Skip => {
                    self.progress[index] = Progress::Ended;
                    self.reports[index].ending = Ending::Skipped;
                    report::skipped(stage);
                    self.leave_out();
                }
            }
        }
        None
    }

    fn begin(&mut self, index: usize, length: Length) {
        let expected = self.stages[index].takes.at(length);
        self.progress[index] = Progress::Running { since: Instant::now(), expected };
    }

    fn end(&mut self, index: usize, report: Report) {
        if let (Progress::Running { expected, .. }, Ending::Passed) = (self.progress[index], report.ending) {
            self.speed.ended(expected, report.time.as_secs_f64(), !self.stages[index].counted);
        }
        self.progress[index] = Progress::Ended;
        self.reports[index] = report;
    }

    /// Returns whether cores and memory are free for a stage: beside what runs, and beside a build that waits until
    /// another build leaves it `reserved` cores.
    fn fits(&self, stage: &Stage, reserved: f64) -> bool {
        let running = || {
            let stages = self.stages.iter().zip(&self.progress);
            stages.filter(|(_, progress)| matches!(progress, Progress::Running { .. })).map(|(stage, _)| stage)
        };
        let (builds, tests): (Vec<&Stage>, Vec<&Stage>) = running().partition(|stage| !stage.counted);
        let load = |stages: &[&Stage]| stages.iter().map(|stage| stage.load).sum::<f64>();
        let busy = load(&tests) + load(&builds).max(reserved);
        stage.load == 0.0 || (busy + stage.load <= self.cores as f64 + ROUNDING && running().count() < self.most)
    }

    fn index_of(&self, name: &str) -> Option<usize> {
        self.stages.iter().position(|stage| stage.name == name)
    }

    fn ended_as(&self, index: usize, endings: &[Ending]) -> bool {
        matches!(self.progress[index], Progress::Ended) && endings.contains(&self.reports[index].ending)
    }

    fn ready(&self, index: usize) -> bool {
        let needs = self.stages[index].after.iter();
        needs
            .map(|need| self.index_of(need))
            .all(|need| need.is_some_and(|need| self.ended_as(need, &[Ending::Passed])))
    }

    /// Settles what can no longer run: what it needs has failed, or was not run.
    fn leave_out(&mut self) {
        loop {
            let mut settled = false;
            for index in 0..self.stages.len() {
                if !matches!(self.progress[index], Progress::Waiting) {
                    continue;
                }
                let needs: Vec<usize> =
                    self.stages[index].after.iter().filter_map(|need| self.index_of(need)).collect();
                let any = |endings: &[Ending]| needs.iter().any(|&need| self.ended_as(need, endings));
                let ending = if any(&[Ending::Failed, Ending::NeedFailed]) {
                    report::not_run(&self.stages[index]);
                    Ending::NeedFailed
                } else if any(&[Ending::Skipped, Ending::CutOff]) {
                    report::skipped(&self.stages[index]);
                    Ending::Skipped
                } else if !self.stages[index].counted && self.users_skipped(index) {
                    // A build whose users have all been skipped is not needed.
                    Ending::Skipped
                } else {
                    continue;
                };
                self.progress[index] = Progress::Ended;
                self.reports[index].ending = ending;
                self.reports[index].failed = u64::from(ending == Ending::NeedFailed && self.stages[index].counted);
                settled = true;
            }
            if !settled {
                return;
            }
        }
    }

    fn users(&self, build: usize) -> impl Iterator<Item = usize> {
        let (stages, name) = (self.stages, self.stages[build].name);
        (0..stages.len()).filter(move |&index| stages[index].after.contains(&name))
    }

    fn users_skipped(&self, build: usize) -> bool {
        let mut users = self.users(build).peekable();
        users.peek().is_some() && users.all(|user| self.ended_as(user, &[Ending::Skipped]))
    }

    fn verdict(&self, index: usize) -> Verdict {
        let end = match self.lengths {
            Lengths::All(length) => return Verdict::Run(length),
            Lengths::Until(end) => end,
        };
        let now = Instant::now();
        let running = || {
            self.stages.iter().zip(&self.progress).filter_map(|(stage, progress)| match progress {
                Progress::Running { since, expected } => Some((stage.load, *expected, (now - *since).as_secs_f64())),
                _ => None,
            })
        };
        let factor = self.speed.factor(running().map(|(_, expected, passed)| (expected, passed)));
        let waiting: Vec<Job> = (0..self.stages.len())
            .filter(|&other| other != index && matches!(self.progress[other], Progress::Waiting))
            .map(|other| job(&self.stages[other]))
            .collect();
        let situation = Situation {
            left: end.saturating_duration_since(now).as_secs_f64(),
            cores: self.cores,
            factor,
            waiting: &waiting,
            running: running().map(|(load, expected, passed)| load * (expected - passed / factor).max(0.0)).sum(),
        };
        let stage = &self.stages[index];
        if stage.counted {
            return situation.decide(job(stage));
        }
        let users = self.users(index).filter(|&user| matches!(self.progress[user], Progress::Waiting));
        let shortest = users.map(|user| self.stages[user].takes.quick).min_by(f64::total_cmp);
        if situation.build_fits(stage.takes.quick, shortest.unwrap_or(0.0)) {
            Verdict::Run(Length::USUAL)
        } else {
            Verdict::Skip
        }
    }
}

/// Returns the memory of this machine that is available, in GiB.
fn memory_gib() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<usize>().ok());
    kib.map_or(0, |kib| kib >> 20)
}

fn job(stage: &Stage) -> Job {
    Job { takes: stage.takes, load: stage.load }
}

/// Reason why a stage's process ended.
enum Halt {
    /// By itself.
    Ended(ExitStatus),
    /// Killed because it took too long for any machine.
    Hung(Duration),
    /// Killed because the budget was over.
    BudgetOver,
}

fn one(stage: &Stage, length: Length, lengths: Lengths, logs: &Path, clock: &Path) -> Report {
    let log: PathBuf = logs.join(format!("{}.log", stage.name));
    let watch = Stopwatch::start();
    let mut cpu = CpuMeter::new(MARK, &mark(stage));
    let halt =
        start(stage, length, &log, clock).and_then(|child| attend(child, stage, length, lengths, &watch, &mut cpu));
    let text = std::fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let (passed, failed) = if stage.counted { report::count(&text) } else { (0, 0) };
    let mut report = Report { passed, failed, time: watch.wall(), cpu: cpu.time(), ..Report::new(Ending::Passed) };
    if stage.has_lengths() {
        report.length = Some(length);
    }
    report.last = report::last_line(&text);
    report.left_out = report::left_out(&text);
    let reason = match halt {
        Ok(Halt::Ended(status)) if status.success() && failed == 0 && (passed > 0 || !stage.counted) => {
            report::passed(stage, &report);
            return report;
        }
        Ok(Halt::Ended(status)) if status.success() && failed == 0 => "it reports no test".to_owned(),
        Ok(Halt::Ended(status)) => status.to_string(),
        Ok(Halt::BudgetOver) if failed == 0 => {
            report.ending = Ending::CutOff;
            report::cut_off(stage, &report);
            return report;
        }
        Ok(Halt::BudgetOver) => "the budget was over after it had failed".to_owned(),
        Ok(Halt::Hung(limit)) => {
            format!("it hangs: not over after {} of quiet time", shell::seconds(limit))
        }
        Err(error) => format!("{error:#}"),
    };
    report.fail(&reason, &text);
    report::failed(stage, &report, &reason, &log, &text);
    report
}

fn start(stage: &Stage, length: Length, log: &Path, clock: &Path) -> Result<Child> {
    let mut command = (stage.command)(length)?;
    let file = File::create(log)?;
    command.env(quiet::FILE_VARIABLE, clock).env("HANG_FACTOR", HANG_FACTOR).env(MARK, mark(stage));
    Ok(command.stdout(file.try_clone()?).stderr(file).spawn()?)
}

/// Waits for the end; brings it about when the stage hangs or the budget is over.
fn attend(
    mut child: Child,
    stage: &Stage,
    length: Length,
    lengths: Lengths,
    watch: &Stopwatch,
    cpu: &mut CpuMeter,
) -> Result<Halt> {
    let limit = Duration::from_secs_f64(stage.takes.at(length) * HANGS_AFTER).max(HANGS_AFTER_MIN);
    let mut sampled = Instant::now();
    loop {
        if sampled.elapsed() >= CPU_INTERVAL {
            cpu.sample();
            sampled = Instant::now();
        }
        if let Some(status) = child.try_wait()? {
            return Ok(Halt::Ended(status));
        }
        let over = matches!(lengths, Lengths::Until(end) if Instant::now() >= end);
        if over || watch.quiet() >= limit {
            end(stage, &mut child)?;
            return Ok(if over { Halt::BudgetOver } else { Halt::Hung(limit) });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The value of [`MARK`]: of this stage in this run.
fn mark(stage: &Stage) -> String {
    format!("{}-{}", std::process::id(), stage.name)
}

/// Ends a stage with all that it started, daemons included: by SIGTERM, then by SIGKILL what is left.
fn end(stage: &Stage, child: &mut Child) -> Result<()> {
    let left = || shell::with_environment(MARK, &mark(stage));
    shell::signal("TERM", &left());
    let gone = || child.try_wait().ok().flatten().and_then(|_| left().is_empty().then_some(()));
    if shell::wait_for(LAST_WORDS, gone).is_none() {
        shell::signal("KILL", &left());
        child.wait()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::Scratch;

    fn sh(text: &'static str) -> impl Fn(Length) -> Result<std::process::Command> + Send + Sync + 'static {
        move |_| {
            let mut command = shell::command("sh");
            command.args(["-c", text]);
            Ok(command)
        }
    }

    fn endings(stages: &[Stage], lengths: Lengths) -> Vec<(&'static str, Ending)> {
        let scratch = Scratch::new("stages").expect("a folder");
        let reports = execute(stages, lengths, scratch.path()).expect("a run");
        stages.iter().zip(&reports).map(|(stage, report)| (stage.name, report.ending)).collect()
    }

    fn build(name: &'static str, text: &'static str) -> Stage {
        Stage::build(name, "", &[], 0, move || sh(text)(Length::USUAL))
    }

    #[test]
    fn stages_run_after_what_they_need_and_not_after_its_failure() {
        let stages = [
            build("good", "true"),
            build("bad", "false"),
            Stage::tests("passes", "", &["good"], sh("echo ok one")).takes(1),
            Stage::tests("fails", "", &["good"], sh("echo ok one; echo not ok two")).takes(1),
            Stage::tests("silent", "", &["good"], sh("true")).takes(1),
            Stage::tests("needs", "", &["good", "bad"], sh("echo ok one")).takes(1),
            Stage::tests("clock", "", &[], sh("test -s $FOREBAY_QUIET_CLOCK && echo ok $HANG_FACTOR")).takes(1),
        ];
        let expected = [
            ("good", Ending::Passed),
            ("bad", Ending::Failed),
            ("passes", Ending::Passed),
            ("fails", Ending::Failed),
            ("silent", Ending::Failed),
            ("needs", Ending::NeedFailed),
            ("clock", Ending::Passed),
        ];
        assert_eq!(endings(&stages, Lengths::All(Length::USUAL)), expected);
    }

    #[test]
    fn small_stages_leave_an_earlier_one_the_cores_that_it_waits_for() {
        let stages = [
            Stage::tests("first", "", &[], sh("true")).busy(0.5),
            Stage::tests("large", "", &[], sh("true")).busy(1.7),
            Stage::tests("small", "", &[], sh("true")).busy(0.5),
            Stage::tests("tiny", "", &[], sh("true")).busy(0.3),
        ];
        let mut run = Run::new(&stages, Lengths::All(Length::USUAL), 2, 6);
        let begin = |run: &mut Run<'_>| {
            let (index, length) = run.next()?;
            run.begin(index, length);
            Some(stages[index].name)
        };
        assert_eq!(begin(&mut run), Some("first"));
        assert_eq!(begin(&mut run), Some("tiny"), "it may run beside the large one, too");
        assert_eq!(begin(&mut run), None, "the small one would keep the large one waiting");
        run.end(0, Report::new(Ending::Passed));
        assert_eq!(begin(&mut run), Some("large"));
        assert_eq!(begin(&mut run), None);
        run.end(1, Report::new(Ending::Passed));
        assert_eq!(begin(&mut run), Some("small"));
    }

    #[test]
    fn a_budget_skips_what_does_not_fit_and_ends_what_is_not_over() {
        let stages = [
            build("good", "true"),
            Stage::tests("passes", "", &["good"], sh("echo ok one")).takes(0),
            Stage::tests("endless", "", &["good"], sh("echo ok one; sleep 1000; :")).takes(0),
            Stage::tests("failed", "", &["good"], sh("echo not ok one; sleep 1000; :")).takes(0),
            Stage::tests("long", "", &["good"], sh("echo ok one")).takes(1000),
            Stage::build("late", "", &["good"], 1, || anyhow::bail!("nobody needs it")),
            Stage::tests("later", "", &["late"], sh("echo ok one")).takes(1000),
        ];
        let expected = [
            ("good", Ending::Passed),
            ("passes", Ending::Passed),
            ("endless", Ending::CutOff),
            ("failed", Ending::Failed),
            ("long", Ending::Skipped),
            ("late", Ending::Skipped),
            ("later", Ending::Skipped),
        ];
        assert_eq!(endings(&stages, Lengths::Until(Instant::now() + Duration::from_secs(6))), expected);
    }
}
