//! Stages that may notice a fault: the tests of a crate, or the simulator.

use std::fmt;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::tree::{Tree, folder};
use crate::quiet::Stopwatch;
use crate::shell;

/// A stage hangs when it takes this many times as long as without a fault, in quiet time...
const HANGS_AFTER: f64 = 6.0;
/// ... and at least this long.
const HANGS_AFTER_MIN: Duration = Duration::from_secs(30);
/// Longest that a stage may take without a fault.
const BASELINE_MAX: Duration = Duration::from_secs(900);
/// Address space of a stage in KiB: with a fault it may ask for all there is.
const MEMORY_MAX_KIB: u64 = 8_000_000;

/// Tests, or seeds of the simulator, that may notice a fault.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The unit tests of a crate.
    Lib(&'static str),
    /// The unit tests of a crate that is a program.
    Bin(&'static str),
    /// One subject of a crate's integration tests: crate, module of its program `it`, or program.
    Test(&'static str, &'static str),
    /// The simulator: its options, and how many seeds.
    Sim(&'static [&'static str], u32),
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stage::Lib(package) | Stage::Bin(package) => write!(f, "unit tests of {package}"),
            Stage::Test(package, subject) => write!(f, "{package}, tests of {subject}"),
            Stage::Sim(options, runs) => {
                f.write_str("sim")?;
                options.iter().try_for_each(|option| write!(f, " {option}"))?;
                write!(f, ", {runs} seeds")
            }
        }
    }
}

/// Result of a stage.
pub(super) enum Outcome {
    Passed { seconds: f64 },
    Noticed { by: String, seconds: f64 },
}

/// Returns the file with the output of the stage that ran last.
pub(super) fn log(tree: &Tree) -> PathBuf {
    tree.root().parent().expect("the copy lies in a folder").join("stage.log")
}

/// Program of a stage that has been built.
pub(super) struct Program {
    command: Command,
    log: PathBuf,
    pub(super) build_seconds: f64,
}

impl Stage {
    /// Builds what it runs from the copy.
    ///
    /// # Errors
    /// It does not compile: then it is no fault that a test could notice.
    pub(super) fn build(&self, tree: &Tree) -> Result<Program> {
        let begin = Instant::now();
        let mut cargo = cargo(tree);
        match self {
            Stage::Lib(package) => cargo.args(["test", "--no-run", "--message-format=json", "-p", package, "--lib"]),
            Stage::Bin(package) => cargo.args(["test", "--no-run", "--message-format=json", "-p", package, "--bins"]),
            // Which program has the subject shows in what is built.
            Stage::Test(package, _) => {
                cargo.args(["test", "--no-run", "--message-format=json", "-p", package, "--test", "*"])
            }
            Stage::Sim(..) => {
                let build = ["build", "--release", "--message-format=json", "-p", "forebay-sim", "--bin", "sim"];
                cargo.args(build)
            }
        };
        let text = shell::output(&mut cargo).context("it does not compile")?;
        let (executable, package) =
            self.executable(&text).with_context(|| format!("cargo built nothing for {self}"))?;
        // The shell gives way to the program, so that its id is that of the process group.
        let limited = format!("ulimit -v {MEMORY_MAX_KIB}; exec \"$@\"");
        let mut command = shell::command("sh");
        command.args(["-c", &limited, "sh"]).arg(executable);
        if let Stage::Sim(options, runs) = self {
            command.args(["--seed", "1", "--steps", "1", "--runs", &runs.to_string()]).args(*options);
        }
        if let Stage::Test(_, subject) = self
            && module(&package, subject).exists()
        {
            command.arg(format!("{subject}::"));
        }
        command.current_dir(&package).env("CARGO_MANIFEST_DIR", &package);
        Ok(Program { command, log: log(tree), build_seconds: begin.elapsed().as_secs_f64() })
    }
}

