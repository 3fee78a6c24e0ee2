//! Operations on clones: make them, list them, make them independent.

use std::rc::Rc;

use forebay_image as image;

use super::Engine;
use super::images::{features, striping};
use crate::api::{self, ImageChild};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec, image_spec};

impl Engine {
    /// Makes a clone of a snapshot.
    pub async fn clone_snapshot(
        self: Rc<Self>,
        from: &SnapshotSpec,
        request: api::CloneRequest,
    ) -> Result<api::ImageInfo> {
        let to = image_spec(&request.pool, &request.image)?;
        to.check_new()?;
        let options = image::CloneOptions {
            format: match request.format {
                api::CloneVersion::Auto => image::CloneFormat::Auto,
                api::CloneVersion::V1 => image::CloneFormat::V1,
                api::CloneVersion::V2 => image::CloneFormat::V2,
            },
            object_size: request.object_size,
            striping: striping(request.stripe_unit, request.stripe_count)?,
            features: features(request.features.as_deref())?,
            data_pool: request.data_pool,
            encrypted: false,
        };
        let (parents, clones) = (self.pool(&from.image.pool).await?, self.pool_of_new(&to).await?);
        let _reserved = self.reserve_unexported(&to)?;
        let source = format!("{}@{}", from.image.image, from.snapshot);
        let (parents, clones) = (image::Images::of(&parents), image::Images::of(&clones));
        if let Err(error) = clones.clone_from(&parents, &source, &to.image, &options).await {
            return Err(match error.kind() {
                forebay_block::ErrorKind::NotFound => self.snapshot_failure(error, from).await,
                forebay_block::ErrorKind::Invalid if options.format == image::CloneFormat::V1 => {
                    self.image_failure(error, &to).hint(format!("protect it first: forebay snap protect {from}"))
                }
                _ => self.image_failure(error, &to),
            });
        }
        self.flush_pool(&from.image).await?;
        self.flush_pool(&to).await?;
        tracing::info!(image = %to, parent = %from, "a clone was created");
        self.image_info(&to).await
    }

    /// Lists the clones of an image's snapshots, or of one of them; with `descendants`, their clones too.
    pub async fn list_children(&self, source: &SourceSpec, descendants: bool) -> Result<Vec<ImageChild>> {
        let backend = self.pool(&source.image.pool).await?;
        let images = image::Images::of(&backend);
        let found = match images.children(&source.image.image, source.snapshot.as_deref(), descendants).await {
            Ok(found) => found,
            Err(error) => return Err(self.source_failure(error, source).await),
        };
        let child = |child: image::ChildInfo| ImageChild {
            pool: child.pool,
            pool_namespace: child.namespace,
            image: child.image,
            id: child.id,
            trash: child.trash,
        };
        let mut children: Vec<_> = found.into_iter().map(child).collect();
        children.sort_by_key(ImageChild::line);
        Ok(children)
    }

    /// Makes a clone independent of its parent.
    pub async fn flatten(self: &Rc<Self>, spec: &ImageSpec, progress: ProgressSink) -> Result<()> {
        let volume = self.open_volume(spec).await?;
        let flattened = volume.image.flatten(|now| progress.report(now.done, now.total)).await;
        flattened.map_err(|error| self.image_failure(error, spec))?;
        self.flush_pool(spec).await?;
        tracing::info!(image = %spec, "a clone was flattened");
        Ok(())
    }

    /// Flattens the clones of a snapshot.
    ///
    /// # Errors
    /// `Busy` for clones in the trash.
    pub(super) async fn flatten_clones(self: &Rc<Self>, spec: &SnapshotSpec, progress: ProgressSink) -> Result<()> {
        let source = SourceSpec { image: spec.image.clone(), snapshot: Some(spec.snapshot.clone()) };
        for child in self.list_children(&source, false).await? {
            if child.trash {
                let what = format!("{spec} has the clone {}, which cannot be flattened there", child.line());
                return Err(Failure::new(FailureKind::Busy, what).hint("restore it from the trash, or remove it"));
            }
            let child = self.spec_beside(&spec.image.pool, &child.pool, &child.pool_namespace, &child.image)?;
            self.flatten(&child, progress.clone()).await?;
        }
        Ok(())
    }
}
