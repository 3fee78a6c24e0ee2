//! Operations of the management of images: metadata, locks, features, object maps.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink, image_path, with_snapshot};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, SourceSpec, uri_encode};

fn metadata_path(spec: &ImageSpec, key: &str) -> String {
    format!("{}/metadata/{}", image_path(spec), uri_encode(key, false))
}

/// Lists the metadata of an image.
pub struct ListMetadata(pub ImageSpec);

impl Operation for ListMetadata {
    type Reply = BTreeMap<String, String>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", image_path(&self.0) + "/metadata")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_metadata(&self.0).await
    }
}

/// Returns a metadata value of an image.
pub struct GetMetadata {
    /// Image of the metadata.
    pub spec: ImageSpec,
    /// Key of the value.
    pub key: String,
}

impl Operation for GetMetadata {
    type Reply = api::MetadataValue;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", metadata_path(&self.spec, &self.key))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.metadata_value(&self.spec, &self.key).await
    }
}

/// Sets or removes a metadata value of an image.
pub struct SetMetadata {
    /// Image of the metadata.
    pub spec: ImageSpec,
    /// Key of the value.
    pub key: String,
    /// Value; `None` to remove it.
    pub value: Option<String>,
}

impl Operation for SetMetadata {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let path = metadata_path(&self.spec, &self.key);
        match &self.value {
            Some(value) => HttpRoute::new("PUT", path).json(&api::MetadataValue { value: value.clone() }),
            None => HttpRoute::new("DELETE", path),
        }
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.set_metadata(&self.spec, &self.key, self.value).await
    }
}

/// Lists the locks on an image.
pub struct ListLocks(pub ImageSpec);

impl Operation for ListLocks {
    type Reply = api::LockListing;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", image_path(&self.0) + "/locks")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_locks(&self.0).await
    }
}

/// Locks an image by hand.
pub struct AddLock {
    /// Image to lock.
    pub spec: ImageSpec,
    /// The lock.
    pub request: api::AddLockRequest,
}

impl Operation for AddLock {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", image_path(&self.spec) + "/locks").json(&self.request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.add_lock(&self.spec, &self.request.id, self.request.shared.as_deref()).await
    }
}

/// Breaks a lock on an image, and fences its holder.
pub struct RemoveLock {
    /// Locked image.
    pub spec: ImageSpec,
    /// Id of the lock.
    pub id: String,
    /// Holder of the lock.
    pub locker: String,
}

impl Operation for RemoveLock {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let (id, locker) = (uri_encode(&self.id, false), uri_encode(&self.locker, false));
        HttpRoute::new("DELETE", format!("{}/locks/{id}?locker={locker}", image_path(&self.spec)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_lock(&self.spec, &self.id, &self.locker).await
    }
}

/// Enables or disables features of an image.
pub struct UpdateFeatures {
    /// Image to change.
    pub spec: ImageSpec,
    /// The features.
    pub request: api::UpdateFeaturesRequest,
}

impl Operation for UpdateFeatures {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PATCH", image_path(&self.spec) + "/features").json(&self.request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.update_features(&self.spec, &self.request.features, self.request.enabled).await
    }
}

/// Compares an object map with the objects.
pub struct CheckObjectMap(pub SourceSpec);

impl Operation for CheckObjectMap {
    type Reply = api::ObjectMapCheck;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", with_snapshot(image_path(&self.0.image) + "/object-map/check", &self.0))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.check_object_map(&self.0, progress).await
    }
}

/// Rebuilds an object map from the objects.
pub struct RebuildObjectMap(pub SourceSpec);

impl Operation for RebuildObjectMap {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", with_snapshot(image_path(&self.0.image) + "/object-map/rebuild", &self.0))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.rebuild_object_map(&self.0, progress).await
    }
}

/// Deallocates zeroes that an image stores.
pub struct Sparsify {
    /// Image to sparsify.
    pub spec: ImageSpec,
    /// Blocks to deallocate.
    pub request: api::SparsifyRequest,
}

impl Operation for Sparsify {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", image_path(&self.spec) + "/sparsify").json(&self.request)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.sparsify(&self.spec, self.request.sparse_size, progress).await
    }
}
