//! `make test`: every test in stages, side by side where the machine allows, with a summary at the end.

mod stages;

use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::shell::{self, bold, paint};
use stages::{Stage, stages};

/// What `test` takes.
#[derive(clap::Args)]
pub struct TestArguments {
    /// Only these stages, and the builds they need
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    only: Vec<String>,
    /// All but these stages
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    skip: Vec<String>,
    /// Fewer seeds, kills and seconds: for a quick look, not for a verdict
    #[arg(long)]
    quick: bool,
    /// Names the stages, and runs none
    #[arg(long)]
    list: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Waiting,
    Running,
    Passed,
    Failed,
    /// Something it needs has failed.
    Left,
}

struct Report {
    state: State,
    passed: u64,
    failed: u64,
    time: Duration,
}

/// Runs the stages.
pub fn run(arguments: &TestArguments) -> Result<()> {
    let mut stages = stages(arguments.quick);
    for name in arguments.only.iter().chain(&arguments.skip) {
        if !stages.iter().any(|stage| stage.name == name) {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
            bail!("there is no stage {name}; there are: {}", names.join(", "));
        }
    }
    if arguments.list {
        for stage in &stages {
            println!("{:<14} {}", stage.name, stage.title);
        }
        return Ok(());
    }
    let wanted = wanted(&stages, &arguments.only, &arguments.skip);
    stages.retain(|stage| wanted.contains(&stage.name));
    let logs = shell::target().join("test-logs");
    std::fs::create_dir_all(&logs)?;
    println!("{} stages; their output goes to {}", stages.len(), logs.display());
    let begin = Instant::now();
    let results = execute(&stages, &logs);
    summary(&stages, &results, begin.elapsed())
}

fn wanted(stages: &[Stage], only: &[String], skip: &[String]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = stages
        .iter()
        .map(|stage| stage.name)
        .filter(|name| only.is_empty() || only.iter().any(|other| other == name))
        .filter(|name| !skip.iter().any(|other| other == name))
        .collect();
    // A build that nothing needs any more is left out; one that is needed comes along.
    if only.is_empty() {
        let needed = |build: &str| {
            let users = stages.iter().filter(|stage| names.contains(&stage.name));
            users.into_iter().any(|stage| stage.after.contains(&build))
        };
        let idle: Vec<&str> =
            stages.iter().filter(|stage| !stage.counted && !needed(stage.name)).map(|stage| stage.name).collect();
        names.retain(|name| !idle.contains(name));
    }
    let mut index = 0;
    while let Some(&name) = names.get(index) {
        names.extend(stages.iter().filter(|stage| stage.name == name).flat_map(|stage| stage.after));
        index += 1;
    }
    names
}

/// Runs everything whose needs are met, as long as cores are free.
fn execute(stages: &[Stage], logs: &Path) -> Vec<Report> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from).max(2);
    let waiting = || Report { state: State::Waiting, passed: 0, failed: 0, time: Duration::ZERO };
    let shared = Mutex::new(stages.iter().map(|_| waiting()).collect::<Vec<_>>());
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        let mut results = shared.lock().expect("no stage panics");
        loop {
            leave_out(stages, &mut results);
            let busy: usize = running(stages, &results);
            let next = (0..stages.len()).find(|&index| {
                results[index].state == State::Waiting
                    && ready(&stages[index], stages, &results)
                    && (stages[index].weight == 0 || busy + stages[index].weight <= cores)
            });
            match next {
                Some(index) => {
                    results[index].state = State::Running;
                    let (shared, changed) = (&shared, &changed);
                    scope.spawn(move || {
                        let result = one(&stages[index], &logs.join(format!("{}.log", stages[index].name)));
                        shared.lock().expect("no stage panics")[index] = result;
                        changed.notify_all();
                    });
                }
                None if results.iter().all(|result| !matches!(result.state, State::Waiting | State::Running)) => break,
                None => results = changed.wait(results).expect("no stage panics"),
            }
        }
    });
    shared.into_inner().expect("no stage panics")
}

fn running(stages: &[Stage], results: &[Report]) -> usize {
    let of = |(stage, result): (&Stage, &Report)| if result.state == State::Running { stage.weight } else { 0 };
    stages.iter().zip(results).map(of).sum()
}

fn ready(stage: &Stage, stages: &[Stage], results: &[Report]) -> bool {
    stage.after.iter().all(|need| {
        stages.iter().zip(results).any(|(other, result)| other.name == *need && result.state == State::Passed)
    })
}

/// Marks what can no longer run, because what it needs has failed.
fn leave_out(stages: &[Stage], results: &mut [Report]) {
    for index in 0..stages.len() {
        let lost = stages[index].after.iter().any(|need| {
            stages
                .iter()
                .zip(results.iter())
                .any(|(other, result)| other.name == *need && matches!(result.state, State::Failed | State::Left))
        });
        if lost && results[index].state == State::Waiting {
            results[index].state = State::Left;
            results[index].failed = u64::from(stages[index].counted);
            println!("{} {:<12} {}: not run", paint("FAILED", "1;31"), stages[index].name, stages[index].title);
        }
    }
}

