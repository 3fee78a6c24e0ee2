//! Write logs of volumes: attach, end, flush and discard.
//!
//! An image whose record names a log is never opened without it: the daemon or a command that opens the image has the
//! log in front of it.  [`LogAttachment`] ensures that.

mod list;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ErrorKind, InFlightTracker};
use forebay_image::Image;
use forebay_reactor::{spawn, timeout, wall_clock};
use forebay_writelog::replication::MemberState;
use forebay_writelog::{DirtyLimits, LogAttachment, MediumKind, Mode, WriteLog};

use super::Engine;
use super::identity::{DataDirIdentity, format_uuid};
use super::log_keeper::{ImageLog, LogDevices, load_record};
use super::volumes::Volume;
use crate::api;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL};

/// Time without write-back progress after which ending a log is abandoned; the log is kept then.
const STALLED: Duration = Duration::from_secs(30);

/// Time that keeping a log waits until its volume has no users; after it, the last user closes the log.
const CLOSING: Duration = Duration::from_secs(2);

/// Time that a stopping daemon waits for its logs to be closed: a backend that does not respond, or a log that is
/// being ended, must not block it.
const STOPPING: Duration = Duration::from_secs(10);

/// Open log devices, and volumes with an open log.
#[derive(Default)]
pub struct Logs {
    devices: Rc<LogDevices>,
    /// Volumes that stay open while the engine runs, or until their log is ended.
    volumes: RefCell<BTreeMap<ImageSpec, Rc<Volume>>>,
}

impl Logs {
    /// Returns the open log devices.
    pub(super) fn devices(&self) -> &Rc<LogDevices> {
        &self.devices
    }
}

/// Explains an error of a write log.
pub(super) fn log_failure(error: forebay_block::Error, spec: &ImageSpec) -> Failure {
    let kind = error.kind();
    let failure = Failure::from(error).context(format!("the write log of {spec}"));
    match kind {
        ErrorKind::Busy => failure
            .hint("another process has the log device open; end that process, or wait until it has closed the device"),
        ErrorKind::Unsupported => {
            failure.hint("put the log on a DAX file system, or append ':force' to its place if its data may be lost")
        }
        ErrorKind::Denied | ErrorKind::Fenced | ErrorKind::Corrupt | ErrorKind::NotFound => failure.hint(format!(
            "to lose its dirty data: forebay log discard {spec} --force; the image then has the data of its backend"
        )),
        _ => failure,
    }
}

impl Engine {
    /// Returns the limits of logs that specify none.
    fn configured_limits(&self) -> DirtyLimits {
        self.options.daemon.as_ref().map_or_else(DirtyLimits::default, |daemon| daemon.config.log_limits)
    }

    /// Returns the adapter between an image and its log.
    pub(super) fn image_log(&self, spec: &ImageSpec, image: &Rc<Image>, changes: &Rc<InFlightTracker>) -> Rc<ImageLog> {
        Rc::new(ImageLog {
            image: image.clone(),
            volume_id: format_uuid(&self.identity.volume(spec, image.id())),
            shared_id: self.shared_id(spec, image.id()),
            peers: self.log_peers(),
            name: spec.to_string(),
            passing: spec.pool == RAM_POOL,
            configured: self.configured_limits(),
            devices: self.logs.devices.clone(),
            changes: changes.clone(),
            fenced: Rc::default(),
        })
    }

    /// Returns the identity of an image in a Ceph cluster that all daemons have for it.
    pub(super) fn shared_id(&self, spec: &ImageSpec, image_id: &str) -> Option<String> {
        let (fsid, pool) = self.is_in_ceph(&spec.pool).then(|| self.ceph.pool_identity(&spec.pool))??;
        Some(format_uuid(&DataDirIdentity::shared_volume(&fsid, pool, image_id)))
    }

    /// Returns whether the log of an image is open, which keeps its volume open.
    pub(super) fn has_open_log(&self, spec: &ImageSpec) -> bool {
        self.logs.volumes.borrow().contains_key(spec)
    }

    /// Keeps a volume with an open log open.
    pub(super) fn keep_logged(&self, spec: &ImageSpec, volume: &Rc<Volume>) {
        if volume.log().is_some() {
            self.logs.volumes.borrow_mut().insert(spec.clone(), volume.clone());
        }
    }

    /// Keeps a volume open no longer for its log.
    pub(super) fn let_go_of_log(&self, spec: &ImageSpec) {
        let kept = self.logs.volumes.borrow_mut().remove(spec);
        drop(kept);
    }

