//! The kernels against other people's: `test/peers` runs the race, and its values become tables and pictures here.

use std::process::Command;

use anyhow::{Context, Result, bail};

use super::plot::{self, Line};
use super::report::{self, Case, Series, Side};
use super::{Effort, median};
use crate::shell;

/// One value that the race printed.
struct Value {
    group: String,
    case: String,
    goal: f64,
    series: String,
    side: Side,
    rate: f64,
}

/// Erasure coding.
pub fn ec(effort: &Effort, dry_run: bool) -> Result<()> {
    let values = run("ec", effort)?;
    let mut cases = cases(&values, &["ec"]);
    let tiers = self::cases(&values, &["tiers"]);
    let lines: Vec<String> = [report::ratio_lines("ec", &cases), report::ratio_lines("ec-tiers", &tiers)].concat();
    show(&[&cases, &tiers], &lines);
    if dry_run {
        return Ok(());
    }
    let method = "One core. GB/s of data encoded, or of chunks read to rebuild; `fused` also gives the CRC32C of every \
        chunk. *Cached*: chunks of 16 KiB, the same stripe over and over. *Memory*: chunks of 1 MiB, stripes that go \
        round in 256 MiB. *Aligned*: every chunk begins at a page; *skewed*: each 320 bytes further into its page than \
        the one before. The peer is the newest ISA-L that a crate vendors, on the tier it picks by itself.";
    let pictures = [
        ("ec-shapes", "Encoding by shape: chunks of 16 KiB, cached, GB/s of data", "shapes", "k/m"),
        ("ec-blocks", "Encoding 8/3 by chunk size, one stripe over and over, GB/s of data", "blocks", "chunk"),
    ];
    pages("ec", "Erasure coding beside ISA-L", method, &mut cases, &tiers, &lines, &values, &pictures)
}

/// CRC32C.
pub fn crc32c(effort: &Effort, dry_run: bool) -> Result<()> {
    let mut values = run("crc32c", effort)?;
    let mut cases = cases(&values, &["crc32c"]);
    let lines = ratio_lines("crc32c", &cases);
    show(&[&cases], &lines);
    if dry_run {
        return Ok(());
    }
    // The plots take the sizes of a case's name for their axis.
    for value in &mut values {
        for prefix in ["hot ", "cold ", "copy cold "] {
            if let Some(size) = value.case.strip_prefix(prefix)
                && !size.contains("vs")
            {
                value.group = prefix.trim().to_owned();
                value.case = size.to_owned();
                break;
            }
        }
    }
    let method = "One core, GB/s. *Hot*: the same buffer over and over. *Cold*: buffers from 512 MiB in an order that no \
        prefetcher knows. *Copy*: copying and checksumming, against `memcpy` and then the best checksum.";
    let pictures = [
        ("crc32c-hot", "CRC32C of hot buffers, GB/s", "hot", "bytes"),
        ("crc32c-cold", "CRC32C of cold buffers, GB/s", "cold", "bytes"),
        ("crc32c-copy", "Copy and CRC32C of cold buffers, GB/s", "copy cold", "bytes"),
    ];
    pages("crc32c", "CRC32C beside ISA-L, crc-fast and crc32c", method, &mut cases, &[], &lines, &values, &pictures)
}

/// Builds the peers, and runs one race.
fn run(name: &str, effort: &Effort) -> Result<Vec<Value>> {
    shell::run(&mut build()).context("building the peers (scripts/setup bench brings nasm, autoconf and libtool)")?;
    let mut race = shell::command(shell::root().join("test/peers/target/release/race"));
    race.args([name, "--rounds", &effort.rounds.to_string()]);
    race.args(["--milliseconds", &((effort.seconds * 4.0) as u64).max(1).to_string()]);
    race.args(["--case", effort.case.as_deref().unwrap_or("")]);
    let text = shell::output(&mut race)?;
    let values: Vec<Value> = text.lines().map(value).collect::<Result<_>>()?;
    if values.is_empty() {
        bail!("no case of that name");
    }
    Ok(values)
}

fn build() -> Command {
    let mut build = shell::cargo();
    build.args(["build", "--quiet", "--release", "--features", "bench", "--manifest-path", "test/peers/Cargo.toml"]);
    build.env_remove("CARGO_TARGET_DIR");
    build
}

fn value(line: &str) -> Result<Value> {
    let fields: Vec<&str> = line.split('\t').collect();
    let [group, case, goal, series, side, rate] = fields[..] else { bail!("not a value: {line}") };
    Ok(Value {
        group: group.into(),
        case: case.into(),
        goal: goal.parse().with_context(|| line.to_owned())?,
        series: series.into(),
        side: match side {
            "ours" => Side::Ours,
            "peer" => Side::Peer,
            _ => Side::Cached,
        },
        rate: rate.parse().with_context(|| line.to_owned())?,
    })
}

