//! The kernels against other people's: `test/peers` runs the race, and its values become tables and pictures here.

use std::process::Command;

use anyhow::{Context, Result, bail};

use super::plot::{self, Line};
use super::report::{self, Case, Series, Side};
use super::{Effort, median};
use crate::shell;

/// One value that the race printed.
#[derive(Clone)]
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
    let lines = [ratio_lines("ec", &cases), ratio_lines("ec-tiers", &tiers)].concat();
    show(&[&cases, &tiers], &lines);
    if dry_run {
        return Ok(());
    }
    let method = "One core. GB/s of data encoded, or of chunks read to rebuild; `fused` also gives the CRC32C of every \
        chunk. *Cached*: chunks of 16 KiB, the same stripe repeatedly. *Memory*: chunks of 1 MiB, stripes that go \
        round in 256 MiB. *Aligned*: every chunk begins at a page; *skewed*: each 320 bytes further into its page than \
        the one before. The peer is the newest ISA-L that a crate vendors, on the tier it picks by itself.\n\n\
        What bounds the ratios. In memory both are limited by memory bandwidth, and ISA-L moves k + 2m cache lines \
        where non-temporal stores move k + m: that is 1.20 at 8/2 and 16/4, 1.27 at 8/3, 1.29 at 10/4 and 1.33 at 4/2, \
        6/3 and 8/4, and more only where ISA-L does not keep memory busy. With m = 1 both run at the speed of the \
        second-level cache, so the remaining difference is the checks at the start of a call, 10 to 20 ns of 450 at \
        2/1. Sixteen page-aligned streams in memory meet in the same cache sets and cross into new pages all at once, \
        which costs either library half its speed.";
    let pictures = [
        ("ec-shapes", "Encoding by shape: chunks of 16 KiB, cached, GB/s of data", "shapes", "k/m"),
        ("ec-blocks", "Encoding 8/3 by chunk size, one stripe over and over, GB/s of data", "blocks", "chunk"),
    ];
    let by_tier = format!("\nEach tier beside ISA-L's own of that name:\n\n{}", table(&tiers));
    pages("ec", "Erasure coding beside ISA-L", method, &mut cases, &by_tier, &lines, &values, &pictures)
}

/// Races the CRC32C kernels.
pub fn crc32c(effort: &Effort, dry_run: bool) -> Result<()> {
    let mut values = run("crc32c", effort)?;
    let mut cases = cases(&values, &["crc32c"]);
    let shapes = shape_table(&self::cases(&values, &["shapes"]));
    let lines = ratio_lines("crc32c", &cases);
    show(&[&cases], &lines);
    println!("{shapes}");
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
    let method = "One core, GB/s. *Hot*: the same buffer repeatedly. *Cold*: buffers from 512 MiB in an order that no \
        prefetcher can predict. *Copy*: copying and checksumming, against `memcpy` and then the best checksum.\n\n\
        What bounds the ratios. Latency rather than bandwidth bounds a cold buffer of up to 64 KiB: `memcpy` takes ten \
        times as long as the checksum of what is then in the cache, so a copy whose checksum cost nothing would gain 8 \
        % at 4 KiB and 15 % at 64 KiB. Checksums of cold buffers of 2 to 64 KiB pay for what makes hot ones fast: the \
        CRC32 instruction beside the multiplier takes more instructions a byte, and a processor with more instructions \
        in flight looks ahead over fewer cache misses. A hot copy of 64 KiB goes through the second-level cache \
        twice.\n\n\
        Which loop is in use for which length was chosen by calibration when the race began, as the daemon does; \
        [kernels by processor](kernels.md) has the figures of other processors.";
    let pictures = [
        ("crc32c-hot", "CRC32C of hot buffers, GB/s", "hot", "bytes"),
        ("crc32c-cold", "CRC32C of cold buffers, GB/s", "cold", "bytes"),
        ("crc32c-copy", "Copy and CRC32C of cold buffers, GB/s", "copy cold", "bytes"),
    ];
    let by_shape = format!(
        "\nEvery loop of the tier in use, hot, GB/s; `forebay` is the one in use, and the columns took turns:\n\n{shapes}"
    );
    pages(
        "crc32c",
        "CRC32C beside ISA-L, crc-fast and crc32c",
        method,
        &mut cases,
        &by_shape,
        &lines,
        &values,
        &pictures,
    )
}

