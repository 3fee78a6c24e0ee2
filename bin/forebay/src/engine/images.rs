//! Operations on whole images: create, list, show, resize, rename, remove.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Compression, DataPolicy, ErrorKind};
use forebay_image as image;
use forebay_reactor::yield_now;

use super::Engine;
use super::compression;
use super::snapshots::no_snapshot;
use super::volumes::ReservedImage;
use crate::api::{
    self, DiskUsage, ImageListing, ImageParent, ImageStatus, ImageSummary, ImageUsage, ImageWatcher, ListedParent,
    UpdateImageRequest,
};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, LOCAL_POOL, SourceSpec, image_spec};
use crate::timestamp::Timestamp;
use crate::units::Size;

/// Progress steps that each image contributes to `du`.
const USAGE_STEPS: u64 = 1000;

/// Returns the features of these names.
pub(super) fn features(names: Option<&[String]>) -> Result<Option<image::ImageFeatures>> {
    let Some(names) = names else { return Ok(None) };
    image::ImageFeatures::of_names(names.iter().map(String::as_str)).map(Some).map_err(|name| {
        Failure::invalid(format!("'{name}' is no feature of an image"))
            .hint("the features are layering, exclusive-lock, object-map, fast-diff and deep-flatten")
    })
}

/// Returns the striping of this unit and count.
pub(super) fn striping(unit: Option<u64>, count: Option<u64>) -> Result<Option<image::Striping>> {
    match (unit, count) {
        (None, None) => Ok(None),
        (Some(unit), Some(count)) => Ok(Some(image::Striping { unit, count })),
        _ => Err(Failure::invalid("a stripe unit and a stripe count belong together: one of them is missing")),
    }
}

impl Engine {
    /// Returns the names of the pools: those of this daemon, and those of the Ceph cluster that were requested.
    pub fn pool_names(&self) -> Vec<String> {
        let own = self.pools.keys().map(|&name| name.to_owned());
        own.chain(self.ceph.pool_names()).collect()
    }

    /// Returns the names of the images of a pool or namespace, in order.
    pub async fn image_names(&self, pool: &str) -> Result<Vec<String>> {
        let images = self.images_in(pool).await?;
        let mut names = images.list().await.map_err(|error| self.pool_failure(error, pool))?;
        names.sort_unstable();
        Ok(names)
    }

    /// Lists the images of a pool or namespace by name.
    pub async fn list_images(&self, pool: &str) -> Result<Vec<ImageSummary>> {
        let there = self.images_in(pool).await?;
        let names = self.image_names(pool).await?;
        let mut images = Vec::with_capacity(names.len());
        for name in names {
            match there.info(&name).await {
                Ok(info) => images.push(ImageSummary { image: name, size: info.size, format: 2 }),
                Err(error) => self.leave_out(error, pool, &name)?,
            }
            // Yields, since reads from memory never suspend, and there may be thousands of images.
            yield_now().await;
        }
        Ok(images)
    }

    /// Lists the images of a pool or namespace by name, each followed by its snapshots.
    pub async fn list_images_long(&self, pool: &str) -> Result<Vec<ImageListing>> {
        let images = self.images_in(pool).await?;
        let mut names = images.list().await.map_err(|error| self.pool_failure(error, pool))?;
        names.sort_unstable();
        let mut listed = Vec::with_capacity(names.len());
        for name in names {
            match images.details(&name).await {
                Ok(details) => listed.extend(list_one(&name, &details)),
                Err(error) => self.leave_out(error, pool, &name)?,
            }
            // Yields, since reads from memory never suspend, and there may be thousands of images.
            yield_now().await;
        }
        Ok(listed)
    }

    /// Omits an image from a list: one removed meanwhile, or a damaged one, which must not hide the others.
    ///
    /// # Errors
    /// Any other error, which may affect all images.
    fn leave_out(&self, error: forebay_block::Error, pool: &str, name: &str) -> Result<()> {
        match error.kind() {
            ErrorKind::NotFound => Ok(()),
            ErrorKind::Corrupt | ErrorKind::Unsupported | ErrorKind::Invalid => {
                tracing::warn!(pool, image = name, %error, "an image cannot be listed");
                Ok(())
            }
            _ => Err(self.pool_failure(error, pool)),
        }
    }

