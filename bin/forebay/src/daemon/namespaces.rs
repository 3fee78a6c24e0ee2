//! HTTP handlers for the namespaces of a pool.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get};

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::ops;
use crate::spec::namespace_spec;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/namespaces/{pool}", get(list_namespaces).post(create_namespace))
        .route("/v1/namespaces/{pool}/{namespace}", delete(remove_namespace))
}

/// List the namespaces of a pool
#[utoipa::path(get, path = "/v1/namespaces/{pool}", params(("pool" = String, Path)),
    responses((status = 200, body = Vec<api::NamespaceName>), (status = 404, body = ErrorBody)))]
pub async fn list_namespaces(State(app): State<App>, streamed: Streamed, Path(pool): Path<String>) -> Response {
    app.run(streamed, ops::ListNamespaces { pool }).await
}

/// Create a namespace
#[utoipa::path(post, path = "/v1/namespaces/{pool}", params(("pool" = String, Path)), request_body = api::NamespaceName,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn create_namespace(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    body: Bytes,
) -> Response {
    match parse::<api::NamespaceName>(&body).and_then(|body| namespace_spec(&pool, &body.name)) {
        Ok(spec) => app.run(streamed, ops::CreateNamespace(spec)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove an empty namespace
#[utoipa::path(delete, path = "/v1/namespaces/{pool}/{namespace}",
    params(("pool" = String, Path), ("namespace" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_namespace(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, namespace)): Path<(String, String)>,
) -> Response {
    match namespace_spec(&pool, &namespace) {
        Ok(spec) => app.run(streamed, ops::RemoveNamespace(spec)).await,
        Err(failure) => failure.into_response(),
    }
}
