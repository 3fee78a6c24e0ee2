//! Data cache: blocks of the device, in bounded memory.
//!
//! A block on the device is immutable while it is referenced, so a cached block is never stale. It is dropped when its
//! last reference goes, and its checksum, which every reference carries, is compared as well.
//!
//! Replacement is S3-FIFO (Yang et al., SOSP 2023): new blocks enter a short queue, and only those requested again
//! while there move to the long queue.  A long sequential read or write therefore evicts little but its own blocks.
//! The short queue may use any space that the long one leaves free.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use forebay_block::{Buf, BufList, BufMut};
use forebay_reactor::BufPool;

use crate::format::BLOCK;

/// Statistics of the data cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes in use.
    pub bytes: u64,
    /// Requested blocks found in the cache.
    pub hits: u64,
    /// Lookups that did not find all of the requested blocks.
    pub misses: u64,
}

/// Cache of device blocks, by block number.
pub struct Cache {
    state: RefCell<CacheState>,
    pool: BufPool,
    capacity: usize,
    hits: Cell<u64>,
    misses: Cell<u64>,
}

/// Null index: end of a queue.
const NONE: u32 = u32::MAX;
/// Maximum of an entry's use counter.
const USES_MAX: u8 = 3;
/// Share of the short queue when the long one needs all space: one part in this many.
const SHORT_PART: usize = 10;

/// Maximum length of a read, in blocks, for which the data is prefetched into the CPU caches.
const PREFETCH_BLOCKS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum QueueKind {
    Short,
    Long,
}

struct Entry {
    block: u64,
    crc: u32,
    /// Neighbours in the queue: the older and the newer entry.
    older: u32,
    newer: u32,
    uses: u8,
    queue_kind: QueueKind,
    /// Block content; `None` while the entry is free.
    data: Option<Buf>,
}

/// FIFO queue: a list linked through the entries.
#[derive(Clone, Copy)]
struct Queue {
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, len: 0 }
    }
}

/// Multiplicative hash of block numbers, which are not controlled by clients.
#[derive(Default)]
struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

type BlockHash = BuildHasherDefault<BlockHasher>;

#[derive(Default)]
struct CacheState {
    index: HashMap<u64, u32, BlockHash>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    short: Queue,
    long: Queue,
    /// Ghost entries: blocks recently evicted from the short queue unused. If they return, they enter the long queue.
    ghosts: HashSet<u64, BlockHash>,
    ghost_order: VecDeque<u64>,
}

impl CacheState {
    fn queue(&mut self, queue_kind: QueueKind) -> &mut Queue {
        match queue_kind {
            QueueKind::Short => &mut self.short,
            QueueKind::Long => &mut self.long,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Entry { older, newer, queue_kind, .. } = self.entries[at as usize];
        match older {
            NONE => self.queue(queue_kind).oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.queue(queue_kind).newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        self.queue(queue_kind).len -= 1;
    }

    fn push(&mut self, at: u32, queue_kind: QueueKind) {
        let older = std::mem::replace(&mut self.queue(queue_kind).newest, at);
        match older {
            NONE => self.queue(queue_kind).oldest = at,
            older => self.entries[older as usize].newer = at,
        }
        self.queue(queue_kind).len += 1;
        let entry = &mut self.entries[at as usize];
        (entry.older, entry.newer, entry.queue_kind) = (older, NONE, queue_kind);
    }

    fn release(&mut self, at: u32) {
        self.unlink(at);
        let entry = &mut self.entries[at as usize];
        entry.data = None;
        let block = entry.block;
        self.index.remove(&block);
        self.free.push(at);
    }

    /// Evicts entries until there is space for one more block within `capacity` blocks.
    fn make_room(&mut self, capacity: usize) {
        while self.index.len() >= capacity {
            let from_short = self.short.len > capacity / SHORT_PART || self.long.len == 0;
            let queue_kind = if from_short { QueueKind::Short } else { QueueKind::Long };
            let at = self.queue(queue_kind).oldest;
            let entry = &mut self.entries[at as usize];
            match (queue_kind, entry.uses) {
                (_, 0) => {
                    let block = entry.block;
                    self.release(at);
                    if queue_kind == QueueKind::Short {
                        self.remember(block, capacity);
                    }
                }
                (QueueKind::Short, _) => {
                    entry.uses = 0;
                    self.unlink(at);
                    self.push(at, QueueKind::Long);
                }
                (QueueKind::Long, uses) => {
                    entry.uses = uses - 1;
                    self.unlink(at);
                    self.push(at, QueueKind::Long);
                }
            }
        }
    }

    fn remember(&mut self, block: u64, capacity: usize) {
        if self.ghosts.insert(block) {
            self.ghost_order.push_back(block);
        }
        while self.ghost_order.len() > capacity {
            let oldest = self.ghost_order.pop_front().expect("it is longer than nothing");
            self.ghosts.remove(&oldest);
        }
    }

    fn insert(&mut self, block: u64, crc: u32, data: Buf) {
        let queue_kind = if self.ghosts.contains(&block) { QueueKind::Long } else { QueueKind::Short };
        let entry = Entry { block, crc, older: NONE, newer: NONE, uses: 0, queue_kind, data: Some(data) };
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.index.insert(block, at);
        self.push(at, queue_kind);
    }
}

impl Cache {
    /// Creates a cache of at most `bytes` bytes of blocks; with less than one block, the cache is disabled.
    pub fn new(bytes: usize) -> Self {
        let capacity = (bytes / BLOCK).min(NONE as usize - 1);
        Self {
            state: RefCell::default(),
            pool: BufPool::new(BLOCK, capacity),
            capacity,
            hits: Cell::new(0),
            misses: Cell::new(0),
        }
    }

    /// Returns whether the cache is disabled (capacity 0).
    fn is_off(&self) -> bool {
        self.capacity == 0
    }

    /// Returns the statistics of the cache.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            capacity: (self.capacity * BLOCK) as u64,
            bytes: (self.state.borrow().index.len() * BLOCK) as u64,
            hits: self.hits.get(),
            misses: self.misses.get(),
        }
    }

