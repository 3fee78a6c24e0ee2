//! Control plane: HTTP with JSON, on a separate thread, never on a reactor.
//!
//! Handlers turn requests into operations (see `ops`), which run on the engine's reactor.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequestParts, Json, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Router, middleware};
use futures_core::Stream;
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::OpenApi;

use super::{
    access, cache, clones, gateways, groups, manage, map, metrics, namespaces, options, page, snapshots, store,
    streams, trash,
};
use crate::api::{self, ErrorBody, Front, StreamLine};
use crate::engine::handle::EngineHandle;
use crate::failure::{Failure, FailureKind};
use crate::ops::{self, Operation, ProgressSink};
use crate::spec::{ImageSpec, image_spec, source_spec};

/// Maximum length of a JSON request body, in bytes.
const JSON_LEN_MAX: usize = 64 * 1024;

/// State shared by the handlers.
#[derive(Clone)]
pub struct App {
    /// Handle to the engine.
    pub engine: EngineHandle,
}

/// Set if the client requests a response as lines of JSON, progress first.
pub struct Streamed(bool);

impl<S: Sync> FromRequestParts<S> for Streamed {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let accept = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
        Ok(Self(accept.is_some_and(|accept| accept.contains("application/x-ndjson"))))
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody { error: self })).into_response()
    }
}

/// Response body that is fed through a channel.
pub struct ChannelBody(pub mpsc::Receiver<Result<Bytes, std::io::Error>>);

impl Stream for ChannelBody {
    type Item = Result<Bytes, std::io::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx)
    }
}

impl App {
    /// Runs an operation and responds in the requested form.
    pub(super) async fn run<O: Operation>(&self, streamed: Streamed, operation: O) -> Response {
        let (sink, mut seen) = ProgressSink::channel();
        let mut work = Box::pin(self.engine.call(move |engine| operation.run(engine, sink)));
        if !streamed.0 {
            return match work.await {
                Ok(reply) => Json(reply).into_response(),
                Err(failure) => failure.into_response(),
            };
        }
        let (lines, body) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let line = tokio::select! {
                    biased;
                    result = &mut work => {
                        let last = match result {
                            Ok(reply) => StreamLine::Result(reply),
                            Err(failure) => StreamLine::Error(failure),
                        };
                        // A disconnected client does not receive the result.
                        let _ = lines.send(Ok(json_line(&last))).await;
                        return;
                    }
                    Ok(()) = seen.changed() => seen.borrow_and_update().map(StreamLine::<()>::Progress),
                };
                if let Some(line) = line
                    && lines.send(Ok(json_line(&line))).await.is_err()
                {
                    return;
                }
            }
        });
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        (kind, Body::from_stream(ChannelBody(body))).into_response()
    }
}

fn json_line(value: &impl serde::Serialize) -> Bytes {
    let mut line = serde_json::to_vec(value).expect("plain data becomes JSON");
    line.push(b'\n');
    line.into()
}

/// Returns the routes of the control plane; with a token, routes that read or change images require it.
pub fn router(app: App, token: Option<Arc<str>>) -> Router {
    let api = Router::new()
        .route("/v1/images", post(create_image))
        .route("/v1/images/{pool}", get(list_images))
        .route("/v1/images/{pool}/{image}", get(get_image).patch(update_image).delete(remove_image))
        .route("/v1/images/{pool}/{image}/status", get(image_status))
        .route("/v1/listings/{pool}", get(list_images_long))
        .route("/v1/images/{pool}/{image}/data", get(streams::export).put(streams::import))
        .route("/v1/images/{pool}/{image}/diff", get(streams::export_diff).put(streams::import_diff))
        .route("/v1/images/{pool}/{image}/copy", post(copy_image))
        .route("/v1/names", get(list_pools))
        .route("/v1/names/{pool}", get(list_names))
        .route("/v1/usage/{pool}", get(pool_usage))
        .route("/v1/usage/{pool}/{image}", get(image_usage))
        .route("/v1/targets", get(list_targets).post(attach))
        .route("/v1/targets/{front}/{pool}/{image}", delete(detach))
        .route("/v1/ana", get(list_ana).post(set_ana))
        .merge(access::routes())
        .merge(cache::routes())
        .merge(snapshots::routes())
        .merge(clones::routes())
        .merge(trash::routes())
        .merge(gateways::routes())
        .merge(groups::routes())
        .merge(namespaces::routes())
        .merge(manage::routes())
        .merge(map::routes())
        .merge(options::routes())
        .merge(store::routes())
        .route("/v1/reload", post(reload))
        .route("/v1/reservations/{pool}/{image}", get(get_reservations).delete(clear_reservations))
        .route("/v1/logs", get(list_logs))
        .route("/v1/logs/{pool}/{image}", get(get_log).delete(discard_log))
        .route("/v1/logs/{pool}/{image}/flush", post(flush_log))
        .route("/v1/logs/{pool}/{image}/takeover", post(take_over_log))
        .layer(DefaultBodyLimit::max(JSON_LEN_MAX));
    let api = match token {
        None => api,
        Some(token) => api.layer(middleware::from_fn_with_state(token, require_token)),
    };
    let open = Router::new()
        .route("/", get(page::page))
        .route("/metrics", get(metrics::metrics))
        .route("/openapi.json", get(openapi))
        .route("/v1/status", get(status));
    open.merge(api).fallback(no_such_path).with_state(app)
}

