//! Restore of exports when the daemon starts.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_export::ExportState;
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{sleep, spawn, timeout};

use super::ExportKey;
use crate::api::{self, Front};
use crate::engine::Engine;
use crate::engine::fronts::VhostBinding;
use crate::engine::identity::format_uuid;
use crate::engine::volumes::Volume;
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

/// Maximum number of images of one pool that are opened in parallel at startup.
const OPENING_MAX: usize = 16;

/// Time that startup waits for the images of exports before hosts may connect; images that take longer are served
/// once they are open.
const OPENING_WAIT: Duration = Duration::from_secs(10);

/// Retry delays for exports that could not be served: the first, and the limit up to which it doubles.
const RETRY_WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

impl Engine {
    /// Opens all images that were exported before the daemon was started, in parallel.  An export whose image cannot
    /// be opened is kept with its failure and retried.  After [`OPENING_WAIT`] startup continues; images not open yet
    /// are served later.
    pub async fn restore_exports(self: &Rc<Self>) {
        let (left, done) = (Rc::new(Cell::new(0_usize)), Rc::new(Notify::new()));
        for opening in self.open_each(self.begin_restoring()) {
            let (left, done) = (left.clone(), done.clone());
            left.set(left.get() + 1);
            spawn(async move {
                opening.await;
                left.set(left.get() - 1);
                done.notify_all();
            });
        }
        if timeout(OPENING_WAIT, done.wait_until(|| left.get() == 0)).await.is_err() {
            tracing::warn!(
                images = left.get(),
                "images of some exports are not open yet; hosts may connect to the others"
            );
        }
        self.keep_trying();
    }

    /// Retries failed exports until there are none.
    pub(super) fn keep_trying(self: &Rc<Self>) {
        let engine = Rc::downgrade(self);
        spawn(async move {
            let [mut wait, longest] = RETRY_WAITS;
            loop {
                sleep(wait).await;
                wait = (wait * 2).min(longest);
                let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
                let failed = engine.begin_again();
                if failed.is_empty() && !engine.exports.is_any_opening() {
                    return;
                }
                engine.open_each(failed).for_each(|opening| drop(spawn(opening)));
            }
        });
    }

    /// Opens images whose exports are marked as opening, a few of each pool in parallel: a pool that hangs blocks
    /// only its own images.
    fn open_each(
        self: &Rc<Self>,
        images: BTreeSet<ImageSpec>,
    ) -> impl Iterator<Item = impl Future<Output = ()> + use<>> {
        let mut pools: BTreeMap<String, Rc<Semaphore>> = BTreeMap::new();
        let engine = self.clone();
        images.into_iter().map(move |spec| {
            let limit = pools.entry(spec.pool.clone()).or_insert_with(|| Rc::new(Semaphore::new(OPENING_MAX))).clone();
            let engine = engine.clone();
            async move {
                let _turn = engine.exports.turns.lock(&spec).await;
                let _permit = limit.acquire(1).await;
                if !engine.closing.get() {
                    engine.restore(&spec).await;
                    engine.fronts.serve_controllers(&engine);
                }
            }
        })
    }

    /// Marks failed exports as opening; returns their images.  A marked export is not collected again while its image
    /// is queued.
    fn begin_again(&self) -> BTreeSet<ImageSpec> {
        let mut wanted = BTreeSet::new();
        for ((_, spec), export) in self.exports.exports.borrow_mut().iter_mut() {
            if export.life.retry() {
                wanted.insert(spec.clone());
            }
        }
        wanted
    }

    /// Marks the exports to restore as opening; returns their images.
    fn begin_restoring(&self) -> BTreeSet<ImageSpec> {
        let mut wanted = BTreeSet::new();
        for ((front, spec), export) in self.exports.exports.borrow_mut().iter_mut() {
            if export.life.begin() {
                wanted.insert(spec.clone());
            } else if let ExportState::Broken(failure) | ExportState::Failed(failure) = export.life.state() {
                not_served(*front, spec, failure);
            }
        }
        wanted
    }

