//! Header encodings of snapshots and of the parent of a clone.

use std::time::Duration;

use forebay_block::SnapId;

use super::{CephReader, CephWriter};
use crate::info::SnapshotInfo;

/// Parent of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) pool: i64,
    pub(crate) namespace: String,
    pub(crate) image: String,
    pub(crate) snap: SnapId,
    /// Overlap of the head in bytes; `None` if only snapshots still need the parent.
    pub(crate) overlap: Option<u64>,
}

impl Parent {
    /// Decodes the value of the key `parent`.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::read(&mut CephReader::new(bytes))
    }

    fn read(reader: &mut CephReader<'_>) -> Option<Self> {
        let mut value = reader.versioned(2)?;
        let body = &mut value.body;
        let pool = body.i64()?;
        let namespace = if value.version >= 2 { body.string()? } else { String::new() };
        let (image, snap) = (body.string()?, SnapId(body.u64()?));
        let overlap = if value.version >= 2 { body.optional(CephReader::u64)? } else { Some(body.u64()?) };
        Some(Self { pool, namespace, image, snap, overlap })
    }

    /// Encodes the value of the key `parent`, in the format version of `like`: clients older than the newer version
    /// may still use it.
    pub(crate) fn encode_like(&self, like: &[u8]) -> Vec<u8> {
        if like.first() == Some(&1) {
            let body = CephWriter::new().i64(self.pool).string(&self.image).u64(self.snap.0);
            return CephWriter::new().versioned(1, 1, body.u64(self.overlap.unwrap_or(0))).done();
        }
        let body = CephWriter::new().i64(self.pool).string(&self.namespace).string(&self.image).u64(self.snap.0);
        let body = match self.overlap {
            Some(overlap) => body.u8(1).u64(overlap),
            None => body.u8(0),
        };
        CephWriter::new().versioned(2, 2, body).done()
    }

    /// Returns whether the entry names a parent: older clusters keep an empty one after a flatten.
    pub(crate) fn is_there(&self) -> bool {
        self.pool >= 0 && !self.image.is_empty()
    }
}

/// Stored snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) id: SnapId,
    pub(crate) name: String,
    /// Size of the image at the snapshot, in bytes.
    pub(crate) size: u64,
    /// Parent at the snapshot, in the older format that stores one per snapshot.
    pub(crate) parent: Option<Parent>,
    /// Set if protected from removal.
    pub(crate) protected: bool,
    /// Flags, like those of an image: 1, its object map is invalid.
    pub(crate) flags: u64,
    /// Set if a user created it; others belong to groups, to the trash or to mirroring.
    pub(crate) by_user: bool,
    /// Time of creation since 1970-01-01T00:00:00Z, if known.
    pub(crate) created: Option<Duration>,
    /// Number of clones recorded in the snapshot itself (v2 clones).
    pub(crate) children: u32,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: Option<u64>,
}

impl Snapshot {
    /// Decodes the value of a snapshot's key.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut value = CephReader::new(bytes).versioned(8)?;
        let body = &mut value.body;
        let (version, older) = (value.version, value.compat < 8);
        let (id, name, size) = (SnapId(body.u64()?), body.string()?, body.u64()?);
        if older {
            body.u64()?;
        }
        let parent = if older && version >= 2 { Some(Parent::read(body)?).filter(Parent::is_there) } else { None };
        let protected = version >= 3 && body.u8()? == 2;
        let flags = if version >= 4 { body.u64()? } else { 0 };
        let by_user = if version >= 5 { body.versioned(u8::MAX)?.body.u32()? == 0 } else { true };
        let created = if version >= 6 { Some(body.time()?).filter(|time| !time.is_zero()) } else { None };
        let children = if version >= 7 { body.u32()? } else { 0 };
        let overlap = if version >= 8 { body.optional(CephReader::u64)? } else { None };
        let overlap = overlap.or(parent.as_ref().and_then(|parent| parent.overlap));
        Some(Self { id, name, size, parent, protected, flags, by_user, created, children, overlap })
    }
}

impl Snapshot {
    /// Returns the public description.
    pub(crate) fn info(&self) -> SnapshotInfo {
        SnapshotInfo {
            id: self.id.0,
            name: self.name.clone(),
            size: self.size,
            protected: self.protected,
            created: self.created,
            by_user: self.by_user,
            children: self.children,
        }
    }
}

/// Decodes the name in the trash entry of an image; `None` if it is malformed.
pub(crate) fn decode_trashed_name(bytes: &[u8]) -> Option<String> {
    let mut body = CephReader::new(bytes).versioned(u8::MAX)?.body;
    // Source of the entry.
    body.u8()?;
    body.string()
}

