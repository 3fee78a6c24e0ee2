//! HTTP handlers for the management of images: metadata, locks, features, object maps.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use serde::Deserialize;

use super::control::{App, Streamed, on_image, parse};
use crate::api::{self, ErrorBody};
use crate::ops;
use crate::spec::source_spec;

/// Returns the routes.
pub fn routes() -> Router<App> {
    let image = "/v1/images/{pool}/{image}";
    Router::new()
        .route(&format!("{image}/metadata"), get(list_metadata))
        .route(&format!("{image}/metadata/{{key}}"), get(get_metadata).put(set_metadata).delete(remove_metadata))
        .route(&format!("{image}/locks"), get(list_locks).post(add_lock))
        .route(&format!("{image}/locks/{{id}}"), delete(remove_lock))
        .route(&format!("{image}/features"), patch(update_features))
        .route(&format!("{image}/sparsify"), post(sparsify))
        .route(&format!("{image}/object-map/check"), post(check_object_map))
        .route(&format!("{image}/object-map/rebuild"), post(rebuild_object_map))
}

/// List the metadata of an image, by key
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/metadata",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = std::collections::BTreeMap<String, String>), (status = 404, body = ErrorBody)))]
pub async fn list_metadata(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::ListMetadata(spec))).await
}

/// Show a metadata value of an image
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/metadata/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)),
    responses((status = 200, body = api::MetadataValue), (status = 404, body = ErrorBody)))]
pub async fn get_metadata(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<(String, String, String)>,
) -> Response {
    on_image((pool, image), |spec| app.run(streamed, ops::GetMetadata { spec, key })).await
}

/// Set a metadata value of an image
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/metadata/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)),
    request_body = api::MetadataValue,
    responses((status = 200), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn set_metadata(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<(String, String, String)>,
    body: Bytes,
) -> Response {
    match parse::<api::MetadataValue>(&body) {
        Ok(api::MetadataValue { value }) => {
            let value = Some(value);
            on_image((pool, image), |spec| app.run(streamed, ops::SetMetadata { spec, key, value })).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Remove a metadata value of an image
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/metadata/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)),
    responses((status = 200), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn remove_metadata(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<(String, String, String)>,
) -> Response {
    on_image((pool, image), |spec| app.run(streamed, ops::SetMetadata { spec, key, value: None })).await
}

/// List the locks on an image
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/locks",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = api::LockListing), (status = 404, body = ErrorBody), (status = 501, body = ErrorBody)))]
pub async fn list_locks(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::ListLocks(spec))).await
}

/// Lock an image by hand, in the name of the daemon
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/locks",
    params(("pool" = String, Path), ("image" = String, Path)), request_body = api::AddLockRequest,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn add_lock(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(request) => on_image(names, |spec| app.run(streamed, ops::AddLock { spec, request })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for breaking a lock.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockerQuery {
    /// Holder of the lock, as `client.N`.
    locker: String,
}

/// Break a lock on an image, and fence its holder
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/locks/{id}",
    params(("pool" = String, Path), ("image" = String, Path), ("id" = String, Path), ("locker" = String, Query)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_lock(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, id)): Path<(String, String, String)>,
    Query(LockerQuery { locker }): Query<LockerQuery>,
) -> Response {
    on_image((pool, image), |spec| app.run(streamed, ops::RemoveLock { spec, id, locker })).await
}

/// Enable or disable features of an image, while it is in use too
#[utoipa::path(patch, path = "/v1/images/{pool}/{image}/features",
    params(("pool" = String, Path), ("image" = String, Path)), request_body = api::UpdateFeaturesRequest,
    responses((status = 200, body = api::ImageInfo), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn update_features(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(request) => on_image(names, |spec| app.run(streamed, ops::UpdateFeatures { spec, request })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for the object map of an image or of one of its snapshots.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotQuery {
    /// Snapshot; the image as it is now if omitted.
    snapshot: Option<String>,
}

/// Compare the object map of an image or snapshot with the objects, and mark it as invalid if it is wrong
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/object-map/check",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query)),
    responses((status = 200, body = api::ObjectMapCheck), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn check_object_map(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    Query(SnapshotQuery { snapshot }): Query<SnapshotQuery>,
) -> Response {
    match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => app.run(streamed, ops::CheckObjectMap(source)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Rebuild the object map of an image or snapshot from the objects
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/object-map/rebuild",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query)),
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn rebuild_object_map(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    Query(SnapshotQuery { snapshot }): Query<SnapshotQuery>,
) -> Response {
    match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => app.run(streamed, ops::RebuildObjectMap(source)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Free the space of zeroes that an image stores
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/sparsify",
    params(("pool" = String, Path), ("image" = String, Path)),
    request_body = api::SparsifyRequest,
    responses((status = 200), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn sparsify(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(request) => on_image(names, |spec| app.run(streamed, ops::Sparsify { spec, request })).await,
        Err(failure) => failure.into_response(),
    }
}
