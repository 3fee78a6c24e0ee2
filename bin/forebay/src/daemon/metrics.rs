//! `/metrics`, in the text format of Prometheus and OpenMetrics.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use forebay_nvmf::stats::{CommandKind, Snapshot as HostCounts};

use super::control::App;
use crate::engine::volumes::{Kind, LATENCY_BUCKETS, bucket_end_us};
use crate::engine::{KindSnapshot, LogSnapshot, Snapshot};
use crate::failure::{Failure, Result};

/// The scrape.
pub async fn metrics(State(app): State<App>) -> Response {
    match render(&app).await {
        Ok(text) => ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(failure) => failure.into_response(),
    }
}

async fn render(app: &App) -> Result<String> {
    let snapshot = app.engine.call(async move |engine| engine.snapshot().await).await?;
    let mut registry = Registry::with_prefix("forebay");
    registry.register_collector(Box::new(Scrape { snapshot, process: Process::look() }));
    let mut out = String::new();
    text::encode(&mut out, &registry).map_err(|error| Failure::failed(format!("encoding metrics: {error}")))?;
    Ok(out)
}

/// What the process takes of the machine.
#[derive(Debug)]
struct Process {
    resident_bytes: u64,
    cpu_seconds: f64,
    open_files: u64,
}

impl Process {
    fn look() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, |dir| dir.count() as u64);
        Self { open_files, ..Self::parse(&stat) }
    }

    /// Fields 14, 15 (ticks in user and kernel mode) and 24 (resident pages) of proc(5)'s stat, counted from the
    /// closing parenthesis, because the program's name may hold anything.
    fn parse(stat: &str) -> Self {
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
        Self {
            resident_bytes: field(24) * rustix::param::page_size() as u64,
            cpu_seconds: (field(14) + field(15)) as f64 / ticks_per_second as f64,
            open_files: 0,
        }
    }
}

#[derive(Debug)]
struct Scrape {
    snapshot: Snapshot,
    process: Process,
}

type Encoded = std::result::Result<(), std::fmt::Error>;

