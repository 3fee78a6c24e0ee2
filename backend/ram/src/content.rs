//! Object content: its bytes, sparse in pages of 4 KiB, and its keys.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;

use forebay_block::{Buf, BufList, Extent, ExtentMap, ExtentState, SparseData};
use forebay_reactor::BufPool;

/// Page size in bytes.  A format choice of this backend, independent of the machine's page size.
pub(crate) const PAGE: usize = 4096;
const PAGE_U64: u64 = PAGE as u64;

/// Bytes of a page that was never written.
static ZEROES: [u8; PAGE] = [0; PAGE];

/// Page counter of one backend.
#[derive(Default)]
pub(crate) struct PageCounter {
    pages: Cell<u64>,
}

impl PageCounter {
    /// Returns the number of pages; one shared by a head and its clones counts once.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.get()
    }
}

/// Pages per chunk: the number that fits into a huge page of 2 MiB.
const CHUNK: usize = 512;
/// Maximum number of pages that a chunk keeps in a tree: a sparsely written volume takes little more memory than its
/// pages.
const CHUNK_FEW: usize = 64;
/// Number of pages from which on a chunk lies in a huge page (see [`BufPool::huge`]).
const CHUNK_MOST: usize = CHUNK / 4 * 3;
/// Number of pages below which a chunk releases its huge page: memory use stays below four times the content.
const CHUNK_SPARSE: usize = CHUNK / 4;
/// Number of bytes at the start of a read to prefetch: they are sent or compared soon, and the work until then hides
/// the latency.  The hardware prefetcher loads the rest once the first cache lines of a page are used.
const NEAR: usize = 2048;

/// Page as counted in [`PageCounter`]: once for a head and all clones that share it.
struct CountedPage {
    space: Rc<PageCounter>,
}

impl CountedPage {
    fn new(space: &Rc<PageCounter>) -> Rc<Self> {
        space.pages.set(space.pages.get() + 1);
        Rc::new(Self { space: space.clone() })
    }
}

impl Drop for CountedPage {
    fn drop(&mut self) {
        self.space.pages.set(self.space.pages.get() - 1);
    }
}

/// Page; clones and readers share its memory until it is written.
///
/// Stored inline in its chunk: a read finds the memory's address there without another indirection, since every further
/// access in a large volume is a cache miss.
#[derive(Clone)]
struct Page {
    bytes: Buf,
    counted: Rc<CountedPage>,
}

impl Page {
    fn new(bytes: Buf, space: &Rc<PageCounter>) -> Self {
        Self { bytes, counted: CountedPage::new(space) }
    }

    /// Returns true if no clone shares the page.
    fn is_own(&self) -> bool {
        Rc::strong_count(&self.counted) == 1
    }

    /// Moves the page to `memory`, unless it is shared or being read.
    fn move_to(&mut self, memory: &BufPool) {
        if self.is_own() && self.bytes.get_mut().is_some() {
            self.bytes = page_of(0, &self.bytes, memory);
        }
    }

    /// Writes `data` at `start`; a private copy is allocated from `memory` if needed.
    fn write(&mut self, start: usize, data: &[u8], memory: &BufPool) {
        if start == 0 {
            // Pages of a large volume are in no cache.  Asked for all at once, their lines arrive together; stores would wait
            // for a few at a time.
            self.bytes.prefetch(data.len());
        }
        // A clone that shares the page shares its bytes: the counter, elsewhere in memory, need not be looked at.
        if let Some(bytes) = self.bytes.get_mut() {
            return bytes[start..start + data.len()].copy_from_slice(data);
        }
        if !self.is_own() {
            self.counted = CountedPage::new(&self.counted.space);
        }
        let mut bytes = memory.get();
        bytes.extend_from_slice(&self.bytes[..start]);
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(&self.bytes[start + data.len()..]);
        self.bytes = bytes.freeze();
    }
}

