//! Driver's side of virtqueues in both formats (VIRTIO 1.2, 2.7 and 2.8), and raw access to all of their fields.

pub mod packed;
pub mod split;

use crate::error::Result;
use crate::memory::GuestMemory;

pub use packed::PackedDriverRing;
pub use split::SplitDriverRing;

/// The descriptor continues in the next one.
pub const NEXT: u16 = 1;
/// The device writes to the buffer.
pub const WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const INDIRECT: u16 = 4;
/// Size in bytes of a descriptor of either format.
pub const DESCRIPTOR: u64 = 16;

/// Buffer of a descriptor chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainSegment {
    /// Guest address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// The device writes to the buffer.
    pub is_writable: bool,
}

impl ChainSegment {
    /// Buffer that the device reads.
    pub fn readable(address: u64, length: u32) -> Self {
        Self { address, length, is_writable: false }
    }

    /// Buffer that the device writes.
    pub fn writable(address: u64, length: u32) -> Self {
        Self { address, length, is_writable: true }
    }
}

/// Descriptor with any contents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Flags of the descriptor.
    pub flags: u16,
    /// Next descriptor in the split format, buffer id in the packed one.
    pub next_or_id: u16,
}

impl RawDescriptor {
    /// Encodes the descriptor of a split ring.
    pub fn encode_split(&self) -> [u8; DESCRIPTOR as usize] {
        self.encode(self.flags, self.next_or_id)
    }

    /// Encodes the descriptor of a packed ring.
    pub fn encode_packed(&self) -> [u8; DESCRIPTOR as usize] {
        self.encode(self.next_or_id, self.flags)
    }

    fn encode(&self, third: u16, fourth: u16) -> [u8; DESCRIPTOR as usize] {
        let mut bytes = [0; DESCRIPTOR as usize];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&third.to_le_bytes());
        bytes[14..].copy_from_slice(&fourth.to_le_bytes());
        bytes
    }
}

/// Chain that the device has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsedChain {
    /// Number that [`DriverRing::add`] has returned.
    pub id: u16,
    /// Bytes that the device has written; `None` where it acknowledged a later chain in its stead (IN_ORDER).
    pub written: Option<u32>,
}

/// Options of a queue, as negotiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DriverRingOptions {
    /// Chains of several buffers are put in tables of their own (INDIRECT_DESC).
    pub indirect: bool,
    /// Notifications are asked for by index (EVENT_IDX).
    pub event_idx: bool,
    /// The device uses chains in order (IN_ORDER).
    pub in_order: bool,
}

/// Parts of a queue in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingParts {
    /// Descriptor table, or packed ring.
    pub descriptors: u64,
    /// Available ring, or driver area of a packed ring.
    pub available: u64,
    /// Used ring, or device area of a packed ring.
    pub used: u64,
}

/// Virtqueue of either format.
#[derive(Debug)]
pub enum DriverRing {
    /// Split virtqueue.
    Split(SplitDriverRing),
    /// Packed virtqueue.
    Packed(PackedDriverRing),
}

impl DriverRing {
    /// Creates a queue in guest memory.
    ///
    /// # Errors
    /// When guest memory has no space.
    pub fn create(memory: &GuestMemory, size: u16, is_packed: bool, options: DriverRingOptions) -> Result<Self> {
        Ok(match is_packed {
            false => Self::Split(SplitDriverRing::create(memory, size, options)?),
            true => Self::Packed(PackedDriverRing::create(memory, size, options)?),
        })
    }

    /// Returns the queue as a split one.
    ///
    /// # Panics
    /// When it is packed.
    pub fn split(&mut self) -> &mut SplitDriverRing {
        match self {
            Self::Split(ring) => ring,
            Self::Packed(_) => panic!("the queue is packed"),
        }
    }

    /// Returns the queue as a packed one.
    ///
    /// # Panics
    /// When it is split.
    pub fn packed(&mut self) -> &mut PackedDriverRing {
        match self {
            Self::Packed(ring) => ring,
            Self::Split(_) => panic!("the queue is split"),
        }
    }

