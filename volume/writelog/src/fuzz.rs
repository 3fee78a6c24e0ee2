//! Fuzz targets: all decoders of a medium's bytes.

use std::ops::{Range, RangeFrom};

use crate::format::{
    BLOCK_MAGIC, BlockHeader, ENTRY_LEN, EntryRecord, LOG_SIZE_LEAST, LogDirectory, LogSuperblock, MAGIC, SHELF_MAGIC,
    SUPER_LEN, VERSION, VERSION_MEMBERS, decode_word, reseal,
};
use crate::replication::hello::PeerHello;
use crate::replication::wire::{
    ReplicaAnswer, ReplicaRequest, decode_answers, decode_group, encode_answers, encode_group,
};

/// Decodes the bytes as each structure; decoded structures must round-trip.
pub fn decode(bytes: &[u8]) {
    if let Ok(superblock) = LogSuperblock::decode(bytes) {
        assert_eq!(LogSuperblock::decode(&superblock.encode()), Ok(superblock));
    }
    if let Ok(directory) = LogDirectory::decode(bytes) {
        assert_eq!(LogDirectory::decode(&directory.encode()), Ok(directory));
    }
    let Some((head, rest)) = bytes.split_first_chunk::<16>() else { return };
    let tag = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let seq = u64::from(u32::from_le_bytes([head[4], head[5], head[6], head[7]]));
    if let Ok(entry) = EntryRecord::decode(rest.get(..64).unwrap_or_default(), tag, seq) {
        assert_eq!(EntryRecord::decode(&entry.encode(tag), tag, seq), Ok(entry));
    }
    let _ = decode_word(seq << 7, tag);
    let unit = [512, 1024, 2048, 4096, 64][usize::from(head[8]) % 5];
    if let Some(header) = BlockHeader::peek(rest, tag, unit) {
        let _ = header.entries(rest, tag, unit, 1 + u64::from(head[9]) * 100);
    }
}

/// Decodes the bytes as what a primary and its replicas say to each other; decoded messages must round-trip.
pub fn decode_messages(bytes: &[u8]) {
    for data in [0, bytes.len()] {
        if let Ok(requests) = decode_group(bytes, data) {
            let parts: Vec<_> = requests.iter().map(|(request, len)| (request, *len)).collect();
            assert_eq!(decode_group(&encode_group(&parts), data).as_ref(), Ok(&requests));
        }
    }
    if let Ok(answers) = decode_answers(bytes) {
        assert_eq!(decode_answers(&encode_answers(&answers)).as_ref(), Ok(&answers));
    }
    if let Ok(request) = ReplicaRequest::decode(bytes) {
        assert_eq!(ReplicaRequest::decode(&request.encode()), Ok(request));
    }
    if let Ok(answer) = ReplicaAnswer::decode(bytes) {
        assert_eq!(ReplicaAnswer::decode(&answer.encode()), Ok(answer));
    }
    if let Ok(hello) = PeerHello::decode(bytes) {
        assert_eq!(PeerHello::decode(&hello.encode()), Ok(hello));
    }
}

/// Tag of the log that resealed entries and blocks belong to.
const TAG: u32 = 9;
/// Location of an entry, a directory and an append block in the fuzzer's bytes.
const ENTRY: Range<usize> = 1024..1024 + ENTRY_LEN;
const DIRECTORY: Range<usize> = 1024 + ENTRY_LEN..2048;
const BLOCK: RangeFrom<usize> = 2048..;

/// Decodes bytes whose magic numbers, tags and checksums are corrected first, so that the code behind these checks is
/// reached: a superblock in all of the 4096 bytes, and within it an entry, a directory and an append block.
pub fn decode_sealed(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    bytes.resize(SUPER_LEN, 0);
    sealed_entry(&bytes[ENTRY]);
    sealed_directory(&bytes[DIRECTORY]);
    sealed_block(&bytes[BLOCK]);
    sealed_superblock(&bytes);
}

/// Returns whether the bytes were accepted, like the functions that follow.
fn sealed_superblock(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    bytes[..8].copy_from_slice(MAGIC);
    // Either version, as the fuzzer likes.
    let version = if bytes[8] == VERSION_MEMBERS as u8 { VERSION_MEMBERS } else { VERSION };
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    reseal(&mut bytes, 12);
    let Ok(superblock) = LogSuperblock::decode(&bytes) else { return false };
    assert_eq!(LogSuperblock::decode(&superblock.encode()), Ok(superblock));
    true
}

fn sealed_entry(bytes: &[u8]) -> bool {
    let mut entry = [0; ENTRY_LEN];
    entry.copy_from_slice(bytes);
    mark_entry(&mut entry, 5);
    let Ok(record) = EntryRecord::decode(&entry, TAG, 5) else { return false };
    assert_eq!(EntryRecord::decode(&record.encode(TAG), TAG, 5), Ok(record));
    true
}

