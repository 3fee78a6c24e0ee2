//! HTTP handlers for snapshots.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post, put};
use serde::Deserialize;

use super::control::{App, Streamed, on_image, parse};
use crate::api::{self, ErrorBody};
use crate::failure::Failure;
use crate::ops;
use crate::spec::{SnapshotSpec, snapshot_spec};

/// Names of a pool, an image and a snapshot.
pub type SnapshotNames = (String, String, String);

/// Returns the routes.
pub fn routes() -> Router<App> {
    let image = "/v1/images/{pool}/{image}";
    Router::new()
        .route(&format!("{image}/snapshots"), get(list_snapshots).post(create_snapshot).delete(purge_snapshots))
        .route(&format!("{image}/snapshots/{{snapshot}}"), patch(update_snapshot).delete(remove_snapshot))
        .route(&format!("{image}/snapshots/{{snapshot}}/rollback"), post(roll_back))
        .route(&format!("{image}/snapshot-ids/{{id}}"), delete(remove_snapshot_by_id))
        .route(&format!("{image}/snapshot-limit"), put(set_snapshot_limit).delete(clear_snapshot_limit))
}

pub async fn on_snapshot<Fut>(names: SnapshotNames, then: impl FnOnce(SnapshotSpec) -> Fut) -> Response
where
    Fut: Future<Output = Response>,
{
    match snapshot_spec(&names.0, &names.1, &names.2) {
        Ok(spec) => then(spec).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for a list of snapshots.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// Set to include the snapshots of groups, of mirroring and in the trash.
    #[serde(default)]
    all: bool,
}

/// List the snapshots of an image, oldest first
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/snapshots",
    params(("pool" = String, Path), ("image" = String, Path), ("all" = Option<bool>, Query)),
    responses((status = 200, body = Vec<api::ImageSnapshot>), (status = 404, body = ErrorBody)))]
pub async fn list_snapshots(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    Query(ListQuery { all }): Query<ListQuery>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::ListSnapshots { spec, all })).await
}

/// Create a snapshot
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/snapshots",
    params(("pool" = String, Path), ("image" = String, Path)), request_body = api::CreateSnapshotRequest,
    responses((status = 200, body = api::ImageSnapshot), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub async fn create_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse::<api::CreateSnapshotRequest>(&body) {
        Ok(request) => {
            on_snapshot((pool, image, request.name), |spec| app.run(streamed, ops::CreateSnapshot(spec))).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Remove all snapshots of an image that are not protected; fails at the end if protected ones are left
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/snapshots",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = Vec<String>), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn purge_snapshots(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::PurgeSnapshots(spec))).await
}

/// Rename a snapshot, or change its protection against removal
#[utoipa::path(patch, path = "/v1/images/{pool}/{image}/snapshots/{snapshot}",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = String, Path)),
    request_body = api::UpdateSnapshotRequest,
    responses((status = 200, body = api::ImageSnapshot), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn update_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<SnapshotNames>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(update) => on_snapshot(names, |spec| app.run(streamed, ops::UpdateSnapshot { spec, update })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for removing a snapshot.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveQuery {
    /// Set to flatten its clones and to end its protection first.
    #[serde(default)]
    force: bool,
}

/// Remove a snapshot
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/snapshots/{snapshot}",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = String, Path), ("force" = Option<bool>, Query)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<SnapshotNames>,
    Query(RemoveQuery { force }): Query<RemoveQuery>,
) -> Response {
    on_snapshot(names, |spec| app.run(streamed, ops::RemoveSnapshot { spec, force })).await
}

/// Remove the snapshot of a number, also one in the trash that has no clones
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/snapshot-ids/{id}",
    params(("pool" = String, Path), ("image" = String, Path), ("id" = u64, Path)),
    responses((status = 200, body = SnapshotSpec), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_snapshot_by_id(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, id)): Path<(String, String, u64)>,
) -> Response {
    on_image((pool, image), |spec| app.run(streamed, ops::RemoveSnapshotById { spec, id })).await
}

/// Roll an image that is not exported back to a snapshot
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/snapshots/{snapshot}/rollback",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn roll_back(State(app): State<App>, streamed: Streamed, Path(names): Path<SnapshotNames>) -> Response {
    on_snapshot(names, |spec| app.run(streamed, ops::RollBack(spec))).await
}

/// Limit the number of an image's snapshots
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/snapshot-limit",
    params(("pool" = String, Path), ("image" = String, Path)), request_body = api::SnapshotLimitRequest,
    responses((status = 200), (status = 404, body = ErrorBody)))]
pub async fn set_snapshot_limit(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let request: Result<api::SnapshotLimitRequest, Failure> = parse(&body);
    match request.map(|request| Some(request.limit)) {
        Ok(limit) => on_image(names, |spec| app.run(streamed, ops::SetSnapshotLimit { spec, limit })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove the limit on the number of an image's snapshots
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/snapshot-limit",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody)))]
pub async fn clear_snapshot_limit(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::SetSnapshotLimit { spec, limit: None })).await
}
