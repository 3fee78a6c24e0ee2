//! Import and export over HTTP, in the formats of [`forebay_image::diff`] and [`forebay_image::image_stream`].

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Json, Response};
use forebay_reactor::Buf;
use futures_core::Stream;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::control::{App, ChannelBody};
use crate::api::{self, ErrorBody, NewImageOptions, StreamLine};
use crate::engine::Engine;
use crate::engine::apply::ImageImport;
use crate::engine::diffs::DiffParameters;
use crate::engine::transfer::{CHUNKS_QUEUED, Chunk, ImportParameters};
use crate::failure::{Failure, Result};
use crate::spec::{image_spec, source_spec};
use crate::transfer::records::{ChunkDecoder, ChunkEncoder, StreamFormat};

/// MIME type of a stream.
pub const CONTENT_TYPE: &str = "application/vnd.forebay.diff";

/// Query for an export.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportQuery {
    /// Snapshot to read; the image as it is now if omitted.
    snapshot: Option<String>,
    /// 2 for an image with its snapshots.
    #[serde(default = "content_alone")]
    format: u8,
}

/// Format of the content alone.
fn content_alone() -> u8 {
    1
}

/// Returns the stream format of a number, as `rbd` counts them.
fn stream_format(number: u8) -> Result<StreamFormat> {
    match number {
        1 => Ok(StreamFormat::Diff),
        2 => Ok(StreamFormat::Image),
        _ => Err(Failure::invalid(format!("there is no format {number}; 1 is the content, 2 has the snapshots"))),
    }
}

/// Download the content of an image or snapshot as an `rbd diff v1` stream, or an image with its snapshots as an `rbd image v2` stream
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/data",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query),
        ("format" = Option<u8>, Query)),
    responses((status = 200, content_type = "application/vnd.forebay.diff"), (status = 404, body = ErrorBody)))]
pub async fn export(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    Query(ExportQuery { snapshot, format }): Query<ExportQuery>,
) -> Response {
    let asked = source_spec(&pool, &image, snapshot.as_deref()).and_then(|source| Ok((source, stream_format(format)?)));
    match asked {
        Ok((source, StreamFormat::Diff)) => {
            download(app, StreamFormat::Diff, |engine, sender| engine.export(source, sender)).await
        }
        Ok((source, StreamFormat::Image)) if source.snapshot.is_none() => {
            download(app, StreamFormat::Image, |engine, sender| engine.export_image(source.image, sender)).await
        }
        Ok(_) => Failure::invalid("format 2 has all snapshots of an image; name the image alone").into_response(),
        Err(failure) => failure.into_response(),
    }
}

/// Query for changes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiffQuery {
    /// Snapshot that the changes lead to; the image as it is now if omitted.
    snapshot: Option<String>,
    /// Snapshot that they begin at; the beginning, when the image was empty, if omitted.
    from: Option<String>,
    /// Set for whole objects.
    #[serde(default)]
    whole_object: bool,
    /// Unset for the ranges without their data.
    #[serde(default = "with_data")]
    data: bool,
}

fn with_data() -> bool {
    true
}

/// Download the changes of an image or snapshot since an older snapshot as an `rbd diff v1` stream
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/diff",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query),
        ("from" = Option<String>, Query), ("whole_object" = Option<bool>, Query), ("data" = Option<bool>, Query)),
    responses((status = 200, content_type = "application/vnd.forebay.diff"), (status = 404, body = ErrorBody)))]
pub async fn export_diff(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    Query(DiffQuery { snapshot, from, whole_object, data }): Query<DiffQuery>,
) -> Response {
    match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => {
            let diff = DiffParameters { source, from, whole_object, data };
            download(app, StreamFormat::Diff, |engine, sender| engine.export_diff(diff, sender)).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Responds with the chunks that `work` sends.
async fn download<Fut>(
    app: App,
    format: StreamFormat,
    work: impl FnOnce(Rc<Engine>, mpsc::Sender<Chunk>) -> Fut + Send + 'static,
) -> Response
where
    Fut: Future<Output = Result<()>> + 'static,
{
    let (sender, mut chunks) = mpsc::channel(CHUNKS_QUEUED);
    let work = app.engine.call(move |engine| work(engine, sender));
    // Until the first chunk arrives, a failure can still be a separate response.
    let Some(first) = chunks.recv().await else {
        return match work.await {
            Ok(()) => Failure::failed("the export ended before it began").into_response(),
            Err(failure) => failure.into_response(),
        };
    };
    let (out, body) = mpsc::channel(CHUNKS_QUEUED);
    tokio::spawn(async move {
        let mut encoder = ChunkEncoder::new(format);
        let mut next = Some(first);
        while let Some(chunk) = next {
            let (head, data) = encoder.encode(chunk);
            let data = data.map(|data| Bytes::from_owner(Owned(data)));
            for bytes in [Some(head.into()), data].into_iter().flatten().filter(|bytes| !bytes.is_empty()) {
                if out.send(Ok(bytes)).await.is_err() {
                    return;
                }
            }
            next = chunks.recv().await;
        }
        if let Err(failure) = work.await {
            // A disconnected client does not receive it.
            let _ = out.send(Ok(encoder.fail(&failure).into())).await;
        }
    });
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::from_stream(ChannelBody(body))).into_response()
}

/// Buffer to which a response body can refer.
struct Owned(Buf);

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Query for an import.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportQuery {
    /// Size of the new image in bytes, if known; in format 2 the stream has it.
    size: Option<u64>,
    /// Object size in bytes; the default, or in format 2 that of the stream, if omitted.
    object_size: Option<u64>,
    /// Stripe unit in bytes, with `stripe_count`; none, or in format 2 that of the stream, if omitted.
    stripe_unit: Option<u64>,
    /// Number of objects over which stripes go, with `stripe_unit`.
    stripe_count: Option<u64>,
    /// Names of its features, separated by commas; the default, or in format 2 those of the stream, if omitted.
    features: Option<String>,
    /// Another pool for its data, if the pool is a Ceph cluster's.
    data_pool: Option<String>,
    #[serde(default)]
    encrypt: bool,
    /// 2 for an image with its snapshots.
    #[serde(default = "content_alone")]
    format: u8,
}

/// Create an image with the content of an `rbd diff v1` stream, or with snapshots of an `rbd image v2` stream
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/data",
    params(("pool" = String, Path), ("image" = String, Path), ("size" = Option<u64>, Query),
        ("object_size" = Option<u64>, Query), ("stripe_unit" = Option<u64>, Query),
        ("stripe_count" = Option<u64>, Query), ("features" = Option<String>, Query),
        ("data_pool" = Option<String>, Query), ("encrypt" = Option<bool>, Query), ("format" = Option<u8>, Query)),
    request_body(content_type = "application/vnd.forebay.diff"),
    responses((status = 200, body = api::ImportResult), (status = 409, body = ErrorBody)))]
