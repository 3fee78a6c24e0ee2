//! Split queues (VIRTIO 1.2 section 2.7).

use std::sync::atomic::Ordering;

use crate::dirty_log::DirtyLog;
use crate::inflight::SplitRecord;
use crate::memory::{AddressSpace, GuestArea, GuestPart};

use super::chain::{ChainBuilder, DESCRIPTOR, INDIRECT, NEXT, VirtqDescriptor};
use super::store::{put_u16, put_u32};
use super::{ChainState, VirtqError, VirtqSetup, VirtqViolation};

/// Offset of the flags of both rings.
const FLAGS: usize = 0;
/// Offset of the index of both rings.
const INDEX: usize = 2;
/// Offset of the entries of both rings.
const ENTRIES: usize = 4;
/// Bit of the available ring's flags: the driver does not want interrupts.
const NO_INTERRUPT: u16 = 1;
/// Bit of the used ring's flags: the device does not want kicks.
const NO_NOTIFY: u16 = 1;

/// Split queue.
#[derive(Debug)]
pub(super) struct SplitQueue {
    size: u16,
    event_index: bool,
    table: GuestArea,
    available: GuestArea,
    used: GuestArea,
    log_used: Option<u64>,
    /// Available entries that were taken.
    last_available: u16,
    /// Available index, as read last.
    available_index: u16,
    used_index: u16,
    /// States by head.
    states: Vec<ChainState>,
    record: Option<SplitRecord>,
}

impl SplitQueue {
    pub(super) fn event_index(&self) -> bool {
        self.event_index
    }

    /// Adopts the areas at other places in memory.
    pub(super) fn relocate(&mut self, descriptors: GuestPart, driver: GuestPart, device: GuestPart) {
        self.log_used = self.log_used.map(|_| device.guest);
        (self.table, self.available, self.used) = (descriptors.area, driver.area, device.area);
    }

    /// Returns the queue, the heads that were in flight, and whether a former device was killed.
    pub(super) fn start(setup: &VirtqSetup, base: u32) -> Result<(Self, Vec<u16>, bool), VirtqViolation> {
        let size = setup.size;
        let base = u16::try_from(base).map_err(|_| VirtqViolation::Base { base, size })?;
        let used = setup.device.area.clone();
        let used_index = used.load_u16(INDEX, Ordering::Acquire);
        let (record, orphans) = match &setup.inflight {
            None => (None, None),
            Some(area) => {
                SplitRecord::open(area.clone(), size, used_index).map(|(record, heads)| (Some(record), heads))?
            }
        };
        let live = orphans.is_some();
        // A killed device has not told its position.  It has taken the entries that it returned, and those in flight.
        let last_available = orphans.as_ref().map_or(base, |heads| used_index.wrapping_add(heads.len() as u16));
        let orphans = orphans.unwrap_or_default();
        let mut states = vec![ChainState::Idle; usize::from(size)];
        orphans.iter().for_each(|head| states[usize::from(*head)] = ChainState::Orphaned);
        let queue = Self {
            size,
            event_index: setup.event_index,
            table: setup.descriptors.area.clone(),
            available: setup.driver.area.clone(),
            used,
            log_used: setup.log_used,
            last_available,
            available_index: last_available,
            used_index,
            states,
            record,
        };
        Ok((queue, orphans, live))
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }

