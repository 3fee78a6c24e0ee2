//! Split virtqueue (VIRTIO 1.2, 2.7).

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::{
    ChainSegment, DESCRIPTOR, DriverRingOptions, INDIRECT, IndirectTables, NEXT, RawDescriptor, RingParts, UsedChain,
    WRITE, needs_event,
};
use crate::error::{FrontEndError, Result};
use crate::memory::{GuestMemory, PAGE};

/// Driver's side of a split virtqueue.
#[derive(Debug)]
pub struct SplitDriverRing {
    memory: GuestMemory,
    options: DriverRingOptions,
    size: u16,
    parts: RingParts,
    /// Free descriptors; with IN_ORDER used from the front and given back at the end, so always in ring order.
    free: VecDeque<u16>,
    /// Descriptors of the chains in flight, by head.
    chains: Vec<Vec<u16>>,
    /// Heads of the chains in flight, in the order in which they were added.
    order: VecDeque<u16>,
    ready: VecDeque<UsedChain>,
    tables: IndirectTables,
    /// Available index, with what is not published.
    next: u16,
    published: u16,
    used: u16,
    /// Index whose notification was asked for (EVENT_IDX), if it is one that is long past.
    past_event: Option<u16>,
}

impl SplitDriverRing {
    /// Creates a queue in guest memory.
    ///
    /// # Errors
    /// When guest memory has no space.
    pub fn create(memory: &GuestMemory, size: u16, options: DriverRingOptions) -> Result<Self> {
        let entries = u64::from(size);
        let zeroed = |length: u64| -> Result<u64> {
            let address = memory.allocate(length, PAGE)?;
            memory.write(address, &vec![0; length as usize])?;
            Ok(address)
        };
        let parts = RingParts {
            descriptors: zeroed(DESCRIPTOR * entries)?,
            available: zeroed(6 + 2 * entries)?,
            used: zeroed(6 + 8 * entries)?,
        };
        Ok(Self {
            memory: memory.clone(),
            options,
            size,
            parts,
            free: (0..size).collect(),
            chains: vec![Vec::new(); usize::from(size)],
            order: VecDeque::new(),
            ready: VecDeque::new(),
            tables: IndirectTables::new(size),
            next: 0,
            published: 0,
            used: 0,
            past_event: None,
        })
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Returns guest addresses of the queue's parts.
    pub fn parts(&self) -> RingParts {
        self.parts
    }

    /// Adds a chain; returns its head.
    ///
    /// # Errors
    /// [`FrontEndError::QueueFull`] when descriptors are short.
    pub fn add(&mut self, chain: &[ChainSegment]) -> Result<u16> {
        let is_indirect = self.options.indirect && chain.len() > 1;
        let needed = if is_indirect { 1 } else { chain.len() };
        if self.free.len() < needed || needed == 0 {
            return Err(FrontEndError::QueueFull);
        }
        let taken: Vec<u16> = self.free.drain(..needed).collect();
        let head = taken[0];
        if is_indirect {
            let table = self.tables.table(&self.memory, head, chain.len() as u64)?;
            let mut bytes = Vec::with_capacity(chain.len() * DESCRIPTOR as usize);
            for (at, segment) in chain.iter().enumerate() {
                bytes.extend(linked(segment, (at + 1 < chain.len()).then_some(at as u16 + 1)).encode_split());
            }
            self.memory.write(table, &bytes)?;
            let length = bytes.len() as u32;
            let whole = RawDescriptor { address: table, length, flags: INDIRECT, next_or_id: 0 };
            self.write_descriptor(head, &whole)?;
        } else {
            for (at, segment) in chain.iter().enumerate() {
                self.write_descriptor(taken[at], &linked(segment, taken.get(at + 1).copied()))?;
            }
        }
        self.chains[usize::from(head)] = taken;
        self.order.push_back(head);
        self.push_head(head)?;
        Ok(head)
    }

    /// Appends any head to the available ring, without publishing it.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn push_head(&mut self, head: u16) -> Result<()> {
        self.write_available_entry(self.next % self.size, head)?;
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Makes added chains available; returns whether the device wants to be notified.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn publish(&mut self) -> Result<bool> {
        let old = std::mem::replace(&mut self.published, self.next);
        self.write_available_index(self.next)?;
        // The index is written before the device's wish is read (2.7).
        fence(Ordering::SeqCst);
        if old == self.next {
            return Ok(false);
        }
        let wish = self.parts.used + if self.options.event_idx { 4 + 8 * u64::from(self.size) } else { 0 };
        let wish: u16 = self.memory.load(wish, Ordering::Acquire)?;
        Ok(if self.options.event_idx { needs_event(wish, self.next, old) } else { wish & 1 == 0 })
    }

    /// Takes the next used chain.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn take_used(&mut self) -> Result<Option<UsedChain>> {
        if let Some(used) = self.ready.pop_front() {
            return Ok(Some(used));
        }
        let index = self.used_index()?;
        if index == self.used {
            return Ok(None);
        }
        // What is long past would be ahead when the index has gone round.
        if self.past_event.is_some_and(|event| self.used.wrapping_sub(event) > 1 << 14) {
            self.set_notifications(false)?;
        }
        let waiting = index.wrapping_sub(self.used);
        if usize::from(waiting) > self.order.len() {
            let said = format!("used index {index} after {}, {} in flight", self.used, self.order.len());
            return Err(FrontEndError::Violation(said));
        }
        let mut entry = [0; 8];
        self.memory.read(self.parts.used + 4 + 8 * u64::from(self.used % self.size), &mut entry)?;
        let [id, written] =
            [0, 4].map(|at| u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]));
        let place = self.order.iter().position(|&head| u32::from(head) == id);
        let Some(place) = place else {
            return Err(FrontEndError::Violation(format!("used chain {id} was not available")));
        };
        if !self.options.in_order {
            self.order.remove(place);
            self.used = self.used.wrapping_add(1);
            return Ok(Some(self.finish(id as u16, Some(written))));
        }
        if place >= usize::from(waiting) {
            return Err(FrontEndError::Violation(format!("used chain {id} stands for {} of {waiting}", place + 1)));
        }
        for at in 0..=place {
            let Some(head) = self.order.pop_front() else { break };
            let used = self.finish(head, (at == place).then_some(written));
            self.ready.push_back(used);
        }
        self.used = self.used.wrapping_add(place as u16 + 1);
        Ok(self.ready.pop_front())
    }

    fn finish(&mut self, head: u16, written: Option<u32>) -> UsedChain {
        let taken = std::mem::take(&mut self.chains[usize::from(head)]);
        if self.options.in_order {
            self.free.extend(taken);
        } else {
            // The same descriptors again, as long as they are in the cache.
            taken.into_iter().rev().for_each(|index| self.free.push_front(index));
        }
        UsedChain { id: head, written }
    }

    /// Asks the device for a notification of the next used chain, or for none.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<()> {
        if self.options.event_idx {
            let event = if enabled { self.used } else { self.used.wrapping_sub(1) };
            self.past_event = (!enabled).then_some(event);
            self.memory.store(self.parts.available + 4 + 2 * u64::from(self.size), event, Ordering::Release)?;
        } else {
            self.memory.store(self.parts.available, u16::from(!enabled), Ordering::Release)?;
        }
        // The wish is written before used chains are looked for once more (2.7).
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Returns the index up to which chains were used.
    pub fn resume_base(&self) -> u32 {
        u32::from(self.used)
    }

    /// Returns the index up to which chains were made available.
    pub fn drained_base(&self) -> u32 {
        u32::from(self.published)
    }

    /// Returns the device's used index.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn used_index(&self) -> Result<u16> {
        self.memory.load(self.parts.used + 2, Ordering::Acquire)
    }

    /// Writes any descriptor.
    ///
    /// # Errors
    /// Outside of guest memory.
    pub fn write_descriptor(&self, index: u16, descriptor: &RawDescriptor) -> Result<()> {
        self.memory.write(self.parts.descriptors + DESCRIPTOR * u64::from(index), &descriptor.encode_split())
    }

    /// Writes an entry of the available ring.
    ///
    /// # Errors
    /// Outside of guest memory.
    pub fn write_available_entry(&self, slot: u16, head: u16) -> Result<()> {
        self.memory.store(self.parts.available + 4 + 2 * u64::from(slot), head, Ordering::Relaxed)
    }

    /// Writes any available index.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn write_available_index(&self, index: u16) -> Result<()> {
        self.memory.store(self.parts.available + 2, index, Ordering::Release)
    }

    /// Writes an entry of the used ring, which is the device's.
    ///
    /// # Errors
    /// Outside of guest memory.
    pub fn write_used_entry(&self, slot: u16, id: u32, length: u32) -> Result<()> {
        let entry = [id.to_le_bytes(), length.to_le_bytes()].concat();
        self.memory.write(self.parts.used + 4 + 8 * u64::from(slot), &entry)
    }

    /// Writes the used index, which is the device's.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn write_used_index(&self, index: u16) -> Result<()> {
        self.memory.store(self.parts.used + 2, index, Ordering::Release)
    }
}

