//! fio: one measured run, and what it says of it.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;

/// One run, as fio is asked for it.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Name in tables.
    pub name: &'static str,
    /// fio's `rw`.
    pub pattern: &'static str,
    /// Bytes a request.
    pub block_size: u32,
    /// Requests in flight.
    pub depth: u32,
    /// Flush after this many writes; 0 for none.
    pub flush_each: u32,
}

impl Job {
    /// Returns whether the job reads.
    pub fn reads(&self) -> bool {
        self.pattern.ends_with("read")
    }

    /// Large requests are compared by bytes, small ones by count.
    pub fn is_bandwidth(&self) -> bool {
        self.block_size >= 1 << 20
    }
}

/// Results of a run.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Requests in all.
    pub requests: u64,
    /// Mean latency in nanoseconds.
    pub mean_ns: f64,
    /// Latencies in nanoseconds: 50, 99, 99.9 and 99.99 per cent; of the flushes where each write has one.
    pub latency_ns: [u64; 4],
    /// Completion latencies in nanoseconds, with their counts.
    pub bins: Vec<(u64, u64)>,
}

/// The program: `FOREBAY_FIO`, or the one that is installed.
fn program() -> std::ffi::OsString {
    std::env::var_os("FOREBAY_FIO").unwrap_or_else(|| "fio".into())
}

/// Returns whether fio was built with an engine.
pub fn has_engine(name: &str) -> bool {
    shell::output(shell::command(program()).arg("--enghelp"))
        .is_ok_and(|said| said.split_whitespace().any(|word| word == name))
}

/// Runs `job` for `seconds` against `target`: fio's engine and its options, such as `--ioengine=nbd --uri=...`.
pub fn measure(job: &Job, target: &[String], seconds: f64) -> Result<Outcome> {
    measure_with(job, target, seconds, &[])
}

/// Runs `job` like [`measure`], with variables in fio's environment.
pub fn measure_with(job: &Job, target: &[String], seconds: f64, environment: &[(&str, &Path)]) -> Result<Outcome> {
    measure_under(&[], job, target, seconds, environment)
}

/// Runs `job` like [`measure_with`], started by another program, such as `taskset`.
pub fn measure_under(
    wrapper: &[&str],
    job: &Job,
    target: &[String],
    seconds: f64,
    environment: &[(&str, &Path)],
) -> Result<Outcome> {
    let program = program();
    let mut words = wrapper.iter().map(OsStr::new).chain([program.as_ref()]);
    let mut fio = shell::command(words.next().expect("a program"));
    fio.args(words);
    fio.envs(environment.iter().copied());
    fio.args(target);
    fio.args([
        format!("--name={}", job.name),
        format!("--rw={}", job.pattern),
        format!("--bs={}", job.block_size),
        format!("--iodepth={}", job.depth),
        format!("--runtime={seconds}"),
    ]);
    fio.args(["--time_based", "--randrepeat=0", "--norandommap", "--output-format=json+", "--thread"]);
    fio.arg("--percentile_list=50:99:99.9:99.99");
    // Its nbd engine sends a flush for fsync and knows no fdatasync.
    if job.flush_each > 0 {
        fio.arg(format!("--fsync={}", job.flush_each));
    }
    // What a sequential write leaves in memory is not written yet: the flush that ends it counts.
    if job.pattern == "write" {
        fio.arg("--end_fsync=1");
    }
    let side = match job {
        Job { flush_each: 1, .. } => Side::Flush,
        job if job.reads() => Side::Read,
        _ => Side::Write,
    };
    parse(&shell::output(&mut fio)?, side)
}

/// The options that make fio an NBD client of `uri`.
pub fn nbd(uri: &str) -> Vec<String> {
    vec!["--ioengine=nbd".into(), format!("--uri={uri}")]
}

/// The options that make fio an iSCSI initiator of `uri`.
pub fn iscsi(uri: &str) -> Vec<String> {
    // A colon would end the name.
    vec!["--ioengine=libiscsi".into(), format!("--filename={}", uri.replace(':', "\\:"))]
}

/// Reads the report of a run that wrote.
pub fn parse_writes(text: &str) -> Result<Outcome> {
    parse(text, Side::Write)
}

