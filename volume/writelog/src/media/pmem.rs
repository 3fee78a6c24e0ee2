//! Log in persistent memory that has no members: a ring of 64-byte entries that refer to buffers of any size.
//!
//! A group is appended in two steps: payloads and entries, a fence; the head word, a fence. Storing the head word
//! publishes the entries and their buffers, and frees the buffers of superseded entries: these follow from the
//! entries, so that one atomic store of eight bytes does both.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::ready;
use std::rc::Rc;

use forebay_block::{Buf, BufMut, LocalFuture, Result};
use forebay_reactor::pmem::PersistentMemory;
use forebay_reactor::sync::Notify;

use super::ssd::verify;
use super::{AppendGroup, AppendPiece, Medium, Placed, Recovered, check_generations, corrupt, now_ms};
use crate::cipher::PayloadCipher;
use crate::entries::LogEntry;
use crate::format::{
    AREA_AT, BLOCK_ENTRIES_MAX, ENTRY_LEN, EntryRecord, HEAD_AT, LogSuperblock, PMEM_UNIT, SUPER_COPIES, TAIL_AT,
    buffers_at, decode_word, encode_word, tag_of,
};
use crate::superseded::superseded_entries;

/// Allocation unit of buffers in bytes: a cache line.
pub(crate) const LINE: u64 = PMEM_UNIT as u64;
/// Bytes of buffers per entry of the ring.
const BYTES_PER_SLOT: u64 = 1024;

/// Returns the number of ring entries of a log of `size` bytes.
pub(crate) fn slots(size: u64) -> u64 {
    (size - AREA_AT) / (BYTES_PER_SLOT + ENTRY_LEN as u64)
}

/// Next-fit allocator of lines: a log is mostly freed in the order in which it was written.
#[derive(Debug)]
pub(crate) struct LineAllocator {
    /// Free runs, start line to length in lines, with adjacent runs merged.
    free: BTreeMap<u32, u32>,
    next: u32,
    free_lines: u64,
}

impl LineAllocator {
    pub(crate) fn new(lines: u32) -> Self {
        Self { free: [(0, lines)].into(), next: 0, free_lines: u64::from(lines) }
    }

    pub(crate) fn free_lines(&self) -> u64 {
        self.free_lines
    }

    /// Allocates a run; `None` if no free run is long enough.
    pub(crate) fn take(&mut self, lines: u32) -> Option<u32> {
        let fits = |(&start, &len): (&u32, &u32)| (len >= lines).then_some((start, len));
        // The rest of the run used last begins at `next`.
        let after = self.free.range(self.next..).find_map(fits);
        let (start, len) = after.or_else(|| self.free.range(..self.next).find_map(fits))?;
        self.free.remove(&start);
        if len > lines {
            self.free.insert(start + lines, len - lines);
        }
        self.next = start + lines;
        self.free_lines -= u64::from(lines);
        Some(start)
    }

    /// Allocates this exact run; returns false if any part of it is in use.
    pub(crate) fn take_at(&mut self, start: u32, lines: u32) -> bool {
        let Some((&first, &len)) = self.free.range(..=start).next_back() else { return false };
        let (end, free_end) = (u64::from(start) + u64::from(lines), u64::from(first) + u64::from(len));
        if end > free_end {
            return false;
        }
        self.free.remove(&first);
        if start > first {
            self.free.insert(first, start - first);
        }
        if free_end > end {
            self.free.insert(end as u32, (free_end - end) as u32);
        }
        self.free_lines -= u64::from(lines);
        true
    }

    /// Frees a run.
    pub(crate) fn give(&mut self, start: u32, lines: u32) {
        self.free_lines += u64::from(lines);
        let (mut first, mut len) = (start, lines);
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.free.remove(&before);
            (first, len) = (before, before_len + len);
        }
        if let Some(after) = self.free.remove(&(start + lines)) {
            len += after;
        }
        self.free.insert(first, len);
    }
}

fn lines_of(len: u32) -> u32 {
    len.div_ceil(LINE as u32)
}

