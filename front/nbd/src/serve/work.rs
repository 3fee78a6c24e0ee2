//! What a command asks of the device, as one future.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{
    BlockDevice, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, LocalFuture, Reply, Request, Result,
};

use crate::session::StatusRun;

/// Extents a status reply lists at most; the client asks again from where it ends.
const STATUS_RUNS_MAX: usize = 8 * 1024;
/// Bytes that one status request looks at, at most.
const STATUS_BYTES_MAX: u64 = 16 << 30;
/// The first look at a device's map; each further one is twice as long.
const STATUS_LOOK: u64 = 16 << 20;
/// The longest look at a device's map.
const STATUS_LOOK_MAX: u64 = 256 << 20;

/// What a request came to.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Bytes read.
    Data(BufList),
    /// Nothing to report.
    Done,
    /// What is allocated.
    Status(Vec<StatusRun>),
}

/// Why a request failed, and at which byte if that is not its first.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    pub(super) at: Option<u64>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, at: None }
    }
}

/// A request under way.
pub(super) enum Work {
    /// One request to the device, without a future around the device's own.
    One(LocalFuture<Result<Reply>>),
    /// Several of them.
    Many(LocalFuture<std::result::Result<Outcome, Failure>>),
}

impl Future for Work {
    type Output = std::result::Result<Outcome, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Work::One(future) => future.as_mut().poll(cx).map(|reply| match reply {
                Ok(Reply::Data(data)) => Ok(Outcome::Data(data)),
                Ok(Reply::Done) => Ok(Outcome::Done),
                Err(error) => Err(error.into()),
            }),
            Work::Many(future) => future.as_mut().poll(cx),
        }
    }
}

/// A read; in pieces when the device wants it so.
pub(super) fn read(device: &Rc<dyn BlockDevice>, extent: Extent, transfer_max: u64) -> Work {
    if extent.len <= transfer_max {
        return Work::One(device.submit(Request::Read(extent)));
    }
    let device = device.clone();
    Work::Many(Box::pin(async move {
        let mut data = BufList::new();
        for piece in pieces(extent, transfer_max) {
            let failed = |error| Failure { error, at: Some(piece.offset) };
            let part = device.submit(Request::Read(piece)).await.map_err(failed)?.into_data();
            if part.len() as u64 != piece.len {
                return Err(failed(short_read()));
            }
            data.append(part);
        }
        Ok(Outcome::Data(data))
    }))
}

/// A write; in pieces when the device wants it so.
pub(super) fn write(device: &Rc<dyn BlockDevice>, extent: Extent, data: BufList, fua: bool, transfer_max: u64) -> Work {
    if extent.len <= transfer_max {
        return Work::One(device.submit(Request::Write { offset: extent.offset, data, fua }));
    }
    let device = device.clone();
    Work::Many(Box::pin(async move {
        for piece in pieces(extent, transfer_max) {
            let from = (piece.offset - extent.offset) as usize;
            let part = data.slice(from..from + piece.len as usize);
            let request = Request::Write { offset: piece.offset, data: part, fua };
            device.submit(request).await.map_err(|error| Failure { error, at: Some(piece.offset) })?;
        }
        Ok(Outcome::Done)
    }))
}

/// A discard, and then a flush if it is to be durable.
pub(super) fn trim(device: &Rc<dyn BlockDevice>, extent: Extent, fua: bool) -> Work {
    if !fua {
        return Work::One(device.submit(Request::Discard(extent)));
    }
    let device = device.clone();
    Work::Many(Box::pin(async move {
        device.submit(Request::Discard(extent)).await?;
        device.submit(Request::Flush).await?;
        Ok(Outcome::Done)
    }))
}

/// What is allocated from the start of `extent` on; of the first run only, if `one`.
///
/// The device is asked for longer and longer stretches, so that what this costs follows what is answered and not
/// what was asked for: clients ask for gigabytes and take a single extent.
pub(super) fn status(device: &Rc<dyn BlockDevice>, extent: Extent, one: bool) -> Work {
    let device = device.clone();
    Work::Many(Box::pin(async move {
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
        Ok(Outcome::Status(runs))
    }))
}

/// Appends a device's map of `stretch`, which has to cover it from its start without a gap.
fn append(runs: &mut Vec<StatusRun>, map: &ExtentMap, stretch: Extent) -> Result<()> {
    let mut at = stretch.offset;
    for run in map.runs() {
        if run.extent.offset != at {
            return Err(Error::new(ErrorKind::Io, "a map with a gap"));
        }
        let len = run.extent.len.min(stretch.offset + stretch.len - at);
        push(runs, len, run.state);
        at += len;
    }
    if at != stretch.offset + stretch.len {
        return Err(Error::new(ErrorKind::Io, "a map that ends early"));
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

/// `extent` in pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl Iterator<Item = Extent> {
    let len = len.max(1);
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}

/// The device answered a read with another length than asked for.
pub(super) fn short_read() -> Error {
    Error::new(ErrorKind::Io, "the device returned another length than was read")
}
