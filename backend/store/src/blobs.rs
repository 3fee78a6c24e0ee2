//! Compressed blobs in memory: references and their counts, and the codecs.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use forebay_accel::compress::{Codec, Compressor, Decompressor, Framing, Level, expand_lz4_front};
use forebay_block::{Buf, BufMut, Compression, Result};

use crate::core::{Core, corrupt};
use crate::format::blob::{BLOB_HEADER, BlobCodec, BlobHeader, BlobSlot, SECTOR};
use crate::format::entry::StoredBlob;
use crate::format::page::MapSlot;
use crate::format::{BLOCK, BLOCK64};
use crate::index::MetadataIndex;
use crate::keys;
use crate::map::Map;
use crate::object::{ObjectState, StoreObject};

/// Counters of compressed data.
///
/// # Invariants
/// 1. `logical` is the size of all blocks of blobs that a state refers to, each counted once.
/// 2. `stored` is the size of all blobs of which a state refers to any block.
#[derive(Default)]
pub struct BlobCounters {
    logical: Cell<u64>,
    stored: Cell<u64>,
    /// Values that the tree has.
    in_tree: Cell<(u64, u64)>,
}

impl BlobCounters {
    /// Returns the bytes of mapped blocks that are in blobs.
    pub fn logical(&self) -> u64 {
        self.logical.get()
    }

    /// Returns the bytes of live blobs on the device.
    pub fn stored(&self) -> u64 {
        self.stored.get()
    }

    /// Counts mapped blocks of a blob.
    pub fn add_blocks(&self, count: u32) {
        self.logical.set(self.logical.get() + u64::from(count) * BLOCK64);
    }

    fn sub_block(&self) {
        self.logical.set(self.logical.get().saturating_sub(BLOCK64));
    }

    fn add_blob(&self, bytes: u32) {
        self.stored.set(self.stored.get() + u64::from(bytes));
    }

    fn sub_blob(&self, bytes: u32) {
        self.stored.set(self.stored.get().saturating_sub(u64::from(bytes)));
    }

    /// Sets the counters to what was counted again.
    pub fn recount(&self, logical: u64, stored: u64) {
        self.logical.set(logical);
        self.stored.set(stored);
    }

    /// Passes the counters to the checkpoint that begins.
    pub fn store(&self, index: &MetadataIndex) {
        let now = (self.logical.get(), self.stored.get());
        if self.in_tree.replace(now) != now {
            index.put(keys::blob_counters(), Some([now.0.to_le_bytes(), now.1.to_le_bytes()].concat()));
        }
    }

    /// Sets the counters as of the last checkpoint.
    pub fn load(&self, value: &[u8]) -> Result<()> {
        let damaged = || corrupt("the counters of compressed data");
        let value: [u8; 16] = value.try_into().map_err(|_| damaged())?;
        let (logical, stored) = value.split_at(8);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        self.logical.set(number(logical));
        self.stored.set(number(stored));
        self.in_tree.set((number(logical), number(stored)));
        Ok(())
    }
}

impl Core {
    /// Counts a block at `slot` as dead, which no state refers to any more, and its blob if that was the last reference to
    /// it.  `dropped` is a map that is being dropped: its blocks after `block` still count as references.  Returns whether
    /// the blob lives on without them.
    pub fn release(&self, state: &ObjectState, block: u32, slot: MapSlot, dropped: Option<&Map>) -> bool {
        self.media.cache.forget(slot.block);
        let Some(blob) = BlobSlot::of(slot.block) else {
            self.segments.borrow_mut().sub_block(slot.block);
            return false;
        };
        self.blobs.sub_block();
        let later = dropped.is_some_and(|map| map.refers_to(blob, block, block + 1));
        let left = state.refers_to(blob, block);
        if !later && !left {
            let ptr = blob.ptr(slot.crc);
            self.segments.borrow_mut().drop_blob(ptr);
            self.blobs.sub_blob(ptr.len);
        }
        left
    }

    /// Applies the write of a blob that lies at a sector of the device.
    pub fn apply_blob(&self, object: &StoreObject, blob: &StoredBlob, sector: u64) {
        let slot = BlobSlot { sector, sectors: blob.sectors, index: 0 };
        self.count_data_blob(slot, blob);
        self.blobs.add_blocks(blob.blocks.into());
        for i in 0..u32::from(blob.blocks) {
            self.remap(object, blob.start + i, MapSlot { block: slot.at(i).location(), crc: blob.crc });
        }
    }

