//! The records of what is in the log, oldest first: 24 bytes of memory each.

use std::collections::VecDeque;

use forebay_block::Extent;

/// What an entry does to the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes its payload.
    Write,
    /// Writes its payload, which is shorter, again and again.
    Same,
    /// Writes zeroes; the space may be given back.
    Zeroes,
    /// Writes zeroes, and the space must stay.
    ZeroesKeep,
    /// The content is not needed any more; reads as zeroes.
    Discard,
}

impl Kind {
    const ALL: [Kind; 5] = [Kind::Write, Kind::Same, Kind::Zeroes, Kind::ZeroesKeep, Kind::Discard];

    /// Its number in the format.
    pub fn code(self) -> u8 {
        self as u8 + 1
    }

    /// From its number in the format.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// It has bytes of its own.
    pub fn has_payload(self) -> bool {
        matches!(self, Kind::Write | Kind::Same)
    }
}

/// Bytes of a write-same's payload.
pub const SAME_LEN: u32 = 512;

/// The place of an entry that is not on the medium yet.
pub const NOWHERE: u32 = u32::MAX;

/// Segments of the index that one entry may have.
const SEGMENTS_MAX: u32 = (1 << 27) - 1;
/// Later entries of its own generation have overwritten it wholly.
const DEAD: u32 = 1 << 27;
/// The kind, in the state.
const KIND: u32 = 0b111 << 28;
/// The lower bit of the slack, in the state; the upper one is in the length.
const SLACK: u32 = 1 << 31;
/// More barriers than this are not counted.
pub const SLACK_MAX: u64 = 3;

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    offset: u64,
    /// At most 1 GiB; then the upper bit of the slack.
    len: u32,
    /// Where its payload is, in the medium's units.
    pub place: u32,
    /// CRC32C of its payload.
    pub crc: u32,
    /// A bit of the slack, three of the kind, then whether it is dead, and how many segments of the index it has.
    state: u32,
}

impl Entry {
    /// A new one, without segments.
    pub fn new(kind: Kind, extent: Extent, place: u32, crc: u32) -> Self {
        Self { offset: extent.offset, len: extent.len as u32, place, crc, state: u32::from(kind.code()) << 28 }
    }

    /// The same, submitted so many generations before its own.
    pub fn with_slack(mut self, slack: u64) -> Self {
        let slack = slack.min(SLACK_MAX) as u32;
        self.state = self.state & !SLACK | slack << 31;
        self.len = self.len & !SLACK | (slack >> 1) << 31;
        self
    }

    /// So many generations before its own it was submitted, at least: it is not after anything of these.
    pub fn slack(&self) -> u64 {
        u64::from(self.state >> 31 | (self.len >> 31) << 1)
    }

    /// What it does.
    pub fn kind(&self) -> Kind {
        Kind::from_code(((self.state & KIND) >> 28) as u8).unwrap_or(Kind::Write)
    }

    /// Where on the volume.
    pub fn extent(&self) -> Extent {
        Extent::new(self.offset, u64::from(self.len & !SLACK))
    }

    /// Bytes of its payload.
    pub fn payload_len(&self) -> u32 {
        payload_len(self.kind(), self.len & !SLACK)
    }

    /// No read finds it any more.
    pub fn is_hidden(&self) -> bool {
        self.state & SEGMENTS_MAX == 0
    }

    /// Neither reads nor the backend need it.
    pub fn is_dead(&self) -> bool {
        self.state & DEAD != 0
    }

    /// From now on neither reads nor the backend need it.
    pub fn kill(&mut self) {
        self.state |= DEAD;
    }

    /// It has so many segments more.
    pub fn count(&mut self, by: i32) {
        self.state = self.state.wrapping_add_signed(by);
    }
}

/// Bytes of payload of an entry of a kind that covers `len` bytes.
pub fn payload_len(kind: Kind, len: u32) -> u32 {
    match kind {
        Kind::Write => len,
        Kind::Same => SAME_LEN,
        Kind::Zeroes | Kind::ZeroesKeep | Kind::Discard => 0,
    }
}

/// Entries a block of memory.
const BLOCK: usize = 256;

/// The entries, by sequence number.  Memory comes and goes in blocks of 6 KiB.
#[derive(Debug)]
pub struct Entries {
    blocks: VecDeque<Vec<Entry>>,
    /// Sequence number of the first place of the first block.
    base: u64,
    tail: u64,
    head: u64,
}

impl Entries {
    /// None; the next one has the number `head`.
    pub fn new(head: u64) -> Self {
        Self { blocks: VecDeque::new(), base: head, tail: head, head }
    }

    /// Number of the oldest.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// One past the number of the newest.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// How many.
    pub fn len(&self) -> u64 {
        self.head - self.tail
    }

    /// Bytes of memory in use.
    pub fn memory(&self) -> usize {
        self.blocks.iter().map(|block| block.capacity() * size_of::<Entry>() + 16).sum::<usize>()
            + self.blocks.capacity() * size_of::<Vec<Entry>>()
    }

    /// Appends one; its number.
    pub fn push(&mut self, entry: Entry) -> u64 {
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

    /// One by its number.
    pub fn get(&self, seq: u64) -> Option<&Entry> {
        let (block, at) = self.position(seq)?;
        self.blocks.get(block)?.get(at)
    }

    /// One by its number, to be changed.
    pub fn get_mut(&mut self, seq: u64) -> Option<&mut Entry> {
        let (block, at) = self.position(seq)?;
        self.blocks.get_mut(block)?.get_mut(at)
    }

    /// The whole number of an entry that is in the log, from its low half.
    pub fn seq_of(&self, id: u32) -> u64 {
        self.tail + u64::from(id.wrapping_sub(self.tail as u32))
    }

    /// Takes out the oldest.
    pub fn pop(&mut self) -> Option<(u64, Entry)> {
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
            assert_eq!(entries.push(Entry::new(Kind::Write, Extent::new(at * 512, 512), at as u32, 7)), first + at);
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
        assert!(entries.memory() < 3 * BLOCK * size_of::<Entry>());
    }

    #[test]
    fn a_record_is_24_bytes_and_knows_its_segments() {
        assert_eq!(size_of::<Entry>(), 24);
        let mut entry = Entry::new(Kind::Discard, Extent::new(4096, 1 << 30), NOWHERE, 0);
        entry.count(3);
        entry.count(-2);
        assert!(!entry.is_hidden() && entry.kind() == Kind::Discard && entry.payload_len() == 0);
        entry.count(-1);
        assert!(entry.is_hidden() && entry.extent() == Extent::new(4096, 1 << 30));
    }
}