/// The cases of some groups, in the order in which they ran.
fn cases(values: &[Value], groups: &[&str]) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for value in values.iter().filter(|value| groups.contains(&value.group.as_str())) {
        let name = value.case.replace(' ', "-");
        if cases.last().is_none_or(|case| case.name != name) {
            cases.push(Case { name, unit: "GB/s", goal: value.goal, series: Vec::new() });
        }
        let case = cases.last_mut().expect("one was pushed");
        match case.series.iter_mut().find(|series| series.name == value.series) {
            Some(series) => series.values.push(value.rate),
            None => {
                let (name, side) = (value.series.clone(), value.side);
                case.series.push(Series { name, side, values: vec![value.rate] });
            }
        }
    }
    cases
}

/// Lines for scripts, without those for series that are only shown.
fn ratio_lines(bench: &str, cases: &[Case]) -> Vec<String> {
    let counted = |case: &Case| {
        let series = case.series.iter().filter(|series| series.side != Side::Cached).cloned().collect();
        Case { series, ..case.clone() }
    };
    report::ratio_lines(bench, &cases.iter().map(counted).collect::<Vec<_>>())
}

fn show(tables: &[&[Case]], lines: &[String]) {
    for cases in tables {
        println!("{}", table(cases));
    }
    for line in lines {
        println!("{line}");
    }
}

/// A row a case: ours, the best peer, the ratio and the goal; competitors differ from case to case.
fn table(cases: &[Case]) -> String {
    let mut text =
        String::from("| case | forebay | best peer | | ratio | goal | |\n|---|---:|---:|---|---:|---:|---|\n");
    for case in cases {
        let best = |side| {
            let of_side = case.series.iter().filter(|series| series.side == side);
            of_side.map(|series| (median(&series.values), &series.name)).max_by(|a, b| a.0.total_cmp(&b.0))
        };
        let (Some((ours, _)), Some((theirs, peer))) = (best(Side::Ours), best(Side::Peer)) else { continue };
        let ratio = ours / theirs;
        let verdict = if ratio >= case.goal { "met" } else { "**missed**" };
        text.push_str(&format!(
            "| {} | {ours:.1} | {theirs:.1} | {peer} | {ratio:.2} | {:.2} | {verdict} |\n",
            case.name, case.goal
        ));
    }
    text
}

/// Writes the page and its pictures.
#[allow(clippy::too_many_arguments)]
fn pages(
    name: &str,
    title: &str,
    method: &str,
    cases: &mut [Case],
    tiers: &[Case],
    lines: &[String],
    values: &[Value],
    pictures: &[(&str, &str, &str, &str)],
) -> Result<()> {
    let folder = shell::root().join("docs/benchmarks");
    let mut text = format!("# {title}\n\n{method}\n\nMeasured on {}.\n\n", report::machine());
    for (file, caption, group, axis) in pictures {
        let (marks, plotted) = plotted(values, group);
        if plotted.is_empty() {
            continue;
        }
        std::fs::write(folder.join(format!("{file}.svg")), plot::svg(caption, axis, &marks, &plotted))?;
        text.push_str(&format!("![{caption}]({file}.svg)\n\n"));
    }
    text.push_str(&table(cases));
    if !tiers.is_empty() {
        text.push_str("\nEach tier beside ISA-L's own of that name:\n\n");
        text.push_str(&table(tiers));
    }
    text.push_str("\n```\n");
    text.push_str(&lines.join("\n"));
    text.push_str("\n```\n");
    std::fs::write(folder.join(format!("{name}.md")), text)?;
    Ok(())
}

/// The marks of the axis, and a line of medians for each series, of one group.
fn plotted(values: &[Value], group: &str) -> (Vec<String>, Vec<Line>) {
    let (mut marks, mut names): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let of_group: Vec<&Value> = values.iter().filter(|value| value.group == group).collect();
    for value in &of_group {
        if !marks.contains(&value.case) {
            marks.push(value.case.clone());
        }
        if !names.contains(&value.series) {
            names.push(value.series.clone());
        }
    }
    let lines = names.into_iter().map(|name| {
        let points = marks.iter().map(|mark| {
            let rates: Vec<f64> = of_group
                .iter()
                .filter(|value| value.series == name && value.case == *mark)
                .map(|value| value.rate)
                .collect();
            (!rates.is_empty()).then(|| median(&rates))
        });
        Line { points: points.collect(), ours: name.starts_with("forebay"), name }
    });
    let lines = lines.collect();
    (marks, lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_cases_and_lines() {
        let text = "crc32c\thot 64 B\t1\tforebay\tours\t3.0\ncrc32c\thot 64 B\t1\tisa-l\tpeer\t2.0\n\
            crc32c\thot 64 B\t1\tforebay\tours\t5.0\nblocks\t4 KiB\t0\tforebay\tours\t9.0\n";
        let values: Vec<Value> = text.lines().map(|line| value(line).unwrap()).collect();
        let cases = cases(&values, &["crc32c"]);
        assert_eq!(cases.len(), 1);
        assert_eq!(cases[0].ratio(Side::Peer), Some(2.0));
        assert!(table(&cases).contains("| hot-64-B | 4.0 | 2.0 | isa-l | 2.00 | 1.00 | met |"));
        let (marks, lines) = plotted(&values, "blocks");
        assert_eq!((marks, lines[0].points.clone()), (vec!["4 KiB".to_owned()], vec![Some(9.0)]));
        assert!(value("a\tb").is_err());
    }
}
