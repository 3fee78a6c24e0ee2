//! Features and metadata of an image, which an export of it has beside the content.

use forebay_block::Result;

use crate::format::{ImageFeatures, metadata_key};
use crate::image::Image;
use crate::info::ParentInfo;

/// Metadata values that are read in one request.
const PAGE: usize = 64;

/// Metadata of an image: keys and values, in the order of the keys.
pub type MetadataPairs = Vec<(Vec<u8>, Vec<u8>)>;

impl Image {
    /// Returns the features of the image.
    pub fn features(&self) -> ImageFeatures {
        self.shared().header().features
    }

    /// Returns whether the image, or a snapshot of it, still reads data of a parent.
    pub fn reads_parent(&self) -> bool {
        let header = self.shared().header();
        header.parent.is_some() || header.snapshots.iter().any(|snapshot| snapshot.overlap.is_some_and(|len| len > 0))
    }

    /// Returns the parent of the image itself, not that of its snapshots alone.
    ///
    /// # Errors
    /// Errors of the backend.
    pub async fn parent(&self) -> Result<Option<ParentInfo>> {
        let header = self.shared().header();
        match header.parent.as_ref().filter(|(_, parent)| parent.overlap.is_some()) {
            Some((_, parent)) => self.shared().images().parent_info(parent).await.map(Some),
            None => Ok(None),
        }
    }

    /// Returns all metadata values of the image.
    ///
    /// # Errors
    /// `NotFound` if the image has been removed; errors of the backend.
    pub async fn metadata_pairs(&self) -> Result<MetadataPairs> {
        let shared = self.shared();
        shared.check_there()?;
        let prefix = metadata_key("");
        let mut pairs = MetadataPairs::new();
        let mut after = Vec::new();
        loop {
            let page = shared.backend().kv_list(&shared.header_object(), &prefix, &after, PAGE).await?;
            if let Some((last, _)) = page.pairs.last() {
                after.clone_from(last);
            }
            let more = page.more && !page.pairs.is_empty();
            pairs.extend(page.pairs.into_iter().map(|(key, value)| (key[prefix.len()..].to_vec(), value)));
            if !more {
                return Ok(pairs);
            }
        }
    }
}
