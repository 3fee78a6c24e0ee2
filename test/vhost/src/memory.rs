//! Guest memory: files in memory that the front-end and the device map.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::error::{FrontEndError, Result};
use crate::message::RegionDescription;

/// Page size in bytes.
pub const PAGE: u64 = 4096;
/// Difference of user and guest addresses of the first region.  Other regions have other ones, so that a device that takes
/// one for the other, or two regions for one, reads from nowhere.
const USER: u64 = 0x7000_0000_0000;

/// One region to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionLayout {
    /// Guest address.
    pub guest: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Guest memory to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLayout {
    /// Regions, by ascending guest address.
    pub regions: Vec<RegionLayout>,
    /// All regions are parts of one file, as QEMU's are below and above 4 GiB; else each has its own.
    pub one_file: bool,
}

impl MemoryLayout {
    /// One region at guest address 0.
    pub fn single(size: u64) -> Self {
        Self { regions: vec![RegionLayout { guest: 0, size }], one_file: true }
    }

    /// Several regions of equal size, with gaps between them.
    pub fn split(count: u64, size: u64, one_file: bool) -> Self {
        let size = (size / count).next_multiple_of(PAGE);
        let region = |index| RegionLayout { guest: index * (size + 64 * PAGE), size };
        Self { regions: (0..count).map(region).collect(), one_file }
    }

    /// Regions that follow each other without a gap, so that buffers can cross from one to the next.
    pub fn adjacent(count: u64, size: u64) -> Self {
        let size = (size / count).next_multiple_of(PAGE);
        Self { regions: (0..count).map(|index| RegionLayout { guest: index * size, size }).collect(), one_file: false }
    }
}

/// Mapped region of guest memory.
#[derive(Debug)]
pub struct GuestRegion {
    file: Arc<File>,
    map: MmapRegion,
    description: RegionDescription,
}

impl GuestRegion {
    fn new(file: Arc<File>, description: RegionDescription) -> Result<Self> {
        let offset = FileOffset::from_arc(file.clone(), description.offset);
        let map = MmapRegion::from_file(offset, description.size as usize)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self { file, map, description })
    }

    /// Returns what a device is told about it.
    pub fn description(&self) -> RegionDescription {
        self.description
    }

    /// Returns the file.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Changes the size of the file.  Who accesses pages past the end is killed by SIGBUS, this process included.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn truncate(&self, size: u64) -> Result<()> {
        Ok(ftruncate(&self.file, size)?)
    }
}

/// Creates a file in memory.
///
/// # Errors
/// Of the operating system.
pub fn memory_file(size: u64) -> Result<File> {
    let file = memfd_create("forebay-guest", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, size)?;
    Ok(file.into())
}

/// Shared memory outside of guest memory: the dirty log, and requests in flight.
#[derive(Debug)]
pub struct SharedArea {
    file: Arc<File>,
    map: MmapRegion,
}

impl SharedArea {
    /// Creates one of zero bytes.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn create(size: u64) -> Result<Self> {
        Self::map(memory_file(size)?, 0, size)
    }

    /// Maps a file of the device.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn map(file: File, offset: u64, size: u64) -> Result<Self> {
        let file = Arc::new(file);
        let map = MmapRegion::from_file(FileOffset::from_arc(file.clone(), offset), size as usize)
            .map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(Self { file, map })
    }

    /// Returns the file.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns a copy of all bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.map.size()];
        self.map.as_volatile_slice().copy_to(&mut bytes);
        bytes
    }

    /// Overwrites bytes at an offset.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] past the end.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let missing = FrontEndError::NoMemory { address: offset, length: bytes.len() as u64 };
        let slice = self.map.get_slice(offset as usize, bytes.len()).map_err(|_| missing)?;
        slice.copy_from(bytes);
        Ok(())
    }
}

/// Free guest memory: length by address.
#[derive(Debug, Default)]
struct FreeSpace(BTreeMap<u64, u64>);

/// Guest memory and its free space; clones share both.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    regions: Vec<Arc<GuestRegion>>,
    free: Arc<Mutex<FreeSpace>>,
}

