//! Packed queues (VIRTIO 1.2 section 2.8).

use std::sync::atomic::Ordering;

use crate::dirty_log::DirtyLog;
use crate::inflight::PackedRecord;
use crate::memory::{AddressSpace, GuestArea, GuestPart};

use super::chain::{ChainBuilder, DESCRIPTOR, INDIRECT, NEXT, VirtqDescriptor, WRITE};
use super::store::{put_u32, put_u64};
use super::{ChainState, VirtqError, VirtqSetup, VirtqViolation};

/// Bit of a descriptor's flags that equals the driver's wrap counter once it is available.
const AVAILABLE: u16 = 1 << 7;
/// Bit of a descriptor's flags that equals the device's wrap counter once it is used.
const USED: u16 = 1 << 15;
/// Offset of a descriptor's flags.
const FLAGS: usize = 14;
/// Offset of a used descriptor's length, buffer ID and flags: eight bytes that are stored at once.
const USED_ELEMENT: usize = 8;

/// Flags of event suppression (VIRTIO 1.2 section 2.8.14): notify for every descriptor.
const EVENTS_ENABLED: u16 = 0;
/// Flags of event suppression: do not notify.
const EVENTS_DISABLED: u16 = 1;
/// Flags of event suppression: notify for the descriptor at a position.
const EVENTS_AT: u16 = 2;

/// Position in a packed ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingPosition {
    pub(crate) index: u16,
    /// Wrap counter: true in the first round.
    pub(crate) wrap: bool,
}

impl RingPosition {
    /// Decodes a position: bits 0 to 14 are the index, and bit 15 the wrap counter.
    fn of_bits(bits: u16) -> Self {
        Self { index: bits & 0x7fff, wrap: bits >> 15 == 1 }
    }

    fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// Moves on by up to `size` descriptors.
    pub(crate) fn advance(self, count: u16, size: u16) -> Self {
        let index = u32::from(self.index) + u32::from(count);
        match index.checked_sub(u32::from(size)) {
            None => Self { index: index as u16, wrap: self.wrap },
            Some(index) => Self { index: index as u16, wrap: !self.wrap },
        }
    }

    /// Returns the number of the position among those of two rounds.
    fn number(self, size: u16) -> u32 {
        u32::from(self.index) + if self.wrap { 0 } else { u32::from(size) }
    }

    /// Returns whether a descriptor with these flags is available at this position.
    pub(crate) fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct PackedChain {
    state: ChainState,
    /// Descriptors of the ring that the chain has.
    count: u16,
    /// Index of the first entry of the in-flight region.
    entry: u16,
}

/// Packed queue.
#[derive(Debug)]
pub(super) struct PackedQueue {
    size: u16,
    event_index: bool,
    ring: GuestPart,
    driver: GuestArea,
    device: GuestPart,
    available: RingPosition,
    used: RingPosition,
    /// Descriptors in flight.
    descriptors: u32,
    /// Chains by buffer ID.
    chains: Vec<PackedChain>,
    record: Option<PackedRecord>,
    /// Descriptors of the chain that is being read.
    reading: Vec<VirtqDescriptor>,
}

impl PackedQueue {
    pub(super) fn event_index(&self) -> bool {
        self.event_index
    }

    /// Adopts the areas at other places in memory.
    pub(super) fn relocate(&mut self, descriptors: GuestPart, driver: GuestPart, device: GuestPart) {
        (self.ring, self.driver, self.device) = (descriptors, driver.area, device);
    }