    /// Attaches the requested log to a volume.
    pub(super) async fn ensure_log(&self, spec: &ImageSpec, volume: &Rc<Volume>, place: &api::LogPlace) -> Result<()> {
        let attached = volume.attachment.attach(place).await;
        self.keep_logged(spec, volume);
        let recorded = volume.attachment.recorded().is_some();
        attached.map_err(|error| match error.kind() {
            ErrorKind::Exists => log_failure(error, spec).hint("end its exports first, which ends the log"),
            ErrorKind::TimedOut if place.is_in_memory() && !recorded => log_failure(error, spec).hint(
                "'forebay status' shows what each peer offers, and this daemon's log why a peer has not taken a copy",
            ),
            // No log exists yet that could be discarded.
            ErrorKind::NotFound if !recorded => Failure::from(error)
                .context(format!("a write log for {spec} at {place}"))
                .hint("name a file in an existing directory, or a device"),
            ErrorKind::Denied | ErrorKind::Corrupt if !recorded => {
                Failure::from(error).context(format!("a write log for {spec} at {place}"))
            }
            _ => log_failure(error, spec),
        })
    }

    /// Returns whether an open volume has no log, or goes on without the one that it had.
    pub(super) fn lacks_log(&self, spec: &ImageSpec) -> bool {
        let log = self.volumes.find(spec).map(|volume| volume.log());
        log.is_some_and(|log| log.is_none_or(|log| matches!(log.mode(), Mode::Off(_))))
    }

    /// Waits until this process has acquired a volume's log.
    pub(super) async fn log_acquired(&self, spec: &ImageSpec, volume: &Rc<Volume>) -> Result<()> {
        let Some(log) = volume.log() else { return Ok(()) };
        log.acquired().await.map_err(|error| log_failure(error, spec))
    }

    /// Ends a volume's log: writes all dirty data back, and releases the log.  With `keep` the log stays as it is,
    /// for the next time that the image is opened.
    pub(super) async fn end_log(&self, spec: &ImageSpec, keep: bool) -> Result<()> {
        let Some(volume) = self.logs.volumes.borrow().get(spec).cloned() else { return Ok(()) };
        let fenced = volume.attachment.members().is_some_and(|set| set.is_fenced());
        if fenced {
            tracing::warn!(
                image = %spec,
                "the write log is closed as it is: another daemon has taken it over, or the cluster has fenced this client"
            );
        }
        if keep || fenced {
            return self.keep_log(spec, volume).await;
        }
        if let Err(error) = volume.attachment.end(STALLED).await {
            return Err(log_failure(error, spec).context("detached, but its write log is kept").hint(format!(
                "nothing is lost: the daemon keeps retrying; 'forebay log flush {spec}' waits for it, 'forebay log \
                 discard {spec}' then ends it"
            )));
        }
        self.logs.volumes.borrow_mut().remove(spec);
        Ok(())
    }

    /// Closes a volume's log once the volume has no users; waits a bounded time for that.
    async fn keep_log(&self, spec: &ImageSpec, volume: Rc<Volume>) -> Result<()> {
        self.logs.volumes.borrow_mut().remove(spec);
        drop(volume);
        match timeout(CLOSING, self.volumes.closed(spec)).await {
            Ok(closed) => closed.map_err(|error| log_failure(error, spec)),
            Err(_) => {
                tracing::info!(image = %spec, "the write log stays open until the last reader of the image has ended");
                Ok(())
            }
        }
    }

    /// Ends the logs whose copies here end with this process, while that takes no longer than [`STOPPING`]: their images need
    /// no takeover then.
    async fn end_logs_in_memory(&self) {
        let volumes: Vec<_> =
            self.logs.volumes.borrow().iter().map(|(spec, volume)| (spec.clone(), volume.clone())).collect();
        let in_memory = |volume: &Volume| volume.log().is_some_and(|log| log.medium() == MediumKind::Dram);
        let ending: Vec<_> = volumes
            .into_iter()
            .filter(|(_, volume)| in_memory(volume))
            .map(|(spec, volume)| {
                let attachment = volume.attachment.clone();
                (spec, spawn(async move { timeout(STOPPING, attachment.end(STOPPING)).await }))
            })
            .collect();
        for (spec, ended) in ending {
            if !matches!(ended.await, Ok(Ok(()))) {
                tracing::warn!(
                    image = %spec,
                    "a write log in memory is not written back, and this daemon's copy ends with it: take it over at a replica"
                );
            }
        }
    }

    /// Closes all logs as they are, within [`STOPPING`]; they resume when their volumes are opened again.
    pub(super) async fn close_logs(&self) -> Result<()> {
        self.end_logs_in_memory().await;
        drop(std::mem::take(&mut *self.logs.volumes.borrow_mut()));
        let mut result = Ok(());
        for (spec, closed) in self.volumes.close_all(STOPPING).await {
            if let Err(error) = closed {
                result = Err(log_failure(error, &spec));
            }
        }
        result
    }