/// Races the compressors.
pub fn compress(effort: &Effort, dry_run: bool) -> Result<()> {
    let mut values = run("compress", effort)?;
    // Compression is slow enough to be told in MB/s.
    values.iter_mut().filter(|value| value.group == "compress").for_each(|value| value.rate *= 1000.0);
    let mut speeds = in_units(cases(&values, &["compress"]), "MB/s");
    let ratios = in_units(cases(&values, &["ratio"]), "plain/packed");
    let submits = in_units(cases(&values, &["submit"]), "per us");
    let mut lines = report::ratio_lines("compress", &speeds);
    lines.extend(fine_lines("compress-ratio", &ratios));
    lines.extend(fine_lines("compress", &submits));
    show(&[&speeds], &lines);
    if dry_run {
        return Ok(());
    }
    // The levels for one picture, the block sizes of level 1 for another.
    let mut plots = Vec::new();
    for value in values {
        let case = value.case.clone();
        if let Some(level) = case.strip_prefix("level ").and_then(|rest| rest.strip_suffix(" 128 KiB")) {
            let group = if value.group == "ratio" { "ratios" } else { "levels" };
            plots.push(Value { group: group.into(), case: level.into(), ..value.clone() });
        }
        if let (Some(size), "compress") = (case.strip_prefix("level 1 "), value.group.as_str()) {
            plots.push(Value { group: "blocks".into(), case: size.into(), ..value });
        }
    }
    let method = "One core, MB/s of plain data, raw DEFLATE, each block by itself; every stream is read by zlib before \
        anything is timed. The corpus is half a MiB each of licence texts, our own source, a program, the package \
        database, JSON records, pages of a database and a bitmap; with FOREBAY_CORPUS, the files of a folder. zlib is \
        Debian's, igzip the newest that a crate vendors. From level 2 on the encoder is libdeflate's, whose rate is \
        the limit: at level 6 two to three times zlib's. *engine*: jobs of 32 scattered pages on two threads and two \
        processors, the submitter asleep until a batch has ended, against twice what one thread does with the same \
        blocks in one piece; the line `-vs-other` is against two threads with nothing between them, half of the blocks \
        each, which is all that two processors of this machine give while both work. *submit*: submissions a \
        microsecond of the submitter's own time (the clock itself takes a fifth of one), by the median, by the mean \
        and by the worst hundredth, which are those that wake a thread; the limit is two microseconds each.";
    let pictures = [
        ("compress-levels", "Compressing by level, blocks of 128 KiB, MB/s", "levels", "level"),
        ("compress-ratio", "Plain bytes for each compressed byte, blocks of 128 KiB", "ratios", "level"),
        ("compress-blocks", "Level 1 by block size, MB/s", "blocks", "block"),
    ];
    pages("compress", "DEFLATE beside zlib, igzip and libdeflate", method, &mut speeds, "", &lines, &plots, &pictures)
}

/// Races the AES-XTS kernels.
pub fn xts(effort: &Effort, dry_run: bool) -> Result<()> {
    let values = run("xts", effort)?;
    let mut cases = cases(&values, &["xts"]);
    let lines = report::ratio_lines("xts", &cases);
    show(&[&cases], &lines);
    if dry_run {
        return Ok(());
    }
    let mut plots = Vec::new();
    for value in values {
        if let Some(length) = value.case.strip_prefix("gcm-256 ") {
            let case = length.to_owned();
            plots.push(Value { group: "gcm".into(), case, ..value });
        } else if let Some((size, "131072")) =
            value.case.strip_prefix("xts-256 sectors of ").and_then(|rest| rest.split_once(" in "))
        {
            let case = size.to_owned();
            plots.push(Value { group: "xts".into(), case, ..value });
        }
    }
    let method = "One core, GB/s, in place, the data in the cache. OpenSSL is Debian's, with its key set once and the \
        tweak or nonce for each sector or message. *in 131072*: as many sectors as make 128 KiB in one call of ours. \
        ISA-L crypto takes part where `libisal_crypto.so.2` is installed; neither Debian nor any crate known to us \
        brings it, so it does not here. Measured once on a processor of this kind it gave 13.0 GB/s with AES-256 in \
        sectors of 4 KiB, where OpenSSL gave 6.2.";
    let pictures = [
        ("xts", "AES-256-XTS by sector size, 128 KiB a call, GB/s", "xts", "sector"),
        ("gcm", "AES-256-GCM by length of message, GB/s", "gcm", "bytes"),
    ];
    pages("xts", "AES-XTS and AES-GCM beside OpenSSL", method, &mut cases, "", &lines, &plots, &pictures)
}

