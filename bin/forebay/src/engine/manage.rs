//! Management of images: metadata, locks, features, object maps, notifications.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::ErrorKind;
use forebay_image::{Image, ImageFeatures, ImageNotification, Images, MapCheck, NotificationReceiver};
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use crate::api;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SourceSpec};

/// Prefix of the metadata keys that the daemon itself uses.
const OWN_KEYS: &str = "forebay.";

impl Engine {
    /// Deallocates blocks of zeroes that an image stores.
    pub async fn sparsify(self: &Rc<Self>, spec: &ImageSpec, sparse_size: u64, progress: ProgressSink) -> Result<()> {
        let volume = self.open_volume(spec).await?;
        let sparsified = volume.image.sparsify(sparse_size, |now| progress.report(now.done, now.total)).await;
        sparsified.map_err(|error| self.image_failure(error, spec))?;
        self.flush_pool(spec).await?;
        tracing::info!(image = %spec, sparse_size, "an image was sparsified");
        Ok(())
    }

    async fn images(&self, spec: &ImageSpec) -> Result<Rc<Images>> {
        Ok(Images::of(&self.pool(&spec.pool).await?))
    }

    /// Returns the metadata of an image, by key.
    pub async fn list_metadata(&self, spec: &ImageSpec) -> Result<BTreeMap<String, String>> {
        let listed = self.images(spec).await?.metadata(&spec.image).await;
        let listed = listed.map_err(|error| self.image_failure(error, spec))?;
        Ok(listed.into_iter().map(|(key, value)| (key, text(&value))).collect())
    }

    /// Returns a metadata value of an image.
    pub async fn metadata_value(&self, spec: &ImageSpec, key: &str) -> Result<api::MetadataValue> {
        let found = self.images(spec).await?.metadata_value(&spec.image, key).await;
        let found = found.map_err(|error| self.image_failure(error, spec))?;
        found.map(|value| api::MetadataValue { value: text(&value) }).ok_or_else(|| no_metadata(spec, key))
    }

    /// Sets a metadata value of an image, or removes it.
    pub async fn set_metadata(&self, spec: &ImageSpec, key: &str, value: Option<String>) -> Result<()> {
        if key.starts_with(OWN_KEYS) {
            let what = format!("the metadata keys that begin with '{OWN_KEYS}' are Forebay's own, and '{key}' is one");
            return Err(Failure::new(FailureKind::Denied, what)
                .hint("'forebay reservations', 'forebay log' and 'forebay config image' change what they hold"));
        }
        let images = self.images(spec).await?;
        let is_set = value.is_some();
        let changed = match value {
            Some(value) => images.set_metadata(&spec.image, key, value.into_bytes()).await.map(|()| true),
            None => images.remove_metadata(&spec.image, key).await,
        };
        if !changed.map_err(|error| self.image_failure(error, spec))? {
            return Err(no_metadata(spec, key));
        }
        tracing::info!(image = %spec, key, is_set, "metadata of an image was changed");
        Ok(())
    }

    /// Returns the locks on an image.
    pub async fn list_locks(&self, spec: &ImageSpec) -> Result<api::LockListing> {
        let listed = self.images(spec).await?.locks(&spec.image).await;
        let listed = listed.map_err(|error| self.image_failure(error, spec))?;
        let locks = listed.locks.into_iter();
        Ok(api::LockListing {
            exclusive: listed.exclusive,
            tag: listed.tag,
            locks: locks
                .map(|lock| api::ListedLock { id: lock.id, locker: lock.locker, address: lock.address })
                .collect(),
        })
    }

    /// Locks an image by hand, in the name of this client.
    pub async fn add_lock(&self, spec: &ImageSpec, id: &str, shared: Option<&str>) -> Result<()> {
        let added = self.images(spec).await?.add_lock(&spec.image, id, shared).await;
        added.map_err(|error| match error.kind() {
            ErrorKind::Busy => {
                let tag = if shared.is_some() { ", with a different tag or by this client" } else { "" };
                Failure::new(FailureKind::Busy, format!("{spec} is locked already{tag}"))
                    .hint(format!("'forebay lock ls {spec}' shows by whom"))
            }
            _ => self.image_failure(error, spec),
        })?;
        tracing::info!(image = %spec, id, shared, "an image was locked by hand");
        Ok(())
    }

    /// Breaks a lock on an image, and fences its holder.
    pub async fn remove_lock(&self, spec: &ImageSpec, id: &str, locker: &str) -> Result<()> {
        let images = self.images(spec).await?;
        if let Err(error) = images.break_lock(&spec.image, id, locker).await {
            let is_there = error.kind() == ErrorKind::NotFound && images.info(&spec.image).await.is_ok();
            return Err(match is_there {
                true => Failure::new(FailureKind::NotFound, format!("{spec} has no lock '{id}' of {locker}"))
                    .hint(format!("'forebay lock ls {spec}' lists its locks")),
                false => self.image_failure(error, spec),
            });
        }
        tracing::info!(image = %spec, id, locker, "a lock of an image was broken");
        Ok(())
    }