/// Buffers of a log: free space, and buffers being read.
struct Buffers {
    space: LineAllocator,
    /// Readers by first line of a buffer, and the lines to free after the last reader.
    read: BTreeMap<u32, (usize, u32)>,
}

impl Buffers {
    /// Frees a buffer, or defers that until its last reader is done.
    fn give(&mut self, start: u32, lines: u32) {
        match self.read.get_mut(&start) {
            Some((_, given)) => *given = lines,
            None => self.space.give(start, lines),
        }
    }
}

/// Guard that keeps a buffer from being reused while it is read.
struct Pin {
    buffers: Rc<RefCell<Buffers>>,
    room: Rc<Notify>,
    start: u32,
}

impl Pin {
    fn new(buffers: &Rc<RefCell<Buffers>>, room: &Rc<Notify>, start: u32) -> Self {
        buffers.borrow_mut().read.entry(start).or_default().0 += 1;
        Self { buffers: buffers.clone(), room: room.clone(), start }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut buffers = self.buffers.borrow_mut();
        let Some((readers, given)) = buffers.read.get_mut(&self.start) else { return };
        *readers -= 1;
        let given = *given;
        if *readers == 0 {
            buffers.read.remove(&self.start);
            if given > 0 {
                buffers.space.give(self.start, given);
                drop(buffers);
                self.room.notify_all();
            }
        }
    }
}

struct State {
    tail: u64,
    next_group: u64,
    head: u64,
    superblock: LogSuperblock,
    copy: usize,
    /// Clean flag in the superblock of this run; `None` if it is not written yet.
    said: Option<bool>,
}

/// Log in persistent memory.
pub(crate) struct PmemMedium {
    memory: Rc<dyn PersistentMemory>,
    /// Byte offset of the log in the memory.
    base: u64,
    slots: u64,
    /// Byte offset of the buffers in the memory.
    buffers: u64,
    lines: u32,
    tag: u32,
    state: RefCell<State>,
    /// Cipher of the payloads that are appended.
    cipher: RefCell<Option<Rc<PayloadCipher>>>,
    space: Rc<RefCell<Buffers>>,
    room: Rc<Notify>,
}

/// Stores the head and tail words of a new log.
pub(crate) fn format_words(memory: &dyn PersistentMemory, base: u64, tag: u32, seq: u64) {
    memory.store_word(base + HEAD_AT, encode_word(seq, tag));
    memory.store_word(base + TAIL_AT, encode_word(seq, tag));
    memory.fence();
}

impl PmemMedium {
    /// Reads and verifies the contents of the log at `base`, without changes.
    pub(crate) fn scan(memory: &dyn PersistentMemory, base: u64, superblock: &LogSuperblock) -> Result<Recovered> {
        let (tag, slots) = (tag_of(&superblock.log), superblock.slots);
        let word = |at, what: &str| {
            let mut bytes = [0; 8];
            memory.load(base + at, &mut bytes);
            decode_word(u64::from_le_bytes(bytes), tag).map_err(|error| corrupt(format!("the {what}: {error}")))
        };
        let (head, tail) = (word(HEAD_AT, "head")?, word(TAIL_AT, "tail")?);
        if tail > head || head - tail > slots {
            return Err(corrupt(format!("the tail is {tail}, the head {head}, and there are {slots} slots")));
        }
        let mut entries: Vec<EntryRecord> = Vec::with_capacity((head - tail) as usize);
        for seq in tail..head {
            let mut bytes = [0; ENTRY_LEN];
            memory.load(base + AREA_AT + seq % slots * ENTRY_LEN as u64, &mut bytes);
            let entry = EntryRecord::decode(&bytes, tag, seq).map_err(|error| corrupt(error.to_string()))?;
            entries.push(entry);
        }
        check_generations(&entries)?;
        let superseded = superseded_entries(&entries);
        let (buffers, lines) = Self::buffers(superblock);
        let mut payload = vec![0; crate::format::PAYLOAD_MAX as usize];
        for (entry, _) in
            entries.iter().zip(&superseded).filter(|(entry, superseded)| entry.kind.has_payload() && !**superseded)
        {
            let len = entry.stored_len();
            if u64::from(entry.place) + u64::from(lines_of(len)) > u64::from(lines) {
                return Err(corrupt(format!("entry {}: its buffer is outside", entry.seq)));
            }
            let payload = &mut payload[..len as usize];
            memory.load(base + buffers + u64::from(entry.place) * LINE, payload);
            if forebay_accel::crc32c::crc32c(payload) != entry.crc {
                return Err(corrupt(format!("entry {}: the payload's checksum is wrong", entry.seq)));
            }
        }
        Ok(Recovered { entries, tail_seq: tail })
    }

