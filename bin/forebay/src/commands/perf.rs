//! `perf`: how fast the parts are on this machine, without a daemon.

use std::time::{Duration, Instant};

use forebay_accel::perf::{Kernel, Variant, kernels};
use forebay_accel::tier::{self, Tier};
use serde::Serialize;

use crate::cli::PerfCommand;
use crate::failure::Result;
use crate::output::{Output, table};

/// The shortest stretch that is timed at once: long beside the clock's own cost, short beside a time slice.
const STRETCH: Duration = Duration::from_micros(200);

/// Stretches a figure is the median of.
const STRETCHES_MIN: usize = 5;

/// Does what `perf` says.
pub fn run(output: Output, command: PerfCommand) -> Result<()> {
    match command {
        PerfCommand::Accel(options) => accel(output, &options.only, options.milliseconds),
        PerfCommand::Messenger(command) => super::perf_messenger::run(output, command),
    }
}

/// What `perf accel` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// The tier in use.
    tier: &'static str,
    /// The tier `FOREBAY_ACCEL` asks for.
    forced: Option<&'static str>,
    /// What this processor has.
    available: Vec<&'static str>,
    kernels: Vec<Row>,
}

/// One variant of one kernel.
#[derive(Debug, Serialize)]
struct Row {
    kernel: String,
    variant: String,
    /// Calls of this process go here.
    chosen: bool,
    /// 10^9 bytes of payload a second, one core, the data in the cache unless the kernel's name says otherwise.
    gb_per_s: f64,
}

fn accel(output: Output, only: &str, milliseconds: u64) -> Result<()> {
    // One that cannot be had has ended the program before.
    let forced = Tier::forced().ok().flatten().map(Tier::name);
    let time = Duration::from_millis(milliseconds);
    let wanted = kernels().into_iter().filter(|kernel| kernel.name.contains(only));
    let report = Report {
        tier: Tier::current().name(),
        forced,
        available: Tier::available().map(Tier::name).collect(),
        kernels: wanted.flat_map(|kernel| rows(kernel, time)).collect(),
    };
    output.print(&report, render)
}

fn rows(kernel: Kernel, time: Duration) -> Vec<Row> {
    let Kernel { name, chosen, variants } = kernel;
    let row = |mut variant: Variant| Row {
        kernel: name.clone(),
        chosen: variant.name == chosen,
        gb_per_s: measure(&mut variant, time),
        variant: variant.name,
    };
    variants.into_iter().map(row).collect()
}

/// The median of several stretches, in 10^9 bytes a second.
fn measure(variant: &mut Variant, time: Duration) -> f64 {
    // The first calls fill the caches and tables, and say how many calls make a stretch.
    let mut calls = 1u32;
    loop {
        let begin = Instant::now();
        let _: usize = (0..calls).map(|_| (variant.work)()).sum();
        if begin.elapsed() >= STRETCH || calls >= 1 << 24 {
            break;
        }
        calls *= 2;
    }
    let mut rates = Vec::new();
    let begin = Instant::now();
    while rates.len() < STRETCHES_MIN || begin.elapsed() < time {
        let start = Instant::now();
        let bytes: usize = (0..calls).map(|_| (variant.work)()).sum();
        rates.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn render(report: &Report) -> String {
    let forced = if report.forced.is_some() { format!(" (by {})", tier::VARIABLE) } else { String::new() };
    let rows = report.kernels.iter().map(|row| {
        let mark = if row.chosen { "*" } else { "" };
        vec![row.kernel.clone(), row.variant.clone(), mark.into(), format!("{:.2}", row.gb_per_s)]
    });
    format!(
        "tier in use: {}{forced}; this processor has: {}\n\n{}",
        report.tier,
        report.available.join(", "),
        table(&["KERNEL", "VARIANT", "IN USE", "GB/S"], &[3], rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_measured_and_the_variant_in_use_is_marked() {
        let work = || std::hint::black_box(1 << 20);
        let variants = vec![Variant::new("portable", work), Variant::new("avx2", work)];
        let kernel = Kernel { name: "copy".into(), chosen: "avx2".into(), variants };
        let rows = rows(kernel, Duration::ZERO);
        assert!(rows.iter().all(|row| row.gb_per_s > 0.0));
        let report = Report { tier: "avx2", forced: Some("avx2"), available: vec!["portable", "avx2"], kernels: rows };
        let text = render(&report);
        assert!(text.starts_with("tier in use: avx2 (by FOREBAY_ACCEL); this processor has: portable, avx2\n"));
        assert!(text.lines().last().is_some_and(|line| line.starts_with("copy") && line.contains('*')), "{text}");
    }
}
