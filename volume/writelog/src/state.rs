//! State of an open log.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, Extent};
use forebay_reactor::{Instant, now};

use crate::entries::{Entries, Entry, Kind, NOWHERE};
use crate::format::EntryRecord;
use crate::hidden::hidden_entries;
use crate::index::Index;
use crate::media::{Piece, Placed};
use crate::ticket::Ticket;

/// Mode of a log.
#[derive(Debug, Clone)]
pub enum Mode {
    /// Waiting for the owner: this process is not yet known to be the volume's only writer. Requests wait.
    Acquiring,
    /// Enabled: writes go to the log.
    On,
    /// Being disabled, with the reason: the contents are written back, and writes wait for that.
    TurningOff(Error),
    /// Disabled, with the reason: requests go to the backend.
    Off(Error),
    /// Failed, with the reason: the contents cannot or must not be written back.
    Failed(Error),
}

impl Mode {
    /// Returns whether writes go to the log.
    pub fn is_on(&self) -> bool {
        matches!(self, Mode::On)
    }

    /// Returns a single word for messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Mode::Acquiring => "acquiring",
            Mode::On => "on",
            Mode::TurningOff(_) => "turning-off",
            Mode::Off(_) => "off",
            Mode::Failed(_) => "failed",
        }
    }

    /// Returns the reason of a log that is disabled, being disabled or failed.
    pub fn reason(&self) -> Option<&Error> {
        match self {
            Mode::Acquiring | Mode::On => None,
            Mode::TurningOff(error) | Mode::Off(error) | Mode::Failed(error) => Some(error),
        }
    }
}

/// Counters and gauges of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Payload capacity in bytes.
    pub capacity: u64,
    /// Bytes in use, which cannot be written now.
    pub used: u64,
    /// Dirty bytes of the volume, including superseded entries.
    pub dirty_bytes: u64,
    /// Dirty entries.
    pub dirty_entries: u64,
    /// Age of the oldest dirty entry.
    pub dirty_age: Duration,
    /// Entries found when the log was opened.
    pub replayed: u64,
    /// Entries appended.
    pub appended: u64,
    /// Bytes of the volume covered by these.
    pub appended_bytes: u64,
    /// Groups appended.
    pub groups: u64,
    /// Writes that bypassed the log.
    pub direct: u64,
    /// Bytes of these.
    pub direct_bytes: u64,
    /// Write-back requests to the backend.
    pub written_back: u64,
    /// Bytes of these.
    pub written_back_bytes: u64,
    /// Entries that were never written back, because later ones superseded them.
    pub overwritten: u64,
    /// Write-back failures that were retried.
    pub backend_errors: u64,
    /// Bytes read from the log.
    pub hit_bytes: u64,
    /// Bytes read from the backend.
    pub miss_bytes: u64,
    /// Writes throttled because the log was getting full.
    pub throttled: u64,
    /// Total time of these delays, in nanoseconds.
    pub throttled_ns: u64,
    /// Barriers that began a new generation.
    pub generations: u64,
    /// Memory of entries and index, in bytes.
    pub index_memory: u64,
}

/// Group being appended.
pub(crate) struct Appending {
    pub(crate) number: u64,
    pub(crate) first_seq: u64,
    pub(crate) pieces: Vec<Placed>,
    pub(crate) done: Option<Result<(), Error>>,
}

/// Read that includes the backend: it is repeated if a part of its range is written in the meantime.
pub(crate) struct MixedRead {
    pub(crate) extent: Extent,
    pub(crate) stale: bool,
}

/// Payload cache: most recently written payloads, and those not on the medium yet.
#[derive(Default)]
pub(crate) struct Recent {
    map: HashMap<u64, BufList>,
    order: VecDeque<u64>,
    bytes: usize,
}

fn retained(data: &BufList) -> usize {
    data.parts().iter().map(|part| part.retained().min(2 * part.len() + 4096)).sum()
}

impl Recent {
    pub(crate) fn get(&self, seq: u64) -> Option<&BufList> {
        self.map.get(&seq)
    }

    pub(crate) fn insert(&mut self, seq: u64, data: BufList) {
        self.bytes += retained(&data);
        self.map.insert(seq, data);
        self.order.push_back(seq);
    }

    pub(crate) fn remove(&mut self, seq: u64) {
        if let Some(data) = self.map.remove(&seq) {
            self.bytes -= retained(&data);
        }
        while self.order.front().is_some_and(|front| !self.map.contains_key(front)) {
            self.order.pop_front();
        }
    }

    /// Evicts the oldest payloads before `before` until at most `bytes` are cached.
    pub(crate) fn shrink(&mut self, bytes: usize, before: u64) {
        while self.bytes > bytes
            && let Some(&front) = self.order.front().filter(|&&front| front < before)
        {
            self.remove(front);
        }
    }
}