async fn require_token(State(token): State<Arc<str>>, headers: HeaderMap, request: Request, next: Next) -> Response {
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if given.and_then(|given| given.strip_prefix("Bearer ")).is_some_and(|given| same(given, &token)) {
        return next.run(request).await;
    }
    let failure =
        Failure::new(FailureKind::Denied, "authentication required: send the header 'Authorization: Bearer TOKEN'")
            .hint("the token is in http.token in the daemon's data directory");
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], Json(ErrorBody { error: failure }))
        .into_response()
}

/// Compares two tokens in a time that does not depend on where they differ.
fn same(given: &str, token: &str) -> bool {
    given.len() == token.len() && given.bytes().zip(token.bytes()).fold(0, |diff, (a, b)| diff | (a ^ b)) == 0
}

async fn no_such_path(request: Request) -> Failure {
    let what = format!("there is no {} {}", request.method(), request.uri().path());
    Failure::new(FailureKind::NotFound, what).hint("/openapi.json lists what there is")
}

/// OpenAPI document of the API.
#[derive(OpenApi)]
#[openapi(
    info(title = "Forebay control API", description = "What the forebay command line asks of the daemon."),
    paths(
        status,
        create_image,
        list_images,
        list_pools,
        list_names,
        list_images_long,
        get_image,
        image_status,
        update_image,
        remove_image,
        pool_usage,
        image_usage,
        snapshots::list_snapshots,
        snapshots::create_snapshot,
        snapshots::purge_snapshots,
        snapshots::update_snapshot,
        snapshots::remove_snapshot,
        snapshots::remove_snapshot_by_id,
        snapshots::roll_back,
        snapshots::set_snapshot_limit,
        snapshots::clear_snapshot_limit,
        clones::clone_snapshot,
        clones::list_children,
        clones::flatten,
        manage::list_metadata,
        manage::get_metadata,
        manage::set_metadata,
        manage::remove_metadata,
        manage::list_locks,
        manage::add_lock,
        manage::remove_lock,
        manage::update_features,
        manage::sparsify,
        manage::check_object_map,
        manage::rebuild_object_map,
        namespaces::list_namespaces,
        namespaces::create_namespace,
        namespaces::remove_namespace,
        groups::list_groups,
        groups::create_group,
        groups::rename_group,
        groups::remove_group,
        groups::list_group_images,
        groups::add_to_group,
        groups::remove_from_group,
        groups::list_group_snapshots,
        groups::create_group_snapshot,
        groups::rename_group_snapshot,
        groups::remove_group_snapshot,
        groups::roll_back_group,
        gateways::create_gateway_group,
        gateways::get_gateway_group,
        gateways::remove_gateway_group,
        gateways::get_own_gateway_group,
        gateways::join_gateway_group,
        gateways::leave_gateway_group,
        gateways::drain_gateway,
        gateways::set_gateway_weight,
        gateways::set_gateway_policy,
        gateways::rebalance_gateways,
        trash::list_trash,
        trash::move_to_trash,
        trash::purge_trash,
        trash::remove_from_trash,
        trash::restore_from_trash,
        options::list_image_options,
        options::get_image_option,
        options::set_image_option,
        options::remove_image_option,
        options::list_pool_options,
        options::get_pool_option,
        options::set_pool_option,
        options::remove_pool_option,
        list_targets,
        attach,
        detach,
        map::list_mapped,
        map::map,
        map::unmap,
        list_ana,
        set_ana,
        access::list_nvme_subsystems,
        access::create_nvme_subsystem,
        access::remove_nvme_subsystem,
        access::allow_nvme_host,
        access::deny_nvme_host,
        access::list_iscsi_targets,
        access::create_iscsi_target,
        access::remove_iscsi_target,
        access::allow_initiator,
        access::deny_initiator,
        reload,
        get_reservations,
        clear_reservations,
        list_logs,
        get_log,
        flush_log,
        take_over_log,
        discard_log,
        store::store_space,
        store::list_store_devices,
        store::replace_store_device,
        store::add_store_devices,
        store::remove_store_devices,
        store::grow_store,
        store::get_scrub,
        store::start_scrub,
        store::get_store_keys,
        store::rotate_master_key,
        copy_image,
        cache::get_read_cache,
        cache::clear_read_cache,
        streams::export,
        streams::import,
        streams::export_diff,
        streams::import_diff
    ),
    components(schemas(Front))
)]
struct Description;

