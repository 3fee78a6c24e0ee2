//! Metrics of volumes, of fronts by pool, and of write logs.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_export::meter::{CountersByKind, LATENCY_BUCKETS, RequestCounters, RequestKind, bucket_end_us};
use forebay_qos::QosStats;
use forebay_vhost::stats::VhostCounts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::Encoded;
use super::{replicas, vhost};
use crate::api::Front;
use crate::engine::{LogSnapshot, MetricsSnapshot};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Request kinds that every scrape counts by volume.
const COMMON: [RequestKind; 2] = [RequestKind::Read, RequestKind::Write];

/// Request metric: name, help, unit, value.
type Field<N> = (&'static str, &'static str, Option<&'static Unit>, fn(&RequestCounters) -> N);

const REQUESTS: Field<u64> = ("requests", "Requests from hosts that have ended", None, |counts| counts.count.get());
const ERRORS: Field<u64> = ("errors", "Requests from hosts that failed", None, |counts| counts.errors.get());
const BYTES: Field<u64> =
    ("transferred", "What requests from hosts were about", Some(&Unit::Bytes), |counts| counts.bytes.get());
const TIME: Field<f64> =
    ("busy", "Time that requests took together", Some(&Unit::Seconds), |counts| counts.nanos.get() as f64 / 1e9);

/// Labels of a row.
type Labels = Vec<(&'static str, String)>;

/// Encodes the counters of a full scrape.
pub(super) fn encode_all(snapshot: &MetricsSnapshot, out: &mut DescriptorEncoder) -> Encoded {
    let paths: Vec<(Labels, _)> = snapshot
        .meters
        .paths()
        .into_iter()
        .map(|((front, pool), counts)| {
            (vec![("front", front.map_or("bench", Front::name).into()), ("pool", pool)], counts)
        })
        .collect();
    for field in [ERRORS, BYTES] {
        encode_counter(out, "request", field, &paths, &RequestKind::ALL)?;
    }
    encode_latency(out, "request_latency", &paths)?;
    let volumes = labelled(snapshot.meters.volumes());
    for field in [REQUESTS, BYTES] {
        encode_counter(out, "volume", field, &volumes, &COMMON)?;
    }
    encode_counter(out, "volume", TIME, &volumes, &COMMON)?;
    // Sum over all kinds.
    let mut family = out.encode_descriptor("volume_errors", ERRORS.1, None, MetricType::Counter)?;
    for (labels, counts) in &volumes {
        let sum: u64 = counts.iter().map(ERRORS.3).sum();
        ConstCounter::new(sum).encode(family.encode_family(labels)?)?;
    }
    encode_limits(out, &snapshot.limits)?;
    let logs = snapshot.logs.iter().collect::<Vec<_>>();
    encode_log_gauges(out, &logs)?;
    replicas::encode_logs(out, &logs)?;
    replicas::encode_placed(out, snapshot.placed_here)?;
    replicas::encode_takeovers(out, &snapshot.takeovers)
}

/// Collector for all counters of the requested volumes.
#[derive(Debug)]
pub(super) struct Asked {
    volumes: Vec<(ImageSpec, Arc<CountersByKind>)>,
    limits: Vec<(ImageSpec, QosStats)>,
    logs: Vec<LogSnapshot>,
    vhost: Vec<(ImageSpec, VhostCounts)>,
}

impl Asked {
    /// # Errors
    /// [`FailureKind::NotFound`] for a volume that was not served since the start.
    pub(super) fn new(snapshot: MetricsSnapshot, asked: &[ImageSpec]) -> Result<Self> {
        let all: BTreeMap<ImageSpec, _> = snapshot.meters.volumes().into_iter().collect();
        let volume = |spec: &ImageSpec| {
            let counts = all.get(spec).cloned().ok_or_else(|| {
                let text = format!("no metrics of {spec}: it was not exported since the daemon started");
                Failure::new(FailureKind::NotFound, text).hint("'forebay targets' lists what is exported")
            });
            Ok((spec.clone(), counts?))
        };
        let volumes = asked.iter().map(volume).collect::<Result<Vec<_>>>()?;
        let is_asked = |log: &LogSnapshot| asked.iter().any(|spec| spec.pool == log.pool && spec.image == log.image);
        let limits = snapshot.limits.into_iter().filter(|(spec, _)| asked.contains(spec)).collect();
        let vhost = vhost::of_images(&snapshot.vhost, asked);
        Ok(Self { volumes, limits, logs: snapshot.logs.into_iter().filter(is_asked).collect(), vhost })
    }
}

impl Collector for Asked {
    fn encode(&self, mut out: DescriptorEncoder) -> Encoded {
        let volumes = labelled(self.volumes.clone());
        for field in [REQUESTS, ERRORS, BYTES] {
            encode_counter(&mut out, "volume", field, &volumes, &RequestKind::ALL)?;
        }
        encode_counter(&mut out, "volume", TIME, &volumes, &RequestKind::ALL)?;
        encode_latency(&mut out, "volume_latency", &volumes)?;
        encode_limits(&mut out, &self.limits)?;
        let logs: Vec<&LogSnapshot> = self.logs.iter().collect();
        encode_log_gauges(&mut out, &logs)?;
        replicas::encode_logs(&mut out, &logs)?;
        encode_log_counters(&mut out, &logs)?;
        vhost::encode_images(&self.vhost, &mut out)
    }
}

/// Encodes what limits have held up, of volumes that have some.
fn encode_limits(out: &mut DescriptorEncoder, limits: &[(ImageSpec, QosStats)]) -> Encoded {
    let rows = labelled(limits.to_vec());
    let help = "Requests that had to wait for a limit of their volume";
    let mut family = out.encode_descriptor("volume_throttled_requests", help, None, MetricType::Counter)?;
    for (labels, stats) in &rows {
        ConstCounter::new(stats.throttled).encode(family.encode_family(labels)?)?;
    }
    let help = "Time that requests waited for limits of their volume together";
    let mut family = out.encode_descriptor("volume_throttled", help, Some(&Unit::Seconds), MetricType::Counter)?;
    for (labels, stats) in &rows {
        ConstCounter::new(stats.throttled_time.as_secs_f64()).encode(family.encode_family(labels)?)?;
    }
    let help = "Requests that wait for a limit of their volume now";
    let mut family = out.encode_descriptor("volume_throttled_waiting", help, None, MetricType::Gauge)?;
    for (labels, stats) in &rows {
        ConstGauge::new(stats.waiting as f64).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

fn labelled<T>(volumes: Vec<(ImageSpec, T)>) -> Vec<(Labels, T)> {
    volumes.into_iter().map(|(spec, counts)| (vec![("pool", spec.pool), ("image", spec.image)], counts)).collect()
}

/// Adds the kind of request to the labels of a row.
fn with_kind(labels: &Labels, kind: RequestKind) -> Labels {
    labels.iter().cloned().chain([("request", kind.name().to_owned())]).collect()
}

fn encode_counter<N>(
    out: &mut DescriptorEncoder,
    prefix: &str,
    (name, help, unit, value): Field<N>,
    rows: &[(Labels, Arc<CountersByKind>)],
    kinds: &[RequestKind],
) -> Encoded
where
    ConstCounter<N>: EncodeMetric,
{
    let name = format!("{prefix}_{name}");
    let mut family = out.encode_descriptor(&name, help, unit, MetricType::Counter)?;
    for (labels, counts) in rows {
        for &kind in kinds {
            let value = value(&counts[kind as usize]);
            ConstCounter::new(value).encode(family.encode_family(&with_kind(labels, kind))?)?;
        }
    }
    Ok(())
}

fn encode_latency(out: &mut DescriptorEncoder, name: &str, rows: &[(Labels, Arc<CountersByKind>)]) -> Encoded {
    let help = "How long requests from hosts took, below the front";
    let mut family = out.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
    let end = |bucket| if bucket == LATENCY_BUCKETS { f64::INFINITY } else { bucket_end_us(bucket) as f64 / 1e6 };
    for (labels, counts) in rows {
        for kind in RequestKind::ALL {
            let seen = &counts[kind as usize];
            let buckets: Vec<(f64, u64)> =
                seen.latency.iter().enumerate().map(|(bucket, count)| (end(bucket), count.get())).collect();
            // A request that ends meanwhile may or may not be in the buckets; the count is the sum of the buckets.
            let count = buckets.iter().map(|(_, count)| count).sum();
            family.encode_family(&with_kind(labels, kind))?.encode_histogram::<NoLabelSet>(
                seen.nanos.get() as f64 / 1e9,
                count,
                &buckets,
                None,
            )?;
        }
    }
    Ok(())
}

type LogField = (&'static str, &'static str, fn(&LogSnapshot) -> f64);

fn encode_logs(out: &mut DescriptorEncoder, kind: MetricType, fields: &[LogField], logs: &[&LogSnapshot]) -> Encoded {
    for (name, help, value) in fields {
        let mut family = out.encode_descriptor(name, help, None, kind)?;
        for log in logs {
            let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str())];
            let metric = family.encode_family(&labels)?;
            match kind {
                MetricType::Counter => ConstCounter::new(value(log)).encode(metric)?,
                _ => ConstGauge::new(value(log)).encode(metric)?,
            }
        }
    }
    Ok(())
}

fn encode_log_gauges(out: &mut DescriptorEncoder, logs: &[&LogSnapshot]) -> Encoded {
    let fields: [LogField; 4] = [
        ("log_on", "The write log takes writes (1), or requests go round it (0)", |log| f64::from(u8::from(log.on))),
        ("log_used_bytes", "Bytes of a write log that cannot be written now", |log| log.stats.used as f64),
        ("log_dirty_bytes", "Bytes that the backend may not hold yet", |log| log.stats.dirty_bytes as f64),
        ("log_dirty_age_seconds", "Age of the oldest of them", |log| log.stats.dirty_age.as_secs_f64()),
    ];
    encode_logs(out, MetricType::Gauge, &fields, logs)
}

fn encode_log_counters(out: &mut DescriptorEncoder, logs: &[&LogSnapshot]) -> Encoded {
    let capacity: LogField =
        ("log_capacity_bytes", "Bytes that a write log's payloads may take", |log| log.stats.capacity as f64);
    encode_logs(out, MetricType::Gauge, &[capacity], logs)?;
    let fields: [LogField; 7] = [
        ("log_appended", "Entries appended", |log| log.stats.appended as f64),
        ("log_groups", "Groups in which they were appended", |log| log.stats.groups as f64),
        ("log_overwritten", "Entries overwritten before they were written back", |log| log.stats.overwritten as f64),
        ("log_written_back_bytes", "Bytes written back", |log| log.stats.written_back_bytes as f64),
        ("log_direct", "Writes that went round the log", |log| log.stats.direct as f64),
        ("log_backend_errors", "Attempts to write back that failed", |log| log.stats.backend_errors as f64),
        ("log_throttled_seconds", "Time that writes were held back", |log| log.stats.throttled_ns as f64 / 1e9),
    ];
    encode_logs(out, MetricType::Counter, &fields, logs)
}
