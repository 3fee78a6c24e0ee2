//! Operations on the read cache.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;

const PATH: &str = "/v1/read-cache";

/// Returns the state of the read cache.
pub struct GetReadCache;

impl Operation for GetReadCache {
    type Reply = api::ReadCacheInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", PATH)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.read_cache_info()
    }
}

/// Empties the read cache.
pub struct ClearReadCache;

impl Operation for ClearReadCache {
    type Reply = api::ReadCacheInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", PATH)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.clear_read_cache().await
    }
}
