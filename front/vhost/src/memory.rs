//! Memory of a guest: the regions that its monitor shares, and finding bytes in them by address.
//!
//! Three kinds of addresses occur.  A *guest address* (physical) is what descriptors contain without an IOMMU; a *user
//! address* is one of the monitor's own address space, which ring addresses are and what an IOMMU translates to; an
//! *I/O virtual address* is what descriptors and rings contain with an IOMMU.
//!
//! 1. Every access is within one region's mapping: [`GuestArea`] cannot be created outside.
//! 2. An area keeps its mapping alive: requests in flight outlive a change of the table.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use forebay_reactor::{BufMut, GuardedMapping};

use crate::iotlb::{Iotlb, IotlbMiss};

/// Maximum regions of a table, as announced to the front-end.
pub const REGIONS_MAX: usize = 64;

/// Direction of an access, as seen by the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MemoryAccess {
    /// The device reads.
    Read,
    /// The device writes.
    Write,
    /// The device reads and writes, as it does with rings.
    ReadWrite,
}

/// Reason for which guest memory cannot be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFault {
    /// Address that no region contains.
    #[error("address {addr:#x} + {len} bytes is outside the guest's memory")]
    Outside {
        /// First address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Address that the IOMMU's table does not translate yet: ask for it, and retry.
    #[error("I/O virtual address {:#x} is not mapped", .0.iova)]
    Unmapped(IotlbMiss),
}

/// Location of a region, as the front-end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPlace {
    /// First guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    /// First user address.
    pub user: u64,
    /// Offset of the first byte in the region's file.
    pub file_offset: u64,
}

impl RegionPlace {
    /// Returns whether the region is not empty and none of its address ranges overflows.
    pub fn is_valid(&self) -> bool {
        self.len > 0
            && self.guest.checked_add(self.len).is_some()
            && self.user.checked_add(self.len).is_some()
            && self.file_offset.checked_add(self.len).is_some()
    }

    /// Returns whether two regions share guest or user addresses.
    pub fn overlaps(&self, other: &Self) -> bool {
        let meet =
            |one: u64, other_first: u64, other_len: u64| one < other_first + other_len && other_first < one + self.len;
        meet(self.guest, other.guest, other.len) || meet(self.user, other.user, other.len)
    }
}

/// Region of a guest's memory, mapped.
#[derive(Debug, Clone)]
pub struct GuestRegion {
    place: RegionPlace,
    mapping: Rc<GuardedMapping>,
}

impl GuestRegion {
    /// Creates a region whose first byte is the mapping's.
    ///
    /// # Panics
    /// When the mapping is shorter than the region, or the region is not [valid](RegionPlace::is_valid).
    pub fn new(place: RegionPlace, mapping: Rc<GuardedMapping>) -> Self {
        assert!(place.is_valid() && mapping.len() as u64 >= place.len, "region {place:?} of {} bytes", mapping.len());
        Self { place, mapping }
    }

    /// Returns the location.
    pub fn place(&self) -> &RegionPlace {
        &self.place
    }

    /// Returns the location and another mapping of it, for another core.
    pub fn share(&self) -> (RegionPlace, GuardedMapping) {
        (self.place, self.mapping.share())
    }
}

/// Contiguous bytes of guest memory.
#[derive(Clone)]
pub struct GuestArea {
    mapping: Rc<GuardedMapping>,
    at: usize,
    len: usize,
}

impl GuestArea {
    /// Returns the area of `len` bytes from `at` of a mapping; `None` when it does not contain them.
    pub fn of(mapping: &Rc<GuardedMapping>, at: usize, len: usize) -> Option<Self> {
        let fits = at.checked_add(len).is_some_and(|end| end <= mapping.len());
        fits.then(|| Self { mapping: mapping.clone(), at, len })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the area has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the first byte is aligned to `align` bytes in memory.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.mapping.is_aligned(self.at, align)
    }

