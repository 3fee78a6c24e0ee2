//! What a command asks of the device, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{BlockDevice, BufList, Error, ErrorKind, Extent, LocalFuture, Reply, Request, Result};

use crate::wire::Status;

/// A piece of a read that is not sent anywhere.
pub(super) const VERIFY_PIECE: u64 = 1 << 20;

/// What a command came to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Bytes for the host.
    Data(BufList),
    /// Nothing to report.
    Done,
}

/// A command under way.
pub(super) enum Work {
    /// One request to the device, without a future around the device's own; whether it writes.
    One(LocalFuture<Result<Reply>>, bool),
    /// Whatever takes more.
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

/// The status for an error, which is said to the log as well.
fn status(error: &Error, writing: bool) -> Status {
    let status = Status::of(error, writing);
    match error.kind() {
        ErrorKind::Mismatch(_) => {}
        _ => tracing::debug!(%error, %status, "a command failed"),
    }
    status
}

type Device = Rc<dyn BlockDevice>;

/// A read; in pieces when the device wants it so.
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

/// A write; in pieces when the device wants it so.
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

/// Something that the device does with one request and without data.
pub(super) fn one(device: &Device, request: Request) -> Work {
    let writing = request.is_write();
    Work::One(device.submit(request), writing)
}

/// Whether the device holds `expect`.
pub(super) fn compare(device: &Device, extent: Extent, expect: BufList) -> Work {
    let device = device.clone();
    Work::Many(Box::pin(async move {
        let found = read_all(&device, extent).await?;
        let found = found.into_contiguous();
        if expect == found[..] { Ok(Outcome::Done) } else { Err(Status::COMPARE_FAILED.final_()) }
    }))
}

/// Reads, and forgets what was read.
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

/// `extent` in pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl Iterator<Item = Extent> {
    let len = len.max(1);
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}
