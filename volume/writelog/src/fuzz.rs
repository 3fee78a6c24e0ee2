//! What fuzz targets call: everything that decodes bytes of a medium.

use crate::format::{BlockHeader, Directory, EntryRecord, SUPER_LEN, Superblock, decode_word};

/// Decodes anything as anything; what decodes must encode to the same again.
pub fn decode(bytes: &[u8]) {
    if let Ok(superblock) = Superblock::decode(bytes) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    }
    if let Ok(directory) = Directory::decode(bytes) {
        assert_eq!(Directory::decode(&directory.encode()), Ok(directory));
    }
    let Some((head, rest)) = bytes.split_first_chunk::<16>() else { return };
    let tag = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let seq = u64::from(u32::from_le_bytes([head[4], head[5], head[6], head[7]]));
    if let Ok(entry) = EntryRecord::decode(rest.get(..64).unwrap_or_default(), tag, seq) {
        assert_eq!(EntryRecord::decode(&entry.encode(tag), tag, seq), Ok(entry));
    }
    let _ = decode_word(seq << 7, tag);
    let unit = 512 << (head[8] % 4);
    if let Some(header) = BlockHeader::peek(rest, tag, unit) {
        let _ = header.entries(rest, tag, unit, 1 + u64::from(head[9]) * 100);
    }
}

/// The same for bytes whose checksums are made right first, so that what is behind them is reached.
pub fn decode_sealed(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    bytes.resize(SUPER_LEN, 0);
    bytes[..8].copy_from_slice(crate::format::MAGIC);
    bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
    crate::format::reseal(&mut bytes, 12);
    if let Ok(superblock) = Superblock::decode(&bytes) {
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    }
    let mut entry: [u8; 64] = bytes[1024..1088].try_into().unwrap_or([0; 64]);
    entry[16..24].copy_from_slice(&5_u64.to_le_bytes());
    entry[52..56].copy_from_slice(&9_u32.to_le_bytes());
    crate::format::reseal(&mut entry, 60);
    if let Ok(record) = EntryRecord::decode(&entry, 9, 5) {
        assert_eq!(EntryRecord::decode(&record.encode(9), 9, 5), Ok(record));
    }
}