async fn openapi() -> Response {
    Json(Description::openapi()).into_response()
}

/// Show the state of the daemon
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = api::DaemonStatus)))]
async fn status(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::GetStatus).await
}

/// Create an image
#[utoipa::path(post, path = "/v1/images", request_body = api::CreateImageRequest, responses(
    (status = 200, body = api::ImageInfo), (status = 409, body = ErrorBody)
))]
async fn create_image(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::CreateImage(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// List the images of a pool
#[utoipa::path(get, path = "/v1/images/{pool}", params(("pool" = String, Path)), responses(
    (status = 200, body = Vec<api::ImageSummary>), (status = 404, body = ErrorBody)
))]
async fn list_images(State(app): State<App>, streamed: Streamed, Path(pool): Path<String>) -> Response {
    app.run(streamed, ops::ListImages { pool }).await
}

/// List the names of the pools
#[utoipa::path(get, path = "/v1/names", responses((status = 200, body = Vec<String>)))]
async fn list_pools(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListPools).await
}

/// Query for names.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamesQuery {
    /// Prefix that the names must have.
    #[serde(default)]
    prefix: String,
}

/// List the names of a pool's images
#[utoipa::path(get, path = "/v1/names/{pool}", params(("pool" = String, Path), ("prefix" = Option<String>, Query)),
    responses((status = 200, body = Vec<String>), (status = 404, body = ErrorBody)))]
async fn list_names(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    Query(NamesQuery { prefix }): Query<NamesQuery>,
) -> Response {
    app.run(streamed, ops::ListNames { pool, prefix }).await
}

/// Query for an image or one of its snapshots.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceQuery {
    /// Snapshot; the image as it is now if omitted.
    snapshot: Option<String>,
}

/// Show the size and layout of an image or snapshot
#[utoipa::path(get, path = "/v1/images/{pool}/{image}",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query)),
    responses((status = 200, body = api::ImageInfo), (status = 404, body = ErrorBody)))]
async fn get_image(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    Query(SourceQuery { snapshot }): Query<SourceQuery>,
) -> Response {
    match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => app.run(streamed, ops::GetImage(source)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Resize or rename an image
#[utoipa::path(patch, path = "/v1/images/{pool}/{image}", params(("pool" = String, Path), ("image" = String, Path)),
    request_body = api::UpdateImageRequest,
    responses((status = 200, body = api::ImageInfo), (status = 404, body = ErrorBody)))]
async fn update_image(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    body: Bytes,
) -> Response {
    match parse(&body) {
        Ok(update) => on_image(names, |spec| app.run(streamed, ops::UpdateImage { spec, update })).await,
        Err(failure) => failure.into_response(),
    }
}

/// Remove an image and its data
#[utoipa::path(delete, path = "/v1/images/{pool}/{image}", params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn remove_image(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::RemoveImage(spec))).await
}