    /// Appends the cached blocks from `block` on with these checksums to `out`, up to the first missing one. Returns
    /// their number.
    pub fn take_front(&self, block: u64, crcs: &[u32], out: &mut BufList) -> usize {
        if self.is_off() {
            return 0;
        }
        let mut state = self.state.borrow_mut();
        let mut found = 0;
        for (i, crc) in crcs.iter().enumerate() {
            let Some(&at) = state.index.get(&(block + i as u64)) else { break };
            let entry = &mut state.entries[at as usize];
            if entry.crc != *crc {
                break;
            }
            entry.uses = (entry.uses + 1).min(USES_MAX);
            let data = entry.data.as_ref().expect("an entry in the index holds data");
            if crcs.len() <= PREFETCH_BLOCKS {
                // Fetched from memory before the block is sent. For long reads the hardware prefetches by itself, and
                // prefetched data would be evicted from the CPU caches before it is sent.
                data.prefetch(BLOCK);
            }
            out.push(data.clone());
            found += 1;
        }
        self.hits.set(self.hits.get() + found as u64);
        self.misses.set(self.misses.get() + u64::from(found < crcs.len()));
        found
    }

    /// Returns how many of the blocks from `block` on must be read: all up to the last missing one.
    pub fn missing(&self, block: u64, crcs: &[u32]) -> usize {
        let state = self.state.borrow();
        let there = |i: usize| {
            let at = state.index.get(&(block + i as u64));
            at.is_some_and(|&at| state.entries[at as usize].crc == crcs[i])
        };
        (0..crcs.len()).rev().find(|&i| !there(i)).map_or(0, |i| i + 1)
    }

