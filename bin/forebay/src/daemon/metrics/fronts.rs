//! Metrics of connections, hosts and refusals of the fronts and of the messenger.

use forebay_nvmf::stats::{NvmeCommandKind, NvmeCounts};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::{Encoded, counter, gauge};
use crate::engine::MetricsSnapshot;

pub(super) fn encode(snapshot: &MetricsSnapshot, out: &mut DescriptorEncoder) -> Encoded {
    let nbd = &snapshot.nbd;
    for (name, help, value) in [
        ("nbd_accepted", "Connections accepted over NBD", nbd.accepted),
        ("nbd_turned_away", "Connections turned away over NBD, because there were too many", nbd.turned_away),
        ("nbd_ended_for_cause", "Connections over NBD ended for breaking the protocol", nbd.ended_for_cause),
        ("nbd_tls_failures", "NBD connections whose TLS handshake failed", nbd.tls_failures),
        ("nbd_hosts_refused", "Hosts refused over NBD, by address, by name or by an export", nbd.hosts_refused),
    ] {
        counter(out, name, help, None, value)?;
    }
    let help = "Connections over NBD with TLS";
    gauge(out, "nbd_tls_connections", help, None, snapshot.nbd_tls_connections as f64)?;
    encode_nvme(snapshot, out)?;
    encode_iscsi(snapshot, out)?;
    encode_peers(snapshot, out)
}

fn encode_peers(snapshot: &MetricsSnapshot, out: &mut DescriptorEncoder) -> Encoded {
    let open = snapshot.status.peers.iter().filter(|peer| peer.state == "open").count();
    let help = "Other daemons, and clients that speak in messages, that are connected";
    gauge(out, "peers", help, None, open as f64)?;
    let peers = &snapshot.peers;
    for (name, help, value) in [
        ("peer_messages", "Messages of peers that were answered", peers.messages),
        ("peer_refused", "Peers that were turned away before they had a connection", peers.refused),
        ("peer_interrupted", "Streams to and from peers that were lost", peers.interrupted),
    ] {
        counter(out, name, help, None, value)?;
    }
    Ok(())
}

fn encode_nvme(snapshot: &MetricsSnapshot, out: &mut DescriptorEncoder) -> Encoded {
    let nvme = &snapshot.nvme;
    let counts = &nvme.counts;
    for (name, help, value) in [
        ("nvme_accepted", "Connections accepted over NVMe/TCP", counts.accepted),
        ("nvme_turned_away", "Connections turned away over NVMe/TCP, as there were too many", counts.turned_away),
        ("nvme_ended_for_cause", "Connections over NVMe/TCP ended for breaking the protocol", counts.ended_for_cause),
        ("nvme_refused", "Connects over NVMe/TCP refused", counts.refused),
        ("nvme_keep_alive_expired", "Controllers whose host fell silent", counts.keep_alive_expired),
        ("nvme_digest_errors", "Data that did not have the digest that it came with", counts.digest_errors),
        ("nvme_auth_failures", "Hosts that failed to authenticate", counts.auth_failures),
        ("nvme_tls_failures", "Connections whose TLS handshake failed", counts.tls_failures),
    ] {
        counter(out, name, help, None, value)?;
    }
    gauge(out, "nvme_controllers", "Controllers that hosts have", None, nvme.controllers as f64)?;
    let help = "Connections with TLS";
    let mut family = out.encode_descriptor("nvme_tls_connections", help, None, MetricType::Gauge)?;
    for (suite, count) in &nvme.suites {
        ConstGauge::new(*count as f64).encode(family.encode_family(&[("suite", *suite)])?)?;
    }
    let help = "Commands of a host";
    let mut family = out.encode_descriptor("nvme_host_commands", help, None, MetricType::Counter)?;
    for (host, done) in &nvme.hosts {
        for kind in NvmeCommandKind::ALL {
            let labels = [("host", host.as_str()), ("command", kind.label())];
            ConstCounter::new(done.commands[kind as usize]).encode(family.encode_family(&labels)?)?;
        }
    }
    let each: [(&str, &str, Option<&Unit>, fn(&NvmeCounts) -> u64); 3] = [
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

fn encode_iscsi(snapshot: &MetricsSnapshot, out: &mut DescriptorEncoder) -> Encoded {
    use forebay_iscsi::stats::{ScsiCommandKind, ScsiCounts};
    let iscsi = &snapshot.iscsi;
    let counts = &iscsi.counts;
    for (name, help, value) in [
        ("iscsi_accepted", "Connections accepted over iSCSI", counts.accepted),
        ("iscsi_turned_away", "Connections turned away over iSCSI, as there were too many", counts.turned_away),
        ("iscsi_logins_refused", "Logins over iSCSI refused", counts.logins_refused),
        ("iscsi_ended_for_cause", "Connections over iSCSI ended for breaking the protocol", counts.ended_for_cause),
    ] {
        counter(out, name, help, None, value)?;
    }
    gauge(out, "iscsi_sessions", "Sessions that hosts have over iSCSI", None, iscsi.sessions as f64)?;
    let help = "Commands of a host over iSCSI";
    let mut family = out.encode_descriptor("iscsi_host_commands", help, None, MetricType::Counter)?;
    for (host, done) in &iscsi.hosts {
        for kind in ScsiCommandKind::ALL {
            let labels = [("host", host.as_str()), ("command", kind.label())];
            ConstCounter::new(done.commands[kind as usize]).encode(family.encode_family(&labels)?)?;
        }
    }
    let each: [(&str, &str, Option<&Unit>, fn(&ScsiCounts) -> u64); 3] = [
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
