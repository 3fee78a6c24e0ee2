//! Extent index: maps each run of the volume to the log entry with its newest bytes.
//!
//! Segments of 16 bytes in sorted chunks whose memory grows in small steps. Even a log in which every write splits
//! another one stays within 64 bytes per entry, including the entry's own record.

use forebay_block::Extent;

/// Maximum number of segments of a chunk; a larger one is split.
const CHUNK_MAX: usize = 128;
/// Growth step of a chunk's memory, in segments.
const STEP: usize = 8;

/// Run of the volume whose newest bytes are in one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexSegment {
    /// First byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u32,
    /// Low 32 bits of the entry's sequence number.
    pub entry: u32,
}

impl IndexSegment {
    fn end(self) -> u64 {
        self.start + u64::from(self.len)
    }
}

/// Sorted set of non-overlapping segments.
#[derive(Debug, Default)]
pub struct LogIndex {
    /// Non-empty chunks of segments.
    chunks: Vec<Vec<IndexSegment>>,
}

/// Inserts into a chunk, whose memory grows by [`STEP`] segments at a time.
fn insert_into(chunk: &mut Vec<IndexSegment>, at: usize, segment: IndexSegment) {
    if chunk.len() == chunk.capacity() {
        chunk.reserve_exact(STEP);
    }
    chunk.insert(at, segment);
}

