//! HTTP handlers for NVMe subsystems, iSCSI targets, and the hosts that may use them.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::ops;

/// Path segment for the default subsystem or target.
const DEFAULT: &str = "default";

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/nvme-subsystems", get(list_nvme_subsystems).post(create_nvme_subsystem))
        .route("/v1/nvme-subsystems/{nqn}", delete(remove_nvme_subsystem))
        .route("/v1/nvme-subsystems/{nqn}/hosts", post(allow_nvme_host))
        .route("/v1/nvme-subsystems/{nqn}/hosts/{host}", delete(deny_nvme_host))
        .route("/v1/iscsi-targets", get(list_iscsi_targets).post(create_iscsi_target))
        .route("/v1/iscsi-targets/{name}", delete(remove_iscsi_target))
        .route("/v1/iscsi-targets/{name}/initiators/{initiator}", delete(deny_initiator).put(allow_initiator))
}

fn named(name: String) -> Option<String> {
    (name != DEFAULT).then_some(name)
}

/// List the NVMe subsystems, with the hosts that may connect to each
#[utoipa::path(get, path = "/v1/nvme-subsystems", responses((status = 200, body = Vec<api::NvmeSubsystem>)))]
pub async fn list_nvme_subsystems(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListNvmeSubsystems).await
}

/// Create an NVMe subsystem
#[utoipa::path(post, path = "/v1/nvme-subsystems", request_body = api::CreateNvmeSubsystemRequest,
    responses((status = 200, body = api::NvmeSubsystem), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn create_nvme_subsystem(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::CreateNvmeSubsystem(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove an NVMe subsystem without exports
#[utoipa::path(delete, path = "/v1/nvme-subsystems/{nqn}", params(("nqn" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_nvme_subsystem(State(app): State<App>, streamed: Streamed, Path(nqn): Path<String>) -> Response {
    app.run(streamed, ops::RemoveNvmeSubsystem(nqn)).await
}

/// Allow a host to connect to an NVMe subsystem; `default` is the default one
#[utoipa::path(post, path = "/v1/nvme-subsystems/{nqn}/hosts", params(("nqn" = String, Path)), request_body = api::NvmeHost,
    responses((status = 200, body = api::NvmeSubsystem), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn allow_nvme_host(
    State(app): State<App>,
    streamed: Streamed,
    Path(nqn): Path<String>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(host) => app.run(streamed, ops::AllowNvmeHost { subsystem: named(nqn), host }).await,
        Err(failure) => failure.into_response(),
    }
}

/// Revoke a host's access to an NVMe subsystem, and disconnect it
#[utoipa::path(delete, path = "/v1/nvme-subsystems/{nqn}/hosts/{host}",
    params(("nqn" = String, Path), ("host" = String, Path)),
    responses((status = 200, body = api::NvmeSubsystem), (status = 404, body = ErrorBody)))]
pub async fn deny_nvme_host(
    State(app): State<App>,
    streamed: Streamed,
    Path((nqn, host)): Path<(String, String)>,
) -> Response {
    app.run(streamed, ops::DenyNvmeHost { subsystem: named(nqn), host }).await
}

/// List the iSCSI targets, with the initiators that may log in to each
#[utoipa::path(get, path = "/v1/iscsi-targets", responses((status = 200, body = Vec<api::IscsiTarget>)))]
pub async fn list_iscsi_targets(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListIscsiTargets).await
}

/// Create an iSCSI target
#[utoipa::path(post, path = "/v1/iscsi-targets", request_body = api::CreateIscsiTargetRequest,
    responses((status = 200, body = api::IscsiTarget), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn create_iscsi_target(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::CreateIscsiTarget(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove an iSCSI target without exports; its sessions end
#[utoipa::path(delete, path = "/v1/iscsi-targets/{name}", params(("name" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_iscsi_target(State(app): State<App>, streamed: Streamed, Path(name): Path<String>) -> Response {
    app.run(streamed, ops::RemoveIscsiTarget(name)).await
}

/// Allow an initiator to log in to an iSCSI target; `default` is the default one
#[utoipa::path(put, path = "/v1/iscsi-targets/{name}/initiators/{initiator}",
    params(("name" = String, Path), ("initiator" = String, Path)),
    responses((status = 200, body = api::IscsiTarget), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn allow_initiator(
    State(app): State<App>,
    streamed: Streamed,
    Path((name, initiator)): Path<(String, String)>,
) -> Response {
    app.run(streamed, ops::AdmitInitiator { target: named(name), initiator, allowed: true }).await
}

/// Revoke an initiator's login to an iSCSI target, and end its sessions
#[utoipa::path(delete, path = "/v1/iscsi-targets/{name}/initiators/{initiator}",
    params(("name" = String, Path), ("initiator" = String, Path)),
    responses((status = 200, body = api::IscsiTarget), (status = 404, body = ErrorBody)))]
pub async fn deny_initiator(
    State(app): State<App>,
    streamed: Streamed,
    Path((name, initiator)): Path<(String, String)>,
) -> Response {
    app.run(streamed, ops::AdmitInitiator { target: named(name), initiator, allowed: false }).await
}
