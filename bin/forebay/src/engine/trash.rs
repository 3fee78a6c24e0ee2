//! The trash of a pool: moving images there, listing, restoring and removing them.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::ErrorKind;
use forebay_image::{Images, RemoveOptions, TrashSource};
use forebay_reactor::{wall_clock, yield_now};

use super::Engine;
use crate::api::{ImageInfo, ListedParent, TrashListing};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, TrashSpec, image_spec};
use crate::timestamp::Timestamp;

impl Engine {
    /// Moves an image to the trash, where it is only removed by force before `expires_at`.
    pub async fn move_to_trash(
        self: &Rc<Self>,
        spec: &ImageSpec,
        expires_at: Option<Timestamp>,
    ) -> Result<TrashListing> {
        let backend = self.pool(&spec.pool).await?;
        self.refuse_logged(spec).await?;
        let _reserved = self.reserve_unexported(spec)?;
        let now = wall_clock();
        let deferred_until = expires_at.map_or(now, |time| Duration::from_secs(time.0));
        // Times are given to the second.
        if deferred_until.as_secs() < now.as_secs() {
            let what = format!(
                "{} is in the past, and cannot be the time at which {spec} expires",
                Timestamp(deferred_until.as_secs())
            );
            return Err(Failure::invalid(what));
        }
        let moved = Images::of(&backend).move_to_trash(&spec.image, deferred_until.max(now)).await;
        let moved = moved.map_err(|error| self.image_failure(error, spec))?;
        self.flush_pool(spec).await?;
        self.volumes.forget(spec);
        self.meters.forget(spec);
        tracing::info!(image = %spec, id = moved.id, "an image was moved to the trash");
        Ok(describe(&moved))
    }