    /// Returns the queue, the buffer IDs that were in flight, and whether a former device was killed.
    pub(super) fn start(setup: &VirtqSetup, base: u32) -> Result<(Self, Vec<u16>, bool), VirtqViolation> {
        let size = setup.size;
        let mut available = RingPosition::of_bits(base as u16);
        let mut used = RingPosition::of_bits((base >> 16) as u16);
        if available.index >= size || used.index >= size {
            return Err(VirtqViolation::Base { base, size });
        }
        let mut queue_record = None;
        let mut chains = vec![PackedChain::default(); usize::from(size)];
        let mut orphans = Vec::new();
        let mut descriptors = 0;
        let mut live = false;
        if let Some(area) = &setup.inflight {
            let (record, left) = PackedRecord::open(area.clone(), size, used, &setup.descriptors.area)?;
            queue_record = Some(record);
            if let Some(left) = left {
                // A killed device has not told its position.
                live = true;
                used = left.used;
                available = used;
                for chain in left.chains {
                    available = available.advance(chain.count, size);
                    descriptors += u32::from(chain.count);
                    let state = ChainState::Orphaned;
                    chains[usize::from(chain.id)] = PackedChain { state, count: chain.count, entry: chain.entry };
                    orphans.push(chain.id);
                }
            }
        }
        let queue = Self {
            size,
            event_index: setup.event_index,
            ring: setup.descriptors.clone(),
            driver: setup.driver.area.clone(),
            device: setup.device.clone(),
            available,
            used,
            descriptors,
            chains,
            record: queue_record,
            reading: Vec::new(),
        };
        Ok((queue, orphans, live))
    }

    /// Takes the next available chain into the builder, and returns its buffer ID.
    pub(super) fn fetch(
        &mut self,
        builder: &mut ChainBuilder,
        space: &AddressSpace<'_>,
    ) -> Result<Option<u16>, VirtqError> {
        // Acquire: the rest of the descriptor, and those that follow, are read after the flags.
        let flags = self.ring.area.load_u16(DESCRIPTOR * usize::from(self.available.index) + FLAGS, Ordering::Acquire);
        if !self.available.is_available(flags) {
            return Ok(None);
        }
        self.reading.clear();
        let mut at = self.available;
        let mut flags = Some(flags);
        loop {
            let count = self.reading.len() as u32 + 1;
            if self.descriptors + count > u32::from(self.size) {
                let violation = VirtqViolation::Overrun { in_flight: self.descriptors, count, size: self.size };
                return Err(violation.into());
            }
            let mut bytes = [0; DESCRIPTOR];
            self.ring.area.read(DESCRIPTOR * usize::from(at.index), &mut bytes);
            let mut descriptor = VirtqDescriptor::packed(&bytes);
            descriptor.flags = flags.take().unwrap_or(descriptor.flags);
            self.reading.push(descriptor);
            at = at.advance(1, self.size);
            if !descriptor.is(NEXT) {
                break;
            }
        }
        // The buffer ID of a list is that of its last descriptor.
        let id = self.reading.last().map_or(0, |last| last.link);
        let chain = self.chains.get(usize::from(id));
        match chain.ok_or(VirtqViolation::Index { index: id, len: u32::from(self.size) })?.state {
            ChainState::Idle => {}
            ChainState::Orphaned | ChainState::InFlight => return Err(VirtqViolation::InFlight(id).into()),
        }
        read_chain(&self.reading, builder, space)?;
        let count = self.reading.len() as u16;
        let entry = self.record.as_mut().map_or(0, |record| record.fetched(&self.reading));
        self.chains[usize::from(id)] = PackedChain { state: ChainState::InFlight, count, entry };
        self.available = at;
        self.descriptors += u32::from(count);
        Ok(Some(id))
    }

    /// Takes a chain of a former device into the builder.
    pub(super) fn resume(
        &mut self,
        id: u16,
        builder: &mut ChainBuilder,
        space: &AddressSpace<'_>,
    ) -> Result<(), VirtqError> {
        let chain = self.chains[usize::from(id)];
        let Some(record) = self.record.as_ref().filter(|_| chain.state == ChainState::Orphaned) else {
            return Err(VirtqViolation::NotResumable(id).into());
        };
        // The ring's descriptors may be overwritten by used ones; the record has copies.
        record.descriptors(chain.entry, chain.count, &mut self.reading);
        read_chain(&self.reading, builder, space)?;
        self.chains[usize::from(id)].state = ChainState::InFlight;
        Ok(())
    }

