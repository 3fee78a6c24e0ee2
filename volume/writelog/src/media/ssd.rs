//! Log on a file or block device: a ring of append blocks, each a header, entries and payloads in one direct write.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{File, spawn};

use super::later::{Ring, WINDOW};
use super::{AppendGroup, AppendPiece, Medium, Placed, Recovered, check_generations, corrupt, now_ms};
use crate::entries::LogEntry;
use crate::format::{
    AREA_AT, BLOCK_ENTRIES_MAX, BLOCK_LEN_MAX, BlockHeader, ENTRY_LEN, LogSuperblock, SUPER_COPIES, tag_of,
};

/// Minimum distance of tail marks, in entries: bounds their memory relative to that of the entries.
const MARK_EVERY: u64 = 16;

/// Maximum bytes per combined read, and maximum gap between two payloads read together: a block's header, or
/// superseded data.
const SPAN_MAX: u64 = 256 << 10;
const GAP_MAX: u64 = 8 << 10;

/// Block where the tail may be.
#[derive(Debug, Clone, Copy)]
struct Mark {
    number: u64,
    pos: u64,
    first_seq: u64,
}

/// Block not known to be durable.
struct Started {
    number: u64,
    done: bool,
}

struct State {
    /// Position of the next block, in units since the log's creation.
    head_pos: u64,
    next_block: u64,
    next_seq: u64,
    /// Number before which all blocks are durable.
    durable_block: u64,
    started: VecDeque<Started>,
    marks: VecDeque<Mark>,
    tail_seq: u64,
    tail_pos: u64,
    tail_block: u64,
    /// Lower bound of the first entry that a recovery replays, by copy of the superblock.
    persisted_seqs: [u64; 2],
    /// Position at which recovery begins, according to the newer copy of the superblock.
    persisted_pos: u64,
    /// Positions of payloads being read, with the number of readers, to keep them from being overwritten.
    reads: BTreeMap<u64, usize>,
    superblock: LogSuperblock,
}

impl State {
    fn free_pos(&self) -> u64 {
        self.reads.keys().next().map_or(self.persisted_pos, |&read| read.min(self.persisted_pos))
    }

    /// Records that completed blocks before `number` are durable.
    fn durable(&mut self, number: u64) {
        while let Some(block) = self.started.front().filter(|block| block.number < number && block.done) {
            self.durable_block = block.number + 1;
            self.started.pop_front();
        }
    }

    fn find_tail(&mut self) {
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

    fn mark(&mut self, mark: Mark) {
        if self.marks.back().is_none_or(|last| mark.first_seq - last.first_seq >= MARK_EVERY) {
            self.marks.push_back(mark);
        }
    }
}

/// Log on a file or block device.
pub(crate) struct Ssd {
    file: File,
    /// Byte offset of the log on the file.
    base: u64,
    unit: u32,
    /// Length of the ring in units.
    ring: u64,
    tag: u32,
    run: u32,
    state: Rc<RefCell<State>>,
    /// Signaled when there may be more space.
    room: Rc<Notify>,
    /// Serializes writes of the superblock.
    turn: Semaphore,
    /// Copy that the next superblock is written to.
    copy: Rc<Cell<usize>>,
}

/// Guard that keeps a payload from being overwritten while it is read.
struct Pin {
    state: Rc<RefCell<State>>,
    room: Rc<Notify>,
    pos: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.state.borrow_mut();
        if let Some(count) = state.reads.get_mut(&self.pos) {
            *count -= 1;
            if *count == 0 {
                state.reads.remove(&self.pos);
            }
        }
        drop(state);
        self.room.notify_all();
    }
}

/// Combined read of several payloads, started when the first of them is polled.
struct Span {
    file: File,
    offset: u64,
    len: usize,
    begun: Cell<bool>,
    result: RefCell<Option<Result<Buf>>>,
    ended: Notify,
    _pin: Pin,
}

impl Span {
    async fn get(self: &Rc<Self>) -> Result<Buf> {
        if !self.begun.replace(true) {
            // The caller that started the read may be dropped.
            let span = self.clone();
            drop(spawn(async move {
                let read = span.file.read_exact_at(span.offset, span.len).await;
                let read = read.map(BufMut::freeze).map_err(|error| io(error, "reading payloads"));
                *span.result.borrow_mut() = Some(read);
                span.ended.notify_all();
            }));
        }
        self.ended.wait_until(|| self.result.borrow().is_some()).await;
        let result = self.result.borrow();
        result.clone().unwrap_or_else(|| Err(Error::from(ErrorKind::Io)))
    }
}

