//! Copies of images, within a pool and between pools.

use std::rc::Rc;

use forebay_image::ParentInfo;
use forebay_reactor::spawn;
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use super::apply::{CopiedParent, ImageImport};
use super::diffs::SentContent;
use super::transfer::CHUNKS_QUEUED;
use crate::api::{CopyImageRequest, ImageInfo, NewImageOptions};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, LOCAL_POOL, SnapshotSpec, SourceSpec, image_spec};

impl Engine {
    /// Copies an image or snapshot to a new image: its data and metadata; a deep copy also has the snapshots up to it.
    pub async fn copy_image(
        self: &Rc<Self>,
        source: &SourceSpec,
        request: CopyImageRequest,
        progress: ProgressSink,
    ) -> Result<ImageInfo> {
        let to = image_spec(&request.pool, &request.image)?;
        if to == source.image {
            let exists = forebay_block::Error::new(forebay_block::ErrorKind::Exists, "it is the source");
            return Err(self.image_failure(exists, &to));
        }
        let opened = self.open_source(source).await?;
        // The copy of an encrypted image is not left in the plain where it could be encrypted, too.
        let encrypt = request.encrypt || opened.image.is_encrypted() && to.pool == LOCAL_POOL;
        let parent = match request.deep && !request.flatten {
            true => opened.image.parent().await.map_err(|error| self.image_failure(error, &source.image))?,
            false => None,
        };
        let parent = parent.map(|parent| shared_parent(source, &parent)).transpose()?;
        let content = SentContent { snapshots: request.deep, since_parent: parent.is_some() };
        let (sender, receiver) = mpsc::channel(CHUNKS_QUEUED);
        let (begun, _) = oneshot::channel();
        let (engine, from) = (self.clone(), source.clone());
        let sending = spawn(async move {
            let report = |done, total| progress.report(done, total);
            let sent = engine.send_image(&opened, &from, content, &sender, report).await;
            // If the receiver has failed, that is the cause.
            sent.map_err(|failure| (failure, sender.is_closed()))
        });
        let import =
            ImageImport { spec: to.clone(), options: NewImageOptions { encrypt, ..request.options() }, parent };
        let received = self.clone().import_image(import, receiver, begun).await;
        let copied = match (sending.await, received) {
            (Err((failure, false)), _) => Err(failure),
            (_, received) => received,
        };
        let copied = copied.map_err(|failure| failure.context(format_args!("copying {source}")))?;
        tracing::info!(image = %source, %to, deep = request.deep, "an image was copied");
        Ok(copied.image)
    }
}

/// Returns the parent that a copy shares with its source.
fn shared_parent(source: &SourceSpec, parent: &ParentInfo) -> Result<CopiedParent> {
    let ParentInfo { pool, namespace, image, id, snapshot, snapshot_id, is_clonable, .. } = parent;
    let image = if namespace.is_empty() { image.clone() } else { format!("{namespace}/{image}") };
    let image = ImageSpec { pool: pool.clone(), image };
    let spec = SnapshotSpec { image, snapshot: snapshot.clone() };
    match is_clonable {
        true => Ok(CopiedParent { spec, image: id.clone(), snapshot: *snapshot_id }),
        false => {
            let what = format!("{source} is a clone of {spec}, which is in the trash or gone, and gets no more clones");
            Err(Failure::new(FailureKind::Busy, what).hint("add --flatten for a copy with the parent's data in it"))
        }
    }
}
