//! Device requests of a command, as one future: the only part of a unit that awaits.

mod copy;

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::reservation::{Refusal, ReservationChange};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, BufMut, Error, ErrorKind, Extent, ExtentState, LocalFuture,
};

use super::{LogicalUnit, ScsiFailure};
use crate::cdb::{Compare, LbaRange};
use crate::sense::{Sense, code, key};
use crate::{BLOCK, inquiry, reserve};
pub(super) use copy::third_party_copy;

/// Chunk size in bytes for commands that cover more data than they transfer.
const PIECE: u64 = 1 << 20;
/// Maximum number of descriptors in GET LBA STATUS.
const STATUS_RUNS_MAX: usize = 256;
/// Bytes of the first allocation map query of GET LBA STATUS; each further query is twice as long.
const STATUS_LOOK: u64 = 16 << 20;
/// Maximum number of bytes that one GET LBA STATUS examines.
const STATUS_BYTES_MAX: u64 = 4 << 30;

/// Result of a reservation action: the change, or the refusal.
type Applied = forebay_block::Result<Result<ReservationChange, Refusal>>;

/// Outcome of a command: data for the initiator, or the failure.
pub type ScsiResult = Result<BufList, ScsiFailure>;

/// Command in flight.
pub enum CommandFuture {
    /// Single read, without a future around the device's own.
    Read(LocalFuture<forebay_block::Result<BlockReply>>),
    /// Single write, in the same way.
    Write(LocalFuture<forebay_block::Result<BlockReply>>),
    /// Any other command.
    Composite(LocalFuture<ScsiResult>),
}

impl Future for CommandFuture {
    type Output = ScsiResult;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ScsiResult> {
        match &mut *self {
            CommandFuture::Read(future) => future.as_mut().poll(cx).map(|reply| match reply {
                Ok(reply) => Ok(reply.into_data()),
                Err(error) => Err(failed(&error, false)),
            }),
            CommandFuture::Write(future) => future.as_mut().poll(cx).map(|reply| match reply {
                Ok(_) => Ok(BufList::new()),
                Err(error) => Err(failed(&error, true)),
            }),
            CommandFuture::Composite(future) => future.as_mut().poll(cx),
        }
    }
}

fn failed(error: &Error, writing: bool) -> ScsiFailure {
    tracing::debug!(%error, "SCSI command failed");
    ScsiFailure::of(error, writing)
}

/// Combines several requests into one command.
pub(crate) fn composite(future: impl Future<Output = ScsiResult> + 'static) -> CommandFuture {
    CommandFuture::Composite(Box::pin(future))
}

/// Converts an LBA range to bytes.
pub(crate) fn extent(run: LbaRange) -> Extent {
    Extent::new(run.lba * u64::from(BLOCK), u64::from(run.blocks) * u64::from(BLOCK))
}

/// Splits `extent` into pieces of at most `len` bytes.
fn pieces(extent: Extent, len: u64) -> impl DoubleEndedIterator<Item = Extent> {
    let len = len.max(u64::from(BLOCK));
    (0..extent.len.div_ceil(len)).map(move |index| {
        let from = index * len;
        Extent::new(extent.offset + from, len.min(extent.len - from))
    })
}

async fn fetch(device: &Rc<dyn BlockDevice>, extent: Extent) -> Result<BufList, ScsiFailure> {
    let reply = device.submit(BlockRequest::Read(extent)).await.map_err(|error| failed(&error, false))?;
    let data = reply.into_data();
    if data.len() as u64 != extent.len {
        return Err(failed(
            &Error::new(ErrorKind::Io, "device returned a different number of bytes than requested"),
            false,
        ));
    }
    Ok(data)
}

async fn store(device: &Rc<dyn BlockDevice>, offset: u64, data: BufList, fua: bool) -> Result<(), ScsiFailure> {
    let done = device.submit(BlockRequest::Write { offset, data, fua }).await;
    done.map(drop).map_err(|error| failed(&error, true))
}

