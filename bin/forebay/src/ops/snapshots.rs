//! Operations on snapshots.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink, image_path};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, SnapshotSpec, uri_encode};

fn snapshots_path(spec: &ImageSpec) -> String {
    image_path(spec) + "/snapshots"
}

fn snapshot_path(spec: &SnapshotSpec) -> String {
    format!("{}/{}", snapshots_path(&spec.image), uri_encode(&spec.snapshot, false))
}

/// Lists the snapshots of an image.
pub struct ListSnapshots {
    /// Image of the snapshots.
    pub spec: ImageSpec,
    /// Set to include those of groups, of mirroring and in the trash.
    pub all: bool,
}

impl Operation for ListSnapshots {
    type Reply = Vec<api::ImageSnapshot>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", format!("{}?all={}", snapshots_path(&self.spec), self.all))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_snapshots(&self.spec, self.all).await
    }
}

/// Creates a snapshot.
pub struct CreateSnapshot(pub SnapshotSpec);

impl Operation for CreateSnapshot {
    type Reply = api::ImageSnapshot;

    fn route(&self) -> HttpRoute {
        let request = api::CreateSnapshotRequest { name: self.0.snapshot.clone() };
        HttpRoute::new("POST", snapshots_path(&self.0.image)).json(&request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.create_snapshot(&self.0).await
    }
}

/// Renames a snapshot, or changes its protection.
pub struct UpdateSnapshot {
    /// Snapshot to change.
    pub spec: SnapshotSpec,
    /// Requested change.
    pub update: api::UpdateSnapshotRequest,
}

impl Operation for UpdateSnapshot {
    type Reply = api::ImageSnapshot;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PATCH", snapshot_path(&self.spec)).json(&self.update)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.update_snapshot(&self.spec, self.update).await
    }
}

/// Removes a snapshot.
pub struct RemoveSnapshot {
    /// Snapshot to remove.
    pub spec: SnapshotSpec,
    /// Set to end its protection first.
    pub force: bool,
}

impl Operation for RemoveSnapshot {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", format!("{}?force={}", snapshot_path(&self.spec), self.force))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.remove_snapshot(&self.spec, self.force, progress).await
    }
}

/// Removes the snapshot of a number; returns its name.
pub struct RemoveSnapshotById {
    /// Image of the snapshot.
    pub spec: ImageSpec,
    /// Number of the snapshot.
    pub id: u64,
}

impl Operation for RemoveSnapshotById {
    type Reply = SnapshotSpec;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", format!("{}/snapshot-ids/{}", image_path(&self.spec), self.id))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.remove_snapshot_by_id(&self.spec, self.id).await
    }
}

/// Removes the snapshots of an image that are not protected; returns their names.
pub struct PurgeSnapshots(pub ImageSpec);

impl Operation for PurgeSnapshots {
    type Reply = Vec<String>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", snapshots_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.purge_snapshots(&self.0, progress).await
    }
}

/// Rolls an image back to a snapshot.
pub struct RollBack(pub SnapshotSpec);

impl Operation for RollBack {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", snapshot_path(&self.0) + "/rollback")
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.roll_back(&self.0, progress).await
    }
}

/// Sets or removes the limit on the number of an image's snapshots.
pub struct SetSnapshotLimit {
    /// Image to limit.
    pub spec: ImageSpec,
    /// Maximum number of snapshots; `None` to remove the limit.
    pub limit: Option<u64>,
}

impl Operation for SetSnapshotLimit {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let path = image_path(&self.spec) + "/snapshot-limit";
        match self.limit {
            Some(limit) => HttpRoute::new("PUT", path).json(&api::SnapshotLimitRequest { limit }),
            None => HttpRoute::new("DELETE", path),
        }
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.set_snapshot_limit(&self.spec, self.limit).await
    }
}