impl LogIndex {
    /// Returns an empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the memory in use, in bytes.
    pub fn memory(&self) -> usize {
        let chunks: usize = self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<IndexSegment>() + 16).sum();
        chunks + self.chunks.capacity() * size_of::<Vec<IndexSegment>>()
    }

    /// Returns the position of the first segment that ends after `at`: chunk, and segment in it.
    fn find(&self, at: u64) -> (usize, usize) {
        let chunk = self.chunks.partition_point(|chunk| chunk.last().is_none_or(|last| last.end() <= at));
        let segment = self.chunks.get(chunk).map_or(0, |chunk| chunk.partition_point(|segment| segment.end() <= at));
        (chunk, segment)
    }

    /// Returns the segments that overlap `extent`, clipped to it, in order.
    pub fn overlaps(&self, extent: Extent) -> impl Iterator<Item = IndexSegment> + '_ {
        let (first, at) = self.find(extent.offset);
        let end = extent.end();
        let chunks = self.chunks.get(first..).unwrap_or_default().iter().enumerate();
        let segments = chunks.flat_map(move |(index, chunk)| &chunk[if index == 0 { at } else { 0 }..]);
        segments.take_while(move |segment| segment.start < end).map(move |segment| {
            let start = segment.start.max(extent.offset);
            IndexSegment { start, len: (segment.end().min(end) - start) as u32, entry: segment.entry }
        })
    }

    /// Returns whether any entry holds bytes of `extent`.
    pub fn touches(&self, extent: Extent) -> bool {
        self.overlaps(extent).next().is_some()
    }

    /// Records that `entry` holds the newest bytes of `extent` (shorter than 4 GiB). Calls `change` with the change
    /// of each entry's segment count.
    pub fn insert(&mut self, extent: Extent, entry: u32, mut change: impl FnMut(u32, i32)) {
        self.carve(extent, |_| true, &mut change);
        let (chunk, at) = self.find(extent.offset);
        change(entry, 1);
        let segment = IndexSegment { start: extent.offset, len: extent.len as u32, entry };
        // At a boundary between two chunks, the earlier one takes the segment at its end if it has space.
        let (chunk, at) = match (self.chunks.get(chunk), chunk.checked_sub(1)) {
            (_, Some(before)) if at == 0 && self.chunks[before].len() < CHUNK_MAX => {
                (before, self.chunks[before].len())
            }
            (Some(_), _) => (chunk, at),
            (None, _) => {
                self.chunks.push(Vec::with_capacity(STEP));
                (chunk, 0)
            }
        };
        insert_into(&mut self.chunks[chunk], at, segment);
        self.split(chunk);
    }

    /// Removes the segments of `entry` within `extent`.
    pub fn remove(&mut self, extent: Extent, entry: u32, mut change: impl FnMut(u32, i32)) {
        self.carve(extent, |segment| segment.entry == entry, &mut change);
    }

    /// Splits a chunk that has grown too long.
    fn split(&mut self, chunk: usize) {
        if self.chunks[chunk].len() <= CHUNK_MAX {
            return;
        }
        // A log that is written sequentially leaves full chunks behind.
        let last = chunk + 1 == self.chunks.len();
        let at = if last { CHUNK_MAX - STEP } else { CHUNK_MAX / 2 };
        let mut tail = Vec::new();
        tail.extend_from_slice(&self.chunks[chunk][at..]);
        self.chunks[chunk].truncate(at);
        self.chunks[chunk].shrink_to_fit();
        if self.chunks.len() == self.chunks.capacity() {
            self.chunks.reserve_exact((self.chunks.len() / 8).max(STEP));
        }
        self.chunks.insert(chunk + 1, tail);
    }

    /// Removes `extent` from every segment that `wanted` accepts.
    fn carve(&mut self, extent: Extent, wanted: impl Fn(&IndexSegment) -> bool, change: &mut impl FnMut(u32, i32)) {
        let (from, to) = (extent.offset, extent.end());
        let (mut chunk, mut at) = self.find(from);
        while let Some(&segment) = self.chunks.get(chunk).and_then(|chunk| chunk.get(at)) {
            if segment.start >= to {
                break;
            }
            if !wanted(&segment) {
                (chunk, at) = if at + 1 < self.chunks[chunk].len() { (chunk, at + 1) } else { (chunk + 1, 0) };
                continue;
            }
            let head = (segment.start < from).then(|| IndexSegment { len: (from - segment.start) as u32, ..segment });
            let tail =
                (segment.end() > to).then(|| IndexSegment { start: to, len: (segment.end() - to) as u32, ..segment });
            let list = &mut self.chunks[chunk];
            match (head, tail) {
                (Some(head), Some(tail)) => {
                    list[at] = head;
                    insert_into(list, at + 1, tail);
                    change(segment.entry, 1);
                    self.split(chunk);
                    return;
                }
                (Some(head), None) => {
                    list[at] = head;
                    at += 1;
                }
                (None, Some(tail)) => {
                    list[at] = tail;
                    return;
                }
                (None, None) => {
                    list.remove(at);
                    change(segment.entry, -1);
                    if list.capacity() > list.len() + 2 * STEP {
                        list.shrink_to(list.len() + STEP);
                    }
                }
            }
            if self.chunks[chunk].is_empty() {
                self.chunks.remove(chunk);
                at = 0;
            } else if at == self.chunks[chunk].len() {
                (chunk, at) = (chunk + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const SPACE: usize = 600;

    fn runs(plain: &[Option<u32>]) -> Vec<(u64, u32)> {
        plain.iter().enumerate().filter_map(|(at, entry)| Some((at as u64, (*entry)?))).collect()
    }

    proptest! {
        #[test]
        fn it_is_an_array_of_owners(steps in proptest::collection::vec((0..SPACE, 1..80_usize, any::<bool>()), 1..400)) {
            let mut plain: Vec<Option<u32>> = vec![None; SPACE];
            let mut index = LogIndex::new();
            let mut counts: HashMap<u32, i32> = HashMap::new();
            let mut extents: Vec<Extent> = Vec::new();
            for (number, (start, len, insert)) in steps.into_iter().enumerate() {
                let end = (start + len).min(SPACE);
                let mut change = |entry, by| *counts.entry(entry).or_insert(0) += by;
                if insert || extents.is_empty() {
                    let extent = Extent::new(start as u64, (end - start) as u64);
                    let entry = extents.len() as u32;
                    extents.push(extent);
                    index.insert(extent, entry, &mut change);
                    plain[start..end].fill(Some(entry));
                } else {
                    let entry = number % extents.len();
                    index.remove(extents[entry], entry as u32, &mut change);
                    plain.iter_mut().filter(|owner| **owner == Some(entry as u32)).for_each(|owner| *owner = None);
                }
                let all = Extent::new(0, SPACE as u64);
                let found: Vec<(u64, u32)> = index
                    .overlaps(all)
                    .flat_map(|segment| (segment.start..segment.end()).map(move |at| (at, segment.entry)))
                    .collect();
                prop_assert_eq!(found, runs(&plain));
                let part = Extent::new(start as u64, (end - start) as u64);
                let found: Vec<(u64, u32)> = index
                    .overlaps(part)
                    .flat_map(|segment| (segment.start..segment.end()).map(move |at| (at, segment.entry)))
                    .collect();
                let wanted: Vec<_> = runs(&plain).into_iter().filter(|(at, _)| part.range().contains(at)).collect();
                prop_assert_eq!(found, wanted);
                let mut segments: HashMap<u32, i32> = HashMap::new();
                index.overlaps(all).for_each(|segment| *segments.entry(segment.entry).or_insert(0) += 1);
                counts.retain(|_, count| *count != 0);
                prop_assert_eq!(&counts, &segments);
            }
        }
    }
}

#[cfg(test)]
mod memory_tests {
    use forebay_block::Extent;

    use super::*;
    use crate::entries::{Entries, EntryKind, LogEntry};

    /// Returns the memory per live entry, in bytes, of a log with these extents.
    fn bytes_an_entry(extents: impl Iterator<Item = Extent>) -> f64 {
        let (mut entries, mut index) = (Entries::new(0), LogIndex::new());
        for extent in extents {
            let seq = entries.push(LogEntry::new(EntryKind::Write, extent, 0, 0));
            index.insert(extent, seq as u32, |_, _| {});
        }
        (entries.memory() + index.memory()) as f64 / entries.len() as f64
    }

    #[test]
    fn an_entry_takes_no_more_than_64_bytes() {
        const COUNT: u64 = 100_000;
        let scattered = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let random = bytes_an_entry((0..COUNT).map(|at| Extent::new(scattered(at) / 4096 * 4096, 4096)));
        let in_order = bytes_an_entry((0..COUNT).map(|at| Extent::new(at * 4096, 4096)));
        // Each write splits an older one.
        let long = (0..COUNT / 100).map(|at| Extent::new(at << 20, 1 << 20));
        let cuts = (0..COUNT).map(|at| {
            let (place, of) = (scattered(at) % 256, at % (COUNT / 100));
            Extent::new((of << 20) + place * 4096 + 512, 512)
        });
        let worst = bytes_an_entry(long.chain(cuts));
        println!("bytes an entry: random {random:.1}, in order {in_order:.1}, each in two {worst:.1}");
        assert!(random <= 64.0 && in_order <= 64.0 && worst <= 64.0, "{random} {in_order} {worst}");
    }
}
