//! Cleaner (garbage collection): moves live data out of mostly dead segments, so that a checkpoint can free them.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{Buf, BufList, BufMut, Result};
use forebay_reactor::sync::join_all;
use forebay_reactor::yield_now;

use crate::clean_blobs::BlobCandidate;
use crate::commit::block_crcs;
use crate::core::Core;
use crate::crypt::{BlockCipher, UsePlace};
use crate::format::batch::BatchHeader;
use crate::format::entry::StoreEntry;
use crate::format::page::MapSlot;
use crate::format::{BLOCK, BLOCK64};
use crate::object::{HEAD, StoreObject};

/// Number of segments cleaned concurrently, so that the device is not idle while one of them is processed.
const SEGMENTS_AT_ONCE: usize = 4;
/// Number of blocks read ahead where batches are short.
const BLOCKS_AHEAD: u64 = 64;

/// Run of blocks that may be live.
pub struct CleaningCandidate {
    /// Object number.
    pub oid: u64,
    /// First block within the object.
    pub start: u32,
    /// Location of the first block; those of the others follow.
    pub first: u64,
    /// CRC32C of each block.
    pub crcs: Vec<u32>,
}

impl CleaningCandidate {
    fn part(&self, from: usize, count: usize) -> Self {
        Self {
            oid: self.oid,
            start: self.start + from as u32,
            first: self.first + from as u64,
            crcs: self.crcs[from..from + count].to_vec(),
        }
    }
}

/// Blocks of a segment that were read ahead, because its batches are short. They are not verified.
#[derive(Default)]
struct BlocksAhead {
    first: u64,
    /// `None` if none were read.
    blocks: Option<Buf>,
}

impl BlocksAhead {
    /// Returns `count` blocks from block `from` on; `None` if they were not all read.
    fn get(&self, from: u64, count: u64) -> Option<Buf> {
        let start = from.checked_sub(self.first)? as usize * BLOCK;
        let blocks = self.blocks.as_ref()?;
        let end = start + count as usize * BLOCK;
        (count > 0 && end <= blocks.len()).then(|| blocks.slice(start..end))
    }
}

/// Content of a batch, by how the cleaner handles it.
#[derive(Default)]
struct BatchContent {
    data: Vec<CleaningCandidate>,
    blobs: Vec<BlobCandidate>,
    /// Map pages: object, state, page index, byte address.
    pages: Vec<(u64, u64, u32, u64)>,
    /// Tree nodes: level, first key, byte address.
    nodes: Vec<(u8, Vec<u8>, u64)>,
}

impl Core {
    /// Returns whether the cleaner should run.
    pub fn wants_cleaning(&self) -> bool {
        self.gc.wants_retired() || !self.gc.is_stalled() && self.space.wants_cleaning()
    }

    /// Returns the number of free segments that the cleaner leaves for the following checkpoint.
    fn cleaning_floor(&self) -> u32 {
        let size = self.segments.borrow().geometry.segment_size;
        2 + (self.dirty_bytes() as u64).div_ceil(size) as u32
    }

    /// Returns whether the cleaner may append more.
    pub fn has_space_to_clean(&self) -> bool {
        self.space.free_segments() > self.cleaning_floor()
    }

