//! What a log knows while it is open.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, Extent};
use forebay_reactor::{Instant, now};

use crate::entries::{Entries, Entry, Kind, NOWHERE};
use crate::format::EntryRecord;
use crate::hidden::hidden_entries;
use crate::index::Index;
use crate::media::{Medium, Piece, Placed};
use crate::pressure::Pressure;
use crate::ticket::Ticket;

/// Whether the log is in use.
#[derive(Debug, Clone)]
pub enum Mode {
    /// Waiting for the owner: this process is not yet known to be the volume's only writer.  Requests wait.
    Acquiring,
    /// Writes go to the log.
    On,
    /// The medium has failed: what is in the log goes to the backend, and writes wait for that.
    TurningOff(Error),
    /// Requests go to the backend; why.
    Off(Error),
    /// What is in the log cannot be saved, or must not be; why.
    Failed(Error),
}

impl Mode {
    /// Writes go to the log.
    pub fn is_on(&self) -> bool {
        matches!(self, Mode::On)
    }

    /// One word for people and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Mode::Acquiring => "acquiring",
            Mode::On => "on",
            Mode::TurningOff(_) => "turning-off",
            Mode::Off(_) => "off",
            Mode::Failed(_) => "failed",
        }
    }

    /// Why it is not on.
    pub fn reason(&self) -> Option<&Error> {
        match self {
            Mode::Acquiring | Mode::On => None,
            Mode::TurningOff(error) | Mode::Off(error) | Mode::Failed(error) => Some(error),
        }
    }
}

/// What a log counts, and how it stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Bytes that payloads may take.
    pub capacity: u64,
    /// Of these, those that cannot be written now.
    pub used: u64,
    /// Bytes of the volume that the backend may not hold yet, overwritten ones included.
    pub dirty_bytes: u64,
    /// Entries that the backend may not hold yet.
    pub dirty_entries: u64,
    /// How long the oldest of them has been there.
    pub dirty_age: Duration,
    /// Entries found when the log was opened.
    pub replayed: u64,
    /// Entries appended.
    pub appended: u64,
    /// Bytes of the volume they are about.
    pub appended_bytes: u64,
    /// Groups in which they were appended.
    pub groups: u64,
    /// Writes that went round the log.
    pub direct: u64,
    /// Bytes of these.
    pub direct_bytes: u64,
    /// Requests made to the backend in writing back.
    pub written_back: u64,
    /// Bytes of these.
    pub written_back_bytes: u64,
    /// Entries that never went to the backend, as later ones had overwritten them.
    pub overwritten: u64,
    /// Times that writing back failed and was tried again.
    pub backend_errors: u64,
    /// Bytes read from the log.
    pub hit_bytes: u64,
    /// Bytes read from the backend.
    pub miss_bytes: u64,
    /// Writes that were held back because the log was getting full.
    pub throttled: u64,
    /// Time they waited together, in nanoseconds.
    pub throttled_ns: u64,
    /// Barriers that began a new generation.
    pub generations: u64,
    /// Bytes of memory for records and index.
    pub index_memory: u64,
}

/// A group that is being appended.
pub(crate) struct Appending {
    pub(crate) number: u64,
    pub(crate) first_seq: u64,
    pub(crate) pieces: Vec<Placed>,
    pub(crate) done: Option<Result<(), Error>>,
}

/// A read that asks the backend: it must be made again when a part of it is written meanwhile.
pub(crate) struct MixedRead {
    pub(crate) extent: Extent,
    pub(crate) stale: bool,
}