/// Allocates a new page with `data` at `start`, and zeroes around it.
fn page_of(start: usize, data: &[u8], memory: &BufPool) -> Buf {
    let mut bytes = memory.get();
    bytes.extend_from_slice(&ZEROES[..start]);
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(&ZEROES[start + data.len()..]);
    bytes.freeze()
}

/// Chunk of adjacent pages, with the pool that their memory comes from; the memory is released with them.
#[derive(Clone)]
struct Chunk {
    table: PageTable,
    count: usize,
    memory: BufPool,
    /// Set if the memory is one huge page.
    huge: bool,
}

/// Pages of a chunk by their index in it.
#[derive(Clone)]
enum PageTable {
    Few(BTreeMap<u16, Page>),
    Many(Vec<Option<Page>>),
}

impl Chunk {
    fn new() -> Self {
        let table = PageTable::Few(BTreeMap::new());
        Self { table, count: 0, memory: BufPool::new(PAGE, CHUNK_FEW), huge: false }
    }

    fn get(&self, at: usize) -> Option<&Page> {
        match &self.table {
            PageTable::Few(pages) => pages.get(&(at as u16)),
            PageTable::Many(slots) => slots[at].as_ref(),
        }
    }

    /// Returns the pages from `from` to `to`, both included, in order.
    fn range(&self, from: usize, to: usize) -> impl Iterator<Item = (usize, &Page)> {
        let (few, many) = match &self.table {
            PageTable::Few(pages) => (Some(pages.range(from as u16..=to as u16)), None),
            PageTable::Many(slots) => (None, Some(slots[from..=to].iter().enumerate())),
        };
        let few = few.into_iter().flatten().map(|(&at, page)| (usize::from(at), page));
        few.chain(many.into_iter().flatten().filter_map(move |(at, page)| Some((from + at, page.as_ref()?))))
    }

    /// Writes into an existing page; returns false if there is none.
    fn write(&mut self, at: usize, start: usize, data: &[u8]) -> bool {
        let page = match &mut self.table {
            PageTable::Few(pages) => pages.get_mut(&(at as u16)),
            PageTable::Many(slots) => slots[at].as_mut(),
        };
        page.map(|page| page.write(start, data, &self.memory)).is_some()
    }

    /// Adds a missing page, with `data` at `start` and zeroes around it.
    fn add(&mut self, at: usize, start: usize, data: &[u8], space: &Rc<PageCounter>) {
        if self.count == CHUNK_FEW
            && let PageTable::Few(few) = &mut self.table
        {
            let mut slots = vec![None; CHUNK];
            for (at, page) in std::mem::take(few) {
                slots[usize::from(at)] = Some(page);
            }
            self.table = PageTable::Many(slots);
            self.move_to(BufPool::new(PAGE, CHUNK));
        }
        let page = Page::new(page_of(start, data, &self.memory), space);
        match &mut self.table {
            PageTable::Few(pages) => drop(pages.insert(at as u16, page)),
            PageTable::Many(slots) => slots[at] = Some(page),
        }
        self.count += 1;
        if self.count >= CHUNK_MOST && !self.huge {
            self.huge = true;
            self.move_to(BufPool::huge(PAGE));
        }
    }

    /// Drops the pages from `from` to `to`, both included.
    fn remove(&mut self, from: usize, to: usize) {
        let before = self.count;
        match &mut self.table {
            PageTable::Few(pages) => {
                pages.retain(|&at, _| !(from..=to).contains(&usize::from(at)));
                self.count = pages.len();
            }
            PageTable::Many(slots) => {
                for slot in &mut slots[from..=to] {
                    self.count -= usize::from(slot.take().is_some());
                }
            }
        }
        if self.count < before && self.count < CHUNK_SPARSE && self.huge {
            self.huge = false;
            self.move_to(BufPool::new(PAGE, CHUNK));
        }
    }

    /// Moves the pages to other memory, except shared pages and those being read, which move when they are written.
    fn move_to(&mut self, memory: BufPool) {
        match &mut self.table {
            PageTable::Few(pages) => pages.values_mut().for_each(|page| page.move_to(&memory)),
            PageTable::Many(slots) => slots.iter_mut().flatten().for_each(|page| page.move_to(&memory)),
        }
        self.memory = memory;
    }
}

