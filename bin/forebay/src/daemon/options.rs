//! HTTP handlers for overridden options.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::control::{App, Streamed, on_image, parse};
use crate::api::{self, ErrorBody};
use crate::ops::{self, ConfigTarget};

/// Returns the routes.
pub fn routes() -> Router<App> {
    let image = "/v1/images/{pool}/{image}/config";
    Router::new()
        .route(image, get(list_image_options))
        .route(&format!("{image}/{{key}}"), get(get_image_option).put(set_image_option).delete(remove_image_option))
        .route("/v1/config/{pool}", get(list_pool_options))
        .route("/v1/config/{pool}/{key}", get(get_pool_option).put(set_pool_option).delete(remove_pool_option))
}

/// Names of a pool, an image and an option.
type ImageOptionNames = (String, String, String);

/// List librbd's options with their values in force for an image
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/config",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = Vec<api::ConfigOption>), (status = 404, body = ErrorBody)))]
pub async fn list_image_options(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::ListOptions(ConfigTarget::Image(spec)))).await
}

/// Show the value that an image overrides an option with
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/config/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)),
    responses((status = 200, body = api::ConfigValue), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn get_image_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<ImageOptionNames>,
) -> Response {
    let get = |spec| app.run(streamed, ops::GetOption { target: ConfigTarget::Image(spec), key });
    on_image((pool, image), get).await
}

/// Override an option for an image; limits of an exported image change at once
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/config/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)), request_body = api::ConfigValue,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn set_image_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<ImageOptionNames>,
    body: Bytes,
) -> Response {
    let value = match parse::<api::ConfigValue>(&body) {
        Ok(request) => Some(request.value),
        Err(failure) => return failure.into_response(),
    };
    let set = |spec| app.run(streamed, ops::ChangeOption { target: ConfigTarget::Image(spec), key, value });
    on_image((pool, image), set).await
}

/// End an image's override of an option
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}/config/{key}",
    params(("pool" = String, Path), ("image" = String, Path), ("key" = String, Path)),
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn remove_image_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image, key)): Path<ImageOptionNames>,
) -> Response {
    let remove = |spec| app.run(streamed, ops::ChangeOption { target: ConfigTarget::Image(spec), key, value: None });
    on_image((pool, image), remove).await
}

/// List librbd's options with their values in force for a pool
#[utoipa::path(get, path = "/v1/config/{pool}", params(("pool" = String, Path)),
    responses((status = 200, body = Vec<api::ConfigOption>), (status = 404, body = ErrorBody)))]
pub async fn list_pool_options(State(app): State<App>, streamed: Streamed, Path(pool): Path<String>) -> Response {
    app.run(streamed, ops::ListOptions(ConfigTarget::Pool(pool))).await
}

/// Show the value that a pool overrides an option with
#[utoipa::path(get, path = "/v1/config/{pool}/{key}", params(("pool" = String, Path), ("key" = String, Path)),
    responses((status = 200, body = api::ConfigValue), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn get_pool_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, key)): Path<(String, String)>,
) -> Response {
    app.run(streamed, ops::GetOption { target: ConfigTarget::Pool(pool), key }).await
}

/// Override an option for the images of a pool that do not override it themselves
#[utoipa::path(put, path = "/v1/config/{pool}/{key}", params(("pool" = String, Path), ("key" = String, Path)),
    request_body = api::ConfigValue,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn set_pool_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, key)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse::<api::ConfigValue>(&body) {
        Ok(request) => {
            let (target, value) = (ConfigTarget::Pool(pool), Some(request.value));
            app.run(streamed, ops::ChangeOption { target, key, value }).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// End a pool's override of an option
#[utoipa::path(delete, path = "/v1/config/{pool}/{key}", params(("pool" = String, Path), ("key" = String, Path)),
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn remove_pool_option(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, key)): Path<(String, String)>,
) -> Response {
    app.run(streamed, ops::ChangeOption { target: ConfigTarget::Pool(pool), key, value: None }).await
}
