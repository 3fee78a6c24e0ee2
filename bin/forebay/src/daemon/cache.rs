//! HTTP handlers for the read cache.

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;

use super::control::{App, Streamed};
use crate::api::{self, ErrorBody};
use crate::ops;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new().route("/v1/read-cache", get(get_read_cache).delete(clear_read_cache))
}

/// Show the state of the read cache of snapshot parents
#[utoipa::path(get, path = "/v1/read-cache",
    responses((status = 200, body = api::ReadCacheInfo), (status = 404, body = ErrorBody)))]
pub async fn get_read_cache(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetReadCache).await
}

/// Empty the read cache, in memory and on disk
#[utoipa::path(delete, path = "/v1/read-cache",
    responses((status = 200, body = api::ReadCacheInfo), (status = 404, body = ErrorBody)))]
pub async fn clear_read_cache(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ClearReadCache).await
}