    fn position(&self, at: usize, len: usize) -> usize {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "{at} + {len} of {} bytes", self.len);
        self.at + at
    }

    /// Returns the part of `len` bytes from `at`.
    ///
    /// # Panics
    /// As all accessors: when the range is outside the area, or an atomic is not aligned.
    pub fn part(&self, at: usize, len: usize) -> Self {
        Self { mapping: self.mapping.clone(), at: self.position(at, len), len }
    }

    /// Copies bytes out.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        self.mapping.read(self.position(at, to.len()), to);
    }

    /// Copies bytes in.
    pub fn write(&self, at: usize, from: &[u8]) {
        self.mapping.write(self.position(at, from.len()), from);
    }

    /// Appends the whole area to a buffer with enough space.
    pub fn read_into(&self, to: &mut BufMut) {
        self.mapping.read_into(self.at, self.len, to);
    }

    /// Loads a native-endian number.
    pub fn load_u16(&self, at: usize, order: Ordering) -> u16 {
        self.mapping.load_u16(self.position(at, 2), order)
    }

    /// Stores a native-endian number.
    pub fn store_u16(&self, at: usize, value: u16, order: Ordering) {
        self.mapping.store_u16(self.position(at, 2), value, order);
    }

    /// Loads a native-endian number.
    pub fn load_u32(&self, at: usize, order: Ordering) -> u32 {
        self.mapping.load_u32(self.position(at, 4), order)
    }

    /// Stores a native-endian number.
    pub fn store_u32(&self, at: usize, value: u32, order: Ordering) {
        self.mapping.store_u32(self.position(at, 4), value, order);
    }

    /// Loads a native-endian number.
    pub fn load_u64(&self, at: usize, order: Ordering) -> u64 {
        self.mapping.load_u64(self.position(at, 8), order)
    }

    /// Stores a native-endian number.
    pub fn store_u64(&self, at: usize, value: u64, order: Ordering) {
        self.mapping.store_u64(self.position(at, 8), value, order);
    }

    /// Sets bits of a byte atomically.
    pub fn or_u8(&self, at: usize, bits: u8, order: Ordering) {
        self.mapping.or_u8(self.position(at, 1), bits, order);
    }

    /// Returns whether pages of the mapping were lost, because its file was truncated.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

impl std::fmt::Debug for GuestArea {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GuestArea({} + {})", self.at, self.len)
    }
}

/// Part of a request's buffer: contiguous bytes of guest memory and their guest address, by which writes are logged.
#[derive(Debug, Clone)]
pub struct GuestPart {
    /// Guest address of the first byte.
    pub guest: u64,
    /// Bytes in memory.
    pub area: GuestArea,
}

/// Table of a guest's memory.  Immutable: a change makes another table, and requests in flight keep the former one's
/// mappings.
#[derive(Debug, Clone, Default)]
pub struct GuestMemory {
    /// Regions by guest address; no two overlap.
    regions: Vec<GuestRegion>,
}

impl GuestMemory {
    /// Creates a table.
    ///
    /// # Errors
    /// Text that names the regions that overlap, or the limit.
    pub fn new(mut regions: Vec<GuestRegion>) -> Result<Self, String> {
        if regions.len() > REGIONS_MAX {
            return Err(format!("{} memory regions; at most {REGIONS_MAX} are supported", regions.len()));
        }
        regions.sort_by_key(|region| region.place.guest);
        for (at, region) in regions.iter().enumerate() {
            if let Some(other) = regions[..at].iter().find(|other| other.place.overlaps(&region.place)) {
                return Err(format!("memory regions overlap: {:x?} and {:x?}", other.place, region.place));
            }
        }
        Ok(Self { regions })
    }

    /// Returns the regions, by guest address.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Returns whether pages of a region were lost, because its file was truncated.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    fn part(region: &GuestRegion, at: u64, len: u64) -> GuestPart {
        let area = GuestArea { mapping: region.mapping.clone(), at: at as usize, len: len as usize };
        GuestPart { guest: region.place.guest + at, area }
    }

    /// Appends the parts that guest addresses lie in, in order; adjacent regions may share a buffer.
    fn find_guest(&self, addr: u64, len: u64, to: &mut Vec<GuestPart>) -> Result<(), MemoryFault> {
        let outside = MemoryFault::Outside { addr, len };
        let end = addr.checked_add(len).ok_or(outside)?;
        let mut next = addr;
        let mut index =
            self.regions.partition_point(|region| region.place.guest <= addr).checked_sub(1).ok_or(outside)?;
        while next < end {
            let region = self.regions.get(index).ok_or(outside)?;
            let at = next.checked_sub(region.place.guest).filter(|at| *at < region.place.len).ok_or(outside)?;
            let part = (end - next).min(region.place.len - at);
            to.push(Self::part(region, at, part));
            next += part;
            index += 1;
        }
        Ok(())
    }

    /// Appends the parts that user addresses lie in.
    fn find_user(&self, addr: u64, len: u64, to: &mut Vec<GuestPart>) -> Result<(), MemoryFault> {
        let outside = MemoryFault::Outside { addr, len };
        let end = addr.checked_add(len).ok_or(outside)?;
        let mut next = addr;
        while next < end {
            let found = self
                .regions
                .iter()
                .find(|region| next.checked_sub(region.place.user).is_some_and(|at| at < region.place.len));
            let region = found.ok_or(outside)?;
            let at = next - region.place.user;
            let part = (end - next).min(region.place.len - at);
            to.push(Self::part(region, at, part));
            next += part;
        }
        Ok(())
    }
}