/// Payloads in memory: those that were written last, and those that are not on the medium yet.
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

    /// Forgets the oldest ones before `before` until no more than `bytes` are kept.
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
    /// No more requests are taken; those that have begun end in order.
    pub(crate) ending: bool,
    /// The log's tasks end.
    pub(crate) closing: bool,
    /// Pieces that are to be appended.
    pub(crate) queue: VecDeque<Piece>,
    pub(crate) queue_bytes: u64,
    pub(crate) appending: VecDeque<Appending>,
    /// Changes under way: first byte, end.  None of them overlap.
    pub(crate) in_flight: BTreeMap<u64, u64>,
    /// Bytes of these, which will be dirty.
    pub(crate) in_flight_bytes: u64,
    pub(crate) entries: Entries,
    pub(crate) index: Index,
    /// Generations in the log with the number of their first entry.
    pub(crate) generations: VecDeque<(u64, u64)>,
    /// The generation of what is queued now.
    pub(crate) generation: u64,
    /// Something of it was queued or went round.
    pub(crate) generation_used: bool,
    /// Number of the next entry to be given to the medium.
    pub(crate) next_seq: u64,
    /// Entries before this one are on the medium.
    pub(crate) appended_seq: u64,
    /// `next_seq` when the queue was last dropped: what was queued then never gets a number.
    pub(crate) dropped_at: u64,
    /// Times that the queue was dropped.
    pub(crate) drops: u64,
    /// Entries before this one last on the medium, where writes are answered before they do.
    pub(crate) synced_seq: u64,
    /// The log is turning off, and the record says that it must never be replayed.
    pub(crate) released: bool,
    pub(crate) recent: Recent,
    pub(crate) mixed_reads: Vec<(u64, MixedRead)>,
    pub(crate) next_read: u64,
    /// Writes that went round the log and were answered before they last; and how many of these a flush of the backend
    /// has covered.
    pub(crate) direct_done: u64,
    pub(crate) direct_flushed: u64,
    pub(crate) direct_active: usize,
    /// The tail is being made durable so that writes may go round the log.
    pub(crate) persisting_tail: bool,
    /// Holders of [`ChangesPast`](crate::ChangesPast).
    pub(crate) past_active: usize,
    /// Where the last write ended: a long one that goes on there is sequential.
    pub(crate) last_end: u64,
    /// Somebody waits until the backend holds everything before this entry.
    pub(crate) wanted: u64,
    /// Cuts that are held: nothing from these entries on may be written back.
    pub(crate) holds: Vec<u64>,
    /// The appender has no room.
    pub(crate) starved: bool,
    /// Why the last attempt to write back failed.
    pub(crate) backend_error: Option<Error>,
    pub(crate) dirty_bytes: u64,
    /// When entries were published, every so often: number, time.
    pub(crate) ages: VecDeque<(u64, Instant)>,
    pub(crate) pressure: Pressure,
    /// Requests past any of these are refused: the volume is shrinking.
    pub(crate) size_limits: Vec<u64>,
    pub(crate) stats: LogStats,
}

/// Times of publication are kept so far apart.
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
            in_flight: BTreeMap::new(),
            in_flight_bytes: 0,
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
            // A process that was killed may have left writes at the backend that can be read and do not last: the first
            // flush goes there.
            direct_done: 1,
            direct_flushed: 0,
            direct_active: 0,
            persisting_tail: false,
            past_active: 0,
            last_end: u64::MAX,
            wanted: 0,
            holds: Vec::new(),
            starved: false,
            backend_error: None,
            dirty_bytes: 0,
            ages: VecDeque::new(),
            pressure: Pressure::default(),
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

    /// Adds an entry; `dead` gets those of its own generation that nobody needs any more.  `None` for one that does
    /// not last yet: a crash may undo it, and then those that it overwrote are needed.
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

    /// A run is being changed: reads that put its blocks together from two places look again.
    pub(crate) fn stale(&mut self, extent: Extent) {
        for (_, read) in &mut self.mixed_reads {
            read.stale |= read.extent.overlaps(extent);
        }
    }

    /// Takes out the oldest entries before `tail`; those with a payload of their own go to `gone`.
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

    /// The generation of an entry.
    pub(crate) fn generation_of(&self, seq: u64) -> u64 {
        let after = self.generations.partition_point(|&(_, first)| first <= seq);
        after.checked_sub(1).map_or(0, |at| self.generations[at].0)
    }

    /// Nothing from this entry on may be written back: a cut is held.
    pub(crate) fn hold(&self) -> Option<u64> {
        self.holds.iter().min().copied()
    }

    /// Whatever went round or past the log and was answered lasts.
    pub(crate) fn direct_lasts(&self) -> bool {
        self.past_active == 0 && self.direct_done == self.direct_flushed
    }

    /// How long the oldest entry has been there.
    pub(crate) fn age(&self) -> Duration {
        self.ages.front().map_or(Duration::ZERO, |&(_, at)| at.elapsed())
    }

    /// Takes a run for oneself; false while another change overlaps it.
    pub(crate) fn enter(&mut self, extent: Extent) -> bool {
        let before = self.in_flight.range(..extent.end()).next_back();
        if before.is_some_and(|(_, &end)| end > extent.offset) {
            return false;
        }
        self.in_flight.insert(extent.offset, extent.end());
        self.in_flight_bytes += extent.len;
        true
    }

    /// Gives it back.
    pub(crate) fn leave(&mut self, extent: Extent) {
        if let Some(end) = self.in_flight.remove(&extent.offset) {
            self.in_flight_bytes -= end - extent.offset;
        }
    }

    /// From now on what is queued belongs to a new generation.
    pub(crate) fn barrier(&mut self) {
        if self.generation_used {
            self.generation += 1;
            self.generation_used = false;
            self.stats.generations += 1;
        }
    }

    /// Takes everything out of the queue: none of it will be appended.
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

    /// How full the log is, 0 to 1, of what it may take.
    pub(crate) fn fill(&self, medium: &dyn Medium, dirty_max: u64, queue_max: u64) -> f64 {
        let capacity = medium.capacity().max(1) as f64;
        let used = (medium.used() + self.queue_bytes) as f64 / capacity;
        let dirty = (self.dirty_bytes + self.in_flight_bytes) as f64 / dirty_max.max(1) as f64;
        let queue = self.queue_bytes as f64 / queue_max as f64;
        used.max(dirty).max(queue).min(1.0)
    }
}
