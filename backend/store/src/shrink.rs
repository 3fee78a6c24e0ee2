//! Removal of devices from an open store: their columns are moved, and segments that find no space are emptied and given up.
//!
//! The order makes it safe to stop anywhere: the device table says which devices are leaving, so that the work goes on at
//! the next opening. Segments are given up when they are free, and two checkpoints, one for each slot of the anchor, have a
//! segment table without them; then the device table has fewer.

use forebay_block::{Error, ErrorKind, Result};

use crate::columns::ColumnSet;
use crate::core::Core;
use crate::segments::SegmentState;
use crate::store::Store;

/// Rounds of the cleaner that empty nothing, after which segments that are to be given up count as stuck.
const ROUNDS_MAX: u32 = 4;

/// Moves of columns between devices, and what they wait for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ColumnMoves {
    /// Set while devices are being removed, or columns moved for more segments.
    pub pending: bool,
    /// Columns that are to be moved.
    pub columns_left: u64,
    /// Columns moved since the store was opened.
    pub moved: u64,
    /// Segments that must be emptied first, since the devices that stay have no space for them.
    pub segments_left: u32,
    /// Length of a column in bytes.
    pub column_size: u64,
    /// Reason why nothing can be moved at present; empty if there is none.
    pub blocked: String,
}

impl Core {
    /// Brings the number of segments to what the devices that stay have space for. Returns true if it is that, and false
    /// after a step towards it.
    ///
    /// # Errors
    /// When segments cannot be emptied; errors of the devices.
    pub(crate) async fn fit_segments(&self, set: &ColumnSet) -> Result<bool> {
        let target = set.segments_without_leaving(self.superblock.segments_max());
        if target >= set.segments() {
            self.segments.borrow_mut().retire_from(u32::MAX);
            return Ok(true);
        }
        if self.segments.borrow().geometry.segment_count > target {
            // The log needs free segments meanwhile, which the cleaner makes of others.
            let needed = self.space.floor(true, false) + 1;
            let from = self.segments.borrow().retirable_from(target, needed);
            self.segments.borrow_mut().retire_from(from);
            if from > target {
                self.space.request(needed);
            }
            if from > target || !self.segments.borrow_mut().shrink() {
                self.empty_retired().await?;
                return Ok(false);
            }
            self.checkpoints.resize(&self.segments.borrow().geometry);
        }
        // One for each slot: neither refers to a segment that is given up.
        self.take_requested_checkpoint().await?;
        self.take_requested_checkpoint().await?;
        if set.truncate(target).await? {
            self.segments.borrow_mut().retire_from(u32::MAX);
            self.features.note_segments(target);
            self.store_features().await?;
            tracing::info!("{} has {target} segments now, for the devices that stay", set.name());
        }
        Ok(false)
    }

    /// Does a step towards free retired segments: the log leaves them, or the cleaner empties some.
    async fn empty_retired(&self) -> Result<()> {
        let left = || -> (u64, usize, u32, u32) {
            let segments = self.segments.borrow();
            let (live, in_use) = (segments.retired_live_bytes(), segments.retired_in_use().count());
            (live, in_use, segments.retired_count(), segments.free_count())
        };
        let before = left();
        let has_open = self.segments.borrow().retired_in_use().any(|(_, state)| state == SegmentState::Open);
        if has_open && self.leave_log_segments().await? {
            return Ok(());
        }
        self.gc.want_retired();
        self.take_requested_checkpoint().await?;
        let rounds = if left() == before { self.moves.rounds_without.get() + 1 } else { 0 };
        self.moves.rounds_without.set(rounds);
        if rounds < ROUNDS_MAX {
            return Ok(());
        }
        self.moves.rounds_without.set(0);
        let segments = self.segments.borrow();
        let damaged = segments.retired_in_use().filter(|(_, state)| *state == SegmentState::Damaged).count();
        let (kind, why) = match damaged {
            0 => (ErrorKind::NoSpace, "there is too little free space to move their data".to_owned()),
            _ => (ErrorKind::Corrupt, format!("{damaged} of them are damaged; `forebay store check` says where")),
        };
        Err(Error::new(kind, format!("{} segments are to be emptied, and cannot be: {why}", before.1)))
    }

