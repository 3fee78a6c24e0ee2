//! Device requests of a command, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, LocalFuture, Result};

use crate::wire::NvmeStatus;

/// Bytes of one piece of a Verify, which is read and not sent.
pub(super) const VERIFY_PIECE: u64 = 1 << 20;

/// Result of a command.
#[derive(Debug)]
pub(super) enum NvmeCommandData {
    /// Data for the host.
    Data(BufList),
    /// Success without data.
    Done,
}

/// Command in flight.
pub(super) enum DeviceCommand {
    /// Single device request, without another future around the device's own; true if it writes.
    One(LocalFuture<Result<BlockReply>>, bool),
    /// Command that takes several requests, or none.
    Many(LocalFuture<std::result::Result<NvmeCommandData, NvmeStatus>>),
}

impl Future for DeviceCommand {
    type Output = std::result::Result<NvmeCommandData, NvmeStatus>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            DeviceCommand::One(future, writing) => {
                let writing = *writing;
                future.as_mut().poll(cx).map(|reply| match reply {
                    Ok(BlockReply::Data(data)) => Ok(NvmeCommandData::Data(data)),
                    Ok(BlockReply::Done) => Ok(NvmeCommandData::Done),
                    Err(error) => Err(status(&error, writing)),
                })
            }
            DeviceCommand::Many(future) => future.as_mut().poll(cx),
        }
    }
}

/// Returns the status for an error, and logs it unless it is a miscompare.
fn status(error: &Error, writing: bool) -> NvmeStatus {
    let status = NvmeStatus::of(error, writing);
    match error.kind() {
        ErrorKind::Mismatch(_) => {}
        _ => tracing::debug!(%error, %status, "command failed at the device"),
    }
    status
}

type Device = Rc<dyn BlockDevice>;

/// Reads, in pieces if `extent` exceeds the device's maximum transfer size.
pub(super) fn read(device: &Device, extent: Extent) -> DeviceCommand {
    if extent.len <= u64::from(device.geometry().transfer_max) {
        return DeviceCommand::One(device.submit(BlockRequest::Read(extent)), false);
    }
    let device = device.clone();
    DeviceCommand::Many(Box::pin(async move { read_all(&device, extent).await.map(NvmeCommandData::Data) }))
}

async fn read_all(device: &Device, extent: Extent) -> std::result::Result<BufList, NvmeStatus> {
    let mut data = BufList::new();
    for piece in pieces(extent, device.geometry().transfer_max.into()) {
        let part = device.submit(BlockRequest::Read(piece)).await.map_err(|error| status(&error, false))?;
        data.append(part.into_data());
    }
    if data.len() as u64 != extent.len {
        return Err(NvmeStatus::INTERNAL);
    }
    Ok(data)
}

/// Writes, in pieces if `extent` exceeds the device's maximum transfer size.
pub(super) fn write(device: &Device, extent: Extent, data: BufList, fua: bool) -> DeviceCommand {
    let transfer_max = u64::from(device.geometry().transfer_max);
    if extent.len <= transfer_max {
        return DeviceCommand::One(device.submit(BlockRequest::Write { offset: extent.offset, data, fua }), true);
    }
    let device = device.clone();
    DeviceCommand::Many(Box::pin(async move {
        for piece in pieces(extent, transfer_max) {
            let from = (piece.offset - extent.offset) as usize;
            let part = data.slice(from..from + piece.len as usize);
            let request = BlockRequest::Write { offset: piece.offset, data: part, fua };
            device.submit(request).await.map_err(|error| status(&error, true))?;
        }
        Ok(NvmeCommandData::Done)
    }))
}

/// Submits a single request that returns no data.
pub(super) fn one(device: &Device, request: BlockRequest) -> DeviceCommand {
    let writing = request.is_write();
    DeviceCommand::One(device.submit(request), writing)
}

/// Compares the device's data with `expect`.
pub(super) fn compare(device: &Device, extent: Extent, expect: BufList) -> DeviceCommand {
    let device = device.clone();
    DeviceCommand::Many(Box::pin(async move {
        let found = read_all(&device, extent).await?;
        let found = found.into_contiguous();
        if expect == found[..] { Ok(NvmeCommandData::Done) } else { Err(NvmeStatus::COMPARE_FAILED.final_()) }
    }))
}

/// Reads in pieces of `VERIFY_PIECE` bytes, and discards the data.
pub(super) fn verify(device: &Device, extent: Extent) -> DeviceCommand {
    let device = device.clone();
    DeviceCommand::Many(Box::pin(async move {
        for piece in pieces(extent, VERIFY_PIECE) {
            read_all(&device, piece).await?;
        }
        Ok(NvmeCommandData::Done)
    }))
}

/// Discards ranges, one after the other.
pub(super) fn discard(device: &Device, ranges: Vec<Extent>) -> DeviceCommand {
    if let [extent] = ranges[..] {
        return one(device, BlockRequest::Discard(extent));
    }
    let device = device.clone();
    DeviceCommand::Many(Box::pin(async move {
        for extent in ranges {
            device.submit(BlockRequest::Discard(extent)).await.map_err(|error| status(&error, true))?;
        }
        Ok(NvmeCommandData::Done)
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
