//! Record of a packed queue: copies of the descriptors in flight.
//!
//! Header: features (8 bytes); version, number of entries, head of the free list, its old head (2 bytes each); used
//! position, old used position (2 each), wrap counter, old wrap counter (1 each), padding to 32.  Entry: in flight,
//! padding (1 each), next entry, last entry of the list, length of the list (2 each); counter (8); buffer ID, flags (2
//! each), length (4); address (8).
//!
//! Fields that change together are stored at once, which closes gaps between the steps of the specification: an old
//! position without its wrap counter would be taken for another one.

use std::sync::atomic::Ordering;

use crate::memory::GuestArea;
use crate::rings::chain::{DESCRIPTOR, VirtqDescriptor};
use crate::rings::packed::RingPosition;
use crate::rings::store::{put_u16, put_u64};

use super::{InflightViolation, VERSION, inflight_len};

pub(super) const HEADER: u64 = 32;
pub(super) const ENTRY: u64 = 32;

const FEATURES: usize = 0;
const LISTS: usize = 8;
const POSITIONS: usize = 16;

const COUNTER: usize = 8;
const BUFFER: usize = 16;
const ADDRESS: usize = 24;

/// Offset of a descriptor's flags in the ring.
const RING_FLAGS: usize = 14;

fn at(entry: u16, field: usize) -> usize {
    HEADER as usize + ENTRY as usize * usize::from(entry) + field
}

fn join(values: [u16; 4]) -> u64 {
    let mut bytes = [0; 8];
    for (to, value) in bytes.chunks_exact_mut(2).zip(values) {
        to.copy_from_slice(&value.to_ne_bytes());
    }
    u64::from_ne_bytes(bytes)
}

fn cut(value: u64) -> [u16; 4] {
    let bytes = value.to_ne_bytes();
    std::array::from_fn(|at| u16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]]))
}

/// Chain that a former device had in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrphanedChain {
    /// Buffer ID.
    pub(crate) id: u16,
    /// Descriptors of the ring.
    pub(crate) count: u16,
    /// Index of the first entry.
    pub(crate) entry: u16,
}

/// State of a device that was killed.
#[derive(Debug)]
pub(crate) struct PackedRemainder {
    /// Used position.
    pub(crate) used: RingPosition,
    /// Chains in flight, in the order of their submission.
    pub(crate) chains: Vec<OrphanedChain>,
}

/// In-flight record of a packed queue.  Links are followed in this process's memory: the region is only written after
/// it was opened, except for descriptors that are resumed.
#[derive(Debug)]
pub(crate) struct PackedRecord {
    area: GuestArea,
    entries: u16,
    /// Entry that follows another one in its list; `entries` or more at the end.
    next: Vec<u16>,
    /// Last entry of the list of a chain, by its first one.
    last: Vec<u16>,
    free: u16,
    used: RingPosition,
    counter: u64,
}

