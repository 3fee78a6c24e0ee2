//! Packed virtqueue (VIRTIO 1.2, 2.8).

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::{
    ChainSegment, DESCRIPTOR, DriverRingOptions, INDIRECT, IndirectTables, NEXT, RawDescriptor, RingParts, UsedChain,
    WRITE, needs_event,
};
use crate::error::{FrontEndError, Result};
use crate::memory::{GuestMemory, PAGE};

/// Descriptor was made available, if it equals the driver's wrap counter.
pub const AVAILABLE: u16 = 1 << 7;
/// Descriptor was used, if it equals the device's wrap counter.
pub const USED: u16 = 1 << 15;
/// Notifications are wanted.
const EVENT_ENABLE: u16 = 0;
/// Notifications are not wanted.
const EVENT_DISABLE: u16 = 1;
/// Notification of one descriptor is wanted.
const EVENT_DESCRIPTOR: u16 = 2;

/// Position in a ring, with the wrap counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedPosition {
    /// Index of a descriptor.
    pub index: u16,
    /// Wrap counter.
    pub wrap: bool,
}

impl PackedPosition {
    const START: Self = Self { index: 0, wrap: true };

    fn advance(&mut self, count: u16, size: u16) {
        self.index += count;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }

    fn encode(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    fn available_flags(self) -> u16 {
        if self.wrap { AVAILABLE } else { USED }
    }
}

/// Driver's side of a packed virtqueue.
#[derive(Debug)]
pub struct PackedDriverRing {
    memory: GuestMemory,
    options: DriverRingOptions,
    size: u16,
    parts: RingParts,
    free: u16,
    ids: VecDeque<u16>,
    /// Descriptors in the ring of the chains in flight, by id.
    chains: Vec<Option<u16>>,
    /// Ids of the chains in flight, in the order in which they were added.
    order: VecDeque<u16>,
    ready: VecDeque<UsedChain>,
    tables: IndirectTables,
    next: PackedPosition,
    used: PackedPosition,
    /// Head of the first chain that is not published, with its flags.
    held: Option<(u16, u16)>,
    /// Descriptors that are not published.
    added: u16,
}

impl PackedDriverRing {
    /// Creates a queue in guest memory.
    ///
    /// # Errors
    /// When guest memory has no space.
    pub fn create(memory: &GuestMemory, size: u16, options: DriverRingOptions) -> Result<Self> {
        let zeroed = |length: u64| -> Result<u64> {
            let address = memory.allocate(length, PAGE)?;
            memory.write(address, &vec![0; length as usize])?;
            Ok(address)
        };
        let parts =
            RingParts { descriptors: zeroed(DESCRIPTOR * u64::from(size))?, available: zeroed(4)?, used: zeroed(4)? };
        Ok(Self {
            memory: memory.clone(),
            options,
            size,
            parts,
            free: size,
            ids: (0..size).collect(),
            chains: vec![None; usize::from(size)],
            order: VecDeque::new(),
            ready: VecDeque::new(),
            tables: IndirectTables::new(size),
            next: PackedPosition::START,
            used: PackedPosition::START,
            held: None,
            added: 0,
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

    /// Returns where the next chain will be, and where the next used one.
    pub fn positions(&self) -> (PackedPosition, PackedPosition) {
        (self.next, self.used)
    }

    /// Returns the flags that make a descriptor available at the position of the next chain.
    pub fn available_flags(&self) -> u16 {
        self.next.available_flags()
    }

    /// Adds a chain; returns its id.
    ///
    /// # Errors
    /// [`FrontEndError::QueueFull`] when descriptors are short.
    pub fn add(&mut self, chain: &[ChainSegment]) -> Result<u16> {
        let is_indirect = self.options.indirect && chain.len() > 1;
        let needed = if is_indirect { 1 } else { chain.len() };
        if usize::from(self.free) < needed || needed == 0 {
            return Err(FrontEndError::QueueFull);
        }
        let id = self.ids.pop_front().ok_or(FrontEndError::QueueFull)?;
        let head = self.next;
        let mut head_flags = 0;
        if is_indirect {
            let table = self.tables.table(&self.memory, id, chain.len() as u64)?;
            let direction = |segment: &ChainSegment| if segment.is_writable { WRITE } else { 0 };
            let entry = |segment: &ChainSegment| RawDescriptor {
                address: segment.address,
                length: segment.length,
                flags: direction(segment),
                next_or_id: 0,
            };
            let bytes: Vec<u8> = chain.iter().flat_map(|segment| entry(segment).encode_packed()).collect();
            self.memory.write(table, &bytes)?;
            head_flags = INDIRECT | self.next.available_flags();
            self.write_body(self.next.index, table, bytes.len() as u32, id)?;
            self.next.advance(1, self.size);
        } else {
            for (at, segment) in chain.iter().enumerate() {
                let mut flags = self.next.available_flags();
                flags |= if segment.is_writable { WRITE } else { 0 };
                flags |= if at + 1 < chain.len() { NEXT } else { 0 };
                self.write_body(self.next.index, segment.address, segment.length, id)?;
                match at {
                    0 => head_flags = flags,
                    _ => self.write_flags(self.next.index, flags, Ordering::Relaxed)?,
                }
                self.next.advance(1, self.size);
            }
        }
        let needed = needed as u16;
        self.free -= needed;
        self.added += needed;
        self.chains[usize::from(id)] = Some(needed);
        self.order.push_back(id);
        match self.held {
            // The device stops at the first head that is not available, so that the others may be.
            None => self.held = Some((head.index, head_flags)),
            Some(_) => self.write_flags(head.index, head_flags, Ordering::Release)?,
        }
        Ok(id)
    }

    /// Makes added chains available; returns whether the device wants to be notified.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn publish(&mut self) -> Result<bool> {
        let Some((head, flags)) = self.held.take() else { return Ok(false) };
        self.write_flags(head, flags, Ordering::Release)?;
        let added = std::mem::take(&mut self.added);
        // Descriptors are written before the device's wish is read (2.8).
        fence(Ordering::SeqCst);
        let position: u16 = self.memory.load(self.parts.used, Ordering::Relaxed)?;
        let flags: u16 = self.memory.load(self.parts.used + 2, Ordering::Relaxed)?;
        Ok(match flags & 3 {
            EVENT_ENABLE => true,
            EVENT_DISABLE => false,
            _ => {
                let (new, old) = (self.next.index, self.next.index.wrapping_sub(added));
                let is_this_round = (position >> 15 == 1) == self.next.wrap;
                let event = (position & 0x7FFF).wrapping_sub(if is_this_round { 0 } else { self.size });
                needs_event(event, new, old)
            }
        })
    }

    /// Returns whether the next descriptor is marked as used.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn is_used(&self) -> Result<bool> {
        let at = self.parts.descriptors + DESCRIPTOR * u64::from(self.used.index);
        let flags: u16 = self.memory.load(at + 14, Ordering::Acquire)?;
        let is = |bit: u16| flags & bit != 0;
        Ok(is(AVAILABLE) == self.used.wrap && is(USED) == self.used.wrap)
    }

    /// Takes the next used chain.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn take_used(&mut self) -> Result<Option<UsedChain>> {
        if let Some(used) = self.ready.pop_front() {
            return Ok(Some(used));
        }
        if !self.is_used()? {
            return Ok(None);
        }
        let at = self.parts.descriptors + DESCRIPTOR * u64::from(self.used.index);
        let flags: u16 = self.memory.load(at + 14, Ordering::Relaxed)?;
        let id: u16 = self.memory.load(at + 12, Ordering::Relaxed)?;
        let written: u32 = self.memory.load(at + 8, Ordering::Relaxed)?;
        let written = if flags & WRITE != 0 { written } else { 0 };
        let Some(place) = self.order.iter().position(|&other| other == id) else {
            return Err(FrontEndError::Violation(format!("used chain {id} was not available")));
        };
        if !self.options.in_order {
            self.order.remove(place);
            return Ok(Some(self.finish(id, Some(written))));
        }
        for at in 0..=place {
            let Some(other) = self.order.pop_front() else { break };
            let used = self.finish(other, (at == place).then_some(written));
            self.ready.push_back(used);
        }
        Ok(self.ready.pop_front())
    }

