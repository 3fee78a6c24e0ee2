//! Operations on images mapped to block devices.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, uri_encode};

const PATH: &str = "/v1/mappings";

/// Maps an image.
pub struct MapImage(pub api::MapRequest);

impl Operation for MapImage {
    type Reply = api::MappedImage;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", PATH).json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.map(self.0).await
    }
}

/// Lists the mapped images.
pub struct ListMapped;

impl Operation for ListMapped {
    type Reply = Vec<api::MappedImage>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", PATH)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_mapped().await
    }
}

/// Mapped image, by its name or its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MappedTarget {
    /// An image.
    Image(ImageSpec),
    /// Path of a device.
    Device(String),
}

/// Unmaps an image.
pub struct UnmapImage {
    /// The image or its device.
    pub target: MappedTarget,
    /// Set to end a device that is in use or not connected.
    pub force: bool,
}

impl Operation for UnmapImage {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let which = match &self.target {
            MappedTarget::Image(spec) => {
                format!("pool={}&image={}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
            }
            MappedTarget::Device(device) => format!("device={}", uri_encode(device, false)),
        };
        HttpRoute::new("DELETE", format!("{PATH}?{which}&force={}", self.force))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        let spec = match self.target {
            MappedTarget::Image(spec) => spec,
            MappedTarget::Device(device) => engine.mapped_to(&device)?,
        };
        engine.unmap(&spec, self.force).await
    }
}