pub(crate) struct State {
    pub(crate) mode: Mode,
    /// Set once new requests are refused; those in flight complete in order.
    pub(crate) ending: bool,
    /// Set once the log's tasks are to end.
    pub(crate) closing: bool,
    /// Pieces to be appended.
    pub(crate) queue: VecDeque<Piece>,
    pub(crate) queue_bytes: u64,
    pub(crate) appending: VecDeque<Appending>,
    pub(crate) entries: Entries,
    pub(crate) index: Index,
    /// Generations in the log with the sequence number of their first entry.
    pub(crate) generations: VecDeque<(u64, u64)>,
    /// Generation of newly queued pieces.
    pub(crate) generation: u64,
    /// Set once a write of the current generation was queued or bypassed the log.
    pub(crate) generation_used: bool,
    /// Sequence number of the next entry for the medium.
    pub(crate) next_seq: u64,
    /// Entries before this one are on the medium.
    pub(crate) appended_seq: u64,
    /// Value of `next_seq` when the queue was last dropped: pieces queued then never get a sequence number.
    pub(crate) dropped_at: u64,
    /// Number of times that the queue was dropped.
    pub(crate) drops: u64,
    /// Entries before this one are durable on the medium, in the early acknowledgement mode.
    pub(crate) synced_seq: u64,
    /// Set once the record of a log being disabled states that it must never be replayed.
    pub(crate) released: bool,
    pub(crate) recent: Recent,
    pub(crate) mixed_reads: Vec<(u64, MixedRead)>,
    pub(crate) next_read: u64,
    /// Bypassed writes acknowledged before they were durable; `direct_flushed` is the number of these covered by a
    /// flush of the backend.
    pub(crate) direct_done: u64,
    pub(crate) direct_flushed: u64,
    pub(crate) direct_active: usize,
    /// Set while the tail is being persisted so that writes may bypass the log.
    pub(crate) persisting_tail: bool,
    /// Number of [`ChangesPast`](crate::ChangesPast) guards.
    pub(crate) past_active: usize,
    /// End of the last write: a long write that begins there is sequential.
    pub(crate) last_end: u64,
    /// Drain target: a caller waits until the backend holds all entries before this one.
    pub(crate) wanted: u64,
    /// Held consistency points: entries from these on must not be written back.
    pub(crate) holds: Vec<u64>,
    /// Error of the last write-back attempt.
    pub(crate) backend_error: Option<Error>,
    pub(crate) dirty_bytes: u64,
    /// Sampled publication times: sequence number, time.
    pub(crate) ages: VecDeque<(u64, Instant)>,
    /// Size limits of shrinks in progress: requests past any of these are refused.
    pub(crate) size_limits: Vec<u64>,
    pub(crate) stats: LogStats,
}

/// Minimum interval of publication time samples.
const AGE_STEP: Duration = Duration::from_millis(10);

impl State {
    pub(crate) fn new(tail_seq: u64, found: &[EntryRecord]) -> Self {
        let head = tail_seq + found.len() as u64;
        let mut state = Self {
            mode: Mode::On,
            ending: false,
            closing: false,
            queue: VecDeque::new(),
            queue_bytes: 0,
            appending: VecDeque::new(),
            entries: Entries::new(tail_seq),
            index: Index::new(),
            generations: VecDeque::new(),
            generation: found.last().map_or(1, |last| last.generation + 1),
            generation_used: false,
            next_seq: head,
            appended_seq: head,
            dropped_at: head,
            drops: 0,
            synced_seq: head,
            released: false,
            recent: Recent::default(),
            mixed_reads: Vec::new(),
            next_read: 0,
            // Writes of a killed process may be readable at the backend, but not durable: the first flush goes there.
            direct_done: 1,
            direct_flushed: 0,
            direct_active: 0,
            persisting_tail: false,
            past_active: 0,
            last_end: u64::MAX,
            wanted: 0,
            holds: Vec::new(),
            backend_error: None,
            dirty_bytes: 0,
            ages: VecDeque::new(),
            size_limits: Vec::new(),
            stats: LogStats { replayed: found.len() as u64, ..LogStats::default() },
        };
        let hidden = hidden_entries(found);
        for (record, hidden) in found.iter().zip(hidden) {
            let mut entry = Entry::new(record.kind, record.extent, record.place, record.crc);
            if hidden {
                entry.kill();
            }
            state.push(entry, record.generation, Some(&mut Vec::new()));
        }
        state
    }