/// Returns the length of the ring of a log of `size` bytes, in units.
pub(crate) fn ring_units(size: u64, unit: u32) -> u64 {
    (size - AREA_AT) / u64::from(unit)
}

fn io(error: std::io::Error, what: &str) -> Error {
    Error::from_io(error, format!("the write log: {what}"))
}

impl Ssd {
    /// Reads the contents of the log at `base`, as far as they are valid, without changes.
    ///
    /// Blocks of the run after the one in the superblock are accepted too: its newer copy may have been lost. With
    /// `one_lost`, a copy is known to be damaged; the whole ring is then searched for proof that it was the newer one
    /// and that the ring has overwritten what this one refers to.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if a block is missing that is known to have been durable.
    pub(crate) async fn scan(file: &File, base: u64, superblock: &LogSuperblock, one_lost: bool) -> Result<ScanResult> {
        let (unit, tag) = (superblock.unit, tag_of(&superblock.log));
        let ring = ring_units(superblock.size, unit);
        let mut found = ScanResult {
            entries: Vec::new(),
            tail_seq: superblock.tail_seq,
            head_pos: superblock.tail_pos,
            next_block: superblock.tail_block,
            next_seq: superblock.tail_seq,
            run: superblock.run,
            marks: VecDeque::new(),
            durable: superblock.head_block,
        };
        let at = |pos: u64| base + AREA_AT + pos % ring * u64::from(unit);
        let mut first = true;
        let mut run = 0;
        let mut blocks: Vec<(BlockHeader, Vec<crate::format::EntryRecord>)> = Vec::new();
        loop {
            // The next block is at the end of the last one or, if it did not fit there, at the start of the ring.
            // Both may hold one: the former was torn, and a block of the next run did not fit over it. The higher run
            // is the valid one.
            let wrapped = found.head_pos.next_multiple_of(ring);
            let mut next: Option<(BlockHeader, Vec<crate::format::EntryRecord>)> = None;
            for pos in [found.head_pos, wrapped] {
                if pos - superblock.tail_pos >= ring {
                    continue;
                }
                let head = file.read_exact_at(at(pos), unit as usize).await.map_err(|e| io(e, "reading a block"))?;
                let Some(header) = BlockHeader::peek(&head, tag, unit) else { continue };
                let expected = (header.number, header.pos) == (found.next_block, pos)
                    && header.run >= run
                    && header.run <= superblock.run + 1
                    && (first && header.first_seq <= superblock.tail_seq || header.first_seq == found.next_seq);
                let newer = next.as_ref().is_none_or(|(other, _)| header.run > other.run);
                if !expected || !newer || pos % ring + u64::from(header.head_units(unit)) > ring {
                    continue;
                }
                let len = header.head_units(unit) as usize * unit as usize;
                let head = match len > head.len() {
                    true => file.read_exact_at(at(pos), len).await.map_err(|e| io(e, "reading a block"))?,
                    false => head,
                };
                if let Ok(entries) = header.entries(&head, tag, unit, ring) {
                    next = Some((header, entries));
                }
            }
            let Some((header, entries)) = next else { break };
            if header.pos + u64::from(header.units) - superblock.tail_pos > ring {
                break;
            }
            (first, run) = (false, header.run);
            found.head_pos = header.pos + u64::from(header.units);
            found.next_block = header.number + 1;
            found.next_seq = header.first_seq + u64::from(header.count);
            found.durable = found.durable.max(header.durable_before());
            blocks.push((header, entries));
        }
        found.check_payloads(file, base, unit, &mut blocks, ring).await?;
        let later = Ring { file, base, unit, units: ring, tag };
        let searched = if one_lost { ring } else { (WINDOW / u64::from(unit)).min(ring) };
        found.durable = found.durable.max(later.durable_before(found.head_pos, searched).await?);
        if found.next_block < found.durable {
            return Err(corrupt(format_args!(
                "block {} should be there and is not; what came after it, up to block {}, is lost",
                found.next_block, found.durable
            )));
        }
        check_generations(blocks.iter().flat_map(|(_, entries)| entries))?;
        for (header, entries) in blocks {
            found.run = found.run.max(header.run);
            found.tail_seq = found.tail_seq.max(header.tail_seq.min(found.next_seq));
            let mark = Mark { number: header.number, pos: header.pos, first_seq: header.first_seq };
            found.marks.push_back(mark);
            found.entries.extend(entries);
        }
        let tail = found.tail_seq;
        found.entries.retain(|entry| entry.seq >= tail);
        Ok(found)
    }