    fn finish(&mut self, id: u16, written: Option<u32>) -> UsedChain {
        let count = self.chains[usize::from(id)].take().unwrap_or(0);
        self.used.advance(count, self.size);
        self.free += count;
        self.ids.push_back(id);
        UsedChain { id, written }
    }

    /// Asks the device for a notification of the next used chain, or for none.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<()> {
        let flags = match (enabled, self.options.event_idx) {
            (false, _) => EVENT_DISABLE,
            (true, false) => EVENT_ENABLE,
            (true, true) => EVENT_DESCRIPTOR,
        };
        if flags == EVENT_DESCRIPTOR {
            self.memory.store(self.parts.available, self.used.encode(), Ordering::Relaxed)?;
        }
        self.memory.store(self.parts.available + 2, flags, Ordering::Release)?;
        // The wish is written before used chains are looked for once more (2.8).
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// Returns the position up to which chains were used, as that of both sides.
    pub fn resume_base(&self) -> u32 {
        u32::from(self.used.encode()) | u32::from(self.used.encode()) << 16
    }

    /// Returns the position up to which chains were made available, as that of both sides.
    pub fn drained_base(&self) -> u32 {
        u32::from(self.next.encode()) | u32::from(self.next.encode()) << 16
    }

    /// Writes any descriptor, its flags last.
    ///
    /// # Errors
    /// Outside of guest memory.
    pub fn write_descriptor(&self, index: u16, descriptor: &RawDescriptor) -> Result<()> {
        self.write_body(index, descriptor.address, descriptor.length, descriptor.next_or_id)?;
        self.write_flags(index, descriptor.flags, Ordering::Release)
    }