    fn buffers(superblock: &LogSuperblock) -> (u64, u32) {
        let at = buffers_at(superblock.slots);
        (at, ((superblock.size - at) / LINE).min(u64::from(u32::MAX - 1)) as u32)
    }

    /// Resumes a log that was scanned.
    pub(crate) fn resume(
        memory: Rc<dyn PersistentMemory>,
        base: u64,
        superblock: LogSuperblock,
        copy: usize,
        found: &Recovered,
        room: Rc<Notify>,
    ) -> Result<Self> {
        let (buffers, lines) = Self::buffers(&superblock);
        let mut space = LineAllocator::new(lines);
        let superseded = superseded_entries(&found.entries);
        for (entry, _) in
            found.entries.iter().zip(&superseded).filter(|(e, superseded)| e.kind.has_payload() && !**superseded)
        {
            let len = entry.stored_len();
            if !space.take_at(entry.place, lines_of(len)) {
                return Err(corrupt(format!("entry {}: its buffer belongs to another entry too", entry.seq)));
            }
        }
        let head = found.tail_seq + found.entries.len() as u64;
        let (slots, tag) = (superblock.slots, tag_of(&superblock.log));
        // Stores of a killed process may be readable, but not durable yet.
        memory.store_word(base + HEAD_AT, encode_word(head, tag));
        memory.store_word(base + TAIL_AT, encode_word(found.tail_seq, tag));
        memory.fence();
        let space = Rc::new(RefCell::new(Buffers { space, read: BTreeMap::new() }));
        let state = State { tail: found.tail_seq, next_group: 0, head, superblock, copy: 1 - copy, said: None };
        let (state, cipher) = (RefCell::new(state), RefCell::default());
        Ok(Self { memory, base, slots, buffers: base + buffers, lines, tag, state, cipher, space, room })
    }

    fn store_payload(&self, placed: &Placed) {
        let mut at = self.buffers + u64::from(placed.place) * LINE;
        for part in placed.stored().parts() {
            self.memory.store(at, part);
            at += part.len() as u64;
        }
    }
}

impl Medium for PmemMedium {
    fn capacity(&self) -> u64 {
        u64::from(self.lines) * LINE
    }

    fn used(&self) -> u64 {
        let state = self.state.borrow();
        let buffers = (u64::from(self.lines) - self.space.borrow().space.free_lines()) * LINE;
        // The fuller of the two counts.
        let entries = (state.head - state.tail) as u128 * u128::from(self.capacity()) / u128::from(self.slots);
        buffers.max(entries as u64)
    }

    fn take(&self, queue: &mut VecDeque<AppendPiece>, first_seq: u64, _durable: bool) -> Option<AppendGroup> {
        let mut state = self.state.borrow_mut();
        let cipher = self.cipher.borrow();
        let cipher = cipher.as_deref();
        let room = (self.slots - (state.head - state.tail)).min(BLOCK_ENTRIES_MAX as u64) as usize;
        let mut pieces = Vec::new();
        while pieces.len() < room
            && let Some(piece) = queue.front()
        {
            let lines = lines_of(piece.payload.len() as u32);
            let place = if lines == 0 { Some(0) } else { self.space.borrow_mut().space.take(lines) };
            let Some(place) = place else { break };
            let Some(piece) = queue.pop_front() else { break };
            let placed = Placed::new(piece, place, first_seq + pieces.len() as u64, LINE as usize, cipher);
            self.store_payload(&placed);
            pieces.push(placed);
        }
        if pieces.is_empty() {
            return None;
        }
        let (time_ms, term) = (now_ms(), 0);
        for (seq, placed) in (first_seq..).zip(&pieces) {
            let entry = placed.record(seq, time_ms, term, cipher).encode(self.tag);
            self.memory.store(self.base + AREA_AT + seq % self.slots * ENTRY_LEN as u64, &entry);
        }
        self.memory.fence();
        state.head = first_seq + pieces.len() as u64;
        self.memory.store_word(self.base + HEAD_AT, encode_word(state.head, self.tag));
        self.memory.fence();
        state.next_group += 1;
        Some(AppendGroup { first_seq, number: state.next_group, pieces, work: None, raw: None })
    }