fn linked(segment: &ChainSegment, next: Option<u16>) -> RawDescriptor {
    let direction = if segment.is_writable { WRITE } else { 0 };
    let flags = direction | if next.is_some() { NEXT } else { 0 };
    RawDescriptor { address: segment.address, length: segment.length, flags, next_or_id: next.unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryLayout;

    fn ring(size: u16, options: DriverRingOptions) -> SplitDriverRing {
        let memory = GuestMemory::create(&MemoryLayout::single(1 << 20)).expect("memory");
        SplitDriverRing::create(&memory, size, options).expect("space")
    }

    fn chain(count: usize) -> Vec<ChainSegment> {
        (0..count).map(|at| ChainSegment::readable(0x1000 * at as u64, 512)).collect()
    }

    #[test]
    fn chains_go_round_the_ring() {
        let mut ring = ring(8, DriverRingOptions::default());
        for round in 0..100_u16 {
            let ids = [ring.add(&chain(3)).expect("space"), ring.add(&chain(5)).expect("space")];
            assert!(matches!(ring.add(&chain(1)), Err(FrontEndError::QueueFull)));
            assert!(ring.publish().expect("published"));
            // Used in the other order.
            for (at, id) in [(0, ids[1]), (1, ids[0])] {
                ring.write_used_entry((2 * round + at) % 8, u32::from(id), 7).expect("written");
            }
            ring.write_used_index(2 * round + 2).expect("written");
            let used: Vec<UsedChain> = std::iter::from_fn(|| ring.take_used().expect("known")).collect();
            assert_eq!(used.iter().map(|used| used.id).collect::<Vec<_>>(), [ids[1], ids[0]]);
        }
        assert_eq!((ring.resume_base(), ring.drained_base()), (200, 200));
    }

    #[test]
    fn one_entry_stands_for_a_batch_in_order() {
        let mut ring = ring(8, DriverRingOptions { in_order: true, ..Default::default() });
        let ids: Vec<u16> = (0..3).map(|_| ring.add(&chain(2)).expect("space")).collect();
        assert_eq!(ids, [0, 2, 4]);
        ring.publish().expect("published");
        ring.write_used_entry(0, 2, 9).expect("written");
        ring.write_used_index(2).expect("written");
        assert_eq!(ring.take_used().expect("known"), Some(UsedChain { id: 0, written: None }));
        assert_eq!(ring.take_used().expect("known"), Some(UsedChain { id: 2, written: Some(9) }));
        assert_eq!(ring.take_used().expect("known"), None);
        assert_eq!([ring.add(&chain(1)).expect("space"), ring.add(&chain(2)).expect("space")], [6, 7]);
        ring.write_used_entry(2, 0, 9).expect("written");
        ring.write_used_index(3).expect("written");
        assert!(ring.take_used().is_err(), "it was used before");
    }

    #[test]
    fn events_are_asked_for_by_index() {
        let mut ring = ring(8, DriverRingOptions { event_idx: true, indirect: true, ..Default::default() });
        ring.add(&chain(12)).expect("space in a table");
        assert!(ring.publish().expect("published"), "the device wants the first");
        ring.add(&chain(2)).expect("space");
        assert!(!ring.publish().expect("published"), "and no other");
        assert!(!ring.publish().expect("published"), "none was added");
    }
}
