//! Segment allocation: live bytes of each segment, free segments, and segments that must not be reused yet.
//!
//! A segment without live data is reused only after a checkpoint that records this is durable. Everything that recovery
//! can refer to therefore still exists.  `docs/design/store.md` has the argument.

mod shrink;

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::format::superblock::{SEGMENTS_START, StoreSuperblock};
use crate::format::{BLOCK, BLOCK64, BlobPtr, MalformedStore, Put, StoreReader, malformed};
use crate::segment_uses::SegmentUses;

/// Layout of the segments on the device.
#[derive(Debug, Clone, Copy)]
pub struct SegmentGeometry {
    /// Segment size in bytes.
    pub segment_size: u64,
    /// Number of segments.
    pub segment_count: u32,
}

impl SegmentGeometry {
    pub fn of(superblock: &StoreSuperblock) -> Self {
        Self { segment_size: u64::from(superblock.segment_size), segment_count: superblock.segment_count }
    }

    /// Returns the number of blocks per segment.
    pub fn segment_blocks(&self) -> u64 {
        self.segment_size / BLOCK64
    }

    /// Returns the block number of a segment's first block.
    pub fn first_block(&self, segment: u32) -> u64 {
        (SEGMENTS_START + u64::from(segment) * self.segment_size) / BLOCK64
    }

    /// Returns the segment that contains a byte address; `None` outside all segments.
    pub fn segment_of_byte(&self, addr: u64) -> Option<u32> {
        let index = addr.checked_sub(SEGMENTS_START)? / self.segment_size;
        (index < u64::from(self.segment_count)).then_some(index as u32)
    }

    /// Returns the segment that contains a block.
    pub fn segment_of(&self, block: u64) -> Option<u32> {
        self.segment_of_byte(block.checked_mul(BLOCK64)?)
    }

    /// Returns whether `blocks` blocks starting at `block` are in one segment.
    pub fn contains(&self, block: u64, blocks: u64) -> bool {
        match (self.segment_of(block), block.checked_add(blocks.max(1) - 1).and_then(|last| self.segment_of(last))) {
            (Some(first), Some(last)) => first == last,
            _ => false,
        }
    }

    /// Returns whether the blob is in one segment.
    pub fn contains_blob(&self, ptr: BlobPtr) -> bool {
        let last = ptr.addr.checked_add(u64::from(ptr.len).max(1) - 1);
        match (self.segment_of_byte(ptr.addr), last.and_then(|last| self.segment_of_byte(last))) {
            (Some(first), Some(last)) => first == last,
            _ => false,
        }
    }
}

/// Live bytes of each segment, as stored by a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveTable {
    live: Vec<u32>,
    total: u64,
}

impl LiveTable {
    pub fn new(segments: u32) -> Self {
        Self { live: vec![0; segments as usize], total: 0 }
    }

