//! Device requests of a command, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, LocalFuture,
    Result,
};

use crate::session::StatusRun;

/// Maximum extents in a status reply; the client continues from its end.
const STATUS_RUNS_MAX: usize = 8 * 1024;
/// Maximum bytes covered by one status request.
const STATUS_BYTES_MAX: u64 = 16 << 30;
/// Bytes of the first query of a device's map; each further query doubles it.
const STATUS_LOOK: u64 = 16 << 20;
/// Maximum bytes of a query of a device's map.
const STATUS_LOOK_MAX: u64 = 256 << 20;

/// Result of a request.
#[derive(Debug)]
pub(super) enum NbdReplyData {
    /// Data read.
    Data(BufList),
    /// Success without data.
    Done,
    /// Allocation status.
    Status(Vec<StatusRun>),
}

/// Error of a request, and the byte offset if that is not the first byte of the request.
#[derive(Debug)]
pub(super) struct RequestFailure {
    pub(super) error: Error,
    pub(super) at: Option<u64>,
}

impl From<Error> for RequestFailure {
    fn from(error: Error) -> Self {
        Self { error, at: None }
    }
}

/// Request in flight.
pub(super) enum RequestFuture {
    /// Single device request, without another future around the device's own.
    One(LocalFuture<Result<BlockReply>>),
    /// Several device requests.
    Many(LocalFuture<std::result::Result<NbdReplyData, RequestFailure>>),
}

impl Future for RequestFuture {
    type Output = std::result::Result<NbdReplyData, RequestFailure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            RequestFuture::One(future) => future.as_mut().poll(cx).map(|reply| match reply {
                Ok(BlockReply::Data(data)) => Ok(NbdReplyData::Data(data)),
                Ok(BlockReply::Done) => Ok(NbdReplyData::Done),
                Err(error) => Err(error.into()),
            }),
            RequestFuture::Many(future) => future.as_mut().poll(cx),
        }
    }
}

/// Reads, in pieces if `extent` is longer than `transfer_max` bytes.
pub(super) fn read(device: &Rc<dyn BlockDevice>, extent: Extent, transfer_max: u64) -> RequestFuture {
    if extent.len <= transfer_max {
        return RequestFuture::One(device.submit(BlockRequest::Read(extent)));
    }
    let device = device.clone();
    RequestFuture::Many(Box::pin(async move {
        let mut data = BufList::new();
        for piece in pieces(extent, transfer_max) {
            let failed = |error| RequestFailure { error, at: Some(piece.offset) };
            let part = device.submit(BlockRequest::Read(piece)).await.map_err(failed)?.into_data();
            if part.len() as u64 != piece.len {
                return Err(failed(short_read()));
            }
            data.append(part);
        }
        Ok(NbdReplyData::Data(data))
    }))
}

/// Writes, in pieces if `extent` is longer than `transfer_max` bytes.
pub(super) fn write(
    device: &Rc<dyn BlockDevice>,
    extent: Extent,
    data: BufList,
    fua: bool,
    transfer_max: u64,
) -> RequestFuture {
    if extent.len <= transfer_max {
        return RequestFuture::One(device.submit(BlockRequest::Write { offset: extent.offset, data, fua }));
    }
    let device = device.clone();
    RequestFuture::Many(Box::pin(async move {
        for piece in pieces(extent, transfer_max) {
            let from = (piece.offset - extent.offset) as usize;
            let part = data.slice(from..from + piece.len as usize);
            let request = BlockRequest::Write { offset: piece.offset, data: part, fua };
            device.submit(request).await.map_err(|error| RequestFailure { error, at: Some(piece.offset) })?;
        }
        Ok(NbdReplyData::Done)
    }))
}

/// Discards, and flushes afterwards if `fua` is set.
pub(super) fn trim(device: &Rc<dyn BlockDevice>, extent: Extent, fua: bool) -> RequestFuture {
    if !fua {
        return RequestFuture::One(device.submit(BlockRequest::Discard(extent)));
    }
    let device = device.clone();
    RequestFuture::Many(Box::pin(async move {
        device.submit(BlockRequest::Discard(extent)).await?;
        device.submit(BlockRequest::Flush).await?;
        Ok(NbdReplyData::Done)
    }))
}

/// Returns the allocation status from the start of `extent` on; only the first run if `one`.
///
/// The queried ranges grow step by step, so that the cost depends on the length of the answer and not of the
/// request: clients ask for gigabytes and take a single extent.
pub(super) fn status(device: &Rc<dyn BlockDevice>, extent: Extent, one: bool) -> RequestFuture {
    let device = device.clone();
    RequestFuture::Many(Box::pin(async move {
        let mut runs: Vec<StatusRun> = Vec::new();
        let end = extent.offset + extent.len.min(STATUS_BYTES_MAX);
        let (mut at, mut look) = (extent.offset, STATUS_LOOK);
        while at < end && runs.len() <= if one { 1 } else { STATUS_RUNS_MAX } {
            let stretch = Extent::new(at, look.min(end - at));
            append(&mut runs, &device.map(stretch).await?, stretch)?;
            at += stretch.len;
            look = (look * 2).min(STATUS_LOOK_MAX);
        }
        runs.truncate(if one { 1 } else { STATUS_RUNS_MAX });
        Ok(NbdReplyData::Status(runs))
    }))
}

/// Appends a device's map of `stretch`.
///
/// # Errors
/// `Io` if the map does not cover `stretch` from its start without a gap.
fn append(runs: &mut Vec<StatusRun>, map: &ExtentMap, stretch: Extent) -> Result<()> {
    let mut at = stretch.offset;
    for run in map.runs() {
        if run.extent.offset != at {
            return Err(Error::new(ErrorKind::Io, "device returned an extent map with a gap"));
        }
        let len = run.extent.len.min(stretch.offset + stretch.len - at);
        push(runs, len, run.state);
        at += len;
    }
    if at != stretch.offset + stretch.len {
        return Err(Error::new(ErrorKind::Io, "device returned an incomplete extent map"));
    }
    Ok(())
}

fn push(runs: &mut Vec<StatusRun>, len: u64, state: ExtentState) {
    match runs.last_mut() {
        Some(last) if last.state == state => last.len += len,
        _ if len > 0 => runs.push(StatusRun { len, state }),
        _ => {}
    }
}

/// Splits `extent` into pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl Iterator<Item = Extent> {
    let len = len.max(1);
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}

/// Creates the error for a device that returned another length than requested.
pub(super) fn short_read() -> Error {
    Error::new(ErrorKind::Io, "device returned a different number of bytes than requested")
}
