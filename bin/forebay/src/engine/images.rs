//! What is done with images as a whole: create, list, look at, resize, rename, remove.

use std::rc::Rc;

use forebay_image as image;
use forebay_reactor::yield_now;

use super::Engine;
use super::volumes::Reserved;
use crate::api::{self, DiskUsage, ImageSummary, ImageUsage, UpdateImage};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, LOCAL_POOL, image_spec};
use crate::units::Size;

/// Steps of progress that each image counts for in `du`.
const USAGE_STEPS: u64 = 1000;

impl Engine {
    /// Names of the pools: those of this daemon, and those of the Ceph cluster that were asked for.
    pub fn pool_names(&self) -> Vec<String> {
        let own = self.pools.keys().map(|&name| name.to_owned());
        own.chain(self.ceph.pool_names()).collect()
    }

    /// Names of a pool's images, in order.
    pub async fn image_names(&self, pool: &str) -> Result<Vec<String>> {
        let backend = self.pool(pool).await?;
        let mut names = image::list(&backend).await.map_err(|error| self.pool_failure(error, pool))?;
        names.sort_unstable();
        Ok(names)
    }

    /// The images of a pool, by name.
    pub async fn list_images(&self, pool: &str) -> Result<Vec<ImageSummary>> {
        let backend = self.pool(pool).await?;
        let names = self.image_names(pool).await?;
        let mut images = Vec::with_capacity(names.len());
        for name in names {
            // An image that goes while the list is made is not in it.
            let Ok(info) = image::info(&backend, &name).await else { continue };
            images.push(ImageSummary { image: name, size: info.size, format: 2 });
            // All of it may be in memory, and there may be thousands.
            yield_now().await;
        }
        Ok(images)
    }

    /// A new image, empty.
    pub async fn create_image(self: Rc<Self>, request: api::CreateImage) -> Result<api::ImageInfo> {
        let spec = image_spec(&request.pool, &request.image)?;
        spec.check_new()?;
        let backend = self.pool(&spec.pool).await?;
        let _reserved = self.reserve_unexported(&spec)?;
        let options =
            image::CreateOptions { size: request.size, object_size: request.object_size, ..Default::default() };
        image::create(&backend, &spec.image, options).await.map_err(|error| self.image_failure(error, &spec))?;
        backend.flush().await.map_err(|error| self.image_failure(error, &spec))?;
        tracing::info!(image = %spec, size = %Size(request.size), "an image was created");
        self.image_info(&spec).await
    }

    /// An image's size and layout.
    pub async fn image_info(&self, spec: &ImageSpec) -> Result<api::ImageInfo> {
        let backend = self.pool(&spec.pool).await?;
        let info = image::info(&backend, &spec.image).await.map_err(|error| self.image_failure(error, spec))?;
        Ok(describe(spec, &info))
    }

    /// Changes an image's size or name.
    pub async fn update_image(
        self: &Rc<Self>,
        spec: &ImageSpec,
        update: UpdateImage,
        progress: ProgressSink,
    ) -> Result<api::ImageInfo> {
        match update {
            UpdateImage { size: Some(size), allow_shrink, name: None } => {
                self.resize_image(spec, size, allow_shrink, progress).await?;
                self.image_info(spec).await
            }
            UpdateImage { size: None, name: Some(name), .. } => self.rename_image(spec, &name).await,
            UpdateImage { .. } => Err(Failure::invalid("an update changes either the size or the name")),
        }
    }

    async fn resize_image(
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
            return Err(Failure::invalid(what).hint("say --allow-shrink if that is meant"));
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
        let to = image_spec(&spec.pool, name)?;
        to.check_new()?;
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
        self.remove_reserved(spec, progress).await?;
        tracing::info!(image = %spec, "an image was removed");
        Ok(())
    }

    /// Removes an image that one has to oneself.
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

    /// An image to oneself that is not exported either.
    pub fn reserve_unexported(&self, spec: &ImageSpec) -> Result<Reserved> {
        if self.is_exported(spec) {
            return Err(Failure::new(FailureKind::Busy, format!("the image {spec} is exported"))
                .hint(format!("end that first: forebay detach {spec}")));
        }
        self.volumes.reserve(spec)
    }

    /// What an image, or each image of a pool, takes up.
    pub async fn disk_usage(
        self: &Rc<Self>,
        pool: &str,
        image: Option<&str>,
        progress: ProgressSink,
    ) -> Result<DiskUsage> {
        let names = match image {
            Some(image) => vec![image.to_owned()],
            None => self.list_images(pool).await?.into_iter().map(|summary| summary.image).collect(),
        };
        let count = names.len() as u64;
        let mut images = Vec::with_capacity(names.len());
        for (done, name) in names.into_iter().enumerate() {
            // Each image is a part of equal size, of which its own progress fills a share.
            let report = |now: image::Progress| {
                let share = now.done * USAGE_STEPS / now.total.max(1);
                progress.report(done as u64 * USAGE_STEPS + share, count * USAGE_STEPS);
            };
            let spec = image_spec(pool, &name)?;
            let volume = self.open_volume(&spec).await?;
            let usage =
                volume.image.usage_with_progress(report).await.map_err(|error| self.image_failure(error, &spec))?;
            images.push(ImageUsage { name, provisioned_size: usage.provisioned, used_size: usage.used });
            yield_now().await;
        }
        let sum = |part: fn(&ImageUsage) -> u64| images.iter().map(part).fold(0, u64::saturating_add);
        Ok(DiskUsage {
            total_provisioned_size: sum(|image| image.provisioned_size),
            total_used_size: sum(|image| image.used_size),
            images,
        })
    }

    /// An error about an image, in the words of a user.
    pub fn image_failure(&self, error: forebay_block::Error, spec: &ImageSpec) -> Failure {
        let failure = Failure::from(error);
        match failure.kind {
            FailureKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no image {spec}"))
                .hint(format!("'forebay ls {}' lists the images", spec.pool)),
            FailureKind::Exists => Failure::new(FailureKind::Exists, format!("there is an image {spec} already"))
                .hint(format!("choose another name, or remove that one: forebay rm {spec}")),
            FailureKind::NoSpace if spec.pool == LOCAL_POOL && self.store_limit().is_some() => {
                failure.context(spec).hint("free space on that file system; the store goes on by itself then")
            }
            FailureKind::NoSpace => failure
                .context(format_args!("the pool {} is full", spec.pool))
                .hint("remove or discard something; 'forebay store df' and 'forebay du' show what takes the space"),
            FailureKind::Corrupt => failure.context(spec).hint("'forebay store check' finds what is damaged"),
            _ => failure.context(spec),
        }
    }

    /// An error about a pool.
    pub fn pool_failure(&self, error: forebay_block::Error, pool: &str) -> Failure {
        Failure::from(error).context(format_args!("the pool {pool}"))
    }
}

fn describe(spec: &ImageSpec, info: &image::ImageInfo) -> api::ImageInfo {
    api::ImageInfo {
        pool: spec.pool.clone(),
        name: spec.image.clone(),
        id: info.id.clone(),
        size: info.size,
        objects: info.objects(),
        order: info.order(),
        object_size: info.object_size,
        block_name_prefix: info.block_name_prefix.clone(),
        format: 2,
        features: info.features.names(),
        snapshot_count: info.snapshots,
        create_timestamp: info.created.map(|since| rfc3339(since.as_secs())),
    }
}

/// A time since 1970 in seconds as people and programs read it.
fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's civil_from_days: years begin in March, eras have 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_102_444_799, "2099-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), want);
        }
    }
}
