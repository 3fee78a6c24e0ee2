//! HTTP handlers for clones.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;

use super::control::{App, Streamed, on_image, parse};
use super::snapshots::{SnapshotNames, on_snapshot};
use crate::api::{self, ErrorBody};
use crate::ops;
use crate::spec::source_spec;

/// Returns the routes.
pub fn routes() -> Router<App> {
    let image = "/v1/images/{pool}/{image}";
    Router::new()
        .route(&format!("{image}/snapshots/{{snapshot}}/clones"), post(clone_snapshot))
        .route(&format!("{image}/children"), get(list_children))
        .route(&format!("{image}/flatten"), post(flatten))
}

/// Make a clone of a snapshot
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/snapshots/{snapshot}/clones",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = String, Path)),
    request_body = api::CloneRequest,
    responses((status = 200, body = api::ImageInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn clone_snapshot(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<SnapshotNames>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(request) => on_snapshot(names, |from| app.run(streamed, ops::CloneSnapshot { from, request })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for clones.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChildrenQuery {
    /// Snapshot; all of the image's if omitted.
    snapshot: Option<String>,
    /// Set to list the clones of clones too.
    #[serde(default)]
    descendants: bool,
}

/// List the clones of an image's snapshots, or of one of them
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/children",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query),
        ("descendants" = Option<bool>, Query)),
    responses((status = 200, body = Vec<api::ImageChild>), (status = 404, body = ErrorBody)))]
pub async fn list_children(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    Query(ChildrenQuery { snapshot, descendants }): Query<ChildrenQuery>,
) -> Response {
    match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => app.run(streamed, ops::ListChildren { source, descendants }).await,
        Err(failure) => failure.into_response(),
    }
}

/// Copy the data that a clone shares with its parent into it, which makes it independent
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/flatten",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn flatten(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::Flatten(spec))).await
}
