//! Log of append blocks: a ring of blocks, each a header, entries and payloads in one write. Logs on files and block devices
//! have this layout, and so have logs in persistent memory that have members.

mod aligned;
mod copy;
mod payload_read;
mod ring;
mod scan;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::sync::{Notify, Semaphore};

use self::aligned::AlignedBuffers;
use self::payload_read::{PayloadSpan, Pin};
use self::ring::{Mark, RingState, StartedBlock};
pub(crate) use self::scan::ScanResult;
use super::storage::BlockStorage;
use super::{AppendGroup, AppendPiece, Medium, Placed, Recovered, now_ms};
use crate::cipher::PayloadCipher;
use crate::entries::LogEntry;
use crate::format::{
    AREA_AT, BLOCK_ENTRIES_MAX, BLOCK_LEN_MAX, BlockHeader, ENTRY_LEN, LogSuperblock, SUPER_COPIES, tag_of,
};
use crate::replication::LogShape;

/// Maximum bytes per combined read, and maximum gap between two payloads read together: a block's header, or
/// superseded data.
const SPAN_MAX: u64 = 256 << 10;
const GAP_MAX: u64 = 8 << 10;

/// Log of append blocks.
pub(crate) struct Ssd {
    storage: BlockStorage,
    /// Byte offset of the log in its storage.
    base: u64,
    unit: u32,
    /// Length of the ring in units.
    ring: u64,
    tag: u32,
    /// Run of the blocks that are appended.
    run: Cell<u32>,
    /// Cipher of the payloads that are appended.
    cipher: RefCell<Option<Rc<PayloadCipher>>>,
    /// Entries that were found when the log was opened.
    shape: LogShape,
    state: Rc<RefCell<RingState>>,
    /// Signaled when there may be more space.
    room: Rc<Notify>,
    /// Serializes writes of the superblock.
    turn: Semaphore,
    /// Copy that the next superblock is written to.
    copy: Rc<Cell<usize>>,
    aligned: AlignedBuffers,
}

/// Returns the length of the ring of a log of `size` bytes, in units.
pub(crate) fn ring_units(size: u64, unit: u32) -> u64 {
    (size - AREA_AT) / u64::from(unit)
}

fn io(error: std::io::Error, what: &str) -> Error {
    Error::from_io(error, format!("the write log: {what}"))
}

