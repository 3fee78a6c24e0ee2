//! Entries: what a batch says happened.  Replaying them in order over a checkpoint gives the state again.
//!
//! `payload` and `at` place data within the batch's payload: in blocks for data, in bytes for metadata blobs, which
//! are packed.

use super::{Malformed, Put, Reader, malformed};

/// Longest object name and namespace in bytes.
pub const NAME_MAX: usize = 1024;
/// Longest key of an object's map in bytes.
pub const KEY_MAX: usize = 1024;
/// Longest value of an object's map in bytes.
pub const VALUE_MAX: usize = 4 << 20;
/// Longest value that lies in the entry itself.
pub const VALUE_INLINE_MAX: usize = 1024;
/// Most snapshots that one clone stands for.
pub const CLONE_SNAPS_MAX: usize = 400;

const HEAD: usize = 4;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// An object with a new number came to be.
    Create {
        /// Its number.
        oid: u64,
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// Whole blocks were written.
    Write {
        /// Object.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Where the blocks lie in the payload, in blocks.
        payload: u32,
        /// The object's size after it, in bytes.
        size: u64,
        /// The object's version after it.
        version: u64,
        /// CRC32C of each block.
        crcs: Vec<u32>,
    },
    /// Blocks were given up (or, with none, only size and version changed).
    Unmap {
        /// Object.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Blocks.
        count: u32,
        /// The object's size after it, in bytes.
        size: u64,
        /// The object's version after it.
        version: u64,
    },
    /// The head was removed; the whole object, if it has no clones.
    Remove {
        /// Object.
        oid: u64,
        /// The object's version after it.
        version: u64,
    },
    /// The head's state was kept as a clone, whose number is `seq`.
    Clone {
        /// Object.
        oid: u64,
        /// The newest snapshot number that the object has seen.
        seq: u64,
        /// The snapshots that the clone stands for, newest first; none: only `seq` changed.
        snaps: Vec<u64>,
    },
    /// A clone stands for fewer snapshots; for none: it is gone.
    CloneSnaps {
        /// Object.
        oid: u64,
        /// The clone's number.
        clone: u64,
        /// What is left.
        snaps: Vec<u64>,
    },
    /// The head became what a clone is.
    Rollback {
        /// Object.
        oid: u64,
        /// The clone's number.
        clone: u64,
        /// The object's version after it.
        version: u64,
    },
    /// A key was set.
    KvSet {
        /// Object.
        oid: u64,
        /// The clone's number, or `u64::MAX` for the head.
        of: u64,
        /// Key.
        key: Vec<u8>,
        /// Value.
        value: Vec<u8>,
    },
    /// A key was set to a value that lies in the payload.
    KvSetLong {
        /// Object.
        oid: u64,
        /// The clone's number, or `u64::MAX` for the head.
        of: u64,
        /// Key.
        key: Vec<u8>,
        /// Place in the payload, in bytes.
        at: u32,
        /// Bytes of the value.
        len: u32,
        /// CRC32C of the value.
        crc: u32,
    },
    /// A key was removed.
    KvRemove {
        /// Object.
        oid: u64,
        /// The clone's number, or `u64::MAX` for the head.
        of: u64,
        /// Key.
        key: Vec<u8>,
    },
    /// The cleaner moved blocks; each place that still refers to the old block refers to the new one.
    Relocate {
        /// Object.
        oid: u64,
        /// First block within the object.
        start: u32,
        /// Where the blocks lie in the payload, in blocks.
        payload: u32,
        /// Block number on the device where the first one lay before.
        old: u64,
        /// CRC32C of each block.
        crcs: Vec<u32>,
    },
    /// A snapshot number was taken.
    SnapAllocate {
        /// The number.
        snap: u64,
    },
    /// A snapshot number was given up; its clones are going.
    SnapRemove {
        /// The number.
        snap: u64,
        /// All its clones are gone, the number needs no more attention.
        done: bool,
    },
    /// A map page, of the checkpoint in progress.
    Page {
        /// Object.
        oid: u64,
        /// The clone's number, or `u64::MAX` for the head.
        of: u64,
        /// Which page.
        index: u32,
        /// Place in the payload, in bytes.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// A node of the tree, of the checkpoint in progress.
    Node {
        /// 0 for a leaf.
        level: u8,
        /// Place in the payload, in bytes.
        at: u32,
        /// Bytes.
        len: u32,
        /// Its first key.
        key: Vec<u8>,
    },
    /// The segment table, of the checkpoint in progress.
    Segments {
        /// Place in the payload, in bytes.
        at: u32,
        /// Bytes.
        len: u32,
    },
}

impl Entry {
    fn kind(&self) -> u8 {
        match self {
            Entry::Create { .. } => 1,
            Entry::Write { .. } => 2,
            Entry::Unmap { .. } => 3,
            Entry::Remove { .. } => 4,
            Entry::Clone { .. } => 5,
            Entry::CloneSnaps { .. } => 6,
            Entry::Rollback { .. } => 7,
            Entry::KvSet { .. } => 8,
            Entry::KvSetLong { .. } => 9,
            Entry::KvRemove { .. } => 10,
            Entry::Relocate { .. } => 11,
            Entry::SnapAllocate { .. } => 12,
            Entry::SnapRemove { .. } => 13,
            Entry::Page { .. } => 14,
            Entry::Node { .. } => 15,
            Entry::Segments { .. } => 16,
        }
    }

    /// Encoded size of a `Write` or `Relocate` of that many blocks, in bytes.
    pub const fn write_size(blocks: usize) -> usize {
        HEAD + 32 + 4 * blocks
    }

    /// Appends it to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start_at = out.len();
        out.put_u8(self.kind());
        out.put_u8(0);
        out.put_u16(0);
        match self {
            Entry::Create { oid, namespace, name } => {
                out.put_u64(*oid);
                out.put_u16(namespace.len() as u16);
                out.put_u16(name.len() as u16);
                out.put(namespace.as_bytes());
                out.put(name.as_bytes());
            }
            Entry::Write { oid, start, payload, size, version, crcs } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*payload);
                out.put_u64(*size);
                out.put_u64(*version);
                crcs.iter().for_each(|&crc| out.put_u32(crc));
            }
            Entry::Unmap { oid, start, count, size, version } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*count);
                out.put_u64(*size);
                out.put_u64(*version);
            }
            Entry::Remove { oid, version } => {
                out.put_u64(*oid);
                out.put_u64(*version);
            }
            Entry::Clone { oid, seq, snaps } | Entry::CloneSnaps { oid, clone: seq, snaps } => {
                out.put_u64(*oid);
                out.put_u64(*seq);
                snaps.iter().for_each(|&snap| out.put_u64(snap));
            }
            Entry::Rollback { oid, clone, version } => {
                out.put_u64(*oid);
                out.put_u64(*clone);
                out.put_u64(*version);
            }
            Entry::KvSet { oid, of, key, value } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u16(key.len() as u16);
                out.put(key);
                out.put(value);
            }
            Entry::KvSetLong { oid, of, key, at, len, crc } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u32(*at);
                out.put_u32(*len);
                out.put_u32(*crc);
                out.put(key);
            }
            Entry::KvRemove { oid, of, key } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put(key);
            }
            Entry::Relocate { oid, start, payload, old, crcs } => {
                out.put_u64(*oid);
                out.put_u32(*start);
                out.put_u32(*payload);
                out.put_u64(*old);
                out.put_u64(0);
                crcs.iter().for_each(|&crc| out.put_u32(crc));
            }
            Entry::SnapAllocate { snap } => out.put_u64(*snap),
            Entry::SnapRemove { snap, done } => {
                out.put_u64(*snap);
                out.put_u8(u8::from(*done));
            }
            Entry::Page { oid, of, index, at, len } => {
                out.put_u64(*oid);
                out.put_u64(*of);
                out.put_u32(*index);
                out.put_u32(*at);
                out.put_u32(*len);
            }
            Entry::Node { level, at, len, key } => {
                out.put_u8(*level);
                out.put_u32(*at);
                out.put_u32(*len);
                out.put(key);
            }
            Entry::Segments { at, len } => {
                out.put_u32(*at);
                out.put_u32(*len);
            }
        }
        let len = u16::try_from(out.len() - start_at).expect("an entry fits a header");
        out[start_at + 2..start_at + 4].copy_from_slice(&len.to_le_bytes());
    }

    /// All entries of a header.
    pub fn decode_all(mut bytes: &[u8]) -> Result<Vec<Entry>, Malformed> {
        let mut entries = Vec::new();
        while !bytes.is_empty() {
            let mut head = Reader::new(bytes, "entry");
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

    fn decode(kind: u8, bytes: &[u8]) -> Result<Entry, Malformed> {
        let mut r = Reader::new(bytes, "entry");
        let entry = match kind {
            1 => {
                let oid = r.u64()?;
                let (space, name) = (usize::from(r.u16()?), usize::from(r.u16()?));
                if space > NAME_MAX || name > NAME_MAX || name == 0 {
                    return malformed("entry: an object's name is too long or empty");
                }
                Entry::Create { oid, namespace: r.text(space)?.into(), name: r.text(name)?.into() }
            }
            2 => {
                let (oid, start, payload) = (r.u64()?, r.u32()?, r.u32()?);
                let (size, version) = (r.u64()?, r.u64()?);
                Entry::Write { oid, start, payload, size, version, crcs: rest_u32(&mut r)? }
            }
            3 => {
                let (oid, start, count) = (r.u64()?, r.u32()?, r.u32()?);
                Entry::Unmap { oid, start, count, size: r.u64()?, version: r.u64()? }
            }
            4 => Entry::Remove { oid: r.u64()?, version: r.u64()? },
            5 => Entry::Clone { oid: r.u64()?, seq: r.u64()?, snaps: rest_u64(&mut r)? },
            6 => Entry::CloneSnaps { oid: r.u64()?, clone: r.u64()?, snaps: rest_u64(&mut r)? },
            7 => Entry::Rollback { oid: r.u64()?, clone: r.u64()?, version: r.u64()? },
            8 => {
                let (oid, of) = (r.u64()?, r.u64()?);
                let key = usize::from(r.u16()?);
                Entry::KvSet { oid, of, key: key_of(r.bytes(key)?)?, value: rest(&mut r)? }
            }
            9 => {
                let (oid, of, at, len, crc) = (r.u64()?, r.u64()?, r.u32()?, r.u32()?, r.u32()?);
                if len as usize > VALUE_MAX {
                    return malformed(format!("entry: a value of {len} bytes"));
                }
                Entry::KvSetLong { oid, of, at, len, crc, key: key_of(&rest(&mut r)?)? }
            }
            10 => Entry::KvRemove { oid: r.u64()?, of: r.u64()?, key: key_of(&rest(&mut r)?)? },
            11 => {
                let (oid, start, payload, old) = (r.u64()?, r.u32()?, r.u32()?, r.u64()?);
                r.u64()?;
                Entry::Relocate { oid, start, payload, old, crcs: rest_u32(&mut r)? }
            }
            12 => Entry::SnapAllocate { snap: r.u64()? },
            13 => Entry::SnapRemove { snap: r.u64()?, done: r.u8()? != 0 },
            14 => Entry::Page { oid: r.u64()?, of: r.u64()?, index: r.u32()?, at: r.u32()?, len: r.u32()? },
            15 => Entry::Node { level: r.u8()?, at: r.u32()?, len: r.u32()?, key: rest(&mut r)? },
            16 => Entry::Segments { at: r.u32()?, len: r.u32()? },
            other => return malformed(format!("entry: kind {other}, which this program does not know")),
        };
        r.end()?;
        Ok(entry)
    }
}

fn rest(r: &mut Reader<'_>) -> Result<Vec<u8>, Malformed> {
    let left = r.left();
    Ok(r.bytes(left)?.to_vec())
}

fn key_of(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    if bytes.len() > KEY_MAX { malformed(format!("entry: a key of {} bytes", bytes.len())) } else { Ok(bytes.to_vec()) }
}

fn rest_u32(r: &mut Reader<'_>) -> Result<Vec<u32>, Malformed> {
    (0..r.left() / 4).map(|_| r.u32()).collect()
}

fn rest_u64(r: &mut Reader<'_>) -> Result<Vec<u64>, Malformed> {
    (0..r.left() / 8).map(|_| r.u64()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_round_trips() {
        let entries = vec![
            Entry::Create { oid: 1, namespace: "ns".into(), name: "rbd_data.1".into() },
            Entry::Write { oid: 1, start: 2, payload: 3, size: 4, version: 5, crcs: vec![6, 7] },
            Entry::Unmap { oid: 1, start: 2, count: 3, size: 4, version: 5 },
            Entry::Remove { oid: 1, version: 9 },
            Entry::Clone { oid: 1, seq: 8, snaps: vec![8, 7] },
            Entry::CloneSnaps { oid: 1, clone: 8, snaps: vec![] },
            Entry::Rollback { oid: 1, clone: 8, version: 3 },
            Entry::KvSet { oid: 1, of: u64::MAX, key: b"k".to_vec(), value: b"v".to_vec() },
            Entry::KvSetLong { oid: 1, of: u64::MAX, key: b"k".to_vec(), at: 2, len: 5000, crc: 1 },
            Entry::KvRemove { oid: 1, of: u64::MAX, key: b"k".to_vec() },
            Entry::Relocate { oid: 1, start: 2, payload: 3, old: 4, crcs: vec![5] },
            Entry::SnapAllocate { snap: 3 },
            Entry::SnapRemove { snap: 3, done: true },
            Entry::Page { oid: 1, of: u64::MAX, index: 2, at: 3, len: 4 },
            Entry::Node { level: 1, at: 2, len: 3, key: b"key".to_vec() },
            Entry::Segments { at: 1, len: 2 },
        ];
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| entry.encode(&mut bytes));
        assert_eq!(Entry::decode_all(&bytes), Ok(entries));
        for len in 0..bytes.len() {
            // Cut anywhere: an error or fewer entries, never a panic.
            let _ = Entry::decode_all(&bytes[..len]);
        }
    }

    #[test]
    fn write_size_is_exact() {
        let entry = Entry::Write { oid: 1, start: 2, payload: 3, size: 4, version: 5, crcs: vec![6; 9] };
        let mut bytes = Vec::new();
        entry.encode(&mut bytes);
        assert_eq!(bytes.len(), Entry::write_size(9));
    }
}