    /// Applies the relocation of blocks to a blob that lies at a sector of the device.
    pub fn apply_move_to_blob(&self, object: &StoreObject, blob: &StoredBlob, old: u64, sector: u64) {
        let slot = BlobSlot { sector, sectors: blob.sectors, index: 0 };
        let mut moved = false;
        for i in 0..u32::from(blob.blocks) {
            let new = MapSlot { block: slot.at(i).location(), crc: blob.crc };
            if self.apply_move(object, blob.start + i, old + u64::from(i), new) {
                moved = true;
            } else {
                self.media.cache.forget(new.block);
            }
        }
        if moved {
            self.count_data_blob(slot, blob);
        }
    }

    fn count_data_blob(&self, slot: BlobSlot, blob: &StoredBlob) {
        self.features.note_blobs();
        let ptr = slot.ptr(blob.crc);
        self.segments.borrow_mut().add_blob(ptr);
        self.blobs.add_blob(ptr.len);
    }
}

/// Maximum number of blocks that are copied out of the memory into which a blob is expanded.
const COPIED_BLOCKS_MAX: usize = 4;

/// Codecs with their memory, used by one reactor.
#[derive(Default)]
pub struct BlobCodecs {
    compressor: RefCell<Compressor>,
    decompressor: RefCell<Decompressor>,
    /// Memory for compressed bytes, used again so that it stays in the caches and is not cleared each time.
    packed: RefCell<Vec<u8>>,
    /// Memory for expanded blocks, used again likewise.
    expanded: RefCell<Vec<u8>>,
}

/// Returns the format of a blob and the codec for a setting; `None` without compression.
pub fn codec_of(compression: Compression) -> Option<(BlobCodec, Codec)> {
    Some(match compression {
        Compression::None => return None,
        Compression::Lz4 => (BlobCodec::Lz4, Codec::Lz4),
        Compression::Zstd { level } => (BlobCodec::Zstd, Codec::Zstd { level }),
        Compression::Deflate { level } => {
            let level = Level::new(level).unwrap_or(Level::DEFAULT);
            (BlobCodec::Deflate, Codec::Deflate { framing: Framing::Raw, level })
        }
    })
}

/// Returns the setting that compresses as a blob was compressed, at the default level.
fn compression_of(codec: BlobCodec) -> Compression {
    match codec {
        BlobCodec::Deflate => Compression::Deflate { level: Compression::DEFLATE_LEVEL },
        BlobCodec::Lz4 => Compression::Lz4,
        BlobCodec::Zstd => Compression::Zstd { level: Compression::ZSTD_LEVEL },
    }
}

/// Content of a blob.
pub struct ExpandedBlob {
    /// Blocks of the blob.
    pub data: Buf,
    /// Setting that compresses alike.
    pub compression: Compression,
}

impl BlobCodecs {
    /// Compresses whole blocks to the stored bytes of a blob; `None` if that saves no sector.
    pub fn compress(&self, compression: Compression, blocks: &[u8]) -> Option<Vec<u8>> {
        let (format, codec) = codec_of(compression)?;
        debug_assert!(blocks.len().is_multiple_of(BLOCK) && !blocks.is_empty());
        let mut packed = self.packed.borrow_mut();
        let needed = codec.bound(blocks.len());
        if packed.len() < needed {
            packed.resize(needed, 0);
        }
        let length = self.compressor.borrow_mut().compress(codec, blocks, &mut packed).ok()?;
        stored_bytes(format, blocks.len(), &packed[..length])
    }

    /// Expands the stored bytes of a blob.
    ///
    /// # Errors
    /// Description of what is malformed.
    pub fn expand(&self, stored: &[u8]) -> std::result::Result<ExpandedBlob, String> {
        let (header, data) = BlobHeader::decode(stored).map_err(|error| error.to_string())?;
        let mut out = BufMut::zeroed(usize::from(header.blocks) * BLOCK);
        self.expand_to(&header, data, &mut out)?;
        Ok(ExpandedBlob { data: out.freeze(), compression: compression_of(header.codec) })
    }