    /// Resumes a log that was scanned. `superblock`, equal to copy `copy` except for the run, must be written by
    /// [`persist_tail`](Medium::persist_tail) before any append.
    pub(crate) fn resume(
        file: File,
        base: u64,
        superblock: LogSuperblock,
        copy: usize,
        found: ScanResult,
        room: Rc<Notify>,
    ) -> (Self, Recovered) {
        let (unit, tag, run) = (superblock.unit, tag_of(&superblock.log), superblock.run);
        let ring = ring_units(superblock.size, unit);
        let ScanResult { entries, tail_seq, head_pos, next_block, next_seq, marks, .. } = found;
        let mut state = State {
            head_pos,
            next_block,
            next_seq: tail_seq.max(next_seq),
            durable_block: next_block,
            started: VecDeque::new(),
            marks: VecDeque::new(),
            tail_seq,
            tail_pos: superblock.tail_pos,
            tail_block: superblock.tail_block,
            persisted_seqs: [0; 2],
            persisted_pos: superblock.tail_pos,
            reads: BTreeMap::new(),
            superblock,
        };
        state.persisted_seqs[copy] = state.superblock.tail_seq;
        marks.into_iter().for_each(|mark| state.mark(mark));
        state.find_tail();
        let log = Self {
            file,
            base,
            unit,
            ring,
            tag,
            run,
            state: Rc::new(RefCell::new(state)),
            room,
            turn: Semaphore::new(1),
            copy: Rc::new(Cell::new(1 - copy)),
        };
        (log, Recovered { entries, tail_seq })
    }

    /// Returns the position of an entry's payload, in units since the log's creation: its place at or after the first
    /// position that is not free.
    fn pos_of(&self, entry: &LogEntry) -> u64 {
        let free = self.state.borrow().free_pos();
        free + (u64::from(entry.place) + self.ring - free % self.ring) % self.ring
    }

    /// Protects a position from being overwritten.
    fn pin(&self, pos: u64) -> Pin {
        *self.state.borrow_mut().reads.entry(pos).or_insert(0) += 1;
        Pin { state: self.state.clone(), room: self.room.clone(), pos }
    }

    fn units_of(&self, len: usize) -> u64 {
        (len as u64).div_ceil(u64::from(self.unit))
    }

    /// Returns the number of pieces at the front of the queue that form a block of at most `room` units, and its
    /// units.
    fn fit(&self, queue: &VecDeque<AppendPiece>, room: u64) -> Option<(usize, u64)> {
        let longest = BLOCK_LEN_MAX / u64::from(self.unit);
        let (mut best, mut payload) = (None, 0);
        for (count, piece) in (1..=BLOCK_ENTRIES_MAX).zip(queue) {
            payload += self.units_of(piece.payload.len());
            let units = self.units_of(ENTRY_LEN * (1 + count)) + payload;
            if units > room || (count > 1 && units > longest) {
                break;
            }
            best = Some((count, units));
        }
        best
    }
}

/// Result of a scan.
pub(crate) struct ScanResult {
    pub(crate) entries: Vec<crate::format::EntryRecord>,
    pub(crate) tail_seq: u64,
    head_pos: u64,
    next_block: u64,
    pub(crate) next_seq: u64,
    /// Last known run.
    pub(crate) run: u32,
    marks: VecDeque<Mark>,
    /// Number before which all blocks were durable.
    durable: u64,
}

impl ScanResult {
    /// Blocks not known to be durable may be torn: the log ends at the first one with a payload that fails its
    /// checksum.
    async fn check_payloads(
        &mut self,
        file: &File,
        base: u64,
        unit: u32,
        blocks: &mut Vec<(BlockHeader, Vec<crate::format::EntryRecord>)>,
        ring: u64,
    ) -> Result<()> {
        let from = blocks.partition_point(|(header, _)| header.number < self.durable);
        for at in from..blocks.len() {
            let (header, entries) = &blocks[at];
            let head = u64::from(header.head_units(unit));
            let len = (u64::from(header.units) - head) * u64::from(unit);
            let offset = base + AREA_AT + (header.pos % ring + head) * u64::from(unit);
            let payloads = match len {
                0 => BufMut::with_capacity(0),
                _ => file.read_exact_at(offset, len as usize).await.map_err(|e| io(e, "reading payloads"))?,
            };
            let mut place = 0;
            let whole = entries.iter().all(|entry| {
                let len = crate::entries::payload_len(entry.kind, entry.extent.len as u32) as usize;
                let right = crc32c(&payloads[place..place + len]) == entry.crc;
                place += len.next_multiple_of(unit as usize);
                right
            });
            if !whole {
                let (header, _) = &blocks[at];
                (self.head_pos, self.next_block) = (header.pos, header.number);
                self.next_seq = header.first_seq;
                blocks.truncate(at);
                break;
            }
        }
        self.next_seq = self.next_seq.max(self.tail_seq);
        Ok(())
    }
}

