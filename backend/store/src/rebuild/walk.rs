//! Scan of the log: batches and checkpoint records, of all stores that the device has held.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{BufMut, Error, Result};
use forebay_reactor::{File, sleep, yield_now};

use super::bad_sectors::{READ_ATTEMPTS, READ_PAUSE, is_bad_sector};
use crate::format::batch::BatchHeader;
use crate::format::entry::StoreEntry;
use crate::format::record::CheckpointRecord;
use crate::format::superblock::SEGMENTS_START;
use crate::format::{BLOCK, BLOCK64};
use crate::segments::SegmentGeometry;

/// Blocks read at a time where no chain of batches can be followed.
const WINDOW_BLOCKS: u64 = 256;
/// Range of valid segment sizes, as binary logarithms of bytes.
const SEGMENT_BITS: std::ops::RangeInclusive<u32> = 16..=30;

/// Consecutive windows whose retries failed before further windows are read only once. Bounds the delay on a large
/// defect, which could otherwise take hours.
const RETRIED_WINDOWS_MAX: u32 = 16;
/// Newest batch of one opening of the store.
#[derive(Clone, Copy)]
pub(super) struct EpochEnd {
    /// Highest batch number that a header reports as durable.
    pub(super) durable_seq: u64,
    /// Number and byte address of that header.
    pub(super) seq: u64,
    pub(super) at: u64,
    /// Highest batch number of a header.
    pub(super) last_seq: u64,
}

/// Batches of one store.
#[derive(Default)]
pub(super) struct StoreTrace {
    pub(super) batches: u64,
    pub(super) sequence: Option<(u64, u64)>,
    pub(super) records: Vec<(CheckpointRecord, u64)>,
    pub(super) epochs: BTreeMap<u64, EpochEnd>,
    /// Byte address and apparent batch number of damaged headers.
    pub(super) damaged: Vec<(u64, u64)>,
}

