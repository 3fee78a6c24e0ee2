//! Operations on options that images and pools override: list, show, set and remove them.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_image::{Images, OWN_BLOCKS_KEY};
use forebay_reactor::yield_now;

use super::Engine;
use super::limits::{DefaultOptions, overrides};
use crate::api::{ConfigOption, ConfigValue};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ConfigTarget;
use crate::rbd_options::{self, COMPRESSION, METADATA_PREFIX, OptionScope};
use crate::spec::ImageSpec;

impl ConfigTarget {
    fn scope(&self) -> OptionScope {
        match self {
            ConfigTarget::Image(_) => OptionScope::Image,
            ConfigTarget::Pool(_) => OptionScope::Pool,
        }
    }

    pub(super) fn pool(&self) -> &str {
        match self {
            ConfigTarget::Image(spec) => &spec.pool,
            ConfigTarget::Pool(pool) => pool,
        }
    }
}

impl Engine {
    /// Returns the options of the daemon's configuration, by name.
    pub(super) fn default_options(&self) -> DefaultOptions {
        Rc::new(self.options.daemon.as_ref().map(|daemon| daemon.config.qos.clone()).unwrap_or_default())
    }

    /// Lists the options with the values in force for an image or a pool.
    pub async fn list_options(&self, target: &ConfigTarget) -> Result<Vec<ConfigOption>> {
        let config = self.default_options();
        let of_pool = self.overrides_of(&ConfigTarget::Pool(target.pool().into())).await?;
        let of_image = match target {
            ConfigTarget::Image(_) => self.overrides_of(target).await?,
            ConfigTarget::Pool(_) => BTreeMap::new(),
        };
        let sources = [(&of_image, "image"), (&of_pool, "pool"), (&*config, "config")];
        let options = rbd_options::listed(target.scope()).filter_map(|option| {
            let found =
                sources.iter().find_map(|(options, source)| Some((options.get(option.name)?.as_str(), *source)));
            let (value, source) = match found {
                None if rbd_options::is_newer(option) => return None,
                found => found.unwrap_or((option.default, "config")),
            };
            Some(ConfigOption { name: option.name.into(), value: value.into(), source: source.into() })
        });
        let compression = self.compression_option(target).await?;
        Ok(options.chain(compression).collect())
    }

    /// Returns the value that an image or a pool overrides an option with.
    ///
    /// # Errors
    /// `NotFound` if it does not.
    pub async fn get_option(&self, target: &ConfigTarget, key: &str) -> Result<ConfigValue> {
        let option = rbd_options::find(key)?;
        if option.name == COMPRESSION.name {
            return self.get_compression(target).await;
        }
        let value = self.overrides_of(target).await?.remove(option.name);
        value.map(|value| ConfigValue { value }).ok_or_else(|| not_set(key))
    }

    /// Overrides an option for an image or a pool, or ends that. Limits of volumes that this daemon serves change before
    /// it returns.
    ///
    /// # Errors
    /// `Invalid` for an unknown option or a wrong value; `NotFound` if there is no override to end.
    pub async fn change_option(&self, target: &ConfigTarget, key: &str, value: Option<String>) -> Result<()> {
        let option = rbd_options::find(key)?;
        if let Some(value) = &value {
            option.check(value, target.scope())?;
        }
        if option.name == COMPRESSION.name {
            return self.change_compression(target, value.as_deref()).await;
        }
        let backend = self.pool(target.pool()).await?;
        let images = Images::of(&backend);
        let (stored, bytes) = (option.metadata_key(), value.clone().map(String::into_bytes));
        let changed = match target {
            ConfigTarget::Image(spec) => images.change_image_metadata(&spec.image, &stored, bytes).await,
            ConfigTarget::Pool(_) => images.change_pool_metadata(&stored, bytes).await,
        };
        if !changed.map_err(|error| self.target_failure(error, target))? {
            return Err(not_set(key));
        }
        backend.flush().await.map_err(|error| self.target_failure(error, target))?;
        let value = value.as_deref();
        match target {
            ConfigTarget::Image(spec) => {
                tracing::info!(image = %spec, option = key, value, "an option of an image was changed");
                self.reload_limits_of(|open| open == spec).await;
            }
            ConfigTarget::Pool(pool) => {
                tracing::info!(pool, option = key, value, "an option of a pool was changed");
                self.reload_limits_of(|open| open.pool == *pool).await;
            }
        }
        Ok(())
    }

    async fn overrides_of(&self, target: &ConfigTarget) -> Result<BTreeMap<String, String>> {
        let images = Images::of(&self.pool(target.pool()).await?);
        let metadata = async {
            match target {
                ConfigTarget::Image(spec) => {
                    let mut found = images.image_metadata(&spec.image, METADATA_PREFIX).await?;
                    found.extend(images.image_metadata(&spec.image, OWN_BLOCKS_KEY).await?);
                    Ok(found)
                }
                ConfigTarget::Pool(_) => images.pool_metadata(METADATA_PREFIX).await,
            }
        };
        let metadata: forebay_block::Result<_> = metadata.await;
        metadata.map(overrides).map_err(|error| self.target_failure(error, target))
    }

    /// Reads the limits of open volumes again.
    async fn reload_limits_of(&self, is_concerned: impl Fn(&ImageSpec) -> bool) {
        for spec in self.volumes.open_specs().into_iter().filter(|spec| is_concerned(spec)) {
            if let Some(volume) = self.volumes.find(&spec) {
                volume.reload_limits().await;
            }
            yield_now().await;
        }
    }

    pub(super) fn target_failure(&self, error: forebay_block::Error, target: &ConfigTarget) -> Failure {
        match target {
            ConfigTarget::Image(spec) => self.image_failure(error, spec),
            ConfigTarget::Pool(pool) => self.pool_failure(error, pool),
        }
    }
}

pub(super) fn not_set(key: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("{key} is not set"))
        .hint("'forebay config' has ls, which shows the values in force")
}
