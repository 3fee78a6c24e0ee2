//! Scrub: reads and verifies everything that is stored, in the background, and mends what is wrong.
//!
//! Data is verified against the checksums in the headers of its batch, live map pages and tree nodes against those of
//! their references. Then every line of the batch is compared with its parity.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, Result};
use forebay_reactor::{sleep, wall_clock, yield_now};

use crate::core::Core;
use crate::format::batch::BatchHeader;
use crate::format::blob::{BlobSlot, SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::{StoreEntry, StoredBlob};
use crate::format::onode::Onode;
use crate::format::page::MapSlot;
use crate::format::record::CheckpointRecord;
use crate::format::{BLOCK, BLOCK64, BlobPtr, Put, StoreReader};
use crate::keys;
use crate::object::HEAD;
use crate::pacer::RepairPacer;

/// Maximum number of losses that are described individually.
const LOSSES_NAMED: usize = 32;
/// Segments after which the progress is recorded.
const SEGMENTS_RECORDED: u32 = 16;
/// Delay after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Progress and results of a scrub.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScrubStatus {
    /// Set while it runs.
    pub running: bool,
    /// Segments done.
    pub segment: u32,
    /// Segments in total.
    pub segments: u32,
    /// Bytes read and verified.
    pub bytes: u64,
    /// Blocks that were wrong, and were written again: data, metadata or parity.
    pub mended: u64,
    /// Blocks in use that are wrong and cannot be reconstructed.
    pub lost: u64,
    /// Descriptions of the first of them.
    pub losses: Vec<String>,
    /// Time of the end of the last complete scrub: seconds since 1970; 0 if there was none.
    pub completed_s: u64,
}

/// State of the scrub of a store.
#[derive(Default)]
pub struct ScrubState {
    wanted: Cell<bool>,
    status: RefCell<ScrubStatus>,
}

impl ScrubState {
    /// Requests a scrub, or the rest of one that was interrupted.
    pub fn want(&self) {
        self.wanted.set(true);
    }

    /// Returns progress and results.
    pub fn status(&self, core: &Core) -> ScrubStatus {
        let segments = core.segments.borrow().geometry.segment_count;
        ScrubStatus { running: self.wanted.get(), segments, ..self.status.borrow().clone() }
    }

    fn change(&self, change: impl FnOnce(&mut ScrubStatus)) {
        change(&mut self.status.borrow_mut());
    }

    fn lose(&self, what: String) {
        tracing::error!("scrub: {what} is lost");
        self.change(|status| {
            status.lost += 1;
            if status.losses.len() < LOSSES_NAMED {
                status.losses.push(what);
            }
        });
    }

    /// Encodes whether a scrub is wanted, its position and its counts, for the index.
    fn encode(&self) -> Vec<u8> {
        let status = self.status.borrow();
        let mut out = Vec::new();
        out.put_u8(self.wanted.get().into());
        out.put_u32(status.segment);
        for field in [status.bytes, status.mended, status.lost, status.completed_s] {
            out.put_u64(field);
        }
        out
    }

    /// Restores what was encoded; anything else is ignored.
    fn decode(&self, bytes: &[u8]) {
        let mut reader = StoreReader::new(bytes, "progress of a scrub");
        let mut fields = || {
            let (wanted, segment) = (reader.u8()?, reader.u32()?);
            let (bytes, mended, lost, completed_s) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
            let status = ScrubStatus { segment, bytes, mended, lost, completed_s, ..ScrubStatus::default() };
            Ok::<_, crate::format::MalformedStore>((wanted != 0, status))
        };
        if let Ok((wanted, status)) = fields() {
            self.wanted.set(wanted);
            *self.status.borrow_mut() = status;
        }
    }
}

