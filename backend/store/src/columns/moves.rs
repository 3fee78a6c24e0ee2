//! Moves of columns between devices: away from devices that are removed, and to added ones until these are used.
//!
//! Columns of segments that the log has left do not change, so that they are copied while their segments are held, and one
//! change of the device table gives them their new places. Free segments are moved without copying. Those that the log
//! writes to are left until it has left them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::{sleep, yield_now};

use super::balance::{ColumnMove, apply_move, plan_move};
use super::device::ColumnState;
use super::set::ColumnSet;
use crate::core::Core;
use crate::format::BLOCK64;
use crate::media::SegmentPin;
use crate::pacer::RepairPacer;
use crate::segments::SegmentState;

/// Columns moved with one change of the table.
const SEGMENTS_AT_ONCE: u32 = 16;
/// Delay after a failure, or when something has to change first.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// State of moves since the store was opened.
#[derive(Default)]
pub(crate) struct MoveState {
    /// Columns moved.
    moved: Cell<u64>,
    /// Reason why nothing can be moved at present.
    blocked: RefCell<Option<String>>,
    /// Rounds of the cleaner, in a row, that emptied none of the segments that are to be given up.
    pub rounds_without: Cell<u32>,
}

impl MoveState {
    /// Returns the number of columns moved.
    pub fn moved(&self) -> u64 {
        self.moved.get()
    }

    /// Counts moved columns.
    fn count(&self, columns: u64) {
        self.moved.set(self.moved.get() + columns);
    }

    /// Returns the reason why nothing can be moved at present.
    pub fn blocked(&self) -> Option<String> {
        self.blocked.borrow().clone()
    }

    /// Reports an error, once, after which moving is tried again.
    fn fail(&self, set: &ColumnSet, error: &Error) {
        let text = error.to_string();
        if self.blocked().as_ref() != Some(&text) {
            tracing::error!("columns of {} cannot be moved: {text}; retrying", set.name());
        }
        self.note_blocked(Some(text));
    }

    /// Records the reason why nothing can be moved at present.
    pub fn note_blocked(&self, why: Option<String>) {
        *self.blocked.borrow_mut() = why;
    }
}

/// Result of a step of moving.
enum MoveStep {
    /// Columns were moved, segments emptied, or a device removed.
    Done,
    /// Step that must wait for something else.
    Blocked,
    /// End of the work.
    Idle,
}

/// Moves columns whenever devices are to be removed, or more segments are possible after that, until the store closes.
pub(crate) async fn move_columns(core: Rc<Core>, rate: u64) {
    let Some(set) = core.media.device.columns().cloned() else { return };
    let mut pacer = RepairPacer::new(rate);
    loop {
        let next = core.maintenance.next_repair();
        if core.maintenance.is_closing() {
            return;
        }
        match step(&core, &set, &mut pacer).await {
            Ok(MoveStep::Done) => {
                core.moves.note_blocked(None);
                yield_now().await;
            }
            Ok(MoveStep::Idle) => next.await,
            Ok(MoveStep::Blocked) => sleep(RETRY_AFTER).await,
            Err(_) if core.maintenance.is_closing() => return,
            Err(error) => {
                core.moves.fail(&set, &error);
                sleep(RETRY_AFTER).await;
            }
        }
    }
}

/// Does the next step.
async fn step(core: &Rc<Core>, set: &Rc<ColumnSet>, pacer: &mut RepairPacer) -> Result<MoveStep> {
    let most = core.superblock.segments_max();
    if !set.has_moves(most) {
        core.moves.note_blocked(None);
        return Ok(MoveStep::Idle);
    }
    let devices = set.all_devices();
    // A device that is being filled has its own order of segments.
    if devices.iter().any(|device| device.state() == ColumnState::Filling) {
        return Ok(MoveStep::Blocked);
    }
    if set.leaving().is_empty()
        && let Some(away) = devices.iter().find(|device| device.state() != ColumnState::Active)
    {
        core.moves.note_blocked(Some(format!("{} is away; replace it, or take it back", away.describe())));
        return Ok(MoveStep::Idle);
    }
    let _permit = core.resizing.acquire(1).await;
    if !set.leaving().is_empty() && !core.fit_segments(set).await? {
        return Ok(MoveStep::Done);
    }
    let (planned, emptied) = {
        let (table, segments) = (set.table.borrow(), core.segments.borrow());
        let is_movable = |segment| !matches!(segments.state(segment), SegmentState::Open | SegmentState::Gone);
        let emptied = table.leaving().find(|device| table.columns_on(device.number) == 0).map(|device| device.number);
        (plan_move(&table, most, SEGMENTS_AT_ONCE, is_movable), emptied)
    };
    if let Some(number) = emptied {
        set.finish_removal(number).await?;
        return Ok(MoveStep::Done);
    }
    if let Some(planned) = planned {
        let moved = move_run(core, set, &planned, pacer).await?;
        return Ok(if moved { MoveStep::Done } else { MoveStep::Blocked });
    }
    if set.columns_to_move(most) == 0 {
        core.add_segments(set).await?;
        return Ok(MoveStep::Done);
    }
    let open_ones_are_left = plan_move(&set.table.borrow(), most, 1, |_| true).is_some();
    if !open_ones_are_left {
        let text = "the device table has no space for columns that are so scattered, or no device has a free slot";
        return Err(Error::new(ErrorKind::NoSpace, text));
    }
    // What was gained so far is used, so that the log has segments to go on in.
    core.add_segments(set).await?;
    match core.leave_log_segments().await? {
        true => Ok(MoveStep::Done),
        false => Err(Error::new(ErrorKind::NoSpace, "there are too few free segments for the log to leave its own")),
    }
}