/// Copy an image or snapshot to a new image
#[utoipa::path(post, path = "/v1/images/{pool}/{image}/copy",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query)),
    request_body = api::CopyImageRequest,
    responses((status = 200, body = api::ImageInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn copy_image(
    State(app): State<App>,
    streamed: Streamed,
    Path((pool, image)): Path<(String, String)>,
    Query(SourceQuery { snapshot }): Query<SourceQuery>,
    body: Bytes,
) -> Response {
    let source = source_spec(&pool, &image, snapshot.as_deref());
    match source.and_then(|source| Ok((source, parse(&body)?))) {
        Ok((source, request)) => app.run(streamed, ops::CopyImage { source, request }).await,
        Err(failure) => failure.into_response(),
    }
}

/// List the images of a pool with their snapshots, locks and parents, in the format of 'rbd ls -l --format json'
#[utoipa::path(get, path = "/v1/listings/{pool}", params(("pool" = String, Path)), responses(
    (status = 200, body = Vec<api::ImageListing>), (status = 404, body = ErrorBody)
))]
async fn list_images_long(State(app): State<App>, streamed: Streamed, Path(pool): Path<String>) -> Response {
    app.run(streamed, ops::ListImagesLong { pool }).await
}

/// Show the watchers and exports of an image
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/status",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = api::ImageStatus), (status = 404, body = ErrorBody)))]
async fn image_status(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::GetImageStatus(spec))).await
}

/// Query for disk usage.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UsageQuery {
    /// Set to count bytes, of images without snapshots.
    #[serde(default)]
    exact: bool,
    /// Snapshot of an image, at which the list ends.
    snapshot: Option<String>,
}

/// Show the disk usage of each image of a pool, in the format of 'rbd du --format json'
#[utoipa::path(get, path = "/v1/usage/{pool}",
    params(("pool" = String, Path), ("exact" = Option<bool>, Query)),
    responses((status = 200, body = api::DiskUsage), (status = 404, body = ErrorBody)))]
async fn pool_usage(
    State(app): State<App>,
    streamed: Streamed,
    Path(pool): Path<String>,
    Query(UsageQuery { exact, snapshot }): Query<UsageQuery>,
) -> Response {
    if snapshot.is_some() {
        return Failure::invalid("a snapshot is one of an image; name the image").into_response();
    }
    app.run(streamed, ops::GetUsage { pool, image: None, snapshot, exact }).await
}

/// Show the disk usage of an image and its snapshots, or of a snapshot and those before it
#[utoipa::path(get, path = "/v1/usage/{pool}/{image}",
    params(("pool" = String, Path), ("image" = String, Path), ("exact" = Option<bool>, Query),
        ("snapshot" = Option<String>, Query)),
    responses((status = 200, body = api::DiskUsage), (status = 404, body = ErrorBody)))]
async fn image_usage(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    Query(UsageQuery { exact, snapshot }): Query<UsageQuery>,
) -> Response {
    on_image(names, |ImageSpec { pool, image }| {
        app.run(streamed, ops::GetUsage { pool, image: Some(image), snapshot, exact })
    })
    .await
}

/// List the exports
#[utoipa::path(get, path = "/v1/targets", responses((status = 200, body = Vec<api::ImageExport>)))]
async fn list_targets(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListTargets).await
}

/// Create an export
#[utoipa::path(post, path = "/v1/targets", request_body = api::AttachRequest, responses(
    (status = 200, body = api::ImageExport), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)
))]
async fn attach(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::AttachImage(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Query for ending an export.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DetachQuery {
    /// Set to disconnect the hosts that have it open.
    #[serde(default)]
    force: bool,
    /// Set to keep the write log as it is.
    #[serde(default)]
    keep_log: bool,
}

/// End an export
#[utoipa::path(delete, path = "/v1/targets/{front}/{pool}/{image}",
    params(("front" = Front, Path), ("pool" = String, Path), ("image" = String, Path), ("force" = Option<bool>, Query),
        ("keep_log" = Option<bool>, Query)),
    responses((status = 200), (status = 404, body = ErrorBody)))]
async fn detach(
    State(app): State<App>,
    streamed: Streamed,
    Path((front, pool, image)): Path<(Front, String, String)>,
    Query(DetachQuery { force, keep_log }): Query<DetachQuery>,
) -> Response {
    on_image((pool, image), |spec| app.run(streamed, ops::DetachImage { spec, front, force, keep_log })).await
}

/// List the ANA states of NVMe namespaces, by port and group
#[utoipa::path(get, path = "/v1/ana", responses((status = 200, body = Vec<api::Ana>)))]
async fn list_ana(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListAna).await
}

