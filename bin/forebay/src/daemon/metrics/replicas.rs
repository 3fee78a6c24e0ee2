//! Metrics of write logs that have replicas.

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::{Encoded, counter, gauge};
use crate::engine::replicas::TakeoverCounts;
use crate::engine::{LogSnapshot, ReplicatedLog};

/// Encodes the members of logs.
pub(super) fn encode_logs(out: &mut DescriptorEncoder, logs: &[&LogSnapshot]) -> Encoded {
    type Field = (&'static str, &'static str, fn(&ReplicatedLog) -> f64);
    let fields: [Field; 3] = [
        ("log_epoch", "Epoch of the record of a write log with replicas", |log| log.epoch as f64),
        ("log_copies", "Complete copies of a write log", |log| log.copies as f64),
        ("log_copies_wanted", "Copies that a write log should have", |log| log.wanted as f64),
    ];
    for (name, help, value) in fields {
        let mut family = out.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for log in logs {
            let Some(replicated) = &log.replicated else { continue };
            let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str())];
            ConstGauge::new(value(replicated)).encode(family.encode_family(&labels)?)?;
        }
    }
    let help = "Blocks written one-sided into the copies of replicas";
    let mut family = out.encode_descriptor("log_one_sided_blocks", help, None, MetricType::Counter)?;
    for log in logs {
        let Some(replicated) = &log.replicated else { continue };
        let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str())];
        ConstCounter::new(replicated.placed).encode(family.encode_family(&labels)?)?;
    }
    type Lag = (&'static str, &'static str, Unit, fn(&forebay_writelog::replication::MemberReport) -> f64);
    let lags: [Lag; 2] = [
        ("log_replica_lag", "Bytes of a write log that a replica lacks, at most", Unit::Bytes, |member| {
            member.lag_bytes as f64
        }),
        ("log_replica_lag_time", "Time for which a replica has made no progress", Unit::Seconds, |member| {
            member.waits.as_secs_f64()
        }),
    ];
    for (name, help, unit, value) in lags {
        let mut family = out.encode_descriptor(name, help, Some(&unit), MetricType::Gauge)?;
        for log in logs {
            let members = log.replicated.iter().flat_map(|replicated| &replicated.members);
            for member in members.filter(|member| !member.is_primary) {
                let peer = member.peer.to_string();
                let labels = [("pool", log.pool.as_str()), ("image", log.image.as_str()), ("peer", peer.as_str())];
                ConstGauge::new(value(member)).encode(family.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

/// Encodes the blocks that primaries have written into copies of this daemon.
pub(super) fn encode_placed(out: &mut DescriptorEncoder, placed: u64) -> Encoded {
    let help = "Blocks that primaries have written one-sided into copies here";
    counter(out, "replica_one_sided_blocks", help, None, placed)
}

/// Encodes the takeovers of this daemon.
pub(super) fn encode_takeovers(out: &mut DescriptorEncoder, counts: &TakeoverCounts) -> Encoded {
    counter(out, "log_takeovers", "Write logs that this daemon took over", None, counts.taken_over)?;
    let help = "Time that the last takeover took, until the log served requests";
    gauge(out, "log_takeover", help, Some(&Unit::Seconds), counts.last_ns as f64 / 1e9)
}