impl Collector for Scrape {
    fn encode(&self, mut out: DescriptorEncoder) -> Encoded {
        let gauge = |out: &mut DescriptorEncoder, name: &str, help: &str, unit: Option<&Unit>, value: f64| {
            let metric = ConstGauge::new(value);
            metric.encode(out.encode_descriptor(name, help, unit, MetricType::Gauge)?)
        };
        let status = &self.snapshot.status;
        gauge(&mut out, "uptime", "Time since the daemon started", Some(&Unit::Seconds), status.uptime_s as f64)?;
        gauge(&mut out, "cores", "Reactors", None, f64::from(status.cores))?;
        gauge(&mut out, "targets", "Exports", None, status.targets as f64)?;
        gauge(&mut out, "connections", "Connections that hosts hold", None, status.connections as f64)?;
        let resident = self.process.resident_bytes as f64;
        gauge(&mut out, "process_resident", "Memory in use", Some(&Unit::Bytes), resident)?;
        gauge(&mut out, "process_open_files", "Open files and sockets", None, self.process.open_files as f64)?;
        let cpu = ConstCounter::new(self.process.cpu_seconds);
        let help = "Processor time used";
        cpu.encode(out.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?)?;
        let dropped = ConstCounter::new(crate::logging::dropped_lines());
        let help = "Lines of the log that could not be written";
        dropped.encode(out.encode_descriptor("log_lines_dropped", help, None, MetricType::Counter)?)?;
        let nbd = &self.snapshot.nbd;
        for (name, help, value) in [
            ("nbd_accepted", "Connections accepted over NBD", nbd.accepted),
            ("nbd_turned_away", "Connections turned away over NBD, because there were too many", nbd.turned_away),
            ("nbd_ended_for_cause", "Connections over NBD ended for breaking the protocol", nbd.ended_for_cause),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(out.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        self.encode_nvme(&mut out)?;
        self.encode_iscsi(&mut out)?;
        let open = status.peers.iter().filter(|peer| peer.state == "open").count();
        gauge(
            &mut out,
            "peers",
            "Other daemons, and clients that speak in messages, that are connected",
            None,
            open as f64,
        )?;
        let peers = &self.snapshot.peers;
        for (name, help, value) in [
            ("peer_messages", "Messages of peers that were answered", peers.messages),
            ("peer_refused", "Peers that were turned away before they had a connection", peers.refused),
            ("peer_interrupted", "Streams to and from peers that were lost", peers.interrupted),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(out.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        self.encode_pools(&mut out)?;
        self.encode_volumes(&mut out)?;
        self.encode_logs(&mut out)?;
        self.encode_store(&mut out)
    }
}

impl Scrape {
    fn encode_nvme(&self, out: &mut DescriptorEncoder) -> Encoded {
        let nvme = &self.snapshot.nvme;
        let counts = &nvme.counts;
        for (name, help, value) in [
            ("nvme_accepted", "Connections accepted over NVMe/TCP", counts.accepted),
            ("nvme_turned_away", "Connections turned away over NVMe/TCP, as there were too many", counts.turned_away),
            (
                "nvme_ended_for_cause",
                "Connections over NVMe/TCP ended for breaking the protocol",
                counts.ended_for_cause,
            ),
            ("nvme_refused", "Connects over NVMe/TCP refused", counts.refused),
            ("nvme_keep_alive_expired", "Controllers whose host fell silent", counts.keep_alive_expired),
            ("nvme_digest_errors", "Data that did not have the digest that it came with", counts.digest_errors),
            ("nvme_auth_failures", "Hosts that failed to authenticate", counts.auth_failures),
            ("nvme_tls_failures", "Connections that did not come to agree on TLS", counts.tls_failures),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(out.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let controllers = ConstGauge::new(nvme.controllers as f64);
        let help = "Controllers that hosts have";
        controllers.encode(out.encode_descriptor("nvme_controllers", help, None, MetricType::Gauge)?)?;
        let help = "Connections with TLS";
        let mut family = out.encode_descriptor("nvme_tls_connections", help, None, MetricType::Gauge)?;
        for (suite, count) in &nvme.suites {
            ConstGauge::new(*count as f64).encode(family.encode_family(&[("suite", *suite)])?)?;
        }
        let help = "Commands of a host";
        let mut family = out.encode_descriptor("nvme_host_commands", help, None, MetricType::Counter)?;
        for (host, done) in &nvme.hosts {
            for kind in CommandKind::ALL {
                let labels = [("host", host.as_str()), ("command", kind.label())];
                ConstCounter::new(done.commands[kind as usize]).encode(family.encode_family(&labels)?)?;
            }
        }
        let each: [(&str, &str, Option<&Unit>, fn(&HostCounts) -> u64); 3] = [
            ("nvme_host_errors", "Commands of a host that failed", None, |done| done.errors),
            ("nvme_host_read", "What a host has read", Some(&Unit::Bytes), |done| done.bytes_read),
            ("nvme_host_written", "What a host has written", Some(&Unit::Bytes), |done| done.bytes_written),
        ];
        for (name, help, unit, value) in each {
            let mut family = out.encode_descriptor(name, help, unit, MetricType::Counter)?;
            for (host, done) in &nvme.hosts {
                let labels = [("host", host.as_str())];
                ConstCounter::new(value(done)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_iscsi(&self, out: &mut DescriptorEncoder) -> Encoded {
        use forebay_iscsi::stats::{CommandKind, Snapshot};
        let iscsi = &self.snapshot.iscsi;
        let counts = &iscsi.counts;
        for (name, help, value) in [
            ("iscsi_accepted", "Connections accepted over iSCSI", counts.accepted),
            ("iscsi_turned_away", "Connections turned away over iSCSI, as there were too many", counts.turned_away),
            ("iscsi_logins_refused", "Logins over iSCSI refused", counts.logins_refused),
            ("iscsi_ended_for_cause", "Connections over iSCSI ended for breaking the protocol", counts.ended_for_cause),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(out.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let sessions = ConstGauge::new(iscsi.sessions as f64);
        let help = "Sessions that hosts have over iSCSI";
        sessions.encode(out.encode_descriptor("iscsi_sessions", help, None, MetricType::Gauge)?)?;
        let help = "Commands of a host over iSCSI";
        let mut family = out.encode_descriptor("iscsi_host_commands", help, None, MetricType::Counter)?;
        for (host, done) in &iscsi.hosts {
            for kind in CommandKind::ALL {
                let labels = [("host", host.as_str()), ("command", kind.label())];
                ConstCounter::new(done.commands[kind as usize]).encode(family.encode_family(&labels)?)?;
            }
        }
        let each: [(&str, &str, Option<&Unit>, fn(&Snapshot) -> u64); 3] = [
            ("iscsi_host_errors", "Commands of a host over iSCSI that failed", None, |done| done.errors),
            ("iscsi_host_read", "What a host has read over iSCSI", Some(&Unit::Bytes), |done| done.bytes_read),
            ("iscsi_host_written", "What a host has written over iSCSI", Some(&Unit::Bytes), |done| done.bytes_written),
        ];
        for (name, help, unit, value) in each {
            let mut family = out.encode_descriptor(name, help, unit, MetricType::Counter)?;
            for (host, done) in &iscsi.hosts {
                let labels = [("host", host.as_str())];
                ConstCounter::new(value(done)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_pools(&self, out: &mut DescriptorEncoder) -> Encoded {
        let parts: [(&str, &str, Option<&Unit>, fn(&crate::api::Pool) -> u64); 4] = [
            ("pool_capacity", "What the pool can store in all", Some(&Unit::Bytes), |pool| pool.capacity),
            ("pool_used", "What the pool stores", Some(&Unit::Bytes), |pool| pool.used),
            ("pool_available", "What the pool can still store", Some(&Unit::Bytes), |pool| pool.available),
            ("pool_objects", "Objects in the pool", None, |pool| pool.objects),
        ];
        for (name, help, unit, value) in parts {
            let mut metric = out.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            for pool in &self.snapshot.status.pools {
                let labels = [("pool", pool.name.as_str())];
                ConstGauge::new(value(pool) as f64).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_logs(&self, out: &mut DescriptorEncoder) -> Encoded {
        type Field = fn(&LogSnapshot) -> f64;
        let gauges: [(&str, &str, Field); 5] = [
            ("log_on", "The write log takes writes (1), or requests go round it (0)", |log| {
                f64::from(u8::from(log.on))
            }),
            ("log_capacity_bytes", "Bytes that a write log's payloads may take", |log| log.stats.capacity as f64),
            ("log_used_bytes", "Bytes of a write log that cannot be written now", |log| log.stats.used as f64),
            ("log_dirty_bytes", "Bytes that the backend may not hold yet", |log| log.stats.dirty_bytes as f64),
            ("log_dirty_age_seconds", "Age of the oldest of them", |log| log.stats.dirty_age.as_secs_f64()),
        ];
        for (name, help, field) in gauges {
            let mut family = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for log in &self.snapshot.logs {
                let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str())];
                ConstGauge::new(field(log)).encode(family.encode_family(&labels)?)?;
            }
        }
        let counters: [(&str, &str, Field); 7] = [
            ("log_appended", "Entries appended", |log| log.stats.appended as f64),
            ("log_groups", "Groups in which they were appended", |log| log.stats.groups as f64),
            ("log_overwritten", "Entries overwritten before they were written back", |log| {
                log.stats.overwritten as f64
            }),
            ("log_written_back_bytes", "Bytes written back", |log| log.stats.written_back_bytes as f64),
            ("log_direct", "Writes that went round the log", |log| log.stats.direct as f64),
            ("log_backend_errors", "Attempts to write back that failed", |log| log.stats.backend_errors as f64),
            ("log_throttled_seconds", "Time that writes were held back", |log| log.stats.throttled_ns as f64 / 1e9),
        ];
        for (name, help, field) in counters {
            let mut family = out.encode_descriptor(name, help, None, MetricType::Counter)?;
            for log in &self.snapshot.logs {
                let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str())];
                ConstCounter::new(field(log)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn encode_volumes(&self, out: &mut DescriptorEncoder) -> Encoded {
        let parts: [(&str, &str, Option<&Unit>, fn(&KindSnapshot) -> u64); 3] = [
            ("volume_requests", "Requests from hosts that have ended", None, |kind| kind.requests),
            ("volume_errors", "Requests from hosts that failed", None, |kind| kind.errors),
            ("volume_transferred", "What requests from hosts were about", Some(&Unit::Bytes), |kind| kind.bytes),
        ];
        for (name, help, unit, value) in parts {
            let mut metric = out.encode_descriptor(name, help, unit, MetricType::Counter)?;
            for volume in &self.snapshot.volumes {
                for kind in Kind::ALL {
                    let labels = [("pool", &*volume.pool), ("image", &*volume.image), ("request", kind.name())];
                    ConstCounter::new(value(&volume.kinds[kind as usize])).encode(metric.encode_family(&labels)?)?;
                }
            }
        }
        let help = "How long requests from hosts took";
        let mut metric = out.encode_descriptor("volume_latency", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        for volume in &self.snapshot.volumes {
            for kind in Kind::ALL {
                let seen = &volume.kinds[kind as usize];
                let labels = [("pool", &*volume.pool), ("image", &*volume.image), ("request", kind.name())];
                let end = |bucket| {
                    if bucket == LATENCY_BUCKETS { f64::INFINITY } else { bucket_end_us(bucket) as f64 / 1e6 }
                };
                let buckets: Vec<(f64, u64)> =
                    seen.latency.iter().enumerate().map(|(bucket, &count)| (end(bucket), count)).collect();
                metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                    seen.nanos as f64 / 1e9,
                    seen.requests,
                    &buckets,
                    None,
                )?;
            }
        }
        Ok(())
    }

    fn encode_store(&self, out: &mut DescriptorEncoder) -> Encoded {
        for counter in &self.snapshot.store {
            let kind = if counter.grows { MetricType::Counter } else { MetricType::Gauge };
            let unit = counter.bytes.then_some(&Unit::Bytes);
            let metric = out.encode_descriptor(counter.name, counter.help, unit, kind)?;
            match counter.grows {
                true => ConstCounter::new(counter.value).encode(metric)?,
                false => ConstGauge::new(counter.value as f64).encode(metric)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_found_behind_any_name() {
        let mut stat = String::from("42 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 200 100");
        stat.push_str(" 0 0 20 0 1 0 5 9999 3 18446744073709551615");
        let process = Process::parse(&stat);
        assert_eq!(process.resident_bytes, 3 * rustix::param::page_size() as u64);
        assert_eq!(process.cpu_seconds, 300.0 / rustix::param::clock_ticks_per_second() as f64);
    }

    #[test]
    fn this_process_takes_something() {
        let process = Process::look();
        assert!(process.resident_bytes > 0 && process.open_files > 0);
    }
}
