//! Map page: locations and checksums of the blocks of a part of an object.
//!
//! Encoded as runs of consecutive blocks: run kind (u8), first block within the page (u8), number of blocks minus one
//! (u8), then, for plain blocks, the block number on the device (u48) and a CRC32C for each block; for blocks of a
//! compressed blob, the location of the first one (u64) and the CRC32C of the blob.

use super::blob::{self, BlobSlot};
use super::{MalformedStore, PAGE_BLOCKS, Put, StoreReader, malformed};

const KIND_PLAIN: u8 = 0;
const KIND_BLOB: u8 = 1;

/// Mapped block.  Packed to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(Rust, packed(4))]
pub struct MapSlot {
    /// Location: block number on the device, or a position within a blob ([`BlobSlot`]); 0 for a hole.
    pub block: u64,
    /// CRC32C of the block, or of the blob's stored bytes.
    pub crc: u32,
}

/// Encodes the slots of a page, at most [`PAGE_BLOCKS`].
pub fn encode(slots: &[MapSlot]) -> Vec<u8> {
    assert!(slots.len() <= PAGE_BLOCKS as usize);
    let mut out = Vec::with_capacity(4 * slots.len() + 64);
    out.put_u16(0);
    let mut runs = 0u16;
    let mut at = 0;
    while at < slots.len() {
        let first = slots[at];
        if first.block == 0 {
            at += 1;
            continue;
        }
        let is_blob = BlobSlot::of(first.block).is_some();
        let goes_on = |i: usize| {
            let slot = slots[i];
            blob::follows(first.block, (i - at) as u64, slot.block) && (!is_blob || slot.crc == first.crc)
        };
        let len = (at..slots.len()).take_while(|&i| goes_on(i)).count();
        out.put_u8(if is_blob { KIND_BLOB } else { KIND_PLAIN });
        out.put_u8(at as u8);
        out.put_u8((len - 1) as u8);
        if is_blob {
            out.put_u64(first.block);
            out.put_u32(first.crc);
        } else {
            out.put_u48(first.block);
            slots[at..at + len].iter().for_each(|slot| out.put_u32(slot.crc));
        }
        runs += 1;
        at += len;
    }
    out[..2].copy_from_slice(&runs.to_le_bytes());
    out
}

/// Decodes a page; slots after the last mapped one are omitted.
pub fn decode(bytes: &[u8]) -> Result<Vec<MapSlot>, MalformedStore> {
    let mut reader = StoreReader::new(bytes, "map page");
    let mut slots = Vec::new();
    for _ in 0..reader.u16()? {
        let kind = reader.u8()?;
        if kind > KIND_BLOB {
            return malformed(format!("map page: a run of kind {kind}, which this program does not know"));
        }
        let first = usize::from(reader.u8()?);
        let len = usize::from(reader.u8()?) + 1;
        let block = if kind == KIND_BLOB { reader.u64()? } else { reader.u48()? };
        if first < slots.len() || first + len > PAGE_BLOCKS as usize || block == 0 {
            return malformed(format!("map page: a run of {len} at {first} to block {block}"));
        }
        slots.resize(first, MapSlot::default());
        if kind == KIND_BLOB {
            let crc = reader.u32()?;
            check_blob_run(block, first, len)?;
            slots.extend((0..len as u64).map(|i| MapSlot { block: block + i, crc }));
            continue;
        }
        for i in 0..len as u64 {
            slots.push(MapSlot { block: block + i, crc: reader.u32()? });
        }
    }
    reader.end()?;
    Ok(slots)
}

/// Checks a run of blocks of a blob.
fn check_blob_run(location: u64, first: usize, len: usize) -> Result<(), MalformedStore> {
    blob::check_location(location)?;
    let index = BlobSlot::of(location).map(|slot| usize::from(slot.index));
    let start = index.and_then(|index| first.checked_sub(index));
    match (index, start) {
        (Some(index), Some(start)) if blob::is_blob_range(start as u32, (index + len) as u32) => Ok(()),
        _ => malformed(format!("map page: {len} blocks of a blob at {first}, location {location:#x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(blocks in proptest::collection::vec(prop_oneof![Just(0u64), 1u64..20, any::<u64>().prop_map(|b| b >> 17)], 0..=128)) {
            let mut slots: Vec<MapSlot> = blocks.iter().map(|&block| MapSlot { block, crc: if block == 0 { 0 } else { block as u32 } }).collect();
            let bytes = encode(&slots);
            while slots.last().is_some_and(|slot| slot.block == 0) {
                slots.pop();
            }
            prop_assert_eq!(decode(&bytes), Ok(slots));
        }

        #[test]
        fn blobs_round_trip(windows in proptest::collection::vec((1u64..4, 1u8..4, 0u32..32, 0u32..40, any::<bool>()), 4)) {
            let mut slots = vec![MapSlot::default(); PAGE_BLOCKS as usize];
            for (window, (sector, sectors, from, count, plain)) in windows.into_iter().enumerate() {
                for i in from..32.min(from + count) {
                    let slot = BlobSlot { sector, sectors, index: (i - from) as u8 };
                    let at = window * 32 + i as usize;
                    slots[at] = match plain && i % 3 == 0 {
                        true => MapSlot { block: 7, crc: i },
                        false => MapSlot { block: slot.location(), crc: sector as u32 },
                    };
                }
            }
            let bytes = encode(&slots);
            while slots.last().is_some_and(|slot| slot.block == 0) {
                slots.pop();
            }
            prop_assert_eq!(decode(&bytes), Ok(slots));
        }

        #[test]
        fn junk_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