    /// Moves live data out of the emptiest segments; the following checkpoint frees them.  Returns the expected gain in
    /// bytes.
    pub async fn clean_round(self: &Rc<Self>) -> Result<u64> {
        let sparse_gain = self.rewrite_sparse_blobs().await?;
        let (victims, live) = {
            let segments = self.segments.borrow();
            let count = segments.geometry.segment_count;
            // Moved data and the checkpoint need space themselves, from the reserve that user writes may not use.
            // Space is gained only by that checkpoint, so a round is short: writers at the watermark wait for its end.
            let budget = segments.free_count().saturating_sub(self.cleaning_floor()).min(count / 64 + 2);
            let live_max = u64::from(budget) * segments.geometry.segment_size * 7 / 8;
            let retired = if self.gc.take_retired() { segments.retired_victims(live_max) } else { Vec::new() };
            // Without one, others are to make space for what retired segments hold.
            let victims = if retired.is_empty() { segments.victims(live_max) } else { retired };
            let live: u64 = victims.iter().map(|&segment| u64::from(segments.live_table().of(segment))).sum();
            (victims, live)
        };
        // Segments that the log has left may have writes in flight; only completely written ones can be scanned.
        self.log().wait_written().await?;
        let size = self.segments.borrow().geometry.segment_size;
        let gain = (victims.len() as u64 * size).saturating_sub(live);
        let before = self.gc.begin_round();
        for group in victims.chunks(SEGMENTS_AT_ONCE) {
            if self.maintenance.is_closing() || !self.has_space_to_clean() {
                break;
            }
            let mut cleaning = Vec::new();
            for &segment in group {
                let segment_use = self.segments.borrow().uses.of(segment);
                if before.get(&segment) == Some(&segment_use) {
                    // A checkpoint since then should have freed the segment: some of its live data cannot be found. A
                    // segment that the log has used again since is another matter.
                    let path = self.media.device.name();
                    tracing::error!(
                        "cannot clean segment {segment} of {path}: some of its live data was not found; run `forebay store check`"
                    );
                    self.segments.borrow_mut().mark_damaged(segment);
                    continue;
                }
                self.gc.add_victim(segment, segment_use);
                if self.segments.borrow().live_table().of(segment) > 0 {
                    cleaning.push(Box::pin(async move { (segment, self.clean_segment(segment).await) }));
                }
            }
            for (segment, done) in join_all(cleaning).await {
                let Err(error) = done else { continue };
                if self.log().failure().is_some() {
                    return Err(error);
                }
                // Unreadable data prevents cleaning of this segment; other segments are unaffected.
                let path = self.media.device.name();
                tracing::error!(
                    ?error,
                    "cannot clean segment {segment} of {path}; its space is not reused while it has live data"
                );
                self.segments.borrow_mut().mark_damaged(segment);
            }
        }
        Ok(gain + sparse_gain)
    }

    async fn clean_segment(self: &Rc<Self>, segment: u32) -> Result<()> {
        let geometry = self.segments.borrow().geometry;
        let end = geometry.first_block(segment) + geometry.segment_blocks();
        let mut at = geometry.first_block(segment);
        let mut before: Option<(u64, u64)> = None;
        let mut ahead = BlocksAhead::default();
        let mut found = 0;
        while at < end {
            let header = match (before, ahead.get(at, 1)) {
                (Some(_), Some(stored)) => self.media.find_header(&stored, at, self.follows(end, before)).await,
                _ => self.next_header(at, end, before).await?,
            };
            let Some(header) = header else { break };
            let next = at + 1 + u64::from(header.payload_blocks);
            before = Some((header.epoch, header.seq));
            found += 1;
            // Its payload, and the next header if there is one.
            let wanted = (next + 1).min(end) - (at + 1);
            if u64::from(header.payload_blocks) < BLOCKS_AHEAD / 4 && ahead.get(at + 1, wanted).is_none() {
                ahead = self.read_ahead(at + 1, end).await;
            }
            self.clean_batch(&header, &ahead).await?;
            at = next;
        }
        let left = self.live_data_left(segment);
        if found == 0 && left {
            let path = self.media.device.name();
            tracing::error!(
                "cannot clean segment {segment} of {path}: it has live data but no readable batch; its space is not \
                 reused until that is overwritten"
            );
            self.segments.borrow_mut().mark_damaged(segment);
        }
        Ok(())
    }

    /// Reads blocks from block `at` on, before block `end`; none if that fails.
    async fn read_ahead(&self, at: u64, end: u64) -> BlocksAhead {
        let blocks = match BLOCKS_AHEAD.min(end.saturating_sub(at)) {
            0 => None,
            count => self.media.read_unchecked(at, count).await.ok().map(BufList::into_contiguous),
        };
        BlocksAhead { first: at, blocks }
    }

