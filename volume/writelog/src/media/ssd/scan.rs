//! Recovery of a log of append blocks: its blocks from the tail on, as far as they are valid.

use std::collections::VecDeque;

use forebay_accel::crc32c::crc32c;
use forebay_block::{BufMut, Result};

use super::ring::Mark;
use super::{Ssd, io, ring_units};
use crate::format::{AREA_AT, BlockHeader, EntryRecord, LogSuperblock, tag_of};
use crate::media::later::{Ring, WINDOW};
use crate::media::storage::BlockStorage;
use crate::media::{check_generations, corrupt};
use crate::replication::LogShape;

impl Ssd {
    /// Reads the contents of the log at `base`, as far as they are valid, without changes.
    ///
    /// Blocks of the run after the one in the superblock are accepted too: its newer copy may have been lost. With
    /// `one_lost`, a copy is known to be damaged; the whole ring is then searched for proof that it was the newer one
    /// and that the ring has overwritten what this one refers to.
    ///
    /// # Errors
    /// [`Corrupt`](forebay_block::ErrorKind::Corrupt) if a block is missing that is known to have been durable.
    pub(crate) async fn scan(
        storage: &BlockStorage,
        base: u64,
        superblock: &LogSuperblock,
        one_lost: bool,
    ) -> Result<ScanResult> {
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
            unproven: Vec::new(),
            shape: LogShape::default(),
        };
        let at = |pos: u64| base + AREA_AT + pos % ring * u64::from(unit);
        let mut first = true;
        let mut run = 0;
        let mut blocks: Vec<(BlockHeader, Vec<EntryRecord>)> = Vec::new();
        loop {
            // The next block is at the end of the last one or, if it did not fit there, at the start of the ring.
            // Both may hold one: the former was torn, and a block of the next run did not fit over it. The higher run
            // is the valid one.
            let wrapped = found.head_pos.next_multiple_of(ring);
            let mut next: Option<(BlockHeader, Vec<EntryRecord>)> = None;
            for pos in [found.head_pos, wrapped] {
                if pos - superblock.tail_pos >= ring {
                    continue;
                }
                let head = storage.read_exact_at(at(pos), unit as usize).await.map_err(|e| io(e, "reading a block"))?;
                let Some(header) = BlockHeader::peek(&head, tag, unit) else { continue };
                let expected = (header.number, header.pos) == (found.next_block, pos)
                    && superblock.accepts(header.run, run, header.number)
                    && (first && header.first_seq <= superblock.tail_seq || header.first_seq == found.next_seq);
                let newer = next.as_ref().is_none_or(|(other, _)| header.run > other.run);
                if !expected || !newer || pos % ring + u64::from(header.head_units(unit)) > ring {
                    continue;
                }
                let len = header.head_units(unit) as usize * unit as usize;
                let head = match len > head.len() {
                    true => storage.read_exact_at(at(pos), len).await.map_err(|e| io(e, "reading a block"))?,
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
        found.check_payloads(storage, base, unit, &mut blocks, ring).await?;
        let known = found.durable;
        let later = Ring { storage, base, unit, units: ring, tag, superblock };
        let searched = if one_lost { ring } else { (WINDOW / u64::from(unit)).min(ring) };
        found.durable = found.durable.max(later.durable_before(found.head_pos, searched).await?);
        if found.next_block < found.durable {
            return Err(corrupt(format_args!(
                "block {} should be there and is not; what came after it, up to block {}, is lost",
                found.next_block, found.durable
            )));
        }
        check_generations(blocks.iter().flat_map(|(_, entries)| entries))?;
        let begin = blocks.first().map_or(found.tail_seq, |(header, _)| header.first_seq);
        found.shape = LogShape::empty_at(begin);
        for (header, entries) in blocks {
            if header.number >= known {
                let (place, len) = (at(header.pos), header.units as usize * unit as usize);
                found.unproven.push((place, len));
            }
            found.shape.push(u64::from(header.run), u64::from(header.count));
            found.run = found.run.max(header.run);
            found.tail_seq = found.tail_seq.max(header.tail_seq.min(found.next_seq));
            let mark = Mark { number: header.number, pos: header.pos, first_seq: header.first_seq };
            found.marks.push_back(mark);
            found.entries.extend(entries);
        }
        let tail = found.tail_seq;
        found.shape.retire(tail);
        found.entries.retain(|entry| entry.seq >= tail);
        Ok(found)
    }
}

/// Result of a scan.
pub(crate) struct ScanResult {
    pub(crate) entries: Vec<EntryRecord>,
    pub(crate) tail_seq: u64,
    pub(super) head_pos: u64,
    pub(super) next_block: u64,
    pub(crate) next_seq: u64,
    /// Last known run.
    pub(crate) run: u32,
    pub(super) marks: VecDeque<Mark>,
    /// Number before which all blocks were durable.
    durable: u64,
    /// Places of blocks that are not known to be durable: offset and length in bytes.
    pub(crate) unproven: Vec<(u64, usize)>,
    /// Entries and their runs.
    pub(crate) shape: LogShape,
}

impl ScanResult {
    /// Blocks not known to be durable may be torn: the log ends at the first one with a payload that fails its
    /// checksum.
    async fn check_payloads(
        &mut self,
        storage: &BlockStorage,
        base: u64,
        unit: u32,
        blocks: &mut Vec<(BlockHeader, Vec<EntryRecord>)>,
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
                _ => storage.read_exact_at(offset, len as usize).await.map_err(|e| io(e, "reading payloads"))?,
            };
            let mut place = 0;
            let whole = entries.iter().all(|entry| {
                let len = entry.stored_len() as usize;
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
