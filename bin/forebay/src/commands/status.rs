//! `status` and `reload`.

use forebay_block::StoredBytes;

use super::{cache, shapes, with_session};
use crate::api::DaemonStatus;
use crate::cli::{GlobalArgs, MaybeImage};
use crate::client::session::{CommandSession, STATUS_TIMEOUT};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::{GetImageStatus, GetStatus, Reload};
use crate::output::{Output, fields, table};
use crate::spec::ImageSpec;
use crate::units::{Size, duration, percent};

/// Requests the daemon's status, or the watchers of an image.
pub fn status(global: &GlobalArgs, output: Output, options: MaybeImage) -> Result<()> {
    match options.image {
        None => daemon_status(global, output),
        Some(spec) => image_status(global, output, &spec),
    }
}

/// Shows the watchers of an image, as `rbd status` does.
fn image_status(global: &GlobalArgs, output: Output, spec: &ImageSpec) -> Result<()> {
    let found = with_session(global, |session| session.call(GetImageStatus(spec.clone()), |_| {}));
    let status = found.map_err(|failure| match failure.kind {
        // Scripts look for these words.
        FailureKind::NotFound => {
            failure.context(format_args!("error opening image {}: (2) No such file or directory", spec.name()))
        }
        _ => failure,
    })?;
    output.print(&status, shapes::watchers)
}

fn daemon_status(global: &GlobalArgs, output: Output) -> Result<()> {
    let status = CommandSession::daemon(global)?.call(&GetStatus, Some(STATUS_TIMEOUT), |_| {})?;
    output.print(&status, render)?;
    if !status.ready {
        return Err(Failure::new(FailureKind::Unreachable, "the daemon is not ready"));
    }
    Ok(())
}

/// Makes the daemon reload hosts and secrets.
pub fn reload(global: &GlobalArgs, output: Output) -> Result<()> {
    let reloaded = CommandSession::daemon(global)?.call(&Reload, Some(STATUS_TIMEOUT), |_| {})?;
    output.print(&reloaded, |reloaded| match reloaded.restart {
        true => "hosts and secrets count from now on; other settings that differ need a restart\n".into(),
        false => String::new(),
    })
}

fn render(status: &DaemonStatus) -> String {
    let mut rows = vec![
        ("state", if status.ready { "ready".into() } else { "not ready".into() }),
        ("version", status.version.clone()),
        ("process", status.pid.to_string()),
        ("up", duration(status.uptime_s)),
        ("cores", format!("{} ({})", status.cores, status.driver)),
        ("data", status.data.display().to_string()),
        ("control", status.control.display().to_string()),
        ("nbd", status.nbd.join(", ")),
    ];
    if !status.nvme.is_empty() {
        rows.push(("nvme", format!("{} ({})", status.nvme.join(", "), status.nvme_nqn)));
    }
    if !status.iscsi.is_empty() {
        rows.push(("iscsi", format!("{} ({})", status.iscsi.join(", "), status.iscsi_name)));
    }
    match status.vhost_sockets {
        0 => {}
        1 => rows.push(("vhost", "1 socket".into())),
        count => rows.push(("vhost", format!("{count} sockets"))),
    }
    if let Some(http) = &status.http {
        rows.push(("http", http.clone()));
    }
    rows.push((
        "exports",
        match status.unserved {
            0 => status.targets.to_string(),
            unserved => format!("{}, of which {unserved} not served ('forebay targets' says why)", status.targets),
        },
    ));
    rows.push(("connections", status.connections.to_string()));
    if let Some(info) = &status.read_cache {
        rows.push(("read cache", cache::summary(info)));
    }
    if !status.peer.is_empty() {
        rows.push(("peer", status.peer.join(", ")));
    }
    let pools = status.pools.iter().map(|pool| {
        vec![
            pool.name.clone(),
            pool.kind.clone(),
            Size(pool.capacity).to_string(),
            Size(pool.used).to_string(),
            percent(pool.used, pool.capacity),
            Size(pool.available).to_string(),
            pool.objects.to_string(),
        ]
    });
    let header = ["POOL", "KIND", "CAPACITY", "USED", "USED%", "AVAILABLE", "OBJECTS"];
    let mut text = format!("{}\n{}", fields(&rows), table(&header, &[2, 3, 4, 5, 6], pools));
    for pool in status.pools.iter().filter(|pool| pool.compressed_stored > 0) {
        let sizes = StoredBytes { logical: pool.compressed_logical, stored: pool.compressed_stored };
        let (logical, stored) = (Size(sizes.logical), Size(sizes.stored));
        text.push_str(&format!("{} keeps {logical} compressed in {stored} (ratio {:.2})\n", pool.name, sizes.ratio()));
    }
    for (pool, limit) in status.pools.iter().filter_map(|pool| Some((&pool.name, pool.limited_by.as_ref()?))) {
        text.push_str(&format!("{pool} is limited by {limit}\n"));
    }
    for (pool, why) in status.pools.iter().filter_map(|pool| Some((&pool.name, pool.refuses_writes.as_ref()?))) {
        text.push_str(&format!("{pool} takes no writes: {why}\n"));
    }
    for (pool, what) in status.pools.iter().filter_map(|pool| Some((&pool.name, pool.needs_repair.as_ref()?))) {
        text.push_str(&format!("{pool} needs a repair: {what}\n"));
    }
    if !status.peers.is_empty() {
        let peers = status.peers.iter().map(|peer| {
            let way = if peer.outgoing { "to" } else { "from" };
            let reason = peer.reason.clone().unwrap_or_default();
            let offers = peer.replicas.iter();
            let offered = offers.map(|offer| format!("{} {} free", offer.medium.name(), Size(offer.free)));
            vec![
                peer.address.clone(),
                way.into(),
                peer.host.clone().unwrap_or_else(|| peer.name.clone()),
                peer.transport.clone(),
                peer.state.clone(),
                offered.collect::<Vec<_>>().join(", "),
                reason,
            ]
        });
        text.push('\n');
        text.push_str(&table(&["PEER", "WAY", "NAME", "TRANSPORT", "STATE", "REPLICAS", "REASON"], &[], peers));
    }
    text
}
