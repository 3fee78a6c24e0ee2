//! Metrics of the vhost-user front.

use std::collections::BTreeMap;

use forebay_vhost::VhostStats;
use forebay_vhost::stats::{VhostCounts, VhostExportStats};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Encoded, counter};
use crate::spec::ImageSpec;

/// Formats of rings.
const FORMATS: [&str; 2] = ["split", "packed"];

/// Encodes the counters of a full scrape.
pub(super) fn encode(stats: &VhostStats, out: &mut DescriptorEncoder) -> Encoded {
    let counts = stats.server();
    for (name, help, value) in [
        ("vhost_accepted", "Connections of monitors over vhost-user", counts.accepted),
        (
            "vhost_turned_away",
            "Connections turned away over vhost-user, as the export ends or has too many",
            counts.turned_away,
        ),
        (
            "vhost_ended_for_cause",
            "Connections over vhost-user ended for breaking the protocol",
            counts.ended_for_cause,
        ),
        ("vhost_broken_queues", "Queues stopped because a guest's driver broke the rules", counts.broken_queues),
    ] {
        counter(out, name, help, None, value)?;
    }
    let mut formats: BTreeMap<&str, (usize, u64)> = FORMATS.iter().map(|format| (*format, (0, 0))).collect();
    for connection in stats.connections() {
        // A monitor whose guest has no driver yet has no rings.
        if let Some((drivers, queues)) = formats.get_mut(connection.driver.ring_format) {
            *drivers += 1;
            *queues += u64::from(connection.driver.queues);
        }
    }
    let help = "Guests' drivers that run, by the format of their rings";
    let mut family = out.encode_descriptor("vhost_drivers", help, None, MetricType::Gauge)?;
    for (format, (drivers, _)) in &formats {
        ConstGauge::new(*drivers as f64).encode(family.encode_family(&[("format", *format)])?)?;
    }
    let help = "Queues of guests' drivers that run";
    let mut family = out.encode_descriptor("vhost_queues", help, None, MetricType::Gauge)?;
    for (format, (_, queues)) in &formats {
        ConstGauge::new(*queues as f64).encode(family.encode_family(&[("format", *format)])?)?;
    }
    Ok(())
}

/// Returns the counters of exports of the given images.
pub(super) fn of_images(stats: &VhostStats, asked: &[ImageSpec]) -> Vec<(ImageSpec, VhostCounts)> {
    let named = |export: VhostExportStats| Some((export.name.parse::<ImageSpec>().ok()?, export.numbers));
    stats.exports().into_iter().filter_map(named).filter(|(spec, _)| asked.contains(spec)).collect()
}

/// Encodes the counters of exports of the given images.
pub(super) fn encode_images(images: &[(ImageSpec, VhostCounts)], out: &mut DescriptorEncoder) -> Encoded {
    let fields: [(&str, &str, fn(&VhostCounts) -> u64); 2] = [
        ("vhost_kicks", "Notifications that came from a guest's driver", |counts| counts.kicks),
        ("vhost_interrupts", "Interrupts that were sent to a guest's driver", |counts| counts.interrupts),
    ];
    for (name, help, value) in fields {
        let mut family = out.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (spec, counts) in images {
            let labels = [("pool", spec.pool.as_str()), ("image", spec.image.as_str())];
            ConstCounter::new(value(counts)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
