//! Results of planted faults: lines, a table, a page of the documentation.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::list::{AREAS, Mutant};
use super::tree::folder;
use crate::shell;

/// The page that `--document` writes.
const PAGE: &str = "docs/testing/mutants.md";
/// The results on the page, for the next `--document`: a fresh checkout has no others.
const PAGE_RESULTS: &str = "docs/testing/mutants.json";

/// Format of the results.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    Text,
    Json,
}

/// Verdict on a planted fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Noticed,
    Survived,
}

/// Result of one fault.
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    /// The stage that noticed it.
    pub(super) stage: Option<String>,
    /// The test, or the seed.
    pub(super) by: String,
    /// Seconds that the stages ran until then.
    pub(super) seconds: f64,
    /// Seconds that they took to build.
    pub(super) build: f64,
    /// The commit that it was planted in, and `+` where the source had changes beside it.
    pub(super) commit: String,
}

impl Finding {
    fn json(&self, mutant: &Mutant) -> Value {
        json!({
            "id": mutant.id,
            "area": mutant.area,
            "fault": mutant.fault,
            "file": mutant.file,
            "noticed": self.verdict == Verdict::Noticed,
            "stage": self.stage,
            "by": self.by,
            "seconds": (self.seconds * 10.0).round() / 10.0,
            "build_seconds": (self.build * 10.0).round() / 10.0,
            "equivalent": mutant.equivalent,
            "commit": self.commit,
            "key": mutant.key(),
        })
    }
}

/// Returns one line on the result of a fault.
pub(super) fn line(mutant: &Mutant, finding: &Finding) -> String {
    let times = format!("{:.1} s, built in {:.0} s", finding.seconds, finding.build);
    match (&finding.stage, mutant.equivalent) {
        (Some(stage), None) => {
            format!("{} {}: {stage}: {} ({times})", shell::paint("noticed", "32"), mutant.id, finding.by)
        }
        (Some(stage), Some(_)) => {
            let text = "noticed, and said to be equivalent";
            format!("{} {}: {stage}: {} ({times})", shell::paint(text, "1;31"), mutant.id, finding.by)
        }
        (None, Some(_)) => format!("{} {} ({times})", shell::paint("equivalent", "33"), mutant.id),
        (None, None) => format!("{} {}: {} ({times})", shell::paint("SURVIVED", "1;31"), mutant.id, mutant.fault),
    }
}

/// Prints the list.
pub(super) fn list(wanted: &[&Mutant], format: Format) -> Result<()> {
    if format == Format::Json {
        let of = |mutant: &&Mutant| {
            let stages: Vec<String> = mutant.stages.iter().map(ToString::to_string).collect();
            json!({ "id": mutant.id, "area": mutant.area, "fault": mutant.fault, "file": mutant.file,
                "stages": stages, "equivalent": mutant.equivalent, "key": mutant.key() })
        };
        println!("{}", serde_json::to_string_pretty(&wanted.iter().map(of).collect::<Vec<_>>())?);
        return Ok(());
    }
    for mutant in wanted {
        println!("{:<9} {:<34} {}", mutant.area, mutant.id, mutant.fault);
    }
    println!("{} faults", wanted.len());
    Ok(())
}

/// Prints the results.
pub(super) fn print(wanted: &[&Mutant], findings: &[Finding], format: Format) -> Result<()> {
    if format == Format::Json {
        let all: Vec<Value> = wanted.iter().zip(findings).map(|(mutant, finding)| finding.json(mutant)).collect();
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    println!("\n{:<9} {:>7} {:>8} {:>10} {:>9}", "area", "planted", "noticed", "equivalent", "survived");
    for area in AREAS {
        let of_area = || wanted.iter().zip(findings).filter(|(mutant, _)| mutant.area == area);
        let count = |which: &dyn Fn(&Mutant, &Finding) -> bool| of_area().filter(|(m, f)| which(m, f)).count();
        let planted = count(&|_, _| true);
        if planted > 0 {
            let noticed = count(&|_, finding| finding.verdict == Verdict::Noticed);
            let equivalent = count(&|m, f| f.verdict == Verdict::Survived && m.equivalent.is_some());
            println!("{area:<9} {planted:>7} {noticed:>8} {equivalent:>10} {:>9}", planted - noticed - equivalent);
        }
    }
    for (mutant, finding) in wanted.iter().zip(findings).filter(|(_, finding)| finding.verdict == Verdict::Survived) {
        println!("{}", line(mutant, finding));
    }
    Ok(())
}

/// Results by the id of the fault.
type Results = BTreeMap<String, Value>;

/// Reads results from a file; none when it is not there.
fn results(path: &Path) -> Result<Results> {
    let what = || format!("cannot read the results of planted faults in {}", path.display());
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).with_context(what),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Results::new()),
        Err(error) => Err(error).with_context(what),
    }
}

