//! Data policies of images: how the backend stores the data of one image.

use forebay_block::{DataKey, DataPolicy, ErrorKind, LocalFuture, ObjectName, Result, SnapId, StoredBytes};

use crate::image::Image;
use crate::images::Images;
use crate::info::ImageDescription;
use crate::present::walk;

impl Images {
    /// Returns the prefix of the names of an image's data objects, up to the number of the object.
    pub(crate) fn data_prefix(&self, block_name_prefix: &str) -> ObjectName {
        ObjectName::in_namespace(self.namespace().clone(), format!("{block_name_prefix}."))
    }

    /// Returns the data policy that is set for an image; `None` if it has the default.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the backend has no policies.
    pub async fn data_policy(&self, name: &str) -> Result<Option<DataPolicy>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.data_policy(name)).await;
        }
        let info = self.info(name).await?;
        self.backend().data_policy(&self.data_prefix(&info.block_name_prefix))
    }

    /// Sets the data policy of an image, durably; `None` returns it to the default. Applies to data written from then on.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the backend has no policies.
    pub async fn set_data_policy(&self, name: &str, policy: Option<DataPolicy>) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.set_data_policy(name, policy)).await;
        }
        let info = self.info(name).await?;
        self.backend().set_data_policy(&self.data_prefix(&info.block_name_prefix), policy).await
    }

    /// Returns whether an image's data is encrypted by the backend.
    pub fn is_encrypted(&self, info: &ImageDescription) -> bool {
        self.backend().is_encrypted(&self.data_prefix(&info.block_name_prefix))
    }

    /// Removes the data policy and the key of an image that is removed.
    pub(crate) async fn forget_data_policy(&self, block_name_prefix: &str) -> Result<()> {
        let prefix = self.data_prefix(block_name_prefix);
        self.backend().destroy_key(&prefix).await?;
        match self.backend().data_policy(&prefix) {
            Ok(Some(_)) => self.backend().set_data_policy(&prefix, None).await,
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

impl Image {
    /// Returns whether the image's data is encrypted by the backend.
    pub fn is_encrypted(&self) -> bool {
        self.shared().data().is_encrypted(&self.own_prefix())
    }

    /// Returns the key for the image's write log; `None` if its data is not encrypted.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`] if it is, and the key is not available.
    pub fn log_key(&self) -> Result<Option<DataKey>> {
        self.shared().data().log_key(&self.own_prefix())
    }

    /// Returns the prefix of the names of the image's data objects.
    fn own_prefix(&self) -> ObjectName {
        let object = self.shared().object_name(0);
        let prefix = object.name().rfind('.').map_or("", |dot| &object.name()[..=dot]);
        ObjectName::in_namespace(object.namespace_shared(), prefix)
    }

    /// Returns what the blocks of the image's own objects take on the device; `None` where the backend does not know it.
    ///
    /// # Errors
    /// Errors of the backend.
    pub async fn stored_bytes(&self) -> Result<Option<StoredBytes>> {
        let shared = self.shared();
        if !shared.data().has_policies() {
            return Ok(None);
        }
        let each = |object| -> LocalFuture<Result<StoredBytes>> {
            let asked = shared.data().stored_bytes(&shared.object_name(object), SnapId::HEAD);
            Box::pin(async move {
                match asked.await {
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(StoredBytes::default()),
                    found => Ok(found?.unwrap_or_default()),
                }
            })
        };
        let mut sum = StoredBytes::default();
        walk(
            shared,
            shared.head(),
            0..shared.layout().objects(shared.size()),
            each,
            |_, found: Option<StoredBytes>| {
                let found = found.unwrap_or_default();
                sum = StoredBytes { logical: sum.logical + found.logical, stored: sum.stored + found.stored };
            },
        )
        .await?;
        Ok(Some(sum))
    }
}