    fn write_body(&self, index: u16, address: u64, length: u32, id: u16) -> Result<()> {
        let bytes = RawDescriptor { address, length, flags: 0, next_or_id: id }.encode_packed();
        self.memory.write(self.parts.descriptors + DESCRIPTOR * u64::from(index), &bytes[..14])
    }

    fn write_flags(&self, index: u16, flags: u16, order: Ordering) -> Result<()> {
        self.memory.store(self.parts.descriptors + DESCRIPTOR * u64::from(index) + 14, flags, order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryLayout;

    fn ring(size: u16, options: DriverRingOptions) -> PackedDriverRing {
        let memory = GuestMemory::create(&MemoryLayout::single(1 << 20)).expect("memory");
        PackedDriverRing::create(&memory, size, options).expect("space")
    }

    fn chain(count: usize) -> Vec<ChainSegment> {
        (0..count).map(|at| ChainSegment::readable(0x1000 * at as u64, 512)).collect()
    }

    fn answer(ring: &PackedDriverRing, position: PackedPosition, id: u16) {
        let flags = if position.wrap { AVAILABLE | USED } else { 0 };
        let descriptor = RawDescriptor { address: 0, length: 0, flags, next_or_id: id };
        ring.write_descriptor(position.index, &descriptor).expect("written");
    }

    #[test]
    fn chains_go_round_a_ring_of_any_size() {
        let mut ring = ring(7, DriverRingOptions::default());
        for _ in 0..100 {
            let at = ring.positions().1;
            let ids = [ring.add(&chain(3)).expect("space"), ring.add(&chain(2)).expect("space")];
            assert!(matches!(ring.add(&chain(3)), Err(FrontEndError::QueueFull)));
            assert!(ring.publish().expect("published"));
            assert_eq!(ring.take_used().expect("known"), None);
            // Used in the other order: the second, of two descriptors, first.
            answer(&ring, at, ids[1]);
            assert_eq!(ring.take_used().expect("known").map(|used| used.id), Some(ids[1]));
            let mut then = at;
            then.advance(2, 7);
            assert_eq!(ring.positions().1, then);
            answer(&ring, then, ids[0]);
            assert_eq!(ring.take_used().expect("known").map(|used| used.id), Some(ids[0]));
            assert_eq!(ring.take_used().expect("known"), None);
        }
        assert_eq!(ring.resume_base(), ring.drained_base());
    }

    #[test]
    fn one_descriptor_stands_for_a_batch_in_order() {
        let mut ring = ring(8, DriverRingOptions { in_order: true, ..Default::default() });
        let ids: Vec<u16> = (0..3).map(|_| ring.add(&chain(2)).expect("space")).collect();
        ring.publish().expect("published");
        answer(&ring, PackedPosition::START, ids[1]);
        let used: Vec<UsedChain> = std::iter::from_fn(|| ring.take_used().expect("known")).collect();
        assert_eq!(
            used.iter().map(|used| (used.id, used.written.is_some())).collect::<Vec<_>>(),
            [(ids[0], false), (ids[1], true)]
        );
        assert_eq!(ring.positions().1, PackedPosition { index: 4, wrap: true });
    }

    #[test]
    fn a_device_asks_for_one_descriptor() {
        let mut ring = ring(8, DriverRingOptions { event_idx: true, ..Default::default() });
        let wish = |ring: &PackedDriverRing, index: u16, wrap: bool| {
            let position = PackedPosition { index, wrap };
            ring.memory.store(ring.parts.used, position.encode(), Ordering::Relaxed).expect("written");
            ring.memory.store(ring.parts.used + 2, EVENT_DESCRIPTOR, Ordering::Relaxed).expect("written");
        };
        wish(&ring, 3, true);
        ring.add(&chain(3)).expect("space");
        assert!(!ring.publish().expect("published"));
        ring.add(&chain(3)).expect("space");
        assert!(ring.publish().expect("published"));
        // Two rounds later, over the end of the ring.
        answer(&ring, PackedPosition { index: 0, wrap: true }, 0);
        answer(&ring, PackedPosition { index: 3, wrap: true }, 1);
        assert_eq!(std::iter::from_fn(|| ring.take_used().expect("known")).count(), 2);
        wish(&ring, 7, true);
        ring.add(&chain(4)).expect("space");
        assert!(ring.publish().expect("published"));
        wish(&ring, 2, false);
        ring.add(&chain(1)).expect("space");
        assert!(ring.publish().expect("published"));
        ring.add(&chain(1)).expect("space");
        assert!(!ring.publish().expect("published"));
    }
}
