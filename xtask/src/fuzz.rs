//! `cargo xtask fuzz`: the fuzz targets, built on a stable compiler with nothing to install.
//!
//! The flags are those of `cargo fuzz build --sanitizer none`: LLVM's coverage counters, without an address
//! sanitizer, which safe Rust gains little from and which needs a nightly compiler.  The folder is laid out as
//! cargo-fuzz wants it, so that `cargo fuzz run PROGRAM` works too, with FUZZ_TARGET in the environment.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shell::{self, Process};

const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

const PLATFORM: &str =
    if cfg!(target_arch = "aarch64") { "aarch64-unknown-linux-gnu" } else { "x86_64-unknown-linux-gnu" };

/// Arguments of `fuzz`.
#[derive(clap::Args)]
pub struct FuzzArguments {
    /// The target, or `all`; without one they are listed
    target: Option<String>,
    /// Time to run, in seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Runs one stored input once, and ends
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

/// Fuzz target, and the program that has it.
pub struct Target {
    /// Name, such as `nbd_request`.
    pub name: String,
    /// Program, with all targets of a crate.
    program: String,
}

/// Returns all targets.
///
/// # Errors
/// Errors of the file system.
pub fn targets() -> Result<Vec<Target>> {
    let mut targets = Vec::new();
    for file in std::fs::read_dir(shell::root().join("fuzz/fuzz_targets"))? {
        let path = file?.path();
        let program = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path)?;
        let names = text.lines().filter_map(|line| Some(line.trim().strip_prefix('"')?.split_once("\" => ")?.0));
        targets.extend(names.map(|name| Target { name: name.to_owned(), program: program.clone() }));
    }
    targets.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(targets)
}

/// Runs one target, or lists them.
pub fn run(arguments: &FuzzArguments) -> Result<()> {
    let known = targets()?;
    let Some(target) = &arguments.target else {
        known.iter().for_each(|target| println!("{}", target.name));
        return Ok(());
    };
    let names: Vec<&str> = known.iter().map(|target| target.name.as_str()).collect();
    let chosen: Vec<&Target> = known.iter().filter(|known| known.name == *target || target == "all").collect();
    let [first, ..] = chosen[..] else {
        bail!("there is no fuzz target {target}; there are: {}", names.join(", "));
    };
    shell::build(&mut build_command())?;
    if let Some(input) = &arguments.replay {
        let input = std::path::absolute(input)?;
        return shell::run(command(first).arg(input));
    }
    let logs = shell::target().join("fuzz-logs");
    let outcomes = run_all(&chosen, arguments.seconds, &logs)?;
    let mut failed = 0;
    for outcome in &outcomes {
        println!("{}", outcome.line);
        failed += u32::from(!outcome.passed);
    }
    if failed > 0 {
        bail!("{failed} of {} targets found something", outcomes.len());
    }
    Ok(())
}

/// The command that builds every target.
pub fn build_command() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target", PLATFORM]);
    build.env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", folder());
    build
}

fn folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => Path::new(&folder).join("fuzz"),
        None => shell::root().join("fuzz/target"),
    }
}

/// Returns the command that runs a target.
fn command(target: &Target) -> Command {
    let mut command = shell::command(folder().join(PLATFORM).join("release").join(&target.program));
    command.env("FUZZ_TARGET", &target.name);
    command
}

/// Result of one target.
pub struct Outcome {
    /// Set when it found nothing.
    pub passed: bool,
    /// One line for people; several where it found something.
    pub line: String,
}

/// Runs targets side by side, each for `seconds`; their output goes to `logs`.
pub fn run_all(targets: &[&Target], seconds: u64, logs: &Path) -> Result<Vec<Outcome>> {
    std::fs::create_dir_all(logs)?;
    let mut running = Vec::new();
    for &target in targets {
        let name = &target.name;
        let corpus = shell::root().join("fuzz/corpus").join(name);
        let seeds = shell::root().join("fuzz/seeds").join(name);
        let artifacts = shell::root().join("fuzz/artifacts").join(name);
        std::fs::create_dir_all(&corpus)?;
        std::fs::create_dir_all(&artifacts)?;
        let log = logs.join(format!("{name}.log"));
        // The log of an earlier run would be taken for this one's.
        let _ = std::fs::remove_file(&log);
        let mut command = command(target);
        command.arg(format!("-max_total_time={seconds}"));
        command.arg(format!("-artifact_prefix={}/", artifacts.display()));
        command.args(["-rss_limit_mb=2048", "-timeout=60", "-print_final_stats=1", "-verbosity=1"]).arg(&corpus);
        if seeds.is_dir() {
            command.arg(&seeds);
        }
        running.push((name, Process::start(&mut command, &log)?, log));
    }
    let patience = Duration::from_secs(seconds + 60);
    let mut outcomes = Vec::new();
    for (name, mut process, log) in running {
        let status = shell::wait_for(patience, || process.ended());
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        outcomes.push(outcome(name, status.is_some_and(|status| status.success()), &text, &log)?);
    }
    Ok(outcomes)
}

fn outcome(target: &str, passed: bool, text: &str, log: &Path) -> Result<Outcome> {
    let inputs = text.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:")).map(str::trim);
    if passed {
        let inputs = inputs.context("the fuzzer did not say how much it ran")?;
        let covered = text.lines().rev().find_map(|line| line.split_once("cov: ")?.1.split(' ').next());
        return Ok(Outcome { passed, line: format!("ok {target}: {inputs} inputs, {} edges", covered.unwrap_or("?")) });
    }
    let reproducer = text.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, path)| path);
    let reason = text.lines().find(|line| line.contains("panicked at") || line.contains("ERROR: libFuzzer"));
    Ok(Outcome {
        passed,
        line: format!(
            "not ok {target}: {}\n  input:  {}\n  replay: cargo xtask fuzz {target} --replay {}\n  log:    {}",
            reason.unwrap_or("it did not end"),
            reproducer.unwrap_or("none was written"),
            reproducer.unwrap_or("FILE"),
            log.display()
        ),
    })
}