    /// Returns whether any exports of an image are read-only, and whether any are writable, in whatever state: a
    /// failed one may be retried at any moment.
    fn exported_to(&self, spec: &ImageSpec) -> (bool, bool) {
        let exports = self.exports.exports.borrow();
        let of_image = Front::ALL.into_iter().filter_map(|front| exports.get(&(front, spec.clone())));
        of_image.fold((false, false), |(reads, writes), export| match export.request.read_only {
            true => (true, writes),
            false => (reads, true),
        })
    }

    /// Returns the socket of the export of an image over vhost, if there is one.
    async fn resolve_socket(&self, spec: &ImageSpec) -> Result<Option<VhostBinding>> {
        let key = (Front::Vhost, spec.clone());
        match self.exports.with(&key, |export| export.request.vhost.clone()).flatten() {
            Some(options) => VhostBinding::resolve(&options).await.map(Some),
            None => Ok(None),
        }
    }

    /// Opens an image and serves those of its exports that still exist.  An image that can be read but not written
    /// serves its read-only exports only.
    async fn restore(&self, spec: &ImageSpec) {
        let opened = match self.exported_to(spec) {
            (true, true) => {
                let to_read = self.open_volume_to_read(spec).await;
                // If the image is writable, this is the same volume.
                let to_write = match &to_read {
                    Ok(_) => self.open_volume(spec).await,
                    Err(failure) => Err(failure.clone()),
                };
                OpenedImage { to_read, to_write }
            }
            (_, false) => OpenedImage::both(self.open_volume_to_read(spec).await),
            (false, true) => OpenedImage::both(self.open_volume(spec).await),
        };
        let socket = self.resolve_socket(spec).await;
        // Nothing is awaited from here: these exports are wanted until they are served.
        let keys: Vec<ExportKey> = {
            let mut exports = self.exports.exports.borrow_mut();
            let of_image = Front::ALL.into_iter().map(|front| (front, spec.clone()));
            let waiting = of_image.filter(|key| exports.get_mut(key).is_some_and(|export| export.life.is_wanted()));
            waiting.collect()
        };
        for key in &keys {
            let known =
                self.exports.with(key, |export| (export.request.clone(), export.life.previous_failure().cloned()));
            let Some((request, before)) = known else { continue };
            let served = opened.of(request.read_only).and_then(|volume| {
                let identity = format_uuid(&self.identity.volume(spec, volume.image.id()));
                let unit = self.exports.choose_unit(key, request.within(), request.unit, &identity)?;
                let socket = if key.0 == Front::Vhost { socket.clone()? } else { None };
                self.serve(key, api::AttachRequest { unit, ..request }, volume, socket)
            });
            match served {
                Ok(_) if before.is_some() => {
                    tracing::info!(image = %spec, front = key.0.name(), "an export is served again");
                }
                Ok(_) => {}
                Err(failure) => {
                    // A repeated failure is logged once.
                    if before.is_none_or(|before| before.message != failure.message) {
                        not_served(key.0, spec, &failure);
                    }
                    self.exports.with(key, |export| export.life.fail(failure));
                }
            }
        }
        drop(opened);
        if !self.is_exported(spec)
            && let Err(failure) = self.end_log(spec, true).await
        {
            // It was detached while it was being opened: its log is kept.
            tracing::warn!(image = %spec, error = %failure.message, "a write log was not closed cleanly");
        }
    }
}

/// Image opened for its exports, or the failure to open it.
struct OpenedImage {
    /// Volume for read-only exports.
    to_read: Result<Rc<Volume>>,
    /// Volume for writable exports.
    to_write: Result<Rc<Volume>>,
}

impl OpenedImage {
    fn both(opened: Result<Rc<Volume>>) -> Self {
        Self { to_read: opened.clone(), to_write: opened }
    }

