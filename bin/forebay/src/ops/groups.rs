//! Operations on groups of images.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{GroupSnapshotSpec, GroupSpec, ImageSpec, uri_encode};

fn groups_path(pool: &str) -> String {
    format!("/v1/groups/{}", uri_encode(pool, false))
}

fn group_path(spec: &GroupSpec) -> String {
    format!("{}/{}", groups_path(&spec.pool), uri_encode(&spec.group, false))
}

fn snapshot_path(spec: &GroupSnapshotSpec) -> String {
    format!("{}/snapshots/{}", group_path(&spec.group), uri_encode(&spec.snapshot, false))
}

/// Lists the groups of a pool.
pub struct ListGroups {
    /// Pool name.
    pub pool: String,
}

impl Operation for ListGroups {
    type Reply = Vec<String>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", groups_path(&self.pool))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_groups(&self.pool).await
    }
}

/// Creates a group.
pub struct CreateGroup(pub GroupSpec);

impl Operation for CreateGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", groups_path(&self.0.pool)).json(&api::GroupName { name: self.0.group.clone() })
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.create_group(&self.0).await
    }
}

/// Renames a group.
pub struct RenameGroup {
    /// Group to rename.
    pub spec: GroupSpec,
    /// New name.
    pub name: String,
}

impl Operation for RenameGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PATCH", group_path(&self.spec)).json(&api::GroupName { name: self.name.clone() })
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.rename_group(&self.spec, &self.name).await
    }
}

/// Removes a group with its snapshots; its images stay.
pub struct RemoveGroup(pub GroupSpec);

impl Operation for RemoveGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", group_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_group(&self.0).await
    }
}

/// Lists the images of a group.
pub struct ListGroupImages(pub GroupSpec);

impl Operation for ListGroupImages {
    type Reply = Vec<api::GroupImage>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", group_path(&self.0) + "/images")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_group_images(&self.0).await
    }
}

/// Adds an image to a group.
pub struct AddToGroup {
    /// Group that gets the image.
    pub spec: GroupSpec,
    /// Image to add.
    pub image: ImageSpec,
}

impl Operation for AddToGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let request = api::AddToGroupRequest { pool: self.image.pool.clone(), image: self.image.image.clone() };
        HttpRoute::new("POST", group_path(&self.spec) + "/images").json(&request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.add_to_group(&self.spec, &self.image).await
    }
}

/// Removes an image from a group.
pub struct RemoveFromGroup {
    /// Group that has the image.
    pub spec: GroupSpec,
    /// Image to remove; one that is gone is named by its id.
    pub image: ImageSpec,
}

impl Operation for RemoveFromGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let (pool, image) = (uri_encode(&self.image.pool, false), uri_encode(&self.image.image, false));
        HttpRoute::new("DELETE", format!("{}/images/{pool}/{image}", group_path(&self.spec)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_from_group(&self.spec, &self.image).await
    }
}

/// Lists the snapshots of a group.
pub struct ListGroupSnapshots(pub GroupSpec);

impl Operation for ListGroupSnapshots {
    type Reply = Vec<api::GroupSnapshotListing>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", group_path(&self.0) + "/snapshots")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_group_snapshots(&self.0).await
    }
}

/// Creates a snapshot of a group.
pub struct CreateGroupSnapshot(pub GroupSnapshotSpec);

impl Operation for CreateGroupSnapshot {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let request = api::CreateSnapshotRequest { name: self.0.snapshot.clone() };
        HttpRoute::new("POST", group_path(&self.0.group) + "/snapshots").json(&request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.create_group_snapshot(&self.0).await
    }
}

/// Renames a snapshot of a group.
pub struct RenameGroupSnapshot {
    /// Snapshot to rename.
    pub spec: GroupSnapshotSpec,
    /// New name.
    pub name: String,
}

impl Operation for RenameGroupSnapshot {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PATCH", snapshot_path(&self.spec)).json(&api::CreateSnapshotRequest { name: self.name.clone() })
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.rename_group_snapshot(&self.spec, &self.name).await
    }
}

/// Removes a snapshot of a group.
pub struct RemoveGroupSnapshot(pub GroupSnapshotSpec);

impl Operation for RemoveGroupSnapshot {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", snapshot_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_group_snapshot(&self.0).await
    }
}

/// Rolls the images of a group back to a snapshot of it.
pub struct RollBackGroup(pub GroupSnapshotSpec);

impl Operation for RollBackGroup {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", snapshot_path(&self.0) + "/rollback")
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.roll_back_group(&self.0, progress).await
    }
}