/// Returns the file of a module of a package's program of integration tests.
fn module(package: &Path, subject: &str) -> PathBuf {
    package.join("tests/it").join(subject).with_extension("rs")
}

impl Stage {
    /// Returns the program that cargo says it has built for this, and the folder of its package.
    fn executable(&self, messages: &str) -> Option<(PathBuf, PathBuf)> {
        messages.lines().find_map(|line| {
            let message: Value = serde_json::from_str(line).ok()?;
            let (target, test) = (&message["target"], message["profile"]["test"].as_bool()?);
            let kinds = target["kind"].as_array()?;
            let package = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
            let ours = match self {
                Stage::Lib(_) => test && kinds.iter().any(|kind| kind == "lib"),
                Stage::Bin(_) => test && kinds.iter().any(|kind| kind == "bin"),
                Stage::Test(_, subject) if module(&package, subject).exists() => test && target["name"] == "it",
                Stage::Test(_, subject) => test && target["name"] == *subject,
                Stage::Sim(..) => target["name"] == "sim",
            };
            let program = message["executable"].as_str().filter(|_| ours)?;
            Some((PathBuf::from(program), package))
        })
    }
}

/// Runs cargo in the copy, where it builds only what has changed, and quickly.
fn cargo(tree: &Tree) -> Command {
    let mut cargo = shell::cargo();
    cargo.current_dir(tree.root()).env("CARGO_TARGET_DIR", folder().join("build")).env("CARGO_INCREMENTAL", "1");
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    // What a fault leaves unused is no error.
    cargo.env("RUSTFLAGS", "--cap-lints=warn");
    cargo
}

impl Program {
    /// Runs it, until it fails or ends; `usual` is how many seconds it takes without a fault.
    pub(super) fn run(mut self, usual: Option<f64>) -> Result<Outcome> {
        let limit = match usual {
            Some(usual) => Duration::from_secs_f64(usual * HANGS_AFTER).max(HANGS_AFTER_MIN),
            None => BASELINE_MAX,
        };
        let file = File::create(&self.log)?;
        self.command.stdout(file.try_clone()?).stderr(file).process_group(0);
        let mut child = self.command.spawn().with_context(|| format!("cannot start {}", shell::show(&self.command)))?;
        let watch = Stopwatch::start();
        let ended = attend(&mut child, &self.log, limit, &watch);
        // All that it has started.
        let group = format!("-{}", child.id());
        let _ = shell::command("kill").args(["-KILL", "--", &group]).stderr(std::process::Stdio::null()).status();
        child.wait()?;
        let seconds = watch.wall().as_secs_f64();
        let by = match ended? {
            Ended::Alone(status) if status.success() => return Ok(Outcome::Passed { seconds }),
            Ended::Alone(status) => failure(&read(&self.log)).unwrap_or_else(|| status.to_string()),
            Ended::Failed(by) => by,
            Ended::Hung => format!("it hangs: not over after {:.0} s", limit.as_secs_f64()),
        };
        Ok(Outcome::Noticed { by, seconds })
    }
}

enum Ended {
    Alone(ExitStatus),
    /// A test has failed; the others are not waited for.
    Failed(String),
    Hung,
}