fn mark_entry(entry: &mut [u8], seq: u64) {
    entry[16..24].copy_from_slice(&seq.to_le_bytes());
    entry[52..56].copy_from_slice(&TAG.to_le_bytes());
    reseal(entry, 60);
}

fn sealed_directory(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    bytes[..8].copy_from_slice(SHELF_MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let Ok(len) = LogDirectory::encoded_len(&bytes) else { return false };
    let Some(sealed) = bytes.get_mut(..len) else { return false };
    reseal(sealed, 12);
    let Ok(directory) = LogDirectory::decode(&bytes) else { return false };
    assert_eq!(LogDirectory::decode(&directory.encode()).as_ref(), Ok(&directory));
    let (size, limit) = (LOG_SIZE_LEAST, Some(1 << 40));
    if let Some(start) = directory.room_for(size, limit) {
        assert!(directory.logs.iter().all(|log| start + size <= log.start || log.start + log.size <= start));
    }
    true
}

fn sealed_block(bytes: &[u8]) -> bool {
    let (choice, mut bytes) = (bytes[4], bytes.to_vec());
    let unit = 512 << (choice % 4);
    let ring = 1 + u64::from(choice) * 100;
    bytes[..4].copy_from_slice(&BLOCK_MAGIC.to_le_bytes());
    bytes[4..8].copy_from_slice(&TAG.to_le_bytes());
    let Some(header) = BlockHeader::peek(&bytes, TAG, unit) else { return false };
    let Some(sealed) = bytes.get_mut(..header.head_len()) else { return false };
    for (seq, entry) in (header.first_seq..).zip(sealed[ENTRY_LEN..].chunks_exact_mut(ENTRY_LEN)) {
        mark_entry(entry, seq);
    }
    reseal(sealed, 60);
    let Ok(entries) = header.entries(sealed, TAG, unit, ring) else { return false };
    let mut again = vec![0; header.head_len()];
    header.encode(TAG, &entries, &mut again);
    assert_eq!(BlockHeader::peek(&again, TAG, unit), Some(header));
    assert_eq!(header.entries(&again, TAG, unit, ring), Ok(entries));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_of_the_fuzzer_reach_what_is_behind_the_checksums() {
        let padded = |seed: &[u8]| {
            let mut bytes = seed.to_vec();
            bytes.resize(SUPER_LEN, 0);
            bytes
        };
        assert!(sealed_superblock(&padded(include_bytes!("../../../fuzz/seeds/writelog_sealed/superblock"))));
        assert!(sealed_superblock(&padded(include_bytes!("../../../fuzz/seeds/writelog_sealed/superblock-members"))));
        let encrypted = include_bytes!("../../../fuzz/seeds/writelog_sealed/superblock-encrypted");
        assert!(sealed_superblock(&padded(encrypted)));
        let seed = padded(include_bytes!("../../../fuzz/seeds/writelog_sealed/structures-encrypted"));
        assert!(sealed_entry(&seed[ENTRY]) && sealed_block(&seed[BLOCK]));
        let seed = padded(include_bytes!("../../../fuzz/seeds/writelog_sealed/structures"));
        assert!(sealed_entry(&seed[ENTRY]));
        assert!(sealed_directory(&seed[DIRECTORY]));
        assert!(sealed_block(&seed[BLOCK]));
    }

    #[test]
    fn the_seeds_of_messages_are_messages() {
        let requests: [&[u8]; 5] = [
            include_bytes!("../../../fuzz/seeds/writelog_messages/adopt-encrypted"),
            include_bytes!("../../../fuzz/seeds/writelog_messages/create"),
            include_bytes!("../../../fuzz/seeds/writelog_messages/adopt"),
            include_bytes!("../../../fuzz/seeds/writelog_messages/append"),
            include_bytes!("../../../fuzz/seeds/writelog_messages/heartbeat"),
        ];
        assert!(requests.iter().all(|bytes| ReplicaRequest::decode(bytes).is_ok()));
        let answers: [&[u8]; 2] = [
            include_bytes!("../../../fuzz/seeds/writelog_messages/done"),
            include_bytes!("../../../fuzz/seeds/writelog_messages/refused"),
        ];
        assert!(answers.iter().all(|bytes| ReplicaAnswer::decode(bytes).is_ok()));
        let group = include_bytes!("../../../fuzz/seeds/writelog_messages/group");
        assert!(decode_group(group, 0).is_ok());
        let answers = include_bytes!("../../../fuzz/seeds/writelog_messages/group-answer");
        assert!(decode_answers(answers).is_ok());
        assert!(PeerHello::decode(include_bytes!("../../../fuzz/seeds/writelog_messages/hello")).is_ok());
    }
}
