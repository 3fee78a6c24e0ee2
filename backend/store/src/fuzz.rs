//! Entry points for fuzzing: any bytes decode to a value or an error, and a decoded value survives re-encoding
//! unchanged.

use crate::blobs::BlobCodecs;
use crate::format::anchor::Anchor;
use crate::format::batch::BatchHeader;
use crate::format::blob::{BLOB_BLOCKS_MAX, BLOB_HEADER, BlobHeader};
use crate::format::entry::StoreEntry;
use crate::format::key_table::KeyTable;
use crate::format::node::Node;
use crate::format::onode::Onode;
use crate::format::page;
use crate::format::policy;
use crate::format::ranges::RangeTable;
use crate::format::record::CheckpointRecord;
use crate::format::superblock::StoreSuperblock;
use crate::format::{BLOCK, seal};

/// Returns a block with `data`, zero-padded, once unchanged and once with a valid checksum, so that field decoding is
/// reached.
fn blocks(data: &[u8], crc_at: usize) -> [Vec<u8>; 2] {
    let mut block = data.to_vec();
    block.resize(BLOCK, 0);
    let mut sealed = block.clone();
    seal(&mut sealed, crc_at);
    [block, sealed]
}

/// Decodes superblocks and checkpoint records.
pub fn superblock(data: &[u8]) {
    let _ = StoreSuperblock::decode(data);
    if let Ok(record) = CheckpointRecord::decode(data) {
        assert_eq!(CheckpointRecord::decode(&record.encode()), Ok(record));
    }
    for block in blocks(data, 12) {
        if let Ok(superblock) = StoreSuperblock::decode(&block) {
            assert_eq!(StoreSuperblock::decode(&superblock.encode()), Ok(superblock));
        }
    }
}

/// Decodes batch headers and their entries.
pub fn record(data: &[u8]) {
    let _ = BatchHeader::decode(data);
    for block in blocks(data, 8) {
        if let Ok(header) = BatchHeader::decode(&block) {
            let mut again = vec![0; BLOCK];
            header.encode(&mut again);
            assert_eq!(BatchHeader::decode(&again), Ok(header.clone()));
            entries(&header.entries);
        }
    }
    entries(data);
}

fn entries(data: &[u8]) {
    if let Ok(entries) = StoreEntry::decode_all(data) {
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| entry.encode(&mut bytes));
        assert_eq!(StoreEntry::decode_all(&bytes), Ok(entries));
    }
}

/// Expands compressed blobs.
pub fn blob(data: &[u8]) {
    if let Ok((header, packed)) = BlobHeader::decode(data) {
        assert_eq!(header.encode(), data[..BLOB_HEADER]);
        assert_eq!(packed.len(), header.length as usize);
    }
    if let Ok(blob) = BlobCodecs::default().expand(data) {
        assert!(blob.data.len().is_multiple_of(BLOCK) && blob.data.len() <= BLOB_BLOCKS_MAX as usize * BLOCK);
    }
}

/// Decodes anchors, key tables, range tables, tree nodes, data policies, object records and map pages.
pub fn checkpoint(data: &[u8]) {
    let store = data.get(16..24).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    for block in blocks(data, 8) {
        if let Ok(anchor) = Anchor::decode(&block, store) {
            assert_eq!(Anchor::decode(&anchor.encode(), store), Ok(anchor));
        }
    }
    let mut sealed = data.to_vec();
    if let Some(len) = data.get(12..16).map(|len| u32::from_le_bytes(len.try_into().expect("four bytes")) as usize)
        && (16..=data.len()).contains(&len)
    {
        seal(&mut sealed[..len], 8);
    }
    for table in [data, &sealed] {
        if let Ok(Some(table)) = KeyTable::decode(table, store) {
            assert_eq!(KeyTable::decode(&table.encode(store), store), Ok(Some(table)));
        }
        if let Ok(table) = RangeTable::decode(table) {
            assert_eq!(RangeTable::decode(&table.encode()), Ok(table));
        }
    }
    if let Ok(node) = Node::decode(data) {
        assert_eq!(Node::decode(&node.encode()), Ok(node));
    }
    if let Ok(onode) = Onode::decode(data) {
        assert_eq!(Onode::decode(&onode.encode()), Ok(onode));
    }
    if let Ok(policy) = policy::decode(data) {
        assert_eq!(policy::decode(&policy::encode(&policy)), Ok(policy));
    }
    if let Ok(slots) = page::decode(data) {
        let mut again = page::decode(&page::encode(&slots)).expect("what was encoded decodes");
        again.resize(slots.len(), page::MapSlot::default());
        assert_eq!(again, slots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_of_blobs_expand() {
        for seed in ["0", "1"] {
            let path = format!("{}/../../fuzz/seeds/store_blob/{seed}", env!("CARGO_MANIFEST_DIR"));
            let bytes = std::fs::read(&path).expect(&path);
            assert!(BlobCodecs::default().expand(&bytes).is_ok(), "{path}");
            blob(&bytes);
        }
    }
}
