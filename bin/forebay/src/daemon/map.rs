//! HTTP handlers for images mapped to block devices.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::failure::Failure;
use crate::ops::{self, MappedTarget};
use crate::spec::image_spec;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new().route("/v1/mappings", get(list_mapped).post(map).delete(unmap))
}

/// List the images that are mapped to block devices
#[utoipa::path(get, path = "/v1/mappings", responses((status = 200, body = Vec<api::MappedImage>)))]
pub async fn list_mapped(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListMapped).await
}

/// Map an image to a block device of the daemon's machine
#[utoipa::path(post, path = "/v1/mappings", request_body = api::MapRequest, responses(
    (status = 200, body = api::MappedImage), (status = 403, body = ErrorBody), (status = 409, body = ErrorBody)
))]
pub async fn map(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::MapImage(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for a mapped image: its name, or its device.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnmapQuery {
    pool: Option<String>,
    image: Option<String>,
    device: Option<String>,
    #[serde(default)]
    force: bool,
}

/// End the device of a mapped image
#[utoipa::path(delete, path = "/v1/mappings", params(
    ("pool" = Option<String>, Query), ("image" = Option<String>, Query), ("device" = Option<String>, Query),
    ("force" = Option<bool>, Query)
), responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn unmap(
    State(app): State<App>,
    streamed: Streamed,
    Query(UnmapQuery { pool, image, device, force }): Query<UnmapQuery>,
) -> Response {
    let target = match (pool, image, device) {
        (Some(pool), Some(image), None) => image_spec(&pool, &image).map(MappedTarget::Image),
        (None, None, Some(device)) => Ok(MappedTarget::Device(device)),
        _ => Err(Failure::invalid("a mapped image is named by pool and image, or by device")),
    };
    match target {
        Ok(target) => app.run(streamed, ops::UnmapImage { target, force }).await,
        Err(failure) => failure.into_response(),
    }
}
