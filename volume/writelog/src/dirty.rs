//! Dirty set: the entries that the backend may not hold yet, and which of them has the newest bytes of what.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::{BufList, Extent};
use forebay_reactor::{Instant, now};

use crate::entries::{Entries, LogEntry, NOWHERE};
use crate::index::LogIndex;
use crate::payload_cache::PayloadCache;

/// Minimum interval of publication time samples.
const AGE_STEP: Duration = Duration::from_millis(10);

/// Entries of the log with their index, generations, ages and cached payloads.
///
/// Invariants:
/// - D1 `generations` ascend, and so do their first entries; the first of them contains the oldest entry.
/// - D2 `bytes` is the sum of the entries' lengths, superseded ones included.
/// - D3 Only entries of the set have segments in the index or payloads in the cache.
/// - D4 An entry without a place on the medium has its payload in the cache.
pub(crate) struct DirtySet {
    entries: Entries,
    index: LogIndex,
    /// Generations in the log with the sequence number of their first entry.
    generations: VecDeque<(u64, u64)>,
    cache: PayloadCache,
    bytes: u64,
    /// Sampled publication times: sequence number, time.
    ages: VecDeque<(u64, Instant)>,
}

impl DirtySet {
    /// Returns an empty set whose first entry will be `tail`.
    pub(crate) fn new(tail: u64) -> Self {
        Self {
            entries: Entries::new(tail),
            index: LogIndex::new(),
            generations: VecDeque::new(),
            cache: PayloadCache::default(),
            bytes: 0,
            ages: VecDeque::new(),
        }
    }

    /// Returns the sequence number of the oldest entry.
    pub(crate) fn tail(&self) -> u64 {
        self.entries.tail()
    }

    /// Returns the sequence number after the newest entry.
    pub(crate) fn head(&self) -> u64 {
        self.entries.head()
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> u64 {
        self.entries.len()
    }

    /// Returns whether there are no entries.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of the volume covered by the entries, superseded ones included.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the memory of entries and index, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        (self.index.memory() + self.entries.memory()) as u64
    }

    /// Returns the age of the oldest entry.
    pub(crate) fn age(&self) -> Duration {
        self.ages.front().map_or(Duration::ZERO, |&(_, at)| at.elapsed())
    }

    /// Returns the entry with this sequence number.
    pub(crate) fn get(&self, seq: u64) -> Option<&LogEntry> {
        self.entries.get(seq)
    }

    /// Returns the parts of `extent` whose newest bytes are in the log, in order, each with the number of its entry.
    pub(crate) fn overlaps(&self, extent: Extent) -> impl Iterator<Item = (Extent, u64)> + '_ {
        let segments = self.index.overlaps(extent);
        segments.map(|found| (Extent::new(found.start, u64::from(found.len)), self.entries.seq_of(found.entry)))
    }

    /// Returns whether any entry holds bytes of `extent`.
    pub(crate) fn touches(&self, extent: Extent) -> bool {
        self.index.touches(extent)
    }

    /// Returns the generation of an entry.
    pub(crate) fn generation_of(&self, seq: u64) -> u64 {
        let after = self.generations.partition_point(|&(_, first)| first <= seq);
        after.checked_sub(1).map_or(0, |at| self.generations[at].0)
    }

    /// Returns the generation of the oldest entry.
    pub(crate) fn oldest_generation(&self) -> Option<u64> {
        self.generations.front().map(|&(oldest, _)| oldest)
    }

    /// Returns the sequence number after the last entry of a generation; `u64::MAX` if no later one has begun.
    pub(crate) fn generation_end(&self, generation: u64) -> u64 {
        // A generation ends where the next begins.
        let later = self.generations.partition_point(|&(one, _)| one <= generation);
        self.generations.get(later).map_or(u64::MAX, |&(_, first)| first)
    }

    /// Adds an entry and returns its sequence number; adds to `dead` the entries of its own generation that it
    /// supersedes. `None` for an entry that is not durable yet: a crash may undo it, and then those that it overwrote
    /// are needed.
    pub(crate) fn push(&mut self, entry: LogEntry, generation: u64, mut dead: Option<&mut Vec<LogEntry>>) -> u64 {
        let seq = self.entries.push(entry);
        debug_assert!(self.generations.back().is_none_or(|&(last, _)| last <= generation), "D1");
        if self.generations.back().is_none_or(|&(last, _)| last != generation) {
            self.generations.push_back((generation, seq));
        }
        let first = self.generations.back().map_or(seq, |&(_, first)| first);
        let (entries, index) = (&mut self.entries, &mut self.index);
        index.insert(entry.extent(), seq as u32, |id, by| {
            let number = entries.seq_of(id);
            let Some(changed) = entries.get_mut(number) else { return };
            changed.count(by);
            let over = by < 0 && changed.is_superseded() && number >= first && number != seq && !changed.is_dead();
            if let Some(dead) = dead.as_mut().filter(|_| over) {
                changed.kill();
                dead.push(*changed);
            }
        });
        self.bytes += entry.extent().len;
        if self.ages.back().is_none_or(|&(_, at)| at.elapsed() >= AGE_STEP) {
            self.ages.push_back((seq, now()));
        }
        seq
    }

    /// Records the place of an entry that was added before it was on the medium.
    pub(crate) fn set_place(&mut self, seq: u64, place: u32, crc: u32) {
        if let Some(entry) = self.entries.get_mut(seq) {
            (entry.place, entry.crc) = (place, crc);
        }
    }

    /// Removes the entries before `tail`; adds those with a place on the medium that are not dead to `gone`. Returns
    /// the number of dead ones.
    pub(crate) fn retire(&mut self, tail: u64, gone: &mut Vec<LogEntry>) -> u64 {
        let mut overwritten = 0;
        while self.entries.tail() < tail
            && let Some((seq, entry)) = self.entries.pop()
        {
            if !entry.is_superseded() {
                self.index.remove(entry.extent(), seq as u32, |_, _| {});
            }
            self.bytes -= entry.extent().len;
            self.cache.remove(seq);
            if entry.is_dead() {
                overwritten += 1;
            } else if entry.place != NOWHERE {
                gone.push(entry);
            }
        }
        let tail = self.entries.tail();
        while self.generations.get(1).is_some_and(|&(_, first)| first <= tail) {
            self.generations.pop_front();
        }
        if self.is_empty() {
            debug_assert_eq!(self.bytes, 0, "D2");
            self.generations.clear();
            self.ages.clear();
        }
        while self.ages.get(1).is_some_and(|&(seq, _)| seq <= tail) {
            self.ages.pop_front();
        }
        debug_assert!(self.generations.front().is_none_or(|&(_, first)| first <= tail), "D1");
        overwritten
    }

    /// Returns the payload of an entry, if it is in memory.
    pub(crate) fn payload(&self, seq: u64) -> Option<&BufList> {
        self.cache.get(seq)
    }

    /// Keeps the payload of an entry in memory.
    pub(crate) fn cache_payload(&mut self, seq: u64, payload: BufList) {
        debug_assert!(self.get(seq).is_some(), "D3");
        self.cache.insert(seq, payload);
    }

    /// Evicts the oldest payloads of entries before `before` until at most `bytes` are in memory.
    pub(crate) fn evict_payloads(&mut self, bytes: usize, before: u64) {
        self.cache.shrink(bytes, before);
    }
}
