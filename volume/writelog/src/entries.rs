//! In-memory table of log entries, oldest first: 24 bytes each.

use std::collections::VecDeque;

use forebay_block::Extent;

/// Operation of an entry on the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// Write of its payload.
    Write,
    /// Write-same: the payload of 512 bytes, repeated.
    Same,
    /// Write-zeroes that may deallocate.
    Zeroes,
    /// Write-zeroes that keeps the space allocated.
    ZeroesKeep,
    /// Discard; the range reads as zeroes.
    Discard,
}

impl EntryKind {
    const ALL: [EntryKind; 5] =
        [EntryKind::Write, EntryKind::Same, EntryKind::Zeroes, EntryKind::ZeroesKeep, EntryKind::Discard];

    /// Returns the on-disk code.
    pub fn code(self) -> u8 {
        self as u8 + 1
    }

    /// Returns the kind of an on-disk code; `None` if it is unknown.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// Returns whether entries of this kind have a payload.
    pub fn has_payload(self) -> bool {
        matches!(self, EntryKind::Write | EntryKind::Same)
    }
}

/// Length of a write-same payload in bytes.
pub const SAME_LEN: u32 = 512;

/// Place of an entry that is not on the medium yet.
pub const NOWHERE: u32 = u32::MAX;

/// Mask of the count of index segments in the state word; also its maximum.
const SEGMENTS_MAX: u32 = (1 << 27) - 1;
/// Dead flag in the state word: later entries of the same generation have overwritten all of the entry.
const DEAD: u32 = 1 << 27;
/// Mask of the kind in the state word.
const KIND: u32 = 0b111 << 28;
/// Low bit of the slack, in the state word; the high bit is in the length.
const SLACK: u32 = 1 << 31;
/// Maximum slack; more barriers are not counted.
pub const SLACK_MAX: u64 = 3;

/// Log entry in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry {
    offset: u64,
    /// Length in bytes, at most 1 GiB; the top bit holds the high bit of the slack.
    len: u32,
    /// Location of the payload, in units of the medium.
    pub place: u32,
    /// CRC32C of the payload, as it is stored.
    pub crc: u32,
    /// State word: one bit of slack, three bits of kind, the dead flag, and the count of index segments.
    state: u32,
}

impl LogEntry {
    /// Returns a new entry without segments.
    pub fn new(kind: EntryKind, extent: Extent, place: u32, crc: u32) -> Self {
        Self { offset: extent.offset, len: extent.len as u32, place, crc, state: u32::from(kind.code()) << 28 }
    }

    /// Sets the slack: the number of generations by which the submission preceded the entry's own, capped at
    /// [`SLACK_MAX`].
    pub fn with_slack(mut self, slack: u64) -> Self {
        let slack = slack.min(SLACK_MAX) as u32;
        self.state = self.state & !SLACK | slack << 31;
        self.len = self.len & !SLACK | (slack >> 1) << 31;
        self
    }

    /// Returns the minimum number of generations by which the submission preceded the entry's own: the entry is not
    /// ordered after writes of these.
    pub fn slack(&self) -> u64 {
        u64::from(self.state >> 31 | (self.len >> 31) << 1)
    }

    /// Returns the operation.
    pub fn kind(&self) -> EntryKind {
        EntryKind::from_code(((self.state & KIND) >> 28) as u8).unwrap_or(EntryKind::Write)
    }

    /// Returns the range of the volume.
    pub fn extent(&self) -> Extent {
        Extent::new(self.offset, u64::from(self.len & !SLACK))
    }

    /// Returns the length of the payload in bytes.
    pub fn payload_len(&self) -> u32 {
        payload_len(self.kind(), self.len & !SLACK)
    }

    /// Returns the length of the payload in bytes, as it is stored.
    pub fn stored_len(&self, encrypted: bool) -> u32 {
        stored_len(self.payload_len(), encrypted)
    }

    /// Returns whether the entry is superseded: no index segment, and so no read, refers to it.
    pub fn is_superseded(&self) -> bool {
        self.state & SEGMENTS_MAX == 0
    }

    /// Returns whether neither reads nor write-back need the entry.
    pub fn is_dead(&self) -> bool {
        self.state & DEAD != 0
    }

    /// Marks the entry as dead: neither reads nor write-back need it.
    pub fn kill(&mut self) {
        self.state |= DEAD;
    }

    /// Adds `by` to the count of index segments.
    pub fn count(&mut self, by: i32) {
        self.state = self.state.wrapping_add_signed(by);
    }
}

/// Returns the payload length of an entry of this kind that covers `len` bytes.
pub fn payload_len(kind: EntryKind, len: u32) -> u32 {
    match kind {
        EntryKind::Write => len,
        EntryKind::Same => SAME_LEN,
        EntryKind::Zeroes | EntryKind::ZeroesKeep | EntryKind::Discard => 0,
    }
}

