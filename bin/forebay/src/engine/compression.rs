//! Compression of images on the embedded store: settings of images and of the store, and what it saves.

use forebay_block::{Compression, DataPolicy, ObjectName};
use forebay_image::Images;

use super::Engine;
use crate::api::{ConfigOption, ConfigValue};
use crate::failure::{Failure, Result};
use crate::ops::ConfigTarget;
use crate::rbd_options::COMPRESSION;
use crate::spec::ImageSpec;

/// Parses a compression setting.
pub(super) fn setting(text: &str) -> Result<Compression> {
    text.parse().map_err(|error: forebay_block::UnknownCompression| Failure::invalid(error.to_string()))
}

/// Returns the name under which the default of a store is set.
fn default_of_store() -> ObjectName {
    ObjectName::new("")
}

/// Explains that a pool does not compress by image.
fn unsupported(pool: &str) -> Failure {
    Failure::invalid(format!("the pool {pool} does not take a compression for each image")).hint(format!(
        "the embedded store does; a Ceph pool compresses by itself: ceph osd pool set {pool} compression_mode aggressive"
    ))
}

impl Engine {
    /// Rejects a compression setting for a pool whose backend has none.
    pub(super) async fn check_compresses(&self, pool: &str) -> Result<()> {
        let backend = self.pool(pool).await?;
        backend.data_policy(&default_of_store()).map(drop).map_err(|_| unsupported(pool))
    }

    /// Returns the compression that is set for an image or a pool, if its backend compresses and one is set.
    pub(super) async fn own_compression(&self, target: &ConfigTarget) -> Result<Option<Compression>> {
        let backend = self.pool(target.pool()).await?;
        let Ok(default) = backend.data_policy(&default_of_store()) else { return Ok(None) };
        let policy = match target {
            ConfigTarget::Pool(_) => default,
            ConfigTarget::Image(spec) => {
                let own = Images::of(&backend).data_policy(&spec.image).await;
                own.map_err(|error| self.target_failure(error, target))?
            }
        };
        Ok(policy.map(|policy| policy.compression))
    }

    /// Returns the compression of data written to an image from now on.
    pub(super) async fn compression_of(&self, spec: &ImageSpec) -> Result<Compression> {
        match self.own_compression(&ConfigTarget::Image(spec.clone())).await? {
            Some(own) => Ok(own),
            None => Ok(self.own_compression(&ConfigTarget::Pool(spec.pool.clone())).await?.unwrap_or_default()),
        }
    }

    /// Returns the compression in force for an image or a pool as an option, if any is set.
    pub(super) async fn compression_option(&self, target: &ConfigTarget) -> Result<Option<ConfigOption>> {
        let pool = ConfigTarget::Pool(target.pool().into());
        let found = match (target, self.own_compression(target).await?) {
            (ConfigTarget::Image(_), Some(own)) => Some((own, "image")),
            _ => self.own_compression(&pool).await?.map(|default| (default, "pool")),
        };
        Ok(found.map(|(value, source)| ConfigOption {
            name: COMPRESSION.name.into(),
            value: value.to_string(),
            source: source.into(),
        }))
    }

    /// Returns the compression that is set for an image or a pool.
    ///
    /// # Errors
    /// `NotFound` if none is.
    pub(super) async fn get_compression(&self, target: &ConfigTarget) -> Result<ConfigValue> {
        let own = self.own_compression(target).await?;
        let value = own.ok_or_else(|| super::options::not_set(COMPRESSION.name))?.to_string();
        Ok(ConfigValue { value })
    }

    /// Sets the compression of an image, or the default of a store, or ends that.
    ///
    /// # Errors
    /// `Invalid` where the pool does not compress; `NotFound` if there is no setting to end.
    pub(super) async fn change_compression(&self, target: &ConfigTarget, value: Option<&str>) -> Result<()> {
        let pool = target.pool();
        self.check_compresses(pool).await?;
        let policy = value.map(setting).transpose()?.map(|compression| DataPolicy { compression });
        if policy.is_none() && self.own_compression(target).await?.is_none() {
            return Err(super::options::not_set(COMPRESSION.name));
        }
        let backend = self.pool(pool).await?;
        let changed = match target {
            ConfigTarget::Pool(_) => backend.set_data_policy(&default_of_store(), policy).await,
            ConfigTarget::Image(spec) => Images::of(&backend).set_data_policy(&spec.image, policy).await,
        };
        changed.map_err(|error| self.target_failure(error, target))?;
        match target {
            ConfigTarget::Image(spec) => {
                tracing::info!(image = %spec, value, "the compression of an image was changed")
            }
            ConfigTarget::Pool(pool) => tracing::info!(pool, value, "the default compression was changed"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor};

    use super::*;
    use crate::api::CreateImageRequest;
    use crate::engine::testing::engine_with_cluster;
    use crate::failure::FailureKind;

    #[test]
    fn a_pool_of_a_cluster_refuses_a_compression_before_it_makes_anything() {
        let dir = tempfile::tempdir().expect("a directory");
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let (engine, _cluster, _client, spec) = engine_with_cluster(dir.path()).await;
            let request = CreateImageRequest {
                pool: "rbd".into(),
                image: "new".into(),
                size: 1 << 20,
                object_size: 1 << 20,
                stripe_unit: None,
                stripe_count: None,
                features: None,
                data_pool: None,
                compression: Some("lz4".into()),
                encrypt: false,
            };
            let failure = engine.clone().create_image(request).await.expect_err("the cluster compresses by itself");
            assert_eq!(failure.kind, FailureKind::Invalid, "{failure:?}");
            assert!(failure.message.contains("the pool rbd"), "{failure:?}");
            assert_eq!(engine.image_names("rbd").await.expect("a list"), ["x"]);
            for target in [ConfigTarget::Image(spec), ConfigTarget::Pool("rbd".into())] {
                let changed = engine.change_compression(&target, Some("lz4")).await;
                assert_eq!(changed.expect_err("refused").kind, FailureKind::Invalid);
                assert_eq!(engine.compression_option(&target).await.expect("none"), None);
            }
            engine.close().await.expect("close");
        });
    }
}
