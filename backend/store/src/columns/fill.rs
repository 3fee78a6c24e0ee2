//! Filling of devices: what a device lacks is reconstructed from the others and written to it, segment by segment.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::Result;
use forebay_reactor::sleep;

use super::device::{ColumnDevice, ColumnState};
use super::set::ColumnSet;
use crate::core::Core;
use crate::format::BLOCK;
use crate::format::anchor::LogPosition;
use crate::format::devices::RecordedState;
use crate::pacer::RepairPacer;
use crate::segments::SegmentState;

/// Segments after which the progress is recorded.
const SEGMENTS_RECORDED: u32 = 64;
/// Delay after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Fills devices one after the other when one is to be filled, until the store closes.
pub(crate) async fn fill_devices(core: Rc<Core>, rate: u64) {
    let Some(set) = core.media.device.columns().cloned() else { return };
    let mut pacer = RepairPacer::new(rate);
    loop {
        let next = core.maintenance.next_repair();
        if core.maintenance.is_closing() {
            return;
        }
        let is_due = |device: &Rc<ColumnDevice>| device.state() == ColumnState::Filling && device.file().is_some();
        let Some(device) = set.all_devices().into_iter().find(is_due) else {
            next.await;
            continue;
        };
        drop(next);
        if let Err(error) = fill(&core, &set, &device, &mut pacer).await {
            tracing::error!(?error, "{} cannot be filled; retrying in {RETRY_AFTER:?}", device.describe());
            sleep(RETRY_AFTER).await;
        }
    }
}

/// Fills a device, and makes it active.
async fn fill(core: &Rc<Core>, set: &ColumnSet, device: &Rc<ColumnDevice>, pacer: &mut RepairPacer) -> Result<()> {
    let RecordedState::Filling { since, below } = device.recorded() else { return Ok(()) };
    let log = core.log();
    tracing::info!("filling {} from segment {below} on, with batches from {since} on", device.describe());
    // Batches from here on are written to it, too.
    let head = (log.position(), log.segment_and_next().0);
    log.wait_written().await?;
    let count = core.segments.borrow().geometry.segment_count;
    let mut recorded = below;
    for segment in below..count {
        if core.maintenance.is_closing() || device.state() != ColumnState::Filling {
            return Ok(());
        }
        if let Err(error) = fill_segment(core, set, device, segment, since, head, pacer).await {
            if !device.is_written() {
                return Ok(());
            }
            return Err(error);
        }
        if segment + 1 - recorded >= SEGMENTS_RECORDED {
            recorded = segment + 1;
            record(set, device, RecordedState::Filling { since, below: recorded }).await?;
        }
    }
    record(set, device, RecordedState::Active).await?;
    tracing::info!("{} is complete", device.describe());
    // Columns may be moved now.
    core.maintenance.want_repair();
    Ok(())
}

/// Records the progress of filling, once it is durable on the device.
async fn record(set: &ColumnSet, device: &ColumnDevice, state: RecordedState) -> Result<()> {
    if let Err(error) = device.sync().await {
        return set.drop_device(device.number, &format!("flushing it fails: {error}")).await;
    }
    set.change_table(|table| {
        let Some(record) = table.device_mut(device.number) else { return };
        // It may have failed meanwhile.
        if !matches!(record.state, RecordedState::Filling { .. }) {
            return;
        }
        record.state = state;
        if state != RecordedState::Active {
            return;
        }
        if let Some(old) = record.replaces.take() {
            table.devices.retain(|device| device.number != old);
            let columns = table.groups.iter_mut().flat_map(|group| &mut group.columns);
            columns.filter(|column| column.device == old).for_each(|column| column.device = device.number);
        }
    })
    .await
}

/// Fills what a device has of a segment: the batches from number `since` on.
async fn fill_segment(
    core: &Rc<Core>,
    set: &ColumnSet,
    device: &Rc<ColumnDevice>,
    segment: u32,
    since: u64,
    head: (LogPosition, u32),
    pacer: &mut RepairPacer,
) -> Result<()> {
    let geometry = core.segments.borrow().geometry;
    let (position, head_segment) = head;
    let first = geometry.first_block(segment);
    let state = core.segments.borrow().state(segment);
    let end = match state {
        SegmentState::Free | SegmentState::Gone => return Ok(()),
        SegmentState::Open if segment != head_segment => return Ok(()),
        SegmentState::Open => position.block,
        SegmentState::Used | SegmentState::Damaged => first + geometry.segment_blocks(),
    };
    let holder = device.replaces().unwrap_or(device.number);
    let Some(column) = set.geometry.borrow().column_on(segment, holder) else { return Ok(()) };
    let target = (device, set.geometry.borrow().column(segment, column).offset);
    let _pin = core.media.pin(first * BLOCK as u64);
    // Batches of a segment that the log has left may still be in flight.
    core.log().wait_written().await?;
    let data = set.data_columns() as u64;
    let (mut block, mut before) = (first, None);
    // Lines that are to be copied: consecutive batches are copied together.
    let mut lines = 0..0;
    while let Some(header) = core.next_header(block, end, before).await? {
        let next = block + 1 + u64::from(header.payload_blocks);
        if header.seq >= since {
            let of_batch = (block - first) / data..(next - first) / data;
            if lines.end != of_batch.start {
                set.copy_lines(segment, column, lines, target, pacer).await?;
                lines = of_batch.start..of_batch.start;
            }
            lines.end = of_batch.end;
        }
        before = Some((header.epoch, header.seq));
        block = next;
        if block >= end {
            break;
        }
    }
    if before.is_none() && core.segments.borrow().live_table().of(segment) > 0 {
        // Nothing says what the segment has.
        lines = 0..geometry.segment_blocks() / data;
    }
    set.copy_lines(segment, column, lines, target, pacer).await
}