    fn finished(&self, _group: u64) {}

    fn encrypt_with(&self, cipher: Rc<PayloadCipher>) {
        self.cipher.replace(Some(cipher));
    }

    fn read(&self, entry: &LogEntry) -> LocalFuture<Result<Buf>> {
        let len = entry.stored_len(self.cipher.borrow().is_some()) as usize;
        let (memory, at, entry) = (self.memory.clone(), self.buffers + u64::from(entry.place) * LINE, *entry);
        let pin = Pin::new(&self.space, &self.room, entry.place);
        // Loaded only when polled: many reads are created at once, and requests would wait for all of them.
        Box::pin(async move {
            let _pin = pin;
            let mut data = BufMut::zeroed(len);
            memory.load(at, &mut data);
            verify(&entry, &data).map(|()| data.freeze())
        })
    }

    fn superseded(&self, entry: &LogEntry) {
        let lines = lines_of(entry.payload_len());
        if lines > 0 {
            self.space.borrow_mut().give(entry.place, lines);
            self.room.notify_all();
        }
    }

    fn retire(&self, tail_seq: u64, gone: &[LogEntry]) {
        // Buffers may be reused only after the new tail is durable, so that no recovery reads them.
        self.memory.store_word(self.base + TAIL_AT, encode_word(tail_seq, self.tag));
        self.memory.fence();
        self.state.borrow_mut().tail = tail_seq;
        for entry in gone {
            let lines = lines_of(entry.payload_len());
            if lines > 0 {
                self.space.borrow_mut().give(entry.place, lines);
            }
        }
        self.room.notify_all();
    }

    fn persisted_tail(&self) -> u64 {
        self.state.borrow().tail
    }

    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>> {
        let mut state = self.state.borrow_mut();
        let (tail, copy, said) = (state.tail, state.copy, state.said);
        let superblock = &mut state.superblock;
        // The tail has its own word; the superblock holds the clean flag and the run.
        if said != Some(clean) {
            superblock.serial += 1;
            superblock.clean = clean;
            superblock.tail_seq = tail;
            let bytes = superblock.encode();
            self.memory.store(self.base + SUPER_COPIES[copy], &bytes);
            self.memory.fence();
            (state.copy, state.said) = (1 - copy, Some(clean));
        }
        Box::pin(ready(Ok(())))
    }

    fn sync(&self) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_that_is_being_read_is_not_used_again() {
        let buffers = Rc::new(RefCell::new(Buffers { space: LineAllocator::new(8), read: BTreeMap::new() }));
        let room = Rc::new(Notify::new());
        let start = buffers.borrow_mut().space.take(8).expect("all of it");
        let [one, two] = [(); 2].map(|()| Pin::new(&buffers, &room, start));
        buffers.borrow_mut().give(start, 8);
        drop(one);
        assert_eq!(buffers.borrow_mut().space.take(1), None, "the other still reads");
        drop(two);
        assert_eq!(buffers.borrow_mut().space.take(8), Some(start));
        assert!(buffers.borrow().read.is_empty());
        // The last reader of a buffer that is not freed yet frees nothing.
        drop(Pin::new(&buffers, &room, start));
        assert_eq!(buffers.borrow().space.free_lines(), 0);
        buffers.borrow_mut().give(start, 8);
        assert_eq!(buffers.borrow().space.free_lines(), 8);
    }
}