impl GuestMemory {
    /// Creates guest memory of zero bytes.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn create(layout: &MemoryLayout) -> Result<Self> {
        let mut memory = Self { regions: Vec::new(), free: Arc::default() };
        let total: u64 = layout.regions.iter().map(|region| region.size).sum();
        let whole = layout.one_file.then(|| memory_file(total)).transpose()?.map(Arc::new);
        let mut offset = 0;
        for region in &layout.regions {
            match &whole {
                Some(file) => memory.map(region, file.clone(), offset)?,
                None => drop(memory.add(region)?),
            }
            offset += region.size;
        }
        Ok(memory)
    }

    /// Adds a region in a file of its own, at an offset that is not 0 but for the first region.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn add(&mut self, region: &RegionLayout) -> Result<Arc<GuestRegion>> {
        let offset = self.regions.len() as u64 * 3 * PAGE;
        self.map(region, Arc::new(memory_file(offset + region.size)?), offset)?;
        Ok(self.regions[self.regions.len() - 1].clone())
    }

    fn map(&mut self, region: &RegionLayout, file: Arc<File>, offset: u64) -> Result<()> {
        let user = USER + region.guest + self.regions.len() as u64 * (1 << 30);
        let description = RegionDescription { guest: region.guest, size: region.size, user, offset };
        self.regions.push(Arc::new(GuestRegion::new(file, description)?));
        self.free.lock().unwrap_or_else(PoisonError::into_inner).0.insert(region.guest, region.size);
        Ok(())
    }

    /// Removes the region at a guest address; allocations in it must have been freed.
    pub fn remove(&mut self, guest: u64) -> Option<Arc<GuestRegion>> {
        let at = self.regions.iter().position(|region| region.description.guest == guest)?;
        let region = self.regions.remove(at);
        let end = guest + region.description.size;
        self.free.lock().unwrap_or_else(PoisonError::into_inner).0.retain(|&start, _| start < guest || start >= end);
        Some(region)
    }

    /// Returns the regions.
    pub fn regions(&self) -> &[Arc<GuestRegion>] {
        &self.regions
    }

    /// Returns the highest guest address, exclusive.
    pub fn end(&self) -> u64 {
        self.regions.iter().map(|region| region.description.guest + region.description.size).max().unwrap_or(0)
    }

    /// Allocates guest memory within one region.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] when no free space is as large.
    pub fn allocate(&self, length: u64, align: u64) -> Result<u64> {
        self.allocate_within(length, align, 0..u64::MAX)
    }

    /// Allocates guest memory in the region with the given index.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] when the region has no such space.
    pub fn allocate_in(&self, region: usize, length: u64, align: u64) -> Result<u64> {
        let missing = FrontEndError::NoMemory { address: u64::MAX, length };
        let RegionDescription { guest, size, .. } = self.regions.get(region).ok_or(missing)?.description;
        self.allocate_within(length, align, guest..guest + size)
    }

    fn allocate_within(&self, length: u64, align: u64, range: Range<u64>) -> Result<u64> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |(&start, &size): (&u64, &u64)| {
            let at = start.next_multiple_of(align);
            (at + length <= start + size).then_some((start, size, at))
        };
        let found = free.0.range(range).find_map(fits);
        let (start, size, at) = found.ok_or(FrontEndError::NoMemory { address: u64::MAX, length })?;
        free.0.remove(&start);
        if at > start {
            free.0.insert(start, at - start);
        }
        if at + length < start + size {
            free.0.insert(at + length, start + size - at - length);
        }
        Ok(at)
    }

    /// Frees what was allocated.
    pub fn free(&self, address: u64, length: u64) {
        if length == 0 {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut start, mut size) = (address, length);
        let region = self.regions.iter().find(|region| contains(region, address, 1)).map(|region| region.description);
        let same =
            |other: u64| region.is_some_and(|region| (region.guest..region.guest + region.size).contains(&other));
        if let Some((&before, &len)) = free.0.range(..start).next_back()
            && before + len == start
            && same(before)
        {
            free.0.remove(&before);
            (start, size) = (before, size + len);
        }
        if let Some(&len) = free.0.get(&(start + size))
            && same(start + size)
        {
            free.0.remove(&(start + size));
            size += len;
        }
        free.0.insert(start, size);
    }

    fn region(&self, address: u64, length: u64) -> Result<(&GuestRegion, usize)> {
        let found = self.regions.iter().find(|region| contains(region, address, length));
        let region = found.ok_or(FrontEndError::NoMemory { address, length })?;
        Ok((region, (address - region.description.guest) as usize))
    }

    /// Returns the user address of a guest address.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] outside of guest memory.
    pub fn user(&self, address: u64) -> Result<u64> {
        let (region, at) = self.region(address, 1)?;
        Ok(region.description.user + at as u64)
    }

    /// Takes a given range out of the free space, such as one across the border of two regions.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] where a part of it is not free.
    pub fn reserve(&self, address: u64, length: u64) -> Result<()> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = address;
        while at < address + length {
            let (&start, &size) = free.0.range(..=at).next_back().ok_or(FrontEndError::NoMemory { address, length })?;
            let end = (start + size).min(address + length);
            if end <= at {
                return Err(FrontEndError::NoMemory { address, length });
            }
            free.0.remove(&start);
            if start < at {
                free.0.insert(start, at - start);
            }
            if end < start + size {
                free.0.insert(end, start + size - end);
            }
            at = end;
        }
        Ok(())
    }

    /// Calls `access` with each part of a range: its region, its place there, and its place in the range.
    fn pieces(
        &self,
        address: u64,
        length: usize,
        mut access: impl FnMut(&GuestRegion, usize, Range<usize>),
    ) -> Result<()> {
        let mut done = 0;
        while done < length {
            let (region, at) = self
                .region(address + done as u64, 1)
                .map_err(|_| FrontEndError::NoMemory { address, length: length as u64 })?;
            let count = (length - done).min(region.description.size as usize - at);
            access(region, at, done..done + count);
            done += count;
        }
        Ok(())
    }

    /// Writes bytes.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] outside of guest memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.pieces(address, bytes.len(), |region, at, range| {
            if let Ok(slice) = region.map.get_slice(at, range.len()) {
                slice.copy_from(&bytes[range]);
            }
        })
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] outside of guest memory.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.pieces(address, into.len(), |region, at, range| {
            if let Ok(slice) = region.map.get_slice(at, range.len()) {
                slice.copy_to(&mut into[range]);
            }
        })
    }

    /// Stores a number atomically, in native byte order; virtqueues are little-endian, as are the machines of this crate.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] outside of guest memory, or at an address that is not aligned.
    pub fn store<T: AtomicAccess>(&self, address: u64, value: T, order: Ordering) -> Result<()> {
        let length = size_of::<T>() as u64;
        let (region, at) = self.region(address, length)?;
        let missing = |_| FrontEndError::NoMemory { address, length };
        region.map.as_volatile_slice().store(value, at, order).map_err(missing)
    }

    /// Loads a number atomically.
    ///
    /// # Errors
    /// [`FrontEndError::NoMemory`] outside of guest memory, or at an address that is not aligned.
    pub fn load<T: AtomicAccess>(&self, address: u64, order: Ordering) -> Result<T> {
        let length = size_of::<T>() as u64;
        let (region, at) = self.region(address, length)?;
        region.map.as_volatile_slice().load(at, order).map_err(|_| FrontEndError::NoMemory { address, length })
    }
}

