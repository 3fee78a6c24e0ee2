//! Metadata by prefix, of images and of their pool: where librbd's options are overridden (`conf_rbd_...`).

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};

use crate::format::{METADATA_PREFIX, metadata_key};
use crate::image::Image;
use crate::images::Images;
use crate::metadata::METADATA_VALUE_MAX;
use crate::watcher::NOTIFY_TIMEOUT;
use crate::wire::notify::NotifyMessage;

/// Object with the metadata of a pool. Pools have one, in their default namespace.
const POOL_INFO: &str = "rbd_info";
/// Pairs read in one request.
const PAGE: usize = 64;

/// Reader of the metadata of an image and of its pool. It does not keep the image open.
#[derive(Clone)]
pub struct MetadataReader {
    images: Rc<Images>,
    header: ObjectName,
}

impl MetadataReader {
    /// Returns the image's metadata whose keys start with `prefix`, by key.
    ///
    /// # Errors
    /// `NotFound` once the image has been removed; errors of the backend.
    pub async fn image_metadata(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        list(&*self.images.backend, &self.header, prefix).await
    }

    /// Returns the metadata of the image's pool whose keys start with `prefix`, by key.
    pub async fn pool_metadata(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        self.images.pool_metadata(prefix).await
    }
}

impl Image {
    /// Returns a reader of the image's metadata, which outlives the handle.
    pub fn metadata_reader(&self) -> MetadataReader {
        let shared = self.shared();
        MetadataReader { images: shared.images().clone(), header: shared.header_object() }
    }
}

impl Images {
    /// Returns the metadata of an image whose keys start with `prefix`, by key. The image need not be open.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn image_metadata(&self, name: &str, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.image_metadata(name, prefix)).await;
        }
        let id = self.id_of(name).await?;
        list(&*self.backend, &self.header_object(&id), prefix).await
    }

    /// Sets the value of an image's metadata key, durably, or removes it, and notifies the clients that have the image
    /// open. Returns whether there was one to remove. The image need not be open.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for more than [`METADATA_VALUE_MAX`] bytes; errors of the backend.
    pub async fn change_image_metadata(&self, name: &str, key: &str, value: Option<Vec<u8>>) -> Result<bool> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.change_image_metadata(name, key, value)).await;
        }
        let header = self.header_object(&self.id_of(name).await?);
        // A removed header must not be recreated with only this key.
        if !change(&*self.backend, &header, ObjectOp::AssertExists, key, value).await? {
            return Ok(false);
        }
        if let Some(shared) = self.backend.shared() {
            // Clients that do not respond have lost their watch, and read the header when they have it again.
            let told = shared.notify(&header, NotifyMessage::HeaderUpdate.encode(), NOTIFY_TIMEOUT).await;
            if let Err(error) = told {
                tracing::debug!(header = %header, %error, "cannot notify the other clients of an image");
            }
        }
        Ok(true)
    }

    /// Returns the metadata of the pool whose keys start with `prefix`, by key.
    pub async fn pool_metadata(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        match list(&*self.backend, &ObjectName::new(POOL_INFO), prefix).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            result => result,
        }
    }

    /// Sets the value of a metadata key of the pool, durably, or removes it. Returns whether there was one to remove.
    ///
    /// # Errors
    /// `Invalid` for more than [`METADATA_VALUE_MAX`] bytes; errors of the backend.
    pub async fn change_pool_metadata(&self, key: &str, value: Option<Vec<u8>>) -> Result<bool> {
        change(&*self.backend, &ObjectName::new(POOL_INFO), ObjectOp::Create { exclusive: false }, key, value).await
    }
}

async fn list(backend: &dyn ObjectBackend, object: &ObjectName, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let (prefix, mut after) = (metadata_key(prefix), Vec::new());
    let mut found = Vec::new();
    loop {
        let page = backend.kv_list(object, &prefix, &after, PAGE).await?;
        for (key, value) in &page.pairs {
            // Keys that are no text cannot be named, so they are no option's.
            let name = key.strip_prefix(METADATA_PREFIX.as_bytes()).and_then(|name| str::from_utf8(name).ok());
            found.extend(name.map(|name| (name.to_owned(), value.clone())));
        }
        match page.pairs.last() {
            Some((last, _)) if page.more => after.clone_from(last),
            _ => return Ok(found),
        }
    }
}

/// Changes a metadata key, after another operation in the same transaction; returns false if it was to be removed and was
/// not there.
async fn change(
    backend: &dyn ObjectBackend,
    object: &ObjectName,
    first: ObjectOp,
    key: &str,
    value: Option<Vec<u8>>,
) -> Result<bool> {
    let key = metadata_key(key);
    let ops = match value {
        Some(value) if value.len() > METADATA_VALUE_MAX => {
            return Err(Error::new(ErrorKind::Invalid, format!("{object}: a value of {} bytes", value.len())));
        }
        Some(value) => vec![first, ObjectOp::KvSet { pairs: vec![(key, value)] }],
        None => {
            let there = match backend.kv_get(object, vec![key.clone()]).await {
                Ok(values) => values.first().is_some_and(Option::is_some),
                Err(error) if error.kind() == ErrorKind::NotFound && matches!(first, ObjectOp::Create { .. }) => false,
                Err(error) => return Err(error),
            };
            if !there {
                return Ok(false);
            }
            vec![ObjectOp::AssertExists, ObjectOp::KvRemove { keys: vec![key] }]
        }
    };
    backend.submit(object, Transaction::new(ops).durable()).await.map(|_| true)
}