    /// Returns the watchers and the exports of an image.
    pub async fn image_status(&self, spec: &ImageSpec) -> Result<ImageStatus> {
        let backend = self.pool(&spec.pool).await?;
        let watchers = image::Images::of(&backend).watchers(&spec.image).await;
        let watchers = watchers.map_err(|error| self.image_failure(error, spec))?.into_iter();
        Ok(ImageStatus {
            watchers: watchers
                .map(|watcher| ImageWatcher {
                    address: watcher.address,
                    client: watcher.client,
                    cookie: watcher.cookie,
                })
                .collect(),
            exports: self.targets_of(spec),
        })
    }

    /// Creates an empty image.
    pub async fn create_image(self: Rc<Self>, request: api::CreateImageRequest) -> Result<api::ImageInfo> {
        let spec = image_spec(&request.pool, &request.image)?;
        spec.check_new()?;
        let backend = self.pool_of_new(&spec).await?;
        let _reserved = self.reserve_unexported(&spec)?;
        let compression = request.compression.as_deref().map(compression::setting).transpose()?;
        if compression.is_some() {
            self.check_compresses(&spec.pool).await?;
        }
        let options = image::CreateOptions {
            size: request.size,
            object_size: request.object_size,
            striping: striping(request.stripe_unit, request.stripe_count)?,
            features: features(request.features.as_deref())?,
            data_pool: request.data_pool,
            encrypted: request.encrypt,
        };
        image::create(&backend, &spec.image, options).await.map_err(|error| self.image_failure(error, &spec))?;
        if let Some(compression) = compression {
            let policy = Some(DataPolicy { compression });
            let set = image::Images::of(&backend).set_data_policy(&spec.image, policy).await;
            set.map_err(|error| self.image_failure(error, &spec))?;
        }
        backend.flush().await.map_err(|error| self.image_failure(error, &spec))?;
        tracing::info!(image = %spec, size = %Size(request.size), "an image was created");
        self.image_info(&spec).await
    }

    /// Returns the size and layout of an image.
    pub async fn image_info(&self, spec: &ImageSpec) -> Result<api::ImageInfo> {
        let backend = self.pool(&spec.pool).await?;
        let details = image::Images::of(&backend).details(&spec.image).await;
        let details = details.map_err(|error| self.image_failure(error, spec))?;
        let compression = self.compression_of(spec).await?;
        let compression = (compression != Compression::None).then(|| compression.to_string());
        let encrypted = image::Images::of(&backend).is_encrypted(&details.info);
        Ok(api::ImageInfo { compression, encrypted, ..describe(spec, &details) })
    }

    /// Returns the size and layout of an image, or of a snapshot: its size and parent, and whether it is protected.
    pub async fn source_info(&self, source: &SourceSpec) -> Result<api::ImageInfo> {
        let spec = &source.image;
        let Some(snapshot) = source.snapshot() else { return self.image_info(spec).await };
        let backend = self.pool(&spec.pool).await?;
        let details = image::Images::of(&backend).details(&spec.image).await;
        let details = details.map_err(|error| self.image_failure(error, spec))?;
        let mut snapshots = details.snapshots.iter();
        let found = snapshots.find(|found| found.info.is_user() && found.info.name == snapshot.snapshot);
        let found = found.ok_or_else(|| no_snapshot(&snapshot))?;
        Ok(api::ImageInfo {
            size: found.info.size,
            objects: details.info.objects_of(found.info.size),
            protected: Some(found.info.protected.to_string()),
            parent: found.parent.as_ref().map(parent),
            ..describe(spec, &details)
        })
    }

    /// Changes an image's size or name.
    pub async fn update_image(
        self: &Rc<Self>,
        spec: &ImageSpec,
        update: UpdateImageRequest,
        progress: ProgressSink,
    ) -> Result<api::ImageInfo> {
        match update {
            UpdateImageRequest { size: Some(size), allow_shrink, name: None } => {
                self.resize_image(spec, size, allow_shrink, progress).await?;
                self.image_info(spec).await
            }
            UpdateImageRequest { size: None, name: Some(name), .. } => self.rename_image(spec, &name).await,
            UpdateImageRequest { .. } => Err(Failure::invalid("an update changes either the size or the name")),
        }
    }

