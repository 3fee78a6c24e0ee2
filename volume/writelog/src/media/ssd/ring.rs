//! Positions of a log on an SSD in its ring.

use std::collections::{BTreeMap, VecDeque};

use crate::format::LogSuperblock;

/// Minimum distance of tail marks, in entries: bounds their memory relative to that of the entries.
const MARK_EVERY: u64 = 16;

/// Block where the tail may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) number: u64,
    pub(super) pos: u64,
    pub(super) first_seq: u64,
}

/// Block not known to be durable.
pub(super) struct StartedBlock {
    pub(super) number: u64,
    /// Sequence number after its last entry.
    pub(super) end_seq: u64,
    pub(super) done: bool,
    /// Set once it is known to be durable, whatever those before it are.
    pub(super) durable: bool,
}

/// Positions of a log in its ring: head, tail, blocks in flight, and what the superblock says.
pub(super) struct RingState {
    /// Position of the next block, in units since the log's creation.
    pub(super) head_pos: u64,
    pub(super) next_block: u64,
    pub(super) next_seq: u64,
    /// Number before which all blocks are durable.
    pub(super) durable_block: u64,
    /// Number of the first entry that is not durable, which is the first one of block `durable_block`.
    pub(super) durable_seq: u64,
    pub(super) started: VecDeque<StartedBlock>,
    pub(super) marks: VecDeque<Mark>,
    pub(super) tail_seq: u64,
    pub(super) tail_pos: u64,
    pub(super) tail_block: u64,
    /// Lower bound of the first entry that a recovery replays, by copy of the superblock.
    pub(super) persisted_seqs: [u64; 2],
    /// Position at which recovery begins, according to the newer copy of the superblock.
    pub(super) persisted_pos: u64,
    /// Position from which on another member of the log needs the ring.
    pub(super) held_pos: u64,
    /// Set once an append that came from another member has failed.
    pub(super) failed: bool,
    /// Positions of payloads being read, with the number of readers, to keep them from being overwritten.
    pub(super) reads: BTreeMap<u64, usize>,
    pub(super) superblock: LogSuperblock,
}

impl RingState {
    pub(super) fn free_pos(&self) -> u64 {
        let needed = self.persisted_pos.min(self.held_pos);
        self.reads.keys().next().map_or(needed, |&read| read.min(needed))
    }

    /// Records that completed blocks before `number` are durable.
    pub(super) fn durable(&mut self, number: u64) {
        let durable = |block: &&StartedBlock| block.done && (block.durable || block.number < number);
        while let Some(block) = self.started.front().filter(durable) {
            (self.durable_block, self.durable_seq) = (block.number + 1, block.end_seq);
            self.started.pop_front();
        }
    }

    pub(super) fn find_tail(&mut self) {
        if self.tail_seq == self.next_seq {
            (self.tail_pos, self.tail_block) = (self.head_pos, self.next_block);
            self.marks.clear();
            return;
        }
        while self.marks.get(1).is_some_and(|mark| mark.first_seq <= self.tail_seq) {
            self.marks.pop_front();
        }
        if let Some(mark) = self.marks.front() {
            (self.tail_pos, self.tail_block) = (mark.pos, mark.number);
        }
    }

    /// Returns the mark of a block at or before the one with entry `seq`, the nearest one that is known.
    pub(super) fn mark_before(&self, seq: u64) -> Mark {
        let tail = Mark { number: self.tail_block, pos: self.tail_pos, first_seq: self.tail_seq };
        let after = self.marks.partition_point(|mark| mark.first_seq <= seq);
        after.checked_sub(1).map_or(tail, |at| self.marks[at])
    }

    /// Drops the blocks from `number` on, which would begin with entry `seq`; `pos` is the end of the one before. None is
    /// in flight.
    pub(super) fn truncate(&mut self, number: u64, pos: u64, seq: u64) {
        debug_assert!(self.started.is_empty());
        (self.next_block, self.head_pos, self.next_seq) = (number, pos, seq);
        (self.durable_block, self.durable_seq) = (number, seq);
        self.marks.retain(|mark| mark.number < number);
        self.tail_seq = self.tail_seq.min(seq);
    }

    /// Empties the log, whose next block is `number`, at `pos`, with the entries from `seq` on. None is in flight.
    pub(super) fn restart(&mut self, number: u64, pos: u64, seq: u64) {
        self.truncate(0, 0, 0);
        self.truncate(number, pos, seq);
        (self.tail_seq, self.tail_pos, self.tail_block) = (seq, pos, number);
        self.persisted_pos = pos;
    }

    pub(super) fn mark(&mut self, mark: Mark) {
        if self.marks.back().is_none_or(|last| mark.first_seq - last.first_seq >= MARK_EVERY) {
            self.marks.push_back(mark);
        }
    }
}