/// Set ANA states of NVMe namespaces, and notify the hosts
#[utoipa::path(post, path = "/v1/ana", request_body = api::SetAnaRequest,
    responses((status = 200, body = Vec<api::Ana>), (status = 400, body = ErrorBody)))]
async fn set_ana(State(app): State<App>, streamed: Streamed, body: Bytes) -> Response {
    match parse(&body) {
        Ok(request) => app.run(streamed, ops::SetAna(request)).await,
        Err(failure) => failure.into_response(),
    }
}

/// Reload the hosts and secrets of the configuration
#[utoipa::path(post, path = "/v1/reload", responses((status = 200, body = api::Reloaded), (status = 400, body = ErrorBody)))]
async fn reload(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::Reload).await
}

/// Show the persistent reservations of an image
#[utoipa::path(get, path = "/v1/reservations/{pool}/{image}",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = api::ReservationsInfo), (status = 404, body = ErrorBody)))]
async fn get_reservations(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::GetReservations(spec))).await
}

/// Clear the persistent reservations of an image
#[utoipa::path(delete, path = "/v1/reservations/{pool}/{image}",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200), (status = 404, body = ErrorBody)))]
async fn clear_reservations(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::ClearReservations(spec))).await
}

/// List the write logs
#[utoipa::path(get, path = "/v1/logs", responses((status = 200, body = Vec<api::WriteLogInfo>)))]
async fn list_logs(State(app): State<App>, streamed: Streamed) -> Response {
    app.run(streamed, ops::ListLogs).await
}

/// Show the write log of an image
#[utoipa::path(get, path = "/v1/logs/{pool}/{image}", params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = api::WriteLogInfo), (status = 404, body = ErrorBody)))]
async fn get_log(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::GetLog(spec))).await
}

/// Write back all dirty data of an image's write log
#[utoipa::path(post, path = "/v1/logs/{pool}/{image}/flush",
    params(("pool" = String, Path), ("image" = String, Path)),
    responses((status = 200, body = api::WriteLogInfo), (status = 404, body = ErrorBody)))]
async fn flush_log(State(app): State<App>, streamed: Streamed, Path(names): Path<(String, String)>) -> Response {
    on_image(names, |spec| app.run(streamed, ops::FlushLog(spec))).await
}

/// Query for taking a log over.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TakeoverQuery {
    /// Set to write the log back, and close it again.
    #[serde(default)]
    flush_only: bool,
    /// Set to take over from a primary that is alive, which is fenced.
    #[serde(default)]
    force: bool,
}

/// Take over the write log of an image, of which this daemon has a copy
#[utoipa::path(post, path = "/v1/logs/{pool}/{image}/takeover",
    params(("pool" = String, Path), ("image" = String, Path), ("flush_only" = Option<bool>, Query),
        ("force" = Option<bool>, Query)),
    responses((status = 200, body = api::WriteLogInfo), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn take_over_log(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    Query(TakeoverQuery { flush_only, force }): Query<TakeoverQuery>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::TakeOverLog { spec, flush_only, force })).await
}

/// Query for discarding a log.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DiscardQuery {
    /// Set to discard dirty data, too.
    #[serde(default)]
    force: bool,
}

/// Discard the write log of an image
#[utoipa::path(delete, path = "/v1/logs/{pool}/{image}",
    params(("pool" = String, Path), ("image" = String, Path), ("force" = Option<bool>, Query)),
    responses((status = 200), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn discard_log(
    State(app): State<App>,
    streamed: Streamed,
    Path(names): Path<(String, String)>,
    Query(DiscardQuery { force }): Query<DiscardQuery>,
) -> Response {
    on_image(names, |spec| app.run(streamed, ops::DiscardLog { spec, force })).await
}

/// Validates the names of a pool and an image, and responds with what `then` makes of them.
pub(super) async fn on_image<Fut>(names: (String, String), then: impl FnOnce(ImageSpec) -> Fut) -> Response
where
    Fut: Future<Output = Response>,
{
    match image_spec(&names.0, &names.1) {
        Ok(spec) => then(spec).await,
        Err(failure) => failure.into_response(),
    }
}

/// Parses the JSON body of a request.
pub(super) fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| Failure::invalid(format!("invalid request body: {error}")))
}