impl Medium for Ssd {
    fn capacity(&self) -> u64 {
        self.ring * u64::from(self.unit)
    }

    fn used(&self) -> u64 {
        let state = self.state.borrow();
        (state.head_pos - state.free_pos()) * u64::from(self.unit)
    }

    fn take(&self, queue: &mut VecDeque<AppendPiece>, first_seq: u64, durable: bool) -> Option<AppendGroup> {
        let mut state = self.state.borrow_mut();
        let free = self.ring - (state.head_pos - state.free_pos());
        let left = self.ring - state.head_pos % self.ring;
        let mut fits = self.fit(queue, free.min(left)).map(|fit| (state.head_pos, fit));
        if fits.is_none() && free > left {
            // Does not fit before the end of the ring: place it at the start.
            fits = self.fit(queue, free - left).map(|fit| (state.head_pos + left, fit));
        }
        let (pos, (count, units)) = fits?;
        let header = BlockHeader {
            run: self.run,
            count: count as u16,
            behind: BlockHeader::behind_of(state.next_block - state.durable_block),
            number: state.next_block,
            pos,
            first_seq,
            tail_pos: state.tail_pos,
            tail_seq: state.tail_seq,
            units: units as u32,
        };
        let mut place = (pos % self.ring) as u32 + header.head_units(self.unit);
        let mut pieces = Vec::with_capacity(count);
        for piece in queue.drain(..count) {
            let units = self.units_of(piece.payload.len()) as u32;
            pieces.push(Placed::new(piece, if units > 0 { place } else { 0 }));
            place += units;
        }
        let time_ms = now_ms();
        let records: Vec<_> = (first_seq..).zip(&pieces).map(|(seq, placed)| placed.record(seq, time_ms)).collect();
        let unit = self.unit as usize;
        let mut head = BufMut::zeroed(header.head_units(self.unit) as usize * unit);
        header.encode(self.tag, &records, &mut head);
        let mut bufs = BufList::from(head);
        for Placed { piece, .. } in &pieces {
            if piece.payload.parts().iter().all(|part| part.is_aligned(unit)) {
                bufs.append(piece.payload.clone());
            } else {
                let mut copy = BufMut::zeroed(piece.payload.len().next_multiple_of(unit));
                piece.payload.copy_to(&mut copy[..piece.payload.len()]);
                bufs.push(copy.freeze());
            }
        }
        state.head_pos = pos + units;
        state.next_block += 1;
        state.next_seq = first_seq + count as u64;
        state.mark(Mark { number: header.number, pos, first_seq });
        state.started.push_back(Started { number: header.number, done: false });
        let (file, offset) = (self.file.clone(), self.base + AREA_AT + pos % self.ring * u64::from(self.unit));
        let work = async move {
            let written = match durable {
                true => file.write_durable_at(bufs, offset).await,
                false => file.write_at(bufs, offset).await,
            };
            written.map_err(|error| io(error, "appending"))
        };
        Some(AppendGroup {
            first_seq,
            number: header.number << 1 | u64::from(durable),
            pieces,
            work: Some(Box::pin(work)),
        })
    }

    fn finished(&self, group: u64) {
        let (number, durable) = (group >> 1, group & 1 == 1);
        let mut state = self.state.borrow_mut();
        if let Some(block) = state.started.iter_mut().find(|block| block.number == number) {
            block.done = true;
        }
        if durable {
            state.durable(number + 1);
        }
        drop(state);
        self.room.notify_all();
    }

    fn read(&self, entry: &LogEntry) -> LocalFuture<Result<Buf>> {
        let (file, entry) = (self.file.clone(), *entry);
        let pin = self.pin(self.pos_of(&entry));
        let offset = self.base + AREA_AT + u64::from(entry.place) * u64::from(self.unit);
        let len = entry.payload_len() as usize;
        let whole = len.next_multiple_of(self.unit as usize);
        Box::pin(async move {
            let _pin = pin;
            let read = file.read_exact_at(offset, whole).await;
            let data = read.map_err(|error| io(error, "reading a payload"))?.freeze().slice(0..len);
            verify(&entry, &data)?;
            Ok(data)
        })
    }