/// Scan of the log.
pub(super) struct Walk<'a> {
    pub(super) file: &'a File,
    pub(super) stores: BTreeMap<u64, StoreTrace>,
    /// Headers already seen, as the scan tries several segment sizes.
    seen: BTreeSet<u64>,
    /// Unreadable blocks.
    pub(super) unreadable: RefCell<BTreeSet<u64>>,
    /// Consecutive windows whose retries failed.
    retried_in_vain: Cell<u32>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(file: &'a File) -> Self {
        Self {
            file,
            stores: BTreeMap::new(),
            seen: BTreeSet::new(),
            unreadable: RefCell::default(),
            retried_in_vain: Cell::default(),
        }
    }

    /// Reads blocks. Bad sectors are zero-filled and recorded.
    ///
    /// # Errors
    /// Errors of the device, except bad sectors.
    pub(super) async fn read(&self, block: u64, blocks: u64) -> Result<BufMut> {
        if let Some(bytes) = self.try_read(block, blocks).await? {
            return Ok(bytes);
        }
        let mut bytes = BufMut::zeroed(blocks as usize * BLOCK);
        let is_known = |block: &u64| self.unreadable.borrow().contains(block);
        let mut missing: Vec<u64> = (block..block + blocks).filter(|block| !is_known(block)).collect();
        let attempts = if self.retried_in_vain.get() < RETRIED_WINDOWS_MAX { READ_ATTEMPTS } else { 1 };
        for attempt in 0..attempts {
            if missing.is_empty() {
                break;
            }
            if attempt > 0 {
                sleep(READ_PAUSE).await;
            }
            for at in std::mem::take(&mut missing) {
                match self.try_read(at, 1).await? {
                    Some(part) => bytes[(at - block) as usize * BLOCK..][..BLOCK].copy_from_slice(&part),
                    None => missing.push(at),
                }
            }
        }
        let in_vain = if missing.is_empty() { 0 } else { self.retried_in_vain.get() + 1 };
        self.retried_in_vain.set(in_vain);
        self.unreadable.borrow_mut().extend(missing);
        Ok(bytes)
    }

    /// Reads blocks; returns `None` if one of their sectors is bad.
    async fn try_read(&self, block: u64, blocks: u64) -> Result<Option<BufMut>> {
        let (at, len) = (block * BLOCK64, blocks as usize * BLOCK);
        let (result, bytes) = self.file.read_at(BufMut::with_capacity(len), at).await;
        match result {
            Ok(got) => Ok((got == len).then_some(bytes)),
            Err(error) if is_bad_sector(&error) => Ok(None),
            Err(error) => {
                let what = format!("reading {len} bytes at byte {at} of {}", self.file.path().display());
                Err(Error::from_io(error, what))
            }
        }
    }

    fn note(&mut self, header: &BatchHeader, leads_on: bool) {
        if !self.seen.insert(header.block) {
            return;
        }
        let at = header.block * BLOCK64;
        let trace = self.stores.entry(header.store).or_default();
        trace.batches += 1;
        let (low, high) = trace.sequence.unwrap_or((header.seq, header.seq));
        trace.sequence = Some((low.min(header.seq), high.max(header.seq)));
        let end = EpochEnd { durable_seq: header.durable_seq, seq: header.seq, at, last_seq: header.seq };
        let newest = trace.epochs.entry(header.epoch).or_insert(end);
        let last_seq = newest.last_seq.max(header.seq);
        if end.durable_seq > newest.durable_seq {
            *newest = end;
        }
        newest.last_seq = last_seq;
        // Data behind the end of the log may be object content that resembles a batch. Such bytes may indicate that
        // something is missing, but never define the state of the store.
        if !leads_on {
            return;
        }
        for entry in StoreEntry::decode_all(&header.entries).unwrap_or_default() {
            if let StoreEntry::Checkpoint { record } = entry
                && let Ok(record) = CheckpointRecord::decode(&record)
                && record.anchor.store == header.store
                && record.anchor.epoch == header.epoch
            {
                trace.records.push((record, at));
            }
        }
    }

    /// Follows the chain of batches from the first block of a segment; returns the block at which it ends.
    async fn follow(&mut self, first: u64, end: u64) -> Result<u64> {
        let (mut at, mut before): (u64, Option<(u64, u64)>) = (first, None);
        while at < end {
            let block = self.read(at, 1).await?;
            let Ok(header) = BatchHeader::decode(&block) else { break };
            let next = at + 1 + u64::from(header.payload_blocks);
            let follows = before.is_none_or(|(epoch, seq)| header.epoch == epoch && header.seq == seq + 1);
            if header.block != at || next > end || !follows {
                break;
            }
            self.note(&header, true);
            before = Some((header.epoch, header.seq));
            at = next;
        }
        Ok(at)
    }

    /// Scans each block for headers outside the chain of batches, and for damaged headers.
    async fn look_through(&mut self, mut at: u64, end: u64) -> Result<()> {
        while at < end {
            let window = self.read(at, WINDOW_BLOCKS.min(end - at)).await?;
            for (i, block) in window.chunks_exact(BLOCK).enumerate() {
                let place = at + i as u64;
                match BatchHeader::decode(block) {
                    Ok(header) if header.block == place => self.note(&header, false),
                    Ok(_) => {}
                    Err(_) => {
                        if let Some((store, seq)) = BatchHeader::remains(block, place) {
                            self.stores.entry(store).or_default().damaged.push((place * BLOCK64, seq));
                        }
                    }
                }
            }
            at += (window.len() / BLOCK).max(1) as u64;
            yield_now().await;
        }
        Ok(())
    }

    /// Scans all segments.
    pub(super) async fn segments(
        &mut self,
        geometry: &SegmentGeometry,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<()> {
        for segment in 0..geometry.segment_count {
            let first = geometry.first_block(segment);
            let end = first + geometry.segment_blocks();
            let ended = self.follow(first, end).await?;
            self.look_through(ended, end).await?;
            progress(u64::from(segment) + 1, geometry.segment_count.into());
        }
        Ok(())
    }

    /// Returns a checkpoint record of the given store, or of any store if none is given: that of the most segments, as a
    /// store may have grown.
    pub(super) fn first_record(&self, store: Option<u64>) -> Option<&CheckpointRecord> {
        let meant = self.stores.iter().filter(|(number, _)| store.is_none_or(|store| store == **number));
        meant
            .flat_map(|(_, trace)| &trace.records)
            .map(|(record, _)| record)
            .max_by_key(|record| record.superblock.segment_count)
    }

    /// Finds records without knowledge of the segment size, of one store if its anchors identify it.  Tries segment
    /// sizes from the largest down, so that only segment starts are examined and never locations inside an object's
    /// data.
    pub(super) async fn search(&mut self, store: Option<u64>) -> Result<()> {
        let size = self.file.info().size;
        for bits in SEGMENT_BITS.rev() {
            let segment = 1_u64 << bits;
            let mut start = SEGMENTS_START;
            while start + BLOCK64 <= size {
                let end = (start + segment).min(size) / BLOCK64;
                self.follow(start / BLOCK64, end).await?;
                start += segment;
            }
            if self.first_record(store).is_some() {
                break;
            }
            yield_now().await;
        }
        Ok(())
    }
}