    /// Stores copies of the blocks from `block` on; their checksums have been verified or computed by the caller.
    pub fn put<'a>(&self, block: u64, crcs: &[u32], data: impl Iterator<Item = &'a [u8]>) {
        if self.is_off() {
            return;
        }
        let mut state = self.state.borrow_mut();
        let mut filling: Option<BufMut> = None;
        let mut crcs = (block..).zip(crcs);
        for mut part in data {
            while !part.is_empty() {
                let page = filling.get_or_insert_with(|| {
                    state.make_room(self.capacity);
                    self.pool.get()
                });
                let (now, rest) = part.split_at(part.len().min(BLOCK - page.len()));
                page.extend_from_slice(now);
                part = rest;
                if page.len() < BLOCK {
                    continue;
                }
                let (block, &crc) = crcs.next().expect("a checksum for each block");
                if let Some(&at) = state.index.get(&block) {
                    state.release(at);
                }
                let page = filling.take().expect("a page that is full");
                state.insert(block, crc, page.freeze());
            }
        }
    }

    /// Drops a block that is no longer referenced.
    pub fn forget(&self, block: u64) {
        if self.is_off() {
            return;
        }
        let mut state = self.state.borrow_mut();
        if let Some(&at) = state.index.get(&block) {
            state.release(at);
        }
    }

    /// Renames a block that was moved to another location.
    pub fn moved(&self, from: u64, to: u64, crc: u32) {
        if self.is_off() {
            return;
        }
        if from == to {
            return;
        }
        self.forget(to);
        let mut state = self.state.borrow_mut();
        if let Some(at) = state.index.remove(&from) {
            let entry = &mut state.entries[at as usize];
            (entry.block, entry.crc) = (to, crc);
            state.index.insert(to, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn content(block: u64, version: u8) -> Vec<u8> {
        (0..BLOCK).map(|i| (i as u64 ^ block).wrapping_mul(31) as u8 ^ version).collect()
    }

    fn has(cache: &Cache, block: u64, crc: u32) -> bool {
        cache.take_front(block, &[crc], &mut BufList::new()) == 1
    }

    fn put(cache: &Cache, block: u64) {
        cache.put(block, &[block as u32], std::iter::once(&content(block, 0)[..]));
    }

    #[derive(Debug, Clone)]
    enum CacheOp {
        Put(u64, usize, u8),
        Take(u64, usize),
        Forget(u64),
        Move(u64, u64),
    }

    fn op() -> impl Strategy<Value = CacheOp> {
        prop_oneof![
            (0..60u64, 1..8usize, any::<u8>()).prop_map(|(block, count, version)| CacheOp::Put(block, count, version)),
            (0..60u64, 1..8usize).prop_map(|(block, count)| CacheOp::Take(block, count)),
            (0..60u64).prop_map(CacheOp::Forget),
            (0..60u64, 0..60u64).prop_map(|(from, to)| CacheOp::Move(from, to)),
        ]
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_was_put(
            capacity in 0..40usize,
            steps in proptest::collection::vec(op(), 1..400),
        ) {
            let cache = Cache::new(capacity * BLOCK);
            let mut model: HashMap<u64, (u32, Vec<u8>)> = HashMap::new();
            for step in steps {
                match step {
                    CacheOp::Put(block, count, version) => {
                        let blocks: Vec<_> = (block..block + count as u64).map(|block| content(block, version)).collect();
                        let crcs: Vec<u32> = (0..count as u32).map(|i| u32::from(version) << 16 | i).collect();
                        let all = blocks.concat();
                        // Split at an arbitrary point.
                        let (front, back) = all.split_at(all.len() / 3 + 1);
                        cache.put(block, &crcs, [front, back].into_iter());
                        model.extend((block..).zip(crcs.into_iter().zip(blocks)));
                    }
                    CacheOp::Take(block, count) => {
                        let crcs: Vec<u32> = (block..block + count as u64)
                            .map(|block| model.get(&block).map_or(7, |(crc, _)| *crc))
                            .collect();
                        let must_read = cache.missing(block, &crcs);
                        let mut out = BufList::new();
                        let found = cache.take_front(block, &crcs, &mut out);
                        prop_assert!(found == count || found < must_read);
                        prop_assert_eq!(must_read == 0, found == count);
                        let expected: Vec<u8> = (block..block + found as u64).flat_map(|block| model[&block].1.clone()).collect();
                        prop_assert!(out == expected[..]);
                    }
                    CacheOp::Forget(block) => {
                        cache.forget(block);
                        model.remove(&block);
                    }
                    CacheOp::Move(from, to) => {
                        // A block that is encrypted again where it was moved to has another checksum.
                        let crc = model.get(&from).map_or(0, |(crc, _)| crc ^ u32::from(to % 2 == 0));
                        cache.moved(from, to, crc);
                        let moved = (from != to).then(|| model.remove(&from)).flatten();
                        if from != to {
                            model.remove(&to);
                            model.extend(moved.map(|(_, content)| (to, (crc, content))));
                        }
                    }
                }
                prop_assert!(cache.stats().bytes <= (capacity * BLOCK) as u64);
            }
        }
    }

    #[test]
    fn a_small_volume_stays_whole() {
        let cache = Cache::new(100 * BLOCK);
        (0..100).for_each(|block| put(&cache, block));
        assert!((0..100).all(|block| has(&cache, block, block as u32)));
        assert_eq!(cache.stats(), CacheStats { capacity: 409_600, bytes: 409_600, hits: 100, misses: 0 });
    }

    #[test]
    fn what_is_used_again_outlives_what_only_passes_by() {
        let cache = Cache::new(100 * BLOCK);
        (0..50).for_each(|block| put(&cache, block));
        assert!((0..50).all(|block| has(&cache, block, block as u32)));
        (1000..5000).for_each(|block| put(&cache, block));
        assert!((0..50).all(|block| has(&cache, block, block as u32)));
    }

    #[test]
    fn who_comes_back_soon_stays() {
        let cache = Cache::new(100 * BLOCK);
        (0..150).for_each(|block| put(&cache, block));
        assert!(!has(&cache, 10, 10), "it was pushed out by those that came later");
        put(&cache, 10);
        (1000..5000).for_each(|block| put(&cache, block));
        assert!(has(&cache, 10, 10), "the second time it came to stay");
    }

    #[test]
    fn another_checksum_is_another_block() {
        let cache = Cache::new(10 * BLOCK);
        put(&cache, 3);
        assert!(!has(&cache, 3, 4));
        assert_eq!((cache.stats().hits, cache.stats().misses), (0, 1));
    }

    #[test]
    fn memory_is_used_again() {
        let cache = Cache::new(10 * BLOCK);
        for block in 0..1000 {
            put(&cache, block);
            cache.forget(block);
        }
        assert_eq!(cache.state.borrow().entries.len(), 1);
        assert_eq!(cache.stats().bytes, 0);
    }
}