impl PackedRecord {
    /// Opens a record of a queue whose position is `used` if the record is unused.  Otherwise returns the state of the
    /// former device.
    ///
    /// # Errors
    /// A record whose contents contradict each other or the queue.
    pub(crate) fn open(
        area: GuestArea,
        size: u16,
        used: RingPosition,
        ring: &GuestArea,
    ) -> Result<(Self, Option<PackedRemainder>), InflightViolation> {
        let (len, need) = (area.len() as u64, inflight_len(size, true));
        if len < need {
            return Err(InflightViolation::Length { len, need });
        }
        if !area.is_aligned(8) {
            return Err(InflightViolation::Alignment);
        }
        let [version, entries, free, old_free] = cut(area.load_u64(LISTS, Ordering::Acquire));
        if version == 0 {
            return Ok((Self::initialize(area, size, used), None));
        }
        let features = area.load_u64(FEATURES, Ordering::Relaxed);
        if version != VERSION || features != 0 {
            return Err(InflightViolation::Version { version, features });
        }
        if entries < size || inflight_len(entries, true) > len {
            return Err(InflightViolation::Entries { entries, size });
        }
        let [index, old_index, wraps, _] = cut(area.load_u64(POSITIONS, Ordering::Relaxed));
        let [wrap, old_wrap] = wraps.to_ne_bytes();
        let position = |index: u16, wrap: u8| match (index < size, wrap) {
            (true, 0 | 1) => Ok(RingPosition { index, wrap: wrap == 1 }),
            _ => Err(InflightViolation::Position { index, wrap, size }),
        };
        let (used, old_used) = (position(index, wrap)?, position(old_index, old_wrap)?);
        // The driver has seen the last batch as used if its first descriptor is not available any more.
        let flags = ring.load_u16(DESCRIPTOR * usize::from(old_used.index) + RING_FLAGS, Ordering::Acquire);
        let commit = used != old_used && !old_used.is_available(flags);
        let (free, used) = if commit { (free, used) } else { (old_free, old_used) };
        let links = (0..entries).map(|entry| cut(area.load_u64(at(entry, 0), Ordering::Relaxed))).collect::<Vec<_>>();
        let next = links.iter().map(|link| link[1]).collect();
        let last = links.iter().map(|link| link[2]).collect();
        let mut record = Self { area, entries, next, last, free, used, counter: 0 };
        record.put_lists(free);
        record.put_positions(used);
        let chains = record.recover(&links, size)?;
        Ok((record, Some(PackedRemainder { used, chains })))
    }

    fn initialize(area: GuestArea, size: u16, used: RingPosition) -> Self {
        let next: Vec<u16> = (1..=size).collect();
        let record = Self { area, entries: size, next, last: vec![0; usize::from(size)], free: 0, used, counter: 0 };
        put_u64(&record.area, FEATURES, 0, Ordering::Release);
        for entry in 0..size {
            put_u64(&record.area, at(entry, 0), join([0, entry + 1, 0, 0]), Ordering::Release);
            put_u64(&record.area, at(entry, COUNTER), 0, Ordering::Release);
        }
        record.put_positions(used);
        // Stores the version, too.
        record.put_lists(0);
        record
    }

    /// Stores the head of the free list, with an old one.
    fn put_lists(&self, old: u16) {
        put_u64(&self.area, LISTS, join([VERSION, self.entries, self.free, old]), Ordering::Release);
    }

    /// Stores a used position, with the current one as the old one.
    fn put_positions(&self, used: RingPosition) {
        let wraps = u16::from_ne_bytes([u8::from(used.wrap), u8::from(self.used.wrap)]);
        put_u64(&self.area, POSITIONS, join([used.index, self.used.index, wraps, 0]), Ordering::Release);
    }

    /// Finds the chains in flight.  All entries must be free, or part of one of them.
    fn recover(&mut self, links: &[[u16; 4]], size: u16) -> Result<Vec<OrphanedChain>, InflightViolation> {
        let mut taken = vec![false; links.len()];
        let mut take = |entry: u16| match taken.get_mut(usize::from(entry)) {
            Some(taken) if !*taken => {
                *taken = true;
                Ok(())
            }
            _ => Err(InflightViolation::Entry(entry)),
        };
        let mut states = Vec::with_capacity(links.len());
        for (entry, link) in (0..).zip(links) {
            match link[0].to_ne_bytes()[0] {
                state @ (0 | 1) => states.push(state == 1),
                state => return Err(InflightViolation::EntryState { entry, state }),
            }
        }
        let mut entry = self.free;
        while entry < self.entries {
            take(entry)?;
            if std::mem::take(&mut states[usize::from(entry)]) {
                put_u16(&self.area, at(entry, 0), 0, Ordering::Release);
            }
            entry = self.next[usize::from(entry)];
        }
        let mut chains = Vec::new();
        let mut ids = vec![false; usize::from(size)];
        let mut descriptors = 0;
        for (head, _) in (0..).zip(&states).filter(|(_, in_flight)| **in_flight) {
            let [_, _, last, count] = links[usize::from(head)];
            descriptors += u32::from(count);
            if descriptors > u32::from(size) {
                return Err(InflightViolation::Overrun { descriptors, size });
            }
            let (mut entry, mut found) = (head, None);
            for _ in 0..count {
                take(entry)?;
                found = Some(entry);
                entry = self.next[usize::from(entry)];
            }
            let Some(found) = found.filter(|found| *found == last) else { return Err(InflightViolation::Entry(last)) };
            let [id, ..] = cut(self.area.load_u64(at(found, BUFFER), Ordering::Relaxed));
            match ids.get_mut(usize::from(id)) {
                Some(known) if !*known => *known = true,
                _ => return Err(InflightViolation::BufferId(id)),
            }
            let counter = self.area.load_u64(at(head, COUNTER), Ordering::Relaxed);
            chains.push((counter, OrphanedChain { id, count, entry: head }));
        }
        if let Some(lost) = taken.iter().position(|taken| !taken) {
            return Err(InflightViolation::Entry(lost as u16));
        }
        chains.sort_unstable_by_key(|(counter, chain)| (*counter, chain.entry));
        self.counter = chains.last().map_or(0, |last| last.0.wrapping_add(1));
        Ok(chains.into_iter().map(|(_, chain)| chain).collect())
    }