    /// Returns whether a header is that of the batch that follows batch `before` (epoch, number), if any, and ends before
    /// block `end`.
    fn follows(&self, end: u64, before: Option<(u64, u64)>) -> impl Fn(&BatchHeader) -> bool {
        let store = self.store_id();
        move |header| {
            let follows = before.is_none_or(|(epoch, seq)| header.epoch == epoch && header.seq == seq + 1);
            follows && header.store == store && header.block + 1 + u64::from(header.payload_blocks) <= end
        }
    }

    /// Reads the header at block `at` of the batch that follows batch `before` (epoch, number), if any, and ends before
    /// block `end`; `None` if there is none.
    pub(crate) async fn next_header(
        &self,
        at: u64,
        end: u64,
        before: Option<(u64, u64)>,
    ) -> Result<Option<BatchHeader>> {
        let is_next = self.follows(end, before);
        match before {
            Some(_) => self.media.read_header(at, is_next).await,
            None => self.media.read_first_header(at, is_next).await,
        }
    }

    fn live_data_left(&self, segment: u32) -> bool {
        self.segments.borrow().live_table().of(segment) > 0
    }

    async fn clean_batch(self: &Rc<Self>, header: &BatchHeader, ahead: &BlocksAhead) -> Result<()> {
        let Ok(entries) = StoreEntry::decode_all(&header.entries) else { return Ok(()) };
        let content = classify_entries(header, entries);
        self.move_data(content.data, ahead).await?;
        self.move_blobs(content.blobs).await?;
        for (oid, of, index, addr) in content.pages {
            let Some(object) = self.by_oid(oid).await? else { continue };
            let is_there = |object: &StoreObject| {
                let state = object.state();
                let page = state.map_of(of).and_then(|map| map.pages().get(index as usize));
                page.is_some_and(|page| page.ptr().addr == addr)
            };
            if !is_there(&object) {
                continue;
            }
            self.load_pages(&object, of, false, index * crate::format::PAGE_BLOCKS, 1).await?;
            if is_there(&object) {
                self.mark_dirty(&object);
                // Marking the object may itself have stored the page elsewhere, for a checkpoint in progress.
                let mut state = object.state_mut();
                let Some(map) = state.map_of_mut(of) else { continue };
                let Some(page) = map.page_mut(index) else { continue };
                if page.ptr().addr == addr && !page.is_dirty() {
                    page.mark_dirty();
                    self.dirty.add_pages(1);
                }
            }
        }
        for (level, key, addr) in content.nodes {
            let found = self.index.node_location(&key, level).await?;
            if found.is_some_and(|ptr| ptr.addr == addr) {
                self.index.touch(key);
            }
        }
        Ok(())
    }

    /// Returns the parts of a run that some state still references, as (index of the first block, number of blocks).
    fn live_runs(object: &StoreObject, candidate: &CleaningCandidate) -> Vec<(usize, usize)> {
        let state = object.state();
        let live = |i: usize| {
            let (block, at) = (candidate.start + i as u32, candidate.first + i as u64);
            // A header from an earlier use of the segment describes other content: the map is authoritative.
            let there = MapSlot { block: at, crc: candidate.crcs[i] };
            state.head.get(block) == there || state.clones.iter().any(|clone| clone.map.get(block) == there)
        };
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for i in (0..candidate.crcs.len()).filter(|&i| live(i)) {
            match runs.last_mut() {
                Some((from, count)) if *from + *count == i => *count += 1,
                _ => runs.push((i, 1)),
            }
        }
        runs
    }