    /// Adds an entry and returns its sequence number; adds to `dead` the entries of its own generation that it
    /// supersedes. `None` for an entry that is not durable yet: a crash may undo it, and then those that it overwrote
    /// are needed.
    pub(crate) fn push(&mut self, entry: Entry, generation: u64, mut dead: Option<&mut Vec<Entry>>) -> u64 {
        let seq = self.entries.push(entry);
        if self.generations.back().is_none_or(|&(last, _)| last != generation) {
            self.generations.push_back((generation, seq));
        }
        let first = self.generations.back().map_or(seq, |&(_, first)| first);
        let (entries, index) = (&mut self.entries, &mut self.index);
        index.insert(entry.extent(), seq as u32, |id, by| {
            let number = entries.seq_of(id);
            let Some(changed) = entries.get_mut(number) else { return };
            changed.count(by);
            let over = by < 0 && changed.is_hidden() && number >= first && number != seq && !changed.is_dead();
            if let Some(dead) = dead.as_mut().filter(|_| over) {
                changed.kill();
                dead.push(*changed);
            }
        });
        self.dirty_bytes += entry.extent().len;
        if self.ages.back().is_none_or(|&(_, at)| at.elapsed() >= AGE_STEP) {
            self.ages.push_back((seq, now()));
        }
        self.stale(entry.extent());
        seq
    }

    /// Marks a range as changed: overlapping reads that combine log and backend are repeated.
    pub(crate) fn stale(&mut self, extent: Extent) {
        for (_, read) in &mut self.mixed_reads {
            read.stale |= read.extent.overlaps(extent);
        }
    }

    /// Removes the entries before `tail`; adds those with a place on the medium that are not dead to `gone`.
    pub(crate) fn retire(&mut self, tail: u64, gone: &mut Vec<Entry>) {
        while self.entries.tail() < tail
            && let Some((seq, entry)) = self.entries.pop()
        {
            if !entry.is_hidden() {
                self.index.remove(entry.extent(), seq as u32, |_, _| {});
            }
            self.dirty_bytes -= entry.extent().len;
            self.recent.remove(seq);
            if entry.is_dead() {
                self.stats.overwritten += 1;
            } else if entry.place != NOWHERE {
                gone.push(entry);
            }
        }
        let tail = self.entries.tail();
        while self.generations.get(1).is_some_and(|&(_, first)| first <= tail) {
            self.generations.pop_front();
        }
        if self.entries.len() == 0 {
            self.generations.clear();
            self.ages.clear();
        }
        while self.ages.get(1).is_some_and(|&(seq, _)| seq <= tail) {
            self.ages.pop_front();
        }
    }

    /// Returns the generation of an entry.
    pub(crate) fn generation_of(&self, seq: u64) -> u64 {
        let after = self.generations.partition_point(|&(_, first)| first <= seq);
        after.checked_sub(1).map_or(0, |at| self.generations[at].0)
    }

    /// Returns the first entry that must not be written back, if a consistency point is held.
    pub(crate) fn hold(&self) -> Option<u64> {
        self.holds.iter().min().copied()
    }

    /// Returns whether all acknowledged writes that bypassed the log are durable.
    pub(crate) fn direct_lasts(&self) -> bool {
        self.past_active == 0 && self.direct_done == self.direct_flushed
    }

    /// Returns the age of the oldest entry.
    pub(crate) fn age(&self) -> Duration {
        self.ages.front().map_or(Duration::ZERO, |&(_, at)| at.elapsed())
    }

    /// Begins a new generation for pieces queued from now on, unless the current one is unused.
    pub(crate) fn barrier(&mut self) {
        if self.generation_used {
            self.generation += 1;
            self.generation_used = false;
            self.stats.generations += 1;
        }
    }

    /// Drops the queue and returns its pieces: none of them will be appended.
    pub(crate) fn drop_queue(&mut self) -> VecDeque<Piece> {
        self.queue_bytes = 0;
        self.dropped_at = self.next_seq;
        self.drops += 1;
        std::mem::take(&mut self.queue)
    }

    /// Adds pieces to the queue.
    pub(crate) fn enqueue(&mut self, pieces: Vec<(Kind, Extent, BufList)>, ticket: &Rc<Ticket>, early: bool) {
        self.generation_used = true;
        for (kind, extent, payload) in pieces {
            self.queue_bytes += payload.len() as u64;
            let generation = self.generation;
            if early {
                let entry = Entry::new(kind, extent, NOWHERE, 0).with_slack(generation - ticket.arrived);
                let seq = self.push(entry, generation, None);
                if kind.has_payload() {
                    self.recent.insert(seq, payload.clone());
                }
            }
            self.queue.push_back(Piece { kind, extent, payload, generation, ticket: ticket.clone() });
        }
    }
}
