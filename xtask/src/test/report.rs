//! Prints a test run: a line for each stage that ends, and the table at the end.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};

use super::stage::{Length, Stage};
use crate::shell::{self, bold, paint};

/// Lines of a failed stage's output that are repeated at the end.
const WHY_LINES: usize = 3;
/// Characters of each.
const WHY_CHARS: usize = 160;

/// Prints every stage with the seconds of its lengths.
pub(super) fn list(stages: &[Stage]) {
    println!("{}", bold("stage           quick  usual   soak"));
    for stage in stages {
        let takes = stage.takes;
        // What has no lengths is no part of a soak; what has no usual one is nothing else.
        let soak = if stage.has_lengths() { format!("{:.0} s", takes.soak) } else { String::new() };
        let usual = |seconds: f64| if stage.only_soak { String::new() } else { format!("{seconds:.0} s") };
        let (quick, usual) = (usual(takes.quick), usual(takes.usual));
        println!("{:<15} {quick:>5}  {usual:>5}  {soak:>5}  {}", stage.name, stage.title);
    }
}

/// Result of a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ending {
    Passed,
    Failed,
    /// Stage whose prerequisite has failed.
    NeedFailed,
    /// The budget had no time for it.
    Skipped,
    /// The budget was over while it ran, without a failure until then.
    CutOff,
}

/// Result of a stage with its counts and its time.
pub(super) struct Report {
    pub(super) ending: Ending,
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) time: Duration,
    /// CPU time of its processes, sampled: a little less than they took.
    pub(super) cpu: Duration,
    /// Length of a stage that has lengths.
    pub(super) length: Option<Length>,
    /// The last line of its output that begins with `ok`, without that word.
    pub(super) last: Option<String>,
    /// Tests that could not run on this machine, each with the reason.
    pub(super) left_out: Vec<String>,
    /// Reason of a failure, then the first lines of its output that name a failure.
    pub(super) why: Vec<String>,
}

impl Report {
    pub(super) fn new(ending: Ending) -> Self {
        Self {
            ending,
            passed: 0,
            failed: 0,
            time: Duration::ZERO,
            cpu: Duration::ZERO,
            length: None,
            last: None,
            left_out: Vec::new(),
            why: Vec::new(),
        }
    }

    /// Turns it into that of a failed stage, whose output was `text`.
    pub(super) fn fail(&mut self, reason: &str, text: &str) {
        self.ending = Ending::Failed;
        self.failed = self.failed.max(1);
        let lines = failures(text).into_iter().take(WHY_LINES);
        self.why = std::iter::once(reason).chain(lines).map(|line| line.chars().take(WHY_CHARS).collect()).collect();
    }
}

pub(super) fn passed(stage: &Stage, report: &Report) {
    let tests = if stage.counted { format!("{} passed", report.passed) } else { String::new() };
    let (name, title) = (stage.name, stage.title);
    let (time, cpu) = (shell::seconds(report.time), shell::seconds(report.cpu));
    println!("{} {name:<15} {title:<64} {tests:>12} {time:>9} {cpu:>9} CPU", paint("ok", "32"));
    for test in &report.left_out {
        println!("  {} {test}", paint("left out", "33"));
    }
}

pub(super) fn failed(stage: &Stage, report: &Report, reason: &str, log: &Path, text: &str) {
    println!("{} {:<14} {} ({})", paint("FAILED", "1;31"), stage.name, stage.title, shell::seconds(report.time));
    println!("  {reason}; the end of {}:", log.display());
    // What failed comes before how the log ends: a long log, truncated where it is shown, still names the test.
    for line in failures(text) {
        println!("  > {line}");
    }
    for line in shell::tail(log, 40).lines() {
        println!("  | {line}");
    }
}

pub(super) fn not_run(stage: &Stage) {
    println!("{} {:<14} {}: what it needs has failed", paint("FAILED", "1;31"), stage.name, stage.title);
}

