//! Entry points for fuzzing: any bytes decode to metadata or nothing, and what is decoded survives encoding.

use crate::format::{BLOCK_LEN, CacheFormatError, ROWS_PER_BLOCK, Superblock, TableBlock};
use forebay_accel::crc32c::{crc32c, extend};

const INCARNATION: [u8; 16] = [7; 16];

/// Decodes bytes as a superblock and as a block of the table.
pub fn decode(data: &[u8]) {
    check(data);
    let mut block = data[..data.len().min(BLOCK_LEN)].to_vec();
    block.resize(BLOCK_LEN, 0);
    check(&block);
}

/// The same with correct checksums.
pub fn decode_sealed(data: &[u8]) {
    let mut block = data[..data.len().min(BLOCK_LEN)].to_vec();
    block.resize(BLOCK_LEN, 0);
    for crc in [crc32c as fn(&[u8]) -> u32, |bytes| extend(crc32c(&INCARNATION), bytes)] {
        block[12..16].fill(0);
        let sum = crc(&block);
        block[12..16].copy_from_slice(&sum.to_le_bytes());
        check(&block);
    }
}

fn check(bytes: &[u8]) {
    match Superblock::decode(bytes) {
        Ok(superblock) => assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock)),
        Err(error) => assert!(error != CacheFormatError::Empty || bytes.iter().all(|&byte| byte == 0)),
    }
    let number = bytes.get(4..8).map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")));
    if let Some(block) = TableBlock::decode(bytes, number, &INCARNATION) {
        assert_eq!(block.rows.len(), ROWS_PER_BLOCK as usize);
        assert_eq!(TableBlock::decode(&block.encode(number, &INCARNATION), number, &INCARNATION), Some(block));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_panic(head in 0usize..3, data in prop::collection::vec(any::<u8>(), 0..5000)) {
            let magic: &[u8] = [b"FBYRDCH\x01\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", b"RCTB".as_slice(), b""][head];
            let bytes = [magic, &data].concat();
            super::decode(&bytes);
            super::decode_sealed(&bytes);
        }
    }
}
