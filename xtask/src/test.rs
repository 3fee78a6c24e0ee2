//! `make test`: every test in stages, side by side where the machine allows, with a summary at the end; and the soak,
//! which runs the long ones at full length.

mod plan;
mod report;
mod run;
mod stage;
mod stages;

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use crate::shell;
use run::Lengths;
use stage::{Length, Stage};
use stages::stages;

/// Arguments of `test`.
#[derive(clap::Args)]
pub struct TestArguments {
    /// Only these stages, and the builds they need
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    only: Vec<String>,
    /// All but these stages
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    skip: Vec<String>,
    /// Fewer seeds, kills and seconds: for a quick look, not for a verdict
    #[arg(long, conflicts_with = "budget")]
    quick: bool,
    /// End within this many minutes: long stages are shortened as far as needed, then stages are skipped and named
    #[arg(long, value_name = "MINUTES")]
    budget: Option<f64>,
    /// Beginning of the budget, in Unix seconds (default: now)
    #[arg(long, value_name = "SECONDS", requires = "budget")]
    since: Option<u64>,
    /// List the stages with the seconds they take on a quiet machine of two cores, and run none
    #[arg(long)]
    list: bool,
}

/// Arguments of `soak`.
#[derive(clap::Args)]
pub struct SoakArguments {
    /// Only these stages, and the builds they need
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    only: Vec<String>,
    /// All but these stages
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    skip: Vec<String>,
}

/// Runs the stages.
pub fn run(arguments: &TestArguments) -> Result<()> {
    let mut stages = stages();
    if arguments.list {
        report::list(&stages);
        return Ok(());
    }
    stages.retain(|stage| !stage.only_soak);
    choose(&mut stages, &arguments.only, &arguments.skip)?;
    let lengths = match arguments.budget {
        Some(minutes) => Lengths::Until(budget_end(minutes, arguments.since)?),
        None if arguments.quick => Lengths::All(Length::QUICK),
        None => Lengths::All(Length::USUAL),
    };
    let (reports, time) = execute(&stages, lengths)?;
    report::summary(&stages, &reports, time)
}

/// Runs the stages that have lengths, at their full length, and prints what each did and found.
pub fn soak(arguments: &SoakArguments) -> Result<()> {
    let mut stages = stages();
    let short: Vec<&str> =
        stages.iter().filter(|stage| stage.counted && !stage.has_lengths()).map(|stage| stage.name).collect();
    for name in &arguments.only {
        if short.contains(&name.as_str()) {
            bail!("stage {name} has no full length; cargo xtask test --only {name} runs it");
        }
    }
    stages.retain(|stage| !short.contains(&stage.name));
    choose(&mut stages, &arguments.only, &arguments.skip)?;
    let (reports, time) = execute(&stages, Lengths::All(Length::Soak))?;
    report::soak(&stages, &reports);
    report::summary(&stages, &reports, time)
}

fn execute(stages: &[Stage], lengths: Lengths) -> Result<(Vec<report::Report>, Duration)> {
    let logs = shell::target().join("test-logs");
    std::fs::create_dir_all(&logs)?;
    println!("{} stages; their output goes to {}", stages.len(), logs.display());
    let begin = Instant::now();
    Ok((run::execute(stages, lengths, &logs)?, begin.elapsed()))
}

/// Returns when a budget ends that began at `since`, or now.
fn budget_end(minutes: f64, since: Option<u64>) -> Result<Instant> {
    ensure!(minutes > 0.0 && minutes < 1e6, "a budget is a number of minutes, not {minutes}");
    let gone = match since {
        None => Duration::ZERO,
        Some(seconds) => SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
            .ok()
            .with_context(|| format!("--since {seconds} lies in the future"))?,
    };
    Ok(Instant::now() + Duration::from_secs_f64(minutes * 60.0).saturating_sub(gone))
}

/// Leaves only what is asked for, and the builds it needs.
fn choose(stages: &mut Vec<Stage>, only: &[String], skip: &[String]) -> Result<()> {
    for name in only.iter().chain(skip) {
        if !stages.iter().any(|stage| stage.name == name) {
            let names: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
            bail!("there is no stage {name}; there are: {}", names.join(", "));
        }
    }
    let wanted = wanted(stages, only, skip);
    stages.retain(|stage| wanted.contains(&stage.name));
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_come_along_and_stay_away() {
        let all = stages();
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
    fn every_need_is_a_stage_that_comes_before() {
        let all = stages();
        for (index, stage) in all.iter().enumerate() {
            for need in stage.after {
                assert!(all[..index].iter().any(|other| other.name == *need && !other.counted), "{}", stage.name);
            }
            assert!(stage.takes.quick <= stage.takes.usual && stage.takes.usual <= stage.takes.soak, "{}", stage.name);
            assert!(stage.takes.soak > 0.0, "{} says how long it takes", stage.name);
        }
    }

    #[test]
    fn a_budget_counts_from_when_it_began() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let left = |minutes, since| budget_end(minutes, since).map(|end| end.saturating_duration_since(Instant::now()));
        let whole = left(70.0, None).expect("a budget");
        assert!(whole > Duration::from_secs(4190) && whole <= Duration::from_secs(4200));
        let rest = left(70.0, Some(now - 1200)).expect("a budget");
        assert!(rest > Duration::from_secs(2980) && rest <= Duration::from_secs(3001), "{rest:?}");
        assert_eq!(left(1.0, Some(now - 1200)).expect("a budget"), Duration::ZERO);
        assert!(left(70.0, Some(now + 1000)).is_err() && left(0.0, None).is_err() && left(f64::NAN, None).is_err());
    }
}