    pub(super) async fn resize_image(
        self: &Rc<Self>,
        spec: &ImageSpec,
        size: u64,
        allow_shrink: bool,
        progress: ProgressSink,
    ) -> Result<()> {
        let volume = self.open_volume(spec).await?;
        let now = forebay_block::BlockDevice::geometry(&*volume.image).size;
        if size < now && !allow_shrink {
            let what = format!("{spec} has {}; making it {} loses the data past that", Size(now), Size(size));
            return Err(Failure::invalid(what).hint("add --allow-shrink to confirm"));
        }
        let shrinking = match volume.log().filter(|_| size < now) {
            Some(log) => Some(log.shrink(size).await.map_err(|error| self.image_failure(error, spec))?),
            None => None,
        };
        let resized = volume.image.resize(size, allow_shrink, |now| progress.report(now.done, now.total)).await;
        drop(shrinking);
        resized.map_err(|error| self.image_failure(error, spec))?;
        self.pool(&spec.pool).await?.flush().await.map_err(|error| self.image_failure(error, spec))?;
        tracing::info!(image = %spec, before = %Size(now), size = %Size(size), "an image was resized");
        Ok(())
    }

    async fn rename_image(self: &Rc<Self>, spec: &ImageSpec, name: &str) -> Result<api::ImageInfo> {
        // A name without a namespace is in that of the image.
        let to = image_spec(&if name.contains('/') { spec.pool.clone() } else { spec.place() }, name)?;
        to.check_new()?;
        if to.namespace() != spec.namespace() {
            return Err(Failure::invalid(format!("{spec} cannot become {to}: an image stays in its namespace"))
                .hint(format!("copy it, and remove it then: forebay deep cp {spec} {to}")));
        }
        let backend = self.pool(&spec.pool).await?;
        if *spec == to {
            return Err(Failure::new(FailureKind::Exists, format!("{spec} has that name already")));
        }
        let _from = self.reserve_unexported(spec)?;
        let _to = self.volumes.reserve(&to)?;
        image::rename(&backend, &spec.image, &to.image).await.map_err(|error| match error.kind() {
            forebay_block::ErrorKind::Exists => self.image_failure(error, &to),
            _ => self.image_failure(error, spec),
        })?;
        backend.flush().await.map_err(|error| self.image_failure(error, &to))?;
        self.volumes.forget(spec);
        self.meters.forget(spec);
        tracing::info!(image = %spec, %to, "an image was renamed");
        self.image_info(&to).await
    }

    /// Removes an image and its data.
    pub async fn remove_image(self: &Rc<Self>, spec: &ImageSpec, progress: ProgressSink) -> Result<()> {
        self.pool(&spec.pool).await?;
        self.refuse_logged(spec).await?;
        let _reserved = self.reserve_unexported(spec)?;
        self.refuse_snapshots(spec).await?;
        self.remove_reserved(spec, progress).await?;
        tracing::info!(image = %spec, "an image was removed");
        Ok(())
    }

    /// Removes an image that the caller has reserved.
    pub async fn remove_reserved(&self, spec: &ImageSpec, progress: ProgressSink) -> Result<()> {
        let backend = self.pool(&spec.pool).await?;
        image::remove(&backend, &spec.image, |now| progress.report(now.done, now.total))
            .await
            .map_err(|error| self.image_failure(error, spec))?;
        backend.flush().await.map_err(|error| self.image_failure(error, spec))?;
        self.volumes.forget(spec);
        self.meters.forget(spec);
        Ok(())
    }

    /// Reserves an image exclusively; fails if it is mapped or exported.
    pub fn reserve_unexported(&self, spec: &ImageSpec) -> Result<ReservedImage> {
        self.mappings.refuse_mapped(spec)?;
        if self.is_exported(spec) {
            return Err(Failure::new(FailureKind::Busy, format!("the image {spec} is exported"))
                .hint(format!("end that first: forebay detach {spec}")));
        }
        self.volumes.reserve(spec)
    }

    /// Returns the space that each image of a pool uses; see [`disk_usage`](Self::disk_usage).
    pub async fn pool_usage(self: &Rc<Self>, pool: &str, exact: bool, progress: ProgressSink) -> Result<DiskUsage> {
        let names = self.list_images(pool).await?.into_iter().map(|summary| summary.image).collect();
        Ok(total(self.usage_of(pool, names, exact, progress).await?))
    }