impl GuestPart {
    /// Appends another part, if it follows this one in memory and in guest addresses; otherwise returns it.
    fn join(&mut self, next: GuestPart) -> Option<GuestPart> {
        let (one, other) = (&mut self.area, &next.area);
        let follows = Rc::ptr_eq(&one.mapping, &other.mapping)
            && one.at + one.len == other.at
            && self.guest + one.len as u64 == next.guest;
        if !follows {
            return Some(next);
        }
        one.len += other.len;
        None
    }
}

/// Joins the parts from the index `first` on that follow each other: an IOMMU maps pages one by one, which are mostly next
/// to each other in memory.
fn join_parts(parts: &mut Vec<GuestPart>, first: usize) {
    let apart = parts.split_off(first);
    for part in apart {
        let part = match parts.get_mut(first..).and_then(<[GuestPart]>::last_mut) {
            Some(last) => last.join(part),
            None => Some(part),
        };
        parts.extend(part);
    }
}

/// Finds guest memory by the addresses that rings and descriptors contain.
#[derive(Debug, Clone, Copy)]
pub struct AddressSpace<'a> {
    /// Table of memory.
    pub memory: &'a GuestMemory,
    /// Table of the IOMMU, if the device is behind one.
    pub iotlb: Option<&'a Iotlb>,
}

impl<'a> AddressSpace<'a> {
    /// Creates an address space without an IOMMU.
    pub fn plain(memory: &'a GuestMemory) -> Self {
        Self { memory, iotlb: None }
    }

    /// Appends the parts that a buffer of a descriptor lies in, in order; none for an empty buffer.
    ///
    /// # Errors
    /// The first address that cannot be accessed.  `to` may have grown.
    pub fn find(&self, addr: u64, len: u64, access: MemoryAccess, to: &mut Vec<GuestPart>) -> Result<(), MemoryFault> {
        match self.iotlb {
            None => self.memory.find_guest(addr, len, to),
            Some(iotlb) => self.find_translated(iotlb, addr, len, access, to),
        }
    }

    fn find_translated(
        &self,
        iotlb: &Iotlb,
        addr: u64,
        len: u64,
        access: MemoryAccess,
        to: &mut Vec<GuestPart>,
    ) -> Result<(), MemoryFault> {
        let end = addr.checked_add(len).ok_or(MemoryFault::Outside { addr, len })?;
        let (mut next, first) = (addr, to.len());
        while next < end {
            let (user, rest) = iotlb.translate(next, access).map_err(MemoryFault::Unmapped)?;
            let part = rest.min(end - next);
            self.memory.find_user(user, part, to)?;
            next += part;
        }
        if to.len() - first > 1 {
            join_parts(to, first);
        }
        Ok(())
    }

