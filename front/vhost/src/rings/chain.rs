//! Chains: from descriptors to parts of guest memory, with all bounds of a chain.

use crate::memory::{AddressSpace, GuestPart, MemoryAccess};

use super::{CHAIN_PARTS_MAX, INDIRECT_MAX, VirtqError, VirtqViolation};

/// Length in bytes of a descriptor, in both formats.
pub(crate) const DESCRIPTOR: usize = 16;

/// Flag of a descriptor that is followed by another one.
pub(crate) const NEXT: u16 = 1;
/// Flag of a buffer that the device writes.
pub(crate) const WRITE: u16 = 2;
/// Flag of a descriptor whose buffer is a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;

/// Lists of parts that are kept for later chains.
const SPARE_LISTS: usize = 256;
/// Parts of the longest list that is kept.
const SPARE_PARTS: usize = 256;

/// Descriptor, as read once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VirtqDescriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    /// Index of the next descriptor (split), or buffer ID (packed).
    pub(crate) link: u16,
}

fn number<const N: usize>(bytes: &[u8; DESCRIPTOR], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

impl VirtqDescriptor {
    /// Decodes a descriptor of a split table (VIRTIO 1.2 section 2.7.5).
    pub(crate) fn split(bytes: &[u8; DESCRIPTOR]) -> Self {
        Self {
            addr: u64::from_ne_bytes(number(bytes, 0)),
            len: u32::from_ne_bytes(number(bytes, 8)),
            flags: u16::from_ne_bytes(number(bytes, 12)),
            link: u16::from_ne_bytes(number(bytes, 14)),
        }
    }

    /// Decodes a descriptor of a packed ring or its tables (VIRTIO 1.2 section 2.8.13).
    pub(crate) fn packed(bytes: &[u8; DESCRIPTOR]) -> Self {
        Self {
            addr: u64::from_ne_bytes(number(bytes, 0)),
            len: u32::from_ne_bytes(number(bytes, 8)),
            flags: u16::from_ne_bytes(number(bytes, 14)),
            link: u16::from_ne_bytes(number(bytes, 12)),
        }
    }

    pub(crate) fn is(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Chain that is being read, and memory for later ones.
#[derive(Debug)]
pub(super) struct ChainBuilder {
    /// Set if indirect tables are negotiated.
    indirect: bool,
    descriptors_max: u32,
    readable: Vec<GuestPart>,
    writable: Vec<GuestPart>,
    descriptors: u32,
    bytes: u64,
    any_writable: bool,
    /// Copy of the indirect table: the guest cannot change it while it is followed.
    table: Vec<u8>,
    table_parts: Vec<GuestPart>,
    spare: Vec<Vec<GuestPart>>,
}

impl ChainBuilder {
    pub(super) fn new(size: u16, indirect: bool) -> Self {
        Self {
            indirect,
            descriptors_max: u32::from(size.max(INDIRECT_MAX)),
            readable: Vec::new(),
            writable: Vec::new(),
            descriptors: 0,
            bytes: 0,
            any_writable: false,
            table: Vec::new(),
            table_parts: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Begins a chain; one that was not finished is dropped.
    pub(super) fn begin(&mut self) {
        self.readable.clear();
        self.writable.clear();
        self.descriptors = 0;
        self.bytes = 0;
        self.any_writable = false;
    }

    /// Adds the buffer of a descriptor.
    pub(super) fn add(&mut self, descriptor: &VirtqDescriptor, space: &AddressSpace<'_>) -> Result<(), VirtqError> {
        if self.descriptors == self.descriptors_max {
            return Err(VirtqViolation::ChainLength { max: self.descriptors_max }.into());
        }
        let writable = descriptor.is(WRITE);
        if self.any_writable && !writable {
            return Err(VirtqViolation::ReadableAfterWritable(self.descriptors).into());
        }
        self.descriptors += 1;
        self.any_writable = writable;
        self.bytes += u64::from(descriptor.len);
        if self.bytes > u64::from(u32::MAX) {
            return Err(VirtqViolation::ChainBytes(self.bytes).into());
        }
        // An empty buffer is nowhere: its address means nothing.
        if descriptor.len == 0 {
            return Ok(());
        }
        let (access, parts) =
            if writable { (MemoryAccess::Write, &mut self.writable) } else { (MemoryAccess::Read, &mut self.readable) };
        space.find(descriptor.addr, u64::from(descriptor.len), access, parts)?;
        let parts = self.readable.len() + self.writable.len();
        if parts > CHAIN_PARTS_MAX {
            return Err(VirtqViolation::ChainParts(parts).into());
        }
        Ok(())
    }

    /// Reads the table of an indirect descriptor, and returns the number of its entries.
    pub(super) fn read_table(
        &mut self,
        descriptor: &VirtqDescriptor,
        space: &AddressSpace<'_>,
    ) -> Result<u32, VirtqError> {
        if !self.indirect {
            return Err(VirtqViolation::IndirectUnexpected.into());
        }
        let len = descriptor.len;
        let entries = len / DESCRIPTOR as u32;
        if !len.is_multiple_of(DESCRIPTOR as u32) || !(1..=u32::from(INDIRECT_MAX)).contains(&entries) {
            return Err(VirtqViolation::IndirectLength(len).into());
        }
        self.table_parts.clear();
        space.find(descriptor.addr, u64::from(len), MemoryAccess::Read, &mut self.table_parts)?;
        self.table.resize(len as usize, 0);
        let mut rest = &mut self.table[..];
        for part in self.table_parts.drain(..) {
            let (to, after) = rest.split_at_mut(part.area.len().min(rest.len()));
            part.area.read(0, to);
            rest = after;
        }
        Ok(entries)
    }

    /// Returns the bytes of an entry of the table that was read last.
    pub(super) fn table_entry(&self, index: usize) -> [u8; DESCRIPTOR] {
        self.table.as_chunks().0[index]
    }

    /// Returns the device-readable and the device-writable parts of the chain.
    pub(super) fn finish(&mut self) -> (Vec<GuestPart>, Vec<GuestPart>) {
        let readable = std::mem::replace(&mut self.readable, self.spare.pop().unwrap_or_default());
        let writable = std::mem::replace(&mut self.writable, self.spare.pop().unwrap_or_default());
        (readable, writable)
    }

    /// Keeps the memory of a list for a later chain.
    pub(super) fn recycle(&mut self, mut parts: Vec<GuestPart>) {
        if parts.capacity() > 0 && parts.capacity() <= SPARE_PARTS && self.spare.len() < SPARE_LISTS {
            parts.clear();
            self.spare.push(parts);
        }
    }
}
