//! HTTP handlers for the trash.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde::Deserialize;

use super::control::{App, Streamed, on_image, parse};
use crate::api::{self, ErrorBody};
use crate::failure::Failure;
use crate::ops;
use crate::spec::trash_spec;
use crate::timestamp::Timestamp;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/trash/{pool}", get(list_trash).post(move_to_trash).delete(purge_trash))
        .route("/v1/trash/{pool}/{id}", delete(remove_from_trash))
        .route("/v1/trash/{pool}/{id}/restore", post(restore_from_trash))
}

/// Query for a list of the trash.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrashListQuery {
    /// Set to include the images of mirroring and migrations.
    #[serde(default)]
    all: bool,
}

/// List the images in the trash of a pool
#[utoipa::path(get, path = "/v1/trash/{pool}", params(("pool" = String, Path), ("all" = Option<bool>, Query)),
    responses((status = 200, body = Vec<api::TrashListing>), (status = 404, body = ErrorBody)))]
pub async fn list_trash(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    Query(TrashListQuery { all }): Query<TrashListQuery>,
) -> Response {
    app.run(streamed, ops::ListTrash { pool, all }).await
}

/// Move an image that is not in use to the trash
#[utoipa::path(post, path = "/v1/trash/{pool}", params(("pool" = String, Path)),
    request_body = api::MoveToTrashRequest,
    responses((status = 200, body = api::TrashListing), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn move_to_trash(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    body: Bytes,
) -> Response {
    match parse::<api::MoveToTrashRequest>(&body) {
        Ok(api::MoveToTrashRequest { image, expires_at }) => {
            on_image((pool, image), |spec| app.run(streamed, ops::MoveToTrash { spec, expires_at })).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Query for removing expired images.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PurgeQuery {
    /// Time at which those to be removed must have expired; now if omitted.
    expired_before: Option<Timestamp>,
}

/// Remove the expired images in the trash of a pool; fails at the end if some cannot be removed
#[utoipa::path(delete, path = "/v1/trash/{pool}",
    params(("pool" = String, Path), ("expired_before" = Option<String>, Query)),
    responses((status = 200, body = Vec<String>), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn purge_trash(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    Query(PurgeQuery { expired_before }): Query<PurgeQuery>,
) -> Response {
    app.run(streamed, ops::PurgeTrash { pool, expired_before }).await
}

/// Query for removing an image from the trash.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrashRemoveQuery {
    /// Set to remove it before its time.
    #[serde(default)]
    force: bool,
}

/// Remove an image in the trash and its data
#[utoipa::path(delete, path = "/v1/trash/{pool}/{id}",
    params(("pool" = String, Path), ("id" = String, Path), ("force" = Option<bool>, Query)),
    responses((status = 200), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
pub async fn remove_from_trash(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, id)): Path<(String, String)>,
    Query(TrashRemoveQuery { force }): Query<TrashRemoveQuery>,
) -> Response {
    match trash_spec(&pool, &id) {
        Ok(spec) => app.run(streamed, ops::RemoveFromTrash { spec, force }).await,
        Err(failure) => failure.into_response(),
    }
}

/// Restore an image from the trash
#[utoipa::path(post, path = "/v1/trash/{pool}/{id}/restore", params(("pool" = String, Path), ("id" = String, Path)),
    request_body = api::RestoreRequest,
    responses((status = 200, body = api::ImageInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn restore_from_trash(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, id)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let request: Result<api::RestoreRequest, Failure> =
        if body.is_empty() { Ok(api::RestoreRequest::default()) } else { parse(&body) };
    match request.and_then(|request| Ok((trash_spec(&pool, &id)?, request.name))) {
        Ok((spec, name)) => app.run(streamed, ops::RestoreFromTrash { spec, name }).await,
        Err(failure) => failure.into_response(),
    }
}