    fn of(&self, read_only: bool) -> Result<Rc<Volume>> {
        if read_only { self.to_read.clone() } else { self.to_write.clone() }
    }
}

/// Logs that an export is not served, and the failure.
pub(super) fn not_served(front: Front, spec: &ImageSpec, failure: &Failure) {
    tracing::error!(image = %spec, front = front.name(), error = %failure.message, "an export is not served");
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::path::Path;
    use std::pin::pin;
    use std::task::Poll;

    use forebay_block::{
        BlockDevice, BlockReply, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, Transaction,
    };
    use forebay_image::{self as image, Image};
    use forebay_reactor::sync::Permit;
    use forebay_reactor::{Buf, DriverChoice, JoinHandle, Reactor};
    use serde_json::json;

    use super::super::{Export, Lifecycle};
    use super::*;
    use crate::engine::testing::{POOL, engine, engine_with_cluster, until};
    use crate::failure::FailureKind;

    /// Creates an engine with an image in its store.
    async fn engine_with_image(dir: &Path) -> (Rc<Engine>, ImageSpec) {
        let engine = engine(dir).await;
        let create = serde_json::from_value(json!({ "pool": "local", "image": "x", "size": 8 << 20 }));
        engine.clone().create_image(create.expect("a request")).await.expect("an image");
        (engine, "local/x".parse().expect("a spec"))
    }

    /// Lists an export whose image is being opened, and detaches it while the file of exports cannot be written, as
    /// on a busy disk, until the first part of the result is dropped.
    async fn detach_while_opening(
        engine: &Rc<Engine>,
        key: &(Front, ImageSpec),
        attach: serde_json::Value,
    ) -> (Permit, JoinHandle<Result<()>>) {
        list_opening(engine, key, attach);
        detach_unsaved(engine, key).await
    }

    /// Lists an export whose image is being opened.
    fn list_opening(engine: &Engine, key: &(Front, ImageSpec), attach: serde_json::Value) {
        let attach = serde_json::from_value(attach).expect("a request");
        let mut life = Lifecycle::idle();
        assert!(life.begin());
        engine.exports.insert(key, Export::listed(attach, None, life));
    }

    /// Detaches an export while the file of exports cannot be written, until the first part of the result is dropped.
    async fn detach_unsaved(engine: &Rc<Engine>, key: &(Front, ImageSpec)) -> (Permit, JoinHandle<Result<()>>) {
        let saving = engine.exports.saves.turn.acquire(1).await;
        let (detaching, own) = (engine.clone(), key.1.clone());
        let detached = spawn(async move { detaching.detach(&own, Front::Nbd, false, false).await });
        until(|| engine.exports.with(key, |export| export.life.is_detaching()) == Some(true)).await;
        (saving, detached)
    }

    /// An export that cannot be removed from the file while its image is being opened is served, or reports the
    /// failure.
    #[test]
    fn an_export_whose_detaching_fails_while_it_is_opened_is_not_forgotten() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        for opened_first in [true, false] {
            let dir = tempfile::tempdir().expect("a directory");
            reactor.block_on(async {
                let (engine, spec) = engine_with_image(dir.path()).await;
                let key = (Front::Nbd, spec.clone());
                // The file cannot be replaced.
                std::fs::create_dir_all(dir.path().join("targets.json/in-the-way")).expect("a directory");
                let attach = json!({ "pool": "local", "image": "x", "front": "nbd" });
                let (saving, detached) = detach_while_opening(&engine, &key, attach).await;
                if opened_first {
                    engine.restore(&spec).await;
                }
                drop(saving);
                detached.await.expect_err("the file cannot be written");
                if !opened_first {
                    engine.restore(&spec).await;
                }
                let is_served = engine.exports.with(&key, |export| export.life.served().is_some());
                let is_broken =
                    engine.exports.with(&key, |export| matches!(export.life.state(), ExportState::Failed(_)));
                assert_eq!((is_served, is_broken), (Some(!opened_first), Some(opened_first)));
                engine.close().await.expect("closed");
            });
        }
    }

    /// An attach that is repeated while its image is still being opened does not serve the export once a detach has
    /// begun, whether the detach ends before it or after it.
    #[test]
    fn an_attach_that_a_detach_overtakes_serves_nothing() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        for detached_first in [true, false] {
            let dir = tempfile::tempdir().expect("a directory");
            reactor.block_on(async {
                let (engine, spec) = engine_with_image(dir.path()).await;
                let key = (Front::Nbd, spec.clone());
                let attach = json!({ "pool": "local", "image": "x", "front": "nbd" });
                let request: crate::api::AttachRequest = serde_json::from_value(attach.clone()).expect("a request");
                list_opening(&engine, &key, attach);
                let opening = engine.block_opening(&spec).await;
                let mut attached = pin!(engine.clone().attach(request));
                let waits = poll_fn(|cx| Poll::Ready(attached.as_mut().poll(cx).is_pending())).await;
                assert!(waits, "the image cannot be opened");
                let (saving, detached) = detach_unsaved(&engine, &key).await;
                if detached_first {
                    drop(saving);
                    detached.await.expect("detached");
                    drop(opening);
                    assert_eq!(attached.await.expect_err("it is detached").kind, FailureKind::Busy);
                } else {
                    drop(opening);
                    assert_eq!(attached.await.expect_err("it is being detached").kind, FailureKind::Busy);
                    drop(saving);
                    detached.await.expect("detached");
                }
                assert!(!engine.is_exported(&spec), "nothing is left");
                assert!(engine.exports.device(Front::Nbd, "local/x").is_none());
                engine.close().await.expect("closed");
            });
        }
    }

    /// An export whose image is opened while it is being detached: in either order of completion, its log is kept and
    /// closed.
    #[test]
    fn an_export_that_is_detached_while_it_is_opened_leaves_its_log_closed() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        for opened_first in [true, false] {
            let dir = tempfile::tempdir().expect("a directory");
            reactor.block_on(async {
                let (engine, spec) = engine_with_image(dir.path()).await;
                let place = json!({ "medium": "ssd", "path": dir.path().join("logs"), "size": 16 << 20 });
                let volume = engine.open_volume(&spec).await.expect("open");
                let log = serde_json::from_value(place.clone()).expect("a place");
                engine.ensure_log(&spec, &volume, &log).await.expect("a log");
                drop(volume);
                engine.end_log(&spec, true).await.expect("closed");

                let key = (Front::Nbd, spec.clone());
                let attach = json!({ "pool": "local", "image": "x", "front": "nbd", "log": place });
                let (saving, detached) = detach_while_opening(&engine, &key, attach).await;
                match opened_first {
                    true => {
                        engine.restore(&spec).await;
                        drop(saving);
                        detached.await.expect("detached");
                    }
                    false => {
                        drop(saving);
                        detached.await.expect("detached");
                        engine.restore(&spec).await;
                    }
                }
                assert!(!engine.volumes.is_open(&spec), "opened first: {opened_first}");
                assert_eq!(engine.log_info(&spec).await.expect("kept").state, "closed", "opened first: {opened_first}");
                engine.close().await.expect("closed");
            });
        }
    }

    /// Cluster settings that can be reverted fail no host request, in any pool; a command gets the failure.
    #[test]
    fn pools_of_an_image_are_in_use_once_it_is_served() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, _, client, spec) = engine_with_cluster(dir.path()).await;
            let volume = engine.open_volume(&spec).await.expect("open");
            assert_eq!(client.pools_in_use(), [0; 0], "no host uses it");
            drop(volume);
            let attach = json!({ "pool": "rbd", "image": "x", "front": "nbd" });
            let attach = serde_json::from_value(attach).expect("a request");
            engine.clone().attach(attach).await.expect("attached");
            assert_eq!(client.pools_in_use(), [POOL, POOL + 1]);
            engine.close().await.expect("closed");
        });
    }

    /// Features of a new image in a pool of a cluster, with journaling: it can be read and not written.
    const JOURNALED: u64 = image::ImageFeatures::RBD_DEFAULT.0 | image::ImageFeatures::DATA_POOL.0 | 1 << 6;

    async fn set_features(pool: &Rc<dyn ObjectBackend>, id: &str, features: u64) {
        let pairs = vec![(b"features".to_vec(), features.to_le_bytes().to_vec())];
        let set = Transaction::of(ObjectOp::KvSet { pairs });
        pool.submit(&ObjectName::new(format!("rbd_header.{id}")), set).await.expect("features");
    }

    /// Lists two exports of an image, one read-only and one writable, to be restored.
    fn list_both_ways(engine: &Engine, spec: &ImageSpec) -> [ExportKey; 2] {
        let keys = [(Front::Nbd, spec.clone()), (Front::Iscsi, spec.clone())];
        for (front, _) in &keys {
            let attach = json!({
                "pool": spec.pool, "image": spec.image, "front": front.name(), "read_only": *front == Front::Nbd,
            });
            let attach = serde_json::from_value(attach).expect("a request");
            engine.exports.insert(&(*front, spec.clone()), Export::listed(attach, None, Lifecycle::idle()));
        }
        keys
    }

    async fn write(device: &Rc<dyn BlockDevice>, data: &[u8]) -> forebay_block::Result<BlockReply> {
        device.submit(BlockRequest::Write { offset: 0, data: Buf::copy_of(data).into(), fua: false }).await
    }

    /// An image that can be read but not written, exported both ways: hosts may read it, and may write it over the
    /// same open image as soon as that becomes possible.
    #[test]
    fn an_image_that_cannot_be_written_serves_its_read_only_exports() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, cluster, _, spec) = engine_with_cluster(dir.path()).await;
            let other = cluster.client().pool(POOL);
            let id = image::info(&other, "x").await.expect("info").id;
            set_features(&other, &id, JOURNALED).await;

            let keys = list_both_ways(&engine, &spec);
            let [reads, writes] = &keys;
            let failure = |key| engine.exports.with(key, |export| export.failure(&spec)).expect("an export");
            let device = |key: &ExportKey| engine.exports.device(key.0, &spec.to_string());
            assert_eq!(engine.begin_restoring(), [spec.clone()].into());
            engine.restore(&spec).await;
            let reader = device(reads).expect("it can be read");
            let refused = failure(writes).expect("it cannot be written");
            assert_eq!(refused.kind, FailureKind::Unsupported);
            assert!(refused.message.contains("journaling"), "{}", refused.message);

            // A retry fails: readers are not disturbed, and the reason stays the same.
            assert_eq!(engine.begin_again(), [spec.clone()].into());
            engine.restore(&spec).await;
            assert!(Rc::ptr_eq(&reader, &device(reads).expect("it is served on")));
            assert_eq!(failure(writes).map(|failure| failure.message), Some(refused.message));

            // The feature is disabled.  Clients that have the image open are notified of the header change.
            set_features(&other, &id, JOURNALED & !(1 << 6)).await;
            let resized = Image::open(other.clone(), "x", Default::default()).await.expect("opened");
            resized.resize(16 << 20, false, |_| {}).await.expect("resized");
            resized.close().await;
            until(|| reader.geometry().size == 16 << 20).await;
            assert_eq!(engine.begin_again(), [spec.clone()].into());
            engine.restore(&spec).await;
            let writer = device(writes).expect("it can be written");
            assert_eq!(failure(writes).map(|failure| failure.message), None);
            assert!(!writer.geometry().read_only && writer.reservations().is_some());
            write(&writer, b"some").await.expect("written");
            let read = reader.submit(BlockRequest::Read(Extent::new(0, 4))).await.expect("read by who had it before");
            assert_eq!(read.into_data().to_vec(), b"some");
            let refused = write(&reader, b"more").await.expect_err("a read-only export");
            assert_eq!(refused.kind(), ErrorKind::ReadOnly);
            assert!(engine.begin_again().is_empty(), "nothing is left to be tried");
            drop((reader, writer));
            engine.close().await.expect("closed");
        });
    }

    /// An image whose write log may hold data that the image lacks: without the log hosts would read stale data, and
    /// the log could not be written back to an image opened read-only.
    #[test]
    fn an_image_with_a_log_that_cannot_be_written_is_not_served_until_it_can() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, cluster, _, spec) = engine_with_cluster(dir.path()).await;
            let other = cluster.client().pool(POOL);
            let id = image::info(&other, "x").await.expect("info").id;
            let place = json!({ "medium": "ssd", "path": dir.path().join("logs"), "size": 16 << 20 });
            let place = serde_json::from_value(place).expect("a place");
            let volume = engine.open_volume(&spec).await.expect("open");
            engine.ensure_log(&spec, &volume, &place).await.expect("a log");
            drop(volume);
            engine.end_log(&spec, true).await.expect("closed");
            set_features(&other, &id, JOURNALED).await;

            let keys = list_both_ways(&engine, &spec);
            let failure = |key| engine.exports.with(key, |export| export.failure(&spec)).expect("an export");
            assert_eq!(engine.begin_restoring(), [spec.clone()].into());
            engine.restore(&spec).await;
            for key in &keys {
                let refused = failure(key).expect("not served");
                assert_eq!(refused.kind, FailureKind::Unsupported, "{refused:?}");
                assert!(refused.message.contains("journaling"), "{refused:?}");
            }
            assert!(!engine.volumes.is_open(&spec));

            set_features(&other, &id, JOURNALED & !(1 << 6)).await;
            assert_eq!(engine.begin_again(), [spec.clone()].into());
            engine.restore(&spec).await;
            for key in &keys {
                assert_eq!(failure(key).map(|failure| failure.message), None);
            }
            let writer = engine.exports.device(keys[1].0, &spec.to_string()).expect("served");
            write(&writer, b"some").await.expect("the log takes it");
            assert_eq!(engine.log_info(&spec).await.expect("a log").state, "on");
            drop(writer);
            engine.close().await.expect("closed");
        });
    }

    /// Reservations that could not be read when an image became writable are read again on retry.
    #[test]
    fn reservations_that_are_not_known_keep_an_image_from_being_written_only_for_so_long() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, cluster, _, spec) = engine_with_cluster(dir.path()).await;
            let other = cluster.client().pool(POOL);
            let id = image::info(&other, "x").await.expect("info").id;
            set_features(&other, &id, JOURNALED).await;
            let [reads, writes] = &list_both_ways(&engine, &spec);
            let failure = |key| engine.exports.with(key, |export| export.failure(&spec)).expect("an export");
            assert_eq!(engine.begin_restoring(), [spec.clone()].into());
            engine.restore(&spec).await;
            let reader = engine.exports.device(reads.0, &spec.to_string()).expect("it can be read");

            set_features(&other, &id, JOURNALED & !(1 << 6)).await;
            let second = Image::open(other.clone(), "x", Default::default()).await.expect("opened");
            let key = crate::engine::reservations::RESERVATIONS_KEY;
            second.set_metadata(key, Some(b"no table".to_vec())).await.expect("metadata");
            second.resize(16 << 20, false, |_| {}).await.expect("resized");
            until(|| reader.geometry().size == 16 << 20).await;
            assert_eq!(engine.begin_again(), [spec.clone()].into());
            engine.restore(&spec).await;
            assert_eq!(failure(writes).map(|failure| failure.kind), Some(FailureKind::Corrupt));
            second.set_metadata(key, None).await.expect("metadata");
            second.close().await;
            assert_eq!(engine.begin_again(), [spec.clone()].into());
            engine.restore(&spec).await;
            assert_eq!(failure(writes).map(|failure| failure.message), None);
            drop(reader);
            engine.close().await.expect("closed");
        });
    }
}
