//! Metadata values of an image, as listed by `rbd image-meta`.

use forebay_block::{Error, ErrorKind, ObjectOp, Result, Transaction};

use crate::format::{metadata_key, metadata_keys};
use crate::image::Image;
use crate::images::Images;
use crate::watcher::NOTIFY_TIMEOUT;
use crate::wire::notify::NotifyMessage;

/// Longest value in bytes.
pub const METADATA_VALUE_MAX: usize = 1 << 20;
/// Values read in one request.
const PAGE: usize = 64;
/// Attempts to remove a value that other clients change at the same time.
const TRIES: usize = 8;

impl Images {
    /// Returns the metadata keys of an image and their values, in order. Keys are text; other bytes in them are
    /// replaced.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn metadata(&self, name: &str) -> Result<Vec<(String, Vec<u8>)>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.metadata(name)).await;
        }
        let listed = async {
            let header = self.header_object(&self.id_of(name).await?);
            let (mut all, mut after) = (Vec::new(), Vec::new());
            loop {
                let page = self.backend().kv_list(&header, metadata_keys(), &after, PAGE).await?;
                let more = page.more;
                for (key, value) in page.pairs {
                    all.push((String::from_utf8_lossy(&key[metadata_keys().len()..]).into_owned(), value));
                    after = key;
                }
                if !more {
                    return Ok(all);
                }
            }
        };
        listed.await.map_err(|error: Error| error.within(format_args!("metadata of image {name}")))
    }

    /// Returns the value of a metadata key of an image, if it is set.
    ///
    /// # Errors
    /// `NotFound` if there is no such image; errors of the backend.
    pub async fn metadata_value(&self, name: &str, key: &str) -> Result<Option<Vec<u8>>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.metadata_value(name, key)).await;
        }
        let header = self.header_object(&self.id_of(name).await?);
        let mut values = self.backend().kv_get(&header, vec![metadata_key(key)]).await?;
        Ok(values.pop().flatten())
    }

    /// Sets a metadata value of an image, open or not, durably, and notifies the clients that have the image open.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for an empty key or more than [`METADATA_VALUE_MAX`] bytes; errors of the backend.
    pub async fn set_metadata(&self, name: &str, key: &str, value: Vec<u8>) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.set_metadata(name, key, value)).await;
        }
        let set = async {
            if key.is_empty() {
                return Err(Error::new(ErrorKind::Invalid, "the key is empty"));
            }
            let id = self.id_of(name).await?;
            let pairs = vec![(metadata_key(key), checked(value)?)];
            self.change_header(&id, vec![ObjectOp::KvSet { pairs }]).await
        };
        set.await.map_err(|error| error.within(format_args!("metadata of image {name}")))
    }

    /// Removes a metadata value of an image, open or not, durably, and notifies the clients that have the image open.
    /// Returns whether it was set.
    ///
    /// # Errors
    /// `NotFound` if there is no such image; `Busy` if other clients change the value at the same time; errors of the
    /// backend.
    pub async fn remove_metadata(&self, name: &str, key: &str) -> Result<bool> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.remove_metadata(name, key)).await;
        }
        let removed = async {
            let (id, key) = (self.id_of(name).await?, metadata_key(key));
            for _ in 0..TRIES {
                let mut values = self.backend().kv_get(&self.header_object(&id), vec![key.clone()]).await?;
                let Some(value) = values.pop().flatten() else { return Ok(false) };
                let guard = ObjectOp::KvCompare { key: key.clone(), value: Some(value) };
                match self.change_header(&id, vec![guard, ObjectOp::KvRemove { keys: vec![key.clone()] }]).await {
                    Err(error) if error.kind() == ErrorKind::Guard => {}
                    other => return other.map(|()| true),
                }
            }
            Err(Error::new(ErrorKind::Busy, "other clients change the value at the same time; try again"))
        };
        removed.await.map_err(|error| error.within(format_args!("metadata of image {name}")))
    }

    /// Changes the header of an image, open or not, durably, and notifies the clients that have it open.
    async fn change_header(&self, id: &str, change: Vec<ObjectOp>) -> Result<()> {
        // A removed header must not be recreated with only this key.
        let ops = [vec![ObjectOp::AssertExists], change].concat();
        self.backend().submit(&self.header_object(id), Transaction::new(ops).durable()).await?;
        self.header_changed(id).await;
        Ok(())
    }

    /// Notifies the clients that have an image open of its changed header, as far as they respond.
    pub(crate) async fn header_changed(&self, id: &str) {
        let Some(shared) = self.backend().shared() else { return };
        let update = NotifyMessage::HeaderUpdate.encode();
        if let Err(error) = shared.notify(&self.header_object(id), update, NOTIFY_TIMEOUT).await {
            tracing::debug!(id, %error, "cannot notify the other clients of an image");
        }
    }
}

/// Refuses a value that is too long.
fn checked(value: Vec<u8>) -> Result<Vec<u8>> {
    if value.len() > METADATA_VALUE_MAX {
        let what = format!("a value of {} bytes; {METADATA_VALUE_MAX} is the most", value.len());
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(value)
}

impl Image {
    /// Returns the value of a key, if it is set.
    pub async fn metadata(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let shared = self.shared();
        shared.check_there()?;
        let mut values = shared.backend().kv_get(&shared.header_object(), vec![metadata_key(key)]).await?;
        Ok(values.pop().flatten())
    }

    /// Sets the value of a key, durably; `None` removes it.
    ///
    /// Fails with `ReadOnly` on a read-only handle, and with `Invalid` for more than [`METADATA_VALUE_MAX`] bytes.
    pub async fn set_metadata(&self, key: &str, value: Option<Vec<u8>>) -> Result<()> {
        self.change_metadata(key, Vec::new(), value).await
    }

    /// Replaces the value of a key, durably, if it is `expected` (`None`: if it is not set). Returns whether it was.
    ///
    /// Fails as [`set_metadata`](Self::set_metadata). After another error it is unknown whether it was replaced.
    pub async fn replace_metadata(&self, key: &str, expected: Option<Vec<u8>>, value: Option<Vec<u8>>) -> Result<bool> {
        let guard = ObjectOp::KvCompare { key: metadata_key(key), value: expected };
        match self.change_metadata(key, vec![guard], value).await {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn change_metadata(&self, key: &str, guards: Vec<ObjectOp>, value: Option<Vec<u8>>) -> Result<()> {
        let shared = self.shared();
        shared.check_there()?;
        if self.is_read_only() {
            let what = format!("image {} is open for reading only", self.name());
            return Err(Error::new(ErrorKind::ReadOnly, what));
        }
        let key = metadata_key(key);
        let change = match value {
            Some(value) if value.len() > METADATA_VALUE_MAX => {
                let what = format!("image {}: a value of {} bytes", self.name(), value.len());
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            Some(value) => ObjectOp::KvSet { pairs: vec![(key, value)] },
            None => ObjectOp::KvRemove { keys: vec![key] },
        };
        // A removed header must not be recreated with only this key.
        let ops = [vec![ObjectOp::AssertExists], guards, vec![change]].concat();
        let change = Transaction::new(ops).durable();
        shared.backend().submit(&shared.header_object(), change).await.map(drop)
    }
}