fn contains(region: &GuestRegion, address: u64, length: u64) -> bool {
    let RegionDescription { guest, size, .. } = region.description;
    address >= guest && length <= size && address - guest <= size - length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_of_one_file_are_apart() {
        for one_file in [false, true] {
            let memory = GuestMemory::create(&MemoryLayout::split(3, 3 << 20, one_file)).expect("memory");
            for (index, region) in memory.regions().iter().enumerate() {
                memory.write(region.description().guest, &[index as u8 + 1; 8]).expect("within");
            }
            for (index, region) in memory.regions().iter().enumerate() {
                let guest = region.description().guest;
                assert_eq!(memory.load::<u8>(guest + 7, Ordering::Relaxed).expect("within"), index as u8 + 1);
                assert_eq!(memory.user(guest).expect("within"), region.description().user);
            }
            assert!(memory.write(memory.end() - 1, &[0; 2]).is_err());
            assert!(memory.read(memory.regions()[0].description().size, &mut [0]).is_err(), "a gap");
        }
    }

    #[test]
    fn what_is_freed_can_be_allocated_again() {
        let memory = GuestMemory::create(&MemoryLayout::split(2, 2 << 20, false)).expect("memory");
        let first = memory.allocate(5, 1).expect("space");
        let second = memory.allocate(1 << 19, 4096).expect("space");
        assert!(second.is_multiple_of(4096) && memory.allocate(1 << 21, 1).is_err());
        let other = memory.allocate_in(1, 16, 16).expect("space");
        assert!(other >= memory.regions()[1].description().guest);
        memory.free(first, 5);
        memory.free(second, 1 << 19);
        assert_eq!(memory.allocate(1 << 20, 4096).expect("all of the first region"), 0);
        assert!(memory.allocate(1 << 20, 1).is_err(), "sixteen bytes of the second are taken");
    }

    #[test]
    fn a_buffer_may_cross_regions() {
        let memory = GuestMemory::create(&MemoryLayout::adjacent(2, 2 * PAGE)).expect("memory");
        memory.reserve(PAGE - 100, 200).expect("free");
        assert!(memory.reserve(PAGE + 99, 1).is_err());
        memory.write(PAGE - 100, &[7; 200]).expect("within");
        let mut bytes = [0; 202];
        memory.read(PAGE - 101, &mut bytes).expect("within");
        assert_eq!((bytes[0], &bytes[1..201], bytes[201]), (0, &[7; 200][..], 0));
        assert_eq!(memory.allocate(PAGE - 100, 1).expect("the rest"), 0);
    }

    #[test]
    fn unaligned_numbers_are_refused() {
        let memory = GuestMemory::create(&MemoryLayout::single(1 << 16)).expect("memory");
        memory.store::<u16>(2, 7, Ordering::Release).expect("aligned");
        assert_eq!(memory.load::<u16>(2, Ordering::Acquire).expect("aligned"), 7);
        assert!(memory.load::<u16>(3, Ordering::Acquire).is_err());
    }
}