    /// Expands all blocks of a blob.
    fn expand_to(&self, header: &BlobHeader, data: &[u8], out: &mut [u8]) -> std::result::Result<(), String> {
        let (_, codec) = codec_of(compression_of(header.codec)).expect("every codec of a blob compresses");
        let done = self.decompressor.borrow_mut().decompress(codec, data, out).map_err(|error| error.to_string())?;
        if done.produced != out.len() {
            return Err(format!("it has {} bytes instead of {}", done.produced, out.len()));
        }
        Ok(())
    }

    /// Expands the stored bytes of a blob up to the end of block `blocks.end - 1`, further if the format demands it. Passes
    /// what was expanded to `note`, and returns the blocks in `blocks`, in a buffer of `buffer`.
    ///
    /// # Errors
    /// Description of what is malformed.
    pub fn expand_blocks(
        &self,
        stored: &[u8],
        blocks: Range<usize>,
        buffer: impl FnOnce(usize) -> BufMut,
        note: impl FnOnce(&[u8]),
    ) -> std::result::Result<Buf, String> {
        let (header, data) = BlobHeader::decode(stored).map_err(|error| error.to_string())?;
        let count = usize::from(header.blocks);
        if blocks.end > count {
            return Err(format!("it has {count} blocks only"));
        }
        // Only LZ4's decoder stops in between.
        let is_part = header.codec == BlobCodec::Lz4 && blocks.end < count;
        let expanded = if is_part { blocks.end } else { count };
        let expand = |out: &mut [u8]| match is_part {
            true => expand_lz4_front(data, out).map_err(|error| error.to_string()),
            false => self.expand_to(&header, data, out),
        };
        let range = blocks.start * BLOCK..blocks.end * BLOCK;
        if blocks.len() > COPIED_BLOCKS_MAX {
            let mut out = buffer(expanded);
            out.set_len(expanded * BLOCK);
            expand(&mut out)?;
            note(&out);
            return Ok(out.freeze().slice(range));
        }
        let mut memory = self.expanded.borrow_mut();
        if memory.len() < expanded * BLOCK {
            memory.resize(expanded * BLOCK, 0);
        }
        let front = &mut memory[..expanded * BLOCK];
        expand(front)?;
        note(front);
        let mut out = buffer(blocks.len());
        out.extend_from_slice(&front[range]);
        Ok(out.freeze())
    }
}

/// Returns the stored bytes of a blob of `len` bytes of blocks, whose compressed data is `packed`; `None` if that saves no
/// sector.
pub fn stored_bytes(codec: BlobCodec, len: usize, packed: &[u8]) -> Option<Vec<u8>> {
    let size = (BLOB_HEADER + packed.len()).next_multiple_of(SECTOR);
    if size >= len {
        return None;
    }
    let header = BlobHeader { codec, blocks: (len / BLOCK) as u8, length: packed.len() as u32 };
    let mut stored = Vec::with_capacity(size);
    stored.extend_from_slice(&header.encode());
    stored.extend_from_slice(packed);
    stored.resize(size, 0);
    Some(stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_round_trips_and_saves_a_sector_or_nothing_is_stored() {
        let codecs = BlobCodecs::default();
        let text = include_bytes!("blobs.rs").repeat(20);
        let mut noise = vec![0; 4096];
        let mut state = 7u64;
        for byte in &mut noise {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        for setting in ["lz4", "zstd:1", "zstd:3", "deflate:1", "deflate:6"] {
            let setting: Compression = setting.parse().expect(setting);
            for blocks in [1, 2, 31, 32] {
                let data = &text[..blocks * BLOCK];
                let stored = codecs.compress(setting, data).expect("text shrinks");
                assert!(stored.len().is_multiple_of(SECTOR) && stored.len() < data.len(), "{setting}");
                let blob = codecs.expand(&stored).expect("whole");
                assert!(blob.data[..] == *data, "{setting}, {blocks} blocks");
                // Damage anywhere is an error or other content, never a panic.
                for at in 0..stored.len().min(200) {
                    let mut bad = stored.clone();
                    bad[at] ^= 0x55;
                    let _ = codecs.expand(&bad);
                }
            }
            assert_eq!(codecs.compress(setting, &noise), None, "{setting}");
        }
        assert_eq!(codecs.compress(Compression::None, &text[..BLOCK]), None);
    }
}
