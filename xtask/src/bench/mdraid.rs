//! Erasure coding of the embedded store beside the kernel's RAID 6 on the same disks in memory, in a guest: how much of the
//! speed of plain stripes each keeps.

use std::collections::HashMap;

use anyhow::{Context, Result};

use super::Effort;
use super::report::{self, Case, Series, Side};
use crate::daemon;
use crate::shell::{self, Scratch};

/// Measurements of the guest's script; the last two are without two of five disks.
const MODES: [&str; 6] = ["write", "read", "randwrite", "randread", "read-degraded", "randread-degraded"];
/// Data of a measurement in MiB: the disks of the guest are in its memory.
const SIZE_MIB: u64 = 384;

/// Values of each competitor and mode, one a round.
type Values = HashMap<(String, String), Vec<f64>>;

/// Measures, prints and writes the report.
pub fn run(effort: &Effort, dry_run: bool) -> Result<()> {
    shell::run(&mut daemon::build_beside_command(&["-p", "forebay-store", "--example", "services"]))?;
    let share = Scratch::new("mdraid")?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-mdraid.sh"));
    guest.arg(shell::target().join("release/examples/services"));
    guest.args([effort.rounds.to_string(), effort.seconds.to_string(), SIZE_MIB.to_string()]);
    guest.env("SHARE", share.path()).env("MEM", "3G");
    // A round has twenty measurements, for each of which a store is filled or fio starts.
    let limit = 120.0 + effort.rounds as f64 * 20.0 * (effort.seconds + 60.0);
    guest.env("TIMEOUT", limit.ceil().to_string());
    shell::run(&mut guest)?;
    let written =
        |name: &str| std::fs::read_to_string(share.path().join(name)).with_context(|| format!("{name} of the guest"));
    let values = parse(&written("results")?)?;
    let cases = cases(&values)?;
    println!("{}", report::table(&cases));
    let lines = report::ratio_lines("store-mdraid", &cases);
    lines.iter().for_each(|line| println!("{line}"));
    if !dry_run {
        report::write(
            "store-mdraid",
            "Erasure coding beside RAID 6",
            &method(effort, written("kernel")?.trim())?,
            &cases,
            &lines,
        )?;
    }
    Ok(())
}

/// Parses lines of a competitor, a mode and a value.
fn parse(text: &str) -> Result<Values> {
    let mut values = Values::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [competitor, mode, value] = fields[..] else { anyhow::bail!("the guest reports '{line}'") };
        let value = value.parse().with_context(|| format!("the guest reports '{line}'"))?;
        values.entry((competitor.into(), mode.into())).or_default().push(value);
    }
    Ok(values)
}

fn cases(values: &Values) -> Result<Vec<Case>> {
    let of = |competitor: &str, mode: &str| {
        let found = values.get(&(competitor.into(), mode.into()));
        found.cloned().with_context(|| format!("no value of {competitor}, {mode}"))
    };
    let series = |name: &str, side, values| Series { name: name.into(), side, values };
    let (mut kept, mut speeds) = (Vec::new(), Vec::new());
    for mode in MODES {
        let share_kept = |competitor: &str| -> Result<Vec<f64>> {
            // Reads without two disks are beside those of healthy stripes.
            let healthy = mode.trim_end_matches("-degraded");
            let (coded, plain) =
                (of(&format!("{competitor}-ec"), mode)?, of(&format!("{competitor}-stripes"), healthy)?);
            Ok(coded.iter().zip(plain).map(|(coded, plain)| 100.0 * coded / plain).collect())
        };
        kept.push(Case {
            name: format!("kept-{mode}"),
            unit: "% of stripes",
            goal: 1.0,
            series: vec![
                series("3+2", Side::Ours, share_kept("store")?),
                series("RAID 6", Side::Peer, share_kept("md")?),
            ],
        });
        speeds.push(Case {
            name: mode.into(),
            unit: if mode.starts_with("rand") { "requests/s" } else { "MB/s" },
            goal: 1.0,
            series: vec![
                series("3+2", Side::Ours, of("store-ec", mode)?),
                series("RAID 6 of 5", Side::Other, of("md-ec", mode)?),
            ],
        });
    }
    kept.append(&mut speeds);
    Ok(kept)
}

fn method(effort: &Effort, kernel: &str) -> Result<String> {
    Ok(format!(
        "{}; commit {}. Everything runs in the lab's guest, whose two processors are emulated: no figure says what a real \
         machine does. Vector instructions cost many times more there, which is what checksums are made of: the store \
         verifies all that it reads and checksums all that it writes, md neither. So speeds are not compared against a \
         goal; compared is how much of the speed of plain stripes is left with two parity columns.\n\n\
         Disks are in the guest's memory (brd). The store: 3+2 columns on five disks beside 3+0 on three, in process, half \
         full. md (Linux {kernel}): RAID 6 of five disks beside RAID 0 of three, chunks of 64 KiB, no bitmap and no journal, so that \
         a crash leaves the write hole that the store does not have; fio with io_uring and O_DIRECT. {} rounds of {} s a \
         measurement, the order turned each round; medians (lowest and highest in parentheses). 1 MiB, 8 at once, one \
         after the other; *rand*: 4 KiB anywhere, 32 at once. *degraded*: without two of five disks.\n\n\
         Repeat it: `cargo xtask bench store-mdraid`. On the machine itself: [services of the embedded \
         store](store-services.md).",
        report::machine(),
        report::commit()?,
        effort.rounds,
        effort.seconds
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_the_guest_become_cases() {
        let mut text = String::new();
        for round in 1..=2 {
            for mode in MODES {
                text.push_str(&format!("store-ec {mode} {}\nmd-ec {mode} {}\n", 60 * round, 30 * round));
            }
            for mode in &MODES[..4] {
                text.push_str(&format!("store-stripes {mode} {}\nmd-stripes {mode} {}\n", 100 * round, 300 * round));
            }
        }
        let cases = cases(&parse(&text).unwrap()).unwrap();
        assert_eq!(cases.len(), 2 * MODES.len());
        assert_eq!(cases[0].series[0].values, [60.0, 60.0]);
        assert_eq!((cases[0].ratio(Side::Peer), cases[6].ratio(Side::Other)), (Some(6.0), Some(2.0)));
        assert_eq!(cases[6].series[1].values, [30.0, 60.0]);
        assert!(super::cases(&parse("store-ec write 1\n").unwrap()).is_err());
        assert!(parse("store-ec write\n").is_err() && parse("store-ec write fast\n").is_err());
    }
}
