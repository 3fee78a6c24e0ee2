//! Device requests of EXTENDED COPY.

use std::rc::Rc;

use forebay_block::{BlockRequest, BufList, Extent};

use super::{CommandFuture, PIECE, composite, failed, fetch, pieces, store};
use crate::copy::{self, Copy};
use crate::sense::code;
use crate::unit::third_party_copy::CopyOutcomes;
use crate::unit::{LogicalUnit, ScsiFailure};
use crate::{BLOCK, status};

/// Copies the segments one after the other, up to the first failure; `units` are the copy's targets, already checked.
pub(in crate::unit) fn third_party_copy(
    copy: Copy,
    units: Vec<Rc<LogicalUnit>>,
    outcomes: CopyOutcomes,
) -> CommandFuture {
    composite(async move {
        let mut outcome = copy::CopyOutcome { segments: 0, bytes: 0, failed: None };
        for segment in &copy.segments {
            let (from, to) = (&units[usize::from(segment.from)], &units[usize::from(segment.to)]);
            let block = u64::from(BLOCK);
            let len = u64::from(segment.blocks) * block;
            let copied = copy_segment(from, to, segment.from_lba * block, segment.to_lba * block, len);
            if let Err(failure) = copied.await {
                outcome.failed = Some(failure.sense.unwrap_or(copy::aborted(code::THIRD_PARTY)));
                break;
            }
            outcome.segments += 1;
            outcome.bytes += len;
        }
        if !copy.forget {
            outcomes.record(copy.list, outcome);
        }
        match outcome.failed {
            None => Ok(BufList::new()),
            Some(_) => Err(ScsiFailure {
                status: status::CHECK_CONDITION,
                sense: Some(copy::aborted(code::THIRD_PARTY).with_info(outcome.segments.into())),
            }),
        }
    })
}

/// Copies one segment of an EXTENDED COPY; offsets and length are in bytes.
async fn copy_segment(
    from: &LogicalUnit,
    to: &LogicalUnit,
    from_at: u64,
    to_at: u64,
    len: u64,
) -> Result<(), ScsiFailure> {
    // If a segment is copied to a higher, overlapping address, pieces are copied last to first, so that none is
    // overwritten before it is read.
    let overlaps = from.shared().id() == to.shared().id() && to_at > from_at && to_at < from_at + len;
    let mut parts: Vec<Extent> = pieces(Extent::new(from_at, len), PIECE).collect();
    if overlaps {
        parts.reverse();
    }
    for piece in parts {
        let data = fetch(from.device(), piece).await?;
        let offset = to_at + (piece.offset - from_at);
        if data.is_zero() {
            let request =
                BlockRequest::WriteZeroes { extent: Extent::new(offset, piece.len), no_unmap: false, fua: false };
            to.device().submit(request).await.map_err(|error| failed(&error, true))?;
        } else {
            store(to.device(), offset, data, false).await?;
        }
    }
    Ok(())
}
