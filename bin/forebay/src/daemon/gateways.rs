//! HTTP handlers for gateway groups.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};

use super::control::{App, Streamed, parse};
use crate::api::{self, ErrorBody};
use crate::ops;
use crate::spec::group_spec;

/// Returns the routes.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/gateway-groups", post(create_gateway_group))
        .route("/v1/gateway-groups/{pool}/{name}", get(get_gateway_group).delete(remove_gateway_group))
        .route("/v1/gateway-group", get(get_own_gateway_group).put(join_gateway_group).delete(leave_gateway_group))
        .route("/v1/gateway-group/drain", post(drain_gateway))
        .route("/v1/gateway-group/weight", put(set_gateway_weight))
        .route("/v1/gateway-group/policy", put(set_gateway_policy))
        .route("/v1/gateway-group/rebalance", post(rebalance_gateways))
}

/// Create a gateway group without members
#[utoipa::path(post, path = "/v1/gateway-groups", request_body = api::NewGatewayGroup,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn create_gateway_group(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    let parsed = parse::<api::NewGatewayGroup>(&body);
    let operation = parsed.and_then(|api::NewGatewayGroup { pool, name, lease_ms, rebalance }| {
        Ok(ops::CreateGatewayGroup { spec: group_spec(&pool, &name)?, lease_ms, rebalance })
    });
    match operation {
        Ok(operation) => app.run(streamed, operation).await,
        Err(failure) => failure.into_response(),
    }
}

/// Show a gateway group, whether the daemon is in it or not
#[utoipa::path(get, path = "/v1/gateway-groups/{pool}/{name}", params(("pool" = String, Path), ("name" = String, Path)),
    responses((status = 200, body = api::GatewayGroupStatus), (status = 404, body = ErrorBody)))]
pub async fn get_gateway_group(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, name)): Path<(String, String)>,
) -> Response {
    match group_spec(&pool, &name) {
        Ok(spec) => app.run(streamed, ops::GetGatewayGroup(Some(spec))).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove a gateway group without members and volumes
#[utoipa::path(delete, path = "/v1/gateway-groups/{pool}/{name}", params(("pool" = String, Path), ("name" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove_gateway_group(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, name)): Path<(String, String)>,
) -> Response {
    match group_spec(&pool, &name) {
        Ok(spec) => app.run(streamed, ops::RemoveGatewayGroup(spec)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Show the gateway group that the daemon is in
#[utoipa::path(get, path = "/v1/gateway-group",
    responses((status = 200, body = api::GatewayGroupStatus), (status = 404, body = ErrorBody)))]
pub async fn get_own_gateway_group(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetGatewayGroup(None)).await
}

/// Make the daemon a member of a gateway group
#[utoipa::path(put, path = "/v1/gateway-group", request_body = api::GatewayGroupName,
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn join_gateway_group(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse::<api::GatewayGroupName>(&body).and_then(|request| group_spec(&request.pool, &request.name)) {
        Ok(spec) => app.run(streamed, ops::JoinGatewayGroup(spec)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Let the daemon leave its gateway group
#[utoipa::path(delete, path = "/v1/gateway-group",
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn leave_gateway_group(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::LeaveGatewayGroup).await
}

/// Move all volumes of a member away, or let it take volumes again
#[utoipa::path(post, path = "/v1/gateway-group/drain", request_body = api::DrainGateway,
    responses((status = 200), (status = 404, body = ErrorBody)))]
pub async fn drain_gateway(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::DrainGatewayMember(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Set the weight of a member: its share of the load
#[utoipa::path(put, path = "/v1/gateway-group/weight", request_body = api::GatewayWeight,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn set_gateway_weight(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::SetGatewayWeight(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Change the policy of the group
#[utoipa::path(put, path = "/v1/gateway-group/policy", request_body = api::GatewayGroupPolicy,
    responses((status = 200), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn set_gateway_policy(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::SetGatewayPolicy(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Move volumes so that members are loaded alike, a few at a time; returns when they are moved
#[utoipa::path(post, path = "/v1/gateway-group/rebalance", request_body = api::RebalanceGatewaysRequest,
    responses((status = 200, body = Vec<api::GatewayMove>), (status = 404, body = ErrorBody)))]
pub async fn rebalance_gateways(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    let parsed = if body.is_empty() { Ok(api::RebalanceGatewaysRequest::default()) } else { parse(&body) };
    match parsed {
        Ok(request) => app.run(streamed, ops::RebalanceGateways(request)).await,
        Err(failure) => failure.into_response(),
    }
}