/// Scrubs the store when that is wanted, until it closes. Goes on where the last one was interrupted.
pub async fn scrub_when_wanted(core: Rc<Core>, rate: u64) {
    if let Ok(Some(stored)) = core.index.lookup(&keys::scrub()).await {
        core.scrub.decode(&stored);
    }
    let mut pacer = RepairPacer::new(rate);
    loop {
        let next = core.maintenance.next_repair();
        if core.maintenance.is_closing() {
            return;
        }
        if !core.scrub.wanted.get() {
            next.await;
            continue;
        }
        drop(next);
        if let Err(error) = scrub(&core, &mut pacer).await {
            tracing::error!(?error, "a scrub of {} failed; retrying in {RETRY_AFTER:?}", core.media.device.name());
            sleep(RETRY_AFTER).await;
        }
    }
}

/// Batch that is verified, with its content as it should be.
struct ScrubbedBatch<'a> {
    core: &'a Rc<Core>,
    header: &'a BatchHeader,
    content: Vec<u8>,
    /// Set if a part in use is lost: the row stays as it is then.
    lost: bool,
}

async fn scrub(core: &Rc<Core>, pacer: &mut RepairPacer) -> Result<()> {
    let segments = core.segments.borrow().geometry.segment_count;
    let first = core.scrub.status.borrow().segment;
    if first == 0 || first >= segments {
        core.scrub.change(|status| {
            *status = ScrubStatus { completed_s: status.completed_s, ..ScrubStatus::default() };
        });
        // What the log has written to its segment up to now is verified, too, unless the store is nearly full.
        core.leave_log_segments().await?;
    }
    let first = if first >= segments { 0 } else { first };
    if let Some(set) = core.media.device.columns() {
        let damaged = set.scrub_headers(&core.current_superblock()).await?;
        core.scrub.change(|status| status.mended += damaged);
    }
    let renewed = core.renew_keys().await?;
    core.scrub.change(|status| status.mended += renewed);
    for segment in first..segments {
        if core.maintenance.is_closing() {
            return Ok(());
        }
        if core.segments.borrow().is_needed(segment) {
            scrub_segment(core, segment, pacer).await?;
        }
        core.scrub.change(|status| status.segment = segment + 1);
        if segment % SEGMENTS_RECORDED == SEGMENTS_RECORDED - 1 {
            core.index.put(keys::scrub(), Some(core.scrub.encode()));
            yield_now().await;
        }
    }
    core.scrub.wanted.set(false);
    core.scrub.change(|status| status.completed_s = wall_clock().as_secs());
    core.index.put(keys::scrub(), Some(core.scrub.encode()));
    let status = core.scrub.status(core);
    tracing::info!(
        "scrub of {} completed: {} bytes verified, {} blocks mended, {} lost",
        core.media.device.name(),
        status.bytes,
        status.mended,
        status.lost
    );
    Ok(())
}

async fn scrub_segment(core: &Rc<Core>, segment: u32, pacer: &mut RepairPacer) -> Result<()> {
    let geometry = core.segments.borrow().geometry;
    let first = geometry.first_block(segment);
    let end = first + geometry.segment_blocks();
    let _pin = core.media.pin(first * BLOCK64);
    // Batches of a segment that the log has left may still be in flight.
    core.log().wait_written().await?;
    let (mut block, mut before) = (first, None);
    while block < end && !core.maintenance.is_closing() {
        let Some(header) = core.next_header(block, end, before).await? else { break };
        let blocks = 1 + u64::from(header.payload_blocks);
        pacer.pace(blocks * BLOCK64).await;
        scrub_batch(core, &header).await?;
        core.scrub.change(|status| status.bytes += blocks * BLOCK64);
        before = Some((header.epoch, header.seq));
        block += blocks;
    }
    if before.is_none() && core.segments.borrow().live_table().of(segment) > 0 {
        core.scrub.lose(format!("segment {segment}, at byte {}: its first batch", first * BLOCK64));
    }
    Ok(())
}

