//! Operations on write logs.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::engine::replicas::TakeoverRequest;
use crate::failure::Result;
use crate::spec::{ImageSpec, uri_encode};

/// Lists the write logs.
pub struct ListLogs;

impl Operation for ListLogs {
    type Reply = Vec<api::WriteLogInfo>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/logs")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_logs().await
    }
}

/// Returns the write log of an image.
pub struct GetLog(pub ImageSpec);

impl Operation for GetLog {
    type Reply = api::WriteLogInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", log_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.log_info(&self.0).await
    }
}

/// Writes back all dirty data of an image's write log.
pub struct FlushLog(pub ImageSpec);

impl Operation for FlushLog {
    type Reply = api::WriteLogInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", log_path(&self.0) + "/flush")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.flush_log(&self.0).await
    }
}

/// Takes over the write log of an image, of which this daemon has a copy.
pub struct TakeOverLog {
    /// Image of the log.
    pub spec: ImageSpec,
    /// Set to write the log back, and close it again.
    pub flush_only: bool,
    /// Set to take over from a primary that is alive, which is fenced.
    pub force: bool,
}

impl Operation for TakeOverLog {
    type Reply = api::WriteLogInfo;

    fn route(&self) -> HttpRoute {
        let query = format!("?flush_only={}&force={}", self.flush_only, self.force);
        HttpRoute::new("POST", log_path(&self.spec) + "/takeover" + &query)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        let request = TakeoverRequest { flush_only: self.flush_only, force: self.force, silent: None };
        engine.take_over_log(&self.spec, request).await
    }
}

/// Discards the write log of an image.
pub struct DiscardLog {
    /// Image of the log.
    pub spec: ImageSpec,
    /// Set to discard dirty data, too.
    pub force: bool,
}

impl Operation for DiscardLog {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", format!("{}?force={}", log_path(&self.spec), self.force))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.discard_log(&self.spec, self.force).await
    }
}

fn log_path(spec: &ImageSpec) -> String {
    format!("/v1/logs/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}
