//! Limits of open volumes, and whether their own blocks are cached: read from the options of image, pool and daemon, and
//! again when those may have changed.

use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{BlockReply, BlockRequest, LocalFuture};
use forebay_image::{Image, MetadataReader, OWN_BLOCKS_KEY, OwnBlockState};
use forebay_qos::{QosLimits, QosStats, ShareAdmission, SharedRequest};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{sleep, try_spawn};

use super::volumes::Volume;
use crate::api::QosInfo;
use crate::rbd_options::{METADATA_PREFIX, OWN_BLOCKS, is_on, overridden_by};

/// Reason why own blocks are not cached although an image asks for it.
pub(super) const NO_OWN_BLOCKS: &str = "this daemon has no read cache ([read-cache] in its configuration), or the pool is in \
                                        memory";

/// Interval at which the options of a shared pool are read again: nothing announces changes of them.
const READ_AGAIN: Duration = Duration::from_secs(30);

/// Options of a daemon that images and pools override, by name.
pub type DefaultOptions = Rc<BTreeMap<String, String>>;

/// Source of a volume's limits. Reading it does not keep the image open: readers are no users of the volume, whose last user
/// lets others reserve the image.
pub(super) struct LimitSource {
    defaults: DefaultOptions,
    metadata: MetadataReader,
    /// Serializes reading, so that what was read last is applied last.
    reading: Semaphore,
}

impl LimitSource {
    pub(super) fn new(image: &Image, defaults: DefaultOptions) -> Self {
        Self { defaults, metadata: image.metadata_reader(), reading: Semaphore::new(1) }
    }

    /// Reads the options of the image: its own before those of its pool before the daemon's.
    async fn read_options(&self) -> forebay_block::Result<BTreeMap<String, String>> {
        let mut options = (*self.defaults).clone();
        options.extend(overrides(self.metadata.pool_metadata(METADATA_PREFIX).await?));
        options.extend(overrides(self.metadata.image_metadata(METADATA_PREFIX).await?));
        options.extend(overrides(self.metadata.image_metadata(OWN_BLOCKS_KEY).await?));
        Ok(options)
    }

    /// Reads the limits again and applies them, unless the volume is closed meanwhile. If that fails, those before stay in
    /// force.
    async fn reload(self: Rc<Self>, volume: Weak<Volume>) {
        let _turn = self.reading.acquire(1).await;
        let options = self.read_options().await;
        let Some(volume) = volume.upgrade() else { return };
        let image = volume.image.name();
        let options = match options {
            Ok(options) => options,
            Err(error) => {
                tracing::warn!(image, %error, "cannot read the limits of an image; they are unchanged");
                return;
            }
        };
        if !volume.image.is_read_only() {
            volume.times.set_options(&options);
        }
        volume.cache_own_blocks(options.get(OWN_BLOCKS.name).is_some_and(|value| is_on(value)));
        let (limits, ignored) = QosLimits::from_options(|name| options.get(name).map(String::as_str));
        if limits == volume.qos.limits() {
            return;
        }
        for why in ignored {
            tracing::warn!(image, "a limit is ignored: {why}");
        }
        let in_force = limits.named().into_iter().filter(|(_, limit)| limit.rate > 0);
        let shown: Vec<_> = in_force.map(|(name, limit)| format!("{name} {}", limit.rate)).collect();
        tracing::info!(image, limits = shown.join(", "), "the limits of an image have changed");
        volume.qos.set_limits(limits);
    }
}

/// Returns the overridden options among the metadata of an image or a pool, by name; values that are no text are left out.
pub(super) fn overrides(metadata: Vec<(String, Vec<u8>)>) -> BTreeMap<String, String> {
    let option =
        |(key, value): (String, Vec<u8>)| Some((overridden_by(&key)?.to_owned(), String::from_utf8(value).ok()?));
    metadata.into_iter().filter_map(option).collect()
}

impl Volume {
    /// Reads the limits again and applies them. If that fails, those before stay in force.
    pub async fn reload_limits(self: &Rc<Self>) {
        self.limits.clone().reload(Rc::downgrade(self)).await;
    }

    /// Enables or disables the cache of the image's own blocks.
    fn cache_own_blocks(&self, wanted: bool) {
        let (before, image) = (self.image.own_block_state(), self.image.name());
        self.image.cache_own_blocks(wanted);
        match (before == OwnBlockState::Disabled, wanted) {
            (true, true) if self.image.own_block_state() == OwnBlockState::Unavailable => {
                tracing::warn!(image, "own blocks of the image are not cached: {NO_OWN_BLOCKS}");
            }
            (true, true) => tracing::info!(image, "own blocks of the image are cached"),
            (false, false) => tracing::info!(image, "own blocks of the image are not cached any more"),
            _ => {}
        }
    }

    /// Returns the state of the cache of the image's own blocks.
    pub fn own_block_state(&self) -> OwnBlockState {
        self.image.own_block_state()
    }