fn write_results(path: &Path, results: &Results) -> Result<()> {
    let text = serde_json::to_string_pretty(results)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Path of the results of runs in this checkout.
fn own_results() -> PathBuf {
    folder().join("results.json")
}

/// Stores the result of a fault for the page.
pub(super) fn keep(mutant: &Mutant, finding: &Finding) -> Result<()> {
    let mut all = results(&own_results())?;
    all.insert(mutant.id.to_owned(), finding.json(mutant));
    write_results(&own_results(), &all)
}

/// Writes the page from the last result of each fault.
pub(super) fn document(all: &[Mutant]) -> Result<()> {
    let mut kept = results(&shell::root().join(PAGE_RESULTS))?;
    kept.extend(results(&own_results())?);
    kept.retain(|id, _| all.iter().any(|mutant| mutant.id == id));
    let missing: Vec<&str> = all
        .iter()
        .filter(|mutant| kept.get(mutant.id).is_none_or(|result| result["key"] != mutant.key()))
        .map(|mutant| mutant.id)
        .collect();
    if !missing.is_empty() {
        bail!(
            "no result of these faults as they are now: {}; run `cargo xtask mutants --only` with them",
            missing.join(",")
        );
    }
    let path = shell::root().join(PAGE);
    std::fs::create_dir_all(path.parent().context("the page lies in a folder")?)?;
    std::fs::write(&path, page(all, &kept)?).with_context(|| format!("cannot write {}", path.display()))?;
    write_results(&shell::root().join(PAGE_RESULTS), &kept)?;
    println!("{}", path.display());
    Ok(())
}

fn page(all: &[Mutant], kept: &BTreeMap<String, Value>) -> Result<String> {
    let mut out = String::from(HEAD);
    let mut commits: BTreeMap<&str, usize> = BTreeMap::new();
    for result in kept.values() {
        *commits.entry(result["commit"].as_str().unwrap_or("an older one")).or_default() += 1;
    }
    let commits: Vec<String> = commits.iter().map(|(commit, count)| format!("{commit} ({count})")).collect();
    writeln!(out, "\nCommits that the faults were planted in, with how many: {}.", commits.join(", "))?;
    for area in AREAS {
        writeln!(out, "\n## {area}\n\n| fault | file | noticed by | after |\n|---|---|---|--:|")?;
        for mutant in all.iter().filter(|mutant| mutant.area == area) {
            let result = &kept[mutant.id];
            let text = |name: &str| result[name].as_str().unwrap_or_default().replace('|', "\\|");
            let by = match (result["noticed"].as_bool(), mutant.equivalent) {
                (Some(true), _) if text("stage").starts_with("sim") => format!("{}: {}", text("stage"), text("by")),
                (Some(true), _) => format!("{}: `{}`", text("stage"), text("by")),
                (_, Some(reason)) => format!("nothing can: {reason}"),
                _ => "**nothing**".to_owned(),
            };
            let seconds = result["seconds"].as_f64().unwrap_or_default();
            writeln!(out, "| `{}`: {} | {} | {by} | {seconds:.1} s |", mutant.id, mutant.fault, mutant.file)?;
        }
    }
    Ok(out)
}

const HEAD: &str = "# Planted faults

`cargo xtask mutants` plants each fault of a kept list (`xtask/src/mutants/list`) into a copy of the source, builds the
test stages that should notice it, the cheapest first, and runs them until one does. It fails when a fault survives that
the list does not declare equivalent, or when one is noticed that it does.

- Faults are planted one at a time, in `target/mutants/tree`, which has its own build folder beside it: the working tree
  is not changed, and only what a fault changes is rebuilt.
- Every stage runs once without a fault first, and must pass.
- A stage that takes six times as long as without a fault, and 30 s at least, is stopped; the fault counts as noticed.
  Its processes are ended as a group. Its address space is limited to 8 GB.
- `--only ID,...` and `--area NAME` choose; `--list` lists; `--format json` is for programs. `--document` writes this page
  from the last result of each fault, and those results into `mutants.json` beside it.
- `cargo xtask check` verifies that every fault can still be planted: its text must be in its file exactly once.

The tables have the last result of each fault, of runs of one area after the other on a machine of two cores that other
programs used too, with unit and integration tests in debug builds and the simulator in release. *After* counts the
seconds of all stages that ran until one noticed the fault.
";