/// Pages of an object, by index.
#[derive(Clone, Default)]
struct Pages(BTreeMap<u64, Chunk>);

impl Pages {
    fn get(&self, index: u64) -> Option<&Page> {
        self.0.get(&(index / CHUNK as u64))?.get(index as usize % CHUNK)
    }

    /// Returns the pages from `first` to `last`, both included, in order.
    fn range(&self, first: u64, last: u64) -> impl Iterator<Item = (u64, &Page)> {
        let chunks = self.0.range(first / CHUNK as u64..=last / CHUNK as u64);
        chunks.flat_map(move |(number, chunk)| {
            let base = number * CHUNK as u64;
            let from = first.saturating_sub(base).min(CHUNK as u64) as usize;
            let to = (last - base).min(CHUNK as u64 - 1) as usize;
            chunk.range(from, to).map(move |(at, page)| (base + at as u64, page))
        })
    }

    /// Writes into one page.
    fn write(&mut self, index: u64, start: usize, data: &[u8], space: &Rc<PageCounter>) {
        let chunk = self.0.entry(index / CHUNK as u64).or_insert_with(Chunk::new);
        let at = index as usize % CHUNK;
        if !chunk.write(at, start, data) {
            chunk.add(at, start, data, space);
        }
    }

    /// Zeroes a part of a page, if the page exists.
    fn zero(&mut self, index: u64, start: usize, len: usize) {
        if let Some(chunk) = self.0.get_mut(&(index / CHUNK as u64)) {
            chunk.write(index as usize % CHUNK, start, &ZEROES[..len]);
        }
    }

    /// Drops the pages from `from` up to but not including `to`.
    fn remove(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let last = to - 1;
        let numbers: Vec<u64> =
            self.0.range(from / CHUNK as u64..=last / CHUNK as u64).map(|(&number, _)| number).collect();
        for number in numbers {
            let base = number * CHUNK as u64;
            let first = from.saturating_sub(base) as usize;
            let end = (last - base).min(CHUNK as u64 - 1) as usize;
            let Some(chunk) = self.0.get_mut(&number) else { continue };
            chunk.remove(first, end);
            if chunk.count == 0 {
                self.0.remove(&number);
            }
        }
    }
}

/// Bytes and keys of a head or a clone.  A clone shares the pages until either is written.
///
/// Bytes past `size` in the last page are always zero.
#[derive(Clone, Default)]
pub(crate) struct ObjectContent {
    size: u64,
    pages: Pages,
    /// Key-value map of the object.
    pub(crate) kv: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Extended attributes set by object classes.
    pub(crate) attributes: BTreeMap<String, Vec<u8>>,
}

impl ObjectContent {
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of pages that a write to `extent` would add, including copies of pages shared with a clone.
    pub(crate) fn pages_to_add(&self, extent: Extent) -> u64 {
        if extent.len == 0 {
            return 0;
        }
        let (first, last) = (extent.offset / PAGE_U64, (extent.end() - 1) / PAGE_U64);
        let own = self.pages.range(first, last).filter(|(_, page)| page.is_own()).count();
        last - first + 1 - own as u64
    }

