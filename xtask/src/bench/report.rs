//! Results of a comparison: lines for scripts, a table and a picture for people.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::median;
use crate::shell;

/// A competitor in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Series of Forebay.
    Ours,
    /// A peer under the same conditions; goals are set against the better of these.
    Peer,
    /// A peer outside the goal: shown, and compared under a name of its own.
    Other,
}

/// One line of competitors' values.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name of the case.
    pub name: String,
    /// Whose it is.
    pub side: Side,
    /// One value a round; more is better.
    pub values: Vec<f64>,
}

/// One thing that was measured of every competitor.
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name in RATIO lines.
    pub name: String,
    /// Unit of a value.
    pub unit: &'static str,
    /// Goal: at least this, our value divided by the better peer's.
    pub goal: f64,
    /// The competitors.
    pub series: Vec<Series>,
}

impl Case {
    fn best(&self, side: Side) -> Option<(&str, f64)> {
        let of_side = self.series.iter().filter(|series| series.side == side && !series.values.is_empty());
        of_side
            .map(|series| (series.name.as_str(), median(&series.values)))
            .max_by(|left, right| left.1.total_cmp(&right.1))
    }

    /// Our median divided by that of the better one of `side`.
    pub fn ratio(&self, side: Side) -> Option<f64> {
        let (_, ours) = self.best(Side::Ours)?;
        let (_, theirs) = self.best(side)?;
        (theirs > 0.0).then_some(ours / theirs)
    }
}

/// The lines that scripts read.
pub fn ratio_lines(bench: &str, cases: &[Case]) -> Vec<String> {
    let mut lines = Vec::new();
    for case in cases {
        for (side, suffix) in [(Side::Peer, ""), (Side::Other, "-vs-other")] {
            let (Some((_, ours)), Some((peer, theirs)), Some(ratio)) =
                (case.best(Side::Ours), case.best(side), case.ratio(side))
            else {
                continue;
            };
            lines.push(format!(
                "RATIO name={bench}/{}{suffix} ours={} peer={} ratio={ratio:.2} unit={} against={}",
                case.name,
                plain(ours),
                plain(theirs),
                case.unit.replace(' ', "-"),
                peer.replace(' ', "-")
            ));
        }
    }
    lines
}

/// A number for scripts: small ones with what matters behind the point.
fn plain(value: f64) -> String {
    if value < 1000.0 && value.fract() != 0.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// Writes `docs/benchmarks/NAME.md` and `.svg`.
pub fn write(bench: &str, title: &str, method: &str, cases: &[Case], lines: &[String]) -> Result<()> {
    let folder = shell::root().join("docs/benchmarks");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(format!("{bench}.svg")), picture(title, cases))?;
    let mut text = format!("# {title}\n\n{method}\n\n![{title}]({bench}.svg)\n\n");
    text.push_str(&table(cases));
    text.push_str("\n```\n");
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
    text.push_str("```\n");
    std::fs::write(folder.join(format!("{bench}.md")), text)?;
    Ok(())
}

/// Markdown tables of medians, with the spread of the rounds: one for each set of competitors.
pub fn table(cases: &[Case]) -> String {
    let same = |left: &Case, right: &Case| names(left).eq(names(right));
    let tables: Vec<String> = cases.chunk_by(same).map(table_of).collect();
    tables.join("\n")
}

fn names(case: &Case) -> impl Iterator<Item = &str> {
    case.series.iter().map(|series| series.name.as_str())
}

fn table_of(cases: &[Case]) -> String {
    let mut text = String::new();
    let Some(first) = cases.first() else { return text };
    text.push_str("| case | unit |");
    for series in &first.series {
        let _ = write!(text, " {} |", series.name);
    }
    text.push_str(" ratio | goal | |\n|---|---|");
    text.push_str(&"---:|".repeat(first.series.len() + 2));
    text.push_str("---|\n");
    for case in cases {
        let _ = write!(text, "| {} | {} |", case.name, case.unit);
        for series in &case.series {
            let low = series.values.iter().copied().fold(f64::INFINITY, f64::min);
            let high = series.values.iter().copied().fold(0.0, f64::max);
            if series.values.is_empty() {
                text.push_str(" |");
            } else {
                let _ = write!(text, " {} ({}-{}) |", number(median(&series.values)), number(low), number(high));
            }
        }
        match case.ratio(Side::Peer) {
            Some(ratio) => {
                let verdict = if ratio >= case.goal { "met" } else { "**missed**" };
                let _ = writeln!(text, " {ratio:.2} | {:.2} | {verdict} |", case.goal);
            }
            None => text.push_str(" | | |\n"),
        }
    }
    text
}

fn number(value: f64) -> String {
    if value >= 10_000.0 { format!("{:.1} k", value / 1000.0) } else { format!("{value:.0}") }
}

