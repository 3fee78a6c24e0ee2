//! Log entries: the changes recorded by a batch.  Replaying them in order on top of a checkpoint restores the state.
//!
//! `payload` and `at` are positions within the batch's payload: in blocks for plain data, in sectors for compressed data,
//! in bytes for metadata blobs, which are packed.

use super::blob::{check_location, is_blob_range};
use super::{MalformedStore, Put, StoreReader, malformed};

/// Maximum length of an object name and of a namespace, in bytes.
pub const NAME_MAX: usize = 1024;
/// Maximum length of a key in an object's key-value map, in bytes.
pub const KEY_MAX: usize = 1024;
/// Maximum length of a value in an object's key-value map, in bytes.
pub const VALUE_MAX: usize = 4 << 20;
/// Maximum length of a value stored in the entry itself, in bytes.
pub const VALUE_INLINE_MAX: usize = 1024;
/// Maximum number of snapshots that one clone represents.
pub const CLONE_SNAPS_MAX: usize = 400;

const HEAD: usize = 4;

/// Log entry: one recorded change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreEntry {
    /// Creation of an object with a new number.
    Create {
        /// Object number.
        oid: u64,
        /// Number of the key that its data is encrypted with; 0 for none.
        key: u64,
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// Write of whole blocks.
    Write {
        /// Object number.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Position of the blocks in the payload, in blocks.
        payload: u32,
        /// Object size after the change, in bytes.
        size: u64,
        /// Object version after the change.
        version: u64,
        /// CRC32C of each block.
        crcs: Vec<u32>,
    },
    /// Unmapping of blocks (with a count of 0, a change of size and version only).
    Unmap {
        /// Object number.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Number of blocks.
        count: u32,
        /// Object size after the change, in bytes.
        size: u64,
        /// Object version after the change.
        version: u64,
    },
    /// Removal of the head, or of the whole object if it has no clones.
    Remove {
        /// Object number.
        oid: u64,
        /// Object version after the change.
        version: u64,
    },
    /// Preservation of the head's state as a clone with id `seq`.
    Clone {
        /// Object number.
        oid: u64,
        /// Newest snapshot number that the object has seen.
        seq: u64,
        /// Snapshots that the clone represents, newest first; if empty, only `seq` changed.
        snaps: Vec<u64>,
    },
    /// Reduction of the snapshots that a clone represents; without any left, the clone is removed.
    CloneSnaps {
        /// Object number.
        oid: u64,
        /// Clone id.
        clone: u64,
        /// Remaining snapshots.
        snaps: Vec<u64>,
    },
    /// Rollback of the head to the state of a clone.
    Rollback {
        /// Object number.
        oid: u64,
        /// Clone id.
        clone: u64,
        /// Object version after the change.
        version: u64,
    },
    /// Setting of a key.
    KvSet {
        /// Object number.
        oid: u64,
        /// Clone id, or `u64::MAX` for the head.
        of: u64,
        /// Key of the pair.
        key: Vec<u8>,
        /// Value of the pair.
        value: Vec<u8>,
    },
    /// Setting of a key to a value stored in the payload.
    KvSetLong {
        /// Object number.
        oid: u64,
        /// Clone id, or `u64::MAX` for the head.
        of: u64,
        /// Key of the pair.
        key: Vec<u8>,
        /// Position in the payload, in bytes.
        at: u32,
        /// Length of the value in bytes.
        len: u32,
        /// CRC32C of the value.
        crc: u32,
    },
    /// Removal of a key.
    KvRemove {
        /// Object number.
        oid: u64,
        /// Clone id, or `u64::MAX` for the head.
        of: u64,
        /// Key of the pair.
        key: Vec<u8>,
    },
    /// Relocation of blocks by the cleaner; all remaining references to an old block then refer to the new one.
    Relocate {
        /// Object number.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Position of the blocks in the payload, in blocks.
        payload: u32,
        /// Previous location of the first block: block number on the device, or position within a blob.
        old: u64,
        /// CRC32C of each block.
        crcs: Vec<u32>,
    },
    /// Allocation of a snapshot number.
    SnapAllocate {
        /// Snapshot number.
        snap: u64,
    },
    /// Removal of a snapshot; its clones are trimmed.
    SnapRemove {
        /// Snapshot number.
        snap: u64,
        /// Set if all its clones are removed, so that trimming is complete.
        done: bool,
    },
    /// Map page, written by the checkpoint in progress.
    Page {
        /// Object number.
        oid: u64,
        /// Clone id, or `u64::MAX` for the head.
        of: u64,
        /// Page index.
        index: u32,
        /// Position in the payload, in bytes.
        at: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Tree node, written by the checkpoint in progress.
    Node {
        /// Level of the node; 0 for a leaf.
        level: u8,
        /// Position in the payload, in bytes.
        at: u32,
        /// Length in bytes.
        len: u32,
        /// First key of the node.
        key: Vec<u8>,
    },
    /// Segment table, written by the checkpoint in progress.
    Segments {
        /// Position in the payload, in bytes.
        at: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Write of blocks as a compressed blob.
    WriteBlob {
        /// Object number.
        oid: u64,
        /// Blocks and position of the blob.
        blob: StoredBlob,
        /// Object size after the change, in bytes.
        size: u64,
        /// Object version after the change.
        version: u64,
    },
    /// Relocation of blocks to a compressed blob by the cleaner; all remaining references to an old location then refer to
    /// the new one.
    RelocateBlob {
        /// Object number.
        oid: u64,
        /// Blocks and position of the blob.
        blob: StoredBlob,
        /// Previous location of the first block: block number on the device, or position within a blob.
        old: u64,
    },
    /// Setting of the data policy of the objects whose names begin with a prefix.
    Policy {
        /// Namespace of the objects.
        namespace: String,
        /// Prefix of the names; empty for the store's default.
        prefix: String,
        /// Encoded policy; empty if it is removed.
        policy: Vec<u8>,
    },
    /// Checkpoint record, an encoded [`CheckpointRecord`](super::record::CheckpointRecord).
    ///
    /// Encoded as a node of a level that no tree has, so that programs that do not know it skip it.
    Checkpoint {
        /// Encoded record.
        record: Vec<u8>,
    },
}

/// Compressed blob in the payload of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBlob {
    /// First block within the object.
    pub start: u32,
    /// Number of blocks.
    pub blocks: u8,
    /// Position in the payload, in sectors.
    pub payload: u32,
    /// Length in sectors.
    pub sectors: u8,
    /// CRC32C of the stored bytes.
    pub crc: u32,
}

impl StoredBlob {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(self.start);
        out.put_u32(self.payload);
        out.put_u32(self.crc);
        out.put_u8(self.blocks);
        out.put_u8(self.sectors);
        out.put_u16(0);
    }

    fn decode(r: &mut StoreReader<'_>) -> Result<Self, MalformedStore> {
        let (start, payload, crc) = (r.u32()?, r.u32()?, r.u32()?);
        let (blocks, sectors, flags) = (r.u8()?, r.u8()?, r.u16()?);
        if !is_blob_range(start, blocks.into()) || sectors == 0 || flags != 0 {
            let what = format!("{blocks} blocks at {start}, {sectors} sectors, flags {flags:#x}");
            return malformed(format!("entry: a blob of {what}"));
        }
        Ok(Self { start, blocks, payload, sectors, crc })
    }
}

