//! Metrics endpoint `/metrics`, in the text formats of OpenMetrics and of Prometheus.
//!
//! A full scrape has a few lines per volume, and latencies by front and pool; `?volume=POOL/IMAGE` returns all
//! counters of the given volumes instead.

mod fronts;
mod process;
mod read_cache;
mod replicas;
mod vhost;
mod volumes;

use std::fmt::Write as _;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::control::App;
use crate::engine::MetricsSnapshot;
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

type Encoded = std::result::Result<(), std::fmt::Error>;

/// Handles a scrape.
pub async fn metrics(
    State(app): State<App>,
    Query(asked): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match render(&app, &asked).await {
        Ok(text) if accept.contains("application/openmetrics-text") => {
            ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response()
        }
        Ok(text) => ([(header::CONTENT_TYPE, CLASSIC)], classic(&text)).into_response(),
        Err(failure) => failure.into_response(),
    }
}

async fn render(app: &App, asked: &[(String, String)]) -> Result<String> {
    let mut volumes = Vec::new();
    for (name, value) in asked {
        if name != "volume" {
            return Err(Failure::invalid(format!("/metrics takes volume=POOL/IMAGE, not {name}")));
        }
        volumes.push(value.parse::<ImageSpec>().map_err(Failure::invalid)?);
    }
    let snapshot = app.engine.call(async move |engine| engine.snapshot().await).await?;
    let mut own = Registry::with_prefix("forebay");
    let mut standard = Registry::default();
    if volumes.is_empty() {
        standard.register_collector(Box::new(process::Process::look()));
        own.register_collector(Box::new(All(snapshot)));
    } else {
        own.register_collector(Box::new(volumes::Asked::new(snapshot, &volumes)?));
    }
    let mut out = String::new();
    let encoded = text::encode_registry(&mut out, &standard)
        .and_then(|()| text::encode_registry(&mut out, &own))
        .and_then(|()| text::encode_eof(&mut out));
    encoded.map_err(|error| Failure::failed(format!("encoding metrics: {error}")))?;
    Ok(out)
}

/// Converts OpenMetrics text to the older Prometheus format: a counter there has the name of its samples, and there
/// are no units and no end marker.
fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let comment = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        match comment {
            Some(("HELP", rest)) => {
                let (name, help) = rest.split_once(' ').unwrap_or((rest, ""));
                let counter = lines.peek().is_some_and(|next| is_counter(next, name));
                let _ = writeln!(out, "# HELP {name}{} {help}", if counter { "_total" } else { "" });
            }
            Some(("TYPE", rest)) => {
                let (name, kind) = rest.split_once(' ').unwrap_or((rest, ""));
                let _ = writeln!(out, "# TYPE {name}{} {kind}", if kind == "counter" { "_total" } else { "" });
            }
            _ if line.starts_with('#') => {}
            _ => {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out
}

/// Returns whether the line after a counter's help declares its type.
fn is_counter(line: &str, name: &str) -> bool {
    line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_prefix(name)) == Some(" counter")
}

/// Encodes a gauge.
fn gauge(out: &mut DescriptorEncoder, name: &str, help: &str, unit: Option<&Unit>, value: f64) -> Encoded {
    ConstGauge::new(value).encode(out.encode_descriptor(name, help, unit, MetricType::Gauge)?)
}

/// Encodes a counter.
fn counter<N>(out: &mut DescriptorEncoder, name: &str, help: &str, unit: Option<&Unit>, value: N) -> Encoded
where
    ConstCounter<N>: EncodeMetric,
{
    ConstCounter::new(value).encode(out.encode_descriptor(name, help, unit, MetricType::Counter)?)
}

/// Collector for a full scrape.
#[derive(Debug)]
struct All(MetricsSnapshot);

impl Collector for All {
    fn encode(&self, mut out: DescriptorEncoder) -> Encoded {
        let Self(snapshot) = self;
        let status = &snapshot.status;
        let mut build = out.encode_descriptor("build_info", "The build that runs", None, MetricType::Gauge)?;
        let labels = [("version", status.version.as_str())];
        ConstGauge::new(1.0).encode(build.encode_family(&labels)?)?;
        gauge(&mut out, "uptime", "Time since the daemon started", Some(&Unit::Seconds), status.uptime_s as f64)?;
        gauge(&mut out, "cores", "Reactors", None, f64::from(status.cores))?;
        gauge(&mut out, "targets", "Exports", None, status.targets as f64)?;
        gauge(&mut out, "targets_unserved", "Exports that hosts cannot reach", None, status.unserved as f64)?;
        let help = "An export that hosts cannot reach, and the kind of the failure";
        let mut family = out.encode_descriptor("target_unserved", help, None, MetricType::Gauge)?;
        for export in &snapshot.unserved {
            let labels = [
                ("front", export.front.name()),
                ("pool", export.image.pool.as_str()),
                ("image", export.image.image.as_str()),
                ("kind", export.kind.name()),
            ];
            ConstGauge::new(1.0).encode(family.encode_family(&labels)?)?;
        }
        gauge(&mut out, "connections", "Connections that hosts hold", None, status.connections as f64)?;
        let help = "Lines of the log that could not be written";
        counter(&mut out, "log_lines_dropped", help, None, crate::logging::dropped_lines())?;
        fronts::encode(snapshot, &mut out)?;
        vhost::encode(&snapshot.vhost, &mut out)?;
        self.encode_pools(&mut out)?;
        volumes::encode_all(snapshot, &mut out)?;
        if let Some(stats) = &snapshot.read_cache {
            read_cache::encode(stats, &mut out)?;
        }
        self.encode_store(&mut out)
    }
}

impl All {
    fn encode_pools(&self, out: &mut DescriptorEncoder) -> Encoded {
        let parts: [(&str, &str, Option<&Unit>, fn(&crate::api::PoolInfo) -> u64); 5] = [
            ("pool_capacity", "What the pool can store in all", Some(&Unit::Bytes), |pool| pool.capacity),
            ("pool_used", "What the pool stores", Some(&Unit::Bytes), |pool| pool.used),
            ("pool_available", "What the pool can still store", Some(&Unit::Bytes), |pool| pool.available),
            ("pool_objects", "Objects in the pool", None, |pool| pool.objects),
            ("pool_writable", "The pool takes writes (1), or has failed (0)", None, |pool| {
                u64::from(pool.refuses_writes.is_none())
            }),
        ];
        for (name, help, unit, value) in parts {
            let mut metric = out.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            for pool in &self.0.status.pools {
                let labels = [("pool", pool.name.as_str())];
                ConstGauge::new(value(pool) as f64).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_store(&self, out: &mut DescriptorEncoder) -> Encoded {
        for one in &self.0.store {
            let unit = one.bytes.then_some(&Unit::Bytes);
            match one.grows {
                true => counter(out, one.name, one.help, unit, one.value)?,
                false => gauge(out, one.name, one.help, unit, one.value as f64)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_by_their_samples() {
        let text = "# HELP a_bytes Much.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{x=\"# HELP\"} 1\n\
                    # HELP b Little.\n# TYPE b gauge\nb 2.0\n# EOF\n";
        assert_eq!(
            classic(text),
            "# HELP a_bytes_total Much.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"# HELP\"} 1\n\
             # HELP b Little.\n# TYPE b gauge\nb 2.0\n"
        );
    }
}
