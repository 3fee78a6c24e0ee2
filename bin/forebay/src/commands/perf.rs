//! `perf`: how fast the parts are on this machine, without a daemon.

use std::time::{Duration, Instant};

use forebay_accel::perf::{self, Detail, Kernel, Variant};
use forebay_accel::processor::Processor;
use forebay_accel::shape::{self, Choice};
use forebay_accel::tier::{self, Tier};
use serde::Serialize;

use crate::cli::{PerfAccelArgs, PerfCommand};
use crate::failure::{Failure, Result};
use crate::kernels;
use crate::output::{Output, table};

/// The shortest stretch that is timed at once: long beside the clock's own cost, short beside a time slice.
const STRETCH: Duration = Duration::from_micros(200);

/// Stretches a figure is the median of.
const STRETCHES_MIN: usize = 5;

/// Does what `perf` says.
pub fn run(output: Output, command: PerfCommand) -> Result<()> {
    match command {
        PerfCommand::Accel(options) => accel(output, &options),
        PerfCommand::Messenger(command) => super::perf_messenger::run(output, command),
    }
}

/// Output of `perf accel`.
#[derive(Debug, Serialize)]
struct Report {
    /// The tier in use.
    tier: &'static str,
    /// The tier `FOREBAY_ACCEL` asks for.
    forced: Option<&'static str>,
    /// Features of this processor.
    available: Vec<&'static str>,
    /// The processor's name for itself, its family and model.
    processor: ProcessorRow,
    /// Duration of the choice of loops in this process, in milliseconds.
    calibration_ms: f64,
    choices: Vec<ChoiceRow>,
    /// Loops that agreed with the plain checksum, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<usize>,
    kernels: Vec<Row>,
}

/// The processor.
#[derive(Debug, Serialize)]
struct ProcessorRow {
    name: String,
    family: u32,
    model: u32,
}

/// The loop in use for one kernel and class of sizes.
#[derive(Debug, Serialize)]
struct ChoiceRow {
    kernel: &'static str,
    class: &'static str,
    shape: &'static str,
    reason: String,
    default: &'static str,
    measured: Vec<MeasuredRow>,
}

/// Measurement of a loop by calibration.
#[derive(Debug, Serialize)]
struct MeasuredRow {
    shape: &'static str,
    gb_per_s: f64,
}

impl From<&Choice> for ChoiceRow {
    fn from(choice: &Choice) -> Self {
        let figure = |one: &shape::ShapeSpeed| MeasuredRow { shape: one.shape, gb_per_s: one.gb_per_s };
        Self {
            kernel: choice.kernel,
            class: choice.class,
            shape: choice.shape,
            reason: choice.reason.to_string(),
            default: choice.default,
            measured: choice.measured.iter().map(figure).collect(),
        }
    }
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

fn accel(output: Output, options: &PerfAccelArgs) -> Result<()> {
    // One that cannot be had has ended the program before.
    let forced = Tier::forced().ok().flatten().map(Tier::name);
    let time = Duration::from_millis(options.milliseconds);
    let verify = || {
        forebay_accel::crc32c::verify()
            .map_err(|wrong| Failure::failed(format!("wrong checksum from {wrong}; report the processor's model")))
    };
    let verified = options.all.then(verify).transpose()?;
    // The same choice that the daemon makes when it starts, made again.
    let begin = Instant::now();
    let choices = kernels::calibrate();
    let calibration_ms = begin.elapsed().as_secs_f64() * 1e3;
    let detail = if options.all { Detail::Shapes } else { Detail::Tiers };
    let wanted = perf::kernels(detail).into_iter().filter(|kernel| kernel.name.contains(&options.only));
    let processor = Processor::current();
    let report = Report {
        tier: Tier::current().name(),
        forced,
        available: Tier::available().map(Tier::name).collect(),
        processor: ProcessorRow { name: processor.name.clone(), family: processor.family, model: processor.model },
        calibration_ms,
        choices: choices.iter().map(ChoiceRow::from).collect(),
        verified,
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
    let choices = report.choices.iter().map(|choice| {
        let measured = choice.measured.iter().map(|one| format!("{} {:.1}", one.shape, one.gb_per_s));
        let measured = measured.collect::<Vec<_>>().join(", ");
        vec![choice.kernel.into(), choice.class.into(), choice.shape.into(), choice.reason.clone(), measured]
    });
    let verified = match report.verified {
        Some(loops) => format!("self-test: {loops} checksum loops agree with the tables\n"),
        None => String::new(),
    };
    format!(
        "tier in use: {}{forced}; this processor has: {}\nprocessor: {}, family {}, model {}\n{verified}\n\
         loop shapes, chosen in {:.1} ms:\n{}\n\n{}",
        report.tier,
        report.available.join(", "),
        report.processor.name,
        report.processor.family,
        report.processor.model,
        report.calibration_ms,
        table(&["KERNEL", "SIZES", "SHAPE", "WHY", "CALIBRATION, GB/S"], &[], choices),
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
        let choice = ChoiceRow {
            kernel: "crc32c",
            class: "from 512 KiB",
            shape: "v8",
            reason: shape::ShapeReason::Calibration { percent: 12.4 }.to_string(),
            default: "v4",
            measured: vec![MeasuredRow { shape: "v4", gb_per_s: 10.0 }, MeasuredRow { shape: "v8", gb_per_s: 11.24 }],
        };
        let report = Report {
            tier: "avx2",
            forced: Some("avx2"),
            available: vec!["portable", "avx2"],
            processor: ProcessorRow { name: "A Processor".into(), family: 6, model: 143 },
            calibration_ms: 4.25,
            choices: vec![choice],
            verified: Some(7),
            kernels: rows,
        };
        let text = render(&report);
        assert!(text.starts_with("tier in use: avx2 (by FOREBAY_ACCEL); this processor has: portable, avx2\n"));
        assert!(
            text.contains("\nprocessor: A Processor, family 6, model 143\nself-test: 7 checksum loops agree"),
            "{text}"
        );
        let choice = text.lines().find(|line| line.starts_with("crc32c")).expect("a line for the choice");
        assert!(choice.contains("from 512 KiB") && choice.contains("v8  "), "{text}");
        assert!(choice.contains("by calibration (+12 %)") && choice.contains("v4 10.0, v8 11.2"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.starts_with("copy") && line.contains('*')), "{text}");
    }
}