    /// Opens an image without its log, to read its record.
    pub(super) async fn open_image(&self, spec: &ImageSpec) -> Result<Rc<Image>> {
        if let Some(volume) = self.volumes.find(spec) {
            return Ok(volume.image.clone());
        }
        let backend = self.pool(&spec.pool).await?;
        let image = Image::open(backend, &spec.image, Default::default()).await;
        image.map_err(|error| self.image_failure(error, spec))
    }

    /// Writes back all dirty data of an image's log.
    pub async fn flush_log(&self, spec: &ImageSpec) -> Result<api::WriteLogInfo> {
        let volume = self.open_volume(spec).await?;
        let log = volume.log().ok_or_else(|| no_log(spec))?;
        log.drain().await.map_err(|error| log_failure(error, spec))?;
        self.log_info(spec).await
    }

    /// Discards an image's log with its content.
    pub async fn discard_log(&self, spec: &ImageSpec, force: bool) -> Result<()> {
        if !force {
            self.refuse_group_volume(spec, "discarded by --force only: to write it back and end it, detach the image")?;
        }
        // The image is reserved, so it cannot be opened meanwhile.
        let _turn = self.volumes.opening.lock(spec).await;
        if self.is_exported(spec) && self.volumes.find(spec).is_some() {
            return Err(Failure::new(FailureKind::Busy, format!("the write log of {spec} is in use"))
                .hint(format!("end its exports first: forebay detach {spec}")));
        }
        let found = self.log_info(spec).await?;
        // A log that is being closed is checked again once that is done.
        if found.state != "open" {
            refuse_dirty(&found, spec, force, wall_clock())?;
        }
        if found.state == "replica" {
            self.refuse_unclosed(spec).await?;
        }
        let kept = self.logs.volumes.borrow_mut().remove(spec).is_some();
        match timeout(CLOSING, self.volumes.closed(spec)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(image = %spec, %error, "a write log that is to be discarded was not closed cleanly");
            }
            // The reservation reports it.
            Err(_) if self.volumes.is_open(spec) => {}
            Err(_) => {
                return Err(Failure::new(FailureKind::Busy, format!("the write log of {spec} is still being closed"))
                    .hint("try again when that is done"));
            }
        }
        let _reserved = match self.volumes.reserve(spec) {
            Ok(reserved) => reserved,
            Err(failure) => {
                // The volume still has other users.
                if let Some(volume) = self.volumes.find(spec).filter(|_| kept) {
                    self.keep_logged(spec, &volume);
                }
                return Err(failure);
            }
        };
        // A user of the volume may have written to the log since.
        let Some(now) = self.find_log(spec).await? else {
            // It was disabled: closing it has freed its space.
            return Ok(());
        };
        refuse_dirty(&now, spec, force, wall_clock())?;
        let image = self.open_image(spec).await?;
        let keeper = self.image_log(spec, &image, &Rc::default());
        LogAttachment::discard(&*keeper).await.map_err(|error| match error.kind() {
            // The record may have changed as well: either way another daemon, or a client of the cluster, has the image.
            ErrorKind::Busy => log_failure(error, spec)
                .hint(format!("the image is in use there; end that first: forebay detach {spec} --keep-log")),
            _ => log_failure(error, spec),
        })
    }

    /// Fails if this daemon's copy of a log has every acknowledged write, and another daemon has not closed the log: that
    /// one's lock would be waited for, however long, and the log discarded when its operator may have decided otherwise.
    async fn refuse_unclosed(&self, spec: &ImageSpec) -> Result<()> {
        let (_, members) = self.members_of(spec).await?;
        let (own, primary) = (self.peers.known().own(), members.primary());
        if primary == own || members.client().is_empty() || members.state(own) != Some(MemberState::Complete) {
            return Ok(());
        }
        let host = self.peers.known().host(primary).unwrap_or_else(|| primary.to_string());
        let hint = match self.peers.known().connection(primary) {
            Some(_) => format!("end it there: forebay detach {spec}"),
            None => format!("take it over, which loses nothing: forebay log takeover {spec}; then discard it"),
        };
        let what = format!("the primary of the write log of {spec}, {host}, has not closed it");
        Err(Failure::new(FailureKind::Busy, what).hint(hint))
    }

    /// Fails if an image has a log, which the operation would bypass.
    pub(super) async fn refuse_logged(&self, spec: &ImageSpec) -> Result<()> {
        let Ok(Some(log)) = self.find_log(spec).await else {
            // An image that cannot be read has no log that is known; a record that cannot be read may name one.
            let Ok(image) = self.open_image(spec).await else { return Ok(()) };
            return load_record(&image).await.map(drop).map_err(|error| log_failure(error, spec));
        };
        let dirty = unwritten(&log, wall_clock()).unwrap_or_else(|| "holds no dirty data".into());
        let what = format!("{spec} has a write log at {}, which {dirty}", log.place);
        let hint = match log.state.as_str() {
            "replica" => format!(
                "end it where the image is served: forebay detach {spec}; if that daemon is lost: forebay log takeover \
                 {spec} --flush-only, then forebay log discard {spec}"
            ),
            _ => format!("'forebay log flush {spec}', then 'forebay log discard {spec}' end it"),
        };
        Err(Failure::new(FailureKind::Busy, what).hint(hint))
    }

    /// Returns the open logs, for their counters.
    pub(super) fn open_logs(&self) -> Vec<(ImageSpec, Rc<WriteLog>)> {
        let volumes = self.logs.volumes.borrow();
        volumes.iter().filter_map(|(spec, volume)| Some((spec.clone(), volume.log()?))).collect()
    }
}