pub(super) fn skipped(stage: &Stage) {
    println!("{} {:<14} {}: no time left", paint("skipped", "33"), stage.name, stage.title);
}

pub(super) fn cut_off(stage: &Stage, report: &Report) {
    let time = shell::seconds(report.time);
    println!("{} {:<14} {}: cut off by the budget after {time}", paint("skipped", "33"), stage.name, stage.title);
}

/// The lines of a failed stage's output that say what failed: a dozen at most, with the line after each `not ok`.
fn failures(text: &str) -> Vec<&str> {
    let failure = |line: &str| {
        line.starts_with("not ok ")
            || line.starts_with("error")
            || line.starts_with("Error: ")
            || line.contains("panicked at")
            || line.contains("timed out")
            || line.starts_with("fio: ")
            || line.starts_with("verify: ")
            || (line.starts_with("test ") && line.ends_with("FAILED"))
    };
    let after_panic = |line: &str| line.starts_with("note: ") || line.starts_with("stack backtrace:");
    let mut lines = text.lines().peekable();
    let mut told = Vec::new();
    while let Some(line) = lines.next() {
        if failure(line) {
            told.push(line);
            if let Some(next) = lines.peek().filter(|next| line.starts_with("not ok ") && !next.starts_with("ok ")) {
                told.push(next);
            }
            if line.contains("panicked at") {
                let message = lines.clone().take(2).take_while(|next| !next.is_empty() && !after_panic(next));
                told.extend(message.filter(|next| !failure(next)));
            }
        }
    }
    told.truncate(12);
    told
}

/// The last line that begins with `ok`, without that word.
pub(super) fn last_line(text: &str) -> Option<String> {
    text.lines().rev().find_map(|line| line.strip_prefix("ok ")).map(str::to_owned)
}

/// Returns the tests that say that they cannot run on this machine: lines that begin with `SKIPPED`.
pub(super) fn left_out(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_prefix("SKIPPED ")).map(str::to_owned).collect()
}

/// Counts the tests in a stage's output: cargo's summaries, and lines that begin with `ok` or `not ok`.
pub(super) fn count(text: &str) -> (u64, u64) {
    let (mut passed, mut failed) = (0, 0);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let number = |what: &str| -> u64 {
                let words: Vec<&str> = rest.split([' ', ';']).filter(|word| !word.is_empty()).collect();
                let at = words.iter().position(|word| *word == what);
                at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
            };
            passed += number("passed");
            failed += number("failed");
        } else if line.starts_with("ok ") {
            passed += 1;
        } else if line.starts_with("not ok ") {
            failed += 1;
        }
    }
    (passed, failed)
}

/// Prints why stages failed.
fn reasons(stages: &[Stage], reports: &[Report]) {
    for (stage, report) in stages.iter().zip(reports).filter(|(_, report)| !report.why.is_empty()) {
        println!("{} {}: {}", paint("FAILED", "1;31"), stage.name, report.why.join("\n  "));
    }
}

/// Prints the table, the reasons of failures and the closing line; an error if a stage failed, or if nothing was tested.
pub(super) fn summary(stages: &[Stage], reports: &[Report], time: Duration) -> Result<()> {
    println!("\n{}", bold("stage           passed  failed       time        CPU  length"));
    for (stage, report) in stages.iter().zip(reports) {
        let count = |number: u64| if stage.counted { number.to_string() } else { String::new() };
        let (passed, failed) = (count(report.passed), count(report.failed));
        let note = match report.ending {
            Ending::Passed => String::new(),
            Ending::Failed | Ending::NeedFailed => paint("  FAILED", "1;31"),
            Ending::Skipped => paint("  skipped", "33"),
            Ending::CutOff => paint("  cut off", "33"),
        };
        let (time, cpu, length) = (shell::seconds(report.time), shell::seconds(report.cpu), length(report.length));
        println!("{:<15} {passed:>6}  {failed:>6}  {time:>9}  {cpu:>9}  {length:<6}{note}", stage.name);
    }
    let verdict = Verdict::of(stages, reports);
    let cpu = reports.iter().map(|report| report.cpu).sum();
    let (time, cpu) = (shell::seconds(time), shell::seconds(cpu));
    println!("{:<15} {:>6}  {:>6}  {time:>9}  {cpu:>9}\n", "all", verdict.passed, verdict.failed);
    // Where only the end of a long output is shown, it must still name each failure.
    reasons(stages, reports);
    println!("{}", verdict.line());
    verdict.result(stages.len())
}

