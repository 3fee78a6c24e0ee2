//! Device requests of a command, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, LocalFuture, Result};
use forebay_reactor::Buf;
use forebay_reactor::sync::join_all;

use super::payload::{put_status, scatter};
use super::{BlockCommand, SERIAL_LEN, status};
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;

/// Result of a request.
#[derive(Debug, Clone)]
pub struct BlockDone {
    /// Value of the [status byte](super::status).
    pub status: u8,
    /// Data for the guest.
    pub data: BufList,
    /// Reason of a status other than success.
    pub error: Option<Error>,
}

impl BlockDone {
    /// Creates a success.
    fn success(data: BufList) -> Self {
        Self { status: status::OK, data, error: None }
    }
}

impl From<Error> for BlockDone {
    fn from(error: Error) -> Self {
        let status = if error.kind() == ErrorKind::Unsupported { status::UNSUPP } else { status::IOERR };
        Self { status, data: BufList::new(), error: Some(error) }
    }
}

/// Request in flight.
pub enum BlockFuture {
    /// Request without a device request; empty once it has been polled.
    Ready(Option<BlockDone>),
    /// Single device request, without another future around the device's own.
    One {
        /// Device request.
        future: LocalFuture<Result<BlockReply>>,
        /// Bytes that its reply has.
        len: u64,
    },
    /// Several device requests.
    Many(LocalFuture<Result<BufList>>),
}

impl Future for BlockFuture {
    type Output = BlockDone;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<BlockDone> {
        let result = match &mut *self {
            BlockFuture::Ready(done) => return Poll::Ready(done.take().expect("poll after completion")),
            BlockFuture::One { future, len } => {
                let len = *len;
                future.as_mut().poll(cx).map(|reply| reply.and_then(|reply| of_length(reply, len)))
            }
            BlockFuture::Many(future) => future.as_mut().poll(cx),
        };
        result.map(|result| result.map_or_else(BlockDone::from, BlockDone::success))
    }
}

/// Returns the data of a reply.
///
/// # Errors
/// `Io` if it does not have `len` bytes.
fn of_length(reply: BlockReply, len: u64) -> Result<BufList> {
    let data = reply.into_data();
    if data.len() as u64 == len {
        return Ok(data);
    }
    Err(Error::new(ErrorKind::Io, format!("device returned {} bytes of {len} requested", data.len())))
}

/// Executes a command; `data` are the bytes of a write ([`BlockCommand::gather`]), `serial` is the serial number,
/// padded with zeroes.  Reads and writes are split if they are longer than `transfer_max` bytes.  The device requests are
/// submitted by this call, except those that wait for others.
///
/// # Panics
/// When a write's data has another length than its range.
pub fn execute(
    device: &Rc<dyn BlockDevice>,
    command: BlockCommand,
    data: BufList,
    serial: &[u8; SERIAL_LEN],
    transfer_max: u32,
) -> BlockFuture {
    let transfer_max = u64::from(transfer_max.max(1));
    let one = |request, len| BlockFuture::One { future: device.submit(request), len };
    match command {
        BlockCommand::Read(Extent { len: 0, .. }) | BlockCommand::Write { extent: Extent { len: 0, .. }, .. } => {
            BlockFuture::Ready(Some(BlockDone::success(BufList::new())))
        }
        BlockCommand::Read(extent) if extent.len <= transfer_max => one(BlockRequest::Read(extent), extent.len),
        BlockCommand::Read(extent) => BlockFuture::Many(Box::pin(read(device.clone(), extent, transfer_max))),
        BlockCommand::Write { extent, fua } => {
            assert_eq!(data.len() as u64, extent.len, "data of a write");
            if extent.len <= transfer_max {
                return one(BlockRequest::Write { offset: extent.offset, data, fua }, 0);
            }
            BlockFuture::Many(Box::pin(write(device.clone(), extent, data, fua, transfer_max)))
        }
        BlockCommand::Flush => one(BlockRequest::Flush, 0),
        BlockCommand::GetId { len } => {
            BlockFuture::Ready(Some(BlockDone::success(Buf::copy_of(&serial[..len.min(SERIAL_LEN)]).into())))
        }
        BlockCommand::Discard { extents, fua } => {
            all(device, extents.into_iter().map(BlockRequest::Discard).collect(), fua)
        }
        BlockCommand::WriteZeroes { extents, fua } => {
            let zero = |zeroed: super::ZeroedExtent| {
                let super::ZeroedExtent { extent, no_unmap } = zeroed;
                BlockRequest::WriteZeroes { extent, no_unmap, fua }
            };
            all(device, extents.into_iter().map(zero).collect(), false)
        }
        BlockCommand::Refused(_, refusal) => {
            let kind = if refusal.status() == status::UNSUPP { ErrorKind::Unsupported } else { ErrorKind::Invalid };
            let error = Error::new(kind, refusal.to_string());
            BlockFuture::Ready(Some(BlockDone { status: refusal.status(), data: BufList::new(), error: Some(error) }))
        }
    }
}

async fn read(device: Rc<dyn BlockDevice>, extent: Extent, transfer_max: u64) -> Result<BufList> {
    let mut data = BufList::new();
    for piece in pieces(extent, transfer_max) {
        let reply = device.submit(BlockRequest::Read(piece)).await?;
        data.append(of_length(reply, piece.len)?);
    }
    Ok(data)
}

async fn write(
    device: Rc<dyn BlockDevice>,
    extent: Extent,
    data: BufList,
    fua: bool,
    transfer_max: u64,
) -> Result<BufList> {
    for piece in pieces(extent, transfer_max) {
        let from = (piece.offset - extent.offset) as usize;
        let part = data.slice(from..from + piece.len as usize);
        device.submit(BlockRequest::Write { offset: piece.offset, data: part, fua }).await?;
    }
    Ok(BufList::new())
}

/// Executes requests together, and flushes once all are done if `flush` is set.
fn all(device: &Rc<dyn BlockDevice>, mut requests: Vec<BlockRequest>, flush: bool) -> BlockFuture {
    if requests.len() + usize::from(flush) == 1 {
        let request = requests.pop().unwrap_or(BlockRequest::Flush);
        return BlockFuture::One { future: device.submit(request), len: 0 };
    }
    let in_flight: Vec<_> = requests.into_iter().map(|request| device.submit(request)).collect();
    let device = device.clone();
    BlockFuture::Many(Box::pin(async move {
        join_all(in_flight).await.into_iter().collect::<Result<Vec<_>>>()?;
        if flush {
            device.submit(BlockRequest::Flush).await?;
        }
        Ok(BufList::new())
    }))
}

/// Splits `extent` into pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl Iterator<Item = Extent> {
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}

/// Writes the data and the status of a request to its buffer, and then logs the written pages; returns the number of
/// bytes for the used ring.
///
/// They are counted from the beginning of the buffer (section 2.7.8.2), so where the data of a failed read is missing,
/// the status behind it is not among them.
pub fn complete(writable: &[GuestPart], done: &BlockDone, log: Option<&DirtyLog>) -> u32 {
    let space = super::buffer_len(writable).saturating_sub(1);
    let written = scatter(&done.data, writable).min(space);
    let status_at = put_status(writable, done.status);
    if let Some(log) = log {
        log.mark_parts(writable, written);
        if let Some(at) = status_at {
            log.mark(at, 1);
        }
    }
    let used = if written == space { written + u64::from(status_at.is_some()) } else { written };
    u32::try_from(used).unwrap_or(u32::MAX)
}