    /// Returns a chain to the driver.  Returns the number of descriptors that it occupied.
    pub(super) fn put_used(&mut self, id: u16, written: u32, log: Option<&DirtyLog>) -> u32 {
        let chain = std::mem::take(&mut self.chains[usize::from(id)]);
        let after = self.used.advance(chain.count, self.size);
        if let Some(record) = &mut self.record {
            record.completing(chain.entry, after);
        }
        let wrap = if self.used.wrap { AVAILABLE | USED } else { 0 };
        let flags = wrap | if written > 0 { WRITE } else { 0 };
        let at = DESCRIPTOR * usize::from(self.used.index) + USED_ELEMENT;
        let ([a, b, c, d], [e, f], [g, h]) = (written.to_ne_bytes(), id.to_ne_bytes(), flags.to_ne_bytes());
        // Release: the driver that sees the flags sees the rest, and the buffers that the device wrote.
        put_u64(&self.ring.area, at, u64::from_ne_bytes([a, b, c, d, e, f, g, h]), Ordering::Release);
        if let Some(log) = log {
            log.mark(self.ring.guest.saturating_add(at as u64), 8);
        }
        if let Some(record) = &mut self.record {
            record.completed(chain.entry);
        }
        self.used = after;
        self.descriptors -= u32::from(chain.count);
        u32::from(chain.count)
    }

    /// Returns whether the driver wants an interrupt for the last `returned` descriptors; `None` when it may have
    /// waited for any position.
    pub(super) fn wants_interrupt(&self, returned: Option<u32>) -> bool {
        let [a, b, c, d] = self.driver.load_u32(0, Ordering::Relaxed).to_ne_bytes();
        match u16::from_ne_bytes([c, d]) & 3 {
            EVENTS_DISABLED => false,
            EVENTS_AT if self.event_index => {
                let event = RingPosition::of_bits(u16::from_ne_bytes([a, b]));
                let positions = 2 * u32::from(self.size);
                let behind =
                    (self.used.number(self.size) + positions - event.number(self.size) % positions) % positions;
                // In front of the used position is the last one of two rounds.
                let behind = if behind == 0 { positions } else { behind };
                returned.is_none_or(|returned| behind <= returned)
            }
            _ => true,
        }
    }

    fn suppress(&mut self, position: u16, flags: u16, log: Option<&DirtyLog>) {
        let ([a, b], [c, d]) = (position.to_ne_bytes(), flags.to_ne_bytes());
        put_u32(&self.device.area, 0, u32::from_ne_bytes([a, b, c, d]), Ordering::Relaxed);
        if let Some(log) = log {
            log.mark(self.device.guest, 4);
        }
    }

    pub(super) fn disable_kicks(&mut self, log: Option<&DirtyLog>) {
        self.suppress(0, EVENTS_DISABLED, log);
    }

    pub(super) fn enable_kicks(&mut self, log: Option<&DirtyLog>) {
        if self.event_index {
            self.suppress(self.available.bits(), EVENTS_AT, log);
        } else {
            self.suppress(0, EVENTS_ENABLED, log);
        }
    }

    pub(super) fn has_available(&self) -> bool {
        let at = DESCRIPTOR * usize::from(self.available.index) + FLAGS;
        self.available.is_available(self.ring.area.load_u16(at, Ordering::Acquire))
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.available.bits()) | u32::from(self.used.bits()) << 16
    }

    pub(super) fn close_record(&self) {
        if let Some(record) = &self.record {
            record.close();
        }
    }
}

fn read_chain(
    descriptors: &[VirtqDescriptor],
    builder: &mut ChainBuilder,
    space: &AddressSpace<'_>,
) -> Result<(), VirtqError> {
    builder.begin();
    if let [descriptor] = descriptors
        && descriptor.is(INDIRECT)
    {
        let entries = builder.read_table(descriptor, space)?;
        for index in 0..entries as usize {
            let descriptor = VirtqDescriptor::packed(&builder.table_entry(index));
            if descriptor.is(INDIRECT) {
                return Err(VirtqViolation::IndirectNested.into());
            }
            builder.add(&descriptor, space)?;
        }
        return Ok(());
    }
    for descriptor in descriptors {
        if descriptor.is(INDIRECT) {
            return Err(VirtqViolation::IndirectInList.into());
        }
        builder.add(descriptor, space)?;
    }
    Ok(())
}
