//! What an object holds: its bytes, sparse in pages of 4 KiB, and its keys.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;

use forebay_block::{BufList, BufMut, Extent, ExtentMap, ExtentState, SparseData};

/// Bytes a page.  A format choice of this backend, whatever the machine's page size.
pub(crate) const PAGE: usize = 4096;
const PAGE_U64: u64 = PAGE as u64;

/// Counts the pages of one backend.
#[derive(Default)]
pub(crate) struct Space {
    pages: Cell<u64>,
}

impl Space {
    /// Pages that exist; one shared by a head and its clones counts once.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.get()
    }
}

struct Page {
    bytes: [u8; PAGE],
    space: Rc<Space>,
}

impl Page {
    fn zeroed(space: &Rc<Space>) -> Self {
        space.pages.set(space.pages.get() + 1);
        Self { bytes: [0; PAGE], space: space.clone() }
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        self.space.pages.set(self.space.pages.get() + 1);
        Self { bytes: self.bytes, space: self.space.clone() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.space.pages.set(self.space.pages.get() - 1);
    }
}

/// Bytes and keys of a head or a clone.  A clone of it shares the pages until either is written.
///
/// Bytes past `size` in the last page are always zero.
#[derive(Clone, Default)]
pub(crate) struct Content {
    size: u64,
    pages: BTreeMap<u64, Rc<Page>>,
    /// The object's key-value map.
    pub(crate) kv: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What object classes keep beside it.
    #[cfg(feature = "cluster")]
    pub(crate) attributes: BTreeMap<String, Vec<u8>>,
}

impl Content {
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Pages that a write to `extent` would add, those it must copy because a clone shares them included.
    pub(crate) fn pages_to_add(&self, extent: Extent) -> u64 {
        if extent.len == 0 {
            return 0;
        }
        let (first, last) = (extent.offset / PAGE_U64, (extent.end() - 1) / PAGE_U64);
        let own = self.pages.range(first..=last).filter(|(_, page)| Rc::strong_count(page) == 1).count();
        last - first + 1 - own as u64
    }

    /// Writes, growing as needed; a write of nothing does not grow.
    pub(crate) fn write(&mut self, offset: u64, data: &BufList, space: &Rc<Space>) {
        let mut at = offset;
        for part in data.parts() {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let start = (at % PAGE_U64) as usize;
                let len = rest.len().min(PAGE - start);
                let page = self.pages.entry(at / PAGE_U64).or_insert_with(|| Rc::new(Page::zeroed(space)));
                Rc::make_mut(page).bytes[start..start + len].copy_from_slice(&rest[..len]);
                rest = &rest[len..];
                at += len as u64;
            }
        }
        if at > offset {
            self.size = self.size.max(at);
        }
    }

    /// Makes a run read as zeroes: whole pages go, what is left of a page is overwritten.
    pub(crate) fn zero(&mut self, extent: Extent) {
        let from = extent.offset.min(self.size);
        let to = extent.end().min(self.size);
        if from >= to {
            return;
        }
        // Nothing is kept past the size, so a run that reaches the size frees the last page as well.
        let to = if to == self.size { to.next_multiple_of(PAGE_U64) } else { to };
        let (whole_from, whole_to) = (from.div_ceil(PAGE_U64), to / PAGE_U64);
        if whole_from > whole_to {
            // Within one page.
            return self.zero_in_page(from, to);
        }
        self.zero_in_page(from, whole_from * PAGE_U64);
        self.zero_in_page(whole_to * PAGE_U64, to);
        while let Some(index) = self.pages.range(whole_from..whole_to).next().map(|(&index, _)| index) {
            self.pages.remove(&index);
        }
    }

    fn zero_in_page(&mut self, from: u64, to: u64) {
        if from == to {
            return;
        }
        if let Some(page) = self.pages.get_mut(&(from / PAGE_U64)) {
            let start = (from % PAGE_U64) as usize;
            Rc::make_mut(page).bytes[start..start + (to - from) as usize].fill(0);
        }
    }

    /// Sets the size; what is cut off is gone, what is added reads as zeroes.
    pub(crate) fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.zero(Extent::new(size, self.size - size));
        }
        self.size = size;
    }

    /// Takes the bytes of `data` alone; the keys stay.
    pub(crate) fn replace(&mut self, data: &BufList, space: &Rc<Space>) {
        self.pages.clear();
        self.size = 0;
        self.write(0, data, space);
    }

    /// The stored runs of `extent`, which must not overflow.
    pub(crate) fn read(&self, extent: Extent) -> SparseData {
        let mut data = SparseData::default();
        for run in self.map(extent).runs() {
            if run.state == ExtentState::Data {
                data.runs.push((run.extent.offset, self.copy_out(run.extent).into()));
            }
        }
        data
    }

    /// Copies a run whose pages are all there.
    fn copy_out(&self, extent: Extent) -> BufMut {
        let mut out = BufMut::with_capacity(extent.len as usize);
        let last = (extent.end() - 1) / PAGE_U64;
        for (index, page) in self.pages.range(extent.offset / PAGE_U64..=last) {
            let base = index * PAGE_U64;
            let from = extent.offset.max(base) - base;
            let to = extent.end().min(base + PAGE_U64) - base;
            out.extend_from_slice(&page.bytes[from as usize..to as usize]);
        }
        out
    }

    /// What is stored where in `extent`, which must not overflow.
    pub(crate) fn map(&self, extent: Extent) -> ExtentMap {
        let mut map = ExtentMap::new();
        let mut at = extent.offset;
        let end = extent.end().min(self.size);
        if at < end {
            for index in self.pages.range(at / PAGE_U64..=(end - 1) / PAGE_U64).map(|(index, _)| index) {
                let from = (index * PAGE_U64).max(at);
                let to = ((index + 1) * PAGE_U64).min(end);
                map.push(at, from - at, ExtentState::Hole);
                map.push(from, to - from, ExtentState::Data);
                at = to;
            }
        }
        map.push(at, extent.end() - at, ExtentState::Hole);
        map
    }

    /// Where the bytes from `offset` on first differ from `data`, counted from `offset`.
    pub(crate) fn first_difference(&self, offset: u64, data: &BufList) -> Option<u64> {
        static ZEROES: [u8; PAGE] = [0; PAGE];
        let mut at = offset;
        for part in data.parts() {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let start = (at % PAGE_U64) as usize;
                let len = rest.len().min(PAGE - start);
                let page = self.pages.get(&(at / PAGE_U64)).map_or(&ZEROES, |page| &page.bytes);
                let stored = &page[start..start + len];
                if stored != &rest[..len] {
                    let same = stored.iter().zip(rest).take_while(|(a, b)| a == b).count();
                    return Some(at - offset + same as u64);
                }
                rest = &rest[len..];
                at += len as u64;
            }
        }
        None
    }

    /// Keys with `prefix` after `after` (exclusive; empty: from the first), in order.
    pub(crate) fn keys_after<'a>(
        &'a self,
        prefix: &'a [u8],
        after: &'a [u8],
    ) -> impl Iterator<Item = (&'a Vec<u8>, &'a Vec<u8>)> {
        let from = if after.is_empty() || after < prefix { Bound::Included(prefix) } else { Bound::Excluded(after) };
        self.kv.range::<[u8], _>((from, Bound::Unbounded)).take_while(move |(key, _)| key.starts_with(prefix))
    }
}
