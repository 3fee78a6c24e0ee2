//! HTTP handlers for groups of images.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::ops::{self, Operation};
use crate::spec::{GroupSnapshotSpec, GroupSpec, group_snapshot_spec, group_spec, image_spec};

/// Names of a pool and a group.
type GroupNames = (String, String);
/// Names of a pool, a group and a snapshot.
type SnapshotNames = (String, String, String);

/// Returns the routes.
pub fn routes() -> Router<App> {
    let group = "/v1/groups/{pool}/{group}";
    Router::new()
        .route("/v1/groups/{pool}", get(list_groups).post(create_group))
        .route(group, patch(rename_group).delete(remove_group))
        .route(&format!("{group}/images"), get(list_group_images).post(add_to_group))
        .route(&format!("{group}/images/{{image_pool}}/{{image}}"), delete(remove_from_group))
        .route(&format!("{group}/snapshots"), get(list_group_snapshots).post(create_group_snapshot))
        .route(&format!("{group}/snapshots/{{snapshot}}"), patch(rename_group_snapshot).delete(remove_group_snapshot))
        .route(&format!("{group}/snapshots/{{snapshot}}/rollback"), post(roll_back_group))
}

/// Runs the operation that `make` makes of a group.
async fn on_group<O: Operation>(
    app: App,
    streamed: Streamed,
    (pool, group): GroupNames,
    make: impl FnOnce(GroupSpec) -> crate::failure::Result<O>,
) -> Response {
    match group_spec(&pool, &group).and_then(make) {
        Ok(operation) => app.run(streamed, operation).await,
        Err(failure) => failure.into_response(),
    }
}

/// Runs the operation that `make` makes of a snapshot of a group.
async fn on_snapshot<O: Operation>(
    app: App,
    streamed: Streamed,
    (pool, group, snapshot): SnapshotNames,
    make: impl FnOnce(GroupSnapshotSpec) -> crate::failure::Result<O>,
) -> Response {
    match group_snapshot_spec(&pool, &group, &snapshot).and_then(make) {
        Ok(operation) => app.run(streamed, operation).await,
        Err(failure) => failure.into_response(),
    }
}

/// List the names of a pool's groups
#[utoipa::path(get, path = "/v1/groups/{pool}", params(("pool" = String, Path)),
    responses((status = 200, body = Vec<String>), (status = 404, body = ErrorBody)))]
pub async fn list_groups(State(app): State<App>, streamed: Streamed, Path(pool): Path<String>) -> Response {
    app.run(streamed, ops::ListGroups { pool }).await
}

/// Create a group without images
#[utoipa::path(post, path = "/v1/groups/{pool}", params(("pool" = String, Path)), request_body = api::GroupName,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn create_group(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    body: Bytes,
) -> Response {
    match parse::<api::GroupName>(&body) {
        Ok(api::GroupName { name }) => on_group(app, streamed, (pool, name), |spec| Ok(ops::CreateGroup(spec))).await,
        Err(failure) => failure.into_response(),
    }
}

/// Rename a group
#[utoipa::path(patch, path = "/v1/groups/{pool}/{group}", params(("pool" = String, Path), ("group" = String, Path)),
    request_body = api::GroupName,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn rename_group(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<GroupNames>,
    body: Bytes,
) -> Response {
    let make = |spec| Ok(ops::RenameGroup { spec, name: parse::<api::GroupName>(&body)?.name });
    on_group(app, streamed, names, make).await
}

/// Remove a group with its snapshots; its images stay
#[utoipa::path(delete, path = "/v1/groups/{pool}/{group}", params(("pool" = String, Path), ("group" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_group(State(app): State<App>, streamed: Streamed, Path(names): Path<GroupNames>) -> Response {
    on_group(app, streamed, names, |spec| Ok(ops::RemoveGroup(spec))).await
}