/// Executes READ of at least one block.
#[inline]
pub(crate) fn read(unit: &Rc<LogicalUnit>, run: LbaRange) -> CommandFuture {
    let extent = extent(run);
    if extent.len <= unit.transfer_max() && !run.fua {
        return CommandFuture::Read(unit.device().submit(BlockRequest::Read(extent)));
    }
    let unit = unit.clone();
    composite(async move {
        if run.fua {
            // With FUA, cached writes have to be durable before the read completes.
            unit.device().submit(BlockRequest::Flush).await.map_err(|error| failed(&error, true))?;
        }
        let mut data = BufList::new();
        for piece in pieces(extent, unit.transfer_max()) {
            data.append(fetch(unit.device(), piece).await?);
        }
        Ok(data)
    })
}

/// Executes WRITE of at least one block.
#[inline]
pub(crate) fn write(unit: &Rc<LogicalUnit>, run: LbaRange, data: BufList) -> CommandFuture {
    let offset = run.lba * u64::from(BLOCK);
    if data.len() as u64 <= unit.transfer_max() {
        return CommandFuture::Write(unit.device().submit(BlockRequest::Write { offset, data, fua: run.fua }));
    }
    let unit = unit.clone();
    composite(async move {
        for piece in pieces(extent(run), unit.transfer_max()) {
            let from = (piece.offset - offset) as usize;
            let part = data.slice(from..from + piece.len as usize);
            store(unit.device(), piece.offset, part, run.fua).await?;
        }
        Ok(BufList::new())
    })
}

/// Executes WRITE AND VERIFY: writes, flushes, reads back, and compares if `compare` is set.
pub(crate) fn write_verify(unit: &Rc<LogicalUnit>, run: LbaRange, data: BufList, compare: bool) -> CommandFuture {
    let unit = unit.clone();
    composite(async move {
        let expected = if compare { data.clone() } else { BufList::new() };
        write(&unit, LbaRange { fua: true, ..run }, data).await?;
        match compare {
            true => compare_all(&unit, run, &expected).await?,
            false => readable(&unit, run).await?,
        }
        Ok(BufList::new())
    })
}

/// Executes VERIFY.
pub(crate) fn verify(unit: &Rc<LogicalUnit>, run: LbaRange, data: BufList, compare: Compare) -> CommandFuture {
    let unit = unit.clone();
    composite(async move {
        match compare {
            Compare::Nothing => readable(&unit, run).await?,
            Compare::All => compare_all(&unit, run, &data).await?,
            Compare::One if data.is_empty() => compare_all(&unit, run, &data).await?,
            Compare::One => {
                let whole = BufList::repeated(&data.to_vec(), 0, PIECE as usize);
                for piece in pieces(extent(run), PIECE) {
                    let found = fetch(unit.device(), piece).await?;
                    same(&found, &whole.slice(0..piece.len as usize), piece.offset - extent(run).offset)?;
                }
            }
        }
        Ok(BufList::new())
    })
}

async fn readable(unit: &LogicalUnit, run: LbaRange) -> Result<(), ScsiFailure> {
    for piece in pieces(extent(run), PIECE) {
        fetch(unit.device(), piece).await?;
    }
    Ok(())
}

async fn compare_all(unit: &LogicalUnit, run: LbaRange, data: &BufList) -> Result<(), ScsiFailure> {
    for piece in pieces(extent(run), PIECE) {
        let from = (piece.offset - extent(run).offset) as usize;
        let found = fetch(unit.device(), piece).await?;
        same(&found, &data.slice(from..from + piece.len as usize), from as u64)?;
    }
    Ok(())
}

/// Compares two lists of equal length. Fails with a miscompare; `from` is their offset from the command's first byte.
fn same(found: &BufList, wanted: &BufList, from: u64) -> Result<(), ScsiFailure> {
    match found.first_difference(wanted) {
        None => Ok(()),
        Some(at) => Err(Sense::new(key::MISCOMPARE, code::MISCOMPARE).with_info(from + at).into()),
    }
}

