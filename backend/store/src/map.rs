//! Block maps: the locations of an object's blocks, in pages that are stored and loaded one by one.

use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot};
use crate::format::page::{self, MapSlot};
use crate::format::{BlobPtr, PAGE_BLOCKS};

/// Map page: its stored location, and its slots if they are in memory.
///
/// # Invariants
/// 1. A dirty page is in memory.
/// 2. A page that is neither stored nor in memory maps nothing.
#[derive(Debug, Default)]
pub struct MapPage {
    /// Location of the last stored version; none if it was never stored.
    ptr: BlobPtr,
    /// Slots in memory, up to the last mapped one; `None` if not loaded.
    slots: Option<Vec<MapSlot>>,
    /// Set if the page differs from its stored version.
    dirty: bool,
}

impl MapPage {
    /// Returns the location of the last stored version; none if it was never stored.
    pub fn ptr(&self) -> BlobPtr {
        self.ptr
    }

    /// Returns whether the page differs from its stored version.
    pub fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// Returns whether the page is stored at `ptr` and not in memory.
    pub fn is_missing(&self, ptr: BlobPtr) -> bool {
        self.ptr == ptr && self.slots.is_none()
    }

    /// Sets the slots read from `ptr`, unless the page was loaded or moved meanwhile.
    pub fn load(&mut self, ptr: BlobPtr, slots: Vec<MapSlot>) {
        if self.is_missing(ptr) {
            self.slots = Some(slots);
        }
    }

    /// Marks the page dirty, so that it is stored elsewhere.
    pub fn mark_dirty(&mut self) {
        debug_assert!(self.slots.is_some(), "a map page was not loaded before it was marked dirty");
        self.dirty = true;
    }

    /// Begins to store the page: it is clean from here on. Returns the location of the last stored version.
    pub fn begin_store(&mut self) -> BlobPtr {
        debug_assert!(self.dirty && self.slots.is_some());
        self.dirty = false;
        std::mem::take(&mut self.ptr)
    }

    /// Returns the encoded page. A page that maps nothing is not stored: it is removed from memory instead.
    pub fn encode(&mut self) -> Option<Vec<u8>> {
        let slots = self.slots.as_deref().unwrap_or_default();
        if slots.iter().all(|slot| slot.block == 0) {
            self.slots = None;
            return None;
        }
        Some(page::encode(slots))
    }

    /// Records where the page was stored.
    pub fn end_store(&mut self, ptr: BlobPtr) {
        debug_assert!(self.ptr.is_none() && !self.dirty);
        self.ptr = ptr;
    }

    /// Returns whether the page is neither stored nor in memory, so that all its blocks are holes.
    fn is_blank(&self) -> bool {
        self.ptr.is_none() && self.slots.is_none()
    }

    fn weight(&self) -> usize {
        self.slots.as_ref().map_or(0, |slots| slots.capacity() * size_of::<MapSlot>()) + size_of::<Self>()
    }
}

/// Block map of a head or a clone.
#[derive(Debug, Default)]
pub struct Map {
    pages: Vec<MapPage>,
}

impl Map {
    /// Returns the map whose pages are stored at `ptrs`.
    pub fn from_ptrs(ptrs: &[BlobPtr]) -> Self {
        Self { pages: ptrs.iter().map(|&ptr| MapPage { ptr, slots: None, dirty: false }).collect() }
    }

    /// Returns the stored locations of the pages.
    pub fn ptrs(&self) -> Vec<BlobPtr> {
        self.pages.iter().map(|page| page.ptr).collect()
    }

    /// Returns the pages.
    pub fn pages(&self) -> &[MapPage] {
        &self.pages
    }

    /// Returns the page with the given index.
    pub fn page_mut(&mut self, index: u32) -> Option<&mut MapPage> {
        self.pages.get_mut(index as usize)
    }

