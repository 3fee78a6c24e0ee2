//! Operations on snapshots: create, list, rename, protect, limit, remove, and roll back to them.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ErrorKind, SnapId};
use forebay_image::{self as image, Image, ImageOpenOptions, SnapshotInfo, SnapshotKind};
use forebay_reactor::timeout;

use super::Engine;
use super::images::known_time;
use super::logs::log_failure;
use super::volumes::{ReservedImage, Volume};
use crate::api::{ImageSnapshot, SnapshotNamespace, UpdateSnapshotRequest};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec};

/// Maximum wait for the log of an unused volume to be closed before a rollback.
const CLOSING: Duration = Duration::from_secs(2);

impl Engine {
    /// Lists the snapshots of an image, oldest first; with `all` also those of groups, of mirroring and in the trash.
    pub async fn list_snapshots(&self, spec: &ImageSpec, all: bool) -> Result<Vec<ImageSnapshot>> {
        let backend = self.pool(&spec.pool).await?;
        let snapshots = image::Images::of(&backend).snapshots(&spec.image).await;
        let snapshots = snapshots.map_err(|error| self.image_failure(error, spec))?;
        let mut listed = Vec::new();
        for snapshot in snapshots.iter().filter(|snapshot| all || snapshot.is_user()) {
            let mut owner = all.then(|| namespace(snapshot));
            if let (Some(owner), SnapshotKind::Group { pool, group, snapshot }) = (&mut owner, &snapshot.kind) {
                // Groups are in the namespace of their images.
                let there = image::Images::in_namespace(&backend, spec.namespace());
                let names = there.group_names(*pool, group, snapshot).await;
                let names = names.map_err(|error| self.image_failure(error, spec))?;
                (owner.pool, owner.group, owner.group_snapshot) = names;
            }
            listed.push(ImageSnapshot { namespace: owner, ..describe(snapshot) });
        }
        Ok(listed)
    }

    /// Creates a snapshot, which has every write acknowledged before, and none submitted after it returns.
    pub async fn create_snapshot(self: &Rc<Self>, spec: &SnapshotSpec) -> Result<ImageSnapshot> {
        spec.check_new()?;
        let volume = self.open_volume(&spec.image).await?;
        let _turn = volume.snapshotting.acquire(1).await;
        let cut = match volume.log() {
            Some(log) => Some(log.cut().await.map_err(|error| log_failure(error, &spec.image))?),
            None => None,
        };
        let created = volume.image.create_snapshot(&spec.snapshot).await;
        drop(cut);
        let created = match created {
            Ok(created) => created,
            Err(error) => return Err(self.creation_failure(error, spec).await),
        };
        self.flush_pool(&spec.image).await?;
        tracing::info!(image = %spec.image, snapshot = spec.snapshot, id = created.id, "a snapshot was created");
        Ok(describe(&created))
    }

    /// Renames a snapshot, or changes its protection.
    pub async fn update_snapshot(
        self: &Rc<Self>,
        spec: &SnapshotSpec,
        update: UpdateSnapshotRequest,
    ) -> Result<ImageSnapshot> {
        match update {
            UpdateSnapshotRequest { name: Some(name), protected: None } => self.rename_snapshot(spec, &name).await,
            UpdateSnapshotRequest { name: None, protected: Some(protected) } => {
                self.protect_snapshot(spec, protected).await
            }
            UpdateSnapshotRequest { .. } => {
                Err(Failure::invalid("an update changes either the name or the protection of a snapshot"))
            }
        }
    }

    async fn rename_snapshot(self: &Rc<Self>, spec: &SnapshotSpec, name: &str) -> Result<ImageSnapshot> {
        let to = SnapshotSpec::new(spec.image.clone(), name).map_err(Failure::invalid)?;
        to.check_new()?;
        if *spec == to {
            return Err(Failure::new(FailureKind::Exists, format!("{spec} has that name already")));
        }
        let volume = self.open_volume(&spec.image).await?;
        if let Err(error) = volume.image.rename_snapshot(&spec.snapshot, &to.snapshot).await {
            let about = if error.kind() == ErrorKind::Exists { &to } else { spec };
            return Err(self.snapshot_failure(error, about).await);
        }
        self.flush_pool(&spec.image).await?;
        tracing::info!(image = %spec.image, snapshot = spec.snapshot, to = to.snapshot, "a snapshot was renamed");
        described(&volume, &to)
    }

    async fn protect_snapshot(self: &Rc<Self>, spec: &SnapshotSpec, protected: bool) -> Result<ImageSnapshot> {
        let volume = self.open_volume(&spec.image).await?;
        self.set_protection(&volume, spec, protected).await?;
        self.flush_pool(&spec.image).await?;
        described(&volume, spec)
    }