/// Horizontal bars, a group a case, each scaled to its group's longest.
fn picture(title: &str, cases: &[Case]) -> String {
    const COLOURS: [&str; 6] = ["#0b7a75", "#c8553d", "#e4a853", "#8a8d91", "#b9bcc0", "#55585c"];
    const LEFT: usize = 320;
    const WIDTH: usize = 400;
    const BAR: usize = 13;
    let mut all: Vec<&str> = Vec::new();
    for name in cases.iter().flat_map(names) {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    let colour = |name: &str| COLOURS[all.iter().position(|&other| other == name).unwrap_or(0) % COLOURS.len()];
    let group = |case: &Case| case.series.len() * BAR + 14;
    let height = 70 + 20 * (all.len() / 5) + cases.iter().map(group).sum::<usize>() + 10;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"{height}\" viewBox=\"0 0 800 {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"800\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{}</text>\n",
        escape(title)
    );
    for (index, name) in all.iter().enumerate() {
        let (x, y) = (16 + index % 5 * 155, 38 + index / 5 * 20);
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"{y}\" width=\"11\" height=\"11\" fill=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>",
            colour(name),
            x + 16,
            y + 10,
            escape(name)
        );
    }
    let mut top = 70 + 20 * (all.len() / 5);
    for case in cases {
        let longest = case.series.iter().map(|series| median(&series.values)).fold(1.0, f64::max);
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{} ({})</text>",
            LEFT - 10,
            top + case.series.len() * BAR / 2 + 4,
            escape(&case.name),
            escape(case.unit)
        );
        for (index, series) in case.series.iter().enumerate() {
            let value = median(&series.values);
            let length = (value / longest * WIDTH as f64).max(1.0);
            let y = top + index * BAR;
            let _ = writeln!(
                text,
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.0}\" height=\"{}\" fill=\"{}\"/>\
                 <text x=\"{:.0}\" y=\"{}\" font-size=\"9\" fill=\"#333333\">{}</text>",
                BAR - 2,
                colour(&series.name),
                LEFT as f64 + length + 4.0,
                y + 9,
                number(value)
            );
        }
        top += group(case);
    }
    text.push_str("</svg>\n");
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The machine, in one line.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let processor = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| {
            line.strip_prefix("model name").and_then(|rest| rest.split(':').nth(1)).map(str::trim).map(str::to_owned)
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{cores} cores of {processor}, Linux {}", kernel.trim().split('-').next().unwrap_or_default())
}

/// Returns what a folder is on.
pub fn device(folder: &Path) -> Result<String> {
    let found = shell::output(shell::command("findmnt").args(["-no", "SOURCE,FSTYPE", "-T"]).arg(folder))?;
    // Several file systems may be mounted over each other: the last one counts.
    let mut words: Vec<&str> = found.lines().last().unwrap_or_default().split_whitespace().collect();
    words.dedup();
    Ok(words.join(", "))
}

/// Returns the load average of the last minute.
pub fn load() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/loadavg")?.split(' ').next().unwrap_or_default().to_owned())
}

/// Returns the short id of the commit that is checked out.
pub fn commit() -> Result<String> {
    Ok(shell::output(shell::command("git").args(["rev-parse", "--short", "HEAD"]))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case() -> Case {
        let series = |name: &str, side, values: &[f64]| Series { name: name.into(), side, values: values.to_vec() };
        Case {
            name: "randread-4k-qd1".into(),
            unit: "IOPS",
            goal: 1.0,
            series: vec![
                series("forebay", Side::Ours, &[30.0, 20.0, 25.0]),
                series("slow", Side::Peer, &[1.0]),
                series("better", Side::Peer, &[10.0]),
                series("other", Side::Other, &[50.0]),
            ],
        }
    }

    #[test]
    fn we_are_compared_with_the_better_peer() {
        assert_eq!(case().ratio(Side::Peer), Some(2.5));
        assert_eq!(
            ratio_lines("nbd", &[case()])[0],
            "RATIO name=nbd/randread-4k-qd1 ours=25 peer=10 ratio=2.50 unit=IOPS against=better"
        );
        assert!(table(&[case()]).contains("| met |"));
    }

    #[test]
    fn other_competitors_get_a_table_of_their_own() {
        let mut other = case();
        other.series.pop();
        let text = table(&[case(), case(), other]);
        assert_eq!(text.matches("| case | unit |").count(), 2);
        assert_eq!(text.matches("randread-4k-qd1").count(), 3);
    }

    #[test]
    fn a_picture_shows_everybody() {
        let text = picture("a < b", &[case()]);
        assert!(text.contains("a &lt; b") && text.contains("forebay") && text.trim_end().ends_with("</svg>"));
        assert_eq!(text.matches("<rect").count(), 1 + 4 + 4);
    }
}
