//! `cargo xtask mutants`: faults that are planted one at a time into a copy of the source, to see which stage notices.
//!
//! A fault that nothing notices is a hole in the tests.  The list is kept in `list`: what the fault is, which text it
//! replaces, and which stages are tried, the cheapest first.

mod list;
mod report;
mod stage;
mod tree;

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

use crate::shell;
use list::Mutant;
use report::{Finding, Format, Verdict};
use stage::{Outcome, Stage};
use tree::Tree;

/// Least number of faults on the list.
const FAULTS_MIN: usize = 60;

/// Arguments of `mutants`.
#[derive(clap::Args)]
pub struct MutantsArguments {
    /// Plant only these, by id
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Plant only those of these areas: writelog, replication, store, image, rados, fronts, access
    #[arg(long, value_delimiter = ',')]
    area: Vec<String>,
    /// List the faults and plant none
    #[arg(long)]
    list: bool,
    /// Format of the result
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Plant none; write docs/testing/mutants.md from the last result of each fault
    #[arg(long)]
    document: bool,
}

/// Plants the faults that were asked for, one after the other.
pub fn run(arguments: &MutantsArguments) -> Result<()> {
    let all = list::all();
    check_list(&all)?;
    if arguments.document {
        return report::document(&all);
    }
    let wanted = select(&all, arguments)?;
    if arguments.list {
        return report::list(&wanted, arguments.format);
    }
    let tree = Tree::prepare()?;
    let baseline = baseline(&tree, &wanted)?;
    let mut findings = Vec::new();
    for (number, mutant) in wanted.iter().enumerate() {
        let finding = plant(&tree, mutant, &baseline).with_context(|| format!("fault {}", mutant.id))?;
        eprintln!("{:>3}/{} {}", number + 1, wanted.len(), report::line(mutant, &finding));
        report::keep(mutant, &finding)?;
        findings.push(finding);
    }
    report::print(&wanted, &findings, arguments.format)?;
    let wrong: Vec<&str> = wanted
        .iter()
        .zip(&findings)
        .filter(|(mutant, finding)| (finding.verdict == Verdict::Survived) != mutant.equivalent.is_some())
        .map(|(mutant, _)| mutant.id)
        .collect();
    if !wrong.is_empty() {
        bail!(
            "not as the list says: {}. A fault that survives needs a test that notices it, or a reason in the list why \
             nothing can; one that is noticed has no such reason",
            wrong.join(", ")
        );
    }
    Ok(())
}

/// Checks that every fault of the list can still be planted: `cargo xtask check` calls it.
pub fn check() -> Result<()> {
    check_list(&list::all())
}

fn check_list(all: &[Mutant]) -> Result<()> {
    let mut wrong = Vec::new();
    if all.len() < FAULTS_MIN {
        wrong.push(format!("the list has {} faults, and should have {FAULTS_MIN} at least", all.len()));
    }
    let mut ids = BTreeMap::new();
    for mutant in all {
        if ids.insert(mutant.id, ()).is_some() {
            wrong.push(format!("{}: two faults have this id", mutant.id));
        }
        let path = shell::root().join(mutant.file);
        match std::fs::read_to_string(&path) {
            Ok(text) => wrong.extend(mutant.apply(&text).err().map(|error| format!("{error:#}"))),
            Err(error) => wrong.push(format!("{}: {}: {error}", mutant.id, mutant.file)),
        }
        wrong.extend(mutant.stages.iter().filter_map(|stage| stage::check(stage).err()).map(|error| error.to_string()));
        if mutant.stages.is_empty() {
            wrong.push(format!("{}: no stage is tried", mutant.id));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("the list of planted faults (xtask/src/mutants/list) is out of date:\n{}", wrong.join("\n"))
}

fn select<'a>(all: &'a [Mutant], arguments: &MutantsArguments) -> Result<Vec<&'a Mutant>> {
    if let Some(unknown) = arguments.only.iter().find(|id| !all.iter().any(|mutant| mutant.id == **id)) {
        bail!("no fault has the id {unknown}: `cargo xtask mutants --list` names them");
    }
    if let Some(unknown) = arguments.area.iter().find(|area| !list::AREAS.contains(&area.as_str())) {
        bail!("no area is called {unknown}; there are {}", list::AREAS.join(", "));
    }
    let named = |names: &[String], name: &str| names.is_empty() || names.iter().any(|other| other == name);
    let wanted = all.iter().filter(|mutant| named(&arguments.only, mutant.id) && named(&arguments.area, mutant.area));
    Ok(wanted.collect())
}