    /// Writes, growing the object as needed; an empty write does not grow it.
    pub(crate) fn write(&mut self, offset: u64, data: &BufList, space: &Rc<PageCounter>) {
        let mut at = offset;
        for part in data.parts() {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let start = (at % PAGE_U64) as usize;
                let len = rest.len().min(PAGE - start);
                self.pages.write(at / PAGE_U64, start, &rest[..len], space);
                rest = &rest[len..];
                at += len as u64;
            }
        }
        if at > offset {
            self.size = self.size.max(at);
        }
    }

    /// Zeroes a range: whole pages are freed, partial pages are overwritten.
    pub(crate) fn zero(&mut self, extent: Extent) {
        let from = extent.offset.min(self.size);
        let to = extent.end().min(self.size);
        if from >= to {
            return;
        }
        // No bytes are kept past the size, so a range that reaches the size frees the last page as well.
        let to = if to == self.size { to.next_multiple_of(PAGE_U64) } else { to };
        let (whole_from, whole_to) = (from.div_ceil(PAGE_U64), to / PAGE_U64);
        if whole_from > whole_to {
            // Range within one page.
            return self.zero_in_page(from, to);
        }
        self.zero_in_page(from, whole_from * PAGE_U64);
        self.zero_in_page(whole_to * PAGE_U64, to);
        self.pages.remove(whole_from, whole_to);
    }

    fn zero_in_page(&mut self, from: u64, to: u64) {
        if from == to {
            return;
        }
        self.pages.zero(from / PAGE_U64, (from % PAGE_U64) as usize, (to - from) as usize);
    }

    /// Sets the size; bytes past it are dropped, added bytes read as zeroes.
    pub(crate) fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.zero(Extent::new(size, self.size - size));
        }
        self.size = size;
    }

    /// Replaces the bytes by `data`; the keys stay.
    pub(crate) fn replace(&mut self, data: &BufList, space: &Rc<PageCounter>) {
        self.pages = Pages::default();
        self.size = 0;
        self.write(0, data, space);
    }

    /// Returns the stored runs of `extent`, which must not overflow.  The memory is shared, not copied.
    pub(crate) fn read(&self, extent: Extent) -> SparseData {
        let mut data = SparseData::default();
        let end = extent.end().min(self.size);
        if extent.offset >= end {
            return data;
        }
        let (first, last) = (extent.offset / PAGE_U64, (end - 1) / PAGE_U64);
        let part = |index: u64, page: &Page| {
            let base = index * PAGE_U64;
            let (from, to) = (extent.offset.max(base), end.min(base + PAGE_U64));
            let part = page.bytes.slice((from - base) as usize..(to - base) as usize);
            (from, part)
        };
        if first == last {
            if let Some((at, part)) = self.pages.get(first).map(|page| part(first, page)) {
                part.prefetch(NEAR);
                data.runs.push((at, part.into()));
            }
            return data;
        }
        for (index, page) in self.pages.range(first, last) {
            let (from, part) = part(index, page);
            match data.runs.last_mut() {
                Some((at, run)) if *at + run.len() as u64 == from => run.push(part),
                _ => data.runs.push((from, part.into())),
            }
        }
        data
    }

    /// Returns the data and hole runs of `extent`, which must not overflow.
    pub(crate) fn map(&self, extent: Extent) -> ExtentMap {
        let mut map = ExtentMap::new();
        let mut at = extent.offset;
        let end = extent.end().min(self.size);
        if at < end {
            for (index, _) in self.pages.range(at / PAGE_U64, (end - 1) / PAGE_U64) {
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

    /// Returns the first position, relative to `offset`, at which the bytes from `offset` on differ from `data`.
    pub(crate) fn first_difference(&self, offset: u64, data: &BufList) -> Option<u64> {
        let mut at = offset;
        for part in data.parts() {
            let mut rest = &part[..];
            while !rest.is_empty() {
                let start = (at % PAGE_U64) as usize;
                let len = rest.len().min(PAGE - start);
                let page = self.pages.get(at / PAGE_U64).map_or(&ZEROES[..], |page| &page.bytes[..]);
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

    /// Returns the keys with `prefix` after `after` (exclusive; empty: from the first), in order.
    pub(crate) fn keys_after<'a>(
        &'a self,
        prefix: &'a [u8],
        after: &'a [u8],
    ) -> impl Iterator<Item = (&'a Vec<u8>, &'a Vec<u8>)> {
        let from = if after.is_empty() || after < prefix { Bound::Included(prefix) } else { Bound::Excluded(after) };
        self.kv.range::<[u8], _>((from, Bound::Unbounded)).take_while(move |(key, _)| key.starts_with(prefix))
    }
}