/// Node level that denotes a checkpoint record.
const CHECKPOINT_LEVEL: u8 = u8::MAX;

impl StoreEntry {
    fn kind(&self) -> u8 {
        match self {
            StoreEntry::Create { key: 0, .. } => 1,
            StoreEntry::Create { .. } => 20,
            StoreEntry::Write { .. } => 2,
            StoreEntry::Unmap { .. } => 3,
            StoreEntry::Remove { .. } => 4,
            StoreEntry::Clone { .. } => 5,
            StoreEntry::CloneSnaps { .. } => 6,
            StoreEntry::Rollback { .. } => 7,
            StoreEntry::KvSet { .. } => 8,
            StoreEntry::KvSetLong { .. } => 9,
            StoreEntry::KvRemove { .. } => 10,
            StoreEntry::Relocate { .. } => 11,
            StoreEntry::SnapAllocate { .. } => 12,
            StoreEntry::SnapRemove { .. } => 13,
            StoreEntry::Page { .. } => 14,
            StoreEntry::Node { .. } | StoreEntry::Checkpoint { .. } => 15,
            StoreEntry::Segments { .. } => 16,
            StoreEntry::WriteBlob { .. } => 17,
            StoreEntry::RelocateBlob { .. } => 18,
            StoreEntry::Policy { .. } => 19,
        }
    }

    /// Returns the encoded size in bytes of a `Write` or `Relocate` of `blocks` blocks.
    pub const fn write_size(blocks: usize) -> usize {
        HEAD + 32 + 4 * blocks
    }