async fn scrub_batch(core: &Rc<Core>, header: &BatchHeader) -> Result<()> {
    let Ok(entries) = StoreEntry::decode_all(&header.entries) else { return Ok(()) };
    let len = (1 + header.payload_blocks as usize) * BLOCK;
    let mut content = vec![0; len];
    header.encode(&mut content[..BLOCK]);
    match core.media.read_raw((header.block + 1) * BLOCK64, len - BLOCK).await {
        Ok(payload) => content[BLOCK..].copy_from_slice(&payload),
        Err(error) => {
            core.scrub.lose(format!("batch {} at byte {}: {error}", header.seq, header.block * BLOCK64));
            return Ok(());
        }
    }
    let mut batch = ScrubbedBatch { core, header, content, lost: false };
    for entry in &entries {
        batch.verify(entry).await?;
    }
    if let Some(set) = core.media.device.columns().filter(|_| !batch.lost) {
        let mended = set.settle(header.block, &Buf::copy_of(&batch.content).into()).await?;
        core.scrub.change(|status| status.mended += mended);
    }
    Ok(())
}

/// Returns where a map page is stored: as of now, and as of the last checkpoint, from which a crash would recover.
async fn page_locations(core: &Rc<Core>, oid: u64, of: u64, index: u32) -> Result<[Option<BlobPtr>; 2]> {
    let now = core.by_oid(oid).await?.and_then(|object| {
        let state = object.state();
        state.map_of(of).and_then(|map| map.pages().get(index as usize)).map(|page| page.ptr())
    });
    let stored = core.index.lookup_stored(&keys::object(oid)).await?;
    let stored = stored.and_then(|bytes| Onode::decode(&bytes).ok()).and_then(|onode| {
        let pages = match of {
            HEAD => Some(&onode.pages),
            _ => onode.clones.iter().find(|clone| clone.id == of).map(|clone| &clone.pages),
        };
        pages.and_then(|pages| pages.get(index as usize).copied())
    });
    Ok([now, stored])
}