    /// Makes the log leave its segment, and go on in the next one. Returns false if there are too few free segments.
    pub(crate) async fn leave_log_segments(&self) -> Result<bool> {
        if self.space.free_segments() <= self.space.floor(true, false) {
            return Ok(false);
        }
        self.log().leave_segment();
        // Its batches are the first ones in the next segment.
        self.take_requested_checkpoint().await?;
        Ok(true)
    }

    /// Returns an error while devices are being removed.
    pub(crate) fn refuse_while_removing(&self, set: &ColumnSet) -> Result<()> {
        match set.leaving().first() {
            None => Ok(()),
            Some(number) => {
                let text = format!(
                    "device {number} of {} is being removed; wait, or end that with `forebay store remove --cancel`",
                    set.name()
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
        }
    }
}

impl Store {
    fn set(&self) -> Result<&ColumnSet> {
        self.core.media.device.columns().map(|set| &**set).ok_or_else(|| {
            let text = format!("{} is on one device, which cannot be removed", self.core.media.device.name());
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    /// Begins to remove devices from a store on several: their columns are moved to the others in the background. Devices that
    /// are away can be removed, too. A device is erased and released once it has no columns.
    ///
    /// # Errors
    /// `Unsupported` on one device; `NotFound` for a number without device; `Invalid` if too few devices or too few segments
    /// are left; `NoSpace` if what is stored does not fit on the others; `Busy` while a device is being replaced or filled;
    /// `Locked` if segments are to be emptied whose keys are not there; `Io` if a device that stays is away.
    pub async fn remove_devices(&self, numbers: &[u16]) -> Result<()> {
        let (core, set) = (&self.core, self.set()?);
        core.refuse_writes()?;
        let _permit = core.resizing.acquire(1).await;
        let segments = set.segments_without(numbers, core.superblock.segments_max())?;
        if segments < set.segments() {
            let (used, capacity) = (core.segments.borrow().live_bytes(), core.space.capacity_of(segments));
            if used > capacity {
                let text =
                    format!("{used} bytes are used, and without these devices {} has {capacity} bytes", set.name());
                return Err(Error::new(ErrorKind::NoSpace, text));
            }
            if core.volume_keys.status().locked {
                let text = "segments with encrypted data must be emptied for that, which needs the master key";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        core.features.note_segments(set.segments());
        core.store_features().await?;
        set.begin_removal(numbers, core.superblock.segments_max()).await?;
        core.maintenance.want_repair();
        Ok(())
    }

    /// Keeps devices that are being removed; with none given, all of them. Columns that were moved stay where they are.
    ///
    /// # Errors
    /// `NotFound` if a device is not being removed; errors of the devices.
    pub async fn cancel_removal(&self, numbers: &[u16]) -> Result<()> {
        let (core, set) = (&self.core, self.set()?);
        core.refuse_writes()?;
        let _permit = core.resizing.acquire(1).await;
        let leaving = set.leaving();
        if let Some(number) = numbers.iter().find(|number| !leaving.contains(number)) {
            let text = format!("device {number} of {} is not being removed", set.name());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        set.cancel_removal(if numbers.is_empty() { &leaving } else { numbers }).await?;
        core.moves.note_blocked(None);
        core.segments.borrow_mut().retire_from(u32::MAX);
        if set.segments() > core.segments.borrow().geometry.segment_count {
            core.use_segments(set.segments()).await?;
        }
        core.maintenance.notify_writers();
        core.maintenance.want_repair();
        Ok(())
    }

    /// Returns the moves of columns between devices, on a store on several.
    pub fn column_moves(&self) -> ColumnMoves {
        let core = &self.core;
        let Some(set) = core.media.device.columns() else { return ColumnMoves::default() };
        let segments = core.segments.borrow();
        ColumnMoves {
            pending: set.has_moves(core.superblock.segments_max()) || segments.has_added(),
            columns_left: set.columns_to_move(core.superblock.segments_max()),
            moved: core.moves.moved(),
            segments_left: segments.retired_in_use().count() as u32,
            column_size: set.column_bytes(),
            blocked: core.moves.blocked().unwrap_or_default(),
        }
    }
}