    /// Keeps the limits up to date from now on, until the volume is closed.
    pub(super) fn follow_limits(self: &Rc<Self>) {
        let weak = Rc::downgrade(self);
        self.image.set_header_hook(Rc::new(move || {
            if let Some(volume) = weak.upgrade() {
                drop(try_spawn(volume.limits.clone().reload(weak.clone())));
            }
        }));
        if self.image.client().is_some() {
            drop(try_spawn(reload_regularly(self.limits.clone(), Rc::downgrade(self))));
        }
    }

    /// Submits a request of a host to the volume when writes are not held, and its limits and its share of the core admit it.
    /// One that need not wait for them takes no memory, and returns the share that it uses until it completes.
    pub(super) fn submit_limited(
        self: &Rc<Self>,
        request: BlockRequest,
    ) -> (LocalFuture<forebay_block::Result<BlockReply>>, Option<SharedRequest>) {
        self.times.note(&request);
        if !self.gate.is_held() || !request.is_write() {
            return self.submit_passed(request);
        }
        let volume = self.clone();
        let submitted = async move {
            volume.gate.pass().await;
            let (submitted, share) = volume.submit_passed(request);
            let result = submitted.await;
            drop(share);
            result
        };
        (Box::pin(submitted), None)
    }

    fn submit_passed(
        self: &Rc<Self>,
        request: BlockRequest,
    ) -> (LocalFuture<forebay_block::Result<BlockReply>>, Option<SharedRequest>) {
        match self.qos.admit(&request) {
            None => self.submit_shared(request),
            Some(wait) => {
                let volume = self.clone();
                let submitted = async move {
                    wait.await;
                    let (submitted, share) = volume.submit_shared(request);
                    let result = submitted.await;
                    drop(share);
                    result
                };
                (Box::pin(submitted), None)
            }
        }
    }

    fn submit_shared(
        self: &Rc<Self>,
        request: BlockRequest,
    ) -> (LocalFuture<forebay_block::Result<BlockReply>>, Option<SharedRequest>) {
        let Some(share) = &self.share else { return (self.top().submit(request), None) };
        match share.admit(&request) {
            ShareAdmission::Now(share) => (self.top().submit(request), share),
            ShareAdmission::Wait(wait) => {
                let volume = self.clone();
                let submitted = async move {
                    let share = wait.await;
                    // Looked up only now: the image may have got a write log meanwhile, or lost it.
                    let result = volume.top().submit(request).await;
                    drop(share);
                    result
                };
                (Box::pin(submitted), None)
            }
        }
    }

    /// Returns whether it has limits.
    pub fn has_limits(&self) -> bool {
        self.qos.limits().has_any()
    }

    /// Returns the counters of its limits.
    pub fn qos_stats(&self) -> QosStats {
        self.qos.stats()
    }

    /// Describes its limits; `None` if it has none.
    pub fn describe_limits(&self) -> Option<QosInfo> {
        let (limits, stats) = (self.qos.limits(), self.qos.stats());
        let mut shown = BTreeMap::new();
        for (name, limit) in limits.named().into_iter().filter(|(_, limit)| limit.rate > 0) {
            shown.insert(format!("rbd_qos_{name}_limit"), limit.rate);
            if limit.burst > 0 {
                shown.insert(format!("rbd_qos_{name}_burst"), limit.burst);
                shown.insert(format!("rbd_qos_{name}_burst_seconds"), limit.burst_seconds);
            }
        }
        let QosStats { throttled, throttled_time, waiting } = stats;
        let throttled_ms = u64::try_from(throttled_time.as_millis()).unwrap_or(u64::MAX);
        (!shown.is_empty()).then_some(QosInfo { limits: shown, throttled, throttled_ms, waiting })
    }
}

/// Reads the limits of a volume in a shared pool from time to time.
async fn reload_regularly(limits: Rc<LimitSource>, volume: Weak<Volume>) {
    while volume.strong_count() > 0 {
        sleep(READ_AGAIN).await;
        limits.clone().reload(volume.clone()).await;
    }
}

#[cfg(test)]
mod tests {
    use forebay_image as image;
    use forebay_reactor::{DriverChoice, Reactor};

    use crate::engine::testing::{POOL, engine_with_cluster, until};

    /// A change by another client has the limits read again, and the next command finds the image free nevertheless.
    #[test]
    fn readers_of_limits_are_no_users_of_an_image() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, cluster, _, spec) = engine_with_cluster(dir.path()).await;
            let volume = engine.open_volume(&spec).await.expect("open");
            let other = image::Images::of(&cluster.client().pool(POOL));
            let stall = cluster.stall(POOL, "rbd_info");
            other.change_image_metadata("x", "key", Some(b"1".to_vec())).await.expect("changed");
            until(|| stall.waiting() > 0).await;
            drop(volume);
            assert!(!engine.volumes.is_open(&spec), "it is used by what reads its limits");
            drop(stall);
            engine.close().await.expect("closed");
        });
    }
}