    /// Takes the next available chain into the builder, and returns its head.
    pub(super) fn fetch(
        &mut self,
        builder: &mut ChainBuilder,
        space: &AddressSpace<'_>,
    ) -> Result<Option<u16>, VirtqError> {
        if self.available_index == self.last_available {
            // Acquire: the entries and descriptors below the index are read after it.
            let index = self.available.load_u16(INDEX, Ordering::Acquire);
            if index.wrapping_sub(self.last_available) > self.size {
                let violation = VirtqViolation::AvailableIndex { index, last: self.last_available, size: self.size };
                return Err(violation.into());
            }
            if index == self.last_available {
                return Ok(None);
            }
            self.available_index = index;
        }
        let head = self.available.load_u16(ENTRIES + 2 * self.slot(self.last_available), Ordering::Relaxed);
        let state = self.states.get(usize::from(head));
        match state.ok_or(VirtqViolation::Index { index: head, len: u32::from(self.size) })? {
            ChainState::Idle => {}
            ChainState::Orphaned | ChainState::InFlight => return Err(VirtqViolation::InFlight(head).into()),
        }
        self.read_chain(head, builder, space)?;
        if let Some(record) = &mut self.record {
            record.fetched(head);
        }
        self.states[usize::from(head)] = ChainState::InFlight;
        self.last_available = self.last_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Takes a chain of a former device into the builder.
    pub(super) fn resume(
        &mut self,
        head: u16,
        builder: &mut ChainBuilder,
        space: &AddressSpace<'_>,
    ) -> Result<(), VirtqError> {
        if self.states[usize::from(head)] != ChainState::Orphaned {
            return Err(VirtqViolation::NotResumable(head).into());
        }
        self.read_chain(head, builder, space)?;
        self.states[usize::from(head)] = ChainState::InFlight;
        Ok(())
    }

    fn read_chain(&self, head: u16, builder: &mut ChainBuilder, space: &AddressSpace<'_>) -> Result<(), VirtqError> {
        builder.begin();
        let mut index = head;
        for _ in 0..self.size {
            if index >= self.size {
                return Err(VirtqViolation::Index { index, len: u32::from(self.size) }.into());
            }
            let mut bytes = [0; DESCRIPTOR];
            self.table.read(DESCRIPTOR * usize::from(index), &mut bytes);
            let descriptor = VirtqDescriptor::split(&bytes);
            if descriptor.is(INDIRECT) {
                if descriptor.is(NEXT) {
                    return Err(VirtqViolation::IndirectInList.into());
                }
                return read_table(&descriptor, builder, space);
            }
            builder.add(&descriptor, space)?;
            if !descriptor.is(NEXT) {
                return Ok(());
            }
            index = descriptor.link;
        }
        Err(VirtqViolation::ChainLength { max: u32::from(self.size) }.into())
    }

    /// Returns a chain to the driver.  Returns the number of used entries.
    pub(super) fn put_used(&mut self, head: u16, written: u32, log: Option<&DirtyLog>) -> u32 {
        if let Some(record) = &mut self.record {
            record.completing(head);
        }
        let at = ENTRIES + 8 * self.slot(self.used_index);
        put_u32(&self.used, at, u32::from(head), Ordering::Relaxed);
        put_u32(&self.used, at + 4, written, Ordering::Relaxed);
        self.used_index = self.used_index.wrapping_add(1);
        // Release: the driver that sees the index sees the entry, and the buffers that the device wrote.
        put_u16(&self.used, INDEX, self.used_index, Ordering::Release);
        self.mark(log, at, 8);
        self.mark(log, INDEX, 2);
        if let Some(record) = &mut self.record {
            record.completed(head, self.used_index);
        }
        self.states[usize::from(head)] = ChainState::Idle;
        1
    }

    fn mark(&self, log: Option<&DirtyLog>, at: usize, len: u64) {
        if let (Some(log), Some(guest)) = (log, self.log_used) {
            log.mark(guest.saturating_add(at as u64), len);
        }
    }

    /// Returns whether the driver wants an interrupt for the last `returned` entries; `None` when it may have waited
    /// for any index.
    pub(super) fn wants_interrupt(&self, returned: Option<u32>) -> bool {
        if !self.event_index {
            return self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0;
        }
        let Some(returned) = returned else { return true };
        let event = self.available.load_u16(ENTRIES + 2 * usize::from(self.size), Ordering::Relaxed);
        u32::from(self.used_index.wrapping_sub(event).wrapping_sub(1)) < returned
    }

    pub(super) fn disable_kicks(&mut self, log: Option<&DirtyLog>) {
        // With event indexes, the index that was set last is passed already: the driver does not kick until it wraps.
        if !self.event_index {
            put_u16(&self.used, FLAGS, NO_NOTIFY, Ordering::Relaxed);
            self.mark(log, FLAGS, 2);
        }
    }

    pub(super) fn enable_kicks(&mut self, log: Option<&DirtyLog>) {
        let (at, value) =
            if self.event_index { (ENTRIES + 8 * usize::from(self.size), self.last_available) } else { (FLAGS, 0) };
        put_u16(&self.used, at, value, Ordering::Relaxed);
        self.mark(log, at, 2);
    }

    pub(super) fn has_available(&self) -> bool {
        self.available_index != self.last_available
            || self.available.load_u16(INDEX, Ordering::Acquire) != self.last_available
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.last_available)
    }

    pub(super) fn close_record(&self) {
        if let Some(record) = &self.record {
            record.close();
        }
    }
}

/// Adds the buffers of an indirect table, which begin at its first entry.
fn read_table(
    descriptor: &VirtqDescriptor,
    builder: &mut ChainBuilder,
    space: &AddressSpace<'_>,
) -> Result<(), VirtqError> {
    let entries = builder.read_table(descriptor, space)?;
    let mut index = 0_u16;
    for _ in 0..entries {
        if u32::from(index) >= entries {
            return Err(VirtqViolation::Index { index, len: entries }.into());
        }
        let descriptor = VirtqDescriptor::split(&builder.table_entry(usize::from(index)));
        if descriptor.is(INDIRECT) {
            return Err(VirtqViolation::IndirectNested.into());
        }
        builder.add(&descriptor, space)?;
        if !descriptor.is(NEXT) {
            return Ok(());
        }
        index = descriptor.link;
    }
    Err(VirtqViolation::ChainLength { max: entries }.into())
}