/// Prints what each stage of a soak did and found.
pub(super) fn soak(stages: &[Stage], reports: &[Report]) {
    println!("\n{}", bold("soak            what it did and found"));
    for (stage, report) in stages.iter().zip(reports).filter(|(stage, _)| stage.counted) {
        let found = match (report.ending, &report.last) {
            (Ending::Passed, Some(last)) => last.clone(),
            (Ending::Passed, None) => format!("{} passed", report.passed),
            _ => format!("{} passed, {} failed", report.passed, report.failed),
        };
        println!("{:<15} {found}", stage.name);
    }
}

/// Returns the part of a stage that was run, for the table.
fn length(length: Option<Length>) -> String {
    match length {
        None | Some(Length::USUAL) => String::new(),
        Some(Length::QUICK) => "quick".into(),
        Some(Length::Part(part)) => format!("{:.0} %", part * 100.0),
        Some(Length::Soak) => "soak".into(),
    }
}

/// A run as a whole.
struct Verdict {
    passed: u64,
    failed: u64,
    broken: usize,
    skipped: Vec<String>,
    /// Names of tests that could not run on this machine.
    left_out: Vec<String>,
}

impl Verdict {
    fn of(stages: &[Stage], reports: &[Report]) -> Self {
        let skipped = stages.iter().zip(reports).filter_map(|(stage, report)| match report.ending {
            Ending::Skipped if stage.counted => Some(stage.name.to_owned()),
            Ending::CutOff => Some(format!("{} (cut off)", stage.name)),
            _ => None,
        });
        let broken = |report: &&Report| matches!(report.ending, Ending::Failed | Ending::NeedFailed);
        Self {
            passed: reports.iter().map(|report| report.passed).sum(),
            failed: reports.iter().map(|report| report.failed).sum(),
            broken: reports.iter().filter(broken).count(),
            skipped: skipped.collect(),
            left_out: reports.iter().flat_map(|report| &report.left_out).map(|test| name_of(test)).collect(),
        }
    }

    /// The closing line.
    fn line(&self) -> String {
        let mut counts = format!("{} passed, {} failed", self.passed, self.failed);
        if !self.left_out.is_empty() {
            counts.push_str(&format!(
                ", {} left out on this machine: {}",
                self.left_out.len(),
                self.left_out.join(", ")
            ));
        }
        match self.skipped.len() {
            0 => counts,
            1 => format!("{counts}, 1 stage skipped for lack of time: {}", self.skipped[0]),
            number => format!("{counts}, {number} stages skipped for lack of time: {}", self.skipped.join(", ")),
        }
    }

    fn result(&self, stages: usize) -> Result<()> {
        if self.broken > 0 {
            bail!("{} of {stages} stages failed", self.broken);
        }
        if self.passed == 0 && !self.skipped.is_empty() {
            bail!("no test was run within the budget");
        }
        Ok(())
    }
}