    /// Moves the live blocks of one batch: looks them up, reads them together, and appends them again.
    async fn move_data(self: &Rc<Self>, candidates: Vec<CleaningCandidate>, ahead: &BlocksAhead) -> Result<()> {
        let mut live: Vec<(Rc<StoreObject>, CleaningCandidate)> = Vec::new();
        for candidate in candidates {
            let Some(object) = self.by_oid(candidate.oid).await? else { continue };
            self.load_pages(&object, HEAD, true, candidate.start, candidate.crcs.len() as u32).await?;
            for (from, count) in Self::live_runs(&object, &candidate) {
                live.push((object.clone(), candidate.part(from, count)));
            }
        }
        let (Some((_, first)), Some((_, last))) = (live.first(), live.last()) else { return Ok(()) };
        let start = first.first;
        let blocks = last.first + last.crcs.len() as u64 - start;
        // One long read costs less than many short ones, even with dead blocks in between.
        let data: BufList = match ahead.get(start, blocks) {
            Some(read) => read.into(),
            None => self.media.read_unchecked(start, blocks).await?,
        };
        if self.log().is_congested() {
            self.log().wait_uncongested().await;
        }
        for (object, run) in live {
            let at = (run.first - start) as usize * BLOCK;
            let data = data.slice(at..at + run.crcs.len() * BLOCK);
            let data = self.verified(&object, &run, data).await;
            let cipher = self.cipher_to_move(&object)?;
            let sealed = match &cipher {
                Some(cipher) => Some((&**cipher, self.media.use_place(run.first).await?)),
                None => None,
            };
            // Pages may have been evicted, and blocks overwritten, during the reads: no await from here on.
            self.load_pages(&object, HEAD, true, run.start, run.crcs.len() as u32).await?;
            for (from, count) in Self::live_runs(&object, &run) {
                let data = data.slice(from * BLOCK..(from + count) * BLOCK);
                let sealed = sealed.map(|(cipher, place)| (cipher, place.after(from)));
                self.move_run(&object, &run.part(from, count), data, sealed);
            }
        }
        yield_now().await;
        Ok(())
    }

    /// Returns the data of a run with damaged blocks reconstructed from other devices, where that is possible.
    async fn verified(&self, object: &StoreObject, run: &CleaningCandidate, data: BufList) -> BufList {
        if self.media.device.columns().is_none() {
            return data;
        }
        let found = block_crcs(data.parts());
        if found == run.crcs {
            return data;
        }
        let mut verified = BufList::new();
        for (i, (found, stored)) in found.iter().zip(&run.crcs).enumerate() {
            let what = || format!("{} at byte {}", object.name, (u64::from(run.start) + i as u64) * BLOCK64);
            let block = data.slice(i * BLOCK..(i + 1) * BLOCK);
            verified.append(match found == stored {
                true => block,
                false => self.media.read_stored(run.first + i as u64, *stored, what).await.unwrap_or(block),
            });
        }
        verified
    }

    /// Moves a run of live blocks as they are stored: at `place`, with `cipher`, if they are encrypted.
    fn move_run(
        &self,
        object: &Rc<StoreObject>,
        run: &CleaningCandidate,
        data: BufList,
        sealed: Option<(&BlockCipher, UsePlace)>,
    ) {
        let found = block_crcs(data.parts());
        let damaged = found.iter().zip(&run.crcs).any(|(found, stored)| found != stored);
        if !damaged {
            return self.relocate_stored(object, run, data, sealed);
        }
        // A damaged block stays in place, so that reads of it keep reporting the error.
        tracing::error!(
            "object {} has a damaged block near byte {} of {}; it is not moved",
            object.name,
            run.first * BLOCK64,
            self.media.device.name()
        );
        self.media.count_checksum_error();
        let segment = self.segments.borrow().geometry.segment_of(run.first);
        if let Some(segment) = segment {
            self.segments.borrow_mut().mark_damaged(segment);
        }
        for (i, (found, stored)) in found.iter().zip(&run.crcs).enumerate() {
            if found == stored {
                let sealed = sealed.map(|(cipher, place)| (cipher, place.after(i)));
                self.relocate_stored(object, &run.part(i, 1), data.slice(i * BLOCK..(i + 1) * BLOCK), sealed);
            }
        }
    }

