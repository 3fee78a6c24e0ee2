//! Cleaner, for compressed blobs: moves live ones as they are stored, and compresses what is left of mostly dead ones
//! again.

use std::ops::Range;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, BufList, Compression, Result};
use forebay_reactor::yield_now;

use crate::clean::CleaningCandidate;
use crate::commit::block_crcs;
use crate::core::Core;
use crate::crypt::BlockCipher;
use crate::format::blob::{BLOB_BLOCKS_MAX, BlobSlot, SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::{StoreEntry, StoredBlob};
use crate::format::{BLOCK, BLOCK64};
use crate::object::{HEAD, StoreObject};
use crate::plan::Runs;
use crate::sparse::{SparseBlob, sparse_max};

/// Share of a blob's blocks below which it is not moved as it is: one part in this many.
const SPARSE_PART: usize = 4;
/// Maximum number of mostly dead blobs compressed again before a round.
const SPARSE_A_ROUND: usize = 256;

/// Blob that may be live.
#[derive(Debug, Clone, Copy)]
pub struct BlobCandidate {
    oid: u64,
    start: u32,
    blocks: u32,
    slot: BlobSlot,
    crc: u32,
}

impl BlobCandidate {
    /// Returns the blob of an entry, in a batch whose payload begins at block `base` of the device.
    pub fn new(oid: u64, blob: &StoredBlob, base: u64) -> Self {
        let sector = base * SECTORS_A_BLOCK + u64::from(blob.payload);
        let slot = BlobSlot { sector, sectors: blob.sectors, index: 0 };
        Self { oid, start: blob.start, blocks: blob.blocks.into(), slot, crc: blob.crc }
    }

    fn byte(&self) -> u64 {
        self.slot.sector * SECTOR as u64
    }

    /// Returns the indexes of the blocks that some state of the object still refers to, ascending.
    fn live(&self, object: &StoreObject) -> Vec<u32> {
        let state = object.state();
        let is_live = |&i: &u32| {
            let (block, at) = (self.start + i, self.slot.at(i).location());
            // A header from an earlier use of the segment describes other content: the map is authoritative.
            let mut slots = std::iter::once(&state.head).chain(state.clones.iter().map(|clone| &clone.map));
            slots.any(|map| {
                let slot = map.get(block);
                slot.block == at && slot.crc == self.crc
            })
        };
        (0..self.blocks).filter(is_live).collect()
    }
}

impl Core {
    /// Moves the live blobs of one batch: looks them up, reads them together, and appends them again.
    pub async fn move_blobs(self: &Rc<Self>, candidates: Vec<BlobCandidate>) -> Result<()> {
        let mut live: Vec<(Rc<StoreObject>, BlobCandidate)> = Vec::new();
        for candidate in candidates {
            let Some(object) = self.by_oid(candidate.oid).await? else { continue };
            self.load_pages(&object, HEAD, true, candidate.start, candidate.blocks).await?;
            if !candidate.live(&object).is_empty() {
                live.push((object, candidate));
            }
        }
        live.sort_by_key(|(_, candidate)| candidate.slot.sector);
        let (Some((_, first)), Some((_, last))) = (live.first(), live.last()) else { return Ok(()) };
        let start = first.byte() / BLOCK64;
        let end = (last.byte() + u64::from(last.slot.ptr(0).len)).div_ceil(BLOCK64);
        let data: BufList = self.media.read_unchecked(start, end - start).await?;
        if self.log().is_congested() {
            self.log().wait_uncongested().await;
        }
        for (object, candidate) in live {
            let at = (candidate.byte() - start * BLOCK64) as usize;
            let mut stored = data.slice(at..at + candidate.slot.ptr(0).len as usize).to_vec();
            let whole = crc32c(&stored) == candidate.crc;
            let cipher = self.cipher_to_move(&object)?;
            let cipher = cipher.as_deref();
            if let Some(cipher) = cipher.filter(|_| whole) {
                self.media.open_blob(candidate.slot, cipher, &mut stored).await?;
            }
            // Pages may have been evicted, and blocks overwritten, during the read.
            self.load_pages(&object, HEAD, true, candidate.start, candidate.blocks).await?;
            let indexes = candidate.live(&object);
            if indexes.is_empty() {
                continue;
            }
            // What is left of a volume whose key was destroyed cannot be expanded.
            let sealed = object.key != 0 && cipher.is_none();
            if !whole {
                self.report_damaged(&object, &candidate, "checksum mismatch");
            } else if sealed || indexes.len() * SPARSE_PART >= candidate.blocks as usize {
                self.gc.add_cleaned_bytes(stored.len() as u64);
                self.relocate_blob(&object, &candidate, 0..candidate.blocks, &stored, cipher);
            } else {
                self.rewrite_blob(&object, &candidate, indexes, &stored, cipher);
            }
        }
        yield_now().await;
        Ok(())
    }

    /// Compresses what is left of blobs that became mostly dead. Returns the bytes that are dead now.
    pub async fn rewrite_sparse_blobs(self: &Rc<Self>) -> Result<u64> {
        let mut gain = 0;
        for _ in 0..SPARSE_A_ROUND {
            if self.maintenance.is_closing() || !self.has_space_to_clean() {
                break;
            }
            let Some(SparseBlob { oid, start, slot, crc }) = self.sparse.take() else { break };
            let Some(object) = self.by_oid(oid).await? else { continue };
            // Blocks past the end of the blob have no such location.
            let mut blob = BlobCandidate { oid, start, blocks: BLOB_BLOCKS_MAX - start % BLOB_BLOCKS_MAX, slot, crc };
            self.load_pages(&object, HEAD, true, start, blob.blocks).await?;
            if blob.live(&object).is_empty() {
                continue;
            }
            let ptr = slot.ptr(crc);
            // A damaged blob stays in place, so that reads of it report the error.
            let _pin = self.media.pin(ptr.addr);
            let Ok(mut stored) = self.media.read_blob(ptr, "a compressed blob").await else { continue };
            let Ok(cipher) = self.cipher_of(&object) else { continue };
            if let Some(cipher) = &cipher
                && self.media.open_blob(slot, cipher, &mut stored).await.is_err()
            {
                continue;
            }
            let Ok(expanded) = self.media.codecs.expand(&stored) else { continue };
            blob.blocks = (expanded.data.len() / BLOCK) as u32;
            if self.log().is_congested() {
                self.log().wait_uncongested().await;
            }
            self.load_pages(&object, HEAD, true, start, blob.blocks).await?;
            let live = blob.live(&object);
            if live.is_empty() || live.len() > sparse_max(slot) {
                continue;
            }
            gain += u64::from(ptr.len).saturating_sub(live.len() as u64 * BLOCK64);
            self.rewrite_blob(&object, &blob, live, &stored, cipher.as_deref());
            yield_now().await;
        }
        Ok(gain)
    }

    /// Leaves a damaged blob in place, so that reads of it keep reporting the error.
    fn report_damaged(&self, object: &StoreObject, blob: &BlobCandidate, why: &str) {
        let (byte, path) = (blob.byte(), self.media.device.name());
        tracing::error!("object {} has a damaged blob at byte {byte} of {path}: {why}; it is not moved", object.name);
        self.media.count_checksum_error();
        let mut segments = self.segments.borrow_mut();
        if let Some(segment) = segments.geometry.segment_of_byte(byte) {
            segments.mark_damaged(segment);
        }
    }

    /// Compresses the live blocks of a mostly dead blob again, without the others.
    fn rewrite_blob(
        &self,
        object: &Rc<StoreObject>,
        blob: &BlobCandidate,
        live: Vec<u32>,
        stored: &[u8],
        cipher: Option<&BlockCipher>,
    ) {
        let expanded = match self.media.codecs.expand(stored) {
            Ok(expanded) if expanded.data.len() == blob.blocks as usize * BLOCK => expanded,
            Ok(_) => return self.report_damaged(object, blob, "another number of blocks"),
            Err(why) => return self.report_damaged(object, blob, &why),
        };
        let compression = match self.policies.compression(&object.name) {
            Compression::None => expanded.compression,
            setting => setting,
        };
        let mut runs = Runs::new(live.into_iter());
        while let Some((from, count)) = runs.next() {
            let data = expanded.data.slice(from as usize * BLOCK..(from + count) as usize * BLOCK);
            match self.media.codecs.compress(compression, &data) {
                Some(stored) => {
                    self.gc.add_cleaned_bytes(stored.len() as u64);
                    self.relocate_blob(object, blob, from..from + count, &stored, cipher);
                }
                None => self.relocate_plain(object, blob, from, data, cipher),
            }
        }
    }

    /// Appends blocks of a blob, given by their indexes, as a blob of their own.
    fn relocate_blob(
        &self,
        object: &Rc<StoreObject>,
        old: &BlobCandidate,
        blocks: Range<u32>,
        stored: &[u8],
        cipher: Option<&BlockCipher>,
    ) {
        self.mark_dirty(object);
        self.log().append_data_blob(stored, cipher, |payload, sector, crc| {
            let sectors = (stored.len() / SECTOR) as u8;
            let (start, count) = (old.start + blocks.start, blocks.len() as u8);
            let blob = StoredBlob { start, blocks: count, payload, sectors, crc };
            let entry = StoreEntry::RelocateBlob { oid: old.oid, blob, old: old.slot.at(blocks.start).location() };
            self.apply(object, &entry, sector, None);
            entry
        });
    }

    /// Appends blocks of a blob, from index `from` on, as plain blocks.
    fn relocate_plain(
        &self,
        object: &Rc<StoreObject>,
        old: &BlobCandidate,
        from: u32,
        data: Buf,
        cipher: Option<&BlockCipher>,
    ) {
        let crcs = block_crcs(std::slice::from_ref(&data));
        let first = old.slot.at(from).location();
        let run = CleaningCandidate { oid: old.oid, start: old.start + from, first, crcs };
        self.relocate(object, &run, data.into(), cipher);
    }
}
