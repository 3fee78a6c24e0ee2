//! Map page: locations and checksums of the blocks of a part of an object.
//!
//! Encoded as runs of consecutive blocks: run kind (u8), first block within the page (u8), number of blocks minus one
//! (u8), block number on the device (u48), then a CRC32C for each block.  The kind byte lets a later version store
//! compressed and encrypted blobs at the device address.

use super::{MalformedStore, PAGE_BLOCKS, Put, StoreReader, malformed};

const KIND_PLAIN: u8 = 0;

/// Mapped block.  Packed to save memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(Rust, packed(4))]
pub struct MapSlot {
    /// Block number on the device; 0 for a hole.
    pub block: u64,
    /// CRC32C of the block.
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
        let len = (at..slots.len()).take_while(|&i| slots[i].block == first.block + (i - at) as u64).count();
        out.put_u8(KIND_PLAIN);
        out.put_u8(at as u8);
        out.put_u8((len - 1) as u8);
        out.put_u48(first.block);
        slots[at..at + len].iter().for_each(|slot| out.put_u32(slot.crc));
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
        if kind != KIND_PLAIN {
            return malformed(format!("map page: a run of kind {kind}, which this program does not know"));
        }
        let first = usize::from(reader.u8()?);
        let len = usize::from(reader.u8()?) + 1;
        let block = reader.u48()?;
        if first < slots.len() || first + len > PAGE_BLOCKS as usize || block == 0 {
            return malformed(format!("map page: a run of {len} at {first} to block {block}"));
        }
        slots.resize(first, MapSlot::default());
        for i in 0..len as u64 {
            slots.push(MapSlot { block: block + i, crc: reader.u32()? });
        }
    }
    reader.end()?;
    Ok(slots)
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
        fn junk_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