    /// Returns whether the queue is packed.
    pub fn is_packed(&self) -> bool {
        matches!(self, Self::Packed(_))
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(ring) => ring.size(),
            Self::Packed(ring) => ring.size(),
        }
    }

    /// Returns guest addresses of the queue's parts.
    pub fn parts(&self) -> RingParts {
        match self {
            Self::Split(ring) => ring.parts(),
            Self::Packed(ring) => ring.parts(),
        }
    }

    /// Adds a chain; returns its id.  The device need not see it before [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`FrontEndError::QueueFull`](crate::FrontEndError::QueueFull) when descriptors are short.
    pub fn add(&mut self, chain: &[ChainSegment]) -> Result<u16> {
        match self {
            Self::Split(ring) => ring.add(chain),
            Self::Packed(ring) => ring.add(chain),
        }
    }

    /// Makes added chains available; returns whether the device wants to be notified.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn publish(&mut self) -> Result<bool> {
        match self {
            Self::Split(ring) => ring.publish(),
            Self::Packed(ring) => ring.publish(),
        }
    }

    /// Takes the next used chain.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`](crate::FrontEndError::Violation) when the device used what it had not been given.
    pub fn take_used(&mut self) -> Result<Option<UsedChain>> {
        match self {
            Self::Split(ring) => ring.take_used(),
            Self::Packed(ring) => ring.take_used(),
        }
    }

    /// Returns whether the device has used anything that was not taken.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn is_used(&self) -> Result<bool> {
        match self {
            Self::Split(ring) => Ok(u32::from(ring.used_index()?) != ring.resume_base()),
            Self::Packed(ring) => ring.is_used(),
        }
    }

    /// Asks the device for a notification of the next used chain, or for none.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn set_notifications(&mut self, enabled: bool) -> Result<()> {
        match self {
            Self::Split(ring) => ring.set_notifications(enabled),
            Self::Packed(ring) => ring.set_notifications(enabled),
        }
    }

    /// Returns what SET_VRING_BASE tells a device that continues this queue: the position up to which chains were used.
    pub fn resume_base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.resume_base(),
            Self::Packed(ring) => ring.resume_base(),
        }
    }

    /// Returns what GET_VRING_BASE must say once all chains were used.
    pub fn drained_base(&self) -> u32 {
        match self {
            Self::Split(ring) => ring.drained_base(),
            Self::Packed(ring) => ring.drained_base(),
        }
    }

    /// Writes any descriptor.
    ///
    /// # Errors
    /// Outside of guest memory.
    pub fn write_descriptor(&self, index: u16, descriptor: &RawDescriptor) -> Result<()> {
        match self {
            Self::Split(ring) => ring.write_descriptor(index, descriptor),
            Self::Packed(ring) => ring.write_descriptor(index, descriptor),
        }
    }
}

/// Returns whether an event at `event` lies among those from `old` to `new`, exclusive (2.7.10).
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Tables of indirect descriptors, one for each id; they are kept for the next chain.
#[derive(Debug)]
pub(crate) struct IndirectTables {
    tables: Vec<Option<(u64, u64)>>,
}

impl IndirectTables {
    pub(crate) fn new(size: u16) -> Self {
        Self { tables: vec![None; usize::from(size)] }
    }

    /// Returns the address of a table of at least `count` descriptors.
    pub(crate) fn table(&mut self, memory: &GuestMemory, id: u16, count: u64) -> Result<u64> {
        let slot = &mut self.tables[usize::from(id)];
        if let Some((address, capacity)) = *slot {
            if capacity >= count {
                return Ok(address);
            }
            memory.free(address, capacity * DESCRIPTOR);
            *slot = None;
        }
        let capacity = count.next_power_of_two().max(8);
        let address = memory.allocate(capacity * DESCRIPTOR, DESCRIPTOR)?;
        *slot = Some((address, capacity));
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_among_what_is_new() {
        assert!(needs_event(5, 6, 5) && !needs_event(6, 6, 5) && !needs_event(4, 6, 5));
        assert!(needs_event(65535, 1, 65534) && !needs_event(1, 1, 65534));
    }

    #[test]
    fn fields_are_where_their_format_has_them() {
        let descriptor = RawDescriptor { address: 1, length: 2, flags: 3, next_or_id: 4 };
        assert_eq!(descriptor.encode_split()[8..], [2, 0, 0, 0, 3, 0, 4, 0]);
        assert_eq!(descriptor.encode_packed()[8..], [2, 0, 0, 0, 4, 0, 3, 0]);
    }
}
