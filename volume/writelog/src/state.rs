//! State of an open log: its owners, and the steps that concern several of them.

use std::rc::Rc;

use forebay_block::{BufList, Extent};

use crate::bypass::BypassedWrites;
use crate::consistency::{ConsistencyPoints, SizeLimits};
use crate::dirty::DirtySet;
use crate::entries::{EntryKind, LogEntry, NOWHERE};
use crate::format::EntryRecord;
use crate::media::AppendPiece;
use crate::mode::LogLifecycle;
use crate::pending_write::PendingWrite;
use crate::queue::AppendQueue;
use crate::read::MixedReads;
use crate::stats::LogCounters;
use crate::superseded::superseded_entries;

/// State of an open log. Each part owns its invariants, and keeps its fields to itself.
pub(crate) struct LogState {
    pub(crate) life: LogLifecycle,
    pub(crate) queue: AppendQueue,
    pub(crate) dirty: DirtySet,
    pub(crate) reads: MixedReads,
    pub(crate) bypassed: BypassedWrites,
    pub(crate) points: ConsistencyPoints,
    pub(crate) size_limits: SizeLimits,
    pub(crate) counters: LogCounters,
}

impl LogState {
    /// Returns the state of a log with the entries that were found on its medium.
    pub(crate) fn new(tail_seq: u64, found: &[EntryRecord], acquiring: bool) -> Self {
        let head = tail_seq + found.len() as u64;
        let generation = found.last().map_or(1, |last| last.generation + 1);
        let mut state = Self {
            life: LogLifecycle::new(acquiring),
            queue: AppendQueue::new(head, generation),
            dirty: DirtySet::new(tail_seq),
            reads: MixedReads::default(),
            bypassed: BypassedWrites::new(),
            points: ConsistencyPoints::default(),
            size_limits: SizeLimits::default(),
            counters: LogCounters::new(found.len() as u64),
        };
        let superseded = superseded_entries(found);
        for (record, superseded) in found.iter().zip(superseded) {
            let mut entry = LogEntry::new(record.kind, record.extent, record.place, record.crc);
            if superseded {
                entry.kill();
            }
            state.push(entry, record.generation, Some(&mut Vec::new()));
        }
        state
    }

    /// Adds an entry to the dirty set ([`DirtySet::push`]), and marks its range as changed.
    pub(crate) fn push(&mut self, entry: LogEntry, generation: u64, dead: Option<&mut Vec<LogEntry>>) -> u64 {
        let seq = self.dirty.push(entry, generation, dead);
        self.reads.mark_stale(entry.extent());
        seq
    }

    /// Removes the entries before `tail` from the dirty set ([`DirtySet::retire`]).
    pub(crate) fn retire(&mut self, tail: u64, gone: &mut Vec<LogEntry>) {
        let overwritten = self.dirty.retire(tail, gone);
        self.counters.overwritten(overwritten);
    }

    /// Begins a new generation for pieces queued from now on, unless the current one is unused.
    pub(crate) fn barrier(&mut self) {
        if self.queue.barrier() {
            self.counters.generation();
        }
    }

    /// Adds pieces to the queue; with `write_back_ack`, also to the dirty set, before they are on the medium.
    pub(crate) fn enqueue(
        &mut self,
        pieces: Vec<(EntryKind, Extent, BufList)>,
        pending: &Rc<PendingWrite>,
        write_back_ack: bool,
    ) {
        let generation = self.queue.generation();
        for (kind, extent, payload) in pieces {
            if write_back_ack {
                let entry = LogEntry::new(kind, extent, NOWHERE, 0).with_slack(generation - pending.arrived);
                let seq = self.push(entry, generation, None);
                if kind.has_payload() {
                    self.dirty.cache_payload(seq, payload.clone());
                }
            }
            self.queue.push(AppendPiece { kind, extent, payload, generation, pending: pending.clone() });
        }
    }
}