    /// Creates a table of counted live bytes.
    pub fn of_counts(counts: &[u64], geometry: &SegmentGeometry) -> Result<Self, MalformedStore> {
        let mut table = Self::new(geometry.segment_count);
        for (segment, (live, &count)) in table.live.iter_mut().zip(counts).enumerate() {
            if count > geometry.segment_size {
                return malformed(format!("segment {segment}: {count} live bytes are referenced"));
            }
            *live = count as u32;
            table.total += count;
        }
        Ok(table)
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn of(&self, segment: u32) -> u32 {
        self.live.get(segment as usize).copied().unwrap_or(0)
    }

    pub fn all(&self) -> &[u32] {
        &self.live
    }

    /// Adds segments without live bytes, up to `segments` in total.
    fn grow(&mut self, segments: u32) {
        self.live.resize(segments as usize, 0);
    }

    /// Removes segments without live bytes from the end.
    fn truncate(&mut self, segments: u32) {
        debug_assert!(self.live.iter().skip(segments as usize).all(|&live| live == 0), "live bytes are given up");
        self.live.truncate(segments as usize);
    }

    fn add(&mut self, segment: u32, bytes: u32) {
        let live = &mut self.live[segment as usize];
        *live = live.checked_add(bytes).expect("more live bytes than a segment has");
        self.total += u64::from(bytes);
    }

    fn sub(&mut self, segment: u32, bytes: u32) {
        let live = &mut self.live[segment as usize];
        *live = live.checked_sub(bytes).expect("fewer live bytes than none in a segment");
        self.total -= u64::from(bytes);
    }

    pub fn add_blob(&mut self, geometry: &SegmentGeometry, ptr: BlobPtr) {
        self.add(geometry.segment_of_byte(ptr.addr).expect("a blob within the segments"), ptr.len);
    }

    pub fn sub_blob(&mut self, geometry: &SegmentGeometry, ptr: BlobPtr) {
        self.sub(geometry.segment_of_byte(ptr.addr).expect("a blob within the segments"), ptr.len);
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(4 * self.live.len());
        self.live.iter().for_each(|&live| out.put_u32(live));
        out
    }

    pub fn decode(bytes: &[u8], geometry: &SegmentGeometry) -> Result<Self, MalformedStore> {
        // The store may have grown since: further segments held nothing.
        if bytes.len() > 4 * geometry.segment_count as usize || !bytes.len().is_multiple_of(4) {
            return malformed(format!("segment table: {} bytes for {} segments", bytes.len(), geometry.segment_count));
        }
        let mut reader = StoreReader::new(bytes, "segment table");
        let mut table = Self::new(geometry.segment_count);
        for live in &mut table.live[..bytes.len() / 4] {
            *live = reader.u32()?;
            if u64::from(*live) > geometry.segment_size {
                return malformed(format!("segment table: {live} live bytes in a segment"));
            }
            table.total += u64::from(*live);
        }
        Ok(table)
    }
}

/// State of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// Free: not referenced by anything.
    Free,
    /// Current or next segment of the log.
    Open,
    /// Completely written.
    Used,
    /// Damaged: its batches cannot be read back. The cleaner skips it.
    Damaged,
    /// No segment of the store any more, which has shrunk.
    Gone,
}

/// Segments of a store.
#[derive(Debug)]
pub struct Segments {
    pub geometry: SegmentGeometry,
    live: LiveTable,
    state: Vec<SegmentState>,
    free: VecDeque<u32>,
    /// Reads in flight, by segment.
    pins: HashMap<u32, u32>,
    /// Segments that the durable checkpoint does not reference, and that become free when their reads in flight
    /// complete.
    free_after_reads: BTreeSet<u32>,
    /// Segments that the log has entered since the redo point of the durable anchor, in order.
    replay: VecDeque<u32>,
    /// Live counts for the checkpoint in progress.
    checkpoint: Option<LiveTable>,
    /// Free segments whose space has not yet been returned to the file system.
    to_punch: BTreeSet<u32>,
    /// Uses of segments.
    pub uses: SegmentUses,
    /// Added segments, which become free with the next checkpoint: its table and its record are the first ones that know
    /// of them.
    added: BTreeSet<u32>,
    /// Number of segments at the beginning of the checkpoint in progress.
    checkpoint_segments: u32,
    /// Free segments that are not offered to the log for a moment.
    held: BTreeSet<u32>,
    /// Number of the first retired segment: the log does not enter those from it on, which are to be given up.
    retired_from: u32,
}

impl Segments {
    /// Creates the segments as recorded by a checkpoint; segments without live bytes are free.
    pub fn new(geometry: SegmentGeometry, live: LiveTable) -> Self {
        let state: Vec<_> =
            live.live.iter().map(|&live| if live == 0 { SegmentState::Free } else { SegmentState::Used }).collect();
        let free = (0..geometry.segment_count).filter(|&i| state[i as usize] == SegmentState::Free).collect();
        let pins = HashMap::new();
        let (replay, to_punch) = (VecDeque::new(), BTreeSet::new());
        let free_after_reads = BTreeSet::new();
        let (added, checkpoint_segments) = (BTreeSet::new(), 0);
        let (checkpoint, uses) = (None, SegmentUses::default());
        Self {
            geometry,
            live,
            state,
            free,
            pins,
            free_after_reads,
            replay,
            checkpoint,
            to_punch,
            uses,
            added,
            checkpoint_segments,
            held: BTreeSet::new(),
            retired_from: u32::MAX,
        }
    }

    /// Removes a segment from the free list, when replay finds that the log used it.
    pub fn claim(&mut self, segment: u32) {
        self.free.retain(|&free| free != segment);
        self.state[segment as usize] = SegmentState::Used;
        if self.replay.back() != Some(&segment) {
            self.replay.push_back(segment);
        }
    }

