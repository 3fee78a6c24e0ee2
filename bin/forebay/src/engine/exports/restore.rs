//! Exports from before the daemon was started, opened again.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{sleep, spawn, timeout};

use super::{ExportKey, ExportState};
use crate::api::{self, Front};
use crate::engine::Engine;
use crate::engine::identity::format_uuid;
use crate::failure::Failure;
use crate::spec::ImageSpec;

/// Images of one pool that are opened at a time when the daemon starts.
const OPENING_MAX: usize = 16;

/// Time that the start waits for the images of exports before hosts are let in; those that take longer are served as soon
/// as they are open.
const OPENING_WAIT: Duration = Duration::from_secs(10);

/// Time before what could not be served is tried again: the first time; it doubles up to the second.
const RETRY_WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

impl Engine {
    /// Opens what was exported before the daemon was started, all images at once.  What cannot be opened is kept, says
    /// why, and is tried again.  After [`OPENING_WAIT`] images that are not open yet are waited for no longer, and served later.
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
            tracing::warn!(images = left.get(), "images of exports are not open yet; hosts are let in to the others");
        }
        self.keep_trying();
    }

    /// Tries again what could not be served, for as long as there is such a thing.
    fn keep_trying(self: &Rc<Self>) {
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

    /// Opens images whose exports are marked as such, a few of each pool at a time: a pool that hangs holds up its own
    /// images only.
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
                }
            }
        })
    }

    /// Marks the exports that failed as such that are being opened; returns their images.  Who is marked is not collected
    /// again while its image waits for its turn.
    fn begin_again(&self) -> BTreeSet<ImageSpec> {
        let mut wanted = BTreeSet::new();
        for ((_, spec), export) in self.exports.exports.borrow_mut().iter_mut() {
            if let ExportState::Failed(failure) = &export.state
                && !export.leaving
            {
                export.state = ExportState::Opening(Some(failure.clone()));
                wanted.insert(spec.clone());
            }
        }
        wanted
    }

    /// Marks the exports that are to be opened; returns their images.
    fn begin_restoring(&self) -> BTreeSet<ImageSpec> {
        let mut wanted = BTreeSet::new();
        for ((front, spec), export) in self.exports.exports.borrow_mut().iter_mut() {
            match &export.state {
                ExportState::Idle => {
                    export.state = ExportState::Opening(None);
                    wanted.insert(spec.clone());
                }
                ExportState::Broken(failure) | ExportState::Failed(failure) => not_served(*front, spec, failure),
                ExportState::Opening(_) | ExportState::Serving { .. } => {}
            }
        }
        wanted
    }

    /// Opens an image, and lets hosts reach those of its exports that are still wanted.
    async fn restore(&self, spec: &ImageSpec) {
        let opened = self.open_volume(spec).await;
        let keys: Vec<ExportKey> = {
            let mut exports = self.exports.exports.borrow_mut();
            let of_image = Front::ALL.into_iter().map(|front| (front, spec.clone()));
            let waiting = of_image.filter(|key| match exports.get_mut(key) {
                Some(one) if matches!(one.state, ExportState::Opening(_)) && one.leaving => {
                    // Who detaches it, and fails to, sees that nobody will serve it.
                    one.state = ExportState::Idle;
                    false
                }
                Some(one) => matches!(one.state, ExportState::Opening(_)),
                None => false,
            });
            waiting.collect()
        };
        for key in &keys {
            let known = self.exports.with(key, |export| {
                let before = match &export.state {
                    ExportState::Opening(before) => before.clone(),
                    _ => None,
                };
                (export.request.clone(), before)
            });
            let Some((request, before)) = known else { continue };
            let served = opened.clone().and_then(|volume| {
                let identity = format_uuid(&self.identity.volume(spec, volume.image.id()));
                let unit = self.exports.choose_unit(key, request.unit, &identity)?;
                self.serve(key, api::Attach { unit, ..request }, volume)
            });
            match served {
                Ok(_) if before.is_some() => {
                    tracing::info!(image = %spec, front = key.0.name(), "an export is served again");
                }
                Ok(_) => {}
                Err(failure) => {
                    // The same reason is told once.
                    if before.is_none_or(|before| before.message != failure.message) {
                        not_served(key.0, spec, &failure);
                    }
                    self.exports.with(key, |export| export.state = ExportState::Failed(failure));
                }
            }
        }
        drop(opened);
        if !self.is_exported(spec)
            && let Err(failure) = self.end_log(spec, true).await
        {
            // It was detached while it was being opened: its log is kept.
            tracing::warn!(image = %spec, error = %failure.message, "a write log was not closed in order");
        }
    }
}

/// Says in the log that an export is not served, and why.
fn not_served(front: Front, spec: &ImageSpec, failure: &Failure) {
    tracing::error!(image = %spec, front = front.name(), error = %failure.message, "an export is not served");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_reactor::sync::Permit;
    use forebay_reactor::{DriverChoice, JoinHandle, Reactor, yield_now};
    use forebay_store::InitOptions;
    use serde_json::json;

    use super::super::Export;
    use super::*;
    use crate::engine::{EngineOptions, store};
    use crate::failure::Result;
    use crate::ops::ProgressSink;

    async fn engine(dir: &Path) -> Rc<Engine> {
        let path = dir.join("store.img");
        let options = InitOptions { size: 64 << 20, ..InitOptions::default() };
        store::init(&path, options, ProgressSink::channel().0).await.expect("a store");
        let options = EngineOptions {
            data: dir.into(),
            store: path,
            opens_store: true,
            ceph: Default::default(),
            controls: Vec::new(),
            daemon: None,
        };
        Engine::open(options).await.expect("an engine")
    }

    /// An engine with an image in its store.
    async fn engine_with_image(dir: &Path) -> (Rc<Engine>, ImageSpec) {
        let engine = engine(dir).await;
        let create = serde_json::from_value(json!({ "pool": "local", "image": "x", "size": 8 << 20 }));
        engine.clone().create_image(create.expect("a request")).await.expect("an image");
        (engine, "local/x".parse().expect("a spec"))
    }

    /// Lists an export whose image is being opened, and detaches it while the file of exports cannot be written, as on a
    /// busy disk: until the first part of the result is dropped.
    async fn detach_while_opening(
        engine: &Rc<Engine>,
        key: &(Front, ImageSpec),
        attach: serde_json::Value,
    ) -> (Permit, JoinHandle<Result<()>>) {
        let attach = serde_json::from_value(attach).expect("a request");
        engine.exports.insert(key, Export::listed(attach, None, ExportState::Opening(None)));
        let saving = engine.exports.saves.turn.acquire(1).await;
        let (detaching, own) = (engine.clone(), key.1.clone());
        let detached = spawn(async move { detaching.detach(&own, Front::Nbd, false, false).await });
        until(|| engine.exports.with(key, |export| export.leaving) == Some(true)).await;
        (saving, detached)
    }

    /// Waits until something holds that only this reactor brings about.
    async fn until(holds: impl Fn() -> bool) {
        while !holds() {
            yield_now().await;
        }
    }

    /// An export that cannot be taken off the file while its image is opened: it is served, or says why not.
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
                let is_served = engine.exports.with(&key, |export| matches!(export.state, ExportState::Serving { .. }));
                let is_broken = engine.exports.with(&key, |export| matches!(export.state, ExportState::Failed(_)));
                assert_eq!((is_served, is_broken), (Some(!opened_first), Some(opened_first)));
                engine.close().await.expect("closed");
            });
        }
    }

    /// An export whose image is opened while it is being detached: whichever of the two ends first, its log is kept and
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
}