pub async fn import(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    Query(query): Query<ImportQuery>,
    request: Request,
) -> Response {
    let ImportQuery { size, object_size, stripe_unit, stripe_count, features, data_pool, encrypt, format } = query;
    let features = features.map(|names| names.split(',').map(str::to_owned).collect());
    let options = NewImageOptions { object_size, stripe_unit, stripe_count, features, data_pool, encrypt };
    match image_spec(&pool, &image).and_then(|spec| Ok((spec, stream_format(format)?))) {
        Ok((spec, StreamFormat::Diff)) => {
            let import = ImportParameters { spec, options, size };
            upload(app, request, StreamFormat::Diff, |engine, chunks, begun| engine.import(import, chunks, begun)).await
        }
        Ok((spec, StreamFormat::Image)) => {
            let import = ImageImport { spec, options, parent: None };
            let work = |engine: Rc<Engine>, chunks, begun| engine.import_image(import, chunks, begun);
            upload(app, request, StreamFormat::Image, work).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Apply the changes of an `rbd diff` stream to an image
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/diff",
    params(("pool" = String, Path), ("image" = String, Path)),
    request_body(content_type = "application/vnd.forebay.diff"),
    responses((status = 200, body = api::AppliedDiff), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn import_diff(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    request: Request,
) -> Response {
    match image_spec(&pool, &image) {
        Ok(spec) => {
            let work = |engine: Rc<Engine>, chunks, begun| engine.import_diff(spec, chunks, begun);
            upload(app, request, StreamFormat::Diff, work).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// Passes the chunks of a request's body to `work`, and responds with its result.
async fn upload<T, Fut>(
    app: App,
    request: Request,
    format: StreamFormat,
    work: impl FnOnce(Rc<Engine>, mpsc::Receiver<Chunk>, oneshot::Sender<()>) -> Fut + Send + 'static,
) -> Response
where
    T: Serialize + Send + 'static,
    Fut: Future<Output = Result<T>> + 'static,
{
    let lines = request.headers().get(header::ACCEPT).is_some_and(|accept| accept == "application/x-ndjson");
    let (chunks, receiver) = mpsc::channel(CHUNKS_QUEUED);
    let (begun, mut wait_begun) = oneshot::channel();
    let mut work = Box::pin(app.engine.call(move |engine| work(engine, receiver, begun)));
    tokio::select! {
        biased;
        result = &mut work => return answer(result, lines),
        begun = &mut wait_begun => {
            if begun.is_err() {
                // The import has failed before accepting chunks.
                return answer(work.await, lines);
            }
        }
    }
    // The body is read only from here on, so that a client that waits for "100 Continue" sends none in vain.
    let fed = tokio::select! {
        biased;
        result = &mut work => return answer(result, lines),
        fed = feed(request.into_body(), format, chunks) => fed,
    };
    let result = work.await;
    // A malformed stream is the cause; the failure of the import follows from it.
    answer(fed.and(result), lines)
}

fn answer<T: Serialize>(result: Result<T>, lines: bool) -> Response {
    match result {
        Ok(imported) if lines => Json(StreamLine::Result(imported)).into_response(),
        Ok(imported) => Json(imported).into_response(),
        Err(failure) => failure.into_response(),
    }
}

/// Decodes a body into chunks.  Dropping `chunks` without an end makes the import fail; so the end is sent last, once nothing
/// has followed it.
async fn feed(body: Body, format: StreamFormat, chunks: mpsc::Sender<Chunk>) -> Result<()> {
    let mut body = body.into_data_stream();
    let mut decoder = ChunkDecoder::new(format);
    let mut end = None;
    while let Some(part) = poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await {
        let part = part.map_err(|error| Failure::failed(format!("the upload was interrupted: {error}")))?;
        let mut input = &part[..];
        while let Some(chunk) = decoder.next(&mut input)? {
            if matches!(chunk, Chunk::End) {
                end = Some(chunk);
            } else if chunks.send(chunk).await.is_err() {
                // The import has ended; its result has the reason.
                return Ok(());
            }
        }
    }
    decoder.finish()?;
    if let Some(end) = end {
        let _ = chunks.send(end).await;
    }
    Ok(())
}