    /// Appends stored blocks again like [`relocate`](Self::relocate), after decrypting what is encrypted.
    fn relocate_stored(
        &self,
        object: &Rc<StoreObject>,
        run: &CleaningCandidate,
        data: BufList,
        sealed: Option<(&BlockCipher, UsePlace)>,
    ) {
        let Some((cipher, place)) = sealed else { return self.relocate(object, run, data, None) };
        let mut plain = BufMut::zeroed(data.len());
        data.copy_to(&mut plain);
        cipher.open_blocks(place, &mut plain);
        self.relocate(object, run, plain.into(), Some(cipher));
    }

    /// Appends blocks again, encrypted with `cipher` if there is one, and makes every state that has them at their old
    /// location refer to the new one.
    pub fn relocate(
        &self,
        object: &Rc<StoreObject>,
        run: &CleaningCandidate,
        data: BufList,
        cipher: Option<&BlockCipher>,
    ) {
        self.mark_dirty(object);
        let log = self.log();
        self.gc.add_cleaned_bytes(data.len() as u64);
        log.append_blocks(&data, cipher, StoreEntry::write_size, |mut appended| {
            let at = appended.done;
            let count = appended.stored.iter().map(|buf| buf.len()).sum::<usize>() / BLOCK;
            let crcs = match cipher {
                // Keeps the stored checksums, which were verified after the read, so that later corruption in memory is
                // detected.
                None => run.crcs[at..at + count].to_vec(),
                Some(_) => appended.take_crcs(),
            };
            let entry = StoreEntry::Relocate {
                oid: run.oid,
                start: run.start + at as u32,
                payload: appended.payload,
                old: run.first + at as u64,
                crcs,
            };
            self.apply(object, &entry, appended.block, None);
            entry
        });
    }
}

fn classify_entries(header: &BatchHeader, entries: Vec<StoreEntry>) -> BatchContent {
    let base = header.block + 1;
    let mut content = BatchContent::default();
    // Sorted by location, so that adjacent runs are read together.
    let mut data: BTreeMap<u64, CleaningCandidate> = BTreeMap::new();
    for entry in entries {
        match entry {
            StoreEntry::Write { oid, start, payload, crcs, .. }
            | StoreEntry::Relocate { oid, start, payload, crcs, .. } => {
                let first = base + u64::from(payload);
                data.insert(first, CleaningCandidate { oid, start, first, crcs });
            }
            StoreEntry::WriteBlob { oid, blob, .. } | StoreEntry::RelocateBlob { oid, blob, .. } => {
                content.blobs.push(BlobCandidate::new(oid, &blob, base));
            }
            StoreEntry::Page { oid, of, index, at, .. } => {
                content.pages.push((oid, of, index, base * BLOCK64 + u64::from(at)));
            }
            StoreEntry::Node { level, at, key, .. } => content.nodes.push((level, key, base * BLOCK64 + u64::from(at))),
            _ => {}
        }
    }
    content.data = data.into_values().collect();
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_ahead_are_returned_only_if_all_were_read() {
        assert!(BlocksAhead::default().get(0, 1).is_none());
        let bytes: Vec<u8> = (0..4 * BLOCK).map(|at| (at / BLOCK) as u8).collect();
        let ahead = BlocksAhead { first: 10, blocks: Some(Buf::copy_of(&bytes)) };
        let firsts = |from, count| ahead.get(from, count).map(|blocks| (blocks[0], blocks.len() / BLOCK));
        assert_eq!(firsts(10, 4), Some((0, 4)));
        assert_eq!(firsts(12, 2), Some((2, 2)));
        for (from, count) in [(9, 1), (9, 2), (10, 5), (13, 2), (14, 1), (11, 0)] {
            assert_eq!(firsts(from, count), None, "{count} from {from}");
        }
    }
}