/// Moves columns of consecutive segments, as far as the log does not begin to write to one of them. Returns false if none
/// could be moved.
async fn move_run(core: &Rc<Core>, set: &ColumnSet, planned: &ColumnMove, pacer: &mut RepairPacer) -> Result<bool> {
    let target = set.device(planned.to.device).filter(|device| device.state() == ColumnState::Active);
    let Some(target) = target else {
        let text = format!("device {}, which is to get columns, is not there", planned.to.device);
        return Err(Error::new(ErrorKind::Io, text));
    };
    // Batches of a segment that the log has left may still be in flight.
    core.log().wait_written().await?;
    let mut pins: Vec<Option<SegmentPin<'_>>> = Vec::new();
    let mut copied = false;
    for i in 0..planned.segments {
        let segment = planned.segment + i;
        let state = core.segments.borrow().state(segment);
        match state {
            SegmentState::Open | SegmentState::Gone => break,
            SegmentState::Free => pins.push(None),
            SegmentState::Used | SegmentState::Damaged => {
                let first = core.segments.borrow().geometry.first_block(segment);
                pins.push(core.media.pin(first * BLOCK64));
                // It may have been left just now.
                core.log().wait_written().await?;
                let (column, lines, offset) = {
                    let geometry = set.geometry.borrow();
                    let column = geometry.column_on(segment, planned.from.device);
                    (column, geometry.column_lines, geometry.slot_offset(planned.to.slot + i))
                };
                let Some(column) = column else { return Ok(false) };
                set.copy_lines(segment, column, 0..lines, (&target, offset), pacer).await?;
                copied = true;
            }
        }
        if core.maintenance.is_closing() {
            return Ok(false);
        }
    }
    if copied && let Err(error) = target.sync().await {
        set.drop_device(target.number, &format!("flushing it fails: {error}")).await?;
        return Ok(false);
    }
    // Free segments are held back from the log while the table changes. One that it has taken meanwhile ends the run.
    let mut held = Vec::new();
    let mut count = 0;
    for (i, pin) in pins.iter().enumerate() {
        let segment = planned.segment + i as u32;
        if pin.is_none() {
            // The log must not run out of free segments meanwhile.
            if !core.has_space_to_clean() || !core.segments.borrow_mut().hold(segment) {
                break;
            }
            held.push(segment);
        }
        count += 1;
    }
    let moved = ColumnMove { segments: count, ..*planned };
    let changed = loop {
        if count == 0 {
            break false;
        }
        match set.commit_move(&moved).await {
            Ok(changed) => break changed,
            // Some devices may have the changed table. Until all do, or have another one, nothing may be written to the
            // segments: they stay taken.
            Err(error) => core.moves.fail(set, &error),
        }
        sleep(RETRY_AFTER).await;
        if core.maintenance.is_closing() {
            return Ok(false);
        }
    };
    for segment in held {
        let mut segments = core.segments.borrow_mut();
        debug_assert_eq!(segments.state(segment), SegmentState::Free, "the log entered a segment while it was moved");
        segments.release(segment);
    }
    drop(pins);
    core.maintenance.notify_writers();
    if changed {
        core.moves.count(count.into());
        set.place_uses.drain().await;
    }
    Ok(changed)
}

impl ColumnSet {
    /// Gives columns their new places, durably. Returns false if they cannot be moved as planned any more.
    async fn commit_move(&self, moved: &ColumnMove) -> Result<bool> {
        let mut fits = false;
        self.change_table_if(|table| {
            let is_filling = table.devices.iter().any(|device| device.state.is_filling());
            let is_active = table.device(moved.to.device).is_some_and(|device| device.state.is_active());
            fits = !is_filling && is_active && apply_move(table, moved);
            fits
        })
        .await?;
        Ok(fits)
    }
}