fn one(stage: &Stage, log: &PathBuf) -> Report {
    let begin = Instant::now();
    let ended = (stage.command)().and_then(|mut command| {
        let file = std::fs::File::create(log)?;
        Ok(command.stdout(file.try_clone()?).stderr(file).status()?)
    });
    let time = begin.elapsed();
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let (passed, mut failed) = if stage.counted { count(&text) } else { (0, 0) };
    let good = matches!(&ended, Ok(status) if status.success()) && failed == 0 && (passed > 0 || !stage.counted);
    if good {
        let tests = if stage.counted { format!("{passed} passed") } else { String::new() };
        println!(
            "{} {:<12} {:<38} {tests:>14} {:>9}",
            paint("ok", "32"),
            stage.name,
            stage.title,
            shell::seconds(time)
        );
        return Report { state: State::Passed, passed, failed, time };
    }
    failed = failed.max(1);
    println!("{} {:<12} {} ({})", paint("FAILED", "1;31"), stage.name, stage.title, shell::seconds(time));
    match ended {
        Ok(status) => println!("  {status}; the end of {}:", log.display()),
        Err(error) => println!("  {error:#}"),
    }
    // What failed comes before how the log ends: a long log, cut short by whoever shows it, still names the test.
    for line in telling(&text) {
        println!("  > {line}");
    }
    for line in shell::tail(log, 40).lines() {
        println!("  | {line}");
    }
    Report { state: State::Failed, passed, failed, time }
}

/// The lines of a failed stage's output that say what failed: a dozen at most, with the line after each `not ok`.
fn telling(text: &str) -> Vec<&str> {
    let failure = |line: &str| {
        line.starts_with("not ok ")
            || line.starts_with("error")
            || line.starts_with("Error: ")
            || line.contains("panicked at")
            || line.contains("timed out")
            || (line.starts_with("test ") && line.ends_with("FAILED"))
    };
    let mut lines = text.lines().peekable();
    let mut told = Vec::new();
    while let Some(line) = lines.next() {
        if failure(line) {
            told.push(line);
            if let Some(next) = lines.peek().filter(|next| line.starts_with("not ok ") && !next.starts_with("ok ")) {
                told.push(next);
            }
        }
    }
    told.truncate(12);
    told
}

/// How many tests a stage's output tells of: cargo's summaries, and lines that begin with `ok` or `not ok`.
fn count(text: &str) -> (u64, u64) {
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

fn summary(stages: &[Stage], results: &[Report], time: Duration) -> Result<()> {
    println!("\n{}", bold("stage          passed  failed      time"));
    let (mut passed, mut failed, mut broken) = (0, 0, 0);
    for (stage, result) in stages.iter().zip(results) {
        passed += result.passed;
        failed += result.failed;
        broken += u64::from(result.state != State::Passed);
        let count = |number: u64| if stage.counted { number.to_string() } else { String::new() };
        println!(
            "{:<14} {:>6}  {:>6}  {:>8}{}",
            stage.name,
            count(result.passed),
            count(result.failed),
            shell::seconds(result.time),
            if result.state == State::Passed { String::new() } else { paint("  FAILED", "1;31") }
        );
    }
    println!("{:<14} {passed:>6}  {failed:>6}  {:>8}\n", "all", shell::seconds(time));
    println!("{passed} passed, {failed} failed");
    if broken > 0 {
        bail!("{broken} of {} stages failed", stages.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted() {
        let text = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n\
            test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured\nok one\nnot ok two\nokay\n";
        assert_eq!(count(text), (16, 3));
    }

    #[test]
    fn a_failed_stage_names_what_failed() {
        let text = "warning: unused\nok one\nnot ok two: it ended\n  input:  x\nok three\n\
            thread 'a' panicked at src/lib.rs:1:1:\ntest a ... FAILED\ntest result: FAILED. 0 passed; 1 failed\n";
        let told = telling(text);
        assert_eq!(told[..2], ["not ok two: it ended", "  input:  x"]);
        assert_eq!(told[2..], ["thread 'a' panicked at src/lib.rs:1:1:", "test a ... FAILED"]);
        assert!(telling("not ok\n".repeat(3).as_str()).is_empty() && telling(&"error\n".repeat(40)).len() == 12);
    }

    #[test]
    fn builds_come_along_and_stay_away() {
        let all = stages(true);
        let mut only = wanted(&all, &["kill".into()], &[]);
        only.sort_unstable();
        assert_eq!(only, ["build", "kill"]);
        let mut skip: Vec<String> = vec!["fuzz".into()];
        let guests = all.iter().filter(|stage| stage.after.contains(&"guest-kernel"));
        skip.extend(guests.map(|stage| stage.name.to_owned()));
        let without = wanted(&all, &[], &skip);
        assert!(!without.contains(&"build-fuzz") && !without.contains(&"guest-kernel") && without.contains(&"build"));
    }

    #[test]
    fn every_need_is_a_stage() {
        let all = stages(false);
        for stage in &all {
            assert!(stage.after.iter().all(|need| all.iter().any(|other| other.name == *need)), "{}", stage.name);
        }
    }
}