impl ScrubbedBatch<'_> {
    fn base(&self) -> u64 {
        self.header.block + 1
    }

    async fn verify(&mut self, entry: &StoreEntry) -> Result<()> {
        match entry {
            StoreEntry::Write { oid, start, payload, crcs, .. }
            | StoreEntry::Relocate { oid, start, payload, crcs, .. } => {
                for (i, crc) in crcs.iter().enumerate() {
                    let at = *payload as usize + i;
                    if !self.verify_block(at, *crc).await && self.is_live(*oid, start + i as u32, at, *crc).await? {
                        self.lose_data(*oid, start + i as u32, (self.base() + at as u64) * BLOCK64).await;
                    }
                }
            }
            StoreEntry::WriteBlob { oid, blob, .. } | StoreEntry::RelocateBlob { oid, blob, .. } => {
                let addr = self.base() * BLOCK64 + u64::from(blob.payload) * SECTOR as u64;
                let len = u32::from(blob.sectors) * SECTOR as u32;
                if !self.verify_blob(BlobPtr { addr, len, crc: blob.crc }).await
                    && self.is_blob_live(*oid, blob).await?
                {
                    self.lose_data(*oid, blob.start, addr).await;
                }
            }
            StoreEntry::Page { oid, of, index, at, len } => {
                let addr = self.base() * BLOCK64 + u64::from(*at);
                let ptrs = page_locations(self.core, *oid, *of, *index).await?;
                let ptr = ptrs.into_iter().flatten().find(|ptr| ptr.addr == addr && ptr.len == *len);
                if let Some(ptr) = ptr
                    && !self.verify_blob(ptr).await
                {
                    self.lost = true;
                    self.core.scrub.lose(format!("map page {index} of object {oid}, at byte {addr}"));
                }
            }
            StoreEntry::Node { level, at, key, .. } => {
                let addr = self.base() * BLOCK64 + u64::from(*at);
                let found = self.core.index.node_location(key, *level).await;
                if let Some(ptr) = found.unwrap_or(None).filter(|ptr| ptr.addr == addr)
                    && !self.verify_blob(ptr).await
                {
                    self.lost = true;
                    self.core.scrub.lose(format!("a node of the tree, at byte {addr}"));
                }
            }
            StoreEntry::KvSetLong { at, len, crc, .. } => {
                // Needed by a replay only.
                self.verify_blob(BlobPtr { addr: self.base() * BLOCK64 + u64::from(*at), len: *len, crc: *crc }).await;
            }
            StoreEntry::Checkpoint { record } => {
                if let Ok(record) = CheckpointRecord::decode(record) {
                    self.verify_blob(record.anchor.segments).await;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Verifies payload block `at`, and reconstructs it if it is wrong. Returns whether it is right.
    async fn verify_block(&mut self, at: usize, crc: u32) -> bool {
        let range = (1 + at) * BLOCK..(2 + at) * BLOCK;
        let Some(bytes) = self.content.get(range.clone()) else { return false };
        if crc32c(bytes) == crc {
            return true;
        }
        self.core.media.count_checksum_error();
        let is_right = |bytes: &[u8]| crc32c(bytes) == crc;
        let Some(good) = self.core.media.device.mend_block(self.base() + at as u64, is_right).await else {
            return false;
        };
        self.content[range].copy_from_slice(&good);
        self.core.scrub.change(|status| status.mended += 1);
        true
    }

    /// Verifies a blob in the payload, and reconstructs its blocks if it is wrong. Returns whether it is right.
    async fn verify_blob(&mut self, ptr: BlobPtr) -> bool {
        let Some(at) = ptr.addr.checked_sub(self.base() * BLOCK64) else { return false };
        let (at, len) = (at as usize + BLOCK, ptr.len as usize);
        let Some(bytes) = self.content.get(at..at + len) else { return false };
        if crc32c(bytes) == ptr.crc {
            return true;
        }
        self.core.media.count_checksum_error();
        let first = at / BLOCK;
        let (block, within) = (self.header.block + first as u64, at - first * BLOCK..at + len - first * BLOCK);
        let is_right = |bytes: &[u8]| crc32c(bytes) == ptr.crc;
        let Some(good) = self.core.media.device.mend_range(block, within, is_right).await else { return false };
        // Only these bytes: its neighbours in the same block have checksums of their own.
        self.content[at..at + len].copy_from_slice(&good);
        self.core.scrub.change(|status| status.mended += 1);
        true
    }

    /// Returns whether an object refers to payload block `at`.
    async fn is_live(&self, oid: u64, block: u32, at: usize, crc: u32) -> Result<bool> {
        let Some(object) = self.core.by_oid(oid).await? else { return Ok(false) };
        self.core.load_pages(&object, HEAD, true, block, 1).await?;
        let there = MapSlot { block: self.base() + at as u64, crc };
        let state = object.state();
        Ok(state.head.get(block) == there || state.clones.iter().any(|clone| clone.map.get(block) == there))
    }

    /// Returns whether an object refers to any block of a blob.
    async fn is_blob_live(&self, oid: u64, blob: &StoredBlob) -> Result<bool> {
        let Some(object) = self.core.by_oid(oid).await? else { return Ok(false) };
        let blocks = blob.start..blob.start + u32::from(blob.blocks);
        self.core.load_pages(&object, HEAD, true, blob.start, blob.blocks.into()).await?;
        let sector = self.base() * SECTORS_A_BLOCK + u64::from(blob.payload);
        let is_in = |slot: MapSlot| BlobSlot::of(slot.block).is_some_and(|slot| slot.sector == sector);
        let state = object.state();
        let maps = state.clones.iter().map(|clone| &clone.map).chain([&state.head]);
        Ok(maps.into_iter().any(|map| blocks.clone().any(|block| is_in(map.get(block)))))
    }

    async fn lose_data(&mut self, oid: u64, block: u32, addr: u64) {
        self.lost = true;
        let name = match self.core.by_oid(oid).await {
            Ok(Some(object)) => object.name.to_string(),
            _ => format!("object {oid}"),
        };
        let offset = u64::from(block) * BLOCK64;
        self.core.scrub.lose(format!("{name} at byte {offset}, stored at byte {addr}"));
    }
}