/// Block of the cipher in bytes: the stored length of encrypted payloads is a multiple of it.
pub const CIPHER_BLOCK: u32 = 16;

/// Returns the length in bytes that a payload of `len` bytes has where it is stored.
pub fn stored_len(len: u32, encrypted: bool) -> u32 {
    if encrypted { len.next_multiple_of(CIPHER_BLOCK) } else { len }
}

/// Entries per block of memory.
const BLOCK: usize = 256;

/// Entry table by sequence number. Memory is allocated and freed in blocks of 6 KiB.
#[derive(Debug)]
pub struct Entries {
    blocks: VecDeque<Vec<LogEntry>>,
    /// Sequence number of the first slot of the first block.
    base: u64,
    tail: u64,
    head: u64,
}

impl Entries {
    /// Returns an empty table whose next entry gets the sequence number `head`.
    pub fn new(head: u64) -> Self {
        Self { blocks: VecDeque::new(), base: head, tail: head, head }
    }

    /// Returns the sequence number of the oldest entry.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Returns the sequence number after the newest entry.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns the number of entries.
    pub fn len(&self) -> u64 {
        self.head - self.tail
    }

    /// Returns the memory in use, in bytes.
    pub fn memory(&self) -> usize {
        self.blocks.iter().map(|block| block.capacity() * size_of::<LogEntry>() + 16).sum::<usize>()
            + self.blocks.capacity() * size_of::<Vec<LogEntry>>()
    }

    /// Appends an entry; returns its sequence number.
    pub fn push(&mut self, entry: LogEntry) -> u64 {
        if self.blocks.back().is_none_or(|block| block.len() == BLOCK) {
            self.blocks.push_back(Vec::with_capacity(BLOCK));
        }
        if let Some(block) = self.blocks.back_mut() {
            block.push(entry);
        }
        self.head += 1;
        self.head - 1
    }

    fn position(&self, seq: u64) -> Option<(usize, usize)> {
        if !(self.tail..self.head).contains(&seq) {
            return None;
        }
        let at = (seq - self.base) as usize;
        Some((at / BLOCK, at % BLOCK))
    }

    /// Returns the entry with this sequence number.
    pub fn get(&self, seq: u64) -> Option<&LogEntry> {
        let (block, at) = self.position(seq)?;
        self.blocks.get(block)?.get(at)
    }

    /// Returns the entry with this sequence number, mutably.
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut LogEntry> {
        let (block, at) = self.position(seq)?;
        self.blocks.get_mut(block)?.get_mut(at)
    }

    /// Returns the full sequence number of an entry in the table, from its low 32 bits.
    pub fn seq_of(&self, id: u32) -> u64 {
        self.tail + u64::from(id.wrapping_sub(self.tail as u32))
    }

    /// Removes the oldest entry.
    pub fn pop(&mut self) -> Option<(u64, LogEntry)> {
        let entry = *self.get(self.tail)?;
        let seq = self.tail;
        self.tail += 1;
        if self.tail - self.base == BLOCK as u64 {
            self.blocks.pop_front();
            self.base = self.tail;
        }
        Some((seq, entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_out_in_the_order_in_which_they_went_in() {
        let first = u64::from(u32::MAX) - 700;
        let mut entries = Entries::new(first);
        for at in 0..2000 {
            assert_eq!(
                entries.push(LogEntry::new(EntryKind::Write, Extent::new(at * 512, 512), at as u32, 7)),
                first + at
            );
            if at % 3 == 0 {
                entries.pop();
            }
        }
        for seq in entries.tail()..entries.head() {
            assert_eq!(entries.seq_of(seq as u32), seq);
            assert_eq!(u64::from(entries.get(seq).expect("there").place), seq - first);
        }
        assert!(entries.get(entries.tail() - 1).is_none() && entries.get(entries.head()).is_none());
        while let Some((seq, entry)) = entries.pop() {
            assert_eq!(u64::from(entry.place), seq - first);
        }
        assert!(entries.memory() < 3 * BLOCK * size_of::<LogEntry>());
    }

    #[test]
    fn a_record_is_24_bytes_and_knows_its_segments() {
        assert_eq!(size_of::<LogEntry>(), 24);
        let mut entry = LogEntry::new(EntryKind::Discard, Extent::new(4096, 1 << 30), NOWHERE, 0);
        entry.count(3);
        entry.count(-2);
        assert!(!entry.is_superseded() && entry.kind() == EntryKind::Discard && entry.payload_len() == 0);
        entry.count(-1);
        assert!(entry.is_superseded() && entry.extent() == Extent::new(4096, 1 << 30));
    }
}