fn no_log(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::NotFound, format!("{spec} has no write log"))
        .hint("attach one with 'forebay attach --log MEDIUM[:PATH]:SIZE'; 'forebay log ls' lists all write logs")
}

/// Describes acknowledged writes that a log holds, or may hold, and its image does not; `None` if there are none.
fn unwritten(found: &api::WriteLogInfo, now: Duration) -> Option<String> {
    match (found.state.as_str(), found.dirty_entries) {
        ("unreachable", _) => Some("may hold dirty data: how much is unknown".into()),
        (_, 1..) => Some(format!("holds dirty data: {}", found.loss(now))),
        ("replica", 0) if found.reason.is_some() => Some("may hold dirty data: how much its members know".into()),
        ("replica", 0) => Some("may hold dirty data: the copy here has none".into()),
        ("open", 0) => Some("may hold dirty data: how much its user knows".into()),
        (_, 0) => None,
    }
}

/// Refuses to lose data that a log holds, or may hold, unless `force` is set.
fn refuse_dirty(found: &api::WriteLogInfo, spec: &ImageSpec, force: bool, now: Duration) -> Result<()> {
    let Some(dirty) = unwritten(found, now).filter(|_| !force) else { return Ok(()) };
    let of = match found.state.as_str() {
        "unreachable" => "is unreachable, and ",
        "open" => "is in use, and ",
        "replica" => "belongs to another daemon, and ",
        _ => "",
    };
    let back = match found.state.as_str() {
        "unreachable" if found.place.is_in_memory() => {
            let what = format!("the write log of {spec} {of}{dirty}");
            return Err(Failure::new(FailureKind::Busy, what).hint(format!(
                "take it over at a member that is complete, which loses nothing: forebay log takeover {spec}; or lose it with \
                 --force"
            )));
        }
        "replica" => format!("forebay log takeover {spec} --flush-only"),
        _ => format!("forebay log flush {spec}"),
    };
    Err(Failure::new(FailureKind::Busy, format!("the write log of {spec} {of}{dirty}"))
        .hint(format!("write it back with '{back}', or lose it with --force")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1_700_000_090);

    fn log(state: &str, dirty_entries: u64) -> api::WriteLogInfo {
        api::WriteLogInfo {
            state: state.into(),
            dirty_entries,
            dirty_bytes: dirty_entries << 12,
            dirty_since_ms: (dirty_entries > 0).then_some(1_700_000_000_000),
            ..api::WriteLogInfo::at("ssd:/l:16M".parse().expect("a place"))
        }
    }

    #[test]
    fn who_would_lose_writes_is_told_how_many_since_when() {
        let spec: ImageSpec = "rbd/a".parse().expect("a spec");
        for state in ["replica", "closed", "on", "open", "off", "failed"] {
            let refused = refuse_dirty(&log(state, 16), &spec, false, NOW).expect_err("it holds writes");
            let says =
                "holds dirty data: 64 KiB in 16 entries, the oldest written 1 min 30 s ago (2023-11-14T22:13:20Z)";
            assert!(refused.message.ends_with(says), "{state}: {}", refused.message);
            assert!(refused.hint.is_some_and(|hint| hint.contains("--force")));
            refuse_dirty(&log(state, 16), &spec, true, NOW).expect("forced");
        }
        for state in ["replica", "open", "unreachable"] {
            let refused = refuse_dirty(&log(state, 0), &spec, false, NOW).expect_err("it may hold some");
            assert!(refused.message.contains("may hold dirty data: "), "{}", refused.message);
        }
        refuse_dirty(&log("closed", 0), &spec, false, NOW).expect("nothing is lost");
        let ended = api::WriteLogInfo { place: "dram:16M".parse().expect("a place"), ..log("unreachable", 0) };
        let refused = refuse_dirty(&ended, &spec, false, NOW).expect_err("replicas may hold some");
        assert!(
            refused.hint.is_some_and(|hint| hint.contains("forebay log takeover rbd/a") && hint.contains("--force"))
        );
    }
}
