//! `bench`: a load on an image, from this process.

use std::time::Duration;

use serde::Serialize;

use crate::cli::{BenchArgs, GlobalArgs, IoPattern, IoType};
use crate::client::session::CommandSession;
use crate::engine::bench::{BenchLoad, Loaded};
use crate::failure::{Failure, FailureKind, Result};
use crate::output::Output;
use crate::spec::{ImageSpec, LOCAL_POOL, RAM_POOL};

/// Seconds of a measurement without a total.
const SECONDS: f64 = 5.0;

/// Output of `bench`.
#[derive(Debug, Serialize)]
struct Report {
    image: String,
    io_type: &'static str,
    io_pattern: &'static str,
    /// Bytes a request.
    io_size: u64,
    /// Requests in flight.
    depth: usize,
    requests: u64,
    seconds: f64,
    iops: f64,
    /// 10^6 bytes a second.
    mb_per_s: f64,
    latency_us_p50: f64,
    latency_us_p99: f64,
    latency_us_p999: f64,
    latency_us_max: f64,
    /// Processor time of this process a request, in microseconds.
    cpu_us: f64,
}

/// Puts a load on an image.
pub fn run(global: &GlobalArgs, output: Output, options: BenchArgs) -> Result<()> {
    let invalid = |text: String| Failure::new(FailureKind::Invalid, text);
    let writes = match options.io_type {
        IoType::Read => 0,
        IoType::Write => 100,
        IoType::Readwrite => 100 - options.rw_mix_read,
    };
    let load = BenchLoad {
        spec: options.name.image.clone(),
        writes,
        random: options.io_pattern == IoPattern::Rand,
        size: options.io_size,
        depth: options.depth.into(),
        time: match (options.seconds, options.io_total) {
            (None, Some(_)) => None,
            (seconds, _) => Some(
                Duration::try_from_secs_f64(seconds.unwrap_or(SECONDS))
                    .map_err(|error| invalid(format!("--seconds: {error}")))?,
            ),
        },
        total: options.io_total,
    };
    if options.io_total == Some(0) {
        return Err(invalid("--io-total: nothing would be measured".into()));
    }
    if options.name.image.pool == RAM_POOL {
        return Err(invalid("the pool 'ram' lives in the daemon".into())
            .hint("attach the image, and measure through a protocol: fio, qemu-img bench"));
    }
    let here = CommandSession::own(
        global,
        options.name.image.pool == LOCAL_POOL,
        Duration::from_micros(options.linger_us.into()),
    )?;
    let engine = here.engine().clone();
    let loaded = engine.call_blocking(move |engine| engine.bench(load));
    drop(engine);
    let closed = here.close();
    let report = report(&options, &loaded?);
    closed?;
    output.print(&report, render)
}

fn report(options: &BenchArgs, loaded: &Loaded) -> Report {
    let Loaded { outcome, cpu_nanos } = loaded;
    let micros = |part: f64| outcome.percentile(part) as f64 / 1e3;
    let ImageSpec { pool, image } = &options.name.image;
    Report {
        image: format!("{pool}/{image}"),
        io_type: options.io_type.name(),
        io_pattern: options.io_pattern.name(),
        io_size: options.io_size,
        depth: options.depth.into(),
        requests: outcome.messages,
        seconds: outcome.seconds,
        iops: outcome.messages as f64 / outcome.seconds,
        mb_per_s: outcome.messages as f64 * options.io_size as f64 / outcome.seconds / 1e6,
        latency_us_p50: micros(0.5),
        latency_us_p99: micros(0.99),
        latency_us_p999: micros(0.999),
        latency_us_max: micros(1.0),
        cpu_us: *cpu_nanos as f64 / outcome.messages.max(1) as f64 / 1e3,
    }
}

fn render(report: &Report) -> String {
    format!(
        "{:.0} IOPS, {:.1} MB/s\nlatency us: 50% {:.1}, 99% {:.1}, 99.9% {:.1}, max {:.1}\n\
         processor us a request: {:.2}",
        report.iops,
        report.mb_per_s,
        report.latency_us_p50,
        report.latency_us_p99,
        report.latency_us_p999,
        report.latency_us_max,
        report.cpu_us,
    )
}