    /// Encoded size in bytes of a `WriteBlob`; a `RelocateBlob` is shorter.
    pub const BLOB_SIZE: usize = HEAD + 40;

    /// Appends the encoded entry to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start_at = out.len();
        out.put_u8(self.kind());
        out.put_u8(0);
        out.put_u16(0);
        match self {
            StoreEntry::Create { oid, key, namespace, name } => {
                out.put_u64(*oid);
                out.put_u16(namespace.len() as u16);
                out.put_u16(name.len() as u16);
                if *key != 0 {
                    out.put_u64(*key);
                }
                out.put(namespace.as_bytes());
                out.put(name.as_bytes());
            }
            StoreEntry::Write { oid, start, payload, size, version, crcs } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*payload);
                out.put_u64(*size);
                out.put_u64(*version);
                crcs.iter().for_each(|&crc| out.put_u32(crc));
            }
            StoreEntry::Unmap { oid, start, count, size, version } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*count);
                out.put_u64(*size);
                out.put_u64(*version);
            }
            StoreEntry::Remove { oid, version } => {
                out.put_u64(*oid);
                out.put_u64(*version);
            }
            StoreEntry::Clone { oid, seq, snaps } | StoreEntry::CloneSnaps { oid, clone: seq, snaps } => {
                out.put_u64(*oid);
                out.put_u64(*seq);
                snaps.iter().for_each(|&snap| out.put_u64(snap));
            }
            StoreEntry::Rollback { oid, clone, version } => {
                out.put_u64(*oid);
                out.put_u64(*clone);
                out.put_u64(*version);
            }
            StoreEntry::KvSet { oid, of, key, value } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u16(key.len() as u16);
                out.put(key);
                out.put(value);
            }
            StoreEntry::KvSetLong { oid, of, key, at, len, crc } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u32(*at);
                out.put_u32(*len);
                out.put_u32(*crc);
                out.put(key);
            }
            StoreEntry::KvRemove { oid, of, key } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put(key);
            }
            StoreEntry::Relocate { oid, start, payload, old, crcs } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*payload);
                out.put_u64(*old);
                out.put_u64(0);
                crcs.iter().for_each(|&crc| out.put_u32(crc));
            }
            StoreEntry::SnapAllocate { snap } => out.put_u64(*snap),
            StoreEntry::SnapRemove { snap, done } => {
                out.put_u64(*snap);
                out.put_u8(u8::from(*done));
            }
            StoreEntry::Page { oid, of, index, at, len } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u32(*index);
                out.put_u32(*at);
                out.put_u32(*len);
            }
            StoreEntry::Node { level, at, len, key } => {
                out.put_u8(*level);
                out.put_u32(*at);
                out.put_u32(*len);
                out.put(key);
            }
            StoreEntry::Segments { at, len } => {
                out.put_u32(*at);
                out.put_u32(*len);
            }
            StoreEntry::WriteBlob { oid, blob, size, version } => {
                out.put_u64(*oid);
                blob.encode(out);
                out.put_u64(*size);
                out.put_u64(*version);
            }
            StoreEntry::RelocateBlob { oid, blob, old } => {
                out.put_u64(*oid);
                blob.encode(out);
                out.put_u64(*old);
            }
            StoreEntry::Policy { namespace, prefix, policy } => {
                out.put_u16(namespace.len() as u16);
                out.put_u16(prefix.len() as u16);
                out.put(namespace.as_bytes());
                out.put(prefix.as_bytes());
                out.put(policy);
            }
            StoreEntry::Checkpoint { record } => {
                out.put_u8(CHECKPOINT_LEVEL);
                out.put_u64(0);
                out.put(record);
            }
        }
        let len = u16::try_from(out.len() - start_at).expect("an entry fits a header");
        out[start_at + 2..start_at + 4].copy_from_slice(&len.to_le_bytes());
    }

    /// Decodes all entries of a header.
    pub fn decode_all(mut bytes: &[u8]) -> Result<Vec<StoreEntry>, MalformedStore> {
        let mut entries = Vec::new();
        while !bytes.is_empty() {
            let mut head = StoreReader::new(bytes, "entry");
            let kind = head.u8()?;
            head.u8()?;
            let len = usize::from(head.u16()?);
            if len < HEAD || len > bytes.len() {
                return malformed(format!("entry: {len} bytes of {}", bytes.len()));
            }
            entries.push(Self::decode(kind, &bytes[HEAD..len])?);
            bytes = &bytes[len..];
        }
        Ok(entries)
    }

    fn decode(kind: u8, bytes: &[u8]) -> Result<StoreEntry, MalformedStore> {
        let mut r = StoreReader::new(bytes, "entry");
        let entry = match kind {
            1 | 20 => {
                let oid = r.u64()?;
                let (space, name) = (usize::from(r.u16()?), usize::from(r.u16()?));
                let key = if kind == 20 { r.u64()? } else { 0 };
                if kind == 20 && key == 0 {
                    return malformed("entry: an encrypted object without a key");
                }
                if space > NAME_MAX || name > NAME_MAX || name == 0 {
                    return malformed("entry: an object's name is too long or empty");
                }
                StoreEntry::Create { oid, key, namespace: r.text(space)?.into(), name: r.text(name)?.into() }
            }
            2 => {
                let (oid, start, payload) = (r.u64()?, r.u32()?, r.u32()?);
                let (size, version) = (r.u64()?, r.u64()?);
                StoreEntry::Write { oid, start, payload, size, version, crcs: rest_u32(&mut r)? }
            }
            3 => {
                let (oid, start, count) = (r.u64()?, r.u32()?, r.u32()?);
                StoreEntry::Unmap { oid, start, count, size: r.u64()?, version: r.u64()? }
            }
            4 => StoreEntry::Remove { oid: r.u64()?, version: r.u64()? },
            5 => StoreEntry::Clone { oid: r.u64()?, seq: r.u64()?, snaps: rest_u64(&mut r)? },
            6 => StoreEntry::CloneSnaps { oid: r.u64()?, clone: r.u64()?, snaps: rest_u64(&mut r)? },
            7 => StoreEntry::Rollback { oid: r.u64()?, clone: r.u64()?, version: r.u64()? },
            8 => {
                let (oid, of) = (r.u64()?, r.u64()?);
                let key = usize::from(r.u16()?);
                StoreEntry::KvSet { oid, of, key: key_of(r.bytes(key)?)?, value: rest(&mut r)? }
            }
            9 => {
                let (oid, of, at, len, crc) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?, r.u32()?);
                if len as usize > VALUE_MAX {
                    return malformed(format!("entry: a value of {len} bytes"));
                }
                StoreEntry::KvSetLong { oid, of, at, len, crc, key: key_of(&rest(&mut r)?)? }
            }
            10 => StoreEntry::KvRemove { oid: r.u64()?, of: r.u64()?, key: key_of(&rest(&mut r)?)? },
            11 => {
                let (oid, start, payload, old) = (r.u64()?, r.u32()?, r.u32()?, location(&mut r)?);
                r.u64()?;
                StoreEntry::Relocate { oid, start, payload, old, crcs: rest_u32(&mut r)? }
            }
            12 => StoreEntry::SnapAllocate { snap: r.u64()? },
            13 => StoreEntry::SnapRemove { snap: r.u64()?, done: r.u8()? != 0 },
            14 => StoreEntry::Page { oid: r.u64()?, of: r.u64()?, index: r.u32()?, at: r.u32()?, len: r.u32()? },
            15 => match (r.u8()?, r.u32()?, r.u32()?) {
                (CHECKPOINT_LEVEL, 0, 0) => StoreEntry::Checkpoint { record: rest(&mut r)? },
                (level, at, len) => StoreEntry::Node { level, at, len, key: rest(&mut r)? },
            },
            16 => StoreEntry::Segments { at: r.u32()?, len: r.u32()? },
            17 => {
                let (oid, blob) = (r.u64()?, StoredBlob::decode(&mut r)?);
                StoreEntry::WriteBlob { oid, blob, size: r.u64()?, version: r.u64()? }
            }
            18 => {
                let (oid, blob) = (r.u64()?, StoredBlob::decode(&mut r)?);
                StoreEntry::RelocateBlob { oid, blob, old: location(&mut r)? }
            }
            19 => {
                let (space, prefix) = (usize::from(r.u16()?), usize::from(r.u16()?));
                if space > NAME_MAX || prefix > NAME_MAX {
                    return malformed("entry: the prefix of a policy is too long");
                }
                let (namespace, prefix) = (r.text(space)?.into(), r.text(prefix)?.into());
                StoreEntry::Policy { namespace, prefix, policy: rest(&mut r)? }
            }
            other => return malformed(format!("entry: kind {other}, which this program does not know")),
        };
        r.end()?;
        Ok(entry)
    }
}