    /// Returns the space that an image and its snapshots use, or like `rbd` a snapshot and those before it.  In a pool shared with other clients,
    /// and of an image with snapshots, it counts like `rbd du`, in whole objects, unless `exact`; otherwise in bytes.
    pub async fn disk_usage(
        self: &Rc<Self>,
        source: &SourceSpec,
        exact: bool,
        progress: ProgressSink,
    ) -> Result<DiskUsage> {
        let (place, name) = (source.image.place(), source.image.name());
        if exact && source.snapshot.is_some() {
            return Err(Failure::invalid(format!("{source}: the space of a snapshot is counted in whole objects"))
                .hint("leave out --exact"));
        }
        let mut images = self.usage_of(&place, vec![name.into()], exact, progress).await?;
        if let Some(snapshot) = source.snapshot() {
            let found = images.iter().position(|part| part.snapshot.as_ref() == Some(&snapshot.snapshot));
            images.truncate(found.ok_or_else(|| no_snapshot(&snapshot))? + 1);
            return Ok(DiskUsage {
                total_provisioned_size: sum(&images, |part| part.provisioned_size),
                ..total(images)
            });
        }
        Ok(total(images))
    }

    async fn usage_of(
        self: &Rc<Self>,
        pool: &str,
        names: Vec<String>,
        exact: bool,
        progress: ProgressSink,
    ) -> Result<Vec<ImageUsage>> {
        let there = self.images_in(pool).await?;
        let is_shared = there.backend().shared().is_some();
        let count = names.len() as u64;
        let mut images = Vec::with_capacity(names.len());
        for (done, name) in names.into_iter().enumerate() {
            // Each image is an equal part of the total; its own progress fills a share of it.
            let report = |now: image::ObjectProgress| {
                let share = now.done * USAGE_STEPS / now.total.max(1);
                progress.report(done as u64 * USAGE_STEPS + share, count * USAGE_STEPS);
            };
            let spec = ImageSpec::listed(pool, &name).map_err(Failure::invalid)?;
            let volume = self.open_volume_to_read(&spec).await?;
            let (id, image) = (volume.image.id().to_owned(), &volume.image);
            let has_snapshots = async || there.snapshots(&name).await.is_ok_and(|found| !found.is_empty());
            let parts = match !exact && (is_shared || has_snapshots().await) {
                true => image.usage_by_snapshot(report).await,
                false => {
                    let usage = image.usage_with_progress(report).await;
                    usage.map(|usage| vec![image::SnapshotUsage { snapshot: None, usage }])
                }
            };
            let parts = parts.map_err(|error| self.image_failure(error, &spec))?;
            let stored = image.stored_bytes().await.map_err(|error| self.image_failure(error, &spec))?;
            // Without compression both are alike, and say no more than what is used.
            let stored = stored.filter(|stored| stored.logical != stored.stored);
            images.extend(parts.into_iter().map(|part| ImageUsage {
                name: name.clone(),
                id: id.clone(),
                snapshot_id: part.snapshot.as_ref().map(|snapshot| snapshot.id),
                logical_size: stored.filter(|_| part.snapshot.is_none()).map(|stored| stored.logical),
                stored_size: stored.filter(|_| part.snapshot.is_none()).map(|stored| stored.stored),
                snapshot: part.snapshot.map(|snapshot| snapshot.name),
                provisioned_size: part.usage.provisioned,
                used_size: part.usage.used,
            }));
            yield_now().await;
        }
        Ok(images)
    }

    /// Explains an error about an image to the user.
    pub fn image_failure(&self, error: forebay_block::Error, spec: &ImageSpec) -> Failure {
        let failure = Failure::from(error);
        match failure.kind {
            FailureKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no image {spec}"))
                .hint(format!("'forebay ls {}' lists the images", spec.place())),
            FailureKind::Exists => Failure::new(FailureKind::Exists, format!("the image {spec} exists already"))
                .hint(format!("choose another name, or remove that one: forebay rm {spec}")),
            FailureKind::NoSpace if spec.pool == LOCAL_POOL && self.store_limit().is_some() => {
                failure.context(spec).hint("free space on that file system; the store then resumes by itself")
            }
            FailureKind::NoSpace => failure
                .context(format_args!("the pool {} is full", spec.pool))
                .hint("remove or discard something; 'forebay store df' and 'forebay du' show what takes the space"),
            FailureKind::Corrupt => failure.context(spec).hint("'forebay store check' finds what is damaged"),
            _ => failure.context(spec),
        }
    }