fn attend(child: &mut Child, log: &Path, limit: Duration, watch: &Stopwatch) -> Result<Ended> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Alone(status));
        }
        if let Some(by) = failure(&read(log)) {
            return Ok(Ended::Failed(by));
        }
        if watch.quiet() >= limit {
            return Ok(Ended::Hung);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn read(log: &Path) -> String {
    std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// Returns the first test that the output says has failed, or the simulator's seed.
fn failure(output: &str) -> Option<String> {
    output.lines().find_map(|line| {
        if let Some(name) = line.strip_suffix(" ... FAILED") {
            return Some(name.trim_start_matches("test ").to_owned());
        }
        let (seed, what) = line.strip_prefix("seed ")?.split_once(": ")?;
        seed.parse::<u64>().ok()?;
        let what: String = what.chars().take(90).collect();
        Some(format!("seed {seed}: {what}"))
    })
}

/// Refuses a list that names a stage which does not exist.
pub(super) fn check(stage: &Stage) -> Result<()> {
    let (package, file) = match stage {
        Stage::Lib(package) | Stage::Bin(package) => (package, None),
        Stage::Test(package, file) => (package, Some(file)),
        Stage::Sim(..) => return Ok(()),
    };
    let room = ["backend", "base", "bin", "front", "volume", "test"];
    let short = package.strip_prefix("forebay-").unwrap_or(package);
    let short = short.strip_suffix("-host").or(short.strip_suffix("-lab")).unwrap_or(short);
    // The crates of the fronts' initiators have the names of the fronts.
    let host = package.ends_with("-host");
    let folders = room.iter().filter(|room| !host || **room == "test").map(|room| shell::root().join(room).join(short));
    let Some(folder) = folders.into_iter().find(|folder| folder.join("Cargo.toml").is_file()) else {
        bail!("{stage}: there is no such crate");
    };
    match file {
        Some(subject)
            if !module(&folder, subject).is_file() && !folder.join(format!("tests/{subject}.rs")).is_file() =>
        {
            bail!("{stage}: there is no such file")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_found_in_the_output_of_tests_and_of_the_simulator() {
        let tests = "running 3 tests\ntest a ... ok\ntest one::b ... FAILED\ntest c ... FAILED\n";
        assert_eq!(failure(tests).as_deref(), Some("one::b"));
        assert_eq!(failure("seed 17: image vm0: lost\nmore").as_deref(), Some("seed 17: image vm0: lost"));
        assert_eq!(failure("running 1 test\ntest a ... ok\nseed: nothing\n"), None);
    }

    #[test]
    fn the_program_of_a_stage_is_told_from_others_that_are_built_for_it() {
        let built = |name: &str, kind: &str, test: bool| {
            serde_json::json!({
                "manifest_path": "/w/b/Cargo.toml",
                "target": { "name": name, "kind": [kind] },
                "profile": { "test": test },
                "executable": format!("/t/{kind}-{name}"),
            })
            .to_string()
        };
        let last = "{\"reason\":\"build-finished\"}".to_owned();
        let tests = [built("one", "test", true), built("load", "bin", false), last].join("\n");
        let found = Stage::Test("b", "one").executable(&tests);
        assert_eq!(found, Some((PathBuf::from("/t/test-one"), PathBuf::from("/w/b"))));
        assert_eq!(Stage::Lib("b").executable(&tests), None);
        let units = [built("b", "lib", true)].join("\n");
        assert!(Stage::Lib("b").executable(&units).is_some());
    }

    fn program(script: &str, name: &str) -> (shell::Scratch, Program) {
        let scratch = shell::Scratch::new(name).expect("a folder");
        let mut command = shell::command("sh");
        command.args(["-c", script]);
        let log = scratch.path().join("log");
        (scratch, Program { command, log, build_seconds: 0.0 })
    }

    #[test]
    fn a_stage_is_ended_when_a_test_of_it_has_failed() {
        let (_scratch, endless) = program("echo 'test x ... FAILED'; sleep 1000; :", "stage-failed");
        match endless.run(Some(1.0)).expect("it ran") {
            Outcome::Noticed { by, .. } => assert_eq!(by, "x"),
            Outcome::Passed { .. } => panic!("it failed"),
        }
        let (_scratch, good) = program("echo 'test x ... ok'", "stage-passed");
        assert!(matches!(good.run(Some(1.0)).expect("it ran"), Outcome::Passed { .. }));
        let (_scratch, bad) = program("exit 3", "stage-ended");
        assert!(matches!(bad.run(Some(1.0)).expect("it ran"), Outcome::Noticed { .. }));
    }
}
