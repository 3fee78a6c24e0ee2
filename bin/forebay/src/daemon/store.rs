//! HTTP handlers for the devices of the embedded store.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::ops;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/store", get(store_space))
        .route("/v1/store/devices", get(list_store_devices).post(replace_store_device))
        .route("/v1/store/devices/add", post(add_store_devices))
        .route("/v1/store/devices/remove", post(remove_store_devices))
        .route("/v1/store/grow", post(grow_store))
        .route("/v1/store/scrub", get(get_scrub).post(start_scrub))
        .route("/v1/store/keys", get(get_store_keys).post(rotate_master_key))
}

/// Show the space of the embedded store
#[utoipa::path(get, path = "/v1/store", responses((status = 200, body = api::StoreSpace)))]
pub async fn store_space(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetStoreSpace).await
}

/// List the devices of the embedded store
#[utoipa::path(get, path = "/v1/store/devices",
    responses((status = 200, body = api::StoreDevices), (status = 501, body = ErrorBody)))]
pub async fn list_store_devices(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListStoreDevices).await
}

/// Replace a device of the embedded store
#[utoipa::path(post, path = "/v1/store/devices", request_body = api::ReplaceDeviceRequest,
    responses((status = 200, body = api::StoreDevices), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn replace_store_device(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::ReplaceStoreDevice(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Add devices to the embedded store
#[utoipa::path(post, path = "/v1/store/devices/add", request_body = api::AddDevicesRequest,
    responses((status = 200, body = api::StoreDevices), (status = 409, body = ErrorBody), (status = 501, body = ErrorBody)))]
pub async fn add_store_devices(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::AddStoreDevices(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove devices from the embedded store
#[utoipa::path(post, path = "/v1/store/devices/remove", request_body = api::RemoveDevicesRequest,
    responses((status = 200, body = api::StoreDevices), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 501, body = ErrorBody)))]
pub async fn remove_store_devices(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::RemoveStoreDevices(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Make the embedded store use more of its file, device or devices
#[utoipa::path(post, path = "/v1/store/grow", request_body = api::GrowStoreRequest,
    responses((status = 200, body = api::StoreSpace), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn grow_store(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::GrowStore(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Show the progress and the results of a scrub
#[utoipa::path(get, path = "/v1/store/scrub", responses((status = 200, body = api::ScrubInfo)))]
pub async fn get_scrub(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetScrub).await
}

/// Query for starting a scrub.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubQuery {
    /// Set to respond only once it is complete.
    #[serde(default)]
    wait: bool,
}

/// Verify everything that is stored, and mend what is wrong
#[utoipa::path(post, path = "/v1/store/scrub", params(("wait" = Option<bool>, Query)),
    responses((status = 200, body = api::ScrubInfo)))]
pub async fn start_scrub(
    State(app): State<App>,
    streamed: Streamed,
    Query(ScrubQuery { wait }): Query<ScrubQuery>,
) -> Response {
    app.run(streamed, ops::StartScrub { wait }).await
}

/// Show the state of the keys of encrypted images
#[utoipa::path(get, path = "/v1/store/keys", responses((status = 200, body = api::StoreKeys)))]
pub async fn get_store_keys(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetStoreKeys).await
}

/// Wrap the keys of encrypted images by another master key
#[utoipa::path(post, path = "/v1/store/keys", request_body = api::RotateKeyRequest,
    responses((status = 200, body = api::StoreKeys), (status = 400, body = ErrorBody), (status = 403, body = ErrorBody)))]
pub async fn rotate_master_key(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::RotateMasterKey(request)).await,
        Err(failure) => failure.into_response(),
    }
}