/// Returns the name of a test that was left out, without the reason.
fn name_of(left_out: &str) -> String {
    left_out.split_once(": ").map_or(left_out, |(name, _)| name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted() {
        let text = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
            test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured\nok one\nnot ok two\nokay\n";
        assert_eq!(count(text), (16, 3));
        assert_eq!(last_line(text).as_deref(), Some("one"));
    }

    #[test]
    fn tests_that_cannot_run_here_are_named() {
        let text = "test one ... ok\nSKIPPED two: no loop device\ntest two ... ok\nSKIPPED three: no mount\n";
        assert_eq!(left_out(text), ["two: no loop device", "three: no mount"]);
        let stages = [Stage::tests("short", "", &[], |_| anyhow::bail!("not to be run"))];
        let report = Report { passed: 3, left_out: left_out(text), ..Report::new(Ending::Passed) };
        assert_eq!(
            Verdict::of(&stages, &[report]).line(),
            "3 passed, 0 failed, 2 left out on this machine: two, three"
        );
    }

    #[test]
    fn a_failed_stage_names_what_failed() {
        let text = "warning: unused\nok one\nnot ok two: it ended\n  input:  x\nok three\n\
            thread 'a' panicked at src/lib.rs:1:1:\nwhat\nwhere\nno more\n\
            thread 'b' panicked at src/lib.rs:2:2:\nwhy\nstack backtrace:\ntest a ... FAILED\ntest result: FAILED. 0 passed; 1 failed\n";
        let told = failures(text);
        assert_eq!(told[..2], ["not ok two: it ended", "  input:  x"]);
        assert_eq!(told[2..5], ["thread 'a' panicked at src/lib.rs:1:1:", "what", "where"]);
        assert_eq!(told[5..], ["thread 'b' panicked at src/lib.rs:2:2:", "why", "test a ... FAILED"]);
        let mut report = Report::new(Ending::Passed);
        report.fail("exit status: 1", text);
        assert_eq!((report.ending, report.failed), (Ending::Failed, 1));
        assert_eq!(report.why, ["exit status: 1", "not ok two: it ended", "  input:  x", told[2]]);
        report.fail("it hangs", &format!("error: {}", "long ".repeat(100)));
        assert_eq!(report.why[1].chars().count(), WHY_CHARS);
        assert!(failures("not ok\n".repeat(3).as_str()).is_empty() && failures(&"error\n".repeat(40)).len() == 12);
    }

    fn verdict(endings: [Ending; 3]) -> Verdict {
        let command = |_| anyhow::bail!("not to be run");
        let stages = [
            Stage::build("make", "", &[], 1, || anyhow::bail!("not to be run")),
            Stage::tests("short", "", &[], command),
            Stage::tests("long", "", &[], command),
        ];
        let mut reports = endings.map(Report::new);
        for (stage, report) in stages.iter().zip(&mut reports) {
            report.passed = u64::from(stage.counted && report.ending == Ending::Passed) * 7;
            report.failed = u64::from(stage.counted && report.ending == Ending::Failed);
        }
        Verdict::of(&stages, &reports)
    }

    #[test]
    fn the_closing_line_names_what_was_skipped() {
        let all = verdict([Ending::Passed; 3]);
        assert_eq!(all.line(), "14 passed, 0 failed");
        assert!(all.result(3).is_ok());
        let some = verdict([Ending::Passed, Ending::Passed, Ending::Skipped]);
        assert_eq!(some.line(), "7 passed, 0 failed, 1 stage skipped for lack of time: long");
        assert!(some.result(3).is_ok(), "what there was no time for is no failure");
        let cut = verdict([Ending::Passed, Ending::Passed, Ending::CutOff]);
        assert_eq!(cut.line(), "7 passed, 0 failed, 1 stage skipped for lack of time: long (cut off)");
        assert!(cut.result(3).is_ok());
    }

    #[test]
    fn a_failure_stays_one_and_nothing_tested_is_no_success() {
        assert!(verdict([Ending::Passed, Ending::Failed, Ending::Skipped]).result(3).is_err());
        assert!(verdict([Ending::Failed, Ending::NeedFailed, Ending::NeedFailed]).result(3).is_err());
        assert!(verdict([Ending::Passed, Ending::Skipped, Ending::CutOff]).result(3).is_err());
    }
}
