//! Operations on clones.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink, image_path};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec, uri_encode};

/// Makes a clone of a snapshot; returns the size and layout of the new image.
pub struct CloneSnapshot {
    /// Snapshot to clone.
    pub from: SnapshotSpec,
    /// New image.
    pub request: api::CloneRequest,
}

impl Operation for CloneSnapshot {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        let snapshot = uri_encode(&self.from.snapshot, false);
        let path = format!("{}/snapshots/{snapshot}/clones", image_path(&self.from.image));
        HttpRoute::new("POST", path).json(&self.request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.clone_snapshot(&self.from, self.request).await
    }
}

/// Lists the clones of an image's snapshots, or of one of them.
pub struct ListChildren {
    /// Image or snapshot.
    pub source: SourceSpec,
    /// Set to list the clones of clones too.
    pub descendants: bool,
}

impl Operation for ListChildren {
    type Reply = Vec<api::ImageChild>;

    fn route(&self) -> HttpRoute {
        let snapshot = self.source.snapshot.as_ref();
        let snapshot = snapshot.map_or_else(String::new, |name| format!("&snapshot={}", uri_encode(name, false)));
        let path = image_path(&self.source.image);
        HttpRoute::new("GET", format!("{path}/children?descendants={}{snapshot}", self.descendants))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_children(&self.source, self.descendants).await
    }
}

/// Makes a clone independent of its parent.
pub struct Flatten(pub ImageSpec);

impl Operation for Flatten {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", image_path(&self.0) + "/flatten")
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.flatten(&self.0, progress).await
    }
}