fn in_units(mut cases: Vec<Case>, unit: &'static str) -> Vec<Case> {
    cases.iter_mut().for_each(|case| case.unit = unit);
    cases
}

/// Lines for values of which the second and third place matter.
fn fine_lines(bench: &str, cases: &[Case]) -> Vec<String> {
    let line = |case: &Case| {
        let of = |side| case.series.iter().find(|series| series.side == side);
        let (ours, peer) = (of(Side::Ours)?, of(Side::Peer)?);
        let (left, right) = (median(&ours.values), median(&peer.values));
        Some(format!(
            "RATIO name={bench}/{} ours={left:.4} peer={right:.4} ratio={:.3} unit={} against={}",
            case.name,
            left / right,
            case.unit.replace(' ', "-"),
            peer.name.replace(' ', "-")
        ))
    };
    cases.iter().filter_map(line).collect()
}

/// Builds the peers, and runs one race.
fn run(name: &str, effort: &Effort) -> Result<Vec<Value>> {
    shell::run(&mut build()).context("building the peers (scripts/setup bench brings nasm, autoconf and libtool)")?;
    let mut race = shell::command(shell::target().join("release/race"));
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
    build.args(["build", "--quiet", "--release", "-p", "forebay-peers", "--features", "bench"]);
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
            _ => Side::Other,
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
        let series = case.series.iter().filter(|series| series.side != Side::Other).cloned().collect();
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
        // A goal of zero is none.
        let (goal, verdict) = match case.goal {
            0.0 => (String::new(), ""),
            goal if ratio >= goal => (format!("{goal:.2}"), "met"),
            goal => (format!("{goal:.2}"), "**missed**"),
        };
        text.push_str(&format!(
            "| {} | {ours:.1} | {theirs:.1} | {peer} | {ratio:.2} | {goal} | {verdict} |\n",
            case.name
        ));
    }
    text
}

/// A row a size, a column a loop; the fastest of ours in bold.
fn shape_table(cases: &[Case]) -> String {
    let Some(first) = cases.first() else { return String::new() };
    let names: Vec<&str> = first.series.iter().map(|series| series.name.as_str()).collect();
    let mut text = format!("| size | {} |\n|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for case in cases {
        let figures: Vec<f64> = case.series.iter().map(|series| median(&series.values)).collect();
        let loops = case.series.iter().zip(&figures).filter(|(series, _)| series.side == Side::Other);
        let best = loops.map(|(_, &figure)| figure).fold(0.0, f64::max);
        let cell = |(series, &figure): (&Series, &f64)| match series.side {
            Side::Other if figure == best => format!("**{figure:.1}**"),
            _ => format!("{figure:.1}"),
        };
        let cells: Vec<String> = case.series.iter().zip(&figures).map(cell).collect();
        text.push_str(&format!("| {} | {} |\n", case.name, cells.join(" | ")));
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
    more: &str,
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
    text.push_str(more);
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
    fn loops_become_columns_and_the_fastest_is_bold() {
        let text = "shapes\t4 KiB\t1\tforebay\tours\t3.0\nshapes\t4 KiB\t1\tisa-l\tpeer\t2.0\n\
            shapes\t4 KiB\t1\tgfni/v4\tshown\t3.1\nshapes\t4 KiB\t1\tgfni/v8\tshown\t3.0\n";
        let values: Vec<Value> = text.lines().map(|line| value(line).unwrap()).collect();
        let table = shape_table(&cases(&values, &["shapes"]));
        assert_eq!(
            table,
            "| size | forebay | isa-l | gfni/v4 | gfni/v8 |\n|---|---:|---:|---:|---:|\n\
             | 4-KiB | 3.0 | 2.0 | **3.1** | 3.0 |\n"
        );
        assert_eq!(shape_table(&[]), "");
    }

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
