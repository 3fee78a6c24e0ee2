//! Import and export over HTTP, in the format of [`forebay_image::diff`].

use std::future::poll_fn;
use std::pin::Pin;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Json, Response};
use forebay_image::diff::{self, DiffDecoder, DiffEvent};
use forebay_reactor::Buf;
use futures_core::Stream;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};

use super::control::{App, ChannelBody};
use crate::api::{self, ErrorBody, StreamLine, default_object_size};
use crate::engine::transfer::{CHUNKS_QUEUED, Chunk, ImportParameters};
use crate::failure::{Failure, Result};
use crate::spec::{image_spec, source_spec};

/// MIME type of a stream.
pub const CONTENT_TYPE: &str = "application/vnd.forebay.diff";

/// Query for an export.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportQuery {
    /// Snapshot to read; the image as it is now if omitted.
    snapshot: Option<String>,
}

/// Download the content of an image or snapshot as an `rbd diff v1` stream
#[utoipa::path(get, path = "/v1/images/{pool}/{image}/data",
    params(("pool" = String, Path), ("image" = String, Path), ("snapshot" = Option<String>, Query)),
    responses((status = 200, content_type = "application/vnd.forebay.diff"), (status = 404, body = ErrorBody)))]
pub async fn export(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    Query(ExportQuery { snapshot }): Query<ExportQuery>,
) -> Response {
    let source = match source_spec(&pool, &image, snapshot.as_deref()) {
        Ok(source) => source,
        Err(failure) => return failure.into_response(),
    };
    let (sender, mut chunks) = mpsc::channel(CHUNKS_QUEUED);
    let work = app.engine.call(move |engine| engine.export(source, sender));
    // Until the first chunk arrives, a failure can still be a separate response.
    let Some(first) = chunks.recv().await else {
        return match work.await {
            Ok(()) => Failure::failed("the export ended before it began").into_response(),
            Err(failure) => failure.into_response(),
        };
    };
    let (out, body) = mpsc::channel(CHUNKS_QUEUED);
    tokio::spawn(async move {
        let mut next = Some(first);
        let mut head = diff::MAGIC.to_vec();
        while let Some(chunk) = next {
            for bytes in encode(std::mem::take(&mut head), chunk) {
                if out.send(Ok(bytes)).await.is_err() {
                    return;
                }
            }
            next = chunks.recv().await;
        }
        if let Err(failure) = work.await {
            let mut record = Vec::new();
            diff::put_failure(&mut record, &serde_json::to_vec(&failure).expect("plain data becomes JSON"));
            // A disconnected client does not receive it.
            let _ = out.send(Ok(record.into())).await;
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

/// Appends the records of a chunk to `head`.
fn encode(mut head: Vec<u8>, chunk: Chunk) -> Vec<Bytes> {
    match chunk {
        Chunk::Size(size) => diff::put_size(&mut head, size),
        Chunk::Zero(offset, len) => diff::put_zero(&mut head, offset, len),
        Chunk::End => diff::put_end(&mut head),
        Chunk::Data(offset, data) => {
            diff::put_data_head(&mut head, offset, data.len() as u64);
            return vec![head.into(), Bytes::from_owner(Owned(data))];
        }
    }
    vec![head.into()]
}

/// Query for an import.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportQuery {
    /// Size of the new image in bytes, if known.
    size: Option<u64>,
    /// Object size in bytes.
    #[serde(default = "default_object_size")]
    object_size: u64,
}

/// Create an image with the content of an `rbd diff v1` stream
#[utoipa::path(put, path = "/v1/images/{pool}/{image}/data",
    params(("pool" = String, Path), ("image" = String, Path), ("size" = Option<u64>, Query),
        ("object_size" = Option<u64>, Query)),
    request_body(content_type = "application/vnd.forebay.diff"),
    responses((status = 200, body = api::ImportResult), (status = 409, body = ErrorBody)))]
pub async fn import(
    State(app): State<App>,
    Path((pool, image)): Path<(String, String)>,
    Query(query): Query<ImportQuery>,
    request: Request,
) -> Response {
    let spec = match image_spec(&pool, &image) {
        Ok(spec) => spec,
        Err(failure) => return failure.into_response(),
    };
    let lines = request.headers().get(header::ACCEPT).is_some_and(|accept| accept == "application/x-ndjson");
    let (chunks, receiver) = mpsc::channel(CHUNKS_QUEUED);
    let (begun, mut wait_begun) = oneshot::channel();
    let import = ImportParameters { spec, object_size: query.object_size, size: query.size };
    let mut work = Box::pin(app.engine.call(move |engine| engine.import(import, receiver, begun)));
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
        fed = feed(request.into_body(), chunks) => fed,
    };
    let result = work.await;
    // A malformed stream is the cause; the failure of the import follows from it.
    answer(fed.and(result), lines)
}

fn answer(result: Result<api::ImportResult>, lines: bool) -> Response {
    match result {
        Ok(imported) if lines => Json(StreamLine::Result(imported)).into_response(),
        Ok(imported) => Json(imported).into_response(),
        Err(failure) => failure.into_response(),
    }
}

/// Decodes a body into chunks.  Dropping `chunks` without an end makes the import fail.
async fn feed(body: Body, chunks: mpsc::Sender<Chunk>) -> Result<()> {
    let mut body = body.into_data_stream();
    let mut decoder = DiffDecoder::new();
    while let Some(part) = poll_fn(|cx| Pin::new(&mut body).poll_next(cx)).await {
        let part = part.map_err(|error| Failure::failed(format!("the upload was interrupted: {error}")))?;
        let mut input = &part[..];
        while let Some(event) = decoder.next(&mut input).map_err(|error| Failure::invalid(error.to_string()))? {
            let chunk = match event {
                DiffEvent::Size(size) => Chunk::Size(size),
                DiffEvent::Data(offset, data) => Chunk::Data(offset, Buf::copy_of(data)),
                DiffEvent::Zero(offset, len) => Chunk::Zero(offset, len),
                DiffEvent::End => Chunk::End,
                DiffEvent::Failure(text) => {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    return Err(Failure::failed(format!("the client aborted the upload: {text}")));
                }
            };
            if chunks.send(chunk).await.is_err() {
                // The import has ended; its result has the reason.
                return Ok(());
            }
        }
    }
    decoder.finish().map_err(|error| Failure::invalid(error.to_string()))
}