    /// Returns the number of blocks that the pages can map.
    pub fn blocks(&self) -> u32 {
        self.pages.len() as u32 * PAGE_BLOCKS
    }

    /// Returns the pages of blocks `start..start + count` that are stored but not in memory.
    pub fn missing(&self, start: u32, count: u32) -> impl Iterator<Item = (u32, BlobPtr)> + '_ {
        let first = (start / PAGE_BLOCKS) as usize;
        let last = (start + count.max(1) - 1) / PAGE_BLOCKS;
        let end = self.pages.len().min(last as usize + 1);
        let pages = if first < end { &self.pages[first..end] } else { &[] };
        pages
            .iter()
            .enumerate()
            .filter(|(_, page)| page.slots.is_none() && !page.ptr.is_none())
            .map(move |(i, page)| ((first + i) as u32, page.ptr))
    }

    /// Returns the location of a block.  Its page must be in memory.
    pub fn get(&self, block: u32) -> MapSlot {
        let Some(page) = self.pages.get((block / PAGE_BLOCKS) as usize) else { return MapSlot::default() };
        match &page.slots {
            Some(slots) => slots.get((block % PAGE_BLOCKS) as usize).copied().unwrap_or_default(),
            None => {
                assert!(page.is_blank(), "a map page was not loaded before it was needed");
                MapSlot::default()
            }
        }
    }

    /// Returns whether a block from `from` on refers to the blob that has, or had, `block`.  The page of `block` must be in
    /// memory.
    pub fn refers_to(&self, blob: BlobSlot, block: u32, from: u32) -> bool {
        let first = block / BLOB_BLOCKS_MAX * BLOB_BLOCKS_MAX;
        (first.max(from)..first + BLOB_BLOCKS_MAX)
            .any(|other| BlobSlot::of(self.get(other).block).is_some_and(|slot| slot.is_same_blob(blob)))
    }

    /// Returns whether a block before `block` refers to its blob.  Their page must be in memory.
    pub fn has_earlier(&self, blob: BlobSlot, block: u32) -> bool {
        let first = block / BLOB_BLOCKS_MAX * BLOB_BLOCKS_MAX;
        (first..block).any(|other| BlobSlot::of(self.get(other).block).is_some_and(|slot| slot.is_same_blob(blob)))
    }

    /// Sets the location of a block and returns the previous one.  Its page must be in memory.
    pub fn set(&mut self, block: u32, slot: MapSlot) -> MapSlot {
        let (index, at) = ((block / PAGE_BLOCKS) as usize, (block % PAGE_BLOCKS) as usize);
        if index >= self.pages.len() {
            if slot.block == 0 {
                return MapSlot::default();
            }
            self.pages.resize_with(index + 1, MapPage::default);
        }
        let page = &mut self.pages[index];
        assert!(page.slots.is_some() || page.is_blank(), "a map page was not loaded before it was changed");
        let slots = page.slots.get_or_insert_with(Vec::new);
        if at >= slots.len() {
            if slot.block == 0 {
                return MapSlot::default();
            }
            slots.resize(at + 1, MapSlot::default());
        }
        page.dirty = true;
        std::mem::replace(&mut slots[at], slot)
    }

    /// Returns the dirty pages with their indexes.
    pub fn dirty_pages_mut(&mut self) -> impl Iterator<Item = (u32, &mut MapPage)> {
        let pages = self.pages.iter_mut().enumerate().filter(|(_, page)| page.dirty);
        pages.map(|(index, page)| (index as u32, page))
    }

    /// Returns the number of dirty pages.
    pub fn dirty_page_count(&self) -> usize {
        self.pages.iter().filter(|page| page.dirty).count()
    }

    /// Returns whether the page of a block is dirty.
    pub fn is_dirty(&self, block: u32) -> bool {
        self.pages.get((block / PAGE_BLOCKS) as usize).is_some_and(|page| page.dirty)
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        self.pages.iter().map(MapPage::weight).sum()
    }
}