/// List the images of a group
#[utoipa::path(get, path = "/v1/groups/{pool}/{group}/images", params(("pool" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = Vec<api::GroupImage>), (status = 404, body = ErrorBody)))]
pub async fn list_group_images(State(app): State<App>, streamed: Streamed, Path(names): Path<GroupNames>) -> Response {
    on_group(app, streamed, names, |spec| Ok(ops::ListGroupImages(spec))).await
}

/// Add an image to a group
#[utoipa::path(post, path = "/v1/groups/{pool}/{group}/images",
    params(("pool" = String, Path), ("group" = String, Path)), request_body = api::AddToGroupRequest,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn add_to_group(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<GroupNames>,
    body: Bytes,
) -> Response {
    let make = |spec| {
        let api::AddToGroupRequest { pool, image } = parse(&body)?;
        Ok(ops::AddToGroup { spec, image: image_spec(&pool, &image)? })
    };
    on_group(app, streamed, names, make).await
}

/// Remove an image from a group; one that is gone is named by its id
#[utoipa::path(delete, path = "/v1/groups/{pool}/{group}/images/{image_pool}/{image}",
    params(("pool" = String, Path), ("group" = String, Path), ("image_pool" = String, Path), ("image" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody)))]
pub async fn remove_from_group(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, group, image_pool, image)): Path<(String, String, String, String)>,
) -> Response {
    let make = |spec| Ok(ops::RemoveFromGroup { spec, image: image_spec(&image_pool, &image)? });
    on_group(app, streamed, (pool, group), make).await
}

/// List the snapshots of a group
#[utoipa::path(get, path = "/v1/groups/{pool}/{group}/snapshots",
    params(("pool" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = Vec<api::GroupSnapshotListing>), (status = 404, body = ErrorBody)))]
pub async fn list_group_snapshots(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<GroupNames>,
) -> Response {
    on_group(app, streamed, names, |spec| Ok(ops::ListGroupSnapshots(spec))).await
}

/// Create a snapshot of all images of a group at one moment
#[utoipa::path(post, path = "/v1/groups/{pool}/{group}/snapshots",
    params(("pool" = String, Path), ("group" = String, Path)), request_body = api::CreateSnapshotRequest,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub async fn create_group_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, group)): Path<GroupNames>,
    body: Bytes,
) -> Response {
    match parse::<api::CreateSnapshotRequest>(&body) {
        Ok(api::CreateSnapshotRequest { name }) => {
            on_snapshot(app, streamed, (pool, group, name), |spec| Ok(ops::CreateGroupSnapshot(spec))).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Rename a snapshot of a group
#[utoipa::path(patch, path = "/v1/groups/{pool}/{group}/snapshots/{snapshot}",
    params(("pool" = String, Path), ("group" = String, Path), ("snapshot" = String, Path)),
    request_body = api::CreateSnapshotRequest,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn rename_group_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<SnapshotNames>,
    body: Bytes,
) -> Response {
    let make = |spec| Ok(ops::RenameGroupSnapshot { spec, name: parse::<api::CreateSnapshotRequest>(&body)?.name });
    on_snapshot(app, streamed, names, make).await
}

/// Remove a snapshot of a group from all images
#[utoipa::path(delete, path = "/v1/groups/{pool}/{group}/snapshots/{snapshot}",
    params(("pool" = String, Path), ("group" = String, Path), ("snapshot" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_group_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<SnapshotNames>,
) -> Response {
    on_snapshot(app, streamed, names, |spec| Ok(ops::RemoveGroupSnapshot(spec))).await
}

/// Roll the images of a group, none of which may be exported, back to a snapshot
#[utoipa::path(post, path = "/v1/groups/{pool}/{group}/snapshots/{snapshot}/rollback",
    params(("pool" = String, Path), ("group" = String, Path), ("snapshot" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn roll_back_group(State(app): State<App>, streamed: Streamed, Path(names): Path<SnapshotNames>) -> Response {
    on_snapshot(app, streamed, names, |spec| Ok(ops::RollBackGroup(spec))).await
}