    /// Returns the contiguous area of a ring: by user address, or with an IOMMU by I/O virtual address.
    ///
    /// # Errors
    /// As [`find`](Self::find); an area that spans regions is [`MemoryFault::Outside`].
    pub fn ring_area(&self, addr: u64, len: u64) -> Result<GuestPart, MemoryFault> {
        let mut parts = Vec::with_capacity(1);
        match self.iotlb {
            None => self.memory.find_user(addr, len, &mut parts)?,
            Some(iotlb) => self.find_translated(iotlb, addr, len, MemoryAccess::ReadWrite, &mut parts)?,
        }
        match parts.len() {
            1 => parts.pop().ok_or(MemoryFault::Outside { addr, len }),
            _ => Err(MemoryFault::Outside { addr, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(guest: u64, len: u64, user: u64) -> GuestRegion {
        let mapping = Rc::new(GuardedMapping::anonymous(len as usize).expect("memory"));
        GuestRegion::new(RegionPlace { guest, len, user, file_offset: 0 }, mapping)
    }

    fn lens(parts: &[GuestPart]) -> Vec<(u64, usize)> {
        parts.iter().map(|part| (part.guest, part.area.len())).collect()
    }

    #[test]
    fn buffers_are_found_across_adjacent_regions_and_not_across_gaps() {
        let regions =
            vec![region(0x3000, 0x1000, 0x9000), region(0, 0x2000, 0x10_000), region(0x2000, 0x1000, 0x20_000)];
        let memory = GuestMemory::new(regions).expect("no overlap");
        let space = AddressSpace::plain(&memory);
        let mut parts = Vec::new();
        space.find(0x1ff0, 0x1020, MemoryAccess::Read, &mut parts).expect("inside");
        assert_eq!(lens(&parts), [(0x1ff0, 0x10), (0x2000, 0x1000), (0x3000, 0x10)]);
        parts.clear();
        for (addr, len) in [(0x4000, 1), (0x3fff, 2), (u64::MAX, 2), (u64::MAX, 1)] {
            let fault = space.find(addr, len, MemoryAccess::Read, &mut parts).expect_err("outside");
            assert_eq!(fault, MemoryFault::Outside { addr, len });
        }
        parts.clear();
        space.find(0x10, 0, MemoryAccess::Read, &mut parts).expect("nothing to find");
        assert!(parts.is_empty());
        assert_eq!(space.ring_area(0x9010, 0x20).expect("inside").guest, 0x3010);
        assert!(space.ring_area(0x9ff0, 0x20).is_err() && space.ring_area(0x10, 1).is_err());
    }

    #[test]
    fn overlapping_regions_are_refused() {
        for (guest, user) in [(0xfff, 0x90_000), (0x5000, 0x10_fff)] {
            let regions = vec![region(0, 0x1000, 0x10_000), region(guest, 0x1000, user)];
            assert!(GuestMemory::new(regions).expect_err("overlap").contains("overlap"));
        }
        let many = (0..=REGIONS_MAX as u64).map(|at| region(at << 12, 0x1000, at << 12)).collect();
        assert!(GuestMemory::new(many).is_err());
        let place = |guest, len, user, file_offset| RegionPlace { guest, len, user, file_offset };
        assert!(!place(0, 0, 0, 0).is_valid() && !place(u64::MAX, 2, 0, 0).is_valid());
        assert!(!place(0, 2, u64::MAX, 0).is_valid() && !place(0, 2, 0, u64::MAX).is_valid());
    }

    #[test]
    fn an_iommu_translates_buffers_and_rings() {
        let memory = GuestMemory::new(vec![region(0x8000, 0x4000, 0x10_000)]).expect("a region");
        let mut iotlb = Iotlb::default();
        iotlb.insert(0x100_000, 0x1000, 0x11_000, MemoryAccess::ReadWrite).expect("room");
        iotlb.insert(0x101_000, 0x1000, 0x12_000, MemoryAccess::Read).expect("room");
        let space = AddressSpace { memory: &memory, iotlb: Some(&iotlb) };
        let mut parts = Vec::new();
        space.find(0x100_ff0, 0x20, MemoryAccess::Read, &mut parts).expect("mapped");
        assert_eq!(lens(&parts), [(0x9ff0, 0x20)], "pages next to each other are one part");
        let fault = space.find(0x100_ff0, 0x20, MemoryAccess::Write, &mut parts).expect_err("read-only");
        assert_eq!(fault, MemoryFault::Unmapped(IotlbMiss { iova: 0x101_000, access: MemoryAccess::Write }));
        assert!(space.ring_area(0x100_ff0, 0x20).is_err(), "the second page is read-only");
        iotlb.insert(0x101_000, 0x1000, 0x12_000, MemoryAccess::ReadWrite).expect("room");
        let space = AddressSpace { memory: &memory, iotlb: Some(&iotlb) };
        assert_eq!(space.ring_area(0x100_ff0, 0x20).expect("adjacent").area.len(), 0x20);
    }
}