/// Decodes the group in an image's header: its pool and id; `None` if it is malformed.
pub(crate) fn decode_group(bytes: &[u8]) -> Option<(i64, String)> {
    let mut body = CephReader::new(bytes).versioned(1)?.body;
    Some((body.i64()?, body.string()?))
}

/// Encodes the input of `rbd.remove_child`, which removes a v1 clone: a list in a pool object.
pub(crate) fn encode_remove_child(parent: &Parent, child: &str) -> Vec<u8> {
    CephWriter::new().i64(parent.pool).string(&parent.image).u64(parent.snap.0).string(child).done()
}

/// Encodes the input of `rbd.child_detach`, which removes a v2 clone: a list in the parent's header.
pub(crate) fn encode_detach_child(snap: SnapId, pool: i64, namespace: &str, child: &str) -> Vec<u8> {
    let body = CephWriter::new().i64(pool).string(child).string(namespace);
    CephWriter::new().u64(snap.0).versioned(2, 1, body).done()
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    /// Golden bytes stored by `rbd clone` 16.2.
    #[test]
    fn a_parent_of_rbd_byte_for_byte() {
        let bytes = unhex(
            "0202 2d000000 0100000000000000 00000000 0c000000 313031356664626137316564 0500000000000000 01 0000a00000000000",
        );
        let parent = Parent::decode(&bytes).expect("readable");
        let expected = Parent {
            pool: 1,
            namespace: String::new(),
            image: "1015fdba71ed".into(),
            snap: SnapId(5),
            overlap: Some(10 << 20),
        };
        assert_eq!(parent, expected);
        assert_eq!(parent.encode_like(&bytes), bytes);
        for at in 0..bytes.len() {
            assert_eq!(Parent::decode(&bytes[..at]), None);
        }
        let older =
            unhex("0101 28000000 0100000000000000 0c000000 313031356664626137316564 0500000000000000 0000a00000000000");
        assert_eq!(Parent::decode(&older), Some(expected.clone()));
        assert_eq!(expected.encode_like(&older), older);
    }

    /// Golden bytes stored by `rbd snap create` 16.2, of a clone and of its parent.
    #[test]
    fn snapshots_of_rbd() {
        let of_clone = unhex(
            "0808 3e000000 0600000000000000 02000000 6373 0000a00000000000 00 0000000000000000 0101 04000000 00000000
             3fb9016b4a40191f 00000000 01 0000a00000000000",
        );
        let snapshot = Snapshot::decode(&of_clone).expect("readable");
        assert_eq!((snapshot.id, &snapshot.name[..], snapshot.size), (SnapId(6), "cs", 10 << 20));
        assert_eq!((snapshot.overlap, snapshot.protected, snapshot.by_user), (Some(10 << 20), false, true));
        let protected = unhex(
            "0808 36000000 0500000000000000 02000000 7331 0000a00000000000 02 0000000000000000 0101 04000000 00000000
             3cb9016bfae3911b 01000000 00",
        );
        let snapshot = Snapshot::decode(&protected).expect("readable");
        assert_eq!((snapshot.id, snapshot.protected, snapshot.children, snapshot.overlap), (SnapId(5), true, 1, None));
        for at in 0..protected.len() {
            assert_eq!(Snapshot::decode(&protected[..at]), None);
        }
    }

    /// Golden bytes stored by `rbd trash mv rbd/t` 16.2.
    #[test]
    fn a_name_in_the_trash_of_rbd() {
        let bytes = unhex("0201 17000000 00 01000000 74 a898046b 247b3d12 a898046b 247b3d12 00");
        assert_eq!(decode_trashed_name(&bytes).as_deref(), Some("t"));
        for at in 0..bytes.len() {
            assert_eq!(decode_trashed_name(&bytes[..at]), None);
        }
    }

    /// Golden bytes stored by `rbd group image add` 16.2.
    #[test]
    fn a_group_of_rbd() {
        let bytes = unhex("0101 18000000 0100000000000000 0c000000 313139353662386234353637");
        assert_eq!(decode_group(&bytes), Some((1, "11956b8b4567".into())));
        for at in 0..bytes.len() {
            assert_eq!(decode_group(&bytes[..at]), None);
        }
    }

    #[test]
    fn an_older_snapshot_has_its_own_parent() {
        let parent = CephWriter::new().i64(3).string("abc").u64(7).u64(4096);
        let body = CephWriter::new().u64(9).string("s").u64(8192).u64(1).versioned(1, 1, parent).u8(0).u64(1);
        let snapshot = Snapshot::decode(&CephWriter::new().versioned(4, 1, body).done()).expect("readable");
        assert_eq!((snapshot.flags, snapshot.overlap), (1, Some(4096)));
        assert_eq!(snapshot.parent.map(|parent| (parent.pool, parent.image)), Some((3, "abc".into())));
    }
}