    fn read_many(&self, entries: &[LogEntry]) -> Vec<LocalFuture<Result<Buf>>> {
        let unit = u64::from(self.unit);
        let mut places: Vec<(u64, usize)> = (0..).zip(entries).map(|(at, entry)| (self.pos_of(entry), at)).collect();
        places.sort_unstable();
        let mut reads: Vec<Option<LocalFuture<Result<Buf>>>> = entries.iter().map(|_| None).collect();
        let mut from = 0;
        while from < places.len() {
            let start = places[from].0;
            let (mut to, mut end) = (from, start);
            while let Some(&(pos, at)) = places.get(to) {
                let after = end.max(pos + self.units_of(entries[at].payload_len() as usize));
                let near = pos <= end + GAP_MAX / unit && (after - start) * unit <= SPAN_MAX;
                // Reads must not wrap around the end of the ring.
                let same_lap = pos / self.ring == start / self.ring;
                if to > from && !(near && same_lap) {
                    break;
                }
                (to, end) = (to + 1, after);
            }
            let span = Rc::new(Span {
                file: self.file.clone(),
                offset: self.base + AREA_AT + start % self.ring * unit,
                len: ((end - start) * unit) as usize,
                begun: Cell::new(false),
                result: RefCell::new(None),
                ended: Notify::new(),
                _pin: self.pin(start),
            });
            for &(pos, at) in &places[from..to] {
                let (span, entry, skip) = (span.clone(), entries[at], ((pos - start) * unit) as usize);
                reads[at] = Some(Box::pin(async move {
                    let data = span.get().await?.slice(skip..skip + entry.payload_len() as usize);
                    verify(&entry, &data)?;
                    Ok(data)
                }));
            }
            from = to;
        }
        reads.into_iter().flatten().collect()
    }

    fn superseded(&self, _entry: &LogEntry) {}

    fn retire(&self, tail_seq: u64, _gone: &[LogEntry]) {
        let mut state = self.state.borrow_mut();
        state.tail_seq = tail_seq;
        state.find_tail();
    }

    fn persisted_tail(&self) -> u64 {
        let [one, other] = self.state.borrow().persisted_seqs;
        one.min(other)
    }

    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>> {
        let (state, room, turn) = (self.state.clone(), self.room.clone(), self.turn.clone());
        let (file, base, copy) = (self.file.clone(), self.base, self.copy.clone());
        Box::pin(async move {
            let _turn = turn.acquire(1).await;
            let (bytes, seq, pos) = {
                let mut state = state.borrow_mut();
                let (seq, pos, block) = (state.tail_seq, state.tail_pos, state.tail_block);
                let head_block = state.durable_block.max(block);
                let superblock = &mut state.superblock;
                superblock.serial += 1;
                (superblock.tail_seq, superblock.tail_pos, superblock.tail_block) = (seq, pos, block);
                superblock.head_block = head_block;
                superblock.clean = clean;
                (superblock.encode(), seq, pos)
            };
            let offset = base + SUPER_COPIES[copy.get()];
            let written = file.write_durable_at(Buf::copy_of(&bytes), offset).await;
            written.map_err(|error| io(error, "writing the superblock"))?;
            // A failed write may have torn this copy, so it is rewritten before the other.
            let written = copy.replace(1 - copy.get());
            let mut state = state.borrow_mut();
            state.persisted_seqs[written] = seq;
            state.persisted_pos = state.persisted_pos.max(pos);
            drop(state);
            room.notify_all();
            Ok(())
        })
    }

    fn sync(&self) -> LocalFuture<Result<()>> {
        let (file, state, room) = (self.file.clone(), self.state.clone(), self.room.clone());
        Box::pin(async move {
            let done = {
                let state = state.borrow();
                state.started.iter().take_while(|block| block.done).last().map(|block| block.number + 1)
            };
            file.sync_data().await.map_err(|error| io(error, "syncing"))?;
            if let Some(done) = done {
                state.borrow_mut().durable(done);
                room.notify_all();
            }
            Ok(())
        })
    }
}

/// Verifies the checksum of a payload.
pub(crate) fn verify(entry: &LogEntry, data: &[u8]) -> Result<()> {
    if crc32c(data) == entry.crc {
        return Ok(());
    }
    let extent = entry.extent();
    let text = format!("the write log's payload for {} bytes at {}", extent.len, extent.offset);
    Err(Error::new(ErrorKind::Corrupt, text))
}