/// Runs every stage that is needed once without a fault; returns how many seconds each took.
fn baseline(tree: &Tree, wanted: &[&Mutant]) -> Result<BTreeMap<Stage, f64>> {
    let mut seconds = BTreeMap::new();
    let mut stages: Vec<Stage> = wanted.iter().flat_map(|mutant| mutant.stages).copied().collect();
    stages.sort_unstable();
    stages.dedup();
    for (number, stage) in stages.iter().enumerate() {
        eprint!("without a fault, {}/{}: {} ... ", number + 1, stages.len(), stage);
        let program = stage.build(tree)?;
        match program.run(None)? {
            Outcome::Passed { seconds: took } => {
                eprintln!("{took:.1} s");
                seconds.insert(*stage, took);
            }
            Outcome::Noticed { by, .. } => {
                eprintln!("failed");
                bail!("{stage} fails without a fault ({by}); its output is in {}", stage::log(tree).display());
            }
        }
    }
    Ok(seconds)
}

/// Plants one fault, and tries its stages until one notices.
fn plant(tree: &Tree, mutant: &Mutant, baseline: &BTreeMap<Stage, f64>) -> Result<Finding> {
    let planted = tree.plant(mutant)?;
    let mut finding = Finding {
        verdict: Verdict::Survived,
        stage: None,
        by: String::new(),
        seconds: 0.0,
        build: 0.0,
        commit: tree.commit().to_owned(),
    };
    for stage in mutant.stages {
        let program = stage.build(tree)?;
        finding.build += program.build_seconds;
        let usual = baseline.get(stage).copied().unwrap_or_default();
        match program.run(Some(usual))? {
            Outcome::Passed { seconds } => finding.seconds += seconds,
            Outcome::Noticed { by, seconds } => {
                finding.seconds += seconds;
                (finding.verdict, finding.stage, finding.by) = (Verdict::Noticed, Some(stage.to_string()), by);
                break;
            }
        }
    }
    planted.undo()?;
    Ok(finding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_of_the_list_can_be_planted() {
        check().expect("a list that is up to date");
    }

    #[test]
    fn a_text_that_is_not_there_once_is_refused() {
        let mutant = Mutant::new("x", "a fault", "a.rs", "one", "two", &[Stage::Lib("a")]);
        assert_eq!(mutant.apply("zero one three").expect("there once"), "zero two three");
        assert!(mutant.apply("one one").is_err(), "which of them is meant?");
        assert!(mutant.apply("nothing").is_err());
        assert_eq!(mutant.nth(1).apply("one one").expect("the second"), "one two");
    }

    #[test]
    fn areas_and_ids_that_are_not_there_are_refused() {
        let all = list::all();
        let arguments = |only: &[&str], area: &[&str]| MutantsArguments {
            only: only.iter().map(ToString::to_string).collect(),
            area: area.iter().map(ToString::to_string).collect(),
            list: false,
            format: Format::Text,
            document: false,
        };
        assert!(select(&all, &arguments(&["no-such-fault"], &[])).is_err());
        assert!(select(&all, &arguments(&[], &["no-such-area"])).is_err());
        for area in list::AREAS {
            assert!(!select(&all, &arguments(&[], &[area])).expect("an area").is_empty(), "{area}");
        }
        let one = select(&all, &arguments(&[all[0].id], &[])).expect("an id");
        assert_eq!(one.len(), 1);
    }
}