    /// Adds segments, up to `count` in total, which become free with the next checkpoint.
    pub fn grow(&mut self, count: u32) {
        let before = self.geometry.segment_count;
        debug_assert!(count >= before, "a store keeps its segments");
        self.geometry.segment_count = count;
        self.live.grow(count);
        if let Some(table) = &mut self.checkpoint {
            table.grow(count);
        }
        self.state.resize(count as usize, SegmentState::Free);
        self.added.extend(before..count);
    }

    /// Returns whether there are added segments that are not free yet.
    pub fn has_added(&self) -> bool {
        !self.added.is_empty()
    }

    /// Returns the number of segments without those added ones, and without retired ones.
    pub fn offered_count(&self) -> u32 {
        (self.geometry.segment_count - self.added.len() as u32).saturating_sub(self.retired_count())
    }

    /// Allocates a free segment for the log.
    pub fn allocate(&mut self) -> Option<u32> {
        let segment = self.free.pop_front()?;
        self.state[segment as usize] = SegmentState::Open;
        self.to_punch.remove(&segment);
        Some(segment)
    }

    /// Records that the log has entered an allocated segment with batch `seq`.
    pub fn entered(&mut self, segment: u32, seq: u64) {
        self.replay.push_back(segment);
        self.uses.begin(segment, seq);
    }

    /// Records that the log has left a segment.
    pub fn leave(&mut self, segment: u32) {
        self.state[segment as usize] = SegmentState::Used;
    }

    /// Marks a used segment as damaged: its batches cannot be read.
    pub fn mark_damaged(&mut self, segment: u32) {
        if self.state(segment) == SegmentState::Used {
            self.state[segment as usize] = SegmentState::Damaged;
        }
    }

    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn live_bytes(&self) -> u64 {
        self.live.total()
    }

    pub fn live_table(&self) -> &LiveTable {
        &self.live
    }

    pub fn state(&self, segment: u32) -> SegmentState {
        self.state.get(segment as usize).copied().unwrap_or(SegmentState::Gone)
    }

    /// Returns whether a segment that the log has left holds anything that may be read again: live data, or batches that
    /// would be replayed.
    pub fn is_needed(&self, segment: u32) -> bool {
        let is_left = matches!(self.state(segment), SegmentState::Used | SegmentState::Damaged);
        is_left && (self.live.of(segment) > 0 || self.replay.contains(&segment))
    }

    /// Counts a data block as live.
    pub fn add_block(&mut self, block: u64) {
        let segment = self.geometry.segment_of(block).expect("a block within the segments");
        self.live.add(segment, BLOCK as u32);
    }

    /// Counts `count` consecutive data blocks of one segment as live.
    pub fn add_blocks(&mut self, block: u64, count: u32) {
        let segment = self.geometry.segment_of(block).expect("a block within the segments");
        self.live.add(segment, BLOCK as u32 * count);
    }

    /// Counts a data block as dead.
    pub fn sub_block(&mut self, block: u64) {
        let segment = self.geometry.segment_of(block).expect("a block within the segments");
        self.live.sub(segment, BLOCK as u32);
    }

    /// Counts a compressed blob as live.
    pub fn add_blob(&mut self, ptr: BlobPtr) {
        let geometry = self.geometry;
        self.live.add_blob(&geometry, ptr);
    }

    /// Counts a blob as dead, dropped by a change after the start of the checkpoint in progress.
    pub fn drop_blob(&mut self, ptr: BlobPtr) {
        let geometry = self.geometry;
        self.live.sub_blob(&geometry, ptr);
    }

    /// Counts a blob written by the checkpoint in progress (or by recovery) as live.
    pub fn add_checkpoint_blob(&mut self, ptr: BlobPtr) {
        let geometry = self.geometry;
        self.live.add_blob(&geometry, ptr);
        if let Some(table) = &mut self.checkpoint {
            table.add_blob(&geometry, ptr);
        }
    }

    /// Counts a blob replaced by the checkpoint in progress as dead.
    pub fn sub_checkpoint_blob(&mut self, ptr: BlobPtr) {
        let geometry = self.geometry;
        self.live.sub_blob(&geometry, ptr);
        if let Some(table) = &mut self.checkpoint {
            table.sub_blob(&geometry, ptr);
        }
    }

    /// Replaces the live counts after a recount. The next checkpoint frees the segments that hold
    /// nothing any more.
    pub fn recount(&mut self, live: LiveTable) {
        debug_assert!(self.checkpoint.is_none(), "a checkpoint in progress has copied the counts");
        self.live = live;
    }