impl Ssd {
    /// Resumes a log that was scanned. `superblock`, equal to copy `copy` except for the run, must be written by
    /// [`persist_tail`](Medium::persist_tail) before any append.
    pub(crate) fn resume(
        storage: BlockStorage,
        base: u64,
        superblock: LogSuperblock,
        copy: usize,
        found: ScanResult,
        room: Rc<Notify>,
    ) -> (Self, Recovered) {
        let (unit, tag, run) = (superblock.unit, tag_of(&superblock.log), superblock.run);
        let ring = ring_units(superblock.size, unit);
        let ScanResult { entries, tail_seq, head_pos, next_block, next_seq, marks, shape, .. } = found;
        let mut state = RingState {
            head_pos,
            next_block,
            next_seq: tail_seq.max(next_seq),
            durable_block: next_block,
            durable_seq: tail_seq.max(next_seq),
            started: VecDeque::new(),
            marks: VecDeque::new(),
            tail_seq,
            tail_pos: superblock.tail_pos,
            tail_block: superblock.tail_block,
            persisted_seqs: [0; 2],
            persisted_pos: superblock.tail_pos,
            held_pos: u64::MAX,
            failed: false,
            reads: BTreeMap::new(),
            superblock,
        };
        state.persisted_seqs[copy] = state.superblock.tail_seq;
        marks.into_iter().for_each(|mark| state.mark(mark));
        state.find_tail();
        let log = Self {
            storage,
            base,
            unit,
            ring,
            tag,
            run: Cell::new(run),
            cipher: RefCell::default(),
            shape,
            state: Rc::new(RefCell::new(state)),
            room,
            turn: Semaphore::new(1),
            copy: Rc::new(Cell::new(1 - copy)),
            aligned: AlignedBuffers::new(),
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

    /// Returns whether the payloads of the log are encrypted.
    fn is_encrypted(&self) -> bool {
        self.state.borrow().superblock.encryption.is_some()
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
            run: self.run.get(),
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
        let cipher = self.cipher.borrow();
        let (cipher, unit) = (cipher.as_deref(), self.unit as usize);
        let mut pieces = Vec::with_capacity(count);
        for (seq, piece) in (first_seq..).zip(queue.drain(..count)) {
            let units = self.units_of(piece.payload.len()) as u32;
            pieces.push(Placed::new(piece, if units > 0 { place } else { 0 }, seq, unit, cipher));
            place += units;
        }
        let has_members = state.superblock.copy.is_some();
        let (time_ms, term) = (now_ms(), if has_members { self.run.get() } else { 0 });
        let records: Vec<_> =
            (first_seq..).zip(&pieces).map(|(seq, placed)| placed.record(seq, time_ms, term, cipher)).collect();
        let mut head = BufMut::zeroed(header.head_units(self.unit) as usize * unit);
        header.encode(self.tag, &records, &mut head);
        let mut bufs = BufList::from(head);
        for payload in pieces.iter().map(Placed::stored) {
            if payload.parts().iter().all(|part| self.storage.takes(part, unit)) {
                bufs.append(payload.clone());
            } else {
                let mut copy = BufMut::zeroed(payload.len().next_multiple_of(unit));
                payload.copy_to(&mut copy[..payload.len()]);
                bufs.push(copy.freeze());
            }
        }
        state.head_pos = pos + units;
        state.next_block += 1;
        state.next_seq = first_seq + count as u64;
        state.mark(Mark { number: header.number, pos, first_seq });
        let end_seq = state.next_seq;
        state.started.push_back(StartedBlock { number: header.number, end_seq, done: false, durable: false });
        let (storage, offset) = (self.storage.clone(), self.base + AREA_AT + pos % self.ring * u64::from(self.unit));
        let raw = has_members.then(|| copy::raw_append(&header, bufs.clone()));
        let work = async move {
            let written = match durable {
                true => storage.write_durable_at(bufs, offset).await,
                false => storage.write_at(bufs, offset).await,
            };
            written.map_err(|error| io(error, "appending"))
        };
        Some(AppendGroup {
            first_seq,
            number: header.number << 1 | u64::from(durable),
            pieces,
            work: Some(Box::pin(work)),
            raw,
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

    fn encrypt_with(&self, cipher: Rc<PayloadCipher>) {
        debug_assert_eq!(cipher.run(), self.run.get());
        self.cipher.replace(Some(cipher));
    }

    fn read(&self, entry: &LogEntry) -> LocalFuture<Result<Buf>> {
        let (storage, entry) = (self.storage.clone(), *entry);
        let pin = self.pin(self.pos_of(&entry));
        let offset = self.base + AREA_AT + u64::from(entry.place) * u64::from(self.unit);
        let len = entry.stored_len(self.is_encrypted()) as usize;
        let whole = len.next_multiple_of(self.unit as usize);
        Box::pin(async move {
            let _pin = pin;
            let read = storage.read_exact_at(offset, whole).await;
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
            let span = Rc::new(PayloadSpan {
                storage: self.storage.clone(),
                offset: self.base + AREA_AT + start % self.ring * unit,
                len: ((end - start) * unit) as usize,
                begun: Cell::new(false),
                result: RefCell::new(None),
                ended: Notify::new(),
                _pin: self.pin(start),
            });
            for &(pos, at) in &places[from..to] {
                let (span, entry, skip) = (span.clone(), entries[at], ((pos - start) * unit) as usize);
                let len = entry.stored_len(self.is_encrypted()) as usize;
                reads[at] = Some(Box::pin(async move {
                    let data = span.get().await?.slice(skip..skip + len);
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
        // A copy may be ahead of what its primary asks for: it began again at the tail that the primary has in memory, or has
        // retired more for a former one. The place of an earlier tail is forgotten.
        state.tail_seq = state.tail_seq.max(tail_seq);
        state.find_tail();
    }

    fn persisted_tail(&self) -> u64 {
        let [one, other] = self.state.borrow().persisted_seqs;
        one.min(other)
    }

    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>> {
        let (state, room, turn) = (self.state.clone(), self.room.clone(), self.turn.clone());
        let (storage, base, copy) = (self.storage.clone(), self.base, self.copy.clone());
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
            let written = storage.write_durable_at(Buf::copy_of(&bytes), offset).await;
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
        let (storage, state, room) = (self.storage.clone(), self.state.clone(), self.room.clone());
        Box::pin(async move {
            // Also those behind one that is still being written: nobody may sync again after that.
            let done: Vec<u64> = {
                let state = state.borrow();
                let written = state.started.iter().filter(|block| block.done && !block.durable);
                written.map(|block| block.number).collect()
            };
            storage.sync_data().await.map_err(|error| io(error, "syncing"))?;
            if !done.is_empty() {
                let mut state = state.borrow_mut();
                let synced = |block: &&mut StartedBlock| done.binary_search(&block.number).is_ok();
                state.started.iter_mut().filter(synced).for_each(|block| block.durable = true);
                state.durable(0);
                drop(state);
                room.notify_all();
            }
            Ok(())
        })
    }
}

/// Verifies the checksum of a payload, as it is stored.
pub(crate) fn verify(entry: &LogEntry, data: &[u8]) -> Result<()> {
    if crc32c(data) == entry.crc {
        return Ok(());
    }
    let extent = entry.extent();
    let text = format!("the write log's payload for {} bytes at {}", extent.len, extent.offset);
    Err(Error::new(ErrorKind::Corrupt, text))
}