    async fn set_protection(&self, volume: &Volume, spec: &SnapshotSpec, protected: bool) -> Result<()> {
        match volume.image.set_snapshot_protection(&spec.snapshot, protected).await {
            Ok(true) => {
                let done = if protected { "a snapshot was protected" } else { "a snapshot was unprotected" };
                tracing::info!(image = %spec.image, snapshot = spec.snapshot, "{done}");
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(error) => Err(self.snapshot_failure(error, spec).await),
        }
    }

    /// Removes a snapshot; `force` flattens its clones and ends its protection first.
    pub async fn remove_snapshot(
        self: &Rc<Self>,
        spec: &SnapshotSpec,
        force: bool,
        progress: ProgressSink,
    ) -> Result<()> {
        let volume = self.open_volume(&spec.image).await?;
        if force {
            self.flatten_clones(spec, progress).await?;
            match self.set_protection(&volume, spec, false).await {
                // Snapshots of an image without layering are never protected.
                Err(failure) if failure.kind == FailureKind::Unsupported => {}
                ended => ended?,
            }
        }
        self.remove_one(&volume, spec).await?;
        self.flush_pool(&spec.image).await
    }

    /// Removes the snapshot of a number, also one in the trash that has no clones; returns its name.
    pub async fn remove_snapshot_by_id(self: &Rc<Self>, spec: &ImageSpec, id: u64) -> Result<SnapshotSpec> {
        let backend = self.pool(&spec.pool).await?;
        let snapshots = image::Images::of(&backend).snapshots(&spec.image).await;
        let snapshots = snapshots.map_err(|error| self.image_failure(error, spec))?;
        let Some(found) = snapshots.into_iter().find(|snapshot| snapshot.id == id) else {
            return Err(Failure::new(FailureKind::NotFound, format!("{spec} has no snapshot of the number {id}"))
                .hint(format!("'forebay snap ls --all {spec}' lists them")));
        };
        let name = match &found.kind {
            SnapshotKind::Trash { name } => name.clone(),
            _ => found.name,
        };
        let removed = SnapshotSpec { image: spec.clone(), snapshot: name };
        let volume = self.open_volume(spec).await?;
        if let Err(error) = volume.image.remove_snapshot_number(SnapId(id)).await {
            let failure = self.snapshot_failure(error, &removed).await;
            return Err(match failure.kind {
                FailureKind::Busy if matches!(found.kind, SnapshotKind::Trash { .. }) => failure.hint(format!(
                    "it is removed with its last clone; 'forebay children --all {spec}' lists the clones"
                )),
                _ => failure,
            });
        }
        self.flush_pool(spec).await?;
        tracing::info!(image = %spec, snapshot = removed.snapshot, id, "a snapshot was removed");
        Ok(removed)
    }

    async fn remove_one(&self, volume: &Volume, spec: &SnapshotSpec) -> Result<()> {
        if let Err(error) = volume.image.remove_snapshot(&spec.snapshot).await {
            let failure = self.snapshot_failure(error, spec).await;
            let found = find(&volume.image, spec).filter(|_| failure.kind == FailureKind::Busy);
            return Err(match found {
                Some(found) if found.protected => {
                    Failure::new(FailureKind::Busy, format!("the snapshot {spec} is protected"))
                        .hint(format!("end that first: forebay snap unprotect {spec}"))
                }
                _ => failure,
            });
        }
        tracing::info!(image = %spec.image, snapshot = spec.snapshot, "a snapshot was removed");
        Ok(())
    }

    /// Removes the snapshots that users have created and that are not protected; returns their names.
    ///
    /// # Errors
    /// `Busy` if protected snapshots are left, once the others are removed; the failure of the first removal that
    /// fails.
    pub async fn purge_snapshots(self: &Rc<Self>, spec: &ImageSpec, progress: ProgressSink) -> Result<Vec<String>> {
        let volume = self.open_volume(spec).await?;
        let snapshots = volume.image.snapshots().into_iter();
        let (protected, purged): (Vec<_>, Vec<_>) = snapshots.partition(|snapshot| snapshot.protected);
        let total = purged.len() as u64;
        let mut removed = Vec::new();
        for snapshot in purged {
            let one = SnapshotSpec { image: spec.clone(), snapshot: snapshot.name };
            match self.remove_one(&volume, &one).await {
                Ok(()) => removed.push(one.snapshot),
                // Another client has removed it meanwhile.
                Err(failure) if failure.kind == FailureKind::NotFound => {}
                Err(failure) => {
                    self.flush_pool(spec).await?;
                    let done = format!("after {} of {}", removed.len(), counted(total as usize, "snapshot"));
                    return Err(failure.context(done));
                }
            }
            progress.report(removed.len() as u64, total);
        }
        self.flush_pool(spec).await?;
        if !protected.is_empty() {
            let names: Vec<_> = protected.iter().map(|snapshot| snapshot.name.as_str()).collect();
            let what = format!("{spec} keeps {}: {}", counted(names.len(), "protected snapshot"), names.join(", "));
            return Err(Failure::new(FailureKind::Busy, what)
                .hint(format!("'forebay snap unprotect {spec}@SNAP' allows its removal")));
        }
        Ok(removed)
    }

    /// Limits the number of snapshots, or removes the limit.
    pub async fn set_snapshot_limit(self: &Rc<Self>, spec: &ImageSpec, limit: Option<u64>) -> Result<()> {
        // The format has this value for "no limit".
        let limit = limit.filter(|&limit| limit < u64::MAX);
        let volume = self.open_volume(spec).await?;
        let set = volume.image.set_snapshot_limit(limit).await;
        set.map_err(|error| self.image_failure(error, spec))?;
        self.flush_pool(spec).await?;
        tracing::info!(image = %spec, limit, "the snapshot limit was set");
        Ok(())
    }

    /// Rolls an image back to a snapshot: its content and its size.
    pub async fn roll_back(self: &Rc<Self>, spec: &SnapshotSpec, progress: ProgressSink) -> Result<()> {
        self.pool(&spec.image.pool).await?;
        let reserved = self.reserve_unused(&spec.image).await?;
        let volume = self.open_reserved(&reserved).await?;
        // With no byte admitted the log is empty, and recovery replays nothing over the older data.
        let closed = match volume.log() {
            Some(log) => Some(log.shrink(0).await.map_err(|error| log_failure(error, &spec.image))?),
            None => None,
        };
        let done = volume.image.rollback(&spec.snapshot, |now| progress.report(now.done, now.total)).await;
        drop(closed);
        if let Err(error) = done {
            return Err(self.snapshot_failure(error, spec).await);
        }
        self.flush_pool(&spec.image).await?;
        tracing::info!(image = %spec.image, snapshot = spec.snapshot, "an image was rolled back");
        Ok(())
    }

    /// Reserves an image that is neither mapped, exported nor in use. A volume that only its log keeps open is closed first.
    pub(super) async fn reserve_unused(&self, spec: &ImageSpec) -> Result<ReservedImage> {
        self.mappings.refuse_mapped(spec)?;
        let kept = !self.is_exported(spec) && self.has_open_log(spec);
        if kept {
            self.let_go_of_log(spec);
            if let Ok(Err(error)) = timeout(CLOSING, self.volumes.closed(spec)).await {
                tracing::warn!(image = %spec, %error, "a write log was not closed cleanly; it is recovered when opened");
            }
        }
        self.reserve_unexported(spec).inspect_err(|_| {
            // The volume still has other users.
            if let Some(volume) = self.volumes.find(spec).filter(|_| kept) {
                self.keep_logged(spec, &volume);
            }
        })
    }

    /// Opens a snapshot for reading.
    pub(super) async fn open_snapshot(&self, spec: &SnapshotSpec) -> Result<Rc<Image>> {
        let backend = self.pool(&spec.image.pool).await?;
        let name = format!("{}@{}", spec.image.image, spec.snapshot);
        match Image::open(backend, &name, ImageOpenOptions { read_only: true }).await {
            Ok(image) => Ok(image),
            Err(error) => Err(self.snapshot_failure(error, spec).await),
        }
    }

    /// Fails if an image has snapshots, which would lose their data with it. One whose snapshots cannot be read, such
    /// as the rest of an interrupted removal, has none.
    pub(super) async fn refuse_snapshots(&self, spec: &ImageSpec) -> Result<()> {
        let backend = self.pool(&spec.pool).await?;
        let images = image::Images::of(&backend);
        if let Err(error) = images.empty_snapshot_trash(&spec.image).await {
            tracing::debug!(image = %spec, %error, "cannot remove the snapshots in the trash");
        }
        let snapshots = images.snapshots(&spec.image).await.unwrap_or_default();
        if snapshots.is_empty() {
            return Ok(());
        }
        let what = format!("{spec} has {}", counted(snapshots.len(), "snapshot"));
        let hint = match snapshots.iter().all(SnapshotInfo::is_user) {
            true => format!("remove them first: forebay snap purge {spec}"),
            false => format!(
                "'forebay snap purge {spec}' removes those of users; those in the trash are removed with their last clone: \
                 'forebay children --all {spec}' lists the clones; those of groups with 'forebay group snap rm'; 'forebay \
                 snap ls --all {spec}' lists all, also those of mirroring, which rbd removes"
            ),
        };
        Err(Failure::new(FailureKind::Busy, what).hint(hint))
    }

    pub(super) async fn flush_pool(&self, spec: &ImageSpec) -> Result<()> {
        self.pool(&spec.pool).await?.flush().await.map_err(|error| self.image_failure(error, spec))
    }

    /// Explains an error about a snapshot to the user.
    pub(super) async fn snapshot_failure(&self, error: forebay_block::Error, spec: &SnapshotSpec) -> Failure {
        match error.kind() {
            ErrorKind::NotFound => match self.image_is_missing(&spec.image).await {
                true => self.image_failure(error, &spec.image),
                false => no_snapshot(spec),
            },
            ErrorKind::Exists => Failure::new(FailureKind::Exists, format!("the snapshot {spec} exists already"))
                .hint(format!("choose another name, or remove that one: forebay snap rm {spec}")),
            _ => self.image_failure(error, &spec.image),
        }
    }

    /// Explains an error about an image or a snapshot to the user.
    pub(super) async fn source_failure(&self, error: forebay_block::Error, source: &SourceSpec) -> Failure {
        match source.snapshot() {
            Some(snapshot) => self.snapshot_failure(error, &snapshot).await,
            None => self.image_failure(error, &source.image),
        }
    }

    /// Explains why a snapshot cannot be created: at the limit of its image this is not for want of space.
    pub(super) async fn creation_failure(&self, error: forebay_block::Error, spec: &SnapshotSpec) -> Failure {
        if error.kind() == ErrorKind::NoSpace
            && let Ok(backend) = self.pool(&spec.image.pool).await
            && let Ok(details) = image::Images::of(&backend).details(&spec.image.image).await
            && let Some(limit) = details.snapshot_limit
            && details.snapshots.len() as u64 >= limit
        {
            let count = counted(details.snapshots.len(), "snapshot");
            let what = format!("{} has {count}, and its snapshot limit is {limit}", spec.image);
            return Failure::new(FailureKind::NoSpace, what).hint(format!(
                "remove one with 'forebay snap rm', or set another limit: forebay snap limit set {} --limit N",
                spec.image
            ));
        }
        self.snapshot_failure(error, spec).await
    }

    pub(super) async fn image_is_missing(&self, spec: &ImageSpec) -> bool {
        let Ok(backend) = self.pool(&spec.pool).await else { return false };
        image::info(&backend, &spec.image).await.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }
}

/// Returns the failure of a snapshot that does not exist.
pub(super) fn no_snapshot(spec: &SnapshotSpec) -> Failure {
    Failure::new(FailureKind::NotFound, format!("there is no snapshot {spec}"))
        .hint(format!("'forebay snap ls {}' lists them", spec.image))
}

/// Describes a snapshot after a change; another client may have removed it since.
fn described(volume: &Volume, spec: &SnapshotSpec) -> Result<ImageSnapshot> {
    find(&volume.image, spec).map(|found| describe(&found)).ok_or_else(|| no_snapshot(spec))
}

/// Returns the snapshot of a user by that name. Those of groups and the like are no user's to change.
fn find(image: &Image, spec: &SnapshotSpec) -> Option<SnapshotInfo> {
    image.snapshots().into_iter().find(|snapshot| snapshot.name == spec.snapshot)
}

pub(super) fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

fn describe(snapshot: &SnapshotInfo) -> ImageSnapshot {
    ImageSnapshot {
        id: snapshot.id,
        name: snapshot.name.clone(),
        size: snapshot.size,
        protected: snapshot.protected.to_string(),
        timestamp: known_time(snapshot.created),
        namespace: None,
    }
}

/// Returns what a snapshot belongs to.
fn namespace(snapshot: &SnapshotInfo) -> SnapshotNamespace {
    let (kind, original_name) = match &snapshot.kind {
        SnapshotKind::User => ("user", None),
        SnapshotKind::Group { .. } => ("group", None),
        SnapshotKind::Trash { name } => ("trash", Some(name.clone())),
        SnapshotKind::Other(3) => ("mirror", None),
        SnapshotKind::Other(_) => ("unknown", None),
    };
    SnapshotNamespace { kind: kind.into(), original_name, ..SnapshotNamespace::default() }
}
