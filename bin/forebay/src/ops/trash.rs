//! Operations on the trash.

use std::rc::Rc;

use super::{HttpRoute, Operation, ProgressSink};
use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, TrashSpec, uri_encode};
use crate::timestamp::Timestamp;

fn trash_path(pool: &str) -> String {
    format!("/v1/trash/{}", uri_encode(pool, false))
}

fn trashed_path(spec: &TrashSpec) -> String {
    format!("{}/{}", trash_path(&spec.pool), uri_encode(&spec.id, false))
}

/// Moves an image to the trash.
pub struct MoveToTrash {
    /// Image to move.
    pub spec: ImageSpec,
    /// Time up to which it is only removed by force; `None` for now.
    pub expires_at: Option<Timestamp>,
}

impl Operation for MoveToTrash {
    type Reply = api::TrashListing;

    fn route(&self) -> HttpRoute {
        let request = api::MoveToTrashRequest { image: self.spec.image.clone(), expires_at: self.expires_at };
        HttpRoute::new("POST", trash_path(&self.spec.pool)).json(&request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.move_to_trash(&self.spec, self.expires_at).await
    }
}

/// Lists the images in the trash of a pool.
pub struct ListTrash {
    /// Pool name.
    pub pool: String,
    /// Set to include those of mirroring and migrations.
    pub all: bool,
}

impl Operation for ListTrash {
    type Reply = Vec<api::TrashListing>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", format!("{}?all={}", trash_path(&self.pool), self.all))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_trash(&self.pool, self.all).await
    }
}

/// Restores an image from the trash.
pub struct RestoreFromTrash {
    /// Image to restore.
    pub spec: TrashSpec,
    /// New name; `None` for the former one.
    pub name: Option<String>,
}

impl Operation for RestoreFromTrash {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        let request = api::RestoreRequest { name: self.name.clone() };
        HttpRoute::new("POST", trashed_path(&self.spec) + "/restore").json(&request)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.restore_from_trash(&self.spec, self.name.as_deref()).await
    }
}

/// Removes an image in the trash and its data.
pub struct RemoveFromTrash {
    /// Image to remove.
    pub spec: TrashSpec,
    /// Set to remove it before its time.
    pub force: bool,
}

impl Operation for RemoveFromTrash {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", format!("{}?force={}", trashed_path(&self.spec), self.force))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.remove_from_trash(&self.spec, self.force, progress).await
    }
}

/// Removes the expired images in the trash of a pool; returns their ids.
pub struct PurgeTrash {
    /// Pool name.
    pub pool: String,
    /// Time at which those to be removed must have expired; `None` for now.
    pub expired_before: Option<Timestamp>,
}

impl Operation for PurgeTrash {
    type Reply = Vec<String>;

    fn route(&self) -> HttpRoute {
        let query = self.expired_before.map(|time| format!("?expired_before={time}")).unwrap_or_default();
        HttpRoute::new("DELETE", trash_path(&self.pool) + &query)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<Self::Reply> {
        engine.purge_trash(&self.pool, self.expired_before, progress).await
    }
}