/// Executes WRITE SAME.  Zeroes never allocate space, whether UNMAP was set or not: the unit is thin provisioned, and
/// unmapped blocks read as zeroes.
pub(crate) fn write_same(unit: &Rc<LogicalUnit>, run: LbaRange, data: BufList, fua: bool) -> CommandFuture {
    let extent = extent(run);
    if data.is_zero() {
        return CommandFuture::Write(unit.device().submit(BlockRequest::WriteZeroes { extent, no_unmap: false, fua }));
    }
    let unit = unit.clone();
    composite(async move {
        let whole = BufList::repeated(&data.to_vec(), 0, PIECE as usize);
        for piece in pieces(extent, PIECE) {
            store(unit.device(), piece.offset, whole.slice(0..piece.len as usize), fua).await?;
        }
        Ok(BufList::new())
    })
}

/// Executes UNMAP.
pub(crate) fn unmap(unit: &Rc<LogicalUnit>, list: &BufList, fua: bool) -> Result<CommandFuture, ScsiFailure> {
    let list = list.to_vec();
    if list.is_empty() {
        return Ok(composite(std::future::ready(Ok(BufList::new()))));
    }
    let Some(descriptors) = inquiry::unmap_list(&list) else {
        return Err(Sense::illegal(code::PARAMETER_LIST_LENGTH).into());
    };
    let (mut runs, mut total) = (Vec::new(), 0u64);
    for (index, (lba, blocks)) in descriptors.enumerate() {
        let run = LbaRange { lba, blocks, fua: false };
        // A range of zero blocks right at the end of the unit is valid.
        if blocks > 0 || lba > unit.blocks() {
            unit.check_run(run, u32::MAX)?;
        }
        total += u64::from(blocks);
        if total > inquiry::UNMAP_BLOCKS_MAX.into() || index as u32 >= inquiry::UNMAP_DESCRIPTORS_MAX {
            return Err(Sense::list(2).into());
        }
        if blocks > 0 {
            runs.push(extent(run));
        }
    }
    let unit = unit.clone();
    Ok(composite(async move {
        for extent in runs {
            unit.device().submit(BlockRequest::Discard(extent)).await.map_err(|error| failed(&error, true))?;
        }
        if fua {
            unit.device().submit(BlockRequest::Flush).await.map_err(|error| failed(&error, true))?;
        }
        Ok(BufList::new())
    }))
}

/// Executes COMPARE AND WRITE: the first half of the data is compared, the second half is written.
pub(crate) fn compare_and_write(unit: &Rc<LogicalUnit>, run: LbaRange, data: &BufList) -> CommandFuture {
    let half = data.len() / 2;
    let (expect, new) = (data.slice(0..half), data.slice(half..half * 2));
    let offset = run.lba * u64::from(BLOCK);
    CommandFuture::Write(unit.device().submit(BlockRequest::CompareAndWrite {
        offset,
        expect,
        data: new,
        fua: run.fua,
    }))
}

/// Executes ORWRITE atomically with respect to other writes; retries when the blocks have changed meanwhile.
pub(crate) fn or_write(unit: &Rc<LogicalUnit>, run: LbaRange, data: BufList) -> CommandFuture {
    /// Retries are bounded, for blocks that other writers keep changing.
    const TRIES: u32 = 64;
    let unit = unit.clone();
    composite(async move {
        let offset = run.lba * u64::from(BLOCK);
        for _ in 0..TRIES {
            let before = fetch(unit.device(), extent(run)).await?;
            let mut after = BufMut::zeroed(before.len());
            before.copy_to(&mut after);
            let more = data.to_vec();
            after.iter_mut().zip(&more).for_each(|(byte, more)| *byte |= more);
            let request = BlockRequest::CompareAndWrite { offset, expect: before, data: after.into(), fua: run.fua };
            match unit.device().submit(request).await {
                Ok(_) => return Ok(BufList::new()),
                Err(error) if matches!(error.kind(), ErrorKind::Mismatch(_)) => {}
                Err(error) => return Err(failed(&error, true)),
            }
        }
        Err(ScsiFailure::BUSY)
    })
}