    /// Explains an error about a pool to the user.
    pub fn pool_failure(&self, error: forebay_block::Error, pool: &str) -> Failure {
        Failure::from(error).context(format_args!("the pool {pool}"))
    }
}

fn sum(images: &[ImageUsage], part: fn(&ImageUsage) -> u64) -> u64 {
    images.iter().map(part).fold(0, u64::saturating_add)
}

fn total(images: Vec<ImageUsage>) -> DiskUsage {
    // The provisioned size of a snapshot is that of its image, and is counted once.
    let provisioned = |image: &ImageUsage| if image.snapshot.is_none() { image.provisioned_size } else { 0 };
    DiskUsage {
        total_provisioned_size: sum(&images, provisioned),
        total_used_size: sum(&images, |part| part.used_size),
        images,
    }
}

/// Returns a time of the image layer; 0 means unknown, as in `rbd`.
pub(super) fn known_time(since: Option<Duration>) -> Option<Timestamp> {
    since.map(|since| Timestamp(since.as_secs())).filter(|&time| time > Timestamp(0))
}

fn describe(spec: &ImageSpec, details: &image::ImageDetails) -> api::ImageInfo {
    let info = &details.info;
    api::ImageInfo {
        pool: spec.pool.clone(),
        name: spec.name().into(),
        id: info.id.clone(),
        size: info.size,
        objects: info.objects(),
        order: info.order(),
        object_size: info.object_size,
        data_pool: details.data_pool.clone(),
        snapshot_count: info.snapshots,
        block_name_prefix: info.block_name_prefix.clone(),
        format: 2,
        features: info.features.names(),
        op_features: details.op_feature_names(),
        flags: details.flag_names(),
        group: details.group.clone(),
        create_timestamp: known_time(info.created),
        access_timestamp: known_time(info.accessed),
        modify_timestamp: known_time(info.modified),
        protected: None,
        snapshot_limit: details.snapshot_limit,
        parent: details.parent.as_ref().map(parent),
        stripe_unit: info.striping.map(|striping| striping.unit),
        stripe_count: info.striping.map(|striping| striping.count),
        compression: None,
        encrypted: false,
    }
}

fn parent(parent: &image::ParentInfo) -> ImageParent {
    ImageParent {
        pool: parent.pool.clone(),
        pool_namespace: parent.namespace.clone(),
        image: parent.image.clone(),
        id: parent.id.clone(),
        snapshot: parent.snapshot.clone(),
        trash: parent.trash,
        overlap: parent.overlap,
    }
}

/// Returns the entries of an image in a long list: the image and its snapshots.
fn list_one(name: &str, details: &image::ImageDetails) -> Vec<ImageListing> {
    let listed = |of: &Option<image::ParentInfo>| of.as_ref().map(|of| ListedParent::from(&parent(of)));
    let head = ImageListing {
        image: name.to_owned(),
        id: details.info.id.clone(),
        snapshot: None,
        snapshot_id: None,
        size: details.info.size,
        parent: listed(&details.parent),
        format: 2,
        protected: None,
        lock_type: details.lock.map(|lock| match lock {
            image::LockKind::Exclusive => "exclusive".into(),
            image::LockKind::Shared => "shared".into(),
        }),
    };
    let snapshots = details.snapshots.iter().filter(|snapshot| snapshot.info.is_user());
    let snapshots = snapshots.map(|snapshot| ImageListing {
        snapshot: Some(snapshot.info.name.clone()),
        snapshot_id: Some(snapshot.info.id),
        size: snapshot.info.size,
        parent: listed(&snapshot.parent),
        protected: Some(snapshot.info.protected.to_string()),
        lock_type: None,
        ..head.clone()
    });
    let snapshots: Vec<_> = snapshots.collect();
    [vec![head], snapshots].concat()
}