    /// Begins a checkpoint. Its live counts are the current ones plus the checkpoint's own blobs.
    pub fn begin_checkpoint(&mut self) {
        self.checkpoint = Some(self.live.clone());
        self.checkpoint_segments = self.geometry.segment_count;
    }

    /// Returns the live counts of the checkpoint in progress.
    pub fn checkpoint_table(&self) -> &LiveTable {
        self.checkpoint.as_ref().expect("a checkpoint in progress")
    }

    /// Discards the counts of an aborted checkpoint.
    pub fn abandon_checkpoint(&mut self) {
        self.checkpoint = None;
    }

    /// Frees the segments that the now durable checkpoint does not reference, except the log since its redo point (in
    /// segment `redo_segment`), `keep`, and segments being read.  Returns the number of segments freed.
    pub fn commit_checkpoint(&mut self, redo_segment: u32, keep: Option<u32>) -> u32 {
        let table = self.checkpoint.take().expect("a checkpoint in progress");
        while self.replay.front().is_some_and(|&first| first != redo_segment) {
            self.replay.pop_front();
        }
        let later = self.added.split_off(&self.checkpoint_segments);
        let retired_from = self.retired_from;
        let known = std::mem::replace(&mut self.added, later);
        self.free.extend(known.into_iter().filter(|&segment| segment < retired_from));
        let mut freed = 0;
        for segment in (0..self.geometry.segment_count).rev() {
            let unused = table.of(segment) == 0 && self.live.of(segment) == 0;
            let used = matches!(self.state[segment as usize], SegmentState::Used | SegmentState::Damaged);
            if unused && used && Some(segment) != keep && !self.replay.contains(&segment) {
                if self.pins.contains_key(&segment) {
                    self.free_after_reads.insert(segment);
                } else {
                    self.set_free(segment);
                    freed += 1;
                }
            }
        }
        freed
    }

    fn set_free(&mut self, segment: u32) {
        self.free_after_reads.remove(&segment);
        self.state[segment as usize] = SegmentState::Free;
        // Reused first, while the file system still has its space allocated: writing to a hole requires an allocation,
        // and thereby a kernel worker thread.
        if segment < self.retired_from {
            self.free.push_front(segment);
        }
        self.to_punch.insert(segment);
    }

    /// Takes the free segments whose space can be returned to the file system, except the `keep` that are used next.
    pub fn take_punchable(&mut self, keep: usize) -> Vec<u32> {
        let next: BTreeSet<u32> = self.free.iter().take(keep).copied().collect();
        let out: Vec<u32> = self.to_punch.iter().filter(|segment| !next.contains(segment)).copied().collect();
        out.iter().for_each(|segment| {
            self.to_punch.remove(segment);
        });
        out
    }

    /// Pins a segment for a read in flight.
    pub fn pin(&mut self, segment: u32) {
        *self.pins.entry(segment).or_default() += 1;
    }