/// Which part of fio's report is looked at; flushes count as the writes they follow.
#[derive(Clone, Copy, PartialEq)]
enum Side {
    Read,
    Write,
    Flush,
}

fn parse(text: &str, which: Side) -> Result<Outcome> {
    // fio puts its remarks before the report.
    let begin = text.find('{').with_context(|| format!("fio reported nothing but: {text}"))?;
    let report: Value = serde_json::from_str(&text[begin..])?;
    let job = &report["jobs"][0];
    if job["error"].as_u64() != Some(0) {
        bail!("fio failed: {}", job["error"]);
    }
    let side = &job[if which == Side::Read { "read" } else { "write" }];
    let latency = if which == Side::Flush { &job["sync"]["lat_ns"] } else { &side["clat_ns"] };
    let percentile = |name: &str| latency["percentile"][name].as_u64().unwrap_or(0);
    let mut bins = Vec::new();
    for (edge, count) in latency["bins"].as_object().into_iter().flatten() {
        bins.push((edge.parse()?, count.as_u64().unwrap_or(0)));
    }
    bins.sort_unstable();
    Ok(Outcome {
        iops: side["iops"].as_f64().context("fio reports no IOPS")?,
        bytes_per_second: side["bw_bytes"].as_f64().context("fio reports no bandwidth")?,
        requests: side["total_ios"].as_u64().context("fio reports no count")?,
        mean_ns: latency["mean"].as_f64().unwrap_or(0.0),
        latency_ns: [
            percentile("50.000000"),
            percentile("99.000000"),
            percentile("99.900000"),
            percentile("99.990000"),
        ],
        bins,
    })
}

/// A small histogram of latencies, a line for each doubling.
pub fn histogram(bins: &[(u64, u64)], width: usize) -> Vec<String> {
    let total: u64 = bins.iter().map(|(_, count)| count).sum();
    let mut buckets: Vec<(u32, u64)> = Vec::new();
    for &(edge, count) in bins {
        let power = edge.max(1).ilog2();
        match buckets.last_mut() {
            Some(last) if last.0 == power => last.1 += count,
            _ => buckets.push((power, count)),
        }
    }
    let highest = buckets.iter().map(|bucket| bucket.1).max().unwrap_or(1).max(1);
    let mut lines = Vec::new();
    for (power, count) in buckets {
        let share = count as f64 * 100.0 / total.max(1) as f64;
        if share < 0.005 {
            continue;
        }
        let bar = "█".repeat(((count * width as u64).div_ceil(highest)) as usize);
        lines.push(format!("{:>8} {share:6.2} % {bar}", time(1 << power)));
    }
    lines
}

/// Nanoseconds, for people.
pub fn time(nanoseconds: u64) -> String {
    match nanoseconds {
        0..=9_999 => format!("{:.1} us", nanoseconds as f64 / 1e3),
        10_000..=999_999 => format!("{} us", nanoseconds / 1_000),
        1_000_000..=99_999_999 => format!("{:.1} ms", nanoseconds as f64 / 1e6),
        100_000_000..=9_999_999_999 => format!("{} ms", nanoseconds / 1_000_000),
        _ => format!("{:.1} s", nanoseconds as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read() {
        let text = "fio: remark\n{\"jobs\":[{\"error\":0,\"write\":{\"iops\":10.5,\"bw_bytes\":43008,\"total_ios\":21,\
            \"clat_ns\":{\"mean\":1050,\"percentile\":{\"50.000000\":1000,\"99.000000\":2000},\"bins\":{\"1000\":20,\"2100\":1}}}}]}";
        let outcome = parse(text, Side::Write).unwrap();
        assert_eq!((outcome.requests, outcome.mean_ns), (21, 1050.0));
        assert_eq!(outcome.latency_ns, [1000, 2000, 0, 0]);
        assert_eq!(outcome.bins, [(1000, 20), (2100, 1)]);
        assert_eq!(histogram(&outcome.bins, 10).len(), 2);
        assert!(parse("{\"jobs\":[{\"error\":5}]}", Side::Read).is_err());
        assert!(parse("nothing", Side::Read).is_err());
    }
}
