//! Operations on overridden options.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink, image_path};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, uri_encode};

/// Image or pool that overrides options.
#[derive(Debug, Clone)]
pub enum ConfigTarget {
    /// An image.
    Image(ImageSpec),
    /// All images of a pool.
    Pool(String),
}

impl ConfigTarget {
    fn path(&self) -> String {
        match self {
            ConfigTarget::Image(spec) => image_path(spec) + "/config",
            ConfigTarget::Pool(pool) => format!("/v1/config/{}", uri_encode(pool, false)),
        }
    }

    fn option_path(&self, key: &str) -> String {
        format!("{}/{}", self.path(), uri_encode(key, false))
    }
}

/// Lists the options with the values in force.
pub struct ListOptions(pub ConfigTarget);

impl Operation for ListOptions {
    type Reply = Vec<api::ConfigOption>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", self.0.path())
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_options(&self.0).await
    }
}

/// Returns the value that an option is overridden with.
pub struct GetOption {
    /// Image or pool.
    pub target: ConfigTarget,
    /// Name of the option.
    pub key: String,
}

impl Operation for GetOption {
    type Reply = api::ConfigValue;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", self.target.option_path(&self.key))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.get_option(&self.target, &self.key).await
    }
}

/// Overrides an option, or ends that.
pub struct ChangeOption {
    /// Image or pool.
    pub target: ConfigTarget,
    /// Name of the option.
    pub key: String,
    /// Value; `None` to end the override.
    pub value: Option<String>,
}

impl Operation for ChangeOption {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let path = self.target.option_path(&self.key);
        match &self.value {
            Some(value) => HttpRoute::new("PUT", path).json(&api::ConfigValue { value: value.clone() }),
            None => HttpRoute::new("DELETE", path),
        }
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.change_option(&self.target, &self.key, self.value).await
    }
}