/// Executes SYNCHRONIZE CACHE; the whole cache is flushed.
pub(crate) fn sync(unit: &Rc<LogicalUnit>) -> CommandFuture {
    CommandFuture::Write(unit.device().submit(BlockRequest::Flush))
}

/// Executes GET LBA STATUS.
pub(crate) fn lba_status(unit: &Rc<LogicalUnit>, lba: u64, alloc_len: u32) -> CommandFuture {
    let unit = unit.clone();
    composite(async move {
        let block = u64::from(BLOCK);
        let most = ((alloc_len as usize).saturating_sub(8) / 16).clamp(1, STATUS_RUNS_MAX);
        // Runs of mapped and unmapped blocks; a partially mapped block counts as mapped.
        let mut runs: Vec<(u64, u64, bool)> = Vec::new();
        let (mut at, mut look) = (lba * block, STATUS_LOOK);
        let stop = (unit.blocks() * block).min(at.saturating_add(STATUS_BYTES_MAX));
        while at < stop && runs.len() <= most {
            let stretch = Extent::new(at, look.min(stop - at));
            let map = unit.device().map(stretch).await.map_err(|error| failed(&error, false))?;
            for run in map.runs() {
                let mapped = run.state != ExtentState::Hole;
                let (from, to) = (run.extent.offset.max(at), run.extent.end().min(stretch.end()));
                let (first, last) = match mapped {
                    true => (from / block, to.div_ceil(block)),
                    false => (from.div_ceil(block), to / block),
                };
                let first = first.max(runs.last().map_or(lba, |last| last.0 + last.1));
                if last <= first {
                    continue;
                }
                match runs.last_mut() {
                    Some(run) if run.2 == mapped => run.1 += last - first,
                    _ => runs.push((first, last - first, mapped)),
                }
            }
            at = stretch.end();
            look = (look * 2).min(STATUS_BYTES_MAX);
        }
        runs.truncate(most);
        let mut out = vec![0; 8];
        for (first, blocks, mapped) in runs {
            out.extend(first.to_be_bytes());
            out.extend(u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
            out.extend([u8::from(!mapped), 0, 0, 0]);
        }
        let len = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&len.to_be_bytes());
        let data: BufList = BufMut::copy_of(&out).into();
        Ok(data.slice(0..data.len().min(alloc_len as usize)))
    })
}

/// Completes a change of the reservations: when the tasks that it aborts have ended, too.
pub(crate) fn reservation_change(unit: &Rc<LogicalUnit>, applied: LocalFuture<Applied>) -> CommandFuture {
    let unit = unit.clone();
    composite(async move {
        let change = match applied.await {
            Ok(Ok(change)) => change,
            Ok(Err(refusal)) => return Err(reserve::refusal(refusal).map_or(ScsiFailure::CONFLICT, Into::into)),
            Err(error) => return Err(ScsiFailure::of(&error, true)),
        };
        if !change.abort.is_empty() {
            // An error means that all holders are gone: their sessions have ended.
            unit.shared().abort(|nexus| change.abort.contains(nexus.host())).await;
        }
        Ok(BufList::new())
    })
}

/// Awaits `future`, whatever its output.
pub(crate) async fn ignore(future: impl Future) {
    drop(future.await);
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;

    use super::*;

    fn list(parts: &[&[u8]]) -> BufList {
        parts.iter().map(|part| Buf::copy_of(part)).collect()
    }

    #[test]
    fn differences_are_found_across_parts() {
        assert_eq!(same(&list(&[b"ab", b"cdef"]), &list(&[b"abc", b"def"]), 0), Ok(()));
        let info = |failure: ScsiFailure| failure.sense.and_then(|sense| sense.info);
        assert_eq!(same(&list(&[b"ab", b"cdxf"]), &list(&[b"abc", b"def"]), 10).map_err(info), Err(Some(14)));
    }
}