fn rest(r: &mut StoreReader<'_>) -> Result<Vec<u8>, MalformedStore> {
    let left = r.left();
    Ok(r.bytes(left)?.to_vec())
}

fn location(r: &mut StoreReader<'_>) -> Result<u64, MalformedStore> {
    let location = r.u64()?;
    check_location(location).map(|()| location)
}

fn key_of(bytes: &[u8]) -> Result<Vec<u8>, MalformedStore> {
    if bytes.len() > KEY_MAX { malformed(format!("entry: a key of {} bytes", bytes.len())) } else { Ok(bytes.to_vec()) }
}

fn rest_u32(r: &mut StoreReader<'_>) -> Result<Vec<u32>, MalformedStore> {
    (0..r.left() / 4).map(|_| r.u32()).collect()
}

fn rest_u64(r: &mut StoreReader<'_>) -> Result<Vec<u64>, MalformedStore> {
    (0..r.left() / 8).map(|_| r.u64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOB: StoredBlob = StoredBlob { start: 33, blocks: 31, payload: 9, sectors: 255, crc: 7 };

    #[test]
    fn every_kind_round_trips() {
        let entries = vec![
            StoreEntry::Create { oid: 1, key: 0, namespace: "ns".into(), name: "rbd_data.1".into() },
            StoreEntry::Create { oid: 1, key: 3, namespace: "ns".into(), name: "rbd_data.1".into() },
            StoreEntry::Write { oid: 1, start: 2, payload: 3, size: 4, version: 5, crcs: vec![6, 7] },
            StoreEntry::Unmap { oid: 1, start: 2, count: 3, size: 4, version: 5 },
            StoreEntry::Remove { oid: 1, version: 9 },
            StoreEntry::Clone { oid: 1, seq: 8, snaps: vec![8, 7] },
            StoreEntry::CloneSnaps { oid: 1, clone: 8, snaps: vec![] },
            StoreEntry::Rollback { oid: 1, clone: 8, version: 3 },
            StoreEntry::KvSet { oid: 1, of: u64::MAX, key: b"k".to_vec(), value: b"v".to_vec() },
            StoreEntry::KvSetLong { oid: 1, of: u64::MAX, key: b"k".to_vec(), at: 2, len: 5000, crc: 1 },
            StoreEntry::KvRemove { oid: 1, of: u64::MAX, key: b"k".to_vec() },
            StoreEntry::Relocate { oid: 1, start: 2, payload: 3, old: 4, crcs: vec![5] },
            StoreEntry::SnapAllocate { snap: 3 },
            StoreEntry::SnapRemove { snap: 3, done: true },
            StoreEntry::Page { oid: 1, of: u64::MAX, index: 2, at: 3, len: 4 },
            StoreEntry::Node { level: 1, at: 2, len: 3, key: b"key".to_vec() },
            StoreEntry::Segments { at: 1, len: 2 },
            StoreEntry::Checkpoint { record: vec![1; 224] },
            StoreEntry::WriteBlob { oid: 1, blob: BLOB, size: 4, version: 5 },
            StoreEntry::RelocateBlob { oid: 1, blob: BLOB, old: 1 << 63 | 1 << 52 | 1 << 5 },
            StoreEntry::Policy { namespace: "ns".into(), prefix: "rbd_data.1.".into(), policy: vec![1, 2] },
        ];
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| entry.encode(&mut bytes));
        assert_eq!(StoreEntry::decode_all(&bytes), Ok(entries));
        for len in 0..bytes.len() {
            // Truncation anywhere: an error or fewer entries, never a panic.
            let _ = StoreEntry::decode_all(&bytes[..len]);
        }
    }

    #[test]
    fn malformed_blobs_are_rejected() {
        let mut bytes = Vec::new();
        StoreEntry::WriteBlob { oid: 1, blob: BLOB, size: 4, version: 5 }.encode(&mut bytes);
        assert!(StoreEntry::decode_all(&bytes).is_ok());
        // First block, blocks, sectors, flags.
        for (at, value) in [(12, 34), (24, 0), (24, 32), (25, 0), (26, 1), (27, 1)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            assert!(StoreEntry::decode_all(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn write_size_is_exact() {
        let entry = StoreEntry::Write { oid: 1, start: 2, payload: 3, size: 4, version: 5, crcs: vec![6; 9] };
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        assert_eq!(bytes.len(), StoreEntry::write_size(9));
        bytes.clear();
        StoreEntry::WriteBlob { oid: 1, blob: BLOB, size: 4, version: 5 }.encode(&mut bytes);
        assert_eq!(bytes.len(), StoreEntry::BLOB_SIZE);
    }
}