    /// Enables or disables features of an image.
    pub async fn update_features(
        self: &Rc<Self>,
        spec: &ImageSpec,
        names: &[String],
        enabled: bool,
    ) -> Result<api::ImageInfo> {
        let features = names.iter().try_fold(ImageFeatures::default(), |all, name| {
            let found = ImageFeatures::of_name(name).ok_or_else(|| {
                let what = format!("there is no feature '{name}'");
                Failure::invalid(what).hint("exclusive-lock, object-map, fast-diff and deep-flatten can be changed")
            })?;
            Ok::<_, Failure>(ImageFeatures(all.0 | found.0))
        })?;
        if !enabled
            && features.has(ImageFeatures::EXCLUSIVE_LOCK)
            && (self.is_exported(spec) || self.has_open_log(spec))
        {
            let what = format!("{spec} is exported or has a write log, which rely on the exclusive lock");
            return Err(Failure::new(FailureKind::Busy, what).hint(format!("end that first: forebay detach {spec}")));
        }
        let volume = self.open_volume(spec).await?;
        let changed = volume.image.set_features(features, enabled).await;
        let now = changed.map_err(|error| self.image_failure(error, spec))?;
        self.flush_pool(spec).await?;
        tracing::info!(image = %spec, features = %now, "the features of an image were changed");
        self.image_info(spec).await
    }

    /// Compares the object map of an image or a snapshot with the objects, and marks it as invalid if it is wrong.
    pub async fn check_object_map(
        self: &Rc<Self>,
        source: &SourceSpec,
        progress: ProgressSink,
    ) -> Result<api::ObjectMapCheck> {
        let image = self.mapped_image(source).await?;
        let report = |now: forebay_image::ObjectProgress| progress.report(now.done, now.total);
        let MapCheck { objects, wrong, first_wrong, valid } =
            match image.check_object_map(source.snapshot.as_deref(), report).await {
                Ok(check) => check,
                Err(error) => return Err(self.source_failure(error, source).await),
            };
        let wrong_objects = first_wrong.into_iter().map(|object| api::WrongMapEntry {
            name: object.name,
            marked: object.marked,
            actual: object.actual,
        });
        Ok(api::ObjectMapCheck { objects, wrong, wrong_objects: wrong_objects.collect(), valid })
    }

    /// Rebuilds the object map of an image or a snapshot from the objects.
    pub async fn rebuild_object_map(self: &Rc<Self>, source: &SourceSpec, progress: ProgressSink) -> Result<()> {
        let image = self.mapped_image(source).await?;
        let report = |now: forebay_image::ObjectProgress| progress.report(now.done, now.total);
        if let Err(error) = image.rebuild_object_map(source.snapshot.as_deref(), report).await {
            return Err(self.source_failure(error, source).await);
        }
        tracing::info!(%source, "an object map was rebuilt");
        Ok(())
    }

    /// Opens an image that must have an object map.
    async fn mapped_image(self: &Rc<Self>, source: &SourceSpec) -> Result<Rc<Image>> {
        let spec = &source.image;
        let features = self.images(spec).await?.info(&spec.image).await;
        let features = features.map_err(|error| self.image_failure(error, spec))?.features;
        if !features.has(ImageFeatures::OBJECT_MAP) {
            return Err(Failure::invalid(format!("{spec} has no object map: its feature object-map is not enabled"))
                .hint("images in pools of a Ceph cluster can have one: forebay feature enable IMAGE object-map"));
        }
        Ok(self.open_volume(spec).await?.image.clone())
    }

    /// Sends the notifications of an image to `seen` until `stop` is completed or dropped, or the watch breaks. `None` is
    /// sent once the image is watched.
    pub async fn watch_image(
        self: Rc<Self>,
        spec: ImageSpec,
        seen: mpsc::UnboundedSender<Option<ImageNotification>>,
        stop: oneshot::Receiver<()>,
    ) -> Result<()> {
        let (broken, breaks) = oneshot::channel();
        let broken = std::cell::Cell::new(Some(broken));
        let receiver: NotificationReceiver = Rc::new({
            let seen = seen.clone();
            move |told| match told {
                // A reader that is gone has stopped the watch.
                Ok(notification) => drop(seen.send(Some(notification))),
                Err(error) => {
                    if let Some(broken) = broken.take() {
                        let _ = broken.send(error);
                    }
                }
            }
        });
        let watch = self.images(&spec).await?.watch_notifications(&spec.image, receiver).await;
        let watch = watch.map_err(|error| self.image_failure(error, &spec))?;
        let _ = seen.send(None);
        let ended = tokio::select! {
            _ = stop => None,
            error = breaks => error.ok(),
        };
        match ended {
            None => watch.end().await.map_err(|error| self.image_failure(error, &spec)),
            Some(error) => Err(self.image_failure(error, &spec)),
        }
    }
}

/// Returns the text of a value; bytes that are not UTF-8 are replaced.
fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

fn no_metadata(spec: &ImageSpec, key: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("{spec} has no metadata of the key '{key}'"))
        .hint(format!("'forebay image-meta ls {spec}' lists what it has"))
}
