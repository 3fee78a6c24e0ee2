//! Metrics of the read cache.

use forebay_readcache::{DiskState, ReadCacheStats, SourceStats};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::{Encoded, counter, gauge};

type Parts = [(&'static str, u64); 2];

/// Returns the hits of one kind of data, by layer.
fn hits(stats: &SourceStats) -> [(&'static str, u64); 4] {
    [("memory", stats.hits_memory), ("disk", stats.hits_disk), ("zero", stats.hits_zero), ("shared", stats.hits_joined)]
}

/// Encodes the counters and gauges of the cache.
pub(super) fn encode(stats: &ReadCacheStats, out: &mut DescriptorEncoder) -> Encoded {
    let bytes = Some(&Unit::Bytes);
    let layers: [(&str, &str, Parts); 2] = [
        (
            "read_cache_capacity",
            "What a layer of the read cache can hold",
            [("memory", stats.memory_capacity), ("disk", stats.disk_capacity)],
        ),
        (
            "read_cache_used",
            "What a layer of the read cache holds",
            [("memory", stats.memory_bytes), ("disk", stats.disk_bytes)],
        ),
    ];
    for (name, help, parts) in layers {
        let mut family = out.encode_descriptor(name, help, bytes, MetricType::Gauge)?;
        for (layer, value) in parts {
            ConstGauge::new(value as f64).encode(family.encode_family(&[("layer", layer)])?)?;
        }
    }
    let on = f64::from(u8::from(stats.disk == DiskState::On));
    gauge(out, "read_cache_disk_on", "The read cache uses its disk (1), or has none or was turned off (0)", None, on)?;
    gauge(out, "read_cache_zeroes", "Zero parts and absent objects that are known", None, stats.flags as f64)?;
    let help = "Parts of 64 KiB that clones have read from the read cache, by where they were";
    let mut family = out.encode_descriptor("read_cache_hits", help, None, MetricType::Counter)?;
    for (layer, value) in hits(&stats.parents) {
        ConstCounter::new(value).encode(family.encode_family(&[("layer", layer)])?)?;
    }
    let help = "Parts of 64 KiB of own blocks that hosts have read from the read cache, by where they were";
    let mut family = out.encode_descriptor("read_cache_own_hits", help, None, MetricType::Counter)?;
    for (layer, value) in hits(&stats.own) {
        ConstCounter::new(value).encode(family.encode_family(&[("layer", layer)])?)?;
    }
    let help = "Parts of own blocks removed from the read cache because they were about to change";
    counter(out, "read_cache_own_invalidated", help, None, stats.invalidated)?;
    counter(out, "read_cache_own_misses", "Parts of own blocks read from a pool", None, stats.own.misses)?;
    let help = "Reads of own blocks that bypassed the read cache, because the parts were being changed";
    counter(out, "read_cache_own_bypassed", help, None, stats.own.bypassed)?;
    let help = "Own blocks read from pools into the read cache";
    counter(out, "read_cache_own_fetched", help, bytes, stats.own.fetched_bytes)?;
    let help = "Own blocks read by hosts through the read cache";
    counter(out, "read_cache_own_read", help, bytes, stats.own.read_bytes)?;
    let help = "Parts evicted from the read cache";
    let mut family = out.encode_descriptor("read_cache_evictions", help, None, MetricType::Counter)?;
    for (layer, value) in [("memory", stats.evicted_memory), ("disk", stats.evicted_disk)] {
        ConstCounter::new(value).encode(family.encode_family(&[("layer", layer)])?)?;
    }
    let help = "Errors of the read cache: failed operations of the disk, wrong checksums, failed reads of a pool";
    let mut family = out.encode_descriptor("read_cache_errors", help, None, MetricType::Counter)?;
    for (kind, value) in
        [("disk", stats.disk_errors), ("checksum", stats.checksum_errors), ("pool", stats.fetch_errors)]
    {
        ConstCounter::new(value).encode(family.encode_family(&[("kind", kind)])?)?;
    }
    counter(out, "read_cache_misses", "Parts that clones have read from a pool", None, stats.parents.misses)?;
    counter(out, "read_cache_fetched", "Read from pools into the read cache", bytes, stats.parents.fetched_bytes)?;
    counter(out, "read_cache_read", "Read by clones through the read cache", bytes, stats.parents.read_bytes)?;
    counter(out, "read_cache_written_parts", "Parts written to disk", None, stats.written)?;
    counter(out, "read_cache_dropped_parts", "Parts not written, since the disk was behind", None, stats.dropped)?;
    let help = "Parts on disk that a kill had left without their data";
    counter(out, "read_cache_stale_parts", help, None, stats.stale)
}
