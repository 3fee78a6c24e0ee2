//! Encodings of groups of images: keys and values of `rbd_group_header.ID`, and the group's reference in an image's header.

use forebay_block::SnapId;

use super::{CephReader, CephWriter};
use crate::format::is_valid_id;

/// Prefix of the keys of images, before 16 hexadecimal digits of their pool and their id.
pub(crate) const IMAGE_KEYS: &[u8] = b"image_";
/// Prefix of the keys of snapshots, before their id.
pub(crate) const SNAPSHOT_KEYS: &[u8] = b"snapshot_";

/// Returns the key of an image in a group.
pub(crate) fn member_key(pool: i64, id: &str) -> Vec<u8> {
    [IMAGE_KEYS, format!("{pool:016x}_{id}").as_bytes()].concat()
}

/// Returns pool and id of the image of a key; `None` if it is none's.
pub(crate) fn member_of_key(key: &[u8]) -> Option<(i64, String)> {
    let text = str::from_utf8(key.strip_prefix(IMAGE_KEYS)?).ok()?;
    let (pool, id) = text.split_once('_')?;
    let pool = i64::from_str_radix(pool, 16).ok()?;
    is_valid_id(id).then(|| (pool, id.to_owned()))
}

/// Returns the key of a snapshot in a group.
pub(crate) fn snapshot_key(id: &str) -> Vec<u8> {
    [SNAPSHOT_KEYS, id.as_bytes()].concat()
}

/// Returns the key of a snapshot's place in the order of creation, which newer versions of Ceph store.
pub(crate) fn order_key(id: &str) -> Vec<u8> {
    format!("snap_order_{id}").into_bytes()
}

/// Link between an image and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkState {
    /// The image's header names the group.
    Attached = 0,
    /// The image is being added or removed.
    Incomplete = 1,
}

impl LinkState {
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        match bytes.first() {
            Some(0) => Self::Attached,
            _ => Self::Incomplete,
        }
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        vec![self as u8]
    }
}

/// Encodes the reference to a group in an image's header.
pub(crate) fn encode_group(pool: i64, group: &str) -> Vec<u8> {
    CephWriter::new().versioned(1, 1, CephWriter::new().i64(pool).string(group)).done()
}

/// Decodes the group in an image's header: its pool and id; `None` if it is malformed.
pub(crate) fn decode_group(bytes: &[u8]) -> Option<(i64, String)> {
    let mut body = CephReader::new(bytes).versioned(1)?.body;
    Some((body.i64()?, body.string()?))
}

/// Snapshot of an image that is part of a group's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SnapshotPart {
    pub(crate) pool: i64,
    /// Id of the image.
    pub(crate) image: String,
    pub(crate) snap: SnapId,
}

/// Version of the encoding of a group's snapshot.
const VERSION: u8 = 1;

/// Stored snapshot of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupSnapshot {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Set once all images have their snapshots, until the first is removed.
    pub(crate) is_complete: bool,
    pub(crate) parts: Vec<SnapshotPart>,
    /// Version of the encoding.
    pub(crate) version: u8,
    /// Fields of newer versions.
    pub(crate) rest: Vec<u8>,
}

impl GroupSnapshot {
    /// Returns an incomplete snapshot without parts.
    pub(crate) fn new(id: String, name: &str) -> Self {
        let (name, version) = (name.to_owned(), VERSION);
        Self { id, name, is_complete: false, parts: Vec::new(), version, rest: Vec::new() }
    }

    /// Encodes the value of the snapshot's key.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = CephWriter::new().string(&self.id).string(&self.name).u8(self.is_complete.into());
        body = body.u32(self.parts.len() as u32);
        for part in &self.parts {
            let spec = CephWriter::new().i64(part.pool).string(&part.image).u64(part.snap.0);
            body = body.append(CephWriter::new().versioned(1, 1, spec));
        }
        CephWriter::new().versioned(self.version, VERSION, body.raw(&self.rest)).done()
    }

    /// Decodes the value of the snapshot's key; `None` if it is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let value = CephReader::new(bytes).versioned(VERSION)?;
        let (version, mut body) = (value.version, value.body);
        let (id, name, state, count) = (body.string()?, body.string()?, body.u8()?, body.u32()?);
        let mut parts = Vec::new();
        for _ in 0..count {
            let mut part = body.versioned(1)?.body;
            parts.push(SnapshotPart { pool: part.i64()?, image: part.string()?, snap: SnapId(part.u64()?) });
        }
        Some(Self { id, name, is_complete: state == 1, parts, version, rest: body.rest().to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    /// Golden bytes stored by `rbd group` 16.2.
    #[test]
    fn a_group_of_rbd_byte_for_byte() {
        let bytes = unhex(
            "0101 67000000 0c000000 313033663662386234353637 02000000 7331 01 02000000
             0101 20000000 0200000000000000 0c000000 313032313938666264383461 0400000000000000
             0101 20000000 0200000000000000 0c000000 313032333837653937346564 0500000000000000",
        );
        let part = |image: &str, snap| SnapshotPart { pool: 2, image: image.into(), snap: SnapId(snap) };
        let expected = GroupSnapshot {
            id: "103f6b8b4567".into(),
            name: "s1".into(),
            is_complete: true,
            parts: vec![part("102198fbd84a", 4), part("102387e974ed", 5)],
            version: 1,
            rest: Vec::new(),
        };
        assert_eq!(GroupSnapshot::decode(&bytes), Some(expected.clone()));
        assert_eq!(expected.encode(), bytes);
        let reference = unhex("0101 18000000 0200000000000000 0c000000 313032353662386234353637");
        assert_eq!(decode_group(&reference), Some((2, "10256b8b4567".into())));
        assert_eq!(encode_group(2, "10256b8b4567"), reference);
        let key = b"image_0000000000000002_102198fbd84a";
        assert_eq!(member_of_key(key), Some((2, "102198fbd84a".into())));
        assert_eq!(member_key(2, "102198fbd84a"), key);
        assert_eq!(snapshot_key("103f6b8b4567"), b"snapshot_103f6b8b4567");
    }

    #[test]
    fn malformed_groups_are_none() {
        let parts = vec![SnapshotPart { pool: 1, image: "a".into(), snap: SnapId(7) }];
        let snapshot = GroupSnapshot { parts, ..GroupSnapshot::new("1".into(), "s") };
        let newer = GroupSnapshot { version: 2, rest: vec![1, 2, 3], ..snapshot.clone() };
        assert_eq!(GroupSnapshot::decode(&newer.encode()), Some(newer), "fields of newer versions are kept");
        let bytes = snapshot.encode();
        assert_eq!(GroupSnapshot::decode(&bytes), Some(snapshot));
        for len in 0..bytes.len() {
            assert_eq!(GroupSnapshot::decode(&bytes[..len]), None, "{len} bytes");
        }
        // A count that the bytes cannot hold takes no memory.
        let mut many = CephWriter::new().string("1").string("s").u8(1).u32(u32::MAX);
        many = CephWriter::new().versioned(1, 1, many);
        assert_eq!(GroupSnapshot::decode(&many.done()), None);
        for key in ["image_", "image_2", "image_x_a", "image_0000000000000002_", "image_0000000000000002_a/b", "other"]
        {
            assert_eq!(member_of_key(key.as_bytes()), None, "{key}");
        }
    }
}