    /// Lists the images in the trash of a pool: those of users, or all that `rbd` lists.
    pub async fn list_trash(&self, pool: &str, all: bool) -> Result<Vec<TrashListing>> {
        let images = self.images_in(pool).await?;
        let trashed = images.trashed().await.map_err(|error| self.pool_failure(error, pool))?;
        let mut listed = Vec::new();
        for image in trashed.iter().filter(|image| all || image.source == TrashSource::User) {
            let parent = match images.trashed_details(&image.id).await {
                Ok((parent, _)) => parent,
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
                    tracing::warn!(pool, id = image.id, %error, "an image in the trash cannot be read");
                    None
                }
                Err(error) => return Err(self.pool_failure(error, pool)),
            };
            let parent = parent.map(|parent| ListedParent {
                pool: parent.pool,
                pool_namespace: parent.namespace,
                image: parent.image,
                snapshot: parent.snapshot,
            });
            listed.push(TrashListing { parent, ..describe(image) });
            yield_now().await;
        }
        Ok(listed)
    }

    /// Restores an image from the trash, with its former name or another one.
    pub async fn restore_from_trash(self: &Rc<Self>, spec: &TrashSpec, name: Option<&str>) -> Result<ImageInfo> {
        let images = self.images_in(&spec.pool).await?;
        let _reserved = match name {
            Some(name) => {
                let to = image_spec(&spec.pool, name)?;
                to.check_new()?;
                Some(self.volumes.reserve(&to)?)
            }
            None => None,
        };
        let restored = images.restore(&spec.id, name).await;
        let name = restored.map_err(|error| match error.kind() {
            ErrorKind::Exists => {
                let what = format!("an image of the name of {spec} exists already");
                Failure::new(FailureKind::Exists, what)
                    .hint(format!("choose another name: forebay trash restore {spec} --image NAME"))
            }
            _ => trash_failure(error, spec),
        })?;
        let image = image_spec(&spec.pool, &name)?;
        self.flush_pool(&image).await?;
        tracing::info!(%image, id = spec.id, "an image was restored from the trash");
        self.image_info(&image).await
    }

    /// Removes an image in the trash and its data; `force` removes it before its time.
    pub async fn remove_from_trash(&self, spec: &TrashSpec, force: bool, progress: ProgressSink) -> Result<()> {
        let images = self.images_in(&spec.pool).await?;
        let report = |now: forebay_image::ObjectProgress| progress.report(now.done, now.total);
        if let Err(error) = images.remove_trashed(&spec.id, RemoveOptions { force }, report).await {
            let snapshots = match error.kind() {
                ErrorKind::Busy => images.trashed_details(&spec.id).await.map_or(0, |(_, snapshots)| snapshots),
                _ => 0,
            };
            return Err(match (error.kind(), snapshots) {
                (ErrorKind::Denied, _) => {
                    Failure::new(FailureKind::Denied, format!("the deferment of {spec} has not expired"))
                        .hint("'forebay trash ls --long' shows when it does; --force removes the image before")
                }
                (_, 0) => trash_failure(error, spec),
                (_, count) => {
                    let plural = if count == 1 { "" } else { "s" };
                    Failure::new(FailureKind::Busy, format!("{spec} has {count} snapshot{plural}"))
                        .hint(format!("remove them first: forebay trash restore {spec}, then forebay snap purge"))
                }
            });
        }
        images.backend().flush().await.map_err(|error| self.pool_failure(error, &spec.pool))?;
        tracing::info!(pool = spec.pool, id = spec.id, "an image in the trash was removed");
        Ok(())
    }

    /// Removes the images of users in the trash that have expired; returns their ids. An image that others prevent from
    /// being removed is tried again once another is removed: it may have been its last clone.
    ///
    /// # Errors
    /// `Busy` if images are left, once the others are removed; the failure of the first removal that fails otherwise.
    pub async fn purge_trash(
        &self,
        pool: &str,
        expired_before: Option<Timestamp>,
        progress: ProgressSink,
    ) -> Result<Vec<String>> {
        let images = self.images_in(pool).await?;
        let before = expired_before.map_or(wall_clock().as_secs(), |time| time.0);
        let trashed = images.trashed().await.map_err(|error| self.pool_failure(error, pool))?;
        let of_users = |source| matches!(source, TrashSource::User | TrashSource::UserParent);
        let mut left: Vec<_> = trashed.into_iter().filter(|image| of_users(image.source)).collect();
        left.retain(|image| image.deferred_until.as_secs() <= before);
        let total = left.len() as u64;
        let mut removed = Vec::new();
        let mut refused = None;
        loop {
            let tried = left.len();
            let mut kept = Vec::new();
            for image in left {
                let spec = TrashSpec { pool: pool.to_owned(), id: image.id.clone() };
                match self.remove_from_trash(&spec, true, ProgressSink::channel().0).await {
                    Ok(()) => removed.push(image.id),
                    // Another client has removed or restored it meanwhile.
                    Err(failure) if failure.kind == FailureKind::NotFound => {}
                    Err(failure) if failure.kind == FailureKind::Busy => {
                        refused = Some(failure);
                        kept.push(image);
                    }
                    Err(failure) => return Err(failure.context(format!("after {} of {total} images", removed.len()))),
                }
                progress.report(removed.len() as u64, total);
            }
            left = kept;
            if left.is_empty() || left.len() == tried {
                break;
            }
        }
        match refused.filter(|_| !left.is_empty()) {
            Some(failure) => {
                let ids: Vec<_> = left.iter().map(|image| format!("{} ({})", image.id, image.name)).collect();
                Err(failure.context(format!("the trash of {pool} keeps {}", ids.join(", "))))
            }
            None => Ok(removed),
        }
    }
}

/// Explains an error about an image in the trash to the user.
fn trash_failure(error: forebay_block::Error, spec: &TrashSpec) -> Failure {
    match error.kind() {
        ErrorKind::NotFound => {
            let what = format!("there is no image of the id {} in the trash of {}", spec.id, spec.pool);
            Failure::new(FailureKind::NotFound, what)
                .hint(format!("'forebay trash ls --all {}' lists those that there are", spec.pool))
        }
        _ => Failure::from(error).context(spec),
    }
}

fn describe(image: &forebay_image::TrashedImage) -> TrashListing {
    let source = match image.source {
        TrashSource::User => "USER",
        TrashSource::Mirroring => "MIRRORING",
        TrashSource::Migration => "MIGRATION",
        TrashSource::Removing => "REMOVING",
        TrashSource::UserParent => "USER_PARENT",
        TrashSource::Other(_) => "UNKNOWN",
    };
    TrashListing {
        id: image.id.clone(),
        name: image.name.clone(),
        source: source.into(),
        deleted_at: Timestamp(image.deleted.as_secs()),
        expires_at: Timestamp(image.deferred_until.as_secs()),
        parent: None,
    }
}
