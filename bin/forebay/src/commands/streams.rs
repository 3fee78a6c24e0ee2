//! Streams to and from the daemon, or the engine of this process.

use std::future::Future;
use std::io::Read;
use std::rc::Rc;
use std::thread;

use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};

use crate::client::http::{Begun, SentRequest, Upload};
use crate::client::session::CommandSession;
use crate::engine::Engine;
use crate::engine::transfer::{CHUNK_LEN_MAX, CHUNKS_QUEUED, Chunk};
use crate::failure::{Failure, Result};
use crate::transfer::records::{ChunkDecoder, ChunkEncoder, StreamFormat};
use crate::transfer::stream_file::StreamSource;

/// Part of a stream that is received: a chunk as such, and then its bytes.
pub enum Received<'a> {
    /// Decoded chunk.
    Chunk(&'a Chunk),
    /// Bytes of the stream, in order.
    Bytes(&'a [u8]),
}

/// Receives a stream: what the daemon answers to a GET of `target`, or what `work` sends.
pub fn receive<Fut>(
    session: &CommandSession,
    target: &str,
    format: StreamFormat,
    work: impl FnOnce(Rc<Engine>, mpsc::Sender<Chunk>) -> Fut + Send + 'static,
    mut each: impl FnMut(Received<'_>) -> Result<()>,
) -> Result<()>
where
    Fut: Future<Output = Result<()>> + 'static,
{
    let direct = match session {
        CommandSession::Direct(direct) => direct,
        CommandSession::Daemon(client) => {
            let mut response = SentRequest::send(&client.socket, "GET", target, None)
                .and_then(|request| request.response(None))
                .map_err(|error| client.lost(error))?;
            if response.status >= 300 {
                return Err(client.read_error(response));
            }
            let mut decoder = ChunkDecoder::new(format);
            let mut buf = vec![0; CHUNK_LEN_MAX];
            loop {
                let got = response.read(&mut buf).map_err(|error| client.lost(error))?;
                if got == 0 {
                    return decoder.finish().map_err(|failure| failure.context("the daemon's reply"));
                }
                let mut input = &buf[..got];
                while let Some(chunk) = decoder.next(&mut input)? {
                    each(Received::Chunk(&chunk))?;
                }
                each(Received::Bytes(&buf[..got]))?;
            }
        }
    };
    let (sender, mut chunks) = mpsc::channel(CHUNKS_QUEUED);
    let engine = direct.engine().clone();
    let work = thread::spawn(move || engine.call_blocking(move |engine| work(engine, sender)));
    let mut encoder = ChunkEncoder::new(format);
    let mut received = Ok(());
    while let Some(chunk) = chunks.blocking_recv() {
        received = each(Received::Chunk(&chunk)).and_then(|()| {
            let (head, data) = encoder.encode(chunk);
            each(Received::Bytes(&head))?;
            data.map_or(Ok(()), |data| each(Received::Bytes(&data)))
        });
        if received.is_err() {
            break;
        }
    }
    drop(chunks);
    let result = work.join().unwrap_or_else(|_| Err(Failure::failed("the export ended with a panic")));
    received.and(result)
}

/// Sends a stream: as the body of a PUT of `target` to the daemon, or as chunks to `work`.  `progress` is called with the
/// number of bytes read.
pub fn send<T, Fut>(
    session: &CommandSession,
    target: &str,
    format: StreamFormat,
    mut source: StreamSource,
    work: impl FnOnce(Rc<Engine>, mpsc::Receiver<Chunk>, oneshot::Sender<()>) -> Fut + Send + 'static,
    mut progress: impl FnMut(u64),
) -> Result<T>
where
    T: DeserializeOwned + Send + 'static,
    Fut: Future<Output = Result<T>> + 'static,
{
    let mut buf = vec![0; CHUNK_LEN_MAX];
    let direct = match session {
        CommandSession::Direct(direct) => direct,
        CommandSession::Daemon(client) => {
            let begun = Upload::begin(&client.socket, "PUT", target).map_err(|error| client.lost(error))?;
            let mut upload = match begun {
                Begun::Upload(upload) => upload,
                Begun::Answered(response) => return client.read_lines(response, |_| {}),
            };
            let response = loop {
                let got = source.read(&mut buf)?;
                progress(source.position);
                if got == 0 {
                    break upload.finish();
                }
                // A daemon that stops reading has said why, or is about to.
                if upload.write(&[&buf[..got]]).is_err() {
                    break upload.answer();
                }
            };
            return client.read_lines(response.map_err(|error| client.lost(error))?, |_| {});
        }
    };
    let (chunks, receiver) = mpsc::channel(CHUNKS_QUEUED);
    let (begun, _) = oneshot::channel();
    let engine = direct.engine().clone();
    let work = thread::spawn(move || engine.call_blocking(move |engine| work(engine, receiver, begun)));
    // Ends early, without an end chunk, when the source fails or the receiver is gone.
    let fed = (|| {
        let mut decoder = ChunkDecoder::new(format);
        let mut end = None;
        loop {
            let got = source.read(&mut buf)?;
            progress(source.position);
            if got == 0 {
                decoder.finish()?;
                if let Some(end) = end {
                    let _ = chunks.blocking_send(end);
                }
                return Ok(());
            }
            let mut input = &buf[..got];
            while let Some(chunk) = decoder.next(&mut input)? {
                if matches!(chunk, Chunk::End) {
                    // Sent once nothing has followed it.
                    end = Some(chunk);
                } else if chunks.blocking_send(chunk).is_err() {
                    return Ok(());
                }
            }
        }
    })();
    drop(chunks);
    let result = work.join().unwrap_or_else(|_| Err(Failure::failed("the import ended with a panic")));
    fed.and(result)
}
