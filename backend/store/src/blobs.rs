//! Compressed blobs in memory: references and their counts, reading, and the codecs.

use std::cell::{Cell, RefCell};

use forebay_accel::compress::{Codec, Compressor, Decompressor, Framing, Level};
use forebay_block::{Buf, BufList, BufMut, Compression, Error, ErrorKind, Result};

use crate::core::{Core, corrupt};
use crate::crypt::{BlockCipher, UsePlace};
use crate::format::blob::{BLOB_HEADER, BlobCodec, BlobHeader, BlobSlot, SECTOR, SECTORS_A_BLOCK};
use crate::format::entry::StoredBlob;
use crate::format::page::MapSlot;
use crate::format::{BLOCK, BLOCK64};
use crate::index::MetadataIndex;
use crate::keys;
use crate::map::Map;
use crate::media::Media;
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

/// Codecs with their memory, used by one reactor.
#[derive(Default)]
pub struct BlobCodecs {
    compressor: RefCell<Compressor>,
    decompressor: RefCell<Decompressor>,
}

fn codec_of(compression: Compression) -> Option<(BlobCodec, Codec)> {
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
        let mut stored = vec![0; blocks.len() - SECTOR];
        let length = self.compressor.borrow_mut().compress(codec, blocks, &mut stored[BLOB_HEADER..]).ok()?;
        let end = BLOB_HEADER + length;
        stored.truncate(end.next_multiple_of(SECTOR));
        stored[end..].fill(0);
        let header = BlobHeader { codec: format, blocks: (blocks.len() / BLOCK) as u8, length: length as u32 };
        stored[..BLOB_HEADER].copy_from_slice(&header.encode());
        Some(stored)
    }

    /// Expands the stored bytes of a blob.
    ///
    /// # Errors
    /// Description of what is malformed.
    pub fn expand(&self, stored: &[u8]) -> std::result::Result<ExpandedBlob, String> {
        let (header, data) = BlobHeader::decode(stored).map_err(|error| error.to_string())?;
        let compression = compression_of(header.codec);
        let (_, codec) = codec_of(compression).expect("every codec of a blob compresses");
        let mut out = BufMut::zeroed(usize::from(header.blocks) * BLOCK);
        let done =
            self.decompressor.borrow_mut().decompress(codec, data, &mut out).map_err(|error| error.to_string())?;
        if done.produced != out.len() {
            return Err(format!("it has {} bytes instead of {}", done.produced, out.len()));
        }
        Ok(ExpandedBlob { data: out.freeze(), compression })
    }
}

impl Media {
    /// Decrypts the stored bytes of a blob, whose segment is pinned or has live data.
    ///
    /// # Errors
    /// See [`use_place`](Self::use_place).
    pub async fn open_blob(&self, slot: BlobSlot, cipher: &BlockCipher, stored: &mut [u8]) -> Result<()> {
        let block = self.use_place(slot.sector / SECTORS_A_BLOCK).await?;
        let at = block.at * SECTORS_A_BLOCK + slot.sector % SECTORS_A_BLOCK;
        cipher.open_blob(UsePlace { at, ..block }, stored);
        Ok(())
    }

    /// Reads and verifies blocks of a blob, from `slot` on, one for each of `crcs`: in one read of the device, and with one
    /// decompression.
    pub async fn read_from_blob(
        &self,
        slot: BlobSlot,
        crcs: &[u32],
        cipher: Option<&BlockCipher>,
        what: impl Fn() -> String,
    ) -> Result<BufList> {
        let mut cached = BufList::new();
        if self.cache.take_front(slot.location(), crcs, &mut cached) == crcs.len() {
            return Ok(cached);
        }
        let ptr = slot.ptr(crcs[0]);
        let damaged = |why: &str| {
            let path = self.device.name();
            let text = format!("{}, compressed in {} bytes at byte {} of {path}: {why}", what(), ptr.len, ptr.addr);
            tracing::error!("{text}");
            Error::new(ErrorKind::Corrupt, text)
        };
        let _pin = self.pin(ptr.addr);
        let mut stored = match self.read_blob(ptr, "a compressed blob").await {
            Ok(stored) => stored,
            Err(error) if error.kind() == ErrorKind::Corrupt => return Err(damaged("checksum mismatch")),
            Err(error) => return Err(error),
        };
        if let Some(cipher) = cipher {
            self.open_blob(slot, cipher, &mut stored).await?;
        }
        let blob = self.codecs.expand(&stored).map_err(|why| damaged(&why))?;
        let blocks = blob.data.len() / BLOCK;
        let from = usize::from(slot.index);
        if from + crcs.len() > blocks {
            return Err(damaged(&format!("it has {blocks} blocks only")));
        }
        let all = vec![crcs[0]; blocks];
        self.cache.put(slot.at(0).location(), &all, std::iter::once(&blob.data[..]));
        Ok(BufList::from(blob.data).slice(from * BLOCK..(from + crcs.len()) * BLOCK))
    }
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