    /// Unpins a segment after a read. The last unpin frees the segment if it waits for that.
    pub fn unpin(&mut self, segment: u32) {
        if let Some(count) = self.pins.get_mut(&segment) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&segment);
                if self.free_after_reads.contains(&segment) {
                    self.set_free(segment);
                }
            }
        }
    }

    /// Returns the used segments with the least live bytes, at most `live_max` live bytes in total, each less than
    /// 31/32 full.  Segments without live bytes are excluded; the next checkpoint frees them.
    pub fn victims(&self, live_max: u64) -> Vec<u32> {
        let mut used: Vec<(u32, u32)> = (0..self.geometry.segment_count)
            .filter(|&segment| self.state[segment as usize] == SegmentState::Used)
            .map(|segment| (self.live.of(segment), segment))
            .filter(|&(live, _)| live > 0 && u64::from(live) < self.geometry.segment_size * 31 / 32)
            .collect();
        used.sort_unstable();
        let mut sum = 0;
        used.into_iter()
            .take_while(|&(live, _)| {
                sum += u64::from(live);
                sum <= live_max
            })
            .map(|(_, segment)| segment)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_that_is_read_is_free_when_it_has_been_read() {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: 24 };
        let mut segments = Segments::new(geometry, LiveTable::new(geometry.segment_count));
        let log = [segments.allocate().expect("free"), segments.allocate().expect("free")];
        log.iter().for_each(|&segment| segments.entered(segment, 1));
        let block = geometry.first_block(log[0]) + 1;
        segments.add_block(block);
        segments.leave(log[0]);
        segments.pin(log[0]);
        segments.pin(log[0]);
        segments.sub_block(block);
        let free = segments.free_count();
        segments.begin_checkpoint();
        segments.commit_checkpoint(log[1], None);
        segments.unpin(log[0]);
        assert_eq!(segments.free_count(), free, "it is still read");
        segments.unpin(log[0]);
        assert_eq!((segments.free_count(), segments.state(log[0])), (free + 1, SegmentState::Free));
        // Freed once, regardless of later reads and checkpoints.
        segments.pin(log[0]);
        segments.begin_checkpoint();
        segments.commit_checkpoint(log[1], None);
        segments.unpin(log[0]);
        assert_eq!(segments.free_count(), free + 1);
    }

    #[test]
    fn what_the_new_checkpoint_refers_to_is_not_freed_with_it() {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: 24 };
        let mut segments = Segments::new(geometry, LiveTable::new(geometry.segment_count));
        let log: Vec<u32> = (0..3).map(|_| segments.allocate().expect("free")).collect();
        log.iter().for_each(|&segment| segments.entered(segment, 1));
        let block = geometry.first_block(log[0]) + 1;
        let node = BlobPtr { addr: geometry.first_block(log[1]) * BLOCK64, len: 9, crc: 0 };
        segments.add_block(block);
        segments.add_checkpoint_blob(node);
        segments.leave(log[0]);
        segments.leave(log[1]);
        let free = segments.free_count();
        segments.begin_checkpoint();
        // Overwritten during the checkpoint, which references the state at its start.
        segments.sub_block(block);
        segments.drop_blob(node);
        assert_eq!(segments.commit_checkpoint(log[2], None), 0);
        assert_eq!((segments.state(log[0]), segments.state(log[1])), (SegmentState::Used, SegmentState::Used));
        segments.begin_checkpoint();
        assert_eq!(segments.commit_checkpoint(log[2], Some(log[1])), 1, "one holds the table of segments");
        assert_eq!((segments.free_count(), segments.state(log[0])), (free + 1, SegmentState::Free));
    }

    #[test]
    fn added_segments_are_free_with_the_next_checkpoint_that_knows_them() {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: 24 };
        let mut segments = Segments::new(geometry, LiveTable::new(geometry.segment_count));
        let log = segments.allocate().expect("free");
        segments.entered(log, 1);
        segments.grow(30);
        segments.begin_checkpoint();
        // One that comes during a checkpoint waits for the next one.
        segments.grow(31);
        assert_eq!((segments.free_count(), segments.checkpoint_table().all().len()), (23, 31));
        assert_eq!(segments.commit_checkpoint(log, None), 0);
        assert_eq!((segments.free_count(), segments.has_added()), (29, true));
        segments.begin_checkpoint();
        segments.abandon_checkpoint();
        assert_eq!(segments.free_count(), 29, "an aborted one frees nothing");
        segments.begin_checkpoint();
        segments.commit_checkpoint(log, None);
        assert_eq!((segments.free_count(), segments.has_added()), (30, false));
        let block = segments.geometry.first_block(30);
        segments.add_block(block);
        assert_eq!(segments.live_table().of(30), 4096);
    }

    #[test]
    fn a_table_from_before_the_store_grew_is_read() {
        let mut live = LiveTable::new(24);
        live.add(23, 4096);
        let grown = SegmentGeometry { segment_size: 64 << 10, segment_count: 26 };
        let table = LiveTable::decode(&live.encode(), &grown).expect("shorter");
        assert_eq!((table.all().len(), table.of(23), table.total()), (26, 4096, 4096));
        let fewer = SegmentGeometry { segment_count: 23, ..grown };
        assert!(LiveTable::decode(&live.encode(), &fewer).is_err(), "longer");
        assert!(LiveTable::decode(&live.encode()[..5], &grown).is_err(), "a part of a number");
    }

    #[test]
    fn what_holds_nothing_is_no_victim() {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: 24 };
        let mut live = LiveTable::new(geometry.segment_count);
        live.add(3, 4096);
        live.add(5, 8192);
        let mut segments = Segments::new(geometry, live);
        segments.sub_block(geometry.first_block(3));
        assert_eq!(segments.victims(1 << 20), [5]);
    }
}