    /// Reads the copies of a chain's descriptors.
    pub(crate) fn descriptors(&self, entry: u16, count: u16, to: &mut Vec<VirtqDescriptor>) {
        to.clear();
        let mut entry = entry;
        for _ in 0..count {
            let buffer = self.area.load_u64(at(entry, BUFFER), Ordering::Relaxed);
            let [link, flags, ..] = cut(buffer);
            let [.., a, b, c, d] = buffer.to_ne_bytes();
            let len = u32::from_ne_bytes([a, b, c, d]);
            let addr = self.area.load_u64(at(entry, ADDRESS), Ordering::Relaxed);
            to.push(VirtqDescriptor { addr, len, flags, link });
            entry = self.next[usize::from(entry)];
        }
    }

    /// Records a chain that was taken from the ring, and returns its first entry.  The free list has enough entries: no
    /// more than the ring's size are in flight.
    pub(crate) fn fetched(&mut self, descriptors: &[VirtqDescriptor]) -> u16 {
        let head = self.free;
        let mut last = head;
        for descriptor in descriptors {
            last = self.free;
            let ([a, b], [c, d]) = (descriptor.link.to_ne_bytes(), descriptor.flags.to_ne_bytes());
            let [e, f, g, h] = descriptor.len.to_ne_bytes();
            let buffer = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            put_u64(&self.area, at(last, BUFFER), buffer, Ordering::Release);
            put_u64(&self.area, at(last, ADDRESS), descriptor.addr, Ordering::Release);
            self.free = self.next[usize::from(last)];
        }
        self.last[usize::from(head)] = last;
        put_u64(&self.area, at(head, COUNTER), self.counter, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        let state = u16::from_ne_bytes([1, 0]);
        let link = join([state, self.next[usize::from(head)], last, descriptors.len() as u16]);
        put_u64(&self.area, at(head, 0), link, Ordering::Release);
        // Until here the chain is in the free list, where a successor takes it for idle.
        self.put_lists(self.free);
        head
    }

    /// Records that a chain is the next one to be marked as used in the ring.
    pub(crate) fn completing(&mut self, head: u16, used: RingPosition) {
        let last = self.last[usize::from(head)];
        let old = std::mem::replace(&mut self.free, head);
        self.next[usize::from(last)] = old;
        put_u16(&self.area, at(last, 2), old, Ordering::Release);
        self.put_lists(old);
        self.put_positions(used);
        self.used = used;
    }

    /// Records that the ring has a chain marked as used.
    pub(crate) fn completed(&mut self, head: u16) {
        put_u16(&self.area, at(head, 0), 0, Ordering::Release);
        self.put_lists(head);
        self.put_positions(self.used);
    }

    /// Marks the record as unused.
    pub(crate) fn close(&self) {
        put_u16(&self.area, LISTS, 0, Ordering::Release);
    }
}
