//! Device requests of a command, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{BlockDevice, BufList, Error, ErrorKind, Extent, LocalFuture, Reply, Request, Result};

use crate::wire::Status;

/// Bytes of one piece of a Verify, which is read and not sent.
pub(super) const VERIFY_PIECE: u64 = 1 << 20;

/// Result of a command.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Data for the host.
    Data(BufList),
    /// Success without data.
    Done,
}

/// Command in flight.
pub(super) enum Work {
    /// Single device request, without another future around the device's own; true if it writes.
    One(LocalFuture<Result<Reply>>, bool),
    /// Command that takes several requests, or none.
    Many(LocalFuture<std::result::Result<Outcome, Status>>),
}

impl Future for Work {
    type Output = std::result::Result<Outcome, Status>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Work::One(future, writing) => {
                let writing = *writing;
                future.as_mut().poll(cx).map(|reply| match reply {
                    Ok(Reply::Data(data)) => Ok(Outcome::Data(data)),
                    Ok(Reply::Done) => Ok(Outcome::Done),
                    Err(error) => Err(status(&error, writing)),
                })
            }
            Work::Many(future) => future.as_mut().poll(cx),
        }
    }
}

/// Returns the status for an error, and logs it unless it is a miscompare.
fn status(error: &Error, writing: bool) -> Status {
    let status = Status::of(error, writing);
    match error.kind() {
        ErrorKind::Mismatch(_) => {}
        _ => tracing::debug!(%error, %status, "a command failed"),
    }
    status
}

type Device = Rc<dyn BlockDevice>;

/// Reads, in pieces if `extent` exceeds the device's maximum transfer size.
pub(super) fn read(device: &Device, extent: Extent) -> Work {
    if extent.len <= u64::from(device.geometry().transfer_max) {
        return Work::One(device.submit(Request::Read(extent)), false);
    }
    let device = device.clone();
    Work::Many(Box::pin(async move { read_all(&device, extent).await.map(Outcome::Data) }))
}

async fn read_all(device: &Device, extent: Extent) -> std::result::Result<BufList, Status> {
    let mut data = BufList::new();
    for piece in pieces(extent, device.geometry().transfer_max.into()) {
        let part = device.submit(Request::Read(piece)).await.map_err(|error| status(&error, false))?;
        data.append(part.into_data());
    }
    if data.len() as u64 != extent.len {
        return Err(Status::INTERNAL);
    }
    Ok(data)
}

/// Writes, in pieces if `extent` exceeds the device's maximum transfer size.
pub(super) fn write(device: &Device, extent: Extent, data: BufList, fua: bool) -> Work {
    let transfer_max = u64::from(device.geometry().transfer_max);
    if extent.len <= transfer_max {
        return Work::One(device.submit(Request::Write { offset: extent.offset, data, fua }), true);
    }
    let device = device.clone();
    Work::Many(Box::pin(async move {
        for piece in pieces(extent, transfer_max) {
            let from = (piece.offset - extent.offset) as usize;
            let part = data.slice(from..from + piece.len as usize);
            let request = Request::Write { offset: piece.offset, data: part, fua };
            device.submit(request).await.map_err(|error| status(&error, true))?;
        }
        Ok(Outcome::Done)
    }))
}

/// Submits a single request that returns no data.
pub(super) fn one(device: &Device, request: Request) -> Work {
    let writing = request.is_write();
    Work::One(device.submit(request), writing)
}

/// Compares the device's data with `expect`.
pub(super) fn compare(device: &Device, extent: Extent, expect: BufList) -> Work {
    let device = device.clone();
    Work::Many(Box::pin(async move {
        let found = read_all(&device, extent).await?;
        let found = found.into_contiguous();
        if expect == found[..] { Ok(Outcome::Done) } else { Err(Status::COMPARE_FAILED.final_()) }
    }))
}

/// Reads in pieces of `VERIFY_PIECE` bytes, and discards the data.
pub(super) fn verify(device: &Device, extent: Extent) -> Work {
    let device = device.clone();
    Work::Many(Box::pin(async move {
        for piece in pieces(extent, VERIFY_PIECE) {
            read_all(&device, piece).await?;
        }
        Ok(Outcome::Done)
    }))
}

/// Discards ranges, one after the other.
pub(super) fn discard(device: &Device, ranges: Vec<Extent>) -> Work {
    if let [extent] = ranges[..] {
        return one(device, Request::Discard(extent));
    }
    let device = device.clone();
    Work::Many(Box::pin(async move {
        for extent in ranges {
            device.submit(Request::Discard(extent)).await.map_err(|error| status(&error, true))?;
        }
        Ok(Outcome::Done)
    }))
}

/// Splits `extent` into pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl Iterator<Item = Extent> {
    let len = len.max(1);
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}
